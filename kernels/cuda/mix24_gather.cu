/*
 * X for the skinny and tile mix24 kernels, in packed order for the copy engine. With outliers also
 * X by columns, or lists of what is where (mix24_patch.cuh).
 *
 *   grid      for lists a block a strip of 16 rows; then one for 8 MT tokens and a unit, units
 *             first: a thread a packed column; slots without a group, and channels beyond k, become
 *             zero
 *   Moves     X once, 2 m k bytes out, and as many again for columns; CSR once, 16 to 128 bytes of
 *             list for a strip and unit
 */
#include "kernels/cuda/decode.cuh"
#include "kernels/cuda/device.h"
#include "kernels/cuda/mix24.h"
#include "kernels/cuda/mix24_patch.cuh"

enum {
    THREADS = QT_MIX24_UNIT_COLS,
    PANEL_UNITS = QT_MIX24_PANEL_UNITS,
    LIST_UNITS = 64, /* at a time, of a panel */
    ROW_THREADS = THREADS / 16,
    AHEAD = 4,              /* entries of a thread that are loaded at a time */
    PIECES = PATCH_LIST / 4 /* of a list, stored at a time */
};

static_assert(PANEL_UNITS % LIST_UNITS == 0 && LIST_UNITS <= THREADS, "list_units");

struct gather_args {
    const uint16_t *x;    /* F16 [m][pitch] */
    const uint16_t *perm; /* [cols / 16] */
    uint16_t *rows;       /* [m][cols] */
    uint16_t *columns;    /* [cols][column_pitch], or NULL */
    uint32_t *lists;      /* [strips][units][PATCH_LIST], or NULL */
    qt_mix24_outliers outliers;
    size_t pitch, column_pitch;
    int m, k, cols;
    int list_blocks;
    int for_wgmma;
};

/* ---- lists -------------------------------------------------------------------------------------
 */

struct lists {
    alignas(16) uint32_t word[LIST_UNITS][PATCH_LIST];
    uint32_t head[LIST_UNITS]; /* as that of a list, with a count of 16 bits, and steps above it */
};

/* Lists of a strip for up to LIST_UNITS units from column `from` of a panel on, by a block. The
 * thread's entries are each ROW_THREADS-th of a row, from e to `end`; returns the first that is
 * beyond. The order in a list does not matter. Loads are of DRAM, and not waited for one after the
 * other. */
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

/* By a block. */
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
        for (int i = (int)threadIdx.x; i < LIST_UNITS * PIECES; i += THREADS) {
            const int u = i / PIECES, piece = i % PIECES;
            const int count = (int)(space->head[u] & 0xffff);
            if (unit + u < units && piece <= count / 4) /* the rest is never looked at */
                lists[unit * PIECES + i] = ((const uint4 *)space->word[u])[piece];
        }
        __syncthreads();
    }
}

/* ---- X -----------------------------------------------------------------------------------------
 */

/*
 * The packed column at place i of 64. A lane of a wgmma has places 2t, 2t + 1, 2t + 8 and 2t + 9 of
 * 16: they are to be columns 4s to 4s + 3 of its 16 (pack/layout_mix24.h), s being the k-step.
 */
static __device__ __forceinline__ int wgmma_column(int i)
{
    const int s = i / 16, high = i / 8 % 2, t = i / 2 % 4, odd = i % 2;
    return 16 * t + 4 * s + 2 * high + odd;
}

template <int MT>
static __global__ void __launch_bounds__(THREADS)
    gather_kernel(const __grid_constant__ gather_args a)
{
    const int units = a.cols / QT_MIX24_UNIT_COLS, block = (int)blockIdx.x - a.list_blocks;
    ptx_launch_dependents();
    if (block < 0) {
        ptx_wait_previous(); /* which may read the lists */
        list_strip(a, (int)blockIdx.x, (struct lists *)qt_smem);
        return;
    }
    const int place = block % units * THREADS + (int)threadIdx.x;
    const int col = a.for_wgmma ? place / 64 * 64 + wgmma_column(place % 64) : place;
    const int channel = a.perm[col / 16] * 16 + col % 16;
    const int token0 = block / units * 8 * MT, m = a.m - token0;
    const uint16_t *x = a.x + token0 * a.pitch + channel;
    uint16_t *rows = a.rows + (size_t)token0 * a.cols + place;
    uint32_t v[8 * MT];
    ptx_wait_previous();
#pragma unroll
    for (int t = 0; t < 8 * MT; t++)
        v[t] = t < m && channel < a.k ? x[t * a.pitch] : 0;
#pragma unroll
    for (int t = 0; t < 8 * MT; t++)
        if (t < m)
            rows[(size_t)t * a.cols] = (uint16_t)v[t];
#pragma unroll
    for (int t = 0; t < 8 * MT && a.columns; t += 8)
        *(uint4 *)(a.columns + col * a.column_pitch + token0 + t) =
            make_uint4(v[t] | v[t + 1] << 16, v[t + 2] | v[t + 3] << 16, v[t + 4] | v[t + 5] << 16,
                       v[t + 6] | v[t + 7] << 16);
}

int qt_mix24_gather(const struct qt_matmul_plan *p, const struct qt_matmul_weight *w,
                    const struct qt_mix24_gathered *to, const void *x, const float **token_factor,
                    void *stream)
{
    const bool prepared = p->options.dtype == QT_MATMUL_BF16;
    if (prepared) {
        int rc = qt_prepare_run(p, &x, token_factor, to->prepared, stream);
        if (rc != QT_MATMUL_OK)
            return rc;
    }
    struct qt_kernel_launch launch = {};
    struct gather_args a = {};
    a.x = (const uint16_t *)x;
    a.perm = (const uint16_t *)w->mix24.perm;
    a.rows = (uint16_t *)to->rows;
    a.columns = (uint16_t *)to->columns;
    a.column_pitch = to->column_pitch;
    a.lists = to->lists;
    a.outliers = qt_mix24_outliers_of(w);
    a.pitch = prepared ? round_up(p->k, QT_BLOCK_COLS) : p->k;
    a.m = (int)p->m;
    a.k = (int)p->k;
    a.cols = qt_mix24_units(w) * QT_MIX24_UNIT_COLS;
    a.for_wgmma = to->for_wgmma;
    const bool few = to->column_pitch == 8;
    launch.kernel = few ? (const void *)gather_kernel<1> : (const void *)gather_kernel<2>;
    a.list_blocks = to->lists ? qt_mix24_strips(w) : 0;
    launch.grid = dim3(
        (unsigned)(a.list_blocks + qt_mix24_units(w) * (int)(to->column_pitch / (few ? 8 : 16))));
    launch.threads = THREADS;
    /* Before the skinny kernel too, which took up to 6 % longer behind blocks without any. */
    launch.smem = to->lists || !to->for_wgmma ? sizeof(struct lists) : 0;
    launch.most_smem = to->for_wgmma && p->m <= 128; /* of more tokens blocks have no room */
    launch.dependent = (prepared || p->options.dependent_launch) && p->cc == 90;
    return qt_launch_kernel(&launch, &a, stream);
}
