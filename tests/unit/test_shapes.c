/*
 * Sizes of extreme shapes, for every scheme of the table: a size that overflows is refused and
 * never wraps. The products are checked in 128 bits.
 */
#include "formats/formats_internal.h"
#include "pack/pack.h"
#include "tests/unit/fixture.h"

static const size_t sides[] = {
    1,
    15,
    4097,
    ((size_t)1 << 20) + 1,
    (size_t)1 << 31,
    ((size_t)1 << 32) - 1,
    ((size_t)1 << 32) + 64,
    (size_t)1 << 40,
    ((size_t)1 << 58) + 1,
    (size_t)1 << 62,
    ((size_t)1 << 63) - 1,
    (size_t)1 << 63,
    SIZE_MAX - 63,
    SIZE_MAX,
};
enum { SIDES = sizeof sides / sizeof *sides };

typedef unsigned __int128 wide;

static wide section_bytes(const struct qt_section *s)
{
    wide bytes = qt_dtype_bits(s->dtype) / 8;
    for (int d = 0; d < s->ndim; d++) {
        assert_true(bytes == 0 || s->shape[d] <= SIZE_MAX / bytes); /* else 128 bits overflow */
        bytes *= s->shape[d];
    }
    return bytes;
}

static void check_shape(const char *name, size_t n, size_t k)
{
    struct qt_err err = {0};
    struct qt_spec spec;
    struct qt_packed p;
    wide sum = 0;
    expect_ok(name, qt_spec_parse(&spec, name, &err), &err);
    int rc = qt_packed_describe(&p, &spec, n, k, &err);
    if (rc < 0) {
        if (rc != QT_E_UNSUPPORTED || !err.reason[0])
            fail_msg("%s, %zu x %zu: status %d '%s'", name, n, k, rc, err.reason);
        return;
    }
    for (size_t i = 0; i < p.nsections; i++) {
        wide bytes = section_bytes(&p.section[i]);
        if (bytes != p.section[i].bytes)
            fail_msg("%s, %zu x %zu: section %s has %zu bytes", name, n, k, p.section[i].name,
                     p.section[i].bytes);
        sum += bytes;
    }
    if (sum > SIZE_MAX || sum != qt_packed_bytes(&p))
        fail_msg("%s, %zu x %zu: accepted, but all sections do not fit", name, n, k);
    /* Codes alone need more than one bit per weight in every scheme. */
    if (sum < (wide)n * k / 8)
        fail_msg("%s, %zu x %zu: %zu bytes are too few", name, n, k, qt_packed_bytes(&p));
}

static void every_scheme(void **state)
{
    const struct qt_preset *preset;
    const struct qt_scheme *s;
    size_t schemes = 0;
    (void)state;
    for (size_t i = 0; (s = qt_scheme_at(i)) != NULL; i++)
        for (size_t p = 0; (preset = qt_scheme_preset(s, p)) != NULL; p++, schemes++)
            for (size_t a = 0; a < SIDES; a++)
                for (size_t b = 0; b < SIDES; b++)
                    check_shape(preset->name, sides[a], sides[b]);
    assert_true(schemes > 0);
}

/* Tensors of files: dimensions of all sizes and counts. */
static void tensors(void **state)
{
    (void)state;
    for (size_t seed = 0; seed < 20000; seed++) {
        struct qt_tensor t = {.name = "t", .file = "f", .dtype = seed % QT_DTYPE_COUNT};
        struct qt_err err = {0};
        wide bits = qt_dtype_bits(t.dtype), span = bits;
        bool fits = true, empty = false;
        t.ndim = (int)(seed / 7 % (QT_MAX_DIMS + 1));
        for (int d = 0; d < t.ndim; d++) {
            size_t side = sides[(seed * 31 + (size_t)d * (seed / 5 + 3)) % SIDES];
            t.shape[d] = (seed + (size_t)d) % 11 == 0 ? 0 : side;
            empty = empty || t.shape[d] == 0;
            size_t factor = t.shape[d] ? t.shape[d] : 1;
            fits = fits && span <= SIZE_MAX / factor;
            span = fits ? span * factor : span;
        }
        int rc = qt_tensor_measure(&t, &err);
        if (!fits || (!empty && span % 8 != 0)) {
            assert_int_equal(rc, QT_E_INPUT);
            continue;
        }
        assert_int_equal(rc, QT_OK);
        assert_true(empty ? t.count == 0 && t.nbytes == 0
                          : t.count == span / bits && t.nbytes == span / 8);
    }
}

/* Arrays that are too large for any memory. */
static void arrays(void **state)
{
    (void)state;
    for (size_t a = 6; a < SIDES; a++)
        for (size_t b = 6; b < SIDES; b++) {
            struct qt_err err = {0};
            void *p = &err;
            assert_int_equal(qt_array_new(&p, sides[a], sides[b], &err), QT_E_RESOURCE);
            assert_null(p);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_scheme),
        cmocka_unit_test(tensors),
        cmocka_unit_test(arrays),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
