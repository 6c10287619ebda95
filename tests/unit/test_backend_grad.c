/*
 * Gradients of the CPU backend against central differences of the same operations in double
 * precision, on fresh random data and edge shapes. Results for 1, 2 and 4 threads must be equal bit
 * by bit. The seed is printed; set QT_SEED to repeat a run.
 */
#include "backend_fixture.h"

/* ---- central differences -------------------------------------------------------------------- */

/* An operation in double: outputs y[ny], inputs x[0..2] of length nx[i]. The gradients are those of
 * L = sum of weight[j] y[j]. */
enum { INPUTS = 3 };
struct op {
    void (*fn)(double *y, double *const *x, const struct op *op);
    size_t ny, nx[INPUTS];
    size_t m, n, k; /* shape; the meaning depends on the operation */
    enum qt_norm_kind norm;
    enum qt_act_kind act;
    struct qt_attention a;
    float cap;
    const uint32_t *targets;
};

static double loss_of(const struct op *op, double *const *x, const float *weight, double *y)
{
    double sum = 0;
    op->fn(y, x, op);
    for (size_t j = 0; j < op->ny; j++)
        sum += (weight ? (double)weight[j] : 1) * y[j];
    return sum;
}

/* got[i] is the backend's gradient of input i; NULL: not checked. */
static void check(const char *what, const struct op *op, const float *const *x, const float *weight,
                  const float *const *got, double tolerance)
{
    double *in[INPUTS], *y = calloc(op->ny, sizeof *y);
    assert_non_null(y);
    for (size_t i = 0; i < INPUTS; i++) {
        in[i] = calloc(op->nx[i] + 1, sizeof **in);
        assert_non_null(in[i]);
        for (size_t j = 0; j < op->nx[i]; j++)
            in[i][j] = (double)x[i][j];
    }
    for (size_t i = 0; i < INPUTS; i++)
        for (size_t j = 0, step = op->nx[i] / 400 + 1; got[i] && j < op->nx[i]; j += step) {
            const double h = 1e-5;
            double at = in[i][j];
            in[i][j] = at + h;
            double up = loss_of(op, in, weight, y);
            in[i][j] = at - h;
            double want = (up - loss_of(op, in, weight, y)) / (2 * h);
            in[i][j] = at;
            if (!(fabs((double)got[i][j] - want) <= tolerance * (1 + fabs(want))))
                fail_msg("%s: gradient of input %zu at [%zu] is %.9g, expected %.9g", what, i, j,
                         (double)got[i][j], want);
        }
    for (size_t i = 0; i < INPUTS; i++)
        free(in[i]);
    free(y);
}

/* ---- linear --------------------------------------------------------------------------------- */

static void linear(double *y, double *const *x, const struct op *op)
{
    for (size_t i = 0; i < op->m; i++)
        for (size_t j = 0; j < op->n; j++) {
            y[i * op->n + j] = 0;
            for (size_t l = 0; l < op->k; l++)
                y[i * op->n + j] += x[0][i * op->k + l] * x[1][j * op->k + l];
        }
}

static void linear_case(struct qt_backend *be, size_t m, size_t n, size_t k)
{
    struct op op = {.fn = linear, .ny = m * n, .nx = {m * k, n * k}, .m = m, .n = n, .k = k};
    float *x = random_floats(m * k, 1), *w = random_floats(n * k, 1), *dy = random_floats(m * n, 1);
    float *dx = random_floats(m * k, 1), *dw = random_floats(n * k, 0);
    const float *in[INPUTS] = {x, w}, *got[INPUTS] = {dx, dw};
    assert_int_equal(be->linear_grad_x(be, dx, dy, w, false, m, n, k, NULL), QT_OK);
    assert_int_equal(be->linear_grad_w(be, dw, dy, x, true, m, n, k, NULL), QT_OK);
    check("linear", &op, in, dy, got, 2e-5);
    /* Both calls add to the gradient, which doubles. */
    assert_int_equal(be->linear_grad_x(be, dx, dy, w, true, m, n, k, NULL), QT_OK);
    assert_int_equal(be->linear_grad_w(be, dw, dy, x, true, m, n, k, NULL), QT_OK);
    be->scale(be, dx, 0.5f, m * k, NULL);
    be->scale(be, dw, 0.5f, n * k, NULL);
    check("linear, added", &op, in, dy, got, 2e-5);
    qt_free(x);
    qt_free(w);
    qt_free(dy);
    qt_free(dx);
    qt_free(dw);
}

static void test_linear(void **state)
{
    static const size_t edges[][3] = {{1, 1, 1},   {3, 5, 7},    {2, 129, 3}, {130, 3, 2},
                                      {5, 2, 130}, {64, 16, 33}, {513, 1, 2}, {1, 513, 129}};
    struct qt_backend *be = open_cpu();
    (void)state;
    for (size_t i = 0; i < sizeof edges / sizeof *edges; i++)
        linear_case(be, edges[i][0], edges[i][1], edges[i][2]);
    be->close(be);
}

/* ---- norm ----------------------------------------------------------------------------------- */

static const float eps = 1e-5f;

static void norm(double *y, double *const *x, const struct op *op)
{
    for (size_t i = 0; i < op->m; i++) {
        const double *row = x[0] + i * op->n;
        double mean = 0, square = 0, n = (double)op->n;
        for (size_t j = 0; j < op->n && op->norm == QT_NORM_LAYER; j++)
            mean += row[j] / n;
        for (size_t j = 0; j < op->n; j++)
            square += (row[j] - mean) * (row[j] - mean) / n;
        for (size_t j = 0; j < op->n; j++)
            y[i * op->n + j] = (row[j] - mean) / sqrt(square + (double)eps) * x[1][j];
    }
}

static void norm_case(struct qt_backend *be, enum qt_norm_kind kind, size_t m, size_t n)
{
    struct op op = {.fn = norm, .ny = m * n, .nx = {m * n, n}, .m = m, .n = n, .norm = kind};
    float *x = random_floats(m * n, 1), *w = random_floats(n, 1), *dy = random_floats(m * n, 1);
    float *dx = random_floats(m * n, 1), *dw = random_floats(n, 0), *same = random_floats(m * n, 1);
    const float *in[INPUTS] = {x, w}, *got[INPUTS] = {dx, dw};
    memcpy(same, dy, m * n * sizeof *dy);
    assert_int_equal(be->norm_grad(be, dx, dw, dy, x, w, kind, eps, m, n, NULL), QT_OK);
    check("norm", &op, in, dy, got, n == 1 ? 1e-3 : 1e-4);
    assert_int_equal(be->norm_grad(be, same, NULL, same, x, w, kind, eps, m, n, NULL), QT_OK);
    assert_memory_equal(same, dx, m * n * sizeof *dx);
    qt_free(x);
    qt_free(w);
    qt_free(dy);
    qt_free(dx);
    qt_free(dw);
    qt_free(same);
}

static void test_norm(void **state)
{
    struct qt_backend *be = open_cpu();
    (void)state;
    for (int kind = QT_NORM_RMS; kind <= QT_NORM_LAYER; kind++) {
        norm_case(be, (enum qt_norm_kind)kind, 3, 2);
        norm_case(be, (enum qt_norm_kind)kind, 5, 17);
        norm_case(be, (enum qt_norm_kind)kind, 2, 64);
        norm_case(be, (enum qt_norm_kind)kind, 700, 65); /* several items */
    }
    be->close(be);
}

/* ---- rope ----------------------------------------------------------------------------------- */

/* rope with -sin is the transpose of rope: <rope(x), r> = <x, rope with -sin (r)>. */
static void rope_case(bool interleaved)
{
    enum { SEQ = 5, HEADS = 2, DIM = 6, M = 2 * SEQ, N = M * HEADS * DIM };
    struct qt_backend *be = open_cpu();
    float *x = random_floats(N, 1), *r = random_floats(N, 1), *y = random_floats(N, 1);
    float *d = random_floats(N, 1), *cs = random_floats(SEQ * DIM / 2, 1);
    float *sn = random_floats(SEQ * DIM / 2, 1), *minus = random_floats(SEQ * DIM / 2, 1);
    double left = 0, right = 0;
    for (size_t i = 0; i < SEQ * DIM / 2; i++)
        minus[i] = -sn[i];
    memcpy(y, x, N * sizeof *x);
    memcpy(d, r, N * sizeof *x);
    be->rope(be, y, cs, sn, M, SEQ, HEADS, DIM, DIM, interleaved, NULL);
    be->rope(be, d, cs, minus, M, SEQ, HEADS, DIM, DIM, interleaved, NULL);
    for (size_t i = 0; i < N; i++) {
        left += (double)y[i] * (double)r[i];
        right += (double)x[i] * (double)d[i];
    }
    assert_true(fabs(left - right) < 1e-4);
    float *const all[] = {x, r, y, d, cs, sn, minus};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        qt_free(all[i]);
    be->close(be);
}

static void test_rope(void **state)
{
    (void)state;
    rope_case(false);
    rope_case(true);
}

/* ---- activation ----------------------------------------------------------------------------- */

static double act(double x, enum qt_act_kind kind)
{
    switch (kind) {
    case QT_ACT_SILU:
        return x / (1 + exp(-x));
    case QT_ACT_GELU_TANH:
        return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
    case QT_ACT_GELU:
        return 0.5 * x * (1 + erf(x * 0.7071067811865476));
    case QT_ACT_RELU2:
        return x > 0 ? x * x : 0;
    case QT_ACT_NONE:
        return x;
    case QT_ACT_SIGMOID:
        return 1 / (1 + exp(-x));
    default:
        return x > 0 ? x : 0;
    }
}

static double clamped(double gate, double up)
{
    const double g = fmin(gate, 7), u = fmax(fmin(up, 7), -7);
    return g / (1 + exp(-1.702 * g)) * (u + 1);
}

static void activate(double *y, double *const *x, const struct op *op)
{
    for (size_t i = 0; i < op->ny; i++)
        y[i] = op->act == QT_ACT_CLAMPED ? clamped(x[0][i], x[1][i])
                                         : act(x[0][i], op->act) * (op->nx[1] ? x[1][i] : 1);
}

static void activate_case(struct qt_backend *be, enum qt_act_kind kind, size_t n, bool gated)
{
    struct op op = {.fn = activate, .ny = n, .nx = {n, gated ? n : 0}, .act = kind};
    const double spread = kind == QT_ACT_CLAMPED ? 10 : 4; /* beyond the limit of 7 */
    float *gate = random_floats(n, spread), *up = random_floats(n, spread - 3);
    float *dy = random_floats(n, 1);
    float *dgate = random_floats(n, 1), *dup = random_floats(n, 1);
    const float *in[INPUTS] = {gate, up}, *got[INPUTS] = {dgate, gated ? dup : NULL};
    for (size_t i = 0; i < n; i++) { /* away from the kinks of relu and of the clamped one */
        gate[i] = fabsf(gate[i]) < 1e-3f || fabsf(gate[i] - 7) < 1e-3f ? 0.5f : gate[i];
        up[i] = fabsf(fabsf(up[i]) - 7) < 1e-3f ? 0.5f : up[i];
    }
    assert_int_equal(be->activate_grad(be, dgate, gated ? dup : NULL, dy, gate, gated ? up : NULL,
                                       kind, n, NULL),
                     QT_OK);
    check("activate", &op, in, dy, got, 1e-5);
    float *g = random_floats(n, 1), *u = random_floats(n, 1); /* in place */
    memcpy(g, gate, n * sizeof *g);
    memcpy(u, up, n * sizeof *u);
    be->activate_grad(be, g, gated ? u : NULL, dy, g, gated ? u : NULL, kind, n, NULL);
    assert_memory_equal(g, dgate, n * sizeof *g);
    if (gated)
        assert_memory_equal(u, dup, n * sizeof *u);
    float *const all[] = {gate, up, dy, dgate, dup, g, u};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        qt_free(all[i]);
}

static void test_activate(void **state)
{
    struct qt_backend *be = open_cpu();
    (void)state;
    for (int kind = QT_ACT_SILU; kind <= QT_ACT_SIGMOID; kind++) {
        activate_case(be, (enum qt_act_kind)kind, 1, true);
        activate_case(be, (enum qt_act_kind)kind, 333, true);
        activate_case(be, (enum qt_act_kind)kind, 333, false);
    }
    activate_case(be, QT_ACT_CLAMPED, 333, true);
    be->close(be);
}

/* ---- attention ------------------------------------------------------------------------------ */

static void attend(double *y, const double *q, const double *k, const double *v, size_t i,
                   size_t head, const struct qt_attention *a)
{
    size_t ldk = a->kv_heads * a->head_dim,
           lo = a->window && i >= a->window ? i + 1 - a->window : 0;
    double sum = a->sinks ? exp((double)a->sinks[head]) : 0;
    for (size_t d = 0; d < a->head_dim; d++)
        y[d] = 0;
    for (size_t j = lo; j <= i; j++) {
        double s = 0, cap = (double)a->softcap;
        for (size_t d = 0; d < a->head_dim; d++)
            s += q[d] * k[j * ldk + d] * (double)a->scale;
        const double bias = a->bias ? (double)a->bias[head * a->bias_step + j] : 0;
        double e = exp((cap > 0 ? cap * tanh(s / cap) : s) + bias);
        sum += e;
        for (size_t d = 0; d < a->head_dim; d++)
            y[d] += e * v[j * ldk + d];
    }
    for (size_t d = 0; d < a->head_dim; d++)
        y[d] /= sum;
}

static void attention(double *y, double *const *x, const struct op *op)
{
    const struct qt_attention *a = &op->a;
    size_t ldq = a->heads * a->head_dim, ldk = a->kv_heads * a->head_dim;
    for (size_t i = 0; i < op->m; i++)
        for (size_t h = 0; h < a->heads; h++) {
            size_t first = i / a->seqlen * a->seqlen, kv = h / (a->heads / a->kv_heads);
            size_t at = i * ldq + h * a->head_dim, at_k = first * ldk + kv * a->head_dim;
            attend(y + at, x[0] + at, x[1] + at_k, x[2] + at_k, i - first, h, a);
        }
}

static void attention_case(struct qt_backend *be, size_t seqs, struct qt_attention a, double spread)
{
    size_t m = seqs * a.seqlen, nq = m * a.heads * a.head_dim, nk = m * a.kv_heads * a.head_dim;
    struct op op = {.fn = attention, .ny = nq, .nx = {nq, nk, nk}, .m = m, .a = a};
    float *x[3] = {random_floats(nq, spread), random_floats(nk, spread), random_floats(nk, 1)};
    float *d[3] = {random_floats(nq, 1), random_floats(nk, 1), random_floats(nk, 1)};
    float *dy = random_floats(nq, 1);
    assert_int_equal(be->attention_grad(be, d[0], d[1], d[2], dy, x[0], x[1], x[2], m, &a, NULL),
                     QT_OK);
    check("attention", &op, (const float *const *)x, dy, (const float *const *)d, 1e-4);
    for (size_t i = 0; i < 3; i++) {
        qt_free(x[i]);
        qt_free(d[i]);
    }
    qt_free(dy);
}

static void test_attention(void **state)
{
    static const size_t lengths[] = {1, 2, 7, 64, 65, 90};
    struct qt_backend *be = open_cpu();
    float *bias = random_floats((size_t)2 * 90, 2);
    (void)state;
    for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++) {
        size_t s = lengths[l];
        attention_case(
            be, 2, (struct qt_attention){s, 2, 1, 4, 0.5f, 0, 0, NULL, NULL, 0, NULL, 0, false}, 1);
        attention_case(
            be, 1, (struct qt_attention){s, 2, 2, 3, 0.6f, 0, 1, NULL, NULL, 0, NULL, 0, false}, 1);
        attention_case(
            be, 1, (struct qt_attention){s, 4, 2, 2, 0.7f, 0, 5, NULL, NULL, 0, NULL, 0, false}, 1);
        attention_case(
            be, 2,
            (struct qt_attention){s, 2, 1, 5, 0.4f, 2.0f, 66, NULL, NULL, 0, bias, 90, false}, 2);
        attention_case(
            be, 2, (struct qt_attention){s, 2, 1, 4, 0.5f, 0, 9, NULL, bias, 0, NULL, 0, false}, 1);
    }
    qt_free(bias);
    be->close(be);
}

/* ---- loss ----------------------------------------------------------------------------------- */

static double capped(double x, float cap)
{
    return cap > 0 ? (double)cap * tanh(x / (double)cap) : x;
}

static double log_sum(const double *x, size_t n, float cap)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += exp(capped(x[i], cap));
    return log(sum);
}

static void loss(double *y, double *const *x, const struct op *op)
{
    for (size_t i = 0; i < op->m; i++) {
        const double *a = x[0] + i * op->n, *b = x[1] + i * op->n;
        double lse = log_sum(a, op->n, op->cap);
        if (!op->nx[1]) {
            y[i] = op->targets[i] == QT_NO_TARGET ? 0 : lse - capped(a[op->targets[i]], op->cap);
            continue;
        }
        double ref = log_sum(b, op->n, op->cap);
        y[i] = 0;
        for (size_t j = 0; j < op->n; j++) {
            double lp = capped(b[j], op->cap) - ref;
            y[i] += exp(lp) * (lp - (capped(a[j], op->cap) - lse));
        }
    }
}

static void loss_case(struct qt_backend *be, size_t vocab, float cap, bool ref)
{
    enum { M = 4 };
    static const float weight = 0.7f, unit[M] = {weight, weight, weight, weight};
    float *a = random_floats(M * vocab, 3), *b = random_floats(M * vocab, 3);
    float *d = random_floats(M * vocab, 1);
    double losses[M], want[M], *in[INPUTS];
    uint32_t targets[M] = {0, QT_NO_TARGET, (uint32_t)vocab - 1, (uint32_t)vocab / 2};
    struct op op = {.fn = loss,
                    .ny = M,
                    .nx = {M * vocab, ref ? M * vocab : 0},
                    .m = M,
                    .n = vocab,
                    .cap = cap,
                    .targets = targets};
    const float *x[INPUTS] = {a, b}, *got[INPUTS] = {d};
    assert_int_equal(
        be->loss_grad(be, losses, d, a, ref ? b : NULL, targets, cap, weight, M, vocab, NULL),
        QT_OK);
    check("loss", &op, x, unit, got, 1e-5);
    for (size_t i = 0; i < 2; i++) {
        in[i] = calloc(M * vocab, sizeof **in);
        for (size_t j = 0; j < M * vocab; j++)
            in[i][j] = (double)x[i][j];
    }
    loss(want, in, &op);
    for (size_t i = 0; i < M; i++)
        assert_true(fabs(losses[i] - want[i]) < 1e-5);
    assert_int_equal(
        be->loss_grad(be, losses, a, a, ref ? b : NULL, targets, cap, weight, M, vocab, NULL),
        QT_OK);
    assert_memory_equal(a, d, M * vocab * sizeof *a);
    free(in[0]);
    free(in[1]);
    qt_free(a);
    qt_free(b);
    qt_free(d);
}

static void test_loss(void **state)
{
    static const size_t vocabs[] = {2, 3, 17, 300};
    struct qt_backend *be = open_cpu();
    uint32_t beyond = 3;
    float x[3] = {1, 2, 3};
    double l;
    struct qt_err err = {0};
    (void)state;
    for (size_t i = 0; i < sizeof vocabs / sizeof *vocabs; i++)
        for (int ref = 0; ref < 2; ref++) {
            loss_case(be, vocabs[i], 0, ref);
            loss_case(be, vocabs[i], 2.5f, ref);
        }
    assert_int_equal(be->loss_grad(be, &l, x, x, NULL, &beyond, 0, 1, 1, 3, &err), QT_E_INPUT);
    be->close(be);
}

/* ---- squared error -------------------------------------------------------------------------- */

static void test_square(void **state)
{
    static const size_t counts[] = {1, 15, 17, 300, (1 << 15) + 5};
    struct qt_backend *be = open_cpu();
    (void)state;
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        size_t n = counts[c];
        float *y = random_floats(n, 1), *t = random_floats(n, 1), *d = random_floats(n, 1);
        double sum, want = 0;
        assert_int_equal(be->square_grad(be, &sum, d, y, t, 0.25f, n, NULL), QT_OK);
        for (size_t i = 0; i < n; i++) {
            double e = (double)y[i] - (double)t[i];
            want += e * e;
            assert_true(fabs((double)d[i] - 0.5 * e) < 1e-6);
        }
        assert_true(fabs(sum - want) <= 1e-6 * want);
        assert_int_equal(be->square_grad(be, &sum, y, y, t, 0.25f, n, NULL), QT_OK);
        assert_memory_equal(y, d, n * sizeof *y);
        qt_free(y);
        qt_free(t);
        qt_free(d);
    }
    be->close(be);
}

/* ---- threads, memory ------------------------------------------------------------------------ */

enum { M = 600, N = 260, K = 192, SEQ = 150 };

static void all_operations(struct qt_backend *be, float *out, float *const *in)
{
    struct qt_attention a = {SEQ, 6, 2, 32, 0.2f, 20.0f, 100, NULL, NULL, 0, NULL, 0, false};
    float *dx = out, *dw = dx + M * K, *dn = dw + N * K, *dq = dn + K, *dk = dq + M * K;
    float *dv = dk + M * 64, *dl = dv + M * 64;
    double losses[M], sum;
    uint32_t targets[M];
    for (size_t i = 0; i < M; i++)
        targets[i] = (uint32_t)(i % N);
    be->linear_grad_x(be, dx, in[0], in[1], false, M, N, K, NULL);
    be->linear_grad_w(be, dw, in[0], in[2], true, M, N, K, NULL);
    be->norm_grad(be, dx, dn, dx, in[2], in[1], QT_NORM_LAYER, 1e-5f, M, K, NULL);
    be->attention_grad(be, dq, dk, dv, dx, in[2], in[0], in[1], M, &a, NULL);
    be->activate_grad(be, dx, dq, dx, in[2], dq, QT_ACT_SILU, M * K, NULL);
    be->loss_grad(be, losses, dl, in[0], NULL, targets, 15.0f, 1, M, N, NULL);
    be->square_grad(be, &sum, dx, dx, in[2], 1, M * K, NULL);
    dl[0] = (float)(sum + losses[M - 1]);
}

static void test_threads(void **state)
{
    static const int threads[] = {1, 2, 4};
    const size_t size = M * K * 2 + N * K + K + M * 128 + M * N;
    struct qt_backend *be = open_cpu();
    float *in[3] = {random_floats(M * N, 1), random_floats(M * N, 1), random_floats(M * N, 1)};
    float *out[3];
    (void)state;
    for (size_t t = 0; t < 3; t++) {
        out[t] = random_floats(size, 0);
        qt_threads_set(threads[t]);
        all_operations(be, out[t], in);
    }
    qt_threads_set(0);
    assert_memory_equal(out[0], out[1], size * sizeof **out);
    assert_memory_equal(out[0], out[2], size * sizeof **out);
    for (size_t t = 0; t < 3; t++) {
        qt_free(in[t]);
        qt_free(out[t]);
    }
    be->close(be);
}

static void test_out_of_memory(void **state)
{
    struct qt_backend *be = open_cpu();
    struct qt_attention a = {8, 1, 1, 4, 1, 0, 0, NULL, NULL, 0, NULL, 0, false};
    float *x = random_floats(32, 1), *y = random_floats(32, 1);
    (void)state;
    qt_mem_fail_after(0);
    assert_int_equal(be->attention_grad(be, y, y, y, x, x, x, x, 8, &a, NULL), QT_E_RESOURCE);
    assert_int_equal(be->norm_grad(be, y, y, x, x, x, QT_NORM_RMS, 1e-5f, 8, 4, NULL),
                     QT_E_RESOURCE);
    qt_mem_fail_after(-1);
    qt_free(x);
    qt_free(y);
    be->close(be);
}

int main(void)
{
    seed_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_linear),        cmocka_unit_test(test_norm),
        cmocka_unit_test(test_rope),          cmocka_unit_test(test_activate),
        cmocka_unit_test(test_attention),     cmocka_unit_test(test_loss),
        cmocka_unit_test(test_square),        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
