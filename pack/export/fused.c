/* Modules that vLLM and SGLang put into one matrix, or run in one kernel, need one scheme. */
#include "pack/export/export.h"

#include <stdio.h>
#include <string.h>

int qt_export_fused_as(const char *module)
{
    static const struct {
        const char *part;
        int as;
    } fused[] = {{"q_proj", 1},  {"k_proj", 1}, {"v_proj", 1}, {"gate_proj", 2},
                 {"up_proj", 2}, {"w1", 2},     {"w3", 2}};
    const char *dot = strrchr(module, '.'), *part = dot ? dot + 1 : module;
    for (size_t i = 0; i < sizeof fused / sizeof *fused; i++)
        if (strcmp(part, fused[i].part) == 0)
            return fused[i].as;
    return 0;
}

/* Names what a module is a part of: all experts of a layer, or what it is fused with. False: it is
 * alone. */
static bool whole_of(char out[QT_TENSOR_NAME_MAX + 16], const char *module)
{
    const char *experts = strstr(module, ".experts."), *dot = strrchr(module, '.');
    const int as = qt_export_fused_as(module);
    const char *end = experts ? experts : dot ? dot : module;
    snprintf(out, QT_TENSOR_NAME_MAX + 16, "%.*s %d", (int)(end - module), module,
             experts ? 0 : as);
    return experts || as;
}

/* True if a runtime reads the codes of both matrices alike. */
static bool alike(const struct qt_export_matrix *a, const struct qt_export_matrix *b)
{
    static const char *const free[] = {"method", "learn", "g"};
    const struct qt_param *p;
    const bool rows = qt_export_has_rows(a);
    if (a->spec->scheme != b->spec->scheme || rows != qt_export_has_rows(b) ||
        (!rows && a->codes.group != b->codes.group))
        return false;
    for (size_t i = 0; (p = qt_scheme_param(a->spec->scheme, i)) != NULL; i++) {
        bool any = a->spec->value[i] == b->spec->value[i];
        for (size_t k = 0; k < sizeof free / sizeof *free; k++)
            any = any || strcmp(p->key, free[k]) == 0;
        if (!any)
            return false;
    }
    return true;
}

static void warn(const struct qt_export *x, const char *first, const char *second)
{
    qt_log_message(x->opt->log, QT_LOG_WARNING,
                   "%s and %s differ in their schemes: runtimes that put both into one matrix or "
                   "kernel, as vLLM and SGLang do, may refuse this export",
                   first, second);
}

/* Finds the first two parts of a whole that differ, among matrices and copied tensors. */
int qt_export_warn_fused(const struct qt_export *x, struct qt_err *err)
{
    json_t *first = json_object(); /* index of the first matrix of a whole */
    char key[QT_TENSOR_NAME_MAX + 16], module[QT_TENSOR_NAME_MAX];
    int rc = first ? QT_OK : qt_no_memory(err, NULL);
    for (size_t i = 0; i < x->count && rc == QT_OK; i++) {
        const struct qt_export_matrix *m = &x->matrix[i];
        const json_t *found;
        if (!whole_of(key, m->module))
            continue;
        found = json_object_get(first, key);
        if (!found && json_object_set_new(first, key, json_integer((json_int_t)i)) < 0)
            rc = qt_no_memory(err, NULL);
        if (found && !alike(&x->matrix[json_integer_value(found)], m)) {
            warn(x, x->matrix[json_integer_value(found)].module, m->module);
            goto done;
        }
    }
    for (size_t i = 0; i < x->ncopied && rc == QT_OK; i++) {
        if (!qt_export_module(module, x->copied[i]->name) || !whole_of(key, module))
            continue;
        const json_t *found = json_object_get(first, key);
        if (found) {
            warn(x, x->matrix[json_integer_value(found)].module, module);
            goto done;
        }
    }
done:
    json_decref(first);
    return rc;
}
