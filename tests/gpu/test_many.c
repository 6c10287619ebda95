/*
 * Several look-up matrices with tables of their own in one launch (qtool_matmul_plan_many), against
 * FP64 products of the decoded weights. Outputs have guards; every run is made twice and must
 * repeat bit for bit. (Several mix24 matrices: test_mix24.)
 *
 * usage: test_many [SEED [quick]]     prints "N passed, M failed, K skipped"
 * quick: few cases, for compute-sanitizer.
 */
#include "tests/gpu/check_many.h"
#include "tests/gpu/matrix.h"

static void test_many(const char *scheme)
{
    static const size_t rows[] = {16, 100, 1000, 2112, 9000, 14336};
    static const size_t counts[] = {1, 3, 8, 9, 16};
    const size_t rows_tried = few_variants ? 3 : COUNT(rows);
    const size_t count = 2 + random_below(QTOOL_MATMUL_MANY - 1);
    struct matrix m[QTOOL_MATMUL_MANY];
    struct many c = {.k = 64 * (1 + random_below(20))};
    for (size_t i = 0; i < count; i++) {
        matrix_new(&m[i], scheme, rows[random_below(rows_tried)], c.k, 0.02f * (float)(i + 1));
        many_add(&c, &m[i].weight, m[i].device_decoded);
    }
    for (size_t j = 0; j < COUNT(counts); j++) {
        const struct qtool_matmul_options opt = {.dependent_launch = (int)random_below(2)};
        struct qtool_matmul_plan plan;
        c.tokens = counts[j];
        many_place(&c);
        if (qtool_matmul_plan_many(&plan, c.w, count, c.tokens, &opt) == QTOOL_OK)
            check_many(&c, &plan, opt.dependent_launch, scheme);
        else
            result(qtool_kernels_compute(0) != 90, plan.reason);
    }
    for (size_t i = 0; i < count; i++)
        matrix_free(&m[i]);
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
