/*
 * The grouped product of w4ax experts of many tokens, sm_90a, by INT8 wgmma: units and strips are
 * those of wide.cuh, mainloops those of the w4ax tile kernel (w4ax/tile.cuh).
 *
 *   grid       one thread block per multiprocessor
 *   unit       up to 128 tokens (BLOCK: 96) of one expert, and 128 rows of gate and of up, or 256
 *              of down
 *   block      two consumer warpgroups, whose warps have 2 strips of 16 rows each; four producer
 *              warps, which copy 4 strips each
 *   smem       [ stages | results | units | mbarriers ]
 *
 *   producers:  two channel blocks of X, of token scales (BLOCK), of the codes and scales of 16
 *               strips --bulk copies--> a stage. The positions of an expert begin at a multiple of
 *               8, so the rows of an item are contiguous and have the swizzle of wgmma
 *   consumers:  codes --shift, mask--> A registers --+
 *               X (shared memory) ------------------ B ---> wgmma m64nNk32 --> INT32
 *
 * A unit multiplies 64, 96 or 128 columns of B. Those beyond the tokens of its item hold old data,
 * whose results are not stored.
 *
 * Traffic    packed bytes once per item (each further tile of the same expert from L2), X once per
 *            unit through L2
 */
#ifndef QT_KERNELS_CUDA_MOE_W4AX_WIDE_CUH
#define QT_KERNELS_CUDA_MOE_W4AX_WIDE_CUH

#include "kernels/cuda/moe/unit.cuh"
#include "kernels/cuda/moe/w4ax.h"
#include "kernels/cuda/w4ax/tile.cuh"

enum {
    W4AX_WIDE_STRIPS = QT_MOE_WARPS * QT_MOE_STRIPS,
    W4AX_WIDE_PRODUCERS = 4, /* warps */
    /* The first of two named barriers; 0 is __syncthreads. */
    W4AX_WIDE_WARPGROUP = 1,
    /* Registers per thread. */
    W4AX_WIDE_COPY_REGISTERS = 40,
    W4AX_WIDE_REGISTERS = 232
};

/* The consumers read this about a unit. The producer is at most QT_MOE_STAGES units ahead. */
struct w4ax_wide_unit {
    alignas(16) float token[QT_MOE_W4AX_TOKENS]; /* INT, ROW: scales of the tokens */
    int sum[QT_MOE_W4AX_TOKENS];                 /* INT */
    /* INT, ROW: of strip u of warp w, number 2 w + u; rows g and g + 8 are adjacent. */
    __half2 row_scale[W4AX_WIDE_STRIPS][8];
    int first, rows, tile; /* positions of the item; tile of rows */
    float factor[QT_MOE_STRIPS];
    const float *bias[QT_MOE_STRIPS];
};
static_assert(sizeof(w4ax_wide_unit) <= QT_MOE_W4AX_UNIT_BYTES &&
                  (int)QT_MOE_UNITS > (int)QT_MOE_STAGES,
              "no room");

static __device__ __forceinline__ w4ax_wide_unit *w4ax_wide_unit_at(const qt_moe_w4ax_args &a,
                                                                    int number)
{
    return (w4ax_wide_unit *)(qt_smem + a.units_at +
                              number % QT_MOE_UNITS * QT_MOE_W4AX_UNIT_BYTES);
}

/* Offsets in a stage, in bytes. X is stored by channel block, the others by strip. */
template <enum qtool_w4ax_scales SCALES> struct w4ax_wide_stage {
    enum {
        BLOCKS = QT_MOE_W4AX_STAGE_BLOCKS,
        TOKENS = qt_moe_w4ax_tokens(SCALES),
        SCALE_BYTES = qt_w4ax_scale_bytes(SCALES),
        STRIP_BYTES = BLOCKS * QT_W4AX_STRIP_BYTES,
        STRIP_SCALE_BYTES = BLOCKS * SCALE_BYTES,
        CODES_AT = BLOCKS * TOKENS * 128,
        SCALES_AT = CODES_AT + W4AX_WIDE_STRIPS * STRIP_BYTES,
        TOKEN_SCALES_AT = SCALES_AT + W4AX_WIDE_STRIPS * STRIP_SCALE_BYTES
    };
};

/* ---- producers ---------------------------------------------------------------------------------
 *
 * A warp starts one bulk copy at a time, whichever lanes want one, and a copy takes it tens of
 * clocks. So four warps share those of a stage, and a copy takes two channel blocks of a strip.
 * Lanes 0 to 3 of warp w copy the codes of strips 4 w + lane, lanes 4 to 7 their scales; lane 8
 * copies X of channel block w, and lane 9 its token scales.
 */
template <enum qtool_w4ax_scales SCALES> struct w4ax_wide_producer {
    typedef w4ax_wide_stage<SCALES> stage;
    enum { STRIPS = W4AX_WIDE_STRIPS / W4AX_WIDE_PRODUCERS };
    const qt_moe_w4ax_args &a;
    const int lane, warp;
    w4ax_wide_unit *to; /* what the consumers read about the unit */
    qt_moe_item item;
    const unsigned char *from; /* codes or scales of the lane's strip */
    const __half *row_scale;

    __device__ __forceinline__ w4ax_wide_producer(const qt_moe_w4ax_args &args)
        : a(args), lane((int)threadIdx.x % 32), warp((int)threadIdx.x / 32 - QT_MOE_WARPS)
    {
    }
    __device__ __forceinline__ int strip() const
    {
        return warp * STRIPS + lane % STRIPS;
    }
    __device__ __forceinline__ void open(int unit, int count)
    {
        to = w4ax_wide_unit_at(a, count);
        item = moe_item(a, unit / a.row_tiles);
        const int tile = unit % a.row_tiles, s = strip();
        const qt_moe_w4ax_matrix *m =
            &a.table[item.expert * QT_MOE_MATRICES + a.matrix + (a.gated ? s % 2 : 0)];
        const int of_tile = a.gated ? tile * QT_MOE_WARPS + s / 2 : tile * W4AX_WIDE_STRIPS + s;
        const size_t number = (size_t)min(of_tile, a.strips - 1);
        from = lane < STRIPS ? m->plane + number * a.pitch64 * 512
                             : m->scale + number * a.blocks * stage::SCALE_BYTES;
        row_scale = m->row_scale + number * 16;
        if (warp == 0 && lane < QT_MOE_STRIPS) {
            to->factor[lane] = m->factor;
            to->bias[lane] = m->bias;
        }
        if (warp == 0 && lane == 0) {
            to->first = item.first;
            to->rows = item.rows;
            to->tile = tile;
        }
    }
    /* Bytes of the FP32 or INT32 values of the item's tokens. */
    __device__ __forceinline__ uint32_t token_bytes() const
    {
        return (uint32_t)(item.rows + 3) / 4 * 16;
    }
    /* The epilogue reads these bytes: row scales of the warp's strips, and values of the tokens. */
    __device__ __forceinline__ uint32_t unit_bytes() const
    {
        const bool tokens = warp == 0 || (warp == 1 && SCALES == QTOOL_W4AX_INT);
        return SCALES == QTOOL_W4AX_BLOCK ? 0 : STRIPS * 32 + (tokens ? token_bytes() : 0);
    }
    __device__ __forceinline__ void copy_unit(uint32_t bar) const
    {
        if (SCALES == QTOOL_W4AX_BLOCK)
            return;
        if (lane < STRIPS)
            ptx_copy_bulk(ptx_shared(to->row_scale[strip()]), row_scale, 32, bar);
        if (warp == 0 && lane == 0)
            ptx_copy_bulk(ptx_shared(to->token), a.x.scale + item.first, token_bytes(), bar);
        if (warp == 1 && SCALES == QTOOL_W4AX_INT && lane == 0)
            ptx_copy_bulk(ptx_shared(to->sum), a.x.sum + item.first, token_bytes(), bar);
    }
    /* Channel blocks and halves of them that the stage has. */
    __device__ __forceinline__ int blocks(int slot) const
    {
        return min(a.blocks - slot * stage::BLOCKS, (int)stage::BLOCKS);
    }
    __device__ __forceinline__ int halves(int slot) const
    {
        return min(a.blocks64 - slot * (2 * stage::BLOCKS), 2 * stage::BLOCKS);
    }
    /* Bytes that copy() copies. */
    __device__ __forceinline__ uint32_t bytes(int slot) const
    {
        const uint32_t x =
            (uint32_t)item.rows * 128 + (SCALES == QTOOL_W4AX_BLOCK ? token_bytes() : 0);
        return (uint32_t)(STRIPS * (halves(slot) * 512 + blocks(slot) * stage::SCALE_BYTES)) +
               (warp < blocks(slot) ? x : 0);
    }
    __device__ __forceinline__ void copy(int slot, uint32_t stage_at, uint32_t bar) const
    {
        const size_t row = (size_t)(slot * stage::BLOCKS + warp) * a.x.positions + item.first;
        if (lane < STRIPS)
            ptx_copy_bulk(stage_at + stage::CODES_AT + strip() * stage::STRIP_BYTES,
                          from + (size_t)slot * stage::STRIP_BYTES, (uint32_t)(halves(slot) * 512),
                          bar);
        else if (stage::SCALE_BYTES && lane < 2 * STRIPS)
            ptx_copy_bulk(stage_at + stage::SCALES_AT + strip() * stage::STRIP_SCALE_BYTES,
                          from + (size_t)slot * stage::STRIP_SCALE_BYTES,
                          (uint32_t)(blocks(slot) * stage::SCALE_BYTES), bar);
        if (warp >= blocks(slot))
            return;
        if (lane == 2 * STRIPS)
            ptx_copy_bulk(stage_at + warp * stage::TOKENS * 128, a.x.codes + row * 128,
                          (uint32_t)item.rows * 128, bar);
        if (SCALES == QTOOL_W4AX_BLOCK && lane == 2 * STRIPS + 1)
            ptx_copy_bulk(stage_at + stage::TOKEN_SCALES_AT + warp * stage::TOKENS * 4,
                          a.x.scale + row, token_bytes(), bar);
    }
    __device__ __forceinline__ void fill(int slot, uint32_t stage_at, uint32_t bar) const
    {
        __syncwarp(); /* the unit has been written */
        if (lane == 0)
            ptx_barrier_expect(bar, bytes(slot) + (slot == 0 ? unit_bytes() : 0));
        __syncwarp();
        if (slot == 0)
            copy_unit(bar);
        copy(slot, stage_at, bar);
    }
};

/* ---- mainloop ------------------------------------------------------------------------------- */

/* The sums of strip u, [tokens / 8][4]: rows g and g + 8 of tokens 2t and 2t + 1. */
template <enum qtool_w4ax_scales SCALES> struct w4ax_wide_sums {
    typename w4ax_sum<SCALES>::type v[QT_MOE_STRIPS][qt_moe_w4ax_tokens(SCALES) / 2];
};

/* Offsets in a stage of what a lane reads. The asm keeps them in registers. */
template <enum qtool_w4ax_scales SCALES> struct w4ax_wide_offsets {
    uint32_t codes, scales, token_scales;

    __device__ __forceinline__ w4ax_wide_offsets()
    {
        typedef w4ax_wide_stage<SCALES> stage;
        const uint32_t lane = threadIdx.x % 32, strip = threadIdx.x / 32 * QT_MOE_STRIPS;
        codes = stage::CODES_AT + strip * stage::STRIP_BYTES + lane * 16;
        scales = stage::SCALES_AT + strip * stage::STRIP_SCALE_BYTES +
                 lane / 4 * (stage::SCALE_BYTES / 8);
        token_scales = stage::TOKEN_SCALES_AT + lane % 4 * 8;
        asm volatile("" : "+r"(codes), "+r"(scales), "+r"(token_scales));
    }
};

/* Loads the words of channel block `block` of the stage and strip u. */
template <enum qtool_w4ax_scales SCALES>
static __device__ __forceinline__ void
w4ax_wide_load(w4ax_tile_words<SCALES> *words, const unsigned char *from,
               const w4ax_wide_offsets<SCALES> &at, int block, int u)
{
    typedef w4ax_wide_stage<SCALES> stage;
    words->load(from + at.codes + u * stage::STRIP_BYTES + block * QT_W4AX_STRIP_BYTES,
                from + at.scales + u * stage::STRIP_SCALE_BYTES + block * stage::SCALE_BYTES);
}

/* INT, ROW: multiplies a unit by N columns of B. The first stage has arrived. The operands of a
 * strip are unpacked while the products of the other run. */
template <enum qtool_w4ax_scales SCALES, int N>
static __device__ __forceinline__ void
w4ax_wide_multiply(int (&sums)[QT_MOE_STRIPS][QT_MOE_W4AX_TOKENS / 2], const qt_moe_w4ax_args &a,
                   qt_pipeline *r)
{
    typedef w4ax_wide_stage<SCALES> stage;
    const bool arrives = threadIdx.x % 32 == 0;
    const w4ax_wide_offsets<SCALES> at;
    const unsigned char *const stages = qt_smem + a.ring_at;
    uint32_t frag[QT_MOE_STRIPS][4][4] = {}, release = 0;
    w4ax_tile_words<SCALES> words = {{}, 0, a.nibbles};
    w4ax_wide_load<SCALES>(&words, stages + r->stage * a.stage_bytes, at, 0, 0);
#pragma unroll 1
    for (int slot = 0; slot < a.slots; slot++) {
        const unsigned char *const now = stages + r->stage * a.stage_bytes;
        const uint32_t x = ptx_wgmma_b(ptx_shared(now)), used = r->empty + 8 * r->stage;
        const bool two = a.blocks - slot * stage::BLOCKS > 1;
        qt_pipeline_advance(r, a.stages);
#pragma unroll
        for (int i = 0; i < 4; i++) { /* channel block i / 2 of strip i % 2 */
            if (i == 2 && !two)
                break;
            uint32_t(&f)[4][4] = frag[i % 2];
            words.template unpack<4>(f, 0, w4ax_constants_after(0));
            tile_keep_registers<4>(f); /* before the fence: see wgmma_registers.py */
            ptx_wgmma_fence();
            ptx_wgmma_s8<N, SCALES == QTOOL_W4AX_INT>::template run<true>(
                sums[i % 2], f, x + i / 2 * (stage::TOKENS * 128 / 16));
            ptx_wgmma_commit();
            if (i == 0 || i == 2 || (i == 1 && two)) {
                w4ax_wide_load<SCALES>(&words, now, at, (i + 1) / 2, (i + 1) % 2);
            } else if (slot + 1 < a.slots) {
                ptx_barrier_wait(r->full + 8 * r->stage, r->parity);
                w4ax_wide_load<SCALES>(&words, stages + r->stage * a.stage_bytes, at, 0, 0);
            }
            ptx_wgmma_wait<1>();
            tile_keep_registers<4>(frag[(i + 1) % 2]);
            if (i == 0 && release && arrives)
                ptx_barrier_arrive(release);
        }
        release = used;
    }
    ptx_wgmma_wait<0>();
#pragma unroll
    for (int u = 0; u < QT_MOE_STRIPS; u++) {
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            ptx_compiler_fence(sums[u][i]);
        tile_keep_registers<4>(frag[u]);
    }
    if (arrives)
        ptx_barrier_arrive(release);
}

/* BLOCK: the same. After each channel block INT32 sums are scaled and added to FP32 ones, while the
 * other warpgroup multiplies. */
template <enum qtool_w4ax_scales SCALES, int N>
static __device__ __forceinline__ void
w4ax_wide_multiply(float (&sums)[QT_MOE_STRIPS][QT_MOE_W4AX_BLOCK_TOKENS / 2],
                   const qt_moe_w4ax_args &a, qt_pipeline *r)
{
    typedef w4ax_wide_stage<SCALES> stage;
    const bool arrives = threadIdx.x % 32 == 0;
    const w4ax_wide_offsets<SCALES> at;
    const unsigned char *const stages = qt_smem + a.ring_at;
    uint32_t frag[4][4];
    int acc[N / 2];
    w4ax_tile_words<SCALES> words = {{}, 0, a.nibbles};
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        acc[i] = 0;
    w4ax_wide_load<SCALES>(&words, stages + r->stage * a.stage_bytes, at, 0, 0);
    words.template unpack<4>(frag, 0, w4ax_constants_after(0));
#pragma unroll 1
    for (int slot = 0; slot < a.slots; slot++) {
        const unsigned char *const now = stages + r->stage * a.stage_bytes;
        const uint32_t x = ptx_wgmma_b(ptx_shared(now));
        const bool two = a.blocks - slot * stage::BLOCKS > 1;
        uint32_t release = r->empty + 8 * r->stage;
        qt_pipeline_advance(r, a.stages);
#pragma unroll
        for (int i = 0; i < 4; i++) { /* channel block i / 2 of strip i % 2 */
            const int block = i / 2, u = i % 2;
            if (i == 2 && !two)
                break;
            ptx_wgmma_fence();
            ptx_wgmma_s8<N, false>::template run<false>(acc, frag,
                                                        x + block * (stage::TOKENS * 128 / 16));
            ptx_wgmma_commit();
            if (i == 0 || i == 2 || (i == 1 && two)) {
                w4ax_wide_load<SCALES>(&words, now, at, (i + 1) / 2, (i + 1) % 2);
            } else if (slot + 1 < a.slots) {
                ptx_barrier_wait(r->full + 8 * r->stage, r->parity);
                w4ax_wide_load<SCALES>(&words, stages + r->stage * a.stage_bytes, at, 0, 0);
            }
            ptx_wgmma_wait<0>();
#pragma unroll
            for (int j = 0; j < N / 2; j++)
                ptx_compiler_fence(acc[j]);
            words.template unpack<4>(frag, 0,
                                     w4ax_constants_after((uint32_t)acc[N / 2 - 1] & a.zero));
            w4ax_tile_scale<N>(sums[u], acc,
                               now + at.scales + u * stage::STRIP_SCALE_BYTES +
                                   block * stage::SCALE_BYTES,
                               now + at.token_scales + block * stage::TOKENS * 4);
        }
        release += w4ax_tile_dependency<N>(sums[1]) & a.zero;
        if (arrives)
            ptx_barrier_arrive(release);
    }
}

/* ---- epilogue ------------------------------------------------------------------------------- */

template <enum qtool_w4ax_scales SCALES> struct w4ax_wide_epilogue {
    enum { TOKENS = qt_moe_w4ax_tokens(SCALES) };
    const qt_moe_w4ax_args &a;
    const w4ax_wide_unit &unit;
    w4ax_wide_sums<SCALES> &sums;
    int lane, warp;

    __device__ __forceinline__ int row(int u) const
    {
        return moe_strip(a, unit.tile, u) * 16 + lane / 4;
    }
    /* A sum becomes the bits of the result. */
    static __device__ __forceinline__ float get(typename w4ax_sum<SCALES>::type bits)
    {
        return SCALES == QTOOL_W4AX_BLOCK ? (float)bits : __int_as_float((int)bits);
    }
    static __device__ __forceinline__ void put(typename w4ax_sum<SCALES>::type *bits, float v)
    {
        if (SCALES == QTOOL_W4AX_BLOCK)
            *(float *)bits = v;
        else
            *(int *)bits = __float_as_int(v);
    }
    /* Multiplies by all factors and adds the bias. */
    __device__ __forceinline__ void finish()
    {
        float2 factor[QT_MOE_STRIPS], bias[QT_MOE_STRIPS];
#pragma unroll
        for (int u = 0; u < QT_MOE_STRIPS; u++) {
            const float *b = unit.bias[u];
            const float f = unit.factor[u];
            factor[u] = make_float2(f, f);
            if (SCALES != QTOOL_W4AX_BLOCK) {
                const float2 s = __half22float2(unit.row_scale[warp * QT_MOE_STRIPS + u][lane / 4]);
                factor[u] = make_float2(s.x * f, s.y * f);
            }
            bias[u].x = b && row(u) < a.n ? b[row(u)] : 0;
            bias[u].y = b && row(u) + 8 < a.n ? b[row(u) + 8] : 0;
        }
#pragma unroll
        for (int t = 0; t < TOKENS / 8; t++) {
            if (t * 8 >= unit.rows)
                break;
            const int at = t * 8 + lane % 4 * 2;
            const float2 token =
                SCALES == QTOOL_W4AX_BLOCK ? make_float2(1, 1) : *(const float2 *)&unit.token[at];
            int2 sum = {};
            if (SCALES == QTOOL_W4AX_INT)
                sum = *(const int2 *)&unit.sum[at];
#pragma unroll
            for (int u = 0; u < QT_MOE_STRIPS; u++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int more = 128 * (i % 2 ? sum.y : sum.x); /* w4ax_unpack_int */
                    const float s = (float)(sums.v[u][4 * t + i] - more);
                    put(&sums.v[u][4 * t + i],
                        s * ((i < 2 ? factor[u].x : factor[u].y) * (i % 2 ? token.y : token.x)) +
                            (i < 2 ? bias[u].x : bias[u].y));
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
        const int strip = a.gated ? unit.tile * QT_MOE_WARPS + wn
                                  : (unit.tile * QT_MOE_WARPS + wn) * QT_MOE_STRIPS + u;
        const int first = strip * 16 + thread % 2 * 8, rows = max(0, a.n - first);
        char *y = (char *)a.y + ((size_t)(unit.first + thread / 8) * a.y_pitch + first) * 2;
#pragma unroll
        for (int t = 0; t < TOKENS / 8; t += 2) {
            if (t * 8 >= unit.rows)
                break;
            uint32_t four[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                four[i] = qt_round_two(a.bf16, get(sums.v[u][4 * t + 2 * i]),
                                       get(sums.v[u][4 * t + 2 * i + 1]));
            const uint4 line = ptx_transpose_16(W4AX_WIDE_WARPGROUP + group, to, four, from);
            ptx_store_halves(y + (size_t)t * 16 * a.y_pitch, line,
                             t * 8 + thread / 8 < unit.rows ? rows : 0, a.whole_stores);
        }
    }
    /* The activation of gate times up, to the place of gate. */
    __device__ __forceinline__ void activate()
    {
#pragma unroll
        for (int t = 0; t < TOKENS / 8; t++) {
            if (t * 8 >= unit.rows)
                break;
#pragma unroll
            for (int i = 4 * t; i < 4 * t + 4; i++)
                put(&sums.v[0][i], moe_gated(a, get(sums.v[0][i]), get(sums.v[1][i])));
        }
    }
    __device__ __forceinline__ void run()
    {
        finish();
        if (a.gated)
            activate();
        store(0);
        if (!a.gated)
            store(1);
    }
};

/* ---- kernel --------------------------------------------------------------------------------- */

template <enum qtool_w4ax_scales SCALES>
static __device__ __forceinline__ void w4ax_wide_consume(const qt_moe_w4ax_args &a, qt_pipeline r,
                                                         int units)
{
    int number = 0;
#pragma unroll 1
    for (int unit = (int)blockIdx.x; unit < units; unit += (int)gridDim.x, number++) {
        ptx_barrier_wait(r.full + 8 * r.stage, r.parity);
        const w4ax_wide_unit &of = *w4ax_wide_unit_at(a, number);
        w4ax_wide_sums<SCALES> sums;
#pragma unroll
        for (int i = 0; i < qt_moe_w4ax_tokens(SCALES); i++)
            sums.v[i % 2][i / 2] = 0;
        if (of.rows <= 64)
            w4ax_wide_multiply<SCALES, 64>(sums.v, a, &r);
        else if (SCALES == QTOOL_W4AX_BLOCK || of.rows <= 96)
            w4ax_wide_multiply<SCALES, 96>(sums.v, a, &r);
        else
            w4ax_wide_multiply<SCALES, qt_moe_w4ax_tokens(SCALES)>(sums.v, a, &r);
        w4ax_wide_epilogue<SCALES>{a, of, sums, (int)threadIdx.x % 32, (int)threadIdx.x / 32}.run();
    }
}

template <enum qtool_w4ax_scales SCALES>
__global__ void __launch_bounds__(QT_MOE_WIDE_THREADS, 1)
    qt_moe_w4ax_wide_kernel(const __grid_constant__ qt_moe_w4ax_args a)
{
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    const qt_pipeline r = qt_pipeline_make(ptx_shared(qt_smem) + a.barriers_at);
    if (threadIdx.x == 0) {
        qt_pipeline_init_barriers(r.full, 0, W4AX_WIDE_PRODUCERS);
        qt_pipeline_init_barriers(r.empty, 0, QT_MOE_WARPS);
        ptx_barrier_init_fence();
    }
    __syncthreads();
    ptx_wait_previous();
    ptx_launch_dependents();
    const int units = moe_items(a) * a.row_tiles;
    if (warp >= QT_MOE_WARPS) {
        ptx_setmaxnreg_dec<W4AX_WIDE_COPY_REGISTERS>();
        w4ax_wide_producer<SCALES> producer(a);
        moe_produce(a, r, units, &producer);
    } else {
        ptx_setmaxnreg_inc<W4AX_WIDE_REGISTERS>();
        w4ax_wide_consume<SCALES>(a, r, units);
    }
}

#endif
