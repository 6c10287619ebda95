/* References and comparisons of the GPU tests (reference.cu). Pointers are device pointers. */
#ifndef QT_TESTS_GPU_REFERENCE_H
#define QT_TESTS_GPU_REFERENCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#define GPU_AND_HOST __host__ __device__
#else
#define GPU_AND_HOST
#endif

/* Returns a pseudorandom number: the finalizer of MurmurHash3. */
static inline GPU_AND_HOST uint32_t gpu_hash(uint64_t x)
{
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdULL;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ULL;
    x ^= x >> 33;
    return (uint32_t)x;
}

#include "kernels/include/qtool_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Ends the program if a CUDA call fails. */
#define CHECK(call)                                                                                \
    do {                                                                                           \
        cudaError_t e_ = (call);                                                                   \
        if (e_ != cudaSuccess) {                                                                   \
            printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_));          \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* Allocates device memory, or ends the program. */
void *gpu_alloc(size_t bytes);

/* Weights divided by `unit`, a power of two, are rounded to FP16 or BF16. unit 0: no rounding. */
struct gpu_rounding {
    double unit;
    int bf16;
};
/* Computes y[m][n] = x[m][k] w[n][pitch]^T in FP64; x is FP16 or BF16. */
void gpu_reference(double *y, const void *x, const float *w, size_t m, size_t n, size_t k,
                   size_t pitch, int bf16, struct gpu_rounding weights);
/* A dense product for struct qtool_matmul_options with FP32 accumulators. context is not used. */
int gpu_dense(void *context, void *y, size_t ldy, const void *x, const void *w, size_t m, size_t n,
              size_t k, enum qtool_dtype dtype, void *stream);
/* Relative errors in the Frobenius norm: |y - reference| / |reference|, infinite if y has a NaN or
 * an infinity, and the same for the reference rounded to y's type. */
struct gpu_error {
    double all, rounding;
};
struct gpu_error gpu_error_of(const void *y, const double *reference, size_t count, int bf16);

/* True if all words equal `word`. */
bool gpu_all_are(uint32_t word, const void *p, size_t words);
/* Copies x by a slow kernel that first allows the next dependent launch to start. */
void gpu_write_late(uint16_t *to, const uint16_t *x, size_t count);

#ifdef __cplusplus
}
#endif

#endif
