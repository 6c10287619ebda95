/*
 * X for the skinny and tile mix24 kernels, in packed order for the copy engine. With outliers also
 * X by columns, or lists of what is where (mix24_patch.cuh).
 *
 *   grid      (unit, 8 MT tokens): a thread a packed column; slots without a group, and channels
 *             beyond k, become zero. Behind the units, for lists: a warp a strip of 16 rows
 *   Moves     X once, 2 m k bytes out, and as many again for columns; CSR once, 128 bytes of list
 *             for a strip and unit
 */
#include "kernels/cuda/mix24.h"
#include "kernels/cuda/mix24_patch.cuh"

enum { THREADS = QT_MIX24_UNIT_COLS, PANEL_UNITS = QT_MIX24_PANEL_UNITS, WARPS = THREADS / 32 };

struct gather_args {
    const uint16_t *x;    /* F16 [m][pitch] */
    const uint16_t *perm; /* [cols / 16] */
    uint16_t *rows;       /* [m][cols] */
    uint16_t *columns;    /* [cols][column_pitch], or NULL */
    uint32_t *lists;      /* [strips][units][PATCH_LIST], or NULL */
    qt_mix24_outliers outliers;
    size_t pitch, column_pitch;
    int m, k, cols;
    int for_wgmma;
};

/* ---- lists -------------------------------------------------------------------------------------
 */

/* Lists of a strip for the units of a panel; heads: in shared memory, by unit: as that of a list,
 * with a count of 16 bits, and steps above it. The order in a list does not matter. */
static __device__ __forceinline__ void list_panel(const gather_args &a, int strip, int panel,
                                                  uint32_t *heads)
{
    const qt_mix24_outliers &o = a.outliers;
    const int lane = (int)threadIdx.x % 32, row = strip * 16 + lane / 2;
    const int all = a.cols / QT_MIX24_UNIT_COLS,
              units = min(all - panel * PANEL_UNITS, (int)PANEL_UNITS);
    uint32_t *lists = a.lists + ((size_t)strip * all + panel * PANEL_UNITS) * PATCH_LIST;
    const uint32_t *ptr = o.ptr + panel * o.pitch;
    const uint32_t begin = row < o.n ? __ldg(ptr + row) : 0;
    const uint32_t end = row < o.n ? __ldg(ptr + row + 1) : 0;
    for (int unit = lane; unit < units; unit += 32)
        heads[unit] = 0;
    __syncwarp();
#pragma unroll 8
    for (uint32_t e = begin + lane % 2; e < end; e += 2) {
        const uint32_t col = __ldg(o.col + e), val = __ldg(o.val + e);
        const uint32_t unit = col / QT_MIX24_UNIT_COLS;
        const uint32_t byte = patch_byte(lane / 2, col % QT_MIX24_UNIT_COLS);
        const uint32_t slot = atomicAdd(heads + unit, 1) & 0xffff;
        atomicOr(heads + unit, 0x10000u << byte / PATCH_STEP_BYTES);
        if (slot < PATCH_LIST - 1)
            lists[unit * PATCH_LIST + 1 + slot] = val << 16 | byte;
    }
    __syncwarp();
    for (int unit = lane; unit < units; unit += 32) {
        const uint32_t count = heads[unit] & 0xffff, steps = heads[unit] >> 16;
        lists[unit * PATCH_LIST] = steps << 8 | (count < PATCH_LIST ? count : (uint32_t)PATCH_MANY);
    }
    __syncwarp();
}

static __device__ __forceinline__ void list_strip(const gather_args &a, int strip, uint32_t *heads)
{
    if (strip * 16 < a.outliers.n)
        for (int panel = 0; panel < a.outliers.panels; panel++)
            list_panel(a, strip, panel, heads);
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
    __shared__ uint32_t heads[WARPS][PANEL_UNITS];
    const int units = a.cols / QT_MIX24_UNIT_COLS, warp = (int)threadIdx.x / 32;
    ptx_launch_dependents();
    if ((int)blockIdx.x >= units) {
        ptx_wait_previous(); /* which may read the lists */
        if (blockIdx.y == 0)
            list_strip(a, ((int)blockIdx.x - units) * WARPS + warp, heads[warp]);
        return;
    }
    const int place = (int)(blockIdx.x * THREADS + threadIdx.x);
    const int col = a.for_wgmma ? place / 64 * 64 + wgmma_column(place % 64) : place;
    const int channel = a.perm[col / 16] * 16 + col % 16;
    const int token0 = (int)blockIdx.y * 8 * MT, m = a.m - token0;
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
    struct qt_matmul_plan launch = *p;
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
    launch.grid_x = qt_mix24_units(w);
    if (to->lists)
        launch.grid_x += (int)ceil_div((size_t)qt_mix24_strips(w), WARPS);
    launch.grid_y = (int)(to->column_pitch / (few ? 8 : 16));
    launch.smem_bytes = 0;
    return qt_launch(&launch, &a, THREADS, prepared || p->options.dependent_launch, stream);
}
