/*
 * Checks the w4ax tensors of a container against each other (docs/schemes.md, w4ax): linears that
 * share an input must quantize it in the same way, and the rows of a linear must have the order and
 * exponents of the input channels that they produce.
 */
#include "pack/activations/planner.h"

#include <math.h>
#include <string.h>

struct agreement {
    const struct qt_container *c;
    struct qt_act_planner p;       /* only model and inputs are used */
    struct qt_act_plan plan;       /* each input as its first linear quantizes it */
    const struct qt_entry **first; /* [layers][QT_INPUTS] first w4ax linear of each input */
    const struct qt_entry *any;    /* first w4ax linear of the model */
    struct qt_spec spec;           /* its parameters */
};

bool qt_act_same_params(const struct qt_spec *a, const struct qt_spec *b)
{
    struct qt_spec x = *a, y = *b;
    qt_spec_set_method(&x, QT_METHOD_AUTO);
    qt_spec_set_method(&y, QT_METHOD_AUTO);
    return strcmp(x.text, y.text) == 0;
}

static const struct qt_entry *w4ax_of(const struct agreement *a, const struct qt_linear *linear)
{
    const struct qt_entry *e = qt_container_find(a->c, linear->weight);
    return e && qt_entry_is_w4ax(e) ? e : NULL;
}

/* Returns the name of the first section that differs, or NULL. */
static const char *differs(const struct qt_act *a, const struct qt_act *b)
{
    return memcmp(a->order, b->order, a->k * sizeof *a->order) != 0         ? "col_order"
           : memcmp(a->factor, b->factor, a->k * sizeof *a->factor) != 0    ? "col_exp2"
           : memcmp(a->bits, b->bits, qt_ceil_div(a->k, QT_ACT_BLOCK)) != 0 ? "bits"
           : a->clip != b->clip                                             ? "clip"
                                                                            : NULL;
}

static int read_spec(struct qt_spec *out, const struct agreement *a, const struct qt_entry *e,
                     struct qt_err *err)
{
    struct qt_err inner = {0};
    const int rc = qt_spec_read(out, e->spec, &inner);
    return rc < 0 ? qt_fail(err, QT_E_INPUT, qt_container_dir(a->c), e->name, "%s", inner.reason)
                  : QT_OK;
}

static int join_input(struct agreement *a, const struct qt_linear *linear, struct qt_err *err)
{
    const size_t v = linear->layer * QT_INPUTS + (size_t)qt_act_pooled(linear->input);
    const struct qt_entry *e = w4ax_of(a, linear);
    const char *dir = qt_container_dir(a->c);
    struct qt_act_input *in = &a->p.inputs[v];
    struct qt_act own = {0};
    int rc;
    if (in->n && (in->k != 0) != (e != NULL))
        return qt_fail(err, QT_E_INPUT, dir, linear->weight,
                       "either all or none of the linears that share an input must be w4ax");
    in->n += linear->n;
    if (!e)
        return QT_OK;
    struct qt_spec spec;
    QT_TRY(read_spec(&spec, a, e, err));
    if (!a->any) {
        a->any = e;
        a->spec = spec;
    }
    if (!qt_act_same_params(&a->spec, &spec))
        return qt_fail(err, QT_E_INPUT, dir, e->name,
                       "is %s, but '%s' is %s: all w4ax tensors of a model must have the same "
                       "parameters",
                       e->spec, a->any->name, a->any->spec);
    if (in->k && in->k != linear->k)
        return qt_fail(err, QT_E_INPUT, dir, e->name, "has other channels than '%s'",
                       a->first[v]->name);
    in->k = linear->k;
    if (!a->first[v]) {
        a->first[v] = e;
        return qt_act_open(&a->plan.act[v], a->c, e, err);
    }
    QT_TRY(qt_act_open(&own, a->c, e, err));
    const char *what = differs(&own, &a->plan.act[v]);
    if (what)
        rc = qt_fail(err, QT_E_INPUT, dir, e->name,
                     "section '%s' differs from that of '%s', although both share an input", what,
                     a->first[v]->name);
done:
    qt_act_free(&own);
    return rc;
}

static int check_input(const struct agreement *a, size_t layer, int i, struct qt_err *err)
{
    const struct qt_act_input *in = qt_act_input_at(&a->p, layer, i);
    const struct qt_act *act = &a->plan.act[layer * QT_INPUTS + (size_t)i];
    for (size_t c = 0; c < in->k; c++)
        if ((!in->reorder && act->order[c] != c) || (!in->scale && act->factor[c] != 1))
            return qt_fail(err, QT_E_INPUT, qt_container_dir(a->c),
                           a->first[layer * QT_INPUTS + (size_t)i]->name,
                           "input channel %zu is permuted or scaled, but no layer in front of this "
                           "linear produces that order or scale",
                           c);
    return QT_OK;
}

/* Query heads that share a KV head must have its order and exponents. want: the arrangement that
 * qt_act_plan_arrange derives from the last query head of each KV head. */
static int check_heads(const struct agreement *a, const struct qt_linear *linear,
                       const struct qt_arrange *want, struct qt_err *err)
{
    const size_t v = linear->layer * QT_INPUTS + (size_t)qt_act_pooled(linear->feeds);
    const struct qt_act *fed = &a->plan.act[v];
    for (size_t c = 0; c < fed->k; c++) {
        const size_t last = linear->n - linear->feeds_rows;
        const size_t row = last + qt_model_feed_row(a->p.model, linear->feeds, c);
        const size_t from = last + qt_model_feed_row(a->p.model, linear->feeds, fed->order[c]);
        const float factor = linear->feeds_scale ? fed->factor[c] : 1;
        if (want->row_order[row] != from || want->row_factor[row] != factor)
            return qt_fail(
                err, QT_E_INPUT, qt_container_dir(a->c), a->first[v]->name,
                "input channel %zu and a channel of another query head come from the same "
                "value channel, but differ in position or exponent",
                c);
    }
    return QT_OK;
}

static int check_rows(const struct agreement *a, const struct qt_linear *linear, struct qt_err *err)
{
    const struct qt_entry *e = w4ax_of(a, linear);
    struct qt_arrange want = {0};
    uint32_t *order = NULL;
    int8_t *exp2 = NULL;
    int rc;
    if (!e)
        return QT_OK;
    QT_TRY(qt_act_plan_arrange(&want, &a->plan, a->p.model, linear, err));
    if (want.row_order)
        QT_TRY(check_heads(a, linear, &want, err));
    QT_TRY(qt_array_new(&order, e->n, sizeof *order, err));
    QT_TRY(qt_array_new(&exp2, e->n, sizeof *exp2, err));
    QT_TRY(qt_act_section(order, e->n * sizeof *order, a->c, e, "row_order", err));
    QT_TRY(qt_act_section(exp2, e->n, a->c, e, "row_exp2", err));
    for (size_t r = 0; r < e->n; r++) {
        const uint32_t row = want.row_order ? want.row_order[r] : (uint32_t)r;
        const int by = want.row_factor ? -ilogbf(want.row_factor[r]) : 0;
        if (order[r] == row && exp2[r] == by)
            continue;
        rc = qt_fail(err, QT_E_INPUT, qt_container_dir(a->c), e->name,
                     "row %zu is source row %u with exponent %d, but the model requires source row "
                     "%u with exponent %d",
                     r, order[r], exp2[r], row, by);
        goto done;
    }
done:
    qt_act_plan_arrange_free(&want);
    qt_free(order);
    qt_free(exp2);
    return rc;
}

static int check_layer(struct agreement *a, size_t layer, struct qt_err *err)
{
    const struct qt_linear *linear;
    const size_t n = qt_model_linears(&linear, a->p.model, layer);
    int rc = QT_OK;
    for (size_t i = 0; i < n; i++)
        QT_TRY(join_input(a, &linear[i], err));
    qt_act_allow_changes(&a->p, layer);
    for (int i = 0; i < QT_INPUTS; i++)
        QT_TRY(check_input(a, layer, i, err));
    for (size_t i = 0; i < n; i++)
        QT_TRY(check_rows(a, &linear[i], err));
done:
    return rc;
}

/* Each w4ax tensor must be a linear of a decoder layer. *any: the container has w4ax
 * tensors. */
static int check_kinds(bool *any, const struct agreement *a, struct qt_err *err)
{
    *any = false;
    for (size_t i = 0; i < qt_container_count(a->c); i++) {
        const struct qt_entry *e = qt_container_entry(a->c, i);
        if (!qt_entry_is_w4ax(e))
            continue;
        if (qt_model_cannot(a->p.model, QT_USE_W4AX) || !qt_model_is_linear(a->p.model, e->name))
            return qt_fail(err, QT_E_INPUT, qt_container_dir(a->c), e->name,
                           "is w4ax, but is not a linear of a decoder layer");
        *any = true;
    }
    return QT_OK;
}

int qt_act_agree(const struct qt_container *c, const struct qt_model *model, struct qt_err *err)
{
    const size_t layers = qt_model_info(model)->layers;
    struct agreement a = {.c = c, .p = {.model = model}, .plan = {.layers = layers}};
    bool any;
    int rc;
    QT_TRY(check_kinds(&any, &a, err));
    QT_TRY(qt_array_new(&a.p.inputs, layers * QT_INPUTS, sizeof *a.p.inputs, err));
    QT_TRY(qt_array_new(&a.plan.act, layers * QT_INPUTS, sizeof *a.plan.act, err));
    QT_TRY(qt_array_new(&a.first, layers * QT_INPUTS, sizeof *a.first, err));
    for (size_t l = 0; any && l < layers; l++)
        QT_TRY(check_layer(&a, l, err));
done:
    qt_free(a.p.inputs);
    qt_free(a.first);
    qt_act_plan_free(&a.plan);
    return rc;
}
