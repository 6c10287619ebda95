/*
 * The stream kernel: Y = X W^T for few tokens (m <= 32), one pass over the packed weights. For
 * compute capability 8.x and 12.x, and on 9.0 for 4-bit integers with zero-points that the skinny
 * kernel cannot load (groups of 256 or more, or not aligned for TMA).
 *
 *   grid       (row groups, split-K): a thread block computes strips_cta strips of 16 rows over
 *              1 / splits of k
 *   block      `warps` = WN x WK warps: WK along k, WN along rows. A pass is WN * STRIPS strips; a
 *              warp multiplies STRIPS strips of it over its slice of k
 *   smem       [ look-up table | X: m rows of the thread block's k | row scales | partial sums |
 *              stages of each warp ]
 *
 *   mainloop:  global memory -- cp.async --> DEPTH stages of two fragment blocks of STRIPS strips
 *              --> registers --> A fragments --> mma.sync
 *
 * Each warp has a pipeline of its own, without barriers between warps. After a pass, the WK partial
 * sums of an output are added in shared memory in a fixed order. With split-K, thread blocks store
 * their sums in the workspace, and the last to arrive adds them in order, so results do not depend
 * on timing.
 *
 * Template parameters: Format, the code format; MT token tiles of 8 (m <= 8 MT); STRIPS; DEPTH.
 *
 * Requires   16-byte aligned sections (zero-points: 8); up to 227 KB of shared memory
 * Traffic    packed bytes once; X once per row group; Y once; with split-K: 8 * splits * n * m
 *            bytes of partial sums through L2
 * Reference  qt_packed_decode and an FP64 product; relative error <= 2.3e-4 with FP16 output
 */
#ifndef QT_KERNELS_CUDA_MATMUL_STREAM_CUH
#define QT_KERNELS_CUDA_MATMUL_STREAM_CUH

#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/common/split_k.cuh"
#include "kernels/cuda/common/token_scale.cuh"
#include "kernels/cuda/matmul/stream.h"
#include "kernels/cuda/matmul/warp_mma.cuh"

/* ---- work distribution ----------------------------------------------------------------------- */

struct stream_warp {
    int lane, warp, wk, wn;
    int first_strip, last_strip; /* of the thread block; loads are clamped to last_strip */
    int block0, block1;          /* the warp's slice of k */
    int pass_strips;             /* strips of a pass, over all warps */
    int cta_block0, cta_block1;  /* the thread block's part of k */
    uint32_t ring;               /* shared address of the warp's stages */
    /* Two lanes copy the 32 bytes of scales of a group: the lane's strip and group. */
    int scale_strip, scale_group;
};

template <int STRIPS>
static __device__ __forceinline__ stream_warp stream_warp_open(const qt_stream_args &a)
{
    stream_warp w;
    w.lane = (int)threadIdx.x % 32;
    w.warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0); /* makes it uniform for the compiler */
    w.wk = w.warp & (a.warps_k - 1);
    w.wn = w.warp >> (31 - __clz(a.warps_k));
    w.first_strip = (int)blockIdx.x * a.strips_cta;
    w.last_strip = min(w.first_strip + a.strips_cta, a.strips) - 1;
    w.cta_block0 = (int)blockIdx.y * a.split_blocks;
    w.cta_block1 = min(w.cta_block0 + a.split_blocks, a.blocks);
    w.block0 = min(w.cta_block0 + w.wk * a.slice_blocks, w.cta_block1);
    w.block1 = min(w.block0 + a.slice_blocks, w.cta_block1);
    w.ring = ptx_shared(qt_smem) + a.ring_at + w.warp * a.ring_bytes;
    w.scale_strip = w.lane / 2 >> a.slot_groups / 2; /* slot_groups is 1, 2 or 4 */
    w.scale_group = w.lane / 2 & (a.slot_groups - 1);
    w.pass_strips = ((int)blockDim.x / 32 >> (31 - __clz(a.warps_k))) * STRIPS;
    return w;
}

/* ---- weights to shared memory -------------------------------------------------------------------
 *
 * A warp copies its weights, two fragment blocks at a time, to its own stages in the order in which
 * it uses them: its slice of k for pass 0, 1, ... One cp.async group per stage.
 *
 *   stage  STRIPS x [ plane0 2 blocks x 32 lanes x w words | plane1 | plane2 ]
 *          STRIPS x [ scales of up to 4 groups x 8 words (rows g, g + 8) ]
 *          STRIPS x [ zero-points of up to 4 groups ]
 *
 * Loads into registers would avoid the write to shared memory, but do not form a deep pipeline: a
 * warp has six scoreboards, so waiting for one load also waits for later ones.
 */
template <int STRIPS> struct stream_cursor {
    int pass, block;     /* next to copy; pass = passes: none */
    uint32_t stage;      /* destination: byte offset of a stage */
    unsigned at[STRIPS]; /* strip * pitch_blocks + block */
    unsigned scale_at;   /* strip * pitch_groups of the strip whose scales the lane copies */
};

/* Moves the cursor to the start of the slice in pass c->pass. */
template <int STRIPS>
static __device__ __forceinline__ void
stream_cursor_pass(const qt_stream_args &a, const stream_warp &w, stream_cursor<STRIPS> *c)
{
    int strip0 = w.first_strip + c->pass * w.pass_strips + w.wn * STRIPS;
    c->block = w.block0;
#pragma unroll
    for (int u = 0; u < STRIPS; u++)
        c->at[u] = (unsigned)(min(strip0 + u, w.last_strip) * a.pitch_blocks + w.block0);
    c->scale_at = (unsigned)(min(strip0 + w.scale_strip, w.last_strip) * a.pitch_groups);
}

/* Copies two fragment blocks, or one, of `bytes` per lane and block. They are contiguous; a lane
 * copies 16 bytes at a time. */
static __device__ __forceinline__ void stream_copy_blocks(uint32_t dst, const unsigned char *src,
                                                          int bytes, int lane, bool two)
{
    dst += lane * 16;
    src += lane * 16;
    if (bytes == 16) {
        ptx_copy_16(dst, src);
        if (two)
            ptx_copy_16(dst + 512, src + 512);
    } else if (lane < 2 * bytes * (two ? 2 : 1)) {
        ptx_copy_16(dst, src);
    }
}

/* Starts the copies of the next stage, if any, and closes the cp.async group. */
template <class Format, int STRIPS>
static __device__ __forceinline__ void
stream_copy_next(const qt_stream_args &a, const stream_warp &w, stream_cursor<STRIPS> *c)
{
    if (c->pass < a.passes) {
        uint32_t dst = w.ring + c->stage;
        const bool two = c->block + 1 < w.block1;
#pragma unroll
        for (int u = 0; u < STRIPS; u++)
#pragma unroll
            for (int i = 0; i < 3; i++) {
                const int width = qt_lane_width<Format>(i);
                if (width)
                    stream_copy_blocks(dst, a.plane[i] + (size_t)c->at[u] * (32 * width), width,
                                       w.lane, two);
                dst += 64 * width;
            }
        int u = w.scale_strip;
        if (Format::GROUPED && u < STRIPS) {
            unsigned group = min((c->block * 64 >> a.group_shift) + w.scale_group, a.groups - 1);
            ptx_copy_16(dst + u * 128 + w.scale_group * 32 + w.lane % 2 * 16,
                        a.scale + (size_t)(c->scale_at + group) * 16 + w.lane % 2 * 8);
            if (Format::ZEROS && a.decode.zeros) { /* two lanes copy a group's zero-points too */
                const int bytes = Format::ZEROS / 2, at = w.lane % 2 * bytes;
                const uint32_t to = dst + STRIPS * 128 + (u * 4 + w.scale_group) * Format::ZEROS;
                const unsigned char *from =
                    a.zero + (size_t)(c->scale_at + group) * Format::ZEROS + at;
                if (Format::ZEROS == 8)
                    ptx_copy_4(to + at, from);
                else
                    ptx_copy_8(to + at, from);
            }
        }
        c->stage = c->stage + a.slot_bytes == a.ring_bytes ? 0 : c->stage + a.slot_bytes;
        c->block += 2;
#pragma unroll
        for (int u = 0; u < STRIPS; u++)
            c->at[u] += 2;
        if (c->block >= w.block1) {
            c->pass++;
            stream_cursor_pass(a, w, c);
        }
    }
    ptx_copy_commit();
}

/* Prologue: fills all stages but one. */
template <class Format, int STRIPS, int DEPTH>
static __device__ __forceinline__ void
stream_copy_ahead(const qt_stream_args &a, const stream_warp &w, stream_cursor<STRIPS> *c)
{
#pragma unroll 1
    for (int i = 0; i < DEPTH - 1; i++)
        stream_copy_next<Format, STRIPS>(a, w, c);
}

/* ---- activations --------------------------------------------------------------------------------
 *
 * X for the thread block's part of k in shared memory, as FP16 (token_scale.cuh), zero beyond k.
 */
static __device__ __forceinline__ void stream_x_aligned(const qt_stream_args &a,
                                                        const stream_warp &w)
{
    const int chunks = (w.cta_block1 - w.cta_block0) * 8, k0 = w.cta_block0 * 64;
    const uint16_t *src = (const uint16_t *)a.x + k0;
    const uint32_t dst = ptx_shared(qt_smem) + a.x_at;
    /* All thread blocks read the same X. Each starts at a different place, so that they do not all
     * read the same L2 slice at the same time. */
    const int start = a.m > 1 ? (int)((blockIdx.x * 88u) % (unsigned)chunks) : 0;
    int token = a.m > 1 ? (int)(blockIdx.x % (unsigned)a.m) : 0;
#pragma unroll 1
    for (int i = 0; i < a.m; i++) {
#pragma unroll 2
        for (int j = (int)threadIdx.x; j < chunks; j += (int)blockDim.x) {
            int c = j + start < chunks ? j + start : j + start - chunks;
            bool inside = k0 + c * 8 < a.k;
            ptx_copy_16_zero(dst + token * a.x_pitch + c * 16,
                             src + (inside ? (size_t)token * a.k + c * 8 : 0), inside ? 16 : 0);
        }
        token = token + 1 == a.m ? 0 : token + 1;
    }
}

/* X with rows that are not 16-byte aligned. */
static __device__ __noinline__ void stream_x_ragged(const uint16_t *x, unsigned char *dst,
                                                    int pitch, int m, int k, int k0, int cols)
{
#pragma unroll 1
    for (int token = 0; token < m; token++)
        for (int i = (int)threadIdx.x; i < cols; i += (int)blockDim.x)
            ((uint16_t *)(dst + token * pitch))[i] =
                k0 + i < k ? x[(size_t)token * k + k0 + i] : (uint16_t)0;
}

static __device__ __noinline__ void stream_bf16_to_f16(unsigned char *x, int pitch, int *top, int m,
                                                       int chunks)
{
    for (int i = (int)threadIdx.x; i < m; i += (int)blockDim.x)
        top[i] = 0;
    __syncthreads();
    for (int i = (int)threadIdx.x; i < m * chunks; i += (int)blockDim.x) {
        const uint4 v = *(const uint4 *)(x + i / chunks * pitch + i % chunks * 16);
        const int most = qt_lane_top(qt_token_tops(0, v));
        if (most > top[i / chunks])
            atomicMax(&top[i / chunks], most);
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < m * chunks; i += (int)blockDim.x) {
        uint4 *v = (uint4 *)(x + i / chunks * pitch + i % chunks * 16);
        *v = qt_token_halves(*v, qt_token_shift(top[i / chunks]));
    }
    __syncthreads();
}

/* The factor for the results of a token. */
static __device__ __forceinline__ float stream_token_factor(const qt_stream_args &a, int token)
{
    if (!a.bf16)
        return a.factor;
    int up = qt_token_shift(((const int *)(qt_smem + a.token_at))[token]);
    return a.factor * qt_token_factor(up);
}

/* Copies the row scales of the thread block's strips, in stored order. */
static __device__ __forceinline__ void stream_load_row_scales(const qt_stream_args &a,
                                                              const stream_warp &w)
{
    __half *dst = (__half *)(qt_smem + a.scale_at);
    int rows = (w.last_strip + 1 - w.first_strip) * 16;
    for (int i = (int)threadIdx.x; i < rows; i += (int)blockDim.x)
        dst[i] = a.scale[(size_t)(w.first_strip + i / 16) * a.pitch_groups * 16 + i % 16];
}

/* ---- products -------------------------------------------------------------------------------- */

/* Products of a stage: two fragment blocks of each strip, or one. x_row + x_at: the matching
 * columns of X. */
template <class Format, int MT, int STRIPS>
static __device__ __forceinline__ void
stream_stage(qt_accumulators<MT, STRIPS> *total, const qt_stream_args &a, const stream_warp &w,
             const unsigned char *stage, const uint32_t x_row[MT], uint32_t x_at, bool two,
             const qt_lane &lane)
{
    const int strip_bytes =
        64 * (qt_lane_width<Format>(0) + qt_lane_width<Format>(1) + qt_lane_width<Format>(2));
    const unsigned char *scales[STRIPS];
#pragma unroll
    for (int u = 0; u < STRIPS; u++)
        scales[u] = stage + STRIPS * strip_bytes + w.lane / 4 * 4 + u * 128;
    qt_warp_mma<Format, MT, STRIPS>(
        total, a.decode,
        [&](const unsigned char *src[3], int u, int b) {
            const unsigned char *at = stage + u * strip_bytes;
#pragma unroll
            for (int i = 0; i < 3; i++) {
                const int width = qt_lane_width<Format>(i);
                src[i] = at + b * 32 * width + w.lane * width;
                at += 64 * width;
            }
        },
        [&](int t, int b, int half) { return x_row[t] + x_at + b * 128 + half * 64; }, scales,
        [&](int u, int group) {
            return qt_lane_zeros<Format>(a.decode, stage + STRIPS * (strip_bytes + 128) +
                                                       (u * 4 + group) * Format::ZEROS);
        },
        a.slot_groups, two, lane);
}

/* ---- epilogue -----------------------------------------------------------------------------------
 *
 * Layout of the partial sums in shared memory: [warps_k][m][rows of a pass + 4].
 */
static __device__ __forceinline__ void stream_store_y(const qt_stream_args &a, const stream_warp &w,
                                                      int token, int row, float v, bool row_scale)
{
    if (row_scale) {
        int slot = 2 * (row % 8) + row / 8 % 2;
        v *= __half2float(
            ((const __half *)(qt_smem + a.scale_at))[(row / 16 - w.first_strip) * 16 + slot]);
    }
    qt_put_rounded(a.y, (size_t)token * a.n + row, v, a.bf16);
}

/* The outputs of a pass: adds the partial sums of the WK warps and stores them to Y, or with
 * split-K to the workspace. The thread that begins rotates from pass to pass, because there are
 * often fewer outputs than threads. */
static __device__ __forceinline__ void stream_pass_epilogue(const qt_stream_args &a,
                                                            const stream_warp &w, const float *part,
                                                            int pass, bool row_scale)
{
    const int log2_rows = 35 - __clz(w.pass_strips), rows = 1 << log2_rows, outputs = a.m * rows;
    const int row0 = (w.first_strip + pass * w.pass_strips) * 16, row_end = (w.last_strip + 1) * 16;
    const int step = (rows + 4) * a.m;
    int o = (int)(threadIdx.x + (unsigned)(pass * outputs)) & ((int)blockDim.x - 1);
#pragma unroll 1
    for (; o < outputs; o += (int)blockDim.x) {
        int token = o >> log2_rows, row = row0 + (o & (rows - 1));
        const float *src = part + token * (rows + 4) + (o & (rows - 1));
        float v = 0;
        if (row >= row_end)
            continue;
#pragma unroll 4
        for (int j = 0; j < a.warps_k; j++)
            v += src[j * step];
        v *= stream_token_factor(a, token);
        if (a.splits > 1)
            __stcg(a.partial + ((size_t)blockIdx.y * a.m + token) * (a.strips * 16) + row, v);
        else if (row < a.n)
            stream_store_y(a, w, token, row, v, row_scale);
    }
}

/*
 * Split-K reduction: the last thread block of a row group to arrive adds the partial sums in the
 * workspace in the order of the splits.
 */
static __device__ __forceinline__ void stream_split_k_reduce(const qt_stream_args &a,
                                                             const stream_warp &w, bool row_scale)
{
    if (!qt_last_to_arrive(&a.arrivals[blockIdx.x], (unsigned)a.splits,
                           (volatile int *)(qt_smem + a.sums_at)))
        return;
    const int row0 = w.first_strip * 16, quads = (w.last_strip + 1 - w.first_strip) * 4;
    const size_t step = (size_t)a.m * a.strips * 16;
#pragma unroll 2
    for (int o = (int)threadIdx.x; o < quads * a.m; o += (int)blockDim.x) {
        int token = o / quads, row = row0 + o % quads * 4;
        const float *src = a.partial + (size_t)token * a.strips * 16 + row;
        float4 v = make_float4(0, 0, 0, 0);
#pragma unroll 4
        for (int i = 0; i < a.splits; i++) {
            float4 more = __ldcg((const float4 *)(src + i * step));
            v.x += more.x;
            v.y += more.y;
            v.z += more.z;
            v.w += more.w;
        }
        const float y[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (row + i < a.n)
                stream_store_y(a, w, token, row + i, y[i], row_scale);
    }
}

/* ---- kernel ---------------------------------------------------------------------------------- */

template <class Format, int MT, int STRIPS, int DEPTH>
__global__ void __launch_bounds__(512, 1) qt_stream_kernel(const __grid_constant__ qt_stream_args a)
{
    const stream_warp w = stream_warp_open<STRIPS>(a);
    const __half value = qt_lane_value<Format>(&a.decode);
    stream_cursor<STRIPS> c;
    c.pass = w.block0 < w.block1 ? 0 : a.passes;
    c.stage = 0;
    stream_cursor_pass(a, w, &c);
    const int cols = (w.cta_block1 - w.cta_block0) * 64;
    if (a.k % 8 == 0 && ((size_t)a.x & 15) == 0)
        stream_x_aligned(a, w);
    else
        stream_x_ragged((const uint16_t *)a.x, qt_smem + a.x_at, a.x_pitch, a.m, a.k,
                        w.cta_block0 * 64, cols);
    ptx_copy_commit();
    stream_copy_ahead<Format, STRIPS, DEPTH>(a, w, &c); /* X first: all warps wait for it */
    const qt_lane lane = qt_lane_start<Format>(value, (int)blockDim.x);
    if (!Format::GROUPED)
        stream_load_row_scales(a, w);
    ptx_copy_wait<DEPTH - 1>();
    __syncthreads();
    if (a.bf16)
        stream_bf16_to_f16(qt_smem + a.x_at, a.x_pitch, (int *)(qt_smem + a.token_at), a.m,
                           cols / 8);

    uint32_t x_row[MT]; /* ldmatrix address of the lane; results of tokens >= m are not stored */
#pragma unroll
    for (int t = 0; t < MT; t++)
        x_row[t] = ptx_shared(qt_smem + a.x_at) +
                   (uint32_t)(min(t * 8 + w.lane % 8, a.m - 1) * a.x_pitch + w.lane / 8 * 16);

    float *part = (float *)(qt_smem + a.sums_at);
    const int part_floats = a.warps_k * a.m * (w.pass_strips * 16 + 4);
    const unsigned char *ring = qt_smem + a.ring_at + w.warp * a.ring_bytes;
    uint32_t stage = 0;
#pragma unroll 1
    for (int pass = 0; pass < a.passes; pass++) {
        qt_accumulators<MT, STRIPS> sums = {};
#pragma unroll 1
        for (int block = w.block0; block < w.block1; block += 2) {
            ptx_copy_wait<DEPTH - 2>();
            __syncwarp(); /* scales are copied by other lanes; the previous stage has been read */
            stream_copy_next<Format, STRIPS>(a, w, &c);
            stream_stage<Format, MT, STRIPS>(&sums, a, w, ring + stage, x_row,
                                             (uint32_t)(block - w.cta_block0) * 128,
                                             block + 1 < w.block1, lane);
            stage = stage + a.slot_bytes == a.ring_bytes ? 0 : stage + a.slot_bytes;
        }
        float *now = part + (a.sums_buffers == 2 ? pass & 1 : 0) * part_floats;
        if (a.sums_buffers == 1)
            __syncthreads(); /* partial sums of the previous pass have been read */
        const int pitch = w.pass_strips * 16 + 4;
        qt_accumulators_store(now + w.wk * a.m * pitch + w.wn * STRIPS * 16, pitch, a.m, sums);
        __syncthreads();
        stream_pass_epilogue(a, w, now, pass, !Format::GROUPED);
    }
    if (a.splits > 1)
        stream_split_k_reduce(a, w, !Format::GROUPED);
}

/* of_many: the format for more than one token tile. The 8 KB table of nf2 would force X of 16
 * tokens to be split more often: 8192 x 8192 as on 8.0, 23.5 us, 19.4 without. */
template <class Format> struct stream_format {
    typedef Format of_many;
};
template <> struct stream_format<qt_decode_pair2> {
    typedef qt_decode_value2 of_many;
};

/* The kernel of a format; NULL if it does not exist. Two strips per warp share reads of X, which
 * does not help minifloats with one token tile, and 8-bit codes seldom. */
template <class Format> static const void *qt_stream_of(int token_tiles, int strips)
{
    constexpr int bits = Format::WIDTH0 + (Format::WIDTH1 > 0 ? Format::WIDTH1 : 0);
    typedef typename stream_format<Format>::of_many many;
#define KERNEL(Format, mt, strips)                                                                 \
    (const void *)qt_stream_kernel<Format, mt, strips, qt_stream_depth(bits, mt)>
    static const void *const kernels[3] = {KERNEL(Format, 1, 1), KERNEL(many, 2, 1),
                                           KERNEL(many, 4, 1)};
    if (strips == 1)
        return kernels[token_tiles / 2];
    if constexpr (bits < 8 && Format::GROUPED)
        if (token_tiles == 1)
            return KERNEL(Format, 1, 2);
    if constexpr (bits < 8 && !Format::RARE)
        if (token_tiles == 2)
            return KERNEL(many, 2, 2);
    return NULL;
#undef KERNEL
}

#endif
