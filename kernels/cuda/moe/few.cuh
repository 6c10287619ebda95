/*
 * The grouped product for experts of few tokens, sm_90a: units, stages and mainloop are those of
 * product.cuh. There every warp copies its part of a stage; here two further warps copy all of it,
 * and the eight only multiply: copies are a quarter of the instructions of a stage, and warps that
 * wait for each other at every stage issue seldom.
 *
 *   one warp:     planes --bulk copies--+
 *                 scales --cp.async-----+--> a stage --full mbarrier--> 8 warps
 *   another one:  X ------cp.async------+       ^-----empty mbarrier------+
 *
 *   smem       [ look-up table | pipeline stages | sums of warps along k | mbarriers ]
 */
#ifndef QT_KERNELS_CUDA_MOE_FEW_CUH
#define QT_KERNELS_CUDA_MOE_FEW_CUH

#include "kernels/cuda/moe/product.cuh"

/* ---- producers ------------------------------------------------------------------------------ */

/* Arrivals that fill a stage: the bytes of planes; scales and X, by each lane. */
enum { MOE_FULL_ARRIVALS = 1 + 2 * 32 };

/* The stage that a producer warp fills next. */
struct moe_filling {
    const qt_moe_product_args &a;
    const int units;
    int unit, slot;
    qt_moe_item item;
    qt_pipeline r;

    __device__ __forceinline__ moe_filling(const qt_moe_product_args &args, const qt_pipeline &ring,
                                           int count)
        : a(args), units(count), unit((int)blockIdx.x), slot(0), r(ring)
    {
    }
    __device__ __forceinline__ bool more() const
    {
        return unit < units;
    }
    __device__ __forceinline__ uint32_t full() const
    {
        return r.full + 8 * r.stage;
    }
    /* Waits until the stage is empty. Returns whether a unit begins, whose item is then known. */
    __device__ __forceinline__ bool begin()
    {
        ptx_barrier_wait(r.empty + 8 * r.stage, r.parity ^ 1);
        if (slot == 0)
            item = moe_item(a, unit / a.row_tiles);
        return slot == 0;
    }
    __device__ __forceinline__ void end()
    {
        qt_pipeline_advance(&r, a.stages);
        if (++slot == a.slots) {
            slot = 0;
            unit += (int)gridDim.x;
        }
    }
};

/* Lane l copies the planes of strip l of a stage (16 of 8 warps), and half of the scales of strip
 * l / 2. */
template <class Format, int BM> struct moe_weights {
    moe_filling at;
    const int lane;
    const unsigned char *plane[3]; /* of the unit's first stage */
    const unsigned char *zero;
    const __half *scale;

    __device__ __forceinline__ moe_weights(const qt_moe_product_args &a, const qt_pipeline &ring,
                                           int units)
        : at(a, ring, units), lane((int)threadIdx.x % 32)
    {
    }
    __device__ __forceinline__ const qt_moe_matrix *matrix(int u) const
    {
        return &at.a.table[at.item.expert * QT_MOE_MATRICES + at.a.matrix + (at.a.gated ? u : 0)];
    }
    /* Strip number s of a stage in the matrix. */
    __device__ __forceinline__ size_t strip(int s) const
    {
        const int of = moe_strip_of(at.a, at.unit % at.a.row_tiles, s / 2, s % 2);
        return (size_t)min(of, at.a.strips - 1);
    }
    /* The first block of warp w in the stage. */
    __device__ __forceinline__ int block(int w) const
    {
        return ((at.slot << at.a.log2_wk) + (w & ((1 << at.a.log2_wk) - 1))) * 2;
    }
    __device__ __forceinline__ void open(moe_header *h)
    {
        const int s = lane % 16;
        const qt_moe_matrix *m = matrix(s % 2);
#pragma unroll
        for (int p = 0; p < 3; p++)
            if (qt_plane_width<Format>(p))
                plane[p] = m->plane[p] + (strip(s) * at.a.pitch_blocks + block(s / 2)) *
                                             (size_t)(32 * qt_lane_width<Format>(p));
        m = matrix(lane / 2 % 2);
        scale = m->scale + strip(lane / 2) * at.a.pitch_groups * 16 + lane % 2 * 8;
        if (Format::ZEROS)
            zero = m->zero + strip(lane / 2) * at.a.pitch_groups * Format::ZEROS +
                   lane % 2 * (Format::ZEROS / 2);
        if (lane == 0)
            *(int4 *)h = make_int4(at.item.first, at.item.rows, at.unit % at.a.row_tiles, 0);
        if (lane < QT_MOE_STRIPS) {
            h->factor[lane] = matrix(lane)->factor;
            h->bias[lane] = matrix(lane)->bias;
        }
        if (Format::LUT)
#pragma unroll
            for (int u = 0; u < QT_MOE_STRIPS; u++) {
                qt_decode_args decode = at.a.decode;
                decode.table = matrix(u)->table;
                const __half value = qt_lane_value<Format>(&decode);
                if (lane < 16)
                    h->value[u][lane] = value;
            }
    }
    __device__ __forceinline__ void copy_planes(uint32_t to)
    {
        const int left = min(at.a.blocks - block(lane % 16 / 2), 2);
        to += lane / 2 * at.a.warp_bytes + lane % 2 * moe_strip_bytes<Format>();
#pragma unroll
        for (int p = 0; p < 3; p++) {
            const int bytes = 32 * qt_lane_width<Format>(p); /* of a block */
            if (bytes == 0)
                continue;
            if (lane < 16 && left > 0)
                ptx_copy_bulk(to, plane[p], (uint32_t)(left * bytes), at.full());
            plane[p] += 2 * bytes << at.a.log2_wk;
            to += 2 * bytes;
        }
    }
    __device__ __forceinline__ void copy_scales(uint32_t to) const
    {
        const int first = block(lane / 4) * 64 >> at.a.group_shift, u = lane / 2 % 2;
        to += lane / 4 * at.a.warp_bytes + QT_MOE_STRIPS * moe_strip_bytes<Format>();
        const uint32_t zeros = to + QT_MOE_STRIPS * at.a.slot_groups * 32 +
                               u * at.a.slot_groups * Format::ZEROS +
                               lane % 2 * (Format::ZEROS / 2);
        to += u * at.a.slot_groups * 32 + lane % 2 * 16;
#pragma unroll 1
        for (int g = 0; g < at.a.slot_groups; g++) {
            const size_t group = (size_t)min(first + g, at.a.groups - 1);
            ptx_copy_16(to + g * 32, scale + group * 16);
            if (Format::ZEROS == 8 && at.a.decode.zeros)
                ptx_copy_4(zeros + g * Format::ZEROS, zero + group * Format::ZEROS);
            else if (Format::ZEROS && at.a.decode.zeros)
                ptx_copy_8(zeros + g * Format::ZEROS, zero + group * Format::ZEROS);
        }
    }
    __device__ __forceinline__ void fill()
    {
        unsigned char *const stage = qt_smem + at.a.ring_at + at.r.stage * at.a.stage_bytes;
        unsigned char *const to = stage + (BM * 256 << at.a.log2_wk);
        const int blocks = min(at.a.blocks - (at.slot * 2 << at.a.log2_wk), 2 << at.a.log2_wk);
        if (at.begin())
            open((moe_header *)(to + QT_MOE_WARPS * at.a.warp_bytes));
        __syncwarp(); /* the header has been written */
        if (lane == 0)
            ptx_barrier_expect(at.full(),
                               (QT_MOE_WARPS >> at.a.log2_wk) * blocks * moe_strip_bytes<Format>());
        __syncwarp();
        copy_planes(ptx_shared(to));
        copy_scales(ptx_shared(to));
        ptx_barrier_arrive_copied(at.full());
        at.end();
    }
};

/* A lane copies every other row, 8 of 128 columns; an odd row more is the last one again. */
template <int BM> struct moe_x {
    moe_filling at;
    const __half *x[BM / 2];

    __device__ __forceinline__ moe_x(const qt_moe_product_args &a, const qt_pipeline &ring,
                                     int units)
        : at(a, ring, units)
    {
    }
    __device__ __forceinline__ void fill()
    {
        const int row = (int)threadIdx.x % 32 / 16, c = (int)threadIdx.x % 16;
        const uint32_t stage = ptx_shared(qt_smem) + at.a.ring_at + at.r.stage * at.a.stage_bytes;
        if (at.begin()) {
            const int of_lane = moe_row(at.a, at.item.first + max(min(c, at.item.rows - 1), 0));
#pragma unroll
            for (int i = 0; i < BM / 2; i++)
                x[i] = at.a.x + (size_t)__shfl_sync(~0u, of_lane, row + 2 * i) * at.a.x_pitch;
        }
#pragma unroll 1
        for (int w = 0; w < 1 << at.a.log2_wk; w++) {
            const int column = ((at.slot << at.a.log2_wk) + w) * 128 + c * 8;
            const int bytes = max(min((at.a.k - column) * 2, 16), 0), from = bytes ? column : 0;
            const uint32_t to = stage + ((w * 2 + c / 8) * BM + row) * 128;
#pragma unroll
            for (int i = 0; i < BM / 2; i++) {
                if (2 * i >= at.item.rows)
                    break;
                ptx_copy_16_zero(to + i * 256 + (c % 8 ^ (row + 2 * i) % 8) * 16, x[i] + from,
                                 (uint32_t)bytes);
            }
        }
        ptx_barrier_arrive_copied(at.full());
        at.end();
    }
};

template <class Filler> static __device__ __forceinline__ void moe_fill_all(Filler filler)
{
#pragma unroll 1
    while (filler.at.more())
        filler.fill();
}

/* ---- the other warps ------------------------------------------------------------------------- */

/* A unit of up to MT * 8 tokens, whose first stage has arrived. ROOM: see moe_multiply. */
template <class Format, int MT, int ROOM>
static __device__ __forceinline__ void moe_consume(const qt_moe_product_args &a,
                                                   moe_tables<Format> *tables,
                                                   const moe_header &header, qt_pipeline *r)
{
    moe_sums<MT> sums;
    moe_sums_start(&sums);
#pragma unroll 1
    for (int slot = 0; slot < a.slots; slot++) {
        ptx_barrier_wait(r->full + 8 * r->stage, r->parity);
        moe_multiply<Format, MT, ROOM>(a, &sums, qt_smem + a.ring_at + r->stage * a.stage_bytes,
                                       slot, *tables);
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            ptx_barrier_arrive(r->empty + 8 * r->stage);
        qt_pipeline_advance(r, a.stages);
    }
    moe_end<Format, MT>(a, header, &sums, false);
}

template <class Format, int MT>
static __device__ __forceinline__ void moe_consume_all(const qt_moe_product_args &a, qt_pipeline r,
                                                       int units)
{
    moe_tables<Format> tables;
    moe_header header;
#pragma unroll 1
    for (int unit = (int)blockIdx.x; unit < units; unit += (int)gridDim.x) {
        ptx_barrier_wait(r.full + 8 * r.stage, r.parity);
        moe_begin<Format>((const moe_header *)(qt_smem + a.ring_at + r.stage * a.stage_bytes +
                                               (MT * 2048 << a.log2_wk) +
                                               QT_MOE_WARPS * a.warp_bytes),
                          &header, &tables);
        if (!Format::RARE && header.rows <= 8)
            moe_consume<Format, 1, MT>(a, &tables, header, &r);
        else
            moe_consume<Format, MT, MT>(a, &tables, header, &r);
        if (a.log2_wk) /* the next unit's sums overwrite those that have been added by now */
            ptx_named_barrier(MOE_BARRIERS, MOE_THREADS);
    }
}

/* ---- kernel --------------------------------------------------------------------------------- */

template <class Format>
__global__ void __launch_bounds__(QT_MOE_FEW_THREADS, 2)
    qt_moe_few_kernel(const __grid_constant__ qt_moe_product_args a)
{
    enum { MT = QT_MOE_FEW_TOKENS / 8 };
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    const qt_pipeline r = qt_pipeline_make(ptx_shared(qt_smem) + a.barriers_at);
    if (threadIdx.x == 0) {
        qt_pipeline_init_barriers(r.full, 0, MOE_FULL_ARRIVALS);
        qt_pipeline_init_barriers(r.empty, 0, QT_MOE_WARPS);
        ptx_barrier_init_fence();
    }
    __syncthreads();
    if (!a.early)
        ptx_wait_previous();
    ptx_launch_dependents(); /* only now, so that these find the sort ended */
    const int units = moe_items(a) * a.row_tiles;
    if (warp == QT_MOE_WARPS) {
        moe_fill_all(moe_weights<Format, MT * 8>(a, r, units));
        return;
    }
    if (a.early)
        ptx_wait_previous(); /* it may write X, and read what this kernel writes */
    if (warp == QT_MOE_WARPS + 1)
        moe_fill_all(moe_x<MT * 8>(a, r, units));
    else
        moe_consume_all<Format, MT>(a, r, units);
}

#endif
