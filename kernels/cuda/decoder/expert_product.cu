/*
 * Products with FP16 experts that each token chooses: a thread block of 4 warps per output and 4 of
 * its channels. The warps take turns at blocks of 256 columns of the terms, 8 columns per lane; the
 * first warp adds the sums of all.
 *
 *   grid     (outputs, channels / 4): the thread blocks of some channels run at the same time, so
 *            outputs with the same expert share its weights in L2
 *   Traffic  the weights of the chosen experts once, if few outputs choose the same
 */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/decoder/decoder.h"
#include "kernels/cuda/decoder/reduce.cuh"

enum { EXPERT_WARPS = 4, EXPERT_ROWS = 4, EXPERT_LANE = 8, EXPERT_BLOCK = 32 * EXPERT_LANE };

/* 8 values, of which the first `count` exist; WIDE: all of them, 16-byte aligned. */
template <bool WIDE>
static __device__ __forceinline__ uint4 load_expert_values(const __half *p, int count)
{
    if constexpr (WIDE) {
        return *(const uint4 *)p;
    } else {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const __half low = 2 * i < count ? p[2 * i] : __half(0);
            const __half high = 2 * i + 1 < count ? p[2 * i + 1] : __half(0);
            words[i] = __half_as_ushort(low) | (uint32_t)__half_as_ushort(high) << 16;
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
}

/* WIDE: k is a multiple of 8. */
template <bool WIDE>
static __global__ void __launch_bounds__(EXPERT_WARPS * 32)
    expert_product_kernel(qtool_decoder_expert_product a)
{
    __shared__ float sums[EXPERT_WARPS][EXPERT_ROWS];
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, k = (int)a.k;
    const int blocks = (k + EXPERT_BLOCK - 1) / EXPERT_BLOCK, count = blocks * (int)a.terms;
    const size_t row0 = (size_t)blockIdx.y * EXPERT_ROWS, first = blockIdx.x * a.terms;
    float sum[EXPERT_ROWS] = {};
    ptx_launch_dependents();
    ptx_wait_previous();
    for (int i = warp; i < count; i += EXPERT_WARPS) {
        const size_t term = first + i / blocks;
        const int column = i % blocks * EXPERT_BLOCK + lane * EXPERT_LANE;
        if (column >= k)
            continue;
        const __half *w = (const __half *)a.w + ((size_t)a.ids[term] * a.n + row0) * k + column;
        const float factor = a.factor ? a.factor[term] : 1;
        uint4 words[EXPERT_ROWS];
        float x[EXPERT_LANE], v[EXPERT_LANE];
#pragma unroll
        for (int r = 0; r < EXPERT_ROWS; r++)
            words[r] = row0 + r < a.n ? load_expert_values<WIDE>(w + (size_t)r * k, k - column)
                                      : make_uint4(0, 0, 0, 0);
        unpack_8_halves(x, load_expert_values<WIDE>(
                               (const __half *)a.x + term / a.share * k + column, k - column));
#pragma unroll
        for (int r = 0; r < EXPERT_ROWS; r++) {
            float dot = 0;
            unpack_8_halves(v, words[r]);
#pragma unroll
            for (int c = 0; c < EXPERT_LANE; c++)
                dot += v[c] * x[c];
            sum[r] += factor * dot;
        }
    }
#pragma unroll
    for (int r = 0; r < EXPERT_ROWS; r++) {
        sum[r] = sum_of_warp(sum[r]);
        if (lane == 0)
            sums[warp][r] = sum[r];
    }
    __syncthreads();
    if (threadIdx.x >= EXPERT_ROWS || row0 + threadIdx.x >= a.n)
        return;
    float all = 0;
#pragma unroll
    for (int i = 0; i < EXPERT_WARPS; i++)
        all += sums[i][threadIdx.x];
    ((__half *)a.y)[blockIdx.x * a.n + row0 + threadIdx.x] = to_half(all);
}

int qt_decoder_expert_product(const struct qtool_decoder_expert_product *a, bool dependent,
                              void *stream)
{
    struct qtool_decoder_expert_product args = *a;
    struct qt_kernel_launch l = {};
    const size_t groups = (a->n + EXPERT_ROWS - 1) / EXPERT_ROWS;
    if (groups > 65535 || a->m >= 1u << 31 || a->share == 0)
        return QTOOL_UNSUPPORTED;
    l.kernel = a->k % EXPERT_LANE == 0 ? (const void *)expert_product_kernel<true>
                                       : (const void *)expert_product_kernel<false>;
    l.grid = dim3((unsigned)a->m, (unsigned)groups);
    l.threads = EXPERT_WARPS * 32;
    l.dependent = l.most_smem = dependent; /* products that follow need much of it */
    return qt_launch_kernel(&l, &args, stream);
}
