/*
 * For kernel authors: times configurations around the planned one, and dense products of
 * dequantized weights, and prints the fastest first. `qtool bench` measures everything else.
 *
 * usage: sweep SCHEME NxK M [dependent | COMPUTE]     COMPUTE: plan for a device of 80, 86, 89
 */
#include "tests/gpu/config_text.h"
#include "tests/gpu/tile_tokens.h"
#include "verify/gpu/gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SHOWN = 12, MAX_TRIED = 4096 };

struct tried {
    struct qtool_matmul_config config;
    double us;
};

static int by_time(const void *a, const void *b)
{
    const struct tried *x = a, *y = b;
    return (x->us > y->us) - (x->us < y->us);
}

static void show(const char *name, const struct qtool_matmul_config *c, double us)
{
    char text[160];
    config_text(text, sizeof text, c);
    printf("%-8s %8.2f us  %s\n", name, us, text);
}

static void fail_on(int rc, const struct qt_err *err)
{
    if (rc == QT_OK)
        return;
    printf("%s\n", err->reason);
    exit(rc == QT_E_NO_GPU ? 0 : 1);
}

/* Times plan->config if it is accepted. */
static void try_one(struct tried *tried, size_t *count, struct qt_gpu *gpu,
                    const struct gpu_copies *copies, struct qtool_matmul_plan *plan,
                    struct gpu_operands *o)
{
    struct tried *t = &tried[*count];
    if (*count == MAX_TRIED)
        return;
    t->config = plan->config;
    if (qtool_matmul_plan_check(plan, &copies->weight[0]) == QTOOL_OK &&
        gpu_time_plan(&t->us, NULL, gpu, copies, plan, NULL, o, NULL) == QT_OK)
        ++*count;
}

static void try_tiles(struct tried *tried, size_t *count, struct qt_gpu *gpu,
                      const struct gpu_copies *copies, struct qtool_matmul_plan plan,
                      struct gpu_operands *o)
{
    for (int warps = 8; warps <= 16; warps += 4)
        for (int i = 0; i < TILE_WIDTHS; i++)
            for (int s = QTOOL_TILE_WHOLE; s <= QTOOL_TILE_CLUSTER_4; s++) {
                plan.config =
                    (struct qtool_matmul_config){.path = QTOOL_MATMUL_TILE,
                                                 .tile = {.warps = warps,
                                                          .token_tiles = tile_tokens[i] / 8,
                                                          .schedule = (enum qtool_tile_schedule)s}};
                try_one(tried, count, gpu, copies, &plan, o);
            }
}

static void try_dense(struct tried *tried, size_t *count, struct qt_gpu *gpu,
                      const struct gpu_copies *copies, struct qtool_matmul_plan plan,
                      struct gpu_operands *o)
{
    plan.config = (struct qtool_matmul_config){.path = QTOOL_MATMUL_DENSE};
    for (int *parts = &plan.config.dense.parts, n = 1; n <= 64; n *= 2) {
        *parts = n;
        try_one(tried, count, gpu, copies, &plan, o);
    }
}

static void try_mma_tiles(struct tried *tried, size_t *count, struct qt_gpu *gpu,
                          const struct gpu_copies *copies, struct qtool_matmul_plan plan,
                          struct gpu_operands *o)
{
    struct qtool_mma_tile_config *c = &plan.config.mma_tile;
    plan.config = (struct qtool_matmul_config){.path = QTOOL_MATMUL_MMA_TILE};
    c->warps = 8;
    for (c->strips = 1; c->strips <= 4; c->strips *= 2)
        for (c->strips_cta = 8; c->strips_cta <= 32; c->strips_cta *= 2)
            for (c->token_tiles = 4; c->token_tiles <= 16; c->token_tiles *= 2)
                for (c->splits = 1; c->splits <= 16; c->splits++)
                    try_one(tried, count, gpu, copies, &plan, o);
}

static void try_skinny(struct tried *tried, size_t *count, struct qt_gpu *gpu,
                       const struct gpu_copies *copies, struct qtool_matmul_plan plan,
                       struct gpu_operands *o)
{
    struct qtool_skinny_config c = {.token_tiles = plan.m <= 8 ? 1 : 2};
    int strips_total = (int)((plan.n + 15) / 16);
    plan.config = (struct qtool_matmul_config){.path = QTOOL_MATMUL_SKINNY};
    for (c.strips = 1; c.strips <= 4; c.strips *= 2)
        for (int tiles = 1; tiles <= 8; tiles++) {
            int cta = (strips_total + gpu->sms - 1) / gpu->sms;
            int tile = (cta + tiles - 1) / tiles, warps_n = (tile + c.strips - 1) / c.strips;
            c.strips_cta = tile * tiles;
            for (c.warps_k = 2; c.warps_k * warps_n <= 16; c.warps_k *= 2)
                for (c.depth = 2; c.depth <= 16; c.depth += c.depth < 6 ? 1 : 2) {
                    c.warps = c.warps_k * warps_n;
                    plan.config.skinny = c;
                    if (c.warps >= 7)
                        try_one(tried, count, gpu, copies, &plan, o);
                }
        }
}

static void try_streams(struct tried *tried, size_t *count, struct qt_gpu *gpu,
                        const struct gpu_copies *copies, struct qtool_matmul_plan plan,
                        struct gpu_operands *o)
{
    struct qtool_stream_config c = {.token_tiles = plan.m <= 8 ? 1 : plan.m <= 16 ? 2 : 4};
    int strips_total = (int)((plan.n + 15) / 16);
    plan.config = (struct qtool_matmul_config){.path = QTOOL_MATMUL_STREAM};
    for (c.strips = 1; c.strips <= 2; c.strips++)
        for (c.splits = 1; c.splits <= 8; c.splits++)
            for (c.warps = 8; c.warps <= 16; c.warps *= 2)
                for (c.warps_k = c.warps / 4; c.warps_k <= c.warps; c.warps_k *= 2)
                    for (int per_sm = 1; per_sm <= 16 / c.warps; per_sm++) {
                        int groups = gpu->sms * per_sm / c.splits;
                        int cta = (strips_total + groups - 1) / groups;
                        c.strips_cta = (cta + c.strips - 1) / c.strips * c.strips;
                        plan.config.stream = c;
                        try_one(tried, count, gpu, copies, &plan, o);
                    }
}

/* The mix24 ring kernel, with k in as many launches as planned, or 1. Also tries fewer row groups,
 * since not all large clusters that would fill the device run at the same time. */
static void try_ring(struct tried *tried, size_t *count, struct qt_gpu *gpu,
                     const struct gpu_copies *copies, struct qtool_matmul_plan plan,
                     struct gpu_operands *o)
{
    const int parts = plan.config.path == QTOOL_MATMUL_RING ? plan.config.ring.parts : 1;
    struct qtool_ring_config c = {.token_tiles = plan.m <= 8    ? 1
                                                 : plan.m <= 16 ? 2
                                                                : 4,
                                  .warps = 16,
                                  .parts = parts};
    int strips_total = (int)((plan.n + 15) / 16);
    plan.config = (struct qtool_matmul_config){.path = QTOOL_MATMUL_RING};
    for (c.strips = 1; c.strips <= 4; c.strips *= 2)
        for (c.cluster = 1; c.cluster <= 8; c.cluster *= 2)
            for (c.warps_k = c.warps / 8; c.warps_k <= c.warps; c.warps_k *= 2)
                for (c.depth = 2; c.depth <= 4; c.depth++)
                    for (int idle = 0; idle <= (c.cluster > 2 ? 20 : 0); idle += 10) {
                        int groups = (gpu->sms - idle) / c.cluster;
                        c.strips_cta = (strips_total + groups - 1) / groups;
                        plan.config.ring = c;
                        try_one(tried, count, gpu, copies, &plan, o);
                    }
}

static void try_vector(struct tried *tried, size_t *count, struct qt_gpu *gpu,
                       const struct gpu_copies *copies, struct qtool_matmul_plan plan,
                       struct gpu_operands *o)
{
    struct qtool_vector_config c = {0};
    plan.config = (struct qtool_matmul_config){.path = QTOOL_MATMUL_VECTOR};
    c.strips_cta = (int)((plan.n + 15) / 16 + (size_t)gpu->sms - 1) / gpu->sms;
    for (c.strips = 1; c.strips <= 3; c.strips++)
        for (c.warps_k = 1; c.warps_k <= 16; c.warps_k++)
            for (c.warps = 16 / c.warps_k * c.warps_k; c.warps >= 12; c.warps -= c.warps_k) {
                plan.config.vector = c;
                try_one(tried, count, gpu, copies, &plan, o);
            }
}

int main(int argc, char **argv)
{
    static struct tried tried[MAX_TRIED];
    struct qt_gpu *gpu = NULL;
    struct qt_err err = {0};
    struct qt_spec spec;
    struct qt_packed packed = {0};
    struct gpu_copies copies;
    struct gpu_operands o = {.x = {0}};
    struct qtool_matmul_plan plan;
    size_t n, k, m;
    double us;
    if (argc < 4 || sscanf(argv[2], "%zux%zu", &n, &k) != 2 || sscanf(argv[3], "%zu", &m) != 1) {
        printf("usage: sweep SCHEME NxK M [dependent | COMPUTE]\n");
        return 2;
    }
    fail_on(qt_gpu_open(&gpu, 0, &err), &err);
    const int compute = argc > 4 ? atoi(argv[4]) : 0;
    const struct qtool_matmul_options opt = {.dependent_launch = argc > 4 && !compute,
                                             .compute = compute,
                                             .dense = gpu->dense,
                                             .dense_context = gpu->dense_context};
    fail_on(qt_spec_parse(&spec, argv[1], &err), &err);
    fail_on(qt_bench_weights(&packed, &spec, n, k, &err), &err);
    fail_on(gpu_copies_new(&copies, gpu, &packed, &err), &err);
    fail_on(gpu_buffer_need(&o.x, gpu, m * k * 2, &err), &err);
    fail_on(gpu_buffer_need(&o.y, gpu, m * n * 2, &err), &err);
    fail_on(gpu_fill_random(gpu, o.x.data, m * k * 2, 1, &err), &err);
    fail_on(gpu->plan(gpu, &plan, &copies.weight[0], m, &opt, &err), &err);
    fail_on(gpu_time_plan(&us, NULL, gpu, &copies, &plan, NULL, &o, &err), &err);
    show("planned", &plan.config, us);
    fail_on(gpu_time_floor(&us, gpu, &copies, &err), &err);
    printf("%-8s %8.2f us\n", "floor", us);
    size_t count = 0;
    if (m > 32)
        try_dense(tried, &count, gpu, &copies, plan, &o);
    if (m > 8)
        try_tiles(tried, &count, gpu, &copies, plan, &o);
    if (m > 8 && plan.kind != QTOOL_MATMUL_MIX24)
        try_mma_tiles(tried, &count, gpu, &copies, plan, &o);
    if (plan.kind == QTOOL_MATMUL_MIX24 && m == 1)
        try_vector(tried, &count, gpu, &copies, plan, &o);
    if (plan.kind == QTOOL_MATMUL_MIX24 && m <= 32)
        try_ring(tried, &count, gpu, &copies, plan, &o);
    else if (m <= 32)
        try_streams(tried, &count, gpu, &copies, plan, &o);
    if (m <= 16)
        try_skinny(tried, &count, gpu, &copies, plan, &o);
    qsort(tried, count, sizeof *tried, by_time);
    for (size_t i = 0; i < count && i < SHOWN; i++)
        show("", &tried[i].config, tried[i].us);
    gpu_copies_free(&copies, gpu);
    gpu_operands_free(&o, gpu);
    qt_packed_free(&packed);
    gpu->close(gpu);
    return 0;
}
