/*
 * The kernel of 4-bit integer weights for up to 32 tokens (skinny_ring.cuh): what is in a stage,
 * and how it becomes products.
 *
 *   a stage:  X, as who quantized it has arranged it | codes, slot by slot | scales | of tokens
 *
 *   codes --> shift, mask --> A registers --+
 *   X --------------------------------------+--> m16n8k32 --> INT32
 *     BLOCK     at the end of each block INT32 * scale of row * scale of token --> FP32
 *     INT, ROW  INT32 to the end, the block's integer multiplied into the codes
 *
 * BLOCK: sums of a block begin at MAGIC = 1.5 * 2^23 as bits of an FP32 number. As they stay below
 * 2^22 they are bits of MAGIC + sum then, and one FFMA takes MAGIC off and multiplies by the scale
 * of the row: scale * (MAGIC + sum) - scale * MAGIC, of which the latter is exact for a scale of
 * FP16.
 *
 * Requires    compute capability 9.0; blocks of X not packed
 * Moves       codes and scales once; X once per block and tile (through L2); Y once
 * Oracle      as the stream kernel
 */
#ifndef QT_KERNELS_CUDA_W4AX_SKINNY_CUH
#define QT_KERNELS_CUDA_W4AX_SKINNY_CUH

#include "kernels/cuda/matmul/skinny_ring.cuh"
#include "kernels/cuda/w4ax/skinny.h"
#include "kernels/cuda/w4ax/w4ax.cuh"

template <enum qtool_w4ax_scales SCALES>
struct w4ax_skinny_copies : skinny_source<qt_w4ax_skinny_args> {
    using skinny_source::skinny_source;

    __device__ __forceinline__ void copy_weights(uint32_t dst, uint32_t bar) const
    {
        ptx_barrier_expect(bar, (uint32_t)a.stage_tx);
#pragma unroll
        for (int slot = 0; slot < QT_SKINNY_SLOTS; slot++)
            ptx_copy_box(dst + a.planes_at[0] + slot * a.slot_bytes, &a.codes,
                         (k_stage * QT_SKINNY_SLOTS + slot) *
                             (QT_W4AX_SLOT_BLOCKS * QT_W4AX_STRIP_BYTES / 8),
                         strip(), bar);
        if (qt_w4ax_scale_bytes(SCALES))
            ptx_copy_box(dst + a.scales_at, &a.scales,
                         k_stage * (QT_SKINNY_BLOCKS * qt_w4ax_scale_bytes(SCALES) / 8), strip(),
                         bar);
    }
    __device__ __forceinline__ void copy_x(uint32_t dst, uint32_t bar) const
    {
        skinny_source::copy_x(dst, bar);
        if (SCALES == QTOOL_W4AX_BLOCK)
            ptx_copy_box(dst + a.token_scales_at, &a.token_scales, a.token0 / 2,
                         k_stage * QT_SKINNY_BLOCKS, bar);
    }
};

/* ---- products ----------------------------------------------------------------------------------
 */

/* Of a block: operands of its four k-steps, of MT tiles of 8 tokens; BLOCK: scales of tokens. */
template <enum qtool_w4ax_scales SCALES, int MT> struct w4ax_skinny_x {
    uint32_t v[MT][4][2];
    float2 scale[MT];

    /* at: of the lane's rows of tokens, one for each half of a block. */
    __device__ __forceinline__ void load(const uint32_t at[2], const unsigned char *scales)
    {
#pragma unroll
        for (int t = 0; t < MT; t++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint32_t r[4];
                ptx_ldmatrix_x4(r, at[half] + t * 1024);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    v[t][2 * half + i / 2][i % 2] = r[i];
            }
            if (SCALES == QTOOL_W4AX_BLOCK)
                scale[t] = *(const float2 *)(scales + t * 32);
        }
    }
};

/* total, INT32 as bits of FP32 but for BLOCK, += products of a block of a strip; codes and scales
 * of the lane. */
template <enum qtool_w4ax_scales SCALES, int MT>
static __device__ __forceinline__ void
w4ax_skinny_block(float total[MT][4], const w4ax_skinny_x<SCALES, MT> &x, uint32_t nibbles,
                  const unsigned char *codes, const unsigned char *scales)
{
    const float MAGIC = 0x1.8p23f;
    uint32_t w[8];
    *(uint4 *)w = *(const uint4 *)codes;
    *(uint4 *)(w + 4) = *(const uint4 *)(codes + 512);
    w4ax_int_scale q;
    if (SCALES == QTOOL_W4AX_INT)
        q = w4ax_int_scale_of(*(const uint16_t *)scales);
    int sums[MT][4];
#pragma unroll
    for (int t = 0; t < MT; t++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            sums[t][i] = __float_as_int(SCALES == QTOOL_W4AX_BLOCK ? MAGIC : total[t][i]);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t frag[4];
        if (SCALES == QTOOL_W4AX_INT)
            w4ax_unpack_int(frag, w[2 * k], w[2 * k + 1], q, nibbles);
        else
            w4ax_unpack(frag, w[2 * k], w[2 * k + 1], w4ax_constants_after(0));
#pragma unroll
        for (int t = 0; t < MT; t++)
            if (SCALES == QTOOL_W4AX_INT)
                ptx_mma_u8(sums[t], frag, x.v[t][k][0], x.v[t][k][1]);
            else
                ptx_mma_s8(sums[t], frag, x.v[t][k][0], x.v[t][k][1]);
    }
    float2 row = {}, off = {};
    if (SCALES == QTOOL_W4AX_BLOCK) {
        row = __half22float2(*(const __half2 *)scales);
        off = make_float2(-MAGIC * row.x, -MAGIC * row.y);
    }
#pragma unroll
    for (int t = 0; t < MT; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float v = __int_as_float(sums[t][i]);
            if (SCALES == QTOOL_W4AX_BLOCK)
                total[t][i] = fmaf(fmaf(v, i < 2 ? row.x : row.y, i < 2 ? off.x : off.y),
                                   i % 2 ? x.scale[t].y : x.scale[t].x, total[t][i]);
            else
                total[t][i] = v;
        }
}

/* For skinny_multiply_all. */
template <enum qtool_w4ax_scales SCALES, int MT, int STRIPS> struct w4ax_skinny_work {
    typedef typename w4ax_sum<SCALES>::type sum;
    enum { STRIP_SCALES = qt_w4ax_scale_bytes(SCALES) }; /* of a block */

    const qt_w4ax_skinny_args &a;
    /* In a stage: of the warp's first strip and its slot's first block; of its blocks. */
    uint32_t codes, scales, token_scales, x[QT_W4AX_SLOT_BLOCKS][2];

    __device__ __forceinline__ w4ax_skinny_work(const qt_w4ax_skinny_args &args,
                                                const skinny_warp &w)
        : a(args)
    {
        const int lane = (int)threadIdx.x % 32, first = w.wn * STRIPS;
        const int block0 = w.slot * QT_W4AX_SLOT_BLOCKS;
        codes = a.planes_at[0] + w.slot * a.slot_bytes +
                first * (QT_W4AX_SLOT_BLOCKS * QT_W4AX_STRIP_BYTES) + lane * 16;
        scales = a.scales_at + (first * QT_SKINNY_BLOCKS + block0) * STRIP_SCALES +
                 lane / 4 * (STRIP_SCALES / 8);
        token_scales = a.token_scales_at + block0 * a.token_pitch + lane % 4 * 8;
        asm volatile("" : "+r"(codes), "+r"(scales), "+r"(token_scales)); /* computed once */
        const int token = lane % 8; /* chunk i of its line is at i ^ token */
#pragma unroll
        for (int b = 0; b < QT_W4AX_SLOT_BLOCKS; b++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                x[b][half] = ptx_shared(qt_smem) + ((block0 + b) * a.x_rows + token) * 128 +
                             ((half * 4 + lane / 8) ^ token) * 16;
                asm volatile("" : "+r"(x[b][half]));
            }
    }
    __device__ __forceinline__ void begin_tile(int)
    {
    }
    template <int N>
    __device__ __forceinline__ void slot(qt_accumulators<MT, N> *sums, int stage, int) const
    {
        const unsigned char *base = qt_smem + stage;
#pragma unroll
        for (int b = 0; b < QT_W4AX_SLOT_BLOCKS; b++) {
            w4ax_skinny_x<SCALES, MT> now;
            const uint32_t at[2] = {x[b][0] + stage, x[b][1] + stage};
            now.load(at, base + token_scales + b * a.token_pitch);
#pragma unroll
            for (int u = 0; u < N; u++)
                w4ax_skinny_block<SCALES, MT>(
                    sums->v[u], now, a.nibbles,
                    base + codes + (u * QT_W4AX_SLOT_BLOCKS + b) * QT_W4AX_STRIP_BYTES,
                    base + scales + (u * QT_SKINNY_BLOCKS + b) * STRIP_SCALES);
        }
    }
    __device__ __forceinline__ void meet(int threads, int) const
    {
        ptx_named_barrier(SKINNY_MEET, threads);
    }
    __device__ __forceinline__ const float *added(int) const
    {
        return NULL;
    }
    __device__ __forceinline__ const __half *row_scales(int tile) const
    {
        return SCALES == QTOOL_W4AX_BLOCK
                   ? NULL
                   : (const __half *)(qt_smem + a.tail_at) + tile * a.tile_strips * 16;
    }
    /* INT: 128 was added to each product's byte (w4ax_unpack_int). */
    __device__ __forceinline__ float value(sum v, int token) const
    {
        return (float)(SCALES == QTOOL_W4AX_INT ? v - 128 * a.x_sum[token] : v);
    }
    __device__ __forceinline__ bool f32() const
    {
        return a.f32;
    }
};

/* ---- the kernel --------------------------------------------------------------------------------
 */

template <enum qtool_w4ax_scales SCALES, int MT, int STRIPS>
__global__ void __launch_bounds__(32 * QT_W4AX_SKINNY_WARPS + QT_RING_COPIERS, 1)
    qt_w4ax_skinny_kernel(const __grid_constant__ qt_w4ax_skinny_args a)
{
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    const int threads = (int)blockDim.x - QT_RING_COPIERS; /* that multiply */
    const qt_ring r = qt_ring_open(ptx_shared(qt_smem) + a.barriers_at);
    if (warp * 32 >= threads) {
        qt_ring_bring(a, r, warp * 32 == threads, threads, a.arrivals,
                      w4ax_skinny_copies<SCALES>(a));
        return;
    }
    if (SCALES != QTOOL_W4AX_BLOCK)
        skinny_load_row_scales(a, (__half *)(qt_smem + a.tail_at), a.row_scale, 1, threads);
    ptx_launch_dependents();
    const skinny_warp w = skinny_warp_open(a, warp, threads);
    skinny_multiply_all<MT, STRIPS, STRIPS>(a, r, w, threads,
                                            w4ax_skinny_work<SCALES, MT, STRIPS>(a, w));
}

#endif
