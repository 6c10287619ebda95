/* What a file is, by its content, and the messages of readers about files of another kind. */
#include "formats/formats.h"
#include "tests/unit/fixture.h"

#define BYTES(text) text, sizeof text - 1
#define ZEROS16     "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"

static const struct {
    const char *data;
    size_t size;
    enum qt_kind kind;
} files[] = {
    {BYTES(""), QT_KIND_EMPTY},
    {BYTES(ZEROS16), QT_KIND_ZEROS},
    {BYTES("\0\0\0"), QT_KIND_UNKNOWN},
    {BYTES("\3\2\1\0random"), QT_KIND_UNKNOWN},
    {BYTES("\2\0\0\0\0\0\0\0{}"), QT_KIND_SAFETENSORS},
    {BYTES("\2\0\0\0\0\0\0\x80{}"), QT_KIND_UNKNOWN},
    {BYTES("PK\3\4\x14\0\0\0\0\0\0\0\0\0" ZEROS16), QT_KIND_ZIP}, /* no name */
    {BYTES("PK\3\4\x14\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x0a\0\0\0m/data.pkl"),
     QT_KIND_TORCH},
    {BYTES("PK\3\4\x14\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\5\0\0\0a.npy"), QT_KIND_NPZ},
    {BYTES("PK\3\4\x14\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\5\0\0\0a.txt"), QT_KIND_ZIP},
    {BYTES("PK prices of the market\n"), QT_KIND_TEXT},
    {BYTES("\x80\2}q\0."), QT_KIND_PICKLE},
    {BYTES("\x93NUMPY\1\0"), QT_KIND_NPY},
    {BYTES("{\"a\": 1}"), QT_KIND_JSON},
    {BYTES("\xef\xbb\xbf \n[1"), QT_KIND_JSON},
    {BYTES("Repository not found"), QT_KIND_TEXT},
    {BYTES("\xc3\xa9t\xc3"), QT_KIND_TEXT}, /* cut off within a character */
    {BYTES("\xc3\xa9t\xc3 "), QT_KIND_UNKNOWN},
    {BYTES("a\0b"), QT_KIND_UNKNOWN},
    {BYTES("\xff\xfe{\0"), QT_KIND_UTF16},
    {BYTES("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n"), QT_KIND_LFS},
    {BYTES("version https://hawser.github.com/spec/v1\nsize 12\n"), QT_KIND_TEXT},
    {BYTES("\n<!DOCTYPE html>\n<title>Sign in"), QT_KIND_HTML},
    {BYTES("<?xml version=\"1.0\"?><!DOCTYPE html>"), QT_KIND_HTML},
    {BYTES("<!-- x --><HTML lang=en>"), QT_KIND_HTML},
    {BYTES("<?xml version=\"1.0\"?><Error><Code>AccessDenied"), QT_KIND_XML},
    {BYTES("<Error><Code>NoSuchKey</Code>"), QT_KIND_XML},
    {BYTES("<s>a token</s>"), QT_KIND_TEXT},
    {BYTES("GGUF\3\0\0\0"), QT_KIND_GGUF},
    {BYTES("lmgg\1\0\0\0"), QT_KIND_GGML},
    {BYTES("\x08\x07\x12\x07pytorch\x1a\x05"
           "2.1.0"),
     QT_KIND_ONNX},
    {BYTES("\x08\x0a:\xa0\x1f"
           "graph and more bytes"),
     QT_KIND_ONNX},
    {BYTES("\x08\x01\x12\xf0\x9a\x01\x0a\xc0\x95\x01\x0a\x1c\x0a\x0e\x0a\x01"), QT_KIND_TENSORFLOW},
    {BYTES("\x1c\0\0\0TFL3\0\0"), QT_KIND_TENSORFLOW},
    {BYTES("\0\0\1\0\0W\xfb\x80\x8b$uG\xdb"), QT_KIND_TENSORFLOW},
    {BYTES("model_checkpoint_path: \"model.ckpt-7\"\n"), QT_KIND_TENSORFLOW},
    {BYTES("\x89HDF\r\n\x1a\n\0\0"), QT_KIND_HDF5},
    {BYTES("\x82\xa6params\x81"), QT_KIND_MSGPACK},
    {BYTES("\xde\0\x10\xd9\x06"
           "params\x81"),
     QT_KIND_MSGPACK},
    {BYTES("\x82\xa6par\0ms\x81"), QT_KIND_UNKNOWN},
    {BYTES("\x1f\x8b\x08\0"), QT_KIND_GZIP},
    {BYTES("\x28\xb5\x2f\xfd\4"), QT_KIND_ZSTD},
    {BYTES("\xfd"
           "7zXZ\0\0"),
     QT_KIND_XZ},
    {BYTES("BZh91AY"), QT_KIND_BZIP2},
    {BYTES("BZ rules"), QT_KIND_TEXT},
    {BYTES("PAR1\x15\4"), QT_KIND_PARQUET},
    {BYTES("ARROW1\0\0"), QT_KIND_ARROW},
    {BYTES("%PDF-1.7\n%\xe2"), QT_KIND_PDF},
    {BYTES("\x89PNG\r\n\x1a\n"), QT_KIND_IMAGE},
    {BYTES("\xff\xd8\xff\xe0"), QT_KIND_IMAGE},
    {BYTES("RIFF\x24\0\0\0WAVEfmt "), QT_KIND_MEDIA},
    {BYTES("\x7f"
           "ELF\2\1"),
     QT_KIND_PROGRAM},
};

static void test_kinds(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        /* An allocation of the exact size: valgrind finds reads beyond it. */
        char *data = malloc(files[i].size ? files[i].size : 1);
        assert_non_null(data);
        memcpy(data, files[i].data, files[i].size);
        const enum qt_kind kind = qt_file_kind(data, files[i].size);
        if (kind != files[i].kind)
            fail_msg("file %zu is %s, expected %s", i, qt_kind_name(kind),
                     qt_kind_name(files[i].kind));
        for (size_t n = 0; n < files[i].size; n++) /* any prefix */
            assert_non_null(qt_kind_name(qt_file_kind(data + files[i].size - n, n)));
        free(data);
    }
    char *tar = calloc(1, 512);
    assert_non_null(tar);
    memcpy(tar, "model/config.json", 17);
    memcpy(tar + 257, "ustar", 5);
    assert_int_equal(qt_file_kind(tar, 512), QT_KIND_TAR);
    free(tar);
}

/* Readers name the kind of a file that is not what they expect. */
static const struct {
    const char *name, *data;
    size_t size;
    const char *fragment;
} refused[] = {
    {"model.safetensors", BYTES("version https://git-lfs.github.com/spec/v1\n"),
     "model.safetensors: not a safetensors file, but a Git LFS pointer: fetch the file with 'git "
     "lfs pull'"},
    {"model.safetensors", BYTES("{\"error\":\"Repository not found\"}"),
     "not a safetensors file, but JSON text that begins with '{\"error\":\"Repository not "
     "found\"}'"},
    {"model.safetensors", BYTES(ZEROS16 ZEROS16), "not a safetensors file, but zero bytes"},
    {"model.safetensors", BYTES(""), "the file is empty"},
    {"model.bin", BYTES("\2\0\0\0\0\0\0\0{}"),
     "not a PyTorch checkpoint, but a safetensors file: its name must end in .safetensors"},
    {"model.bin", BYTES("<html>"), "not a PyTorch checkpoint, but an HTML page"},
    {"model.pt", BYTES("\x89HDF\r\n\x1a\n"), "not a PyTorch checkpoint, but an HDF5 file"},
};

static void test_checkpoints(void **state)
{
    (void)state;
    char *dir = fixture_dir();
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        const char *path = fixture_write(dir, refused[i].name, refused[i].data, refused[i].size);
        struct qt_ckpt *ckpt;
        struct qt_err err = {0};
        int rc = qt_ckpt_open(&ckpt, path, &err);
        expect_error(refused[i].fragment, rc, QT_E_INPUT, refused[i].fragment, &err);
    }
    fixture_remove(dir);
}

static void test_json(void **state)
{
    (void)state;
    static const struct {
        const char *data;
        size_t size;
        const char *fragment;
    } bad[] = {
        {BYTES("<!DOCTYPE html>"), "config.json: not JSON text, but an HTML page"},
        {BYTES("version https://git-lfs.github.com/spec/v1\n"), "but a Git LFS pointer"},
        {BYTES("\xff\xfe{\0}\0"), "but UTF-16 or UTF-32 text: convert it to UTF-8"},
        {BYTES("\x1f\x8b\x08\0"), "not JSON text, but a gzip file"},
        {BYTES(""), "the file is empty"},
        {BYTES("Not found"), "line 1, column 3"},
        {BYTES("{\"a\": 1"), "line 1, column 7"},
        {BYTES("{\"error\": \"Entry not found\"}"),
         "is the error message of a server: 'Entry not found'"},
    };
    char *dir = fixture_dir();
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const char *path = fixture_write(dir, "config.json", bad[i].data, bad[i].size);
        struct qt_err err = {0};
        json_t *value;
        int rc = qt_json_load(&value, path, 1000, &err);
        expect_error(bad[i].fragment, rc, QT_E_INPUT, bad[i].fragment, &err);
        assert_null(value);
    }
    fixture_remove(dir);
}

static void test_npy(void **state)
{
    (void)state;
    char *dir = fixture_dir();
    struct qt_npy npy;
    struct qt_err err = {0};
    const char *path = fixture_write(dir, "x.npy", BYTES("\x89PNG\r\n\x1a\n"));
    int rc = qt_npy_open(&npy, path, &err);
    expect_error("image", rc, QT_E_INPUT, "x.npy: not a .npy array, but an image", &err);
    fixture_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kinds),
        cmocka_unit_test(test_checkpoints),
        cmocka_unit_test(test_json),
        cmocka_unit_test(test_npy),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
