/*
 * Wrappers for mbarriers and TMA (compute capability 9.0). Devices of lower compute capability
 * never call them.
 *
 * A phase of an mbarrier completes when `count` threads have arrived and all expected bytes have
 * been copied.
 */
#ifndef QT_KERNELS_CUDA_COMMON_PTX_BARRIER_CUH
#define QT_KERNELS_CUDA_COMMON_PTX_BARRIER_CUH

#include "kernels/cuda/common/ptx.cuh"

PTX void ptx_barrier_init(uint32_t bar, uint32_t count)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
#endif
}

/* Makes initialized mbarriers visible to TMA and to the cluster. */
PTX void ptx_barrier_init_fence()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

PTX void ptx_barrier_arrive(uint32_t bar)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
#endif
}

/* Arrives, and adds `bytes` to the transaction count of the phase. */
PTX void ptx_barrier_expect(uint32_t bar, uint32_t bytes)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
#endif
}

/* Waits until the phase of the given parity has completed. */
PTX void ptx_barrier_wait(uint32_t bar, uint32_t parity)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "WAIT:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra WAIT;\n"
                 "}" ::"r"(bar),
                 "r"(parity)
                 : "memory");
#endif
}

/* Bulk copy of contiguous bytes (a multiple of 16) from global to shared memory; completes on
 * `bar`. */
PTX void ptx_copy_bulk(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(bar)
                 : "memory");
#endif
}

/* Arrives when all cp.async of this thread before it have completed; the count of the mbarrier must
 * include it. */
PTX void ptx_barrier_arrive_copied(uint32_t bar)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
#endif
}

/* Prefetches a cache line to L2. */
PTX void ptx_prefetch_l2(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

/* TMA copy of a box of a tensor from global to shared memory; coordinates in elements, fastest
 * dimension first. */
PTX void ptx_copy_box(uint32_t dst, const void *map, int c0, int c1, uint32_t bar)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(dst),
                 "l"(map), "r"(c0), "r"(c1), "r"(bar)
                 : "memory");
#endif
}

PTX void ptx_copy_box_3d(uint32_t dst, const void *map, int c0, int c1, int c2, uint32_t bar)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(dst),
                 "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(bar)
                 : "memory");
#endif
}

/* Returns true in one lane of a converged warp. With another condition, the compiler loops over the
 * lanes around each copy, because it cannot prove that a single lane issues the copy. */
PTX bool ptx_elect()
{
    uint32_t elected = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n"
                 ".reg .pred elected;\n"
                 "elect.sync _|elected, 0xffffffff;\n"
                 "selp.u32 %0, 1, 0, elected;\n"
                 "}"
                 : "=r"(elected));
#endif
    return elected != 0;
}

#endif
