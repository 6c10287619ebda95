/*
 * The 4-bit KV cache against plain C: what append writes, bit for bit, and attention against FP64
 * over the decoded cache. Tokens come in calls of random sizes. Paged and contiguous caches,
 * different lengths per sequence, edges of all tiles and splits. The memory around outputs is NaN.
 * Every run is made twice and must repeat bit for bit.
 *
 * usage: test_kv4 [SEED [quick]]     prints "N passed, M failed, K skipped"
 */
#include "kernels/cuda/kv4/plan.h"
#include "tests/gpu/check.h"

#include <math.h>

enum { GUARD = 64 };

/* ---- caches --------------------------------------------------------------------------------- */

struct test_case {
    enum qtool_kv_format format;
    size_t dim, heads, group, batch, max_length;
    size_t page; /* tokens; 0: contiguous */
    int bf16;
};

struct cache {
    struct qtool_kv_cache c; /* device */
    size_t pages, tokens;
    int *table, *length, *sequence, *position; /* host; the latter two [tokens] */
    uint16_t *k, *v;                           /* appended values, [tokens][heads][dim] */
    uint8_t *got_k, *got_v;                    /* copies of the device arrays */
    uint16_t *got_k_param, *got_v_param, *got_k_first;
};

/* Returns the row of a token and head in the cache. */
static size_t place(const struct cache *c, size_t sequence, size_t token, size_t head)
{
    size_t page = sequence, inside = token;
    if (c->table) {
        page = (size_t)c->table[sequence * c->c.table_pitch + token / c->c.page_tokens];
        inside = token % c->c.page_tokens;
    }
    return (page * c->c.heads + head) * c->c.page_tokens + inside;
}

/* Gives the sequences random pages. */
static void make_table(struct cache *c, const struct test_case *t)
{
    size_t per = (t->max_length - 1) / t->page + 1;
    c->pages = per * t->batch + 3;
    c->c.table_pitch = per + 1;
    c->table = calloc(t->batch * c->c.table_pitch, sizeof(int));
    int *order = malloc(c->pages * sizeof(int));
    for (size_t i = 0; i < c->pages; i++) {
        size_t j = random_below(i + 1);
        order[i] = order[j];
        order[j] = (int)i;
    }
    for (size_t b = 0; b < t->batch; b++)
        for (size_t i = 0; i < per; i++)
            c->table[b * c->c.table_pitch + i] = order[b * per + i];
    free(order);
    c->c.table = upload(c->table, t->batch * c->c.table_pitch * sizeof(int));
}

static void make_tokens(struct cache *c, const struct test_case *t)
{
    c->length = malloc(t->batch * sizeof(int));
    for (size_t b = 0; b < t->batch; b++) {
        c->length[b] = b == 0                      ? (int)t->max_length
                       : b == 2 && random_below(2) ? 0
                                                   : (int)random_below(t->max_length + 1);
        c->tokens += (size_t)c->length[b];
    }
    c->sequence = malloc(c->tokens * sizeof(int));
    c->position = malloc(c->tokens * sizeof(int));
    for (size_t b = 0, i = 0; b < t->batch; b++)
        for (int j = 0; j < c->length[b]; j++, i++) {
            c->sequence[i] = (int)b;
            c->position[i] = j;
        }
}

/* Channels of keys have different scales and offsets, and the keys of token 0 are larger; values
 * have a different scale per token. */
static void make_values(struct cache *c, const struct test_case *t)
{
    size_t width = t->heads * t->dim;
    float *scale = malloc(width * sizeof *scale), *offset = malloc(width * sizeof *offset);
    for (size_t i = 0; i < width; i++) {
        scale[i] = 1.6f + 1.2f * random_float();
        offset[i] = 1.6f * random_float();
    }
    c->k = malloc(c->tokens * width * 2);
    c->v = malloc(c->tokens * width * 2);
    for (size_t i = 0; i < c->tokens; i++) {
        float size = exp2f(4 * random_float()), constant = random_below(50) == 0;
        if (t->bf16 && random_below(50) == 0)
            size = 1e6f; /* beyond FP16: append clamps it */
        for (size_t j = 0; j < width; j++) {
            float k = scale[j] * random_float() + offset[j];
            c->k[i * width + j] = from_float(c->position[i] ? k : 5 * k, t->bf16);
            c->v[i * width + j] = from_float(constant ? size : size * random_float(), t->bf16);
        }
    }
    free(scale);
    free(offset);
}

/* Appends the tokens with the given indices. */
static int append_tokens(struct cache *c, const struct test_case *t, const size_t *index, size_t n)
{
    size_t row = t->heads * t->dim * 2;
    char *x[2] = {malloc(n * row), malloc(n * row)};
    int *number[2] = {malloc(n * sizeof(int)), malloc(n * sizeof(int))};
    for (size_t i = 0; i < n; i++) {
        memcpy(x[0] + i * row, (const char *)c->k + index[i] * row, row);
        memcpy(x[1] + i * row, (const char *)c->v + index[i] * row, row);
        number[0][i] = c->sequence[index[i]];
        number[1][i] = c->position[index[i]];
    }
    void *k = upload(x[0], n * row), *v = upload(x[1], n * row);
    void *sequence = upload(number[0], n * sizeof(int));
    void *position = upload(number[1], n * sizeof(int));
    int rc = qtool_kv_append(&c->c, k, v, sequence, position, n, t->bf16 ? QTOOL_BF16 : QTOOL_F16,
                             qtool_kernels_compute(0) == 90, NULL);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    void *device[] = {k, v, sequence, position}, *host[] = {x[0], x[1], number[0], number[1]};
    for (int i = 0; i < 4; i++) {
        CHECK(cudaFree(device[i]));
        free(host[i]);
    }
    return rc;
}

/* Appends all tokens in up to `calls` calls with parts of random sizes of the sequences. */
static int append(struct cache *c, const struct test_case *t, int calls)
{
    static const size_t sizes[] = {0, 1, 1, 2, 62, 63, 64, 65, 130, 300};
    size_t *index = malloc(c->tokens * sizeof *index), *done = calloc(t->batch, sizeof *done);
    int rc = QTOOL_OK;
    for (int call = 0; call < calls; call++) {
        size_t n = 0, first = 0;
        for (size_t b = 0; b < t->batch; first += (size_t)c->length[b++]) {
            size_t left = (size_t)c->length[b] - done[b], size = sizes[random_below(10)];
            size = call == calls - 1 || size > left ? left : size;
            while (size--)
                index[n++] = first + done[b]++;
        }
        if (rc == QTOOL_OK)
            rc = append_tokens(c, t, index, n);
    }
    free(index);
    free(done);
    return rc;
}

static void *poisoned(size_t bytes)
{
    void *p = gpu_alloc(bytes);
    CHECK(cudaMemset(p, 0xff, bytes));
    return p;
}

static void cache_new(struct cache *c, const struct test_case *t)
{
    memset(c, 0, sizeof *c);
    c->c = (struct qtool_kv_cache){.format = t->format, .heads = t->heads, .head_dim = t->dim};
    c->pages = t->batch;
    c->c.page_tokens = t->page ? t->page : (t->max_length + 63) / 64 * 64;
    if (t->page)
        make_table(c, t);
    make_tokens(c, t);
    make_values(c, t);
    size_t rows = c->pages * t->heads * c->c.page_tokens;
    size_t bytes = rows * t->dim * 2 / (t->format == QTOOL_KV_INT4 ? 4 : 1);
    size_t k_param = rows / QTOOL_KV_GROUP * t->dim * 2;
    c->c.k = poisoned(bytes);
    c->c.v = poisoned(bytes);
    c->c.v_param = poisoned(rows * t->dim / 8);
    c->c.k_param = poisoned(k_param);
    c->c.k_first = poisoned(t->batch * t->heads * t->dim * 2);
    c->c.k_tail = poisoned(t->batch * t->heads * QTOOL_KV_GROUP * t->dim * 2);
    result(append(c, t, 1 + (int)random_below(12)) == QTOOL_OK, "append");
    c->got_k = download(c->c.k, bytes);
    c->got_v = download(c->c.v, bytes);
    c->got_k_param = download(c->c.k_param, k_param);
    c->got_v_param = download(c->c.v_param, rows * t->dim / 8);
    c->got_k_first = download(c->c.k_first, t->batch * t->heads * t->dim * 2);
}

static void cache_free(struct cache *c)
{
    CHECK(cudaFree(c->c.k));
    CHECK(cudaFree(c->c.v));
    CHECK(cudaFree(c->c.v_param));
    CHECK(cudaFree(c->c.k_param));
    CHECK(cudaFree(c->c.k_first));
    CHECK(cudaFree(c->c.k_tail));
    CHECK(cudaFree((void *)c->c.table));
    void *host[] = {c->table, c->length, c->sequence,    c->position,    c->k,          c->v,
                    c->got_k, c->got_v,  c->got_k_param, c->got_v_param, c->got_k_first};
    for (size_t i = 0; i < sizeof host / sizeof *host; i++)
        free(host[i]);
}

/* ---- reference ------------------------------------------------------------------------------ */

static unsigned code_of(float v)
{
    return (unsigned)fminf(fmaxf(rintf(v), 0), 15);
}

static unsigned nibble(const uint8_t *codes, size_t i)
{
    return codes[i / 2] >> i % 2 * 4 & 15;
}

/* Clamps x to the range of FP16. */
static float clamped(float x)
{
    return fminf(fmaxf(x, -65504), 65504);
}

/* Key code of a channel; they are in another order than those of values. */
static unsigned key_nibble(const uint8_t *codes, size_t i)
{
    return nibble(codes, i / 8 * 8 + i % 8 / 2 + i % 2 * 4);
}

/* Value code of a channel: byte i of a group of channels is followed by byte i of the next. */
static unsigned value_nibble(const uint8_t *codes, size_t dim, size_t i)
{
    return codes[i % 16 / 2 * (dim / 16) + i / 16] >> i % 2 * 4 & 15;
}

/* Index of the parameter of a value: tokens t and t + 4 of eight are adjacent. */
static size_t value_param(size_t dim, size_t row, size_t i)
{
    return row / 8 * (dim / 2) + row % 4 * (dim / 8) + i / 16 * 2 + row % 8 / 4;
}

/* Returns the number that append quantizes for this element of a key. */
static float key_number(uint16_t x, int bf16)
{
    return qt_f16_to_f32(qt_f32_to_f16(clamped(to_float(x, bf16))));
}

/* The zero-point of keys around `middle` with a scale. */
static int key_zero(float middle, uint16_t scale)
{
    return (int)fminf(fmaxf(rintf(7.5f - middle * (1 / qt_f16_to_f32(scale))), -63), 63);
}

/* The parameter of n keys at distance `stride`. */
static uint16_t key_param_of(const uint16_t *x, size_t n, size_t stride, int bf16)
{
    float low = INFINITY, high = -INFINITY;
    for (size_t i = 0; i < n; i++) {
        float v = key_number(x[i * stride], bf16);
        low = fminf(low, v);
        high = fmaxf(high, v);
    }
    const float middle = (low + high) / 2, least = fabsf(middle) * (9.f / 32);
    uint16_t want = qt_f32_to_f16((high - low > least ? high - low : least) / 15);
    want = want < 96 ? 96 : want;
    const int zero = abs(key_zero(middle, want));
    int base = 0; /* the nearest of the three next to want */
    for (int b = want / 64 * 64 - 64; b <= want / 64 * 64 + 64; b += 64)
        base = abs(b + zero - want) <= abs(base + zero - want) ? b : base;
    const int end = key_zero(middle, (uint16_t)(base + zero));
    return (uint16_t)(base + abs(end) + (end < 0 ? 0x8000 : 0));
}

static float key_scale(uint16_t param)
{
    return fabsf(qt_f16_to_f32(param));
}

static float key_zero_of(uint16_t param)
{
    return copysignf((float)(param % 64), qt_f16_to_f32(param));
}

static unsigned key_code(uint16_t param, uint16_t x, int bf16)
{
    return code_of(key_number(x, bf16) * (1 / key_scale(param)) + key_zero_of(param));
}

/* The parameter of 16 channels: of all FP16 numbers that end in the zero-point, the nearest one. */
static uint16_t value_param_of(const uint16_t *x, int bf16)
{
    float low = 0, high = 0;
    for (size_t i = 0; i < 16; i++) {
        low = fminf(low, clamped(to_float(x[i], bf16)));
        high = fmaxf(high, clamped(to_float(x[i], bf16)));
    }
    const int zero = high > low ? (int)rintf(low * -60 / (high - low)) : 0;
    const int want = qt_f32_to_f16((high - low) / 15);
    int best = zero;
    for (int p = zero; p < 0x7c00; p += 64)
        best = abs(p - want) <= abs(best - want) ? p : best;
    return (uint16_t)(best ? best : 0x3c00);
}

static unsigned value_code(uint16_t param, uint16_t x, int bf16)
{
    float per = 1 / qt_f16_to_f32(param);
    return code_of(clamped(to_float(x, bf16)) * per + (float)(param % 64) / 4);
}

/* Keys of the head of token i that differ. Token 0 is apart; all tokens of a group have its
 * parameters. */
static size_t count_wrong_keys(const struct cache *c, const struct test_case *t, size_t i, size_t h,
                               size_t at)
{
    size_t position = (size_t)c->position[i], width = t->heads * t->dim, wrong = 0;
    size_t length = (size_t)c->length[c->sequence[i]];
    size_t begin = position < 64 ? 1 : position / 64 * 64, end = position / 64 * 64 + 64;
    size_t n = (end < length ? end : length) - begin;
    for (size_t d = 0; d < t->dim && position == 0; d++) {
        const uint16_t *got = c->got_k_first + ((size_t)c->sequence[i] * t->heads + h) * t->dim;
        wrong +=
            got[d] != qt_f32_to_f16(clamped(to_float(c->k[i * width + h * t->dim + d], t->bf16)));
    }
    if (position == 0)
        return wrong;
    for (size_t d = 0; d < t->dim; d++) {
        const uint16_t *first = c->k + (i - (position - begin)) * width + h * t->dim + d;
        const uint16_t param = key_param_of(first, n, width, t->bf16);
        wrong += param != c->got_k_param[at / 64 * t->dim + d];
        wrong += key_nibble(c->got_k, at * t->dim + d) !=
                 key_code(param, first[(position - begin) * width], t->bf16);
    }
    return wrong;
}

/* Returns the number of cache values that differ from the reference. */
static size_t count_wrong(const struct cache *c, const struct test_case *t)
{
    size_t wrong = 0;
    for (size_t i = 0; i < c->tokens; i++)
        for (size_t h = 0; h < t->heads; h++) {
            size_t at = place(c, (size_t)c->sequence[i], (size_t)c->position[i], h);
            const uint16_t *k = c->k + (i * t->heads + h) * t->dim;
            const uint16_t *v = c->v + (i * t->heads + h) * t->dim;
            const uint8_t *codes = c->got_v + at * t->dim / 2;
            if (t->format == QTOOL_KV_F16) {
                for (size_t d = 0; d < t->dim; d++) {
                    uint16_t want_k = qt_f32_to_f16(clamped(to_float(k[d], t->bf16)));
                    uint16_t want_v = qt_f32_to_f16(clamped(to_float(v[d], t->bf16)));
                    wrong += ((const uint16_t *)c->got_k)[at * t->dim + d] != want_k;
                    wrong += ((const uint16_t *)c->got_v)[at * t->dim + d] != want_v;
                }
                continue;
            }
            wrong += count_wrong_keys(c, t, i, h, at);
            for (size_t d = 0; d < t->dim; d++) {
                const uint16_t param = value_param_of(v + d / 16 * 16, t->bf16);
                wrong += c->got_v_param[value_param(t->dim, at, d)] != param;
                wrong += value_nibble(codes, t->dim, d) != value_code(param, v[d], t->bf16);
            }
        }
    return wrong;
}

/* first: the keys of token 0, NULL for other tokens and for values. */
static double decoded(const struct cache *c, const struct test_case *t, const uint16_t *first,
                      bool key, size_t at, size_t d)
{
    if (t->format == QTOOL_KV_F16)
        return qt_f16_to_f32(((const uint16_t *)(key ? c->got_k : c->got_v))[at * t->dim + d]);
    if (first)
        return qt_f16_to_f32(first[d]);
    const uint16_t param =
        key ? c->got_k_param[at / 64 * t->dim + d] : c->got_v_param[value_param(t->dim, at, d)];
    if (key)
        return (key_nibble(c->got_k, at * t->dim + d) - (double)key_zero_of(param)) *
               key_scale(param);
    const unsigned code = value_nibble(c->got_v + at * t->dim / 2, t->dim, d);
    return (code - param % 64 / 4.0) * qt_f16_to_f32(param);
}

/* Computes out[dim] of a sequence and query head, and size[dim], the same with the magnitudes of
 * the values. FP16 errors are proportional to size; out is smaller where values cancel. */
static void reference(double *out, double *size, const struct cache *c, const struct test_case *t,
                      size_t sequence, size_t head, const double *q, double scale)
{
    size_t length = (size_t)c->length[sequence], kv = head / t->group;
    const uint16_t *first = c->got_k_first + (sequence * t->heads + kv) * t->dim;
    double *s = malloc((length + 1) * sizeof *s), most = -INFINITY, sum = 0;
    for (size_t i = 0; i < length; i++) {
        size_t at = place(c, sequence, i, kv);
        s[i] = 0;
        for (size_t d = 0; d < t->dim; d++)
            s[i] += q[d] * decoded(c, t, i ? NULL : first, true, at, d) * scale;
        most = fmax(most, s[i]);
    }
    memset(out, 0, t->dim * sizeof *out);
    memset(size, 0, t->dim * sizeof *size);
    for (size_t i = 0; i < length; i++) {
        double p = exp(s[i] - most);
        size_t at = place(c, sequence, i, kv);
        sum += p;
        for (size_t d = 0; d < t->dim; d++) {
            const double v = decoded(c, t, NULL, false, at, d);
            out[d] += p * v;
            size[d] += p * fabs(v);
        }
    }
    for (size_t d = 0; d < t->dim && length; d++) {
        out[d] /= sum;
        size[d] /= sum;
    }
    free(s);
}

/* Relative errors: of all outputs of a run, and the largest of a row, relative to the size of its
 * values. */
struct errors {
    double all, row;
};

static struct errors worst[2];
static int counted; /* cases that also ran with counted arrivals */

static struct errors relative_errors(const struct cache *c, const struct test_case *t,
                                     const uint16_t *out, const uint16_t *q, double scale)
{
    size_t rows = t->batch * t->heads * t->group;
    double difference = 0, size = 0, most = 0;
#pragma omp parallel for reduction(+ : difference, size) reduction(max : most)
    for (size_t r = 0; r < rows; r++) {
        double want[128], sizes[128], query[128], of_row[2] = {0};
        for (size_t d = 0; d < t->dim; d++)
            query[d] = to_float(q[r * t->dim + d], t->bf16);
        reference(want, sizes, c, t, r / (t->heads * t->group), r % (t->heads * t->group), query,
                  scale);
        for (size_t d = 0; d < t->dim; d++) {
            double e = to_float(out[r * t->dim + d], t->bf16) - want[d];
            of_row[0] += e * e;
            of_row[1] += sizes[d] * sizes[d];
            size += want[d] * want[d];
        }
        difference += of_row[0];
        double e = of_row[0] > 0 ? sqrt(of_row[0] / of_row[1]) : 0;
        most = fmax(most, isnan(of_row[0]) ? INFINITY : e);
    }
    double e = sqrt(difference / size);
    return (struct errors){isnan(e) ? INFINITY : e, most};
}

/* ---- cases ---------------------------------------------------------------------------------- */

static bool guarded_run(uint16_t *out, const struct qtool_kv_plan *p,
                        const struct qtool_kv_cache *c, const void *q, const int *length,
                        size_t count)
{
    uint16_t *d = gpu_alloc((count + 2 * GUARD) * 2), guards[2 * GUARD];
    CHECK(cudaMemset(d, 0xff, (count + 2 * GUARD) * 2));
    void *space = workspace_of(p->workspace_bytes);
    int rc = qtool_kv_attention_run(p, c, d + GUARD, q, length, space, NULL);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(guards, d, GUARD * 2, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(guards + GUARD, d + GUARD + count, GUARD * 2, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(out, d + GUARD, count * 2, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(d));
    for (int i = 0; i < 2 * GUARD; i++)
        if (guards[i] != 0xffff)
            return false;
    return rc == QTOOL_OK && workspace_kept(p->workspace_bytes);
}

static struct qtool_kv_options options_of(const struct test_case *t)
{
    return (struct qtool_kv_options){.batch = t->batch,
                                     .heads = t->heads * t->group,
                                     .max_length = t->max_length,
                                     .scale = 1 / sqrtf((float)t->dim),
                                     .dtype = t->bf16 ? QTOOL_BF16 : QTOOL_F16};
}

/* q_size: large values give a softmax with a sharp peak, small ones nearly equal probabilities. */
static void check_attention(const struct cache *c, const struct test_case *t, size_t split_tokens,
                            float q_size)
{
    size_t count = t->batch * t->heads * t->group * t->dim;
    uint16_t *q = malloc(count * 2), *out[2] = {malloc(count * 2), malloc(count * 2)};
    for (size_t i = 0; i < count; i++)
        q[i] = from_float(q_size * random_float(), t->bf16);
    if (random_below(3) == 0) /* the output for a query of zeros is the mean of the values */
        memset(q, 0, t->dim * 2);
    void *device_q = upload(q, count * 2), *length = upload(c->length, t->batch * sizeof(int));
    const struct qtool_kv_options opt = options_of(t);
    struct qtool_kv_plan plan;
    char what[320];
    int rc = qtool_kv_attention_plan(&plan, &c->c, &opt, split_tokens);
    bool ran = rc == QTOOL_OK && plan.workspace_bytes <= workspace.bytes;
    for (int i = 0; i < 2 && ran; i++)
        ran = guarded_run(out[i], &plan, &c->c, device_q, length, count);
    bool equal = memcmp(out[0], out[1], count * 2) == 0;
    if (ran && qt_kv_state(&plan)->polled && plan.splits > 1) { /* again, with counted arrivals */
        struct qtool_kv_plan other = plan;
        qt_kv_state(&other)->polled = 0;
        other.workspace_bytes += t->batch * opt.heads * plan.splits * (t->dim + 4) * sizeof(float);
        ran = guarded_run(out[1], &other, &c->c, device_q, length, count);
        equal = equal && memcmp(out[0], out[1], count * 2) == 0;
        counted++;
    }
    struct errors e = {INFINITY, INFINITY};
    if (ran)
        e = relative_errors(c, t, out[0], q, (double)opt.scale);
    snprintf(what, sizeof what,
             "%s dim %zu heads %zu x %zu batch %zu length %zu page %zu %s split %zu q %g: "
             "error %.3g, of a row %.3g%s%s %s",
             t->format == QTOOL_KV_INT4 ? "int4" : "f16", t->dim, t->heads, t->group, t->batch,
             t->max_length, t->page, t->bf16 ? "bf16" : "f16", plan.split_tokens, q_size, e.all,
             e.row, ran ? "" : " DID NOT RUN OR GUARDS", equal ? "" : " NOT REPEATABLE",
             plan.reason);
    if (ran) {
        worst[t->bf16].all = worse(worst[t->bf16].all, e.all);
        worst[t->bf16].row = worse(worst[t->bf16].row, e.row);
    }
    /* 4-bit keys: FP16 products of queries and scales move scores by up to 2^-12 of their terms. */
    double limit = t->bf16 ? 3e-3 : 1.5e-3, row = 2 * limit;
    if (q_size > 1) {
        limit *= t->format == QTOOL_KV_INT4 ? 8 : 2;
        row *= t->format == QTOOL_KV_INT4 ? 8 : 2;
    }
    result(ran && equal && e.all <= limit && e.row <= row, what);
    CHECK(cudaFree(device_q));
    CHECK(cudaFree(length));
    free(q);
    free(out[0]);
    free(out[1]);
}

static void check_case(const struct test_case *t)
{
    struct cache c;
    char what[160];
    cache_new(&c, t);
    size_t wrong = count_wrong(&c, t);
    snprintf(what, sizeof what,
             "append dim %zu heads %zu batch %zu length %zu page %zu %s: %zu wrong", t->dim,
             t->heads, t->batch, t->max_length, t->page, t->bf16 ? "bf16" : "f16", wrong);
    result(wrong == 0, what);
    check_attention(&c, t, 0, 1);
    check_attention(&c, t, 128, 20);
    check_attention(&c, t, 128 * (1 + random_below(8)), 0.02f);
    cache_free(&c);
}

/* Appends new last tokens, then runs attention as a dependent launch, which starts before append
 * has finished, and again as a plain launch. Nothing between the launches makes one wait for
 * another. Returns true if both results are equal. */
static bool same_behind_append(const struct cache *c, const struct test_case *t,
                               size_t split_tokens, const void *q, const int *length, const void *k,
                               const void *v, const int *sequence, const int *position,
                               size_t tokens)
{
    struct qtool_kv_options opt = options_of(t);
    size_t bytes = t->batch * opt.heads * t->dim * 2;
    struct qtool_kv_plan plan[2];
    void *device_out[2];
    char *out[2];
    bool ran = true;
    for (int i = 0; i < 2; i++) {
        opt.dependent_launch = i == 0;
        device_out[i] = gpu_alloc(bytes);
        out[i] = malloc(bytes);
        CHECK(cudaMemset(device_out[i], 0xff, bytes));
        ran = ran && qtool_kv_attention_plan(&plan[i], &c->c, &opt, split_tokens) == QTOOL_OK;
    }
    CHECK(cudaDeviceSynchronize());
    ran = ran &&
          qtool_kv_append(&c->c, k, v, sequence, position, tokens, opt.dtype, 0, NULL) == QTOOL_OK;
    for (int i = 0; i < 2 && ran; i++)
        ran = qtool_kv_attention_run(&plan[i], &c->c, device_out[i], q, length, workspace.at,
                                     NULL) == QTOOL_OK;
    CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < 2; i++) {
        CHECK(cudaMemcpy(out[i], device_out[i], bytes, cudaMemcpyDeviceToHost));
        CHECK(cudaFree(device_out[i]));
    }
    ran = ran && memcmp(out[0], out[1], bytes) == 0;
    free(out[0]);
    free(out[1]);
    return ran;
}

static void check_dependent(const struct test_case *t, size_t split_tokens)
{
    struct cache c;
    size_t row = t->heads * t->dim, bytes = t->batch * row * t->group * 2, tokens = 0;
    uint16_t *x = malloc(bytes);
    int *sequence = malloc(t->batch * sizeof(int)), *position = malloc(t->batch * sizeof(int));
    char what[160];
    cache_new(&c, t);
    for (size_t b = 0; b < t->batch; b++)
        if (c.length[b]) {
            sequence[tokens] = (int)b;
            position[tokens++] = c.length[b] - 1;
        }
    int *device_sequence = upload(sequence, t->batch * sizeof(int));
    int *device_position = upload(position, t->batch * sizeof(int));
    int *length = upload(c.length, t->batch * sizeof(int));
    int wrong = 0;
    for (int round = 0; round < 10; round++) {
        void *device[3]; /* q, k, v */
        for (int i = 0; i < 3; i++) {
            for (size_t j = 0; j < bytes / 2; j++)
                x[j] = from_float(4 * random_float(), t->bf16);
            device[i] = upload(x, bytes);
        }
        wrong += !same_behind_append(&c, t, split_tokens, device[0], length, device[1], device[2],
                                     device_sequence, device_position, tokens);
        for (int i = 0; i < 3; i++)
            CHECK(cudaFree(device[i]));
    }
    snprintf(what, sizeof what, "dependent launch dim %zu batch %zu length %zu split %zu: %d wrong",
             t->dim, t->batch, t->max_length, split_tokens, wrong);
    result(wrong == 0, what);
    CHECK(cudaFree(device_sequence));
    CHECK(cudaFree(device_position));
    CHECK(cudaFree(length));
    free(sequence);
    free(position);
    free(x);
    cache_free(&c);
}

static void test_refusals(void)
{
    struct test_case t = {QTOOL_KV_INT4, 64, 2, 4, 1, 40, 0, 0};
    struct cache c;
    struct qtool_kv_plan p;
    struct qtool_kv_options o = {.batch = 1, .heads = 8, .max_length = 40, .scale = 1};
    cache_new(&c, &t);
    result(qtool_kv_attention_plan(&p, &c.c, &o, 0) == QTOOL_OK, "plan");
    result(qtool_kv_attention_plan(&p, &c.c, &o, 100) == QTOOL_UNSUPPORTED, "split of 100");
    o.heads = 7;
    result(qtool_kv_attention_plan(&p, &c.c, &o, 0) == QTOOL_UNSUPPORTED && p.reason[0], "heads");
    o.heads = 8;
    o.max_length = 65;
    result(qtool_kv_attention_plan(&p, &c.c, &o, 0) == QTOOL_UNSUPPORTED && p.reason[0], "length");
    o.max_length = 40;
    struct qtool_kv_cache bad = c.c;
    bad.head_dim = 96;
    result(qtool_kv_attention_plan(&p, &bad, &o, 0) == QTOOL_UNSUPPORTED && p.reason[0], "dim");
    bad = c.c;
    bad.page_tokens = 144;
    result(qtool_kv_attention_plan(&p, &bad, &o, 0) == QTOOL_UNSUPPORTED && p.reason[0], "page");
    bad = c.c;
    bad.k_param = (char *)c.c.k_param + 8;
    result(qtool_kv_attention_plan(&p, &bad, &o, 0) == QTOOL_UNSUPPORTED && p.reason[0], "k_param");
    bad.k_param = NULL;
    result(qtool_kv_attention_plan(&p, &bad, &o, 0) == QTOOL_UNSUPPORTED && p.reason[0],
           "no k_param");
    cache_free(&c);
}

/* Pages of 4-bit caches hold whole groups. */
static size_t page_for(enum qtool_kv_format format, size_t page)
{
    return format == QTOOL_KV_INT4 && page && page < 64 ? 4 * page : page;
}

int main(int argc, char **argv)
{
    static const size_t lengths[] = {1, 2, 16, 17, 31, 33, 64, 65, 66, 127, 129, 500, 1031, 3000};
    static const size_t groups[] = {1, 4, 8, 7, 16, 11, 32};
    static const size_t pages[] = {0, 16, 0, 64, 32, 256};
    bool quick = check_begin(argc, argv);
    workspace_new(64 << 20);
    test_refusals();
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (int format = 0; format < 2; format++)
            for (size_t dim = 64; dim <= 128; dim += 64) {
                const enum qtool_kv_format f = format ? QTOOL_KV_F16 : QTOOL_KV_INT4;
                struct test_case t = {f,
                                      dim,
                                      1 + random_below(3),
                                      groups[random_below(7)],
                                      1 + random_below(4),
                                      lengths[i],
                                      page_for(f, pages[random_below(6)]),
                                      (int)random_below(2)};
                if (!quick || (lengths[i] > 30 && lengths[i] < 200 && lengths[i] % 2))
                    check_case(&t);
            }
    for (int i = 0; i < 6; i++) { /* several thread blocks per multiprocessor */
        struct test_case t = {QTOOL_KV_INT4,
                              i % 2 ? 64 : 128,
                              4,
                              (size_t)4 << i / 2,
                              12,
                              700,
                              page_for(QTOOL_KV_INT4, pages[i]),
                              (int)random_below(2)};
        if (!quick || i < 4)
            check_case(&t);
    }
    static const size_t split_lengths[] = {40, 1024, 2048, 8192};
    for (int i = 0; i < 8; i++) { /* few sequences with several splits */
        const enum qtool_kv_format f = i % 2 ? QTOOL_KV_F16 : QTOOL_KV_INT4;
        struct test_case t = {f,
                              i % 3 ? 128 : 64,
                              2,
                              4,
                              3,
                              split_lengths[i / 2],
                              page_for(f, pages[i % 6]),
                              (int)random_below(2)};
        if (quick && i > 3)
            break;
        check_case(&t);
        check_dependent(&t, 0);
        check_dependent(&t, 256);
    }
    printf("%d cases with counted arrivals; worst relative error: f16 %.3g, of a row %.3g; "
           "bf16 %.3g, of a row %.3g\n",
           counted, worst[0].all, worst[0].row, worst[1].all, worst[1].row);
    return check_end();
}
