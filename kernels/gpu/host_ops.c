/* Operations of few models, which the CUDA backend leaves to the CPU backend (backend.h). */
#include "kernels/gpu/backend.h"

static struct qt_backend *cpu_of(struct qt_backend *be)
{
    return ((struct gpu_backend *)be->ctx)->cpu;
}

/* *out: copy of x[count] in host memory, owned by the caller; NULL if x is NULL. */
static int fetch(float **out, struct qt_backend *be, const float *x, size_t count,
                 struct qt_err *err)
{
    int rc = QT_OK;
    *out = NULL;
    if (!x)
        return QT_OK;
    QT_TRY(qt_array_new(out, count, sizeof **out, err));
    QT_TRY(be->download(be, *out, x, count * sizeof **out, err));
done:
    return rc;
}

/* Uploads from[count] to x unless x is NULL. */
static int put(struct qt_backend *be, float *x, const float *from, size_t count, struct qt_err *err)
{
    return x ? be->upload(be, x, from, count * sizeof *x, err) : QT_OK;
}

int gpu_host_convolve(struct qt_backend *be, float *y, const float *x, const float *w,
                      const float *bias, size_t m, size_t seqlen, size_t channels, size_t kernel,
                      struct qt_err *err)
{
    struct qt_backend *cpu = cpu_of(be);
    float *hx = NULL, *hw = NULL, *hbias = NULL, *hy = NULL;
    int rc;
    QT_TRY(fetch(&hx, be, x, m * channels, err));
    QT_TRY(fetch(&hw, be, w, channels * kernel, err));
    QT_TRY(fetch(&hbias, be, bias, channels, err));
    QT_TRY(qt_array_new(&hy, m, channels * sizeof *hy, err));
    QT_TRY(cpu->convolve(cpu, hy, hx, hw, hbias, m, seqlen, channels, kernel, err));
    QT_TRY(put(be, y, hy, m * channels, err));
done:
    qt_free(hx);
    qt_free(hw);
    qt_free(hbias);
    qt_free(hy);
    return rc;
}

int gpu_host_delta_rule(struct qt_backend *be, float *y, const float *qkv, const float *decay,
                        const float *rate, size_t m, const struct qt_delta *d, struct qt_err *err)
{
    struct qt_backend *cpu = cpu_of(be);
    const size_t keys = d->key_heads * d->key_dim, values = d->value_heads * d->value_dim;
    const size_t states = m / d->seqlen * d->value_heads * d->key_dim * d->value_dim;
    float *hqkv = NULL, *hdecay = NULL, *hrate = NULL, *ha = NULL, *hdt = NULL, *hy = NULL;
    struct qt_delta host = *d;
    int rc;
    host.state = NULL;
    QT_TRY(fetch(&hqkv, be, qkv, m * (2 * keys + values), err));
    QT_TRY(fetch(&hdecay, be, decay, m * d->value_heads, err));
    QT_TRY(fetch(&hrate, be, rate, m * d->value_heads, err));
    QT_TRY(fetch(&ha, be, d->a_log, d->value_heads, err));
    QT_TRY(fetch(&hdt, be, d->dt_bias, d->value_heads, err));
    QT_TRY(fetch(&host.state, be, d->state, states, err));
    QT_TRY(qt_array_new(&hy, m, values * sizeof *hy, err));
    host.a_log = ha;
    host.dt_bias = hdt;
    QT_TRY(cpu->delta_rule(cpu, hy, hqkv, hdecay, hrate, m, &host, err));
    QT_TRY(put(be, d->state, host.state, states, err));
    QT_TRY(put(be, y, hy, m * values, err));
done:
    qt_free(hqkv);
    qt_free(hdecay);
    qt_free(hrate);
    qt_free(ha);
    qt_free(hdt);
    qt_free(host.state);
    qt_free(hy);
    return rc;
}

int gpu_host_clip(struct qt_backend *be, float *y, float limit, size_t count, struct qt_err *err)
{
    struct qt_backend *cpu = cpu_of(be);
    float *host = NULL;
    int rc;
    QT_TRY(fetch(&host, be, y, count, err));
    QT_TRY(cpu->clip(cpu, host, limit, count, err));
    QT_TRY(put(be, y, host, count, err));
done:
    qt_free(host);
    return rc;
}

int gpu_host_attention(struct qt_backend *be, float *y, const float *q, const float *k,
                       const float *v, size_t m, const struct qt_attention *a, struct qt_err *err)
{
    struct qt_backend *cpu = cpu_of(be);
    const size_t wide = m * a->heads * a->head_dim;
    const size_t keys = m / a->seqlen * (a->past + a->seqlen) * a->kv_heads * a->head_dim;
    struct qt_attention host = *a;
    float *hy = NULL, *hq = NULL, *hk = NULL, *hv = NULL, *exact = NULL, *bias = NULL;
    float *sinks = NULL;
    int rc;
    QT_TRY(fetch(&hq, be, q, wide, err));
    QT_TRY(fetch(&hk, be, k, keys, err));
    QT_TRY(fetch(&hv, be, v, keys, err));
    QT_TRY(fetch(&exact, be, a->exact_keys, keys, err));
    QT_TRY(fetch(&sinks, be, a->sinks, a->heads, err));
    QT_TRY(fetch(&bias, be, a->bias, a->heads * a->bias_step, err));
    QT_TRY(qt_array_new(&hy, wide, sizeof *hy, err));
    host.exact_keys = exact;
    host.sinks = sinks;
    host.bias = bias;
    QT_TRY(cpu->attention(cpu, hy, hq, hk, hv, m, &host, err));
    QT_TRY(put(be, y, hy, wide, err));
done:
    qt_free(hy);
    qt_free(hq);
    qt_free(hk);
    qt_free(hv);
    qt_free(exact);
    qt_free(sinks);
    qt_free(bias);
    return rc;
}

int gpu_host_state_space(struct qt_backend *be, float *y, const float *xbc, const float *steps,
                         size_t m, const struct qt_state_space *s, struct qt_err *err)
{
    struct qt_backend *cpu = cpu_of(be);
    const size_t values = s->heads * s->dim, width = values + 2 * s->groups * s->state;
    const size_t states = m / s->seqlen * values * s->state;
    float *hxbc = NULL, *hsteps = NULL, *ha = NULL, *hdt = NULL, *hd = NULL, *hy = NULL;
    struct qt_state_space host = *s;
    int rc;
    host.states = NULL;
    QT_TRY(fetch(&hxbc, be, xbc, m * width, err));
    QT_TRY(fetch(&hsteps, be, steps, m * s->heads, err));
    QT_TRY(fetch(&ha, be, s->a_log, s->heads, err));
    QT_TRY(fetch(&hdt, be, s->dt_bias, s->heads, err));
    QT_TRY(fetch(&hd, be, s->d, s->heads, err));
    QT_TRY(fetch(&host.states, be, s->states, states, err));
    QT_TRY(qt_array_new(&hy, m, values * sizeof *hy, err));
    host.a_log = ha;
    host.dt_bias = hdt;
    host.d = hd;
    QT_TRY(cpu->state_space(cpu, hy, hxbc, hsteps, m, &host, err));
    QT_TRY(put(be, s->states, host.states, states, err));
    QT_TRY(put(be, y, hy, m * values, err));
done:
    qt_free(hxbc);
    qt_free(hsteps);
    qt_free(ha);
    qt_free(hdt);
    qt_free(hd);
    qt_free(host.states);
    qt_free(hy);
    return rc;
}

int gpu_host_attention_grad(struct qt_backend *be, float *dq, float *dk, float *dv, const float *dy,
                            const float *q, const float *k, const float *v, size_t m,
                            const struct qt_attention *a, struct qt_err *err)
{
    struct qt_backend *cpu = cpu_of(be);
    const size_t wide = m * a->heads * a->head_dim, narrow = m * a->kv_heads * a->head_dim;
    struct qt_attention host = *a;
    float *hdy = NULL, *hq = NULL, *hk = NULL, *hv = NULL, *hdq = NULL, *hdk = NULL, *hdv = NULL;
    float *bias = NULL, *sinks = NULL;
    int rc;
    QT_TRY(fetch(&bias, be, a->bias, a->heads * a->bias_step, err));
    host.bias = bias;
    QT_TRY(fetch(&sinks, be, a->sinks, a->heads, err));
    host.sinks = sinks;
    QT_TRY(fetch(&hdy, be, dy, wide, err));
    QT_TRY(fetch(&hq, be, q, wide, err));
    QT_TRY(fetch(&hk, be, k, narrow, err));
    QT_TRY(fetch(&hv, be, v, narrow, err));
    QT_TRY(qt_array_new(&hdq, wide, sizeof *hdq, err));
    QT_TRY(qt_array_new(&hdk, narrow, sizeof *hdk, err));
    QT_TRY(qt_array_new(&hdv, narrow, sizeof *hdv, err));
    QT_TRY(cpu->attention_grad(cpu, hdq, hdk, hdv, hdy, hq, hk, hv, m, &host, err));
    QT_TRY(put(be, dq, hdq, wide, err));
    QT_TRY(put(be, dk, hdk, narrow, err));
    QT_TRY(put(be, dv, hdv, narrow, err));
done:
    qt_free(hdy);
    qt_free(hq);
    qt_free(hk);
    qt_free(hv);
    qt_free(hdq);
    qt_free(hdk);
    qt_free(hdv);
    qt_free(bias);
    qt_free(sinks);
    return rc;
}
