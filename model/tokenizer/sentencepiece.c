/*
 * tokenizer.model of SentencePiece: a protocol buffer. The fields that are read:
 *
 *   1 pieces (repeated)   1 text, 2 score (float), 3 type
 *   2 trainer             3 model type, 24 spaces as suffixes, 35 byte fallback
 *   3 normalizer          2 charsmap, 3 prefix, 4 collapse spaces, 5 escape spaces
 */
#include "model/tokenizer/internal.h"

#include <nettle/base64.h>
#include <stdlib.h>
#include <string.h>

/* ---- protocol buffers ----------------------------------------------------------------------- */

struct bytes {
    const char *p, *end;
};

struct field {
    unsigned number, wire; /* wire: 0 varint, 1 64 bits, 2 bytes, 5 32 bits */
    uint64_t value;        /* of wire 0, 1 and 5 */
    struct bytes bytes;    /* of wire 2 */
};

static bool get_varint(uint64_t *out, struct bytes *b)
{
    *out = 0;
    for (unsigned shift = 0; shift < 64 && b->p < b->end; shift += 7) {
        const unsigned char c = (unsigned char)*b->p++;
        *out |= (uint64_t)(c & 0x7f) << shift;
        if (!(c & 0x80))
            return true;
    }
    return false;
}

static bool get_fixed(uint64_t *out, struct bytes *b, size_t size)
{
    if ((size_t)(b->end - b->p) < size)
        return false;
    *out = 0;
    for (size_t i = 0; i < size; i++)
        *out |= (uint64_t)(unsigned char)*b->p++ << 8 * i;
    return true;
}

/* The next field; false at the end or, with *bad set, if the message is damaged. */
static bool next_field(struct field *f, bool *bad, struct bytes *b)
{
    uint64_t tag, size;
    bool ok;
    if (b->p == b->end)
        return false;
    *bad = true;
    if (!get_varint(&tag, b) || tag >> 3 > 1u << 29)
        return false;
    *f = (struct field){.number = (unsigned)(tag >> 3), .wire = tag & 7};
    if (f->wire == 2) {
        ok = get_varint(&size, b) && size <= (uint64_t)(b->end - b->p);
        if (ok) {
            f->bytes = (struct bytes){b->p, b->p + size};
            b->p += size;
        }
    } else {
        ok = f->wire == 0   ? get_varint(&f->value, b)
             : f->wire == 1 ? get_fixed(&f->value, b, 8)
                            : f->wire == 5 && get_fixed(&f->value, b, 4);
    }
    *bad = !ok;
    return ok;
}

/* ---- the model ------------------------------------------------------------------------------ */

enum piece_type { NORMAL = 1, UNKNOWN, CONTROL, USER, UNUSED, BYTE };
enum model_type { UNIGRAM = 1, BPE };

struct piece {
    char *text; /* owned */
    float score;
    unsigned type;
};

struct reader {
    struct qt_tokenizer_file *file;
    struct piece *pieces;
    size_t count, capacity;
    unsigned model;
    bool suffix, byte_fallback, escape;
    struct bytes charsmap;
    struct qt_charsmap_rules rules;
    struct qt_err *err;
};

static int damaged(struct reader *r)
{
    return qt_fail(r->err, QT_E_INPUT, r->file->path, NULL,
                   "not a SentencePiece model: the protocol buffer is damaged");
}

static int read_piece(struct reader *r, struct bytes b)
{
    struct piece piece = {.type = NORMAL};
    struct bytes text = {0};
    struct field f;
    bool bad = false;
    int rc;
    while (next_field(&f, &bad, &b)) {
        const uint32_t bits = (uint32_t)f.value;
        if (f.number == 1 && f.wire == 2)
            text = f.bytes;
        else if (f.number == 2 && f.wire == 5)
            piece.score = qt_bits_f32(bits);
        else if (f.number == 3 && f.wire == 0)
            piece.type = bits;
    }
    const size_t size = text.p ? (size_t)(text.end - text.p) : 0;
    if (bad || r->count >= QT_MAX_ID - 1)
        return damaged(r);
    if (size && (qt_utf8_check(text.p, size) != size || memchr(text.p, '\0', size)))
        return qt_fail(r->err, QT_E_INPUT, r->file->path, NULL, "piece %zu is not UTF-8", r->count);
    QT_TRY(qt_array_new(&piece.text, size + 1, 1, r->err));
    if (size)
        memcpy(piece.text, text.p, size);
    rc = qt_array_grow(&r->pieces, &r->capacity, r->count + 1, sizeof piece, r->err);
    if (rc < 0)
        qt_free(piece.text);
    else
        r->pieces[r->count++] = piece;
done:
    return rc;
}

static int read_trainer(struct reader *r, struct bytes b)
{
    struct field f;
    bool bad = false;
    while (next_field(&f, &bad, &b))
        if (f.number == 3)
            r->model = (unsigned)f.value;
        else if (f.number == 24)
            r->suffix = f.value != 0;
        else if (f.number == 35)
            r->byte_fallback = f.value != 0;
    return bad ? damaged(r) : QT_OK;
}

static int read_normalizer(struct reader *r, struct bytes b)
{
    struct field f;
    bool bad = false;
    while (next_field(&f, &bad, &b))
        if (f.number == 2 && f.wire == 2)
            r->charsmap = f.bytes;
        else if (f.number == 3)
            r->rules.prefix = f.value != 0;
        else if (f.number == 4)
            r->rules.collapse = f.value != 0;
        else if (f.number == 5)
            r->escape = f.value != 0;
    return bad ? damaged(r) : QT_OK;
}

static int read_file(struct reader *r, struct bytes b)
{
    struct field f;
    bool bad = false;
    int rc = QT_OK;
    while (next_field(&f, &bad, &b)) {
        if (f.wire != 2)
            continue;
        QT_TRY(f.number == 1   ? read_piece(r, f.bytes)
               : f.number == 2 ? read_trainer(r, f.bytes)
               : f.number == 3 ? read_normalizer(r, f.bytes)
                               : QT_OK);
    }
    if (bad || r->count == 0)
        return damaged(r);
    if (r->model != UNIGRAM && r->model != BPE)
        return qt_fail(r->err, QT_E_UNSUPPORTED, r->file->path, NULL,
                       "SentencePiece models of words or characters are not supported");
    if (r->suffix || !r->escape)
        return qt_fail(r->err, QT_E_UNSUPPORTED, r->file->path, NULL,
                       "SentencePiece models with %s are not supported",
                       r->suffix ? "spaces at the end of words" : "spaces that are not escaped");
done:
    return rc;
}

/* ---- as tokenizer.json ---------------------------------------------------------------------- */

static int no_memory(struct reader *r)
{
    return qt_no_memory(r->err, NULL);
}

static int by_score(const void *pa, const void *pb)
{
    const struct piece *const *a = pa, *const *b = pb;
    return (*a)->score > (*b)->score ? -1 : (*a)->score < (*b)->score;
}

/* The ranks of merges: pieces with a larger score first, and equal ones together. */
static int set_ranks(struct reader *r)
{
    const struct piece **order = NULL;
    int rc;
    uint32_t rank = 0;
    QT_TRY(qt_array_new(&order, r->count, sizeof *order, r->err));
    for (size_t i = 0; i < r->count; i++) {
        order[i] = &r->pieces[i];
        QT_TRY(qt_ids_add(&r->file->ranks, QT_NO_ID, r->err));
    }
    qsort(order, r->count, sizeof *order, by_score);
    for (size_t i = 0; i < r->count; i++) {
        rank += i > 0 && order[i]->score < order[i - 1]->score;
        if (order[i]->type == NORMAL)
            r->file->ranks.data[order[i] - r->pieces] = rank;
    }
done:
    qt_free(order);
    return rc;
}

static int add_vocab(struct reader *r, json_t *vocab, json_t *added)
{
    for (size_t i = 0; i < r->count; i++) {
        const struct piece *p = &r->pieces[i];
        const bool special = p->type == CONTROL || p->type == UNKNOWN;
        int failed;
        if (json_is_array(vocab)) {
            failed = json_array_append_new(vocab, json_pack("[s,f]", p->text, (double)p->score));
        } else if (json_object_get(vocab, p->text)) {
            return qt_fail(r->err, QT_E_INPUT, r->file->path, NULL, "piece '%.100s' appears twice",
                           p->text);
        } else {
            failed = json_object_set_new(vocab, p->text, json_integer((json_int_t)i));
        }
        if (!failed && *p->text && (special || p->type == USER))
            failed = json_array_append_new(added, json_pack("{s:I,s:s,s:b,s:b}", "id",
                                                            (json_int_t)i, "content", p->text,
                                                            "special", special, "normalized", 0));
        if (failed)
            return no_memory(r);
    }
    return QT_OK;
}

static json_t *base64_json(struct bytes b)
{
    const size_t size = b.p ? (size_t)(b.end - b.p) : 0;
    char *text;
    struct qt_err ignored;
    if (qt_array_new(&text, BASE64_ENCODE_RAW_LENGTH(size) + 1, 1, &ignored) < 0)
        return NULL;
    base64_encode_raw(text, size, (const uint8_t *)b.p);
    json_t *out = json_string(text);
    qt_free(text);
    return out;
}

/* The normalizer, under a name that tokenizer.json does not have. */
static json_t *normalizer_json(const struct reader *r)
{
    return json_pack("{s:s,s:o,s:b,s:b}", "type", "SentencePiece", "precompiled_charsmap",
                     base64_json(r->charsmap), "prefix", r->rules.prefix, "collapse",
                     r->rules.collapse);
}

static size_t find_type(const struct reader *r, unsigned type, const char *text)
{
    for (size_t i = 0; i < r->count; i++)
        if (r->pieces[i].type == type && (!text || strcmp(r->pieces[i].text, text) == 0))
            return i;
    return SIZE_MAX;
}

static int make_root(struct reader *r, json_t *vocab, json_t *added)
{
    const size_t unk = find_type(r, UNKNOWN, NULL), bos = find_type(r, CONTROL, "<s>");
    const bool unigram = r->model == UNIGRAM;
    json_t *model = json_pack("{s:s,s:O,s:b,s:b}", "type", unigram ? "Unigram" : "BPE", "vocab",
                              vocab, "byte_fallback", r->byte_fallback, "fuse_unk", 1);
    json_t *post = bos == SIZE_MAX ? json_null()
                                   : json_pack("{s:s,s:[{s:{s:s}},{s:{s:s}}],s:{s:{s:[I]}}}",
                                               "type", "TemplateProcessing", "single",
                                               "SpecialToken", "id", "<s>", "Sequence", "id", "A",
                                               "special_tokens", "<s>", "ids", (json_int_t)bos);
    int failed = !model;
    if (!failed && unk != SIZE_MAX)
        failed = unigram
                     ? json_object_set_new(model, "unk_id", json_integer((json_int_t)unk))
                     : json_object_set_new(model, "unk_token", json_string(r->pieces[unk].text));
    json_t *decoders =
        json_pack("[{s:s,s:{s:s},s:s},{s:s},{s:s}]", "type", "Replace", "pattern", "String",
                  "\xe2\x96\x81", "content", " ", "type", "ByteFallback", "type", "Fuse");
    if (r->rules.prefix && decoders)
        failed |= json_array_append_new(decoders, json_pack("{s:s,s:s,s:i,s:i}", "type", "Strip",
                                                            "content", " ", "start", 1, "stop", 0));
    r->file->root =
        failed ? NULL
               : json_pack("{s:o,s:O,s:o,s:n,s:{s:s,s:o},s:o}", "model", model, "added_tokens",
                           added, "normalizer", normalizer_json(r), "pre_tokenizer", "decoder",
                           "type", "Sequence", "decoders", decoders, "post_processor", post);
    return r->file->root ? QT_OK : no_memory(r);
}

int qt_sentencepiece_read(struct qt_tokenizer_file *file, const char *data, size_t size,
                          struct qt_err *err)
{
    struct reader r = {.file = file,
                       .model = UNIGRAM,
                       .escape = true,
                       .rules = {.whole = true, .prefix = true, .collapse = true},
                       .err = err};
    json_t *vocab = NULL, *added = json_array();
    int rc;
    QT_TRY(read_file(&r, (struct bytes){data, data + size}));
    vocab = r.model == UNIGRAM ? json_array() : json_object();
    if (!vocab || !added) {
        rc = no_memory(&r);
        goto done;
    }
    QT_TRY(set_ranks(&r));
    QT_TRY(add_vocab(&r, vocab, added));
    QT_TRY(make_root(&r, vocab, added));
done:
    for (size_t i = 0; i < r.count; i++)
        qt_free(r.pieces[i].text);
    qt_free(r.pieces);
    json_decref(vocab);
    json_decref(added);
    return rc;
}
