/* Blocks that leave partial sums in global memory: the last to arrive adds them. */
#ifndef QT_KERNELS_CUDA_COMMON_ARRIVE_CUH
#define QT_KERNELS_CUDA_COMMON_ARRIVE_CUH

#include "kernels/cuda/common/ptx.cuh"

/*
 * True in the last of `of` blocks to call it with this count, which is 0 between launches; what the
 * others wrote before is then visible to all of its threads. flag: in shared memory; what
 * was there may be overwritten, and may be used again after the next barrier.
 */
static __device__ __forceinline__ bool qt_last_to_arrive(unsigned *count, unsigned of,
                                                         volatile int *flag)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        *flag = ptx_count_up(count) + 1 == of;
        if (*flag)
            *count = 0;
    }
    __syncthreads();
    return *flag;
}

#endif
