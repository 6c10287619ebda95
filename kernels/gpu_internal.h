/* Parts of struct qt_gpu that are compiled apart. */
#ifndef QT_GPU_INTERNAL_H
#define QT_GPU_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Enqueues on `stream` (a cudaStream_t) a copy of bytes to dst, or only their reading: then dst is
 * 4 bytes that are not used. A cudaError_t. */
int gpu_transfer_launch(void *dst, const void *src, size_t bytes, bool copy, int shape, int sms,
                        void *stream);

struct gpu_cublas;
/* NULL when cuBLAS cannot be used; text[size] tells its version, or why not. Products go to
 * `stream` and use the workspace, device memory of `bytes`. */
struct gpu_cublas *gpu_cublas_open(char *text, size_t size, void *stream, void *workspace,
                                   size_t bytes);
void gpu_cublas_close(struct gpu_cublas *c);
/* y[m][n] = x[m][k] w[n][k]^T in FP16 or BF16; a cublasStatus_t, 0 for success. */
int gpu_cublas_gemm(struct gpu_cublas *c, void *y, const void *x, const void *w, int m, int n,
                    int k, bool bf16);

#ifdef __cplusplus
}
#endif

#endif
