/*
 * dense: dequantized matrices under the names of the checkpoint. It loads wherever the checkpoint
 * does, except where the checkpoint stacks experts, which are written one by one.
 *
 * Channel orders and factors of w4ax are undone, outliers of mix24 are included. The rounding of
 * activations and of a KV cache is not in the weights, and is lost.
 */
#include "pack/export/export.h"

#include <string.h>

/* Model types whose checkpoints stack the experts of a layer in one tensor. */
static const char *const stacked[] = {
    "gemma4",           "gemma4_text",    "gpt_oss",          "granitemoe",
    "granitemoehybrid", "granitemoe_swa", "granitemoeshared", "jetmoe",
    "llama4",           "llama4_text",    "mistral3",         "qwen3_vl_moe",
};

static int check(const struct qt_export *x, struct qt_err *err)
{
    bool experts = false, known = false;
    (void)err;
    for (size_t i = 0; i < x->count; i++)
        experts = experts || strstr(x->matrix[i].module, ".experts.");
    for (size_t i = 0; x->model_type && i < sizeof stacked / sizeof *stacked; i++)
        known = known || strcmp(x->model_type, stacked[i]) == 0;
    if (experts && known)
        qt_log_message(
            x->opt->log, QT_LOG_WARNING,
            "experts are written one by one, but checkpoints of %s have those of a layer "
            "in one tensor: other programs may not load this export",
            x->model_type);
    return QT_OK;
}

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
    const size_t count = panel->rows * m->k;
    if (m->transposed)
        for (size_t i = 0; i < count; i++)
            qt_export_floats(t, i % m->k * m->n + panel->row0 + i / m->k, &panel->weight[i], 1);
    else
        qt_export_floats(t, panel->row0 * m->k, panel->weight, count);
    for (size_t i = 0; panel->decoded && i < count; i++)
        panel->decoded[i] = qt_export_round(panel->weight[i], t->dtype);
}

const struct qt_export_format qt_export_dense = {
    .name = "dense",
    .help = "dequantized weights, as large as the checkpoint",
    .runtimes = "all that load the checkpoint",
    .weights = true,
    .rounds = true,
    .embeddings = true,
    .describe = describe,
    .check = check,
    .convert = convert,
};
