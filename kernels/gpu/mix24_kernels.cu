/* Kernels of round.c for mix24 (round.h): a thread block per strip of 16 rows. */
#include "kernels/gpu/mix24_row.h"

#include <cuda_runtime.h>

enum { THREADS = 256 };

static __device__ __forceinline__ struct mix_strip
strip_of(const struct gpu_round *r, struct mix_shared *x, struct mix_block *b, size_t index)
{
    const struct mix_strip s = {r, x, b, index, index * MIX_STRIP + (size_t)mix_row()};
    return s;
}

static unsigned strips(const struct gpu_round *r)
{
    return (unsigned)((r->n + MIX_STRIP - 1) / MIX_STRIP);
}

static unsigned blocks_for(size_t items)
{
    return (unsigned)((items + THREADS - 1) / THREADS);
}

static __global__ void __launch_bounds__(32) assign_kernel(struct gpu_round r, const float *weights)
{
    __shared__ struct mix_shared x;
    const struct mix_strip s = strip_of(&r, &x, nullptr, blockIdx.x / r.groups);
    mix_assign(&s, blockIdx.x % r.groups, weights);
}

static __global__ void __launch_bounds__(32 * MIX_WARPS, 3)
    compensate_kernel(struct gpu_round r, const float *v, size_t at, int columns)
{
    __shared__ struct mix_shared x;
    __shared__ struct mix_block b;
    const struct mix_strip s = strip_of(&r, &x, &b, blockIdx.x);
    double sum[MIX_ROWS] = {0};
    mix_compensate(&s, sum, v, at, columns);
    if (!mix_worker() && s.row < r.n)
        r.sum[s.row] += sum[0];
}

static __global__ void __launch_bounds__(32 * MIX_WARPS, 3)
    descend_kernel(struct gpu_round r, const float *h, size_t at, int columns)
{
    __shared__ struct mix_shared x;
    __shared__ struct mix_block b;
    const struct mix_strip s = strip_of(&r, &x, &b, blockIdx.x);
    if (!r.skip[blockIdx.x * (size_t)MIX_STRIP]) {
        mix_descend(&s, h, at, columns);
        return;
    }
    for (int c = mix_worker(); c < columns && s.row < r.n; c += mix_workers())
        r.change[s.row * r.change_ld + c] = 0;
}

static __global__ void factor_kernel(struct gpu_round r, const float *h)
{
    const size_t group = blockIdx.x * (size_t)THREADS + threadIdx.x;
    if (group < r.groups)
        mix_factor_group(r.mix24.factor + group * MIX_COLUMNS * MIX_COLUMNS,
                         h + (size_t)r.first[group] * (r.k + 1), r.k, (int)r.length[group]);
}

static __global__ void __launch_bounds__(32) costs_kernel(struct gpu_mix24_costs c)
{
    __shared__ struct mix_shared x;
    mix_costs_of_group(&c, &x, blockIdx.x / c.groups, blockIdx.x % c.groups);
}

/* A thread block sums 32 groups, each warp every SLICES-th row. */
enum { SLICES = 32 };
static __global__ void __launch_bounds__(32 * SLICES)
    sum_rows_kernel(double *sum, const float *cost, size_t n, size_t groups)
{
    __shared__ double part[SLICES][32];
    const int lane = threadIdx.x % 32, slice = threadIdx.x / 32;
    const size_t group = blockIdx.x * (size_t)32 + lane;
    double all = 0;
    for (size_t row = slice; row < n && group < groups; row += SLICES)
        all += (double)cost[row * groups + group];
    part[slice][lane] = all;
    __syncthreads();
    if (slice || group >= groups)
        return;
    for (int i = 1; i < SLICES; i++)
        all += part[i][lane];
    sum[group] = all;
}

int gpu_mix24_costs(const struct gpu_mix24_costs *c, void *stream)
{
    const size_t count = (c->n + MIX_STRIP - 1) / MIX_STRIP;
    costs_kernel<<<(unsigned)(count * c->groups), 32, 0, (cudaStream_t)stream>>>(*c);
    return cudaGetLastError();
}

int gpu_mix24_sum_rows(double *sum, const float *cost, size_t n, size_t groups, void *stream)
{
    sum_rows_kernel<<<(unsigned)((groups + 31) / 32), 32 * SLICES, 0, (cudaStream_t)stream>>>(
        sum, cost, n, groups);
    return cudaGetLastError();
}

/* A thread per group of a row. */
static __global__ void __launch_bounds__(THREADS) extent_kernel(struct gpu_mix24_extent e)
{
    const size_t item = blockIdx.x * (size_t)THREADS + threadIdx.x;
    float most[2] = {0, 0};
    if (item < e.n * e.groups)
        mix_extent_of_group(&most[0], &most[1], &e, item / e.groups, item % e.groups);
    for (int i = 0; i < 2; i++) {
        const uint32_t bits = row_bits(row_max(most[i]));
        if (row_lane() == 0 && bits > e.most[i]) /* spares most warps the atomic operation */
            atomicMax(&e.most[i], bits);
    }
}

int gpu_mix24_extent(const struct gpu_mix24_extent *e, void *stream)
{
    extent_kernel<<<blocks_for(e->n * e->groups), THREADS, 0, (cudaStream_t)stream>>>(*e);
    return cudaGetLastError();
}

static __global__ void gather_kernel(float *out, struct gpu_round r, const uint64_t *at,
                                     size_t count)
{
    const size_t i = blockIdx.x * (size_t)THREADS + threadIdx.x;
    if (i < count)
        out[i] = r.mix24.values[at[i]];
}

int gpu_mix24_assign(const struct gpu_round *r, const float *weights, void *stream)
{
    assign_kernel<<<strips(r) * (unsigned)r->groups, 32, 0, (cudaStream_t)stream>>>(*r, weights);
    return cudaGetLastError();
}

int gpu_mix24_compensate(const struct gpu_round *r, const float *v, size_t at, size_t columns,
                         void *stream)
{
    compensate_kernel<<<strips(r), 32 * MIX_WARPS, 0, (cudaStream_t)stream>>>(*r, v, at,
                                                                              (int)columns);
    return cudaGetLastError();
}

int gpu_mix24_descend(const struct gpu_round *r, const float *h, size_t at, size_t columns,
                      void *stream)
{
    descend_kernel<<<strips(r), 32 * MIX_WARPS, 0, (cudaStream_t)stream>>>(*r, h, at, (int)columns);
    return cudaGetLastError();
}

int gpu_mix24_factor(const struct gpu_round *r, const float *h, void *stream)
{
    factor_kernel<<<blocks_for(r->groups), THREADS, 0, (cudaStream_t)stream>>>(*r, h);
    return cudaGetLastError();
}

int gpu_mix24_gather(float *out, const struct gpu_round *r, const uint64_t *at, size_t count,
                     void *stream)
{
    gather_kernel<<<blocks_for(count), THREADS, 0, (cudaStream_t)stream>>>(out, *r, at, count);
    return cudaGetLastError();
}
