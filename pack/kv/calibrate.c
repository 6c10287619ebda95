/*
 * Calibrates the static scales of 4-bit keys. A KV cache will hold the keys of the quantized model,
 * after error compensation and learning, not those of the source. Therefore this pass comes last:
 * when all other tensors of the container are written, the quantized model runs over some of the
 * calibration windows. The keys of one decoder layer are in memory at a time.
 */
#include "pack/kv/fit.h"
#include "pack/run.h"

#include <math.h>

/* Upper bound, rounded up to whole windows, for the tokens of a channel's sample, so that all keys
 * of a layer fit into memory. Perplexity with 4096, 16384 and 65536: 40.486, 40.488, 40.588. */
enum { TOKENS = 16384 };

struct pass {
    struct qt_run *run;
    struct qt_backend *be;
    struct qt_model *model;
    struct qt_weights written;
    uint32_t *ids;
    size_t tokens, seqlen;
    size_t width;           /* KV heads x head_dim */
    float *hidden;          /* backend memory, [tokens][hidden] */
    float *keys;            /* [tokens][width] of the current layer */
    size_t seen;            /* tokens in keys */
    float *scale, *zero;    /* [width] */
    double *energy, *error; /* [width]: sums over the tokens of key^2, of squared errors */
    float *sample;          /* [threads][tokens], scratch */
    double *prefix_sums;    /* [threads][2 * (tokens + 1)], scratch */
};

/* ---- the container as it is written --------------------------------------------------------- */

/* Loads a tensor of the container. Copied tensors are also read back, because learning may have
 * tuned them. */
static int written_load(void *ctx, const char *name, float *dst, struct qt_err *err)
{
    struct qt_run *run = ctx;
    const struct qt_weights now = qt_run_weights(run);
    void *copy = NULL;
    size_t i;
    int rc;
    QT_TRY(qt_run_find_item(&i, run, name, err));
    const struct qt_tensor *t = run->plan.items[i].tensor;
    if (!run->plan.items[i].copied)
        return now.load(now.ctx, name, dst, err);
    QT_TRY(qt_array_new(&copy, t->nbytes, 1, err));
    QT_TRY(qt_writer_get(run->writer, run->first[i], copy, t->nbytes, err));
    qt_to_f32(dst, copy, t->dtype, t->count);
done:
    qt_free(copy);
    return rc;
}

/* ---- a layer -------------------------------------------------------------------------------- */

/* Callback `cache` of struct qt_fake_quant: appends the keys of m tokens to p->keys. */
static int collect(void *ctx, struct qt_backend *be, float *k, float *v, float *exact,
                   const struct qt_linear *key, const struct qt_linear *value, size_t m,
                   struct qt_attention *a, struct qt_err *err)
{
    struct pass *p = ctx;
    float *dst = p->keys + p->seen * p->width;
    const struct qt_tensor *source;
    (void)v;
    (void)exact;
    (void)value;
    (void)a;
    p->seen += m;
    int rc = be->download(be, dst, k, m * p->width * sizeof *k, err);
    if (rc < 0 || qt_find_nonfinite(dst, m * p->width) == m * p->width)
        return rc;
    source = qt_ckpt_find(p->run->ckpt, key->weight);
    return qt_fail(err, QT_E_INPUT, source->file, source->name,
                   "gives keys that are not finite on the calibration data");
}

static int fit_channel(void *ctx, size_t c, int thread, struct qt_err *err)
{
    const struct pass *p = ctx;
    float *sample = p->sample + (size_t)thread * p->tokens;
    double *prefix_sums = p->prefix_sums + (size_t)thread * 2 * (p->tokens + 1);
    (void)err;
    for (size_t t = 0; t < p->tokens; t++)
        sample[t] = p->keys[t * p->width + c];
    qt_kv_fit(&p->scale[c], &p->zero[c], sample, p->tokens, prefix_sums);
    p->energy[c] = p->error[c] = 0;
    for (size_t t = 0; t < p->tokens; t++) {
        double x = (double)sample[t];
        double e = (double)qt_kv_static(sample[t], p->scale[c], p->zero[c]) - x;
        p->energy[c] += x * x;
        p->error[c] += e * e;
    }
    return QT_OK;
}

/* Writes a tensor of a layer: which = 0 "scale", 1 "zero". */
static int write_tensor(struct pass *p, size_t layer, size_t which, const char *what,
                        const float *data, struct qt_err *err)
{
    struct qt_run *run = p->run;
    size_t bytes = p->width * sizeof *data;
    char *name = NULL;
    int rc;
    QT_TRY(qt_kv_tensor_name(&name, layer, what, err));
    QT_TRY(qt_writer_put(run->writer, run->kv.first + 2 * layer + which, data, bytes, 0, err));
    json_t *stored = json_pack("{s:s, s:[I,I], s:o}", "dtype", qt_dtype_name(QT_F32), "shape",
                               (json_int_t)run->plan.kv.heads, (json_int_t)run->plan.kv.head_dim,
                               "crc32", qt_crc_json(qt_crc32(0, data, bytes)));
    if (json_object_set_new(json_object_get(run->kv.entry, "tensors"), name, stored) < 0)
        rc = qt_no_memory(err, NULL);
done:
    qt_free(name);
    return rc;
}

static int calibrate_layer(struct pass *p, struct qt_layer **handle, size_t layer,
                           struct qt_err *err)
{
    double energy = 0, error = 0;
    int rc;
    p->seen = 0;
    if (*handle)
        QT_TRY(qt_layer_load(*handle, layer, &p->written, err));
    else
        QT_TRY(qt_layer_open(handle, p->model, layer, &p->written, p->be, err));
    QT_TRY(qt_layer_run(*handle, p->hidden, p->tokens, p->seqlen, NULL, err));
    QT_TRY(qt_parallel(p->width, fit_channel, p, err));
    for (size_t c = 0; c < p->width; c++) {
        energy += p->energy[c];
        error += p->error[c];
    }
    json_t *sqnr = error > 0 ? json_real(10 * log10(energy / error)) : json_null();
    if (json_array_append_new(json_object_get(p->run->kv.entry, "sqnr_db"), sqnr) < 0) {
        rc = qt_no_memory(err, NULL);
        goto done;
    }
    QT_TRY(write_tensor(p, layer, 0, "scale", p->scale, err));
    QT_TRY(write_tensor(p, layer, 1, "zero", p->zero, err));
done:
    return rc;
}

/* ---- the pass ------------------------------------------------------------------------------- */

/* Takes windows that are evenly spread over the calibration data. */
static int choose_windows(struct pass *p, const struct qt_calibration *data, struct qt_err *err)
{
    size_t count = qt_min_size(data->samples, qt_ceil_div(TOKENS, data->seqlen));
    int rc = qt_array_new(&p->ids, count * data->seqlen, sizeof *p->ids, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < count; i++)
        memcpy(p->ids + i * data->seqlen, data->ids + i * data->samples / count * data->seqlen,
               data->seqlen * sizeof *p->ids);
    p->tokens = count * data->seqlen;
    return QT_OK;
}

static int pass_open(struct pass *p, struct qt_run *run, struct qt_err *err)
{
    const struct qt_calibration *data = run->opt->calibration;
    size_t threads = (size_t)qt_threads(), width = run->plan.kv.heads * run->plan.kv.head_dim;
    int rc;
    *p = (struct pass){.run = run, .be = data->backend, .seqlen = data->seqlen, .width = width};
    p->written = qt_run_weights(run);
    p->written.load = written_load;
    p->written.fake_quant.cache = collect;
    p->written.fake_quant.cache_ctx = p;
    QT_TRY(choose_windows(p, data, err));
    QT_TRY(qt_model_open(&p->model, &p->written, err));
    QT_TRY(qt_array_new(&p->keys, p->tokens, width * sizeof *p->keys, err));
    QT_TRY(qt_array_new(&p->scale, width, sizeof *p->scale, err));
    QT_TRY(qt_array_new(&p->zero, width, sizeof *p->zero, err));
    QT_TRY(qt_array_new(&p->energy, width, sizeof *p->energy, err));
    QT_TRY(qt_array_new(&p->error, width, sizeof *p->error, err));
    QT_TRY(qt_array_new(&p->sample, threads, p->tokens * sizeof *p->sample, err));
    QT_TRY(
        qt_array_new(&p->prefix_sums, threads, 2 * (p->tokens + 1) * sizeof *p->prefix_sums, err));
    size_t bytes = p->tokens * qt_model_info(p->model)->state * sizeof *p->hidden;
    QT_TRY(p->be->alloc(p->be, &p->hidden, bytes, err));
    QT_TRY(qt_model_embed(p->hidden, p->model, &p->written, p->be, p->ids, p->tokens, data->seqlen,
                          err));
done:
    return rc;
}

static void pass_close(struct pass *p)
{
    p->be->free(p->be, p->hidden);
    qt_model_close(p->model);
    qt_free(p->ids);
    qt_free(p->keys);
    qt_free(p->scale);
    qt_free(p->zero);
    qt_free(p->energy);
    qt_free(p->error);
    qt_free(p->sample);
    qt_free(p->prefix_sums);
}

int qt_run_kv(struct qt_run *run, struct qt_err *err)
{
    struct qt_layer *handle = NULL;
    struct pass p = {0};
    const char *unit;
    int rc;
    if (run->plan.kv.keys == QT_KV_KEYS_NONE)
        return QT_OK;
    unit = run->plan.kv.bytes ? run->stored[run->kv.first].name : NULL;
    if (unit && qt_writer_done(run->writer, unit))
        return qt_writer_record(&run->kv.entry, run->writer, unit, err);
    run->kv.entry = qt_kv_entry_new(run->plan.kv.keys);
    if (!run->kv.entry)
        return qt_no_memory(err, NULL);
    if (!unit) /* nothing to calibrate */
        return QT_OK;
    if (json_object_set_new(run->kv.entry, "sqnr_db", json_array()) < 0)
        return qt_no_memory(err, NULL);
    QT_TRY(pass_open(&p, run, err));
    for (size_t layer = 0; layer < run->plan.kv.layers; layer++) {
        QT_TRY(qt_run_check_interrupted(run, err));
        QT_TRY(calibrate_layer(&p, &handle, layer, err));
        qt_log_progress(run->opt->log, "keys", (double)(layer + 1), (double)run->plan.kv.layers);
    }
    rc = qt_writer_commit(run->writer, unit, run->kv.entry, err);
done:
    qt_layer_close(handle);
    pass_close(&p);
    return rc;
}
