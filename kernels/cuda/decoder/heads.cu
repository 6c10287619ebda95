/*
 * Query, key and value heads: a warp per head of a token, four warps in a thread block.
 *
 *   smem   the head's values in FP32, [warp][head_dim]
 *   grid   (ceil((heads + 2 kv_heads) / 4), m)
 *
 * Before the preceding kernel has finished, cosines and sines start on their way to L2.
 */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/decoder/decoder.h"
#include "kernels/cuda/decoder/head.cuh"

enum { HEAD_WARPS = 4, MOST_HEAD_DIM = 512 };

/* NORM: queries or keys have a norm. */
template <bool NORM>
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
    const head_of h = find_head(a, kind, kind == HEAD_QUERY ? number : (number - heads) % kv_heads,
                                token, position);
    if (number == 0) /* one warp per token, because tokens of a step often share their position */
        prefetch_angles(h, (int)a.rotary / 2);
    ptx_wait_previous();
    prepare_head<NORM>(row, a, h);
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

int qt_decoder_heads(const struct qtool_decoder_heads *a, bool dependent, void *stream)
{
    struct qtool_decoder_heads args = *a;
    struct qt_kernel_launch l = {};
    const size_t heads = a->heads + 2 * a->kv_heads;
    if (a->kv4)
        return qt_decoder_heads_kv4(a, dependent, stream);
    if (a->head_dim > MOST_HEAD_DIM || a->rotary > a->head_dim || a->rotary % 2 || a->m > 65535 ||
        (a->norm_all_heads && a->norm_last))
        return QTOOL_UNSUPPORTED;
    l.kernel = a->q_norm.weight || a->k_norm.weight ? (const void *)heads_kernel<true>
                                                    : (const void *)heads_kernel<false>;
    l.grid = dim3((unsigned)((heads + HEAD_WARPS - 1) / HEAD_WARPS), (unsigned)a->m);
    l.threads = HEAD_WARPS * 32;
    l.dependent = l.most_smem = dependent; /* products that follow need much of it */
    return qt_launch_kernel(&l, &args, stream);
}
