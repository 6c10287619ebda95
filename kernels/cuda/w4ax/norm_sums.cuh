/*
 * Row statistics of a norm for quantize_rows.cu: each thread of a thread block has 16 channels of
 * one row or of two rows. With two rows, lanes 0-15 of a warp reduce the first row and lanes 16-31
 * the second; with one row both halves reduce the same row.
 */
#ifndef QT_KERNELS_CUDA_W4AX_NORM_SUMS_CUH
#define QT_KERNELS_CUDA_W4AX_NORM_SUMS_CUH

#include "kernels/cuda/w4ax/quantize.cuh"

enum {
    THREAD_CHANNELS = 16,
    WARP_CHANNELS = 32 * THREAD_CHANNELS,
    MAX_THREADS = 1024,
    MAX_WARPS = MAX_THREADS / 32
};

/* Statistics of each warp's channels: [row][warp]. */
struct warp_sums {
    float mean[2][MAX_WARPS];    /* layer norm only */
    float squares[2][MAX_WARPS]; /* sum of squares; layer norm: of differences from the mean */
};

static __device__ __forceinline__ int my_half()
{
    return (int)threadIdx.x / 16 % 2;
}

/* Returns the lane's value for the token that its half of the warp reduces. */
template <int TOKENS> static __device__ __forceinline__ float of_my_token(const float v[TOKENS])
{
    return my_half() ? v[TOKENS - 1] : v[0];
}

/* Returns the value of lane ^ 16 for the token that this lane's half of the warp reduces. */
template <int TOKENS> static __device__ __forceinline__ float of_other_half(const float v[TOKENS])
{
    return __shfl_xor_sync(~0u, my_half() ? v[0] : v[TOKENS - 1], 16);
}

/* Sum over the 16 lanes of a half warp. */
static __device__ __forceinline__ float half_sum(float v)
{
#pragma unroll
    for (int d = 8; d; d /= 2)
        v += __shfl_xor_sync(~0u, v, d);
    return v;
}

/* Running sums over the values of a thread. Layer norm: over the differences from the first
 * value. */
template <int NORM> struct thread_sums {
    float first, sum, squares;

    __device__ __forceinline__ void add(float v, bool is_first)
    {
        if (NORM == QTOOL_W4AX_RMS_NORM) {
            squares = is_first ? v * v : fmaf(v, v, squares);
        } else if (is_first) {
            first = v;
            sum = squares = 0;
        } else {
            const float d = v - first;
            sum += d;
            squares = fmaf(d, d, squares);
        }
    }
};

/* Reduces the sums of a warp's threads and stores the result in shared memory. */
template <int NORM, int TOKENS>
static __device__ __forceinline__ void reduce_warp(warp_sums *to, const thread_sums<NORM> s[TOKENS])
{
    const int warp = (int)threadIdx.x / 32;
    float mean[TOKENS], squares[TOKENS], all = 0, sum;
#pragma unroll
    for (int t = 0; t < TOKENS; t++)
        squares[t] = s[t].squares;
    if (NORM == QTOOL_W4AX_RMS_NORM) {
        sum = of_my_token<TOKENS>(squares) + of_other_half<TOKENS>(squares);
    } else {
        /* Merges sums of squared differences: the sum about the common mean is the sum of the sums
         * about each mean, plus count * (mean - common mean)^2 for each (Chan, Golub and LeVeque
         * 1979). */
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            const float off = s[t].sum * (1.0f / THREAD_CHANNELS);
            mean[t] = s[t].first + off;
            squares[t] = fmaf(-off, s[t].sum, squares[t]);
        }
        const float mine = of_my_token<TOKENS>(mean), other = of_other_half<TOKENS>(mean);
        all = half_sum(mine + other) * (1.0f / 32);
        sum = of_my_token<TOKENS>(squares) + of_other_half<TOKENS>(squares);
        sum = fmaf((mine - all) * THREAD_CHANNELS, mine - all, sum);
        sum = fmaf((other - all) * THREAD_CHANNELS, other - all, sum);
    }
    sum = half_sum(sum);
    if (threadIdx.x % 16 == 0) {
        if (NORM == QTOOL_W4AX_LAYER_NORM)
            to->mean[my_half()][warp] = all;
        to->squares[my_half()][warp] = sum;
    }
}

/* Returns the norm of the token that the thread's half warp reduces. Requires a barrier after
 * reduce_warp. */
template <int NORM>
static __device__ __forceinline__ row_norm norm_of(const quantize_args &a, const warp_sums *s)
{
    const float *mean = s->mean[my_half()], *squares = s->squares[my_half()];
    const int i = (int)threadIdx.x % 16, warps = (int)blockDim.x / 32;
    const bool has[2] = {i < warps, i + 16 < warps};
    float sum = (has[0] ? squares[i] : 0) + (has[1] ? squares[i + 16] : 0);
    float center = 0;
    if (NORM == QTOOL_W4AX_LAYER_NORM) {
        const float m[2] = {has[0] ? mean[i] : 0, has[1] ? mean[i + 16] : 0};
        center = half_sum(m[0] + m[1]) * (WARP_CHANNELS * a.per_k);
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (has[j])
                sum = fmaf((m[j] - center) * WARP_CHANNELS, m[j] - center, sum);
    }
    return norm_from(a, center, half_sum(sum));
}

#endif
