/*
 * Gradients of the CPU backend, except for attention (attention.c). As in backend.c, the size of an
 * item depends on the shapes only. A sum over tokens is computed by one thread (linear_grad_w), or
 * from partial sums of items that are added in item order (norm_grad).
 */
#include "kernels/cpu/internal.h"
#include "kernels/cpu/math.h"

#include <cblas.h>

/* Output tiles of the products. As in backend.c, the long side is along the dimension that is
 * usually larger. */
enum { TILE_M = 512, TILE_N = 128 };

/* ---- linear --------------------------------------------------------------------------------- */

struct linear_job {
    float *out;
    const float *dy, *other; /* w for dx, x for dw */
    bool add;
    size_t m, n, k, tiles;
};

static int grad_x_tile(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct linear_job *job = ctx;
    (void)thread;
    (void)err;
    size_t i = item / job->tiles * TILE_M, j = item % job->tiles * TILE_N;
    int rows = (int)qt_min_size(TILE_M, job->m - i), cols = (int)qt_min_size(TILE_N, job->k - j);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, cols, (int)job->n, 1.0f,
                job->dy + i * job->n, (int)job->n, job->other + j, (int)job->k,
                job->add ? 1.0f : 0.0f, job->out + i * job->k + j, (int)job->k);
    return QT_OK;
}

static int grad_w_tile(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct linear_job *job = ctx;
    (void)thread;
    (void)err;
    size_t i = item / job->tiles * TILE_M, j = item % job->tiles * TILE_N;
    int rows = (int)qt_min_size(TILE_M, job->n - i), cols = (int)qt_min_size(TILE_N, job->k - j);
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, rows, cols, (int)job->m, 1.0f, job->dy + i,
                (int)job->n, job->other + j, (int)job->k, job->add ? 1.0f : 0.0f,
                job->out + i * job->k + j, (int)job->k);
    return QT_OK;
}

static int check_widths(size_t m, size_t n, size_t k, struct qt_err *err)
{
    int rc = QT_OK;
    QT_TRY(cpu_check_width(m, err));
    QT_TRY(cpu_check_width(n, err));
    QT_TRY(cpu_check_width(k, err));
done:
    return rc;
}

int cpu_linear_grad_x(struct qt_backend *be, float *dx, const float *dy, const float *w, bool add,
                      size_t m, size_t n, size_t k, struct qt_err *err)
{
    struct linear_job job = {dx, dy, w, add, m, n, k, qt_ceil_div(k, TILE_N)};
    int rc = check_widths(m, n, k, err);
    (void)be;
    if (rc == QT_OK)
        rc = qt_parallel(qt_ceil_div(m, TILE_M) * job.tiles, grad_x_tile, &job, err);
    return rc;
}

int cpu_linear_grad_w(struct qt_backend *be, float *dw, const float *dy, const float *x, bool add,
                      size_t m, size_t n, size_t k, struct qt_err *err)
{
    struct linear_job job = {dw, dy, x, add, m, n, k, qt_ceil_div(k, TILE_N)};
    int rc = check_widths(m, n, k, err);
    (void)be;
    if (rc == QT_OK)
        rc = qt_parallel(qt_ceil_div(n, TILE_M) * job.tiles, grad_w_tile, &job, err);
    return rc;
}

/* ---- norm ----------------------------------------------------------------------------------- */

struct norm_job {
    float *dx;
    double *dw; /* [items][n], or NULL */
    const float *dy, *x, *w;
    enum qt_norm_kind kind;
    float eps;
    size_t m, n;
};

static void norm_item(void *ctx, size_t item)
{
    const struct norm_job *job = ctx;
    size_t n = job->n, step = cpu_rows_per_item(n), end = qt_min_size((item + 1) * step, job->m);
    for (size_t i = item * step; i < end; i++)
        cpu_norm_grad(job->dx + i * n, job->dw ? job->dw + item * n : NULL, job->dy + i * n,
                      job->x + i * n, job->w, job->kind, job->eps, n);
}

int cpu_norm_grad_rows(struct qt_backend *be, float *dx, float *dw, const float *dy, const float *x,
                       const float *w, enum qt_norm_kind kind, float eps, size_t m, size_t n,
                       struct qt_err *err)
{
    struct norm_job job = {dx, NULL, dy, x, w, kind, eps, m, n};
    size_t items = qt_ceil_div(m, cpu_rows_per_item(n));
    int rc = QT_OK;
    (void)be;
    if (dw)
        QT_TRY(qt_array_new(&job.dw, items, n * sizeof *job.dw, err));
    qt_parallel_for(items, norm_item, &job);
    for (size_t j = 0; dw && j < n; j++) {
        double sum = 0;
        for (size_t i = 0; i < items; i++)
            sum += job.dw[i * n + j];
        dw[j] += (float)sum;
    }
done:
    qt_free(job.dw);
    return rc;
}

/* ---- activation ----------------------------------------------------------------------------- */

struct activate_job {
    float *dgate, *dup;
    const float *dy, *gate, *up;
    enum qt_act_kind kind;
    size_t count;
};

static void activate_item(void *ctx, size_t item)
{
    const struct activate_job *job = ctx;
    size_t at = item * CPU_ITEM, n = qt_min_size(CPU_ITEM, job->count - at);
    bool gated = job->up != NULL;
    cpu_activate_grad(job->dgate + at, gated ? job->dup + at : NULL, job->dy + at, job->gate + at,
                      gated ? job->up + at : NULL, job->kind, n);
}

int cpu_activate_grad_op(struct qt_backend *be, float *dgate, float *dup, const float *dy,
                         const float *gate, const float *up, enum qt_act_kind kind, size_t count,
                         struct qt_err *err)
{
    struct activate_job job = {dgate, dup, dy, gate, up, kind, count};
    (void)be;
    (void)err;
    qt_parallel_for(qt_ceil_div(count, CPU_ITEM), activate_item, &job);
    return QT_OK;
}

/* ---- squared error -------------------------------------------------------------------------- */

struct square_job {
    double *sums; /* per item */
    float *d;
    const float *y, *target;
    float factor;
    size_t count;
};

static void square_item(void *ctx, size_t item)
{
    const struct square_job *job = ctx;
    size_t at = item * CPU_ITEM, n = qt_min_size(CPU_ITEM, job->count - at);
    job->sums[item] = cpu_square_error(job->d + at, job->y + at, job->target + at, job->factor, n);
}

int cpu_square_grad(struct qt_backend *be, double *sum, float *grad, const float *y,
                    const float *target, float weight, size_t count, struct qt_err *err)
{
    struct square_job job = {NULL, grad, y, target, 2 * weight, count};
    size_t items = qt_ceil_div(count, CPU_ITEM);
    int rc = QT_OK;
    (void)be;
    QT_TRY(qt_array_new(&job.sums, items, sizeof *job.sums, err));
    qt_parallel_for(items, square_item, &job);
    *sum = 0;
    for (size_t i = 0; i < items; i++)
        *sum += job.sums[i];
done:
    qt_free(job.sums);
    return rc;
}

/* ---- loss ----------------------------------------------------------------------------------- */

struct loss_job {
    const struct cpu_scratch *scratch;
    double *losses;
    float *d;
    const float *logits, *ref;
    const uint32_t *targets;
    float softcap, weight;
    size_t vocab;
};

/* With logits a and reference logits b, the gradient of KL(softmax b || softmax a) is softmax a -
 * softmax b. For the loss -ln p(target), softmax b is replaced by 1 at the target. score_item in
 * backend.c derives the value of KL. */
static double loss_row(const struct loss_job *job, float *d, const float *a, const float *b,
                       uint32_t target)
{
    size_t vocab = job->vocab;
    struct cpu_row_stats sa = cpu_row_stats(a, vocab);
    double lse_a = (double)sa.max + log(sa.sum);
    float factor = (float)((double)job->weight / sa.sum);
    if (!b) {
        double loss = lse_a - (double)a[target];
        cpu_exp_scaled(d, a, sa.max, factor, vocab);
        d[target] -= job->weight;
        return loss;
    }
    struct cpu_row_stats sb = cpu_row_stats(b, vocab);
    double lse_b = (double)sb.max + log(sb.sum);
    double kld = cpu_cross_sum(b, a, sb.max, vocab) / sb.sum - (lse_b - lse_a);
    cpu_exp_scaled(d, a, sa.max, factor, vocab);
    cpu_exp_subtract(d, b, sb.max, (float)((double)job->weight / sb.sum), vocab);
    return kld < 0.0 ? 0.0 : kld;
}

static int loss_item(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct loss_job *job = ctx;
    size_t vocab = job->vocab;
    const float *a = job->logits + item * vocab, *b = job->ref ? job->ref + item * vocab : NULL;
    float *d = job->d + item * vocab, *buf = cpu_scratch_of(job->scratch, thread);
    uint32_t target = b ? 0 : job->targets[item];
    if (target == QT_NO_TARGET) {
        memset(d, 0, vocab * sizeof *d);
        job->losses[item] = 0;
        return QT_OK;
    }
    if (target >= vocab)
        return qt_fail(err, QT_E_INPUT, NULL, NULL,
                       "target %zu is token %u, but the vocabulary has %zu tokens", item,
                       (unsigned)target, vocab);
    if (job->softcap > 0.0f) {
        cpu_softcap(buf, a, job->softcap, vocab);
        a = buf;
        if (b) {
            cpu_softcap(buf + vocab, b, job->softcap, vocab);
            b = buf + vocab;
        }
    }
    job->losses[item] = loss_row(job, d, a, b, target);
    if (job->softcap > 0.0f)
        cpu_softcap_grad(d, a, job->softcap, vocab);
    return QT_OK;
}

int cpu_loss_grad(struct cpu_scratch *scratch, double *losses, float *dlogits, const float *logits,
                  const float *ref, const uint32_t *targets, float softcap, float weight, size_t m,
                  size_t vocab, struct qt_err *err)
{
    struct loss_job job = {scratch, losses, dlogits, logits, ref, targets, softcap, weight, vocab};
    int rc = QT_OK;
    QT_TRY(cpu_scratch_need(scratch, softcap > 0.0f ? 2 * vocab : 0, err));
    QT_TRY(qt_parallel(m, loss_item, &job, err));
done:
    return rc;
}
