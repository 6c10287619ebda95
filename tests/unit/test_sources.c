/*
 * Quantized and stacked checkpoints: tests/golden/sources has checkpoints and what they stand for
 * (tests/oracle/make_source_golden.py). All bits are compared.
 */
#include "formats/formats.h"
#include "pack/pack.h"
#include "tests/unit/fixture.h"

#include <dirent.h>

#define GOLDEN "tests/golden/sources"

static struct qt_ckpt *open_case(const char *name)
{
    struct qt_err err = {0};
    struct qt_ckpt *ckpt;
    char path[512];
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
    assert_non_null(json_object_get(qt_container_entry(a, 0)->json, "source_encoding"));
    assert_null(json_object_get(qt_container_entry(b, 0)->json, "source_encoding"));
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

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_golden),
                                       cmocka_unit_test(test_quantize)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
