#include "kernels/cpu/math.h"

/*
 * CLONES compiles one body per instruction set; the loader chooses one at program start. It is
 * empty under sanitizers, because the loader calls the resolver before their runtimes are
 * initialized, and with clang, because versions before 18 mangle the names of clones.
 */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) &&       \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

/* Lanes of a sum. Fixed, so that the order of additions does not depend on the vector width. */
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

/* acc += a * b */
static inline void lanes_add_products(double acc[LANES], const float *a, const float *b, size_t n)
{
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (size_t l = 0; l < LANES; l++)
            acc[l] += (double)a[i + l] * (double)b[i + l];
    for (size_t l = 0; i + l < n; l++)
        acc[l] += (double)a[i + l] * (double)b[i + l];
}

/* ---- elementwise ---------------------------------------------------------------------------- */

static inline float silu(float x)
{
    return x / (1.0f + cpu_exp(-x));
}

static inline float sigmoid(float x)
{
    return 1.0f / (1.0f + cpu_exp(-x));
}

/* Comparisons with NaN are false, so that NaN stays NaN. */
static inline float clamped(float gate, float up)
{
    float g = gate > 7.0f ? 7.0f : gate, u = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
    return g * sigmoid(1.702f * g) * (u + 1.0f);
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

static inline float relu2(float x)
{
    return relu(x) * relu(x);
}

static inline float none(float x)
{
    return x;
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
    case QT_ACT_RELU2:
        ACTIVATE(relu2);
    case QT_ACT_NONE:
        ACTIVATE(none);
    case QT_ACT_SIGMOID:
        ACTIVATE(sigmoid);
    case QT_ACT_CLAMPED:
        for (size_t i = 0; up && i < n; i++)
            y[i] = clamped(gate[i], up[i]);
        break;
    }
}

static inline float silu_slope(float x)
{
    float s = 1.0f / (1.0f + cpu_exp(-x));
    return s * (1.0f + x * (1.0f - s));
}

static inline float sigmoid_slope(float x)
{
    float s = sigmoid(x);
    return s * (1.0f - s);
}

static inline float gelu_tanh_slope(float x)
{
    float t = cpu_tanh(0.79788456f * (x + 0.044715f * x * x * x));
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * 0.79788456f * (1.0f + 0.134145f * x * x);
}

static inline float gelu_slope(float x)
{
    /* The normal distribution function plus x times the normal density. */
    return 0.5f * (1.0f + cpu_erf(x * 0.70710678f)) + x * 0.39894228f * cpu_exp(-0.5f * x * x);
}

static inline float relu_slope(float x)
{
    return x > 0.0f ? 1.0f : 0.0f;
}

static inline float relu2_slope(float x)
{
    return 2.0f * relu(x);
}

static inline float none_slope(float x)
{
    (void)x;
    return 1.0f;
}

static inline void clamped_grad(float *dgate, float *dup, float d, float gate, float up)
{
    float g = gate > 7.0f ? 7.0f : gate, u = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
    float s = sigmoid(1.702f * g);
    *dgate = gate > 7.0f ? 0.0f : d * (u + 1.0f) * s * (1.0f + 1.702f * g * (1.0f - s));
    *dup = up > 7.0f || up < -7.0f ? 0.0f : d * g * s;
}

#define ACTIVATE_GRAD(act, slope)                                                                  \
    if (up)                                                                                        \
        for (size_t i = 0; i < n; i++) {                                                           \
            float d = dy[i], g = gate[i], u = up[i];                                               \
            dgate[i] = d * u * slope(g);                                                           \
            dup[i] = d * act(g);                                                                   \
        }                                                                                          \
    else                                                                                           \
        for (size_t i = 0; i < n; i++)                                                             \
            dgate[i] = dy[i] * slope(gate[i]);                                                     \
    break

CLONES
void cpu_activate_grad(float *dgate, float *dup, const float *dy, const float *gate,
                       const float *up, enum qt_act_kind kind, size_t n)
{
    switch (kind) {
    case QT_ACT_SILU:
        ACTIVATE_GRAD(silu, silu_slope);
    case QT_ACT_GELU_TANH:
        ACTIVATE_GRAD(gelu_tanh, gelu_tanh_slope);
    case QT_ACT_GELU:
        ACTIVATE_GRAD(gelu, gelu_slope);
    case QT_ACT_RELU:
        ACTIVATE_GRAD(relu, relu_slope);
    case QT_ACT_RELU2:
        ACTIVATE_GRAD(relu2, relu2_slope);
    case QT_ACT_NONE:
        ACTIVATE_GRAD(none, none_slope);
    case QT_ACT_SIGMOID:
        ACTIVATE_GRAD(sigmoid, sigmoid_slope);
    case QT_ACT_CLAMPED:
        for (size_t i = 0; up && i < n; i++)
            clamped_grad(&dgate[i], &dup[i], dy[i], gate[i], up[i]);
        break;
    }
}

CLONES
void cpu_add(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] += x[i];
}

CLONES
void cpu_subtract(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = x[i] - y[i];
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
void cpu_kv4_round(float *y, const float *x, struct qt_kv4_grid grid, size_t n)
{
    const float inverse = 1 / grid.scale;
    for (size_t i = 0; i < n; i++) {
        float q = x[i] * inverse + grid.zero;
        q = q < 0.0f ? 0.0f : q;
        q = q > 15.0f ? 15.0f : q;
        q = (q + 0x1.8p+23f) - 0x1.8p+23f; /* rint */
        y[i] = (q - grid.zero) * grid.scale;
    }
}

CLONES
double cpu_square_error(float *d, const float *y, const float *target, float factor, size_t n)
{
    double acc[LANES] = {0};
    for (size_t i = 0; i < n; i += LANES)
        for (size_t l = 0; l < qt_min_size(LANES, n - i); l++) {
            float e = y[i + l] - target[i + l];
            acc[l] += (double)e * (double)e;
            d[i + l] = factor * e;
        }
    return lanes_total(acc);
}

CLONES
void cpu_softcap_grad(float *d, const float *y, float cap, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float t = y[i] / cap;
        d[i] *= 1.0f - t * t;
    }
}

/* Rotates pairs (step i, step i + offset) of a head. Callers pass a constant step, so that the
 * compiler vectorizes. */
static inline void rope_head(float *x, const float *cos, const float *sin, size_t half, size_t step,
                             size_t offset)
{
    for (size_t i = 0; i < half; i++) {
        float *lo = x + step * i, *hi = lo + offset;
        float a = *lo, b = *hi;
        *lo = a * cos[i] - b * sin[i];
        *hi = b * cos[i] + a * sin[i];
    }
}

CLONES
void cpu_rope(float *x, const float *cos, const float *sin, size_t heads, size_t dim, size_t half,
              bool interleaved)
{
    for (size_t h = 0; h < heads; h++)
        if (interleaved)
            rope_head(x + h * dim, cos, sin, half, 2, 1);
        else
            rope_head(x + h * dim, cos, sin, half, 1, half);
}

/* ---- rows ----------------------------------------------------------------------------------- */

/* Returns 1 / sqrt(mean square + eps) of a row. QT_NORM_LAYER subtracts the mean first; *mean is 0
 * for QT_NORM_RMS. */
static inline float norm_factor(double *mean, const float *x, enum qt_norm_kind kind, float eps,
                                size_t n)
{
    double sum[LANES] = {0}, squares[LANES] = {0};
    *mean = 0.0;
    if (kind == QT_NORM_LAYER) {
        lanes_add(sum, x, n);
        *mean = lanes_total(sum) / (double)n;
    }
    lanes_add_squares(squares, x, *mean, n);
    return (float)(1.0 / sqrt(lanes_total(squares) / (double)n + (double)eps));
}

CLONES
void cpu_norm(float *y, const float *x, const float *w, const float *bias, enum qt_norm_kind kind,
              float eps, size_t n)
{
    double mean;
    float inv = norm_factor(&mean, x, kind, eps, n);
    switch (kind) {
    case QT_NORM_RMS:
        for (size_t i = 0; i < n; i++)
            y[i] = x[i] * inv * w[i];
        break;
    case QT_NORM_LAYER: /* in double: x - mean cancels if the row is nearly constant */
        for (size_t i = 0; i < n; i++)
            y[i] = (float)((double)x[i] - mean) * inv * w[i];
        if (bias)
            for (size_t i = 0; i < n; i++)
                y[i] += bias[i];
        break;
    }
}

/* With z = (x - mean) * inv and t = dy * w: dx = inv * (t - mean(t) - z * mean(t z)). The term
 * mean(t) is present for QT_NORM_LAYER only. */
CLONES
void cpu_norm_grad(float *dx, double *dw, const float *dy, const float *x, const float *w,
                   enum qt_norm_kind kind, float eps, size_t n)
{
    double mean, tz[LANES] = {0}, ts[LANES] = {0};
    float inv = norm_factor(&mean, x, kind, eps, n);
    for (size_t i = 0; i < n; i += LANES)
        for (size_t l = 0; l < qt_min_size(LANES, n - i); l++) {
            double t = (double)dy[i + l] * (double)w[i + l];
            ts[l] += t;
            tz[l] += t * ((double)x[i + l] - mean);
        }
    float mean_t = kind == QT_NORM_LAYER ? (float)(lanes_total(ts) / (double)n) : 0.0f;
    float mean_tz = (float)(lanes_total(tz) * (double)inv / (double)n);
    for (size_t i = 0; i < n; i++) {
        float d = dy[i], z = (float)((double)x[i] - mean) * inv;
        if (dw)
            dw[i] += (double)(d * z);
        dx[i] = inv * (d * w[i] - mean_t - z * mean_tz);
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

CLONES
void cpu_softmax_grad(float *d, const float *p, size_t n)
{
    double acc[LANES] = {0};
    lanes_add_products(acc, d, p, n);
    float mean = (float)lanes_total(acc);
    for (size_t i = 0; i < n; i++)
        d[i] = p[i] * (d[i] - mean);
}

CLONES
void cpu_exp_scaled(float *y, const float *x, float max, float factor, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = cpu_exp(x[i] - max) * factor;
}

CLONES
void cpu_exp_subtract(float *y, const float *x, float max, float factor, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] -= cpu_exp(x[i] - max) * factor;
}

/* Elements of a row of logits that are processed at a time, so that their e^x stay in the L1 cache.
 * A multiple of LANES, so that each element keeps its lane. */
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
    /* If all elements are NaN, none equals the maximum. */
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
