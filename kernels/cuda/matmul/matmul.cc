/* Products of LUT, FPX and INT weights: the choice of a path, and dispatch to it. */
#include "kernels/cuda/matmul/matmul.h"
#include "kernels/cuda/common/device.h"

#include <math.h>

/* Estimated time of the stream kernel on an H200. With more than 16 tokens per pass a warp has one
 * strip, and X takes shared memory from the pipelines. With 99 KB of shared memory k is divided
 * into many parts (12 tokens, 8192 x 8192: 34.8 us instead of 23.3). */
static double stream_us(const struct qtool_matmul_plan *p)
{
    double little = qt_state(p)->smem_limit < 128 << 10 ? 1.5 : 1;
    double pass_us = 3 + (double)p->n * (double)p->k / 3.2e6 * little;
    return p->m <= 16 ? pass_us : (double)ceil_div(p->m, 32) * 2.3 * pass_us;
}

/* The order of additions in tiles depends on m, so batch-invariant plans never use them. */
bool qt_matmul_choose(struct qtool_matmul_plan *p, const struct qt_shape *s, double *us)
{
    const bool tiles = !p->options.batch_invariant && p->m > 8;
    *us = stream_us(p);
    if (qt_skinny_choose(p, s))
        return true;
    if (p->options.gated)
        return tiles && qt_tile_choose(p, s, us);
    if ((tiles && (qt_tile_choose(p, s, us) || qt_mma_tile_choose(p, s, us))) ||
        qt_stream_choose(p, s))
        return true;
    *us = INFINITY; /* the stream kernel does not fit: any mma tile is faster */
    return tiles && qt_mma_tile_choose(p, s, us);
}

int qt_matmul_check(struct qtool_matmul_plan *p, const struct qt_shape *s)
{
    int rc;
    switch (p->config.path) {
    case QTOOL_MATMUL_STREAM:
        rc = qt_stream_check(p, s);
        break;
    case QTOOL_MATMUL_SKINNY:
        rc = qt_skinny_check(p, s);
        break;
    case QTOOL_MATMUL_TILE:
        rc = qt_tile_check(p, s);
        break;
    case QTOOL_MATMUL_MMA_TILE:
        rc = qt_mma_tile_check(p, s);
        break;
    default:
        return qt_refuse(p, QTOOL_UNSUPPORTED, "config.path is not a path for LUT, FPX and INT");
    }
    return rc == QTOOL_OK ? qt_allow_smem(qt_state(p)->kernel, qt_state(p)->smem_bytes, p->reason)
                          : rc;
}

int qt_matmul_run(const struct qtool_matmul_plan *p, const struct qt_shape *s,
                  const struct qtool_matmul_weight *w, void *y, const void *x, void *workspace,
                  void *stream)
{
    const enum qtool_matmul_path path = p->config.path;
    if ((path == QTOOL_MATMUL_TILE || path == QTOOL_MATMUL_SKINNY) && !s->zero_boxes)
        return QTOOL_UNSUPPORTED; /* the plan was for zero-points that TMA can copy */
    switch (path) {
    case QTOOL_MATMUL_TILE:
        return qt_tile_run(p, s, w, y, x, workspace, stream);
    case QTOOL_MATMUL_SKINNY:
        return qt_skinny_run(p, s, w, y, x, workspace, stream);
    case QTOOL_MATMUL_MMA_TILE:
        return qt_mma_tile_run(p, s, w, y, x, workspace, stream);
    case QTOOL_MATMUL_STREAM:
        return qt_stream_run(p, s, w, y, x, workspace, stream);
    default:
        return QTOOL_UNSUPPORTED;
    }
}
