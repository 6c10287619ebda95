/*
 * Quantized activations of w4ax linears: what the quantizers of the CPU (pack/activations/act.c)
 * and of GPUs (kernels/) compute.
 */
#ifndef QT_BASE_ACT_H
#define QT_BASE_ACT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { QT_ACT_BLOCK = 128 }; /* channels that share a scale and a precision */

/* Scales of a token's channel blocks: one per block; an integer multiple of one scale per token; or
 * one scale per token. */
enum qt_act_scales { QT_ACT_SCALES_BLOCK, QT_ACT_SCALES_INT, QT_ACT_SCALES_ROW };

/*
 * How a linear input is quantized during inference. Packed channel p is source channel order[p],
 * multiplied by factor[p], a power of two. A channel block is QT_ACT_BLOCK packed channels (the
 * last one may be shorter) with bits[b] = 4 or 8. If `rotate`, each channel block is multiplied by
 * a Hadamard matrix (activations/rotate.c). Let a be the absmax of the token's channel block and t
 * the absmax of the token. All arithmetic is FP32. The codes are
 *
 *     q = clamp(round(x * (1 / s)), -7, 7)          4 bits
 *     q = clamp(round(x * (1 / s)), -127, 127)      8 bits
 *
 * where the exact product is rounded to the nearest integer, ties to even. The scale s is
 *
 *     QT_ACT_SCALES_BLOCK   s = a * (clip / 7)      4 bits
 *                           s = a * (1 / 127)       8 bits
 *
 *     QT_ACT_SCALES_INT     s = f * u,  u = t * (1 / 127)
 *                           f = clamp(round(a * clip / (7 * u)), 1, 18)   4 bits: f * q fits 8 bits
 *                           f = 1                                         8 bits
 *
 *     QT_ACT_SCALES_ROW     s = t * (1 / 127)       all channel blocks have 8 bits
 *
 * If s < 2^-120, all q are 0.
 */
struct qt_act {
    size_t k;
    uint32_t *order; /* [k] */
    float *factor;   /* [k] */
    uint8_t *bits;   /* [ceil(k / QT_ACT_BLOCK)] */
    float clip;
    enum qt_act_scales scales;
    bool rotate;
};

/* A precision of channel blocks; clip: of those with 4 bits. */
struct qt_act_rounding {
    unsigned bits;
    float clip;
};
enum { QT_ACT_ROUNDINGS = 8 }; /* at most so many are compared at a time */

#endif
