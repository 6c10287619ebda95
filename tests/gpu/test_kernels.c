/*
 * Kernels against the plain C truth: every scheme over edge shapes, token counts, dtypes, copy
 * paths and configurations. Weights are quantized and decoded by pack/; products of the decoded
 * weights are taken in FP64. Outputs are poisoned with NaN and have guard bands; every run is made
 * twice and must repeat bit for bit.
 *
 * usage: test_kernels [SEED [quick]]     prints "N passed, M failed, K skipped"
 * quick: few cases, for compute-sanitizer.
 */
#include "kernels/qtool_kernels.h"
#include "tests/gpu/reference.h"
#include "verify/verify.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { GUARD = 64 }; /* elements before and after an output */
#define COUNT(a) (sizeof(a) / sizeof *(a))

static int passed, failed, skipped;
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

static float random_float(void)
{
    return (float)gpu_hash(seed++) * 0x1p-31f - 1;
}

/* ---- a matrix on both sides ----------------------------------------------------------------- */

struct matrix {
    struct qt_packed packed;
    struct qt_matmul_weight weight; /* device */
    float *decoded;                 /* host [n][k] */
    float *device_decoded;
};

static struct qt_matmul_weight upload(const struct qt_packed *p)
{
    const void *section[QT_MAX_SECTIONS];
    struct qt_matmul_weight w;
    struct qt_err err = {0};
    for (size_t i = 0; i < p->nsections; i++) {
        void *d = gpu_new(p->section[i].bytes);
        CHECK(cudaMemcpy(d, p->section[i].data, p->section[i].bytes, cudaMemcpyHostToDevice));
        section[i] = d;
    }
    if (qt_gpu_weight(&w, p, section, &err) < 0) {
        printf("%s: %s\n", p->spec.text, err.reason);
        exit(1);
    }
    return w;
}

static void matrix_new(struct matrix *m, const char *scheme, size_t n, size_t k, float size)
{
    struct qt_err err = {0};
    struct qt_spec spec;
    float *w = malloc(n * k * sizeof *w);
    for (size_t i = 0; i < n * k; i++)
        w[i] = size * (random_float() + random_float() + random_float());
    struct qt_matrix source = {w, QT_F32, n, k, "test", scheme};
    m->decoded = malloc(n * k * sizeof *m->decoded);
    if (qt_spec_parse(&spec, scheme, &err) < 0 ||
        qt_packed_quantize(&m->packed, &spec, &source, NULL, NULL, &err) < 0 ||
        qt_packed_decode(m->decoded, &m->packed, 0, n, &err) < 0) {
        printf("%s: %s\n", scheme, err.reason);
        exit(1);
    }
    free(w);
    m->weight = upload(&m->packed);
    m->device_decoded = gpu_new(n * k * 4);
    CHECK(cudaMemcpy(m->device_decoded, m->decoded, n * k * 4, cudaMemcpyHostToDevice));
}

static void matrix_free(struct matrix *m)
{
    for (int i = 0; i < 3; i++)
        CHECK(cudaFree((void *)m->weight.plane[i]));
    CHECK(cudaFree((void *)m->weight.scale));
    CHECK(cudaFree((void *)m->weight.table));
    CHECK(cudaFree(m->device_decoded));
    qt_packed_free(&m->packed);
    free(m->decoded);
}

/* ---- products ------------------------------------------------------------------------------- */

/* Buffers reused by all cases. */
static struct {
    void *x, *y[2], *workspace;
    double *reference;
    size_t x_bytes, y_bytes, workspace_bytes;
} pool;

static void pool_new(void)
{
    pool.x_bytes = pool.y_bytes = 64 << 20;
    pool.workspace_bytes = 256 << 20;
    pool.x = gpu_new(pool.x_bytes);
    pool.y[0] = gpu_new(pool.y_bytes);
    pool.y[1] = gpu_new(pool.y_bytes);
    pool.workspace = gpu_new(pool.workspace_bytes);
    CHECK(cudaMemset(pool.workspace, 0, pool.workspace_bytes));
    pool.reference = gpu_new(pool.y_bytes * 4);
}

static void random_x(size_t count, int bf16)
{
    uint16_t *x = malloc(count * 2);
    for (size_t i = 0; i < count; i++) {
        float v = random_float();
        x[i] = bf16 ? qt_f32_to_bf16(v) : qt_f32_to_f16(v);
    }
    CHECK(cudaMemcpy(pool.x, x, count * 2, cudaMemcpyHostToDevice));
    free(x);
}

/* Runs into y[which]; false when memory beside the output was touched. */
static bool guarded_run(const struct qt_matmul_plan *p, const struct qt_matmul_weight *w, int which)
{
    size_t count = p->m * p->n;
    uint16_t *y = (uint16_t *)pool.y[which], guards[2 * GUARD];
    CHECK(cudaMemset(y, 0xff, (count + 2 * GUARD) * 2));
    int rc = qt_matmul_run(p, w, y + GUARD, pool.x, pool.workspace, NULL);
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
        CHECK(cudaMemcpy(y[i], (uint16_t *)pool.y[i] + GUARD, count * 2, cudaMemcpyDeviceToHost));
    }
    bool equal = memcmp(y[0], y[1], count * 2) == 0;
    free(y[0]);
    free(y[1]);
    return equal;
}

static double output_error(size_t count, int bf16)
{
    double e = gpu_error((uint16_t *)pool.y[0] + GUARD, pool.reference, count, bf16);
    return isnan(e) ? INFINITY : e;
}

/* Output rounding alone is 2.07e-4 on average (FP16), up to 4.9e-4 of a single value. */
static double tolerance(size_t count, int bf16)
{
    return (count >= 1000 ? 2.3e-4 : 5.2e-4) * (bf16 ? 8 : 1);
}

static double worst_error[2];

/* Everything about one plan; x and the reference are in the pool. */
static void check_plan(const struct qt_matmul_plan *p, const struct qt_matmul_weight *w,
                       const char *name)
{
    char what[320];
    size_t count = p->m * p->n;
    int bf16 = p->options.dtype == QT_MATMUL_BF16;
    const struct qt_matmul_config *c = &p->config;
    if (p->workspace_bytes > pool.workspace_bytes) {
        printf("SKIPPED %s: %zu bytes of workspace\n", name, p->workspace_bytes);
        skipped++;
        return;
    }
    bool guards = guarded_run(p, w, 0) && guarded_run(p, w, 1);
    bool equal = outputs_equal(count);
    double e = output_error(count, bf16);
    snprintf(what, sizeof what,
             "%s n=%zu k=%zu m=%zu %s %s: tiles %d strips %d warps %d/%d cta %d splits %d: "
             "error %.3g%s%s",
             name, p->n, p->k, p->m, bf16 ? "bf16" : "f16",
             c->path == QT_MATMUL_TILE ? "tile" : "stream", c->token_tiles, c->strips, c->warps,
             c->warps_k, c->strips_cta, c->splits, e, guards ? "" : " GUARDS",
             equal ? "" : " NOT REPEATABLE");
    if (count >= 1000)
        worst_error[bf16] = fmax(worst_error[bf16], e);
    result(guards && equal && e <= tolerance(count, bf16), what);
}

/* Another configuration than plan would choose. */
static void other_config(struct qt_matmul_config *c, enum qt_matmul_path path)
{
    bool tile = path == QT_MATMUL_TILE;
    c->path = path;
    c->splits = 1 + (int)(gpu_hash(seed++) % (tile ? 2 : 4));
    c->warps = tile ? 8 + 4 * (int)(gpu_hash(seed++) % 3) : 1 << gpu_hash(seed++) % 5;
    c->warps_k = 1 << gpu_hash(seed++) % 5;
    c->warps_k = c->warps_k > c->warps ? c->warps : c->warps_k;
    c->strips_cta = 1 + (int)(gpu_hash(seed++) % 9);
    if (tile)
        c->token_tiles = 2 << gpu_hash(seed++) % 5;
    else if (c->token_tiles > 4)
        c->token_tiles = 4;
    if (c->token_tiles == 4)
        c->strips = 1;
}

static void check_matmul(const struct qt_matmul_weight *w, const float *decoded, size_t pitch,
                         size_t m, int bf16, const char *name)
{
    const struct qt_matmul_options opt = {.dtype = bf16 ? QT_MATMUL_BF16 : QT_MATMUL_F16,
                                          .dependent_launch = gpu_hash(seed++) & 1};
    struct qt_matmul_plan plan;
    random_x(m * w->k, bf16);
    gpu_reference(pool.reference, pool.x, decoded, m, w->n, w->k, pitch, bf16);
    if (qt_matmul_plan(&plan, w, m, &opt) != QT_MATMUL_OK) {
        result(false, plan.reason);
        return;
    }
    check_plan(&plan, w, name);
    for (int variant = 0; variant < 4; variant++) {
        struct qt_matmul_plan other = plan;
        other_config(&other.config, variant < 2 ? QT_MATMUL_STREAM : QT_MATMUL_TILE);
        if (qt_matmul_plan_check(&other, w) == QT_MATMUL_OK)
            check_plan(&other, w, name);
    }
}

static void check_dequantize(const struct matrix *m, int bf16, const char *name)
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

/* Slices as tensor parallelism cuts them, at random multiples of 16 rows and of 64 channels and the
 * group; a slice of a slice. */
static void check_slices(const struct matrix *m, const char *name)
{
    const struct qt_matmul_weight *w = &m->weight;
    struct qt_matmul_weight slice, part;
    size_t unit = w->group > 64 ? w->group : 64;
    for (int i = 0; i < 4; i++) {
        size_t n0 = gpu_hash(seed++) % (w->n / 16) * 16, n = 1 + gpu_hash(seed++) % (w->n - n0);
        size_t k0 = gpu_hash(seed++) % (w->k / unit) * unit, k = 1 + gpu_hash(seed++) % (w->k - k0);
        size_t n1 = gpu_hash(seed++) % ((n + 15) / 16) * 16;
        size_t k1 = gpu_hash(seed++) % ((k + unit - 1) / unit) * unit;
        const float *decoded = m->device_decoded + n0 * w->k + k0;
        result(qt_matmul_slice(&slice, w, n0, n, k0, k) == QT_MATMUL_OK, "slice");
        check_matmul(&slice, decoded, w->k, 1 + gpu_hash(seed++) % 40, i & 1, name);
        result(qt_matmul_slice(&part, &slice, n1, n - n1, k1, k - k1) == QT_MATMUL_OK,
               "slice of a slice");
        check_matmul(&part, decoded + n1 * w->k + k1, w->k, 1 + gpu_hash(seed++) % 40, i & 1, name);
    }
}

/* In batch-invariant mode the rows of a product have the same bits for every number of tokens. */
static void check_invariance(const struct matrix *m, int bf16, const char *name)
{
    static const size_t counts[] = {2048, 257, 128, 65, 64, 33, 32, 17, 16, 9, 8, 7, 1};
    struct qt_matmul_options opt = {.dtype = bf16 ? QT_MATMUL_BF16 : QT_MATMUL_F16,
                                    .batch_invariant = 1};
    const struct qt_matmul_weight *w = &m->weight;
    struct qt_matmul_plan plan;
    char what[200];
    random_x(counts[0] * w->k, bf16);
    for (size_t i = 0; i < COUNT(counts); i++) {
        bool good = qt_matmul_plan(&plan, w, counts[i], &opt) == QT_MATMUL_OK &&
                    plan.workspace_bytes <= pool.workspace_bytes &&
                    guarded_run(&plan, w, i ? 1 : 0) && (i == 0 || outputs_equal(counts[i] * w->n));
        snprintf(what, sizeof what, "%s n=%zu k=%zu %s batch-invariant: m=%zu %s", name, w->n, w->k,
                 bf16 ? "bf16" : "f16", counts[i], plan.reason);
        result(good, what);
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
    "fp6:e=3,method=rtn",
    "fp6:e=2,method=rtn",
    "fp5:e=2,method=rtn",
    "fp4:e=2,method=rtn",
    "fpx:bits=3,e=1,method=rtn",
    "fpx:bits=5,e=3,method=rtn",
    "fpx:bits=6,e=1,method=rtn",
    "fpx:bits=7,e=3,method=rtn",
    "fpx:bits=8,e=4,method=rtn",
    "fpx:bits=8,e=5,method=rtn",
};
/* Also at larger shapes. */
static const char *const main_schemes[] = {
    "nf4:g=128,method=rtn", "nf3:g=128,method=rtn", "nf2:g=128,method=rtn", "int4:g=128,method=rtn",
    "fp6:e=3,method=rtn",   "fp6:e=2,method=rtn",   "fp5:e=2,method=rtn",
};
static const size_t shapes[][2] = {{1, 1},    {15, 63},  {16, 64},    {17, 65},   {31, 127},
                                   {33, 129}, {48, 257}, {100, 1000}, {272, 320}, {1040, 2048}};
static const size_t tokens[] = {1,  2,  3,  4,  5,  6,  7,  8,  9,   10,  11,  12,  13,  14, 15,
                                16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257};

static void test_scheme(const char *scheme, size_t shape_step, size_t token_step)
{
    for (size_t i = shape_step - 1; i < COUNT(shapes); i += shape_step) {
        struct matrix m;
        matrix_new(&m, scheme, shapes[i][0], shapes[i][1], 0.02f);
        check_dequantize(&m, 0, scheme);
        check_dequantize(&m, 1, scheme);
        for (size_t j = 0; j < COUNT(tokens); j += token_step)
            check_matmul(&m.weight, m.device_decoded, m.weight.k, tokens[j], (int)(j % 4 == 1),
                         scheme);
        if (i == COUNT(shapes) - 1) {
            check_slices(&m, scheme);
            check_invariance(&m, 0, scheme);
            check_invariance(&m, 1, scheme);
        }
        matrix_free(&m);
    }
}

static void test_large(const char *scheme)
{
    static const size_t large[][2] = {{4096, 4096}, {512, 14336}, {4112, 1024}};
    static const size_t counts[] = {1, 8, 16, 32, 64, 200, 511, 2048};
    for (size_t i = 0; i < COUNT(large); i++) {
        struct matrix m;
        matrix_new(&m, scheme, large[i][0], large[i][1], 0.02f);
        for (size_t j = 0; j < COUNT(counts); j++)
            check_matmul(&m.weight, m.device_decoded, m.weight.k, counts[j], (int)(j & 1), scheme);
        check_invariance(&m, (int)(i & 1), scheme);
        matrix_free(&m);
    }
}

/* Weights so small that scales need a common power of two. */
static void test_scale_exp2(const char *scheme)
{
    struct matrix m;
    matrix_new(&m, scheme, 64, 200, 1e-9f);
    result(m.weight.scale_exp2 != 0, "tiny weights have a scale_exp2");
    check_matmul(&m.weight, m.device_decoded, m.weight.k, 16, 1, scheme);
    matrix_free(&m);
}

/* What only shows with a device; the other refusals are in test_plan.c. */
static void test_refusals(void)
{
    struct matrix m;
    struct qt_matmul_plan plan;
    struct qt_matmul_options opt = {0};
    matrix_new(&m, "nf4:g=128,method=rtn", 64, 256, 0.02f);
    struct qt_matmul_weight other = m.weight;
    result(qt_matmul_plan(&plan, &m.weight, 1, &opt) == QT_MATMUL_OK, "plan");
    other.bits = 3;
    other.plane[1] = other.plane[0];
    result(qt_matmul_run(&plan, &other, pool.y[0], pool.x, pool.workspace, NULL) ==
               QT_MATMUL_UNSUPPORTED,
           "run of another weight than planned");
    plan.config.splits = 1000;
    result(qt_matmul_plan_check(&plan, &m.weight) == QT_MATMUL_UNSUPPORTED && plan.reason[0],
           "too many splits");
    matrix_free(&m);
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
    for (size_t i = 0; i < COUNT(schemes); i++)
        test_scheme(schemes[i], quick ? 5 : i < 14 ? 1 : 3, quick ? 8 : 1);
    for (size_t i = 0; i < COUNT(main_schemes) && !quick; i++) {
        test_large(main_schemes[i]);
        test_scale_exp2(main_schemes[i]);
    }
    printf("worst relative error: f16 %.3g, bf16 %.3g\n", worst_error[0], worst_error[1]);
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed != 0;
}
