/* Wrappers as in ptx.cuh, of instructions of compute capability 9.0a. */
#ifndef QT_KERNELS_CUDA_COMMON_PTX_SM90_CUH
#define QT_KERNELS_CUDA_COMMON_PTX_SM90_CUH

#include "kernels/cuda/common/ptx_barrier.cuh"

/* ---- shared memory -----------------------------------------------------------------------------
 */

/*
 * The reverse of ptx_ldmatrix_x4_transposed (lane l gives the address `to` of line l % 8 of matrix
 * l / 8, of which r[] has the columns) by each warp of a warpgroup, which meets before and after at
 * barrier `id`; then 16 bytes from `from`. (One statement: it is in each tile kernel many times.)
 */
PTX uint4 ptx_turn_16(int id, uint32_t to, const uint32_t r[4], uint32_t from)
{
    uint4 v;
    asm volatile("bar.sync %4, 128;\n" /* what was there has been read */
                 "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%5], {%6,%7,%8,%9};\n"
                 "bar.sync %4, 128;\n"
                 "ld.shared.v4.u32 {%0,%1,%2,%3}, [%10];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(id), "r"(to), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(from)
                 : "memory");
    return v;
}

/* The first `n` of eight 16-bit values to global memory; all or none, and aligned, if `whole`. */
PTX void ptx_store_halves(void *to, uint4 v, int n, int whole)
{
#define PAIR(word, at, low, high)                                                                  \
    "mov.b32 {l, h}, " word ";\n"                                                                  \
    "setp.gt.s32 p, %5, " low ";\n"                                                                \
    "@p st.global.b16 [%0 + " at "], l;\n"                                                         \
    "setp.gt.s32 p, %5, " high ";\n"                                                               \
    "@p st.global.b16 [%0 + " at " + 2], h;\n"
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 ".reg .b16 l, h;\n"
                 "setp.eq.s32 p, %6, 0;\n"
                 "@p bra PARTS;\n"
                 "setp.gt.s32 p, %5, 0;\n"
                 "@p st.global.v4.b32 [%0], {%1,%2,%3,%4};\n"
                 "bra DONE;\n"
                 "PARTS:\n" PAIR("%1", "0", "0", "1") PAIR("%2", "4", "2", "3")
                     PAIR("%3", "8", "4", "5") PAIR("%4", "12", "6", "7") "DONE:\n"
                                                                          "}" ::"l"(to),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(n), "r"(whole)
                 : "memory");
#undef PAIR
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
