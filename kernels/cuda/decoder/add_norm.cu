/*
 * Residual add and norm: a thread block per row. The usual case, addends without a norm and an
 * RMSNorm, has the row in registers (add_rms_kernel), all others in shared memory (add_norm.cuh).
 */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/decoder/add_norm.cuh"
#include "kernels/cuda/decoder/add_rms.cuh"
#include "kernels/cuda/decoder/decoder.h"

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
    l.kernel = a->scale != 0 ? qt_rare_add_norm() : (const void *)add_norm_kernel<false>;
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
