/*
 * The tile kernel for formats with planes (look-up tables, integers, minifloats): Y = X W^T for 17
 * tokens and more, sm_90a. Work distribution, pipeline and epilogue are in tile_common.cuh; this
 * file defines the contents of a stage, and the mainloop: dequantization to the register operand A
 * of wgmma.
 *
 *   stage:     X | packed planes | group scales | zero-points
 *
 * Group scales are applied in one of two ways:
 *
 *   exact      The accumulators are kept in units of the scale of the current group. At a new group
 *              they are multiplied by old scale / new scale, and after the last group by its scale:
 *              one multiplication per accumulator and group, without a second set of accumulators.
 *   ROUNDS     The weights are multiplied by their scales and rounded to FP16 (see
 *              QT_TILE_EXACT_TOKENS).
 *
 * Requires   X FP16, 16-byte aligned rows of a multiple of 64 columns (prepare.cu makes such X)
 * Traffic    packed bytes once per BM tokens, X once per 64 WGS rows (through L2), Y once; 8 bytes
 *            of partial sums through L2 for each output of a shared tile and thread block
 * Reference  qt_packed_decode, rounded where the kernel rounds, and an FP64 product; relative error
 *            <= 2.3e-4 with FP16 output
 */
#ifndef QT_KERNELS_CUDA_MATMUL_TILE_CUH
#define QT_KERNELS_CUDA_MATMUL_TILE_CUH

#include "kernels/cuda/common/accumulators.cuh"
#include "kernels/cuda/matmul/decode.cuh"
#include "kernels/cuda/matmul/tile_common.cuh"

/* ---- producers ------------------------------------------------------------------------------- */

/* Offset of the zero-points of a stage's first group in those of a strip. TMA boxes start at
 * multiples of 16 bytes, so copies start at this offset rounded down. */
template <class Format, int C>
static __device__ __forceinline__ int tile_zeros_at(const qt_tile_args &a, int k_stage)
{
    return (k_stage * C * 64 >> a.group_shift) * Format::ZEROS;
}

template <class Format, int WGS, int BM, int C, bool GATED>
struct tile_producer : tile_producer_base<qt_tile_args, BM, C> {
    using tile_producer_base<qt_tile_args, BM, C>::tile_producer_base;

    __device__ __forceinline__ void copy_weights(uint32_t dst, uint32_t bar) const
    {
        const qt_tile_args &a = this->a;
        const int strip = this->s.row_tile * 4 * WGS, k_stage = this->k_stage;
        uint32_t part = dst + BM * 128 * C;
        ptx_barrier_expect(bar, (uint32_t)(a.weight_tx + tile_x_bytes<BM, C>(a, this->s)));
#pragma unroll
        for (int i = 0; i < 3; i++)
            if (qt_plane_width<Format>(i)) {
                qt_copy_strips<GATED>(part, &a.plane[i],
                                      k_stage * (C * 16 * qt_plane_width<Format>(i)), strip, bar);
                part += WGS * 4 * C * 128 * qt_plane_width<Format>(i);
            }
        if (Format::GROUPED)
            qt_copy_strips<GATED>(part, &a.scales, (k_stage * C * 64 >> a.group_shift) * 4, strip,
                                  bar);
        if (Format::ZEROS && a.decode.zeros)
            qt_copy_strips<GATED>(dst + a.zeros_at, &a.zeros,
                                  tile_zeros_at<Format, C>(a, k_stage) / 16 * 2, strip, bar);
    }
};

/* ---- mainloop -------------------------------------------------------------------------------- */

/* Converts the accumulators from units of *unit to units of scale s. */
template <int BM>
static __device__ __forceinline__ void tile_rescale(tile_accumulators<BM> *d, float2 *unit,
                                                    float2 s)
{
    float2 f = make_float2(unit->x * ptx_reciprocal(s.x), unit->y * ptx_reciprocal(s.y));
    tile_wait_accumulators(d);
#pragma unroll
    for (int i = 0; i < BM / 2; i++)
        d->v[i] *= i & 2 ? f.y : f.x;
    *unit = s;
}

/* 2^e as FP16. */
static __device__ __forceinline__ __half2 tile_power(int e)
{
    return __half2half2(__ushort_as_half((unsigned short)((15 + e) << 10)));
}

/* Multiplies fragments by 2^ROUND_EXP2 and by the scales of rows g and g + 8; scales[0] for the
 * first 32 columns, scales[1] for the next 32. */
template <class Format, int STEPS>
static __device__ __forceinline__ void tile_scale_weights(uint32_t f[STEPS][4],
                                                          const __half2 scales[2])
{
#pragma unroll
    for (int i = 0; i < 4 * STEPS; i++) {
        const __half2 of_rows = scales[i / 8];
        __half2 v = *(const __half2 *)&f[i / 4][i % 4];
        if (Format::ROUND_EXP2)
            v = __hmul2(v, tile_power(Format::ROUND_EXP2));
        v = __hmul2(v, i % 2 ? __high2half2(of_rows) : __low2half2(of_rows));
        f[i / 4][i % 4] = *(const uint32_t *)&v;
    }
}

/* Offsets of the lane's words in a stage, relative to each section. The asm keeps them in
 * registers. */
template <class Format, int C> struct tile_offsets {
    uint32_t plane[3], scale, zero;

    __device__ __forceinline__ tile_offsets(const qt_tile_args &a)
    {
        const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
        for (int p = 0; p < 3; p++) {
            const int width = qt_plane_width<Format>(p);
            plane[p] = warp * (C * 128 * width) + lane * 4 * width;
            asm volatile("" : "+r"(plane[p]));
        }
        scale = warp * a.stage_groups * 32 + lane / 4 * 4;
        zero = warp * a.zero_pitch;
        asm volatile("" : "+r"(scale), "+r"(zero));
    }
};

/* Addresses of a warp's operands in a stage. */
template <class Format, int WGS, int BM, int C> struct tile_stage {
    const unsigned char *plane[3]; /* the lane's words in the first fragment block */
    const unsigned char *scale;    /* of the lane's two rows, first group */
    const unsigned char *zero;     /* start of the box */

    __device__ __forceinline__ tile_stage(const qt_tile_args &a,
                                          const tile_offsets<Format, C> &offsets, int stage)
    {
        const unsigned char *at = qt_smem + (a.ring_at + stage * a.stage_bytes + BM * 128 * C);
#pragma unroll
        for (int p = 0; p < 3; p++) {
            plane[p] = at + offsets.plane[p];
            at += WGS * 4 * C * 128 * qt_plane_width<Format>(p);
        }
        scale = at + offsets.scale;
        zero = qt_smem + (a.ring_at + stage * a.stage_bytes + a.zeros_at) + offsets.zero;
    }
    __device__ __forceinline__ void load(Format *words, const qt_tile_args &a, int block) const
    {
        const unsigned char *src[3];
#pragma unroll
        for (int p = 0; p < 3; p++)
            src[p] = plane[p] + block * 128 * qt_plane_width<Format>(p);
        words->load(src, a.decode);
    }
};

/*
 * Multiplies a tile over this thread block's part of k, in batches of STEPS k-steps: the fragments
 * of a batch are computed while the tensor cores multiply the previous batch. Packed words of a
 * stage are loaded 64 columns ahead of their use. Those of the next stage's first 64 columns are
 * loaded only after this stage's last products have been issued: waiting for the stage earlier, or
 * testing whether it has arrived, costs more than it saves. Returns the units of the accumulators
 * for rows g and g + 8.
 */
template <class Format, int WGS, int BM, int C, bool ROUNDS>
static __device__ __forceinline__ float2 tile_accumulate(tile_accumulators<BM> *d,
                                                         const qt_tile_args &a, qt_pipeline *r,
                                                         int begin, int end, const qt_lane &started)
{
    typedef tile_stage<Format, WGS, BM, C> stage;
    const int STEPS = qt_tile_steps(WGS, BM, C), BATCHES = 4 / STEPS;
    const tile_offsets<Format, C> offsets(a);
    const int lane = (int)threadIdx.x % 32;
    /* see qt_decode_tile4 */
    const qt_lane values = Format::TILE4 ? qt_lane{(uint32_t)lane * 4, {}, {}} : started;
    const int group_mask = (1 << a.group_shift) - 1;
    /* With groups of 32 channels, a batch of four k-steps has two groups. second, to_next: byte
     * offsets of the second scale of a batch, and of the next batch's scale that begins a group. */
    const bool narrow = STEPS == 4 && a.group_shift == QT_TILE_ROUNDED_GROUP_LOG2;
    const int second = ROUNDS && narrow ? 32 : 0, to_next = 32 + second;
    uint32_t frag[2][STEPS][4] = {}, release = 0;
    Format words, ahead;
    ptx_barrier_wait(r->full + 8 * r->stage, r->parity);
    stage(a, offsets, r->stage).load(&words, a, 0);
    float2 unit = make_float2(1, 1);
    const unsigned char *scale = stage(a, offsets, r->stage).scale;
    __half2 next_scale[2] = {}, weight_scale[2];
    weight_scale[0] = weight_scale[1] = tile_power(-Format::ROUND_EXP2); /* neutral */
    if (Format::GROUPED) {
        next_scale[0] = *(const __half2 *)scale;
        next_scale[1] = *(const __half2 *)(scale + second);
        if (!ROUNDS) {
            unit = qt_scale_unit(next_scale[0]);
        } else if (!a.row_scales) {
            weight_scale[0] = next_scale[0];
            weight_scale[1] = next_scale[1];
        }
    }
    uint32_t next_zeros = 0;
    if (Format::ZEROS) {
        next_zeros = qt_lane_zeros<Format>(a.decode, stage(a, offsets, r->stage).zero +
                                                         tile_zeros_at<Format, C>(a, begin) % 16);
        words.set_zeros(next_zeros);
    }
#pragma unroll 1
    for (int i = begin; i < end; i++) {
        const stage now(a, offsets, r->stage);
        uint32_t b = ptx_wgmma_b(ptx_shared(qt_smem) + a.ring_at + r->stage * a.stage_bytes);
        uint32_t used = r->empty + 8 * r->stage;
        qt_pipeline_advance(r, a.stages);
        scale = now.scale;
        const unsigned char *zero = now.zero;
        const __half2 this_scale[2] = {next_scale[0], next_scale[1]};
#pragma unroll
        for (int c = 0; c < C; c++) {
#pragma unroll
            for (int batch = 0; batch < BATCHES; batch++) {
                uint32_t(&f)[STEPS][4] = frag[(c * BATCHES + batch) & 1];
                const bool fresh = c == 0 && batch == 0; /* first batch of the stage: loaded
                                                            already */
                int k = (i * C + c) * 64 + batch * STEPS * 16;
                if (Format::ZEROS && (k & group_mask) == 0) {
                    zero += fresh ? 0 : Format::ZEROS;
                    words.set_zeros(fresh ? next_zeros : qt_lane_zeros<Format>(a.decode, zero));
                }
                if (batch == 0 && c < C - 1) {
                    ahead = words; /* keeps the zero-points of a group that continues */
                    now.load(&ahead, a, c + 1);
                }
#pragma unroll
                for (int s = 0; s < STEPS; s++) {
                    if (Format::ZEROS && ROUNDS && s == 2 && narrow) {
                        zero += Format::ZEROS;
                        words.set_zeros(qt_lane_zeros<Format>(a.decode, zero));
                    }
                    words.fragment(f[s], batch * STEPS + s, values);
                }
                if (Format::GROUPED && (k & group_mask) == 0) {
                    scale += fresh ? 0 : to_next;
                    const __half2 now_scale = fresh ? this_scale[0] : *(const __half2 *)scale;
                    if (!ROUNDS) {
                        tile_rescale(d, &unit, qt_scale_unit(now_scale));
                    } else if (!a.row_scales) {
                        weight_scale[0] = now_scale;
                        weight_scale[1] =
                            fresh ? this_scale[1] : *(const __half2 *)(scale + second);
                    }
                }
                if (ROUNDS)
                    tile_scale_weights<Format, STEPS>(f, weight_scale);
                ptx_wgmma_fence();
                ptx_wgmma<BM>::run(d->v, f, b + c * (BM * 8) + batch * STEPS * 2);
                ptx_wgmma_commit();
                /* Load what the next batch needs, while the tensor cores multiply this one. */
                if (batch == BATCHES - 1) {
                    if (c < C - 1) {
                        words = ahead;
                    } else if (i + 1 < end) {
                        const stage next(a, offsets, r->stage);
                        ptx_barrier_wait(r->full + 8 * r->stage, r->parity);
                        next.load(&words, a, 0);
                        if (Format::GROUPED) {
                            next_scale[0] = *(const __half2 *)next.scale;
                            next_scale[1] = *(const __half2 *)(next.scale + second);
                        }
                        if (Format::ZEROS)
                            next_zeros = qt_lane_zeros<Format>(
                                a.decode, next.zero + tile_zeros_at<Format, C>(a, i + 1) % 16);
                    }
                }
                ptx_wgmma_wait<1>();
                tile_keep_registers<STEPS>(frag[(c * BATCHES + batch + 1) & 1]);
                if (c == 0 && batch == 0 && release && lane == 0)
                    ptx_barrier_arrive(release);
            }
        }
        release = used;
    }
    tile_wait_accumulators(d);
    tile_keep_registers<STEPS>(frag[1]);
    if (release && lane == 0)
        ptx_barrier_arrive(release);
    return unit;
}

/* The Work of tile_consume. */
template <class Format, int WGS, int BM, int C, bool ROUNDS, bool IS_GATED> struct tile_consumer {
    typedef float sum;
    struct per_token {
    };
    /* AHEAD: for BF16; FP16 has no token factors, and loses nothing. */
    enum { AHEAD = 1, GATED = IS_GATED };
    const qt_tile_args &a;
    const qt_lane &lane;

    __device__ __forceinline__ void multiply(tile_accumulators<BM> *d, qt_pipeline *r,
                                             const tile_segment &s, int strip) const
    {
        const int at = qt_strip_at<GATED>(min(strip, a.strips - 1), a.strips);
        const __half2 *of_row = (const __half2 *)(a.scale + (size_t)at * a.pitch_groups * 16) +
                                (int)threadIdx.x % 32 / 4;
        __half2 row;
        if (!Format::GROUPED) /* loaded during the products: a later load costs 0.4 us */
            row = *of_row;
        float2 unit = tile_accumulate<Format, WGS, BM, C, ROUNDS>(d, a, r, s.k0, s.k1, lane);
        if (ROUNDS && a.row_scales)
            row = *of_row;
        if (!Format::GROUPED || (ROUNDS && a.row_scales))
            unit = __half22float2(row);
#pragma unroll
        for (int i = 0; i < BM / 2; i++)
            d->v[i] *= i & 2 ? unit.y : unit.x;
    }
    __device__ __forceinline__ int gated() const
    {
        return a.gated;
    }
    __device__ __forceinline__ void sync() const
    {
    }
    __device__ __forceinline__ per_token token(int) const
    {
        return {};
    }
    template <int N>
    __device__ __forceinline__ void epilogue(float4 out[N], const float4 v[N], const per_token *,
                                             int, int, int) const
    {
#pragma unroll
        for (int j = 0; j < N; j++)
            out[j] = v[j];
    }
    __device__ __forceinline__ static constexpr bool wide()
    {
        return false;
    }
};

/* ---- kernel ---------------------------------------------------------------------------------- */

/* Number of warpgroups that the launch bounds assume when they divide the registers. For few tokens
 * one more than exist: these kernels are 1 % faster on average with fewer registers, and a thread
 * block can start beside the last ones of prepare.cu. */
static __host__ __device__ constexpr int tile_bounds(int wgs, int tokens)
{
    return wgs + 1 + (wgs == 2 && tokens <= 96);
}

template <class Format, int WGS, int BM, int C, bool ROUNDS, bool GATED>
__global__ void __launch_bounds__(tile_bounds(WGS, BM) * 128, 1)
    qt_tile_kernel(const __grid_constant__ qt_tile_args a)
{
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    const qt_pipeline r = qt_pipeline_make(ptx_shared(qt_smem) + a.barriers_at);
    if (warp >= WGS * 4) {
        ptx_setmaxnreg_dec<TILE_COPY_REGISTERS>();
        tile_produce<WGS>(a, r, warp, tile_producer<Format, WGS, BM, C, GATED>(a));
    } else {
        ptx_setmaxnreg_inc<tile_registers(WGS, 1, TILE_COPY_REGISTERS,
                                          tile_launch_registers(tile_bounds(WGS, BM)))>();
        const qt_lane lane = qt_lane_start<Format>(qt_lane_value<Format>(&a.decode), WGS * 128);
        ptx_launch_dependents();
        qt_pipeline_wait_ready(WGS * 128);
        tile_consume<WGS, BM>(a, r, tile_consumer<Format, WGS, BM, C, ROUNDS, GATED>{a, lane});
    }
}

/* of_tile: the format used for BM tokens. With 32 tokens there are few products beside the look-ups
 * of 3-bit codes; look-ups in registers for half of the k-steps take 1.02 of the time. */
template <class Format, int BM> struct tile_format {
    typedef Format of_tile;
};
template <> struct tile_format<qt_decode_mixed3, 32> {
    typedef qt_decode_wide3 of_tile;
};

template <class Format, int WGS, int BM, int C, bool ROUNDS, bool GATED>
static const void *qt_tile_kernel_of()
{
    typedef typename tile_format<Format, BM>::of_tile of_tile;
    constexpr int bits = Format::WIDTH0 + Format::WIDTH1 + Format::WIDTH2;
    if constexpr (qt_tile_exists(bits, Format::GROUPED, Format::RARE, WGS, BM, ROUNDS) &&
                  (!GATED || qt_tile_gated(WGS, BM)))
        return (const void *)qt_tile_kernel<of_tile, WGS, BM, C, ROUNDS, GATED>;
    else
        return NULL;
}

/* The kernel of a format by `kind`, its index in QT_TILE_*_TABLE; NULL if it does not exist. */
template <class Format, bool GATED> static const void *qt_tile_of(int kind)
{
#define KERNEL(wgs, tokens, blocks, rounds)                                                        \
    qt_tile_kernel_of<Format, wgs, tokens, blocks, rounds, GATED>(),
#define KERNELS(TABLE)                                                                             \
    static const void *const kernels[QT_TILE_KINDS] = {TABLE(KERNEL)};                             \
    return kernels[kind];
    if constexpr (Format::LUT) {
        KERNELS(QT_TILE_LUT_TABLE)
    } else {
        KERNELS(QT_TILE_EXACT_TABLE)
    }
#undef KERNELS
#undef KERNEL
}

#endif
