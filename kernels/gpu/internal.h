/* Parts of struct qt_gpu and of the CUDA backend that are compiled apart. */
#ifndef QT_KERNELS_GPU_INTERNAL_H
#define QT_KERNELS_GPU_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Enqueues on `stream` (a cudaStream_t) a copy of bytes to dst, or only their reading: then dst is
 * 4 bytes that are not used. A cudaError_t. */
int gpu_transfer_launch(void *dst, const void *src, size_t bytes, bool copy, int shape, int sms,
                        void *stream);

/* gpu_copy.c: copies between the host and what `stream` does. NULL where there is no memory for it:
 * the copies take a NULL, too, and are slower. An upload returns when src may be changed, a
 * download when it is complete. A cudaError_t. */
struct gpu_copier;
struct gpu_copier *gpu_copier_open(void *stream);
void gpu_copier_close(struct gpu_copier *c);
int gpu_copier_upload(struct gpu_copier *c, void *stream, void *dst, const void *src, size_t bytes);
int gpu_copier_download(struct gpu_copier *c, void *stream, void *dst, const void *src,
                        size_t bytes);

struct gpu_cublas;
/* NULL when cuBLAS cannot be used; text[size] tells its version, or why not. Products go to
 * `stream` and use the workspace, device memory of `bytes`. */
struct gpu_cublas *gpu_cublas_open(char *text, size_t size, void *stream, void *workspace,
                                   size_t bytes);
void gpu_cublas_close(struct gpu_cublas *c);
/* y[m][n] = x[m][k] w[n][k]^T in FP16 or BF16, rows of y ldy apart; a cublasStatus_t, 0 for
 * success. */
int gpu_cublas_gemm(struct gpu_cublas *c, void *y, int ldy, const void *x, const void *w, int m,
                    int n, int k, bool bf16);

/* c[m][n] = alpha a b + beta c in FP32, row-major with rows ld_ apart; a is [m][k], or [k][m] if
 * a_transposed, b [k][n] or [n][k]. `count` of them, step_ floats apart (0: the same). tf32: all values
 * of a and b are TF32 numbers. */
struct gpu_product {
    int m, n, k;
    float alpha, beta;
    const float *a, *b;
    float *c;
    bool a_transposed, b_transposed, tf32;
    int lda, ldb, ldc;
    long long step_a, step_b, step_c;
    int count;
};
int gpu_cublas_product(struct gpu_cublas *c, const struct gpu_product *p);

/* x[m][k] becomes x V^-1, or x V^-T if `transposed`, of an upper triangular v[k][k]; row-major. */
int gpu_cublas_solve_upper(struct gpu_cublas *c, float *x, const float *v, bool transposed, int m,
                           int k);
/* A step of a Cholesky factorization of a[k][k], row-major: columns [p, p + n), factored from row p
 * to p + n, are solved for the rows below; the square below loses theirs. Lower triangles. */
int gpu_cublas_cholesky_step(struct gpu_cublas *c, double *a, int k, int p, int n);

/* gpu_cuda.c, of an open GPU. */
struct qt_gpu;
struct gpu_cublas *gpu_cublas_of(struct qt_gpu *gpu);
void *gpu_stream_of(struct qt_gpu *gpu);

/* ---- gpu_math.cu: what the CUDA backend enqueues; a cudaError_t --------------------------------
 *
 * As the functions of struct qt_backend of the same names (base/backend.h, which is no C++), arrays
 * in device memory.
 */

enum gpu_norm { GPU_NORM_RMS, GPU_NORM_RMS1, GPU_NORM_LAYER };
enum gpu_act { GPU_SILU, GPU_GELU_TANH, GPU_GELU, GPU_RELU };
enum { GPU_HIST_BINS = 64 };
struct gpu_score {
    double nll, ref_nll, kld, p_delta;
    int same_top;
};

int gpu_math_bias(float *y, const float *bias, size_t m, size_t n, void *stream);
int gpu_math_add(float *y, const float *x, size_t count, void *stream);
/* rows, factor: device memory. gpu_math_gather, gpu_math_scatter: gather_rows, scatter_rows. */
int gpu_math_gather(float *y, const float *x, const uint32_t *rows, const float *factor, size_t m,
                    size_t n, void *stream);
int gpu_math_scatter(float *y, const float *x, const uint32_t *rows, const float *factor, size_t m,
                     size_t n, void *stream);
/* Parts of the rows of x[rows][k] (or [k][rows], if `transposed`), ld apart, as the left or the right
 * factor of a 3xTF32 product (gpu_product.h): z[rows][width], of each row runs of GPU_PARTS_DEPTH
 * values, the last shorter, each as its low, high and high parts (left) or high, low and high ones
 * (right), side by side. k is filled up with zeros; width(k) is 3 times that. */
enum { GPU_PARTS_DEPTH = 2048 };
size_t gpu_math_parts_width(size_t k);
int gpu_math_parts(float *z, const float *x, size_t rows, size_t k, size_t ld, bool transposed,
                   bool right, void *stream);
int gpu_math_scale(float *y, float factor, size_t count, void *stream);
int gpu_math_activate(float *y, const float *gate, const float *up, enum gpu_act kind, size_t count,
                      void *stream);
int gpu_math_rope(float *x, const float *cos, const float *sin, size_t m, size_t seqlen,
                  size_t heads, size_t dim, size_t half, bool interleaved, void *stream);
int gpu_math_norm(float *y, const float *x, const float *w, const float *bias, enum gpu_norm kind,
                  float eps, size_t m, size_t n, void *stream);
/* s[heads][rows][keys], scores of queries r0 and on with keys lo and on -> probabilities. */
int gpu_math_softmax(float *s, size_t heads, size_t rows, size_t keys, size_t r0, size_t lo,
                     size_t window, float softcap, void *stream);
/* targets: device memory, below vocab. */
int gpu_math_score(struct gpu_score *scores, const float *logits, const float *ref,
                   const uint32_t *targets, float softcap, size_t m, size_t vocab, void *stream);
/* Rows i0 and on of h[k][k], up to the diagonal, += product[rows][cols]. */
int gpu_math_add_lower(double *h, const float *product, size_t i0, size_t rows, size_t cols,
                       size_t k, void *stream);
/* The lower triangle of a[n][n], rows pitch apart, becomes its Cholesky factor. *failed is set to 1
 * if it has none. One block of threads: for tiles. */
int gpu_math_cholesky_tile(double *a, int n, size_t pitch, int *failed, void *stream);
int gpu_math_channels(float *absmax, double *sum2, uint32_t *hist, const float *x, size_t m,
                      size_t k, void *stream);

#ifdef __cplusplus
}
#endif

#endif
