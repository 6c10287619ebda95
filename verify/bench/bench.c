/*
 * Speed of the fused kernels, with three references measured in the same run: a cold read of the
 * same bytes (the read floor: no kernel that reads its weights can be faster), cuBLAS in FP16, and
 * the memory bandwidth of the GPU.
 */
#include "verify/bench/context.h"

#include <string.h>

enum {
    STRIP_ROWS = 16,
    SAMPLE_ROWS = 256, /* rows that are quantized; a larger matrix repeats them */
};
static const size_t max_bytes = (size_t)1 << 30; /* buffer of the bandwidth measurement */

/* ---- memory bandwidth ----------------------------------------------------------------------- */

struct machine_work {
    struct qt_gpu *gpu;
    char *dst, *src; /* dst NULL: read only */
    size_t bytes;
    int shape;
};

static int launch_transfer(void *ctx, size_t i, struct qt_err *err)
{
    const struct machine_work *w = ctx;
    (void)i;
    return w->gpu->transfer(w->gpu, w->dst, w->src, w->bytes, w->shape, err);
}

/* Maximum over all launch shapes. A copy counts bytes read and bytes written. */
static int measure_transfer(double *gbs, struct machine_work *work, struct qt_err *err)
{
    const struct qt_gpu_work timed = {launch_transfer, work, 1};
    double moved = (double)work->bytes * (work->dst ? 2 : 1), us;
    for (work->shape = 0; work->shape < QT_GPU_TRANSFERS; work->shape++) {
        int rc = work->gpu->time(work->gpu, &us, &timed, 1, err);
        if (rc < 0)
            return rc;
        *gbs = fmax(*gbs, moved / us / 1e3);
    }
    return QT_OK;
}

static int measure_machine(struct qt_bench_report *out, struct qt_gpu *gpu, struct qt_err *err)
{
    size_t machine_bytes = qt_min_size(max_bytes, gpu->memory_bytes / 8 / 32 * 32);
    void *data = NULL;
    int rc;
    QT_TRY(gpu->alloc(gpu, &data, machine_bytes, err));
    QT_TRY(gpu_fill_random(gpu, data, machine_bytes, 1, err));
    struct machine_work read = {.gpu = gpu, .src = data, .bytes = machine_bytes};
    QT_TRY(measure_transfer(&out->read_gbs, &read, err));
    struct machine_work copy = {.gpu = gpu, .src = data, .bytes = machine_bytes / 2};
    copy.dst = copy.src + copy.bytes;
    QT_TRY(measure_transfer(&out->copy_gbs, &copy, err));
done:
    if (data)
        gpu->free(gpu, data);
    return rc;
}

/* ---- weights -------------------------------------------------------------------------------- */

/* Selects method=rtn, the fastest: the values of codes do not affect kernel times. */
static void choose_rtn(struct qt_spec *spec)
{
    const struct qt_param *p;
    for (size_t i = 0; (p = qt_scheme_param(spec->scheme, i)) != NULL; i++)
        for (size_t c = 0; strcmp(p->key, "method") == 0 && p->choices[c]; c++)
            if (strcmp(p->choices[c], "rtn") == 0)
                spec->value[i] = (double)c;
}

static int quantize_random(struct qt_packed *out, const struct qt_spec *spec, size_t n, size_t k,
                           struct qt_err *err)
{
    uint16_t *data = NULL;
    size_t count;
    int rc = QT_OK;
    if (qt_mul_overflow(&count, n, k))
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "a %zu x %zu matrix is too large", n, k);
    QT_TRY(qt_array_new(&data, count, sizeof *data, err));
    for (size_t i = 0; i < count; i++)
        data[i] = qt_f32_to_f16(0.02f * (gpu_random_unit(1, i) + gpu_random_unit(2, i)));
    const struct qt_matrix w = {data, QT_F16, n, k, "random", "weights"};
    QT_TRY(qt_packed_quantize(out, spec, &w, NULL, NULL, err));
done:
    qt_free(data);
    return rc;
}

/* Fills a section of a matrix from that of a sample: repeats per-strip data, copies per-matrix
 * data. Returns false if the section has another kind of shape. */
static bool repeat_section(struct qt_section *out, const struct qt_section *sample, size_t strips,
                           size_t sample_strips)
{
    size_t rest = (size_t)(out->ndim > 1 ? out->ndim - 1 : 0) * sizeof out->shape[0];
    if (out->ndim != sample->ndim || memcmp(out->shape + 1, sample->shape + 1, rest) != 0)
        return false;
    bool whole = out->shape[0] == sample->shape[0];
    if (!whole && (out->shape[0] != strips || sample->shape[0] != sample_strips))
        return false;
    for (size_t at = 0; at < out->bytes; at += sample->bytes)
        memcpy(out->data + at, sample->data, qt_min_size(sample->bytes, out->bytes - at));
    return true;
}

static bool repeat_sample(struct qt_packed *out, const struct qt_packed *sample)
{
    size_t strips = qt_ceil_div(out->n, STRIP_ROWS), sample_strips = sample->n / STRIP_ROWS;
    bool good = out->nsections == sample->nsections;
    for (size_t s = 0; good && s < gpu_sections(out); s++) {
        struct qt_section *to = &out->section[s];
        good = qt_array_new(&to->data, to->bytes, 1, NULL) == QT_OK &&
               repeat_section(to, &sample->section[s], strips, sample_strips);
    }
    out->scale_exp2 = sample->scale_exp2;
    return good;
}

/* Quantizes the whole matrix if its sections cannot be repeated from a sample. */
int qt_bench_weights(struct qt_packed *out, const struct qt_spec *spec, size_t n, size_t k,
                     struct qt_err *err)
{
    struct qt_spec rtn = *spec;
    struct qt_packed sample = {0};
    int rc;
    choose_rtn(&rtn);
    QT_TRY(qt_packed_describe(out, &rtn, n, k, err));
    if (n > SAMPLE_ROWS) {
        QT_TRY(quantize_random(&sample, &rtn, SAMPLE_ROWS, k, err));
        if (repeat_sample(out, &sample))
            goto done;
        qt_packed_free(out);
    }
    QT_TRY(quantize_random(out, &rtn, n, k, err));
done:
    qt_packed_free(&sample);
    return rc;
}

/* ---- rows ----------------------------------------------------------------------------------- */

static struct qt_bench_row *add_row(struct bench *b, const struct qt_bench_row *row)
{
    struct qt_bench_row *out = &b->report->rows[b->report->count++];
    *out = *row;
    qt_log_progress(b->opt->log, "bench", ++b->done, b->total);
    return out;
}

static const struct gpu_dense *dense_of(const struct bench *b)
{
    return b->dense.weights ? &b->dense : NULL;
}

static int bench_product(struct bench *b, const struct qt_bench_row *like,
                         const struct gpu_copies *copies, struct qt_err *err)
{
    struct qt_bench_row *row = add_row(b, like);
    struct qtool_matmul_plan plan;
    struct qtool_matmul_options opt = b->opt->matmul;
    opt.dense = b->gpu->dense;
    opt.dense_context = b->gpu->dense_context;
    int rc = b->gpu->plan(b->gpu, &plan, &copies->weight[0], row->m, &opt, err);
    if (rc < 0)
        return bench_refused(row->why, rc, err);
    row->config = plan.config;
    rc = gpu_time_plan(&row->us, &row->cublas_us, b->gpu, copies, &plan, dense_of(b), &b->operands,
                       err);
    return bench_refused(row->why, rc, err);
}

static int bench_w4ax_product(struct bench *b, const struct qt_bench_row *like,
                              const struct gpu_copies *copies, const struct gpu_w4ax_input *in,
                              struct qt_err *err)
{
    const struct qtool_matmul_options *o = &b->opt->matmul;
    const struct qtool_w4ax_options opt = {.output = o->dtype == QTOOL_BF16 ? QTOOL_W4AX_BF16
                                                                            : QTOOL_W4AX_F16,
                                           .device = o->device,
                                           .dependent_launch = o->dependent_launch};
    struct qt_bench_row *row = add_row(b, like);
    struct qtool_w4ax_plan plan;
    double us[2] = {NAN, NAN};
    int rc;
    if (o->batch_invariant)
        rc = qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "w4ax has no batch-invariant kernels");
    else if (o->compute)
        rc = qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                     "w4ax kernels cannot be chosen for another compute capability");
    else
        rc = b->gpu->w4ax_plan(b->gpu, &plan, &copies->w4ax[0], row->m, &opt, err);
    if (rc < 0)
        return bench_refused(row->why, rc, err);
    row->w4ax = plan.config;
    rc = gpu_time_w4ax(us, &row->cublas_us, b->gpu, copies, &plan, in, o->dtype, dense_of(b),
                       &b->operands, err);
    row->us = us[0];
    row->total_us = us[1];
    return bench_refused(row->why, rc, err);
}

static int bench_w4ax(struct bench *b, struct qt_bench_row *row, struct gpu_copies *copies,
                      struct qt_err *err)
{
    struct gpu_w4ax_input in = {0};
    struct qt_act act = {0};
    int rc;
    QT_TRY(gpu_random_act(&act, row->spec, row->shape->k, err));
    QT_TRY(gpu_w4ax_input_new(&in, b->gpu, &act, false, err));
    in.in.dependent_launch = b->opt->matmul.dependent_launch;
    for (size_t i = 0; i < copies->count; i++)
        copies->w4ax[i].blocks = in.in.blocks;
    for (size_t i = 0; i < b->opt->nm; i++) {
        row->m = b->opt->m[i];
        QT_TRY(bench_w4ax_product(b, row, copies, &in, err));
    }
done:
    gpu_w4ax_input_free(&in, b->gpu);
    qt_act_free(&act);
    return rc;
}

static int bench_scheme(struct bench *b, const struct qt_bench_shape *shape,
                        const struct qt_spec *spec, struct qt_err *err)
{
    struct qt_bench_row row = {.shape = shape,
                               .spec = spec,
                               .us = NAN,
                               .floor_us = NAN,
                               .cublas_us = NAN,
                               .total_us = NAN};
    struct qt_packed packed = {0};
    struct gpu_copies copies = {0};
    int rc;
    QT_TRY(qt_bench_weights(&packed, spec, shape->n, shape->k, err));
    QT_TRY(gpu_copies_new(&copies, b->gpu, &packed, err));
    row.bytes = copies.bytes;
    QT_TRY(gpu_time_floor(&row.floor_us, b->gpu, &copies, err));
    if (copies.w4ax)
        QT_TRY(bench_w4ax(b, &row, &copies, err));
    for (size_t i = 0; copies.weight && i < b->opt->nm; i++) {
        row.m = b->opt->m[i];
        QT_TRY(bench_product(b, &row, &copies, err));
    }
done:
    if (rc == QT_E_UNSUPPORTED && b->opt->nm) {
        row.m = b->opt->m[0];
        rc = bench_refused(add_row(b, &row)->why, rc, err);
    }
    gpu_copies_free(&copies, b->gpu);
    qt_packed_free(&packed);
    return rc;
}

static int bench_cublas(struct bench *b, const struct qt_bench_shape *shape, struct qt_err *err)
{
    int rc;
    if (!b->gpu->has_cublas)
        return QT_OK;
    rc = gpu_dense_new(&b->dense, b->gpu, shape->n, shape->k, err);
    if (rc < 0)
        return rc == QT_E_RESOURCE ? QT_OK : rc; /* out of GPU memory: no cuBLAS times */
    for (size_t i = 0; i < b->opt->nm; i++) {
        double us;
        QT_TRY(gpu_time_cublas(&us, b->gpu, &b->dense, b->opt->m[i], &b->operands, err));
        add_row(b, &(struct qt_bench_row){.shape = shape,
                                          .m = b->opt->m[i],
                                          .bytes = b->dense.bytes,
                                          .us = us,
                                          .total_us = NAN,
                                          .floor_us = NAN,
                                          .cublas_us = us});
    }
done:
    return rc;
}

static int alloc_operands(struct bench *b, const struct qt_bench_shape *shape, struct qt_err *err)
{
    size_t m = 0, x, y;
    int rc;
    for (size_t i = 0; i < b->opt->nm; i++)
        m = b->opt->m[i] > m ? b->opt->m[i] : m;
    if (qt_mul_overflow(&x, 2 * m, shape->k) || qt_mul_overflow(&y, 2 * m, shape->n))
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of GPU memory");
    QT_TRY(gpu_buffer_need(&b->operands.x, b->gpu, x, err));
    QT_TRY(gpu_buffer_need(&b->operands.y, b->gpu, y, err));
    QT_TRY(gpu_fill_random(b->gpu, b->operands.x.data, x, 1, err));
done:
    return rc;
}

/* Out of GPU memory: frees the weights of cuBLAS and tries again without it. */
static int bench_scheme_in_memory(struct bench *b, const struct qt_bench_shape *shape,
                                  const struct qt_spec *spec, struct qt_err *err)
{
    const size_t rows = b->report->count;
    const double done = b->done;
    int rc = bench_scheme(b, shape, spec, err);
    if (rc != QT_E_RESOURCE || !b->dense.weights)
        return rc;
    gpu_dense_free(&b->dense, b->gpu);
    b->report->count = rows;
    b->done = done;
    return bench_scheme(b, shape, spec, err);
}

static int bench_shape(struct bench *b, const struct qt_bench_shape *shape, struct qt_err *err)
{
    int rc;
    QT_TRY(alloc_operands(b, shape, err));
    QT_TRY(bench_cublas(b, shape, err));
    for (size_t i = 0; i < b->opt->nspecs; i++)
        QT_TRY(bench_scheme_in_memory(b, shape, &b->opt->specs[i], err));
done:
    gpu_dense_free(&b->dense, b->gpu);
    return rc;
}

/* ---- all ------------------------------------------------------------------------------------ */

int qt_bench(struct qt_bench_report *out, struct qt_gpu *gpu, const struct qt_bench_options *opt,
             struct qt_err *err)
{
    struct bench b = {.gpu = gpu, .opt = opt, .report = out};
    size_t rows = opt->nshapes * (opt->nspecs + 1) * opt->nm;
    size_t caches = opt->ncaches * opt->nm * opt->nlengths * BENCH_CACHE_KINDS;
    int rc;
    *out = (struct qt_bench_report){0};
    size_t moe = opt->nmoe * opt->nspecs * opt->nm;
    b.total = (double)(opt->nshapes * (opt->nspecs + gpu->has_cublas) * opt->nm + caches + moe);
    QT_TRY(qt_array_new(&out->rows, rows, sizeof *out->rows, err));
    QT_TRY(qt_array_new(&out->caches, caches, sizeof *out->caches, err));
    QT_TRY(qt_array_new(&out->moe, moe, sizeof *out->moe, err));
    QT_TRY(measure_machine(out, gpu, err));
    for (size_t i = 0; i < opt->nshapes; i++)
        QT_TRY(bench_shape(&b, &opt->shapes[i], err));
    QT_TRY(bench_caches(&b, err));
    QT_TRY(bench_experts(&b, err));
done:
    gpu_operands_free(&b.operands, gpu);
    if (rc < 0)
        qt_bench_free(out);
    return rc;
}

void qt_bench_free(struct qt_bench_report *report)
{
    qt_free(report->rows);
    qt_free(report->caches);
    qt_free(report->moe);
    *report = (struct qt_bench_report){0};
}
