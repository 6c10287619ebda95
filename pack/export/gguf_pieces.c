/*
 * The BPE of SentencePiece as keys of a GGUF file: the algorithm "llama" of llama.cpp, which joins
 * the pair that makes the token with the highest score. tokenizer.json has merges instead; the
 * score of a token is minus the rank of its first merge.
 */
#include "pack/export/gguf_tokens.h"

#include <stdio.h>
#include <string.h>

/* ---- spaces ---------------------------------------------------------------------------------- */

/* How spaces become U+2581. */
struct marks {
    bool replaced, prefixed, other; /* other: text is changed in another way */
};

static void read_normalizer(struct marks *m, const json_t *section)
{
    const char *type = qt_gguf_section(section);
    const json_t *list = json_object_get(section, "normalizers");
    if (!json_is_object(section))
        return;
    if (strcmp(type, "Sequence") == 0) {
        for (size_t i = 0; i < json_array_size(list); i++)
            if (strcmp(qt_gguf_section(json_array_get(list, i)), "Sequence") != 0)
                read_normalizer(m, json_array_get(list, i));
    } else if (strcmp(type, "Prepend") == 0 &&
               qt_gguf_is_string(json_object_get(section, "prepend"), SPACE_MARK)) {
        m->prefixed = true;
    } else if (strcmp(type, "Replace") == 0 &&
               qt_gguf_is_string(json_object_get(section, "content"), SPACE_MARK) &&
               qt_gguf_is_string(json_object_get(json_object_get(section, "pattern"), "String"),
                                 " ")) {
        m->replaced = true;
    } else {
        m->other = true;
    }
}

static void read_pre(struct marks *m, const json_t *section)
{
    const char *type = qt_gguf_section(section);
    const char *scheme = json_string_value(json_object_get(section, "prepend_scheme"));
    if (!json_is_object(section))
        return;
    if (strcmp(type, "Metaspace") == 0 && !m->replaced) {
        m->replaced = qt_gguf_is_string(json_object_get(section, "replacement"), SPACE_MARK);
        m->prefixed =
            scheme ? strcmp(scheme, "never") != 0 : qt_gguf_flag(section, "add_prefix_space", true);
    } else if (strcmp(type, "Split") != 0 ||
               !qt_gguf_is_string(json_object_get(json_object_get(section, "pattern"), "String"),
                                  " ") ||
               !m->replaced) {
        m->other = true; /* a split at spaces after all were replaced does nothing */
    }
}

/* ---- scores ---------------------------------------------------------------------------------- */

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
    int rc = qt_gguf_merge(&text, t, merge);
    if (rc < 0)
        return rc;
    char *space = strchr(text, ' ');
    if (space)
        memmove(space, space + 1, strlen(space));
    *out = id_of(t, text);
    qt_free(text);
    return *out < 0 ? qt_gguf_no_tokenizer(t, "merges like these") : QT_OK;
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
        if (qt_gguf_is_version(json_array_get(merges, i)))
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
            rc = qt_gguf_no_tokenizer(
                t, "BPE with U+2581 whose merges are not those of SentencePiece");
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
            return qt_gguf_no_tokenizer(t, "BPE with U+2581 without tokens for all bytes");
        t->list[id].type = TOKEN_BYTE;
    }
    return QT_OK;
}

int qt_gguf_write_pieces(struct qt_gguf_bytes *b, struct tokens *t)
{
    const json_t *model = json_object_get(t->root, "model");
    const char *unknown = json_string_value(json_object_get(model, "unk_token"));
    const json_int_t id = unknown ? id_of(t, unknown) : -1;
    struct marks marks = {0};
    int rc;
    read_normalizer(&marks, json_object_get(t->root, "normalizer"));
    read_pre(&marks, json_object_get(t->root, "pre_tokenizer"));
    if (!marks.replaced || marks.other)
        return qt_gguf_no_tokenizer(t, "such normalizers and pre-tokenizers for BPE with U+2581");
    QT_TRY(set_byte_tokens(t));
    if (id >= 0)
        t->list[id].type = TOKEN_UNKNOWN;
    QT_TRY(set_scores(t));
    qt_gguf_string(b, "", "tokenizer.ggml.model", "llama");
    qt_gguf_string(b, "", "tokenizer.ggml.pre", "default");
    qt_gguf_write_tokens(b, t);
    qt_gguf_array(b, "tokenizer.ggml.scores", QT_GGUF_F32, t->count);
    for (size_t i = 0; i < t->count; i++)
        qt_gguf_raw(b, &t->list[i].score, sizeof t->list[i].score);
    qt_gguf_bool(b, "tokenizer.ggml.add_space_prefix", marks.prefixed);
done:
    return rc;
}
