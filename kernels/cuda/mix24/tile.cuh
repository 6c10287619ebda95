/*
 * The mix24 tile kernel: Y = X W^T for 17 tokens and more, sm_90a. Work distribution, pipeline and
 * epilogue are in matmul/tile_common.cuh; this file defines the contents of a stage (a unit of 128
 * columns), and the mainloop.
 *
 *   launch 1:  gather.cu: X in packed order, and for outliers lists or columns of X; this kernel's
 *              weights are copied meanwhile
 *   stage:     X | a list of outliers per strip, or nothing | a record per strip
 *
 * Weights are dequantized to their exact FP16 values (decode.cuh), so the accumulators need no
 * scaling. All warps process units of the same kind at the same time; there are branches where
 * records are loaded and dequantized, and none around products. Only units of 2-bit groups have
 * outliers.
 *
 * Requires   stream 16-byte aligned
 * Traffic    packed bytes, and lists, once per BM tokens, X once per 64 WGS rows (through L2), Y
 *            once
 * Reference  the weights' exact values and an FP64 product; relative error <= 2.3e-4, FP16 output
 */
#ifndef QT_KERNELS_CUDA_MIX24_TILE_CUH
#define QT_KERNELS_CUDA_MIX24_TILE_CUH

#include "kernels/cuda/matmul/tile_common.cuh"
#include "kernels/cuda/mix24/decode.cuh"
#include "kernels/cuda/mix24/outlier_patch.cuh"
#include "kernels/cuda/mix24/tile.h"
#include "kernels/cuda/mix24/tile_outliers.cuh"

/* ---- units --------------------------------------------------------------------------------------
 *
 * With U units, F of them FOURs, unit u is a FOUR iff (u F mod U) + F >= U. The remainder of a unit
 * is u F mod U.
 */

static __device__ __forceinline__ int mix24_tile_remainder(const qt_mix24_tile_args &a, int unit)
{
    return (int)((unsigned)(unit * a.fours) % (unsigned)a.units);
}

/* Whether a unit is a FOUR; advances the remainder to the next unit. */
static __device__ __forceinline__ bool mix24_tile_next(const qt_mix24_tile_args &a, int *remainder)
{
    *remainder += a.fours;
    const bool four = *remainder >= a.units;
    *remainder -= four ? a.units : 0;
    return four;
}

template <int WGS, int BM>
struct mix24_tile_producer : tile_producer_base<qt_mix24_tile_args, BM, 2> {
    typedef tile_producer_base<qt_mix24_tile_args, BM, 2> source;
    int remainder, at; /* remainder of the unit; offset in a strip, in U64 */

    __device__ __forceinline__ mix24_tile_producer(const qt_mix24_tile_args &args) : source(args)
    {
        begin();
    }
    __device__ __forceinline__ void begin()
    {
        const qt_mix24_tile_args &a = this->a;
        const int k0 = this->s.k0, fours = (int)((unsigned)(k0 * a.fours) / (unsigned)a.units);
        remainder = mix24_tile_remainder(a, k0);
        at = (k0 * mix24_unit_bytes(false) +
              fours * (mix24_unit_bytes(true) - mix24_unit_bytes(false))) /
             8;
    }
    __device__ __forceinline__ void copy_weights(uint32_t dst, uint32_t bar) const
    {
        const qt_mix24_tile_args &a = this->a;
        int next = remainder;
        const bool four = mix24_tile_next(a, &next);
        const int list_bytes = WGS * 4 * a.list_bytes;
        ptx_barrier_expect(bar, (uint32_t)(tile_x_bytes<BM, 2>(a, this->s) + list_bytes +
                                           WGS * 4 * mix24_unit_bytes(four)));
        ptx_copy_box(dst + BM * 256 + list_bytes, &a.records[four], at, this->s.row_tile * 4 * WGS,
                     bar);
    }
    __device__ __forceinline__ void copy_x(uint32_t dst, uint32_t bar) const
    {
        const qt_mix24_tile_args &a = this->a;
        source::copy_x(dst, bar);
        if (a.list_bytes) /* written by the previous launch, like X */
            ptx_copy_box(dst + BM * 256, &a.lists, this->k_stage * (PATCH_LIST_BYTES / 8),
                         this->s.row_tile * 4 * WGS, bar);
    }
    __device__ __forceinline__ bool next()
    {
        at += mix24_unit_bytes(mix24_tile_next(this->a, &remainder)) / 8;
        return source::next();
    }
    __device__ __forceinline__ bool next_tile()
    {
        const bool more = source::next_tile();
        begin();
        return more;
    }
};

/* ---- mainloop -------------------------------------------------------------------------------- */

/* Offsets of the lane's words in the records of a tile, for TWOs. The asm keeps them in registers.

 */
struct mix24_tile_offsets {
    uint32_t warp, by_1, by_2, by_4, by_16;

    __device__ __forceinline__ mix24_tile_offsets()
    {
        const uint32_t lane = threadIdx.x % 32, record = threadIdx.x / 32 * mix24_unit_bytes(false);
        warp = threadIdx.x / 32;
        by_1 = record + lane;
        by_2 = record + lane * 2;
        by_4 = record + lane % 4 * 4;
        by_16 = record + lane * 16;
        asm volatile("" : "+r"(warp), "+r"(by_1), "+r"(by_2), "+r"(by_4), "+r"(by_16));
    }
};

/* The lane's part of a record. */
struct mix24_tile_words {
    uint4 code[2]; /* a TWO has only the first */
    mix24_meta meta;

    template <bool FOUR>
    __device__ __forceinline__ void load_as(uint32_t records, const mix24_tile_offsets &p)
    {
        using R = mix24_record<FOUR>;
        code[0] = ptx_load_16(records + p.by_16);
        if (FOUR)
            code[1] = ptx_load_16(records + 512 + p.by_16);
        const uint32_t q = ptx_load_2(records + R::Q + p.by_2);
        const uint32_t z =
            FOUR ? ptx_load_2(records + R::Z + p.by_2) : ptx_load_1(records + R::Z + p.by_1);
        meta = mix24_meta_of<FOUR>(q, z, ptx_load_4(records + R::U + p.by_4));
    }
    /* Loads the record of the warp's strip. */
    __device__ __forceinline__ void load(uint32_t records, bool four, const mix24_tile_offsets &p)
    {
        if (four)
            load_as<true>(records + p.warp * (mix24_unit_bytes(true) - mix24_unit_bytes(false)), p);
        else
            load_as<false>(records, p);
    }
};

/* Computes the fragments of batch BATCH of a unit; *group: that of the current 64 columns, set in
 * their first batch. */
template <bool FOUR, int BATCH, int STEPS>
static __device__ __forceinline__ void
mix24_tile_decode(uint32_t f[STEPS][4], const mix24_tile_words &w, mix24_group *group)
{
    const int b = BATCH * STEPS / 4, first = BATCH * STEPS % 4;
    const uint4 v = FOUR && b ? w.code[1] : w.code[0];
    const uint32_t words[4] = {FOUR || !b ? v.x : v.z, FOUR || !b ? v.y : v.w, v.z, v.w};
    if (first == 0)
        *group = mix24_open_group<FOUR, b>(w.meta);
#pragma unroll
    for (int s = 0; s < STEPS; s++)
        mix24_fragment<FOUR>(f[s], words, first + s, *group);
}

/* The products of a tile over a range of units: a batch is dequantized while the tensor cores
 * multiply the previous one. */
template <int WGS, int BM> struct mix24_tile_products {
    static const int STEPS = qt_mix24_tile_steps(WGS, BM);
    static const int BATCHES = PATCH_STEPS / STEPS; /* per unit */

    const qt_mix24_tile_args &a;
    qt_pipeline *r;
    uint32_t frag[2][STEPS][4];
    const mix24_tile_offsets places;
    mix24_tile_words words; /* of the unit that is being dequantized */
    mix24_group group;
    patch_unit<STEPS> outliers;
    uint32_t ring;
    int unit, end, row0; /* unit: the next unit */
    int remainder;
    bool four;

    __device__ __forceinline__ mix24_tile_products(const qt_mix24_tile_args &args, qt_pipeline *at,
                                                   const tile_segment &s, int strip)
        : a(args), r(at), frag{},
          outliers(ptx_shared(qt_smem) + threadIdx.x / 32 * (STEPS * PATCH_STEP_BYTES)),
          ring(ptx_shared(qt_smem) + args.ring_at), unit(s.k0), end(s.k1), row0(strip * 16),
          remainder(mix24_tile_remainder(args, s.k0))
    {
        if (patched())
            outliers.clear();
    }
    /* Whether outliers come in lists, and are outlier_sums to fragments (outlier_patch.cuh). */
    __device__ __forceinline__ bool patched() const
    {
        return !qt_mix24_tile_sums(BM) && a.list_bytes;
    }
    /* Loads the words of the next unit, at stage *r. */
    __device__ __forceinline__ void open()
    {
        const uint32_t lists = ring + r->stage * a.stage_bytes + BM * 256;
        four = mix24_tile_next(a, &remainder);
        unit++;
        ptx_barrier_wait(r->full + 8 * r->stage, r->parity);
        if (patched())
            outliers.load(lists);
        words.load(lists + WGS * 4 * a.list_bytes, four, places);
    }
    template <int BATCH> __device__ __forceinline__ void decode()
    {
        uint32_t(&f)[STEPS][4] = frag[BATCH % 2];
        if (four) {
            mix24_tile_decode<true, BATCH, STEPS>(f, words, &group);
            return;
        }
        if (!patched()) {
            mix24_tile_decode<false, BATCH, STEPS>(f, words, &group);
            return;
        }
        outliers.template before<BATCH>();
        mix24_tile_decode<false, BATCH, STEPS>(f, words, &group);
        outliers.template after<BATCH>(f, unit - 1, row0, a.outliers);
    }
    /* Multiplies a batch; x: descriptor of the unit's X. Behind the last unit, the batch that is
     * dequantized meanwhile is not used. */
    template <int BATCH>
    __device__ __forceinline__ void multiply(tile_accumulators<BM> *d, uint32_t x)
    {
        const int b = BATCH * STEPS / 4, first = BATCH * STEPS % 4;
        ptx_wgmma_fence();
        ptx_wgmma<BM>::run(d->v, frag[BATCH % 2], x + b * (BM * 8) + first * 2);
        ptx_wgmma_commit();
        if (BATCH == BATCHES - 1 && unit < end)
            open();
        ptx_wgmma_wait<1>();
        tile_keep_registers<STEPS>(frag[(BATCH + 1) % 2]);
    }
    __device__ __forceinline__ void run(tile_accumulators<BM> *d)
    {
        const int units = end - unit;
        uint32_t release = 0;
        open();
        decode<0>();
#pragma unroll 1
        for (int i = 0; i < units; i++) {
            const uint32_t x = ptx_wgmma_b(ring + r->stage * a.stage_bytes);
            const uint32_t used = r->empty + 8 * r->stage;
            qt_pipeline_advance(r, a.stages);
            multiply<0>(d, x);
            if (release && threadIdx.x % 32 == 0) /* products of the previous unit have completed */
                ptx_barrier_arrive(release);
            release = used;
            decode<1>();
            multiply<1>(d, x);
            if constexpr (BATCHES == 4) {
                decode<2>();
                multiply<2>(d, x);
                decode<3>();
                multiply<3>(d, x);
            }
            decode<0>(); /* first batch of the next unit; behind the last unit unused */
        }
        tile_wait_accumulators(d);
        tile_keep_registers<STEPS>(frag[1]);
        if (threadIdx.x % 32 == 0)
            ptx_barrier_arrive(release);
    }
};

/* ---- outlier sums -------------------------------------------------------------------------------
 *
 * The outlier warpgroup computes the sums of the tiles that the thread block stores. The thread
 * blocks of a cluster share this work: they are divided along tokens into as many parts as a tile
 * has passes of T tokens, and within a part along rows.
 */

/* Outlier sums of the n-th tile that the thread block stores, [rows][tokens]; a cluster has one
 * set. Two buffers: those of a tile are read when the next tile is synchronized. */
template <int WGS, int BM>
static __device__ __forceinline__ float *mix24_tile_outlier_sums(const qt_mix24_tile_args &a, int n)
{
    const int tile = ((int)blockIdx.x - tile_rank(a)) * 2 + (n & 1);
    return a.outlier_sums + (size_t)tile * (WGS * 64 * BM);
}

template <int WGS, int BM>
static __device__ __forceinline__ void mix24_tile_outliers(const qt_mix24_tile_args &a, int warp)
{
    const int T = QT_MIX24_TILE_T, GROUPS = WGS * 64 / OUTLIER_GROUP;
    /* A tile has one or two passes of T tokens. */
    const int rows_log2 = max(0, a.split_log2 - (BM > T)), part = tile_rank(a) >> rows_log2;
    const int tokens = BM >> (a.split_log2 - rows_log2), from = part * tokens;
    const int part_groups = GROUPS >> rows_log2; /* per thread block */
    const int begin = (tile_rank(a) - (part << rows_log2)) * part_groups;
    const int at_a_time = min((part_groups + 3) / 4, (int)OUTLIER_GROUPS);
    const uint32_t buffers = ptx_shared(qt_smem) + warp * (OUTLIER_DEPTH * outlier_buffer_bytes(T));
    bool wait = true;
    int n = 0;
#pragma unroll 1
    for (int segment = 0; segment < tile_segments(a); segment++) {
        const tile_segment s = tile_segment_at(a, segment, BM);
        if (!a.split_log2 && s.k0 > 0)
            continue;
        /* The epilogue reads up to a multiple of 8 tokens; the sums of tokens beyond m are zero. */
        const int end = min(from + tokens, (a.m + 7) / 8 * 8 - s.token0);
        const int first = s.row_tile * WGS * 64 + begin * OUTLIER_GROUP;
        float *const sums = mix24_tile_outlier_sums<WGS, BM>(a, n) + begin * OUTLIER_GROUP * BM;
        outlier_prefetch(a.outliers, first, part_groups * OUTLIER_GROUP, (int)threadIdx.x % 128,
                         128);
        qt_double_buffer_acquire(TILE_SYNC, n, WGS * 128 + 128);
#pragma unroll 1
        for (int t = from; t < end; t += T)
#pragma unroll 1
            for (int group = warp * at_a_time; group < part_groups; group += 4 * at_a_time)
#pragma unroll 1
                for (int panel = 0; panel < a.outliers.panels; panel++) {
                    const int row = group * OUTLIER_GROUP;
                    outlier_panel<T, BM>(a.outliers, panel, first + row,
                                         min(at_a_time, part_groups - group), s.token0 + t, end - t,
                                         buffers, sums + row * BM + t, wait);
                    wait = false;
                }
        if (rows_log2) /* read by other thread blocks; the cluster barrier is relaxed */
            __threadfence();
        qt_double_buffer_commit(TILE_SYNC, n++, WGS * 128 + 128);
    }
}

/* ---- kernel ---------------------------------------------------------------------------------- */

/* The Work of tile_consume. */
template <int WGS, int BM> struct mix24_tile_consumer {
    typedef float sum;
    struct per_token {
    };
    enum { AHEAD = 1, GATED = 0 };
    const qt_mix24_tile_args &a;
    int tiles_synced;          /* tiles synchronized */
    const float *outlier_sums; /* mix24_tile_outlier_sums of the last tile */

    __device__ __forceinline__ void multiply(tile_accumulators<BM> *d, qt_pipeline *r,
                                             const tile_segment &s, int strip) const
    {
        mix24_tile_products<WGS, BM>(a, r, s, strip).run(d);
    }
    __device__ __forceinline__ void sync()
    {
        if (!qt_mix24_tile_sums(BM) || !a.outliers.ptr)
            return;
        outlier_sums = mix24_tile_outlier_sums<WGS, BM>(a, tiles_synced);
        qt_double_buffer_wait(TILE_SYNC, tiles_synced++, WGS * 128 + 128);
    }
    __device__ __forceinline__ per_token token(int) const
    {
        return {};
    }
    template <int N>
    __device__ __forceinline__ void epilogue(float4 out[N], const float4 v[N], const per_token *,
                                             int token0, int token, int end) const
    {
#pragma unroll
        for (int j = 0; j < N; j++)
            out[j] = v[j];
        if (!qt_mix24_tile_sums(BM) || !a.outliers.ptr)
            return;
        const int lane = (int)threadIdx.x % 32, row = (int)threadIdx.x / 32 * 16 + lane / 4;
        const float *from = outlier_sums + row * BM + token + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (token0 + token + 8 * j >= end)
                continue;
            const float2 low = __ldcg((const float2 *)(from + 8 * j));
            const float2 high = __ldcg((const float2 *)(from + 8 * j + 8 * BM));
            out[j].x += low.x;
            out[j].y += low.y;
            out[j].z += high.x;
            out[j].w += high.y;
        }
    }
    __device__ __forceinline__ static constexpr bool wide()
    {
        return false;
    }
};

enum { MIX24_TILE_OUTLIER_REGISTERS = 96 };

/* Warpgroups besides the consumers: the producers, and one for outlier sums. */
static __host__ __device__ constexpr int mix24_tile_others(int tokens)
{
    return qt_mix24_tile_sums(tokens) ? 2 : 1;
}

/* Number of warpgroups that the launch bounds assume when they divide the registers. For few tokens
 * one more than exist, so that a thread block can start beside the last ones of the previous
 * launch. */
static __host__ __device__ constexpr int mix24_tile_bounds(int wgs, int tokens)
{
    return wgs + mix24_tile_others(tokens) + (wgs == 2 && qt_mix24_tile_sums(tokens));
}

template <int WGS, int BM>
__global__ void __launch_bounds__(mix24_tile_bounds(WGS, BM) * 128, 1)
    qt_mix24_tile_kernel(const __grid_constant__ qt_mix24_tile_args a)
{
    constexpr bool SUMS = qt_mix24_tile_sums(BM);
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    const qt_pipeline r = qt_pipeline_make(ptx_shared(qt_smem) + a.barriers_at);
    if (SUMS && warp >= (WGS + 1) * 4) {
        ptx_setmaxnreg_dec<MIX24_TILE_OUTLIER_REGISTERS>();
        ptx_launch_dependents();
        if (a.outliers.ptr)
            mix24_tile_outliers<WGS, BM>(a, warp - (WGS + 1) * 4);
    } else if (warp >= WGS * 4) {
        ptx_setmaxnreg_dec<TILE_COPY_REGISTERS>();
        tile_produce<WGS>(a, r, warp, mix24_tile_producer<WGS, BM>(a));
    } else {
        ptx_setmaxnreg_inc<tile_registers(WGS, mix24_tile_others(BM),
                                          TILE_COPY_REGISTERS +
                                              (SUMS ? (int)MIX24_TILE_OUTLIER_REGISTERS : 0),
                                          tile_launch_registers(mix24_tile_bounds(WGS, BM)))>();
        ptx_launch_dependents();
        qt_pipeline_wait_ready(WGS * 128);
        tile_consume<WGS, BM>(a, r, mix24_tile_consumer<WGS, BM>{a, 0, NULL});
    }
}

#endif
