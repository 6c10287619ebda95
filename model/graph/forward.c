/*
 * The forward pass of every family, over struct qt_backend: see the drawing in internal.h.
 * Callers loop over blocks outside and over windows of text inside, so that one block's weights are
 * in memory at a time.
 */
#include "model/graph/layer.h"

/* The input of a sublayer: the hidden states, normed where there is a norm in front. */
static int sublayer_input(const float **out, const struct layer_run *r, enum role norm,
                          struct qt_err *err)
{
    *out = layer_norm_in_front(r->b, norm) ? r->b->x : r->hidden;
    return *out == r->hidden ? QT_OK : layer_apply_norm(r, norm, r->b->x, r->hidden, r->m, err);
}

/* hidden += x, the output of a sublayer. */
static int sublayer_output(const struct layer_run *r, enum role norm_in, enum role norm_out,
                           struct qt_err *err)
{
    const struct config *cfg = &r->b->model->cfg;
    struct qt_backend *be = r->b->be;
    int rc = QT_OK;
    QT_TRY(layer_apply_norm(r, norm_out, r->b->x, r->b->x, r->m, err));
    QT_TRY(layer_scale_residual(r, r->b->x, err));
    QT_TRY(be->add(be, r->hidden, r->b->x, r->m * cfg->info.hidden, err));
    if (cfg->norm_after)
        QT_TRY(layer_apply_norm(r, norm_in, r->hidden, r->hidden, r->m, err));
done:
    return rc;
}

static int run_attention(const struct layer_run *r, struct qt_err *err)
{
    struct qt_layer *b = r->b;
    const struct config *cfg = &b->model->cfg;
    const struct qt_model_info *info = &cfg->info;
    struct qt_attention a = layer_attention(r);
    size_t width = info->heads * info->head_dim, kv_width = info->kv_heads * info->head_dim;
    float *q = b->wide, *k = q + r->m * width, *v = k + r->m * kv_width, *y = v + r->m * kv_width;
    const float *x, *attended = y;
    bool stop;
    int rc = QT_OK;
    QT_TRY(sublayer_input(&x, r, ROLE_ATTN_IN, err));
    QT_TRY(layer_input(&x, &stop, r, ROLE_Q, err));
    if (stop)
        goto done;
    QT_TRY(layer_linear(r, ROLE_Q, q, x, err));
    QT_TRY(layer_linear(r, ROLE_K, k, x, err));
    QT_TRY(layer_linear(r, ROLE_V, v, x, err));
    QT_TRY(layer_heads(r, ROLE_Q_NORM, q, info->heads, err));
    QT_TRY(layer_heads(r, ROLE_K_NORM, k, info->kv_heads, err));
    if (b->runtime.cache)
        QT_TRY(b->runtime.cache(b->runtime.cache_ctx, b->be, k, v,
                                layer_linear_of(b->layer, ROLE_K),
                                layer_linear_of(b->layer, ROLE_V), r->m, &a, err));
    QT_TRY(b->be->attention(b->be, y, q, k, v, r->m, &a, err));
    QT_TRY(layer_input(&attended, &stop, r, ROLE_O, err));
    if (stop)
        goto done;
    QT_TRY(layer_linear(r, ROLE_O, b->x, attended, err));
    QT_TRY(sublayer_output(r, ROLE_ATTN_IN, ROLE_ATTN_OUT, err));
done:
    return rc;
}

static int run_mlp(const struct layer_run *r, struct qt_err *err)
{
    struct qt_layer *b = r->b;
    const float *x;
    bool stop;
    int rc = QT_OK;
    QT_TRY(sublayer_input(&x, r, ROLE_MLP_IN, err));
    QT_TRY(b->layer->experts ? experts_run(&stop, b->x, x, r, err)
                             : layer_mlp(&stop, b->x, x, r, 0, err));
    if (!stop)
        QT_TRY(sublayer_output(r, ROLE_MLP_IN, ROLE_MLP_OUT, err));
done:
    return rc;
}

typedef int sublayer(const struct layer_run *r, struct qt_err *err);

/* sublayers[2]: NULL for one that is left out. all: how to run, for m tokens, which go in chunks.
 */
static int run_sublayers(sublayer *const sublayers[2], const struct layer_run *all,
                         struct qt_err *err)
{
    const size_t width = all->b->model->cfg.info.hidden, m = all->m;
    size_t rows;
    int rc = QT_OK;
    QT_TRY(layer_check_length(all->b->model, m, all->seqlen, err));
    rows = layer_chunk(m, all->seqlen);
    QT_TRY(layer_prepare(all->b, rows, all->seqlen, err));
    for (size_t at = 0; at < m; at += rows) {
        struct layer_run r = *all;
        r.hidden += at * width;
        r.m = qt_min_size(rows, m - at);
        r.at = at;
        for (int i = 0; i < 2; i++)
            if (sublayers[i])
                QT_TRY(sublayers[i](&r, err));
    }
done:
    return rc;
}

int qt_layer_run(struct qt_layer *block, float *hidden, size_t m, size_t seqlen,
                 const struct qt_hook *tap, struct qt_err *err)
{
    return run_sublayers(
        (sublayer *const[]){run_attention, run_mlp},
        &(struct layer_run){
            .b = block, .hidden = hidden, .m = m, .seqlen = seqlen, .tap = tap, .stop = -1},
        err);
}

static sublayer *sublayer_of(int input)
{
    return input < 2 ? run_attention : run_mlp;
}

int qt_layer_run_sublayer(struct qt_layer *block, int input, float *hidden, size_t m, size_t seqlen,
                          const struct qt_hook *tap, struct qt_err *err)
{
    return run_sublayers(
        (sublayer *const[]){sublayer_of(input), NULL},
        &(struct layer_run){
            .b = block, .hidden = hidden, .m = m, .seqlen = seqlen, .tap = tap, .stop = -1},
        err);
}

int qt_layer_run_to(struct qt_layer *block, int input, float *hidden, size_t m, size_t seqlen,
                    const struct qt_tokens *tokens, const struct qt_hook *tap, struct qt_err *err)
{
    return run_sublayers((sublayer *const[]){sublayer_of(input), NULL},
                         &(struct layer_run){.b = block,
                                             .hidden = hidden,
                                             .m = m,
                                             .seqlen = seqlen,
                                             .tap = tap,
                                             .stop = input,
                                             .tokens = tokens},
                         err);
}

static int route(const struct layer_run *r, struct qt_err *err)
{
    const float *x;
    int rc = sublayer_input(&x, r, ROLE_MLP_IN, err);
    return rc < 0 ? rc : experts_route(r->share + r->at * r->b->model->cfg.info.experts, r, x, err);
}

int qt_layer_route(float *share, struct qt_layer *block, float *hidden, size_t m, size_t seqlen,
                   struct qt_err *err)
{
    return run_sublayers(
        (sublayer *const[]){route, NULL},
        &(struct layer_run){
            .b = block, .hidden = hidden, .m = m, .seqlen = seqlen, .stop = -1, .share = share},
        err);
}
