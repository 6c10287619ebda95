/*
 * Norm, gather and quantize of activations, a scale for each block of 128 channels, of rows that
 * are as many as 16 channels for each thread of a block: one token at a time, or two.
 *
 *   two rows --cp.async--> as they came --> pairs of values of a channel, a word each --> codes
 *                                      +--> sums of a norm
 *   one row  --cp.async--> as it came --> codes
 *                                    +--> sums of a norm
 *
 *   grid     as many blocks as there is room for; pairs of tokens are dealt out in turn. One token:
 *            a block each
 *   block    k / 16 threads, half a warp per block of 128 channels, twice; channels of a lane as
 *            in w4ax_quantize.cu
 *   smem     rows as they came, [tokens][k] F16 or BF16. Of two tokens, twice, as one is written
 *            while the other is read: pairs of values, [k][2]
 *
 * This is bound by instructions, and by banks of shared memory when channels are gathered: a read
 * of a word, its address and what is known of the channel serve both tokens. Few tokens are bound
 * by latencies, of which one at a time has fewer. A thread has the same channels of all tokens, and
 * finds but once what is the same for all: its part of the permutation and of the norm, where codes
 * go.
 *
 * Moves     the row once in, its codes and scales once out
 * Oracle    as of w4ax_quantize.cu
 */
#include "kernels/cuda/plan.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/w4ax_quantize.cuh"

enum {
    ROUNDS = 2,
    ROUND_CHANNELS = 8,
    THREAD_CHANNELS = ROUNDS * ROUND_CHANNELS,
    WARP_CHANNELS = 32 * THREAD_CHANNELS,
    MAX_THREADS = 1024,
    MAX_WARPS = MAX_THREADS / 32
};

/* ---- what a thread keeps -----------------------------------------------------------------------
 */

/* Of a block: 4 channels from `at` on and 4 from at + 16 on. */
template <int TOKENS> struct round_state {
    uint32_t perm[4]; /* of two channels each: where their values are, in bytes below 2^16 */
    norm_words norm[2];
    uint32_t word;
    uint32_t place;       /* of the thread's codes in a row, but for the token's swizzle */
    unsigned char *codes; /* of a token, */
    float *scale;         /* and of this and the next by even and odd threads */

    __device__ __forceinline__ void open(const quantize_args &a, int round, int token)
    {
        const int block = block_of(round), i = (int)threadIdx.x % 16;
        const int at = block * COLS + first_channel();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (a.perm) {
                const uint4 p = __ldg((const uint4 *)(a.perm + at + 16 * h));
                perm[2 * h] = (p.x | p.y << 16) * 2 * TOKENS;
                perm[2 * h + 1] = (p.z | p.w << 16) * 2 * TOKENS;
            }
        }
        word = __ldg(a.blocks + block);
        place = i / 4 * (wide() ? 32 : 16) + i % 4 * 4;
        codes = codes_of(a, word) + (size_t)token * row_bytes(word);
        scale = a.scale + (size_t)block * a.scale_pitch + token + threadIdx.x % 2;
    }
    __device__ __forceinline__ bool wide() const
    {
        return word & QT_W4AX_WIDE_ROWS;
    }
    /* A warp has four in a row. */
    static __device__ __forceinline__ int block_of(int round)
    {
        return (int)threadIdx.x / 32 * 2 * ROUNDS + round * 2 + (int)threadIdx.x / 16 % 2;
    }
    template <int NORM>
    __device__ __forceinline__ void load_norms(const quantize_args &a, int round)
    {
#pragma unroll
        for (int h = 0; h < 2; h++)
            norm[h] = ::load_norm<NORM>(a, block_of(round) * COLS + first_channel() + 16 * h);
    }
    /* As store_codes, `count` tokens from `token` on, two from an even one. */
    __device__ __forceinline__ void store(const uint2 code[TOKENS], int token, int count) const
    {
        unsigned char *to = codes + (place ^ (token & 6) << (wide() ? 4 : 3));
        const int odd = TOKENS == 1 ? token & 1 : 0;
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            const int x_at = (odd ^ t) * 16;
            if (t < count && wide()) {
                *(uint32_t *)(to + t * 128 + x_at) = code[t].x;
                *(uint32_t *)(to + t * 128 + (x_at ^ 16)) = code[t].y;
            } else if (t < count) {
                *(uint32_t *)(to + t * 64) = packed(code[t]);
            }
        }
    }
    __device__ __forceinline__ void advance(int tokens)
    {
        codes += (uint32_t)(tokens * row_bytes(word));
        scale += tokens;
    }
};

/* ---- sums of a norm ----------------------------------------------------------------------------
 *
 * Of two tokens, half a warp adds up each: lanes from 16 on the second. Of one, both add it up.
 */

/* Of each warp's channels. */
struct warp_sums {
    float mean[2][MAX_WARPS];
    float squares[2][MAX_WARPS]; /* layer norm: of differences from the mean */
};

static __device__ __forceinline__ int my_half()
{
    return (int)threadIdx.x / 16 % 2;
}

template <int TOKENS> static __device__ __forceinline__ float of_my_token(const float v[TOKENS])
{
    return my_half() ? v[TOKENS - 1] : v[0];
}

/* What the lane 16 further has of this lane's token. */
template <int TOKENS> static __device__ __forceinline__ float of_other_half(const float v[TOKENS])
{
    return __shfl_xor_sync(~0u, my_half() ? v[0] : v[TOKENS - 1], 16);
}

static __device__ __forceinline__ float half_sum(float v)
{
#pragma unroll
    for (int d = 8; d; d /= 2)
        v += __shfl_xor_sync(~0u, v, d);
    return v;
}

/* Of a thread's values, one after the other. */
template <int NORM> struct thread_sums {
    float first, sum, squares; /* layer norm: of differences from the first value */

    __device__ __forceinline__ void add(float v, bool is_first)
    {
        if (NORM == QT_W4AX_RMS_NORM) {
            squares = is_first ? v * v : fmaf(v, v, squares);
        } else if (is_first) {
            first = v;
            sum = squares = 0;
        } else {
            const float d = v - first;
            sum += d;
            squares = fmaf(d, d, squares);
        }
    }
};

template <int NORM, int TOKENS>
static __device__ __forceinline__ void add_up_warp(warp_sums *to, const thread_sums<NORM> s[TOKENS])
{
    const int warp = (int)threadIdx.x / 32;
    float mean[TOKENS], squares[TOKENS], all = 0, sum;
#pragma unroll
    for (int t = 0; t < TOKENS; t++)
        squares[t] = s[t].squares;
    if (NORM == QT_W4AX_RMS_NORM) {
        sum = of_my_token<TOKENS>(squares) + of_other_half<TOKENS>(squares);
    } else {
        /* Squares about a mean of means are those about each mean, and their count times the
         * squares of what the means are off (Chan, Golub and LeVeque 1979). */
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            const float off = s[t].sum * (1.0f / THREAD_CHANNELS);
            mean[t] = s[t].first + off;
            squares[t] = fmaf(-off, s[t].sum, squares[t]);
        }
        const float mine = of_my_token<TOKENS>(mean), other = of_other_half<TOKENS>(mean);
        all = half_sum(mine + other) * (1.0f / 32);
        sum = of_my_token<TOKENS>(squares) + of_other_half<TOKENS>(squares);
        sum = fmaf((mine - all) * THREAD_CHANNELS, mine - all, sum);
        sum = fmaf((other - all) * THREAD_CHANNELS, other - all, sum);
    }
    sum = half_sum(sum);
    if (threadIdx.x % 16 == 0) {
        to->mean[my_half()][warp] = all;
        to->squares[my_half()][warp] = sum;
    }
}

/* Of the thread's token, behind a barrier. */
template <int NORM>
static __device__ __forceinline__ row_norm norm_of(const quantize_args &a, const warp_sums *s)
{
    const float *mean = s->mean[my_half()], *squares = s->squares[my_half()];
    const int i = (int)threadIdx.x % 16, warps = (int)blockDim.x / 32;
    const bool has[2] = {i < warps, i + 16 < warps};
    float sum = (has[0] ? squares[i] : 0) + (has[1] ? squares[i + 16] : 0);
    float center = 0;
    if (NORM == QT_W4AX_LAYER_NORM) {
        const float m[2] = {has[0] ? mean[i] : 0, has[1] ? mean[i + 16] : 0};
        center = half_sum(m[0] + m[1]) * (WARP_CHANNELS * a.per_k);
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (has[j])
                sum = fmaf((m[j] - center) * WARP_CHANNELS, m[j] - center, sum);
    }
    return norm_from(a, center, half_sum(sum));
}

/* ---- rows into shared memory -------------------------------------------------------------------
 *
 * A warp copies, adds up and pairs the channels that it quantizes when they come in order: for
 * these it waits for no other.
 */

/* Starts copying rows, of the first of which the lane's part begins at `from`. */
template <int TOKENS>
static __device__ __forceinline__ void copy_rows(const uint16_t *from, size_t second, uint32_t to,
                                                 int k)
{
#pragma unroll
    for (int t = 0; t < TOKENS; t++)
#pragma unroll
        for (int r = 0; r < ROUNDS; r++)
            ptx_copy_16(to + t * k * 2 + r * 512, from + t * second + r * 256);
}

/* rows, pairs: where the warp's part and the lane's values begin. */
template <bool BF16, int NORM, int TOKENS>
static __device__ __forceinline__ void read_rows(thread_sums<NORM> s[TOKENS], uint32_t rows,
                                                 unsigned char *pairs, int k)
{
#pragma unroll
    for (int i = 0; i < THREAD_CHANNELS / 4; i++) {
        uint2 v[TOKENS];
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            v[t] = ptx_load_8(rows + t * k * 2 + i * 256);
            float f[4];
            to_floats<BF16>(f, (const uint32_t *)&v[t], 4);
#pragma unroll
            for (int j = 0; j < 4 && NORM; j++)
                s[t].add(f[j], i + j == 0);
        }
        if (TOKENS == 2) {
            const uint2 a = v[0], b = v[TOKENS - 1];
            *(uint4 *)(pairs + i * 512) =
                make_uint4(__byte_perm(a.x, b.x, 0x5410), __byte_perm(a.x, b.x, 0x7632),
                           __byte_perm(a.y, b.y, 0x5410), __byte_perm(a.y, b.y, 0x7632));
        }
    }
}

/* ---- values to codes ---------------------------------------------------------------------------
 */

/* The tokens' eight values of a round. values: pairs, or the row. */
template <bool BF16, int TOKENS>
static __device__ __forceinline__ void load_values(float v[TOKENS][8], const quantize_args &a,
                                                   uint32_t values, const round_state<TOKENS> &s,
                                                   int block)
{
    const uint32_t at = values + (block * COLS + first_channel()) * 2 * TOKENS;
    uint32_t word[8];
    if (a.perm) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const uint32_t from = values + (j % 2 ? s.perm[j / 2] >> 16 : s.perm[j / 2] & 0xffff);
            word[j] = TOKENS == 2 ? ptx_load_4(from) : ptx_load_2(from);
        }
    } else {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (TOKENS == 2) {
                *(uint4 *)(word + 4 * h) = ptx_load_16(at + 64 * h);
            } else {
                const uint2 e = ptx_load_8(at + 32 * h);
                *(uint4 *)(word + 4 * h) = make_uint4(e.x, e.x >> 16, e.y, e.y >> 16);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float both[2];
        to_floats<BF16>(both, &word[j], 2);
#pragma unroll
        for (int t = 0; t < TOKENS; t++)
            v[t][j] = both[t];
    }
}

/* Of a block, the largest size: of two tokens that of threadIdx.x % 2. */
template <int TOKENS> static __device__ __forceinline__ float largest_of(const float v[TOKENS][8])
{
    float most[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        most[t] = fabsf(v[t][0]);
#pragma unroll
        for (int j = 1; j < 8; j++)
            most[t] = fmaxf(most[t], fabsf(v[t][j]));
    }
    const bool odd = threadIdx.x & 1;
    float mine = odd ? most[TOKENS - 1] : most[0];
    mine = fmaxf(mine, __shfl_xor_sync(~0u, odd ? most[0] : most[TOKENS - 1], 1));
#pragma unroll
    for (int d = 2; d < 16; d *= 2)
        mine = fmaxf(mine, __shfl_xor_sync(~0u, mine, d));
    return mine;
}

/* 1 / s rounded to nearest, by the steps that __frcp_rn takes away from the ends of FP32. */
static __device__ __forceinline__ float reciprocal(float s)
{
    const float r = ptx_reciprocal(s);
    return fmaf(r, -fmaf(s, r, -1), r);
}

/* count: of tokens, which the last may be alone. */
template <bool BF16, int NORM, int TOKENS>
static __device__ __forceinline__ void quantize(const quantize_args &a, const row_norm &mine,
                                                uint32_t values, round_state<TOKENS> s[ROUNDS],
                                                int token, int count)
{
    row_norm n[TOKENS] = {};
    float factor = 1; /* of an RMS norm: goes into the scale of the token threadIdx.x % 2 */
    if (NORM == QT_W4AX_RMS_NORM)
        factor = __shfl_sync(~0u, mine.factor, threadIdx.x % 2 * 16);
    if (NORM == QT_W4AX_LAYER_NORM)
#pragma unroll
        for (int t = 0; t < TOKENS; t++)
            n[t] = {__shfl_sync(~0u, mine.factor, 16 * t), __shfl_sync(~0u, mine.shift, 16 * t)};
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        float v[TOKENS][8];
#pragma unroll
        for (int j = 0; j < 4; j++) /* or the compiler would keep 16 addresses */
            asm volatile("" : "+r"(s[r].perm[j]));
        load_values<BF16, TOKENS>(v, a, values, s[r], s[r].block_of(r));
        if (NORM && TOKENS == 2)
            s[r].template load_norms<NORM>(a, r);
#pragma unroll
        for (int i = 0; i < 2 * TOKENS && NORM; i++)
            normalise<BF16, NORM>(v[i / 2] + i % 2 * 4, n[i / 2], s[r].norm[i % 2]);
        const bool small = narrow(s[r].word);
        const float scale = __fmul_rn(largest_of<TOKENS>(v), small ? a.per7 : a.per127);
        const bool usual = scale >= 0x1p-120f && scale < 0x1p120f;
        const float inverse = usual ? reciprocal(scale) : inverse_of(scale);
        if ((int)threadIdx.x % 16 < count)
            *s[r].scale = inverse == 0 ? 1 : scale * factor;
        uint2 code[TOKENS];
#pragma unroll
        for (int t = 0; t < TOKENS; t++)
            code[t] = encode(v[t], TOKENS == 2 ? __shfl_sync(~0u, inverse, t, 2) : inverse,
                             small ? 7 : 127, 1, a.clamp);
        s[r].store(code, token, count);
    }
}

/* ---- the kernel --------------------------------------------------------------------------------
 */

template <bool BF16, int NORM, int TOKENS>
__global__ void __launch_bounds__(MAX_THREADS)
    qt_w4ax_quantize_rows_kernel(const __grid_constant__ quantize_args a)
{
    __shared__ warp_sums sums[TOKENS];
    const int step = TOKENS * (int)gridDim.x, lane = (int)threadIdx.x % 32;
    const int mine = (int)threadIdx.x / 32 * WARP_CHANNELS; /* the warp's first channel */
    const uint32_t rows = ptx_shared(quantize_smem), my_rows = rows + mine * 2;
    int token = TOKENS * (int)blockIdx.x, turn = 0;
    round_state<TOKENS> rounds[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        rounds[r].open(a, r, token);
        if (NORM && TOKENS == 1)
            rounds[r].template load_norms<NORM>(a, r);
    }
    if (a.dependent)
        ptx_wait_previous();
    const uint16_t *from = a.x + (size_t)token * a.k + mine + lane * 8;
    copy_rows<TOKENS>(from, token + 1 < a.m ? a.k : 0, my_rows + lane * 16, a.k);
    ptx_copy_commit();
#pragma unroll 1
    for (; token < a.m; token += step, turn ^= TOKENS - 1) {
        unsigned char *const pairs = quantize_smem + (turn + 1) * a.k * 4;
        thread_sums<NORM> s[TOKENS];
        row_norm n = {};
        ptx_copy_wait<0>();
        __syncwarp();
        if (TOKENS == 2 || NORM)
            read_rows<BF16, NORM, TOKENS>(s, my_rows + lane * 8, pairs + (mine + lane * 4) * 4,
                                          a.k);
        if (TOKENS == 2)
            __syncwarp();
        from += (size_t)step * a.k;
        if (token + step >= a.m)
            ptx_launch_dependents();
        else if (TOKENS == 2)
            copy_rows<TOKENS>(from, token + step + 1 < a.m ? a.k : 0, my_rows + lane * 16, a.k);
        ptx_copy_commit();
        if (NORM)
            add_up_warp<NORM, TOKENS>(&sums[turn], s);
        if (NORM ||
            a.perm) /* for other warps' values and sums, and for the turn before's readers */
            __syncthreads();
        if (NORM)
            n = norm_of<NORM>(a, &sums[turn]);
        quantize<BF16, NORM, TOKENS>(a, n, TOKENS == 2 ? ptx_shared(pairs) : rows, rounds, token,
                                     min(TOKENS, a.m - token));
#pragma unroll
        for (int r = 0; r < ROUNDS; r++)
            rounds[r].advance(step);
    }
}

/* ---- host --------------------------------------------------------------------------------------
 */

template <bool BF16, int TOKENS> static const void *kernel_of(int norm)
{
    return norm == QT_W4AX_LAYER_NORM
               ? (const void *)qt_w4ax_quantize_rows_kernel<BF16, QT_W4AX_LAYER_NORM, TOKENS>
           : norm == QT_W4AX_RMS_NORM
               ? (const void *)qt_w4ax_quantize_rows_kernel<BF16, QT_W4AX_RMS_NORM, TOKENS>
               : (const void *)qt_w4ax_quantize_rows_kernel<BF16, QT_W4AX_NO_NORM, TOKENS>;
}

bool qt_w4ax_quantize_rows(int *status, const quantize_args *a, int norm, bool bf16, int cc,
                           void *stream)
{
    const int threads = a->k / THREAD_CHANNELS;
    int ordinal = 0, sms = 0, smem_limit = 0;
    if (a->scales != QT_W4AX_BLOCK || a->k % WARP_CHANNELS || threads > MAX_THREADS ||
        cudaGetDevice(&ordinal) != cudaSuccess)
        return false;
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, ordinal);
    cudaDeviceGetAttribute(&smem_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal);
    /* One at a time while that fills half of the device. */
    const int tokens = (long long)a->m * threads <= (long long)sms * (MAX_THREADS / 2) ? 1 : 2;
    const size_t own = sizeof(warp_sums) * 2 + 1024; /* of the kernel, and of the system */
    const size_t smem = (size_t)a->k * (tokens == 1 ? 2 : 12);
    const int units = (a->m + tokens - 1) / tokens;
    int resident = MAX_THREADS / threads; /* with 64 registers a thread */
    if ((size_t)resident * (smem + own) > (size_t)smem_limit)
        resident = (int)((size_t)smem_limit / (smem + own));
    if (resident < 1 || sms < 1)
        return false;
    const void *kernel = tokens == 1 ? bf16 ? kernel_of<true, 1>(norm) : kernel_of<false, 1>(norm)
                         : bf16 ? kernel_of<true, 2>(norm)
                                     : kernel_of<false, 2>(norm);
    const int blocks = tokens == 1 || units < resident * sms ? units : resident * sms;
    *status = qt_w4ax_launch_quantize(kernel, blocks, threads, smem, a, cc, stream);
    return true;
}
