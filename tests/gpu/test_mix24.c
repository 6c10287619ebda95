/*
 * The mix24 kernels against FP64 products of the weights' exact values: random matrices over edge
 * shapes, shares of 4-bit groups, outliers (none, few, many, all in few rows), token counts,
 * dtypes, alignments and configurations. Outputs are poisoned with NaN and have guard bands; every
 * run is made twice and must repeat bit for bit.
 *
 * usage: test_mix24 [SEED [quick]]     prints "N passed, M failed, K skipped"
 * quick: few cases, for compute-sanitizer.
 */
#include "base/base.h"
#include "tests/gpu/mix24_matrix.h"
#include "tests/gpu/reference.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { GUARD = 64 }; /* elements before and after an output */

static int passed, failed;
static uint64_t seed;

static void result(bool ok, const char *what)
{
    if (ok) {
        passed++;
    } else {
        failed++;
        printf("FAILED %s\n", what);
    }
}

/* Buffers reused by all cases. */
static struct {
    uint16_t *x, *y[2];
    double *reference;
} pool;

static void pool_new(void)
{
    pool.x = gpu_new(64 << 20);
    pool.y[0] = gpu_new(64 << 20);
    pool.y[1] = gpu_new(64 << 20);
    pool.reference = gpu_new(256 << 20);
}

/* ---- products ------------------------------------------------------------------------------- */

static void random_x(uint16_t *to, size_t count, int bf16)
{
    uint16_t *x = malloc(count * 2);
    for (size_t i = 0; i < count; i++) {
        float v = (float)gpu_hash(seed++) * 0x1p-31f - 1;
        x[i] = bf16 ? qt_f32_to_bf16(v) : qt_f32_to_f16(v);
    }
    CHECK(cudaMemcpy(to, x, count * 2, cudaMemcpyHostToDevice));
    free(x);
}

/* Runs into y[which]; false when memory beside the output was touched. */
static bool guarded_run(const struct qt_matmul_plan *p, const struct qt_matmul_weight *w,
                        const uint16_t *x, int which)
{
    size_t count = p->m * p->n;
    uint16_t *y = pool.y[which], guards[2 * GUARD];
    CHECK(cudaMemset(y, 0xff, (count + 2 * GUARD) * 2));
    int rc = qt_matmul_run(p, w, y + GUARD, x, NULL, NULL);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(guards, y, GUARD * 2, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(guards + GUARD, y + GUARD + count, GUARD * 2, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 2 * GUARD; i++)
        if (guards[i] != 0xffff)
            return false;
    return rc == QT_MATMUL_OK;
}

static bool outputs_equal(size_t count)
{
    uint16_t *y[2];
    for (int i = 0; i < 2; i++) {
        y[i] = malloc(count * 2);
        CHECK(cudaMemcpy(y[i], pool.y[i] + GUARD, count * 2, cudaMemcpyDeviceToHost));
    }
    bool equal = memcmp(y[0], y[1], count * 2) == 0;
    free(y[0]);
    free(y[1]);
    return equal;
}

/* Whether a few rows make up most of the output, so that its rounding does not average out. */
static bool uneven;

/* Output rounding alone is 2.07e-4 on average (FP16), up to 4.9e-4 of a single value. */
static double tolerance(size_t count, int bf16)
{
    return (count >= 1000 && !uneven ? 2.3e-4 : 5.2e-4) * (bf16 ? 8 : 1);
}

static double worst_error[2];

/* Everything about one plan; the reference is in the pool. */
static void check_plan(const struct qt_matmul_plan *p, const struct qt_matmul_weight *w,
                       const uint16_t *x, const char *name)
{
    char what[320];
    size_t count = p->m * p->n;
    int bf16 = p->options.dtype == QT_MATMUL_BF16;
    const struct qt_matmul_config *c = &p->config;
    bool guards = guarded_run(p, w, x, 0) && guarded_run(p, w, x, 1);
    bool equal = outputs_equal(count);
    double e = gpu_error(pool.y[0] + GUARD, pool.reference, count, bf16);
    e = isnan(e) ? INFINITY : e;
    snprintf(what, sizeof what,
             "%s n=%zu k=%zu m=%zu %s tiles %d strips %d warps %d/%d cta %d cluster %d depth %d: "
             "error %.3g%s%s",
             name, p->n, p->k, p->m, bf16 ? "bf16" : "f16", c->token_tiles, c->strips, c->warps,
             c->warps_k, c->strips_cta, c->splits, c->depth, e, guards ? "" : " GUARDS",
             equal ? "" : " NOT REPEATABLE");
    if (count >= 1000 && !uneven)
        worst_error[bf16] = fmax(worst_error[bf16], e);
    result(guards && equal && e <= tolerance(count, bf16), what);
}

static void check_matmul(const struct qt_matmul_weight *w, const float *decoded, size_t m, int bf16,
                         int shift, const char *name)
{
    struct qt_matmul_options opt = {.dtype = bf16 ? QT_MATMUL_BF16 : QT_MATMUL_F16,
                                    .dependent_launch = (int)(gpu_hash(seed++) & 1)};
    struct qt_matmul_plan plan;
    uint16_t *x = pool.x + shift;
    random_x(x, m * w->k, bf16);
    gpu_reference(pool.reference, x, decoded, m, w->n, w->k, w->k, bf16);
    if (qt_matmul_plan(&plan, w, m, &opt) != QT_MATMUL_OK) {
        result(false, plan.reason);
        return;
    }
    check_plan(&plan, w, x, name);
    /* Other configurations than plan would choose. */
    for (int variant = 0; variant < 3; variant++) {
        struct qt_matmul_plan other = plan;
        struct qt_matmul_config *c = &other.config;
        c->splits = 1 << gpu_hash(seed++) % 4;
        c->strips = 1 + (int)(gpu_hash(seed++) % 2);
        c->warps = 1 << gpu_hash(seed++) % 5;
        c->warps_k = c->warps >> gpu_hash(seed++) % 3;
        c->depth = 2 + (int)(gpu_hash(seed++) % 3);
        c->strips_cta = 1 + (int)(gpu_hash(seed++) % 9);
        if (qt_matmul_plan_check(&other, w) == QT_MATMUL_OK)
            check_plan(&other, w, x, name);
    }
}

/* In batch-invariant mode the rows of a product have the same bits for every number of tokens. */
static void check_invariant(const struct qt_matmul_weight *w, const char *name)
{
    static const size_t counts[] = {40, 32, 16, 8, 3, 1};
    struct qt_matmul_options opt = {.dtype = QT_MATMUL_F16, .batch_invariant = 1};
    uint16_t *y[2];
    y[0] = malloc(40 * w->n * 2);
    y[1] = malloc(40 * w->n * 2);
    random_x(pool.x, 40 * w->k, 0);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        struct qt_matmul_plan plan;
        char what[160];
        bool ok = qt_matmul_plan(&plan, w, counts[i], &opt) == QT_MATMUL_OK &&
                  guarded_run(&plan, w, pool.x, 0);
        CHECK(
            cudaMemcpy(y[i > 0], pool.y[0] + GUARD, counts[i] * w->n * 2, cudaMemcpyDeviceToHost));
        ok = ok && (i == 0 || memcmp(y[0], y[1], counts[i] * w->n * 2) == 0);
        snprintf(what, sizeof what, "%s n=%zu k=%zu batch-invariant: m=%zu", name, w->n, w->k,
                 counts[i]);
        result(ok, what);
    }
    free(y[0]);
    free(y[1]);
}

static void check_dequantize(const struct mix24_matrix *m, int bf16, const char *name)
{
    size_t count = m->weight.n * m->weight.k, bad = 0;
    uint16_t *got = malloc(count * 2);
    char what[160];
    CHECK(cudaMemset(pool.y[0], 0xff, count * 2));
    int rc =
        qt_matmul_dequantize(&m->weight, pool.y[0], bf16 ? QT_MATMUL_BF16 : QT_MATMUL_F16, NULL);
    CHECK(cudaMemcpy(got, pool.y[0], count * 2, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < count; i++) {
        float v = m->decoded[i];
        uint16_t expected = bf16 ? qt_f32_to_bf16(v) : qt_f32_to_f16(v);
        bad += got[i] != expected && !((got[i] | expected) == 0x8000); /* -0 is 0 */
    }
    snprintf(what, sizeof what, "%s n=%zu k=%zu dequantize %s: %zu of %zu differ", name,
             m->weight.n, m->weight.k, bf16 ? "bf16" : "f16", bad, count);
    result(rc == QT_MATMUL_OK && bad == 0, what);
    free(got);
}

static void check_slices(const struct mix24_matrix *m, const char *name)
{
    struct qt_matmul_weight slice;
    size_t n0 = 32, n = m->weight.n - n0 - 3, k = m->weight.k;
    result(qt_matmul_slice(&slice, &m->weight, n0, n, 0, k) == QT_MATMUL_OK, "slice");
    check_matmul(&slice, m->device_decoded + n0 * k, 5, 0, 0, name);
    result(qt_matmul_slice(&slice, &m->weight, 8, 16, 0, k) == QT_MATMUL_UNSUPPORTED,
           "slice of rows 8...");
    result(qt_matmul_slice(&slice, &m->weight, 0, 16, 64, k - 64) == QT_MATMUL_UNSUPPORTED,
           "slice of columns");
}

/* ---- cases ---------------------------------------------------------------------------------- */

#define COUNT(a) (sizeof(a) / sizeof *(a))

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
static const size_t tokens[] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11,
                                12, 13, 14, 15, 16, 17, 31, 32, 33, 100};

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
    uneven = kind->skewed;
    return r;
}

static void test_kind(const struct kind *kind, size_t shape_step, size_t token_step)
{
    for (size_t i = shape_step - 1; i < COUNT(shapes); i += shape_step) {
        struct mix24_matrix m;
        struct mix24_recipe r = recipe(kind, shapes[i][0], shapes[i][1]);
        mix24_matrix_new(&m, &r, &seed);
        check_dequantize(&m, 0, kind->name);
        check_dequantize(&m, 1, kind->name);
        for (size_t j = 0; j < COUNT(tokens); j += token_step) {
            uint32_t dice = gpu_hash(seed++);
            check_matmul(&m.weight, m.device_decoded, tokens[j], dice % 3 == 0, dice / 3 % 5 == 0,
                         kind->name);
        }
        if (shapes[i][0] > 80) {
            check_slices(&m, kind->name);
            check_invariant(&m.weight, kind->name);
        }
        mix24_matrix_free(&m);
    }
}

static void test_large(const struct kind *kind)
{
    static const size_t large[][2] = {{4096, 4096}, {512, 14336}, {48, 28672}, {40, 70000}};
    static const size_t counts[] = {1, 7, 8, 16, 32};
    for (size_t i = 0; i < COUNT(large); i++) {
        struct mix24_matrix m;
        struct mix24_recipe r = recipe(kind, large[i][0], large[i][1]);
        mix24_matrix_new(&m, &r, &seed);
        for (size_t j = 0; j < COUNT(counts); j++)
            check_matmul(&m.weight, m.device_decoded, counts[j], (int)(j % 3 == 1), 0, kind->name);
        mix24_matrix_free(&m);
    }
}

static void test_refusals(void)
{
    struct mix24_matrix m;
    struct qt_matmul_plan plan;
    struct qt_matmul_options opt = {0};
    struct mix24_recipe r = recipe(&kinds[0], 64, 512);
    mix24_matrix_new(&m, &r, &seed);
    struct qt_matmul_weight w = m.weight;
    w.mix24.stream = (const char *)w.mix24.stream + 4;
    result(qt_matmul_plan(&plan, &w, 1, &opt) == QT_MATMUL_UNSUPPORTED && plan.reason[0], "align");
    w = m.weight;
    w.mix24.twos += 2;
    result(qt_matmul_plan(&plan, &w, 1, &opt) == QT_MATMUL_UNSUPPORTED && plan.reason[0], "units");
    w = m.weight;
    w.mix24.csr_val = NULL;
    result(qt_matmul_plan(&plan, &w, 1, &opt) == QT_MATMUL_UNSUPPORTED && plan.reason[0], "csr");
    result(qt_matmul_plan(&plan, &m.weight, 0, &opt) == QT_MATMUL_UNSUPPORTED, "m = 0");
    mix24_matrix_free(&m);
}

int main(int argc, char **argv)
{
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("SKIP: no CUDA device, the GPU tests did not run\n"
               "0 passed, 0 failed, 1 skipped\n");
        return 0;
    }
    seed = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL) << 20;
    bool quick = argc > 2 && strcmp(argv[2], "quick") == 0;
    printf("seed %llu\n", (unsigned long long)seed);
    pool_new();
    test_refusals();
    for (size_t i = 0; i < COUNT(kinds); i++)
        test_kind(&kinds[i], quick ? 5 : 1, quick ? 7 : 1);
    for (size_t i = 0; i < 4 && !quick; i++)
        test_large(&kinds[i]);
    printf("worst relative error: f16 %.3g, bf16 %.3g\n", worst_error[0], worst_error[1]);
    printf("%d passed, %d failed, 0 skipped\n", passed, failed);
    return failed != 0;
}
