/* Internal interface between the source files of the GPU and of the CUDA backend. Functions that
 * return int return a cudaError_t unless stated otherwise, and only enqueue work on `stream`. */
#ifndef QT_KERNELS_GPU_INTERNAL_H
#define QT_KERNELS_GPU_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- transfer.cu ---------------------------------------------------------------------------- */

/* Enqueues a kernel that copies `bytes` from src to dst or, if !copy, only reads them; dst is then
 * 4 bytes of scratch memory. shape: a launch shape below QT_GPU_TRANSFERS. stream: a
 * cudaStream_t. */
int gpu_transfer_launch(void *dst, const void *src, size_t bytes, bool copy, int shape, int sms,
                        void *stream);

/* ---- copy.c --------------------------------------------------------------------------------- */

/* Pinned staging buffers for copies between host and device memory, ordered with the other work on
 * `stream`. open returns NULL without memory for the buffers. Copies accept a NULL staging and are
 * slower then. An upload returns when src may be changed, a download when it is complete. */
struct gpu_staging;
struct gpu_staging *gpu_staging_open(void *stream);
void gpu_staging_close(struct gpu_staging *s);
int gpu_staging_upload(struct gpu_staging *s, void *stream, void *dst, const void *src,
                       size_t bytes);
int gpu_staging_download(struct gpu_staging *s, void *stream, void *dst, const void *src,
                         size_t bytes);

/* ---- cublas.c: these functions return a cublasStatus_t, 0 for success ----------------------- */

struct gpu_cublas;
/* Loads cuBLAS. Returns NULL if it cannot be used. text[size] receives its version, or the reason.
 * Products are enqueued on `stream` and use `workspace`, `bytes` of device memory. */
struct gpu_cublas *gpu_cublas_open(char *text, size_t size, void *stream, void *workspace,
                                   size_t bytes);
void gpu_cublas_close(struct gpu_cublas *c);
/* Products are enqueued there from now on. */
int gpu_cublas_move(struct gpu_cublas *c, void *stream, void *workspace, size_t bytes);
/* y[m][n] = x[m][k] w[n][k]^T in FP16 or BF16; ldy: elements from one row of y to the next. */
int gpu_cublas_gemm(struct gpu_cublas *c, void *y, int ldy, const void *x, const void *w, int m,
                    int n, int k, bool bf16);
/* The same for `count` FP16 products, whose matrices follow each other. */
int gpu_cublas_gemm_batch(struct gpu_cublas *c, void *y, const void *x, const void *w, int count,
                          int m, int n, int k);
/* The same with FP16 x and w, and FP32 y without gaps. */
int gpu_cublas_gemm_f32(struct gpu_cublas *c, float *y, const void *x, const void *w, int m, int n,
                        int k);

/* A batch of `count` FP32 products c[m][n] = alpha a b + beta c. Matrices are row-major: a is
 * [m][k], or [k][m] if a_transposed; b is [k][n], or [n][k] if b_transposed. lda, ldb, ldc: floats
 * from row to row. A single product is of a, b and c, a batch of the matrices that as, bs and cs
 * [count] point to, arrays in device memory. tf32: all values of a and b are TF32 numbers. */
struct gpu_product {
    int m, n, k;
    float alpha, beta;
    const float *a, *b;
    float *c;
    bool a_transposed, b_transposed, tf32;
    bool follows; /* since the product before, nothing but its result has changed (gpu_product) */
    bool keeps_b; /* b does not change until gpu_products_release */
    int lda, ldb, ldc;
    int count;
    float *const *as, *const *bs, *const *cs; /* NULL: not a batch, count is 1 */
};
int gpu_cublas_product(struct gpu_cublas *c, const struct gpu_product *p);
/* A single product of FP16 matrices, in place of p->a and p->b. factors: device memory, alpha and
 * beta. */
int gpu_cublas_product_half(struct gpu_cublas *c, const struct gpu_product *p, const void *a,
                            const void *b, const float *factors);

/* Replaces x[m][n] by x V^-1, or by x V^-T if `transposed`. v[n][n] is upper triangular; row-major;
 * ld: floats from row to row of x and v. */
int gpu_cublas_solve_upper(struct gpu_cublas *c, float *x, const float *v, bool transposed, int m,
                           int n, int ld);
/* Steps of a blocked Cholesky factorization of the lower triangle of a[k][k], row-major. The rows
 * in front of p + n of columns [p, p + n) are already factored.
 * cholesky_solve: solves the rows below, in a tile of these columns.
 * cholesky_update: subtracts what columns [p, p + n) contribute to columns [from, to) from there on
 * downwards. */
int gpu_cublas_cholesky_solve(struct gpu_cublas *c, double *a, int k, int p, int n);
int gpu_cublas_cholesky_update(struct gpu_cublas *c, double *a, int k, int p, int n, int from,
                               int to);

/* ---- energy.c ------------------------------------------------------------------------------- */

/* Opens NVML for the GPU with this PCI address; NULL if it cannot be used. */
struct gpu_energy;
struct gpu_energy *gpu_energy_open(const char *pci);
void gpu_energy_close(struct gpu_energy *e);
/* Joules since the driver was loaded; NaN: unknown, also if e is NULL. */
double gpu_energy_joules(const struct gpu_energy *e);

/* ---- nccl.c: these functions return an enum qt_status ---------------------------------------- */

struct qt_comm;
struct qt_err;
/* Connects the GPUs of all ranks, which call it together. *out is NULL in all ranks if that is not
 * possible. text[size]: how their memory is moved. close accepts NULL. */
struct gpu_nccl;
int gpu_nccl_open(struct gpu_nccl **out, char *text, size_t size, struct qt_comm *comm, int device,
                  void *stream, struct qt_err *err);
void gpu_nccl_close(struct gpu_nccl *c);
/* The functions shift and broadcast of struct qt_backend. */
int gpu_nccl_shift(struct gpu_nccl *c, const void *out, size_t out_bytes, size_t to, void *in,
                   size_t in_bytes, size_t from, struct qt_err *err);
int gpu_nccl_broadcast(struct gpu_nccl *c, void *data, size_t bytes, size_t from,
                       struct qt_err *err);

/* ---- cuda.c --------------------------------------------------------------------------------- */

/* Return the cuBLAS and the cudaStream_t of an open GPU. */
struct qt_gpu;
struct gpu_cublas *gpu_cublas_of(struct qt_gpu *gpu);
void *gpu_stream_of(struct qt_gpu *gpu);

/* Lanes are streams whose work can run at the same time. Outside of gpu_lanes_begin and
 * gpu_lanes_end, all work is enqueued on lane 0. begin: `count` lanes (at most GPU_LANES) wait for
 * the work on lane 0. use: from now on kernels and products are enqueued on lane i, modulo the
 * number of lanes. end: lane 0 waits for all lanes, and is used again; to be called after a
 * failure, too. In between memory is neither allocated nor freed nor copied. These functions return
 * an enum qt_status. */
enum { GPU_LANES = 8 };
int gpu_lanes_begin(struct qt_gpu *gpu, size_t count, struct qt_err *err);
int gpu_lane_use(struct qt_gpu *gpu, size_t i, struct qt_err *err);
int gpu_lanes_end(struct qt_gpu *gpu, struct qt_err *err);

/* ---- act_kernels.cu ------------------------------------------------------------------------- */

/* Arguments for the function round_inputs of struct qt_backend; all arrays are in device memory.
 * scales: an enum qt_act_scales. */
struct gpu_input {
    float *y;
    const float *x;
    const uint32_t *order;
    const float *factor;
    const uint8_t *bits;
    size_t m, k;
    int scales;
    bool rotate;
    float clip, clip_by_7; /* clip_by_7: clip / 7, divided in FP64 */
    uint32_t *largest;     /* of y, NULL: not wanted (gpu_math_largest) */
};
int gpu_round_inputs(const struct gpu_input *a, void *stream);
/* For the function arrange_inputs; bits and clips are not used. */
int gpu_arrange_inputs(const struct gpu_input *a, void *stream);
/* For the function input_errors: part[2][count][blocks][tiles], d and then squares, in sums over
 * GPU_ERROR_TOKENS tokens. bits and clips of `in` are not used. */
enum { GPU_ERROR_TOKENS = 16, GPU_ROUNDINGS = 8 };
struct gpu_input_errors {
    struct gpu_input in;
    const float *g;
    double *part;
    int count;
    struct {
        bool narrow;
        float clip, clip_by_7;
    } how[GPU_ROUNDINGS];
};
int gpu_input_errors(const struct gpu_input_errors *a, void *stream);

/* ---- math.cu: kernels of the CUDA backend --------------------------------------------------- */

/* These functions compute the functions of struct qt_backend with the same names; all arrays are in
 * device memory. The types repeat those of base/backend.h, which is not valid C++. */
enum gpu_norm { GPU_NORM_RMS, GPU_NORM_LAYER };
enum gpu_act {
    GPU_SILU,
    GPU_GELU_TANH,
    GPU_GELU,
    GPU_RELU,
    GPU_RELU2,
    GPU_NONE,
    GPU_SIGMOID,
    GPU_CLAMPED
};
enum { GPU_HIST_BINS = 64 };
struct gpu_score {
    double nll, ref_nll, kld, p_delta;
    int same_top;
};

int gpu_math_bias(float *y, const float *bias, size_t m, size_t n, void *stream);
int gpu_math_add(float *y, const float *x, size_t count, void *stream);
/* y[count] = x[count], which is FP16 or BF16. */
int gpu_math_widen(float *y, const void *x, bool bf16, size_t count, void *stream);
int gpu_math_add_f64(double *y, const double *x, size_t count, void *stream);
/* The functions gather_rows and scatter_rows of struct qt_backend. largest: of y, or NULL. */
int gpu_math_gather(float *y, const float *x, const uint32_t *rows, const float *factor, size_t m,
                    size_t n, uint32_t *largest, void *stream);
int gpu_math_copy_columns(float *y, size_t ldy, const float *x, size_t ldx, size_t n, size_t m,
                          void *stream);
int gpu_math_scatter(float *y, const float *x, const uint32_t *rows, const float *factor, size_t m,
                     size_t n, void *stream);
/* Splits x[rows][k] (or [k][rows] if `transposed`; ld: floats from row to row) into TF32 parts, as
 * the left or the right factor of a 3xTF32 product (product.h). Each run of GPU_TF32_DEPTH values
 * of a row becomes its low, high and high parts (left) or its high, low and high parts (right), one
 * after the other, in z[rows][width]. The last run is padded with zeros to a multiple of 32.
 * gpu_math_tf32_width(k) returns the width: 3 times the padded k. */
enum { GPU_TF32_DEPTH = 2048 };
size_t gpu_math_tf32_width(size_t k);
int gpu_math_split_tf32(float *z, const float *x, size_t rows, size_t k, size_t ld, bool transposed,
                        bool right, void *stream);
/* Raises *largest to the bits of the largest magnitude of x[rows][k] (ld: floats from row to row).
 * Other functions with this argument do the same for what they write; NULL: not wanted. */
int gpu_math_largest(uint32_t *largest, const float *x, size_t rows, size_t k, size_t ld,
                     void *stream);
/* z[rows][k] = x[rows][k] in FP16, times the power of two that brings *largest below 2^15. */
int gpu_math_to_half(void *z, const uint32_t *largest, const float *x, size_t rows, size_t k,
                     size_t ld, void *stream);
/* factors = alpha divided by both powers of two of gpu_math_to_half, and beta. */
int gpu_math_half_factors(float *factors, const uint32_t *largest_a, const uint32_t *largest_b,
                          float alpha, float beta, void *stream);
int gpu_math_scale(float *y, float factor, size_t count, void *stream);
/* y[count] = x[count] - y[count]. */
int gpu_math_subtract(float *y, const float *x, size_t count, uint32_t *largest, void *stream);
int gpu_math_activate(float *y, const float *gate, const float *up, enum gpu_act kind, size_t count,
                      uint32_t *largest, void *stream);
int gpu_math_rope(float *x, const float *cos, const float *sin, size_t m, size_t seqlen,
                  size_t heads, size_t dim, size_t half, bool interleaved, void *stream);
int gpu_math_norm(float *y, const float *x, const float *w, const float *bias, enum gpu_norm kind,
                  float eps, size_t m, size_t n, uint32_t *largest, void *stream);
/* The heads of an attention as batches of products: arrays [batch] of pointers, one after the
 * other. Element i is query head i % heads of sequence i / heads; `group` query heads share a key
 * head. q, k, v, y: first row of the first head, with query_step and key_step floats from one
 * sequence to the next. s: scores, `cells` floats a head. */
enum {
    GPU_HEAD_QUERIES,
    GPU_HEAD_KEYS,
    GPU_HEAD_VALUES,
    GPU_HEAD_OUTPUTS,
    GPU_HEAD_SCORES,
    GPU_HEAD_ARRAYS
};
struct gpu_heads {
    const float *q, *k, *v;
    float *y, *s;
    size_t heads, group, dim, cells, query_step, key_step, batch;
};
int gpu_math_head_pointers(void *pointers, const struct gpu_heads *a, void *stream);
/* Replaces scores s[batch][rows][keys] by probabilities. Row i is query r0 + i, column j key lo +
 * j. window: as in struct qt_attention. sinks: NULL, or those of the `heads` heads; element i of
 * the batch is head i % heads. */
int gpu_math_softmax(float *s, size_t batch, size_t rows, size_t keys, size_t r0, size_t lo,
                     size_t window, float softcap, const float *sinks, size_t heads, void *stream);
/*
 * Replaces the scores of queries with the keys of their own groups, as struct qt_attention says for
 * exact_keys, before the softmax. q[rows][ldq]: query r0 on, first of `group` query heads of the
 * first of `count` KV heads; exact[][ldk]: key 0 of the sequence, first KV head. The scores of
 * query head g of KV head h are s[h * group + g][rows][keys]. dim: at most GPU_OWN_DIM.
 */
enum { GPU_OWN_DIM = 512 };
struct gpu_own_scores {
    float *s;
    const float *q, *exact;
    size_t count, group;
    size_t rows, keys, r0, lo, ldq, ldk, dim;
    float scale;
};
int gpu_math_own_scores(const struct gpu_own_scores *a, void *stream);
/* ---- attention_kernels.cu ------------------------------------------------------------------- */

/* Causal attention of whole sequences. q[][heads][dim], k and v [][kv_heads][dim] are FP16 as
 * gpu_math_to_half makes it, with these largest magnitudes; dim is 64 or 128. window: as in struct
 * qt_attention. scale > 0. */
struct gpu_attention {
    float *y;
    const void *q, *k, *v;
    const uint32_t *largest_q, *largest_k, *largest_v;
    uint32_t *largest; /* of y */
    size_t sequences, seqlen, heads, kv_heads, dim, window;
    float scale;
};
int gpu_attend(const struct gpu_attention *a, void *stream);

/* ---- math.cu: scores, statistics, Hessians -------------------------------------------------- */

/* targets must be below vocab. */
int gpu_math_score(struct gpu_score *scores, const float *logits, const float *ref,
                   const uint32_t *targets, float softcap, size_t m, size_t vocab, void *stream);
/* Adds product[rows][cols] to the rows from i0 on of h[k][k], up to the diagonal. */
int gpu_math_add_lower(double *h, const float *product, size_t i0, size_t rows, size_t cols,
                       size_t k, void *stream);
/* Replaces the lower triangle of a[n][n], n <= 128 (pitch: doubles from row to row), by its
 * Cholesky factor. Sets *failed (device memory) to 1 if a is not positive definite. Runs in one
 * thread block. */
int gpu_math_cholesky_tile(double *a, int n, size_t pitch, int *failed, void *stream);
/* For the function `factor` of struct qt_backend: h[i][j] = gram[order[i]][order[j]] * scale, FP32;
 * a = the lower triangle of h with rows and columns reversed, in FP64; `damp` is added to both
 * diagonals. */
int gpu_math_order_gram(float *h, double *a, const double *gram, const uint32_t *order,
                        double scale, double damp, size_t k, void *stream);
/* The same for factor_again. */
int gpu_math_order_again(float *h, double *a, const float *from, const uint32_t *order, size_t k,
                         void *stream);
/* v[k][k] = the upper triangle of the reversed a, in FP32; 0 below. */
int gpu_math_reverse(float *v, const double *a, size_t k, void *stream);
/* y[m][k]: column p = column order[p] of x, times scale. gpu_math_restore_columns: the inverse,
 * without scale. */
int gpu_math_order_columns(float *y, const float *x, const uint32_t *order, float scale, size_t m,
                           size_t k, void *stream);
int gpu_math_restore_columns(float *y, const float *x, const uint32_t *order, size_t m, size_t k,
                             void *stream);
/* dots[m] = dot products of the rows of x and y [m][k]. */
int gpu_math_row_dots(double *dots, const float *x, const float *y, size_t m, size_t k,
                      void *stream);
/* parts: scratch memory, gpu_math_channel_parts(m, k) doubles. */
size_t gpu_math_channel_parts(size_t m, size_t k);
int gpu_math_channels(float *absmax, double *sum2, uint32_t *hist, double *parts, const float *x,
                      size_t m, size_t k, uint32_t *largest, void *stream);

/* ---- grad_kernels.cu: gradients of the CUDA backend ----------------------------------------- */

/* Statistics of a row of a norm's input and output gradient, for its gradients. The weights' are
 * summed over runs of GPU_NORM_RUN rows in runs[ceil(m / GPU_NORM_RUN)][n], and added to dw[n]. */
enum { GPU_NORM_RUN = 1024 };
struct gpu_norm_row {
    double mean;
    float inv, mean_t, mean_tz;
};
int gpu_grad_norm_rows(struct gpu_norm_row *rows, const float *dy, const float *x, const float *w,
                       enum gpu_norm kind, float eps, size_t m, size_t n, void *stream);
int gpu_grad_norm_weights(float *dw, double *runs, const struct gpu_norm_row *rows, const float *dy,
                          const float *x, size_t m, size_t n, void *stream);
int gpu_grad_norm_inputs(float *dx, const struct gpu_norm_row *rows, const float *dy,
                         const float *x, const float *w, size_t m, size_t n, void *stream);
int gpu_grad_activate(float *dgate, float *dup, const float *dy, const float *gate, const float *up,
                      enum gpu_act kind, size_t count, void *stream);
/*
 * A panel of the gradient of an attention. A part is a key head of a sequence; its query heads are
 * stacked, [rows][group]: they attend to the same keys. query_step and key_step are the floats from
 * one sequence to the next.
 */
enum {
    GPU_GRAD_Q,
    GPU_GRAD_K,
    GPU_GRAD_V,
    GPU_GRAD_DY,
    GPU_GRAD_DQ,
    GPU_GRAD_DK,
    GPU_GRAD_DV,
    GPU_GRAD_P,
    GPU_GRAD_DS,
    GPU_GRAD_ARRAYS
};
struct gpu_grad_heads {
    const float *k, *v; /* of the first key head, as the backend has them */
    float *dk, *dv;
    float *q, *dy, *dq;  /* [parts][rows][group][dim] */
    float *p, *ds;       /* [parts][rows][group][keys] */
    size_t parts, heads; /* key heads: of all sequences, of one */
    size_t rows, group, keys, dim, query_step, key_step;
};
int gpu_grad_pointers(void *pointers, const struct gpu_grad_heads *a, void *stream);
/* Copies between stacked query heads and x, their place in the first sequence; rows of x are
 * `width` floats apart. */
int gpu_grad_stack(float *stacked, const float *x, const struct gpu_grad_heads *a, size_t width,
                   void *stream);
int gpu_grad_unstack(float *x, const float *stacked, const struct gpu_grad_heads *a, size_t width,
                     void *stream);
/* Replaces the scores a->p by probabilities, as gpu_math_softmax, and their gradient a->ds by that
 * of the scores. sinks: NULL, or those of the query heads of all key heads. */
int gpu_grad_softmax(const struct gpu_grad_heads *a, size_t r0, size_t lo, size_t window,
                     float softcap, const float *sinks, void *stream);
/* losses: device memory. Targets must be below vocab, or GPU_NO_TARGET. */
#define GPU_NO_TARGET UINT32_MAX
int gpu_grad_loss(double *losses, float *dlogits, const float *logits, const float *ref,
                  const uint32_t *targets, float softcap, float weight, size_t m, size_t vocab,
                  void *stream);
/* sums[ceil(count / GPU_SQUARE_RUN)] of squared errors; grad = factor * error. */
enum { GPU_SQUARE_RUN = 1 << 14 };
int gpu_grad_square(double *sums, float *grad, const float *y, const float *target, float factor,
                    size_t count, void *stream);
/* struct qt_coded of base/backend.h, and its functions decode and decode_grad. */
struct gpu_coded {
    size_t n, k, group;
    const float *value;
    const uint8_t *code;
    const float *scale;
    const uint8_t *zero;
};
int gpu_grad_decode(float *w, const struct gpu_coded *a, void *stream);
int gpu_grad_scales(float *dscale, const struct gpu_coded *a, const float *dw, void *stream);
/* struct qt_tuned and qt_adam, and the function tune. */
struct gpu_tuned {
    size_t count;
    int exp2;
    const float *start, *unit, *grad;
    float *delta, *m, *v, *scale;
};
struct gpu_adam {
    double beta1, beta2, eps, fix1, fix2, lr;
};
int gpu_grad_tune(const struct gpu_tuned *t, const struct gpu_adam *a, void *stream);

#ifdef __cplusplus
}
#endif

#endif
