/*
 * Residual add and norm of a row that a thread block has in shared memory.
 *
 *   smem     [ the row after the add, FP32 | the addend before its norm, if it has one ]
 *   Traffic  FP32 row read and written, addends read, FP16 row written
 */
#ifndef QT_KERNELS_CUDA_DECODER_ADD_NORM_CUH
#define QT_KERNELS_CUDA_DECODER_ADD_NORM_CUH

#include "kernels/cuda/decoder/reduce.cuh"

extern __shared__ float add_norm_smem[];

/* Mean (0 for RMS) and reciprocal of the deviation of row[n], which every thread wrote at the
 * indices that it reads. */
struct norm_factors {
    float mean, inverse;
};

static __device__ __forceinline__ norm_factors factors_of(const qtool_decoder_norm &norm,
                                                          const float *row, int n, float *parts)
{
    norm_factors f = {0, 1};
    float sum = 0;
    if (norm.kind == QTOOL_DECODER_LAYER_NORM) {
        for (int i = (int)threadIdx.x; i < n; i += (int)blockDim.x)
            sum += row[i];
        f.mean = sum_of_block(sum, parts) / (float)n;
        sum = 0;
    }
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < n; i += (int)blockDim.x) {
        const float d = row[i] - f.mean;
        sum += d * d;
    }
    f.inverse = rsqrtf(sum_of_block(sum, parts) / (float)n + norm.eps);
    return f;
}

static __device__ __forceinline__ float normed(const qtool_decoder_norm &norm,
                                               const norm_factors &f, float v, int i)
{
    v = (v - f.mean) * f.inverse * norm.weight[i];
    return norm.bias ? v + norm.bias[i] : v;
}

static __device__ __forceinline__ float addend_at(const qtool_decoder_addend &add, size_t at, int i)
{
    const float v = __half2float(((const __half *)add.x)[at + i]);
    return add.bias ? v + add.bias[i] : v;
}

/* SCALE: the hidden states have a factor. */
template <bool SCALE>
static __global__ void __launch_bounds__(1024) add_norm_kernel(qtool_decoder_add_norm a)
{
    __shared__ float parts[32];
    const int n = (int)a.n, step = (int)blockDim.x, own = (int)threadIdx.x;
    const size_t at = (a.first + blockIdx.x * a.step) * a.n;
    float *row = add_norm_smem, *addend = add_norm_smem + n;
    ptx_launch_dependents();
    ptx_wait_previous();
#pragma unroll 4
    for (int i = own; i < n; i += step)
        row[i] = a.hidden[at + i];
    for (int j = 0; j < 2; j++) {
        const qtool_decoder_addend &add = a.add[j];
        if (!add.x)
            continue;
        if (!add.norm.weight) {
#pragma unroll 4
            for (int i = own; i < n; i += step)
                row[i] += a.factor * addend_at(add, at, i);
            continue;
        }
#pragma unroll 4
        for (int i = own; i < n; i += step)
            addend[i] = addend_at(add, at, i);
        const norm_factors f = factors_of(add.norm, addend, n, parts);
        for (int i = own; i < n; i += step)
            row[i] += a.factor * normed(add.norm, f, addend[i], i);
    }
    if (a.after.weight) {
        const norm_factors f = factors_of(a.after, row, n, parts);
        for (int i = own; i < n; i += step)
            row[i] = normed(a.after, f, row[i], i);
    }
    if constexpr (SCALE)
        for (int i = own; i < n; i += step)
            row[i] *= a.scale;
    if (SCALE || a.add[0].x || a.add[1].x || a.after.weight)
#pragma unroll 4
        for (int i = own; i < n; i += step)
            a.hidden[at + i] = row[i];
    if (!a.out)
        return;
    __half *out = (__half *)a.out + (size_t)blockIdx.x * n;
    if (!a.norm.weight) {
        for (int i = own; i < n; i += step)
            out[i] = to_half(row[i]);
        return;
    }
    const norm_factors f = factors_of(a.norm, row, n, parts);
#pragma unroll 4
    for (int i = own; i < n; i += step)
        out[i] = to_half(normed(a.norm, f, row[i], i));
}

#endif
