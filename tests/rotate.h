/* The rotation of w4ax channel blocks as docs/schemes.md defines it, written for tests. */
#ifndef QT_TESTS_ROTATE_H
#define QT_TESTS_ROTATE_H

#include <math.h>
#include <stddef.h>

enum { ROTATE_BLOCK = 128 };

/* Size of the piece of channel block [first, first + n) that has channel `at`; *start: its first
 * channel. */
static inline size_t rotate_piece(size_t *start, size_t first, size_t n, size_t at)
{
    size_t size = ROTATE_BLOCK;
    *start = first;
    for (;; *start += size) {
        while (size > first + n - *start)
            size /= 2;
        if (at < *start + size)
            return size;
    }
}

/* Rotates x[k] with the documented order of operations. */
static inline void rotate_reference(float *x, size_t k)
{
    size_t start, size;
    for (size_t at = 0; at < k; at = start + size) {
        const size_t first = at / ROTATE_BLOCK * ROTATE_BLOCK;
        const size_t n = k - first < ROTATE_BLOCK ? k - first : ROTATE_BLOCK;
        size = rotate_piece(&start, first, n, at);
        for (size_t d = size / 2; d; d /= 2)
            for (size_t i = 0; i < size; i++)
                if (!(i & d)) {
                    const float a = x[start + i], b = x[start + i + d];
                    x[start + i] = a + b;
                    x[start + i + d] = a - b;
                }
        for (size_t i = 0; i < size; i++)
            x[start + i] *= (float)(1 / sqrt((double)size));
    }
}

/* Entry of the rotation matrix of k channels. */
static inline double rotate_entry(size_t k, size_t i, size_t j)
{
    const size_t first = i / ROTATE_BLOCK * ROTATE_BLOCK;
    const size_t n = k - first < ROTATE_BLOCK ? k - first : ROTATE_BLOCK;
    size_t start, size;
    if (j / ROTATE_BLOCK != i / ROTATE_BLOCK)
        return 0;
    size = rotate_piece(&start, first, n, i);
    if (j < start || j >= start + size)
        return 0;
    return (__builtin_popcountll((i - start) & (j - start)) % 2 ? -1 : 1) / sqrt((double)size);
}

#endif
