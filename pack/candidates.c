/*
 * The errors of candidate schemes. With data, the unquantized model is run layer by layer, and the
 * linears of each input are rounded with all candidates under its Hessian; or the model that is
 * quantized so far is run, and they are rounded with one.
 */
#include "pack/schemes/scheme.h"
#include "pack/sequential.h"

#include <string.h>

struct candidates {
    const struct qt_ckpt *ckpt;
    const struct qt_candidates_options *opt;
    struct qt_packed *rounded;         /* per plan item; NULL: nothing is kept */
    double *error;                     /* [plan items][plans] */
    bool *done;                        /* per plan item: rounded, or not wanted */
    struct qt_weights source, current; /* current: of the model that is run beside the source */
    struct qt_replaced quantized;      /* `current` with in_turn */
    struct qt_model *model;
    struct qt_sequential *seq;
    bool reload; /* rounded linears of the input are not yet in the model that is run */
    const struct qt_linear *linear; /* [count] of the layer */
    size_t count;
    size_t *item; /* [count] plan item */
};

static size_t item_of(const struct candidates *c, const char *name)
{
    const struct qt_plan *plan = &c->opt->plans[c->opt->base];
    const struct qt_plan_item *item = qt_plan_find(plan, name);
    return item ? (size_t)(item - plan->items) : SIZE_MAX;
}

/* ---- the quantized model -------------------------------------------------------------------- */

/* The rounded matrix that takes the place of a tensor; NULL: there is none yet. */
static const struct qt_packed *find_rounded(void *ctx, const char *name)
{
    const struct candidates *c = ctx;
    const size_t i = item_of(c, name);
    return i != SIZE_MAX && c->rounded[i].nsections ? &c->rounded[i] : NULL;
}

/* ---- one input ------------------------------------------------------------------------------ */

/* True if linear l has this input and is yet to be rounded. */
static bool reads(const struct candidates *c, size_t l, int input)
{
    return c->linear[l].input == input && !c->done[c->item[l]];
}

/* Rounds item i with one candidate. factor and place: NULL: without a Hessian. */
static int round_item(struct candidates *c, size_t i, size_t candidate, struct qt_factor *factor,
                      const struct qt_place *place, struct qt_err *err)
{
    const struct qt_candidates_options *o = c->opt;
    const struct qt_plan_item *item = &o->plans[candidate].items[i];
    const struct qt_tensor *t = item->tensor;
    const bool kept = c->rounded && candidate == o->base;
    struct qt_solve_report report = {0};
    struct qt_packed packed = {0};
    struct qt_blob blob = {0};
    struct qt_error e = {0};
    int rc;
    if (o->interrupted && o->interrupted())
        return qt_fail(err, QT_E_INTERRUPTED, NULL, NULL, "interrupted");
    QT_TRY(qt_ckpt_read(&blob, c->ckpt, t, err));
    const struct qt_matrix w = {blob.data, t->dtype, t->shape[0], t->shape[1], t->file, t->name};
    QT_TRY(qt_packed_round(&packed, &item->packed->spec, &w, factor, o->backend, place, NULL,
                           &report, err));
    if (kept || !factor)
        QT_TRY(qt_packed_complete(&packed, &w, factor ? NULL : &e, err));
    if (factor)
        c->error[i * o->count + candidate] = report.after_descent;
    else
        c->error[i * o->count + candidate] = e.sum_w2 > 0 ? e.sum_e2 / e.sum_w2 : 0;
    if (kept) {
        c->rounded[i] = packed;
        packed = (struct qt_packed){0};
    }
done:
    qt_packed_free(&packed);
    qt_blob_free(&blob);
    return rc;
}

static int round_linear(struct candidates *c, size_t l, size_t candidate, struct qt_factor *factor,
                        bool on_backend, struct qt_err *err)
{
    struct qt_place place = {0};
    if (on_backend && factor)
        place = qt_sequential_place(c->seq, c->linear[l].weight);
    if (!c->opt->in_turn)
        place.rounded = NULL;
    c->reload |= c->opt->in_turn && !place.rounded;
    return round_item(c, c->item[l], candidate, factor, &place, err);
}

/* Rounds the linears with this input with one candidate. The factor of the candidate before is
 * reused if the group size is the same. */
static int round_input(struct candidates *c, struct qt_factor *f, int input, size_t candidate,
                       const struct qt_observed *seen, struct qt_err *err)
{
    const struct qt_candidates_options *o = c->opt;
    bool factored = true;
    int rc = QT_OK;
    for (size_t l = 0; l < c->count && rc == QT_OK; l++) {
        struct qt_err inner = {0};
        if (!reads(c, l, input))
            continue;
        rc = qt_observed_factor(f, seen, o->plans[candidate].items[c->item[l]].packed, o->backend,
                                &inner);
        factored = rc == QT_OK;
        if (rc < 0 && rc != QT_E_UNSUPPORTED)
            return qt_fail(err, inner.status, NULL, NULL, "%s", inner.reason);
        rc = round_linear(c, l, candidate, factored ? f : NULL, seen->on_backend, err);
    }
    return rc;
}

static bool stays_on_backend(const struct candidates *c, int input)
{
    const struct qt_candidates_options *o = c->opt;
    bool all = !o->backend->host;
    for (size_t l = 0; l < c->count; l++)
        for (size_t p = 0; p < o->count && reads(c, l, input); p++)
            all = all && qt_packed_rounds_on(o->plans[p].items[c->item[l]].packed, o->backend);
    return all;
}

static int try_input(struct candidates *c, int input, struct qt_err *err)
{
    struct qt_observed seen;
    struct qt_factor f = {0};
    int rc;
    c->reload = false;
    QT_TRY(qt_sequential_observe(&seen, c->seq, input, NULL, stays_on_backend(c, input), err));
    for (size_t p = 0; p < c->opt->count; p++)
        QT_TRY(round_input(c, &f, input, p, &seen, err));
    for (size_t l = 0; l < c->count; l++)
        c->done[c->item[l]] |= c->linear[l].input == input;
    if (c->reload)
        rc = qt_sequential_reload(c->seq, input, &c->current, err);
done:
    qt_factor_free(&f);
    return rc;
}

/* ---- all layers ----------------------------------------------------------------------------- */

static int find_items(struct candidates *c, size_t layer, struct qt_err *err)
{
    int rc;
    c->count = qt_model_linears(&c->linear, c->model, layer);
    qt_free(c->item);
    QT_TRY(qt_array_new(&c->item, c->count, sizeof *c->item, err));
    for (size_t l = 0; l < c->count; l++) {
        c->item[l] = item_of(c, c->linear[l].weight);
        if (c->item[l] == SIZE_MAX)
            return qt_fail(err, QT_E_INTERNAL, NULL, c->linear[l].weight, "is not in the plan");
    }
done:
    return rc;
}

static int try_layer(struct candidates *c, size_t layer, struct qt_err *err)
{
    const bool last = layer + 1 == qt_model_info(c->model)->layers;
    const int end = (int)qt_model_inputs(c->model, layer) - 1;
    int rc;
    QT_TRY(find_items(c, layer, err));
    QT_TRY(qt_sequential_enter(c->seq, layer, &c->current, err));
    for (int input = 0; input <= end; input++) {
        bool any = false;
        for (size_t l = 0; l < c->count; l++)
            any |= reads(c, l, input);
        if (any)
            QT_TRY(try_input(c, input, err));
        if (input < end ? qt_model_ends_sublayer(c->model, layer, input) : !last)
            QT_TRY(qt_sequential_advance(c->seq, input, err));
    }
done:
    return rc;
}

static int try_layers(struct candidates *c, struct qt_err *err)
{
    const size_t layers = qt_model_info(c->model)->layers;
    const char *what = c->opt->in_turn ? "choice" : "errors";
    int rc;
    c->quantized = (struct qt_replaced){.source = c->source, .find = find_rounded, .ctx = c};
    c->current = c->opt->in_turn ? qt_weights_replaced(&c->quantized) : c->source;
    QT_TRY(qt_sequential_open(&c->seq, &c->source, &c->current, c->opt->data, NULL, err));
    for (size_t layer = 0; layer < layers; layer++) {
        qt_log_progress(c->opt->log, what, (double)layer, (double)layers);
        QT_TRY(try_layer(c, layer, err));
    }
    qt_log_progress(c->opt->log, what, (double)layers, (double)layers);
done:
    return rc;
}

/* True if all candidates for an item compensate for errors under a Hessian. */
static bool needs_hessian(const struct candidates *c, size_t i)
{
    bool all = c->opt->data;
    for (size_t p = 0; p < c->opt->count && all; p++)
        all = qt_spec_method(&c->opt->plans[p].items[i].packed->spec) == QT_METHOD_GPTQ;
    return all;
}

/* later[plan items]: true for wanted linears of the decoder layers that get a Hessian. */
static int find_linears(bool *later, bool *any, struct candidates *c, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t layer = 0; layer < qt_model_info(c->model)->layers; layer++) {
        QT_TRY(find_items(c, layer, err));
        for (size_t l = 0; l < c->count; l++)
            if (c->opt->wanted[c->item[l]] && needs_hessian(c, c->item[l]))
                *any = later[c->item[l]] = true;
    }
done:
    return rc;
}

int qt_candidates(double *error, struct qt_packed *rounded, const struct qt_ckpt *ckpt,
                  const struct qt_candidates_options *opt, struct qt_err *err)
{
    struct candidates c = {.ckpt = ckpt,
                           .opt = opt,
                           .rounded = rounded,
                           .error = error,
                           .source = qt_weights_of_ckpt(ckpt)};
    const size_t items = opt->plans[0].count;
    bool *later = NULL, any = false;
    int rc;
    QT_TRY(qt_array_new(&later, items, sizeof *later, err));
    QT_TRY(qt_array_new(&c.done, items, sizeof *c.done, err));
    if (opt->data) {
        QT_TRY(qt_model_open(&c.model, &c.source, err));
        QT_TRY(find_linears(later, &any, &c, err));
    }
    for (size_t i = 0; i < items; i++) {
        for (size_t p = 0; p < opt->count && opt->wanted[i] && !later[i]; p++)
            QT_TRY(round_item(&c, i, p, NULL, NULL, err));
        c.done[i] = !later[i];
        if (!any)
            qt_log_progress(opt->log, "errors", (double)(i + 1), (double)items);
    }
    if (any)
        QT_TRY(try_layers(&c, err));
done:
    qt_free(later);
    qt_free(c.done);
    qt_free(c.item);
    qt_sequential_close(c.seq);
    qt_model_close(c.model);
    return rc;
}
