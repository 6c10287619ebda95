/*
 * The CUDA backend against the CPU backend: every function of struct qt_backend on random data of
 * odd shapes. Results agree to a few FP32 roundings; integers, NaN and infinities agree exactly.
 * Products and attention run twice and must give the same bits.
 *
 * usage: test_backend [SEED [quick]]     prints "N passed, M failed, K skipped"
 */
#include "hessian/hessian.h"
#include "kernels/kernels.h"
#include "pack/activations/plan.h"
#include "pack/schemes/scheme.h"
#include "tests/gpu/check.h"
#include "tests/input_errors.h"

#include <math.h>

static struct qt_backend *cpu, *gpu;

static void must(int rc, const struct qt_err *err, const char *what)
{
    if (rc == QT_OK)
        return;
    printf("FAILED %s: status %d, %s\n", what, rc, err->reason);
    exit(1);
}

/* ---- arrays --------------------------------------------------------------------------------- */

/* The same values in the memory of both backends. */

struct array {
    size_t bytes;
    void *cpu, *gpu;
};

static struct array array_of(const void *values, size_t bytes)
{
    struct qt_err err = {0};
    struct array a = {.bytes = bytes};
    must(cpu->alloc(cpu, &a.cpu, bytes, &err), &err, "new");
    must(gpu->alloc(gpu, &a.gpu, bytes, &err), &err, "new");
    must(cpu->upload(cpu, a.cpu, values, bytes, &err), &err, "upload");
    must(gpu->upload(gpu, a.gpu, values, bytes, &err), &err, "upload");
    return a;
}

static struct array floats(size_t count, float size)
{
    float *x = malloc(count * sizeof *x + 1);
    for (size_t i = 0; i < count; i++)
        x[i] = size * random_float();
    struct array a = array_of(x, count * sizeof *x);
    free(x);
    return a;
}

static struct array zeros(size_t bytes)
{
    void *x = calloc(bytes + 1, 1);
    struct array a = array_of(x, bytes);
    free(x);
    return a;
}

static void array_free(struct array *a)
{
    cpu->free(cpu, a->cpu);
    gpu->free(gpu, a->gpu);
}

static void *fetch(struct qt_backend *be, const void *from, size_t bytes)
{
    struct qt_err err = {0};
    void *host = malloc(bytes + 1);
    must(be->download(be, host, from, bytes, &err), &err, "download");
    return host;
}

/* ---- comparison ----------------------------------------------------------------------------- */

/* tolerance: relative to the largest value, or to `least` if that is larger. */
static void compare_at_least(const struct array *a, double tolerance, double least,
                             const char *what)
{
    size_t n = a->bytes / sizeof(float);
    float *x = fetch(cpu, a->cpu, a->bytes), *y = fetch(gpu, a->gpu, a->bytes);
    double most = least, worst = 0;
    bool same = true;
    for (size_t i = 0; i < n; i++)
        if (isfinite(x[i]))
            most = fmax(most, fabs((double)x[i]));
    for (size_t i = 0; i < n; i++)
        if (isfinite(x[i]))
            worst = worse(worst, fabs((double)x[i] - (double)y[i]) / most);
        else
            same = same && (isnan(x[i]) ? isnan(y[i]) : x[i] == y[i]);
    char text[300];
    snprintf(text, sizeof text, "%s: off by %.2g of the largest value%s", what, worst,
             same ? "" : ", NaN or infinity elsewhere");
    result(same && worst <= tolerance, text);
    free(x), free(y);
}

static void compare(const struct array *a, double tolerance, const char *what)
{
    compare_at_least(a, tolerance, 1e-30, what);
}

static void compare_doubles(const struct array *a, size_t n, double tolerance, const char *what)
{
    double *x = fetch(cpu, a->cpu, n * sizeof *x), *y = fetch(gpu, a->gpu, n * sizeof *y),
           most = 1e-300, worst = 0;
    for (size_t i = 0; i < n; i++)
        most = fmax(most, fabs(x[i]));
    for (size_t i = 0; i < n; i++)
        worst = worse(worst, fabs(x[i] - y[i]) / most);
    char text[300];
    snprintf(text, sizeof text, "%s: off by %.2g of the largest value", what, worst);
    result(worst <= tolerance, text);
    free(x), free(y);
}

/* Runs call(cpu) and call(gpu). The backends have the names of the members of struct array. */
#define BOTH(call)                                                                                 \
    do {                                                                                           \
        struct qt_err err = {0};                                                                   \
        must(call(cpu), &err, "on the CPU");                                                       \
        must(call(gpu), &err, "on the GPU");                                                       \
    } while (0)

/* ---- the functions -------------------------------------------------------------------------- */

static void test_linear(size_t m, size_t n, size_t k)
{
    struct array x = floats(m * k, 1), w = floats(n * k, 1), b = floats(n, 1), y = zeros(m * n * 4);
    struct array dx = floats(m * k, 1), dw = floats(n * k, 1);
    char what[100];
    snprintf(what, sizeof what, "linear %zu x %zu x %zu", m, n, k);
#define LINEAR(be) be->linear(be, y.be, x.be, w.be, b.be, m, n, k, &err)
    BOTH(LINEAR);
    compare(&y, m >= 256 && n >= 256 && k >= 128 ? 1e-5 : 3e-6, what); /* 3xTF32 or FP32 */
    void *first = fetch(gpu, y.gpu, y.bytes);
    BOTH(LINEAR);
    void *second = fetch(gpu, y.gpu, y.bytes);
    result(memcmp(first, second, y.bytes) == 0, "linear twice");
    free(first), free(second);
#define CALL(be) be->linear_grad_x(be, dx.be, y.be, w.be, true, m, n, k, &err)
    BOTH(CALL);
#undef CALL
    compare(&dx, 1e-5, "linear_grad_x, added");
#define CALL(be) be->linear_grad_x(be, dx.be, y.be, w.be, false, m, n, k, &err)
    BOTH(CALL);
#undef CALL
    compare(&dx, 1e-5, "linear_grad_x");
#define CALL(be) be->linear_grad_w(be, dw.be, y.be, x.be, true, m, n, k, &err)
    BOTH(CALL);
#undef CALL
    compare(&dw, 1e-5, "linear_grad_w");
    array_free(&x), array_free(&w), array_free(&b), array_free(&y), array_free(&dx);
    array_free(&dw);
}

static void test_norm(size_t m, size_t n)
{
    static const char *const names[] = {"rms", "layer"};
    for (int kind = QT_NORM_RMS; kind <= QT_NORM_LAYER; kind++) {
        struct array x = floats(m * n, 30), w = floats(n, 1), b = floats(n, 1),
                     y = zeros(m * n * 4);
        struct array dw = floats(n, 1);
        char what[100];
        snprintf(what, sizeof what, "norm %s %zu x %zu", names[kind], m, n);
#define CALL(be)                                                                                   \
    be->norm(be, y.be, x.be, w.be, kind == QT_NORM_LAYER ? b.be : NULL, (enum qt_norm_kind)kind,   \
             1e-5f, m, n, &err)
        BOTH(CALL);
#undef CALL
        compare(&y, 1e-6, what);
#define CALL(be)                                                                                   \
    be->norm_grad(be, y.be, dw.be, y.be, x.be, w.be, (enum qt_norm_kind)kind, 1e-5f, m, n, &err)
        BOTH(CALL);
#undef CALL
        compare(&y, 2e-6, "norm_grad");
        compare(&dw, 2e-6, "norm_grad of weights");
#define CALL(be) be->norm(be, x.be, x.be, w.be, NULL, (enum qt_norm_kind)kind, 1e-5f, m, n, &err)
        BOTH(CALL);
#undef CALL
        compare(&x, 1e-6, "norm in place");
        array_free(&x), array_free(&w), array_free(&b), array_free(&y), array_free(&dw);
    }
}

static void test_rope(size_t sequences, size_t seqlen, size_t heads, size_t dim, size_t rot,
                      bool interleaved)
{
    size_t m = sequences * seqlen;
    struct array x = floats(m * heads * dim, 1), c = floats(seqlen * (rot / 2), 1),
                 s = floats(seqlen * (rot / 2), 1);
#define CALL(be) be->rope(be, x.be, c.be, s.be, m, seqlen, heads, dim, rot, interleaved, &err)
    BOTH(CALL);
#undef CALL
    compare(&x, 1e-6, interleaved ? "interleaved rope" : "rope");
    array_free(&x), array_free(&c), array_free(&s);
}

static void test_attention(size_t sequences, const struct qt_attention *a)
{
    size_t m = sequences * a->seqlen, wide = m * a->heads * a->head_dim,
           narrow = m * a->kv_heads * a->head_dim;
    struct array q = floats(wide, 2), k = floats(narrow, 2), v = floats(narrow, 1);
    struct array y = zeros(wide * 4), again = zeros(wide * 4), dq = zeros(wide * 4);
    struct array dk = zeros(narrow * 4), dv = zeros(narrow * 4);
    char what[120];
    snprintf(what, sizeof what, "attention %zu x %zu, %zu:%zu heads of %zu, window %zu, cap %g",
             sequences, a->seqlen, a->heads, a->kv_heads, a->head_dim, a->window,
             (double)a->softcap);
#define CALL(be) be->attention(be, y.be, q.be, k.be, v.be, m, a, &err)
    BOTH(CALL);
#undef CALL
    compare(&y, 5e-6, what);
    struct array sinks = floats(a->heads, 2);
    struct qt_attention with = *a;
#define CALL(be)                                                                                   \
    (with.sinks = sinks.be, be->attention(be, again.be, q.be, k.be, v.be, m, &with, &err))
    BOTH(CALL);
#undef CALL
    compare(&again, 5e-6, "attention with sinks");
#define CALL(be)                                                                                   \
    (with.sinks = sinks.be,                                                                        \
     be->attention_grad(be, dq.be, dk.be, dv.be, y.be, q.be, k.be, v.be, m, &with, &err))
    BOTH(CALL);
#undef CALL
    compare(&dq, 2e-5, "attention_grad q with sinks");
    compare(&dk, 2e-5, "attention_grad k with sinks");
    compare(&dv, 2e-5, "attention_grad v with sinks");
    with.past = with.seqlen / 3;
    with.seqlen -= with.past;
#define CALL(be)                                                                                   \
    (with.sinks = sinks.be,                                                                        \
     be->attention(be, again.be, q.be, k.be, v.be, sequences * with.seqlen, &with, &err))
    BOTH(CALL);
#undef CALL
    compare(&again, 5e-6, "attention of the last queries");
    array_free(&sinks);
    struct array bias = floats(a->heads * a->seqlen, 2);
#define CALL(be)                                                                                   \
    (with.bias = bias.be, with.bias_step = a->seqlen,                                              \
     be->attention(be, again.be, q.be, k.be, v.be, sequences * with.seqlen, &with, &err))
    with.sinks = NULL;
    BOTH(CALL);
#undef CALL
    compare(&again, 5e-6, "attention with biases");
    array_free(&bias);
#define CALL(be) be->attention(be, again.be, q.be, k.be, v.be, m, a, &err)
    BOTH(CALL);
#undef CALL
    void *first = fetch(gpu, y.gpu, y.bytes), *second = fetch(gpu, again.gpu, y.bytes);
    result(memcmp(first, second, y.bytes) == 0, "attention twice");
    free(first), free(second);
#define CALL(be) be->attention_grad(be, dq.be, dk.be, dv.be, y.be, q.be, k.be, v.be, m, a, &err)
    BOTH(CALL);
    compare(&dq, 2e-5, "attention_grad q");
    compare(&dk, 2e-5, "attention_grad k");
    compare(&dv, 2e-5, "attention_grad v");
    const struct array *const grads[] = {&dq, &dk, &dv};
    void *made[3];
    for (size_t i = 0; i < 3; i++)
        made[i] = fetch(gpu, grads[i]->gpu, grads[i]->bytes);
    BOTH(CALL);
#undef CALL
    for (size_t i = 0; i < 3; i++) {
        void *later = fetch(gpu, grads[i]->gpu, grads[i]->bytes);
        result(memcmp(made[i], later, grads[i]->bytes) == 0, "attention_grad twice");
        free(made[i]), free(later);
    }
    array_free(&q), array_free(&k), array_free(&v), array_free(&y), array_free(&again);
    array_free(&dq), array_free(&dk), array_free(&dv);
}

/* Attention with `half`; dim: with 64 and 128 by one kernel, if there is nothing else to it. */
static void test_half_attention(size_t sequences, const struct qt_attention *a, float scale)
{
    size_t m = sequences * a->seqlen, wide = m * a->heads * a->head_dim,
           narrow = m * a->kv_heads * a->head_dim;
    struct array q = floats(wide, scale), k = floats(narrow, 2), v = floats(narrow, scale);
    struct array y = zeros(wide * 4), again = zeros(wide * 4);
    struct qt_attention with = *a;
    char what[120];
    snprintf(what, sizeof what, "attention in FP16 %zu x %zu, %zu:%zu heads of %zu, window %zu",
             sequences, a->seqlen, a->heads, a->kv_heads, a->head_dim, a->window);
    with.scale /= scale;
    gpu->half = true;
#define CALL(be) be->attention(be, y.be, q.be, k.be, v.be, m, &with, &err)
    BOTH(CALL);
#undef CALL
    compare(&y, 2e-3, what);
#define CALL(be) be->attention(be, again.be, q.be, k.be, v.be, m, &with, &err)
    BOTH(CALL);
#undef CALL
    gpu->half = false;
    void *first = fetch(gpu, y.gpu, y.bytes), *second = fetch(gpu, again.gpu, y.bytes);
    result(memcmp(first, second, y.bytes) == 0, "attention in FP16 twice");
    free(first), free(second);
    array_free(&q), array_free(&k), array_free(&v), array_free(&y), array_free(&again);
}

/* Products with `half`, whose left factor was made by each function that finds its largest
 * magnitude; the weight stays the same, everything else changes. */
static void test_half_products(size_t m, size_t n, size_t k, float scale)
{
    struct array x = floats(m * k, scale), w = floats(n * k, 1), y = zeros(m * n * 4);
    struct array z = floats(m * k, 1), dw = zeros(n * k * 4), h = zeros(k * k * 8);
    struct array most = zeros(k * 4), sum2 = zeros(k * 8), weight = floats(k, 1);
    struct qt_channels on_cpu = {most.cpu, sum2.cpu, NULL}, on_gpu = {most.gpu, sum2.gpu, NULL};
    gpu->half = gpu->same_weights = true;
    for (int i = 0; i < 5; i++) {
#define CALL(be)                                                                                   \
    i == 0   ? QT_OK                                                                               \
    : i == 1 ? be->norm(be, z.be, x.be, weight.be, NULL, QT_NORM_RMS, 1e-5f, m, k, &err)           \
    : i == 2 ? be->activate(be, z.be, x.be, x.be, QT_ACT_SILU, m *k, &err)                         \
    : i == 3 ? be->subtract(be, z.be, x.be, m *k, &err)                                            \
             : be->channels(be, be == gpu ? &on_gpu : &on_cpu, z.be, m, k, &err)
        BOTH(CALL);
#undef CALL
#define CALL(be) be->linear(be, y.be, z.be, w.be, NULL, m, n, k, &err)
        BOTH(CALL);
#undef CALL
        compare(&y, 2e-3, "product in FP16");
#define CALL(be) be->gram(be, h.be, z.be, m, k, &err)
        BOTH(CALL);
#undef CALL
#define CALL(be) be->linear_grad_w(be, dw.be, y.be, z.be, true, m, n, k, &err)
        BOTH(CALL);
#undef CALL
        compare(&dw, 2e-3, "sum of products in FP16");
    }
    gpu->half = gpu->same_weights = false;
    double *on_host = fetch(cpu, h.cpu, h.bytes), *there = fetch(gpu, h.gpu, h.bytes), worst = 0;
    for (size_t i = 0; i < k * k; i++)
        if (i % k <= i / k)
            worst = worse(worst, fabs(on_host[i] - there[i]) /
                                     sqrt(on_host[i / k * (k + 1)] * on_host[i % k * (k + 1)]));
    result(worst <= 1e-3, "H in FP16");
    compare_doubles(&sum2, k, 1e-3, "squares");
    free(on_host), free(there);
    array_free(&x), array_free(&w), array_free(&y), array_free(&z), array_free(&dw);
    array_free(&h), array_free(&most), array_free(&sum2), array_free(&weight);
}

/* Gradients replace a factor that is stored in FP16. */
static void test_new_factors(size_t m, size_t k)
{
    const size_t heads = k / 64;
    const struct qt_attention a = {
        .seqlen = m, .heads = heads, .kv_heads = heads, .head_dim = 64, .scale = 0.1f};
    struct array x = floats(m * k, 1), z = floats(m * k, 1), w = floats(k * k, 1);
    struct array y = zeros(m * k * 4), other = zeros(m * k * 4), more = zeros(m * k * 4);
    double sum;
    gpu->half = gpu->same_weights = true;
    for (int i = 0; i < 5; i++) {
#define CALL(be)                                                                                   \
    i == 0   ? QT_OK                                                                               \
    : i == 1 ? be->norm_grad(be, z.be, NULL, x.be, x.be, w.be, QT_NORM_RMS, 1e-5f, m, k, &err)     \
    : i == 2 ? be->activate_grad(be, other.be, z.be, x.be, x.be, x.be, QT_ACT_SILU, m *k, &err)    \
    : i == 3                                                                                       \
        ? be->square_grad(be, &sum, z.be, x.be, w.be, 1, m *k, &err)                               \
        : be->attention_grad(be, other.be, z.be, more.be, x.be, x.be, x.be, x.be, m, &a, &err)
        BOTH(CALL);
#undef CALL
#define CALL(be) be->linear(be, y.be, z.be, w.be, NULL, m, k, k, &err)
        BOTH(CALL);
#undef CALL
        compare(&y, 5e-3, "product with a gradient in FP16");
    }
    gpu->half = gpu->same_weights = false;
    array_free(&x), array_free(&z), array_free(&w), array_free(&y);
    array_free(&other), array_free(&more);
}

/* Keys of a 4-bit cache: as FP16 can hold them, and rounded as the cache does (k: any numbers). */
static void test_cached_keys(size_t sequences, struct qt_attention a)
{
    size_t m = sequences * a.seqlen, wide = m * a.heads * a.head_dim,
           narrow = m * a.kv_heads * a.head_dim;
    struct array q = floats(wide, 2), k = floats(narrow, 2), v = floats(narrow, 1);
    struct array y = zeros(wide * 4);
    float *x = malloc(narrow * sizeof *x);
    for (size_t i = 0; i < narrow; i++)
        x[i] = qt_f16_to_f32(qt_f32_to_f16((1 + (float)(i % 5)) * random_float() + (float)(i % 3)));
    struct array exact = array_of(x, narrow * sizeof *x);
    char what[120];
    snprintf(what, sizeof what, "attention with cached keys %zu x %zu, %zu:%zu heads of %zu",
             sequences, a.seqlen, a.heads, a.kv_heads, a.head_dim);
#define CALL(be) (a.exact_keys = exact.be, be->attention(be, y.be, q.be, k.be, v.be, m, &a, &err))
    BOTH(CALL);
#undef CALL
    compare(&y, 1e-5, what);
    a.past = a.seqlen / 3;
    a.seqlen -= a.past;
    m = sequences * a.seqlen;
#define CALL(be) (a.exact_keys = exact.be, be->attention(be, y.be, q.be, k.be, v.be, m, &a, &err))
    BOTH(CALL);
#undef CALL
    compare(&y, 1e-5, "attention of the last queries with cached keys");
    free(x);
    array_free(&q), array_free(&k), array_free(&v), array_free(&y), array_free(&exact);
}

static void test_recurrences(size_t sequences, size_t seqlen, size_t heads, size_t dim)
{
    const size_t m = sequences * seqlen, width = 2 * heads * dim + 2 * heads * (dim + 1);
    const size_t values = 2 * heads * (dim + 1);
    struct array x = floats(m * width, 1), w = floats(width * 4, 1), c = zeros(m * width * 4);
    struct array a = floats(m * 2 * heads, 1), b = floats(m * 2 * heads, 1);
    struct array log = floats(2 * heads, 1), dt = floats(2 * heads, 1), y = zeros(m * values * 4);
    struct qt_delta d = {seqlen, heads, 2 * heads, dim, dim + 1, NULL, NULL, NULL};
#define CALL(be) be->convolve(be, c.be, x.be, w.be, NULL, m, seqlen, width, 4, &err)
    BOTH(CALL);
#undef CALL
    compare(&c, 0, "convolve");
#define CALL(be) be->convolve(be, c.be, x.be, w.be, x.be, m, seqlen, width, 4, &err)
    BOTH(CALL);
#undef CALL
    compare(&c, 0, "convolve with a bias");
#define CALL(be)                                                                                   \
    (d.a_log = log.be, d.dt_bias = dt.be, be->delta_rule(be, y.be, c.be, a.be, b.be, m, &d, &err))
    BOTH(CALL);
#undef CALL
    compare(&y, 0, "delta_rule");
    struct array state = floats(sequences * 2 * heads * dim * (dim + 1), 1);
#define CALL(be)                                                                                   \
    (d.a_log = log.be, d.dt_bias = dt.be, d.state = state.be,                                      \
     be->delta_rule(be, y.be, c.be, a.be, b.be, m, &d, &err))
    BOTH(CALL);
#undef CALL
    compare(&y, 0, "delta_rule from a state");
    compare(&state, 0, "delta_rule's state");
    struct qt_state_space model = {seqlen, 2 * heads, heads, dim + 1, dim, NULL,
                                   NULL,   NULL,      0.1f,  2,       NULL};
#define CALL(be)                                                                                   \
    (model.a_log = log.be, model.dt_bias = dt.be, model.d = dt.be, model.states = state.be,        \
     be->state_space(be, y.be, c.be, a.be, m, &model, &err))
    BOTH(CALL);
#undef CALL
    compare(&y, 0, "state_space");
    compare(&state, 0, "state_space's states");
    array_free(&state);
    array_free(&x), array_free(&w), array_free(&c), array_free(&a), array_free(&b);
    array_free(&log), array_free(&dt), array_free(&y);
}

static void test_elements(size_t count)
{
    for (int kind = QT_ACT_SILU; kind <= QT_ACT_CLAMPED; kind++)
        for (int with_up = kind == QT_ACT_CLAMPED; with_up < 2; with_up++) {
            struct array gate = floats(count, 8), up = floats(count, 2), y = zeros(count * 4);
            struct array dup = zeros(count * 4), dy = floats(count, 1);
#define CALL(be)                                                                                   \
    be->activate(be, y.be, gate.be, with_up ? up.be : NULL, (enum qt_act_kind)kind, count, &err)
            BOTH(CALL);
#undef CALL
            /* GELU far below 0 is a small difference of large numbers. */
            compare_at_least(&y, 1e-6, 1, "activate");
#define CALL(be)                                                                                   \
    be->activate_grad(be, y.be, with_up ? dup.be : NULL, dy.be, gate.be, with_up ? up.be : NULL,   \
                      (enum qt_act_kind)kind, count, &err)
            BOTH(CALL);
#undef CALL
            compare_at_least(&y, 1e-6, 1, "activate_grad");
            compare_at_least(&dup, 1e-6, 1, "activate_grad of up");
            array_free(&gate), array_free(&up), array_free(&y), array_free(&dup), array_free(&dy);
        }
    struct array x = floats(count, 1), y = floats(count, 1);
    double sums[2];
#define CALL(be) be->add(be, y.be, x.be, count, &err)
    BOTH(CALL);
#undef CALL
    compare(&y, 0, "add");
#define CALL(be) be->subtract(be, y.be, x.be, count, &err)
    BOTH(CALL);
#undef CALL
    compare(&y, 0, "subtract");
#define CALL(be) be->clip(be, y.be, 0.5f, count, &err)
    BOTH(CALL);
#undef CALL
    compare(&y, 0, "clip");
#define CALL(be) be->scale(be, y.be, 0.3f, count, &err)
    BOTH(CALL);
#undef CALL
    compare(&y, 0, "scale");
#define CALL(be) be->copy(be, x.be, y.be, count * 4, &err)
    BOTH(CALL);
#undef CALL
    compare(&x, 0, "copy");
#define CALL(be) be->zero(be, x.be, count / 2 * 4, &err)
    BOTH(CALL);
#undef CALL
    compare(&x, 0, "zero");
#define CALL(be) be->square_grad(be, &sums[be == gpu], x.be, x.be, y.be, 0.5f, count, &err)
    BOTH(CALL);
#undef CALL
    compare(&x, 1e-6, "square_grad");
    result(fabs(sums[0] - sums[1]) <= 1e-6 * sums[0], "square_grad's sum");
    array_free(&x), array_free(&y);
}

static void test_rows(size_t m, size_t n)
{
    const size_t step = 3;
    struct array all = floats(step * m * n, 1), some = floats(m * n, 1);
    uint32_t *rows = malloc(m * sizeof *rows);
    float *factor = malloc(m * sizeof *factor);
    for (size_t i = 0; i < m; i++) {
        rows[i] = (uint32_t)((m - 1 - i) * step + random_below(step));
        factor[i] = (float)random_below(1000) / 512 - 1;
    }
    for (int given = 0; given < 4; given++) {
        const uint32_t *r = given & 1 ? rows : NULL;
        const float *f = given & 2 ? factor : NULL;
#define CALL(be) be->scatter_rows(be, all.be, some.be, r, f, m, n, &err)
        BOTH(CALL);
#undef CALL
        compare(&all, 0, "scatter_rows");
#define CALL(be) be->gather_rows(be, some.be, all.be, r, f, m, n, &err)
        BOTH(CALL);
#undef CALL
        compare(&some, 0, "gather_rows");
#define CALL(be) be->gather_rows(be, some.be, some.be, NULL, f, m, n, &err)
        BOTH(CALL);
#undef CALL
        compare(&some, 0, "gather_rows in place");
    }
#define CALL(be)                                                                                   \
    be->copy_columns(be, some.be, n, (const float *)all.be + n / 3, 2 * n + 1, n - n / 3, m, &err)
    BOTH(CALL);
#undef CALL
    compare(&some, 0, "copy_columns");
    free(rows), free(factor);
    array_free(&all), array_free(&some);
}

static struct qt_act random_act(size_t k)
{
    struct qt_err err = {0};
    struct qt_act act;
    must(qt_act_new(&act, k, 8, &err), &err, "description");
    for (size_t i = k - 1; i > 0; i--) {
        const size_t j = random_below(i + 1);
        const uint32_t order = act.order[i];
        act.order[i] = act.order[j];
        act.order[j] = order;
        act.factor[i] = ldexpf(1, 4 - (int)random_below(8));
    }
    for (size_t b = 0; b < qt_ceil_div(k, QT_ACT_BLOCK); b++)
        act.bits[b] = random_below(2) ? 4 : 8;
    act.clip = 1 - (float)random_below(4) / 16;
    return act;
}

/* Bit for bit the reference of pack/, also for tokens with NaN, infinity, zeros and tiny values. */
static void test_round_inputs(size_t m, size_t k)
{
    struct array x = floats(m * k, 3), y = zeros(m * k * sizeof(float));
    struct qt_act act = random_act(k);
    float *values = fetch(cpu, x.cpu, x.bytes);
    struct qt_err err = {0};
    for (size_t i = 0; i < k; i++) {
        values[m / 2 * k + i] = 0;
        values[m / 3 * k + i] *= 1e-37f;
    }
    values[random_below(m * k)] = NAN;
    values[random_below(m * k)] = -INFINITY;
    must(gpu->upload(gpu, x.gpu, values, x.bytes, &err), &err, "upload");
    for (int i = 0; i < 6; i++) {
        char what[80];
        act.scales = (enum qt_act_scales)(i % 3);
        act.rotate = i > 2;
        must(qt_act_apply(y.cpu, values, m, &act, &err), &err, "qt_act_apply");
        must(gpu->round_inputs(gpu, y.gpu, x.gpu, m, &act, &err), &err, "round_inputs");
        snprintf(what, sizeof what, "round_inputs, %zu x %zu, scales %d, rotated %d", m, k, i % 3,
                 act.rotate);
        compare(&y, 0, what);
        must(qt_act_arrange(y.cpu, values, m, &act, &err), &err, "qt_act_arrange");
        must(gpu->arrange_inputs(gpu, y.gpu, x.gpu, m, &act, &err), &err, "arrange_inputs");
        snprintf(what, sizeof what, "arrange_inputs, %zu x %zu, rotated %d", m, k, act.rotate);
        compare(&y, 0, what);
    }
    free(values);
    qt_act_free(&act);
    array_free(&x), array_free(&y);
}

static void test_block_grams(size_t n, size_t k)
{
    const size_t cells = qt_ceil_div(k, QT_ACT_BLOCK) * QT_ACT_BLOCK * QT_ACT_BLOCK;
    struct array w = floats(n * k, 1), g = floats(cells, 1);
    struct qt_err err = {0};
    char what[80];
    block_grams_by_definition(g.cpu, w.cpu, n, k);
    must(gpu->block_grams(gpu, g.gpu, w.gpu, n, k, &err), &err, "block_grams");
    snprintf(what, sizeof what, "block_grams, %zu x %zu", n, k);
    compare(&g, 1e-5, what);
    array_free(&w), array_free(&g);
}

static void test_input_errors(size_t m, size_t k)
{
    static const struct qt_act_rounding how[] = {{8, 1}, {4, 1}, {4, 0.75f}};
    enum { SIDE = QT_ACT_BLOCK };
    const size_t blocks = qt_ceil_div(k, SIDE), sums = COUNT(how) * blocks;
    struct array x = floats(m * k, 3), g = floats(blocks * SIDE * SIDE, 0.1f),
                 d = zeros(2 * sums * sizeof(double)); /* and squares */
    float *sym = fetch(cpu, g.cpu, g.bytes);
    double *made = malloc(d.bytes), *want = (double *)d.cpu;
    struct qt_act act = random_act(k);
    struct qt_err err = {0};
    for (size_t b = 0; b < blocks; b++)
        for (size_t i = 0; i < SIDE; i++)
            for (size_t j = 0; j <= i; j++)
                sym[(b * SIDE + i) * SIDE + j] = i == j ? 1 : sym[(b * SIDE + j) * SIDE + i];
    must(gpu->upload(gpu, g.gpu, sym, g.bytes, &err), &err, "upload");
    for (int i = 0; i < 6; i++) {
        char what[80];
        act.scales = (enum qt_act_scales)(i % 3);
        act.rotate = i > 2;
        must(input_errors_by_definition(cpu, want, want + sums, x.cpu, sym, m, &act, how,
                                        COUNT(how), &err),
             &err, "reference");
        must(
            gpu->input_errors(gpu, made, made + sums, x.gpu, g.gpu, m, &act, how, COUNT(how), &err),
            &err, "input_errors");
        must(gpu->upload(gpu, d.gpu, made, d.bytes, &err), &err, "upload");
        snprintf(what, sizeof what, "input_errors, %zu x %zu, scales %d, rotated %d", m, k, i % 3,
                 act.rotate);
        compare_doubles(&d, 2 * sums, 1e-5, what);
    }
    free(sym), free(made);
    qt_act_free(&act);
    array_free(&x), array_free(&g), array_free(&d);
}

/* FP16 and BF16 become the FP32 values of the host, bit for bit. */
static void test_upload_narrow(size_t count)
{
    struct array y = zeros(count * sizeof(float));
    uint16_t *x = malloc(count * sizeof *x);
    struct qt_err err = {0};
    for (int bf16 = 0; bf16 < 2; bf16++) {
        char what[80];
        for (size_t i = 0; i < count; i++)
            do
                x[i] = (uint16_t)random_below(1 << 16);
            while (qt_count_nonfinite(&x[i], bf16 ? QT_BF16 : QT_F16, 1));
        qt_to_f32(y.cpu, x, bf16 ? QT_BF16 : QT_F16, count);
        must(gpu->upload_narrow(gpu, y.gpu, x, bf16, count, &err), &err, "upload_narrow");
        snprintf(what, sizeof what, "upload_narrow, %zu, BF16 %d", count, bf16);
        compare(&y, 0, what);
    }
    free(x);
    array_free(&y);
}

/* losses: of m positions by the CPU, and then by the GPU. */
static void compare_losses(const double *losses, size_t m, const char *what)
{
    bool ok = true;
    for (size_t i = 0; i < m; i++)
        ok = ok && fabs(losses[i] - losses[m + i]) <= 1e-5 * (1 + losses[i]);
    result(ok, what);
}

static void test_score(size_t m, size_t vocab, float softcap)
{
    struct array a = floats(m * vocab, 12), b = floats(m * vocab, 12);
    uint32_t *targets = malloc(m * sizeof *targets);
    struct qt_score *s = malloc(2 * m * sizeof *s);
    double *losses = malloc(2 * m * sizeof *losses);
    for (size_t i = 0; i < m; i++)
        targets[i] = (uint32_t)random_below(vocab);
    for (int with_ref = 0; with_ref < 3; with_ref++) { /* 2: equal logits */
        bool ok = true;
#define CALL(be)                                                                                   \
    be->score(be, s + (be == gpu ? m : 0), a.be,                                                   \
              with_ref == 2   ? a.be                                                               \
              : with_ref == 1 ? b.be                                                               \
                              : NULL,                                                              \
              targets, softcap, m, vocab, &err)
        BOTH(CALL);
#undef CALL
        for (size_t i = 0; i < m; i++) {
            const struct qt_score *x = &s[i], *y = &s[m + i];
            ok = ok && fabs(x->nll - y->nll) <= 1e-5 && fabs(x->ref_nll - y->ref_nll) <= 1e-5 &&
                 fabs(x->kld - y->kld) <= 1e-5 * (1 + x->kld) &&
                 fabs(x->p_delta - y->p_delta) <= 1e-6 && x->same_top == y->same_top &&
                 (with_ref != 2 || y->kld == 0);
        }
        char what[100];
        snprintf(what, sizeof what, "score %zu x %zu, cap %g, ref %d", m, vocab, (double)softcap,
                 with_ref);
        result(ok, what);
    }
    targets[m - 1] = (uint32_t)vocab;
    result(gpu->score(gpu, s, a.gpu, NULL, targets, softcap, m, vocab, NULL) == QT_E_INPUT,
           "a target beyond the vocabulary");
    struct array d = zeros(m * vocab * 4);
#define CALL(be)                                                                                   \
    be->loss_grad(be, losses + (be == gpu ? m : 0), d.be, a.be, b.be, NULL, softcap, 0.1f, m,      \
                  vocab, &err)
    BOTH(CALL);
#undef CALL
    compare(&d, softcap > 0 ? 4e-6 : 2e-6, "loss_grad of KL"); /* a difference, of two tanh */
    compare_losses(losses, m, "losses of KL");
    array_free(&d);
    targets[m - 1] = (uint32_t)vocab;
    result(gpu->loss_grad(gpu, losses, a.gpu, a.gpu, NULL, targets, softcap, 0.1f, m, vocab,
                          NULL) == QT_E_INPUT,
           "loss_grad of a target beyond the vocabulary");
    targets[m - 1] = QT_NO_TARGET;
#define CALL(be)                                                                                   \
    be->loss_grad(be, losses + (be == gpu ? m : 0), a.be, a.be, NULL, targets, softcap, 0.1f, m,   \
                  vocab, &err)
    BOTH(CALL);
#undef CALL
    compare(&a, 1e-6, "loss_grad");
    compare_losses(losses, m, "losses");
    array_free(&a), array_free(&b);
    free(targets), free(s), free(losses);
}

/* Matrices of codes; the reference is a loop on the host. */
static void test_coded(size_t n, size_t k, size_t group, bool zeros_too)
{
    const size_t groups = qt_ceil_div(k, group);
    struct array w = zeros(n * k * 4), dw = floats(n * k, 1), scale = floats(n * groups, 1);
    struct array value = floats(QT_ROUND_VALUES, 5), dscale = zeros(n * groups * 4);
    uint8_t *code = malloc(n * k + 1), *zero = malloc(n * groups + 1);
    for (size_t i = 0; i < n * k; i++)
        code[i] = (uint8_t)random_below(QT_ROUND_VALUES);
    for (size_t i = 0; i < n * groups; i++)
        zero[i] = (uint8_t)random_below(16);
    struct array codes = array_of(code, n * k), points = array_of(zero, n * groups);
    const struct qt_coded on = {
        n, k, group, value.gpu, codes.gpu, scale.gpu, zeros_too ? points.gpu : NULL};
    const float *s = scale.cpu, *v = value.cpu, *d = dw.cpu;
    float *want = w.cpu, *sums = dscale.cpu;
    struct qt_err err = {0};
    for (size_t at = 0; at < n * groups; at++) {
        double sum = 0;
        for (size_t i = at % groups * group; i < k && i < (at % groups + 1) * group; i++) {
            const size_t e = at / groups * k + i;
            const float x = v[code[e]] - (zeros_too ? (float)zero[at] : 0);
            want[e] = s[at] * x;
            sum += (double)(d[e] * x);
        }
        sums[at] = 2 * (float)sum; /* both calls add to the gradient */
    }
    must(gpu->decode(gpu, w.gpu, &on, &err), &err, "decode");
    for (int i = 0; i < 2; i++)
        must(gpu->decode_grad(gpu, dscale.gpu, &on, dw.gpu, &err), &err, "decode_grad");
    compare(&w, 0, "decode");
    compare(&dscale, 1e-6, "decode_grad");
    array_free(&w), array_free(&dw), array_free(&scale), array_free(&value), array_free(&dscale);
    array_free(&codes), array_free(&points);
    free(code), free(zero);
}

/* Steps of Adam on scales; the reference is a loop on the host. */
static void test_tune(size_t n)
{
    enum { DELTA, M, V, SCALE, STATES };
    static const struct qt_adam first = {0.9, 0.99, 1e-12, 0.1, 0.01, 1e-2},
                                later = {0.9, 0.99, 1e-12, 0.19, 0.0199, 3};
    struct array start, unit, grad = floats(n, 1e-3f), state[STATES];
    float *from = malloc(n * sizeof *from), *by = malloc(n * sizeof *by), *x[STATES];
    const struct qt_adam *step = &first;
    struct qt_err err = {0};
    for (size_t i = 0; i < n; i++) {
        from[i] = i % 7 ? qt_f16_to_f32(qt_f32_to_f16(random_float())) : 0;
        by[i] = fabsf(from[i]);
    }
    start = array_of(from, n * sizeof *from);
    unit = array_of(by, n * sizeof *by);
    for (int i = 0; i < STATES; i++) {
        state[i] = zeros(n * sizeof(float));
        x[i] = state[i].cpu;
    }
    const struct qt_tuned t = {n,
                               -3,
                               start.gpu,
                               unit.gpu,
                               grad.gpu,
                               state[DELTA].gpu,
                               state[M].gpu,
                               state[V].gpu,
                               state[SCALE].gpu};
    for (; step; step = step == &first ? &later : NULL) {
        must(gpu->tune(gpu, &t, step, &err), &err, "tune");
        for (size_t i = 0; i < n; i++) {
            const double g = (double)ldexpf(((float *)grad.cpu)[i], -3) * (double)by[i];
            const double m = step->beta1 * (double)x[M][i] + (1 - step->beta1) * g;
            const double v = step->beta2 * (double)x[V][i] + (1 - step->beta2) * g * g;
            x[M][i] = (float)m;
            x[V][i] = (float)v;
            x[DELTA][i] -=
                (float)(step->lr * (m / step->fix1) / (sqrt(v / step->fix2) + step->eps));
            const float value = from[i] + by[i] * x[DELTA][i];
            const float size = fminf(fmaxf(from[i] < 0 ? -value : value, 0x1p-24f), 65504);
            const float scale = copysignf(qt_f16_to_f32(qt_f32_to_f16(size)), from[i]);
            x[SCALE][i] = from[i] == 0 ? 0 : ldexpf(scale, -3);
        }
        compare(&state[M], 1e-6, "tune: first moments");
        compare(&state[V], 1e-6, "tune: second moments");
        compare(&state[DELTA], 1e-6, "tune: changes");
        compare(&state[SCALE], 1e-3, "tune: scales"); /* may be rounded to the neighbour */
    }
    for (int i = 0; i < STATES; i++)
        array_free(&state[i]);
    array_free(&start), array_free(&unit), array_free(&grad);
    free(from), free(by);
}

static void test_statistics(size_t m, size_t k)
{
    struct array x = floats(m * k, 3), h = zeros(k * k * 8), most = zeros(k * 4);
    struct array sum2 = zeros(k * 8), hist = zeros(k * QT_HIST_BINS * 4);
    struct qt_channels on_cpu = {most.cpu, sum2.cpu, hist.cpu},
                       on_gpu = {most.gpu, sum2.gpu, hist.gpu};
    char what[100];
    for (int i = 0; i < 2; i++) { /* the second call adds to the first */
#define CALL(be) be->gram(be, h.be, x.be, m, k, &err)
        BOTH(CALL);
#undef CALL
#define CALL(be) be->channels(be, be == gpu ? &on_gpu : &on_cpu, x.be, m, k, &err)
        BOTH(CALL);
#undef CALL
    }
    on_cpu.hist = on_gpu.hist = NULL;
#define CALL(be) be->channels(be, be == gpu ? &on_gpu : &on_cpu, x.be, m, k, &err)
    BOTH(CALL);
#undef CALL
    snprintf(what, sizeof what, "gram %zu x %zu", m, k);
    /* 3xTF32 or FP32; the upper triangle is 0 in both */
    compare_doubles(&h, k * k, m >= 128 && k >= 256 ? 1e-5 : 2e-6, what);
    compare(&most, 0, "largest of channels");
    compare_doubles(&sum2, k, 1e-13, "squares of channels");
#define CALL(be) be->add_f64(be, h.be, h.be, k *k, &err)
    BOTH(CALL);
#undef CALL
    compare_doubles(&h, k * k, m >= 128 && k >= 256 ? 1e-5 : 2e-6, "add_f64");
    void *c = fetch(cpu, hist.cpu, hist.bytes), *g = fetch(gpu, hist.gpu, hist.bytes);
    result(memcmp(c, g, hist.bytes) == 0, "histograms");
    free(c), free(g);
    array_free(&x), array_free(&h), array_free(&most), array_free(&sum2), array_free(&hist);
}

/* ---- hessian/ on a backend ------------------------------------------------------------------ */

/* Returns X^T X of correlated channels, or a matrix that is not positive definite. */
static double *random_gram(size_t k, bool positive)
{
    const size_t tokens = 2 * k + 3;
    double *h = calloc(k * k, sizeof *h);
    float *x = malloc(k * sizeof *x);
    for (size_t t = 0; t < tokens; t++) {
        for (size_t j = 0; j < k; j++)
            x[j] = random_float() + (j ? 0.7f * x[j - 1] : 0);
        for (size_t i = 0; i < k; i++)
            for (size_t j = 0; j <= i; j++)
                h[i * k + j] += (double)x[i] * (double)x[j];
    }
    if (!positive && k > 2)
        h[(k - 1) * k + k / 2] = 1.1 * sqrt(h[k * k - 1] * h[k / 2 * k + k / 2]);
    free(x);
    return h;
}

static void compare_host(const float *x, const float *y, size_t n, double tolerance,
                         const char *what)
{
    double most = 1e-30, worst = 0;
    char text[300];
    for (size_t i = 0; i < n; i++)
        most = fmax(most, fabs((double)x[i]));
    for (size_t i = 0; i < n; i++)
        worst = worse(worst, fabs((double)x[i] - (double)y[i]) / most);
    snprintf(text, sizeof text, "%s: off by %.2g of the largest value", what, worst);
    result(worst <= tolerance, text);
}

static void test_factor(size_t k)
{
    const size_t lacking = k < 5 ? k : 5; /* rows of w and of the output errors */
    for (int positive = 0; positive < 2; positive++) {
        double *h = random_gram(k, positive);
        float *cross = malloc(k * k * sizeof *cross), *w[2];
        struct qt_factor f[2];
        struct qt_err err = {0};
        char text[100];
        for (size_t i = 0; i < k * k; i++)
            cross[i] = 0.1f * random_float();
        for (int on = 0; on < 2; on++) {
            const struct qt_factor_options opt = {
                .damp = 0.01, .group = 128, .backend = on ? gpu : cpu};
            must(qt_factor_new(&f[on], h, k, &opt, &err), &err, "factor");
            must(qt_factor_correct_input_error(&f[on], cross, 0, 1000 * k, &err), &err, "shift");
            must(qt_factor_correct_output_error(&f[on], cross, lacking, 0, 1000 * k, &err), &err,
                 "residual");
            w[on] = malloc(lacking * k * sizeof **w);
            for (size_t i = 0; i < lacking * k; i++)
                w[on][i] = (float)(i % 7) - 3;
            must(qt_factor_targets(w[on], lacking, &f[on], &err), &err, "targets");
            must(qt_factor_fetch(&f[on], &err), &err, "fetch");
        }
        snprintf(text, sizeof text, "factor, %zu channels%s", k, positive ? "" : ", indefinite");
        result(f[0].damping == f[1].damping && f[0].damp == f[1].damp, text);
        compare_host(f[0].v, f[1].v, k * k, 1e-6, text);
        snprintf(text, sizeof text, "shift, %zu channels", k);
        struct array s = {k * k * 4, f[0].input_correction, f[1].input_correction};
        compare(&s, 1e-3, text);
        snprintf(text, sizeof text, "residual, %zu channels", k);
        struct array t = {lacking * k * 4, f[0].output_correction, f[1].output_correction};
        compare(&t, 1e-3, text);
        snprintf(text, sizeof text, "targets, %zu channels", k);
        compare_host(w[0], w[1], lacking * k, 1e-3, text);
        for (int on = 0; on < 2; on++) {
            qt_factor_free(&f[on]);
            free(w[on]);
        }
        free(h), free(cross);
    }
}

/* Codes may differ where two are nearly equally good; the total error may not. So may the groups
 * that mix24 stores with 4 bits: 2 % of the error in one of many small matrices. */
static void test_solve(const char *text, size_t n, size_t k)
{
    double *h = random_gram(k, true);
    float *w = malloc(n * k * sizeof *w);
    struct qt_solve_report report[2];
    struct qt_matrix m = {w, QT_F32, n, k, "test", "w"};
    struct qt_err err = {0};
    char what[200];
    for (size_t i = 0; i < n * k; i++)
        w[i] = 0.05f * random_float();
    for (int on = 0; on < 3; on++) { /* the third run must repeat the second bit for bit */
        const int at = on ? 1 : 0;
        struct qt_spec spec;
        struct qt_packed p;
        struct qt_factor f;
        struct qt_solve_report again = report[1];
        must(qt_spec_parse(&spec, text, &err), &err, text);
        must(qt_packed_describe(&p, &spec, n, k, &err), &err, text);
        const struct qt_factor_options opt = {
            .damp = 0.01, .group = qt_packed_group(&p), .backend = on ? gpu : cpu};
        must(qt_factor_new(&f, h, k, &opt, &err), &err, "factor");
        must(qt_packed_solve(&p, &spec, &m, &f, NULL, &report[at], &err), &err, text);
        snprintf(what, sizeof what, "%s, %zu x %zu: the same in two runs", text, n, k);
        if (on == 2)
            result(memcmp(&again, &report[1], sizeof again) == 0, what);
        qt_factor_free(&f);
        qt_packed_free(&p);
    }
    snprintf(what, sizeof what, "%s, %zu x %zu: objective %.6g, %.6g on the GPU; before %.6g, %.6g",
             text, n, k, report[0].after_descent, report[1].after_descent, report[0].before,
             report[1].before);
    const double most = strncmp(text, "mix24", 5) == 0 ? 0.03 : 0.01;
    result(fabs(report[0].after_descent - report[1].after_descent) <=
                   most * report[0].after_descent &&
               fabs(report[0].before - report[1].before) <= 1e-4 * report[0].before,
           what);
    free(h), free(w);
}

/* Values that are not finite stay so. */
static void test_not_finite(void)
{
    float x[4 * 8], w[8];
    for (int i = 0; i < 8; i++)
        w[i] = 1;
    for (int i = 0; i < 32; i++)
        x[i] = (float)i - 10;
    x[3] = NAN, x[12] = INFINITY;
    struct array a = array_of(x, sizeof x), b = array_of(w, sizeof w), y = zeros(sizeof x);
#define CALL(be) be->activate(be, y.be, a.be, NULL, QT_ACT_RELU, 32, &err)
    BOTH(CALL);
#undef CALL
    compare(&y, 0, "relu of NaN and infinity");
#define CALL(be) be->linear(be, y.be, a.be, b.be, NULL, 4, 1, 8, &err)
    BOTH(CALL);
#undef CALL
    compare(&y, 1e-6, "linear of NaN and infinity");
    const uint32_t targets[4] = {0, 1, 2, 3};
    struct qt_score s[2][4];
    bool same = true;
#define CALL(be) be->score(be, s[be == gpu], a.be, y.be, targets, 0, 4, 8, &err)
    BOTH(CALL);
#undef CALL
    for (int i = 0; i < 4; i++)
        same = same && isnan(s[0][i].kld) == isnan(s[1][i].kld) &&
               isnan(s[0][i].nll) == isnan(s[1][i].nll);
    result(same, "score of NaN and infinity");
    array_free(&a), array_free(&b), array_free(&y);
    /* A query before the key that is not finite, and one at its position. */
    const struct qt_attention one = {2, 1, 1, 8, 1, 0, 0, NULL, NULL, 0, NULL, 0, false};
    struct array q = floats(16, 1), k = floats(16, 1), v = array_of(x, 16 * sizeof *x);
    struct array z = zeros(16 * sizeof *x);
#define CALL(be) be->attention(be, z.be, q.be, k.be, v.be, 2, &one, &err)
    BOTH(CALL);
#undef CALL
    compare(&z, 1e-6, "attention of NaN and infinity");
    array_free(&q), array_free(&k), array_free(&v), array_free(&z);
}

/* New memory is zeroed, also if it held other values before. */
static void test_new(void)
{
    struct qt_err err = {0};
    for (int i = 0; i < 4; i++) {
        struct array a = floats(100000, NAN);
        array_free(&a);
        void *p;
        must(gpu->alloc(gpu, &p, 400000, &err), &err, "new");
        unsigned char *x = fetch(gpu, p, 400000);
        bool zero = true;
        for (size_t j = 0; j < 400000; j++)
            zero = zero && x[j] == 0;
        result(zero, "new memory is zeroed");
        gpu->free(gpu, p);
        free(x);
    }
}

static void fill_random(unsigned char *x, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        x[i] = (unsigned char)random_below(256);
}

/* Uploads pieces from memory that changes right after, and downloads them: one more than there are
 * staging buffers. Also with pinned memory. */
static void test_copies(size_t bytes, size_t pieces, bool pinned)
{
    struct qt_err err = {0};
    unsigned char *all = malloc(bytes * pieces), *piece = malloc(bytes), *back;
    void *there;
    fill_random(all, bytes * pieces);
    if (pinned)
        gpu->pin(gpu, piece, bytes);
    must(gpu->alloc(gpu, &there, bytes * pieces, &err), &err, "new");
    for (size_t i = 0; i < pieces; i++) {
        memcpy(piece, all + i * bytes, bytes);
        must(gpu->upload(gpu, (char *)there + i * bytes, piece, bytes, &err), &err, "upload");
        memset(piece, (int)i, bytes);
    }
    back = fetch(gpu, there, bytes * pieces);
    result(!memcmp(back, all, bytes * pieces), "memory that was uploaded comes back");
    for (size_t i = pieces; i-- > 0;) {
        must(gpu->download(gpu, piece, (char *)there + i * bytes, bytes, &err), &err, "download");
        result(!memcmp(piece, all + i * bytes, bytes), "a piece of it comes back");
    }
    if (pinned)
        gpu->unpin(gpu, piece);
    gpu->free(gpu, there);
    free(all), free(piece), free(back);
}

int main(int argc, char **argv)
{
    static const size_t shapes[][3] = {{1, 1, 1},      {1, 17, 33},   {5, 64, 100}, {130, 257, 96},
                                       {513, 40, 384}, {64, 1000, 7}, {2, 3, 5000}};
    static const struct qt_attention kinds[] = {
        {1, 1, 1, 8, 0.3f, 0, 0, NULL, NULL, 0, NULL, 0, false},
        {33, 4, 2, 16, 0.25f, 0, 0, NULL, NULL, 0, NULL, 0, false},
        {100, 6, 6, 40, 0.2f, 5, 0, NULL, NULL, 0, NULL, 0, false},
        {257, 8, 1, 64, 0.1f, 0, 50, NULL, NULL, 0, NULL, 0, false},
        {64, 2, 2, 128, 0.1f, 30, 1, NULL, NULL, 0, NULL, 0, false},
        {1500, 4, 2, 32, 0.2f, 0, 0, NULL, NULL, 0, NULL, 0, false},
        {300, 3, 1, 300, 0.1f, 0, 0, NULL, NULL, 0, NULL, 0, false},
        {2100, 2, 1, 64, 0.1f, 20, 700, NULL, NULL, 0, NULL, 0, false}};
    const bool quick = check_begin(argc, argv);
    struct qt_err err = {0};
    must(qt_backend_cpu_open(&cpu, &err), &err, "CPU backend");
    must(qt_backend_cuda_open(&gpu, 0, &err), &err, "CUDA backend");
    for (size_t i = 0; i < COUNT(shapes); i++)
        test_linear(shapes[i][0], shapes[i][1], shapes[i][2]);
    /* 3xTF32: several runs along k, several panels of the factors. */
    test_linear(256, 256, 256);
    test_linear(300 + random_below(100), 256 + random_below(300), 2000 + random_below(3000));
    if (!quick)
        test_linear(300, 259, 300000 + random_below(100));
    for (size_t n = 1; n <= 5000; n = 3 * n + 5)
        test_norm(1 + random_below(40), n);
    test_norm(1, 1);
    test_norm(1024 + random_below(3000), 30 + random_below(70)); /* several runs of rows */
    test_tune(1);
    test_tune(100000);
    for (int zeros_too = 0; zeros_too < 2; zeros_too++) {
        test_coded(1, 1, 1, zeros_too);
        test_coded(1 + random_below(40), 300 + random_below(300), 128, zeros_too);
        test_coded(5000 + random_below(100), 17 + random_below(100), 32, zeros_too);
        test_coded(7, 5000, 5000, zeros_too);
    }
    for (int i = 0; i < 10; i++)
        test_rope(1 + random_below(3), 1 + random_below(60), 1 + random_below(8), 64,
                  16 * (1 + random_below(4)), i % 2);
    for (size_t i = 0; i < COUNT(kinds) - (quick ? 2 : 0); i++) {
        test_attention(1 + random_below(3), &kinds[i]);
        test_cached_keys(1 + random_below(3), kinds[i]);
    }
    static const struct qt_attention fast[] = {
        {1, 1, 1, 64, 0.3f, 0, 0, NULL, NULL, 0, NULL, 0, false},
        {127, 4, 2, 64, 0.1f, 0, 0, NULL, NULL, 0, NULL, 0, false},
        {300, 6, 2, 128, 0.1f, 0, 0, NULL, NULL, 0, NULL, 0, false},
        {65, 3, 1, 128, 0.2f, 0, 10, NULL, NULL, 0, NULL, 0, false},
        {1000, 4, 4, 64, 0.2f, 0, 200, NULL, NULL, 0, NULL, 0, false},
        {700, 2, 1, 128, 0.2f, 0, 1, NULL, NULL, 0, NULL, 0, false},
        {300, 2, 1, 96, 0.2f, 0, 0, NULL, NULL, 0, NULL, 0, false},
        {2100, 2, 1, 128, 0.1f, 0, 700, NULL, NULL, 0, NULL, 0, false}};
    for (size_t i = 0; i < COUNT(fast) - (quick ? 1 : 0); i++)
        test_half_attention(1 + random_below(3), &fast[i], i % 2 ? 3000 : 0.01f);
    test_new_factors(256, 256);
    test_half_products(256, 256, 256, 1);
    test_half_products(400 + random_below(100), 300 + random_below(100), 257 + random_below(99),
                       1e6f);
    test_half_products(9000, 256, 260, 1e-6f);
    test_elements(1);
    test_elements(100000 + random_below(1000));
    test_rows(1, 1);
    test_recurrences(3, 17, 2, 5);
    test_rows(700 + random_below(100), 300 + random_below(100));
    for (size_t k = 1; k < 5000; k = 2 * k + random_below(30))
        test_round_inputs(1 + random_below(40), k);
    test_round_inputs(100, 576);
    test_round_inputs(2, 50000); /* too many channels for shared memory */
    for (size_t k = 1; k < 2000; k = 3 * k + random_below(30)) {
        test_input_errors(1 + random_below(100), k);
        test_block_grams(1 + random_below(300), k);
    }
    test_upload_narrow(1 + random_below(300000));
    for (int i = 0; i < 4; i++)
        test_score(1 + random_below(30), 2 + random_below(i % 2 ? 40000 : 300), i < 2 ? 0 : 30);
    test_statistics(1, 3);
    test_statistics(700, 130);
    test_statistics(1025 + random_below(2000), 33);
    test_statistics(2500, quick ? 300 : 2500);
    for (size_t k = 1; k <= (quick ? 300 : 1200); k = 3 * k + random_below(4))
        test_factor(k);
    test_factor(128);
    test_factor(1100 + random_below(100));
    test_solve("nf4:g=64", 300, 288);
    test_solve("nf3:g=128", 128, 200);
    test_solve("fp6", 33, 700);
    test_solve("int4:g=128,zero=group", 1, 130);
    test_solve("mix24", 150, 288);
    test_not_finite();
    test_new();
    test_copies(1 + random_below(5000), 20, false);
    test_copies(1 + random_below(5000), 20, true);
    test_copies((4 << 20) + random_below(3) - 1, 3, random_below(2));
    test_copies((quick ? 9 << 20 : 70 << 20) + random_below(100000), 2, false);
    test_linear(3, 4, 0);
    gpu->close(gpu);
    cpu->close(cpu);
    return check_end();
}
