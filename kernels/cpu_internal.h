/* Shared by the files of the CPU backend. */
#ifndef QT_KERNELS_CPU_INTERNAL_H
#define QT_KERNELS_CPU_INTERNAL_H

#include "base/base.h"

/* Working memory, a part for every thread. Contents are undefined. */
struct cpu_scratch {
    float *data;
    size_t count, per_thread;
};
int cpu_scratch_need(struct cpu_scratch *s, size_t per_thread, struct qt_err *err);
static inline float *cpu_scratch_of(const struct cpu_scratch *s, int thread)
{
    return s->data + (size_t)thread * s->per_thread;
}

/* QT_E_UNSUPPORTED when a matrix is wider than OpenBLAS can index. */
int cpu_check_width(size_t n, struct qt_err *err);

int cpu_attention(struct cpu_scratch *scratch, float *y, const float *q, const float *k,
                  const float *v, size_t m, const struct qt_attention *a, struct qt_err *err);

int cpu_gram(struct cpu_scratch *scratch, double *h, const float *x, size_t m, size_t k,
             struct qt_err *err);

int cpu_channels(const struct qt_channels *c, const float *x, size_t m, size_t k,
                 struct qt_err *err);

#endif
