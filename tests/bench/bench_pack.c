/*
 * Speed of quantizing and packing one BF16 matrix, per core, as ratios within this run: weights per
 * second, and bytes read per second against memcpy on the same core. Processor time of one thread,
 * so that a busy machine does not blur the ratios.
 */
#include "pack/pack.h"
#include "tests/bench/bench.h"

#include <string.h>

enum { N = 4096, K = 4096, RUNS = 5 };

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *t)
{
    qsort(t, RUNS, sizeof *t, by_value);
    return t[RUNS / 2];
}

static double copy_rate(void *dst, const void *src, size_t bytes)
{
    double t[RUNS];
    for (int i = 0; i < RUNS; i++) {
        double start = bench_cpu_seconds();
        memcpy(dst, src, bytes);
        t[i] = bench_cpu_seconds() - start;
    }
    return (double)bytes / median(t);
}

static void bench(const char *text, const uint16_t *w, double copy)
{
    struct qt_spec spec;
    struct qt_err err = {0};
    struct qt_matrix m = {w, QT_BF16, N, K, "bench", "w"};
    double t[RUNS];
    if (qt_spec_parse(&spec, text, &err) < 0) {
        printf("%s: %s\n", text, err.reason);
        exit(1);
    }
    for (int i = 0; i < RUNS; i++) {
        struct qt_packed p;
        double start = bench_cpu_seconds();
        if (qt_packed_quantize(&p, &spec, &m, NULL, NULL, &err) < 0)
            exit(1);
        t[i] = bench_cpu_seconds() - start;
        qt_packed_free(&p);
    }
    double rate = (double)N * K / median(t) / qt_threads();
    printf("%-28s %8.1f M weights/s per core, %5.1f %% of memcpy\n", text, rate / 1e6,
           100 * 2 * rate / copy);
}

int main(void)
{
    static const char *const specs[] = {
        "nf4:g=64,method=rtn",
        "nf3:g=128,method=rtn",
        "fp6:method=rtn",
        "fp5:method=rtn",
        "fp8:method=rtn",
        "int8:method=rtn",
        "nf4:g=64",
        "nf3:g=128",
        "nf2:g=64",
        "fp6",
        "fp5",
        "lut4:g=64",
        "lut3:g=128",
    };
    size_t bytes = (size_t)N * K * sizeof(uint16_t);
    uint16_t *w = malloc(bytes), *copy = malloc(bytes);
    uint32_t x = 1;
    for (size_t i = 0; i < (size_t)N * K; i++) {
        /* The sum of four uniform bytes: near enough to a normal distribution. */
        x = x * 1664525 + 1013904223;
        float v = (float)((x >> 24) + (x >> 16 & 255) + (x >> 8 & 255)) - 382.5f;
        w[i] = qt_f32_to_bf16(v * 1e-4f);
    }
    memcpy(copy, w, bytes);
    qt_threads_set(1);
    double rate = copy_rate(copy, w, bytes);
    printf("memcpy, one core             %8.2f GB/s read\n", rate / 1e9);
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++)
        bench(specs[i], w, rate);
    free(w);
    free(copy);
    return 0;
}
