/*
 * Causal attention with FP16 factors and FP32 sums (gpu_attend). A thread block has ROWS queries of
 * a head and goes through the keys that they attend to, KEYS at a time:
 *
 *   warp    queries 32 w ..     scores S = Q K^T in registers, FP32
 *   Q       [ROWS][DIM]         probabilities P = 2^(S - largest so far), in FP16 the left factor
 *   K, V    [2][KEYS][DIM]      of P V; sums and outputs of a row shrink when its largest grows
 *
 * While a warp computes with one buffer of K and V, the other one is filled. Rows of shared memory
 * are DIM values; 16 bytes c of row r are at place c ^ (r % 8), so that eight rows of a matrix that
 * ldmatrix reads are in different banks.
 */
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/gpu/half.cuh"

#include <cuda_runtime.h>

enum { ATTEND_WARPS = 4, WARP_ROWS = 32, ROWS = ATTEND_WARPS * WARP_ROWS, KEYS = 64, CHUNK = 8 };

/* Address of 16 bytes of a row. */
template <int DIM>
static __device__ __forceinline__ uint32_t chunk_at(uint32_t base, int row, int c)
{
    return base + (uint32_t)(row * DIM * 2 + (c ^ row % 8) * 16);
}

/* Starts copies of rows [first, first + ROWS_OF) of a head; those from `end` on become zeros. */
template <int DIM, int ROWS_OF>
static __device__ __forceinline__ void copy_rows(uint32_t to, const __half *from, size_t ld,
                                                 int first, int end)
{
#pragma unroll
    for (int i = threadIdx.x; i < ROWS_OF * DIM / CHUNK; i += ATTEND_WARPS * 32) {
        const int row = i / (DIM / CHUNK), c = i % (DIM / CHUNK);
        const bool in = first + row < end;
        ptx_copy_16_zero(chunk_at<DIM>(to, row, c),
                         from + (in ? (size_t)(first + row) * ld : 0) + c * CHUNK, in ? 16 : 0);
    }
}

static __device__ __forceinline__ uint32_t pack_halves(float low, float high)
{
    const __half2 v = __floats2half2_rn(low, high);
    return *(const uint32_t *)&v;
}

/* The largest, or the sum, of four lanes, which have the same rows. */
static __device__ __forceinline__ float most_of_four(float v)
{
    v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
    return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}

static __device__ __forceinline__ float sum_of_four(float v)
{
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
}

/* The scores of 32 queries, from row `row` of the shared Q on, and KEYS keys. */
template <int DIM>
static __device__ __forceinline__ void find_scores(float s[2][KEYS / 8][4], uint32_t q, uint32_t k,
                                                   int row)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < 2; t++)
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
            s[t][n][0] = s[t][n][1] = s[t][n][2] = s[t][n][3] = 0;
#pragma unroll
    for (int d = 0; d < DIM / 16; d++) {
        uint32_t a[2][4];
#pragma unroll
        for (int t = 0; t < 2; t++)
            ptx_ldmatrix_x4(a[t], chunk_at<DIM>(q, row + 16 * t + lane % 16, 2 * d + lane / 16));
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            uint32_t b[4];
            ptx_ldmatrix_x4(
                b, chunk_at<DIM>(k, 16 * n + lane / 16 * 8 + lane % 8, 2 * d + lane / 8 % 2));
#pragma unroll
            for (int t = 0; t < 2; t++) {
                ptx_mma_f16(s[t][2 * n], a[t], b[0], b[1]);
                ptx_mma_f16(s[t][2 * n + 1], a[t], b[2], b[3]);
            }
        }
    }
}

/* o += P V, where p has the probabilities in the places of scores. */
template <int DIM>
static __device__ __forceinline__ void add_values(float o[2][DIM / 8][4],
                                                  const float p[2][KEYS / 8][4], uint32_t v)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < KEYS / 16; j++) {
        uint32_t a[2][4];
#pragma unroll
        for (int t = 0; t < 2; t++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *from = &p[t][2 * j + i / 2][i % 2 * 2];
                a[t][i] = pack_halves(from[0], from[1]);
            }
#pragma unroll
        for (int d = 0; d < DIM / 16; d++) {
            uint32_t b[4];
            ptx_ldmatrix_x4_transposed(b, chunk_at<DIM>(v, 16 * j + lane % 16, 2 * d + lane / 16));
#pragma unroll
            for (int t = 0; t < 2; t++) {
                ptx_mma_f16(o[t][2 * d], a[t], b[0], b[1]);
                ptx_mma_f16(o[t][2 * d + 1], a[t], b[2], b[3]);
            }
        }
    }
}

/* The rows of a lane: 8 i behind the first for i < 4, in two tiles of two rows each. */
struct row_sums {
    float top[4], sum[4]; /* the largest score so far; the lane's part of the sum */
};

/* Replaces scores by probabilities, and shrinks o. query: that of the lane's first row, key: that
 * of its first column. by: factor of the scores, which makes them binary logarithms. */
template <int DIM>
static __device__ __forceinline__ void
find_probabilities(float s[2][KEYS / 8][4], row_sums &r, float o[2][DIM / 8][4], int query, int key,
                   const gpu_attention &a, float by, bool masked)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int at = query + 8 * i;
        float top = r.top[i];
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float &x = s[i / 2][n][i % 2 * 2 + c];
                const int j = key + 8 * n + c;
                x *= by;
                if (masked && (j > at || (a.window && j + (int)a.window <= at)))
                    x = -INFINITY;
                top = fmaxf(top, x);
            }
        top = most_of_four(top);
        const float base = top == -INFINITY ? 0 : top, shrink = exp2f(r.top[i] - base);
        float sum = 0;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float &x = s[i / 2][n][i % 2 * 2 + c];
                x = exp2f(x - base);
                sum += x;
            }
        r.sum[i] = r.sum[i] * shrink + sum;
        r.top[i] = top;
#pragma unroll
        for (int d = 0; d < DIM / 8; d++) {
            o[i / 2][d][i % 2 * 2] *= shrink;
            o[i / 2][d][i % 2 * 2 + 1] *= shrink;
        }
    }
}

template <int DIM>
static __global__ void __launch_bounds__(ATTEND_WARPS * 32, 2) attend_kernel(const gpu_attention a)
{
    extern __shared__ __align__(128) unsigned char attend_memory[];
    const uint32_t q = ptx_shared(attend_memory), k = q + ROWS * DIM * 2;
    const uint32_t v = k + 2 * KEYS * DIM * 2;
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * WARP_ROWS;
    const int seqlen = (int)a.seqlen, q0 = (int)(gridDim.x - 1 - blockIdx.x) * ROWS;
    const size_t head = blockIdx.y % a.heads, sequence = blockIdx.y / a.heads;
    const size_t wide = a.heads * DIM, narrow = a.kv_heads * DIM;
    const size_t query = sequence * a.seqlen * wide + head * DIM;
    const size_t key = sequence * a.seqlen * narrow + head / (a.heads / a.kv_heads) * DIM;
    const int lo = a.window && q0 >= (int)a.window ? q0 - (int)a.window + 1 : 0;
    const int first = lo / KEYS, end = (min(q0 + ROWS, seqlen) + KEYS - 1) / KEYS;
    const float by =
        a.scale * 1.4426950408889634f / half_scale(*a.largest_q) / half_scale(*a.largest_k);
    float o[2][DIM / 8][4];
    row_sums r = {{-INFINITY, -INFINITY, -INFINITY, -INFINITY}, {0, 0, 0, 0}};
#pragma unroll
    for (int t = 0; t < 2; t++)
#pragma unroll
        for (int d = 0; d < DIM / 8; d++)
            o[t][d][0] = o[t][d][1] = o[t][d][2] = o[t][d][3] = 0;
    const auto fill = [&](int tile) {
        const uint32_t buffer = (uint32_t)(tile % 2 * KEYS * DIM * 2);
        copy_rows<DIM, KEYS>(k + buffer, (const __half *)a.k + key, narrow, tile * KEYS, seqlen);
        copy_rows<DIM, KEYS>(v + buffer, (const __half *)a.v + key, narrow, tile * KEYS, seqlen);
    };
    copy_rows<DIM, ROWS>(q, (const __half *)a.q + query, wide, q0, seqlen);
    fill(first);
    ptx_copy_commit();
    for (int tile = first; tile < end; tile++) {
        if (tile + 1 < end)
            fill(tile + 1);
        ptx_copy_commit();
        ptx_copy_wait<1>();
        __syncthreads();
        const int k0 = tile * KEYS, top_row = q0 + row + WARP_ROWS - 1;
        const uint32_t buffer = (uint32_t)(tile % 2 * KEYS * DIM * 2);
        if (k0 <= top_row) { /* else all keys are behind all queries of the warp */
            const bool masked =
                k0 + KEYS > q0 + row + 1 || (a.window && k0 + (int)a.window <= top_row);
            float s[2][KEYS / 8][4];
            find_scores<DIM>(s, q, k + buffer, row);
            find_probabilities<DIM>(s, r, o, q0 + row + lane / 4, k0 + lane % 4 * 2, a, by, masked);
            add_values<DIM>(o, s, v + buffer);
        }
        __syncthreads(); /* the buffer may be filled again */
    }
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int at = q0 + row + lane / 4 + 8 * i;
        const float factor = 1 / (sum_of_four(r.sum[i]) * half_scale(*a.largest_v));
        float *y = a.y + query + (size_t)at * wide + lane % 4 * 2;
#pragma unroll
        for (int d = 0; d < DIM / 8 && at < seqlen; d++) {
            const float2 out =
                make_float2(o[i / 2][d][i % 2 * 2] * factor, o[i / 2][d][i % 2 * 2 + 1] * factor);
            *(float2 *)(y + 8 * d) = out;
            most = larger(larger(most, out.x), out.y);
        }
    }
    note_largest(a.largest, most);
}

template <int DIM> static int attend(const struct gpu_attention *a, void *stream)
{
    const int bytes = (ROWS + 4 * KEYS) * DIM * 2;
    const dim3 grid((unsigned)((a->seqlen + ROWS - 1) / ROWS), (unsigned)(a->sequences * a->heads));
    const cudaError_t e = cudaFuncSetAttribute(attend_kernel<DIM>,
                                               cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (e != cudaSuccess)
        return e;
    attend_kernel<DIM><<<grid, ATTEND_WARPS * 32, bytes, (cudaStream_t)stream>>>(*a);
    return cudaGetLastError();
}

int gpu_attend(const struct gpu_attention *a, void *stream)
{
    return a->dim == 64 ? attend<64>(a, stream) : attend<128>(a, stream);
}
