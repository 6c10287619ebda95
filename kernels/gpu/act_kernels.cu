/*
 * Simulated quantization of activations (base/act.h), bit for bit as pack/activations/act.c. A warp
 * has a channel block, a lane of it the channels lane + 32 i. Products that the host rounds
 * are not contracted with sums.
 */
#include "kernels/gpu/block.cuh"
#include "kernels/gpu/internal.h"

enum { BLOCK = 128, PER_LANE = BLOCK / 32 };

struct channel_block {
    float v[PER_LANE];
};

/* NaN if either is NaN. */
static __device__ __forceinline__ float larger_of(float a, float b)
{
    return isnan(a) || b <= a ? a : b;
}

static __device__ __forceinline__ float absmax(const channel_block &x)
{
    float top = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
        top = larger_of(top, fabsf(x.v[i]));
    for (int mask = 16; mask; mask /= 2)
        top = larger_of(top, __shfl_xor_sync(~0u, top, mask));
    return top;
}

/* 1 / sqrt(size) for a power of two, rounded to FP32. */
static __device__ __forceinline__ float piece_norm(int size)
{
    const int log2 = 31 - __clz(size);
    return __uint_as_float((uint32_t)(127 - log2 / 2) << 23) * (log2 % 2 ? 0x1.6a09e6p-1f : 1);
}

/* Hadamard matrices of the pieces of a channel block (pack/activations/rotate.c). The piece of
 * channel p has 2^i channels, where i is the highest bit in which p and `channels` differ. */
static __device__ __forceinline__ void rotate(channel_block &x, int channels)
{
    const int lane = (int)threadIdx.x % 32;
    int piece[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
        piece[i] = 1 << (31 - __clz(((32 * i + lane) ^ channels) | 1)); /* `| 1`: beyond the last */
#pragma unroll
    for (int d = BLOCK / 2; d; d /= 2) {
        float other[PER_LANE];
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            other[i] = d >= 32 ? x.v[i ^ (d / 32)] : __shfl_xor_sync(~0u, x.v[i], d);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const bool second = (32 * i + lane) & d;
            if (piece[i] > d)
                x.v[i] = second ? __fsub_rn(other[i], x.v[i]) : __fadd_rn(x.v[i], other[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
        x.v[i] = __fmul_rn(x.v[i], piece_norm(piece[i]));
}

/* Channel block at channel `at` of the token x[k], in packed order, scale and rotation; zeros
 * beyond k. */
static __device__ __forceinline__ channel_block load(const gpu_input &a, const float *x, size_t at)
{
    channel_block out;
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const size_t p = at + 32 * i + lane;
        out.v[i] = p < a.k ? __fmul_rn(x[a.order[p]], a.factor[p]) : 0;
    }
    if (a.rotate)
        rotate(out, (int)min(a.k - at, (size_t)BLOCK));
    return out;
}

/* How a channel block is rounded. */
struct rounding {
    bool narrow; /* 4 bits */
    float clip, clip_by_7;
};

static __device__ __forceinline__ float scale_of(int scales, const rounding &how, float top,
                                                 float token_top)
{
    enum { SCALES_BLOCK, SCALES_INT, SCALES_ROW };
    const float unit = __fmul_rn(token_top, (float)(1.0 / 127));
    if (scales == SCALES_BLOCK)
        return __fmul_rn(top, how.narrow ? how.clip_by_7 : (float)(1.0 / 127));
    if (scales == SCALES_ROW || !how.narrow || unit == 0)
        return unit;
    const float multiple = rintf(__fdiv_rn(__fmul_rn(top, how.clip), __fmul_rn(7, unit)));
    return __fmul_rn(unit, fminf(fmaxf(multiple, 1), 18));
}

/* The product in double is exact; adding 1.5 * 2^52 rounds to an integer, ties to even. */
static __device__ __forceinline__ float round_to(float x, float s, float inverse, float limit)
{
    double q = (double)x * inverse;
    q = q < -limit ? -limit : q > limit ? limit : q;
    return __fmul_rn(s, (float)((q + 0x1.8p52) - 0x1.8p52));
}

static __device__ __forceinline__ channel_block rounded(const channel_block &x, float s,
                                                        bool narrow)
{
    const bool zero = s < 0x1p-120f;
    const float inverse = zero ? 0 : __fdiv_rn(1, s);
    channel_block out;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
        out.v[i] = zero ? 0 : round_to(x.v[i], s, inverse, narrow ? 7 : 127);
    return out;
}

/* Copies the row from[k] to shared memory: gathering and scattering its channels would be many
 * small accesses to global memory. */
static __device__ __forceinline__ void load_row(float *row, const float *from, size_t k)
{
    for (size_t i = threadIdx.x; i < k; i += THREADS)
        row[i] = from[i];
    __syncthreads();
}

/* The largest of the warps' values. */
static __device__ __forceinline__ float top_of_warps(float top)
{
    __shared__ float tops[WARPS];
    tops[threadIdx.x / 32] = top;
    __syncthreads();
    for (int i = 0; i < WARPS; i++)
        top = larger_of(top, tops[i]);
    return top;
}

/* A thread block per token. STAGED: the token fits shared memory, where its channels are rounded in
 * place. */
template <bool STAGED>
static __global__ void __launch_bounds__(THREADS) round_inputs_kernel(gpu_input a)
{
    extern __shared__ float row[];
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const float *from = a.x + blockIdx.x * a.k, *x = STAGED ? row : from;
    float *to = a.y + blockIdx.x * a.k, *y = STAGED ? row : to, token_top = 0;
    uint32_t most = 0;
    if (STAGED)
        load_row(row, from, a.k);
    if (a.scales) { /* scales of blocks do not need it */
        for (size_t at = warp * BLOCK; at < a.k; at += WARPS * BLOCK)
            token_top = larger_of(token_top, absmax(load(a, x, at)));
        token_top = top_of_warps(token_top);
    }
    for (size_t at = warp * BLOCK; at < a.k; at += WARPS * BLOCK) {
        channel_block v = load(a, x, at);
        const rounding how = {a.bits[at / BLOCK] == 4, a.clip, a.clip_by_7};
        v = rounded(v, scale_of(a.scales, how, absmax(v), token_top), how.narrow);
        if (a.rotate)
            rotate(v, (int)min(a.k - at, (size_t)BLOCK));
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const size_t p = at + 32 * i + lane;
            if (p < a.k) {
                const float out = __fdiv_rn(v.v[i], a.factor[p]);
                y[a.order[p]] = out;
                most = larger(most, out);
            }
        }
    }
    note_largest(a.largest, most);
    __syncthreads();
    for (size_t i = threadIdx.x; STAGED && i < a.k; i += THREADS)
        to[i] = row[i];
}

template <bool STAGED>
static __global__ void __launch_bounds__(THREADS) arrange_inputs_kernel(gpu_input a)
{
    extern __shared__ float row[];
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const float *from = a.x + blockIdx.x * a.k;
    uint32_t most = 0;
    if (STAGED)
        load_row(row, from, a.k);
    for (size_t at = warp * BLOCK; at < a.k; at += WARPS * BLOCK) {
        const channel_block v = load(a, STAGED ? row : from, at);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const size_t p = at + 32 * i + lane;
            if (p < a.k)
                a.y[blockIdx.x * a.k + p] = v.v[i];
            most = larger(most, v.v[i]);
        }
    }
    note_largest(a.largest, most);
}

/* Absmax of the token, which scales of blocks do not need. */
static __device__ __forceinline__ float top_of(const gpu_input &a, const float *x)
{
    float top = 0;
    for (size_t at = 0; a.scales && at < a.k; at += BLOCK)
        top = larger_of(top, absmax(load(a, x, at)));
    return top;
}

/* e g e^T: this lane's terms. */
static __device__ __forceinline__ float form(const channel_block &e, const float *g)
{
    const int lane = (int)threadIdx.x % 32;
    float y[PER_LANE] = {}, sum = 0;
#pragma unroll
    for (int r = 0; r < PER_LANE; r++)
#pragma unroll 8
        for (int l = 0; l < 32; l++) {
            const float *row = g + (32 * r + l) * BLOCK + lane;
            const float v = __shfl_sync(~0u, e.v[r], l);
#pragma unroll
            for (int i = 0; i < PER_LANE; i++)
                y[i] += v * row[32 * i];
        }
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
        sum += y[i] * e.v[i];
    return sum;
}

/* e e^T: this lane's terms. */
static __device__ __forceinline__ float square(const channel_block &e)
{
    float sum = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
        sum += e.v[i] * e.v[i];
    return sum;
}

/* A thread block has GPU_ERROR_TOKENS tokens of a channel block. */
static __global__ void __launch_bounds__(THREADS) input_errors_kernel(struct gpu_input_errors a)
{
    extern __shared__ float g[]; /* [BLOCK][BLOCK] */
    __shared__ double part[2][WARPS][GPU_ROUNDINGS]; /* of d, of squares */
    const size_t block = blockIdx.y, at = block * BLOCK, first = blockIdx.x * GPU_ERROR_TOKENS;
    const size_t end = min(first + GPU_ERROR_TOKENS, a.in.m);
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    double sum[2][GPU_ROUNDINGS] = {};
    for (int i = (int)threadIdx.x; i < BLOCK * BLOCK; i += THREADS)
        g[i] = a.g[block * BLOCK * BLOCK + i];
    __syncthreads();
    for (size_t token = first + warp; token < end; token += WARPS) {
        const float *x = a.in.x + token * a.in.k;
        const float token_top = top_of(a.in, x);
        const channel_block v = load(a.in, x, at);
        const float top = absmax(v);
#pragma unroll
        for (int i = 0; i < GPU_ROUNDINGS; i++) {
            if (i >= a.count)
                break;
            const rounding how = {a.how[i].narrow, a.how[i].clip, a.how[i].clip_by_7};
            channel_block e = rounded(v, scale_of(a.in.scales, how, top, token_top), how.narrow);
#pragma unroll
            for (int j = 0; j < PER_LANE; j++)
                e.v[j] -= v.v[j];
            sum[0][i] += (double)form(e, g);
            sum[1][i] += (double)square(e);
        }
    }
#pragma unroll
    for (int i = 0; i < 2 * GPU_ROUNDINGS; i++) {
        double &lanes = sum[i / GPU_ROUNDINGS][i % GPU_ROUNDINGS];
        for (int mask = 16; mask; mask /= 2)
            lanes += __shfl_xor_sync(~0u, lanes, mask);
        if (lane == 0)
            part[i / GPU_ROUNDINGS][warp][i % GPU_ROUNDINGS] = lanes;
    }
    __syncthreads();
    if ((int)threadIdx.x >= 2 * a.count)
        return;
    const int of = (int)threadIdx.x / a.count, i = (int)threadIdx.x % a.count;
    double all = 0;
    for (int w = 0; w < WARPS; w++)
        all += part[of][w][i];
    a.part[(threadIdx.x * gridDim.y + block) * gridDim.x + blockIdx.x] = all;
}

/* Launches `staged` if a token fits shared memory, else `direct`. */
static int launch_tokens(const struct gpu_input *a, void (*staged)(struct gpu_input),
                         void (*direct)(struct gpu_input), cudaStream_t stream)
{
    enum { MOST = 160 << 10 }; /* less on some GPUs */
    const size_t bytes = a->k * sizeof(float);
    if (bytes <= MOST && cudaFuncSetAttribute(staged, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              (int)bytes) == cudaSuccess) {
        staged<<<(unsigned)a->m, THREADS, bytes, stream>>>(*a);
        return cudaGetLastError();
    }
    cudaGetLastError(); /* that of the attribute */
    direct<<<(unsigned)a->m, THREADS, 0, stream>>>(*a);
    return cudaGetLastError();
}

int gpu_round_inputs(const struct gpu_input *a, void *stream)
{
    return launch_tokens(a, round_inputs_kernel<true>, round_inputs_kernel<false>,
                         (cudaStream_t)stream);
}

int gpu_arrange_inputs(const struct gpu_input *a, void *stream)
{
    return launch_tokens(a, arrange_inputs_kernel<true>, arrange_inputs_kernel<false>,
                         (cudaStream_t)stream);
}

int gpu_input_errors(const struct gpu_input_errors *a, void *stream)
{
    const int bytes = BLOCK * BLOCK * (int)sizeof(float);
    const dim3 grid((unsigned)((a->in.m + GPU_ERROR_TOKENS - 1) / GPU_ERROR_TOKENS),
                    (unsigned)((a->in.k + BLOCK - 1) / BLOCK));
    const cudaError_t e = cudaFuncSetAttribute(input_errors_kernel,
                                               cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (e != cudaSuccess)
        return e;
    input_errors_kernel<<<grid, THREADS, bytes, (cudaStream_t)stream>>>(*a);
    return cudaGetLastError();
}
