/* Kernels of round.c (round.h): a warp per row, except where matrices are only rearranged. */
#include "kernels/gpu/round.h"

#include <cuda_runtime.h>

enum { WARPS = 16, THREADS = 32 * WARPS };

static __device__ __forceinline__ size_t row_of_warp(void)
{
    return blockIdx.x * (size_t)WARPS + threadIdx.x / 32;
}

static unsigned blocks_of_rows(size_t rows)
{
    return (unsigned)((rows + WARPS - 1) / WARPS);
}

static __device__ void copy_values(struct row_values *to, const struct row_values *from)
{
    for (size_t i = threadIdx.x; i < sizeof *to / 4; i += blockDim.x)
        ((uint32_t *)to)[i] = ((const uint32_t *)from)[i];
}

/* ---- column blocks -------------------------------------------------------------------------- */

/* Rounds a column block of 32 COLS positions at most. The matrix of a narrow block is copied to
 * shared memory; that of a wide one does not fit. Two thread blocks of narrow ones share a
 * multiprocessor, although they then have too few registers: one alone takes 1.3 times as long. */
template <int COLS, bool DESCENT>
static __global__ void __launch_bounds__(THREADS, COLS <= 4 ? 2 : 1)
    block_kernel(struct gpu_round r, const float *m, size_t at, int columns, bool fits)
{
    enum { WIDTH = 32 * COLS, STAGED = COLS <= 4 };
    extern __shared__ float shared[];
    __shared__ struct row_values values;
    float *tile = shared + 2 * WARPS * WIDTH;
    const size_t row = row_of_warp();
    const int lane = row_lane();
    const float *diagonal = m + at * r.k + at;
    copy_values(&values, r.values);
    for (int i = threadIdx.x; STAGED && i < columns * WIDTH; i += THREADS)
        tile[i] = i % WIDTH < columns ? diagonal[i / WIDTH * r.k + i % WIDTH] : 0;
    __syncthreads();
    if (row >= r.n)
        return;
    float *d = r.change + row * r.change_ld;
    if (DESCENT && r.skip[row]) {
        for (int c = lane; c < columns; c += 32)
            d[c] = 0;
        return;
    }
    const struct row_block b = {&values,
                                columns,
                                STAGED ? tile : diagonal,
                                STAGED ? (int)WIDTH : (int)r.k,
                                r.group + at,
                                r.end + at,
                                (uint32_t)at,
                                fits};
    struct row_state s = {r.scale + row * r.groups, r.zero + row * r.groups,
                          shared + threadIdx.x / 32 * 2 * WIDTH,
                          shared + (threadIdx.x / 32 * 2 + 1) * WIDTH, 0};
    float w[COLS], g[COLS], out[COLS];
    int rank[COLS];
    const size_t first = row * r.k + at;
    ROW_UNROLL for (int i = 0; i < COLS; i++)
    {
        const int c = 32 * i + lane;
        const bool is_inside = c < columns;
        w[i] = !DESCENT && is_inside ? r.w[first + c] : 0;
        g[i] = is_inside ? r.g[first + c] : 0;
        rank[i] = DESCENT && is_inside ? r.rank[first + c] : 0;
        out[i] = 0;
    }
    if (DESCENT)
        row_descend(&b, &s, COLS, g, rank, out);
    else
        row_compensate(&b, &s, COLS, w, g, rank, out);
    ROW_UNROLL for (int i = 0; i < COLS; i++)
    {
        const int c = 32 * i + lane;
        if (c < columns) {
            d[c] = out[i];
            r.rank[first + c] = (uint8_t)rank[i];
        }
    }
    if (!DESCENT) {
        const double sum = row_sum_f64(s.sum);
        if (lane == 0)
            r.sum[row] += sum;
    }
}

template <int COLS, bool DESCENT>
static int launch_block(const struct gpu_round *r, const float *m, size_t at, size_t columns,
                        cudaStream_t stream)
{
    const size_t width = 32 * COLS, tile = COLS <= 4 ? width * width : 0;
    const size_t bytes = (2 * WARPS * width + tile) * sizeof(float);
    const bool fits = r->groups > 1;
    cudaError_t e = cudaFuncSetAttribute(block_kernel<COLS, DESCENT>,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (e != cudaSuccess)
        return e;
    block_kernel<COLS, DESCENT>
        <<<blocks_of_rows(r->n), THREADS, bytes, stream>>>(*r, m, at, (int)columns, fits);
    return cudaGetLastError();
}

int gpu_round_compensate(const struct gpu_round *r, const float *v, size_t at, size_t columns,
                         void *stream)
{
    return columns <= 128 ? launch_block<4, false>(r, v, at, columns, (cudaStream_t)stream)
                          : launch_block<8, false>(r, v, at, columns, (cudaStream_t)stream);
}

int gpu_round_descend(const struct gpu_round *r, const float *h, size_t at, size_t columns,
                      void *stream)
{
    return columns <= 128 ? launch_block<4, true>(r, h, at, columns, (cudaStream_t)stream)
                          : launch_block<8, true>(r, h, at, columns, (cudaStream_t)stream);
}

/* ---- whole rows ----------------------------------------------------------------------------- */

/* A warp per group of a row. */
static __global__ void __launch_bounds__(THREADS) fit_kernel(struct gpu_round r, const float *h)
{
    __shared__ struct row_values values;
    const size_t item = row_of_warp(), row = item / r.groups, group = item % r.groups;
    copy_values(&values, r.values);
    __syncthreads();
    if (row >= r.n)
        return;
    const uint32_t first = r.first[group];
    const struct row_targets a = {r.w + row * r.k + first, h ? h + first : NULL,
                                  (int)r.length[group]};
    const struct row_group best = row_fit(&values, &a);
    if (row_lane() == 0) {
        r.scale[item] = best.scale;
        r.zero[item] = (uint8_t)best.zero;
    }
}

int gpu_round_fit(const struct gpu_round *r, const float *h, void *stream)
{
    fit_kernel<<<blocks_of_rows(r->n * r->groups), THREADS, 0, (cudaStream_t)stream>>>(*r, h);
    return cudaGetLastError();
}

enum row_step { ASSIGN, ERRORS, OBJECTIVE, RESCALE };

template <enum row_step STEP>
static __global__ void __launch_bounds__(THREADS) row_kernel(struct gpu_round r)
{
    __shared__ struct row_values values;
    const size_t row = row_of_warp(), first = row * r.k;
    copy_values(&values, r.values);
    __syncthreads();
    if (row >= r.n || (STEP == RESCALE && r.skip[row]))
        return;
    const struct row_whole a = {&values,
                                (int)r.k,
                                r.group,
                                r.w + first,
                                STEP == RESCALE ? r.hw + first : NULL,
                                r.mix24.values ? r.mix24.values + first : NULL,
                                r.g + first,
                                r.rank + first,
                                r.scale + row * r.groups,
                                r.zero + row * r.groups};
    if (STEP == ASSIGN)
        row_assign(&a);
    if (STEP == RESCALE)
        row_rescale(&a);
    if (STEP == ERRORS)
        for (int p = row_lane(); p < a.k; p += 32)
            r.d[first + p] = a.w[p] - row_value(&a, p);
    if (STEP == OBJECTIVE) {
        const double sum = row_objective(&a);
        if (row_lane() == 0)
            r.sum[row] = sum;
    }
}

template <enum row_step STEP> static int launch_rows(const struct gpu_round *r, void *stream)
{
    row_kernel<STEP><<<blocks_of_rows(r->n), THREADS, 0, (cudaStream_t)stream>>>(*r);
    return cudaGetLastError();
}

int gpu_round_assign(const struct gpu_round *r, void *stream)
{
    return launch_rows<ASSIGN>(r, stream);
}

int gpu_round_errors(const struct gpu_round *r, void *stream)
{
    return launch_rows<ERRORS>(r, stream);
}

int gpu_round_objective(const struct gpu_round *r, void *stream)
{
    return launch_rows<OBJECTIVE>(r, stream);
}

int gpu_round_rescale(const struct gpu_round *r, void *stream)
{
    return launch_rows<RESCALE>(r, stream);
}

/* A warp per group. */
static __global__ void __launch_bounds__(THREADS)
    range_kernel(uint32_t *range, const float *w, size_t n, size_t k, size_t group)
{
    const size_t groups = (k + group - 1) / group, item = row_of_warp();
    if (item >= n * groups)
        return;
    const size_t first = item % groups * group, end = first + group < k ? first + group : k;
    uint32_t most = 0;
    for (size_t i = first + row_lane(); i < end; i += ROW_LANES)
        most = max(most, row_bits(w[item / groups * k + i]) & 0x7fffffff);
    for (int mask = 16; mask; mask /= 2)
        most = max(most, __shfl_xor_sync(~0u, most, mask));
    if (row_lane() || !most)
        return;
    if (most > range[0]) /* spares most groups the atomic operation */
        atomicMax(&range[0], most);
    if (most < range[1])
        atomicMin(&range[1], most);
}

int gpu_round_range(uint32_t range[2], const float *w, size_t n, size_t k, size_t group,
                    void *stream)
{
    range_kernel<<<blocks_of_rows(n * ((k + group - 1) / group)), THREADS, 0,
                   (cudaStream_t)stream>>>(range, w, n, k, group);
    return cudaGetLastError();
}

/* ---- arrangement ---------------------------------------------------------------------------- */

static __global__ void diagonal_kernel(float *out, const float *m, size_t k, bool squared)
{
    const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i < k)
        out[i] = m[i * k + i] * (squared ? m[i * k + i] : 1);
}

int gpu_round_diagonal(float *out, const float *m, size_t k, bool squared, void *stream)
{
    diagonal_kernel<<<(unsigned)((k + 255) / 256), 256, 0, (cudaStream_t)stream>>>(out, m, k,
                                                                                   squared);
    return cudaGetLastError();
}

/* Tiles of TILE_ROWS rows and TILE_COLUMNS positions go through shared memory, so that reads and
 * writes are of neighbours. */
enum { TILE_ROWS = 128, TILE_COLUMNS = 32, STORE_THREADS = 256 };

static __global__ void __launch_bounds__(STORE_THREADS)
    store_codes_kernel(struct gpu_round r, uint8_t *code, size_t stride)
{
    __shared__ uint8_t tile[TILE_COLUMNS][TILE_ROWS + 4];
    const size_t row0 = blockIdx.y * (size_t)TILE_ROWS, p0 = blockIdx.x * (size_t)TILE_COLUMNS;
    for (int i = threadIdx.x; i < TILE_ROWS * TILE_COLUMNS; i += STORE_THREADS) {
        const size_t row = row0 + i / TILE_COLUMNS, p = p0 + i % TILE_COLUMNS;
        if (row < r.n && p < r.k)
            tile[i % TILE_COLUMNS][i / TILE_COLUMNS] = r.code[r.rank[row * r.k + p]];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < TILE_ROWS * TILE_COLUMNS; i += STORE_THREADS) {
        const size_t row = row0 + i % TILE_ROWS, p = p0 + i / TILE_ROWS;
        if (row < r.n && p < r.k)
            code[r.order[p] * stride + row] = tile[i / TILE_ROWS][i % TILE_ROWS];
    }
}

static __global__ void __launch_bounds__(THREADS)
    values_kernel(struct gpu_round r, float *out, int exp2)
{
    __shared__ struct row_values values;
    const size_t row = row_of_warp(), first = row * r.k;
    copy_values(&values, r.values);
    __syncthreads();
    if (row >= r.n)
        return;
    const float *scale = r.scale + row * r.groups, *stored = r.mix24.values;
    const uint8_t *zero = r.zero + row * r.groups;
    for (size_t p = row_lane(); p < r.k; p += ROW_LANES) {
        const uint32_t group = r.group[p];
        out[first + r.order[p]] = stored
                                      ? ldexpf(stored[first + p], exp2)
                                      : ldexpf(scale[group], exp2) *
                                            (values.value[r.rank[first + p]] - (float)zero[group]);
    }
}

int gpu_round_values(const struct gpu_round *r, float *out, int exp2, void *stream)
{
    values_kernel<<<blocks_of_rows(r->n), THREADS, 0, (cudaStream_t)stream>>>(*r, out, exp2);
    return cudaGetLastError();
}

static int store_codes(const struct gpu_round *r, uint8_t *code, size_t stride, cudaStream_t stream)
{
    const dim3 tiles((unsigned)((r->k + TILE_COLUMNS - 1) / TILE_COLUMNS),
                     (unsigned)((r->n + TILE_ROWS - 1) / TILE_ROWS));
    store_codes_kernel<<<tiles, STORE_THREADS, 0, stream>>>(*r, code, stride);
    return cudaGetLastError();
}

static unsigned blocks_of_params(const struct gpu_round *r)
{
    return (unsigned)((r->n * r->groups + 255) / 256);
}

/* Transposes from[n][groups] and the zero-points. */
template <class T>
static __global__ void store_params_kernel(struct gpu_round r, const T *from, T *to, uint8_t *zero,
                                           size_t stride)
{
    const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i >= r.n * r.groups)
        return;
    const size_t group = i / r.n, row = i % r.n;
    to[group * stride + row] = from[row * r.groups + group];
    zero[group * stride + row] = r.zero[row * r.groups + group];
}

/* Stores the codes, the zero-points and the parameter `from` of all groups. */
template <class T>
static int store(const struct gpu_round *r, uint8_t *code, const T *from, T *to, uint8_t *zero,
                 size_t stride, cudaStream_t stream)
{
    const int status = store_codes(r, code, stride, stream);
    if (status)
        return status;
    store_params_kernel<<<blocks_of_params(r), 256, 0, stream>>>(*r, from, to, zero, stride);
    return cudaGetLastError();
}

int gpu_round_store(const struct gpu_round *r, uint8_t *code, float *scale, uint8_t *zero,
                    size_t stride, void *stream)
{
    return store(r, code, r->scale, scale, zero, stride, (cudaStream_t)stream);
}

int gpu_mix24_store(const struct gpu_round *r, uint8_t *code, uint8_t *q, uint8_t *zero,
                    size_t stride, void *stream)
{
    return store(r, code, r->mix24.q, q, zero, stride, (cudaStream_t)stream);
}
