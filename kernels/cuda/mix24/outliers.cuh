/*
 * Outliers of the mix24 skinny kernel: Y += X S^T for the CSR matrix S, by warps of their own,
 * while the consumer warps multiply. The columns of X are gathered for all tokens (gather.cu), so
 * an entry costs one or two 16-byte loads for all tokens.
 *
 *   8 lanes per row, 4 rows per warp at a time; lane e % 8 takes entry e of a row
 *
 * Row pointers are loaded two iterations ahead, and the first entries of a row one iteration ahead,
 * so only loads of X are waited for. All lanes of the warp share the remaining entries of long
 * rows. Entries of a row are always added in the same order.
 */
#ifndef QT_KERNELS_CUDA_MIX24_OUTLIERS_CUH
#define QT_KERNELS_CUDA_MIX24_OUTLIERS_CUH

#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/common/ptx_barrier.cuh"
#include "kernels/cuda/mix24/decode.cuh"
#include "kernels/cuda/mix24/mix24.h"

enum {
    OUTLIER_LANES = 8, /* per row */
    OUTLIER_HEAD = 4,  /* entries of a lane, loaded ahead */
    OUTLIER_BATCH = 4, /* entries of a lane, loaded together */
    OUTLIER_LONG = 128 /* entries of a row that its own lanes take */
};

/* Entries [begin, end) of a row. */
struct outlier_range {
    uint32_t begin, end;
};

/* Entries of a lane; missing ones have column ~0. */
template <int N> struct outlier_batch {
    uint32_t col[N], val[N];
};

/* A lane's partial sums, by token. */
template <int MT> struct outlier_sums {
    float v[8 * MT];
};

static __device__ __forceinline__ outlier_range outlier_range_of(const qt_mix24_outliers &o,
                                                                 int panel, int row, bool wanted)
{
    const uint32_t *ptr = o.ptr + panel * o.pitch + row;
    if (!wanted || row >= o.n)
        return {0, 0};
    return {__ldg(ptr), __ldg(ptr + 1)};
}

template <int N>
static __device__ __forceinline__ outlier_batch<N>
outlier_batch_of(const qt_mix24_outliers &o, uint32_t at, uint32_t end, uint32_t step)
{
    outlier_batch<N> b;
#pragma unroll
    for (int i = 0; i < N; i++, at += step) {
        const bool valid = at < end;
        b.col[i] = valid ? __ldg(o.col + at) : ~0u;
        b.val[i] = valid ? __ldg(o.val + at) : 0;
    }
    return b;
}

/* sums += val * x[col]. */
template <int MT, int N>
static __device__ __forceinline__ void outlier_add(outlier_sums<MT> *sums,
                                                   const qt_mix24_outliers &o, int panel,
                                                   const outlier_batch<N> &b)
{
    uint4 x[N][MT];
#pragma unroll
    for (int i = 0; i < N; i++) {
        const uint4 *src = (const uint4 *)o.columns + (panel * 65536 + b.col[i]) * MT;
#pragma unroll
        for (int t = 0; t < MT; t++) /* bypass L1, which may hold data of an earlier launch */
            x[i][t] = b.col[i] == ~0u ? make_uint4(0, 0, 0, 0) : __ldcg(src + t);
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float val = qt_widen(false, (uint16_t)b.val[i]);
#pragma unroll
        for (int t = 0; t < MT; t++) {
            const uint32_t v[4] = {x[i][t].x, x[i][t].y, x[i][t].z, x[i][t].w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float2 f = __half22float2(as_half2(v[j]));
                float *to = sums->v + 8 * t + 2 * j;
                to[0] = fmaf(val, f.x, to[0]);
                to[1] = fmaf(val, f.y, to[1]);
            }
        }
    }
}

/* Adds the entries at, at + step, ... below `end`. */
template <int MT>
static __device__ __forceinline__ void outlier_add_all(outlier_sums<MT> *sums,
                                                       const qt_mix24_outliers &o, int panel,
                                                       uint32_t at, uint32_t end, uint32_t step)
{
#pragma unroll 1
    for (; at < end; at += OUTLIER_BATCH * step)
        outlier_add(sums, o, panel, outlier_batch_of<OUTLIER_BATCH>(o, at, end, step));
}

/* Adds the entries of range r of each of the warp's four rows; long rows by all lanes. Structs by
 * value, so they stay in registers. */
template <int MT>
static __device__ __noinline__ outlier_sums<MT>
outlier_add_rest(outlier_sums<MT> sums, const qt_mix24_outliers &o, int panel, outlier_range r)
{
    const int lane = (int)threadIdx.x % 32;
    const bool is_long = r.end > r.begin + OUTLIER_LONG;
    if (!is_long)
        outlier_add_all(&sums, o, panel, r.begin + lane % OUTLIER_LANES, r.end, OUTLIER_LANES);
    const uint32_t rows = __ballot_sync(~0u, is_long);
#pragma unroll 1
    for (int first = 0; first < 32; first += OUTLIER_LANES) {
        if (!(rows >> first & 1))
            continue;
        const uint32_t begin = __shfl_sync(~0u, r.begin, first);
        const uint32_t end = __shfl_sync(~0u, r.end, first);
        outlier_sums<MT> part = {};
        outlier_add_all(&part, o, panel, begin + lane, end, 32);
#pragma unroll
        for (int t = 0; t < 8 * MT; t++) {
            part.v[t] += __shfl_xor_sync(~0u, part.v[t], 8);
            part.v[t] += __shfl_xor_sync(~0u, part.v[t], 16);
            sums.v[t] += lane / OUTLIER_LANES * OUTLIER_LANES == first ? part.v[t] : 0;
        }
    }
    return sums;
}

/* Adds the partial sums over the lanes of a row: v[0]... of lane i become tokens i MT to i MT + MT
 * - 1. Lanes D apart exchange halves. A recursion, because the compiler keeps a loop over D rolled,
 * with the sums in local memory. */
template <int MT, int D = OUTLIER_LANES / 2>
static __device__ __forceinline__ void outlier_reduce(outlier_sums<MT> *sums)
{
    const bool upper = threadIdx.x & D;
#pragma unroll
    for (int i = 0; i < D * MT; i++) {
        float kept = upper ? sums->v[i + D * MT] : sums->v[i];
        float sent = upper ? sums->v[i] : sums->v[i + D * MT];
        sums->v[i] = kept + __shfl_xor_sync(~0u, sent, D);
    }
    if constexpr (D > 1)
        outlier_reduce<MT, D / 2>(sums);
}

/* Outlier sums of a tile: to[token][row]. first: the tile's first row; warp: number among the
 * outlier warps. dependent: wait for the launch that gathers X. */
template <int MT>
static __device__ __forceinline__ void outlier_tile(const qt_mix24_outliers &o, float *to,
                                                    int pitch, int tokens, int first, int rows,
                                                    int warp, bool dependent)
{
    const int lane = (int)threadIdx.x % 32, sub = lane % OUTLIER_LANES;
    const int step = o.warps * (32 / OUTLIER_LANES); /* rows per iteration */
    int row = warp * (32 / OUTLIER_LANES) + lane / OUTLIER_LANES;
    outlier_range r1 = outlier_range_of(o, 0, first + row, row < rows);
    outlier_range r2 = outlier_range_of(o, 0, first + row + step, row + step < rows);
    outlier_batch<OUTLIER_HEAD> head =
        outlier_batch_of<OUTLIER_HEAD>(o, r1.begin + sub, r1.end, OUTLIER_LANES);
    if (dependent)
        ptx_wait_previous();
#pragma unroll 1
    for (; row < rows; row += step) { /* rows is a multiple of 16: uniform */
        const outlier_range r = r1;
        const outlier_batch<OUTLIER_HEAD> b = head;
        outlier_sums<MT> sums = {};
        r1 = r2;
        r2 = outlier_range_of(o, 0, first + row + 2 * step, row + 2 * step < rows);
        head = outlier_batch_of<OUTLIER_HEAD>(o, r1.begin + sub, r1.end, OUTLIER_LANES);
        outlier_add(&sums, o, 0, b);
        const uint32_t rest = r.begin + OUTLIER_HEAD * OUTLIER_LANES;
        if (__any_sync(~0u, r.end > rest))
            sums = outlier_add_rest(sums, o, 0, {min(rest, r.end), r.end});
        for (int panel = 1; panel < o.panels; panel++)
            sums = outlier_add_rest(sums, o, panel, outlier_range_of(o, panel, first + row, true));
        outlier_reduce(&sums);
#pragma unroll
        for (int i = 0; i < MT; i++)
            if (sub * MT + i < tokens)
                to[(sub * MT + i) * pitch + row] = sums.v[i];
    }
}

/* Prefetches the entries of some rows in CSR panel 0 to L2; thread: 0 to threads - 1. */
static __device__ __forceinline__ void outlier_prefetch(const qt_mix24_outliers &o, int first,
                                                        int rows, int thread, int threads)
{
    const uint32_t begin = __ldg(o.ptr + min(first, o.n));
    const uint32_t end = __ldg(o.ptr + min(first + rows, o.n));
    for (uint32_t e = begin + 64 * thread; e < end; e += 64 * threads) {
        ptx_prefetch_l2(o.col + e);
        ptx_prefetch_l2(o.val + e);
    }
}

#endif
