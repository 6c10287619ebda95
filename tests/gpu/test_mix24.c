/*
 * The mix24 kernels against FP64 products of the exact weights: random matrices over edge shapes,
 * shares of 4-bit groups, outliers (none, few, many, concentrated in few rows), token counts,
 * dtypes, alignments and configurations. Outputs are filled with NaN and have guard bands. Every
 * run is made twice and must repeat bit for bit.
 *
 * usage: test_mix24 [SEED [quick]]     prints "N passed, M failed, K skipped"
 * quick: few cases, for compute-sanitizer.
 */
#include "tests/gpu/check_many.h"
#include "tests/gpu/mix24_matrix.h"

static bool quick;

/* ---- products ------------------------------------------------------------------------------- */

static void vary_vector(struct qtool_matmul_plan *p)
{
    struct qtool_vector_config *c = &p->config.vector;
    p->config = (struct qtool_matmul_config){.path = QTOOL_MATMUL_VECTOR};
    c->strips = 1 + (int)random_below(3);
    c->warps = 12 + (int)random_below(5);
    do
        c->warps_k = 1 + (int)random_below(16);
    while (c->warps % c->warps_k);
    c->strips_cta = 1 + (int)random_below(30);
}

static void vary_ring(struct qtool_matmul_plan *p)
{
    struct qtool_ring_config *c = &p->config.ring;
    p->config = (struct qtool_matmul_config){.path = QTOOL_MATMUL_RING};
    c->token_tiles = p->m <= 8 ? 1 : p->m <= 16 ? 2 : 4;
    c->cluster = 1 << random_below(4);
    c->strips = 1 << random_below(3);
    c->warps = 1 << random_below(5);
    c->warps_k = c->warps >> random_below(3);
    c->warps_k = c->warps_k ? c->warps_k : 1;
    c->depth = 2 + (int)random_below(3);
    c->strips_cta = 1 + (int)random_below(9);
    c->parts = 1 + (int)random_below(3);
}

/* Sets a random configuration, of a path that depends on `variant` and the planned path. */
static void vary(struct qtool_matmul_plan *p, int variant)
{
    const enum qtool_matmul_path planned = p->config.path;
    if (variant % 3 == 0)
        vary_tile(p);
    else if (variant % 3 == 1 && planned == QTOOL_MATMUL_VECTOR && random_below(2))
        vary_vector(p);
    else if (variant % 3 == 1 && planned != QTOOL_MATMUL_RING)
        vary_skinny(p);
    else
        vary_ring(p);
}

/* shift: offset of X in elements, which changes its alignment. */
static void check_matmul(const struct qtool_matmul_weight *w, const float *decoded, size_t m,
                         int bf16, int shift, const char *name)
{
    check_product(w, decoded, w->k, pool.x + shift, m, bf16, quick ? 3 : 6, vary, name);
}

static void check_slices(const struct mix24_matrix *m, const char *name)
{
    struct qtool_matmul_weight slice;
    size_t n0 = 32, n = m->weight.n - n0 - 3, k = m->weight.k;
    result(qtool_matmul_slice(&slice, &m->weight, n0, n, 0, k) == QTOOL_OK, "slice");
    check_matmul(&slice, m->device_decoded + n0 * k, 5, 0, 0, name);
    result(qtool_matmul_slice(&slice, &m->weight, 8, 16, 0, k) == QTOOL_UNSUPPORTED,
           "slice of rows 8...");
    result(qtool_matmul_slice(&slice, &m->weight, 0, 16, 64, k - 64) == QTOOL_UNSUPPORTED,
           "slice of columns");
}

/* ---- cases ---------------------------------------------------------------------------------- */

struct kind {
    const char *name;
    double fours, outliers;
    bool skewed, wide, shuffled;
    int scale_exp2;
};

static const struct kind kinds[] = {
    {"quarter", 0.25, 0.002, false, false, true, 0},
    {"quarter, no outliers", 0.25, 0, false, false, true, 3},
    {"quarter, many outliers", 0.25, 0.05, false, false, true, -3},
    {"quarter, skewed outliers", 0.25, 0.002, true, false, true, 0},
    {"tenth, wide scales", 0.1, 0.005, false, true, true, 5},
    {"twos", 0, 0.005, false, false, false, -2},
    {"fours", 1, 0, false, false, true, 0},
};
static const size_t shapes[][2] = {{15, 1},    {15, 63},    {16, 64},   {17, 65},
                                   {31, 127},  {33, 129},   {48, 257},  {100, 1000},
                                   {96, 1024}, {272, 2080}, {112, 2056}};
static const size_t tokens[] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10,  11,  12,  13,  14,
                                15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 257};

/* Token counts for batch-invariant products. */
static const size_t batches[] = {40, 32, 16, 8, 3, 1}, quick_batches[] = {17, 8, 1};

static struct mix24_recipe recipe(const struct kind *kind, size_t n, size_t k)
{
    struct mix24_recipe r = {.n = n,
                             .k = k,
                             .fours = kind->fours,
                             .outliers = kind->outliers,
                             .skewed = kind->skewed,
                             .wide = kind->wide,
                             .shuffled = kind->shuffled,
                             .scale_exp2 = kind->scale_exp2};
    return r;
}

static void test_kind(const struct kind *kind, size_t shape_step, size_t token_step)
{
    for (size_t i = shape_step - 1; i < COUNT(shapes); i += shape_step) {
        struct mix24_matrix m;
        struct mix24_recipe r = recipe(kind, shapes[i][0], shapes[i][1]);
        mix24_matrix_new(&m, &r, &seed);
        check_dequantize(&m.weight, m.decoded, 0, kind->name);
        check_dequantize(&m.weight, m.decoded, 1, kind->name);
        for (size_t j = quick ? 0 : i % token_step; j < COUNT(tokens); j += token_step) {
            uint32_t dice = random_bits();
            check_matmul(&m.weight, m.device_decoded, tokens[j], dice % 3 == 0, dice / 3 % 5 == 0,
                         kind->name);
        }
        if (shapes[i][0] > 80) {
            check_slices(&m, kind->name);
            if (quick)
                check_invariance(&m.weight, quick_batches, COUNT(quick_batches), 0, kind->name);
            else
                check_invariance(&m.weight, batches, COUNT(batches), 0, kind->name);
        }
        mix24_matrix_free(&m);
    }
}

/* Many passes, k of large models, and k whose X does not fit into shared memory. */
static void test_large(const struct kind *kind)
{
    /* The second shape has several tiles of 128 and more tokens per thread block. */
    static const size_t large[][2] = {
        {4096, 1024}, {9040, 320}, {512, 14336}, {48, 28672}, {40, 70000}};
    static const size_t counts[] = {1, 8, 16, 17, 64, 100, 300};
    for (size_t i = 0; i < COUNT(large); i++) {
        struct mix24_matrix m;
        struct mix24_recipe r = recipe(kind, large[i][0], large[i][1]);
        mix24_matrix_new(&m, &r, &seed);
        check_dequantize(&m.weight, m.decoded, (int)(i % 2), kind->name);
        for (size_t j = 0; j < COUNT(counts); j++)
            check_matmul(&m.weight, m.device_decoded, counts[j], (int)(j % 3 == 1), 0, kind->name);
        check_invariance(&m.weight, quick_batches, COUNT(quick_batches), 0, kind->name);
        mix24_matrix_free(&m);
    }
}

/* `strips` strips per multiprocessor: warps share each number in a different way. */
static void test_strips(const struct kind *kind, size_t strips)
{
    static const size_t counts[] = {2, 8, 9, 16};
    int sms;
    CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    struct mix24_matrix m;
    struct mix24_recipe r = recipe(kind, strips * 16 * (size_t)sms - 24, 520);
    mix24_matrix_new(&m, &r, &seed);
    for (size_t j = 0; j < COUNT(counts); j++)
        check_matmul(&m.weight, m.device_decoded, counts[j], (int)(random_bits() & 1), 0,
                     kind->name);
    mix24_matrix_free(&m);
}

/* ---- several matrices in one launch ---------------------------------------------------------- */

static void test_many(const struct kind *kind, size_t most)
{
    const size_t count = 1 + random_below(QTOOL_MATMUL_MANY);
    struct mix24_matrix m[QTOOL_MATMUL_MANY];
    struct many c = {.tokens = 1, .k = 1 + random_below(3000)};
    const struct qtool_matmul_options opt = {.dtype = random_below(3) == 0 ? QTOOL_BF16 : QTOOL_F16,
                                             .dependent_launch = (int)random_below(2)};
    const bool late = opt.dependent_launch && random_below(2);
    struct qtool_matmul_plan plan;
    for (size_t i = 0; i < count; i++) {
        struct mix24_recipe r = recipe(kind, 1 + random_below(most), c.k);
        r.outliers = random_below(3) ? r.outliers : 0;
        mix24_matrix_new(&m[i], &r, &seed);
        many_add(&c, &m[i].weight, m[i].device_decoded);
    }
    many_place(&c);
    if (qtool_matmul_plan_many(&plan, c.w, count, 1, &opt) == QTOOL_OK)
        check_many(&c, &plan, late, kind->name);
    else
        result(false, plan.reason);
    for (size_t i = 0; i < count; i++)
        mix24_matrix_free(&m[i]);
}

static void test_many_refusals(void)
{
    struct mix24_matrix m[2];
    const struct qtool_matmul_weight *w[QTOOL_MATMUL_MANY + 1];
    struct qtool_matmul_plan plan, single;
    struct qtool_matmul_options opt = {0};
    void *y[] = {pool.y[0], pool.y[1], NULL};
    const struct mix24_recipe r[2] = {recipe(&kinds[0], 64, 512), recipe(&kinds[0], 32, 512)};
    for (size_t i = 0; i < 2; i++)
        mix24_matrix_new(&m[i], &r[i], &seed);
    for (size_t i = 0; i < COUNT(w); i++)
        w[i] = &m[i % 2].weight;
    result(qtool_matmul_plan_many(&plan, w, COUNT(w), 1, &opt) == QTOOL_UNSUPPORTED,
           "four matrices");
    result(qtool_matmul_plan_many(&plan, w, 0, 1, &opt) == QTOOL_UNSUPPORTED, "no matrix");
    opt.batch_invariant = 1;
    result(qtool_matmul_plan_many(&plan, w, 2, 1, &opt) == QTOOL_UNSUPPORTED, "batch-invariant");
    opt.batch_invariant = 0;
    struct qtool_matmul_weight other = m[1].weight;
    other.k = 511;
    w[2] = &other;
    result(qtool_matmul_plan_many(&plan, w, 3, 1, &opt) == QTOOL_UNSUPPORTED, "another k");
    result(qtool_matmul_plan_many(&plan, w, 2, 1, &opt) == QTOOL_OK, plan.reason);
    result(qtool_matmul_run_many(&plan, w, 2, y, pool.x, NULL) == QTOOL_OK, "two matrices");
    result(qtool_matmul_run_many(&plan, w, 3, y, pool.x, NULL) == QTOOL_UNSUPPORTED, "a third");
    result(qtool_matmul_run_many(&plan, w + 1, 2, y, pool.x, NULL) == QTOOL_UNSUPPORTED,
           "others than planned");
    result(qtool_matmul_run_many(&plan, w, 2, y + 1, pool.x, NULL) == QTOOL_UNSUPPORTED, "no y");
    result(qtool_matmul_run(&plan, w[0], y[0], pool.x, NULL, NULL) == QTOOL_UNSUPPORTED,
           "one of two");
    result(qtool_matmul_plan_check(&plan, w[0]) == QTOOL_UNSUPPORTED, "a config for one of two");
    result(qtool_matmul_plan(&single, w[0], 1, &opt) == QTOOL_OK &&
               qtool_matmul_run_many(&single, w, 1, y, pool.x, NULL) == QTOOL_UNSUPPORTED,
           "a plan for one");
    CHECK(cudaDeviceSynchronize());
    for (size_t i = 0; i < 2; i++)
        mix24_matrix_free(&m[i]);
}

static void test_refusals(void)
{
    struct mix24_matrix m;
    struct qtool_matmul_plan plan;
    struct qtool_matmul_options opt = {0};
    struct mix24_recipe r = recipe(&kinds[0], 64, 512);
    mix24_matrix_new(&m, &r, &seed);
    struct qtool_matmul_weight w = m.weight;
    w.mix24.stream = (const char *)w.mix24.stream + 4;
    result(qtool_matmul_plan(&plan, &w, 1, &opt) == QTOOL_UNSUPPORTED && plan.reason[0], "align");
    w = m.weight;
    w.mix24.twos += 2;
    result(qtool_matmul_plan(&plan, &w, 1, &opt) == QTOOL_UNSUPPORTED && plan.reason[0], "units");
    w = m.weight;
    w.mix24.csr_val = NULL;
    result(qtool_matmul_plan(&plan, &w, 1, &opt) == QTOOL_UNSUPPORTED && plan.reason[0], "csr");
    result(qtool_matmul_plan(&plan, &m.weight, 0, &opt) == QTOOL_UNSUPPORTED, "m = 0");
    mix24_matrix_free(&m);
}

int main(int argc, char **argv)
{
    quick = check_begin(argc, argv);
    pool_new();
    int major;
    CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    test_refusals();
    if (major == 9)
        test_many_refusals();
    for (size_t i = 0; i < (quick ? 6 : 60) && major == 9; i++)
        test_many(&kinds[i % COUNT(kinds)], i % 4 ? 300 : 3000);
    for (size_t i = 0; i < COUNT(kinds); i++)
        test_kind(&kinds[i], quick ? 5 : 1, quick ? 7 : 2);
    for (size_t i = 0; i < 2; i++) { /* with outliers, and without */
        if (quick)
            test_strips(&kinds[i], 1 + random_below(14));
        for (size_t strips = 1; strips <= 10 && !quick; strips++)
            test_strips(&kinds[i], strips);
    }
    for (size_t i = 0; i < 4 && !quick; i++)
        test_large(&kinds[i]);
    return check_matmul_end(
        (const enum qtool_matmul_path[]){QTOOL_MATMUL_RING, QTOOL_MATMUL_VECTOR});
}
