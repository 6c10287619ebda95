/*
 * Keys of a GGUF file -> tokenizer.json and tokenizer_config.json: "gpt2", byte-level BPE, and
 * "llama", the BPE of SentencePiece, whose merges follow from the scores of tokens
 * (pack/export/gguf_tokenizer.c goes the other way).
 */
#include "formats/gguf.h"

#include <stdio.h>
#include <stdlib.h>

enum { NORMAL = 1, UNKNOWN = 2, CONTROL = 3, USER = 4, UNUSED = 5, BYTE = 6 };

#define SPACE_MARK "\xe2\x96\x81" /* U+2581 */

struct token {
    struct qt_gguf_text text;
    int type;
    float score;
};

struct maker {
    const struct qt_gguf *g;
    struct token *list; /* by id */
    size_t count;
    json_t *vocab; /* text -> id; borrowed from the tokenizer */
    bool pieces;   /* "llama" */
    bool failed;   /* out of memory */
    struct qt_err *err;
};

static int bad(const struct maker *m, const char *what)
{
    return qt_fail(m->err, QT_E_INPUT, m->g->path, NULL, "%s", what);
}

static int unsupported(const struct maker *m, const char *what, struct qt_gguf_text name)
{
    return qt_fail(
        m->err, QT_E_UNSUPPORTED, m->g->path, NULL,
        "%s '%.*s' is not supported: put the tokenizer.json of the original model beside "
        "the file",
        what, (int)qt_min_size(name.size, 60), name.s);
}

static void set(struct maker *m, json_t *object, const char *key, json_t *value)
{
    m->failed |= json_object_set_new(object, key, value) < 0;
}

static void append(struct maker *m, json_t *array, json_t *value)
{
    m->failed |= json_array_append_new(array, value) < 0;
}

static json_t *text_json(struct qt_gguf_text text)
{
    return json_stringn(text.s, text.size);
}

/* ---- tokens --------------------------------------------------------------------------------- */

static const struct qt_gguf_key *array_of(const struct maker *m, const char *name, uint32_t type,
                                          size_t count)
{
    const struct qt_gguf_key *key = qt_gguf_key(m->g, "tokenizer.ggml.", name);
    return key && key->array && key->type == type && (count == 0 || key->count == count) ? key
                                                                                         : NULL;
}

/* tokens, token_type and scores; types may be absent. */
static int read_tokens(struct maker *m)
{
    enum { I32 = 5 };
    const struct qt_gguf_key *texts = array_of(m, "tokens", QT_GGUF_TYPE_STRING, 0);
    if (!texts || texts->count == 0)
        return bad(m, "tokenizer.ggml.tokens is no list of strings");
    m->count = texts->count;
    const struct qt_gguf_key *types = array_of(m, "token_type", I32, m->count);
    const struct qt_gguf_key *scores = array_of(m, "scores", QT_GGUF_TYPE_F32, m->count);
    size_t at = texts->at;
    int rc = qt_array_new(&m->list, m->count, sizeof *m->list, m->err);
    if (rc < 0)
        return rc;
    if (m->pieces && !scores)
        return bad(m, "tokenizer.ggml.scores is no list of a number for each token");
    for (size_t i = 0; i < m->count; i++) {
        struct token *t = &m->list[i];
        t->text = qt_gguf_next(m->g, &at);
        t->type = types ? (int)qt_gguf_word(m->g, types, i) : NORMAL;
        const uint32_t bits = scores ? qt_gguf_word(m->g, scores, i) : 0;
        memcpy(&t->score, &bits, sizeof bits);
        if (qt_utf8_check(t->text.s, t->text.size) < t->text.size ||
            memchr(t->text.s, 0, t->text.size))
            return qt_fail(m->err, QT_E_INPUT, m->g->path, NULL,
                           "token %zu is not UTF-8 text, or has a NUL", i);
    }
    return QT_OK;
}

/* Added tokens are in the vocabulary, too: libraries number those that are not by themselves. */
static int make_vocab(struct maker *m)
{
    size_t expected = 0;
    for (size_t i = 0; i < m->count; i++) {
        const struct token *t = &m->list[i];
        if (t->type == UNUSED)
            continue;
        expected++;
        m->failed |= json_object_setn_new(m->vocab, t->text.s, t->text.size,
                                          json_integer((json_int_t)i)) < 0;
    }
    if (!m->failed && json_object_size(m->vocab) != expected)
        return bad(m, "tokenizer.ggml.tokens has a token twice");
    return QT_OK;
}

static json_t *make_added(struct maker *m)
{
    json_t *out = json_array();
    for (size_t i = 0; i < m->count; i++) {
        const struct token *t = &m->list[i];
        if ((t->type != CONTROL && t->type != UNKNOWN && t->type != USER) || t->text.size == 0)
            continue;
        json_t *item = json_object();
        set(m, item, "id", json_integer((json_int_t)i));
        set(m, item, "content", text_json(t->text));
        set(m, item, "single_word", json_false());
        set(m, item, "lstrip", json_false());
        set(m, item, "rstrip", json_false());
        set(m, item, "normalized", json_false());
        set(m, item, "special", json_boolean(t->type != USER));
        append(m, out, item);
    }
    return out;
}

/* ---- merges --------------------------------------------------------------------------------- */

static int copy_merges(struct maker *m, json_t *out)
{
    const struct qt_gguf_key *merges = array_of(m, "merges", QT_GGUF_TYPE_STRING, 0);
    if (!merges)
        return bad(m, "tokenizer.ggml.merges is no list of strings");
    size_t at = merges->at;
    for (size_t i = 0; i < merges->count; i++) {
        const struct qt_gguf_text text = qt_gguf_next(m->g, &at);
        if (qt_utf8_check(text.s, text.size) < text.size)
            return bad(m, "tokenizer.ggml.merges has a string that is not UTF-8");
        append(m, out, text_json(text));
    }
    return QT_OK;
}

/* A way to make a token from two others. */
struct merge {
    float score;
    size_t left_size, size; /* bytes of the left part, of the token */
    size_t id;
};

/* By score, then as the converter of transformers sorts: longer parts first. */
static int compare_merges(const void *a, const void *b)
{
    const struct merge *x = a, *y = b;
    const size_t right_x = x->size - x->left_size, right_y = y->size - y->left_size;
    if (x->score != y->score)
        return x->score > y->score ? -1 : 1;
    if (x->left_size != y->left_size)
        return x->left_size > y->left_size ? -1 : 1;
    if (right_x != right_y)
        return right_x > right_y ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

/* True if the token can be a part of another one. */
static bool is_part(const struct maker *m, const char *s, size_t size)
{
    const json_t *id = json_object_getn(m->vocab, s, size);
    const int type = id ? m->list[json_integer_value(id)].type : UNUSED;
    return type == NORMAL || type == USER;
}

static int make_merges(struct maker *m, json_t *out)
{
    enum { LONGEST = 1024 }; /* a token's bytes; longer ones have no merges */
    struct merge *list = NULL;
    size_t count = 0, capacity = 0;
    int rc = QT_OK;
    for (size_t i = 0; i < m->count; i++) {
        const struct token *t = &m->list[i];
        for (size_t cut = 1; t->type == NORMAL && t->text.size <= LONGEST && cut < t->text.size;
             cut++) {
            if (((unsigned char)t->text.s[cut] & 0xc0) == 0x80 || !is_part(m, t->text.s, cut) ||
                !is_part(m, t->text.s + cut, t->text.size - cut))
                continue;
            QT_TRY(qt_array_grow(&list, &capacity, count + 1, sizeof *list, m->err));
            list[count++] =
                (struct merge){t->score == t->score ? t->score : 0, cut, t->text.size, i};
        }
    }
    if (count)
        qsort(list, count, sizeof *list, compare_merges);
    for (size_t i = 0; i < count; i++) {
        const char *s = m->list[list[i].id].text.s;
        json_t *pair = json_array();
        append(m, pair, json_stringn(s, list[i].left_size));
        append(m, pair, json_stringn(s + list[i].left_size, list[i].size - list[i].left_size));
        append(m, out, pair);
    }
done:
    qt_free(list);
    return rc;
}

/* ---- components ----------------------------------------------------------------------------- */

static json_t *byte_level(bool words)
{
    return json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 0,
                     "trim_offsets", 1, "use_regex", (int)words);
}

/* A line of struct qt_gguf_pre as a pre-tokenizer. */
static json_t *pre_step(const char *line, size_t size)
{
    static const char split[] = "split ";
    if (size == 5) /* words, bytes */
        return byte_level(*line == 'w');
    if (size == 6) /* digits */
        return json_pack("{s:s, s:b}", "type", "Digits", "individual_digits", 1);
    const size_t skip = sizeof split - 1;
    return json_pack("{s:s, s:{s:s%}, s:s, s:b}", "type", "Split", "pattern", "Regex", line + skip,
                     size - skip, "behavior", "Isolated", "invert", 0);
}

static int make_pre(json_t **out, bool *ignore_merges, bool *bos, struct maker *m)
{
    struct qt_gguf_text name = {"", 0};
    const struct qt_gguf_pre *pre = NULL;
    qt_gguf_get_text(&name, m->g, "tokenizer.ggml.", "pre");
    for (size_t i = 0; (pre = qt_gguf_pre_at(i)) != NULL; i++)
        if (qt_gguf_is(&name, pre->name))
            break;
    if (!pre)
        return unsupported(m, "the splitting tokenizer.ggml.pre =", name);
    json_t *steps = json_array();
    for (const char *line = pre->steps; *line;) {
        const size_t size = strcspn(line, "\n");
        append(m, steps, pre_step(line, size));
        line += size + 1;
    }
    *out = json_pack("{s:s, s:o}", "type", "Sequence", "pretokenizers", steps);
    *ignore_merges = pre->ignore_merges;
    *bos = pre->bos;
    return QT_OK;
}

static json_t *replace_spaces(void)
{
    return json_pack("{s:s, s:{s:s}, s:s}", "type", "Replace", "pattern", "String", " ", "content",
                     SPACE_MARK);
}

/* Spaces become U+2581, of which one is put before the text. */
static json_t *piece_normalizer(const struct maker *m)
{
    bool prefixed = true;
    qt_gguf_get_bool(&prefixed, m->g, "tokenizer.ggml.", "add_space_prefix");
    if (!prefixed)
        return replace_spaces();
    return json_pack("{s:s, s:[{s:s, s:s}, o]}", "type", "Sequence", "normalizers", "type",
                     "Prepend", "prepend", SPACE_MARK, replace_spaces());
}

static json_t *piece_decoder(void)
{
    return json_pack("{s:s, s:[{s:s, s:{s:s}, s:s}, {s:s}, {s:s}]}", "type", "Sequence", "decoders",
                     "type", "Replace", "pattern", "String", SPACE_MARK, "content", " ", "type",
                     "ByteFallback", "type", "Fuse");
}

/* ---- special tokens ------------------------------------------------------------------------- */

/* The token of a key like "bos_token_id", or NULL. */
static const struct token *special(const struct maker *m, const char *key, size_t *id)
{
    return qt_gguf_get_size(id, m->g, "tokenizer.ggml.", key) && *id < m->count ? &m->list[*id]
                                                                                : NULL;
}

static void add_special(struct maker *m, json_t *single, json_t *tokens, const struct token *t,
                        size_t id)
{
    json_t *text = text_json(t->text);
    append(m, single, json_pack("{s:{s:O, s:i}}", "SpecialToken", "id", text, "type_id", 0));
    m->failed |= json_object_setn_new(tokens, t->text.s, t->text.size,
                                      json_pack("{s:O, s:[I], s:[O]}", "id", text, "ids",
                                                (json_int_t)id, "tokens", text)) < 0;
    json_decref(text);
}

/* Returns the post-processor, which puts special tokens around a text. bos: a BOS token precedes
 * the text unless the file says otherwise. */
static json_t *make_post(struct maker *m, bool bos)
{
    bool eos = false;
    size_t first, last;
    json_t *single = json_array(), *tokens = json_object();
    const struct token *begin = special(m, "bos_token_id", &first);
    const struct token *end = special(m, "eos_token_id", &last);
    qt_gguf_get_bool(&bos, m->g, "tokenizer.ggml.", "add_bos_token");
    qt_gguf_get_bool(&eos, m->g, "tokenizer.ggml.", "add_eos_token");
    if (bos && begin)
        add_special(m, single, tokens, begin, first);
    append(m, single, json_pack("{s:{s:s, s:i}}", "Sequence", "id", "A", "type_id", 0));
    if (eos && end)
        add_special(m, single, tokens, end, last);
    return json_pack("{s:s, s:o, s:[{s:{s:s, s:i}}, {s:{s:s, s:i}}], s:o}", "type",
                     "TemplateProcessing", "single", single, "pair", "Sequence", "id", "A",
                     "type_id", 0, "Sequence", "id", "B", "type_id", 1, "special_tokens", tokens);
}

static json_t *make_settings(struct maker *m)
{
    static const char *const names[][2] = {{"bos_token", "bos_token_id"},
                                           {"eos_token", "eos_token_id"},
                                           {"unk_token", "unknown_token_id"},
                                           {"pad_token", "padding_token_id"}};
    struct qt_gguf_text template;
    json_t *out = json_object();
    size_t id;
    set(m, out, "tokenizer_class", json_string("PreTrainedTokenizerFast"));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const struct token *t = special(m, names[i][1], &id);
        if (t)
            set(m, out, names[i][0], text_json(t->text));
    }
    if (qt_gguf_get_text(&template, m->g, "tokenizer.", "chat_template") &&
        qt_utf8_check(template.s, template.size) == template.size)
        set(m, out, "chat_template", text_json(template));
    return out;
}

/* ---- the whole ------------------------------------------------------------------------------ */

static int make_model(struct maker *m, json_t *root)
{
    json_t *model = json_object(), *merges = json_array();
    json_t *pre = NULL;
    bool ignore_merges = false, bos = m->pieces;
    size_t id = 0;
    int rc;
    m->vocab = json_object();
    set(m, model, "vocab", m->vocab);
    set(m, model, "merges", merges);
    set(m, root, "model", model);
    if (m->failed) /* an object that could not be added is gone */
        return qt_no_memory(m->err, NULL);
    set(m, root, "version", json_string("1.0"));
    set(m, root, "truncation", json_null());
    set(m, root, "padding", json_null());
    set(m, root, "added_tokens", make_added(m));
    set(m, model, "type", json_string("BPE"));
    const struct token *unknown = m->pieces ? special(m, "unknown_token_id", &id) : NULL;
    set(m, model, "unk_token", unknown ? text_json(unknown->text) : json_null());
    set(m, model, "fuse_unk", json_boolean(m->pieces));
    set(m, model, "byte_fallback", json_boolean(m->pieces));
    QT_TRY(make_vocab(m));
    if (m->pieces) {
        QT_TRY(make_merges(m, merges));
        set(m, root, "normalizer", piece_normalizer(m));
        set(m, root, "pre_tokenizer", json_null());
    } else {
        QT_TRY(copy_merges(m, merges));
        QT_TRY(make_pre(&pre, &ignore_merges, &bos, m));
        set(m, root, "normalizer", json_null());
        set(m, root, "pre_tokenizer", pre);
    }
    set(m, model, "ignore_merges", json_boolean(ignore_merges));
    set(m, root, "decoder", m->pieces ? piece_decoder() : byte_level(true));
    set(m, root, "post_processor", make_post(m, bos));
done:
    return rc;
}

int qt_gguf_make_tokenizer(json_t **tokenizer, json_t **settings, const struct qt_gguf *g,
                           struct qt_err *err)
{
    struct maker m = {.g = g, .err = err};
    struct qt_gguf_text model;
    int rc = QT_OK;
    *tokenizer = *settings = NULL;
    if (!qt_gguf_get_text(&model, g, "tokenizer.ggml.", "model"))
        return QT_OK;
    m.pieces = qt_gguf_is(&model, "llama");
    if (!m.pieces && !qt_gguf_is(&model, "gpt2"))
        return unsupported(&m, "the tokenizer", model);
    QT_TRY(read_tokens(&m));
    *tokenizer = json_object();
    QT_TRY(make_model(&m, *tokenizer));
    *settings = make_settings(&m);
    if (m.failed)
        rc = qt_no_memory(err, NULL);
done:
    qt_free(m.list);
    if (rc < 0) {
        json_decref(*tokenizer);
        json_decref(*settings);
        *tokenizer = *settings = NULL;
    }
    return rc;
}
