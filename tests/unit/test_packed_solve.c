/* Codebook schemes under a Hessian, from weights to packed bytes and back. */
#include "hessian_fixture.h"
#include "kernels/kernels.h"
#include "pack/schemes/scheme.h"
#include "pack_fixture.h"

static const char *const specs[] = {"nf4:g=64",
                                    "nf3:g=128",
                                    "nf2:g=32",
                                    "lut3:g=64",
                                    "fp6",
                                    "fp4",
                                    "int4:g=64",
                                    "int4:g=128,zero=group",
                                    "int3:g=64,zero=group",
                                    "int8:g=0",
                                    "w4ax:rotate=none",
                                    "w4ax:scales=int,rotate=none"};
enum { SPECS = sizeof specs / sizeof *specs };

/* The factor for a spec's groups, with damping 0.01. */
static struct qt_factor factor_for(const struct qt_spec *spec, const double *h, size_t n, size_t k)
{
    struct qt_packed p;
    assert_int_equal(qt_packed_describe(&p, spec, n, k, NULL), QT_OK);
    return factor_of(h, k, qt_packed_group(&p), false, 0.01);
}

struct solved {
    struct qt_factor f;
    struct qt_packed p;
    struct qt_error error;
    struct qt_solve_report report;
};

static struct solved solve_on(struct qt_backend *be, const char *text, const float *w,
                              const double *h, size_t n, size_t k)
{
    struct qt_spec spec = spec_of(text);
    struct solved s = {.f = factor_for(&spec, h, n, k)};
    struct qt_matrix m = matrix_of(w, n, k);
    struct qt_err err = {0};
    put_on(&s.f, be);
    if (qt_packed_solve(&s.p, &spec, &m, &s.f, &s.error, &s.report, &err) < 0)
        fail_msg("%s, %zu x %zu: %s", text, n, k, err.reason);
    return s;
}

static struct solved solve(const char *text, const float *w, const double *h, size_t n, size_t k)
{
    return solve_on(NULL, text, w, h, n, k);
}

static void solved_free(struct solved *s)
{
    put_on(&s->f, NULL);
    qt_factor_free(&s->f);
    qt_packed_free(&s->p);
}

static float *decode(const struct qt_packed *p)
{
    float *q = must_alloc(p->n * p->k, sizeof *q);
    assert_int_equal(qt_packed_decode(q, p, 0, p->n, NULL), QT_OK);
    return q;
}

/* Error of search with the diagonal of H as importance; d: damped H in storage order. */
static double searched_error(const char *text, const float *w, const struct qt_factor *f,
                             const double *d, size_t n)
{
    size_t k = f->k;
    float *importance = must_alloc(k, sizeof *importance);
    struct qt_spec spec = spec_of(text);
    struct qt_matrix m = matrix_of(w, n, k);
    struct qt_packed p;
    for (size_t i = 0; i < k; i++)
        importance[f->order[i]] = f->h[i * k + i];
    assert_int_equal(qt_packed_quantize(&p, &spec, &m, importance, NULL, NULL), QT_OK);
    float *q = decode(&p);
    double e = naive_error(d, w, q, n, k);
    free(q);
    free(importance);
    qt_packed_free(&p);
    return e;
}

/* Checks that the report describes the stored bytes and that the bytes are valid. Returns the error
 * relative to that of search. */
static double check_case(const char *text, const float *w, const double *h, size_t n, size_t k)
{
    struct solved s = solve(text, w, h, n, k);
    struct qt_error again;
    struct qt_err err = {0};
    double *d = damped(h, k, 0.01);
    float *q = decode(&s.p);
    double e = naive_error(d, w, q, n, k), before = searched_error(text, w, &s.f, d, n);
    expect_close(text, s.report.after_descent, e, before);
    expect_close("before", s.report.before, before, before);
    assert_true(s.report.after_descent <= s.report.after_compensation + 1e-6 * s.report.before);
    assert_int_equal(
        qt_packed_compare(&again, &s.p, &(struct qt_matrix){w, QT_F32, n, k, "", ""}, NULL), QT_OK);
    assert_memory_equal(&again, &s.error, sizeof again);
    if (qt_packed_check_repack(&s.p, "f", "t", &err) < 0)
        fail_msg("%s, %zu x %zu: %s", text, n, k, err.reason);
    assert_int_equal(s.p.spec.scheme->check_values(&s.p, &err), QT_OK);
    solved_free(&s);
    free(d);
    free(q);
    return before > 0 ? e / before : 0;
}

static void clearly_better_than_search(void **state)
{
    enum { N = 150, K = 288 }; /* two panels; a short last group with g = 64 and g = 128 */
    (void)state;
    double *h = random_hessian(K, 600);
    float *w = random_weights(N, K);
    for (int i = 0; i < SPECS; i++) {
        double share = check_case(specs[i], w, h, N, K);
        print_message("%-10s %.3f of the error of search\n", specs[i], share);
        assert_true(share < 0.6);
    }
    free(h);
    free(w);
}

/* Parts that are rounded one by one, and then stand in one matrix, are the matrix. */
static void parts_are_the_matrix(void **state)
{
    enum { N = 150, K = 288, PANELS = 2 };
    (void)state;
    double *h = random_hessian(K, 600);
    float *w = random_weights(N, K);
    const struct qt_matrix m = matrix_of(w, N, K);
    for (int i = 0; i < SPECS; i++) {
        struct solved whole = solve(specs[i], w, h, N, K);
        const struct qt_spec spec = spec_of(specs[i]);
        struct qt_solve_report panels[PANELS], report, sum = {0};
        const struct qt_packed_part parts[] = {{0, 128, panels}, {128, N, panels}};
        struct qt_packed p[2];
        assert_int_equal(qt_packed_unit(&whole.p, NULL), 128);
        for (int j = 0; j < 2; j++) {
            assert_int_equal(
                qt_packed_round(&p[j], &spec, &m, &whole.f, NULL, NULL, &parts[j], &report, NULL),
                QT_OK);
            qt_solve_add(&sum, &panels[j]);
        }
        for (size_t s = 0; s < whole.p.nsections; s++) {
            struct qt_section *first = &p[0].section[s];
            const size_t at = 8 * (first->bytes / 10); /* 128 rows are 8 strips of 10 */
            if (s < qt_packed_divided(&p[0]))
                memcpy(first->data + at, p[1].section[s].data + at, first->bytes - at);
            assert_memory_equal(first->data, whole.p.section[s].data, first->bytes);
        }
        assert_int_equal(p[0].scale_exp2, whole.p.scale_exp2);
        assert_memory_equal(&sum, &whole.report, sizeof sum);
        qt_packed_free(&p[0]);
        qt_packed_free(&p[1]);
        solved_free(&whole);
    }
    free(h);
    free(w);
}

/* Every scheme, with the matrix products of all panels on a backend. */
static void as_good_on_a_backend(void **state)
{
    enum { N = 150, K = 288 };
    struct qt_backend *be, other;
    (void)state;
    assert_int_equal(qt_backend_cpu_open(&be, NULL), QT_OK);
    other = elsewhere(be);
    double *h = random_hessian(K, 600), *d = damped(h, K, 0.01);
    float *w = random_weights(N, K);
    for (int i = 0; i <= SPECS; i++) {
        const char *text = i < SPECS ? specs[i] : "mix24";
        struct solved on_cpu = solve(text, w, h, N, K), s = solve_on(&other, text, w, h, N, K);
        float *q = decode(&s.p);
        expect_close(text, s.report.after_descent, naive_error(d, w, q, N, K), s.report.before);
        expect_near(text, s.report.before, on_cpu.report.before, 1e-4);
        expect_near(text, s.report.after_descent, on_cpu.report.after_descent, 0.01);
        assert_int_equal(s.p.spec.scheme->check_values(&s.p, NULL), QT_OK);
        free(q);
        solved_free(&on_cpu);
        solved_free(&s);
    }
    free(h);
    free(d);
    free(w);
    be->close(be);
}

/* The solver writes these sections; others, such as tables, exist before. */
static bool is_solved_for(const char *section)
{
    static const char *const names[] = {"plane0", "plane1", "plane2", "scale", "sub", "zero"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(section, names[i]) == 0)
            return true;
    return false;
}

/* Without correlations no error is compensated: the bytes are those of search with the diagonal as
 * importance. The diagonal is normalized and has exact roots. */
static void diagonal_hessian_is_search(void **state)
{
    enum { N = 130, K = 320 };
    const struct qt_solve_options opt = {.descent_rounds = 0};
    double *h = must_alloc((size_t)K * K, sizeof *h);
    float *w = random_weights(N, K), importance[K];
    (void)state;
    for (size_t j = 0; j < K; j++) {
        importance[j] = j % 5 == 2 ? 4 : 0.25f;
        h[j * K + j] = (double)importance[j];
    }
    for (int i = 0; i < SPECS; i++) {
        struct qt_spec spec = spec_of(specs[i]);
        struct qt_matrix m = matrix_of(w, N, K);
        struct qt_packed search, p;
        struct qt_solve_report report;
        assert_int_equal(qt_packed_quantize(&search, &spec, &m, importance, NULL, NULL), QT_OK);
        assert_int_equal(qt_packed_quantize(&p, &spec, &m, importance, NULL, NULL), QT_OK);
        struct qt_factor f = factor_of(h, K, qt_packed_group(&p), false, 0);
        for (size_t s = 0; s < p.nsections; s++)
            if (is_solved_for(p.section[s].name))
                memset(p.section[s].data, 0x55, p.section[s].bytes);
        assert_int_equal(spec.scheme->solve(&report, &p, w, &f, &opt, NULL), QT_OK);
        for (size_t s = 0; s < p.nsections; s++)
            assert_memory_equal(p.section[s].data, search.section[s].data, p.section[s].bytes);
        qt_factor_free(&f);
        qt_packed_free(&search);
        qt_packed_free(&p);
    }
    free(h);
    free(w);
}

static void edge_shapes(void **state)
{
    static const size_t shapes[][2] = {{1, 1},    {1, 200},  {17, 31},  {127, 33},
                                       {128, 64}, {129, 65}, {16, 129}, {33, 320}};
    (void)state;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        size_t n = shapes[s][0], k = shapes[s][1];
        double *h = random_hessian(k, k + 10);
        float *w = random_weights(n, k);
        for (int i = 0; i < SPECS; i++)
            check_case(specs[i], w, h, n, k);
        free(h);
        free(w);
    }
}

/* Zero rows and groups, dead channels, few tokens; weights with scales outside FP16. */
static void awkward_data(void **state)
{
    enum { N = 40, K = 160 };
    static const float factors[] = {1, 1e-9f, 1e9f};
    (void)state;
    double *h = random_hessian(K, 30);
    for (size_t j = 64; j < 130; j++)
        for (size_t i = 0; i < K; i++)
            h[j * K + i] = h[i * K + j] = 0;
    for (int f = 0; f < 3; f++) {
        float *w = random_weights(N, K);
        for (size_t i = 0; i < N * K; i++)
            w[i] *= i / K == 3 || (i / K == 7 && i % K < 64) ? 0 : factors[f];
        for (int i = 0; i < SPECS; i++)
            check_case(specs[i], w, h, N, K);
        free(w);
    }
    free(h);
}

static void same_bytes_for_any_threads(void **state)
{
    enum { N = 300, K = 224 };
    (void)state;
    double *h = random_hessian(K, 300);
    float *w = random_weights(N, K);
    for (int i = 0; i < SPECS; i++) {
        struct solved first = {0};
        for (int threads = 1; threads <= 4; threads *= 2) {
            qt_threads_set(threads);
            struct solved s = solve(specs[i], w, h, N, K);
            if (threads == 1) {
                first = s;
                continue;
            }
            for (size_t j = 0; j < s.p.nsections; j++)
                assert_memory_equal(s.p.section[j].data, first.p.section[j].data,
                                    s.p.section[j].bytes);
            assert_memory_equal(&s.report, &first.report, sizeof s.report);
            assert_memory_equal(&s.error, &first.error, sizeof s.error);
            solved_free(&s);
        }
        solved_free(&first);
    }
    qt_threads_set(0);
    free(h);
    free(w);
}

static void allocation_failures(void **state)
{
    enum { N = 40, K = 96 };
    (void)state;
    double *h = random_hessian(K, 100);
    float *w = random_weights(N, K);
    struct qt_matrix m = matrix_of(w, N, K);
    for (int i = 0; i < SPECS; i += 3) { /* nf4, lut3 */
        struct qt_spec spec = spec_of(specs[i]);
        struct qt_factor f = factor_for(&spec, h, N, K);
        bool failed = true;
        for (long n = 0; failed; n++) {
            struct solved s;
            qt_mem_fail_after(n);
            int rc = qt_packed_solve(&s.p, &spec, &m, &f, &s.error, &s.report, NULL);
            qt_mem_fail_after(-1);
            failed = rc < 0;
            assert_int_equal(rc, failed ? QT_E_RESOURCE : QT_OK);
            if (!failed)
                qt_packed_free(&s.p);
            assert_true(n < 1000);
        }
        qt_factor_free(&f);
    }
    free(h);
    free(w);
}

/* m[k][k] = R m R^T, where R rotates channel blocks. */
static void rotate_both(double *m, size_t k)
{
    float *t = must_alloc(k * k, sizeof *t);
    for (int side = 0; side < 2; side++) {
        for (size_t i = 0; i < k * k; i++)
            t[i] = (float)m[i % k * k + i / k];
        for (size_t i = 0; i < k; i++)
            qt_rotate(t + i * k, k);
        for (size_t i = 0; i < k * k; i++)
            m[i] = (double)t[i];
    }
    free(t);
}

/* w4ax with rotated channel blocks, under the Hessian of the stored channels: the error under the
 * source Hessian, of the decoded weights, is the one that the solver reports. */
static void rotated_blocks(void **state)
{
    enum { N = 40, K = 200 };
    static const char *const texts[] = {"w4ax", "w4ax:scales=int", "w4ax:scales=row"};
    float *w = random_weights(N, K);
    double *h = random_hessian(K, 4 * K), *stored = must_alloc(K * K, sizeof *stored);
    (void)state;
    for (size_t i = 0; i < K; i++)
        for (size_t j = 0; j < K; j++)
            stored[i * K + j] = i < j ? h[j * K + i] : h[i * K + j];
    rotate_both(stored, K);
    for (size_t i = 0; i < 3; i++) {
        struct solved s = solve(texts[i], w, stored, N, K);
        double *d = damped(h, K, 0.01);
        float *q = decode(&s.p);
        expect_close(texts[i], s.report.after_descent, naive_error(d, w, q, N, K), s.report.before);
        assert_true(s.report.after_descent < 0.6 * s.report.before);
        free(d);
        free(q);
        solved_free(&s);
    }
    free(stored);
    free(h);
    free(w);
}

int main(void)
{
    seed_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(clearly_better_than_search),
        cmocka_unit_test(parts_are_the_matrix),
        cmocka_unit_test(as_good_on_a_backend),
        cmocka_unit_test(diagonal_hessian_is_search),
        cmocka_unit_test(edge_shapes),
        cmocka_unit_test(awkward_data),
        cmocka_unit_test(same_bytes_for_any_threads),
        cmocka_unit_test(allocation_failures),
        cmocka_unit_test(rotated_blocks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
