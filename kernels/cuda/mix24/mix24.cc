/* Products of MIX24 weights: the choice of a path, and dispatch to it. */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/mix24/ring.h"
#include "kernels/cuda/mix24/skinny.h"
#include "kernels/cuda/mix24/tile.h"
#include "kernels/cuda/mix24/vector.h"

int qt_mix24_check(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w)
{
    int rc;
    switch (p->config.path) {
    case QTOOL_MATMUL_TILE:
        rc = qt_mix24_tile_check(p, w);
        break;
    case QTOOL_MATMUL_SKINNY:
        rc = qt_mix24_skinny_check(p, w);
        break;
    case QTOOL_MATMUL_VECTOR:
        rc = qt_mix24_vector_check(p, w);
        break;
    case QTOOL_MATMUL_RING:
        rc = qt_mix24_ring_check(p, w);
        break;
    default:
        return qt_refuse(p, QTOOL_UNSUPPORTED, "config.path is not a path for MIX24");
    }
    return rc == QTOOL_OK ? qt_allow_smem(qt_state(p)->kernel, qt_state(p)->smem_bytes, p->reason)
                          : rc;
}

/* Estimated time of the ring and skinny kernels on an H200. */
static double ring_us(const struct qtool_matmul_plan *p, size_t packed_bytes)
{
    return (double)ceil_div(p->m, 16) * (4.3 + (double)packed_bytes / 1.7e6);
}

int qt_mix24_choose(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                    size_t packed_bytes, double *us)
{
    double tile_us;
    const bool invariant = p->options.batch_invariant;
    *us = ring_us(p, packed_bytes);
    if (!invariant && p->m > QT_SKINNY_MAX_TOKENS && qt_mix24_tile_choose(p, w, &tile_us) &&
        tile_us < *us) {
        *us = tile_us;
        return qt_mix24_check(p, w);
    }
    if ((!invariant && (qt_mix24_vector_choose(p, w) || qt_mix24_skinny_choose(p, w))) ||
        qt_mix24_ring_choose(p, w))
        return qt_mix24_check(p, w);
    return qt_refuse(p, QTOOL_UNSUPPORTED, "n = %zu does not fit into the device's shared memory",
                     w->n);
}

int qt_mix24_run(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w, void *y,
                 const void *x, void *workspace, void *stream)
{
    switch (p->config.path) {
    case QTOOL_MATMUL_TILE:
        return qt_mix24_tile_run(p, w, y, x, workspace, stream);
    case QTOOL_MATMUL_SKINNY:
        return qt_mix24_skinny_run(p, w, y, x, workspace, stream);
    case QTOOL_MATMUL_VECTOR:
        return qt_mix24_vector_run(p, w, y, x, stream);
    case QTOOL_MATMUL_RING:
        return qt_mix24_ring_run(p, w, y, x, workspace, stream);
    default:
        return QTOOL_UNSUPPORTED;
    }
}

int qt_mix24_plan_many(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *const *w,
                       size_t count)
{
    int rc = qt_mix24_vector_plan_many(p, w, count);
    return rc == QTOOL_OK ? qt_allow_smem(qt_state(p)->kernel, qt_state(p)->smem_bytes, p->reason)
                          : rc;
}

int qt_mix24_run_many(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *const *w,
                      size_t count, void *const *y, const void *x, void *stream)
{
    return qt_mix24_vector_run_many(p, w, count, y, x, stream);
}
