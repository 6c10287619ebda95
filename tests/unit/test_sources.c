/*
 * Quantized and stacked checkpoints: tests/golden/sources has checkpoints and what they stand for
 * (tests/oracle/make_source_golden.py). All bits are compared.
 */
#include "formats/formats.h"
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

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_golden)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
