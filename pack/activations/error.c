/*
 * The output error of a channel block at 4 and 8 bits,
 *
 *   D[b] = sum over sampled tokens and linears of |(x - Q(x))_b W_b^T|^2,
 *
 * and the clip ratio of the 4-bit blocks with the least error.
 */
#include "pack/activations/planner.h"

#include <cblas.h>
#include <math.h>
#include <string.h>

static const float clips[] = {1, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f, 0.7f};
enum { CLIPS = sizeof clips / sizeof *clips };

/* G[b] = sum over the linears of W_b^T W_b, lower triangle, for the packed channels of block b. */
static int block_grams(double *g, const struct qt_act_planner *p, size_t layer, int i,
                       struct qt_err *err)
{
    const struct qt_act *act = qt_act_planned(p, layer, i);
    const struct qt_linear *linear;
    size_t count = qt_model_linears(&linear, p->model, layer), k = act->k;
    float *w = NULL, *columns = NULL, product[QT_ACT_BLOCK * QT_ACT_BLOCK];
    int rc = QT_OK;
    openblas_set_num_threads(1);
    for (size_t l = 0; l < count; l++) {
        size_t n = linear[l].n;
        if (linear[l].input != i)
            continue;
        qt_free(w);
        qt_free(columns);
        w = columns = NULL;
        QT_TRY(qt_array_new(&w, n, k * sizeof *w, err));
        QT_TRY(qt_array_new(&columns, n, QT_ACT_BLOCK * sizeof *columns, err));
        QT_TRY(p->source.load(p->source.ctx, linear[l].weight, w, err));
        for (size_t at = 0; at < k; at += QT_ACT_BLOCK) {
            size_t width = qt_min_size(QT_ACT_BLOCK, k - at);
            for (size_t r = 0; r < n; r++)
                for (size_t c = 0; c < width; c++)
                    columns[r * QT_ACT_BLOCK + c] =
                        w[r * k + act->order[at + c]] / act->factor[at + c];
            cblas_ssyrk(CblasRowMajor, CblasLower, CblasTrans, (int)width, (int)n, 1, columns,
                        QT_ACT_BLOCK, 0, product, QT_ACT_BLOCK);
            double *sum = g + at / QT_ACT_BLOCK * QT_ACT_BLOCK * QT_ACT_BLOCK;
            for (size_t r = 0; r < width; r++)
                for (size_t c = 0; c <= r; c++)
                    sum[r * QT_ACT_BLOCK + c] += (double)product[r * QT_ACT_BLOCK + c];
        }
    }
done:
    qt_free(w);
    qt_free(columns);
    return rc;
}

struct error_job {
    const struct qt_act *act;
    const double *g;
    const float *x, *q; /* [m][k] */
    size_t m;
    double *d; /* [blocks] */
};

/* d[b] = sum over tokens of e G[b] e^T, e: rounding errors of the block's channels. */
static void error_block(void *ctx, size_t b)
{
    const struct error_job *job = ctx;
    const struct qt_act *act = job->act;
    const double *g = job->g + b * QT_ACT_BLOCK * QT_ACT_BLOCK;
    size_t at = b * QT_ACT_BLOCK, width = qt_min_size(QT_ACT_BLOCK, act->k - at);
    double e[QT_ACT_BLOCK], sum = 0;
    for (size_t t = 0; t < job->m; t++) {
        for (size_t c = 0; c < width; c++) {
            size_t j = t * act->k + act->order[at + c];
            e[c] = (double)((job->x[j] - job->q[j]) * act->factor[at + c]);
        }
        for (size_t r = 0; r < width; r++) {
            double row = 0;
            for (size_t c = 0; c < r; c++)
                row += g[r * QT_ACT_BLOCK + c] * e[c];
            sum += e[r] * (2 * row + g[r * QT_ACT_BLOCK + r] * e[r]);
        }
    }
    job->d[b] = sum;
}

/* Returns in d[blocks] the errors of all blocks at `bits` and `clip`, in *total their sum. q[m][k]
 * is scratch. */
static int measure(double *total, double *d, struct qt_act *act, const double *g, const float *x,
                   size_t m, unsigned bits, float clip, float *q, struct qt_err *err)
{
    size_t blocks = qt_ceil_div(act->k, QT_ACT_BLOCK);
    struct error_job job = {act, g, x, q, m, d};
    int rc = QT_OK;
    memset(act->bits, (int)bits, blocks);
    act->clip = clip;
    *total = 0;
    QT_TRY(qt_act_apply(q, x, m, act, err));
    qt_parallel_for(blocks, error_block, &job);
    for (size_t b = 0; b < blocks; b++)
        *total += d[b];
done:
    return rc;
}

int qt_act_measure_errors(struct qt_act_planner *p, size_t layer, int i, struct qt_err *err)
{
    struct qt_act_input *in = qt_act_input_at(p, layer, i);
    struct qt_act *act = qt_act_planned(p, layer, i);
    size_t blocks = qt_ceil_div(in->k, QT_ACT_BLOCK), m = p->sampled[i];
    const float *x = p->sample[i];
    double *g = NULL, *d = NULL, total, least = INFINITY;
    float *q = NULL, clip = 1;
    int rc = QT_OK;
    QT_TRY(qt_array_new(&g, blocks, QT_ACT_BLOCK * QT_ACT_BLOCK * sizeof *g, err));
    QT_TRY(qt_array_new(&d, blocks, sizeof *d, err));
    QT_TRY(qt_array_new(&q, m, in->k * sizeof *q, err));
    QT_TRY(qt_array_new(&in->d4, blocks, sizeof *in->d4, err));
    QT_TRY(qt_array_new(&in->d8, blocks, sizeof *in->d8, err));
    QT_TRY(block_grams(g, p, layer, i, err));
    QT_TRY(measure(&total, in->d8, act, g, x, m, 8, 1, q, err));
    for (int c = 0; c < CLIPS; c++) {
        QT_TRY(measure(&total, d, act, g, x, m, 4, clips[c], q, err));
        if (!(total < least))
            continue;
        least = total;
        clip = clips[c];
        memcpy(in->d4, d, blocks * sizeof *d);
    }
    act->clip = clip;
done:
    qt_free(g);
    qt_free(d);
    qt_free(q);
    return rc;
}
