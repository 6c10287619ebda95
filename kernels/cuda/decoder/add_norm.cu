/*
 * Residual add and norm: a thread block per row. The usual case, addends without a norm and an
 * RMSNorm, has the row in registers (add_rms_kernel), all others in shared memory.
 *
 *   smem     [ the row after the add, FP32 | the addend before its norm, if it has one ]
 *   Traffic  FP32 row read and written, addends read, FP16 row written
 */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/decoder/add_rms.cuh"
#include "kernels/cuda/decoder/decoder.h"

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

/* A row of n <= 1024 * RMS_EACH channels: the usual case. */
static __global__ void __launch_bounds__(1024) add_rms_kernel(qtool_decoder_add_norm a)
{
    __shared__ float parts[32];
    add_rms_row row(a, blockIdx.x);
    ptx_launch_dependents();
    row.load_weights();
    ptx_wait_previous();
    const uint4 out = row.run(parts);
    if (row.own)
        *(uint4 *)((__half *)a.out + (size_t)blockIdx.x * a.n + row.i) = out;
}

int qt_decoder_add_norm(const struct qtool_decoder_add_norm *a, bool dependent, void *stream)
{
    struct qtool_decoder_add_norm args = *a;
    struct qt_kernel_launch l = {};
    char reason[160];
    if (a->w4ax) {
        int rc = qt_decoder_add_norm_w4ax(a, dependent, stream);
        if (rc != QTOOL_UNSUPPORTED)
            return rc;
        args.w4ax = NULL;
        rc = qt_decoder_add_norm(&args, dependent, stream);
        return rc == QTOOL_OK
                   ? qtool_w4ax_quantize(&a->acts, a->w4ax, NULL, a->out, a->m, QTOOL_F16, stream)
                   : rc;
    }
    const bool second =
        (a->add[0].x && a->add[0].norm.weight) || (a->add[1].x && a->add[1].norm.weight);
    if (a->n > 32768 / (second ? 2 : 1))
        return QTOOL_UNSUPPORTED;
    l.kernel = (const void *)add_norm_kernel;
    l.grid = dim3((unsigned)a->m);
    l.threads = a->n <= 1024 ? 256 : a->n <= 2048 ? 512 : 1024;
    l.smem = a->n * (second ? 8 : 4);
    if (qt_is_plain_rms(a)) {
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
