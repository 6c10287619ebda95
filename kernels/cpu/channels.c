/*
 * Statistics of activation channels. One thread processes a tile of channels and takes the tokens
 * in order, so the sums do not depend on the number of threads.
 */
#include "kernels/cpu/internal.h"

/* A tile's histograms have 16 KB and stay in the L1 cache. */
enum { TILE = 64 };

struct channels_job {
    const struct qt_channels *c;
    const float *x;
    size_t m, k;
};

/* Adds one token to a tile. All loops but the last vectorize. */
static inline void add_token(float *absmax, double *sum2, uint32_t *hist, const float *x, size_t n)
{
    uint32_t bin[TILE];
    for (size_t i = 0; i < n; i++) {
        float a = fabsf(x[i]);
        absmax[i] = a > absmax[i] ? a : absmax[i];
        sum2[i] += (double)a * (double)a;
    }
    if (!hist)
        return;
    for (size_t i = 0; i < n; i++)
        bin[i] = qt_hist_bin(x[i]);
    for (size_t i = 0; i < n; i++)
        hist[i * QT_HIST_BINS + bin[i]]++;
}

static void channels_tile(void *ctx, size_t item)
{
    const struct channels_job *job = ctx;
    size_t at = item * TILE, n = qt_min_size(TILE, job->k - at);
    uint32_t *hist = job->c->hist ? job->c->hist + at * QT_HIST_BINS : NULL;
    float absmax[TILE];
    double sum2[TILE];
    memcpy(absmax, job->c->absmax + at, n * sizeof *absmax);
    memcpy(sum2, job->c->sum2 + at, n * sizeof *sum2);
    for (size_t t = 0; t < job->m; t++)
        add_token(absmax, sum2, hist, job->x + t * job->k + at, n);
    memcpy(job->c->absmax + at, absmax, n * sizeof *absmax);
    memcpy(job->c->sum2 + at, sum2, n * sizeof *sum2);
}

void cpu_channels(const struct qt_channels *c, const float *x, size_t m, size_t k)
{
    struct channels_job job = {c, x, m, k};
    qt_parallel_for(qt_ceil_div(k, TILE), channels_tile, &job);
}
