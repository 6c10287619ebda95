/* What the benches share: clocks, failing, random matrices. */
#ifndef QT_TESTS_BENCH_H
#define QT_TESTS_BENCH_H

#include "base/base.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static inline double bench_seconds(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Of one-threaded work: does not count what others take of a busy machine. */
static inline double bench_cpu_seconds(void)
{
    return bench_seconds(CLOCK_PROCESS_CPUTIME_ID);
}

static inline double bench_wall_seconds(void)
{
    return bench_seconds(CLOCK_MONOTONIC);
}

/* Ends the bench with a message when rc is an error. */
static inline void bench_must(int rc, const struct qt_err *err)
{
    char text[2048];
    if (rc == QT_OK)
        return;
    qt_err_format(text, sizeof text, err);
    fprintf(stderr, "%s\n", text);
    exit(qt_exit_code((enum qt_status)rc));
}

/* Sums of three uniform numbers, near enough to normal; owned (qt_free). */
static inline float *bench_random(size_t count, float scale)
{
    struct qt_err err;
    float *x;
    uint32_t r = 1;
    bench_must(qt_array_new(&x, count, sizeof *x, &err), &err);
    for (size_t i = 0; i < count; i++) {
        for (int j = 0; j < 3; j++) {
            r = r * 1664525 + 1013904223;
            x[i] += (float)(r >> 8) * 0x1p-24f - 0.5f;
        }
        x[i] *= scale;
    }
    return x;
}

#endif
