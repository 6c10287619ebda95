/* The mix24 ring kernel (ring.cuh): work distribution, and copies of weights and activations to
 * shared memory. */
#ifndef QT_KERNELS_CUDA_MIX24_RING_LOAD_CUH
#define QT_KERNELS_CUDA_MIX24_RING_LOAD_CUH

#include "kernels/cuda/common/ptx_cluster.cuh"
#include "kernels/cuda/common/smem.cuh"
#include "kernels/cuda/common/token_scale.cuh"
#include "kernels/cuda/mix24/decode.cuh"
#include "kernels/cuda/mix24/ring.h"

/* Whether TMA copies the weights. */
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 900
enum { MIX24_TMA = 1 };
#else
enum { MIX24_TMA = 0 };
#endif

/* ---- work distribution ----------------------------------------------------------------------- */

struct mix24_warp {
    int lane, wk, wn, warps_n;
    int first_strip, last_strip; /* of the thread block */
    int pass_strips;             /* strips of a pass, over all warps */
    int cta_unit0, cta_unit1;    /* of the thread block */
    int unit0, count;            /* of the warp */
    uint32_t fours;              /* bit i: unit i of the warp is a FOUR */
    uint32_t offset;             /* of the warp's first unit in a strip */
    uint32_t ring;               /* shared address of the warp's stages */
};

template <int STRIPS>
static __device__ __forceinline__ mix24_warp mix24_warp_open(const qt_mix24_args &a)
{
    mix24_warp w;
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0); /* makes it uniform for the
                                                                    compiler */
    w.lane = (int)threadIdx.x % 32;
    w.wk = warp & (a.warps_k - 1);
    w.wn = warp >> (31 - __clz(a.warps_k));
    w.warps_n = (int)blockDim.x / 32 >> (31 - __clz(a.warps_k));
    w.pass_strips = w.warps_n * STRIPS;
    w.first_strip = (int)blockIdx.y * a.strips_cta;
    w.last_strip = min(w.first_strip + a.strips_cta, a.strips) - 1;
    w.cta_unit0 = min(a.first_unit + (int)blockIdx.x * a.split_units, a.end_unit);
    w.cta_unit1 = min(w.cta_unit0 + a.split_units, a.end_unit);
    int count = w.cta_unit1 - w.cta_unit0, log2_k = 31 - __clz(a.warps_k);
    w.unit0 = w.cta_unit0 + (count * w.wk >> log2_k);
    w.count = w.cta_unit0 + (count * (w.wk + 1) >> log2_k) - w.unit0;
    /* FOURs are spread evenly: u F / U of them are before unit u. A single division, because all
     * copies wait for it. */
    const unsigned fours = (unsigned)((w.unit0 + w.lane) * a.fours);
    const unsigned before = fours / (unsigned)a.units;
    w.fours = __ballot_sync(~0u, (int)(fours - before * a.units) + a.fours >= a.units);
    w.offset = (uint32_t)(w.unit0 * mix24_record<false>::BYTES +
                          (int)__shfl_sync(~0u, before, 0) *
                              (mix24_record<true>::BYTES - mix24_record<false>::BYTES));
    w.ring = ptx_shared(qt_smem) + (uint32_t)a.ring_at +
             (uint32_t)(warp * a.depth) * mix24_stage_bytes(STRIPS);
    /* Keeps them in registers; the compiler would recompute them in the mainloop. */
    asm volatile("" : "+r"(w.count), "+r"(w.ring), "+r"(w.fours));
    return w;
}

/* ---- weights to shared memory -------------------------------------------------------------------
 *
 * A warp copies its records to its own stages in the order in which it uses them: its units for
 * pass 0, 1, ... A stage holds the records of STRIPS strips, one after the other, and an mbarrier
 * at its end. TMA fills a stage with one copy, which completes on the mbarrier. Without TMA the
 * lanes copy 16 bytes at a time, with one cp.async group per stage.
 */
template <int STRIPS> struct mix24_cursor {
    int remaining;                    /* units still to copy */
    int units;                        /* of these, in this pass */
    int strip;                        /* first strip */
    uint32_t fours;                   /* bit i: the i-th next unit is a FOUR */
    int at;                           /* TMA: offset of the record in a strip, in U64 */
    const unsigned char *src[STRIPS]; /* cp.async: the lane's first 16 bytes, by strip */
};

template <int STRIPS>
static __device__ __forceinline__ void
mix24_cursor_pass(const qt_mix24_args &a, const mix24_warp &w, mix24_cursor<STRIPS> *c)
{
    c->at = (int)(w.offset / 8);
#pragma unroll
    for (int u = 0; u < STRIPS && !MIX24_TMA; u++)
        c->src[u] =
            a.stream + (size_t)min(c->strip + u, w.last_strip) * a.pitch + w.offset + w.lane * 16;
    c->units = w.count;
    c->fours = w.fours;
}

template <int STRIPS>
static __device__ __forceinline__ void
mix24_cursor_open(const qt_mix24_args &a, const mix24_warp &w, mix24_cursor<STRIPS> *c)
{
    c->remaining = a.passes * w.count;
    c->strip = w.first_strip + w.wn * STRIPS;
    mix24_cursor_pass(a, w, c);
}

template <int STRIPS> static __device__ __forceinline__ uint32_t mix24_stage_barrier(uint32_t stage)
{
    return stage + mix24_stage_bytes(STRIPS) - 8;
}

/* Copies a unit, BYTES of each strip, by the lanes. */
template <int BYTES, int STRIPS>
static __device__ __forceinline__ void mix24_copy_records(uint32_t stage, mix24_cursor<STRIPS> *c,
                                                          int lane)
{
    const int chunks = STRIPS * BYTES / 16;
    const uint32_t dst = stage + lane * 16;
#pragma unroll
    for (int i = 0; i < chunks; i += 32) {
        /* A lane's chunk is in `strip`, or in the next one. */
        const int strip = i * 16 / BYTES, next = (strip + 1) * BYTES / 16;
        const unsigned char *src = c->src[strip] + i * 16 - strip * BYTES;
        if (next < i + 32 && strip + 1 < STRIPS && i + lane >= next)
            src = c->src[strip + 1 < STRIPS ? strip + 1 : strip] + i * 16 - (strip + 1) * BYTES;
        if (i + 32 <= chunks)
            ptx_copy_16(dst + i * 16, src);
        else
            ptx_copy_16_if(dst + i * 16, src, i + lane < chunks);
    }
#pragma unroll
    for (int u = 0; u < STRIPS; u++)
        c->src[u] += BYTES;
}

/* Copies a unit of each strip. Behind the last strip of the matrix, TMA fills with zeros. */
template <bool FOUR, int STRIPS>
static __device__ __forceinline__ void mix24_copy_unit(const qt_mix24_args &a, uint32_t stage,
                                                       mix24_cursor<STRIPS> *c, int lane)
{
    constexpr int bytes = mix24_record<FOUR>::BYTES;
    if (!MIX24_TMA) {
        mix24_copy_records<bytes>(stage, c, lane);
    } else if (ptx_elect()) {
        const uint32_t barrier = mix24_stage_barrier<STRIPS>(stage);
        ptx_barrier_expect(barrier, STRIPS * bytes);
        ptx_copy_box(stage, &a.records[FOUR], c->at, c->strip, barrier);
    }
    c->at += bytes / 8;
}

/* Starts copying the next unit, if any, to a stage. */
template <int STRIPS>
static __device__ __forceinline__ void mix24_copy_weights(const qt_mix24_args &a,
                                                          const mix24_warp &w,
                                                          mix24_cursor<STRIPS> *c, uint32_t stage)
{
    if (c->remaining == 0)
        return;
    c->remaining--;
    if (c->fours & 1)
        mix24_copy_unit<true>(a, stage, c, w.lane);
    else
        mix24_copy_unit<false>(a, stage, c, w.lane);
    c->fours >>= 1;
    if (--c->units == 0) {
        c->strip += w.pass_strips;
        mix24_cursor_pass(a, w, c);
    }
}

/* Initializes the mbarriers of the warp's stages. */
template <int STRIPS>
static __device__ __forceinline__ void mix24_ring_open(const qt_mix24_args &a, const mix24_warp &w)
{
    if (MIX24_TMA && w.lane == 0)
#pragma unroll
        for (int i = 0; i < MIX24_MAX_DEPTH; i++)
            if (i < a.depth)
                ptx_barrier_init(
                    mix24_stage_barrier<STRIPS>(w.ring + i * mix24_stage_bytes(STRIPS)), 1);
}

/* Waits until only the last `groups` (0 to 2) cp.async groups of the lane are outstanding. The
 * instruction needs a constant. */
static __device__ __forceinline__ void mix24_copy_wait(int groups)
{
    if (groups == 0)
        ptx_copy_wait<0>();
    else if (groups == 1)
        ptx_copy_wait<1>();
    else
        ptx_copy_wait<2>();
}

/* Waits until a stage is full; parity: of the number of rounds through the stages. */
template <int STRIPS>
static __device__ __forceinline__ void mix24_wait_stage(const qt_mix24_args &a, uint32_t stage,
                                                        uint32_t parity)
{
    if (MIX24_TMA)
        ptx_barrier_wait(mix24_stage_barrier<STRIPS>(stage), parity);
    else
        mix24_copy_wait(a.depth - 2);
}

/* ---- activations --------------------------------------------------------------------------------
 *
 * The WN warps with the same units take turns in copying their columns, in packed order: chunks of
 * 16 channels from the addresses that perm gives.
 */

/* The lane's two groups of perm, for 8 units of the warp from `unit` on. */
static __device__ __forceinline__ uint32_t mix24_perm_word(const qt_mix24_args &a,
                                                           const mix24_warp &w, int unit)
{
    int at = unit * 4 + w.lane; /* in pairs of groups */
    return at < w.count * 4 ? __ldg((const uint32_t *)a.perm + w.unit0 * 4 + at) : 0;
}

static __device__ __forceinline__ bool mix24_copies_unit(const mix24_warp &w, int unit)
{
    return (unit & (w.warps_n - 1)) == w.wn;
}

/* Copies the lane's chunk of 8 channels of a unit, for every other token. Padding groups (0xffff)
 * and channels beyond k become zero. */
static __device__ __forceinline__ void mix24_copy_unit_x(const qt_mix24_args &a, uint32_t dst,
                                                         int channel, int lane)
{
    const bool inside = channel < a.k;
    const uint16_t *src = (const uint16_t *)a.x + (inside ? channel : 0);
    /* All thread blocks read the same X. Each starts at a different token, so that they do not all
     * read the same L2 slice at the same time. */
    const int start = a.m > 1 ? (int)(blockIdx.y % (unsigned)a.m) : 0;
#pragma unroll 2
    for (int token = lane / 16; token < a.m; token += 2) {
        int t = token + start < a.m ? token + start : token + start - a.m;
        ptx_copy_16_zero(dst + (uint32_t)(t * a.x_pitch), src + (inside ? (size_t)t * a.k : 0),
                         inside ? 16 : 0);
    }
}

/* Copies all X of the warp. perm: mix24_perm_word of unit 0, loaded early. */
static __device__ __forceinline__ void mix24_copy_x(const qt_mix24_args &a, const mix24_warp &w,
                                                    uint32_t perm)
{
    const uint32_t dst = ptx_shared(qt_smem) +
                         (uint32_t)(w.unit0 - w.cta_unit0) * MIX24_UNIT_BYTES + w.lane % 16 * 16;
    uint32_t further = mix24_perm_word(a, w, 8);
#pragma unroll 1
    for (int unit = 0; unit < w.count; unit++) {
        if (unit && unit % 8 == 0) {
            perm = further;
            further = mix24_perm_word(a, w, unit + 8);
        }
        uint32_t pair = __shfl_sync(~0u, perm, unit % 8 * 4 + w.lane % 16 / 4);
        int group = (int)(pair >> (w.lane & 2 ? 16 : 0) & 0xffff);
        if (mix24_copies_unit(w, unit))
            mix24_copy_unit_x(a, dst + (uint32_t)unit * MIX24_UNIT_BYTES,
                              group * 16 + w.lane % 2 * 8, w.lane);
    }
}

/* Copies all X of the warp if rows are not 16-byte aligned. */
static __device__ __noinline__ void mix24_x_ragged(const qt_mix24_args &a, mix24_warp w)
{
    const uint16_t *x = (const uint16_t *)a.x;
#pragma unroll 1
    for (int i = w.lane; i < w.count * QT_MIX24_UNIT_COLS; i += 32) {
        int col = w.unit0 * QT_MIX24_UNIT_COLS + i;
        if (!mix24_copies_unit(w, i / QT_MIX24_UNIT_COLS))
            continue;
        int channel = a.perm[col / 16] * 16 + col % 16;
        for (int t = 0; t < a.m; t++)
            ((uint16_t *)(qt_smem + t * a.x_pitch))[col - w.cta_unit0 * QT_MIX24_UNIT_COLS] =
                channel < a.k ? x[(size_t)t * a.k + channel] : (uint16_t)0;
    }
}

/*
 * Converts BF16 X to FP16 (token_scale.cuh), by the whole thread block. top: the largest magnitudes
 * of the tokens.
 */
static __device__ __noinline__ void mix24_bf16_to_f16(const qt_mix24_args &a, int cols, int *top)
{
    if ((int)threadIdx.x < a.m)
        top[threadIdx.x] = 0;
    __syncthreads();
    for (int t = 0; t < a.m; t++) {
        const uint32_t *v = (const uint32_t *)(qt_smem + t * a.x_pitch);
        uint32_t tops = 0;
        for (int i = (int)threadIdx.x; i < cols / 2; i += (int)blockDim.x)
            tops = qt_token_tops(tops, v[i]);
        const int most = qt_token_top(tops);
        if (threadIdx.x % 32 == 0)
            atomicMax(&top[t], most);
    }
    __syncthreads();
    for (int t = 0; t < a.m; t++) {
        uint32_t *v = (uint32_t *)(qt_smem + t * a.x_pitch);
        const int up = qt_token_shift(top[t]);
        for (int i = (int)threadIdx.x; i < cols / 2; i += (int)blockDim.x)
            v[i] = qt_token_halves(v[i], up);
    }
}

/* The factor for the results of a token. */
static __device__ __forceinline__ float mix24_token_factor(const qt_mix24_args &a, int token)
{
    if (!a.bf16)
        return a.factor;
    int up = qt_token_shift(((const int *)(qt_smem + a.top_at))[token]);
    return a.factor * qt_token_factor(up);
}

#endif
