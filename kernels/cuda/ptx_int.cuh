/* Wrappers as in ptx.cuh, of the integer products and of the cache attention. */
#ifndef QT_CUDA_PTX_INT_CUH
#define QT_CUDA_PTX_INT_CUH

#include "kernels/cuda/ptx_sm90.cuh"

/* 2^x, to 2 units in the last place; 2^-inf = 0. */
PTX float ptx_exp2(float x)
{
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

/* d[16x8] += a[16x32] b[32x8], signed bytes. */
PTX void ptx_mma_s8(int d[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* The same, a unsigned. */
PTX void ptx_mma_u8(int d[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* d[16x8] += a[16x64] b[64x8], signed 4-bit values. One instruction on compute capability 8.x,
 * about two hundred on 9.0. */
PTX void ptx_mma_s4(int d[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* ---- compute capability 9.0a -------------------------------------------------------------------
 */

/* Keeps uses of v behind the wait before, of which the compiler does not know that it writes v. */
PTX void ptx_keep_behind(int &v)
{
    asm volatile("" : "+r"(v)::"memory");
}

/* d[64xN] (+)= a[64x32] b[32xN], a in registers, signed bytes or (U8) unsigned times signed ones; b
 * as of ptx_wgmma_b. N / 2 words of d. Asynchronous. */
template <int N, bool U8> struct ptx_wgmma_s8;

/* SUMS, A, B, ADD: numbers of the operands; after them those of d. */
#define PTX_WGMMA_S8_RUN(N, TYPE, SUMS, A, B, ADD, ...)                                            \
    asm volatile("{.reg .pred p; .reg .b64 b; setp.ne.b32 p, " ADD ", 0;\n"                        \
                 "mov.b64 b, {" B ", " PTX_WGMMA_B_HIGH "};\n"                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32." TYPE ".s8 {" SUMS "}, {" A      \
                 "}, b, p;}"                                                                       \
                 : __VA_ARGS__                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add))

#define PTX_WGMMA_S8(N, ...)                                                                       \
    template <bool U8> struct ptx_wgmma_s8<N, U8> {                                                \
        PTX void run(int *d, const uint32_t *a, uint32_t b, int add)                               \
        {                                                                                          \
            if (U8)                                                                                \
                PTX_WGMMA_S8_RUN(N, "u8", __VA_ARGS__);                                            \
            else                                                                                   \
                PTX_WGMMA_S8_RUN(N, "s8", __VA_ARGS__);                                            \
        }                                                                                          \
    }

#define D4(i)  "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define D64(i) D16(i), D16(i + 16), D16(i + 32), D16(i + 48)

PTX_WGMMA_S8(16, PTX_SUMS_16, "%8,%9,%10,%11", "%12", "%13", D4(0), D4(4));
PTX_WGMMA_S8(32, PTX_SUMS_32, "%16,%17,%18,%19", "%20", "%21", D16(0));
PTX_WGMMA_S8(48, PTX_SUMS_48, "%24,%25,%26,%27", "%28", "%29", D16(0), D4(16), D4(20));
PTX_WGMMA_S8(64, PTX_SUMS_64, "%32,%33,%34,%35", "%36", "%37", D16(0), D16(16));
PTX_WGMMA_S8(96, PTX_SUMS_96, "%48,%49,%50,%51", "%52", "%53", D16(0), D16(16), D16(32));
PTX_WGMMA_S8(128, PTX_SUMS_128, "%64,%65,%66,%67", "%68", "%69", D64(0));
PTX_WGMMA_S8(160, PTX_SUMS_160, "%80,%81,%82,%83", "%84", "%85", D64(0), D16(64));
PTX_WGMMA_S8(192, PTX_SUMS_192, "%96,%97,%98,%99", "%100", "%101", D64(0), D16(64), D16(80));
PTX_WGMMA_S8(224, PTX_SUMS_224, "%112,%113,%114,%115", "%116", "%117", D64(0), D16(64), D16(80),
             D16(96));
PTX_WGMMA_S8(256, PTX_SUMS_256, "%128,%129,%130,%131", "%132", "%133", D64(0), D64(64));

#undef D4
#undef D16
#undef D64
#undef PTX_WGMMA_S8
#undef PTX_WGMMA_S8_RUN

#endif
