/* Kernels of few families: scores with ALiBi, heads of more than 256 channels, norms of values,
 * clipped heads, factors of hidden states. */
#include "kernels/cuda/decoder/add_norm.cuh"
#include "kernels/cuda/decoder/attention_rows.cuh"
#include "kernels/cuda/decoder/attention_tile.cuh"
#include "kernels/cuda/decoder/decoder.h"
#include "kernels/cuda/decoder/heads.cuh"

const void *qt_rare_add_norm(void)
{
    return (const void *)add_norm_kernel<true>;
}

const void *qt_rare_heads(void)
{
    return (const void *)heads_kernel<HEAD_ALL>;
}

const void *qt_rare_rows(const struct qtool_decoder_attention *a)
{
    if (!a->slopes)
        return (const void *)attention_rows_kernel<32, 16, false>;
    return a->head_dim <= 128 ? (const void *)attention_rows_kernel<16, 8, true> : NULL;
}

struct tile_instance qt_rare_tile(const struct qtool_decoder_attention *a)
{
    static const struct tile_instance slopes[] = {QT_TILE_INSTANCE(64, true),
                                                  QT_TILE_INSTANCE(128, true)};
    static const struct tile_instance wide = QT_TILE_INSTANCE(512, false);
    struct tile_instance none = {};
    for (const tile_instance &i : slopes)
        if (a->slopes && i.dim == a->head_dim)
            return i;
    return !a->slopes && a->head_dim == wide.dim ? wide : none;
}
