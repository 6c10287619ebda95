/*
 * Rotation of the channel blocks of w4ax inputs: online, by block, as the Hadamard matrices of
 * QuaRot (arXiv 2404.00456).
 *
 * A channel block is divided into pieces whose sizes are powers of two, in descending order: 120
 * channels are 64 + 32 + 16 + 8. A piece x[s] is multiplied by the orthonormal Hadamard matrix
 *
 *     H[i][j] = (-1)^(number of bits set in i & j) / sqrt(s)
 *
 * as butterflies (a, b) -> (a + b, a - b) over the distances s/2, s/4, ..., 1, and one product with
 * 1 / sqrt(s). H is symmetric and its own inverse. The activation quantizers of kernels/cuda/w4ax
 * perform the same operations in the same order, bit for bit.
 */
#include "pack/schemes/scheme.h"

#include <math.h>
#include <string.h>

/* Size of the piece that starts at channel `at` of k. */
static size_t piece_size(size_t k, size_t at)
{
    const size_t left = qt_min_size(k - at, QT_ACT_BLOCK - at % QT_ACT_BLOCK);
    size_t size = QT_ACT_BLOCK;
    while (size > left)
        size /= 2;
    return size;
}

/* 1 / sqrt(size), rounded to FP32. */
static float piece_norm(size_t size)
{
    const int log2 = ilogb((double)size);
    return ldexpf(log2 % 2 ? 0x1.6a09e6p-1f : 1, -(log2 / 2));
}

static void butterfly(float *a, float *b)
{
    const float sum = *a + *b, difference = *a - *b;
    *a = sum;
    *b = difference;
}

/* Distances 4, 2 and 1 in registers. */
static void rotate_eight(float *x)
{
    float v[8];
    memcpy(v, x, sizeof v);
    for (int i = 0; i < 4; i++)
        butterfly(&v[i], &v[i + 4]);
    for (int i = 0; i < 8; i += 4) {
        butterfly(&v[i], &v[i + 2]);
        butterfly(&v[i + 1], &v[i + 3]);
    }
    for (int i = 0; i < 8; i += 2)
        butterfly(&v[i], &v[i + 1]);
    memcpy(x, v, sizeof v);
}

void qt_rotate(float *x, size_t k)
{
    for (size_t at = 0, size; at < k; at += size, x += size) {
        size = piece_size(k, at);
        const size_t last = size >= 8 ? 4 : 0; /* distances up to here: rotate_eight */
        for (size_t d = size / 2; d > last; d /= 2)
            for (size_t i = 0; i < size; i += 2 * d)
                for (size_t j = i; j < i + d; j++) {
                    const float a = x[j], b = x[j + d];
                    x[j] = a + b;
                    x[j + d] = a - b;
                }
        for (size_t i = 0; last && i < size; i += 8)
            rotate_eight(x + i);
        const float norm = piece_norm(size);
        for (size_t i = 0; i < size; i++)
            x[i] *= norm;
    }
}
