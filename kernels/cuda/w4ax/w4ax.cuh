/* Of the kernels of 4-bit integer weights: how weights are unpacked, and the stream kernel's
 * partial sums. */
#ifndef QT_KERNELS_CUDA_W4AX_W4AX_CUH
#define QT_KERNELS_CUDA_W4AX_W4AX_CUH

#include "kernels/cuda/common/arrive.cuh"
#include "kernels/cuda/common/ptx_int.cuh"
#include "kernels/cuda/common/round.cuh"
#include "kernels/cuda/w4ax/stream.h"

/* ---- weights -----------------------------------------------------------------------------------
 *
 * Word 2 s + h of a lane: row g + 8 h, k-step s. Its low nibbles are the first 16 channels of the
 * k-step, register h of the A operand, its high ones the others, register 2 + h
 * (pack/layouts/layout_frag8.h). */

/* The 1024 bytes of a k-block of a strip. */
static __device__ __forceinline__ const unsigned char *w4ax_codes(const w4ax_args &a, int strip,
                                                                  int kb)
{
    return a.plane + ((size_t)strip * a.blocks64 + 2 * kb) * 512;
}

/* The constants of unpacking, which may be made to depend on what must come before it. */
struct w4ax_constants {
    uint32_t sixteen, high;
};

/* nothing: always 0, but computed from what must come first. */
static __device__ __forceinline__ w4ax_constants w4ax_constants_after(uint32_t nothing)
{
    return {16 | nothing, 0xf0f0f0f0 | nothing};
}

/* Sixteen times the codes, as signed bytes. */
static __device__ __forceinline__ void w4ax_unpack(uint32_t a[4], uint32_t w0, uint32_t w1,
                                                   const w4ax_constants &c)
{
    a[0] = w0 * c.sixteen & c.high;
    a[1] = w1 * c.sixteen & c.high;
    a[2] = w0 & c.high;
    a[3] = w1 & c.high;
}

/* Integer block scale q of the two rows of a lane; bytes code * q + 128 = (code + 8) * q + offset,
 * which are 0..255 for all four together, so that nothing carries from byte to byte. */
struct w4ax_int_scale {
    uint32_t q[2], offset[2];
};

static __device__ __forceinline__ w4ax_int_scale w4ax_int_scale_of(uint32_t two_bytes)
{
    w4ax_int_scale s;
    s.q[0] = two_bytes & 255;
    s.q[1] = two_bytes >> 8;
    s.offset[0] = 0x80808080u - s.q[0] * 0x08080808u;
    s.offset[1] = 0x80808080u - s.q[1] * 0x08080808u;
    return s;
}

static __device__ __forceinline__ void w4ax_unpack_int(uint32_t a[4], uint32_t w0, uint32_t w1,
                                                       const w4ax_int_scale &s, uint32_t nibbles)
{
    const uint32_t w[2] = {w0, w1};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        a[h] = ((w[h] & nibbles) ^ 0x08080808) * s.q[h] + s.offset[h];
        a[2 + h] = ((w[h] >> 4 & nibbles) ^ 0x08080808) * s.q[h] + s.offset[h];
    }
}

/* ---- results -----------------------------------------------------------------------------------
 *
 * Sums travel as 32-bit words: float for BLOCK, int for the others.
 */
template <int SCALES> struct w4ax_sum {
    typedef int type;
};
template <> struct w4ax_sum<QTOOL_W4AX_BLOCK> {
    typedef float type;
};

template <int SCALES>
static __device__ __forceinline__ void w4ax_store(const w4ax_args &a, int token, int row,
                                                  typename w4ax_sum<SCALES>::type sum)
{
    float v = (float)sum;
    if (SCALES == QTOOL_W4AX_INT)
        v = (float)((int)sum - 128 * a.x_sum[token]);
    if (SCALES != QTOOL_W4AX_BLOCK) {
        int slot = row / 16 * 16 + 2 * (row % 8) + row / 8 % 2;
        v *= a.x_scale[token] * __half2float(a.row_scale[slot]);
    }
    v *= a.factor;
    size_t at = (size_t)token * a.n + row;
    if (a.output == QTOOL_W4AX_F32)
        ((float *)a.y)[at] = v;
    else
        qt_put_rounded(a.y, at, v, a.output == QTOOL_W4AX_BF16);
}

/* Where a block of threads leaves its sums of a group that it does not do alone: its first group,
 * or its last. */
static __device__ __forceinline__ uint32_t *w4ax_partial(const w4ax_args &a, int cta, int group,
                                                         int rows)
{
    bool first = (unsigned)cta * a.cta_units / a.kblocks == (unsigned)group;
    return a.partial + ((size_t)cta * 2 + !first) * a.m * rows;
}

/* The last block to arrive adds the sums of the others to its own, in the order of k. */
template <int SCALES>
static __device__ __forceinline__ void w4ax_fix_up(const w4ax_args &a, int group, int rows,
                                                   int cta0, int cta1)
{
    typedef typename w4ax_sum<SCALES>::type sum_t;
    __shared__ int last;
    if (!qt_last_to_arrive(&a.arrivals[group], (unsigned)(cta1 - cta0 + 1), &last))
        return;
    for (int o = (int)threadIdx.x; o < a.m * rows / 4; o += (int)blockDim.x) {
        sum_t sum[4] = {0, 0, 0, 0};
        for (int c = cta0; c <= cta1; c++) {
            uint4 v = __ldcg((const uint4 *)w4ax_partial(a, c, group, rows) + o);
            const sum_t *more = (const sum_t *)&v;
#pragma unroll
            for (int i = 0; i < 4; i++)
                sum[i] += more[i];
        }
        int token = o / (rows / 4), row = group * rows + o % (rows / 4) * 4;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (row + i < a.n)
                w4ax_store<SCALES>(a, token, row + i, sum[i]);
    }
}

#endif
