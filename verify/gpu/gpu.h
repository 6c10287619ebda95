/* Packed matrices in GPU memory, reference products and times; shared by verify/gpu and
 * verify/bench. Private to verify/. */
#ifndef QT_VERIFY_GPU_GPU_H
#define QT_VERIFY_GPU_GPU_H

#include "verify/verify.h"

/* Returns value i of the random sequence of `seed`. */
static inline uint64_t gpu_random(uint64_t seed, uint64_t i)
{
    uint64_t state = seed + i * QT_SPLITMIX64_STEP;
    return qt_splitmix64(&state);
}

/* Same, uniform in [-1, 1). */
static inline float gpu_random_unit(uint64_t seed, uint64_t i)
{
    return (float)((double)(gpu_random(seed, i) >> 11) * 0x1p-52 - 1);
}

/* Fills dst with random FP16 numbers in [-size, size). */
int gpu_fill_random(struct qt_gpu *gpu, void *dst, size_t bytes, float size, struct qt_err *err);

/* Device memory that grows; growing loses the contents. All zero: empty. */
struct gpu_buffer {
    void *data;
    size_t bytes;
};
int gpu_buffer_need(struct gpu_buffer *b, struct qt_gpu *gpu, size_t bytes, struct qt_err *err);
void gpu_buffer_free(struct gpu_buffer *b, struct qt_gpu *gpu);

/* Bytes from one section to the next in a copy of a packed matrix. */
static inline size_t gpu_section_stride(size_t bytes)
{
    return qt_round_up(bytes, 256);
}

bool gpu_is_w4ax(const struct qt_packed *p);
enum qtool_w4ax_scales gpu_w4ax_scales_of(const struct qt_spec *spec);
/* Number of sections that products read; they are stored first. */
size_t gpu_sections(const struct qt_packed *p);

/* True if both have the same look-up table, or none. */
bool gpu_same_table(const struct qt_packed *a, const struct qt_packed *b);
/* True if quantization fits a table to each matrix. */
bool gpu_learns_table(const struct qt_spec *spec);

/* Copies in GPU memory of the sections of a packed matrix that products read. */
struct gpu_copies {
    char *base;
    size_t sections;
    size_t bytes;  /* packed bytes of one copy */
    size_t stride; /* bytes from one copy to the next */
    size_t count;
    struct qtool_matmul_weight *weight; /* [count] descriptors, or */
    struct qtool_w4ax_weight *w4ax;     /* [count]; the caller sets their `blocks` */
};
/* Returns how many copies of `bytes` a round of launches needs so that no copy is still in L2: 5
 * times the L2 size, at least 4 copies, at most 256 (data below 1/50 of L2 stays warm). */
size_t gpu_cold_count(const struct qt_gpu *gpu, size_t bytes);
/* Makes gpu_cold_count copies of p, which must have data. */
int gpu_copies_new(struct gpu_copies *out, struct qt_gpu *gpu, const struct qt_packed *p,
                   struct qt_err *err);
void gpu_copies_free(struct gpu_copies *c, struct qt_gpu *gpu);

/* FP16 weights for cuBLAS, gpu_cold_count copies. */
struct gpu_dense {
    char *weights; /* [count][n][k] */
    size_t n, k, bytes, count;
};
int gpu_dense_new(struct gpu_dense *out, struct qt_gpu *gpu, size_t n, size_t k,
                  struct qt_err *err);
void gpu_dense_free(struct gpu_dense *d, struct qt_gpu *gpu);

/* X, Y and workspace of the fused kernels; for w4ax also the quantized X. */
struct gpu_operands {
    struct gpu_buffer x, y, workspace;
    struct gpu_buffer codes, scale, sum;
};
void gpu_operands_free(struct gpu_operands *o, struct qt_gpu *gpu);
/* Grows the workspace to `bytes` and zeroes the part that must be zero before a run. */
int gpu_workspace_need(struct gpu_operands *o, struct qt_gpu *gpu, size_t bytes,
                       struct qt_err *err);

/* ---- weight_w4ax.c -------------------------------------------------------------------------- */

/* How the input of a w4ax matrix is quantized, with the kernels' arrays in GPU memory. */
struct gpu_w4ax_input {
    struct qtool_w4ax_input in;
    size_t blocks;      /* channel blocks (128 channels) */
    size_t token_bytes; /* bytes of the codes of a token */
    uint32_t *words;    /* [blocks], host copy of in.blocks */
    struct gpu_buffer words_buffer, order;
};
/* Data of a section; NULL: none of that name. */
const void *gpu_section_of(const struct qt_packed *p, const char *name);
/* How the input of a w4ax matrix is quantized; the caller frees *out, also after an error. */
int gpu_act_of(struct qt_act *out, const struct qt_packed *p, struct qt_err *err);
/* `in` without the arrays. */
struct qtool_w4ax_input gpu_w4ax_describe(const struct qt_act *a, bool packed);
/* Without smoothing factors: the activations must have them already. packed: see qtool_w4ax.h. */
int gpu_w4ax_input_new(struct gpu_w4ax_input *out, struct qt_gpu *gpu, const struct qt_act *a,
                       bool packed, struct qt_err *err);
void gpu_w4ax_input_free(struct gpu_w4ax_input *in, struct qt_gpu *gpu);

/* A synthetic input: every fifth channel block has 8 bits; channels in random order. */
int gpu_random_act(struct qt_act *out, const struct qt_spec *spec, size_t k, struct qt_err *err);

/* Number of scales of m tokens. */
size_t gpu_w4ax_scales(const struct gpu_w4ax_input *in, size_t m);

/* us[0]: microseconds of the product alone, cold; us[1]: of quantizing X (`dtype`) and the product.
 * cuBLAS as in gpu_time_with_cublas. */
int gpu_time_w4ax(double us[2], double *cublas_us, struct qt_gpu *gpu, const struct gpu_copies *c,
                  const struct qtool_w4ax_plan *plan, const struct gpu_w4ax_input *in,
                  enum qtool_dtype dtype, const struct gpu_dense *dense, struct gpu_operands *o,
                  struct qt_err *err);

/* ---- experts.c ------------------------------------------------------------------------------ */

enum { GPU_EXPERT_MATRICES = 3 }; /* gate, up, down */

/* The experts of a layer in GPU memory. */
struct gpu_experts {
    size_t experts;
    struct qt_packed *packed; /* [experts][GPU_EXPERT_MATRICES], filled and freed by the caller */
    struct qtool_matmul_weight *weight[GPU_EXPERT_MATRICES]; /* [experts] each */
    /* [experts] each: F32 [n] in GPU memory, owned by the caller; NULL: no bias */
    const float **bias[GPU_EXPERT_MATRICES];
    bool same_tables; /* of gate and up */
    void *table;      /* of qtool_moe.h */
    /* w4ax experts, in place of `weight`: gpu_experts_inputs. */
    struct qtool_w4ax_weight *w4ax[GPU_EXPERT_MATRICES]; /* [experts] each */
    struct gpu_w4ax_input input;                         /* of gate and up */
    struct qtool_w4ax_input *inner;                      /* [experts]: of down */
    struct gpu_buffer inner_words;                       /* [experts][channel blocks] */
    struct qtool_moe_w4ax described;
};
/* After an error, too, gpu_experts_free frees *out. */
int gpu_experts_new(struct gpu_experts *out, size_t experts, struct qt_err *err);
void gpu_experts_free(struct gpu_experts *e, struct qt_gpu *gpu);
/* Says how the inputs of w4ax experts are quantized; to be called before gpu_experts_place. inner:
 * [experts], of down, whose channels must come in their stored order. Channels have no factors. */
int gpu_experts_inputs(struct gpu_experts *e, struct qt_gpu *gpu, const struct qt_act *input,
                       const struct qt_act *inner, struct qt_err *err);
/* The same, read from e->packed. QT_E_UNSUPPORTED: not all matrices are w4ax, gate and up have
 * several inputs, their rows are permuted, or channels have factors. */
int gpu_experts_read_inputs(struct gpu_experts *e, struct qt_gpu *gpu, struct qt_err *err);
/* Bytes of GPU memory for the table and the sections of e->packed. */
size_t gpu_experts_bytes(const struct gpu_experts *e);
/* Writes the table, and with `upload` the sections, to memory[gpu_experts_bytes], which stays the
 * caller's. QT_E_UNSUPPORTED: these experts have no grouped product. */
int gpu_experts_place(struct gpu_experts *e, struct qt_gpu *gpu, void *memory, bool upload,
                      struct qt_err *err);
struct qtool_moe_layer gpu_experts_layer(const struct gpu_experts *e);

/* ---- reference.c ---------------------------------------------------------------------------- */

enum {
    REFERENCE_TOKENS = 128,
    REFERENCE_SETS = 3, /* random FP16, heavy-tailed FP16, heavy-tailed BF16 */
};

/* Activations and their reference products. */
struct reference_set {
    const char *name;
    enum qtool_dtype dtype;
    uint16_t *x;                  /* [REFERENCE_TOKENS][k] */
    float *y;                     /* [REFERENCE_TOKENS][n] */
    float *rounded;               /* same with rounded weights, or NULL */
    double rms[REFERENCE_TOKENS]; /* root mean square of a token's outputs */
};
struct reference {
    size_t n, k;
    struct reference_set set[REFERENCE_SETS];
    size_t wrong[2]; /* weights that differ from `dequantized`: FP16, BF16 */
};
/* Makes activations and reference products of p. unit > 0: also products of weights rounded to FP16
 * in units of `unit`. dequantized: p as the kernel dequantized it to FP16 and to BF16, [n][k] each,
 * in GPU memory; compared with the decoded weights. */
int reference_new(struct reference *out, const struct qt_packed *p, uint64_t seed, double unit,
                  struct qt_backend *cpu, struct qt_gpu *gpu, void *const dequantized[2],
                  struct qt_err *err);
void reference_free(struct reference *t);
/* Makes the activations only, scaled so that products with weights of RMS weight_rms are about
 * 1. */
int reference_activations(struct reference *out, size_t n, size_t k, double weight_rms,
                          uint64_t seed, struct qt_err *err);

static inline float gpu_to_f32(uint16_t bits, enum qtool_dtype dtype)
{
    return dtype == QTOOL_F16 ? qt_f16_to_f32(bits) : qt_bf16_to_f32(bits);
}

static inline uint16_t gpu_from_f32(float v, enum qtool_dtype dtype)
{
    return dtype == QTOOL_F16 ? qt_f32_to_f16(v) : qt_f32_to_bf16(v);
}

/* ---- times ---------------------------------------------------------------------------------- */

/* All times are microseconds per launch with cold weights. o->x and o->y must be large enough. */
int gpu_time_floor(double *us, struct qt_gpu *gpu, const struct gpu_copies *c, struct qt_err *err);
int gpu_time_cublas(double *us, struct qt_gpu *gpu, const struct gpu_dense *dense, size_t m,
                    const struct gpu_operands *o, struct qt_err *err);
/* Times works[n], alternating with cuBLAS of m tokens (dense NULL: without cuBLAS). The caller has
 * launched each of them once. */
int gpu_time_with_cublas(double *us, double *cublas_us, struct qt_gpu *gpu,
                         const struct qt_gpu_work *works, size_t n, const struct gpu_dense *dense,
                         size_t m, const struct gpu_operands *o, struct qt_err *err);
/* Same for one plan, which it launches once before. */
int gpu_time_plan(double *us, double *cublas_us, struct qt_gpu *gpu, const struct gpu_copies *c,
                  const struct qtool_matmul_plan *plan, const struct gpu_dense *dense,
                  struct gpu_operands *o, struct qt_err *err);

#endif
