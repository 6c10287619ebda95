/*
 * Allocation and checked size arithmetic. All allocations of qtool go through these functions, so
 * that tests can make the nth allocation fail (qt_mem_fail_after).
 */
#ifndef QT_BASE_MEM_H
#define QT_BASE_MEM_H

#include "base/status.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* True if the result overflows; *out then does not change. */
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
 * Allocates a zeroed array of n elements of `size` bytes, aligned to 64 bytes (a cache line, the
 * widest vector). `out` is the address of any object pointer. n = 0 gives a valid pointer. On
 * failure *out = NULL and the result is QT_E_RESOURCE. Freed with qt_free.
 */
int qt_array_new(void *out, size_t n, size_t size, struct qt_err *err);

/* Grows *array (NULL or from this function) to at least `need` elements of `size` bytes, doubling
 * *capacity. Keeps the contents; new elements are not initialized. Freed with qt_free. */
int qt_array_grow(void *array, size_t *capacity, size_t need, size_t size, struct qt_err *err);

/* New strings, freed with qt_free. */
int qt_string_copy(char **out, const char *s, struct qt_err *err);
int qt_string_format(char **out, struct qt_err *err, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Returns QT_E_RESOURCE, "out of memory", for allocations of libraries; file: in the message, or
 * NULL. */
int qt_no_memory(struct qt_err *err, const char *file);
void qt_free(void *p);

/* Allocators for libraries that take them: with libc's signatures (Jansson, PCRE2), */
void *qt_malloc(size_t size);
void *qt_realloc_unaligned(void *p, size_t size);
/* and with zlib's. */
void *qt_zlib_alloc(void *ctx, unsigned n, unsigned size);
void qt_zlib_free(void *ctx, void *p);

/* For tests: lets n more allocations succeed, then fails all. Negative: none fails (default). */
void qt_mem_fail_after(long n);

#endif
