/*
 * mix24: dequantizes weights to FP16 or BF16, out[n][k] in the order of the channels.
 *
 *   grid       (strips x unit parts): 16 rows x UNITS units per thread block
 *   warp       one record: 16 rows x 128 columns; then LANES threads per row overwrite the outliers
 *              of the thread block's weights
 *   Traffic    packed bytes once, 2 n k bytes out
 *   Reference  the weights' exact values, rounded once: equal bit for bit
 */
#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/mix24/decode.cuh"
#include "kernels/cuda/mix24/mix24.h"

#include <math.h>

/* Units, columns and threads of a thread block. LANES: threads per row for outliers; AHEAD: CSR
 * entries that each of them loads ahead. A row has 8 outliers in 4096 channels at 0.2 %. */
enum { UNITS = 4, COLS = UNITS * QT_MIX24_UNIT_COLS, THREADS = UNITS * 32 };
enum { LANES = THREADS / 16, AHEAD = 2 };
static_assert(QT_MIX24_PANEL_UNITS % UNITS == 0, "units of a block are of one panel");

struct dequantize_args {
    const unsigned char *stream;
    const uint16_t *perm;
    qt_mix24_outliers outliers;
    void *out;
    int n, k, units, fours;
    int parts; /* thread blocks of a strip */
    size_t pitch;
    float factor;
    int wide; /* k is a multiple of 16, rows of out 16-byte aligned */
    int bf16;
};

static __device__ __forceinline__ void put(const dequantize_args &a, int row, int col, __half w)
{
    if (row >= a.n || col >= a.k)
        return;
    size_t at = (size_t)row * a.k + col;
    float v = __half2float(w) * a.factor;
    qt_put_rounded(a.out, at, v, a.bf16);
}

/* Stores 16 channels of a row, which are adjacent in `out`, one by one. */
static __device__ __forceinline__ void put_some(const dequantize_args &a, int row, int col,
                                                const uint32_t pair[8])
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        put(a, row, col + 2 * i, __low2half(as_half2(pair[i])));
        put(a, row, col + 2 * i + 1, __high2half(as_half2(pair[i])));
    }
}

static __device__ __forceinline__ uint32_t round_pair(const dequantize_args &a, uint32_t pair)
{
    float2 f = __half22float2(as_half2(pair));
    return qt_round_two(a.bf16, f.x * a.factor, f.y * a.factor);
}

static __device__ __forceinline__ uint4 choose(bool p, uint4 a, uint4 b)
{
    return make_uint4(p ? a.x : b.x, p ? a.y : b.y, p ? a.z : b.z, p ? a.w : b.w);
}

static __device__ __forceinline__ uint4 exchange_lanes(uint4 v)
{
    return make_uint4(__shfl_xor_sync(~0u, v.x, 1), __shfl_xor_sync(~0u, v.y, 1),
                      __shfl_xor_sync(~0u, v.z, 1), __shfl_xor_sync(~0u, v.w, 1));
}

/*
 * Stores them by the whole warp, 16 bytes per lane: two lanes write the 32 bytes of one of them,
 * then of the other, so that memory receives whole sectors. col: of the even lane; other: of the
 * odd lane.
 */
static __device__ __forceinline__ void put_all(const dequantize_args &a, int row, int col,
                                               int other, const uint32_t pair[8])
{
    uint32_t v[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        v[i] = round_pair(a, pair[i]);
    const bool odd = threadIdx.x & 1;
    const uint4 first = make_uint4(v[0], v[1], v[2], v[3]);
    const uint4 second = make_uint4(v[4], v[5], v[6], v[7]);
    const uint4 received = exchange_lanes(choose(odd, first, second));
    uint16_t *to = (uint16_t *)a.out + (size_t)row * a.k + (odd ? 8 : 0);
    if (row < a.n && col < a.k) /* __stcg: the compiler splits an assignment into eight stores */
        __stcg((uint4 *)(to + col), choose(odd, received, first));
    if (row < a.n && other < a.k)
        __stcg((uint4 *)(to + other), choose(odd, second, received));
}

/* ---- outliers -----------------------------------------------------------------------------------
 *
 * A thread takes every LANES-th CSR entry of its row. The positions of the first AHEAD entries are
 * found while the weights are loaded, step by step, because each load depends on the previous one.
 */
struct outliers_of_row {
    int row, slot0;      /* slot0: the thread block's first group in packed order */
    int col0;            /* the thread block's first column in the CSR panel */
    uint32_t entry, end; /* of the thread */
    int col[AHEAD];      /* in the thread block: 0..COLS - 1; others are elsewhere */
    uint32_t group[AHEAD], value[AHEAD];

    __device__ __forceinline__ outliers_of_row(const dequantize_args &a, int row0, int unit0)
        : row(row0 + (int)threadIdx.x / LANES), slot0(unit0 * 8),
          col0(unit0 % QT_MIX24_PANEL_UNITS * QT_MIX24_UNIT_COLS), entry(0), end(0)
    {
        if (!a.outliers.ptr || row >= a.n)
            return;
        const uint32_t *ptr =
            a.outliers.ptr + unit0 / QT_MIX24_PANEL_UNITS * a.outliers.pitch + row;
        entry = __ldg(ptr) + threadIdx.x % LANES;
        end = __ldg(ptr + 1);
    }
    static __device__ __forceinline__ bool in_block(int c)
    {
        return (unsigned)c < COLS;
    }
    __device__ __forceinline__ int column(const dequantize_args &a, uint32_t e) const
    {
        return e < end ? (int)__ldg(a.outliers.col + e) - col0 : COLS;
    }
    __device__ __forceinline__ void find_columns(const dequantize_args &a)
    {
#pragma unroll
        for (uint32_t i = 0; i < AHEAD; i++)
            col[i] = column(a, entry + i * LANES);
    }
    __device__ __forceinline__ void find_values(const dequantize_args &a)
    {
#pragma unroll
        for (uint32_t i = 0; i < AHEAD; i++) {
            group[i] = in_block(col[i]) ? __ldg(a.perm + slot0 + col[i] / 16) : 0;
            value[i] = in_block(col[i]) ? __ldg(a.outliers.val + entry + i * LANES) : 0;
        }
    }
    /* Writes the outliers, after the thread block has stored its weights. Columns of a row ascend.

     */
    __device__ __forceinline__ void apply(const dequantize_args &a) const
    {
#pragma unroll
        for (uint32_t i = 0; i < AHEAD; i++)
            if (in_block(col[i]))
                put_at(a, col[i], group[i], value[i]);
        for (uint32_t e = entry + AHEAD * LANES; e < end; e += LANES) {
            const int c = column(a, e);
            if (c >= COLS)
                break;
            if (c >= 0)
                put_at(a, c, __ldg(a.perm + slot0 + c / 16), __ldg(a.outliers.val + e));
        }
    }

  private:
    __device__ __forceinline__ void put_at(const dequantize_args &a, int c, uint32_t g,
                                           uint32_t v) const
    {
        put(a, row, (int)g * 16 + c % 16, __ushort_as_half((uint16_t)v));
    }
};

/* ---- weights --------------------------------------------------------------------------------- */

template <bool FOUR>
static __device__ __forceinline__ void put_record(const dequantize_args &a, int strip, int unit,
                                                  const unsigned char *record,
                                                  outliers_of_row *outliers)
{
    const int lane = (int)threadIdx.x % 32, row = strip * 16 + lane / 4;
    using R = mix24_record<FOUR>;
    const mix24_meta meta = mix24_meta_of<FOUR>(*(const uint16_t *)(record + R::Q + lane * 2),
                                                FOUR ? *(const uint16_t *)(record + R::Z + lane * 2)
                                                     : record[R::Z + lane],
                                                *(const uint32_t *)(record + R::U + lane % 4 * 4));
    const uint4 *codes = (const uint4 *)record + lane;
    const uint4 low = codes[0], high = FOUR ? codes[32] : make_uint4(low.z, low.w, 0, 0);
#pragma unroll
    for (int b = 0; b < 2; b++) {
        const mix24_group group =
            b ? mix24_open_group<FOUR, 1>(meta) : mix24_open_group<FOUR, 0>(meta);
        const uint4 v = b ? high : low;
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
        const int col = a.perm[unit * 8 + b * 4 + lane % 4] * 16;
        uint32_t rows[2][8]; /* 16 channels of rows g and g + 8 */
#pragma unroll
        for (int s = 0; s < 4; s++) {
            uint32_t frag[4];
            mix24_fragment<FOUR>(frag, words, s, group);
#pragma unroll
            for (int i = 0; i < 4; i++)
                rows[i % 2][2 * s + i / 2] = frag[i];
        }
        if (b == 0)
            outliers->find_columns(a);
        if (a.wide) {
            const int their_col = __shfl_xor_sync(~0u, col, 1);
            const int even = lane % 2 ? their_col : col, odd = lane % 2 ? col : their_col;
            put_all(a, row, even, odd, rows[0]);
            put_all(a, row + 8, even, odd, rows[1]);
        } else {
            put_some(a, row, col, rows[0]);
            put_some(a, row + 8, col, rows[1]);
        }
    }
}

static __global__ void __launch_bounds__(THREADS)
    mix24_dequantize_kernel(const __grid_constant__ dequantize_args a)
{
    const unsigned strip = blockIdx.x / (unsigned)a.parts;
    const int unit0 = (int)(blockIdx.x - strip * (unsigned)a.parts) * UNITS;
    const int unit = unit0 + (int)threadIdx.x / 32;
    outliers_of_row outliers(a, (int)strip * 16, unit0);
    if (unit < a.units) {
        const int fours = (int)((unsigned)(unit * a.fours) / (unsigned)a.units);
        const int rest = unit * a.fours - fours * a.units;
        const unsigned char *record =
            a.stream + strip * a.pitch + (size_t)unit * mix24_record<false>::BYTES +
            (size_t)fours * (mix24_record<true>::BYTES - mix24_record<false>::BYTES);
        if (rest + a.fours >= a.units)
            put_record<true>(a, (int)strip, unit, record, &outliers);
        else
            put_record<false>(a, (int)strip, unit, record, &outliers);
    } else {
        outliers.find_columns(a);
    }
    if (!a.outliers.ptr)
        return;
    outliers.find_values(a);
    __syncthreads();
    outliers.apply(a);
}

int qt_mix24_dequantize(const struct qtool_matmul_weight *w, void *out, enum qtool_dtype dtype,
                        void *stream)
{
    if (qt_mix24_fault(w))
        return QTOOL_UNSUPPORTED;
    struct dequantize_args a = {};
    const struct qtool_matmul_mix24 *m = &w->mix24;
    a.stream = (const unsigned char *)m->stream;
    a.perm = (const uint16_t *)m->perm;
    a.outliers = qt_mix24_outliers_of(w);
    a.out = out;
    a.n = (int)w->n;
    a.k = (int)w->k;
    a.units = qt_mix24_units(w);
    a.fours = (int)m->fours;
    a.parts = (int)ceil_div((size_t)a.units, UNITS);
    a.pitch = qt_mix24_strip_bytes(w);
    a.factor = ldexpf(1, w->scale_exp2);
    a.wide = w->k % 16 == 0 && (size_t)out % 16 == 0;
    a.bf16 = dtype == QTOOL_BF16;
    void *args[] = {&a};
    const size_t blocks = (size_t)qt_mix24_strips(w) * (size_t)a.parts;
    const cudaError_t e =
        cudaLaunchKernel((const void *)mix24_dequantize_kernel, dim3((unsigned)blocks),
                         dim3(THREADS), args, 0, (cudaStream_t)stream);
    return e == cudaSuccess ? QTOOL_OK : QTOOL_FAILED;
}
