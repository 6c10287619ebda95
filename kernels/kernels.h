/*
 * kernels: the CPU and CUDA backends behind struct qt_backend, and struct qt_gpu, the interface of
 * verify and bench to a GPU.
 *
 *   cpu/             the CPU backend
 *   include/, cuda/  libqtool_kernels: matrix products with packed weights (qtool_kernels.h),
 *                    w4ax (qtool_w4ax.h), attention over 4-bit KV caches (qtool_kv4.h),
 *                    layers of experts (qtool_moe.h), the other kernels of a decoder
 *                    (qtool_decoder.h)
 *   gpu/backend.c    the CUDA backend; product.c: its matrix products; attention.c, factor.c,
 *                    round.c, grad.c: larger functions; host_ops.c: what the CPU computes;
 *                    math.cu and *_kernels.cu: its kernels
 *   gpu/cuda.c       struct qt_gpu on top of libqtool_kernels and the CUDA runtime
 *   gpu/copy.c       copies between host and device
 *   gpu/cublas.c     cuBLAS, loaded at run time; nccl.c: NCCL; energy.c: NVML
 *   gpu/transfer.cu  kernels that only read or copy, to measure memory bandwidth
 *   gpu/none.c       replaces the files of gpu/ in builds without nvcc
 */
#ifndef QT_KERNELS_KERNELS_H
#define QT_KERNELS_KERNELS_H

#include "base/base.h"
#include "kernels/include/qtool_decoder.h"
#include "kernels/include/qtool_kernels.h"
#include "kernels/include/qtool_kv4.h"
#include "kernels/include/qtool_moe.h"
#include "kernels/include/qtool_w4ax.h"

/* Opens the CPU backend: OpenBLAS and OpenMP, on the threads of qt_threads_set. Close with
 * be->close(be). QT_E_RESOURCE if memory or address space is short. */
int qt_backend_cpu_open(struct qt_backend **out, struct qt_err *err);
/* Opens the CUDA backend on a GPU: cuBLAS in FP32 or 3xTF32 (with `half` FP16 and TF32; Cholesky:
 * FP64), and CUDA kernels. The CPU computes what few models need: convolutions, recurrences, and
 * attention with a bias or to both sides. Results are the same from run to run; they differ from
 * the CPU backend's by rounding. QT_E_NO_GPU as qt_gpu_open, or without cuBLAS. */
int qt_backend_cuda_open(struct qt_backend **out, int device, struct qt_err *err);

/* Number of GPUs of this machine; 0 if they cannot be used. */
size_t qt_gpu_count(void);

/* ---- a GPU ---------------------------------------------------------------------------------- */

enum {
    QT_GPU_TRANSFERS = 12, /* launch shapes of struct qt_gpu.transfer */
    QT_GPU_WORKS = 3,      /* largest n of struct qt_gpu.time */
};

/* Work to be timed: launch(ctx, i, err) enqueues one or more kernels on copy i of their operands,
 * i < count. */
struct qt_gpu_work {
    int (*launch)(void *ctx, size_t i, struct qt_err *err);
    void *ctx;
    size_t count;
};

struct qt_gpu_graph;

/*
 * One GPU: memory, kernels, timing. It is a table of functions, so that its users build without
 * CUDA and can be tested with a simulated device. All work goes to one stream, in order. download
 * and time return when the work is done, upload when src has been read. copy, fill, run, run_many,
 * dequantize, w4ax_quantize, w4ax_run, kv_append, kv_run, moe_run, decode, replay, transfer, gemm,
 * gemm_f32 and gemm_batch only enqueue. The plan functions and w4ax_blocks compute on the host.
 * Errors: QT_E_INTERNAL for failed CUDA calls, QT_E_RESOURCE if device memory is exhausted.
 */
struct qt_gpu {
    char name[128];   /* "NVIDIA H200" */
    char cuda[64];    /* "driver 580.159.04, CUDA 13.0" */
    char cublas[160]; /* "cuBLAS 13.0.2", or the reason why cuBLAS is missing */
    bool has_cublas;
    qtool_matmul_dense_fn *dense; /* cuBLAS, for struct qtool_matmul_options; or NULL */
    void *dense_context;
    int device, sms;
    int cc; /* compute capability of the device, 10 * major + minor */
    size_t l2_bytes, memory_bytes;
    void *ctx;

    /* Device memory, 256-byte aligned. */
    int (*alloc)(struct qt_gpu *gpu, void **out, size_t bytes, struct qt_err *err);
    void (*free)(struct qt_gpu *gpu, void *p);
    /* Bytes that can be allocated, approximately. */
    size_t (*room)(struct qt_gpu *gpu);
    int (*upload)(struct qt_gpu *gpu, void *dst, const void *src, size_t bytes, struct qt_err *err);
    int (*download)(struct qt_gpu *gpu, void *dst, const void *src, size_t bytes,
                    struct qt_err *err);
    int (*copy)(struct qt_gpu *gpu, void *dst, const void *src, size_t bytes, struct qt_err *err);
    int (*fill)(struct qt_gpu *gpu, void *dst, int byte, size_t bytes, struct qt_err *err);
    /* Tries to page-lock host memory that is copied often, until unpin. A failure is ignored. */
    void (*pin)(struct qt_gpu *gpu, void *p, size_t bytes);
    void (*unpin)(struct qt_gpu *gpu, void *p);

    /* The functions qtool_matmul_* of the kernel library. QT_E_UNSUPPORTED with the reason if plan
     * refuses. */
    int (*plan)(struct qt_gpu *gpu, struct qtool_matmul_plan *out,
                const struct qtool_matmul_weight *w, size_t m,
                const struct qtool_matmul_options *opt, struct qt_err *err);
    int (*run)(struct qt_gpu *gpu, const struct qtool_matmul_plan *plan,
               const struct qtool_matmul_weight *w, void *y, const void *x, void *workspace,
               struct qt_err *err);
    int (*plan_many)(struct qt_gpu *gpu, struct qtool_matmul_plan *out,
                     const struct qtool_matmul_weight *const *w, size_t count, size_t m,
                     const struct qtool_matmul_options *opt, struct qt_err *err);
    int (*run_many)(struct qt_gpu *gpu, const struct qtool_matmul_plan *plan,
                    const struct qtool_matmul_weight *const *w, size_t count, void *const *y,
                    const void *x, struct qt_err *err);
    int (*dequantize)(struct qt_gpu *gpu, const struct qtool_matmul_weight *w, void *out,
                      enum qtool_dtype dtype, struct qt_err *err);

    /* The functions qtool_w4ax_*. QT_E_UNSUPPORTED with the reason if plan refuses, or if quantize
     * does not support the input. */
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

    /* The functions qtool_kv_*. QT_E_UNSUPPORTED with the reason if plan refuses. */
    int (*kv_append)(struct qt_gpu *gpu, const struct qtool_kv_cache *cache, const void *k,
                     const void *v, const int *sequence, const int *position, size_t tokens,
                     enum qtool_dtype dtype, bool dependent, struct qt_err *err);
    int (*kv_plan)(struct qt_gpu *gpu, struct qtool_kv_plan *out,
                   const struct qtool_kv_cache *cache, const struct qtool_kv_options *opt,
                   size_t split_tokens, struct qt_err *err);
    int (*kv_run)(struct qt_gpu *gpu, const struct qtool_kv_plan *plan,
                  const struct qtool_kv_cache *cache, void *out, const void *q, const int *length,
                  void *workspace, struct qt_err *err);

    /* The functions qtool_moe_*. QT_E_UNSUPPORTED with the reason if table or plan refuses. */
    int (*moe_table)(struct qt_gpu *gpu, void *table, const struct qtool_moe_layer *layer,
                     struct qt_err *err);
    int (*moe_plan)(struct qt_gpu *gpu, struct qtool_moe_plan *out,
                    const struct qtool_moe_layer *layer, size_t tokens,
                    const struct qtool_moe_options *opt, struct qt_err *err);
    int (*moe_run)(struct qt_gpu *gpu, const struct qtool_moe_plan *plan, const void *table,
                   void *y, const void *x, const int *ids, const float *weights, void *workspace,
                   struct qt_err *err);

    /* The function qtool_decoder_run. dependent: programmatic dependent launch, where the GPU has
     * it. QT_E_UNSUPPORTED: a size or alignment that is not supported. */
    int (*decode)(struct qt_gpu *gpu, const struct qtool_decoder_op *op, bool dependent,
                  struct qt_err *err);

    /* Captures what fn(ctx) enqueues into a graph; replay enqueues it again. Each kernel that fn
     * launches must have run before. The caller frees *out with graph_free. */
    int (*capture)(struct qt_gpu *gpu, struct qt_gpu_graph **out,
                   int (*fn)(void *ctx, struct qt_err *err), void *ctx, struct qt_err *err);
    int (*replay)(struct qt_gpu *gpu, struct qt_gpu_graph *graph, struct qt_err *err);
    void (*graph_free)(struct qt_gpu *gpu, struct qt_gpu_graph *graph);

    /* Copies bytes (a multiple of 16) by a kernel of plain loads and stores; dst = NULL: only
     * reads. shape < QT_GPU_TRANSFERS selects the launch configuration. */
    int (*transfer)(struct qt_gpu *gpu, void *dst, const void *src, size_t bytes, int shape,
                    struct qt_err *err);
    /* FP16 y[m][n] = x[m][k] w[n][k]^T by cuBLAS with FP32 accumulation; needs has_cublas. */
    int (*gemm)(struct qt_gpu *gpu, void *y, const void *x, const void *w, size_t m, size_t n,
                size_t k, struct qt_err *err);
    /* The same with FP32 y. */
    int (*gemm_f32)(struct qt_gpu *gpu, float *y, const void *x, const void *w, size_t m, size_t n,
                    size_t k, struct qt_err *err);

    /* The same for `count` products, whose matrices follow each other. */
    int (*gemm_batch)(struct qt_gpu *gpu, void *y, const void *x, const void *w, size_t count,
                      size_t m, size_t n, size_t k, struct qt_err *err);

    /*
     * Returns in us[j] the microseconds of one launch of works[j], j < n <= QT_GPU_WORKS. The
     * launches for i = 0..count-1 (repeated until there are 8) are captured into one CUDA graph;
     * us[j] is the median time of its replays, divided by the number of launches. If the copies
     * together are several times larger than the L2 cache, all reads are cold. The works are
     * replayed alternately, so that changes of the GPU's clock affect all of them. Before the first
     * replay the function waits, at most 150 ms, until the GPU's clock has recovered from the
     * previous measurement.
     */
    int (*time)(struct qt_gpu *gpu, double *us, const struct qt_gpu_work *works, size_t n,
                struct qt_err *err);
    /* Joules that the board has used since some time in the past, by NVML; NaN: unknown. */
    double (*energy)(struct qt_gpu *gpu);
    void (*close)(struct qt_gpu *gpu);
};

/* True in builds with CUDA. */
bool qt_gpu_built(void);
/* Opens a GPU; close it with gpu->close(gpu). QT_E_NO_GPU with the reason: built without CUDA, no
 * driver, no such device, or an unsupported GPU. */
int qt_gpu_open(struct qt_gpu **out, int device, struct qt_err *err);

#endif
