/*
 * The skinny kernel (skinny_ring.cuh) for all formats but mix24: what is in a stage, and how it
 * becomes products.
 *
 *   a stage:  X | packed planes | group scales | zero points
 *
 * Few tokens of BF16 are converted by each block for itself, which is done when the first weights
 * come: no kernel before this one has to. Shared memory has X of all stages then, as in stages, and
 *
 *     tops            U32 [QT_SKINNY_TOPS], of each warp that converts, then
 *                     FP32 [m], what results of a token are multiplied by
 *
 * The template: Format how codes are decoded; MT, STRIPS and LAST as in skinny_ring.cuh.
 *
 * Requires    compute capability 9.0; X 16-byte aligned, FP16, k a multiple of 64 (prepare.cu makes
 *             such), or BF16, a multiple of 256, and converters
 * Moves       packed bytes once; X once per block and tile (through L2); Y once
 * Oracle      qt_packed_decode and an FP64 product; relative error <= 2.3e-4 with FP16 output
 */
#ifndef QT_KERNELS_CUDA_MATMUL_SKINNY_CUH
#define QT_KERNELS_CUDA_MATMUL_SKINNY_CUH

#include "kernels/cuda/common/slot.cuh"
#include "kernels/cuda/common/token_scale.cuh"
#include "kernels/cuda/matmul/skinny_ring.cuh"

template <class Format> struct skinny_copies : skinny_source<qt_skinny_args> {
    using skinny_source::skinny_source;

    __device__ __forceinline__ void copy_weights(uint32_t dst, uint32_t bar) const
    {
        const int group = k_stage * QT_SKINNY_BLOCKS * 64 >> a.group_shift;
        ptx_barrier_expect(bar, (uint32_t)a.stage_tx);
#pragma unroll
        for (int p = 0; p < 3; p++)
            if (qt_plane_width<Format>(p))
                ptx_copy_box(dst + a.planes_at[p], &a.plane[p],
                             k_stage * (QT_SKINNY_BLOCKS * 16 * qt_plane_width<Format>(p)), strip(),
                             bar);
        if (Format::GROUPED)
            ptx_copy_box(dst + a.scales_at, &a.scales, group * 4, strip(), bar);
        if (Format::ZEROS && a.decode.zeros)
            ptx_copy_box(dst + a.zeros_at, &a.zeros, group * (Format::ZEROS / 8), strip(), bar);
    }
};

/* ---- products ----------------------------------------------------------------------------------
 */

/* Where a lane of a warp reads in a stage: in the warp's slot of it. */
template <class Format, int MT, int STRIPS> struct skinny_places {
    int words[STRIPS][3]; /* of the first block */
    int scales[STRIPS];   /* of its two rows, first group */
    int zeros[STRIPS];    /* first group */
    /* For ldmatrix: of the blocks, token tile 0; of one tile each half. With two tiles of tokens
     * that takes nf4 up to 1.02 of the time, others 0.99. */
    uint32_t x[2][2 / MT];

    __device__ __forceinline__ skinny_places(const qt_skinny_args &a, const skinny_warp &w)
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

/* The slot of a stage at offset `stage`, of the first N strips. */
template <class Format, int MT, int N, int STRIPS>
static __device__ __forceinline__ void
skinny_slot(qt_accumulators<MT, N> *total, const qt_skinny_args &a,
            const skinny_places<Format, MT, STRIPS> &from, int stage, int x_at, const qt_lane &lane)
{
    const unsigned char *base = qt_smem + stage;
    const unsigned char *scales[N];
#pragma unroll
    for (int u = 0; u < N; u++)
        scales[u] = base + from.scales[u];
    const uint32_t x0 = ptx_shared(qt_smem) + x_at;
    qt_slot_multiply<Format, MT, N>(
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

/* For skinny_multiply_all. */
template <class Format, int MT, int STRIPS> struct skinny_work : skinny_float_sums {
    const qt_skinny_args &a;
    const skinny_places<Format, MT, STRIPS> from;
    const qt_lane lane;

    __device__ __forceinline__ skinny_work(const qt_skinny_args &args, const skinny_warp &w,
                                           const qt_lane &l)
        : a(args), from(args, w), lane(l)
    {
    }
    __device__ __forceinline__ void begin_tile(int)
    {
    }
    template <int N>
    __device__ __forceinline__ void slot(qt_accumulators<MT, N> *sums, int stage, int x_at)
    {
        skinny_slot<Format>(sums, a, from, stage, x_at, lane);
    }
    __device__ __forceinline__ void meet(int threads, int) const
    {
        ptx_named_barrier(SKINNY_MEET, threads);
    }
    __device__ __forceinline__ const float *added(int) const
    {
        return NULL;
    }
    __device__ __forceinline__ const __half *row_scales(int tile) const
    {
        return Format::GROUPED ? NULL
                               : (const __half *)(qt_smem + a.tail_at) + tile * a.tile_strips * 16;
    }
};

/* ---- X that a block converts -------------------------------------------------------------------
 *
 * By warps of its own, `warps` of them a token: 256 columns at a time, a lane 8. Most of the time
 * that this takes is for instructions that were never run before: so there are few of them.
 */

/* One for all kernels. By value: through a reference a kernel's arguments come from memory, not
 * from the constant cache. */
static __device__ __noinline__ void skinny_convert_x(const uint4 *x, int stages, int warps, int m,
                                                     int x_rows, int pitch, unsigned char *to,
                                                     int *tops, int threads)
{
    const int lane = (int)threadIdx.x % 32;
    float *factors = (float *)(tops + QT_SKINNY_TOPS);
    int first = (int)threadIdx.x / 32 - (threads + QT_RING_COPIERS) / 32, token = 0; /* stage */
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

/* ---- the kernel --------------------------------------------------------------------------------
 */

template <class Format, int MT, int STRIPS, int LAST>
__global__ void __launch_bounds__(32 * qt_skinny_warps(MT, STRIPS), 1)
    qt_skinny_kernel(const __grid_constant__ qt_skinny_args a)
{
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    const int threads = (int)blockDim.x - QT_RING_COPIERS - a.converters * 32; /* that multiply */
    const qt_ring r = qt_ring_open(ptx_shared(qt_smem) + a.barriers_at);
    if (warp * 32 >= threads + QT_RING_COPIERS) {
        ptx_launch_dependents();
        if (a.dependent)
            ptx_wait_previous();
        skinny_convert_x((const uint4 *)a.kept_x, a.k_stages, a.token_converters, a.m, a.x_rows,
                         a.kept_pitch, qt_smem + a.kept_at, (int *)(qt_smem + a.tops_at), threads);
        return;
    }
    if (warp * 32 >= threads) {
        qt_ring_bring(a, r, warp * 32 == threads, threads, a.arrivals, skinny_copies<Format>(a));
        return;
    }
    qt_lane lane = qt_lane_start<Format>(qt_lane_value<Format>(&a.decode), threads);
    asm volatile("" : "+r"(lane.bytes)); /* computed once */
    if (!Format::GROUPED)
        skinny_load_row_scales(a, (__half *)(qt_smem + a.tail_at), a.scale, a.pitch_groups,
                               threads);
    ptx_launch_dependents();
    const skinny_warp w = skinny_warp_open(a, warp, threads);
    if (a.converters)
        ptx_named_barrier(SKINNY_X, threads + a.converters * 32);
    skinny_multiply_all<MT, STRIPS, LAST>(a, r, w, threads,
                                          skinny_work<Format, MT, STRIPS>(a, w, lane));
}

/* How codes are decoded with a small table: a large one takes too long to fill, and too much room,
 * for blocks of few strips (skinny_plan.cc); and by warps of four strips. */
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

#define KERNEL(Format, mt, strips, last) (const void *)qt_skinny_kernel<Format, mt, strips, last>

/* Two strips a warp. HALF: there are kernels whose last warp has half of them. */
template <class Format, bool HALF>
static const void *skinny_of_two_strips(int token_tiles, int last)
{
    if constexpr (HALF)
        if (last == 1)
            return token_tiles == 1 ? KERNEL(Format, 1, 2, 1) : KERNEL(Format, 2, 2, 1);
    return token_tiles == 1 ? KERNEL(Format, 1, 2, 2) : KERNEL(Format, 2, 2, 2);
}

/*
 * Of a format: NULL if there is none. Four strips a warp spare reads of X, which up to 8 tokens of
 * codes of 2 and 3 bits wait for (skinny_plan.cc). Half of its strips for a last warp spares
 * decoding, which those of 8 bits do not wait for; of rare formats there is no kernel for it. With
 * one strip a warp the table is small.
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

#endif
