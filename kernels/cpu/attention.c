/*
 * Causal attention as matrix products over blocks of queries:
 *
 *            keys  lo     hi
 *                  |......|          one item = (sequence, head, block of ROWS queries):
 *   queries  r0  - xxxxx  .          S = scale * Q[r0..r1) K[lo..hi)^T    sgemm
 *            r1  - .xxxxxxx          P = softmax of the x part, 0 elsewhere
 *                                    Y = P V[lo..hi) / row sums           sgemm
 *
 * hi = r1 by causality, lo = the first key that row r0's window reaches. Heads stay interleaved in
 * memory; the leading dimension of each product steps over the other heads.
 *
 * Backward, one item = (sequence, key-value head), whose query heads and blocks come in order, so
 * that dK and dV are sums of one thread. P again as above, normalised; then
 *
 *   dV += P^T dY;  dP = dY V^T;  dS = P (dP - rowsum(P dP)), times the slope of the soft cap
 *   dQ = scale * dS K;  dK += scale * dS^T Q
 */
#include "kernels/cpu/internal.h"
#include "kernels/cpu/math.h"

#include <cblas.h>

/* Rows of a block: waste above the diagonal against products too small to run well. Measured time
 * relative to 64 rows: 32 rows 100 % at 512 tokens, 121 % at 2048; 128 rows 109 % and 94 %. */
enum { ROWS = 64 };

struct job {
    const struct cpu_scratch *scratch;
    float *y;
    const float *q, *k, *v;
    const struct qt_attention *a;
    size_t blocks; /* per sequence */
};

/* First key that query i sees. */
static size_t first_key(const struct qt_attention *a, size_t i)
{
    return a->window && i >= a->window ? i - a->window + 1 : 0;
}

/* Scores of query i against keys [lo, hi) -> unnormalised probabilities; returns their sum. caps,
 * if not NULL, receives the scores that the soft cap has left. */
static double softmax_row(float *s, float *caps, const struct qt_attention *a, size_t i, size_t lo,
                          size_t hi)
{
    size_t from = first_key(a, i) - lo, n = i + 1 - lo - from;
    memset(s, 0, from * sizeof *s);
    memset(s + from + n, 0, (hi - lo - from - n) * sizeof *s);
    if (a->softcap > 0.0f)
        cpu_softcap(s + from, s + from, a->softcap, n);
    if (caps)
        memcpy(caps + from, s + from, n * sizeof *caps);
    return cpu_softmax(s + from, n);
}

static int attention_item(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct job *job = ctx;
    const struct qt_attention *a = job->a;
    size_t block = item % job->blocks, head = item / job->blocks % a->heads;
    size_t seq = item / job->blocks / a->heads, kv_head = head / (a->heads / a->kv_heads);
    size_t r0 = block * ROWS, r1 = qt_min_size(r0 + ROWS, a->seqlen), lo = first_key(a, r0);
    size_t ldq = a->heads * a->head_dim, ldk = a->kv_heads * a->head_dim;
    size_t at_q = (seq * a->seqlen + r0) * ldq + head * a->head_dim;
    size_t at_k = (seq * a->seqlen + lo) * ldk + kv_head * a->head_dim;
    int rows = (int)(r1 - r0), keys = (int)(r1 - lo), dim = (int)a->head_dim;
    float *s = cpu_scratch_of(job->scratch, thread), *y = job->y + at_q;
    double sums[ROWS];
    (void)err;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, keys, dim, a->scale, job->q + at_q,
                (int)ldq, job->k + at_k, (int)ldk, 0.0f, s, keys);
    for (size_t i = r0; i < r1; i++)
        sums[i - r0] = softmax_row(s + (i - r0) * (r1 - lo), NULL, a, i, lo, r1);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, dim, keys, 1.0f, s, keys,
                job->v + at_k, (int)ldk, 0.0f, y, (int)ldq);
    for (size_t i = r0; i < r1; i++)
        cpu_scale(y + (i - r0) * ldq, (float)(1.0 / sums[i - r0]), a->head_dim);
    return QT_OK;
}

/* Keys that a block of queries can reach. */
static size_t most_keys(const struct qt_attention *a)
{
    return a->window ? qt_min_size(a->seqlen, a->window + ROWS) : a->seqlen;
}

int cpu_attention(struct cpu_scratch *scratch, float *y, const float *q, const float *k,
                  const float *v, size_t m, const struct qt_attention *a, struct qt_err *err)
{
    struct job job = {scratch, y, q, k, v, a, qt_ceil_div(a->seqlen, ROWS)};
    size_t keys = most_keys(a);
    int rc = QT_OK;
    QT_TRY(cpu_check_width(a->heads * a->head_dim, err));
    QT_TRY(cpu_check_width(keys, err));
    QT_TRY(cpu_scratch_need(scratch, ROWS * keys, err));
    QT_TRY(qt_parallel(m / a->seqlen * a->heads * job.blocks, attention_item, &job, err));
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

/* P of the block's rows into p, dS into ds. caps: scratch of the same size, NULL without soft cap.
 */
static void grad_scores(float *p, float *ds, float *caps, const struct grad_job *job, size_t r0,
                        size_t r1, size_t lo, size_t at_q, size_t at_k)
{
    const struct qt_attention *a = job->a;
    int rows = (int)(r1 - r0), keys = (int)(r1 - lo), dim = (int)a->head_dim;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, keys, dim, a->scale, job->q + at_q,
                (int)job->ldq, job->k + at_k, (int)job->ldk, 0.0f, p, keys);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, keys, dim, 1.0f, job->dy + at_q,
                (int)job->ldq, job->v + at_k, (int)job->ldk, 0.0f, ds, keys);
    for (size_t i = r0; i < r1; i++) {
        size_t at = (i - r0) * (r1 - lo);
        double sum = softmax_row(p + at, caps ? caps + at : NULL, a, i, lo, r1);
        cpu_scale(p + at, (float)(1.0 / sum), r1 - lo);
        cpu_softmax_grad(ds + at, p + at, r1 - lo);
        if (caps) /* where nothing is seen dS is 0 already, whatever caps holds there */
            cpu_softcap_grad(ds + at + first_key(a, i) - lo, caps + at + first_key(a, i) - lo,
                             a->softcap, i + 1 - first_key(a, i));
    }
}

static void grad_block(const struct grad_job *job, float *scratch, size_t seq, size_t head,
                       size_t r0)
{
    const struct qt_attention *a = job->a;
    size_t r1 = qt_min_size(r0 + ROWS, a->seqlen), lo = first_key(a, r0);
    size_t kv_head = head / (a->heads / a->kv_heads), area = ROWS * most_keys(a);
    size_t at_q = (seq * a->seqlen + r0) * job->ldq + head * a->head_dim;
    size_t at_k = (seq * a->seqlen + lo) * job->ldk + kv_head * a->head_dim;
    int rows = (int)(r1 - r0), keys = (int)(r1 - lo), dim = (int)a->head_dim;
    int ldq = (int)job->ldq, ldk = (int)job->ldk;
    float *p = scratch, *ds = p + area, *caps = a->softcap > 0.0f ? ds + area : NULL;
    grad_scores(p, ds, caps, job, r0, r1, lo, at_q, at_k);
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
            grad_block(job, scratch, seq, head, r0);
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
    QT_TRY(cpu_check_width(most_keys(a), err));
    QT_TRY(cpu_scratch_need(scratch, areas * ROWS * most_keys(a), err));
    QT_TRY(qt_parallel(m / a->seqlen * a->kv_heads, grad_item, &job, err));
done:
    return rc;
}
