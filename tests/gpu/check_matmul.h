/* Products of qt_matmul kernels, checked: outputs and workspace are poisoned with NaN and have
 * guard bands, every run is made twice and must repeat bit for bit; dependent launches now and then
 * behind a kernel that still writes X. */
#ifndef QT_TESTS_GPU_CHECK_MATMUL_H
#define QT_TESTS_GPU_CHECK_MATMUL_H

#include "kernels/include/qtool_kernels.h"
#include "tests/gpu/check.h"
#include "tests/gpu/tile_tokens.h"

#include <math.h>

enum { GUARD = 64 };             /* elements before and after an output */
static size_t output_at = GUARD; /* which is aligned to 2, 4, 8 or 16 bytes: check_plan */

/* x [m][k] and weights [n][pitch] of a product, both on the device. */
struct product {
    const uint16_t *x;
    const float *decoded;
    size_t pitch;
    const char *name;
};

/* Device buffers reused by all cases. */
static struct {
    uint16_t *x, *late_x, *y[2];
    double *reference;
    struct gpu_rounding rounding; /* of the reference's weights */
} pool;

enum { LATE_X = 4 << 20 }; /* values that are written late, at most */

static double worst_error[2], worst_beyond[2]; /* FP16, BF16: all, and beyond rounding */
static bool few_others; /* of the other configurations, one in three: for compute-sanitizer */
static const char *const path_names[] = {"stream", "skinny", "tile", "dense", "mma tile", "vector"};
static int checked[COUNT(path_names)], checked_late; /* plans, by their path */
static inline void pool_new(void)
{
    enum { OUTPUT = 64 << 20 };
    workspace_new(256 << 20);
    pool.x = gpu_alloc(OUTPUT);
    pool.late_x = gpu_alloc(LATE_X * 2);
    pool.y[0] = gpu_alloc(OUTPUT);
    pool.y[1] = gpu_alloc(OUTPUT);
    pool.reference = gpu_alloc((size_t)OUTPUT * 4);
}

static inline void random_x(uint16_t *to, size_t count, int bf16)
{
    uint16_t *x = malloc(count * 2);
    for (size_t i = 0; i < count; i++)
        x[i] = from_float(random_float(), bf16);
    CHECK(cudaMemcpy(to, x, count * 2, cudaMemcpyHostToDevice));
    free(x);
}

/* Runs into y[which]; false when memory beside the output or the workspace was touched. late: X is
 * written elsewhere first, and not complete when a dependent launch begins. */
static inline bool guarded_run(const struct qtool_matmul_plan *p,
                               const struct qtool_matmul_weight *w, const uint16_t *x, int which,
                               bool late)
{
    size_t count = p->m * p->n, shift = (size_t)(x - pool.x);
    uint16_t *y = pool.y[which], guards[2 * GUARD];
    void *space = workspace_of(p->workspace_bytes);
    CHECK(cudaMemset(y, 0xff, (output_at + count + GUARD) * 2));
    if (late) {
        CHECK(cudaMemset(pool.late_x, 0xff, LATE_X * 2));
        gpu_write_late(pool.late_x + shift, x, p->m * p->k);
        x = pool.late_x + shift;
    }
    int rc = qtool_matmul_run(p, w, y + output_at, x, space, NULL);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    y += output_at;
    if (!workspace_kept(p->workspace_bytes))
        return false;
    CHECK(cudaMemcpy(guards, y - GUARD, GUARD * 2, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(guards + GUARD, y + count, GUARD * 2, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 2 * GUARD; i++)
        if (guards[i] != 0xffff)
            return false;
    return rc == QTOOL_OK;
}

static inline bool outputs_equal(size_t count)
{
    void *y[2];
    for (int i = 0; i < 2; i++)
        y[i] = download(pool.y[i] + output_at, count * 2);
    bool equal = memcmp(y[0], y[1], count * 2) == 0;
    free(y[0]);
    free(y[1]);
    return equal;
}

/*
 * Of a relative error, what the rounding of outputs does not explain. FP16: with the 2.07e-4 that
 * rounding is on average 1e-4 makes 2.3e-4. BF16: more, as outputs on the other side of the middle
 * between two numbers change what rounding explains. Few outputs can all be small differences of
 * large products.
 */
static inline double tolerance(size_t count, int bf16)
{
    return (count >= 1000 ? 1e-4 : 4.7e-4) * (bf16 ? 2 : 1);
}

static inline double beyond_rounding(struct gpu_error e)
{
    return e.all > e.rounding ? sqrt(e.all * e.all - e.rounding * e.rounding) : 0;
}

/* What the plan rounds weights to. */
static inline struct gpu_rounding rounding_of(const struct qtool_matmul_plan *p,
                                              const struct qtool_matmul_weight *w)
{
    struct gpu_rounding r = {0, 0};
    if (p->rounded)
        r = p->config.path == QTOOL_MATMUL_DENSE
                ? (struct gpu_rounding){1, p->options.dtype == QTOOL_BF16}
                : (struct gpu_rounding){ldexp(1, w->scale_exp2 + p->rounded_exp2), 0};
    return r;
}

static inline void expect(const struct product *product, const struct qtool_matmul_plan *p,
                          struct gpu_rounding rounding)
{
    gpu_reference(pool.reference, product->x, product->decoded, p->m, p->n, p->k, product->pitch,
                  p->options.dtype == QTOOL_BF16, rounding);
    pool.rounding = rounding;
}

/* Everything about one plan of the product; the reference in the pool may be that of the other
 * paths. */
static inline void check_plan(const struct qtool_matmul_plan *p,
                              const struct qtool_matmul_weight *w, const struct product *product)
{
    const char *name = product->name;
    char what[320];
    size_t count = p->m * p->n;
    int bf16 = p->options.dtype == QTOOL_BF16;
    const struct qtool_matmul_config *c = &p->config;
    if (p->workspace_bytes > workspace.bytes) {
        printf("SKIPPED %s: %zu bytes of workspace\n", name, p->workspace_bytes);
        skipped++;
        return;
    }
    static const size_t shifts[] = {0, 0, 0, 1, 2, 4};
    output_at = GUARD + shifts[random_below(sizeof shifts / sizeof *shifts)];
    const struct gpu_rounding rounding = rounding_of(p, w);
    if (pool.rounding.unit != rounding.unit || pool.rounding.bf16 != rounding.bf16)
        expect(product, p, rounding);
    const bool late = p->options.dependent_launch && p->m * p->k + 8 <= LATE_X && !random_below(4);
    bool guards = guarded_run(p, w, product->x, 0, false) && guarded_run(p, w, product->x, 1, late);
    bool equal = outputs_equal(count);
    const struct gpu_error e = gpu_error_of(pool.y[0] + output_at, pool.reference, count, bf16);
    snprintf(what, sizeof what,
             "%s n=%zu k=%zu m=%zu %s %s: tiles %d strips %d warps %d/%d cta %d splits %d "
             "depth %d parts %d, y at %zu: error %.3g, rounding %.3g%s%s",
             name, p->n, p->k, p->m, bf16 ? "bf16" : "f16", path_names[c->path], c->token_tiles,
             c->strips, c->warps, c->warps_k, c->strips_cta, c->splits, c->depth, c->parts,
             output_at % 8 * 2, e.all, e.rounding, guards ? "" : " GUARDS",
             equal  ? ""
             : late ? " NOT REPEATABLE BEHIND A LATE X"
                    : " NOT REPEATABLE");
    checked[c->path]++;
    checked_late += late;
    if (count >= 1000 && c->path != QTOOL_MATMUL_DENSE) {
        worst_error[bf16] = worse(worst_error[bf16], e.all);
        worst_beyond[bf16] = worse(worst_beyond[bf16], beyond_rounding(e));
    }
    result(guards && equal && beyond_rounding(e) <= tolerance(count, bf16), what);
}

/* Another configuration of a skinny kernel. */
static inline void vary_skinny(struct qtool_matmul_config *c)
{
    int warps_n = 1 << random_below(4), step;
    c->path = QTOOL_MATMUL_SKINNY;
    c->strips = 1 << random_below(3);
    c->warps_k = 16 / warps_n >> (warps_n < 8 ? random_below(2) : 0);
    c->warps = c->warps_k * warps_n;
    c->splits = 1;
    c->parts = 1;
    c->strips_cta = 1 + (int)random_below((size_t)(3 * warps_n * c->strips));
    step = c->warps_k / 2;
    c->depth = step * (1 + (int)random_below((size_t)(12 / step)));
}

/* Another configuration of a tile kernel. */
static inline void vary_tile(struct qtool_matmul_config *c)
{
    c->path = QTOOL_MATMUL_TILE;
    c->splits = 1 + (int)random_below(4);
    c->warps = 8 + 4 * (int)random_below(3);
    c->token_tiles = tile_tokens[random_below(TILE_WIDTHS)] / 8;
}

static inline void vary_mma_tile(struct qtool_matmul_config *c)
{
    static const struct qtool_matmul_config kinds[] = {
        {.warps = 8, .strips = 2, .strips_cta = 16, .token_tiles = 8},
        {.warps = 8, .strips = 2, .strips_cta = 8, .token_tiles = 16},
        {.warps = 8, .strips = 4, .strips_cta = 16, .token_tiles = 16},
        {.warps = 8, .strips = 2, .strips_cta = 16, .token_tiles = 4},
    };
    *c = kinds[random_below(COUNT(kinds))];
    c->path = QTOOL_MATMUL_MMA_TILE;
    c->splits = 1 + (int)random_below(4);
}

/* The configurations that plan chooses, for the device and as for an older one, and `others` made
 * by `vary` where plan_check takes them. x: in the pool; decoded: device, [n][pitch]. */
static inline void check_product(const struct qtool_matmul_weight *w, const float *decoded,
                                 size_t pitch, uint16_t *x, size_t m, int bf16, int others,
                                 void (*vary)(struct qtool_matmul_config *c, int variant),
                                 const char *name)
{
    static const int older[] = {80, 86, 89};
    struct qtool_matmul_options opt = {.dtype = bf16 ? QTOOL_BF16 : QTOOL_F16,
                                       .dependent_launch = (int)(random_bits() & 1),
                                       .dense = gpu_dense};
    struct qtool_matmul_plan plan, older_plan;
    const struct product product = {x, decoded, pitch, name};
    random_x(x, m * w->k, bf16);
    opt.compute = 0;
    int rc = qtool_matmul_plan(&plan, w, m, &opt);
    opt.compute = older[random_below(COUNT(older))];
    older_plan = plan;
    if (rc == QTOOL_OK && w->kind != QTOOL_MATMUL_MIX24)
        rc = qtool_matmul_plan(&older_plan, w, m, &opt);
    if (rc != QTOOL_OK) {
        result(false, plan.reason[0] ? plan.reason : older_plan.reason);
        return;
    }
    expect(&product, &plan, rounding_of(&plan, w));
    if (w->kind != QTOOL_MATMUL_MIX24)
        check_plan(&older_plan, w, &product);
    check_plan(&plan, w, &product);
    for (int i = 0; i <= others; i++) {
        struct qtool_matmul_plan other = plan;
        if (few_others && random_below(3))
            continue;
        if (i < others)
            vary(&other.config, i);
        else
            other.config = (struct qtool_matmul_config){.path = QTOOL_MATMUL_DENSE,
                                                        .parts = 1 + (int)random_below(3)};
        if (qtool_matmul_plan_check(&other, w) == QTOOL_OK)
            check_plan(&other, w, &product);
    }
}

/* In batch-invariant mode the rows of a product have the same bits for every number of tokens;
 * count[0] is the largest. */
static inline void check_invariance(const struct qtool_matmul_weight *w, const size_t *count,
                                    size_t counts, int bf16, const char *name)
{
    struct qtool_matmul_options opt = {.dtype = bf16 ? QTOOL_BF16 : QTOOL_F16,
                                       .batch_invariant = 1};
    struct qtool_matmul_plan plan;
    char what[320];
    random_x(pool.x, count[0] * w->k, bf16);
    for (size_t i = 0; i < counts; i++) {
        bool good = qtool_matmul_plan(&plan, w, count[i], &opt) == QTOOL_OK &&
                    plan.workspace_bytes <= workspace.bytes &&
                    guarded_run(&plan, w, pool.x, i > 0, false) &&
                    (i == 0 || outputs_equal(count[i] * w->n));
        snprintf(what, sizeof what, "%s n=%zu k=%zu %s batch-invariant: m=%zu %s", name, w->n, w->k,
                 bf16 ? "bf16" : "f16", count[i], plan.reason);
        result(good, what);
    }
}

/* decoded: host. */
static inline void check_dequantize(const struct qtool_matmul_weight *w, const float *decoded,
                                    int bf16, const char *name)
{
    size_t count = w->n * w->k, bad = 0;
    char what[160];
    CHECK(cudaMemset(pool.y[0], 0xff, (count + 2 * GUARD) * 2));
    int rc = qtool_matmul_dequantize(w, pool.y[0] + GUARD, bf16 ? QTOOL_BF16 : QTOOL_F16, NULL);
    uint16_t *all = download(pool.y[0], (count + 2 * GUARD) * 2), *got = all + GUARD;
    for (size_t i = 0; i < count; i++) {
        uint16_t expected = from_float(decoded[i], bf16);
        bad += got[i] != expected && !((got[i] | expected) == 0x8000); /* -0 is 0 */
    }
    for (size_t i = 0; i < GUARD; i++)
        bad += all[i] != 0xffff || got[count + i] != 0xffff;
    snprintf(what, sizeof what, "%s n=%zu k=%zu dequantize %s: %zu of %zu differ", name, w->n, w->k,
             bf16 ? "bf16" : "f16", bad, count);
    result(rc == QTOOL_OK && bad == 0, what);
    free(all);
}

/* own: the path that this program's weights have on compute capability 9.0, beside those of all. */
static inline int check_matmul_end(enum qtool_matmul_path own)
{
    static const enum qtool_matmul_path all[] = {QTOOL_MATMUL_STREAM, QTOOL_MATMUL_SKINNY,
                                                 QTOOL_MATMUL_TILE, QTOOL_MATMUL_DENSE};
    int major;
    CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    for (size_t i = 0; i < COUNT(path_names); i++)
        printf("%s%s %d", i ? ", " : "plans checked: ", path_names[i], checked[i]);
    printf("; behind a late X %d\n", checked_late);
    for (size_t i = 0; i < COUNT(all) && major == 9 && !few_others; i++)
        result(checked[all[i]] > 0, path_names[all[i]]);
    result(few_others || major != 9 || (checked[own] > 0 && checked_late > 0), path_names[own]);
    printf("worst relative error: f16 %.3g, bf16 %.3g; beyond rounding %.3g, %.3g\n",
           worst_error[0], worst_error[1], worst_beyond[0], worst_beyond[1]);
    return check_end();
}

#endif
