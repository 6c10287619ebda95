/*
 * The CPU backend against naive double-precision loops, on fresh random data and edge shapes.
 * Results for 1, 2 and 4 threads must be equal bit by bit. The seed is printed; set QT_SEED to
 * repeat a run.
 */
#include "backend_fixture.h"
#include "kernels/cpu/math.h"
#include "tests/worse.h"

static void expect_close(const float *got, const double *want, size_t n, double tolerance,
                         const char *what)
{
    for (size_t i = 0; i < n; i++)
        if (!(fabs((double)got[i] - want[i]) <= tolerance))
            fail_msg("%s: [%zu] is %.9g, expected %.9g", what, i, (double)got[i], want[i]);
}

/* ---- elementary functions ------------------------------------------------------------------- */

/* Returns the error in units in the last place of the exact value. */
static double ulps(float got, double want)
{
    int e;
    frexp(want, &e);
    double ulp = ldexp(1.0, (e < -125 ? -125 : e) - 24);
    return fabs((double)got - want) / ulp;
}

static void test_exp_all_floats(void **state)
{
    double worst = 0;
    (void)state;
    for (uint64_t u = 0; u < 1ull << 32; u += 61) { /* 61 is odd: every exponent, all low bits */
        float x = qt_bits_f32((uint32_t)u);
        if (!(x > -103.0f && x < 88.72f))
            continue;
        double d = ulps(cpu_exp(x), exp((double)x));
        worst = worse(worst, d);
    }
    print_message("exp: at most %.3f ulp\n", worst);
    assert_true(worst < 1.1);
}

static void test_exp_special(void **state)
{
    (void)state;
    assert_true(cpu_exp(0.0f) == 1.0f && cpu_exp(-0.0f) == 1.0f);
    assert_true(cpu_exp(-105.0f) == 0.0f && cpu_exp(-INFINITY) == 0.0f && cpu_exp(-1e30f) == 0.0f);
    assert_true(isinf(cpu_exp(88.75f)) && isinf(cpu_exp(INFINITY)) && isinf(cpu_exp(1e30f)));
    assert_true(isnan(cpu_exp(NAN)));
}

static void test_tanh_erf(void **state)
{
    double worst_tanh = 0, worst_erf = 0;
    (void)state;
    for (uint64_t u = 0; u < 1ull << 32; u += 127) {
        float x = qt_bits_f32((uint32_t)u);
        if (!(fabsf(x) < 100.0f && fabsf(x) > 1e-30f))
            continue;
        double t = ulps(cpu_tanh(x), tanh((double)x));
        double e = fabs((double)cpu_erf(x) - erf((double)x));
        worst_tanh = worse(worst_tanh, t);
        worst_erf = worse(worst_erf, e);
    }
    print_message("tanh: at most %.3f ulp; erf: at most %.2e\n", worst_tanh, worst_erf);
    assert_true(worst_tanh < 2.0);
    assert_true(worst_erf < 1.5e-7);
    assert_true(cpu_tanh(INFINITY) == 1.0f && cpu_tanh(-INFINITY) == -1.0f && isnan(cpu_tanh(NAN)));
    assert_true(cpu_erf(INFINITY) == 1.0f && cpu_erf(-INFINITY) == -1.0f && isnan(cpu_erf(NAN)));
}

/* ---- linear --------------------------------------------------------------------------------- */

static const size_t edges[] = {1, 2, 7, 63, 64, 65, 129, 513};
enum { EDGES = sizeof edges / sizeof *edges };

static void linear_case(struct qt_backend *be, size_t m, size_t n, size_t k, bool biased)
{
    float *x = random_floats(m * k, 1), *w = random_floats(n * k, 1), *b = random_floats(n, 1);
    float *y = random_floats(m * n, 1);
    double *want = calloc(m * n, sizeof *want);
    assert_non_null(want);
    for (size_t i = 0; i < m; i++)
        for (size_t j = 0; j < n; j++) {
            double sum = biased ? (double)b[j] : 0;
            for (size_t l = 0; l < k; l++)
                sum += (double)x[i * k + l] * (double)w[j * k + l];
            want[i * n + j] = sum;
        }
    assert_int_equal(be->linear(be, y, x, w, biased ? b : NULL, m, n, k, NULL), QT_OK);
    expect_close(y, want, m * n, 1e-6 * sqrt((double)k + 1) * 4, "linear");
    free(want);
    qt_free(x);
    qt_free(w);
    qt_free(b);
    qt_free(y);
}

static void test_linear(void **state)
{
    struct qt_backend *be = open_cpu();
    (void)state;
    for (size_t i = 0; i < EDGES; i++)
        for (size_t j = 0; j < EDGES; j++)
            linear_case(be, edges[i], edges[j], edges[(i * 3 + j) % 7], (i + j) % 2);
    linear_case(be, 1, 1, 1, true);
    linear_case(be, 3, 5, 4000, false);
    be->close(be);
}

static void test_linear_too_wide(void **state)
{
    struct qt_backend *be = open_cpu();
    struct qt_err err = {0};
    float x = 0;
    (void)state;
    assert_int_equal(be->linear(be, &x, &x, &x, NULL, 1, (size_t)1 << 31, 1, &err),
                     QT_E_UNSUPPORTED);
    assert_non_null(strstr(err.reason, "2147483648"));
    be->close(be);
}

/* ---- norm, rope, elementwise ---------------------------------------------------------------- */

static void norm_case(struct qt_backend *be, enum qt_norm_kind kind, size_t m, size_t n,
                      bool biased)
{
    float *x = random_floats(m * n, 3), *w = random_floats(n, 1), *b = random_floats(n, 1);
    double *want = calloc(m * n, sizeof *want);
    assert_non_null(want);
    for (size_t i = 0; i < m; i++) {
        double mean = 0, var = 0;
        for (size_t j = 0; kind == QT_NORM_LAYER && j < n; j++)
            mean += (double)x[i * n + j] / (double)n;
        for (size_t j = 0; j < n; j++)
            var += ((double)x[i * n + j] - mean) * ((double)x[i * n + j] - mean) / (double)n;
        for (size_t j = 0; j < n; j++)
            want[i * n + j] = ((double)x[i * n + j] - mean) / sqrt(var + 1e-5) * (double)w[j] +
                              (biased ? (double)b[j] : 0);
    }
    assert_int_equal(be->norm(be, x, x, w, biased ? b : NULL, kind, 1e-5f, m, n, NULL), QT_OK);
    expect_close(x, want, m * n, 1e-5, "norm in place");
    free(want);
    qt_free(x);
    qt_free(w);
    qt_free(b);
}

static void test_norm(void **state)
{
    struct qt_backend *be = open_cpu();
    (void)state;
    for (size_t i = 0; i < EDGES; i++)
        for (size_t j = 0; j < EDGES; j++) {
            norm_case(be, QT_NORM_RMS, edges[i], edges[j], false);
            norm_case(be, QT_NORM_LAYER, edges[i], edges[j], false);
            norm_case(be, QT_NORM_LAYER, edges[i], edges[j], true);
        }
    norm_case(be, QT_NORM_RMS, 2, 40000, false); /* a row larger than an item */
    be->close(be);
}

static void rope_case(struct qt_backend *be, size_t seqs, size_t seqlen, size_t heads, size_t dim,
                      size_t rot, bool interleaved)
{
    size_t m = seqs * seqlen, count = m * heads * dim, half = rot / 2;
    const size_t step = interleaved ? 2 : 1, offset = interleaved ? 1 : half;
    float *x = random_floats(count, 1), *c = random_floats(seqlen * half, 1);
    float *s = random_floats(seqlen * half, 1);
    double *want = calloc(count, sizeof *want);
    assert_non_null(want);
    for (size_t i = 0; i < count; i++) {
        const size_t d = i % dim, pos = i / dim / heads % seqlen;
        const bool low = interleaved ? d % 2 == 0 : d < half;
        const size_t p = pos * half + (low ? d : d - offset) / step;
        if (d >= rot)
            want[i] = (double)x[i];
        else if (low)
            want[i] = (double)x[i] * (double)c[p] - (double)x[i + offset] * (double)s[p];
        else
            want[i] = (double)x[i] * (double)c[p] + (double)x[i - offset] * (double)s[p];
    }
    assert_int_equal(be->rope(be, x, c, s, m, seqlen, heads, dim, rot, interleaved, NULL), QT_OK);
    expect_close(x, want, count, 1e-6, "rope");
    free(want);
    qt_free(x);
    qt_free(c);
    qt_free(s);
}

static void test_rope(void **state)
{
    struct qt_backend *be = open_cpu();
    (void)state;
    for (int interleaved = 0; interleaved < 2; interleaved++) {
        rope_case(be, 1, 1, 1, 2, 2, interleaved);
        rope_case(be, 2, 7, 3, 10, 10, interleaved);
        rope_case(be, 3, 65, 2, 64, 64, interleaved);
        rope_case(be, 2, 33, 4, 20, 8, interleaved);
        rope_case(be, 300, 3, 2, 64, 64, interleaved);
    }
    be->close(be);
}

static double act_reference(enum qt_act_kind kind, double x)
{
    switch (kind) {
    case QT_ACT_SILU:
        return x / (1 + exp(-x));
    case QT_ACT_GELU_TANH:
        return 0.5 * x * (1 + tanh(sqrt(2 / acos(-1)) * (x + 0.044715 * x * x * x)));
    case QT_ACT_GELU:
        return 0.5 * x * (1 + erf(x / sqrt(2)));
    case QT_ACT_RELU2:
        return x < 0 ? 0 : x * x;
    case QT_ACT_NONE:
        return x;
    case QT_ACT_SIGMOID:
        return 1 / (1 + exp(-x));
    case QT_ACT_CLAMPED:
        return fmin(x, 7) / (1 + exp(-1.702 * fmin(x, 7)));
    default:
        return x < 0 ? 0 : x;
    }
}

static void test_activate(void **state)
{
    static const size_t counts[] = {1, 7, 63, 64, 65, 32767, 32769, 100000};
    struct qt_backend *be = open_cpu();
    (void)state;
    for (int kind = QT_ACT_SILU; kind <= QT_ACT_CLAMPED; kind++)
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
            size_t n = counts[c];
            const double least = kind == QT_ACT_RELU2 ? 5e-5 : 5e-6; /* values up to 144 */
            float *gate = random_floats(n, 12), *up = random_floats(n, 1);
            float *y = copy_floats(gate, n);
            double *want = calloc(n, sizeof *want);
            assert_non_null(want);
            for (size_t i = 0; i < n; i++)
                want[i] = act_reference((enum qt_act_kind)kind, (double)gate[i]);
            if (kind != QT_ACT_CLAMPED) {
                be->activate(be, y, y, NULL, (enum qt_act_kind)kind, n, NULL);
                expect_close(y, want, n, least, "activation");
            }
            for (size_t i = 0; i < n; i++)
                want[i] *= (double)up[i] + (kind == QT_ACT_CLAMPED);
            be->activate(be, y, gate, up, (enum qt_act_kind)kind, n, NULL);
            expect_close(y, want, n, 2 * least, "gated activation");
            free(want);
            qt_free(gate);
            qt_free(up);
            qt_free(y);
        }
    be->close(be);
}

static void test_rows(void **state)
{
    enum { M = 1030, ALL = 3 * M };
    static uint32_t rows[M];
    static float factor[M];
    struct qt_backend *be = open_cpu();
    (void)state;
    for (uint32_t i = 0; i < M; i++) {
        rows[i] = (M - 1 - i) * 3 + (uint32_t)(3 * uniform());
        factor[i] = (float)(2 * uniform() - 1);
    }
    for (int given = 0; given < 4; given++)
        for (size_t n = 1; n < 300; n = 5 * n + 2) {
            const uint32_t *r = given & 1 ? rows : NULL;
            const float *f = given & 2 ? factor : NULL;
            float *all = random_floats(ALL * n, 1), *some = random_floats(M * n, 1);
            float *sum = copy_floats(all, ALL * n), *taken = random_floats(M * n, 1);
            float *kept = copy_floats(some, M * n);
            assert_int_equal(be->scatter_rows(be, sum, some, r, f, M, n, NULL), QT_OK);
            assert_int_equal(be->gather_rows(be, taken, all, r, f, M, n, NULL), QT_OK);
            for (size_t e = 0; e < M * n; e++) {
                size_t i = e / n, other = (r ? r[i] : i) * n + e % n;
                float by = f ? f[i] : 1, x = some[e] * by;
                assert_true(taken[e] == all[other] * by);
                assert_true(sum[other] == all[other] + x);
                sum[other] = all[other];
            }
            assert_memory_equal(sum, all, ALL * n * sizeof *all); /* other rows are unchanged */
            assert_int_equal(be->gather_rows(be, some, some, NULL, f, M, n, NULL), QT_OK);
            for (size_t e = 0; e < M * n; e++)
                assert_true(some[e] == kept[e] * (f ? f[e / n] : 1));
            qt_free(all);
            qt_free(kept);
            qt_free(some);
            qt_free(sum);
            qt_free(taken);
        }
    be->close(be);
}

static void test_columns(void **state)
{
    enum { M = 700, LDX = 11, LDY = 9 };
    struct qt_backend *be = open_cpu();
    (void)state;
    for (size_t n = 0; n <= LDY - 2; n++) {
        float *x = random_floats(M * LDX, 1), *y = random_floats(M * LDY, 1);
        float *old = copy_floats(y, M * LDY);
        assert_int_equal(be->copy_columns(be, y + 2, LDY, x + 3, LDX, n, M - 1, NULL), QT_OK);
        for (size_t e = 0; e < M * LDY; e++) {
            const size_t i = e / LDY, j = e % LDY;
            const bool copied = i < M - 1 && j >= 2 && j < 2 + n;
            assert_true(y[e] == (copied ? x[i * LDX + 3 + j - 2] : old[e]));
        }
        qt_free(x);
        qt_free(y);
        qt_free(old);
    }
    be->close(be);
}

/* Queries of zeros: without a sink all visible keys have the same probability. */
static void test_sinks(void **state)
{
    enum { SEQ = 70, HEADS = 4, KV = 2, DIM = 3, M = 2 * SEQ };
    struct qt_backend *be = open_cpu();
    const float sinks[HEADS] = {-200, 0.5f, 2, 90};
    float *q = random_floats(M * HEADS * DIM, 0), *k = random_floats(M * KV * DIM, 1);
    float *v = random_floats(M * KV * DIM, 1), *y = random_floats(M * HEADS * DIM, 1);
    (void)state;
    for (size_t window = 0; window < 12; window += 11) {
        const struct qt_attention a = {.seqlen = SEQ,
                                       .heads = HEADS,
                                       .kv_heads = KV,
                                       .head_dim = DIM,
                                       .scale = 1,
                                       .sinks = sinks,
                                       .window = window};
        assert_int_equal(be->attention(be, y, q, k, v, M, &a, NULL), QT_OK);
        for (size_t e = 0; e < M * HEADS * DIM; e++) {
            const size_t token = e / (HEADS * DIM), head = e / DIM % HEADS, i = token % SEQ;
            const size_t n = window && i + 1 > window ? window : i + 1;
            double want = 0;
            for (size_t j = 0; j < n; j++)
                want += (double)v[((token - j) * KV + head / 2) * DIM + e % DIM];
            want /= (double)n + exp((double)sinks[head]);
            assert_true(fabs((double)y[e] - want) < 1e-6);
        }
    }
    qt_free(q);
    qt_free(k);
    qt_free(v);
    qt_free(y);
    be->close(be);
}

/* Queries of zeros: probabilities are proportional to the exponentials of the biases. */
static void test_bias(void **state)
{
    enum { SEQ = 70, PAST = 9, ALL = SEQ + PAST, HEADS = 4, KV = 2, DIM = 3, STEP = 81 };
    struct qt_backend *be = open_cpu();
    float *q = random_floats((size_t)2 * SEQ * HEADS * DIM, 0),
          *bias = random_floats(HEADS * STEP, 2);
    float *k = random_floats((size_t)2 * ALL * KV * DIM, 1);
    float *v = random_floats((size_t)2 * ALL * KV * DIM, 1);
    float *y = random_floats((size_t)2 * SEQ * HEADS * DIM, 1);
    (void)state;
    for (size_t window = 0; window < 12; window += 11) {
        const struct qt_attention a = {.seqlen = SEQ,
                                       .heads = HEADS,
                                       .kv_heads = KV,
                                       .head_dim = DIM,
                                       .scale = 1,
                                       .window = window,
                                       .past = PAST,
                                       .bias = bias,
                                       .bias_step = STEP};
        assert_int_equal(be->attention(be, y, q, k, v, (size_t)2 * SEQ, &a, NULL), QT_OK);
        for (size_t e = 0; e < (size_t)2 * SEQ * HEADS * DIM; e++) {
            const size_t token = e / (HEADS * DIM), head = e / DIM % HEADS;
            const size_t last = PAST + token % SEQ, first = token / SEQ * ALL;
            double want = 0, sum = 0;
            for (size_t j = window && last >= window ? last + 1 - window : 0; j <= last; j++) {
                const double p = exp((double)bias[head * STEP + j]);
                want += p * (double)v[((first + j) * KV + head / 2) * DIM + e % DIM];
                sum += p;
            }
            assert_true(fabs((double)y[e] - want / sum) < 1e-6);
        }
    }
    qt_free(q);
    qt_free(k);
    qt_free(v);
    qt_free(y);
    qt_free(bias);
    be->close(be);
}

static void test_clip(void **state)
{
    enum { N = 5000 };
    struct qt_backend *be = open_cpu();
    float *y = random_floats(N, 1), *x = copy_floats(y, N);
    (void)state;
    y[3] = x[3] = NAN;
    assert_int_equal(be->clip(be, y, 0.25f, N, NULL), QT_OK);
    for (size_t i = 0; i < N; i++)
        assert_true(i == 3 ? isnan(y[i]) : y[i] == fmaxf(-0.25f, fminf(0.25f, x[i])));
    qt_free(x);
    qt_free(y);
    be->close(be);
}

/* ---- recurrences ---------------------------------------------------------------------------- */

static void test_convolve(void **state)
{
    enum { SEQ = 9, M = 3 * SEQ, N = 5 };
    struct qt_backend *be = open_cpu();
    (void)state;
    for (size_t kernel = 1; kernel < 12; kernel++) {
        float *x = random_floats(M * N, 1), *w = random_floats(N * kernel, 1);
        float *y = random_floats(M * N, 1), *bias = random_floats(N, 1);
        assert_int_equal(
            be->convolve(be, y, x, w, kernel % 2 ? bias : NULL, M, SEQ, N, kernel, NULL), QT_OK);
        for (size_t e = 0; e < M * N; e++) {
            const size_t t = e / N, c = e % N;
            double want = kernel % 2 ? (double)bias[c] : 0;
            for (size_t back = 0; back < kernel && back <= t % SEQ; back++)
                want += (double)w[c * kernel + kernel - 1 - back] * (double)x[(t - back) * N + c];
            assert_true(fabs((double)y[e] - want) < 1e-5);
        }
        qt_free(x);
        qt_free(w);
        qt_free(y);
        qt_free(bias);
    }
    be->close(be);
}

/* The same sequences token by token, with the states in between, give the same bits. */
static void check_delta_state(struct qt_backend *be, const float *y, const float *qkv,
                              const float *a, const float *b, size_t seqs,
                              const struct qt_delta *whole)
{
    struct qt_delta d = *whole;
    const size_t values = d.value_heads * d.value_dim, states = values * d.key_dim;
    const size_t width = 2 * d.key_heads * d.key_dim + values;
    float *got = random_floats(values, 1);
    d.seqlen = 1;
    d.state = random_floats(states, 1);
    for (size_t t = 0; t < seqs * whole->seqlen; t++) {
        if (t % whole->seqlen == 0)
            memset(d.state, 0, states * sizeof *d.state);
        assert_int_equal(be->delta_rule(be, got, qkv + t * width, a + t * d.value_heads,
                                        b + t * d.value_heads, 1, &d, NULL),
                         QT_OK);
        assert_memory_equal(got, y + t * values, values * sizeof *got);
    }
    qt_free(d.state);
    qt_free(got);
}

/* The definition, with a state per value head. */
static void test_delta_rule(void **state)
{
    enum { SEQ = 33, SEQS = 2, M = SEQ * SEQS, KH = 2, VH = 6, KD = 5, VD = 3 };
    enum { WIDTH = 2 * KH * KD + VH * VD };
    struct qt_backend *be = open_cpu();
    float *qkv = random_floats(M * WIDTH, 1), *a = random_floats(M * VH, 2);
    float *b = random_floats(M * VH, 2), *log = random_floats(VH, 1), *dt = random_floats(VH, 1);
    float *y = random_floats(M * VH * VD, 1);
    const struct qt_delta d = {SEQ, KH, VH, KD, VD, log, dt, NULL};
    (void)state;
    assert_int_equal(be->delta_rule(be, y, qkv, a, b, M, &d, NULL), QT_OK);
    for (size_t head = 0; head < SEQS * VH; head++) {
        const size_t h = head % VH, first = head / VH * SEQ;
        double s[KD][VD] = {{0}};
        for (size_t t = first; t < first + SEQ; t++) {
            const float *row = qkv + t * WIDTH, *q = row + h / 3 * KD, *k = q + KH * KD;
            const float *v = row + 2 * KH * KD + h * VD;
            const double keep =
                exp(-exp((double)log[h]) * log1p(exp((double)a[t * VH + h] + (double)dt[h])));
            const double rate = 1 / (1 + exp(-(double)b[t * VH + h]));
            double qq = 0, kk = 0;
            for (size_t i = 0; i < KD; i++) {
                qq += (double)q[i] * (double)q[i];
                kk += (double)k[i] * (double)k[i];
            }
            for (size_t j = 0; j < VD; j++) {
                double seen = 0, want = 0;
                for (size_t i = 0; i < KD; i++)
                    seen += (s[i][j] *= keep) * (double)k[i] / sqrt(kk);
                for (size_t i = 0; i < KD; i++) {
                    s[i][j] += (double)k[i] / sqrt(kk) * rate * ((double)v[j] - seen);
                    want += s[i][j] * (double)q[i] / sqrt(qq * KD);
                }
                assert_true(fabs((double)y[(t * VH + h) * VD + j] - want) < 1e-4);
            }
        }
    }
    check_delta_state(be, y, qkv, a, b, SEQS, &d);
    float *const all[] = {qkv, a, b, log, dt, y};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        qt_free(all[i]);
    be->close(be);
}

/* The definition; then the second half of the sequences with the states after the first half. */
static void test_state_space(void **state)
{
    enum { HALF = 9, SEQ = 2 * HALF, SEQS = 2, M = SEQ * SEQS, H = 6, G = 2, D = 3, N = 5 };
    enum { WIDTH = H * D + 2 * G * N };
    struct qt_backend *be = open_cpu();
    float *xbc = random_floats(M * WIDTH, 1), *r = random_floats(M * H, 3);
    float *log = random_floats(H, 1), *dt = random_floats(H, 1), *d = random_floats(H, 1);
    float *y = random_floats(M * H * D, 1), *half = random_floats(HALF * H * D, 1);
    struct qt_state_space model = {SEQ, H, G, D, N, log, dt, d, 0.25f, 1.5f, NULL};
    (void)state;
    assert_int_equal(be->state_space(be, y, xbc, r, M, &model, NULL), QT_OK);
    for (size_t head = 0; head < SEQS * H; head++) {
        const size_t h = head % H, first = head / H * SEQ;
        double s[N][D] = {{0}};
        for (size_t t = first; t < first + SEQ; t++) {
            const float *row = xbc + t * WIDTH, *b = row + H * D + h / (H / G) * N, *c = b + G * N;
            double step = log1p(exp((double)r[t * H + h] + (double)dt[h]));
            step = step < 0.25 ? 0.25 : step > 1.5 ? 1.5 : step;
            for (size_t j = 0; j < D; j++) {
                const double x = (double)row[h * D + j];
                double want = (double)d[h] * x;
                for (size_t i = 0; i < N; i++) {
                    s[i][j] = s[i][j] * exp(-exp((double)log[h]) * step) + step * (double)b[i] * x;
                    want += s[i][j] * (double)c[i];
                }
                assert_true(fabs((double)y[(t * H + h) * D + j] - want) < 1e-4);
            }
        }
    }
    model.seqlen = HALF;
    model.states = calloc(H * N * D, sizeof *model.states);
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(
            be->state_space(be, half, xbc + i * HALF * WIDTH, r + i * HALF * H, HALF, &model, NULL),
            QT_OK);
        assert_memory_equal(half, y + i * HALF * H * D, HALF * H * D * sizeof *half);
    }
    free(model.states);
    qt_free(xbc), qt_free(r), qt_free(log), qt_free(dt), qt_free(d), qt_free(y), qt_free(half);
    be->close(be);
}

static void test_add_scale_copy(void **state)
{
    struct qt_backend *be = open_cpu();
    size_t n = 70001;
    float *x = random_floats(n, 1), *y = random_floats(n, 1), *z = copy_floats(y, n);
    void *p;
    (void)state;
    be->add(be, z, x, n, NULL);
    be->scale(be, z, 3.0f, n, NULL);
    for (size_t i = 0; i < n; i++)
        assert_true(z[i] == (y[i] + x[i]) * 3.0f);
    assert_int_equal(be->alloc(be, &p, n * sizeof *x, NULL), QT_OK);
    be->upload(be, p, z, n * sizeof *x, NULL);
    be->download(be, x, p, n * sizeof *x, NULL);
    assert_memory_equal(x, z, n * sizeof *x);
    be->free(be, p);
    be->free(be, NULL);
    qt_free(x);
    qt_free(y);
    qt_free(z);
    be->close(be);
}

/* ---- attention ------------------------------------------------------------------------------ */

/* rows[seqs][n][width] = the last n rows of each sequence of x[seqs][seqlen][width]. */
static float *last_rows(const float *x, size_t seqs, size_t seqlen, size_t n, size_t width)
{
    float *rows = random_floats(seqs * n * width, 1);
    for (size_t s = 0; s < seqs; s++)
        memcpy(rows + s * n * width, x + (s * seqlen + seqlen - n) * width,
               n * width * sizeof *rows);
    return rows;
}

/* The last queries alone, with the keys and values of all positions: rows of `whole`, the output of
 * all queries. */
static void check_last_queries(struct qt_backend *be, const float *whole, const float *q,
                               const float *k, const float *v, size_t seqs, struct qt_attention a)
{
    const size_t all = a.seqlen, width = a.heads * a.head_dim;
    const size_t counts[] = {1, all / 2, all - 1};
    for (size_t i = 0; i < 3; i++) {
        const size_t n = counts[i];
        if (n == 0)
            continue;
        a.seqlen = n;
        a.past = all - n;
        float *some = last_rows(q, seqs, all, n, width), *y = random_floats(seqs * n * width, 1);
        float *want = last_rows(whole, seqs, all, n, width);
        assert_int_equal(be->attention(be, y, some, k, v, seqs * n, &a, NULL), QT_OK);
        for (size_t j = 0; j < seqs * n * width; j++)
            assert_true(fabsf(y[j] - want[j]) <= 2e-5f * (1 + fabsf(want[j])));
        qt_free(some);
        qt_free(want);
        qt_free(y);
    }
}

static void attention_case(struct qt_backend *be, size_t seqs, struct qt_attention a, double spread)
{
    size_t m = seqs * a.seqlen, ldq = a.heads * a.head_dim, ldk = a.kv_heads * a.head_dim;
    float *q = random_floats(m * ldq, spread), *k = random_floats(m * ldk, spread);
    float *v = random_floats(m * ldk, 1), *y = random_floats(m * ldq, 1);
    double *want = calloc(m * ldq, sizeof *want);
    assert_non_null(want);
    attention_reference(want, q, k, v, m, &a);
    assert_int_equal(be->attention(be, y, q, k, v, m, &a, NULL), QT_OK);
    expect_close(y, want, m * ldq, 2e-5, "attention");
    if (!a.both_ways)
        check_last_queries(be, y, q, k, v, seqs, a);
    free(want);
    qt_free(q);
    qt_free(k);
    qt_free(v);
    qt_free(y);
}

/* A query of a 4-bit cache sees the groups before its own as they are at the end, and its own group
 * with the range up to it. */
static void test_attention_with_cached_keys(void **state)
{
    static const size_t lengths[] = {1, 2, 64, 65, 66, 129, 200};
    struct qt_backend *be = open_cpu();
    (void)state;
    for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++)
        for (int round = 0; round < 3; round++) {
            struct qt_attention a = {lengths[l], 4,    2, 16,   0.25f, 0,    0,
                                     NULL,       NULL, 0, NULL, 0,     false};
            if (round == 1)
                a = (struct qt_attention){lengths[l], 3,    1, 7,    0.3f, 5,    70,
                                          NULL,       NULL, 0, NULL, 0,    false};
            if (round == 2)
                a = (struct qt_attention){lengths[l], 2,    2, 64,   0.125f, 0,    10,
                                          NULL,       NULL, 0, NULL, 0,      false};
            size_t m = 2 * a.seqlen, ldq = a.heads * a.head_dim, ldk = a.kv_heads * a.head_dim;
            float *q = random_floats(m * ldq, 1), *v = random_floats(m * ldk, 1);
            float *exact = random_exact_keys(m, ldk, 1), *y = random_floats(m * ldq, 1);
            float *k = cached_keys(exact, m, ldk, a.seqlen);
            double *want = calloc(m * ldq, sizeof *want);
            assert_non_null(want);
            a.exact_keys = exact;
            attention_reference(want, q, k, v, m, &a);
            assert_int_equal(be->attention(be, y, q, k, v, m, &a, NULL), QT_OK);
            expect_close(y, want, m * ldq, 2e-5, "attention with cached keys");
            check_last_queries(be, y, q, k, v, 2, a);
            free(want);
            float *all[] = {q, k, v, y, exact};
            for (size_t i = 0; i < 5; i++)
                qt_free(all[i]);
        }
    be->close(be);
}

static void test_attention(void **state)
{
    static const size_t lengths[] = {1, 2, 7, 63, 64, 65, 127, 130, 200};
    struct qt_backend *be = open_cpu();
    (void)state;
    for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++) {
        size_t s = lengths[l];
        attention_case(
            be, 2, (struct qt_attention){s, 4, 2, 16, 0.25f, 0, 0, NULL, NULL, 0, NULL, 0, false},
            1);
        attention_case(
            be, 1, (struct qt_attention){s, 3, 3, 7, 0.3f, 0, 1, NULL, NULL, 0, NULL, 0, false}, 1);
        attention_case(
            be, 1, (struct qt_attention){s, 6, 2, 64, 0.125f, 0, 64, NULL, NULL, 0, NULL, 0, false},
            1);
        attention_case(
            be, 3,
            (struct qt_attention){s, 2, 1, 33, 0.2f, 5.0f, 65, NULL, NULL, 0, NULL, 0, false}, 2);
        attention_case(
            be, 1,
            (struct qt_attention){s, 4, 1, 1, 1.0f, 50.0f, 10, NULL, NULL, 0, NULL, 0, false}, 1);
        attention_case(
            be, 1, (struct qt_attention){s, 1, 1, 8, 1.0f, 0, 1000, NULL, NULL, 0, NULL, 0, false},
            3);
        const size_t windows[] = {0, 1, 10, 64, 65, 150};
        for (size_t w = 0; w < sizeof windows / sizeof *windows; w++)
            attention_case(be, 2,
                           (struct qt_attention){.seqlen = s,
                                                 .heads = 4,
                                                 .kv_heads = 2,
                                                 .head_dim = 5,
                                                 .scale = 0.4f,
                                                 .window = windows[w],
                                                 .both_ways = true},
                           1);
    }
    be->close(be);
}

/* ---- score ---------------------------------------------------------------------------------- */

static double capped(float x, float cap)
{
    return cap > 0 ? (double)cap * tanh((double)x / (double)cap) : (double)x;
}

static double log_sum_exp(const float *x, size_t n, float cap)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += exp(capped(x[i], cap) - 40);
    return log(sum) + 40;
}

static void score_case(struct qt_backend *be, size_t vocab, float cap, double spread,
                       double difference)
{
    enum { M = 9 };
    float *a = random_floats(M * vocab, spread), *b = copy_floats(a, M * vocab);
    float *noise = random_floats(M * vocab, difference);
    uint32_t targets[M];
    struct qt_score got[M];
    for (size_t i = 0; i < M * vocab; i++)
        b[i] += noise[i];
    for (size_t i = 0; i < M; i++)
        targets[i] = (uint32_t)(uniform() * (double)vocab);
    assert_int_equal(be->score(be, got, a, b, targets, cap, M, vocab, NULL), QT_OK);
    for (size_t i = 0; i < M; i++) {
        const float *x = a + i * vocab, *r = b + i * vocab;
        double lx = log_sum_exp(x, vocab, cap), lr = log_sum_exp(r, vocab, cap), kld = 0;
        size_t top_x = 0, top_r = 0;
        for (size_t j = 0; j < vocab; j++) {
            double p = exp(capped(r[j], cap) - lr);
            kld += p * ((capped(r[j], cap) - lr) - (capped(x[j], cap) - lx));
            top_x = x[j] > x[top_x] ? j : top_x;
            top_r = r[j] > r[top_r] ? j : top_r;
        }
        double nll = lx - capped(x[targets[i]], cap), ref = lr - capped(r[targets[i]], cap);
        /* tanh is FP32: an error of 2 ulp of 1, times cap, in every logit and so in every result */
        double tanh_error = 1.2e-7 * (double)cap;
        assert_true(fabs(got[i].nll - nll) < 3e-6 + tanh_error);
        assert_true(fabs(got[i].ref_nll - ref) < 3e-6 + tanh_error);
        /* e^x is FP32: its error of 1 ulp is multiplied by the log-ratios */
        assert_true(fabs(got[i].kld - kld) < 2e-7 * (1 + 2 * difference) + tanh_error);
        assert_true(fabs(got[i].p_delta - (exp(-nll) - exp(-ref))) < 1e-6 + tanh_error);
        assert_int_equal(got[i].same_top, top_x == top_r);
    }
    qt_free(a);
    qt_free(b);
    qt_free(noise);
}

static void test_score(void **state)
{
    static const size_t vocabs[] = {1, 2, 15, 16, 17, 1000, 32001};
    struct qt_backend *be = open_cpu();
    (void)state;
    for (size_t i = 0; i < sizeof vocabs / sizeof *vocabs; i++) {
        score_case(be, vocabs[i], 0, 8, 0.5);
        score_case(be, vocabs[i], 0, 8, 1e-3);
        score_case(be, vocabs[i], 30.0f, 20, 1);
    }
    be->close(be);
}

static void test_score_equal_and_ties(void **state)
{
    struct qt_backend *be = open_cpu();
    float *a = random_floats(4 * 999, 10), *b = copy_floats(a, 4 * 999);
    uint32_t targets[4] = {0, 998, 5, 7};
    struct qt_score s[4];
    (void)state;
    for (int cap = 0; cap <= 30; cap += 30) {
        be->score(be, s, a, b, targets, (float)cap, 4, 999, NULL);
        for (int i = 0; i < 4; i++)
            assert_true(s[i].kld == 0 && s[i].p_delta == 0 && s[i].same_top &&
                        s[i].nll == s[i].ref_nll);
    }
    a[3] = a[900] = 100; /* a tie goes to the lower index ... */
    b[900] = 100;        /* ... so the reference's maximum at 900 differs from 3 */
    be->score(be, s, a, b, targets, 0, 1, 999, NULL);
    assert_false(s[0].same_top);
    be->score(be, s, a, NULL, targets, 0, 1, 999, NULL);
    assert_true(s[0].nll > 0 && s[0].kld == 0);
    qt_free(a);
    qt_free(b);
    be->close(be);
}

static void test_score_bad(void **state)
{
    struct qt_backend *be = open_cpu();
    struct qt_err err = {0};
    struct qt_score s;
    float nans[3] = {1, NAN, 2};
    uint32_t target = 3;
    (void)state;
    assert_int_equal(be->score(be, &s, nans, NULL, &target, 0, 1, 3, &err), QT_E_INPUT);
    assert_non_null(strstr(err.reason, "token 3"));
    target = 0;
    assert_int_equal(be->score(be, &s, nans, nans, &target, 0, 1, 3, &err), QT_OK);
    assert_true(isnan(s.nll) && isnan(s.kld)); /* a broken model must not look perfect */
    be->close(be);
}

/* ---- threads -------------------------------------------------------------------------------- */

/* Runs every operation and copies all results to `out`; returns their bytes. */
static size_t all_operations(struct qt_backend *be, unsigned char *out, float *const *in)
{
    enum { M = 600, N = 260, K = 192, SEQ = 150, V = 300 };
    static float y[M * N], x[M * K], att[M * K];
    struct qt_score scores[M];
    uint32_t targets[M];
    unsigned char *p = out;
    struct qt_attention a = {SEQ, 6, 2, 32, 0.2f, 20.0f, 100, NULL, NULL, 0, NULL, 0, false};
    for (size_t i = 0; i < M; i++)
        targets[i] = (uint32_t)(i % N);
    memset(scores, 0, sizeof scores);
    memcpy(x, in[0], sizeof x);
    be->norm(be, x, x, in[1], in[2], QT_NORM_LAYER, 1e-5f, M, K, NULL);
    be->rope(be, x, in[1], in[2], M, SEQ, 6, 32, 32, false, NULL);
    be->rope(be, x, in[1], in[2], M, SEQ, 6, 32, 32, true, NULL);
    be->attention(be, att, x, in[3], in[3] + 100, M, &a, NULL);
    be->activate(be, att, att, x, QT_ACT_GELU, M * K, NULL);
    be->add(be, x, att, M * K, NULL);
    be->scale(be, x, 1.7f, M * K, NULL);
    be->linear(be, y, x, in[3], in[1], M, N, K, NULL);
    be->score(be, scores, y, y + 3, targets, 15.0f, M - 1, N, NULL);
    memcpy(p, x, sizeof x);
    p += sizeof x;
    memcpy(p, y, sizeof y);
    p += sizeof y;
    memcpy(p, scores, sizeof scores);
    return sizeof x + sizeof y + sizeof scores;
}

static void test_threads(void **state)
{
    static const int threads[] = {1, 2, 4};
    struct qt_backend *be = open_cpu();
    float *in[4];
    unsigned char *out[3];
    (void)state;
    for (size_t i = 0; i < 4; i++)
        in[i] = random_floats(600 * 192, 1);
    for (size_t t = 0; t < 3; t++) {
        size_t size;
        out[t] = calloc(1, 4 << 20);
        assert_non_null(out[t]);
        qt_threads_set(threads[t]);
        size = all_operations(be, out[t], in);
        assert_true(size <= 4 << 20);
    }
    assert_memory_equal(out[0], out[1], 4 << 20);
    assert_memory_equal(out[0], out[2], 4 << 20);
    qt_threads_set(0);
    for (size_t i = 0; i < 4; i++)
        qt_free(in[i]);
    for (size_t t = 0; t < 3; t++)
        free(out[t]);
    be->close(be);
}

static void test_out_of_memory(void **state)
{
    struct qt_backend *be;
    struct qt_attention a = {64, 1, 1, 8, 1, 0, 0, NULL, NULL, 0, NULL, 0, false};
    float *x = random_floats(64 * 8, 1), *y = random_floats(64 * 8, 1);
    void *p;
    (void)state;
    qt_mem_fail_after(0);
    assert_int_equal(qt_backend_cpu_open(&be, NULL), QT_E_RESOURCE);
    qt_mem_fail_after(1);
    assert_int_equal(qt_backend_cpu_open(&be, NULL), QT_OK);
    assert_int_equal(be->alloc(be, &p, 100, NULL), QT_E_RESOURCE);
    assert_int_equal(be->attention(be, y, x, x, x, 64, &a, NULL), QT_E_RESOURCE);
    qt_mem_fail_after(-1);
    assert_int_equal(be->attention(be, y, x, x, x, 64, &a, NULL), QT_OK);
    qt_free(x);
    qt_free(y);
    be->close(be);
}

int main(void)
{
    seed_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exp_all_floats),
        cmocka_unit_test(test_exp_special),
        cmocka_unit_test(test_tanh_erf),
        cmocka_unit_test(test_linear),
        cmocka_unit_test(test_linear_too_wide),
        cmocka_unit_test(test_norm),
        cmocka_unit_test(test_rope),
        cmocka_unit_test(test_activate),
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_columns),
        cmocka_unit_test(test_sinks),
        cmocka_unit_test(test_bias),
        cmocka_unit_test(test_clip),
        cmocka_unit_test(test_convolve),
        cmocka_unit_test(test_delta_rule),
        cmocka_unit_test(test_state_space),
        cmocka_unit_test(test_add_scale_copy),
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_attention_with_cached_keys),
        cmocka_unit_test(test_score),
        cmocka_unit_test(test_score_equal_and_ties),
        cmocka_unit_test(test_score_bad),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
