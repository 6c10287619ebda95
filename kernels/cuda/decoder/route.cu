/* The choice of experts: a warp per token. */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/decoder/decoder.h"
#include "kernels/cuda/decoder/reduce.cuh"

enum { ROUTE_WARPS = 4, ROUTE_EACH = QTOOL_DECODER_EXPERTS / 32, ROUTE_TOP = 32 };

static __device__ __forceinline__ float max_of_warp(float v)
{
#pragma unroll
    for (int d = 16; d > 0; d /= 2)
        v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
    return v;
}

/* The number of the largest rank of the warp; the lowest of equal ones. Expert e is value e / 32 of
 * lane e % 32. */
static __device__ __forceinline__ int best_of_warp(const float rank[ROUTE_EACH])
{
    float most = rank[0];
    int best = (int)threadIdx.x % 32;
#pragma unroll
    for (int j = 1; j < ROUTE_EACH; j++)
        if (rank[j] > most) {
            most = rank[j];
            best = j * 32 + (int)threadIdx.x % 32;
        }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        const float other = __shfl_xor_sync(~0u, most, d);
        const int number = __shfl_xor_sync(~0u, best, d);
        if (other > most || (other == most && number < best)) {
            most = other;
            best = number;
        }
    }
    return best;
}

static __global__ void __launch_bounds__(ROUTE_WARPS * 32)
    choose_experts_kernel(qtool_decoder_route a)
{
    const int lane = (int)threadIdx.x % 32, n = (int)a.experts, top_k = (int)a.top_k;
    const size_t token = blockIdx.x * (size_t)ROUTE_WARPS + threadIdx.x / 32;
    float score[ROUTE_EACH], rank[ROUTE_EACH], most = -INFINITY, sum = 0;
    ptx_launch_dependents();
    ptx_wait_previous();
    if (token >= a.m)
        return;
#pragma unroll
    for (int j = 0; j < ROUTE_EACH; j++) {
        const int e = j * 32 + lane;
        score[j] = e < n ? a.logits[token * a.stride + e] + (a.bias ? a.bias[e] : 0) : -INFINITY;
        most = fmaxf(most, score[j]);
    }
    most = max_of_warp(most);
#pragma unroll
    for (int j = 0; j < ROUTE_EACH; j++) {
        const int e = j * 32 + lane;
        score[j] = a.sigmoid ? 1 / (1 + expf(-score[j])) : expf(score[j] - most);
        sum += e < n ? score[j] : 0;
    }
    const float total = a.sigmoid ? 1 : 1 / sum_of_warp(sum);
#pragma unroll
    for (int j = 0; j < ROUTE_EACH; j++) {
        const int e = j * 32 + lane;
        score[j] *= total;
        rank[j] = e >= n ? -INFINITY : score[j] + (a.select_bias ? a.select_bias[e] : 0);
    }
    float weight = 0; /* of choice number `lane` */
    int id = 0;
    for (int c = 0; c < top_k; c++) {
        const int best = best_of_warp(rank);
        float mine = 0;
#pragma unroll
        for (int j = 0; j < ROUTE_EACH; j++)
            if (best == j * 32 + lane) {
                mine = score[j];
                rank[j] = -INFINITY;
            }
        mine = __shfl_sync(~0u, mine, best % 32);
        weight = lane == c ? mine : weight;
        id = lane == c ? best : id;
    }
    const float chosen = sum_of_warp(weight);
    if (lane < top_k) {
        a.ids[token * a.top_k + lane] = id;
        a.weights[token * a.top_k + lane] =
            weight * (a.normalize ? a.scale / (chosen + a.eps) : a.scale);
    }
}

int qt_decoder_route(const struct qtool_decoder_route *a, bool dependent, void *stream)
{
    struct qtool_decoder_route args = *a;
    struct qt_kernel_launch l = {};
    if (a->experts > QTOOL_DECODER_EXPERTS || a->top_k > ROUTE_TOP || a->top_k > a->experts)
        return QTOOL_UNSUPPORTED;
    l.kernel = (const void *)choose_experts_kernel;
    l.grid = dim3((unsigned)((a->m + ROUTE_WARPS - 1) / ROUTE_WARPS));
    l.threads = ROUTE_WARPS * 32;
    l.dependent = l.most_smem = dependent; /* products that follow need much of it */
    return qt_launch_kernel(&l, &args, stream);
}
