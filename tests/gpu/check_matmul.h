/* Checks of products of qtool_kernels.h. Outputs and workspace are filled with NaN and have guard
 * bands. Every run is made twice and must repeat bit for bit, sometimes as a dependent launch
 * behind a kernel that still writes X. */
#ifndef QT_TESTS_GPU_CHECK_MATMUL_H
#define QT_TESTS_GPU_CHECK_MATMUL_H

#include "kernels/include/qtool_kernels.h"
#include "tests/gpu/check.h"
#include "tests/gpu/config_text.h"
#include "tests/gpu/tile_tokens.h"

#include <math.h>

enum { GUARD = 64 };             /* elements before and after an output */
static size_t output_at = GUARD; /* offset of the output; check_plan varies its alignment */

/* Inputs of a product in device memory: x [m][k] and decoded weights [n][pitch]. */
struct product {
    const uint16_t *x;
    const float *decoded;
    size_t pitch;
    const char *name;
};

/* Device buffers that all cases use. */
static struct {
    uint16_t *x, *late_x, *y[2];
    double *reference;
    struct gpu_rounding rounding; /* rounding of the weights in the reference */
} pool;

enum { LATE_X = 4 << 20 }; /* maximum number of values that are written late */

static double worst_error[2], worst_excess[2]; /* FP16, BF16: all, and beyond rounding */
static bool few_variants;                      /* run one variant in three, for compute-sanitizer */
static int checked[COUNT(path_names)], checked_late; /* checked plans by path, and with late X */

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

/* Values of Y. */
static inline size_t outputs_of(const struct qtool_matmul_plan *p)
{
    return p->m * p->n / (p->options.gated ? 2 : 1);
}

/* Runs the plan into y[which]. Returns false if it fails or writes outside the output and the
 * workspace. late: X is written by a kernel before, and not complete when a dependent launch
 * begins. */
static inline bool guarded_run(const struct qtool_matmul_plan *p,
                               const struct qtool_matmul_weight *w, const uint16_t *x, int which,
                               bool late)
{
    size_t count = outputs_of(p), shift = (size_t)(x - pool.x);
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
 * Maximum relative error beyond the rounding of outputs. FP16 rounding is 2.07e-4 on average, and
 * 1e-4 in addition makes 2.3e-4. BF16 has a larger limit, as an output that is rounded to the other
 * neighbor changes the error of rounding. A few outputs may all be small differences of large
 * products.
 */
static inline double tolerance(size_t count, int bf16)
{
    return (count >= 1000 ? 1e-4 : 4.7e-4) * (bf16 ? 2 : 1);
}

/* Returns the part of an error that rounding of outputs does not explain. */
static inline double error_beyond_rounding(struct gpu_error e)
{
    return e.all > e.rounding ? sqrt(e.all * e.all - e.rounding * e.rounding) : 0;
}

/* Returns how the plan rounds weights. */
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

/* Computes the reference of a product. */
static inline void expect(const struct product *product, const struct qtool_matmul_plan *p,
                          struct gpu_rounding rounding)
{
    gpu_reference(pool.reference, product->x, product->decoded, p->m, p->n, p->k, product->pitch,
                  p->options.dtype == QTOOL_BF16, rounding);
    pool.rounding = rounding;
}

/* Checks one plan of the product. Computes the reference again if the plan rounds weights in
 * another way than the last one. */
static inline void check_plan(const struct qtool_matmul_plan *p,
                              const struct qtool_matmul_weight *w, const struct product *product)
{
    const char *name = product->name;
    char what[400], config[160];
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
    config_text(config, sizeof config, c);
    snprintf(what, sizeof what,
             "%s n=%zu k=%zu m=%zu %s %s, y at %zu: error %.3g, rounding %.3g%s%s", name, p->n,
             p->k, p->m, bf16 ? "bf16" : "f16", config, output_at % 8 * 2, e.all, e.rounding,
             guards ? "" : " GUARDS",
             equal  ? ""
             : late ? " NOT REPEATABLE BEHIND A LATE X"
                    : " NOT REPEATABLE");
    checked[c->path]++;
    checked_late += late;
    if (count >= 1000 && c->path != QTOOL_MATMUL_DENSE) {
        worst_error[bf16] = worse(worst_error[bf16], e.all);
        worst_excess[bf16] = worse(worst_excess[bf16], error_beyond_rounding(e));
    }
    result(guards && equal && error_beyond_rounding(e) <= tolerance(count, bf16), what);
}

/* Each function sets p->config to a random configuration of a path. plan_check refuses many. */

static inline void vary_stream(struct qtool_matmul_plan *p)
{
    struct qtool_stream_config *c = &p->config.stream;
    p->config = (struct qtool_matmul_config){.path = QTOOL_MATMUL_STREAM};
    c->token_tiles = p->m <= 8 ? 1 : p->m <= 16 ? 2 : 4;
    c->strips = c->token_tiles == 4 ? 1 : 1 + (int)random_below(2);
    c->splits = 1 + (int)random_below(4);
    c->warps = 1 << random_below(5);
    c->warps_k = 1 << random_below(5);
    c->warps_k = c->warps_k > c->warps ? c->warps : c->warps_k;
    c->strips_cta = 1 + (int)random_below(9);
}

static inline void vary_skinny(struct qtool_matmul_plan *p)
{
    struct qtool_skinny_config *c = &p->config.skinny;
    const int warps_n = 1 << random_below(4);
    p->config = (struct qtool_matmul_config){.path = QTOOL_MATMUL_SKINNY};
    c->token_tiles = p->m <= 8 ? 1 : 2;
    c->strips = 1 << random_below(3);
    c->warps_k = 16 / warps_n >> (warps_n < 8 ? random_below(2) : 0);
    c->warps = c->warps_k * warps_n;
    c->strips_cta = 1 + (int)random_below((size_t)(3 * warps_n * c->strips));
    const int step = c->warps_k / 2;
    c->depth = step * (1 + (int)random_below((size_t)(12 / step)));
}

static inline void vary_tile(struct qtool_matmul_plan *p)
{
    struct qtool_tile_config *c = &p->config.tile;
    p->config = (struct qtool_matmul_config){.path = QTOOL_MATMUL_TILE};
    c->schedule = (enum qtool_tile_schedule)(QTOOL_TILE_WHOLE + (int)random_below(4));
    c->warps = 8 + 4 * (int)random_below(3);
    c->token_tiles = tile_tokens[random_below(TILE_WIDTHS)] / 8;
}

static inline void vary_mma_tile(struct qtool_matmul_plan *p)
{
    static const struct qtool_mma_tile_config kinds[] = {
        {.warps = 8, .strips = 2, .strips_cta = 16, .token_tiles = 8},
        {.warps = 8, .strips = 2, .strips_cta = 8, .token_tiles = 16},
        {.warps = 8, .strips = 4, .strips_cta = 16, .token_tiles = 16},
        {.warps = 8, .strips = 2, .strips_cta = 16, .token_tiles = 4},
    };
    p->config = (struct qtool_matmul_config){.path = QTOOL_MATMUL_MMA_TILE,
                                             .mma_tile = kinds[random_below(COUNT(kinds))]};
    p->config.mma_tile.splits = 1 + (int)random_below(4);
}

/* Checks the configurations that plan chooses, for the device and for an older one, a DENSE one,
 * and `variants` configurations made by `vary`, if plan_check accepts them. x: in the pool;
 * decoded: in device memory, [n][pitch]. */
static inline void check_product(const struct qtool_matmul_weight *w, const float *decoded,
                                 size_t pitch, uint16_t *x, size_t m, int bf16, int variants,
                                 void (*vary)(struct qtool_matmul_plan *p, int variant),
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
    for (int i = 0; i <= variants; i++) {
        struct qtool_matmul_plan other = plan;
        if (few_variants && random_below(3))
            continue;
        if (i < variants)
            vary(&other, i);
        else
            other.config = (struct qtool_matmul_config){
                .path = QTOOL_MATMUL_DENSE, .dense = {.parts = 1 + (int)random_below(3)}};
        if (qtool_matmul_plan_check(&other, w) == QTOOL_OK)
            check_plan(&other, w, &product);
    }
}

/* Checks that rows of batch-invariant products have the same bits for every number of tokens.
 * count[0] is the largest number. */
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

/* Checks qtool_matmul_dequantize against decoded weights in host memory. */
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
        bad += got[i] != expected && !((got[i] | expected) == 0x8000); /* -0 equals 0 */
    }
    for (size_t i = 0; i < GUARD; i++)
        bad += all[i] != 0xffff || got[count + i] != 0xffff;
    snprintf(what, sizeof what, "%s n=%zu k=%zu dequantize %s: %zu of %zu differ", name, w->n, w->k,
             bf16 ? "bf16" : "f16", bad, count);
    result(rc == QTOOL_OK && bad == 0, what);
    free(all);
}

/* Prints a summary and returns the exit status. own: paths that only the weights of this program
 * have; on compute capability 9.0 each must have been checked, as must those that all weights have.
 */
static inline int check_matmul_end(const enum qtool_matmul_path own[2])
{
    static const enum qtool_matmul_path all[] = {QTOOL_MATMUL_SKINNY, QTOOL_MATMUL_TILE,
                                                 QTOOL_MATMUL_DENSE};
    int major;
    CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    for (size_t i = 0; i < COUNT(path_names); i++)
        printf("%s%s %d", i ? ", " : "plans checked: ", path_names[i], checked[i]);
    printf("; with a late X %d\n", checked_late);
    for (size_t i = 0; i < COUNT(all) && major == 9 && !few_variants; i++)
        result(checked[all[i]] > 0, path_names[all[i]]);
    for (size_t i = 0; i < 2; i++)
        result(few_variants || major != 9 || (checked[own[i]] > 0 && checked_late > 0),
               path_names[own[i]]);
    printf("worst relative error: f16 %.3g, bf16 %.3g; beyond rounding %.3g, %.3g\n",
           worst_error[0], worst_error[1], worst_excess[0], worst_excess[1]);
    return check_end();
}

#endif
