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

static int run_mixer(const struct layer_run *r, struct qt_err *err)
{
    struct qt_layer *l = r->layer;
    const float *x;
    bool stop;
    int rc = QT_OK;
    QT_TRY(sublayer_input(&x, r, ROLE_ATTN_IN, err));
    QT_TRY(mixer_of(l)->run(&stop, l->work.x, x, r, err));
    if (!stop)
        QT_TRY(sublayer_output(r, ROLE_ATTN_IN, ROLE_ATTN_OUT, err));
done:
    return rc;
}

static int run_mlp(const struct layer_run *r, struct qt_err *err)
{
    struct qt_layer *l = r->layer;
    const float *x;
    bool stop;
    int rc = QT_OK;
    QT_TRY(sublayer_input(&x, r, ROLE_MLP_IN, err));
    QT_TRY(l->def->experts ? experts_run(&stop, l->work.x, x, r, err)
                           : layer_mlp(&stop, l->work.x, x, r, 0, err));
    if (!stop)
        QT_TRY(sublayer_output(r, ROLE_MLP_IN, ROLE_MLP_OUT, err));
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

/* Runs the sublayers (NULL: skipped) on all m tokens, chunk by chunk. all: the arguments, without
 * those of a chunk. */
static int run_sublayers(sublayer *const sublayers[2], const struct layer_run *all,
                         struct qt_err *err)
{
    const size_t width = all->layer->model->cfg.info.hidden, m = all->m;
    size_t rows;
    int rc = QT_OK;
    QT_TRY(layer_check_length(all->layer->model, m, all->seqlen, err));
    rows = layer_chunk(all->layer->be->host ? LAYER_TOKENS : LAYER_TOKENS_APART, m, all->seqlen);
    QT_TRY(layer_prepare(all->layer, rows, all->seqlen, err));
    for (size_t at = 0; at < m; at += rows) {
        struct layer_run r = *all;
        r.hidden += at * width;
        r.m = qt_min_size(rows, m - at);
        r.first_token = at;
        for (int i = 0; i < 2; i++)
            if (sublayers[i])
                QT_TRY(sublayers[i](&r, err));
    }
done:
    return rc;
}

int qt_layer_run(struct qt_layer *layer, float *hidden, size_t m, size_t seqlen,
                 const struct qt_hook *hook, struct qt_err *err)
{
    return run_sublayers(
        layer->model->cfg.parallel ? (sublayer *const[]){run_parallel, NULL}
                                   : (sublayer *const[]){run_mixer, run_mlp},
        &(struct layer_run){
            .layer = layer, .hidden = hidden, .m = m, .seqlen = seqlen, .hook = hook, .stop = -1},
        err);
}

int layer_continue(struct qt_layer *layer, float *hidden, size_t tokens, size_t past,
                   struct layer_cache *cache, struct qt_err *err)
{
    const struct layer_run r = {.layer = layer,
                                .hidden = hidden,
                                .m = cache->work->sequences * tokens,
                                .seqlen = tokens,
                                .past = past,
                                .cache = cache,
                                .stop = -1};
    if (layer->model->cfg.parallel)
        return run_parallel(&r, err);
    int rc = run_mixer(&r, err);
    return rc < 0 ? rc : run_mlp(&r, err);
}

static sublayer *sublayer_of(const struct qt_layer *layer, int input)
{
    return layer->model->cfg.parallel         ? run_parallel
           : input < layer->def->mixer_inputs ? run_mixer
                                              : run_mlp;
}

int qt_layer_run_sublayer(struct qt_layer *layer, int input, float *hidden, size_t m, size_t seqlen,
                          const struct qt_hook *hook, struct qt_err *err)
{
    return run_sublayers(
        (sublayer *const[]){sublayer_of(layer, input), NULL},
        &(struct layer_run){
            .layer = layer, .hidden = hidden, .m = m, .seqlen = seqlen, .hook = hook, .stop = -1},
        err);
}

int qt_layer_run_to(struct qt_layer *layer, int input, float *hidden, size_t m, size_t seqlen,
                    const struct qt_tokens *tokens, const struct qt_hook *hook, struct qt_err *err)
{
    return run_sublayers((sublayer *const[]){sublayer_of(layer, input), NULL},
                         &(struct layer_run){.layer = layer,
                                             .hidden = hidden,
                                             .m = m,
                                             .seqlen = seqlen,
                                             .hook = hook,
                                             .stop = input,
                                             .tokens = tokens},
                         err);
}

static int route(const struct layer_run *r, struct qt_err *err)
{
    const float *x;
    int rc = sublayer_input(&x, r, ROLE_MLP_IN, err);
    return rc < 0 ? rc
                  : experts_route(r->weights + r->first_token * r->layer->model->cfg.info.experts,
                                  r, x, err);
}

int qt_layer_route(float *weights, struct qt_layer *layer, float *hidden, size_t m, size_t seqlen,
                   struct qt_err *err)
{
    return run_sublayers((sublayer *const[]){route, NULL},
                         &(struct layer_run){.layer = layer,
                                             .hidden = hidden,
                                             .m = m,
                                             .seqlen = seqlen,
                                             .stop = -1,
                                             .weights = weights},
                         err);
}
