/* Wrappers as in ptx.cuh, for instructions of compute capability 9.0a. */
#ifndef QT_KERNELS_CUDA_COMMON_PTX_SM90_CUH
#define QT_KERNELS_CUDA_COMMON_PTX_SM90_CUH

#include "kernels/cuda/common/ptx_barrier.cuh"

/* ---- shared memory --------------------------------------------------------------------------- */

/*
 * Transposes through shared memory, by each warp of a warpgroup: stores r[], which holds the
 * columns of four 8x8 matrices (the reverse of ptx_ldmatrix_x4_transposed; lane l passes in `to`
 * the address of row l % 8 of matrix l / 8), and then loads 16 bytes from `from`. The warpgroup
 * synchronizes at named barrier `id` before and after the store. One asm statement, because each
 * tile kernel contains it many times.
 */
PTX uint4 ptx_transpose_16(int id, uint32_t to, const uint32_t r[4], uint32_t from)
{
    uint4 v;
    asm volatile("bar.sync %4, 128;\n" /* earlier loads have completed */
                 "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%5], {%6,%7,%8,%9};\n"
                 "bar.sync %4, 128;\n"
                 "ld.shared.v4.u32 {%0,%1,%2,%3}, [%10];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(id), "r"(to), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(from)
                 : "memory");
    return v;
}

/* The same by one warp alone. */
PTX uint4 ptx_transpose_warp(uint32_t to, const uint32_t r[4], uint32_t from)
{
    uint4 v;
    asm volatile("bar.warp.sync 0xffffffff;\n" /* earlier loads have completed */
                 "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%4], {%5,%6,%7,%8};\n"
                 "bar.warp.sync 0xffffffff;\n"
                 "ld.shared.v4.u32 {%0,%1,%2,%3}, [%9];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(to), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(from)
                 : "memory");
    return v;
}

/* The reverse: stores 16 bytes to `to`, and then loads four matrices. */
PTX void ptx_untranspose_warp(uint32_t r[4], uint32_t to, uint4 v, uint32_t from)
{
    asm volatile("bar.warp.sync 0xffffffff;\n"
                 "st.shared.v4.u32 [%4], {%5,%6,%7,%8};\n"
                 "bar.warp.sync 0xffffffff;\n"
                 "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%9];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(from)
                 : "memory");
}

/* Stores the first `n` of eight 16-bit values to global memory. If `whole`, n is 0 or 8 or more,
 * and `to` is 16-byte aligned: one 16-byte store. */
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

/* ---- other instructions ---------------------------------------------------------------------- */

/* Transposes an 8x8 matrix of 16-bit values, two values of a row per lane as in an mma fragment. */
PTX uint32_t ptx_transpose_8x8(uint32_t a)
{
    uint32_t d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}

/* Changes the number of registers per thread of this warpgroup to N (setmaxnreg): _dec releases
 * registers, _inc requests them. */
template <int N> PTX void ptx_setmaxnreg_dec()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N> PTX void ptx_setmaxnreg_inc()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

/* Synchronizes `threads` threads of the thread block at named barrier `id`. */
PTX void ptx_named_barrier(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Arrives at a named barrier without waiting. */
PTX void ptx_named_barrier_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Flag between thread blocks: writes before the store are visible after the load. */
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
