/*
 * The w4ax skinny kernel computes Y = X W^T for up to 32 tokens by INT8 mma.sync. The mapping to
 * thread blocks and warps, the TMA pipeline and the reduction over warps are those of
 * matmul/skinny_common.cuh; this file defines the stage and the mainloop.
 *
 *   stage     [ X, swizzled by the quantize kernels | codes by slot | row scales | token scales ]
 *
 *   mainloop  codes --> shift, mask --> A registers --+
 *             X --------------------------------------+--> m16n8k32 --> INT32 accumulators
 *     BLOCK     after each channel block: INT32 * row scale * token scale is added to FP32
 *               accumulators
 *     INT, ROW  INT32 accumulators over all of k; INT multiplies the integer scale of a channel
 *               block into the codes
 *
 * BLOCK: the INT32 accumulators of a channel block start at the bits of the FP32 number
 * MAGIC = 1.5 * 2^23. Their sums are below 2^22 in magnitude, so the results are the bits of
 * MAGIC + sum, and one FFMA subtracts MAGIC and applies the row scale:
 * scale * (MAGIC + sum) - scale * MAGIC, where scale * MAGIC is exact for an FP16 scale.
 *
 * Requires    compute capability 9.0; activations that are not packed
 * Traffic     codes and scales once; X once per thread block and tile (through L2); Y once
 * Reference   plain C, integer sums bit for bit (tests/gpu/test_w4ax.c)
 * Used by     skinny_plan.cc
 */
#ifndef QT_KERNELS_CUDA_W4AX_SKINNY_CUH
#define QT_KERNELS_CUDA_W4AX_SKINNY_CUH

#include "kernels/cuda/matmul/skinny_common.cuh"
#include "kernels/cuda/w4ax/skinny.h"
#include "kernels/cuda/w4ax/w4ax.cuh"

template <enum qtool_w4ax_scales SCALES>
struct w4ax_skinny_producer : skinny_producer_base<qt_w4ax_skinny_args> {
    using skinny_producer_base::skinny_producer_base;

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
        skinny_producer_base::copy_x(dst, bar);
        if (SCALES == QTOOL_W4AX_BLOCK)
            ptx_copy_box(dst + a.token_scales_at, &a.token_scales, a.token0 / 2,
                         k_stage * QT_SKINNY_BLOCKS, bar);
    }
};

/* ---- mainloop ------------------------------------------------------------------------------- */

/* B operands of the four k-steps of a channel block for MT tiles of 8 tokens; BLOCK: also the token
 * scales. */
template <enum qtool_w4ax_scales SCALES, int MT> struct w4ax_skinny_x {
    uint32_t v[MT][4][2];
    float2 scale[MT];

    /* at: shared addresses of the lane's token row, one for each half of the channel block. */
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

/* total += products of a channel block of a strip. total holds FP32 with BLOCK scales, else INT32
 * bit patterns. codes, scales: the lane's part in the stage. */
template <enum qtool_w4ax_scales SCALES, int MT>
static __device__ __forceinline__ void
w4ax_skinny_multiply_block(float total[MT][4], const w4ax_skinny_x<SCALES, MT> &x, uint32_t nibbles,
                           const unsigned char *codes, const unsigned char *scales)
{
    const float MAGIC = 0x1.8p23f;
    uint32_t w[8];
    *(uint4 *)w = *(const uint4 *)codes;
    *(uint4 *)(w + 4) = *(const uint4 *)(codes + 512);
    w4ax_int_scale q;
    if (SCALES == QTOOL_W4AX_INT)
        q = w4ax_int_scale_of(*(const uint16_t *)scales);
    int acc[MT][4];
#pragma unroll
    for (int t = 0; t < MT; t++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            acc[t][i] = __float_as_int(SCALES == QTOOL_W4AX_BLOCK ? MAGIC : total[t][i]);
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
                ptx_mma_u8(acc[t], frag, x.v[t][k][0], x.v[t][k][1]);
            else
                ptx_mma_s8(acc[t], frag, x.v[t][k][0], x.v[t][k][1]);
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
            const float v = __int_as_float(acc[t][i]);
            if (SCALES == QTOOL_W4AX_BLOCK)
                total[t][i] = fmaf(fmaf(v, i < 2 ? row.x : row.y, i < 2 ? off.x : off.y),
                                   i % 2 ? x.scale[t].y : x.scale[t].x, total[t][i]);
            else
                total[t][i] = v;
        }
}

/* For skinny_consume. */
template <enum qtool_w4ax_scales SCALES, int MT, int STRIPS> struct w4ax_skinny_work {
    enum { GATED = false };
    typedef typename w4ax_sum<SCALES>::type sum;
    enum { STRIP_SCALES = qt_w4ax_scale_bytes(SCALES) }; /* bytes of a strip's channel block */

    const qt_w4ax_skinny_args &a;
    /* Offsets in a stage: codes and scales of the warp's first strip and first channel block, token
     * scales of its first channel block, and X of each channel block and half. */
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
        asm volatile("" : "+r"(codes), "+r"(scales), "+r"(token_scales)); /* not recomputed */
        const int token = lane % 8; /* chunk i of a token's row is stored at i ^ token */
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
                w4ax_skinny_multiply_block<SCALES, MT>(
                    sums->v[u], now, a.nibbles,
                    base + codes + (u * QT_W4AX_SLOT_BLOCKS + b) * QT_W4AX_STRIP_BYTES,
                    base + scales + (u * QT_SKINNY_BLOCKS + b) * STRIP_SCALES);
        }
    }
    __device__ __forceinline__ void sync(int threads, int) const
    {
        ptx_named_barrier(SKINNY_SYNC, threads);
    }
    __device__ __forceinline__ const float *addend(int) const
    {
        return NULL;
    }
    __device__ __forceinline__ const __half *row_scales(int tile) const
    {
        return SCALES == QTOOL_W4AX_BLOCK
                   ? NULL
                   : (const __half *)(qt_smem + a.tail_at) + tile * a.tile_strips * 16;
    }
    /* INT: w4ax_unpack_int added 128 to each weight byte. */
    __device__ __forceinline__ float value(sum v, int token) const
    {
        return (float)(SCALES == QTOOL_W4AX_INT ? v - 128 * a.x_sum[token] : v);
    }
    __device__ __forceinline__ bool f32() const
    {
        return a.f32;
    }
};

/* ---- the kernel ----------------------------------------------------------------------------- */

template <enum qtool_w4ax_scales SCALES, int MT, int STRIPS>
__global__ void __launch_bounds__(32 * QT_W4AX_SKINNY_WARPS + QT_PRODUCER_THREADS, 1)
    qt_w4ax_skinny_kernel(const __grid_constant__ qt_w4ax_skinny_args a)
{
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    const int threads = (int)blockDim.x - QT_PRODUCER_THREADS; /* that multiply */
    const qt_pipeline r = qt_pipeline_make(ptx_shared(qt_smem) + a.barriers_at);
    if (warp * 32 >= threads) {
        qt_pipeline_produce(a, r, warp * 32 == threads, threads, a.arrivals,
                            w4ax_skinny_producer<SCALES>(a));
        return;
    }
    if (SCALES != QTOOL_W4AX_BLOCK)
        skinny_load_row_scales(a, (__half *)(qt_smem + a.tail_at), a.row_scale, 1, threads);
    ptx_launch_dependents();
    const skinny_warp w = skinny_warp_open(a, warp, threads);
    skinny_consume<MT, STRIPS, STRIPS>(a, r, w, threads,
                                       w4ax_skinny_work<SCALES, MT, STRIPS>(a, w));
}

#endif
