/*
 * Calibrated quantization, decoder layer by decoder layer and input by input: observes the linear
 * input with the quantized linears before it, quantizes the linears with this input, and moves the
 * hidden states on through the dequantized weights. With a calibration file it only quantizes.
 */
#include "pack/run.h"
#include "pack/sequential.h"

#include <string.h>

/* Experts with fewer tokens than their Hessians need. */
struct undersampled {
    size_t experts, fewest_tokens;
};

/* Unfinished linears with an input, and how many of them need a Hessian. */
struct pending {
    size_t all, with_hessian;
};

/* The linears of one decoder layer while they are quantized. */
struct layer_run {
    struct qt_run *run;
    const struct qt_model *model;
    struct qt_comm *comm; /* ranks that share the linears of an input; NULL: one does all */
    const struct qt_linear *linear;
    size_t count;
    size_t *item;             /* plan item of each */
    struct qt_packed *packed; /* of quantized items */
    struct pending *pending;  /* by input */
    struct undersampled *undersampled;
    bool *counted; /* experts of the sublayer: in `undersampled` */
    struct qt_run_waiting waiting;
    struct qt_sequential *seq; /* NULL if the statistics come from a file */
    json_t *distribution;      /* of the current input; NULL: unknown */
    bool reload;               /* weights of the current input are not in the backend's memory */
};

/* ---- the layer's current weights ------------------------------------------------------------ */

/* The linears of this layer are in memory. Other matrices, such as a router, may be quantized
 * too. */
static const struct qt_packed *find_packed(void *ctx, const char *name)
{
    const struct layer_run *l = ctx;
    for (size_t i = 0; i < l->count; i++)
        if (l->packed[i].nsections && strcmp(l->linear[i].weight, name) == 0)
            return &l->packed[i];
    return NULL;
}

/* ---- resuming ------------------------------------------------------------------------------- */

/* Finds the layer's items and reads back those that are finished; l->pending counts the others. */
static int find_items(struct layer_run *l, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0; i < l->count; i++) {
        QT_TRY(qt_run_find_item(&l->item[i], l->run, l->linear[i].weight, err));
        if (l->run->plan.items[l->item[i]].copied)
            continue;
        if (l->run->made[l->item[i]])
            QT_TRY(qt_run_read_back(&l->packed[i], l->run, l->item[i], err));
        else {
            struct pending *p = &l->pending[l->linear[i].input];
            p->all++;
            p->with_hessian +=
                qt_spec_method(&l->run->plan.items[l->item[i]].packed->spec) == QT_METHOD_GPTQ;
        }
    }
done:
    return rc;
}

/* ---- quantizing ----------------------------------------------------------------------------- */

/* True for the first of the linears with an input, whose entry describes the input. */
static bool is_first(const struct layer_run *l, size_t i)
{
    for (size_t j = 0; j < i; j++)
        if (l->linear[j].input == l->linear[i].input && !l->run->plan.items[l->item[j]].copied)
            return false;
    return true;
}

/* A linear whose rows are shared out among the ranks. */
struct shared {
    size_t linear;             /* index */
    size_t *end;               /* [ranks] as in qt_run_divide */
    struct qt_packed_part own; /* the rows of this rank */
    bool in_place;             /* the rounded weights are where the layer has them */
    int scale_exp2;
    struct qt_run_item *item; /* own rows, while others round the rest; NULL: none, or finished */
};

/* The linears with an input. */
struct group {
    size_t n;
    struct shared *linear; /* [n] */
    size_t *end;           /* [n][ranks] */
};

static void group_free(struct group *g)
{
    for (size_t i = 0; i < g->n; i++) {
        qt_run_item_free(NULL, g->linear[i].item);
        qt_free(g->linear[i].own.panels);
    }
    qt_free(g->linear);
    qt_free(g->end);
}

static const struct qt_plan_item *item_of(const struct layer_run *l, size_t i)
{
    return &l->run->plan.items[l->item[i]];
}

static bool is_divided(const struct shared *s, size_t n)
{
    return s->own.end - s->own.first < n;
}

/* Lists the linears with this input that are not finished, and shares them out among the ranks of
 * l->comm. The caller frees *g, also after an error. */
static int group_new(struct group *g, const struct layer_run *l, int input, struct qt_err *err)
{
    const struct qt_backend *be = l->run->opt->calibration->backend;
    const size_t ranks = qt_comm_size(l->comm), rank = qt_comm_rank(l->comm);
    size_t *rows = NULL, *unit = NULL;
    int rc;
    QT_TRY(qt_array_new(&g->linear, l->count, sizeof *g->linear, err));
    QT_TRY(qt_array_new(&g->end, l->count, ranks * sizeof *g->end, err));
    QT_TRY(qt_array_new(&rows, l->count, sizeof *rows, err));
    QT_TRY(qt_array_new(&unit, l->count, sizeof *unit, err));
    for (size_t i = 0; i < l->count; i++)
        if (l->linear[i].input == input && !item_of(l, i)->copied && !l->run->made[l->item[i]]) {
            const struct qt_packed *p = item_of(l, i)->packed;
            rows[g->n] = l->linear[i].n;
            unit[g->n] = qt_run_unit(p, be);
            g->linear[g->n++].linear = i;
        }
    QT_TRY(qt_run_divide(g->end, rows, unit, g->n, ranks, err));
    for (size_t i = 0; i < g->n; i++) {
        struct shared *s = &g->linear[i];
        s->end = g->end + i * ranks;
        s->own.first = rank ? s->end[rank - 1] : 0;
        s->own.end = s->end[rank];
        QT_TRY(qt_array_new(&s->own.panels, qt_ceil_div(rows[i], QT_PANEL_ROWS),
                            sizeof *s->own.panels, err));
    }
done:
    qt_free(rows);
    qt_free(unit);
    return rc;
}

/* Prepares this rank's rows of a linear, and rounds them if none of the others can be rounded at
 * the same time. */
static int quantize_linear(struct shared *s, struct layer_run *l, const struct qt_observed *seen,
                           struct qt_err *err)
{
    struct qt_factor *f = &l->waiting.current;
    const size_t i = s->linear;
    const struct qt_plan_item *item = item_of(l, i);
    struct qt_run_hessian hessian = {
        .is_expert = qt_model_expert(l->model, l->linear[i].layer, l->linear[i].input) >= 0,
        .routed_tokens = seen->routed_tokens,
        .missing_tokens = seen->missing_tokens,
        .input = is_first(l, i) ? l->distribution : NULL};
    const bool divided = is_divided(s, l->linear[i].n);
    struct qt_arrange arrange;
    struct qt_err inner = {0};
    char why[sizeof inner.reason + 32] = "";
    struct qt_place place = {0};
    int rc = QT_OK;
    QT_TRY(qt_act_plan_arrange(&arrange, &l->run->acts, l->model, &l->linear[i], err));
    if (qt_spec_method(&item->packed->spec) == QT_METHOD_GPTQ) {
        if (f->k && f->group_size != qt_packed_group(item->packed)) /* is replaced */
            QT_TRY(qt_run_round_waiting(&l->waiting, err));
        rc = qt_observed_factor(f, seen, item->packed, l->run->opt->calibration->backend, &inner);
        if (rc == QT_OK)
            hessian.factor = f;
        else if (rc == QT_E_UNSUPPORTED)
            rc = qt_run_fall_back(why, sizeof why, l->run, item->tensor, inner.reason, err);
        else
            rc = qt_fail(err, inner.status, NULL, NULL, "%s", inner.reason);
        if (rc < 0)
            goto done;
    }
    hessian.fallback = *why ? why : NULL;
    if (seen->on_backend && hessian.factor)
        place = qt_sequential_place(l->seq, l->linear[i].weight);
    s->in_place = place.rounded != NULL;
    QT_TRY(qt_run_item_new(&s->item, l->run, l->item[i], &hessian, arrange.input ? &arrange : NULL,
                           &place, divided ? &s->own : NULL, err));
    s->scale_exp2 = qt_run_item_packed(s->item)->scale_exp2;
    if (divided)
        QT_TRY(qt_run_items_round(&s->item, 1, err));
    else {
        struct qt_run_item *whole = s->item;
        s->item = NULL;
        rc = qt_run_wait(&l->waiting, whole, s->in_place ? NULL : &l->packed[i], err);
    }
done:
    qt_act_plan_arrange_free(&arrange);
    return rc;
}

static int quantize_own(struct layer_run *l, struct group *g, const struct qt_observed *seen,
                        struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0; i < g->n && rc == QT_OK; i++) {
        if (g->linear[i].own.first == g->linear[i].own.end)
            continue;
        rc = qt_run_check_interrupted(l->run, err);
        if (rc == QT_OK)
            rc = quantize_linear(&g->linear[i], l, seen, err);
    }
    qt_run_leave_input(&l->waiting);
    return rc;
}

/* Lets all ranks know where and how the others have rounded. */
static int gather_kinds(const struct layer_run *l, struct group *g, struct qt_err *err)
{
    struct kind {
        bool in_place;
        int scale_exp2;
    } *all = NULL, *own = NULL;
    int rc;
    QT_TRY(qt_array_new(&own, g->n, sizeof *own, err));
    QT_TRY(qt_array_new(&all, qt_comm_size(l->comm), g->n * sizeof *all, err));
    for (size_t i = 0; i < g->n; i++)
        own[i] = (struct kind){g->linear[i].in_place, g->linear[i].scale_exp2};
    QT_TRY(qt_comm_gather(l->comm, all, own, g->n * sizeof *all, err));
    for (size_t i = 0; i < g->n; i++) {
        const struct kind *first = &all[qt_run_first_rank(g->linear[i].end) * g->n + i];
        g->linear[i].in_place = first->in_place;
        g->linear[i].scale_exp2 = first->scale_exp2;
    }
done:
    qt_free(all);
    qt_free(own);
    return rc;
}

/* *report = E of all rows. */
static int join_reports(struct qt_solve_report *report, const struct shared *s, size_t n,
                        struct qt_comm *comm, struct qt_err *err)
{
    size_t *end = NULL;
    int rc = qt_comm_meet(comm, qt_array_new(&end, comm->size, sizeof *end, err), err);
    *report = (struct qt_solve_report){0};
    for (size_t r = 0; r < comm->size && rc == QT_OK; r++)
        end[r] = qt_ceil_div(s->end[r], QT_PANEL_ROWS) * sizeof *s->own.panels;
    if (rc == QT_OK)
        rc = qt_comm_join(comm, s->own.panels, end, err);
    for (size_t i = 0; i < qt_ceil_div(n, QT_PANEL_ROWS); i++)
        qt_solve_add(report, &s->own.panels[i]);
    qt_free(end);
    return rc;
}

/* Gives all ranks the rows that the others have rounded in place. */
static int share_rounded(struct layer_run *l, const struct shared *s, struct qt_err *err)
{
    struct qt_backend *be = l->run->opt->calibration->backend;
    const struct qt_linear *linear = &l->linear[s->linear];
    float *rounded = qt_sequential_place(l->seq, linear->weight).rounded;
    int rc = QT_OK;
    for (size_t r = 0, at = 0; r < l->comm->size && rc == QT_OK; at = s->end[r++])
        if (s->end[r] > at)
            rc = qt_comm_broadcast_on(l->comm, be, rounded + at * linear->k,
                                      (s->end[r] - at) * linear->k * sizeof *rounded, r, err);
    return rc;
}

/* Joins the rows of a linear. The first rank stores it, unless it has rounded all rows. */
static int share_linear(struct layer_run *l, struct shared *s, struct qt_err *err)
{
    const size_t first = qt_run_first_rank(s->end), n = l->linear[s->linear].n;
    const bool divided = s->end[first] < n;
    struct qt_packed *kept = s->in_place ? NULL : &l->packed[s->linear];
    const struct qt_packed *mine = kept;
    struct qt_run_item *item = s->item;
    struct qt_solve_report report;
    int rc = QT_OK;
    if (divided)
        QT_TRY(join_reports(&report, s, n, l->comm, err));
    if (s->in_place)
        QT_TRY(share_rounded(l, s, err));
    if (item)
        mine = qt_run_item_packed(item);
    else if (!kept)
        mine = item_of(l, s->linear)->packed; /* without data, of which this rank has none */
    else if (!kept->nsections)
        rc = qt_run_packed_new(kept, l->run, l->item[s->linear], s->scale_exp2, err);
    QT_TRY(qt_comm_meet(l->comm, rc, err));
    if (divided || kept)
        QT_TRY(qt_run_join_packed(mine, l->comm, s->end, kept, err));
    s->item = NULL;
    if (divided && first == l->comm->rank)
        rc = qt_run_item_finish(kept, item, &report, err);
    else
        qt_run_item_free(kept, item);
done:
    return rc;
}

/* Gives all ranks what the others have rounded: the weights that are in place, and the packed
 * matrices of the others. */
static int share_group(struct layer_run *l, struct group *g, struct qt_err *err)
{
    int rc;
    QT_TRY(gather_kinds(l, g, err));
    for (size_t i = 0; i < g->n; i++) {
        l->reload |= !g->linear[i].in_place;
        rc = qt_comm_meet(l->comm, share_linear(l, &g->linear[i], err), err);
        if (rc < 0)
            return rc;
    }
    if (l->reload)
        rc = qt_run_exchange(l->run, QT_OK, err);
done:
    return rc;
}

static size_t width_of(const struct layer_run *l, int input)
{
    size_t i = 0;
    while (l->linear[i].input != input)
        i++;
    return l->linear[i].k;
}

/* Quantizes the linears with this input, shared among the ranks of l->comm. Some may then wait to
 * be rounded, unless others share them. */
static int quantize_linears(struct layer_run *l, int input, const struct qt_observed *seen,
                            struct qt_err *err)
{
    const bool shared = qt_comm_size(l->comm) > 1;
    struct group g = {0};
    int rc = QT_OK;
    if (seen->channels)
        rc = qt_run_input_distribution(&l->distribution, seen->channels, width_of(l, input), err);
    if (rc == QT_OK && shared &&
        l->run->behind) /* has finished the items before, while this input was observed */
        rc = qt_run_exchange(l->run, QT_OK, err);
    if (rc == QT_OK)
        rc = group_new(&g, l, input, err);
    if (rc == QT_OK)
        rc = quantize_own(l, &g, seen, err);
    if (rc == QT_OK && shared)
        rc = qt_run_round_waiting(&l->waiting, err);
    QT_TRY(qt_comm_meet(l->comm, rc, err));
    if (shared)
        QT_TRY(share_group(l, &g, err));
    for (size_t i = 0; i < g.n; i++)
        l->reload |= !g.linear[i].in_place;
done:
    json_decref(l->distribution);
    l->distribution = NULL;
    group_free(&g);
    return rc;
}

/* ---- one decoder layer ---------------------------------------------------------------------- */

/* True if the sums of an input can stay on the backend, because all linears with it are rounded
 * there. */
static bool stays_on_backend(const struct layer_run *l, int input)
{
    const struct qt_backend *be = l->run->opt->calibration->backend;
    bool all = !be->host;
    for (size_t i = 0; i < l->count; i++) {
        const struct qt_plan_item *item = &l->run->plan.items[l->item[i]];
        if (l->linear[i].input == input && !item->copied)
            all = all && qt_packed_rounds_on(item->packed, be);
    }
    return all;
}

/* Sets seen->missing_tokens of an expert. Counts an expert of a sublayer once, whichever of its
 * inputs has too few tokens. all: tokens of the data. */
static void count_undersampled(struct qt_observed *seen, struct layer_run *l, size_t layer,
                               int input, size_t k, size_t all)
{
    const int expert = qt_model_expert(l->model, layer, input);
    const size_t routed = seen->routed_tokens, needed = QT_MIN_TOKENS_PER_CHANNEL * k;
    struct undersampled *u = l->undersampled;
    if (expert < 0 || routed >= needed || routed == all) /* no tokens left to add */
        return;
    seen->missing_tokens = needed - routed;
    if (l->counted[expert])
        return;
    u->fewest_tokens = u->experts ? qt_min_size(u->fewest_tokens, routed) : routed;
    u->experts++;
    l->counted[expert] = true;
}

/* Takes H from a calibration file. */
static int quantize_from_file(struct layer_run *l, size_t layer, int input, struct qt_err *err)
{
    const struct qt_qcal *file = l->run->opt->calibration->file;
    const struct qt_qcal_info *info = qt_qcal_info(file);
    const size_t k = info->layer[layer].k[input], experts = info->layer[layer].experts;
    const int expert = qt_model_expert(l->model, layer, input);
    struct qt_observed seen = {.routed_tokens = info->tokens};
    uint32_t *routed = NULL;
    struct qt_channels c = {0};
    double *h = NULL;
    int rc;
    if (expert >= 0) {
        QT_TRY(qt_array_new(&routed, experts, sizeof *routed, err));
        QT_TRY(qt_qcal_routed(routed, file, layer, err));
        seen.routed_tokens = routed[expert];
        count_undersampled(&seen, l, layer, input, k, info->tokens);
    }
    QT_TRY(qt_array_new(&h, k, k * sizeof *h, err));
    QT_TRY(qt_qcal_channels(&c, file, layer, (size_t)input, err));
    QT_TRY(qt_qcal_hessian(h, file, layer, (size_t)input, c.sum2, err));
    seen.h = h;
    seen.channels = &c;
    QT_TRY(quantize_linears(l, input, &seen, err));
    QT_TRY(qt_run_round_waiting(&l->waiting, err));
done:
    qt_free(routed);
    qt_channels_free(&c);
    qt_free(h);
    return rc;
}

/* A linear input, in the order in which a layer is quantized. */
struct step {
    int input;
    bool together; /* the next one does not depend on its linears */
};

/* Inputs are in order of use, but those of TURN / 2 experts take turns: first what each of them
 * reads, then what is behind. So small matrices can be rounded together. Ranks share the linears of
 * one input at a time. */
static int order_inputs(struct step **out, const struct layer_run *l, size_t layer,
                        struct qt_err *err)
{
    enum { TURN = 32 };
    const int inputs = (int)qt_model_inputs(l->model, layer);
    const bool alone = qt_comm_size(l->comm) == 1;
    size_t n = 0;
    int rc = qt_array_new(out, (size_t)inputs, sizeof **out, err);
    for (int first = 0, end; rc == QT_OK && first < inputs; first = end) {
        end = first + 1;
        while (alone && end < inputs && end - first < TURN &&
               qt_model_expert(l->model, layer, first) >= 0 &&
               !qt_model_ends_sublayer(l->model, layer, end - 1))
            end++;
        for (int behind = 0; behind < 2; behind++)
            for (int i = first + behind; i < end; i += 2)
                (*out)[n++] = (struct step){i, i + 2 < end};
    }
    return rc;
}

static int quantize_input(struct layer_run *l, struct qt_sequential *seq, size_t layer,
                          const struct step *step, const struct qt_weights *current,
                          struct qt_err *err)
{
    const struct qt_calibration *data = l->run->opt->calibration;
    const int input = step->input;
    struct qt_observed seen = {0};
    int rc = QT_OK;
    if (l->pending[input].with_hessian) {
        QT_TRY(qt_sequential_observe(&seen, seq, input,
                                     qt_act_plan_find(&l->run->acts, layer, input),
                                     stays_on_backend(l, input), err));
        count_undersampled(&seen, l, layer, input, seen.k, data->samples * data->seqlen);
    }
    l->reload = false;
    if (l->pending[input].all)
        QT_TRY(quantize_linears(l, input, &seen, err));
    if (l->reload || !step->together)
        QT_TRY(qt_run_round_waiting(&l->waiting, err));
    if (l->reload)
        QT_TRY(qt_sequential_reload(seq, input, current, err));
done:
    return rc;
}

static int quantize_and_advance(struct layer_run *l, struct qt_sequential *seq, size_t layer,
                                struct qt_err *err)
{
    struct qt_replaced made = {.source = qt_run_weights(l->run), .find = find_packed, .ctx = l};
    const struct qt_weights current = qt_weights_replaced(&made);
    const struct qt_model_info *info = qt_model_info(l->model);
    const bool last = layer + 1 == info->layers;
    const int end = (int)qt_model_inputs(l->model, layer) - 1;
    struct step *steps = NULL;
    int rc;
    QT_TRY(order_inputs(&steps, l, layer, err));
    QT_TRY(qt_sequential_enter(seq, layer, &current, err));
    for (int i = 0; i <= end; i++) {
        const int input = steps[i].input;
        QT_TRY(quantize_input(l, seq, layer, &steps[i], &current, err));
        if (input < end ? !qt_model_ends_sublayer(l->model, layer, input) : last)
            continue;
        QT_TRY(qt_sequential_advance(seq, input, err));
        memset(l->counted, 0, info->experts);
    }
done:
    qt_free(steps);
    return rc;
}

/* seq is NULL if the statistics come from a file. */
static int run_layer(struct qt_run *run, const struct qt_model *model, struct qt_sequential *seq,
                     size_t layer, struct undersampled *undersampled, struct qt_err *err)
{
    struct layer_run l = {.run = run,
                          .model = model,
                          .comm = seq ? run->opt->comm : NULL,
                          .undersampled = undersampled,
                          .seq = seq};
    const int inputs = (int)qt_model_inputs(model, layer);
    int rc;
    l.count = qt_model_linears(&l.linear, model, layer);
    QT_TRY(qt_array_new(&l.item, l.count, sizeof *l.item, err));
    QT_TRY(qt_array_new(&l.packed, l.count, sizeof *l.packed, err));
    QT_TRY(qt_array_new(&l.pending, (size_t)inputs, sizeof *l.pending, err));
    QT_TRY(qt_array_new(&l.counted, qt_model_info(model)->experts, sizeof *l.counted, err));
    QT_TRY(find_items(&l, err));
    if (seq)
        QT_TRY(quantize_and_advance(&l, seq, layer, err));
    for (int input = 0; !seq && input < inputs; input++)
        if (l.pending[input].all)
            QT_TRY(quantize_from_file(&l, layer, input, err));
done:
    qt_run_waiting_free(&l.waiting);
    for (size_t i = 0; l.packed && i < l.count; i++) {
        if (l.packed[i].nsections) { /* the background thread may still read it */
            const int settled = qt_run_settle(run, rc < 0 ? NULL : err);
            rc = rc < 0 ? rc : settled;
        }
        qt_packed_free(&l.packed[i]);
    }
    qt_free(l.packed);
    qt_free(l.item);
    qt_free(l.pending);
    qt_free(l.counted);
    return rc;
}

/* is_linear: per plan item, true for the linears of decoder layers. */
static int find_linears(bool **is_linear, const struct qt_run *run, const struct qt_model *model,
                        struct qt_err *err)
{
    const struct qt_linear *linear;
    int rc = qt_array_new(is_linear, run->plan.count, sizeof **is_linear, err);
    for (size_t layer = 0; layer < qt_model_info(model)->layers; layer++)
        for (size_t i = 0, item, n = qt_model_linears(&linear, model, layer); i < n && rc == QT_OK;
             i++) {
            rc = qt_run_find_item(&item, run, linear[i].weight, err);
            if (rc == QT_OK)
                (*is_linear)[item] = true;
        }
    return rc;
}

/* Checks --strict before hours of work. Embeddings, the head and matrices that the architecture
 * does not know have no Hessian. */
static int check_strict(const struct qt_run *run, const bool *is_linear, struct qt_err *err)
{
    const struct qt_plan *plan = &run->plan;
    int rc = QT_OK;
    for (size_t i = 0; i < plan->count && rc == QT_OK && run->opt->strict; i++)
        if (!plan->items[i].copied && !is_linear[i] &&
            qt_spec_method(&plan->items[i].packed->spec) == QT_METHOD_GPTQ)
            rc = qt_run_fall_back(NULL, 0, run, plan->items[i].tensor, QT_NO_HESSIAN, err);
    return rc;
}

/* Makes all other tensors first, because the inputs of linears depend on the quantized embedding
 * and routers. */
static int quantize_others(struct qt_run *run, const bool *is_linear, struct qt_err *err)
{
    bool *later;
    int rc = qt_array_new(&later, run->plan.count, sizeof *later, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < run->plan.count; i++)
        later[i] = is_linear[i];
    rc = qt_run_make_items(run, later, err);
    qt_free(later);
    return rc;
}

/* Loads the plan of an interrupted run, or makes a new one. */
static int make_activations(struct qt_run *run, const struct qt_model *model,
                            const struct qt_weights *source, struct qt_err *err)
{
    bool found;
    int rc = qt_act_plan_load(&found, &run->acts, &run->plan, model, run->writer, run->opt->out_dir,
                              err);
    if (rc < 0 || found)
        return rc;
    rc = qt_act_plan_new(&run->acts, &run->plan, model, source, run->opt, err);
    if (rc == QT_E_INTERRUPTED)
        return qt_fail(err, rc, run->opt->out_dir, NULL,
                       "interrupted while the precision of activations was being chosen");
    return rc == QT_OK && run->acts.act ? qt_act_plan_save(&run->acts, run->writer, err) : rc;
}

/* Rank 0 makes the plan; the others then find it beside the journal. */
static int plan_activations(struct qt_run *run, const struct qt_model *model,
                            const struct qt_weights *source, struct qt_err *err)
{
    struct qt_comm *comm = run->opt->comm;
    const bool waits = qt_comm_rank(comm) > 0;
    int rc = waits ? qt_comm_meet(comm, QT_OK, err) : QT_OK;
    if (rc == QT_OK)
        rc = make_activations(run, model, source, err);
    return waits ? rc : qt_comm_meet(comm, rc, err);
}

/* A Hessian of too few tokens overfits them. KL divergence of a tiny Llama, nf4, with 1, 2, 4 and 8
 * tokens per channel: 0.104, 0.078, 0.066, 0.058; without data 0.080. */
static void warn_of_small_data(const struct qt_run *run, const bool *is_linear, size_t tokens)
{
    size_t widest = 0;
    for (size_t i = 0; i < run->plan.count; i++) {
        const struct qt_packed *p = run->plan.items[i].packed;
        if (is_linear[i] && !run->plan.items[i].copied && p->k > widest &&
            qt_spec_method(&p->spec) == QT_METHOD_GPTQ)
            widest = p->k;
    }
    if (tokens / QT_MIN_TOKENS_PER_CHANNEL < widest)
        qt_log_message(
            run->opt->log, QT_LOG_WARNING,
            "%zu calibration tokens for up to %zu channels: with fewer than %d per channel "
            "the result may be worse than without data",
            tokens, widest, QT_MIN_TOKENS_PER_CHANNEL);
}

/* With a calibration file, ranks share the layers. */
static int warn_of_undersampled(const struct undersampled *mine, const struct qt_run *run,
                                struct qt_err *err)
{
    const size_t size = qt_comm_size(run->opt->comm);
    struct undersampled all = {0}, *ranks;
    int rc;
    QT_TRY(qt_array_new(&ranks, size, sizeof *ranks, err));
    QT_TRY(qt_comm_gather(run->opt->comm, ranks, mine, sizeof *mine, err));
    for (size_t i = 0; i < size; i++) {
        if (ranks[i].experts)
            all.fewest_tokens = all.experts ? qt_min_size(all.fewest_tokens, ranks[i].fewest_tokens)
                                            : ranks[i].fewest_tokens;
        all.experts += ranks[i].experts;
    }
    if (all.experts)
        qt_log_message(run->opt->log, QT_LOG_WARNING,
                       "%zu experts were selected by fewer than %d calibration tokens per channel "
                       "(the fewest: %zu): tokens close to selecting them, and other tokens of the "
                       "layer, were added",
                       all.experts, QT_MIN_TOKENS_PER_CHANNEL, all.fewest_tokens);
done:
    qt_free(ranks);
    return rc;
}

/* True if no unfinished linear needs the data: none needs it, or an earlier run finished all. Then
 * the matrices must not be read, because an interrupted learning step may have half overwritten
 * them. */
static bool is_finished(const struct qt_run *run, const bool *is_linear)
{
    for (size_t i = 0; i < run->plan.count; i++)
        if (is_linear[i] && qt_plan_item_needs(&run->plan.items[i]) != QT_NEEDS_NOTHING &&
            !qt_writer_done(run->writer, run->plan.items[i].tensor->name))
            return false;
    return true;
}

static int run_data(struct qt_run *run, struct qt_err *err)
{
    struct qt_weights source = qt_weights_of_ckpt(run->ckpt), current;
    struct qt_sequential *seq = NULL;
    struct qt_model *model = NULL;
    bool *is_linear = NULL;
    struct undersampled undersampled = {0};
    const size_t tokens = run->opt->calibration->samples * run->opt->calibration->seqlen;
    int rc;
    QT_TRY(qt_model_open(&model, &source, err));
    QT_TRY(find_linears(&is_linear, run, model, err));
    QT_TRY(check_strict(run, is_linear, err));
    warn_of_small_data(run, is_linear, tokens);
    QT_TRY(plan_activations(run, model, &source, err));
    if (is_finished(run, is_linear))
        goto done;
    QT_TRY(quantize_others(run, is_linear, err));
    QT_TRY(qt_sums_link(run->opt->calibration->backend, run->opt->comm, run->opt->log, err));
    current = qt_run_weights(run);
    QT_TRY(qt_sequential_open(&seq, &source, &current, run->opt->calibration, run->opt->comm, err));
    for (size_t layer = 0; layer < qt_model_info(model)->layers; layer++) {
        qt_log_layer(run->opt->log, layer, qt_model_info(model)->layers, (double)tokens);
        QT_TRY(run_layer(run, model, seq, layer, &undersampled, err));
    }
    QT_TRY(qt_run_exchange(run, QT_OK, err));
    QT_TRY(warn_of_undersampled(&undersampled, run, err));
done:
    qt_sequential_close(seq);
    qt_free(is_linear);
    qt_model_close(model);
    return rc;
}

static int run_file(struct qt_run *run, struct qt_err *err)
{
    struct qt_weights source = qt_weights_of_ckpt(run->ckpt);
    const struct qt_qcal *file = run->opt->calibration->file;
    struct qt_model *model = NULL;
    bool *is_linear = NULL;
    struct undersampled undersampled = {0};
    int rc;
    QT_TRY(qt_model_open(&model, &source, err));
    QT_TRY(find_linears(&is_linear, run, model, err));
    QT_TRY(check_strict(run, is_linear, err));
    QT_TRY(qt_calibrate_check(file, run->ckpt, model, err));
    warn_of_small_data(run, is_linear, qt_qcal_info(file)->tokens);
    const size_t layers = qt_model_info(model)->layers, size = qt_comm_size(run->opt->comm);
    for (size_t layer = 0; layer < layers; layer++) {
        qt_log_layer(run->opt->log, layer, layers, 0);
        if (layer % size == qt_comm_rank(run->opt->comm))
            rc = run_layer(run, model, NULL, layer, &undersampled, err);
        if (rc < 0 || layer % size == size - 1 || layer == layers - 1)
            QT_TRY(qt_run_exchange(run, rc, err));
    }
    QT_TRY(warn_of_undersampled(&undersampled, run, err));
done:
    qt_free(is_linear);
    qt_model_close(model);
    return rc;
}

int qt_run_layers(struct qt_run *run, struct qt_err *err)
{
    return run->opt->calibration->file ? run_file(run, err) : run_data(run, err);
}
