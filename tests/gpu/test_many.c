/*
 * Several look-up matrices with tables of their own in one launch (qtool_matmul_plan_many), against
 * FP64 products of the decoded weights. Outputs have guards; every run is made twice and must
 * repeat bit for bit. (Several mix24 matrices: test_mix24.)
 *
 * usage: test_many [SEED [quick]]     prints "N passed, M failed, K skipped"
 * quick: few cases, for compute-sanitizer.
 */
#include "tests/gpu/check_matmul.h"
#include "tests/gpu/matrix.h"

struct many {
    struct matrix m[QTOOL_MATMUL_MANY];
    const struct qtool_matmul_weight *w[QTOOL_MATMUL_MANY];
    size_t count, tokens, k, at[QTOOL_MATMUL_MANY], elements; /* outputs in pool.y, with gaps */
};

static bool run_many(const struct many *c, const struct qtool_matmul_plan *p, int which, bool late)
{
    void *y[QTOOL_MATMUL_MANY];
    const uint16_t *x = pool.x;
    CHECK(cudaMemset(pool.y[which], 0xff, c->elements * 2));
    for (size_t i = 0; i < c->count; i++)
        y[i] = pool.y[which] + c->at[i];
    if (late) {
        CHECK(cudaMemset(pool.late_x, 0xff, c->tokens * c->k * 2));
        gpu_write_late(pool.late_x, x, c->tokens * c->k);
        x = pool.late_x;
    }
    int rc = qtool_matmul_run_many(p, c->w, c->count, y, x, NULL);
    CHECK(cudaDeviceSynchronize());
    return rc == QTOOL_OK;
}

/* True if all but the outputs is still NaN. */
static bool many_guards(const struct many *c)
{
    uint16_t *y = download(pool.y[1], c->elements * 2);
    size_t at = 0;
    bool good = true;
    for (size_t i = 0; i <= c->count; i++) {
        for (const size_t end = i < c->count ? c->at[i] : c->elements; at < end; at++)
            good &= y[at] == 0xffff;
        at += i < c->count ? c->tokens * c->w[i]->n : 0;
    }
    free(y);
    return good;
}

static void check_many(const struct many *c, const char *name)
{
    const struct qtool_matmul_options opt = {.dependent_launch = (int)random_below(2)};
    struct qtool_matmul_plan plan;
    char what[400], config[160];
    if (qtool_matmul_plan_many(&plan, c->w, c->count, c->tokens, &opt) != QTOOL_OK) {
        result(qtool_kernels_compute(0) != 90, plan.reason);
        return;
    }
    config_text(config, sizeof config, &plan.config);
    random_x(pool.x, c->tokens * c->k, 0);
    const bool ran = run_many(c, &plan, 0, false) && run_many(c, &plan, 1, opt.dependent_launch);
    snprintf(what, sizeof what, "%s: %zu matrices, m=%zu k=%zu %s: run, guards, repetition", name,
             c->count, c->tokens, c->k, config);
    result(ran && outputs_equal(c->elements) && many_guards(c), what);
    for (size_t i = 0; i < c->count; i++) {
        const size_t n = c->w[i]->n;
        gpu_reference(pool.reference, pool.x, c->m[i].device_decoded, c->tokens, n, c->k, c->k, 0,
                      (struct gpu_rounding){0, 0});
        const struct gpu_error e =
            gpu_error_of(pool.y[0] + c->at[i], pool.reference, c->tokens * n, 0);
        snprintf(what, sizeof what, "%s: matrix %zu of %zu, n=%zu m=%zu k=%zu %s: error %.3g", name,
                 i, c->count, n, c->tokens, c->k, config, e.all);
        result(error_beyond_rounding(e) <= tolerance(c->tokens * n, 0), what);
    }
}

static void test_many(const char *scheme)
{
    static const size_t rows[] = {16, 100, 1000, 2112, 9000, 14336};
    static const size_t counts[] = {1, 3, 8, 9, 16};
    const size_t rows_tried = few_variants ? 3 : COUNT(rows);
    struct many c = {.count = 2 + random_below(QTOOL_MATMUL_MANY - 1),
                     .k = 64 * (1 + random_below(20))};
    output_at = 0;
    for (size_t i = 0; i < c.count; i++) {
        matrix_new(&c.m[i], scheme, rows[random_below(rows_tried)], c.k, 0.02f * (float)(i + 1));
        c.w[i] = &c.m[i].weight;
    }
    for (size_t j = 0; j < COUNT(counts); j++) {
        c.tokens = counts[j];
        c.elements = GUARD;
        for (size_t i = 0; i < c.count; i++) {
            c.at[i] = c.elements;
            c.elements += c.tokens * c.w[i]->n + 1 + random_below(GUARD);
        }
        check_many(&c, scheme);
    }
    for (size_t i = 0; i < c.count; i++)
        matrix_free(&c.m[i]);
}

static void test_many_refusals(void)
{
    static const char *const kinds[] = {"lut4:g=128,method=rtn", "lut3:g=128,method=rtn",
                                        "lut4:g=64,method=rtn", "int4:g=128,method=rtn"};
    const struct qtool_matmul_options opt = {0};
    struct qtool_matmul_plan plan;
    struct matrix m[COUNT(kinds)];
    for (size_t i = 0; i < COUNT(kinds); i++)
        matrix_new(&m[i], kinds[i], 64, 256, 0.02f);
    for (size_t i = 0; i < COUNT(kinds); i++) {
        const struct qtool_matmul_weight *w[] = {&m[0].weight, &m[i].weight};
        const bool good = i == 0 && qtool_kernels_compute(0) == 90;
        result((qtool_matmul_plan_many(&plan, w, 2, 1, &opt) == QTOOL_OK) == good, kinds[i]);
        result(qtool_matmul_plan_many(&plan, w, 2, 17, &opt) == QTOOL_UNSUPPORTED, "17 tokens");
    }
    for (size_t i = 0; i < COUNT(kinds); i++)
        matrix_free(&m[i]);
}

int main(int argc, char **argv)
{
    static const char *const schemes[] = {"lut4:g=128,method=rtn", "lut4:g=64,method=rtn",
                                          "lut3:g=128,method=rtn", "lut3:g=64,method=rtn",
                                          "nf4:g=32,method=rtn",   "nf3:g=256,method=rtn"};
    const bool quick = check_begin(argc, argv);
    pool_new();
    few_variants = quick;
    test_many_refusals();
    for (size_t i = 0; i < COUNT(schemes); i++)
        for (int repeat = 0; repeat < (quick ? 1 : 12); repeat++)
            test_many(schemes[i]);
    return check_end();
}
