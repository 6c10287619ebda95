/* The backend's H += X^T X against naive double-precision sums. */
#include "hessian_fixture.h"
#include "kernels/kernels.h"

static float *random_tokens(size_t m, size_t k)
{
    float *x = must_alloc(m * k, sizeof *x);
    for (size_t i = 0; i < m * k; i++)
        x[i] = (float)normal();
    return x;
}

/* h starts random, with 1e9 above the diagonal that must not change. */
static void gram_case(struct qt_backend *be, size_t m, size_t k)
{
    float *x = random_tokens(m, k);
    double *h = must_alloc(k * k, sizeof *h), *want = must_alloc(k * k, sizeof *want);
    struct qt_err err = {0};
    for (size_t i = 0; i < k; i++)
        for (size_t j = 0; j < k; j++)
            h[i * k + j] = want[i * k + j] = j > i ? 1e9 : normal();
    for (size_t t = 0; t < m; t++)
        for (size_t i = 0; i < k; i++)
            for (size_t j = 0; j <= i; j++)
                want[i * k + j] += (double)x[t * k + i] * (double)x[t * k + j];
    if (be->gram(be, h, x, m, k, &err) < 0)
        fail_msg("%s", err.reason);
    for (size_t i = 0; i < k; i++)
        for (size_t j = 0; j < k; j++) {
            double d = fabs(h[i * k + j] - want[i * k + j]);
            if (!(j > i ? d == 0 : d <= 2e-6 * (double)m + 1e-9))
                fail_msg("%zu tokens, [%zu][%zu] of %zu: %.9g, expected %.9g", m, i, j, k,
                         h[i * k + j], want[i * k + j]);
        }
    free(x);
    free(h);
    free(want);
}

static void equals_naive_sums(void **state)
{
    static const size_t tokens[] = {1, 2, 63, 129}, widths[] = {1, 2, 64, 65, 255, 256, 257, 300};
    struct qt_backend *be;
    (void)state;
    assert_int_equal(qt_backend_cpu_open(&be, NULL), QT_OK);
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++)
        for (size_t j = 0; j < sizeof widths / sizeof *widths; j++)
            gram_case(be, tokens[i], widths[j]);
    for (size_t m = 1023; m <= 1025; m++) /* chunks of tokens */
        gram_case(be, m, 40);
    gram_case(be, 2500, 270);
    gram_case(be, 3, 530); /* three tiles per side */
    gram_case(be, 0, 3);   /* nothing to add */
    be->close(be);
}

/* Sums within a chunk are FP32, over chunks FP64: adding many equal chunks loses nothing. */
static void sums_do_not_drift(void **state)
{
    enum { M = 1024, K = 8, TIMES = 3000 };
    struct qt_backend *be;
    double once[K * K] = {0}, h[K * K] = {0};
    (void)state;
    float *x = random_tokens(M, K);
    assert_int_equal(qt_backend_cpu_open(&be, NULL), QT_OK);
    assert_int_equal(be->gram(be, once, x, M, K, NULL), QT_OK);
    for (int i = 0; i < TIMES; i++)
        assert_int_equal(be->gram(be, h, x, M, K, NULL), QT_OK);
    for (size_t i = 0; i < K; i++)
        for (size_t j = 0; j <= i; j++)
            expect_near("sum", h[i * K + j], TIMES * once[i * K + j], 1e-12);
    be->close(be);
    free(x);
}

static void same_for_any_threads(void **state)
{
    enum { M = 1500, K = 600 };
    struct qt_backend *be;
    double *first = must_alloc(K * K, sizeof *first), *h = must_alloc(K * K, sizeof *h);
    (void)state;
    float *x = random_tokens(M, K);
    assert_int_equal(qt_backend_cpu_open(&be, NULL), QT_OK);
    for (int threads = 1; threads <= 4; threads *= 2) {
        double *out = threads == 1 ? first : h;
        memset(out, 0, K * K * sizeof *out);
        qt_threads_set(threads);
        assert_int_equal(be->gram(be, out, x, M, K, NULL), QT_OK);
        assert_memory_equal(out, first, K * K * sizeof *out);
    }
    qt_threads_set(0);
    be->close(be);
    free(first);
    free(h);
    free(x);
}

/* A non-finite value reaches H, but only the row and column of its channel. */
static void nonfinite_activations_show(void **state)
{
    const size_t M = 20, K = 300, BAD = 270;
    static const float bad[] = {NAN, INFINITY, 1e20f};
    struct qt_backend *be;
    (void)state;
    assert_int_equal(qt_backend_cpu_open(&be, NULL), QT_OK);
    for (int b = 0; b < 3; b++) {
        double *h = must_alloc(K * K, sizeof *h);
        float *x = random_tokens(M, K);
        x[7 * K + BAD] = bad[b];
        assert_int_equal(be->gram(be, h, x, M, K, NULL), QT_OK);
        assert_true(!isfinite(h[BAD * K + BAD]));
        for (size_t i = 0; i < K; i++)
            for (size_t j = 0; j <= i; j++)
                assert_true(i == BAD || j == BAD || isfinite(h[i * K + j]) != 0);
        free(h);
        free(x);
    }
    be->close(be);
}

static void out_of_memory(void **state)
{
    struct qt_backend *be;
    double h = 0;
    float x = 1;
    (void)state;
    assert_int_equal(qt_backend_cpu_open(&be, NULL), QT_OK);
    qt_mem_fail_after(0);
    assert_int_equal(be->gram(be, &h, &x, 1, 1, NULL), QT_E_RESOURCE);
    qt_mem_fail_after(-1);
    assert_int_equal(be->gram(be, &h, &x, 1, 1, NULL), QT_OK);
    assert_true(h == 1);
    be->close(be);
}

int main(void)
{
    seed_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_naive_sums),    cmocka_unit_test(sums_do_not_drift),
        cmocka_unit_test(same_for_any_threads), cmocka_unit_test(nonfinite_activations_show),
        cmocka_unit_test(out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
