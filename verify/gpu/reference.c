/* Reference products on the CPU: decoded weights times synthetic activations. */
#include "verify/gpu/gpu.h"

#include <string.h>

enum {
    PANEL = 1 << 24,     /* weights decoded at once */
    EXACT_ROWS = 2,      /* rows of a panel multiplied in FP64 */
    OUTLIER_EVERY = 200, /* one channel in so many is an outlier */
};

static const struct {
    const char *name;
    enum qtool_dtype dtype;
    bool heavy;
} sets[REFERENCE_SETS] = {
    {"random f16", QTOOL_F16, false},
    {"heavy-tailed f16", QTOOL_F16, true},
    {"heavy-tailed bf16", QTOOL_BF16, true},
};

/* ---- activations ---------------------------------------------------------------------------- */

/* Approximately normal, variance 1. */
static double random_normal(uint64_t seed, uint64_t i)
{
    double sum = 0;
    for (uint64_t j = 0; j < 3; j++)
        sum += (double)gpu_random_unit(seed, 3 * i + j);
    return sum;
}

/* Like activations of language models: channel magnitudes spread over e^+-2, one channel in 200 is
 * 30 times as large, and tokens differ in magnitude. */
static double heavy_value(uint64_t seed, size_t token, size_t channel)
{
    double magnitude = exp(0.8 * random_normal(seed, channel));
    if (gpu_random(seed + 1, channel) % OUTLIER_EVERY == 0)
        magnitude *= 30;
    return ldexp(magnitude, (int)(token % 7) - 3) *
           random_normal(seed + 2, (uint64_t)token << 32 | channel);
}

struct fill_job {
    struct reference_set *set;
    bool heavy;
    uint64_t seed;
    size_t k;
    double factor;
};

/* Fills one token. The clamp keeps values below the FP16 maximum 65504. */
static void fill_token(void *ctx, size_t token)
{
    const struct fill_job *job = ctx;
    for (size_t i = 0; i < job->k; i++) {
        double v = job->heavy ? heavy_value(job->seed, token, i)
                              : (double)gpu_random_unit(job->seed, (uint64_t)token << 32 | i);
        v = fmax(-32768, fmin(32768, v * job->factor));
        job->set->x[token * job->k + i] = gpu_from_f32((float)v, job->set->dtype);
    }
}

static double root_mean_square(const float *x, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (double)x[i] * (double)x[i];
    return sqrt(sum / (double)n);
}

/* Scales the activations by a power of two so that products with weights of this RMS are about 1,
 * within the range of FP16. */
static void fill_activations(struct reference *t, double weight_rms, uint64_t seed)
{
    int exp2 = 0;
    if (weight_rms > 0)
        exp2 = -(int)lround(log2(weight_rms * sqrt((double)t->k)));
    exp2 = exp2 < -10 ? -10 : exp2 > 8 ? 8 : exp2;
    for (size_t i = 0; i < REFERENCE_SETS; i++) {
        struct fill_job job = {&t->set[i], sets[i].heavy, seed + 16 * i, t->k, ldexp(1, exp2)};
        qt_parallel_for(REFERENCE_TOKENS, fill_token, &job);
    }
}

/* ---- products ------------------------------------------------------------------------------- */

/* Buffers for a panel of rows. */
struct panel {
    size_t row0, rows, capacity;
    float *w, *x, *y;      /* [rows][k], [tokens][k], [tokens][rows] */
    uint16_t *dequantized; /* [rows][k] */
};

static int panel_new(struct panel *out, size_t n, size_t k, struct qt_err *err)
{
    int rc;
    *out = (struct panel){.capacity = qt_min_size(n, qt_ceil_div(PANEL, k))};
    QT_TRY(qt_array_new(&out->w, out->capacity * k, sizeof *out->w, err));
    QT_TRY(qt_array_new(&out->x, REFERENCE_TOKENS * k, sizeof *out->x, err));
    QT_TRY(qt_array_new(&out->y, REFERENCE_TOKENS * out->capacity, sizeof *out->y, err));
    QT_TRY(qt_array_new(&out->dequantized, out->capacity * k, sizeof *out->dequantized, err));
done:
    return rc;
}

static void panel_free(struct panel *p)
{
    qt_free(p->w);
    qt_free(p->x);
    qt_free(p->y);
    qt_free(p->dequantized);
}

static void exact_row(float *y, const struct panel *p, size_t row, size_t n, size_t k)
{
    const float *w = p->w + row * k;
    for (size_t t = 0; t < REFERENCE_TOKENS; t++) {
        double sum = 0;
        for (size_t i = 0; i < k; i++)
            sum += (double)p->x[t * k + i] * (double)w[i];
        y[t * n + p->row0 + row] = (float)sum;
    }
}

/* Writes the columns of the panel to y [REFERENCE_TOKENS][n]. */
static int multiply(float *y, struct reference *t, const struct reference_set *set,
                    const struct panel *p, uint64_t seed, struct qt_backend *cpu,
                    struct qt_err *err)
{
    for (size_t i = 0; i < REFERENCE_TOKENS * t->k; i++)
        p->x[i] = gpu_to_f32(set->x[i], set->dtype);
    int rc = cpu->linear(cpu, p->y, p->x, p->w, NULL, REFERENCE_TOKENS, p->rows, t->k, err);
    for (size_t i = 0; rc == QT_OK && i < REFERENCE_TOKENS; i++)
        memcpy(y + i * t->n + p->row0, p->y + i * p->rows, p->rows * sizeof *p->y);
    for (size_t i = 0; rc == QT_OK && i < EXACT_ROWS; i++)
        exact_row(y, p, gpu_random(seed, p->row0 + i) % p->rows, t->n, t->k);
    return rc;
}

static void round_weights(const struct panel *p, size_t k, double unit)
{
    for (size_t i = 0; i < p->rows * k; i++)
        p->w[i] = (float)((double)qt_f16_to_f32(qt_f32_to_f16((float)(p->w[i] / unit))) * unit);
}

struct compare_job {
    const struct panel *panel;
    enum qtool_dtype dtype;
    size_t k, wrong;
};

static void compare_row(void *ctx, size_t row)
{
    struct compare_job *job = ctx;
    const uint16_t *got = job->panel->dequantized + row * job->k;
    const float *w = job->panel->w + row * job->k;
    size_t wrong = 0;
    for (size_t i = 0; i < job->k; i++) {
        unsigned expected = gpu_from_f32(w[i], job->dtype);
        wrong += got[i] != expected && (got[i] | expected) != 0x8000; /* +0 equals -0 */
    }
    __atomic_fetch_add(&job->wrong, wrong, __ATOMIC_RELAXED);
}

static int compare_dequantized(struct reference *t, const struct panel *p, struct qt_gpu *gpu,
                               void *const dequantized[2], struct qt_err *err)
{
    static const enum qtool_dtype dtypes[] = {QTOOL_F16, QTOOL_BF16};
    int rc = QT_OK;
    for (size_t d = 0; d < 2; d++) {
        const char *src = (const char *)dequantized[d] + p->row0 * t->k * 2;
        struct compare_job job = {p, dtypes[d], t->k, 0};
        QT_TRY(gpu->download(gpu, p->dequantized, src, p->rows * t->k * 2, err));
        qt_parallel_for(p->rows, compare_row, &job);
        t->wrong[d] += job.wrong;
    }
done:
    return rc;
}

/* ---- reference ------------------------------------------------------------------------------ */

static int reference_alloc(struct reference *t, bool products, bool rounded, struct qt_err *err)
{
    for (size_t i = 0; i < REFERENCE_SETS; i++) {
        struct reference_set *set = &t->set[i];
        set->name = sets[i].name;
        set->dtype = sets[i].dtype;
        if (qt_array_new(&set->x, REFERENCE_TOKENS * t->k, sizeof *set->x, err) < 0 ||
            (products && qt_array_new(&set->y, REFERENCE_TOKENS * t->n, sizeof *set->y, err) < 0) ||
            (rounded &&
             qt_array_new(&set->rounded, REFERENCE_TOKENS * t->n, sizeof *set->rounded, err) < 0))
            return QT_E_RESOURCE;
    }
    return QT_OK;
}

int reference_activations(struct reference *out, size_t n, size_t k, double weight_rms,
                          uint64_t seed, struct qt_err *err)
{
    int rc;
    *out = (struct reference){.n = n, .k = k};
    QT_TRY(reference_alloc(out, false, false, err));
    fill_activations(out, weight_rms, seed);
done:
    if (rc < 0)
        reference_free(out);
    return rc;
}

int reference_new(struct reference *out, const struct qt_packed *p, uint64_t seed, double unit,
                  struct qt_backend *cpu, struct qt_gpu *gpu, void *const dequantized[2],
                  struct qt_err *err)
{
    struct panel panel = {0};
    int rc;
    *out = (struct reference){.n = p->n, .k = p->k};
    QT_TRY(reference_alloc(out, true, unit > 0, err));
    QT_TRY(panel_new(&panel, p->n, p->k, err));
    for (; panel.row0 < p->n; panel.row0 += panel.rows) {
        panel.rows = qt_min_size(panel.capacity, p->n - panel.row0);
        QT_TRY(qt_packed_decode(panel.w, p, panel.row0, panel.rows, err));
        if (panel.row0 == 0)
            fill_activations(out, root_mean_square(panel.w, panel.rows * p->k), seed);
        QT_TRY(compare_dequantized(out, &panel, gpu, dequantized, err));
        for (size_t i = 0; i < REFERENCE_SETS; i++)
            QT_TRY(multiply(out->set[i].y, out, &out->set[i], &panel, seed, cpu, err));
        if (unit > 0)
            round_weights(&panel, p->k, unit);
        for (size_t i = 0; i < REFERENCE_SETS && unit > 0; i++)
            QT_TRY(multiply(out->set[i].rounded, out, &out->set[i], &panel, seed, cpu, err));
    }
    for (size_t i = 0; i < REFERENCE_SETS; i++)
        for (size_t t = 0; t < REFERENCE_TOKENS; t++)
            out->set[i].rms[t] = root_mean_square(out->set[i].y + t * p->n, p->n);
done:
    panel_free(&panel);
    if (rc < 0)
        reference_free(out);
    return rc;
}

void reference_free(struct reference *t)
{
    for (size_t i = 0; i < REFERENCE_SETS; i++) {
        qt_free(t->set[i].x);
        qt_free(t->set[i].y);
        qt_free(t->set[i].rounded);
    }
    *t = (struct reference){0};
}
