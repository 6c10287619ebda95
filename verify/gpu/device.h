/* verify --device: shared state and helpers, and a checker per kind of kernel. Private to
 * verify/. */
#ifndef QT_VERIFY_GPU_DEVICE_H
#define QT_VERIFY_GPU_DEVICE_H

#include "verify/gpu/gpu.h"

#include <math.h>

enum {
    DEVICE_GUARD = 4096,  /* guard bytes before and after a buffer; a multiple of its alignment */
    DEVICE_POISON = 0xff, /* two or four such bytes are NaN in FP16, BF16 and FP32 */
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
    struct device_cublas *cublas; /* cuBLAS times of the shapes so far */
    size_t cublas_count, cublas_capacity;
    unsigned char *bytes; /* host */
    size_t bytes_capacity;
    /* Host copies of outputs: a run, its repetition, the run with the most tokens. */
    uint16_t *first, *second, *widest;
    size_t first_capacity, second_capacity, widest_capacity;
};

/* ---- check.c -------------------------------------------------------------------------------- */

void device_close(struct device *d);

/* *worst = max(*worst, error); NaN wins. */
static inline void device_max_error(double *worst, double error)
{
    if (isnan(error) || error > *worst)
        *worst = error;
}

/* Counts a fault and keeps the text of the first. */
void device_fault(struct qt_device_tensor *t, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

/* Formats v as "%g", NaN without a sign. Returns `text`. */
const char *device_value_text(char text[32], double v);

/* Grows b to `bytes` between two guards and fills all of it with poison. *data: the buffer. */
int device_poison(char **data, struct device *d, struct gpu_buffer *b, size_t bytes,
                  struct qt_err *err);
/* Records a fault of `run` ("M=16 random f16") if a guard of the buffer `what` was overwritten. */
int device_check_guards(struct device *d, struct qt_device_tensor *t, const char *run,
                        const char *what, const char *data, size_t bytes, struct qt_err *err);

/* Prepares a workspace as the first run needs it; after a run, records a fault if its guards were
 * overwritten or its counters are not zero. */
int device_workspace(char **data, struct device *d, size_t bytes, struct qt_err *err);
int device_check_workspace(struct device *d, struct qt_device_tensor *t, const char *run,
                           const char *data, size_t bytes, struct qt_err *err);

/* Records a fault if a section differs from the uploaded bytes. */
int device_check_sections(struct device *d, struct qt_device_tensor *t, const struct qt_packed *p,
                          const struct gpu_copies *copies, struct qt_err *err);

/* Grows X and Y of timed products and fills X with random numbers. */
int device_timing_room(struct device *d, size_t n, size_t k, struct qt_err *err);
/* cuBLAS times for the tokens of qt_device_times; NaN without cuBLAS. */
int device_cublas_times(double us[QT_DEVICE_TIMES], struct device *d, size_t n, size_t k,
                        struct qt_err *err);

/* ---- checkers ------------------------------------------------------------------------------- */

/* Fill t with faults, errors and times. QT_E_UNSUPPORTED: no kernel takes the tensor or cache. */
int device_matmul(struct qt_device_tensor *t, struct device *d, const struct qt_packed *p,
                  uint64_t seed, struct qt_err *err);
int device_w4ax(struct qt_device_tensor *t, struct device *d, const struct qt_packed *p,
                uint64_t seed, struct qt_err *err);
int device_cache(struct qt_device_tensor *t, struct device *d, enum qt_kv_keys keys,
                 const struct qt_model_info *model, struct qt_err *err);

/* A layer of experts in a container. */
struct device_layer {
    const struct qt_entry *first; /* gate of expert 0 */
    size_t prefix;                /* bytes of its name in front of the number */
    const char *const *names;     /* gate, up, down: names behind the number */
    size_t experts;
};
/* True if e is the gate of expert 0 of a layer. */
bool device_is_layer(struct device_layer *out, const struct qt_container *c,
                     const struct qt_entry *e);
int device_experts(struct qt_device_tensor *t, struct device *d, const struct device_layer *of,
                   const struct qt_container *c, uint64_t seed, struct qt_err *err);

#endif
