/* GGUF files: keys, tensors, and the checkpoint that one or more files make. */
#include "formats/gguf.h"

#include <stdio.h>

enum {
    TYPES = 13,   /* types of values */
    MIN_KEY = 13, /* bytes: empty name, type, U8 */
    MIN_TENSOR = 24,
    MAX_DIMS = 4,
};

bool qt_gguf_name_ok(const char *name)
{
    return qt_name_ends_in(name, ".gguf");
}

void qt_gguf_free(struct qt_gguf *g)
{
    if (!g)
        return;
    qt_free(g->keys);
    qt_free(g);
}

/* ---- reading a header ----------------------------------------------------------------------- */

struct cursor {
    const unsigned char *data;
    size_t size, at;
    const char *path;
    struct qt_err *err;
};

static int bad(const struct cursor *c, const char *what)
{
    return qt_fail(c->err, QT_E_INPUT, c->path, NULL, "GGUF header, offset %zu: %s", c->at, what);
}

static int skip(struct cursor *c, size_t n)
{
    if (n > c->size - c->at)
        return bad(c, "the file ends too early");
    c->at += n;
    return QT_OK;
}

static int read_u32(uint32_t *out, struct cursor *c)
{
    const size_t at = c->at;
    int rc = skip(c, sizeof *out);
    if (rc == QT_OK)
        memcpy(out, c->data + at, sizeof *out);
    return rc;
}

static int read_u64(size_t *out, struct cursor *c)
{
    const size_t at = c->at;
    uint64_t v;
    int rc = skip(c, sizeof v);
    if (rc < 0)
        return rc;
    memcpy(&v, c->data + at, sizeof v);
    *out = v;
    return QT_OK;
}

static int read_text(struct qt_gguf_text *out, struct cursor *c)
{
    int rc = read_u64(&out->size, c);
    out->s = (const char *)c->data + c->at;
    return rc < 0 ? rc : skip(c, out->size);
}

/* Bytes of a value by type; 0: a string or an array. */
static const unsigned char value_bytes[TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

static int read_values(struct cursor *c, uint32_t type, size_t n)
{
    struct qt_gguf_text ignored;
    size_t bytes;
    int rc = QT_OK;
    if (type != QT_GGUF_TYPE_STRING)
        return qt_mul_overflow(&bytes, n, value_bytes[type]) ? bad(c, "the file ends too early")
                                                             : skip(c, bytes);
    for (size_t i = 0; i < n && rc == QT_OK; i++)
        rc = read_text(&ignored, c);
    return rc;
}

static int read_key(struct qt_gguf *g, struct cursor *c)
{
    struct qt_gguf_key key = {.count = 1};
    int rc;
    QT_TRY(read_text(&key.name, c));
    QT_TRY(read_u32(&key.type, c));
    key.array = key.type == QT_GGUF_TYPE_ARRAY;
    if (key.array) {
        QT_TRY(read_u32(&key.type, c));
        QT_TRY(read_u64(&key.count, c));
    }
    if (key.type >= TYPES || key.type == QT_GGUF_TYPE_ARRAY)
        return bad(c, "unknown type of a value");
    key.at = c->at;
    QT_TRY(read_values(c, key.type, key.count));
    QT_TRY(qt_array_grow(&g->keys, &g->capacity, g->count + 1, sizeof *g->keys, c->err));
    g->keys[g->count++] = key;
done:
    return rc;
}

/* ---- keys ----------------------------------------------------------------------------------- */

bool qt_gguf_is(const struct qt_gguf_text *text, const char *s)
{
    return strlen(s) == text->size && memcmp(text->s, s, text->size) == 0;
}

const struct qt_gguf_key *qt_gguf_key(const struct qt_gguf *g, const char *prefix, const char *name)
{
    char full[128];
    snprintf(full, sizeof full, "%s%s", prefix, name);
    for (size_t i = 0; i < g->count; i++)
        if (qt_gguf_is(&g->keys[i].name, full))
            return &g->keys[i];
    return NULL;
}

/* A value that is no array and has the type, or any type of numbers. */
static const struct qt_gguf_key *find_value(const struct qt_gguf *g, const char *prefix,
                                            const char *name, int type)
{
    const struct qt_gguf_key *key = qt_gguf_key(g, prefix, name);
    const bool number = key && key->type != QT_GGUF_TYPE_STRING && key->type != QT_GGUF_TYPE_BOOL;
    return key && !key->array && (type < 0 ? number : key->type == (uint32_t)type) ? key : NULL;
}

bool qt_gguf_get_real(double *out, const struct qt_gguf *g, const char *prefix, const char *name)
{
    const struct qt_gguf_key *key = find_value(g, prefix, name, -1);
    union {
        uint8_t u8;
        int8_t i8;
        uint16_t u16;
        int16_t i16;
        uint32_t u32;
        int32_t i32;
        float f32;
        uint64_t u64;
        int64_t i64;
        double f64;
    } v = {0};
    if (!key)
        return false;
    memcpy(&v, g->data + key->at, value_bytes[key->type]);
    const double values[TYPES] = {v.u8,          v.i8,          v.u16, v.i16, v.u32,
                                  v.i32,         (double)v.f32, 0,     0,     0,
                                  (double)v.u64, (double)v.i64, v.f64};
    *out = values[key->type];
    return true;
}

bool qt_gguf_get_size(size_t *out, const struct qt_gguf *g, const char *prefix, const char *name)
{
    double v;
    if (!qt_gguf_get_real(&v, g, prefix, name) || !(v >= 0 && v < 9e15) || v != (double)(size_t)v)
        return false;
    *out = (size_t)v;
    return true;
}

bool qt_gguf_get_bool(bool *out, const struct qt_gguf *g, const char *prefix, const char *name)
{
    const struct qt_gguf_key *key = find_value(g, prefix, name, QT_GGUF_TYPE_BOOL);
    if (key)
        *out = g->data[key->at] != 0;
    return key != NULL;
}

struct qt_gguf_text qt_gguf_next(const struct qt_gguf *g, size_t *at)
{
    uint64_t size;
    memcpy(&size, g->data + *at, sizeof size);
    const struct qt_gguf_text text = {(const char *)g->data + *at + sizeof size, size};
    *at += sizeof size + size;
    return text;
}

bool qt_gguf_get_text(struct qt_gguf_text *out, const struct qt_gguf *g, const char *prefix,
                      const char *name)
{
    const struct qt_gguf_key *key = find_value(g, prefix, name, QT_GGUF_TYPE_STRING);
    size_t at = key ? key->at : 0;
    if (key)
        *out = qt_gguf_next(g, &at);
    return key != NULL;
}

uint32_t qt_gguf_word(const struct qt_gguf *g, const struct qt_gguf_key *array, size_t i)
{
    uint32_t word;
    memcpy(&word, g->data + array->at + 4 * i, sizeof word);
    return word;
}

/* ---- tensors -------------------------------------------------------------------------------- */

static int read_shape(struct qt_slot *slot, struct cursor *c)
{
    struct qt_tensor *t = &slot->info;
    uint32_t dims, type;
    int rc;
    QT_TRY(read_u32(&dims, c));
    if (dims > MAX_DIMS)
        return bad(c, "a tensor has more than 4 dimensions");
    t->ndim = (int)dims;
    for (uint32_t d = 0; d < dims; d++)
        QT_TRY(read_u64(&t->shape[dims - 1 - d], c));
    while (t->ndim > 1 && t->shape[0] == 1) /* writers may pad shapes */
        memmove(t->shape, t->shape + 1, (size_t)--t->ndim * sizeof *t->shape);
    QT_TRY(read_u32(&type, c));
    QT_TRY(read_u64(&slot->offset, c));
    const struct qt_gguf_block *block = qt_gguf_block_find(type);
    if (!block)
        return qt_fail(c->err, QT_E_UNSUPPORTED, c->path, t->name,
                       "has GGUF's type %u, which is not supported", type);
    t->dtype = block->dtype;
    if (block->decode) {
        size_t *k = &t->shape[t->ndim ? t->ndim - 1 : 0];
        if (t->ndim == 0 || *k % block->count)
            return qt_fail(c->err, QT_E_INPUT, c->path, t->name,
                           "its rows are no multiples of the %zu weights of a block of %s",
                           block->count, block->name);
        if (qt_mul_overflow(k, *k / block->count, block->bytes))
            return qt_fail(c->err, QT_E_INPUT, c->path, t->name, "shape is too large");
        slot->block = block;
    }
    rc = qt_tensor_measure(t, c->err);
done:
    return rc;
}

static int read_tensors(struct qt_shard *shard, struct cursor *c, size_t count)
{
    struct qt_gguf_text name;
    struct qt_slot *slot;
    int rc = QT_OK;
    for (size_t i = 0; i < count; i++) {
        QT_TRY(read_text(&name, c));
        QT_TRY(qt_shard_add(&slot, shard, name.s, name.size, c->err));
        QT_TRY(read_shape(slot, c));
    }
done:
    return rc;
}

/* Offsets become those of the file; tensors must lie in it, one behind the other. */
static int place_tensors(struct qt_shard *shard, size_t start, size_t align, struct qt_err *err)
{
    size_t end = start;
    for (size_t i = 0; i < shard->count; i++) {
        struct qt_slot *slot = &shard->slots[i];
        const struct qt_tensor *t = &slot->info;
        size_t last;
        if (slot->offset % align)
            return qt_fail(err, QT_E_INPUT, shard->path, t->name,
                           "its offset %zu is no multiple of the alignment %zu", slot->offset,
                           align);
        if (qt_add_overflow(&slot->offset, slot->offset, start) ||
            qt_add_overflow(&last, slot->offset, t->nbytes) || last > shard->map.size)
            return qt_fail(err, QT_E_INPUT, shard->path, t->name,
                           "its data reaches beyond the end of the file (%zu bytes): the file is "
                           "incomplete",
                           shard->map.size);
    }
    qt_shard_sort(shard);
    for (size_t i = 0; i < shard->count; i++) {
        const struct qt_slot *slot = &shard->slots[i];
        if (slot->offset < end)
            return qt_fail(err, QT_E_INPUT, shard->path, slot->info.name,
                           "its data overlaps with that of another tensor");
        end = slot->offset + slot->info.nbytes;
    }
    return QT_OK;
}

static int read_version(struct cursor *c)
{
    enum { OLDEST = 2, NEWEST = 3 };
    uint32_t version;
    int rc;
    QT_TRY(skip(c, 4));
    QT_TRY(read_u32(&version, c));
    if (version < OLDEST || version > NEWEST)
        rc = qt_fail(c->err, QT_E_UNSUPPORTED, c->path, NULL,
                     "GGUF of version %u; versions 2 and 3, little-endian, are supported", version);
done:
    return rc;
}

int qt_gguf_open(struct qt_shard *shard, struct qt_err *err)
{
    struct cursor c = {shard->map.data, shard->map.size, 0, shard->path, err};
    size_t tensors, keys, align = 32, start;
    int rc;
    if (c.size < 4 || memcmp(c.data, "GGUF", 4) != 0) {
        QT_TRY(qt_kind_expect(QT_KIND_GGUF, NULL, c.data, c.size, shard->path, err));
        return qt_fail(err, QT_E_INPUT, shard->path, NULL, "not a GGUF file");
    }
    QT_TRY(qt_array_new(&shard->gguf, 1, sizeof *shard->gguf, err));
    shard->gguf->data = c.data;
    shard->gguf->path = shard->path;
    QT_TRY(read_version(&c));
    QT_TRY(read_u64(&tensors, &c));
    QT_TRY(read_u64(&keys, &c));
    if (keys > c.size / MIN_KEY || tensors > c.size / MIN_TENSOR)
        return bad(&c, "more keys or tensors than the file has room for");
    for (size_t i = 0; i < keys; i++)
        QT_TRY(read_key(shard->gguf, &c));
    QT_TRY(read_tensors(shard, &c, tensors));
    qt_gguf_get_size(&align, shard->gguf, "", "general.alignment");
    if (align == 0 || align % 8 || align > QT_MAX_HEADER)
        return bad(&c, "general.alignment is no multiple of 8");
    start = qt_round_up(c.at, align);
    QT_TRY(place_tensors(shard, qt_min_size(start, c.size), align, err));
done:
    return rc;
}

/* ---- a checkpoint --------------------------------------------------------------------------- */

struct adopt {
    size_t count; /* of files */
    const struct qt_gguf *g;
    struct qt_gguf_facts facts;
    size_t head_dim;
    struct qt_err *err;
};

static int find_family(struct adopt *a)
{
    struct qt_gguf_text arch = {"", 0};
    const struct qt_gguf_family *f;
    size_t experts = 0;
    if (!qt_gguf_get_text(&arch, a->g, "", "general.architecture"))
        return qt_fail(a->err, QT_E_INPUT, a->g->path, NULL,
                       "has no key general.architecture: not a model%s",
                       a->count > 1 ? ", or not the first of several files" : "");
    for (size_t i = 0; (f = qt_gguf_family_at(i)) != NULL && !a->facts.family; i++)
        if (f->class && qt_gguf_is(&arch, f->name))
            a->facts.family = f;
    if (!a->facts.family)
        return qt_fail(a->err, QT_E_UNSUPPORTED, a->g->path, NULL,
                       "the architecture '%.*s' is not supported in GGUF files; give the "
                       "safetensors checkpoint that the file was made from",
                       (int)qt_min_size(arch.size, 60), arch.s);
    snprintf(a->facts.prefix, sizeof a->facts.prefix, "%s.", a->facts.family->name);
    qt_gguf_get_size(&experts, a->g, a->facts.prefix, "expert_count");
    if (experts && strcmp(a->facts.family->family, "llama") == 0)
        a->facts.family = qt_gguf_family_find("mixtral");
    if (qt_gguf_key(a->g, a->facts.prefix, "attention.sliding_window") &&
        strcmp(a->facts.family->family, "olmo2") == 0)
        a->facts.family = qt_gguf_family_find("olmo3");
    return QT_OK;
}

/* Rows of a head, for the order of the rows of queries and keys. */
static int find_head(struct adopt *a)
{
    size_t hidden = 0, heads = 0;
    if (!qt_gguf_get_size(&a->head_dim, a->g, a->facts.prefix, "attention.key_length") &&
        qt_gguf_get_size(&hidden, a->g, a->facts.prefix, "embedding_length") &&
        qt_gguf_get_size(&heads, a->g, a->facts.prefix, "attention.head_count") && heads)
        a->head_dim = hidden / heads;
    if (a->head_dim == 0 || a->head_dim % 2)
        return qt_fail(a->err, QT_E_INPUT, a->g->path, NULL,
                       "its keys give no even size of an attention head");
    return QT_OK;
}

/* Factors of the rotary embedding become a part of config.json. */
static bool take_factors(struct adopt *a, const struct qt_slot *slot)
{
    const struct qt_tensor *t = &slot->info;
    const bool is_long = strcmp(t->name, "rope_factors_long.weight") == 0;
    const bool is_short = strcmp(t->name, "rope_factors_short.weight") == 0;
    const bool both = strcmp(t->name, "rope_freqs.weight") == 0;
    if ((!is_long && !is_short && !both) || t->dtype != QT_F32 || t->count == 0)
        return false;
    const float *list = (const float *)(const void *)(slot->shard->map.data + slot->offset);
    a->facts.factors = a->facts.factors ? qt_min_size(a->facts.factors, t->count) : t->count;
    if (is_long || both)
        a->facts.long_factors = list;
    if (is_short || both)
        a->facts.short_factors = list;
    return true;
}

static int rename_slot(struct adopt *a, struct qt_slot *slot)
{
    struct qt_tensor *t = &slot->info;
    const size_t rows = t->ndim ? t->shape[0] : 0;
    struct qt_gguf_origin origin;
    char *name;
    if (!qt_gguf_origin(&origin, a->facts.family, t->name))
        return qt_fail(a->err, QT_E_UNSUPPORTED, t->file, t->name,
                       "the architecture '%s' has no tensor of this name", a->facts.family->name);
    slot->head = origin.rotary ? a->head_dim : 0;
    slot->plus_1 = origin.plus_1;
    if (t->ndim == 1 && origin.matrix) {
        t->shape[1] = t->shape[0]; /* one row, such as a gate */
        t->shape[0] = 1;
        t->ndim = 2;
    }
    if (t->ndim < 1 || (origin.stacked && t->ndim != (origin.matrix ? 3 : 2)) ||
        (!origin.stacked && t->ndim > 2) || (slot->head && rows % slot->head))
        return qt_fail(a->err, QT_E_INPUT, t->file, t->name,
                       "its shape is not that of the tensor %s", origin.name);
    int rc = qt_string_copy(&name, origin.name, a->err);
    if (rc < 0)
        return rc;
    qt_free((char *)(uintptr_t)t->name);
    t->name = name;
    return QT_OK;
}

/* Notes what config.json depends on. */
static void note(struct qt_gguf_facts *facts, const struct qt_slot *slot)
{
    const struct qt_tensor *t = &slot->info;
    if (strcmp(t->name, "model.embed_tokens.weight") == 0)
        facts->vocab = t->shape[0];
    facts->head |= strcmp(t->name, "lm_head.weight") == 0;
    facts->head_norms |= qt_name_ends_in(t->name, ".q_norm.weight");
    facts->qkv_bias |= qt_name_ends_in(t->name, ".q_proj.bias");
    facts->mlp_bias |= qt_name_ends_in(t->name, ".gate_proj.bias");
    if (t->ndim >= 2 && !slot->block && strstr(t->name, "_proj."))
        facts->dtype = t->dtype;
}

static int rename_shard(struct adopt *a, struct qt_shard *shard)
{
    size_t kept = 0;
    int rc = QT_OK;
    for (size_t i = 0; i < shard->count; i++) {
        struct qt_slot *slot = &shard->slots[i];
        if (take_factors(a, slot)) {
            qt_free((char *)(uintptr_t)slot->info.name);
            slot->info.name = NULL;
            continue;
        }
        if (rc == QT_OK)
            rc = rename_slot(a, slot);
        if (rc == QT_OK)
            note(&a->facts, slot);
        if (kept != i) {
            shard->slots[kept] = *slot;
            slot->info.name = NULL;
        }
        kept++;
    }
    shard->count = kept;
    return rc;
}

/* ---- side files ----------------------------------------------------------------------------- */

static const char *const *names(void)
{
    static const char *list[64];
    for (size_t i = 0; i + 1 < sizeof list / sizeof *list; i++)
        list[i] = qt_side_file(i);
    return list;
}

static int write_json(const char *dir, const char *name, const json_t *value, struct qt_err *err)
{
    char *path = NULL, *text = NULL;
    size_t size;
    int rc;
    QT_TRY(qt_json_text(&text, &size, value, JSON_INDENT(2) | JSON_REAL_PRECISION(9), err));
    QT_TRY(qt_path_join(&path, dir, name, err));
    QT_TRY(qt_file_write(path, text, size, err));
done:
    qt_free(path);
    qt_free(text);
    return rc;
}

static int copy_file(const char *dir, const char *name, const char *from, struct qt_err *err)
{
    struct qt_map map;
    char *to = NULL;
    int rc = qt_map_open(&map, from, err);
    if (rc < 0)
        return rc;
    QT_TRY(qt_path_join(&to, dir, name, err));
    QT_TRY(qt_file_write(to, map.data, map.size, err));
done:
    qt_free(to);
    qt_map_close(&map);
    return rc;
}

/* Copies the side files of a directory but config.json, which is made from keys. */
static int copy_side_files(bool *tokenizer, const char *dir, const char *beside, struct qt_err *err)
{
    const char *name, *why;
    int rc = QT_OK;
    *tokenizer = false;
    for (size_t i = 0; (name = qt_side_file(i)) != NULL && rc == QT_OK; i++) {
        char *path = NULL;
        if (strcmp(name, "config.json") != 0)
            rc = qt_side_file_find(&path, &why, beside, name, err);
        if (rc == QT_OK && path)
            rc = copy_file(dir, name, path, err);
        *tokenizer |= path && strcmp(name, "tokenizer.json") == 0;
        qt_free(path);
    }
    return rc;
}

static int write_side_files(const char *dir, const struct adopt *a, const char *beside)
{
    json_t *config = NULL, *tokenizer = NULL, *settings = NULL;
    bool given;
    int rc;
    QT_TRY(qt_gguf_make_config(&config, a->g, &a->facts, a->err));
    QT_TRY(write_json(dir, "config.json", config, a->err));
    QT_TRY(copy_side_files(&given, dir, beside, a->err));
    if (!given)
        QT_TRY(qt_gguf_make_tokenizer(&tokenizer, &settings, a->g, a->err));
    if (tokenizer)
        QT_TRY(write_json(dir, "tokenizer.json", tokenizer, a->err));
    if (settings)
        QT_TRY(write_json(dir, "tokenizer_config.json", settings, a->err));
done:
    json_decref(config);
    json_decref(tokenizer);
    json_decref(settings);
    return rc;
}

int qt_gguf_adopt(char **dir, struct qt_shard *shards, size_t count, const char *beside,
                  struct qt_err *err)
{
    struct adopt a = {.count = count, .g = shards[0].gguf, .facts = {.dtype = QT_F16}, .err = err};
    int rc;
    *dir = NULL;
    QT_TRY(find_family(&a));
    QT_TRY(find_head(&a));
    for (size_t i = 0; i < count; i++)
        QT_TRY(rename_shard(&a, &shards[i]));
    if (a.facts.vocab == 0)
        return qt_fail(err, QT_E_INPUT, a.g->path, NULL, "has no tensor token_embd.weight%s",
                       count > 1 ? "" : ": not a model, or one of several files");
    QT_TRY(qt_tempdir_make(dir, names(), err));
    QT_TRY(write_side_files(*dir, &a, beside));
done:
    if (rc < 0) {
        qt_tempdir_remove(*dir);
        *dir = NULL;
    }
    return rc;
}
