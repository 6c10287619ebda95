/* Shared by the two quantize kernels (quantize.cu, quantize_rows.cu): arguments, norms, rounding of
 * values to codes, and the layout of codes. */
#ifndef QT_KERNELS_CUDA_W4AX_QUANTIZE_CUH
#define QT_KERNELS_CUDA_W4AX_QUANTIZE_CUH

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/include/qtool_w4ax.h"

#include <cuda_fp16.h>
#include <math.h>

/* QUANTIZE_OWN_BYTES: upper bound of the kernels' static shared memory. */
enum { COLS = QTOOL_W4AX_BLOCK_COLS, QUANTIZE_OWN_BYTES = 2048 };

struct quantize_args {
    const uint16_t *x;
    const uint16_t *weight, *bias; /* bias NULL: zeros */
    const uint32_t *perm, *blocks;
    unsigned char *codes;
    float *scale;
    int *sum;
    int m, k, blocks_n, scale_pitch, scales;
    int scales_at;             /* offset of the channel blocks' scales in shared memory */
    int clamp;                 /* 1 if a clip factor is below 1 */
    float eps, per_k;          /* epsilon of the norm; 1 / k */
    float per7, per127, clip4; /* clip4 / 7; clip8 / 127; clip4 */
    int rotate;                /* 1: channel blocks are multiplied by Hadamard matrices */
    int dependent;             /* launched before the previous kernel has ended */
};

extern __shared__ __align__(16) unsigned char quantize_smem[];

/* Widens `count` FP16 or BF16 values, two per word. */
template <bool BF16>
static __device__ __forceinline__ void to_floats(float *v, const uint32_t *words, int count)
{
#pragma unroll
    for (int i = 0; i < count / 2; i++) {
        if (BF16) {
            v[2 * i] = __uint_as_float(words[i] << 16);
            v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000);
        } else {
            float2 f = __half22float2(*(const __half2 *)&words[i]);
            v[2 * i] = f.x;
            v[2 * i + 1] = f.y;
        }
    }
}

/* ---- norms and values ----------------------------------------------------------------------- */

/* A normalized value is x * factor + shift, before the weight of the norm. */
struct row_norm {
    float factor, shift;
};

/* Returns the factor of a norm from the sum of squares of a row. */
static __device__ __forceinline__ float norm_factor(const quantize_args &a, float squares)
{
    return rsqrtf(fmaf(squares, a.per_k, a.eps));
}

/* Returns a layer norm from the mean of a row and the sum of squared differences from the mean. */
static __device__ __forceinline__ row_norm norm_from(const quantize_args &a, float mean,
                                                     float squares)
{
    const float factor = norm_factor(a, squares);
    return {factor, -mean * factor};
}

/* Norm weights of four channels, and biases of a layer norm, in their stored type. */
struct norm_words {
    uint2 weight, bias;
};

template <int NORM>
static __device__ __forceinline__ norm_words load_norm(const quantize_args &a, int channel)
{
    norm_words n = {};
    n.weight = __ldg((const uint2 *)(a.weight + channel));
    if (NORM == QTOOL_W4AX_LAYER_NORM && a.bias)
        n.bias = __ldg((const uint2 *)(a.bias + channel));
    return n;
}

/* Normalizes four values in place. RMS norm: without the factor, which goes into the scales. */
template <bool BF16, int NORM>
static __device__ __forceinline__ void normalize(float v[4], const row_norm &n,
                                                 const norm_words &words)
{
    float w[4], b[4];
    to_floats<BF16>(w, (const uint32_t *)&words.weight, 4);
    to_floats<BF16>(b, (const uint32_t *)&words.bias, 4);
#pragma unroll
    for (int j = 0; j < 4; j++)
        v[j] = NORM == QTOOL_W4AX_RMS_NORM ? v[j] * w[j]
                                           : fmaf(fmaf(v[j], n.factor, n.shift), w[j], b[j]);
}

/* Returns the first channel of a lane in a channel block. The lane has 4 channels from there, and 4
 * channels 16 further on. */
static __device__ __forceinline__ int first_channel()
{
    const int i = (int)threadIdx.x % 16;
    return i / 4 * 32 + i % 4 * 4;
}

/* ---- rotation ------------------------------------------------------------------------------- */

/* 1 / sqrt(2^log2), rounded to FP32. */
static __device__ __forceinline__ float piece_norm(int log2)
{
    return __uint_as_float((uint32_t)(127 - log2 / 2) << 23) * (log2 % 2 ? 0x1.6a09e6p-1f : 1);
}

/*
 * Rotates a channel block (qtool_w4ax.h), of which half a warp has 8 values per lane. channels: of
 * the block. FULL: 128. The piece of position p has 2^i channels, where i is the highest bit in
 * which p and `channels` differ.
 */
template <bool FULL> static __device__ __forceinline__ void rotate_block(float v[8], int channels)
{
    const int at = first_channel();
    const int piece[2] = {at ^ channels, (at + 16) ^ channels};
#pragma unroll
    for (int d = COLS / 2; d; d /= 2) {
        /* Bit of the lane, of those 16, in which the two channels of a butterfly differ. */
        const int lane = d >= 32 ? d / 8 : d == 8 || d == 4 ? d / 4 : 0;
        const float sign = at & d ? -1 : 1;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int other = d == 16 ? j ^ 4 : j ^ d;
            const bool in_piece = FULL || piece[j / 4] >= 2 * d;
            if (lane) {
                const float sum = fmaf(v[j], sign, __shfl_xor_sync(~0u, v[j], lane));
                v[j] = in_piece ? sum : v[j];
            } else if (j < other && in_piece) {
                const float a = v[j], b = v[other];
                v[j] = __fadd_rn(a, b); /* not contracted with the product of a norm */
                v[other] = __fsub_rn(a, b);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < 8; j++)
        v[j] *= piece_norm(FULL ? 7 : 31 - __clz(piece[j / 4]));
}

/* ---- codes ---------------------------------------------------------------------------------- */

/* Codes in [-limit, limit], as FP32 numbers CODE_0 + code, whose low bits are the code. One FFMA
 * multiplies exactly and rounds to the nearest integer, ties to even; conversions run at an eighth
 * of its speed. */
struct rounded_codes {
    float v[8];
};
static constexpr float CODE_0 = 12582912; /* 1.5 * 2^23 */

/* Rounds x * inverse. inverse: 0 for a channel block of zeros. clamp: codes may exceed the
 * limit. */
static __device__ __forceinline__ rounded_codes round_codes(const float x[8], float inverse,
                                                            float limit, bool clamp)
{
    rounded_codes r;
#pragma unroll
    for (int j = 0; j < 8; j++)
        r.v[j] = fmaf(x[j], inverse, CODE_0);
    if (clamp)
#pragma unroll
        for (int j = 0; j < 8; j++)
            r.v[j] = fminf(fmaxf(r.v[j], CODE_0 - limit), CODE_0 + limit);
    return r;
}

/* Returns the codes as signed bytes. */
static __device__ __forceinline__ uint2 code_bytes(const rounded_codes &r)
{
    uint32_t word[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t c[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            c[j] = __float_as_uint(r.v[4 * h + j]);
        word[h] =
            __byte_perm(__byte_perm(c[0], c[1], 0x0040), __byte_perm(c[2], c[3], 0x0040), 0x5410);
    }
    return make_uint2(word[0], word[1]);
}

/* Returns code * factor as signed bytes; factor is an integer. Codes are below 32000 in magnitude
 * and are clamped to +-7 (narrow) or +-127: pairs of 16 bits clamp code + limit to 0..2 limit. One
 * 32-bit multiplication then scales the four bytes of a word, with 128 added so that none is
 * negative. */
static __device__ __forceinline__ uint2 scaled_code_bytes(const rounded_codes &r, bool narrow,
                                                          float factor)
{
    const uint32_t limits = narrow ? 0x00070007 : 0x007f007f, f = (uint32_t)factor;
    const uint32_t add = 0x80808080 - (narrow ? 0x07070707 : 0x7f7f7f7f) * f;
    uint32_t pair[4], word[2];
#pragma unroll
    for (int j = 0; j < 4; j++)
        pair[j] = __viaddmin_s16x2_relu(
            __byte_perm(__float_as_uint(r.v[2 * j]), __float_as_uint(r.v[2 * j + 1]), 0x5410),
            limits, 2 * limits);
#pragma unroll
    for (int h = 0; h < 2; h++)
        word[h] = (__byte_perm(pair[2 * h], pair[2 * h + 1], 0x6420) * f + add) ^ 0x80808080;
    return make_uint2(word[0], word[1]);
}

/* Returns the first row of codes of a channel block; word: its block word (qtool_w4ax_blocks). */
static __device__ __forceinline__ unsigned char *codes_of(const quantize_args &a, uint32_t word)
{
    return a.codes + (size_t)((word & ~QTOOL_W4AX_NARROW_VALUES) >> 1) * 64 * (size_t)a.m;
}

static __device__ __forceinline__ int row_bytes(uint32_t word)
{
    return word & QTOOL_W4AX_WIDE_ROWS ? 128 : 64;
}

/* Packs eight 4-bit codes into a word. */
static __device__ __forceinline__ uint32_t pack_nibbles(uint2 code)
{
    return (code.x & 0x0f0f0f0f) | (code.y & 0x0f0f0f0f) << 4;
}

/* True if a channel block has 4-bit codes. */
static __device__ __forceinline__ bool is_narrow(uint32_t word)
{
    return !(word & QTOOL_W4AX_WIDE_ROWS) || (word & QTOOL_W4AX_NARROW_VALUES);
}

/* Returns 1 / s, rounded as by __frcp_rn, or 0 for s < 2^-120 (codes are then 0). s is below 2^126,
 * so one Newton step without the handling of extreme values is enough. */
static __device__ __forceinline__ float inverse_of(float s)
{
    const float r = ptx_reciprocal(s);
    return s >= 0x1p-120f ? fmaf(r, -fmaf(s, r, -1), r) : 0;
}

/* Returns the scale to store for a token: 1 for a token of zeros, whose norm factor is infinite
 * without an epsilon. */
static __device__ __forceinline__ float token_scale(float scale, float factor)
{
    return scale == 0 ? 1 : scale * factor;
}

/* INT scales: returns the integer factor of a channel block with 4-bit codes, from its largest
 * magnitude and the scale of the token. The quotient is rounded as by __fdiv_rn. */
static __device__ __forceinline__ float int_factor(const quantize_args &a, float absmax,
                                                   float scale)
{
    const float up = scale < 1 ? 0x1p64f : 1, by = __fmul_rn(7, scale) * up;
    const float size = __fmul_rn(absmax, a.clip4) * up, inverse = inverse_of(by);
    float factor = size * inverse;
#pragma unroll
    for (int i = 0; i < 2; i++)
        factor = fmaf(inverse, fmaf(-by, factor, size), factor);
    return fminf(fmaxf(rintf(factor), 1), 18);
}

/* Fills in what does not depend on x and a norm. QTOOL_UNSUPPORTED: an argument is invalid. */
int qt_w4ax_quantize_args(quantize_args *out, const struct qtool_w4ax_acts *acts,
                          const struct qtool_w4ax_input *in, size_t m);
/* Launches the kernel of quantize_rows.cu and sets *status. Returns false if that kernel does not
 * support the shape. cc: compute capability of the machine code, for dependent launches. */
bool qt_w4ax_quantize_rows(int *status, const quantize_args *a, int norm, bool bf16, int cc,
                           void *stream);
/* Launches a quantize kernel with `smem` bytes of dynamic shared memory. */
int qt_w4ax_launch_quantize(const void *kernel, dim3 grid, int threads, size_t smem,
                            const quantize_args *a, int cc, void *stream);

#endif
