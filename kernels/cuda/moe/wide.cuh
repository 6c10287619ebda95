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
#include "kernels/cuda/moe/wide_format.cuh"

enum {
    WIDE_WARPGROUP = MOE_BARRIERS, /* the first of two named barriers */
    /* Registers per thread. */
    WIDE_COPY_REGISTERS = 56,
    WIDE_REGISTERS = 224
};

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

/* [tokens / 8][4]: rows g and g + 8 of tokens 2t and 2t + 1. */
struct wide_sums {
    float v[WIDE_TOKENS / 2];
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

/* ---- epilogue ------------------------------------------------------------------------------- */

static __device__ __forceinline__ float wide_exp2(float x)
{
    float d;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}

/* g * sigmoid(g) */
static __device__ __forceinline__ float wide_silu(float g)
{
    return g * ptx_reciprocal(1 + wide_exp2(g * -1.44269504f));
}

template <class Format> struct wide_epilogue {
    const qt_moe_wide_args &a;
    const wide_unit &unit;
    wide_sums &sums;
    const int lane, warp, group, matrix; /* group: warpgroup */
    float2 factor, bias;                 /* of rows g and g + 8 */

    __device__ __forceinline__ wide_epilogue(const qt_moe_wide_args &args, const wide_unit &of,
                                             wide_sums &s)
        : a(args), unit(of), sums(s), lane((int)threadIdx.x % 32), warp((int)threadIdx.x / 32),
          group(warp / 4), matrix(wide_matrix(warp))
    {
        const float *b = unit.header.bias[matrix];
        const float f =
            unit.header.factor[matrix] * (Format::GROUPED ? qt_pow2(-Format::ROUND_EXP2) : 1);
        factor = make_float2(f, f);
        if (row_scales<Format>(a)) {
            const float2 of_rows = __half22float2(unit.scale[warp][lane / 4]);
            factor = make_float2(of_rows.x * f, of_rows.y * f);
        }
        bias.x = b && row() < a.n ? b[row()] : 0;
        bias.y = b && row() + 8 < a.n ? b[row() + 8] : 0;
    }
    __device__ __forceinline__ int row() const
    {
        return wide_strip(a, unit.header.tile, warp) * 16 + lane / 4;
    }
    /* Results of 8 tokens, number t: products with all factors, and the bias. */
    __device__ __forceinline__ float4 result(int t) const
    {
        const float *v = sums.v + 4 * t;
        float2 token = make_float2(1, 1);
        if (a.token_factor)
            token = *(const float2 *)&unit.token[t * 8 + lane % 4 * 2];
        return make_float4(
            fmaf(v[0], factor.x * token.x, bias.x), fmaf(v[1], factor.x * token.y, bias.x),
            fmaf(v[2], factor.y * token.x, bias.y), fmaf(v[3], factor.y * token.y, bias.y));
    }
    __device__ __forceinline__ float activate(float gate, float up) const
    {
        const bool silu = a.slope == 1 && a.cubic == 0 && a.offset == 0;
        return silu ? wide_silu(gate) * up : moe_gated(a, gate, up);
    }
    /*
     * Stores results of a warpgroup from number `token` on, 16 tokens per warp, rounded to 16 bits,
     * through shared memory: see tile_store. A line has 64 rows of a token; if `gated`, 32 rows of
     * a token, and those of the token 16 further on, which the last two warps have.
     */
    __device__ __forceinline__ void store(int token, const float4 v[2]) const
    {
        const int thread = (int)threadIdx.x % 128, chunk = thread % 8;
        const uint32_t at = ptx_shared(qt_smem) + a.results_at + group * QT_TILE_RESULT_BYTES;
        const uint32_t to =
            at + (lane / 16 * 8 + lane % 8) * 128 + ((warp % 4 * 2 + lane / 8 % 2) ^ lane % 8) * 16;
        const uint32_t from = at + thread / 8 * 128 + (chunk ^ thread / 8 % 8) * 16;
        const int w = group * 4 + (a.gated ? chunk / 2 % 2 : chunk / 2);
        const int first = wide_strip(a, unit.header.tile, w) * 16 + thread % 2 * 8;
        const int rows = max(0, a.n - first);
        const uint32_t four[4] = {
            qt_round_two(a.bf16, v[0].x, v[0].y), qt_round_two(a.bf16, v[0].z, v[0].w),
            qt_round_two(a.bf16, v[1].x, v[1].y), qt_round_two(a.bf16, v[1].z, v[1].w)};
        const uint4 line = ptx_transpose_16(WIDE_WARPGROUP + group, to, four, from);
        token += thread / 8 + (a.gated ? chunk / 4 * 16 : 0);
        ptx_store_halves((char *)a.y +
                             ((size_t)(unit.header.first + token) * a.y_pitch + first) * 2,
                         line, token < unit.header.rows ? rows : 0, a.whole_stores);
    }
    /*
     * The activation of gate times up. The warps of gate and of up exchange results: of 32 tokens
     * those of gate finish the first 16. `store` synchronizes the warpgroup after the loads from
     * `room`, so that the next results may be put there.
     */
    __device__ __forceinline__ void gated() const
    {
        float4 *const room = (float4 *)(qt_smem + a.exchange_at) + group * 256 + threadIdx.x % 64;
        float4 *const to = room + matrix * 128, *const from = room + (1 - matrix) * 128;
#pragma unroll
        for (int t = 0; t < WIDE_TOKENS / 8; t += 4) {
            if (t * 8 >= unit.header.rows)
                break;
            float4 v[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float4 low = result(t + j), high = result(t + 2 + j);
                v[j] = matrix ? high : low;
                to[j * 64] = matrix ? low : high;
            }
            ptx_named_barrier(WIDE_WARPGROUP + group, 128);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float4 other = from[j * 64], gate = matrix ? other : v[j],
                             up = matrix ? v[j] : other;
                v[j] = make_float4(activate(gate.x, up.x), activate(gate.y, up.y),
                                   activate(gate.z, up.z), activate(gate.w, up.w));
            }
            store(t * 8, v);
        }
    }
    /* Up alone: stores FP32. Gate alone: the activation times the results of up. */
    __device__ __forceinline__ float4 alone(int t, float4 v) const
    {
        float *const of = &v.x;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int token = t * 8 + lane % 4 * 2 + i % 2, at = row() + i / 2 * 8;
            const size_t to = (size_t)(unit.header.first + token) * a.y_pitch + at;
            if (token >= unit.header.rows || at >= a.n)
                continue;
            if (a.up)
                of[i] = moe_gated(a, of[i], a.up[to]);
            else
                ((float *)a.y)[to] = of[i];
        }
        return v;
    }
    __device__ __forceinline__ void run() const
    {
        if (a.gated) {
            gated();
            return;
        }
#pragma unroll
        for (int t = 0; t < WIDE_TOKENS / 8; t += 2) {
            if (t * 8 >= unit.header.rows)
                break;
            float4 v[2] = {result(t), result(t + 1)};
            if (Format::TABLE_BYTES > 0 && (a.up || !a.rounded)) {
                v[0] = alone(t, v[0]);
                v[1] = alone(t + 1, v[1]);
                if (!a.up)
                    continue;
            }
            store(t * 8, v);
        }
    }
};

/* ---- kernel --------------------------------------------------------------------------------- */

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
        const wide_unit &of = *wide_unit_at(a, number);
        wide_sums sums = {};
        tables.start(&of.header);
        const qt_lane &table = matrix ? tables.lane[1] : tables.lane[0];
        switch (max(64, wide_columns(of.header.rows))) {
#define COLUMNS(N)                                                                                 \
    case N:                                                                                        \
        wide_mainloop<Format, N>(a, table, &sums, &r).run();                                       \
        break;
            COLUMNS(64)
            COLUMNS(96)
            COLUMNS(128)
            COLUMNS(160)
            COLUMNS(192)
        default:
            wide_mainloop<Format, 256>(a, table, &sums, &r).run();
#undef COLUMNS
        }
        wide_epilogue<Format>(a, of, sums).run();
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
