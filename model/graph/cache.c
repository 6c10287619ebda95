/*
 * State of sequences that grow: keys and values of attention, the recurrent states of gated
 * DeltaNet and state space models, and the last inputs of convolutions. A decoder layer that runs
 * with a cache continues the sequences; without one (r->cache = NULL) its tokens are whole
 * sequences.
 */
#include "model/graph/layer.h"

/* Floats per token of the keys, and of the values, of a decoder layer. */
static size_t key_width(const struct config *cfg, size_t layer)
{
    const struct heads *heads = &cfg->heads[layer];
    return (cfg->mixers[layer] == MIXER_LATENT ? cfg->info.heads : heads->kv) * heads->dim;
}

/* A mixer keeps this much of a sequence besides keys and values. */
struct recurrence {
    size_t width, kernel; /* channels and tokens of its convolution; 0, 1: none */
    size_t state;         /* floats of its recurrent state */
};

static struct recurrence recurrence_of(const struct config *cfg, enum mixer_kind mixer)
{
    const size_t keys = cfg->delta.key_heads * cfg->delta.key_dim;
    const size_t values = cfg->delta.value_heads * cfg->delta.value_dim;
    switch (mixer) {
    case MIXER_DELTA:
        return (struct recurrence){2 * keys + values, cfg->delta.kernel,
                                   values * cfg->delta.key_dim};
    case MIXER_SSM:
    case MIXER_SSM_ATTENTION:
        return (struct recurrence){ssm_mixed(cfg), cfg->ssm.kernel,
                                   ssm_values(cfg) * cfg->ssm.state};
    case MIXER_SHORT:
        return (struct recurrence){cfg->info.hidden, cfg->short_kernel, 0};
    default:
        return (struct recurrence){0, 1, 0};
    }
}

static bool has_keys(enum mixer_kind mixer)
{
    return mixer == MIXER_ATTENTION || mixer == MIXER_LATENT || mixer == MIXER_SSM_ATTENTION ||
           mixer == MIXER_HEAD_EXPERTS;
}

int cache_open(struct layer_cache *out, const struct qt_model *model, size_t layer,
               const struct cache_work *work, struct qt_backend *be, struct qt_err *err)
{
    const struct config *cfg = &model->cfg;
    const enum mixer_kind mixer = model->layers[layer].mixer;
    const size_t tokens = work->sequences * work->capacity;
    const struct recurrence own = recurrence_of(cfg, mixer);
    int rc = QT_OK;
    *out = (struct layer_cache){.work = work};
    if (own.width)
        QT_TRY(
            qt_backend_floats(&out->tail, be, work->sequences * (own.kernel - 1), own.width, err));
    if (own.state)
        QT_TRY(qt_backend_floats(&out->state, be, work->sequences, own.state, err));
    if (has_keys(mixer)) {
        QT_TRY(qt_backend_floats(&out->k, be, tokens, key_width(cfg, layer), err));
        QT_TRY(qt_backend_floats(&out->v, be, tokens, key_width(cfg, layer), err));
    }
done:
    return rc;
}

void cache_close(struct layer_cache *c, struct qt_backend *be)
{
    be->free(be, c->k);
    be->free(be, c->v);
    be->free(be, c->tail);
    be->free(be, c->state);
    *c = (struct layer_cache){0};
}

int cache_work_open(struct cache_work *out, const struct qt_model *model, bool rounded,
                    size_t sequences, size_t capacity, size_t step, struct qt_backend *be,
                    struct qt_err *err)
{
    const struct config *cfg = &model->cfg;
    const size_t all = sequences * capacity;
    size_t width = 0, convolved = 0, kernel = 1;
    int rc = QT_OK;
    *out = (struct cache_work){.sequences = sequences, .capacity = capacity};
    for (size_t i = 0; i < cfg->info.layers; i++) {
        const struct recurrence own = recurrence_of(cfg, cfg->mixers[i]);
        convolved = qt_max_size(convolved, own.width);
        kernel = qt_max_size(kernel, own.kernel);
        if (has_keys(cfg->mixers[i]))
            width = qt_max_size(width, key_width(cfg, i));
    }
    if (width && (rounded || sequences > 1)) {
        QT_TRY(qt_backend_floats(&out->k, be, all, width, err));
        QT_TRY(qt_backend_floats(&out->v, be, all, width, err));
    }
    if (width && rounded)
        QT_TRY(qt_backend_floats(&out->exact, be, all, width, err));
    if (convolved) {
        const size_t rows = sequences * (step + kernel - 1);
        QT_TRY(qt_backend_floats(&out->mixed, be, rows, convolved, err));
        QT_TRY(qt_backend_floats(&out->convolved, be, rows, convolved, err));
    }
done:
    return rc;
}

void cache_work_close(struct cache_work *w, struct qt_backend *be)
{
    be->free(be, w->k);
    be->free(be, w->v);
    be->free(be, w->exact);
    be->free(be, w->mixed);
    be->free(be, w->convolved);
    *w = (struct cache_work){0};
}

/* Appends x[sequences][seqlen][width] to stored[sequences][capacity][width]. *all = the tokens of
 * all sequences without gaps: the stored ones, or a copy. */
static int append(float **all, float *stored, float *copy, const float *x, size_t width,
                  const struct layer_run *r, struct qt_err *err)
{
    const struct cache_work *work = r->cache->work;
    struct qt_backend *be = r->layer->be;
    const size_t ld = work->capacity * width, n = r->seqlen * width, past = r->past * width;
    int rc;
    QT_TRY(be->copy_columns(be, stored + past, ld, x, n, n, work->sequences, err));
    *all = copy ? copy : stored;
    if (copy)
        QT_TRY(be->copy_columns(be, copy, past + n, stored, ld, past + n, work->sequences, err));
done:
    return rc;
}

int cache_keys(const float **keys, const float **values, struct qt_attention *a, float *k, float *v,
               const struct layer_run *r, struct qt_err *err)
{
    const struct qt_layer *l = r->layer;
    const struct qt_fake_quant *quant = &l->fake_quant;
    const struct layer_cache *cache = r->cache;
    const size_t width = a->kv_heads * a->head_dim;
    size_t m = r->m;
    float *exact = l->work.exact_keys;
    int rc = QT_OK;
    if (cache) {
        QT_TRY(append(&k, cache->k, cache->work->k, k, width, r, err));
        QT_TRY(append(&v, cache->v, cache->work->v, v, width, r, err));
        m = cache->work->sequences * (r->past + r->seqlen);
        exact = cache->work->exact;
    }
    if (quant->cache) {
        a->seqlen += r->past;
        const bool grouped = l->model->cfg.arch->grouped_qkv;
        QT_TRY(quant->cache(quant->cache_ctx, l->be, k, v, exact,
                            layer_linear_of(l->def, grouped ? ROLE_QKV : ROLE_K),
                            layer_linear_of(l->def, grouped ? ROLE_QKV : ROLE_V), m, a, err));
        a->seqlen = r->seqlen;
    }
    *keys = k;
    *values = v;
done:
    return rc;
}

int cache_convolve(float *y, const float *x, enum role part, const struct layer_run *r,
                   struct qt_err *err)
{
    struct qt_backend *be = r->layer->be;
    const struct layer_cache *cache = r->cache;
    const struct loaded *loaded = &r->layer->parts[part];
    const size_t width = r->layer->def->parts[part].n, kernel = r->layer->def->parts[part].k;
    if (!cache)
        return be->convolve(be, y, x, loaded->weight, loaded->bias, r->m, r->seqlen, width, kernel,
                            err);
    const struct cache_work *work = cache->work;
    const size_t tail = (kernel - 1) * width, n = r->seqlen * width, ld = tail + n;
    const size_t sequences = work->sequences;
    int rc = QT_OK;
    if (tail)
        QT_TRY(be->copy_columns(be, work->mixed, ld, cache->tail, tail, tail, sequences, err));
    QT_TRY(be->copy_columns(be, work->mixed + tail, ld, x, n, n, sequences, err));
    QT_TRY(be->convolve(be, work->convolved, work->mixed, loaded->weight, loaded->bias,
                        sequences * (r->seqlen + kernel - 1), r->seqlen + kernel - 1, width, kernel,
                        err));
    QT_TRY(be->copy_columns(be, y, n, work->convolved + tail, ld, n, sequences, err));
    if (tail)
        QT_TRY(be->copy_columns(be, cache->tail, tail, work->mixed + n, ld, tail, sequences, err));
done:
    return rc;
}
