/*
 * The kernels of LUT, FPX and INT weights against plain C: every scheme over edge shapes, token
 * counts, dtypes, alignments and configurations. Weights are quantized and decoded by pack/; the
 * reference is the FP64 product of the decoded weights. Outputs are filled with NaN and have guard
 * bands. Every run is made twice and must repeat bit for bit.
 *
 * usage: test_kernels [SEED [quick]]     prints "N passed, M failed, K skipped"
 * quick: few cases, for compute-sanitizer.
 */
#include "tests/gpu/check_matmul.h"
#include "tests/gpu/matrix.h"

/* ---- products ------------------------------------------------------------------------------- */

/* Sets a random configuration, of a path that depends on `variant`. */
static void vary(struct qtool_matmul_plan *p, int variant)
{
    if (variant >= 7)
        vary_skinny(p);
    else if (variant >= 5)
        vary_mma_tile(p);
    else if (variant >= 2)
        vary_tile(p);
    else
        vary_stream(p);
}

static void check_matmul(const struct qtool_matmul_weight *w, const float *decoded, size_t pitch,
                         size_t m, int bf16, const char *name)
{
    check_product(w, decoded, pitch, pool.x, m, bf16, m <= 16 ? 10 : 7, vary, name);
}

/* Checks slices as tensor parallelism uses them, at random multiples of 16 rows and of 64 channels
 * and the group, and slices of slices. */
static void check_slices(const struct matrix *m, const char *name)
{
    const struct qtool_matmul_weight *w = &m->weight;
    struct qtool_matmul_weight slice, part;
    size_t unit = w->group > 64 ? w->group : 64;
    for (int i = 0; i < 4; i++) {
        size_t n0 = random_bits() % (w->n / 16) * 16, n = 1 + random_bits() % (w->n - n0);
        size_t k0 = random_bits() % (w->k / unit) * unit, k = 1 + random_bits() % (w->k - k0);
        size_t n1 = random_bits() % ((n + 15) / 16) * 16;
        size_t k1 = random_bits() % ((k + unit - 1) / unit) * unit;
        const float *decoded = m->device_decoded + n0 * w->k + k0;
        result(qtool_matmul_slice(&slice, w, n0, n, k0, k) == QTOOL_OK, "slice");
        check_matmul(&slice, decoded, w->k, 1 + random_bits() % 40, i & 1, name);
        result(qtool_matmul_slice(&part, &slice, n1, n - n1, k1, k - k1) == QTOOL_OK,
               "slice of a slice");
        check_matmul(&part, decoded + n1 * w->k + k1, w->k, 1 + random_bits() % 40, i & 1, name);
    }
}

/* ---- cases ---------------------------------------------------------------------------------- */

static const char *const schemes[] = {
    "nf4:g=128,method=rtn",
    "nf4:g=32,method=rtn",
    "lut4:g=64",
    "nf3:g=128,method=rtn",
    "lut3:g=256",
    "nf3:g=32,method=rtn",
    "nf2:g=64,method=rtn",
    "lut2:g=256",
    "int4:g=128,method=rtn",
    "int4:g=32,method=rtn",
    "int4:g=256,zero=group,method=rtn",
    "int4:g=64,zero=group,method=rtn",
    "int4:g=32,zero=group,method=rtn",
    "int4:g=0,zero=group,method=rtn",
    "int8:method=rtn",
    "int8:g=64,method=rtn",
    "int8:g=32,zero=group,method=rtn",
    "fp6:e=3,method=rtn",
    "fp6:e=2,method=rtn",
    "fp5:e=2,method=rtn",
    "fp4:e=2,method=rtn",
    "fp7:method=rtn",
    "fp8:method=rtn",
    "fp8:e=5,method=rtn",
};
/* All other minifloats of 5 bits and more, and one with a look-up table: tested with some shapes.
 */
static const char *const rare_schemes[] = {
    "fpx:bits=3,e=1,method=rtn", "fpx:bits=5,e=1,method=rtn", "fpx:bits=5,e=3,method=rtn",
    "fpx:bits=5,e=4,method=rtn", "fpx:bits=6,e=1,method=rtn", "fpx:bits=6,e=4,method=rtn",
    "fpx:bits=6,e=5,method=rtn", "fpx:bits=7,e=1,method=rtn", "fpx:bits=7,e=2,method=rtn",
    "fpx:bits=7,e=4,method=rtn", "fpx:bits=7,e=5,method=rtn", "fpx:bits=8,e=1,method=rtn",
    "fpx:bits=8,e=2,method=rtn", "fpx:bits=8,e=3,method=rtn",
};
/* Schemes that are also tested with larger shapes. */
static const char *const main_schemes[] = {
    "nf4:g=128,method=rtn",
    "nf3:g=128,method=rtn",
    "nf2:g=128,method=rtn",
    "int4:g=128,method=rtn",
    "int4:g=128,zero=group,method=rtn",
    "int8:g=128,zero=group,method=rtn",
    "fp6:e=3,method=rtn",
    "fp6:e=2,method=rtn",
    "fp5:e=2,method=rtn",
    "fp7:method=rtn",
    "fp8:method=rtn",
};
static const size_t shapes[][2] = {{1, 1},     {15, 63},     {16, 64},  {17, 65},
                                   {31, 127},  {33, 129},    {48, 257}, {100, 1000},
                                   {272, 320}, {1040, 2048}, {400, 520}};
static const size_t tokens[] = {1,  2,  3,  4,  5,  6,  7,  8,  9,   10,  11,  12,  13,  14, 15,
                                16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257};

/* Token counts for batch-invariant products. */
static const size_t batches[] = {2048, 257, 128, 65, 64, 33, 32, 17, 16, 9, 8, 7, 1};

static void test_scheme(const char *scheme, size_t shape_step, size_t token_step)
{
    for (size_t i = shape_step - 1; i < COUNT(shapes); i += shape_step) {
        struct matrix m;
        matrix_new(&m, scheme, shapes[i][0], shapes[i][1], 0.02f);
        check_dequantize(&m.weight, m.decoded, 0, scheme);
        check_dequantize(&m.weight, m.decoded, 1, scheme);
        for (size_t j = 0; j < COUNT(tokens); j += token_step)
            check_matmul(&m.weight, m.device_decoded, m.weight.k, tokens[j], (int)(j % 4 == 1),
                         scheme);
        if (i == COUNT(shapes) - 1) {
            check_slices(&m, scheme);
            check_invariance(&m.weight, batches, COUNT(batches), 0, scheme);
            check_invariance(&m.weight, batches, COUNT(batches), 1, scheme);
        }
        matrix_free(&m);
    }
}

static void test_large(const char *scheme)
{
    static const size_t large[][2] = {{4096, 4096}, {512, 14336}, {4112, 1024}};
    static const size_t counts[] = {1, 8, 16, 32, 64, 150, 200, 511, 2048};
    for (size_t i = 0; i < COUNT(large); i++) {
        struct matrix m;
        matrix_new(&m, scheme, large[i][0], large[i][1], 0.02f);
        for (size_t j = 0; j < COUNT(counts); j++)
            check_matmul(&m.weight, m.device_decoded, m.weight.k, counts[j], (int)(j & 1), scheme);
        check_invariance(&m.weight, batches, COUNT(batches), (int)(i & 1), scheme);
        matrix_free(&m);
    }
}

/* Many runs whose pipeline wraps around more than once. A stage that is released too early changes
 * one result in some hundred runs. */
static void test_pipeline(const char *scheme, int strips_cta)
{
    enum { RUNS = 3000, M = 13 };
    const struct qtool_matmul_config c = {.path = QTOOL_MATMUL_SKINNY,
                                          .skinny = {.token_tiles = 2,
                                                     .strips = 2,
                                                     .warps = 16,
                                                     .warps_k = 8,
                                                     .strips_cta = strips_cta,
                                                     .depth = 8}};
    const struct qtool_matmul_options opt = {.dtype = QTOOL_F16};
    struct qtool_matmul_plan plan;
    struct matrix m;
    int differ = 0;
    char what[160];
    matrix_new(&m, scheme, 4096, 4096, 0.02f);
    random_x(pool.x, M * m.weight.k, 0);
    bool good = qtool_matmul_plan(&plan, &m.weight, M, &opt) == QTOOL_OK;
    plan.config = c;
    good = good && qtool_matmul_plan_check(&plan, &m.weight) == QTOOL_OK &&
           guarded_run(&plan, &m.weight, pool.x, 0, false);
    for (int i = 0; i < RUNS && good; i++) {
        good = guarded_run(&plan, &m.weight, pool.x, 1, false);
        differ += !outputs_equal(M * m.weight.n);
    }
    snprintf(what, sizeof what, "%s, %d strips: %d of %d runs differ", scheme, strips_cta, differ,
             RUNS);
    result(good && differ == 0, what);
    matrix_free(&m);
}

/* Clusters of two and four thread blocks with tiles of all sizes: parts of k of different size, and
 * missing rows and tokens. */
static void test_clusters(const char *scheme)
{
    static const size_t counts[] = {40, 136}; /* some kernels need more than 128 tokens */
    struct matrix m;
    const int bf16 = (int)random_below(2);
    struct qtool_matmul_options opt = {.dtype = bf16 ? QTOOL_BF16 : QTOOL_F16};
    int quads = 0;
    matrix_new(&m, scheme, 400, 1160, 0.02f);
    const struct qtool_matmul_weight *w = &m.weight;
    const struct product product = {pool.x, m.device_decoded, w->k, scheme};
    for (size_t t = 0; t < sizeof counts / sizeof *counts; t++) {
        struct qtool_matmul_plan plan;
        random_x(pool.x, counts[t] * w->k, bf16);
        int rc = qtool_matmul_plan(&plan, w, counts[t], &opt);
        result(rc == QTOOL_OK, "a plan");
        if (rc != QTOOL_OK)
            continue;
        expect(&product, &plan, rounding_of(&plan, w));
        for (int i = 0; i < 2 * 3 * TILE_WIDTHS; i++) {
            struct qtool_matmul_plan other = plan;
            other.config = (struct qtool_matmul_config){
                .path = QTOOL_MATMUL_TILE,
                .tile = {.warps = 8 + 4 * (i % 3),
                         .token_tiles = tile_tokens[i / 3 % TILE_WIDTHS] / 8,
                         .schedule =
                             i / (3 * TILE_WIDTHS) ? QTOOL_TILE_CLUSTER_4 : QTOOL_TILE_CLUSTER_2}};
            if (qtool_matmul_plan_check(&other, w) == QTOOL_OK) {
                check_plan(&other, w, &product);
                quads += other.config.tile.schedule == QTOOL_TILE_CLUSTER_4;
            }
        }
        quads += qtool_kernels_compute(0) != 90 ? 4 : 0;
    }
    result(quads >= 4, "clusters of four blocks");
    matrix_free(&m);
}

/* Numbers of strips per multiprocessor for which the last warp gets fewer strips, or tiles are
 * halved to give all schedulers the same number of warps. */
static void test_odd_strips(const char *scheme)
{
    static const size_t strips[] = {3, 5, 7, 10, 14};
    static const size_t small_batches[] = {16, 9, 8, 1};
    const size_t only = random_below(COUNT(strips)); /* quick: racecheck is slow here */
    int sms;
    CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    for (size_t i = 0; i < COUNT(strips); i++) {
        if (few_variants && i != only)
            continue;
        struct matrix m;
        const size_t k = few_variants || i & 1 ? 392 : 1280;
        matrix_new(&m, scheme, strips[i] * 16 * (size_t)sms - 24, k, 0.02f);
        for (size_t count = 1; count <= 16; count += 7)
            check_matmul(&m.weight, m.device_decoded, m.weight.k, count, (int)(i / 2 & 1), scheme);
        check_invariance(&m.weight, small_batches, COUNT(small_batches), (int)(i & 1), scheme);
        matrix_free(&m);
    }
}

/* Weights so small that scale_exp2 is not 0. */
static void test_scale_exp2(const char *scheme)
{
    struct matrix m;
    matrix_new(&m, scheme, 64, 200, 1e-9f);
    result(m.weight.scale_exp2 != 0, "tiny weights have a scale_exp2");
    check_matmul(&m.weight, m.device_decoded, m.weight.k, 16, 1, scheme);
    matrix_free(&m);
}

/* Refusals that need a device; the others are in test_plan.c. */
static void test_refusals(void)
{
    struct matrix m;
    struct qtool_matmul_plan plan;
    struct qtool_matmul_options opt = {0};
    matrix_new(&m, "nf4:g=128,method=rtn", 64, 256, 0.02f);
    struct qtool_matmul_weight other = m.weight;
    result(qtool_matmul_plan(&plan, &m.weight, 1, &opt) == QTOOL_OK, "plan");
    other.bits = 3;
    other.plane[1] = other.plane[0];
    result(qtool_matmul_run(&plan, &other, pool.y[0], pool.x, workspace.at, NULL) ==
               QTOOL_UNSUPPORTED,
           "run of a weight of another format than planned");
    struct matrix zero;
    struct qtool_matmul_plan zero_plan;
    matrix_new(&zero, "int4:g=128,zero=group,method=rtn", 64, 256, 0.02f);
    other = zero.weight;
    other.zero = (const char *)other.zero + 8;
    result(qtool_matmul_plan(&zero_plan, &zero.weight, 64, &opt) == QTOOL_OK &&
               (zero_plan.config.path != QTOOL_MATMUL_TILE ||
                qtool_matmul_run(&zero_plan, &other, pool.y[0], pool.x, workspace.at, NULL) ==
                    QTOOL_UNSUPPORTED),
           "run with zero-points of another alignment than planned");
    matrix_free(&zero);
    plan.config = (struct qtool_matmul_config){.path = QTOOL_MATMUL_STREAM,
                                               .stream = {.token_tiles = 1,
                                                          .strips = 1,
                                                          .warps = 4,
                                                          .warps_k = 4,
                                                          .strips_cta = 1,
                                                          .splits = 1000}};
    result(qtool_matmul_plan_check(&plan, &m.weight) == QTOOL_UNSUPPORTED && plan.reason[0],
           "too many splits");
    matrix_free(&m);
}

int main(int argc, char **argv)
{
    bool quick = check_begin(argc, argv);
    pool_new();
    few_variants = quick;
    test_refusals();
    for (size_t i = 0; i < COUNT(schemes); i++)
        test_scheme(schemes[i], quick ? 9 : 1, quick ? 9 : 1);
    for (size_t i = 0; i < COUNT(rare_schemes); i++)
        test_scheme(rare_schemes[i], quick ? 9 : 5, quick ? 9 : 1);
    for (size_t i = 0; i < COUNT(main_schemes); i++) {
        test_clusters(main_schemes[i]);
        test_odd_strips(main_schemes[i]);
    }
    for (size_t i = 0; i < COUNT(main_schemes) && !quick; i++) {
        test_large(main_schemes[i]);
        test_scale_exp2(main_schemes[i]);
        test_pipeline(main_schemes[i], 8);
        test_pipeline(main_schemes[i], 6); /* tiles of 3 strips, warps of 2 */
    }
    return check_matmul_end(
        (const enum qtool_matmul_path[]){QTOOL_MATMUL_STREAM, QTOOL_MATMUL_MMA_TILE});
}
