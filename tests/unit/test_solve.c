/*
 * Error compensation and coordinate descent compared with slow references, mainly a plain
 * double-precision GPTQ with the Cholesky factor of the inverse, which the solver never computes.
 */
#include "hessian_fixture.h"
#include "kernels/kernels.h"

static const size_t widths[] = {1, 31, 64, 100, 128, 129, 300};
enum { WIDTHS = sizeof widths / sizeof *widths };

/* ---- a rounder ------------------------------------------------------------------------------ */

/* Integers -8..7 times a scale per row and group; records its calls. */
struct grid {
    size_t n, k, group;
    bool keep_scales, keep_codes; /* descent may change only the other one */
    bool half;                    /* scales are FP16 */
    float *scale, *first_scale;   /* [groups][n] */
    float *target, *weight;       /* [k][n], [k] */
    int *code;                    /* [k][n] */
    int *first_code; /* code before descent; one panel only, like the following members */
    size_t calls, last_change;
};

static void grid_begin(void *ctx, const struct qt_column_group *group, const float *t, size_t row0,
                       size_t rows)
{
    struct grid *g = ctx;
    for (size_t r = 0; r < rows; r++) {
        float top = 0;
        for (size_t i = 0; i < group->n; i++) {
            const size_t *col = group->col;
            assert_int_equal(col[i] / g->group, group->index);
            g->target[col[i] * g->n + row0 + r] = t[i * QT_PANEL_ROWS + r];
            if (row0 + r == 0)
                g->weight[col[i]] = powf(group->v[i * group->stride + i], 2);
            top = fmaxf(top, fabsf(t[i * QT_PANEL_ROWS + r]));
        }
        float scale = qt_f16_to_f32(qt_f32_to_f16(top / 7.5f));
        g->scale[group->index * g->n + row0 + r] = scale;
        g->first_scale[group->index * g->n + row0 + r] = scale;
    }
}

static int nearest(double y)
{
    return (int)fmin(fmax(rint(y), -8), 7);
}

static void grid_round(void *ctx, size_t col, const float *x, float *q, float *unit, size_t row0,
                       size_t rows)
{
    struct grid *g = ctx;
    bool one_panel = g->n <= QT_PANEL_ROWS, descending = one_panel && g->calls >= g->k;
    if (one_panel && g->calls == g->k)
        memcpy(g->first_code, g->code, g->k * g->n * sizeof *g->code);
    for (size_t r = 0; r < rows; r++) {
        float scale = g->scale[col / g->group * g->n + row0 + r];
        int *code = &g->code[col * g->n + row0 + r];
        int now = scale != 0 ? nearest((double)x[r] / (double)scale) : 0;
        if (descending && g->keep_codes)
            now = *code;
        if (one_panel && now != *code)
            g->last_change = g->calls;
        *code = now;
        unit[r] = (float)now;
        q[r] = scale * (float)now;
    }
    if (one_panel)
        g->calls++;
}

static void grid_scale(void *ctx, size_t group, float *scale, size_t row0, size_t rows)
{
    const struct grid *g = ctx;
    memcpy(scale, g->scale + group * g->n + row0, rows * sizeof *scale);
}

static void grid_rescale(void *ctx, size_t group, float *scale, size_t row0, size_t rows)
{
    struct grid *g = ctx;
    float *stored = g->scale + group * g->n + row0;
    for (size_t r = 0; r < rows && !g->keep_scales; r++)
        stored[r] = g->half ? qt_f16_to_f32(qt_f32_to_f16(scale[r])) : scale[r];
    memcpy(scale, stored, rows * sizeof *scale);
}

static struct grid grid_new(size_t n, size_t k, size_t group)
{
    size_t groups = qt_ceil_div(k, group);
    return (struct grid){
        .n = n,
        .k = k,
        .group = group,
        .scale = must_alloc(groups * n, sizeof(float)),
        .first_scale = must_alloc(groups * n, sizeof(float)),
        .target = must_alloc(k * n, sizeof(float)),
        .weight = must_alloc(k, sizeof(float)),
        .code = must_alloc(k * n, sizeof(int)),
        .first_code = must_alloc(k * n, sizeof(int)),
    };
}

static void grid_free(struct grid *g)
{
    free(g->scale);
    free(g->first_scale);
    free(g->target);
    free(g->weight);
    free(g->code);
    free(g->first_code);
}

static struct qt_solve_report grid_solve(struct grid *g, const struct qt_factor *f, const float *w,
                                         int descent_rounds)
{
    struct qt_rounder rounder = {.ctx = g,
                                 .begin = grid_begin,
                                 .round = grid_round,
                                 .scale = grid_scale,
                                 .rescale = grid_rescale};
    struct qt_solve_options opt = {.descent_rounds = descent_rounds};
    struct qt_solve_report report;
    struct qt_err err = {0};
    if (qt_solve(&report, f, w, g->n, &rounder, &opt, &err) < 0)
        fail_msg("%s", err.reason);
    return report;
}

/* The values q[n][k] of the codes. */
static float *grid_values(const struct grid *g)
{
    float *q = must_alloc(g->n * g->k, sizeof *q);
    for (size_t r = 0; r < g->n; r++)
        for (size_t j = 0; j < g->k; j++)
            q[r * g->k + j] = g->scale[j / g->group * g->n + r] * (float)g->code[j * g->n + r];
    return q;
}

/* ---- reference ------------------------------------------------------------------------------ */

/* u upper triangular with a^-1 = u^T u: Gauss-Jordan, then Cholesky, without pivots as a is
 * positive definite. Destroys a. */
static void inverse_factor(double *u, double *a, size_t k)
{
    double *inv = must_alloc(k * k, sizeof *inv);
    for (size_t i = 0; i < k; i++)
        inv[i * k + i] = 1;
    for (size_t p = 0; p < k; p++) {
        double d = a[p * k + p];
        for (size_t j = 0; j < k; j++) {
            a[p * k + j] /= d;
            inv[p * k + j] /= d;
        }
        for (size_t i = 0; i < k; i++) {
            double c = a[i * k + p];
            for (size_t j = 0; i != p && c != 0 && j < k; j++) {
                a[i * k + j] -= c * a[p * k + j];
                inv[i * k + j] -= c * inv[p * k + j];
            }
        }
    }
    for (size_t i = 0; i < k; i++)
        for (size_t j = i; j < k; j++) {
            double sum = inv[i * k + j];
            for (size_t l = 0; l < i; l++)
                sum -= u[l * k + i] * u[l * k + j];
            u[i * k + j] = i == j ? sqrt(sum) : sum / u[i * k + i];
        }
    free(inv);
}

/*
 * GPTQ of one row: rounds a column and spreads its error over the later ones by the row of u. The
 * solver's code counts as equal if the value is within FP32 noise of the midpoint between this code
 * and the nearest one; the row then continues with the solver's code.
 */
static size_t gptq_row(const struct grid *g, const struct qt_factor *f, const double *u,
                       const float *w, size_t r)
{
    size_t k = f->k, ties = 0;
    double *x = must_alloc(k, sizeof *x);
    for (size_t p = 0; p < k; p++)
        x[p] = (double)w[r * k + f->order[p]];
    for (size_t p = 0; p < k; p++) {
        size_t j = f->order[p];
        double scale = (double)g->first_scale[f->group[p] * g->n + r];
        for (size_t i = p;
             (p == 0 || f->group[p] != f->group[p - 1]) && i < k && f->group[i] == f->group[p];
             i++) { /* start of a group */
            double t = (double)g->target[f->order[i] * g->n + r];
            if (!(fabs(t - x[i]) <= 2e-3 * scale + 1e-7))
                fail_msg("target of row %zu, column %zu: %g, expected %g", r, f->order[i], t, x[i]);
        }
        double y = x[p] / scale;
        int code = g->code[j * g->n + r];
        if (code != nearest(y)) {
            if (!(fabs(fabs(y - code) - 0.5) <= 2e-3 + 1e-7 / scale))
                fail_msg("row %zu, column %zu (n %zu, k %zu, group %zu): code %d for %.6f", r, j,
                         g->n, k, g->group, code, y);
            ties++;
        }
        double e = (x[p] - scale * code) / u[p * k + p];
        for (size_t i = p; i < k; i++)
            x[i] -= e * u[p * k + i];
    }
    free(x);
    return ties;
}

static void gptq_case(size_t n, size_t k, size_t group, bool natural)
{
    double *h = random_hessian(k, k + 20), *u = must_alloc(k * k, sizeof *u);
    double *plain = damped(h, k, 0.01), *ordered = must_alloc(k * k, sizeof *ordered);
    float *w = random_weights(n, k);
    struct qt_factor f = factor_of(h, k, group, natural, 0.01);
    struct grid g = grid_new(n, k, group);
    struct qt_solve_report report = grid_solve(&g, &f, w, 0);
    size_t ties = 0;
    for (size_t i = 0; i < k; i++)
        for (size_t j = 0; j < k; j++)
            ordered[i * k + j] = plain[f.order[i] * k + f.order[j]];
    inverse_factor(u, ordered, k);
    for (size_t p = 0; p < k; p++)
        expect_near("weight", (double)g.weight[f.order[p]], 1 / (u[p * k + p] * u[p * k + p]),
                    1e-4);
    for (size_t r = 0; r < n; r++)
        ties += gptq_row(&g, &f, u, w, r);
    if (ties > 3 + n * k / 500)
        fail_msg("%zu ties of %zu", ties, n * k);
    float *q = grid_values(&g);
    double error, want = naive_error(plain, w, q, n, k);
    expect_near("objective", report.after_compensation, want, 1e-4);
    assert_true(report.after_descent == report.after_compensation);
    assert_int_equal(qt_solve_error(&error, &f, w, q, n, NULL), QT_OK);
    expect_near("qt_solve_error", error, want, 1e-4);
    qt_factor_free(&f);
    grid_free(&g);
    free(h);
    free(u);
    free(plain);
    free(ordered);
    free(w);
    free(q);
}

static void compensation_is_gptq(void **state)
{
    static const size_t heights[] = {1, 127, 128, 129, 257};
    size_t turn = 0;
    (void)state;
    for (size_t i = 0; i < WIDTHS; i++)
        for (int natural = 0; natural < 2; natural++)
            for (size_t g = 0; g < 3; g++) {
                size_t k = widths[i], group = g == 2 ? k : (size_t)32 << g;
                if (k <= 100)
                    for (size_t n = 0; n < 5; n++)
                        gptq_case(heights[n], k, group, natural);
                else
                    gptq_case(heights[turn++ % 5], k, group, natural);
            }
    gptq_case(3, 400, 256, false); /* column blocks of 256 and 144 columns */
}

/* ---- quality -------------------------------------------------------------------------------- */

struct problem {
    size_t n, k;
    double *h, *damped;
    float *w;
    struct qt_factor f;
    struct grid g;
};

static struct problem problem_new(size_t n, size_t k, size_t group)
{
    struct problem p = {.n = n, .k = k, .h = random_hessian(k, 2 * k)};
    p.damped = damped(p.h, k, 0.01);
    p.w = random_weights(n, k);
    p.f = factor_of(p.h, k, group, false, 0.01);
    p.g = grid_new(n, k, group);
    return p;
}

static void problem_free(struct problem *p)
{
    qt_factor_free(&p->f);
    grid_free(&p->g);
    free(p->h);
    free(p->damped);
    free(p->w);
}

static double problem_error(const struct problem *p)
{
    float *q = grid_values(&p->g);
    double e = naive_error(p->damped, p->w, q, p->n, p->k);
    free(q);
    return e;
}

static void compensation_beats_plain_rounding(void **state)
{
    (void)state;
    struct problem p = problem_new(40, 128, 32);
    struct grid plain = grid_new(40, 128, 32);
    for (size_t g = 0; g < 4; g++)
        for (size_t r = 0; r < 40; r++) {
            float top = 0, *scale = &plain.scale[g * 40 + r];
            for (size_t j = g * 32; j < g * 32 + 32; j++)
                top = fmaxf(top, fabsf(p.w[r * 128 + j]));
            *scale = qt_f16_to_f32(qt_f32_to_f16(top / 7.5f));
            for (size_t j = g * 32; j < g * 32 + 32; j++)
                plain.code[j * 40 + r] = nearest((double)(p.w[r * 128 + j] / *scale));
        }
    float *q = grid_values(&plain);
    double before = naive_error(p.damped, p.w, q, 40, 128);
    struct qt_solve_report report = grid_solve(&p.g, &p.f, p.w, 0);
    print_message("plain rounding %.4g, with compensation %.4g\n", before,
                  report.after_compensation);
    assert_true(report.after_compensation < 0.7 * before);
    free(q);
    grid_free(&plain);
    problem_free(&p);
}

static void descent_never_raises_the_objective(void **state)
{
    (void)state;
    for (size_t i = 0; i < WIDTHS; i++)
        for (int rounds = 1; rounds <= 4; rounds += 3)
            for (size_t g = 0; g < 2; g++) {
                struct problem p = problem_new(i % 2 ? 130 : 20, widths[i], g ? widths[i] : 32);
                p.g.half = true;
                struct qt_solve_report report = grid_solve(&p.g, &p.f, p.w, rounds);
                expect_close("after descent", report.after_descent, problem_error(&p),
                             report.after_compensation);
                assert_true(report.after_descent < report.after_compensation);
                problem_free(&p);
            }
}

/* Changing any single code does not lower the objective. */
static void descent_reaches_a_local_optimum(void **state)
{
    enum { K = 24, CASES = 60 };
    int settled = 0;
    (void)state;
    for (int c = 0; c < CASES; c++) {
        struct problem p = problem_new(1, K, 8);
        p.g.keep_scales = true;
        grid_solve(&p.g, &p.f, p.w, 100);
        /* Descent stops when a round gains little; it is at the optimum only if a round changed
         * nothing. */
        if (p.g.calls - p.g.last_change > K) {
            double best = problem_error(&p);
            settled++;
            for (size_t j = 0; j < K; j++) {
                int code = p.g.code[j];
                for (p.g.code[j] = -8; p.g.code[j] <= 7; p.g.code[j]++)
                    if (!(problem_error(&p) >= best * (1 - 1e-4)))
                        fail_msg("column %zu: %d is better than %d", j, p.g.code[j], code);
                p.g.code[j] = code;
            }
        }
        problem_free(&p);
    }
    print_message("%d of %d settled\n", settled, CASES);
    assert_true(settled > CASES / 2);
}

/* With fixed scales, a round of descent rounds every column to its best value, in order. */
static void descent_minimizes_each_column(void **state)
{
    enum { N = 100, K = 150 };
    size_t ties = 0, changes = 0;
    (void)state;
    struct problem p = problem_new(N, K, 32);
    qt_factor_free(&p.f); /* storage order: neighbors correlate most strongly */
    p.f = factor_of(p.h, K, 32, true, 0.01);
    p.g.keep_scales = true;
    grid_solve(&p.g, &p.f, p.w, 1);
    for (size_t r = 0; r < N; r++) {
        double e[K];
        for (size_t j = 0; j < K; j++)
            e[j] = (double)p.w[r * K + j] -
                   (double)p.g.scale[j / 32 * N + r] * p.g.first_code[j * N + r];
        for (size_t at = 0; at < K; at++) {
            size_t j = p.f.order[at];
            double scale = (double)p.g.scale[j / 32 * N + r], he = 0;
            int before = p.g.first_code[j * N + r], code = p.g.code[j * N + r];
            for (size_t i = 0; i < K; i++)
                he += p.damped[j * K + i] * e[i];
            double y = before + he / p.damped[j * K + j] / scale;
            if (code != nearest(y)) {
                if (!(fabs(fabs(y - code) - 0.5) <= 2e-3))
                    fail_msg("row %zu, column %zu: code %d for %.6f", r, j, code, y);
                ties++;
            }
            e[j] -= scale * (code - before);
            changes += code != before;
        }
    }
    assert_true(ties <= 10 && changes > N);
    problem_free(&p);
}

/* With fixed codes, a round of descent is one least-squares step per group, in order. */
static void refit_case(size_t N, size_t K, size_t group)
{
    const size_t groups = qt_ceil_div(K, group);
    struct problem p = problem_new(N, K, group);
    double *e = must_alloc(K, sizeof *e), *scale = must_alloc(groups, sizeof *scale);
    p.g.keep_codes = true;
    struct qt_solve_report report = grid_solve(&p.g, &p.f, p.w, 1);
    assert_true(report.after_descent < report.after_compensation);
    for (size_t r = 0; r < N; r++) {
        for (size_t g = 0; g < groups; g++)
            scale[g] = (double)p.g.first_scale[g * N + r];
        for (size_t at = 0; at < K; at++) {
            size_t g = p.f.group[at];
            double ug = 0, uhu = 0;
            if (at && p.f.group[at - 1] == g)
                continue;
            for (size_t j = 0; j < K; j++)
                e[j] = (double)p.w[r * K + j] - scale[j / group] * p.g.code[j * N + r];
            for (size_t i = g * group; i < K && i / group == g; i++)
                for (size_t j = 0; j < K; j++) {
                    ug += p.g.code[i * N + r] * p.damped[i * K + j] * e[j];
                    if (j / group == g)
                        uhu += p.g.code[i * N + r] * p.damped[i * K + j] * p.g.code[j * N + r];
                }
            scale[g] += ug / uhu;
            expect_near("scale", (double)p.g.scale[g * N + r], scale[g], 1e-4);
        }
    }
    free(e);
    free(scale);
    problem_free(&p);
}

static void refit_is_least_squares(void **state)
{
    (void)state;
    refit_case(5, 100, 32);
    refit_case(5, 300, 300); /* one scale per row, several column blocks */
}

/* A refit that changes nothing but checks its arguments. */
static void grid_refit(void *ctx, const struct qt_column_group *group, const float *t, float *q,
                       size_t row0, size_t rows)
{
    const struct grid *g = ctx;
    (void)t;
    assert_int_equal(group->n, qt_min_size(g->group, g->k - group->index * g->group));
    for (size_t i = 0; i < group->n; i++)
        for (size_t r = 0; r < rows; r++)
            assert_true(q[i * QT_PANEL_ROWS + r] ==
                        g->scale[group->index * g->n + row0 + r] *
                            (float)g->code[group->col[i] * g->n + row0 + r]);
}

/* Groups that are refitted as a whole are never split. */
static void refitted_groups_are_whole(void **state)
{
    static const size_t cases[][2] = {{300, 300}, {700, 700}, {300, 250}, {100, 16}};
    (void)state;
    for (size_t i = 0; i < 4; i++) {
        struct problem p = problem_new(9, cases[i][0], cases[i][1]);
        struct qt_rounder rounder = {
            .ctx = &p.g, .begin = grid_begin, .round = grid_round, .refit = grid_refit};
        struct qt_solve_options opt = {.descent_rounds = 2};
        struct qt_solve_report report;
        assert_int_equal(qt_solve(&report, &p.f, p.w, p.g.n, &rounder, &opt, NULL), QT_OK);
        expect_close("after descent", report.after_descent, problem_error(&p),
                     report.after_compensation);
        assert_true(report.after_descent < report.after_compensation);
        problem_free(&p);
    }
}

/*
 * A dead channel has only the damping, on the diagonal: it neither receives nor spreads errors, so
 * that it is rounded to nearest. If a whole group is dead, the refit of its scale lowers the
 * group's error further. Active channels may be far from their weights, as they compensate for each
 * other.
 */
static void dead_channels_case(bool keep_scales)
{
    enum { N = 9, K = 96, GROUP = 32, DEAD = 40 };
    double *h = random_hessian(K, 50);
    for (size_t j = 0; j < DEAD; j++) /* a whole group among them */
        kill_channel(h, K, j);
    float *w = random_weights(N, K);
    struct qt_factor f = factor_of(h, K, GROUP, false, 0.01);
    struct grid g = grid_new(N, K, GROUP);
    g.keep_scales = keep_scales;
    struct qt_solve_report report = grid_solve(&g, &f, w, 3);
    float *q = grid_values(&g);
    assert_int_equal(f.dead, DEAD);
    /* (With fixed scales and so few codes, sometimes none changes.) */
    assert_true(isfinite(report.after_descent));
    assert_true(report.after_descent < report.after_compensation * (keep_scales ? 1 + 1e-6 : 1));
    for (size_t r = 0; r < N; r++) {
        double nearest_error = 0, error = 0;
        for (size_t j = 0; j < DEAD; j++) {
            const double weight = (double)w[r * K + j];
            const double scale = (double)g.first_scale[j / GROUP * N + r];
            const double step = fabs(scale * nearest(weight / scale) - weight);
            const double off = fabs((double)q[r * K + j] - weight);
            if (keep_scales)
                assert_true(off <= step * (1 + 1e-3) + 1e-3 * scale);
            if (j < GROUP) {
                nearest_error += step * step;
                error += off * off;
            }
        }
        assert_true(error <= nearest_error * (1 + 1e-3));
    }
    qt_factor_free(&f);
    grid_free(&g);
    free(h);
    free(w);
    free(q);
}

static void dead_channels_are_solved(void **state)
{
    (void)state;
    dead_channels_case(true);
    dead_channels_case(false);
}

/* ---- threads and memory --------------------------------------------------------------------- */

static void same_for_any_threads(void **state)
{
    enum { N = 300, K = 200 };
    (void)state;
    struct problem p = problem_new(N, K, 64);
    struct grid first = p.g;
    struct qt_solve_report reports[3];
    for (int i = 0; i < 3; i++) {
        qt_threads_set(1 << i);
        struct qt_factor f = factor_of(p.h, K, 64, false, 0.01);
        struct grid g = grid_new(N, K, 64);
        assert_memory_equal(f.v, p.f.v, K * K * sizeof *f.v);
        g.half = true;
        reports[i] = grid_solve(&g, &f, p.w, 2);
        assert_memory_equal(&reports[i], &reports[0], sizeof reports[0]);
        if (i) {
            assert_memory_equal(g.code, first.code, N * K * sizeof *g.code);
            assert_memory_equal(g.scale, first.scale, 4 * N * sizeof *g.scale);
            grid_free(&g);
        } else {
            grid_free(&first);
            first = p.g = g;
        }
        qt_factor_free(&f);
    }
    qt_threads_set(0);
    problem_free(&p);
}

/* The fraction of codes that differ. */
static double share_changed(const struct grid *a, const struct grid *b)
{
    size_t changed = 0;
    for (size_t i = 0; i < a->n * a->k; i++)
        changed += a->code[i] != b->code[i];
    return (double)changed / (double)(a->n * a->k);
}

/* All rows together on a backend give the same quality as panel by panel: another order of addition
 * may change single codes, and later codes by those. */
static void together_as_apart(void **state)
{
    static const size_t heights[] = {1, 128, 300}, groups[] = {32, 100, SIZE_MAX};
    struct qt_backend *be, other;
    (void)state;
    assert_int_equal(qt_backend_cpu_open(&be, NULL), QT_OK);
    other = elsewhere(be);
    for (size_t i = 0; i < WIDTHS; i++)
        for (size_t c = 0; c < 3; c++) {
            const size_t k = widths[i], n = heights[(i + c) % 3], group = qt_min_size(groups[c], k);
            struct problem p = problem_new(n, k, group);
            struct grid apart = p.g, again = grid_new(n, k, group);
            apart.half = true;
            const struct qt_solve_report want = grid_solve(&apart, &p.f, p.w, 4);
            struct qt_solve_report got[2];
            float *q = must_alloc(n * k, sizeof *q); /* rounded to 0 */
            const double all = naive_error(p.damped, p.w, q, n, k), tiny = 1e-6 * all;
            free(q);
            put_on(&p.f, &other);
            for (int run = 0; run < 2; run++) {
                struct grid g = grid_new(n, k, group);
                g.half = true;
                qt_threads_set(1 + run);
                got[run] = grid_solve(&g, &p.f, p.w, 4);
                assert_true(fabs(got[run].after_compensation - want.after_compensation) <=
                            0.02 * want.after_compensation + tiny);
                assert_true(fabs(got[run].after_descent - want.after_descent) <=
                            0.02 * want.after_descent + tiny);
                assert_true(share_changed(&g, &apart) < 0.02 + 5.0 / (double)(n * k));
                if (run) {
                    assert_memory_equal(&got[1], &got[0], sizeof got[0]);
                    assert_memory_equal(g.code, again.code, n * k * sizeof *g.code);
                }
                grid_free(&again);
                again = g;
            }
            q = grid_values(&again);
            double error, exact = naive_error(p.damped, p.w, q, n, k);
            assert_int_equal(qt_solve_error(&error, &p.f, p.w, q, n, NULL), QT_OK);
            expect_close("objective", got[1].after_descent, exact, all);
            expect_close("qt_solve_error", error, exact, all);
            free(q);
            grid_free(&again);
            put_on(&p.f, NULL);
            problem_free(&p);
        }
    qt_threads_set(0);
    be->close(be);
}

static void allocations_fail(struct qt_backend *be)
{
    enum { N = 200, K = 70 };
    bool failed = true;
    struct problem p = problem_new(N, K, 32);
    put_on(&p.f, be);
    for (long n = 0; failed; n++) {
        struct qt_rounder rounder = {.ctx = &p.g,
                                     .begin = grid_begin,
                                     .round = grid_round,
                                     .scale = grid_scale,
                                     .rescale = grid_rescale};
        struct qt_solve_options solve = {.descent_rounds = 1};
        struct qt_solve_report report;
        qt_mem_fail_after(n);
        int rc = qt_solve(&report, &p.f, p.w, N, &rounder, &solve, NULL);
        qt_mem_fail_after(-1);
        failed = rc < 0;
        assert_int_equal(rc, failed ? QT_E_RESOURCE : QT_OK);
        assert_true(n < 100);
    }
    put_on(&p.f, NULL);
    problem_free(&p);
}

static void allocation_failures(void **state)
{
    struct qt_backend *be, other;
    (void)state;
    allocations_fail(NULL);
    assert_int_equal(qt_backend_cpu_open(&be, NULL), QT_OK);
    other = elsewhere(be);
    allocations_fail(&other);
    be->close(be);
}

int main(void)
{
    seed_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(compensation_is_gptq),
        cmocka_unit_test(compensation_beats_plain_rounding),
        cmocka_unit_test(descent_never_raises_the_objective),
        cmocka_unit_test(descent_reaches_a_local_optimum),
        cmocka_unit_test(descent_minimizes_each_column),
        cmocka_unit_test(refit_is_least_squares),
        cmocka_unit_test(refitted_groups_are_whole),
        cmocka_unit_test(dead_channels_are_solved),
        cmocka_unit_test(same_for_any_threads),
        cmocka_unit_test(together_as_apart),
        cmocka_unit_test(allocation_failures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
