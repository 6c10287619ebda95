/*
 * The grouped product of MIX24 experts: tiles of an expert's weights times the tokens that chose
 * it, by mma.sync.
 *
 *   grid       as many thread blocks as run at the same time; each computes units, the grid apart
 *   unit       a work item (up to 16 tokens of one expert) and a tile of 256 / WK rows
 *   block      8 warps: 8 / WK along the rows, WK along k; a warp has 2 strips of 16 rows
 *   smem       [ pipeline stages | sums of warps along k | units ]
 *
 *   stage:     [ X: of each warp along k 128 packed columns of the tokens, 16-byte chunk c of row
 *                r at c ^ r % 8 | per warp: the records of 2 strips ]            <-- cp.async
 *   mainloop:  records --> A fragments (mix24/decode.cuh) --+
 *              X --> B fragments ---------------------------+--> mma.sync --> FP32 accumulators
 *   epilogue:  CSR entries --> sparse A fragments --+
 *              X, gathered --> B fragments ---------+--> mma.sync --> the same accumulators
 *
 * The pipeline runs on from unit to unit, as in product.cuh. Each matrix of an expert has its own
 * order of channels, so X is copied in chunks of 16 channels, and gate and up are two launches.
 *
 * Traffic    records once per item (each further tile of the same expert from L2), X once per unit
 *            through L2, CSR entries once per item
 */
#ifndef QT_KERNELS_CUDA_MOE_MIX24_PRODUCT_CUH
#define QT_KERNELS_CUDA_MOE_MIX24_PRODUCT_CUH

#include "kernels/cuda/mix24/warp_mma.cuh"
#include "kernels/cuda/moe/mix24_record.cuh"
#include "kernels/cuda/moe/product.cuh"

enum { MOE24_TOKENS = QT_MOE_FEW_TOKENS, MOE24_MT = MOE24_TOKENS / 8 };

typedef qt_accumulators<MOE24_MT, QT_MOE_STRIPS> moe24_sums;

/* All warps read this description of a unit. The loader writes it when it copies the first stage of
 * the unit, at most QT_MOE_STAGES units ahead. */
struct moe24_unit {
    moe_header header;
    int row[MOE24_TOKENS]; /* of X */
    const uint32_t *ptr;   /* outliers, as in qt_moe_mix24_matrix */
    const uint16_t *col, *val, *perm;
};
static_assert(sizeof(moe24_unit) <= QT_MOE_MIX24_UNIT_BYTES &&
                  (int)QT_MOE_MIX24_UNITS > (int)QT_MOE_STAGES,
              "no room");

static __device__ __forceinline__ moe24_unit *moe24_unit_at(const qt_moe_mix24_args &a, int number)
{
    return (moe24_unit *)(qt_smem + a.units_at +
                          number % QT_MOE_MIX24_UNITS * QT_MOE_MIX24_UNIT_BYTES);
}

/* Whether a unit has 4-bit groups, for the warp's units, which are WK apart. */
struct moe24_units {
    int unit, rest; /* rest: unit * fours modulo units */

    __device__ __forceinline__ void start(const qt_moe_mix24_args &a)
    {
        unit = (int)threadIdx.x / 32 & ((1 << a.log2_wk) - 1);
        rest = unit * a.fours - moe24_fours_before(a, unit) * a.units;
    }
    __device__ __forceinline__ bool is_four(const qt_moe_mix24_args &a) const
    {
        return rest + a.fours >= a.units;
    }
    /* Returns the units of 4-bit groups that were passed. */
    __device__ __forceinline__ int advance(const qt_moe_mix24_args &a)
    {
        unit += 1 << a.log2_wk;
        rest += a.fours_rest;
        const bool more = rest >= a.units;
        rest -= more ? a.units : 0;
        return a.fours_step + more;
    }
};

/* Offsets in a stage that a thread needs, kept in registers by the asm. */
struct moe24_offsets {
    uint32_t record;      /* of the warp */
    uint32_t copy_x;      /* of the thread's chunk in its first row */
    uint32_t x[MOE24_MT]; /* of the lane's row of a token tile */
    uint32_t chunk;       /* of the lane's 16 bytes in a row of X, for the first half of a block */

    __device__ __forceinline__ moe24_offsets(const qt_moe_mix24_args &a)
    {
        const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
        const int of_warp = (warp & ((1 << a.log2_wk) - 1)) * a.x_rows * 256;
        const int c = (int)threadIdx.x & ((16 << a.log2_wk) - 1), r = lane / 4 & (a.x_rows - 1);
        const int first = (int)threadIdx.x >> (4 + a.log2_wk);
        record = (uint32_t)((a.x_rows * 256 << a.log2_wk) + warp * QT_MOE_STRIPS * a.record_bytes);
        copy_x = (uint32_t)((c / 16 * a.x_rows + first) * 256 + (c % 16 ^ first % 8) * 16);
#pragma unroll
        for (int i = 0; i < MOE24_MT; i++)
            x[i] = (uint32_t)(of_warp + ((i * 8 + r) & (a.x_rows - 1)) * 256);
        chunk = (uint32_t)(lane % 4 * 2 ^ r) * 16;
        asm volatile("" : "+r"(record), "+r"(copy_x), "+r"(x[0]), "+r"(x[1]), "+r"(chunk));
    }
};
static_assert(MOE24_MT == 2, "the offsets above");

/* ---- copies -------------------------------------------------------------------------------------
 *
 * The stage that is copied next: slot number `slot` of unit number `unit`. Each thread copies the
 * same 16-byte chunk of one or several rows of X, so that it needs one entry of perm per stage,
 * which it reads one stage ahead. Addresses move from stage to stage.
 */
struct moe24_loader {
    int unit, units, slot, number;
    int rows, row;                              /* of the item; of X: token lane % 16 */
    const __half *x;                            /* the thread's first row of X */
    const unsigned char *record[QT_MOE_STRIPS]; /* of the stage, and the lane's 16 bytes there */
    moe24_units at;                             /* of the stage */
    const uint16_t *perm;                       /* of the stage, at the thread's chunk */
    int left;                                   /* units from that of the chunk on */
    uint32_t group;                             /* of channels: *perm */

    __device__ __forceinline__ moe24_loader(int count)
        : unit((int)blockIdx.x), units(count), slot(0), number(0)
    {
    }
    __device__ __forceinline__ void restart()
    {
        unit = (int)blockIdx.x;
        slot = number = 0;
    }
    /* The thread's 16-byte chunk of X in the stage: 16 of each warp along k; its first row. */
    static __device__ __forceinline__ int chunk(const qt_moe_mix24_args &a)
    {
        return (int)threadIdx.x & ((16 << a.log2_wk) - 1);
    }
    static __device__ __forceinline__ int first_row(const qt_moe_mix24_args &a)
    {
        return (int)threadIdx.x >> (4 + a.log2_wk);
    }
    __device__ __forceinline__ void read_group()
    {
        group = left > 0 ? __ldg(perm) : 0xffff;
    }
    __device__ __forceinline__ void open(const qt_moe_mix24_args &a)
    {
        const int lane = (int)threadIdx.x % 32;
        const qt_moe_item item = moe_item(a, unit / a.row_tiles);
        const int tile = unit % a.row_tiles;
        const qt_moe_mix24_matrix *m = &a.table[item.expert * QT_MOE_MATRICES + a.matrix];
        perm = m->perm + chunk(a) / 2;
        left = a.units - chunk(a) / 16;
        read_group();
        rows = item.rows;
        row = moe_row(a, item.first + max(min(lane % MOE24_TOKENS, rows - 1), 0));
        x = a.x + (size_t)__shfl_sync(~0u, row, first_row(a)) * a.x_pitch;
        at.start(a);
#pragma unroll
        for (int u = 0; u < QT_MOE_STRIPS; u++)
            record[u] = m->stream + lane * 16 + moe24_record_at(a, at.unit) +
                        (size_t)min(moe_strip(a, tile, u), a.strips - 1) * a.strip_bytes;
        moe24_unit *const to = moe24_unit_at(a, number);
        if (threadIdx.x < MOE24_TOKENS)
            to->row[threadIdx.x] = row;
        if (threadIdx.x == 0) {
            moe_header *const h = &to->header;
            h->first = item.first;
            h->rows = item.rows;
            h->tile = tile;
            h->factor[0] = h->factor[1] = m->factor;
            h->bias[0] = h->bias[1] = m->bias;
            to->ptr = m->ptr;
            to->col = m->col;
            to->val = m->val;
            to->perm = m->perm;
        }
    }
    /* Copies the next stage, or its weights or its X alone, to `to`, and moves on. */
    __device__ __forceinline__ void copy(const qt_moe_mix24_args &a, const moe24_offsets &offsets,
                                         uint32_t to, bool weights, bool of_x)
    {
        if (unit >= units)
            return;
        if (slot == 0)
            open(a);
        if (of_x)
            copy_x(a, to + offsets.copy_x);
        copy_records(a, to + offsets.record + threadIdx.x % 32 * 16, weights);
        if (++slot == a.slots) {
            slot = 0;
            number++;
            unit += (int)gridDim.x;
            return;
        }
        perm += 8 << a.log2_wk;
        left -= 1 << a.log2_wk;
        read_group();
    }
    __device__ __forceinline__ void copy_x(const qt_moe_mix24_args &a, uint32_t to) const
    {
        const int channel = (int)group * 16 + (int)threadIdx.x % 2 * 8;
        const uint32_t bytes = moe24_chunk_bytes(a, channel);
        const int from = bytes ? channel : 0, first = first_row(a);
        if (first < rows)
            ptx_copy_16_zero(to, x + from, bytes);
        const int step = MOE24_TOKENS >> a.log2_wk;
        if (step == MOE24_TOKENS)
            return;
#pragma unroll 1
        for (int r = first + step; r < rows; r += step) {
            const int of = __shfl_sync(~0u, row, r); /* r is that of the warp */
            const int swizzle = (first ^ r) % 8 * 16;
            ptx_copy_16_zero((to ^ swizzle) + (r - first) * 256,
                             a.x + (size_t)of * a.x_pitch + from, bytes);
        }
    }
    /* Without `really` only moves on. */
    __device__ __forceinline__ void copy_records(const qt_moe_mix24_args &a, uint32_t to,
                                                 bool really)
    {
        const int lane = (int)threadIdx.x % 32;
        const int chunks = mix24_unit_bytes(at.is_four(a)) / 16;
        const bool wanted = really && at.unit < a.units;
        const int fours = at.advance(a);
        const uint32_t step = (QTOOL_MATMUL_MIX24_TWO << a.log2_wk) +
                              fours * (QTOOL_MATMUL_MIX24_FOUR - QTOOL_MATMUL_MIX24_TWO);
#pragma unroll
        for (int i = 0; i < QT_MOE_STRIPS; i++) {
            ptx_copy_16_if(to, record[i], wanted);
            ptx_copy_16_if(to + 512, record[i] + 512, wanted && lane + 32 < chunks);
            ptx_copy_16_if(to + 1024, record[i] + 1024, wanted && lane + 64 < chunks);
            record[i] += step;
            to += a.record_bytes;
        }
    }
};

/* ---- mainloop ------------------------------------------------------------------------------- */

/* X of a stage as mix24_unit_mma reads it: 16 bytes of a row per lane. */
struct moe24_stage_x {
    uint32_t at[MOE24_MT], chunk;

    __device__ __forceinline__ void load(uint4 v[MOE24_MT], int b, int half) const
    {
#pragma unroll
        for (int i = 0; i < MOE24_MT; i++)
            v[i] = ptx_load_16(at[i] + b * 128 + (chunk ^ half * 16));
    }
};

/* The products of the warp's 128 columns of a stage. */
static __device__ __forceinline__ void moe24_multiply(const qt_moe_mix24_args &a, moe24_sums *sums,
                                                      const moe24_offsets &offsets, uint32_t stage,
                                                      moe24_units *at)
{
    const int lane = (int)threadIdx.x % 32;
    const moe24_stage_x x = {{stage + offsets.x[0], stage + offsets.x[1]}, offsets.chunk};
    const uint32_t record[QT_MOE_STRIPS] = {stage + offsets.record,
                                            stage + offsets.record + a.record_bytes};
    if (at->unit < a.units) {
        if (at->is_four(a))
            mix24_unit_mma<true, MOE24_MT, QT_MOE_STRIPS>(sums, record, x, lane);
        else
            mix24_unit_mma<false, MOE24_MT, QT_MOE_STRIPS>(sums, record, x, lane);
    }
    at->advance(a);
}

/* ---- outliers -----------------------------------------------------------------------------------
 *
 * The entries of a strip are adjacent in the CSR matrix. 16 of them are an mma, in which A[row][i]
 * is the value of entry i if it is in this row, else 0, and B[i][token] is x at its channel. Warps
 * along k take turns at 32 entries.
 */

/* A register of A: of two entries those in `row`. entry: row << 16 | value. */
static __device__ __forceinline__ uint32_t moe24_sparse(uint32_t row, uint32_t first,
                                                        uint32_t second)
{
    return (first >> 16 == row ? first & 0xffff : 0) | (second >> 16 == row ? second << 16 : 0);
}

/* x of a token at two channels; a channel below 0 reads as 0. */
static __device__ __forceinline__ uint32_t moe24_gather(const uint16_t *x, int first, int second)
{
    const uint32_t low = first < 0 ? 0 : x[first], high = second < 0 ? 0 : x[second];
    return low | high << 16;
}

static __device__ __forceinline__ void moe24_strip_outliers(const qt_moe_mix24_args &a,
                                                            const moe24_unit &unit, int strip,
                                                            float sums[MOE24_MT][4])
{
    const int lane = (int)threadIdx.x % 32, wk = (int)threadIdx.x / 32 & ((1 << a.log2_wk) - 1);
    const uint32_t begins = __ldg(unit.ptr + min(strip * 16 + min(lane, 16), a.n));
    const uint32_t end = __shfl_sync(~0u, begins, 16);
#pragma unroll 1
    for (uint32_t base = __shfl_sync(~0u, begins, 0) + wk * 32; base < end;
         base += 32 << a.log2_wk) {
        const uint32_t e = base + lane;
        uint32_t row = 0; /* the last that begins at e or before */
#pragma unroll
        for (int step = 8; step; step /= 2)
            row += __shfl_sync(~0u, begins, row + step) <= e ? step : 0;
        uint32_t entry = 0;
        int channel = -1;
        if (e < end) {
            const uint32_t c = __ldg(unit.col + e);
            entry = row << 16 | __ldg(unit.val + e);
            channel = __ldg(unit.perm + c / 16) * 16 + c % 16;
        }
#pragma unroll 1
        for (int half = 0; half < 2 && base + half * 16 < end; half++) {
            uint32_t of[4], f[4];
            int at[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int from = half * 16 + i / 2 * 8 + lane % 4 * 2 + i % 2;
                of[i] = __shfl_sync(~0u, entry, from);
                at[i] = __shfl_sync(~0u, channel, from);
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
                f[i] = moe24_sparse(lane / 4 + i % 2 * 8, of[i / 2 * 2], of[i / 2 * 2 + 1]);
#pragma unroll
            for (int t = 0; t < MOE24_MT; t++) {
                const int token = t * 8 + lane / 4;
                uint32_t b0 = 0, b1 = 0;
                if (token < unit.header.rows) {
                    const uint16_t *x = (const uint16_t *)a.x + (size_t)unit.row[token] * a.x_pitch;
                    b0 = moe24_gather(x, at[0], at[1]);
                    b1 = moe24_gather(x, at[2], at[3]);
                }
                ptx_mma_f16(sums[t], f, b0, b1);
            }
        }
    }
}

static __device__ __forceinline__ void moe24_outliers(const qt_moe_mix24_args &a,
                                                      const moe24_unit &unit, moe24_sums *sums)
{
    if (!unit.ptr || unit.header.rows == 0)
        return;
#pragma unroll
    for (int u = 0; u < QT_MOE_STRIPS; u++) {
        const int strip = moe_strip(a, unit.header.tile, u);
        if (strip < a.strips)
            moe24_strip_outliers(a, unit, strip, sums->v[u]);
    }
}

/* ---- kernel --------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(MOE_THREADS, 2)
    qt_moe_mix24_kernel(const __grid_constant__ qt_moe_mix24_args a)
{
    uint32_t ring = ptx_shared(qt_smem) + a.ring_at;
    asm volatile("" : "+r"(ring)); /* keeps it in a register */
    if (!a.early)
        ptx_wait_previous();
    ptx_launch_dependents(); /* only now, so that these find the sort ended */
    const moe24_offsets offsets(a);
    moe24_loader loader(moe_items(a) * a.row_tiles);
    moe24_units multiplied;
    multiplied.start(a);
    moe24_sums sums = {};
    int at = (int)blockIdx.x, slot = 0, number = 0; /* the unit and its stage that are multiplied */
    moe_stages stages(a, a.early);
    if (a.early && at >= loader.units)
        ptx_wait_previous(); /* a kernel never ends before the one in front */
#pragma unroll 1
    while (at < loader.units) {
        if (!stages.fill(a, &loader, [&](int to, bool weights, bool of_x) {
                loader.copy(a, offsets, ring + to, weights, of_x);
            }))
            continue;
        moe24_multiply(a, &sums, offsets, ring + stages.get, &multiplied);
        stages.get = stages.next(a, stages.get);
        if (++slot < a.slots)
            continue;
        const moe24_unit &unit = *moe24_unit_at(a, number++);
        moe24_outliers(a, unit, &sums);
        if (moe_add_warps(a, sums.v))
            moe_store<MOE24_MT>(a, unit.header, sums);
        sums = {};
        multiplied.start(a);
        slot = 0;
        at += (int)gridDim.x;
    }
}

#endif
