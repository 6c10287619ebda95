/*
 * Outliers of the mix24 tile kernel for tiles of few tokens: sums X S^T for the CSR matrix S over a
 * tile's rows and tokens, by a warpgroup of their own, while the consumer warpgroups multiply.
 * Issue slots for instructions other than wgmma are scarce (docs/design/kernels.md), so 16 entries
 * at a time are one mma.sync for 8 rows and 16 tokens:
 *
 *   D [tokens][8 rows] += A [tokens][16 entries] B [16 entries][8 rows]
 *
 * Entries of adjacent rows are contiguous. A warp processes the entries of 8 to 32 rows in chunks
 * of 16, without regard to row boundaries; a chunk that covers two groups of 8 rows takes one mma
 * per group. B holds an entry's value in the column of its row, and zeros elsewhere. A
 * holds columns of X, which are contiguous in memory:
 *
 *   columns [packed column][tokens] -- cp.async --> shared memory: 4 buffers per warp,
 *                                                   [16 entries][T tokens]
 *                                   -- ldmatrix, transposed --> A
 *
 * Entries are loaded 64 at a time, two per lane, and exchanged by shuffles.
 *
 * Traffic    entries once per T tokens, a column of T tokens per entry (through L2); FP32 sums
 */
#ifndef QT_KERNELS_CUDA_MIX24_TILE_OUTLIERS_CUH
#define QT_KERNELS_CUDA_MIX24_TILE_OUTLIERS_CUH

#include "kernels/cuda/mix24/outliers.cuh"
#include "kernels/cuda/mix24/tile.h"

enum {
    OUTLIER_GROUP = 8, /* rows per mma */
    OUTLIER_GROUPS = 4 /* groups of a warp at a time, at most */
};

/* Entries 2 l and 2 l + 1 of 64, for lane l. */
struct outlier_entries {
    uint32_t cols, vals;
};

/* Loads the 64 entries from `at` on, a multiple of 8. */
static __device__ __forceinline__ outlier_entries outlier_entries_at(const qt_mix24_outliers &o,
                                                                     uint32_t at, uint32_t end)
{
    outlier_entries e = {0, 0};
    at += threadIdx.x % 32 * 2;
    if (at < end) {
        e.cols = __ldg((const uint32_t *)(o.col + at));
        e.vals = __ldg((const uint32_t *)(o.val + at));
    }
    return e;
}

/* Position of a warp in the entries of its rows, for T tokens. Two lanes copy the column of an
 * entry. */
template <int T> struct outlier_stream {
    const __half *x; /* the lane's part of column 0 of the CSR panel */
    uint32_t column_pitch;
    uint32_t base;            /* start of the chunks: a multiple of 8 */
    uint32_t begin, end;      /* the entries; earlier ones may be of another CSR panel */
    uint32_t copy_to[T / 16]; /* addresses of the lane's 16-byte pieces in buffer 0 */
    uint32_t load_at[T / 16]; /* ldmatrix addresses of A, per 16 tokens, in buffer 0 */

    /* Offset of a piece of an entry in a buffer: 2 T bytes per entry, swizzled so that the pieces
     * that ldmatrix reads together are in different banks. */
    static __device__ __forceinline__ uint32_t piece_at(int entry, int piece)
    {
        const int swizzle = T == 64 ? entry % 8 : entry / 2 % 4;
        return (uint32_t)(entry * (2 * T) + (piece ^ swizzle) * 16);
    }
    __device__ __forceinline__ outlier_stream(const qt_mix24_outliers &o, uint32_t buffers,
                                              int panel, int token0)
    {
        const int lane = (int)threadIdx.x % 32, first_piece = lane % 2 * (T / 16);
        const int entry = lane % 8 + lane / 16 * 8; /* whose address the lane passes to ldmatrix */
        column_pitch = (uint32_t)o.column_pitch;
        x = o.columns + (size_t)panel * 65536 * o.column_pitch + token0 + first_piece * 8;
#pragma unroll
        for (int i = 0; i < T / 16; i++) {
            copy_to[i] = buffers + piece_at(lane / 2, first_piece + i);
            load_at[i] = buffers + piece_at(entry, 2 * i + lane / 8 % 2);
        }
    }
    /* Starts copying the columns of a chunk; cols: of the 64 entries that contain it. */
    __device__ __forceinline__ void copy(uint32_t chunk, uint32_t cols) const
    {
        const int entry = (int)threadIdx.x % 32 / 2;
        const uint32_t two = __shfl_sync(~0u, cols, chunk % 4 * 8 + entry / 2);
        const uint32_t col = entry % 2 ? two >> 16 : two & 0xffff;
        const bool valid = base + chunk * OUTLIER_CHUNK + entry - begin < end - begin;
        const __half *src = x + (size_t)(valid ? col : 0) * column_pitch;
        const uint32_t buffer = chunk % OUTLIER_DEPTH * outlier_buffer_bytes(T);
        asm volatile("" : "+l"(src)); /* keeps it in registers */
#pragma unroll
        for (int i = 0; i < T / 16; i++)
            ptx_copy_16_zero(copy_to[i] + buffer, src + i * 8, valid ? 16 : 0);
    }
};

/* Entry ranges of a group of 8 rows, for the lane's row g. */
struct outlier_group {
    uint32_t begin, length, end; /* begin and length of row g; end of the group */
};

/* n: number of the group among the warp's rows; lane l passes begin and end of row l. */
static __device__ __forceinline__ outlier_group outlier_group_of(uint32_t begin, uint32_t end,
                                                                 int n)
{
    const int row = n * OUTLIER_GROUP + (int)threadIdx.x % 32 / 4;
    outlier_group g;
    g.begin = __shfl_sync(~0u, begin, row);
    g.length = __shfl_sync(~0u, end, row) - g.begin;
    g.end = __shfl_sync(~0u, end, n * OUTLIER_GROUP + OUTLIER_GROUP - 1);
    return g;
}

/* Masks two values of consecutive entries to those in the row; at: first entry relative to the
 * row's begin. */
static __device__ __forceinline__ uint32_t outlier_values(uint32_t two, uint32_t at,
                                                          uint32_t length)
{
    return (at < length ? two & 0xffff : 0) | (at + 1 < length ? two & 0xffff0000 : 0);
}

/* Stores sums of 8 rows x T tokens, the first `tokens` of them, to to[8][PITCH], or adds them. */
template <int T, int PITCH>
static __device__ __forceinline__ void outlier_store(float *to, int tokens, bool add,
                                                     const float d[T / 16][4])
{
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    to += 2 * t * PITCH + g;
    if (add)
#pragma unroll
        for (int i = 0; i < T / 4; i++) {
            const int row = i % 2, token = i / 2 * 8;
            if (token + g < tokens)
                to[row * PITCH + token] += d[i / 4][i % 4];
        }
    else
#pragma unroll
        for (int i = 0; i < T / 4; i++) {
            const int row = i % 2, token = i / 2 * 8;
            if (token + g < tokens)
                to[row * PITCH + token] = d[i / 4][i % 4];
        }
}

/*
 * Sums of `groups` groups of 8 rows, up to four, from row `first` on; T tokens from token0 on. to:
 * sums of the first row, PITCH floats per row. wait: wait for the launch that gathers X, after
 * loading what depends on weights alone.
 */
template <int T, int PITCH>
static __device__ __forceinline__ void outlier_panel(const qt_mix24_outliers &o, int panel,
                                                     int first, int groups, int token0, int tokens,
                                                     uint32_t buffers, float *to, bool wait)
{
    const int lane = (int)threadIdx.x % 32, t = lane % 4;
    const uint32_t *ptr = o.ptr + panel * o.pitch;
    const uint32_t row_begin = __ldg(ptr + min(first + lane, o.n));
    const uint32_t row_end = __ldg(ptr + min(first + lane + 1, o.n));
    outlier_stream<T> s(o, buffers, panel, token0);
    s.begin = __shfl_sync(~0u, row_begin, 0);
    s.base = s.begin & ~7u;
    s.end = __shfl_sync(~0u, row_end, groups * OUTLIER_GROUP - 1);
    const uint32_t chunks = (s.end - s.base + OUTLIER_CHUNK - 1) / OUTLIER_CHUNK;
    outlier_entries now = outlier_entries_at(o, s.base, s.end);
    outlier_entries next = outlier_entries_at(o, s.base + 64, s.end), then = {0, 0};
    if (wait)
        ptx_wait_previous();
    __syncwarp(); /* the buffers of the previous call have been read */
#pragma unroll
    for (uint32_t c = 0; c < OUTLIER_DEPTH - 1; c++) {
        if (c < chunks)
            s.copy(c, now.cols);
        ptx_copy_commit();
    }
    int n = 0;
    outlier_group group = outlier_group_of(row_begin, row_end, 0);
    float d[T / 16][4] = {};
#pragma unroll 1
    for (uint32_t c = 0; c < chunks; c++) {
        if (c % 4 == 0)
            then = outlier_entries_at(o, s.base + c * OUTLIER_CHUNK + 128, s.end);
        ptx_copy_wait<OUTLIER_DEPTH - 2>();
        __syncwarp(); /* copies of other lanes; the previous chunk has been read */
        if (c + OUTLIER_DEPTH - 1 < chunks)
            s.copy(c + OUTLIER_DEPTH - 1, c % 4 ? next.cols : now.cols);
        ptx_copy_commit();
        const uint32_t low = __shfl_sync(~0u, now.vals, c % 4 * 8 + t);
        const uint32_t high = __shfl_sync(~0u, now.vals, c % 4 * 8 + 4 + t);
        const uint32_t at = s.base + c * OUTLIER_CHUNK, buffer = c % OUTLIER_DEPTH;
        for (;;) {
            const uint32_t from = at + 2 * t - group.begin;
            const uint32_t b0 = outlier_values(low, from, group.length);
            const uint32_t b1 = outlier_values(high, from + 8, group.length);
#pragma unroll
            for (int m = 0; m < T / 16; m++) {
                uint32_t a[4];
                ptx_ldmatrix_x4_transposed(a, s.load_at[m] + buffer * outlier_buffer_bytes(T));
                ptx_mma_f16(d[m], a, b0, b1);
            }
            if (group.end > at + OUTLIER_CHUNK)
                break;
            outlier_store<T, PITCH>(to + n * OUTLIER_GROUP * PITCH, tokens, panel > 0, d);
#pragma unroll
            for (int m = 0; m < T / 4; m++)
                d[m / 4][m % 4] = 0;
            if (++n == groups)
                break;
            group = outlier_group_of(row_begin, row_end, n);
        }
        if (c % 4 == 3) {
            now = next;
            next = then;
        }
    }
    for (; n < groups; n++) /* groups without entries */
        outlier_store<T, PITCH>(to + n * OUTLIER_GROUP * PITCH, tokens, panel > 0, d);
}

#endif
