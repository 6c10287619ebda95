/* The work of a thread of quantize_rows.cu, from rows in shared memory to codes. */
#ifndef QT_KERNELS_CUDA_W4AX_QUANTIZE_ROWS_CUH
#define QT_KERNELS_CUDA_W4AX_QUANTIZE_ROWS_CUH

#include "kernels/cuda/w4ax/norm_sums.cuh"

enum { ROUND_CHANNELS = 8, ROUNDS = THREAD_CHANNELS / ROUND_CHANNELS };

/* ---- per-thread state ----------------------------------------------------------------------- */

/* State of a thread for one channel block: 4 channels from first_channel() on and 4 from + 16
 * on. R: channel blocks of a half warp. */
template <int TOKENS, int R = ROUNDS> struct round_state {
    uint32_t perm[4]; /* byte offsets of the channels' values, below 2^16, two per word */
    norm_words norm[2];
    uint32_t word;        /* block word */
    uint32_t code_at;     /* offset of the thread's codes in a row, before the token's swizzle */
    unsigned char *codes; /* row of codes of the current token */
    float *scale;         /* scale of the current token + threadIdx.x % 2 */

    __device__ __forceinline__ void open(const quantize_args &a, int round, int token)
    {
        open_block(a, block_of(round), token);
    }
    __device__ __forceinline__ void open_block(const quantize_args &a, int block, int token)
    {
        const int i = (int)threadIdx.x % 16;
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
        code_at = i / 4 * (wide() ? 32 : 16) + i % 4 * 4;
        codes = codes_of(a, word) + (size_t)token * row_bytes(word);
        scale = a.scale + (size_t)block * a.scale_pitch + token + threadIdx.x % 2;
    }
    __device__ __forceinline__ bool wide() const
    {
        return word & QTOOL_W4AX_WIDE_ROWS;
    }
    /* A warp has 2 R consecutive channel blocks. */
    static __device__ __forceinline__ int block_of(int round)
    {
        return (int)threadIdx.x / 32 * 2 * R + round * 2 + (int)threadIdx.x / 16 % 2;
    }
    template <int NORM>
    __device__ __forceinline__ void load_norms(const quantize_args &a, int round)
    {
#pragma unroll
        for (int h = 0; h < 2; h++)
            norm[h] = load_norm<NORM>(a, block_of(round) * COLS + first_channel() + 16 * h);
    }
    /* Stores the codes of `count` tokens from `token` on, swizzled as qtool_w4ax.h says. TOKENS =
     * 2: token is even. */
    __device__ __forceinline__ void store(const uint2 code[TOKENS], int token, int count) const
    {
        unsigned char *to = codes + (code_at ^ (token & 6) << (wide() ? 4 : 3));
        const int odd = TOKENS == 1 ? token & 1 : 0;
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            const int x_at = (odd ^ t) * 16;
            if (t < count && wide()) {
                *(uint32_t *)(to + t * 128 + x_at) = code[t].x;
                *(uint32_t *)(to + t * 128 + (x_at ^ 16)) = code[t].y;
            } else if (t < count) {
                *(uint32_t *)(to + t * 64) = pack_nibbles(code[t]);
            }
        }
    }
    __device__ __forceinline__ void advance(int tokens)
    {
        codes += (uint32_t)(tokens * row_bytes(word));
        scale += tokens;
    }
};

/* ---- rows to shared memory ------------------------------------------------------------------ */

/* A warp copies, reduces and pairs the channels that it quantizes itself if there is no
 * permutation, so it then waits for no other warp. */

/* Starts the copies of one or two rows. from: the lane's part of the first row; second: distance to
 * the second row in elements, 0 if there is none. */
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

/* Adds a lane's values to the norm sums and, with two tokens, stores the value pairs. rows, pairs:
 * the lane's first value in each buffer. */
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

/* ---- values to codes ------------------------------------------------------------------------ */

/* Loads a round's eight values of each token. values: shared address of the pairs, or of the
 * row. */
template <bool BF16, int TOKENS, int R>
static __device__ __forceinline__ void load_values(float v[TOKENS][8], const quantize_args &a,
                                                   uint32_t values, const round_state<TOKENS, R> &s,
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

/* Returns the largest magnitude of a channel block; with two tokens that of token threadIdx.x %
 * 2. */
template <int TOKENS> static __device__ __forceinline__ float absmax_of(const float v[TOKENS][8])
{
    float top[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        top[t] = fabsf(v[t][0]);
#pragma unroll
        for (int j = 1; j < 8; j++)
            top[t] = fmaxf(top[t], fabsf(v[t][j]));
    }
    const bool odd = threadIdx.x & 1;
    float mine = odd ? top[TOKENS - 1] : top[0];
    mine = fmaxf(mine, __shfl_xor_sync(~0u, odd ? top[0] : top[TOKENS - 1], 1));
#pragma unroll
    for (int d = 2; d < 16; d *= 2)
        mine = fmaxf(mine, __shfl_xor_sync(~0u, mine, d));
    return mine;
}

/* State shared by the rounds of one iteration. */
template <int TOKENS> struct iteration_state {
    row_norm n[TOKENS];
    float factor;     /* RMS norm: factor for the scales of token threadIdx.x % 2 */
    uint32_t values;  /* shared address of the pairs, or of the row */
    int token, count; /* first token, number of tokens: 1 or TOKENS */
};

template <int NORM, int TOKENS>
static __device__ __forceinline__ iteration_state<TOKENS>
iteration_open(const row_norm &mine, uint32_t values, int token, int count)
{
    iteration_state<TOKENS> u = {{}, 1, values, token, count};
    if (NORM == QTOOL_W4AX_RMS_NORM)
        u.factor = __shfl_sync(~0u, mine.factor, threadIdx.x % 2 * 16);
    if (NORM == QTOOL_W4AX_LAYER_NORM)
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            /* All lanes of a half have the same norm. Reading both values from one lane would put
             * both in uniform registers, and an instruction takes only one of these. */
            const int lane = (int)threadIdx.x % 16 + 16 * t;
            u.n[t] = {__shfl_sync(~0u, mine.factor, 16 * t), __shfl_sync(~0u, mine.shift, lane)};
        }
    return u;
}

/* Loads the values of a round, normalizes them, without the factor of an RMS norm, and rotates
 * them. */
template <bool BF16, int NORM, int TOKENS, int R>
static __device__ __forceinline__ void load_normalized(float v[TOKENS][8], const quantize_args &a,
                                                       const iteration_state<TOKENS> &u,
                                                       round_state<TOKENS, R> *s, int round)
{
#pragma unroll
    for (int j = 0; j < 4; j++) /* keeps the compiler from holding 16 addresses in registers */
        asm volatile("" : "+r"(s->perm[j]));
    load_values<BF16, TOKENS>(v, a, u.values, *s, s->block_of(round));
    if (NORM && TOKENS == 2)
        s->template load_norms<NORM>(a, round);
#pragma unroll
    for (int i = 0; i < 2 * TOKENS && NORM; i++)
        normalize<BF16, NORM>(v[i / 2] + i % 2 * 4, u.n[i / 2], s->norm[i % 2]);
    if (a.rotate)
#pragma unroll
        for (int t = 0; t < TOKENS; t++)
            rotate_block<true>(v[t], COLS);
}

/* Returns the value of token t. With two tokens, each thread has that of token threadIdx.x % 2. */
template <int TOKENS> static __device__ __forceinline__ float of_token(float v, int t)
{
    return TOKENS == 2 ? __shfl_sync(~0u, v, t, 2) : v;
}

/* BLOCK scales: stores the codes of a channel block with the values v. */
template <int TOKENS, int R>
static __device__ __forceinline__ void
quantize_block(const quantize_args &a, const iteration_state<TOKENS> &u,
               const round_state<TOKENS, R> &s, const float v[TOKENS][8])
{
    const bool narrow = is_narrow(s.word);
    const float scale = __fmul_rn(absmax_of<TOKENS>(v), narrow ? a.per7 : a.per127);
    const float inverse = inverse_of(scale);
    if ((int)threadIdx.x % 16 < u.count)
        *s.scale = inverse == 0 ? 1 : scale * u.factor;
    uint2 code[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; t++)
        code[t] =
            code_bytes(round_codes(v[t], of_token<TOKENS>(inverse, t), narrow ? 7 : 127, a.clamp));
    s.store(code, u.token, u.count);
}

template <bool BF16, int NORM, int TOKENS, int R>
static __device__ __forceinline__ void quantize_by_block(const quantize_args &a,
                                                         const iteration_state<TOKENS> &u,
                                                         round_state<TOKENS, R> (&s)[R])
{
#pragma unroll
    for (int r = 0; r < R; r++) {
        float v[TOKENS][8];
        load_normalized<BF16, NORM, TOKENS>(v, a, u, &s[r], r);
        quantize_block<TOKENS>(a, u, s[r], v);
    }
}

/* Maxima of up to two tokens by warp, and sums of their codes. */
struct token_stats {
    float absmax[2][MAX_WARPS];
    int sum[2];
};

/* Stores the sums of codes of the tokens from `token` on. Requires a barrier after the
 * additions. */
template <int TOKENS>
static __device__ __forceinline__ void store_sums(const quantize_args &a, const token_stats *tops,
                                                  int token)
{
    if (a.sum && threadIdx.x < TOKENS && token + (int)threadIdx.x < a.m)
        a.sum[token + threadIdx.x] = tops->sum[threadIdx.x];
}

/* INT and ROW scales: one scale per token. back: distance to the tokens of the previous iteration,
 * whose sums are stored here; 0 in the first iteration. */
template <bool BF16, int NORM, int TOKENS, int R>
static __device__ __forceinline__ void
quantize_by_token(const quantize_args &a, const iteration_state<TOKENS> &u,
                  round_state<TOKENS, R> (&s)[R], token_stats *tops, int back)
{
    const int i = (int)threadIdx.x % 16, warps = (int)blockDim.x / 32;
    float v[R][TOKENS][8], absmax[R], all = 0;
    int sum[TOKENS] = {};
#pragma unroll
    for (int r = 0; r < R; r++) {
        load_normalized<BF16, NORM, TOKENS>(v[r], a, u, &s[r], r);
        absmax[r] = absmax_of<TOKENS>(v[r]);
        all = fmaxf(all, absmax[r]);
    }
    all = fmaxf(all, __shfl_xor_sync(~0u, all, 16));
    if (threadIdx.x % 32 < 2)
        tops->absmax[threadIdx.x % 2][threadIdx.x / 32] = all;
    if (threadIdx.x < TOKENS) {
        if (back)
            store_sums<TOKENS>(a, tops, u.token - back);
        tops->sum[threadIdx.x] = 0;
    }
    __syncthreads();
    const float *mine = tops->absmax[my_half()];
    all = fmaxf(i < warps ? mine[i] : 0, i + 16 < warps ? mine[i + 16] : 0);
#pragma unroll
    for (int d = 8; d; d /= 2)
        all = fmaxf(all, __shfl_xor_sync(~0u, all, d));
    const float scale = __fmul_rn(__shfl_sync(~0u, all, threadIdx.x % 2 * 16), a.per127);
    if ((int)threadIdx.x < u.count)
        *s[0].scale = token_scale(scale, u.factor);
#pragma unroll
    for (int r = 0; r < R; r++) {
        const bool narrow = a.scales == QTOOL_W4AX_INT && is_narrow(s[r].word);
        const float factor = narrow ? int_factor(a, absmax[r], scale) : 1;
        const float inverse = inverse_of(__fmul_rn(scale, factor));
        uint2 code[TOKENS];
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            const rounded_codes c =
                round_codes(v[r][t], of_token<TOKENS>(inverse, t), narrow ? 7 : 127, a.clamp);
            code[t] = a.scales == QTOOL_W4AX_INT
                          ? scaled_code_bytes(c, narrow, of_token<TOKENS>(factor, t))
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

#endif
