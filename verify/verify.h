/*
 * verify: proves what a container holds and what it costs.
 *
 *   structure.c  container check: CRCs, sections, finiteness, repacking, error against the source
 *   eval.c       perplexity and divergence from a reference, block by block
 *   gate.c       --gate expressions over named figures
 *   device*.c    the fused GPU kernels on a container's tensors and cache; truth.c: the products of
 *                the CPU
 *   bench*.c     the speed of the fused kernels
 *   gpu_*.c      which kernel takes which packed matrix; copies in GPU memory, times
 */
#ifndef QT_VERIFY_VERIFY_H
#define QT_VERIFY_VERIFY_H

#include "base/base.h"
#include "calib/calib.h"
#include "formats/formats.h"
#include "kernels/kernels.h"
#include "pack/pack.h"

/* ---- container against itself and its source ------------------------------------------------ */

struct qt_verify_tensor {
    const char *name, *spec; /* owned by the container */
    size_t n, k;
    double bpw;
    bool compared; /* error is filled: a source was given */
    struct qt_error error;
};

struct qt_verify_report {
    struct qt_verify_tensor *tensors;
    size_t count;
    size_t copied;  /* tensors kept as they were */
    size_t tuned;   /* norms of which only dtype and shape were kept */
    double bpw;     /* over all quantized tensors */
    uint64_t bytes; /* of all stored tensors */
};

/* CRC of every stored tensor, section shapes and values, finiteness of the decoded weights,
 * repack round trip, scales of a KV cache, that w4ax tensors go together, that nothing but
 * vectors claims to be tuned, and they only where norms were; with a source also the error per
 * tensor, that copied tensors equal it byte for byte, and that tuned ones were made of it.
 * QT_E_INPUT at the first violation, naming the tensor. source and log may be NULL. */
int qt_verify(struct qt_verify_report *out, const struct qt_container *c,
              const struct qt_ckpt *source, const struct qt_log *log, struct qt_err *err);
void qt_verify_free(struct qt_verify_report *report);

/* ---- eval ----------------------------------------------------------------------------------- */

struct qt_eval_options {
    size_t seqlen;      /* window length, tokens; 0 = 512, or what the models take */
    size_t windows;     /* at most this many; 0 = all whole windows of the file */
    size_t batch_bytes; /* hidden states held at once; 0 = 1 GiB */
    const struct qt_log *log;
};

struct qt_eval_report {
    size_t windows, seqlen;
    uint64_t scored_tokens; /* windows * (seqlen - 1) */
    double ppl;
    bool has_ref; /* the rest is filled */
    double ref_ppl;
    double kld_mean, kld_median, kld_p999; /* nats, at every position of a window */
    double same_top; /* share of positions with the same most probable token */
    double rms_dp;   /* root mean square of p(target) - p_ref(target) over scored positions */
};

/*
 * Perplexity of the model behind `w` on ids: windows of seqlen without overlap, positions
 * 1..seqlen-1 of each scored, tail dropped. With ref (same vocabulary; may be NULL) both models run
 * side by side, one block of each in memory. QT_E_UNSUPPORTED: architecture; QT_E_USAGE: windows of
 * less than 2 tokens, or of more than a model takes; QT_E_INPUT: too few ids, or not of the
 * vocabulary, vocabularies or soft caps of the logits differ, logits are not finite.
 */
int qt_eval(struct qt_eval_report *out, const struct qt_weights *w, const struct qt_weights *ref,
            const uint32_t *ids, size_t count, const struct qt_eval_options *opt,
            struct qt_backend *be, struct qt_err *err);

/* ---- fused kernels -------------------------------------------------------------------------- */

/* A scheme in a layout that there is a fused kernel for. */
struct qt_gpu_kernel {
    const char *scheme, *layout;
    bool w4ax;                   /* it is that of qtool_w4ax.h */
    enum qtool_matmul_kind kind; /* else: of qtool_kernels.h */
};
/* NULL beyond the end. */
const struct qt_gpu_kernel *qt_gpu_kernel_at(size_t i);

/* The descriptor of p (which needs no data) for the device addresses section[p->nsections] of its
 * sections. QT_E_UNSUPPORTED: no kernel for this scheme and layout. */
int qt_gpu_weight(struct qtool_matmul_weight *out, const struct qt_packed *p,
                  const void *const *section, struct qt_err *err);
/* The same of a w4ax matrix; `blocks`, which are of its input, are left NULL. */
int qt_gpu_w4ax_weight(struct qtool_w4ax_weight *out, const struct qt_packed *p,
                       const void *const *section, struct qt_err *err);

/* Tokens of the products that are timed. */
enum { QT_DEVICE_TIMES = 3 };
extern const size_t qt_device_times[QT_DEVICE_TIMES];

struct qt_device_tensor {
    const char *name, *spec; /* owned by the container */
    size_t n, k;
    char missing[200];   /* why no kernel takes it; "" when one does, then the rest is filled */
    size_t runs, faults; /* products, and those of them (and other checks) that were wrong */
    char fault[200];     /* the first */
    double error[2];     /* worst |y - truth| / |truth| of FP16 and BF16 products */
    /* FP16, of w4ax the product alone; NaN without cuBLAS, and of a cache */
    double us[QT_DEVICE_TIMES], cublas_us[QT_DEVICE_TIMES];
};

struct qt_device_report {
    struct qt_device_tensor *tensors;
    size_t count, missing, faults; /* faults of all tensors */
};

/*
 * Every quantized tensor of a container through its fused kernel: several numbers of tokens,
 * random and heavy-tailed activations in FP16 and BF16, against products of the decoded weights on
 * the CPU (FP32; some rows in FP64). A product is at fault when its error is more than 2.3e-5
 * (BF16: 8 times that) above what rounding the true values to its type costs, when a single value
 * is off, when a second run or, with batch_invariant, another number of tokens gives other bits, or
 * when memory beside the output or the workspace was touched; outputs and workspace are filled with
 * NaN before. Also: dequantized weights equal the decoded ones bit for bit.
 *
 * w4ax: the activations are quantized on the GPU to what qt_act_apply makes of them, bit for bit,
 * and each product of them is within 1e-6 of the size of what it adds up, and rounding.
 * A KV cache, a row per layer behind the tensors: appended tokens are what qt_kv_apply makes of
 * them, bit for bit, attention over them is within 1.5e-3 (BF16: 3e-3) of FP64; error is that, no
 * times.
 *
 * Faults are reported, not errors. cpu: the CPU backend. log may be NULL.
 */
int qt_verify_device(struct qt_device_report *out, const struct qt_container *c, struct qt_gpu *gpu,
                     struct qt_backend *cpu, const struct qt_log *log, struct qt_err *err);
void qt_device_free(struct qt_device_report *report);

/* ---- bench ---------------------------------------------------------------------------------- */

struct qt_bench_shape {
    const char *name; /* "llama3-8b o", or NULL */
    size_t n, k;
};

/* Attention of one token a sequence over the keys and values of those before. */
struct qt_bench_cache {
    const char *name; /* "llama3-8b:attention", or NULL */
    size_t heads, kv_heads, head_dim;
};

struct qt_bench_options {
    const struct qt_spec *specs;
    const struct qt_bench_shape *shapes;
    const struct qt_bench_cache *caches;
    const size_t *m;       /* tokens; of caches, sequences */
    const size_t *lengths; /* of sequences */
    size_t nspecs, nshapes, ncaches, nm, nlengths;
    struct qtool_matmul_options matmul;
    const struct qt_log *log;
};

struct qt_bench_row {
    const struct qt_bench_shape *shape; /* of the options */
    const struct qt_spec *spec;         /* NULL: cuBLAS FP16 */
    size_t m, bytes;                    /* packed bytes of the weights */
    double us, floor_us, cublas_us;     /* NaN where not measured */
    double with_us; /* w4ax: with the quantizing of X, which `us` is without; else NaN */
    struct qtool_matmul_config config; /* of fused kernels, */
    struct qtool_w4ax_config w4ax;     /* one of the two */
    char why[200];                     /* refused: the reason */
};

struct qt_bench_cache_row {
    const struct qt_bench_cache *shape; /* of the options */
    enum qtool_kv_format format;
    bool paged; /* in random pages of 64 tokens; else contiguous */
    size_t batch, length, bytes;
    size_t split_tokens;         /* of a sequence, a block of threads */
    double us, floor_us, f16_us; /* NaN where not measured; f16: contiguous, in FP16 */
    char why[200];               /* refused: the reason */
};

struct qt_bench_report {
    double copy_gbs; /* copies of 512 MiB, if there is room: bytes read + bytes written */
    double read_gbs; /* bare reads of 1 GiB */
    struct qt_bench_row *rows;
    size_t count;
    struct qt_bench_cache_row *caches;
    size_t ncaches;
};

/* Random weights [n][k] packed by the scheme's own quantizer, in the cheapest way; of w4ax, where n
 * is large, only the sections that products read. */
int qt_bench_weights(struct qt_packed *out, const struct qt_spec *spec, size_t n, size_t k,
                     struct qt_err *err);

/*
 * Times the fused kernels on random weights, shape by shape: first cuBLAS for each m, then each
 * scheme with its read floor. Weights are cold in the L2, X and Y are not; launches are in CUDA
 * graphs; medians. Then attention: for each m and length an FP16 cache, a 4-bit one, the same in
 * pages, cold as well.
 */
int qt_bench(struct qt_bench_report *out, struct qt_gpu *gpu, const struct qt_bench_options *opt,
             struct qt_err *err);
void qt_bench_free(struct qt_bench_report *report);

/* ---- gates ---------------------------------------------------------------------------------- */

struct qt_figure {
    const char *name; /* "ppl", "kld_mean", "bpw", ... */
    double value;
};

/* Figures that every tensor has. */
struct qt_tensor_figures {
    const char *const *tensors; /* names; NULL when they are not known yet: figures is one row */
    size_t count;
    const struct qt_figure *figures; /* [count][per_tensor] */
    size_t per_tensor;
};

/*
 * expr: comma-separated NAME<=X, NAME>=X, NAME<X, NAME>X over figures[n], or NAME[REGEX]<=X over
 * the figures of all tensors whose name the regular expression matches (tensors may be NULL). X is
 * decimal. QT_E_USAGE: syntax, unknown name, or no tensor matches; QT_E_GATE naming every condition
 * that fails with the measured value, and the tensors for which it does, as far as there is room,
 * and the number of the others.
 */
int qt_gate_check(const char *expr, const struct qt_figure *figures, size_t n,
                  const struct qt_tensor_figures *tensors, struct qt_err *err);
/* Whether a condition of expr is about that figure of the whole. */
bool qt_gate_names(const char *expr, const char *figure);

#endif
