/*
 * The grouped product of w4ax experts by mma.sync: units, strips and pipeline are those of
 * product.cuh, products those of the w4ax stream kernel (w4ax/stream.cuh).
 *
 *   stage:     [ X: WK channel blocks of the tokens, 16-byte chunk c of row r at c ^ r % 8 | BLOCK:
 *                their token scales | per warp: codes and scales of 2 strips x a channel block |
 *                header ]                                                        <-- cp.async
 *   mainloop:  words --shift, mask--> A fragments --+
 *              X --------- ldmatrix --> B fragments +--> mma.sync m16n8k32 --> INT32 sums
 *     BLOCK      after each channel block: INT32 * row scale * token scale is added to FP32 sums
 *     INT, ROW   INT32 over all of k
 *
 * Traffic    packed bytes once per item (each further tile of the same expert from L2), X once per
 *            unit through L2
 */
#ifndef QT_KERNELS_CUDA_MOE_W4AX_PRODUCT_CUH
#define QT_KERNELS_CUDA_MOE_W4AX_PRODUCT_CUH

#include "kernels/cuda/moe/unit.cuh"
#include "kernels/cuda/moe/w4ax.h"
#include "kernels/cuda/w4ax/w4ax.cuh"

/* The epilogue reads this description of its unit. */
struct moe_w4ax_header {
    int first, rows, tile; /* positions of the item; tile of rows */
    float factor[QT_MOE_STRIPS];
    int unused;
    const float *bias[QT_MOE_STRIPS];
    const __half *row_scale[QT_MOE_STRIPS];
};
static_assert(sizeof(moe_w4ax_header) <= QT_MOE_HEADER, "no room");

/* Offsets in a stage, in bytes. */
template <int MT> struct moe_w4ax_stage {
    static __device__ __forceinline__ int token_scales_at(const qt_moe_w4ax_args &a)
    {
        return MT * 1024 << a.log2_wk;
    }
    static __device__ __forceinline__ int weights_at(const qt_moe_w4ax_args &a)
    {
        return (MT * 1024 + MT * 32) << a.log2_wk;
    }
    static __device__ __forceinline__ int header_at(const qt_moe_w4ax_args &a)
    {
        return weights_at(a) + QT_MOE_WARPS * QT_MOE_W4AX_WARP_BYTES;
    }
};

/* ---- copies ---------------------------------------------------------------------------------- */

/* The stage that is copied next: slot number `slot` of unit number `unit`. */
template <int SCALES, int MT> struct moe_w4ax_loader {
    typedef moe_w4ax_stage<MT> stage;
    enum { CHUNKS = SCALES == QTOOL_W4AX_BLOCK ? 2 : SCALES == QTOOL_W4AX_INT ? 1 : 0 };
    int unit, units, slot;
    qt_moe_item item;
    int tile, block;                           /* block: the warp's channel block */
    const unsigned char *codes[QT_MOE_STRIPS]; /* at `block`, and the lane's 16 bytes there */
    const unsigned char *scale;                /* of the strip whose scales the lane copies */
    moe_w4ax_header header;

    __device__ __forceinline__ moe_w4ax_loader(int count)
        : unit((int)blockIdx.x), units(count), slot(0)
    {
    }
    __device__ __forceinline__ void restart()
    {
        unit = (int)blockIdx.x;
        slot = 0;
    }
    __device__ __forceinline__ void open(const qt_moe_w4ax_args &a)
    {
        const int lane = (int)threadIdx.x % 32, bytes = CHUNKS * 16;
        item = moe_item(a, unit / a.row_tiles);
        tile = unit % a.row_tiles;
        block = (int)threadIdx.x / 32 & ((1 << a.log2_wk) - 1);
        header.first = item.first;
        header.rows = item.rows;
        header.tile = tile;
#pragma unroll
        for (int u = 0; u < QT_MOE_STRIPS; u++) {
            const qt_moe_w4ax_matrix *m =
                &a.table[item.expert * QT_MOE_MATRICES + a.matrix + (a.gated ? u : 0)];
            const size_t strip = (size_t)min(moe_strip(a, tile, u), a.strips - 1);
            codes[u] = m->plane + (strip * a.pitch64 + 2 * block) * 512 + lane * 16;
            if (CHUNKS && lane / (CHUNKS + !CHUNKS) == u)
                scale =
                    m->scale + (strip * a.blocks + block) * bytes + lane % (CHUNKS + !CHUNKS) * 16;
            header.factor[u] = m->factor;
            header.bias[u] = m->bias;
            header.row_scale[u] = m->row_scale;
        }
    }
    __device__ __forceinline__ void copy_x(const qt_moe_w4ax_args &a, uint32_t to) const
    {
#pragma unroll 1
        for (int w = 0; w < 1 << a.log2_wk; w++) {
            const int kb = (slot << a.log2_wk) + w;
            if (kb >= a.blocks)
                break;
            const size_t row = (size_t)kb * a.x.positions + item.first;
#pragma unroll
            for (int i = 0; i < MT * 64; i += MOE_THREADS) {
                const int at = i + (int)threadIdx.x, r = at / 8, c = at % 8;
                if (r < item.rows)
                    ptx_copy_16(to + (w * MT * 8 + r) * 128 + (c ^ r % 8) * 16,
                                a.x.codes + (row + r) * 128 + (c ^ (item.first + r) % 8) * 16);
            }
            if (SCALES == QTOOL_W4AX_BLOCK && (int)threadIdx.x < item.rows)
                ptx_copy_4(to + stage::token_scales_at(a) + (w * MT * 8 + threadIdx.x) * 4,
                           a.x.scale + row + threadIdx.x);
        }
    }
    /* Without `really` only moves on. */
    __device__ __forceinline__ void copy_weights(const qt_moe_w4ax_args &a, uint32_t to,
                                                 bool really)
    {
        const int lane = (int)threadIdx.x % 32, step = 1 << a.log2_wk;
        const bool here = really && block < a.blocks;
#pragma unroll
        for (int u = 0; u < QT_MOE_STRIPS; u++) {
            ptx_copy_16_if(to + u * 1024 + lane * 16, codes[u], here);
            ptx_copy_16_if(to + u * 1024 + 512 + lane * 16, codes[u] + 512,
                           here && 2 * block + 1 < a.blocks64);
            codes[u] += 1024 * step;
        }
        if (CHUNKS) {
            const int u = lane / (CHUNKS + !CHUNKS), h = lane % (CHUNKS + !CHUNKS);
            ptx_copy_16_if(to + QT_MOE_STRIPS * 1024 + u * 32 + h * 16, scale,
                           here && u < QT_MOE_STRIPS);
            scale += CHUNKS * 16 * step;
        }
        block += step;
    }
    /* Copies the next stage, or its weights or its X alone, to `to`, and moves on. */
    __device__ __forceinline__ void copy(const qt_moe_w4ax_args &a, unsigned char *to, bool weights,
                                         bool of_x)
    {
        if (unit >= units)
            return;
        if (slot == 0) {
            open(a);
            if (threadIdx.x == 0)
                *(moe_w4ax_header *)(to + stage::header_at(a)) = header;
        }
        if (of_x)
            copy_x(a, ptx_shared(to));
        copy_weights(
            a, ptx_shared(to) + stage::weights_at(a) + threadIdx.x / 32 * QT_MOE_W4AX_WARP_BYTES,
            weights);
        if (++slot == a.slots) {
            slot = 0;
            unit += (int)gridDim.x;
        }
    }
};

/* ---- mainloop ------------------------------------------------------------------------------- */

/* The products of the warp's channel block of a stage. */
template <int SCALES, int MT>
static __device__ __forceinline__ void
moe_w4ax_multiply(typename w4ax_sum<SCALES>::type sums[QT_MOE_STRIPS][MT][4],
                  const qt_moe_w4ax_args &a, const unsigned char *from, int slot)
{
    typedef moe_w4ax_stage<MT> stage;
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int wk = warp & ((1 << a.log2_wk) - 1);
    if ((slot << a.log2_wk) + wk >= a.blocks)
        return;
    const unsigned char *weights = from + stage::weights_at(a) + warp * QT_MOE_W4AX_WARP_BYTES;
    const unsigned char *token_scales = from + stage::token_scales_at(a) + wk * MT * 32;
    uint32_t frag[QT_MOE_STRIPS][4][4];
    float2 row_scale[QT_MOE_STRIPS];
#pragma unroll
    for (int u = 0; u < QT_MOE_STRIPS; u++) {
        const unsigned char *scale = weights + QT_MOE_STRIPS * 1024 + u * 32;
        uint32_t w[8];
        w4ax_int_scale q;
        *(uint4 *)w = *(const uint4 *)(weights + u * 1024 + lane * 16);
        *(uint4 *)(w + 4) = *(const uint4 *)(weights + u * 1024 + 512 + lane * 16);
        if (SCALES == QTOOL_W4AX_INT)
            q = w4ax_int_scale_of(*(const uint16_t *)(scale + lane / 4 * 2));
        if (SCALES == QTOOL_W4AX_BLOCK)
            row_scale[u] = __half22float2(*(const __half2 *)(scale + lane / 4 * 4));
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (SCALES == QTOOL_W4AX_INT)
                w4ax_unpack_int(frag[u][k], w[2 * k], w[2 * k + 1], q, a.nibbles);
            else
                w4ax_unpack(frag[u][k], w[2 * k], w[2 * k + 1], w4ax_constants_after(0));
    }
    const uint32_t x_at = ptx_shared(from) + (wk * MT * 8 + lane % 8) * 128;
#pragma unroll
    for (int t = 0; t < MT; t++) {
        uint32_t x[2][4]; /* [2 k-steps][both registers of each] */
#pragma unroll
        for (int p = 0; p < 2; p++)
            ptx_ldmatrix_x4(x[p], x_at + t * 1024 + ((4 * p + lane / 8) ^ lane % 8) * 16);
        float2 token = {};
        if (SCALES == QTOOL_W4AX_BLOCK)
            token = *(const float2 *)(token_scales + (t * 8 + lane % 4 * 2) * 4);
#pragma unroll
        for (int u = 0; u < QT_MOE_STRIPS; u++) {
            int block[4] = {}, *to = SCALES == QTOOL_W4AX_BLOCK ? block : (int *)sums[u][t];
#pragma unroll
            for (int k = 0; k < 4; k++)
                if (SCALES == QTOOL_W4AX_INT)
                    ptx_mma_u8(to, frag[u][k], x[k / 2][k % 2 * 2], x[k / 2][k % 2 * 2 + 1]);
                else
                    ptx_mma_s8(to, frag[u][k], x[k / 2][k % 2 * 2], x[k / 2][k % 2 * 2 + 1]);
            if (SCALES == QTOOL_W4AX_BLOCK)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sums[u][t][i] += (float)block[i] * (i < 2 ? row_scale[u].x : row_scale[u].y) *
                                     (i % 2 ? token.y : token.x);
        }
    }
}

/* ---- epilogue ------------------------------------------------------------------------------- */

/* Stores the results of the warp. */
template <int SCALES, int MT>
static __device__ __forceinline__ void
moe_w4ax_store(const qt_moe_w4ax_args &a, const moe_w4ax_header &h,
               const typename w4ax_sum<SCALES>::type sums[QT_MOE_STRIPS][MT][4])
{
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < MT; t++)
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int token = t * 8 + lane % 4 * 2 + odd, at = h.first + token;
            if (token >= h.rows)
                continue;
            const int bias = SCALES == QTOOL_W4AX_INT ? 128 * a.x.sum[at] : 0; /* w4ax_unpack_int */
            const float of_token = SCALES == QTOOL_W4AX_BLOCK ? 1 : a.x.scale[at];
            const size_t to = (size_t)at * a.y_pitch;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float v[QT_MOE_STRIPS];
#pragma unroll
                for (int u = 0; u < QT_MOE_STRIPS; u++) {
                    const int strip = moe_strip(a, h.tile, u), row = strip * 16 + i * 8 + lane / 4;
                    const bool here = row < a.n;
                    v[u] = (float)(sums[u][t][2 * i + odd] - bias) * (h.factor[u] * of_token);
                    if (SCALES != QTOOL_W4AX_BLOCK && here)
                        v[u] *= __half2float(h.row_scale[u][strip * 16 + lane / 4 * 2 + i]);
                    if (h.bias[u] && here)
                        v[u] += h.bias[u][row];
                }
#pragma unroll
                for (int u = 0; u < QT_MOE_STRIPS; u++) {
                    const int row = moe_strip(a, h.tile, u) * 16 + i * 8 + lane / 4;
                    if (row >= a.n || (u && a.gated))
                        continue;
                    if (a.gated)
                        v[u] = moe_gated(a, v[u], v[1]);
                    if (a.rounded)
                        qt_put_rounded(a.y, to + row, v[u], a.bf16);
                    else
                        ((float *)a.y)[to + row] = v[u];
                }
            }
        }
}

template <int SCALES, int MT>
__global__ void __launch_bounds__(MOE_THREADS, MT <= 2 ? 2 : 1)
    qt_moe_w4ax_kernel(const __grid_constant__ qt_moe_w4ax_args a)
{
    typedef typename w4ax_sum<SCALES>::type sum_t;
    unsigned char *const ring = qt_smem + a.ring_at;
    if (!a.early)
        ptx_wait_previous();
    ptx_launch_dependents(); /* in time, as the kernel in front waited for the one before it */
    moe_w4ax_loader<SCALES, MT> loader(moe_items(a) * a.row_tiles);
    sum_t sums[QT_MOE_STRIPS][MT][4];
    moe_w4ax_header header;
    int at = (int)blockIdx.x, slot = 0; /* the unit and its stage that are multiplied */
    moe_stages stages(a, true);         /* the quantizer may still run */
    if (at >= loader.units)
        ptx_wait_previous(); /* a kernel never ends before the one in front */
#pragma unroll 1
    while (at < loader.units) {
        if (!stages.fill(a, &loader, [&](int to, bool weights, bool of_x) {
                loader.copy(a, ring + to, weights, of_x);
            }))
            continue;
        if (slot == 0) {
            header =
                *(const moe_w4ax_header *)(ring + stages.get + moe_w4ax_stage<MT>::header_at(a));
#pragma unroll
            for (int i = 0; i < QT_MOE_STRIPS * MT * 4; i++)
                sums[i / (MT * 4)][i / 4 % MT][i % 4] = 0;
        }
        moe_w4ax_multiply<SCALES, MT>(sums, a, ring + stages.get, slot);
        stages.get = stages.next(a, stages.get);
        if (++slot < a.slots)
            continue;
        slot = 0;
        at += (int)gridDim.x;
        if (moe_add_warps(a, sums))
            moe_w4ax_store<SCALES, MT>(a, header, sums);
    }
}

#endif
