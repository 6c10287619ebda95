/*
 * Simulated quantization of activations (base/act.h), bit for bit as pack/activations/act.c. A warp
 * has a channel block, a lane of it the channels lane + 32 i. Products that the host rounds
 * are not contracted with sums.
 */
#include "kernels/gpu/block.cuh"
#include "kernels/gpu/internal.h"

enum { BLOCK = 128, PER_LANE = BLOCK / 32, MOST_THREADS = 512, MOST_WARPS = MOST_THREADS / 32 };

struct channel_block {
    float v[PER_LANE];
};

/* NaN if either is NaN. */
static __device__ __forceinline__ float larger_of(float a, float b)
{
    return isnan(a) || b <= a ? a : b;
}

/* Largest magnitude; NaN if there is one, because its bits are above those of all numbers. */
static __device__ __forceinline__ float absmax(const channel_block &x)
{
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
        top = larger(top, x.v[i]);
    return __uint_as_float(__reduce_max_sync(~0u, top));
}

/* 1 / sqrt(size) for a power of two, rounded to FP32. */
static __device__ __forceinline__ float piece_norm(int size)
{
    const int log2 = 31 - __clz(size);
    return __uint_as_float((uint32_t)(127 - log2 / 2) << 23) * (log2 % 2 ? 0x1.6a09e6p-1f : 1);
}

/* Hadamard matrices of the pieces of a channel block (pack/activations/rotate.c). The piece of
 * channel p has 2^i channels, where i is the highest bit in which p and `channels` differ. */
static __device__ __noinline__ channel_block rotated_pieces(channel_block x, int channels)
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
    return x;
}

/* The same for a whole channel block, which is one piece. */
static __device__ __forceinline__ void rotate_whole(channel_block &x)
{
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int d = PER_LANE / 2; d; d /= 2)
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (!(i & d)) {
                const float a = x.v[i], b = x.v[i + d];
                x.v[i] = __fadd_rn(a, b);
                x.v[i + d] = __fsub_rn(a, b);
            }
#pragma unroll
    for (uint32_t d = 16; d; d /= 2) {
        const uint32_t sign = lane & d ? 1u << 31 : 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            x.v[i] = __fadd_rn(__shfl_xor_sync(~0u, x.v[i], d),
                               __uint_as_float(__float_as_uint(x.v[i]) ^ sign));
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
        x.v[i] = __fmul_rn(x.v[i], piece_norm(BLOCK));
}

static __device__ __forceinline__ void rotate(channel_block &x, int channels)
{
    if (channels == BLOCK)
        rotate_whole(x);
    else
        x = rotated_pieces(x, channels);
}

/* Where the channels of a lane in the channel block at channel `at` come from, and by what they are
 * multiplied; beyond k: by 0. */
struct places {
    uint32_t order[PER_LANE];
    float factor[PER_LANE];
    int channels; /* of the channel block */
};

static __device__ __forceinline__ places places_of(const gpu_input &a, size_t at)
{
    places out;
    const int lane = (int)threadIdx.x % 32;
    out.channels = (int)min(a.k - at, (size_t)BLOCK);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const size_t p = at + 32 * i + lane;
        out.order[i] = p < a.k ? a.order[p] : 0;
        out.factor[i] = p < a.k ? a.factor[p] : 0;
    }
    return out;
}

/* A channel block of the token x[k], in packed order, scale and rotation; zeros beyond k. */
static __device__ __forceinline__ channel_block load(const places &from, const float *x,
                                                     bool rotates)
{
    channel_block out;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
        out.v[i] = from.factor[i] ? __fmul_rn(x[from.order[i]], from.factor[i]) : 0;
    if (rotates)
        rotate(out, from.channels);
    return out;
}

/* 1 / x for a power of two. */
static __device__ __forceinline__ float inverse_power(float x)
{
    return __uint_as_float((254u << 23) - __float_as_uint(x));
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

/* s times the integer nearest to the exact product of x and inverse, ties to even: adding
 * 1.5 * 2^23 rounds to an integer, and if the rounded product is a tie, the rest that rounding took
 * away decides. */
static __device__ __forceinline__ float round_to(float x, float s, float inverse, float limit)
{
    const float product = __fmul_rn(x, inverse), rest = __fmaf_rn(x, inverse, -product);
    const float q = product < -limit ? -limit : product > limit ? limit : product;
    float n = __fsub_rn(__fadd_rn(q, 0x1.8p23f), 0x1.8p23f);
    if (fabsf(__fsub_rn(q, n)) == 0.5f && rest != 0)
        n = __fadd_rn(q, copysignf(0.5f, rest));
    return __fmul_rn(s, n);
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

/*
 * A thread block has up to T tokens. Each warp takes channel blocks, for all tokens one after the
 * other: the places of the channels are read once. STAGED: the tokens are in shared memory, because
 * gathering and scattering channels would be many small accesses to global memory; they are rounded
 * there in place.
 */
template <int T> struct tokens {
    const float *from; /* [count][k] */
    float *to;
    int count;
};

template <int T> static __device__ __forceinline__ tokens<T> tokens_of(const gpu_input &a)
{
    const size_t first = blockIdx.x * (size_t)T;
    return {a.x + first * a.k, a.y + first * a.k, (int)min((size_t)T, a.m - first)};
}

static __device__ __forceinline__ void copy_floats(float *to, const float *from, size_t count)
{
    if (((size_t)to | (size_t)from | count * sizeof *to) % sizeof(float4) == 0) {
        for (size_t i = threadIdx.x; i < count / 4; i += blockDim.x)
            ((float4 *)to)[i] = ((const float4 *)from)[i];
        return;
    }
    for (size_t i = threadIdx.x; i < count; i += blockDim.x)
        to[i] = from[i];
}

/* *top (shared memory) = absmax of each token. */
template <int T>
static __device__ __forceinline__ void find_tops(float *top, const gpu_input &a, const float *x,
                                                 int count)
{
    __shared__ float tops[T][MOST_WARPS];
    const int warp = (int)threadIdx.x / 32, warps = (int)blockDim.x / 32;
    float own[T] = {};
    for (size_t at = warp * BLOCK; at < a.k; at += warps * BLOCK) {
        const places from = places_of(a, at);
#pragma unroll
        for (int t = 0; t < T; t++)
            if (t < count)
                own[t] = larger_of(own[t], absmax(load(from, x + t * a.k, a.rotate)));
    }
#pragma unroll
    for (int t = 0; t < T; t++)
        tops[t][warp] = own[t];
    __syncthreads();
    if (threadIdx.x < T) {
        float all = 0;
        for (int i = 0; i < warps; i++)
            all = larger_of(all, tops[threadIdx.x][i]);
        top[threadIdx.x] = all;
    }
    __syncthreads();
}

template <int T, bool STAGED>
static __global__ void __launch_bounds__(MOST_THREADS) round_inputs_kernel(gpu_input a)
{
    extern __shared__ __align__(16) float rows[];
    __shared__ float token_top[T];
    const int warp = (int)threadIdx.x / 32, warps = (int)blockDim.x / 32;
    const tokens<T> here = tokens_of<T>(a);
    const float *x = STAGED ? rows : here.from;
    float *y = STAGED ? rows : here.to;
    uint32_t most = 0;
    if (STAGED) {
        copy_floats(rows, here.from, here.count * a.k);
        __syncthreads();
    }
    if (a.scales) /* scales of blocks do not need it */
        find_tops<T>(token_top, a, x, here.count);
    for (size_t at = warp * BLOCK; at < a.k; at += warps * BLOCK) {
        const places from = places_of(a, at);
        const rounding how = {a.bits[at / BLOCK] == 4, a.clip, a.clip_by_7};
        for (int t = 0; t < here.count; t++) {
            channel_block v = load(from, x + t * a.k, a.rotate);
            const float top = a.scales ? token_top[t] : 0;
            v = rounded(v, scale_of(a.scales, how, absmax(v), top), how.narrow);
            if (a.rotate)
                rotate(v, from.channels);
#pragma unroll
            for (int i = 0; i < PER_LANE; i++)
                if (from.factor[i]) {
                    const float out = __fmul_rn(v.v[i], inverse_power(from.factor[i]));
                    y[t * a.k + from.order[i]] = out;
                    most = larger(most, out);
                }
        }
    }
    note_largest(a.largest, most);
    if (STAGED) {
        __syncthreads();
        copy_floats(here.to, rows, here.count * a.k);
    }
}

template <int T, bool STAGED>
static __global__ void __launch_bounds__(MOST_THREADS) arrange_inputs_kernel(gpu_input a)
{
    extern __shared__ __align__(16) float rows[];
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32,
              warps = (int)blockDim.x / 32;
    const tokens<T> here = tokens_of<T>(a);
    const float *x = STAGED ? rows : here.from;
    uint32_t most = 0;
    if (STAGED) {
        copy_floats(rows, here.from, here.count * a.k);
        __syncthreads();
    }
    for (size_t at = warp * BLOCK; at < a.k; at += warps * BLOCK) {
        const places from = places_of(a, at);
        for (int t = 0; t < here.count; t++) {
            const channel_block v = load(from, x + t * a.k, a.rotate);
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) {
                const size_t p = at + 32 * i + lane;
                if (p < a.k)
                    here.to[t * a.k + p] = v.v[i];
                most = larger(most, v.v[i]);
            }
        }
    }
    note_largest(a.largest, most);
}

/* Absmax of the token, which scales of blocks do not need. */
static __device__ __forceinline__ float top_of(const gpu_input &a, const float *x)
{
    float top = 0;
    for (size_t at = 0; a.scales && at < a.k; at += BLOCK)
        top = larger_of(top, absmax(load(places_of(a, at), x, a.rotate)));
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
    extern __shared__ float g[];                     /* [BLOCK][BLOCK] */
    __shared__ double part[2][WARPS][GPU_ROUNDINGS]; /* of d, of squares */
    const size_t block = blockIdx.y, at = block * BLOCK, first = blockIdx.x * GPU_ERROR_TOKENS;
    const size_t end = min(first + GPU_ERROR_TOKENS, a.in.m);
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    double sum[2][GPU_ROUNDINGS] = {};
    for (int i = (int)threadIdx.x; i < BLOCK * BLOCK; i += THREADS)
        g[i] = a.g[block * BLOCK * BLOCK + i];
    const places from = places_of(a.in, at);
    __syncthreads();
    for (size_t token = first + warp; token < end; token += WARPS) {
        const float *x = a.in.x + token * a.in.k;
        const float token_top = top_of(a.in, x);
        const channel_block v = load(from, x, a.in.rotate);
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

typedef void inputs_kernel(struct gpu_input a);

/* Kernels for one token and for two tokens in shared memory, and for one in global memory. */
struct inputs_kernels {
    inputs_kernel *one, *two, *direct;
};

/* Two tokens if they leave room for more thread blocks; more warps for long tokens. */
static int launch_tokens(const struct gpu_input *a, struct inputs_kernels kernels,
                         cudaStream_t stream)
{
    enum { MOST = 160 << 10, MOST_OF_TWO = 48 << 10 }; /* MOST: less on some GPUs */
    const size_t token = a->k * sizeof(float);
    const bool two = 2 * token <= MOST_OF_TWO;
    const size_t bytes = two ? 2 * token : token, blocks = two ? (a->m + 1) / 2 : a->m;
    inputs_kernel *const staged = two ? kernels.two : kernels.one;
    const unsigned threads = token > MOST_OF_TWO ? (unsigned)MOST_THREADS : (unsigned)THREADS;
    if (bytes <= MOST && cudaFuncSetAttribute(staged, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              (int)bytes) == cudaSuccess) {
        staged<<<(unsigned)blocks, threads, bytes, stream>>>(*a);
        return cudaGetLastError();
    }
    cudaGetLastError(); /* that of the attribute */
    kernels.direct<<<(unsigned)a->m, THREADS, 0, stream>>>(*a);
    return cudaGetLastError();
}

int gpu_round_inputs(const struct gpu_input *a, void *stream)
{
    return launch_tokens(
        a,
        {round_inputs_kernel<1, true>, round_inputs_kernel<2, true>, round_inputs_kernel<1, false>},
        (cudaStream_t)stream);
}

int gpu_arrange_inputs(const struct gpu_input *a, void *stream)
{
    return launch_tokens(a,
                         {arrange_inputs_kernel<1, true>, arrange_inputs_kernel<2, true>,
                          arrange_inputs_kernel<1, false>},
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
