/* Attention of many queries: the choice of the kernel, and its launch. */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/decoder/attention_tile.cuh"
#include "kernels/cuda/decoder/decoder.h"

static const struct tile_instance attention_tiles[] = {
    QT_TILE_INSTANCE(32, false), QT_TILE_INSTANCE(64, false),  QT_TILE_INSTANCE(80, false),
    QT_TILE_INSTANCE(96, false), QT_TILE_INSTANCE(128, false), QT_TILE_INSTANCE(256, false)};

int qt_attention_tile(const struct qtool_decoder_attention *a, bool dependent, void *stream)
{
    struct tile_args args = {*a, a->scale * 1.4426950408889634f};
    struct qt_kernel_launch l = {};
    char reason[160];
    tile_instance tile = qt_rare_tile(a);
    for (const tile_instance &i : attention_tiles)
        if (i.dim == a->head_dim && !a->slopes)
            tile = i;
    if (!tile.kernel || qt_allow_smem(tile.kernel, tile.smem, reason) != QTOOL_OK)
        return QTOOL_UNSUPPORTED;
    l.kernel = tile.kernel;
    l.smem = tile.smem;
    l.grid = dim3((unsigned)((a->queries + TILE_QUERIES - 1) / TILE_QUERIES), (unsigned)a->heads,
                  (unsigned)a->sequences);
    l.threads = tile.threads;
    l.dependent = l.most_smem = dependent; /* products that follow need much of it */
    return qt_launch_kernel(&l, &args, stream);
}
