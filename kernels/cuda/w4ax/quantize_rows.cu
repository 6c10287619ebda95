/*
 * Norm, gather and quantize of activations, of rows that are as many as 16 channels for each thread
 * of a block: one token at a time, or two.
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
 * finds but once what is the same for all: its part of the permutation, where codes go.
 *
 * Moves     the row once in, its codes and scales once out
 * Oracle    as of w4ax_quantize.cu
 */
#include "kernels/cuda/common/plan.h"
#include "kernels/cuda/w4ax/norm_sums.cuh"

enum { ROUND_CHANNELS = 8, ROUNDS = THREAD_CHANNELS / ROUND_CHANNELS };

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
        return word & QTOOL_W4AX_WIDE_ROWS;
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
            norm[h] = load_norm<NORM>(a, block_of(round) * COLS + first_channel() + 16 * h);
    }
    /* As the general kernel does, `count` tokens from `token` on, two from an even one. */
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

/* ---- rows into shared memory -------------------------------------------------------------------
 *
 * A warp copies, adds up and pairs the channels that it quantizes when they come in order: for
 * these it waits for no other.
 */

/* Starts copying rows, of the first of which the lane's part begins at `from`; second: from it to
 * the other, 0 where there is none. */
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

/* rows, pairs: where the lane's first values are. */
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

/* What the rounds of some tokens have in common. */
template <int TOKENS> struct unit_of_tokens {
    row_norm n[TOKENS];
    float factor;     /* of an RMS norm, of the token threadIdx.x % 2: goes into its scales */
    uint32_t values;  /* pairs, or the row */
    int token, count; /* which the last may have fewer of */
};

template <int NORM, int TOKENS>
static __device__ __forceinline__ unit_of_tokens<TOKENS>
open_unit(const row_norm &mine, uint32_t values, int token, int count)
{
    unit_of_tokens<TOKENS> u = {{}, 1, values, token, count};
    if (NORM == QTOOL_W4AX_RMS_NORM)
        u.factor = __shfl_sync(~0u, mine.factor, threadIdx.x % 2 * 16);
    if (NORM == QTOOL_W4AX_LAYER_NORM)
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            /* Of any lane of a half. Of the same one both would be in uniform registers, of which
             * an instruction takes but one. */
            const int lane = (int)threadIdx.x % 16 + 16 * t;
            u.n[t] = {__shfl_sync(~0u, mine.factor, 16 * t), __shfl_sync(~0u, mine.shift, lane)};
        }
    return u;
}

/* The values of a round, normalised but for the factor of an RMS norm. */
template <bool BF16, int NORM, int TOKENS>
static __device__ __forceinline__ void normal_values(float v[TOKENS][8], const quantize_args &a,
                                                     const unit_of_tokens<TOKENS> &u,
                                                     round_state<TOKENS> *s, int round)
{
#pragma unroll
    for (int j = 0; j < 4; j++) /* or the compiler would keep 16 addresses */
        asm volatile("" : "+r"(s->perm[j]));
    load_values<BF16, TOKENS>(v, a, u.values, *s, s->block_of(round));
    if (NORM && TOKENS == 2)
        s->template load_norms<NORM>(a, round);
#pragma unroll
    for (int i = 0; i < 2 * TOKENS && NORM; i++)
        normalise<BF16, NORM>(v[i / 2] + i % 2 * 4, u.n[i / 2], s->norm[i % 2]);
}

/* What the thread has that is of token threadIdx.x % 2, of token t. */
template <int TOKENS> static __device__ __forceinline__ float of_token(float v, int t)
{
    return TOKENS == 2 ? __shfl_sync(~0u, v, t, 2) : v;
}

/* A scale for each block. */
template <bool BF16, int NORM, int TOKENS>
static __device__ __forceinline__ void quantize_by_block(const quantize_args &a,
                                                         const unit_of_tokens<TOKENS> &u,
                                                         round_state<TOKENS> s[ROUNDS])
{
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        float v[TOKENS][8];
        normal_values<BF16, NORM, TOKENS>(v, a, u, &s[r], r);
        const bool small = narrow(s[r].word);
        const float scale = __fmul_rn(largest_of<TOKENS>(v), small ? a.per7 : a.per127);
        const float inverse = inverse_of(scale);
        if ((int)threadIdx.x % 16 < u.count)
            *s[r].scale = inverse == 0 ? 1 : scale * u.factor;
        uint2 code[TOKENS];
#pragma unroll
        for (int t = 0; t < TOKENS; t++)
            code[t] = code_bytes(
                round_codes(v[t], of_token<TOKENS>(inverse, t), small ? 7 : 127, a.clamp));
        s[r].store(code, u.token, u.count);
    }
}

/* Of two tokens, by warp; sums of all codes. */
struct token_tops {
    float most[2][MAX_WARPS];
    int sum[2];
};

/* Behind a barrier: sums of codes, of tokens from `token` on. */
template <int TOKENS>
static __device__ __forceinline__ void store_sums(const quantize_args &a, const token_tops *tops,
                                                  int token)
{
    if (a.sum && threadIdx.x < TOKENS && token + (int)threadIdx.x < a.m)
        a.sum[token + threadIdx.x] = tops->sum[threadIdx.x];
}

/* A scale for each token. back: to the tokens before, whose sums are to be stored, or 0. */
template <bool BF16, int NORM, int TOKENS>
static __device__ __forceinline__ void
quantize_by_token(const quantize_args &a, const unit_of_tokens<TOKENS> &u,
                  round_state<TOKENS> s[ROUNDS], token_tops *tops, int back)
{
    const int i = (int)threadIdx.x % 16, warps = (int)blockDim.x / 32;
    float v[ROUNDS][TOKENS][8], most[ROUNDS], all = 0;
    int sum[TOKENS] = {};
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        normal_values<BF16, NORM, TOKENS>(v[r], a, u, &s[r], r);
        most[r] = largest_of<TOKENS>(v[r]);
        all = fmaxf(all, most[r]);
    }
    all = fmaxf(all, __shfl_xor_sync(~0u, all, 16));
    if (threadIdx.x % 32 < 2)
        tops->most[threadIdx.x % 2][threadIdx.x / 32] = all;
    if (threadIdx.x < TOKENS) {
        if (back)
            store_sums<TOKENS>(a, tops, u.token - back);
        tops->sum[threadIdx.x] = 0;
    }
    __syncthreads();
    const float *mine = tops->most[my_half()];
    all = fmaxf(i < warps ? mine[i] : 0, i + 16 < warps ? mine[i + 16] : 0);
#pragma unroll
    for (int d = 8; d; d /= 2)
        all = fmaxf(all, __shfl_xor_sync(~0u, all, d));
    const float scale = __fmul_rn(__shfl_sync(~0u, all, threadIdx.x % 2 * 16), a.per127);
    if ((int)threadIdx.x < u.count)
        *s[0].scale = token_scale(scale, u.factor);
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const bool small = a.scales == QTOOL_W4AX_INT && narrow(s[r].word);
        const float factor = small ? int_factor(a, most[r], scale) : 1;
        const float inverse = inverse_of(__fmul_rn(scale, factor));
        uint2 code[TOKENS];
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            const rounded_codes c =
                round_codes(v[r][t], of_token<TOKENS>(inverse, t), small ? 7 : 127, a.clamp);
            code[t] = a.scales == QTOOL_W4AX_INT
                          ? multiplied_bytes(c, small, of_token<TOKENS>(factor, t))
                          : code_bytes(c);
            sum[t] = __dp4a((int)code[t].x, 0x01010101, __dp4a((int)code[t].y, 0x01010101, sum[t]));
        }
        s[r].store(code, u.token, u.count);
    }
    if (a.sum)
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            const int of_warp = __reduce_add_sync(~0u, sum[t]);
            if (threadIdx.x % 32 == 0)
                atomicAdd(&tops->sum[t], of_warp);
        }
}

/* ---- the kernel --------------------------------------------------------------------------------
 */

template <bool BF16, int NORM, int TOKENS, bool BY_TOKEN>
__global__ void __launch_bounds__(MAX_THREADS)
    qt_w4ax_quantize_rows_kernel(const __grid_constant__ quantize_args a)
{
    __shared__ warp_sums sums[TOKENS];
    __shared__ token_tops tops;
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
        const uint32_t values = TOKENS == 2 ? ptx_shared(pairs) : rows;
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
        /* For other warps' values and sums, and for those that read them the turn before. */
        if (NORM || BY_TOKEN || a.perm)
            __syncthreads();
        if (NORM)
            n = norm_of<NORM>(a, &sums[turn]);
        const auto u = open_unit<NORM, TOKENS>(n, values, token, min(TOKENS, a.m - token));
        if (BY_TOKEN)
            quantize_by_token<BF16, NORM, TOKENS>(a, u, rounds, &tops, token >= step ? step : 0);
        else
            quantize_by_block<BF16, NORM, TOKENS>(a, u, rounds);
#pragma unroll
        for (int r = 0; r < ROUNDS; r++)
            rounds[r].advance(step);
    }
    if (BY_TOKEN) {
        __syncthreads();
        store_sums<TOKENS>(a, &tops, token - step);
    }
}

/* ---- host --------------------------------------------------------------------------------------
 */

template <bool BF16, int TOKENS, bool BY_TOKEN> static const void *kernel_of(int norm)
{
#define KERNEL(norm) (const void *)qt_w4ax_quantize_rows_kernel<BF16, norm, TOKENS, BY_TOKEN>
    return norm == QTOOL_W4AX_LAYER_NORM ? KERNEL(QTOOL_W4AX_LAYER_NORM)
           : norm == QTOOL_W4AX_RMS_NORM ? KERNEL(QTOOL_W4AX_RMS_NORM)
                                         : KERNEL(QTOOL_W4AX_NO_NORM);
#undef KERNEL
}

template <bool BF16> static const void *kernel_for(int norm, int tokens, bool by_token)
{
    return tokens == 1 ? by_token ? kernel_of<BF16, 1, true>(norm) : kernel_of<BF16, 1, false>(norm)
           : by_token ? kernel_of<BF16, 2, true>(norm)
                       : kernel_of<BF16, 2, false>(norm);
}

/* Shared memory of the kernel beside rows and pairs, and of the system. */
enum { OWN_BYTES = sizeof(warp_sums) * 2 + sizeof(token_tops) + 1024 };
static_assert(OWN_BYTES - 1024 <= QUANTIZE_OWN_BYTES, "what launches count on");

bool qt_w4ax_quantize_rows(int *status, const quantize_args *a, int norm, bool bf16, int cc,
                           void *stream)
{
    const int threads = a->k / THREAD_CHANNELS;
    int ordinal = 0, sms = 0, smem_limit = 0;
    if (a->k % WARP_CHANNELS || threads > MAX_THREADS || cudaGetDevice(&ordinal) != cudaSuccess)
        return false;
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, ordinal);
    cudaDeviceGetAttribute(&smem_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal);
    const size_t pair_bytes = (size_t)a->k * 12;
    int resident = MAX_THREADS / threads; /* blocks of pairs, with 64 registers a thread */
    if ((size_t)resident * (pair_bytes + OWN_BYTES) > (size_t)smem_limit)
        resident = (int)((size_t)smem_limit / (pair_bytes + OWN_BYTES));
    /* One token at a time while that fills half of the device, or if pairs find no room. */
    const bool few = (long long)a->m * threads <= (long long)sms * (MAX_THREADS / 2);
    const int tokens = few || resident < 1 ? 1 : 2, units = (a->m + tokens - 1) / tokens;
    const size_t smem = tokens == 1 ? (size_t)a->k * 2 : pair_bytes;
    const bool by_token = a->scales != QTOOL_W4AX_BLOCK;
    const void *kernel =
        bf16 ? kernel_for<true>(norm, tokens, by_token) : kernel_for<false>(norm, tokens, by_token);
    const int blocks = tokens == 1 || units < resident * sms ? units : resident * sms;
    *status = qt_w4ax_launch_quantize(kernel, blocks, threads, smem, a, cc, stream);
    return true;
}
