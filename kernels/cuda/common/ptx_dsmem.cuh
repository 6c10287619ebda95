/* Loads from the shared memory of other thread blocks of a cluster (compute capability 9.0). On
 * older devices a cluster has one thread block, and these functions are never called. */
#ifndef QT_KERNELS_CUDA_COMMON_PTX_DSMEM_CUH
#define QT_KERNELS_CUDA_COMMON_PTX_DSMEM_CUH

#include "kernels/cuda/common/ptx_cluster.cuh"

/* The cluster barrier with release and acquire order, for all threads of the cluster. */
PTX void ptx_cluster_sync()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
#endif
}

/* Loads from an address of ptx_cluster_map. */
PTX float ptx_cluster_load(uint32_t addr)
{
    float v = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(addr) : "memory");
#endif
    return v;
}

#endif
