/*
 * The stream kernel: Y = X W^T for few tokens (m <= 32), one pass over the packed weights.
 *
 *   grid      (row groups, splits): a block owns strips_cta strips of 16 rows and 1/splits of k
 *   block     `warps` warps = WN x WK: WK warps side by side along k, WN along rows; a PASS is
 *             WN * STRIPS strips, and a warp's share of it its slice of k of STRIPS strips
 *   smem      [ look-up table | X: m rows of the block's k | row scales | partial sums | rings ]
 *
 *   warp:     global memory -- cp.async --> ring of DEPTH slots of two 16 x 64 blocks of STRIPS
 *             strips --> registers --> fragments --> mma.sync
 *
 * After a pass the WK partial sums of an output meet in shared memory and are added in order; with
 * splits > 1 the blocks' sums meet in the workspace and the last to arrive adds them in order, so
 * that results do not depend on timing.
 *
 * The template: Format how codes are decoded; MT token tiles of 8 (m <= 8 MT); STRIPS; DEPTH.
 *
 * Requires    compute capability 8.0; 16-byte aligned sections (zero points: 8); up to 227 KB of
 * shared memory Moves       packed bytes once; X once per row group; Y once; splits > 1: 8 * splits
 * * n * m bytes of partial sums through L2 Oracle      qt_packed_decode and an FP64 product;
 * relative error <= 2.3e-4 with FP16 output
 */
#ifndef QT_KERNELS_CUDA_MATMUL_STREAM_CUH
#define QT_KERNELS_CUDA_MATMUL_STREAM_CUH

#include "kernels/cuda/common/arrive.cuh"
#include "kernels/cuda/common/round.cuh"
#include "kernels/cuda/common/slot.cuh"
#include "kernels/cuda/common/token_scale.cuh"
#include "kernels/cuda/matmul/stream.h"

/* ---- who does what -----------------------------------------------------------------------------
 */

struct stream_warp {
    int lane, warp, wk, wn;
    int first_strip, last_strip; /* of the block; last is the last one to load */
    int block0, block1;          /* its slice of k */
    int pass_strips;             /* strips of a pass, over all warps */
    int cta_block0, cta_block1;  /* the block's part of k */
    uint32_t ring;               /* shared address */
    /* Two lanes copy the 32 bytes of a group's scales: of strip scale_strip, and which. */
    int scale_strip, scale_group;
};

template <int STRIPS>
static __device__ __forceinline__ stream_warp stream_warp_open(const qt_stream_args &a)
{
    stream_warp w;
    w.lane = (int)threadIdx.x % 32;
    w.warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0); /* tell the compiler it is uniform */
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

/* ---- weights into shared memory ----------------------------------------------------------------
 *
 * A warp's blocks go through its own ring of slots, two at a time, in the order in which it uses
 * them: its slice of k for pass 0, 1, ... One group of cp.async a slot.
 *
 *   slot   STRIPS x [ plane0 2 blocks x 32 lanes x w words | plane1 | plane2 ]
 *          STRIPS x [ scales of up to 4 groups x 8 words (rows g, g + 8) ]
 *          STRIPS x [ zero points of up to 4 groups ]
 *
 * (Loads into registers would spare shared memory a write and a read, but are no deep pipeline: a
 * warp has six scoreboards, so waiting for one load waits for younger ones too.)
 */
template <int STRIPS> struct stream_cursor {
    int pass, block;     /* to copy next; pass = passes: none */
    uint32_t slot;       /* where to: byte offset in the ring */
    unsigned at[STRIPS]; /* strip * pitch_blocks + block */
    unsigned scale_at;   /* strip * pitch_groups, of the strip whose scales the lane copies */
};

/* To the begin of the slice in pass c->pass. */
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

/* Two blocks, or one, of `bytes` per lane and block: contiguous, 16 bytes a lane at a time. */
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

/* Starts copying the next slot, if there is one, and ends the group. */
template <class Format, int STRIPS>
static __device__ __forceinline__ void
stream_copy_next(const qt_stream_args &a, const stream_warp &w, stream_cursor<STRIPS> *c)
{
    if (c->pass < a.passes) {
        uint32_t dst = w.ring + c->slot;
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
            if (Format::ZEROS && a.decode.zeros) { /* two lanes copy a group's too */
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
        c->slot = c->slot + a.slot_bytes == a.ring_bytes ? 0 : c->slot + a.slot_bytes;
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

/* Fills the ring but for one slot. */
template <class Format, int STRIPS, int DEPTH>
static __device__ __forceinline__ void
stream_copy_ahead(const qt_stream_args &a, const stream_warp &w, stream_cursor<STRIPS> *c)
{
#pragma unroll 1
    for (int i = 0; i < DEPTH - 1; i++)
        stream_copy_next<Format, STRIPS>(a, w, c);
}

/* ---- activations -------------------------------------------------------------------------------
 *
 * Rows of X for the block's part of k, as FP16 (token_scale.cuh), zero beyond k.
 */
static __device__ __forceinline__ void stream_x_aligned(const qt_stream_args &a,
                                                        const stream_warp &w)
{
    const int chunks = (w.cta_block1 - w.cta_block0) * 8, k0 = w.cta_block0 * 64;
    const uint16_t *src = (const uint16_t *)a.x + k0;
    const uint32_t dst = ptx_shared(qt_smem) + a.x_at;
    /* All blocks read the same X: each begins elsewhere, or all would ask one L2 slice at a time.
     */
    const int turn = a.m > 1 ? (int)((blockIdx.x * 88u) % (unsigned)chunks) : 0;
    int token = a.m > 1 ? (int)(blockIdx.x % (unsigned)a.m) : 0;
#pragma unroll 1
    for (int i = 0; i < a.m; i++) {
#pragma unroll 2
        for (int j = (int)threadIdx.x; j < chunks; j += (int)blockDim.x) {
            int c = j + turn < chunks ? j + turn : j + turn - chunks;
            bool inside = k0 + c * 8 < a.k;
            ptx_copy_16_zero(dst + token * a.x_pitch + c * 16,
                             src + (inside ? (size_t)token * a.k + c * 8 : 0), inside ? 16 : 0);
        }
        token = token + 1 == a.m ? 0 : token + 1;
    }
}

/* Rows whose elements are not 16-byte aligned. */
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

/* What the sums of a token are to be multiplied by. */
static __device__ __forceinline__ float stream_token_factor(const qt_stream_args &a, int token)
{
    if (!a.bf16)
        return a.factor;
    int up = qt_token_shift(((const int *)(qt_smem + a.token_at))[token]);
    return a.factor * qt_token_factor(up);
}

/* Row scales of the block's strips, in stored order. */
static __device__ __forceinline__ void stream_load_row_scales(const qt_stream_args &a,
                                                              const stream_warp &w)
{
    __half *dst = (__half *)(qt_smem + a.scale_at);
    int rows = (w.last_strip + 1 - w.first_strip) * 16;
    for (int i = (int)threadIdx.x; i < rows; i += (int)blockDim.x)
        dst[i] = a.scale[(size_t)(w.first_strip + i / 16) * a.pitch_groups * 16 + i % 16];
}

/* ---- products ----------------------------------------------------------------------------------
 */

/* One slot: two 16 x 64 blocks of each strip, or one. x_row + x_at: their columns of X. */
template <class Format, int MT, int STRIPS>
static __device__ __forceinline__ void
stream_slot(qt_accumulators<MT, STRIPS> *total, const qt_stream_args &a, const stream_warp &w,
            const unsigned char *slot, const uint32_t x_row[MT], uint32_t x_at, bool two,
            const qt_lane &lane)
{
    const int strip_bytes =
        64 * (qt_lane_width<Format>(0) + qt_lane_width<Format>(1) + qt_lane_width<Format>(2));
    const unsigned char *scales[STRIPS];
#pragma unroll
    for (int u = 0; u < STRIPS; u++)
        scales[u] = slot + STRIPS * strip_bytes + w.lane / 4 * 4 + u * 128;
    qt_slot_multiply<Format, MT, STRIPS>(
        total, a.decode,
        [&](const unsigned char *src[3], int u, int b) {
            const unsigned char *at = slot + u * strip_bytes;
#pragma unroll
            for (int i = 0; i < 3; i++) {
                const int width = qt_lane_width<Format>(i);
                src[i] = at + b * 32 * width + w.lane * width;
                at += 64 * width;
            }
        },
        [&](int t, int b, int half) { return x_row[t] + x_at + b * 128 + half * 64; }, scales,
        [&](int u, int group) {
            return qt_lane_zeros<Format>(a.decode, slot + STRIPS * (strip_bytes + 128) +
                                                       (u * 4 + group) * Format::ZEROS);
        },
        a.slot_groups, two, lane);
}

/* ---- sums --------------------------------------------------------------------------------------
 *
 * Partial sums in shared memory: [warps_k][m][rows of a pass + 4].
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

/* The outputs of a pass: sums over warps_k, to Y or to the workspace. Who begins moves on from pass
 * to pass, as there are often fewer outputs than threads. */
static __device__ __forceinline__ void stream_finish_pass(const qt_stream_args &a,
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
 * The blocks of a row group leave their sums in the workspace; the last to arrive adds them, in the
 * order of the splits.
 */
static __device__ __forceinline__ void stream_fix_up(const qt_stream_args &a, const stream_warp &w,
                                                     bool row_scale)
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

/* ---- the kernel --------------------------------------------------------------------------------
 */

template <class Format, int MT, int STRIPS, int DEPTH>
__global__ void __launch_bounds__(512, 1) qt_stream_kernel(const __grid_constant__ qt_stream_args a)
{
    const stream_warp w = stream_warp_open<STRIPS>(a);
    const __half value = qt_lane_value<Format>(&a.decode);
    stream_cursor<STRIPS> c;
    c.pass = w.block0 < w.block1 ? 0 : a.passes;
    c.slot = 0;
    stream_cursor_pass(a, w, &c);
    const int cols = (w.cta_block1 - w.cta_block0) * 64;
    if (a.k % 8 == 0 && ((size_t)a.x & 15) == 0)
        stream_x_aligned(a, w);
    else
        stream_x_ragged((const uint16_t *)a.x, qt_smem + a.x_at, a.x_pitch, a.m, a.k,
                        w.cta_block0 * 64, cols);
    ptx_copy_commit();
    stream_copy_ahead<Format, STRIPS, DEPTH>(a, w, &c); /* after X, which everybody waits for */
    const qt_lane lane = qt_lane_start<Format>(value, (int)blockDim.x);
    if (!Format::GROUPED)
        stream_load_row_scales(a, w);
    ptx_copy_wait<DEPTH - 1>();
    __syncthreads();
    if (a.bf16)
        stream_bf16_to_f16(qt_smem + a.x_at, a.x_pitch, (int *)(qt_smem + a.token_at), a.m,
                           cols / 8);

    uint32_t x_row[MT]; /* of this lane for ldmatrix; columns of tokens >= m are never stored */
#pragma unroll
    for (int t = 0; t < MT; t++)
        x_row[t] = ptx_shared(qt_smem + a.x_at) +
                   (uint32_t)(min(t * 8 + w.lane % 8, a.m - 1) * a.x_pitch + w.lane / 8 * 16);

    float *part = (float *)(qt_smem + a.sums_at);
    const int part_floats = a.warps_k * a.m * (w.pass_strips * 16 + 4);
    const unsigned char *ring = qt_smem + a.ring_at + w.warp * a.ring_bytes;
    uint32_t slot = 0;
#pragma unroll 1
    for (int pass = 0; pass < a.passes; pass++) {
        qt_accumulators<MT, STRIPS> sums = {};
#pragma unroll 1
        for (int block = w.block0; block < w.block1; block += 2) {
            ptx_copy_wait<DEPTH - 2>();
            __syncwarp(); /* scales are read by other lanes than copy them, and were read by now */
            stream_copy_next<Format, STRIPS>(a, w, &c);
            stream_slot<Format, MT, STRIPS>(&sums, a, w, ring + slot, x_row,
                                            (uint32_t)(block - w.cta_block0) * 128,
                                            block + 1 < w.block1, lane);
            slot = slot + a.slot_bytes == a.ring_bytes ? 0 : slot + a.slot_bytes;
        }
        float *now = part + (a.sums_buffers == 2 ? pass & 1 : 0) * part_floats;
        if (a.sums_buffers == 1)
            __syncthreads(); /* the sums of the pass before have been read */
        const int pitch = w.pass_strips * 16 + 4;
        qt_sums_put(now + w.wk * a.m * pitch + w.wn * STRIPS * 16, pitch, a.m, sums);
        __syncthreads();
        stream_finish_pass(a, w, now, pass, !Format::GROUPED);
    }
    if (a.splits > 1)
        stream_fix_up(a, w, !Format::GROUPED);
}

/* How more than one token tile is decoded. With a table of 8 KB X of 16 tokens had to be split more
 * often: nf2, 8192 x 8192 as on 8.0, 23.5 us, 19.4 without. */
template <class Format> struct stream_format {
    typedef Format of_many;
};
template <> struct stream_format<qt_decode_pair2> {
    typedef qt_decode_value2 of_many;
};

/* Of a format: NULL if there is none. Two strips a warp share reads of X, by which bit fields of
 * one token tile gain nothing, and codes of 8 bits seldom. */
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
