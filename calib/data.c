/* Reads texts and token ids for calibration and evaluation, and selects windows. */
#include "calib/data.h"

#include <stdio.h>
#include <string.h>

/* ---- ids ------------------------------------------------------------------------------------ */

struct reader {
    struct qt_data *data;
    size_t capacity;
    const struct qt_data_options *opt;
    struct qt_tokenizer *tok; /* opened for the first text */
    struct qt_chat *chat;     /* opened for the first conversation */
    const char *path;         /* of the current file */
};

/* Appends the ids, or takes the array if there are none yet: it may have gigabytes. */
static int append_ids(struct reader *r, uint32_t **ids, size_t count, struct qt_err *err)
{
    struct qt_data *data = r->data;
    if (data->count == 0 && *ids) {
        qt_free(data->ids);
        data->ids = *ids;
        data->count = r->capacity = count;
        *ids = NULL;
        return QT_OK;
    }
    int rc = qt_array_grow(&data->ids, &r->capacity, data->count + count, sizeof **ids, err);
    if (rc < 0)
        return rc;
    if (count)
        memcpy(data->ids + data->count, *ids, count * sizeof **ids);
    data->count += count;
    return QT_OK;
}

/* The number of ids that are still wanted; 0: no limit. */
static size_t wanted(const struct reader *r)
{
    return r->opt->most ? r->opt->most - r->data->count : 0;
}

static bool enough(const struct reader *r)
{
    return r->opt->most && r->data->count >= r->opt->most;
}

/* ---- texts ---------------------------------------------------------------------------------- */

/* Opens the tokenizer and notes what decides about a BOS. */
static int need_tokenizer(struct reader *r, struct qt_err *err)
{
    static const char *const options[] = {NULL, "--bos yes", "--bos no"};
    uint32_t id;
    int rc = QT_OK;
    if (r->tok)
        return QT_OK;
    QT_TRY(qt_tokenizer_open(&r->tok, r->opt->dir, err));
    r->data->bos = qt_tokenizer_adds_bos(r->tok);
    r->data->why = qt_tokenizer_bos_file(r->tok);
    if (r->opt->bos == QT_BOS_YES)
        QT_TRY(qt_tokenizer_bos(&id, r->tok, err));
    if (r->opt->bos != QT_BOS_AUTO) {
        r->data->bos = r->opt->bos == QT_BOS_YES;
        r->data->why = options[r->opt->bos];
    }
done:
    return rc;
}

static int encode(uint32_t **ids, size_t *count, struct reader *r, const char *text, size_t size,
                  size_t most, struct qt_err *err)
{
    const struct qt_encode_options opt = {
        .special = true, .bos = r->opt->bos, .most = most, .interrupted = r->opt->interrupted};
    int rc = QT_OK;
    *ids = NULL;
    QT_TRY(need_tokenizer(r, err));
    rc = qt_tokenizer_encode_most(ids, count, r->tok, text, size, &opt, err);
    if (rc < 0 && err && !err->file[0])
        snprintf(err->file, sizeof err->file, "%s", r->path);
done:
    return rc;
}

static int append_encoded(struct reader *r, uint32_t **ids, size_t count, struct qt_err *err)
{
    for (size_t i = 0; i < count; i++)
        if (r->opt->vocab && (*ids)[i] >= r->opt->vocab)
            return qt_fail(err, QT_E_INPUT, r->path, NULL,
                           "the tokenizer gives id %u, but the model's vocabulary has %zu ids",
                           (*ids)[i], r->opt->vocab);
    return append_ids(r, ids, count, err);
}

static int read_record_text(void *ctx, bool *stop, const char *text, size_t size, size_t line,
                            struct qt_err *err)
{
    struct reader *r = ctx;
    uint32_t *ids = NULL;
    size_t count;
    struct qt_err inner = {0};
    int rc = encode(&ids, &count, r, text, size, wanted(r), &inner);
    if (rc < 0)
        qt_fail(err, rc, inner.file, NULL, "line %zu: %s", line, inner.reason);
    else
        rc = append_encoded(r, &ids, count, err);
    r->data->texts++;
    *stop = enough(r);
    qt_free(ids);
    return rc;
}

/* ---- conversations -------------------------------------------------------------------------- */

/* Encodes what the chat template writes, special tokens included. */
static int encode_chat(uint32_t **ids, size_t *count, struct reader *r, const json_t *messages,
                       const json_t *tools, struct qt_err *err)
{
    const struct qt_encode_options opt = {.interrupted = r->opt->interrupted};
    char *text = NULL;
    uint32_t bos = 0;
    size_t size, most;
    int rc;
    *ids = NULL;
    QT_TRY(need_tokenizer(r, err));
    if (!r->chat)
        QT_TRY(qt_chat_open(&r->chat, r->opt->dir, err));
    QT_TRY(qt_chat_render(&text, &size, r->chat, messages, tools, false, err));
    QT_TRY(qt_tokenizer_encode_most(ids, count, r->tok, text, size, &opt, err));
    if (r->opt->bos != QT_BOS_AUTO && qt_tokenizer_bos(&bos, r->tok, NULL) == QT_OK) {
        const bool has = *count && (*ids)[0] == bos;
        most = *count;
        if (r->opt->bos == QT_BOS_YES && !has) {
            QT_TRY(qt_array_grow(ids, &most, *count + 1, sizeof **ids, err));
            memmove(*ids + 1, *ids, *count * sizeof **ids);
            (*ids)[0] = bos;
            ++*count;
        } else if (r->opt->bos == QT_BOS_NO && has) {
            memmove(*ids, *ids + 1, --*count * sizeof **ids);
        }
    }
done:
    qt_free(text);
    return rc;
}

static int read_record_chat(void *ctx, bool *stop, const json_t *record, size_t line,
                            struct qt_err *err)
{
    struct reader *r = ctx;
    json_t *messages = NULL, *tools = NULL;
    struct qt_err inner = {0};
    uint32_t *ids = NULL;
    size_t count = 0;
    int rc = qt_chat_read(&messages, &tools, record, line, r->path, err);
    if (rc < 0)
        return rc;
    rc = encode_chat(&ids, &count, r, messages, tools, &inner);
    if (rc < 0)
        qt_fail(err, rc, inner.file[0] ? inner.file : r->path, NULL, "record in line %zu of %s: %s",
                line, r->path, inner.reason);
    else
        rc = append_encoded(r, &ids, r->opt->most ? qt_min_size(count, wanted(r)) : count, err);
    r->data->chats++;
    *stop = enough(r);
    qt_free(ids);
    json_decref(messages);
    json_decref(tools);
    return rc;
}

/* ---- plain text ----------------------------------------------------------------------------- */

/*
 * Reads a file of plain text, one document. If only the first ids are wanted, the beginning of the
 * file is enough: as much as gives AHEAD more ids than wanted, because the end of a text can change
 * the ids before it.
 */
static int read_text(struct reader *r, struct qt_stream *s, struct qt_err *err)
{
    enum { AHEAD = 1 << 16, START = 1 << 20, BYTES_PER_ID = 8 };
    const size_t want = wanted(r);
    uint32_t *ids = NULL;
    size_t count = 0, part, bytes;
    int rc;
    if (!want || qt_mul_overflow(&part, want, BYTES_PER_ID) || qt_add_overflow(&part, part, START))
        part = SIZE_MAX;
    for (;; part = qt_mul_overflow(&bytes, part, 4) ? SIZE_MAX : bytes) {
        QT_TRY(qt_stream_fill(s, part, err));
        const size_t size = s->ended ? s->size : s->size - qt_utf8_cut(s->data, s->size);
        QT_TRY(
            encode(&ids, &count, r, s->data, size, s->ended || !want ? want : want + AHEAD, err));
        if (s->ended || count == want + AHEAD)
            break;
        qt_free(ids);
        ids = NULL;
    }
    rc = append_encoded(r, &ids, want ? qt_min_size(count, want) : count, err);
    r->data->texts++;
done:
    qt_free(ids);
    return rc;
}

/* ---- token ids ------------------------------------------------------------------------------ */

static int read_ids(struct reader *r, struct qt_stream *s, const char *name, struct qt_err *err)
{
    const struct qt_token_ids_options opt = {
        .vocab = r->opt->vocab, .most = wanted(r), .interrupted = r->opt->interrupted};
    const void *file = s->map.data;
    size_t size = s->map.size, count, need = SIZE_MAX;
    uint32_t *ids = NULL;
    int rc;
    if (s->gzip || s->pipe >= 0) {
        const bool raw = qt_name_ends_in(name, ".u16") || qt_name_ends_in(name, ".u32");
        if (raw && opt.most && qt_mul_overflow(&need, opt.most, sizeof *ids))
            need = SIZE_MAX;
        QT_TRY(qt_stream_fill(s, need, err));
        file = s->data;
        size = s->ended ? s->size : need;
    }
    QT_TRY(qt_token_ids_parse(&ids, &count, file, size, name, &opt, r->path, err));
    QT_TRY(append_ids(r, &ids, count, err));
done:
    qt_free(ids);
    return rc;
}

/* ---- kinds of files ------------------------------------------------------------------------- */

#define KINDS_OF_DATA "UTF-8 text, JSON, a .npy array, or token ids in a .u16 or .u32 file"

/* True if the start of a file is UTF-8 text; U+0000 and other control characters are rare in it. */
static bool is_text(const char *p, size_t size)
{
    size_t odd = 0;
    for (size_t i = 0; i < size; i++)
        odd += (unsigned char)p[i] < 0x20 && (!p[i] || !strchr("\t\n\v\f\r\b\x1b", p[i]));
    return odd <= size / 8 && qt_utf8_check(p, size) == size;
}

static enum qt_kind kind_of(const char *head, size_t size)
{
    enum { TEXT_LEAST = 16 };
    const enum qt_kind kind = qt_file_kind(head, size);
    switch (kind) {
    case QT_KIND_GGUF:
    case QT_KIND_GGML:
    case QT_KIND_BZIP2:
    case QT_KIND_PARQUET:
    case QT_KIND_ARROW:
    case QT_KIND_IMAGE:
    case QT_KIND_MEDIA:
    case QT_KIND_RAR:
        /* Only the first letters of such a file can be text. */
        return size >= TEXT_LEAST && is_text(head, size) ? QT_KIND_TEXT : kind;
    case QT_KIND_UNKNOWN:
        return is_text(head, size) ? QT_KIND_TEXT : kind;
    default:
        return kind;
    }
}

static int refuse_unknown(const char *head, size_t size, const char *path, struct qt_err *err)
{
    const size_t bad = qt_utf8_check(head, size);
    if (bad < size)
        return qt_fail(err, QT_E_INPUT, path, NULL,
                       "not UTF-8 at byte %zu: a data file must be " KINDS_OF_DATA, bad);
    return qt_fail(err, QT_E_INPUT, path, NULL,
                   "binary data of an unknown kind: a data file must be " KINDS_OF_DATA);
}

/* Raw ids may begin with any bytes; only what cannot be an accident is refused. */
static int check_raw_ids(const char *head, size_t size, const char *path, struct qt_err *err)
{
    enum { TEXT_LEAST = 16 };
    switch (kind_of(head, size)) {
    case QT_KIND_JSON:
    case QT_KIND_TEXT:
    case QT_KIND_LFS:
    case QT_KIND_HTML:
    case QT_KIND_XML:
        if (size < TEXT_LEAST)
            return QT_OK;
        break;
    case QT_KIND_NPY:
    case QT_KIND_NPZ:
    case QT_KIND_ZIP:
    case QT_KIND_TORCH:
    case QT_KIND_SAFETENSORS:
    case QT_KIND_GGUF:
    case QT_KIND_HDF5:
    case QT_KIND_ZSTD:
    case QT_KIND_XZ:
    case QT_KIND_PARQUET:
    case QT_KIND_ARROW:
    case QT_KIND_SQLITE:
    case QT_KIND_PDF:
    case QT_KIND_TAR:
    case QT_KIND_7Z:
        break;
    default:
        return QT_OK;
    }
    return qt_kind_expect(QT_KIND_UNKNOWN, "raw token ids", head, size, path, err);
}

static bool is_json_name(const char *name)
{
    return qt_name_ends_in(name, ".jsonl") || qt_name_ends_in(name, ".json") ||
           qt_name_ends_in(name, ".ndjson");
}

/* The content selects the kind of file; the ending of `name` only that of raw ids, which nothing
 * else shows, and of JSON that does not begin as such. */
static int read_content(struct reader *r, struct qt_stream *s, const char *name, struct qt_err *err)
{
    enum { HEAD = 1 << 16 };
    const struct qt_record_sink sink = {r, read_record_text, read_record_chat};
    int rc;
    QT_TRY(qt_stream_fill(s, HEAD, err));
    size_t size = qt_min_size(s->size, HEAD);
    if (size < s->size || !s->ended)
        size -= qt_utf8_cut(s->data, size);
    if (qt_name_ends_in(name, ".u16") || qt_name_ends_in(name, ".u32")) {
        QT_TRY(check_raw_ids(s->data, size, r->path, err));
        return read_ids(r, s, name, err);
    }
    const enum qt_kind kind = kind_of(s->data, size);
    if (kind == QT_KIND_NPY || qt_name_ends_in(name, ".npy"))
        return read_ids(r, s, name, err);
    if (kind == QT_KIND_UNKNOWN)
        return refuse_unknown(s->data, size, r->path, err);
    if (kind != QT_KIND_EMPTY && kind != QT_KIND_TEXT && kind != QT_KIND_JSON)
        return qt_kind_expect(QT_KIND_TEXT, KINDS_OF_DATA, s->data, size, r->path, err);
    if (size >= 3 && memcmp(s->data, "\xef\xbb\xbf", 3) == 0) { /* BOM */
        qt_stream_consume(s, 3);
        size -= 3;
    }
    if (is_json_name(name) || qt_text_is_json(s->data, size))
        return qt_records_read(s, &sink, err);
    return read_text(r, s, err);
done:
    return rc;
}

const char *qt_data_name(const char *path)
{
    return strcmp(path, "-") == 0 ? "standard input" : path;
}

static int read_file(struct reader *r, const char *path, struct qt_err *err)
{
    struct qt_stream s = {.pipe = -1};
    char *name = NULL;
    int rc;
    r->path = qt_data_name(path);
    const size_t n = strlen(path) - (qt_name_ends_in(path, ".gz") ? strlen(".gz") : 0);
    QT_TRY(qt_string_format(&name, err, "%.*s", (int)n, path));
    QT_TRY(qt_stream_open(&s, path, r->opt->interrupted, err));
    QT_TRY(read_content(r, &s, name, err));
    r->data->bytes = qt_max_size(r->data->bytes, qt_max_size(s.map.size, s.size));
done:
    qt_stream_close(&s);
    qt_free(name);
    return rc;
}

int qt_data_read(struct qt_data *out, const char *const *paths, size_t n,
                 const struct qt_data_options *opt, struct qt_err *err)
{
    struct reader r = {.data = out, .opt = opt};
    int rc = QT_OK;
    *out = (struct qt_data){.first = n ? qt_data_name(paths[0]) : NULL};
    for (size_t i = 0; i < n && rc == QT_OK && !enough(&r); i++)
        rc = read_file(&r, paths[i], err);
    out->bytes += out->count * sizeof *out->ids;
    qt_chat_close(r.chat);
    qt_tokenizer_close(r.tok);
    if (rc < 0)
        qt_data_free(out);
    return rc;
}

void qt_data_free(struct qt_data *data)
{
    qt_free(data->ids);
    *data = (struct qt_data){0};
}

/* ---- windows -------------------------------------------------------------------------------- */

/* Chooses windows in ascending order. seed = 0: even spacing; else selection sampling (Knuth 3.4.2,
 * algorithm S). */
static void choose(size_t *chosen, size_t samples, size_t windows, uint64_t seed)
{
    for (size_t i = 0, taken = 0; i < windows && taken < samples; i++) {
        bool take = seed ? qt_splitmix64(&seed) % (windows - i) < samples - taken
                         : i == taken * windows / samples;
        if (take)
            chosen[taken++] = i;
    }
}

int qt_data_windows(uint32_t **out, const struct qt_data *data, size_t samples, size_t seqlen,
                    uint64_t seed, struct qt_err *err)
{
    size_t windows = seqlen ? data->count / seqlen : 0, *chosen = NULL;
    int rc = QT_OK;
    *out = NULL;
    if (samples == 0 || samples > windows)
        return qt_fail(err, QT_E_INPUT, data->first, NULL,
                       "%zu tokens make %zu windows of %zu, but %zu are wanted; lower %s--seqlen, "
                       "or give more data",
                       data->count, windows, seqlen, samples, windows ? "--samples or " : "");
    QT_TRY(qt_array_new(&chosen, samples, sizeof *chosen, err));
    QT_TRY(qt_array_new(out, samples * seqlen, sizeof **out, err)); /* at most data->count */
    choose(chosen, samples, windows, seed);
    for (size_t i = 0; i < samples; i++)
        memcpy(*out + i * seqlen, data->ids + chosen[i] * seqlen, seqlen * sizeof **out);
done:
    qt_free(chosen);
    return rc;
}
