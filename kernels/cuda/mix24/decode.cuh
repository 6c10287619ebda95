/*
 * Dequantization of mix24 records (2- and 4-bit groups in a matrix, after arXiv 2311.16442) to the
 * A operand of mma.sync m16n8k16. formats/layouts/layout_mix24.h defines the layout.
 *
 * A TWO is a unit with 2-bit codes, a FOUR one with 4-bit codes. In each 64 columns a lane owns one
 * whole group in two rows, g and g + 8. It dequantizes one scale and one zero-point per row. Every
 * mma (16 columns) has four columns of each of the four groups in 64 columns. Weights are
 * dequantized to their exact FP16 values,
 *
 *     w = c * sigma * 2^-22 - zero * sigma * 2^-22,    sigma = (q + z2) * s2
 *
 * where c is the code, zero the zero-point and q the 4-bit scale of the group, and s2 and z2 are
 * the second-order scale and offset. One fused multiply-add computes two weights: a masked code is
 * an FP16 subnormal, c * 2^(bit - 24), where bit is the position of its field in the half-word. So
 * the fields at bits 2, 4, 6 and 8 need sigma times 1, 1/4, 1/16 and 1/64. No bias is added and
 * subtracted again, and the accumulators need no correction.
 */
#ifndef QT_KERNELS_CUDA_MIX24_DECODE_CUH
#define QT_KERNELS_CUDA_MIX24_DECODE_CUH

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/mix24/mix24.h"

/* Section sizes and offsets in a record. */
template <bool FOUR> struct mix24_record {
    enum {
        CODES = FOUR ? 1024 : 512, /* 32 lanes x 4 words; a FOUR has two sets */
        Q = CODES,                 /* U16 per lane */
        Z = Q + 64,                /* per lane: U16 (FOUR), U8 (TWO) */
        U = Z + (FOUR ? 64 : 32),  /* U32 for t = 0..3 */
        BYTES = U + 16,
    };
};
static_assert((int)mix24_record<false>::BYTES == QTOOL_MATMUL_MIX24_TWO, "the public header's");
static_assert((int)mix24_record<true>::BYTES == QTOOL_MATMUL_MIX24_FOUR, "the public header's");

static __device__ __forceinline__ uint32_t half2_bits(__half2 v)
{
    return *(uint32_t *)&v;
}

static __device__ __forceinline__ __half2 as_half2(uint32_t v)
{
    return *(__half2 *)&v;
}

/* The lane's group in 64 columns; row g in the low half, g + 8 in the high half. */
struct mix24_group {
    __half2 scale;    /* sigma times the power of two of the row's first field */
    __half2 scale_16; /* scale / 16: for fields four bits higher */
    __half2 zero;     /* -zero sigma 2^-22 */
};

/* A lane's metadata in a record: of its groups in both blocks of 64 columns. */
struct mix24_meta {
    uint32_t q, z;
    __half2 s2; /* block 0, block 1 */
    __half2 z2; /* z2 - 1024 of block 0, z2 - 64 of block 1 */
};

/* (x & MASK) | bits as one LOP3: with two constants the compiler emits two instructions. */
template <uint32_t MASK>
static __device__ __forceinline__ uint32_t masked_or(uint32_t x, uint32_t bits)
{
    uint32_t r;
    asm("{\n"
        ".reg .b32 c;\n"
        "mov.b32 c, %2;\n"
        "lop3.b32 %0, %1, %3, c, 0xea;\n"
        "}"
        : "=r"(r)
        : "r"(x), "r"(bits), "n"(MASK));
    return r;
}

static __device__ __forceinline__ __half2 half2_const(float low, float high)
{
    return __floats2half2_rn(low, high);
}

/* Unpacks the lane's stored words: q U16; z U16 (FOUR) or U8 (TWO); u U32. */
template <bool FOUR>
static __device__ __forceinline__ mix24_meta mix24_meta_of(uint32_t q, uint32_t z, uint32_t u)
{
    mix24_meta m;
    m.q = __byte_perm(q, 0, 0x4140); /* [0 | row g + 8: q1 q0 | 0 | row g: q1 q0] */
    m.z = FOUR ? z : z * 0x00040004;
    m.s2 = as_half2(u & 0x7f807f80);
    m.z2 = __hadd2(as_half2(masked_or<0x000f000f>(u, 0x64006400)), half2_const(-2048, -1024 - 64));
    return m;
}

/* Loads the lane's metadata from a record in shared memory. */
template <bool FOUR>
static __device__ __forceinline__ mix24_meta mix24_shared_meta(uint32_t record, int lane)
{
    using R = mix24_record<FOUR>;
    const uint32_t by_2 = record + (uint32_t)lane * 2;
    return mix24_meta_of<FOUR>(ptx_load_2(by_2 + R::Q),
                               FOUR ? ptx_load_2(by_2 + R::Z)
                                    : ptx_load_1(record + R::Z + (uint32_t)lane),
                               ptx_load_4(record + R::U + (uint32_t)lane % 4 * 4));
}

/*
 * Dequantizes scale and zero-point of the group in block b. With the exponent of 1024 above it, q
 * reads as 1024 + q; four bits higher, with that of 64, as 64 + q. A smaller exponent gives a 4th
 * or 16th of that, as needed by the fields of row g + 8, which are two (TWO) or four (FOUR) bits
 * higher than those of row g.
 */
template <bool FOUR, int b>
static __device__ __forceinline__ mix24_group mix24_open_group(const mix24_meta &m)
{
    mix24_group out;
    const uint32_t exponents = (b ? 0x54005400 : 0x64006400) - (FOUR ? 0x10000000 : 0x08000000);
    const float up = FOUR ? 1.0f / 16 : 1.0f / 4;
    __half2 q = as_half2(masked_or < b ? 0x00f000f0 : 0x000f000f > (m.q, exponents));
    __half2 n = __hfma2(b ? __high2half2(m.z2) : __low2half2(m.z2), half2_const(1, up), q);
    out.scale = __hmul2(n, b ? __high2half2(m.s2) : __low2half2(m.s2)); /* n = q + z2 */
    out.scale_16 = __hmul2(out.scale, half2_const(1.0f / 16, 1.0f / 16));
    if (FOUR) {
        uint32_t z = (b ? m.z >> 8 : m.z) * 0x00040004 & 0x03c0003c;
        out.zero = __hmul2(as_half2(z), __hneg2(out.scale));
    } else {
        uint32_t z = m.z & (b ? 0x030000c0 : 0x0030000c);
        out.zero = __hmul2(as_half2(z), __hneg2(b ? out.scale_16 : out.scale));
    }
    return out;
}

static __device__ __forceinline__ uint32_t mix24_weights(uint32_t codes, __half2 scale,
                                                         __half2 zero, bool high)
{
    return half2_bits(high ? __hfma2(as_half2(codes), __high2half2(scale), __high2half2(zero))
                           : __hfma2(as_half2(codes), __low2half2(scale), __low2half2(zero)));
}

static __device__ __forceinline__ uint32_t mix24_rotate(uint32_t w)
{
    return __funnelshift_r(w, w, 8);
}

/* One k-step of 2-bit codes. The other k-step of a word is computed from the rotated word. */
static __device__ __forceinline__ void mix24_two(uint32_t a[4], uint32_t w, const mix24_group &p)
{
    a[0] = mix24_weights(w & 0x000c000c, p.scale, p.zero, false);
    a[1] = mix24_weights(w & 0x00300030, p.scale, p.zero, true);
    a[2] = mix24_weights(w & 0x00c000c0, p.scale_16, p.zero, false);
    a[3] = mix24_weights(w & 0x03000300, p.scale_16, p.zero, true);
}

/* One k-step of 4-bit codes from w and r, the rotated w. */
static __device__ __forceinline__ void mix24_four(uint32_t a[4], uint32_t w, uint32_t r,
                                                  const mix24_group &p)
{
    a[0] = mix24_weights(w & 0x003c003c, p.scale, p.zero, false);
    a[1] = mix24_weights(w & 0x03c003c0, p.scale, p.zero, true);
    a[2] = mix24_weights(r & 0x003c003c, p.scale, p.zero, false);
    a[3] = mix24_weights(r & 0x03c003c0, p.scale, p.zero, true);
}

/* K-step s = 0..3 of a block from the lane's words (2 for a TWO, 4 for a FOUR). */
template <bool FOUR>
static __device__ __forceinline__ void mix24_fragment(uint32_t a[4], const uint32_t *words, int s,
                                                      const mix24_group &p)
{
    if (FOUR)
        mix24_four(a, words[s], mix24_rotate(words[s]), p);
    else
        mix24_two(a, s % 2 ? mix24_rotate(words[s / 2]) : words[s / 2], p);
}

#endif
