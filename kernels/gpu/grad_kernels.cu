/*
 * Kernels of the CUDA backend for gradients: norms, activations, the rows of an attention, losses,
 * and the scales of coded matrices. The functions are specified in base/backend.h; the formulas are
 * those of kernels/cpu/grad.c and math.c. As in math.cu, all sums have a fixed order.
 */
#include "kernels/gpu/block.cuh"
#include "kernels/gpu/internal.h"

#include <cuda_fp16.h>

/* ---- norms ---------------------------------------------------------------------------------- */

/* One thread block per row: with t = dy w and z = (x - mean) inv, the means of t and of t z. */
static __global__ void norm_rows_kernel(struct gpu_norm_row *rows, const float *dy, const float *x,
                                        const float *w, int kind, float eps, size_t n)
{
    const float *xs = x + blockIdx.x * n, *ds = dy + blockIdx.x * n;
    double mean = 0, squares = 0, t = 0, tz = 0;
    if (kind == GPU_NORM_LAYER) {
        for (size_t i = threadIdx.x; i < n; i += THREADS)
            mean += (double)xs[i];
        mean = block_join(mean) / (double)n;
    }
    for (size_t i = threadIdx.x; i < n; i += THREADS) {
        const double d = (double)xs[i] - mean, of = (double)ds[i] * (double)w[i];
        squares += d * d;
        t += of;
        tz += of * d;
    }
    const float inv = (float)(1 / sqrt(block_join(squares) / (double)n + (double)eps));
    t = block_join(t);
    tz = block_join(tz);
    if (threadIdx.x == 0)
        rows[blockIdx.x] = {mean, inv, kind == GPU_NORM_LAYER ? (float)(t / (double)n) : 0,
                            (float)(tz * (double)inv / (double)n)};
}

static __device__ __forceinline__ float normed(float x, const gpu_norm_row &row)
{
    return (float)((double)x - row.mean) * row.inv;
}

/* A thread block takes 32 columns of a run of GPU_NORM_RUN rows, a thread every SLICES-th row of a
 * column. */
enum { COLUMNS = 32, SLICES = 32 };

static __global__ void __launch_bounds__(COLUMNS *SLICES)
    norm_runs_kernel(double *runs, const struct gpu_norm_row *rows, const float *dy, const float *x,
                     size_t m, size_t n)
{
    __shared__ double sums[SLICES][COLUMNS];
    const int lane = threadIdx.x % COLUMNS, slice = threadIdx.x / COLUMNS;
    const size_t c = blockIdx.x * (size_t)COLUMNS + lane, from = blockIdx.y * (size_t)GPU_NORM_RUN;
    const size_t end = min(from + GPU_NORM_RUN, m);
    double sum = 0;
    for (size_t i = from + slice; i < end && c < n; i += SLICES)
        sum += (double)(dy[i * n + c] * normed(x[i * n + c], rows[i]));
    sums[slice][lane] = sum;
    __syncthreads();
    if (slice || c >= n)
        return;
    for (int i = 1; i < SLICES; i++)
        sum += sums[i][lane];
    runs[blockIdx.y * n + c] = sum;
}

static __global__ void norm_weights_kernel(float *dw, const double *runs, size_t count, size_t n)
{
    FOR_ELEMENTS(c, n)
    {
        double sum = 0;
        for (size_t i = 0; i < count; i++)
            sum += runs[i * n + c];
        dw[c] += (float)sum;
    }
}

static __global__ void norm_inputs_kernel(float *dx, const struct gpu_norm_row *rows,
                                          const float *dy, const float *x, const float *w,
                                          size_t count, size_t n)
{
    FOR_ELEMENTS(e, count)
    {
        /* The differences may be small: each operation is rounded, as on the CPU. */
        const gpu_norm_row row = rows[e / n];
        const float t = __fsub_rn(__fmul_rn(dy[e], w[e % n]), row.mean_t);
        dx[e] = row.inv * __fsub_rn(t, __fmul_rn(normed(x[e], row), row.mean_tz));
    }
}

/* ---- activations ---------------------------------------------------------------------------- */

static __device__ float tanh_part(float x)
{
    return tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x));
}

/* Sets *slope, the derivative at x, and returns the value there. */
static __device__ float activated(float *slope, float x, int kind)
{
    float s;
    switch (kind) {
    case GPU_SILU:
        s = 1.0f / (1.0f + expf(-x));
        *slope = s * (1.0f + x * (1.0f - s));
        return x / (1.0f + expf(-x));
    case GPU_GELU_TANH:
        s = tanh_part(x);
        *slope = 0.5f * (1.0f + s) +
                 0.5f * x * (1.0f - s * s) * 0.7978845608028654f * (1.0f + 0.134145f * x * x);
        return 0.5f * x * (1.0f + s);
    case GPU_GELU:
        s = 0.5f * (1.0f + erff(x * 0.7071067811865476f));
        *slope = s + x * 0.3989422804014327f * expf(-0.5f * x * x);
        return x * s;
    case GPU_RELU2:
        s = x < 0 ? 0 : x; /* NaN stays NaN */
        *slope = 2.0f * s;
        return s * s;
    case GPU_NONE:
        *slope = 1;
        return x;
    case GPU_SIGMOID:
        s = 1.0f / (1.0f + expf(-x));
        *slope = s * (1.0f - s);
        return s;
    default:
        *slope = x > 0 ? 1 : 0;
        return x < 0 ? 0 : x;
    }
}

/* See clamped_grad in kernels/cpu/math.c. Comparisons with NaN are false, so that NaN stays NaN. */
static __device__ void clamped_grad(float *dgate, float *dup, float d, float gate, float up)
{
    const float g = gate > 7.0f ? 7.0f : gate, u = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
    const float s = 1.0f / (1.0f + expf(-1.702f * g));
    *dgate = gate > 7.0f ? 0 : d * (u + 1.0f) * s * (1.0f + 1.702f * g * (1.0f - s));
    *dup = up > 7.0f || up < -7.0f ? 0 : d * g * s;
}

static __global__ void activate_grad_kernel(float *dgate, float *dup, const float *dy,
                                            const float *gate, const float *up, int kind,
                                            size_t count)
{
    FOR_ELEMENTS(i, count)
    {
        if (kind == GPU_CLAMPED) {
            clamped_grad(&dgate[i], &dup[i], dy[i], gate[i], up[i]);
            continue;
        }
        float slope;
        const float d = dy[i], u = up ? up[i] : 1.0f, y = activated(&slope, gate[i], kind);
        dgate[i] = d * u * slope;
        if (up)
            dup[i] = d * y;
    }
}

/* ---- attention ------------------------------------------------------------------------------ */

static __global__ void grad_pointers_kernel(float **to, struct gpu_grad_heads a)
{
    FOR_ELEMENTS(i, a.parts)
    {
        const size_t key = i / a.heads * a.key_step + i % a.heads * a.dim;
        const size_t query = i * a.rows * a.group * a.dim, cell = i * a.rows * a.group * a.keys;
        to[GPU_GRAD_Q * a.parts + i] = a.q + query;
        to[GPU_GRAD_K * a.parts + i] = (float *)a.k + key;
        to[GPU_GRAD_V * a.parts + i] = (float *)a.v + key;
        to[GPU_GRAD_DY * a.parts + i] = a.dy + query;
        to[GPU_GRAD_DQ * a.parts + i] = a.dq + query;
        to[GPU_GRAD_DK * a.parts + i] = a.dk + key;
        to[GPU_GRAD_DV * a.parts + i] = a.dv + key;
        to[GPU_GRAD_P * a.parts + i] = a.p + cell;
        to[GPU_GRAD_DS * a.parts + i] = a.ds + cell;
    }
}

template <bool BACK>
static __global__ void stack_kernel(float *to, const float *from, struct gpu_grad_heads a,
                                    size_t width)
{
    const size_t line = a.group * a.dim;
    FOR_ELEMENTS(e, a.parts * a.rows * line)
    {
        const size_t row = e / line % a.rows, part = e / line / a.rows;
        const size_t x = part / a.heads * a.query_step + row * width + part % a.heads * line;
        if (BACK)
            to[x + e % line] = from[e];
        else
            to[e] = from[x + e % line];
    }
}

static __device__ __forceinline__ double warp_sum(double x)
{
    for (int mask = 16; mask; mask /= 2)
        x += __shfl_xor_sync(~0u, x, mask);
    return x;
}

/* One warp per row: the softmax of math.cu, and its gradient. */
static __global__ void softmax_grad_kernel(struct gpu_grad_heads a, size_t r0, size_t lo,
                                           size_t window, float softcap, const float *sinks)
{
    const size_t at = blockIdx.x * (size_t)WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    const size_t row = at / a.group % a.rows, part = at / a.group / a.rows;
    if (part >= a.parts)
        return;
    float *s = a.p + at * a.keys, *d = a.ds + at * a.keys;
    const float sink = sinks ? sinks[part % a.heads * a.group + at % a.group] : -INFINITY;
    const size_t i = r0 + row, first = window && i >= window ? i - window + 1 : 0;
    const size_t from = first > lo ? first - lo : 0, end = i - lo + 1;
    float top = -INFINITY;
    double sum = 0, dot = 0;
    for (size_t j = from + lane; j < end; j += 32)
        top = fmaxf(top, capped(s[j], softcap));
    for (int mask = 16; mask; mask /= 2)
        top = fmaxf(top, __shfl_xor_sync(~0u, top, mask));
    for (size_t j = from + lane; j < end; j += 32) {
        const float e = expf(capped(s[j], softcap) - top);
        sum += (double)e;
        dot += (double)e * (double)d[j];
    }
    sum = warp_sum(sum) + exp((double)sink - (double)top);
    const float factor = (float)(1 / sum), mean = (float)(warp_sum(dot) / sum);
    for (size_t j = lane; j < a.keys; j += 32) {
        float probability = 0, change = 0;
        if (j >= from && j < end) {
            const float c = capped(s[j], softcap), t = softcap > 0 ? c / softcap : 0;
            probability = expf(c - top) * factor;
            change = probability * (d[j] - mean) * (1.0f - t * t);
        }
        s[j] = probability;
        d[j] = change;
    }
}

/* ---- losses --------------------------------------------------------------------------------- */

/* One thread block per row: see loss_row in kernels/cpu/grad.c. */
static __global__ void loss_grad_kernel(double *losses, float *dlogits, const float *logits,
                                        const float *ref, const uint32_t *targets, float softcap,
                                        float weight, size_t vocab)
{
    const float *a = logits + blockIdx.x * vocab, *b = ref ? ref + blockIdx.x * vocab : NULL;
    float *d = dlogits + blockIdx.x * vocab;
    const uint32_t target = b ? 0 : targets[blockIdx.x];
    if (target == GPU_NO_TARGET) {
        for (size_t i = threadIdx.x; i < vocab; i += THREADS)
            d[i] = 0;
        if (threadIdx.x == 0)
            losses[blockIdx.x] = 0;
        return;
    }
    const row_stats sa = stats_of(a, softcap, vocab), sb = b ? stats_of(b, softcap, vocab) : sa;
    double loss = sa.lse - (double)capped(a[target], softcap), cross = 0;
    for (size_t i = threadIdx.x; b && i < vocab; i += THREADS) {
        const float bi = capped(b[i], softcap);
        cross += exp((double)bi - sb.lse) * ((double)bi - (double)capped(a[i], softcap));
    }
    cross = block_join(cross); /* a[target] has been read */
    if (b) {
        const double kld = cross - (sb.lse - sa.lse);
        loss = kld < 0 ? 0 : kld; /* NaN stays NaN */
    }
    if (threadIdx.x == 0)
        losses[blockIdx.x] = loss;
    const float fa = (float)((double)weight * exp((double)sa.top.value - sa.lse));
    const float fb = (float)((double)weight * exp((double)sb.top.value - sb.lse));
    for (size_t i = threadIdx.x; i < vocab; i += THREADS) {
        const float ai = capped(a[i], softcap), t = softcap > 0 ? ai / softcap : 0;
        float g = expf(ai - sa.top.value) * fa;
        if (b)
            g -= expf(capped(b[i], softcap) - sb.top.value) * fb;
        else if (i == target)
            g -= weight;
        d[i] = g * (1.0f - t * t);
    }
}

/* A thread block takes a run of GPU_SQUARE_RUN elements. */
static __global__ void square_grad_kernel(double *sums, float *grad, const float *y,
                                          const float *target, float factor, size_t count)
{
    const size_t from = blockIdx.x * (size_t)GPU_SQUARE_RUN;
    const size_t end = min(from + GPU_SQUARE_RUN, count);
    double sum = 0;
    for (size_t i = from + threadIdx.x; i < end; i += THREADS) {
        const float e = y[i] - target[i];
        sum += (double)e * (double)e;
        grad[i] = factor * e;
    }
    sum = block_join(sum);
    if (threadIdx.x == 0)
        sums[blockIdx.x] = sum;
}

/* ---- coded matrices ------------------------------------------------------------------------- */

/* STEP columns, which have the same scale, at a time. */
template <int STEP> static __global__ void decode_kernel(float *w, struct gpu_coded a)
{
    __shared__ float value[THREADS];
    const size_t groups = (a.k + a.group - 1) / a.group;
    value[threadIdx.x] = a.value[threadIdx.x];
    __syncthreads();
    for (size_t row = blockIdx.x; row < a.n; row += gridDim.x)
        for (unsigned c = STEP * threadIdx.x; c < a.k; c += STEP * THREADS) {
            const size_t at = row * groups + c / (unsigned)a.group;
            const float scale = a.scale[at], zero = a.zero ? (float)a.zero[at] : 0;
            const uint8_t *code = a.code + row * a.k + c;
            float *to = w + row * a.k + c;
            if (STEP == 4) {
                const uchar4 q = *(const uchar4 *)code;
                *(float4 *)to = {scale * (value[q.x] - zero), scale * (value[q.y] - zero),
                                 scale * (value[q.z] - zero), scale * (value[q.w] - zero)};
            } else
                *to = scale * (value[*code] - zero);
        }
}

/* A warp sums a group. */
static __global__ void decode_grad_kernel(float *dscale, struct gpu_coded a, const float *dw)
{
    __shared__ float value[THREADS];
    const size_t groups = (a.k + a.group - 1) / a.group;
    value[threadIdx.x] = a.value[threadIdx.x];
    __syncthreads();
    for (size_t at = blockIdx.x * (size_t)WARPS + threadIdx.x / 32; at < a.n * groups;
         at += gridDim.x * (size_t)WARPS) {
        const size_t from = at % groups * a.group, end = min(from + a.group, a.k);
        const uint8_t *code = a.code + at / groups * a.k;
        const float *d = dw + at / groups * a.k;
        const float zero = a.zero ? (float)a.zero[at] : 0;
        double sum = 0;
        for (size_t i = from + threadIdx.x % 32; i < end; i += 32)
            sum += (double)(d[i] * (value[code[i]] - zero));
        for (int mask = 16; mask; mask /= 2)
            sum += __shfl_xor_sync(~0u, sum, mask);
        if (threadIdx.x % 32 == 0)
            dscale[at] += (float)sum;
    }
}

/* Each operation is rounded, as on the CPU. */
static __global__ void tune_kernel(struct gpu_tuned t, struct gpu_adam a)
{
    FOR_ELEMENTS(i, t.count)
    {
        const float start = t.start[i], unit = t.unit[i];
        const double g = (double)ldexpf(t.grad[i], t.exp2) * (double)unit;
        const double m = __dadd_rn(a.beta1 * (double)t.m[i], (1 - a.beta1) * g);
        const double v = __dadd_rn(a.beta2 * (double)t.v[i], (1 - a.beta2) * g * g);
        const float step = (float)(a.lr * (m / a.fix1) / (sqrt(v / a.fix2) + a.eps));
        const float delta = t.delta[i] - step;
        const float value = __fadd_rn(start, __fmul_rn(unit, delta));
        const float size = fminf(fmaxf(start < 0 ? -value : value, 0x1p-24f), 65504);
        const float stored = copysignf(__half2float(__float2half_rn(size)), start);
        t.m[i] = (float)m;
        t.v[i] = (float)v;
        t.delta[i] = delta;
        t.scale[i] = start == 0 ? 0 : isfinite(delta) ? ldexpf(stored, t.exp2) : nanf("");
    }
}

/* ---- functions ------------------------------------------------------------------------------ */

int gpu_grad_norm_rows(struct gpu_norm_row *rows, const float *dy, const float *x, const float *w,
                       enum gpu_norm kind, float eps, size_t m, size_t n, void *stream)
{
    return LAUNCH(norm_rows_kernel, (unsigned)m, THREADS, stream, rows, dy, x, w, (int)kind, eps,
                  n);
}

int gpu_grad_norm_weights(float *dw, double *runs, const struct gpu_norm_row *rows, const float *dy,
                          const float *x, size_t m, size_t n, void *stream)
{
    const size_t count = (m + GPU_NORM_RUN - 1) / GPU_NORM_RUN;
    const dim3 grid((unsigned)((n + COLUMNS - 1) / COLUMNS), (unsigned)count);
    const int rc =
        LAUNCH(norm_runs_kernel, grid, COLUMNS * SLICES, stream, runs, rows, dy, x, m, n);
    return rc ? rc
              : LAUNCH(norm_weights_kernel, blocks_for(n), THREADS, stream, dw, runs, count, n);
}

int gpu_grad_norm_inputs(float *dx, const struct gpu_norm_row *rows, const float *dy,
                         const float *x, const float *w, size_t m, size_t n, void *stream)
{
    return LAUNCH(norm_inputs_kernel, blocks_for(m * n), THREADS, stream, dx, rows, dy, x, w, m * n,
                  n);
}

int gpu_grad_activate(float *dgate, float *dup, const float *dy, const float *gate, const float *up,
                      enum gpu_act kind, size_t count, void *stream)
{
    return LAUNCH(activate_grad_kernel, blocks_for(count), THREADS, stream, dgate, dup, dy, gate,
                  up, (int)kind, count);
}

int gpu_grad_pointers(void *pointers, const struct gpu_grad_heads *a, void *stream)
{
    return LAUNCH(grad_pointers_kernel, blocks_for(a->parts), THREADS, stream, (float **)pointers,
                  *a);
}

int gpu_grad_stack(float *stacked, const float *x, const struct gpu_grad_heads *a, size_t width,
                   void *stream)
{
    return LAUNCH(stack_kernel<false>, blocks_for(a->parts * a->rows * a->group * a->dim), THREADS,
                  stream, stacked, x, *a, width);
}

int gpu_grad_unstack(float *x, const float *stacked, const struct gpu_grad_heads *a, size_t width,
                     void *stream)
{
    return LAUNCH(stack_kernel<true>, blocks_for(a->parts * a->rows * a->group * a->dim), THREADS,
                  stream, x, stacked, *a, width);
}

int gpu_grad_softmax(const struct gpu_grad_heads *a, size_t r0, size_t lo, size_t window,
                     float softcap, const float *sinks, void *stream)
{
    const size_t rows = a->parts * a->rows * a->group;
    return LAUNCH(softmax_grad_kernel, (unsigned)((rows + WARPS - 1) / WARPS), THREADS, stream, *a,
                  r0, lo, window, softcap, sinks);
}

int gpu_grad_loss(double *losses, float *dlogits, const float *logits, const float *ref,
                  const uint32_t *targets, float softcap, float weight, size_t m, size_t vocab,
                  void *stream)
{
    return LAUNCH(loss_grad_kernel, (unsigned)m, THREADS, stream, losses, dlogits, logits, ref,
                  targets, softcap, weight, vocab);
}

int gpu_grad_square(double *sums, float *grad, const float *y, const float *target, float factor,
                    size_t count, void *stream)
{
    return LAUNCH(square_grad_kernel, (unsigned)((count + GPU_SQUARE_RUN - 1) / GPU_SQUARE_RUN),
                  THREADS, stream, sums, grad, y, target, factor, count);
}

/* Enough thread blocks to fill a GPU; more would read the table of values more often. */
enum { MOST_BLOCKS = 4096 };

int gpu_grad_decode(float *w, const struct gpu_coded *a, void *stream)
{
    const unsigned blocks = (unsigned)min(a->n, (size_t)MOST_BLOCKS);
    return a->k % 4 == 0 && a->group % 4 == 0 && (uintptr_t)w % 16 == 0
               ? LAUNCH(decode_kernel<4>, blocks, THREADS, stream, w, *a)
               : LAUNCH(decode_kernel<1>, blocks, THREADS, stream, w, *a);
}

int gpu_grad_scales(float *dscale, const struct gpu_coded *a, const float *dw, void *stream)
{
    const size_t groups = a->n * ((a->k + a->group - 1) / a->group);
    return LAUNCH(decode_grad_kernel,
                  (unsigned)min((groups + WARPS - 1) / WARPS, (size_t)MOST_BLOCKS), THREADS, stream,
                  dscale, *a, dw);
}

int gpu_grad_tune(const struct gpu_tuned *t, const struct gpu_adam *a, void *stream)
{
    return LAUNCH(tune_kernel, blocks_for(t->count), THREADS, stream, *t, *a);
}
