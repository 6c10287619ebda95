/* What the quantize kernels share: arguments, and from values to codes. */
#ifndef QT_KERNELS_CUDA_W4AX_QUANTIZE_CUH
#define QT_KERNELS_CUDA_W4AX_QUANTIZE_CUH

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/include/qtool_w4ax.h"

#include <cuda_fp16.h>
#include <math.h>

/* QUANTIZE_OWN_BYTES: of shared memory, beside what launches ask for, at most. */
enum { COLS = QTOOL_W4AX_BLOCK_COLS, QUANTIZE_OWN_BYTES = 2048 };

struct quantize_args {
    const uint16_t *x;
    const uint16_t *weight, *bias; /* bias NULL: zeros */
    const uint32_t *perm, *blocks;
    unsigned char *codes;
    float *scale;
    int *sum;
    int m, k, blocks_n, scale_pitch, scales;
    int scales_at;             /* of the blocks, in shared memory */
    int clamp;                 /* a clip is below 1 */
    float eps, per_k;          /* of norms; 1 / k */
    float per7, per127, clip4; /* clip / 7, clip / 127 */
    int dependent;             /* launched before the previous kernel has ended */
};

extern __shared__ __align__(16) unsigned char quantize_smem[];

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

/* ---- norms and values --------------------------------------------------------------------------
 */

/* x to x * factor + shift. */
struct row_norm {
    float factor, shift;
};

/* From the sum of a row's squares. */
static __device__ __forceinline__ float norm_factor(const quantize_args &a, float squares)
{
    return rsqrtf(fmaf(squares, a.per_k, a.eps));
}

/* From its mean and the sum of squares about it. */
static __device__ __forceinline__ row_norm norm_from(const quantize_args &a, float mean,
                                                     float squares)
{
    const float factor = norm_factor(a, squares);
    return {factor, -mean * factor};
}

/* Of four channels: weights, and biases of a layer norm, as they are in memory. */
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

/* Four values, but for the factor of an RMS norm. */
template <bool BF16, int NORM>
static __device__ __forceinline__ void normalise(float v[4], const row_norm &n,
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

/* A lane's channels of a block: 4 from this on, and 4 from 16 further on. */
static __device__ __forceinline__ int first_channel()
{
    const int i = (int)threadIdx.x % 16;
    return i / 4 * 32 + i % 4 * 4;
}

/* ---- codes -------------------------------------------------------------------------------------
 */

/* Codes of +-limit, as FP32 numbers CODE_0 + code, which have the code in their low bits:
 * exact products, rounded to the nearest whole number, ties to even (conversions run at an eighth
 * of the speed of additions). inverse: 0 for a block of zeros. clamp: there may be larger values.
 */
struct rounded_codes {
    float v[8];
};
static constexpr float CODE_0 = 12582912; /* 1.5 * 2^23 */

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

/* Bytes of codes times a whole number. Codes are +-7 (small) or +-127, or below 32000 and to be
 * clamped to that: in pairs of 16 bits code + limit is brought to 0..2 limit. Then all four of a
 * word are multiplied at once, with 128 added, so that none is negative. */
static __device__ __forceinline__ uint2 multiplied_bytes(const rounded_codes &r, bool small,
                                                         float factor)
{
    const uint32_t limits = small ? 0x00070007 : 0x007f007f, f = (uint32_t)factor;
    const uint32_t add = 0x80808080 - (small ? 0x07070707 : 0x7f7f7f7f) * f;
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

/* A block's rows of codes, from its word; bytes of one. */
static __device__ __forceinline__ unsigned char *codes_of(const quantize_args &a, uint32_t word)
{
    return a.codes + (size_t)((word & ~QTOOL_W4AX_NARROW_VALUES) >> 1) * 64 * (size_t)a.m;
}

static __device__ __forceinline__ int row_bytes(uint32_t word)
{
    return word & QTOOL_W4AX_WIDE_ROWS ? 128 : 64;
}

static __device__ __forceinline__ uint32_t packed(uint2 code)
{
    return (code.x & 0x0f0f0f0f) | (code.y & 0x0f0f0f0f) << 4;
}

static __device__ __forceinline__ bool narrow(uint32_t word)
{
    return !(word & QTOOL_W4AX_WIDE_ROWS) || (word & QTOOL_W4AX_NARROW_VALUES);
}

/* 1 / s for codes, as __frcp_rn rounds it, by its steps where neither is near the ends of FP32: s
 * is below 2^126, and below 2^-120 codes are 0. */
static __device__ __forceinline__ float inverse_of(float s)
{
    const float r = ptx_reciprocal(s);
    return s >= 0x1p-120f ? fmaf(r, -fmaf(s, r, -1), r) : 0;
}

/* What is stored of a token's scale; without an epsilon the factor of a token of zeros is infinite.
 */
static __device__ __forceinline__ float token_scale(float scale, float factor)
{
    return scale == 0 ? 1 : scale * factor;
}

/* `scales` = int: a block's factor, of its largest size and the scale of the token, if its values
 * are narrow. The quotient is rounded as __fdiv_rn does it, likewise. */
static __device__ __forceinline__ float int_factor(const quantize_args &a, float most, float scale)
{
    const float up = scale < 1 ? 0x1p64f : 1, by = __fmul_rn(7, scale) * up;
    const float size = __fmul_rn(most, a.clip4) * up, inverse = inverse_of(by);
    float factor = size * inverse;
#pragma unroll
    for (int i = 0; i < 2; i++)
        factor = fmaf(inverse, fmaf(-by, factor, size), factor);
    return fminf(fmaxf(rintf(factor), 1), 18);
}

/* Launches the kernel for rows of 16 channels a thread (w4ax_quantize_rows.cu); false: it is not
 * for these. cc: compute capability of the code, for dependent launches. */
bool qt_w4ax_quantize_rows(int *status, const quantize_args *a, int norm, bool bf16, int cc,
                           void *stream);
/* smem: bytes beside the kernel's own. */
int qt_w4ax_launch_quantize(const void *kernel, int blocks, int threads, size_t smem,
                            const quantize_args *a, int cc, void *stream);

#endif
