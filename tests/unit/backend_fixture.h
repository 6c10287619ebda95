/* What the tests of the CPU backend share. */
#ifndef QT_TESTS_BACKEND_FIXTURE_H
#define QT_TESTS_BACKEND_FIXTURE_H

#include "kernels/kernels.h"
#include "random.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static inline float *random_floats(size_t n, double scale)
{
    float *x;
    assert_int_equal(qt_array_new(&x, n, sizeof *x, NULL), QT_OK);
    for (size_t i = 0; i < n; i++)
        x[i] = (float)((uniform() + uniform() + uniform() - 1.5) * scale);
    return x;
}

static inline float *copy_floats(const float *x, size_t n)
{
    float *y = random_floats(n, 1);
    memcpy(y, x, n * sizeof *y);
    return y;
}

static inline struct qt_backend *open_cpu(void)
{
    struct qt_backend *be;
    assert_int_equal(qt_backend_cpu_open(&be, NULL), QT_OK);
    assert_memory_equal(be->name, "OpenBLAS ", 9);
    return be;
}

#endif
