/*
 * Gated products, with the activation of gate times up in their epilogue, against plain products of
 * the same configuration: shapes, numbers of tokens, dtypes, planned and random configurations.
 * With FP16 and SiLU the bits are those of a product and the activation of qtool_decoder.h.
 *
 * usage: test_gated [SEED [quick]]     prints "N passed, M failed, K skipped"
 * quick: few cases, for compute-sanitizer.
 */
#include "kernels/include/qtool_decoder.h"
#include "tests/gpu/check_matmul.h"
#include "tests/gpu/matrix.h"

static double gated_value(enum qtool_matmul_gated how, double g, double u)
{
    /* 1 + tanh(z) = 2 / (1 + exp(-2 z)), which keeps the digits of small values. */
    const double z = sqrt(8 / M_PI) * (g + 0.044715 * g * g * g);
    return u * g / (1 + exp(how == QTOOL_MATMUL_GATED_SILU ? -g : -z));
}

/* True if rows of W have the same order of additions in every tile. */
static bool has_one_order(const struct qtool_matmul_plan *p)
{
    return p->config.path == QTOOL_MATMUL_TILE
               ? p->config.tile.schedule != QTOOL_TILE_STREAM_K
               : (p->k + 255) / 256 * 2 % (size_t)p->config.skinny.warps_k == 0;
}

/* Compares y[0] of a gated plan with the rounded gate and up, host [m][n]. Where these have the
 * order of additions of the gated product, only the last rounding is left. */
static void compare_gated(const struct qtool_matmul_plan *p, const uint16_t *both, const char *what)
{
    const size_t half = p->n / 2;
    const int bf16 = p->options.dtype == QTOOL_BF16;
    const double ulp = bf16 ? 0x1p-8 : 0x1p-11, tiny = bf16 ? 1e-30 : 0x1p-25;
    uint16_t *got = download(pool.y[0] + output_at, p->m * half * 2);
    double worst = 0, errors = 0, all = 1e-30;
    for (size_t i = 0; i < p->m * half; i++) {
        const uint16_t *gate = both + i / half * p->n + i % half;
        const double ref =
            gated_value(p->options.gated, to_float(gate[0], bf16), to_float(gate[half], bf16));
        const double d = fabs(to_float(got[i], bf16) - ref);
        worst = worse(worst, d - 1.01 * ulp * fabs(ref) - tiny);
        errors += d * d;
        all += ref * ref;
    }
    free(got);
    result(has_one_order(p) ? worst <= 0 : worse(0, sqrt(errors / all)) <= 1.5 * ulp, what);
}

/* Checks a gated plan against a plain one of the same configuration, and with FP16 and SiLU against
 * the activation of qtool_decoder.h, bit for bit. */
static void check_gated_plan(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                             const char *name)
{
    const size_t half = w->n / 2;
    char what[480], config[160];
    struct qtool_matmul_plan plain;
    struct qtool_matmul_options opt = p->options;
    opt.gated = QTOOL_MATMUL_PLAIN;
    int rc = qtool_matmul_plan(&plain, w, p->m, &opt);
    plain.config = p->config;
    rc = rc == QTOOL_OK ? qtool_matmul_plan_check(&plain, w) : rc;
    config_text(config, sizeof config, &p->config);
    snprintf(what, sizeof what, "%s n=%zu k=%zu m=%zu gated %d %s %s %s", name, p->n, p->k, p->m,
             (int)p->options.gated, opt.dtype == QTOOL_BF16 ? "bf16" : "f16", config, plain.reason);
    output_at = GUARD;
    if (rc != QTOOL_OK || !guarded_run(&plain, w, pool.x, 1, false)) {
        result(false, what);
        return;
    }
    uint16_t *both = download(pool.y[1] + GUARD, p->m * p->n * 2);
    result(guarded_run(p, w, pool.x, 0, false), what);
    compare_gated(p, both, what);
    free(both);
    if (opt.dtype == QTOOL_F16 && p->options.gated == QTOOL_MATMUL_GATED_SILU && has_one_order(p)) {
        uint16_t *gate = gpu_alloc(p->m * p->n * 2);
        CHECK(cudaMemcpy(gate, pool.y[1] + GUARD, p->m * p->n * 2, cudaMemcpyDeviceToDevice));
        const struct qtool_decoder_op op = {.kind = QTOOL_DECODER_ACTIVATION,
                                            .activation = {.act = QTOOL_DECODER_SILU,
                                                           .m = p->m,
                                                           .n = half,
                                                           .gate = gate,
                                                           .up = gate + half,
                                                           .gate_stride = p->n,
                                                           .up_stride = p->n,
                                                           .out = pool.y[1] + GUARD}};
        result(qtool_decoder_run(&op, 0, NULL) == QTOOL_OK && outputs_equal(p->m * half), what);
        CHECK(cudaFree(gate));
    }
    const bool late = opt.dependent_launch && p->m * p->k + 8 <= LATE_X;
    result(guarded_run(p, w, pool.x, 1, late) && outputs_equal(p->m * half), what);
}

/* ---- cases ---------------------------------------------------------------------------------- */

static const char *const schemes[] = {
    "nf4:g=128,method=rtn",
    "nf4:g=32,method=rtn",
    "nf3:g=128,method=rtn",
    "nf3:g=64,method=rtn",
    "int4:g=128,method=rtn",
    "int4:g=64,method=rtn",
    "int4:g=128,zero=group,method=rtn",
    "fp4:method=rtn",
};

/* Formats without kernels for gated products. */
static const char *const others[] = {"nf2:g=128,method=rtn", "int8:g=128,method=rtn",
                                     "fp6:method=rtn", "fp8:method=rtn"};

/* Rows for which plans have one tile per thread block, with two and four strips per warp, and
 * several. */
static const size_t shapes[][2] = {{32, 64},    {96, 700},    {1056, 512},
                                   {8192, 384}, {28672, 256}, {57344, 320}};
static const size_t tokens[] = {1, 5, 8, 9, 16, 17, 33, 48, 64};

/* Returns how many configurations were compared. */
static int check_tokens(const struct matrix *m, size_t count, const char *scheme, int variants)
{
    const struct qtool_matmul_options opt = {
        .dtype = random_below(3) ? QTOOL_F16 : QTOOL_BF16,
        .dependent_launch = (int)(random_bits() & 1),
        .gated = random_below(3) ? QTOOL_MATMUL_GATED_SILU : QTOOL_MATMUL_GATED_GELU_TANH};
    struct qtool_matmul_plan plan;
    int compared = 0;
    random_x(pool.x, count * m->weight.k, opt.dtype == QTOOL_BF16);
    for (int variant = 0; variant < variants; variant++) {
        int rc = qtool_matmul_plan(&plan, &m->weight, count, &opt);
        if (variant) {
            count <= 16 && variant % 2 ? vary_skinny(&plan) : vary_tile(&plan);
            rc = qtool_matmul_plan_check(&plan, &m->weight);
        }
        if (rc != QTOOL_OK)
            continue;
        check_gated_plan(&plan, &m->weight, scheme);
        compared++;
    }
    return compared;
}

static void test_scheme(const char *scheme, bool quick)
{
    int compared = 0;
    for (size_t i = 0; i < COUNT(shapes); i++) {
        const bool large = shapes[i][0] > 8192;
        struct matrix m;
        if (quick && (large || random_below(3)))
            continue;
        matrix_new(&m, scheme, shapes[i][0], shapes[i][1], 0.2f);
        for (size_t j = 0; j < COUNT(tokens); j++)
            if (!quick || !random_below(3))
                compared += check_tokens(&m, tokens[j], scheme, quick || large ? 3 : 8);
        matrix_free(&m);
    }
    result(compared > 0 || quick || qtool_kernels_compute(0) != 90, "gated products");
}

static void test_refusals(void)
{
    static const struct qtool_matmul_options opt = {.gated = QTOOL_MATMUL_GATED_SILU};
    for (size_t i = 0; i < COUNT(others); i++) {
        struct matrix m;
        struct qtool_matmul_plan plan;
        matrix_new(&m, others[i], 8448, 256, 0.2f);
        for (size_t j = 0; j < COUNT(tokens); j++)
            result(qtool_matmul_plan(&plan, &m.weight, tokens[j], &opt) == QTOOL_UNSUPPORTED &&
                       plan.reason[0],
                   others[i]);
        matrix_free(&m);
    }
}

int main(int argc, char **argv)
{
    const bool quick = check_begin(argc, argv);
    pool_new();
    test_refusals();
    for (size_t i = 0; i < COUNT(schemes); i++)
        test_scheme(schemes[i], quick);
    return check_end();
}
