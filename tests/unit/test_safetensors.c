/* The safetensors reader and writer, through qt_ckpt_open. */
#include "formats/formats.h"
#include "tests/unit/fixture.h"

/* A file with this header text (not padded) and `data` bytes 0, 1, 2, ... */
static const char *write_file(const char *dir, const char *header, size_t data)
{
    size_t n = strlen(header), size = 8 + n + data;
    uint64_t length = n;
    unsigned char *file = malloc(size);
    assert_non_null(file);
    memcpy(file, &length, 8);
    memcpy(file + 8, header, n);
    for (size_t i = 0; i < data; i++)
        file[8 + n + i] = (unsigned char)i;
    const char *path = fixture_write(dir, "m.safetensors", file, size);
    free(file);
    return path;
}

#define T(name, dtype, shape, offsets)                                                             \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static const struct {
    const char *name, *header;
    size_t data;
    enum qt_status status;
    const char *fragment;
} headers[] = {
    {"no tensors", "{}", 0, QT_OK, ""},
    {"padded", "{}      ", 0, QT_OK, ""},
    {"scalar", "{" T("a", "F32", "[]", "[0,4]") "}", 4, QT_OK, ""},
    {"eight dims", "{" T("a", "U8", "[1,1,1,1,1,1,1,2]", "[0,2]") "}", 2, QT_OK, ""},
    {"metadata", "{\"__metadata__\":{\"format\":\"pt\"}}", 0, QT_OK, ""},
    {"empty tensors",
     "{" T("z", "F32", "[0,3]", "[0,0]") "," T("a", "U8", "[2]", "[0,2]") "," T("e", "F32", "[0]",
                                                                                "[2,2]") "}",
     2, QT_OK, ""},
    {"four bits", "{" T("a", "F4", "[3,2]", "[0,3]") "}", 3, QT_OK, ""},
    {"six bits", "{" T("a", "F6_E2M3", "[4]", "[0,3]") "}", 3, QT_OK, ""},

    {"array", "[1, 2]", 0, QT_E_INPUT, "does not start with '{'"},
    {"space first", " {}", 0, QT_E_INPUT, "does not start with '{'"},
    {"broken json", "{\"a\":}", 0, QT_E_INPUT, "line 1, column 6"},
    {"garbage behind", "{}}", 0, QT_E_INPUT, "end of file expected"},
    {"nul behind", "{\"a\": {}} \x01", 0, QT_E_INPUT, "line 1"},
    {"tensor twice", "{" T("a", "U8", "[1]", "[0,1]") "," T("a", "U8", "[1]", "[1,2]") "}", 2,
     QT_E_INPUT, "duplicate object key"},
    {"metadata number", "{\"__metadata__\":{\"n\":1}}", 0, QT_E_INPUT,
     "'__metadata__': 'n' must be a string"},
    {"metadata list", "{\"__metadata__\":[]}", 0, QT_E_INPUT, "must be an object"},
    {"metadata null", "{\"__metadata__\":null}", 0, QT_E_INPUT, "must be an object"},
    {"tensor a number", "{\"a\":1}", 0, QT_E_INPUT, "tensor a: exactly 'dtype', 'shape'"},
    {"no dtype", "{\"a\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 1, QT_E_INPUT,
     "tensor a: exactly 'dtype'"},
    {"no shape", "{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, QT_E_INPUT,
     "tensor a: exactly 'dtype'"},
    {"no offsets", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, QT_E_INPUT,
     "tensor a: exactly 'dtype'"},
    {"extra member", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"x\":0}}", 1,
     QT_E_INPUT, "tensor a: exactly 'dtype'"},
    {"dtype number", "{\"a\":{\"dtype\":8,\"shape\":[1],\"data_offsets\":[0,1]}}", 1, QT_E_INPUT,
     "'dtype' must be a string"},
    {"unknown dtype", "{" T("a", "F7", "[1]", "[0,1]") "}", 1, QT_E_UNSUPPORTED,
     "tensor a: unknown dtype 'F7'"},
    {"lower case dtype", "{" T("a", "f32", "[1]", "[0,4]") "}", 4, QT_E_UNSUPPORTED,
     "unknown dtype 'f32'"},
    {"shape number", "{" T("a", "U8", "1", "[0,1]") "}", 1, QT_E_INPUT, "'shape' must be an array"},
    {"shape negative", "{" T("a", "U8", "[-1]", "[0,1]") "}", 1, QT_E_INPUT,
     "non-negative integers"},
    {"shape real", "{" T("a", "U8", "[1.0]", "[0,1]") "}", 1, QT_E_INPUT, "non-negative integers"},
    {"shape string", "{" T("a", "U8", "[\"1\"]", "[0,1]") "}", 1, QT_E_INPUT,
     "non-negative integers"},
    {"nine dims", "{" T("a", "U8", "[1,1,1,1,1,1,1,1,1]", "[0,1]") "}", 1, QT_E_UNSUPPORTED,
     "9 dimensions"},
    {"product overflow", "{" T("a", "U8", "[4294967296,4294967296]", "[0,0]") "}", 0, QT_E_INPUT,
     "shape is too large"},
    {"bytes overflow", "{" T("a", "F64", "[4611686018427387904]", "[0,0]") "}", 0, QT_E_INPUT,
     "shape is too large"},
    {"overflow beside zero", "{" T("a", "U8", "[0,4611686018427387904,16]", "[0,0]") "}", 0,
     QT_E_INPUT, "shape is too large"},
    {"half a byte", "{" T("a", "F4", "[3]", "[0,2]") "}", 2, QT_E_INPUT,
     "3 elements of F4 end inside a byte"},
    {"six bits odd", "{" T("a", "F6_E3M2", "[5]", "[0,4]") "}", 4, QT_E_INPUT, "end inside a byte"},
    {"one offset", "{" T("a", "U8", "[1]", "[0]") "}", 1, QT_E_INPUT, "'data_offsets' must be two"},
    {"three offsets", "{" T("a", "U8", "[1]", "[0,1,2]") "}", 1, QT_E_INPUT, "must be two"},
    {"negative offset", "{" T("a", "U8", "[1]", "[-1,0]") "}", 1, QT_E_INPUT, "must be two"},
    {"offsets string", "{" T("a", "U8", "[1]", "\"01\"") "}", 1, QT_E_INPUT, "must be two"},
    {"backwards", "{" T("a", "U8", "[1]", "[1,0]") "}", 1, QT_E_INPUT, "run backwards"},
    {"beyond the end", "{" T("a", "U8", "[9]", "[0,9]") "}", 8, QT_E_INPUT,
     "data ends at byte 9, but the file has only 8"},
    {"huge offset", "{" T("a", "U8", "[1]", "[9223372036854775806,9223372036854775807]") "}", 1,
     QT_E_INPUT, "data ends at byte 9223372036854775807"},
    {"size differs", "{" T("a", "F32", "[2]", "[0,4]") "}", 4, QT_E_INPUT,
     "dtype and shape need 8 bytes, but 'data_offsets' span 4"},
    {"hole at start", "{" T("a", "U8", "[1]", "[1,2]") "}", 2, QT_E_INPUT,
     "tensor a: 1 bytes before its data"},
    {"hole inside", "{" T("a", "U8", "[1]", "[0,1]") "," T("b", "U8", "[1]", "[3,4]") "}", 4,
     QT_E_INPUT, "tensor b: 2 bytes before its data"},
    {"bytes behind", "{" T("a", "U8", "[1]", "[0,1]") "}", 2, QT_E_INPUT,
     "1 bytes at the end belong to no tensor"},
    {"overlap", "{" T("a", "U8", "[3]", "[0,3]") "," T("b", "U8", "[2]", "[2,4]") "}", 4,
     QT_E_INPUT, "tensor b: data overlaps that of 'a'"},
    {"same data", "{" T("a", "U8", "[2]", "[0,2]") "," T("b", "U8", "[2]", "[0,2]") "}", 2,
     QT_E_INPUT, "tensor b: data overlaps that of 'a'"},
    {"empty inside another", "{" T("a", "U8", "[2]", "[0,2]") "," T("b", "U8", "[0]", "[1,1]") "}",
     2, QT_E_INPUT, "tensor b: data overlaps"},
    {"empty name", "{" T("", "U8", "[1]", "[0,1]") "}", 1, QT_E_INPUT, "empty name"},
    {"newline in name", "{" T("a\\nb", "U8", "[1]", "[0,1]") "}", 1, QT_E_INPUT,
     "control character: 'a?b'"},
    {"delete in name", "{" T("a\x7f", "U8", "[1]", "[0,1]") "}", 1, QT_E_INPUT,
     "control character"},
    {"c1 control in name", "{" T("a\\u009b", "U8", "[1]", "[0,1]") "}", 1, QT_E_INPUT,
     "control character"},
};

static void test_headers(void **state)
{
    (void)state;
    char *dir = fixture_dir();
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++) {
        struct qt_err err = {0};
        struct qt_ckpt *ckpt;
        const char *path = write_file(dir, headers[i].header, headers[i].data);
        int rc = qt_ckpt_open(&ckpt, path, &err);
        expect_error(headers[i].name, rc, headers[i].status, headers[i].fragment, &err);
        if (rc < 0) {
            expect_error(headers[i].name, rc, headers[i].status, path, &err);
            assert_null(ckpt);
        }
        qt_ckpt_close(ckpt);
    }
    fixture_remove(dir);
}

static void test_lengths(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        size_t file;
        uint64_t length;
        const char *fragment;
    } cases[] = {
        {"empty", 0, 0, "the file is empty"},
        {"7 bytes", 7, 2, "7 bytes are too few"},
        {"9 bytes", 9, 2, "9 bytes are too few"},
        {"length 0", 10, 0, "a header of 0 bytes"},
        {"length 1", 10, 1, "a header of 1 bytes"},
        {"one beyond", 10, 3, "goes beyond the end of the file (10 bytes)"},
        {"far beyond", 10, 99999999, "goes beyond the end"},
        {"over the limit", 10, 100000001, "a header of 100000001 bytes"},
        {"huge", 10, UINT64_MAX, "a header of 18446744073709551615 bytes"},
    };
    char *dir = fixture_dir();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        unsigned char file[16] = {0};
        struct qt_err err = {0};
        struct qt_ckpt *ckpt;
        memcpy(file, &cases[i].length, 8);
        memcpy(file + 8, "{}", 2);
        const char *path = fixture_write(dir, "m.safetensors", file, cases[i].file);
        expect_error(cases[i].name, qt_ckpt_open(&ckpt, path, &err), QT_E_INPUT, cases[i].fragment,
                     &err);
    }
    fixture_remove(dir);
}

static void test_name_length(void **state)
{
    (void)state;
    char *dir = fixture_dir(), header[1024], name[600];
    for (size_t n = 511; n <= 513; n++) {
        struct qt_err err = {0};
        struct qt_ckpt *ckpt;
        memset(name, 'x', n);
        name[n] = '\0';
        snprintf(header, sizeof header, "{" T("%s", "U8", "[1]", "[0,1]") "}", name);
        int rc = qt_ckpt_open(&ckpt, write_file(dir, header, 1), &err);
        expect_error("name", rc, n <= 512 ? QT_OK : QT_E_INPUT,
                     "513 bytes, but at most 512 are allowed", &err);
        qt_ckpt_close(ckpt);
    }
    fixture_remove(dir);
}

/* All dtypes, in an order that differs from the order of names and of data. */
static void test_round_trip(void **state)
{
    (void)state;
    struct qt_tensor tensors[QT_DTYPE_COUNT + 1] = {{0}};
    uint64_t offsets[QT_DTYPE_COUNT + 2];
    char names[QT_DTYPE_COUNT + 1][32];
    struct qt_err err = {0};
    char *header, *again, *dir = fixture_dir();
    size_t size, size2, n = QT_DTYPE_COUNT;
    json_t *metadata = json_pack("{s:s}", "format", "pt");
    for (size_t i = 0; i < n; i++) {
        snprintf(names[i], sizeof names[i], "t\xc3\xa9.%02zu", (i * 7) % n);
        tensors[i] = (struct qt_tensor){
            .name = names[i], .file = "", .dtype = (enum qt_dtype)i, .ndim = 2, .shape = {4, i}};
    }
    tensors[n] = (struct qt_tensor){.name = "scalar", .file = "", .dtype = QT_F64};
    n++;
    expect_ok("header", qt_safetensors_header(&header, &size, offsets, tensors, n, metadata, &err),
              &err);
    expect_ok("header", qt_safetensors_header(&again, &size2, offsets, tensors, n, metadata, &err),
              &err);
    assert_int_equal(size, size2);
    assert_memory_equal(header, again, size);
    assert_int_equal(size % 8, 0);
    assert_int_equal(offsets[0], size);

    unsigned char *file = malloc(offsets[n]);
    assert_non_null(file);
    for (size_t i = 0; i < offsets[n]; i++)
        file[i] = (unsigned char)(i * 31);
    memcpy(file, header, size);
    const char *path = fixture_write(dir, "m.safetensors", file, offsets[n]);
    struct qt_ckpt *ckpt;
    expect_ok("open", qt_ckpt_open(&ckpt, path, &err), &err);
    assert_int_equal(qt_ckpt_count(ckpt), n);
    for (size_t i = 0; i < n; i++) {
        const struct qt_tensor *t = qt_ckpt_find(ckpt, tensors[i].name);
        struct qt_blob blob;
        assert_non_null(t);
        assert_int_equal(t->dtype, tensors[i].dtype);
        assert_int_equal(t->ndim, tensors[i].ndim);
        assert_memory_equal(t->shape, tensors[i].shape, sizeof t->shape);
        assert_int_equal(t->nbytes, offsets[i + 1] - offsets[i]);
        expect_ok("read", qt_ckpt_read(&blob, ckpt, t, &err), &err);
        assert_int_equal(blob.size, t->nbytes);
        assert_null(blob.owned);
        assert_memory_equal(blob.data, file + offsets[i], blob.size);
        qt_blob_free(&blob);
    }
    assert_null(qt_ckpt_find(ckpt, "absent"));
    assert_null(qt_ckpt_find(ckpt, ""));
    qt_ckpt_close(ckpt);
    free(file);
    qt_free(header);
    qt_free(again);
    json_decref(metadata);
    fixture_remove(dir);
}

static void test_header_bytes(void **state)
{
    (void)state;
    static const char expected[] =
        "\x88\0\0\0\0\0\0\0"
        "{\"__metadata__\":{\"k\":\"v\"},"
        "\"b\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[0,12]},"
        "\"a\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[12,13]}}";
    const struct qt_tensor tensors[] = {
        {.name = "b", .file = "", .dtype = QT_BF16, .ndim = 2, .shape = {2, 3}},
        {.name = "a", .file = "", .dtype = QT_U8},
    };
    struct qt_err err = {0};
    uint64_t offsets[3];
    char *header;
    size_t size;
    json_t *metadata = json_pack("{s:s}", "k", "v");
    expect_ok("header", qt_safetensors_header(&header, &size, offsets, tensors, 2, metadata, &err),
              &err);
    assert_int_equal(size, 8 + 0x88);
    assert_memory_equal(header, expected, sizeof expected - 1);
    for (size_t i = sizeof expected - 1; i < size; i++)
        assert_int_equal(header[i], ' ');
    assert_int_equal(offsets[1], size + 12);
    assert_int_equal(offsets[2], size + 13);
    qt_free(header);
    json_decref(metadata);
}

static void test_header_errors(void **state)
{
    (void)state;
    struct qt_tensor tensors[] = {
        {.name = "a", .file = "", .dtype = QT_U8},
        {.name = "a", .file = "", .dtype = QT_U8},
    };
    struct qt_err err = {0};
    uint64_t offsets[3];
    char *header;
    size_t size;
    expect_error("twice", qt_safetensors_header(&header, &size, offsets, tensors, 2, NULL, &err),
                 QT_E_INTERNAL, "tensor a: written twice", &err);
    assert_null(header);
    tensors[1].name = "a\n";
    expect_error("name", qt_safetensors_header(&header, &size, offsets, tensors, 2, NULL, &err),
                 QT_E_INPUT, "control character", &err);
    struct qt_tensor many[5];
    uint64_t many_offsets[6];
    char names[5][2] = {"a", "b", "c", "d", "e"};
    for (size_t i = 0; i < 5; i++)
        many[i] = (struct qt_tensor){
            .name = names[i], .file = "", .dtype = QT_U8, .ndim = 1, .shape = {SIZE_MAX / 8}};
    expect_error("too large",
                 qt_safetensors_header(&header, &size, many_offsets, many, 5, NULL, &err),
                 QT_E_UNSUPPORTED, "tensor e: the file would be too large", &err);
    int rc = QT_E_RESOURCE;
    char *whole;
    tensors[1].name = "b";
    expect_ok("header", qt_safetensors_header(&whole, &size, offsets, tensors, 2, NULL, &err),
              &err);
    for (long n = 0; rc != QT_OK; n++) {
        qt_mem_fail_after(n);
        rc = qt_safetensors_header(&header, &size, offsets, tensors, 2, NULL, &err);
        qt_mem_fail_after(-1);
        if (rc != QT_OK)
            expect_error("allocation", rc, QT_E_RESOURCE, "out of memory", &err);
    }
    assert_memory_equal(header, whole, size);
    qt_free(header);
    qt_free(whole);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_headers),      cmocka_unit_test(test_lengths),
        cmocka_unit_test(test_name_length),  cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_header_bytes), cmocka_unit_test(test_header_errors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
