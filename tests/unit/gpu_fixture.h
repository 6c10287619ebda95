/*
 * A simulated GPU: host memory, and fixed times that depend on what was launched. Each test adds
 * its own kernels: sim_gpu_init leaves these functions of struct qt_gpu NULL.
 */
#ifndef QT_TESTS_GPU_FIXTURE_H
#define QT_TESTS_GPU_FIXTURE_H

#include "fixture.h"

#include "verify/verify.h"

struct sim_gpu {
    struct qt_gpu gpu;      /* ctx is this struct, the first member of a test's own struct */
    bool timing;            /* inside time(): kernels only record their launch below */
    const char *low, *high; /* lowest and highest address of weights or caches read */
    bool quantizes;         /* a launch quantized activations */
    size_t bytes_read;      /* bytes of the last transfer */
    long fail_alloc;        /* the allocation that fails once, counted from 1; 0: none */
};

static inline float from_bits(uint16_t v, enum qtool_dtype dtype)
{
    return dtype == QTOOL_F16 ? qt_f16_to_f32(v) : qt_bf16_to_f32(v);
}

static inline uint16_t to_bits(float v, enum qtool_dtype dtype)
{
    return dtype == QTOOL_F16 ? qt_f32_to_f16(v) : qt_f32_to_bf16(v);
}

/* Records that a timed launch reads at this address. */
static inline void sim_gpu_reads(struct sim_gpu *s, const char *at)
{
    s->low = !s->low || at < s->low ? at : s->low;
    s->high = at > s->high ? at : s->high;
}

/* ---- memory --------------------------------------------------------------------------------- */

enum { SIM_GUARD = 256 };

/* Allocates with guards on both sides, where simulated defects may write. */
static inline int sim_gpu_alloc(struct qt_gpu *gpu, void **out, size_t bytes, struct qt_err *err)
{
    struct sim_gpu *f = gpu->ctx;
    char *p = NULL;
    if (f->fail_alloc && --f->fail_alloc == 0)
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of GPU memory");
    int rc = qt_array_new(&p, bytes + 2 * SIM_GUARD, 1, err);
    *out = rc == QT_OK ? p + SIM_GUARD : NULL;
    return rc;
}

static inline void sim_gpu_free(struct qt_gpu *gpu, void *p)
{
    (void)gpu;
    qt_free((char *)p - SIM_GUARD);
}

static inline int sim_gpu_move(struct qt_gpu *gpu, void *dst, const void *src, size_t bytes,
                               struct qt_err *err)
{
    (void)gpu, (void)err;
    memmove(dst, src, bytes);
    return QT_OK;
}

static inline int sim_gpu_fill(struct qt_gpu *gpu, void *dst, int byte, size_t bytes,
                               struct qt_err *err)
{
    (void)gpu, (void)err;
    memset(dst, byte, bytes);
    return QT_OK;
}

/* ---- times ---------------------------------------------------------------------------------- */

static inline int sim_gpu_transfer(struct qt_gpu *gpu, void *dst, const void *src, size_t bytes,
                                   int shape, struct qt_err *err)
{
    (void)err;
    assert_true(shape >= 0 && shape < QT_GPU_TRANSFERS && bytes % 16 == 0);
    ((struct sim_gpu *)gpu->ctx)->bytes_read = bytes;
    if (dst)
        memcpy(dst, src, bytes);
    return QT_OK;
}

static inline int sim_gpu_gemm(struct qt_gpu *gpu, void *y, const void *x, const void *w, size_t m,
                               size_t n, size_t k, struct qt_err *err)
{
    (void)y, (void)x, (void)w, (void)m, (void)n, (void)k, (void)err;
    assert_true(gpu->has_cublas);
    return QT_OK;
}

/* Times: 2 us for transfers; 4 us for kernels, 5 us if they quantize activations; 8 us for cuBLAS
 * (a launch that reads no packed data) and 1 us for each work that alternates with it. */
static inline int sim_gpu_time(struct qt_gpu *gpu, double *us, const struct qt_gpu_work *works,
                               size_t n, struct qt_err *err)
{
    struct sim_gpu *f = gpu->ctx;
    int rc = QT_OK;
    assert_true(n >= 1 && n <= QT_GPU_WORKS);
    f->timing = true;
    for (size_t j = 0; rc == QT_OK && j < n; j++) {
        f->low = f->high = NULL;
        f->quantizes = false;
        f->bytes_read = 0;
        for (size_t i = 0; rc == QT_OK && i < works[j].count; i++)
            rc = works[j].launch(works[j].ctx, i, err);
        us[j] = f->bytes_read ? 2 : f->low ? 4 + f->quantizes : 8 + (double)(n - 1);
    }
    f->timing = false;
    return rc;
}

static inline void sim_gpu_init(struct sim_gpu *s)
{
    *s = (struct sim_gpu){0};
    s->gpu = (struct qt_gpu){
        .name = "simulated",
        .has_cublas = true,
        .sms = 1,
        .cc = 90,
        .l2_bytes = 100000,
        .memory_bytes = 64 << 20,
        .ctx = s,
        .alloc = sim_gpu_alloc,
        .free = sim_gpu_free,
        .upload = sim_gpu_move,
        .download = sim_gpu_move,
        .copy = sim_gpu_move,
        .fill = sim_gpu_fill,
        .transfer = sim_gpu_transfer,
        .gemm = sim_gpu_gemm,
        .time = sim_gpu_time,
    };
}

#endif
