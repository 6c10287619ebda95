/* 4-bit KV caches: simulated quantization in plain C, and the key scales of a container. */
#include "pack/schemes/scheme.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum { TOKENS = 64 }; /* per item of a parallel loop */

const char *const qt_kv_keys_names[] = {"channel", "static", "token", NULL};

struct job {
    float *k, *v; /* [m][width] */
    float *exact; /* [m][width] channel keys: FP16 keys before rounding */
    const struct qt_kv *kv;
    const struct qt_attention *a;
    const float *scale, *zero; /* [width] static key scales of the layer */
    const float *factor;       /* [width] w4ax stores values divided by these; NULL: 1 */
    size_t m, width;
};

/* Rounds n keys at distance `stride` that share a scale. */
static void round_keys(float *x, size_t n, size_t stride)
{
    float low = INFINITY, high = -INFINITY;
    for (size_t i = 0; i < n; i++) {
        low = fminf(low, qt_kv4_clamp(x[i * stride]));
        high = fmaxf(high, qt_kv4_clamp(x[i * stride]));
    }
    const struct qt_kv4_grid grid = qt_kv4_key_grid(qt_kv4_key_param(low, high));
    for (size_t i = 0; i < n; i++)
        x[i * stride] = qt_kv4_round(qt_kv4_clamp(x[i * stride]), grid);
}

/* Rounds the value of a token and head. */
static void round_value(float *x, size_t dim)
{
    for (size_t first = 0, end; first < dim; first = end) {
        float low = 0, high = 0;
        end = qt_min_size(first + QT_KV_CHANNELS, dim);
        for (size_t i = first; i < end; i++) {
            x[i] = qt_kv4_clamp(x[i]);
            low = fminf(low, x[i]);
            high = fmaxf(high, x[i]);
        }
        const struct qt_kv4_grid grid = qt_kv4_value_grid(qt_kv4_value_param(low, high));
        for (size_t i = first; i < end; i++)
            x[i] = qt_kv4_round(x[i], grid);
    }
}

float qt_kv_static(float x, float scale, float zero)
{
    return (qt_kv4_code(fmaf(x, 1 / scale, zero)) - zero) * scale;
}

/* Rounds the values of TOKENS tokens, and their keys if key scales do not span tokens. Channel keys
 * become exact keys. */
static void tokens_item(void *ctx, size_t item)
{
    const struct job *job = ctx;
    const enum qt_kv_keys keys = job->kv->keys;
    size_t dim = job->a->head_dim, width = job->width;
    size_t first = item * TOKENS * width, end = qt_min_size((item + 1) * TOKENS, job->m) * width;
    for (size_t i = first; i < end && job->factor; i++)
        job->v[i] /= job->factor[i % width];
    for (size_t i = first; i < end; i += dim)
        round_value(job->v + i, dim);
    for (size_t i = first; i < end && job->factor; i++)
        job->v[i] *= job->factor[i % width];
    for (size_t i = first; i < end && keys == QT_KV_KEYS_TOKEN; i += dim)
        round_keys(job->k + i, dim, 1);
    for (size_t i = first; i < end && keys == QT_KV_KEYS_STATIC; i += width)
        for (size_t c = 0; c < width; c++)
            job->k[i + c] = qt_kv_static(job->k[i + c], job->scale[c], job->zero[c]);
    for (size_t i = first; i < end && keys == QT_KV_KEYS_CHANNEL; i++)
        job->exact[i] = job->k[i] = qt_f16_to_f32(qt_f32_to_f16(qt_kv4_clamp(job->k[i])));
}

/* Rounds the exact keys of a sequence, but not those of token 0; each channel has a scale per group
 * of tokens. */
static void channels_item(void *ctx, size_t item)
{
    const struct job *job = ctx;
    size_t seqlen = job->a->seqlen, width = job->width;
    float *k = job->k + item * seqlen * width;
    for (size_t first = 1, end; first < seqlen; first = end) {
        for (end = first + 1; end < seqlen && qt_kv4_group(end) == first;)
            end++;
        for (size_t c = 0; c < width; c++)
            round_keys(k + first * width + c, end - first, width);
    }
}

/* Rounding would turn NaN and infinity into finite numbers. */
static int check_finite(const float *x, size_t count, const struct qt_linear *linear,
                        const char *what, struct qt_err *err)
{
    return qt_find_nonfinite(x, count) == count ? QT_OK
                                                : qt_fail(err, QT_E_INPUT, NULL, linear->weight,
                                                          "gives %s that are not finite", what);
}

int qt_kv_apply(void *cache_ctx, struct qt_backend *be, float *k, float *v, float *exact,
                const struct qt_linear *key, const struct qt_linear *value, size_t m,
                struct qt_attention *a, struct qt_err *err)
{
    const struct qt_kv *kv = cache_ctx;
    struct job job = {.kv = kv, .a = a, .m = m, .width = a->kv_heads * a->head_dim};
    size_t count = m * job.width, bytes = count * sizeof *k;
    float *factor = NULL;
    int rc = QT_OK;
    if (kv->container) {
        QT_TRY(qt_array_new(&factor, job.width, sizeof *factor, err));
        QT_TRY(qt_act_row_factors(factor, kv->container, value->weight, value->feeds_from,
                                  job.width, err));
        job.factor = factor;
    }
    if (kv->keys == QT_KV_KEYS_STATIC) {
        job.scale = kv->scale + key->layer * job.width;
        job.zero = kv->zero + key->layer * job.width;
    }
    QT_TRY(qt_array_new(&job.k, bytes, 1, err));
    QT_TRY(qt_array_new(&job.v, bytes, 1, err));
    if (kv->keys == QT_KV_KEYS_CHANNEL)
        QT_TRY(qt_array_new(&job.exact, bytes, 1, err));
    QT_TRY(be->download(be, job.k, k, bytes, err));
    QT_TRY(be->download(be, job.v, v, bytes, err));
    QT_TRY(check_finite(job.k, count, key, "keys", err));
    QT_TRY(check_finite(job.v, count, value, "values", err));
    qt_parallel_for(qt_ceil_div(m, TOKENS), tokens_item, &job);
    if (kv->keys == QT_KV_KEYS_CHANNEL) {
        qt_parallel_for(m / a->seqlen, channels_item, &job);
        QT_TRY(be->upload(be, exact, job.exact, bytes, err));
        a->exact_keys = exact;
    }
    QT_TRY(be->upload(be, k, job.k, bytes, err));
    QT_TRY(be->upload(be, v, job.v, bytes, err));
done:
    qt_free(factor);
    qt_free(job.k);
    qt_free(job.v);
    qt_free(job.exact);
    return rc;
}

/* ---- sizes ---------------------------------------------------------------------------------- */

double qt_kv_bits(enum qt_kv_keys keys, size_t head_dim)
{
    const double groups = (double)qt_ceil_div(head_dim, QT_KV_CHANNELS);
    const double key = keys == QT_KV_KEYS_CHANNEL ? 4 + 16. / QT_KV_GROUP
                       : keys == QT_KV_KEYS_TOKEN ? 4 + 16 / (double)head_dim
                                                  : 4;
    return (key + 4 + groups * 16 / (double)head_dim) / 2;
}

uint64_t qt_kv_tail_bytes(enum qt_kv_keys keys, size_t layers, size_t kv_heads, size_t head_dim)
{
    const uint64_t tokens = keys == QT_KV_KEYS_CHANNEL ? 1 + QT_KV_GROUP : 0;
    return layers * kv_heads * head_dim * tokens * 2;
}

double qt_kv_sequence_bits(enum qt_kv_keys keys, size_t head_dim, size_t tokens)
{
    const double tail = 8.0 * (double)qt_kv_tail_bytes(keys, 1, 1, head_dim);
    return qt_kv_bits(keys, head_dim) + tail / (2.0 * (double)head_dim * (double)tokens);
}

/* ---- containers ----------------------------------------------------------------------------- */

int qt_kv_tensor_name(char **out, size_t layer, const char *what, struct qt_err *err)
{
    return qt_string_format(out, err, "kv.layers.%zu.k_%s", layer, what);
}

const json_t *qt_kv_entry(const struct qt_container *c)
{
    return json_object_get(qt_container_manifest(c), "kv");
}

/* Reads one tensor of a layer, dst[kv_heads][head_dim]. */
static int read_tensor(float *dst, const struct qt_container *c, size_t layer, const char *what,
                       const struct qt_model_info *model, struct qt_err *err)
{
    const struct qt_ckpt *ckpt = qt_container_ckpt(c);
    size_t count = model->kv_heads * model->head_dim;
    struct qt_blob blob = {0};
    char *name = NULL;
    int rc;
    QT_TRY(qt_kv_tensor_name(&name, layer, what, err));
    const struct qt_tensor *t = qt_ckpt_find(ckpt, name);
    if (!t || !json_object_get(json_object_get(qt_kv_entry(c), "tensors"), name)) {
        rc = qt_fail(err, QT_E_INPUT, qt_container_dir(c), name,
                     "is missing from 'kv.tensors' of the manifest");
        goto done;
    }
    if (t->dtype != QT_F32 || t->ndim != 2 || t->shape[0] != model->kv_heads ||
        t->shape[1] != model->head_dim) {
        rc = qt_fail(err, QT_E_INPUT, t->file, name,
                     "must be F32 [%zu, %zu] to match the model's keys", model->kv_heads,
                     model->head_dim);
        goto done;
    }
    QT_TRY(qt_ckpt_read(&blob, ckpt, t, err));
    qt_to_f32(dst, blob.data, t->dtype, count);
    size_t bad = qt_find_nonfinite(dst, count);
    if (bad < count)
        rc = qt_fail(err, QT_E_INPUT, t->file, name, "element %zu is not finite", bad);
done:
    qt_blob_free(&blob);
    qt_free(name);
    return rc;
}

static int check_scales(const float *scale, const struct qt_container *c, size_t layer,
                        size_t count, struct qt_err *err)
{
    char *name;
    for (size_t i = 0; i < count; i++) {
        if (scale[i] >= FLT_MIN) /* 1 / scale is finite */
            continue;
        int rc = qt_kv_tensor_name(&name, layer, "scale", err);
        if (rc == QT_OK)
            rc = qt_fail(err, QT_E_INPUT, qt_container_dir(c), name,
                         "element %zu is %g, not a positive scale", i, (double)scale[i]);
        qt_free(name);
        return rc;
    }
    return QT_OK;
}

json_t *qt_kv_entry_new(enum qt_kv_keys keys)
{
    json_t *entry = json_pack("{s:i, s:{s:s, s:s}, s:{s:s, s:s, s:i}, s:{}}", "bits", 4, "keys",
                              "scales", qt_kv_keys_names[keys - QT_KV_KEYS_CHANNEL], "dtype",
                              keys == QT_KV_KEYS_STATIC ? "F32" : "F16", "values", "scales",
                              "group", "dtype", "F16", "group", QT_KV_CHANNELS, "tensors");
    if (keys != QT_KV_KEYS_CHANNEL || json_object_set_new(json_object_get(entry, "keys"), "group",
                                                          json_integer(QT_KV_GROUP)) == 0)
        return entry;
    json_decref(entry);
    return NULL;
}

/* Whether an object has the members of another, with the same values. */
static bool has_members(const json_t *object, json_t *wanted)
{
    const char *name;
    json_t *value;
    json_object_foreach (wanted, name, value) {
        if (!json_equal(json_object_get(object, name), value))
            return false;
    }
    return true;
}

/* Whether the entry describes the values of this version, or of earlier ones: a scale and a minimum
 * per token and head. Nothing that a container stores depends on it. */
static bool knows_values(const json_t *kv, const json_t *known)
{
    const json_t *values = json_object_get(kv, "values");
    const char *scales = json_string_value(json_object_get(values, "scales"));
    const char *dtype = json_string_value(json_object_get(values, "dtype"));
    return has_members(values, json_object_get(known, "values")) ||
           (scales && strcmp(scales, "token") == 0 && dtype && strcmp(dtype, "F16") == 0);
}

int qt_kv_check(enum qt_kv_keys *keys, const struct qt_container *c, struct qt_err *err)
{
    const json_t *kv = qt_kv_entry(c), *bits = json_object_get(kv, "bits");
    if (!kv)
        return qt_fail(err, QT_E_USAGE, qt_container_dir(c), NULL,
                       "was made without a KV cache: quantize with --kv 4");
    if (!json_is_integer(bits) || json_integer_value(bits) != 4)
        return qt_fail(err, QT_E_INPUT, qt_container_dir(c), NULL, "'kv.bits' must be 4");
    for (int i = QT_KV_KEYS_CHANNEL; i <= QT_KV_KEYS_TOKEN; i++) {
        *keys = (enum qt_kv_keys)i;
        json_t *known = qt_kv_entry_new(*keys);
        if (!known)
            return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory");
        bool same = has_members(json_object_get(kv, "keys"), json_object_get(known, "keys")) &&
                    knows_values(kv, known);
        json_decref(known);
        if (same)
            return QT_OK;
    }
    return qt_fail(err, QT_E_INPUT, qt_container_dir(c), NULL,
                   "'kv.keys' and 'kv.values' describe no cache that this version knows: key "
                   "scales \"channel\" (F16, group 64), \"static\" (F32) or \"token\" (F16), value "
                   "scales \"group\" (F16, group 16)");
}

int qt_kv_open(struct qt_kv *out, const struct qt_container *c, const struct qt_model_info *model,
               struct qt_err *err)
{
    size_t count = model->kv_heads * model->head_dim, needed;
    size_t tensors = json_object_size(json_object_get(qt_kv_entry(c), "tensors"));
    int rc;
    *out = (struct qt_kv){.container = c};
    QT_TRY(qt_kv_check(&out->keys, c, err));
    needed = out->keys == QT_KV_KEYS_STATIC ? 2 * model->layers : 0;
    if (tensors != needed)
        return qt_fail(err, QT_E_INPUT, qt_container_dir(c), NULL,
                       "'kv.tensors' has %zu tensors, the cache of the model needs %zu", tensors,
                       needed);
    if (needed == 0)
        goto done;
    QT_TRY(qt_array_new(&out->scale, model->layers, count * sizeof *out->scale, err));
    QT_TRY(qt_array_new(&out->zero, model->layers, count * sizeof *out->zero, err));
    for (size_t l = 0; l < model->layers; l++) {
        QT_TRY(read_tensor(out->scale + l * count, c, l, "scale", model, err));
        QT_TRY(read_tensor(out->zero + l * count, c, l, "zero", model, err));
        QT_TRY(check_scales(out->scale + l * count, c, l, count, err));
    }
done:
    if (rc < 0)
        qt_kv_free(out);
    return rc;
}

void qt_kv_free(struct qt_kv *kv)
{
    qt_free(kv->scale);
    qt_free(kv->zero);
    *kv = (struct qt_kv){.keys = kv->keys};
}
