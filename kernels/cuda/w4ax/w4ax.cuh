/* Device functions shared by the w4ax kernels: unpacking of weights, and the stream kernel's
 * split-K reduction through the workspace. */
#ifndef QT_KERNELS_CUDA_W4AX_W4AX_CUH
#define QT_KERNELS_CUDA_W4AX_W4AX_CUH

#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/common/ptx_int.cuh"
#include "kernels/cuda/common/split_k.cuh"
#include "kernels/cuda/w4ax/stream.h"

/* ---- weights -------------------------------------------------------------------------------- */

/* Word 2 s + h of a lane holds row g + 8 h of k-step s (formats/layouts/layout_frag8.h). Its low
 * nibbles are channels 0-15 of the k-step and become register h of the A operand; its high nibbles
 * are channels 16-31 and become register 2 + h. */

/* Returns the 1024 bytes of codes of channel block `kb` of a strip. */
static __device__ __forceinline__ const unsigned char *w4ax_codes(const w4ax_args &a, int strip,
                                                                  int kb)
{
    return a.plane + ((size_t)strip * a.pitch64 + 2 * kb) * 512;
}

/* Constants of w4ax_unpack. Making them depend on a value orders the unpacking after that value. */
struct w4ax_constants {
    uint32_t sixteen, high;
};

/* zero: 0 at run time, computed from the values that must be known before the unpacking. */
static __device__ __forceinline__ w4ax_constants w4ax_constants_after(uint32_t zero)
{
    return {16 | zero, 0xf0f0f0f0 | zero};
}

/* Unpacks two words into an A fragment of signed bytes, each 16 times its code. */
static __device__ __forceinline__ void w4ax_unpack(uint32_t a[4], uint32_t w0, uint32_t w1,
                                                   const w4ax_constants &c)
{
    a[0] = w0 * c.sixteen & c.high;
    a[1] = w1 * c.sixteen & c.high;
    a[2] = w0 & c.high;
    a[3] = w1 & c.high;
}

/* Integer scales q of the two rows of a lane. Unpacked bytes are code * q + 128 = (code + 8) * q +
 * offset. They are in 0..255, so one 32-bit multiplication scales four bytes without a carry
 * between them. */
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

/* ---- results -------------------------------------------------------------------------------- */

/* Partial sums are 32-bit words in the workspace: float with BLOCK scales, int with INT and ROW. */
template <int SCALES> struct w4ax_sum {
    typedef int type;
};
template <> struct w4ax_sum<QTOOL_W4AX_BLOCK> {
    typedef float type;
};

/* Stores Y[token][row] = `sum`, scaled and converted to the output type. */
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

/* Returns where a thread block stores its partial sums [m][rows] of a row group that it shares with
 * other thread blocks. Only its first and its last row group can be shared. */
static __device__ __forceinline__ uint32_t *w4ax_partial(const w4ax_args &a, int cta, int group,
                                                         int rows)
{
    bool first = (unsigned)cta * a.cta_units / a.kblocks == (unsigned)group;
    return a.partial + ((size_t)cta * 2 + !first) * a.m * rows;
}

/* Split-K reduction of a row group over the thread blocks cta0..cta1. The last thread block to
 * arrive adds all partial sums in the order of k and stores the results. */
template <int SCALES>
static __device__ __forceinline__ void w4ax_split_k_reduce(const w4ax_args &a, int group, int rows,
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
            const sum_t *part = (const sum_t *)&v;
#pragma unroll
            for (int i = 0; i < 4; i++)
                sum[i] += part[i];
        }
        int token = o / (rows / 4), row = group * rows + o % (rows / 4) * 4;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (row + i < a.n)
                w4ax_store<SCALES>(a, token, row + i, sum[i]);
    }
}

#endif
