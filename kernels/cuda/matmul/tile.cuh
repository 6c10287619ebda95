/*
 * The tile kernel (tile_ring.cuh) for formats of planes: tables of pairs, integers, bit fields.
 *
 * Group scales: sums are kept in units of the scale of the current group. At a new group they are
 * multiplied by old scale / new scale, at the end by the last: one multiplication per sum and
 * group, and no second set of sums in registers. Or weights are multiplied by their scales, and
 * rounded (QT_TILE_EXACT_TOKENS).
 *
 * Requires    compute capability 9.0; X FP16, 16-byte aligned rows (prepare.cu makes such)
 * Moves       packed bytes once per BM tokens, X once per 64 WGS rows (through L2), Y once; 8 bytes
 *             of sums through L2 for each output of a shared tile and block
 * Oracle      qt_packed_decode, rounded where the kernel rounds, and an FP64 product; with FP16
 *             output relative error <= 2.3e-4
 */
#ifndef QT_KERNELS_CUDA_MATMUL_TILE_CUH
#define QT_KERNELS_CUDA_MATMUL_TILE_CUH

#include "kernels/cuda/common/accumulators.cuh"
#include "kernels/cuda/matmul/tile_ring.cuh"

/* ---- copies ------------------------------------------------------------------------------------
 */

/* Where the zero points of a stage's first group are in those of a row of strips. Boxes of them
 * begin at multiples of 16 bytes. */
template <class Format, int C>
static __device__ __forceinline__ int tile_zeros_at(const qt_tile_args &a, int k_stage)
{
    return (k_stage * C * 64 >> a.group_shift) * Format::ZEROS;
}

template <class Format, int WGS, int BM, int C>
struct tile_copies : tile_source<qt_tile_args, BM, C> {
    using tile_source<qt_tile_args, BM, C>::tile_source;

    __device__ __forceinline__ void copy_weights(uint32_t dst, uint32_t bar) const
    {
        const qt_tile_args &a = this->a;
        const int strip = this->s.row_tile * 4 * WGS, k_stage = this->k_stage;
        uint32_t part = dst + BM * 128 * C;
        ptx_barrier_expect(bar, (uint32_t)(a.weight_tx + tile_x_bytes<BM, C>(a, this->s)));
#pragma unroll
        for (int i = 0; i < 3; i++)
            if (qt_plane_width<Format>(i)) {
                ptx_copy_box(part, &a.plane[i], k_stage * (C * 16 * qt_plane_width<Format>(i)),
                             strip, bar);
                part += WGS * 4 * C * 128 * qt_plane_width<Format>(i);
            }
        if (Format::GROUPED)
            ptx_copy_box(part, &a.scales, (k_stage * C * 64 >> a.group_shift) * 4, strip, bar);
        if (Format::ZEROS && a.decode.zeros)
            ptx_copy_box(dst + a.zeros_at, &a.zeros, tile_zeros_at<Format, C>(a, k_stage) / 16 * 2,
                         strip, bar);
    }
};

/* ---- products ----------------------------------------------------------------------------------
 */

/* Sums in units of *unit -> in units of a new scale. */
template <int BM>
static __device__ __forceinline__ void tile_change_unit(tile_sums<BM> *d, float2 *unit, float2 s)
{
    float2 f = make_float2(unit->x * ptx_reciprocal(s.x), unit->y * ptx_reciprocal(s.y));
    tile_settle(d);
#pragma unroll
    for (int i = 0; i < BM / 2; i++)
        d->v[i] *= i & 2 ? f.y : f.x;
    *unit = s;
}

/* 2^e. */
static __device__ __forceinline__ __half2 tile_power(int e)
{
    return __half2half2(__ushort_as_half((unsigned short)((15 + e) << 10)));
}

/* Fragments, times 2^ROUND_EXP2, of rows g and g + 8 times their scales: those of 32 channels, and
 * of 32 more. */
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

/* Where a lane's words are in a stage, from where they begin: computed once, and kept. */
template <class Format, int C> struct tile_places {
    uint32_t plane[3], scale, zero;

    __device__ __forceinline__ tile_places(const qt_tile_args &a)
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

/* What a warp reads of a stage. */
template <class Format, int WGS, int BM, int C> struct tile_stage {
    const unsigned char *plane[3]; /* the lane's words of the stage's first block */
    const unsigned char *scale;    /* of its two rows, first group */
    const unsigned char *zero;     /* the box */

    __device__ __forceinline__ tile_stage(const qt_tile_args &a,
                                          const tile_places<Format, C> &places, int stage)
    {
        const unsigned char *at = qt_smem + (a.ring_at + stage * a.stage_bytes + BM * 128 * C);
#pragma unroll
        for (int p = 0; p < 3; p++) {
            plane[p] = at + places.plane[p];
            at += WGS * 4 * C * 128 * qt_plane_width<Format>(p);
        }
        scale = at + places.scale;
        zero = qt_smem + (a.ring_at + stage * a.stage_bytes + a.zeros_at) + places.zero;
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
 * The products of a tile over this block's part of k, in batches of STEPS k-steps: the fragments of
 * a batch are looked up while the batch before is multiplied. Packed words of a stage are read one
 * block of k ahead of their use; those of the next stage's first block only once this stage's last
 * products are on their way: to wait for it earlier, or to ask whether it is there, costs more than
 * it saves.
 */
template <class Format, int WGS, int BM, int C, bool ROUNDS>
static __device__ __forceinline__ float2 tile_accumulate(tile_sums<BM> *d, const qt_tile_args &a,
                                                         qt_ring *r, int begin, int end,
                                                         const qt_lane &started)
{
    typedef tile_stage<Format, WGS, BM, C> stage;
    const int STEPS = qt_tile_steps(WGS, BM, C), BATCHES = 4 / STEPS;
    const tile_places<Format, C> places(a);
    const int lane = (int)threadIdx.x % 32;
    /* (qt_decode_tile4) */
    const qt_lane values = Format::TILE4 ? qt_lane{(uint32_t)lane * 4, {}, {}} : started;
    const int group_mask = (1 << a.group_shift) - 1;
    /* Of 32 channels a batch of four steps has two groups. Where the second scale of a batch is,
     * and the next batch's that begins a group, in bytes. */
    const bool narrow = STEPS == 4 && a.group_shift == QT_TILE_ROUNDED_GROUP_LOG2;
    const int second = ROUNDS && narrow ? 32 : 0, to_next = 32 + second;
    uint32_t frag[2][STEPS][4] = {}, release = 0;
    Format words, ahead;
    ptx_barrier_wait(r->full + 8 * r->stage, r->parity);
    stage(a, places, r->stage).load(&words, a, 0);
    float2 unit = make_float2(1, 1);
    const unsigned char *scale = stage(a, places, r->stage).scale;
    __half2 next_scale[2] = {}, weight_scale[2];
    weight_scale[0] = weight_scale[1] = tile_power(-Format::ROUND_EXP2); /* none */
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
        next_zeros = qt_lane_zeros<Format>(a.decode, stage(a, places, r->stage).zero +
                                                         tile_zeros_at<Format, C>(a, begin) % 16);
        words.set_zeros(next_zeros);
    }
#pragma unroll 1
    for (int i = begin; i < end; i++) {
        const stage now(a, places, r->stage);
        uint32_t b = ptx_wgmma_b(ptx_shared(qt_smem) + a.ring_at + r->stage * a.stage_bytes);
        uint32_t used = r->empty + 8 * r->stage;
        qt_ring_next(r, a.stages);
        scale = now.scale;
        const unsigned char *zero = now.zero;
        const __half2 this_scale[2] = {next_scale[0], next_scale[1]};
#pragma unroll
        for (int c = 0; c < C; c++) {
#pragma unroll
            for (int batch = 0; batch < BATCHES; batch++) {
                uint32_t(&f)[STEPS][4] = frag[(c * BATCHES + batch) & 1];
                const bool fresh = c == 0 && batch == 0; /* the stage's first, loaded already */
                int k = (i * C + c) * 64 + batch * STEPS * 16;
                if (Format::ZEROS && (k & group_mask) == 0) {
                    zero += fresh ? 0 : Format::ZEROS;
                    words.set_zeros(fresh ? next_zeros : qt_lane_zeros<Format>(a.decode, zero));
                }
                if (batch == 0 && c < C - 1) {
                    ahead = words; /* with the zero points of a group that goes on */
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
                        tile_change_unit(d, &unit, qt_scale_unit(now_scale));
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
                /* What the next batch needs, once the tensor cores are busy with this one. */
                if (batch == BATCHES - 1) {
                    if (c < C - 1) {
                        words = ahead;
                    } else if (i + 1 < end) {
                        const stage next(a, places, r->stage);
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
                tile_keep<STEPS>(frag[(c * BATCHES + batch + 1) & 1]);
                if (c == 0 && batch == 0 && release && lane == 0)
                    ptx_barrier_arrive(release);
            }
        }
        release = used;
    }
    tile_settle(d);
    tile_keep<STEPS>(frag[1]);
    if (release && lane == 0)
        ptx_barrier_arrive(release);
    return unit;
}

/* For tile_multiply_all. */
template <class Format, int WGS, int BM, int C, bool ROUNDS> struct tile_planes {
    typedef float sum;
    struct per_token {
    };
    enum { AHEAD = 1 }; /* for BF16; FP16 has no factors, and loses nothing */
    const qt_tile_args &a;
    const qt_lane &lane;

    __device__ __forceinline__ void multiply(tile_sums<BM> *d, qt_ring *r, const tile_segment &s,
                                             int strip) const
    {
        const __half2 *of_row =
            (const __half2 *)(a.scale + (size_t)min(strip, a.strips - 1) * a.pitch_groups * 16) +
            (int)threadIdx.x % 32 / 4;
        __half2 row;
        if (!Format::GROUPED) /* while there are products: to wait for it later is 0.4 us */
            row = *of_row;
        float2 unit = tile_accumulate<Format, WGS, BM, C, ROUNDS>(d, a, r, s.k0, s.k1, lane);
        if (ROUNDS && a.row_scales) /* rare, and kept in a register they do not have */
            row = *of_row;
        if (!Format::GROUPED || (ROUNDS && a.row_scales))
            unit = __half22float2(row);
#pragma unroll
        for (int i = 0; i < BM / 2; i++)
            d->v[i] *= i & 2 ? unit.y : unit.x;
    }
    __device__ __forceinline__ void meet() const
    {
    }
    __device__ __forceinline__ per_token token(int) const
    {
        return {};
    }
    template <int N>
    __device__ __forceinline__ void finish(float4 out[N], const float4 v[N], const per_token *, int,
                                           int, int) const
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

/* ---- the kernel --------------------------------------------------------------------------------
 */

/* Warpgroups among which launch bounds share out the registers. Of few tokens one more than there
 * are: with fewer registers these kernels are 1 % faster on average, and a block can begin beside
 * the last ones of prepare.cu. */
static __host__ __device__ constexpr int tile_bounds(int wgs, int tokens)
{
    return wgs + 1 + (wgs == 2 && tokens <= 96);
}

template <class Format, int WGS, int BM, int C, bool ROUNDS>
__global__ void __launch_bounds__(tile_bounds(WGS, BM) * 128, 1)
    qt_tile_kernel(const __grid_constant__ qt_tile_args a)
{
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    const qt_ring r = qt_ring_open(ptx_shared(qt_smem) + a.barriers_at);
    if (warp >= WGS * 4) {
        ptx_registers_fewer<TILE_COPY_REGISTERS>();
        tile_bring<WGS>(a, r, warp, tile_copies<Format, WGS, BM, C>(a));
    } else {
        ptx_registers_more<tile_registers(WGS, 1, TILE_COPY_REGISTERS,
                                          tile_launch_registers(tile_bounds(WGS, BM)))>();
        const qt_lane lane = qt_lane_start<Format>(qt_lane_value<Format>(&a.decode), WGS * 128);
        ptx_launch_dependents();
        qt_ring_start(WGS * 128);
        tile_multiply_all<WGS, BM>(a, r, tile_planes<Format, WGS, BM, C, ROUNDS>{a, lane});
    }
}

/* How so many tokens are decoded. 32 are few beside look-ups of 3 bits, as products go: half of
 * them from registers takes 1.02 of the time. */
template <class Format, int BM> struct tile_format {
    typedef Format of_tile;
};
template <> struct tile_format<qt_decode_mixed3, 32> {
    typedef qt_decode_wide3 of_tile;
};

template <class Format, int WGS, int BM, int C, bool ROUNDS> static const void *qt_tile_kernel_of()
{
    typedef typename tile_format<Format, BM>::of_tile of_tile;
    constexpr int bits = Format::WIDTH0 + Format::WIDTH1 + Format::WIDTH2;
    if constexpr (qt_tile_exists(bits, Format::GROUPED, Format::RARE, WGS, BM, ROUNDS))
        return (const void *)qt_tile_kernel<of_tile, WGS, BM, C, ROUNDS>;
    else
        return NULL;
}

/* Of a format: NULL if there is none. */
template <class Format> static const void *qt_tile_of(int kind)
{
#define KERNEL(wgs, tokens, blocks, rounds)                                                        \
    qt_tile_kernel_of<Format, wgs, tokens, blocks, rounds>(),
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
