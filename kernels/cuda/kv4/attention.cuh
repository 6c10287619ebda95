/*
 * Attention of a decode step: one new token per sequence over the KV cache, with the sequence split
 * over thread blocks (split-KV).
 *
 *   grid          (splits, KV heads x tiles of 4 * HQ query heads, sequences); HQ: query heads per
 *                 lane
 *   thread block  F::warps(HQ) warps; each has a pipeline of its own, and the warps take the stages
 *                 of a split (TOKENS tokens each), or pairs of stages, round-robin
 *   smem          [ pipeline of DEPTH stages per warp: keys, values, their parameters | keys of
 *                 token 0 | queries, if keys have parameters ]; the epilogue reuses all of it for
 *                 the partial results of the warps
 *
 *   warp          global -- cp.async --> stage --> codes in FP16 mantissas --> S = K q
 *                 (m16n8k16) --> p = 2^(S - m) --> FP16, transposed --> per group of channels:
 *                 times value scales --> O += V^T p, codes in FP16 mantissas (m16n8k16)
 *
 * A key is (code - zero-point) * scale, with both per channel and KV group: the scales are
 * multiplied into q for each KV group, and the zero-points times that are one number per head and
 * KV group. A value is (code - zero-point) * scale, with a scale and a zero-point per group of
 * channels: the scale is multiplied into p, and zero-points times scales times p are one number per
 * head and group, which another product with p accumulates.
 *
 * The softmax is online, with a running maximum m per warp and head, which is updated only if some
 * score exceeds it. Probabilities are multiplied by 2^p_exp2, which keeps p * scale in the range of
 * FP16. It is updated in the same way.
 *
 * Partial results of splits are combined through the workspace (combine.cuh).
 *
 * Traffic    the cache once per tile of query heads, q once per split; splits > 1:
 *            (head_dim + 4) * 4 bytes per query head and split, written and read
 * Reference  FP64 attention over the dequantized cache; relative error of the output <= 1.5e-3
 *            (BF16 3e-3), of one row <= 3e-3 (BF16 6e-3): queries times key scales, p, and p times
 *            value scales are FP16
 * Used by    attention.cu
 */
#ifndef QT_KERNELS_CUDA_KV4_ATTENTION_CUH
#define QT_KERNELS_CUDA_KV4_ATTENTION_CUH

#include "kernels/cuda/kv4/combine.cuh"
#include "kernels/cuda/kv4/queries.cuh"

/* ---- mainloop ------------------------------------------------------------------------------- */

/* Softmax state and accumulators of a warp. Entry u belongs to head F::head(u, t) of the lane.
 * row_max, in units of q.unit, is the same in all lanes that have the head; p_exp2 is the same in
 * the whole warp. denominator covers the lane's own tokens only. */
template <class F, int HQ> struct kv_state {
    enum { TILES = (HQ + 1) / 2 };
    float out[TILES][kv_stage<F>::STEPS][4];
    float low[TILES][4]; /* rows g and g + 8: of the value group g */
    float row_max[HQ], denominator[HQ];
    float offset[HQ]; /* p_exp2 - row_max * unit */
    float p_exp2;
    __half2 limit; /* twice: value scales must be below */
};

/* Multiplies the sums of head u by f. */
template <class F, int HQ>
static __device__ __forceinline__ void kv_scale_sums(kv_state<F, HQ> *st, int u, float f)
{
    st->denominator[u] *= f;
#pragma unroll
    for (int h = u % 2; h < 4; h += 2) {
        if (F::PARAMS)
            st->low[u / 2][h] *= f;
#pragma unroll
        for (int i = 0; i < kv_stage<F>::STEPS; i++)
            st->out[u / 2][i][h] *= f;
    }
}

/* Raises the running maxima to those of the scores s and rescales the accumulators. */
template <class F, int HQ>
static __device__ __forceinline__ void kv_raise(kv_state<F, HQ> *st, const kv_queries<F, HQ> &q,
                                                const float s[kv_stage<F>::TILES][HQ][2])
{
#pragma unroll
    for (int u = 0; u < HQ; u++) {
        float m = st->row_max[u];
#pragma unroll
        for (int i = 0; i < kv_stage<F>::TILES; i++)
            m = fmaxf(m, fmaxf(s[i][u][0], s[i][u][1]));
#pragma unroll
        for (int d = 4; d < 32; d *= 2)
            m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
        float f = ptx_exp2((st->row_max[u] - m) * q.unit[u]);
        st->row_max[u] = m;
        st->offset[u] = fmaf(-m, q.unit[u], st->p_exp2);
        kv_scale_sums(st, u, f);
    }
}

/* Sets p_exp2 for value scales up to the larger half of `top`, at least 1: p * scale stays below
 * 2^15. */
template <class F, int HQ>
static __device__ __forceinline__ void kv_raise_values(kv_state<F, HQ> *st, __half2 top)
{
#pragma unroll
    for (int d = 1; d < 32; d *= 2)
        top = __hmax2(top, __shfl_xor_sync(~0u, top, d));
    const int e = ilogbf(__half2float(__hmax(__low2half(top), __high2half(top))));
    const float change = (float)(14 - e) - st->p_exp2, f = ptx_exp2(change);
    st->p_exp2 += change;
    st->limit = __float2half2_rn(exp2f((float)(e + 1)));
#pragma unroll
    for (int u = 0; u < HQ; u++) {
        st->offset[u] += change;
        kv_scale_sums(st, u, f);
    }
}

/* Replaces the scores s by probabilities p, relative to 2^-p_exp2 times that of the running
 * maximum, and accumulates their sums. own: the lane's own value parameters. */
template <class F, int HQ>
static __device__ __forceinline__ void kv_softmax(kv_state<F, HQ> *st, const kv_queries<F, HQ> &q,
                                                  float s[kv_stage<F>::TILES][HQ][2],
                                                  const uint32_t own[kv_stage<F>::TILES][2])
{
    bool new_max = false, new_limit = false;
    __half2 top = __float2half2_rn(0);
#pragma unroll
    for (int i = 0; i < kv_stage<F>::TILES; i++)
#pragma unroll
        for (int u = 0; u < HQ; u++)
            new_max = new_max || s[i][u][0] > st->row_max[u] || s[i][u][1] > st->row_max[u];
    if (F::PARAMS) {
#pragma unroll
        for (int i = 0; i < 2 * kv_stage<F>::TILES; i++)
            top = __hmax2(top, *(const __half2 *)&own[i / 2][i % 2]);
        new_limit = !__hblt2(top, st->limit);
    }
    if (__any_sync(~0u, new_max || new_limit)) { /* rare, so both share one vote */
        if (__any_sync(~0u, new_max))
            kv_raise<F, HQ>(st, q, s);
        if (F::PARAMS && __any_sync(~0u, new_limit))
            kv_raise_values<F, HQ>(st, top);
    }
#pragma unroll
    for (int i = 0; i < kv_stage<F>::TILES; i++)
#pragma unroll
        for (int u = 0; u < HQ; u++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                s[i][u][j] = ptx_exp2(fmaf(s[i][u][j], q.unit[u], st->offset[u]));
                st->denominator[u] += s[i][u][j];
            }
}

/* Sets the scores of tokens from `end` on to -inf. token: token of the lane's row g. */
template <class F, int HQ>
static __device__ __forceinline__ void kv_mask(float s[kv_stage<F>::TILES][HQ][2], int end,
                                               int token)
{
#pragma unroll
    for (int i = 0; i < kv_stage<F>::TILES; i++)
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (token + i * 16 + j * 8 >= end)
#pragma unroll
                for (int u = 0; u < HQ; u++)
                    s[i][u][j] = -INFINITY;
}

/* Processes one stage, whose first token is token0. row: token of the lane's row g in a tile.
 * first: keys of token 0, and after these the queries. */
template <class F, int HQ>
static __device__ __forceinline__ void
kv_stage_step(kv_state<F, HQ> *st, const kv_queries<F, HQ> &q, const F &format, uint32_t stage,
              uint32_t first, int token0, int row, int end)
{
    typedef kv_stage<F> S;
    float s[S::TILES][HQ][2];
    uint32_t own[S::TILES][2];
    format.template multiply<HQ>(s, q.frag, q.zeros, stage);
    if (F::FIRST && token0 == 0)
        format.template replace_first<HQ>(s, first + F::FIRST, first);
    if (token0 + F::TOKENS > end) {
        kv_mask<F, HQ>(s, end, token0 + row);
        F::clear_params(stage, end - token0);
    }
    format.load_own(own, stage);
    kv_softmax<F, HQ>(st, q, s, own);
#pragma unroll
    for (int i = 0; i < S::TILES; i++) {
        uint32_t p[kv_state<F, HQ>::TILES][2], a[4];
        typename F::tile_values values;
        values.load(format, stage, i);
#pragma unroll
        for (int u = 0; u < HQ; u += 2)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                __half2 v = __floats2half2_rn(s[i][u][j], u + 1 < HQ ? s[i][u + 1][j] : 0);
                p[u / 2][j] = ptx_transpose_8x8(*(uint32_t *)&v);
            }
        F::lows(a, own[i]);
#pragma unroll
        for (int n = 0; n < kv_state<F, HQ>::TILES && F::PARAMS; n++)
            ptx_mma_f16(st->low[n], a, p[n][0], p[n][1]);
#pragma unroll
        for (int m = 0; m < S::STEPS; m++) {
            values.load_scales(m);
            values.frag(a, m);
#pragma unroll
            for (int n = 0; n < kv_state<F, HQ>::TILES; n++) {
                uint32_t b[2];
                values.weigh(b, p[n], m);
                ptx_mma_f16(st->out[n][m], a, b[0], b[1]);
            }
        }
    }
}

/* Stores the partial result of a warp, [head][D + 4], to shared memory (see combine.cuh). */
template <class F, int HQ>
static __device__ __forceinline__ void kv_store_partial(const kv_state<F, HQ> *st, const kv_work &w,
                                                        float *to)
{
    enum { D = F::DIM, SUM = D + 4 };
    const int g = w.lane / 4, t = w.lane % 4;
#pragma unroll
    for (int u = 0; u < HQ; u++) {
        float *sums = to + F::head(u, t) * SUM, den = st->denominator[u];
#pragma unroll
        for (int d = 4; d < 32; d *= 2)
            den += __shfl_xor_sync(~0u, den, d);
#pragma unroll
        for (int i = 0; i < kv_stage<F>::STEPS; i++) {
            const float sum = st->low[u / 2][u % 2] + st->low[u / 2][2 + u % 2];
            const float low = F::PARAMS ? 4 * __shfl_sync(~0u, sum, i * 4 + t) : 0;
#pragma unroll
            for (int r = 0; r < 2; r++)
                sums[F::value_channel(g, i, r)] =
                    st->out[u / 2][i][2 * r + u % 2] * F::value_factor(r) - low;
        }
        if (g == 0) {
            sums[D] = -st->offset[u];
            sums[D + 1] = den;
        }
    }
}

/* ---- the kernel ----------------------------------------------------------------------------- */

/* HQ: query heads per lane; a thread block has 4 HQ of them. */
template <class F, int HQ, int DEPTH>
__global__ void __launch_bounds__(F::warps(HQ) * 32, HQ <= 2 ? 16 / F::warps(HQ) : 1)
    kv_attention_kernel(const __grid_constant__ kv_args a)
{
    enum { D = F::DIM, BYTES = kv_stage<F>::BYTES, WARPS = F::warps(HQ) };
    kv_work w = kv_work_open(a, 4 * HQ);
    kv_query_part<F> query;
    const int length = min(a.length[w.sequence], a.max_length);
    if (!a.dependent && w.warp < w.heads)
        query.load(a, w, w.warp);
    const int splits = (length + a.split_tokens - 1) / a.split_tokens;
    w.begin = (int)blockIdx.x * a.split_tokens;
    w.end = min(w.begin + a.split_tokens, length);
    if (splits == 0 && blockIdx.x == 0) { /* length 0: the output is zeros */
        if (a.dependent)
            ptx_wait_previous();
#pragma unroll 1
        for (int i = (int)threadIdx.x * 4; i < w.heads * D; i += WARPS * 32 * 4)
            kv_store_4(a, w, i / D, D, i % D, make_float4(0, 0, 0, 0));
    }
    if ((int)blockIdx.x >= splits)
        return;

    const kv_source source = kv_source_of<F>(a, w);
    const uint32_t stages = ptx_shared(kv_smem) + w.warp * DEPTH * BYTES;
    const uint32_t first = ptx_shared(kv_smem) + WARPS * DEPTH * BYTES; /* keys of token 0 */
    kv_turn<F, WARPS> turn(w), ahead = turn;
    uint32_t row = 0; /* of the stage to copy next */
    const auto find = [&] {
        if (ahead.token < w.end)
            row = kv_stage_row(a, source, ahead.token);
    };
    find();
#pragma unroll 1
    for (int i = 0; i < DEPTH - 1; i++) {
        if (a.dependent && ahead.token + F::TOKENS > (length - 1) / F::GROUP * F::GROUP)
            ptx_wait_previous(); /* the stage has tokens that append rewrites */
        if (ahead.token == 0)
            kv_copy_first<F>(a, w, first);
        kv_copy<F>(a, source, w, stages + i * BYTES, ahead.token, row, ahead.opens());
        ahead.next();
        find();
    }
    if (a.dependent) {
        ptx_wait_previous();
        if (w.warp < w.heads)
            query.load(a, w, w.warp);
    }
    ptx_launch_dependents();
    kv_queries<F, HQ> q;
    enum { FREE_STAGE = (DEPTH - 1) * BYTES, QUERIES = WARPS * DEPTH * BYTES + F::FIRST };
    static_assert(F::GRID || kv_queries<F, HQ>::BYTES <= BYTES, "the buffer is a stage");
    kv_load_queries(&q, a, w, query, (uint32_t *)(kv_smem + (F::GRID ? QUERIES : FREE_STAGE)));
    kv_state<F, HQ> st = {};
    st.p_exp2 = 15;
    st.limit = __float2half2_rn(1);
#pragma unroll
    for (int u = 0; u < HQ; u++) {
        st.row_max[u] = -INFINITY;
        st.offset[u] = INFINITY;
    }
    F format;
    format.open((unsigned)w.lane);
    const int own_row = (int)kv_kept(F::row_token((unsigned)w.lane / 4));

    int stage = 0, free_stage = DEPTH - 1;
#pragma unroll 1
    for (; turn.token < w.end; turn.next()) {
        ptx_copy_wait<DEPTH - 2>();
        __syncwarp(); /* all lanes' copies have arrived; the free stage has been read */
        kv_copy<F>(a, source, w, stages + free_stage * BYTES, ahead.token, row, ahead.opens());
        ahead.next();
        find();
        if (F::GRID && turn.opens())
            format.template scale_queries<HQ>(q.frag, q.zeros, first + F::FIRST,
                                              stages + stage * BYTES);
        kv_stage_step<F, HQ>(&st, q, format, stages + stage * BYTES, first, turn.token, own_row,
                             w.end);
        stage = stage + 1 == DEPTH ? 0 : stage + 1;
        free_stage = free_stage + 1 == DEPTH ? 0 : free_stage + 1;
    }
    ptx_copy_wait<0>();
    __syncthreads();

    enum { SUM = D + 4, WARP_SUMS = 4 * HQ * SUM };
    float *sums = (float *)kv_smem;
    kv_store_partial<F, HQ>(&st, w, sums + w.warp * WARP_SUMS);
    __syncthreads();
    if (splits == 1)
        kv_combine<F, WARPS, false>(a, w, sums, WARP_SUMS, 1);
    else
        kv_combine<F, WARPS, true>(a, w, sums, WARP_SUMS, splits);
}

#endif
