/* Wrappers for thread-block clusters (compute capability 9.0). On older devices a cluster has one
 * thread block, and these functions are never called. All addresses are 32-bit shared-memory
 * addresses. */
#ifndef QT_KERNELS_CUDA_COMMON_PTX_CLUSTER_CUH
#define QT_KERNELS_CUDA_COMMON_PTX_CLUSTER_CUH

#include "kernels/cuda/common/ptx_barrier.cuh"

/* The address of the same location in the shared memory of thread block `rank` of the cluster. */
PTX uint32_t ptx_cluster_map(uint32_t addr, uint32_t rank)
{
    uint32_t r = addr;
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(addr), "r"(rank));
#endif
    return r;
}

/* The cluster barrier, for all threads of the cluster. The arrival is relaxed: it orders no memory
 * accesses except those that ptx_barrier_init_fence orders. */
PTX void ptx_cluster_arrive()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

PTX void ptx_cluster_wait()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/* Stores to the thread block that `addr` and `barrier` are mapped to, and completes 4 bytes of its
 * mbarrier. */
PTX void ptx_cluster_send(uint32_t addr, float v, uint32_t barrier)
{
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
            addr),
        "r"(__float_as_uint(v)), "r"(barrier)
        : "memory");
#endif
}

/* As ptx_cluster_send, with 16 bytes. */
PTX void ptx_cluster_send_16(uint32_t addr, float4 v, uint32_t barrier)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
                 "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(addr),
                 "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
                 : "memory");
#endif
}

PTX void ptx_cluster_send_16(uint32_t addr, int4 v, uint32_t barrier)
{
    ptx_cluster_send_16(addr, *(const float4 *)&v, barrier);
}

/* If `own`, stores 16 bytes to local address `at`; else sends them to the mapped address `remote`,
 * as ptx_cluster_send_16. Predicated, because dozens of branches slow the compiler down. */
PTX void ptx_cluster_put_16(bool own, uint32_t at, uint32_t remote, float4 v, uint32_t barrier)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .pred own; setp.ne.u32 own, %0, 0;\n"
                 "@own st.shared.v4.f32 [%1], {%3, %4, %5, %6};\n"
                 "@!own st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
                 "[%2], {%3, %4, %5, %6}, [%7];}" ::"r"((uint32_t)own),
                 "r"(at), "r"(remote), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
                 : "memory");
#endif
}

PTX void ptx_cluster_put_16(bool own, uint32_t at, uint32_t remote, int4 v, uint32_t barrier)
{
    ptx_cluster_put_16(own, at, remote, *(const float4 *)&v, barrier);
}

/* Waits until the phase of the given parity has completed, with acquire order at cluster scope:
 * data sent to `barrier` is then visible. */
PTX void ptx_barrier_wait_cluster(uint32_t barrier, uint32_t parity)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
#endif
}

#endif
