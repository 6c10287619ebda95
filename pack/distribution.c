/* The distributions of a matrix's weights and of a linear's inputs for the report: a histogram of
 * magnitudes, and the channels that stand out. */
#include "pack/run.h"

#include <math.h>
#include <string.h>

/* TILE: the channels that one thread takes through all rows, in order, so that the sums do not
 * depend on the number of threads. CHANNELS: those that are reported. */
enum { TILE = 256, CHANNELS = 4 };

struct distribution {
    const struct qt_matrix *w;
    float *absmax;                  /* per channel */
    double *sum2;                   /* per channel */
    uint64_t (*hist)[QT_HIST_BINS]; /* per tile */
};

static int measure_tile(void *ctx, size_t tile, int thread, struct qt_err *err)
{
    const struct distribution *d = ctx;
    const struct qt_matrix *w = d->w;
    const size_t at = tile * TILE, n = qt_min_size(TILE, w->k - at);
    const size_t bytes = qt_dtype_bits(w->dtype) / 8;
    float *absmax = d->absmax + at, x[TILE];
    double *sum2 = d->sum2 + at;
    (void)thread;
    (void)err;
    for (size_t r = 0; r < w->n; r++) {
        qt_to_f32(x, (const unsigned char *)w->data + (r * w->k + at) * bytes, w->dtype, n);
        for (size_t j = 0; j < n; j++) {
            const float a = fabsf(x[j]);
            absmax[j] = a > absmax[j] ? a : absmax[j];
            sum2[j] += (double)a * (double)a;
        }
        for (size_t j = 0; j < n; j++)
            d->hist[tile][qt_hist_bin(x[j])]++;
    }
    return QT_OK;
}

/* These statistics describe values[rows][k]. */
struct figures {
    const float *absmax; /* per channel */
    const double *sum2;  /* per channel */
    double rows;
    size_t k;
    uint64_t hist[QT_HIST_BINS];
};

/* The bins from the first to the last that is not empty. */
static json_t *histogram_json(size_t *first, uint64_t hist[QT_HIST_BINS])
{
    json_t *bins = json_array();
    size_t end = QT_HIST_BINS;
    for (*first = 0; *first < QT_HIST_BINS - 1 && hist[*first] == 0;)
        ++*first;
    while (end > *first && hist[end - 1] == 0)
        end--;
    for (size_t b = *first; b < end; b++)
        if (json_array_append_new(bins, json_integer((json_int_t)hist[b])) < 0) {
            json_decref(bins);
            return NULL;
        }
    return bins;
}

/* The channels with the largest values, in descending order. Arrays, as objects take much more
 * memory. */
static json_t *channels_json(const struct figures *f)
{
    size_t top[CHANNELS], n = 0;
    for (size_t j = 0; j < f->k; j++) {
        size_t at = n;
        while (at > 0 && f->absmax[top[at - 1]] < f->absmax[j])
            at--;
        if (at == CHANNELS)
            continue;
        n += n < CHANNELS;
        memmove(&top[at + 1], &top[at], (n - 1 - at) * sizeof *top);
        top[at] = j;
    }
    json_t *channels = json_array();
    for (size_t i = 0; i < n; i++)
        if (json_array_append_new(channels, json_pack("[I, f, f]", (json_int_t)top[i],
                                                      (double)f->absmax[top[i]],
                                                      sqrt(f->sum2[top[i]] / f->rows))) < 0) {
            json_decref(channels);
            return NULL;
        }
    return channels;
}

/* *out is owned. */
static int figures_json(json_t **out, struct figures *f, struct qt_err *err)
{
    double sum2 = 0, absmax = 0;
    size_t first;
    for (size_t j = 0; j < f->k; j++) {
        sum2 += f->sum2[j];
        absmax = fmax(absmax, (double)f->absmax[j]);
    }
    json_t *bins = histogram_json(&first, f->hist);
    *out = json_pack("{s:f, s:f, s:I, s:o, s:o}", "rms", sqrt(sum2 / (f->rows * (double)f->k)),
                     "absmax", absmax, "first_bin", (json_int_t)first, "histogram", bins,
                     "channels", channels_json(f));
    return *out ? QT_OK : qt_no_memory(err, NULL);
}

int qt_run_distribution(json_t **out, const struct qt_matrix *w, struct qt_err *err)
{
    const size_t tiles = qt_ceil_div(w->k, TILE);
    struct distribution d = {.w = w};
    int rc;
    *out = NULL;
    QT_TRY(qt_array_new(&d.absmax, w->k, sizeof *d.absmax, err));
    QT_TRY(qt_array_new(&d.sum2, w->k, sizeof *d.sum2, err));
    QT_TRY(qt_array_new(&d.hist, tiles, sizeof *d.hist, err));
    QT_TRY(qt_parallel(tiles, measure_tile, &d, err));
    struct figures f = {d.absmax, d.sum2, (double)w->n, w->k, {0}};
    for (size_t tile = 0; tile < tiles; tile++)
        for (size_t b = 0; b < QT_HIST_BINS; b++)
            f.hist[b] += d.hist[tile][b];
    QT_TRY(figures_json(out, &f, err));
done:
    qt_free(d.absmax);
    qt_free(d.sum2);
    qt_free(d.hist);
    return rc;
}

int qt_run_input_distribution(json_t **out, const struct qt_channels *c, size_t k,
                              struct qt_err *err)
{
    const struct qt_channels_summary s = qt_channels_summarize(c, k);
    struct figures f = {c->absmax, c->sum2, (double)s.tokens, k, {0}};
    *out = NULL;
    if (s.tokens == 0)
        return QT_OK;
    for (size_t i = 0; i < k * QT_HIST_BINS; i++)
        f.hist[i % QT_HIST_BINS] += c->hist[i];
    for (size_t j = 0; j < k; j++)
        if (!isfinite(c->absmax[j]) || !isfinite(c->sum2[j]))
            return QT_OK; /* JSON has no infinity */
    return figures_json(out, &f, err);
}
