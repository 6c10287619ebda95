/* Token ids -> text: the "decoder" of tokenizer.json, a list of steps over the texts of tokens. */
#include "model/tokenizer/internal.h"

#include <string.h>

#define REPLACEMENT "\xef\xbf\xbd" /* U+FFFD */

enum { MAX_STEPS = 64 };

/* The texts of a sequence of tokens, between two steps. */
struct texts {
    struct qt_text *list;
    size_t count;
};

struct step {
    int (*run)(struct texts *t, const struct step *step, const struct qt_detokenizer *d,
               struct qt_err *err);
    const char *from, *to; /* Replace, Metaspace; Strip, WordPiece, BPEDecoder: from */
    size_t start, stop;    /* Strip: characters at the start and at the end, at most */
    bool first;            /* Metaspace: the first token loses its marks; WordPiece: clean-up */
};

struct token {
    const char *text; /* NULL: no such id */
    bool special;
};

struct qt_detokenizer {
    struct qt_tokenizer_file from; /* owns the texts */
    const char *file;              /* its path */
    struct token *tokens;
    size_t vocab, count;
    struct step steps[MAX_STEPS];
    int32_t byte_of[0x144]; /* of GPT-2's printable characters; -1: none */
};

/* ---- texts ---------------------------------------------------------------------------------- */

static void texts_free(struct texts *t)
{
    for (size_t i = 0; i < t->count; i++)
        qt_free(t->list[i].data);
    qt_free(t->list);
    *t = (struct texts){0};
}

/* Joins all texts into the first one, with `between` in between. */
static int join(struct texts *t, const char *between, struct qt_err *err)
{
    struct qt_text all = {0};
    int rc = QT_OK;
    for (size_t i = 0; i < t->count; i++) {
        QT_TRY(qt_text_add(&all, between, i ? strlen(between) : 0, err));
        QT_TRY(qt_text_add(&all, t->list[i].data, t->list[i].size, err));
        qt_free(t->list[i].data);
        t->list[i] = (struct qt_text){0};
    }
    if (t->count) {
        t->list[0] = all;
        t->count = 1;
        all.data = NULL;
    }
done:
    qt_free(all.data);
    return rc;
}

/* Number of bytes at s[size], where a character that is not valid begins, that U+FFFD replaces:
 * the longest beginning of a valid character, at least 1 (Unicode 16, 3.9, U+FFFD substitution). */
static size_t invalid_bytes(const char *s, size_t size)
{
    const unsigned char lead = (unsigned char)s[0];
    const size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
    unsigned low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80; /* of the second byte */
    unsigned high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    size_t n = 1;
    if (lead < 0xc2 || lead > 0xf4)
        return 1;
    for (; n < length && n < size; n++, low = 0x80, high = 0xbf)
        if ((unsigned char)s[n] < low || (unsigned char)s[n] > high)
            break;
    return n;
}

/* Appends s[size] with U+FFFD in the place of what is not UTF-8. */
static int add_valid(struct qt_text *out, const char *s, size_t size, struct qt_err *err)
{
    int rc = QT_OK;
    while (size) {
        size_t n = qt_utf8_check(s, size);
        QT_TRY(qt_text_add(out, s, n, err));
        s += n;
        size -= n;
        if (size == 0)
            break;
        n = invalid_bytes(s, size);
        QT_TRY(qt_text_add(out, REPLACEMENT, sizeof REPLACEMENT - 1, err));
        s += n;
        size -= n;
    }
done:
    return rc;
}

/* ---- steps ---------------------------------------------------------------------------------- */

static int run_fuse(struct texts *t, const struct step *step, const struct qt_detokenizer *d,
                    struct qt_err *err)
{
    (void)step;
    (void)d;
    return join(t, "", err);
}

/* The bytes that the characters of a token stand for; false: the token has other characters. */
static bool add_bytes(struct qt_text *out, const struct qt_text *token,
                      const struct qt_detokenizer *d, int *rc, struct qt_err *err)
{
    const size_t size = out->size;
    for (size_t at = 0, n; at < token->size; at += n) {
        const int32_t c = qt_utf8_char(&n, token->data + at);
        const int32_t b = (size_t)c < sizeof d->byte_of / sizeof *d->byte_of ? d->byte_of[c] : -1;
        const char byte = (char)b;
        if (b < 0) {
            out->size = size;
            return false;
        }
        *rc = qt_text_add(out, &byte, 1, err);
        if (*rc < 0)
            return true;
    }
    return true;
}

static int run_byte_level(struct texts *t, const struct step *step, const struct qt_detokenizer *d,
                          struct qt_err *err)
{
    struct qt_text bytes = {0}, valid = {0};
    int rc = QT_OK;
    (void)step;
    for (size_t i = 0; i < t->count; i++) {
        if (!add_bytes(&bytes, &t->list[i], d, &rc, err))
            rc = qt_text_add(&bytes, t->list[i].data, t->list[i].size, err);
        if (rc < 0)
            goto done;
        t->list[i].size = 0;
    }
    QT_TRY(add_valid(&valid, bytes.data, bytes.size, err));
    if (t->count) {
        qt_free(t->list[0].data);
        t->list[0] = valid;
        valid.data = NULL;
        QT_TRY(join(t, "", err));
    }
done:
    qt_free(bytes.data);
    qt_free(valid.data);
    return rc;
}

/* The byte of a token "<0x0A>"; -1: another token. */
static int byte_of_token(const struct qt_text *token)
{
    static const char digits[] = "0123456789abcdef";
    int byte = 0;
    if (token->size != 6 || memcmp(token->data, "<0x", 3) != 0 || token->data[5] != '>')
        return -1;
    for (int i = 3; i < 5; i++) {
        const char c = token->data[i];
        const char *digit = c ? strchr(digits, c >= 'A' && c <= 'F' ? c - 'A' + 'a' : c) : NULL;
        if (!digit)
            return -1;
        byte = byte * 16 + (int)(digit - digits);
    }
    return byte;
}

/* Runs of byte tokens become text in the first token of the run. A run that is not UTF-8 becomes a
 * U+FFFD for each byte. */
static int run_byte_fallback(struct texts *t, const struct step *step,
                             const struct qt_detokenizer *d, struct qt_err *err)
{
    int rc = QT_OK;
    (void)step;
    (void)d;
    for (size_t i = 0, end; i < t->count; i = end) {
        struct qt_text run = {0};
        int byte;
        for (end = i; end < t->count && (byte = byte_of_token(&t->list[end])) >= 0; end++) {
            const char c = (char)byte;
            rc = qt_text_add(&run, &c, 1, err);
            if (rc < 0)
                break;
            t->list[end].size = 0;
        }
        if (rc == QT_OK && run.size && qt_utf8_check(run.data, run.size) == run.size)
            rc = qt_text_add(&t->list[i], run.data, run.size, err);
        else
            for (size_t j = i; rc == QT_OK && j < end; j++)
                rc = qt_text_add(&t->list[j], REPLACEMENT, sizeof REPLACEMENT - 1, err);
        qt_free(run.data);
        if (rc < 0)
            return rc;
        end = qt_max_size(end, i + 1);
    }
    return rc;
}

static int replace(struct qt_text *text, const char *from, const char *to, struct qt_err *err)
{
    const size_t size = strlen(from);
    struct qt_text out = {0};
    int rc = QT_OK;
    for (size_t at = 0; at < text->size;) {
        const bool found = at + size <= text->size && memcmp(text->data + at, from, size) == 0;
        QT_TRY(qt_text_add(&out, found ? to : text->data + at, found ? strlen(to) : 1, err));
        at += found ? size : 1;
    }
    qt_free(text->data);
    *text = out;
    out.data = NULL;
done:
    qt_free(out.data);
    return rc;
}

static int run_replace(struct texts *t, const struct step *step, const struct qt_detokenizer *d,
                       struct qt_err *err)
{
    int rc = QT_OK;
    (void)d;
    for (size_t i = 0; i < t->count; i++)
        QT_TRY(replace(&t->list[i], step->from, step->first && i == 0 ? "" : step->to, err));
done:
    return rc;
}

/* What the clean-up of WordPiece replaces, in this order. */
static const char *const clean[][2] = {{" .", "."},     {" ?", "?"},           {" !", "!"},
                                       {" ,", ","},     {" ' ", "'"},          {" n't", "n't"},
                                       {" 'm", "'m"},   {" do not", " don't"}, {" 's", "'s"},
                                       {" 've", "'ve"}, {" 're", "'re"}};

/* A token that does not continue a word is preceded by a space. */
static int run_word_piece(struct texts *t, const struct step *step, const struct qt_detokenizer *d,
                          struct qt_err *err)
{
    const size_t n = strlen(step->from);
    int rc = QT_OK;
    (void)d;
    for (size_t i = 0; i < t->count; i++) {
        struct qt_text *x = &t->list[i], out = {0};
        const bool continues = i && x->size >= n && memcmp(x->data, step->from, n) == 0;
        rc = qt_text_add(&out, " ", i && !continues, err);
        if (rc == QT_OK)
            rc = qt_text_add(&out, x->data + (continues ? n : 0), x->size - (continues ? n : 0),
                             err);
        qt_free(x->data);
        *x = out;
        QT_TRY(rc);
        for (size_t j = 0; step->first && j < sizeof clean / sizeof *clean; j++)
            QT_TRY(replace(x, clean[j][0], clean[j][1], err));
    }
done:
    return rc;
}

/* The suffix of a word becomes a space, at the end nothing. */
static int run_bpe(struct texts *t, const struct step *step, const struct qt_detokenizer *d,
                   struct qt_err *err)
{
    int rc = QT_OK;
    (void)d;
    for (size_t i = 0; i < t->count; i++)
        QT_TRY(replace(&t->list[i], step->from, i + 1 == t->count ? "" : " ", err));
done:
    return rc;
}

static int run_strip(struct texts *t, const struct step *step, const struct qt_detokenizer *d,
                     struct qt_err *err)
{
    const size_t n = strlen(step->from);
    (void)d;
    (void)err;
    for (size_t i = 0; i < t->count; i++) {
        struct qt_text *x = &t->list[i];
        size_t cut = 0;
        for (size_t j = 0; j < step->start && cut + n <= x->size; j++, cut += n)
            if (memcmp(x->data + cut, step->from, n) != 0)
                break;
        if (cut)
            memmove(x->data, x->data + cut, x->size -= cut);
        for (size_t j = 0; j < step->stop && n <= x->size; j++, x->size -= n)
            if (memcmp(x->data + x->size - n, step->from, n) != 0)
                break;
    }
    return QT_OK;
}

/* ---- loading -------------------------------------------------------------------------------- */

static int load_replace(struct step *step, const json_t *section, const char *file,
                        struct qt_err *err)
{
    int rc;
    step->from = json_string_value(json_object_get(json_object_get(section, "pattern"), "String"));
    if (!step->from || !*step->from)
        return qt_fail(err, QT_E_UNSUPPORTED, file, NULL,
                       "decoder 'Replace' without a string to replace is not supported");
    QT_TRY(qt_json_need_string(&step->to, section, "content", file, err));
done:
    return rc;
}

static int load_strip(struct step *step, const json_t *section, const char *file,
                      struct qt_err *err)
{
    int rc;
    QT_TRY(qt_json_need_string(&step->from, section, "content", file, err));
    QT_TRY(qt_json_need_size(&step->start, section, "start", file, err));
    QT_TRY(qt_json_need_size(&step->stop, section, "stop", file, err));
    if (!*step->from)
        rc = qt_fail(err, QT_E_INPUT, file, NULL, "decoder 'Strip' has no character to strip");
done:
    return rc;
}

static int load_metaspace(struct step *step, const json_t *section, const char *file,
                          struct qt_err *err)
{
    const char *scheme = "always";
    bool prefix = true;
    int rc;
    step->from = "\xe2\x96\x81"; /* U+2581 */
    step->to = " ";
    QT_TRY(qt_json_get_string(&step->from, section, "replacement", file, err));
    QT_TRY(qt_json_get_string(&scheme, section, "prepend_scheme", file, err));
    QT_TRY(qt_json_get_bool(&prefix, section, "add_prefix_space", file, err));
    step->first = prefix && strcmp(scheme, "never") != 0;
    if (!*step->from)
        rc = qt_fail(err, QT_E_INPUT, file, NULL, "decoder 'Metaspace' has an empty replacement");
done:
    return rc;
}

static int load_word_piece(struct step *step, const json_t *section, const char *file,
                           struct qt_err *err)
{
    int rc;
    step->from = "##";
    step->first = true; /* with clean-up */
    QT_TRY(qt_json_get_string(&step->from, section, "prefix", file, err));
    QT_TRY(qt_json_get_bool(&step->first, section, "cleanup", file, err));
done:
    return rc;
}

static int load_bpe(struct step *step, const json_t *section, const char *file, struct qt_err *err)
{
    int rc;
    step->from = "</w>";
    QT_TRY(qt_json_get_string(&step->from, section, "suffix", file, err));
    if (!*step->from)
        rc = qt_fail(err, QT_E_INPUT, file, NULL, "decoder 'BPEDecoder' has an empty suffix");
done:
    return rc;
}

static const struct kind {
    const char *type;
    int (*run)(struct texts *t, const struct step *step, const struct qt_detokenizer *d,
               struct qt_err *err);
    int (*load)(struct step *step, const json_t *section, const char *file, struct qt_err *err);
} kinds[] = {
    {"ByteLevel", run_byte_level, NULL},
    {"ByteFallback", run_byte_fallback, NULL},
    {"Fuse", run_fuse, NULL},
    {"Replace", run_replace, load_replace},
    {"Strip", run_strip, load_strip},
    {"Metaspace", run_replace, load_metaspace},
    {"WordPiece", run_word_piece, load_word_piece},
    {"BPEDecoder", run_bpe, load_bpe},
};

static int load_step(struct qt_detokenizer *d, const json_t *section, int depth, struct qt_err *err)
{
    const char *type;
    int rc;
    if (!json_is_object(section) || depth > MAX_STEPS)
        return qt_fail(err, QT_E_INPUT, d->file, NULL, "decoder is not an object");
    QT_TRY(qt_json_need_string(&type, section, "type", d->file, err));
    if (strcmp(type, "Sequence") == 0) {
        const json_t *list = json_object_get(section, "decoders");
        if (!json_is_array(list))
            return qt_fail(err, QT_E_INPUT, d->file, NULL, "decoders is not an array");
        for (size_t i = 0; i < json_array_size(list); i++)
            QT_TRY(load_step(d, json_array_get(list, i), depth + 1, err));
        goto done;
    }
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (strcmp(type, kinds[i].type) != 0)
            continue;
        if (d->count == MAX_STEPS)
            return qt_fail(err, QT_E_UNSUPPORTED, d->file, NULL,
                           "the decoder has more than %d steps", MAX_STEPS);
        struct step *step = &d->steps[d->count++];
        *step = (struct step){.run = kinds[i].run};
        return kinds[i].load ? kinds[i].load(step, section, d->file, err) : QT_OK;
    }
    rc = qt_fail(err, QT_E_UNSUPPORTED, d->file, NULL, "decoder '%.100s' is not supported", type);
done:
    return rc;
}

static int set_token(struct qt_detokenizer *d, const char *text, const json_t *id, bool special,
                     struct qt_err *err)
{
    const json_int_t at = json_is_integer(id) ? json_integer_value(id) : -1;
    if (at < 0 || (uint64_t)at >= d->vocab)
        return qt_fail(err, QT_E_INPUT, d->file, NULL, "token '%.200s' has no valid id", text);
    d->tokens[at] = (struct token){text, special};
    return QT_OK;
}

static int load_tokens(struct qt_detokenizer *d, struct qt_err *err)
{
    json_t *vocab = json_object_get(json_object_get(d->from.root, "model"), "vocab"), *id;
    const json_t *added = json_object_get(d->from.root, "added_tokens");
    const char *text;
    int rc;
    QT_TRY(qt_array_new(&d->tokens, d->vocab, sizeof *d->tokens, err));
    if (json_is_array(vocab)) /* Unigram: texts and scores */
        for (size_t i = 0; i < qt_min_size(json_array_size(vocab), d->vocab); i++)
            d->tokens[i].text = json_string_value(json_array_get(json_array_get(vocab, i), 0));
    else
        json_object_foreach (vocab, text, id)
            QT_TRY(set_token(d, text, id, false, err));
    for (size_t i = 0; i < json_array_size(added); i++) {
        const json_t *item = json_array_get(added, i);
        bool special = false;
        QT_TRY(qt_json_get_bool(&special, item, "special", d->file, err));
        QT_TRY(qt_json_need_string(&text, item, "content", d->file, err));
        if (*text)
            QT_TRY(set_token(d, text, json_object_get(item, "id"), special, err));
    }
done:
    return rc;
}

int qt_detokenizer_open(struct qt_detokenizer **out, const struct qt_tokenizer *tok,
                        const char *dir, struct qt_err *err)
{
    struct qt_detokenizer *d = NULL;
    int rc;
    *out = NULL;
    QT_TRY(qt_array_new(&d, 1, sizeof *d, err));
    *d = (struct qt_detokenizer){.vocab = qt_tokenizer_vocab(tok)};
    QT_TRY(qt_tokenizer_file_open(&d->from, dir, err));
    d->file = d->from.path;
    QT_TRY(load_tokens(d, err));
    const json_t *decoder = json_object_get(d->from.root, "decoder");
    if (decoder && !json_is_null(decoder))
        QT_TRY(load_step(d, decoder, 0, err));
    memset(d->byte_of, -1, sizeof d->byte_of);
    for (int32_t b = 0; b < 256; b++)
        d->byte_of[qt_byte_char(b)] = b;
    *out = d;
    d = NULL;
done:
    qt_detokenizer_close(d);
    return rc;
}

void qt_detokenizer_close(struct qt_detokenizer *d)
{
    if (!d)
        return;
    qt_tokenizer_file_close(&d->from);
    qt_free(d->tokens);
    qt_free(d);
}

/* ---- decoding ------------------------------------------------------------------------------- */

int qt_detokenize(char **text, size_t *size, const struct qt_detokenizer *d, const uint32_t *ids,
                  size_t count, struct qt_err *err)
{
    struct texts t = {0};
    struct qt_text out = {0};
    int rc;
    *text = NULL;
    *size = 0;
    QT_TRY(qt_array_new(&t.list, count, sizeof *t.list, err));
    for (size_t i = 0; i < count; i++) {
        const struct token *token = ids[i] < d->vocab ? &d->tokens[ids[i]] : NULL;
        if (!token || !token->text || token->special)
            continue;
        QT_TRY(qt_text_add(&t.list[t.count++], token->text, strlen(token->text), err));
    }
    for (size_t i = 0; i < d->count; i++)
        QT_TRY(d->steps[i].run(&t, &d->steps[i], d, err));
    QT_TRY(join(&t, d->count ? "" : " ", err));
    if (t.count)
        QT_TRY(qt_text_add(&out, t.list[0].data, t.list[0].size, err));
    QT_TRY(qt_text_add(&out, "", 1, err)); /* a NUL */
    *text = out.data;
    *size = out.size - 1;
    out.data = NULL;
done:
    qt_free(out.data);
    texts_free(&t);
    return rc;
}
