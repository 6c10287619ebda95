/*
 * dense: dequantized matrices in the tensors of the checkpoint; loads wherever the checkpoint does.
 *
 * Channel orders and factors of w4ax are undone, outliers of mix24 are included. The rounding of
 * activations and of a KV cache is not in the weights, and is lost.
 */
#include "pack/export/export.h"

static int describe(struct qt_export_matrix *m, struct qt_err *err)
{
    (void)err;
    const bool t = m->transposed;
    qt_export_add(m, ".weight", m->scale_dtype, t ? m->k : m->n, t ? m->n : m->k);
    return QT_OK;
}

static void convert(const struct qt_export_matrix *m, const struct qt_export_panel *panel)
{
    const struct qt_export_tensor *t = &m->tensor[0];
    const size_t first = panel->row0 * m->k, count = panel->rows * m->k;
    if (!m->transposed) {
        qt_export_floats(t, first, panel->weight, count);
        if (panel->decoded)
            qt_to_f32(panel->decoded, t->data + first * (qt_dtype_bits(t->dtype) / 8), t->dtype,
                      count);
        return;
    }
    for (size_t i = 0; i < count; i++) {
        qt_export_floats(t, i % m->k * m->n + panel->row0 + i / m->k, &panel->weight[i], 1);
        if (panel->decoded)
            panel->decoded[i] = qt_export_round(panel->weight[i], t->dtype);
    }
}

const struct qt_export_format qt_export_dense = {
    .name = "dense",
    .help = "dequantized weights, as large as the checkpoint",
    .runtimes = "all that load the checkpoint",
    .weights = true,
    .rounds = true,
    .embeddings = true,
    .stack = qt_stored_in_stack,
    .describe = describe,
    .convert = convert,
};
