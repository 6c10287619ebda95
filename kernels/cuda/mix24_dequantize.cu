/*
 * mix24: weights to FP16 or BF16, out[n][k] in the order of the channels.
 *
 *   grid      blocks of 4 warps; a warp turns one record into 16 rows x 128 columns. Then, in a
 *             launch of its own, a warp a row of outliers.
 *   Moves     packed bytes once, 2 n k bytes out
 *   Oracle    the weights' exact values, rounded once: equal bit for bit
 */
#include "kernels/cuda/mix24.h"
#include "kernels/cuda/mix24_decode.cuh"

#include <cuda_bf16.h>
#include <math.h>

struct dequantize_args {
    const unsigned char *stream;
    const uint16_t *perm;
    const uint32_t *csr_ptr;
    const uint16_t *csr_col, *csr_val;
    void *out;
    int n, k, units, fours, panels;
    size_t pitch, csr_pitch;
    float factor;
    int wide; /* rows of out are 16-byte aligned */
    int bf16;
};

static __device__ __forceinline__ void put(const dequantize_args &a, int row, int col, __half w)
{
    if (row >= a.n || col >= a.k)
        return;
    size_t at = (size_t)row * a.k + col;
    float v = __half2float(w) * a.factor;
    if (a.bf16)
        ((__nv_bfloat16 *)a.out)[at] = __float2bfloat16(v);
    else
        ((__half *)a.out)[at] = __float2half(v);
}

/* 16 channels of a row, which are neighbours in `out` too. */
static __device__ __forceinline__ void put_channels(const dequantize_args &a, int row, int col,
                                                    const uint32_t pair[8])
{
    if (!a.wide || col + 16 > a.k) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            put(a, row, col + 2 * i, __low2half(as_half2(pair[i])));
            put(a, row, col + 2 * i + 1, __high2half(as_half2(pair[i])));
        }
        return;
    }
    if (row >= a.n)
        return;
    uint32_t v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float2 f = __half22float2(as_half2(pair[i]));
        __nv_bfloat162 bf16 = __floats2bfloat162_rn(f.x * a.factor, f.y * a.factor);
        __half2 f16 = __floats2half2_rn(f.x * a.factor, f.y * a.factor);
        v[i] = a.bf16 ? *(uint32_t *)&bf16 : *(uint32_t *)&f16;
    }
    uint4 *to = (uint4 *)((uint16_t *)a.out + (size_t)row * a.k + col);
    to[0] = make_uint4(v[0], v[1], v[2], v[3]);
    to[1] = make_uint4(v[4], v[5], v[6], v[7]);
}

template <bool FOUR>
static __device__ __forceinline__ void put_record(const dequantize_args &a, int strip, int unit,
                                                  const unsigned char *record)
{
    const int lane = (int)threadIdx.x % 32;
    using R = mix24_record<FOUR>;
    const mix24_meta meta = mix24_meta_of<FOUR>(*(const uint16_t *)(record + R::Q + lane * 2),
                                                FOUR ? *(const uint16_t *)(record + R::Z + lane * 2)
                                                     : record[R::Z + lane],
                                                *(const uint32_t *)(record + R::U + lane % 4 * 4));
#pragma unroll
    for (int b = 0; b < 2; b++) {
        mix24_group group = b ? mix24_open_group<FOUR, 1>(meta) : mix24_open_group<FOUR, 0>(meta);
        const uint32_t *words = (const uint32_t *)(record + lane * 16) + (FOUR ? 128 * b : 2 * b);
        const int channel = a.perm[unit * 8 + b * 4 + lane % 4] * 16;
        uint32_t rows[2][8]; /* 16 channels of rows g and g + 8 */
#pragma unroll
        for (int s = 0; s < 4; s++) {
            uint32_t frag[4];
            mix24_fragment<FOUR>(frag, words, s, group, MIX24_TURN);
#pragma unroll
            for (int i = 0; i < 4; i++)
                rows[i % 2][2 * s + i / 2] = frag[i];
        }
        put_channels(a, strip * 16 + lane / 4, channel, rows[0]);
        put_channels(a, strip * 16 + lane / 4 + 8, channel, rows[1]);
    }
}

static __global__ void __launch_bounds__(128)
    dense_kernel(const __grid_constant__ dequantize_args a)
{
    const size_t total = (size_t)((a.n + 15) / 16) * a.units;
    for (size_t item = blockIdx.x * 4 + threadIdx.x / 32; item < total; item += gridDim.x * 4) {
        int strip = (int)(item / a.units), unit = (int)(item % a.units);
        int fours = (int)((unsigned)(unit * a.fours) / (unsigned)a.units);
        bool four = (unsigned)((unit + 1) * a.fours) / (unsigned)a.units > (unsigned)fours;
        const unsigned char *record =
            a.stream + strip * a.pitch + (size_t)unit * mix24_record<false>::BYTES +
            (size_t)fours * (mix24_record<true>::BYTES - mix24_record<false>::BYTES);
        if (four)
            put_record<true>(a, strip, unit, record);
        else
            put_record<false>(a, strip, unit, record);
    }
}

static __global__ void __launch_bounds__(128)
    outlier_kernel(const __grid_constant__ dequantize_args a)
{
    for (int row = (int)(blockIdx.x * 4 + threadIdx.x / 32); row < a.n; row += (int)gridDim.x * 4)
        for (int p = 0; p < a.panels; p++) {
            const uint32_t *ptr = a.csr_ptr + p * a.csr_pitch + row;
            for (uint32_t e = ptr[0] + threadIdx.x % 32; e < ptr[1]; e += 32) {
                int col = p * 65536 + a.csr_col[e];
                put(a, row, a.perm[col / 16] * 16 + col % 16, __ushort_as_half(a.csr_val[e]));
            }
        }
}

static int grid_of(size_t warps)
{
    size_t blocks = (warps + 15) / 16;
    return (int)(blocks < 65536 ? blocks : 65536);
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
    a.panels = (a.units + 511) / 512;
    a.pitch = m->twos * mix24_record<false>::BYTES + m->fours * mix24_record<true>::BYTES;
    a.csr_pitch = (m->csr_rows ? m->csr_rows : w->n) + 1;
    a.factor = ldexpf(1, w->scale_exp2);
    a.wide = w->k % 8 == 0 && (size_t)out % 16 == 0;
    a.bf16 = dtype == QT_MATMUL_BF16;
    cudaStream_t s = (cudaStream_t)stream;
    dense_kernel<<<grid_of((w->n + 15) / 16 * (size_t)a.units), 128, 0, s>>>(a);
    if (a.csr_ptr)
        outlier_kernel<<<grid_of(w->n), 128, 0, s>>>(a);
    return cudaGetLastError() == cudaSuccess ? QT_MATMUL_OK : QT_MATMUL_FAILED;
}
