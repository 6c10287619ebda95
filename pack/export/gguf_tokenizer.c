/*
 * tokenizer.json -> keys of a GGUF file.
 *
 * llama.cpp has two algorithms for these files: "gpt2", byte-level BPE with merges and a splitting
 * of the text that is chosen by name (qt_gguf_pre_at), and "llama", the BPE of SentencePiece, which
 * joins the pair that makes the token with the highest score. tokenizer.json has merges in both
 * cases; the score of a token is minus the rank of its first merge.
 */
#include "pack/export/gguf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    TOKEN_NORMAL = 1,
    TOKEN_UNKNOWN = 2,
    TOKEN_CONTROL = 3,
    TOKEN_USER = 4, /* found in the text before anything else */
    TOKEN_UNUSED = 5,
    TOKEN_BYTE = 6,
};

#define SPACE_MARK "\xe2\x96\x81" /* U+2581 */
#define FILE_LIMIT ((size_t)256 << 20)

struct token {
    const char *text; /* borrowed from tokenizer.json, or owned */
    char *owned;
    int32_t type;
    float score;
};

struct tokens {
    const struct qt_export *x;
    const struct qt_tokenizer *tok;
    char *path;                           /* of tokenizer.json, for messages */
    json_t *root, *settings, *generation; /* settings: tokenizer_config.json; NULL: none */
    struct token *list;                   /* by id */
    size_t count;
    struct qt_err *err;
};

static int unsupported(const struct tokens *t, const char *what)
{
    return qt_fail(t->err, QT_E_UNSUPPORTED, t->path, NULL,
                   "gguf cannot hold this tokenizer: llama.cpp has no %s", what);
}

/* ---- pre-tokenizers ------------------------------------------------------------------------- */

enum { STEPS = 4096 };

static void add_step(char *steps, const char *name, const char *argument)
{
    const size_t used = strlen(steps);
    snprintf(steps + used, STEPS - used, "%s%s%s\n", name, *argument ? " " : "", argument);
}

static bool flag(const json_t *object, const char *key, bool missing)
{
    const json_t *v = json_object_get(object, key);
    return json_is_boolean(v) ? json_is_true(v) : missing;
}

static const char *type_of(const json_t *section)
{
    const char *type = json_string_value(json_object_get(section, "type"));
    return type ? type : "";
}

/* Writes the pre-tokenizers as lines; one that is not known here becomes a line that no row of the
 * table has. */
static void describe(char *steps, const json_t *section)
{
    const char *type = type_of(section);
    const json_t *list = json_object_get(section, "pretokenizers");
    const char *regex =
        json_string_value(json_object_get(json_object_get(section, "pattern"), "Regex"));
    const char *behavior = json_string_value(json_object_get(section, "behavior"));
    for (size_t i = 0; strcmp(type, "Sequence") == 0 && i < json_array_size(list); i++) {
        const json_t *item = json_array_get(list, i);
        if (strcmp(type_of(item), "Sequence") != 0)
            describe(steps, item);
    }
    if (strcmp(type, "Sequence") == 0)
        return;
    if (strcmp(type, "ByteLevel") == 0 && !flag(section, "add_prefix_space", true))
        add_step(steps, flag(section, "use_regex", true) ? "words" : "bytes", "");
    else if (strcmp(type, "Digits") == 0 && flag(section, "individual_digits", false))
        add_step(steps, "digits", "");
    else if (strcmp(type, "Split") == 0 && regex && behavior && strcmp(behavior, "Isolated") == 0 &&
             !flag(section, "invert", false))
        add_step(steps, "split", regex);
    else
        add_step(steps, "unknown", type);
}

/* *all: merges make every token that is no added one, so that ignore_merges changes nothing. */
static int check_merges(bool *all, const struct tokens *t)
{
    int rc = QT_OK;
    *all = true;
    for (size_t i = 0; i < t->count && rc == QT_OK && *all; i++)
        if (t->list[i].type == TOKEN_NORMAL)
            rc = qt_tokenizer_merges(all, t->tok, t->list[i].text, t->err);
    return rc;
}

/* *out = NULL: llama.cpp has no such splitting. */
static int find_pre(const struct qt_gguf_pre **out, const struct tokens *t, char *steps)
{
    const json_t *model = json_object_get(t->root, "model");
    const struct qt_gguf_pre *pre, *other = NULL;
    bool all = false;
    int rc = QT_OK;
    *out = NULL;
    *steps = '\0';
    describe(steps, json_object_get(t->root, "pre_tokenizer"));
    for (size_t i = 0; !*out && (pre = qt_gguf_pre_at(i)) != NULL; i++) {
        if (strcmp(pre->steps, steps) != 0)
            continue;
        if (pre->ignore_merges == flag(model, "ignore_merges", false))
            *out = pre;
        else if (!other)
            other = pre;
    }
    if (!*out && other)
        rc = check_merges(&all, t);
    if (all)
        *out = other;
    return rc;
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
        if (flag(item, "special", false) || looks_special(text)) {
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

static void write_tokens(struct qt_gguf_bytes *b, const struct tokens *t)
{
    qt_gguf_array(b, "tokenizer.ggml.tokens", QT_GGUF_STRING, t->count);
    for (size_t i = 0; i < t->count; i++)
        qt_gguf_text(b, t->list[i].text, strlen(t->list[i].text));
    qt_gguf_array(b, "tokenizer.ggml.token_type", QT_GGUF_I32, t->count);
    for (size_t i = 0; i < t->count; i++)
        qt_gguf_raw(b, &t->list[i].type, sizeof t->list[i].type);
}

/* ---- byte-level BPE ------------------------------------------------------------------------- */

/* A merge is "a b" or ["a", "b"]; qt_tokenizer_open has checked it. *joined: "a b", owned. */
static int merge_text(char **joined, const struct tokens *t, const json_t *merge)
{
    const char *line = json_string_value(merge);
    if (line)
        return qt_string_copy(joined, line, t->err);
    return qt_string_format(joined, t->err, "%s %s", json_string_value(json_array_get(merge, 0)),
                            json_string_value(json_array_get(merge, 1)));
}

static bool is_version(const json_t *merge)
{
    const char *line = json_string_value(merge);
    return line && strncmp(line, "#version", 8) == 0;
}

static int write_merges(struct qt_gguf_bytes *b, const struct tokens *t)
{
    const json_t *merges = json_object_get(json_object_get(t->root, "model"), "merges");
    size_t count = 0;
    int rc = QT_OK;
    for (size_t i = 0; i < json_array_size(merges); i++)
        count += !is_version(json_array_get(merges, i));
    qt_gguf_array(b, "tokenizer.ggml.merges", QT_GGUF_STRING, count);
    for (size_t i = 0; i < json_array_size(merges); i++) {
        char *text;
        if (is_version(json_array_get(merges, i)))
            continue;
        QT_TRY(merge_text(&text, t, json_array_get(merges, i)));
        const char *space = strchr(text, ' ');
        const bool plain = space && !strchr(space + 1, ' ');
        qt_gguf_text(b, text, strlen(text));
        qt_free(text);
        if (!plain)
            return unsupported(t, "byte-level BPE with spaces in merges");
    }
done:
    return rc;
}

/* NFC changes text that is not composed, which llama.cpp takes as it is; its converter accepts
 * that, too. */
static int write_bytes(struct qt_gguf_bytes *b, const struct tokens *t)
{
    const json_t *normalizer = json_object_get(t->root, "normalizer");
    char steps[STEPS];
    const struct qt_gguf_pre *pre;
    int rc = find_pre(&pre, t, steps);
    if (rc < 0)
        return rc;
    if (!json_is_array(json_object_get(json_object_get(t->root, "model"), "merges")))
        return unsupported(t, "tokenizer model but BPE in these files");
    if (json_is_object(normalizer) && strcmp(type_of(normalizer), "NFC") != 0)
        return qt_fail(t->err, QT_E_UNSUPPORTED, t->path, NULL,
                       "gguf cannot hold this tokenizer: llama.cpp has no normalizer '%.100s'",
                       type_of(normalizer));
    if (!pre) {
        for (char *s = steps; *s; s++)
            *s = *s == '\n' ? ';' : *s;
        return qt_fail(t->err, QT_E_UNSUPPORTED, t->path, NULL,
                       "gguf cannot hold this tokenizer: its pre-tokenizer is not in the table of "
                       "those that llama.cpp has (ignore_merges %s; %.300s)",
                       flag(json_object_get(t->root, "model"), "ignore_merges", false) ? "true"
                                                                                       : "false",
                       steps);
    }
    qt_gguf_string(b, "", "tokenizer.ggml.model", "gpt2");
    qt_gguf_string(b, "", "tokenizer.ggml.pre", pre->name);
    write_tokens(b, t);
    QT_TRY(write_merges(b, t));
done:
    return rc;
}

/* ---- the BPE of SentencePiece --------------------------------------------------------------- */

/* How spaces become U+2581. */
struct marks {
    bool replaced, prefixed, other; /* other: text is changed in another way */
};

static bool is_string(const json_t *v, const char *s)
{
    return json_is_string(v) && strcmp(json_string_value(v), s) == 0;
}

static void read_normalizer(struct marks *m, const json_t *section)
{
    const char *type = type_of(section);
    const json_t *list = json_object_get(section, "normalizers");
    if (!json_is_object(section))
        return;
    if (strcmp(type, "Sequence") == 0) {
        for (size_t i = 0; i < json_array_size(list); i++)
            if (strcmp(type_of(json_array_get(list, i)), "Sequence") != 0)
                read_normalizer(m, json_array_get(list, i));
    } else if (strcmp(type, "Prepend") == 0 &&
               is_string(json_object_get(section, "prepend"), SPACE_MARK)) {
        m->prefixed = true;
    } else if (strcmp(type, "Replace") == 0 &&
               is_string(json_object_get(section, "content"), SPACE_MARK) &&
               is_string(json_object_get(json_object_get(section, "pattern"), "String"), " ")) {
        m->replaced = true;
    } else {
        m->other = true;
    }
}

static void read_pre(struct marks *m, const json_t *section)
{
    const char *type = type_of(section);
    const char *scheme = json_string_value(json_object_get(section, "prepend_scheme"));
    if (!json_is_object(section))
        return;
    if (strcmp(type, "Metaspace") == 0 && !m->replaced) {
        m->replaced = is_string(json_object_get(section, "replacement"), SPACE_MARK);
        m->prefixed =
            scheme ? strcmp(scheme, "never") != 0 : flag(section, "add_prefix_space", true);
    } else if (strcmp(type, "Split") != 0 ||
               !is_string(json_object_get(json_object_get(section, "pattern"), "String"), " ") ||
               !m->replaced) {
        m->other = true; /* a split at spaces after all were replaced does nothing */
    }
}

static json_int_t id_of(const struct tokens *t, const char *text)
{
    const json_t *vocab = json_object_get(json_object_get(t->root, "model"), "vocab");
    const json_t *id = json_object_get(vocab, text);
    return json_is_integer(id) ? json_integer_value(id) : -1;
}

/* True if the token can be a part of another one. */
static bool is_part(const struct tokens *t, const char *text)
{
    const json_int_t id = id_of(t, text);
    return id >= 0 && t->list[id].type != TOKEN_CONTROL && t->list[id].type != TOKEN_UNKNOWN;
}

/* Number of places where text can be cut into two tokens. */
static int count_cuts(size_t *cuts, const struct tokens *t, const char *text)
{
    char *head;
    int rc = qt_string_copy(&head, text, t->err);
    *cuts = 0;
    if (rc < 0)
        return rc;
    for (size_t i = strlen(text); i-- > 1;) {
        if ((text[i] & 0xc0) == 0x80)
            continue; /* within a character */
        head[i] = '\0';
        *cuts += is_part(t, head) && is_part(t, text + i);
    }
    qt_free(head);
    return QT_OK;
}

/* *out = the id of the token that a merge makes. */
static int made_by(json_int_t *out, const struct tokens *t, const json_t *merge)
{
    char *text;
    int rc = merge_text(&text, t, merge);
    if (rc < 0)
        return rc;
    char *space = strchr(text, ' ');
    if (space)
        memmove(space, space + 1, strlen(space));
    *out = id_of(t, text);
    qt_free(text);
    return *out < 0 ? unsupported(t, "merges like these") : QT_OK;
}

/* The merges that make a token. */
struct made {
    size_t count, last; /* last: the rank of the last one */
};

static int list_made(struct made *made, json_int_t *ids, const struct tokens *t,
                     const json_t *merges)
{
    int rc = QT_OK;
    for (size_t i = 0; i < json_array_size(merges); i++) {
        ids[i] = -1;
        if (is_version(json_array_get(merges, i)))
            continue;
        QT_TRY(made_by(&ids[i], t, json_array_get(merges, i)));
        made[ids[i]].count++;
        made[ids[i]].last = i;
    }
done:
    return rc;
}

/*
 * Sets scores from merges. Joining the pair that makes the best token equals joining the pair of
 * the best merge if every way to make a token is a merge: files that were made from SentencePiece
 * are so. The merges of tokens of equal score are mixed there. Added tokens do not matter: they are
 * found before.
 */
static int set_scores(struct tokens *t)
{
    const json_t *merges = json_object_get(json_object_get(t->root, "model"), "merges");
    const size_t n = json_array_size(merges);
    struct made *made = NULL;
    json_int_t *ids = NULL;
    size_t begin = 0, end = 0; /* of the merges of equal score */
    int rc;
    QT_TRY(qt_array_new(&made, t->count, sizeof *made, t->err));
    QT_TRY(qt_array_new(&ids, n, sizeof *ids, t->err));
    QT_TRY(list_made(made, ids, t, merges));
    for (size_t i = 0; i < t->count; i++)
        t->list[i].score = -(float)(n + 1);
    for (size_t i = 0; i < n; i++) {
        if (ids[i] < 0 || t->list[ids[i]].type != TOKEN_NORMAL)
            continue;
        if (i >= end)
            begin = i;
        end = qt_max_size(end, made[ids[i]].last + 1);
        t->list[ids[i]].score = -(float)begin;
    }
    for (size_t i = 0; i < t->count; i++) {
        size_t cuts = made[i].count;
        if (t->list[i].type == TOKEN_NORMAL)
            QT_TRY(count_cuts(&cuts, t, t->list[i].text));
        if (cuts != made[i].count) {
            rc = unsupported(t, "BPE with U+2581 whose merges are not those of SentencePiece");
            goto done;
        }
    }
done:
    qt_free(ids);
    qt_free(made);
    return rc;
}

static int set_byte_tokens(struct tokens *t)
{
    char name[8];
    for (unsigned i = 0; i < 256; i++) {
        snprintf(name, sizeof name, "<0x%02X>", i);
        const json_int_t id = id_of(t, name);
        if (id < 0)
            return unsupported(t, "BPE with U+2581 without tokens for all bytes");
        t->list[id].type = TOKEN_BYTE;
    }
    return QT_OK;
}

static int write_pieces(struct qt_gguf_bytes *b, struct tokens *t)
{
    const json_t *model = json_object_get(t->root, "model");
    const char *unknown = json_string_value(json_object_get(model, "unk_token"));
    const json_int_t id = unknown ? id_of(t, unknown) : -1;
    struct marks marks = {0};
    int rc;
    read_normalizer(&marks, json_object_get(t->root, "normalizer"));
    read_pre(&marks, json_object_get(t->root, "pre_tokenizer"));
    if (!marks.replaced || marks.other)
        return unsupported(t, "such normalizers and pre-tokenizers for BPE with U+2581");
    QT_TRY(set_byte_tokens(t));
    if (id >= 0)
        t->list[id].type = TOKEN_UNKNOWN;
    QT_TRY(set_scores(t));
    qt_gguf_string(b, "", "tokenizer.ggml.model", "llama");
    qt_gguf_string(b, "", "tokenizer.ggml.pre", "default");
    write_tokens(b, t);
    qt_gguf_array(b, "tokenizer.ggml.scores", QT_GGUF_F32, t->count);
    for (size_t i = 0; i < t->count; i++)
        qt_gguf_raw(b, &t->list[i].score, sizeof t->list[i].score);
    qt_gguf_bool(b, "tokenizer.ggml.add_space_prefix", marks.prefixed);
done:
    return rc;
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
        if (is_string(json_object_get(json_array_get(v, i), "name"), "default"))
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
    const bool pieces = flag(json_object_get(t.root, "model"), "byte_fallback", false);
    QT_TRY(pieces ? write_pieces(b, &t) : write_bytes(b, &t));
    QT_TRY(write_special(b, &t, tok));
    QT_TRY(write_template(b, &t));
    rc = b->rc;
done:
    qt_tokenizer_close(tok);
    close_files(&t);
    return rc;
}
