/*
 * Mixture of attention heads (JetMoE, arXiv 2404.07413): the queries of a token are those of the
 * experts that HEADS_ROUTER chooses for it. All experts attend to the same keys and values.
 *
 *   x -+- K V --------------------------+
 *      +- EXPERT_Q of expert e -- rope -- attention -- EXPERT_O of expert e -- * routing weight
 *
 * The sum over the chosen experts and HEADS_BIAS is the output. Queries of a token have a place for
 * each expert that it chooses, in the order of the experts: [place][m][KV heads][head_dim].
 */
#include "model/graph/layer.h"

#include <string.h>

static size_t scratch_floats(const struct config *cfg)
{
    return (3 + 2 * cfg->top_k) * cfg->info.kv_heads * cfg->info.head_dim;
}

/* The experts that run, and their working memory. */
struct chosen {
    size_t first, end, places;
    size_t width; /* of keys, and of the queries of an expert */
    uint32_t *used,
        *row;         /* [m], of a token: places in use; [m], of an expert: rows of its queries */
    float *q, *y;     /* [places][m][width], queries and what attention makes of them */
    float *of_expert; /* [m][width] */
};

/* Lists the tokens of an expert in experts.tokens, and the rows of their queries. */
static void list_tokens(struct chosen *c, const struct layer_run *r, size_t expert)
{
    struct layer_experts *e = &r->layer->work.experts;
    if (r->tokens)
        qt_tokens_slice(&e->tokens, r->tokens, r->first_token, r->m);
    else
        qt_tokens_of_expert(&e->tokens, e->weights, r->m, r->layer->model->cfg.routed, expert, 0);
    for (size_t i = 0; i < e->tokens.count; i++) {
        const uint32_t token = e->tokens.row[i];
        c->row[i] = (uint32_t)(c->used[token]++ * r->m + token);
    }
}

static int make_queries(bool *stop, struct chosen *c, const float *x, const struct layer_run *r,
                        struct qt_err *err)
{
    const size_t hidden = r->layer->model->cfg.info.hidden, count = r->m * c->width;
    struct layer_experts *e = &r->layer->work.experts;
    struct qt_backend *be = r->layer->be;
    struct layer_run selected = *r;
    int rc;
    QT_TRY(be->zero(be, c->q, c->places * count * sizeof *c->q, err));
    for (size_t i = c->first; i < c->end; i++) {
        const size_t part = part_at(i, ROLE_EXPERT_Q);
        const float *in = e->in;
        list_tokens(c, r, i);
        selected.m = e->tokens.count;
        if (selected.m == 0)
            continue;
        QT_TRY(be->gather_rows(be, e->in, x, e->tokens.row, NULL, selected.m, hidden, err));
        QT_TRY(layer_input(&in, stop, &selected, part, err));
        if (*stop)
            goto done;
        QT_TRY(layer_linear(&selected, part, c->of_expert, in, err));
        QT_TRY(be->scatter_rows(be, c->q, c->of_expert, c->row, NULL, selected.m, c->width, err));
    }
    for (size_t i = 0; i < c->places; i++)
        QT_TRY(layer_heads(r, ROLE_Q_NORM, c->q + i * count, c->q + i * count,
                           r->layer->def->heads.kv, err));
done:
    return rc;
}

/* experts.sum = sum over the experts, if none is the end of the run. */
static int add_outputs(struct chosen *c, const struct layer_run *r, struct qt_err *err)
{
    const size_t hidden = r->layer->model->cfg.info.hidden;
    struct layer_experts *e = &r->layer->work.experts;
    struct qt_backend *be = r->layer->be;
    struct layer_run selected = *r;
    bool stop;
    int rc;
    memset(c->used, 0, r->m * sizeof *c->used);
    QT_TRY(experts_begin(r, ROLE_HEADS_BIAS, err));
    for (size_t i = c->first; i < c->end; i++) {
        const size_t part = part_at(i, ROLE_EXPERT_O);
        const float *in = c->of_expert;
        list_tokens(c, r, i);
        selected.m = e->tokens.count;
        if (selected.m == 0)
            continue;
        QT_TRY(be->gather_rows(be, c->of_expert, c->y, c->row, NULL, selected.m, c->width, err));
        QT_TRY(layer_input(&in, &stop, &selected, part, err));
        if (stop)
            goto done;
        QT_TRY(layer_linear(&selected, part, e->out, in, err));
        QT_TRY(be->scatter_rows(be, e->sum, e->out, e->tokens.row, e->tokens.weight, selected.m,
                                hidden, err));
    }
done:
    return rc;
}

/* Attention of every place to the same keys. k and v are [m][width]. */
static int attend(struct chosen *c, float *k, float *v, const struct layer_run *r,
                  struct qt_err *err)
{
    struct qt_attention a = layer_attention(r);
    struct qt_backend *be = r->layer->be;
    const size_t count = r->m * c->width;
    const float *keys, *values;
    int rc;
    a.heads = a.kv_heads;
    QT_TRY(cache_keys(&keys, &values, &a, k, v, r, err));
    for (size_t i = 0; i < c->places; i++)
        QT_TRY(be->attention(be, c->y + i * count, c->q + i * count, keys, values, r->m, &a, err));
done:
    return rc;
}

static int run_experts(struct chosen *c, const float *x, float *k, float *v,
                       const struct layer_run *r, struct qt_err *err)
{
    bool stop = false;
    int rc = make_queries(&stop, c, x, r, err);
    if (rc == QT_OK && !stop)
        rc = attend(c, k, v, r, err);
    return rc == QT_OK && !stop ? add_outputs(c, r, err) : rc;
}

static int run(bool *stop, float *out, const float *x, const struct layer_run *r,
               struct qt_err *err)
{
    struct qt_layer *l = r->layer;
    const struct config *cfg = &l->model->cfg;
    const struct heads *heads = &l->def->heads;
    const int only = layer_expert(l->def, r->stop);
    struct chosen c = {.first = only < 0 ? 0 : (size_t)only,
                       .end = only < 0 ? cfg->routed : (size_t)only + 1,
                       .places = only < 0 ? cfg->top_k : 1,
                       .width = heads->kv * heads->dim};
    float *k = l->work.scratch, *v = k + r->m * c.width;
    const float *of_keys = x;
    int rc;
    c.of_expert = v + r->m * c.width;
    c.q = c.of_expert + r->m * c.width;
    c.y = c.q + c.places * r->m * c.width;
    QT_TRY(layer_input(&of_keys, stop, r, ROLE_QKV, err));
    if (*stop)
        goto done;
    QT_TRY(layer_linear(r, ROLE_K, k, of_keys, err));
    QT_TRY(layer_linear(r, ROLE_V, v, of_keys, err));
    QT_TRY(layer_heads(r, ROLE_K_NORM, k, k, heads->kv, err));
    if (!r->tokens)
        QT_TRY(experts_route(l->work.experts.weights, ROLE_HEADS_ROUTER, r, x, err));
    QT_TRY(qt_array_new(&c.used, r->m, sizeof *c.used, err));
    QT_TRY(qt_array_new(&c.row, r->m, sizeof *c.row, err));
    QT_TRY(run_experts(&c, x, k, v, r, err));
    *stop = only >= 0;
    if (!*stop)
        QT_TRY(l->be->copy(l->be, out, l->work.experts.sum, r->m * cfg->info.hidden * sizeof *out,
                           err));
done:
    qt_free(c.used);
    qt_free(c.row);
    return rc;
}

const struct mixer mixer_head_experts = {scratch_floats, run};
