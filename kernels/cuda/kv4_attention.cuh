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
#include "kernels/cuda/kv4_queries.cuh"
#include "kernels/cuda/kv4_sums.cuh"

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

/* The sums of a warp (kv4_sums.cuh). */
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

/* ---- the kernel --------------------------------------------------------------------------------
 */

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
