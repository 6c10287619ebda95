/* The cache as the kernels see it, and how its two formats reach operand registers. */
#ifndef QT_CUDA_KV4_CACHE_CUH
#define QT_CUDA_KV4_CACHE_CUH

#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/ptx_int.cuh"

struct kv_view {
    unsigned char *k, *v;
    __half2 *param; /* scale, least */
    const float *k_scale, *k_zero;
    const int *table;
    int table_pitch, heads, page_tokens;
    int page_shift; /* log2(page_tokens); 31 when contiguous */
};

/* Number of token `token` of a sequence in the arrays [pages][heads][page_tokens]. */
static __device__ __forceinline__ size_t kv_place(const kv_view &c, int page, int head, int token)
{
    int inside = c.table ? token & (c.page_tokens - 1) : token;
    return ((size_t)page * c.heads + head) * c.page_tokens + inside;
}

static __device__ __forceinline__ int kv_page(const kv_view &c, int sequence, int token)
{
    return c.table ? c.table[(size_t)sequence * c.table_pitch + (token >> c.page_shift)] : sequence;
}

/*
 * Formats. A slot of TOKENS tokens of one head lies in shared memory as K rows, V rows, parameters;
 * a tile is 16 tokens of it. Keys are the A operand of m16n8k16, rows = tokens, k = channels;
 * values transposed are A too, rows = channels, k = tokens; queries and probabilities are B (n =
 * heads). Which channel or token is which k is free as long as both operands agree, so each format
 * takes the order in which its words come.
 */
template <int D> struct kv_int4 {
    enum { DIM = D, TOKENS = 32, ROW = D / 2, PARAMS = 1 };
    /* Codes stand in FP16 mantissas as they are: code * 2^-24, exact, subnormal. */
    static constexpr float CODE_UNIT = 0x1p-24f;

    /*
     * Lane (g, t) = (lane / 4, lane % 4) reads D/32 words of the key rows g and g + 8. Nibble n of
     * word j is channel t * D/4 + 8 j + n, and the masks pick nibbles (0, 4), (1, 5), then (2, 6),
     * (3, 7): k-step 2 j + p has channels +2p, +2p+4 in its first half and +2p+1, +2p+5 in its
     * second, which the mask leaves 16 times too large.
     */
    static __device__ __forceinline__ int channel(int t, int step, int half, int h)
    {
        return t * (D / 4) + step / 2 * 8 + step % 2 * 2 + half + 4 * h;
    }
    static __device__ __forceinline__ float channel_factor(int half)
    {
        return half ? 0.0625f : 1.0f;
    }
    /* Key row of a token: row 2 t + h of eight is token t + 4 h, see value_frag. */
    static __device__ __forceinline__ int key_row(int token)
    {
        return (token & ~7) | (token & 3) * 2 | (token >> 2 & 1);
    }
    static __device__ __forceinline__ int tile_token(int row)
    {
        return (row & 8) | (row >> 1 & 3) | (row & 1) * 4;
    }
    static __device__ __forceinline__ uint32_t key_at(int token, int chunk)
    {
        return (uint32_t)(key_row(token) * ROW + chunk * 16);
    }
    /* Four lanes read tokens t..t+3: the turn by half a row keeps them off each other's banks. */
    static __device__ __forceinline__ uint32_t value_at(int token, int chunk)
    {
        return (uint32_t)(token * ROW + (D == 128 ? chunk ^ (token & 2) : chunk) * 16);
    }

    uint32_t word[2][D / 32];
    __device__ __forceinline__ void load_keys(const unsigned char *keys, int tile, int lane)
    {
        const unsigned char *p = keys + (tile * 16 + lane / 4) * ROW + lane % 4 * (D / 8);
#pragma unroll
        for (int h = 0; h < 2; h++)
            load_words(word[h], p + h * 8 * ROW);
    }
    static __device__ __forceinline__ void load_words(uint32_t *to, const unsigned char *p)
    {
        if (D == 128)
            *(uint4 *)to = *(const uint4 *)p;
        else
            *(uint2 *)to = *(const uint2 *)p;
    }
    __device__ __forceinline__ void key_frag(uint32_t a[4], int step) const
    {
        uint32_t w0 = word[0][step / 2] >> step % 2 * 8, w1 = word[1][step / 2] >> step % 2 * 8;
        a[0] = w0 & 0x000f000f;
        a[1] = w1 & 0x000f000f;
        a[2] = w0 & 0x00f000f0;
        a[3] = w1 & 0x00f000f0;
    }

    /*
     * Lane (g, t) reads channels g * D/8 ... of the tokens t, t + 4, t + 8, t + 12 of a tile: these
     * are its k = 2t, 2t + 1, 2t + 8, 2t + 9. Rows g, g + 8 of product number i are channels 2 i
     * and 2 i + 1 of them, the latter 16 times too large.
     */
    uint32_t pair[2][D / 32][2]; /* tokens of a register, word, half */
    __device__ __forceinline__ void load_values(const unsigned char *values, int tile, int lane)
    {
        uint32_t w[4][D / 64];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int token = tile * 16 + lane % 4 + 4 * i, at = lane / 4 * (D / 16);
            const unsigned char *p = values + value_at(token, at / 16) + at % 16;
            if (D == 128)
                *(uint2 *)w[i] = *(const uint2 *)p;
            else
                w[i][0] = *(const uint32_t *)p;
        }
#pragma unroll
        for (int j = 0; j < D / 64; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                pair[i][j][0] = __byte_perm(w[2 * i][j], w[2 * i + 1][j], 0x5410);
                pair[i][j][1] = __byte_perm(w[2 * i][j], w[2 * i + 1][j], 0x7632);
            }
    }
    __device__ __forceinline__ void value_frag(uint32_t a[4], int i) const
    {
#pragma unroll
        for (int s = 0; s < 2; s++) {
            uint32_t w = pair[s][i / 4][i / 2 % 2] >> i % 2 * 8;
            a[2 * s] = w & 0x000f000f;
            a[2 * s + 1] = w & 0x00f000f0;
        }
    }
    static __device__ __forceinline__ int value_channel(int g, int i, int upper)
    {
        return g * (D / 8) + 2 * i + upper;
    }
    static __device__ __forceinline__ float value_factor(int upper)
    {
        return (upper ? 0.0625f : 1.0f) / CODE_UNIT;
    }
};

template <int D> struct kv_f16 {
    enum { DIM = D, TOKENS = 16, ROW = D * 2, PARAMS = 0 };
    static constexpr float CODE_UNIT = 1;

    static __device__ __forceinline__ int channel(int t, int step, int half, int h)
    {
        return step * 16 + half * 8 + t * 2 + h;
    }
    static __device__ __forceinline__ float channel_factor(int)
    {
        return 1;
    }
    static __device__ __forceinline__ int tile_token(int row)
    {
        return row;
    }
    static __device__ __forceinline__ uint32_t key_at(int token, int chunk)
    {
        return (uint32_t)(token * ROW + (chunk ^ (token & 7)) * 16);
    }
    static __device__ __forceinline__ uint32_t value_at(int token, int chunk)
    {
        return key_at(token, chunk);
    }

    uint32_t keys, values;
    int lane;
    __device__ __forceinline__ void load_keys(const unsigned char *p, int, int l)
    {
        keys = ptx_shared(p);
        lane = l;
    }
    /* Matrices: tokens 0..7 and 8..15 of channels 0..7, then of channels 8..15. */
    __device__ __forceinline__ void key_frag(uint32_t a[4], int step) const
    {
        ptx_ldmatrix_x4(a, keys + key_at(lane % 16, step * 2 + lane / 16));
    }
    __device__ __forceinline__ void load_values(const unsigned char *p, int, int l)
    {
        values = ptx_shared(p);
        lane = l;
    }
    /* Transposed: channels 0..7 and 8..15 of tokens 0..7, then of tokens 8..15. */
    __device__ __forceinline__ void value_frag(uint32_t a[4], int i) const
    {
        ptx_ldmatrix_x4_trans(a, values + value_at(lane % 8 + lane / 16 * 8, i * 2 + lane / 8 % 2));
    }
    static __device__ __forceinline__ int value_channel(int g, int i, int upper)
    {
        return i * 16 + g + 8 * upper;
    }
    static __device__ __forceinline__ float value_factor(int)
    {
        return 1;
    }
};

#endif
