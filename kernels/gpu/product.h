/*
 * Products of FP32 matrices on a GPU (private to kernels/).
 *
 * Where tensor cores multiply TF32 numbers (10 bits of mantissa) at several times the rate of FP32,
 * large products are 3xTF32: each factor is the sum of a high and a low TF32 number, and of the
 * four products that of the low ones, 2^-22 of the result, is left out (Ootomo and Yokota,
 * "Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical
 * peak performance", 2022, section III). The three are one product of three times the depth, of the
 * parts side by side.
 */
#ifndef QT_KERNELS_GPU_PRODUCT_H
#define QT_KERNELS_GPU_PRODUCT_H

#include "base/base.h"
#include "kernels/gpu/internal.h"
#include "kernels/kernels.h"

/* QT_E_INTERNAL of a cudaError_t, that of the launch or of work before it; of a cublasStatus_t,
 * QT_E_RESOURCE where memory lacked. 0: QT_OK. */
int gpu_launched(int status, const char *what, struct qt_err *err);
int gpu_multiplied(int status, struct qt_err *err);

/* Device memory that grows. What it holds lasts until the next need: work is in order, and freeing
 * waits for it. */
struct gpu_scratch {
    void *p;
    size_t bytes;
};
int gpu_scratch_need(struct gpu_scratch *s, struct qt_gpu *gpu, size_t count, size_t size,
                     struct qt_err *err);

struct gpu_products {
    struct qt_gpu *gpu;
    struct gpu_scratch left, right; /* parts of factors, at most 805 MB each; kept */
    struct gpu_scratch made;        /* of a Gram matrix */
    int part_cells;                 /* of a factor whose parts are in memory at a time; 0: 2^26 */
};

void gpu_products_free(struct gpu_products *g);

/* p as it says, or as 3xTF32: then c is off by up to 1e-5 of its typical value, as in FP32 by
 * 2e-6, and what would be infinite may be NaN. (Of products of a batch none is; that of one head
 * of attention may be.) */
int gpu_product(struct gpu_products *g, const struct gpu_product *p, struct qt_err *err);
/* As struct qt_backend has it. */
int gpu_gram(struct gpu_products *g, double *h, const float *x, size_t m, size_t k,
             struct qt_err *err);

#endif
