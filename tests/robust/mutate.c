/* Random changes of files that keep the parts around the change valid. */
#include "tests/robust/robust.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- bytes ---------------------------------------------------------------------------------- */

static const uint64_t numbers[] = {
    0,
    1,
    2,
    3,
    7,
    8,
    127,
    128,
    255,
    256,
    32767,
    65535,
    65536,
    16777217,
    2147483647,
    2147483648,
    4294967295u,
    4294967296u,
    (1ull << 40) + 1,
    1ull << 62,
    INT64_MAX,
    1ull << 63,
    UINT64_MAX - 7,
    UINT64_MAX,
};

/* Stores a number of 1 to 8 bytes, little-endian, at `at`: an extreme one or one near the old. */
static void set_number(struct bytes *b, size_t at, size_t width)
{
    uint64_t value = 0;
    if (at >= b->size)
        return;
    width = width < b->size - at ? width : b->size - at;
    memcpy(&value, b->data + at, width);
    switch (below(4)) {
    case 0:
        value += 1 + below(16);
        break;
    case 1:
        value -= 1 + below(16);
        break;
    default:
        value = numbers[below(COUNT(numbers))];
    }
    memcpy(b->data + at, &value, width);
}

static void copy_range(struct bytes *b)
{
    size_t from = below(b->size), size = below(64) + 1;
    struct bytes part = bytes_copy(b->data + from, size < b->size - from ? size : b->size - from);
    bytes_splice(b, below(b->size + 1), below(2) ? part.size : 0, part.data, part.size);
    bytes_free(&part);
}

void mutate_raw(struct bytes *b)
{
    static const char zeros[64];
    if (b->size == 0) {
        bytes_splice(b, 0, 0, zeros, 1 + below(9));
        return;
    }
    size_t at = below(b->size);
    switch (below(8)) {
    case 0:
        b->data[at] ^= (unsigned char)(1u << below(8));
        break;
    case 1:
        b->data[at] = (unsigned char)below(256);
        break;
    case 2:
        set_number(b, at, (size_t)1 << below(4));
        break;
    case 3:
        bytes_splice(b, at, 1 + below(64), NULL, 0);
        break;
    case 4:
        bytes_splice(b, at, b->size, NULL, 0);
        break;
    case 5:
        bytes_splice(b, below(2) ? at : b->size, 0, zeros, 1 + below(sizeof zeros));
        break;
    default:
        copy_range(b);
    }
}

/* ---- text ----------------------------------------------------------------------------------- */

static void insert_text(struct bytes *b, size_t at, const char *text)
{
    bytes_splice(b, at, 0, text, strlen(text));
}

void mutate_text(struct bytes *b)
{
    static const char *const pieces[] = {
        "\xff",
        "\xc3",
        "\xed\xa0\x80",
        "\xf4\x90\x80\x80",
        "\xc0\xaf",
        "\xef\xbb\xbf",
        "\r\n",
        "\r",
        "\n\n\n",
        "\t",
        " ",
        "\xe2\x80\xa8",
        "e\xcc\x81\xcc\x81\xcc\x81",
        "\xf0\x9f\x98\x80",
        "<s>",
        "</s>",
        "{",
        "\"",
        "\\u0000",
        "\x01",
        "\x7f",
    };
    static char same[4096];
    switch (below(5)) {
    case 0:
        memset(same, "a \n\xe2"[below(4)], sizeof same);
        bytes_splice(b, below(b->size + 1), 0, same, 1 + below(sizeof same));
        break;
    case 1:
        bytes_splice(b, below(b->size + 1), 0, "", 1); /* NUL */
        break;
    case 2:
        mutate_raw(b);
        break;
    default:
        insert_text(b, below(2) ? 0 : below(b->size + 1), pieces[below(COUNT(pieces))]);
    }
}

/* ---- JSON ----------------------------------------------------------------------------------- */

enum kind { VALUE, KEY, MEMBER };
struct span {
    enum kind kind;
    size_t at, size, depth;
};
enum { MAX_SPANS = 1 << 16, MAX_DEPTH = 64 };

struct scan {
    const struct bytes *text;
    struct span *spans;
    size_t count, depth, deepest;
    struct {
        size_t at, key; /* of a container, and of the current member; SIZE_MAX: none */
    } open[MAX_DEPTH];
};

static void add_span(struct scan *s, enum kind kind, size_t at, size_t end)
{
    if (s->count < MAX_SPANS)
        s->spans[s->count++] = (struct span){kind, at, end - at, s->depth};
    s->deepest = s->depth > s->deepest ? s->depth : s->deepest;
}

static void end_value(struct scan *s, size_t at, size_t end)
{
    add_span(s, VALUE, at, end);
    if (s->depth && s->open[s->depth - 1].key != SIZE_MAX) {
        add_span(s, MEMBER, s->open[s->depth - 1].key, end);
        s->open[s->depth - 1].key = SIZE_MAX;
    }
}

static size_t end_of_string(const struct bytes *t, size_t at)
{
    unsigned char quote = t->data[at++];
    while (at < t->size && t->data[at] != quote)
        at += t->data[at] == '\\' ? 2 : 1;
    return at < t->size ? at + 1 : t->size;
}

static void scan_string(struct scan *s, size_t at, size_t end)
{
    size_t next = end;
    while (next < s->text->size && isspace(s->text->data[next]))
        next++;
    if (s->depth && next < s->text->size && s->text->data[next] == ':') {
        add_span(s, KEY, at, end);
        s->open[s->depth - 1].key = at;
    } else {
        end_value(s, at, end);
    }
}

/* Finds values, keys and members of JSON, and of Python's dict in the header of .npy. Text that is
 * neither gives fewer spans. */
static void scan(struct scan *s, const struct bytes *t)
{
    *s = (struct scan){.text = t, .spans = malloc(MAX_SPANS * sizeof *s->spans)};
    for (size_t at = 0, end; s->spans && at < t->size; at = end) {
        unsigned char c = t->data[at];
        end = at + 1;
        if (strchr("{[(", c) && c && s->depth < MAX_DEPTH) {
            s->open[s->depth].at = at;
            s->open[s->depth++].key = SIZE_MAX;
        } else if (strchr("}])", c) && c && s->depth) {
            s->depth--;
            end_value(s, s->open[s->depth].at, end);
        } else if (c == '"' || c == '\'') {
            end = end_of_string(t, at);
            scan_string(s, at, end);
        } else if (isalnum(c) || c == '-') {
            while (end < t->size && (isalnum(t->data[end]) || strchr("+-.", t->data[end])) &&
                   t->data[end])
                end++;
            end_value(s, at, end);
        }
    }
}

/* A span of the kind at a random depth, so that the few outer ones are chosen as often as the many
 * inner ones; NULL if there is none. */
static const struct span *choose(const struct scan *s, enum kind kind)
{
    for (int attempt = 0; attempt < 20; attempt++) {
        size_t depth = below(s->deepest + 1), start = below(s->count);
        for (size_t i = 0; i < s->count; i++) {
            const struct span *span = &s->spans[(start + i) % s->count];
            if (span->kind == kind && span->depth == depth)
                return span;
        }
    }
    return NULL;
}

static const char *const values[] = {
    "null",
    "true",
    "false",
    "0",
    "-1",
    "1",
    "2",
    "3",
    "7",
    "255",
    "256",
    "65536",
    "2147483647",
    "4294967296",
    "9007199254740993",
    "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775808",
    "1e308",
    "1e999",
    "-0.0",
    "1e-320",
    "0.5",
    "1.0",
    "NaN",
    "Infinity",
    "01",
    "0x10",
    "\"\"",
    "\"\\u0000\"",
    "\"\\ud800\"",
    "\"..\"",
    "\"../x\"",
    "\"/etc/passwd\"",
    "\"F16\"",
    "\"F64\"",
    "\"BF16\"",
    "\"U8\"",
    "\"I4\"",
    "\"F8_E4M3\"",
    "\"a\\nb\\u001b[31m\"",
    "\"nf4:g=64\"",
    "\"\xff\"",
    "[]",
    "{}",
    "[0]",
    "[0,0]",
    "[2,3]",
    "[[]]",
    "{\"\":0}",
    "[1,2,3,4,5,6,7,8,9]",
    "{\"a\":1,\"a\":2}",
    "'<f2'",
    "'>f4'",
    "'|O'",
    "(3,)",
    "(2,2)",
    "()",
    "True",
    "",
};

/* Changes an integer or the last characters of a string; false for another value. */
static bool nudge(struct bytes *b, const struct span *span)
{
    char text[64];
    char *end;
    if (span->size == 0 || span->size >= sizeof text)
        return false;
    memcpy(text, b->data + span->at, span->size);
    text[span->size] = 0;
    if (text[0] == '"' || text[0] == '\'') {
        size_t at = span->at + 1 + below(span->size - 1);
        if (below(2))
            bytes_splice(b, at, at + 1 < span->at + span->size, NULL, 0);
        else
            bytes_splice(b, at, 0, &"0z/.:_="[below(7)], 1);
        return true;
    }
    const long long old = strtoll(text, &end, 10);
    const unsigned long long bits = (unsigned long long)old; /* may wrap around */
    const unsigned long long changed[] = {bits + 1, bits - 1, 0 - bits,
                                          (unsigned long long)(old / 2), bits + 64};
    if (*end)
        return false;
    if (below(6) == 0)
        snprintf(text, sizeof text, "%lld0", old);
    else
        snprintf(text, sizeof text, "%lld", (long long)changed[below(COUNT(changed))]);
    bytes_splice(b, span->at, span->size, text, strlen(text));
    return true;
}

static void replace_by_other(struct bytes *b, const struct scan *s, const struct span *span)
{
    const struct span *other = choose(s, span->kind);
    if (!other)
        return;
    struct bytes text = bytes_copy(b->data + other->at, other->size);
    bytes_splice(b, span->at, span->size, text.data, text.size);
    bytes_free(&text);
}

static void delete_span(struct bytes *b, const struct span *span)
{
    size_t at = span->at, end = at + span->size;
    if (end < b->size && b->data[end] == ',')
        end++;
    else
        for (size_t before = at;
             before > 0 && (isspace(b->data[before - 1]) || b->data[before - 1] == ',');)
            if (b->data[--before] == ',') {
                at = before;
                break;
            }
    bytes_splice(b, at, end - at, NULL, 0);
}

static void repeat_span(struct bytes *b, const struct span *span)
{
    struct bytes text = bytes_copy(b->data + span->at, span->size);
    insert_text(b, span->at, ",");
    bytes_splice(b, span->at, 0, text.data, text.size);
    bytes_free(&text);
}

static void nest(struct bytes *b, const struct span *span)
{
    static char brackets[200];
    size_t n = below(2) ? 1 + below(3) : sizeof brackets;
    memset(brackets, ']', sizeof brackets);
    bytes_splice(b, span->at + span->size, 0, brackets, n);
    memset(brackets, '[', sizeof brackets);
    bytes_splice(b, span->at, 0, brackets, n);
}

static void lengthen(struct bytes *b, const struct span *span)
{
    static char letters[700];
    memset(letters, 'x', sizeof letters);
    if (b->data[span->at] == '"')
        bytes_splice(b, span->at + 1, 0, letters, 1 + below(sizeof letters));
}

static void change_span(struct bytes *b, const struct scan *s, const struct span *span)
{
    const char *value = values[below(COUNT(values))];
    switch (below(10)) {
    case 0:
        delete_span(b, span);
        break;
    case 1:
        repeat_span(b, span);
        break;
    case 2:
        replace_by_other(b, s, span);
        break;
    case 3:
        nest(b, span);
        break;
    case 4:
        lengthen(b, span);
        break;
    case 5:
    case 6:
        bytes_splice(b, span->at, span->size, value, strlen(value));
        break;
    default:
        if (!nudge(b, span))
            bytes_splice(b, span->at, span->size, value, strlen(value));
    }
}

void mutate_json(struct bytes *b)
{
    static const enum kind kinds[] = {VALUE, VALUE, VALUE, KEY, MEMBER};
    struct scan s;
    scan(&s, b);
    const struct span *span = choose(&s, kinds[below(COUNT(kinds))]);
    if (span && below(16))
        change_span(b, &s, span);
    else
        mutate_raw(b);
    free(s.spans);
}

/* ---- lines ---------------------------------------------------------------------------------- */

static size_t count_lines(const struct bytes *b)
{
    size_t n = 0;
    for (size_t i = 0; i < b->size; i++)
        n += b->data[i] == '\n';
    return n;
}

/* A random line, without its newline. */
static void choose_line(size_t *at, size_t *size, const struct bytes *b)
{
    const unsigned char *line = b->data, *end = b->data + b->size, *newline;
    for (size_t skip = below(count_lines(b)); skip > 0; skip--)
        line = (unsigned char *)memchr(line, '\n', (size_t)(end - line)) + 1;
    newline = memchr(line, '\n', (size_t)(end - line));
    *at = (size_t)(line - b->data);
    *size = (size_t)((newline ? newline : end) - line);
}

/* Changes a part of *b by `mutate`. */
static void mutate_part(struct bytes *b, size_t at, size_t size, void (*mutate)(struct bytes *))
{
    struct bytes part = bytes_copy(b->data + at, size);
    mutate(&part);
    bytes_splice(b, at, size, part.data, part.size);
    bytes_free(&part);
}

/* Deletes or repeats a line. */
static void move_line(struct bytes *b)
{
    size_t at, size, to, ignored;
    choose_line(&at, &size, b);
    choose_line(&to, &ignored, b);
    struct bytes line = bytes_copy(b->data + at, size + (at + size < b->size));
    if (below(2))
        bytes_splice(b, at, line.size, NULL, 0);
    else
        bytes_splice(b, to, 0, line.data, line.size);
    bytes_free(&line);
}

void mutate_lines(struct bytes *b)
{
    size_t at, size;
    choose_line(&at, &size, b);
    switch (below(6)) {
    case 0:
        move_line(b);
        break;
    case 1:
        mutate_text(b);
        break;
    default:
        mutate_part(b, at, size, mutate_json);
    }
}

/* ---- safetensors and .qcal ------------------------------------------------------------------ */

static size_t header_size(const struct bytes *b)
{
    uint64_t n = 0;
    if (b->size < 8)
        return 0;
    memcpy(&n, b->data, 8);
    return n < b->size - 8 ? (size_t)n : b->size - 8;
}

/* Replaces the header, whose length follows. */
static void set_header(struct bytes *b, struct bytes header)
{
    const uint64_t n = header.size;
    bytes_splice(b, 8, header_size(b), header.data, header.size);
    memcpy(b->data, &n, 8);
}

void mutate_safetensors(struct bytes *b)
{
    size_t n = header_size(b);
    if (b->size < 16) {
        mutate_raw(b);
        return;
    }
    switch (below(10)) {
    case 0:
        set_number(b, 0, 8);
        break;
    case 1: /* extreme values: most are NaN, infinite or the largest */
        for (size_t i = 1 + below(8); i > 0; i--)
            set_number(b, 8 + n + below(b->size - 8 - n), 2);
        break;
    case 2:
        bytes_splice(b, b->size - below(b->size), b->size, NULL, 0);
        break;
    case 3:
        mutate_raw(b);
        break;
    default: {
        struct bytes header = bytes_copy(b->data + 8, n);
        mutate_json(&header);
        set_header(b, header);
        bytes_free(&header);
    }
    }
}

/* Changes the document in the header by `change`, which may also change the data. */
static void change_qcal(struct bytes *b, void (*change)(struct bytes *, json_t *, struct bytes *))
{
    json_t *header = json_loadb((const char *)b->data + 8, header_size(b), 0, NULL);
    json_t *metadata = json_object_get(header, "__metadata__");
    const char *text = json_string_value(json_object_get(metadata, "qtool"));
    if (!text) {
        mutate_safetensors(b);
        json_decref(header);
        return;
    }
    struct bytes document = bytes_copy(text, strlen(text));
    change(b, header, &document);
    json_t *changed = json_stringn((const char *)document.data, document.size);
    if (changed) /* else it is no UTF-8 */
        json_object_set_new(metadata, "qtool", changed);
    char *dump = json_dumps(header, JSON_COMPACT);
    if (dump) {
        struct bytes new = bytes_copy(dump, strlen(dump));
        set_header(b, new);
        bytes_free(&new);
    }
    free(dump);
    bytes_free(&document);
    json_decref(header);
}

static void change_document(struct bytes *b, json_t *header, struct bytes *document)
{
    (void)b, (void)header;
    mutate_json(document);
}

/* Changes a statistic, and its CRC in the document. */
static void change_statistic(struct bytes *b, json_t *header, struct bytes *document)
{
    size_t skip = below(json_object_size(header)), data = 8 + header_size(b);
    void *at = json_object_iter(header);
    while (skip-- > 0)
        at = json_object_iter_next(header, at);
    const json_t *offsets = json_object_get(json_object_iter_value(at), "data_offsets");
    size_t first = (size_t)json_integer_value(json_array_get(offsets, 0));
    size_t end = (size_t)json_integer_value(json_array_get(offsets, 1));
    char crc[9];
    if (first >= end)
        return;
    set_number(b, data + first + (below(end - first) & ~(size_t)3), (size_t)4 << below(2));
    snprintf(crc, sizeof crc, "%08x",
             (unsigned)crc32(0, b->data + data + first, (unsigned)(end - first)));
    json_t *object = json_loadb((const char *)document->data, document->size, 0, NULL);
    json_object_set_new(json_object_get(object, "crc32"), json_object_iter_key(at),
                        json_string(crc));
    char *dump = json_dumps(object, JSON_COMPACT);
    if (dump)
        bytes_splice(document, 0, document->size, dump, strlen(dump));
    free(dump);
    json_decref(object);
}

void mutate_qcal(struct bytes *b)
{
    switch (below(4)) {
    case 0:
        mutate_safetensors(b);
        break;
    case 1:
        change_qcal(b, change_statistic);
        break;
    default:
        change_qcal(b, change_document);
    }
}

/* ---- .npy ----------------------------------------------------------------------------------- */

void mutate_npy(struct bytes *b)
{
    size_t n = b->size < 10 ? 0 : (size_t)b->data[8] | (size_t)b->data[9] << 8;
    if (b->size < 10 + n || n == 0 || below(4) == 0) {
        below(3) ? mutate_raw(b) : set_number(b, 6 + 2 * below(2), 2);
        return;
    }
    struct bytes header = bytes_copy(b->data + 10, n);
    mutate_json(&header);
    bytes_splice(b, 10, n, header.data, header.size);
    b->data[8] = (unsigned char)header.size;
    b->data[9] = (unsigned char)(header.size >> 8);
    bytes_free(&header);
}

/* ---- gzip ----------------------------------------------------------------------------------- */

/* *b compressed, or unpacked; `bits` as for zlib. False if it is no such stream. */
static bool deflated(struct bytes *b, int bits)
{
    z_stream z = {.next_in = b->data, .avail_in = (unsigned)b->size};
    struct bytes out = {malloc(b->size + 4096), 0};
    z.next_out = out.data;
    z.avail_out = (unsigned)b->size + 4096;
    bool ok = out.data && deflateInit2(&z, 6, Z_DEFLATED, bits, 8, Z_DEFAULT_STRATEGY) == Z_OK &&
              deflate(&z, Z_FINISH) == Z_STREAM_END;
    out.size = z.total_out;
    deflateEnd(&z);
    bytes_splice(b, 0, b->size, out.data, ok ? out.size : 0);
    bytes_free(&out);
    return ok;
}

static bool inflated(struct bytes *b, size_t size)
{
    struct bytes out = {malloc(size + 1), 0};
    z_stream z = {.next_in = b->data,
                  .avail_in = (unsigned)b->size,
                  .next_out = out.data,
                  .avail_out = (unsigned)size};
    bool ok = out.data && inflateInit2(&z, -15) == Z_OK && inflate(&z, Z_FINISH) == Z_STREAM_END;
    out.size = z.total_out;
    inflateEnd(&z);
    if (ok)
        bytes_splice(b, 0, b->size, out.data, out.size);
    bytes_free(&out);
    return ok;
}

void mutate_gzip(struct bytes *b, void (*inner)(struct bytes *))
{
    size_t what = below(6);
    if (what < 3)
        inner(b);
    deflated(b, 15 + 16);
    if (what == 3) /* the flags of the header, the CRC or the length */
        set_number(b, below(2) ? 3 : b->size - 4 - 4 * below(2), 1);
    else if (what == 4)
        mutate_raw(b);
    else if (what == 5)
        bytes_splice(b, b->size, 0, below(2) ? "\x1f\x8b\x08\0\0" : "\0\0\0\0\0", 1 + below(5));
}

/* ---- pickle --------------------------------------------------------------------------------- */

struct op {
    size_t at, head, size; /* head: opcode and length; size: all of it */
    bool text;
};

/* The opcode at `at`: the sizes of its parts. */
static struct op op_at(const struct bytes *b, size_t at)
{
    static const struct {
        unsigned char code, fixed, length; /* bytes of a number; of the length of a text */
    } table[] = {
        {0x80, 1, 0}, {'K', 1, 0},  {'M', 2, 0},  {'J', 4, 0},  {'G', 8, 0},
        {'h', 1, 0},  {'q', 1, 0},  {'j', 4, 0},  {'r', 4, 0},  {0x95, 8, 0},
        {'X', 0, 4},  {'T', 0, 4},  {'B', 0, 4},  {'U', 0, 1},  {'C', 0, 1},
        {0x8c, 0, 1}, {0x8a, 0, 1}, {0x8b, 0, 4}, {0x8d, 0, 8}, {0x8e, 0, 8},
    };
    struct op op = {at, 1, 1, false};
    for (size_t i = 0; i < COUNT(table); i++)
        if (b->data[at] == table[i].code) {
            uint64_t length = 0;
            size_t left = b->size - at - 1;
            memcpy(&length, b->data + at + 1, table[i].length < left ? table[i].length : left);
            op.text = table[i].length > 0;
            op.head = 1 + (size_t)table[i].length;
            op.size = op.head + table[i].fixed + (size_t)length;
        }
    if (b->data[at] == 'c') /* module, newline, name, newline */
        for (int lines = 0; at + op.size < b->size && lines < 2; op.size++)
            lines += b->data[at + op.size] == '\n';
    if (op.size > b->size - at)
        op.size = b->size - at;
    return op;
}

static struct op choose_op(const struct bytes *b)
{
    size_t count = 0, at = 0;
    for (at = 0; at < b->size; at += op_at(b, at).size)
        count++;
    size_t skip = below(count);
    for (at = 0; skip > 0; skip--)
        at += op_at(b, at).size;
    return op_at(b, at);
}

static void change_argument(struct bytes *b)
{
    static const char *const texts[] = {
        "",       "cpu",      "cuda:0",       "data/0", "../0", "HalfStorage",
        "weight", "\xff\xfe", "999999999999", "-1"};
    struct op op = choose_op(b);
    for (int i = 0; i < 50 && op.size == 1; i++)
        op = choose_op(b);
    if (!op.text) {
        set_number(b, op.at + op.head, op.size - op.head < 8 ? op.size - op.head : 8);
        return;
    }
    const char *text = texts[below(COUNT(texts))];
    const uint64_t length = strlen(text);
    bytes_splice(b, op.at + op.head, op.size - op.head, text, strlen(text));
    memcpy(b->data + op.at + 1, &length, op.head - 1);
}

static void mutate_pickle(struct bytes *b)
{
    static const unsigned char codes[] =
        "()].}aebstuQRN0123Kq\x85\x86\x87\x88\x89\x8f\x90\x93\x94I";
    if (b->size == 0)
        return;
    struct op op = choose_op(b), other = choose_op(b);
    struct bytes text = bytes_copy(b->data + other.at, other.size);
    switch (below(8)) {
    case 0:
        bytes_splice(b, op.at, op.size, NULL, 0);
        break;
    case 1:
        bytes_splice(b, op.at, 0, text.data, text.size);
        break;
    case 2:
        bytes_splice(b, op.at, op.size, text.data, text.size);
        break;
    case 3:
        bytes_splice(b, op.at, below(2), &codes[below(sizeof codes - 1)], 1);
        break;
    case 4:
        mutate_raw(b);
        break;
    default:
        change_argument(b);
    }
    bytes_free(&text);
}

/* ---- zip ------------------------------------------------------------------------------------ */

enum { MAX_ENTRIES = 64, LOCAL = 30, CENTRAL = 46, END = 22 };
struct entry {
    char name[128];
    struct bytes data;
};
struct zip {
    struct entry entry[MAX_ENTRIES];
    size_t count;
};

static uint32_t number(const struct bytes *b, size_t at, size_t width)
{
    uint32_t value = 0;
    if (at + width <= b->size)
        memcpy(&value, b->data + at, width);
    return value;
}

/* The entries of an archive without zip64; false if there are none. */
static bool read_zip(struct zip *z, const struct bytes *b)
{
    *z = (struct zip){.count = 0};
    if (b->size < END)
        return false;
    size_t at = number(b, b->size - END + 16, 4);
    while (z->count < MAX_ENTRIES && number(b, at, 4) == 0x02014b50) {
        size_t packed = number(b, at + 20, 4), size = number(b, at + 24, 4);
        size_t name = number(b, at + 28, 2), local = number(b, at + 42, 4);
        size_t data = local + LOCAL + number(b, local + 26, 2) + number(b, local + 28, 2);
        struct entry *e = &z->entry[z->count++];
        if (packed > b->size || data > b->size - packed || at + CENTRAL + name > b->size)
            return false;
        snprintf(e->name, sizeof e->name, "%.*s", (int)name, (char *)b->data + at + CENTRAL);
        e->data = bytes_copy(b->data + data, packed);
        if (number(b, at + 10, 2) == 8)
            inflated(&e->data, size);
        at += CENTRAL + name + number(b, at + 30, 2) + number(b, at + 32, 2);
    }
    return z->count > 0;
}

static void free_zip(struct zip *z)
{
    for (size_t i = 0; i < z->count; i++)
        bytes_free(&z->entry[i].data);
}

static void put(struct bytes *b, const void *data, size_t size)
{
    bytes_splice(b, b->size, 0, data, size);
}
static void put16(struct bytes *b, size_t value)
{
    put(b, &(uint16_t){(uint16_t)value}, 2);
}
static void put32(struct bytes *b, size_t value)
{
    put(b, &(uint32_t){(uint32_t)value}, 4);
}

/* The fields that a local and a central header share. */
static void put_fields(struct bytes *b, const struct entry *e, size_t method, size_t packed,
                       size_t crc)
{
    put16(b, 20);
    put16(b, 0x800);
    put16(b, method);
    put32(b, 0);
    put32(b, crc);
    put32(b, packed);
    put32(b, e->data.size);
    put16(b, strlen(e->name));
    put16(b, 0);
}

/* The archive, with all checksums right, stored or deflated. */
static void write_zip(struct bytes *b, const struct zip *z)
{
    struct bytes central = bytes_copy("", 0);
    size_t method = below(4) == 0 ? 8 : 0;
    bytes_splice(b, 0, b->size, NULL, 0);
    for (size_t i = 0; i < z->count; i++) {
        const struct entry *e = &z->entry[i];
        struct bytes packed = bytes_copy(e->data.data, e->data.size);
        size_t crc = crc32(0, e->data.data, (unsigned)e->data.size), local = b->size;
        if (method == 8)
            deflated(&packed, -15);
        put32(b, 0x04034b50);
        put_fields(b, e, method, packed.size, crc);
        put(b, e->name, strlen(e->name));
        put(b, packed.data, packed.size);
        put32(&central, 0x02014b50);
        put16(&central, 20);
        put_fields(&central, e, method, packed.size, crc);
        put(&central, (char[10]){0}, 10);
        put32(&central, local);
        put(&central, e->name, strlen(e->name));
        bytes_free(&packed);
    }
    size_t start = b->size;
    put(b, central.data, central.size);
    put32(b, 0x06054b50);
    put32(b, 0);
    put16(b, z->count);
    put16(b, z->count);
    put32(b, central.size);
    put32(b, start);
    put16(b, 0);
    bytes_free(&central);
}

/* Sets a field of a random header; nothing is made to agree with it. */
static void change_zip_field(struct bytes *b)
{
    static const char signatures[][5] = {"PK\1\2", "PK\3\4", "PK\5\6"};
    static const size_t sizes[] = {CENTRAL, LOCAL, END};
    size_t kind = below(3), start = below(b->size);
    for (size_t i = 0; i < b->size - 4; i++) {
        size_t at = (start + i) % (b->size - 4);
        if (memcmp(b->data + at, signatures[kind], 4) == 0) {
            set_number(b, at + 4 + 2 * below((sizes[kind] - 4) / 2), (size_t)2 << below(2));
            return;
        }
    }
}

static void change_entries(struct zip *z)
{
    struct entry *e = &z->entry[below(z->count)];
    switch (below(5)) {
    case 0:
        bytes_free(&e->data);
        *e = z->entry[--z->count];
        break;
    case 1:
        if (z->count < MAX_ENTRIES) {
            z->entry[z->count] = *e;
            z->entry[z->count++].data = bytes_copy(e->data.data, e->data.size);
        }
        break;
    case 2:
        memmove(e->name, z->entry[below(z->count)].name, sizeof e->name);
        break;
    case 3:
        e->name[below(strlen(e->name) + 1)] = "/.0a"[below(4)];
        break;
    default:
        mutate_raw(&e->data);
    }
}

void mutate_torch(struct bytes *b)
{
    struct zip z;
    if (!read_zip(&z, b) || below(8) == 0) {
        free_zip(&z);
        mutate_raw(b);
        return;
    }
    size_t what = below(7);
    for (size_t i = 0; what < 4 && i < z.count; i++)
        if (strstr(z.entry[i].name, "data.pkl"))
            mutate_pickle(&z.entry[i].data);
    if (what == 4 || what == 5)
        change_entries(&z);
    write_zip(b, &z);
    if (what == 6)
        change_zip_field(b);
    free_zip(&z);
}

/* ---- journal -------------------------------------------------------------------------------- */

/* Changes a line, and the CRC at its end. */
static void change_line(struct bytes *line)
{
    enum { TRAILER = 18 }; /* ,"crc":"89abcdef"} */
    char trailer[TRAILER + 1];
    if (line->size <= TRAILER)
        return;
    bytes_splice(line, line->size - TRAILER, TRAILER, "}", 1);
    mutate_json(line);
    if (line->size && line->data[line->size - 1] == '}')
        bytes_splice(line, line->size - 1, 1, NULL, 0);
    snprintf(trailer, sizeof trailer, ",\"crc\":\"%08x\"}",
             (unsigned)crc32(0, line->data, (unsigned)line->size));
    put(line, trailer, TRAILER);
}

void mutate_journal(struct bytes *b)
{
    size_t at, size;
    choose_line(&at, &size, b);
    switch (below(5)) {
    case 0:
        move_line(b);
        break;
    case 1:
        mutate_raw(b);
        break;
    default:
        mutate_part(b, at, size, change_line);
    }
}

/* ---- the same in another form --------------------------------------------------------------- */

static void restyle(struct bytes *b, size_t flags)
{
    json_t *value = json_loadb((const char *)b->data, b->size, JSON_DECODE_ANY, NULL);
    char *dump = value ? json_dumps(value, flags | JSON_ENCODE_ANY) : NULL;
    if (dump)
        bytes_splice(b, 0, b->size, dump, strlen(dump));
    free(dump);
    json_decref(value);
}

void restyle_json(struct bytes *b)
{
    static const size_t flags[] = {JSON_COMPACT, JSON_INDENT(7), JSON_SORT_KEYS,
                                   JSON_ENSURE_ASCII | JSON_ESCAPE_SLASH};
    restyle(b, flags[below(COUNT(flags))]);
}

void restyle_lines(struct bytes *b)
{
    struct bytes all = bytes_copy("", 0);
    for (size_t at = 0, size; at < b->size; at += size + 1) {
        const unsigned char *newline = memchr(b->data + at, '\n', b->size - at);
        size = newline ? (size_t)(newline - b->data) - at : b->size - at;
        struct bytes line = bytes_copy(b->data + at, size);
        restyle(&line, below(2) ? JSON_COMPACT : JSON_ENSURE_ASCII | JSON_SORT_KEYS);
        put(&all, line.data, line.size);
        put(&all, "\n", 1);
        bytes_free(&line);
    }
    bytes_free(b);
    *b = all;
}

/* The order of tensors is part of the meaning: containers have it. */
void restyle_safetensors(struct bytes *b)
{
    struct bytes header = bytes_copy(b->data + 8, header_size(b));
    restyle(&header, below(2) ? JSON_INDENT(3) : JSON_ENSURE_ASCII);
    for (size_t spaces = below(20); spaces > 0; spaces--)
        put(&header, " ", 1);
    set_header(b, header);
    bytes_free(&header);
}

void restyle_npy(struct bytes *b)
{
    size_t spaces = 1 + below(9);
    bytes_splice(b, 10, 0, "         ", spaces);
    b->data[8] = (unsigned char)(b->data[8] + spaces); /* far below 256 in a small file */
}

void restyle_torch(struct bytes *b)
{
    struct zip z;
    if (read_zip(&z, b))
        write_zip(b, &z);
    free_zip(&z);
}

/* One stream, or two in one file. */
void restyle_gzip(struct bytes *b)
{
    size_t half = below(b->size + 1);
    struct bytes second = bytes_copy(b->data + half, b->size - half);
    bytes_splice(b, half, b->size, NULL, 0);
    deflated(b, 15 + 16);
    if (second.size && deflated(&second, 15 + 16))
        put(b, second.data, second.size);
    bytes_free(&second);
}
