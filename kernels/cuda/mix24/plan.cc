/* mix24, host side: what a matrix is, and which kernel is for it. */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/mix24/ring.h"
#include "kernels/cuda/mix24/skinny.h"
#include "kernels/cuda/mix24/tile.h"
#include "kernels/cuda/mix24/vector.h"

/* ---- what a matrix is --------------------------------------------------------------------------
 */

const char *qt_mix24_fault(const struct qtool_matmul_weight *w)
{
    const struct qtool_matmul_mix24 *m = &w->mix24;
    if (w->n == 0 || w->k == 0 || w->n > 1 << 26 || w->k > 1048544)
        return "n must be 1..2^26, k 1..1048544";
    if (m->twos > 8192 || m->fours > 8192 || (m->twos + m->fours) * QT_MIX24_UNIT_COLS < w->k ||
        m->twos + m->fours > ceil_div(w->k, QT_MIX24_UNIT_COLS) + 1)
        return "twos + fours must be what k takes";
    if (w->scale_exp2 < -100 || w->scale_exp2 > 100)
        return "scale_exp2 must be -100..100";
    if (!m->stream || (size_t)m->stream % 16 || !m->perm || (size_t)m->perm % 4)
        return "sections stream and perm must be there, 16- and 4-byte aligned";
    if (m->csr_ptr && (!m->csr_col || !m->csr_val || (size_t)m->csr_ptr % 4 ||
                       (size_t)m->csr_col % 16 || (size_t)m->csr_val % 16))
        return "sections csr_col and csr_val must be there, 16-byte aligned";
    if (qt_mix24_csr_rows(w) < w->n)
        return "csr_rows smaller than n";
    return NULL;
}

int qt_mix24_slice(struct qtool_matmul_weight *out, const struct qtool_matmul_weight *w, size_t n0,
                   size_t n, size_t k0, size_t k)
{
    if (qt_mix24_fault(w) || n0 % QT_STRIP_ROWS || n == 0 || n > w->n || n0 > w->n - n || k0 ||
        k != w->k)
        return QTOOL_UNSUPPORTED;
    struct qtool_matmul_weight part = *w; /* out may be w */
    part.n = n;
    part.mix24.stream =
        (const char *)w->mix24.stream + n0 / QT_STRIP_ROWS * qt_mix24_strip_bytes(w);
    if (w->mix24.csr_ptr)
        part.mix24.csr_ptr = (const uint32_t *)w->mix24.csr_ptr + n0;
    part.mix24.csr_rows = qt_mix24_csr_rows(w);
    *out = part;
    return QTOOL_OK;
}

bool qt_mix24_record_maps(const struct qtool_matmul_plan *p, CUtensorMap records[2],
                          const struct qtool_matmul_weight *w, int box_strips)
{
    const size_t pitch = qt_mix24_strip_bytes(w);
    struct qt_tensor t = {w->mix24.stream, 2,    {pitch / 8, (size_t)qt_mix24_strips(w)}, {pitch},
                          {0, box_strips}, false};
    for (int i = 0; i < 2; i++) {
        t.box[0] = mix24_unit_bytes(i) / 8;
        if (!qt_tensor_map(p, &records[i], &t))
            return false;
    }
    return true;
}

/* ---- which kernel ------------------------------------------------------------------------------
 */

int qt_mix24_plan_check(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w)
{
    const enum qtool_matmul_path path = p->config.path;
    int rc = path == QTOOL_MATMUL_TILE     ? qt_mix24_tile_check(p, w)
             : path == QTOOL_MATMUL_SKINNY ? qt_mix24_skinny_check(p, w)
             : path == QTOOL_MATMUL_VECTOR ? qt_mix24_vector_check(p, w)
             : path == QTOOL_MATMUL_STREAM
                 ? qt_mix24_ring_check(p, w)
                 : qt_refuse(p, QTOOL_UNSUPPORTED, "no such kernel for this kind of matrix");
    return rc == QTOOL_OK ? qt_allow_smem(p->kernel, p->smem_bytes, p->reason) : rc;
}

int qt_mix24_choose(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w, double *us)
{
    double tile_us;
    const bool invariant = p->options.batch_invariant;
    const bool tiles = !invariant && p->m > QT_SKINNY_MAX_TOKENS &&
                       qt_mix24_tile_choose(p, w, &tile_us) && tile_us < *us;
    const bool few =
        !tiles && !invariant && (qt_mix24_vector_choose(p, w) || qt_mix24_skinny_choose(p, w));
    if (tiles)
        *us = tile_us;
    else if (!few && !qt_mix24_ring_choose(p, w))
        return qt_refuse(p, QTOOL_UNSUPPORTED, "n = %zu is too long for shared memory", w->n);
    return qt_mix24_plan_check(p, w);
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
    default:
        return qt_mix24_ring_run(p, w, y, x, workspace, stream);
    }
}
