/* .npy arrays and token id files. */
#include "formats/formats.h"
#include "tests/unit/fixture.h"

/* A file with this version and header text and `data` bytes 0, 1, 2, ... */
static const char *write_npy(const char *dir, int version, const char *header, size_t data)
{
    unsigned char file[4096] = "\x93NUMPY";
    size_t n = strlen(header), start = version == 1 ? 10 : 12;
    file[6] = (unsigned char)version;
    file[8] = (unsigned char)n;
    file[9] = (unsigned char)(n >> 8);
    memcpy(file + start, header, n);
    for (size_t i = 0; i < data; i++)
        file[start + n + i] = (unsigned char)i;
    return fixture_write(dir, "x.npy", file, start + n + data);
}

#define H(descr, order, shape)                                                                     \
    "{'descr': '" descr "', 'fortran_order': " order ", 'shape': " shape ", }  \n"

static const struct {
    const char *name;
    int version;
    const char *header;
    size_t data;
    enum qt_status status;
    const char *fragment;
} headers[] = {
    {"matrix", 1, H("<f4", "False", "(3, 4)"), 48, QT_OK, ""},
    {"version 2", 2, H("<f4", "False", "(3, 4)"), 48, QT_OK, ""},
    {"version 3", 3, H("<f4", "False", "(3, 4)"), 48, QT_OK, ""},
    {"vector", 1, H("<i8", "False", "(3,)"), 24, QT_OK, ""},
    {"scalar", 1, H("<f8", "False", "()"), 8, QT_OK, ""},
    {"no elements", 1, H("<f8", "False", "(3, 0)"), 0, QT_OK, ""},
    {"bytes", 1, H("|u1", "False", "(3,)"), 3, QT_OK, ""},
    {"bytes with an order", 1, H("<i1", "False", "(3,)"), 3, QT_OK, ""},
    {"booleans", 1, H("|b1", "False", "(3,)"), 3, QT_OK, ""},
    {"complex", 1, H("<c8", "False", "(3,)"), 24, QT_OK, ""},
    {"vector in any order", 1, H("<f2", "True", "(3,)"), 6, QT_OK, ""},
    {"other order and quotes", 1, "{\"shape\":(2,2),\"fortran_order\":False,\"descr\":\"<u2\"}\n",
     8, QT_OK, ""},

    {"version 0", 0, H("<f4", "False", "(3,)"), 12, QT_E_UNSUPPORTED, "npy format 0.0"},
    {"version 4", 4, H("<f4", "False", "(3,)"), 12, QT_E_UNSUPPORTED, "npy format 4.0"},
    {"big-endian", 1, H(">f4", "False", "(3,)"), 12, QT_E_UNSUPPORTED, "npy data type '>f4'"},
    {"objects", 1, H("|O", "False", "(3,)"), 12, QT_E_UNSUPPORTED, "npy data type '|O'"},
    {"strings", 1, H("<U4", "False", "(3,)"), 48, QT_E_UNSUPPORTED, "npy data type '<U4'"},
    {"long double", 1, H("<f16", "False", "(3,)"), 48, QT_E_UNSUPPORTED, "npy data type '<f16'"},
    {"void", 1, H("|V2", "False", "(3,)"), 6, QT_E_UNSUPPORTED, "npy data type '|V2'"},
    {"no order", 1, H("f4", "False", "(3,)"), 12, QT_E_UNSUPPORTED, "npy data type 'f4'"},
    {"records", 1, "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (3,)}\n", 12,
     QT_E_UNSUPPORTED, "npy structured arrays are not supported"},
    {"fortran", 1, H("<f4", "True", "(3, 4)"), 48, QT_E_UNSUPPORTED, "Fortran order"},
    {"nine dims", 1, H("|u1", "False", "(1, 1, 1, 1, 1, 1, 1, 1, 1)"), 1, QT_E_UNSUPPORTED,
     "more than 8 dimensions"},
    {"truncated data", 1, H("<f4", "False", "(3, 4)"), 47, QT_E_INPUT,
     "needs 48 bytes of data, but the file has 47"},
    {"bytes behind", 1, H("<f4", "False", "(3, 4)"), 49, QT_E_INPUT, "the file has 49"},
    {"shape too large", 1, H("<f4", "False", "(4294967296, 4294967296)"), 0, QT_E_INPUT,
     "shape is too large"},
    {"bytes too large", 1, H("<f8", "False", "(4611686018427387904,)"), 0, QT_E_INPUT,
     "shape is too large"},
    {"large beside zero", 1, H("<f4", "False", "(0, 4294967296, 4294967296)"), 0, QT_E_INPUT,
     "shape is too large"},
    {"size too large", 1, H("<f4", "False", "(18446744073709551616,)"), 0, QT_E_INPUT,
     "'shape' must be a tuple"},
    {"negative size", 1, H("<f4", "False", "(-1,)"), 0, QT_E_INPUT, "'shape' must be a tuple"},
    {"shape a number", 1, H("<f4", "False", "3"), 12, QT_E_INPUT, "'shape' must be a tuple"},
    {"shape in brackets", 1, H("<f4", "False", "(3)"), 12, QT_E_INPUT, "'shape' must be a tuple"},
    {"shape a list", 1, H("<f4", "False", "[3]"), 12, QT_E_INPUT, "'shape' must be a tuple"},
    {"shape open", 1, H("<f4", "False", "(3, "), 12, QT_E_INPUT, "'shape' must be a tuple"},
    {"two commas", 1, H("<f4", "False", "(3,,)"), 12, QT_E_INPUT, "'shape' must be a tuple"},
    {"order a number", 1, H("<f4", "1", "(3,)"), 12, QT_E_INPUT, "must be True or False"},
    {"descr a number", 1, "{'descr': 4, 'fortran_order': False, 'shape': (3,)}\n", 12, QT_E_INPUT,
     "'descr' must be a string"},
    {"descr open", 1, "{'descr': '<f4\n", 12, QT_E_INPUT, "'descr' must be a string"},
    {"descr very long", 1, H("<f4444444444444444444444444444444444", "False", "(3,)"), 12,
     QT_E_INPUT, "'descr' must be a string"},
    {"no descr", 1, "{'fortran_order': False, 'shape': (3,)}\n", 12, QT_E_INPUT, "exactly 'descr'"},
    {"no shape", 1, "{'descr': '<f4', 'fortran_order': False}\n", 12, QT_E_INPUT,
     "exactly 'descr'"},
    {"key twice", 1, "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (3,)}\n",
     12, QT_E_INPUT, "exactly 'descr'"},
    {"unknown key", 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), 'x': 1}\n", 12,
     QT_E_INPUT, "exactly 'descr'"},
    {"code", 1, "__import__('os').system('true')\n", 12, QT_E_INPUT, "exactly 'descr'"},
    {"text behind", 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (3,)} x\n", 12,
     QT_E_INPUT, "exactly 'descr'"},
    {"not closed", 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (3,)\n", 12, QT_E_INPUT,
     "exactly 'descr'"},
    {"no newline", 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}", 12, QT_E_INPUT,
     "does not end with a newline"},
    {"empty header", 1, "", 12, QT_E_INPUT, "does not end with a newline"},
};

static void test_headers(void **state)
{
    (void)state;
    char *dir = fixture_dir();
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++) {
        struct qt_err err = {0};
        struct qt_npy npy;
        const char *path = write_npy(dir, headers[i].version, headers[i].header, headers[i].data);
        int rc = qt_npy_open(&npy, path, &err);
        expect_error(headers[i].name, rc, headers[i].status, headers[i].fragment, &err);
        if (rc == QT_OK) {
            assert_int_equal(npy.count * qt_dtype_bits(npy.dtype) / 8, headers[i].data);
            for (size_t j = 0; j < headers[i].data; j++)
                assert_int_equal(npy.data[j], j);
        } else {
            assert_null(npy.map.data);
        }
        qt_npy_close(&npy);
    }
    fixture_remove(dir);
}

static void test_files(void **state)
{
    (void)state;
    static const struct {
        const char *name, *bytes;
        size_t size;
        const char *fragment;
    } cases[] = {
        {"empty", "", 0, "the file is empty"},
        {"9 bytes", "\x93NUMPY\1\0\0", 9, "not a .npy file"},
        {"text", "hello world", 11, "not a .npy array, but plain text"},
        {"header beyond the end", "\x93NUMPY\1\0\x10\0{}", 12, "npy header is truncated"},
        {"version 2 cut", "\x93NUMPY\2\0\x10\0\0", 11, "npy header is truncated"},
        {"huge header", "\x93NUMPY\2\0\0\0\2\0{}", 14, "npy header has 131072 bytes"},
    };
    char *dir = fixture_dir();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct qt_err err = {0};
        struct qt_npy npy;
        const char *path = fixture_write(dir, "x.npy", cases[i].bytes, cases[i].size);
        expect_error(cases[i].name, qt_npy_open(&npy, path, &err), QT_E_INPUT, cases[i].fragment,
                     &err);
    }
    fixture_remove(dir);
}

static void expect_ids(const char *path, size_t vocab, const uint32_t *expected, size_t n)
{
    struct qt_err err = {0};
    uint32_t *ids;
    size_t count;
    expect_ok(path, qt_token_ids_read(&ids, &count, path, vocab, &err), &err);
    assert_int_equal(count, n);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(ids[i], expected[i]);
    qt_free(ids);
}

static void expect_no_ids(const char *path, size_t vocab, const char *fragment)
{
    struct qt_err err = {0};
    uint32_t *ids;
    size_t count;
    expect_error(path, qt_token_ids_read(&ids, &count, path, vocab, &err), QT_E_INPUT, fragment,
                 &err);
    assert_null(ids);
}

static void test_ids(void **state)
{
    (void)state;
    static const uint16_t narrow[] = {0, 5, 65535};
    static const uint32_t wide[] = {7, 0xffffffff, 70000};
    char *dir = fixture_dir();
    const char *path = fixture_write(dir, "a.u16", narrow, sizeof narrow);
    expect_ids(path, 0, (const uint32_t[]){0, 5, 65535}, 3);
    expect_ids(path, 65536, (const uint32_t[]){0, 5, 65535}, 3);
    expect_no_ids(path, 65535, "a.u16: token 2 is 65535, but the vocabulary has 65535");
    path = fixture_write(dir, "a.u32", wide, sizeof wide);
    expect_ids(path, 0, wide, 3);
    expect_no_ids(path, 100000, "token 1 is 4294967295, but the vocabulary has 100000");
    expect_ids(fixture_write(dir, "e.u16", "", 0), 10, NULL, 0);
    expect_no_ids(fixture_write(dir, "odd.u16", wide, 3), 0, "size 3 is not a multiple");
    expect_no_ids(fixture_write(dir, "odd.u32", wide, 6), 0, "size 6 is not a multiple");
    expect_no_ids(fixture_write(dir, "a.txt", wide, 4), 0, "must end in .u16, .u32 or .npy");
    expect_no_ids(fixture_write(dir, "noending", wide, 4), 0, "or .npy");
    expect_no_ids(fixture_path(dir, "none.u16"), 0, "cannot open");

    /* Data bytes are 0, 1, 2, ... */
    expect_ids(write_npy(dir, 1, H("|u1", "False", "(3,)"), 3), 3, (const uint32_t[]){0, 1, 2}, 3);
    expect_ids(write_npy(dir, 1, H("|i1", "False", "(3,)"), 3), 0, (const uint32_t[]){0, 1, 2}, 3);
    expect_ids(write_npy(dir, 1, H("<i2", "False", "(2,)"), 4), 0, (const uint32_t[]){256, 770}, 2);
    expect_ids(write_npy(dir, 1, H("<i4", "False", "(1,)"), 4), 0, (const uint32_t[]){0x3020100},
               1);
    expect_no_ids(write_npy(dir, 1, H("<i8", "False", "(1,)"), 8), 0,
                  "token 0 is 506097522914230528, but ids must be below 4294967296");
    expect_no_ids(write_npy(dir, 1, H("|i1", "False", "(129,)"), 129), 0,
                  "token 128 is negative: -128");
    expect_no_ids(write_npy(dir, 1, H("<f4", "False", "(2,)"), 8), 0, "not F32 in 1");
    expect_no_ids(write_npy(dir, 1, H("|b1", "False", "(2,)"), 2), 0, "not BOOL in 1");
    expect_no_ids(write_npy(dir, 1, H("<i4", "False", "(2, 1)"), 8), 0, "not I32 in 2");
    expect_no_ids(write_npy(dir, 1, H("<i4", "False", "()"), 4), 0, "not I32 in 0");

    qt_mem_fail_after(0);
    struct qt_err err = {0};
    uint32_t *ids;
    size_t count;
    int rc = qt_token_ids_read(&ids, &count, fixture_path(dir, "a.u16"), 0, &err);
    qt_mem_fail_after(-1);
    expect_error("allocation", rc, QT_E_RESOURCE, "out of memory", &err);
    fixture_remove(dir);
}

static void test_shared(void **state)
{
    (void)state;
    struct qt_err err = {0};
    struct qt_npy npy;
    uint32_t *ids;
    size_t count;
    const char *path = fixture_shared("checkpoints/tiny-llama/ref_logits.npy");
    if (!path)
        skip();
    expect_ok(path, qt_npy_open(&npy, path, &err), &err);
    assert_int_equal(npy.dtype, QT_F32);
    assert_true(npy.ndim >= 2 && npy.count * 4 < npy.map.size);
    qt_npy_close(&npy);
    path = fixture_shared("checkpoints/tiny-llama/innocents.u16");
    if (!path)
        skip();
    expect_ok(path, qt_token_ids_read(&ids, &count, path, 65536, &err), &err);
    assert_int_equal(count, 619138 / 2);
    qt_free(ids);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_headers),
        cmocka_unit_test(test_files),
        cmocka_unit_test(test_ids),
        cmocka_unit_test(test_shared),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
