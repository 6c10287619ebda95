/* Implements struct qt_gpu with the CUDA runtime and libqtool_kernels. */
#include "kernels/gpu/internal.h"
#include "kernels/gpu/status.h"
#include "kernels/kernels.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    CUBLAS_WORKSPACE = 64 << 20,
    MIN_LAUNCHES = 8, /* per graph, so that the launch of the graph itself does not count */
    WARM_UP = 2,
    REPLAYS = 15,
};

struct lane {
    cudaStream_t stream;
    cudaEvent_t reached;
    void *workspace; /* of cuBLAS */
};

struct gpu {
    struct qt_gpu gpu;
    cudaStream_t stream; /* that of the lane in use */
    struct lane lane[GPU_LANES];
    size_t lanes;       /* that run */
    cudaMemPool_t pool; /* NULL: the device has none */
    void *sink;
    struct gpu_staging *staging;
    struct gpu_cublas *cublas;
    struct gpu_energy *energy;
    bool dependent;   /* the GPU runs code for 9.0, which has dependent launches */
    double rested_ms; /* time (now_ms) when the GPU clock has recovered from the last timing */
};

static struct gpu *self(struct qt_gpu *gpu)
{
    return gpu->ctx;
}

static int check(cudaError_t e, const char *what, struct qt_err *err)
{
    if (e == cudaSuccess)
        return QT_OK;
    return qt_fail(err, e == cudaErrorMemoryAllocation ? QT_E_RESOURCE : QT_E_INTERNAL, NULL, NULL,
                   "GPU: %s failed: %s", what, cudaGetErrorString(e));
}

struct gpu_cublas *gpu_cublas_of(struct qt_gpu *gpu)
{
    return self(gpu)->cublas;
}

void *gpu_stream_of(struct qt_gpu *gpu)
{
    return self(gpu)->stream;
}

/* ---- lanes ---------------------------------------------------------------------------------- */

static int gpu_alloc(struct qt_gpu *gpu, void **out, size_t bytes, struct qt_err *err);

static int open_lane(struct gpu *g, struct lane *lane, struct qt_err *err)
{
    int rc = QT_OK;
    if (!lane->stream)
        QT_TRY(
            check(cudaStreamCreateWithFlags(&lane->stream, cudaStreamNonBlocking), "stream", err));
    if (!lane->reached)
        QT_TRY(
            check(cudaEventCreateWithFlags(&lane->reached, cudaEventDisableTiming), "event", err));
    if (!lane->workspace)
        QT_TRY(gpu_alloc(&g->gpu, &lane->workspace, CUBLAS_WORKSPACE, err));
done:
    return rc;
}

/* Work that is enqueued on `later` from now on waits for the work that `first` has now. */
static int follow(const struct lane *first, const struct lane *later, struct qt_err *err)
{
    int rc;
    QT_TRY(check(cudaEventRecord(first->reached, first->stream), "event", err));
    QT_TRY(check(cudaStreamWaitEvent(later->stream, first->reached, 0), "event", err));
done:
    return rc;
}

int gpu_lane_use(struct qt_gpu *gpu, size_t i, struct qt_err *err)
{
    struct gpu *g = self(gpu);
    const struct lane *lane = &g->lane[i % g->lanes];
    if (g->stream == lane->stream)
        return QT_OK;
    g->stream = lane->stream;
    return gpu_check_cublas(
        gpu_cublas_move(g->cublas, lane->stream, lane->workspace, CUBLAS_WORKSPACE), err);
}

int gpu_lanes_begin(struct qt_gpu *gpu, size_t count, struct qt_err *err)
{
    struct gpu *g = self(gpu);
    int rc = QT_OK;
    for (size_t i = 1; i < qt_min_size(count, GPU_LANES); i++) {
        QT_TRY(open_lane(g, &g->lane[i], err)); /* before the lane waits: its memory is lane 0's */
        QT_TRY(follow(&g->lane[0], &g->lane[i], err));
        g->lanes = i + 1;
    }
done:
    return rc;
}

int gpu_lanes_end(struct qt_gpu *gpu, struct qt_err *err)
{
    struct gpu *g = self(gpu);
    int rc = gpu_lane_use(gpu, 0, err);
    for (size_t i = 1; i < g->lanes; i++) { /* all of them, also after a failure */
        const int one = follow(&g->lane[i], &g->lane[0], rc < 0 ? NULL : err);
        rc = rc < 0 ? rc : one;
    }
    g->lanes = 1;
    return rc;
}

/* ---- memory --------------------------------------------------------------------------------- */

/* Memory comes from a pool in the order of the stream: neither allocating nor freeing waits for the
 * GPU. */
static int gpu_alloc(struct qt_gpu *gpu, void **out, size_t bytes, struct qt_err *err)
{
    struct gpu *g = self(gpu);
    const size_t size = bytes ? bytes : 1;
    *out = NULL;
    cudaError_t e =
        g->pool ? cudaMallocFromPoolAsync(out, size, g->pool, g->stream) : cudaMalloc(out, size);
    if (e == cudaErrorMemoryAllocation && g->pool) { /* other sizes may hold free memory */
        cudaGetLastError();
        cudaStreamSynchronize(g->stream);
        cudaMemPoolTrimTo(g->pool, 0);
        e = cudaMallocFromPoolAsync(out, size, g->pool, g->stream);
    }
    if (e == cudaErrorMemoryAllocation) {
        cudaGetLastError(); /* clears the error, which the next launch would report */
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of GPU memory (%zu bytes)", bytes);
    }
    return check(e, "allocation", err);
}

/* Work that is already enqueued may still use the memory. */
static void gpu_free(struct qt_gpu *gpu, void *p)
{
    struct gpu *g = self(gpu);
    if (p && g->pool)
        cudaFreeAsync(p, g->stream);
    else if (p)
        cudaStreamSynchronize(g->stream);
    if (!g->pool)
        cudaFree(p);
}

static size_t gpu_room(struct qt_gpu *gpu)
{
    const struct gpu *g = self(gpu);
    uint64_t reserved = 0, used = 0;
    size_t room, total;
    if (cudaMemGetInfo(&room, &total) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    if (g->pool &&
        cudaMemPoolGetAttribute(g->pool, cudaMemPoolAttrReservedMemCurrent, &reserved) ==
            cudaSuccess &&
        cudaMemPoolGetAttribute(g->pool, cudaMemPoolAttrUsedMemCurrent, &used) == cudaSuccess)
        room += reserved - used;
    return room;
}

static int gpu_upload(struct qt_gpu *gpu, void *dst, const void *src, size_t bytes,
                      struct qt_err *err)
{
    struct gpu *g = self(gpu);
    return check(gpu_staging_upload(g->staging, g->stream, dst, src, bytes), "upload", err);
}

/* Also reports the failure of a kernel that was enqueued before. */
static int gpu_download(struct qt_gpu *gpu, void *dst, const void *src, size_t bytes,
                        struct qt_err *err)
{
    struct gpu *g = self(gpu);
    return check(gpu_staging_download(g->staging, g->stream, dst, src, bytes), "download", err);
}

static int gpu_copy(struct qt_gpu *gpu, void *dst, const void *src, size_t bytes,
                    struct qt_err *err)
{
    return check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, self(gpu)->stream),
                 "copy", err);
}

static int gpu_fill(struct qt_gpu *gpu, void *dst, int byte, size_t bytes, struct qt_err *err)
{
    return check(cudaMemsetAsync(dst, byte, bytes, self(gpu)->stream), "fill", err);
}

static void gpu_pin(struct qt_gpu *gpu, void *p, size_t bytes)
{
    (void)gpu;
    if (cudaHostRegister(p, bytes, cudaHostRegisterDefault) != cudaSuccess)
        cudaGetLastError(); /* clears the error, which the next launch would report */
}

static void gpu_unpin(struct qt_gpu *gpu, void *p)
{
    (void)gpu;
    if (p && cudaHostUnregister(p) != cudaSuccess)
        cudaGetLastError();
}

/* ---- products ------------------------------------------------------------------------------- */

static int planned(int status, const char *reason, struct qt_err *err)
{
    switch (status) {
    case QTOOL_OK:
        return QT_OK;
    case QTOOL_UNSUPPORTED:
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "%s", reason);
    case QTOOL_NO_GPU:
        return qt_fail(err, QT_E_NO_GPU, NULL, NULL, "%s", reason);
    default:
        return qt_fail(err, QT_E_INTERNAL, NULL, NULL, "GPU: %s", reason);
    }
}

/* A qtool_matmul_dense_fn. The cuBLAS handle already has the stream. */
static int dense_product(void *cublas, void *y, size_t ldy, const void *x, const void *w, size_t m,
                         size_t n, size_t k, enum qtool_dtype dtype, void *stream)
{
    (void)stream;
    return gpu_cublas_gemm(cublas, y, (int)ldy, x, w, (int)m, (int)n, (int)k, dtype == QTOOL_BF16);
}

static int gpu_plan(struct qt_gpu *gpu, struct qtool_matmul_plan *out,
                    const struct qtool_matmul_weight *w, size_t m,
                    const struct qtool_matmul_options *opt, struct qt_err *err)
{
    (void)gpu;
    return planned(qtool_matmul_plan(out, w, m, opt), out->reason, err);
}

static int launched(int status, const char *what, struct qt_err *err)
{
    if (status == QTOOL_OK)
        return QT_OK;
    const cudaError_t e = cudaGetLastError();
    return qt_fail(err, e == cudaErrorMemoryAllocation ? QT_E_RESOURCE : QT_E_INTERNAL, NULL, NULL,
                   "GPU: %s failed with status %d: %s", what, status, cudaGetErrorString(e));
}

static int gpu_run(struct qt_gpu *gpu, const struct qtool_matmul_plan *plan,
                   const struct qtool_matmul_weight *w, void *y, const void *x, void *workspace,
                   struct qt_err *err)
{
    return launched(qtool_matmul_run(plan, w, y, x, workspace, self(gpu)->stream), "fused product",
                    err);
}

static int gpu_plan_many(struct qt_gpu *gpu, struct qtool_matmul_plan *out,
                         const struct qtool_matmul_weight *const *w, size_t count, size_t m,
                         const struct qtool_matmul_options *opt, struct qt_err *err)
{
    (void)gpu;
    return planned(qtool_matmul_plan_many(out, w, count, m, opt), out->reason, err);
}

static int gpu_run_many(struct qt_gpu *gpu, const struct qtool_matmul_plan *plan,
                        const struct qtool_matmul_weight *const *w, size_t count, void *const *y,
                        const void *x, struct qt_err *err)
{
    return launched(qtool_matmul_run_many(plan, w, count, y, x, self(gpu)->stream),
                    "fused products", err);
}

static int gpu_dequantize(struct qt_gpu *gpu, const struct qtool_matmul_weight *w, void *out,
                          enum qtool_dtype dtype, struct qt_err *err)
{
    return launched(qtool_matmul_dequantize(w, out, dtype, self(gpu)->stream), "dequantize", err);
}

/* ---- w4ax and caches ------------------------------------------------------------------------ */

static int gpu_w4ax_quantize(struct qt_gpu *gpu, const struct qtool_w4ax_acts *out,
                             const struct qtool_w4ax_input *in, const void *x, size_t m,
                             enum qtool_dtype dtype, struct qt_err *err)
{
    const struct qtool_w4ax_norm none = {.kind = QTOOL_W4AX_NO_NORM};
    int status = qtool_w4ax_quantize(out, in, &none, x, m, dtype, self(gpu)->stream);
    if (status == QTOOL_UNSUPPORTED)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                       "activations: the number of channels, %zu, must be a multiple of 8, at most "
                       "65536, and fit in shared memory",
                       in->k);
    return launched(status, "activations", err);
}

static int gpu_w4ax_plan(struct qt_gpu *gpu, struct qtool_w4ax_plan *out,
                         const struct qtool_w4ax_weight *w, size_t m,
                         const struct qtool_w4ax_options *opt, struct qt_err *err)
{
    (void)gpu;
    return planned(qtool_w4ax_plan(out, w, m, opt), out->reason, err);
}

static int gpu_w4ax_run(struct qt_gpu *gpu, const struct qtool_w4ax_plan *plan,
                        const struct qtool_w4ax_weight *w, const struct qtool_w4ax_acts *acts,
                        void *y, void *workspace, struct qt_err *err)
{
    return launched(qtool_w4ax_run(plan, w, acts, y, workspace, self(gpu)->stream), "w4ax product",
                    err);
}

static int gpu_kv_append(struct qt_gpu *gpu, const struct qtool_kv_cache *cache, const void *k,
                         const void *v, const int *sequence, const int *position, size_t tokens,
                         enum qtool_dtype dtype, bool dependent, struct qt_err *err)
{
    int status = qtool_kv_append(cache, k, v, sequence, position, tokens, dtype, dependent,
                                 self(gpu)->stream);
    return launched(status, "append to a cache", err);
}

static int gpu_kv_plan(struct qt_gpu *gpu, struct qtool_kv_plan *out,
                       const struct qtool_kv_cache *cache, const struct qtool_kv_options *opt,
                       size_t split_tokens, struct qt_err *err)
{
    (void)gpu;
    return planned(qtool_kv_attention_plan(out, cache, opt, split_tokens), out->reason, err);
}

static int gpu_kv_run(struct qt_gpu *gpu, const struct qtool_kv_plan *plan,
                      const struct qtool_kv_cache *cache, void *out, const void *q,
                      const int *length, void *workspace, struct qt_err *err)
{
    return launched(
        qtool_kv_attention_run(plan, cache, out, q, length, workspace, self(gpu)->stream),
        "attention", err);
}

/* ---- experts --------------------------------------------------------------------------------- */

static int gpu_moe_table(struct qt_gpu *gpu, void *table, const struct qtool_moe_layer *layer,
                         struct qt_err *err)
{
    char reason[160];
    (void)gpu;
    return planned(qtool_moe_table(table, layer, reason), reason, err);
}

static int gpu_moe_plan(struct qt_gpu *gpu, struct qtool_moe_plan *out,
                        const struct qtool_moe_layer *layer, size_t tokens,
                        const struct qtool_moe_options *opt, struct qt_err *err)
{
    (void)gpu;
    return planned(qtool_moe_plan(out, layer, tokens, opt), out->reason, err);
}

static int gpu_moe_run(struct qt_gpu *gpu, const struct qtool_moe_plan *plan, const void *table,
                       void *y, const void *x, const int *ids, const float *weights,
                       void *workspace, struct qt_err *err)
{
    return launched(qtool_moe_run(plan, table, y, x, ids, weights, workspace, self(gpu)->stream),
                    "experts", err);
}

/* ---- decoders ------------------------------------------------------------------------------- */

static int gpu_decode(struct qt_gpu *gpu, const struct qtool_decoder_op *op, bool dependent,
                      struct qt_err *err)
{
    int status = qtool_decoder_run(op, dependent && self(gpu)->dependent, self(gpu)->stream);
    if (status == QTOOL_UNSUPPORTED)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                       "a kernel of the decoder does not support the sizes of the model");
    return launched(status, "kernel of the decoder", err);
}

struct qt_gpu_graph {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
};

static void gpu_graph_free(struct qt_gpu *gpu, struct qt_gpu_graph *graph)
{
    if (!graph)
        return;
    cudaStreamSynchronize(self(gpu)->stream);
    if (graph->exec)
        cudaGraphExecDestroy(graph->exec);
    if (graph->graph)
        cudaGraphDestroy(graph->graph);
    qt_free(graph);
}

static int capture_into(struct qt_gpu_graph *out, struct gpu *g,
                        int (*fn)(void *ctx, struct qt_err *err), void *ctx, struct qt_err *err)
{
    int rc;
    QT_TRY(check(cudaStreamBeginCapture(g->stream, cudaStreamCaptureModeThreadLocal),
                 "graph capture", err));
    rc = fn(ctx, err);
    /* The capture is ended after a failure too; otherwise the stream could not be used again. */
    cudaError_t e = cudaStreamEndCapture(g->stream, &out->graph);
    if (rc == QT_OK)
        rc = check(e, "graph capture", err);
    if (rc == QT_OK)
        rc = check(cudaGraphInstantiate(&out->exec, out->graph, 0), "graph instantiation", err);
done:
    return rc;
}

static int gpu_capture(struct qt_gpu *gpu, struct qt_gpu_graph **out,
                       int (*fn)(void *ctx, struct qt_err *err), void *ctx, struct qt_err *err)
{
    int rc;
    *out = NULL;
    QT_TRY(qt_array_new(out, 1, sizeof **out, err));
    rc = capture_into(*out, self(gpu), fn, ctx, err);
    if (rc < 0) {
        gpu_graph_free(gpu, *out);
        *out = NULL;
    }
done:
    return rc;
}

static int gpu_replay(struct qt_gpu *gpu, struct qt_gpu_graph *graph, struct qt_err *err)
{
    return check(cudaGraphLaunch(graph->exec, self(gpu)->stream), "graph launch", err);
}

/* ---- baselines ------------------------------------------------------------------------------ */

static int gpu_transfer(struct qt_gpu *gpu, void *dst, const void *src, size_t bytes, int shape,
                        struct qt_err *err)
{
    struct gpu *g = self(gpu);
    return check((cudaError_t)gpu_transfer_launch(dst ? dst : g->sink, src, bytes, dst != NULL,
                                                  shape, gpu->sms, g->stream),
                 "transfer", err);
}

static int gpu_gemm(struct qt_gpu *gpu, void *y, const void *x, const void *w, size_t m, size_t n,
                    size_t k, struct qt_err *err)
{
    return gpu_check_cublas(
        gpu_cublas_gemm(self(gpu)->cublas, y, (int)n, x, w, (int)m, (int)n, (int)k, false), err);
}

static int gpu_gemm_batch(struct qt_gpu *gpu, void *y, const void *x, const void *w, size_t count,
                          size_t m, size_t n, size_t k, struct qt_err *err)
{
    return gpu_check_cublas(
        gpu_cublas_gemm_batch(self(gpu)->cublas, y, x, w, (int)count, (int)m, (int)n, (int)k), err);
}

static int gpu_gemm_f32(struct qt_gpu *gpu, float *y, const void *x, const void *w, size_t m,
                        size_t n, size_t k, struct qt_err *err)
{
    return gpu_check_cublas(gpu_cublas_gemm_f32(self(gpu)->cublas, y, x, w, (int)m, (int)n, (int)k),
                            err);
}

/* ---- time ----------------------------------------------------------------------------------- */

/*
 * A GPU at its power limit lowers its clock: an H200 by a quarter, and it is back at 97 % after
 * 100 ms of idling and at 99 % after 150 ms (docs/kernels.md). 50 ms of large products have this
 * effect, 6 ms do not, so the idle time is proportional to the busy time.
 */
static const double rest_max_ms = 150, rest_per_ms = 3;

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static void rest(const struct gpu *g)
{
    const double ms = g->rested_ms - now_ms();
    if (ms > 0)
        nanosleep(&(struct timespec){.tv_nsec = (long)(ms * 1e6)}, NULL);
}

/* The launches of a work as a CUDA graph, and the times of its replays. */
struct timed {
    const struct qt_gpu_work *work;
    struct qt_gpu_graph graph;
    size_t launches;
    float ms[WARM_UP + REPLAYS];
};

static int launch_all(void *ctx, struct qt_err *err)
{
    const struct timed *t = ctx;
    int rc = QT_OK;
    for (size_t i = 0; rc == QT_OK && i < t->launches; i++)
        rc = t->work->launch(t->work->ctx, i % t->work->count, err);
    return rc;
}

static int capture(struct timed *t, struct gpu *g, const struct qt_gpu_work *w, struct qt_err *err)
{
    t->work = w;
    t->launches = w->count < MIN_LAUNCHES ? qt_round_up(MIN_LAUNCHES, w->count) : w->count;
    return capture_into(&t->graph, g, launch_all, t, err);
}

static int replay(float *ms, struct gpu *g, cudaGraphExec_t exec, cudaEvent_t begin,
                  cudaEvent_t end, struct qt_err *err)
{
    int rc;
    QT_TRY(check(cudaEventRecord(begin, g->stream), "event", err));
    QT_TRY(check(cudaGraphLaunch(exec, g->stream), "graph launch", err));
    QT_TRY(check(cudaEventRecord(end, g->stream), "event", err));
    QT_TRY(check(cudaEventSynchronize(end), "graph execution", err));
    QT_TRY(check(cudaEventElapsedTime(ms, begin, end), "event", err));
done:
    return rc;
}

static int compare_float(const void *a, const void *b)
{
    const float *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

static double median_us(struct timed *t)
{
    qsort(t->ms + WARM_UP, REPLAYS, sizeof *t->ms, compare_float);
    return 1000 * (double)t->ms[WARM_UP + REPLAYS / 2] / (double)t->launches;
}

static int gpu_time(struct qt_gpu *gpu, double *us, const struct qt_gpu_work *works, size_t n,
                    struct qt_err *err)
{
    struct timed timed[QT_GPU_WORKS] = {{.work = NULL}};
    cudaEvent_t begin = NULL, end = NULL;
    double busy_ms = 0;
    int rc = QT_OK;
    for (size_t j = 0; j < n; j++)
        QT_TRY(capture(&timed[j], self(gpu), &works[j], err));
    QT_TRY(check(cudaEventCreate(&begin), "event", err));
    QT_TRY(check(cudaEventCreate(&end), "event", err));
    rest(self(gpu));
    for (size_t i = 0; i < WARM_UP + REPLAYS; i++)
        for (size_t j = 0; j < n; j++) {
            QT_TRY(replay(&timed[j].ms[i], self(gpu), timed[j].graph.exec, begin, end, err));
            busy_ms += timed[j].ms[i];
        }
    self(gpu)->rested_ms = now_ms() + fmin(busy_ms * rest_per_ms, rest_max_ms);
    for (size_t j = 0; j < n; j++)
        us[j] = median_us(&timed[j]);
done:
    if (begin)
        cudaEventDestroy(begin);
    if (end)
        cudaEventDestroy(end);
    for (size_t j = 0; j < n; j++) {
        if (timed[j].graph.exec)
            cudaGraphExecDestroy(timed[j].graph.exec);
        if (timed[j].graph.graph)
            cudaGraphDestroy(timed[j].graph.graph);
    }
    return rc;
}

static double gpu_energy(struct qt_gpu *gpu)
{
    return gpu_energy_joules(self(gpu)->energy);
}

/* ---- opening -------------------------------------------------------------------------------- */

static int no_gpu(int device, const char *why, struct qt_err *err)
{
    return qt_fail(err, QT_E_NO_GPU, NULL, NULL, "no GPU %d: %s", device, why);
}

static int find_device(int device, struct qt_err *err)
{
    int driver = 0, count = 0, rc = QT_OK;
    /* Without a driver the runtime reports version 0, and its error says that the driver is too
     * old. */
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0)
        return no_gpu(device, "no NVIDIA driver on this machine", err);
    cudaError_t e = cudaGetDeviceCount(&count);
    if (e != cudaSuccess)
        return no_gpu(device, cudaGetErrorString(e), err);
    if (device >= count)
        rc = qt_fail(err, QT_E_NO_GPU, NULL, NULL,
                     "no GPU %d: this machine has %d, numbered from 0", device, count);
    return rc;
}

/* Writes "driver 580.159.04, CUDA 13.0". The driver version is the first word with a dot in a line
 * like "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build". */
static void describe_cuda(char *text, size_t size)
{
    char line[256] = "", *rest = line, *word = NULL;
    int version = 0;
    FILE *f = fopen("/proc/driver/nvidia/version", "r");
    if (f && fgets(line, sizeof line, f))
        while ((word = strtok_r(rest, " \t\n", &rest)) && !strchr(word, '.'))
            ;
    if (f)
        fclose(f);
    cudaDriverGetVersion(&version);
    snprintf(text, size, "driver %.30s, CUDA %d.%d", word ? word : "?", version / 1000,
             version % 1000 / 10);
}

static int fill_properties(struct qt_gpu *gpu, struct qt_err *err)
{
    struct cudaDeviceProp p;
    int rc = check(cudaGetDeviceProperties(&p, gpu->device), "device properties", err);
    if (rc < 0)
        return rc;
    snprintf(gpu->name, sizeof gpu->name, "%.100s", p.name);
    describe_cuda(gpu->cuda, sizeof gpu->cuda);
    gpu->sms = p.multiProcessorCount;
    gpu->cc = 10 * p.major + p.minor;
    gpu->l2_bytes = (size_t)p.l2CacheSize;
    gpu->memory_bytes = p.totalGlobalMem;
    if (gpu->cc < 80)
        return qt_fail(err, QT_E_NO_GPU, NULL, NULL,
                       "no GPU %d: %s has compute capability %d.%d, but the kernels need 8.0",
                       gpu->device, gpu->name, p.major, p.minor);
    return QT_OK;
}

/* A pool that keeps freed memory. */
static void open_pool(struct gpu *g)
{
    const struct cudaMemPoolProps props = {
        .allocType = cudaMemAllocationTypePinned,
        .location = {.type = cudaMemLocationTypeDevice, .id = g->gpu.device}};
    uint64_t keep = UINT64_MAX;
    int supported = 0;
    if (cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, g->gpu.device) !=
            cudaSuccess ||
        !supported || cudaMemPoolCreate(&g->pool, &props) != cudaSuccess) {
        cudaGetLastError();
        g->pool = NULL;
        return;
    }
    cudaMemPoolSetAttribute(g->pool, cudaMemPoolAttrReleaseThreshold, &keep);
}

static void gpu_close(struct qt_gpu *gpu)
{
    struct gpu *g = gpu ? self(gpu) : NULL;
    if (!g)
        return;
    gpu_cublas_close(g->cublas);
    gpu_energy_close(g->energy);
    gpu_staging_close(g->staging);
    for (size_t i = 0; i < GPU_LANES; i++)
        gpu_free(gpu, g->lane[i].workspace);
    gpu_free(gpu, g->sink);
    if (g->stream)
        cudaStreamSynchronize(g->stream);
    if (g->pool)
        cudaMemPoolDestroy(g->pool);
    for (size_t i = 0; i < GPU_LANES; i++) {
        if (g->lane[i].reached)
            cudaEventDestroy(g->lane[i].reached);
        if (g->lane[i].stream)
            cudaStreamDestroy(g->lane[i].stream);
    }
    qt_free(g);
}

static const struct qt_gpu functions = {
    .alloc = gpu_alloc,
    .free = gpu_free,
    .room = gpu_room,
    .upload = gpu_upload,
    .download = gpu_download,
    .copy = gpu_copy,
    .fill = gpu_fill,
    .pin = gpu_pin,
    .unpin = gpu_unpin,
    .plan = gpu_plan,
    .run = gpu_run,
    .plan_many = gpu_plan_many,
    .run_many = gpu_run_many,
    .dequantize = gpu_dequantize,
    .w4ax_blocks = qtool_w4ax_blocks,
    .w4ax_quantize = gpu_w4ax_quantize,
    .w4ax_plan = gpu_w4ax_plan,
    .w4ax_run = gpu_w4ax_run,
    .kv_append = gpu_kv_append,
    .kv_plan = gpu_kv_plan,
    .kv_run = gpu_kv_run,
    .moe_table = gpu_moe_table,
    .moe_plan = gpu_moe_plan,
    .moe_run = gpu_moe_run,
    .decode = gpu_decode,
    .capture = gpu_capture,
    .replay = gpu_replay,
    .graph_free = gpu_graph_free,
    .transfer = gpu_transfer,
    .gemm = gpu_gemm,
    .gemm_f32 = gpu_gemm_f32,
    .gemm_batch = gpu_gemm_batch,
    .time = gpu_time,
    .energy = gpu_energy,
    .close = gpu_close,
};

bool qt_gpu_built(void)
{
    return true;
}

size_t qt_gpu_count(void)
{
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess && count > 0 ? (size_t)count : 0;
}

int qt_gpu_open(struct qt_gpu **out, int device, struct qt_err *err)
{
    struct gpu *g = NULL;
    char pci[32];
    int rc;
    *out = NULL;
    QT_TRY(find_device(device, err));
    QT_TRY(qt_array_new(&g, 1, sizeof *g, err));
    g->gpu = functions;
    g->gpu.ctx = g;
    g->gpu.device = device;
    QT_TRY(check(cudaSetDevice(device), "device", err));
    QT_TRY(fill_properties(&g->gpu, err));
    open_pool(g);
    QT_TRY(open_lane(g, &g->lane[0], err));
    g->stream = g->lane[0].stream;
    g->lanes = 1;
    g->dependent = qtool_kernels_compute(device) == 90;
    if (cudaDeviceGetPCIBusId(pci, sizeof pci, device) == cudaSuccess)
        g->energy = gpu_energy_open(pci);
    g->staging = gpu_staging_open(g->stream);
    QT_TRY(gpu_alloc(&g->gpu, &g->sink, 256, err));
    g->cublas = gpu_cublas_open(g->gpu.cublas, sizeof g->gpu.cublas, g->stream,
                                g->lane[0].workspace, CUBLAS_WORKSPACE);
    g->gpu.has_cublas = g->cublas != NULL;
    if (g->cublas) {
        g->gpu.dense = dense_product;
        g->gpu.dense_context = g->cublas;
    }
    *out = &g->gpu;
done:
    if (rc < 0 && g)
        gpu_close(&g->gpu);
    return rc;
}
