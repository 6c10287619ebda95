/* Speed of attention over a 4-bit KV cache, with an FP16 cache and a cold read of the same bytes as
 * references. Caches hold random codes: values do not affect kernel times. */
#include "verify/bench/context.h"

#include <stdio.h>

enum { PAGE = 64 };
/* A cache of this size or more needs one copy only: L2 holds a negligible part of it. */
static const size_t large_bytes = (size_t)4 << 30;

static const struct {
    enum qtool_kv_format format;
    bool paged;
} kinds[BENCH_CACHE_KINDS] = {{QTOOL_KV_F16, false}, {QTOOL_KV_INT4, false}, {QTOOL_KV_INT4, true}};

/* Copies of one cache: keys, values, parameters. */
struct caches {
    struct gpu_copies copies;     /* bytes: data of the tokens; stride: capacity in whole pages */
    struct qtool_kv_cache *cache; /* [copies.count] */
    struct gpu_buffer first, tail, table, lengths;
};

/* Bytes of the codes or numbers of `tokens` tokens, of keys or of values, and of their
 * parameters. */
static size_t code_bytes(const struct qt_bench_cache_row *row, size_t tokens)
{
    const struct qt_bench_cache *shape = row->shape;
    return tokens * shape->kv_heads * shape->head_dim * 2 / (row->format == QTOOL_KV_INT4 ? 4 : 1);
}

static size_t value_param_bytes(const struct qt_bench_cache_row *row, size_t tokens)
{
    const struct qt_bench_cache *shape = row->shape;
    return row->format == QTOOL_KV_INT4
               ? tokens * shape->kv_heads * (shape->head_dim / QTOOL_KV_CHANNELS) * 2
               : 0;
}

static size_t key_param_bytes(const struct qt_bench_cache_row *row, size_t tokens)
{
    const struct qt_bench_cache *shape = row->shape;
    return row->format == QTOOL_KV_INT4
               ? qt_ceil_div(tokens, QTOOL_KV_GROUP) * shape->kv_heads * shape->head_dim * 2
               : 0;
}

/* Bytes that attention reads of a sequence. */
static size_t read_bytes(const struct qt_bench_cache_row *row)
{
    return 2 * code_bytes(row, row->length) + value_param_bytes(row, row->length) +
           key_param_bytes(row, row->length);
}

/* Page table of all sequences; pages are in random order. */
static int upload_table(struct gpu_buffer *out, struct qt_gpu *gpu, size_t pages,
                        struct qt_err *err)
{
    int *table = NULL, rc;
    QT_TRY(qt_array_new(&table, pages, sizeof *table, err));
    for (size_t i = 0; i < pages; i++) {
        size_t j = gpu_random(5, i) % (i + 1);
        table[i] = table[j];
        table[j] = (int)i;
    }
    QT_TRY(gpu_buffer_need(out, gpu, pages * sizeof *table, err));
    QT_TRY(gpu->upload(gpu, out->data, table, pages * sizeof *table, err));
done:
    qt_free(table);
    return rc;
}

static int upload_lengths(struct gpu_buffer *out, struct qt_gpu *gpu, size_t batch, size_t length,
                          struct qt_err *err)
{
    int *lengths = NULL, rc;
    QT_TRY(qt_array_new(&lengths, batch, sizeof *lengths, err));
    for (size_t i = 0; i < batch; i++)
        lengths[i] = (int)length;
    QT_TRY(gpu_buffer_need(out, gpu, batch * sizeof *lengths, err));
    QT_TRY(gpu->upload(gpu, out->data, lengths, batch * sizeof *lengths, err));
done:
    qt_free(lengths);
    return rc;
}

static void describe(struct caches *c, const struct qt_bench_cache_row *row, size_t capacity)
{
    size_t tokens = row->batch * capacity, codes = code_bytes(row, tokens);
    for (size_t i = 0; i < c->copies.count; i++) {
        char *at = c->copies.base + i * c->copies.stride;
        c->cache[i] =
            (struct qtool_kv_cache){.format = row->format,
                                    .heads = row->shape->kv_heads,
                                    .head_dim = row->shape->head_dim,
                                    .page_tokens = row->paged ? PAGE : capacity,
                                    .table = row->paged ? c->table.data : NULL,
                                    .table_pitch = capacity / PAGE,
                                    .k = at,
                                    .v = at + codes,
                                    .v_param = at + 2 * codes,
                                    .k_param = at + 2 * codes + value_param_bytes(row, tokens),
                                    .k_first = c->first.data,
                                    .k_tail = c->tail.data};
    }
}

/* Random bits would make parameters that are not finite: all are 0x2c2c, 0.065. */
static int fill_params(struct caches *c, struct qt_gpu *gpu, const struct qt_bench_cache_row *row,
                       size_t capacity, struct qt_err *err)
{
    size_t tokens = row->batch * capacity, at = 2 * code_bytes(row, tokens);
    int rc = QT_OK;
    for (size_t i = 0; rc == QT_OK && i < c->copies.count; i++)
        rc = gpu->fill(gpu, c->copies.base + i * c->copies.stride + at, 0x2c, c->copies.stride - at,
                       err);
    return rc;
}

static int caches_new(struct caches *out, struct qt_gpu *gpu, struct qt_bench_cache_row *row,
                      struct qt_err *err)
{
    const struct qt_bench_cache *shape = row->shape;
    size_t capacity = qt_round_up(row->length, PAGE), total;
    size_t per_sequence = 2 * code_bytes(row, capacity) + value_param_bytes(row, capacity) +
                          key_param_bytes(row, capacity);
    size_t tail = row->batch * shape->kv_heads * QTOOL_KV_GROUP * shape->head_dim * 2;
    struct gpu_copies *c = &out->copies;
    void *base = NULL;
    int rc;
    if (qt_mul_overflow(&c->stride, per_sequence, row->batch))
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of GPU memory");
    c->bytes = row->bytes = read_bytes(row) * row->batch;
    c->count = c->bytes < large_bytes ? gpu_cold_count(gpu, c->bytes) : 1;
    if (qt_mul_overflow(&total, c->stride, c->count))
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of GPU memory");
    QT_TRY(qt_array_new(&out->cache, c->count, sizeof *out->cache, err));
    QT_TRY(gpu->alloc(gpu, &base, total, err));
    c->base = base;
    QT_TRY(gpu_fill_random(gpu, base, total, 1, err));
    if (row->format == QTOOL_KV_INT4)
        QT_TRY(fill_params(out, gpu, row, capacity, err));
    QT_TRY(gpu_buffer_need(&out->tail, gpu, tail, err));
    QT_TRY(gpu_buffer_need(&out->first, gpu, tail / QTOOL_KV_GROUP, err));
    QT_TRY(gpu_fill_random(gpu, out->first.data, tail / QTOOL_KV_GROUP, 1, err));
    QT_TRY(upload_table(&out->table, gpu, row->batch * capacity / PAGE, err));
    QT_TRY(upload_lengths(&out->lengths, gpu, row->batch, row->length, err));
    describe(out, row, capacity);
done:
    return rc;
}

static void caches_free(struct caches *c, struct qt_gpu *gpu)
{
    gpu_copies_free(&c->copies, gpu);
    qt_free(c->cache);
    gpu_buffer_free(&c->first, gpu);
    gpu_buffer_free(&c->tail, gpu);
    gpu_buffer_free(&c->table, gpu);
    gpu_buffer_free(&c->lengths, gpu);
}

struct attention_work {
    struct bench *b;
    const struct caches *caches;
    const struct qtool_kv_plan *plan;
};

static int launch_attention(void *ctx, size_t i, struct qt_err *err)
{
    const struct attention_work *w = ctx;
    const struct gpu_operands *o = &w->b->operands;
    return w->b->gpu->kv_run(w->b->gpu, w->plan, &w->caches->cache[i], o->y.data, o->x.data,
                             w->caches->lengths.data, o->workspace.data, err);
}

static int time_cache(struct bench *b, struct qt_bench_cache_row *row, struct caches *c,
                      struct qt_err *err)
{
    const struct qt_bench_cache *shape = row->shape;
    const struct qtool_kv_options opt = {.batch = row->batch,
                                         .heads = shape->heads,
                                         .max_length = row->length,
                                         .scale = 1 / sqrtf((float)shape->head_dim),
                                         .dtype = b->opt->matmul.dtype,
                                         .device = b->opt->matmul.device,
                                         .dependent_launch = b->opt->matmul.dependent_launch};
    size_t bytes = row->batch * shape->heads * shape->head_dim * 2;
    struct qtool_kv_plan plan;
    struct attention_work work = {b, c, &plan};
    int rc;
    if (b->opt->matmul.batch_invariant)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                       "attention has no batch-invariant kernels");
    if (b->opt->matmul.compute)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                       "attention kernels cannot be chosen for another compute capability");
    QT_TRY(caches_new(c, b->gpu, row, err));
    QT_TRY(b->gpu->kv_plan(b->gpu, &plan, &c->cache[0], &opt, 0, err));
    row->split_tokens = plan.split_tokens;
    QT_TRY(gpu_time_floor(&row->floor_us, b->gpu, &c->copies, err));
    QT_TRY(gpu_buffer_need(&b->operands.x, b->gpu, bytes, err));
    QT_TRY(gpu_buffer_need(&b->operands.y, b->gpu, bytes, err));
    QT_TRY(gpu_fill_random(b->gpu, b->operands.x.data, bytes, 1, err));
    QT_TRY(gpu_workspace_need(&b->operands, b->gpu, plan.workspace_bytes, err));
    /* The first launch loads the kernel's code, which must not happen in graph capture. */
    QT_TRY(launch_attention(&work, 0, err));
    QT_TRY(b->gpu->time(b->gpu, &row->us,
                        &(struct qt_gpu_work){launch_attention, &work, c->copies.count}, 1, err));
done:
    return rc;
}

/* Out of GPU memory is a refused row, not an error: shorter caches may follow. */
static int bench_cache(struct bench *b, const struct qt_bench_cache_row *like, struct qt_err *err)
{
    struct qt_bench_cache_row *row = &b->report->caches[b->report->ncaches++];
    struct caches caches = {.cache = NULL};
    *row = *like;
    int rc = time_cache(b, row, &caches, err);
    caches_free(&caches, b->gpu);
    qt_log_progress(b->opt->log, "bench", ++b->done, b->total);
    return bench_refused(row->why, rc == QT_E_RESOURCE ? QT_E_UNSUPPORTED : rc, err);
}

static int bench_kinds(struct bench *b, struct qt_bench_cache_row *row, struct qt_err *err)
{
    const struct qt_bench_cache_row *first = &b->report->caches[b->report->ncaches];
    for (size_t i = 0; i < BENCH_CACHE_KINDS; i++) {
        row->format = kinds[i].format;
        row->paged = kinds[i].paged;
        row->f16_us = i ? first->us : NAN;
        int rc = bench_cache(b, row, err);
        if (rc < 0)
            return rc;
    }
    return QT_OK;
}

int bench_caches(struct bench *b, struct qt_err *err)
{
    const struct qt_bench_options *o = b->opt;
    for (size_t s = 0; s < o->ncaches; s++)
        for (size_t i = 0; i < o->nm; i++)
            for (size_t j = 0; j < o->nlengths; j++) {
                struct qt_bench_cache_row row = {.shape = &o->caches[s],
                                                 .batch = o->m[i],
                                                 .length = o->lengths[j],
                                                 .us = NAN,
                                                 .floor_us = NAN};
                int rc = bench_kinds(b, &row, err);
                if (rc < 0)
                    return rc;
            }
    return QT_OK;
}
