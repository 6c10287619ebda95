/*
 * A mixture of experts: which tokens go through which expert, and there. The router's softmax is
 * made into shares on the host, of which lists of tokens are made (tokens.c); the experts are run
 * one after the other, each over its tokens of a chunk.
 */
#include "calib/block.h"

/* ---- the router ----------------------------------------------------------------------------- */

enum { ROUTE_TOKENS = 64 }; /* of an item */

struct route_job {
    const struct config *cfg;
    float *share; /* logits until they are shares */
    size_t m;
};

/* The largest that is not chosen yet; ties: the lowest number. Chosen ones are below 0. */
static size_t best(const double *p, size_t n)
{
    size_t at = 0;
    for (size_t i = 1; i < n; i++)
        if (p[i] > p[at])
            at = i;
    return at;
}

static void shares_of_token(float *share, double *p, const struct config *cfg)
{
    const size_t n = cfg->info.experts;
    double most = (double)share[0], sum = 0, chosen = 0;
    for (size_t i = 1; i < n; i++)
        most = fmax(most, (double)share[i]);
    for (size_t i = 0; i < n; i++)
        sum += p[i] = exp((double)share[i] - most);
    for (size_t i = 0; i < n && !isfinite(sum); i++)
        share[i] = NAN;
    if (!isfinite(sum))
        return;
    for (size_t i = 0; i < n; i++)
        share[i] = (float)-(p[i] /= sum);
    for (size_t c = 0; c < cfg->chosen; c++) {
        const size_t i = best(p, n);
        chosen += p[i];
        share[i] = (float)p[i];
        p[i] = -1;
    }
    if (cfg->shares_of_one)
        for (size_t i = 0; i < n; i++)
            share[i] = (float)((double)share[i] / chosen);
}

static int route_item(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct route_job *job = ctx;
    const size_t n = job->cfg->info.experts, first = item * ROUTE_TOKENS;
    const size_t end = qt_min_size(first + ROUTE_TOKENS, job->m);
    double *p;
    int rc = qt_array_new(&p, n, sizeof *p, err);
    (void)thread;
    if (rc < 0)
        return rc;
    for (size_t i = first; i < end; i++)
        shares_of_token(job->share + i * n, p, job->cfg);
    qt_free(p);
    return QT_OK;
}

int experts_route(float *share, const struct block_run *r, const float *x, struct qt_err *err)
{
    struct qt_block *b = r->b;
    const struct config *cfg = &b->model->cfg;
    const size_t count = r->m * cfg->info.experts;
    struct route_job job = {cfg, share, r->m};
    int rc;
    QT_TRY(block_linear(r, ROLE_ROUTER, b->experts.logits, x, err));
    QT_TRY(b->be->download(b->be, share, b->experts.logits, count * sizeof *share, err));
    QT_TRY(qt_parallel(qt_ceil_div(r->m, ROUTE_TOKENS), route_item, &job, err));
done:
    return rc;
}

/* ---- running -------------------------------------------------------------------------------- */

/* Adds to b->experts.sum. */
static int run_expert(bool *stop, const float *x, const struct block_run *r, size_t expert,
                      struct qt_err *err)
{
    const size_t hidden = r->b->model->cfg.info.hidden;
    struct block_experts *e = &r->b->experts;
    const struct qt_tokens *t = &e->tokens;
    struct qt_backend *be = r->b->be;
    struct block_run some = *r; /* whose hidden states are not used */
    int rc = QT_OK;
    some.m = t->count;
    if (t->count == 0)
        goto done;
    QT_TRY(be->gather_rows(be, e->in, x, t->row, NULL, t->count, hidden, err));
    QT_TRY(block_mlp(stop, e->out, e->in, &some, expert, err));
    if (!*stop)
        QT_TRY(be->scatter_rows(be, e->sum, e->out, t->row, t->share, t->count, hidden, err));
done:
    return rc;
}

int experts_run(bool *stop, float *y, const float *x, const struct block_run *r, struct qt_err *err)
{
    const struct qt_model_info *info = &r->b->model->cfg.info;
    struct block_experts *e = &r->b->experts;
    const size_t bytes = r->m * info->hidden * sizeof *y;
    int rc = QT_OK;
    const int only = qt_model_expert(r->b->model, r->stop);
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
