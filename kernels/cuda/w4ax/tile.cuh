/*
 * The w4ax tile kernel computes Y = X W^T by INT8 wgmma for prefill and large batches. The weights
 * are the A operand in registers. The mapping to thread blocks and warps, the TMA pipeline and
 * Stream-K are those of matmul/tile_common.cuh; this file defines the stage and the mainloop.
 *
 *   stage     [ X: tokens x 128 bytes | token scales | codes of the strips | row scales ]
 *             for one or two channel blocks. X and token scales are stored by channel block, codes
 *             and row scales by strip. The quantize kernels have swizzled X for wgmma.
 *
 *   mainloop  codes -- shift, mask --> A registers --\
 *             X (shared memory) --------------------- wgmma m64nNk32 --> INT32 accumulators
 *     BLOCK     after each channel block: INT32 * row scale * token scale is added to FP32
 *               accumulators, while the other warpgroups multiply
 *     INT, ROW  INT32 accumulators over all of k; INT multiplies the integer scale of a channel
 *               block into the codes
 *
 * Requires    compute capability 9.0; activations that are not packed
 * Traffic     codes and scales once per BM tokens, X once per 64 WGS rows (through L2), Y once
 * Reference   plain C, integer sums bit for bit (tests/gpu/test_w4ax.c)
 * Used by     tile_plan.cc
 */
#ifndef QT_KERNELS_CUDA_W4AX_TILE_CUH
#define QT_KERNELS_CUDA_W4AX_TILE_CUH

#include "kernels/cuda/matmul/tile_common.cuh"
#include "kernels/cuda/w4ax/tile.h"
#include "kernels/cuda/w4ax/w4ax.cuh"

/* Offsets in a stage, in bytes. */
template <enum qtool_w4ax_scales SCALES, int WGS, int BM> struct w4ax_tile_stage {
    enum {
        BLOCKS = qt_w4ax_stage_blocks(SCALES, BM),
        TOKEN_SCALES_AT = BLOCKS * BM * 128,
        CODES_AT = TOKEN_SCALES_AT + qt_w4ax_token_bytes(SCALES, BM),
        STRIP_BYTES = BLOCKS * QT_W4AX_STRIP_BYTES,
        SCALES_AT = CODES_AT + 4 * WGS * STRIP_BYTES,
        SCALE_BYTES = qt_w4ax_scale_bytes(SCALES),
        STRIP_SCALE_BYTES = BLOCKS * SCALE_BYTES
    };
};

/* ---- producer: what the TMA copies to a stage ----------------------------------------------- */

template <enum qtool_w4ax_scales SCALES, int WGS, int BM>
struct w4ax_tile_producer
    : tile_producer_base<qt_w4ax_tile_args, BM, w4ax_tile_stage<SCALES, WGS, BM>::BLOCKS> {
    typedef w4ax_tile_stage<SCALES, WGS, BM> stage;
    typedef tile_producer_base<qt_w4ax_tile_args, BM, stage::BLOCKS> base;

    using base::base;

    __device__ __forceinline__ void copy_weights(uint32_t dst, uint32_t bar) const
    {
        const qt_w4ax_tile_args &a = this->a;
        const int strip = this->s.row_tile * 4 * WGS, k_stage = this->k_stage;
        ptx_barrier_expect(bar,
                           (uint32_t)(a.weight_tx + tile_x_bytes<BM, stage::BLOCKS>(a, this->s)));
        ptx_copy_box(dst + stage::CODES_AT, &a.codes, k_stage * (stage::STRIP_BYTES / 8), strip,
                     bar);
        if (stage::SCALE_BYTES)
            ptx_copy_box(dst + stage::SCALES_AT, &a.scales,
                         k_stage * (stage::STRIP_SCALE_BYTES / 8), strip, bar);
    }
    __device__ __forceinline__ void copy_x(uint32_t dst, uint32_t bar) const
    {
        base::copy_x(dst, bar);
        if (SCALES == QTOOL_W4AX_BLOCK)
            ptx_copy_box(dst + BM * 128 * stage::BLOCKS, &this->a.token_scales, this->s.token0 / 2,
                         this->k_stage * stage::BLOCKS, bar);
    }
};

/* ---- mainloop ------------------------------------------------------------------------------- */

/* Offsets in a stage of what a lane reads. The asm statement keeps them in registers: the compiler
 * cannot recompute the output of an asm. */
template <enum qtool_w4ax_scales SCALES, int WGS, int BM> struct w4ax_tile_offsets {
    uint32_t codes, scales, token_scales;

    __device__ __forceinline__ w4ax_tile_offsets()
    {
        typedef w4ax_tile_stage<SCALES, WGS, BM> stage;
        const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        codes = stage::CODES_AT + warp * stage::STRIP_BYTES + lane * 16;
        scales = stage::SCALES_AT + warp * stage::STRIP_SCALE_BYTES +
                 lane / 4 * (stage::SCALE_BYTES / 8);
        token_scales = stage::TOKEN_SCALES_AT + lane % 4 * 8;
        asm volatile("" : "+r"(codes), "+r"(scales), "+r"(token_scales));
    }
};

/* A lane's part of a channel block: code words, two per k-step, and the integer scales of its two
 * rows. */
template <enum qtool_w4ax_scales SCALES> struct w4ax_tile_words {
    uint32_t w[8];
    uint32_t scale;
    const uint32_t nibbles;

    __device__ __forceinline__ void load(const unsigned char *codes, const unsigned char *scales)
    {
        *(uint4 *)w = *(const uint4 *)codes;
        *(uint4 *)(w + 4) = *(const uint4 *)(codes + 512);
        if (SCALES == QTOOL_W4AX_INT)
            scale = *(const uint16_t *)scales;
    }
    /* Unpacks the A operands of k-steps first .. first + STEPS - 1. BLOCK, ROW: the unpacking is
     * ordered after the values that the constants depend on. */
    template <int STEPS>
    __device__ __forceinline__ void unpack(uint32_t frag[STEPS][4], int first,
                                           const w4ax_constants &c) const
    {
        const w4ax_int_scale q = w4ax_int_scale_of(scale);
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            if (SCALES == QTOOL_W4AX_INT)
                w4ax_unpack_int(frag[k], w[2 * (first + k)], w[2 * (first + k) + 1], q, nibbles);
            else
                w4ax_unpack(frag[k], w[2 * (first + k)], w[2 * (first + k) + 1], c);
    }
};

/* total += acc * row scale * token scale. The row scale comes first, so that conversion and first
 * multiplication overlap the loads of the more numerous token scales. */
template <int BM>
static __device__ __forceinline__ void w4ax_tile_scale(float total[BM / 2], const int acc[BM / 2],
                                                       const unsigned char *row_scales,
                                                       const unsigned char *token_scales)
{
    const float2 w = __half22float2(*(const __half2 *)row_scales);
#pragma unroll
    for (int j = 0; j < BM / 8; j++) {
        const float2 x = *(const float2 *)(token_scales + j * 32);
        total[4 * j] += (float)acc[4 * j] * w.x * x.x;
        total[4 * j + 1] += (float)acc[4 * j + 1] * w.x * x.y;
        total[4 * j + 2] += (float)acc[4 * j + 2] * w.y * x.x;
        total[4 * j + 3] += (float)acc[4 * j + 3] * w.y * x.y;
    }
}

/* Delays the start of warpgroup i by i * clocks; `clocks` is about the time of its first products.
 * The warpgroups wait for the same stages, so without the delay all would multiply at the same time
 * and then scale at the same time. Once staggered they stay staggered (docs/experiments, E107). */
static __device__ __forceinline__ void w4ax_tile_stagger(unsigned clocks)
{
    const unsigned begin = (unsigned)clock(), delay = threadIdx.x / 128 * clocks;
    while ((unsigned)clock() - begin < delay)
        ;
}

/* Returns bits that depend on every load of w4ax_tile_scale. The address of the empty barrier is
 * made to depend on them, so that a stage is released after these loads (see skinny_common.cuh). */
template <int BM>
static __device__ __forceinline__ uint32_t w4ax_tile_dependency(const float total[BM / 2])
{
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < BM / 8; j++)
        bits |= __float_as_uint(total[4 * j + j % 2 * 3]);
    return bits;
}

/*
 * BLOCK: mainloop of a tile over the stages [begin, end) of k.
 *
 * Operand registers are rewritten only after the wgmma that reads them has completed. The assembler
 * takes the registers of a running wgmma for free, so the unpacking is made to depend on one of its
 * accumulators. A stage is released one stage late (docs/experiments, E151), so the pipeline has
 * at least three stages.
 */
template <enum qtool_w4ax_scales SCALES, int WGS, int BM>
static __device__ __forceinline__ void w4ax_tile_accumulate(float d[BM / 2],
                                                            const qt_w4ax_tile_args &a,
                                                            qt_pipeline *r, int begin, int end)
{
    typedef w4ax_tile_stage<SCALES, WGS, BM> stage;
    const bool arrives = threadIdx.x % 32 == 0;
    const w4ax_tile_offsets<SCALES, WGS, BM> at;
    const unsigned char *stages = qt_smem + a.ring_at;
    uint32_t frag[4][4], release = 0;
    int acc[BM / 2];
    w4ax_tile_words<SCALES> words = {{}, 0, a.nibbles};
#pragma unroll
    for (int i = 0; i < BM / 2; i++)
        acc[i] = 0;
    ptx_barrier_wait(r->full + 8 * r->stage, r->parity);
    words.load(stages + r->stage * a.stage_bytes + at.codes,
               stages + r->stage * a.stage_bytes + at.scales);
    words.template unpack<4>(frag, 0, w4ax_constants_after(0));
    if (BM >= 128)
        w4ax_tile_stagger(2 * BM);
#pragma unroll 1
    for (int k_stage = begin; k_stage < end; k_stage++) {
        const unsigned char *now = stages + r->stage * a.stage_bytes;
        const uint32_t x = ptx_wgmma_b(ptx_shared(now)), used = r->empty + 8 * r->stage;
        qt_pipeline_advance(r, a.stages);
#pragma unroll
        for (int block = 0; block < stage::BLOCKS; block++) {
            ptx_wgmma_fence();
            ptx_wgmma_s8<BM, false>::template run<false>(acc, frag, x + block * (BM * 128 / 16));
            ptx_wgmma_commit();
            if (block + 1 < stage::BLOCKS) {
                words.load(now + at.codes + (block + 1) * QT_W4AX_STRIP_BYTES,
                           now + at.scales + (block + 1) * stage::SCALE_BYTES);
            } else if (k_stage + 1 < end) {
                ptx_barrier_wait(r->full + 8 * r->stage, r->parity);
                const unsigned char *next = stages + r->stage * a.stage_bytes;
                words.load(next + at.codes, next + at.scales);
            }
            ptx_wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < BM / 2; i++)
                ptx_compiler_fence(acc[i]);
            if (block == 0 && release && arrives)
                ptx_barrier_arrive(release);
            words.template unpack<4>(frag, 0,
                                     w4ax_constants_after((uint32_t)acc[BM / 2 - 1] & a.zero));
            w4ax_tile_scale<BM>(d, acc, now + at.scales + block * stage::SCALE_BYTES,
                                now + at.token_scales + block * BM * 4);
        }
        release = used;
    }
    release += w4ax_tile_dependency<BM>(d) & a.zero;
    if (arrives)
        ptx_barrier_arrive(release);
}

/* INT, ROW: mainloop in batches of k-steps, an even number of batches per stage. The accumulators
 * are not rescaled between channel blocks, so the operands of a batch are unpacked while the wgmma
 * of the previous batch runs. */
template <enum qtool_w4ax_scales SCALES, int WGS, int BM>
static __device__ __forceinline__ void
w4ax_tile_accumulate(int d[BM / 2], const qt_w4ax_tile_args &a, qt_pipeline *r, int begin, int end)
{
    typedef w4ax_tile_stage<SCALES, WGS, BM> stage;
    const int STEPS = qt_tile_steps(WGS, BM, stage::BLOCKS);
    const int BATCHES = 4 * stage::BLOCKS / STEPS;
    const bool arrives = threadIdx.x % 32 == 0;
    const w4ax_tile_offsets<SCALES, WGS, BM> at;
    const unsigned char *stages = qt_smem + a.ring_at;
    uint32_t frag[2][STEPS][4] = {}, release = 0;
    w4ax_tile_words<SCALES> words = {{}, 0, a.nibbles};
    ptx_barrier_wait(r->full + 8 * r->stage, r->parity);
    words.load(stages + r->stage * a.stage_bytes + at.codes,
               stages + r->stage * a.stage_bytes + at.scales);
#pragma unroll 1
    for (int k_stage = begin; k_stage < end; k_stage++) {
        const unsigned char *now = stages + r->stage * a.stage_bytes;
        const uint32_t x = ptx_wgmma_b(ptx_shared(now)), used = r->empty + 8 * r->stage;
        qt_pipeline_advance(r, a.stages);
#pragma unroll
        for (int batch = 0; batch < BATCHES; batch++) {
            const int block = batch * STEPS / 4, first = batch * STEPS % 4;
            uint32_t(&f)[STEPS][4] = frag[batch & 1];
            words.template unpack<STEPS>(f, first, w4ax_constants_after(0));
            tile_keep_registers<STEPS>(f); /* before the fence: see wgmma_registers.py */
            ptx_wgmma_fence();
            ptx_wgmma_s8<BM, SCALES == QTOOL_W4AX_INT>::template run<true>(
                d, f, x + block * (BM * 128 / 16) + 2 * first);
            ptx_wgmma_commit();
            if (first + STEPS == 4 && block + 1 < stage::BLOCKS) {
                words.load(now + at.codes + (block + 1) * QT_W4AX_STRIP_BYTES,
                           now + at.scales + (block + 1) * stage::SCALE_BYTES);
            } else if (batch == BATCHES - 1 && k_stage + 1 < end) {
                const unsigned char *next = stages + r->stage * a.stage_bytes;
                ptx_barrier_wait(r->full + 8 * r->stage, r->parity);
                words.load(next + at.codes, next + at.scales);
            }
            ptx_wgmma_wait<1>();
            tile_keep_registers<STEPS>(frag[(batch + 1) & 1]);
            if (batch == 0 && release && arrives)
                ptx_barrier_arrive(release);
        }
        release = used;
    }
    ptx_wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < BM / 2; i++)
        ptx_compiler_fence(d[i]);
    tile_keep_registers<STEPS>(frag[1]);
    if (arrives)
        ptx_barrier_arrive(release);
}

/* ---- the kernel ----------------------------------------------------------------------------- */

/* The Work template argument of tile_consume (matmul/tile_common.cuh). */
template <enum qtool_w4ax_scales SCALES, int WGS, int BM> struct w4ax_tile_work {
    typedef typename w4ax_sum<SCALES>::type sum;
    struct per_token {
        int2 sums; /* INT: byte sums of both tokens; the epilogue subtracts 128 times these */
    };
    /* BLOCK has no token factors. The largest tiles have no registers to load those of INT
     * ahead. */
    enum {
        AHEAD = SCALES == QTOOL_W4AX_ROW || (SCALES == QTOOL_W4AX_INT && (WGS < 4 || BM < 128)),
        GATED = 0
    };
    const qt_w4ax_tile_args &a;
    __half2 row; /* INT, ROW: scales of the lane's rows g and g + 8 */

    __device__ __forceinline__ void multiply(tile_accumulators<BM, sum> *d, qt_pipeline *r,
                                             const tile_segment &s, int strip)
    {
        if (SCALES != QTOOL_W4AX_BLOCK) /* the load overlaps the mainloop */
            row = ((const __half2 *)
                       a.row_scale)[min(strip, a.strips - 1) * 8 + (int)threadIdx.x % 32 / 4];
        w4ax_tile_accumulate<SCALES, WGS, BM>(d->v, a, r, s.k0, s.k1);
    }
    __device__ __forceinline__ void sync() const
    {
    }
    __device__ __forceinline__ per_token token(int t) const
    {
        per_token two = {{0, 0}};
        if (SCALES == QTOOL_W4AX_INT)
            two.sums = make_int2((int)ptx_load_global_or(a.x_sum + t, t < a.m, 0),
                                 (int)ptx_load_global_or(a.x_sum + t + 1, t + 1 < a.m, 0));
        return two;
    }
    /* INT: w4ax_unpack_int added 128 to each weight byte. */
    template <int N>
    __device__ __forceinline__ void epilogue(float4 out[N], const tile_four<sum> v[N],
                                             const per_token tokens[N], int, int, int) const
    {
        const float2 scale = SCALES == QTOOL_W4AX_BLOCK ? make_float2(1, 1) : __half22float2(row);
#pragma unroll
        for (int j = 0; j < N; j++) {
            const sum bias[2] = {(sum)(128 * tokens[j].sums.x), (sum)(128 * tokens[j].sums.y)};
            out[j].x = (float)(v[j].x - bias[0]) * scale.x;
            out[j].y = (float)(v[j].y - bias[1]) * scale.x;
            out[j].z = (float)(v[j].z - bias[0]) * scale.y;
            out[j].w = (float)(v[j].w - bias[1]) * scale.y;
        }
    }
    __device__ __forceinline__ bool wide() const
    {
        return a.f32;
    }
};

template <enum qtool_w4ax_scales SCALES, int WGS, int BM>
__global__ void __launch_bounds__(WGS * 128 + 128, 1)
    qt_w4ax_tile_kernel(const __grid_constant__ qt_w4ax_tile_args a)
{
    typedef w4ax_tile_stage<SCALES, WGS, BM> stage;
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    const qt_pipeline r = qt_pipeline_make(ptx_shared(qt_smem) + a.barriers_at);
    if (warp >= WGS * 4) {
        ptx_setmaxnreg_dec<TILE_COPY_REGISTERS>();
        tile_produce<WGS>(a, r, warp, w4ax_tile_producer<SCALES, WGS, BM>(a));
    } else {
        ptx_setmaxnreg_inc<tile_registers(WGS, 1, TILE_COPY_REGISTERS,
                                          tile_launch_registers(WGS + 1))>();
        ptx_launch_dependents();
        qt_pipeline_wait_ready(WGS * 128);
        tile_consume<WGS, BM>(a, r, w4ax_tile_work<SCALES, WGS, BM>{a, {}});
    }
}

#endif
