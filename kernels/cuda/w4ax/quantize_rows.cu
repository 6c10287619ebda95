/*
 * Quantizes w4ax activations: norm, gather and rounding in one launch, for k up to 16384 that is a
 * multiple of 512, so that each thread has 16 channels. TOKENS = 1 or 2 tokens are processed
 * together. quantize.cu has the kernel for other k.
 *
 *   two rows --cp.async--> rows as stored --> words with one channel of both tokens --> codes
 *                                        +--> statistics of a norm
 *   one row  --cp.async--> row as stored --> codes
 *                                       +--> statistics of a norm
 *
 *   grid          two tokens: as many thread blocks as are resident; each loops over pairs of
 *                 tokens; one token: one thread block per token, or with BLOCK scales up to four
 *                 (y), each for every fourth warp's channels, while thread blocks are fewer than
 *                 half of the multiprocessors
 *   thread block  k / 16 threads; each half warp has two channel blocks, one after the other; a
 *                 lane has 8 channels of each, as in quantize.cu
 *   smem          rows as stored, FP16 or BF16 [tokens][k]. Two tokens: also two buffers of value
 *                 pairs [k][2], one written while the other is read.
 *
 * With many tokens the kernel is bound by the instruction rate, and by shared-memory bank conflicts
 * if channels are gathered. One read of a value pair, with one address and one set of channel
 * parameters, serves two tokens. With few tokens it is bound by latency, which is lower for one
 * token at a time. A thread has the same channels of all its tokens: it loads its part of the
 * permutation, and computes the addresses of its codes, only once.
 *
 * Traffic    each row read once, its codes and scales written once
 * Reference  as quantize.cu
 * Used by    qtool_w4ax_quantize
 */
#include "kernels/cuda/common/plan.h"
#include "kernels/cuda/w4ax/quantize_rows.cuh"

enum { TOKEN_SPLITS = 4 };

/* ---- the kernel ----------------------------------------------------------------------------- */

template <bool BF16, int NORM, int TOKENS, bool BY_TOKEN>
__global__ void __launch_bounds__(MAX_THREADS)
    qt_w4ax_quantize_rows_kernel(const __grid_constant__ quantize_args a)
{
    __shared__ warp_sums sums[TOKENS];
    __shared__ token_stats tops;
    const int step = TOKENS * (int)gridDim.x, lane = (int)threadIdx.x % 32;
    const int mine = (int)threadIdx.x / 32 * WARP_CHANNELS; /* the warp's first channel */
    const uint32_t rows = ptx_shared(quantize_smem), my_rows = rows + mine * 2;
    int token = TOKENS * (int)blockIdx.x, buffer = 0;
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
    for (; token < a.m; token += step, buffer ^= TOKENS - 1) {
        unsigned char *const pairs = quantize_smem + (buffer + 1) * a.k * 4;
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
            reduce_warp<NORM, TOKENS>(&sums[buffer], s);
        /* Other warps' values and statistics are complete, and those of the previous iteration have
         * been read. */
        if (NORM || BY_TOKEN || a.perm)
            __syncthreads();
        if (NORM)
            n = norm_of<NORM>(a, &sums[buffer]);
        const auto u = iteration_open<NORM, TOKENS>(n, values, token, min(TOKENS, a.m - token));
        if (BY_TOKEN)
            quantize_by_token<BF16, NORM, TOKENS>(a, u, rounds, &tops, token >= step ? step : 0);
        else if (TOKENS == 2 || threadIdx.x / 32 % gridDim.y == blockIdx.y)
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

/* ---- host ----------------------------------------------------------------------------------- */

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

/* Static shared memory of the kernel, and 1024 bytes that the system reserves per thread block. */
enum { OWN_BYTES = sizeof(warp_sums) * 2 + sizeof(token_stats) + 1024 };
static_assert(OWN_BYTES - 1024 <= QUANTIZE_OWN_BYTES, "launches assume this bound");

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
    int resident = MAX_THREADS / threads; /* thread blocks per SM with 64 registers per thread */
    if ((size_t)resident * (pair_bytes + OWN_BYTES) > (size_t)smem_limit)
        resident = (int)((size_t)smem_limit / (pair_bytes + OWN_BYTES));
    /* One token at a time if that fills at most half of the device, or if pairs do not fit in
     * shared memory. */
    const bool latency_bound = (long long)a->m * threads <= (long long)sms * (MAX_THREADS / 2);
    const int tokens = latency_bound || resident < 1 ? 1 : 2, units = (a->m + tokens - 1) / tokens;
    const size_t smem = tokens == 1 ? (size_t)a->k * 2 : pair_bytes;
    const bool by_token = a->scales != QTOOL_W4AX_BLOCK;
    const void *kernel =
        bf16 ? kernel_for<true>(norm, tokens, by_token) : kernel_for<false>(norm, tokens, by_token);
    const int blocks = tokens == 1 || units < resident * sms ? units : resident * sms;
    int splits = 1;
    while (tokens == 1 && !by_token && splits < TOKEN_SPLITS && 2 * splits * blocks <= sms)
        splits *= 2;
    *status = qt_w4ax_launch_quantize(kernel, dim3((unsigned)blocks, (unsigned)splits), threads,
                                      smem, a, cc, stream);
    return true;
}
