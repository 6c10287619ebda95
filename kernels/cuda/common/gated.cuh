/* Products with the activation of gate times up in their epilogue: tiles have strips of gate and of
 * up in turns. */
#ifndef QT_KERNELS_CUDA_COMMON_GATED_CUH
#define QT_KERNELS_CUDA_COMMON_GATED_CUH

#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/common/ptx_barrier.cuh"
#include "kernels/include/qtool_kernels.h"

/* The strip of a matrix that is number `at` in tiles. */
template <bool GATED> static __device__ __forceinline__ int qt_strip_at(int at, int strips)
{
    return GATED ? at / 2 + at % 2 * (strips / 2) : at;
}

/* Copies a box of a section of the weights from `strip` of tiles on (qt_weight_maps). */
template <bool GATED>
static __device__ __forceinline__ void qt_copy_strips(uint32_t dst, const void *map, int column,
                                                      int strip, uint32_t bar)
{
    if (GATED)
        ptx_copy_box_3d(dst, map, column, 0, strip / 2, bar);
    else
        ptx_copy_box(dst, map, column, strip, bar);
}

/* GELU with the tanh approximation is a sigmoid too: 1 + tanh(z) = 2 sigmoid(2 z). */
static __device__ __forceinline__ float qt_gated(int gated, float g, float u)
{
    const float z =
        gated == QTOOL_MATMUL_GATED_SILU ? g : 1.5957691216f * (g + .044715f * g * g * g);
    return g * __fdividef(1, 1 + __expf(-z)) * u;
}

/* The same for two values in 16 bits each; FP16 results within its range. */
static __device__ __forceinline__ uint32_t qt_gated_two(int gated, bool bf16, uint32_t gate,
                                                        uint32_t up)
{
    const float2 g = qt_float_two(bf16, gate), u = qt_float_two(bf16, up);
    float x = qt_gated(gated, g.x, u.x), y = qt_gated(gated, g.y, u.y);
    if (!bf16) { /* NaN stays NaN */
        x = x > 65504 ? 65504 : x < -65504 ? -65504 : x;
        y = y > 65504 ? 65504 : y < -65504 ? -65504 : y;
    }
    return qt_round_two(bf16, x, y);
}

#endif
