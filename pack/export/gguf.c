/*
 * gguf: files of llama.cpp and what is built on it (Ollama, LM Studio). A file has the sizes of the
 * model and its tokenizer, too, so nothing else is written: model.gguf, or, if it is split,
 * model-00001-of-0000N.gguf, of which the first has all keys.
 *
 * Integers become blocks of 32 weights, each with its scale: larger groups repeat theirs.
 */
#include "pack/export/gguf.h"
#include "pack/roles.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { MAX_FILES = 65535, PIECE = 1 << 16 /* elements that are converted at once */ };

/* A tensor of the container. */
struct source {
    const struct qt_export_matrix *matrix; /* or */
    const struct qt_tensor *copied;
};

/* Rows, or with `channels` channels, that change their order: within heads of `head` rows, or, from
 * number `first` on, the value heads of `size` rows. head 0, heads 0: none do. */
struct order {
    size_t head, first, size, heads, keys;
    bool channels;
};

struct tensor {
    char name[QT_GGUF_NAME];
    const struct qt_gguf_type *type;
    size_t rows, k; /* rows 0: a vector */
    /* [slices] tensors of all experts one after the other, or one tensor; owned. NULL: values. */
    struct source *sources;
    size_t slices;
    bool stacked;
    const float *values;
    struct order order;
    bool plus_1, decay;
    uint64_t bytes;
};

struct gguf {
    const struct qt_export *x;
    struct qt_gguf_bytes keys;
    struct qt_gguf_factors factors;
    const struct qt_gguf_arch *arch;
    const struct qt_gguf_family *names;
    size_t layers, head_dim, experts;
    size_t value_heads, key_heads, value_dim; /* of gated DeltaNet */
    bool tied;
    const char *prefix, *head; /* as of qt_model_details */
    struct tensor *tensors;
    size_t count;
    size_t files, *first; /* [files + 1] the first tensor of each file */
};

static enum qt_export_fit fit(const char **why, const struct qt_spec *spec)
{
    enum qt_export_fit out;
    qt_gguf_type_of(&out, why, spec);
    return out;
}

static int describe(struct qt_export_matrix *m, struct qt_err *err)
{
    if (m->k % QT_GGUF_BLOCK == 0)
        return QT_OK;
    return qt_fail(
        err, QT_E_UNSUPPORTED, NULL, NULL,
        "%zu channels are no multiple of %d; a rule 'NAME=none' leaves the tensor as it is", m->k,
        QT_GGUF_BLOCK);
}

static int refuse(const struct gguf *g, const char *tensor, const char *what, struct qt_err *err)
{
    return qt_fail(err, QT_E_UNSUPPORTED, qt_container_dir(g->x->container), tensor, "%s", what);
}

/* ---- plan: tensors -------------------------------------------------------------------------- */

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

static int add_source(struct gguf *g, const char *name, struct source source, struct qt_err *err)
{
    struct qt_gguf_place place;
    struct tensor *t, shape = {0};
    if (!qt_gguf_place(&place, g->names, usual_name(g, name), g->tied))
        return refuse(g, name, "gguf has no place for this tensor in its architecture", err);
    if (place.skip)
        return QT_OK;
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
    QT_TRY(qt_array_new(&g->tensors, x->count + x->ncopied + 2, sizeof *g->tensors, err));
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

/* ---- plan: files ---------------------------------------------------------------------------- */

static uint64_t padded(uint64_t bytes)
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
        const uint64_t more = padded(g->tensors[i].bytes);
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

static int plan(struct qt_export *x, uint64_t *bytes, struct qt_err *err)
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

static void release(struct qt_export *x)
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

/* ---- data ----------------------------------------------------------------------------------- */

/* Where row or channel i of the source comes. */
static size_t place_of(const struct order *o, size_t i)
{
    if (o->head)
        return qt_gguf_row(i, o->head);
    if (!o->heads || i < o->first)
        return i;
    const size_t head = (i - o->first) / o->size;
    return i + (qt_gguf_value_head(head, o->heads, o->keys) - head) * o->size;
}

/* The reverse. */
static size_t source_of(const struct order *o, size_t i)
{
    if (o->head) {
        const size_t r = i % o->head, half = o->head / 2;
        return i - r + r % 2 * half + r / 2;
    }
    if (!o->heads || i < o->first)
        return i;
    const size_t head = (i - o->first) / o->size;
    return i + (qt_gguf_value_head(head, o->heads, o->heads / o->keys) - head) * o->size;
}

static void convert(const struct qt_export_matrix *m, const struct qt_export_panel *panel)
{
    const struct tensor *t = m->own;
    const size_t blocks = m->k / QT_GGUF_BLOCK, groups = m->codes.groups;
    for (size_t r = 0; r < panel->rows; r++) {
        const size_t from = panel->row0 + r;
        const size_t row = t->order.channels ? from : place_of(&t->order, from);
        for (size_t b = 0; b < blocks; b++) {
            const size_t to =
                t->order.channels ? place_of(&t->order, b * QT_GGUF_BLOCK) / QT_GGUF_BLOCK : b;
            unsigned char *dst =
                (unsigned char *)m->tensor[0].data + (row * blocks + to) * t->type->bytes;
            const size_t at = r * m->k + b * QT_GGUF_BLOCK;
            const size_t g = r * groups + b * QT_GGUF_BLOCK / m->codes.group;
            const float zero = m->codes.asymmetric ? (float)panel->zero[g] : 0;
            t->type->encode(dst, panel->code + at, panel->scale[g], zero,
                            panel->decoded ? panel->decoded + at : NULL);
        }
    }
}

static int write_matrix(struct qt_export *x, struct tensor *t, struct qt_export_matrix *m,
                        struct qt_err *err)
{
    struct qt_export_tensor *data = &m->tensor[0];
    int rc;
    data->bytes = m->n * (m->k / QT_GGUF_BLOCK) * t->type->bytes;
    m->own = t;
    QT_TRY(qt_array_new(&data->data, data->bytes, 1, err));
    QT_TRY(qt_export_panels(x, m, convert, err));
    QT_TRY(qt_output_write(x->out, data->data, data->bytes, err));
done:
    qt_free(data->data);
    data->data = NULL;
    return rc;
}

static enum qt_dtype dtype_of(const struct qt_gguf_type *type)
{
    static const enum qt_dtype all[] = {QT_F32, QT_F16, QT_BF16};
    size_t i = 0;
    while (qt_gguf_type_plain(all[i]) != type)
        i++;
    return all[i];
}

/* Stores n values in another dtype; false if one is beyond its range. */
static bool store(void *dst, enum qt_dtype dtype, const float *v, size_t n)
{
    bool good = true;
    for (size_t i = 0; i < n; i++) {
        if (dtype == QT_F32)
            ((float *)dst)[i] = v[i];
        else
            ((uint16_t *)dst)[i] = dtype == QT_F16 ? qt_f32_to_f16(v[i]) : qt_f32_to_bf16(v[i]);
        good = good && (dtype != QT_F16 || !isfinite(v[i]) ||
                        isfinite(qt_f16_to_f32(((uint16_t *)dst)[i])));
    }
    return good;
}

/* Writes elements [first, first + n) of a copied tensor. */
static int write_piece(struct qt_export *x, const struct tensor *t, const struct qt_tensor *from,
                       const unsigned char *data, size_t first, size_t n, float *values,
                       unsigned char *stored, struct qt_err *err)
{
    const enum qt_dtype dtype = dtype_of(t->type);
    qt_to_f32(values, data + first * (qt_dtype_bits(from->dtype) / 8), from->dtype, n);
    for (size_t i = 0; t->plus_1 && i < n; i++)
        values[i] += 1;
    for (size_t i = 0; t->decay && i < n; i++)
        values[i] = -expf(values[i]);
    if (!store(stored, dtype, values, n))
        return qt_fail(err, QT_E_UNSUPPORTED, from->file, from->name,
                       "a value is beyond the largest float16; --dtype bfloat16 has a wider range");
    return qt_output_write(x->out, stored, n * (qt_dtype_bits(dtype) / 8), err);
}

static int write_copied(struct qt_export *x, const struct tensor *t, const struct qt_tensor *from,
                        struct qt_err *err)
{
    /* What is reordered: rows, elements of a vector, or value heads in rows. */
    const struct order *o = &t->order;
    const bool reordered = o->head || o->heads;
    const size_t k = t->rows ? t->k : 1, count = (t->rows ? t->rows : 1) * t->k;
    const size_t unit = !reordered ? count : o->channels ? o->size : k;
    unsigned char *stored = NULL;
    float *values = NULL;
    struct qt_blob blob;
    int rc = qt_export_read_copied(&blob, x, from, err);
    if (rc < 0)
        return rc;
    QT_TRY(qt_array_new(&values, PIECE, sizeof *values, err));
    QT_TRY(qt_array_new(&stored, PIECE, sizeof(float), err));
    for (size_t at = 0; at < count; at += unit) {
        const size_t first = o->channels ? at / k * k + source_of(o, at % k)
                             : reordered ? source_of(o, at / k) * k
                                         : at;
        for (size_t i = 0; i < unit; i += PIECE)
            QT_TRY(write_piece(x, t, from, blob.data, first + i, qt_min_size(PIECE, unit - i),
                               values, stored, err));
    }
done:
    qt_free(values);
    qt_free(stored);
    qt_blob_free(&blob);
    return rc;
}

static int write_tensor(struct qt_export *x, struct tensor *t, struct qt_err *err)
{
    int rc = QT_OK;
    if (t->values)
        QT_TRY(qt_output_write(x->out, t->values, (size_t)t->bytes, err));
    for (size_t i = 0; t->sources && i < t->slices; i++) {
        const struct source *s = &t->sources[i];
        QT_TRY(qt_stop_check(err));
        QT_TRY(s->copied ? write_copied(x, t, s->copied, err)
                         : write_matrix(x, t, &x->matrix[s->matrix - x->matrix], err));
    }
    QT_TRY(qt_output_pad(x->out, QT_GGUF_ALIGN, err));
done:
    return rc;
}

/* ---- files ---------------------------------------------------------------------------------- */

static void put_info(struct qt_gguf_bytes *b, const struct tensor *t, uint64_t offset)
{
    const uint64_t dims[3] = {t->k, t->rows ? t->rows : t->slices, t->slices};
    const uint32_t ndim = 1u + (t->rows > 0) + t->stacked;
    qt_gguf_text(b, t->name, strlen(t->name));
    qt_gguf_raw(b, &ndim, sizeof ndim);
    qt_gguf_raw(b, dims, ndim * sizeof *dims);
    qt_gguf_raw(b, &t->type->id, sizeof t->type->id);
    qt_gguf_raw(b, &offset, sizeof offset);
}

/* The header of file number i; *data: bytes of what follows. */
static int make_header(struct qt_gguf_bytes *b, uint64_t *data, const struct gguf *g, size_t i)
{
    static const char zeros[QT_GGUF_ALIGN];
    const uint32_t version = 3;
    const uint64_t tensors = g->first[i + 1] - g->first[i];
    const uint64_t keys = (i == 0 ? g->keys.keys : 0) + (g->files > 1 ? 3 : 0);
    qt_gguf_raw(b, "GGUF", 4);
    qt_gguf_raw(b, &version, sizeof version);
    qt_gguf_raw(b, &tensors, sizeof tensors);
    qt_gguf_raw(b, &keys, sizeof keys);
    if (i == 0)
        qt_gguf_raw(b, g->keys.data, g->keys.size);
    if (g->files > 1) {
        qt_gguf_u16(b, "split.no", (uint16_t)i);
        qt_gguf_u16(b, "split.count", (uint16_t)g->files);
        qt_gguf_i32(b, "split.tensors.count", (int32_t)g->count);
    }
    *data = 0;
    for (size_t k = g->first[i]; k < g->first[i + 1]; k++) {
        put_info(b, &g->tensors[k], *data);
        *data += padded(g->tensors[k].bytes);
    }
    qt_gguf_raw(b, zeros, (size_t)(padded(b->size) - b->size));
    return b->rc;
}

static int write_file(struct qt_export *x, const struct gguf *g, size_t i, struct qt_err *err)
{
    struct qt_gguf_bytes header = {.err = err};
    char name[QT_WEIGHT_FILE_NAME];
    uint64_t data;
    int rc;
    qt_weight_file_name(name, i, g->files, "gguf");
    QT_TRY(make_header(&header, &data, g, i));
    QT_TRY(qt_output_create(x->out, name, header.size + data, err));
    QT_TRY(qt_output_write(x->out, header.data, header.size, err));
    for (size_t k = g->first[i]; k < g->first[i + 1]; k++) {
        QT_TRY(write_tensor(x, &g->tensors[k], err));
        qt_log_progress(x->opt->log, "export", (double)(k + 1), (double)g->count);
    }
    QT_TRY(qt_output_end(x->out, err));
done:
    qt_free(header.data);
    return rc;
}

static int write_files(struct qt_export *x, struct qt_err *err)
{
    const struct gguf *g = x->own;
    int rc = QT_OK;
    for (size_t i = 0; i < g->files && rc == QT_OK; i++)
        rc = write_file(x, g, i, err);
    return rc;
}

const struct qt_export_format qt_export_gguf = {
    .name = "gguf",
    .help = "one file with tokenizer; integers in blocks of 32",
    .runtimes = "llama.cpp, Ollama, LM Studio",
    .embeddings = true,
    .scale_dtype = QT_F16,
    .fit = fit,
    .describe = describe,
    .plan = plan,
    .write = write_files,
    .release = release,
};
