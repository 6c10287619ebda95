/* The CUDA backend (private to kernels/): what backend.c and host_ops.c share. */
#ifndef QT_KERNELS_GPU_BACKEND_H
#define QT_KERNELS_GPU_BACKEND_H

#include "kernels/gpu/product.h"

/* ctx of the table of functions, which is its first member. */
struct gpu_backend {
    struct qt_backend be;
    char name[400];
    struct qt_gpu *gpu;
    struct qt_backend *cpu;
    struct gpu_cublas *cublas;
    struct gpu_nccl *nccl; /* NULL: not linked */
    struct gpu_products products;
    struct gpu_scratch scratch;
    void *stream;
};

/*
 * host_ops.c: operations that the CUDA backend leaves to the CPU backend. They copy the inputs to
 * host memory and the results back, and have the contracts of the functions of struct qt_backend
 * with the same names.
 */
int gpu_host_convolve(struct qt_backend *be, float *y, const float *x, const float *w,
                      const float *bias, size_t m, size_t seqlen, size_t channels, size_t kernel,
                      struct qt_err *err);
int gpu_host_delta_rule(struct qt_backend *be, float *y, const float *qkv, const float *decay,
                        const float *rate, size_t m, const struct qt_delta *d, struct qt_err *err);
int gpu_host_clip(struct qt_backend *be, float *y, float limit, size_t count, struct qt_err *err);
int gpu_host_attention(struct qt_backend *be, float *y, const float *q, const float *k,
                       const float *v, size_t m, const struct qt_attention *a, struct qt_err *err);
int gpu_host_state_space(struct qt_backend *be, float *y, const float *xbc, const float *steps,
                         size_t m, const struct qt_state_space *s, struct qt_err *err);
int gpu_host_attention_grad(struct qt_backend *be, float *dq, float *dk, float *dv, const float *dy,
                            const float *q, const float *k, const float *v, size_t m,
                            const struct qt_attention *a, struct qt_err *err);

#endif
