/* The parts of verify --device: what they share, and the kinds of kernels. Private to verify/. */
#ifndef QT_VERIFY_GPU_DEVICE_H
#define QT_VERIFY_GPU_DEVICE_H

#include "verify/gpu/gpu.h"

#include <math.h>

enum {
    DEVICE_GUARD = 4096,  /* bytes before and after what kernels touch; keeps their alignment */
    DEVICE_POISON = 0xff, /* two or four such bytes are a NaN in every format */
};

struct device_cublas {
    size_t n, k;
    double us[QT_DEVICE_TIMES];
};

struct device {
    struct qt_gpu *gpu;
    struct qt_backend *cpu;
    struct gpu_buffer x, y, workspace; /* with guards */
    struct gpu_buffer dequantized[2];  /* FP16, BF16 */
    struct gpu_operands timing;
    struct device_cublas *cublas; /* a model has few shapes */
    size_t cublas_count, cublas_capacity;
    unsigned char *bytes; /* host */
    size_t bytes_capacity;
    uint16_t *first, *again, *wide; /* outputs on the host: a run, its repetition, most tokens */
    size_t first_capacity, again_capacity, wide_capacity;
};

/* ---- device_check.c ------------------------------------------------------------------------- */

void device_close(struct device *d);

/* *worst becomes error if that is larger, or NaN, which stays. */
static inline void device_worst(double *worst, double error)
{
    if (isnan(error) || error > *worst)
        *worst = error;
}

/* Counts a fault; the first one's text stays. */
void device_fault(struct qt_device_tensor *t, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

/* "%g", but of NaN without the sign that printf may give it. */
const char *device_value_text(char text[32], double v);

/* A guard, the buffer, a guard: all poison. *data is the buffer. */
int device_poison(char **data, struct device *d, struct gpu_buffer *b, size_t bytes,
                  struct qt_err *err);
/* A fault of `run` ("M=16 random f16") when one of the guards was written to. */
int device_check_guards(struct device *d, struct qt_device_tensor *t, const char *run,
                        const char *what, const char *data, size_t bytes, struct qt_err *err);

/* A workspace as a first run finds it, and what a run has to leave of it. */
int device_workspace(char **data, struct device *d, size_t bytes, struct qt_err *err);
int device_check_workspace(struct device *d, struct qt_device_tensor *t, const char *run,
                           const char *data, size_t bytes, struct qt_err *err);

/* The sections that kernels read, after all runs, are what was uploaded. */
int device_check_sections(struct device *d, struct qt_device_tensor *t, const struct qt_packed *p,
                          const struct gpu_copies *copies, struct qt_err *err);

/* Room for X and Y of timed products, X random. */
int device_timing_room(struct device *d, size_t n, size_t k, struct qt_err *err);
/* For qt_device_times; NaN without cuBLAS. */
int device_cublas_times(double us[QT_DEVICE_TIMES], struct device *d, size_t n, size_t k,
                        struct qt_err *err);

/* ---- the kinds ------------------------------------------------------------------------------ */

/* Fill t; QT_E_UNSUPPORTED when no kernel takes it. */
int device_matmul(struct qt_device_tensor *t, struct device *d, const struct qt_packed *p,
                  uint64_t seed, struct qt_err *err);
int device_w4ax(struct qt_device_tensor *t, struct device *d, const struct qt_packed *p,
                uint64_t seed, struct qt_err *err);
int device_cache(struct qt_device_tensor *t, struct device *d, const struct qt_kv *kv,
                 const struct qt_model_info *model, size_t layer, struct qt_err *err);

#endif
