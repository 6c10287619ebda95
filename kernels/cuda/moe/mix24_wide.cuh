/*
 * The grouped product of MIX24 experts with many tokens, sm_90a: units and epilogue are those of
 * wide.cuh.
 *
 *   grid       one thread block per multiprocessor; each computes units, the grid apart
 *   unit       up to 256 tokens of one expert, and 128 rows of its matrix
 *   block      two consumer warpgroups, whose warps have a strip of 16 rows each; a producer
 *              warpgroup
 *   smem       [ X stages | records of several units of 128 columns | A of each warp: 16 rows x 64
 *                columns | results | units | mbarriers ]
 *
 *   producers:  records --bulk copies--> 128 columns of 8 strips
 *               X, by position and in packed order --TMA--> a stage: 64 columns
 *   consumers:  records --> FP16 --> A (shared memory) <-- values of outliers
 *               A --ldmatrix--> fragments ---------------+
 *               X (shared memory, 128-byte swizzle) -- B +--> wgmma --> FP32 accumulators
 *
 * A lane decodes 16 adjacent columns of a row (layout_mix24.h), whereas a fragment has pairs of
 * columns of four lanes. Weights change lanes through shared memory, where an outlier is one store
 * to its place.
 *
 * Requires   X as moe24_gather_kernel writes it
 * Traffic    records once per item (each further tile of the same expert from L2), X once per unit
 *            through L2, CSR entries once per item
 */
#ifndef QT_KERNELS_CUDA_MOE_MIX24_WIDE_CUH
#define QT_KERNELS_CUDA_MOE_MIX24_WIDE_CUH

#include "kernels/cuda/common/ptx_wgmma.cuh"
#include "kernels/cuda/mix24/decode.cuh"
#include "kernels/cuda/moe/mix24_record.cuh"
#include "kernels/cuda/moe/wide_epilogue.cuh"

/* The consumers read this about a unit. */
struct wide24_unit : wide_unit {
    uint32_t range[QT_MOE_WARPS * 16 + 1]; /* of the rows, as ptr of qt_moe_mix24_matrix */
    const uint16_t *col, *val;             /* col NULL: there are no outliers */
};
static_assert(sizeof(wide24_unit) <= QT_MOE_MIX24_WIDE_UNIT_BYTES, "no room");

static __device__ __forceinline__ wide24_unit *wide24_unit_at(const qt_moe_mix24_args &a,
                                                              int number)
{
    return (wide24_unit *)(qt_smem + a.units_at +
                           number % QT_MOE_MIX24_WIDE_UNITS * QT_MOE_MIX24_WIDE_UNIT_BYTES);
}

/* The pipeline of records. */
static __device__ __forceinline__ qt_pipeline wide24_records(const qt_moe_mix24_args &a)
{
    return qt_pipeline_make(ptx_shared(qt_smem) + a.barriers_at + QT_PIPELINE_BARRIER_BYTES);
}

static __device__ __forceinline__ uint32_t wide24_record_at(const qt_moe_mix24_args &a, int stage,
                                                            int strip)
{
    return ptx_shared(qt_smem) + a.records_at + (stage * QT_MOE_WARPS + strip) * a.record_bytes;
}

/* ---- producers ------------------------------------------------------------------------------ */

/* One thread. */
struct wide24_x {
    const qt_moe_mix24_wide_args &a;
    wide_walk walk;

    __device__ __forceinline__ wide24_x(const qt_moe_mix24_wide_args &args, int units)
        : a(args), walk(args, units)
    {
    }
    __device__ __forceinline__ void open(int, int number)
    {
        if (number)
            walk.advance();
    }
    __device__ __forceinline__ void fill(int slot, uint32_t to, uint32_t bar) const
    {
        const int columns = wide_columns(walk.item.rows);
        ptx_barrier_expect(bar, (uint32_t)columns * 128);
#pragma unroll 1
        for (int i = 0; i < columns; i += QT_MOE_WIDE_BOX)
            ptx_copy_box(to + i * 128, &a.x_map, slot * 64, walk.item.first + i, bar);
    }
};

/* One warp: records, and what the epilogue and outliers need of a unit. */
struct wide24_producer {
    const qt_moe_mix24_args &a;
    const int lane;
    qt_pipeline r;
    const unsigned char *record; /* of unit 0 of the lane's strip (lanes 0 to 7) */

    __device__ __forceinline__ wide24_producer(const qt_moe_mix24_args &args)
        : a(args), lane((int)threadIdx.x % 32), r(wide24_records(args))
    {
    }
    __device__ __forceinline__ void open(const wide_walk &walk)
    {
        const qt_moe_item &item = walk.item;
        const int tile = walk.tile(), first = tile * QT_MOE_WARPS;
        const qt_moe_mix24_matrix *m = &a.table[item.expert * QT_MOE_MATRICES + a.matrix];
        wide24_unit *const to = wide24_unit_at(a, walk.number);
        record = m->stream + (size_t)min(first + lane, a.strips - 1) * a.strip_bytes;
        if (m->ptr)
            for (int i = lane; i <= QT_MOE_WARPS * 16; i += 32)
                ptx_copy_4(ptx_shared(to->range + i), m->ptr + min(first * 16 + i, a.n));
        if (a.token_factor)
            for (int i = lane; i < item.rows; i += 32)
                ptx_copy_4(ptx_shared(to->token + i), a.token_factor + item.first + i);
        if (lane == 0) {
            to->header.first = item.first;
            to->header.rows = item.rows;
            to->header.tile = tile;
            to->header.factor[0] = to->header.factor[1] = m->factor;
            to->header.bias[0] = to->header.bias[1] = m->bias;
            to->col = m->ptr ? m->col : NULL;
            to->val = m->val;
        }
        ptx_copy_commit();
        ptx_copy_wait<0>();
    }
    __device__ __forceinline__ void run(int units)
    {
        wide_walk walk(a, units);
#pragma unroll 1
        for (; walk.more(); walk.advance())
#pragma unroll 1
            for (int u = 0; u < a.units; u++) {
                const uint32_t bytes = (uint32_t)mix24_unit_bytes(moe24_is_four(a, u));
                const uint32_t bar = r.full + 8 * r.stage;
                ptx_barrier_wait(r.empty + 8 * r.stage, r.parity ^ 1);
                if (u == 0)
                    open(walk);
                __syncwarp(); /* the unit has been written */
                if (lane == 0)
                    ptx_barrier_expect(bar, QT_MOE_WARPS * bytes);
                __syncwarp();
                if (lane < QT_MOE_WARPS)
                    ptx_copy_bulk(wide24_record_at(a, r.stage, lane),
                                  record + moe24_record_at(a, u), bytes, bar);
                qt_pipeline_advance(&r, QT_MOE_MIX24_RECORDS);
            }
    }
};

/* ---- outliers -----------------------------------------------------------------------------------
 *
 * Two lanes, l and l + 16, have row l of the warp's strip, and take turns at its entries, whose
 * columns ascend. A lane knows its next two entries.
 */
struct wide24_outliers {
    const wide24_unit *unit;
    uint32_t at, end;  /* the entry that is loaded next */
    uint32_t entry[2]; /* column << 16 | value */

    __device__ __forceinline__ void load(int i)
    {
        if (at < end)
            entry[i] = (uint32_t)__ldg(unit->col + at) << 16 | __ldg(unit->val + at);
        at += 2;
    }
    __device__ __forceinline__ void start(const wide24_unit *of)
    {
        const int lane = (int)threadIdx.x % 32, row = (int)threadIdx.x / 32 * 16 + lane % 16;
        unit = of;
        at = end = entry[0] = entry[1] = 0;
        if (unit->col) {
            at = unit->range[row] + lane / 16;
            end = unit->range[row + 1];
        }
        load(0);
        load(1);
    }
    /* Stores the outliers of columns `first` to first + 63. to: of the lane's row in A. */
    __device__ __forceinline__ void store(uint32_t to, uint32_t first)
    {
        const uint32_t row = threadIdx.x % 8;
        while (at < end + 4 && entry[0] >> 16 < first + 64) {
            const uint32_t c = (entry[0] >> 16) - first;
            asm volatile("st.shared.u16 [%0], %1;" ::"r"(to + (c / 8 ^ row) * 16 + c % 8 * 2),
                         "h"((uint16_t)entry[0])
                         : "memory");
            entry[0] = entry[1];
            load(1);
        }
    }
};

/* ---- mainloop ------------------------------------------------------------------------------- */

/* Decodes block b of a record to A: row r at 128 r, its 16-byte chunk c at c ^ r % 8. to: row g. */
template <bool FOUR, int b>
static __device__ __forceinline__ void wide24_decode(uint32_t to, uint32_t record,
                                                     const mix24_meta &meta)
{
    const int lane = (int)threadIdx.x % 32;
    const mix24_group group = mix24_open_group<FOUR, b>(meta);
    uint32_t words[4];
    if (FOUR) {
        const uint4 v = ptx_load_16(record + b * 512 + lane * 16);
        words[0] = v.x;
        words[1] = v.y;
        words[2] = v.z;
        words[3] = v.w;
    } else {
        const uint2 v = ptx_load_8(record + lane * 16 + b * 8);
        words[0] = v.x;
        words[1] = v.y;
    }
    to += (lane % 4 * 2 ^ lane / 4) * 16;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t f[2][4];
        mix24_fragment<FOUR>(f[0], words, 2 * half, group);
        mix24_fragment<FOUR>(f[1], words, 2 * half + 1, group);
#pragma unroll
        for (int i = 0; i < 2; i++) /* rows g and g + 8 */
            asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"((to ^ half * 16) + i * 1024),
                         "r"(f[0][i]), "r"(f[0][i + 2]), "r"(f[1][i]), "r"(f[1][i + 2])
                         : "memory");
    }
}

/* Where a lane stores to the A of its warp, and loads from it. */
struct wide24_place {
    uint32_t decode;  /* row g */
    uint32_t row;     /* row l % 16 */
    uint32_t operand; /* for ldmatrix: row l % 16, chunk l / 16 */

    __device__ __forceinline__ wide24_place(const qt_moe_mix24_args &args)
    {
        const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
        const uint32_t a = ptx_shared(qt_smem) + args.operands_at + warp * QT_MOE_MIX24_A_BYTES;
        decode = a + lane / 4 * 128;
        row = a + lane % 16 * 128;
        operand = row + (lane / 16 ^ lane % 8) * 16;
    }
};

/*
 * Multiplies a unit by N columns of B. Weights of a block of 64 columns are decoded while the
 * products of the block before run, two k-steps at a time, which take turns with two sets of
 * fragments.
 */
template <int N> struct wide24_mainloop {
    const qt_moe_mix24_args &a;
    const wide24_place &place;
    wide_sums *sums;
    wide24_outliers *outliers;
    qt_pipeline *x, *records;
    const int lane;
    uint32_t release; /* mbarrier of X of the block before; 0: none */
    mix24_meta meta;  /* of the unit of 128 columns */
    uint32_t record;
    bool four;

    __device__ __forceinline__ wide24_mainloop(const qt_moe_mix24_args &args, const wide24_place &p,
                                               wide_sums *s, wide24_outliers *o, qt_pipeline *of_x,
                                               qt_pipeline *of_records)
        : a(args), place(p), sums(s), outliers(o), x(of_x), records(of_records),
          lane((int)threadIdx.x % 32), release(0)
    {
    }
    __device__ __forceinline__ void open(int unit)
    {
        ptx_barrier_wait(records->full + 8 * records->stage, records->parity);
        record = wide24_record_at(a, records->stage, (int)threadIdx.x / 32);
        four = moe24_is_four(a, unit);
        meta =
            four ? mix24_shared_meta<true>(record, lane) : mix24_shared_meta<false>(record, lane);
    }
    __device__ __forceinline__ void decode(int block)
    {
        const bool second = block % 2;
        if (!second)
            open(block / 2);
        __syncwarp(); /* all lanes have loaded the fragments of the block before */
        if (four && second)
            wide24_decode<true, 1>(place.decode, record, meta);
        else if (four)
            wide24_decode<true, 0>(place.decode, record, meta);
        else if (second)
            wide24_decode<false, 1>(place.decode, record, meta);
        else
            wide24_decode<false, 0>(place.decode, record, meta);
        __syncwarp(); /* outliers overwrite what other lanes stored */
        outliers->store(place.row, (uint32_t)block * 64);
        __syncwarp();
        if (!second)
            return;
        if (lane == 0)
            ptx_barrier_arrive(records->empty + 8 * records->stage);
        qt_pipeline_advance(records, QT_MOE_MIX24_RECORDS);
    }
    /* Multiplies k-steps FIRST and FIRST + 1 of a block. x_at: of X in the stage. */
    template <int FIRST>
    __device__ __forceinline__ void batch(uint32_t (&now)[2][4], uint32_t x_at) const
    {
        ptx_wgmma_wait<1>();
        tile_keep_registers<2>(now); /* of the products before last, which have ended */
        if (FIRST && release && lane == 0)
            ptx_barrier_arrive(release);
#pragma unroll
        for (int s = 0; s < 2; s++)
            ptx_ldmatrix_x4(now[s], place.operand ^ (FIRST + s) * 32);
        ptx_wgmma_fence();
        ptx_wgmma<N>::run(sums->v, now, x_at + FIRST * 2);
        ptx_wgmma_commit();
    }
    __device__ __forceinline__ void run()
    {
        uint32_t frag[2][2][4] = {};
#pragma unroll 1
        for (int block = 0; block < a.slots; block++) {
            decode(block);
            ptx_barrier_wait(x->full + 8 * x->stage, x->parity);
            const uint32_t x_at =
                ptx_wgmma_b(ptx_shared(qt_smem) + a.ring_at + x->stage * a.stage_bytes);
            batch<0>(frag[0], x_at);
            batch<2>(frag[1], x_at);
            release = x->empty + 8 * x->stage;
            qt_pipeline_advance(x, a.stages);
        }
        ptx_wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            asm volatile("" : "+f"(sums->v[i])::"memory");
        tile_keep_registers<2>(frag[0]);
        tile_keep_registers<2>(frag[1]);
        if (lane == 0)
            ptx_barrier_arrive(release);
    }
};

/* ---- X --------------------------------------------------------------------------------------- */

/* 8 values of a row of X from `channel` on; those beyond the last are 0. */
static __device__ __forceinline__ uint4 moe24_gather_chunk(const __half *row, int channel, int k)
{
    if (channel + 8 <= k)
        return *(const uint4 *)(row + channel);
    uint32_t v[4] = {};
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (channel + i < k)
            v[i / 2] |= (uint32_t)__half_as_ushort(row[channel + i]) << i % 2 * 16;
    return make_uint4(v[0], v[1], v[2], v[3]);
}

/* Copies rows of X to the order of positions, and their channels to that of the expert's matrix. A
 * thread block takes 32 rows of an item at a time, a warp four of them. */
static __global__ void __launch_bounds__(256) moe24_gather_kernel(const qt_moe_mix24_gather_args a)
{
    enum { ROWS = 4, PART = 8 * ROWS, PARTS = WIDE_TOKENS / PART, CHUNKS = 4 };
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    ptx_wait_previous();
    ptx_launch_dependents();
    const int parts = *a.items * PARTS;
#pragma unroll 1
    for (int part = (int)blockIdx.x; part < parts; part += (int)gridDim.x) {
        const qt_moe_item item = a.item[part / PARTS];
        const uint16_t *const perm = a.table[item.expert * QT_MOE_MATRICES + a.matrix].perm;
        const __half *from[ROWS];
        int at[ROWS];
#pragma unroll
        for (int j = 0; j < ROWS; j++) {
            const int row = part % PARTS * PART + j * 8 + warp;
            at[j] = row < item.rows ? item.first + row : -1;
            if (at[j] < 0)
                continue;
            const int of = a.by_token ? a.order[at[j]] / a.topk : at[j];
            from[j] = a.x + (size_t)of * a.pitch;
            if (a.token_factor && lane == 0)
                a.out_factor[at[j]] = a.token_factor[of];
        }
#pragma unroll 1
        for (int i = lane; i < a.chunks; i += 32 * CHUNKS) {
            int channel[CHUNKS];
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
                channel[c] = i + c * 32 < a.chunks ? perm[(i + c * 32) / 2] * 16 + i % 2 * 8 : a.k;
#pragma unroll
            for (int j = 0; j < ROWS; j++) {
                if (at[j] < 0)
                    continue;
                uint4 v[CHUNKS];
#pragma unroll
                for (int c = 0; c < CHUNKS; c++)
                    v[c] = moe24_gather_chunk(from[j], channel[c], a.k);
#pragma unroll
                for (int c = 0; c < CHUNKS; c++)
                    if (i + c * 32 < a.chunks)
                        a.out[(size_t)at[j] * a.chunks + i + c * 32] = v[c];
            }
        }
    }
}

/* ---- kernel --------------------------------------------------------------------------------- */

static __device__ __forceinline__ void wide24_consume(const qt_moe_mix24_args &a, qt_pipeline x,
                                                      int units)
{
    const wide24_place place(a);
    qt_pipeline records = wide24_records(a);
    int number = 0;
#pragma unroll 1
    for (int unit = (int)blockIdx.x; unit < units; unit += (int)gridDim.x, number++) {
        ptx_barrier_wait(records.full + 8 * records.stage, records.parity);
        const wide24_unit &of = *wide24_unit_at(a, number);
        wide_sums sums = {};
        wide24_outliers outliers;
        outliers.start(&of);
        const int columns = wide_columns(of.header.rows);
        if (columns <= 160)
            wide24_mainloop<160>(a, place, &sums, &outliers, &x, &records).run();
        else
            wide24_mainloop<256>(a, place, &sums, &outliers, &x, &records).run();
        const float factor = of.header.factor[0];
        wide_epilogue<false, true>(a, of, make_float2(factor, factor), sums).run();
        __syncwarp(); /* all lanes have read the unit when lane 0 releases the next stage */
    }
}

static __global__ void __launch_bounds__(QT_MOE_WIDE_THREADS, 1)
    qt_moe_mix24_wide_kernel(const __grid_constant__ qt_moe_mix24_wide_args a)
{
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    const qt_pipeline x = qt_pipeline_make(ptx_shared(qt_smem) + a.barriers_at);
    const qt_pipeline records = wide24_records(a);
    if (threadIdx.x == 0) {
        qt_pipeline_init_barriers(x.full, 0, 1);
        qt_pipeline_init_barriers(x.empty, 0, QT_MOE_WARPS);
        qt_pipeline_init_barriers(records.full, 0, 1);
        qt_pipeline_init_barriers(records.empty, 0, QT_MOE_WARPS);
        ptx_barrier_init_fence();
    }
    __syncthreads();
    ptx_wait_previous();
    ptx_launch_dependents();
    const int units = moe_items(a) * a.row_tiles;
    if (warp >= QT_MOE_WARPS) {
        ptx_setmaxnreg_dec<WIDE_COPY_REGISTERS>();
        if (warp == QT_MOE_WARPS) {
            wide24_producer(a).run(units);
        } else if (warp == QT_MOE_WARPS + 1 && ptx_elect()) {
            wide24_x producer(a, units);
            moe_produce(a, x, units, &producer);
        }
    } else {
        ptx_setmaxnreg_inc<WIDE_REGISTERS>();
        wide24_consume(a, x, units);
    }
}

#endif
