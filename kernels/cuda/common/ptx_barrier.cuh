/* mbarriers and the copy engine (compute capability 9.0), wrapped as in ptx.cuh. On older devices
 * nothing here is called.
 *
 * A phase of a barrier ends when `count` arrivals and the announced bytes have come.
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

/* Makes initialised barriers visible to the copy engine and to the cluster. */
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

/* Arrives and announces bytes that are still to come. */
PTX void ptx_barrier_expect(uint32_t bar, uint32_t bytes)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
#endif
}

/* Until the phase of the given parity has ended. */
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

/* Contiguous bytes, a multiple of 16, global -> shared. */
PTX void ptx_copy_bulk(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(bar)
                 : "memory");
#endif
}

/* The line will soon be needed: brings it to L2. */
PTX void ptx_prefetch_l2(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

/* A box of a tensor, global -> shared; coordinates in elements, fastest first. */
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

/* True in one lane of a warp that has not diverged. The compiler makes a loop over lanes around
 * copies that it does not know to be one lane's. */
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
