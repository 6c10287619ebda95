/* Embedding: a thread block of 256 threads per token. */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/decoder/decoder.h"
#include "kernels/cuda/decoder/reduce.cuh"

static __global__ void __launch_bounds__(256) embed_kernel(qtool_decoder_embed a)
{
    const int n = (int)a.n;
    float *out = a.hidden + (size_t)blockIdx.x * n;
    ptx_launch_dependents();
    ptx_wait_previous();
    const __half *row = (const __half *)a.table + (size_t)a.ids[blockIdx.x] * n;
    const __half *place = NULL;
    if (a.positions)
        place =
            (const __half *)a.positions + (size_t)(a.position[blockIdx.x] + a.position_offset) * n;
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < n; i += 256)
        out[i] = __half2float(row[i]) * a.factor + (place ? __half2float(place[i]) : 0);
}

int qt_decoder_embed(const struct qtool_decoder_embed *a, bool dependent, void *stream)
{
    struct qtool_decoder_embed args = *a;
    struct qt_kernel_launch l = {};
    l.kernel = (const void *)embed_kernel;
    l.grid = dim3((unsigned)a->m);
    l.threads = 256;
    l.dependent = l.most_smem = dependent; /* products that follow need much of it */
    return qt_launch_kernel(&l, &args, stream);
}
