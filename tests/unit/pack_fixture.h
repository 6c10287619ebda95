/* Helpers shared by the tests of schemes. */
#ifndef QT_TESTS_PACK_FIXTURE_H
#define QT_TESTS_PACK_FIXTURE_H

#include "pack/pack.h"
#include "random.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static inline struct qt_spec spec_of(const char *text)
{
    struct qt_spec spec;
    struct qt_err err = {0};
    if (qt_spec_parse(&spec, text, &err) < 0)
        fail_msg("%s: %s", text, err.reason);
    return spec;
}

static inline struct qt_matrix matrix_of(const float *w, size_t n, size_t k)
{
    return (struct qt_matrix){w, QT_F32, n, k, "file", "tensor"};
}

#endif
