/* Functions that the files of the CPU backend share. Shapes and arguments as in struct
 * qt_backend. */
#ifndef QT_KERNELS_CPU_INTERNAL_H
#define QT_KERNELS_CPU_INTERNAL_H

#include "base/base.h"

/* Scratch memory with a part for each thread. Its contents are undefined. */
struct cpu_scratch {
    float *data;
    size_t count, per_thread;
};
/* Grows the parts to per_thread floats or more. No item of a parallel loop may be using them. */
int cpu_scratch_need(struct cpu_scratch *s, size_t per_thread, struct qt_err *err);
static inline float *cpu_scratch_of(const struct cpu_scratch *s, int thread)
{
    return s->data + (size_t)thread * s->per_thread;
}

/* Elements per item of a parallel loop for operations other than matrix products; rows per item if
 * items are whole rows of width n. */
enum { CPU_ITEM = 1 << 15 };
static inline size_t cpu_rows_per_item(size_t n)
{
    return n < CPU_ITEM ? CPU_ITEM / (n ? n : 1) : 1;
}

/* QT_E_UNSUPPORTED if a matrix is wider than OpenBLAS can index. */
int cpu_check_width(size_t n, struct qt_err *err);

int cpu_attention(struct cpu_scratch *scratch, float *y, const float *q, const float *k,
                  const float *v, size_t m, const struct qt_attention *a, struct qt_err *err);

int cpu_convolve(struct qt_backend *be, float *y, const float *x, const float *w, const float *bias,
                 size_t m, size_t seqlen, size_t channels, size_t kernel, struct qt_err *err);
int cpu_delta_rule(struct cpu_scratch *scratch, float *y, const float *qkv, const float *decay,
                   const float *rate, size_t m, const struct qt_delta *d, struct qt_err *err);
int cpu_state_space(struct cpu_scratch *scratch, float *y, const float *xbc, const float *steps,
                    size_t m, const struct qt_state_space *s, struct qt_err *err);

/* Needs two or three times the scratch of cpu_attention. */
int cpu_attention_grad(struct cpu_scratch *scratch, float *dq, float *dk, float *dv,
                       const float *dy, const float *q, const float *k, const float *v, size_t m,
                       const struct qt_attention *a, struct qt_err *err);

/* Entries of struct qt_backend (grad.c); cpu_loss_grad takes the scratch in addition. */
int cpu_linear_grad_x(struct qt_backend *be, float *dx, const float *dy, const float *w, bool add,
                      size_t m, size_t n, size_t k, struct qt_err *err);
int cpu_linear_grad_w(struct qt_backend *be, float *dw, const float *dy, const float *x, bool add,
                      size_t m, size_t n, size_t k, struct qt_err *err);
int cpu_norm_grad_rows(struct qt_backend *be, float *dx, float *dw, const float *dy, const float *x,
                       const float *w, enum qt_norm_kind kind, float eps, size_t m, size_t n,
                       struct qt_err *err);
int cpu_activate_grad_op(struct qt_backend *be, float *dgate, float *dup, const float *dy,
                         const float *gate, const float *up, enum qt_act_kind kind, size_t count,
                         struct qt_err *err);
int cpu_square_grad(struct qt_backend *be, double *sum, float *grad, const float *y,
                    const float *target, float weight, size_t count, struct qt_err *err);
int cpu_loss_grad(struct cpu_scratch *scratch, double *losses, float *dlogits, const float *logits,
                  const float *ref, const uint32_t *targets, float softcap, float weight, size_t m,
                  size_t vocab, struct qt_err *err);

int cpu_gram(struct cpu_scratch *scratch, double *h, const float *x, size_t m, size_t k,
             struct qt_err *err);

void cpu_channels(const struct qt_channels *c, const float *x, size_t m, size_t k);

#endif
