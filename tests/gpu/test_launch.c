/*
 * Plans and launches of libqtool_kernels on simulated devices (simulated.h). Every shape gets a
 * plan, its launches are within the limits of the device and of TMA, and batch-invariant plans add
 * in the same order for every m. Needs no GPU; other tests check results on a GPU.
 *
 * usage: test_launch     prints "N passed, M failed, K skipped"
 */
#include "kernels/include/qtool_kv4.h"
#include "kernels/include/qtool_moe.h"
#include "kernels/include/qtool_w4ax.h"
#include "tests/gpu/simulated.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define COUNT(a) (sizeof(a) / sizeof *(a))

static const struct simulated_device devices[] = {
    {"H200", 132, 232448, 9, 0, 90},       {"H100 PCIe", 114, 232448, 9, 0, 90},
    {"H200 MIG 1g", 16, 232448, 9, 0, 90}, {"A100", 108, 166912, 8, 0, 80},
    {"RTX 4090", 128, 101376, 8, 9, 80},   {"RTX 5090", 170, 101376, 12, 0, 80},
    {"RTX 3060", 28, 101376, 8, 6, 80},
};

static const size_t rows[] = {1,    16,   100,   1024,  1040,  2112,  2128,  4096,  5120,   6144,
                              8192, 8464, 10240, 11008, 14336, 18944, 28672, 57344, 128256, 262144};
static const size_t columns[] = {64, 100, 256, 1024, 3584, 4096, 8192, 14336, 28672};
static const size_t tokens[] = {1,  3,   8,   9,   16,  17,  28,  32,   33,  64,
                                65, 100, 127, 128, 136, 192, 256, 1000, 4096};

static int passed, failed, rounded_tiles, gated_plans;
static const char *device; /* name of the current device */
static bool hopper;

/* Address of sections, activations, results and the workspace. It is never read. */
static void *const memory = (void *)0x100000;

/* fault: NULL for success. */
static void result(const char *what, size_t n, size_t k, size_t m, const char *fault)
{
    passed += !fault;
    failed += fault != NULL;
    if (fault && failed < 50)
        printf("FAILED %s, %s, %zu x %zu, %zu tokens: %s\n", device, what, n, k, m, fault);
}

/* Returns NULL, or what was wrong with a run that returned `status`. */
static const char *launch_fault(int status)
{
    const int launches = simulated_launches();
    const char *fault = simulated_fault();
    return fault                ? fault
           : status != QTOOL_OK ? "run refused what plan took"
           : launches < 1       ? "nothing was launched"
                                : NULL;
}

/* The same, if the plan may have been refused with `reason`. */
static const char *plan_fault(const char *reason, int status)
{
    const char *fault = launch_fault(status);
    return reason[0] ? reason : fault;
}

/* ---- products of qtool_kernels.h ------------------------------------------------------------ */

struct scheme {
    const char *name;
    enum qtool_matmul_kind kind;
    unsigned bits, exp_bits;
    size_t group;
    bool zeros;
};

static const struct scheme schemes[] = {
    {"nf4", QTOOL_MATMUL_LUT, 4, 0, 128, false},
    {"nf4:g=32", QTOOL_MATMUL_LUT, 4, 0, 32, false},
    {"nf3", QTOOL_MATMUL_LUT, 3, 0, 64, false},
    {"nf2:g=256", QTOOL_MATMUL_LUT, 2, 0, 256, false},
    {"fp4", QTOOL_MATMUL_FPX, 4, 2, 0, false},
    {"fp5", QTOOL_MATMUL_FPX, 5, 2, 0, false},
    {"fp5:e=3", QTOOL_MATMUL_FPX, 5, 3, 0, false},
    {"fp6", QTOOL_MATMUL_FPX, 6, 3, 0, false},
    {"fp6:e=2", QTOOL_MATMUL_FPX, 6, 2, 0, false},
    {"fp6:e=1", QTOOL_MATMUL_FPX, 6, 1, 0, false},
    {"fp7", QTOOL_MATMUL_FPX, 7, 3, 0, false},
    {"fp8", QTOOL_MATMUL_FPX, 8, 4, 0, false},
    {"fp8:e=3", QTOOL_MATMUL_FPX, 8, 3, 0, false},
    {"fp8:e=5", QTOOL_MATMUL_FPX, 8, 5, 0, false},
    {"int4", QTOOL_MATMUL_INT, 4, 0, 128, false},
    {"int4, zero-points", QTOOL_MATMUL_INT, 4, 0, 64, true},
    {"int8, rows", QTOOL_MATMUL_INT, 8, 0, 0, false},
    {"int8, zero-points", QTOOL_MATMUL_INT, 8, 0, 32, true},
};

static struct qtool_matmul_weight weight_of(const struct scheme *s, size_t n, size_t k)
{
    return (struct qtool_matmul_weight){
        .kind = s->kind,
        .bits = s->bits,
        .exp_bits = s->exp_bits,
        .n = n,
        .k = k,
        .group = s->group,
        .plane = {memory, memory, memory},
        .scale = memory,
        .table = s->kind == QTOOL_MATMUL_LUT ? memory : NULL,
        .zero = s->zeros ? memory : NULL,
    };
}

static int dense(void *context, void *y, size_t ldy, const void *x, const void *w, size_t m,
                 size_t n, size_t k, enum qtool_dtype dtype, void *stream)
{
    (void)context, (void)y, (void)ldy, (void)x, (void)w;
    (void)m, (void)n, (void)k, (void)dtype, (void)stream;
    return 0;
}

/* True if a plan should round weights: the path DENSE, and tiles with groups of 32 channels, with
 * groups of 64 except for 8 bits, and for more than 128 tokens with look-up tables, or with 8 bits
 * and tiles of 256 tokens. Some tile sizes have no rounding kernel. */
static bool rounds(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w)
{
    const bool lut = w->kind == QTOOL_MATMUL_LUT;
    if (p->config.path != QTOOL_MATMUL_TILE || !w->group || w->group >= w->k)
        return p->config.path == QTOOL_MATMUL_DENSE;
    const int width = p->config.tile.token_tiles * 8;
    const bool narrow = p->config.tile.warps == 8 && (width == 64 || width == 128);
    if (w->group == 32 || w->bits == 8)
        return w->group == 32 || (p->m > 128 && width == 256);
    return (w->group == 64 || (lut && p->m > 128)) &&
           (narrow || width == 256 || (lut && width >= 128));
}

/* True if the library has machine code for the device. Kernels for older devices are compiled for
 * 9.0 only where plans use them there (cuda.mk). */
static bool is_compiled(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w)
{
    const bool older =
        p->config.path == QTOOL_MATMUL_STREAM || p->config.path == QTOOL_MATMUL_MMA_TILE;
    return !hopper || !older || w->kind == QTOOL_MATMUL_MIX24 || (w->zero && w->bits == 4);
}

static void check_product(const char *name, const struct qtool_matmul_weight *w, size_t m,
                          const struct qtool_matmul_options *opt, struct qtool_matmul_plan *plan)
{
    int rc = qtool_matmul_plan(plan, w, m, opt);
    if (rc == QTOOL_OK)
        rc = qtool_matmul_run(plan, w, memory, memory, memory, NULL);
    const char *fault = plan_fault(plan->reason, rc);
    if (!fault && plan->rounded != rounds(plan, w))
        fault = "rounded is wrong";
    if (!fault && !is_compiled(plan, w))
        fault = "a kernel that the driver has to compile";
    result(name, w->n, w->k, m, fault);
    rounded_tiles += plan->rounded && plan->config.path == QTOOL_MATMUL_TILE;
}

/* True if two configurations add in the same order. The order depends on how k is divided among
 * thread blocks and warps, and in skinny kernels, whose warps take slots of all tiles in turn, on
 * the tiles. */
static bool same_order(const struct qtool_matmul_config *a, const struct qtool_matmul_config *b)
{
    if (a->path != b->path)
        return false;
    switch (a->path) {
    case QTOOL_MATMUL_STREAM:
        return a->stream.warps_k == b->stream.warps_k && a->stream.splits == b->stream.splits;
    case QTOOL_MATMUL_RING:
        return a->ring.warps_k == b->ring.warps_k && a->ring.cluster == b->ring.cluster &&
               a->ring.parts == b->ring.parts;
    case QTOOL_MATMUL_SKINNY:
        return a->skinny.warps_k == b->skinny.warps_k &&
               a->skinny.strips_cta == b->skinny.strips_cta &&
               a->skinny.strips == b->skinny.strips && a->skinny.warps == b->skinny.warps;
    default:
        return false; /* other paths are not batch-invariant */
    }
}

static void check_products(const char *name, const struct qtool_matmul_weight *w)
{
    for (int option = 0; option < 4; option++) {
        const struct qtool_matmul_options opt = {
            .dtype = option & 1 ? QTOOL_BF16 : QTOOL_F16,
            .dependent_launch = option == 1,
            .batch_invariant = option == 2,
            .dense = option == 3 ? dense : NULL,
        };
        struct qtool_matmul_plan first = {0};
        for (size_t i = 0; i < COUNT(tokens); i++) {
            struct qtool_matmul_plan plan;
            check_product(name, w, tokens[i], &opt, &plan);
            if (i == 0)
                first = plan;
            if (opt.batch_invariant)
                result(name, w->n, w->k, tokens[i],
                       same_order(&first.config, &plan.config)
                           ? NULL
                           : "the order of additions differs from that of one token");
        }
    }
}

/* Gated products are planned where rows and tokens permit and kernels exist, and run then. On an
 * H200 they are for 28672 rows of 3584 channels and more, except with tiles of 48 tokens and tiles
 * that round. */
static void check_gated(const char *name, const struct qtool_matmul_weight *w)
{
    for (size_t i = 0; i < COUNT(tokens); i++) {
        const struct qtool_matmul_options opt = {.dtype = i & 1 ? QTOOL_BF16 : QTOOL_F16,
                                                 .gated = QTOOL_MATMUL_GATED_SILU};
        /* TMA cannot copy an odd number of groups of 4-bit zero-points. */
        const bool boxes = !w->zero || w->bits == 8 || (w->k + w->group - 1) / w->group % 2 == 0;
        const bool can =
            hopper && w->n % 32 == 0 && tokens[i] <= 64 && boxes && w->bits <= 4 && w->bits > 2;
        const bool must = strcmp(device, "H200") == 0 && w->n == 28672 && w->k >= 3584 &&
                          (tokens[i] <= 16 || (tokens[i] != 33 && w->group == 128));
        struct qtool_matmul_plan plan;
        int rc = qtool_matmul_plan(&plan, w, tokens[i], &opt);
        const char *fault = NULL;
        if (rc == QTOOL_OK)
            fault = can ? launch_fault(qtool_matmul_run(&plan, w, memory, memory, memory, NULL))
                        : "a gated plan that cannot be";
        else if (can && must)
            fault = plan.reason;
        result(name, w->n, w->k, tokens[i], fault);
        gated_plans += rc == QTOOL_OK;
    }
}

/* Several look-up matrices with tables of their own. */
static void check_many(const char *name, const struct scheme *scheme, size_t k)
{
    static const size_t sets[][QTOOL_MATMUL_MANY] = {
        {4096, 1024, 1024}, {14336, 14336}, {8192, 1024, 1024}, {3584, 512, 512}, {100, 1}};
    void *const y[] = {memory, memory, memory};
    for (size_t i = 0; i < COUNT(sets); i++) {
        struct qtool_matmul_weight of[QTOOL_MATMUL_MANY];
        const struct qtool_matmul_weight *w[QTOOL_MATMUL_MANY];
        size_t count = 0;
        for (; count < QTOOL_MATMUL_MANY && sets[i][count]; count++) {
            of[count] = weight_of(scheme, sets[i][count], k);
            w[count] = &of[count];
        }
        for (size_t m = 1; m <= 17; m += m == 1 ? 7 : m == 8 ? 1 : 8) {
            const struct qtool_matmul_options opt = {.dependent_launch = (int)(m & 1)};
            const bool can = hopper && m <= 16 && k % 64 == 0 && scheme->bits > 2;
            struct qtool_matmul_plan plan;
            int rc = qtool_matmul_plan_many(&plan, w, count, m, &opt);
            const char *fault = NULL;
            if (rc == QTOOL_OK)
                fault = can ? launch_fault(qtool_matmul_run_many(&plan, w, count, y, memory, NULL))
                            : "a plan of several matrices that cannot be";
            else if (can)
                fault = plan.reason;
            result(name, sets[i][0], k, m, fault);
        }
    }
}

static struct qtool_matmul_weight mix24_of(size_t n, size_t k, bool outliers)
{
    const size_t units = (k + 127) / 128;
    return (struct qtool_matmul_weight){
        .kind = QTOOL_MATMUL_MIX24,
        .n = n,
        .k = k,
        .mix24 = {.twos = units - units / 4,
                  .fours = units / 4,
                  .stream = memory,
                  .perm = memory,
                  .csr_ptr = outliers ? memory : NULL,
                  .csr_col = outliers ? memory : NULL,
                  .csr_val = outliers ? memory : NULL,
                  .outliers = outliers ? n * k / 500 : 0},
    };
}

static void check_mix24(size_t n, size_t k, bool outliers)
{
    const struct qtool_matmul_weight w = mix24_of(n, k, outliers);
    check_products(outliers ? "mix24" : "mix24 without outliers", &w);
}

/* A configuration that the check accepts runs, also if the last launch has fewer tokens: m is in
 * launches of 8 or 16. */
static void check_skinny(const char *name, const struct qtool_matmul_weight *w, size_t m)
{
    const struct qtool_matmul_options opt = {0};
    struct qtool_matmul_plan plan;
    struct qtool_skinny_config c;
    int accepted = 0;
    for (c.token_tiles = 1; c.token_tiles <= 2; c.token_tiles++)
        for (c.strips = 1; c.strips <= 4; c.strips *= 2)
            for (c.warps_k = 2; c.warps_k <= 8; c.warps_k *= 2)
                for (c.warps = c.warps_k; c.warps <= 16; c.warps += c.warps_k)
                    for (c.strips_cta = 1; c.strips_cta <= 8; c.strips_cta++)
                        for (c.depth = c.warps_k; c.depth <= 16; c.depth += c.warps_k) {
                            int rc = qtool_matmul_plan(&plan, w, m, &opt);
                            plan.config.path = QTOOL_MATMUL_SKINNY;
                            plan.config.skinny = c;
                            if (rc == QTOOL_OK && qtool_matmul_plan_check(&plan, w) != QTOOL_OK)
                                continue;
                            accepted++;
                            rc = qtool_matmul_run(&plan, w, memory, memory, memory, NULL);
                            result(name, w->n, w->k, m, launch_fault(rc));
                        }
    result(name, w->n, w->k, m, accepted ? NULL : "no skinny configuration is accepted");
}

/* ---- products of qtool_w4ax.h --------------------------------------------------------------- */

static void check_w4ax(size_t n, size_t k, enum qtool_w4ax_scales scales, bool packed)
{
    static const char *const names[] = {"w4ax", "w4ax:scales=int", "w4ax:scales=row"};
    const struct qtool_w4ax_weight w = {
        .scales = scales,
        .n = n,
        .k = k,
        .plane = memory,
        .scale = memory,
        .row_scale = scales == QTOOL_W4AX_BLOCK ? NULL : memory,
        .blocks = memory,
    };
    const struct qtool_w4ax_acts acts = {memory, memory, memory};
    for (size_t i = 0; i < COUNT(tokens); i++) {
        const struct qtool_w4ax_options opt = {
            .output = (enum qtool_w4ax_output)(i % 3), .packed = packed, .dependent_launch = i & 1};
        struct qtool_w4ax_plan plan;
        int rc = qtool_w4ax_plan(&plan, &w, tokens[i], &opt);
        if (rc == QTOOL_OK)
            rc = qtool_w4ax_run(&plan, &w, &acts, memory, memory, NULL);
        const char *fault = plan_fault(plan.reason, rc);
        if (!fault && hopper && plan.config.kernel == QTOOL_W4AX_STREAM &&
            scales != QTOOL_W4AX_BLOCK)
            fault = "a kernel that the driver has to compile";
        result(names[scales], n, k, tokens[i], fault);
    }
}

static void check_quantize(size_t k)
{
    const struct qtool_w4ax_acts acts = {memory, memory, memory};
    for (size_t i = 0; i < COUNT(tokens); i++)
        for (int what = 0; what < 3 * 3 * 2 * 2; what++) {
            const enum qtool_w4ax_scales scales = (enum qtool_w4ax_scales)(what % 3);
            const struct qtool_w4ax_norm norm = {.kind = (enum qtool_w4ax_norm_kind)(what / 3 % 3),
                                                 .weight = memory,
                                                 .bias = what / 3 % 3 == 2 ? memory : NULL};
            const struct qtool_w4ax_input in = {.scales = scales,
                                                .k = k,
                                                .blocks = memory,
                                                .perm = what / 9 % 2 ? memory : NULL,
                                                .clip4 = 1,
                                                .clip8 = 1,
                                                .packed = scales == QTOOL_W4AX_BLOCK && what / 18,
                                                .dependent_launch = what / 18};
            const int rc =
                qtool_w4ax_quantize(&acts, &in, &norm, memory, tokens[i], QTOOL_BF16, NULL);
            result("quantize", 1, k, tokens[i], launch_fault(rc));
        }
}

/* ---- attention ------------------------------------------------------------------------------ */

static void check_attention(size_t heads, size_t kv_heads, size_t dim, enum qtool_kv_format format)
{
    const struct qtool_kv_cache cache = {
        .format = format,
        .heads = kv_heads,
        .head_dim = dim,
        .page_tokens = 64,
        .table = memory,
        .table_pitch = 1 << 14,
        .k = memory,
        .v = memory,
        .v_param = memory,
        .k_param = memory,
        .k_first = memory,
        .k_tail = memory,
    };
    int rc = qtool_kv_append(&cache, memory, memory, memory, memory, 100, QTOOL_F16, 1, NULL);
    result("append", heads, kv_heads * dim, 100, launch_fault(rc));
    for (size_t batch = 1; batch <= 256; batch *= 4)
        for (size_t length = 1; length <= 1 << 20; length *= 32) {
            const struct qtool_kv_options opt = {.batch = batch,
                                                 .heads = heads,
                                                 .max_length = length,
                                                 .scale = 1,
                                                 .dependent_launch = batch != 4};
            struct qtool_kv_plan plan;
            rc = qtool_kv_attention_plan(&plan, &cache, &opt, 0);
            if (rc == QTOOL_OK)
                rc = qtool_kv_attention_run(&plan, &cache, memory, memory, memory, memory, NULL);
            result("attention", heads, kv_heads * dim, batch, plan_fault(plan.reason, rc));
        }
}

/* ---- layers of experts of qtool_moe.h ------------------------------------------------------- */

/* Whether gate and up are two launches: LUT with a table each, or mix24. */
static bool two_launches(const struct scheme *s, const struct qtool_moe_options *opt)
{
    return !s || (s->kind == QTOOL_MATMUL_LUT && s->bits == 4 && !opt->same_tables);
}

/* s: NULL for mix24, of which every second expert has outliers. */
static void check_experts(const struct scheme *s, size_t experts, size_t hidden, size_t inner)
{
    static struct qtool_matmul_weight wide[QTOOL_MOE_MAX_EXPERTS], narrow[QTOOL_MOE_MAX_EXPERTS];
    static unsigned char table[QTOOL_MOE_MAX_EXPERTS * QTOOL_MOE_TABLE_EXPERT];
    const struct qtool_moe_layer layer = {
        .experts = experts, .gate = wide, .up = wide, .down = narrow};
    char reason[160];
    const char *name = s ? s->name : "mix24";
    for (size_t e = 0; e < experts; e++) {
        wide[e] = s ? weight_of(s, inner, hidden) : mix24_of(inner, hidden, e % 2);
        narrow[e] = s ? weight_of(s, hidden, inner) : mix24_of(hidden, inner, e % 2);
    }
    int rc = qtool_moe_table(table, &layer, reason);
    result(name, inner, hidden, experts, rc == QTOOL_OK ? NULL : reason);
    for (size_t m = 0; m <= 8192; m = m ? 8 * m : 1)
        for (size_t topk = 1; topk <= 8; topk *= 8) {
            const struct qtool_moe_options opt = {.dtype = m & 0x208 ? QTOOL_BF16 : QTOOL_F16,
                                                  .topk = topk,
                                                  .dependent_launch = m == 64,
                                                  .same_tables = topk == 1};
            struct qtool_moe_plan plan;
            rc = qtool_moe_plan(&plan, &layer, m, &opt);
            if (rc == QTOOL_OK)
                rc = qtool_moe_run(&plan, memory, memory, memory, memory, memory, memory, NULL);
            const int launches = simulated_launches();
            const int least = two_launches(s, &opt) ? 4 : 3;
            const char *fault = plan.reason[0] ? plan.reason : simulated_fault();
            if (!fault)
                fault = rc != QTOOL_OK     ? "run refused what plan took"
                        : m == 0           ? (launches ? "a launch without tokens" : NULL)
                        : launches < least ? "too few launches"
                                           : NULL;
            result(name, inner, hidden, m, fault);
        }
}

static void check_w4ax_experts(enum qtool_w4ax_scales scales, size_t experts, size_t hidden,
                               size_t inner)
{
    static struct qtool_w4ax_weight wide[QTOOL_MOE_MAX_EXPERTS], narrow[QTOOL_MOE_MAX_EXPERTS];
    static struct qtool_w4ax_input inputs[QTOOL_MOE_MAX_EXPERTS];
    static unsigned char table[QTOOL_MOE_MAX_EXPERTS * QTOOL_MOE_TABLE_EXPERT];
    const struct qtool_w4ax_input input = {
        .scales = scales, .k = hidden, .blocks = memory, .perm = memory, .clip4 = 1, .clip8 = 1};
    const struct qtool_moe_w4ax w4ax = {wide, wide, narrow, input, inputs};
    const struct qtool_moe_layer layer = {.experts = experts, .w4ax = &w4ax};
    char reason[160];
    for (size_t e = 0; e < experts; e++) {
        wide[e] = (struct qtool_w4ax_weight){.scales = scales,
                                             .n = inner,
                                             .k = hidden,
                                             .plane = memory,
                                             .scale = memory,
                                             .row_scale = memory};
        narrow[e] = wide[e];
        narrow[e].n = hidden;
        narrow[e].k = inner;
        inputs[e] = (struct qtool_w4ax_input){
            .scales = scales, .k = inner, .blocks = memory, .clip4 = 1, .clip8 = 1};
    }
    int rc = qtool_moe_table(table, &layer, reason);
    result("w4ax experts", inner, hidden, experts, rc == QTOOL_OK ? NULL : reason);
    for (size_t m = 0; m <= 8192; m = m ? 8 * m : 1)
        for (size_t topk = 1; topk <= 8; topk *= 8) {
            const struct qtool_moe_options opt = {.dtype = m & 0x208 ? QTOOL_BF16 : QTOOL_F16,
                                                  .topk = topk,
                                                  .dependent_launch = m == 64};
            struct qtool_moe_plan plan;
            rc = qtool_moe_plan(&plan, &layer, m, &opt);
            if (rc == QTOOL_OK)
                rc = qtool_moe_run(&plan, memory, memory, memory, memory, memory, memory, NULL);
            const int launches = simulated_launches();
            const char *fault = plan.reason[0] ? plan.reason : simulated_fault();
            if (!fault)
                fault = rc != QTOOL_OK ? "run refused what plan took"
                        : m == 0       ? (launches ? "a launch without tokens" : NULL)
                        : launches < 5 ? "too few launches"
                                       : NULL;
            result("w4ax experts", inner, hidden, m, fault);
        }
}

int main(void)
{
    for (size_t d = 0; d < COUNT(devices); d++) {
        device = devices[d].name;
        hopper = devices[d].code == 90;
        simulate_device(&devices[d]);
        for (size_t i = 0; i < COUNT(rows); i++)
            for (size_t j = 0; j < COUNT(columns); j++) {
                const size_t n = rows[i], k = columns[j];
                if (n > 65536 && k > 8192) /* no model has this; it does not fit into 99 KB */
                    continue;
                for (size_t s = 0; s < COUNT(schemes); s++) {
                    const struct qtool_matmul_weight w = weight_of(&schemes[s], n, k);
                    check_products(schemes[s].name, &w);
                    check_gated(schemes[s].name, &w);
                    if (n == 1 && schemes[s].kind == QTOOL_MATMUL_LUT)
                        check_many(schemes[s].name, &schemes[s], k);
                    const int rc = qtool_matmul_dequantize(&w, memory, QTOOL_F16, NULL);
                    result("dequantize", n, k, 0, launch_fault(rc));
                }
                check_mix24(n, k, false);
                check_mix24(n, k, true);
                for (int scales = QTOOL_W4AX_BLOCK; scales <= QTOOL_W4AX_ROW; scales++)
                    check_w4ax(n, k, (enum qtool_w4ax_scales)scales, false);
                check_w4ax(n, k, QTOOL_W4AX_BLOCK, true);
            }
        for (size_t m = 1; hopper && m < 40; m++) {
            struct qtool_matmul_weight w = weight_of(&schemes[14], 96, 1024);
            check_skinny("int4", &w, m);
            w = mix24_of(96, 1024, true);
            check_skinny("mix24", &w, m);
            w.mix24.twos += w.mix24.fours;
            w.mix24.fours = 0;
            check_skinny("mix24, 2-bit groups alone", &w, m);
        }
        for (size_t s = 0; s < COUNT(schemes); s++) {
            check_experts(&schemes[s], 128, 2048, 768);
            check_experts(&schemes[s], 512, 7168, 2048);
            check_experts(&schemes[s], 3, 100, 14336);
            check_experts(&schemes[s], 1, 1, 1);
        }
        check_experts(NULL, 128, 2048, 768);
        check_experts(NULL, 512, 7168, 2048);
        check_experts(NULL, 3, 100, 14336);
        check_experts(NULL, 1, 1, 1);
        for (int scales = QTOOL_W4AX_BLOCK; scales <= QTOOL_W4AX_ROW; scales++)
            check_w4ax(5000000, 65536, (enum qtool_w4ax_scales)scales, false);
        for (int scales = QTOOL_W4AX_BLOCK; scales <= QTOOL_W4AX_ROW; scales++) {
            check_w4ax_experts((enum qtool_w4ax_scales)scales, 128, 2048, 768);
            check_w4ax_experts((enum qtool_w4ax_scales)scales, 512, 7168, 2048);
            check_w4ax_experts((enum qtool_w4ax_scales)scales, 8, 4096, 14336);
            check_w4ax_experts((enum qtool_w4ax_scales)scales, 3, 104, 32768);
            check_w4ax_experts((enum qtool_w4ax_scales)scales, 1, 32768, 8);
        }
        for (size_t j = 0; j < COUNT(columns); j++)
            check_quantize((columns[j] + 7) / 8 * 8);
        for (size_t dim = 64; dim <= 128; dim *= 2)
            for (size_t group = 1; group <= 32; group *= 2)
                for (int format = QTOOL_KV_INT4; format <= QTOOL_KV_F16; format++)
                    check_attention(4 * group, 4, dim, (enum qtool_kv_format)format);
    }
    result("tiles that round", 0, 0, 0, rounded_tiles > 0 ? NULL : "no plan uses one");
    result("gated products", 0, 0, 0, gated_plans > 0 ? NULL : "no plan has one");
    printf("%d passed, %d failed, 0 skipped\n", passed, failed);
    return failed != 0;
}
