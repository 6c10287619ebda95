/* The KV cache as the kernels see it, and the mapping of its two formats to operand registers. */
#ifndef QT_KERNELS_CUDA_KV4_CACHE_CUH
#define QT_KERNELS_CUDA_KV4_CACHE_CUH

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/ptx_int.cuh"
#include "kernels/include/qtool_kv4.h"

#include <cuda_fp16.h>
#include <math.h>

struct kv_view {
    unsigned char *k, *v;
    __half *v_param;        /* of values, see kv_value_param */
    unsigned char *k_param; /* of groups of keys: FP16 [head_dim] */
    __half *k_first;        /* [sequence][head][head_dim] */
    __half *k_tail;         /* [sequence][head][QTOOL_KV_GROUP][head_dim] */
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

/* Index of the value parameter of a row and a group of channels. The parameters of the tokens t and
 * t + 4 of eight are adjacent, as attention multiplies by both at once. */
template <int D> static __device__ __forceinline__ size_t kv_value_param(size_t row, int group)
{
    enum { GROUPS = D / QTOOL_KV_CHANNELS };
    return ((row / 8 * 4 + row % 4) * GROUPS + (unsigned)group) * 2 + row / 4 % 2;
}

/*
 * Formats. A stage of TOKENS tokens of one head is [ K rows | V rows | value parameters | key
 * parameters ] in shared memory; a tile is 16 of its tokens. Scores: keys are the A operand (rows =
 * tokens, k = channels), queries are B (n = heads). Output: transposed values are the A operand of
 * m16n8k16 (rows = channels, k = tokens), probabilities are B. The order of k is free if both
 * operands agree, so each format uses the order in which its words are stored.
 *
 * Lane (g, t) = (lane / 4, lane % 4) gets the scores of the tokens of rows g and g + 8 of a tile
 * for the heads head(u, t), u = 0..HQ-1: s[u][0] and s[u][1]. In the products with values, columns
 * 2t and 2t + 1 of the n-th n8 tile are the heads of u = 2n and 2n + 1.
 *
 *     warps          warps of a thread block
 *     GROUP          append may rewrite the tokens from the last multiple of GROUP on
 *     PARAMS         bytes of a token's value parameters; 0: values have none
 *     GRID           bytes of the key parameters of a stage
 *     FIRST          bytes of the keys of token 0, if they are apart
 *     QUERY_WORDS    words of a lane for the eight columns of B
 *     column         column of B, counted over all n8 tiles, of a head
 *     moved          address `rows` rows after a row among the first 8; rows is a constant
 *     query_channel  channel of value i, i < D / 32, that a lane prepares of a head: two a word
 *     query_part     factor of a word of a query
 *     query_exp2     log2 of the factor of a query, from its largest magnitude
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

/* Log2 of the factor that brings `top` into [2^exponent, 2^(exponent + 1)). */
static __device__ __forceinline__ float kv_exponent(float top, int exponent)
{
    return top > 0 && top < INFINITY ? (float)min(exponent - ilogbf(top), 100) : 0;
}

/* Place of word i of the B fragments in shared memory, lane after lane: chunks of four words are
 * exchanged so that eight lanes read them without bank conflicts. */
template <class F> static __device__ __forceinline__ int kv_query_at(int i)
{
    enum { WORDS = F::QUERY_WORDS };
    return i ^ (i / WORDS / (32 / WORDS) & (WORDS / 4 - 1)) * 4;
}

template <int D> struct kv_int4 {
    enum {
        DIM = D,
        TOKENS = 32,
        ROW = D / 2,
        GROUP = QTOOL_KV_GROUP,
        GROUPS = D / QTOOL_KV_CHANNELS, /* of a value */
        PARAMS = 2 * GROUPS,
        GRID = 2 * D,
        FIRST = 2 * D,
        QUERY_WORDS = D / 8,
        PARAM_AT = 2 * TOKENS * ROW, /* in a stage */
        GRID_AT = PARAM_AT + TOKENS * PARAMS,
    };
    uint32_t key_lane, value_lane, grid_lane, query_lane, scale_lane, own_lane;

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
        grid_lane = kv_kept(lane % 4 * 16);
        query_lane = kv_kept(kv_query_at<kv_int4>(lane * QUERY_WORDS) * 4);
        scale_lane = kv_kept(PARAM_AT + lane % 4 * (4 * GROUPS));
        own_lane = kv_kept(PARAM_AT + lane % 4 * (4 * GROUPS) + lane / 4 % GROUPS * 4);
    }
    /* Offset of 16 bytes of the key parameters or of the keys of token 0: the chunks of eight
     * channels are in the order in which the lanes t read them. */
    static __device__ __forceinline__ uint32_t grid_at(unsigned chunk)
    {
        return chunk % (D / 32) * 64 + chunk / (D / 32) * 16;
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
     * Lane (g, t) has D/32 words of the key rows g and g + 8: the channels from t * D/4 on. Codes
     * are used as FP16 bit patterns: the subnormal code * 2^-24, which is exact, or 16 times that:
     * odd words of queries are divided by 16.
     * The scales of the group, the magnitudes of its parameters, are multiplied into the queries.
     * The products of these with the zero-points are the same for all tokens of the group. The sign
     * and the low six bits of a parameter are zero-point * 2^-24.
     */
    static __device__ __forceinline__ int head(int u, int t)
    {
        return 4 * u + t;
    }
    static __device__ __forceinline__ int column(int head)
    {
        return head / 8 * 8 + head % 4 * 2 + head / 4 % 2;
    }
    static __device__ __forceinline__ int query_channel(int lane, int i)
    {
        return lane * (D / 32) + i;
    }
    /* Queries are below 4: then their products with scales, at most 2 * 65504 / 15 or 32 units in
     * the last place more, fit FP16. */
    static __device__ __forceinline__ float query_exp2(float top)
    {
        return kv_exponent(top, 1);
    }
    static __device__ __forceinline__ float query_part(int word)
    {
        return word % 2 ? 1.f / 16 : 1;
    }
    /* Words 4 j to 4 j + 3 of the fragment n of the queries at `queries`. */
    __device__ __forceinline__ uint4 query(uint32_t queries, int n, int j) const
    {
        return ptx_load_16((queries + query_lane ^ j * 16) + n * (32 * QUERY_WORDS * 4));
    }
    /* Multiplies the queries by the scales of the KV group of a stage. */
    template <int HQ>
    __device__ __forceinline__ void scale_queries(uint32_t (*q)[QUERY_WORDS], float zeros[HQ],
                                                  uint32_t queries, uint32_t stage) const
    {
        vector sum[(HQ + 1) / 2] = {};
#pragma unroll
        for (int j = 0; j < D / 32; j++) {
            const uint4 param = ptx_load_16(stage + GRID_AT + grid_lane + j * 64);
            const uint4 zero = {param.x & 0x803f803f, param.y & 0x803f803f, param.z & 0x803f803f,
                                param.w & 0x803f803f};
#pragma unroll
            for (int n = 0; n < (HQ + 1) / 2; n++) {
                const uint4 b = query(queries, n, j);
                uint32_t *to = &q[n][4 * j];
                to[0] = times_magnitude(b.x, param.x);
                to[1] = times_magnitude(b.y, param.y);
                to[2] = times_magnitude(b.z, param.z);
                to[3] = times_magnitude(b.w, param.w);
                sum[n].add(zero, to);
            }
        }
#pragma unroll
        for (int u = 0; u < HQ; u++)
            zeros[u] = sum[u / 2].product(u % 2);
    }
    template <int HQ>
    __device__ __forceinline__ void multiply(float s[TOKENS / 16][HQ][2],
                                             const uint32_t (*q)[QUERY_WORDS],
                                             const float zeros[HQ], uint32_t stage) const
    {
        enum { TILES = TOKENS / 16, COLUMNS = (HQ + 1) / 2 };
        uint32_t w[TILES][2][D / 32];
        float sum[TILES][COLUMNS][4] = {};
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                load_words(w[i][h], stage + key_lane + (i * 16 + h * 8) * ROW);
#pragma unroll
        for (int j = 0; j < D / 32; j++)
#pragma unroll
            for (int n = 0; n < COLUMNS; n++) {
                const uint32_t *b = &q[n][4 * j];
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    const uint32_t x = w[i][0][j], y = w[i][1][j];
                    const uint32_t a[4] = {x & 0x000f000f, y & 0x000f000f, x >> 8 & 0x000f000f,
                                           y >> 8 & 0x000f000f};
                    const uint32_t c[4] = {x & 0x00f000f0, y & 0x00f000f0, x >> 8 & 0x00f000f0,
                                           y >> 8 & 0x00f000f0};
                    ptx_mma_f16(sum[i][n], a, b[0], b[2]);
                    ptx_mma_f16(sum[i][n], c, b[1], b[3]);
                }
            }
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int u = 0; u < HQ; u++)
#pragma unroll
                for (int j = 0; j < 2; j++)
                    s[i][u][j] = 0x1p24f * (sum[i][u / 2][2 * j + u % 2] - zeros[u]);
    }
    /* Products of queries with one vector of channels, in any row. Rows g of A have the even words
     * of the vector, rows g + 8 the odd words: what lies in four consecutive registers anyway. Half
     * of each accumulator has the products of even words with even words, or of odd with odd. */
    struct vector {
        float even[4], odd[4];

        __device__ __forceinline__ void add(const uint4 &x, const uint32_t *b)
        {
            const uint32_t a[4] = {x.x, x.y, x.z, x.w};
            ptx_mma_f16(even, a, b[0], b[2]);
            ptx_mma_f16(odd, a, b[1], b[3]);
        }
        __device__ __forceinline__ float product(int column) const
        {
            return fmaf(odd[2 + column], 16, even[column]);
        }
    };
    /* Replaces the scores of row 0: those of token 0, whose keys are at `first`. */
    template <int HQ>
    __device__ __forceinline__ void replace_first(float s[TOKENS / 16][HQ][2], uint32_t queries,
                                                  uint32_t first) const
    {
        vector sum[(HQ + 1) / 2] = {};
#pragma unroll
        for (int j = 0; j < D / 32; j++) {
            const uint4 k = ptx_load_16(first + grid_lane + j * 64);
#pragma unroll
            for (int n = 0; n < (HQ + 1) / 2; n++) {
                const uint4 b = query(queries, n, j);
                const uint32_t words[4] = {b.x, b.y, b.z, b.w};
                sum[n].add(k, words);
            }
        }
#pragma unroll
        for (int u = 0; u < HQ; u++)
            s[0][u][0] = threadIdx.x % 32 < 4 ? sum[u / 2].product(u % 2) : s[0][u][0];
    }
    static __device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b)
    {
        const __half2 v = __hmul2(*(const __half2 *)&a, *(const __half2 *)&b);
        return *(const uint32_t *)&v;
    }
    static __device__ __forceinline__ uint32_t times_magnitude(uint32_t a, uint32_t b)
    {
        const __half2 v = __hmul2(*(const __half2 *)&a, __habs2(*(const __half2 *)&b));
        return *(const uint32_t *)&v;
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
     * reads the bytes from g * GROUPS on of the tokens t, t + 4, t + 8, t + 12 of a tile, which are
     * its k = 2t, 2t + 1, 2t + 8, 2t + 9. Byte i has rows g and g + 8 of product i: two channels of
     * group i; the latter is 16 times too large. So all rows of a product share the scales, which
     * are multiplied into its probabilities.
     *
     * The lane's own parameters are those of group g % GROUPS and of its tokens. lows() makes of
     * them the operand A of the sums of probability * scale * zero-point / 4: row g has scale *
     * zero-point / 4 of group g, rounded to FP16, and row g + 8 has the rest.
     */
    __device__ __forceinline__ void load_own(uint32_t own[TOKENS / 16][2], uint32_t stage) const
    {
#pragma unroll
        for (int i = 0; i < TOKENS / 8; i++)
            own[i / 2][i % 2] = ptx_load_4(stage + own_lane + i * (8 * PARAMS));
    }
    static __device__ __forceinline__ void lows(uint32_t a[4], const uint32_t own[2])
    {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const uint32_t at_1024 = (own[j] & 0x003f003f) | 0x64006400; /* 1024 + 4 zero-point */
            const __half2 zero = __hfma2(*(const __half2 *)&at_1024, __float2half2_rn(1.f / 16),
                                         __float2half2_rn(-64));
            a[2 * j] = times(own[j], *(const uint32_t *)&zero);
            const __half2 rest =
                __hfma2(*(const __half2 *)&own[j], zero, __hneg2(*(const __half2 *)&a[2 * j]));
            a[2 * j + 1] = *(const uint32_t *)&rest;
        }
    }
    /* Clears the parameters of the tokens of a stage from `count` on. */
    static __device__ __forceinline__ void clear_params(uint32_t stage, int count)
    {
        const int token = (int)threadIdx.x % 32;
        if (token >= count)
#pragma unroll
            for (int i = 0; i < GROUPS; i++)
                ptx_store_2(stage + PARAM_AT + 2 * (uint32_t)kv_value_param<D>(token, i), 0);
        __syncwarp();
    }
    struct tile_values {
        uint32_t pair[2][D / 32][2]; /* [pair of tokens][word][half] */
        uint32_t scale[2][4];        /* [pair of tokens][group], of four groups */
        uint32_t scales;             /* where those of the tile are */

        __device__ __forceinline__ void load(const kv_int4 &f, uint32_t stage, int tile)
        {
            uint32_t w[4][D / 64];
            scales = stage + f.scale_lane + tile * (16 * PARAMS);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t from = stage + f.value_lane + (TOKENS + tile * 16 + 4 * i) * ROW;
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
        /* Loads what weigh needs for product i, the next one. */
        __device__ __forceinline__ void load_scales(int i)
        {
            if (i % 4 == 0)
#pragma unroll
                for (int s = 0; s < 2; s++)
                    *(uint4 *)scale[s] = ptx_load_16(scales + s * (8 * PARAMS) + i * 4);
        }
        /* Operand B of product i, of probabilities p. */
        __device__ __forceinline__ void weigh(uint32_t b[2], const uint32_t p[2], int i) const
        {
            b[0] = times(p[0], scale[0][i % 4]);
            b[1] = times(p[1], scale[1][i % 4]);
        }
    };
    static __device__ __forceinline__ int value_channel(int g, int i, int upper)
    {
        return i * QTOOL_KV_CHANNELS + 2 * g + upper;
    }
    static __device__ __forceinline__ float value_factor(int upper)
    {
        return upper ? 0x1p20f : 0x1p24f;
    }
};

template <int D> struct kv_f16 {
    enum {
        DIM = D,
        TOKENS = 16,
        ROW = D * 2,
        GROUP = 1,
        PARAMS = 0,
        GRID = 0,
        FIRST = 0,
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

    static __device__ __forceinline__ uint32_t grid_at(unsigned)
    {
        return 0;
    }
    static __device__ __forceinline__ int head(int u, int t)
    {
        return u / 2 * 8 + 2 * t + u % 2;
    }
    static __device__ __forceinline__ int column(int head)
    {
        return head;
    }
    /* The words of a head are [t][k-step][half], with two channels each. */
    static __device__ __forceinline__ int query_channel(int lane, int i)
    {
        const int word = lane * (D / 64) + i / 2;
        return word / 2 % (D / 16) * 16 + word % 2 * 8 + word / (D / 8) * 2 + i % 2;
    }
    static __device__ __forceinline__ float query_part(int)
    {
        return 1;
    }
    static __device__ __forceinline__ float query_exp2(float top)
    {
        return kv_exponent(top, 14);
    }
    template <int HQ>
    __device__ __forceinline__ void scale_queries(uint32_t (*)[QUERY_WORDS], float[HQ], uint32_t,
                                                  uint32_t) const
    {
    }
    template <int HQ>
    __device__ __forceinline__ void replace_first(float[1][HQ][2], uint32_t, uint32_t) const
    {
    }
    template <int HQ>
    __device__ __forceinline__ void multiply(float s[1][HQ][2], const uint32_t (*q)[QUERY_WORDS],
                                             const float[HQ], uint32_t stage) const
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
                s[0][u][j] = sum[u / 2][2 * j + u % 2];
    }

    __device__ __forceinline__ void load_own(uint32_t (*)[2], uint32_t) const
    {
    }
    static __device__ __forceinline__ void lows(uint32_t[4], const uint32_t[2])
    {
    }
    static __device__ __forceinline__ void clear_params(uint32_t, int)
    {
    }
    struct tile_values {
        uint32_t at;

        __device__ __forceinline__ void load_scales(int)
        {
        }
        __device__ __forceinline__ void weigh(uint32_t b[2], const uint32_t p[2], int) const
        {
            b[0] = p[0];
            b[1] = p[1];
        }
        __device__ __forceinline__ void load(const kv_f16 &f, uint32_t stage, int)
        {
            at = stage + TOKENS * ROW + f.value_lane;
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
