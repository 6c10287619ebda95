/* Speed of layers of experts, with a cold read of the weights that the routing touches and cuBLAS
 * in FP16 as references. All experts hold the same codes and tables: values do not affect kernel
 * times, except that look-up tables are filled once per thread block. */
#include "verify/bench/context.h"

#include <string.h>

enum { COLD = 5, MATRICES = 3 };

/* Copies of a layer in GPU memory, so many that the weights that a launch reads are not in L2 when
 * it is repeated. */
struct layers {
    struct gpu_copies copies; /* stride: a layer; bytes: what the routing touches */
    size_t expert_bytes;      /* packed; without padding */
    struct qtool_matmul_weight *weight[MATRICES]; /* [experts] of the layer that is described, or */
    struct qtool_w4ax_weight *w4ax[MATRICES];     /* the same */
    struct gpu_w4ax_input input[2];               /* of gate and up, of down */
    struct qtool_w4ax_input *inner;               /* [experts] */
    struct qtool_moe_w4ax described;
    struct gpu_buffer table; /* [count][experts] */
    size_t table_bytes;      /* of a layer */
};

/* The experts that m tokens choose. */
struct routing {
    int *ids;       /* [m][topk] */
    float *weights; /* same */
    size_t *tokens; /* [experts] */
    size_t touched, most;
    struct gpu_buffer device_ids, device_weights;
};

static void routing_free(struct routing *r, struct qt_gpu *gpu)
{
    qt_free(r->ids);
    qt_free(r->weights);
    qt_free(r->tokens);
    gpu_buffer_free(&r->device_ids, gpu);
    gpu_buffer_free(&r->device_weights, gpu);
}

/* Every token chooses topk different experts, all equally probable. */
static int routing_new(struct routing *r, struct qt_gpu *gpu, const struct qt_bench_moe *shape,
                       size_t m, struct qt_err *err)
{
    size_t pairs = m * shape->topk, *all = NULL;
    int rc;
    QT_TRY(qt_array_new(&r->ids, pairs, sizeof *r->ids, err));
    QT_TRY(qt_array_new(&r->weights, pairs, sizeof *r->weights, err));
    QT_TRY(qt_array_new(&r->tokens, shape->experts, sizeof *r->tokens, err));
    QT_TRY(qt_array_new(&all, shape->experts, sizeof *all, err));
    for (size_t i = 0; i < shape->experts; i++)
        all[i] = i;
    for (size_t i = 0; i < pairs; i++) {
        const size_t j = i % shape->topk, k = j + gpu_random(11, i) % (shape->experts - j);
        const size_t e = all[k];
        all[k] = all[j];
        all[j] = e;
        r->ids[i] = (int)e;
        r->weights[i] = 1 / (float)shape->topk;
        r->touched += r->tokens[e]++ == 0;
        if (r->tokens[e] > r->most)
            r->most = r->tokens[e];
    }
    QT_TRY(gpu_buffer_need(&r->device_ids, gpu, pairs * sizeof *r->ids, err));
    QT_TRY(gpu_buffer_need(&r->device_weights, gpu, pairs * sizeof *r->weights, err));
    QT_TRY(gpu->upload(gpu, r->device_ids.data, r->ids, pairs * sizeof *r->ids, err));
    QT_TRY(gpu->upload(gpu, r->device_weights.data, r->weights, pairs * sizeof *r->weights, err));
done:
    qt_free(all);
    return rc;
}

/* ---- packed weights ------------------------------------------------------------------------- */

static size_t padded_bytes(const struct qt_packed *p)
{
    size_t bytes = 0;
    for (size_t s = 0; s < gpu_sections(p); s++)
        bytes += gpu_section_stride(p->section[s].bytes);
    return bytes;
}

static size_t packed_bytes(const struct qt_packed *p)
{
    size_t bytes = 0;
    for (size_t s = 0; s < gpu_sections(p); s++)
        bytes += p->section[s].bytes;
    return bytes;
}

/* The matrices of an expert: gate and up hold the same codes. */
static const struct qt_packed *matrix_of(const struct qt_packed p[2], int i)
{
    return &p[i == MATRICES - 1];
}

/* Describes the experts of layer `layer`. */
static int describe(struct layers *l, const struct qt_bench_moe *shape, const struct qt_packed p[2],
                    size_t layer, struct qt_err *err)
{
    char *at = l->copies.base + layer * l->copies.stride;
    int rc = QT_OK;
    for (size_t e = 0; rc == QT_OK && e < shape->experts; e++)
        for (int i = 0; rc == QT_OK && i < MATRICES; i++) {
            const struct qt_packed *m = matrix_of(p, i);
            const void *section[QT_MAX_SECTIONS] = {NULL};
            for (size_t s = 0; s < gpu_sections(m); s++) {
                section[s] = at;
                at += gpu_section_stride(m->section[s].bytes);
            }
            rc = l->w4ax[i] ? qt_gpu_w4ax_weight(&l->w4ax[i][e], m, section, err)
                            : qt_gpu_weight(&l->weight[i][e], m, section, err);
        }
    return rc;
}

/* Arrays of descriptors, and the inputs of w4ax experts. */
static int descriptors_new(struct layers *l, struct qt_gpu *gpu, size_t experts,
                           const struct qt_packed p[2], struct qt_err *err)
{
    struct qt_act act = {0};
    int rc = QT_OK;
    for (int i = 0; i < MATRICES; i++)
        QT_TRY(gpu_is_w4ax(&p[0])
                   ? qt_array_new(&l->w4ax[i], experts, sizeof *l->w4ax[i], err)
                   : qt_array_new(&l->weight[i], experts, sizeof *l->weight[i], err));
    for (int i = 0; i < 2 && l->w4ax[0]; i++) {
        QT_TRY(gpu_random_act(&act, &p[i].spec, p[i].k, err));
        QT_TRY(gpu_w4ax_input_new(&l->input[i], gpu, &act, false, err));
        qt_act_free(&act);
    }
    if (!l->w4ax[0])
        return QT_OK;
    QT_TRY(qt_array_new(&l->inner, experts, sizeof *l->inner, err));
    for (size_t e = 0; e < experts; e++) {
        l->inner[e] = l->input[1].in;
        l->inner[e].perm = NULL; /* rows of up are stored in the order of the input of down */
    }
    l->described =
        (struct qtool_moe_w4ax){l->w4ax[0], l->w4ax[1], l->w4ax[2], l->input[0].in, l->inner};
done:
    qt_act_free(&act);
    return rc;
}

static struct qtool_moe_layer layer_of(const struct layers *l, const struct qt_bench_moe *shape)
{
    return (struct qtool_moe_layer){.experts = shape->experts,
                                    .gate = l->weight[0],
                                    .up = l->weight[1],
                                    .down = l->weight[2],
                                    .w4ax = l->w4ax[0] ? &l->described : NULL};
}

/* Uploads one expert and copies it to all others. */
static int upload(struct layers *l, struct qt_gpu *gpu, const struct qt_packed p[2], size_t bytes,
                  size_t expert_stride, struct qt_err *err)
{
    char *at = l->copies.base;
    int rc = QT_OK;
    for (int i = 0; i < MATRICES; i++) {
        const struct qt_packed *m = matrix_of(p, i);
        for (size_t s = 0; rc == QT_OK && s < gpu_sections(m); s++) {
            rc = gpu->upload(gpu, at, m->section[s].data, m->section[s].bytes, err);
            at += gpu_section_stride(m->section[s].bytes);
        }
    }
    for (size_t done = expert_stride; rc == QT_OK && done < bytes;) {
        const size_t more = qt_min_size(done, bytes - done);
        rc = gpu->copy(gpu, l->copies.base + done, l->copies.base, more, err);
        done += more;
    }
    return rc;
}

static int layers_new(struct layers *l, struct qt_gpu *gpu, const struct qt_bench_moe *shape,
                      const struct qt_packed p[2], size_t touched, struct qt_err *err)
{
    const size_t expert = 2 * padded_bytes(&p[0]) + padded_bytes(&p[1]);
    void *base = NULL, *table = NULL;
    size_t total;
    int rc;
    l->expert_bytes = 2 * packed_bytes(&p[0]) + packed_bytes(&p[1]);
    l->copies.bytes = touched * l->expert_bytes;
    l->copies.stride = shape->experts * expert;
    l->copies.count = qt_ceil_div(COLD * gpu->l2_bytes, l->copies.bytes);
    l->table_bytes = shape->experts * QTOOL_MOE_TABLE_EXPERT;
    QT_TRY(descriptors_new(l, gpu, shape->experts, p, err));
    if (qt_mul_overflow(&total, l->copies.stride, l->copies.count))
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of GPU memory");
    QT_TRY(gpu->alloc(gpu, &base, total, err));
    l->copies.base = base;
    QT_TRY(upload(l, gpu, p, total, expert, err));
    QT_TRY(gpu_buffer_need(&l->table, gpu, l->copies.count * l->table_bytes, err));
    QT_TRY(qt_array_new(&table, l->table_bytes, 1, err));
    for (size_t i = 0; i < l->copies.count; i++) {
        const struct qtool_moe_layer layer = layer_of(l, shape);
        QT_TRY(describe(l, shape, p, i, err));
        QT_TRY(gpu->moe_table(gpu, table, &layer, err));
        QT_TRY(gpu->upload(gpu, (char *)l->table.data + i * l->table_bytes, table, l->table_bytes,
                           err));
    }
done:
    qt_free(table);
    return rc;
}

static void layers_free(struct layers *l, struct qt_gpu *gpu)
{
    if (l->copies.base)
        gpu->free(gpu, l->copies.base);
    for (int i = 0; i < MATRICES; i++) {
        qt_free(l->weight[i]);
        qt_free(l->w4ax[i]);
    }
    gpu_w4ax_input_free(&l->input[0], gpu);
    gpu_w4ax_input_free(&l->input[1], gpu);
    qt_free(l->inner);
    gpu_buffer_free(&l->table, gpu);
    *l = (struct layers){0};
}

/* ---- times ---------------------------------------------------------------------------------- */

struct work {
    struct qt_gpu *gpu;
    const struct qt_bench_moe *shape;
    const struct qtool_moe_plan *plan;
    const struct layers *layers;
    const struct routing *routing;
    struct gpu_operands *operands;
    /* Weights of cuBLAS: of each copy first [touched][2 inner][hidden], then [touched][hidden]
     * [inner]. */
    struct gpu_buffer dense;
    size_t dense_bytes; /* of a copy */
};

static int launch_experts(void *ctx, size_t i, struct qt_err *err)
{
    const struct work *w = ctx;
    return w->gpu->moe_run(w->gpu, w->plan,
                           (char *)w->layers->table.data + i * w->layers->table_bytes,
                           w->operands->y.data, w->operands->x.data, w->routing->device_ids.data,
                           w->routing->device_weights.data, w->operands->workspace.data, err);
}

static const char *dense_gate(const struct work *w, size_t i)
{
    return (const char *)w->dense.data + i * w->dense_bytes;
}

static const char *dense_down(const struct work *w, size_t i)
{
    return dense_gate(w, i) + w->routing->touched * 4 * w->shape->inner * w->shape->hidden;
}

static int launch_loop(void *ctx, size_t i, struct qt_err *err)
{
    const struct work *w = ctx;
    const size_t n = w->shape->inner, k = w->shape->hidden;
    const char *gate = dense_gate(w, i), *down = dense_down(w, i);
    int rc = QT_OK;
    for (int product = 0; product < 2; product++)
        for (size_t e = 0; rc == QT_OK && e < w->shape->experts; e++) {
            const size_t m = w->routing->tokens[e];
            if (m == 0)
                continue;
            rc = product ? w->gpu->gemm(w->gpu, w->operands->y.data, w->operands->x.data, down, m,
                                        k, n, err)
                         : w->gpu->gemm(w->gpu, w->operands->y.data, w->operands->x.data, gate, m,
                                        2 * n, k, err);
            gate += product ? 0 : 4 * n * k;
            down += product ? 2 * n * k : 0;
        }
    return rc;
}

static int launch_batch(void *ctx, size_t i, struct qt_err *err)
{
    const struct work *w = ctx;
    const size_t n = w->shape->inner, k = w->shape->hidden;
    int rc = w->gpu->gemm_batch(w->gpu, w->operands->y.data, w->operands->x.data, dense_gate(w, i),
                                w->routing->touched, w->routing->most, 2 * n, k, err);
    if (rc == QT_OK)
        rc = w->gpu->gemm_batch(w->gpu, w->operands->y.data, w->operands->x.data, dense_down(w, i),
                                w->routing->touched, w->routing->most, k, n, err);
    return rc;
}

/* Weights for cuBLAS. Returns the number of copies; 0: not enough memory, or no cuBLAS. */
static int dense_new(size_t *count, struct work *w, struct qt_err *err)
{
    size_t total;
    int rc;
    *count = 0;
    if (!w->gpu->has_cublas)
        return QT_OK;
    w->dense_bytes = w->routing->touched * 6 * w->shape->inner * w->shape->hidden;
    const size_t copies = qt_ceil_div(COLD * w->gpu->l2_bytes, w->dense_bytes);
    if (qt_mul_overflow(&total, copies, w->dense_bytes))
        return QT_OK;
    rc = gpu_buffer_need(&w->dense, w->gpu, total, err);
    if (rc == QT_E_RESOURCE)
        return QT_OK;
    if (rc == QT_OK)
        rc = gpu_fill_random(w->gpu, w->dense.data, total, 0.02f, err);
    *count = copies;
    return rc;
}

static int measure(struct bench *b, struct qt_bench_moe_row *row, struct work *w,
                   struct qt_err *err)
{
    double us[3] = {NAN, NAN, NAN};
    size_t copies, works = 1;
    int rc;
    QT_TRY(gpu_time_floor(&row->floor_us, b->gpu, &w->layers->copies, err));
    QT_TRY(dense_new(&copies, w, err));
    QT_TRY(launch_experts(w, 0, err)); /* outside of a graph, as it loads the kernels */
    if (copies) {
        QT_TRY(launch_loop(w, 0, err));
        QT_TRY(launch_batch(w, 0, err));
        works = 3;
    }
    const struct qt_gpu_work all[] = {{launch_experts, w, w->layers->copies.count},
                                      {launch_loop, w, copies},
                                      {launch_batch, w, copies}};
    QT_TRY(b->gpu->time(b->gpu, us, all, works, err));
    row->us = us[0];
    row->loop_us = us[1];
    row->batch_us = us[2];
done:
    return rc;
}

/* X and Y of the layer, and of the products of cuBLAS. */
static int operands_need(struct bench *b, const struct qt_bench_moe_row *row, size_t workspace,
                         struct qt_err *err)
{
    const struct qt_bench_moe *s = row->shape;
    const size_t rows = row->m > row->touched * row->most ? row->m : row->touched * row->most;
    const size_t wide = s->hidden > 2 * s->inner ? s->hidden : 2 * s->inner;
    size_t bytes;
    int rc;
    if (qt_mul_overflow(&bytes, rows, 2 * wide))
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of GPU memory");
    QT_TRY(gpu_buffer_need(&b->operands.y, b->gpu, bytes, err));
    if (bytes > b->operands.x.bytes) {
        QT_TRY(gpu_buffer_need(&b->operands.x, b->gpu, bytes, err));
        QT_TRY(gpu_fill_random(b->gpu, b->operands.x.data, bytes, 1, err));
    }
    QT_TRY(gpu_workspace_need(&b->operands, b->gpu, workspace, err));
done:
    return rc;
}

static int bench_layer(struct bench *b, struct qt_bench_moe_row *row, const struct qt_packed p[2],
                       struct qt_err *err)
{
    const struct qt_bench_moe *shape = row->shape;
    const struct qtool_moe_options opt = {.dtype = b->opt->matmul.dtype,
                                          .device = b->opt->matmul.device,
                                          .topk = shape->topk,
                                          .same_tables = !gpu_learns_table(&p[0].spec),
                                          .dependent_launch = b->opt->matmul.dependent_launch};
    struct layers layers = {.copies = {0}};
    struct routing routing = {.touched = 0};
    struct qtool_moe_plan plan;
    struct work w = {.gpu = b->gpu,
                     .shape = shape,
                     .plan = &plan,
                     .layers = &layers,
                     .routing = &routing,
                     .operands = &b->operands};
    int rc;
    QT_TRY(routing_new(&routing, b->gpu, shape, row->m, err));
    row->touched = routing.touched;
    row->most = routing.most;
    QT_TRY(layers_new(&layers, b->gpu, shape, p, routing.touched, err));
    row->bytes = layers.copies.bytes;
    const struct qtool_moe_layer layer = layer_of(&layers, shape);
    QT_TRY(b->gpu->moe_plan(b->gpu, &plan, &layer, row->m, &opt, err));
    QT_TRY(operands_need(b, row, plan.workspace_bytes, err));
    QT_TRY(measure(b, row, &w, err));
done:
    gpu_buffer_free(&w.dense, b->gpu);
    layers_free(&layers, b->gpu);
    routing_free(&routing, b->gpu);
    return rc;
}

static int bench_spec(struct bench *b, const struct qt_bench_moe *shape, const struct qt_spec *spec,
                      struct qt_err *err)
{
    struct qt_packed p[2] = {{.nsections = 0}, {.nsections = 0}};
    int rc;
    QT_TRY(qt_bench_weights(&p[0], spec, shape->inner, shape->hidden, err));
    QT_TRY(qt_bench_weights(&p[1], spec, shape->hidden, shape->inner, err));
    for (size_t i = 0; i < b->opt->nm; i++) {
        struct qt_bench_moe_row *row = &b->report->moe[b->report->nmoe++];
        *row = (struct qt_bench_moe_row){.shape = shape,
                                         .spec = spec,
                                         .m = b->opt->m[i],
                                         .us = NAN,
                                         .floor_us = NAN,
                                         .loop_us = NAN,
                                         .batch_us = NAN};
        rc = bench_layer(b, row, p, err);
        if (rc == QT_E_RESOURCE) /* a smaller number of tokens may fit */
            rc = qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "out of GPU memory");
        QT_TRY(bench_refused(row->why, rc, err));
        qt_log_progress(b->opt->log, "bench", ++b->done, b->total);
    }
done:
    qt_packed_free(&p[0]);
    qt_packed_free(&p[1]);
    return rc;
}

int bench_experts(struct bench *b, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0; i < b->opt->nmoe; i++)
        for (size_t j = 0; rc == QT_OK && j < b->opt->nspecs; j++)
            rc = bench_spec(b, &b->opt->moe[i], &b->opt->specs[j], err);
    return rc;
}
