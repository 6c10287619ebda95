/*
 * The tile kernel (tile_ring.cuh) of 4-bit integer weights: wgmma of signed bytes, weights as A
 * operand in registers.
 *
 *   stage    [ X: tokens x 128 bytes | scales of tokens | codes of the strips | their scales ]
 *            of one or two blocks of 128 channels, X and scales of tokens block by block, the
 *            others strip by strip; X as who quantized it has arranged it for wgmma
 *
 *   codes -- shift, mask --> A registers --\
 *   X ------------------------------------- wgmma m64nNk32 --> INT32
 *     BLOCK     at the end of each block INT32 * scale of row * scale of token --> FP32, while the
 *               other warpgroups multiply
 *     INT, ROW  INT32 to the end, the block's integer multiplied into the codes
 *
 * Requires    compute capability 9.0; blocks of X not packed
 * Moves       codes and scales once per BM tokens, X once per 64 WGS rows (through L2), Y once
 * Oracle      as the stream kernel
 */
#ifndef QT_KERNELS_CUDA_W4AX_TILE_CUH
#define QT_KERNELS_CUDA_W4AX_TILE_CUH

#include "kernels/cuda/matmul/tile_ring.cuh"
#include "kernels/cuda/w4ax/tile.h"
#include "kernels/cuda/w4ax/w4ax.cuh"

/* Where things are in a stage. */
template <enum qtool_w4ax_scales SCALES, int WGS, int BM> struct w4ax_stage {
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

/* ---- copies ------------------------------------------------------------------------------------
 */

template <enum qtool_w4ax_scales SCALES, int WGS, int BM>
struct w4ax_tile_copies : tile_source<qt_w4ax_tile_args, BM, w4ax_stage<SCALES, WGS, BM>::BLOCKS> {
    typedef w4ax_stage<SCALES, WGS, BM> stage;
    typedef tile_source<qt_w4ax_tile_args, BM, stage::BLOCKS> source;

    using source::source;

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
        source::copy_x(dst, bar);
        if (SCALES == QTOOL_W4AX_BLOCK)
            ptx_copy_box(dst + BM * 128 * stage::BLOCKS, &this->a.token_scales, this->s.token0 / 2,
                         this->k_stage * stage::BLOCKS, bar);
    }
};

/* ---- products ----------------------------------------------------------------------------------
 */

/* Where what a lane reads is in a stage: computed once, and kept, as the compiler cannot compute
 * anew what comes out of an asm. */
template <enum qtool_w4ax_scales SCALES, int WGS, int BM> struct w4ax_tile_places {
    uint32_t codes, scales, token_scales;

    __device__ __forceinline__ w4ax_tile_places()
    {
        typedef w4ax_stage<SCALES, WGS, BM> stage;
        const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        codes = stage::CODES_AT + warp * stage::STRIP_BYTES + lane * 16;
        scales = stage::SCALES_AT + warp * stage::STRIP_SCALE_BYTES +
                 lane / 4 * (stage::SCALE_BYTES / 8);
        token_scales = stage::TOKEN_SCALES_AT + lane % 4 * 8;
        asm volatile("" : "+r"(codes), "+r"(scales), "+r"(token_scales));
    }
};

/* What a lane has of a block of channels: words of two k-steps each, integer scales of its rows. */
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
    /* A operands of k-steps from `first` on; BLOCK: not before what the constants depend on. */
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

/* total += sums * scales of rows * scales of tokens. In this order: sums are on their way while the
 * scales of tokens, many more, are still being loaded. */
template <int BM>
static __device__ __forceinline__ void w4ax_tile_scale(float total[BM / 2], const int sums[BM / 2],
                                                       const unsigned char *row_scales,
                                                       const unsigned char *token_scales)
{
    const float2 w = __half22float2(*(const __half2 *)row_scales);
#pragma unroll
    for (int j = 0; j < BM / 8; j++) {
        const float2 x = *(const float2 *)(token_scales + j * 32);
        total[4 * j] += (float)sums[4 * j] * w.x * x.x;
        total[4 * j + 1] += (float)sums[4 * j + 1] * w.x * x.y;
        total[4 * j + 2] += (float)sums[4 * j + 2] * w.y * x.x;
        total[4 * j + 3] += (float)sums[4 * j + 3] * w.y * x.y;
    }
}

/* Each warpgroup begins a tile so many clocks later than the one before, about as long as its first
 * products take. As they wait for the same stages, all would multiply at a time, and scale at a
 * time; once apart they stay so by themselves (docs/kernels_w4ax.md). */
static __device__ __forceinline__ void w4ax_tile_stagger(unsigned clocks)
{
    const unsigned begin = (unsigned)clock(), wait = threadIdx.x / 128 * clocks;
    while ((unsigned)clock() - begin < wait)
        ;
}

/* Bits that are not known before all that w4ax_tile_scale reads has come: see skinny_ring.cuh. */
template <int BM>
static __device__ __forceinline__ uint32_t w4ax_tile_bits(const float total[BM / 2])
{
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < BM / 8; j++)
        bits |= __float_as_uint(total[4 * j + j % 2 * 3]);
    return bits;
}

/*
 * BLOCK: products of a tile over stages [begin, end).
 *
 * Operands are written when the products that read the former ones have ended: the assembler takes
 * the registers of products under way for free; therefore unpacking depends on one of their sums. A
 * stage is given back one later (docs/kernels.md), so that there are three at least.
 */
template <enum qtool_w4ax_scales SCALES, int WGS, int BM>
static __device__ __forceinline__ void
w4ax_tile_accumulate(float d[BM / 2], const qt_w4ax_tile_args &a, qt_ring *r, int begin, int end)
{
    typedef w4ax_stage<SCALES, WGS, BM> stage;
    const bool speaks = threadIdx.x % 32 == 0;
    const w4ax_tile_places<SCALES, WGS, BM> places;
    const unsigned char *ring = qt_smem + a.ring_at;
    uint32_t frag[4][4], release = 0;
    int sums[BM / 2];
    w4ax_tile_words<SCALES> words = {{}, 0, a.nibbles};
#pragma unroll
    for (int i = 0; i < BM / 2; i++)
        sums[i] = 0;
    ptx_barrier_wait(r->full + 8 * r->stage, r->parity);
    words.load(ring + r->stage * a.stage_bytes + places.codes,
               ring + r->stage * a.stage_bytes + places.scales);
    words.template unpack<4>(frag, 0, w4ax_constants_after(0));
    if (BM >= 128)
        w4ax_tile_stagger(2 * BM);
#pragma unroll 1
    for (int k_stage = begin; k_stage < end; k_stage++) {
        const unsigned char *now = ring + r->stage * a.stage_bytes;
        const uint32_t x = ptx_wgmma_b(ptx_shared(now)), used = r->empty + 8 * r->stage;
        qt_ring_next(r, a.stages);
#pragma unroll
        for (int block = 0; block < stage::BLOCKS; block++) {
            ptx_wgmma_fence();
            ptx_wgmma_s8<BM, false>::template run<false>(sums, frag, x + block * (BM * 128 / 16));
            ptx_wgmma_commit();
            if (block + 1 < stage::BLOCKS) {
                words.load(now + places.codes + (block + 1) * QT_W4AX_STRIP_BYTES,
                           now + places.scales + (block + 1) * stage::SCALE_BYTES);
            } else if (k_stage + 1 < end) {
                ptx_barrier_wait(r->full + 8 * r->stage, r->parity);
                const unsigned char *next = ring + r->stage * a.stage_bytes;
                words.load(next + places.codes, next + places.scales);
            }
            ptx_wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < BM / 2; i++)
                ptx_keep_behind(sums[i]);
            if (block == 0 && release && speaks)
                ptx_barrier_arrive(release);
            words.template unpack<4>(frag, 0,
                                     w4ax_constants_after((uint32_t)sums[BM / 2 - 1] & a.zero));
            w4ax_tile_scale<BM>(d, sums, now + places.scales + block * stage::SCALE_BYTES,
                                now + places.token_scales + block * BM * 4);
        }
        release = used;
    }
    release += w4ax_tile_bits<BM>(d) & a.zero;
    if (speaks)
        ptx_barrier_arrive(release);
}

/* INT, ROW: the same in batches of k-steps, an even number of them a stage. Sums stay what they are
 * for all of k, so the operands of a batch are unpacked while the batch before is multiplied. */
template <enum qtool_w4ax_scales SCALES, int WGS, int BM>
static __device__ __forceinline__ void
w4ax_tile_accumulate(int d[BM / 2], const qt_w4ax_tile_args &a, qt_ring *r, int begin, int end)
{
    typedef w4ax_stage<SCALES, WGS, BM> stage;
    const int STEPS = qt_tile_steps(WGS, BM, stage::BLOCKS);
    const int BATCHES = 4 * stage::BLOCKS / STEPS;
    const bool speaks = threadIdx.x % 32 == 0;
    const w4ax_tile_places<SCALES, WGS, BM> places;
    const unsigned char *ring = qt_smem + a.ring_at;
    uint32_t frag[2][STEPS][4] = {}, release = 0;
    w4ax_tile_words<SCALES> words = {{}, 0, a.nibbles};
    ptx_barrier_wait(r->full + 8 * r->stage, r->parity);
    words.load(ring + r->stage * a.stage_bytes + places.codes,
               ring + r->stage * a.stage_bytes + places.scales);
#pragma unroll 1
    for (int k_stage = begin; k_stage < end; k_stage++) {
        const unsigned char *now = ring + r->stage * a.stage_bytes;
        const uint32_t x = ptx_wgmma_b(ptx_shared(now)), used = r->empty + 8 * r->stage;
        qt_ring_next(r, a.stages);
#pragma unroll
        for (int batch = 0; batch < BATCHES; batch++) {
            const int block = batch * STEPS / 4, first = batch * STEPS % 4;
            uint32_t(&f)[STEPS][4] = frag[batch & 1];
            words.template unpack<STEPS>(f, first, w4ax_constants_after(0));
            tile_keep<STEPS>(f); /* computed before the fence; wgmma_registers.py looks */
            ptx_wgmma_fence();
            ptx_wgmma_s8<BM, SCALES == QTOOL_W4AX_INT>::template run<true>(
                d, f, x + block * (BM * 128 / 16) + 2 * first);
            ptx_wgmma_commit();
            if (first + STEPS == 4 && block + 1 < stage::BLOCKS) {
                words.load(now + places.codes + (block + 1) * QT_W4AX_STRIP_BYTES,
                           now + places.scales + (block + 1) * stage::SCALE_BYTES);
            } else if (batch == BATCHES - 1 && k_stage + 1 < end) {
                const unsigned char *next = ring + r->stage * a.stage_bytes;
                ptx_barrier_wait(r->full + 8 * r->stage, r->parity);
                words.load(next + places.codes, next + places.scales);
            }
            ptx_wgmma_wait<1>();
            tile_keep<STEPS>(frag[(batch + 1) & 1]);
            if (batch == 0 && release && speaks)
                ptx_barrier_arrive(release);
        }
        release = used;
    }
    ptx_wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < BM / 2; i++)
        ptx_keep_behind(d[i]);
    tile_keep<STEPS>(frag[1]);
    if (speaks)
        ptx_barrier_arrive(release);
}

/* ---- the kernel --------------------------------------------------------------------------------
 */

/* For tile_multiply_all. */
template <enum qtool_w4ax_scales SCALES, int WGS, int BM> struct w4ax_tile_work {
    typedef typename w4ax_sum<SCALES>::type sum;
    struct per_token {
        int2 sums; /* INT: of the codes of both, which are to be taken off 128 times */
    };
    /* BLOCK has no factors; the largest tiles no registers for those of INT. */
    enum {
        AHEAD = SCALES == QTOOL_W4AX_ROW || (SCALES == QTOOL_W4AX_INT && (WGS < 4 || BM < 128))
    };
    const qt_w4ax_tile_args &a;
    __half2 row; /* INT, ROW: scales of rows g and g + 8 */

    __device__ __forceinline__ void multiply(tile_sums<BM, sum> *d, qt_ring *r,
                                             const tile_segment &s, int strip)
    {
        if (SCALES != QTOOL_W4AX_BLOCK) /* loaded while there are products */
            row = ((const __half2 *)
                       a.row_scale)[min(strip, a.strips - 1) * 8 + (int)threadIdx.x % 32 / 4];
        w4ax_tile_accumulate<SCALES, WGS, BM>(d->v, a, r, s.k0, s.k1);
    }
    __device__ __forceinline__ void meet() const
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
    /* INT: 128 was added to each product's byte (w4ax_unpack_int). */
    template <int N>
    __device__ __forceinline__ void finish(float4 out[N], const tile_four<sum> v[N],
                                           const per_token tokens[N], int, int, int) const
    {
        const float2 scale = SCALES == QTOOL_W4AX_BLOCK ? make_float2(1, 1) : __half22float2(row);
#pragma unroll
        for (int j = 0; j < N; j++) {
            const sum less[2] = {(sum)(128 * tokens[j].sums.x), (sum)(128 * tokens[j].sums.y)};
            out[j].x = (float)(v[j].x - less[0]) * scale.x;
            out[j].y = (float)(v[j].y - less[1]) * scale.x;
            out[j].z = (float)(v[j].z - less[0]) * scale.y;
            out[j].w = (float)(v[j].w - less[1]) * scale.y;
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
    typedef w4ax_stage<SCALES, WGS, BM> stage;
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    const qt_ring r = qt_ring_open(ptx_shared(qt_smem) + a.barriers_at);
    if (warp >= WGS * 4) {
        ptx_registers_fewer<TILE_COPY_REGISTERS>();
        tile_bring<WGS>(a, r, warp, w4ax_tile_copies<SCALES, WGS, BM>(a));
    } else {
        ptx_registers_more<tile_registers(WGS, 1, TILE_COPY_REGISTERS,
                                          tile_launch_registers(WGS + 1))>();
        ptx_launch_dependents();
        qt_ring_start(WGS * 128);
        tile_multiply_all<WGS, BM>(a, r, w4ax_tile_work<SCALES, WGS, BM>{a, {}});
    }
}

#endif
