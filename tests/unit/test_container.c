/* Reading containers: contents of a valid one; hostile ones are rejected for the right reason. */
#include "container_fixture.h"

static struct qt_container *open_good(const char *dir)
{
    struct qt_container *c;
    struct qt_err err = {0};
    assert_status(qt_container_open(&c, dir, &err), QT_OK, err);
    return c;
}

static void check_contents(const char *dir)
{
    struct qt_container *c = open_good(dir);
    const struct qt_ckpt *ckpt = qt_container_ckpt(c);
    struct qt_err err = {0};
    assert_string_equal(qt_container_dir(c), dir);
    assert_int_equal(
        json_integer_value(json_object_get(qt_container_manifest(c), "format_version")),
        qt_container_version(c));
    assert_int_equal(qt_container_count(c), 2);
    const struct qt_entry *e = qt_container_entry(c, 1);
    assert_ptr_equal(e, qt_container_find(c, "layers.1.weight"));
    assert_null(qt_container_find(c, "lm_head"));
    assert_string_equal(e->name, "layers.1.weight");
    assert_string_equal(e->spec, "nf4:g=64");
    assert_string_equal(e->layout, "frag16x64");
    assert_int_equal(e->n, 8);
    assert_int_equal(e->k, 16);
    assert_int_equal(e->scale_exp2, -3);
    assert_int_equal(e->nsections, 3);
    assert_string_equal(e->section[1].name, "scale");
    assert_string_equal(e->section[1].tensor->name, "layers.1.weight.q.scale");
    json_t *entry;
    assert_status(qt_entry_json(&entry, e, &err), QT_OK, err);
    assert_non_null(json_object_get(entry, "bpw"));
    json_decref(entry);
    assert_true(qt_container_is_copied(c, "lm_head"));
    assert_false(qt_container_is_copied(c, "layers.1.weight.q.scale"));
    assert_false(qt_container_is_copied(c, "absent"));
    assert_status(qt_container_copied_json(&entry, c, "lm_head", &err), QT_OK, err);
    assert_string_equal(json_string_value(json_object_get(entry, "dtype")), "BF16");
    json_decref(entry);
    assert_int_equal(qt_ckpt_count(ckpt), TENSORS);
    for (size_t i = 0; i < TENSORS; i++) {
        const struct qt_tensor *t = qt_ckpt_find(ckpt, fixture_tensors[i].name);
        unsigned char *data = fixture_data(i);
        struct qt_blob blob;
        assert_non_null(t);
        assert_int_equal(t->dtype, fixture_tensors[i].dtype);
        assert_status(qt_ckpt_read(&blob, ckpt, t, &err), QT_OK, err);
        assert_int_equal(blob.size, fixture_tensors[i].nbytes);
        assert_memory_equal(blob.data, data, blob.size);
        qt_blob_free(&blob);
        free(data);
        assert_status(qt_container_check_crc(c, i, &err), QT_OK, err);
    }
    qt_container_close(c);
}

static void test_round_trip(void **state)
{
    (void)state;
    struct run one = {.dir = "one", .kill_after = -1};
    struct run many = {.dir = "./many/", .shard_bytes = MANY_SHARDS, .kill_after = -1};
    assert_status(fixture_write(&one), QT_OK, one.err);
    assert_status(fixture_write(&many), QT_OK, many.err);
    check_contents("one");
    check_contents("many");
    /* 48 | 128 | 16+20+21+6+0+32: no shard above 100 bytes unless it holds one tensor. */
    shell(
        "test \"$(LC_ALL=C ls one | tr '\\n' ' ')\" = 'SHA256SUMS model.safetensors qtool.json '");
    shell("test \"$(LC_ALL=C ls many | tr '\\n' ' ')\" = 'SHA256SUMS "
          "model-00001-of-00003.safetensors "
          "model-00002-of-00003.safetensors model-00003-of-00003.safetensors "
          "model.safetensors.index.json qtool.json '");
    shell("test ! -e one.partial && test ! -e many.partial && test ! -e many.old");
    json_t *index;
    assert_int_equal(qt_json_load(&index, "many/model.safetensors.index.json", 1 << 20, NULL),
                     QT_OK);
    const json_t *map = json_object_get(index, "weight_map");
    assert_int_equal(
        json_integer_value(json_object_get(json_object_get(index, "metadata"), "total_size")), 271);
    assert_int_equal(json_object_size(map), TENSORS);
    assert_string_equal(json_string_value(json_object_get(map, "layers.0.weight.q.scale")),
                        "model-00003-of-00003.safetensors");
    json_decref(index);
}

static void test_probe(void **state)
{
    (void)state;
    shell("mkdir probe && touch probe/config.json");
    assert_false(qt_container_probe("probe"));
    assert_false(qt_container_probe("absent"));
    assert_false(qt_container_probe("probe/config.json"));
    shell("touch probe/qtool.json");
    assert_true(qt_container_probe("probe"));
    assert_false(qt_container_unfinished("absent"));
    assert_false(qt_container_unfinished("probe"));
    shell("touch probe/journal");
    assert_false(qt_container_unfinished("probe"));
    shell("printf '{\"format\":' > probe/journal"); /* killed in the first line, after it */
    assert_true(qt_container_unfinished("probe"));
    shell("echo '{\"format\":\"qtool-journal\",\"version\":1' > probe/journal");
    assert_true(qt_container_unfinished("probe"));
    shell("echo today > probe/journal");
    assert_false(qt_container_unfinished("probe"));
    shell("rm probe/journal && mkfifo probe/journal");
    assert_false(qt_container_unfinished("probe"));
}

static void test_no_tensors(void **state)
{
    (void)state;
    struct qt_writer *w;
    struct qt_container *c;
    struct qt_err err = {0};
    json_t *empty = json_object();
    json_t *manifest = json_pack("{s:s, s:i, s:{}, s:{}}", "format", "qtool", "format_version", 1,
                                 "tensors", "copied");
    assert_status(qt_writer_open(&w, "none", NULL, 0, empty, &(struct qt_writer_options){0}, &err),
                  QT_OK, err);
    assert_status(fixture_publish(w, manifest, &err), QT_OK, err);
    qt_writer_close(w);
    c = open_good("none");
    assert_int_equal(qt_container_count(c), 0);
    assert_null(qt_container_find(c, "x"));
    qt_container_close(c);
    json_decref(manifest);
    json_decref(empty);
}

/* ---- hostile manifests ---------------------------------------------------------------------- */

static const char long_name[] =
    "{\"name\": \"abcdefghijklmnopqrstuvwxyz0123456\", \"dtype\": \"F16\", "
    "\"shape\": [8], \"crc32\": \"00000000\"}";
static const char no_crc[] = "{\"dtype\": \"F16\", \"shape\": [6, 4]}";

/* The good manifest with the value at `path` (members and indices separated by '|') replaced by
 * `json`, or removed where that is NULL. */
static const struct {
    const char *path, *json;
    int status;
    const char *reason;
} hostile[] = {
    {"format", NULL, QT_E_INPUT, "'format'"},
    {"format", "\"gguf\"", QT_E_INPUT, "not a qtool manifest"},
    {"format", "1", QT_E_INPUT, "'format'"},
    {"format_version", NULL, QT_E_INPUT, "'format_version'"},
    {"format_version", "\"1\"", QT_E_INPUT, "'format_version'"},
    {"format_version", "-1", QT_E_INPUT, "'format_version'"},
    {"format_version", "0", QT_E_UNSUPPORTED, "format version 0"},
    {"format_version", "3", QT_E_UNSUPPORTED, "format version 3, but this qtool"},
    {"tensors", NULL, QT_E_INPUT, "'tensors' must be an object"},
    {"tensors", "[]", QT_E_INPUT, "'tensors' must be an object"},
    {"copied", NULL, QT_E_INPUT, "'copied' must be an object"},
    {"copied", "7", QT_E_INPUT, "'copied' must be an object"},
    {"tensors|layers.0.weight", "null", QT_E_INPUT, "must be a named object"},
    {"tensors|layers.0.weight", "[]", QT_E_INPUT, "must be a named object"},
    {"tensors|", "{}", QT_E_INPUT, "must be a named object"},
    {"tensors|layers.0.weight|scheme", NULL, QT_E_INPUT, "'scheme'"},
    {"tensors|layers.0.weight|scheme", "{}", QT_E_INPUT, "'scheme'"},
    {"tensors|layers.0.weight|layout", NULL, QT_E_INPUT, "'layout'"},
    {"tensors|layers.0.weight|shape", NULL, QT_E_INPUT, "'shape' must be an array"},
    {"tensors|layers.0.weight|shape", "\"8x16\"", QT_E_INPUT, "'shape' must be an array"},
    {"tensors|layers.0.weight|shape", "[8]", QT_E_INPUT, "two positive integers"},
    {"tensors|layers.0.weight|shape", "[8, 16, 1]", QT_E_INPUT, "two positive integers"},
    {"tensors|layers.0.weight|shape", "[0, 16]", QT_E_INPUT, "two positive integers"},
    {"tensors|layers.0.weight|shape", "[8, -16]", QT_E_INPUT, "not negative"},
    {"tensors|layers.0.weight|shape", "[8.0, 16]", QT_E_INPUT, "must hold integers"},
    {"tensors|layers.0.weight|shape", "[4294967296, 4294967296]", QT_E_INPUT,
     "two positive integers"},
    {"tensors|layers.0.weight|shape", "[1,1,1,1,1,1,1,1,1]", QT_E_INPUT, "at most 8 integers"},
    {"tensors|layers.0.weight|scale_exp2", NULL, QT_E_INPUT, "from -1000 to 1000"},
    {"tensors|layers.0.weight|scale_exp2", "1001", QT_E_INPUT, "from -1000 to 1000"},
    {"tensors|layers.0.weight|scale_exp2", "-9223372036854775808", QT_E_INPUT,
     "from -1000 to 1000"},
    {"tensors|layers.0.weight|scale_exp2", "0.5", QT_E_INPUT, "from -1000 to 1000"},
    {"tensors|layers.0.weight|sections", NULL, QT_E_INPUT, "1 to 16 sections"},
    {"tensors|layers.0.weight|sections", "[]", QT_E_INPUT, "1 to 16 sections"},
    {"tensors|layers.0.weight|sections", "{}", QT_E_INPUT, "1 to 16 sections"},
    {"tensors|layers.0.weight|sections", "[0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0]", QT_E_INPUT,
     "1 to 16 sections"},
    {"tensors|layers.0.weight|sections|0", "null", QT_E_INPUT, "'name'"},
    {"tensors|layers.0.weight|sections|1", NULL, QT_E_INPUT, "is not listed in"},
    {"tensors|layers.0.weight|sections|0|name", "\"\"", QT_E_INPUT, "section name"},
    {"tensors|layers.0.weight|sections|0|name", "\"a.q.b\"", QT_E_INPUT, "section name"},
    {"tensors|layers.0.weight|sections|0|name", "\"../x\"", QT_E_INPUT, "section name"},
    {"tensors|layers.0.weight|sections|0", long_name, QT_E_INPUT, "section name"},
    {"tensors|layers.0.weight|sections|0|name", "\"plane1\"", QT_E_INPUT,
     "not in the safetensors files"},
    {"tensors|layers.0.weight|sections|0|name", "\"scale\"", QT_E_INPUT,
     "dtype is F16, but the manifest says U32"},
    {"tensors|layers.0.weight|sections|0|dtype", "\"I32\"", QT_E_INPUT,
     "dtype is U32, but the manifest says I32"},
    {"tensors|layers.0.weight|sections|0|dtype", "\"u32\"", QT_E_INPUT, "not a known dtype"},
    {"tensors|layers.0.weight|sections|0|dtype", NULL, QT_E_INPUT, "'dtype'"},
    {"tensors|layers.0.weight|sections|0|shape", "[4, 8]", QT_E_INPUT, "shape differs"},
    {"tensors|layers.0.weight|sections|0|shape", "[32]", QT_E_INPUT, "shape differs"},
    {"tensors|layers.0.weight|sections|0|crc32", NULL, QT_E_INPUT, "'crc32'"},
    {"tensors|layers.0.weight|sections|0|crc32", "1", QT_E_INPUT, "'crc32'"},
    {"tensors|layers.0.weight|sections|0|crc32", "\"0123456\"", QT_E_INPUT, "8 lower-case"},
    {"tensors|layers.0.weight|sections|0|crc32", "\"0123456G\"", QT_E_INPUT, "8 lower-case"},
    {"tensors|layers.0.weight|sections|0|crc32", "\"0123456A\"", QT_E_INPUT, "8 lower-case"},
    {"tensors|layers.0.weight|sections|0|crc32", "\"0x123456\"", QT_E_INPUT, "8 lower-case"},
    {"tensors|layers.0.weight|sections|0|crc32", "\"-1234567\"", QT_E_INPUT, "8 lower-case"},
    {"tensors|layers.0.weight", NULL, QT_E_INPUT, "is not listed in"},
    {"tensors|embed.weight", "{}", QT_E_INPUT, "both 'tensors' and 'copied'"},
    {"copied|embed.weight", NULL, QT_E_INPUT, "is not listed in"},
    {"copied|embed.weight", "true", QT_E_INPUT, "must be a named object"},
    {"copied|embed.weight", no_crc, QT_E_INPUT, "'crc32'"},
    {"copied|embed.weight|dtype", "\"BF16\"", QT_E_INPUT,
     "dtype is F16, but the manifest says BF16"},
    {"copied|embed.weight|shape", "[24]", QT_E_INPUT, "shape differs"},
    {"copied|absent", "{\"dtype\": \"F16\", \"shape\": [1], \"crc32\": \"00000000\"}", QT_E_INPUT,
     "not in the safetensors files"},
    {"copied|layers.0.weight.q.scale",
     "{\"dtype\": \"F16\", \"shape\": [8], \"crc32\": \"00000000\"}", QT_E_INPUT,
     "in the manifest twice"},
};

static void edit(json_t *root, const char *path, const char *text)
{
    char copy[128], *key, *bar;
    json_t *at = root, *value = text ? json_loads(text, JSON_DECODE_ANY, NULL) : NULL;
    assert_true(!text || value);
    snprintf(copy, sizeof copy, "%s", path);
    for (key = copy; (bar = strchr(key, '|')) != NULL; key = bar + 1) {
        *bar = '\0';
        at = json_is_array(at) ? json_array_get(at, (size_t)atoi(key)) : json_object_get(at, key);
        assert_non_null(at);
    }
    if (json_is_array(at))
        assert_int_equal(value ? json_array_set_new(at, (size_t)atoi(key), value)
                               : json_array_remove(at, (size_t)atoi(key)),
                         0);
    else
        assert_int_equal(value ? json_object_set_new(at, key, value) : json_object_del(at, key), 0);
}

static void test_hostile_manifests(void **state)
{
    (void)state;
    struct run r = {.dir = "hostile", .kill_after = -1};
    assert_status(fixture_write(&r), QT_OK, r.err);
    for (size_t i = 0; i < sizeof hostile / sizeof *hostile; i++) {
        struct qt_container *c;
        struct qt_err err = {0};
        json_t *m = fixture_manifest(NULL, NULL);
        edit(m, hostile[i].path, hostile[i].json);
        assert_int_equal(json_dump_file(m, "hostile/qtool.json", 0), 0);
        json_decref(m);
        int rc = qt_container_open(&c, "hostile", &err);
        if (rc != hostile[i].status || !strstr(err.reason, hostile[i].reason) || !err.file[0])
            print_error("case %zu: %s = %s gives %d '%s' '%s' '%s'\n", i, hostile[i].path,
                        hostile[i].json ? hostile[i].json : "(absent)", rc, err.file, err.tensor,
                        err.reason);
        assert_int_equal(rc, hostile[i].status);
        assert_non_null(strstr(err.reason, hostile[i].reason));
        assert_true(err.file[0]);
        /* Errors of one tensor name the tensor. */
        if (strchr(hostile[i].path, '|') && strcmp(hostile[i].path, "tensors|") != 0)
            assert_true(err.tensor[0]);
        assert_null(c);
    }
}

static void test_hostile_files(void **state)
{
    (void)state;
    static const struct {
        const char *command;
        int status;
        const char *reason;
    } cases[] = {
        {"rm files/qtool.json", QT_E_INPUT, "No such file"},
        {"rm files/qtool.json && mkdir files/qtool.json", QT_E_INPUT, "not a regular file"},
        {": > files/qtool.json", QT_E_INPUT, "the file is empty"},
        {"echo '[]' > files/qtool.json", QT_E_INPUT, "must be a JSON object"},
        {"echo '{\"format\":\"qtool\",\"format\":\"qtool\"}' > files/qtool.json", QT_E_INPUT,
         "duplicate"},
        {"printf '\\377' >> files/qtool.json", QT_E_INPUT, "line"},
        {"rm files/model.safetensors", QT_E_INPUT, ""},
        {"truncate -s -1 files/model.safetensors", QT_E_INPUT, ""},
        {"truncate -s +1 files/model.safetensors", QT_E_INPUT, ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct run r = {.dir = "files", .kill_after = -1};
        struct qt_container *c;
        struct qt_err err = {0};
        shell("rm -rf files");
        assert_status(fixture_write(&r), QT_OK, r.err);
        shell(cases[i].command);
        assert_status(qt_container_open(&c, "files", &err), cases[i].status, err);
        assert_reason(err, cases[i].reason);
        assert_null(c);
    }
}

static void test_damaged_data(void **state)
{
    (void)state;
    struct run r = {.dir = "damaged", .kill_after = -1};
    struct qt_err err = {0};
    assert_status(fixture_write(&r), QT_OK, r.err);
    /* The last byte of the file is lm_head's. */
    shell(
        "truncate -s -1 damaged/model.safetensors && printf '\\252' >> damaged/model.safetensors");
    struct qt_container *c = open_good("damaged");
    for (size_t i = 0; i < TENSORS; i++) {
        bool hit = strcmp(qt_ckpt_tensor(qt_container_ckpt(c), i)->name, "lm_head") == 0;
        assert_int_equal(qt_container_check_crc(c, i, &err), hit ? QT_E_INPUT : QT_OK);
    }
    assert_reason(err, "the file is damaged");
    assert_string_equal(err.tensor, "lm_head");
    qt_container_close(c);
}

static void test_open_without_memory(void **state)
{
    (void)state;
    struct run r = {.dir = "memory", .shard_bytes = MANY_SHARDS, .kill_after = -1};
    assert_status(fixture_write(&r), QT_OK, r.err);
    for (long n = 0;; n++) {
        struct qt_container *c;
        struct qt_err err = {0};
        qt_mem_fail_after(n);
        int rc = qt_container_open(&c, "memory", &err);
        qt_mem_fail_after(-1);
        qt_container_close(c);
        if (rc == QT_OK)
            break;
        assert_status(rc, QT_E_RESOURCE, err);
        assert_null(c);
        assert_true(n < 100000);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),          cmocka_unit_test(test_probe),
        cmocka_unit_test(test_no_tensors),          cmocka_unit_test(test_hostile_manifests),
        cmocka_unit_test(test_hostile_files),       cmocka_unit_test(test_damaged_data),
        cmocka_unit_test(test_open_without_memory),
    };
    return cmocka_run_group_tests(tests, fixture_setup, fixture_teardown);
}
