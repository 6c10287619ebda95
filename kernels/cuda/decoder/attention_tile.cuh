/*
 * Attention of many queries per sequence (prefill): tiles of 64 queries on tensor cores, as in
 * FlashAttention-2 (arXiv 2307.08691).
 *
 *   grid   (tiles of 64 queries, the last ones first; heads; sequences)
 *   block  4 warps of 16 queries; the tile passes over 64 keys at a time (head_dim 256, 512: 32).
 *          head_dim 512: 8 warps, of which two have the same queries and scores, and half of the
 *          channels of the output each, because registers have no room for more
 *   smem   [ queries | 2 stages of keys | 2 stages of values ], rows padded by 16 bytes, so that
 *          ldmatrix has no bank conflicts
 *
 *   warp   S = Q K^T (m16n8k16) --> online softmax --> FP16 --> O += P V (m16n8k16)
 */
#ifndef QT_KERNELS_CUDA_DECODER_ATTENTION_TILE_CUH
#define QT_KERNELS_CUDA_DECODER_ATTENTION_TILE_CUH

#include "kernels/cuda/decoder/reduce.cuh"

enum { TILE_QUERIES = 64 };

extern __shared__ char attention_smem[];

struct tile_instance {
    size_t dim, smem;
    int threads;
    const void *kernel; /* NULL: none */
};

#define QT_TILE_INSTANCE(D, SLOPES)                                                                \
    {                                                                                              \
        D, tile_of<D>::SMEM, tile_of<D>::THREADS, (const void *)attention_tile_kernel<D, SLOPES>   \
    }

template <int D> struct tile_of {
    enum {
        KEYS = D > 128 ? 32 : 64, /* at a time */
        PITCH = (D + 8) * 2,      /* bytes of a row in shared memory */
        STAGE = KEYS * PITCH,
        SMEM = TILE_QUERIES * PITCH + 4 * STAGE,
        TILES = KEYS / 8, /* n tiles of S */
        STEPS = D / 16,
        SPLIT = D > 256 ? 2 : 1, /* warps with the same queries */
        THREADS = 128 * SPLIT,
        OWN = D / SPLIT /* channels of the output of a warp */
    };
};

struct tile_args {
    qtool_decoder_attention a;
    float scale_log2; /* factor of dot products, so that p = 2^(score - max) */
};

/* Starts the copy of rows [row0, row0 + rows) of x, D channels each, `pitch` elements apart; rows
 * from `end` on become zeros. */
template <int D>
static __device__ __forceinline__ void copy_rows(uint32_t to, const __half *x, size_t pitch,
                                                 int row0, int rows, int end)
{
    enum { CHUNKS = D / 8 };
    for (int i = (int)threadIdx.x; i < rows * CHUNKS; i += tile_of<D>::THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const bool in = row0 + row < end;
        ptx_copy_16_zero(to + row * tile_of<D>::PITCH + chunk * 16,
                         x + (in ? (size_t)(row0 + row) * pitch : 0) + chunk * 8, in ? 16 : 0);
    }
}

/* One row of scores: two entries (row g, row g + 8) per lane. */
struct softmax_state {
    float top[2], total[2];
};

/* SLOPES: scores have a term that grows with the position of the key. */
template <int D, bool SLOPES>
static __global__ void __launch_bounds__(tile_of<D>::THREADS) attention_tile_kernel(tile_args args)
{
    typedef tile_of<D> T;
    const qtool_decoder_attention &a = args.a;
    const int number = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4,
              t = lane % 4;
    const int warp = T::SPLIT > 1 ? number % 4 : number;
    const int own = T::SPLIT > 1 ? number / 4 * T::OWN : 0; /* first channel of the output */
    const int tile = (int)(gridDim.x - 1 - blockIdx.x), head = (int)blockIdx.y;
    const size_t sequence = blockIdx.z, kv = head / (a.heads / a.kv_heads);
    const int queries = (int)a.queries, first = tile * TILE_QUERIES;
    const uint32_t smem = ptx_shared(attention_smem), keys_at = smem + TILE_QUERIES * T::PITCH;
    const uint32_t values_at = keys_at + 2 * T::STAGE;
    ptx_launch_dependents();
    ptx_wait_previous();
    const int past = a.position[sequence * queries];
    const size_t base = sequence * a.sequence_stride + kv * a.head_stride;
    const __half *q = (const __half *)a.q + (sequence * queries * a.heads + head) * D;
    const __half *k = (const __half *)a.k + base, *v = (const __half *)a.v + base;
    /* Keys [begin, end) are visible to some query of the tile. */
    const int last = min(first + TILE_QUERIES, queries) - 1, window = (int)a.window;
    const int end = past + last + 1, low = past + first - window + 1;
    const int begin = window && low > 0 ? low / T::KEYS * T::KEYS : 0;

    copy_rows<D>(smem, q, a.heads * D, first, TILE_QUERIES, queries);
    copy_rows<D>(keys_at, k, D, begin, T::KEYS, end);
    copy_rows<D>(values_at, v, D, begin, T::KEYS, end);
    ptx_copy_commit();

    float out[T::OWN / 8][4] = {};
    softmax_state st = {{-INFINITY, -INFINITY}, {0, 0}};
    const int row0 = past + first + warp * 16 + g; /* position of the lane's first query */
    const uint32_t query_at = smem + (warp * 16 + lane % 16) * T::PITCH + lane / 16 * 16;
    const uint32_t key_own = (lane / 16 * 8 + lane % 8) * T::PITCH + lane / 8 % 2 * 16;
    const uint32_t value_own = (lane % 16) * T::PITCH + lane / 16 * 16 + own * 2;
    int stage = 0;
#pragma unroll 1
    for (int key0 = begin; key0 < end; key0 += T::KEYS, stage ^= 1) {
        ptx_copy_wait<0>();
        __syncthreads(); /* the stage has arrived, and the other one has been read */
        if (key0 + T::KEYS < end) {
            copy_rows<D>(keys_at + (stage ^ 1) * T::STAGE, k, D, key0 + T::KEYS, T::KEYS, end);
            copy_rows<D>(values_at + (stage ^ 1) * T::STAGE, v, D, key0 + T::KEYS, T::KEYS, end);
            ptx_copy_commit();
        }
        float s[T::TILES][4] = {};
#pragma unroll
        for (int step = 0; step < T::STEPS; step++) {
            uint32_t x[4];
            ptx_ldmatrix_x4(x, query_at + step * 32);
#pragma unroll
            for (int i = 0; i < T::TILES; i += 2) {
                uint32_t y[4];
                ptx_ldmatrix_x4(y, keys_at + stage * T::STAGE + i * 8 * T::PITCH + key_own +
                                       step * 32);
                ptx_mma_f16(s[i], x, y[0], y[1]);
                ptx_mma_f16(s[i + 1], x, y[2], y[3]);
            }
        }
        const bool masked = key0 + T::KEYS > past + first + warp * 16 + 1 ||
                            (window && key0 <= past + last - window);
        float most[2] = {st.top[0], st.top[1]};
#pragma unroll
        for (int i = 0; i < T::TILES; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int key = key0 + i * 8 + 2 * t + j % 2, row = row0 + j / 2 * 8;
                float x = s[i][j] * args.scale_log2;
                if (a.softcap > 0)
                    x = a.softcap * 1.4426950408889634f * tanhf(s[i][j] * a.scale / a.softcap);
                if constexpr (SLOPES)
                    x += 1.4426950408889634f * slope_term(a, a.slopes[head], key);
                if (masked && (key > row || (window && key <= row - window)))
                    x = -INFINITY;
                s[i][j] = x;
                most[j / 2] = fmaxf(most[j / 2], x);
            }
        float keep[2], base_of[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 1));
            most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 2));
            base_of[r] = most[r] == -INFINITY ? 0 : most[r];
            keep[r] = exp2f(st.top[r] - base_of[r]);
            st.top[r] = most[r];
            st.total[r] *= keep[r];
        }
#pragma unroll
        for (int i = 0; i < T::OWN / 8; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                out[i][j] *= keep[j / 2];
#pragma unroll
        for (int i = 0; i < T::TILES; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                s[i][j] = exp2f(s[i][j] - base_of[j / 2]);
                st.total[j / 2] += s[i][j];
            }
#pragma unroll
        for (int i = 0; i < T::TILES; i += 2) {
            uint32_t p[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const __half2 pair =
                    __floats2half2_rn(s[i + j / 2][j % 2 * 2], s[i + j / 2][j % 2 * 2 + 1]);
                p[j] = *(const uint32_t *)&pair;
            }
#pragma unroll
            for (int c = 0; c < T::OWN / 8; c += 2) {
                uint32_t y[4];
                ptx_ldmatrix_x4_transposed(y, values_at + stage * T::STAGE + i * 8 * T::PITCH +
                                                  value_own + c * 16);
                ptx_mma_f16(out[c], p, y[0], y[1]);
                ptx_mma_f16(out[c + 1], p, y[2], y[3]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int query = first + warp * 16 + g + r * 8;
        float total = st.total[r];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        if (a.sinks)
            total += exp2f(a.sinks[head] * 1.4426950408889634f - st.top[r]);
        if (query >= queries)
            continue;
        __half *to =
            (__half *)a.out + ((sequence * queries + query) * a.heads + head) * D + own + 2 * t;
        const float factor = 1 / total;
#pragma unroll
        for (int i = 0; i < T::OWN / 8; i++) {
            to[i * 8] = to_half(out[i][2 * r] * factor);
            to[i * 8 + 1] = to_half(out[i][2 * r + 1] * factor);
        }
    }
}

#endif
