/* The epilogue of the grouped products by wgmma: factors, bias, activation, and stores. */
#ifndef QT_KERNELS_CUDA_MOE_WIDE_EPILOGUE_CUH
#define QT_KERNELS_CUDA_MOE_WIDE_EPILOGUE_CUH

#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/matmul/tile_common.cuh"
#include "kernels/cuda/moe/wide_unit.cuh"

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

/* The reverse of ptx_transpose_16: stores 16 bytes to `line`, and then loads four matrices from what
 * is `to` there. */
static __device__ __forceinline__ void wide_untranspose_16(int id, uint32_t line, const uint4 &v,
                                                           uint32_t from, uint32_t r[4])
{
    asm volatile("bar.sync %4, 128;\n"
                 "st.shared.v4.u32 [%5], {%6,%7,%8,%9};\n"
                 "bar.sync %4, 128;\n"
                 "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%10];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(id), "r"(line), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(from)
                 : "memory");
}

/* GATED: gate and up may be one launch. ALONE: they may be two. */
template <bool GATED, bool ALONE> struct wide_epilogue {
    const qt_moe_half_args &a;
    const wide_unit &unit;
    wide_sums &sums;
    const int lane, warp, group, matrix; /* group: warpgroup */
    float2 factor, bias;                 /* of rows g and g + 8 */

    __device__ __forceinline__ wide_epilogue(const qt_moe_half_args &args, const wide_unit &of,
                                             float2 of_rows, wide_sums &s)
        : a(args), unit(of), sums(s), lane((int)threadIdx.x % 32), warp((int)threadIdx.x / 32),
          group(warp / 4), matrix(wide_matrix(warp)), factor(of_rows)
    {
        const float *b = unit.header.bias[matrix];
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
    /* Where a lane has its row of a matrix of ptx_transpose_16, and a thread its part of a line. */
    __device__ __forceinline__ uint32_t matrix_at() const
    {
        return results_at() + (lane / 16 * 8 + lane % 8) * 128 +
               ((warp % 4 * 2 + lane / 8 % 2) ^ lane % 8) * 16;
    }
    __device__ __forceinline__ uint32_t line_at() const
    {
        const int thread = (int)threadIdx.x % 128;
        return results_at() + thread / 8 * 128 + (thread % 8 ^ thread / 8 % 8) * 16;
    }
    __device__ __forceinline__ uint32_t results_at() const
    {
        return ptx_shared(qt_smem) + a.results_at + group * QT_TILE_RESULT_BYTES;
    }
    /*
     * Stores results of a warpgroup from number `token` on, 16 tokens per warp, rounded to 16 bits,
     * through shared memory: see tile_store. A line has 64 rows of a token; if `gated`, 32 rows of
     * a token, and those of the token 16 further on, which the last two warps have.
     */
    __device__ __forceinline__ void store(int token, const float4 v[2]) const
    {
        const int thread = (int)threadIdx.x % 128, chunk = thread % 8;
        const int w = group * 4 + (a.gated ? chunk / 2 % 2 : chunk / 2);
        const int first = wide_strip(a, unit.header.tile, w) * 16 + thread % 2 * 8;
        const int rows = max(0, a.n - first);
        const uint32_t four[4] = {
            qt_round_two(a.bf16, v[0].x, v[0].y), qt_round_two(a.bf16, v[0].z, v[0].w),
            qt_round_two(a.bf16, v[1].x, v[1].y), qt_round_two(a.bf16, v[1].z, v[1].w)};
        const uint4 line = ptx_transpose_16(WIDE_WARPGROUP + group, matrix_at(), four, line_at());
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
    /* Gate alone: the results of up of the lines that store() stores. */
    __device__ __forceinline__ uint4 load_up(int token) const
    {
        const int thread = (int)threadIdx.x % 128;
        const int w = group * 4 + thread % 8 / 2;
        const int first = wide_strip(a, unit.header.tile, w) * 16 + thread % 2 * 8;
        token += thread / 8;
        if (token >= unit.header.rows || first >= a.n)
            return make_uint4(0, 0, 0, 0);
        const size_t at = (size_t)(unit.header.first + token) * a.up_pitch + first;
        return *(const uint4 *)((const uint16_t *)a.up + at);
    }
    /* The activation times up. */
    __device__ __forceinline__ void times_up(float4 v[2], const uint4 &line) const
    {
        uint32_t up[4];
        wide_untranspose_16(WIDE_WARPGROUP + group, line_at(), line, matrix_at(), up);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float2 low = widen(up[2 * j]), high = widen(up[2 * j + 1]);
            v[j] = make_float4(activate(v[j].x, low.x), activate(v[j].y, low.y),
                               activate(v[j].z, high.x), activate(v[j].w, high.y));
        }
    }
    __device__ __forceinline__ float2 widen(uint32_t two) const
    {
        return make_float2(qt_widen(a.bf16, (uint16_t)two),
                           qt_widen(a.bf16, (uint16_t)(two >> 16)));
    }
    __device__ __forceinline__ void run() const
    {
        if (GATED && a.gated) {
            gated();
            return;
        }
        uint4 line = {};
        if (ALONE && a.up)
            line = load_up(0);
#pragma unroll
        for (int t = 0; t < WIDE_TOKENS / 8; t += 2) {
            if (t * 8 >= unit.header.rows)
                break;
            float4 v[2] = {result(t), result(t + 1)};
            if (ALONE && a.up) {
                const uint4 now = line;
                line = load_up(t * 8 + 16);
                times_up(v, now);
            }
            store(t * 8, v);
        }
    }
};

#endif
