/*
 * The forward pass of every family, over struct qt_backend: see the drawing in internal.h.
 * Callers loop over decoder layers outside and over windows inside, so that the weights of one
 * layer are in memory at a time.
 */
#include "model/graph/layer.h"

/* *out = the input of a sublayer: the hidden states, normalized if a norm precedes the sublayer. */
static int sublayer_input(const float **out, const struct layer_run *r, enum role norm,
                          struct qt_err *err)
{
    *out = layer_norm_in_front(r->layer, norm) ? r->layer->work.x : r->hidden;
    return *out == r->hidden ? QT_OK
                             : layer_apply_norm(r, norm, r->layer->work.x, r->hidden, r->m, err);
}

/* Adds the output of a sublayer, in layer->work.x, to the hidden states. */
static int sublayer_output(const struct layer_run *r, enum role norm_in, enum role norm_out,
                           struct qt_err *err)
{
    const struct config *cfg = &r->layer->model->cfg;
    struct qt_backend *be = r->layer->be;
    int rc = QT_OK;
    QT_TRY(layer_apply_norm(r, norm_out, r->layer->work.x, r->layer->work.x, r->m, err));
    QT_TRY(layer_scale_residual(r, r->layer->work.x, err));
    QT_TRY(be->add(be, r->hidden, r->layer->work.x, r->m * cfg->info.hidden, err));
    if (cfg->norm_after)
        QT_TRY(layer_apply_norm(r, norm_in, r->hidden, r->hidden, r->m, err));
done:
    return rc;
}

/* The output of the last linear of a sublayer, in layer->work.x. */
static int run_last_linear(const struct layer_run *r, struct qt_err *err)
{
    return layer_linear(r, r->last, r->layer->work.x, r->last_input, err);
}

static int run_mixer(const struct layer_run *r, struct qt_err *err)
{
    struct qt_layer *l = r->layer;
    const float *x;
    bool stop = false;
    const bool laurel = l->model->cfg.laurel && r->stop < 0;
    int rc = QT_OK;
    if (l->model->cfg.altup)
        QT_TRY(altup_predict(r, err));
    if (r->last_input)
        QT_TRY(run_last_linear(r, err));
    else {
        QT_TRY(sublayer_input(&x, r, ROLE_ATTN_IN, err));
        if (laurel)
            QT_TRY(altup_laurel(r, x, err));
        QT_TRY(mixer_of(l)->run(&stop, l->work.x, x, r, err));
    }
    if (!stop)
        QT_TRY(sublayer_output(r, ROLE_ATTN_IN, ROLE_ATTN_OUT, err));
    if (laurel)
        QT_TRY(altup_add_laurel(r, err));
done:
    return rc;
}

static int run_mlp(const struct layer_run *r, struct qt_err *err)
{
    struct qt_layer *l = r->layer;
    const float *x;
    bool stop = false;
    int rc = QT_OK;
    if (r->last_input)
        QT_TRY(run_last_linear(r, err));
    else {
        QT_TRY(sublayer_input(&x, r, ROLE_MLP_IN, err));
        QT_TRY(l->def->experts ? experts_run(&stop, l->work.x, x, r, err)
                               : layer_mlp(&stop, l->work.x, x, r, 0, err));
    }
    if (!stop)
        QT_TRY(sublayer_output(r, ROLE_MLP_IN, ROLE_MLP_OUT, err));
done:
    return rc;
}

/* The sublayer of per_layer.c, in layers that have it, and LAYER_SCALE. */
static int run_last(const struct layer_run *r, struct qt_err *err)
{
    struct qt_layer *l = r->layer;
    bool stop = false;
    int rc = QT_OK;
    if (l->model->cfg.altup) {
        QT_TRY(altup_correct(&stop, r, err));
    } else if (l->model->cfg.per_layer) {
        QT_TRY(r->last_input ? run_last_linear(r, err) : per_layer_run(&stop, l->work.x, r, err));
        if (!stop)
            QT_TRY(sublayer_output(r, ROLE_PER_LAYER_NORM, ROLE_PER_LAYER_NORM, err));
    }
    if (!stop && l->scale != 1)
        QT_TRY(l->be->scale(l->be, r->hidden, l->scale, r->m * l->model->cfg.info.hidden, err));
done:
    return rc;
}

/* A decoder layer whose mixer and MLP both read its input. */
static int run_parallel(const struct layer_run *r, struct qt_err *err)
{
    struct qt_layer *l = r->layer;
    const size_t count = r->m * l->model->cfg.info.hidden;
    const float *x;
    bool stop;
    int rc = QT_OK;
    QT_TRY(sublayer_input(&x, r, ROLE_ATTN_IN, err));
    if (r->stop < l->def->mixer_inputs) { /* -1: runs to the end */
        QT_TRY(mixer_of(l)->run(&stop, l->work.mixed, x, r, err));
        if (stop)
            goto done;
    }
    if (l->model->cfg.parallel_norms)
        QT_TRY(sublayer_input(&x, r, ROLE_MLP_IN, err));
    QT_TRY(layer_mlp(&stop, l->work.x, x, r, 0, err));
    if (stop)
        goto done;
    QT_TRY(l->be->add(l->be, r->hidden, l->work.mixed, count, err));
    QT_TRY(l->be->add(l->be, r->hidden, l->work.x, count, err));
done:
    return rc;
}

typedef int sublayer(const struct layer_run *r, struct qt_err *err);

/* The sublayers of a layer in order; NULL: none. */
enum { SUBLAYERS = 3 };
struct sublayers {
    sublayer *run[SUBLAYERS];
};

static struct sublayers all_of(const struct qt_layer *layer)
{
    const struct layer_def *def = layer->def;
    return layer->model->cfg.parallel
               ? (struct sublayers){{run_parallel}}
               : (struct sublayers){{def->mixer != MIXER_NONE ? run_mixer : NULL,
                                     def->mlp ? run_mlp : NULL, run_last}};
}

/* The sublayer with this linear input. What follows the MLP without a linear belongs to it. */
static struct sublayers one_of(const struct qt_layer *layer, int input)
{
    const struct config *cfg = &layer->model->cfg;
    const bool last = input >= layer_mlp_end(layer->def) && input < experts_input(cfg, layer->def);
    return layer->model->cfg.parallel         ? (struct sublayers){{run_parallel}}
           : input < layer->def->mixer_inputs ? (struct sublayers){{run_mixer}}
           : last                             ? (struct sublayers){{run_last}}
           : layer->model->cfg.per_layer      ? (struct sublayers){{run_mlp}}
                                              : (struct sublayers){{run_mlp, run_last}};
}

/* Runs the sublayers on a chunk, r->state. */
static int run_chunk(const struct sublayers *sublayers, struct layer_run *r, struct qt_err *err)
{
    const struct qt_model_info *info = &r->layer->model->cfg.info;
    struct qt_backend *be = r->layer->be;
    const bool apart = info->state > info->hidden;
    int rc = QT_OK;
    r->hidden = apart ? r->layer->work.hidden : r->state;
    if (apart)
        QT_TRY(be->copy_columns(be, r->hidden, info->hidden, r->state, info->state, info->hidden,
                                r->m, err));
    for (int i = 0; i < SUBLAYERS; i++)
        if (sublayers->run[i] && (i == 0 || r->stop < 0))
            QT_TRY(sublayers->run[i](r, err));
    if (apart && r->stop < 0)
        QT_TRY(be->copy_columns(be, r->state, info->state, r->hidden, info->hidden, info->hidden,
                                r->m, err));
done:
    return rc;
}

/* Runs the sublayers on all m tokens, chunk by chunk. all: the arguments, without those of a
 * chunk. */
static int run_sublayers(struct sublayers sublayers, const struct layer_run *all,
                         struct qt_err *err)
{
    const size_t m = all->m;
    size_t rows;
    int rc = QT_OK;
    QT_TRY(layer_check_length(all->layer->model, m, all->seqlen, err));
    rows = layer_chunk(all->layer->be->host ? LAYER_TOKENS : LAYER_TOKENS_APART, m, all->seqlen);
    QT_TRY(layer_prepare(all->layer, rows, all->seqlen, err));
    for (size_t at = 0; at < m; at += rows) {
        struct layer_run r = *all;
        r.state += at * all->layer->model->cfg.info.state;
        r.m = qt_min_size(rows, m - at);
        r.first_token = at;
        if (r.last_input)
            r.last_input += at * r.layer->def->parts[r.last].k;
        QT_TRY(run_chunk(&sublayers, &r, err));
    }
done:
    return rc;
}

int qt_layer_run(struct qt_layer *layer, float *hidden, size_t m, size_t seqlen,
                 const struct qt_hook *hook, struct qt_err *err)
{
    return run_sublayers(
        all_of(layer),
        &(struct layer_run){
            .layer = layer, .state = hidden, .m = m, .seqlen = seqlen, .hook = hook, .stop = -1},
        err);
}

int layer_continue(struct qt_layer *layer, float *hidden, size_t tokens, size_t past,
                   struct layer_cache *cache, struct qt_err *err)
{
    const struct sublayers all = all_of(layer);
    struct layer_run r = {.layer = layer,
                          .state = hidden,
                          .m = cache->work->sequences * tokens,
                          .seqlen = tokens,
                          .past = past,
                          .cache = cache,
                          .stop = -1};
    return run_chunk(&all, &r, err);
}

int qt_layer_run_sublayer(struct qt_layer *layer, int input, float *hidden, size_t m, size_t seqlen,
                          const struct qt_hook *hook, struct qt_err *err)
{
    return run_sublayers(
        one_of(layer, input),
        &(struct layer_run){
            .layer = layer, .state = hidden, .m = m, .seqlen = seqlen, .hook = hook, .stop = -1},
        err);
}

int qt_layer_run_from(struct qt_layer *layer, int input, float *hidden, const float *x, size_t m,
                      size_t seqlen, struct qt_err *err)
{
    return run_sublayers(one_of(layer, input),
                         &(struct layer_run){.layer = layer,
                                             .state = hidden,
                                             .m = m,
                                             .seqlen = seqlen,
                                             .stop = -1,
                                             .last_input = x,
                                             .last = layer_part_with(layer, input)},
                         err);
}

int qt_layer_run_to(struct qt_layer *layer, int input, float *hidden, size_t m, size_t seqlen,
                    const struct qt_tokens *tokens, const struct qt_hook *hook, struct qt_err *err)
{
    return run_sublayers(one_of(layer, input),
                         &(struct layer_run){.layer = layer,
                                             .state = hidden,
                                             .m = m,
                                             .seqlen = seqlen,
                                             .hook = hook,
                                             .stop = input,
                                             .tokens = tokens},
                         err);
}

static int route(const struct layer_run *r, struct qt_err *err)
{
    const bool mixer = r->stop < r->layer->def->mixer_inputs;
    const float *x;
    int rc = sublayer_input(&x, r, mixer ? ROLE_ATTN_IN : ROLE_MLP_IN, err);
    return rc < 0 ? rc
                  : experts_route(r->weights + r->first_token * r->layer->model->cfg.info.experts,
                                  mixer ? ROLE_HEADS_ROUTER : ROLE_ROUTER, r, x, err);
}

int qt_layer_route(float *weights, struct qt_layer *layer, int input, float *hidden, size_t m,
                   size_t seqlen, struct qt_err *err)
{
    return run_sublayers((struct sublayers){{route}},
                         &(struct layer_run){.layer = layer,
                                             .state = hidden,
                                             .m = m,
                                             .seqlen = seqlen,
                                             .stop = input,
                                             .weights = weights},
                         err);
}
