/*
 * Calibrated quantization, block by block, and in a block input by input: observe what the linears
 * with this input will get from those quantized before them, quantize them, move the hidden states
 * on through the decoded weights. Or, where the statistics come from a calibration file, just
 * quantize them.
 */
#include "pack/run.h"
#include "pack/sequential.h"

#include <string.h>

/* Experts whose tokens are fewer than the sums for their linears want. */
struct few {
    size_t experts, fewest;
};

/* Of the linears with an input: those that are not finished, and of them those that want a Hessian.
 */
struct left {
    size_t all, solved;
};

/* The linears of one block while they are being quantized. */
struct block {
    struct qt_run *run;
    const struct qt_model *model;
    const struct qt_linear *linear;
    size_t count;
    size_t *item;             /* plan item of each */
    struct qt_packed *packed; /* of those that are quantized */
    struct left *left;        /* by input */
    struct few *few;
    int few_last;          /* the expert that was counted last */
    struct qt_weights now; /* of the run */
};

/* ---- the block's weights as they now are ---------------------------------------------------- */

static bool block_shape(void *ctx, const char *name, int *ndim, size_t shape[QT_MAX_DIMS])
{
    const struct block *b = ctx;
    return b->now.shape(b->now.ctx, name, ndim, shape);
}

/* Linears are at hand; a router may be quantized, too. */
static int block_load(void *ctx, const char *name, float *dst, struct qt_err *err)
{
    const struct block *b = ctx;
    for (size_t i = 0; i < b->count; i++)
        if (b->packed[i].nsections && strcmp(b->linear[i].weight, name) == 0)
            return qt_packed_weights(dst, &b->packed[i], err);
    return b->now.load(b->now.ctx, name, dst, err);
}

/* ---- resuming ------------------------------------------------------------------------------- */

/* Finds the block's items, and those among them that are finished; b->left counts the others. */
static int find_items(struct block *b, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0; i < b->count; i++) {
        QT_TRY(qt_run_find_item(&b->item[i], b->run, b->linear[i].weight, err));
        if (b->run->plan.items[b->item[i]].why)
            continue;
        if (qt_run_resume_item(b->run, b->item[i]))
            QT_TRY(qt_run_read_back(&b->packed[i], b->run, b->item[i], err));
        else {
            struct left *l = &b->left[b->linear[i].input];
            l->all++;
            l->solved +=
                qt_spec_method(&b->run->plan.items[b->item[i]].packed.spec) == QT_METHOD_GPTQ;
        }
    }
done:
    return rc;
}

/* ---- quantizing ----------------------------------------------------------------------------- */

/* Sum of d^2, d being of stored channels where act is not NULL. */
static double strayed(const struct qt_lack *lack, const struct qt_act *act)
{
    double sum = 0;
    for (size_t p = 0; p < lack->n; p++) {
        double factor = act ? (double)act->factor[p] : 1;
        sum += lack->square[act ? act->order[p] : p] * factor * factor;
    }
    return sum;
}

/* act: how the channels of the input are stored, where not as in the source. */
static int factor_new(struct qt_factor *f, const struct qt_observed *seen, size_t k,
                      const struct qt_act *act, const struct qt_factor_options *opt,
                      struct qt_err *err)
{
    struct qt_observed stored = *seen;
    double *h = NULL;
    float *input = NULL, *state = NULL;
    int rc = QT_OK;
    if (act) {
        QT_TRY(qt_array_new(&h, k, k * sizeof *h, err));
        QT_TRY(qt_array_new(&input, seen->input.n, k * sizeof *input, err));
        QT_TRY(qt_array_new(&state, seen->state.n, k * sizeof *state, err));
        qt_arrange_gram(h, seen->h, act);
        if (seen->input.n)
            qt_arrange_cross(input, seen->input.cross, act);
        qt_arrange_columns(state, seen->state.cross, seen->state.n, act);
        stored.h = h;
        stored.input.cross = input;
        stored.state.cross = state;
    }
    QT_TRY(qt_factor_new(f, stored.h, k, opt, err));
    if (seen->input.n)
        QT_TRY(qt_factor_correct_input_error(f, stored.input.cross, strayed(&seen->input, act),
                                             seen->tokens, err));
    if (seen->state.n)
        QT_TRY(qt_factor_correct_residual_error(f, stored.state.cross, seen->state.n,
                                                strayed(&seen->state, NULL), seen->tokens, err));
done:
    qt_free(h);
    qt_free(input);
    qt_free(state);
    return rc;
}

/* f: the factor of the linear before, kept where its groups are as long. */
static int factor_for(struct qt_factor *f, struct qt_backend *be, const struct qt_linear *linear,
                      const struct qt_packed *p, const struct qt_observed *seen,
                      const struct qt_act *act, struct qt_err *err)
{
    struct qt_factor_options opt = {.damp = 0.01, .group = qt_packed_group(p), .backend = be};
    if (f->k && f->group_size == opt.group)
        return QT_OK;
    qt_factor_free(f);
    return factor_new(f, seen, linear->k, act, &opt, err);
}

static int quantize_linear(struct block *b, struct qt_factor *f, size_t i,
                           const struct qt_observed *seen, struct qt_err *err)
{
    const struct qt_plan_item *item = &b->run->plan.items[b->item[i]];
    struct qt_run_hessian hessian = {
        .of_expert = qt_model_expert(b->model, b->linear[i].layer, b->linear[i].input) >= 0,
        .chose = seen->chose};
    struct qt_arrange arrange;
    struct qt_err inner = {0};
    char why[sizeof inner.reason + 32] = "";
    int rc = QT_OK;
    QT_TRY(qt_act_plan_arrange(&arrange, &b->run->acts, b->model, &b->linear[i], err));
    if (qt_spec_method(&item->packed.spec) == QT_METHOD_GPTQ) {
        rc = factor_for(f, b->run->opt->calibration->backend, &b->linear[i], &item->packed, seen,
                        arrange.input, &inner);
        if (rc == QT_OK)
            hessian.factor = f;
        else if (rc == QT_E_UNSUPPORTED)
            rc = qt_run_fall_back(why, sizeof why, b->run, item->tensor, inner.reason, err);
        else
            rc = qt_fail(err, inner.status, NULL, NULL, "%s", inner.reason);
        if (rc < 0)
            goto done;
    }
    hessian.fallback = *why ? why : NULL;
    rc = qt_run_quantize_item(&b->packed[i], b->run, b->item[i], &hessian,
                              arrange.input ? &arrange : NULL, err);
done:
    qt_act_plan_arrange_free(&arrange);
    return rc;
}

/* The linears with this input. */
static int quantize_linears(struct block *b, int input, const struct qt_observed *seen,
                            struct qt_err *err)
{
    struct qt_factor f = {0};
    int rc = QT_OK;
    for (size_t i = 0; i < b->count && rc == QT_OK; i++) {
        if (b->linear[i].input != input || b->run->plan.items[b->item[i]].why ||
            b->run->entries[b->item[i]])
            continue;
        rc = qt_run_check_interrupted(b->run, err);
        if (rc == QT_OK)
            rc = quantize_linear(b, &f, i, seen, err);
    }
    qt_factor_free(&f);
    return rc;
}

/* ---- one block ------------------------------------------------------------------------------ */

/* H from a calibration file. */
static int quantize_from_file(struct block *b, size_t layer, int input, struct qt_err *err)
{
    const struct qt_qcal *file = b->run->opt->calibration->file;
    const size_t k = qt_qcal_info(file)->k[layer][input];
    struct qt_channels c = {0};
    double *h = NULL;
    int rc;
    QT_TRY(qt_array_new(&h, k, k * sizeof *h, err));
    QT_TRY(qt_qcal_channels(&c, file, layer, (size_t)input, err));
    QT_TRY(qt_qcal_hessian(h, file, layer, (size_t)input, c.sum2, err));
    QT_TRY(quantize_linears(b, input, &(struct qt_observed){.h = h}, err));
done:
    qt_channels_free(&c);
    qt_free(h);
    return rc;
}

/* Either of an expert's inputs may be the one that is too wide. */
static void count_few(struct block *b, size_t layer, int input, const struct qt_observed *seen)
{
    const int expert = qt_model_expert(b->model, layer, input);
    const struct qt_calibration *data = b->run->opt->calibration;
    const size_t k = seen->input.n, all = data->samples * data->seqlen;
    if (expert < 0 || seen->chose / QT_FEW_TOKENS >= k || expert == b->few_last ||
        seen->chose == all) /* nobody else could join */
        return;
    b->few->fewest = b->few->experts ? qt_min_size(b->few->fewest, seen->chose) : seen->chose;
    b->few->experts++;
    b->few_last = expert;
}

static int quantize_and_advance(struct block *b, struct qt_sequential *seq, size_t layer,
                                struct qt_err *err)
{
    const struct qt_weights now = {.dir = b->now.dir,
                                   .ctx = b,
                                   .shape = block_shape,
                                   .load = block_load,
                                   .runtime = b->now.runtime};
    const bool last = layer + 1 == qt_model_info(b->model)->layers;
    const int attention_out = 1, end = (int)qt_model_inputs(b->model, layer) - 1;
    int rc;
    QT_TRY(qt_sequential_enter(seq, layer, &now, err));
    for (int input = 0; input <= end; input++) {
        struct qt_observed seen = {0};
        if (b->left[input].solved) {
            QT_TRY(qt_sequential_observe(&seen, seq, input, err));
            count_few(b, layer, input, &seen);
        }
        if (b->left[input].all) {
            QT_TRY(quantize_linears(b, input, &seen, err));
            QT_TRY(qt_sequential_renew(seq, input, &now, err));
        }
        if (input == attention_out || (input == end && !last)) /* the last of a sublayer */
            QT_TRY(qt_sequential_advance(seq, input, err));
    }
done:
    return rc;
}

/* seq is NULL when the statistics come from a file. */
static int run_layer(struct qt_run *run, const struct qt_model *model, struct qt_sequential *seq,
                     size_t layer, struct few *few, struct qt_err *err)
{
    struct block b = {
        .run = run, .model = model, .now = qt_run_weights(run), .few = few, .few_last = -1};
    const int inputs = (int)qt_model_inputs(model, layer);
    int rc;
    b.count = qt_model_linears(&b.linear, model, layer);
    QT_TRY(qt_array_new(&b.item, b.count, sizeof *b.item, err));
    QT_TRY(qt_array_new(&b.packed, b.count, sizeof *b.packed, err));
    QT_TRY(qt_array_new(&b.left, (size_t)inputs, sizeof *b.left, err));
    QT_TRY(find_items(&b, err));
    if (seq)
        QT_TRY(quantize_and_advance(&b, seq, layer, err));
    for (int input = 0; !seq && input < inputs; input++)
        if (b.left[input].all)
            QT_TRY(quantize_from_file(&b, layer, input, err));
done:
    for (size_t i = 0; b.packed && i < b.count; i++)
        qt_packed_free(&b.packed[i]);
    qt_free(b.packed);
    qt_free(b.item);
    qt_free(b.left);
    return rc;
}

/* of_block: per plan item, whether it is one of the blocks' linears. */
static int find_linears(bool **of_block, const struct qt_run *run, const struct qt_model *model,
                        struct qt_err *err)
{
    const struct qt_linear *linear;
    int rc = qt_array_new(of_block, run->plan.count, sizeof **of_block, err);
    for (size_t layer = 0; layer < qt_model_info(model)->layers; layer++)
        for (size_t i = 0, item, n = qt_model_linears(&linear, model, layer); i < n && rc == QT_OK;
             i++) {
            rc = qt_run_find_item(&item, run, linear[i].weight, err);
            if (rc == QT_OK)
                (*of_block)[item] = true;
        }
    return rc;
}

/* --strict: before hours of work, not after them. Embeddings, the head, and what the architecture
 * does not know have no Hessian. */
static int check_strict(const struct qt_run *run, const bool *of_block, struct qt_err *err)
{
    const struct qt_plan *plan = &run->plan;
    int rc = QT_OK;
    for (size_t i = 0; i < plan->count && rc == QT_OK && run->opt->strict; i++)
        if (!plan->items[i].why && !of_block[i] &&
            qt_spec_method(&plan->items[i].packed.spec) == QT_METHOD_GPTQ)
            rc = qt_run_fall_back(NULL, 0, run, plan->items[i].tensor, QT_NO_BLOCK, err);
    return rc;
}

/* Quantizes what is no linear of a block first: linears get what an embedding and the routers, as
 * they will be, give them. */
static int quantize_others(struct qt_run *run, const bool *of_block, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0; i < run->plan.count && rc == QT_OK; i++)
        if (!of_block[i] && !run->plan.items[i].why)
            rc = qt_run_make_item(run, i, err);
    return rc;
}

/* Anew, or as an interrupted run has kept it. */
static int plan_activations(struct qt_run *run, const struct qt_model *model,
                            const struct qt_weights *source, struct qt_err *err)
{
    bool found;
    int rc = qt_act_plan_load(&found, &run->acts, &run->plan, model, run->writer, run->opt->out_dir,
                              err);
    if (rc < 0 || found)
        return rc;
    rc = qt_act_plan_new(&run->acts, &run->plan, model, source, run->opt, err);
    return rc == QT_OK && run->acts.act ? qt_act_plan_save(&run->acts, run->writer, err) : rc;
}

/* A Hessian of few tokens fits those tokens. Tiny Llama, nf4, divergence after 1, 2, 4 and 8 tokens
 * a channel: 0.104, 0.078, 0.066, 0.058; without data 0.080. */
static void warn_of_few_tokens(const struct qt_run *run, const bool *of_block, size_t tokens)
{
    size_t widest = 0;
    for (size_t i = 0; i < run->plan.count; i++) {
        const struct qt_packed *p = &run->plan.items[i].packed;
        if (of_block[i] && !run->plan.items[i].why && p->k > widest &&
            qt_spec_method(&p->spec) == QT_METHOD_GPTQ)
            widest = p->k;
    }
    if (tokens / QT_FEW_TOKENS < widest)
        qt_log_message(
            run->opt->log, QT_LOG_WARNING,
            "%zu tokens of calibration data for up to %zu channels: with fewer than %d a "
            "channel the result may be worse than without data",
            tokens, widest, QT_FEW_TOKENS);
}

static void warn_of_few(const struct few *few, const struct qt_run *run)
{
    if (few->experts)
        qt_log_message(run->opt->log, QT_LOG_WARNING,
                       "%zu experts were chosen by fewer than %d tokens of calibration data a "
                       "channel, down to %zu tokens: tokens that came near to choosing them took "
                       "part",
                       few->experts, QT_FEW_TOKENS, few->fewest);
}

/* Whether no linear is left that needs the data: none does, or an earlier run has made all. What
 * that has learned since then may be half written over the matrices. */
static bool is_finished(const struct qt_run *run, const bool *of_block)
{
    for (size_t i = 0; i < run->plan.count; i++)
        if (of_block[i] && qt_plan_item_needs(&run->plan.items[i]) != QT_NEEDS_NOTHING &&
            !qt_writer_done(run->writer, run->plan.items[i].tensor->name))
            return false;
    return true;
}

static int run_data(struct qt_run *run, struct qt_err *err)
{
    struct qt_weights source = qt_weights_of_ckpt(run->ckpt), now;
    struct qt_sequential *seq = NULL;
    struct qt_model *model = NULL;
    bool *of_block = NULL;
    struct few few = {0};
    int rc;
    QT_TRY(qt_model_open(&model, &source, err));
    QT_TRY(find_linears(&of_block, run, model, err));
    QT_TRY(check_strict(run, of_block, err));
    warn_of_few_tokens(run, of_block,
                       run->opt->calibration->samples * run->opt->calibration->seqlen);
    QT_TRY(plan_activations(run, model, &source, err));
    if (is_finished(run, of_block))
        goto done;
    QT_TRY(quantize_others(run, of_block, err));
    now = qt_run_weights(run);
    QT_TRY(qt_sequential_open(&seq, &source, &now, run->opt->calibration, err));
    for (size_t layer = 0; layer < qt_model_info(model)->layers; layer++)
        QT_TRY(run_layer(run, model, seq, layer, &few, err));
    warn_of_few(&few, run);
done:
    qt_sequential_close(seq);
    qt_free(of_block);
    qt_model_close(model);
    return rc;
}

static int run_file(struct qt_run *run, struct qt_err *err)
{
    struct qt_weights source = qt_weights_of_ckpt(run->ckpt);
    const struct qt_qcal *file = run->opt->calibration->file;
    struct qt_model *model = NULL;
    bool *of_block = NULL;
    int rc;
    QT_TRY(qt_model_open(&model, &source, err));
    QT_TRY(find_linears(&of_block, run, model, err));
    QT_TRY(check_strict(run, of_block, err));
    QT_TRY(qt_calibrate_check(file, run->ckpt, model, err));
    warn_of_few_tokens(run, of_block, qt_qcal_info(file)->tokens);
    for (size_t layer = 0; layer < qt_model_info(model)->layers; layer++)
        QT_TRY(run_layer(run, model, NULL, layer, NULL, err));
done:
    qt_free(of_block);
    qt_model_close(model);
    return rc;
}

int qt_run_layers(struct qt_run *run, struct qt_err *err)
{
    return run->opt->calibration->file ? run_file(run, err) : run_data(run, err);
}
