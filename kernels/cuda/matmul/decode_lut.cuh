/* Dequantization of 2- to 4-bit codes by look-up, in shared memory or in registers (look-up tables
 * of value pairs as in FLUTE, arXiv 2407.10960). */
#ifndef QT_KERNELS_CUDA_MATMUL_DECODE_LUT_CUH
#define QT_KERNELS_CUDA_MATMUL_DECODE_LUT_CUH

#include "kernels/cuda/matmul/decode_format.cuh"

/* ---- values in registers ------------------------------------------------------------------------
 *
 * The FP16 values of up to eight codes are four registers of bytes. PRMT selects a byte by a
 * nibble; four PRMT produce two operand registers. This takes more instructions than a table, but
 * no shared-memory reads.
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
    if (codes == 4) /* saves two registers */
        lane->low[1] = lane->low[0], lane->high[1] = lane->high[0];
}

/* The two A registers of the four low nibbles. */
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

/* 3 bits: a 2-bit and a 1-bit plane. */
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
    /* Step s: two() has the 2-bit plane in bits 0 and 1 of the nibbles, one() the 1-bit plane in
     * bit 2. The other bits are undefined. */
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
    /* Step s: the codes in bits 0 and 1 of the nibbles. The upper two bits are undefined. */
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

/* ---- tables of pairs ----------------------------------------------------------------------------
 *
 * The two codes of an A register are the nibbles of a byte, which indexes a table of FP16x2 values.
 * Each lane has its own copy of the table: entry e is the 128- or 256-byte line e, and lane l reads
 * word l of the line. Look-ups therefore have no bank conflicts.
 */

/* Two threads fill an entry, with 16 copies each in 16-byte stores, rotated against bank conflicts.

 */
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

/* The address of an entry is one shift and one (x & mask) | lane. */
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

/* 4 bits with a small table, for thread blocks that run too short to fill a large one: one entry
 * per code; the values of two codes are combined. */
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

/* ---- wide tables --------------------------------------------------------------------------------
 *
 * Tables of pairs with lines of 256 bytes, for devices with enough shared memory: a PRMT of the
 * code byte and the lane's offset is the address.
 */
static __device__ __forceinline__ const unsigned char *wide_entry(uint32_t entries, int i,
                                                                  const qt_lane &lane)
{
    return qt_smem + __byte_perm(entries, lane.bytes, 0x5504 | i << 4); /* bytes 0, 0, entry i, lane
                                                                           offset */
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

/* qt_decode_wide4 for tile kernels. The address arithmetic (see tile_accumulate) is written
 * differently, which makes the assembler schedule better: 0.98 of the time for 32 to 256 tokens. */
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

/* ---- tables of steps ----------------------------------------------------------------------------
 *
 * Codes of 2 and 3 bits leave undefined bits in a byte. These wide tables have an entry for each of
 * the 256 byte values, so words need no mask. An entry has two pairs, 128 bytes apart: one for even
 * k-steps, and one for odd k-steps, whose codes are in higher bits of the nibbles, so words need no
 * shift either.
 */

/* Four threads fill an entry, as in pair_fill. */
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

    /* Nibbles of even steps, from the top: [undefined | 1-bit plane | 2-bit plane]; of odd steps:
     * [2-bit plane | 1-bit plane | undefined]. */
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

/* 2 bits: the first LOOKED_UP k-steps use the table, with two steps sharing addresses; the others
 * use values in registers. Shared-memory bandwidth is the limit for 2-bit look-ups. */
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

/* ---- mixed --------------------------------------------------------------------------------------
 *
 * For tile kernels: table look-ups are limited by shared memory, which also serves X, and PRMTs by
 * the integer pipe. These formats use each method for half of the k-steps.
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

/* Four threads fill an entry: two codes of step 0 and two of step 1 as FP16x4. */
template <class Format>
static __device__ __forceinline__ void quad_fill(const qt_lane &lane, int threads)
{
    for (int i = (int)threadIdx.x; i < 4 * Format::TABLE_BYTES / Format::LINE_BYTES; i += threads) {
        const uint32_t entry = (uint32_t)i / 4;
        uint32_t v[4]; /* v[0] of step 0, v[2] of step 1 */
        value_fragment(v, (entry & 0x33) | (entry & 0xcc) << 14, lane);
        uint4 *dst = (uint4 *)(qt_smem + entry * Format::LINE_BYTES + i % 4 * 64);
#pragma unroll
        for (int j = 0; j < 4; j++)
            dst[(j + i / 2) & 3] = make_uint4(v[0], v[2], v[0], v[2]);
    }
}

/* A byte holds two codes of step 0 and two of step 1, and indexes a table of FP16x4; lane l reads
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

#endif
