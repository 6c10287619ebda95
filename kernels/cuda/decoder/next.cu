/* The most probable next token: a thread block of 1024 threads per sequence. */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/decoder/decoder.h"
#include "kernels/cuda/decoder/reduce.cuh"

enum { NEXT_THREADS = 1024 };

/* The larger logit wins, of equal ones the lower id. */
struct best_token {
    float logit;
    int id;
};

static __device__ __forceinline__ best_token better_token(best_token a, best_token b)
{
    return b.logit > a.logit || (b.logit == a.logit && b.id < a.id) ? b : a;
}

static __device__ __forceinline__ best_token best_token_of_warp(best_token v)
{
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        const best_token other = {__shfl_xor_sync(~0u, v.logit, d), __shfl_xor_sync(~0u, v.id, d)};
        v = better_token(v, other);
    }
    return v;
}

static __device__ __forceinline__ void take_logit(best_token *best, bool *finite, float v, int id)
{
    *finite &= isfinite(v);
    *best = better_token(*best, best_token{v, id});
}

static __global__ void __launch_bounds__(NEXT_THREADS) next_kernel(qtool_decoder_next a)
{
    __shared__ best_token parts[NEXT_THREADS / 32];
    const int sequence = (int)blockIdx.x, vocab = (int)a.vocab;
    const size_t first = (size_t)sequence * vocab;
    const bool change = a.half || a.factor != 1 || a.bias || a.softcap > 0;
    best_token best = {-INFINITY, 0x7fffffff};
    bool finite = true;
    ptx_launch_dependents();
    ptx_wait_previous();
    if (!change && vocab % 4 == 0 && (size_t)a.logits % 16 == 0) {
        const float4 *logits = (const float4 *)(a.logits + first);
#pragma unroll 8
        for (int i = (int)threadIdx.x; i < vocab / 4; i += NEXT_THREADS) {
            const float4 v = logits[i];
            take_logit(&best, &finite, v.x, 4 * i);
            take_logit(&best, &finite, v.y, 4 * i + 1);
            take_logit(&best, &finite, v.z, 4 * i + 2);
            take_logit(&best, &finite, v.w, 4 * i + 3);
        }
    } else {
#pragma unroll 8
        for (int i = (int)threadIdx.x; i < vocab; i += NEXT_THREADS) {
            const float v = change ? changed_logit(a, first + i, i) : a.logits[first + i];
            if (change)
                a.logits[first + i] = v;
            take_logit(&best, &finite, v, i);
        }
    }
    if (a.fault && !finite)
        *a.fault = 1;
    if (!a.ids)
        return;
    best = best_token_of_warp(best);
    if (threadIdx.x % 32 == 0)
        parts[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x >= 32)
        return;
    best = best_token_of_warp(parts[threadIdx.x]);
    if (threadIdx.x == 0) {
        const int position = a.position[sequence] + 1;
        const int id = best.id < vocab ? best.id : 0; /* all logits are NaN */
        a.ids[sequence] = id;
        a.position[sequence] = position;
        a.length[sequence] = position + 1;
        if (a.text && position < (int)a.capacity)
            a.text[(size_t)sequence * a.capacity + position] = id;
    }
}

int qt_decoder_next(const struct qtool_decoder_next *a, bool dependent, void *stream)
{
    struct qtool_decoder_next args = *a;
    struct qt_kernel_launch l = {};
    l.kernel = (const void *)next_kernel;
    l.grid = dim3((unsigned)a->sequences);
    l.threads = NEXT_THREADS;
    l.dependent = l.most_smem = dependent; /* products that follow need much of it */
    return qt_launch_kernel(&l, &args, stream);
}
