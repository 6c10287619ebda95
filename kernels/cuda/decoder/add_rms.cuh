/* Residual add and RMS norm of a row that a thread block has in registers, without norms of the
 * addends. */
#ifndef QT_KERNELS_CUDA_DECODER_ADD_RMS_CUH
#define QT_KERNELS_CUDA_DECODER_ADD_RMS_CUH

#include "kernels/cuda/decoder/reduce.cuh"

enum { RMS_EACH = 8 }; /* values per thread */

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

/* Channels [i, i + RMS_EACH) of a row. */
struct add_rms_row {
    const qtool_decoder_add_norm &a;
    size_t at; /* of the row in hidden and addends */
    int i;
    bool own; /* the row has these channels */
    float weight[RMS_EACH];

    __device__ __forceinline__ add_rms_row(const qtool_decoder_add_norm &op, size_t row)
        : a(op), at((op.first + row * op.step) * op.n), i((int)threadIdx.x * RMS_EACH),
          own(i < (int)op.n), weight{}
    {
    }
    __device__ __forceinline__ float4 *hidden() const
    {
        return (float4 *)(a.hidden + at + i);
    }
    /* Before the preceding kernel has finished: loads the weights, and starts to bring the row,
     * which weights of products have displaced, to L2. */
    __device__ __forceinline__ void load_weights()
    {
        if (!own)
            return;
        *(float4 *)weight = *(const float4 *)(a.norm.weight + i);
        *(float4 *)(weight + 4) = *(const float4 *)(a.norm.weight + i + 4);
        if (threadIdx.x % 4 == 0) /* 128 bytes */
            prefetch_line(hidden());
    }
    /* Stores the sums; returns the normalized channels. */
    __device__ __forceinline__ uint4 run(float parts[32]) const
    {
        const int warps = (int)blockDim.x / 32;
        float v[RMS_EACH] = {}, squares = 0;
        if (own) {
            *(float4 *)v = hidden()[0];
            *(float4 *)(v + 4) = hidden()[1];
            for (int j = 0; j < 2; j++)
                if (a.add[j].x)
                    add_eight(v, a.add[j], a.factor, at, i);
            if (a.add[0].x || a.add[1].x) {
                hidden()[0] = *(const float4 *)v;
                hidden()[1] = *(const float4 *)(v + 4);
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
        const float inverse = rsqrtf(squares / (float)a.n + a.norm.eps);
        uint32_t out[RMS_EACH / 2];
#pragma unroll
        for (int j = 0; j < RMS_EACH; j++)
            ((__half *)out)[j] = to_half(v[j] * inverse * weight[j]);
        return make_uint4(out[0], out[1], out[2], out[3]);
    }
};

/* True if add_rms_row can run it. */
static inline bool qt_is_plain_rms(const struct qtool_decoder_add_norm *a)
{
    return a->norm.kind == QTOOL_DECODER_RMS && a->norm.weight && a->out && !a->after.weight &&
           a->scale == 0 && !(a->add[0].x && a->add[0].norm.weight) &&
           !(a->add[1].x && a->add[1].norm.weight) && a->n % RMS_EACH == 0 &&
           a->n <= 1024 * RMS_EACH && (size_t)a->norm.weight % 16 == 0 &&
           (size_t)a->hidden % 16 == 0 && (size_t)a->out % 16 == 0 &&
           (size_t)a->add[0].x % 16 == 0 && (size_t)a->add[1].x % 16 == 0;
}

#endif
