/* Copies of packed matrices in GPU memory, and times of the kernels that read them. */
#include "verify/gpu/gpu.h"

#include <string.h>

enum {
    COLD = 5,         /* multiples of the L2 size; measurements showed L2 hits up to 4 */
    MIN_COPIES = 4,   /* so that a matrix larger than L2 is cold as well */
    MAX_COPIES = 256, /* limits the size of graphs; only tiny matrices need more */
    RANDOM_COUNT = 1 << 20,
};

static int mul(size_t *out, size_t a, size_t b, struct qt_err *err)
{
    return qt_mul_overflow(out, a, b) ? qt_fail(err, QT_E_RESOURCE, NULL, NULL,
                                                "out of GPU memory (%zu x %zu bytes)", a, b)
                                      : QT_OK;
}

/* ---- memory --------------------------------------------------------------------------------- */

int gpu_buffer_need(struct gpu_buffer *b, struct qt_gpu *gpu, size_t bytes, struct qt_err *err)
{
    if (bytes <= b->bytes)
        return QT_OK;
    gpu_buffer_free(b, gpu);
    int rc = gpu->alloc(gpu, &b->data, bytes, err);
    b->bytes = rc < 0 ? 0 : bytes;
    return rc;
}

void gpu_buffer_free(struct gpu_buffer *b, struct qt_gpu *gpu)
{
    if (b->data)
        gpu->free(gpu, b->data);
    *b = (struct gpu_buffer){0};
}

void gpu_operands_free(struct gpu_operands *o, struct qt_gpu *gpu)
{
    gpu_buffer_free(&o->x, gpu);
    gpu_buffer_free(&o->y, gpu);
    gpu_buffer_free(&o->workspace, gpu);
    gpu_buffer_free(&o->codes, gpu);
    gpu_buffer_free(&o->scale, gpu);
    gpu_buffer_free(&o->sum, gpu);
}

int gpu_workspace_need(struct gpu_operands *o, struct qt_gpu *gpu, size_t bytes, struct qt_err *err)
{
    if (bytes <= o->workspace.bytes)
        return QT_OK;
    int rc = gpu_buffer_need(&o->workspace, gpu, bytes, err);
    if (rc == QT_OK)
        rc = gpu->fill(gpu, o->workspace.data, 0, qt_min_size(bytes, QTOOL_WORKSPACE_ZEROED), err);
    return rc;
}

/* Uploads up to RANDOM_COUNT numbers, then doubles the filled part by device copies. */
int gpu_fill_random(struct qt_gpu *gpu, void *dst, size_t bytes, float size, struct qt_err *err)
{
    size_t count = qt_min_size(bytes / 2, RANDOM_COUNT), done = count * 2;
    uint16_t *values = NULL;
    int rc;
    QT_TRY(qt_array_new(&values, count, sizeof *values, err));
    for (size_t i = 0; i < count; i++)
        values[i] = qt_f32_to_f16(size * gpu_random_unit(bytes, i));
    QT_TRY(gpu->upload(gpu, dst, values, done, err));
    for (; done < bytes / 2 * 2; done += qt_min_size(done, bytes / 2 * 2 - done))
        QT_TRY(
            gpu->copy(gpu, (char *)dst + done, dst, qt_min_size(done, bytes / 2 * 2 - done), err));
done:
    qt_free(values);
    return rc;
}

/* ---- copies --------------------------------------------------------------------------------- */

size_t gpu_cold_count(const struct qt_gpu *gpu, size_t bytes)
{
    size_t count = qt_ceil_div(COLD * gpu->l2_bytes, bytes);
    return count < MIN_COPIES ? MIN_COPIES : qt_min_size(count, MAX_COPIES);
}

/* Fills the descriptor of copy i. Computes addresses only; device memory is not read. */
static int describe_copy(struct gpu_copies *c, size_t i, const struct qt_packed *p,
                         struct qt_err *err)
{
    const void *section[QT_MAX_SECTIONS] = {NULL};
    char *at = c->base + i * c->stride;
    for (size_t s = 0; s < c->sections; s++) {
        section[s] = at;
        at += gpu_section_stride(p->section[s].bytes);
    }
    return c->w4ax ? qt_gpu_w4ax_weight(&c->w4ax[i], p, section, err)
                   : qt_gpu_weight(&c->weight[i], p, section, err);
}

static int upload_sections(struct gpu_copies *c, struct qt_gpu *gpu, const struct qt_packed *p,
                           struct qt_err *err)
{
    int rc = QT_OK;
    char *at = c->base;
    for (size_t s = 0; rc == QT_OK && s < c->sections; s++) {
        rc = gpu->upload(gpu, at, p->section[s].data, p->section[s].bytes, err);
        at += gpu_section_stride(p->section[s].bytes);
    }
    return rc;
}

int gpu_copies_new(struct gpu_copies *out, struct qt_gpu *gpu, const struct qt_packed *p,
                   struct qt_err *err)
{
    void *base = NULL;
    size_t total;
    int rc;
    *out = (struct gpu_copies){.sections = gpu_sections(p)};
    for (size_t s = 0; s < out->sections; s++) {
        out->bytes += p->section[s].bytes;
        out->stride += gpu_section_stride(p->section[s].bytes);
    }
    out->count = gpu_cold_count(gpu, out->bytes);
    QT_TRY(mul(&total, out->stride, out->count, err));
    if (gpu_is_w4ax(p))
        QT_TRY(qt_array_new(&out->w4ax, out->count, sizeof *out->w4ax, err));
    else
        QT_TRY(qt_array_new(&out->weight, out->count, sizeof *out->weight, err));
    QT_TRY(gpu->alloc(gpu, &base, total, err));
    out->base = base;
    for (size_t i = 0; i < out->count; i++)
        QT_TRY(describe_copy(out, i, p, err));
    QT_TRY(upload_sections(out, gpu, p, err));
    for (size_t i = 1; i < out->count; i++)
        QT_TRY(gpu->copy(gpu, out->base + i * out->stride, out->base, out->stride, err));
done:
    if (rc < 0)
        gpu_copies_free(out, gpu);
    return rc;
}

void gpu_copies_free(struct gpu_copies *c, struct qt_gpu *gpu)
{
    if (c->base)
        gpu->free(gpu, c->base);
    qt_free(c->weight);
    qt_free(c->w4ax);
    *c = (struct gpu_copies){0};
}

/* ---- cuBLAS --------------------------------------------------------------------------------- */

int gpu_dense_new(struct gpu_dense *out, struct qt_gpu *gpu, size_t n, size_t k, struct qt_err *err)
{
    size_t total;
    void *weights = NULL;
    int rc;
    *out = (struct gpu_dense){.n = n, .k = k};
    QT_TRY(mul(&out->bytes, n, 2 * k, err));
    out->count = gpu_cold_count(gpu, out->bytes);
    QT_TRY(mul(&total, out->bytes, out->count, err));
    QT_TRY(gpu->alloc(gpu, &weights, total, err));
    out->weights = weights;
    QT_TRY(gpu_fill_random(gpu, weights, total, 0.02f, err));
done:
    if (rc < 0)
        gpu_dense_free(out, gpu);
    return rc;
}

void gpu_dense_free(struct gpu_dense *d, struct qt_gpu *gpu)
{
    if (d->weights)
        gpu->free(gpu, d->weights);
    *d = (struct gpu_dense){0};
}

struct dense_work {
    struct qt_gpu *gpu;
    const struct gpu_dense *dense;
    size_t m;
    const struct gpu_operands *operands;
};

static int launch_dense(void *ctx, size_t i, struct qt_err *err)
{
    const struct dense_work *w = ctx;
    const struct gpu_dense *d = w->dense;
    return w->gpu->gemm(w->gpu, w->operands->y.data, w->operands->x.data, d->weights + i * d->bytes,
                        w->m, d->n, d->k, err);
}

/* ---- times ---------------------------------------------------------------------------------- */

struct read_work {
    struct qt_gpu *gpu;
    const struct gpu_copies *copies;
    int shape;
};

static int launch_read(void *ctx, size_t i, struct qt_err *err)
{
    const struct read_work *w = ctx;
    return w->gpu->transfer(w->gpu, NULL, w->copies->base + i * w->copies->stride,
                            qt_round_up(w->copies->bytes, 16), w->shape, err);
}

int gpu_time_floor(double *us, struct qt_gpu *gpu, const struct gpu_copies *c, struct qt_err *err)
{
    struct read_work read = {gpu, c, 0};
    const struct qt_gpu_work work = {launch_read, &read, c->count};
    *us = INFINITY;
    for (; read.shape < QT_GPU_TRANSFERS; read.shape++) {
        double t;
        int rc = gpu->time(gpu, &t, &work, 1, err);
        if (rc < 0)
            return rc;
        *us = fmin(*us, t);
    }
    return QT_OK;
}

int gpu_time_cublas(double *us, struct qt_gpu *gpu, const struct gpu_dense *dense, size_t m,
                    const struct gpu_operands *o, struct qt_err *err)
{
    struct dense_work dense_work = {gpu, dense, m, o};
    const struct qt_gpu_work work = {launch_dense, &dense_work, dense->count};
    int rc = launch_dense(&dense_work, 0, err);
    return rc < 0 ? rc : gpu->time(gpu, us, &work, 1, err);
}

int gpu_time_with_cublas(double *us, double *cublas_us, struct qt_gpu *gpu,
                         const struct qt_gpu_work *works, size_t n, const struct gpu_dense *dense,
                         size_t m, const struct gpu_operands *o, struct qt_err *err)
{
    struct dense_work dense_work = {gpu, dense, m, o};
    struct qt_gpu_work all[QT_GPU_WORKS];
    double all_us[QT_GPU_WORKS];
    int rc;
    if (!dense)
        return gpu->time(gpu, us, works, n, err);
    memcpy(all, works, n * sizeof *works);
    all[n] = (struct qt_gpu_work){launch_dense, &dense_work, dense->count};
    QT_TRY(launch_dense(&dense_work, 0, err));
    QT_TRY(gpu->time(gpu, all_us, all, n + 1, err));
    memcpy(us, all_us, n * sizeof *us);
    *cublas_us = all_us[n];
done:
    return rc;
}

struct plan_work {
    struct qt_gpu *gpu;
    const struct gpu_copies *copies;
    const struct qtool_matmul_plan *plan;
    const struct gpu_operands *operands;
};

static int launch_plan(void *ctx, size_t i, struct qt_err *err)
{
    const struct plan_work *w = ctx;
    return w->gpu->run(w->gpu, w->plan, &w->copies->weight[i], w->operands->y.data,
                       w->operands->x.data, w->operands->workspace.data, err);
}

int gpu_time_plan(double *us, double *cublas_us, struct qt_gpu *gpu, const struct gpu_copies *c,
                  const struct qtool_matmul_plan *plan, const struct gpu_dense *dense,
                  struct gpu_operands *o, struct qt_err *err)
{
    struct plan_work plan_work = {gpu, c, plan, o};
    const struct qt_gpu_work work = {launch_plan, &plan_work, c->count};
    int rc;
    QT_TRY(gpu_workspace_need(o, gpu, plan->workspace_bytes, err));
    /* The first launch loads the kernel's code, which must not happen in graph capture. */
    QT_TRY(launch_plan(&plan_work, 0, err));
    QT_TRY(gpu_time_with_cublas(us, cublas_us, gpu, &work, 1, dense, plan->m, o, err));
done:
    return rc;
}
