/* Ordering, damping and factoring H: compared with the definition; matrices that cannot be
 * factored. */
#include "hessian_fixture.h"
#include "kernels/kernels.h"
#include "tests/worse.h"

/* ---- factor --------------------------------------------------------------------------------- */

static const size_t widths[] = {1, 31, 64, 100, 128, 129, 300};
enum { WIDTHS = sizeof widths / sizeof *widths };

/* Mean of the diagonal over group g. */
static double group_mean(const double *h, size_t k, size_t group, size_t g)
{
    size_t end = qt_min_size((g + 1) * group, k);
    double sum = 0;
    for (size_t j = g * group; j < end; j++)
        sum += h[j * k + j];
    return sum / (double)(end - g * group);
}

static void check_order(const struct qt_factor *f, const double *h, size_t group, bool natural)
{
    size_t k = f->k;
    bool *seen = must_alloc(k, sizeof *seen);
    for (size_t p = 0; p < k; p++) {
        size_t j = f->order[p];
        assert_true(j < k && !seen[j]);
        seen[j] = true;
        assert_int_equal(f->group[p], j / group);
        if (natural)
            assert_int_equal(j, p);
        if (natural || p == 0)
            continue;
        size_t before = f->order[p - 1];
        if (f->group[p] == f->group[p - 1]) {
            assert_true(h[before * k + before] >= h[j * k + j]);
        } else { /* whole groups: the previous one is complete */
            double left = group_mean(h, k, group, f->group[p - 1]);
            assert_true(left >= group_mean(h, k, group, f->group[p]) * (1 - 1e-12));
            assert_int_equal(p % group == 0 || k % group != 0, 1);
        }
    }
    for (size_t p = 0, runs = 0; p < k; p++) { /* contiguous: as many runs as groups */
        runs += p == 0 || f->group[p] != f->group[p - 1];
        assert_true(runs <= qt_ceil_div(k, group));
    }
    free(seen);
}

/* Checks V V^T = H, and H against its definition. */
static void check_product(const struct qt_factor *f, const double *h)
{
    size_t k = f->k;
    double *want = damped(h, k, f->damp);
    for (size_t i = 0; i < k; i++)
        for (size_t j = 0; j < k; j++) {
            size_t a = f->order[i], b = f->order[j];
            double sum = 0, norm = sqrt(want[a * k + a] * want[b * k + b]);
            for (size_t l = i > j ? i : j; l < k; l++)
                sum += (double)f->v[i * k + l] * (double)f->v[j * k + l];
            if (j < i)
                assert_true(f->v[i * k + j] == 0);
            if (!(fabs(sum - want[a * k + b]) <= 1e-5 * norm) ||
                !(fabs((double)f->h[i * k + j] - want[a * k + b]) <= 1e-6 * norm))
                fail_msg("[%zu][%zu] of %zu: v v^T %g, h %g, expected %g", i, j, k, sum,
                         (double)f->h[i * k + j], want[a * k + b]);
        }
    free(want);
}

static void factor_gives_h_again(void **state)
{
    (void)state;
    for (size_t i = 0; i < WIDTHS; i++)
        for (int natural = 0; natural < 2; natural++)
            for (size_t g = 0; g < 3; g++) {
                size_t k = widths[i], group = g == 2 ? k : (size_t)32 << g;
                double *h = random_hessian(k, k + 50);
                struct qt_factor f = factor_of(h, k, group, natural, 0.01);
                assert_int_equal(f.damping, QT_DAMP_PLAIN);
                assert_int_equal(f.dead, 0);
                assert_true(f.damp == 0.01 && f.group_size == group);
                check_order(&f, h, group, natural);
                check_product(&f, h);
                qt_factor_free(&f);
                free(h);
            }
}

/* Only the lower triangle is set; the upper one must not be read. */
static void lower_triangle_is_enough(void **state)
{
    enum { K = 40 };
    (void)state;
    double *h = random_hessian(K, 100), *lower = must_alloc(K * K, sizeof *lower);
    for (size_t i = 0; i < K; i++)
        for (size_t j = 0; j < K; j++)
            lower[i * K + j] = j <= i ? h[i * K + j] : NAN;
    struct qt_factor a = factor_of(h, K, 16, false, 0.01), b = factor_of(lower, K, 16, false, 0.01);
    assert_memory_equal(a.v, b.v, K * K * sizeof *a.v);
    assert_memory_equal(a.h, b.h, K * K * sizeof *a.h);
    qt_factor_free(&a);
    qt_factor_free(&b);
    free(h);
    free(lower);
}

/* Activations of any magnitude: a power of two changes no bit. */
static void any_scale(void **state)
{
    enum { K = 50 };
    static const int exponents[] = {133, -133, 66, -1};
    (void)state;
    double *h = random_hessian(K, 100), *scaled = must_alloc(K * K, sizeof *scaled);
    struct qt_factor f = factor_of(h, K, 32, false, 0.01);
    for (int e = 0; e < 4; e++) {
        for (size_t i = 0; i < K * K; i++)
            scaled[i] = ldexp(h[i], exponents[e]);
        struct qt_factor g = factor_of(scaled, K, 32, false, 0.01);
        assert_memory_equal(f.order, g.order, K * sizeof *f.order);
        assert_memory_equal(f.v, g.v, K * K * sizeof *f.v);
        qt_factor_free(&g);
    }
    for (int sign = -1; sign <= 1; sign += 2) { /* activations of 1e20 and 1e-20 */
        for (size_t i = 0; i < K * K; i++)
            scaled[i] = h[i] * pow(10, sign * 40);
        struct qt_factor g = factor_of(scaled, K, 32, false, 0.01);
        check_product(&g, scaled);
        qt_factor_free(&g);
    }
    qt_factor_free(&f);
    free(h);
    free(scaled);
}

static void dead_channels(void **state)
{
    enum { K = 70 };
    (void)state;
    double *h = random_hessian(K, 100);
    kill_channel(h, K, 0);
    kill_channel(h, K, 33);
    kill_channel(h, K, 69);
    struct qt_factor f = factor_of(h, K, 32, false, 0.01);
    assert_int_equal(f.dead, 3);
    assert_int_equal(f.damping, QT_DAMP_PLAIN);
    check_order(&f, h, 32, false);
    check_product(&f, h);
    qt_factor_free(&f);
    f = factor_of(h, K, 32, false, 0); /* singular without damping */
    assert_int_equal(f.damping, QT_DAMP_RAISED);
    assert_true(f.damp > 0);
    check_product(&f, h);
    qt_factor_free(&f);
    free(h);
}

static void fewer_tokens_than_channels(void **state)
{
    (void)state;
    for (size_t tokens = 1; tokens < 100; tokens += 33) {
        double *h = random_hessian(128, tokens);
        struct qt_factor f = factor_of(h, 128, 32, false, 0.01);
        assert_int_equal(f.damping, QT_DAMP_PLAIN);
        check_product(&f, h);
        qt_factor_free(&f);
        free(h);
    }
}

/* Eigenvalues 1 - c and 1 + c: factored from the first step of the ladder above c - 1 on. */
static void damping_is_raised(void **state)
{
    static const struct {
        double c, first, damp;
    } cases[] = {
        {1.005, 0.01, 0.01}, {1.05, 0.01, 0.1}, {1.5, 0.01, 1},
        {1.5, 0.03, 1},      {1.5, 2, 2},       {1.000003, 0, 1e-5},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double c = cases[i].c, h[4] = {1, c, c, 1};
        struct qt_factor f = factor_of(h, 2, 2, false, cases[i].first);
        expect_near("damping", f.damp, cases[i].damp, 1e-9);
        assert_int_equal(f.damping, f.damp > cases[i].first ? QT_DAMP_RAISED : QT_DAMP_PLAIN);
        check_product(&f, h);
        qt_factor_free(&f);
    }
}

static void hopeless_hessians(void **state)
{
    static const struct {
        double at00, at10;
        const char *reason;
    } cases[] = {
        {1, 5, "cannot be factored"},    {NAN, 0, "not finite"},       {INFINITY, 0, "not finite"},
        {1, NAN, "not finite"},          {1, -INFINITY, "not finite"}, {1, 1e300, "not finite"},
        {1, 1e30, "cannot be factored"}, {-1, 0, "negative"},
    };
    static const double nothing[9];
    struct qt_factor_options opt = {.damp = 0.01, .group = 32};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double h[] = {cases[i].at00, 0, 0, cases[i].at10, 1, 0, 0, 0, 1};
        struct qt_err err = {0};
        struct qt_factor f;
        assert_int_equal(qt_factor_new(&f, h, 3, &opt, &err), QT_E_UNSUPPORTED);
        if (!strstr(err.reason, cases[i].reason))
            fail_msg("case %zu: %s", i, err.reason);
        /* A failed call leaves no factor. */
        assert_true(f.k == 0 && !f.order && !f.group && !f.h && !f.v);
        qt_factor_free(&f);
    }
    struct qt_err err = {0};
    struct qt_factor f;
    double one = 1;
    assert_int_equal(qt_factor_new(&f, &one, SIZE_MAX / 2, &opt, &err), QT_E_UNSUPPORTED);
    assert_non_null(strstr(err.reason, "too many"));
    assert_int_equal(qt_factor_new(&f, nothing, 3, &opt, &err), QT_E_UNSUPPORTED);
    assert_non_null(strstr(err.reason, "no channel of the input was ever active"));
}

/* ---- memory --------------------------------------------------------------------------------- */

static void allocation_failures(void **state)
{
    enum { K = 70 };
    struct qt_factor_options opt = {.damp = 0.01, .group = 32};
    bool failed = true;
    (void)state;
    double *h = random_hessian(K, 100);
    for (long n = 0; failed; n++) {
        struct qt_factor f;
        qt_mem_fail_after(n);
        int rc = qt_factor_new(&f, h, K, &opt, NULL);
        qt_mem_fail_after(-1);
        failed = rc < 0;
        assert_int_equal(rc, failed ? QT_E_RESOURCE : QT_OK);
        assert_int_equal(f.k, failed ? 0 : K);
        qt_factor_free(&f);
        assert_true(n < 100);
    }
    free(h);
}

/* s (H + damping) = c, rows of K = 150; d: that matrix. */
enum { TARGETS_K = 150 };
static void check_regression(const float *s, const float *c, size_t rows, const double *d,
                             double scale)
{
    double worst = 0, size = 0;
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < TARGETS_K; j++) {
            double sum = 0, want = (double)c[i * TARGETS_K + j] * scale; /* as d is */
            for (size_t l = 0; l < TARGETS_K; l++)
                sum += (double)s[i * TARGETS_K + l] * d[l * TARGETS_K + j];
            worst = worse(worst, fabs(sum - want));
            size = fmax(size, fabs(want));
        }
    assert_true(worst < 1e-3 * size);
}

/* Targets are W + W S + T, S and T being regressions. */
static void targets_case(struct qt_backend *be)
{
    enum { N = 140, K = TARGETS_K };
    double *h = random_hessian(K, 400), *d = damped(h, K, 0.01);
    struct qt_factor f = factor_of(h, K, 64, false, 0.01);
    put_on(&f, be);
    float *cross = random_weights(K, K), *lack = random_weights(N, K), *w = random_weights(N, K);
    float *t = must_alloc((size_t)N * K, sizeof *t);
    for (size_t i = 0; i < (size_t)K * K; i++)
        cross[i] *= (float)h[0];
    for (size_t i = 0; i < (size_t)N * K; i++)
        lack[i] *= (float)h[0];
    memcpy(t, w, (size_t)N * K * sizeof *t);
    assert_int_equal(qt_factor_targets(t, N, &f, NULL), QT_OK);
    assert_memory_equal(t, w, (size_t)N * K * sizeof *t); /* no error to correct */
    assert_int_equal(qt_factor_correct_input_error(&f, cross, 0, 1000, NULL), QT_OK);
    assert_int_equal(qt_factor_correct_output_error(&f, lack, N, 0, 1000, NULL), QT_OK);
    assert_true(f.input_shrink == 1 && f.output_shrink == 1);
    check_regression(f.input_correction, cross, K, d, f.scale);
    check_regression(f.output_correction, lack, N, d, f.scale);
    assert_int_equal(qt_factor_targets(t, N, &f, NULL), QT_OK);
    for (size_t r = 0; r < N; r += 13)
        for (size_t j = 0; j < K; j++) {
            double sum = (double)w[r * K + j] + (double)f.output_correction[r * K + j];
            for (size_t l = 0; l < K; l++)
                sum += (double)w[r * K + l] * (double)f.input_correction[l * K + j];
            assert_true(fabs(sum - (double)t[r * K + j]) < 1e-4 * (1 + fabs(sum)));
        }
    put_on(&f, NULL);
    qt_factor_free(&f);
    free(h);
    free(d);
    free(cross);
    free(lack);
    free(w);
    free(t);
}

static void targets_make_up_for_inputs(void **state)
{
    struct qt_backend *cpu;
    (void)state;
    assert_int_equal(qt_backend_cpu_open(&cpu, NULL), QT_OK);
    struct qt_backend other = elsewhere(cpu);
    targets_case(NULL);
    targets_case(&other);
    cpu->close(cpu);
}

/* What few tokens explain counts as chance: all of it if there are as many tokens as channels. */
static void targets_shrink(void **state)
{
    enum { N = 33, K = TARGETS_K };
    (void)state;
    double *h = random_hessian(K, 400), last = 1, explained = 0;
    float *lack = random_weights(N, K);
    for (size_t i = 0; i < (size_t)N * K; i++)
        lack[i] *= (float)h[0];
    for (size_t tokens = 8 * K; tokens >= K; tokens -= K) {
        struct qt_factor f = factor_of(h, K, 64, false, 0.01);
        assert_int_equal(qt_factor_correct_output_error(&f, lack, N, 0, 1000000, NULL), QT_OK);
        explained = 0;
        for (size_t i = 0; i < (size_t)N * K; i++)
            explained += (double)lack[i] * (double)f.output_correction[i];
        qt_factor_free(&f);
        f = factor_of(h, K, 64, false, 0.01);
        assert_int_equal(qt_factor_correct_output_error(&f, lack, N, 1.5 * explained, tokens, NULL),
                         QT_OK);
        double want = tokens > K ? 1 - 1.0 * K / (double)(tokens - K) : 0;
        assert_true(fabs(f.output_shrink - fmax(want, 0)) < 1e-3);
        assert_true(f.output_shrink <= last);
        last = f.output_shrink;
        qt_factor_free(&f);
    }
    assert_true(last == 0);
    free(h);
    free(lack);
}

int main(void)
{
    seed_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(factor_gives_h_again),
        cmocka_unit_test(lower_triangle_is_enough),
        cmocka_unit_test(any_scale),
        cmocka_unit_test(dead_channels),
        cmocka_unit_test(fewer_tokens_than_channels),
        cmocka_unit_test(damping_is_raised),
        cmocka_unit_test(hopeless_hessians),
        cmocka_unit_test(targets_make_up_for_inputs),
        cmocka_unit_test(targets_shrink),
        cmocka_unit_test(allocation_failures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
