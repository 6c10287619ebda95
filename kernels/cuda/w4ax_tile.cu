/*
 * Y = X W^T of 4-bit integer weights for many tokens, by wgmma with the weights as A operand in
 * registers.
 *
 *   unit     a tile of 128 RT rows x TOKENS tokens, one k-block of 128 channels; units are numbered
 *            tile by tile (tokens first), and a block of threads does cta_units in a row
 *   block    a warpgroup that copies; two consumer warpgroups of 64 RT rows each
 *   stage    [ X: TOKENS rows of 128 bytes | codes of the strips | their scales | scales of X ]
 *
 *   copier:    global -- cp.async.bulk --> stage, an mbarrier each way
 *   consumer:  codes -- shift, mask --> A registers --\
 *              X (swizzled by who wrote it) ---------- wgmma m64nTOKENSk32 --> INT32
 *              BLOCK: INT32 * scale of row * scale of token --> FP32, while the other warpgroup
 *              multiplies; INT: the scale is multiplied into the codes, INT32 to the end
 *   tile end:  shared tiles: sums meet in the workspace, the last block to come adds them in order
 *              --> F16 --> transposed in shared memory --> Y
 *
 * Requires  compute capability 9.0; blocks of X not packed
 * Moves     weights and X once per tile, through L2; Y once
 * Oracle    as the stream kernel
 */
#include "kernels/cuda/w4ax_kernels.h"

extern __shared__ __align__(1024) unsigned char tile_smem[];

template <int SCALES, int TOKENS, int RT> struct w4ax_tile {
    enum {
        WG_ROWS = 64 * RT,
        ROWS = 2 * WG_ROWS,
        STRIPS = ROWS / 16,
        TOKENS_N = TOKENS,
        X_SCALES = SCALES == QT_W4AX_BLOCK,
        SCALE_BYTES = SCALES == QT_W4AX_BLOCK ? 32
                      : SCALES == QT_W4AX_INT ? 16
                                              : 0,
        CODES_AT = TOKENS * 128,
        SCALES_AT = CODES_AT + STRIPS * 1024,
        X_SCALE_AT = SCALES_AT + STRIPS * 32,
        BYTES = (X_SCALE_AT + TOKENS * 4 + 1023) / 1024 * 1024,
        STAGES = TOKENS * RT == 256 ? 4
                 : TOKENS <= 32     ? 8
                                    : 6,
        OUT_PITCH = WG_ROWS * 2 + 16, /* bytes of a token; 16 more: other banks */
        OUT_AT = STAGES * BYTES,
        OUT_BYTES = TOKENS * OUT_PITCH, /* of a warpgroup */
        BARRIERS_AT = OUT_AT + 2 * OUT_BYTES,
        SMEM = BARRIERS_AT + STAGES * 16 + 1024,
        SUMS = TOKENS / 2, /* of a thread, per 64 rows */
    };
};

enum { COPIERS = 128, CONSUMERS = 256 };

struct tile_place {
    int strip0, token0, tokens; /* tokens below m */
};

template <class T>
static __device__ __forceinline__ tile_place place_of(const w4ax_args &a, int group)
{
    const int tokens = T::TOKENS_N;
    int token_tiles = (a.m + tokens - 1) / tokens;
    tile_place p;
    p.strip0 = group / token_tiles * T::STRIPS;
    p.token0 = group % token_tiles * tokens;
    p.tokens = min(tokens, a.m - p.token0);
    return p;
}

/* ---- copies ------------------------------------------------------------------------------------
 */

/* A copying thread's part: chunk `chunk` of every second strip, and where those begin. */
template <class T> struct tile_cursor {
    tile_place place;
    int group, kb;
    int chunk;                  /* of 16 bytes, of the 64 of a strip */
    uint32_t at[T::STRIPS / 2]; /* strip * blocks64 */
    uint32_t scale_at;          /* strip * kblocks, of the strip whose scales it copies */
    uint32_t word;              /* of the next k-block */
};

template <class T>
static __device__ __forceinline__ void cursor_open(tile_cursor<T> *c, const w4ax_args &a, int group)
{
    const int thread = (int)threadIdx.x;
    c->group = group;
    c->place = place_of<T>(a, group);
    c->chunk = thread % 64;
#pragma unroll
    for (int i = 0; i < T::STRIPS / 2; i++)
        c->at[i] =
            (uint32_t)(min(c->place.strip0 + 2 * i + thread / 64, a.strips - 1) * a.blocks64);
    c->scale_at =
        (uint32_t)(min(c->place.strip0 + thread / 2 % T::STRIPS, a.strips - 1) * a.kblocks);
}

/* Codes and scales by cp.async of all threads: the copy engine takes about 60 clocks a copy, and
 * there would be dozens. X, one piece, by the copy engine. */
template <class T>
static __device__ __forceinline__ void tile_copy(const w4ax_args &a, const tile_cursor<T> &c,
                                                 uint32_t stage, uint32_t bar)
{
    const int thread = (int)threadIdx.x;
    if (thread == COPIERS - 1) {
        const uint32_t x_bytes = (uint32_t)c.place.tokens * 128;
        const uint32_t scale_bytes = T::X_SCALES ? (uint32_t)(c.place.tokens + 3) / 4 * 16 : 0;
        const size_t rows = (size_t)((c.word & ~QT_W4AX_NARROW_VALUES) >> 1) * 64 * (size_t)a.m;
        ptx_barrier_expect(bar, x_bytes + scale_bytes);
        ptx_copy_bulk(stage, a.x + rows + (size_t)c.place.token0 * 128, x_bytes, bar);
        if (T::X_SCALES)
            ptx_copy_bulk(stage + T::X_SCALE_AT,
                          a.x_scale + (size_t)c.kb * a.x_pitch + c.place.token0, scale_bytes, bar);
    }
    const unsigned char *codes = a.plane + c.kb * 1024 + c.chunk * 16;
#pragma unroll
    for (int i = 0; i < T::STRIPS / 2; i++)
        ptx_copy_16(stage + T::CODES_AT + i * 2048 + thread * 16, codes + (size_t)c.at[i] * 512);
    if (T::SCALE_BYTES && thread < 2 * T::STRIPS && thread % 2 * 16 < T::SCALE_BYTES)
        ptx_copy_16(stage + T::SCALES_AT + thread * 16,
                    a.scale + (size_t)(c.scale_at + c.kb) * T::SCALE_BYTES + thread % 2 * 16);
    ptx_barrier_arrive_copied(bar);
}

/* ---- products ----------------------------------------------------------------------------------
 */

/* A operands of a k-block: those of k-step s, of the rows' r-th 64, at [r][4 s]. */
template <int SCALES, int RT>
static __device__ __forceinline__ void tile_unpack(uint32_t frag[RT][16],
                                                   const unsigned char *codes,
                                                   const unsigned char *scales, int strip, int lane)
{
#pragma unroll
    for (int r = 0; r < RT; r++) {
        const unsigned char *at = codes + (strip + 4 * r) * 1024 + lane * 16;
        uint32_t w[8];
        *(uint4 *)w = *(const uint4 *)at;
        *(uint4 *)(w + 4) = *(const uint4 *)(at + 512);
        if (SCALES == QT_W4AX_INT) {
            w4ax_int_scale q = w4ax_int_scale_of(
                *(const uint16_t *)(scales + (strip + 4 * r) * 32 + lane / 4 * 2));
#pragma unroll
            for (int k = 0; k < 4; k++)
                w4ax_unpack_int(frag[r] + 4 * k, w[2 * k], w[2 * k + 1], q);
        } else {
#pragma unroll
            for (int k = 0; k < 4; k++)
                w4ax_unpack(frag[r] + 4 * k, w[2 * k], w[2 * k + 1]);
        }
    }
}

/* total += sums * scales of rows * scales of tokens */
template <int TOKENS, int RT>
static __device__ __forceinline__ void
tile_flush(float total[RT][TOKENS / 2], const int sums[RT][TOKENS / 2], const unsigned char *scales,
           const float *x_scales, int strip, int lane)
{
    float2 w[RT];
#pragma unroll
    for (int r = 0; r < RT; r++)
        w[r] = __half22float2(*(const __half2 *)(scales + (strip + 4 * r) * 32 + lane / 4 * 4));
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j++) {
        float2 x = *(const float2 *)(x_scales + j * 8 + lane % 4 * 2);
#pragma unroll
        for (int r = 0; r < RT; r++) {
            total[r][4 * j] += (float)sums[r][4 * j] * (w[r].x * x.x);
            total[r][4 * j + 1] += (float)sums[r][4 * j + 1] * (w[r].x * x.y);
            total[r][4 * j + 2] += (float)sums[r][4 * j + 2] * (w[r].y * x.x);
            total[r][4 * j + 3] += (float)sums[r][4 * j + 3] * (w[r].y * x.y);
        }
    }
}

/* Bits that are not known before all that tile_flush reads has come: see skinny_ring.cuh. */
template <int TOKENS, int RT>
static __device__ __forceinline__ uint32_t tile_bits(const float total[RT][TOKENS / 2])
{
    uint32_t bits = 0;
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j++)
            bits |= __float_as_uint(total[r][4 * j + j % 2 * 3]);
    return bits;
}

/* ---- results -----------------------------------------------------------------------------------
 */

/* A thread's i-th sum of a shared tile in block c's part of the workspace is at [i][thread]. */
template <class sum_t, int COUNT>
static __device__ __forceinline__ sum_t *tile_partial(const w4ax_args &a, int c, int group,
                                                      int thread)
{
    const bool first = (long long)c * a.cta_units / a.kblocks == group; /* of the block's tiles */
    return (sum_t *)a.partial + ((size_t)c * 2 + !first) * COUNT * CONSUMERS + thread;
}

/* Adds what the blocks c0..c1 but `mine` have left there: integers, in any order. */
template <int COUNT>
static __device__ __forceinline__ void tile_fold(int *sums, const w4ax_args &a, int group, int c0,
                                                 int c1, int mine, int thread)
{
    for (int c = c0; c <= c1; c++)
        if (c != mine)
#pragma unroll
            for (int i = 0; i < COUNT; i++)
                sums[i] += __ldcg(tile_partial<int, COUNT>(a, c, group, thread) + i * CONSUMERS);
}

/* The same in the order of k. */
template <int COUNT>
static __device__ __forceinline__ void tile_fold(float *sums, const w4ax_args &a, int group, int c0,
                                                 int c1, int mine, int thread)
{
    float own[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        own[i] = sums[i];
        sums[i] = 0;
    }
    for (int c = c0; c <= c1; c++) {
        const float *from = tile_partial<float, COUNT>(a, c, group, thread);
        if (c == mine)
#pragma unroll
            for (int i = 0; i < COUNT; i++)
                sums[i] += own[i];
        else
#pragma unroll
            for (int i = 0; i < COUNT; i++)
                sums[i] += __ldcg(from + i * CONSUMERS);
    }
}

/*
 * The block's sums of a tile that others share. All but the last to come put theirs into the
 * workspace; the last, for which true is returned, waits until they have and adds them to its own.
 * It waits for blocks that have nothing left to wait for. arrivals: how many have come, and 65536
 * times how many have put.
 */
template <class sum_t, int COUNT>
static __device__ __forceinline__ bool tile_meet(sum_t *sums, const w4ax_args &a, int group,
                                                 int thread, volatile int *flag)
{
    const long long unit0 = (long long)group * a.kblocks;
    const int c0 = (int)(unit0 / a.cta_units), mine = (int)blockIdx.x;
    const int c1 = (int)((unit0 + a.kblocks - 1) / a.cta_units);
    unsigned *arrivals = a.arrivals + group;
    if (thread == 0)
        *flag = (atomicAdd(arrivals, 1) & 0xffff) == (unsigned)(c1 - c0);
    ptx_named_barrier(1, CONSUMERS);
    const bool last = *flag;
    if (!last) {
        sum_t *to = tile_partial<sum_t, COUNT>(a, mine, group, thread);
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            __stcg(to + i * CONSUMERS, sums[i]);
        __threadfence();
    } else if (thread == 0) {
        while (ptx_load_acquire(arrivals) >> 16 != (unsigned)(c1 - c0))
            ;
        *arrivals = 0; /* for the next launch */
    }
    ptx_named_barrier(1, CONSUMERS);
    if (!last) {
        if (thread == 0)
            atomicAdd(arrivals, 0x10000);
        return false;
    }
    tile_fold<COUNT>(sums, a, group, c0, c1, mine, thread);
    return true;
}

static __device__ __forceinline__ uint32_t tile_pair(const w4ax_args &a, float x, float y)
{
    if (a.output == QT_W4AX_BF16) {
        __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
        return *(uint32_t *)&v;
    }
    __half2 v = __floats2half2_rn(x, y);
    return *(uint32_t *)&v;
}

/* What is still to be applied to a sum: of rows g, g + 8 and tokens 2t, 2t + 1 of eight. */
template <int SCALES>
static __device__ __forceinline__ float
tile_value(const w4ax_args &a, typename w4ax_sum<SCALES>::type sum, float row, int token)
{
    if (SCALES == QT_W4AX_BLOCK)
        return (float)sum * a.factor;
    if (token >= a.m)
        return 0;
    int exact = SCALES == QT_W4AX_INT ? (int)sum - 128 * __ldg(a.x_sum + token) : (int)sum;
    return (float)exact * (__ldg(a.x_scale + token) * row) * a.factor;
}

/* F32: as the sums lie in the registers. */
template <int SCALES, int TOKENS, int RT>
static __device__ __forceinline__ void tile_store_f32(const typename w4ax_sum<SCALES>::type *sums,
                                                      const w4ax_args &a, const tile_place &p,
                                                      int wg)
{
    const int thread = (int)threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) {
            int token = p.token0 + i / 4 * 8 + lane % 4 * 2 + i % 2;
            int row = (p.strip0 + (wg * RT + r) * 4 + warp) * 16 + lane / 4 + i / 2 % 2 * 8;
            if (token < a.m && row < a.n)
                w4ax_store<SCALES>(a, token, row, sums[r * (TOKENS / 2) + i]);
        }
}

/* One warpgroup's rows of a tile to Y. `out` is its part of shared memory. */
template <int SCALES, int TOKENS, int RT>
static __device__ __forceinline__ void
tile_store(const typename w4ax_sum<SCALES>::type sums[RT][TOKENS / 2], const w4ax_args &a,
           const tile_place &p, unsigned char *out, int wg)
{
    typedef w4ax_tile<SCALES, TOKENS, RT> T;
    const int thread = (int)threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
    if (a.output == QT_W4AX_F32) {
        tile_store_f32<SCALES, TOKENS, RT>(sums[0], a, p, wg);
        return;
    }
    ptx_named_barrier(2 + wg, 128); /* the tile before has been stored */
#pragma unroll
    for (int r = 0; r < RT; r++) {
        float2 row = {1, 1};
        int strip = p.strip0 + wg * 4 * RT + 4 * r + warp;
        if (SCALES != QT_W4AX_BLOCK)
            row = __half22float2(
                ((const __half2 *)a.row_scale)[min(strip, a.strips - 1) * 8 + lane / 4]);
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j += 2) {
            uint32_t m[4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const auto *s = sums[r] + 4 * (j + i);
                int token = p.token0 + (j + i) * 8 + lane % 4 * 2;
                m[2 * i] = tile_pair(a, tile_value<SCALES>(a, s[0], row.x, token),
                                     tile_value<SCALES>(a, s[1], row.x, token + 1));
                m[2 * i + 1] = tile_pair(a, tile_value<SCALES>(a, s[2], row.y, token),
                                         tile_value<SCALES>(a, s[3], row.y, token + 1));
            }
            /* Matrices: rows 0..7, 8..15 of tokens 8 j..., then of the next eight. */
            int token = j * 8 + lane / 16 * 8 + lane % 8;
            ptx_stmatrix_x4_trans(ptx_shared(out) + token * T::OUT_PITCH +
                                      (r * 64 + warp * 16 + lane / 8 % 2 * 8) * 2,
                                  m);
        }
    }
    ptx_named_barrier(2 + wg, 128);
    const int row0 = (p.strip0 + wg * 4 * RT) * 16, rows = min(a.n - row0, (int)T::WG_ROWS);
    uint16_t *y = (uint16_t *)a.y;
    if (rows == T::WG_ROWS && a.n % 8 == 0 && ((size_t)a.y & 15) == 0) {
        enum { CHUNKS = T::WG_ROWS / 8 };
        for (int i = thread; i < p.tokens * CHUNKS; i += 128)
            *(uint4 *)(y + (size_t)(p.token0 + i / CHUNKS) * a.n + row0 + i % CHUNKS * 8) =
                *(const uint4 *)(out + i / CHUNKS * T::OUT_PITCH + i % CHUNKS * 16);
    } else if (rows > 0) {
        for (int i = thread; i < p.tokens * rows; i += 128)
            y[(size_t)(p.token0 + i / rows) * a.n + row0 + i % rows] =
                *(const uint16_t *)(out + i / rows * T::OUT_PITCH + i % rows * 2);
    }
}

/* ---- the two roles -----------------------------------------------------------------------------
 */

struct tile_pipe {
    uint32_t full, empty; /* barriers of stage 0; 16 bytes apart */
    uint32_t stages;
    long long begin, end; /* units */
};

template <class T>
static __device__ __forceinline__ void tile_copier(const w4ax_args &a, const tile_pipe &q)
{
    int stage = 0;
    uint32_t parity = 1;
    tile_cursor<T> c;
    cursor_open(&c, a, (int)(q.begin / a.kblocks));
    c.kb = (int)(q.begin % a.kblocks);
    c.word = __ldg(a.blocks + c.kb);
#pragma unroll 1
    for (long long unit = q.begin; unit < q.end; unit++) {
        const int next = c.kb + 1 == a.kblocks ? 0 : c.kb + 1;
        const uint32_t next_word = __ldg(a.blocks + next);
        ptx_barrier_wait(q.empty + stage * 16, parity);
        tile_copy<T>(a, c, q.stages + stage * T::BYTES, q.full + stage * 16);
        if (++stage == T::STAGES) {
            stage = 0;
            parity ^= 1;
        }
        c.kb = next;
        c.word = next_word;
        if (next == 0)
            cursor_open(&c, a, c.group + 1);
    }
}

template <int SCALES, int TOKENS, int RT>
static __device__ __forceinline__ void tile_consumer(const w4ax_args &a, const tile_pipe &q,
                                                     unsigned char *smem, int wg)
{
    typedef w4ax_tile<SCALES, TOKENS, RT> T;
    typedef typename w4ax_sum<SCALES>::type sum_t;
    const int thread = (int)threadIdx.x - 128, lane = thread % 32;
    const int strip = wg * 4 * RT + thread / 32 % 4;
    int stage = 0;
    uint32_t parity = 0, frag[RT][16];
    __shared__ int flag;
    if (q.begin < q.end) {
        ptx_barrier_wait(q.full, 0);
        tile_unpack<SCALES, RT>(frag, smem + T::CODES_AT, smem + T::SCALES_AT, strip, lane);
    }
    long long unit = q.begin;
#pragma unroll 1
    while (unit < q.end) {
        const int group = (int)(unit / a.kblocks);
        const long long group0 = (long long)group * a.kblocks;
        const long long last = min(group0 + a.kblocks, q.end);
        const bool whole = unit == group0 && last == group0 + a.kblocks;
        float total[RT][T::SUMS];
        int sums[RT][T::SUMS];
#pragma unroll
        for (int r = 0; r < RT; r++)
#pragma unroll
            for (int i = 0; i < T::SUMS; i++) {
                total[r][i] = 0;
                sums[r][i] = 0;
            }
#pragma unroll 1
        for (; unit < last; unit++) {
            unsigned char *now = smem + stage * T::BYTES;
            const uint32_t x = ptx_wgmma_b(ptx_shared(now));
            ptx_wgmma_fence();
#pragma unroll
            for (int r = 0; r < RT; r++)
#pragma unroll
                for (int k = 0; k < 4; k++)
                    ptx_wgmma_s8<TOKENS, SCALES == QT_W4AX_INT>::run(
                        sums[r], frag[r] + 4 * k, x + 2 * k, SCALES != QT_W4AX_BLOCK || k > 0);
            ptx_wgmma_commit();
            ptx_wgmma_wait<0>();
#pragma unroll
            for (int r = 0; r < RT; r++)
#pragma unroll
                for (int i = 0; i < T::SUMS; i++)
                    ptx_keep_behind(sums[r][i]);
            const int next = stage + 1 == T::STAGES ? 0 : stage + 1;
            const uint32_t next_parity = next ? parity : parity ^ 1;
            /*
             * Not before the products have ended: the assembler takes the operand registers of
             * products under way for free. Other codes in other registers do not help, it merges
             * them. The other warpgroup multiplies meanwhile.
             */
            if (unit + 1 < q.end) {
                unsigned char *then = smem + next * T::BYTES;
                ptx_barrier_wait(q.full + next * 16, next_parity);
                tile_unpack<SCALES, RT>(frag, then + T::CODES_AT, then + T::SCALES_AT, strip, lane);
            }
            if (SCALES == QT_W4AX_BLOCK)
                tile_flush<TOKENS, RT>(total, sums, now + T::SCALES_AT,
                                       (const float *)(now + T::X_SCALE_AT), strip, lane);
            __syncwarp();
            if (lane == 0) {
                const uint32_t bits =
                    SCALES == QT_W4AX_BLOCK ? tile_bits<TOKENS, RT>(total) & a.zero : 0;
                ptx_barrier_arrive(q.empty + stage * 16 + bits);
            }
            stage = next;
            parity = next_parity;
        }
        sum_t(*result)[T::SUMS] =
            (sum_t(*)[T::SUMS])(SCALES == QT_W4AX_BLOCK ? (void *)total : (void *)sums);
        if (whole || tile_meet<sum_t, RT * T::SUMS>(result[0], a, group, thread, &flag))
            tile_store<SCALES, TOKENS, RT>(result, a, place_of<T>(a, group),
                                           smem + T::OUT_AT + wg * T::OUT_BYTES, wg);
    }
}

template <int SCALES, int TOKENS, int RT>
__global__ void __launch_bounds__(QT_W4AX_TILE_THREADS, 1)
    qt_w4ax_tile_kernel(const __grid_constant__ w4ax_args a)
{
    typedef w4ax_tile<SCALES, TOKENS, RT> T;
    unsigned char *smem = tile_smem + (1024 - ptx_shared(tile_smem) % 1024) % 1024;
    tile_pipe q;
    q.stages = ptx_shared(smem);
    q.full = q.stages + T::BARRIERS_AT;
    q.empty = q.full + 8;
    q.begin = (long long)blockIdx.x * a.cta_units;
    q.end = min(q.begin + a.cta_units, (long long)a.groups * a.kblocks);
    if (threadIdx.x == 0) {
        for (int i = 0; i < T::STAGES; i++) {
            ptx_barrier_init(q.full + i * 16, COPIERS + 1);
            ptx_barrier_init(q.empty + i * 16, CONSUMERS / 32);
        }
        ptx_barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < COPIERS) {
        ptx_registers_fewer<40>();
        tile_copier<T>(a, q);
    } else {
        ptx_registers_more<232>();
        tile_consumer<SCALES, TOKENS, RT>(a, q, smem, (int)threadIdx.x / 128 - 1);
    }
}

/* ---- host --------------------------------------------------------------------------------------
 */

template <int SCALES, int TOKENS, int RT> static const void *instance(int *rows, int *smem)
{
    *rows = w4ax_tile<SCALES, TOKENS, RT>::ROWS;
    *smem = w4ax_tile<SCALES, TOKENS, RT>::SMEM;
    return (const void *)qt_w4ax_tile_kernel<SCALES, TOKENS, RT>;
}

/* BLOCK has INT32 and FP32 sums: no registers for 256 x 128. */
template <int SCALES> static const void *find(int tokens, int *rows, int *smem)
{
    return tokens == 16   ? instance<SCALES, 16, 2>(rows, smem)
           : tokens == 32 ? instance<SCALES, 32, 2>(rows, smem)
           : tokens == 64 ? instance<SCALES, 64, 2>(rows, smem)
                          : tokens == 128
               ? instance < SCALES,
           128, SCALES == QT_W4AX_BLOCK ? 1 : 2 > (rows, smem) : NULL;
}

const void *qt_w4ax_tile(enum qt_w4ax_scales scales, int tokens, int *rows, int *smem)
{
    return scales == QT_W4AX_BLOCK ? find<QT_W4AX_BLOCK>(tokens, rows, smem)
           : scales == QT_W4AX_INT ? find<QT_W4AX_INT>(tokens, rows, smem)
                                   : find<QT_W4AX_ROW>(tokens, rows, smem);
}
