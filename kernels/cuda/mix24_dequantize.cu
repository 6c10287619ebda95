/*
 * mix24: weights to FP16 or BF16, out[n][k] in the order of the channels.
 *
 *   grid      blocks of 4 warps x strips; a warp turns records into 16 rows x 128 columns each.
 *             Then, in a launch of its own, eight lanes a row of outliers.
 *   Moves     packed bytes once, 2 n k bytes out
 *   Oracle    the weights' exact values, rounded once: equal bit for bit
 */
#include "kernels/cuda/mix24.h"
#include "kernels/cuda/mix24_decode.cuh"
#include "kernels/cuda/round.cuh"

#include <math.h>

/* That share a row of outliers, of which it has 8 in 4096 channels at 0.2 %. */
enum { OUTLIER_LANES = 8 };

struct dequantize_args {
    const unsigned char *stream;
    const uint16_t *perm;
    const uint32_t *csr_ptr;
    const uint16_t *csr_col, *csr_val;
    void *out;
    int n, k, units, fours, panels;
    size_t pitch, csr_pitch;
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

/* 16 channels of a row, which are neighbours in `out` too; one by one. */
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

static __device__ __forceinline__ uint4 exchanged(uint4 v)
{
    return make_uint4(__shfl_xor_sync(~0u, v.x, 1), __shfl_xor_sync(~0u, v.y, 1),
                      __shfl_xor_sync(~0u, v.z, 1), __shfl_xor_sync(~0u, v.w, 1));
}

/*
 * The same by the whole warp, 16 bytes a lane: two lanes write the 32 bytes of one of them, then of
 * the other, so that memory gets whole sectors. col, other: of the even, of the odd lane.
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
    const uint4 theirs = exchanged(choose(odd, first, second));
    uint16_t *to = (uint16_t *)a.out + (size_t)row * a.k + (odd ? 8 : 0);
    if (row < a.n && col < a.k) /* __stcg: the compiler makes eight stores of an assignment */
        __stcg((uint4 *)(to + col), choose(odd, theirs, first));
    if (row < a.n && other < a.k)
        __stcg((uint4 *)(to + other), choose(odd, second, theirs));
}

template <bool FOUR>
static __device__ __forceinline__ void put_record(const dequantize_args &a, int strip, int unit,
                                                  const unsigned char *record)
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

static __global__ void __launch_bounds__(128)
    dense_kernel(const __grid_constant__ dequantize_args a)
{
    for (int strip = (int)blockIdx.y; strip * 16 < a.n; strip += (int)gridDim.y)
        for (int unit = (int)(blockIdx.x * 4 + threadIdx.x / 32); unit < a.units;
             unit += (int)gridDim.x * 4) {
            const int fours = (int)((unsigned)(unit * a.fours) / (unsigned)a.units);
            const int rest = unit * a.fours - fours * a.units;
            const unsigned char *record =
                a.stream + strip * a.pitch + (size_t)unit * mix24_record<false>::BYTES +
                (size_t)fours * (mix24_record<true>::BYTES - mix24_record<false>::BYTES);
            if (rest + a.fours >= a.units)
                put_record<true>(a, strip, unit, record);
            else
                put_record<false>(a, strip, unit, record);
        }
}

static __global__ void __launch_bounds__(128)
    outlier_kernel(const __grid_constant__ dequantize_args a)
{
    const int rows = (int)blockDim.x / OUTLIER_LANES;
    for (int row = (int)(blockIdx.x * blockDim.x + threadIdx.x) / OUTLIER_LANES; row < a.n;
         row += (int)gridDim.x * rows)
        for (int p = 0; p < a.panels; p++) {
            const uint32_t *ptr = a.csr_ptr + p * a.csr_pitch + row;
            const uint32_t end = ptr[1];
            for (uint32_t e = ptr[0] + threadIdx.x % OUTLIER_LANES; e < end; e += OUTLIER_LANES) {
                int col = p * 65536 + a.csr_col[e];
                put(a, row, a.perm[col / 16] * 16 + col % 16, __ushort_as_half(a.csr_val[e]));
            }
        }
}

int qt_mix24_dequantize(const struct qt_matmul_weight *w, void *out, enum qt_matmul_dtype dtype,
                        void *stream)
{
    if (qt_mix24_fault(w))
        return QT_MATMUL_UNSUPPORTED;
    struct dequantize_args a = {};
    const struct qt_matmul_mix24 *m = &w->mix24;
    a.stream = (const unsigned char *)m->stream;
    a.perm = (const uint16_t *)m->perm;
    a.csr_ptr = (const uint32_t *)m->csr_ptr;
    a.csr_col = (const uint16_t *)m->csr_col;
    a.csr_val = (const uint16_t *)m->csr_val;
    a.out = out;
    a.n = (int)w->n;
    a.k = (int)w->k;
    a.units = (int)(m->twos + m->fours);
    a.fours = (int)m->fours;
    a.panels = (int)ceil_div((size_t)a.units, QT_MIX24_PANEL_UNITS);
    a.pitch = m->twos * mix24_record<false>::BYTES + m->fours * mix24_record<true>::BYTES;
    a.csr_pitch = (m->csr_rows ? m->csr_rows : w->n) + 1;
    a.factor = ldexpf(1, w->scale_exp2);
    a.wide = w->k % 16 == 0 && (size_t)out % 16 == 0;
    a.bf16 = dtype == QT_MATMUL_BF16;
    void *args[] = {&a};
    /* Two records a warp; a strip after the other, as its units write lines of the same 16 rows. */
    const size_t strips = (w->n + 15) / 16;
    const dim3 grid((unsigned)(a.units + 7) / 8, strips < 65535 ? (unsigned)strips : 65535);
    cudaError_t e = cudaLaunchKernel((const void *)dense_kernel, grid, dim3(128), args, 0,
                                     (cudaStream_t)stream);
    if (e == cudaSuccess && a.csr_ptr)
        e = cudaLaunchKernel((const void *)outlier_kernel, dim3(grid.y), dim3(128), args, 0,
                             (cudaStream_t)stream);
    return e == cudaSuccess ? QT_MATMUL_OK : QT_MATMUL_FAILED;
}
