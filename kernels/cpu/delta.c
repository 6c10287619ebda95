/* Causal convolution, the gated delta rule and state space models: state that moves along a
 * sequence. */
#include "kernels/cpu/internal.h"

#include <math.h>

/* ---- convolution ---------------------------------------------------------------------------- */

struct convolve_job {
    float *y;
    const float *x, *w, *bias;
    size_t m, seqlen, channels, kernel;
};

static void convolve_item(void *ctx, size_t item)
{
    const struct convolve_job *job = ctx;
    const size_t n = job->channels, rows = cpu_rows_per_item(n * job->kernel);
    for (size_t t = item * rows; t < qt_min_size((item + 1) * rows, job->m); t++) {
        const size_t at = t % job->seqlen;
        for (size_t c = 0; c < n; c++) {
            const float *w = job->w + c * job->kernel;
            float sum = job->bias ? job->bias[c] : 0;
            for (size_t i = job->kernel - 1 > at ? job->kernel - 1 - at : 0; i < job->kernel; i++)
                sum += w[i] * job->x[(t + 1 + i - job->kernel) * n + c];
            job->y[t * n + c] = sum;
        }
    }
}

int cpu_convolve(struct qt_backend *be, float *y, const float *x, const float *w, const float *bias,
                 size_t m, size_t seqlen, size_t channels, size_t kernel, struct qt_err *err)
{
    struct convolve_job job = {y, x, w, bias, m, seqlen, channels, kernel};
    (void)be;
    (void)err;
    qt_parallel_for(qt_ceil_div(m, cpu_rows_per_item(channels * kernel)), convolve_item, &job);
    return QT_OK;
}

/* ---- delta rule ----------------------------------------------------------------------------- */

struct delta_job {
    const struct cpu_scratch *scratch;
    float *y;
    const float *qkv, *decay, *rate;
    const struct qt_delta *d;
};

static double softplus(double x)
{
    return x > 20 ? x : log1p(exp(x));
}

/* out[n] = x[n] * factor / |x|. The constant is that of the models' authors. */
static void normalize(float *out, const float *x, size_t n, double factor)
{
    double square = 1e-6;
    for (size_t i = 0; i < n; i++)
        square += (double)x[i] * (double)x[i];
    for (size_t i = 0; i < n; i++)
        out[i] = (float)((double)x[i] * factor / sqrt(square));
}

/* One token: changes the state s[kd][vd] and sets y[vd]. error: scratch [vd]. */
static void delta_step(float *restrict s, float *restrict y, float *restrict error, const float *q,
                       const float *k, const float *v, float keep, float beta, size_t kd, size_t vd)
{
    for (size_t j = 0; j < vd; j++)
        y[j] = error[j] = 0;
    for (size_t i = 0; i < kd; i++)
        for (size_t j = 0; j < vd; j++) {
            s[i * vd + j] *= keep;
            error[j] += s[i * vd + j] * k[i];
        }
    for (size_t j = 0; j < vd; j++)
        error[j] = (v[j] - error[j]) * beta;
    for (size_t i = 0; i < kd; i++)
        for (size_t j = 0; j < vd; j++) {
            s[i * vd + j] += k[i] * error[j];
            y[j] += s[i * vd + j] * q[i];
        }
}

static size_t scratch_floats(const struct qt_delta *d)
{
    return d->key_dim * d->value_dim + d->value_dim + 2 * d->key_dim;
}

/* One value head of one sequence. */
static int delta_item(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct delta_job *job = ctx;
    const struct qt_delta *d = job->d;
    const size_t kd = d->key_dim, vd = d->value_dim, head = item % d->value_heads;
    const size_t keys = d->key_heads * kd, values = d->value_heads * vd, width = 2 * keys + values;
    const size_t key_head = head / (d->value_heads / d->key_heads);
    const double rate = exp((double)d->a_log[head]);
    float *own = cpu_scratch_of(job->scratch, thread), *error = own + kd * vd, *q = error + vd;
    float *k = q + kd, *s = d->state ? d->state + item * kd * vd : own;
    (void)err;
    if (!d->state)
        memset(s, 0, kd * vd * sizeof *s);
    for (size_t t = item / d->value_heads * d->seqlen, end = t + d->seqlen; t < end; t++) {
        const float *row = job->qkv + t * width;
        const double a = (double)job->decay[t * d->value_heads + head];
        const double b = (double)job->rate[t * d->value_heads + head];
        normalize(q, row + key_head * kd, kd, 1 / sqrt((double)kd));
        normalize(k, row + keys + key_head * kd, kd, 1);
        delta_step(s, job->y + t * values + head * vd, error, q, k, row + 2 * keys + head * vd,
                   (float)exp(-rate * softplus(a + (double)d->dt_bias[head])),
                   (float)(1 / (1 + exp(-b))), kd, vd);
    }
    return QT_OK;
}

int cpu_delta_rule(struct cpu_scratch *scratch, float *y, const float *qkv, const float *decay,
                   const float *rate, size_t m, const struct qt_delta *d, struct qt_err *err)
{
    struct delta_job job = {scratch, y, qkv, decay, rate, d};
    int rc = cpu_scratch_need(scratch, scratch_floats(d), err);
    return rc < 0 ? rc : qt_parallel(m / d->seqlen * d->value_heads, delta_item, &job, err);
}

/* ---- state spaces --------------------------------------------------------------------------- */

struct space_job {
    const struct cpu_scratch *scratch;
    float *y;
    const float *xbc, *steps;
    const struct qt_state_space *s;
};

/* One token: changes the state of `rows` rows [dim] and sets y[dim]. */
static void space_step(float *restrict state, float *restrict y, const float *restrict x,
                       const float *b, const float *c, float keep, float step, float direct,
                       size_t rows, size_t dim)
{
    for (size_t j = 0; j < dim; j++)
        y[j] = direct * x[j];
    for (size_t i = 0; i < rows; i++) {
        const float in = step * b[i], out = c[i];
        for (size_t j = 0; j < dim; j++) {
            state[i * dim + j] = state[i * dim + j] * keep + in * x[j];
            y[j] += out * state[i * dim + j];
        }
    }
}

/* One head of one sequence. */
static int space_item(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct space_job *job = ctx;
    const struct qt_state_space *s = job->s;
    const size_t head = item % s->heads, group = head / (s->heads / s->groups);
    const size_t values = s->heads * s->dim, width = values + 2 * s->groups * s->state;
    const double rate = exp((double)s->a_log[head]);
    float *state =
        s->states ? s->states + item * s->state * s->dim : cpu_scratch_of(job->scratch, thread);
    (void)err;
    if (!s->states)
        memset(state, 0, s->state * s->dim * sizeof *state);
    for (size_t t = item / s->heads * s->seqlen, end = t + s->seqlen; t < end; t++) {
        const float *row = job->xbc + t * width, *b = row + values + group * s->state;
        const double input = (double)job->steps[t * s->heads + head] + (double)s->dt_bias[head];
        const double free_step = softplus(input);
        const double step = free_step < (double)s->step_min   ? (double)s->step_min
                            : free_step > (double)s->step_max ? (double)s->step_max
                                                              : free_step;
        space_step(state, job->y + t * values + head * s->dim, row + head * s->dim, b,
                   b + s->groups * s->state, (float)exp(-rate * step), (float)step, s->d[head],
                   s->state, s->dim);
    }
    return QT_OK;
}

int cpu_state_space(struct cpu_scratch *scratch, float *y, const float *xbc, const float *steps,
                    size_t m, const struct qt_state_space *s, struct qt_err *err)
{
    struct space_job job = {scratch, y, xbc, steps, s};
    int rc = cpu_scratch_need(scratch, s->state * s->dim, err);
    return rc < 0 ? rc : qt_parallel(m / s->seqlen * s->heads, space_item, &job, err);
}
