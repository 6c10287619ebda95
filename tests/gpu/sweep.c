/*
 * For authors of kernels: times configurations around the one that plan chooses, the fastest
 * first. Everything else is measured by `qtool bench`.
 *
 * usage: sweep SCHEME NxK M [dependent]
 */
#include "verify/gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SHOWN = 12, MAX_TRIED = 4096 };

struct tried {
    struct qt_matmul_config config;
    double us;
};

static int by_time(const void *a, const void *b)
{
    const struct tried *x = a, *y = b;
    return (x->us > y->us) - (x->us < y->us);
}

static void show(const char *name, const struct qt_matmul_config *c, double us)
{
    printf("%-8s %8.2f us  tiles %d strips %d warps %d/%d cta %d splits %d\n", name, us,
           c->token_tiles, c->strips, c->warps, c->warps_k, c->strips_cta, c->splits);
}

static void fail_on(int rc, const struct qt_err *err)
{
    if (rc == QT_OK)
        return;
    printf("%s\n", err->reason);
    exit(rc == QT_E_NO_GPU ? 0 : 1);
}

/* Times every configuration of the neighbourhood that the plan takes. */
static size_t try_all(struct tried *tried, struct qt_gpu *gpu, const struct gpu_copies *copies,
                      struct qt_matmul_plan plan, struct gpu_operands *o)
{
    const struct qt_matmul_config base = plan.config;
    int strips_total = (int)((plan.n + 15) / 16);
    size_t count = 0;
    for (int strips = 1; strips <= 2; strips++)
        for (int splits = 1; splits <= 8; splits++)
            for (int warps = 8; warps <= 16; warps *= 2)
                for (int warps_k = warps / 4; warps_k <= warps; warps_k *= 2)
                    for (int per_sm = 1; per_sm <= 16 / warps && count < MAX_TRIED; per_sm++) {
                        int groups = gpu->sms * per_sm / splits;
                        int cta = (strips_total + groups - 1) / groups;
                        plan.config = base;
                        plan.config.strips = strips;
                        plan.config.splits = splits;
                        plan.config.warps = warps;
                        plan.config.warps_k = warps_k;
                        plan.config.strips_cta = (cta + strips - 1) / strips * strips;
                        struct tried *t = &tried[count];
                        t->config = plan.config;
                        if (count && memcmp(&t->config, &t[-1].config, sizeof t->config) == 0)
                            continue; /* more blocks than strips */
                        if (gpu->replan(gpu, &plan, &copies->weight[0], NULL) == QT_OK &&
                            gpu_time_plan(&t->us, gpu, copies, &plan, o, NULL) == QT_OK)
                            count++;
                    }
    return count;
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
    struct qt_matmul_plan plan;
    size_t n, k, m;
    double us;
    if (argc < 4 || sscanf(argv[2], "%zux%zu", &n, &k) != 2 || sscanf(argv[3], "%zu", &m) != 1) {
        printf("usage: sweep SCHEME NxK M [dependent]\n");
        return 2;
    }
    const struct qt_matmul_options opt = {.dependent_launch = argc > 4};
    fail_on(qt_gpu_open(&gpu, 0, &err), &err);
    fail_on(qt_spec_parse(&spec, argv[1], &err), &err);
    fail_on(qt_bench_weights(&packed, &spec, n, k, &err), &err);
    fail_on(gpu_copies_new(&copies, gpu, &packed, &err), &err);
    fail_on(gpu_buffer_need(&o.x, gpu, m * k * 2, &err), &err);
    fail_on(gpu_buffer_need(&o.y, gpu, m * n * 2, &err), &err);
    fail_on(gpu_fill_random(gpu, o.x.data, m * k * 2, 1, &err), &err);
    fail_on(gpu->plan(gpu, &plan, &copies.weight[0], m, &opt, &err), &err);
    fail_on(gpu_time_plan(&us, gpu, &copies, &plan, &o, &err), &err);
    show("planned", &plan.config, us);
    fail_on(gpu_time_floor(&us, gpu, &copies, &err), &err);
    printf("%-8s %8.2f us\n", "floor", us);
    size_t count = try_all(tried, gpu, &copies, plan, &o);
    qsort(tried, count, sizeof *tried, by_time);
    for (size_t i = 0; i < count && i < SHOWN; i++)
        show("", &tried[i].config, tried[i].us);
    gpu_copies_free(&copies, gpu);
    gpu_operands_free(&o, gpu);
    qt_packed_free(&packed);
    gpu->close(gpu);
    return 0;
}
