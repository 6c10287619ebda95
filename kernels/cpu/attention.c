/*
 * Attention as matrix products over tiles of queries:
 *
 *            keys  lo     hi
 *                  |......|          one item = (sequence, head, tile of ROWS queries):
 *   queries  r0  - xxxxx  .          S = scale * Q[r0..r1) K[lo..hi)^T    sgemm
 *            r1  - .xxxxxxx          P = softmax of the x part, 0 elsewhere
 *                                    Y = P V[lo..hi) / row sums           sgemm
 *
 * Queries are counted by their positions, from `past` on. hi = r1 by causality, unless attention
 * goes both ways; lo is the first key in the window of row r0. Heads stay interleaved in memory:
 * the leading dimension of each product skips the other heads. With exact keys the scores of each
 * query with the keys of its own group are replaced before the softmax.
 *
 * Backward: one item = (sequence, KV head). The item processes its query heads and tiles in order,
 * so one thread accumulates dK and dV. P is computed as above and normalized; then
 *
 *   dV += P^T dY;  dP = dY V^T;  dS = P (dP - rowsum(P dP)), times the derivative of the softcap
 *   dQ = scale * dS K;  dK += scale * dS^T Q
 */
#include "kernels/cpu/internal.h"
#include "kernels/cpu/math.h"

#include <cblas.h>
#include <math.h>

/* Rows of a query tile. More rows waste work above the diagonal; fewer rows make the products too
 * small to be efficient. Time relative to 64 rows, at 512 and 2048 tokens: 32 rows 100 % and 121 %;
 * 128 rows 109 % and 94 %. */
enum { ROWS = 64 };

struct job {
    const struct cpu_scratch *scratch;
    float *y;
    const float *q, *k, *v;
    const struct qt_attention *a;
    size_t tiles; /* per sequence */
};

/* Returns the first key that query i attends to. */
static size_t first_key(const struct qt_attention *a, size_t i)
{
    return a->window && i >= a->window ? i - a->window + 1 : 0;
}

/* Returns the key behind the last one that query i attends to. */
static size_t end_key(const struct qt_attention *a, size_t i)
{
    const size_t all = a->past + a->seqlen;
    return !a->both_ways ? i + 1 : a->window ? qt_min_size(i + a->window, all) : all;
}

/* The sink's share of the softmax's denominator, relative to the largest of the scores s[n]. */
static double sink_share(const float *s, size_t n, float sink)
{
    float max = s[0];
    for (size_t j = 1; j < n; j++)
        max = s[j] > max ? s[j] : max;
    return exp((double)sink - (double)max);
}

/* Turns the scores of query i against keys [lo, hi) into unnormalized probabilities; returns their
 * sum, and that of the head's sink. caps, if not NULL, receives the scores after the softcap. */
static double softmax_row(float *s, float *caps, const struct qt_attention *a, size_t head,
                          size_t i, size_t lo, size_t hi)
{
    size_t from = first_key(a, i) - lo, n = end_key(a, i) - lo - from;
    memset(s, 0, from * sizeof *s);
    memset(s + from + n, 0, (hi - lo - from - n) * sizeof *s);
    if (a->softcap > 0.0f)
        cpu_softcap(s + from, s + from, a->softcap, n);
    if (caps)
        memcpy(caps + from, s + from, n * sizeof *caps);
    for (size_t j = from; a->bias && j < from + n; j++)
        s[j] += a->bias[head * a->bias_step + lo + j];
    const double sink = a->sinks ? sink_share(s + from, n, a->sinks[head]) : 0;
    return cpu_softmax(s + from, n) + sink;
}

/* The keys of one group and KV head, rounded with the range of the tokens that are present. */
struct group {
    float *low, *high;        /* [dim] */
    struct qt_kv4_grid *grid; /* [dim] */
    float *exact, *rounded;   /* [dim][QT_KV_GROUP] */
    size_t dim;
    size_t first, count; /* position of the first token; tokens present */
};

static size_t group_floats(const struct qt_attention *a)
{
    return a->exact_keys ? a->head_dim * (4 + 2 * QT_KV_GROUP) : 0;
}

static struct group group_in(float *scratch, const struct qt_attention *a)
{
    float *low = scratch, *high = low + a->head_dim, *grid = high + a->head_dim;
    float *exact = grid + 2 * a->head_dim, *rounded = exact + a->head_dim * QT_KV_GROUP;
    return (struct group){.low = low,
                          .high = high,
                          .grid = (struct qt_kv4_grid *)grid,
                          .exact = exact,
                          .rounded = rounded,
                          .dim = a->head_dim};
}

static void group_add(struct group *g, const float *key)
{
    size_t t = g->count++;
    for (size_t d = 0; d < g->dim; d++) {
        float *exact = g->exact + d * QT_KV_GROUP, x = key[d];
        float *rounded = g->rounded + d * QT_KV_GROUP;
        size_t from = t;
        exact[t] = x;
        if (t == 0 || x < g->low[d] || x > g->high[d]) {
            g->low[d] = t == 0 || x < g->low[d] ? x : g->low[d];
            g->high[d] = t == 0 || x > g->high[d] ? x : g->high[d];
            g->grid[d] = qt_kv4_key_grid(qt_kv4_key_param(g->low[d], g->high[d]));
            from = 0;
        }
        if (g->first == 0) /* token 0 */
            rounded[0] = x;
        else
            cpu_kv4_round(rounded + from, exact + from, g->grid[d], t + 1 - from);
    }
}

/* Replaces the scores s[r1 - r0][r1 - lo] of each query with the keys of its own group. */
static void own_group_scores(float *s, float *scratch, const struct job *job, size_t r0, size_t r1,
                             size_t lo, size_t at_q, size_t first_k)
{
    const struct qt_attention *a = job->a;
    size_t dim = a->head_dim, ldk = a->kv_heads * dim, ldq = a->heads * dim;
    struct group g = group_in(scratch, a);
    for (size_t i = r0; i < r1; i++) {
        if (i == r0 || i == qt_kv4_group(i)) {
            g.first = qt_kv4_group(i);
            g.count = 0;
        }
        while (g.first + g.count <= i)
            group_add(&g, a->exact_keys + first_k + (g.first + g.count) * ldk);
        size_t from = qt_max_size(g.first, lo);
        cblas_sgemv(CblasRowMajor, CblasTrans, (int)dim, (int)(i + 1 - from), a->scale,
                    g.rounded + (from - g.first), QT_KV_GROUP, job->q + at_q + (i - r0) * ldq, 1,
                    0.0f, s + (i - r0) * (r1 - lo) + (from - lo), 1);
    }
}

static int attention_item(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct job *job = ctx;
    const struct qt_attention *a = job->a;
    size_t tile = item % job->tiles, head = item / job->tiles % a->heads;
    size_t seq = item / job->tiles / a->heads, kv_head = head / (a->heads / a->kv_heads);
    size_t all = a->past + a->seqlen, r0 = a->past + tile * ROWS;
    size_t r1 = qt_min_size(r0 + ROWS, all), lo = first_key(a, r0), hi = end_key(a, r1 - 1);
    size_t ldq = a->heads * a->head_dim, ldk = a->kv_heads * a->head_dim;
    size_t at_q = (seq * a->seqlen + tile * ROWS) * ldq + head * a->head_dim;
    size_t at_k = (seq * all + lo) * ldk + kv_head * a->head_dim;
    int rows = (int)(r1 - r0), keys = (int)(hi - lo), dim = (int)a->head_dim;
    float *s = cpu_scratch_of(job->scratch, thread), *y = job->y + at_q;
    double sums[ROWS];
    (void)err;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, keys, dim, a->scale, job->q + at_q,
                (int)ldq, job->k + at_k, (int)ldk, 0.0f, s, keys);
    if (a->exact_keys)
        own_group_scores(s, s + (size_t)rows * (size_t)keys, job, r0, r1, lo, at_q,
                         at_k - lo * ldk);
    for (size_t i = r0; i < r1; i++)
        sums[i - r0] = softmax_row(s + (i - r0) * (hi - lo), NULL, a, head, i, lo, hi);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, dim, keys, 1.0f, s, keys,
                job->v + at_k, (int)ldk, 0.0f, y, (int)ldq);
    for (size_t i = r0; i < r1; i++)
        cpu_scale(y + (i - r0) * ldq, (float)(1.0 / sums[i - r0]), a->head_dim);
    return QT_OK;
}

/* The largest number of keys that a query tile attends to. */
static size_t max_keys(const struct qt_attention *a)
{
    const size_t all = a->past + a->seqlen;
    return a->window ? qt_min_size(all, (a->both_ways ? 2 : 1) * a->window + ROWS) : all;
}

int cpu_attention(struct cpu_scratch *scratch, float *y, const float *q, const float *k,
                  const float *v, size_t m, const struct qt_attention *a, struct qt_err *err)
{
    struct job job = {scratch, y, q, k, v, a, qt_ceil_div(a->seqlen, ROWS)};
    size_t keys = max_keys(a);
    int rc = QT_OK;
    QT_TRY(cpu_check_width(a->heads * a->head_dim, err));
    QT_TRY(cpu_check_width(keys, err));
    QT_TRY(cpu_scratch_need(scratch, ROWS * keys + group_floats(a), err));
    QT_TRY(qt_parallel(m / a->seqlen * a->heads * job.tiles, attention_item, &job, err));
done:
    return rc;
}

/* ---- gradient ------------------------------------------------------------------------------- */

struct grad_job {
    const struct cpu_scratch *scratch;
    float *dq, *dk, *dv;
    const float *dy, *q, *k, *v;
    const struct qt_attention *a;
    size_t ldq, ldk;
};

/* Computes P and dS of a query tile into p and ds. caps: scratch of the same size, NULL without
 * softcap. */
static void grad_scores(float *p, float *ds, float *caps, const struct grad_job *job, size_t head,
                        size_t r0, size_t r1, size_t lo, size_t at_q, size_t at_k)
{
    const struct qt_attention *a = job->a;
    int rows = (int)(r1 - r0), keys = (int)(r1 - lo), dim = (int)a->head_dim;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, keys, dim, a->scale, job->q + at_q,
                (int)job->ldq, job->k + at_k, (int)job->ldk, 0.0f, p, keys);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, keys, dim, 1.0f, job->dy + at_q,
                (int)job->ldq, job->v + at_k, (int)job->ldk, 0.0f, ds, keys);
    for (size_t i = r0; i < r1; i++) {
        size_t at = (i - r0) * (r1 - lo);
        double sum = softmax_row(p + at, caps ? caps + at : NULL, a, head, i, lo, r1);
        cpu_scale(p + at, (float)(1.0 / sum), r1 - lo);
        cpu_softmax_grad(ds + at, p + at, r1 - lo);
        if (caps) /* masked keys have dS = 0 already */
            cpu_softcap_grad(ds + at + first_key(a, i) - lo, caps + at + first_key(a, i) - lo,
                             a->softcap, i + 1 - first_key(a, i));
    }
}

static void grad_tile(const struct grad_job *job, float *scratch, size_t seq, size_t head,
                      size_t r0)
{
    const struct qt_attention *a = job->a;
    size_t r1 = qt_min_size(r0 + ROWS, a->seqlen), lo = first_key(a, r0);
    size_t kv_head = head / (a->heads / a->kv_heads), area = ROWS * max_keys(a);
    size_t at_q = (seq * a->seqlen + r0) * job->ldq + head * a->head_dim;
    size_t at_k = (seq * a->seqlen + lo) * job->ldk + kv_head * a->head_dim;
    int rows = (int)(r1 - r0), keys = (int)(r1 - lo), dim = (int)a->head_dim;
    int ldq = (int)job->ldq, ldk = (int)job->ldk;
    float *p = scratch, *ds = p + area, *caps = a->softcap > 0.0f ? ds + area : NULL;
    grad_scores(p, ds, caps, job, head, r0, r1, lo, at_q, at_k);
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, keys, dim, rows, 1.0f, p, keys,
                job->dy + at_q, ldq, 1.0f, job->dv + at_k, ldk);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, dim, keys, a->scale, ds, keys,
                job->k + at_k, ldk, 0.0f, job->dq + at_q, ldq);
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, keys, dim, rows, a->scale, ds, keys,
                job->q + at_q, ldq, 1.0f, job->dk + at_k, ldk);
}

static int grad_item(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct grad_job *job = ctx;
    const struct qt_attention *a = job->a;
    size_t seq = item / a->kv_heads, kv_head = item % a->kv_heads, group = a->heads / a->kv_heads;
    size_t first = seq * a->seqlen * job->ldk + kv_head * a->head_dim;
    float *scratch = cpu_scratch_of(job->scratch, thread);
    (void)err;
    for (size_t i = 0; i < a->seqlen; i++) {
        memset(job->dk + first + i * job->ldk, 0, a->head_dim * sizeof(float));
        memset(job->dv + first + i * job->ldk, 0, a->head_dim * sizeof(float));
    }
    for (size_t head = kv_head * group; head < (kv_head + 1) * group; head++)
        for (size_t r0 = 0; r0 < a->seqlen; r0 += ROWS)
            grad_tile(job, scratch, seq, head, r0);
    return QT_OK;
}

int cpu_attention_grad(struct cpu_scratch *scratch, float *dq, float *dk, float *dv,
                       const float *dy, const float *q, const float *k, const float *v, size_t m,
                       const struct qt_attention *a, struct qt_err *err)
{
    struct grad_job job = {
        scratch, dq, dk, dv, dy, q, k, v, a, a->heads * a->head_dim, a->kv_heads * a->head_dim};
    size_t areas = a->softcap > 0.0f ? 3 : 2;
    int rc = QT_OK;
    QT_TRY(cpu_check_width(job.ldq, err));
    QT_TRY(cpu_check_width(max_keys(a), err));
    QT_TRY(cpu_scratch_need(scratch, areas * ROWS * max_keys(a), err));
    QT_TRY(qt_parallel(m / a->seqlen * a->kv_heads, grad_item, &job, err));
done:
    return rc;
}
