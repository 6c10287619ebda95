/* Embedding: a thread block per token. A row comes from GPU memory, so all of it is loaded at once
 * where rows are aligned. */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/decoder/decoder.h"
#include "kernels/cuda/decoder/reduce.cuh"

enum { EMBED_THREADS = 512, EMBED_EACH = 8 };

/* Loads EMBED_EACH channels and widens them. */
static __device__ __forceinline__ void embed_load(float v[EMBED_EACH], const __half *from)
{
    unpack_8_halves(v, *(const uint4 *)from);
}

static __device__ __forceinline__ void embed_row(float *out, const __half *row, const __half *place,
                                                 float factor, int n)
{
    for (int i = (int)threadIdx.x * EMBED_EACH; i < n; i += EMBED_THREADS * EMBED_EACH) {
        float v[EMBED_EACH], p[EMBED_EACH] = {};
        embed_load(v, row + i);
        if (place)
            embed_load(p, place + i);
#pragma unroll
        for (int j = 0; j < EMBED_EACH; j++)
            v[j] = v[j] * factor + p[j];
        ((float4 *)(out + i))[0] = *(const float4 *)v;
        ((float4 *)(out + i))[1] = *(const float4 *)(v + 4);
    }
}

template <bool ALIGNED>
static __global__ void __launch_bounds__(EMBED_THREADS) embed_kernel(qtool_decoder_embed a)
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
    if constexpr (ALIGNED) {
        embed_row(out, row, place, a.factor, n);
    } else {
#pragma unroll 4
        for (int i = (int)threadIdx.x; i < n; i += EMBED_THREADS)
            out[i] = __half2float(row[i]) * a.factor + (place ? __half2float(place[i]) : 0);
    }
}

int qt_decoder_embed(const struct qtool_decoder_embed *a, bool dependent, void *stream)
{
    struct qtool_decoder_embed args = *a;
    struct qt_kernel_launch l = {};
    const size_t addresses = (size_t)a->hidden | (size_t)a->table | (size_t)a->positions;
    l.kernel = a->n % EMBED_EACH == 0 && addresses % 16 == 0 ? (const void *)embed_kernel<true>
                                                             : (const void *)embed_kernel<false>;
    l.grid = dim3((unsigned)a->m);
    l.threads = EMBED_THREADS;
    l.dependent = l.most_smem = dependent; /* products that follow need much of it */
    return qt_launch_kernel(&l, &args, stream);
}
