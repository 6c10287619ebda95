/*
 * Gathers X for the skinny and tile mix24 kernels: rows in packed order for TMA. For outliers also
 * columns of X (outliers.cuh, tile_outliers.cuh), or lists of outliers (outlier_patch.cuh).
 *
 *   grid       list_blocks thread blocks make the outlier lists of one strip each; column_blocks
 *              thread blocks gather columns of X (a warp: 64 columns of 8 N tokens); the others
 *              gather rows of X (a warp: 64 N columns of 8 tokens). Each warp loads its own X:
 *              there are few warps, and they are latency-bound. Padding groups, and channels beyond
 *              k, become zero
 *   Traffic    X once, or twice for columns too, 2 m k bytes out for each; CSR once, 16 to 128
 *              bytes of list per strip and unit
 *
 * Template parameters: N, 1 for the skinny kernel, 2 for the tile kernel; PAIRS: channels 2i and
 * 2i + 1 can be loaded as a word.
 */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/common/prepare.h"
#include "kernels/cuda/common/ptx_barrier.cuh"
#include "kernels/cuda/common/smem.cuh"
#include "kernels/cuda/mix24/mix24.h"
#include "kernels/cuda/mix24/outlier_patch.cuh"

enum {
    THREADS = 128,
    TOKENS = 8, /* of a part of a column */
    PANEL_UNITS = QT_MIX24_PANEL_UNITS,
    LIST_UNITS = 64, /* processed at a time; divides a CSR panel */
    ROW_THREADS = THREADS / 16,
    AHEAD = 4,              /* entries that a thread loads at a time */
    PIECES = PATCH_LIST / 4 /* 16-byte pieces of a list */
};

static_assert(PANEL_UNITS % LIST_UNITS == 0 && LIST_UNITS <= THREADS, "list_units");

struct gather_args {
    const uint16_t *x;    /* F16 [m][pitch] */
    const uint16_t *perm; /* [cols / 16] */
    uint16_t *rows;       /* [m][cols] */
    uint16_t *columns;    /* [cols][column_pitch], or NULL */
    uint32_t *lists;      /* [strips][units][PATCH_LIST], or NULL */
    qt_mix24_outliers outliers;
    size_t pitch;
    int m, k, cols, column_pitch;
    int list_blocks, column_blocks;
    int csr_lines; /* of 128 bytes, of csr_col and of csr_val; 0: unknown */
    int for_wgmma;
};

/* ---- lists ----------------------------------------------------------------------------------- */

struct lists {
    alignas(16) uint32_t word[LIST_UNITS][PATCH_LIST];
    uint32_t head[LIST_UNITS]; /* head of a list, with a count of 16 bits, and the steps above */
};

/* Makes the lists of a strip for up to LIST_UNITS units from column `from` of a CSR panel on, by a
 * thread block. The thread takes every ROW_THREADS-th entry of a row, from e to `end`; returns its
 * first entry beyond these units. The order in a list does not matter. Entries come from DRAM, so
 * AHEAD loads are in flight at a time. */
static __device__ __forceinline__ uint32_t list_units(const qt_mix24_outliers &o, uint32_t from,
                                                      uint32_t e, uint32_t end, struct lists *to)
{
    if (threadIdx.x < LIST_UNITS)
        to->head[threadIdx.x] = 0;
    __syncthreads();
    for (bool more = true; more;) {
        uint32_t cols[AHEAD], values[AHEAD];
#pragma unroll
        for (uint32_t i = 0; i < AHEAD; i++) {
            const uint32_t at = e + i * ROW_THREADS;
            cols[i] = at < end ? __ldg(o.col + at) - from : ~0u;
            values[i] = at < end ? __ldg(o.val + at) : 0;
        }
#pragma unroll
        for (uint32_t i = 0; i < AHEAD; i++) {
            const uint32_t unit = cols[i] / QT_MIX24_UNIT_COLS;
            more = unit < LIST_UNITS;
            if (!more)
                break;
            const uint32_t byte =
                patch_byte((int)threadIdx.x / ROW_THREADS, cols[i] % QT_MIX24_UNIT_COLS);
            const uint32_t slot = 1 + (atomicAdd(&to->head[unit], 1) & 0xffff);
            atomicOr(&to->head[unit], 0x10000u << byte / PATCH_STEP_BYTES);
            if (slot < PATCH_LIST)
                to->word[unit][slot] = byte << 16 | values[i];
            e += ROW_THREADS;
        }
    }
    __syncthreads();
    if (threadIdx.x < LIST_UNITS) {
        const uint32_t count = to->head[threadIdx.x] & 0xffff, steps = to->head[threadIdx.x] >> 16;
        to->word[threadIdx.x][0] =
            count < PATCH_LIST ? steps << PATCH_STEP_BIT | count : (uint32_t)PATCH_MANY;
    }
    __syncthreads();
    return e;
}

/* Prefetches all CSR entries to L2 while the row pointers are loaded, by all thread blocks that
 * make lists: the entries of a row are known only from its pointers, which come from DRAM too. */
static __device__ __forceinline__ void list_prefetch(const gather_args &a)
{
    const int line = (int)(blockIdx.x * THREADS + threadIdx.x);
    for (int i = line; i < a.csr_lines; i += a.list_blocks * THREADS) {
        ptx_prefetch_l2(a.outliers.col + (size_t)i * 64);
        ptx_prefetch_l2(a.outliers.val + (size_t)i * 64);
    }
}

/* Makes the lists of a strip, by a thread block. */
static __device__ __forceinline__ void list_strip(const gather_args &a, int strip,
                                                  struct lists *space)
{
    const qt_mix24_outliers &o = a.outliers;
    const int row = strip * 16 + (int)threadIdx.x / ROW_THREADS;
    const int units = a.cols / QT_MIX24_UNIT_COLS;
    uint4 *lists = (uint4 *)(a.lists + (size_t)strip * units * PATCH_LIST);
    uint32_t e = 0, end = 0;
    for (int unit = 0; unit < units; unit += LIST_UNITS) {
        const int panel = unit / PANEL_UNITS;
        if (unit % PANEL_UNITS == 0) {
            const uint32_t *ptr = o.ptr + panel * o.pitch;
            e = row < o.n ? __ldg(ptr + row) + threadIdx.x % ROW_THREADS : 0;
            end = row < o.n ? __ldg(ptr + row + 1) : 0;
        }
        e = list_units(o, (uint32_t)(unit % PANEL_UNITS * QT_MIX24_UNIT_COLS), e, end, space);
        if (unit == 0)
            ptx_wait_previous(); /* the previous kernel may still read the lists */
        for (int i = (int)threadIdx.x; i < LIST_UNITS * PIECES; i += THREADS) {
            const int u = i / PIECES, piece = i % PIECES;
            const int count = (int)(space->head[u] & 0xffff);
            if (unit + u < units && piece <= count / 4) /* readers stop at the count */
                lists[unit * PIECES + i] = ((const uint4 *)space->word[u])[piece];
        }
        __syncthreads();
    }
}

/* ---- X --------------------------------------------------------------------------------------- */

/*
 * The packed column at place i of 64. In a k-step, a lane of wgmma has places 2t, 2t + 1, 2t + 8
 * and 2t + 9 of 16; they must be columns 4s to 4s + 3 of its 16 (formats/layouts/layout_mix24.h),
 * where s is the k-step. An even place and the next one are adjacent columns.
 */
static __device__ __forceinline__ int wgmma_column(int i)
{
    const int s = i / 16, high = i / 8 % 2, t = i / 2 % 4, odd = i % 2;
    return 16 * t + 4 * s + 2 * high + odd;
}

/* The packed column at a place of a row. */
static __device__ __forceinline__ int gather_place(const gather_args &a, int place)
{
    return a.for_wgmma ? place / 64 * 64 + wgmma_column(place % 64) : place;
}

/* Channel of an even packed column; the next column has the next channel. */
static __device__ __forceinline__ int gather_channel(const gather_args &a, int col)
{
    return a.perm[col / 16] * 16 + col % 16;
}

/* Loads two channels of a token. Instead of a condition, missing values are loaded from another
 * address: the compiler would turn conditions into branches, and wait for each token before the
 * load of the next. */
template <bool PAIRS>
static __device__ __forceinline__ uint32_t gather_load(const gather_args &a, int token, int channel)
{
    const uint16_t *x = a.x + token * a.pitch + channel;
    const bool low = token < a.m && channel < a.k, high = token < a.m && channel + 1 < a.k;
    if (PAIRS)
        return low ? *(const uint32_t *)x : 0;
    const uint32_t v0 = *(low ? x : a.x), v1 = *(high ? x + 1 : a.x);
    return (low ? v0 : 0) | (high ? v1 << 16 : 0);
}

/* Packs the low (or high) halves of the words of 8 tokens. */
static __device__ __forceinline__ uint4 gather_column(const uint32_t v[TOKENS], bool high)
{
    const uint32_t halves = high ? 0x7632 : 0x5410;
    return make_uint4(__byte_perm(v[0], v[1], halves), __byte_perm(v[2], v[3], halves),
                      __byte_perm(v[4], v[5], halves), __byte_perm(v[6], v[7], halves));
}

/* Stores 16 tokens of a column of the even lane at `even`, then of the odd lane at `odd`, by both
 * lanes together: stores of half sectors take longer. */
static __device__ __forceinline__ void gather_store(uint16_t *even, uint16_t *odd, uint4 first,
                                                    uint4 second)
{
    const bool other = threadIdx.x % 2;
    const uint4 sent = other ? first : second;
    uint4 received;
    received.x = __shfl_xor_sync(~0u, sent.x, 1);
    received.y = __shfl_xor_sync(~0u, sent.y, 1);
    received.z = __shfl_xor_sync(~0u, sent.z, 1);
    received.w = __shfl_xor_sync(~0u, sent.w, 1);
    __stcg((uint4 *)even + other, other ? received : first);
    __stcg((uint4 *)odd + other, other ? second : received);
}

/* Gathers columns. warp: number among the warps for columns; each lane gathers a pair of columns.

 */
template <int N, bool PAIRS>
static __device__ __forceinline__ void gather_columns(const gather_args &a, int warp)
{
    const int warps = a.cols / 64, lane = (int)threadIdx.x % 32;
    const int col = (warp % warps * 32 + lane) * 2, token0 = warp / warps * (TOKENS * N);
    const int channel = gather_channel(a, col);
    if (token0 >= a.column_pitch)
        return;
    uint32_t v[N][TOKENS];
    ptx_wait_previous();
#pragma unroll
    for (int t = 0; t < TOKENS * N; t++)
        v[t / TOKENS][t % TOKENS] = gather_load<PAIRS>(a, token0 + t, channel);
    const size_t pitch = (size_t)a.column_pitch;
    if (N == 1) {
        uint16_t *at = a.columns + col * pitch + token0;
        *(uint4 *)at = gather_column(v[0], false);
        *(uint4 *)(at + pitch) = gather_column(v[0], true);
        return;
    }
    uint16_t *even = a.columns + (col - lane % 2 * 2) * pitch + token0; /* of the even lane */
#pragma unroll
    for (int i = 0; i < 2; i++, even += pitch)
        gather_store(even, even + 2 * pitch, gather_column(v[0], i), gather_column(v[N - 1], i));
}

/* Gathers rows. warp: number among the warps for rows; each lane gathers N pairs of places of 8
 * rows. */
template <int N, bool PAIRS>
static __device__ __forceinline__ void gather_rows(const gather_args &a, int warp)
{
    const int warps = a.cols / (64 * N);
    const int place = (warp % warps * 32 + (int)threadIdx.x % 32) * 2 * N;
    const int token0 = warp / warps * TOKENS;
    int channel[N];
#pragma unroll
    for (int i = 0; i < N; i++)
        channel[i] = gather_channel(a, gather_place(a, place + 2 * i));
    uint16_t *rows = a.rows + (size_t)token0 * a.cols + place;
    uint32_t v[N][TOKENS];
    ptx_wait_previous();
#pragma unroll
    for (int t = 0; t < TOKENS; t++)
#pragma unroll
        for (int i = 0; i < N; i++)
            v[i][t] = gather_load<PAIRS>(a, token0 + t, channel[i]);
#pragma unroll
    for (int t = 0; t < TOKENS; t++, rows += a.cols) {
        if (token0 + t >= a.m)
            break;
        if (N == 1)
            *(uint32_t *)rows = v[0][t];
        else
            *(uint2 *)rows = make_uint2(v[0][t], v[N - 1][t]);
    }
}

/* ---- kernel ---------------------------------------------------------------------------------- */

template <int N, bool PAIRS>
static __global__ void __launch_bounds__(THREADS)
    gather_kernel(const __grid_constant__ gather_args a)
{
    const int warp = (int)threadIdx.x / 32, before = a.list_blocks + a.column_blocks;
    const int block = (int)blockIdx.x;
    ptx_launch_dependents();
    if (block < a.list_blocks) {
        list_prefetch(a);
        list_strip(a, block, (struct lists *)qt_smem);
    } else if (block < before) {
        gather_columns<N, PAIRS>(a, (block - a.list_blocks) * (THREADS / 32) + warp);
    } else {
        gather_rows<N, PAIRS>(a, (block - before) * (THREADS / 32) + warp);
    }
}

template <int N> static const void *instance(bool pairs)
{
    return pairs ? (const void *)gather_kernel<N, true> : (const void *)gather_kernel<N, false>;
}

/* Thread blocks for `warps` warps. */
static int blocks_of(size_t warps)
{
    return (int)ceil_div(warps, THREADS / 32);
}

int qt_mix24_gather(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                    const struct qt_mix24_gathered *to, const void *x, const float **token_factor,
                    void *stream)
{
    const bool prepared = p->options.dtype == QTOOL_BF16;
    if (prepared) {
        int rc = qt_prepare_run(p, &x, token_factor, to->prepared, stream);
        if (rc != QTOOL_OK)
            return rc;
    }
    struct qt_kernel_launch launch = {};
    struct gather_args a = {};
    a.x = (const uint16_t *)x;
    a.perm = (const uint16_t *)w->mix24.perm;
    a.rows = (uint16_t *)to->rows;
    a.columns = (uint16_t *)to->columns;
    a.column_pitch = (int)to->column_pitch;
    a.lists = to->lists;
    a.outliers = qt_mix24_outliers_of(w);
    a.pitch = prepared ? round_up(p->k, QT_BLOCK_COLS) : p->k;
    a.m = (int)p->m;
    a.k = (int)p->k;
    a.cols = qt_mix24_units(w) * QT_MIX24_UNIT_COLS;
    a.for_wgmma = to->for_wgmma;
    const bool pairs = (size_t)x % 4 == 0 && a.pitch % 2 == 0 && a.k % 2 == 0;
    const int n = to->for_wgmma ? 2 : 1;
    const size_t chunks = (size_t)(a.cols / 64); /* 64-column chunks */
    launch.kernel = n == 1 ? instance<1>(pairs) : instance<2>(pairs);
    a.list_blocks = to->lists ? qt_mix24_strips(w) : 0;
    if (qt_mix24_csr_rows(w) == w->n) /* most entries of a slice belong to other rows */
        a.csr_lines = (int)ceil_div(w->mix24.outliers, 64);
    if (to->columns)
        a.column_blocks = blocks_of(chunks * (to->column_pitch / (size_t)(TOKENS * n)));
    const int row_blocks = blocks_of(chunks / n * ceil_div(p->m, TOKENS));
    launch.grid = dim3((unsigned)(a.list_blocks + a.column_blocks + row_blocks));
    launch.threads = THREADS;
    /* Also before the skinny kernel, which took up to 6 % longer after thread blocks without shared
     * memory. */
    launch.smem = to->lists || !to->for_wgmma ? sizeof(struct lists) : 0;
    launch.most_smem = to->for_wgmma && p->m <= 128; /* for more tokens, no two thread blocks fit
                                                        anyway */
    launch.dependent = (prepared || p->options.dependent_launch) && qt_state(p)->cc == 90;
    return qt_launch_kernel(&launch, &a, stream);
}
