/*
 * The grouped product: tiles of an expert's weights times the tokens that chose it, by mma.sync.
 *
 *   grid       as many thread blocks as run at the same time; each computes units, the grid apart
 *   unit       a work item (tokens of one expert) and a tile of rows: for gate and up 128 / WK rows
 *              of both, for down 256 / WK rows
 *   block      8 warps: 8 / WK along the rows, WK along k; a warp has 2 strips of 16 rows: the same
 *              strip of gate and of up, or two strips of one matrix
 *   smem       [ look-up table | pipeline stages | sums of warps along k ]
 *
 *   stage:     [ X: WK x 128 columns of the tokens, in blocks of 64 columns, 16-byte chunk c of
 *                row r at c ^ r % 8 | per warp: planes, scales, zero-points of 2 strips x 128
 *                columns | header ]                                              <-- cp.async
 *   mainloop:  packed words --> A fragments --+
 *              X -- ldmatrix --> B fragments -+--> mma.sync --> FP32 accumulators
 *
 * The pipeline runs on from unit to unit: the stages of the next unit are copied while the last of
 * this one are multiplied. A stage's header has what the epilogue must know of its unit, and the
 * values of its look-up tables, which are filled again only if they change.
 *
 * Traffic    packed bytes once per item (each further tile of the same expert from L2), X once per
 *            unit through L2
 */
#ifndef QT_KERNELS_CUDA_MOE_PRODUCT_CUH
#define QT_KERNELS_CUDA_MOE_PRODUCT_CUH

#include "kernels/cuda/common/accumulators.cuh"
#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/common/ptx_sm90.cuh"
#include "kernels/cuda/matmul/decode.cuh"
#include "kernels/cuda/moe/unit.cuh"

/* Bytes of a strip's planes in a stage. */
template <class Format> static __device__ __forceinline__ constexpr int moe_strip_bytes()
{
    return 64 * (qt_lane_width<Format>(0) + qt_lane_width<Format>(1) + qt_lane_width<Format>(2));
}

/* ---- copies -------------------------------------------------------------------------------------
 *
 * The stage that is copied next: slot number `slot` of unit number `unit`. Addresses move from
 * stage to stage, because this code runs once per stage in every warp: computing them anew would
 * cost as much as the products.
 */
template <class Format, int BM> struct moe_loader {
    enum { ROWS = BM * 16 / MOE_THREADS }; /* 16-byte chunks of 128 columns of X, per thread */
    int unit, units, slot;
    qt_moe_item item;
    int tile;
    int block, column;                            /* the warp's first block; the thread's column */
    const unsigned char *plane[QT_MOE_STRIPS][3]; /* at `block`, and the lane's 16 bytes there */
    const unsigned char *zero;                    /* of the strip whose scales the lane copies */
    const __half *scale, *x[ROWS];
    float factor[QT_MOE_STRIPS];
    const float *bias[QT_MOE_STRIPS];
    __half value[QT_MOE_STRIPS];

    __device__ __forceinline__ moe_loader(int count) : unit((int)blockIdx.x), units(count), slot(0)
    {
    }
    __device__ __forceinline__ void restart()
    {
        unit = (int)blockIdx.x;
        slot = 0;
    }
    /* The strip whose scales the lane copies; QT_MOE_STRIPS and more: none. */
    static __device__ __forceinline__ int scale_strip(const qt_moe_product_args &a)
    {
        return (int)threadIdx.x % 32 / 2 >> (a.slot_groups >> 1);
    }
    __device__ __forceinline__ void open(const qt_moe_product_args &a)
    {
        const int lane = (int)threadIdx.x % 32;
        item = moe_item(a, unit / a.row_tiles);
        tile = unit % a.row_tiles;
        block = ((int)threadIdx.x / 32 & ((1 << a.log2_wk) - 1)) * 2;
        column = (int)threadIdx.x % 16 * 8;
#pragma unroll
        for (int u = 0; u < QT_MOE_STRIPS; u++) {
            const qt_moe_matrix *m =
                &a.table[item.expert * QT_MOE_MATRICES + a.matrix + (a.gated ? u : 0)];
            const size_t strip = (size_t)min(moe_strip(a, tile, u), a.strips - 1);
#pragma unroll
            for (int p = 0; p < 3; p++)
                if (qt_plane_width<Format>(p))
                    plane[u][p] =
                        m->plane[p] + lane * 16 +
                        (strip * a.pitch_blocks + block) * (size_t)(32 * qt_lane_width<Format>(p));
            if (u == 0 || scale_strip(a) == u) {
                scale = m->scale + strip * a.pitch_groups * 16 + lane % 2 * 8;
                if (Format::ZEROS)
                    zero = m->zero + strip * a.pitch_groups * Format::ZEROS +
                           lane % 2 * (Format::ZEROS / 2);
            }
            factor[u] = m->factor;
            bias[u] = m->bias;
            if (Format::LUT) {
                qt_decode_args decode = a.decode;
                decode.table = m->table;
                value[u] = qt_lane_value<Format>(&decode);
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int r = (int)threadIdx.x / 16 + i * (MOE_THREADS / 16), at = item.first + r;
            x[i] = r >= item.rows ? NULL : a.x + (size_t)moe_row(a, at) * a.x_pitch;
        }
    }
    /* Copies the next stage, or its weights or its X alone, to `to`, and moves on. */
    __device__ __forceinline__ void copy(const qt_moe_product_args &a, unsigned char *to,
                                         bool weights, bool of_x)
    {
        const int x_bytes = BM * 256 << a.log2_wk;
        if (unit >= units)
            return;
        if (slot == 0) {
            open(a);
            put_header((moe_header *)(to + x_bytes + QT_MOE_WARPS * a.warp_bytes));
        }
        if (of_x)
            copy_x(a, ptx_shared(to));
        copy_weights(a, ptx_shared(to) + x_bytes + threadIdx.x / 32 * a.warp_bytes, weights);
        if (++slot == a.slots) {
            slot = 0;
            unit += (int)gridDim.x;
        }
    }
    __device__ __forceinline__ void put_header(moe_header *h) const
    {
        if (threadIdx.x == 0) {
            *(int4 *)h = make_int4(item.first, item.rows, tile, __float_as_int(factor[0]));
            h->factor[1] = factor[1];
            h->bias[0] = bias[0];
            h->bias[1] = bias[1];
        }
        if (Format::LUT && threadIdx.x < 16)
#pragma unroll
            for (int u = 0; u < QT_MOE_STRIPS; u++)
                h->value[u][threadIdx.x] = value[u];
    }
    __device__ __forceinline__ void copy_x(const qt_moe_product_args &a, uint32_t to)
    {
        const int r = (int)threadIdx.x / 16, c = (int)threadIdx.x % 16;
        to += (uint32_t)((c / 8 * BM + r) * 128 + (c % 8 ^ r % 8) * 16);
#pragma unroll 1
        for (int w = 0; w < 1 << a.log2_wk; w++) {
            const int bytes = max(min((a.k - column) * 2, 16), 0), from = bytes ? column : 0;
#pragma unroll
            for (int i = 0; i < ROWS; i++)
                if (x[i])
                    ptx_copy_16_zero(to + i * (MOE_THREADS / 16 * 128), x[i] + from,
                                     (uint32_t)bytes);
            column += 128;
            to += BM * 256;
        }
    }
    /* Without `really` only moves on. */
    __device__ __forceinline__ void copy_weights(const qt_moe_product_args &a, uint32_t to,
                                                 bool really)
    {
        const int lane = (int)threadIdx.x % 32, left = really ? a.blocks - block : 0;
        to += lane * 16;
#pragma unroll
        for (int u = 0; u < QT_MOE_STRIPS; u++)
#pragma unroll
            for (int p = 0; p < 3; p++) {
                const int bytes = 32 * qt_lane_width<Format>(p); /* of a block: 512, 256, 128, 0 */
                if (bytes == 512) {
                    ptx_copy_16_if(to, plane[u][p], left > 0);
                    ptx_copy_16_if(to + 512, plane[u][p] + 512, left > 1);
                } else if (bytes) {
                    const bool wanted = lane < bytes / 8 && left > lane / (bytes / 16);
                    ptx_copy_16_if(to, plane[u][p], wanted);
                }
                if (bytes)
                    plane[u][p] += 2 * bytes << a.log2_wk;
                to += 2 * bytes;
            }
        if (left > 0 && scale_strip(a) < QT_MOE_STRIPS) {
            const int group =
                min((block * 64 >> a.group_shift) + (lane / 2 & (a.slot_groups - 1)), a.groups - 1);
            ptx_copy_16(to, scale + (size_t)group * 16);
            if (Format::ZEROS && a.decode.zeros) { /* half of a group's zero-points per lane */
                to += QT_MOE_STRIPS * a.slot_groups * 32 - lane * (16 - Format::ZEROS / 2);
                if (Format::ZEROS == 8)
                    ptx_copy_4(to, zero + (size_t)group * Format::ZEROS);
                else
                    ptx_copy_8(to, zero + (size_t)group * Format::ZEROS);
            }
        }
        block += 2 << a.log2_wk;
    }
};

/* ---- look-up tables ------------------------------------------------------------------------- */

/* Fills the table of pairs (decode_lut.cuh) at the start of shared memory. Two threads fill an
 * entry. */
template <class Format> static __device__ __forceinline__ void moe_fill(__half value)
{
    for (int i = (int)threadIdx.x; i < 2 * Format::TABLE_BYTES / Format::LINE_BYTES;
         i += MOE_THREADS) {
        const unsigned entry = (unsigned)i / 2;
        const uint32_t low = __half_as_ushort(__shfl_sync(~0u, value, Format::code(entry & 15)));
        const uint32_t high = __half_as_ushort(__shfl_sync(~0u, value, Format::code(entry >> 4)));
        const uint32_t v = high << 16 | low;
        uint4 *to = (uint4 *)(qt_smem + entry * Format::LINE_BYTES + (i & 1) * 64);
#pragma unroll
        for (int j = 0; j < 4; j++)
            to[(j + i / 2) & 3] = make_uint4(v, v, v, v);
    }
}

/* The look-up state of a lane for both strips, and the values that it was made from. */
template <class Format> struct moe_tables {
    qt_lane lane[QT_MOE_STRIPS];
    __half value[QT_MOE_STRIPS];
    bool empty;

    __device__ __forceinline__ moe_tables()
    {
        empty = true;
        for (int u = 0; u < QT_MOE_STRIPS; u++)
            lane[u] = {threadIdx.x % 32 * Format::LANE_BYTES, {}, {}};
    }
    /* Makes the tables for the unit that begins; a table in shared memory serves both strips. The
     * first MOE_THREADS threads of the thread block call it. The condition is the same in all of
     * them, as all warps have the same values. */
    __device__ __forceinline__ void start(const moe_header *h)
    {
        if (!Format::LUT)
            return;
        const int at = (int)threadIdx.x % 16;
        __half now[QT_MOE_STRIPS];
#pragma unroll
        for (int u = 0; u < QT_MOE_STRIPS; u++)
            now[u] = h->value[u][at];
        const bool same = __half_as_ushort(now[0]) == __half_as_ushort(value[0]) &&
                          __half_as_ushort(now[1]) == __half_as_ushort(value[1]);
        if (!empty && __all_sync(~0u, same))
            return;
        if constexpr (Format::VALUES) {
#pragma unroll
            for (int u = 0; u < QT_MOE_STRIPS; u++)
                value_start<Format>(&lane[u], now[u]);
        } else if constexpr (Format::TABLE_BYTES > 0) {
            /* All warps have read the table for the last time. */
            ptx_named_barrier(MOE_TABLES, MOE_THREADS);
            moe_fill<Format>(now[0]);
            ptx_named_barrier(MOE_TABLES, MOE_THREADS);
        }
        value[0] = now[0];
        value[1] = now[1];
        empty = false;
    }
};

/* ---- epilogue ------------------------------------------------------------------------------- */

/* Stores the results of the warp. */
template <int MT>
static __device__ __forceinline__ void moe_store(const qt_moe_half_args &a, const moe_header &h,
                                                 const qt_accumulators<MT, QT_MOE_STRIPS> &sums)
{
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < MT; t++)
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int token = t * 8 + lane % 4 * 2 + odd, at = h.first + token;
            if (token >= h.rows)
                continue;
            const float factor = a.token_factor ? a.token_factor[moe_row(a, at)] : 1;
            const size_t to = (size_t)at * a.y_pitch;
            const float *const up = (const float *)a.up + (size_t)at * a.up_pitch;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float v[QT_MOE_STRIPS];
#pragma unroll
                for (int u = 0; u < QT_MOE_STRIPS; u++) {
                    const int row = moe_strip(a, h.tile, u) * 16 + i * 8 + lane / 4;
                    v[u] = sums.v[u][t][2 * i + odd] * (h.factor[u] * factor);
                    if (h.bias[u] && row < a.n)
                        v[u] += h.bias[u][row];
                }
#pragma unroll
                for (int u = 0; u < QT_MOE_STRIPS; u++) {
                    const int row = moe_strip(a, h.tile, u) * 16 + i * 8 + lane / 4;
                    if (row >= a.n || (u && a.gated))
                        continue;
                    if (a.gated || a.up)
                        v[u] = moe_gated(a, v[u], a.gated ? v[1] : up[row]);
                    if (a.rounded)
                        qt_put_rounded(a.y, to + row, v[u], a.bf16);
                    else
                        ((float *)a.y)[to + row] = v[u];
                }
            }
        }
}

/* ---- mainloop ------------------------------------------------------------------------------- */

/* Accumulators of a warp. Few tokens: the sums of a group are multiplied by its scale and added to
 * the total. Many tokens, to save registers: the total is kept in units of the scale of the current
 * group, as in the mma.sync tile kernel. */
template <int MT> struct moe_sums {
    enum { UNITS = MT > 2 };
    qt_accumulators<MT, QT_MOE_STRIPS> total;
    float2 unit[QT_MOE_STRIPS];

    /* The total is in units of these scales from now on. first: the total is 0. */
    __device__ __forceinline__ void change_unit(const unsigned char *const scales[QT_MOE_STRIPS],
                                                int at, bool first)
    {
#pragma unroll
        for (int u = 0; u < QT_MOE_STRIPS; u++) {
            const float2 s = qt_scale_unit(*(const __half2 *)(scales[u] + at));
            const float x = __fdividef(unit[u].x, s.x), y = __fdividef(unit[u].y, s.y);
            unit[u] = s;
            if (!first)
#pragma unroll
                for (int t = 0; t < MT; t++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        total.v[u][t][i] *= i < 2 ? x : y;
        }
    }
};

/* The products of the warp's 128 columns of a stage and its first MT * 8 tokens. ROOM: tiles of 8
 * tokens for which a stage has room. */
template <class Format, int MT, int ROOM>
static __device__ __forceinline__ void moe_multiply(const qt_moe_product_args &a,
                                                    moe_sums<MT> *sums, const unsigned char *stage,
                                                    int slot, const moe_tables<Format> &tables)
{
    constexpr bool units = moe_sums<MT>::UNITS, flush = Format::GROUPED && !units;
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int wk = warp & ((1 << a.log2_wk) - 1), block = ((slot << a.log2_wk) + wk) * 2;
    if (block >= a.blocks)
        return;
    const uint32_t x_at =
        ptx_shared(stage) + (wk * ROOM * 16 + lane % 8) * 128 + (lane / 8 ^ lane % 8) * 16;
    const unsigned char *weights = stage + (ROOM * 2048 << a.log2_wk) + warp * a.warp_bytes;
    const unsigned char *scale = weights + QT_MOE_STRIPS * moe_strip_bytes<Format>();
    const unsigned char *zero = scale + QT_MOE_STRIPS * a.slot_groups * 32;
    const unsigned char *const scales[QT_MOE_STRIPS] = {scale + lane / 4 * 4,
                                                        scale + a.slot_groups * 32 + lane / 4 * 4};
    const int before = block - (2 << a.log2_wk); /* the warp's last block */
    const bool begins = slot == 0 || block * 64 >> a.group_shift != before * 64 >> a.group_shift;
    qt_accumulators<MT, QT_MOE_STRIPS> group = {}, *to = flush ? &group : &sums->total;
#pragma unroll
    for (int b = 0; b < 2; b++) {
        if (b == 1 && block + 1 >= a.blocks)
            break;
        Format words[QT_MOE_STRIPS];
#pragma unroll
        for (int u = 0; u < QT_MOE_STRIPS; u++) {
            const unsigned char *src[3], *at = weights + u * moe_strip_bytes<Format>();
#pragma unroll
            for (int p = 0; p < 3; p++) {
                src[p] = at + (b * 32 + lane) * qt_lane_width<Format>(p);
                at += 64 * qt_lane_width<Format>(p);
            }
            words[u].load(src, a.decode);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const bool first = b == 0 && half == 0;
            const int at = a.slot_groups == 4 ? 2 * b + half : a.slot_groups == 2 ? b : 0;
            if ((units && Format::GROUPED) || first)
                if (!flush &&
                    (first ? begins : a.slot_groups == 4 || (half == 0 && a.slot_groups == 2)))
                    sums->change_unit(scales, at * 32, first && slot == 0);
            if (Format::ZEROS && (half == 0 || a.slot_groups == 4))
#pragma unroll
                for (int u = 0; u < QT_MOE_STRIPS; u++)
                    words[u].set_zeros(qt_lane_zeros<Format>(
                        a.decode, zero + (u * a.slot_groups + at) * Format::ZEROS));
            uint32_t x[MT][4];
#pragma unroll
            for (int t = 0; t < MT; t++)
                ptx_ldmatrix_x4(x[t], (x_at ^ half * 64) + (b * ROOM + t) * 1024);
#pragma unroll
            for (int s = 0; s < 2; s++)
#pragma unroll
                for (int u = 0; u < QT_MOE_STRIPS; u++) {
                    uint32_t fragment[4];
                    words[u].fragment(fragment, 2 * half + s, tables.lane[u]);
#pragma unroll
                    for (int t = 0; t < MT; t++)
                        ptx_mma_f16(to->v[u][t], fragment, x[t][2 * s], x[t][2 * s + 1]);
                }
            if (flush && half == 0 && a.slot_groups == 4)
                qt_accumulators_flush<MT, QT_MOE_STRIPS>(&sums->total, to, scales, at * 32);
        }
        if (flush && b == 0 && a.slot_groups >= 2)
            qt_accumulators_flush<MT, QT_MOE_STRIPS>(&sums->total, to, scales,
                                                     a.slot_groups == 4 ? 32 : 0);
    }
    if (flush)
        qt_accumulators_flush<MT, QT_MOE_STRIPS>(&sums->total, to, scales,
                                                 32 * (a.slot_groups - 1));
}

template <int MT> static __device__ __forceinline__ void moe_sums_start(moe_sums<MT> *sums)
{
    sums->total = {};
    sums->unit[0] = sums->unit[1] = make_float2(1, 1);
}

/* Begins a unit: reads the header of its first stage. */
template <class Format>
static __device__ __forceinline__ void moe_begin(const moe_header *h, moe_header *header,
                                                 moe_tables<Format> *tables)
{
    header->first = h->first;
    header->rows = h->rows;
    header->tile = h->tile;
    header->factor[0] = h->factor[0];
    header->factor[1] = h->factor[1];
    header->bias[0] = h->bias[0];
    header->bias[1] = h->bias[1];
    tables->start(h);
}

/* Ends a unit. alone: see moe_add_warps. */
template <class Format, int MT>
static __device__ __forceinline__ void
moe_end(const qt_moe_product_args &a, const moe_header &header, moe_sums<MT> *sums, bool alone)
{
    if (moe_sums<MT>::UNITS || !Format::GROUPED)
#pragma unroll
        for (int u = 0; u < QT_MOE_STRIPS; u++)
#pragma unroll
            for (int t = 0; t < MT; t++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sums->total.v[u][t][i] *= i < 2 ? sums->unit[u].x : sums->unit[u].y;
    if (moe_add_warps(a, sums->total.v, alone))
        moe_store<MT>(a, header, sums->total);
}

template <class Format, int MT>
__global__ void __launch_bounds__(MOE_THREADS, MT <= 2 ? 2 : 1)
    qt_moe_product_kernel(const __grid_constant__ qt_moe_product_args a)
{
    unsigned char *const ring = qt_smem + a.ring_at;
    if (!a.early)
        ptx_wait_previous();
    ptx_launch_dependents(); /* only now, so that these find the sort ended */
    moe_loader<Format, MT * 8> loader(moe_items(a) * a.row_tiles);
    moe_tables<Format> tables;
    moe_sums<MT> sums;
    moe_header header;
    int at = (int)blockIdx.x, slot = 0; /* the unit and its stage that are multiplied */
    moe_stages stages(a, a.early);
    if (a.early && at >= loader.units)
        ptx_wait_previous(); /* a kernel never ends before the one in front */
#pragma unroll 1
    while (at < loader.units) {
        if (!stages.fill(a, &loader, [&](int to, bool weights, bool of_x) {
                loader.copy(a, ring + to, weights, of_x);
            }))
            continue;
        if (slot == 0) {
            moe_begin<Format>((const moe_header *)(ring + stages.get + (MT * 2048 << a.log2_wk) +
                                                   QT_MOE_WARPS * a.warp_bytes),
                              &header, &tables);
            moe_sums_start(&sums);
        }
        moe_multiply<Format, MT, MT>(a, &sums, ring + stages.get, slot, tables);
        stages.get = stages.next(a, stages.get);
        if (++slot < a.slots)
            continue;
        slot = 0;
        at += (int)gridDim.x;
        moe_end<Format, MT>(a, header, &sums, true);
    }
}

/* Returns Kernel<Format>::get() for the class that decodes a code format. */
template <template <class> class Kernel> static const void *moe_instance(enum qt_format format)
{
#define GROUP(Format)                       Kernel<Format>::get,
#define FIELD(name, bits, exp_bits, Format) GROUP(Format)
    static const void *(*const formats[])() = {QT_MMA_TILE_GROUP_FORMATS(GROUP)
                                                   QT_FIELD_FORMATS(FIELD)};
    return formats[format]();
#undef FIELD
#undef GROUP
}

#endif
