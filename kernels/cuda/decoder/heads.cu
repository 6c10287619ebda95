/* Query, key and value heads: the choice of the kernel, and its launch. */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/decoder/decoder.h"
#include "kernels/cuda/decoder/heads.cuh"

int qt_decoder_heads(const struct qtool_decoder_heads *a, bool dependent, void *stream)
{
    struct qtool_decoder_heads args = *a;
    struct qt_kernel_launch l = {};
    const size_t heads = a->heads + 2 * a->kv_heads;
    if (a->kv4)
        return qt_decoder_heads_kv4(a, dependent, stream);
    if (a->head_dim > MOST_HEAD_DIM || a->rotary > a->head_dim || a->rotary % 2 || a->m > 65535 ||
        (a->norm_all_heads && (a->norm_last || a->v_norm.weight || a->clip > 0)))
        return QTOOL_UNSUPPORTED;
    l.kernel = a->v_norm.weight || a->clip > 0        ? qt_rare_heads()
               : a->q_norm.weight || a->k_norm.weight ? (const void *)heads_kernel<HEAD_NORMS>
                                                      : (const void *)heads_kernel<HEAD_BIASES>;
    l.grid = dim3((unsigned)((heads + HEAD_WARPS - 1) / HEAD_WARPS), (unsigned)a->m);
    l.threads = HEAD_WARPS * 32;
    l.dependent = l.most_smem = dependent; /* products that follow need much of it */
    return qt_launch_kernel(&l, &args, stream);
}
