/* The cache as the kernels see it, and how its two formats reach operand registers. */
#ifndef QT_KERNELS_CUDA_KV4_CACHE_CUH
#define QT_KERNELS_CUDA_KV4_CACHE_CUH

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/ptx_int.cuh"

#include <math.h>

struct kv_view {
    unsigned char *k, *v;
    __half2 *param; /* scale, least */
    const float *k_scale, *k_zero;
    const int *table;
    int table_pitch, heads, page_tokens;
    int page_shift; /* log2(page_tokens), with a table */
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
 * a tile is 16 tokens of it. Keys are the A operand of a product, rows = tokens, k = channels, with
 * queries as B, n = heads; values transposed are A of m16n8k16, rows = channels, k = tokens, with
 * probabilities as B. Which channel or token is which k is free as long as both operands agree, so
 * each format takes the order in which its words come.
 *
 * Lane (g, t) = (lane / 4, lane % 4) gets the products of the tokens of rows g and g + 8 of a tile
 * with the heads head(u, t), u = 0..HQ-1: s[u][0] and s[u][1]. In the products with values, columns
 * 2t and 2t + 1 of the n-th n8 tile are the heads of u = 2n and 2n + 1.
 *
 *     warps         of a block
 *     TILE_HEADS    heads of B's eight columns; QUERY_WORDS: words of a lane for them
 *     moved         address of the row `rows` further, a constant, of one of the first 8
 *     query_channel channel of value i of D / 32 that a lane prepares of a head, for put_query
 *     query_factor  queries are multiplied by it, given their largest size ...
 *     query_unit    ... and products with codes by this
 */

/* A lane's own number or place, kept in a register: the compiler would find it again for each slot,
 * but for what comes from an exchange. */
static __device__ __forceinline__ uint32_t kv_kept(uint32_t v)
{
    return __shfl_sync(~0u, v, threadIdx.x % 32);
}

template <class T> static __device__ __forceinline__ T *kv_kept(T *p)
{
    return (T *)__shfl_sync(~0u, (unsigned long long)p, threadIdx.x % 32);
}

template <int D> struct kv_int4 {
    enum {
        DIM = D,
        TOKENS = 32,
        ROW = D / 2,
        PARAMS = 1,
        TILE_HEADS = 4,
        QUERY_WORDS = D / 16,
    };
    uint32_t key_lane, value_lane;

    /* 16 heads take so many registers that 8 warps would be alone on a multiprocessor. */
    static __host__ __device__ constexpr int warps(int hq)
    {
        return hq <= 2 ? 8 : 4;
    }
    __device__ __forceinline__ void open(unsigned lane)
    {
        key_lane = kv_kept(lane * (D / 8));
        value_lane =
            kv_kept(value_at(lane % 4, lane / 4 * (D / 16) / 16) + lane / 4 * (D / 16) % 16);
    }
    /* Key row of a token: row 2 t + h of eight is token t + 4 h, see tile_values. */
    static __device__ __forceinline__ uint32_t key_at(unsigned token, unsigned chunk)
    {
        return ((token & ~7u) | (token & 3) * 2 | (token >> 2 & 1)) * ROW + chunk * 16;
    }
    static __device__ __forceinline__ unsigned row_token(unsigned row)
    {
        return row >> 1 | (row & 1) * 4;
    }
    /* Four lanes read tokens t..t+3: the turn by half a row keeps them off each other's banks. */
    static __device__ __forceinline__ uint32_t value_at(unsigned token, unsigned chunk)
    {
        return token * ROW + (D == 128 ? chunk ^ (token & 2) : chunk) * 16;
    }
    static __device__ __forceinline__ uint32_t moved(uint32_t at, int rows)
    {
        return at + rows * ROW;
    }

    /* ---- products with keys ----
     *
     * Codes are unsigned bytes of m16n8k32: low nibbles of a row's words 2 j and 2 j + 1 in one
     * product, high nibbles, 16 times too large, in another with sums of its own. Lane (g, t) has
     * D/32 words of the key rows g and g + 8; nibble n of word j is channel t * D/4 + 8 j + n.
     *
     * Queries are integers of 16 bits, 256 high + low, with a column for each part: column 2 i of B
     * is the high part of head i, 2 i + 1 its low part, and so lane t gets both of head t.
     */
    static __device__ __forceinline__ int head(int u, int t)
    {
        return 4 * u + t;
    }
    static __device__ __forceinline__ int query_channel(int lane, int i)
    {
        const int byte = lane * (D / 32) + i, word = byte / 4 % (D / 16); /* word: see multiply */
        return byte / (D / 4) * (D / 4) + (word / 4 * 2 + word % 2) * 8 + byte % 4 * 2 +
               word / 2 % 2;
    }
    static __device__ __forceinline__ float query_factor(float top)
    {
        /* From 2^126 on the quotient would be 0. */
        return top > 1e-30f ? __fdividef(LARGEST * 0x1p-20f, top * 0x1p-20f) : 0;
    }
    static __device__ __forceinline__ float query_unit(float top)
    {
        return top * (1 / (16 * LARGEST));
    }
    /* words: of a head, [part][D bytes]. */
    static __device__ __forceinline__ void put_query(uint32_t *words, int lane,
                                                     const float v[D / 32])
    {
        uint32_t part[2] = {};
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            const int q = __float2int_rn(v[i]), low = (int)(signed char)(q & 255);
            part[0] |= (uint32_t)((q - low) >> 8 & 255) << 8 * i;
            part[1] |= (uint32_t)(low & 255) << 8 * i;
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (D == 128)
                words[i * (D / 4) + lane] = part[i];
            else
                ((uint16_t *)words)[i * (D / 2) + lane] = (uint16_t)part[i];
    }
    template <int HQ>
    __device__ __forceinline__ void multiply(float s[HQ][2], const uint32_t (*q)[QUERY_WORDS],
                                             uint32_t slot, int tile) const
    {
        const uint32_t nibble = 0x0f0f0f0f;
        uint32_t w[2][D / 32];
#pragma unroll
        for (int h = 0; h < 2; h++)
            load_words(w[h], slot + key_lane + (tile * 16 + h * 8) * ROW);
#pragma unroll
        for (int u = 0; u < HQ; u++) {
            int low[4] = {}, high[4] = {};
#pragma unroll
            for (int j = 0; j < D / 32; j += 2) {
                uint32_t a[4] = {w[0][j] & nibble, w[1][j] & nibble, w[0][j + 1] & nibble,
                                 w[1][j + 1] & nibble};
                ptx_mma_u8(low, a, q[u][2 * j], q[u][2 * j + 1]);
                uint32_t b[4] = {w[0][j] & ~nibble, w[1][j] & ~nibble, w[0][j + 1] & ~nibble,
                                 w[1][j + 1] & ~nibble};
                ptx_mma_u8(high, b, q[u][2 * j + 2], q[u][2 * j + 3]);
            }
#pragma unroll
            for (int j = 0; j < 2; j++)
                s[u][j] = (float)((16 * low[2 * j] + high[2 * j]) * 256 + 16 * low[2 * j + 1] +
                                  high[2 * j + 1]);
        }
    }
    static __device__ __forceinline__ void load_words(uint32_t *to, uint32_t from)
    {
        if (D == 128)
            *(uint4 *)to = ptx_load_16(from);
        else
            *(uint2 *)to = ptx_load_8(from);
    }

    /* ---- values ----
     *
     * Codes stand in FP16 mantissas as they are: code * 2^-24, exact, subnormal. Lane (g, t) reads
     * channels g * D/8 ... of the tokens t, t + 4, t + 8, t + 12 of a tile: these are its k = 2t,
     * 2t + 1, 2t + 8, 2t + 9. Rows g, g + 8 of product number i are channels 2 i and 2 i + 1 of
     * them, the latter 16 times too large.
     */
    struct tile_values {
        uint32_t pair[2][D / 32][2]; /* tokens of a register, word, half */

        __device__ __forceinline__ void load(const kv_int4 &f, uint32_t values, int tile)
        {
            uint32_t w[4][D / 64];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t from = values + f.value_lane + (tile * 16 + 4 * i) * ROW;
                if (D == 128)
                    *(uint2 *)w[i] = ptx_load_8(from);
                else
                    w[i][0] = ptx_load_4(from);
            }
#pragma unroll
            for (int j = 0; j < D / 64; j++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    pair[i][j][0] = __byte_perm(w[2 * i][j], w[2 * i + 1][j], 0x5410);
                    pair[i][j][1] = __byte_perm(w[2 * i][j], w[2 * i + 1][j], 0x7632);
                }
        }
        __device__ __forceinline__ void frag(uint32_t a[4], int i) const
        {
#pragma unroll
            for (int s = 0; s < 2; s++) {
                uint32_t w = pair[s][i / 4][i / 2 % 2] >> i % 2 * 8;
                a[2 * s] = w & 0x000f000f;
                a[2 * s + 1] = w & 0x00f000f0;
            }
        }
    };
    static __device__ __forceinline__ int value_channel(int g, int i, int upper)
    {
        return g * (D / 8) + 2 * i + upper;
    }
    static __device__ __forceinline__ float value_factor(int upper)
    {
        return upper ? 0x1p20f : 0x1p24f;
    }

    static constexpr float LARGEST = 127 * 256; /* query */
};

template <int D> struct kv_f16 {
    enum {
        DIM = D,
        TOKENS = 16,
        ROW = D * 2,
        PARAMS = 0,
        TILE_HEADS = 8,
        QUERY_WORDS = D / 8,
    };
    uint32_t key_lane, value_lane;

    static __host__ __device__ constexpr int warps(int)
    {
        return 4;
    }
    /* Matrices of ldmatrix: of keys tokens 0..7 and 8..15 of channels 0..7, then of channels
     * 8..15; of values channels 0..7 and 8..15 of tokens 0..7, then of tokens 8..15. */
    __device__ __forceinline__ void open(unsigned lane)
    {
        key_lane = kv_kept(key_at(lane % 16, lane / 16));
        value_lane = kv_kept(key_at(lane % 8 + lane / 16 * 8, lane / 8 % 2));
    }
    static __device__ __forceinline__ uint32_t key_at(unsigned token, unsigned chunk)
    {
        return token * ROW + (chunk ^ (token & 7)) * 16;
    }
    static __device__ __forceinline__ unsigned row_token(unsigned row)
    {
        return row;
    }
    static __device__ __forceinline__ uint32_t value_at(unsigned token, unsigned chunk)
    {
        return key_at(token, chunk);
    }
    static __device__ __forceinline__ uint32_t moved(uint32_t at, int rows)
    {
        return (at ^ (rows & 7) * 16) + rows * ROW;
    }

    static __device__ __forceinline__ int head(int u, int t)
    {
        return u / 2 * 8 + 2 * t + u % 2;
    }
    /* Words of a head: [t][k-step][half], of two channels each. */
    static __device__ __forceinline__ int query_channel(int lane, int i)
    {
        const int word = lane * (D / 64) + i / 2;
        return word / 2 % (D / 16) * 16 + word % 2 * 8 + word / (D / 8) * 2 + i % 2;
    }
    /* Log2 of what brings the largest to 2^14. */
    static __device__ __forceinline__ float query_exp2(float top)
    {
        return top > 0 && top < INFINITY ? (float)min(14 - ilogbf(top), 100) : 0;
    }
    static __device__ __forceinline__ float query_factor(float top)
    {
        return exp2f(query_exp2(top));
    }
    static __device__ __forceinline__ float query_unit(float top)
    {
        return exp2f(-query_exp2(top));
    }
    static __device__ __forceinline__ void put_query(uint32_t *words, int lane,
                                                     const float v[D / 32])
    {
#pragma unroll
        for (int i = 0; i < D / 64; i++) {
            const __half2 two = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
            words[lane * (D / 64) + i] = *(const uint32_t *)&two;
        }
    }
    template <int HQ>
    __device__ __forceinline__ void multiply(float s[HQ][2], const uint32_t (*q)[QUERY_WORDS],
                                             uint32_t slot, int) const
    {
        const uint32_t at = slot + key_lane;
        float sum[HQ / 2][4] = {};
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            uint32_t a[4];
            ptx_ldmatrix_x4(a, at ^ k * 32);
#pragma unroll
            for (int n = 0; n < HQ / 2; n++)
                ptx_mma_f16(sum[n], a, q[n][2 * k], q[n][2 * k + 1]);
        }
#pragma unroll
        for (int u = 0; u < HQ; u++)
#pragma unroll
            for (int j = 0; j < 2; j++)
                s[u][j] = sum[u / 2][2 * j + u % 2];
    }

    struct tile_values {
        uint32_t at;

        __device__ __forceinline__ void load(const kv_f16 &f, uint32_t values, int)
        {
            at = values + f.value_lane;
        }
        __device__ __forceinline__ void frag(uint32_t a[4], int i) const
        {
            ptx_ldmatrix_x4_transposed(a, at ^ i * 32);
        }
    };
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
