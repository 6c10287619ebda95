/*
 * tokenizer.json -> keys of a GGUF file: tokens, special tokens, the chat template. llama.cpp has
 * two algorithms for these files, each of which has keys of its own: gguf_bpe.c, gguf_pieces.c.
 */
#include "pack/export/gguf_tokens.h"

#include <stdlib.h>
#include <string.h>

#define FILE_LIMIT ((size_t)256 << 20)

/* ---- parts of tokenizer.json ---------------------------------------------------------------- */

int qt_gguf_no_tokenizer(const struct tokens *t, const char *what)
{
    return qt_fail(t->err, QT_E_UNSUPPORTED, t->path, NULL,
                   "gguf cannot hold this tokenizer: llama.cpp has no %s", what);
}

bool qt_gguf_flag(const json_t *object, const char *key, bool missing)
{
    const json_t *v = json_object_get(object, key);
    return json_is_boolean(v) ? json_is_true(v) : missing;
}

const char *qt_gguf_section(const json_t *section)
{
    const char *type = json_string_value(json_object_get(section, "type"));
    return type ? type : "";
}

bool qt_gguf_is_string(const json_t *v, const char *s)
{
    return json_is_string(v) && strcmp(json_string_value(v), s) == 0;
}

int qt_gguf_merge(char **joined, const struct tokens *t, const json_t *merge)
{
    const char *line = json_string_value(merge);
    if (line)
        return qt_string_copy(joined, line, t->err);
    return qt_string_format(joined, t->err, "%s %s", json_string_value(json_array_get(merge, 0)),
                            json_string_value(json_array_get(merge, 1)));
}

bool qt_gguf_is_version(const json_t *merge)
{
    const char *line = json_string_value(merge);
    return line && strncmp(line, "#version", 8) == 0;
}

/* ---- tokens --------------------------------------------------------------------------------- */

/* Tokens that some files do not mark as special although they are. */
static bool looks_special(const char *s)
{
    static const char *const known[] = {"<pad>", "<mask>", "<2mass>", "[@BOS@]"};
    const size_t n = strlen(s);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(s, known[i]) == 0)
            return true;
    return (n >= 4 && strncmp(s, "<|", 2) == 0 && strcmp(s + n - 2, "|>") == 0) ||
           (n > 8 && strncmp(s, "<unused", 7) == 0 && s[n - 1] == '>');
}

static void own(struct token *token, char *text)
{
    qt_free(token->owned);
    token->owned = text;
    token->text = text;
}

/* The text of an added token of SentencePiece has U+2581 where the runtime looks for spaces. */
static int set_spaces(struct tokens *t, struct token *token)
{
    char *copy, *to;
    const char *at;
    if (!strstr(token->text, SPACE_MARK))
        return QT_OK;
    int rc = qt_string_copy(&copy, token->text, t->err);
    if (rc < 0)
        return rc;
    for (at = token->text, to = copy; *at;) {
        const bool mark = strncmp(at, SPACE_MARK, 3) == 0;
        *to++ = mark ? ' ' : *at;
        at += mark ? 3 : 1;
    }
    *to = '\0';
    own(token, copy);
    return QT_OK;
}

static int bad_id(const struct tokens *t, const char *text)
{
    return qt_fail(t->err, QT_E_INPUT, t->path, NULL,
                   "the id of token '%.200s' is not below vocab_size = %zu of config.json", text,
                   t->count);
}

static int read_vocab(struct tokens *t)
{
    json_t *vocab = json_object_get(json_object_get(t->root, "model"), "vocab"), *value;
    const char *text;
    json_object_foreach (vocab, text, value) {
        const json_int_t id = json_integer_value(value);
        if (id < 0 || (size_t)id >= t->count)
            return bad_id(t, text);
        t->list[id] = (struct token){.text = text, .type = TOKEN_NORMAL};
    }
    return QT_OK;
}

static int read_added(struct tokens *t)
{
    const json_t *added = json_object_get(t->root, "added_tokens");
    int rc = QT_OK;
    for (size_t i = 0; i < json_array_size(added); i++) {
        const json_t *item = json_array_get(added, i);
        const char *text = json_string_value(json_object_get(item, "content"));
        const json_int_t id = json_integer_value(json_object_get(item, "id"));
        if (!text || !*text)
            continue;
        if (id < 0 || (size_t)id >= t->count)
            return bad_id(t, text);
        struct token *token = &t->list[id];
        token->text = text;
        if (qt_gguf_flag(item, "special", false) || looks_special(text)) {
            token->type = TOKEN_CONTROL;
        } else {
            token->type = TOKEN_USER;
            QT_TRY(set_spaces(t, token));
        }
    }
done:
    return rc;
}

/* Ids without a token. */
static int fill_rest(struct tokens *t)
{
    char *text;
    int rc = QT_OK;
    for (size_t i = 0; i < t->count; i++) {
        if (t->list[i].text)
            continue;
        QT_TRY(qt_string_format(&text, t->err, "[PAD%zu]", i));
        own(&t->list[i], text);
        t->list[i].type = TOKEN_UNUSED;
    }
done:
    return rc;
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* llama.cpp ends the process if two tokens are equal. */
static int check_unique(const struct tokens *t)
{
    const char **sorted;
    int rc = qt_array_new(&sorted, t->count, sizeof *sorted, t->err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < t->count; i++)
        sorted[i] = t->list[i].text;
    qsort(sorted, t->count, sizeof *sorted, by_text);
    for (size_t i = 1; rc == QT_OK && i < t->count; i++)
        if (strcmp(sorted[i - 1], sorted[i]) == 0)
            rc = qt_fail(t->err, QT_E_UNSUPPORTED, t->path, NULL,
                         "gguf cannot hold this tokenizer: two tokens are '%.200s'", sorted[i]);
    qt_free(sorted);
    return rc;
}

void qt_gguf_write_tokens(struct qt_gguf_bytes *b, const struct tokens *t)
{
    qt_gguf_array(b, "tokenizer.ggml.tokens", QT_GGUF_STRING, t->count);
    for (size_t i = 0; i < t->count; i++)
        qt_gguf_text(b, t->list[i].text, strlen(t->list[i].text));
    qt_gguf_array(b, "tokenizer.ggml.token_type", QT_GGUF_I32, t->count);
    for (size_t i = 0; i < t->count; i++)
        qt_gguf_raw(b, &t->list[i].type, sizeof t->list[i].type);
}

/* ---- special tokens, chat template ---------------------------------------------------------- */

/* The id of a special token: by its text in tokenizer_config.json, or else an id of config.json or
 * generation_config.json. -1: there is none. */
static json_int_t special_id(const struct tokens *t, const char *name)
{
    const json_t *configs[] = {t->x->config, t->generation};
    char key[32];
    const json_t *v = json_object_get(t->settings, name);
    const char *text = json_string_value(json_is_object(v) ? json_object_get(v, "content") : v);
    for (size_t i = 0; text && i < t->count; i++)
        if (strcmp(t->list[i].text, text) == 0)
            return (json_int_t)i;
    snprintf(key, sizeof key, "%s_id", name);
    for (size_t i = 0; i < 2; i++) {
        v = json_object_get(configs[i], key);
        if (json_is_array(v))
            v = json_array_get(v, 0);
        if (json_is_integer(v) && json_integer_value(v) >= 0 &&
            (size_t)json_integer_value(v) < t->count)
            return json_integer_value(v);
    }
    return -1;
}

static int write_special(struct qt_gguf_bytes *b, const struct tokens *t,
                         const struct qt_tokenizer *tok)
{
    static const char *const kinds[][2] = {
        {"bos_token", "tokenizer.ggml.bos_token_id"},
        {"eos_token", "tokenizer.ggml.eos_token_id"},
        {"unk_token", "tokenizer.ggml.unknown_token_id"},
        {"pad_token", "tokenizer.ggml.padding_token_id"},
    };
    uint32_t *around;
    size_t count;
    /* What the tokenizer puts around a text. llama.cpp can add one token on each side. */
    int rc = qt_tokenizer_encode(&around, &count, tok, "", 0, true, t->err);
    if (rc < 0)
        return rc;
    const bool before = qt_tokenizer_adds_bos(tok);
    const bool bos = before && count == 1, eos = !before && count == 1;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        json_int_t id = special_id(t, kinds[i][0]);
        if ((i == 0 && bos) || (i == 1 && eos))
            id = around[0];
        if (id >= 0)
            qt_gguf_u32(b, "", kinds[i][1], (uint32_t)id);
    }
    qt_free(around);
    qt_gguf_bool(b, "tokenizer.ggml.add_bos_token", bos);
    qt_gguf_bool(b, "tokenizer.ggml.add_eos_token", eos);
    return QT_OK;
}

/* The template of tokenizer_config.json, of several the "default"; NULL: there is none. */
static const json_t *configured_template(const struct tokens *t)
{
    const json_t *v = json_object_get(t->settings, "chat_template");
    for (size_t i = 0; i < json_array_size(v); i++)
        if (qt_gguf_is_string(json_object_get(json_array_get(v, i), "name"), "default"))
            return json_object_get(json_array_get(v, i), "template");
    return v;
}

/* chat_template.jinja comes before the template of tokenizer_config.json. */
static int write_template(struct qt_gguf_bytes *b, const struct tokens *t)
{
    const json_t *v = configured_template(t);
    const char *text = json_string_value(v);
    size_t size = json_string_length(v);
    char *path = NULL, *file = NULL;
    int rc;
    QT_TRY(qt_path_join(&path, qt_container_dir(t->x->container), "chat_template.jinja", t->err));
    if (qt_path_exists(path)) {
        QT_TRY(qt_file_read(&file, &size, path, (size_t)1 << 24, t->err));
        text = file;
    }
    if (text && (qt_utf8_check(text, size) < size || strlen(text) < size))
        rc = qt_fail(t->err, QT_E_INPUT, file ? path : qt_container_dir(t->x->container), NULL,
                     "the chat template%s is not UTF-8 text, or has a NUL",
                     file ? "" : " of tokenizer_config.json");
    else if (text)
        qt_gguf_string(b, "", "tokenizer.chat_template", text);
done:
    qt_free(file);
    qt_free(path);
    return rc;
}

/* ---- the whole ------------------------------------------------------------------------------ */

static int load(json_t **out, const struct tokens *t, const char *name)
{
    char *path, *text = NULL;
    size_t size;
    int rc;
    QT_TRY(qt_path_join(&path, qt_container_dir(t->x->container), name, t->err));
    if (!qt_path_exists(path))
        goto done;
    QT_TRY(qt_file_read(&text, &size, path, FILE_LIMIT, t->err));
    /* As data: an unknown model_max_length is written as 1000000000000000019884624838656. */
    if (strcmp(name, "tokenizer_config.json") == 0)
        QT_TRY(qt_json_parse_data(out, text, size, 1, "\\ufffd", path, t->err));
    else
        QT_TRY(qt_json_parse_lenient(out, text, size, path, t->err));
done:
    qt_free(text);
    qt_free(path);
    return rc;
}

static int open_files(struct tokens *t)
{
    int rc;
    QT_TRY(qt_path_join(&t->path, qt_container_dir(t->x->container), "tokenizer.json", t->err));
    QT_TRY(load(&t->root, t, "tokenizer.json"));
    if (!t->root)
        return qt_fail(t->err, QT_E_UNSUPPORTED, t->path, NULL,
                       "gguf files have the tokenizer in them, but this file is missing; copy it "
                       "from the checkpoint");
    QT_TRY(load(&t->settings, t, "tokenizer_config.json"));
    QT_TRY(load(&t->generation, t, "generation_config.json"));
done:
    return rc;
}

static void close_files(struct tokens *t)
{
    for (size_t i = 0; t->list && i < t->count; i++)
        qt_free(t->list[i].owned);
    qt_free(t->list);
    json_decref(t->root);
    json_decref(t->settings);
    json_decref(t->generation);
    qt_free(t->path);
}

int qt_gguf_tokenizer(struct qt_gguf_bytes *b, const struct qt_export *x, size_t vocab,
                      struct qt_err *err)
{
    struct tokens t = {.x = x, .count = vocab, .err = err};
    struct qt_tokenizer *tok = NULL;
    int rc;
    QT_TRY(open_files(&t));
    QT_TRY(qt_tokenizer_open(&tok, qt_container_dir(x->container), err));
    t.tok = tok;
    QT_TRY(qt_array_new(&t.list, vocab, sizeof *t.list, err));
    QT_TRY(read_vocab(&t));
    QT_TRY(read_added(&t));
    QT_TRY(fill_rest(&t));
    QT_TRY(check_unique(&t));
    const bool pieces = qt_gguf_flag(json_object_get(t.root, "model"), "byte_fallback", false);
    QT_TRY(pieces ? qt_gguf_write_pieces(b, &t) : qt_gguf_write_bpe(b, &t));
    QT_TRY(write_special(b, &t, tok));
    QT_TRY(write_template(b, &t));
    rc = b->rc;
done:
    qt_tokenizer_close(tok);
    close_files(&t);
    return rc;
}
