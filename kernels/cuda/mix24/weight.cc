/* MIX24 weights: checks, slices, tensor maps. */
#include "kernels/cuda/common/tensor_map.h"
#include "kernels/cuda/mix24/mix24.h"

const char *qt_mix24_fault(const struct qtool_matmul_weight *w)
{
    const struct qtool_matmul_mix24 *m = &w->mix24;
    if (w->n == 0 || w->k == 0 || w->n > 1 << 26 || w->k > 1048544)
        return "n must be 1..2^26 and k 1..1048544";
    if (m->twos > 8192 || m->fours > 8192 || (m->twos + m->fours) * QT_MIX24_UNIT_COLS < w->k ||
        m->twos + m->fours > ceil_div(w->k, QT_MIX24_UNIT_COLS) + 1)
        return "twos and fours must be at most 8192 each, and their sum what k needs";
    if (w->scale_exp2 < -100 || w->scale_exp2 > 100)
        return "scale_exp2 must be -100..100";
    if (!m->stream || (size_t)m->stream % 16 || !m->perm || (size_t)m->perm % 4)
        return "stream must be 16-byte aligned, perm 4-byte aligned, and neither NULL";
    if (m->csr_ptr && (!m->csr_col || !m->csr_val || (size_t)m->csr_ptr % 4 ||
                       (size_t)m->csr_col % 16 || (size_t)m->csr_val % 16))
        return "csr_ptr must be 4-byte aligned, csr_col and csr_val 16-byte aligned and not NULL";
    if (qt_mix24_csr_rows(w) < w->n)
        return "csr_rows must be at least n";
    return NULL;
}

int qt_mix24_slice(struct qtool_matmul_weight *out, const struct qtool_matmul_weight *w, size_t n0,
                   size_t n, size_t k0, size_t k)
{
    if (qt_mix24_fault(w) || n0 % QT_STRIP_ROWS || n == 0 || n > w->n || n0 > w->n - n || k0 ||
        k != w->k)
        return QTOOL_UNSUPPORTED;
    struct qtool_matmul_weight part = *w; /* a copy, because out may be w */
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
