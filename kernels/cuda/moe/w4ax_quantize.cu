/*
 * Quantizes the inputs of w4ax experts, as qtool_w4ax_quantize does without a norm: X once per
 * token, stored at all positions of the token's pairs; or the values between the products once per
 * pair, as its expert says.
 *
 *   grid    one thread block per row. Half a warp has a channel block, 8 channels per lane
 *           (quantize.cuh); a lane keeps the values of PER channel blocks in registers
 *   smem    the row, if it is gathered
 *
 * Traffic    each row read once, its codes and scales written once per copy
 * Reference  plain C, by the results of whole layers (tests/gpu/test_moe.c)
 */
#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/common/smem.cuh"
#include "kernels/cuda/moe/w4ax.h"
#include "kernels/cuda/w4ax/quantize.cuh"

enum { MOE_Q_THREADS = 1024, MOE_Q_COPIES = 32 };

/* The position of pair number `pair`; -1: its expert is not of this layer. *expert: if it is. */
static __device__ __forceinline__ int moe_q_position(int *expert,
                                                     const qt_moe_w4ax_quantize_args &a, int pair)
{
    const int of = a.ids[pair] - a.direct.first_expert;
    if (of < 0 || of >= a.direct.experts)
        return -1;
    *expert = of;
    return a.direct.ids ? pair : a.position[pair];
}

/* Four adjacent values of a row; gathered: from shared memory. */
template <bool BF16>
static __device__ __forceinline__ void moe_q_load(float v[4], const uint16_t *row,
                                                  const uint32_t *perm, int at, int k)
{
    const uint16_t *staged = (const uint16_t *)qt_smem;
    uint32_t words[2] = {};
    if (at < k && perm) {
        const uint4 p = __ldg((const uint4 *)(perm + at));
        words[0] = staged[p.x] | (uint32_t)staged[p.y] << 16;
        words[1] = staged[p.z] | (uint32_t)staged[p.w] << 16;
    } else if (at < k) {
        *(uint2 *)words = __ldcg((const uint2 *)(row + at));
    }
    to_floats<BF16>(v, words, 4);
}

/* The largest of non-negative values of the thread block. */
static __device__ __forceinline__ float moe_q_max(float v, float scratch[32])
{
#pragma unroll
    for (int d = 16; d; d /= 2)
        v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
    if (threadIdx.x % 32 == 0)
        scratch[threadIdx.x / 32] = v;
    __syncthreads();
    v = threadIdx.x % 32 < blockDim.x / 32 ? scratch[threadIdx.x % 32] : 0;
#pragma unroll
    for (int d = 16; d; d /= 2)
        v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
    return v;
}

static __device__ __forceinline__ void moe_q_store(const qt_moe_w4ax_quantize_args &a,
                                                   const int *position, int block, uint2 code)
{
    const int i = (int)threadIdx.x % 16;
    for (int j = 0; j < a.copies; j++) {
        const int p = position[j];
        if (p < 0)
            continue;
        unsigned char *row = a.out.codes + ((size_t)block * a.out.positions + p) * COLS;
        const int at = (i / 4 * 2 ^ (p & 7)) * 16 + i % 4 * 4;
        *(uint32_t *)(row + at) = code.x;
        *(uint32_t *)(row + (at ^ 16)) = code.y;
    }
}

template <bool BF16, int PER>
static __global__ void __launch_bounds__(MOE_Q_THREADS)
    moe_w4ax_quantize_kernel(const __grid_constant__ qt_moe_w4ax_quantize_args a)
{
    __shared__ int position[MOE_Q_COPIES];
    __shared__ float scratch[32];
    __shared__ int total;
    const int halves = (int)blockDim.x / 16, half = (int)threadIdx.x / 16;
    ptx_wait_previous();
    ptx_launch_dependents();
    int expert = 0, wanted = 0;
    if ((int)threadIdx.x < a.copies) {
        position[threadIdx.x] =
            moe_q_position(&expert, a, (int)blockIdx.x * a.copies + (int)threadIdx.x);
        wanted = position[threadIdx.x] >= 0;
    }
    if (threadIdx.x == 0)
        total = expert;
    if (!__syncthreads_or(wanted))
        return;
    const int of = a.inner ? total * QT_MOE_MATRICES + QT_MOE_DOWN : (int)QT_MOE_GATE;
    const qt_moe_w4ax_matrix &m = a.table[of];
    const uint16_t *row = a.x + (size_t)(a.inner ? position[0] : (int)blockIdx.x) * a.k;
    const float per7 = m.clip4 / 7, per127 = m.clip8 / 127;
    const bool clamp = !(m.clip4 >= 1 && m.clip8 >= 1);
    if (m.perm) {
        for (int i = (int)threadIdx.x; i < a.k / 8; i += (int)blockDim.x)
            ((uint4 *)qt_smem)[i] = __ldcg((const uint4 *)row + i);
    }
    __syncthreads(); /* also: `total` has been read */
    if (threadIdx.x == 0)
        total = 0;
    float v[PER][8], top[PER], most = 0;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int block = half + i * halves, at = block * COLS + first_channel();
        moe_q_load<BF16>(v[i], row, m.perm, at, a.k);
        moe_q_load<BF16>(v[i] + 4, row, m.perm, at + 16, a.k);
        if (a.rotate)
            rotate_block<false>(v[i], max(min(a.k - block * COLS, (int)COLS), 0));
        top[i] = 0;
#pragma unroll
        for (int j = 0; j < 8; j++)
            top[i] = fmaxf(top[i], fabsf(v[i][j]));
#pragma unroll
        for (int d = 1; d < 16; d *= 2)
            top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], d));
        most = fmaxf(most, top[i]);
    }
    float scale = 0;
    if (a.scales != QTOOL_W4AX_BLOCK)
        scale = __fmul_rn(moe_q_max(most, scratch), per127);
    quantize_args q = {};
    q.clip4 = m.clip4;
    int sum = 0;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int block = half + i * halves;
        if (block >= a.blocks)
            continue;
        const uint32_t word = __ldg(m.words + block);
        const bool narrow = a.scales != QTOOL_W4AX_ROW && is_narrow(word);
        uint2 code;
        if (a.scales == QTOOL_W4AX_BLOCK) {
            const float s = __fmul_rn(top[i], narrow ? per7 : per127), inverse = inverse_of(s);
            code = code_bytes(round_codes(v[i], inverse, narrow ? 7 : 127, clamp));
            if (threadIdx.x % 16 == 0)
                for (int j = 0; j < a.copies; j++)
                    if (position[j] >= 0)
                        a.out.scale[(size_t)block * a.out.positions + position[j]] =
                            inverse == 0 ? 1 : s;
        } else {
            const float factor = narrow ? int_factor(q, top[i], scale) : 1;
            const rounded_codes r =
                round_codes(v[i], inverse_of(__fmul_rn(scale, factor)), narrow ? 7 : 127, clamp);
            code = scaled_code_bytes(r, narrow, factor);
            sum = __dp4a((int)code.x, 0x01010101, __dp4a((int)code.y, 0x01010101, sum));
        }
        moe_q_store(a, position, block, code);
    }
    if (a.scales == QTOOL_W4AX_BLOCK)
        return;
    if (a.scales == QTOOL_W4AX_INT) {
        sum = __reduce_add_sync(~0u, sum);
        if (threadIdx.x % 32 == 0)
            atomicAdd(&total, sum);
        __syncthreads();
    }
    if ((int)threadIdx.x < a.copies && position[threadIdx.x] >= 0) {
        a.out.scale[position[threadIdx.x]] = token_scale(scale, 1);
        if (a.scales == QTOOL_W4AX_INT)
            a.out.sum[position[threadIdx.x]] = total;
    }
}

const void *qt_moe_w4ax_quantize_instance(bool bf16, int per_thread)
{
    if (bf16)
        return per_thread == 1 ? (const void *)moe_w4ax_quantize_kernel<true, 1>
                               : (const void *)moe_w4ax_quantize_kernel<true, 4>;
    return per_thread == 1 ? (const void *)moe_w4ax_quantize_kernel<false, 1>
                           : (const void *)moe_w4ax_quantize_kernel<false, 4>;
}
