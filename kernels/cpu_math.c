#include "kernels/cpu_math.h"

/*
 * CLONES: one body per instruction set, chosen when the program is loaded. Left out under
 * sanitizers, whose runtimes are not up yet when the loader asks which body to use, and with clang,
 * whose versions before 18 give the clones names that other files do not find.
 */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) &&       \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

/* Lanes of a sum. Fixed: the order of addition must not follow the width of a vector register. */
enum { LANES = 16 };

static inline double lanes_total(double acc[LANES])
{
    for (size_t half = LANES / 2; half; half /= 2)
        for (size_t l = 0; l < half; l++)
            acc[l] += acc[l + half];
    return acc[0];
}

static inline float lanes_max(const float *x, size_t n)
{
    float acc[LANES];
    size_t i = 0;
    for (size_t l = 0; l < LANES; l++)
        acc[l] = -INFINITY;
    for (; i + LANES <= n; i += LANES)
        for (size_t l = 0; l < LANES; l++)
            acc[l] = x[i + l] > acc[l] ? x[i + l] : acc[l];
    for (size_t l = 0; i + l < n; l++)
        acc[l] = x[i + l] > acc[l] ? x[i + l] : acc[l];
    for (size_t l = 1; l < LANES; l++)
        acc[0] = acc[l] > acc[0] ? acc[l] : acc[0];
    return acc[0];
}

static inline void lanes_add(double acc[LANES], const float *x, size_t n)
{
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (size_t l = 0; l < LANES; l++)
            acc[l] += (double)x[i + l];
    for (size_t l = 0; i + l < n; l++)
        acc[l] += (double)x[i + l];
}

/* acc += (x - mean)^2 */
static inline void lanes_add_squares(double acc[LANES], const float *x, double mean, size_t n)
{
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (size_t l = 0; l < LANES; l++) {
            double d = (double)x[i + l] - mean;
            acc[l] += d * d;
        }
    for (size_t l = 0; i + l < n; l++) {
        double d = (double)x[i + l] - mean;
        acc[l] += d * d;
    }
}

/* acc += e * (r - x) */
static inline void lanes_add_cross(double acc[LANES], const float *e, const float *r,
                                   const float *x, size_t n)
{
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (size_t l = 0; l < LANES; l++)
            acc[l] += (double)e[i + l] * ((double)r[i + l] - (double)x[i + l]);
    for (size_t l = 0; i + l < n; l++)
        acc[l] += (double)e[i + l] * ((double)r[i + l] - (double)x[i + l]);
}

/* ---- elementwise ---------------------------------------------------------------------------- */

static inline float silu(float x)
{
    return x / (1.0f + cpu_exp(-x));
}

static inline float gelu_tanh(float x)
{
    /* 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) */
    float u = 0.79788456f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + cpu_tanh(u));
}

static inline float gelu(float x)
{
    return 0.5f * x * (1.0f + cpu_erf(x * 0.70710678f));
}

static inline float relu(float x)
{
    return x < 0.0f ? 0.0f : x; /* NaN stays NaN */
}

#define ACTIVATE(act)                                                                              \
    if (up)                                                                                        \
        for (size_t i = 0; i < n; i++)                                                             \
            y[i] = act(gate[i]) * up[i];                                                           \
    else                                                                                           \
        for (size_t i = 0; i < n; i++)                                                             \
            y[i] = act(gate[i]);                                                                   \
    break

CLONES
void cpu_activate(float *y, const float *gate, const float *up, enum qt_act_kind kind, size_t n)
{
    switch (kind) {
    case QT_ACT_SILU:
        ACTIVATE(silu);
    case QT_ACT_GELU_TANH:
        ACTIVATE(gelu_tanh);
    case QT_ACT_GELU:
        ACTIVATE(gelu);
    case QT_ACT_RELU:
        ACTIVATE(relu);
    }
}

CLONES
void cpu_add(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] += x[i];
}

CLONES
void cpu_scale(float *y, float factor, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] *= factor;
}

CLONES
void cpu_softcap(float *y, const float *x, float cap, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = cap * cpu_tanh(x[i] / cap);
}

CLONES
void cpu_rope(float *x, const float *cos, const float *sin, size_t heads, size_t dim, size_t half)
{
    for (size_t h = 0; h < heads; h++) {
        float *lo = x + h * dim, *hi = lo + half;
        for (size_t i = 0; i < half; i++) {
            float a = lo[i], b = hi[i];
            lo[i] = a * cos[i] - b * sin[i];
            hi[i] = b * cos[i] + a * sin[i];
        }
    }
}

/* ---- rows ----------------------------------------------------------------------------------- */

CLONES
void cpu_norm(float *y, const float *x, const float *w, const float *bias, enum qt_norm_kind kind,
              float eps, size_t n)
{
    double sum[LANES] = {0}, squares[LANES] = {0}, mean = 0.0;
    if (kind == QT_NORM_LAYER) {
        lanes_add(sum, x, n);
        mean = lanes_total(sum) / (double)n;
    }
    lanes_add_squares(squares, x, mean, n);
    float inv = (float)(1.0 / sqrt(lanes_total(squares) / (double)n + (double)eps));
    switch (kind) {
    case QT_NORM_RMS:
        for (size_t i = 0; i < n; i++)
            y[i] = x[i] * inv * w[i];
        break;
    case QT_NORM_RMS1:
        for (size_t i = 0; i < n; i++)
            y[i] = x[i] * inv * (1.0f + w[i]);
        break;
    case QT_NORM_LAYER: /* x - mean cancels when the row is nearly constant: in double */
        for (size_t i = 0; i < n; i++)
            y[i] = (float)((double)x[i] - mean) * inv * w[i];
        if (bias)
            for (size_t i = 0; i < n; i++)
                y[i] += bias[i];
        break;
    }
}

static inline void exp_row(float *y, const float *x, float max, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = cpu_exp(x[i] - max);
}

CLONES
double cpu_softmax(float *x, size_t n)
{
    double acc[LANES] = {0};
    exp_row(x, x, lanes_max(x, n), n);
    lanes_add(acc, x, n);
    return lanes_total(acc);
}

/* Pieces of a row of logits whose e^x are kept in the first-level cache. A multiple of LANES, so
 * that an element's lane does not depend on the piece. */
enum { PIECE = 256 };

CLONES
struct cpu_row_stats cpu_row_stats(const float *x, size_t n)
{
    float max = lanes_max(x, n), e[PIECE];
    double acc[LANES] = {0};
    size_t top = 0;
    for (size_t i = 0; i < n; i += PIECE) {
        size_t piece = qt_min_size(PIECE, n - i);
        exp_row(e, x + i, max, piece);
        lanes_add(acc, e, piece);
    }
    while (top < n && x[top] != max)
        top++;
    /* No element equals the maximum when all are NaN. */
    return (struct cpu_row_stats){max, lanes_total(acc), top < n ? top : 0};
}

CLONES
double cpu_cross_sum(const float *r, const float *x, float max, size_t n)
{
    double acc[LANES] = {0};
    float e[PIECE];
    for (size_t i = 0; i < n; i += PIECE) {
        size_t piece = qt_min_size(PIECE, n - i);
        exp_row(e, r + i, max, piece);
        lanes_add_cross(acc, e, r + i, x + i, piece);
    }
    return lanes_total(acc);
}
