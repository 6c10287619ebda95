/*
 * Products of FP32 matrices on a GPU (private to kernels/).
 *
 * On GPUs whose tensor cores multiply TF32 numbers (10 bits of mantissa) at several times the FP32
 * rate, large products use 3xTF32: each factor is the sum of a high and a low TF32 number, and the
 * product of the low numbers, 2^-22 of the result, is omitted (Ootomo and Yokota, "Recovering
 * single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak
 * performance", arXiv 2203.03341, section III). The other three products are computed as one
 * product of three times the depth.
 *
 * With `half`, factors are rounded to FP16, after a power of two has brought the largest magnitude
 * below 2^15. What is 2^-29 of the largest value or smaller is rounded more coarsely, or to 0.
 */
#ifndef QT_KERNELS_GPU_PRODUCT_H
#define QT_KERNELS_GPU_PRODUCT_H

#include "base/base.h"
#include "kernels/gpu/internal.h"
#include "kernels/gpu/status.h"
#include "kernels/kernels.h"

/* Device memory that grows on demand. gpu_scratch_need makes room for count * size bytes and
 * discards the contents if it has to allocate; freeing waits for the enqueued work. */
struct gpu_scratch {
    void *p;
    size_t bytes;
};
int gpu_scratch_need(struct gpu_scratch *s, struct qt_gpu *gpu, size_t count, size_t size,
                     struct qt_err *err);

/* A factor in FP16, stored for products that follow: often they share a factor. */
struct gpu_half {
    struct gpu_scratch z;
    const float *x; /* NULL: none */
    int rows, k, ld;
    size_t used; /* number of the latest product with it */
};
enum { GPU_HALVES = 4, GPU_KEPT = 64, GPU_LARGEST = 8 };

struct gpu_products {
    struct qt_gpu *gpu;
    struct gpu_scratch left, right;  /* TF32 parts of the factors, at most 805 MB each */
    struct gpu_scratch panel;        /* product of a panel of a Gram matrix, or of pieces of many */
    struct gpu_scratch pointers;     /* of a batch */
    struct gpu_scratch factors;      /* of products in FP16: alpha and beta */
    struct gpu_scratch scores, rows; /* of attention and gradients */
    struct gpu_half halves[GPU_HALVES];
    size_t uses;
    struct gpu_half kept[GPU_KEPT]; /* weights that do not change for a while */
    size_t kept_count;
    bool kept_full; /* without room for more */
    struct {
        const float *x; /* NULL: none */
        size_t count;
    } largest[GPU_LARGEST]; /* arrays whose largest magnitudes are in `known` */
    struct gpu_scratch known;
    size_t next_largest;
    bool half;       /* large products round their factors to FP16, batches to TF32 */
    int split_cells; /* values of a factor that are split at a time; 0: 2^26 */
};

void gpu_products_free(struct gpu_products *g);

/* halves.c. Stored factors are valid until memory changes: `changed` says that only these bytes do,
 * `forget` that all may. `release` frees those that were to be kept. */
void gpu_products_forget(struct gpu_products *g);
void gpu_products_changed(struct gpu_products *g, const void *p, size_t bytes);
void gpu_products_release(struct gpu_products *g);
/* *out: rows [0, rows) of a factor as it is stored (ld: floats from row to row), in FP16. It takes
 * the place of the one that has not been used for longest. keep: x does not change until
 * `release`. */
int gpu_half_of(struct gpu_half **out, struct gpu_products *g, const float *x, int rows, int k,
                int ld, bool keep, struct qt_err *err);
/* The values [rows][k], and the bits of their largest magnitude before scaling; device memory. */
void *gpu_half_values(const struct gpu_half *h);
uint32_t *gpu_half_largest(const struct gpu_half *h);
/* *out (device memory): 0, where the kernel that now writes x[count] stores its largest
 * magnitude. */
int gpu_largest_new(uint32_t **out, struct gpu_products *g, const float *x, size_t count,
                    struct qt_err *err);

/* Computes p in FP32, or in 3xTF32 if it is large and not a batch. The error of c is up to 1e-5 of
 * a typical value with 3xTF32 (2e-6 with FP32; 1e-3 with `half`), and infinite results may be
 * NaN. */
int gpu_product(struct gpu_products *g, const struct gpu_product *p, struct qt_err *err);
/* h[k][k] += x^T x of x[m][k], lower triangle: the function gram of struct qt_backend. */
int gpu_gram(struct gpu_products *g, double *h, const float *x, size_t m, size_t k,
             struct qt_err *err);

/* g[blocks][128][128] += w_b^T w_b for each channel block w_b of w[n][k]: the function block_grams
 * of struct qt_backend. */
int gpu_block_grams(struct gpu_products *p, float *g, const float *w, size_t n, size_t k,
                    struct qt_err *err);

/* attention.c: the function attention of struct qt_backend. gpu_attention_half: with `half`, of the
 * kinds for which gpu_attends_in_half returns true. gpu_attention: of all kinds that are causal and
 * have no bias; the caller calls gpu_products_forget. */
bool gpu_attends_in_half(const struct gpu_products *g, const struct qt_attention *a);
int gpu_attention_half(struct gpu_products *g, float *y, const float *q, const float *k,
                       const float *v, size_t m, const struct qt_attention *a, struct qt_err *err);
int gpu_attention(struct gpu_products *g, float *y, const float *q, const float *k, const float *v,
                  size_t m, const struct qt_attention *a, struct qt_err *err);

/*
 * panels.c: an attention in panels. A panel has the sequences [s0, s0 + sequences), the KV heads
 * [h0, h0 + heads) with their query heads, and the queries [r0, r1), counted by their positions;
 * with all keys that these attend to.
 */
struct gpu_panel {
    size_t s0, sequences, h0, heads, r0, r1;
};
/* Returns the first key that any query from r0 on attends to. */
size_t gpu_first_key(const struct qt_attention *a, size_t r0);
/* Calls run for all panels of the m queries. scores: of a panel at most, unless those of one KV
 * head and one sequence are more. */
int gpu_attention_panels(const struct qt_attention *a, size_t m, size_t scores,
                         int (*run)(void *ctx, const struct gpu_panel *part, struct qt_err *err),
                         void *ctx, struct qt_err *err);

/* grad.c: functions of struct qt_backend. attention_grad: without a bias. */
int gpu_norm_grad(struct gpu_products *g, float *dx, float *dw, const float *dy, const float *x,
                  const float *w, enum gpu_norm kind, float eps, size_t m, size_t n,
                  struct qt_err *err);
int gpu_attention_grad(struct gpu_products *g, float *dq, float *dk, float *dv, const float *dy,
                       const float *q, const float *k, const float *v, size_t m,
                       const struct qt_attention *a, struct qt_err *err);
int gpu_loss_grad(struct gpu_products *g, double *losses, float *dlogits, const float *logits,
                  const float *ref, const uint32_t *targets, float softcap, float weight, size_t m,
                  size_t vocab, struct qt_err *err);
int gpu_square_grad(struct gpu_products *g, double *sum, float *grad, const float *y,
                    const float *target, float weight, size_t count, struct qt_err *err);
/* factor.c: the functions factor, factor_again and regress of struct qt_backend. */
int gpu_factor(struct gpu_products *g, float *h, float *v, bool *positive, const double *gram,
               const size_t *order, double scale, double damp, size_t k, struct qt_err *err);
int gpu_factor_again(struct gpu_products *g, float *h, float *v, bool *positive, const float *from,
                     const size_t *order, size_t k, struct qt_err *err);
int gpu_regress(struct gpu_products *g, float *s, double *explained, const float *c, const float *v,
                const size_t *order, double scale, size_t m, size_t k, struct qt_err *err);
/* Arrays in device memory that are freed together. out: where the pointer is stored. */
struct gpu_arrays {
    struct qt_gpu *gpu;
    void *p[32];
    size_t n;
};
int gpu_array_new(void *out, struct gpu_arrays *a, size_t count, size_t size, struct qt_err *err);
int gpu_array_upload(void *out, struct gpu_arrays *a, const void *from, size_t count, size_t size,
                     struct qt_err *err);
void gpu_arrays_free(struct gpu_arrays *a);
/* choices.c: the functions mix24_costs, mix24_extent and group_range of struct qt_backend. */
int gpu_mix24_group_costs(struct qt_gpu *gpu, const struct qt_mix24_costs *job, struct qt_err *err);
int gpu_mix24_find_extent(struct qt_gpu *gpu, struct qt_mix24_extent *job, struct qt_err *err);
int gpu_group_range(struct qt_gpu *gpu, float *largest, float *smallest, const float *w, size_t n,
                    size_t k, size_t group, struct qt_err *err);
/* round.c: the function round. */
int gpu_round(struct gpu_products *g, struct qt_round *const *jobs, size_t count,
              struct qt_err *err);

#endif
