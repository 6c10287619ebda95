/*
 * X for the skinny mix24 kernel: in packed order, for the copy engine; and, where there are
 * outliers, its columns one after the other.
 *
 *   grid      a thread a packed column; slots without a group, and channels beyond k, become zero
 *   Moves     X once, 2 m k bytes out, and as many again for outliers
 */
#include "kernels/cuda/mix24_skinny.h"
#include "kernels/cuda/ptx.cuh"

enum { THREADS = 128 };

struct gather_args {
    const uint16_t *x;    /* F16 [m][pitch] */
    const uint16_t *perm; /* [cols / 16] */
    uint16_t *rows;       /* [m][cols] */
    uint16_t *columns;    /* [cols][8 MT], or NULL */
    size_t pitch;
    int m, k, cols;
};

template <int MT>
static __global__ void __launch_bounds__(THREADS) gather_kernel(const gather_args a)
{
    const int col = (int)(blockIdx.x * THREADS + threadIdx.x); /* cols is a multiple of THREADS */
    const int channel = a.perm[col / 16] * 16 + col % 16;
    uint32_t v[8 * MT];
    ptx_launch_dependents();
    ptx_wait_previous();
#pragma unroll
    for (int t = 0; t < 8 * MT; t++)
        v[t] = t < a.m && channel < a.k ? a.x[t * a.pitch + channel] : 0;
#pragma unroll
    for (int t = 0; t < 8 * MT; t++)
        if (t < a.m)
            a.rows[(size_t)t * a.cols + col] = (uint16_t)v[t];
#pragma unroll
    for (int t = 0; t < 8 * MT && a.columns; t += 8)
        ((uint4 *)a.columns)[col * MT + t / 8] =
            make_uint4(v[t] | v[t + 1] << 16, v[t + 2] | v[t + 3] << 16, v[t + 4] | v[t + 5] << 16,
                       v[t + 6] | v[t + 7] << 16);
}

int qt_mix24_gather(const struct qt_matmul_plan *p, const struct qt_matmul_weight *w, void *rows,
                    void *columns, const void *x, size_t pitch, bool dependent, void *stream)
{
    static_assert((int)THREADS == (int)QT_MIX24_UNIT_COLS, "a block gathers a unit");
    struct qt_matmul_plan launch = *p;
    struct gather_args a = {};
    a.x = (const uint16_t *)x;
    a.perm = (const uint16_t *)w->mix24.perm;
    a.rows = (uint16_t *)rows;
    a.columns = (uint16_t *)columns;
    a.pitch = pitch;
    a.m = (int)p->m;
    a.k = (int)p->k;
    a.cols = qt_mix24_units(w) * QT_MIX24_UNIT_COLS;
    launch.kernel = p->config.token_tiles == 1 ? (const void *)gather_kernel<1>
                                               : (const void *)gather_kernel<2>;
    launch.grid_x = qt_mix24_units(w);
    launch.grid_y = 1;
    launch.smem_bytes = 0;
    return qt_launch(&launch, &a, THREADS, dependent, stream);
}
