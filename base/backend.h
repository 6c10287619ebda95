/*
 * The heavy mathematics of forward passes and calibration, behind one table of functions, so that
 * the drivers are written once for CPU (OpenBLAS + OpenMP) and GPU (cuBLAS + kernels). Backends
 * live in kernels/; callers receive a pointer and never ask which one it is.
 *
 * All tensors are FP32, row-major, in backend memory (`alloc`/`upload`). `m` counts tokens. Sequences
 * of equal length are stacked: token i belongs to sequence i / seqlen at position i % seqlen.
 * Results never depend on the number of threads.
 */
#ifndef QT_BASE_BACKEND_H
#define QT_BASE_BACKEND_H

#include "base/mem.h"
#include "base/num.h"
#include "base/status.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum qt_norm_kind {
    QT_NORM_RMS,   /* x / rms(x) * w          (Llama) */
    QT_NORM_RMS1,  /* x / rms(x) * (1 + w)    (Gemma) */
    QT_NORM_LAYER, /* (x - mean) / std * w + b (OPT)  */
};

enum qt_act_kind { QT_ACT_SILU, QT_ACT_GELU_TANH, QT_ACT_GELU, QT_ACT_RELU };

struct qt_attention {
    size_t seqlen, heads, kv_heads, head_dim;
    float scale;   /* applied to q.k */
    float softcap; /* scores = cap * tanh(scores / cap); 0 = none */
    size_t window; /* a query sees itself and window-1 positions before it; 0 = all before it */
};

/* What eval needs to know about one position. */
struct qt_score {
    double nll;     /* -ln p(target), nats */
    double ref_nll; /* the same under the reference */
    double kld;     /* KL(reference || this), nats */
    double p_delta; /* p(target) - p_ref(target) */
    bool same_top;  /* argmax equal (ties: lowest index) */
};

#define QT_NO_TARGET UINT32_MAX

/*
 * Magnitudes in half octaves: bin 0 is [0, 2^-16), bin b = 1..62 is [2^((b-33)/2), 2^((b-32)/2)),
 * bin 63 is [2^15, inf]. NaN is in bin 63.
 */
enum { QT_HIST_BINS = 64 };

static inline uint32_t qt_hist_bin(float x)
{
    /* Half octaves above 2^-127: the exponent counts once, and once more with the mantissa carried
     * into it from sqrt(2) on. 0x3504f4 is the mantissa of the first float above sqrt(2). */
    uint32_t u = qt_f32_bits(x) & 0x7fffffff;
    int32_t b = (int32_t)((u >> 23) + ((u + (0x800000 - 0x3504f4)) >> 23)) - 221;
    b = b < 0 ? 0 : b;
    return (uint32_t)(b > QT_HIST_BINS - 1 ? QT_HIST_BINS - 1 : b);
}

/* Statistics of the channels of x[tokens][k], over all tokens so far. Zero to begin with. */
struct qt_channels {
    float *absmax;  /* [k] largest |x| */
    double *sum2;   /* [k] sum of x^2; not finite when some x was not */
    uint32_t *hist; /* [k][QT_HIST_BINS] tokens with |x| in a bin; NULL: not counted */
};

struct qt_backend {
    /* What computes, as far as the bits of results depend on it: "OpenBLAS 0.3.21 Haswell",
     * "NVIDIA H200, cuBLAS 13.0.2, OpenBLAS 0.3.21 Haswell". */
    const char *name;
    void *ctx;
    bool host; /* backend memory is host memory: bringing something there is no gain */

    /* out: the address of a pointer to any object type; it receives zeroed backend memory. */
    int (*alloc)(struct qt_backend *be, void *out, size_t bytes, struct qt_err *err);
    void (*free)(struct qt_backend *be, void *p);
    /* Returns when src may be changed; download: when dst is complete. */
    int (*upload)(struct qt_backend *be, void *dst, const void *src, size_t bytes,
                  struct qt_err *err);
    int (*download)(struct qt_backend *be, void *dst, const void *src, size_t bytes,
                    struct qt_err *err);

    /* Host memory that is uploaded and downloaded often, until unpin (NULL: nothing): faster, where
     * the system allows it. */
    void (*pin)(struct qt_backend *be, void *p, size_t bytes);
    void (*unpin)(struct qt_backend *be, void *p);

    /* Within backend memory. */
    int (*copy)(struct qt_backend *be, void *dst, const void *src, size_t bytes,
                struct qt_err *err);
    int (*zero)(struct qt_backend *be, void *p, size_t bytes, struct qt_err *err);

    /* y[m][n] = x[m][k] * w[n][k]^T + bias[n] (bias may be NULL). */
    int (*linear)(struct qt_backend *be, float *y, const float *x, const float *w,
                  const float *bias, size_t m, size_t n, size_t k, struct qt_err *err);
    /* y[i] = norm of x[i], rows of width n; y may be x. bias only for QT_NORM_LAYER (may be NULL).
     */
    int (*norm)(struct qt_backend *be, float *y, const float *x, const float *w, const float *bias,
                enum qt_norm_kind kind, float eps, size_t m, size_t n, struct qt_err *err);
    /* Rotates x[m][heads][dim] in place: half-split pairs (i, i + rot/2), or interleaved ones
     * (2i, 2i + 1), i < rot/2, the rest of the head untouched. cos/sin are [seqlen][rot/2]. */
    int (*rope)(struct qt_backend *be, float *x, const float *cos, const float *sin, size_t m,
                size_t seqlen, size_t heads, size_t dim, size_t rot, bool interleaved,
                struct qt_err *err);
    /* Causal attention per sequence: y, q [m][heads*dim]; k, v [m][kv_heads*dim]. */
    int (*attention)(struct qt_backend *be, float *y, const float *q, const float *k,
                     const float *v, size_t m, const struct qt_attention *a, struct qt_err *err);
    /* y = act(gate) * up elementwise; up = NULL: y = act(gate). y may be gate. */
    int (*activate)(struct qt_backend *be, float *y, const float *gate, const float *up,
                    enum qt_act_kind kind, size_t count, struct qt_err *err);
    /* y += x */
    int (*add)(struct qt_backend *be, float *y, const float *x, size_t count, struct qt_err *err);
    /* y[i] = x[rows[i]] * factor[i], and y[rows[i]] += x[i] * factor[i] (rows all different), for
     * i < m, rows of n floats. rows and factor are host memory; NULL: i, 1. Gathering in place:
     * rows NULL. */
    int (*gather_rows)(struct qt_backend *be, float *y, const float *x, const uint32_t *rows,
                       const float *factor, size_t m, size_t n, struct qt_err *err);
    int (*scatter_rows)(struct qt_backend *be, float *y, const float *x, const uint32_t *rows,
                        const float *factor, size_t m, size_t n, struct qt_err *err);
    /* y *= factor */
    int (*scale)(struct qt_backend *be, float *y, float factor, size_t count, struct qt_err *err);
    /* Per position: logits[m][vocab] (softcap applied first when > 0) against targets[m] (host
     * memory) and, when ref is not NULL, against ref[m][vocab]. scores is host memory, [m]. */
    int (*score)(struct qt_backend *be, struct qt_score *scores, const float *logits,
                 const float *ref, const uint32_t *targets, float softcap, size_t m, size_t vocab,
                 struct qt_err *err);
    /* h[k][k] += x^T x of x[m][k], lower triangle only; FP64 sums of FP32 products. */
    int (*gram)(struct qt_backend *be, double *h, const float *x, size_t m, size_t k,
                struct qt_err *err);
    /* Adds x[m][k] to c (pointers to backend memory). The sums run over the tokens in order. */
    int (*channels)(struct qt_backend *be, const struct qt_channels *c, const float *x, size_t m,
                    size_t k, struct qt_err *err);

    /* ---- gradients: dX stands for dL/dX, L being what is minimised ---- */

    /* Of linear: dx[m][k] = dy[m][n] w[n][k], added to what dx holds if `add`. */
    int (*linear_grad_x)(struct qt_backend *be, float *dx, const float *dy, const float *w,
                         bool add, size_t m, size_t n, size_t k, struct qt_err *err);
    /* dw[n][k] += dy[m][n]^T x[m][k] */
    int (*linear_grad_w)(struct qt_backend *be, float *dw, const float *dy, const float *x,
                         size_t m, size_t n, size_t k, struct qt_err *err);
    /* Of norm, x being its input: dx (may be dy), and dw[n] += unless dw is NULL. */
    int (*norm_grad)(struct qt_backend *be, float *dx, float *dw, const float *dy, const float *x,
                     const float *w, enum qt_norm_kind kind, float eps, size_t m, size_t n,
                     struct qt_err *err);
    /* (Rotations: the gradient of rope is rope with -sin.) Of attention: dq, dk, dv. */
    int (*attention_grad)(struct qt_backend *be, float *dq, float *dk, float *dv, const float *dy,
                          const float *q, const float *k, const float *v, size_t m,
                          const struct qt_attention *a, struct qt_err *err);
    /* Of activate, gate and up being its inputs; any of dgate, dup may be any of dy, gate, up at
     * the same place. up = dup = NULL: as there. */
    int (*activate_grad)(struct qt_backend *be, float *dgate, float *dup, const float *dy,
                         const float *gate, const float *up, enum qt_act_kind kind, size_t count,
                         struct qt_err *err);
    /* Loss of each position (nats; host memory, [m]) and weight * its gradient with respect to
     * logits[m][vocab]; dlogits may be logits. ref = NULL: -ln p(target), 0 where the target is
     * QT_NO_TARGET; else KL(ref || this), targets not read. softcap as in score. */
    int (*loss_grad)(struct qt_backend *be, double *losses, float *dlogits, const float *logits,
                     const float *ref, const uint32_t *targets, float softcap, float weight,
                     size_t m, size_t vocab, struct qt_err *err);
    /* *sum = sum of (y - target)^2, grad = 2 * weight * (y - target); grad may be y. */
    int (*square_grad)(struct qt_backend *be, double *sum, float *grad, const float *y,
                       const float *target, float weight, size_t count, struct qt_err *err);

    /* ---- triangles; NULL: there are none here, hessian/ has its own for the host ---- */

    /* The lower triangle of a[k][k] becomes L, a = L L^T; what stands above it is left alone.
     * *positive false: a is not positive definite, and of no use any more. */
    int (*cholesky)(struct qt_backend *be, bool *positive, double *a, size_t k, struct qt_err *err);
    /* x[m][k] becomes x V^-1, or x V^-T if `transposed`, of an upper triangular v[k][k]. */
    int (*solve_upper)(struct qt_backend *be, float *x, const float *v, bool transposed, size_t m,
                       size_t k, struct qt_err *err);
    void (*close)(struct qt_backend *be);
};

/* Zeros [rows][cols] in backend memory; be->free. */
static inline int qt_backend_floats(float **out, struct qt_backend *be, size_t rows, size_t cols,
                                    struct qt_err *err)
{
    size_t bytes;
    *out = NULL;
    if (qt_mul_overflow(&bytes, rows, cols) || qt_mul_overflow(&bytes, bytes, sizeof **out))
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory (%zu x %zu floats)", rows,
                       cols);
    return be->alloc(be, out, bytes, err);
}

/* Statistics of k channels in backend memory, of no token yet. After an error too, free what there
 * is. */
static inline int qt_backend_channels(struct qt_channels *out, struct qt_backend *be, size_t k,
                                      struct qt_err *err)
{
    int rc = be->alloc(be, &out->absmax, k * sizeof *out->absmax, err);
    if (rc == QT_OK)
        rc = be->alloc(be, &out->sum2, k * sizeof *out->sum2, err);
    if (rc == QT_OK)
        rc = be->alloc(be, &out->hist, k * QT_HIST_BINS * sizeof *out->hist, err);
    return rc;
}

static inline void qt_backend_channels_free(struct qt_channels *c, struct qt_backend *be)
{
    be->free(be, c->absmax);
    be->free(be, c->sum2);
    be->free(be, c->hist);
    *c = (struct qt_channels){0};
}

#endif
