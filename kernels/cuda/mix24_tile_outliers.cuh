/*
 * Outliers of the mix24 tile kernel: sums X S^T for the CSR matrix S, of a tile's rows and tokens,
 * by a warpgroup of their own while the others multiply. For the few tokens of the skinny kernel
 * lanes share the entries of a row; here they share its tokens, so that nothing is added between
 * lanes:
 *
 *   4 lanes a row, 8 tokens each; 8 rows a warp at a time; entries in batches of 12
 *
 * Columns of X are in memory as wholes, so an entry is a load of 16 bytes a lane. A batch of a row
 * is loaded by its lanes together and passed around. Entries that a row lacks are 0 times a column
 * of zeros, as loads under a condition wait for each other. Of a row with many entries the rest is
 * shared by the whole warp. Sums of a row are always added in the same order.
 */
#ifndef QT_CUDA_MIX24_TILE_OUTLIERS_CUH
#define QT_CUDA_MIX24_TILE_OUTLIERS_CUH

#include "kernels/cuda/mix24_outliers.cuh"

enum {
    ROW_LANES = 4,
    ROW_BATCH = 12, /* entries */
    ROW_LONG = 120, /* entries that a row has for its own lanes: whole batches */
    LANE_TOKENS = 8,
    ROW_TOKENS = ROW_LANES * LANE_TOKENS,
    WARP_ROWS = 32 / ROW_LANES
};

/* X of a lane's tokens: the panel's first column; in units of 16 bytes, from column to column, and
 * to the column of zeros. */
struct row_columns {
    const uint4 *x;
    uint32_t pitch, zeros;
};

/* A lane's entries of a batch, as they are loaded: nothing waits for them yet. */
typedef outlier_batch<ROW_BATCH / ROW_LANES> row_batch;

static __device__ __forceinline__ row_batch row_batch_of(const qt_mix24_outliers &o, uint32_t at,
                                                         uint32_t end)
{
    return outlier_batch_of<ROW_BATCH / ROW_LANES>(o, at + threadIdx.x % ROW_LANES, end, ROW_LANES);
}

/* sums += val * x[col]. */
static __device__ __forceinline__ void row_add(float sums[LANE_TOKENS], const row_batch &b,
                                               const row_columns &c)
{
    uint32_t at[ROW_BATCH / ROW_LANES];
    float val[ROW_BATCH / ROW_LANES];
    uint4 v[ROW_BATCH];
#pragma unroll
    for (int i = 0; i < ROW_BATCH / ROW_LANES; i++) {
        at[i] = b.col[i] == ~0u ? c.zeros : b.col[i] * c.pitch;
        val[i] = __half2float(__ushort_as_half((unsigned short)b.val[i]));
    }
#pragma unroll
    for (int i = 0; i < ROW_BATCH; i++) /* past L1, which may have it from an earlier launch */
        v[i] = __ldcg(c.x + __shfl_sync(~0u, at[i / ROW_LANES], i % ROW_LANES, ROW_LANES));
#pragma unroll
    for (int i = 0; i < ROW_BATCH; i++) {
        const float f = __shfl_sync(~0u, val[i / ROW_LANES], i % ROW_LANES, ROW_LANES);
        const uint32_t word[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 x = __half22float2(as_half2(word[j]));
            sums[2 * j] = fmaf(f, x.x, sums[2 * j]);
            sums[2 * j + 1] = fmaf(f, x.y, sums[2 * j + 1]);
        }
    }
}

/* Entries behind the first ROW_LONG of the warp's rows. */
static __device__ __forceinline__ void row_add_long(float sums[LANE_TOKENS],
                                                    const qt_mix24_outliers &o, outlier_range r,
                                                    const row_columns &c)
{
    const int lane = (int)threadIdx.x % 32;
    const uint32_t rows = __ballot_sync(~0u, r.end > r.begin + ROW_LONG);
#pragma unroll 1
    for (int first = 0; first < 32; first += ROW_LANES) {
        if (!(rows >> first & 1))
            continue;
        const uint32_t begin = __shfl_sync(~0u, r.begin, first) + ROW_LONG;
        const uint32_t end = __shfl_sync(~0u, r.end, first);
        float part[LANE_TOKENS] = {};
#pragma unroll 1
        for (uint32_t at = begin; at < end; at += WARP_ROWS * ROW_BATCH) {
            const uint32_t mine = min(at + lane / ROW_LANES * ROW_BATCH, end);
            row_add(part, row_batch_of(o, mine, end), c);
        }
#pragma unroll
        for (int t = 0; t < LANE_TOKENS; t++) {
#pragma unroll
            for (int d = ROW_LANES; d < 32; d *= 2)
                part[t] += __shfl_xor_sync(~0u, part[t], d);
            sums[t] += lane / ROW_LANES * ROW_LANES == first ? part[t] : 0;
        }
    }
}

/* A row of each ROW_LANES lanes; b: its first batch. */
static __device__ __forceinline__ void row_add_all(float sums[LANE_TOKENS],
                                                   const qt_mix24_outliers &o, outlier_range r,
                                                   row_batch b, const row_columns &c)
{
    const int count = (int)(r.end - r.begin);
    const int most = (int)__reduce_max_sync(~0u, (unsigned)min(count, (int)ROW_LONG));
#pragma unroll 1
    for (int at = 0; at < most; at += ROW_BATCH) {
        const row_batch now = b;
        b = row_batch_of(o, r.begin + at + ROW_BATCH, r.end);
        row_add(sums, now, c);
    }
    if (__any_sync(~0u, count > ROW_LONG))
        row_add_long(sums, o, r, c);
}

/* Rows `first` to first + rows - 1, ROW_TOKENS tokens from token0 on, of which `tokens` are wanted;
 * warp: of those that do this; to: the first row's sums, row_pitch floats from row to row. */
static __device__ __forceinline__ void outlier_rows(const qt_mix24_outliers &o, int first, int rows,
                                                    int token0, int tokens, int warp, float *to,
                                                    int row_pitch)
{
    const int step = o.warps * WARP_ROWS, lane = (int)threadIdx.x % 32;
    const int token = lane % ROW_LANES * LANE_TOKENS;
    /* A lane without tokens does as the first one. */
    const int mine = token < tokens ? token : 0;
    row_columns c;
    c.x = (const uint4 *)(o.columns + token0 + mine);
    c.pitch = (uint32_t)o.column_pitch / LANE_TOKENS;
    c.zeros = (uint32_t)o.zeros * c.pitch;
    int row = warp * WARP_ROWS + lane / ROW_LANES;
    outlier_range next = outlier_range_of(o, 0, first + row, row < rows);
    row_batch next_batch = row_batch_of(o, next.begin, next.end);
#pragma unroll 1
    for (; row < rows; row += step) { /* rows is a multiple of step */
        float sums[LANE_TOKENS] = {};
        row_columns here = c;
        outlier_range r = next;
        row_batch b = next_batch;
        next = outlier_range_of(o, 0, first + row + step, row + step < rows);
        for (int panel = 0;;) {
            row_add_all(sums, o, r, b, here);
            if (++panel >= o.panels)
                break;
            r = outlier_range_of(o, panel, first + row, true);
            b = row_batch_of(o, r.begin, r.end);
            here.x += (size_t)65536 * c.pitch;
            here.zeros -= 65536 * c.pitch;
        }
        next_batch = row_batch_of(o, next.begin, next.end);
        float4 *at = (float4 *)(to + (size_t)row * row_pitch + token);
        if (token < tokens) {
            at[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
            at[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
        }
    }
}

#endif
