/* Directories, indexes, order, look-up, failing allocations. */
#include "formats/formats.h"
#include "tests/unit/fixture.h"

#include <sys/stat.h>

/* A shard with one-dimensional U8 tensors "NAME:COUNT NAME:COUNT ..." in this order. */
static const char *write_shard(const char *dir, const char *file, const char *spec)
{
    struct qt_tensor tensors[8];
    char names[8][32], *header;
    uint64_t offsets[9];
    size_t n = 0, size;
    int used;
    struct qt_err err = {0};
    for (; sscanf(spec, " %31[^:]:%zu%n", names[n], &size, &used) == 2; spec += used, n++)
        tensors[n] = (struct qt_tensor){
            .name = names[n], .file = file, .dtype = QT_U8, .ndim = 1, .shape = {size}};
    expect_ok(file, qt_safetensors_header(&header, &size, offsets, tensors, n, NULL, &err), &err);
    unsigned char *data = calloc(offsets[n], 1);
    assert_non_null(data);
    memcpy(data, header, size);
    for (size_t i = 0; i < n; i++) /* a tensor is filled with the first letter of its name */
        memset(data + offsets[i], names[i][0], offsets[i + 1] - offsets[i]);
    const char *path = fixture_write(dir, file, data, offsets[n]);
    qt_free(header);
    free(data);
    return path;
}

static void write_text(const char *dir, const char *file, const char *text)
{
    fixture_write(dir, file, text, strlen(text));
}

static const char index_name[] = "model.safetensors.index.json";

#define MAP(entries) "{\"metadata\":{\"total_size\":9},\"weight_map\":{" entries "}}"

/* Shards s1 (a, c) and s2 (b) exist, and the empty file s0. */
static const struct {
    const char *name, *index;
    enum qt_status status;
    const char *fragment;
} indexes[] = {
    {"good", MAP("\"a\":\"s1.safetensors\",\"b\":\"s2.safetensors\",\"c\":\"s1.safetensors\""),
     QT_OK, ""},
    {"missing shard", MAP("\"a\":\"s1.safetensors\",\"q\":\"s9.safetensors\""), QT_E_INPUT,
     "index.json: tensor q: its file 's9.safetensors' does not exist"},
    {"not in its shard",
     MAP("\"a\":\"s1.safetensors\",\"b\":\"s2.safetensors\",\"c\":\"s1.safetensors\","
         "\"d\":\"s2.safetensors\""),
     QT_E_INPUT, "index.json: tensor d: is not in 's2.safetensors', where the index puts it"},
    {"in the other shard",
     MAP("\"a\":\"s1.safetensors\",\"b\":\"s2.safetensors\",\"c\":\"s2.safetensors\""), QT_E_INPUT,
     "s1.safetensors: tensor c: is in this file, but the index puts it in 's2.safetensors'"},
    {"not listed", MAP("\"a\":\"s1.safetensors\",\"b\":\"s2.safetensors\""), QT_E_INPUT,
     "s1.safetensors: tensor c: is not listed in "},
    {"in two shards",
     MAP("\"a\":\"s1.safetensors\",\"b\":\"s2.safetensors\",\"c\":\"s1.safetensors\","
         "\"d\":\"s3.safetensors\""),
     QT_E_INPUT, "s3.safetensors: tensor a: is stored more than once: also in "},
    {"zero-byte shard", MAP("\"a\":\"s0.safetensors\""), QT_E_INPUT,
     "s0.safetensors: the file is empty"},
    {"parent directory", MAP("\"a\":\"../s1.safetensors\""), QT_E_INPUT,
     "tensor a: '../s1.safetensors' is not the name of a checkpoint file"},
    {"absolute path", MAP("\"a\":\"/etc/passwd\""), QT_E_INPUT, "'/etc/passwd' is not the name"},
    {"subdirectory", MAP("\"a\":\"d/s1.safetensors\""), QT_E_INPUT, "is not the name"},
    {"dots", MAP("\"a\":\"..\""), QT_E_INPUT, "'..' is not the name"},
    {"empty shard name", MAP("\"a\":\"\""), QT_E_INPUT, "'' is not the name"},
    {"control character", MAP("\"a\":\"\\ts1.safetensors\""), QT_E_INPUT, "is not the name"},
    {"another kind of file", MAP("\"a\":\"config.json\""), QT_E_INPUT, "'config.json' is not"},
    {"shard a number", MAP("\"a\":1"), QT_E_INPUT, "tensor a: its file name must be a string"},
    {"shard a directory", MAP("\"a\":\"d.safetensors\""), QT_E_INPUT,
     "d.safetensors: not a regular file"},
    {"empty map", MAP(""), QT_E_INPUT, "'weight_map' is empty"},
    {"empty tensor name", MAP("\"\":\"s1.safetensors\""), QT_E_INPUT, "empty name"},
    {"tensor twice", MAP("\"a\":\"s1.safetensors\",\"a\":\"s2.safetensors\""), QT_E_INPUT,
     "duplicate object key"},
    {"no map", "{\"metadata\":{}}", QT_E_INPUT, "'weight_map' must be an object"},
    {"map a list", "{\"weight_map\":[]}", QT_E_INPUT, "'weight_map' must be an object"},
    {"a list", "[]", QT_E_INPUT, "'weight_map' must be an object"},
    {"empty", "", QT_E_INPUT, "index.json: the file is empty"},
};

static void test_indexes(void **state)
{
    (void)state;
    char *dir = fixture_dir(), sub[512];
    snprintf(sub, sizeof sub, "%s/d.safetensors", dir);
    write_shard(dir, "s1.safetensors", "c:3 a:2");
    write_shard(dir, "s2.safetensors", "b:4");
    write_shard(dir, "s3.safetensors", "a:2 d:1");
    write_text(dir, "s0.safetensors", "");
    assert_int_equal(mkdir(sub, 0700), 0);
    for (size_t i = 0; i < sizeof indexes / sizeof *indexes; i++) {
        struct qt_err err = {0};
        struct qt_ckpt *ckpt;
        write_text(dir, index_name, indexes[i].index);
        int rc = qt_ckpt_open(&ckpt, dir, &err);
        expect_error(indexes[i].name, rc, indexes[i].status, indexes[i].fragment, &err);
        qt_ckpt_close(ckpt);
    }
    assert_int_equal(rmdir(sub), 0);
    fixture_remove(dir);
}

/* Shards in name order, then by offset. */
static void test_order(void **state)
{
    (void)state;
    static const char *const expected[] = {"c", "a", "b"};
    char *dir = fixture_dir();
    struct qt_err err = {0};
    struct qt_ckpt *ckpt;
    struct qt_blob blob;
    size_t size;
    write_shard(dir, "s1.safetensors", "c:3 a:2");
    write_shard(dir, "s2.safetensors", "b:5000");
    write_text(dir, index_name, indexes[0].index);
    expect_ok("open", qt_ckpt_open(&ckpt, dir, &err), &err);
    assert_string_equal(qt_ckpt_dir(ckpt), dir);
    assert_int_equal(qt_ckpt_count(ckpt), 3);
    for (size_t i = 0; i < 3; i++) {
        const struct qt_tensor *t = qt_ckpt_tensor(ckpt, i);
        assert_string_equal(t->name, expected[i]);
        assert_ptr_equal(qt_ckpt_find(ckpt, expected[i]), t);
        expect_ok("read", qt_ckpt_read(&blob, ckpt, t, &err), &err);
        assert_int_equal(blob.size, t->nbytes);
        for (size_t j = 0; j < blob.size; j++)
            assert_int_equal(blob.data[j], expected[i][0]);
        qt_blob_free(&blob);
        assert_null(blob.data);
        qt_blob_free(&blob);
        /* The pages were dropped, the data is still readable. */
        expect_ok("read again", qt_ckpt_read(&blob, ckpt, t, &err), &err);
        assert_int_equal(blob.data[blob.size - 1], expected[i][0]);
        qt_blob_free(&blob);
    }
    assert_int_equal(qt_ckpt_file_count(ckpt), 2);
    assert_string_equal(qt_ckpt_file(ckpt, 0, &size), fixture_path(dir, "s1.safetensors"));
    assert_string_equal(qt_ckpt_file(ckpt, 1, &size), fixture_path(dir, "s2.safetensors"));
    struct stat st;
    assert_int_equal(stat(fixture_path(dir, "s2.safetensors"), &st), 0);
    assert_int_equal(size, st.st_size);
    struct qt_tensor stranger = {.name = "x", .file = "f"};
    expect_error("stranger", qt_ckpt_read(&blob, ckpt, &stranger, &err), QT_E_INTERNAL,
                 "tensor x: is not in this checkpoint", &err);
    qt_ckpt_close(ckpt);
    fixture_remove(dir);
}

static void expect_first(const char *path, const char *tensor)
{
    struct qt_err err = {0};
    struct qt_ckpt *ckpt;
    expect_ok(path, qt_ckpt_open(&ckpt, path, &err), &err);
    assert_string_equal(qt_ckpt_tensor(ckpt, 0)->name, tensor);
    qt_ckpt_close(ckpt);
}

/* model.safetensors, then the index, then all *.safetensors. */
static void test_preference(void **state)
{
    (void)state;
    char *dir = fixture_dir(), slash[512];
    size_t size;
    struct qt_err err = {0};
    struct qt_ckpt *ckpt;
    expect_error("nothing", qt_ckpt_open(&ckpt, dir, &err), QT_E_INPUT, "no checkpoint here", &err);
    write_text(dir, "config.json", "{}");
    expect_error("nothing", qt_ckpt_open(&ckpt, dir, &err), QT_E_INPUT, "no checkpoint here", &err);
    write_shard(dir, "part.safetensors", "p:1");
    expect_first(dir, "p");
    write_shard(dir, "other.safetensors", "o:1");
    expect_first(dir, "o");
    write_text(dir, index_name, MAP("\"p\":\"part.safetensors\""));
    expect_first(dir, "p");
    write_shard(dir, "model.safetensors", "m:1");
    expect_first(dir, "m");
    snprintf(slash, sizeof slash, "%s/", dir);
    expect_first(slash, "m");
    expect_first(fixture_path(dir, "other.safetensors"), "o");

    expect_ok("file", qt_ckpt_open(&ckpt, fixture_path(dir, "part.safetensors"), &err), &err);
    assert_string_equal(qt_ckpt_dir(ckpt), dir);
    qt_ckpt_close(ckpt);
    char *cwd = getcwd(NULL, 0);
    assert_non_null(cwd);
    assert_int_equal(chdir(dir), 0);
    expect_ok("relative", qt_ckpt_open(&ckpt, "part.safetensors", &err), &err);
    assert_string_equal(qt_ckpt_dir(ckpt), ".");
    assert_string_equal(qt_ckpt_file(ckpt, 0, &size), "part.safetensors");
    qt_ckpt_close(ckpt);
    assert_int_equal(chdir(cwd), 0);
    free(cwd);
    expect_error("kind", qt_ckpt_open(&ckpt, fixture_path(dir, "config.json"), &err), QT_E_INPUT,
                 "config.json: a directory or a .safetensors", &err);
    expect_error("absent", qt_ckpt_open(&ckpt, fixture_path(dir, "no.safetensors"), &err),
                 QT_E_INPUT, "no.safetensors: cannot open", &err);
    expect_error("absent directory", qt_ckpt_open(&ckpt, fixture_path(dir, "no"), &err), QT_E_INPUT,
                 "no: cannot open: No such file", &err);
    assert_int_equal(symlink("nowhere", fixture_path(dir, "loose.safetensors")), 0);
    expect_error("dangling", qt_ckpt_open(&ckpt, fixture_path(dir, "loose.safetensors"), &err),
                 QT_E_INPUT, "cannot open", &err);
    fixture_remove(dir);
}

/* A tensor in two files of a directory without index. */
static void test_duplicate(void **state)
{
    (void)state;
    char *dir = fixture_dir();
    struct qt_err err = {0};
    struct qt_ckpt *ckpt;
    write_shard(dir, "x.safetensors", "a:1 b:1");
    write_shard(dir, "y.safetensors", "c:1 b:1");
    expect_error("two shards", qt_ckpt_open(&ckpt, dir, &err), QT_E_INPUT,
                 "y.safetensors: tensor b: is stored more than once: also in ", &err);
    fixture_remove(dir);
}

/* The fingerprint of one tensor of 10000 bytes, all 0 except the one at `at`. */
static uint32_t fingerprint(const char *dir, const char *description, size_t at)
{
    enum { BYTES = 10000 };
    unsigned char file[8 + 128 + BYTES] = {128};
    struct qt_err err = {0};
    struct qt_ckpt *ckpt;
    uint32_t crc;
    snprintf((char *)file + 8, 129, "{%s,\"data_offsets\":[0,%d]}}", description, BYTES);
    memset(file + 8 + strlen((char *)file + 8), ' ', 128 - strlen((char *)file + 8));
    file[8 + 128 + at] = 1;
    fixture_write(dir, "model.safetensors", file, sizeof file);
    expect_ok(description, qt_ckpt_open(&ckpt, dir, &err), &err);
    expect_ok(description, qt_ckpt_sample_crc(&crc, ckpt, &err), &err);
    qt_ckpt_close(ckpt);
    return crc;
}

/* The fingerprint depends on name, dtype, shape and both ends of the data, but not on the bytes in
 * between. */
static void test_fingerprint(void **state)
{
    (void)state;
    static const struct {
        const char *description;
        size_t at;
    } others[] = {
        {"\"b\":{\"dtype\":\"F16\",\"shape\":[50,100]", 5000},
        {"\"a\":{\"dtype\":\"BF16\",\"shape\":[50,100]", 5000},
        {"\"a\":{\"dtype\":\"F16\",\"shape\":[100,50]", 5000},
        {"\"a\":{\"dtype\":\"F16\",\"shape\":[5000]", 5000},
        {"\"a\":{\"dtype\":\"F16\",\"shape\":[50,100]", 0},
        {"\"a\":{\"dtype\":\"F16\",\"shape\":[50,100]", 4095},
        {"\"a\":{\"dtype\":\"F16\",\"shape\":[50,100]", 5904},
        {"\"a\":{\"dtype\":\"F16\",\"shape\":[50,100]", 9999},
    };
    char *dir = fixture_dir();
    const char *same = "\"a\":{\"dtype\":\"F16\",\"shape\":[50,100]";
    const uint32_t crc = fingerprint(dir, same, 5000);
    assert_int_equal(fingerprint(dir, same, 5000), crc);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (fingerprint(dir, others[i].description, others[i].at) == crc)
            fail_msg("%s, %zu: no other fingerprint", others[i].description, others[i].at);
    fixture_remove(dir);
}

/* Every allocation fails once; the sanitizer build shows that nothing leaks. */
static void fail_allocations(const char *path)
{
    struct qt_ckpt *ckpt;
    int rc = QT_E_RESOURCE;
    long n = 0;
    for (; rc != QT_OK; n++) {
        struct qt_err err = {0};
        qt_mem_fail_after(n);
        rc = qt_ckpt_open(&ckpt, path, &err);
        qt_mem_fail_after(-1);
        expect_error(path, rc, rc ? QT_E_RESOURCE : QT_OK, "out of memory", &err);
    }
    assert_true(n > 10);
    for (size_t i = 0; i < qt_ckpt_count(ckpt); i++) {
        struct qt_blob blob;
        rc = QT_E_RESOURCE;
        for (n = 0; rc != QT_OK; n++) {
            struct qt_err err = {0};
            qt_mem_fail_after(n);
            rc = qt_ckpt_read(&blob, ckpt, qt_ckpt_tensor(ckpt, i), &err);
            qt_mem_fail_after(-1);
            expect_error(path, rc, rc ? QT_E_RESOURCE : QT_OK, "out of memory", &err);
        }
        qt_blob_free(&blob);
    }
    qt_ckpt_close(ckpt);
}

static void test_out_of_memory(void **state)
{
    (void)state;
    static const char *const golden[] = {"plain.bin",  "deflated.bin", "transposed.pth",
                                         "module.pt",  "protocol4.pt", "parameter.pt",
                                         "shared.bin", "nested.pt",    "sharded"};
    char *dir = fixture_dir();
    write_shard(dir, "s1.safetensors", "c:3 a:2");
    write_shard(dir, "s2.safetensors", "b:4");
    fail_allocations(dir);
    write_text(dir, index_name, indexes[0].index);
    fail_allocations(dir);
    fail_allocations(fixture_path(dir, "s1.safetensors"));
    for (size_t i = 0; i < sizeof golden / sizeof *golden; i++)
        fail_allocations(fixture_path("tests/golden/torch", golden[i]));
    fixture_remove(dir);
}

static void test_shared_checkpoints(void **state)
{
    (void)state;
    static const struct {
        const char *dir;
        size_t files;
    } cases[] = {{"checkpoints/nano-llama", 1}, {"checkpoints/tiny-llama", 2}};
    for (size_t c = 0; c < 2; c++) {
        struct qt_err err = {0};
        struct qt_ckpt *ckpt;
        const char *path = fixture_shared(cases[c].dir);
        if (!path)
            skip();
        expect_ok(path, qt_ckpt_open(&ckpt, path, &err), &err);
        assert_int_equal(qt_ckpt_file_count(ckpt), cases[c].files);
        assert_non_null(qt_ckpt_find(ckpt, "model.embed_tokens.weight"));
        assert_non_null(qt_ckpt_find(ckpt, "model.layers.0.self_attn.q_proj.weight"));
        size_t bytes = 0, file_bytes = 0;
        for (size_t i = 0; i < qt_ckpt_count(ckpt); i++) {
            const struct qt_tensor *t = qt_ckpt_tensor(ckpt, i);
            struct qt_blob blob;
            expect_ok(t->name, qt_ckpt_read(&blob, ckpt, t, &err), &err);
            assert_int_equal(blob.size, t->count * qt_dtype_bits(t->dtype) / 8);
            bytes += blob.size;
            qt_blob_free(&blob);
        }
        for (size_t i = 0; i < cases[c].files; i++) {
            size_t size;
            qt_ckpt_file(ckpt, i, &size);
            file_bytes += size;
        }
        assert_true(bytes < file_bytes && bytes > file_bytes / 100 * 99);
        qt_ckpt_close(ckpt);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_indexes),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_preference),
        cmocka_unit_test(test_duplicate),
        cmocka_unit_test(test_fingerprint),
        cmocka_unit_test(test_out_of_memory),
        cmocka_unit_test(test_shared_checkpoints),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
