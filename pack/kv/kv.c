/* KV caches of 4 bits: rounding as a runtime does it, in plain C; what a container holds for them.
 */
#include "pack/schemes/scheme.h"

#include <float.h>
#include <math.h>

enum { TOKENS = 64 }; /* per item */

struct job {
    float *k, *v; /* [m][width] */
    const struct qt_kv *kv;
    const struct qt_attention *a;
    const float *scale, *zero; /* static keys of the layer: [width] */
    const float *factor;       /* of values: [width], powers of two, or NULL */
    size_t m, width;
};

/* Ties to even. */
static float code_of(float q)
{
    return fminf(fmaxf(rintf(q), 0), 15);
}

static float limited(float x)
{
    return fminf(fmaxf(x, -65504), 65504);
}

static float stored(float x)
{
    return qt_f16_to_f32(qt_f32_to_f16(x));
}

/* n values, `stride` apart, that share a scale. */
static void round_group(float *x, size_t n, size_t stride)
{
    float low = INFINITY, high = -INFINITY;
    for (size_t i = 0; i < n; i++) {
        low = fminf(low, limited(x[i * stride]));
        high = fmaxf(high, limited(x[i * stride]));
    }
    float least = stored(low), s = stored((high - low) / 15);
    if (s == 0)
        s = 1;
    for (size_t i = 0; i < n; i++)
        x[i * stride] = code_of((limited(x[i * stride]) - least) * (1 / s)) * s + least;
}

float qt_kv_static(float x, float scale, float zero)
{
    return (code_of(fmaf(x, 1 / scale, zero)) - zero) * scale;
}

/* Some tokens: values, and keys whose scales know nothing of other tokens. */
static int tokens_item(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct job *job = ctx;
    size_t dim = job->a->head_dim, width = job->width;
    size_t first = item * TOKENS * width, end = qt_min_size((item + 1) * TOKENS, job->m) * width;
    (void)thread;
    (void)err;
    for (size_t i = first; i < end && job->factor; i++)
        job->v[i] /= job->factor[i % width];
    for (size_t i = first; i < end; i += dim)
        round_group(job->v + i, dim, 1);
    for (size_t i = first; i < end && job->factor; i++)
        job->v[i] *= job->factor[i % width];
    for (size_t i = first; i < end && job->kv->keys == QT_KV_KEYS_TOKEN; i += dim)
        round_group(job->k + i, dim, 1);
    for (size_t i = first; i < end && job->kv->keys == QT_KV_KEYS_STATIC; i += width)
        for (size_t c = 0; c < width; c++)
            job->k[i + c] = qt_kv_static(job->k[i + c], job->scale[c], job->zero[c]);
    return QT_OK;
}

/* The keys of a sequence, a scale for every channel of QT_KV_TOKENS tokens. */
static int channels_item(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct job *job = ctx;
    size_t seqlen = job->a->seqlen, width = job->width;
    float *k = job->k + item * seqlen * width;
    (void)thread;
    (void)err;
    for (size_t t = 0; t < seqlen; t += QT_KV_TOKENS)
        for (size_t c = 0; c < width; c++)
            round_group(k + t * width + c, qt_min_size(QT_KV_TOKENS, seqlen - t), width);
    return QT_OK;
}

/* Rounding would make numbers of them. */
static int check_finite(const float *x, size_t count, const struct qt_linear *linear,
                        const char *what, struct qt_err *err)
{
    return qt_find_nonfinite(x, count) == count ? QT_OK
                                                : qt_fail(err, QT_E_INPUT, NULL, linear->weight,
                                                          "gives %s that are not finite", what);
}

int qt_kv_apply(void *cache_ctx, struct qt_backend *be, float *k, float *v,
                const struct qt_linear *key, const struct qt_linear *value, size_t m,
                const struct qt_attention *a, struct qt_err *err)
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
    QT_TRY(be->download(be, job.k, k, bytes, err));
    QT_TRY(be->download(be, job.v, v, bytes, err));
    QT_TRY(check_finite(job.k, count, key, "keys", err));
    QT_TRY(check_finite(job.v, count, value, "values", err));
    QT_TRY(qt_parallel(qt_ceil_div(m, TOKENS), tokens_item, &job, err));
    if (kv->keys == QT_KV_KEYS_CHANNEL)
        QT_TRY(qt_parallel(m / a->seqlen, channels_item, &job, err));
    QT_TRY(be->upload(be, k, job.k, bytes, err));
    QT_TRY(be->upload(be, v, job.v, bytes, err));
done:
    qt_free(factor);
    qt_free(job.k);
    qt_free(job.v);
    return rc;
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

/* One tensor, dst[heads][head_dim]. */
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
        rc = qt_fail(err, QT_E_INPUT, qt_container_dir(c), name, "is missing in 'kv'");
        goto done;
    }
    if (t->dtype != QT_F32 || t->ndim != 2 || t->shape[0] != model->kv_heads ||
        t->shape[1] != model->head_dim) {
        rc = qt_fail(err, QT_E_INPUT, t->file, name, "must be F32 [%zu, %zu], as the model's keys",
                     model->kv_heads, model->head_dim);
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
        if (scale[i] >= FLT_MIN) /* what 1 / scale can be taken of */
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

/* Whether scales of `part`, "keys" or "values", are as they are described. */
static bool scales_are(const json_t *kv, const char *part, const char *scales, const char *dtype)
{
    const json_t *o = json_object_get(kv, part);
    const char *got[] = {json_string_value(json_object_get(o, "scales")),
                         json_string_value(json_object_get(o, "dtype"))};
    return got[0] && got[1] && strcmp(got[0], scales) == 0 && strcmp(got[1], dtype) == 0;
}

int qt_kv_check(const struct qt_container *c, struct qt_err *err)
{
    const json_t *kv = qt_kv_entry(c), *bits = json_object_get(kv, "bits");
    if (!kv)
        return qt_fail(err, QT_E_USAGE, qt_container_dir(c), NULL,
                       "holds no scales of keys: quantize with --kv 4");
    if (!json_is_integer(bits) || json_integer_value(bits) != 4)
        return qt_fail(err, QT_E_INPUT, qt_container_dir(c), NULL, "'kv.bits' must be 4");
    if (!scales_are(kv, "keys", "static", "F32") || !scales_are(kv, "values", "token", "F16"))
        return qt_fail(err, QT_E_INPUT, qt_container_dir(c), NULL,
                       "'kv' must have \"static\" scales of keys (F32), \"token\" of values (F16)");
    return QT_OK;
}

int qt_kv_open(struct qt_kv *out, const struct qt_container *c, const struct qt_model_info *model,
               struct qt_err *err)
{
    size_t count = model->kv_heads * model->head_dim;
    size_t tensors = json_object_size(json_object_get(qt_kv_entry(c), "tensors"));
    int rc;
    *out = (struct qt_kv){.keys = QT_KV_KEYS_STATIC, .container = c};
    QT_TRY(qt_kv_check(c, err));
    if (tensors != 2 * model->layers)
        return qt_fail(err, QT_E_INPUT, qt_container_dir(c), NULL,
                       "'kv.tensors' has %zu tensors, the model needs %zu", tensors,
                       2 * model->layers);
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
