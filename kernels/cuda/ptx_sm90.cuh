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

/* ---- products ----------------------------------------------------------------------------------
 */

/* Between writes of registers and the wgmma that use them. */
PTX void ptx_wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

PTX void ptx_wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING> PTX void ptx_wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/*
 * d[64 x N] += a[64 x 16] b[16 x N], FP16 in, FP32 sums, asynchronous. A in registers, 16 rows a
 * warp as in ptx_mma_f16; d[4 j + i] as there for the j-th 8 columns. B is described by
 * ptx_wgmma_b.
 */
template <int N> struct ptx_wgmma;

/* B[16 x N] in shared memory as N lines of 128 bytes (64 values along k), with the copy engine's
 * 128-byte swizzle, 1024-byte aligned; 16 k further is `+ 2`. The upper half of the description is
 * the same for all, PTX_WGMMA_B_HIGH, and moving it around with the lower took three instructions
 * more for each product. */
PTX uint32_t ptx_wgmma_b(uint32_t addr)
{
    return addr >> 4 | 1u << 16;
}
#define PTX_WGMMA_B_HIGH "0x40000040"

/* Numbers of the operands that are sums: N / 2 of a lane. */
#define PTX_SUMS_16  "%0,%1,%2,%3,%4,%5,%6,%7"
#define PTX_SUMS_32  PTX_SUMS_16 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define PTX_SUMS_48  PTX_SUMS_32 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define PTX_SUMS_64  PTX_SUMS_48 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define PTX_SUMS_96  PTX_SUMS_64 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define PTX_SUMS_128 PTX_SUMS_96 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define PTX_SUMS_160 PTX_SUMS_128 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define PTX_SUMS_192 PTX_SUMS_160 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define PTX_SUMS_224                                                                               \
    PTX_SUMS_192 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define PTX_SUMS_256                                                                               \
    PTX_SUMS_224 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%"   \
                 "127"

/* SUMS, A, B: numbers of the operands; after them those of d. */
#define PTX_WGMMA(N, SUMS, A, B, ...)                                                              \
    template <> struct ptx_wgmma<N> {                                                              \
        PTX void run(float d[N / 2], const uint32_t a[4], uint32_t b)                              \
        {                                                                                          \
            asm volatile("{.reg .b64 b; mov.b64 b, {" B ", " PTX_WGMMA_B_HIGH "};\n"               \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" SUMS "}, {" A  \
                         "}, b, 1, 1, 1, 0;}"                                                      \
                         : __VA_ARGS__                                                             \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));                    \
        }                                                                                          \
    }

#define D4(i)  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define D64(i) D16(i), D16(i + 16), D16(i + 32), D16(i + 48)

PTX_WGMMA(16, PTX_SUMS_16, "%8,%9,%10,%11", "%12", D4(0), D4(4));
PTX_WGMMA(32, PTX_SUMS_32, "%16,%17,%18,%19", "%20", D16(0));
PTX_WGMMA(48, PTX_SUMS_48, "%24,%25,%26,%27", "%28", D16(0), D4(16), D4(20));
PTX_WGMMA(64, PTX_SUMS_64, "%32,%33,%34,%35", "%36", D16(0), D16(16));
PTX_WGMMA(96, PTX_SUMS_96, "%48,%49,%50,%51", "%52", D16(0), D16(16), D16(32));
PTX_WGMMA(128, PTX_SUMS_128, "%64,%65,%66,%67", "%68", D64(0));
PTX_WGMMA(160, PTX_SUMS_160, "%80,%81,%82,%83", "%84", D64(0), D16(64));
PTX_WGMMA(192, PTX_SUMS_192, "%96,%97,%98,%99", "%100", D64(0), D16(64), D16(80));
PTX_WGMMA(224, PTX_SUMS_224, "%112,%113,%114,%115", "%116", D64(0), D16(64), D16(80), D16(96));
PTX_WGMMA(256, PTX_SUMS_256, "%128,%129,%130,%131", "%132", D64(0), D64(64));

#undef D4
#undef D16
#undef D64
#undef PTX_WGMMA

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
