/*
 * Attention of one new token per sequence over the cache, split over the sequence.
 *
 *   grid     (splits, KV heads x tiles of 8 NT query heads, sequences); 4 warps
 *   smem     a ring of DEPTH slots a warp, of a slot's keys, values and their parameters; at the
 * end the warps' sums
 *
 *   warp:    slot = TOKENS tokens; warps take the slots of a split in turn
 *            global -- cp.async --> ring --> codes in FP16 mantissas --> S = K q (m16n8k16)
 *            --> p = 2^(S - m) --> times the token's value scale --> FP16, transposed --> O += V^T
 * p
 *
 * The key scales are folded into q, the key zeros shift all products of a query alike and drop out
 * of the softmax. A value is code * scale + least: the scales are multiplied into p, and the sum of
 * p
 * * least is one number a head.
 *
 * The running maximum m is the warp's, per head; it is only looked for when some product exceeds
 * it. Likewise v_unit, the power of two that keeps p * scale within FP16.
 *
 * Moves     the cache once (per tile of query heads), q once a split; splits > 1: partial sums of
 *           (head_dim + 4) * 4 bytes per query head and split, written and read
 * Oracle    attention in FP64 over the decoded cache; relative error <= 1e-3 (FP16 rounding of q *
 *           scale and of p)
 */
#ifndef QT_CUDA_KV4_ATTENTION_CUH
#define QT_CUDA_KV4_ATTENTION_CUH

#include "kernels/cuda/arrive.cuh"
#include "kernels/cuda/kv4_cache.cuh"
#include "kernels/cuda/round.cuh"

#include <cuda_bf16.h>
#include <math.h>

enum { WARPS = 4, THREADS = WARPS * 32, SPLIT_UNIT = 128, MAX_SPLITS = 256 };

struct kv_args {
    kv_view cache;
    const void *q;
    void *out;
    const int *length;
    float *partial;          /* [sequence][query head][split][D + 4]: sums, maximum, denominator */
    unsigned *arrivals;      /* [sequence][grid.y], 0 between launches */
    int heads, group, tiles; /* query heads; per KV head; tiles of them */
    int split_tokens, max_length;
    float scale_log2; /* softmax scale * log2(e) */
    int bf16;
};

extern __shared__ __align__(128) unsigned char kv_smem[];

template <class F> struct kv_slot {
    enum {
        ROWS = F::TOKENS * F::ROW,
        PARAM_AT = 2 * ROWS,
        BYTES = 2 * ROWS + F::PARAMS * F::TOKENS * 4,
        TILES = F::TOKENS / 16,
        STEPS = F::DIM / 16,
    };
};

struct kv_work {
    int lane, warp, sequence, kv_head, head0, heads; /* query heads of this block */
    int begin, end;                                  /* tokens of its split */
};

/* ---- the ring ----------------------------------------------------------------------------------
 */

/* What a lane copies from: chunk `lane` of the rows from place 0 on. */
struct kv_source {
    const unsigned char *k, *v;
    const __half2 *param; /* lane % 4 * 4 further */
    const int *pages;     /* of the sequence, or NULL */
    uint32_t base;        /* place of the head's first token: of a page 0, or of the sequence */
    uint32_t page_places; /* from one page to the next */
};

static __device__ __forceinline__ kv_source kv_source_of(const kv_args &a, const kv_work &w)
{
    const kv_view &c = a.cache;
    const uint32_t page_places = (uint32_t)(c.heads * c.page_tokens);
    kv_source s;
    s.k = c.k + w.lane * 16;
    s.v = c.v + w.lane * 16;
    s.param = c.param + w.lane % 4 * 4;
    s.pages = c.table ? c.table + (size_t)w.sequence * c.table_pitch : NULL;
    s.page_places = page_places;
    s.base = (uint32_t)(w.kv_head * c.page_tokens) + (c.table ? 0 : w.sequence * page_places);
    return s;
}

/* Where the 16 tokens from `token` on lie, which a page holds together. */
static __device__ __forceinline__ uint32_t kv_group_place(const kv_args &a, const kv_source &s,
                                                          int token)
{
    if (!s.pages)
        return s.base + token;
    return s.base + s.pages[token >> a.cache.page_shift] * s.page_places +
           (token & (a.cache.page_tokens - 1));
}

/* Starts copying the slot of tokens token0... and ends the group of copies. Tokens from `end` on
 * become zeros. */
template <class F>
static __device__ __forceinline__ void kv_copy(const kv_args &a, const kv_source &s,
                                               const kv_work &w, uint32_t dst, int token0)
{
    enum { CHUNKS = F::ROW / 16, AT_ONCE = 32 / CHUNKS, PER_GROUP = 16 / AT_ONCE };
    const int left = w.end - token0, row = w.lane / CHUNKS, chunk = w.lane % CHUNKS;
    if (left > 0) {
#pragma unroll
        for (int g = 0; g < F::TOKENS / 16; g++) {
            const uint32_t place = kv_group_place(a, s, left > g * 16 ? token0 + g * 16 : token0);
            const unsigned char *k = s.k + (size_t)place * F::ROW;
            const unsigned char *v = s.v + (size_t)place * F::ROW;
#pragma unroll
            for (int i = 0; i < PER_GROUP; i++) {
                const int in_slot = g * 16 + i * AT_ONCE + row;
                const uint32_t bytes = in_slot < left ? 16 : 0;
                ptx_copy_16_zero(dst + F::key_at(in_slot, chunk), k + i * 512, bytes);
                ptx_copy_16_zero(dst + kv_slot<F>::ROWS + F::value_at(in_slot, chunk), v + i * 512,
                                 bytes);
            }
            if (F::PARAMS && w.lane / 4 == g) {
                const int count = min(max(left - w.lane * 4, 0), 4);
                ptx_copy_16_zero(dst + kv_slot<F>::PARAM_AT + w.lane * 16, s.param + place,
                                 (uint32_t)count * 4);
            }
        }
    }
    ptx_copy_commit();
}

/* ---- queries -----------------------------------------------------------------------------------
 *
 * B fragments of q * k_scale as FP16, each head scaled by the power of two that brings its largest
 * value to 2^14. unit[]: what products of the lane's columns (heads 2t, 2t + 1) are to be
 * multiplied by.
 */
template <class F, int NT> struct kv_queries {
    alignas(16) uint32_t frag[NT][kv_slot<F>::STEPS][2];
    float unit[NT][2];
};

/* What a lane prepares of a head: words of fragments, numbered t, step, half. */
template <class F> struct kv_query_words {
    enum { STEPS = kv_slot<F>::STEPS, WORDS = 8 * STEPS, PER_LANE = WORDS / 32 }; /* of a head */
    uint16_t q[PER_LANE][2];
    float scale[PER_LANE][2];

    __device__ __forceinline__ void load(const kv_args &a, const kv_work &w, int head)
    {
        const uint16_t *from =
            (const uint16_t *)a.q + ((size_t)w.sequence * a.heads + w.head0 + head) * F::DIM;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int word = i * 32 + w.lane;
                const int c = F::channel(word / (2 * STEPS), word / 2 % STEPS, word % 2, h);
                q[i][h] = from[c];
                scale[i][h] = a.cache.k_scale ? a.cache.k_scale[w.kv_head * F::DIM + c] : 1;
            }
    }
    /* As FP16 into words[WORDS]; unit: see above. */
    __device__ __forceinline__ void prepare(const kv_args &a, const kv_work &w, uint32_t *words,
                                            float *unit) const
    {
        float v[PER_LANE][2], top = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                v[i][h] = scale[i][h] * (a.bf16 ? __int_as_float((int)q[i][h] << 16)
                                                : __half2float(__ushort_as_half(q[i][h])));
                top = fmaxf(top, fabsf(v[i][h]));
            }
#pragma unroll
        for (int d = 1; d < 32; d *= 2)
            top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
        const int up = top > 0 && top < INFINITY ? min(14 - ilogbf(top), 100) : 0;
        const float f = exp2f((float)up) * F::channel_factor(w.lane % 2);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            __half2 two = __floats2half2_rn(v[i][0] * f, v[i][1] * f);
            words[i * 32 + w.lane] = *(uint32_t *)&two;
        }
        if (w.lane == 0)
            *unit = a.scale_log2 * exp2f((float)-up) / F::CODE_UNIT;
    }
};

/*
 * Through shared memory, a warp a head: what a block runs once should be little code, as it has to
 * be fetched. first: words of head number w.warp, loaded before the cache, or queries would come
 * after all that is under way. room: NT * 32 * D + 32 NT bytes, which may be written again after
 * the second barrier.
 */
template <class F, int NT>
static __device__ __forceinline__ void kv_load_queries(kv_queries<F, NT> *q, const kv_args &a,
                                                       const kv_work &w, kv_query_words<F> first,
                                                       uint32_t *room)
{
    enum { STEPS = kv_slot<F>::STEPS, WORDS = 8 * STEPS };
    float *units = (float *)(room + 8 * NT * WORDS);
#pragma unroll 1
    for (int head = w.warp; head < w.heads; head += WARPS) {
        if (head != w.warp)
            first.load(a, w, head);
        first.prepare(a, w, room + head * WORDS, &units[head]);
    }
#pragma unroll 1
    for (int i = w.heads * WORDS + (int)threadIdx.x; i < 8 * NT * WORDS; i += THREADS)
        room[i] = 0;
    __syncthreads();
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const uint4 *from = (const uint4 *)(room + (n * 32 + w.lane) * (2 * STEPS));
#pragma unroll
        for (int i = 0; i < STEPS / 2; i++)
            *(uint4 *)q->frag[n][2 * i] = from[i];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int head = n * 8 + w.lane % 4 * 2 + h;
            q->unit[n][h] = head < w.heads ? units[head] : 1;
        }
    }
    __syncthreads();
}

/* ---- products ----------------------------------------------------------------------------------
 */

/* Of a warp. Columns are heads 2t, 2t + 1 of each tile of 8; `most`, of products in units of
 * q.unit, and v_unit are the same for the whole warp (column), the others the lane's own tokens'
 * share. */
template <class F, int NT> struct kv_state {
    float out[NT][kv_slot<F>::STEPS][4];
    float most[NT][2], denominator[NT][2], least[NT][2];
    float offset[NT][2]; /* -most * unit */
    float v_unit, v_limit;
};

template <class F, int NT>
static __device__ __forceinline__ void kv_scale_out(kv_state<F, NT> *st, int n, int h, float f)
{
#pragma unroll
    for (int i = 0; i < kv_slot<F>::STEPS; i++) {
        st->out[n][i][h] *= f;
        st->out[n][i][2 + h] *= f;
    }
}

/* Raises the maxima to those of the products s, and scales what was summed. */
template <class F, int NT>
static __device__ __forceinline__ void kv_raise(kv_state<F, NT> *st, const kv_queries<F, NT> &q,
                                                const float s[kv_slot<F>::TILES][NT][4])
{
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float m = st->most[n][h];
#pragma unroll
            for (int i = 0; i < kv_slot<F>::TILES; i++)
                m = fmaxf(m, fmaxf(s[i][n][h], s[i][n][2 + h]));
#pragma unroll
            for (int d = 4; d < 32; d *= 2)
                m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
            float f = ptx_exp2((st->most[n][h] - m) * q.unit[n][h]);
            st->most[n][h] = m;
            st->offset[n][h] = -m * q.unit[n][h];
            st->denominator[n][h] *= f;
            st->least[n][h] *= f;
            kv_scale_out(st, n, h, f);
        }
}

/* Value scales up to `top` are to come: p * scale * v_unit stays below 2^11. */
template <class F, int NT>
static __device__ __forceinline__ void kv_raise_values(kv_state<F, NT> *st, float top)
{
#pragma unroll
    for (int d = 4; d < 32; d *= 2)
        top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
#pragma unroll
    for (int d = 1; d < 4; d *= 2)
        top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    int e = ilogbf(top);
    float unit = exp2f((float)(10 - e)), f = __fdividef(unit, st->v_unit);
    st->v_unit = unit;
    st->v_limit = exp2f((float)(e + 1));
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            kv_scale_out(st, n, h, f);
}

/* p from the products s, in place, and the sums over p; then p scaled for the products with codes.
 */
template <class F, int NT>
static __device__ __forceinline__ void kv_softmax(kv_state<F, NT> *st, const kv_queries<F, NT> &q,
                                                  float s[kv_slot<F>::TILES][NT][4],
                                                  const float2 param[kv_slot<F>::TILES][2])
{
    bool above = false;
#pragma unroll
    for (int i = 0; i < kv_slot<F>::TILES; i++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                above = above || s[i][n][j] > st->most[n][j % 2];
    if (__any_sync(~0u, above))
        kv_raise<F, NT>(st, q, s);
    if (F::PARAMS) {
        float top = 0;
#pragma unroll
        for (int i = 0; i < kv_slot<F>::TILES; i++)
            top = fmaxf(top, fmaxf(param[i][0].x, param[i][1].x));
        if (__any_sync(~0u, top >= st->v_limit && top > 0))
            kv_raise_values<F, NT>(st, top);
    }
#pragma unroll
    for (int i = 0; i < kv_slot<F>::TILES; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float unit = F::PARAMS ? param[i][j].x * st->v_unit : 0x1p10f;
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float p = ptx_exp2(fmaf(s[i][n][2 * j + h], q.unit[n][h], st->offset[n][h]));
                    st->denominator[n][h] += p;
                    if (F::PARAMS)
                        st->least[n][h] += p * param[i][j].y;
                    s[i][n][2 * j + h] = p * unit;
                }
        }
}

/* Products of tokens from `end` on are -inf. */
template <class F, int NT>
static __device__ __forceinline__ void kv_mask(float s[kv_slot<F>::TILES][NT][4], const kv_work &w,
                                               int token0)
{
#pragma unroll
    for (int i = 0; i < kv_slot<F>::TILES; i++)
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (token0 + i * 16 + F::tile_token(w.lane / 4 + 8 * j) >= w.end)
#pragma unroll
                for (int n = 0; n < NT; n++)
                    s[i][n][2 * j] = s[i][n][2 * j + 1] = -INFINITY;
}

/* One slot, whose first token is token0. */
template <class F, int NT>
static __device__ __forceinline__ void kv_slot_step(kv_state<F, NT> *st, const kv_queries<F, NT> &q,
                                                    const kv_work &w, const unsigned char *slot,
                                                    int token0)
{
    typedef kv_slot<F> S;
    float s[S::TILES][NT][4] = {};
    float2 param[S::TILES][2];
#pragma unroll
    for (int i = 0; i < S::TILES; i++) {
        F keys;
        keys.load_keys(slot, i, w.lane);
#pragma unroll
        for (int k = 0; k < S::STEPS; k++) {
            uint32_t a[4];
            keys.key_frag(a, k);
#pragma unroll
            for (int n = 0; n < NT; n++)
                ptx_mma_f16(s[i][n], a, q.frag[n][k][0], q.frag[n][k][1]);
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            int token = i * 16 + F::tile_token(w.lane / 4 + 8 * j);
            if (F::PARAMS)
                param[i][j] = __half22float2(((const __half2 *)(slot + S::PARAM_AT))[token]);
        }
    }
    if (token0 + F::TOKENS > w.end)
        kv_mask<F, NT>(s, w, token0);
    kv_softmax<F, NT>(st, q, s, param);
#pragma unroll
    for (int i = 0; i < S::TILES; i++) {
        uint32_t p[NT][2];
        F values;
        values.load_values(slot + S::ROWS, i, w.lane);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                __half2 v = __floats2half2_rn(s[i][n][2 * j], s[i][n][2 * j + 1]);
                p[n][j] = ptx_transpose_8x8(*(uint32_t *)&v);
            }
#pragma unroll
        for (int m = 0; m < S::STEPS; m++) {
            uint32_t a[4];
            values.value_frag(a, m);
#pragma unroll
            for (int n = 0; n < NT; n++)
                ptx_mma_f16(st->out[n][m], a, p[n][0], p[n][1]);
        }
    }
}

/* ---- sums --------------------------------------------------------------------------------------
 *
 * Sums of a warp or a split, per head: D floats of sum p * value, then the maximum (log2) and sum
 * p. Sums with different maxima meet by scaling with 2^(maximum - largest maximum), in order.
 */

static __device__ __forceinline__ void kv_store_4(const kv_args &a, const kv_work &w, int head,
                                                  int dim, int d, float4 v)
{
    size_t at = ((size_t)w.sequence * a.heads + w.head0 + head) * dim + d;
    *(uint2 *)((uint16_t *)a.out + at) =
        make_uint2(qt_round_two(a.bf16, v.x, v.y), qt_round_two(a.bf16, v.z, v.w));
}

template <class F, int NT>
static __device__ __forceinline__ void kv_put_sums(const kv_state<F, NT> *st, const kv_work &w,
                                                   float *to)
{
    enum { D = F::DIM, SUM = D + 4 };
    const int g = w.lane / 4, t = w.lane % 4;
    const float per = __fdividef(1, st->v_unit);
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int head = n * 8 + 2 * t + h;
            float *sums = to + head * SUM, den = st->denominator[n][h], low = st->least[n][h];
#pragma unroll
            for (int d = 4; d < 32; d *= 2) {
                den += __shfl_xor_sync(~0u, den, d);
                low += __shfl_xor_sync(~0u, low, d);
            }
#pragma unroll
            for (int i = 0; i < kv_slot<F>::STEPS; i++)
#pragma unroll
                for (int u = 0; u < 2; u++)
                    sums[F::value_channel(g, i, u)] =
                        st->out[n][i][2 * u + h] * (F::value_factor(u) * per) + low;
            if (g == 0) {
                sums[D] = -st->offset[n][h];
                sums[D + 1] = den;
            }
        }
}

/* Adds the sums of the warps: to the output when last, else as one sum to `to`. Each thread finds
 * the few factors of its head itself. */
template <int D>
static __device__ __forceinline__ void kv_add_warps(const kv_args &a, const kv_work &w, float *to,
                                                    size_t to_step, const float *from,
                                                    size_t warp_step, bool last)
{
    enum { SUM = D + 4 };
#pragma unroll 1
    for (int o = (int)threadIdx.x; o < w.heads * (D / 4); o += THREADS) {
        const int head = o / (D / 4), d = o % (D / 4) * 4;
        float2 v[WARPS]; /* maximum, denominator */
        float most = -INFINITY, den = 0;
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            v[i] = *(const float2 *)(from + i * warp_step + head * SUM + D);
            most = fmaxf(most, v[i].x);
        }
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            const float4 more = *(const float4 *)(from + i * warp_step + head * SUM + d);
            const float f = ptx_exp2(v[i].x - most);
            den += f * v[i].y;
            sum.x += f * more.x;
            sum.y += f * more.y;
            sum.z += f * more.z;
            sum.w += f * more.w;
        }
        if (last) {
            const float per = __fdividef(1, den);
            kv_store_4(a, w, head, D, d,
                       make_float4(sum.x * per, sum.y * per, sum.z * per, sum.w * per));
        } else {
            *(float4 *)(to + head * to_step + d) = sum;
            if (d == 0)
                *(float2 *)(to + head * to_step + D) = make_float2(most, den);
        }
    }
}

/* Adds the sums of `count` splits, D + 4 floats apart in global memory, to the output. factor: room
 * for count floats a head. */
template <int D>
static __device__ __forceinline__ void kv_add_splits(const kv_args &a, const kv_work &w,
                                                     const float *from, size_t head_step, int count,
                                                     float *factor)
{
    enum { SUM = D + 4, ROUNDS = MAX_SPLITS / 32 };
#pragma unroll 1
    for (int head = w.warp; head < w.heads; head += WARPS) {
        const float *sums = from + head * head_step + D;
        float2 v[ROUNDS]; /* maximum, denominator */
        float most = -INFINITY, den = 0;
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            v[i] = make_float2(-INFINITY, 0);
            if (i * 32 + w.lane < count)
                v[i] = __ldcg((const float2 *)(sums + (i * 32 + w.lane) * SUM));
        }
#pragma unroll
        for (int i = 0; i < ROUNDS; i++)
            most = fmaxf(most, v[i].x);
#pragma unroll
        for (int d = 1; d < 32; d *= 2)
            most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            v[i].x = ptx_exp2(v[i].x - most);
            den += v[i].x * v[i].y;
        }
#pragma unroll
        for (int d = 1; d < 32; d *= 2)
            den += __shfl_xor_sync(~0u, den, d);
        const float per = __fdividef(1, den);
#pragma unroll
        for (int i = 0; i < ROUNDS; i++)
            if (i * 32 + w.lane < count)
                factor[head * count + i * 32 + w.lane] = v[i].x * per;
    }
    __syncthreads();
#pragma unroll 1
    for (int o = (int)threadIdx.x; o < w.heads * (D / 4); o += THREADS) {
        int head = o / (D / 4), d = o % (D / 4) * 4;
        const float *sums = from + head * head_step + d;
        float4 v = make_float4(0, 0, 0, 0);
#pragma unroll 1
        for (int first = 0; first < count; first += 16) /* 16 at a time, the last too: one wait */
#pragma unroll
            for (int i = first; i < first + 16; i++) {
                float4 more = make_float4(0, 0, 0, 0);
                float f = 0;
                if (i < count) {
                    more = __ldcg((const float4 *)(sums + i * SUM));
                    f = factor[head * count + i];
                }
                v.x += f * more.x;
                v.y += f * more.y;
                v.z += f * more.z;
                v.w += f * more.w;
            }
        kv_store_4(a, w, head, D, d, v);
    }
}

/* ---- the kernel --------------------------------------------------------------------------------
 */

/* All but begin and end. */
static __device__ __forceinline__ kv_work kv_work_open(const kv_args &a, int tile_heads)
{
    kv_work w;
    w.lane = (int)threadIdx.x % 32;
    w.warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    w.sequence = (int)blockIdx.z;
    w.kv_head = (int)blockIdx.y / a.tiles;
    int first = (int)blockIdx.y % a.tiles * tile_heads;
    w.head0 = w.kv_head * a.group + first;
    w.heads = min(tile_heads, a.group - first);
    return w;
}

template <class F, int NT, int DEPTH>
__global__ void __launch_bounds__(THREADS) kv_attention_kernel(const __grid_constant__ kv_args a)
{
    enum { D = F::DIM, BYTES = kv_slot<F>::BYTES };
    kv_work w = kv_work_open(a, 8 * NT);
    kv_query_words<F> query;
    const int length = min(a.length[w.sequence], a.max_length);
    if (w.warp < w.heads)
        query.load(a, w, w.warp);
    const int splits = (length + a.split_tokens - 1) / a.split_tokens;
    w.begin = (int)blockIdx.x * a.split_tokens;
    w.end = min(w.begin + a.split_tokens, length);
    if (splits == 0 && blockIdx.x == 0) /* nothing to attend to */
#pragma unroll 1
        for (int i = (int)threadIdx.x * 4; i < w.heads * D; i += THREADS * 4)
            kv_store_4(a, w, i / D, D, i % D, make_float4(0, 0, 0, 0));
    if ((int)blockIdx.x >= splits)
        return;

    const kv_source source = kv_source_of(a, w);
    unsigned char *ring = kv_smem + w.warp * DEPTH * BYTES;
    const int stride = WARPS * F::TOKENS;
    int token = w.begin + w.warp * F::TOKENS, ahead = token;
#pragma unroll 1
    for (int i = 0; i < DEPTH - 1; i++, ahead += stride)
        kv_copy<F>(a, source, w, ptx_shared(ring) + i * BYTES, ahead);
    kv_queries<F, NT> q;
    kv_load_queries(&q, a, w, query,
                    (uint32_t *)(kv_smem + (DEPTH - 1) * BYTES)); /* a slot still free */
    kv_state<F, NT> st = {};
    st.v_unit = 0x1p10f;
#pragma unroll
    for (int n = 0; n < NT; n++)
        for (int h = 0; h < 2; h++) {
            st.most[n][h] = -INFINITY;
            st.offset[n][h] = INFINITY;
        }

    int slot = 0, free_slot = DEPTH - 1;
#pragma unroll 1
    for (; token < w.end; token += stride, ahead += stride) {
        ptx_copy_wait<DEPTH - 2>();
        __syncwarp(); /* other lanes copied, and the slot before has been read */
        kv_copy<F>(a, source, w, ptx_shared(ring) + free_slot * BYTES, ahead);
        kv_slot_step<F, NT>(&st, q, w, ring + slot * BYTES, token);
        slot = slot + 1 == DEPTH ? 0 : slot + 1;
        free_slot = free_slot + 1 == DEPTH ? 0 : free_slot + 1;
    }
    ptx_copy_wait<0>();
    __syncthreads();

    enum { SUM = D + 4, WARP_SUMS = 8 * NT * SUM };
    __shared__ int last;
    float *sums = (float *)kv_smem;
    kv_put_sums<F, NT>(&st, w, sums + w.warp * WARP_SUMS);
    __syncthreads();
    const size_t head_step = (size_t)gridDim.x * SUM;
    float *partial = a.partial + ((size_t)w.sequence * a.heads + w.head0) * head_step;
    kv_add_warps<D>(a, w, partial + blockIdx.x * SUM, head_step, sums, WARP_SUMS, splits == 1);
    if (splits > 1 && qt_last_to_arrive(&a.arrivals[blockIdx.z * gridDim.y + blockIdx.y],
                                        (unsigned)splits, &last))
        kv_add_splits<D>(a, w, partial, head_step, splits, sums);
}

#endif
