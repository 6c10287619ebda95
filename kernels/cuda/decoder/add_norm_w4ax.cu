/*
 * Residual add, RMS norm and quantization for w4ax linears: a thread block per row, a thread per 8
 * channels, a half warp per channel block.
 *
 *   hidden + addends --> registers --> norm --> FP16 row in shared memory --gather--> codes
 *
 * Reference  the kernels of add_norm.cu and w4ax/quantize_rows.cu, bit for bit
 */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/decoder/add_rms.cuh"
#include "kernels/cuda/decoder/decoder.h"
#include "kernels/cuda/w4ax/quantize_rows.cuh"

struct add_norm_w4ax_args {
    qtool_decoder_add_norm add_norm;
    quantize_args quantize;
};

/* BY_TOKEN: INT and ROW scales. */
template <bool BY_TOKEN>
static __global__ void __launch_bounds__(1024)
    add_norm_w4ax_kernel(const __grid_constant__ add_norm_w4ax_args args)
{
    __shared__ float parts[32];
    __shared__ token_stats tops;
    const quantize_args &q = args.quantize;
    const int token = (int)blockIdx.x;
    add_rms_row row(args.add_norm, blockIdx.x);
    round_state<1, 1> rounds[1];
    ptx_launch_dependents();
    row.load_weights();
    rounds[0].open(q, 0, token);
    ptx_wait_previous();
    *(uint4 *)(quantize_smem + row.i * 2) = row.run(parts);
    __syncthreads();
    const iteration_state<1> u = {{}, 1, ptx_shared(quantize_smem), token, 1};
    if (!BY_TOKEN) {
        quantize_by_block<false, QTOOL_W4AX_NO_NORM, 1>(q, u, rounds);
        return;
    }
    quantize_by_token<false, QTOOL_W4AX_NO_NORM, 1>(q, u, rounds, &tops, 0);
    __syncthreads();
    store_sums<1>(q, &tops, token);
}

int qt_decoder_add_norm_w4ax(const struct qtool_decoder_add_norm *a, bool dependent, void *stream)
{
    struct add_norm_w4ax_args args = {};
    struct qt_kernel_launch l = {};
    int ordinal = 0, sms = 0;
    args.add_norm = *a;
    if (!qt_is_plain_rms(a) || a->w4ax->k != a->n || a->n % (2 * COLS) ||
        qt_w4ax_quantize_args(&args.quantize, &a->acts, a->w4ax, a->m) != QTOOL_OK ||
        cudaGetDevice(&ordinal) != cudaSuccess)
        return QTOOL_UNSUPPORTED;
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, ordinal);
    l.threads = (int)a->n / RMS_EACH;
    if (a->m * (size_t)l.threads > (size_t)sms * 1024)
        return QTOOL_UNSUPPORTED; /* many tokens: the quantizer alone reads two rows at a time */
    l.kernel = a->w4ax->scales == QTOOL_W4AX_BLOCK ? (const void *)add_norm_w4ax_kernel<false>
                                                   : (const void *)add_norm_w4ax_kernel<true>;
    l.grid = dim3((unsigned)a->m);
    l.smem = a->n * 2;
    l.dependent = l.most_smem = dependent;
    return qt_launch_kernel(&l, &args, stream);
}
