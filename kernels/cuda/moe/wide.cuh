/*
 * The grouped product for experts of many tokens, sm_90a: the products of product.cuh by wgmma.
 *
 *   grid       one thread block per multiprocessor; units as in product.cuh
 *   unit       up to 256 tokens of one expert, and 64 rows of gate and of up, or 128 of one matrix
 *   block      two consumer warpgroups, each with 32 rows of gate and of up, or 64 of one matrix; a
 *              producer warpgroup
 *   smem       [ look-up table | stages: X | stages: weights | results | exchange | units |
 *                mbarriers ]
 *
 *   producers:  packed planes --bulk copies--+
 *               X            --TMA-----------+--> a stage: 64 columns of k
 *               scales       --cp.async------+
 *   consumers:  packed words --> registers --> * scale, rounded to FP16 --> A fragments -+
 *               X (shared memory, 128-byte swizzle) ------------------- B ---------------+--> wgmma
 *
 * A unit multiplies 64, 96, 128, 160, 192 or 256 columns of B. Those beyond the tokens of its item
 * hold other positions, whose results are not stored. The route kernel makes items of a multiple of
 * 32 tokens, the last of an expert excepted.
 *
 * Requires   X FP16 in the order of positions, rows of a multiple of 16 bytes
 * Traffic    packed bytes once per item (each further tile of the same expert from L2), X once per
 *            unit through L2
 */
#ifndef QT_KERNELS_CUDA_MOE_WIDE_CUH
#define QT_KERNELS_CUDA_MOE_WIDE_CUH

#include "kernels/cuda/common/token_scale.cuh"
#include "kernels/cuda/moe/wide_copy.cuh"
#include "kernels/cuda/moe/wide_epilogue.cuh"
#include "kernels/cuda/moe/wide_format.cuh"

/* ---- mainloop ------------------------------------------------------------------------------- */

/* A lane reads this of a strip's block of 64 columns. */
template <class Format> struct wide_block {
    Format words;
    __half2 scale[2];  /* of the first and the last 32 columns */
    uint32_t zeros[2]; /* as scale */

    /* weights: of the warp in the stage; second: bytes from the first scale to the second. */
    __device__ __forceinline__ void load(const qt_moe_wide_args &a, const unsigned char *weights,
                                         uint32_t second)
    {
        const int lane = (int)threadIdx.x % 32;
        const unsigned char *src[3], *at = weights;
#pragma unroll
        for (int p = 0; p < 3; p++) {
            src[p] = at + lane * qt_lane_width<Format>(p);
            at += 32 * qt_lane_width<Format>(p);
        }
        words.load(src, a.decode);
#pragma unroll
        for (int i = 0; i < 2 && Format::GROUPED; i++) {
            scale[i] = *(const __half2 *)(at + i * second + lane / 4 * 4);
            if (Format::ZEROS)
                zeros[i] = qt_lane_zeros<Format>(a.decode, at + a.slot_groups * 32 +
                                                               i * second / 32 * Format::ZEROS);
        }
    }
    /* The fragments of k-steps FIRST to FIRST + STEPS - 1. */
    template <int FIRST, int STEPS>
    __device__ __forceinline__ void fragments(uint32_t (&f)[STEPS][4], const qt_lane &lane)
    {
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            const int step = FIRST + s;
            if (Format::ZEROS && step % 2 == 0)
                words.set_zeros(zeros[step / 2]);
            words.fragment(f[s], step, lane);
            if (Format::GROUPED)
                wide_scale<Format>(*(uint32_t(*)[1][4]) & f[s], scale[step / 2]);
        }
    }
};

/*
 * Multiplies a unit by N columns of B. The first stage has arrived. As in tile_accumulate, the
 * fragments of a stage are computed while the products of the stage before run. Stages take turns
 * with two sets of fragments.
 */
template <class Format, int N> struct wide_mainloop {
    const qt_moe_wide_args &a;
    const qt_lane &table;
    wide_sums *sums;
    qt_pipeline *r;
    const unsigned char *weights; /* of the warp in the first stage */
    uint32_t x, release;          /* release: mbarrier of the stage before; 0: none */
    uint32_t second;              /* see wide_block; the asm keeps it in a register */
    wide_block<Format> next;

    __device__ __forceinline__ wide_mainloop(const qt_moe_wide_args &args, const qt_lane &lane,
                                             wide_sums *s, qt_pipeline *ring)
        : a(args), table(lane), sums(s), r(ring),
          weights(qt_smem + args.weights_at + threadIdx.x / 32 * args.warp_bytes),
          x(ptx_shared(qt_smem) + args.ring_at), release(0),
          second((uint32_t)(args.slot_groups - 1) * 32)
    {
        asm volatile("" : "+r"(second));
        next.load(a, weights + r->stage * a.stage_bytes, second);
    }
    __device__ __forceinline__ void release_stage() const
    {
        if (release && threadIdx.x % 32 == 0)
            ptx_barrier_arrive(release);
    }
    /* Multiplies k-steps FIRST to FIRST + STEPS - 1 of a stage. x_at: of X in the stage. */
    template <int FIRST, int STEPS>
    __device__ __forceinline__ void
    batch(uint32_t (&now)[STEPS][4], const uint32_t (&before)[STEPS][4], uint32_t x_at, bool more)
    {
        next.template fragments<FIRST>(now, table);
        ptx_wgmma_fence();
        ptx_wgmma<N>::run(sums->v, now, x_at + FIRST * 2);
        ptx_wgmma_commit();
        if (STEPS == 4) { /* of three stages the next one may be full only when this one is empty */
            ptx_wgmma_wait<1>();
            release_stage();
        }
        if (FIRST + STEPS == 4 && more) {
            ptx_barrier_wait(r->full + 8 * r->stage, r->parity);
            next.load(a, weights + r->stage * a.stage_bytes, second);
        }
        ptx_wgmma_wait<1>();
        tile_keep_registers<STEPS>(before);
    }
    /* Multiplies a stage, in batches of STEPS k-steps that take turns with two sets of fragments;
     * `more`: another one follows. */
    template <int STEPS>
    __device__ __forceinline__ void stage(uint32_t (&one)[STEPS][4], uint32_t (&two)[STEPS][4],
                                          bool more)
    {
        const uint32_t x_at = ptx_wgmma_b(x + r->stage * a.x_bytes);
        const uint32_t used = r->empty + 8 * r->stage;
        qt_pipeline_advance(r, a.stages);
        batch<0>(one, two, x_at, more);
        if (STEPS == 2)
            release_stage();
        release = used;
        if constexpr (STEPS == 2)
            batch<2>(two, one, x_at, more);
    }
    __device__ __forceinline__ void run()
    {
        /* The assembler gives each of the instances of this function registers of its own for half
         * of the fragments: there are no more. */
        constexpr int STEPS = N > 64 ? 2 : 4;
        uint32_t frag[2][STEPS][4] = {};
        int left = a.slots;
#pragma unroll 1
        for (;;) {
            stage(frag[0], frag[1], left > 1);
            if (--left == 0)
                break;
            if constexpr (STEPS == 4) {
                stage(frag[1], frag[0], left > 1);
                if (--left == 0)
                    break;
            }
        }
        ptx_wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            asm volatile("" : "+f"(sums->v[i])::"memory");
        tile_keep_registers<STEPS>(frag[0]);
        tile_keep_registers<STEPS>(frag[1]);
        release_stage();
    }
};

/* ---- kernel --------------------------------------------------------------------------------- */

/* The factors of rows g and g + 8 of the warp's strip. */
template <class Format>
static __device__ __forceinline__ float2 wide_factors(const qt_moe_wide_args &a,
                                                      const wide_packed_unit &unit)
{
    const int warp = (int)threadIdx.x / 32;
    const float f = unit.header.factor[wide_matrix(warp)] *
                    (Format::GROUPED ? qt_pow2(-Format::ROUND_EXP2) : 1);
    if (!row_scales<Format>(a))
        return make_float2(f, f);
    const float2 of_rows = __half22float2(unit.scale[warp][threadIdx.x % 32 / 4]);
    return make_float2(of_rows.x * f, of_rows.y * f);
}

template <class Format>
static __device__ __forceinline__ void wide_consume(const qt_moe_wide_args &a, qt_pipeline r,
                                                    int units)
{
    moe_tables<Format> tables;
    const int matrix = wide_matrix((int)threadIdx.x / 32);
    int number = 0;
#pragma unroll 1
    for (int unit = (int)blockIdx.x; unit < units; unit += (int)gridDim.x, number++) {
        ptx_barrier_wait(r.full + 8 * r.stage, r.parity);
        const wide_packed_unit &of = *wide_unit_at(a, number);
        wide_sums sums = {};
        tables.start(&of.header);
        const qt_lane &table = matrix ? tables.lane[1] : tables.lane[0];
        wide_by_size(of.header.rows, [&](auto size) {
            wide_mainloop<Format, decltype(size)::COLUMNS>(a, table, &sums, &r).run();
        });
        wide_epilogue<true, (Format::TABLE_BYTES > 0)>(a, of, wide_factors<Format>(a, of), sums)
            .run();
        __syncwarp(); /* all lanes have read the unit when lane 0 releases the next stage */
    }
}

template <class Format>
static __device__ __forceinline__ void wide_produce(const qt_moe_wide_args &a, const qt_pipeline &r,
                                                    int warp)
{
    /* Weights, and items if the sort has ended, do not depend on the kernel in front. */
    if (warp == 1 || !a.early || (warp == 2 && a.token_factor))
        ptx_wait_previous();
    const int units = moe_items(a) * a.row_tiles;
    if (warp == 0 && ptx_elect())
        wide_produce_planes<Format>(a, r, units);
    else if (warp == 1 && ptx_elect())
        wide_produce_x(a, r, units);
    else if (warp == 2)
        wide_produce_scales<Format>(a, r, units);
}

template <class Format>
__global__ void __launch_bounds__(QT_MOE_WIDE_THREADS, 1)
    qt_moe_wide_kernel(const __grid_constant__ qt_moe_wide_args a)
{
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    const qt_pipeline r = qt_pipeline_make(ptx_shared(qt_smem) + a.barriers_at);
    if (threadIdx.x == 0) {
        qt_pipeline_init_barriers(r.full, 0, WIDE_ARRIVALS);
        qt_pipeline_init_barriers(r.empty, 0, QT_MOE_WARPS);
        ptx_barrier_init_fence();
    }
    __syncthreads();
    if (warp >= QT_MOE_WARPS) {
        ptx_setmaxnreg_dec<WIDE_COPY_REGISTERS>();
        wide_produce<Format>(a, r, warp - QT_MOE_WARPS);
    } else {
        ptx_setmaxnreg_inc<WIDE_REGISTERS>();
        ptx_wait_previous();
        ptx_launch_dependents();
        wide_consume<Format>(a, r, moe_items(a) * a.row_tiles);
    }
}

#endif
