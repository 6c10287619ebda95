/*
 * Memory and checked sizes. All allocation in qtool goes through these, so that tests can make the
 * nth one fail (qt_mem_fail_after).
 */
#ifndef QT_BASE_MEM_H
#define QT_BASE_MEM_H

#include "base/status.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* True when the result does not fit; *out is then untouched. */
static inline bool qt_mul_overflow(size_t *out, size_t a, size_t b)
{
    return __builtin_mul_overflow(a, b, out);
}
static inline bool qt_add_overflow(size_t *out, size_t a, size_t b)
{
    return __builtin_add_overflow(a, b, out);
}

static inline size_t qt_ceil_div(size_t a, size_t b)
{
    return a / b + (a % b != 0);
}
static inline size_t qt_round_up(size_t a, size_t b)
{
    return qt_ceil_div(a, b) * b;
}
static inline size_t qt_min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}
static inline size_t qt_max_size(size_t a, size_t b)
{
    return a > b ? a : b;
}

/*
 * *out = zeroed array of n elements of `size` bytes, 64-byte aligned (a cache line, the widest
 * vector). n = 0 gives a valid pointer. On failure *out = NULL, QT_E_RESOURCE.
 */
int qt_array_new(void *out, size_t n, size_t size, struct qt_err *err);

/* Grows *array (owned, from this function or NULL) to hold at least `need` elements of `size`
 * bytes, doubling *capacity. The contents are kept; the new part is not initialised. */
int qt_array_grow(void *array, size_t *capacity, size_t need, size_t size, struct qt_err *err);

/* Copies of strings; freed with qt_free. */
int qt_string_copy(char **out, const char *s, struct qt_err *err);
int qt_string_format(char **out, struct qt_err *err, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

void qt_free(void *p);

/* Allocators with libc's signatures for libraries that take them (Jansson, PCRE2). */
void *qt_malloc(size_t size);
void *qt_realloc_unaligned(void *p, size_t size);
/* And with zlib's. */
void *qt_zlib_alloc(void *ctx, unsigned n, unsigned size);
void qt_zlib_free(void *ctx, void *p);

/* Tests: let `n` more allocations succeed, then fail all. Negative: never fail (the default). */
void qt_mem_fail_after(long n);

#endif
