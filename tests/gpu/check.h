/* Functions that the tests of kernels share: start and end, random numbers, copies. */
#ifndef QT_TESTS_GPU_CHECK_H
#define QT_TESTS_GPU_CHECK_H

#include "base/num.h"
#include "tests/gpu/reference.h"
#include "tests/worse.h"

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define COUNT(a) (sizeof(a) / sizeof *(a))

static int passed, failed, skipped;
static uint64_t seed;

/* Arguments are [SEED [quick]]. Ends the program as skipped if there is no device. Returns true if
 * only a few cases should run, as under compute-sanitizer. */
static inline bool check_begin(int argc, char **argv)
{
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("SKIP: no CUDA device, the GPU tests did not run\n"
               "0 passed, 0 failed, 1 skipped\n");
        exit(0);
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    seed = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL) << 20;
    printf("seed %llu\n", (unsigned long long)seed);
    return argc > 2 && strcmp(argv[2], "quick") == 0;
}

/* Returns the exit status. */
static inline int check_end(void)
{
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed != 0;
}

static inline void result(bool ok, const char *what)
{
    passed += ok;
    failed += !ok;
    if (!ok)
        printf("FAILED %s\n", what);
}

static inline uint32_t random_bits(void)
{
    return gpu_hash(seed++);
}

static inline size_t random_below(size_t n)
{
    return random_bits() % n;
}

/* Returns a number in [-1, 1). */
static inline float random_float(void)
{
    return (float)random_bits() * 0x1p-31f - 1;
}

/* ---- workspace ------------------------------------------------------------------------------ */

/* One workspace serves all runs. */

enum { WORKSPACE_GUARD = 4096 };

static struct {
    char *at;
    size_t bytes;
} workspace;

static inline void workspace_new(size_t bytes)
{
    workspace.at = gpu_alloc(bytes + WORKSPACE_GUARD);
    workspace.bytes = bytes;
    CHECK(cudaMemset(workspace.at, 0, bytes + WORKSPACE_GUARD));
}

/* Returns a workspace of `bytes` bytes: the zeroed part, then NaN, also in the guard behind it.
 * NULL for 0 bytes. */
static inline void *workspace_of(size_t bytes)
{
    const size_t zeros = QTOOL_WORKSPACE_ZEROED;
    if (bytes == 0)
        return NULL;
    CHECK(cudaMemset(workspace.at + zeros, 0xff, bytes - zeros + WORKSPACE_GUARD));
    return workspace.at;
}

/* True if a run left the zeroed part zero and wrote nothing behind its workspace. */
static inline bool workspace_kept(size_t bytes)
{
    return bytes == 0 || (gpu_all_are(0, workspace.at, QTOOL_WORKSPACE_ZEROED / 4) &&
                          gpu_all_are(0xffffffff, workspace.at + bytes, WORKSPACE_GUARD / 4));
}

static inline float to_float(uint16_t x, int bf16)
{
    return bf16 ? qt_bf16_to_f32(x) : qt_f16_to_f32(x);
}

static inline uint16_t from_float(float x, int bf16)
{
    return bf16 ? qt_f32_to_bf16(x) : qt_f32_to_f16(x);
}

static inline void *upload(const void *host, size_t bytes)
{
    void *d = gpu_alloc(bytes);
    CHECK(cudaMemcpy(d, host, bytes, cudaMemcpyHostToDevice));
    return d;
}

static inline void *download(const void *device, size_t bytes)
{
    void *h = malloc(bytes);
    CHECK(cudaMemcpy(h, device, bytes, cudaMemcpyDeviceToHost));
    return h;
}

#endif
