/* Loads the inputs of single layers (model/graph/per_layer.c). */
#include "verify/runtime/load.h"

int rt_load_inputs(struct rt_loader *l, const struct qt_outer *outer, struct qt_err *err)
{
    struct qt_runtime *rt = l->rt;
    const size_t rows = qt_min_size(outer->inputs.n, rt->config.vocab), k = outer->inputs.k;
    struct qt_part known = outer->inputs;
    char *table = NULL;
    int rc;
    known.n = rows;
    QT_TRY(rt_alloc(rt, &table, rt->config.vocab * k, 2, err));
    QT_TRY(rt_upload_rows(table, l, &known, err));
    for (size_t i = rows; i < rt->config.vocab; i++)
        QT_TRY(rt->gpu->copy(rt->gpu, table + i * k * 2, table, k * 2, err));
    rt->inputs = table;
    rt->inputs_project = (struct rt_linear){.n = k, .k = rt->config.hidden};
    QT_TRY(rt_load_table(&rt->inputs_project.dense, l, &outer->inputs_project, err));
    QT_TRY(rt_load_norm(&rt->inputs_norm, l, &outer->inputs_norm, outer->norm, NULL, err));
    rt->inputs_norm.eps *= (float)rt->config.hidden; /* the projection is not divided by its root */
done:
    return rc;
}

int rt_load_layer_inputs(struct rt_layer *out, struct rt_loader *l, const struct qt_block *b,
                         enum qt_norm_kind kind, struct qt_err *err)
{
    const struct qt_part *const gate[] = {&b->input_gate}, *const to[] = {&b->input_out};
    int rc;
    QT_TRY(rt_load_norm(&out->input_norm, l, &b->input_norm, kind, NULL, err));
    QT_TRY(rt_load_group(&out->input_gate, l, gate, 1, NULL, err));
    QT_TRY(rt_load_group(&out->input_out, l, to, 1, NULL, err));
done:
    return rc;
}
