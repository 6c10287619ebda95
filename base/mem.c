#include "base/mem.h"

#include <omp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* A test hook, off by default. Besides the request to stop (stop.c) the only mutable global of the
 * library. */
static atomic_long allocations_left = -1;

void qt_mem_fail_after(long n)
{
    atomic_store(&allocations_left, n);
}

static bool must_fail(void)
{
    long left = atomic_load(&allocations_left);
    while (left > 0 && !atomic_compare_exchange_weak(&allocations_left, &left, left - 1))
        ;
    return left == 0;
}

void *qt_malloc(size_t size)
{
    return must_fail() ? NULL : malloc(size ? size : 1);
}

void *qt_realloc_unaligned(void *p, size_t size)
{
    return must_fail() ? NULL : realloc(p, size ? size : 1);
}

void qt_free(void *p)
{
    free(p);
}

int qt_no_memory(struct qt_err *err, const char *file)
{
    return qt_fail(err, QT_E_RESOURCE, file, NULL, "out of memory");
}

static int out_of_memory(struct qt_err *err, size_t bytes)
{
    return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory (%zu bytes)", bytes);
}

/* Zeroes large arrays on all threads and asks for 2 MB pages: the kernel's page faults take most of
 * the time. */
static void zero(char *p, size_t bytes)
{
    enum { PIECE = 4 << 20, HUGE_PAGE = 2 << 20 };
    if (bytes <= 2 * PIECE) {
        memset(p, 0, bytes);
        return;
    }
#ifdef MADV_HUGEPAGE
    char *first = p + (HUGE_PAGE - (uintptr_t)p % HUGE_PAGE) % HUGE_PAGE;
    madvise(first, (size_t)(p + bytes - first) / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE);
#endif
#pragma omp parallel for if (!omp_in_parallel())
    for (size_t at = 0; at < bytes; at += PIECE)
        memset(p + at, 0, qt_min_size(PIECE, bytes - at));
}

int qt_array_new(void *out, size_t n, size_t size, struct qt_err *err)
{
    size_t bytes;
    void *p = NULL;
    memcpy(out, &p, sizeof p);
    if (qt_mul_overflow(&bytes, n ? n : 1, size) || qt_add_overflow(&bytes, bytes, 63))
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory (%zu elements of %zu bytes)",
                       n, size);
    bytes &= ~(size_t)63;
    if (bytes == 0)
        bytes = 64;
    p = must_fail() ? NULL : aligned_alloc(64, bytes);
    if (!p)
        return out_of_memory(err, bytes);
    zero(p, bytes);
    memcpy(out, &p, sizeof p);
    return QT_OK;
}

int qt_array_grow(void *array, size_t *capacity, size_t need, size_t size, struct qt_err *err)
{
    if (need <= *capacity)
        return QT_OK;
    size_t cap = *capacity ? *capacity : 16, bytes;
    while (cap < need)
        if (qt_mul_overflow(&cap, cap, 2))
            cap = need;
    if (qt_mul_overflow(&bytes, cap, size))
        return out_of_memory(err, SIZE_MAX);
    void *p;
    memcpy(&p, array, sizeof p);
    p = qt_realloc_unaligned(p, bytes);
    if (!p)
        return out_of_memory(err, bytes);
    memcpy(array, &p, sizeof p);
    *capacity = cap;
    return QT_OK;
}

int qt_string_copy(char **out, const char *s, struct qt_err *err)
{
    return qt_string_format(out, err, "%s", s);
}

int qt_string_format(char **out, struct qt_err *err, const char *fmt, ...)
{
    va_list ap;
    *out = NULL;
    va_start(ap, fmt);
    int len = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    if (len < 0)
        return qt_fail(err, QT_E_INTERNAL, NULL, NULL, "cannot format '%s'", fmt);
    char *s = qt_malloc((size_t)len + 1);
    if (!s)
        return out_of_memory(err, (size_t)len + 1);
    va_start(ap, fmt);
    vsnprintf(s, (size_t)len + 1, fmt, ap);
    va_end(ap);
    *out = s;
    return QT_OK;
}

void *qt_zlib_alloc(void *ctx, unsigned n, unsigned size)
{
    (void)ctx;
    return qt_malloc((size_t)n * size);
}

void qt_zlib_free(void *ctx, void *p)
{
    (void)ctx;
    qt_free(p);
}
