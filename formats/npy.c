/*
 * NumPy arrays and token files.
 *
 * A .npy file is "\x93NUMPY", the version, the header size (u16 in 1.0, u32 later), a Python
 * literal padded with spaces and a final newline,
 *
 *   {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
 *
 * and the data.
 */
#include "formats/formats_internal.h"

enum { MAX_LITERAL = 64 * 1024 };

struct text {
    const char *at, *end;
};

/* ---- header literal ------------------------------------------------------------------------- */

static void skip_space(struct text *s)
{
    while (s->at < s->end && (*s->at == ' ' || *s->at == '\n' || *s->at == '\t'))
        s->at++;
}

static bool accept(struct text *s, const char *word)
{
    size_t n = strlen(word);
    skip_space(s);
    if ((size_t)(s->end - s->at) < n || memcmp(s->at, word, n) != 0)
        return false;
    s->at += n;
    return true;
}

/* 'text' or "text", without escapes. */
static bool read_string(char *out, size_t room, struct text *s)
{
    skip_space(s);
    if (s->at == s->end || (*s->at != '\'' && *s->at != '"'))
        return false;
    char quote = *s->at++;
    const char *close = memchr(s->at, quote, (size_t)(s->end - s->at));
    size_t n = close ? (size_t)(close - s->at) : room;
    if (n >= room || memchr(s->at, '\\', n))
        return false;
    memcpy(out, s->at, n);
    out[n] = '\0';
    s->at = close + 1;
    return true;
}

static bool read_number(size_t *out, struct text *s)
{
    skip_space(s);
    const char *start = s->at;
    for (*out = 0; s->at < s->end && *s->at >= '0' && *s->at <= '9'; s->at++)
        if (qt_mul_overflow(out, *out, 10) || qt_add_overflow(out, *out, (size_t)(*s->at - '0')))
            return false;
    return s->at > start;
}

/* (), (3,) or (3, 4) */
static int read_shape(struct qt_npy *npy, struct text *s, const char *file, struct qt_err *err)
{
    static const char reason[] = "npy header: 'shape' must be a tuple of sizes";
    if (!accept(s, "("))
        return qt_fail(err, QT_E_INPUT, file, NULL, reason);
    for (npy->ndim = 0; !accept(s, ")"); npy->ndim++) {
        size_t n;
        if (!read_number(&n, s))
            return qt_fail(err, QT_E_INPUT, file, NULL, reason);
        if (npy->ndim == QT_MAX_DIMS)
            return qt_fail(err, QT_E_UNSUPPORTED, file, NULL, "more than %d dimensions",
                           QT_MAX_DIMS);
        npy->shape[npy->ndim] = n;
        if (!accept(s, ",") && !(npy->ndim > 0 && s->at < s->end && *s->at == ')'))
            return qt_fail(err, QT_E_INPUT, file, NULL, reason);
    }
    return QT_OK;
}

static int read_descr(enum qt_dtype *out, struct text *s, const char *file, struct qt_err *err)
{
    static const struct {
        const char *code;
        enum qt_dtype dtype;
    } types[] = {
        {"|b1", QT_BOOL}, {"|u1", QT_U8},  {"|i1", QT_I8},  {"<u2", QT_U16}, {"<i2", QT_I16},
        {"<f2", QT_F16},  {"<u4", QT_U32}, {"<i4", QT_I32}, {"<f4", QT_F32}, {"<u8", QT_U64},
        {"<i8", QT_I64},  {"<f8", QT_F64}, {"<c8", QT_C64},
    };
    char descr[32];
    if (accept(s, "["))
        return qt_fail(err, QT_E_UNSUPPORTED, file, NULL,
                       "npy structured arrays are not supported");
    if (!read_string(descr, sizeof descr, s))
        return qt_fail(err, QT_E_INPUT, file, NULL, "npy header: 'descr' must be a string");
    if (descr[0] == '<' && strlen(descr) == 3 && descr[2] == '1')
        descr[0] = '|'; /* single bytes have no byte order */
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (strcmp(types[i].code, descr) == 0) {
            *out = types[i].dtype;
            return QT_OK;
        }
    return qt_fail(err, QT_E_UNSUPPORTED, file, NULL,
                   "npy data type '%s' is not supported: it must be a little-endian number", descr);
}

static int read_order(bool *fortran, struct text *s, const char *file, struct qt_err *err)
{
    if (accept(s, "True"))
        *fortran = true;
    else if (accept(s, "False"))
        *fortran = false;
    else
        return qt_fail(err, QT_E_INPUT, file, NULL,
                       "npy header: 'fortran_order' must be True or False");
    return QT_OK;
}

static int bad_literal(const char *file, struct qt_err *err)
{
    return qt_fail(err, QT_E_INPUT, file, NULL,
                   "npy header: exactly 'descr', 'fortran_order' and 'shape' are expected");
}

static int read_literal(struct qt_npy *npy, struct text s, const char *file, struct qt_err *err)
{
    enum { DESCR = 1, ORDER = 2, SHAPE = 4, ALL = 7 };
    unsigned seen = 0;
    bool fortran = false;
    if (!accept(&s, "{"))
        return bad_literal(file, err);
    while (!accept(&s, "}")) {
        char key[16];
        if (!read_string(key, sizeof key, &s) || !accept(&s, ":"))
            return bad_literal(file, err);
        unsigned which = strcmp(key, "descr") == 0           ? DESCR
                         : strcmp(key, "fortran_order") == 0 ? ORDER
                         : strcmp(key, "shape") == 0         ? SHAPE
                                                             : 0;
        if (!which || seen & which)
            return bad_literal(file, err);
        seen |= which;
        int rc = which == DESCR   ? read_descr(&npy->dtype, &s, file, err)
                 : which == ORDER ? read_order(&fortran, &s, file, err)
                                  : read_shape(npy, &s, file, err);
        if (rc < 0)
            return rc;
        if (!accept(&s, ",") && !(s.at < s.end && *s.at == '}'))
            return bad_literal(file, err);
    }
    skip_space(&s);
    if (s.at != s.end || seen != ALL)
        return bad_literal(file, err);
    if (fortran && npy->ndim > 1)
        return qt_fail(err, QT_E_UNSUPPORTED, file, NULL,
                       "npy arrays in Fortran order are not supported");
    return QT_OK;
}

/* ---- files ---------------------------------------------------------------------------------- */

/* *data = offset of the array data in the file p[size]. */
static int read_header(struct qt_npy *npy, size_t *data, const unsigned char *p, size_t size,
                       const char *file, struct qt_err *err)
{
    int rc = qt_kind_expect(QT_KIND_NPY, NULL, p, size, file, err);
    if (rc < 0)
        return rc;
    if (size < 10 || memcmp(p, "\x93NUMPY", 6) != 0)
        return qt_fail(err, QT_E_INPUT, file, NULL, "not a .npy file");
    if (p[6] < 1 || p[6] > 3 || p[7] != 0)
        return qt_fail(err, QT_E_UNSUPPORTED, file, NULL,
                       "npy format %d.%d is not supported (1.0 to 3.0 are)", p[6], p[7]);
    size_t start = p[6] == 1 ? 10 : 12;
    if (size < start)
        return qt_fail(err, QT_E_INPUT, file, NULL, "npy header is truncated");
    size_t n = (size_t)p[8] | (size_t)p[9] << 8;
    if (start == 12)
        n |= (size_t)p[10] << 16 | (size_t)p[11] << 24;
    if (n > MAX_LITERAL)
        return qt_fail(err, QT_E_INPUT, file, NULL,
                       "npy header has %zu bytes, but at most %d are allowed", n, MAX_LITERAL);
    if (n > size - start)
        return qt_fail(err, QT_E_INPUT, file, NULL, "npy header is truncated");
    if (n == 0 || p[start + n - 1] != '\n')
        return qt_fail(err, QT_E_INPUT, file, NULL, "npy header does not end with a newline");
    *data = start + n;
    struct text s = {(const char *)p + start, (const char *)p + start + n};
    return read_literal(npy, s, file, err);
}

/* Reads the array in file[size]; the map of *out does not change. */
static int parse(struct qt_npy *out, const unsigned char *file, size_t size, const char *path,
                 struct qt_err *err)
{
    size_t start = 0;
    int rc;
    QT_TRY(read_header(out, &start, file, size, path, err));
    struct qt_tensor t = {.file = path, .dtype = out->dtype, .ndim = out->ndim};
    memcpy(t.shape, out->shape, sizeof t.shape);
    QT_TRY(qt_tensor_measure(&t, err));
    if (t.nbytes != size - start) {
        rc = qt_fail(err, QT_E_INPUT, path, NULL,
                     "npy shape needs %zu bytes of data, but the file has %zu%s", t.nbytes,
                     size - start, t.nbytes > size - start ? ": the file is truncated" : "");
        goto done;
    }
    out->count = t.count;
    out->data = file + start;
done:
    return rc;
}

int qt_npy_open(struct qt_npy *out, const char *path, struct qt_err *err)
{
    int rc;
    *out = (struct qt_npy){0};
    QT_TRY(qt_map_open(&out->map, path, err));
    QT_TRY(parse(out, out->map.data, out->map.size, path, err));
done:
    if (rc < 0)
        qt_npy_close(out);
    return rc;
}

void qt_npy_close(struct qt_npy *npy)
{
    qt_map_close(&npy->map);
    *npy = (struct qt_npy){0};
}

/* ---- token ids ------------------------------------------------------------------------------ */

/* Loads an integer of `size` bytes. Negative values become huge, which fails the range check. */
static uint64_t load_integer(const unsigned char *p, size_t size, bool is_signed)
{
    uint64_t u = 0;
    memcpy(&u, p, size);
    if (is_signed && size < 8 && p[size - 1] & 0x80)
        u |= UINT64_MAX << 8 * size;
    return u;
}

static int copy_ids(uint32_t *ids, const unsigned char *data, enum qt_dtype t, size_t n,
                    size_t vocab, bool (*interrupted)(void), const char *file, struct qt_err *err)
{
    enum { POLL_IDS = 1 << 20 }; /* between two looks at `interrupted` */
    const size_t size = qt_dtype_bits(t) / 8;
    const bool is_signed = t == QT_I8 || t == QT_I16 || t == QT_I32 || t == QT_I64;
    const uint64_t limit = vocab && vocab <= UINT32_MAX ? vocab : (uint64_t)UINT32_MAX + 1;
    for (size_t i = 0; i < n; i++) {
        if (i % POLL_IDS == 0 && interrupted && interrupted())
            return qt_fail(err, QT_E_INTERRUPTED, file, NULL, "interrupted while it was read");
        uint64_t id = load_integer(data + i * size, size, is_signed);
        if (id >= limit && is_signed && (int64_t)id < 0)
            return qt_fail(err, QT_E_INPUT, file, NULL, "token %zu is negative: %lld", i,
                           (long long)id);
        if (id >= limit)
            return qt_fail(err, QT_E_INPUT, file, NULL, "token %zu is %llu, but %s %llu", i,
                           (unsigned long long)id,
                           vocab ? "the vocabulary has" : "ids must be below",
                           (unsigned long long)limit);
        ids[i] = (uint32_t)id;
    }
    return QT_OK;
}

/* Takes file[size] as an array; the ending of `name` determines the width of raw ids. */
static int find_ids(struct qt_npy *out, const unsigned char *file, size_t size, const char *name,
                    const char *path, struct qt_err *err)
{
    const bool narrow = qt_name_ends_in(name, ".u16");
    if (!narrow && !qt_name_ends_in(name, ".u32"))
        return parse(out, file, size, path, err);
    const size_t width = narrow ? 2 : 4;
    out->dtype = narrow ? QT_U16 : QT_U32;
    out->ndim = 1;
    out->data = file;
    out->count = out->shape[0] = size / width;
    if (size % width)
        return qt_fail(err, QT_E_INPUT, path, NULL,
                       "file size %zu is not a multiple of the id size %zu", size, width);
    return QT_OK;
}

int qt_token_ids_parse(uint32_t **ids, size_t *count, const void *file, size_t size,
                       const char *name, const struct qt_token_ids_options *opt, const char *path,
                       struct qt_err *err)
{
    int rc;
    struct qt_npy npy = {0};
    *ids = NULL;
    QT_TRY(find_ids(&npy, file, size, name, path, err));
    bool integer = npy.dtype == QT_U8 || npy.dtype == QT_I8 || npy.dtype == QT_U16 ||
                   npy.dtype == QT_I16 || npy.dtype == QT_U32 || npy.dtype == QT_I32 ||
                   npy.dtype == QT_U64 || npy.dtype == QT_I64;
    if (npy.ndim != 1 || !integer) {
        rc = qt_fail(err, QT_E_INPUT, path, NULL,
                     "token ids must be integers in one dimension, not %s in %d",
                     qt_dtype_name(npy.dtype), npy.ndim);
        goto done;
    }
    *count = opt->most ? qt_min_size(opt->most, npy.count) : npy.count;
    QT_TRY(qt_array_new(ids, *count, sizeof **ids, err));
    QT_TRY(copy_ids(*ids, npy.data, npy.dtype, *count, opt->vocab, opt->interrupted, path, err));
done:
    if (rc < 0) {
        qt_free(*ids);
        *ids = NULL;
    }
    return rc;
}

int qt_token_ids_read(uint32_t **ids, size_t *count, const char *path, size_t vocab,
                      struct qt_err *err)
{
    const struct qt_token_ids_options opt = {.vocab = vocab};
    struct qt_map map;
    int rc;
    *ids = NULL;
    if (!qt_name_ends_in(path, ".u16") && !qt_name_ends_in(path, ".u32") &&
        !qt_name_ends_in(path, ".npy"))
        return qt_fail(err, QT_E_INPUT, path, NULL,
                       "the name of a token file must end in .u16, .u32 or .npy");
    rc = qt_map_open(&map, path, err);
    if (rc == QT_OK)
        rc = qt_token_ids_parse(ids, count, map.data, map.size, path, &opt, path, err);
    qt_map_close(&map);
    return rc;
}

/* ---- writing -------------------------------------------------------------------------------- */

int qt_npy_write(const char *path, const float *x, size_t rows, size_t columns, struct qt_err *err)
{
    enum { HEADER = 128, PREFIX = 10 }; /* data is aligned to 64 bytes */
    char header[HEADER];
    memset(header, ' ', HEADER);
    memcpy(header, "\x93NUMPY\x01\x00\x76\x00", PREFIX); /* version 1.0, 118 bytes follow */
    int used =
        snprintf(header + PREFIX, HEADER - PREFIX,
                 "{'descr': '<f4', 'fortran_order': False, 'shape': (%zu, %zu), }", rows, columns);
    header[PREFIX + used] = ' ';
    header[HEADER - 1] = '\n';
    const struct qt_file_piece pieces[] = {{header, HEADER}, {x, rows * columns * sizeof *x}};
    return qt_file_publish(path, pieces, 2, "exists already", err);
}
