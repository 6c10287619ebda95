/* Split-K reduction through global memory: each thread block stores its partial sums, and the last
 * thread block to arrive adds them. Used by the stream and mma.sync tile kernels, w4ax and kv4. */
#ifndef QT_KERNELS_CUDA_COMMON_SPLIT_K_CUH
#define QT_KERNELS_CUDA_COMMON_SPLIT_K_CUH

#include "kernels/cuda/common/ptx.cuh"

/*
 * Returns true in the last of `of` thread blocks that call it with the same `count`; all its
 * threads then see what the other thread blocks wrote before their calls. *count is 0 between
 * launches. `flag` is a word of shared memory that the call overwrites; the caller may reuse it
 * after the next __syncthreads.
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
