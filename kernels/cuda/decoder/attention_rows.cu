/* Attention of single queries: the choice of the kernel, and its launch. */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/decoder/attention_rows.cuh"
#include "kernels/cuda/decoder/decoder.h"

enum { ROWS_BLOCKS = 512 }; /* thread blocks that fill a large device */

/* As many thread blocks per head as fill the device. */
static int splits_of(const qtool_decoder_attention *a, const void *kernel)
{
    cudaFuncAttributes code = {};
    int splits = 1;
    if (a->batch_invariant || cudaFuncGetAttributes(&code, kernel) != cudaSuccess ||
        code.ptxVersion != 90)
        return 1;
    while (splits < ROWS_SPLITS &&
           a->heads * a->sequences * a->queries * 2 * (size_t)splits <= ROWS_BLOCKS)
        splits *= 2;
    return splits;
}

int qt_attention_rows(const struct qtool_decoder_attention *a, bool dependent, void *stream)
{
    struct rows_args args = {*a, a->head_dim % 8 == 0, 1};
    struct qt_kernel_launch l = {};
    l.kernel = a->slopes || a->head_dim > 256 ? qt_rare_rows(a)
               : a->head_dim <= 32            ? (const void *)attention_rows_kernel<4, 8, false>
               : a->head_dim <= 64            ? (const void *)attention_rows_kernel<8, 8, false>
               : a->head_dim <= 128           ? (const void *)attention_rows_kernel<16, 8, false>
                                              : (const void *)attention_rows_kernel<32, 8, false>;
    if (!l.kernel)
        return QTOOL_UNSUPPORTED;
    args.splits = l.cluster = splits_of(a, l.kernel);
    l.grid =
        dim3((unsigned)a->heads * (unsigned)args.splits, (unsigned)(a->sequences * a->queries));
    l.threads = ROWS_THREADS;
    l.dependent = l.most_smem = dependent; /* products that follow need much of it */
    return qt_launch_kernel(&l, &args, stream);
}
