/*
 * Norm, gather and quantize of activations, a scale for each block of 128 channels, of rows that
 * are as many as 16 channels for each thread of a block.
 *
 *   grid     as many blocks as there is room for; tokens are dealt out in turn
 *   block    k / 16 threads, half a warp per block of 128 channels, twice; channels of a lane as
 *            in w4ax_quantize.cu
 *   smem     STAGED: two rows as they came, [k] F16 or BF16: one is copied while the other is
 *            quantized. Then of two tokens the blocks' scales and the warps' sums
 *
 * This is bound by instructions. A thread has the same channels of all tokens, and finds but once
 * what is the same for all: its part of the permutation and of the norm, where codes go. Scales of
 * an RMS norm wait for the sum of the token's squares: they are stored when the next token has
 * begun, behind its barrier.
 *
 * Moves     the row once in, its codes and scales once out
 * Oracle    as of w4ax_quantize.cu
 */
#include "kernels/cuda/plan.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/w4ax_quantize.cuh"

enum { ROUNDS = 2, ROUND_CHANNELS = 8, MAX_THREADS = 1024, MAX_WARPS = MAX_THREADS / 32 };

/* ---- what a thread keeps -----------------------------------------------------------------------
 */

/* Of a block: 4 channels from `at` on and 4 from at + 16 on. */
template <int NORM> struct round_state {
    uint32_t perm[4];            /* two places in a row each: bytes, below 2^16 */
    uint32_t weight[4], bias[4]; /* FP16 or BF16 */
    uint32_t word;
    float per; /* scale of a largest value of 1 */
    unsigned char *codes;
    float *scale; /* of the first token */

    __device__ __forceinline__ void open(const quantize_args &a, int block)
    {
        const int at = block * COLS + first_channel();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (a.perm) {
                const uint4 p = __ldg((const uint4 *)(a.perm + at + 16 * h));
                perm[2 * h] = p.x * 2 | p.y << 17;
                perm[2 * h + 1] = p.z * 2 | p.w << 17;
            }
            if (NORM)
                *(uint2 *)&weight[2 * h] = __ldg((const uint2 *)(a.weight + at + 16 * h));
            if (NORM == QT_W4AX_LAYER_NORM)
                *(uint2 *)&bias[2 * h] =
                    a.bias ? __ldg((const uint2 *)(a.bias + at + 16 * h)) : make_uint2(0, 0);
        }
        word = __ldg(a.blocks + block);
        per = narrow(word) ? a.per7 : a.per127;
        codes = codes_of(a, word);
        scale = a.scale + (size_t)block * a.scale_pitch;
    }
    static __device__ __forceinline__ int block_of(int round)
    {
        return ((int)threadIdx.x + round * (int)blockDim.x) / 16;
    }
};

/* Of a token, added up a warp at a time. */
struct token_state {
    float squares[MAX_WARPS];
    float scale[MAX_THREADS * ROUNDS / 16]; /* [blocks] */
};

/* ---- norms -------------------------------------------------------------------------------------
 */

/* Of the warps' sums, by a whole warp. */
static __device__ __forceinline__ float sum_of_warps(const float *sums)
{
    const unsigned lane = threadIdx.x % 32;
    return warp_sum(lane < blockDim.x / 32 ? sums[lane] : 0);
}

/* The mean of squared differences, in a second pass: E[x^2] - E[x]^2 cancels. scratch: [2][warps].
 */
template <bool BF16>
static __device__ __forceinline__ row_norm layer_norm(const quantize_args &a, uint32_t row,
                                                      float *scratch)
{
    float v[8 * ROUNDS], sum = 0, squares = 0;
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const uint4 words = ptx_load_16(row + (threadIdx.x + r * blockDim.x) * 16);
        to_floats<BF16>(v + 8 * r, (const uint32_t *)&words, 8);
    }
#pragma unroll
    for (int j = 0; j < 8 * ROUNDS; j++)
        sum += v[j];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0)
        scratch[threadIdx.x / 32] = sum;
    __syncthreads();
    row_norm n;
    n.mean = sum_of_warps(scratch) / (float)a.k;
#pragma unroll
    for (int j = 0; j < 8 * ROUNDS; j++)
        squares += (v[j] - n.mean) * (v[j] - n.mean);
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0)
        scratch[MAX_WARPS + threadIdx.x / 32] = squares;
    __syncthreads();
    n.factor = norm_factor(a, sum_of_warps(scratch + MAX_WARPS));
    return n;
}

/* Behind a barrier: the scales of an RMS norm. */
static __device__ __forceinline__ void store_scales(const quantize_args &a, int token,
                                                    const token_state *state)
{
    if ((int)threadIdx.x / 32 * 32 >= a.blocks_n)
        return;
    const float factor = norm_factor(a, sum_of_warps(state->squares));
    for (int i = (int)threadIdx.x; i < a.blocks_n; i += (int)blockDim.x)
        a.scale[(size_t)i * a.scale_pitch + token] =
            state->scale[i] == 0 ? 1 : state->scale[i] * factor;
}

/* ---- a token -----------------------------------------------------------------------------------
 */

/* 1 / s rounded to nearest, by the steps that __frcp_rn takes away from the ends of FP32. */
static __device__ __forceinline__ float reciprocal(float s)
{
    const float r = ptx_reciprocal(s);
    return fmaf(r, -fmaf(s, r, -1), r);
}

template <bool BF16> static __device__ __forceinline__ float to_float(uint32_t bits)
{
    return BF16 ? __uint_as_float(bits << 16) : __half2float(__ushort_as_half((uint16_t)bits));
}

/* The eight values of a round, normalised but for the factor of an RMS norm. */
template <bool BF16, int NORM, bool STAGED>
static __device__ __forceinline__ void
load_values(float v[8], float *squares, const quantize_args &a, const row_norm &n, uint32_t row,
            const uint2 direct[2], const round_state<NORM> &s, int block)
{
    if (STAGED && a.perm) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            v[2 * j] = to_float<BF16>(ptx_load_2(row + (s.perm[j] & 0xffff)));
            v[2 * j + 1] = to_float<BF16>(ptx_load_2(row + (s.perm[j] >> 16)));
        }
    } else {
        const uint32_t at = row + (block * COLS + first_channel()) * 2;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint2 e = STAGED ? ptx_load_8(at + 32 * h) : direct[h];
            to_floats<BF16>(v + 4 * h, (const uint32_t *)&e, 4);
        }
    }
    if (NORM) {
        float w[8], b[8];
        to_floats<BF16>(w, s.weight, 8);
        if (NORM == QT_W4AX_LAYER_NORM)
            to_floats<BF16>(b, s.bias, 8);
        normalise<NORM, 8>(v, squares, n, w, b);
    }
}

template <bool BF16, int NORM, bool STAGED>
static __device__ __forceinline__ void quantize_token(const quantize_args &a, const row_norm &n,
                                                      uint32_t row, const uint2 direct[ROUNDS][2],
                                                      round_state<NORM> s[ROUNDS], int token,
                                                      token_state *state)
{
    float squares = 0;
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const int block = s[r].block_of(r);
        float v[8];
#pragma unroll
        for (int j = 0; j < 4; j++) /* or the compiler would keep FP32 weights and 16 addresses */
            asm volatile("" : "+r"(s[r].perm[j]), "+r"(s[r].weight[j]), "+r"(s[r].bias[j]));
        load_values<BF16, NORM, STAGED>(v, &squares, a, n, row, direct[r], s[r], block);
        const float scale = __fmul_rn(largest_of_block(v), s[r].per);
        const bool usual = scale >= 0x1p-120f && scale < 0x1p120f;
        const float inverse = usual ? reciprocal(scale) : inverse_of(scale);
        const uint2 code = encode(v, inverse, narrow(s[r].word) ? 7 : 127, 1, a.clamp);
        store_codes(s[r].codes + (size_t)token * row_bytes(s[r].word), token, s[r].word, code);
        if (threadIdx.x % 16 == 0) {
            if (NORM == QT_W4AX_RMS_NORM)
                state->scale[block] = inverse == 0 ? 0 : scale;
            else
                s[r].scale[token] = inverse == 0 ? 1 : scale;
        }
    }
    if (NORM == QT_W4AX_RMS_NORM) {
        squares = warp_sum(squares);
        if (threadIdx.x % 32 == 0)
            state->squares[threadIdx.x / 32] = squares;
    }
}

/* ---- the kernel --------------------------------------------------------------------------------
 */

/* Starts copying a row of which the thread's part is at `from`. */
static __device__ __forceinline__ void copy_row(const uint16_t *from, uint32_t to)
{
#pragma unroll
    for (int r = 0; r < ROUNDS; r++)
        ptx_copy_16(to + (threadIdx.x + r * blockDim.x) * 16, from + r * blockDim.x * 8);
}

/* The values of a row of which the thread's first are at `from`. */
static __device__ __forceinline__ void fetch_values(uint2 to[ROUNDS][2], const uint16_t *from)
{
#pragma unroll
    for (int r = 0; r < ROUNDS; r++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            to[r][h] = __ldg((const uint2 *)(from + r * blockDim.x * 8 + 16 * h));
}

template <bool BF16, int NORM, bool STAGED>
__global__ void __launch_bounds__(MAX_THREADS)
    qt_w4ax_quantize_rows_kernel(const __grid_constant__ quantize_args a)
{
    __shared__ token_state states[2];
    __shared__ float scratch[2 * MAX_WARPS];
    const uint32_t ring = ptx_shared(quantize_smem);
    const int step = (int)gridDim.x;
    int token = (int)blockIdx.x, turn = 0;
    round_state<NORM> rounds[ROUNDS];
    uint2 next[ROUNDS][2] = {};
#pragma unroll
    for (int r = 0; r < ROUNDS; r++)
        rounds[r].open(a, rounds[r].block_of(r));
    if (a.dependent)
        ptx_wait_previous();
    /* Of the token after the one that is quantized. */
    const uint16_t *from =
        a.x + (size_t)token * a.k +
        (STAGED ? (int)threadIdx.x * 8 : rounds->block_of(0) * COLS + first_channel());
    const size_t further = (size_t)step * a.k;
    if (STAGED)
        copy_row(from, ring);
    else
        fetch_values(next, from);
    ptx_copy_commit();
#pragma unroll 1
    for (; token < a.m; token += step, turn ^= 1) {
        const uint32_t row = ring + turn * a.k * 2;
        const bool last = token + step >= a.m;
        row_norm n = {0, 1};
        uint2 now[ROUNDS][2];
        if (STAGED)
            ptx_copy_wait<0>();
        if (STAGED || NORM == QT_W4AX_RMS_NORM)
            __syncthreads(); /* the row is there, and the one before has been read */
        from += further;
        if (STAGED && !last)
            copy_row(from, ring + (turn ^ 1) * a.k * 2);
        ptx_copy_commit();
#pragma unroll
        for (int i = 0; i < 2 * ROUNDS; i++)
            now[i / 2][i % 2] = next[i / 2][i % 2];
        if (!STAGED && !last)
            fetch_values(next, from);
        if (NORM == QT_W4AX_RMS_NORM && token >= step)
            store_scales(a, token - step, &states[turn ^ 1]);
        if (NORM == QT_W4AX_LAYER_NORM)
            n = layer_norm<BF16>(a, row, scratch);
        if (last)
            ptx_launch_dependents();
        quantize_token<BF16, NORM, STAGED>(a, n, row, now, rounds, token, &states[turn]);
    }
    if (NORM == QT_W4AX_RMS_NORM) {
        __syncthreads();
        store_scales(a, token - step, &states[turn ^ 1]);
    }
}

/* ---- host --------------------------------------------------------------------------------------
 */

template <bool BF16> static const void *kernel_of(int norm, bool staged)
{
#define KERNEL(norm, staged) (const void *)qt_w4ax_quantize_rows_kernel<BF16, norm, staged>
    return norm == QT_W4AX_LAYER_NORM ? KERNEL(QT_W4AX_LAYER_NORM, true)
           : norm == QT_W4AX_RMS_NORM
               ? staged ? KERNEL(QT_W4AX_RMS_NORM, true) : KERNEL(QT_W4AX_RMS_NORM, false)
           : staged ? KERNEL(QT_W4AX_NO_NORM, true)
                    : KERNEL(QT_W4AX_NO_NORM, false);
#undef KERNEL
}

bool qt_w4ax_quantize_rows(int *status, const quantize_args *a, int norm, bool bf16, int cc,
                           void *stream)
{
    enum { THREAD_CHANNELS = ROUNDS * ROUND_CHANNELS };
    const int threads = a->k / THREAD_CHANNELS;
    int ordinal = 0, sms = 0, smem_limit = 0;
    if (a->scales != QT_W4AX_BLOCK || a->k % (THREAD_CHANNELS * 32) || threads > MAX_THREADS ||
        cudaGetDevice(&ordinal) != cudaSuccess)
        return false;
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, ordinal);
    cudaDeviceGetAttribute(&smem_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal);
    const bool staged = norm == QT_W4AX_LAYER_NORM || a->perm;
    const size_t own = sizeof(token_state) * 2 + 2048; /* of the kernel, and of the system */
    const size_t smem = staged ? (size_t)a->k * 4 : 0;
    struct qt_matmul_plan launch = {};
    int resident = 1024 / threads; /* with 64 registers a thread */
    if ((size_t)resident * (smem + own) > (size_t)smem_limit)
        resident = (int)((size_t)smem_limit / (smem + own));
    if (resident < 1 || sms < 1)
        return false;
    launch.kernel = bf16 ? kernel_of<true>(norm, staged) : kernel_of<false>(norm, staged);
    launch.grid_x = a->m < resident * sms ? a->m : resident * sms;
    launch.grid_y = 1;
    launch.smem_bytes = smem;
    launch.smem_limit = (int)smem;
    launch.cc = cc;
    *status = smem > 48 << 10 ? qt_allow_smem(&launch) : QT_MATMUL_OK;
    if (*status == QT_MATMUL_OK)
        *status = qt_launch(&launch, (void *)a, threads, a->dependent, stream);
    return true;
}
