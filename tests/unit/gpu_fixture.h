/*
 * A stand-in for a GPU: host memory, times that say what was launched. The kernels are the tests'
 * own: functions of struct qt_gpu that are NULL here.
 */
#ifndef QT_TESTS_GPU_FIXTURE_H
#define QT_TESTS_GPU_FIXTURE_H

#include "fixture.h"

#include "verify/verify.h"

struct stand_in {
    struct qt_gpu gpu;      /* its ctx is this struct, which a test's own begins with */
    bool timing;            /* launches are only looked at, */
    const char *low, *high; /* what of weights or caches they read */
    bool quantizes;         /* whether they quantize activations */
    size_t bytes_read;      /* of transfers */
    long no_room;           /* the how manieth allocation from here fails, once; 0: none */
};

static inline float from_bits(uint16_t v, enum qtool_dtype dtype)
{
    return dtype == QTOOL_F16 ? qt_f16_to_f32(v) : qt_bf16_to_f32(v);
}

static inline uint16_t to_bits(float v, enum qtool_dtype dtype)
{
    return dtype == QTOOL_F16 ? qt_f32_to_f16(v) : qt_f32_to_bf16(v);
}

/* A timed launch reads at this address. */
static inline void stand_in_reads(struct stand_in *s, const char *at)
{
    s->low = !s->low || at < s->low ? at : s->low;
    s->high = at > s->high ? at : s->high;
}

/* ---- memory --------------------------------------------------------------------------------- */

enum { STAND_IN_ROOM = 256 };

/* With room around, for the faults that write there. */
static inline int stand_in_alloc(struct qt_gpu *gpu, void **out, size_t bytes, struct qt_err *err)
{
    struct stand_in *f = gpu->ctx;
    char *p = NULL;
    if (f->no_room && --f->no_room == 0)
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of GPU memory");
    int rc = qt_array_new(&p, bytes + 2 * STAND_IN_ROOM, 1, err);
    *out = rc == QT_OK ? p + STAND_IN_ROOM : NULL;
    return rc;
}

static inline void stand_in_free(struct qt_gpu *gpu, void *p)
{
    (void)gpu;
    qt_free((char *)p - STAND_IN_ROOM);
}

static inline int stand_in_move(struct qt_gpu *gpu, void *dst, const void *src, size_t bytes,
                                struct qt_err *err)
{
    (void)gpu, (void)err;
    memmove(dst, src, bytes);
    return QT_OK;
}

static inline int stand_in_fill(struct qt_gpu *gpu, void *dst, int byte, size_t bytes,
                                struct qt_err *err)
{
    (void)gpu, (void)err;
    memset(dst, byte, bytes);
    return QT_OK;
}

/* ---- times ---------------------------------------------------------------------------------- */

static inline int stand_in_transfer(struct qt_gpu *gpu, void *dst, const void *src, size_t bytes,
                                    int shape, struct qt_err *err)
{
    (void)err;
    assert_true(shape >= 0 && shape < QT_GPU_TRANSFERS && bytes % 16 == 0);
    ((struct stand_in *)gpu->ctx)->bytes_read = bytes;
    if (dst)
        memcpy(dst, src, bytes);
    return QT_OK;
}

static inline int stand_in_gemm(struct qt_gpu *gpu, void *y, const void *x, const void *w, size_t m,
                                size_t n, size_t k, struct qt_err *err)
{
    (void)y, (void)x, (void)w, (void)m, (void)n, (void)k, (void)err;
    assert_true(gpu->has_cublas);
    return QT_OK;
}

/* Transfers: 2 us; kernels: 4 us, and 1 where they quantize activations; cuBLAS, which reads
 * nothing of what is packed: 8 us, and 1 for each that it takes turns with. */
static inline int stand_in_time(struct qt_gpu *gpu, double *us, const struct qt_gpu_work *works,
                                size_t n, struct qt_err *err)
{
    struct stand_in *f = gpu->ctx;
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

static inline void stand_in_init(struct stand_in *s)
{
    *s = (struct stand_in){0};
    s->gpu = (struct qt_gpu){
        .name = "stand-in",
        .has_cublas = true,
        .sms = 1,
        .cc = 90,
        .l2_bytes = 100000,
        .memory_bytes = 64 << 20,
        .ctx = s,
        .alloc = stand_in_alloc,
        .free = stand_in_free,
        .upload = stand_in_move,
        .download = stand_in_move,
        .copy = stand_in_move,
        .fill = stand_in_fill,
        .transfer = stand_in_transfer,
        .gemm = stand_in_gemm,
        .time = stand_in_time,
    };
}

#endif
