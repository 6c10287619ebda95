/*
 * The producers of the grouped product by wgmma. Three warps fill the stages: one elected thread
 * copies planes, another X, and a warp copies scales and zero-points and describes units:
 *
 *   planes          bulk copies of 64 columns of a strip
 *   X               TMA boxes of 32 tokens, 128-byte swizzle; rows are in the order of positions
 *   scales, units   cp.async, because zero-points have 8 bytes per strip and group
 *
 * What a unit needs from the table is loaded one unit ahead, its item two units ahead: a load from
 * L2 takes as long as the products of a stage or two.
 */
#ifndef QT_KERNELS_CUDA_MOE_WIDE_COPY_CUH
#define QT_KERNELS_CUDA_MOE_WIDE_COPY_CUH

#include "kernels/cuda/moe/product.cuh"
#include "kernels/cuda/moe/wide_unit.cuh"

enum {
    WIDE_BOX_BYTES = QT_MOE_WIDE_BOX * 128,
    WIDE_ARRIVALS = 2 /* that fill a stage: planes and X; scales and the unit */
};

struct wide_packed_unit : wide_unit {
    /* Row scales of the warps' strips; rows g and g + 8 are adjacent. */
    alignas(16) __half2 scale[QT_MOE_WARPS][8];
};
static_assert(sizeof(wide_packed_unit) <= QT_MOE_UNIT_BYTES, "no room");

static __device__ __forceinline__ wide_packed_unit *wide_unit_at(const qt_moe_wide_args &a,
                                                                 int number)
{
    return (wide_packed_unit *)(qt_smem + a.units_at + number % a.units * QT_MOE_UNIT_BYTES);
}

/* True if there is a scale per row, which the epilogue applies. */
template <class Format> static __device__ __forceinline__ bool row_scales(const qt_moe_wide_args &a)
{
    return !Format::GROUPED || a.group_shift == 30;
}

/* Bytes of a strip's planes in a stage. */
template <class Format> static __device__ __forceinline__ constexpr int wide_strip_bytes()
{
    return moe_strip_bytes<Format>() / 2;
}

/* The table's entry of a matrix: 0 and 1 are gate and up where they are one launch, else both the
 * one matrix. */
static __device__ __forceinline__ const qt_moe_matrix *wide_entry_of(const qt_moe_wide_args &a,
                                                                     const qt_moe_item &item, int m)
{
    return &a.table[item.expert * QT_MOE_MATRICES + a.matrix + (a.gated ? m : 0)];
}

/* The planes of both matrices. */
template <class Format> struct wide_planes {
    const unsigned char *of[2][3];

    __device__ __forceinline__ void load(const qt_moe_wide_args &a, const qt_moe_item &item)
    {
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int p = 0; p < 3; p++)
                if (qt_plane_width<Format>(p))
                    of[m][p] = wide_entry_of(a, item, m)->plane[p];
    }
    /* The planes of strip `s` of a matrix, block number `slot`, to a stage. */
    __device__ __forceinline__ void copy(const qt_moe_wide_args &a, int m, int s, int slot,
                                         uint32_t to, uint32_t bar) const
    {
        const size_t block = min(s, a.strips - 1) * a.pitch_blocks + slot;
#pragma unroll
        for (int p = 0; p < 3; p++) {
            const int bytes = 32 * qt_lane_width<Format>(p);
            if (bytes)
                ptx_copy_bulk(to, of[m][p] + block * bytes, (uint32_t)bytes, bar);
            to += bytes;
        }
    }
};

/* One thread. */
template <class Format>
static __device__ __forceinline__ void wide_produce_planes(const qt_moe_wide_args &a, qt_pipeline r,
                                                           int units)
{
    wide_walk walk(a, units);
    wide_planes<Format> planes, next;
    if (walk.more())
        planes.load(a, walk.item);
#pragma unroll 1
    for (; walk.more(); walk.advance()) {
        const uint32_t bytes = QT_MOE_WARPS * wide_strip_bytes<Format>() +
                               (uint32_t)wide_columns(walk.item.rows) * 128;
        next.load(a, walk.next);
#pragma unroll 1
        for (int slot = 0; slot < a.slots; slot++) {
            const uint32_t bar = r.full + 8 * r.stage;
            uint32_t to = ptx_shared(qt_smem) + a.weights_at + r.stage * a.stage_bytes;
            ptx_barrier_wait(r.empty + 8 * r.stage, r.parity ^ 1);
            ptx_barrier_expect(bar, bytes);
#pragma unroll
            for (int w = 0; w < QT_MOE_WARPS; w++, to += a.warp_bytes)
                planes.copy(a, wide_matrix(w), wide_strip(a, walk.tile(), w), slot, to, bar);
            qt_pipeline_advance(&r, a.stages);
        }
        planes = next;
    }
}

/* One thread. */
static __device__ __forceinline__ void wide_produce_x(const qt_moe_wide_args &a, qt_pipeline r,
                                                      int units)
{
    wide_walk walk(a, units);
#pragma unroll 1
    for (; walk.more(); walk.advance()) {
        const int first = walk.item.first, end = first + wide_columns(walk.item.rows);
#pragma unroll 1
        for (int slot = 0; slot < a.slots; slot++) {
            uint32_t to = ptx_shared(qt_smem) + a.ring_at + r.stage * a.x_bytes;
            ptx_barrier_wait(r.empty + 8 * r.stage, r.parity ^ 1);
#pragma unroll 1
            for (int row = first; row < end; row += QT_MOE_WIDE_BOX, to += WIDE_BOX_BYTES)
                ptx_copy_box(to, &a.x_map, slot * 64, row, r.full + 8 * r.stage);
            qt_pipeline_advance(&r, a.stages);
        }
    }
}

/* One warp: scales, zero-points, and what the epilogue needs of a unit. */
template <class Format> struct wide_scales {
    const qt_moe_wide_args &a;
    const int lane;
    /* The lane copies half of a group's scales of a strip; half 0: also zero-points. */
    const int strip, group, half;
    const __half *scale; /* of the strip's matrix; at the strip from open() on */
    const unsigned char *zero;
    /* A lane holds these of the matrix number lane % 2, and table and value of number lane / 16. */
    float factor;
    const float *bias;
    const __half *table;
    __half value;

    __device__ __forceinline__ wide_scales(const qt_moe_wide_args &args)
        : a(args), lane((int)threadIdx.x % 32), strip(lane / 2 / args.slot_groups),
          group(lane / 2 % args.slot_groups), half(lane % 2)
    {
    }
    /* Loads what the unit of `item` needs of the table. */
    __device__ __forceinline__ void load(const qt_moe_item &item)
    {
        const qt_moe_matrix *of_strip = wide_entry_of(a, item, wide_matrix(strip));
        scale = of_strip->scale;
        if (Format::ZEROS)
            zero = of_strip->zero;
        if (Format::LUT)
            table = wide_entry_of(a, item, lane / 16)->table;
        factor = wide_entry_of(a, item, lane % 2)->factor;
        bias = wide_entry_of(a, item, lane % 2)->bias;
    }
    __device__ __forceinline__ void load_values()
    {
        qt_decode_args decode = a.decode;
        decode.table = table;
        value = qt_lane_value<Format>(&decode);
    }
    __device__ __forceinline__ void open(const wide_walk &walk, wide_packed_unit *to)
    {
        const qt_moe_item &item = walk.item;
        if (lane == 0) {
            to->header.first = item.first;
            to->header.rows = item.rows;
            to->header.tile = walk.tile();
        }
        if (lane < QT_MOE_STRIPS) {
            to->header.factor[lane] = factor;
            to->header.bias[lane] = bias;
        }
        if (Format::LUT)
            to->header.value[lane / 16][lane % 16] = value;
        if (strip < QT_MOE_WARPS) {
            const int s = min(wide_strip(a, walk.tile(), strip), a.strips - 1);
            scale += s * a.pitch_groups * 16 + half * 8;
            if (Format::ZEROS)
                zero += s * a.pitch_groups * Format::ZEROS;
            if (row_scales<Format>(a) && group == 0)
                ptx_copy_16(ptx_shared(to->scale[strip] + half * 4), scale);
        }
        if (a.token_factor)
            for (int i = lane; i < item.rows; i += 32)
                ptx_copy_4(ptx_shared(to->token + i), a.token_factor + item.first + i);
    }
    /* unused: nothing was copied to this stage before. */
    __device__ __forceinline__ void copy(int slot, uint32_t to, bool unused) const
    {
        if (strip >= QT_MOE_WARPS)
            return;
        const size_t at = (size_t)min((slot * 64 >> a.group_shift) + group, a.groups - 1);
        to += strip * a.warp_bytes + wide_strip_bytes<Format>();
        if (row_scales<Format>(a)) { /* the mainloop multiplies by 1 */
            if (Format::GROUPED && unused)
                *(uint4 *)(qt_smem + (to - ptx_shared(qt_smem)) + half * 16) =
                    make_uint4(0x3c003c00, 0x3c003c00, 0x3c003c00, 0x3c003c00);
        } else {
            ptx_copy_16(to + group * 32 + half * 16, scale + at * 16);
        }
        if (Format::ZEROS && a.decode.zeros && half == 0) {
            to += a.slot_groups * 32 + group * Format::ZEROS;
#pragma unroll
            for (int i = 0; i < Format::ZEROS; i += 8)
                ptx_copy_8(to + i, zero + at * Format::ZEROS + i);
        }
    }
};

/* Arrives at a stage's mbarrier when all but the youngest PENDING copies of the warp are there. */
template <int PENDING> static __device__ __forceinline__ void wide_arrive(uint32_t bar)
{
    ptx_copy_wait<PENDING>();
    __syncwarp();
    if (bar && threadIdx.x % 32 == 0)
        ptx_barrier_arrive(bar);
}

/* A stage is announced when the next one has been copied, so there are at least three: consumers
 * release a stage when they have begun the next one. */
template <class Format>
static __device__ __forceinline__ void wide_produce_scales(const qt_moe_wide_args &a, qt_pipeline r,
                                                           int units)
{
    wide_walk walk(a, units);
    wide_scales<Format> now(a), next(a);
    uint32_t before = 0; /* mbarrier of the stage before; 0: none */
    int unused = a.stages;
    if (walk.more()) {
        next.load(walk.item);
        next.load_values();
    }
#pragma unroll 1
    for (; walk.more(); walk.advance()) {
        now.scale = next.scale, now.zero = next.zero, now.factor = next.factor;
        now.bias = next.bias, now.value = next.value;
        next.load(walk.next);
#pragma unroll 1
        for (int slot = 0; slot < a.slots; slot++) {
            const uint32_t bar = r.full + 8 * r.stage;
            ptx_barrier_wait(r.empty + 8 * r.stage, r.parity ^ 1);
            if (slot == 0)
                now.open(walk, wide_unit_at(a, walk.number));
            now.copy(slot, ptx_shared(qt_smem) + a.weights_at + r.stage * a.stage_bytes,
                     unused-- > 0);
            ptx_copy_commit();
            wide_arrive<1>(before);
            before = bar;
            if (Format::LUT && slot == a.slots / 2)
                next.load_values();
            qt_pipeline_advance(&r, a.stages);
        }
    }
    wide_arrive<0>(before);
}

#endif
