/* Wrappers as in ptx.cuh, for integer mma.sync and for the attention kernels (kv4). */
#ifndef QT_KERNELS_CUDA_COMMON_PTX_INT_CUH
#define QT_KERNELS_CUDA_COMMON_PTX_INT_CUH

#include "kernels/cuda/common/ptx_sm90.cuh"

/* 2^x, with an error of at most 2 ulp; 2^-inf = 0. */
PTX float ptx_exp2(float x)
{
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

/* d[16x8] += a[16x32] b[32x8]; a and b signed bytes. */
PTX void ptx_mma_s8(int d[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* As ptx_mma_s8, with a unsigned. */
PTX void ptx_mma_u8(int d[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* d[16x8] += a[16x64] b[64x8], signed 4-bit operands. One instruction on compute capability 8.x; on
 * 9.0 it is emulated with about 200 instructions. */
PTX void ptx_mma_s4(int d[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
