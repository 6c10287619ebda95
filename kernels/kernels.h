/*
 * kernels: the backends behind struct qt_backend, and the GPU as verify and bench see it.
 *
 *   backend_cpu.c, cpu_*   the CPU backend
 *   qtool_kernels.h, cuda/ libqtool_kernels: fused products on packed weights; qtool_w4ax.h,
 *                          qtool_kv4.h: those of w4ax and attention over 4-bit caches
 *   gpu_backend.c          the CUDA backend; gpu_product.c: its products; gpu_math.cu: its kernels
 *   gpu_cuda.c             struct qt_gpu over libqtool_kernels and the CUDA run time
 *   gpu_copy.c             copies between host and device
 *   gpu_cublas.c           cuBLAS, loaded at run time
 *   gpu_transfer.cu        kernels that only read or copy: what others are measured against
 *   gpu_none.c             instead of these in builds without nvcc
 */
#ifndef QT_KERNELS_KERNELS_H
#define QT_KERNELS_KERNELS_H

#include "base/base.h"
#include "kernels/include/qtool_kernels.h"
#include "kernels/include/qtool_kv4.h"
#include "kernels/include/qtool_w4ax.h"

/* OpenBLAS + OpenMP. Uses the threads of qt_threads_set. Close with be->close(be). */
int qt_backend_cpu_open(struct qt_backend **out, struct qt_err *err);
/* A GPU: cuBLAS in FP32 or 3xTF32 (Cholesky: FP64) and kernels; gradients of what is no product on
 * the CPU. Results differ from the CPU's by rounding, and are the same from run to run. QT_E_NO_GPU
 * as of qt_gpu_open, or without cuBLAS. */
int qt_backend_cuda_open(struct qt_backend **out, int device, struct qt_err *err);

/* ---- a GPU ---------------------------------------------------------------------------------- */

enum {
    QT_GPU_TRANSFERS = 12, /* launch shapes of struct qt_gpu.transfer */
    QT_GPU_WORKS = 3,      /* that struct qt_gpu.time times at once, at most */
};

/* What is timed: launch(ctx, i, err) enqueues a kernel or some, on copy i < count of what they
 * read. */
struct qt_gpu_work {
    int (*launch)(void *ctx, size_t i, struct qt_err *err);
    void *ctx;
    size_t count;
};

/*
 * One GPU: memory, fused products, time. A table of functions, so that what is built on it builds
 * without CUDA and can be tested against a stand-in. Work goes to one stream, in order; download
 * and time return when it is done, upload when src has been read, everything else only enqueues.
 * Failed CUDA calls are QT_E_INTERNAL, memory that is not there QT_E_RESOURCE.
 */
struct qt_gpu {
    char name[128];   /* "NVIDIA H200" */
    char cuda[64];    /* "driver 580.159.04, CUDA 13.0" */
    char cublas[160]; /* "cuBLAS 13.0.2", or why there is none */
    bool has_cublas;
    qtool_matmul_dense_fn *dense; /* cuBLAS, for struct qtool_matmul_options; or NULL */
    void *dense_context;
    int device, sms, cc;
    size_t l2_bytes, memory_bytes;
    void *ctx;

    /* 256-byte aligned. */
    int (*alloc)(struct qt_gpu *gpu, void **out, size_t bytes, struct qt_err *err);
    void (*free)(struct qt_gpu *gpu, void *p);
    int (*upload)(struct qt_gpu *gpu, void *dst, const void *src, size_t bytes, struct qt_err *err);
    int (*download)(struct qt_gpu *gpu, void *dst, const void *src, size_t bytes,
                    struct qt_err *err);
    int (*copy)(struct qt_gpu *gpu, void *dst, const void *src, size_t bytes, struct qt_err *err);
    int (*fill)(struct qt_gpu *gpu, void *dst, int byte, size_t bytes, struct qt_err *err);
    /* Host memory that is copied often, until unpin: faster, if it can be had. */
    void (*pin)(struct qt_gpu *gpu, void *p, size_t bytes);
    void (*unpin)(struct qt_gpu *gpu, void *p);

    /* qt_matmul_*; QT_E_UNSUPPORTED with the reason when plan refuses. */
    int (*plan)(struct qt_gpu *gpu, struct qtool_matmul_plan *out,
                const struct qtool_matmul_weight *w, size_t m,
                const struct qtool_matmul_options *opt, struct qt_err *err);
    int (*replan)(struct qt_gpu *gpu, struct qtool_matmul_plan *plan,
                  const struct qtool_matmul_weight *w, struct qt_err *err);
    int (*run)(struct qt_gpu *gpu, const struct qtool_matmul_plan *plan,
               const struct qtool_matmul_weight *w, void *y, const void *x, void *workspace,
               struct qt_err *err);
    int (*dequantize)(struct qt_gpu *gpu, const struct qtool_matmul_weight *w, void *out,
                      enum qtool_dtype dtype, struct qt_err *err);

    /* qt_w4ax_*; QT_E_UNSUPPORTED with the reason when plan refuses, or what quantize cannot take.
     */
    size_t (*w4ax_blocks)(uint32_t *words, const uint8_t *bits, size_t count, int packed);
    int (*w4ax_quantize)(struct qt_gpu *gpu, const struct qtool_w4ax_acts *out,
                         const struct qtool_w4ax_input *in, const void *x, size_t m,
                         enum qtool_dtype dtype, struct qt_err *err);
    int (*w4ax_plan)(struct qt_gpu *gpu, struct qtool_w4ax_plan *out,
                     const struct qtool_w4ax_weight *w, size_t m,
                     const struct qtool_w4ax_options *opt, struct qt_err *err);
    int (*w4ax_run)(struct qt_gpu *gpu, const struct qtool_w4ax_plan *plan,
                    const struct qtool_w4ax_weight *w, const struct qtool_w4ax_acts *acts, void *y,
                    void *workspace, struct qt_err *err);

    /* qt_kv_*; QT_E_UNSUPPORTED with the reason when plan refuses. */
    int (*kv_append)(struct qt_gpu *gpu, const struct qtool_kv_cache *cache, const void *k,
                     const void *v, const int *sequence, const int *position, size_t tokens,
                     enum qtool_dtype dtype, struct qt_err *err);
    int (*kv_plan)(struct qt_gpu *gpu, struct qtool_kv_plan *out,
                   const struct qtool_kv_cache *cache, const struct qtool_kv_options *opt,
                   struct qt_err *err);
    int (*kv_run)(struct qt_gpu *gpu, const struct qtool_kv_plan *plan,
                  const struct qtool_kv_cache *cache, void *out, const void *q, const int *length,
                  void *workspace, struct qt_err *err);

    /* Copies bytes (a multiple of 16) by a kernel of plain loads and stores; dst NULL: only reads
     * them. shape < QT_GPU_TRANSFERS. */
    int (*transfer)(struct qt_gpu *gpu, void *dst, const void *src, size_t bytes, int shape,
                    struct qt_err *err);
    /* FP16 y[m][n] = x[m][k] w[n][k]^T by cuBLAS with FP32 sums; only if has_cublas. */
    int (*gemm)(struct qt_gpu *gpu, void *y, const void *x, const void *w, size_t m, size_t n,
                size_t k, struct qt_err *err);

    /*
     * Microseconds of one launch, us[j] of works[j], j < n <= QT_GPU_WORKS: it is called for
     * i = 0..count-1 (again from 0 until there are 8) and captured into one CUDA graph; the median
     * of its replays, divided by the launches in it. With copies that are together several times
     * the L2 all reads are cold. The works take turns, a replay each, so that what the GPU does to
     * its clock, which long products bring down, it does to all of them; before the first it rests
     * until it has recovered from what was timed last.
     */
    int (*time)(struct qt_gpu *gpu, double *us, const struct qt_gpu_work *works, size_t n,
                struct qt_err *err);
    void (*close)(struct qt_gpu *gpu);
};

/* Whether this is a build with CUDA. */
bool qt_gpu_built(void);
/* QT_E_NO_GPU in one clear line: built without CUDA, no driver, no such device, too old. */
int qt_gpu_open(struct qt_gpu **out, int device, struct qt_err *err);

#endif
