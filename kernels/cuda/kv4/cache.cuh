/* The KV cache as the kernels see it, and the mapping of its two formats to operand registers. */
#ifndef QT_KERNELS_CUDA_KV4_CACHE_CUH
#define QT_KERNELS_CUDA_KV4_CACHE_CUH

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/ptx_int.cuh"

#include <math.h>

struct kv_view {
    unsigned char *k, *v;
    __half2 *param; /* scale, minimum */
    const float *k_scale, *k_zero;
    const int *table;
    int table_pitch, heads, page_tokens;
    int page_shift; /* log2(page_tokens), with a table */
};

/* Returns the row of a token in the arrays [pages][heads][page_tokens]. */
static __device__ __forceinline__ size_t kv_row(const kv_view &c, int page, int head, int token)
{
    int inside = c.table ? token & (c.page_tokens - 1) : token;
    return ((size_t)page * c.heads + head) * c.page_tokens + inside;
}

/* Returns the page of a token of a sequence. */
static __device__ __forceinline__ int kv_page(const kv_view &c, int sequence, int token)
{
    return c.table ? c.table[(size_t)sequence * c.table_pitch + (token >> c.page_shift)] : sequence;
}

/*
 * Formats. A stage of TOKENS tokens of one head is [ K rows | V rows | parameters ] in shared
 * memory; a tile is 16 of its tokens. Scores: keys are the A operand (rows = tokens, k = channels),
 * queries are B (n = heads). Output: transposed values are the A operand of m16n8k16 (rows =
 * channels, k = tokens), probabilities are B. The order of k is free if both operands agree, so
 * each format uses the order in which its words are stored.
 *
 * Lane (g, t) = (lane / 4, lane % 4) gets the scores of the tokens of rows g and g + 8 of a tile
 * for the heads head(u, t), u = 0..HQ-1: s[u][0] and s[u][1]. In the products with values, columns
 * 2t and 2t + 1 of the n-th n8 tile are the heads of u = 2n and 2n + 1.
 *
 *     warps          warps of a thread block
 *     TILE_HEADS     heads in the eight columns of B
 *     QUERY_WORDS    words of a lane for these heads
 *     moved          address `rows` rows after a row among the first 8; rows is a constant
 *     query_channel  channel of value i, i < D / 32, that a lane prepares of a head for put_query
 *     query_factor   factor that queries are multiplied by, from their largest magnitude
 *     query_unit     factor that products with codes are multiplied by
 */

/* Returns v, in a register that the compiler keeps: it would recompute the value for each stage,
 * but it cannot recompute the result of a shuffle. */
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

    /* With 16 heads, 8 warps would use so many registers that no second thread block fits on an
     * SM. */
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
    /* Offset of 16 bytes of a key. Among eight rows, row 2 t + h is token t + 4 h: see
     * tile_values. */
    static __device__ __forceinline__ uint32_t key_at(unsigned token, unsigned chunk)
    {
        return ((token & ~7u) | (token & 3) * 2 | (token >> 2 & 1)) * ROW + chunk * 16;
    }
    static __device__ __forceinline__ unsigned row_token(unsigned row)
    {
        return row >> 1 | (row & 1) * 4;
    }
    /* Offset of 16 bytes of a value. Four lanes read four consecutive tokens at a time; exchanging
     * halves of a row avoids bank conflicts between them. */
    static __device__ __forceinline__ uint32_t value_at(unsigned token, unsigned chunk)
    {
        return token * ROW + (D == 128 ? chunk ^ (token & 2) : chunk) * 16;
    }
    static __device__ __forceinline__ uint32_t moved(uint32_t at, int rows)
    {
        return at + rows * ROW;
    }

    /* ---- scores ----
     *
     * Codes are unsigned bytes of m16n8k32. One product takes the low nibbles of words 2 j and
     * 2 j + 1 of a row; another, with accumulators of its own, takes the high nibbles, which are 16
     * times their codes. Lane (g, t) has D/32 words of the key rows g and g + 8; nibble n of word j
     * is channel t * D/4 + 8 j + n.
     *
     * Queries are 16-bit integers, 256 high + low. Column 2 i of B is the high part of head i,
     * column 2 i + 1 its low part, so lane t gets both parts of head t.
     */
    static __device__ __forceinline__ int head(int u, int t)
    {
        return 4 * u + t;
    }
    static __device__ __forceinline__ int query_channel(int lane, int i)
    {
        const int byte = lane * (D / 32) + i, word = byte / 4 % (D / 16); /* see multiply */
        return byte / (D / 4) * (D / 4) + (word / 4 * 2 + word % 2) * 8 + byte % 4 * 2 +
               word / 2 % 2;
    }
    static __device__ __forceinline__ float query_factor(float top)
    {
        /* Both are scaled down because __fdividef returns 0 for divisors from 2^126 on. */
        return top > 1e-30f ? __fdividef(LARGEST * 0x1p-20f, top * 0x1p-20f) : 0;
    }
    static __device__ __forceinline__ float query_unit(float top)
    {
        return top * (1 / (16 * LARGEST));
    }
    /* words: operand words of a head, [high, low][D bytes]. */
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
                                             uint32_t stage, int tile) const
    {
        const uint32_t nibble = 0x0f0f0f0f;
        uint32_t w[2][D / 32];
#pragma unroll
        for (int h = 0; h < 2; h++)
            load_words(w[h], stage + key_lane + (tile * 16 + h * 8) * ROW);
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
     * Codes are used as FP16 bit patterns: the subnormal code * 2^-24, which is exact. Lane (g, t)
     * reads the D/8 channels from g * D/8 on of the tokens t, t + 4, t + 8, t + 12 of a tile, which
     * are its k = 2t, 2t + 1, 2t + 8, 2t + 9. Rows g and g + 8 of product i are the channels 2 i
     * and 2 i + 1 among these; the latter is 16 times too large.
     */
    struct tile_values {
        uint32_t pair[2][D / 32][2]; /* [pair of tokens][word][half] */

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

    static constexpr float LARGEST = 127 * 256; /* largest magnitude of an integer query */
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
    /* The four matrices of ldmatrix. Keys: tokens 0..7 and 8..15 with channels 0..7, then with
     * channels 8..15. Values: channels 0..7 and 8..15 with tokens 0..7, then with tokens 8..15. */
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
    /* The words of a head are [t][k-step][half], with two channels each. */
    static __device__ __forceinline__ int query_channel(int lane, int i)
    {
        const int word = lane * (D / 64) + i / 2;
        return word / 2 % (D / 16) * 16 + word % 2 * 8 + word / (D / 8) * 2 + i % 2;
    }
    /* Log2 of the factor that scales the largest magnitude to 2^14. */
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
                                             uint32_t stage, int) const
    {
        const uint32_t at = stage + key_lane;
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
