/*
 * Byte-level BPE whose merges follow from the ranks of tokens: two adjacent tokens merge if they
 * make a token, the one with the lowest rank first.
 *
 *   tiktoken   lines "BASE64 RANK"; id = rank. Patterns and special tokens are not in the file:
 *              they are those of Qwen (1), by the name of the file, or of Llama 3 or Kimi.
 *   tekken     JSON; id = rank + number of special tokens, which have the ids below.
 */
#include "model/tokenizer/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CONTRACTIONS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define REST         "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define UPPER        "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]"
#define LOWER        "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]"

static const char llama3[] =
    CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" REST;
static const char qwen[] =
    CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" REST;
static const char kimi[] = "[\\p{Han}]+|[^\\r\\n\\p{L}\\p{N}]?" UPPER "*" LOWER "+" CONTRACTIONS
                           "?|[^\\r\\n\\p{L}\\p{N}]?" UPPER "+" LOWER "*" CONTRACTIONS
                           "?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" REST;

/* The file in the making. */
struct maker {
    struct qt_tokenizer_file *file;
    json_t *vocab, *added;
    struct qt_err *err;
};

static int no_memory(struct maker *m)
{
    return qt_no_memory(m->err, NULL);
}

static int start(struct maker *m)
{
    m->vocab = json_object();
    m->added = json_array();
    return m->vocab && m->added ? QT_OK : no_memory(m);
}

static void stop(struct maker *m)
{
    json_decref(m->vocab);
    json_decref(m->added);
}

static int set_rank(struct maker *m, size_t id, uint32_t rank)
{
    struct qt_ids *ranks = &m->file->ranks;
    int rc = QT_OK;
    while (ranks->count <= id)
        QT_TRY(qt_ids_add(ranks, QT_NO_ID, m->err));
    ranks->data[id] = rank;
done:
    return rc;
}

/* Adds a token of bytes. */
static int add_token(struct maker *m, const char *base64, size_t size, size_t id)
{
    struct qt_text name = {0};
    char *bytes = NULL;
    size_t n;
    int rc;
    QT_TRY(qt_base64_decode(&bytes, &n, base64, size, m->file->path, m->err));
    if (id >= QT_MAX_ID || n == 0) {
        rc = qt_fail(m->err, QT_E_INPUT, m->file->path, NULL, "token '%.*s' has %s",
                     (int)qt_min_size(size, 40), base64, n ? "no valid rank" : "no bytes");
        goto done;
    }
    for (size_t i = 0; i < n; i++)
        QT_TRY(qt_text_add_char(&name, qt_byte_char((unsigned char)bytes[i]), m->err));
    QT_TRY(qt_text_add(&name, "", 1, m->err)); /* a NUL */
    if (json_object_get(m->vocab, name.data)) {
        rc = qt_fail(m->err, QT_E_INPUT, m->file->path, NULL, "token '%.*s' appears twice",
                     (int)qt_min_size(size, 40), base64);
        goto done;
    }
    if (json_object_set_new(m->vocab, name.data, json_integer((json_int_t)id)) < 0) {
        rc = no_memory(m);
        goto done;
    }
    QT_TRY(set_rank(m, id, (uint32_t)id));
done:
    qt_free(bytes);
    qt_free(name.data);
    return rc;
}

/* Adds a special token; one whose text another token has is left out. */
static int add_special(struct maker *m, const char *text, size_t id, bool special)
{
    json_t *item;
    if (id >= QT_MAX_ID)
        return qt_fail(m->err, QT_E_INPUT, m->file->path, NULL,
                       "special token '%.200s' has no valid id", text);
    if (json_object_get(m->vocab, text))
        return QT_OK;
    item = json_pack("{s:I,s:s,s:b,s:b}", "id", (json_int_t)id, "content", text, "special", special,
                     "normalized", 0);
    if (!item || json_array_append_new(m->added, item) < 0 ||
        json_object_set_new(m->vocab, text, json_integer((json_int_t)id)) < 0)
        return no_memory(m);
    return set_rank(m, id, QT_NO_ID);
}

/* bos: text of the token before a text; NULL: none. */
static int finish(struct maker *m, const char *pattern, const char *bos)
{
    const json_t *id = bos ? json_object_get(m->vocab, bos) : NULL;
    json_t *post =
        id ? json_pack("{s:s,s:[{s:{s:s}},{s:{s:s}}],s:{s:{s:[I]}}}", "type", "TemplateProcessing",
                       "single", "SpecialToken", "id", bos, "Sequence", "id", "A", "special_tokens",
                       bos, "ids", json_integer_value(id))
           : json_null();
    m->file->root = json_pack(
        "{s:{s:s,s:b,s:O},s:O,s:{s:s,s:[{s:s,s:{s:s},s:s},{s:s,s:b,s:b}]},s:{s:s},s:o}", "model",
        "type", "BPE", "ignore_merges", 1, "vocab", m->vocab, "added_tokens", m->added,
        "pre_tokenizer", "type", "Sequence", "pretokenizers", "type", "Split", "pattern", "Regex",
        pattern, "behavior", "Isolated", "type", "ByteLevel", "add_prefix_space", 0, "use_regex", 0,
        "decoder", "type", "ByteLevel", "post_processor", post);
    return m->file->root ? QT_OK : no_memory(m);
}

/* ---- tekken --------------------------------------------------------------------------------- */

/* Special tokens have the ids below `count`; those that the file does not name have names, too. */
static int add_specials(struct maker *m, const json_t *list, size_t count)
{
    bool *named = NULL;
    char name[32];
    int rc;
    QT_TRY(qt_array_new(&named, count, sizeof *named, m->err));
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *item = json_array_get(list, i);
        const char *text = json_string_value(json_object_get(item, "token_str"));
        const json_t *rank = json_object_get(item, "rank");
        if (!text || !json_is_integer(rank) || json_integer_value(rank) < 0 ||
            (size_t)json_integer_value(rank) >= count || named[json_integer_value(rank)]) {
            rc = qt_fail(m->err, QT_E_INPUT, m->file->path, NULL,
                         "special_tokens: entry %zu has no text or no valid rank", i);
            goto done;
        }
        named[json_integer_value(rank)] = true;
        QT_TRY(add_special(m, text, (size_t)json_integer_value(rank), true));
    }
    for (size_t i = 0; i < count; i++) {
        snprintf(name, sizeof name, "<SPECIAL_%zu>", i);
        if (!named[i])
            QT_TRY(add_special(m, name, i, true));
    }
done:
    qt_free(named);
    return rc;
}

static int add_tekken_tokens(struct maker *m, const json_t *list, size_t first, size_t count)
{
    int rc = QT_OK;
    if (!json_is_array(list) || json_array_size(list) < count)
        return qt_fail(m->err, QT_E_INPUT, m->file->path, NULL, "vocab has fewer than %zu tokens",
                       count);
    for (size_t i = 0; i < count; i++) {
        const json_t *item = json_array_get(list, i), *rank = json_object_get(item, "rank");
        const json_t *bytes = json_object_get(item, "token_bytes");
        if (!json_is_string(bytes) || json_integer_value(rank) != (json_int_t)i)
            return qt_fail(m->err, QT_E_INPUT, m->file->path, NULL,
                           "vocab: entry %zu has no bytes or another rank", i);
        QT_TRY(add_token(m, json_string_value(bytes), json_string_length(bytes), first + i));
    }
done:
    return rc;
}

int qt_tekken_read(struct qt_tokenizer_file *file, const json_t *json, struct qt_err *err)
{
    const json_t *config = json_object_get(json, "config");
    struct maker m = {.file = file, .err = err};
    size_t specials, all;
    const char *pattern;
    int rc;
    if (!json_is_object(config))
        return qt_fail(err, QT_E_INPUT, file->path, NULL, "no \"config\" object");
    QT_TRY(qt_json_need_string(&pattern, config, "pattern", file->path, err));
    QT_TRY(qt_json_need_size(&specials, config, "default_num_special_tokens", file->path, err));
    QT_TRY(qt_json_need_size(&all, config, "default_vocab_size", file->path, err));
    if (all >= QT_MAX_ID || specials >= all ||
        json_array_size(json_object_get(json, "special_tokens")) > specials)
        return qt_fail(err, QT_E_INPUT, file->path, NULL,
                       "%zu tokens with %zu special tokens are not possible", all, specials);
    QT_TRY(start(&m));
    QT_TRY(add_tekken_tokens(&m, json_object_get(json, "vocab"), specials, all - specials));
    QT_TRY(add_specials(&m, json_object_get(json, "special_tokens"), specials));
    QT_TRY(finish(&m, pattern, "<s>"));
done:
    stop(&m);
    return rc;
}

/* ---- tiktoken ------------------------------------------------------------------------------- */

static int add_lines(struct maker *m, const char *data, size_t size)
{
    const char *end = data + size;
    int rc = QT_OK;
    for (const char *line = data; line < end;) {
        const char *stop = memchr(line, '\n', (size_t)(end - line));
        stop = stop ? stop : end;
        const char *space = memchr(line, ' ', (size_t)(stop - line));
        if (stop > line) {
            char *after = NULL;
            const unsigned long id = space ? strtoul(space + 1, &after, 10) : 0;
            if (!space || after == space + 1 || (after < stop && *after != '\r'))
                return qt_fail(m->err, QT_E_INPUT, m->file->path, NULL,
                               "line '%.*s' is not a token and its rank",
                               (int)qt_min_size((size_t)(stop - line), 60), line);
            QT_TRY(add_token(m, line, (size_t)(space - line), id));
        }
        line = stop + 1;
    }
    if (json_object_size(m->vocab) == 0)
        rc = qt_fail(m->err, QT_E_INPUT, m->file->path, NULL, "the file has no tokens");
done:
    return rc;
}

/* Special tokens of tokenizer_config.json. */
static int add_config_tokens(struct maker *m, json_t *decoder)
{
    const char *key;
    json_t *item;
    int rc = QT_OK;
    json_object_foreach (decoder, key, item) {
        const char *text = json_string_value(json_object_get(item, "content"));
        char *end;
        const unsigned long id = strtoul(key, &end, 10);
        if (!text || *end || end == key)
            return qt_fail(m->err, QT_E_INPUT, m->file->path, NULL,
                           "added_tokens_decoder of tokenizer_config.json: '%.40s' is no id with a "
                           "text",
                           key);
        QT_TRY(add_special(m, text, id, !json_is_false(json_object_get(item, "special"))));
    }
done:
    return rc;
}

/* Those of Llama 3, behind the tokens of the file. */
static int add_llama3_tokens(struct maker *m)
{
    static const char *const names[] = {"<|begin_of_text|>",
                                        "<|end_of_text|>",
                                        "<|reserved_special_token_0|>",
                                        "<|reserved_special_token_1|>",
                                        "<|reserved_special_token_2|>",
                                        "<|reserved_special_token_3|>",
                                        "<|start_header_id|>",
                                        "<|end_header_id|>",
                                        "<|reserved_special_token_4|>",
                                        "<|eot_id|>"};
    enum { NAMED = sizeof names / sizeof *names, ALL = 256 };
    const size_t first = m->file->ranks.count;
    char name[48];
    int rc = QT_OK;
    for (size_t i = 0; i < ALL; i++) {
        snprintf(name, sizeof name, "<|reserved_special_token_%zu|>", i - NAMED + 5);
        QT_TRY(add_special(m, i < NAMED ? names[i] : name, first + i, true));
    }
done:
    return rc;
}

/* Adds the special tokens of Qwen (1), whose ids follow those of the file. */
static int add_qwen_tokens(struct maker *m)
{
    static const char *const names[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
    enum { NAMED = sizeof names / sizeof *names, ALL = NAMED + 205 };
    const size_t first = m->file->ranks.count;
    char name[32];
    int rc = QT_OK;
    for (size_t i = 0; i < ALL; i++) {
        snprintf(name, sizeof name, "<|extra_%zu|>", i - NAMED);
        QT_TRY(add_special(m, i < NAMED ? names[i] : name, first + i, true));
    }
done:
    return rc;
}

/* Text is normalized to NFC, and none of the special tokens precedes it. */
static int read_qwen(struct maker *m)
{
    int rc;
    QT_TRY(add_qwen_tokens(m));
    QT_TRY(finish(m, qwen, NULL));
    if (json_object_set_new(m->file->root, "normalizer", json_pack("{s:s}", "type", "NFC")) < 0)
        rc = no_memory(m);
done:
    return rc;
}

int qt_tiktoken_read(struct qt_tokenizer_file *file, const char *data, size_t size,
                     const json_t *config, struct qt_err *err)
{
    json_t *decoder = json_object_get(config, "added_tokens_decoder");
    const char *class = json_string_value(json_object_get(config, "tokenizer_class"));
    const bool is_kimi = class && strcmp(class, "TikTokenTokenizer") == 0;
    const bool is_qwen = strcmp(qt_base_name(file->path), QT_QWEN_TOKENS) == 0;
    struct maker m = {.file = file, .err = err};
    int rc;
    QT_TRY(start(&m));
    QT_TRY(add_lines(&m, data, size));
    if (is_qwen) {
        rc = read_qwen(&m);
        goto done;
    }
    QT_TRY(json_is_object(decoder) ? add_config_tokens(&m, decoder) : add_llama3_tokens(&m));
    QT_TRY(finish(&m, is_kimi ? kimi : llama3, is_kimi ? NULL : "<|begin_of_text|>"));
done:
    stop(&m);
    return rc;
}
