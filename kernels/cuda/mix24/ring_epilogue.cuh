/* The mix24 ring kernel (ring.cuh): epilogue of a pass, from accumulators to Y, with the outliers.

 */
#ifndef QT_KERNELS_CUDA_MIX24_RING_EPILOGUE_CUH
#define QT_KERNELS_CUDA_MIX24_RING_EPILOGUE_CUH

#include "kernels/cuda/common/accumulators.cuh"
#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/mix24/ring_load.cuh"

/* ---- outliers -----------------------------------------------------------------------------------
 *
 * The CSR entries of a pass are contiguous (per CSR panel); those of CSR panel 0 are copied to
 * shared memory one pass ahead, if they fit. The threads that reduce an output also add the entries
 * of its row. Rows with many entries are shared among all warps first.
 */
enum { MIX24_LONG_ROW = 256 }; /* entries per thread of an output */

struct mix24_run {
    const uint16_t *col, *val; /* address of entry 0 of the section, in global or shared memory */
};

static __device__ __forceinline__ const uint32_t *
mix24_row_ptr(const qt_mix24_args &a, const mix24_warp &w, int panel, int row)
{
    return (const uint32_t *)(qt_smem + a.ptr_at) + panel * a.ptr_rows + row - w.first_strip * 16;
}

static __device__ __forceinline__ void mix24_stage_ptr(const qt_mix24_args &a, const mix24_warp &w)
{
    const int row0 = w.first_strip * 16;
    for (int p = 0; p < a.panels; p++)
        for (int i = (int)threadIdx.x; i < a.ptr_rows; i += (int)blockDim.x)
            ptx_copy_4(ptx_shared(mix24_row_ptr(a, w, p, row0 + i)),
                       a.csr_ptr + p * a.csr_pitch + min(row0 + i, a.n));
}

static __device__ __forceinline__ unsigned char *mix24_window(const qt_mix24_args &a, int pass)
{
    return qt_smem + a.window_at + (pass & 1) * a.window * 4;
}

/* Copies entries begin .. end - 1 of CSR panel 0, from a multiple of 8 on, followed by zeros. */
static __device__ __forceinline__ void mix24_copy_run(const qt_mix24_args &a, int pass,
                                                      uint32_t begin, uint32_t end)
{
    const uint32_t base = begin & ~7u, dst = ptx_shared(mix24_window(a, pass));
    if (end - base > (uint32_t)a.window)
        return;
    for (uint32_t i = threadIdx.x * 8; i < end - base; i += blockDim.x * 8) {
        uint32_t bytes = min(end - base - i, 8u) * 2;
        ptx_copy_16_zero(dst + i * 2, a.csr_col + base + i, bytes);
        ptx_copy_16_zero(dst + (uint32_t)a.window * 2 + i * 2, a.csr_val + base + i, bytes);
    }
}

static __device__ __forceinline__ mix24_run mix24_run_of(const qt_mix24_args &a, int pass,
                                                         int panel, uint32_t begin, uint32_t end)
{
    mix24_run r = {a.csr_col, a.csr_val};
    const uint32_t base = begin & ~7u;
    if (panel == 0 && end - base <= (uint32_t)a.window) {
        r.col = (const uint16_t *)mix24_window(a, pass) - base;
        r.val = r.col + a.window;
    }
    return r;
}

/* Adds val * x for the entries begin, begin + step, ... of a row; x: the token. Skips columns of
 * other thread blocks. */
static __device__ __forceinline__ float mix24_add_entries(const qt_mix24_args &a,
                                                          const mix24_run &r, int col0, int cols,
                                                          const unsigned char *x, uint32_t begin,
                                                          uint32_t end, uint32_t step)
{
    float sum = 0;
#pragma unroll 4
    for (uint32_t e = begin; e < end; e += step) {
        int col = (int)r.col[e] + col0;
        float v = qt_widen(false, r.val[e]);
        if ((unsigned)col < (unsigned)cols)
            sum = fmaf(v, __half2float(*(const __half *)(x + col * 2)), sum);
    }
    return sum;
}

static __device__ __forceinline__ bool mix24_is_long(const qt_mix24_args &a, const uint32_t *ptr)
{
    return ptr[1] - ptr[0] > (uint32_t)MIX24_LONG_ROW << a.row_threads;
}

/* Adds rows with many entries to the warps' partial sums; each warp takes a token, or a part of
 * one. */
static __device__ __noinline__ void mix24_long_rows(const qt_mix24_args &a, mix24_warp w, int pass)
{
    const int rows = w.pass_strips * 16, row0 = (w.first_strip + pass * w.pass_strips) * 16;
    const int warps = (int)blockDim.x / 32, warp = (int)threadIdx.x / 32;
    const int parts = min(a.long_parts, a.warps_k);
    const int cols = (w.cta_unit1 - w.cta_unit0) * QT_MIX24_UNIT_COLS;
    float *sums = (float *)(qt_smem + a.sums_at);
    for (int panel = 0; panel < a.panels; panel++)
        for (int row = 0; row < rows; row++) {
            const uint32_t *ptr = mix24_row_ptr(a, w, panel, row0 + row);
            if (row0 + row >= (w.last_strip + 1) * 16 || !mix24_is_long(a, ptr))
                continue;
            mix24_run r = {a.csr_col, a.csr_val};
            for (int i = warp; i < a.m * parts; i += warps) {
                int token = i % a.m, part = i / a.m;
                float v = mix24_add_entries(a, r, panel * 65536 - w.cta_unit0 * QT_MIX24_UNIT_COLS,
                                            cols, qt_smem + token * a.x_pitch,
                                            ptr[0] + (uint32_t)(part * 32 + w.lane), ptr[1],
                                            (uint32_t)parts * 32);
                for (int d = 16; d; d /= 2)
                    v += __shfl_xor_sync(~0u, v, d);
                if (w.lane == 0)
                    sums[(part * a.m + token) * (rows + 4) + row] += v;
            }
        }
}

/* ---- reduction ----------------------------------------------------------------------------------
 *
 * Partial sums of the warps in shared memory: [warps_k][m][rows of a pass + 4]. In a cluster,
 * thread block r owns the r-th part of the rows of a pass; its inbox is [2 passes][thread
 * blocks][m][rows / cluster].
 */
static __device__ __forceinline__ void mix24_store_y(const qt_mix24_args &a, const mix24_warp &w,
                                                     int token, int row, float v)
{
    size_t at = (size_t)token * a.n + row;
    if (row >= min((w.last_strip + 1) * 16, a.n))
        return;
    if (a.before) /* bypass L1, which may hold data from before the previous launch */
        v += __ldcg(a.before + at);
    if (a.after)
        a.after[at] = v;
    else
        qt_put_rounded(a.y, at, v, a.bf16);
}

/* The outliers of an output in the pass, except those of long rows: the part of thread `sub` of its
 * 2^row_threads threads. */
static __device__ __forceinline__ float mix24_row_outliers(const qt_mix24_args &a,
                                                           const mix24_warp &w, int pass, int token,
                                                           int row, int sub)
{
    const int row0 = (w.first_strip + pass * w.pass_strips) * 16,
              rows = min(w.pass_strips * 16, (w.last_strip + 1) * 16 - row0);
    float v = 0;
    for (int panel = 0; panel < a.panels; panel++) {
        const uint32_t *ptr = mix24_row_ptr(a, w, panel, row0);
        mix24_run r = mix24_run_of(a, pass, panel, ptr[0], ptr[rows]);
        if (row < rows && !mix24_is_long(a, ptr + row))
            v += mix24_add_entries(a, r, panel * 65536 - w.cta_unit0 * QT_MIX24_UNIT_COLS,
                                   (w.cta_unit1 - w.cta_unit0) * QT_MIX24_UNIT_COLS,
                                   qt_smem + token * a.x_pitch, ptr[row] + (uint32_t)sub,
                                   ptr[row + 1], 1u << a.row_threads);
    }
    return v;
}

/* Sends an output to the thread block of the cluster that owns the row. */
static __device__ __forceinline__ void mix24_send(const qt_mix24_args &a, const mix24_warp &w,
                                                  int pass, int token, int row, float v)
{
    const int rows = w.pass_strips * 16 / a.cluster, rank = row / rows;
    const int at = (((pass & 1) * a.cluster + (int)blockIdx.x) * a.m + token) * rows + row % rows;
    const uint32_t smem = ptx_shared(qt_smem);
    ptx_cluster_send(
        ptx_cluster_map(smem + (uint32_t)(a.inbox_at + at * 4), (uint32_t)rank), v,
        ptx_cluster_map(smem + (uint32_t)(a.barrier_at + (pass & 1) * 8), (uint32_t)rank));
}

/* Adds the warps' partial sums of a pass, with 2^row_threads threads per output; stores to Y or
 * sends to the cluster. */
static __device__ __forceinline__ void mix24_add_warps(const qt_mix24_args &a, const mix24_warp &w,
                                                       int pass)
{
    const int rows = w.pass_strips * 16, log2_rows = 31 - __clz(rows), outputs = a.m * rows;
    const int step = (rows + 4) * a.m, threads = 1 << a.row_threads;
    const int sub = (int)threadIdx.x & (threads - 1),
              row0 = (w.first_strip + pass * w.pass_strips) * 16;
    /* The thread that begins rotates from pass to pass: there may be fewer outputs than threads. */
    const int start =
        (int)(threadIdx.x + (unsigned)(pass * outputs * threads)) & ((int)blockDim.x - 1);
#pragma unroll 1
    for (int i = 0; i < outputs; i += (int)blockDim.x >> a.row_threads) {
        int o = i + (start >> a.row_threads), token = o >> log2_rows, row = o & (rows - 1);
        float v = 0;
        if (o < outputs) {
            const float *src = (const float *)(qt_smem + a.sums_at) + token * (rows + 4) + row;
#pragma unroll 4
            for (int j = sub; j < a.warps_k; j += threads)
                v += src[j * step];
            if (a.csr_ptr)
                v += mix24_row_outliers(a, w, pass, token, row, sub);
        }
        for (int d = threads / 2; d; d /= 2)
            v += __shfl_xor_sync(~0u, v, d);
        if (o >= outputs || sub)
            continue;
        v *= mix24_token_factor(a, token);
        if (a.cluster > 1)
            mix24_send(a, w, pass, token, row, v);
        else
            mix24_store_y(a, w, token, row0 + row, v);
    }
}

/* Adds the sums of the cluster's thread blocks for the rows that this thread block owns. */
static __device__ __forceinline__ void mix24_add_blocks(const qt_mix24_args &a, const mix24_warp &w,
                                                        int pass)
{
    const int rows = w.pass_strips * 16 / a.cluster, log2_rows = 31 - __clz(rows),
              outputs = a.m * rows;
    const int row0 = (w.first_strip + pass * w.pass_strips) * 16 + (int)blockIdx.x * rows;
    const float *inbox = (const float *)(qt_smem + a.inbox_at) + (pass & 1) * a.cluster * outputs;
    ptx_barrier_wait_cluster(ptx_shared(qt_smem) + (uint32_t)(a.barrier_at + (pass & 1) * 8),
                             (uint32_t)(pass >> 1 & 1));
#pragma unroll 1
    for (int o = (int)threadIdx.x; o < outputs; o += (int)blockDim.x) {
        float v = 0;
        for (int r = 0; r < a.cluster; r++)
            v += inbox[r * outputs + o];
        mix24_store_y(a, w, o >> log2_rows, row0 + (o & (rows - 1)), v);
    }
}

/* Whether one of the rows that this thread checks is long; the threads share the thread block's
 * rows. */
static __device__ __forceinline__ bool mix24_has_long(const qt_mix24_args &a, const mix24_warp &w)
{
    const int rows = a.ptr_rows - 1;
    bool any = false;
    for (int i = (int)threadIdx.x; i < rows * a.panels; i += (int)blockDim.x)
        any |= mix24_is_long(a, mix24_row_ptr(a, w, i / rows, w.first_strip * 16 + i % rows));
    return any;
}

/* The epilogue of a pass. */
template <int MT, int STRIPS>
static __device__ __forceinline__ void
mix24_pass_epilogue(const qt_mix24_args &a, const mix24_warp &w,
                    const qt_accumulators<MT, STRIPS> &sums, int pass)
{
    __syncthreads(); /* partial sums of the previous pass have been read */
    const int pitch = w.pass_strips * 16 + 4;
    qt_accumulators_store((float *)(qt_smem + a.sums_at) + w.wk * a.m * pitch + w.wn * STRIPS * 16,
                          pitch, a.m, sums);
    if (a.cluster > 1) {
        const int rows = w.pass_strips * 16;
        if (pass == 0)
            ptx_cluster_wait(); /* all thread blocks of the cluster run */
        else
            mix24_add_blocks(a, w, pass - 1);
        if (threadIdx.x == 0)
            ptx_barrier_expect(ptx_shared(qt_smem) + (uint32_t)(a.barrier_at + (pass & 1) * 8),
                               (uint32_t)(a.m * rows * 4));
    }
    int *long_rows = (int *)(qt_smem + a.long_at);
    if (pass == 0 && a.csr_ptr && mix24_has_long(a, w))
        atomicOr(long_rows, 1);
    __syncthreads();
    if (*long_rows) {
        mix24_long_rows(a, w, pass);
        __syncthreads();
    }
    mix24_add_warps(a, w, pass);
}

#endif
