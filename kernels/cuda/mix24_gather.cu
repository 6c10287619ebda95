/*
 * X for the skinny and tile mix24 kernels: in packed order, for the copy engine; and, where there
 * are outliers, its columns one after the other.
 *
 *   grid      (unit, 8 MT tokens); a thread a packed column. Slots without a group, and channels
 *             beyond k, become zero
 *   Moves     X once, 2 m k bytes out, and as many again for outliers
 */
#include "kernels/cuda/mix24.h"
#include "kernels/cuda/ptx.cuh"

enum { THREADS = QT_MIX24_UNIT_COLS };

struct gather_args {
    const uint16_t *x;    /* F16 [m][pitch] */
    const uint16_t *perm; /* [cols / 16] */
    uint16_t *rows;       /* [m][cols] */
    uint16_t *columns;    /* [cols, + 1 for_wgmma][column_pitch], or NULL */
    size_t pitch, column_pitch;
    int m, k, cols;
    int for_wgmma;
};

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
static __global__ void __launch_bounds__(THREADS) gather_kernel(const gather_args a)
{
    const int place = (int)(blockIdx.x * THREADS + threadIdx.x);
    const int col = a.for_wgmma ? place / 64 * 64 + wgmma_column(place % 64) : place;
    const int channel = a.perm[col / 16] * 16 + col % 16;
    const int token0 = (int)blockIdx.y * 8 * MT, m = a.m - token0;
    const uint16_t *x = a.x + token0 * a.pitch + channel;
    uint16_t *rows = a.rows + (size_t)token0 * a.cols + place;
    uint32_t v[8 * MT];
    ptx_launch_dependents();
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
    if (a.columns && a.for_wgmma && place < MT)
        *(uint4 *)(a.columns + a.cols * a.column_pitch + token0 + 8 * place) =
            make_uint4(0, 0, 0, 0);
}

int qt_mix24_gather(const struct qt_matmul_plan *p, const struct qt_matmul_weight *w,
                    const struct qt_mix24_gathered *to, const void *x, size_t pitch, bool dependent,
                    void *stream)
{
    struct qt_matmul_plan launch = *p;
    struct gather_args a = {};
    a.x = (const uint16_t *)x;
    a.perm = (const uint16_t *)w->mix24.perm;
    a.rows = (uint16_t *)to->rows;
    a.columns = (uint16_t *)to->columns;
    a.column_pitch = to->column_pitch;
    a.pitch = pitch;
    a.m = (int)p->m;
    a.k = (int)p->k;
    a.cols = qt_mix24_units(w) * QT_MIX24_UNIT_COLS;
    a.for_wgmma = to->for_wgmma;
    const bool few = to->column_pitch == 8;
    launch.kernel = few ? (const void *)gather_kernel<1> : (const void *)gather_kernel<2>;
    launch.grid_x = qt_mix24_units(w);
    launch.grid_y = (int)ceil_div(p->m, few ? 8 : 16);
    launch.smem_bytes = 0;
    return qt_launch(&launch, &a, THREADS, dependent, stream);
}
