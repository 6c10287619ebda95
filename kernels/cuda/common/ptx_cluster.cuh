/* Thread block clusters (compute capability 9.0): one wrapper per PTX instruction. On older devices
 * a cluster is one block, and nothing here is called. Addresses are 32-bit ones of shared memory.
 */
#ifndef QT_KERNELS_CUDA_COMMON_PTX_CLUSTER_CUH
#define QT_KERNELS_CUDA_COMMON_PTX_CLUSTER_CUH

#include "kernels/cuda/common/ptx_barrier.cuh"

/* The same place in the shared memory of block `rank` of the cluster. */
PTX uint32_t ptx_cluster_map(uint32_t addr, uint32_t rank)
{
    uint32_t r = addr;
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(addr), "r"(rank));
#endif
    return r;
}

/* All threads of the cluster. Orders nothing but what ptx_barrier_init_fence does. */
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

/* Writes to the block that `addr` and `barrier` are mapped to, and counts 4 bytes there. */
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

/* The same with 16 bytes. */
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

/* The same to another block, or, if own, plainly to `at` of this one. Not a branch: dozens of them
 * are much for the compiler. */
PTX void ptx_cluster_put_16(bool own, uint32_t at, uint32_t there, float4 v, uint32_t barrier)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .pred own; setp.ne.u32 own, %0, 0;\n"
                 "@own st.shared.v4.f32 [%1], {%3, %4, %5, %6};\n"
                 "@!own st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
                 "[%2], {%3, %4, %5, %6}, [%7];}" ::"r"((uint32_t)own),
                 "r"(at), "r"(there), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
                 : "memory");
#endif
}

PTX void ptx_cluster_put_16(bool own, uint32_t at, uint32_t there, int4 v, uint32_t barrier)
{
    ptx_cluster_put_16(own, at, there, *(const float4 *)&v, barrier);
}

/* Until the phase of that parity is complete; what was sent to it is then seen. */
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
