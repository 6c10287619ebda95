/*
 * The epilogue of the grouped products by wgmma: factors, bias, activation, and stores. A warpgroup
 * in its epilogue leaves tensor cores to the other one, which soon waits for stages that both must
 * have read. So epilogues should be short.
 */
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

/* gate = the activation of gate times up. One branch for all values, so that the latencies of their
 * exponentials and reciprocals overlap. */
template <int N>
static __device__ __forceinline__ void wide_activate(const qt_moe_unit_args &a, float (&gate)[N],
                                                     const float (&up)[N])
{
    if (a.slope == 1 && a.cubic == 0 && a.offset == 0) { /* SiLU: g * sigmoid(g) */
#pragma unroll
        for (int i = 0; i < N; i++)
            gate[i] = gate[i] * ptx_reciprocal(1 + wide_exp2(gate[i] * -1.44269504f)) * up[i];
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            gate[i] = moe_gated(a, gate[i], up[i]);
    }
}

/* A warp stores its strip of 16 rows by itself, rounded to 16 bits, 16 tokens at a time: a line of
 * 16 bytes per lane, which are 8 rows of a token. */
struct wide_lines {
    const qt_moe_unit_args &a;
    const int first, rows;       /* of the item */
    int token, channel;          /* of the lane's line; token: from the first of 16 on */
    uint32_t matrix_at, line_at; /* the lane's row of a matrix of ptx_transpose_warp; its line */

    __device__ __forceinline__ wide_lines(const qt_moe_unit_args &args, int first_position,
                                          int item_rows, int strip)
        : a(args), first(first_position), rows(item_rows)
    {
        const int lane = (int)threadIdx.x % 32, of_matrix = lane / 16 * 8 + lane % 8; /* a token */
        const uint32_t room = ptx_shared(qt_smem) + args.results_at + threadIdx.x / 32 * 512;
        token = lane / 2;
        channel = strip * 16 + lane % 2 * 8;
        matrix_at = room + of_matrix * 32 + (lane / 8 % 2 ^ of_matrix / 4 % 2) * 16;
        line_at = room + lane / 2 * 32 + (lane % 2 ^ lane / 8 % 2) * 16;
    }
    /* Tokens from number `at` on. v: rows g and g + 8 of tokens 2t and 2t + 1 of the first eight,
     * and of the next eight. */
    __device__ __forceinline__ void put(int at, const float (&v)[8]) const
    {
        const uint32_t four[4] = {
            qt_round_two(a.bf16, v[0], v[1]), qt_round_two(a.bf16, v[2], v[3]),
            qt_round_two(a.bf16, v[4], v[5]), qt_round_two(a.bf16, v[6], v[7])};
        const uint4 line = ptx_transpose_warp(matrix_at, four, line_at);
        char *y = (char *)a.y + ((size_t)(first + token) * a.y_pitch + channel) * 2;
        ptx_store_halves(y + (size_t)at * 2 * a.y_pitch, line,
                         at + token < rows ? max(0, a.n - channel) : 0, a.whole_stores);
    }
};

/* GATED: gate and up may be one launch. ALONE: they may be two. */
template <bool GATED, bool ALONE> struct wide_epilogue {
    const qt_moe_half_args &a;
    const wide_unit &unit;
    wide_sums &sums;
    const int lane, warp, matrix, rows; /* rows: of the item */
    wide_lines lines;
    float2 factor, bias; /* of rows g and g + 8 */

    __device__ __forceinline__ wide_epilogue(const qt_moe_half_args &args, const wide_unit &of,
                                             float2 of_rows, wide_sums &s)
        : a(args), unit(of), sums(s), lane((int)threadIdx.x % 32), warp((int)threadIdx.x / 32),
          matrix(wide_matrix(warp)), rows(of.header.rows),
          lines(args, of.header.first, of.header.rows, wide_strip(args, of.header.tile, warp)),
          factor(of_rows)
    {
        const int row = wide_strip(args, of.header.tile, warp) * 16 + lane / 4;
        const float *b = unit.header.bias[matrix];
        bias.x = b && row < a.n ? b[row] : 0;
        bias.y = b && row + 8 < a.n ? b[row + 8] : 0;
        if (GATED && a.gated)
            lines.token += matrix * 16; /* see gated() */
        if (a.token_factor)
            apply_token_factors();
    }
    __device__ __forceinline__ void apply_token_factors()
    {
#pragma unroll
        for (int t = 0; t < WIDE_TOKENS / 8; t++) {
            if (t * 8 >= rows)
                break;
            const float2 of = *(const float2 *)&unit.token[t * 8 + lane % 4 * 2];
#pragma unroll
            for (int i = 0; i < 4; i++)
                sums.v[4 * t + i] *= (i / 2 ? factor.y : factor.x) * (i % 2 ? of.y : of.x);
        }
        factor = make_float2(1, 1);
    }
    /* Results of 16 tokens, from the eight of number t on: products with all factors, and the
     * bias. */
    __device__ __forceinline__ void result(float (&v)[8], int t) const
    {
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = i / 2 % 2 ? fmaf(sums.v[4 * t + i], factor.y, bias.y)
                             : fmaf(sums.v[4 * t + i], factor.x, bias.x);
    }
    /*
     * The activation of gate times up. A warp of gate and the warp of up with the same strip
     * exchange results: of 32 tokens that of gate finishes the first 16. They take turns with two
     * places for what they exchange, so there is one barrier per 32 tokens.
     */
    __device__ __forceinline__ void gated() const
    {
        const int pair = warp / 4 * 2 + warp % 2;
        float4 *const room = (float4 *)(qt_smem + a.exchange_at) + pair * 256 + lane;
#pragma unroll
        for (int t = 0; t < WIDE_TOKENS / 8; t += 4) {
            if (t * 8 >= rows)
                break;
            float4 *const place = room + t / 4 % 2 * 128;
            float low[8], high[8], gate[8], up[8];
            result(low, t);
            result(high, t + 2);
#pragma unroll
            for (int i = 0; i < 8; i += 4)
                place[matrix * 64 + i * 8] =
                    matrix ? make_float4(low[i], low[i + 1], low[i + 2], low[i + 3])
                           : make_float4(high[i], high[i + 1], high[i + 2], high[i + 3]);
            ptx_named_barrier(WIDE_PAIR + pair, 64);
#pragma unroll
            for (int i = 0; i < 8; i += 4) {
                const float4 v = place[(1 - matrix) * 64 + i * 8];
                const float other[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    gate[i + j] = matrix ? other[j] : low[i + j];
                    up[i + j] = matrix ? high[i + j] : other[j];
                }
            }
            wide_activate(a, gate, up);
            lines.put(t * 8, gate);
        }
        ptx_named_barrier(WIDE_PAIR + pair, 64); /* both have read what the next unit overwrites */
    }
    /* Gate alone: the results of up of the line that lines.put(at, ...) stores. */
    __device__ __forceinline__ uint4 load_up(int at) const
    {
        at += lines.token;
        if (at >= rows || lines.channel >= a.n)
            return make_uint4(0, 0, 0, 0);
        return *(const uint4 *)((const uint16_t *)a.up + (size_t)(lines.first + at) * a.up_pitch +
                                lines.channel);
    }
    /* v = the activation of v times up. */
    __device__ __forceinline__ void times_up(float (&v)[8], const uint4 &line) const
    {
        uint32_t two[4];
        float up[8];
        ptx_untranspose_warp(two, lines.line_at, line, lines.matrix_at);
#pragma unroll
        for (int i = 0; i < 8; i++)
            up[i] = qt_widen(a.bf16, (uint16_t)(two[i / 2] >> i % 2 * 16));
        wide_activate(a, v, up);
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
            if (t * 8 >= rows)
                break;
            float v[8];
            result(v, t);
            if (ALONE && a.up) {
                const uint4 now = line;
                line = load_up(t * 8 + 16);
                times_up(v, now);
            }
            lines.put(t * 8, v);
        }
    }
};

#endif
