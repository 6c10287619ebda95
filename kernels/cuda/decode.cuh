/*
 * Packed codes -> A operand of mma.sync m16n8k16: one struct per code format. The layout is drawn
 * in pack/layout_frag.h; here is what each format does with the words of a lane.
 *
 *     WIDTH0..2     bits of its planes, 0 where there is none
 *     LUT           codes are looked up, not computed:
 *     VALUES        in registers of the lane
 *     TABLE_BYTES   in a table in shared memory, of so many bytes; 0: there is none
 *     LINE_BYTES    of an entry for all lanes
 *     LANE_BYTES    of it, that a lane reads
 *     SINGLE        an entry is one code's value, not two codes'
 *     TILE4         see qt_decode_tile4
 *     STEPS         a table of steps
 *     code          of a nibble; step_code, with a table of steps, of one of an even or odd step
 *     GROUPED       a scale per group; else per row
 *     load          the words of one 16 x 64 block from global memory: src[i] is the lane's part of
 *                   plane i
 *     ZEROS         bytes of the zero points of 16 rows and a group; 0: it has none
 *     set_zeros     at the beginning of a group, qt_lane_zeros of it
 *     fragment      operand registers of k-step s as FP16x2
 *     ROUND_EXP2    fragments times 2^ROUND_EXP2 and a stored scale, below 2^15, are within the
 *                   range of FP16 and use it well: of those with a scale per group
 *     RARE          only as many kernels as it takes to be no slower than without: each takes a
 *                   second to compile
 *
 * Values may come out as the true ones times a power of two (qt_result_factor).
 */
#ifndef QT_CUDA_DECODE_CUH
#define QT_CUDA_DECODE_CUH

#include "kernels/cuda/decode.h"
#include "kernels/cuda/ptx.cuh"

/* Bits of plane p. */
template <class Format> static __device__ __forceinline__ constexpr int qt_plane_width(int p)
{
    return p == 0 ? Format::WIDTH0 : p == 1 ? Format::WIDTH1 : Format::WIDTH2;
}

/* Bytes of a lane's words of plane p, of a 16 x 64 block. */
template <class Format> static __device__ __forceinline__ constexpr int qt_lane_width(int p)
{
    return 4 * qt_plane_width<Format>(p);
}

/* The zero points of the lane's two rows g and g + 8, as they stand in those of a group. */
template <class Format>
static __device__ __forceinline__ uint32_t qt_lane_zeros(const qt_decode_args &d,
                                                         const unsigned char *group)
{
    const unsigned g = threadIdx.x % 32 / 4;
    if (Format::ZEROS == 8)
        return group[g];
    return d.zeros ? ((const uint16_t *)group)[g] : 0x8080u;
}

/* What a lane has besides its words. */
struct qt_lane {
    uint32_t bytes;           /* where in a line of the table its copy is */
    uint32_t low[2], high[2]; /* halves of the values of up to eight nibbles, a byte each */
};

/* What formats without a table or without zero points have of these. */
struct qt_decode_plain {
    enum { LUT = 0, VALUES = 0, TABLE_BYTES = 0, LANE_BYTES = 4, LINE_BYTES = 0, TILE4 = 0 };
    enum { SINGLE = 0, STEPS = 0, ZEROS = 0, ROUND_EXP2 = 0, RARE = 0 };

    __device__ __forceinline__ void set_zeros(uint32_t)
    {
    }
};

/* One code of a minifloat by arithmetic, times the power of two that qt_minifloat_exp2 undoes: for
 * tables of those with up to 4 bits. */
static __device__ inline __half qt_minifloat_half(unsigned code, unsigned bits, unsigned exp_bits)
{
    int m = (int)(bits - 1 - exp_bits), mag = (int)(code >> 1), e = mag >> m;
    int mantissa = (mag & ((1 << m) - 1)) + (e ? 1 << m : 0);
    int exp2 = (e ? e : 1) - m - 15;
    float v = ldexpf((float)mantissa, exp2);
    return __float2half(code & 1 ? -v : v);
}

/* The value of code `lane`, if codes are looked up: from the table section, or a minifloat. */
template <class Format>
static __device__ __forceinline__ __half qt_lane_value(const struct qt_decode_args *d)
{
    if (!Format::LUT)
        return __half();
    unsigned code = threadIdx.x % 32 & ((1u << d->bits) - 1);
    return d->table ? d->table[code] : qt_minifloat_half(code, d->bits, d->exp_bits);
}

/* The table is at the start of dynamic shared memory: loads then need no base register. */
extern __shared__ __align__(1024) unsigned char qt_smem[];

/* ---- values in registers -----------------------------------------------------------------------
 *
 * The values of up to eight codes are four registers of bytes, and a nibble is what PRMT selects a
 * byte by: four of it make two operand registers. So nothing is looked up in shared memory, for
 * more instructions.
 */
template <class Format>
static __device__ __forceinline__ void value_start(qt_lane *lane, __half value)
{
    const int codes = 1 << (Format::WIDTH0 + Format::WIDTH1);
    lane->low[0] = lane->low[1] = lane->high[0] = lane->high[1] = 0;
#pragma unroll
    for (int nibble = 0; nibble < codes; nibble++) {
        const uint32_t v = __half_as_ushort(__shfl_sync(~0u, value, Format::code(nibble)));
        lane->low[nibble / 4] |= (v & 255) << nibble % 4 * 8;
        lane->high[nibble / 4] |= (v >> 8) << nibble % 4 * 8;
    }
    if (codes == 4) /* not two registers more */
        lane->low[1] = lane->low[0], lane->high[1] = lane->high[0];
}

/* The two registers of which the nibbles are the low ones. */
static __device__ __forceinline__ void value_pair(uint32_t a[2], uint32_t nibbles,
                                                  const qt_lane &lane)
{
    const uint32_t low = ptx_permute(lane.low[0], lane.low[1], nibbles);
    const uint32_t high = ptx_permute(lane.high[0], lane.high[1], nibbles);
    a[0] = ptx_permute(low, high, 0x5140);
    a[1] = ptx_permute(low, high, 0x7362);
}

static __device__ __forceinline__ void value_fragment(uint32_t a[4], uint32_t nibbles,
                                                      const qt_lane &lane)
{
    value_pair(a, nibbles, lane);
    value_pair(a + 2, nibbles >> 16, lane);
}

/* 3 bits = 2 + 1. */
struct qt_decode_value3 : qt_decode_plain {
    enum { WIDTH0 = 2, WIDTH1 = 1, WIDTH2 = 0, LUT = 1, VALUES = 1, GROUPED = 1 };
    uint32_t w2[2], w1;

    static __device__ unsigned code(unsigned nibble)
    {
        return (nibble & 3) << 1 | (nibble >> 2 & 1);
    }
    __device__ __forceinline__ void load(const unsigned char *const src[3],
                                         const struct qt_decode_args &)
    {
        *(uint2 *)w2 = *(const uint2 *)src[0];
        w1 = *(const uint32_t *)src[1];
    }
    /* Of step s, in bits 0 and 1 of nibbles; and in bit 2. */
    __device__ __forceinline__ uint32_t two(int s) const
    {
        return w2[s / 2] >> 2 * (s & 1);
    }
    __device__ __forceinline__ uint32_t one(int s) const
    {
        return s < 2 ? w1 << (2 - s) : w1 >> (s - 2);
    }
    __device__ __forceinline__ uint32_t nibbles(int s) const
    {
        return (two(s) & 0x33333333) | (one(s) & 0x44444444);
    }
    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &lane) const
    {
        value_fragment(a, nibbles(s), lane);
    }
};

/* 2 bits. */
struct qt_decode_value2 : qt_decode_plain {
    enum { WIDTH0 = 2, WIDTH1 = 0, WIDTH2 = 0, LUT = 1, VALUES = 1, GROUPED = 1 };
    uint32_t w2[2];

    static __device__ unsigned code(unsigned nibble)
    {
        return nibble & 3;
    }
    __device__ __forceinline__ void load(const unsigned char *const src[3],
                                         const struct qt_decode_args &)
    {
        *(uint2 *)w2 = *(const uint2 *)src[0];
    }
    /* Of step s, nibbles of which the upper half is anything. */
    __device__ __forceinline__ uint32_t entries(int s) const
    {
        return w2[s / 2] >> 2 * (s & 1);
    }
    __device__ __forceinline__ uint32_t nibbles(int s) const
    {
        return entries(s) & 0x33333333;
    }
    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &lane) const
    {
        value_fragment(a, nibbles(s), lane);
    }
};

/* ---- tables of pairs ---------------------------------------------------------------------------
 *
 * The codes of a register are the nibbles of a byte, which indexes a table of FP16x2 of which every
 * lane has its own copy: entry e is line e, of 128 bytes or 256, lane l reads word l of a line, so
 * that no look-up conflicts with another.
 */

/* Two threads an entry, 16 copies each in wide stores, rotated against bank conflicts. */
template <class Format> static __device__ __forceinline__ void pair_fill(__half value, int threads)
{
    uint32_t *table = (uint32_t *)qt_smem;
    for (int i = (int)threadIdx.x; i < 2 * Format::TABLE_BYTES / Format::LINE_BYTES; i += threads) {
        unsigned entry = (unsigned)i / 2;
        __half2 v = __halves2half2(__shfl_sync(~0u, value, Format::code(entry & 15)),
                                   __shfl_sync(~0u, value, Format::code(entry >> 4)));
        uint32_t u = *(uint32_t *)&v;
        uint4 *dst = Format::TILE4
                         ? (uint4 *)(table + entry * (Format::LINE_BYTES / 4) + (i & 1) * 16)
                         : (uint4 *)(qt_smem + entry * Format::LINE_BYTES + (i & 1) * 64);
#pragma unroll
        for (int j = 0; j < 4; j++)
            dst[(j + i / 2) & 3] = make_uint4(u, u, u, u);
    }
}

/* The address of a byte of a word, of which `mask` has what is wanted, is one shift and one (x &
 * mask) | lane. */
static __device__ __forceinline__ uint32_t pair_look_up(uint32_t entry_at_bit_7, uint32_t mask,
                                                        const qt_lane &lane)
{
    return *(const uint32_t *)(qt_smem + ((entry_at_bit_7 & mask << 7) | lane.bytes));
}

static __device__ __forceinline__ void pair_fragment(uint32_t a[4], uint32_t entries, uint32_t mask,
                                                     const qt_lane &lane)
{
    a[0] = pair_look_up(entries << 7, mask, lane);
    a[1] = pair_look_up(entries >> 1, mask, lane);
    a[2] = pair_look_up(entries >> 9, mask, lane);
    a[3] = pair_look_up(entries >> 17, mask, lane);
}

/* 4 bits. */
struct qt_decode_pair4 : qt_decode_plain {
    enum {
        WIDTH0 = 4,
        WIDTH1 = 0,
        WIDTH2 = 0,
        LUT = 1,
        LINE_BYTES = 128,
        TABLE_BYTES = 256 * LINE_BYTES,
        GROUPED = 1
    };
    uint32_t w[4];

    static __device__ unsigned code(unsigned nibble)
    {
        return nibble;
    }
    __device__ __forceinline__ void load(const unsigned char *const src[3],
                                         const struct qt_decode_args &)
    {
        *(uint4 *)w = *(const uint4 *)src[0];
    }
    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &lane) const
    {
        pair_fragment(a, w[s], 0xff, lane);
    }
};

/* The same with a table that is small, for blocks too short to fill a large one: an entry a code,
 * two of which are put together. */
struct qt_decode_single4 : qt_decode_pair4 {
    enum { SINGLE = 1, TABLE_BYTES = 16 * LINE_BYTES };

    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &lane) const
    {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t low = i ? w[s] >> (8 * i - 7) : w[s] << 7;
            const uint32_t high = i ? w[s] >> (8 * i - 3) : w[s] << 3;
            a[i] = ptx_permute(pair_look_up(low, 15, lane), pair_look_up(high, 15, lane), 0x5410);
        }
    }
};

template <class Format>
static __device__ __forceinline__ void single_fill(__half value, int threads)
{
    for (int i = (int)threadIdx.x; i < Format::TABLE_BYTES / 4; i += threads)
        ((uint32_t *)qt_smem)[i] =
            __half_as_ushort(__shfl_sync(~0u, value, Format::code((unsigned)i / 32)));
}

struct qt_decode_pair3 : qt_decode_value3 {
    enum { VALUES = 0, LINE_BYTES = 128, TABLE_BYTES = 128 * LINE_BYTES };

    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &lane) const
    {
        pair_fragment(a, ptx_select_bits(two(s), one(s), 0x33333333), 0x77, lane);
    }
};

struct qt_decode_pair2 : qt_decode_value2 {
    enum { VALUES = 0, LINE_BYTES = 128, TABLE_BYTES = 64 * LINE_BYTES };

    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &lane) const
    {
        pair_fragment(a, entries(s), 0x33, lane);
    }
};

/* ---- wide tables -------------------------------------------------------------------------------
 *
 * Tables of pairs with lines of 256 bytes, for devices with that much shared memory: a byte that is
 * an entry, over the lane's, is then the address, which takes one permutation of bytes.
 */
static __device__ __forceinline__ const unsigned char *wide_entry(uint32_t entries, int i,
                                                                  const qt_lane &lane)
{
    return qt_smem + __byte_perm(entries, lane.bytes, 0x5504 | i << 4); /* 0, 0, entry i, lane's */
}

static __device__ __forceinline__ void wide_fragment(uint32_t a[4], uint32_t entries,
                                                     const qt_lane &lane)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        a[i] = *(const uint32_t *)wide_entry(entries, i, lane);
}

struct qt_decode_wide4 : qt_decode_pair4 {
    enum { LINE_BYTES = 256, TABLE_BYTES = 256 * LINE_BYTES };

    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &lane) const
    {
        wide_fragment(a, w[s], lane);
    }
};

/* The same for tile kernels, with addresses of entries, and of the lane's copy (tile_accumulate),
 * in another form, by which the assembler orders all of them otherwise: 32 to 256 tokens take 0.98
 * of the time. */
struct qt_decode_tile4 : qt_decode_wide4 {
    enum { TILE4 = 1 };

    static __device__ unsigned code(unsigned nibble)
    {
        return nibble & 15;
    }
};

struct qt_decode_wide3 : qt_decode_value3 {
    enum { VALUES = 0, LINE_BYTES = 256, TABLE_BYTES = 128 * LINE_BYTES };

    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &lane) const
    {
        wide_fragment(a, nibbles(s), lane);
    }
};

struct qt_decode_wide2 : qt_decode_value2 {
    enum { VALUES = 0, LINE_BYTES = 256, TABLE_BYTES = 64 * LINE_BYTES };

    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &lane) const
    {
        wide_fragment(a, nibbles(s), lane);
    }
};

/* ---- tables of steps ---------------------------------------------------------------------------
 *
 * Codes of 2 and 3 bits leave bits of a byte to others. Wide tables again, but with an entry for
 * every byte, so that words need no mask, and with two pairs in an entry's line, 128 bytes apart:
 * of an even step and of an odd one, whose codes are further up in the nibbles, so that they need
 * no shift.
 */

/* Four threads an entry, as pair_fill. */
template <class Format> static __device__ __forceinline__ void steps_fill(__half value, int threads)
{
    for (int i = (int)threadIdx.x; i < 4 * 256; i += threads) {
        const unsigned entry = (unsigned)i / 4;
        uint32_t v[2];
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const __half2 pair =
                __halves2half2(__shfl_sync(~0u, value, Format::step_code(entry & 15, odd)),
                               __shfl_sync(~0u, value, Format::step_code(entry >> 4, odd)));
            v[odd] = *(const uint32_t *)&pair;
        }
        const uint32_t u = i & 2 ? v[1] : v[0];
        uint4 *dst = (uint4 *)(qt_smem + entry * Format::LINE_BYTES + i % 4 * 64);
#pragma unroll
        for (int j = 0; j < 4; j++)
            dst[(j + i / 2) & 3] = make_uint4(u, u, u, u);
    }
}

static __device__ __forceinline__ void step_fragment(uint32_t a[4], uint32_t entries, int s,
                                                     const qt_lane &lane)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        a[i] = *(const uint32_t *)(wide_entry(entries, i, lane) + (s & 1) * 128);
}

/* 3 bits. */
struct qt_decode_steps3 : qt_decode_value3 {
    enum { VALUES = 0, STEPS = 1, LINE_BYTES = 256, TABLE_BYTES = 256 * LINE_BYTES };

    /* Nibbles of even steps: [anything | of the 1-bit plane | of the 2-bit plane]; of odd ones: [of
     * the 2-bit plane | of the 1-bit plane | anything]. */
    static __device__ unsigned step_code(unsigned nibble, int odd)
    {
        return odd ? nibble >> 1 : code(nibble);
    }
    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &lane) const
    {
        const uint32_t one = s == 0 ? w1 << 2 : s == 3 ? w1 >> 2 : w1;
        const uint32_t two = s & 1 ? 0xcccccccc : 0x33333333;
        step_fragment(a, ptx_select_bits(w2[s / 2], one, two), s, lane);
    }
};

/* 2 bits: the first LOOKED_UP steps so, for which two steps have the same addresses, others by
 * values in registers, as shared memory is what look-ups of so few bits wait for. */
template <int LOOKED_UP> struct qt_decode_steps2 : qt_decode_value2 {
    enum { STEPS = 1, LINE_BYTES = 256, TABLE_BYTES = 256 * LINE_BYTES };

    static __device__ unsigned step_code(unsigned nibble, int odd)
    {
        return odd ? nibble >> 2 : nibble & 3;
    }
    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &lane) const
    {
        if (s < LOOKED_UP)
            step_fragment(a, w2[s / 2], s, lane);
        else
            value_fragment(a, nibbles(s), lane);
    }
};

/* ---- half of each ------------------------------------------------------------------------------
 *
 * For tile kernels, where look-ups wait for shared memory, which is busy with X too, and
 * permutations for the unit of integers: half of the steps so, half that way.
 */
struct qt_decode_mixed3 : qt_decode_wide3 {
    enum { VALUES = 1 };

    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &lane) const
    {
        if (s & 1)
            value_fragment(a, nibbles(s), lane);
        else
            wide_fragment(a, nibbles(s), lane);
    }
};

/* Four threads an entry: two codes of step 0 and two of step 1 as FP16x4. */
template <class Format>
static __device__ __forceinline__ void quad_fill(const qt_lane &lane, int threads)
{
    for (int i = (int)threadIdx.x; i < 4 * Format::TABLE_BYTES / Format::LINE_BYTES; i += threads) {
        const uint32_t entry = (uint32_t)i / 4;
        uint32_t v[4]; /* of step 0 in v[0], of step 1 in v[2] */
        value_fragment(v, (entry & 0x33) | (entry & 0xcc) << 14, lane);
        uint4 *dst = (uint4 *)(qt_smem + entry * Format::LINE_BYTES + i % 4 * 64);
#pragma unroll
        for (int j = 0; j < 4; j++)
            dst[(j + i / 2) & 3] = make_uint4(v[0], v[2], v[0], v[2]);
    }
}

/* A byte is two codes of step 0 and two of step 1, and indexes a table of FP16x4: lane l reads
 * eight bytes of a line. */
struct qt_decode_mixed2 : qt_decode_value2 {
    enum { LANE_BYTES = 8, LINE_BYTES = 256, TABLE_BYTES = 256 * LINE_BYTES };
    uint32_t step1[4];

    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &lane)
    {
        if (s >= 2)
            value_fragment(a, nibbles(s), lane);
#pragma unroll
        for (int i = 0; i < 4 && s < 2; i++) {
            if (s == 0) {
                const uint2 v = *(const uint2 *)wide_entry(w2[0], i, lane);
                a[i] = v.x;
                step1[i] = v.y;
            } else {
                a[i] = step1[i];
            }
        }
    }
};

/* ---- what a lane has ---------------------------------------------------------------------------
 */

/* Each lane brings qt_lane_value. The first `threads` threads of the block fill the table, before a
 * barrier. */
template <class Format>
static __device__ __forceinline__ qt_lane qt_lane_start(__half value, int threads)
{
    qt_lane lane = {threadIdx.x % 32 * Format::LANE_BYTES, {}, {}};
    if constexpr (Format::VALUES)
        value_start<Format>(&lane, value);
    if constexpr (Format::SINGLE)
        single_fill<Format>(value, threads);
    else if constexpr (Format::STEPS)
        steps_fill<Format>(value, threads);
    else if constexpr (Format::TABLE_BYTES > 0 && Format::LANE_BYTES == 4)
        pair_fill<Format>(value, threads);
    if constexpr (Format::TABLE_BYTES > 0 && Format::LANE_BYTES == 8 && !Format::STEPS)
        quad_fill<Format>(lane, threads);
    return lane;
}

/* ---- integers ----------------------------------------------------------------------------------
 *
 * A nibble at the low end of FP16 is that number times 2^-24, a subnormal, and four bits further up
 * times 2^-20: one fused multiplication makes either 2^-QT_INT4_EXP2 of the number and takes the
 * zero point off, exactly.
 */
struct qt_decode_int4 : qt_decode_plain {
    enum { WIDTH0 = 4, WIDTH1 = 0, WIDTH2 = 0, GROUPED = 1, ROUND_EXP2 = QT_INT4_ROUND_EXP2 };
    uint32_t w[4];

    __device__ __forceinline__ void load(const unsigned char *const src[3],
                                         const struct qt_decode_args &)
    {
        *(uint4 *)w = *(const uint4 *)src[0];
    }
    /* offset: what is added to the values of rows g and g + 8. */
    __device__ __forceinline__ void fragment_of(uint32_t a[4], int s,
                                                const uint32_t offset[2]) const
    {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t v = i < 2 ? w[s] : w[s] >> 8;
            a[i] = i & 1 ? ptx_fma_half2(v & 0x00f000f0, 0x68006800, offset[1])  /* 2^11 */
                         : ptx_fma_half2(v & 0x000f000f, 0x78007800, offset[0]); /* 2^15 */
        }
    }
    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &) const
    {
        const uint32_t offset[2] = {0xa400a400, 0xa400a400}; /* -8 * 2^-9 */
        fragment_of(a, s, offset);
    }
};

/* The same with zero points. */
struct qt_decode_int4_zero : qt_decode_int4 {
    enum { ZEROS = 8 };
    uint32_t offset[2];

    __device__ __forceinline__ void set_zeros(uint32_t zeros)
    {
        const uint32_t none = 0x80008000, minus = 0xf800f800; /* -0; -2^15 */
        offset[0] = ptx_fma_half2((zeros & 15) * 0x00010001, minus, none);
        offset[1] = ptx_fma_half2((zeros >> 4) * 0x00010001, minus, none);
    }
    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &) const
    {
        fragment_of(a, s, offset);
    }
};

/* Codes of 8 bits: plane p has a byte of registers 2 p and 2 p + 1 in each half of a word. */
struct qt_decode_bytes : qt_decode_plain {
    enum { WIDTH0 = 4, WIDTH1 = 4, WIDTH2 = 0 };
    uint32_t w[2][4];

    __device__ __forceinline__ void load(const unsigned char *const src[3],
                                         const struct qt_decode_args &)
    {
        *(uint4 *)w[0] = *(const uint4 *)src[0];
        *(uint4 *)w[1] = *(const uint4 *)src[1];
    }
};

/* Integers, with and without zero points. FP16 1024 + v is 0x6400 | v; an addition takes the 1024
 * and the zero point off. */
struct qt_decode_int8 : qt_decode_bytes {
    enum { GROUPED = 1, ZEROS = 16, ROUND_EXP2 = QT_INT8_ROUND_EXP2 };
    uint32_t offset[2];

    __device__ __forceinline__ void set_zeros(uint32_t zeros)
    {
        offset[0] = 0xe400e400 + (zeros & 255) * 0x00010001;
        offset[1] = 0xe400e400 + (zeros >> 8) * 0x00010001;
    }
    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &) const
    {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t selector = i & 1 ? 0x4341 : 0x4240;
            a[i] = ptx_add_half2(__byte_perm(w[i / 2][s], 0x64, selector), offset[i & 1]);
        }
    }
};

/* ---- bit fields of FP16 ------------------------------------------------------------------------
 *
 * Minifloats of 5 to 8 bits, e of them of the exponent. The 4-bit plane holds the top four
 * magnitude bits, the small planes what is left and the sign. Both halves of a register move
 * together: a shift puts the magnitude under FP16's exponent and mantissa, a turn (below) the sign
 * on bit 15, and two LOP3 take what is wanted of each.
 *
 * E: the exponent bits, or 0 where the kernel has them as an argument: for all those that have no
 * kernels of their own, which are up to a sixth faster.
 */
template <int E> struct qt_decode_field : qt_decode_plain {
    enum { GROUPED = 0, RARE = E == 0 };
};

/* Register i's nibbles of w, lowest bit at 6 + e of each half; other bits are anything. */
template <int E> static __device__ __forceinline__ uint32_t move_nibble(uint32_t w, int i, int e)
{
    const int left = 6 + e - 4 * i;
    if (E == 0 && i == 2) /* -1 to 3; what is turned around is not wanted */
        return __funnelshift_l(w, w, left);
    return (E ? left >= 0 : i < 2) ? w << left : w >> -left;
}

/*
 * `bits` of w turned left by n. A shift where none of them comes around: a rotation is for the pipe
 * of integers alone, which is what tiles of few tokens wait for, a shift may be a multiplication.
 */
static __device__ __forceinline__ uint32_t turn(uint32_t w, int n, uint32_t bits)
{
    return ((bits & ((1u << n) - 1)) == 0 ? w << n : __funnelshift_l(w, w, n)) & bits;
}

/* 5 bits: the small plane is the sign. */
template <int E> struct qt_decode_fp5 : qt_decode_field<E> {
    enum { WIDTH0 = 4, WIDTH1 = 1, WIDTH2 = 0 };
    uint32_t w4[4], w1;
    int e;

    __device__ __forceinline__ void load(const unsigned char *const src[3],
                                         const struct qt_decode_args &d)
    {
        *(uint4 *)w4 = *(const uint4 *)src[0];
        w1 = *(const uint32_t *)src[1];
        e = E ? E : (int)d.exp_bits;
    }
    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &) const
    {
        const uint32_t magnitude = 0x000f000fu << (6 + e);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t sign = turn(w1, 15 - (4 * s + i), 0x80008000);
            a[i] = (move_nibble<E>(w4[s], i, e) & magnitude) | sign;
        }
    }
};

/* 6 bits. */
template <int E> struct qt_decode_fp6 : qt_decode_field<E> {
    enum { WIDTH0 = 4, WIDTH1 = 2, WIDTH2 = 0 };
    uint32_t w4[4], w2[4];
    int e;

    __device__ __forceinline__ void load(const unsigned char *const src[3],
                                         const struct qt_decode_args &d)
    {
        *(uint4 *)w4 = *(const uint4 *)src[0];
        uint2 v = *(const uint2 *)src[1];
        split_small(v.x, &w2[0]);
        split_small(v.y, &w2[2]);
        e = E ? E : (int)d.exp_bits;
    }
    /*
     * The plane keeps the mantissa bit 7 below the sign, as E3M2 wants it: bits 8 and 15. E2M3
     * wants 8 below. Moved by one it would land on other slots' signs, so slots 0..3 and 4..7 of a
     * word go into words of their own: a rotation and two LOP3 for eight registers. Other exponents
     * take a turn for the sign and one for the mantissa bit.
     */
    static __device__ __forceinline__ void split_small(uint32_t v, uint32_t out[2])
    {
        uint32_t moved = __funnelshift_r(v, v, 1);
        out[0] = E != 2 ? v : (v & 0x00ff00ff) | (moved & 0xff00ff00);
        out[1] = E != 2 ? v : (v & 0xff00ff00) | (moved & 0x00ff00ff);
    }
    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &) const
    {
        const uint32_t high = 0x000f000fu << (6 + e), low = 0x00010001u << (5 + e);
        const uint32_t sign = 0x80008000;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int left = 14 - 2 * (4 * (s & 1) + i);
            a[i] = (move_nibble<E>(w4[s], i, e) & high) | turn(w2[s], left, E ? low | sign : sign);
            if (E == 0)
                a[i] |= __funnelshift_l(w2[s], w2[s], left + e - 3) & low;
        }
    }
};

/* 7 bits: the 2-bit plane holds mantissa bits, the 1-bit plane the sign. The mantissa bits of a
 * code are 7 places apart; moving the lower ones of a word by 8, to where other codes' were, puts
 * those of a code side by side. */
template <int E> struct qt_decode_fp7 : qt_decode_field<E> {
    enum { WIDTH0 = 4, WIDTH1 = 2, WIDTH2 = 1 };
    uint32_t w4[4], w2[2], w1;
    int e;

    __device__ __forceinline__ void load(const unsigned char *const src[3],
                                         const struct qt_decode_args &d)
    {
        *(uint4 *)w4 = *(const uint4 *)src[0];
        uint2 v = *(const uint2 *)src[1];
        w2[0] = (v.x & 0x55555555) | (__funnelshift_r(v.x, v.x, 8) & 0xaaaaaaaa);
        w2[1] = (v.y & 0x55555555) | (__funnelshift_r(v.y, v.y, 8) & 0xaaaaaaaa);
        w1 = *(const uint32_t *)src[2];
        e = E ? E : (int)d.exp_bits;
    }
    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &) const
    {
        const uint32_t high = 0x000f000fu << (6 + e), middle = 0x00030003u << (4 + e);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t w = w2[s / 2];
            uint32_t low = turn(w, 11 + e - 2 * (4 * (s & 1) + i), middle);
            uint32_t sign = turn(w1, 15 - (4 * s + i), 0x80008000);
            a[i] = (move_nibble<E>(w4[s], i, e) & high) | low | sign;
        }
    }
};

/* 8 bits: bytes at the top of both halves, else zeros. */
template <int E> struct qt_decode_fp8 : qt_decode_bytes {
    enum { GROUPED = 0, RARE = E == 0 };
    int e;

    __device__ __forceinline__ void load(const unsigned char *const src[3],
                                         const struct qt_decode_args &d)
    {
        qt_decode_bytes::load(src, d);
        e = E ? E : (int)d.exp_bits;
    }
    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &) const
    {
        const uint32_t sign = 0x80008000, magnitude = 0x007f007fu << (3 + e);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t word = w[i / 2][s];
            const uint32_t v = i & 1 ? word & 0xff00ff00 : __byte_perm(word, 0, 0x2404);
            a[i] = E == 5 ? v : (v >> (5 - e) & magnitude) | (v & sign);
        }
    }
};

#endif
