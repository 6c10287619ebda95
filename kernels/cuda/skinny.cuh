/*
 * The skinny kernel (skinny_ring.cuh) for all formats but mix24: what is in a stage, and how it
 * becomes products.
 *
 *   a stage:  X | packed planes | group scales | zero points
 *
 * The template: Format how codes are decoded; MT token tiles of 8 (m <= 8 MT); STRIPS.
 *
 * Requires    compute capability 9.0; X FP16, k a multiple of 64, 16-byte aligned (prepare.cu makes
 *             such)
 * Moves       packed bytes once; X once per block and tile (through L2); Y once
 * Oracle      qt_packed_decode and an FP64 product; relative error <= 2.3e-4 with FP16 output
 */
#ifndef QT_CUDA_SKINNY_CUH
#define QT_CUDA_SKINNY_CUH

#include "kernels/cuda/skinny_ring.cuh"
#include "kernels/cuda/slot.cuh"

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
template <class Format, int STRIPS> struct skinny_places {
    int words[STRIPS][3]; /* of the first block */
    int scales[STRIPS];   /* of its two rows, first group */
    int zeros[STRIPS];    /* first group */
    uint32_t x[2];        /* for ldmatrix: of the blocks, the first half, token tile 0 */

    __device__ __forceinline__ skinny_places(const qt_skinny_args &a, const skinny_warp &w)
    {
        const int lane = (int)threadIdx.x % 32;
        const int group_at = a.stage_groups > 1 ? w.slot * a.slot_groups * 32 : 0;
#pragma unroll
        for (int b = 0; b < 2; b++)
            x[b] = skinny_x_at(a, 2 * w.slot + b, lane % 8, lane / 8);
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

/* The slot of a stage at offset `stage`. */
template <class Format, int MT, int STRIPS>
static __device__ __forceinline__ void
skinny_slot(qt_sums<MT, STRIPS> *total, const qt_skinny_args &a,
            const skinny_places<Format, STRIPS> &from, int stage, uint32_t lane_bytes)
{
    const unsigned char *base = qt_smem + stage;
    const unsigned char *scales[STRIPS];
#pragma unroll
    for (int u = 0; u < STRIPS; u++)
        scales[u] = base + from.scales[u];
    const uint32_t x[2] = {ptx_shared(base) + from.x[0], ptx_shared(base) + from.x[1]};
    qt_slot_multiply<Format, MT, STRIPS>(
        total, a.decode,
        [&](const unsigned char *src[3], int u, int b) {
#pragma unroll
            for (int i = 0; i < 3; i++)
                src[i] = base + from.words[u][i] + b * 128 * qt_plane_width<Format>(i);
        },
        [&](int t, int b, int half) { return (x[b] ^ half * 64) + t * 1024; }, scales,
        [&](int u, int group) {
            return qt_lane_zeros<Format>(a.decode, base + from.zeros[u] + group * Format::ZEROS);
        },
        a.slot_groups, true, lane_bytes);
}

/* For skinny_multiply_all. */
template <class Format, int MT, int STRIPS> struct skinny_work {
    const qt_skinny_args &a;
    const skinny_places<Format, STRIPS> from;
    const uint32_t lane_bytes;

    __device__ __forceinline__ skinny_work(const qt_skinny_args &args, const skinny_warp &w)
        : a(args), from(args, w), lane_bytes(threadIdx.x % 32 * 4)
    {
    }
    __device__ __forceinline__ void begin_tile(int)
    {
    }
    __device__ __forceinline__ void slot(qt_sums<MT, STRIPS> *sums, int stage)
    {
        skinny_slot<Format, MT, STRIPS>(sums, a, from, stage, lane_bytes);
    }
    __device__ __forceinline__ void meet(int threads) const
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

/* Row scales of the block's strips, in stored order. */
static __device__ __forceinline__ void skinny_load_row_scales(const qt_skinny_args &a, int threads)
{
    __half *dst = (__half *)(qt_smem + a.tail_at);
    const int first = (int)blockIdx.x * a.strips_cta;
    for (int i = (int)threadIdx.x; i < a.strips_cta * 16; i += threads)
        dst[i] = a.scale[(size_t)min(first + i / 16, a.strips - 1) * a.pitch_groups * 16 + i % 16];
}

/* ---- the kernel --------------------------------------------------------------------------------
 */

template <class Format, int MT, int STRIPS>
__global__ void __launch_bounds__(QT_SKINNY_MAX_WARPS * 32 + QT_RING_COPIERS, 1)
    qt_skinny_kernel(const __grid_constant__ qt_skinny_args a)
{
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    const int threads = (int)blockDim.x - QT_RING_COPIERS; /* that multiply */
    const qt_ring r = qt_ring_open(ptx_shared(qt_smem) + a.barriers_at);
    if (warp * 32 >= threads) {
        qt_ring_bring(a, r, warp * 32 == threads, threads, a.arrivals, skinny_copies<Format>(a));
        return;
    }
    Format::fill_table(&a.decode, Format::TABLE_BYTES ? qt_lane_value(&a.decode) : __half(),
                       threads);
    if (!Format::GROUPED)
        skinny_load_row_scales(a, threads);
    ptx_launch_dependents();
    const skinny_warp w = skinny_warp_open(a, warp, threads);
    skinny_multiply_all<MT, STRIPS>(a, r, w, threads, skinny_work<Format, MT, STRIPS>(a, w));
}

/* Of a format: NULL if there is none. Four strips a warp spare reads of X, which up to 8 tokens of
 * codes of 2 and 3 bits wait for (skinny_plan.cc). */
template <class Format> static const void *qt_skinny_of(int token_tiles, int strips)
{
#define KERNEL(mt, strips) (const void *)qt_skinny_kernel<Format, mt, strips>
    static const void *const kernels[2][2] = {{KERNEL(1, 1), KERNEL(1, 2)},
                                              {KERNEL(2, 1), KERNEL(2, 2)}};
    if (strips < 4)
        return kernels[token_tiles - 1][strips - 1];
    if constexpr (Format::TABLE_BYTES > 0 && Format::WIDTH0 < 4)
        return token_tiles == 1 ? KERNEL(1, 4) : NULL;
    return NULL;
#undef KERNEL
}

#endif
