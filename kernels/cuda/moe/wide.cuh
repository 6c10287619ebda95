/*
 * The grouped product for experts of many tokens, sm_90a: the products of product.cuh by wgmma.
 *
 *   grid       one thread block per multiprocessor; units as in product.cuh
 *   unit       up to 128 tokens of one expert, and 128 rows of gate and of up, or 256 of down
 *   block      two consumer warpgroups, whose warps have 2 strips of 16 rows each, as in
 *              product.cuh; a producer warpgroup
 *   smem       [ look-up table | stages | results | units | mbarriers ]
 *
 *   producers:  packed planes --bulk copies--+
 *               X, scales --cp.async---------+--> a stage: 128 columns of k
 *   consumers:  packed words --> registers --> * scale, rounded to FP16 --> A fragments -+
 *               X (shared memory, 128-byte swizzle) ------------------- B ---------------+--> wgmma
 *
 * A unit multiplies 64, 96 or 128 columns of B. Those beyond the tokens of its item hold old data,
 * whose results are not stored. The route kernel makes items of a multiple of 32 tokens, the last
 * excepted.
 *
 * Traffic    packed bytes once per item (each further tile of the same expert from L2), X once per
 *            unit through L2
 */
#ifndef QT_KERNELS_CUDA_MOE_WIDE_CUH
#define QT_KERNELS_CUDA_MOE_WIDE_CUH

#include "kernels/cuda/common/token_scale.cuh"
#include "kernels/cuda/matmul/tile.cuh"
#include "kernels/cuda/moe/product.cuh"

enum {
    WIDE_TOKENS = QT_MOE_WIDE_TOKENS,
    WIDE_BLOCK_BYTES = WIDE_TOKENS * 128, /* of X: 64 columns */
    WIDE_X_BYTES = 2 * WIDE_BLOCK_BYTES,
    WIDE_PRODUCERS = QT_MOE_WIDE_THREADS - MOE_THREADS,
    WIDE_ARRIVALS = WIDE_PRODUCERS / 32 + 1, /* that fill a stage */
    WIDE_WARPGROUP = MOE_BARRIERS,           /* the first of two named barriers */
    /* Registers per thread. */
    WIDE_COPY_REGISTERS = 40,
    WIDE_REGISTERS = 232
};

/* The consumers read this about a unit. The producers are at most QT_MOE_STAGES units ahead. */
struct wide_unit {
    moe_header header;
    float token[WIDE_TOKENS]; /* factors of the tokens */
    /* Row scales of strip u of warp w, number 2 w + u; rows g and g + 8 are adjacent. */
    alignas(16) __half2 scale[QT_MOE_WARPS * QT_MOE_STRIPS][8];
};
static_assert(sizeof(wide_unit) <= QT_MOE_UNIT_BYTES && (int)QT_MOE_UNITS > (int)QT_MOE_STAGES,
              "no room");

static __device__ __forceinline__ wide_unit *wide_unit_at(const qt_moe_product_args &a, int number)
{
    return (wide_unit *)(qt_smem + a.units_at + number % QT_MOE_UNITS * QT_MOE_UNIT_BYTES);
}

/* Offset of strip number s of the thread block (u = s % 2 of warp s / 2) in the weights of a
 * stage. */
template <class Format>
static __device__ __forceinline__ uint32_t wide_strip_at(const qt_moe_product_args &a, int s)
{
    return (uint32_t)(s / 2 * a.warp_bytes + s % 2 * moe_strip_bytes<Format>());
}

/* Orders this thread's accesses to shared memory before later ones by wgmma, also those of threads
 * that synchronize with it. */
PTX void ptx_fence_async()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* True if there is a scale per row, which the epilogue applies. */
template <class Format>
static __device__ __forceinline__ bool row_scales(const qt_moe_product_args &a)
{
    return !Format::GROUPED || a.group_shift == 30;
}

/* ---- producers ----------------------------------------------------------------------------------
 *
 * Every thread has one row of X in a register, whose number the warp shuffles: row 8 i + 2 w + j in
 * lane 2 i + j of warp w. A warp copies 256 bytes of two rows at a time.
 *
 * wgmma reads X through the async proxy: a thread announces what it copied with cp.async only after
 * the copies have arrived, by a fence and an mbarrier, which is one stage later.
 */
template <class Format> struct wide_producer {
    const qt_moe_product_args &a;
    const int thread, lane, warp;
    qt_pipeline r;
    uint32_t full; /* mbarrier of the stage that is not announced yet; 0: none */
    qt_moe_item item;
    int row;                       /* of X: the thread's */
    const unsigned char *plane[3]; /* of the thread's strip (threads 0 to 15) */
    const unsigned char *zero;     /* of the strip whose scales the thread copies */
    const __half *scale;

    __device__ __forceinline__ wide_producer(const qt_moe_product_args &args, const qt_pipeline &p)
        : a(args), thread((int)threadIdx.x - MOE_THREADS), lane(thread % 32), warp(thread / 32),
          r(p), full(0)
    {
    }
    __device__ __forceinline__ int strip_number(int tile, int s) const
    {
        const int strip =
            a.gated ? tile * QT_MOE_WARPS + s / 2 : tile * (QT_MOE_WARPS * QT_MOE_STRIPS) + s;
        return min(strip, a.strips - 1);
    }
    __device__ __forceinline__ const qt_moe_matrix *matrix(int u) const
    {
        return &a.table[item.expert * QT_MOE_MATRICES + a.matrix + (a.gated ? u : 0)];
    }
    __device__ __forceinline__ int scale_strip() const
    {
        return thread >> (a.slot_groups >> 1);
    }
    __device__ __forceinline__ void open(int unit, wide_unit *to)
    {
        item = moe_item(a, unit / a.row_tiles);
        const int tile = unit % a.row_tiles, of_thread = lane / 2 * 8 + warp * 2 + lane % 2;
        const int at = item.first + min(of_thread, item.rows - 1);
        row = moe_row(a, at);
        to->token[of_thread] = a.token_factor ? a.token_factor[row] : 1;
        if (thread < QT_MOE_STRIPS) {
            to->header.factor[thread] = matrix(thread)->factor;
            to->header.bias[thread] = matrix(thread)->bias;
        }
        if (thread == 0) {
            to->header.first = item.first;
            to->header.rows = item.rows;
            to->header.tile = tile;
        }
        if (Format::LUT && warp < QT_MOE_STRIPS) {
            qt_decode_args decode = a.decode;
            decode.table = matrix(warp)->table;
            const __half value = qt_lane_value<Format>(&decode);
            if (lane < 16)
                to->header.value[warp][lane] = value;
        }
        if (thread < QT_MOE_WARPS * QT_MOE_STRIPS)
#pragma unroll
            for (int p = 0; p < 3; p++)
                if (qt_plane_width<Format>(p))
                    plane[p] =
                        matrix(thread % 2)->plane[p] + strip_number(tile, thread) * a.pitch_blocks *
                                                           (size_t)(32 * qt_lane_width<Format>(p));
        if (scale_strip() < QT_MOE_WARPS * QT_MOE_STRIPS) {
            const qt_moe_matrix *m = matrix(scale_strip() % 2);
            const size_t first = strip_number(tile, scale_strip()) * a.pitch_groups;
            scale = m->scale + first * 16;
            if (row_scales<Format>(a)) {
                uint4 *of_strip = (uint4 *)to->scale[scale_strip()];
                of_strip[0] = ((const uint4 *)scale)[0];
                of_strip[1] = ((const uint4 *)scale)[1];
            }
            if (Format::ZEROS)
                zero = m->zero + first * Format::ZEROS;
        }
    }
    __device__ __forceinline__ void copy_planes(int slot, uint32_t to, uint32_t bar) const
    {
        const int blocks = min(a.blocks - slot * 2, 2);
        if (thread == 0)
            ptx_barrier_expect(bar, (uint32_t)(QT_MOE_WARPS * QT_MOE_STRIPS * blocks *
                                               (moe_strip_bytes<Format>() / 2)));
        __syncwarp();
        if (thread >= QT_MOE_WARPS * QT_MOE_STRIPS)
            return;
        to += wide_strip_at<Format>(a, thread);
#pragma unroll
        for (int p = 0; p < 3; p++) {
            const int bytes = 32 * qt_lane_width<Format>(p); /* of a block */
            if (bytes)
                ptx_copy_bulk(to, plane[p] + (size_t)slot * (2 * bytes), (uint32_t)(blocks * bytes),
                              bar);
            to += 2 * bytes;
        }
    }
    __device__ __forceinline__ void copy_scales(int slot, uint32_t to) const
    {
        const int s = scale_strip(), j = thread & (a.slot_groups - 1);
        if (s >= QT_MOE_WARPS * QT_MOE_STRIPS)
            return;
        const size_t group = (size_t)min((slot * 128 >> a.group_shift) + j, a.groups - 1);
        const int place = s % 2 * a.slot_groups + j;
        to += s / 2 * a.warp_bytes + QT_MOE_STRIPS * moe_strip_bytes<Format>();
        if (row_scales<Format>(a)) { /* the mainloop multiplies by 1 */
            uint4 *const ones = (uint4 *)(qt_smem + (to - ptx_shared(qt_smem)) + place * 32);
            ones[0] = ones[1] = make_uint4(0x3c003c00, 0x3c003c00, 0x3c003c00, 0x3c003c00);
        } else {
            ptx_copy_16(to + place * 32, scale + group * 16);
            ptx_copy_16(to + place * 32 + 16, scale + group * 16 + 8);
        }
        if (Format::ZEROS && a.decode.zeros) {
            const unsigned char *from = zero + group * Format::ZEROS;
            to += QT_MOE_STRIPS * a.slot_groups * 32 + place * Format::ZEROS;
            if (Format::ZEROS == 8) {
                ptx_copy_4(to, from);
                ptx_copy_4(to + 4, from + 4);
            } else {
                ptx_copy_8(to, from);
                ptx_copy_8(to + 8, from + 8);
            }
        }
    }
    __device__ __forceinline__ void copy_x(int slot, uint32_t to) const
    {
        const int chunk = lane % 16, row8 = warp * 2 + lane / 16; /* row8: rows modulo 8 */
        const int column = slot * 128 + chunk * 8;
        const uint32_t bytes = (uint32_t)max(min((a.k - column) * 2, 16), 0);
        const __half *from = a.x + (bytes ? column : 0);
        to += chunk / 8 * WIDE_BLOCK_BYTES + row8 * 128 + (chunk % 8 ^ row8) * 16;
#pragma unroll 4
        for (int i = 0; i * 8 < item.rows; i++) {
            const int of = __shfl_sync(~0u, row, i * 2 + lane / 16);
            ptx_copy_16_zero(to + i * 1024, from + (size_t)of * a.x_pitch, bytes);
        }
    }
    /* Announces the stage before, when all but the youngest PENDING copies have arrived. */
    template <int PENDING> __device__ __forceinline__ void announce()
    {
        ptx_copy_wait<PENDING>();
        ptx_fence_async();
        __syncwarp();
        if (full && lane == 0)
            ptx_barrier_arrive(full);
    }
    __device__ __forceinline__ void run(int units)
    {
        int number = 0;
#pragma unroll 1
        for (int unit = (int)blockIdx.x; unit < units; unit += (int)gridDim.x, number++) {
#pragma unroll 1
            for (int slot = 0; slot < a.slots; slot++) {
                const uint32_t to = ptx_shared(qt_smem) + a.ring_at + r.stage * a.stage_bytes;
                const uint32_t bar = r.full + 8 * r.stage;
                ptx_barrier_wait(r.empty + 8 * r.stage, r.parity ^ 1);
                if (slot == 0)
                    open(unit, wide_unit_at(a, number));
                if (warp == 0)
                    copy_planes(slot, to + WIDE_X_BYTES, bar);
                copy_scales(slot, to + WIDE_X_BYTES);
                copy_x(slot, to);
                ptx_copy_commit();
                announce<1>();
                full = bar;
                qt_pipeline_advance(&r, a.stages);
            }
        }
        announce<0>();
    }
};

/* ---- formats --------------------------------------------------------------------------------
 *
 * For 4-bit integers one instruction of four per register is saved: fragments are the integers
 * themselves, not 2^-QT_INT4_EXP2 of them, so that one multiplication by 2^SCALE_EXP2 * scale
 * rounds to the same units as QT_INT4_ROUND_EXP2 does. A nibble in the low bits of FP16 1024 adds
 * to it (one in bits 4 to 7 adds to 64, after the division by 16); one instruction subtracts that
 * and the zero-point.
 */
struct wide_int4 : qt_decode_int4 {
    enum { SCALE_EXP2 = QT_INT4_ROUND_EXP2 - QT_INT4_EXP2 };

    static __device__ __forceinline__ uint32_t nibbles(uint32_t v, uint32_t mask, uint32_t magic)
    {
        uint32_t d;
        asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(v), "r"(mask), "r"(magic));
        return d;
    }
    /* minus[0]: minus 1024 and the zero-point, of rows g; minus[1]: minus 64 and it, rows g + 8 */
    __device__ __forceinline__ void integers(uint32_t a[4], int s, const uint32_t minus[2]) const
    {
        uint32_t magic = 0x64006400; /* in a register: LOP3 takes one constant */
        asm("" : "+r"(magic));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t v = i < 2 ? w[s] : w[s] >> 8;
            a[i] = i & 1 ? ptx_fma_half2(nibbles(v, 0x00f000f0, magic), 0x2c002c00, minus[1])
                         : ptx_add_half2(nibbles(v, 0x000f000f, magic), minus[0]);
        }
    }
    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &) const
    {
        const uint32_t minus[2] = {0xe408e408, 0xd480d480}; /* -1032, -72 */
        integers(a, s, minus);
    }
};

struct wide_int4_zero : wide_int4 {
    enum { ZEROS = 8 };
    uint32_t minus[2];

    __device__ __forceinline__ void set_zeros(uint32_t zeros)
    {
        minus[0] = 0xe400e400 + (zeros & 15) * 0x00010001;
        minus[1] = 0xd400d400 + (zeros >> 4) * 0x00100010;
    }
    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &) const
    {
        integers(a, s, minus);
    }
};

/* The exponent by which scales are multiplied instead of fragments. */
template <class Format> static __device__ __forceinline__ constexpr int wide_scale_exp2()
{
    return 0;
}
template <> __device__ __forceinline__ constexpr int wide_scale_exp2<wide_int4>()
{
    return wide_int4::SCALE_EXP2;
}
template <> __device__ __forceinline__ constexpr int wide_scale_exp2<wide_int4_zero>()
{
    return wide_int4::SCALE_EXP2;
}

/* Multiplies fragments by the scales of rows g and g + 8 as tile_scale_weights does. */
template <class Format>
static __device__ __forceinline__ void wide_scale(uint32_t f[4][4], const __half2 scale[2])
{
    if constexpr (wide_scale_exp2<Format>() == 0) {
        tile_scale_weights<Format, 4>(f, scale);
    } else {
        const __half2 power = tile_power(wide_scale_exp2<Format>());
        const __half2 scaled[2] = {__hmul2(scale[0], power), __hmul2(scale[1], power)};
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const __half2 of_rows = scaled[i / 8];
            const __half2 v = __hmul2(*(const __half2 *)&f[i / 4][i % 4],
                                      i % 2 ? __high2half2(of_rows) : __low2half2(of_rows));
            f[i / 4][i % 4] = *(const uint32_t *)&v;
        }
    }
}

/* ---- mainloop ------------------------------------------------------------------------------- */

/* Where the groups of a stage are, in bytes: at[c] of columns 32 c to 32 c + 31 in the scales of a
 * strip. The asm keeps them in registers. */
struct wide_groups {
    uint32_t at[4], strip;

    __device__ __forceinline__ wide_groups(const qt_moe_product_args &a)
    {
        strip = a.slot_groups * 32;
#pragma unroll
        for (int c = 0; c < 4; c++)
            at[c] = c >> (2 - (a.slot_groups >> 1)) << 5;
        asm volatile("" : "+r"(strip), "+r"(at[1]), "+r"(at[2]), "+r"(at[3]));
    }
};

/* A lane reads this of a strip's block of 64 columns. */
template <class Format> struct wide_block {
    Format words;
    __half2 scale[2];  /* of the first and the last 32 columns */
    uint32_t zeros[2]; /* as scale */

    /* weights: of the warp in the stage. */
    __device__ __forceinline__ void load(const qt_moe_product_args &a, const unsigned char *weights,
                                         const wide_groups &groups, int block, int u)
    {
        const int lane = (int)threadIdx.x % 32;
        const unsigned char *src[3], *at = weights + u * moe_strip_bytes<Format>();
#pragma unroll
        for (int p = 0; p < 3; p++) {
            src[p] = at + (block * 32 + lane) * qt_lane_width<Format>(p);
            at += 64 * qt_lane_width<Format>(p);
        }
        words.load(src, a.decode);
        if (!Format::GROUPED)
            return;
        at = weights + QT_MOE_STRIPS * moe_strip_bytes<Format>();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t group = (u ? groups.strip : 0) + groups.at[2 * block + i];
            scale[i] = *(const __half2 *)(at + group + lane / 4 * 4);
            if (Format::ZEROS)
                zeros[i] = qt_lane_zeros<Format>(a.decode, at + QT_MOE_STRIPS * groups.strip +
                                                               group / 32 * Format::ZEROS);
        }
    }
    __device__ __forceinline__ void fragments(uint32_t f[4][4], const qt_lane &lane)
    {
#pragma unroll
        for (int s = 0; s < 4; s++) {
            if (Format::ZEROS && s % 2 == 0)
                words.set_zeros(zeros[s / 2]);
            words.fragment(f[s], s, lane);
        }
        if (Format::GROUPED)
            wide_scale<Format>(f, scale);
    }
};

/* v[u] holds the sums of strip u, [tokens / 8][4]: rows g and g + 8 of tokens 2t and 2t + 1. */
struct wide_sums {
    float v[QT_MOE_STRIPS][WIDE_TOKENS / 2];
};

/* Multiplies a unit by N columns of B. The first stage has arrived. As in
 * tile_accumulate, the fragments of a block are computed while the products of the block before
 * run. */
template <class Format, int N>
static __device__ __forceinline__ void wide_multiply(wide_sums *sums, const qt_moe_product_args &a,
                                                     qt_pipeline *r,
                                                     const moe_tables<Format> &tables)
{
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const unsigned char *const weights = qt_smem + a.ring_at + WIDE_X_BYTES + warp * a.warp_bytes;
    uint32_t frag[2][4][4] = {}, release = 0;
    const wide_groups groups(a);
    wide_block<Format> next;
    next.load(a, weights + r->stage * a.stage_bytes, groups, 0, 0);
#pragma unroll 1
    for (int slot = 0; slot < a.slots; slot++) {
        const unsigned char *const now = weights + r->stage * a.stage_bytes;
        const uint32_t b = ptx_wgmma_b(ptx_shared(qt_smem) + a.ring_at + r->stage * a.stage_bytes);
        const uint32_t used = r->empty + 8 * r->stage;
        const bool two = a.blocks - slot * 2 > 1;
        qt_pipeline_advance(r, a.stages);
#pragma unroll
        for (int i = 0; i < 4; i++) { /* block i / 2 of strip i % 2 */
            if (i == 2 && !two)
                break;
            uint32_t(&f)[4][4] = frag[i % 2];
            next.fragments(f, tables.lane[i % 2]);
            ptx_wgmma_fence();
            ptx_wgmma<N>::run(sums->v[i % 2], f, b + i / 2 * (WIDE_BLOCK_BYTES / 16));
            ptx_wgmma_commit();
            if (i == 0 || i == 2 || (i == 1 && two)) {
                next.load(a, now, groups, (i + 1) / 2, (i + 1) % 2);
            } else if (slot + 1 < a.slots) {
                ptx_barrier_wait(r->full + 8 * r->stage, r->parity);
                next.load(a, weights + r->stage * a.stage_bytes, groups, 0, 0);
            }
            ptx_wgmma_wait<1>();
            tile_keep_registers<4>(frag[(i + 1) % 2]);
            if (i == 0 && release && lane == 0)
                ptx_barrier_arrive(release);
        }
        release = used;
    }
    ptx_wgmma_wait<0>();
#pragma unroll
    for (int u = 0; u < QT_MOE_STRIPS; u++) {
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            asm volatile("" : "+f"(sums->v[u][i])::"memory");
        tile_keep_registers<4>(frag[u]);
    }
    if (lane == 0)
        ptx_barrier_arrive(release);
}

/* ---- epilogue ------------------------------------------------------------------------------- */

static __device__ __forceinline__ float wide_exp2(float x)
{
    float d;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}

/* g * sigmoid(g) */
static __device__ __forceinline__ float wide_silu(float g)
{
    return g * ptx_reciprocal(1 + wide_exp2(g * -1.44269504f));
}

template <class Format> struct wide_epilogue {
    const qt_moe_product_args &a;
    const wide_unit &unit;
    wide_sums &sums;
    int lane, warp;

    __device__ __forceinline__ int row(int u) const
    {
        return moe_strip(a, unit.header.tile, u) * 16 + lane / 4;
    }
    /* Multiplies by all factors and adds the bias. */
    __device__ __forceinline__ void finish()
    {
        float2 factor[QT_MOE_STRIPS], bias[QT_MOE_STRIPS];
#pragma unroll
        for (int u = 0; u < QT_MOE_STRIPS; u++) {
            const float *b = unit.header.bias[u];
            const float f =
                unit.header.factor[u] * (Format::GROUPED ? qt_pow2(-Format::ROUND_EXP2) : 1);
            factor[u] = make_float2(f, f);
            if (row_scales<Format>(a)) {
                const float2 of_rows =
                    __half22float2(unit.scale[warp * QT_MOE_STRIPS + u][lane / 4]);
                factor[u] = make_float2(of_rows.x * f, of_rows.y * f);
            }
            bias[u].x = b && row(u) < a.n ? b[row(u)] : 0;
            bias[u].y = b && row(u) + 8 < a.n ? b[row(u) + 8] : 0;
        }
        const bool plain = !a.token_factor && !unit.header.bias[0] && !unit.header.bias[1];
#pragma unroll
        for (int t = 0; t < WIDE_TOKENS / 8; t++) {
            if (t * 8 >= unit.header.rows)
                break;
            if (plain) {
#pragma unroll
                for (int u = 0; u < QT_MOE_STRIPS; u++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        sums.v[u][4 * t + i] *= i < 2 ? factor[u].x : factor[u].y;
                continue;
            }
            const float2 token = *(const float2 *)&unit.token[t * 8 + lane % 4 * 2];
#pragma unroll
            for (int u = 0; u < QT_MOE_STRIPS; u++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float *v = &sums.v[u][4 * t + i];
                    *v = *v * ((i < 2 ? factor[u].x : factor[u].y) * (i % 2 ? token.y : token.x)) +
                         (i < 2 ? bias[u].x : bias[u].y);
                }
        }
    }
    /* The activation of gate times up, to the place of gate. */
    __device__ __forceinline__ void activate()
    {
        const bool silu = a.slope == 1 && a.cubic == 0 && a.offset == 0;
#pragma unroll
        for (int t = 0; t < WIDE_TOKENS / 8; t++) {
            if (t * 8 >= unit.header.rows)
                break;
#pragma unroll
            for (int i = 4 * t; i < 4 * t + 4; i++)
                sums.v[0][i] = silu ? wide_silu(sums.v[0][i]) * sums.v[1][i]
                                    : moe_gated(a, sums.v[0][i], sums.v[1][i]);
        }
    }
    /* Gate alone: multiplies the activation by the results of up. Up alone: stores FP32. */
    __device__ __forceinline__ void alone()
    {
#pragma unroll
        for (int t = 0; t < WIDE_TOKENS / 8; t++) {
            if (t * 8 >= unit.header.rows)
                break;
#pragma unroll
            for (int u = 0; u < QT_MOE_STRIPS; u++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int token = t * 8 + lane % 4 * 2 + i % 2, at = row(u) + i / 2 * 8;
                    const size_t to = (size_t)(unit.header.first + token) * a.y_pitch + at;
                    float *v = &sums.v[u][4 * t + i];
                    if (token >= unit.header.rows || at >= a.n)
                        continue;
                    if (a.up)
                        *v = moe_gated(a, *v, a.up[to]);
                    else
                        ((float *)a.y)[to] = *v;
                }
        }
    }
    /* Stores strips u of the warps, rounded to 16 bits, through shared memory: see tile_store. */
    __device__ __forceinline__ void store(int u) const
    {
        const int thread = (int)threadIdx.x % 128, group = warp / 4;
        const uint32_t at = ptx_shared(qt_smem) + a.results_at + group * QT_TILE_RESULT_BYTES;
        const uint32_t to =
            at + (lane / 16 * 8 + lane % 8) * 128 + ((warp % 4 * 2 + lane / 8 % 2) ^ lane % 8) * 16;
        const uint32_t from = at + thread / 8 * 128 + (thread % 8 ^ thread / 8 % 8) * 16;
        const int wn = group * 4 + thread % 8 / 2; /* the warp of the rows that the thread stores */
        const int strip = a.gated ? unit.header.tile * QT_MOE_WARPS + wn
                                  : (unit.header.tile * QT_MOE_WARPS + wn) * QT_MOE_STRIPS + u;
        const int first = strip * 16 + thread % 2 * 8, rows = max(0, a.n - first);
        char *y = (char *)a.y + ((size_t)(unit.header.first + thread / 8) * a.y_pitch + first) * 2;
#pragma unroll
        for (int t = 0; t < WIDE_TOKENS / 8; t += 2) {
            if (t * 8 >= unit.header.rows)
                break;
            uint32_t four[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                four[i] =
                    qt_round_two(a.bf16, sums.v[u][4 * t + 2 * i], sums.v[u][4 * t + 2 * i + 1]);
            const uint4 line = ptx_transpose_16(WIDE_WARPGROUP + group, to, four, from);
            ptx_store_halves(y + (size_t)t * 16 * a.y_pitch, line,
                             t * 8 + thread / 8 < unit.header.rows ? rows : 0, a.whole_stores);
        }
    }
    __device__ __forceinline__ void run()
    {
        finish();
        if (a.gated)
            activate();
        if (Format::TABLE_BYTES > 0 && !a.gated && (a.up || !a.rounded)) {
            alone();
            if (!a.up)
                return;
        }
        store(0);
        if (!a.gated)
            store(1);
    }
};

/* ---- kernel --------------------------------------------------------------------------------- */

template <class Format>
static __device__ __forceinline__ void wide_consume(const qt_moe_product_args &a, qt_pipeline r,
                                                    int units)
{
    moe_tables<Format> tables;
    int number = 0;
#pragma unroll 1
    for (int unit = (int)blockIdx.x; unit < units; unit += (int)gridDim.x, number++) {
        ptx_barrier_wait(r.full + 8 * r.stage, r.parity);
        const wide_unit &of = *wide_unit_at(a, number);
        wide_sums sums = {};
        tables.start(&of.header);
        if (of.header.rows <= 64)
            wide_multiply<Format, 64>(&sums, a, &r, tables);
        else if (of.header.rows <= 96)
            wide_multiply<Format, 96>(&sums, a, &r, tables);
        else
            wide_multiply<Format, 128>(&sums, a, &r, tables);
        wide_epilogue<Format>{a, of, sums, (int)threadIdx.x % 32, (int)threadIdx.x / 32}.run();
    }
}

template <class Format>
__global__ void __launch_bounds__(QT_MOE_WIDE_THREADS, 1)
    qt_moe_wide_kernel(const __grid_constant__ qt_moe_product_args a)
{
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    const qt_pipeline r = qt_pipeline_make(ptx_shared(qt_smem) + a.barriers_at);
    if (threadIdx.x == 0) {
        qt_pipeline_init_barriers(r.full, 0, WIDE_ARRIVALS);
        qt_pipeline_init_barriers(r.empty, 0, QT_MOE_WARPS);
        ptx_barrier_init_fence();
    }
    __syncthreads();
    ptx_wait_previous();
    ptx_launch_dependents();
    const int units = moe_items(a) * a.row_tiles;
    if (warp >= QT_MOE_WARPS) {
        ptx_setmaxnreg_dec<WIDE_COPY_REGISTERS>();
        wide_producer<Format>(a, r).run(units);
    } else {
        ptx_setmaxnreg_inc<WIDE_REGISTERS>();
        wide_consume<Format>(a, r, units);
    }
}

#endif
