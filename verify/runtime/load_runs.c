/* Loads a packed matrix with rows of queries, keys and values in turns (struct qt_part, run). */
#include "verify/runtime/load.h"

#include <string.h>

static bool on_strips(const struct qt_part *part)
{
    return part->first % 16 == 0 && part->run % 16 == 0 && part->pitch % 16 == 0;
}

/* A section of a matrix with the rows of the parts, one part after the other. */
static int upload_runs(const void **out, struct qt_runtime *rt, const struct qt_section *s,
                       size_t strip, const struct qt_part *const *parts, size_t count,
                       struct qt_err *err)
{
    const unsigned char *data = s->data;
    char *to = NULL;
    int rc;
    QT_TRY(rt_alloc(rt, &to, s->bytes + 16, 1, err));
    *out = to;
    for (size_t i = 0; i < count; i++)
        for (size_t row = 0; row < parts[i]->n; row += parts[i]->run) {
            const size_t bytes = parts[i]->run / 16 * strip;
            const size_t at = parts[i]->first + row / parts[i]->run * parts[i]->pitch;
            QT_TRY(rt_upload(rt, to, data + at / 16 * strip, bytes, err));
            to += bytes;
        }
done:
    return rc;
}

int rt_load_runs(struct rt_group *out, struct rt_loader *l, const struct qt_entry *entry,
                 const struct qt_part *const *parts, size_t count, struct qt_err *err)
{
    const void *sections[QT_MAX_SECTIONS] = {NULL};
    struct qt_packed packed = {.n = 0};
    struct qtool_matmul_weight *w = &out->linear[0].weight;
    bool aligned = true;
    int rc;
    for (size_t i = 0; i < count; i++)
        aligned = aligned && on_strips(parts[i]);
    QT_TRY(qt_packed_open(&packed, l->container, entry, err));
    if (!aligned || gpu_is_w4ax(&packed) || qt_gpu_weight(w, &packed, sections, NULL) < 0 ||
        w->kind == QTOOL_MATMUL_MIX24)
        QT_TRY(qt_fail(err, QT_E_UNSUPPORTED, NULL, entry->name,
                       "the fused runtime does not support models with queries, keys and values in "
                       "groups of one tensor in this scheme"));
    for (size_t s = 0; s < packed.nsections; s++)
        if (strcmp(packed.section[s].name, "table") == 0) {
            void *table = NULL;
            QT_TRY(rt_alloc(l->rt, &table, packed.section[s].bytes + 16, 1, err));
            QT_TRY(rt_upload(l->rt, table, packed.section[s].data, packed.section[s].bytes, err));
            sections[s] = table;
        } else {
            QT_TRY(upload_runs(&sections[s], l->rt, &packed.section[s],
                               packed.section[s].bytes / (packed.n / 16), parts, count, err));
        }
    QT_TRY(qt_gpu_weight(w, &packed, sections, err));
    out->linears = 1;
    out->linear[0].n = packed.n;
    out->linear[0].k = packed.k;
    for (size_t i = 0, first = 0; i < count; first += parts[i++]->n)
        out->part[i].first = first;
done:
    qt_packed_free(&packed);
    return rc;
}
