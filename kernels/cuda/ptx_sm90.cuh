/* Wrappers as in ptx.cuh, of instructions of compute capability 9.0a. */
#ifndef QT_CUDA_PTX_SM90_CUH
#define QT_CUDA_PTX_SM90_CUH

#include "kernels/cuda/ptx_barrier.cuh"

/* ---- shared memory -----------------------------------------------------------------------------
 */

/* The reverse of ptx_ldmatrix_x4_transposed: lane l gives the address of line l % 8 of matrix
 * l / 8, of which r[] has the columns. */
PTX void ptx_stmatrix_x4_transposed(uint32_t addr, const uint32_t r[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(addr),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

/* ---- others -------------------------------------------------------------------------------------
 */

/* 8x8 matrix of 16-bit values, two of a row a lane as in a fragment, transposed. */
PTX uint32_t ptx_transpose_8x8(uint32_t a)
{
    uint32_t d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}

/* Registers of a thread of this warpgroup from now on: gives some back, or takes some. */
template <int N> PTX void ptx_registers_fewer()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N> PTX void ptx_registers_more()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

/* Barrier number `id` of `threads` threads of the block. */
PTX void ptx_named_barrier(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Counts as having come to it, without waiting. */
PTX void ptx_named_barrier_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* A flag between blocks: what was written before the store is seen after the load. */
PTX void ptx_store_release(unsigned *p, unsigned v)
{
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

PTX unsigned ptx_load_acquire(const unsigned *p)
{
    unsigned v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

#endif
