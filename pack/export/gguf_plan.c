/*
 * The plan of a GGUF file: the place, type and order of each tensor, the keys of the model, the
 * tensors of each file.
 */
#include "pack/export/gguf_plan.h"
#include "pack/roles.h"

#include <stdio.h>
#include <string.h>

enum { MAX_FILES = 65535 };

static int refuse(const struct gguf *g, const char *tensor, const char *what, struct qt_err *err)
{
    return qt_fail(err, QT_E_UNSUPPORTED, qt_container_dir(g->x->container), tensor, "%s", what);
}

/* ---- tensors -------------------------------------------------------------------------------- */

/* The type of a copied tensor. llama.cpp expects vectors and routers in F32. */
static const struct qt_gguf_type *copied_type(const struct qt_export *x, const struct qt_tensor *t,
                                              bool exact)
{
    static const enum qt_dtype by_option[] = {
        [QT_EXPORT_F16] = QT_F16, [QT_EXPORT_BF16] = QT_BF16, [QT_EXPORT_F32] = QT_F32};
    if (!qt_gguf_type_plain(t->dtype))
        return NULL;
    if (t->ndim == 1 || exact)
        return qt_gguf_type_plain(QT_F32);
    return qt_gguf_type_plain(x->opt->dtype == QT_EXPORT_AUTO ? t->dtype
                                                              : by_option[x->opt->dtype]);
}

/* The type of a matrix that is decoded: values of codes are exact in F32. */
static const struct qt_gguf_type *decoded_type(const struct qt_export *x)
{
    return qt_gguf_type_plain(x->opt->dtype == QT_EXPORT_F16    ? QT_F16
                              : x->opt->dtype == QT_EXPORT_BF16 ? QT_BF16
                                                                : QT_F32);
}

/* Finds the tensor of this name, or adds it. */
static int place_tensor(struct tensor **out, struct gguf *g, const struct qt_gguf_place *place,
                        struct qt_err *err)
{
    for (size_t i = 0; i < g->count; i++)
        if (strcmp(g->tensors[i].name, place->name) == 0) {
            *out = &g->tensors[i];
            return QT_OK;
        }
    struct tensor *t = *out = &g->tensors[g->count++];
    memcpy(t->name, place->name, sizeof t->name);
    t->stacked = place->stacked;
    t->slices = place->stacked ? g->experts : 1;
    t->plus_1 = place->plus_1;
    t->decay = place->decay;
    return qt_array_new(&t->sources, t->slices, sizeof *t->sources, err);
}

/* *out: the order of the tensor's rows or channels; false if it has other rows than heads. */
static bool find_order(struct order *out, const struct gguf *g, const struct qt_gguf_place *place,
                       size_t rows, size_t k)
{
    const size_t n = place->value_channels ? k : rows;
    *out = (struct order){.head = place->rotary ? g->head_dim : 0};
    if (place->values || place->value_channels) {
        out->heads = g->value_heads;
        out->keys = g->key_heads;
        out->size = n == g->value_heads ? 1 : g->value_dim;
        out->channels = place->value_channels;
        if (n < out->heads * out->size)
            return false;
        out->first = n - out->heads * out->size;
    }
    return !out->head || rows % out->head == 0;
}

/* Sets the type, rows (0: a vector) and channels of a source; false if GGUF does not have such
 * tensors. */
static bool shape_of(struct tensor *out, const struct gguf *g, const struct source *source,
                     const struct qt_gguf_place *place)
{
    const struct qt_export_matrix *m = source->matrix;
    const struct qt_tensor *c = source->copied;
    enum qt_export_fit unused;
    const char *why;
    const bool kernel = c && c->ndim == 3 && c->shape[1] == 1; /* of a convolution */
    if (c && (c->ndim < 1 || c->ndim > 2) && !kernel)
        return false;
    out->type = m ? qt_gguf_type_of(&unused, &why, m->spec) : copied_type(g->x, c, place->exact);
    out->rows = m ? m->n : c->ndim > 1 ? c->shape[0] : 0;
    out->k = m ? m->k : c->shape[c->ndim - 1];
    return out->type && find_order(&out->order, g, place, out->rows ? out->rows : out->k, out->k) &&
           (!m || !out->order.channels || out->order.size % QT_GGUF_BLOCK == 0) &&
           (!place->stacked || place->expert < g->experts) && place->layer < g->layers;
}

/* The name that the tensor has where the decoder is not part of a multimodal model. */
static const char *usual_name(const struct gguf *g, const char *name)
{
    const size_t prefix = strlen(g->prefix), outer = strlen(g->head) - strlen("lm_head");
    return strncmp(name, g->head, strlen(g->head)) == 0 ? name + outer
           : strncmp(name, g->prefix, prefix) == 0      ? name + prefix
                                                        : name;
}

/* kv_b_proj: its keys and its values, decoded. */
static int add_latent(struct gguf *g, const char *name, struct source source, size_t layer,
                      struct qt_err *err)
{
    const struct qt_export_matrix *m = source.matrix;
    const size_t rows = g->nope + g->latent_value;
    const size_t n = m ? m->n : source.copied->ndim == 2 ? source.copied->shape[0] : 0;
    const size_t k = m ? m->k : source.copied->ndim == 2 ? source.copied->shape[1] : 0;
    const struct qt_gguf_type *type =
        m ? decoded_type(g->x) : copied_type(g->x, source.copied, false);
    if (n != g->heads * rows || k != g->kv_rank || !type)
        return refuse(g, name, "gguf cannot hold this tensor: its dtype or shape", err);
    for (size_t i = 0; i < 2; i++) {
        struct qt_gguf_place place = {.layer = layer};
        struct tensor *t;
        snprintf(place.name, sizeof place.name, "blk.%zu.attn_%c_b.weight", layer, "kv"[i]);
        int rc = place_tensor(&t, g, &place, err);
        if (rc < 0)
            return rc;
        const size_t size = i ? g->latent_value : g->nope;
        t->latent = (struct latent){k, rows, i ? g->nope : 0, size, i == 0};
        t->type = type;
        t->stacked = true;
        t->heads = g->heads;
        t->rows = i ? size : k;
        t->k = i ? k : size;
        t->bytes = (uint64_t)g->heads * t->rows * t->k * type->bytes;
        t->sources[0] = source;
    }
    return QT_OK;
}

static int add_source(struct gguf *g, const char *name, struct source source, struct qt_err *err)
{
    struct qt_gguf_place place;
    struct tensor *t, shape = {0};
    if (!qt_gguf_place(&place, g->names, usual_name(g, name), g->tied))
        return refuse(g, name, "gguf has no place for this tensor in its architecture", err);
    if (place.skip)
        return QT_OK;
    if (place.latent)
        return add_latent(g, name, source, place.layer, err);
    if (!shape_of(&shape, g, &source, &place))
        return refuse(g, name, "gguf cannot hold this tensor: its dtype, shape or number", err);
    int rc = place_tensor(&t, g, &place, err);
    if (rc < 0)
        return rc;
    struct source *slot = &t->sources[place.stacked ? place.expert : 0];
    if (slot->matrix || slot->copied)
        return refuse(g, name, "another tensor has the same place in gguf", err);
    if (t->type && (t->type != shape.type || t->rows != shape.rows || t->k != shape.k))
        return refuse(g, name,
                      "gguf stores all experts of a layer as one tensor, but this one has another "
                      "scheme or shape than the others",
                      err);
    t->type = shape.type;
    t->rows = shape.rows;
    t->k = shape.k;
    t->order = shape.order;
    *slot = source;
    const uint64_t blocks = (uint64_t)(t->rows ? t->rows : 1) * t->slices * (t->k / t->type->count);
    t->bytes = blocks * t->type->bytes;
    return QT_OK;
}

static void add_factors(struct gguf *g)
{
    for (size_t i = 0; i < 2; i++) {
        if (!g->factors.list[i])
            continue;
        struct tensor *t = &g->tensors[g->count++];
        snprintf(t->name, sizeof t->name, "%s", g->factors.name[i]);
        t->type = qt_gguf_type_plain(QT_F32);
        t->k = g->factors.count;
        t->values = g->factors.list[i];
        t->bytes = (uint64_t)t->k * sizeof *t->values;
    }
}

/* Adds what is not quantized, of the decoder. */
static int add_copied(struct gguf *g, struct qt_err *err)
{
    const struct qt_export *x = g->x;
    const struct qt_ckpt *ckpt = qt_container_ckpt(x->container);
    size_t left_out = 0, mtp = 0;
    int rc = QT_OK;
    for (size_t i = 0; i < x->ncopied; i++)
        if (qt_name_is_multimodal(x->copied[i]->name))
            left_out++;
        else if (qt_name_is_mtp(ckpt, x->copied[i]->name))
            mtp++;
        else
            QT_TRY(add_source(g, x->copied[i]->name, (struct source){NULL, x->copied[i]}, err));
    if (left_out)
        qt_log_message(x->opt->log, QT_LOG_WARNING,
                       "%zu vision and audio tensors are left out: llama.cpp reads these from "
                       "another file (mmproj), which its own converter makes",
                       left_out);
    if (mtp)
        qt_log_message(x->opt->log, QT_LOG_WARNING, "%zu tensors of MTP layers are left out", mtp);
done:
    return rc;
}

static int add_tensors(struct gguf *g, struct qt_err *err)
{
    const struct qt_export *x = g->x;
    int rc;
    QT_TRY(qt_array_new(&g->tensors, 2 * (x->count + x->ncopied) + 2, sizeof *g->tensors, err));
    add_factors(g);
    QT_TRY(add_copied(g, err));
    for (size_t i = 0; i < x->count; i++) {
        x->matrix[i].own = NULL;
        QT_TRY(add_source(g, x->matrix[i].entry->name, (struct source){&x->matrix[i], NULL}, err));
    }
    for (size_t i = 0; i < g->count; i++) {
        const struct tensor *t = &g->tensors[i];
        for (size_t k = 0; t->sources && k < t->slices; k++)
            if (!t->sources[k].matrix && !t->sources[k].copied)
                return refuse(g, t->name, "gguf: an expert lacks this tensor", err);
    }
done:
    return rc;
}

/* ---- files ---------------------------------------------------------------------------------- */

uint64_t qt_gguf_padded(uint64_t bytes)
{
    return (bytes + QT_GGUF_ALIGN - 1) / QT_GGUF_ALIGN * QT_GGUF_ALIGN;
}

/* One file, unless the user asks for more: not all programs read split files. */
static int split(struct gguf *g, struct qt_err *err)
{
    const uint64_t limit = g->x->opt->max_shard_bytes;
    uint64_t used = 0;
    int rc = qt_array_new(&g->first, g->count + 2, sizeof *g->first, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < g->count; i++) {
        const uint64_t more = qt_gguf_padded(g->tensors[i].bytes);
        if (i == 0 || (limit && used + more > limit)) {
            g->first[g->files++] = i;
            used = 0;
        }
        used += more;
    }
    g->first[g->files] = g->count;
    return g->files <= MAX_FILES ? QT_OK
                                 : refuse(g, NULL,
                                          "gguf has at most 65535 files; --max-shard is "
                                          "too small",
                                          err);
}

/* The type that most bytes have. */
static uint32_t file_type(const struct gguf *g)
{
    const struct qt_gguf_type *best = NULL;
    uint64_t most = 0;
    for (size_t i = 0; i < g->count; i++) {
        uint64_t sum = 0;
        for (size_t k = 0; k < g->count; k++)
            if (g->tensors[k].type == g->tensors[i].type && g->tensors[k].type->encode)
                sum += g->tensors[k].bytes;
        if (sum > most)
            best = g->tensors[i].type;
        most = sum > most ? sum : most;
    }
    return best ? best->file_type : 0;
}

static int find_arch(struct gguf *g, const char *family, struct qt_err *err)
{
    char names[1024];
    g->arch = qt_gguf_arch_find(family);
    g->names = qt_gguf_family_find(family);
    if (g->arch && g->names)
        return QT_OK;
    qt_gguf_arch_names(names, sizeof names);
    return qt_fail(err, QT_E_UNSUPPORTED, qt_container_dir(g->x->container), NULL,
                   "gguf: the model_type '%s' is not in the table of architectures (%s)", family,
                   names);
}

static int plan_model(struct gguf *g, const struct qt_model *model, struct qt_err *err)
{
    const struct qt_model_info *info = qt_model_info(model);
    struct qt_model_details details;
    int rc;
    qt_model_details(&details, model);
    g->layers = info->layers;
    g->head_dim = info->head_dim;
    g->experts = details.routed;
    g->heads = info->heads;
    g->kv_rank = details.kv_rank;
    g->nope = details.nope;
    g->latent_value = details.value_dim;
    g->value_heads = details.delta_value_heads;
    g->key_heads = details.delta_key_heads;
    g->value_dim = details.delta_value_dim;
    g->tied = details.tied;
    g->prefix = details.prefix;
    g->head = details.head;
    QT_TRY(find_arch(g, info->family, err));
    QT_TRY(qt_gguf_arch_keys(&g->keys, &g->factors, g->arch, model, g->x, err));
    QT_TRY(qt_gguf_tokenizer(&g->keys, g->x, info->vocab, err));
    QT_TRY(add_tensors(g, err));
    qt_gguf_u32(&g->keys, "", "general.quantization_version", 2);
    qt_gguf_u32(&g->keys, "", "general.file_type", file_type(g));
    QT_TRY(g->keys.rc);
    QT_TRY(split(g, err));
done:
    return rc;
}

int qt_gguf_plan(struct qt_export *x, uint64_t *bytes, struct qt_err *err)
{
    const struct qt_weights w = qt_weights_of_container(x->container);
    struct qt_model *model = NULL;
    struct gguf *g;
    int rc = qt_array_new(&g, 1, sizeof *g, err);
    if (rc < 0)
        return rc;
    x->own = g;
    g->x = x;
    g->keys.err = err;
    QT_TRY(qt_model_open(&model, &w, err));
    QT_TRY(plan_model(g, model, err));
    *bytes = 0;
    for (size_t i = 0; i < g->count; i++)
        *bytes += g->tensors[i].bytes;
done:
    qt_model_close(model);
    return rc;
}

void qt_gguf_release(struct qt_export *x)
{
    struct gguf *g = x->own;
    if (!g)
        return;
    for (size_t i = 0; g->tensors && i < g->count; i++)
        qt_free(g->tensors[i].sources);
    qt_free(g->tensors);
    qt_free(g->first);
    qt_free(g->keys.data);
    qt_free(g->factors.list[0]);
    qt_free(g->factors.list[1]);
    qt_free(g);
    x->own = NULL;
}
