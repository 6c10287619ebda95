/*
 * Mixture of experts. The host turns the router's scores into routing weights and lists the tokens
 * of each expert (tokens.c). The experts run one after the other, each on its tokens of the chunk.
 */
#include "model/graph/layer.h"

/* ---- the router ----------------------------------------------------------------------------- */

enum { ROUTE_TOKENS = 64 }; /* per item of the parallel loop */

struct route_job {
    const struct config *cfg;
    const float *logits;      /* [m][routed] */
    const float *select_bias; /* [routed] or NULL */
    const float *gate;        /* [m], logits of the shared expert's gate, or NULL */
    float *weights;           /* [m][experts] */
    size_t m;
};

/* Index of the largest element, NaN excepted; the lowest index of equal ones. */
static size_t best(const double *x, size_t n)
{
    size_t at = 0;
    for (size_t i = 1; i < n; i++)
        if (x[i] > x[at] || (isnan(x[at]) && !isnan(x[i])))
            at = i;
    return at;
}

/* p = softmax or sigmoid of the router's logits, which are finite. */
static void score(double *p, const float *logit, const struct config *cfg)
{
    const size_t n = cfg->routed;
    const bool sigmoid = cfg->arch->sigmoid_router;
    double max = sigmoid ? 0 : (double)logit[0], sum = 0;
    for (size_t i = 1; i < n && !sigmoid; i++)
        max = fmax(max, (double)logit[i]);
    for (size_t i = 0; i < n; i++) {
        p[i] = sigmoid ? 1 / (1 + exp(-(double)logit[i])) : exp((double)logit[i] - max);
        sum += p[i];
    }
    for (size_t i = 0; i < n && !sigmoid; i++)
        p[i] /= sum;
}

/* Group-limited routing (DeepSeek): a group's score is the sum of its two best ranks, or its best
 * rank. All groups but the top_groups best are excluded: their ranks become -infinity. */
static void exclude_groups(double *rank, const struct config *cfg)
{
    const size_t n = cfg->routed / cfg->groups;
    for (size_t out = cfg->groups; out > cfg->top_groups; out--) {
        double least = INFINITY, *worst = rank;
        for (double *group = rank; group < rank + cfg->routed; group += n) {
            const size_t first = best(group, n);
            const bool two = n > 1 && !cfg->arch->group_best;
            double second = two ? -INFINITY : 0;
            for (size_t i = 0; i < n && two; i++)
                if (i != first)
                    second = fmax(second, group[i]);
            if (group[first] > -INFINITY && group[first] + second <= least) {
                least = group[first] + second;
                worst = group;
            }
        }
        for (size_t i = 0; i < n; i++)
            worst[i] = -INFINITY;
    }
}

/* The router of Phi-3.5-MoE (arXiv 2409.12136) chooses two experts. The weight of each is a softmax
 * over those experts whose logits are near its own, the first expert excepted for the second.
 * Returns the chosen expert, of which p[routed] is the softmax. first: SIZE_MAX for the first. */
static size_t sparse_mixer(double *p, size_t first, const float *logit, const struct config *cfg)
{
    size_t at = SIZE_MAX;
    double sum = 0;
    for (size_t i = 0; i < cfg->routed; i++)
        if (i != first && (at == SIZE_MAX || logit[i] > logit[at]))
            at = i;
    for (size_t i = 0; i < cfg->routed; i++) {
        const float distance = (logit[at] - logit[i]) / fmaxf(fabsf(logit[i]), logit[at]);
        const bool near = i != first && !(distance > 2 * cfg->jitter);
        p[i] = near ? exp((double)logit[i] - (double)logit[at]) : 0;
        sum += p[i];
    }
    for (size_t i = 0; i < cfg->routed; i++)
        p[i] /= sum;
    return at;
}

/* Routing weights of one token. p, rank: scratch [routed]. gate: weight of the shared expert. */
static void weights_of_token(float *weights, double *p, double *rank, const float *logit,
                             const float *select_bias, double gate, const struct config *cfg)
{
    const size_t n = cfg->routed;
    double sum = 0, least = 0, last = 0, factor = cfg->routing_scale;
    score(p, logit, cfg);
    for (size_t i = n; i < cfg->info.experts; i++)
        weights[i] = (float)gate;
    for (size_t i = 0; i < n; i++)
        rank[i] = p[i] + (select_bias ? (double)select_bias[i] : 0);
    exclude_groups(rank, cfg);
    for (size_t i = 0; i < n; i++)
        weights[i] = (float)-p[i];
    if (cfg->arch->sparse_mixer) {
        size_t at = SIZE_MAX;
        for (int c = 0; c < 2; c++) {
            at = sparse_mixer(p, at, logit, cfg);
            weights[at] = (float)p[at];
        }
        return;
    }
    for (size_t c = 0; c < cfg->top_k; c++) {
        const size_t i = best(rank, n);
        sum += least = p[i];
        last = rank[i];
        weights[i] = (float)p[i];
        rank[i] = NAN;
    }
    for (size_t i = 0; i < n && select_bias; i++)
        if (!isnan(rank[i])) /* by rank: the score without the bias may even be the largest */
            weights[i] = (float)-fmax(0, least - (last - rank[i]));
    if (cfg->normalize_routing)
        factor /= sum + (cfg->arch->routing_eps > 0 ? cfg->arch->routing_eps : 1e-20);
    for (size_t i = 0; i < n && factor != 1; i++)
        weights[i] = (float)((double)weights[i] * factor);
}

static int route_item(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct route_job *job = ctx;
    const size_t n = job->cfg->routed, first = item * ROUTE_TOKENS;
    const size_t end = qt_min_size(first + ROUTE_TOKENS, job->m);
    double *p;
    int rc = qt_array_new(&p, n, 2 * sizeof *p, err);
    (void)thread;
    if (rc < 0)
        return rc;
    for (size_t i = first; i < end; i++) {
        const double gate = job->gate ? 1 / (1 + exp(-(double)job->gate[i])) : 1;
        weights_of_token(job->weights + i * job->cfg->info.experts, p, p + n, job->logits + i * n,
                         job->select_bias, gate, job->cfg);
    }
    qt_free(p);
    return QT_OK;
}

/* out[m][n] (host memory) = logits of the router or of the shared expert's gate. */
static int scores_of(float *out, size_t n, enum role role, const struct layer_run *r,
                     const float *x, struct qt_err *err)
{
    struct qt_layer *l = r->layer;
    const size_t count = r->m * n;
    int rc;
    QT_TRY(layer_linear(r, role, l->work.experts.logits, x, err));
    QT_TRY(l->be->download(l->be, out, l->work.experts.logits, count * sizeof *out, err));
    if (qt_find_nonfinite(out, count) < count)
        rc = qt_fail(err, QT_E_INPUT, l->dir, l->def->parts[role].weight,
                     "expert scores computed with this tensor are not finite");
done:
    return rc;
}

int experts_route(float *weights, enum role router, const struct layer_run *r, const float *x,
                  struct qt_err *err)
{
    struct qt_layer *l = r->layer;
    struct layer_experts *e = &l->work.experts;
    const struct config *cfg = &l->model->cfg;
    const bool normed = l->parts[ROLE_ROUTER_NORM].weight != NULL;
    const float *select_bias = l->parts[ROLE_SELECT_BIAS].weight;
    const bool gated = l->parts[ROLE_SHARED_GATE].weight != NULL;
    struct route_job job = {
        cfg, e->scores, select_bias ? e->select_bias : NULL, gated ? e->gate : NULL, weights, r->m};
    int rc;
    if (normed) {
        QT_TRY(layer_apply_norm(r, ROLE_ROUTER_NORM, e->normed, r->hidden, r->m, err));
        QT_TRY(l->be->scale(l->be, e->normed, (float)(1 / sqrt((double)cfg->info.hidden)),
                            r->m * cfg->info.hidden, err));
    }
    QT_TRY(scores_of(e->scores, cfg->routed, router, r, normed ? e->normed : x, err));
    if (gated)
        QT_TRY(scores_of(e->gate, 1, ROLE_SHARED_GATE, r, x, err));
    if (select_bias)
        QT_TRY(l->be->download(l->be, e->select_bias, select_bias,
                               cfg->routed * sizeof *e->select_bias, err));
    QT_TRY(qt_parallel(qt_ceil_div(r->m, ROUTE_TOKENS), route_item, &job, err));
done:
    return rc;
}

struct route_grad_job {
    const struct config *cfg;
    const struct layer_experts *e;
    const float *dweights;
    float *dlogits, *dgate;
    size_t m;
};

/* The weight of each chosen expert is its element of a softmax. p: scratch [routed]. */
static void sparse_mixer_grad(float *dlogits, double *p, const float *logit, const float *dweights,
                              const struct config *cfg)
{
    size_t at = SIZE_MAX;
    for (int c = 0; c < 2; c++) {
        at = sparse_mixer(p, at, logit, cfg);
        for (size_t i = 0; i < cfg->routed; i++) {
            const double d = (double)dweights[at] * p[at] * ((i == at) - p[i]);
            dlogits[i] = (float)(c ? (double)dlogits[i] + d : d);
        }
    }
}

/* For a chosen expert i, w_i = factor p_i, or factor p_i / sum of the chosen p. p, dp: scratch
 * [routed]; dp = gradients of p. */
static void grad_of_token(float *dlogits, double *p, double *dp, const float *logit,
                          const float *weights, const float *dweights, const struct config *cfg)
{
    const size_t n = cfg->routed;
    double sum = cfg->arch->routing_eps > 0 ? cfg->arch->routing_eps : 1e-20, dot = 0, through = 0;
    if (cfg->arch->sparse_mixer) {
        sparse_mixer_grad(dlogits, p, logit, dweights, cfg);
        return;
    }
    score(p, logit, cfg);
    for (size_t i = 0; i < n; i++) {
        dp[i] = weights[i] > 0 ? cfg->routing_scale * (double)dweights[i] : 0;
        sum += weights[i] > 0 ? p[i] : 0;
        dot += dp[i] * p[i];
    }
    for (size_t i = 0; i < n && cfg->normalize_routing; i++)
        dp[i] = weights[i] > 0 ? (dp[i] - dot / sum) / sum : 0;
    for (size_t i = 0; i < n; i++)
        through += dp[i] * p[i];
    for (size_t i = 0; i < n; i++)
        dlogits[i] = (float)(cfg->arch->sigmoid_router ? dp[i] * p[i] * (1 - p[i])
                                                       : p[i] * (dp[i] - through));
}

static int route_grad_item(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct route_grad_job *job = ctx;
    const size_t n = job->cfg->routed, experts = job->cfg->info.experts;
    const size_t end = qt_min_size((item + 1) * ROUTE_TOKENS, job->m);
    double *p;
    int rc = qt_array_new(&p, n, 2 * sizeof *p, err);
    (void)thread;
    for (size_t i = item * ROUTE_TOKENS; rc == QT_OK && i < end; i++) {
        const float *weights = job->e->weights + i * experts, *d = job->dweights + i * experts;
        grad_of_token(job->dlogits + i * n, p, p + n, job->e->scores + i * n, weights, d, job->cfg);
        if (job->dgate)
            job->dgate[i] = d[n] * weights[n] * (1 - weights[n]);
    }
    qt_free(p);
    return rc;
}

int experts_route_grad(float *dlogits, float *dgate, const float *dweights,
                       const struct layer_run *r, struct qt_err *err)
{
    struct route_grad_job job = {
        &r->layer->model->cfg, &r->layer->work.experts, dweights, dlogits, dgate, r->m};
    return qt_parallel(qt_ceil_div(r->m, ROUTE_TOKENS), route_grad_item, &job, err);
}

/* ---- running -------------------------------------------------------------------------------- */

/* Finishes the output of an expert, in experts.out, before it is added to the sum over experts. */
static int finish_expert(const struct layer_run *r, size_t expert, size_t tokens,
                         struct qt_err *err)
{
    struct qt_layer *l = r->layer;
    const struct layer_experts *e = &l->work.experts;
    const struct config *cfg = &l->model->cfg;
    if (expert == cfg->routed)
        return layer_apply_norm(r, ROLE_SHARED_OUT, e->out, e->out, tokens, err);
    return l->parts[ROLE_EXPERT_SCALE].weight ? l->be->scale(l->be, e->out, e->output_scale[expert],
                                                             tokens * cfg->info.hidden, err)
                                              : QT_OK;
}

/* Adds the weighted output of an expert for its tokens (experts.tokens) to experts.sum. */
static int run_expert(bool *stop, const float *x, const struct layer_run *r, size_t expert,
                      struct qt_err *err)
{
    const size_t hidden = r->layer->model->cfg.info.hidden;
    struct layer_experts *e = &r->layer->work.experts;
    const struct qt_tokens *t = &e->tokens;
    struct qt_backend *be = r->layer->be;
    const bool scaled = r->layer->model->cfg.arch->scaled_inputs;
    struct layer_run selected = *r; /* for the expert's tokens; its hidden states are not used */
    int rc = QT_OK;
    selected.m = t->count;
    if (t->count == 0)
        goto done;
    QT_TRY(be->gather_rows(be, e->in, x, t->row, scaled ? t->weight : NULL, t->count, hidden, err));
    QT_TRY(layer_mlp(stop, e->out, e->in, &selected, expert, err));
    if (*stop)
        goto done;
    QT_TRY(finish_expert(&selected, expert, t->count, err));
    QT_TRY(be->scatter_rows(be, e->sum, e->out, t->row, scaled ? NULL : t->weight, t->count, hidden,
                            err));
done:
    return rc;
}

/* *out = the input of the routed experts. Also reads the factors of their outputs. */
static int prepare_routed(const float **out, const struct layer_run *r, const float *x,
                          struct qt_err *err)
{
    struct qt_layer *l = r->layer;
    struct layer_experts *e = &l->work.experts;
    const float *scale = l->parts[ROLE_EXPERT_SCALE].weight;
    int rc = QT_OK;
    *out = x;
    if (scale)
        QT_TRY(l->be->download(l->be, e->output_scale, scale,
                               l->model->cfg.routed * sizeof *e->output_scale, err));
    if (l->parts[ROLE_EXPERTS_IN].weight) {
        QT_TRY(layer_apply_norm(r, ROLE_EXPERTS_IN, e->normed, r->hidden, r->m, err));
        *out = e->normed;
    }
done:
    return rc;
}

int experts_begin(const struct layer_run *r, enum role bias, struct qt_err *err)
{
    const size_t hidden = r->layer->model->cfg.info.hidden;
    const float *from = r->layer->parts[bias].weight;
    struct qt_backend *be = r->layer->be;
    float *sum = r->layer->work.experts.sum;
    uint32_t *first = NULL; /* row 0 for every token */
    int rc;
    if (!from)
        return be->zero(be, sum, r->m * hidden * sizeof *sum, err);
    QT_TRY(qt_array_new(&first, r->m, sizeof *first, err));
    QT_TRY(be->gather_rows(be, sum, from, first, NULL, r->m, hidden, err));
done:
    qt_free(first);
    return rc;
}

int experts_run(bool *stop, float *y, const float *x, const struct layer_run *r, struct qt_err *err)
{
    const struct qt_model_info *info = &r->layer->model->cfg.info;
    struct layer_experts *e = &r->layer->work.experts;
    const size_t bytes = r->m * info->hidden * sizeof *y;
    int rc = QT_OK;
    const int only = layer_expert(r->layer->def, r->stop);
    const size_t first = only < 0 ? 0 : (size_t)only, end = only < 0 ? info->experts : first + 1;
    const float *routed_x;
    bool stopped;
    *stop = r->stop >= r->layer->def->mixer_inputs;
    if (r->stop == experts_input(&r->layer->model->cfg, r->layer->def)) {
        QT_TRY(prepare_routed(&routed_x, r, x, err));
        return r->hook->fn(r->hook->ctx, r->stop, routed_x, r->m, info->hidden, err);
    }
    if (!r->tokens)
        QT_TRY(experts_route(e->weights, ROLE_ROUTER, r, x, err));
    if (!*stop)
        QT_TRY(experts_begin(r, ROLE_EXPERTS_BIAS, err));
    QT_TRY(prepare_routed(&routed_x, r, x, err));
    for (size_t i = first; i < end; i++) {
        if (r->tokens)
            qt_tokens_slice(&e->tokens, r->tokens, r->first_token, r->m);
        else
            qt_tokens_of_expert(&e->tokens, e->weights, r->m, info->experts, i, 0);
        if (i == r->layer->model->cfg.routed && !*stop)
            QT_TRY(layer_apply_norm(r, ROLE_EXPERTS_OUT, e->sum, e->sum, r->m, err));
        QT_TRY(run_expert(&stopped, i < r->layer->model->cfg.routed ? routed_x : x, r, i, err));
    }
    if (!*stop)
        QT_TRY(r->layer->be->copy(r->layer->be, y, e->sum, bytes, err));
done:
    return rc;
}
