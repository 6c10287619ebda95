/* The model of a tokenizer: word -> ids. BPE (bpe.c), Unigram (unigram.c), and here WordPiece and
 * WordLevel, by the rules of the Hugging Face `tokenizers` library. */
#include "model/tokenizer/internal.h"

#include <string.h>

/* ---- loading -------------------------------------------------------------------------------- */

static int load_pieces(struct qt_words *w, const json_t *model, const char *file,
                       struct qt_err *err)
{
    const bool pieces = w->kind == QT_WORDS_PIECES;
    const char *unk = pieces ? "[UNK]" : "<unk>", *prefix = "##";
    int rc;
    w->most_chars = 100;
    QT_TRY(qt_json_get_string(&unk, model, "unk_token", file, err));
    if (pieces) {
        QT_TRY(qt_json_get_string(&prefix, model, "continuing_subword_prefix", file, err));
        QT_TRY(qt_json_get_size(&w->most_chars, model, "max_input_chars_per_word", file, err));
        QT_TRY(qt_string_copy(&w->prefix, prefix, err));
    }
    QT_TRY(qt_vocab_load(&w->bpe, json_object_get(model, "vocab"), err));
    w->unk = qt_strmap_find(&w->bpe.vocab, unk, strlen(unk));
done:
    return rc;
}

/* Old files have no type: it follows from the other keys. */
static const char *guess_type(const json_t *model)
{
    return json_is_array(json_object_get(model, "vocab"))       ? "Unigram"
           : json_object_get(model, "merges")                   ? "BPE"
           : json_object_get(model, "max_input_chars_per_word") ? "WordPiece"
                                                                : "WordLevel";
}

int qt_words_load(struct qt_words *out, const json_t *model, const struct qt_ids *ranks,
                  const char *file, struct qt_err *err)
{
    static const struct {
        const char *type;
        enum qt_words_kind kind;
    } kinds[] = {{"BPE", QT_WORDS_BPE},
                 {"Unigram", QT_WORDS_UNIGRAM},
                 {"WordPiece", QT_WORDS_PIECES},
                 {"WordLevel", QT_WORDS_LEVEL}};
    const char *type = json_is_object(model) ? guess_type(model) : "";
    int rc;
    *out = (struct qt_words){.bpe = {.file = file}};
    if (!json_is_object(model))
        return qt_fail(err, QT_E_INPUT, file, NULL, "no \"model\" object");
    QT_TRY(qt_json_get_string(&type, model, "type", file, err));
    for (size_t i = 0;; i++) {
        if (i == sizeof kinds / sizeof *kinds)
            return qt_fail(err, QT_E_UNSUPPORTED, file, NULL,
                           "tokenizer model '%.100s' is not supported", type);
        out->kind = kinds[i].kind;
        if (strcmp(type, kinds[i].type) == 0)
            break;
    }
    if (out->kind == QT_WORDS_BPE)
        QT_TRY(qt_bpe_load(&out->bpe, model, ranks, file, err));
    else if (out->kind == QT_WORDS_UNIGRAM)
        QT_TRY(qt_unigram_load(&out->unigram, &out->bpe.vocab, model, ranks, file, err));
    else
        QT_TRY(load_pieces(out, model, file, err));
    if (out->kind == QT_WORDS_UNIGRAM)
        out->bpe.max_id = (uint32_t)json_array_size(json_object_get(model, "vocab")) - 1;
done:
    return rc;
}

void qt_words_free(struct qt_words *w)
{
    qt_bpe_free(&w->bpe);
    qt_unigram_free(&w->unigram);
    qt_free(w->prefix);
    w->prefix = NULL;
}

/* ---- encoding ------------------------------------------------------------------------------- */

static int add_unk(struct qt_ids *out, const struct qt_words *w, struct qt_err *err)
{
    if (w->unk == QT_NO_ID)
        return qt_fail(err, QT_E_INPUT, w->bpe.file, NULL,
                       "the text needs unk_token, which is not in the vocabulary");
    return qt_ids_add(out, w->unk, err);
}

/* The longest token with which word[size] begins, after the prefix if it continues a word; *bytes =
 * its length without the prefix. */
static int longest_token(uint32_t *id, size_t *bytes, struct qt_bpe_work *work,
                         const struct qt_words *w, const char *word, size_t size, bool continues,
                         struct qt_err *err)
{
    const size_t prefix = continues ? strlen(w->prefix) : 0;
    int rc = qt_array_grow(&work->key, &work->key_capacity, prefix + size, 1, err);
    if (rc < 0)
        return rc;
    memcpy(work->key, w->prefix, prefix);
    memcpy(work->key + prefix, word, size);
    *id = QT_NO_ID;
    for (*bytes = size; *bytes && *id == QT_NO_ID;) {
        *id = qt_strmap_find(&w->bpe.vocab, work->key, prefix + *bytes);
        if (*id == QT_NO_ID)
            *bytes = qt_utf8_back(word, *bytes);
    }
    return QT_OK;
}

/* Greedy: one token after the other. If a place has none, the whole word is unknown. */
static int encode_pieces(struct qt_ids *out, struct qt_bpe_work *work, const struct qt_words *w,
                         const char *word, size_t size, struct qt_err *err)
{
    const size_t first = out->count;
    size_t chars = 0, n;
    uint32_t id;
    int rc = QT_OK;
    for (size_t at = 0; at < size && chars <= w->most_chars; at += n, chars++)
        qt_utf8_char(&n, word + at);
    if (chars > w->most_chars)
        return add_unk(out, w, err);
    for (size_t at = 0; at < size; at += n) {
        QT_TRY(longest_token(&id, &n, work, w, word + at, size - at, at > 0, err));
        if (id == QT_NO_ID) {
            out->count = first;
            return add_unk(out, w, err);
        }
        QT_TRY(qt_ids_add(out, id, err));
    }
done:
    return rc;
}

static int encode_new(struct qt_ids *out, struct qt_bpe_work *work, const struct qt_words *w,
                      const char *word, size_t size, struct qt_err *err)
{
    if (w->kind == QT_WORDS_UNIGRAM)
        return qt_unigram_encode(out, work, &w->unigram, &w->bpe.vocab, word, size, err);
    if (w->kind == QT_WORDS_PIECES)
        return encode_pieces(out, work, w, word, size, err);
    const uint32_t id = qt_strmap_find(&w->bpe.vocab, word, size);
    return id != QT_NO_ID ? qt_ids_add(out, id, err) : add_unk(out, w, err);
}

int qt_words_encode(struct qt_ids *out, struct qt_bpe_work *work, const struct qt_words *w,
                    const char *word, size_t size, struct qt_err *err)
{
    const size_t first = out->count;
    bool found;
    int rc;
    if (w->kind == QT_WORDS_BPE)
        return qt_bpe_encode(out, work, &w->bpe, word, size, err);
    QT_TRY(qt_word_cache_get(&found, out, work, word, size, err));
    if (found)
        return QT_OK;
    QT_TRY(encode_new(out, work, w, word, size, err));
    rc = qt_word_cache_add(work, word, size, out->data + first, out->count - first, err);
done:
    return rc;
}
