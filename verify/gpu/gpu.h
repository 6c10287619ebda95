/* What device*.c and bench*.c share: packed matrices in GPU memory, times. Private to verify/. */
#ifndef QT_VERIFY_GPU_GPU_H
#define QT_VERIFY_GPU_GPU_H

#include "verify/verify.h"

/* The i-th value of a sequence. */
static inline uint64_t gpu_random(uint64_t seed, uint64_t i)
{
    uint64_t state = seed + i * QT_SPLITMIX64_STEP;
    return qt_splitmix64(&state);
}

/* Uniform in [-1, 1). */
static inline float gpu_random_unit(uint64_t seed, uint64_t i)
{
    return (float)((double)(gpu_random(seed, i) >> 11) * 0x1p-52 - 1);
}

/* FP16 numbers from [-size, size) into dst. */
int gpu_fill_random(struct qt_gpu *gpu, void *dst, size_t bytes, float size, struct qt_err *err);

/* Device memory that grows; its contents are lost when it does. All zero: empty. */
struct gpu_buffer {
    void *data;
    size_t bytes;
};
int gpu_buffer_need(struct gpu_buffer *b, struct qt_gpu *gpu, size_t bytes, struct qt_err *err);
void gpu_buffer_free(struct gpu_buffer *b, struct qt_gpu *gpu);

/* From the beginning of a section to that of the next, in a copy of a packed matrix. */
static inline size_t gpu_section_stride(size_t bytes)
{
    return qt_round_up(bytes, 256);
}

bool gpu_is_w4ax(const struct qt_packed *p);
enum qtool_w4ax_scales gpu_w4ax_scales_of(const struct qt_spec *spec);
/* Sections that products read; they come first. */
size_t gpu_sections(const struct qt_packed *p);

/* Copies of what products read of one packed matrix. */
struct gpu_copies {
    char *base;
    size_t sections;
    size_t bytes;  /* packed, of one copy */
    size_t stride; /* from one copy to the next */
    size_t count;
    struct qtool_matmul_weight *weight; /* [count] */
    struct qtool_w4ax_weight *w4ax;     /* [count], instead; their `blocks` are left to be set */
};
/* So many copies of this size that a round over all of them finds none of its bytes in the L2: at
 * least four, and five times its size, but at most 256, which leaves what is below 1/50 of the L2
 * warm. */
size_t gpu_cold_count(const struct qt_gpu *gpu, size_t bytes);
/* So many. p with data. */
int gpu_copies_new(struct gpu_copies *out, struct qt_gpu *gpu, const struct qt_packed *p,
                   struct qt_err *err);
void gpu_copies_free(struct gpu_copies *c, struct qt_gpu *gpu);

/* FP16 weights of cuBLAS, so many copies as of packed ones (gpu_cold_count). */
struct gpu_dense {
    char *weights; /* [count][n][k] */
    size_t n, k, bytes, count;
};
int gpu_dense_new(struct gpu_dense *out, struct qt_gpu *gpu, size_t n, size_t k,
                  struct qt_err *err);
void gpu_dense_free(struct gpu_dense *d, struct qt_gpu *gpu);

/* X and Y of any element type, and workspace of the fused kernels; w4ax: X quantized. */
struct gpu_operands {
    struct gpu_buffer x, y, workspace;
    struct gpu_buffer codes, scale, sum;
};
void gpu_operands_free(struct gpu_operands *o, struct qt_gpu *gpu);
/* Room for the plan's workspace, zeroed as far as runs want it. */
int gpu_workspace_need(struct gpu_operands *o, struct qt_gpu *gpu, size_t bytes,
                       struct qt_err *err);

/* ---- gpu_w4ax.c ----------------------------------------------------------------------------- */

/* How the input of a w4ax matrix is quantized, with what the kernels read of it in GPU memory. */
struct gpu_w4ax_input {
    struct qtool_w4ax_input in;
    size_t blocks;      /* of 128 channels */
    size_t token_bytes; /* of codes */
    uint32_t *words;    /* [blocks], host */
    struct gpu_buffer words_buffer, order;
};
/* Factors are left to whoever makes the channels. packed: see qtool_w4ax.h. */
int gpu_w4ax_input_new(struct gpu_w4ax_input *out, struct qt_gpu *gpu, const struct qt_act *a,
                       bool packed, struct qt_err *err);
void gpu_w4ax_input_free(struct gpu_w4ax_input *in, struct qt_gpu *gpu);

/* Scales of m tokens. */
size_t gpu_w4ax_scales(const struct gpu_w4ax_input *in, size_t m);

/* Microseconds of the product alone, cold, and of quantizing X (`dtype`) and the product; and as
 * gpu_time_beside. */
int gpu_time_w4ax(double us[2], double *cublas_us, struct qt_gpu *gpu, const struct gpu_copies *c,
                  const struct qtool_w4ax_plan *plan, const struct gpu_w4ax_input *in,
                  enum qtool_dtype dtype, const struct gpu_dense *dense, struct gpu_operands *o,
                  struct qt_err *err);

/* ---- truth.c -------------------------------------------------------------------------------- */

enum {
    TRUTH_TOKENS = 128,
    TRUTH_SETS = 3, /* random FP16, heavy-tailed FP16, heavy-tailed BF16 */
};

/* Activations, and the products that are to come out. */
struct truth_set {
    const char *name;
    enum qtool_dtype dtype;
    uint16_t *x;              /* [TRUTH_TOKENS][k] */
    float *y;                 /* [TRUTH_TOKENS][n] */
    float *rounded;           /* the same of rounded weights, or NULL */
    double rms[TRUTH_TOKENS]; /* of a token's outputs */
};
struct truth {
    size_t n, k;
    struct truth_set set[TRUTH_SETS];
    size_t wrong[2]; /* weights that are not, rounded to FP16 and BF16, what `dequantized` says */
};
/* unit: also products of weights rounded to FP16 in units of it; 0: not. dequantized: what a kernel
 * gave, [n][k] of FP16 and of BF16 in GPU memory. */
int truth_new(struct truth *out, const struct qt_packed *p, uint64_t seed, double unit,
              struct qt_backend *cpu, struct qt_gpu *gpu, void *const dequantized[2],
              struct qt_err *err);
void truth_free(struct truth *t);
/* Only the activations of the sets; weight_rms: products with such weights are of the order of 1.
 */
int truth_activations(struct truth *out, size_t n, size_t k, double weight_rms, uint64_t seed,
                      struct qt_err *err);

static inline float truth_value(uint16_t bits, enum qtool_dtype dtype)
{
    return dtype == QTOOL_F16 ? qt_f16_to_f32(bits) : qt_bf16_to_f32(bits);
}

static inline uint16_t truth_round(float v, enum qtool_dtype dtype)
{
    return dtype == QTOOL_F16 ? qt_f32_to_f16(v) : qt_f32_to_bf16(v);
}

/* ---- times ---------------------------------------------------------------------------------- */

/* Microseconds a launch, cold. x and y must have room. */
int gpu_time_floor(double *us, struct qt_gpu *gpu, const struct gpu_copies *c, struct qt_err *err);
int gpu_time_cublas(double *us, struct qt_gpu *gpu, const struct gpu_dense *dense, size_t m,
                    const struct gpu_operands *o, struct qt_err *err);
/* works[n], which have run before, in turns with cuBLAS of m tokens; dense NULL: without. */
int gpu_time_beside(double *us, double *cublas_us, struct qt_gpu *gpu,
                    const struct qt_gpu_work *works, size_t n, const struct gpu_dense *dense,
                    size_t m, const struct gpu_operands *o, struct qt_err *err);
/* The same of one plan. */
int gpu_time_plan(double *us, double *cublas_us, struct qt_gpu *gpu, const struct gpu_copies *c,
                  const struct qtool_matmul_plan *plan, const struct gpu_dense *dense,
                  struct gpu_operands *o, struct qt_err *err);

#endif
