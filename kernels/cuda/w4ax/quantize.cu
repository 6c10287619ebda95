/*
 * Quantizes w4ax activations: norm, gather and rounding in one launch, for any k. The faster kernel
 * of quantize_rows.cu is used for the rows that it supports.
 *
 *   grid          one thread block per token, of 256 threads, or up to 512 if there are few tokens
 *   warp          half a warp per channel block (128 channels), 8 channels per lane: lane i has
 *                 channels 32 (i / 4) + 4 (i % 4) + 0..3 and the same + 16, which is one word of
 *                 packed codes or two words of bytes
 *   smem          [ the token's row as stored, FP16 or BF16 [k] | absmax or scale of its channel
 *                 blocks ]. With BLOCK scales and neither permutation nor layer norm (template
 *                 parameter DIRECT) each value is read once and in order, so the row is not copied
 *
 * The rotation of a channel block has seven stages of butterflies: three between the registers of a
 * lane, four between lanes.
 *
 * The factor of an RMS norm scales all values of a token alike, so it does not change the codes and
 * goes into the scales. The sum of squares is accumulated while codes are made, and the scales are
 * stored last.
 *
 * Traffic    each row read once, its codes and scales written once
 * Reference  the same arithmetic in plain C (tests/gpu/test_w4ax.c): codes bit for bit without a
 *            norm; with a norm, where the order of a sum changes a last bit, codes may differ by 1
 * Used by    qtool_w4ax_quantize
 */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/common/plan.h"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/w4ax/quantize.cuh"

enum { MAX_K = 65536 };

/* ---- row to shared memory, norm ------------------------------------------------------------- */

static __device__ __forceinline__ float warp_sum(float v)
{
#pragma unroll
    for (int d = 16; d; d /= 2)
        v += __shfl_xor_sync(~0u, v, d);
    return v;
}

static __device__ __forceinline__ float block_sum(float v, float *scratch)
{
    const int lane = (int)threadIdx.x % 32, warps = (int)blockDim.x / 32;
    v = warp_sum(v);
    __syncthreads();
    if (lane == 0)
        scratch[threadIdx.x / 32] = v;
    __syncthreads();
    return warp_sum(lane < warps ? scratch[lane] : 0);
}

/*
 * Copies the token's row to shared memory. Returns its layer norm; RMS norm: the factor is computed
 * later. The variance is the mean of squared differences in a second pass over shared memory:
 * E[x^2] - E[x]^2 suffers from cancellation.
 */
template <bool BF16, int NORM>
static __device__ __forceinline__ row_norm load_row(const quantize_args &a, float *scratch)
{
    const uint4 *src = (const uint4 *)(a.x + (size_t)blockIdx.x * a.k);
    uint4 *row = (uint4 *)quantize_smem;
    row_norm n = {0, 1};
    float sum = 0;
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < a.k / 8; i += (int)blockDim.x) {
        uint4 v = __ldcg(src + i); /* in L2 if the previous kernel has just written it */
        float f[8];
        row[i] = v;
        to_floats<BF16>(f, (const uint32_t *)&v, 8);
#pragma unroll
        for (int j = 0; j < 8 && NORM == QTOOL_W4AX_LAYER_NORM; j++)
            sum += f[j];
    }
    if (NORM == QTOOL_W4AX_LAYER_NORM) {
        const float mean = block_sum(sum, scratch) * a.per_k;
        sum = 0;
#pragma unroll 2
        for (int i = (int)threadIdx.x; i < a.k / 8; i += (int)blockDim.x) {
            uint4 v = row[i];
            float f[8];
            to_floats<BF16>(f, (const uint32_t *)&v, 8);
#pragma unroll
            for (int j = 0; j < 8; j++)
                sum += (f[j] - mean) * (f[j] - mean);
        }
        n = norm_from(a, mean, block_sum(sum, scratch));
    } else {
        __syncthreads();
    }
    return n;
}

/* ---- values and codes of a lane ------------------------------------------------------------- */

struct lane_values {
    float v[8];
    float absmax;  /* of the channel block */
    float squares; /* RMS norm: the lane's sum of x^2 */
};

/* Loads the values of four adjacent positions and normalizes them, without the factor of an RMS
 * norm. DIRECT: from global memory. */
template <bool BF16, int NORM, bool DIRECT>
static __device__ __forceinline__ void load_four(float *v, float *squares, const quantize_args &a,
                                                 const row_norm &n, int at)
{
    const uint16_t *row = (const uint16_t *)quantize_smem;
    uint32_t e[2];
    if (at >= a.k) {
        v[0] = v[1] = v[2] = v[3] = 0;
        return;
    }
    if (DIRECT) {
        *(uint2 *)e = __ldcg((const uint2 *)(a.x + (size_t)blockIdx.x * a.k + at));
    } else if (a.perm) {
        uint4 p = __ldg((const uint4 *)(a.perm + at));
        e[0] = row[p.x] | (uint32_t)row[p.y] << 16;
        e[1] = row[p.z] | (uint32_t)row[p.w] << 16;
    } else {
        *(uint2 *)e = *(const uint2 *)(row + at);
    }
    to_floats<BF16>(v, e, 4);
#pragma unroll
    for (int j = 0; j < 4 && NORM == QTOOL_W4AX_RMS_NORM; j++)
        *squares += v[j] * v[j];
    if (NORM)
        normalize<BF16, NORM>(v, n, load_norm<NORM>(a, at));
}

/* Returns the largest magnitude of a channel block, which half a warp has with 8 values per
 * lane. */
static __device__ __forceinline__ float absmax_of_block(const float v[8])
{
    float top = 0;
#pragma unroll
    for (int j = 0; j < 8; j++)
        top = fmaxf(top, fabsf(v[j]));
#pragma unroll
    for (int d = 1; d < 16; d *= 2)
        top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    return top;
}

template <bool BF16, int NORM, bool DIRECT>
static __device__ __forceinline__ lane_values load_block(const quantize_args &a, const row_norm &n,
                                                         int block)
{
    const int at = block * COLS + first_channel();
    lane_values l;
    l.squares = 0;
    load_four<BF16, NORM, DIRECT>(l.v, &l.squares, a, n, at);
    load_four<BF16, NORM, DIRECT>(l.v + 4, &l.squares, a, n, at + 16);
    if (a.rotate && a.k % COLS == 0)
        rotate_block<true>(l.v, COLS);
    else if (a.rotate)
        rotate_block<false>(l.v, min(a.k - block * COLS, (int)COLS));
    l.absmax = absmax_of_block(l.v);
    return l;
}

/* ---- the kernel ----------------------------------------------------------------------------- */

/* Loop over the channel blocks of a token, two per warp and iteration. If their number is odd, both
 * halves of a warp compute the last one and only the first half stores it. */
struct block_loop {
    int pair, block;
    bool stores; /* this half warp stores the channel block */
};

static __device__ __forceinline__ block_loop loop_open()
{
    return {(int)threadIdx.x / 32 * 2, 0, false};
}

static __device__ __forceinline__ bool loop_next(block_loop *l, const quantize_args &a)
{
    if (l->pair >= a.blocks_n)
        return false;
    l->block = l->pair + (int)threadIdx.x / 16 % 2;
    l->stores = l->block < a.blocks_n;
    l->block = min(l->block, a.blocks_n - 1);
    l->pair += (int)blockDim.x / 16;
    return true;
}

/* Stores a lane's codes to a row, swizzled as qtool_w4ax.h says. */
static __device__ __forceinline__ void store_codes(unsigned char *row, int token, uint32_t word,
                                                   uint2 code)
{
    const int i = (int)threadIdx.x % 16;
    if (word & QTOOL_W4AX_WIDE_ROWS) {
        const int at = (i / 4 * 2 ^ (token & 7)) * 16 + i % 4 * 4;
        *(uint32_t *)(row + at) = code.x;
        *(uint32_t *)(row + (at ^ 16)) = code.y;
    } else {
        *(uint32_t *)(row + (i / 4 ^ (token >> 1 & 3)) * 16 + i % 4 * 4) = pack_nibbles(code);
    }
}

/* Stores a lane's codes of the thread block's token. */
static __device__ __forceinline__ void store_token_codes(const quantize_args &a, uint32_t word,
                                                         uint2 code)
{
    const int token = (int)blockIdx.x;
    store_codes(codes_of(a, word) + (size_t)token * row_bytes(word), token, word, code);
}

/* BLOCK scales: one scale per channel block. */
template <bool BF16, int NORM, bool DIRECT>
static __device__ __forceinline__ void quantize_by_block(const quantize_args &a, const row_norm &n,
                                                         float *scratch)
{
    float *scales = (float *)(quantize_smem + a.scales_at), squares = 0;
    float *out = a.scale + blockIdx.x;
    block_loop at = loop_open();
#pragma unroll 4
    while (loop_next(&at, a)) {
        lane_values l = load_block<BF16, NORM, DIRECT>(a, n, at.block);
        uint32_t word = __ldg(a.blocks + at.block);
        const float scale = __fmul_rn(l.absmax, is_narrow(word) ? a.per7 : a.per127);
        const float inverse = inverse_of(scale);
        const uint2 code =
            code_bytes(round_codes(l.v, inverse, is_narrow(word) ? 7 : 127, a.clamp));
        if (at.stores) {
            squares += l.squares;
            store_token_codes(a, word, code);
            if (NORM == QTOOL_W4AX_RMS_NORM && threadIdx.x % 16 == 0)
                scales[at.block] = inverse == 0 ? 0 : scale;
            else if (threadIdx.x % 16 == 0)
                out[(size_t)at.block * a.scale_pitch] = inverse == 0 ? 1 : scale;
        }
    }
    if (NORM == QTOOL_W4AX_RMS_NORM) {
        const float factor = norm_factor(a, block_sum(squares, scratch));
        for (int i = (int)threadIdx.x; i < a.blocks_n; i += (int)blockDim.x)
            out[(size_t)i * a.scale_pitch] = scales[i] == 0 ? 1 : scales[i] * factor;
    }
}

/* INT and ROW scales: one scale per token. A first pass finds the maximum, a second makes codes. */
template <bool BF16, int NORM>
static __device__ __forceinline__ void quantize_by_token(const quantize_args &a, const row_norm &n,
                                                         float *scratch)
{
    float *absmax = (float *)(quantize_smem + a.scales_at), all = 0, squares = 0;
    for (block_loop at = loop_open(); loop_next(&at, a);) {
        lane_values l = load_block<BF16, NORM, false>(a, n, at.block);
        squares += at.stores ? l.squares : 0;
        if (threadIdx.x % 16 == 0)
            absmax[at.block] = l.absmax;
    }
    __syncthreads();
    for (int i = (int)threadIdx.x % 32; i < a.blocks_n; i += 32)
        all = fmaxf(all, absmax[i]);
#pragma unroll
    for (int d = 1; d < 32; d *= 2)
        all = fmaxf(all, __shfl_xor_sync(~0u, all, d));
    const float scale = __fmul_rn(all, a.per127);
    int sum = 0;
    for (block_loop at = loop_open(); loop_next(&at, a);) {
        lane_values l = load_block<BF16, NORM, false>(a, n, at.block);
        uint32_t word = __ldg(a.blocks + at.block);
        const bool narrow = a.scales == QTOOL_W4AX_INT && is_narrow(word);
        const float factor = narrow ? int_factor(a, l.absmax, scale) : 1;
        const rounded_codes r =
            round_codes(l.v, inverse_of(__fmul_rn(scale, factor)), narrow ? 7 : 127, a.clamp);
        const uint2 code = scaled_code_bytes(r, narrow, factor);
        if (at.stores) {
            store_token_codes(a, word, code);
            sum = __dp4a((int)code.x, 0x01010101, __dp4a((int)code.y, 0x01010101, sum));
        }
    }
    ptx_launch_dependents();
    const float factor =
        NORM == QTOOL_W4AX_RMS_NORM ? norm_factor(a, block_sum(squares, scratch)) : 1;
    /* Partial sums are integers below 2^24, which FP32 adds exactly. */
    float total = block_sum((float)sum, scratch);
    if (threadIdx.x == 0) {
        a.scale[blockIdx.x] = token_scale(scale, factor);
        if (a.sum)
            a.sum[blockIdx.x] = (int)total;
    }
}

/* With rows in shared memory the kernel is bound by latency: 4096 x 8192, RMS norm and gather took
 * 62 us with 1536 threads per multiprocessor and 57 us with 2048 (before quantize_rows.cu took this
 * shape). Hence the launch bounds. */
template <bool BF16, int NORM, bool DIRECT>
__global__ void __launch_bounds__(512, DIRECT ? 0 : 4)
    qt_w4ax_quantize_kernel(const __grid_constant__ quantize_args a)
{
    __shared__ float scratch[32];
    row_norm n = {};
    if (a.dependent)
        ptx_wait_previous();
    if (!DIRECT)
        n = load_row<BF16, NORM>(a, scratch);
    /* The dependent launch comes after the row is loaded (or after the second pass): the next
     * kernel's weights would delay these loads. */
    if (DIRECT || a.scales == QTOOL_W4AX_BLOCK) {
        ptx_launch_dependents();
        quantize_by_block<BF16, NORM, DIRECT>(a, n, scratch);
    } else {
        quantize_by_token<BF16, NORM>(a, n, scratch);
    }
}

/* ---- host ----------------------------------------------------------------------------------- */

size_t qtool_w4ax_blocks(uint32_t *words, const uint8_t *bits, size_t count, int packed)
{
    uint32_t at = 0;
    for (size_t i = 0; i < count; i++) {
        if (bits[i] != 4 && bits[i] != 8)
            return 0;
        bool wide = bits[i] == 8 || !packed;
        words[i] = at << 1 | wide | (wide && bits[i] == 4 ? QTOOL_W4AX_NARROW_VALUES : 0);
        at += wide ? 2 : 1;
    }
    return (size_t)at * 64;
}

static bool aligned(const void *p, size_t to)
{
    return ((size_t)p & (to - 1)) == 0;
}

template <bool BF16> static const void *kernel_of(int norm, bool direct)
{
    return direct && norm == QTOOL_W4AX_RMS_NORM
               ? (const void *)qt_w4ax_quantize_kernel<BF16, QTOOL_W4AX_RMS_NORM, true>
           : direct ? (const void *)qt_w4ax_quantize_kernel<BF16, QTOOL_W4AX_NO_NORM, true>
           : norm == QTOOL_W4AX_RMS_NORM
               ? (const void *)qt_w4ax_quantize_kernel<BF16, QTOOL_W4AX_RMS_NORM, false>
           : norm == QTOOL_W4AX_LAYER_NORM
               ? (const void *)qt_w4ax_quantize_kernel<BF16, QTOOL_W4AX_LAYER_NORM, false>
               : (const void *)qt_w4ax_quantize_kernel<BF16, QTOOL_W4AX_NO_NORM, false>;
}

static int cc_of_current_device(void)
{
    int ordinal = 0;
    char reason[160];
    struct qt_device d = {};
    if (cudaGetDevice(&ordinal) == cudaSuccess)
        qt_query_device(&d, ordinal, reason);
    return d.cc;
}

/* Returns the number of threads per token. A thread has at least 8 channels. */
static unsigned threads_of(size_t k, size_t m)
{
    size_t limit = (k / 8 + 31) / 32 * 32;
    return (unsigned)(m > 256 ? 256 : limit > 512 ? 512 : limit);
}

int qt_w4ax_launch_quantize(const void *kernel, dim3 grid, int threads, size_t smem,
                            const quantize_args *a, int cc, void *stream)
{
    const size_t usual = 48 << 10; /* shared memory of any kernel without qt_allow_smem */
    char reason[160];
    struct qt_kernel_launch launch = {};
    launch.kernel = kernel;
    launch.grid = grid;
    launch.threads = threads;
    launch.smem = smem;
    launch.dependent = a->dependent && cc == 90;
    int rc = smem + QUANTIZE_OWN_BYTES <= usual ? QTOOL_OK : qt_allow_smem(kernel, smem, reason);
    return rc == QTOOL_OK ? qt_launch_kernel(&launch, (void *)a, stream) : rc;
}

int qt_w4ax_quantize_args(quantize_args *out, const struct qtool_w4ax_acts *acts,
                          const struct qtool_w4ax_input *in, size_t m)
{
    quantize_args a = {};
    if (in->k == 0 || in->k % 8 || in->k > MAX_K || m > 1u << 24 || !aligned(acts->codes, 128) ||
        !aligned(acts->scale, 16) || !aligned(in->perm, 16) || !in->blocks ||
        (unsigned)in->scales > QTOOL_W4AX_ROW || (unsigned)in->rotation > QTOOL_W4AX_HADAMARD ||
        !(in->clip4 > 0 && in->clip8 > 0) || (in->packed && in->scales != QTOOL_W4AX_BLOCK) ||
        (in->scales == QTOOL_W4AX_INT && !acts->sum) || (m && (!acts->codes || !acts->scale)))
        return QTOOL_UNSUPPORTED;
    a.perm = in->perm;
    a.blocks = in->blocks;
    a.codes = (unsigned char *)acts->codes;
    a.scale = acts->scale;
    a.sum = in->scales == QTOOL_W4AX_INT ? acts->sum : NULL;
    a.m = (int)m;
    a.k = (int)in->k;
    a.per_k = 1 / (float)in->k;
    a.blocks_n = (a.k + COLS - 1) / COLS;
    a.scale_pitch = in->scales == QTOOL_W4AX_BLOCK ? (int)((m + 3) / 4 * 4) : 0;
    a.scales = in->scales;
    a.per7 = in->clip4 / 7;
    a.per127 = in->clip8 / 127;
    a.clip4 = in->clip4;
    a.clamp = !(in->clip4 >= 1 && in->clip8 >= 1);
    a.rotate = in->rotation == QTOOL_W4AX_HADAMARD;
    a.dependent = in->dependent_launch;
    *out = a;
    return QTOOL_OK;
}

int qtool_w4ax_quantize(const struct qtool_w4ax_acts *out, const struct qtool_w4ax_input *in,
                        const struct qtool_w4ax_norm *norm, const void *x, size_t m,
                        enum qtool_dtype dtype, void *stream)
{
    quantize_args a;
    if (qt_w4ax_quantize_args(&a, out, in, m) != QTOOL_OK || !aligned(x, 16) || (m && !x) ||
        (unsigned)dtype > QTOOL_BF16 || (norm && (unsigned)norm->kind > QTOOL_W4AX_LAYER_NORM))
        return QTOOL_UNSUPPORTED;
    if (norm && norm->kind != QTOOL_W4AX_NO_NORM) {
        if (!norm->weight || !aligned(norm->weight, 8) || !aligned(norm->bias, 8))
            return QTOOL_UNSUPPORTED;
        a.weight = (const uint16_t *)norm->weight;
        a.bias = (const uint16_t *)norm->bias;
        a.eps = norm->eps;
    }
    if (m == 0)
        return QTOOL_OK;
    a.x = (const uint16_t *)x;
    const int kind = norm ? (int)norm->kind : QTOOL_W4AX_NO_NORM;
    const bool direct =
        kind != QTOOL_W4AX_LAYER_NORM && !in->perm && in->scales == QTOOL_W4AX_BLOCK;
    a.scales_at = direct ? 0 : a.k * 2;
    size_t smem = (size_t)a.scales_at + (size_t)a.blocks_n * 4;
    int status = QTOOL_OK;
    const int cc = a.dependent ? cc_of_current_device() : 0;
    if (qt_w4ax_quantize_rows(&status, &a, kind, dtype == QTOOL_BF16, cc, stream))
        return status;
    const void *kernel =
        dtype == QTOOL_BF16 ? kernel_of<true>(kind, direct) : kernel_of<false>(kind, direct);
    return qt_w4ax_launch_quantize(kernel, dim3((unsigned)m), (int)threads_of(in->k, m), smem, &a,
                                   cc, stream);
}
