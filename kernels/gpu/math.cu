/*
 * Kernels of the CUDA backend for everything except matrix products: elementwise and row operations
 * on FP32 arrays, scores, statistics and Cholesky tiles. The functions are specified in
 * base/backend.h; the reference is the CPU backend, which adds in another order.
 *
 * All results are deterministic: a sum is computed by one thread, or by one thread block that adds
 * the partial sums of its threads in a fixed order.
 */
#include "kernels/gpu/block.cuh"
#include "kernels/gpu/internal.h"

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>

/* ---- elements ------------------------------------------------------------------------------- */

static __global__ void bias_kernel(float *y, const float *bias, size_t count, size_t n)
{
    FOR_ELEMENTS(i, count)
    y[i] += bias[i % n];
}

template <typename T> static __global__ void add_kernel(T *y, const T *x, size_t count)
{
    FOR_ELEMENTS(i, count)
    y[i] += x[i];
}

static __global__ void scale_kernel(float *y, float factor, size_t count)
{
    FOR_ELEMENTS(i, count)
    y[i] *= factor;
}

/* Rounds to the nearest TF32 number, or toward zero if that would be infinite. */
static __device__ __forceinline__ float to_tf32(float x)
{
    const uint32_t bits = __float_as_uint(x);
    const float nearest = __uint_as_float((bits + 0x1000) & ~0x1fffu);
    return isfinite(nearest) ? nearest : __uint_as_float(bits & ~0x1fffu);
}

/* Splits x into TF32 parts (gpu_math_split_tf32), in tiles of 32 rows x 32 columns of k. width:
 * padded k, the width of one part. */
template <bool TRANSPOSED>
static __global__ void parts_kernel(float *z, const float *x, size_t rows, size_t k, size_t ld,
                                    size_t width, bool right)
{
    enum { TILE = 32, STEP = THREADS / TILE };
    __shared__ float tile[TILE][TILE + 1];
    const size_t lane = threadIdx.x % TILE, first = threadIdx.x / TILE;
    const size_t k0 = blockIdx.x * (size_t)TILE, run = k0 / GPU_TF32_DEPTH * GPU_TF32_DEPTH;
    const size_t step = min(width - run, (size_t)GPU_TF32_DEPTH);
    for (size_t r0 = blockIdx.y * (size_t)TILE; r0 < rows; r0 += gridDim.y * (size_t)TILE) {
        if (TRANSPOSED) {
            __syncthreads(); /* the previous tile has been read */
            for (size_t i = first; i < TILE && k0 + i < k; i += STEP)
                tile[i][lane] = r0 + lane < rows ? x[(k0 + i) * ld + r0 + lane] : 0;
            __syncthreads();
        }
        for (size_t i = first; i < TILE && r0 + i < rows; i += STEP) {
            float *to = z + (r0 + i) * 3 * width + 3 * run + (k0 + lane - run), v = 0;
            if (k0 + lane < k)
                v = TRANSPOSED ? tile[lane][i] : x[(r0 + i) * ld + k0 + lane];
            const float high = isnan(v) ? nanf("") : to_tf32(v),
                        low = isfinite(v) ? to_tf32(v - high) : 0;
            to[0] = right ? high : low;
            to[step] = right ? low : high;
            to[2 * step] = high;
        }
    }
}

/* A thread takes elements of y. */
static __global__ void gather_kernel(float *y, const float *x, const uint32_t *rows,
                                     const float *factor, uint32_t *largest, size_t count, size_t n)
{
    uint32_t most = 0;
    FOR_ELEMENTS(e, count)
    {
        const size_t i = e / n, other = (rows ? rows[i] : i) * n + e % n;
        y[e] = x[other] * (factor ? factor[i] : 1);
        most = larger(most, y[e]);
    }
    note_largest(largest, most);
}

/* The same for four elements at a time: count and n are numbers of these. */
static __global__ void gather_fours_kernel(float4 *y, const float4 *x, const uint32_t *rows,
                                           const float *factor, uint32_t *largest, uint32_t count,
                                           uint32_t n)
{
    uint32_t most = 0;
    FOR_ELEMENTS(e, count)
    {
        const uint32_t i = (uint32_t)e / n, j = (uint32_t)e % n;
        const float4 v = x[(size_t)(rows ? rows[i] : i) * n + j];
        const float by = factor ? factor[i] : 1;
        const float4 out = make_float4(v.x * by, v.y * by, v.z * by, v.w * by);
        y[e] = out;
        most = larger(larger(larger(larger(most, out.x), out.y), out.z), out.w);
    }
    note_largest(largest, most);
}

/* A thread takes elements of x, and rounds as the CPU backend does. */
static __global__ void scatter_kernel(float *y, const float *x, const uint32_t *rows,
                                      const float *factor, size_t count, size_t n)
{
    FOR_ELEMENTS(e, count)
    {
        const size_t i = e / n, other = (rows ? rows[i] : i) * n + e % n;
        y[other] = __fadd_rn(y[other], __fmul_rn(x[e], factor ? factor[i] : 1));
    }
}

static __device__ float activated(float x, int kind)
{
    switch (kind) {
    case GPU_SILU:
        return x / (1.0f + expf(-x));
    case GPU_GELU_TANH:
        return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    case GPU_GELU:
        return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
    case GPU_RELU2:
        return x < 0 ? 0 : x * x;
    case GPU_NONE:
        return x;
    case GPU_SIGMOID:
        return 1.0f / (1.0f + expf(-x));
    default:
        return x < 0 ? 0 : x; /* NaN stays NaN */
    }
}

/* Comparisons with NaN are false, so that NaN stays NaN. */
static __device__ float clamped(float gate, float up)
{
    const float g = gate > 7.0f ? 7.0f : gate, u = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
    return g / (1.0f + expf(-1.702f * g)) * (u + 1.0f);
}

/* y = x - y. */
static __global__ void subtract_kernel(float *y, const float *x, uint32_t *largest, size_t count)
{
    uint32_t most = 0;
    FOR_ELEMENTS(i, count)
    {
        y[i] = x[i] - y[i];
        most = larger(most, y[i]);
    }
    note_largest(largest, most);
}

static __device__ float activated_by(float gate, float up, int kind)
{
    return kind == GPU_CLAMPED ? clamped(gate, up) : activated(gate, kind) * up;
}

/* FOUR: four elements at a time. */
template <bool FOUR>
static __global__ void activate_kernel(float *y, const float *gate, const float *up, int kind,
                                       uint32_t *largest, size_t count)
{
    uint32_t most = 0;
    if (FOUR) {
        FOR_ELEMENTS(i, count / 4)
        {
            const float4 g = ((const float4 *)gate)[i];
            const float4 u = up ? ((const float4 *)up)[i] : make_float4(1, 1, 1, 1);
            const float4 v =
                make_float4(activated_by(g.x, u.x, kind), activated_by(g.y, u.y, kind),
                            activated_by(g.z, u.z, kind), activated_by(g.w, u.w, kind));
            ((float4 *)y)[i] = v;
            most = larger(larger(larger(larger(most, v.x), v.y), v.z), v.w);
        }
    } else {
        FOR_ELEMENTS(i, count)
        {
            y[i] = activated_by(gate[i], up ? up[i] : 1.0f, kind);
            most = larger(most, y[i]);
        }
    }
    note_largest(largest, most);
}

static __global__ void columns_kernel(float *y, size_t ldy, const float *x, size_t ldx, size_t n,
                                      size_t count)
{
    FOR_ELEMENTS(i, count)
    y[i / n * ldy + i % n] = x[i / n * ldx + i % n];
}

static __global__ void rope_kernel(float *x, const float *cos, const float *sin, size_t count,
                                   size_t seqlen, size_t heads, size_t dim, size_t half,
                                   bool interleaved)
{
    FOR_ELEMENTS(i, count)
    { /* i counts the pairs of all heads of all tokens */
        const size_t pair = i % half, head = i / half, at = head / heads % seqlen * half + pair;
        float *low = x + head * dim + (interleaved ? 2 * pair : pair);
        float *high = low + (interleaved ? 1 : half);
        const float a = *low, b = *high;
        *low = a * cos[at] - b * sin[at];
        *high = b * cos[at] + a * sin[at];
    }
}

/* ---- rows: one thread block per row --------------------------------------------------------- */

static __global__ void norm_kernel(float *y, const float *x, const float *w, const float *bias,
                                   int kind, float eps, uint32_t *largest, size_t n)
{
    const float *row = x + blockIdx.x * n;
    uint32_t most = 0;
    double mean = 0, squares = 0;
    if (kind == GPU_NORM_LAYER) {
        for (size_t i = threadIdx.x; i < n; i += THREADS)
            mean += (double)row[i];
        mean = block_join(mean) / (double)n;
    }
    for (size_t i = threadIdx.x; i < n; i += THREADS)
        squares += ((double)row[i] - mean) * ((double)row[i] - mean);
    const float inv = (float)(1 / sqrt(block_join(squares) / (double)n + (double)eps));
    for (size_t i = threadIdx.x; i < n; i += THREADS) {
        const float v = (float)((double)row[i] - mean) * inv * w[i] + (bias ? bias[i] : 0);
        y[blockIdx.x * n + i] = v;
        most = larger(most, v);
    }
    note_largest(largest, most);
}

static __global__ void head_pointers_kernel(float **to, struct gpu_heads a)
{
    FOR_ELEMENTS(i, a.batch)
    {
        const size_t sequence = i / a.heads, head = i % a.heads;
        const size_t query = sequence * a.query_step + head * a.dim;
        const size_t key = sequence * a.key_step + head / a.group * a.dim;
        to[GPU_HEAD_QUERIES * a.batch + i] = (float *)a.q + query;
        to[GPU_HEAD_KEYS * a.batch + i] = (float *)a.k + key;
        to[GPU_HEAD_VALUES * a.batch + i] = (float *)a.v + key;
        to[GPU_HEAD_OUTPUTS * a.batch + i] = a.y + query;
        to[GPU_HEAD_SCORES * a.batch + i] = a.s + i * a.cells;
    }
}

/* Softmax of scores s[heads][rows][keys] of queries r0, r0 + 1, ... and keys lo, lo + 1, ... A
 * query attends to its own key and to window - 1 keys before it (window 0: to all before it). */
static __global__ void softmax_kernel(float *s, size_t rows, size_t keys, size_t r0, size_t lo,
                                      size_t window, float softcap, const float *sinks,
                                      size_t heads)
{
    float *row = s + blockIdx.x * keys;
    const float sink = sinks ? sinks[blockIdx.x / rows % heads] : -INFINITY;
    const size_t i = r0 + blockIdx.x % rows, first = window && i >= window ? i - window + 1 : 0;
    const size_t from = first > lo ? first - lo : 0, end = i - lo + 1;
    largest top = {-INFINITY, 0};
    double sum = 0;
    /* The row is read three times, mostly from a cache, and written once. */
    for (size_t j = threadIdx.x; j < end; j += THREADS)
        if (j >= from)
            top.value = fmaxf(top.value, capped(row[j], softcap));
    top = block_join(top);
    for (size_t j = threadIdx.x; j < end; j += THREADS)
        if (j >= from)
            sum += (double)expf(capped(row[j], softcap) - top.value);
    const float factor = (float)(1 / (block_join(sum) + exp((double)sink - (double)top.value)));
    for (size_t j = threadIdx.x; j < keys; j += THREADS)
        row[j] = j >= from && j < end ? expf(capped(row[j], softcap) - top.value) * factor : 0;
}

/* ---- keys of a 4-bit cache ------------------------------------------------------------------ */

/* The groups of base/kv4.h: 0 is token 0, n > 0 ends before token n * KV_GROUP. */
enum { KV_GROUP = 64 };

static __host__ __device__ size_t kv_group_of(size_t token)
{
    return token ? token / KV_GROUP + 1 : 0;
}

static __device__ int kv_key_zero(float middle, int scale)
{
    const float per = __frcp_rn(__half2float(__ushort_as_half((unsigned short)scale)));
    return (int)fminf(fmaxf(rintf(__fsub_rn(7.5f, __fmul_rn(middle, per))), -63), 63);
}

/* Scale and zero-point of keys from low to high. */
static __device__ float2 kv_key_grid(float low, float high)
{
    const float middle = (low + high) / 2;
    const float range = fmaxf(high - low, __fmul_rn(fabsf(middle), 9.f / 32));
    const int want = max(__half_as_ushort(__float2half_rn(__fdiv_rn(range, 15))), 96);
    int zero = kv_key_zero(middle, want);
    const int base = (want + 32 - abs(zero)) & ~63;
    zero = kv_key_zero(middle, base + abs(zero));
    const unsigned short scale = (unsigned short)(base + abs(zero));
    return make_float2(__half2float(__ushort_as_half(scale)), (float)zero);
}

static __device__ unsigned char kv_code(float x, float2 grid)
{
    const float q = __fadd_rn(__fmul_rn(x, __frcp_rn(grid.x)), grid.y);
    return (unsigned char)fminf(fmaxf(rintf(q), 0), 15);
}

/*
 * One thread block per group of keys and KV head adds the keys of the group one after the other. A
 * thread rounds channels; a key that widens the range of its channel rounds the channel again. Then
 * a thread takes a query head and an earlier key at a time.
 */
static __global__ void own_scores_kernel(const gpu_own_scores a)
{
    extern __shared__ float2
        kv_grid[]; /* scales and zero-points [dim], then codes [KV_GROUP][pitch] */
    unsigned char *codes = (unsigned char *)(kv_grid + a.dim);
    const size_t pitch = a.dim + 4, group = kv_group_of(a.r0) + blockIdx.x, head = blockIdx.y;
    const size_t first = group > 1 ? (group - 1) * KV_GROUP : group;
    const size_t end = min(group ? group * KV_GROUP : 1, a.r0 + a.rows);
    const float *exact = a.exact + head * a.dim;
    float low[GPU_OWN_DIM / THREADS], high[GPU_OWN_DIM / THREADS];
    for (size_t i = first; i < end; i++) {
#pragma unroll
        for (int c = 0; c < GPU_OWN_DIM / THREADS; c++) {
            const size_t d = threadIdx.x + c * THREADS;
            if (d >= a.dim)
                break;
            const float x = exact[i * a.ldk + d];
            size_t from = i;
            if (i == first || x < low[c] || x > high[c]) {
                low[c] = i == first ? x : fminf(low[c], x);
                high[c] = i == first ? x : fmaxf(high[c], x);
                kv_grid[d] = kv_key_grid(low[c], high[c]);
                from = first;
            }
            if (group == 0) /* token 0 is exact: code 1 */
                kv_grid[d] = make_float2(x, 0);
            for (size_t j = from; j <= i; j++)
                codes[(j - first) * pitch + d] =
                    group == 0 ? 1 : kv_code(exact[j * a.ldk + d], kv_grid[d]);
        }
        __syncthreads();
        const size_t from = max(first, a.lo), n = i + 1 - from;
        for (size_t p = threadIdx.x; i >= a.r0 && p < a.group * n; p += THREADS) {
            const size_t g = p / n, j = from + p % n;
            const float *q = a.q + (i - a.r0) * a.ldq + (head * a.group + g) * a.dim;
            const unsigned char *code = codes + (j - first) * pitch;
            float sum = 0;
            for (size_t d = 0; d < a.dim; d++)
                sum += q[d] * __fmul_rn(code[d] - kv_grid[d].y, kv_grid[d].x);
            const size_t plane = head * a.group + g;
            a.s[(plane * a.rows + i - a.r0) * a.keys + j - a.lo] = sum * a.scale;
        }
        __syncthreads();
    }
}

/* As in kernels/cpu/backend.c: KL = sum p (b - a) - (lse b - lse a), where p are the probabilities
 * of the reference b. */
static __global__ void score_kernel(struct gpu_score *scores, const float *logits, const float *ref,
                                    const uint32_t *targets, float softcap, size_t vocab)
{
    const float *a = logits + blockIdx.x * vocab, *b = ref + blockIdx.x * vocab;
    const row_stats sa = stats_of(a, softcap, vocab);
    struct gpu_score out = {};
    out.nll = sa.lse - (double)capped(a[targets[blockIdx.x]], softcap);
    if (ref) {
        const row_stats sb = stats_of(b, softcap, vocab);
        double cross = 0;
        for (size_t i = threadIdx.x; i < vocab; i += THREADS) {
            const float bi = capped(b[i], softcap);
            cross += exp((double)bi - sb.lse) * ((double)bi - (double)capped(a[i], softcap));
        }
        const double kld = block_join(cross) - (sb.lse - sa.lse);
        out.kld = kld < 0 ? 0 : kld; /* NaN stays NaN */
        out.ref_nll = sb.lse - (double)capped(b[targets[blockIdx.x]], softcap);
        out.p_delta = exp(-out.nll) - exp(-out.ref_nll);
        out.same_top = sa.top.index == sb.top.index;
    }
    if (threadIdx.x == 0)
        scores[blockIdx.x] = out;
}

/* ---- Cholesky ------------------------------------------------------------------------------- */

/* Right-looking factorization, column by column. A thread keeps the elements of a row in columns
 * `first`, first + STEP, ... in registers. */
enum { TILE = 128, STEP = 8, HELD = TILE / STEP };

static __global__ void __launch_bounds__(TILE *STEP, 1)
    cholesky_tile_kernel(double *a, int n, size_t pitch, int *failed)
{
    __shared__ double pivot, column[TILE];
    const int row = threadIdx.x % TILE, first = threadIdx.x / TILE;
    double x[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++)
        x[i] = row < n && first + STEP * i <= row ? a[row * pitch + first + STEP * i] : 0;
#pragma unroll
    for (int at = 0; at < HELD; at++)
#pragma unroll 1
        for (int owner = 0; owner < STEP; owner++) {
            const int j = STEP * at + owner;
            if (j >= n)
                break;
            if (first == owner && row == j)
                pivot = x[at];
            __syncthreads();
            if (first == owner && row >= j) {
                const double root = sqrt(pivot);
                if (row == j && !(pivot > 0))
                    *failed = 1;
                x[at] = row == j ? root : x[at] / root;
                column[row] = x[at];
            }
            __syncthreads();
            if (row <= j)
                continue;
            const double scale = column[row];
#pragma unroll
            for (int i = at; i < HELD; i++)
                if (first + STEP * i > j && first + STEP * i <= row)
                    x[i] -= scale * column[first + STEP * i];
        }
#pragma unroll
    for (int i = 0; i < HELD; i++)
        if (row < n && first + STEP * i <= row)
            a[row * pitch + first + STEP * i] = x[i];
}

/* ---- formats -------------------------------------------------------------------------------- */

static __global__ void widen_kernel(float *y, const uint16_t *x, bool bf16, size_t count)
{
    FOR_ELEMENTS(i, count)
    y[i] = bf16 ? __uint_as_float((uint32_t)x[i] << 16) : __half2float(__ushort_as_half(x[i]));
}

/* ---- Hessians ------------------------------------------------------------------------------- */

static __global__ void order_gram_kernel(float *h, double *a, const double *gram,
                                         const uint32_t *order, double scale, double damp, size_t k)
{
    FOR_ELEMENTS(e, k * k)
    {
        const size_t i = e / k, j = e % k, row = order[i], col = order[j];
        const float value =
            (float)((row >= col ? gram[row * k + col] : gram[col * k + row]) * scale);
        h[e] = value + (i == j ? (float)damp : 0);
        if (i <= j)
            a[(k - 1 - i) * k + k - 1 - j] = (double)value + (i == j ? damp : 0);
    }
}

static __global__ void order_again_kernel(float *h, double *a, const float *from,
                                          const uint32_t *order, size_t k)
{
    FOR_ELEMENTS(e, k * k)
    {
        const size_t i = e / k, j = e % k;
        h[e] = from[order[i] * k + order[j]];
        if (i <= j)
            a[(k - 1 - i) * k + k - 1 - j] = (double)h[e];
    }
}

static __global__ void reverse_kernel(float *v, const double *a, size_t k)
{
    FOR_ELEMENTS(e, k * k)
    {
        const size_t i = e / k, j = e % k;
        v[e] = i <= j ? (float)a[(k - 1 - i) * k + k - 1 - j] : 0;
    }
}

static __global__ void order_columns_kernel(float *y, const float *x, const uint32_t *order,
                                            float scale, size_t m, size_t k)
{
    FOR_ELEMENTS(e, m * k)
    y[e] = x[e / k * k + order[e % k]] * scale;
}

static __global__ void restore_columns_kernel(float *y, const float *x, const uint32_t *order,
                                              size_t m, size_t k)
{
    FOR_ELEMENTS(e, m * k)
    y[e / k * k + order[e % k]] = x[e];
}

/* One thread block per row. */
static __global__ void row_dots_kernel(double *dots, const float *x, const float *y, size_t k)
{
    const size_t row = blockIdx.x;
    double sum = 0;
    for (size_t i = threadIdx.x; i < k; i += THREADS)
        sum += (double)x[row * k + i] * (double)y[row * k + i];
    sum = block_join(sum);
    if (threadIdx.x == 0)
        dots[row] = sum;
}

/* ---- statistics ----------------------------------------------------------------------------- */

/* Rows [i0, i0 + rows) of the lower triangle of h[k][k] += product[rows][cols]. */
static __global__ void add_lower_kernel(double *h, const float *product, size_t i0, size_t rows,
                                        size_t cols, size_t k)
{
    FOR_ELEMENTS(i, rows * cols)
    {
        const size_t row = i0 + i / cols, col = i % cols;
        if (col <= row)
            h[row * k + col] += (double)product[i];
    }
}

/* The function qt_hist_bin of base/backend.h. */
static __device__ __forceinline__ int hist_bin(float x)
{
    const uint32_t u = __float_as_uint(x) & 0x7fffffff;
    const int b = (int)((u >> 23) + ((u + (0x800000 - 0x3504f4)) >> 23)) - 221;
    return min(max(b, 0), GPU_HIST_BINS - 1);
}

/*
 * A thread block has CHANNELS channels of PART_TOKENS tokens, a thread every SLICES-th of a
 * channel. The sums of the threads are added in order, and then those of the thread blocks.
 * Magnitudes are counted in shared memory, where rows of one counter more keep lanes off each
 * other's banks.
 */
enum { CHANNELS = 32, SLICES = 32, PART_TOKENS = 1024, COUNTERS = GPU_HIST_BINS + 1 };

template <bool COUNT>
static __global__ void __launch_bounds__(CHANNELS *SLICES)
    channels_kernel(float *tops, double *sums, uint32_t *hist, const float *x, size_t m, size_t k,
                    uint32_t *largest)
{
    __shared__ float top_of[SLICES][CHANNELS];
    __shared__ double sum_of[SLICES][CHANNELS];
    __shared__ uint32_t counters[CHANNELS * COUNTERS];
    const int lane = threadIdx.x % CHANNELS, slice = threadIdx.x / CHANNELS;
    const size_t first = blockIdx.x * (size_t)CHANNELS, c = first + lane;
    const size_t t0 = blockIdx.y * (size_t)PART_TOKENS, end = min(t0 + PART_TOKENS, m);
    float top = 0;
    uint32_t most = 0;
    double sum = 0;
    for (int i = threadIdx.x; COUNT && i < CHANNELS * COUNTERS; i += CHANNELS * SLICES)
        counters[i] = 0;
    __syncthreads();
#pragma unroll 4
    for (size_t t = t0 + slice; t < end && c < k; t += SLICES) {
        const float a = fabsf(x[t * k + c]);
        top = a > top ? a : top;
        most = larger(most, a);
        sum += (double)a * (double)a;
        if (COUNT)
            atomicAdd(&counters[lane * COUNTERS + hist_bin(a)], 1u);
    }
    note_largest(largest, most);
    top_of[slice][lane] = top;
    sum_of[slice][lane] = sum;
    __syncthreads();
    for (int i = threadIdx.x; COUNT && i < CHANNELS * GPU_HIST_BINS; i += CHANNELS * SLICES) {
        const uint32_t n = counters[i / GPU_HIST_BINS * COUNTERS + i % GPU_HIST_BINS];
        if (n)
            atomicAdd(&hist[first * GPU_HIST_BINS + i], n);
    }
    if (slice || c >= k)
        return;
    for (int i = 1; i < SLICES; i++) {
        top = top_of[i][lane] > top ? top_of[i][lane] : top;
        sum += sum_of[i][lane];
    }
    tops[blockIdx.y * k + c] = top;
    sums[blockIdx.y * k + c] = sum;
}

static __global__ void join_channels_kernel(float *absmax, double *sum2, const float *tops,
                                            const double *sums, size_t parts, size_t k)
{
    FOR_ELEMENTS(c, k)
    for (size_t i = 0; i < parts; i++) {
        absmax[c] = tops[i * k + c] > absmax[c] ? tops[i * k + c] : absmax[c];
        sum2[c] += sums[i * k + c];
    }
}

/* ---- launches ------------------------------------------------------------------------------- */

int gpu_math_bias(float *y, const float *bias, size_t m, size_t n, void *stream)
{
    return LAUNCH(bias_kernel, blocks_for(m * n), THREADS, stream, y, bias, m * n, n);
}

int gpu_math_add(float *y, const float *x, size_t count, void *stream)
{
    return LAUNCH(add_kernel, blocks_for(count), THREADS, stream, y, x, count);
}

int gpu_math_add_f64(double *y, const double *x, size_t count, void *stream)
{
    return LAUNCH(add_kernel, blocks_for(count), THREADS, stream, y, x, count);
}

int gpu_math_gather(float *y, const float *x, const uint32_t *rows, const float *factor, size_t m,
                    size_t n, uint32_t *largest, void *stream)
{
    const size_t count = m * n;
    const bool fours = n % 4 == 0 && count / 4 <= UINT32_MAX &&
                       ((uintptr_t)y | (uintptr_t)x) % sizeof(float4) == 0;
    return fours ? LAUNCH(gather_fours_kernel, few_blocks_for(count / 4), THREADS, stream,
                          (float4 *)y, (const float4 *)x, rows, factor, largest,
                          (uint32_t)(count / 4), (uint32_t)(n / 4))
                 : LAUNCH(gather_kernel, few_blocks_for(count), THREADS, stream, y, x, rows, factor,
                          largest, count, n);
}

int gpu_math_copy_columns(float *y, size_t ldy, const float *x, size_t ldx, size_t n, size_t m,
                          void *stream)
{
    return LAUNCH(columns_kernel, blocks_for(m * n), THREADS, stream, y, ldy, x, ldx, n, m * n);
}

int gpu_math_scatter(float *y, const float *x, const uint32_t *rows, const float *factor, size_t m,
                     size_t n, void *stream)
{
    return LAUNCH(scatter_kernel, blocks_for(m * n), THREADS, stream, y, x, rows, factor, m * n, n);
}

size_t gpu_math_tf32_width(size_t k)
{
    return 3 * ((k + 31) / 32 * 32);
}

int gpu_math_split_tf32(float *z, const float *x, size_t rows, size_t k, size_t ld, bool transposed,
                        bool right, void *stream)
{
    const size_t width = gpu_math_tf32_width(k) / 3, blocks = (rows + 31) / 32;
    const dim3 grid((unsigned)(width / 32), (unsigned)(blocks < 65535 ? blocks : 65535));
    return transposed
               ? LAUNCH(parts_kernel<true>, grid, THREADS, stream, z, x, rows, k, ld, width, right)
               : LAUNCH(parts_kernel<false>, grid, THREADS, stream, z, x, rows, k, ld, width,
                        right);
}

int gpu_math_widen(float *y, const void *x, bool bf16, size_t count, void *stream)
{
    return LAUNCH(widen_kernel, blocks_for(count), THREADS, stream, y, (const uint16_t *)x, bf16,
                  count);
}

int gpu_math_scale(float *y, float factor, size_t count, void *stream)
{
    return LAUNCH(scale_kernel, blocks_for(count), THREADS, stream, y, factor, count);
}

int gpu_math_subtract(float *y, const float *x, size_t count, uint32_t *largest, void *stream)
{
    return LAUNCH(subtract_kernel, few_blocks_for(count), THREADS, stream, y, x, largest, count);
}

int gpu_math_activate(float *y, const float *gate, const float *up, enum gpu_act kind, size_t count,
                      uint32_t *largest, void *stream)
{
    const bool four =
        count % 4 == 0 && ((uintptr_t)y | (uintptr_t)gate | (uintptr_t)up) % sizeof(float4) == 0;
    return four ? LAUNCH(activate_kernel<true>, few_blocks_for(count / 4), THREADS, stream, y, gate,
                         up, (int)kind, largest, count)
                : LAUNCH(activate_kernel<false>, few_blocks_for(count), THREADS, stream, y, gate,
                         up, (int)kind, largest, count);
}

int gpu_math_rope(float *x, const float *cos, const float *sin, size_t m, size_t seqlen,
                  size_t heads, size_t dim, size_t half, bool interleaved, void *stream)
{
    const size_t count = m * heads * half;
    return LAUNCH(rope_kernel, blocks_for(count), THREADS, stream, x, cos, sin, count, seqlen,
                  heads, dim, half, interleaved);
}

int gpu_math_norm(float *y, const float *x, const float *w, const float *bias, enum gpu_norm kind,
                  float eps, size_t m, size_t n, uint32_t *largest, void *stream)
{
    return LAUNCH(norm_kernel, (unsigned)m, THREADS, stream, y, x, w, bias, (int)kind, eps, largest,
                  n);
}

int gpu_math_head_pointers(void *pointers, const struct gpu_heads *a, void *stream)
{
    return LAUNCH(head_pointers_kernel, blocks_for(a->batch), THREADS, stream, (float **)pointers,
                  *a);
}

int gpu_math_softmax(float *s, size_t batch, size_t rows, size_t keys, size_t r0, size_t lo,
                     size_t window, float softcap, const float *sinks, size_t heads, void *stream)
{
    return LAUNCH(softmax_kernel, (unsigned)(batch * rows), THREADS, stream, s, rows, keys, r0, lo,
                  window, softcap, sinks, heads);
}

int gpu_math_own_scores(const struct gpu_own_scores *a, void *stream)
{
    const dim3 grid((unsigned)(kv_group_of(a->r0 + a->rows - 1) - kv_group_of(a->r0) + 1),
                    (unsigned)a->count);
    const size_t bytes = 2 * a->dim * sizeof(float) + KV_GROUP * (a->dim + 4);
    own_scores_kernel<<<grid, THREADS, bytes, (cudaStream_t)stream>>>(*a);
    return cudaGetLastError();
}

int gpu_math_score(struct gpu_score *scores, const float *logits, const float *ref,
                   const uint32_t *targets, float softcap, size_t m, size_t vocab, void *stream)
{
    return LAUNCH(score_kernel, (unsigned)m, THREADS, stream, scores, logits, ref, targets, softcap,
                  vocab);
}

int gpu_math_cholesky_tile(double *a, int n, size_t pitch, int *failed, void *stream)
{
    return LAUNCH(cholesky_tile_kernel, 1, TILE * STEP, stream, a, n, pitch, failed);
}

int gpu_math_add_lower(double *h, const float *product, size_t i0, size_t rows, size_t cols,
                       size_t k, void *stream)
{
    return LAUNCH(add_lower_kernel, blocks_for(rows * cols), THREADS, stream, h, product, i0, rows,
                  cols, k);
}

int gpu_math_order_gram(float *h, double *a, const double *gram, const uint32_t *order,
                        double scale, double damp, size_t k, void *stream)
{
    return LAUNCH(order_gram_kernel, blocks_for(k * k), THREADS, stream, h, a, gram, order, scale,
                  damp, k);
}

int gpu_math_order_again(float *h, double *a, const float *from, const uint32_t *order, size_t k,
                         void *stream)
{
    return LAUNCH(order_again_kernel, blocks_for(k * k), THREADS, stream, h, a, from, order, k);
}

int gpu_math_reverse(float *v, const double *a, size_t k, void *stream)
{
    return LAUNCH(reverse_kernel, blocks_for(k * k), THREADS, stream, v, a, k);
}

int gpu_math_order_columns(float *y, const float *x, const uint32_t *order, float scale, size_t m,
                           size_t k, void *stream)
{
    return LAUNCH(order_columns_kernel, blocks_for(m * k), THREADS, stream, y, x, order, scale, m,
                  k);
}

int gpu_math_restore_columns(float *y, const float *x, const uint32_t *order, size_t m, size_t k,
                             void *stream)
{
    return LAUNCH(restore_columns_kernel, blocks_for(m * k), THREADS, stream, y, x, order, m, k);
}

int gpu_math_row_dots(double *dots, const float *x, const float *y, size_t m, size_t k,
                      void *stream)
{
    return LAUNCH(row_dots_kernel, (unsigned)m, THREADS, stream, dots, x, y, k);
}

static size_t channel_parts(size_t m)
{
    return (m + PART_TOKENS - 1) / PART_TOKENS;
}

size_t gpu_math_channel_parts(size_t m, size_t k)
{
    return 2 * channel_parts(m) * k;
}

int gpu_math_channels(float *absmax, double *sum2, uint32_t *hist, double *parts, const float *x,
                      size_t m, size_t k, uint32_t *largest, void *stream)
{
    const size_t n = channel_parts(m);
    const dim3 grid((unsigned)((k + CHANNELS - 1) / CHANNELS), (unsigned)n);
    float *tops = (float *)(parts + n * k);
    const int rc = hist ? LAUNCH(channels_kernel<true>, grid, CHANNELS * SLICES, stream, tops,
                                 parts, hist, x, m, k, largest)
                        : LAUNCH(channels_kernel<false>, grid, CHANNELS * SLICES, stream, tops,
                                 parts, hist, x, m, k, largest);
    return rc ? rc
              : LAUNCH(join_channels_kernel, blocks_for(k), THREADS, stream, absmax, sum2, tops,
                       parts, n, k);
}
