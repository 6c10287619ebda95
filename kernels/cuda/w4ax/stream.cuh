/*
 * The w4ax stream kernel computes Y = X W^T for decode steps: one pass over the weights for
 * m <= 8 MT <= 32 tokens. X may be packed.
 *
 *   work unit     one channel block (128 channels) of a row group (S strips of 16 rows). Work units
 *                 are numbered row group by row group.
 *   thread block  cta_units consecutive work units; its warps take one each, round-robin
 *   smem          [ partial sums of the warps | pipelines ]; each warp has a pipeline of DEPTH
 *                 stages, of its own work units
 *   stage         [ S x 1024 bytes of codes | S x 32 bytes of row scales | m rows of X |
 *                 token scales | block word ]
 *   warp          global -- cp.async --> stage -- shift, mask --> m16n8k32 s8 --> INT32
 *                 -- * scales --> FP32
 *
 * X is loaded per work unit instead of once per thread block: a thread block with few row groups
 * uses each byte of X about once, and no warp has to wait for all of X.
 *
 * At the end of a row group the partial sums of the warps are added in order through shared memory.
 * If several thread blocks share a row group (split-K), their partial sums go to the workspace, and
 * the last thread block to arrive adds them in the order of k.
 *
 * Requires   compute capability 8.0
 * Traffic    packed weights once; X once per row group; Y once; split-K: 8 bytes (written and
 *            read) per token, row of a shared row group, and thread block that shares it
 * Reference  plain C, integer sums bit for bit (tests/gpu/test_w4ax.c)
 * Used by    stream_plan.cc
 */
#ifndef QT_KERNELS_CUDA_W4AX_STREAM_CUH
#define QT_KERNELS_CUDA_W4AX_STREAM_CUH

#include "kernels/cuda/w4ax/w4ax.cuh"

extern __shared__ __align__(128) unsigned char w4ax_smem[];

template <int MT, int S> struct w4ax_stream_stage {
    enum {
        CODES = S * 1024,
        SCALES_AT = CODES,
        X_AT = SCALES_AT + S * 32,
        X_SCALE_AT = X_AT + MT * 8 * 128,
        WORD_AT = X_SCALE_AT + MT * 8 * 4,
        BYTES = (WORD_AT + 16 + 127) / 128 * 128,
        ROWS = S * 16,
        PITCH = ROWS + 4, /* of partial sums: tokens of a fragment are in different banks */
        /* Pipeline stages that fit in shared memory with 8 warps (4 warps of the largest). */
        DEPTH = S == 2   ? (MT == 4 ? 3 : 5)
                : S == 4 ? (MT == 1   ? 4
                            : MT == 2 ? 3
                                      : 2)
                         : 3,
    };
};

/* Position of a warp's producer side. */
struct w4ax_stream_cursor {
    unsigned unit;  /* the next work unit to copy */
    int group, kb;  /* its row group and channel block */
    int copied;     /* number of work units copied */
    uint32_t words; /* lane i has the block word of the warp's work unit copied / 32 * 32 + i */
};

static __device__ __forceinline__ void w4ax_load_words(const w4ax_args &a, w4ax_stream_cursor *c,
                                                       int lane, int warps)
{
    c->words = __ldg(a.blocks + (c->kb + lane * warps) % a.kblocks);
}

enum { W4AX_WEIGHTS = 1, W4AX_X = 2 };

/* Starts the copies of PARTS of unit c->unit to a stage, if the unit is below `end`; advances c. */
template <int SCALES, int MT, int S, int PARTS>
static __device__ __forceinline__ void w4ax_copy_next(const w4ax_args &a, w4ax_stream_cursor *c,
                                                      uint32_t stage, unsigned end, int lane,
                                                      int warps)
{
    typedef w4ax_stream_stage<MT, S> L;
    if (c->unit < end) {
        const int strip0 = c->group * S;
        /* A last channel block of up to 64 channels has one fragment block. It is copied twice: any
         * codes will do, because the activations are zeros. */
        const int second = 2 * c->kb + 1 < a.blocks64 ? 512 : 0;
#pragma unroll
        for (int s = 0; s < S && PARTS & W4AX_WEIGHTS; s++) {
            const unsigned char *codes = w4ax_codes(a, min(strip0 + s, a.strips - 1), c->kb);
            ptx_copy_16(stage + s * 1024 + lane * 16, codes + lane * 16);
            ptx_copy_16(stage + s * 1024 + 512 + lane * 16, codes + second + lane * 16);
        }
        enum { SCALE_CHUNKS = SCALES == QTOOL_W4AX_BLOCK ? 2 : SCALES == QTOOL_W4AX_INT ? 1 : 0 };
        if (PARTS & W4AX_WEIGHTS && SCALE_CHUNKS && lane < S * SCALE_CHUNKS) {
            int s = lane / (SCALE_CHUNKS + !SCALE_CHUNKS), h = lane - s * SCALE_CHUNKS;
            size_t at = (size_t)min(strip0 + s, a.strips - 1) * a.kblocks + c->kb;
            ptx_copy_16(stage + L::SCALES_AT + s * 32 + h * 16,
                        a.scale + (at * SCALE_CHUNKS + h) * 16);
        }
        if (PARTS & W4AX_X) {
            const uint32_t word = __shfl_sync(~0u, c->words, c->copied & 31);
            const bool wide = word & QTOOL_W4AX_WIDE_ROWS;
            const size_t rows =
                (size_t)((word & ~QTOOL_W4AX_NARROW_VALUES) >> 1) * 64 * (size_t)a.x_tokens;
            const unsigned char *x = a.x + rows + (size_t)a.token0 * (wide ? 128 : 64);
            const int chunks = a.m * (wide ? 8 : 4);
#pragma unroll
            for (int i = 0; i < 2 * MT; i++)
                if (i * 32 + lane < chunks)
                    ptx_copy_16(stage + L::X_AT + (i * 32 + lane) * 16, x + (i * 32 + lane) * 16);
            if (SCALES == QTOOL_W4AX_BLOCK && lane * 4 < a.m)
                ptx_copy_16(stage + L::X_SCALE_AT + lane * 16,
                            a.x_scale + (size_t)c->kb * a.x_pitch + a.token0 + lane * 4);
            if (lane == 0)
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(stage + L::WORD_AT), "r"(word)
                             : "memory");
        }
        c->unit += warps;
        c->kb += warps;
        while (c->kb >= a.kblocks) {
            c->kb -= a.kblocks;
            c->group++;
        }
        if ((++c->copied & 31) == 0)
            w4ax_load_words(a, c, lane, warps);
    }
}

/* ---- mainloop ------------------------------------------------------------------------------- */

/* Loads the B operands of the four k-steps of a channel block for a tile of 8 tokens. wide: X is
 * not packed. */
static __device__ __forceinline__ void w4ax_load_x(uint32_t b[4][2], uint32_t x, int row, int lane,
                                                   bool wide)
{
    if (wide) {
#pragma unroll
        for (int p = 0; p < 2; p++) {
            uint32_t r[4];
            ptx_ldmatrix_x4(r, x + row * 128 + ((4 * p + lane / 8) ^ (row & 7)) * 16);
            b[2 * p][0] = r[0];
            b[2 * p][1] = r[1];
            b[2 * p + 1][0] = r[2];
            b[2 * p + 1][1] = r[3];
        }
    } else { /* bytes are 16 times the codes */
        uint32_t r[4];
        ptx_ldmatrix_x4(r, x + row * 64 + (lane / 8 ^ (row >> 1 & 3)) * 16);
#pragma unroll
        for (int s = 0; s < 4; s++) {
            b[s][0] = r[s] << 4 & 0xf0f0f0f0;
            b[s][1] = r[s] & 0xf0f0f0f0;
        }
    }
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
/* Loads the B operands of m16n8k64 s4 without unpacking: k-steps 2 p and 2 p + 1 are one
 * m16n8k64. */
static __device__ __forceinline__ void w4ax_load_x_s4(uint32_t b[4], uint32_t x, int row, int lane)
{
    ptx_ldmatrix_x4(b, x + row * 64 + (lane / 8 ^ (row >> 1 & 3)) * 16);
}
#endif

/* Multiplies the work unit in a stage and adds the products to the accumulators. */
template <int SCALES, int MT, int S>
static __device__ __forceinline__ void
w4ax_multiply_unit(typename w4ax_sum<SCALES>::type acc[S][MT][4], const w4ax_args &a,
                   const unsigned char *stage, int lane)
{
    typedef w4ax_stream_stage<MT, S> L;
    const bool wide = *(const uint32_t *)(stage + L::WORD_AT) & QTOOL_W4AX_WIDE_ROWS;
    const uint32_t x_at = ptx_shared(stage + L::X_AT);
    uint32_t x[MT][4][2];
    float2 xs[MT];
    /* Unpacked weights and packed activations are 16 times their codes, except with m16n8k64. */
    float unit = wide ? 0x1p-4f : 0x1p-8f;
#pragma unroll
    for (int t = 0; t < MT; t++) {
        int row = min(t * 8 + lane % 8, a.m - 1);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
        if (SCALES == QTOOL_W4AX_BLOCK && !wide) {
            w4ax_load_x_s4(&x[t][0][0], x_at, row, lane);
            unit = 1;
        } else
#endif
            w4ax_load_x(x[t], x_at, row, lane, wide);
        if (SCALES == QTOOL_W4AX_BLOCK) {
            xs[t] = *(const float2 *)(stage + L::X_SCALE_AT + (t * 8 + lane % 4 * 2) * 4);
            xs[t].x *= unit;
            xs[t].y *= unit;
        }
    }
#pragma unroll
    for (int s = 0; s < S; s++) {
        int block[MT][4] = {};
        uint32_t w[8];
        *(uint4 *)w = *(const uint4 *)(stage + s * 1024 + lane * 16);
        *(uint4 *)(w + 4) = *(const uint4 *)(stage + s * 1024 + 512 + lane * 16);
        const unsigned char *scale = stage + L::SCALES_AT + s * 32;
        w4ax_int_scale q;
        if (SCALES == QTOOL_W4AX_INT)
            q = w4ax_int_scale_of(*(const uint16_t *)(scale + lane / 4 * 2));
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
        if (SCALES == QTOOL_W4AX_BLOCK && !wide) {
#pragma unroll
            for (int t = 0; t < MT; t++)
#pragma unroll
                for (int p = 0; p < 2; p++)
                    ptx_mma_s4(block[t], w + 4 * p, x[t][p][0], x[t][p][1]);
        } else
#endif
#pragma unroll
            for (int k = 0; k < 4; k++) {
                uint32_t frag[4];
                if (SCALES == QTOOL_W4AX_INT)
                    w4ax_unpack_int(frag, w[2 * k], w[2 * k + 1], q, a.nibbles);
                else
                    w4ax_unpack(frag, w[2 * k], w[2 * k + 1], w4ax_constants_after(0));
#pragma unroll
                for (int t = 0; t < MT; t++) {
                    int *to = SCALES == QTOOL_W4AX_BLOCK ? block[t] : (int *)acc[s][t];
                    if (SCALES == QTOOL_W4AX_INT)
                        ptx_mma_u8(to, frag, x[t][k][0], x[t][k][1]);
                    else
                        ptx_mma_s8(to, frag, x[t][k][0], x[t][k][1]);
                }
            }
        if (SCALES == QTOOL_W4AX_BLOCK) {
            float2 ws = __half22float2(*(const __half2 *)(scale + lane / 4 * 4));
#pragma unroll
            for (int t = 0; t < MT; t++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    acc[s][t][i] +=
                        (float)block[t][i] * ((i < 2 ? ws.x : ws.y) * (i % 2 ? xs[t].y : xs[t].x));
        }
    }
}

/* ---- the kernel ----------------------------------------------------------------------------- */

/* Epilogue of a row group: adds the partial sums of the warps. Stores them to Y if this thread
 * block has the whole row group, else to the workspace. */
template <int SCALES, int MT, int S>
static __device__ __forceinline__ void
w4ax_group_epilogue(const typename w4ax_sum<SCALES>::type acc[S][MT][4], const w4ax_args &a,
                    int group, bool whole)
{
    typedef typename w4ax_sum<SCALES>::type sum_t;
    typedef w4ax_stream_stage<MT, S> L;
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int warps = (int)blockDim.x / 32, g = lane / 4, step = a.m * L::PITCH;
    sum_t *part = (sum_t *)w4ax_smem;
    __syncthreads(); /* partial sums of the previous row group have been read */
#pragma unroll
    for (int t = 0; t < MT; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int token = t * 8 + lane % 4 * 2 + i % 2;
            if (token < a.m)
#pragma unroll
                for (int s = 0; s < S; s++)
                    part[warp * step + token * L::PITCH + s * 16 + g + i / 2 * 8] = acc[s][t][i];
        }
    __syncthreads();
    uint32_t *partial = whole ? NULL : w4ax_partial(a, (int)blockIdx.x, group, L::ROWS);
    for (int o = (int)threadIdx.x; o < a.m * L::ROWS; o += (int)blockDim.x) {
        int token = o / L::ROWS, row = o % L::ROWS;
        sum_t v = 0;
        for (int w = 0; w < warps; w++)
            v += part[w * step + token * L::PITCH + row];
        if (!whole)
            __stcg((sum_t *)partial + o, v);
        else if (group * L::ROWS + row < a.n)
            w4ax_store<SCALES>(a, token, group * L::ROWS + row, v);
    }
}

template <int SCALES, int MT, int S>
__global__ void __launch_bounds__(256, 1) qt_w4ax_stream_kernel(const __grid_constant__ w4ax_args a)
{
    enum { DEPTH = w4ax_stream_stage<MT, S>::DEPTH, BYTES = w4ax_stream_stage<MT, S>::BYTES };
    typedef typename w4ax_sum<SCALES>::type sum_t;
    const int lane = (int)threadIdx.x % 32, warps = (int)blockDim.x / 32;
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    const unsigned begin = blockIdx.x * (unsigned)a.cta_units;
    const unsigned end = min(begin + a.cta_units, (unsigned)a.groups * a.kblocks);
    const int sums_bytes = warps * a.m * w4ax_stream_stage<MT, S>::PITCH * 4;
    unsigned char *stages = w4ax_smem + (sums_bytes + 127) / 128 * 128 + warp * (DEPTH * BYTES);
    const uint32_t stages_at = ptx_shared(stages);

    w4ax_stream_cursor c;
    c.unit = begin + warp;
    c.group = (int)(c.unit / a.kblocks);
    c.kb = (int)(c.unit % a.kblocks);
    c.copied = 0;
    w4ax_load_words(a, &c, lane, warps);
    ptx_launch_dependents();
    /* The addresses of X depend on the block words, those of weights do not, so the first copy of
     * weights is started without waiting for the words. In a dependent launch the weights of
     * DEPTH - 1 stages are copied before the wait for the previous kernel; X and the workspace are
     * accessed after it. */
    w4ax_stream_cursor early = c;
    const int ahead = a.dependent ? DEPTH - 1 : 1;
#pragma unroll 1
    for (int i = 0; i < ahead; i++)
        w4ax_copy_next<SCALES, MT, S, W4AX_WEIGHTS>(a, &early, stages_at + i * BYTES, end, lane,
                                                    warps);
    if (a.dependent)
        ptx_wait_previous();
#pragma unroll 1
    for (int i = 0; i < DEPTH - 1; i++) {
        if (i >= ahead)
            w4ax_copy_next<SCALES, MT, S, W4AX_WEIGHTS>(a, &early, stages_at + i * BYTES, end, lane,
                                                        warps);
        w4ax_copy_next<SCALES, MT, S, W4AX_X>(a, &c, stages_at + i * BYTES, end, lane, warps);
        ptx_copy_commit();
    }

    unsigned unit = begin + warp;
    int stage = 0, free_stage = DEPTH - 1;
#pragma unroll 1
    for (int group = (int)(begin / a.kblocks); (unsigned)group * a.kblocks < end; group++) {
        const unsigned group0 = (unsigned)group * a.kblocks, group1 = group0 + a.kblocks;
        sum_t acc[S][MT][4] = {};
#pragma unroll 1
        for (; unit < min(group1, end); unit += warps) {
            ptx_copy_wait<DEPTH - 2>();
            __syncwarp(); /* all lanes' copies have arrived; the free stage has been read */
            w4ax_copy_next<SCALES, MT, S, W4AX_WEIGHTS | W4AX_X>(
                a, &c, stages_at + free_stage * BYTES, end, lane, warps);
            ptx_copy_commit();
            w4ax_multiply_unit<SCALES, MT, S>(acc, a, stages + stage * BYTES, lane);
            stage = stage + 1 == DEPTH ? 0 : stage + 1;
            free_stage = free_stage + 1 == DEPTH ? 0 : free_stage + 1;
        }
        const bool whole = begin <= group0 && group1 <= end;
        w4ax_group_epilogue<SCALES, MT, S>(acc, a, group, whole);
        if (!whole)
            w4ax_split_k_reduce<SCALES>(a, group, w4ax_stream_stage<MT, S>::ROWS,
                                        (int)(group0 / a.cta_units),
                                        (int)((group1 - 1) / a.cta_units));
    }
}

/* ---- host ----------------------------------------------------------------------------------- */

template <int SCALES, int MT, int S>
static const void *w4ax_stream_instance(int warps, int m, int *smem)
{
    int sums = (warps * m * w4ax_stream_stage<MT, S>::PITCH * 4 + 127) / 128 * 128;
    *smem = sums + warps * w4ax_stream_stage<MT, S>::DEPTH * w4ax_stream_stage<MT, S>::BYTES;
    return (const void *)qt_w4ax_stream_kernel<SCALES, MT, S>;
}

template <int SCALES>
static const void *w4ax_stream_find(int tokens, int strips, int warps, int m, int *smem)
{
#define INSTANCE(mt, s)                                                                            \
    if (tokens == 8 * mt && strips == s)                                                           \
        return w4ax_stream_instance<SCALES, mt, s>(warps, m, smem);
    INSTANCE(1, 2)
    INSTANCE(1, 4)
    INSTANCE(2, 2)
    INSTANCE(2, 4)
    INSTANCE(4, 2)
    INSTANCE(4, 4)
#undef INSTANCE
    return NULL;
}

#endif
