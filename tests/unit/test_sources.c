/*
 * Quantized and stacked checkpoints: tests/golden/sources has checkpoints and what they stand for
 * (tests/oracle/make_source_golden.py). All bits are compared.
 */
#include "ckpt_fixture.h"
#include "pack/pack.h"

#include <dirent.h>

#define GOLDEN "tests/golden/sources"

static struct qt_ckpt *open_case(const char *name)
{
    struct qt_err err = {0};
    struct qt_ckpt *ckpt;
    char path[512];
    snprintf(path, sizeof path, GOLDEN "/%s/model.gguf", name);
    if (!qt_path_exists(path))
        snprintf(path, sizeof path, GOLDEN "/%s", name);
    expect_ok(name, qt_ckpt_open(&ckpt, path, &err), &err);
    return ckpt;
}

static struct qt_ckpt *open_expected(const char *name)
{
    struct qt_err err = {0};
    struct qt_ckpt *ckpt;
    char path[512];
    snprintf(path, sizeof path, GOLDEN "/%s/expected.safetensors", name);
    expect_ok(name, qt_ckpt_open_stored(&ckpt, path, &err), &err);
    return ckpt;
}

static void compare(const char *name, const struct qt_ckpt *ckpt, const struct qt_tensor *t,
                    const struct qt_ckpt *expected, const struct qt_tensor *e)
{
    struct qt_err err = {0};
    struct qt_blob a, b;
    if (t->dtype != e->dtype || t->ndim != e->ndim ||
        memcmp(t->shape, e->shape, (size_t)t->ndim * sizeof *t->shape) != 0)
        fail_msg("%s: %s is %s [%zu, %zu], expected %s [%zu, %zu]", name, t->name,
                 qt_dtype_name(t->dtype), t->shape[0], t->shape[1], qt_dtype_name(e->dtype),
                 e->shape[0], e->shape[1]);
    expect_ok(t->name, qt_ckpt_read(&a, ckpt, t, &err), &err);
    expect_ok(e->name, qt_ckpt_read(&b, expected, e, &err), &err);
    assert_int_equal(a.size, b.size);
    const size_t size = qt_dtype_bits(t->dtype) / 8;
    for (size_t i = 0; i < t->count; i++)
        if (memcmp(a.data + i * size, b.data + i * size, size) != 0)
            fail_msg("%s: %s differs at element %zu", name, t->name, i);
    qt_blob_free(&a);
    qt_blob_free(&b);
}

static void check_case(const char *name)
{
    struct qt_err err = {0};
    struct qt_ckpt *ckpt = open_case(name), *expected = open_expected(name);
    expect_ok(name, qt_ckpt_check_readable(ckpt, &err), &err);
    for (size_t i = 0; i < qt_ckpt_count(expected); i++) {
        const struct qt_tensor *e = qt_ckpt_tensor(expected, i), *t = qt_ckpt_find(ckpt, e->name);
        if (!t)
            fail_msg("%s: no tensor %s", name, e->name);
        else
            compare(name, ckpt, t, expected, e);
    }
    if (qt_ckpt_count(ckpt) != qt_ckpt_count(expected))
        for (size_t i = 0; i < qt_ckpt_count(ckpt); i++)
            if (!qt_ckpt_find(expected, qt_ckpt_tensor(ckpt, i)->name))
                fail_msg("%s: unexpected tensor %s", name, qt_ckpt_tensor(ckpt, i)->name);
    qt_ckpt_close(ckpt);
    qt_ckpt_close(expected);
}

static void test_golden(void **state)
{
    (void)state;
    struct dirent *entry;
    size_t cases = 0;
    DIR *dir = opendir(GOLDEN);
    assert_non_null(dir);
    while ((entry = readdir(dir)) != NULL)
        if (entry->d_name[0] != '.') {
            check_case(entry->d_name);
            cases++;
        }
    closedir(dir);
    assert_true(cases >= 30);
}

/* ---- quantizing ----------------------------------------------------------------------------- */

/* Copies the weights of a case, `from` in its directory, to dir/model.safetensors. */
static void copy_weights(const char *dir, const char *name, const char *from)
{
    struct qt_err err = {0};
    char path[512], *data;
    size_t size;
    snprintf(path, sizeof path, GOLDEN "/%s/%s", name, from);
    expect_ok(path, qt_file_read(&data, &size, path, 1 << 20, &err), &err);
    fixture_write(dir, "model.safetensors", data, size);
    qt_free(data);
}

static struct qt_container *quantize(const char *dir, const char *checkpoint)
{
    static const struct qt_rule rule = {"q_proj.weight|experts.*weight", "int4:g=32"};
    struct qt_err err = {0};
    struct qt_quantize_report report;
    struct qt_ckpt *ckpt;
    struct qt_container *c;
    char out[512];
    snprintf(out, sizeof out, "%s/out", dir);
    const struct qt_quantize_options opt = {.plan = {.scheme = "none", .rules = &rule, .nrules = 1},
                                            .out_dir = out};
    expect_ok("open", qt_ckpt_open(&ckpt, checkpoint, &err), &err);
    expect_ok(checkpoint, qt_quantize(&report, ckpt, &opt, &err), &err);
    json_decref(report.document);
    qt_ckpt_close(ckpt);
    expect_ok("container", qt_container_open(&c, out, &err), &err);
    return c;
}

/* The container of a quantized checkpoint has the tensors of the container of the dequantized one,
 * and a config.json without the source's quantization_config. */
static void check_quantized(const char *name)
{
    struct qt_err err = {0};
    char source[512], out[512];
    char *quantized = fixture_dir(), *plain = fixture_dir();
    json_t *config;
    snprintf(source, sizeof source, GOLDEN "/%s", name);
    copy_weights(plain, name, "expected.safetensors");
    struct qt_container *a = quantize(quantized, source), *b = quantize(plain, plain);
    const struct qt_ckpt *x = qt_container_ckpt(a), *y = qt_container_ckpt(b);
    assert_true(qt_container_count(a) > 0);
    assert_int_equal(qt_ckpt_count(x), qt_ckpt_count(y));
    for (size_t i = 0; i < qt_ckpt_count(y); i++) {
        const struct qt_tensor *t = qt_ckpt_find(x, qt_ckpt_tensor(y, i)->name);
        assert_non_null(t);
        compare(name, x, t, y, qt_ckpt_tensor(y, i));
    }
    snprintf(out, sizeof out, "%s/out/config.json", quantized);
    expect_ok(out, qt_json_load(&config, out, 1 << 20, &err), &err);
    const json_t *section = json_object_get(config, QT_QUANTIZATION_KEY);
    assert_string_equal(json_string_value(json_object_get(section, "quant_method")), "qtool");
    assert_non_null(json_object_get(config, "model_type"));
    assert_null(json_object_get(json_object_get(config, "text_config"), QT_QUANTIZATION_KEY));
    json_decref(config);
    const json_t *manifest = qt_container_manifest(a);
    assert_non_null(
        json_object_get(json_object_get(manifest, "source_quantization"), "quant_method"));
    assert_null(json_object_get(qt_container_manifest(b), "source_quantization"));
    json_t *entry;
    expect_ok("entry", qt_entry_json(&entry, qt_container_entry(a, 0), &err), &err);
    assert_non_null(json_object_get(entry, "source_encoding"));
    json_decref(entry);
    expect_ok("entry", qt_entry_json(&entry, qt_container_entry(b, 0), &err), &err);
    assert_null(json_object_get(entry, "source_encoding"));
    json_decref(entry);
    qt_container_close(a);
    qt_container_close(b);
    for (size_t i = 0; i < 2; i++) {
        char *dir = i ? plain : quantized;
        snprintf(out, sizeof out, "%s/out", dir);
        assert_int_equal(qt_dir_remove(out, NULL), QT_OK);
        fixture_remove(dir);
    }
}

static void test_quantize(void **state)
{
    (void)state;
    check_quantized("fp8_block");
    check_quantized("mxfp4");
    check_quantized("ct_nvfp4"); /* its section is in text_config */
    check_quantized("gptq");
    check_quantized("bnb_nf4");
}

/* ---- hostile files -------------------------------------------------------------------------- */

/* Another dtype of elements of the same size. */
static const char *other_dtype(const char *name, uint64_t *seed)
{
    enum { SIZES = 4, CHOICES = 5 };
    static const char *const same[SIZES][CHOICES] = {{"U8", "I8", "F8_E4M3", "F8_E8M0", "BOOL"},
                                                     {"F16", "BF16", "I16", "U16", "F16"},
                                                     {"F32", "I32", "U32", "I32", "F32"},
                                                     {"I64", "F64", "U64", "C64", "F64"}};
    for (size_t i = 0; i < SIZES; i++)
        for (size_t j = 0; j < CHOICES; j++)
            if (strcmp(same[i][j], name) == 0)
                return same[i][qt_splitmix64(seed) % CHOICES];
    return name;
}

/* Another shape of as many elements. */
static json_t *other_shape(const json_t *shape, uint64_t *seed)
{
    const json_int_t first = json_integer_value(json_array_get(shape, 0));
    const size_t n = json_array_size(shape);
    json_int_t count = 1;
    json_t *reversed = json_array();
    for (size_t i = 0; i < n; i++) {
        count *= json_integer_value(json_array_get(shape, i));
        json_array_append(reversed, json_array_get(shape, n - 1 - i));
    }
    const uint64_t choice = qt_splitmix64(seed) % 5;
    if (choice == 0)
        return reversed;
    json_decref(reversed);
    return choice == 1                   ? json_pack("[I]", count)
           : choice == 2                 ? json_pack("[I, i]", count, 1)
           : choice == 3                 ? json_pack("[i, i, I]", 1, 1, count)
           : first > 1 && first % 2 == 0 ? json_pack("[I, I]", first / 2, 2 * count / first)
                                         : json_pack("[i, I]", 1, count);
}

/* Changes dtype, shape or name of a tensor of the header. */
static void mutate_header(json_t *header, uint64_t *seed)
{
    void *member = json_object_iter(header);
    for (size_t at = qt_splitmix64(seed) % json_object_size(header); at > 0; at--)
        member = json_object_iter_next(header, member);
    json_t *tensor = json_object_iter_value(member);
    const json_t *shape = json_object_get(tensor, "shape");
    const char *dtype = json_string_value(json_object_get(tensor, "dtype"));
    const uint64_t what = qt_splitmix64(seed) % 3;
    if (what == 0 && dtype) {
        json_object_set_new(tensor, "dtype", json_string(other_dtype(dtype, seed)));
    } else if (what == 1 && shape) {
        json_object_set_new(tensor, "shape", other_shape(shape, seed));
    } else {
        json_object_set(header, "renamed", tensor);
        json_object_del(header, json_object_iter_key(member));
    }
}

/* Writes the safetensors file text[size] to dir with a changed header or changed data. */
static void write_mutant(const char *dir, char *text, size_t size, uint64_t *seed)
{
    struct qt_err err = {0};
    uint64_t length;
    json_t *header;
    memcpy(&length, text, sizeof length);
    char *data = text + sizeof length + length, *dump;
    const size_t bytes = size - sizeof length - length;
    expect_ok("header", qt_json_parse(&header, text + sizeof length, length, "header", &err), &err);
    if (qt_splitmix64(seed) % 3 == 0)
        for (int i = 0; i < 8; i++)
            data[qt_splitmix64(seed) % bytes] = (char)qt_splitmix64(seed);
    else
        mutate_header(header, seed);
    dump = json_dumps(header, JSON_COMPACT);
    length = strlen(dump);
    char *file = malloc(sizeof length + length + bytes);
    memcpy(file, &length, sizeof length);
    memcpy(file + sizeof length, dump, length);
    memcpy(file + sizeof length + length, data, bytes);
    fixture_write(dir, "model.safetensors", file, sizeof length + length + bytes);
    free(file);
    qt_free(dump);
    json_decref(header);
}

static void check_mutants(const char *name, uint64_t seed, size_t *refused)
{
    enum { TIMES = 40, LIMIT = 1 << 20 };
    char path[512], *text;
    size_t size;
    struct qt_err err = {0};
    char *dir = fixture_dir();
    snprintf(path, sizeof path, GOLDEN "/%s/config.json", name);
    expect_ok(path, qt_file_read(&text, &size, path, LIMIT, &err), &err);
    fixture_write(dir, "config.json", text, size);
    qt_free(text);
    for (int i = 0; i < TIMES; i++) {
        const uint64_t now = seed;
        snprintf(path, sizeof path, GOLDEN "/%s/model.safetensors", name);
        expect_ok(path, qt_file_read(&text, &size, path, LIMIT, &err), &err);
        write_mutant(dir, text, size, &seed);
        qt_free(text);
        err = (struct qt_err){0};
        const int rc = ckpt_read_all(dir, &err);
        if (rc < 0 && ((rc != QT_E_INPUT && rc != QT_E_UNSUPPORTED) || !*err.reason || !*err.file))
            fail_msg("%s, seed %llu: status %d: %s: %s", name, (unsigned long long)now, rc,
                     err.file, err.reason);
        *refused += rc < 0;
    }
    fixture_remove(dir);
}

static void test_mutants(void **state)
{
    (void)state;
    struct dirent *entry;
    const char *given = getenv("QT_SEED");
    const uint64_t seed = given ? strtoull(given, NULL, 10) : 1;
    size_t refused = 0;
    DIR *dir = opendir(GOLDEN);
    assert_non_null(dir);
    while ((entry = readdir(dir)) != NULL)
        if (entry->d_name[0] != '.' && strncmp(entry->d_name, "gguf", 4) != 0) /* test_gguf.c */
            check_mutants(entry->d_name, seed, &refused);
    closedir(dir);
    assert_true(refused > 100);
}

static void test_out_of_memory(void **state)
{
    (void)state;
    static const char *const names[] = {"fp8_block", "bnb_nf4_nested", "ct_int4_zero",
                                        "stacked_gpt_oss"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[512];
        int rc = QT_E_RESOURCE;
        long n = 0;
        snprintf(path, sizeof path, GOLDEN "/%s", names[i]);
        for (; rc != QT_OK; n++) {
            struct qt_err err = {0};
            qt_mem_fail_after(n);
            rc = ckpt_read_all(path, &err);
            qt_mem_fail_after(-1);
            if (rc != QT_OK)
                expect_error(names[i], rc, QT_E_RESOURCE, "out of memory", &err);
        }
        assert_true(n > 20);
    }
}

#define GPTQ "'m.scales': ['F16', [1, 8]], 'm.qzeros': ['I32', [1, 1]]"
static const struct {
    const char *name, *text, *fragment;
} unreadable[] = {
    {"group out of range", "{'m.qweight': ['I32', [2, 8]], 'm.g_idx': ['I32', [16]], " GPTQ "}",
     "m.g_idx: channel 0 has group -1, but there are 1 groups"},
    {"groups of another size", "{'m.qweight': ['I32', [2, 8]], 'm.g_idx': ['I32', [8]], " GPTQ "}",
     "m.g_idx has dtype I32 and shape [8], which does not fit the codes"},
    {"3 bits",
     "{'m.qweight': ['I32', [3, 32]], 'm.scales': ['F16', [1, 32]], "
     "'m.qzeros': ['I32', [1, 3]]}",
     "m.qweight: cannot be dequantized: m.qzeros has dtype I32"},
    {"no zeros", "{'m.qweight': ['I32', [2, 8]], 'm.scales': ['F16', [1, 8]]}",
     "there is no qzeros beside it"},
    {"fp8 grid", "{'m.weight': ['F8_E4M3', [48, 48]], 'm.weight_scale_inv': ['F32', [5, 1]]}",
     "m.weight_scale_inv has dtype F32 and shape [5, 1], which does not fit"},
    {"fp8 scale dtype", "{'m.weight': ['F8_E4M3', [8, 8]], 'm.weight_scale': ['I32', [1]]}",
     "m.weight_scale has dtype I32"},
    {"fp8 without scales", "{'m.weight': ['F8_E5M2', [8, 8]]}",
     "m.weight: cannot be dequantized: there is no weight_scale_inv beside it"},
    {"nvfp4 without the scale of the tensor",
     "{'m.weight_packed': ['U8', [2, 16]], 'm.weight_scale': ['F8_E4M3', [2, 2]]}",
     "there is no weight_global_scale beside it"},
    {"mxfp4 groups", "{'m.weight_packed': ['U8', [2, 24]], 'm.weight_scale': ['U8', [2, 2]]}",
     "does not fit groups of 32 weights"},
    {"blocks", "{'m_blocks': ['U8', [2, 4, 3, 8]], 'm_scales': ['U8', [2, 4, 3]]}",
     "it has dtype U8 and shape [2, 4, 3, 8], which does not fit groups of 32"},
    {"negative shape",
     "{'m.weight_packed': ['I32', [2, 4]], 'm.weight_scale': ['F16', [2, 1]], "
     "'m.weight_shape': ['I64', [2]]}",
     "weight_shape is invalid"},
    {"quant_state",
     "{'m.weight': ['U8', [32, 1]], 'm.weight.quant_state.bitsandbytes__nf4': ['U8', [40]]}",
     "its quant_state is invalid"},
    {"SCB", "{'m.weight': ['I8', [4, 4]], 'm.SCB': ['F32', [3]]}",
     "m.SCB has dtype F32 and shape [3], which does not fit the rows"},
    {"both forms",
     "{'a.mlp.experts.up_proj': ['F16', [1, 2, 4]], 'a.mlp.experts.down_proj': ['F16', [1, 4, 2]], "
     "'a.mlp.experts.0.up_proj.weight': ['F16', [2, 4]]}",
     "is stored both by itself and as a part of a stack"},
};

/* Writes model.safetensors with the tensors of `list`, {name: [dtype, shape]}. All bytes are
 * 0xff. */
static void write_ones(const char *dir, json_t *list)
{
    enum { MOST = 8 };
    struct qt_tensor tensors[MOST];
    uint64_t offsets[MOST + 1];
    struct qt_err err = {0};
    const char *key;
    char *header;
    json_t *value;
    size_t n = 0, size;
    json_object_foreach (list, key, value) {
        struct qt_tensor *t = &tensors[n++];
        const json_t *shape = json_array_get(value, 1);
        *t = (struct qt_tensor){.name = key, .ndim = (int)json_array_size(shape), .count = 1};
        assert_true(qt_dtype_parse(&t->dtype, json_string_value(json_array_get(value, 0))));
        for (int d = 0; d < t->ndim; d++) {
            t->shape[d] = (size_t)json_integer_value(json_array_get(shape, (size_t)d));
            t->count *= t->shape[d];
        }
        t->nbytes = t->count * qt_dtype_bits(t->dtype) / 8;
    }
    expect_ok("header", qt_safetensors_header(&header, &size, offsets, tensors, n, NULL, &err),
              &err);
    char *file = malloc(offsets[n]);
    memset(file, 0xff, offsets[n]);
    memcpy(file, header, size);
    fixture_write(dir, "model.safetensors", file, offsets[n]);
    free(file);
    qt_free(header);
}

static void test_unreadable(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof unreadable / sizeof *unreadable; i++) {
        char *dir = fixture_dir(), text[512];
        struct qt_err err = {0};
        json_t *list;
        snprintf(text, sizeof text, "%s", unreadable[i].text);
        for (char *c = text; *c; c++)
            *c = *c == '\'' ? '"' : *c;
        expect_ok("parse", qt_json_parse(&list, text, strlen(text), "f", &err), &err);
        write_ones(dir, list);
        expect_error(unreadable[i].name, ckpt_read_all(dir, &err), QT_E_INPUT,
                     unreadable[i].fragment, &err);
        json_decref(list);
        fixture_remove(dir);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden), cmocka_unit_test(test_quantize),
        cmocka_unit_test(test_mutants), cmocka_unit_test(test_out_of_memory),
        cmocka_unit_test(test_unreadable)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
