/*
 * Residual add and norm: a thread block per row. The usual case, addends without a norm and an
 * RMSNorm, has the row in registers (add_rms_kernel), all others in shared memory.
 *
 *   smem     [ the row after the add, FP32 | the addend before its norm, if it has one ]
 *   Traffic  FP32 row read and written, addends read, FP16 row written
 */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/decoder/decoder.h"
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
    if (a.add[0].x || a.add[1].x || a.after.weight)
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

enum { RMS_EACH = 8 }; /* values per thread of add_rms_kernel */

/* v += factor * (x + bias), 8 values from index i of the row on. */
static __device__ __forceinline__ void add_eight(float v[RMS_EACH], const qtool_decoder_addend &add,
                                                 float factor, size_t at, int i)
{
    const uint4 x = *(const uint4 *)((const __half *)add.x + at + i);
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float2 f = __half22float2(*(const __half2 *)&words[j]);
        if (add.bias) {
            f.x += add.bias[i + 2 * j];
            f.y += add.bias[i + 2 * j + 1];
        }
        v[2 * j] += factor * f.x;
        v[2 * j + 1] += factor * f.y;
    }
}

/* Before the preceding kernel has finished, the weights are loaded, and the row, which weights of
 * products have displaced, starts on its way to L2. */
static __global__ void __launch_bounds__(1024) add_rms_kernel(qtool_decoder_add_norm a)
{
    __shared__ float parts[32];
    const int n = (int)a.n, i = (int)threadIdx.x * RMS_EACH, warps = (int)blockDim.x / 32;
    const size_t at = (a.first + blockIdx.x * a.step) * a.n;
    const bool own = i < n;
    float4 *row = (float4 *)(a.hidden + at + i);
    float weight[RMS_EACH] = {}, v[RMS_EACH] = {}, squares = 0;
    ptx_launch_dependents();
    if (own) {
        *(float4 *)weight = *(const float4 *)(a.norm.weight + i);
        *(float4 *)(weight + 4) = *(const float4 *)(a.norm.weight + i + 4);
        if (threadIdx.x % 4 == 0) /* 128 bytes */
            prefetch_line(row);
    }
    ptx_wait_previous();
    if (own) {
        *(float4 *)v = row[0];
        *(float4 *)(v + 4) = row[1];
        for (int j = 0; j < 2; j++)
            if (a.add[j].x)
                add_eight(v, a.add[j], a.factor, at, i);
        if (a.add[0].x || a.add[1].x) {
            row[0] = *(const float4 *)v;
            row[1] = *(const float4 *)(v + 4);
        }
    }
#pragma unroll
    for (int j = 0; j < RMS_EACH; j++)
        squares += v[j] * v[j];
    squares = sum_of_warp(squares);
    if (threadIdx.x % 32 == 0)
        parts[threadIdx.x / 32] = squares;
    __syncthreads();
    squares = sum_of_warp((int)threadIdx.x % 32 < warps ? parts[threadIdx.x % 32] : 0);
    const float inverse = rsqrtf(squares / (float)n + a.norm.eps);
    uint32_t out[RMS_EACH / 2];
#pragma unroll
    for (int j = 0; j < RMS_EACH; j++)
        ((__half *)out)[j] = to_half(v[j] * inverse * weight[j]);
    if (own)
        *(uint4 *)((__half *)a.out + (size_t)blockIdx.x * n + i) =
            make_uint4(out[0], out[1], out[2], out[3]);
}

/* True if add_rms_kernel can run it. */
static bool is_plain_rms(const struct qtool_decoder_add_norm *a)
{
    return a->norm.kind == QTOOL_DECODER_RMS && a->norm.weight && a->out && !a->after.weight &&
           !(a->add[0].x && a->add[0].norm.weight) && !(a->add[1].x && a->add[1].norm.weight) &&
           a->n % RMS_EACH == 0 && a->n <= 1024 * RMS_EACH && (size_t)a->norm.weight % 16 == 0 &&
           (size_t)a->hidden % 16 == 0 && (size_t)a->out % 16 == 0 &&
           (size_t)a->add[0].x % 16 == 0 && (size_t)a->add[1].x % 16 == 0;
}

int qt_decoder_add_norm(const struct qtool_decoder_add_norm *a, bool dependent, void *stream)
{
    struct qtool_decoder_add_norm args = *a;
    struct qt_kernel_launch l = {};
    char reason[160];
    const bool second =
        (a->add[0].x && a->add[0].norm.weight) || (a->add[1].x && a->add[1].norm.weight);
    if (a->n > 32768 / (second ? 2 : 1))
        return QTOOL_UNSUPPORTED;
    l.kernel = (const void *)add_norm_kernel;
    l.grid = dim3((unsigned)a->m);
    l.threads = a->n <= 1024 ? 256 : a->n <= 2048 ? 512 : 1024;
    l.smem = a->n * (second ? 8 : 4);
    if (is_plain_rms(a)) {
        l.kernel = (const void *)add_rms_kernel;
        l.threads = (int)(a->n / RMS_EACH + 31) / 32 * 32;
        l.smem = 0;
    }
    l.dependent = l.most_smem = dependent;
    const size_t all = l.smem + 32 * sizeof(float); /* with `parts` */
    if (all > 48 << 10 && qt_allow_smem(l.kernel, l.smem, reason) != QTOOL_OK)
        return QTOOL_UNSUPPORTED;
    return qt_launch_kernel(&l, &args, stream);
}
