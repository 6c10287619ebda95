/*
 * The skinny kernel for all formats but mix24 and w4ax: Y = X W^T for up to 16 tokens, sm_90a. Work
 * distribution, pipeline and epilogue are in skinny_common.cuh; this file defines the contents of a
 * stage, and the products.
 *
 *   stage:     X | packed planes | group scales | zero-points
 *
 * BF16 X of few tokens is converted by additional warps of each thread block while the first
 * weights arrive, which saves a launch of prepare.cu. Shared memory then holds all of X, in the
 * layout of the stages, and
 *
 *     tops       U32 [QT_SKINNY_TOPS], the largest magnitude that each converter warp finds, and
 *                FP32 [m], the token factors
 *
 * Template parameters: Format, the code format; MT, STRIPS and LAST as in skinny_common.cuh; GATED:
 * for gated products (formats with a scale per group); Args: the arguments of a launch of one
 * matrix, or of a part of a launch of several.
 *
 * Requires   X 16-byte aligned: FP16, k a multiple of 64 (prepare.cu makes such X); or BF16, k a
 *            multiple of 256, and converter warps
 * Traffic    packed bytes once; X once per thread block and tile (through L2); Y once
 * Reference  qt_packed_decode and an FP64 product; relative error <= 2.3e-4 with FP16 output
 */
#ifndef QT_KERNELS_CUDA_MATMUL_SKINNY_CUH
#define QT_KERNELS_CUDA_MATMUL_SKINNY_CUH

#include "kernels/cuda/common/token_scale.cuh"
#include "kernels/cuda/matmul/skinny_common.cuh"
#include "kernels/cuda/matmul/warp_mma.cuh"

template <class Format, bool GATED, class Args>
struct skinny_producer : skinny_producer_base<Args> {
    using skinny_producer_base<Args>::skinny_producer_base;

    __device__ __forceinline__ void copy_weights(uint32_t dst, uint32_t bar) const
    {
        const Args &a = this->a;
        const int group = this->k_stage * QT_SKINNY_BLOCKS * 64 >> a.group_shift;
        ptx_barrier_expect(bar, (uint32_t)a.stage_tx);
#pragma unroll
        for (int p = 0; p < 3; p++)
            if (qt_plane_width<Format>(p))
                qt_copy_strips<GATED>(dst + a.planes_at[p], &a.plane[p],
                                      this->k_stage *
                                          (QT_SKINNY_BLOCKS * 16 * qt_plane_width<Format>(p)),
                                      this->strip(), bar);
        if (Format::GROUPED)
            qt_copy_strips<GATED>(dst + a.scales_at, &a.scales, group * 4, this->strip(), bar);
        if (Format::ZEROS && a.decode.zeros)
            qt_copy_strips<GATED>(dst + a.zeros_at, &a.zeros, group * (Format::ZEROS / 8),
                                  this->strip(), bar);
    }
};

/* ---- products -------------------------------------------------------------------------------- */

/* Offsets in a stage of a lane's operands, for the warp's half stage (slot). */
template <class Format, int MT, int STRIPS> struct skinny_offsets {
    int words[STRIPS][3]; /* first fragment block */
    int scales[STRIPS];   /* the lane's two rows, first group */
    int zeros[STRIPS];    /* first group */
    /* ldmatrix offsets in X for token tile 0 of each fragment block. With one token tile, each half
     * of a block has an offset of its own. With two, the second half is computed: an offset would
     * take nf4 to 1.02 of the time, other formats to 0.99. */
    uint32_t x[2][2 / MT];

    __device__ __forceinline__ skinny_offsets(const qt_skinny_args &a, const skinny_warp &w)
    {
        const int lane = (int)threadIdx.x % 32;
        const int group_at = a.stage_groups > 1 ? w.slot * a.slot_groups * 32 : 0;
#pragma unroll
        for (int b = 0; b < 2; b++)
#pragma unroll
            for (int half = 0; half < 2 / MT; half++)
                x[b][half] = skinny_x_at(a.x_rows, 2 * w.slot + b, lane % 8, half * 4 + lane / 8);
#pragma unroll
        for (int u = 0; u < STRIPS; u++) {
            int strip = min(w.wn * STRIPS + u, a.tile_strips - 1);
#pragma unroll
            for (int i = 0; i < 3; i++) {
                const int width = qt_plane_width<Format>(i);
                words[u][i] = a.planes_at[i] + lane * 4 * width +
                              (strip * QT_SKINNY_BLOCKS + w.slot * 2) * 128 * width;
            }
            scales[u] = a.scales_at + strip * a.stage_groups * 32 + group_at + lane / 4 * 4;
            if (Format::ZEROS)
                zeros[u] = a.zeros_at + strip * a.zero_pitch + group_at / 32 * Format::ZEROS;
        }
    }
};

/* Products of the warp's slot in the stage at offset `stage`, for the first N strips. */
template <class Format, int MT, int N, int STRIPS>
static __device__ __forceinline__ void skinny_slot(qt_accumulators<MT, N> *total,
                                                   const qt_skinny_args &a,
                                                   const skinny_offsets<Format, MT, STRIPS> &from,
                                                   int stage, int x_at, const qt_lane &lane)
{
    const unsigned char *base = qt_smem + stage;
    const unsigned char *scales[N];
#pragma unroll
    for (int u = 0; u < N; u++)
        scales[u] = base + from.scales[u];
    const uint32_t x0 = ptx_shared(qt_smem) + x_at;
    qt_warp_mma<Format, MT, N>(
        total, a.decode,
        [&](const unsigned char *src[3], int u, int b) {
#pragma unroll
            for (int i = 0; i < 3; i++)
                src[i] = base + from.words[u][i] + b * 128 * qt_plane_width<Format>(i);
        },
        [&](int t, int b, int half) {
            return MT == 1 ? x0 + from.x[b][half % (2 / MT)]
                           : ((x0 + from.x[b][0]) ^ half * 64) + t * 1024;
        },
        scales,
        [&](int u, int group) {
            return qt_lane_zeros<Format>(a.decode, base + from.zeros[u] + group * Format::ZEROS);
        },
        a.slot_groups, true, lane);
}

/* The Work of skinny_consume. */
template <class Format, int MT, int STRIPS, bool IS_GATED, class Args>
struct skinny_consumer : skinny_float_accumulators {
    enum { GATED = IS_GATED };
    const Args &a;
    const skinny_offsets<Format, MT, STRIPS> from;
    const qt_lane lane;

    __device__ __forceinline__ skinny_consumer(const Args &args, const skinny_warp &w,
                                               const qt_lane &l)
        : a(args), from(args, w), lane(l)
    {
    }
    __device__ __forceinline__ int gated() const
    {
        return a.gated;
    }
    __device__ __forceinline__ void begin_tile(int)
    {
    }
    template <int N>
    __device__ __forceinline__ void slot(qt_accumulators<MT, N> *sums, int stage, int x_at)
    {
        skinny_slot<Format>(sums, a, from, stage, x_at, lane);
    }
    __device__ __forceinline__ void sync(int threads, int) const
    {
        ptx_named_barrier(SKINNY_SYNC, threads);
    }
    __device__ __forceinline__ const float *addend(int) const
    {
        return NULL;
    }
    __device__ __forceinline__ const __half *row_scales(int tile) const
    {
        return Format::GROUPED ? NULL
                               : (const __half *)(qt_smem + a.tail_at) + tile * a.tile_strips * 16;
    }
};

/* ---- conversion of X ----------------------------------------------------------------------------
 *
 * Converter warps: `warps` of them per token, 256 columns at a time, 8 per lane. Most of the time
 * goes to the first execution of instructions (instruction-cache misses), so the code is kept
 * short.
 */

/* One noinline function for all kernels. Arguments by value: through a reference, kernel arguments
 * would be read from memory instead of the constant cache. */
static __device__ __noinline__ void skinny_convert_x(const uint4 *x, int stages, int warps, int m,
                                                     int x_rows, int pitch, unsigned char *to,
                                                     int *tops, int threads)
{
    const int lane = (int)threadIdx.x % 32;
    float *factors = (float *)(tops + QT_SKINNY_TOPS);
    int first = (int)threadIdx.x / 32 - (threads + QT_PRODUCER_THREADS) / 32,
        token = 0; /* first stage, token */
    for (; first >= warps; first -= warps)
        token++;
    to += skinny_x_at(x_rows, lane / 8, token, lane % 8);
    x += token * stages * 32 + lane;
    tops += token * warps;
#pragma unroll 1
    for (int s = first; s < stages; s += warps)
        ptx_copy_16(ptx_shared(to) + s * pitch, x + s * 32);
    ptx_copy_wait_all();
    uint32_t two = 0;
#pragma unroll 2
    for (int s = first; s < stages; s += warps)
        two = qt_token_tops(two, *(const uint4 *)(to + s * pitch));
    const int top = qt_token_top(two);
    if (lane == 0)
        tops[first] = top;
    ptx_named_barrier(SKINNY_TOPS, m * warps * 32);
    const int up = qt_token_shift(__reduce_max_sync(~0u, lane < warps ? tops[lane] : 0));
#pragma unroll 2
    for (int s = first; s < stages; s += warps) {
        uint4 *v = (uint4 *)(to + s * pitch);
        *v = qt_token_halves(*v, up);
    }
    if (first == 0 && lane == 0)
        factors[token] = qt_token_factor(up);
    ptx_named_barrier_arrive(SKINNY_X, threads + m * warps * 32);
}

/* ---- kernels --------------------------------------------------------------------------------- */

template <class Format, int MT, int STRIPS, int LAST, bool GATED, class Args>
static __device__ __forceinline__ void skinny_run(const Args &a)
{
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    const int threads =
        (int)blockDim.x - QT_PRODUCER_THREADS - a.converters * 32; /* consumer threads */
    const qt_pipeline r = qt_pipeline_make(ptx_shared(qt_smem) + a.barriers_at);
    if (warp * 32 >= threads + QT_PRODUCER_THREADS) {
        ptx_launch_dependents();
        if (a.dependent)
            ptx_wait_previous();
        skinny_convert_x((const uint4 *)a.kept_x, a.k_stages, a.token_converters, a.m, a.x_rows,
                         a.kept_pitch, qt_smem + a.kept_at, (int *)(qt_smem + a.tops_at), threads);
        return;
    }
    if (warp * 32 >= threads) {
        qt_pipeline_produce(a, r, warp * 32 == threads, threads, a.arrivals,
                            skinny_producer<Format, GATED, Args>(a));
        return;
    }
    qt_lane lane = qt_lane_start<Format>(qt_lane_value<Format>(&a.decode), threads);
    asm volatile("" : "+r"(lane.bytes)); /* keeps it in a register */
    if (!Format::GROUPED)
        skinny_load_row_scales(a, (__half *)(qt_smem + a.tail_at), a.scale, a.pitch_groups,
                               threads);
    ptx_launch_dependents();
    const skinny_warp w = skinny_warp_open(a, warp, threads);
    if (a.converters)
        ptx_named_barrier(SKINNY_X, threads + a.converters * 32);
    skinny_consume<MT, STRIPS, LAST>(a, r, w, threads,
                                     skinny_consumer<Format, MT, STRIPS, GATED, Args>(a, w, lane));
}

template <class Format, int MT, int STRIPS, int LAST, bool GATED>
__global__ void __launch_bounds__(32 * qt_skinny_warps(MT, STRIPS), 1)
    qt_skinny_kernel(const __grid_constant__ qt_skinny_args a)
{
    skinny_run<Format, MT, STRIPS, LAST, GATED>(a);
}

template <class Format, int MT, int STRIPS, int LAST>
__global__ void __launch_bounds__(32 * qt_skinny_warps(MT, STRIPS), 1)
    qt_skinny_many_kernel(const __grid_constant__ qt_skinny_many_args many)
{
    int i = 0;
#pragma unroll
    for (int j = 1; j < QTOOL_MATMUL_MANY; j++)
        i += (int)blockIdx.x >= many.part[j].first;
    skinny_run<Format, MT, STRIPS, LAST, false>(many.part[i]);
}

/* of_small: the format with a small table, for thread blocks with few strips, which have neither
 * time nor room for a large one (skinny_plan.cc). of_four: the format for warps with four strips.
 */
template <class Format> struct skinny_format {
    typedef Format of_small, of_four;
};
template <> struct skinny_format<qt_decode_steps2<2>> {
    typedef qt_decode_wide2 of_small;
    typedef qt_decode_steps2<3> of_four;
};
template <> struct skinny_format<qt_decode_steps3> {
    typedef qt_decode_wide3 of_small;
    typedef qt_decode_steps3 of_four;
};

#define KERNEL(Format, mt, strips, last)                                                           \
    (const void *)qt_skinny_kernel<Format, mt, strips, last, false>

/* Kernels with two strips per warp. HALF: also those whose last warp has one strip. */
template <class Format, bool HALF>
static const void *skinny_of_two_strips(int token_tiles, int last)
{
    if constexpr (HALF)
        if (last == 1)
            return token_tiles == 1 ? KERNEL(Format, 1, 2, 1) : KERNEL(Format, 2, 2, 1);
    return token_tiles == 1 ? KERNEL(Format, 1, 2, 2) : KERNEL(Format, 2, 2, 2);
}

/*
 * The kernel of a format; NULL if it does not exist. Four strips per warp save reads of X, which
 * limit 2- and 3-bit formats with up to 8 tokens (skinny_plan.cc). A last warp with half of the
 * strips saves dequantization; 8-bit formats are not dequantization-bound, and rare formats have no
 * such variant. With one strip per warp the table is small.
 */
template <class Format>
static const void *qt_skinny_of(int token_tiles, int strips, int last, bool small)
{
    typedef typename skinny_format<Format>::of_small of_small;
    typedef typename skinny_format<Format>::of_four of_four;
    constexpr int bits = Format::WIDTH0 + Format::WIDTH1 + Format::WIDTH2;
    if (strips == 1)
        return token_tiles == 1 ? KERNEL(of_small, 1, 1, 1) : KERNEL(of_small, 2, 1, 1);
    if (strips == 2)
        return small ? skinny_of_two_strips<of_small, bits == 2>(token_tiles, last)
                     : skinny_of_two_strips < Format,
               bits < 8 && !Format::RARE > (token_tiles, last);
    if constexpr (Format::LUT && Format::WIDTH0 < 4)
        if (strips == 4 && token_tiles == 1)
            return last == strips ? KERNEL(of_four, 1, 4, 4) : KERNEL(of_four, 1, 4, 2);
    return NULL;
}

#undef KERNEL

/* The same for gated products, whose tiles have an even number of strips. The table is large. */
template <class Format> static const void *qt_skinny_gated_of(int token_tiles, int strips, int last)
{
    typedef typename skinny_format<Format>::of_four of_four;
    if (strips == 2 && last == 2)
        return token_tiles == 1 ? (const void *)qt_skinny_kernel<Format, 1, 2, 2, true>
                                : (const void *)qt_skinny_kernel<Format, 2, 2, 2, true>;
    if constexpr (Format::LUT && Format::WIDTH0 < 4)
        if (strips == 4 && token_tiles == 1)
            return last == strips ? (const void *)qt_skinny_kernel<of_four, 1, 4, 4, true>
                                  : (const void *)qt_skinny_kernel<of_four, 1, 4, 2, true>;
    return NULL;
}

/* The same for several matrices in one launch. */
template <class Format> static const void *qt_skinny_many_of(int token_tiles, int strips, int last)
{
    typedef typename skinny_format<Format>::of_four of_four;
#define KERNEL(Format, mt, strips, last)                                                           \
    (const void *)qt_skinny_many_kernel<Format, mt, strips, last>
    if (strips == 2 && last == 2)
        return token_tiles == 1 ? KERNEL(Format, 1, 2, 2) : KERNEL(Format, 2, 2, 2);
    if (strips == 2)
        return token_tiles == 1 ? KERNEL(Format, 1, 2, 1) : KERNEL(Format, 2, 2, 1);
    if constexpr (Format::WIDTH0 < 4)
        if (strips == 4 && token_tiles == 1)
            return last == strips ? KERNEL(of_four, 1, 4, 4) : KERNEL(of_four, 1, 4, 2);
#undef KERNEL
    return NULL;
}

#endif
