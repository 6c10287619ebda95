/*
 * The grouped product of MIX24 experts with many tokens, sm_90a: weights are decoded to FP16 in
 * shared memory and multiplied by wgmma.
 *
 *   grid       one thread block per multiprocessor; each computes units, the grid apart
 *   unit       up to 128 tokens of one expert, and 256 rows of its matrix
 *   block      two consumer warpgroups, whose warps have 2 strips of 16 rows each; a producer
 *              warpgroup
 *   smem       [ A: decoded weights, two buffers per warpgroup of 128 rows x 64 columns | stages |
 *                results | units | mbarriers ]
 *
 *   producers:  records --bulk copies--+
 *               X, in chunks of 8 channels in packed order --cp.async--+--> a stage: 128 columns
 *   consumers:  records --> FP16 --> A (shared memory) <-- values of outliers
 *               A, X (shared memory, 128-byte swizzle) --> wgmma --> FP32 accumulators
 *
 * A lane has 16 adjacent columns of a row (layout_mix24.h), 32 bytes of A. As operands of wgmma in
 * registers they would need X in another order, in pieces of 4 bytes. In shared memory, an outlier
 * is one store to its place in A.
 *
 * Traffic    records once per item (each further tile of the same expert from L2), X once per unit
 *            through L2, CSR entries once per item
 */
#ifndef QT_KERNELS_CUDA_MOE_MIX24_WIDE_CUH
#define QT_KERNELS_CUDA_MOE_MIX24_WIDE_CUH

#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/common/pipeline.cuh"
#include "kernels/cuda/common/ptx_wgmma_shared.cuh"
#include "kernels/cuda/mix24/decode.cuh"
#include "kernels/cuda/moe/mix24_record.cuh"
#include "kernels/cuda/moe/unit.cuh"

enum {
    WIDE24_BLOCK_BYTES = QT_MOE_MIX24_MANY * 128, /* of X: 64 columns */
    WIDE24_PRODUCERS = QT_MOE_WIDE_THREADS - MOE_THREADS,
    WIDE24_ARRIVALS = WIDE24_PRODUCERS / 32 + 1, /* that fill a stage */
    WIDE24_STRIPS = QT_MOE_WARPS * QT_MOE_STRIPS,
    WIDE24_A_TILE = 64 * 128,                        /* bytes: 64 rows x 64 columns */
    WIDE24_A_BUFFER = QT_MOE_STRIPS * WIDE24_A_TILE, /* of a warpgroup */
    /* Named barriers: of the producers; of each consumer warpgroup. */
    WIDE24_PRODUCER_BARRIER = 1,
    WIDE24_WARPGROUP,
    /* Registers per thread. */
    WIDE24_COPY_REGISTERS = 56,
    WIDE24_REGISTERS = 224
};
static_assert(QT_MOE_MIX24_A_BYTES == 2 * 2 * WIDE24_A_BUFFER, "two warpgroups, two buffers");

/* The consumers read this about a unit. The producers are at most as many units ahead as there are
 * stages. */
struct wide24_unit {
    int first, rows, tile; /* positions of the item; tile of rows */
    float factor;
    const float *bias;
    const uint32_t *ptr; /* outliers, as in qt_moe_mix24_matrix */
    const uint16_t *col, *val;
    int row[QT_MOE_MIX24_MANY];     /* of X */
    float token[QT_MOE_MIX24_MANY]; /* factors of the tokens */
};
static_assert(sizeof(wide24_unit) <= QT_MOE_MIX24_WIDE_UNIT_BYTES &&
                  (int)QT_MOE_MIX24_WIDE_UNITS > QT_MOE_MIX24_WIDE_STAGES + 1,
              "no room");

static __device__ __forceinline__ wide24_unit *wide24_unit_at(const qt_moe_mix24_args &a,
                                                              int number)
{
    return (wide24_unit *)(qt_smem + a.units_at +
                           number % QT_MOE_MIX24_WIDE_UNITS * QT_MOE_MIX24_WIDE_UNIT_BYTES);
}

/* Orders this thread's accesses to shared memory before later ones by wgmma, also those of threads
 * that synchronize with it. */
static __device__ __forceinline__ void wide24_fence()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- producers ----------------------------------------------------------------------------------
 *
 * A thread copies one 16-byte chunk of every eighth row of X. wgmma reads X through the async
 * proxy: a thread announces what it copied with cp.async only after the copies have arrived, by a
 * fence and an mbarrier, which is one stage later.
 */
struct wide24_producer {
    const qt_moe_mix24_args &a;
    const int thread;
    uint32_t full;               /* mbarrier of the stage that is not announced yet; 0: none */
    int rows;                    /* of the item */
    const wide24_unit *unit;     /* that is copied */
    const unsigned char *record; /* of unit 0 of the thread's strip (threads 0 to 15) */
    const uint16_t *perm;        /* at the thread's chunk */
    uint32_t group;              /* of channels: the thread's in the next stage */

    __device__ __forceinline__ wide24_producer(const qt_moe_mix24_args &args)
        : a(args), thread((int)threadIdx.x - MOE_THREADS), full(0)
    {
    }
    __device__ __forceinline__ void open(int number, int count)
    {
        wide24_unit *const to = wide24_unit_at(a, count);
        const qt_moe_item item = moe_item(a, number / a.row_tiles);
        const int tile = number % a.row_tiles;
        const qt_moe_mix24_matrix *m = &a.table[item.expert * QT_MOE_MATRICES + a.matrix];
        const int row = moe_row(a, item.first + min(thread, item.rows - 1));
        rows = item.rows;
        unit = to;
        perm = m->perm + thread % 16 / 2;
        group = __ldg(perm);
        if (thread < WIDE24_STRIPS)
            record = m->stream +
                     (size_t)min(tile * WIDE24_STRIPS + thread, a.strips - 1) * a.strip_bytes;
        to->row[thread] = row;
        to->token[thread] = a.token_factor ? a.token_factor[row] : 1;
        if (thread == 0) {
            to->first = item.first;
            to->rows = item.rows;
            to->tile = tile;
            to->factor = m->factor;
            to->bias = m->bias;
            to->ptr = m->ptr;
            to->col = m->col;
            to->val = m->val;
        }
        ptx_named_barrier(WIDE24_PRODUCER_BARRIER, WIDE24_PRODUCERS); /* rows are known to all */
    }
    __device__ __forceinline__ void copy_records(int slot, uint32_t to, uint32_t bar) const
    {
        const uint32_t bytes = (uint32_t)mix24_unit_bytes(moe24_is_four(a, slot));
        if (thread == 0)
            ptx_barrier_expect(bar, WIDE24_STRIPS * bytes);
        __syncwarp();
        if (thread < WIDE24_STRIPS)
            ptx_copy_bulk(to + thread * a.record_bytes, record + moe24_record_at(a, slot), bytes,
                          bar);
    }
    __device__ __forceinline__ void copy_x(uint32_t to) const
    {
        const int chunk = thread % 16, row8 = thread / 16; /* row8: rows modulo 8 */
        const int channel = (int)group * 16 + chunk % 2 * 8;
        const uint32_t bytes = moe24_chunk_bytes(a, channel);
        const __half *const from = a.x + (bytes ? channel : 0);
        to += chunk / 8 * WIDE24_BLOCK_BYTES + row8 * 128 + (chunk % 8 ^ row8) * 16;
#pragma unroll 4
        for (int i = row8; i < rows; i += 8, to += 1024)
            ptx_copy_16_zero(to, from + (size_t)unit->row[i] * a.x_pitch, bytes);
    }
    /* Announces the stage before, when all but the youngest PENDING copies have arrived. */
    template <int PENDING> __device__ __forceinline__ void announce()
    {
        ptx_copy_wait<PENDING>();
        wide24_fence();
        __syncwarp();
        if (full && thread % 32 == 0)
            ptx_barrier_arrive(full);
    }
    __device__ __forceinline__ void fill(int slot, uint32_t to, uint32_t bar)
    {
        if (thread < 32)
            copy_records(slot, to + 2 * WIDE24_BLOCK_BYTES, bar);
        copy_x(to);
        ptx_copy_commit();
        if (slot + 1 < a.slots)
            group = __ldg(perm + (slot + 1) * 8);
        announce<1>();
        full = bar;
    }
};

/* ---- outliers -----------------------------------------------------------------------------------
 *
 * A lane has a row of the warp's strips: row l % 16 of strip l / 16. It walks along the entries of
 * its row, whose columns ascend, and knows the next two.
 */
struct wide24_outliers {
    const uint16_t *col, *val;
    uint32_t at, end; /* the entry that is loaded next */
    int column[2];
    uint32_t value[2];

    __device__ __forceinline__ void load(int i)
    {
        const bool there = at < end;
        column[i] = there ? (int)__ldg(col + at) : 1 << 20;
        value[i] = there ? __ldg(val + at) : 0;
        at++;
    }
    /* row: the lane's. */
    __device__ __forceinline__ void start(const wide24_unit &unit, int row, int n)
    {
        col = unit.col;
        val = unit.val;
        at = end = 0;
        if (unit.ptr && row < n) {
            at = __ldg(unit.ptr + row);
            end = __ldg(unit.ptr + row + 1);
        }
        load(0);
        load(1);
    }
    /* Stores the outliers of columns `first` to first + 63. to: of the lane's row in A. */
    __device__ __forceinline__ void store(uint32_t to, int first)
    {
        const int row = (int)threadIdx.x % 8;
        while (column[0] < first + 64) {
            const int c = column[0] - first;
            asm volatile("st.shared.u16 [%0], %1;" ::"r"(to + (c / 8 ^ row) * 16 + c % 8 * 2),
                         "h"((uint16_t)value[0])
                         : "memory");
            column[0] = column[1];
            value[0] = value[1];
            load(1);
        }
    }
};

/* ---- mainloop ------------------------------------------------------------------------------- */

/* v[u] holds the sums of 64 rows, the warp's strip u, [tokens / 8][4]: rows g and g + 8 of tokens
 * 2t and 2t + 1. */
struct wide24_sums {
    float v[QT_MOE_STRIPS][QT_MOE_MIX24_MANY / 2];
};

/* Decodes block b of a record to A. to: row g of the strip. */
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

/* The place of a warp tells it which rows of A it decodes. */
struct wide24_place {
    int lane, warp;
    uint32_t a;      /* of the warpgroup: tile of strip 0 in buffer 0 */
    uint32_t decode; /* the same, row g of the warp's strip */
    uint32_t row;    /* the same, row l % 16 of strip l / 16 */

    __device__ __forceinline__ wide24_place()
        : lane((int)threadIdx.x % 32), warp((int)threadIdx.x / 32)
    {
        a = ptx_shared(qt_smem) + warp / 4 * (2 * WIDE24_A_BUFFER);
        decode = a + (warp % 4 * 16 + lane / 4) * 128;
        row = a + lane / 16 * WIDE24_A_TILE + (warp % 4 * 16 + lane % 16) * 128;
    }
    /* The number of the warp's strip u in the thread block. */
    __device__ __forceinline__ int strip(int u) const
    {
        return warp / 4 * 8 + u * 4 + warp % 4;
    }
};

template <int N> struct wide24_multiplier {
    const qt_moe_mix24_args &a;
    const wide24_place &place;
    wide24_sums &sums;
    wide24_outliers &outliers;
    uint32_t release; /* mbarrier of the stage whose products are under way; 0: none */

    /* The products of block b of a unit: decoded while those of the block before run. */
    template <bool FOUR, int b>
    __device__ __forceinline__ void block(const mix24_meta meta[QT_MOE_STRIPS], uint32_t records,
                                          uint32_t x, int slot)
    {
#pragma unroll
        for (int u = 0; u < QT_MOE_STRIPS; u++)
            wide24_decode<FOUR, b>(place.decode + b * WIDE24_A_BUFFER + u * WIDE24_A_TILE,
                                   records + u * 4 * a.record_bytes, meta[u]);
        __syncwarp(); /* outliers overwrite what other lanes stored */
        outliers.store(place.row + b * WIDE24_A_BUFFER, slot * 128 + b * 64);
        wide24_fence();
        ptx_wgmma_wait<0>();
        /* All warps have stored; all know that the other buffer has been read. */
        ptx_named_barrier(WIDE24_WARPGROUP + place.warp / 4, 128);
        if (b == 0 && release && place.lane == 0)
            ptx_barrier_arrive(release);
        ptx_wgmma_fence();
#pragma unroll
        for (int u = 0; u < QT_MOE_STRIPS; u++)
            ptx_wgmma_shared<N>::run(sums.v[u],
                                     ptx_wgmma_b(place.a + b * WIDE24_A_BUFFER + u * WIDE24_A_TILE),
                                     ptx_wgmma_b(x + b * WIDE24_BLOCK_BYTES));
        ptx_wgmma_commit();
    }
    template <bool FOUR> __device__ __forceinline__ void unit(uint32_t stage, int slot)
    {
        const uint32_t records = stage + 2 * WIDE24_BLOCK_BYTES + place.strip(0) * a.record_bytes;
        mix24_meta meta[QT_MOE_STRIPS];
#pragma unroll
        for (int u = 0; u < QT_MOE_STRIPS; u++)
            meta[u] = mix24_shared_meta<FOUR>(records + u * 4 * a.record_bytes, place.lane);
        block<FOUR, 0>(meta, records, stage, slot);
        block<FOUR, 1>(meta, records, stage, slot);
    }
    /* The first stage has arrived. */
    __device__ __forceinline__ void run(qt_pipeline *r)
    {
#pragma unroll 1
        for (int slot = 0; slot < a.slots; slot++) {
            const uint32_t stage = ptx_shared(qt_smem) + a.ring_at + r->stage * a.stage_bytes;
            if (slot)
                ptx_barrier_wait(r->full + 8 * r->stage, r->parity);
            if (moe24_is_four(a, slot))
                unit<true>(stage, slot);
            else
                unit<false>(stage, slot);
            release = r->empty + 8 * r->stage;
            qt_pipeline_advance(r, a.stages);
        }
        ptx_wgmma_wait<0>();
#pragma unroll
        for (int u = 0; u < QT_MOE_STRIPS; u++)
#pragma unroll
            for (int i = 0; i < N / 2; i++)
                asm volatile("" : "+f"(sums.v[u][i])::"memory");
        if (place.lane == 0)
            ptx_barrier_arrive(release);
    }
};

/* ---- epilogue ------------------------------------------------------------------------------- */

struct wide24_epilogue {
    const qt_moe_mix24_args &a;
    const wide24_unit &unit;
    const wide24_place &place;
    wide24_sums &sums;

    __device__ __forceinline__ int first_row(int u) const
    {
        return (unit.tile * WIDE24_STRIPS + place.strip(u)) * 16;
    }
    /* Multiplies strip u by all factors and adds the bias. With the results of up, applies the
     * activation; up itself is stored here. */
    __device__ __forceinline__ void finish(int u)
    {
        const bool floats = !a.rounded;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = first_row(u) + i * 8 + place.lane / 4;
            const float bias = unit.bias && row < a.n ? unit.bias[row] : 0;
#pragma unroll
            for (int t = 0; t < QT_MOE_MIX24_MANY / 8; t++) {
                if (t * 8 >= unit.rows)
                    break;
#pragma unroll
                for (int odd = 0; odd < 2; odd++) {
                    const int token = t * 8 + place.lane % 4 * 2 + odd;
                    const size_t to = (size_t)(unit.first + token) * a.y_pitch + row;
                    const bool wanted = token < unit.rows && row < a.n;
                    float *const v = &sums.v[u][4 * t + 2 * i + odd];
                    *v = *v * (unit.factor * unit.token[token]) + bias;
                    if (a.up)
                        *v = moe_gated(a, *v, wanted ? a.up[to] : 0);
                    if (floats && wanted)
                        ((float *)a.y)[to] = *v;
                }
            }
        }
    }
    /* Stores strips u of the warps, rounded to 16 bits, through shared memory: see tile_store. */
    __device__ __forceinline__ void store(int u) const
    {
        const int thread = (int)threadIdx.x % 128, group = place.warp / 4, lane = place.lane;
        const uint32_t at = ptx_shared(qt_smem) + a.results_at + group * QT_MOE_MIX24_RESULT_BYTES;
        const uint32_t to = at + (lane / 16 * 8 + lane % 8) * 128 +
                            ((place.warp % 4 * 2 + lane / 8 % 2) ^ lane % 8) * 16;
        const uint32_t from = at + thread / 8 * 128 + (thread % 8 ^ thread / 8 % 8) * 16;
        const int first = first_row(u) - place.warp % 4 * 16 + thread % 8 * 8;
        const int rows = max(0, a.n - first);
        char *const y = (char *)a.y + ((size_t)(unit.first + thread / 8) * a.y_pitch + first) * 2;
#pragma unroll
        for (int t = 0; t < QT_MOE_MIX24_MANY / 8; t += 2) {
            if (t * 8 >= unit.rows)
                break;
            uint32_t four[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                four[i] =
                    qt_round_two(a.bf16, sums.v[u][4 * t + 2 * i], sums.v[u][4 * t + 2 * i + 1]);
            const uint4 line = ptx_transpose_16(WIDE24_WARPGROUP + group, to, four, from);
            ptx_store_halves(y + (size_t)t * 16 * a.y_pitch, line,
                             t * 8 + thread / 8 < unit.rows ? rows : 0, a.whole_stores);
        }
    }
};

/* ---- kernel --------------------------------------------------------------------------------- */

static __device__ __forceinline__ void wide24_consume(const qt_moe_mix24_args &a, qt_pipeline r,
                                                      int units)
{
    const wide24_place place;
    int count = 0;
#pragma unroll 1
    for (int number = (int)blockIdx.x; number < units; number += (int)gridDim.x, count++) {
        ptx_barrier_wait(r.full + 8 * r.stage, r.parity);
        const wide24_unit &unit = *wide24_unit_at(a, count);
        wide24_sums sums = {};
        wide24_outliers outliers;
        outliers.start(
            unit, (unit.tile * WIDE24_STRIPS + place.strip(place.lane / 16)) * 16 + place.lane % 16,
            a.n);
        if (unit.rows <= QT_MOE_MIX24_MANY / 2)
            wide24_multiplier<QT_MOE_MIX24_MANY / 2>{a, place, sums, outliers, 0}.run(&r);
        else
            wide24_multiplier<QT_MOE_MIX24_MANY>{a, place, sums, outliers, 0}.run(&r);
        wide24_epilogue epilogue = {a, unit, place, sums};
#pragma unroll
        for (int u = 0; u < QT_MOE_STRIPS; u++) {
            epilogue.finish(u);
            if (a.rounded)
                epilogue.store(u);
        }
    }
}

static __global__ void __launch_bounds__(QT_MOE_WIDE_THREADS, 1)
    qt_moe_mix24_wide_kernel(const __grid_constant__ qt_moe_mix24_args a)
{
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    const qt_pipeline r = qt_pipeline_make(ptx_shared(qt_smem) + a.barriers_at);
    if (threadIdx.x == 0) {
        qt_pipeline_init_barriers(r.full, 0, WIDE24_ARRIVALS);
        qt_pipeline_init_barriers(r.empty, 0, QT_MOE_WARPS);
        ptx_barrier_init_fence();
    }
    __syncthreads();
    ptx_wait_previous();
    ptx_launch_dependents();
    const int units = moe_items(a) * a.row_tiles;
    if (warp >= QT_MOE_WARPS) {
        ptx_setmaxnreg_dec<WIDE24_COPY_REGISTERS>();
        wide24_producer producer(a);
        moe_produce(a, r, units, &producer);
        producer.announce<0>();
    } else {
        ptx_setmaxnreg_inc<WIDE24_REGISTERS>();
        wide24_consume(a, r, units);
    }
}

#endif
