/* Some tensors have another form in containers than in the checkpoints that runtimes expect. */
#include "pack/export/export.h"

#include <string.h>

/* True for experts that are written one by one where checkpoints have them in one tensor. */
static bool is_apart(const struct qt_export *x, const struct qt_export_matrix *m)
{
    struct qt_stack form;
    /* In one of two orders, and the container does not say in which. */
    if (x->model_type && strcmp(x->model_type, "qwen3_vl_moe") == 0)
        return strstr(m->module, ".experts.") != NULL;
    return !x->format->weights && qt_stored_in_stack(&form, x->model_type, m->entry->name);
}

void qt_export_warn(const struct qt_export *x)
{
    bool apart = false, experts = false;
    for (size_t i = 0; i < x->count; i++) {
        apart = apart || is_apart(x, &x->matrix[i]);
        experts = experts || strstr(x->matrix[i].module, ".experts.");
    }
    if (experts && x->format->experts)
        qt_log_message(x->opt->log, QT_LOG_WARNING, "%s", x->format->experts);
    if (apart)
        qt_log_message(
            x->opt->log, QT_LOG_WARNING,
            "experts are written one by one, but checkpoints of %s have those of a layer "
            "in one tensor: other programs may not load this export",
            x->model_type);
    if (json_object_get(x->config, "auto_map"))
        qt_log_message(x->opt->log, QT_LOG_WARNING,
                       "config.json names Python files (auto_map), which containers do not have: "
                       "runtimes that need them look for copies in the export");
}

bool qt_export_is_turned(const struct qt_export *x, const struct qt_tensor *t)
{
    return t->ndim == 2 && qt_dtype_bits(t->dtype) % 8 == 0 &&
           qt_stored_transposed(x->model_type, t->name);
}

int qt_export_write_turned(const struct qt_export *x, const struct qt_tensor *t,
                           const unsigned char *data, struct qt_err *err)
{
    const size_t rows = t->shape[0], cols = t->shape[1], size = qt_dtype_bits(t->dtype) / 8;
    unsigned char *column;
    int rc = qt_array_new(&column, rows + 1, size, err);
    for (size_t c = 0; rc == QT_OK && c < cols; c++) {
        for (size_t r = 0; r < rows; r++)
            memcpy(column + r * size, data + (r * cols + c) * size, size);
        rc = qt_output_write(x->out, column, rows * size, err);
    }
    qt_free(column);
    return rc;
}
