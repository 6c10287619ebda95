/* The CUDA backend computes here what choices before rounding depend on: its functions mix24_costs,
 * mix24_extent and group_range. */
#include "kernels/gpu/product.h"
#include "kernels/gpu/round.h"

static int launched(int status, struct qt_err *err)
{
    return gpu_check_launch(status, "rounding", err);
}

/* Downloads the sums over the rows of cost. sum: device, [groups]. */
static int download_costs(double *out, struct qt_gpu *gpu, double *sum, const float *cost,
                          const struct gpu_mix24_costs *c, struct qt_err *err)
{
    int rc;
    QT_TRY(launched(gpu_mix24_sum_rows(sum, cost, c->n, c->groups, gpu_stream_of(gpu)), err));
    QT_TRY(gpu->download(gpu, out, sum, c->groups * sizeof *sum, err));
done:
    return rc;
}

int gpu_mix24_group_costs(struct qt_gpu *gpu, const struct qt_mix24_costs *job, struct qt_err *err)
{
    const size_t n = job->n, groups = qt_ceil_div(job->k, job->group), cells = n * groups;
    struct gpu_mix24_costs c = {
        .n = n, .k = job->k, .group = job->group, .groups = groups, .w = job->w, .exp2 = job->exp2};
    struct gpu_arrays s = {.gpu = gpu};
    double *sum = NULL;
    int rc;
    if (n == 0 || groups == 0)
        return QT_OK;
    if (job->importance)
        QT_TRY(gpu_array_upload(&c.weights, &s, job->importance, job->k, sizeof *c.weights, err));
    if (job->two) {
        QT_TRY(gpu_array_new(&sum, &s, groups, sizeof *sum, err));
        QT_TRY(gpu_array_new(&c.two, &s, cells, sizeof *c.two, err));
        QT_TRY(gpu_array_new(&c.four, &s, cells, sizeof *c.four, err));
    }
    if (job->gain) {
        QT_TRY(gpu_array_new(&c.gain, &s, 2 * cells, sizeof *c.gain, err));
        QT_TRY(gpu_array_new(&c.channel, &s, 2 * cells, 1, err));
    }
    QT_TRY(launched(gpu_mix24_costs(&c, gpu_stream_of(gpu)), err));
    if (job->two) {
        QT_TRY(download_costs(job->two, gpu, sum, c.two, &c, err));
        QT_TRY(download_costs(job->four, gpu, sum, c.four, &c, err));
    }
    if (job->gain) {
        QT_TRY(gpu->download(gpu, job->gain, c.gain, 2 * cells * sizeof *c.gain, err));
        QT_TRY(gpu->download(gpu, job->channel, c.channel, 2 * cells, err));
    }
done:
    gpu_arrays_free(&s);
    return rc;
}

int gpu_mix24_find_extent(struct qt_gpu *gpu, struct qt_mix24_extent *job, struct qt_err *err)
{
    const size_t n = job->n, groups = qt_ceil_div(job->k, job->group);
    struct gpu_mix24_extent e = {
        .n = n, .k = job->k, .group = job->group, .groups = groups, .w = job->w, .exp2 = job->exp2};
    struct gpu_arrays s = {.gpu = gpu};
    uint32_t most[2] = {0};
    int rc;
    QT_TRY(gpu_array_upload(&e.most, &s, most, 2, sizeof *most, err));
    QT_TRY(gpu_array_upload(&e.bits, &s, job->bits, groups, 1, err));
    if (job->outliers)
        QT_TRY(
            gpu_array_upload(&e.outliers, &s, job->outliers, n * groups, sizeof *e.outliers, err));
    if (n && groups)
        QT_TRY(launched(gpu_mix24_extent(&e, gpu_stream_of(gpu)), err));
    QT_TRY(gpu->download(gpu, most, e.most, sizeof most, err));
    job->scale = qt_bits_f32(most[0]);
    job->outlier = qt_bits_f32(most[1]);
done:
    gpu_arrays_free(&s);
    return rc;
}

int gpu_group_range(struct qt_gpu *gpu, float *largest, float *smallest, const float *w, size_t n,
                    size_t k, size_t group, struct qt_err *err)
{
    const uint32_t start[] = {0, 0x7f800000};
    struct gpu_arrays s = {.gpu = gpu};
    uint32_t range[2], *p;
    int rc;
    QT_TRY(gpu_array_upload(&p, &s, start, 2, sizeof *start, err));
    if (n && k)
        QT_TRY(launched(gpu_round_range(p, w, n, k, group, gpu_stream_of(gpu)), err));
    QT_TRY(gpu->download(gpu, range, p, sizeof range, err));
    *largest = qt_bits_f32(range[0]);
    *smallest = qt_bits_f32(range[1]);
done:
    gpu_arrays_free(&s);
    return rc;
}
