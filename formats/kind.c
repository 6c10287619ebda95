/* What a file holds, found by its content: readers say so when they refuse a file. */
#include "formats/formats.h"

#include <ctype.h>
#include <stdio.h>
#include <utf8proc.h>

/* ---- names ---------------------------------------------------------------------------------- */

/* advice: what the user can do, or NULL. */
static const struct {
    const char *name, *advice;
} kinds[] = {
    [QT_KIND_UNKNOWN] = {"unknown data", NULL},
    [QT_KIND_EMPTY] = {"an empty file", NULL},
    [QT_KIND_ZEROS] = {"zero bytes", "the download or copy was not completed"},
    [QT_KIND_SAFETENSORS] = {"a safetensors file", "its name must end in .safetensors"},
    [QT_KIND_TORCH] = {"a PyTorch checkpoint", "its name must end in .bin, .pt or .pth"},
    [QT_KIND_PICKLE] = {"a Python pickle", NULL},
    [QT_KIND_ZIP] = {"a zip archive", NULL},
    [QT_KIND_NPY] = {"a .npy array", NULL},
    [QT_KIND_NPZ] = {"an .npz archive of NumPy arrays", "save its arrays as safetensors"},
    [QT_KIND_JSON] = {"JSON text", NULL},
    [QT_KIND_TEXT] = {"plain text", NULL},
    [QT_KIND_UTF16] = {"UTF-16 or UTF-32 text", "convert it to UTF-8"},
    [QT_KIND_LFS] = {"a Git LFS pointer", "fetch the file with 'git lfs pull'"},
    [QT_KIND_HTML] = {"an HTML page", "the download has failed: repeat it"},
    [QT_KIND_XML] = {"an XML document", "the download may have failed: repeat it"},
    [QT_KIND_GGUF] = {"a GGUF file", "a checkpoint of this kind has a name that ends in .gguf"},
    [QT_KIND_GGML] = {"a GGML file", "use the checkpoint it was made from"},
    [QT_KIND_ONNX] = {"an ONNX model", "use the checkpoint it was exported from"},
    [QT_KIND_HDF5] = {"an HDF5 file (Keras)", "save the weights as safetensors"},
    [QT_KIND_MSGPACK] = {"a msgpack file (Flax)", "save the weights as safetensors"},
    [QT_KIND_TENSORFLOW] = {"a TensorFlow file", "save the weights as safetensors"},
    [QT_KIND_GZIP] = {"a gzip file", "decompress it"},
    [QT_KIND_ZSTD] = {"a zstd file", "decompress it"},
    [QT_KIND_XZ] = {"an xz file", "decompress it"},
    [QT_KIND_BZIP2] = {"a bzip2 file", "decompress it"},
    [QT_KIND_LZ4] = {"an lz4 file", "decompress it"},
    [QT_KIND_TAR] = {"a tar archive", "extract it"},
    [QT_KIND_7Z] = {"a 7z archive", "extract it"},
    [QT_KIND_RAR] = {"a RAR archive", "extract it"},
    [QT_KIND_PARQUET] = {"a Parquet file",
                         "convert it to JSON Lines, for example with DuckDB: COPY (SELECT * FROM "
                         "'in.parquet') TO 'out.jsonl' (FORMAT json)"},
    [QT_KIND_ARROW] = {"an Arrow file", "convert it to JSON Lines"},
    [QT_KIND_SQLITE] = {"an SQLite database", NULL},
    [QT_KIND_PDF] = {"a PDF document", NULL},
    [QT_KIND_IMAGE] = {"an image", NULL},
    [QT_KIND_MEDIA] = {"an audio or video file", NULL},
    [QT_KIND_PROGRAM] = {"an executable program", NULL},
};

const char *qt_kind_name(enum qt_kind kind)
{
    return kinds[kind].name;
}

const char *qt_kind_advice(enum qt_kind kind)
{
    return kinds[kind].advice;
}

/* ---- binary formats ------------------------------------------------------------------------- */

#define MAGIC(kind, at, bytes)                                                                     \
    {                                                                                              \
        kind, at, sizeof bytes - 1, bytes                                                          \
    }

static const struct {
    enum qt_kind kind;
    size_t at, size;
    const char *bytes;
} magics[] = {
    MAGIC(QT_KIND_NPY, 0, "\x93NUMPY"),
    MAGIC(QT_KIND_GGUF, 0, "GGUF"),
    MAGIC(QT_KIND_GGML, 0, "lmgg"),
    MAGIC(QT_KIND_GGML, 0, "tjgg"),
    MAGIC(QT_KIND_GGML, 0, "fmgg"),
    MAGIC(QT_KIND_HDF5, 0, "\x89HDF\r\n\x1a\n"),
    MAGIC(QT_KIND_HDF5, 512, "\x89HDF\r\n\x1a\n"),
    MAGIC(QT_KIND_TENSORFLOW, 4, "TFL3"),
    MAGIC(QT_KIND_GZIP, 0, "\x1f\x8b"),
    MAGIC(QT_KIND_ZSTD, 0, "\x28\xb5\x2f\xfd"),
    MAGIC(QT_KIND_XZ, 0, "\xfd\x37zXZ\0"),
    MAGIC(QT_KIND_BZIP2, 0, "BZh"),
    MAGIC(QT_KIND_LZ4, 0, "\x04\x22\x4d\x18"),
    MAGIC(QT_KIND_TAR, 257, "ustar"),
    MAGIC(QT_KIND_7Z, 0, "7z\xbc\xaf\x27\x1c"),
    MAGIC(QT_KIND_RAR, 0, "Rar!\x1a\x07"),
    MAGIC(QT_KIND_PARQUET, 0, "PAR1"),
    MAGIC(QT_KIND_ARROW, 0, "ARROW1"),
    MAGIC(QT_KIND_SQLITE, 0, "SQLite format 3"),
    MAGIC(QT_KIND_PDF, 0, "%PDF-"),
    MAGIC(QT_KIND_IMAGE, 0, "\x89PNG\r\n\x1a\n"),
    MAGIC(QT_KIND_IMAGE, 0, "\xff\xd8\xff"),
    MAGIC(QT_KIND_IMAGE, 0, "GIF8"),
    MAGIC(QT_KIND_IMAGE, 8, "WEBP"),
    MAGIC(QT_KIND_MEDIA, 8, "WAVE"),
    MAGIC(QT_KIND_MEDIA, 0, "OggS"),
    MAGIC(QT_KIND_MEDIA, 0, "fLaC"),
    MAGIC(QT_KIND_MEDIA, 0, "ID3"),
    MAGIC(QT_KIND_MEDIA, 4, "ftyp"),
    MAGIC(QT_KIND_PROGRAM, 0,
          "\x7f"
          "ELF"),
    MAGIC(QT_KIND_PROGRAM, 0, "MZ\x90"),
    MAGIC(QT_KIND_UTF16, 0, "\xff\xfe"),
    MAGIC(QT_KIND_UTF16, 0, "\xfe\xff"),
    MAGIC(QT_KIND_UTF16, 0, "\0\0\xfe\xff"),
};

static bool ends_in(const unsigned char *name, size_t size, const char *ending)
{
    const size_t n = strlen(ending);
    return size >= n && memcmp(name + size - n, ending, n) == 0;
}

/* A zip archive is told by the name of its first entry. */
static enum qt_kind zip_kind(const unsigned char *p, size_t size)
{
    enum { NAME_SIZE = 26, NAME = 30 };
    if (size < NAME)
        return QT_KIND_ZIP;
    const size_t n = qt_min_size(p[NAME_SIZE] + 256u * p[NAME_SIZE + 1], size - NAME);
    return ends_in(p + NAME, n, ".npy")        ? QT_KIND_NPZ
           : ends_in(p + NAME, n, "/data.pkl") ? QT_KIND_TORCH
                                               : QT_KIND_ZIP;
}

static bool is_printable(const unsigned char *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (p[i] < 0x20 || p[i] >= 0x7f)
            return false;
    return n > 0;
}

/* A map whose first key is a string. */
static bool is_msgpack(const unsigned char *p, size_t size)
{
    const size_t key = p[0] > 0x80 && p[0] < 0x90 ? 1 : p[0] == 0xde ? 3 : p[0] == 0xdf ? 5 : 0;
    if (key == 0 || size < key + 2)
        return false;
    const size_t n = p[key] > 0xa0 && p[key] < 0xc0 ? p[key] - 0xa0u
                     : p[key] == 0xd9               ? p[key + 1]
                                                    : 0;
    const size_t text = key + (p[key] == 0xd9 ? 2 : 1);
    return n <= size - text && is_printable(p + text, n);
}

/* Protobuf that begins with a version (field 1) and then the name of the producer (2), the graph
 * (7) or the operator sets (8). A SavedModel of TensorFlow has version 1 and a submessage as field
 * 2. */
static enum qt_kind protobuf_kind(const unsigned char *p, size_t size)
{
    enum { VERSION = 0x08, PRODUCER = 0x12, GRAPH = 0x3a, OPERATORS = 0x42, NEWEST = 30 };
    if (size < 16 || p[0] != VERSION || p[1] == 0 || p[1] > NEWEST)
        return QT_KIND_UNKNOWN;
    if (p[2] == GRAPH || p[2] == OPERATORS)
        return QT_KIND_ONNX;
    if (p[2] != PRODUCER)
        return QT_KIND_UNKNOWN;
    return is_printable(p + 4, qt_min_size(p[3], 8)) ? QT_KIND_ONNX
           : p[1] == 1                               ? QT_KIND_TENSORFLOW
                                                     : QT_KIND_UNKNOWN;
}

static bool is_safetensors(const unsigned char *p, size_t size)
{
    enum { MAX_HEADER = 100 * 1000 * 1000 };
    uint64_t header;
    if (size < 10)
        return false;
    memcpy(&header, p, sizeof header);
    return header >= 2 && header <= MAX_HEADER && p[8] == '{';
}

/* Index of a TensorFlow checkpoint: a LevelDB table, known by its last bytes. */
static bool is_leveldb_table(const unsigned char *p, size_t size)
{
    static const char magic[] = "\x57\xfb\x80\x8b\x24\x75\x47\xdb";
    const size_t n = sizeof magic - 1;
    return size >= n && memcmp(p + size - n, magic, n) == 0;
}

static bool is_zeros(const unsigned char *p, size_t size)
{
    enum { LEAST = 16, MOST = 1 << 20 };
    return size >= LEAST && p[0] == 0 && memcmp(p, p + 1, qt_min_size(size, MOST) - 1) == 0;
}

static enum qt_kind binary_kind(const unsigned char *p, size_t size)
{
    if (is_safetensors(p, size))
        return QT_KIND_SAFETENSORS;
    if (size >= 4 && memcmp(p, "PK", 2) == 0 && p[2] < 8 && p[3] < 9)
        return zip_kind(p, size);
    for (size_t i = 0; i < sizeof magics / sizeof *magics; i++)
        if (size >= magics[i].at + magics[i].size &&
            memcmp(p + magics[i].at, magics[i].bytes, magics[i].size) == 0)
            return magics[i].kind;
    if (size >= 2 && p[0] == 0x80 && p[1] <= 5)
        return QT_KIND_PICKLE;
    if (is_zeros(p, size))
        return QT_KIND_ZEROS;
    if (is_msgpack(p, size))
        return QT_KIND_MSGPACK;
    if (is_leveldb_table(p, size))
        return QT_KIND_TENSORFLOW;
    return protobuf_kind(p, size);
}

/* ---- text ----------------------------------------------------------------------------------- */

/* Bytes of a text that are looked at. */
enum { TEXT_HEAD = 4096 };

/* True if `word` is in the text, in any case. */
static bool contains(const unsigned char *p, size_t size, const char *word)
{
    const size_t n = strlen(word);
    for (size_t at = 0; at + n <= size; at++) {
        size_t i = 0;
        while (i < n && tolower(p[at + i]) == word[i])
            i++;
        if (i == n)
            return true;
    }
    return false;
}

static bool begins(const unsigned char *p, size_t size, const char *word)
{
    return contains(p, qt_min_size(size, strlen(word)), word);
}

/* Size of the UTF-8 character at p: 0 if it is no character of text, `size` or more if it is cut
 * off. */
static size_t character(const unsigned char *p, size_t size)
{
    static const char controls[] = "\t\n\r\f\v\b\x1b";
    const size_t n = *p < 0x80   ? 1
                     : *p < 0xc2 ? 0
                     : *p < 0xe0 ? 2
                     : *p < 0xf0 ? 3
                     : *p < 0xf5 ? 4
                                 : 0;
    if (n == 1)
        return *p >= 0x20 ? *p != 0x7f : *p && strchr(controls, *p);
    for (size_t i = 1; i < n && i < size; i++)
        if ((p[i] & 0xc0) != 0x80)
            return 0;
    return n;
}

bool qt_is_text(const void *data, size_t size)
{
    const unsigned char *p = data;
    for (size_t at = 0, n; at < size; at += n)
        if ((n = character(p + at, size - at)) == 0)
            return false;
    return true;
}

size_t qt_utf8_check(const char *s, size_t size)
{
    const utf8proc_uint8_t *p = (const utf8proc_uint8_t *)s;
    utf8proc_int32_t c;
    for (size_t i = 0; i < size;) {
        if (p[i] < 0x80) {
            i++;
            continue;
        }
        utf8proc_ssize_t n =
            utf8proc_iterate(p + i, (utf8proc_ssize_t)qt_min_size(size - i, 4), &c);
        if (n <= 0)
            return i;
        i += (size_t)n;
    }
    return size;
}

static enum qt_kind text_kind(const unsigned char *p, size_t size)
{
    size = qt_min_size(size, TEXT_HEAD);
    if (!qt_is_text(p, size))
        return QT_KIND_UNKNOWN;
    if (size >= 3 && memcmp(p, "\xef\xbb\xbf", 3) == 0) {
        p += 3;
        size -= 3;
    }
    while (size && isspace(*p)) {
        p++;
        size--;
    }
    if ((begins(p, size, "version http") && contains(p, size, "git-lfs")) ||
        begins(p, size, "# xet version"))
        return QT_KIND_LFS;
    if (begins(p, size, "model_checkpoint_path:"))
        return QT_KIND_TENSORFLOW;
    if (begins(p, size, "<") &&
        (contains(p, size, "<html") || contains(p, size, "<!doctype html") ||
         contains(p, size, "<head>") || contains(p, size, "<body")))
        return QT_KIND_HTML;
    if (begins(p, size, "<?xml") || begins(p, size, "<error>"))
        return QT_KIND_XML;
    return begins(p, size, "{") || begins(p, size, "[") ? QT_KIND_JSON : QT_KIND_TEXT;
}

enum qt_kind qt_file_kind(const void *data, size_t size)
{
    if (size == 0)
        return QT_KIND_EMPTY;
    const enum qt_kind kind = binary_kind(data, size);
    return kind == QT_KIND_UNKNOWN ? text_kind(data, size) : kind;
}

/* ---- refusing ------------------------------------------------------------------------------- */

/* The beginning of a text, up to the first character that is not printable ASCII. */
static void quote_start(char *buf, size_t room, const unsigned char *p, size_t size)
{
    size_t skip = 0, n = 0;
    while (skip < size && isspace(p[skip]))
        skip++;
    while (n + 1 < room && skip + n < size && is_printable(p + skip + n, 1)) {
        buf[n] = (char)p[skip + n];
        n++;
    }
    buf[n] = '\0';
}

/* Kinds whose advice is about weights. */
static bool has_weights(enum qt_kind kind)
{
    return kind == QT_KIND_SAFETENSORS || kind == QT_KIND_TORCH || kind == QT_KIND_NPZ ||
           (kind >= QT_KIND_GGUF && kind <= QT_KIND_TENSORFLOW);
}

int qt_kind_expect(enum qt_kind expected, const char *what, const void *data, size_t size,
                   const char *file, struct qt_err *err)
{
    const enum qt_kind kind = qt_file_kind(data, size);
    char start[48];
    if (kind == expected || kind == QT_KIND_UNKNOWN)
        return QT_OK;
    if (!what)
        what = qt_kind_name(expected);
    if (kind == QT_KIND_EMPTY)
        return qt_fail(err, QT_E_INPUT, file, NULL, "the file is empty");
    if (kind == QT_KIND_TEXT || kind == QT_KIND_JSON) {
        quote_start(start, sizeof start, data, size);
        return qt_fail(err, QT_E_INPUT, file, NULL, "not %s, but %s that begins with '%s'", what,
                       qt_kind_name(kind), start);
    }
    const char *advice = has_weights(kind) && !has_weights(expected) ? NULL : qt_kind_advice(kind);
    return qt_fail(err, QT_E_INPUT, file, NULL, "not %s, but %s%s%s", what, qt_kind_name(kind),
                   advice ? ": " : "", advice ? advice : "");
}
