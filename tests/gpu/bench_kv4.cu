/*
 * Speed of the cache attention: 4-bit and FP16, paged by 64 tokens and contiguous, against the read
 * floor of the cache's bytes. Copies of the cache rotate so that it is cold in L2.
 *
 * usage: bench_kv4 [HEADSxGROUPxDIM]
 */
#include "kernels/qtool_kv4.h"
#include "tests/gpu/timing.cuh"

#include <math.h>

struct setup {
    size_t heads, group, dim, batch, length;
};

static char *memory;
static size_t memory_bytes;
static int *table, *lengths;
static void *q, *out, *workspace;
static float *channel;
static const size_t workspace_bytes = 256 << 20;

/* Sections of one cache side by side: K, V, parameters. */
static struct qt_kv_cache cache_at(const struct setup &s, enum qt_kv_format format, char *at,
                                   size_t page)
{
    struct qt_kv_cache c = {};
    size_t rows = s.batch * s.heads * s.length, codes = rows * s.dim * 2 / (format ? 1 : 4);
    c.format = format;
    c.heads = s.heads;
    c.head_dim = s.dim;
    c.page_tokens = page ? page : s.length;
    c.table = page ? table : NULL;
    c.table_pitch = page ? s.length / page : 0;
    c.k = at;
    c.v = at + codes;
    c.v_param = at + 2 * codes;
    c.k_scale = channel;
    c.k_zero = channel;
    return c;
}

static void bench_one(const struct timing &t, const struct setup &s, enum qt_kv_format format,
                      size_t page, double *floor_us)
{
    size_t rows = s.batch * s.heads * s.length;
    size_t bytes = rows * s.dim * 4 / (format ? 1 : 4) + (format ? 0 : rows * 4);
    int copies = copies_of(t, bytes);
    struct qt_kv_options opt = {
        s.batch, s.heads * s.group, s.length, 1 / sqrtf((float)s.dim), QT_MATMUL_F16, 0};
    struct qt_kv_plan plan;
    struct qt_kv_cache first = cache_at(s, format, memory, page);
    if (bytes * (size_t)copies > memory_bytes) {
        printf("%zu x %zu tokens: too large\n", s.batch, s.length);
        return;
    }
    if (*floor_us == 0)
        *floor_us = read_floor(t, memory, bytes, copies);
    if (qt_kv_attention_plan(&plan, &first, &opt, 0) != QT_MATMUL_OK ||
        plan.workspace_bytes > workspace_bytes) {
        printf("no plan: %s\n", plan.reason);
        return;
    }
    double us = time_us(t, copies, [&](int c) {
        struct qt_kv_cache cache = cache_at(s, format, memory + bytes * (size_t)c, page);
        if (qt_kv_attention_run(&plan, &cache, out, q, lengths, workspace, t.stream) !=
            QT_MATMUL_OK)
            CHECK(cudaErrorUnknown);
    });
    printf("%s\t%zux%zux%zu\t%zu\t%zu\t%s\t%.2f\t%.2f\t%.0f\t%.0f\t%zu\n", format ? "f16" : "int4",
           s.heads, s.group, s.dim, s.batch, s.length, page ? "paged" : "contiguous", us, *floor_us,
           100 * *floor_us / us, (double)bytes / us / 1e3, plan.split_tokens);
    fflush(stdout);
}

static void fill_cache_memory(size_t bytes)
{
    /* Halves with exponents of small numbers, whatever they are taken for. */
    fill_half((__half *)memory, bytes / 2, 3, 0.1f, 1.0f);
}

int main(int argc, char **argv)
{
    static const size_t shapes[][2] = {{1, 2048},  {1, 8192},  {1, 32768},  {1, 65536},
                                       {8, 2048},  {8, 8192},  {8, 32768},  {8, 65536},
                                       {64, 2048}, {64, 8192}, {64, 32768}, {64, 65536}};
    cudaDeviceProp device;
    if (cudaGetDeviceProperties(&device, 0) != cudaSuccess) {
        printf("SKIP: no CUDA device\n");
        return 0;
    }
    struct timing t = timing_new(device);
    struct setup s = {8, 4, 128, 1, 1};
    if (argc > 1 && sscanf(argv[1], "%zux%zux%zu", &s.heads, &s.group, &s.dim) != 3)
        return 2;
    memory_bytes = (size_t)40 << 30;
    memory = (char *)gpu_new(memory_bytes);
    fill_cache_memory(memory_bytes);
    q = gpu_new(1 << 22);
    out = gpu_new(1 << 22);
    fill_half((__half *)q, 1 << 21, 4, -1, 1);
    channel = (float *)gpu_new(1 << 16);
    std::vector<float> host(1 << 14, 0.25f);
    CHECK(cudaMemcpy(channel, host.data(), 1 << 16, cudaMemcpyHostToDevice));
    workspace = gpu_new(workspace_bytes);
    CHECK(cudaMemset(workspace, 0, QT_MATMUL_WORKSPACE_ZEROED));
    table = (int *)gpu_new(64 * 1024 * 4);
    lengths = (int *)gpu_new(64 * 4);
    printf(
        "# %s\nformat\tKV heads x group x dim\tbatch\tlength\tcache\tus\tfloor\t%%\tGB/s\tsplit\n",
        device.name);
    for (const size_t *shape : shapes) {
        s.batch = shape[0];
        s.length = shape[1];
        std::vector<int> order(s.batch * s.length / 64), all(s.batch, (int)s.length);
        for (size_t i = 0; i < order.size(); i++) {
            size_t j = gpu_hash(i) % (i + 1);
            order[i] = order[j];
            order[j] = (int)i;
        }
        CHECK(cudaMemcpy(table, order.data(), order.size() * 4, cudaMemcpyHostToDevice));
        CHECK(cudaMemcpy(lengths, all.data(), all.size() * 4, cudaMemcpyHostToDevice));
        for (int format = 0; format < 2; format++) {
            double floor_us = 0;
            bench_one(t, s, (enum qt_kv_format)format, 0, &floor_us);
            bench_one(t, s, (enum qt_kv_format)format, 64, &floor_us);
        }
    }
    return 0;
}
