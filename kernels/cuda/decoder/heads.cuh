/*
 * Query, key and value heads: a warp per head of a token, four warps in a thread block.
 *
 *   smem   the head's values in FP32, [warp][head_dim]
 *   grid   (ceil((heads + 2 kv_heads) / 4), m)
 *
 * Before the preceding kernel has finished, cosines and sines start on their way to L2.
 */
#ifndef QT_KERNELS_CUDA_DECODER_HEADS_CUH
#define QT_KERNELS_CUDA_DECODER_HEADS_CUH

#include "kernels/cuda/decoder/head.cuh"

enum { HEAD_WARPS = 4, MOST_HEAD_DIM = 512 };

template <head_parts PARTS>
static __global__ void __launch_bounds__(HEAD_WARPS * 32) heads_kernel(qtool_decoder_heads a)
{
    __shared__ float rows[HEAD_WARPS][MOST_HEAD_DIM];
    const int warp = (int)threadIdx.x / 32, dim = (int)a.head_dim;
    const int heads = (int)a.heads, kv_heads = (int)a.kv_heads;
    const int number = (int)blockIdx.x * HEAD_WARPS + warp;
    const size_t token = blockIdx.y;
    float *row = rows[warp];
    ptx_launch_dependents();
    if (number >= heads + 2 * kv_heads)
        return;
    const enum head_kind kind = number < heads              ? HEAD_QUERY
                                : number < heads + kv_heads ? HEAD_KEY
                                                            : HEAD_VALUE;
    const int position = a.position[token];
    head_of h = find_head(a, kind, kind == HEAD_QUERY ? number : (number - heads) % kv_heads, token,
                          position);
    if (number == 0) /* one warp per token, because tokens of a step often share their position */
        prefetch_angles(h, (int)a.rotary / 2);
    if (PARTS == HEAD_ALL && kind == HEAD_VALUE)
        h.norm = &a.v_norm;
    ptx_wait_previous();
    prepare_head<PARTS>(row, a, h);
    if (kind == HEAD_QUERY) {
        store_head(a.q_out, (token * heads + h.head) * dim, row, dim);
        return;
    }
    void *cache = kind == HEAD_KEY ? a.cache_k : a.cache_v;
    void *kept = kind == HEAD_KEY ? a.row_k : a.row_v;
    if (cache)
        store_head(cache,
                   (size_t)a.sequence[token] * a.sequence_stride + h.head * a.head_stride +
                       (size_t)position * dim,
                   row, dim);
    if (kept)
        store_head(kept, (token * kv_heads + h.head) * dim, row, dim);
}

#endif
