/*
 * Calls that libqtool_kernels must refuse without launching a kernel, on simulated devices
 * (simulated.h): weights, caches and addresses that do not match the plan or are misaligned, and
 * options out of range. Each refusal is paired with a call that must succeed. Needs no GPU.
 *
 * usage: test_refuse     prints "N passed, M failed, K skipped"
 */
#include "kernels/include/qtool_kv4.h"
#include "kernels/include/qtool_moe.h"
#include "kernels/include/qtool_w4ax.h"
#include "tests/gpu/simulated.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

static const struct simulated_device h200 = {"H200", 132, 232448, 9, 0, 90};
static const struct simulated_device part = {"H200 MIG 1g", 16, 232448, 9, 0, 90};
static const struct simulated_device a100 = {"A100", 108, 166912, 8, 0, 80};
static const struct simulated_device ada = {"RTX 4090", 128, 101376, 8, 9, 80};
static const struct simulated_device ampere = {"RTX 3060", 28, 101376, 8, 6, 80};

static int passed, failed;
static char *const memory = (char *)0x100000;

/* Expects QTOOL_UNSUPPORTED and no launch. */
static void refuses(const char *what, int status)
{
    const int ok = status == QTOOL_UNSUPPORTED && simulated_launches() == 0;
    passed += ok;
    failed += !ok;
    if (!ok)
        printf("FAILED: %s: status %d instead of a refusal\n", what, status);
    simulated_fault();
}

/* Expects QTOOL_OK and no fault of the simulated device. */
static void takes(const char *what, int status)
{
    const char *fault = simulated_fault();
    const int ok = status == QTOOL_OK && !fault;
    passed += ok;
    failed += !ok;
    if (!ok)
        printf("FAILED: %s: status %d, %s\n", what, status, fault ? fault : "");
    simulated_launches();
}

/* ---- qtool_kernels.h ------------------------------------------------------------------------ */

static struct qtool_matmul_weight matrix(enum qtool_matmul_kind kind, unsigned bits, size_t n,
                                         size_t k)
{
    return (struct qtool_matmul_weight){.kind = kind,
                                        .bits = bits,
                                        .exp_bits = kind == QTOOL_MATMUL_FPX ? bits / 2 : 0,
                                        .n = n,
                                        .k = k,
                                        .group = kind == QTOOL_MATMUL_FPX ? 0 : 64,
                                        .plane = {memory, memory, memory},
                                        .scale = memory,
                                        .table = memory};
}

static struct qtool_matmul_weight mix24(size_t n, size_t k, size_t fours, int outliers)
{
    void *const csr = outliers ? memory : NULL;
    return (struct qtool_matmul_weight){.kind = QTOOL_MATMUL_MIX24,
                                        .n = n,
                                        .k = k,
                                        .mix24 = {(k + 127) / 128 - fours, fours, memory, memory,
                                                  csr, csr, csr, 0, outliers ? n * k / 500 : 0}};
}

static int dense(void *context, void *y, size_t ldy, const void *x, const void *w, size_t m,
                 size_t n, size_t k, enum qtool_dtype dtype, void *stream)
{
    (void)context, (void)y, (void)ldy, (void)x, (void)w;
    (void)m, (void)n, (void)k, (void)dtype, (void)stream;
    return 0;
}

static int run(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w)
{
    return qtool_matmul_run(p, w, memory, memory, memory, NULL);
}

/* The shared memory of a mix24 kernel depends on the share of 4-bit groups and on outliers. */
static void other_mix24(void)
{
    static const struct {
        size_t m, fours, other_fours;
        int outliers, other_outliers;
    } cases[] = {{32, 8, 0, 0, 0}, {64, 8, 0, 0, 0},  {32, 8, 0, 1, 1},
                 {96, 0, 8, 1, 0}, {128, 0, 8, 1, 0}, {9, 0, 8, 0, 1},
                 {96, 8, 0, 1, 1}, {192, 0, 8, 1, 0}, {256, 0, 8, 1, 0}};
    const struct qtool_matmul_options opt = {.dtype = QTOOL_F16};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct qtool_matmul_weight w = mix24(4096, 4096, cases[i].fours, cases[i].outliers);
        const struct qtool_matmul_weight other =
            mix24(4096, 4096, cases[i].other_fours, cases[i].other_outliers);
        struct qtool_matmul_plan p;
        takes("plan of mix24", qtool_matmul_plan(&p, &w, cases[i].m, &opt));
        takes("run of mix24", run(&p, &w));
        refuses("mix24 with more shared memory than planned", run(&p, &other));
    }
    /* With three units, a thread block of a cluster of four has no work. */
    struct qtool_matmul_weight w = mix24(1024, 384, 1, 0), other = w;
    struct qtool_matmul_plan p;
    w.mix24.twos++;
    takes("plan of four units", qtool_matmul_plan(&p, &w, 64, &opt));
    takes("run of four units", run(&p, &w));
    refuses("three units", run(&p, &other));
}

/* The row pointers of a thread block are in shared memory: here their size overflows 32 bits. */
static void long_blocks(void)
{
    const struct qtool_matmul_options opt = {.dtype = QTOOL_F16, .batch_invariant = 1};
    const struct qtool_matmul_weight w = mix24(65536, 4096, 8, 1);
    struct qtool_matmul_plan p;
    takes("plan of mix24", qtool_matmul_plan(&p, &w, 1, &opt));
    for (int log2 = 20; log2 < 31; log2++) {
        struct qtool_matmul_plan q = p;
        q.config.ring.strips_cta = 1 << log2;
        refuses("more rows per thread block than fit into shared memory",
                qtool_matmul_plan_check(&q, &w));
    }
}

/* Tile sizes without a kernel that equal one with a kernel modulo 2^32. */
static void no_such_tiles(void)
{
    static const struct {
        const struct simulated_device *device;
        enum qtool_matmul_path path;
    } cases[] = {{&h200, QTOOL_MATMUL_TILE}, {&a100, QTOOL_MATMUL_MMA_TILE}};
    const struct qtool_matmul_options opt = {.dtype = QTOOL_F16};
    const struct qtool_matmul_weight nf4 = matrix(QTOOL_MATMUL_LUT, 4, 4096, 4096);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct qtool_matmul_plan p;
        simulate_device(cases[i].device);
        takes("plan of tiles", qtool_matmul_plan(&p, &nf4, 128, &opt));
        takes("its path", p.config.path == cases[i].path ? QTOOL_OK : QTOOL_FAILED);
        *(p.config.path == QTOOL_MATMUL_TILE ? &p.config.tile.token_tiles
                                             : &p.config.mma_tile.token_tiles) += 1 << 29;
        refuses("tiles of 2^32 tokens more", qtool_matmul_plan_check(&p, &nf4));
    }
    simulate_device(&h200);
}

/* A plan that qtool_matmul_plan refused stays refused with any config. */
static void refused_for_good(const struct qtool_matmul_weight *w, size_t m,
                             const struct qtool_matmul_options *opt)
{
    static const struct qtool_matmul_config configs[] = {
        {.path = QTOOL_MATMUL_STREAM,
         .stream = {.token_tiles = 4,
                    .strips = 1,
                    .warps = 4,
                    .warps_k = 4,
                    .strips_cta = 1,
                    .splits = 1}},
        {.path = QTOOL_MATMUL_DENSE, .dense = {.parts = 1}},
    };
    struct qtool_matmul_plan p;
    refuses("plan", qtool_matmul_plan(&p, w, m, opt));
    for (size_t i = 0; i < sizeof configs / sizeof *configs; i++) {
        p.config = configs[i];
        refuses("check of a refused plan", qtool_matmul_plan_check(&p, w));
        refuses("run of a refused plan", run(&p, w));
    }
}

/* A refusal does not depend on earlier plans and launches. */
static void refused_plans(void)
{
    struct qtool_matmul_options opt = {.dtype = QTOOL_F16, .batch_invariant = 1};
    const struct qtool_matmul_weight nf4 = matrix(QTOOL_MATMUL_LUT, 4, 4096, 4096);
    struct qtool_matmul_plan p;
    simulate_device(&a100);
    takes("plan", qtool_matmul_plan(&p, &nf4, 32, &opt));
    p.config.stream.splits = 60;
    p.config.stream.token_tiles = 1;
    refuses("splits without channels", qtool_matmul_plan_check(&p, &nf4));
    refuses("run of a refused plan", run(&p, &nf4));
    simulate_device(&h200);
    refuses("no tokens", qtool_matmul_plan(&p, &nf4, 0, &opt));
    refuses("run of no tokens", run(&p, &nf4));

    struct qtool_matmul_weight bits = nf4;
    bits.bits = 1;
    opt.dense = dense;
    refused_for_good(&nf4, 0, &opt);
    refused_for_good(&bits, 64, &opt);
    opt.compute = 70;
    refused_for_good(&nf4, 64, &opt);
}

/* The path DENSE is not planned if weights could be infinite in FP16, for any number of tokens. */
static void dense_products(void)
{
    struct qtool_matmul_options opt = {.dtype = QTOOL_F16, .dense = dense};
    struct qtool_matmul_weight nf4 = matrix(QTOOL_MATMUL_LUT, 4, 8192, 8192);
    struct qtool_matmul_plan p;
    for (int exp2 = -1; exp2 <= 1; exp2++)
        for (int bf16 = 0; bf16 < 2; bf16++) {
            nf4.scale_exp2 = exp2;
            opt.dtype = bf16 ? QTOOL_BF16 : QTOOL_F16;
            takes("plan of many tokens", qtool_matmul_plan(&p, &nf4, 16384, &opt));
            const int is_dense = p.config.path == QTOOL_MATMUL_DENSE;
            takes("its path", is_dense == (bf16 || !exp2) ? QTOOL_OK : QTOOL_FAILED);
            struct qtool_matmul_weight other = mix24(8192, 8192, 16, 1);
            other.scale_exp2 = 4 * exp2;
            takes("plan of mix24, many tokens", qtool_matmul_plan(&p, &other, 4096, &opt));
            const int other_is_dense = p.config.path == QTOOL_MATMUL_DENSE;
            takes("mix24's path", other_is_dense == (bf16 || exp2 >= 0) ? QTOOL_OK : QTOOL_FAILED);
        }
}

static void other_matrices(void)
{
    const struct qtool_matmul_options opt = {.dtype = QTOOL_F16, .dense = dense};
    const struct qtool_matmul_weight nf4 = matrix(QTOOL_MATMUL_LUT, 4, 8192, 4096);
    struct qtool_matmul_weight other = mix24(4096, 4096, 8, 1);
    struct qtool_matmul_plan p, q;
    takes("plan of mix24", qtool_matmul_plan(&p, &other, 64, &opt));
    takes("mix24, x at 2", qtool_matmul_run(&p, &other, memory, memory + 2, memory, NULL));
    refuses("mix24, odd x", qtool_matmul_run(&p, &other, memory, memory + 1, memory, NULL));
    other = nf4;
    takes("plan", qtool_matmul_plan(&p, &nf4, 64, &opt));
    takes("run", run(&p, &nf4));
    refuses("odd y", qtool_matmul_run(&p, &nf4, memory + 1, memory, memory, NULL));
    takes("out at 2", qtool_matmul_dequantize(&nf4, memory + 2, QTOOL_F16, NULL));
    refuses("odd out", qtool_matmul_dequantize(&nf4, memory + 1, QTOOL_F16, NULL));
    refuses("another type", qtool_matmul_dequantize(&nf4, memory, (enum qtool_dtype)2, NULL));
    refuses("x at 8", qtool_matmul_run(&p, &nf4, memory, memory + 8, memory, NULL));
    refuses("no x", qtool_matmul_run(&p, &nf4, memory, NULL, memory, NULL));
    refuses("no y", qtool_matmul_run(&p, &nf4, NULL, memory, memory, NULL));
    refuses("dequantize to NULL", qtool_matmul_dequantize(&nf4, NULL, QTOOL_F16, NULL));
    refuses("workspace at 8", qtool_matmul_run(&p, &nf4, memory, memory, memory + 8, NULL));
    other.n = 1024;
    refuses("run of fewer rows", run(&p, &other));
    q = p;
    refuses("check with fewer rows", qtool_matmul_plan_check(&q, &other));
    other = mix24(8192, 4096, 0, 0);
    refuses("run of another kind", run(&p, &other));
    q = p;
    q.config.path = QTOOL_MATMUL_VECTOR;
    refuses("a path of mix24 only", qtool_matmul_plan_check(&q, &nf4));

    const struct qtool_matmul_weight wide = matrix(QTOOL_MATMUL_LUT, 4, 16, 1 << 24);
    takes("plan of wide rows", qtool_matmul_plan(&p, &wide, 1, &opt));
    p.config = (struct qtool_matmul_config){.path = QTOOL_MATMUL_STREAM,
                                            .stream = {.token_tiles = 1,
                                                       .strips = 1,
                                                       .warps = 4,
                                                       .warps_k = 4,
                                                       .strips_cta = 1,
                                                       .splits = 131072}};
    refuses("more parts of k than a grid can have", qtool_matmul_plan_check(&p, &wide));

    simulate_device(&a100);
    other = nf4;
    other.scale_exp2 = -16;
    takes("plan, many tokens", qtool_matmul_plan(&p, &nf4, 4096, &opt));
    p.config = (struct qtool_matmul_config){.path = QTOOL_MATMUL_DENSE};
    refuses("a dense product in 0 parts", qtool_matmul_plan_check(&p, &nf4));
    p.config.dense.parts = 1;
    takes("check of a dense product", qtool_matmul_plan_check(&p, &nf4));
    refuses("weights too small for a dense product in FP16", run(&p, &other));
    simulate_device(&h200);
}

/* The mma tile kernel computes strip offsets in 32 bits. */
static void long_pitches(void)
{
    const struct qtool_matmul_options opt = {.dtype = QTOOL_F16};
    const struct qtool_matmul_weight nf4 = matrix(QTOOL_MATMUL_LUT, 4, 1024, 4096);
    struct qtool_matmul_weight other = nf4;
    struct qtool_matmul_plan p, q;
    simulate_device(&a100);
    takes("plan of mma tiles", qtool_matmul_plan(&p, &nf4, 64, &opt));
    takes("path of mma tiles", p.config.path == QTOOL_MATMUL_MMA_TILE ? QTOOL_OK : QTOOL_FAILED);
    takes("run of mma tiles", run(&p, &nf4));
    other.pitch_blocks = 1 << 22;
    q = p;
    refuses("check with a long pitch", qtool_matmul_plan_check(&q, &other));
    refuses("run with a long pitch", run(&p, &other));
    simulate_device(&h200);
}

static void slices(void)
{
    struct qtool_matmul_weight w = mix24(4096, 131072, 0, 1), out;
    takes("slice", qtool_matmul_slice(&out, &w, 1024, 1024, 0, w.k));
    takes("slice in place", qtool_matmul_slice(&w, &w, 1024, 1024, 0, w.k));
    const int same = out.mix24.csr_rows == 4096 && w.mix24.csr_rows == 4096 &&
                     w.mix24.csr_ptr == out.mix24.csr_ptr && w.mix24.stream == out.mix24.stream;
    takes("the same slice in place", same ? QTOOL_OK : QTOOL_FAILED);
}

/* True if two batch-invariant configurations divide k in the same way. */
static int same_order(const struct qtool_matmul_config *a, const struct qtool_matmul_config *b)
{
    return a->path == b->path &&
           (a->path == QTOOL_MATMUL_STREAM
                ? a->stream.warps_k == b->stream.warps_k && a->stream.splits == b->stream.splits
                : a->skinny.warps_k == b->skinny.warps_k);
}

/* Matrices whose row scales, or whose rows, nearly fill shared memory. */
static void large_matrices(void)
{
    static const struct {
        const struct simulated_device *device;
        enum qtool_matmul_kind kind;
        unsigned bits;
        size_t n, k, m;
    } cases[] = {{&ampere, QTOOL_MATMUL_FPX, 6, 262144, 2560, 24},
                 {&ampere, QTOOL_MATMUL_FPX, 6, 262144, 2048, 64},
                 {&ada, QTOOL_MATMUL_FPX, 6, 262144, 8192, 1},
                 {&ada, QTOOL_MATMUL_LUT, 4, 256, 58368, 32},
                 {&a100, QTOOL_MATMUL_LUT, 4, 256, 123904, 4096},
                 {&part, QTOOL_MATMUL_FPX, 8, 420000, 4096, 16}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int invariant = 0; invariant < 2; invariant++) {
            const struct qtool_matmul_weight w =
                matrix(cases[i].kind, cases[i].bits, cases[i].n, cases[i].k);
            const struct qtool_matmul_options opt = {.dtype = QTOOL_F16,
                                                     .batch_invariant = invariant};
            struct qtool_matmul_plan p, one;
            simulate_device(cases[i].device);
            if (invariant && cases[i].k > 16384) /* 32 tokens of X do not fit */
                continue;
            takes(cases[i].device->name, qtool_matmul_plan(&p, &w, cases[i].m, &opt));
            takes(cases[i].device->name, run(&p, &w));
            if (!invariant)
                continue;
            takes("one token", qtool_matmul_plan(&one, &w, 1, &opt));
            takes("in the same order",
                  same_order(&one.config, &p.config) ? QTOOL_OK : QTOOL_FAILED);
        }
    static const struct simulated_device *const small[] = {&a100, &ada, &ampere};
    const struct qtool_matmul_options opt = {.dtype = QTOOL_F16};
    for (size_t i = 0; i < sizeof small / sizeof *small; i++)
        for (int fpx = 0; fpx < 2; fpx++) {
            const struct qtool_matmul_weight w = fpx ? matrix(QTOOL_MATMUL_FPX, 6, 16, 1 << 26)
                                                     : matrix(QTOOL_MATMUL_INT, 4, 16, 1 << 26);
            struct qtool_matmul_plan p;
            simulate_device(small[i]);
            takes("long rows", qtool_matmul_plan(&p, &w, 32, &opt));
            p.config = (struct qtool_matmul_config){.path = QTOOL_MATMUL_STREAM,
                                                    .stream = {.token_tiles = 4,
                                                               .strips = 1,
                                                               .warps = 8,
                                                               .warps_k = 8,
                                                               .strips_cta = 1,
                                                               .splits = 1}};
            refuses("4 GB of shared memory", qtool_matmul_plan_check(&p, &w));
        }
    simulate_device(&h200);
}

/* ---- qtool_w4ax.h --------------------------------------------------------------------------- */

static struct qtool_w4ax_weight w4ax_matrix(enum qtool_w4ax_scales scales, size_t n)
{
    return (struct qtool_w4ax_weight){.scales = scales,
                                      .n = n,
                                      .k = 8192,
                                      .plane = memory,
                                      .scale = memory,
                                      .row_scale = memory,
                                      .blocks = (const uint32_t *)memory};
}

/* Of many configs of the skinny kernel some are accepted, and every accepted one runs. */
static void w4ax_configs(enum qtool_w4ax_scales scales)
{
    static const int ctas[] = {-1, 0, 1, 6, 7, 28, 1000000};
    static const int depths[] = {-1, 0, 1, 2, 3, 4, 16, 17};
    const struct qtool_w4ax_options opt = {.output = QTOOL_W4AX_F32};
    const struct qtool_w4ax_weight w = w4ax_matrix(scales, 3000);
    const struct qtool_w4ax_acts acts = {memory, (float *)memory, (int *)memory};
    struct qtool_w4ax_plan planned;
    int taken = 0, ran = 0;
    takes("plan of w4ax", qtool_w4ax_plan(&planned, &w, 5, &opt));
    for (int i = 0; i < 6 * 7 * 8 * 5 * 18 * 18; i++) {
        struct qtool_w4ax_plan p = planned;
        const int rest = i / (6 * 7 * 8);
        p.config = (struct qtool_w4ax_config){.kernel = QTOOL_W4AX_SKINNY,
                                              .skinny = {.token_tiles = i % 6,
                                                         .strips_cta = ctas[i / 6 % 7],
                                                         .depth = depths[i / 42 % 8],
                                                         .strips = rest % 5,
                                                         .warps = rest / 5 % 18,
                                                         .warps_k = rest / 90}};
        if (qtool_w4ax_plan_check(&p) != QTOOL_OK)
            continue;
        taken++;
        ran += qtool_w4ax_run(&p, &w, &acts, memory, memory, NULL) == QTOOL_OK;
    }
    takes("w4ax, some configs are accepted", taken > 100 ? QTOOL_OK : QTOOL_FAILED);
    takes("w4ax, accepted configs run", ran == taken ? QTOOL_OK : QTOOL_FAILED);
    const char *fault = simulated_fault();
    takes(fault ? fault : "w4ax, no faults", fault ? QTOOL_FAILED : QTOOL_OK);
}

static void w4ax(void)
{
    const struct qtool_w4ax_options opt = {.output = QTOOL_W4AX_F16};
    const struct qtool_w4ax_weight w = w4ax_matrix(QTOOL_W4AX_BLOCK, 8192);
    const struct qtool_w4ax_acts acts = {memory, (float *)memory, (int *)memory};
    struct qtool_w4ax_plan p;
    for (size_t m = 1; m <= 256; m *= 256) {
        takes("plan of w4ax", qtool_w4ax_plan(&p, &w, m, &opt));
        takes("run of w4ax", qtool_w4ax_run(&p, &w, &acts, memory, memory, NULL));
        struct qtool_w4ax_weight other = w;
        other.n = 4096;
        refuses("w4ax, odd y", qtool_w4ax_run(&p, &w, &acts, memory + 1, memory, NULL));
        refuses("w4ax, fewer rows", qtool_w4ax_run(&p, &other, &acts, memory, memory, NULL));
        other = w;
        other.scales = QTOOL_W4AX_ROW;
        refuses("w4ax, other scales", qtool_w4ax_run(&p, &other, &acts, memory, memory, NULL));
        other = w;
        other.scale = NULL;
        refuses("w4ax, no scales", qtool_w4ax_run(&p, &other, &acts, memory, memory, NULL));
        other = w;
        other.pitch_blocks = 1;
        refuses("w4ax, a short pitch", qtool_w4ax_plan(&p, &other, m, &opt));
        other.pitch_blocks = (size_t)1 << 31;
        refuses("w4ax, a long pitch", qtool_w4ax_plan(&p, &other, m, &opt));
        other = w;
        for (int sign = -1; sign <= 1; sign += 2) {
            other.scale_exp2 = 100 * sign;
            takes("w4ax, the largest exponent", qtool_w4ax_plan(&p, &other, m, &opt));
            other.scale_exp2 = 101 * sign;
            refuses("w4ax, run of a larger one",
                    qtool_w4ax_run(&p, &other, &acts, memory, memory, NULL));
            refuses("w4ax, a larger one", qtool_w4ax_plan(&p, &other, m, &opt));
        }
        other = w;
        other.scales = QTOOL_W4AX_INT;
        other.row_scale = memory + 2;
        refuses("w4ax, row scales at 2", qtool_w4ax_plan(&p, &other, m, &opt));
        takes("plan of w4ax", qtool_w4ax_plan(&p, &w, m, &opt));
        *(m == 1 ? &p.config.skinny.token_tiles : &p.config.tile.token_tiles) += 1 << 29;
        refuses("w4ax, 2^32 tokens more", qtool_w4ax_plan_check(&p));
    }
    refuses("w4ax, too many tokens", qtool_w4ax_plan(&p, &w, (1 << 22) + 1, &opt));
    p.config = (struct qtool_w4ax_config){
        .kernel = QTOOL_W4AX_STREAM,
        .stream = {.tokens = 32, .warps = 4, .strips = 2, .cta_units = 64}};
    refuses("w4ax, check of a refused plan", qtool_w4ax_plan_check(&p));
    struct qtool_w4ax_options wide_y = opt;
    struct qtool_w4ax_weight shares = w; /* needs a workspace */
    wide_y.output = QTOOL_W4AX_F32;
    shares.n = 128;
    shares.k = 65536;
    wide_y.kernel = QTOOL_W4AX_STREAM;
    takes("w4ax, FP32", qtool_w4ax_plan(&p, &shares, 8, &wide_y));
    takes("w4ax, y at 4", qtool_w4ax_run(&p, &shares, &acts, memory + 4, memory, NULL));
    refuses("w4ax, y at 2", qtool_w4ax_run(&p, &shares, &acts, memory + 2, memory, NULL));
    refuses("w4ax, workspace at 8",
            p.workspace_bytes ? qtool_w4ax_run(&p, &shares, &acts, memory, memory + 8, NULL)
                              : QTOOL_FAILED);
    wide_y.kernel = (enum qtool_w4ax_kernel)4;
    refuses("w4ax, another kernel", qtool_w4ax_plan(&p, &w, 1, &wide_y));
    wide_y.kernel = QTOOL_W4AX_ANY;
    wide_y.output = (enum qtool_w4ax_output)3;
    refuses("w4ax, another output", qtool_w4ax_plan(&p, &w, 1, &wide_y));
    refuses("w4ax, no tokens", qtool_w4ax_plan(&p, &w, 0, &opt));
    refuses("w4ax, run of no tokens", qtool_w4ax_run(&p, &w, &acts, memory, memory, NULL));
    const struct qtool_w4ax_input in = {.scales = QTOOL_W4AX_BLOCK,
                                        .k = 53248,
                                        .blocks = (const uint32_t *)memory,
                                        .perm = (const uint32_t *)memory,
                                        .clip4 = 1,
                                        .clip8 = 1};
    refuses("another type of activations",
            qtool_w4ax_quantize(&acts, &in, NULL, memory, 8, (enum qtool_dtype)2, NULL));
    takes("long rows", qtool_w4ax_quantize(&acts, &in, NULL, memory, 8, QTOOL_F16, NULL));
    struct qtool_w4ax_input odd = in;
    odd.scales = (enum qtool_w4ax_scales)3;
    refuses("other scales", qtool_w4ax_quantize(&acts, &odd, NULL, memory, 8, QTOOL_F16, NULL));
    odd = in;
    odd.rotation = QTOOL_W4AX_HADAMARD;
    takes("rotated rows", qtool_w4ax_quantize(&acts, &odd, NULL, memory, 8, QTOOL_F16, NULL));
    odd.rotation = (enum qtool_w4ax_rotation)2;
    refuses("another rotation", qtool_w4ax_quantize(&acts, &odd, NULL, memory, 8, QTOOL_F16, NULL));
    static const float clips[] = {0, -1, NAN};
    for (size_t i = 0; i < sizeof clips / sizeof *clips; i++) {
        odd = in;
        odd.clip4 = clips[i];
        refuses("clip", qtool_w4ax_quantize(&acts, &odd, NULL, memory, 8, QTOOL_F16, NULL));
    }
    const struct qtool_w4ax_norm norm = {.kind = (enum qtool_w4ax_norm_kind)3, .weight = memory};
    refuses("another norm", qtool_w4ax_quantize(&acts, &in, &norm, memory, 8, QTOOL_F16, NULL));
    refuses("no activations", qtool_w4ax_quantize(&acts, &in, NULL, NULL, 8, QTOOL_F16, NULL));
    const struct qtool_w4ax_acts nowhere = {NULL, (float *)memory, (int *)memory};
    refuses("no codes", qtool_w4ax_quantize(&nowhere, &in, NULL, memory, 8, QTOOL_F16, NULL));
    simulate_device(&ada);
    refuses("rows longer than shared memory",
            qtool_w4ax_quantize(&acts, &in, NULL, memory, 8, QTOOL_F16, NULL));
    simulate_device(&h200);
}

/* ---- qtool_kv4.h ---------------------------------------------------------------------------- */

static void kv4(void)
{
    const struct qtool_kv_cache cache = {.format = QTOOL_KV_INT4,
                                         .heads = 8,
                                         .head_dim = 128,
                                         .page_tokens = 64,
                                         .table = (const int *)memory,
                                         .table_pitch = 128,
                                         .k = memory,
                                         .v = memory,
                                         .v_param = memory,
                                         .k_param = memory,
                                         .k_first = memory,
                                         .k_tail = memory};
    const struct qtool_kv_options opt = {.batch = 4, .heads = 32, .max_length = 8192, .scale = 1};
    const int *const length = (const int *)memory;
    struct qtool_kv_cache other = cache;
    struct qtool_kv_plan p;
    takes("plan of attention", qtool_kv_attention_plan(&p, &cache, &opt, 2048));
    takes("attention", qtool_kv_attention_run(&p, &cache, memory, memory, length, memory, NULL));
    refuses("no workspace", qtool_kv_attention_run(&p, &cache, memory, memory, length, NULL, NULL));
    refuses("workspace at 8",
            qtool_kv_attention_run(&p, &cache, memory, memory, length, memory + 8, NULL));
    refuses("another type of keys",
            qtool_kv_append(&cache, memory, memory, (int *)memory, (int *)memory, 1,
                            (enum qtool_dtype)2, 0, NULL));
    refuses("no keys", qtool_kv_append(&cache, NULL, memory, (int *)memory, (int *)memory, 1,
                                       QTOOL_F16, 0, NULL));
    refuses("keys at 8", qtool_kv_append(&cache, memory + 8, memory, (int *)memory, (int *)memory,
                                         1, QTOOL_F16, 0, NULL));
    refuses("no positions",
            qtool_kv_append(&cache, memory, memory, (int *)memory, NULL, 1, QTOOL_F16, 0, NULL));
    refuses("no q", qtool_kv_attention_run(&p, &cache, memory, NULL, length, memory, NULL));
    refuses("no out", qtool_kv_attention_run(&p, &cache, NULL, memory, length, memory, NULL));
    refuses("no lengths", qtool_kv_attention_run(&p, &cache, memory, memory, NULL, memory, NULL));
    refuses("q at 2", qtool_kv_attention_run(&p, &cache, memory, memory + 2, length, memory, NULL));
    refuses("out at 8",
            qtool_kv_attention_run(&p, &cache, memory + 8, memory, length, memory, NULL));
    for (size_t heads = 0; heads <= 4; heads += 2) {
        other.heads = heads;
        refuses("other heads",
                qtool_kv_attention_run(&p, &other, memory, memory, length, memory, NULL));
    }
    other = cache;
    other.k = memory + 1;
    refuses("odd keys", qtool_kv_attention_run(&p, &other, memory, memory, length, memory, NULL));
    other = cache;
    other.k_tail = NULL;
    refuses("no exact keys",
            qtool_kv_attention_run(&p, &other, memory, memory, length, memory, NULL));
    other = cache;
    other.page_tokens = 32;
    other.table_pitch = 512;
    refuses("half a group per page",
            qtool_kv_attention_run(&p, &other, memory, memory, length, memory, NULL));
    other = cache;
    other.table = NULL;
    refuses("longer than a page",
            qtool_kv_attention_run(&p, &other, memory, memory, length, memory, NULL));
    other = cache;
    other.table_pitch = 16;
    refuses("longer than the table", qtool_kv_attention_plan(&p, &other, &opt, 0));
    static const size_t splits[] = {100, (size_t)1 << 31, (size_t)1 << 32, ((size_t)1 << 31) - 128,
                                    SIZE_MAX & ~(size_t)127};
    for (size_t i = 0; i < sizeof splits / sizeof *splits; i++) {
        refuses("split_tokens", qtool_kv_attention_plan(&p, &cache, &opt, splits[i]));
        refuses("run of a refused plan",
                qtool_kv_attention_run(&p, &cache, memory, memory, length, memory, NULL));
    }
    static const float scales[] = {-1, 0, INFINITY, NAN};
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
        struct qtool_kv_options bad = opt;
        bad.scale = scales[i];
        refuses("scale", qtool_kv_attention_plan(&p, &cache, &bad, 0));
    }
    struct qtool_kv_options bad = opt;
    bad.dtype = (enum qtool_dtype)2;
    refuses("another type of queries", qtool_kv_attention_plan(&p, &cache, &bad, 0));
}

/* ---- w4ax experts of qtool_moe.h ------------------------------------------------------------ */

struct w4ax_layer {
    struct qtool_w4ax_weight gate[2], down[2];
    struct qtool_w4ax_input inner[2];
    struct qtool_moe_w4ax w4ax;
    struct qtool_moe_layer layer;
};

static void w4ax_layer(struct w4ax_layer *l)
{
    const struct qtool_w4ax_input in = {
        .scales = QTOOL_W4AX_INT, .k = 256, .blocks = (uint32_t *)memory, .clip4 = 1, .clip8 = 1};
    *l = (struct w4ax_layer){.w4ax = {l->gate, l->gate, l->down, in, l->inner},
                             .layer = {.experts = 2, .w4ax = &l->w4ax}};
    for (int e = 0; e < 2; e++) {
        l->gate[e] = w4ax_matrix(QTOOL_W4AX_INT, 512);
        l->gate[e].k = 256;
        l->gate[e].pitch_blocks = 0;
        l->down[e] = l->gate[e];
        l->down[e].n = 256;
        l->down[e].k = 512;
        l->inner[e] = in;
        l->inner[e].k = 512;
    }
}

/* Both or, if `table_only`, qtool_moe_table alone refuse the layer. */
static void refuses_layer(const char *what, const struct w4ax_layer *l, bool table_only)
{
    static unsigned char table[2 * QTOOL_MOE_TABLE_EXPERT];
    const struct qtool_moe_options opt = {.topk = 2};
    struct qtool_moe_plan plan;
    char reason[160] = "";
    refuses(what, qtool_moe_table(table, &l->layer, reason));
    refuses(what, reason[0] ? QTOOL_UNSUPPORTED : QTOOL_FAILED);
    const int rc = qtool_moe_plan(&plan, &l->layer, 1, &opt);
    if (table_only)
        takes(what, rc);
    else
        refuses(what, rc);
}

static void w4ax_experts(void)
{
    static unsigned char table[2 * QTOOL_MOE_TABLE_EXPERT];
    struct w4ax_layer l;
    char reason[160];
    w4ax_layer(&l);
    takes("w4ax experts", qtool_moe_table(table, &l.layer, reason));
    l.w4ax.input.k = 512;
    refuses_layer("an input of another k", &l, false);
    w4ax_layer(&l);
    l.w4ax.input.scales = QTOOL_W4AX_BLOCK;
    refuses_layer("an input of other scales", &l, false);
    w4ax_layer(&l);
    l.w4ax.input.packed = 1;
    refuses_layer("packed activations", &l, false);
    w4ax_layer(&l);
    l.w4ax.input.clip4 = 0;
    refuses_layer("no clip factor", &l, false);
    w4ax_layer(&l);
    l.w4ax.input.blocks = NULL;
    refuses_layer("no block words", &l, false);
    w4ax_layer(&l);
    l.w4ax.inner = NULL;
    refuses_layer("no inputs of down", &l, false);
    w4ax_layer(&l);
    l.inner[0].perm = (uint32_t *)memory;
    refuses_layer("a gathered input of down", &l, false);
    w4ax_layer(&l);
    l.down[0].scales = l.down[1].scales = QTOOL_W4AX_ROW;
    refuses_layer("other scales of down", &l, false);
    w4ax_layer(&l);
    l.gate[0].k = l.gate[1].k = l.w4ax.input.k = l.down[0].n = l.down[1].n = 252;
    refuses_layer("252 channels", &l, false);
    w4ax_layer(&l);
    l.gate[1].pitch_blocks = 8;
    refuses_layer("pitches that differ", &l, true);
    w4ax_layer(&l);
    l.inner[1].rotation = QTOOL_W4AX_HADAMARD;
    refuses_layer("rotations that differ", &l, true);
    w4ax_layer(&l);
    l.down[1].plane = NULL;
    refuses_layer("no plane", &l, true);
}

/* Layers of experts with MIX24 weights. */
static void mix24_experts(void)
{
    static unsigned char table[2 * QTOOL_MOE_TABLE_EXPERT];
    const struct qtool_matmul_weight lut = matrix(QTOOL_MATMUL_LUT, 4, 1024, 256);
    struct qtool_matmul_weight gate[2], up[2], down[2];
    struct qtool_moe_layer layer = {.experts = 2, .gate = gate, .up = up, .down = down};
    const struct qtool_moe_options opt = {.topk = 2};
    struct qtool_moe_plan p;
    char reason[160];
    for (int e = 0; e < 2; e++) {
        gate[e] = up[e] = mix24(256, 1024, 2, e);
        down[e] = mix24(1024, 256, 1, !e);
    }
    takes("table of MIX24 experts", qtool_moe_table(table, &layer, reason));
    takes("plan of MIX24 experts", qtool_moe_plan(&p, &layer, 300, &opt));
    up[1] = mix24(256, 1024, 3, 1);
    refuses("experts with other shares of 4-bit groups", qtool_moe_table(table, &layer, reason));
    up[1] = up[0];
    up[1].mix24.perm = NULL;
    refuses("an expert without perm", qtool_moe_table(table, &layer, reason));
    up[1] = up[0];
    down[1] = lut;
    refuses("one matrix of another scheme", qtool_moe_table(table, &layer, reason));
    down[0] = lut;
    refuses("down of another scheme", qtool_moe_plan(&p, &layer, 1, &opt));
    refuses("a table with down of another scheme", qtool_moe_table(table, &layer, reason));
    layer.gate = layer.up = (struct qtool_matmul_weight[]){matrix(QTOOL_MATMUL_LUT, 4, 256, 1024)};
    layer.down = (struct qtool_matmul_weight[]){mix24(1024, 256, 1, 0)};
    layer.experts = 1;
    refuses("MIX24 in down alone", qtool_moe_plan(&p, &layer, 1, &opt));
    layer.gate = layer.up = (struct qtool_matmul_weight[]){mix24(256, 65664, 0, 0)};
    layer.down = (struct qtool_matmul_weight[]){mix24(65664, 256, 0, 0)};
    refuses("MIX24 of two CSR panels", qtool_moe_table(table, &layer, reason));
}

int main(void)
{
    simulate_device(&h200);
    other_mix24();
    long_blocks();
    no_such_tiles();
    refused_plans();
    dense_products();
    other_matrices();
    long_pitches();
    slices();
    large_matrices();
    mix24_experts();
    w4ax();
    for (int scales = QTOOL_W4AX_BLOCK; scales <= QTOOL_W4AX_ROW; scales++)
        w4ax_configs((enum qtool_w4ax_scales)scales);
    w4ax_experts();
    kv4();
    printf("%d passed, %d failed, 0 skipped\n", passed, failed);
    return failed != 0;
}
