/*
 * The interface to compute backends: a table of functions for forward passes, gradients and
 * calibration. Code that runs models is written once, against this table, and runs on the CPU
 * (OpenBLAS + OpenMP) or a GPU (cuBLAS + kernels). kernels/ implements the backends; callers do not
 * need to know which one they hold.
 *
 * Unless stated otherwise, tensors are FP32, row-major, and in backend memory (`alloc`). `m` is the
 * number of tokens. Sequences of equal length are stacked: token i is position i % seqlen of
 * sequence i / seqlen. Results do not depend on the number of threads. A function that returns int
 * returns QT_OK or a negative status with *err filled.
 */
#ifndef QT_BASE_BACKEND_H
#define QT_BASE_BACKEND_H

#include "base/act.h"
#include "base/comm.h"
#include "base/mem.h"
#include "base/num.h"
#include "base/status.h"
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum qt_norm_kind {
    QT_NORM_RMS,   /* x / rms(x) * w          (Llama) */
    QT_NORM_LAYER, /* (x - mean) / std * w + b (OPT)  */
};

/* RELU2: the square of the rectifier. NONE: act(x) = x. CLAMPED (gpt-oss; needs `up`):
 * g sigmoid(1.702 g) (u + 1) with g = min(gate, 7) and u = up within -7 and 7. */
enum qt_act_kind {
    QT_ACT_SILU,
    QT_ACT_GELU_TANH,
    QT_ACT_GELU,
    QT_ACT_RELU,
    QT_ACT_RELU2,
    QT_ACT_NONE,
    QT_ACT_SIGMOID,
    QT_ACT_CLAMPED
};

/*
 * Causal attention: query i sees itself and earlier positions of its sequence. With `past`, a
 * sequence has keys and values of past + seqlen positions, and query i is position past + i.
 *
 * exact_keys simulates a 4-bit KV cache whose keys have a scale per channel and KV group
 * (base/kv4.h). k holds the keys after quantization and dequantization of whole KV groups,
 * exact_keys the keys before it. For the query at position i, the keys of its own KV group are
 * quantized with the minimum and maximum over the group's tokens up to i, as in a cache whose last
 * token is i. The key of token 0 is not quantized. Gradients need exact_keys = NULL and past = 0;
 * sinks get none.
 */
struct qt_attention {
    size_t seqlen, heads, kv_heads, head_dim; /* seqlen: queries of a sequence */
    float scale;                              /* multiplies q.k */
    float softcap;                            /* scores = cap * tanh(scores / cap); 0 = none */
    size_t window;           /* number of visible positions, including the query's; 0: no limit */
    const float *exact_keys; /* like k, numbers that FP16 can hold; or NULL */
    const float *sinks;      /* [heads]: e^sink is added to the softmax's denominator; NULL: none */
    size_t past;             /* positions before the first query */
    /* bias[head * bias_step + j] is added to the score of every query with the key at position j,
     * after the softcap (ALiBi, arXiv 2108.12409); NULL: none */
    const float *bias;
    size_t bias_step; /* at least past + seqlen */
    /* Queries see the keys behind them, too (with a window as many as before them). Needs
     * exact_keys = NULL and past = 0, and has no gradient. */
    bool both_ways;
};

/*
 * Gated delta rule (arXiv 2412.06464) within each sequence. Every value head has a state S
 * [key_dim][value_dim], at first that of `state`, or 0. For value head h and each token, q and k
 * are the query and key of key head floor(h * key_heads / value_heads), each divided by its L2 norm
 * (the root of its sum of squares + 1e-6); v, a and b are the value, decay input and rate input of
 * head h:
 *
 *   S = S exp(-exp(a_log[h]) softplus(a + dt_bias[h]))
 *   S = S + k (sigmoid(b) (v - S^T k))^T,   y = S^T q / sqrt(key_dim)
 *
 * Inputs: qkv[m][2 key_heads * key_dim + value_heads * value_dim]: queries, keys, values; decay,
 * rate [m][value_heads].
 */
struct qt_delta {
    size_t seqlen, key_heads, value_heads, key_dim, value_dim;
    const float *a_log, *dt_bias; /* [value_heads] */
    /* [sequences][value_heads][key_dim][value_dim]: receives the states after the last token, too.
     * NULL: states start at 0 and are dropped. */
    float *state;
};

/*
 * State space model (Mamba-2, arXiv 2405.21060) within each sequence. Every head has a state S
 * [state][dim], at first that of `states`, or 0. For head h and each token, x are the values of the
 * head, b and c the input and output vectors of group floor(h * groups / heads), and r the step
 * input of the head:
 *
 *   t = softplus(r + dt_bias[h]), at least step_min and at most step_max
 *   S = S exp(-exp(a_log[h]) t) + t b x^T,   y = S^T c + d[h] x
 *
 * Inputs: xbc[m][heads * dim + 2 groups * state]: values, input and output vectors; steps
 * [m][heads]: step inputs.
 */
struct qt_state_space {
    size_t seqlen, heads, groups, dim, state;
    const float *a_log, *dt_bias, *d; /* [heads] */
    float step_min, step_max;         /* step_max may be INFINITY */
    /* [sequences][heads][state][dim]: receives the states after the last token, too. NULL: states
     * start at 0 and are dropped. */
    float *states;
};

/* Evaluation figures of one position. */
struct qt_score {
    double nll;     /* -ln p(target), nats */
    double ref_nll; /* -ln p_ref(target), nats */
    double kld;     /* KL(reference || model), nats */
    double p_delta; /* p(target) - p_ref(target) */
    bool same_top;  /* the argmax is the same (ties: lowest index) */
};

/* Target of a position without a next token: its loss is 0. */
#define QT_NO_TARGET UINT32_MAX

/*
 * Histogram of magnitudes in half octaves: bin 0 is [0, 2^-16), bin b = 1..62 is
 * [2^((b-33)/2), 2^((b-32)/2)), bin 63 is [2^15, inf] and NaN.
 */
enum { QT_HIST_BINS = 64 };

static inline uint32_t qt_hist_bin(float x)
{
    /* Twice the exponent field of x, plus 1 if its significand is above sqrt(2): then the addition
     * carries into the exponent. 0x3504f4 is the fraction field of the first float above
     * sqrt(2). */
    uint32_t u = qt_f32_bits(x) & 0x7fffffff;
    int32_t b = (int32_t)((u >> 23) + ((u + (0x800000 - 0x3504f4)) >> 23)) - 221;
    b = b < 0 ? 0 : b;
    return (uint32_t)(b > QT_HIST_BINS - 1 ? QT_HIST_BINS - 1 : b);
}

/* The lower edge of a bin. */
static inline double qt_hist_from(size_t bin)
{
    return bin ? exp2(((double)bin - 33) / 2) : 0;
}

/* Per-channel statistics of x[tokens][k], accumulated over tokens. Starts as all zeros. */
struct qt_channels {
    float *absmax;  /* [k] largest |x| */
    double *sum2;   /* [k] sum of x^2; not finite if any x was not */
    uint32_t *hist; /* [k][QT_HIST_BINS] number of tokens per bin of |x|; NULL: not counted */
};

/* A scale is any FP16 value, a power of two, or 8 times a positive value of E4M3FN. */
enum qt_scales { QT_SCALES_F16, QT_SCALES_POWERS, QT_SCALES_E4M3 };

/* Values that weights are rounded to: scale * (value[i] - zero), with a scale and a zero-point for
 * each row and group of columns. */
enum { QT_ROUND_VALUES = 256 };
struct qt_round_values {
    unsigned count;
    float value[QT_ROUND_VALUES]; /* ascending */
    uint8_t code[QT_ROUND_VALUES];
    /* The values from the smallest to the largest are multiples of 2^(max(e, least) - bits), 2^e
     * being the power of two at or below their magnitude: minifloats and integers. */
    bool floats;
    int least, bits;
    float largest; /* nominal scale: largest weight / largest */
    enum qt_scales scales;
    bool zeros; /* value[i] = code[i] = i, and zero-points are such values; else they are 0 */
    float first_scale; /* scale of a group of zeros, and while the search finds no other */
    /* Search: the nominal scale times from + (to - from) i / steps for i = 0..steps, also negated
     * if `mirrored`, then least-squares refinement. steps = 0: the nominal scale. */
    unsigned steps;
    float from, to;
    bool mirrored;
};

/*
 * mix24 (docs/schemes.md): groups of 2 and 4 bits, whose scales are (q + z2) s2 2^-22. Strips of 16
 * rows share s2 and z2, or their halves do. Outliers are stored as FP16; they are no part of the
 * groups. Arrays are in host memory.
 */
struct qt_round_mix24 {
    const uint8_t *bits; /* [groups] of a code: 2 or 4 */
    int halves;          /* s2 and z2 of a strip and group: 1 or 2 */
    int searches;        /* rounds of descent that search for s2 and z2 */
    size_t outliers;
    const uint32_t *outlier_row, *outlier_col; /* [outliers] */
    /* Results. */
    float *outlier; /* [outliers] values, FP16 numbers */
    uint8_t *q;     /* [groups][stride of struct qt_round] */
    uint16_t *u;    /* [strips][groups][2] per half: bits of s2 as FP16, plus z2 */
};

/* Costs of groups of mix24 in each row, with a separate scale for the row: what its choices before
 * rounding depend on. Arrays are in host memory unless stated otherwise. */
struct qt_mix24_costs {
    size_t n, k, group;
    const float *w;          /* backend memory, [n][k] */
    int exp2;                /* the weights are w times 2^exp2 */
    const float *importance; /* [k] weights of squared errors; NULL: all 1 */
    /* [groups] sums over the rows of the costs with codes of 2 and 4 bits; NULL: not wanted. */
    double *two, *four;
    /* [n][groups][2] by how much the cost of 2 bits is lower without the largest and without the
     * smallest weight of the group, and which channel of the group that is; NULL: not wanted. */
    float *gain;
    uint8_t *channel;
};

/* The largest scale and outlier of a matrix for mix24. Arrays are in host memory unless stated
 * otherwise. */
struct qt_mix24_extent {
    size_t n, k, group;
    const float *w;           /* backend memory, [n][k] */
    int exp2;                 /* the weights are w times 2^exp2 */
    const uint8_t *bits;      /* [groups] */
    const uint16_t *outliers; /* [n][groups] bit j: column j of the group is an outlier; or NULL */
    /* Results: the largest range of the other weights of a group, including 0, per step of its
     * codes; the largest magnitude of an outlier. */
    float scale, outlier;
};

/*
 * One matrix to be rounded; arrays are in host memory unless stated otherwise. With h and v (as in
 * struct qt_factor of hessian/, in backend memory) by error compensation and coordinate descent;
 * with h = NULL each group separately.
 */
struct qt_round {
    size_t n, k, group; /* columns [i * group, (i + 1) * group) share parameters */
    const struct qt_round_values *values;
    struct qt_round_mix24 *mix24; /* instead of values, and of the results `scale`; else NULL */
    float *w;                     /* backend memory, [n][k]; overwritten */
    /* [k] weights of squared errors, for h = NULL, and of mix24 for `before`; NULL: all 1. */
    const float *importance;
    const float *h, *v;             /* [k][k] */
    const size_t *order, *group_at; /* [k] column and group at each position of h and v */
    int descent_rounds;
    double min_gain; /* relative gain of a round at which descent stops, for panels of 128 rows */
    /* Results. stride: at least n. */
    bool only_rounded; /* of them, only `rounded` is wanted */
    size_t stride;
    uint8_t *code;  /* [k][stride] */
    float *scale;   /* [groups][stride] */
    uint8_t *zero;  /* [groups][stride] */
    float *rounded; /* backend memory, [n][k]: the rounded values times 2^exp2; NULL: not wanted */
    int exp2;
    double before, after_compensation, after_descent; /* with h: E of hessian/; `before`: rounded
                                                       * with the diagonal of h, or that of
                                                       * mix24, as importance */
};

/*
 * A matrix of codes: w[row][col] = scale * (value[code] - zero), with the scale and the zero-point
 * of the row's group col / group. All arrays are in backend memory.
 */
struct qt_coded {
    size_t n, k, group;
    const float *value;  /* [QT_ROUND_VALUES] by code */
    const uint8_t *code; /* [n][k] */
    const float *scale;  /* [n][groups] */
    const uint8_t *zero; /* [n][groups]; NULL: all 0 */
};

/* One step of Adam (arXiv 1412.6980). */
struct qt_adam {
    double beta1, beta2, eps;
    double fix1, fix2; /* 1 - beta^t for step t */
    double lr;
};

/*
 * Learned scales: a scale is the FP16 number nearest to start + unit delta, with the sign of start
 * and not 0, times 2^exp2; or 0 if start is. All arrays are in backend memory.
 */
struct qt_tuned {
    size_t count;
    int exp2;
    const float *start, *unit;
    const float *grad; /* dL/dscale */
    float *delta;
    float *m, *v; /* Adam's moments of dL/ddelta */
    float *scale;
};

struct qt_backend {
    /* Hardware and libraries that the bits of results depend on: "OpenBLAS 0.3.21 Haswell",
     * "NVIDIA H200, cuBLAS 13.0.2, OpenBLAS 0.3.21 Haswell". */
    const char *name;
    void *ctx;
    bool host; /* backend memory is host memory */
    /* Set by callers: linear, attention, gram and their gradients may round their factors to the 11
     * significant bits of FP16 and TF32. Sums are FP32. */
    bool half;
    /* Set by callers: the factors w of linear do not change until this is reset, so that a backend
     * can keep a form of them. */
    bool same_weights;

    /* ---- memory ---- */

    /* Stores `bytes` of zeroed backend memory in *out, a pointer to any object type. The caller
     * frees it with `free`, which accepts NULL. */
    int (*alloc)(struct qt_backend *be, void *out, size_t bytes, struct qt_err *err);
    void (*free)(struct qt_backend *be, void *p);
    /* Bytes that can be allocated, approximately. NULL: unknown, as if `host`. */
    size_t (*room)(struct qt_backend *be);
    /* Host to backend; on return the caller may change src. */
    int (*upload)(struct qt_backend *be, void *dst, const void *src, size_t bytes,
                  struct qt_err *err);
    /* The same for x[count] in FP16 or BF16, which becomes FP32; NULL if `host`. */
    int (*upload_narrow)(struct qt_backend *be, float *dst, const void *x, bool bf16, size_t count,
                         struct qt_err *err);
    /* Backend to host; on return dst is complete. */
    int (*download)(struct qt_backend *be, void *dst, const void *src, size_t bytes,
                    struct qt_err *err);

    /* Page-locks host memory for faster transfers, until unpin. Failure is not an error: transfers
     * are then slower. Both accept NULL. */
    void (*pin)(struct qt_backend *be, void *p, size_t bytes);
    void (*unpin)(struct qt_backend *be, void *p);

    /* Copies or zeroes backend memory. */
    int (*copy)(struct qt_backend *be, void *dst, const void *src, size_t bytes,
                struct qt_err *err);
    int (*zero)(struct qt_backend *be, void *p, size_t bytes, struct qt_err *err);

    /* ---- forward ---- */

    /* y[m][n] = x[m][k] * w[n][k]^T + bias[n]; bias may be NULL. */
    int (*linear)(struct qt_backend *be, float *y, const float *x, const float *w,
                  const float *bias, size_t m, size_t n, size_t k, struct qt_err *err);
    /* y[m][n] = norm of each row of x[m][n] with weight w[n]; y may be x. bias[n] is used by
     * QT_NORM_LAYER only and may be NULL. */
    int (*norm)(struct qt_backend *be, float *y, const float *x, const float *w, const float *bias,
                enum qt_norm_kind kind, float eps, size_t m, size_t n, struct qt_err *err);
    /* Rotary embedding of x[m][heads][dim] in place. Rotates the pairs (i, i + rot/2), or
     * (2i, 2i + 1) if `interleaved`, for i < rot/2; elements from rot on do not change. cos and sin
     * are [seqlen][rot/2]. The gradient is the same rotation with -sin. */
    int (*rope)(struct qt_backend *be, float *x, const float *cos, const float *sin, size_t m,
                size_t seqlen, size_t heads, size_t dim, size_t rot, bool interleaved,
                struct qt_err *err);
    /* Attention within each sequence, causal unless both_ways is set: y, q [m][heads * head_dim];
     * k, v [m / seqlen * (past + seqlen)][kv_heads * head_dim]. */
    int (*attention)(struct qt_backend *be, float *y, const float *q, const float *k,
                     const float *v, size_t m, const struct qt_attention *a, struct qt_err *err);
    /* y[count] = act(gate) * up elementwise, or act(gate) if up is NULL; y may be gate or up. */
    int (*activate)(struct qt_backend *be, float *y, const float *gate, const float *up,
                    enum qt_act_kind kind, size_t count, struct qt_err *err);
    /* y += x */
    int (*add)(struct qt_backend *be, float *y, const float *x, size_t count, struct qt_err *err);
    /* y = x - y */
    int (*subtract)(struct qt_backend *be, float *y, const float *x, size_t count,
                    struct qt_err *err);
    /* gather_rows: y[i] = x[rows[i]] * factor[i]. scatter_rows: y[rows[i]] += x[i] * factor[i]; the
     * indices in `rows` must be distinct. i < m; x[i] and y[i] are n floats. `rows` and `factor`
     * are in host memory. rows = NULL: rows[i] is i; factor = NULL: factor[i] is 1. gather_rows
     * works in place (y = x) only if rows is NULL. */
    int (*gather_rows)(struct qt_backend *be, float *y, const float *x, const uint32_t *rows,
                       const float *factor, size_t m, size_t n, struct qt_err *err);
    int (*scatter_rows)(struct qt_backend *be, float *y, const float *x, const uint32_t *rows,
                        const float *factor, size_t m, size_t n, struct qt_err *err);
    /* Copies m rows of n floats; ldy and ldx are the floats from row to row. y and x do not
     * overlap. */
    int (*copy_columns)(struct qt_backend *be, float *y, size_t ldy, const float *x, size_t ldx,
                        size_t n, size_t m, struct qt_err *err);
    /* Causal convolution of each channel within each sequence: y[t][c] = bias[c] + sum over i of
     * w[c][i] times x[t - kernel + 1 + i][c], for x, y [m][channels] and w[channels][kernel]. y is
     * not x; bias may be NULL. */
    int (*convolve)(struct qt_backend *be, float *y, const float *x, const float *w,
                    const float *bias, size_t m, size_t seqlen, size_t channels, size_t kernel,
                    struct qt_err *err);
    /* y[m][value_heads * value_dim] = gated delta rule, see struct qt_delta. */
    int (*delta_rule)(struct qt_backend *be, float *y, const float *qkv, const float *decay,
                      const float *rate, size_t m, const struct qt_delta *d, struct qt_err *err);
    /* y[m][heads * dim] = state space model, see struct qt_state_space. */
    int (*state_space)(struct qt_backend *be, float *y, const float *xbc, const float *steps,
                       size_t m, const struct qt_state_space *s, struct qt_err *err);
    /* y *= factor */
    int (*scale)(struct qt_backend *be, float *y, float factor, size_t count, struct qt_err *err);
    /* y = the nearest number in [-limit, limit] */
    int (*clip)(struct qt_backend *be, float *y, float limit, size_t count, struct qt_err *err);
    /* Scores logits[m][vocab] against targets[m] and, if ref is not NULL, against the reference
     * logits ref[m][vocab]. Applies softcap first if it is > 0. scores[m] and targets are host
     * memory. */
    int (*score)(struct qt_backend *be, struct qt_score *scores, const float *logits,
                 const float *ref, const uint32_t *targets, float softcap, size_t m, size_t vocab,
                 struct qt_err *err);
    /* h[k][k] += x^T x for x[m][k], lower triangle only: FP32 products, FP64 accumulation in h. */
    int (*gram)(struct qt_backend *be, double *h, const float *x, size_t m, size_t k,
                struct qt_err *err);
    /* y += x in FP64, to add up what gram gives */
    int (*add_f64)(struct qt_backend *be, double *y, const double *x, size_t count,
                   struct qt_err *err);
    /* Adds the tokens of x[m][k], in order, to the statistics *c, whose arrays are backend
     * memory. */
    int (*channels)(struct qt_backend *be, const struct qt_channels *c, const float *x, size_t m,
                    size_t k, struct qt_err *err);

    /* ---- gradients: dX stands for dL/dX of the loss L ---- */

    /* linear: dx[m][k] = dy[m][n] w[n][k], or dx += if `add`. */
    int (*linear_grad_x)(struct qt_backend *be, float *dx, const float *dy, const float *w,
                         bool add, size_t m, size_t n, size_t k, struct qt_err *err);
    /* linear: dw[n][k] = dy[m][n]^T x[m][k], or dw += if `add`. */
    int (*linear_grad_w)(struct qt_backend *be, float *dw, const float *dy, const float *x,
                         bool add, size_t m, size_t n, size_t k, struct qt_err *err);
    /* norm with input x: computes dx[m][n], which may be dy, and adds to dw[n] unless dw is
     * NULL. */
    int (*norm_grad)(struct qt_backend *be, float *dx, float *dw, const float *dy, const float *x,
                     const float *w, enum qt_norm_kind kind, float eps, size_t m, size_t n,
                     struct qt_err *err);
    /* attention with inputs q, k, v: computes dq, dk, dv. */
    int (*attention_grad)(struct qt_backend *be, float *dq, float *dk, float *dv, const float *dy,
                          const float *q, const float *k, const float *v, size_t m,
                          const struct qt_attention *a, struct qt_err *err);
    /* activate with inputs gate and up: computes dgate and dup. Each output may be the same array
     * as any input. up = dup = NULL if the forward pass had no up. */
    int (*activate_grad)(struct qt_backend *be, float *dgate, float *dup, const float *dy,
                         const float *gate, const float *up, enum qt_act_kind kind, size_t count,
                         struct qt_err *err);
    /* Computes losses[m] (nats) and dlogits[m][vocab] = weight * gradient of the loss; dlogits may
     * be logits. losses and targets are in host memory. If ref is NULL, the loss is -ln p(target),
     * or 0 for QT_NO_TARGET. Otherwise it is KL(ref || model), and targets is not read. softcap as
     * in score. */
    int (*loss_grad)(struct qt_backend *be, double *losses, float *dlogits, const float *logits,
                     const float *ref, const uint32_t *targets, float softcap, float weight,
                     size_t m, size_t vocab, struct qt_err *err);
    /* *sum (host memory) = sum of (y - target)^2; grad[count] = 2 * weight * (y - target); grad may
     * be y. */
    int (*square_grad)(struct qt_backend *be, double *sum, float *grad, const float *y,
                       const float *target, float weight, size_t count, struct qt_err *err);

    /* ---- learned scales; NULL if `host`: pack/ computes there ---- */

    /* w[n][k] = the values of a coded matrix. */
    int (*decode)(struct qt_backend *be, float *w, const struct qt_coded *c, struct qt_err *err);
    /* dscale[n][groups] += gradient of the scales, from dw[n][k]. */
    int (*decode_grad)(struct qt_backend *be, float *dscale, const struct qt_coded *c,
                       const float *dw, struct qt_err *err);
    /* Makes a step, and sets the scales. Where a gradient is not finite, delta and the scale become
     * NaN. */
    int (*tune)(struct qt_backend *be, const struct qt_tuned *t, const struct qt_adam *step,
                struct qt_err *err);

    /* ---- Hessians; NULL if `host`: hessian/ computes there. order[k] is host memory: position p
     * of h and v is column order[p] of the other matrices. ---- */

    /* h[k][k] = the symmetric matrix with the lower triangle of gram[k][k], times `scale`, plus
     * `damp` on the diagonal; v[k][k] = its upper triangular factor, h = v v^T. Sets *positive to
     * false, and leaves v undefined, if h is not positive definite. */
    int (*factor)(struct qt_backend *be, float *h, float *v, bool *positive, const double *gram,
                  const size_t *order, double scale, double damp, size_t k, struct qt_err *err);
    /* The same for h[i][j] = from[order[i]][order[j]] of a symmetric matrix. */
    int (*factor_again)(struct qt_backend *be, float *h, float *v, bool *positive,
                        const float *from, const size_t *order, size_t k, struct qt_err *err);
    /* s[m][k] = scale c[m][k] h^-1 for h = v v^T. *explained (host memory) = sum of c s. */
    int (*regress)(struct qt_backend *be, float *s, double *explained, const float *c,
                   const float *v, const size_t *order, double scale, size_t m, size_t k,
                   struct qt_err *err);

    /* ---- quantized activations; NULL if `host`: pack/ computes there ---- */

    /* y[m][k] = x[m][k] quantized and dequantized; y is not x. Bit for bit the results of
     * qt_act_apply in pack/. The arrays of `act` are host memory. */
    int (*round_inputs)(struct qt_backend *be, float *y, const float *x, size_t m,
                        const struct qt_act *act, struct qt_err *err);
    /* y[m][k] = x[m][k] in packed order, scale and rotation; y is not x. act->bits is not read. Bit
     * for bit the results of qt_act_arrange in pack/. */
    int (*arrange_inputs)(struct qt_backend *be, float *y, const float *x, size_t m,
                          const struct qt_act *act, struct qt_err *err);
    /* g[blocks][QT_ACT_BLOCK][QT_ACT_BLOCK] += w_b^T w_b for each channel block w_b of w[n][k]. */
    int (*block_grams)(struct qt_backend *be, float *g, const float *w, size_t n, size_t k,
                       struct qt_err *err);
    /* Errors of the channel blocks of x[m][k] with each of `count` roundings, at most
     * QT_ACT_ROUNDINGS: d and squares [count][blocks] (host memory) = sums over tokens of
     * e g[b] e^T and of e e^T, where e is x less its rounded values in packed order, scale and
     * rotation.
     * g[blocks][QT_ACT_BLOCK][QT_ACT_BLOCK]: symmetric, 0 beyond the last channel. Does not read
     * act->bits and act->clip. */
    int (*input_errors)(struct qt_backend *be, double *d, double *squares, const float *x,
                        const float *g, size_t m, const struct qt_act *act,
                        const struct qt_act_rounding *how, size_t count, struct qt_err *err);

    /* ---- rounding; NULL if not implemented: the scheme then rounds on the host ---- */

    /* Chooses codes, scales and zero-points of `count` matrices. Each has the results that it has
     * alone; together they take less time, if one does not keep the backend busy. QT_E_UNSUPPORTED
     * for groups that are longer than 256 columns, unless one group spans the row. */
    int (*round)(struct qt_backend *be, struct qt_round *const *jobs, size_t count,
                 struct qt_err *err);
    /* Fills in the results of the job: see its struct. */
    int (*mix24_costs)(struct qt_backend *be, const struct qt_mix24_costs *job, struct qt_err *err);
    int (*mix24_extent)(struct qt_backend *be, struct qt_mix24_extent *job, struct qt_err *err);
    /* The largest and the smallest largest magnitude of the groups of w[n][k]; groups of zeros do
     * not count (*smallest is infinite if there are no others). *largest is not finite if any w is
     * not. Both are in host memory. */
    int (*group_range)(struct qt_backend *be, float *largest, float *smallest, const float *w,
                       size_t n, size_t k, size_t group, struct qt_err *err);

    /* ---- ranks (base/comm.h); NULL if not implemented ---- */

    /* All ranks call it together: connects their backends, so that backend memory can be moved
     * between them without the host. Sets `linked`, to the same value in all ranks; text[size] says
     * how memory is moved. The backend must be closed before comm. */
    int (*link)(struct qt_backend *be, struct qt_comm *comm, char *text, size_t size,
                struct qt_err *err);
    bool linked;
    /* If linked: the functions of struct qt_comm with these names, for backend memory; the data has
     * been moved on return. */
    int (*shift)(struct qt_backend *be, const void *out, size_t out_bytes, size_t to, void *in,
                 size_t in_bytes, size_t from, struct qt_err *err);
    int (*broadcast)(struct qt_backend *be, void *data, size_t bytes, size_t from,
                     struct qt_err *err);

    /* Frees the backend itself. */
    void (*close)(struct qt_backend *be);
};

/* *out = zeroed [rows][cols] in backend memory; the caller frees it with be->free. */
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

/* Allocates statistics of k channels, all zeros, in backend memory. The caller frees them with
 * qt_backend_channels_free, after an error as well. */
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
