/*
 * verify --device: checks the kernels of qtool_kv4.h for the heads of a model. Appended tokens,
 * decoded from the cache, must equal those of qt_kv_apply bit for bit, whether they come in one
 * call or in several, append must not write elsewhere, and attention is compared with FP64.
 */
#include "verify/gpu/device.h"

#include <stdio.h>
#include <string.h>

enum { SEQUENCES = 4, PAGE = 64, CAPACITY = 704, TOKENS = 700 + 129 + 33 + 1 };
static const int lengths[SEQUENCES] = {700, 129, 33, 1}; /* around groups, pages and splits */

static const struct {
    const char *name;
    enum qtool_dtype dtype;
    bool paged;
} cases[] = {
    {"paged f16", QTOOL_F16, true},
    {"contiguous bf16", QTOOL_BF16, false},
};

/* Limit of the relative error, by output type: probabilities are rounded to FP16, outputs to FP16
 * or BF16. */
static const double MAX_ERROR[] = {1.5e-3, 3e-3};

enum { K, V, K_PARAM, V_PARAM, K_FIRST, K_TAIL, ARRAYS };

struct check {
    struct device *d;
    struct qt_device_tensor *out;
    const char *name;
    enum qtool_dtype dtype;
    size_t heads, group, dim; /* KV heads, query heads per KV head, channels of a head */
    size_t pages, rows;       /* rows: capacity of the cache in tokens of one head */
    int table[SEQUENCES * CAPACITY / PAGE];
    int sequence[TOKENS], position[TOKENS];
    float *k, *v;    /* [TOKENS][heads][dim], expected decoded values */
    uint16_t *input; /* keys or values to append; later queries */
    struct gpu_buffer memory[ARRAYS], k_in, v_in, q,
        small[3]; /* small: table, sequence or lengths, position */
    struct qtool_kv_cache cache;
    char *data[ARRAYS]; /* the arrays inside `memory` */
    unsigned char *got[ARRAYS];
    bool *used; /* [rows]: a token was appended there */
};

/* ---- cache ---------------------------------------------------------------------------------- */

static size_t array_bytes(const struct check *c, int array)
{
    switch (array) {
    case K_PARAM:
        return c->rows / QTOOL_KV_GROUP * c->dim * 2;
    case V_PARAM:
        return c->rows * (c->dim / QTOOL_KV_CHANNELS) * 2;
    case K_FIRST:
        return SEQUENCES * c->heads * c->dim * 2;
    case K_TAIL:
        return SEQUENCES * c->heads * QTOOL_KV_GROUP * c->dim * 2;
    default:
        return c->rows * c->dim / 2;
    }
}

/* Row of a token of one head in the arrays of the cache. */
static size_t cache_row(const struct check *c, size_t token, size_t head)
{
    size_t page = (size_t)c->sequence[token], at = (size_t)c->position[token];
    if (c->cache.table) {
        page = (size_t)c->table[page * c->cache.table_pitch + at / PAGE];
        at %= PAGE;
    }
    return (page * c->heads + head) * c->cache.page_tokens + at;
}

/* Assigns a sequence and a position to each token; pages are in random order. */
static void number_tokens(struct check *c)
{
    size_t i = 0;
    for (size_t p = 0; p < c->pages; p++) {
        size_t j = gpu_random(7, p) % (p + 1);
        c->table[p] = c->table[j];
        c->table[j] = (int)p;
    }
    for (int s = 0; s < SEQUENCES; s++)
        for (int j = 0; j < lengths[s]; j++, i++) {
            c->sequence[i] = s;
            c->position[i] = j;
        }
}

static int upload(void **out, struct check *c, struct gpu_buffer *b, const void *data, size_t bytes,
                  struct qt_err *err)
{
    struct qt_gpu *gpu = c->d->gpu;
    int rc = gpu_buffer_need(b, gpu, bytes, err);
    *out = b->data;
    return rc < 0 ? rc : gpu->upload(gpu, b->data, data, bytes, err);
}

static int make_cache(struct check *c, bool paged, struct qt_err *err)
{
    void *table;
    int rc;
    c->pages = paged ? SEQUENCES * CAPACITY / PAGE : SEQUENCES;
    c->rows = SEQUENCES * CAPACITY * c->heads;
    number_tokens(c);
    for (int i = 0; i < ARRAYS; i++) {
        QT_TRY(device_poison(&c->data[i], c->d, &c->memory[i], array_bytes(c, i), err));
        QT_TRY(qt_array_new(&c->got[i], array_bytes(c, i), 1, err));
    }
    QT_TRY(qt_array_new(&c->used, c->rows, sizeof *c->used, err));
    QT_TRY(upload(&table, c, &c->small[0], c->table, sizeof c->table, err));
    c->cache = (struct qtool_kv_cache){.format = QTOOL_KV_INT4,
                                       .heads = c->heads,
                                       .head_dim = c->dim,
                                       .page_tokens = paged ? PAGE : CAPACITY,
                                       .table = paged ? table : NULL,
                                       .table_pitch = CAPACITY / PAGE,
                                       .k = c->data[K],
                                       .v = c->data[V],
                                       .k_param = c->data[K_PARAM],
                                       .v_param = c->data[V_PARAM],
                                       .k_first = c->data[K_FIRST],
                                       .k_tail = c->data[K_TAIL]};
done:
    return rc;
}

/* ---- append --------------------------------------------------------------------------------- */

/* Keys have channels of different size and offset; values differ in magnitude per token. */
static float synthetic_value(const struct check *c, size_t i, bool key)
{
    size_t width = c->heads * c->dim, channel = i % width;
    float u = gpu_random_unit(key ? 11 : 12, i);
    if (key)
        return ldexpf(u, (int)(channel % 5) - 2) + (float)(channel % 7) - 3;
    return ldexpf(u, (int)(gpu_random(13, i / width) % 7) - 3);
}

static int make_input(void **out, struct check *c, struct gpu_buffer *b, float *x, bool key,
                      struct qt_err *err)
{
    size_t count = TOKENS * c->heads * c->dim;
    for (size_t i = 0; i < count; i++) {
        c->input[i] = gpu_from_f32(synthetic_value(c, i, key), c->dtype);
        x[i] = gpu_to_f32(c->input[i], c->dtype);
    }
    return upload(out, c, b, c->input, count * sizeof *c->input, err);
}

/* Rounds the expected keys and values of each sequence in place. */
static int round_expected(struct check *c, struct qt_err *err)
{
    struct qt_kv kv = {.keys = QT_KV_KEYS_CHANNEL};
    const struct qt_linear key = {.layer = 0};
    const size_t width = c->heads * c->dim;
    float *exact = NULL;
    int rc;
    QT_TRY(qt_array_new(&exact, TOKENS * width, sizeof *exact, err));
    for (size_t s = 0, first = 0; s < SEQUENCES; first += (size_t)lengths[s++]) {
        struct qt_attention a = {.seqlen = (size_t)lengths[s],
                                 .heads = c->heads * c->group,
                                 .kv_heads = c->heads,
                                 .head_dim = c->dim};
        QT_TRY(qt_kv_apply(&kv, c->d->cpu, c->k + first * width, c->v + first * width, exact, &key,
                           &key, a.seqlen, &a, err));
    }
done:
    qt_free(exact);
    return rc;
}

/* The calls of append: in the first, sequence 0 has a part of its tokens; in the second it goes on
 * over several groups; then it gets one token at a time. */
enum { FIRST_CALL = 30, ONE_BY_ONE = 3 };

static int append_tokens(struct check *c, const char *k, const char *v, const int *sequence,
                         const int *position, size_t from, size_t to, struct qt_err *err)
{
    const size_t bytes = c->heads * c->dim * 2;
    struct qt_gpu *gpu = c->d->gpu;
    return gpu->kv_append(gpu, &c->cache, k + from * bytes, v + from * bytes, sequence + from,
                          position + from, to - from, c->dtype, false, err);
}

static int append(struct check *c, struct qt_err *err)
{
    const size_t first = (size_t)lengths[0];
    struct qt_gpu *gpu = c->d->gpu;
    void *k, *v, *sequence, *position;
    int rc;
    QT_TRY(make_input(&k, c, &c->k_in, c->k, true, err));
    QT_TRY(make_input(&v, c, &c->v_in, c->v, false, err));
    QT_TRY(upload(&sequence, c, &c->small[1], c->sequence, sizeof c->sequence, err));
    QT_TRY(upload(&position, c, &c->small[2], c->position, sizeof c->position, err));
    QT_TRY(append_tokens(c, k, v, sequence, position, 0, FIRST_CALL, err));
    QT_TRY(append_tokens(c, k, v, sequence, position, FIRST_CALL, first - ONE_BY_ONE, err));
    for (size_t i = first - ONE_BY_ONE; i < first; i++)
        QT_TRY(append_tokens(c, k, v, sequence, position, i, i + 1, err));
    QT_TRY(append_tokens(c, k, v, sequence, position, first, TOKENS, err));
    QT_TRY(round_expected(c, err));
    for (int i = 0; i < ARRAYS; i++) {
        QT_TRY(gpu->download(gpu, c->got[i], c->data[i], array_bytes(c, i), err));
        QT_TRY(device_check_guards(c->d, c->out, c->name, "cache", c->data[i], array_bytes(c, i),
                                   err));
    }
done:
    return rc;
}

static float half_at(const unsigned char *array, size_t i)
{
    uint16_t half;
    memcpy(&half, array + i * sizeof half, sizeof half);
    return qt_f16_to_f32(half);
}

static float code_of(const unsigned char *codes, size_t i)
{
    return (float)(codes[i / 2] >> i % 2 * 4 & 15);
}

static float value_code_of(const struct check *c, size_t row, size_t channel)
{
    const size_t groups = c->dim / QTOOL_KV_CHANNELS, group = channel / QTOOL_KV_CHANNELS;
    const size_t byte = channel % QTOOL_KV_CHANNELS / 2 * groups + group;
    return code_of(c->got[V] + row * c->dim / 2, byte * 2 + channel % 2);
}

/* Index of the parameter of a value in v_param. */
static size_t value_param(const struct check *c, size_t row, size_t channel)
{
    const size_t groups = c->dim / QTOOL_KV_CHANNELS, group = channel / QTOOL_KV_CHANNELS;
    return ((row / 8 * 4 + row % 4) * groups + group) * 2 + row / 4 % 2;
}

static float value_of(const struct check *c, size_t row, size_t channel)
{
    const size_t at = value_param(c, row, channel);
    uint16_t param;
    memcpy(&param, c->got[V_PARAM] + at * sizeof param, sizeof param);
    return (value_code_of(c, row, channel) - (float)(param & 63) / 4) * qt_f16_to_f32(param);
}

static float key_of(const struct check *c, size_t row, size_t channel)
{
    const size_t i = row * c->dim + channel, at = row / QTOOL_KV_GROUP * c->dim + channel;
    const float code = code_of(c->got[K], i / 8 * 8 + i % 8 / 2 + i % 2 * 4);
    uint16_t param;
    memcpy(&param, c->got[K_PARAM] + at * sizeof param, sizeof param);
    const float zero = (float)(param & 63), scale = qt_f16_to_f32(param & 0x7fff);
    return (param & 0x8000 ? code + zero : code - zero) * scale;
}

/* Counts the keys and values of one head of a token that differ from the expected ones. */
static size_t count_wrong(const struct check *c, size_t token, size_t head)
{
    size_t at = cache_row(c, token, head), wrong = 0;
    size_t first = ((size_t)c->sequence[token] * c->heads + head) * c->dim;
    const float *k = c->k + (token * c->heads + head) * c->dim;
    const float *v = c->v + (token * c->heads + head) * c->dim;
    for (size_t i = 0; i < c->dim; i++) {
        const float key =
            c->position[token] == 0 ? half_at(c->got[K_FIRST], first + i) : key_of(c, at, i);
        wrong += (size_t) !(key == k[i]) + (size_t) !(value_of(c, at, i) == v[i]);
    }
    c->used[at] = true;
    return wrong;
}

static bool is_poison(const struct check *c, int array, size_t row)
{
    size_t bytes = array_bytes(c, array) / c->rows;
    const unsigned char *p = c->got[array] + row * bytes;
    for (size_t i = 0; i < bytes; i++)
        if (p[i] != DEVICE_POISON)
            return false;
    return true;
}

static void compare_cache(struct check *c)
{
    size_t wrong = 0, stray = 0;
    for (size_t t = 0; t < TOKENS; t++)
        for (size_t h = 0; h < c->heads; h++)
            wrong += count_wrong(c, t, h);
    for (size_t row = 0; row < c->rows; row++)
        stray += !c->used[row] && !(is_poison(c, K, row) && is_poison(c, V, row));
    if (wrong)
        device_fault(c->out, "%s: %zu of %zu appended values wrong", c->name, wrong,
                     2 * TOKENS * c->heads * c->dim);
    if (stray)
        device_fault(c->out, "%s: append wrote to %zu other rows of the cache", c->name, stray);
}

/* ---- attention ------------------------------------------------------------------------------ */

struct attention_job {
    const struct check *c;
    const uint16_t *out; /* [SEQUENCES][heads * group][dim]; c->input has the queries */
    double scale;
    double error2[SEQUENCES], reference2[SEQUENCES];
};

/* Attention of one query over the tokens [first, first + length), in FP64. */
static int attend(double *y, const struct check *c, const uint16_t *q, size_t first, size_t length,
                  size_t head, double scale, struct qt_err *err)
{
    double *p = NULL, max = -INFINITY, sum = 0;
    int rc = qt_array_new(&p, length, sizeof *p, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < length; i++) {
        const float *k = c->k + ((first + i) * c->heads + head) * c->dim;
        for (size_t d = 0; d < c->dim; d++)
            p[i] += scale * (double)gpu_to_f32(q[d], c->dtype) * (double)k[d];
        max = fmax(max, p[i]);
    }
    memset(y, 0, c->dim * sizeof *y);
    for (size_t i = 0; i < length; i++) {
        const float *v = c->v + ((first + i) * c->heads + head) * c->dim;
        double weight = exp(p[i] - max);
        sum += weight;
        for (size_t d = 0; d < c->dim; d++)
            y[d] += weight * (double)v[d];
    }
    for (size_t d = 0; d < c->dim; d++)
        y[d] /= sum;
    qt_free(p);
    return rc;
}

static int compare_sequence(void *ctx, size_t s, int thread, struct qt_err *err)
{
    struct attention_job *job = ctx;
    const struct check *c = job->c;
    size_t first = 0;
    double *y = NULL;
    int rc;
    (void)thread;
    QT_TRY(qt_array_new(&y, c->dim, sizeof *y, err));
    for (size_t i = 0; i < s; i++)
        first += (size_t)lengths[i];
    for (size_t h = 0; h < c->heads * c->group; h++) {
        size_t at = (s * c->heads * c->group + h) * c->dim;
        QT_TRY(
            attend(y, c, c->input + at, first, (size_t)lengths[s], h / c->group, job->scale, err));
        for (size_t d = 0; d < c->dim; d++) {
            double e = (double)gpu_to_f32(job->out[at + d], c->dtype) - y[d];
            job->error2[s] += e * e;
            job->reference2[s] += y[d] * y[d];
        }
    }
done:
    qt_free(y);
    return rc;
}

static int compare_attention(struct check *c, double scale, struct qt_err *err)
{
    struct attention_job job = {.c = c, .out = c->d->first, .scale = scale};
    double error = 0;
    char text[32];
    int rc = qt_parallel(SEQUENCES, compare_sequence, &job, err);
    /* The maximum over sequences: outputs of short sequences are means of few values, so they are
     * larger and would hide errors of a long sequence in one common norm. */
    for (size_t s = 0; s < SEQUENCES; s++) {
        double e = sqrt(job.error2[s] / (job.reference2[s] > 0 ? job.reference2[s] : 1));
        if (isnan(e) || e > error)
            error = e;
    }
    if (!(error <= MAX_ERROR[c->dtype]))
        device_fault(c->out, "%s: attention has relative error %s, limit %g", c->name,
                     device_value_text(text, error), MAX_ERROR[c->dtype]);
    device_max_error(&c->out->error[c->dtype], error);
    return rc;
}

static int guarded_run(struct check *c, uint16_t *y, const struct qtool_kv_plan *plan,
                       const void *q, const int *length, size_t count, struct qt_err *err)
{
    struct device *d = c->d;
    char *dy, *workspace;
    int rc;
    QT_TRY(device_poison(&dy, d, &d->y, count * 2, err));
    QT_TRY(device_workspace(&workspace, d, plan->workspace_bytes, err));
    QT_TRY(d->gpu->kv_run(d->gpu, plan, &c->cache, dy, q, length, workspace, err));
    QT_TRY(d->gpu->download(d->gpu, y, dy, count * 2, err));
    QT_TRY(device_check_guards(d, c->out, c->name, "output", dy, count * 2, err));
    QT_TRY(device_check_workspace(d, c->out, c->name, workspace, plan->workspace_bytes, err));
done:
    return rc;
}

/* Scaled so that all channels contribute alike to the scores, which spread over about 1: softmax is
 * then neither flat nor a single peak. */
static float synthetic_query(const struct check *c, size_t i)
{
    size_t head = i / c->dim % (c->heads * c->group) / c->group;
    size_t channel = head * c->dim + i % c->dim;
    return ldexpf(gpu_random_unit(14, i), 2 - (int)(channel % 5));
}

static int check_attention(struct check *c, const struct qtool_kv_plan *plan, struct qt_err *err)
{
    size_t count = SEQUENCES * c->heads * c->group * c->dim;
    struct device *d = c->d;
    void *q, *length;
    int rc;
    for (size_t i = 0; i < count; i++)
        c->input[i] = gpu_from_f32(synthetic_query(c, i), c->dtype);
    QT_TRY(qt_array_grow(&d->first, &d->first_capacity, count, sizeof *d->first, err));
    QT_TRY(qt_array_grow(&d->second, &d->second_capacity, count, sizeof *d->second, err));
    QT_TRY(upload(&q, c, &c->q, c->input, count * sizeof *c->input, err));
    QT_TRY(upload(&length, c, &c->small[1], lengths, sizeof lengths, err));
    QT_TRY(guarded_run(c, d->first, plan, q, length, count, err));
    QT_TRY(guarded_run(c, d->second, plan, q, length, count, err));
    c->out->runs++;
    if (memcmp(d->first, d->second, count * 2) != 0)
        device_fault(c->out, "%s: two runs gave different bits", c->name);
    QT_TRY(compare_attention(c, (double)plan->options.scale, err));
done:
    return rc;
}

/* ---- checker -------------------------------------------------------------------------------- */

static int check_case(struct check *c, bool paged, struct qt_err *err)
{
    size_t count = TOKENS * c->heads * c->dim, queries = SEQUENCES * c->heads * c->group * c->dim;
    const struct qtool_kv_options opt = {.batch = SEQUENCES,
                                         .heads = c->heads * c->group,
                                         .max_length = (size_t)lengths[0],
                                         .scale = 1 / sqrtf((float)c->dim),
                                         .dtype = c->dtype,
                                         .device = c->d->gpu->device};
    struct qtool_kv_plan plan;
    int rc;
    QT_TRY(qt_array_new(&c->k, count, sizeof *c->k, err));
    QT_TRY(qt_array_new(&c->v, count, sizeof *c->v, err));
    QT_TRY(qt_array_new(&c->input, count > queries ? count : queries, sizeof *c->input, err));
    QT_TRY(make_cache(c, paged, err));
    QT_TRY(c->d->gpu->kv_plan(c->d->gpu, &plan, &c->cache, &opt, 0, err));
    QT_TRY(append(c, err));
    compare_cache(c);
    QT_TRY(check_attention(c, &plan, err));
done:
    return rc;
}

static void check_free(struct check *c)
{
    struct qt_gpu *gpu = c->d->gpu;
    for (int i = 0; i < ARRAYS; i++) {
        gpu_buffer_free(&c->memory[i], gpu);
        qt_free(c->got[i]);
    }
    for (size_t i = 0; i < sizeof c->small / sizeof *c->small; i++)
        gpu_buffer_free(&c->small[i], gpu);
    gpu_buffer_free(&c->k_in, gpu);
    gpu_buffer_free(&c->v_in, gpu);
    gpu_buffer_free(&c->q, gpu);
    qt_free(c->used);
    qt_free(c->k);
    qt_free(c->v);
    qt_free(c->input);
}

int device_cache(struct qt_device_tensor *t, struct device *d, enum qt_kv_keys keys,
                 const struct qt_model_info *model, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0; i < QT_DEVICE_TIMES; i++)
        t->us[i] = t->cublas_us[i] = NAN;
    if (keys != QT_KV_KEYS_CHANNEL)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                       "the kernels take keys with scales per channel and group of tokens "
                       "(--kv-keys channel), these have %s scales",
                       qt_kv_keys_names[keys - QT_KV_KEYS_CHANNEL]);
    for (size_t i = 0; rc == QT_OK && i < sizeof cases / sizeof *cases; i++) {
        struct check c = {.d = d,
                          .out = t,
                          .name = cases[i].name,
                          .dtype = cases[i].dtype,
                          .heads = model->kv_heads,
                          .group = model->heads / model->kv_heads,
                          .dim = model->head_dim};
        rc = check_case(&c, cases[i].paged, err);
        check_free(&c);
    }
    return rc;
}
