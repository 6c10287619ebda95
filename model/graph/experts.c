/*
 * A mixture of experts: which tokens go through which expert, and there. The router's scores are
 * made into shares on the host, of which lists of tokens are made (tokens.c); the experts are run
 * one after the other, each over its tokens of a chunk.
 */
#include "model/graph/layer.h"

/* ---- the router ----------------------------------------------------------------------------- */

enum { ROUTE_TOKENS = 64 }; /* of an item */

struct route_job {
    const struct config *cfg;
    const float *logits; /* [m][routed] */
    const float *choice; /* [routed] or NULL */
    const float *gate;   /* [m], of the expert that all go through, or NULL */
    float *share;        /* [m][experts] */
    size_t m;
};

/* The largest that is a number; ties: the lowest. */
static size_t best(const double *x, size_t n)
{
    size_t at = 0;
    for (size_t i = 1; i < n; i++)
        if (x[i] > x[at] || (isnan(x[at]) && !isnan(x[i])))
            at = i;
    return at;
}

/* Softmax or sigmoid of the router's logits, which are finite. */
static void score(double *p, const float *logit, const struct config *cfg)
{
    const size_t n = cfg->routed;
    const bool apart = cfg->arch->sigmoid_router;
    double most = apart ? 0 : (double)logit[0], sum = 0;
    for (size_t i = 1; i < n && !apart; i++)
        most = fmax(most, (double)logit[i]);
    for (size_t i = 0; i < n; i++) {
        p[i] = apart ? 1 / (1 + exp(-(double)logit[i])) : exp((double)logit[i] - most);
        sum += p[i];
    }
    for (size_t i = 0; i < n && !apart; i++)
        p[i] /= sum;
}

/* All but the groups whose two best add up to most are out of the race. */
static void leave_groups(double *rank, const struct config *cfg)
{
    const size_t n = cfg->routed / cfg->groups;
    for (size_t out = cfg->groups; out > cfg->chosen_groups; out--) {
        double least = INFINITY, *worst = rank;
        for (double *group = rank; group < rank + cfg->routed; group += n) {
            const size_t first = best(group, n);
            double second = n > 1 ? -INFINITY : 0;
            for (size_t i = 0; i < n; i++)
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

/* p, rank: room for `routed` each. gate: the share of the one that all go through. */
static void shares_of_token(float *share, double *p, double *rank, const float *logit,
                            const float *choice, double gate, const struct config *cfg)
{
    const size_t n = cfg->routed;
    double chosen = 0, least = 0, last = 0, by = cfg->share_scale;
    score(p, logit, cfg);
    for (size_t i = n; i < cfg->info.experts; i++)
        share[i] = (float)gate;
    for (size_t i = 0; i < n; i++)
        rank[i] = p[i] + (choice ? (double)choice[i] : 0);
    leave_groups(rank, cfg);
    for (size_t i = 0; i < n; i++)
        share[i] = (float)-p[i];
    for (size_t c = 0; c < cfg->chosen; c++) {
        const size_t i = best(rank, n);
        chosen += least = p[i];
        last = rank[i];
        share[i] = (float)p[i];
        rank[i] = NAN;
    }
    for (size_t i = 0; i < n && choice; i++)
        if (!isnan(rank[i])) /* how near it came, not its score, which may be the largest */
            share[i] = (float)-fmax(0, least - (last - rank[i]));
    if (cfg->shares_of_one)
        by /= chosen + 1e-20;
    for (size_t i = 0; i < n && by != 1; i++)
        share[i] = (float)((double)share[i] * by);
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
        shares_of_token(job->share + i * job->cfg->info.experts, p, p + n, job->logits + i * n,
                        job->choice, gate, job->cfg);
    }
    qt_free(p);
    return QT_OK;
}

/* out[m][n] (host memory): of the router, or of the gate of the expert that all go through. */
static int scores_of(float *out, size_t n, enum role role, const struct layer_run *r,
                     const float *x, struct qt_err *err)
{
    struct qt_layer *b = r->b;
    const size_t count = r->m * n;
    int rc;
    QT_TRY(layer_linear(r, role, b->experts.logits, x, err));
    QT_TRY(b->be->download(b->be, out, b->experts.logits, count * sizeof *out, err));
    if (qt_find_nonfinite(out, count) < count)
        rc = qt_fail(err, QT_E_INPUT, b->dir, b->layer->parts[role].weight,
                     "gives scores of experts that are not finite");
done:
    return rc;
}

int experts_route(float *share, const struct layer_run *r, const float *x, struct qt_err *err)
{
    struct qt_layer *b = r->b;
    struct layer_experts *e = &b->experts;
    const struct config *cfg = &b->model->cfg;
    const float *choice = b->parts[ROLE_CHOICE].weight;
    const bool gated = b->parts[ROLE_SHARED_GATE].weight != NULL;
    struct route_job job = {cfg,   e->scores, choice ? e->choice : NULL, gated ? e->gate : NULL,
                            share, r->m};
    int rc;
    QT_TRY(scores_of(e->scores, cfg->routed, ROLE_ROUTER, r, x, err));
    if (gated)
        QT_TRY(scores_of(e->gate, 1, ROLE_SHARED_GATE, r, x, err));
    if (choice)
        QT_TRY(b->be->download(b->be, e->choice, choice, cfg->routed * sizeof *e->choice, err));
    QT_TRY(qt_parallel(qt_ceil_div(r->m, ROUTE_TOKENS), route_item, &job, err));
done:
    return rc;
}

/* ---- running -------------------------------------------------------------------------------- */

/* Adds to b->experts.sum. */
static int run_expert(bool *stop, const float *x, const struct layer_run *r, size_t expert,
                      struct qt_err *err)
{
    const size_t hidden = r->b->model->cfg.info.hidden;
    struct layer_experts *e = &r->b->experts;
    const struct qt_tokens *t = &e->tokens;
    struct qt_backend *be = r->b->be;
    struct layer_run some = *r; /* whose hidden states are not used */
    int rc = QT_OK;
    some.m = t->count;
    if (t->count == 0)
        goto done;
    QT_TRY(be->gather_rows(be, e->in, x, t->row, NULL, t->count, hidden, err));
    QT_TRY(layer_mlp(stop, e->out, e->in, &some, expert, err));
    if (!*stop)
        QT_TRY(be->scatter_rows(be, e->sum, e->out, t->row, t->share, t->count, hidden, err));
done:
    return rc;
}

int experts_run(bool *stop, float *y, const float *x, const struct layer_run *r, struct qt_err *err)
{
    const struct qt_model_info *info = &r->b->model->cfg.info;
    struct layer_experts *e = &r->b->experts;
    const size_t bytes = r->m * info->hidden * sizeof *y;
    int rc = QT_OK;
    const int only = layer_expert(r->b->layer, r->stop);
    const size_t first = only < 0 ? 0 : (size_t)only, end = only < 0 ? info->experts : first + 1;
    bool stopped;
    *stop = only >= 0;
    if (!r->tokens)
        QT_TRY(experts_route(e->share, r, x, err));
    if (!*stop)
        QT_TRY(r->b->be->zero(r->b->be, e->sum, bytes, err));
    for (size_t i = first; i < end; i++) {
        if (r->tokens)
            qt_tokens_slice(&e->tokens, r->tokens, r->at, r->m);
        else
            qt_tokens_of_expert(&e->tokens, e->share, r->m, info->experts, i, 0);
        QT_TRY(run_expert(&stopped, x, r, i, err));
    }
    if (!*stop)
        QT_TRY(r->b->be->copy(r->b->be, y, e->sum, bytes, err));
done:
    return rc;
}
