/* Configurations of qtool_kernels.h as text, for messages of the GPU programs. */
#ifndef QT_TESTS_GPU_CONFIG_TEXT_H
#define QT_TESTS_GPU_CONFIG_TEXT_H

#include "kernels/include/qtool_kernels.h"

#include <stdio.h>

static const char *const path_names[] = {"stream",   "skinny", "tile", "dense",
                                         "mma tile", "vector", "ring"};
static const char *const schedule_names[] = {"", "whole", "stream-k", "clusters of 2",
                                             "clusters of 4"};

/* Writes a configuration that qtool_matmul_plan_check accepted. */
static inline void config_text(char *out, size_t size, const struct qtool_matmul_config *c)
{
    const char *name = path_names[c->path];
    switch (c->path) {
    case QTOOL_MATMUL_STREAM:
        snprintf(out, size, "%s: token tiles %d strips %d warps %d/%d cta %d splits %d", name,
                 c->stream.token_tiles, c->stream.strips, c->stream.warps, c->stream.warps_k,
                 c->stream.strips_cta, c->stream.splits);
        break;
    case QTOOL_MATMUL_SKINNY:
        snprintf(out, size, "%s: token tiles %d strips %d warps %d/%d cta %d depth %d", name,
                 c->skinny.token_tiles, c->skinny.strips, c->skinny.warps, c->skinny.warps_k,
                 c->skinny.strips_cta, c->skinny.depth);
        break;
    case QTOOL_MATMUL_TILE:
        snprintf(out, size, "%s: %d rows x %d tokens, %s", name, 16 * c->tile.warps,
                 8 * c->tile.token_tiles, schedule_names[c->tile.schedule]);
        break;
    case QTOOL_MATMUL_DENSE:
        snprintf(out, size, "%s: %d parts", name, c->dense.parts);
        break;
    case QTOOL_MATMUL_MMA_TILE:
        snprintf(out, size, "%s: %d rows x %d tokens, warps %d strips %d splits %d", name,
                 16 * c->mma_tile.strips_cta, 8 * c->mma_tile.token_tiles, c->mma_tile.warps,
                 c->mma_tile.strips, c->mma_tile.splits);
        break;
    case QTOOL_MATMUL_VECTOR:
        snprintf(out, size, "%s: strips %d warps %d/%d cta %d", name, c->vector.strips,
                 c->vector.warps, c->vector.warps_k, c->vector.strips_cta);
        break;
    case QTOOL_MATMUL_RING:
        snprintf(out, size,
                 "%s: token tiles %d strips %d warps %d/%d cta %d cluster %d depth %d parts %d",
                 name, c->ring.token_tiles, c->ring.strips, c->ring.warps, c->ring.warps_k,
                 c->ring.strips_cta, c->ring.cluster, c->ring.depth, c->ring.parts);
        break;
    }
}

#endif
