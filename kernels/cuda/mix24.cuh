/*
 * The mix24 kernel: Y = X W^T for up to 32 tokens, one pass over a matrix of 2- and 4-bit groups,
 * its outliers included.
 *
 *   grid      (cluster, row groups): a cluster of `cluster` blocks owns strips_cta strips of 16
 *             rows; block r of it the r-th part of the units of 128 columns
 *   block     `warps` warps = WN x WK: WK side by side along k, WN along rows; a PASS is
 *             WN * STRIPS strips, and a warp's share of it its units of STRIPS strips
 *   smem      [ X: m rows of the block's columns | row pointers | sums | outliers | rings ]
 *
 *   warp:     records -- cp.async --> ring of DEPTH slots, a unit of STRIPS strips each
 *                 slot u + DEPTH - 1   its copy is started      (and in the first pass that of X)
 *                 slot u + 1, ...      on their way
 *                 slot u               scales, zeros -> codes -> FP16 fragments -> mma.sync
 *
 * At the end of a pass the WK sums of an output meet in shared memory and are added in order, and
 * with them the outliers of its row. Those of the blocks of a cluster are sent to one of them,
 * which adds them in order one pass later, when they have long been there. So results do not depend
 * on timing.
 *
 * Where X has no room in shared memory, k is cut into parts of a launch each, which pass on FP32
 * sums.
 *
 * The template: MT token tiles of 8 (m <= 8 MT); STRIPS; DEPTH.
 *
 * Requires    compute capability 8.0 (clusters of more than one block: 9.0); stream, csr_col and
 *             csr_val 16-byte aligned; at most 32 units a warp
 * Moves       packed bytes once; X once per row group; Y once, and FP32 sums between parts of k
 * Oracle      the weights' exact values and an FP64 product; relative error <= 2.3e-4, FP16 output
 */
#ifndef QT_CUDA_MIX24_CUH
#define QT_CUDA_MIX24_CUH

#include "kernels/cuda/mix24_decode.cuh"
#include "kernels/cuda/ptx_cluster.cuh"

#include <cuda_bf16.h>

enum {
    MIX24_UNIT_COLS = 128,
    MIX24_UNIT_BYTES = MIX24_UNIT_COLS * 2, /* of X */
    MIX24_MAX_UNITS = 32,                   /* of a warp */
};

struct qt_mix24_args {
    const unsigned char *stream; /* [strips][pitch] */
    const uint16_t *perm;        /* [units * 8] */
    const uint32_t *csr_ptr;     /* [panels][csr_pitch]; NULL without outliers */
    const uint16_t *csr_col;     /* packed column in the panel of 64 Ki */
    const uint16_t *csr_val;     /* FP16 */
    const void *x;               /* F16 or BF16 [m][k] */
    void *y;                     /* F16 or BF16 [m][n] */
    const float *before;         /* [m][n]: sums of the units before first_unit; NULL if none */
    float *after; /* [m][n]: where sums go instead of y, when there are units after */
    int m, n, k;
    int strips, units, fours; /* strips of 16 rows; units of 128 columns, of which fours are FOUR */
    int first_unit, end_unit; /* of this launch */
    int panels;               /* of 64 Ki columns */
    size_t csr_pitch;         /* row pointers of a panel */
    uint32_t pitch;           /* bytes of a strip */
    float factor;             /* power of two on every result */
    int bf16;                 /* x and y are BF16 */
    int x_aligned;            /* rows of x are 16-byte aligned */
    int dependent;            /* launched before the previous kernel has ended */
    int warps_k, strips_cta, passes, cluster;
    int split_units;     /* units of a block */
    int row_threads;     /* log2 of the threads that add up an output */
    int long_parts;      /* warps that share an output of a row with many outliers */
    int ptr_rows;        /* row pointers of a block: of whole passes, and one */
    int window;          /* outliers of a pass that have room in shared memory */
    int x_pitch;         /* bytes of a row of X in shared memory */
    uint32_t ring_bytes; /* of a warp */
    int top_at, barrier_at, long_at, ptr_at, sums_at, inbox_at, window_at,
        ring_at; /* in shared memory */
};

/* X is at the start of dynamic shared memory. */
extern __shared__ __align__(1024) unsigned char qt_smem[];

/* ---- who does what -----------------------------------------------------------------------------
 */

struct mix24_warp {
    int lane, wk, wn, warps_n;
    int first_strip, last_strip; /* of the block */
    int pass_strips;             /* strips of a pass, over all warps */
    int cta_unit0, cta_unit1;    /* the block's units */
    int unit0, count;            /* the warp's */
    uint32_t fours;              /* bit i: its unit i is a FOUR */
    uint32_t offset;             /* of its first unit in a strip */
    uint32_t ring;               /* shared address of its ring */
};

/* Fours before unit u: they are spread evenly. */
static __device__ __forceinline__ int mix24_fours_before(const qt_mix24_args &a, int u)
{
    return (int)((unsigned)(u * a.fours) / (unsigned)a.units);
}

static __device__ __forceinline__ bool mix24_is_four(const qt_mix24_args &a, int u)
{
    return mix24_fours_before(a, u + 1) > mix24_fours_before(a, u);
}

template <int STRIPS>
static __device__ __forceinline__ mix24_warp mix24_warp_open(const qt_mix24_args &a)
{
    mix24_warp w;
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0); /* tell the compiler: uniform */
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
    w.fours = __ballot_sync(~0u, mix24_is_four(a, w.unit0 + w.lane));
    w.offset = (uint32_t)(w.unit0 * mix24_record<false>::BYTES +
                          mix24_fours_before(a, w.unit0) *
                              (mix24_record<true>::BYTES - mix24_record<false>::BYTES));
    w.ring = ptx_shared(qt_smem) + (uint32_t)a.ring_at + (uint32_t)warp * a.ring_bytes;
    /* Computed once: the compiler would do it again for each use in the main loop. */
    asm volatile("" : "+r"(w.count), "+r"(w.ring), "+r"(w.fours));
    return w;
}

/* ---- weights into shared memory ----------------------------------------------------------------
 *
 * A warp's records go through its own ring of slots in the order in which it uses them: its units
 * for pass 0, 1, ... A slot holds the records of STRIPS strips, one after the other.
 */
template <int STRIPS> struct mix24_cursor {
    int slots;                        /* left to copy */
    int units;                        /* of these, in this pass */
    int strip;                        /* the first */
    uint32_t fours;                   /* bit i: the i-th from here is a FOUR */
    const unsigned char *src[STRIPS]; /* the lane's first 16 bytes, by strip */
};

template <int STRIPS>
static __device__ __forceinline__ void
mix24_cursor_pass(const qt_mix24_args &a, const mix24_warp &w, mix24_cursor<STRIPS> *c)
{
#pragma unroll
    for (int u = 0; u < STRIPS; u++)
        c->src[u] =
            a.stream + (size_t)min(c->strip + u, w.last_strip) * a.pitch + w.offset + w.lane * 16;
    c->units = w.count;
    c->fours = w.fours;
}

template <int STRIPS>
static __device__ __forceinline__ void
mix24_cursor_open(const qt_mix24_args &a, const mix24_warp &w, mix24_cursor<STRIPS> *c)
{
    c->slots = a.passes * w.count;
    c->strip = w.first_strip + w.wn * STRIPS;
    mix24_cursor_pass(a, w, c);
}

template <int STRIPS> static constexpr __device__ uint32_t mix24_slot_bytes()
{
    return STRIPS * mix24_record<true>::BYTES;
}

/* A unit, BYTES of each strip: contiguous in the slot, 16 bytes a lane at a time. */
template <int BYTES, int STRIPS>
static __device__ __forceinline__ void mix24_copy_records(uint32_t slot, mix24_cursor<STRIPS> *c,
                                                          int lane)
{
    const int chunks = STRIPS * BYTES / 16;
    const uint32_t dst = slot + lane * 16;
#pragma unroll
    for (int i = 0; i < chunks; i += 32) {
        /* Of one strip or, by lane, of two. */
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

/* Starts copying the next unit into a slot, if there is one. */
template <int STRIPS>
static __device__ __forceinline__ void mix24_copy_weights(const qt_mix24_args &a,
                                                          const mix24_warp &w,
                                                          mix24_cursor<STRIPS> *c, uint32_t slot)
{
    if (c->slots == 0)
        return;
    c->slots--;
    if (c->fours & 1)
        mix24_copy_records<mix24_record<true>::BYTES>(slot, c, w.lane);
    else
        mix24_copy_records<mix24_record<false>::BYTES>(slot, c, w.lane);
    c->fours >>= 1;
    if (--c->units == 0) {
        c->strip += w.pass_strips;
        mix24_cursor_pass(a, w, c);
    }
}

/* ---- activations -------------------------------------------------------------------------------
 *
 * The WN warps of the same units bring their columns in turn, in packed order: chunks of 16
 * channels from where perm says.
 */

/* Of 8 units, from `unit` of the warp on: the lane's two groups. */
static __device__ __forceinline__ uint32_t mix24_perm_word(const qt_mix24_args &a,
                                                           const mix24_warp &w, int unit)
{
    int at = unit * 4 + w.lane; /* in pairs of groups */
    return at < w.count * 4 ? __ldg((const uint32_t *)a.perm + w.unit0 * 4 + at) : 0;
}

static __device__ __forceinline__ bool mix24_brings(const mix24_warp &w, int unit)
{
    return (unit & (w.warps_n - 1)) == w.wn;
}

/* Of one unit, the lane's chunk of 8 channels of every other token. Padding groups (0xffff) and
 * channels beyond k become zero. */
static __device__ __forceinline__ void mix24_copy_unit_x(const qt_mix24_args &a, uint32_t dst,
                                                         int channel, int lane)
{
    const bool inside = channel < a.k;
    const uint16_t *src = (const uint16_t *)a.x + (inside ? channel : 0);
    /* All blocks read the same X: each begins elsewhere, or all would ask one L2 slice at a time.
     */
    const int turn = a.m > 1 ? (int)(blockIdx.y % (unsigned)a.m) : 0;
#pragma unroll 2
    for (int token = lane / 16; token < a.m; token += 2) {
        int t = token + turn < a.m ? token + turn : token + turn - a.m;
        ptx_copy_16_zero(dst + (uint32_t)(t * a.x_pitch), src + (inside ? (size_t)t * a.k : 0),
                         inside ? 16 : 0);
    }
}

/* All that the warp brings. perm: mix24_perm_word of unit 0, loaded early. */
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
        if (mix24_brings(w, unit))
            mix24_copy_unit_x(a, dst + (uint32_t)unit * MIX24_UNIT_BYTES,
                              group * 16 + w.lane % 2 * 8, w.lane);
    }
}

/* Rows whose elements are not 16-byte aligned: all that the warp brings. */
static __device__ __noinline__ void mix24_x_ragged(const qt_mix24_args &a, mix24_warp w)
{
    const uint16_t *x = (const uint16_t *)a.x;
#pragma unroll 1
    for (int i = w.lane; i < w.count * MIX24_UNIT_COLS; i += 32) {
        int col = w.unit0 * MIX24_UNIT_COLS + i;
        if (!mix24_brings(w, i / MIX24_UNIT_COLS))
            continue;
        int channel = a.perm[col / 16] * 16 + col % 16;
        for (int t = 0; t < a.m; t++)
            ((uint16_t *)(qt_smem + t * a.x_pitch))[col - w.cta_unit0 * MIX24_UNIT_COLS] =
                channel < a.k ? x[(size_t)t * a.k + channel] : (uint16_t)0;
    }
}

static __device__ __forceinline__ float mix24_pow2(int e)
{
    return __int_as_float((e + 127) << 23);
}

/* Exponent of the power of two that brings the largest BF16 magnitude to 2^14. */
static __device__ __forceinline__ int mix24_up(int top)
{
    int e = (top >> 7) - 127;
    return e == 128 ? 0 : min(14 - e, 127);
}

/*
 * BF16 has less precision and more range than FP16: each token is scaled by the power of two that
 * brings its largest value to 2^14 and converted; that is exact but for values 2^-38 of the
 * largest. Its sums are scaled back. top: the largest magnitudes of the tokens. By the whole block.
 */
static __device__ __noinline__ void mix24_bf16_to_f16(const qt_mix24_args &a, int cols, int *top)
{
    if ((int)threadIdx.x < a.m)
        top[threadIdx.x] = 0;
    __syncthreads();
    for (int t = 0; t < a.m; t++) {
        const uint32_t *v = (const uint32_t *)(qt_smem + t * a.x_pitch);
        uint32_t most = 0;
        for (int i = (int)threadIdx.x; i < cols / 2; i += (int)blockDim.x)
            most = max(most, max(v[i] & 0x7fff, v[i] >> 16 & 0x7fff));
        most = __reduce_max_sync(~0u, most);
        if (threadIdx.x % 32 == 0)
            atomicMax(&top[t], (int)most);
    }
    __syncthreads();
    for (int t = 0; t < a.m; t++) {
        uint32_t *v = (uint32_t *)(qt_smem + t * a.x_pitch);
        int up = mix24_up(top[t]);
        float f0 = mix24_pow2(up / 2), f1 = mix24_pow2(up - up / 2);
        for (int i = (int)threadIdx.x; i < cols / 2; i += (int)blockDim.x) {
            float low = __int_as_float((int)(v[i] << 16)) * f0 * f1;
            v[i] = half2_bits(
                __floats2half2_rn(low, __int_as_float((int)(v[i] & 0xffff0000)) * f0 * f1));
        }
    }
}

/* What the sums of a token are to be multiplied by. */
static __device__ __forceinline__ float mix24_token_factor(const qt_mix24_args &a, int token)
{
    if (!a.bf16)
        return a.factor;
    int up = mix24_up(((const int *)(qt_smem + a.top_at))[token]);
    return a.factor * mix24_pow2(-(up / 2)) * mix24_pow2(-(up - up / 2));
}

/* ---- products ----------------------------------------------------------------------------------
 */

template <int MT, int STRIPS> struct mix24_sums {
    float v[STRIPS][MT][4]; /* rows g, g + 8 x tokens 2t, 2t + 1 */
};

/* One slot. x_row: token g of each tile, chunk t of a block; x_at: the slot's columns. */
template <bool FOUR, int MT, int STRIPS>
static __device__ __forceinline__ void mix24_slot(mix24_sums<MT, STRIPS> *sums, uint32_t slot,
                                                  const uint32_t x_row[MT], uint32_t x_at, int lane)
{
    using R = mix24_record<FOUR>;
    mix24_meta meta[STRIPS];
    uint4 two[STRIPS];
#pragma unroll
    for (int u = 0; u < STRIPS; u++) {
        meta[u] = mix24_shared_meta<FOUR>(slot + u * R::BYTES, lane);
        if (!FOUR)
            two[u] = ptx_load_16(slot + u * R::BYTES + lane * 16);
    }
#pragma unroll
    for (int b = 0; b < 2; b++) {
        mix24_group group[STRIPS];
        uint32_t words[STRIPS][4];
#pragma unroll
        for (int u = 0; u < STRIPS; u++) {
            group[u] = b ? mix24_open_group<FOUR, 1>(meta[u]) : mix24_open_group<FOUR, 0>(meta[u]);
            uint4 v = FOUR ? ptx_load_16(slot + u * R::BYTES + b * 512 + lane * 16)
                      : b  ? make_uint4(two[u].z, two[u].w, 0, 0)
                           : two[u];
            words[u][0] = v.x;
            words[u][1] = v.y;
            words[u][2] = v.z;
            words[u][3] = v.w;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 x[MT];
#pragma unroll
            for (int t = 0; t < MT; t++)
                x[t] = ptx_load_16(x_row[t] + x_at + b * 128 + half * 16);
#pragma unroll
            for (int s = 0; s < 2; s++)
#pragma unroll
                for (int u = 0; u < STRIPS; u++) {
                    uint32_t frag[4];
                    mix24_fragment<FOUR>(frag, words[u], 2 * half + s, group[u]);
#pragma unroll
                    for (int t = 0; t < MT; t++)
                        ptx_mma_f16(sums->v[u][t], frag, s ? x[t].z : x[t].x, s ? x[t].w : x[t].y);
                }
        }
    }
}

/* ---- outliers ----------------------------------------------------------------------------------
 *
 * The CSR entries of a pass are one run (of a panel). Those of panel 0 are copied into shared
 * memory a pass ahead, if there is room. Where a row has few, the threads that add up an output add
 * its entries too; those of a row with many are dealt out to all warps first.
 */
enum { MIX24_LONG_ROW = 256 }; /* entries for each thread of an output */

struct mix24_run {
    const uint16_t *col, *val; /* of entry 0 of the section, wherever they are */
};

static __device__ __forceinline__ const uint32_t *
mix24_row_ptr(const qt_mix24_args &a, const mix24_warp &w, int panel, int row)
{
    return (const uint32_t *)(qt_smem + a.ptr_at) + panel * a.ptr_rows + row - w.first_strip * 16;
}

static __device__ __forceinline__ void mix24_stage_ptr(const qt_mix24_args &a, const mix24_warp &w)
{
    const int row0 = w.first_strip * 16;
    for (int p = 0; p < a.panels; p++)
        for (int i = (int)threadIdx.x; i < a.ptr_rows; i += (int)blockDim.x)
            ptx_copy_4(ptx_shared(mix24_row_ptr(a, w, p, row0 + i)),
                       a.csr_ptr + p * a.csr_pitch + min(row0 + i, a.n));
}

static __device__ __forceinline__ unsigned char *mix24_window(const qt_mix24_args &a, int pass)
{
    return qt_smem + a.window_at + (pass & 1) * a.window * 4;
}

/* Entries begin .. end - 1 of panel 0, from a multiple of 8 on; zeros after them. */
static __device__ __forceinline__ void mix24_copy_run(const qt_mix24_args &a, int pass,
                                                      uint32_t begin, uint32_t end)
{
    const uint32_t base = begin & ~7u, dst = ptx_shared(mix24_window(a, pass));
    if (end - base > (uint32_t)a.window)
        return;
    for (uint32_t i = threadIdx.x * 8; i < end - base; i += blockDim.x * 8) {
        uint32_t bytes = min(end - base - i, 8u) * 2;
        ptx_copy_16_zero(dst + i * 2, a.csr_col + base + i, bytes);
        ptx_copy_16_zero(dst + (uint32_t)a.window * 2 + i * 2, a.csr_val + base + i, bytes);
    }
}

static __device__ __forceinline__ mix24_run mix24_run_of(const qt_mix24_args &a, int pass,
                                                         int panel, uint32_t begin, uint32_t end)
{
    mix24_run r = {a.csr_col, a.csr_val};
    const uint32_t base = begin & ~7u;
    if (panel == 0 && end - base <= (uint32_t)a.window) {
        r.col = (const uint16_t *)mix24_window(a, pass) - base;
        r.val = r.col + a.window;
    }
    return r;
}

/* Of a row: entries from `begin`, every step-th, times the token's x. Columns of other blocks are
 * skipped. */
static __device__ __forceinline__ float mix24_add_entries(const qt_mix24_args &a,
                                                          const mix24_run &r, int col0, int cols,
                                                          const unsigned char *x, uint32_t begin,
                                                          uint32_t end, uint32_t step)
{
    float sum = 0;
#pragma unroll 4
    for (uint32_t e = begin; e < end; e += step) {
        int col = (int)r.col[e] + col0;
        float v = __half2float(__ushort_as_half(r.val[e]));
        if ((unsigned)col < (unsigned)cols)
            sum = fmaf(v, __half2float(*(const __half *)(x + col * 2)), sum);
    }
    return sum;
}

static __device__ __forceinline__ bool mix24_is_long(const qt_mix24_args &a, const uint32_t *ptr)
{
    return ptr[1] - ptr[0] > (uint32_t)MIX24_LONG_ROW << a.row_threads;
}

/* Rows with many entries, into the sums of the warps: a warp takes a token, or a part of one. */
static __device__ __noinline__ void mix24_long_rows(const qt_mix24_args &a, mix24_warp w, int pass)
{
    const int rows = w.pass_strips * 16, row0 = (w.first_strip + pass * w.pass_strips) * 16;
    const int warps = (int)blockDim.x / 32, warp = (int)threadIdx.x / 32;
    const int parts = min(a.long_parts, a.warps_k);
    const int cols = (w.cta_unit1 - w.cta_unit0) * MIX24_UNIT_COLS;
    float *sums = (float *)(qt_smem + a.sums_at);
    for (int panel = 0; panel < a.panels; panel++)
        for (int row = 0; row < rows; row++) {
            const uint32_t *ptr = mix24_row_ptr(a, w, panel, row0 + row);
            if (row0 + row >= (w.last_strip + 1) * 16 || !mix24_is_long(a, ptr))
                continue;
            mix24_run r = {a.csr_col, a.csr_val};
            for (int i = warp; i < a.m * parts; i += warps) {
                int token = i % a.m, part = i / a.m;
                float v = mix24_add_entries(a, r, panel * 65536 - w.cta_unit0 * MIX24_UNIT_COLS,
                                            cols, qt_smem + token * a.x_pitch,
                                            ptr[0] + (uint32_t)(part * 32 + w.lane), ptr[1],
                                            (uint32_t)parts * 32);
                for (int d = 16; d; d /= 2)
                    v += __shfl_xor_sync(~0u, v, d);
                if (w.lane == 0)
                    sums[(part * a.m + token) * (rows + 4) + row] += v;
            }
        }
}

/* ---- sums --------------------------------------------------------------------------------------
 *
 * Of the warps in shared memory: [warps_k][m][rows of a pass + 4]; the 4 so that the four tokens
 * that a warp writes at a time lie in different banks. Of a cluster: block r owns the r-th part of
 * the rows of a pass, its inbox is [2 passes][blocks][m][rows / cluster].
 */
template <int MT, int STRIPS>
static __device__ __forceinline__ void mix24_put_sums(const qt_mix24_args &a, const mix24_warp &w,
                                                      const mix24_sums<MT, STRIPS> &sums)
{
    const int pitch = w.pass_strips * 16 + 4, g = w.lane / 4, token0 = w.lane % 4 * 2;
    float *dst = (float *)(qt_smem + a.sums_at) + w.wk * a.m * pitch + w.wn * STRIPS * 16 + g;
#pragma unroll
    for (int t = 0; t < MT; t++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int token = t * 8 + token0 + h;
            if (token < a.m)
#pragma unroll
                for (int u = 0; u < STRIPS; u++) {
                    dst[token * pitch + u * 16] = sums.v[u][t][h];
                    dst[token * pitch + u * 16 + 8] = sums.v[u][t][2 + h];
                }
        }
}

static __device__ __forceinline__ void mix24_store_y(const qt_mix24_args &a, const mix24_warp &w,
                                                     int token, int row, float v)
{
    size_t at = (size_t)token * a.n + row;
    if (row >= min((w.last_strip + 1) * 16, a.n))
        return;
    if (a.before) /* past L1, which may have it from before the launch that wrote it */
        v += __ldcg(a.before + at);
    if (a.after)
        a.after[at] = v;
    else if (a.bf16)
        ((__nv_bfloat16 *)a.y)[at] = __float2bfloat16(v);
    else
        ((__half *)a.y)[at] = __float2half(v);
}

/* The outliers of an output in the pass, but those of long rows; thread `sub` of its threads. */
static __device__ __forceinline__ float mix24_row_outliers(const qt_mix24_args &a,
                                                           const mix24_warp &w, int pass, int token,
                                                           int row, int sub)
{
    const int row0 = (w.first_strip + pass * w.pass_strips) * 16,
              rows = min(w.pass_strips * 16, (w.last_strip + 1) * 16 - row0);
    float v = 0;
    for (int panel = 0; panel < a.panels; panel++) {
        const uint32_t *ptr = mix24_row_ptr(a, w, panel, row0);
        mix24_run r = mix24_run_of(a, pass, panel, ptr[0], ptr[rows]);
        if (row < rows && !mix24_is_long(a, ptr + row))
            v += mix24_add_entries(a, r, panel * 65536 - w.cta_unit0 * MIX24_UNIT_COLS,
                                   (w.cta_unit1 - w.cta_unit0) * MIX24_UNIT_COLS,
                                   qt_smem + token * a.x_pitch, ptr[row] + (uint32_t)sub,
                                   ptr[row + 1], 1u << a.row_threads);
    }
    return v;
}

/* To the block of the cluster that owns the row. */
static __device__ __forceinline__ void mix24_send(const qt_mix24_args &a, const mix24_warp &w,
                                                  int pass, int token, int row, float v)
{
    const int rows = w.pass_strips * 16 / a.cluster, rank = row / rows;
    const int at = (((pass & 1) * a.cluster + (int)blockIdx.x) * a.m + token) * rows + row % rows;
    const uint32_t smem = ptx_shared(qt_smem);
    ptx_cluster_send(
        ptx_cluster_map(smem + (uint32_t)(a.inbox_at + at * 4), (uint32_t)rank), v,
        ptx_cluster_map(smem + (uint32_t)(a.barrier_at + (pass & 1) * 8), (uint32_t)rank));
}

/* Sums over the warps of a pass's outputs, each by 2^row_threads threads: to Y, or to the cluster.
 */
static __device__ __forceinline__ void mix24_add_warps(const qt_mix24_args &a, const mix24_warp &w,
                                                       int pass)
{
    const int rows = w.pass_strips * 16, log2_rows = 31 - __clz(rows), outputs = a.m * rows;
    const int step = (rows + 4) * a.m, threads = 1 << a.row_threads;
    const int sub = (int)threadIdx.x & (threads - 1),
              row0 = (w.first_strip + pass * w.pass_strips) * 16;
    /* Who begins moves on from pass to pass, as there may be fewer outputs than threads. */
    const int turn =
        (int)(threadIdx.x + (unsigned)(pass * outputs * threads)) & ((int)blockDim.x - 1);
#pragma unroll 1
    for (int i = 0; i < outputs; i += (int)blockDim.x >> a.row_threads) {
        int o = i + (turn >> a.row_threads), token = o >> log2_rows, row = o & (rows - 1);
        float v = 0;
        if (o < outputs) {
            const float *src = (const float *)(qt_smem + a.sums_at) + token * (rows + 4) + row;
#pragma unroll 4
            for (int j = sub; j < a.warps_k; j += threads)
                v += src[j * step];
            if (a.csr_ptr)
                v += mix24_row_outliers(a, w, pass, token, row, sub);
        }
        for (int d = threads / 2; d; d /= 2)
            v += __shfl_xor_sync(~0u, v, d);
        if (o >= outputs || sub)
            continue;
        v *= mix24_token_factor(a, token);
        if (a.cluster > 1)
            mix24_send(a, w, pass, token, row, v);
        else
            mix24_store_y(a, w, token, row0 + row, v);
    }
}

/* Sums over the blocks of the cluster of the rows that the block owns. */
static __device__ __forceinline__ void mix24_add_blocks(const qt_mix24_args &a, const mix24_warp &w,
                                                        int pass)
{
    const int rows = w.pass_strips * 16 / a.cluster, log2_rows = 31 - __clz(rows),
              outputs = a.m * rows;
    const int row0 = (w.first_strip + pass * w.pass_strips) * 16 + (int)blockIdx.x * rows;
    const float *inbox = (const float *)(qt_smem + a.inbox_at) + (pass & 1) * a.cluster * outputs;
    ptx_barrier_wait(ptx_shared(qt_smem) + (uint32_t)(a.barrier_at + (pass & 1) * 8),
                     (uint32_t)(pass >> 1 & 1));
#pragma unroll 1
    for (int o = (int)threadIdx.x; o < outputs; o += (int)blockDim.x) {
        float v = 0;
        for (int r = 0; r < a.cluster; r++)
            v += inbox[r * outputs + o];
        mix24_store_y(a, w, o >> log2_rows, row0 + (o & (rows - 1)), v);
    }
}

/* Whether one of the thread's share of the block's rows is long. */
static __device__ __forceinline__ bool mix24_has_long(const qt_mix24_args &a, const mix24_warp &w)
{
    const int rows = a.ptr_rows - 1;
    bool any = false;
    for (int i = (int)threadIdx.x; i < rows * a.panels; i += (int)blockDim.x)
        any |= mix24_is_long(a, mix24_row_ptr(a, w, i / rows, w.first_strip * 16 + i % rows));
    return any;
}

/* The sums of a pass, from the warps' registers to Y or to the cluster. */
template <int MT, int STRIPS>
static __device__ __forceinline__ void
mix24_finish_pass(const qt_mix24_args &a, const mix24_warp &w, const mix24_sums<MT, STRIPS> &sums,
                  int pass)
{
    __syncthreads(); /* the sums of the pass before have been read */
    mix24_put_sums(a, w, sums);
    if (a.cluster > 1) {
        const int rows = w.pass_strips * 16;
        if (pass == 0)
            ptx_cluster_wait(); /* the others have started */
        else
            mix24_add_blocks(a, w, pass - 1);
        if (threadIdx.x == 0)
            ptx_barrier_expect(ptx_shared(qt_smem) + (uint32_t)(a.barrier_at + (pass & 1) * 8),
                               (uint32_t)(a.m * rows * 4));
    }
    int *long_rows = (int *)(qt_smem + a.long_at);
    if (pass == 0 && a.csr_ptr && mix24_has_long(a, w))
        atomicOr(long_rows, 1);
    __syncthreads();
    if (*long_rows) {
        mix24_long_rows(a, w, pass);
        __syncthreads();
    }
    mix24_add_warps(a, w, pass);
}

/* ---- the kernel --------------------------------------------------------------------------------
 */

/* Weights, X and outliers on their way: DEPTH - 1 groups of copies, X in the first. */
template <int STRIPS, int DEPTH>
static __device__ __forceinline__ void mix24_begin(const qt_mix24_args &a, const mix24_warp &w,
                                                   mix24_cursor<STRIPS> *c)
{
    uint32_t run[2] = {0, 0}, perm = mix24_perm_word(a, w, 0);
    if (a.csr_ptr) {
        const int row0 = w.first_strip * 16, row1 = row0 + min(w.pass_strips, a.strips_cta) * 16;
        run[0] = __ldg(a.csr_ptr + row0);
        run[1] = __ldg(a.csr_ptr + min(row1, a.n));
    }
    mix24_cursor_open(a, w, c);
#pragma unroll 1
    for (int i = 0; i < DEPTH - 1; i++)
        mix24_copy_weights(a, w, c, w.ring + i * mix24_slot_bytes<STRIPS>());
    if (a.dependent) {
        ptx_launch_dependents();
        ptx_wait_previous();
    }
    if (a.x_aligned)
        mix24_copy_x(a, w, perm);
    else
        mix24_x_ragged(a, w);
    if (DEPTH > 2)
        ptx_copy_commit();
    if (a.csr_ptr) {
        mix24_stage_ptr(a, w);
        mix24_copy_run(a, 0, run[0], run[1]);
    }
#pragma unroll
    for (int i = DEPTH > 2 ? 1 : 0; i < DEPTH - 1; i++)
        ptx_copy_commit();
    if (w.warps_n > 1 || a.bf16) {
        ptx_copy_wait<DEPTH - 2>();
        __syncthreads();
    }
    if (a.bf16) {
        mix24_bf16_to_f16(a, (w.cta_unit1 - w.cta_unit0) * MIX24_UNIT_COLS,
                          (int *)(qt_smem + a.top_at));
        __syncthreads();
    }
}

/* Outliers were copied in the first of a pass's groups, or in the last before the first pass. */
template <int DEPTH> static __device__ __forceinline__ void mix24_wait_run(int units)
{
    if (units >= DEPTH)
        return;
    if (units >= 3)
        ptx_copy_wait<2>();
    else if (units == 2)
        ptx_copy_wait<1>();
    else
        ptx_copy_wait<0>();
}

/* Copies the outliers of the next pass; all threads have been through the barriers of this one. */
static __device__ __forceinline__ void mix24_next_run(const qt_mix24_args &a, const mix24_warp &w,
                                                      int pass)
{
    const int row0 = (w.first_strip + (pass + 1) * w.pass_strips) * 16;
    if (pass + 1 == a.passes)
        return;
    mix24_copy_run(
        a, pass + 1, *mix24_row_ptr(a, w, 0, row0),
        *mix24_row_ptr(a, w, 0, min(row0 + w.pass_strips * 16, (w.last_strip + 1) * 16)));
    if (w.count == 0) /* nothing else of this warp will */
        ptx_copy_commit();
}

template <int MT, int STRIPS, int DEPTH>
__global__ void __launch_bounds__(512, 1) qt_mix24_kernel(const __grid_constant__ qt_mix24_args a)
{
    const mix24_warp w = mix24_warp_open<STRIPS>(a);
    mix24_cursor<STRIPS> c;
    if (threadIdx.x == 0)
        *(int *)(qt_smem + a.long_at) = 0;
    if (a.cluster > 1) {
        if (threadIdx.x == 0) {
            ptx_barrier_init(ptx_shared(qt_smem) + (uint32_t)a.barrier_at, 1);
            ptx_barrier_init(ptx_shared(qt_smem) + (uint32_t)a.barrier_at + 8, 1);
        }
        ptx_cluster_arrive();
    }
    mix24_begin<STRIPS, DEPTH>(a, w, &c);

    uint32_t x_row[MT]; /* columns of tokens >= m are never stored */
#pragma unroll
    for (int t = 0; t < MT; t++) {
        x_row[t] = ptx_shared(qt_smem) +
                   (uint32_t)(min(t * 8 + w.lane / 4, a.m - 1) * a.x_pitch + w.lane % 4 * 32 +
                              (w.unit0 - w.cta_unit0) * MIX24_UNIT_BYTES);
        asm volatile("" : "+r"(x_row[t]));
    }
    uint32_t slot = 0, unused = (DEPTH - 1) * mix24_slot_bytes<STRIPS>(); /* offsets in the ring */
#pragma unroll 1
    for (int pass = 0; pass < a.passes; pass++) {
        mix24_sums<MT, STRIPS> sums = {};
        uint32_t fours = w.fours;
#pragma unroll 1
        for (int unit = 0; unit < w.count; unit++) {
            ptx_copy_wait<DEPTH - 2>();
            __syncwarp(); /* lanes read what others copied, and have read the slot before */
            mix24_copy_weights(a, w, &c, w.ring + unused);
            ptx_copy_commit();
            const uint32_t x_at = (uint32_t)unit * MIX24_UNIT_BYTES;
            if (fours & 1)
                mix24_slot<true, MT, STRIPS>(&sums, w.ring + slot, x_row, x_at, w.lane);
            else
                mix24_slot<false, MT, STRIPS>(&sums, w.ring + slot, x_row, x_at, w.lane);
            fours >>= 1;
            unused = slot;
            slot = slot == (DEPTH - 1) * mix24_slot_bytes<STRIPS>()
                       ? 0
                       : slot + mix24_slot_bytes<STRIPS>();
        }
        if (a.csr_ptr)
            mix24_wait_run<DEPTH>(w.count);
        mix24_finish_pass(a, w, sums, pass);
        if (a.csr_ptr)
            mix24_next_run(a, w, pass);
    }
    if (a.cluster > 1)
        mix24_add_blocks(a, w, a.passes - 1);
}

#endif
