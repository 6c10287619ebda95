/* Wrappers for warpgroup MMA (wgmma), compute capability 9.0a. */
#ifndef QT_KERNELS_CUDA_COMMON_PTX_WGMMA_CUH
#define QT_KERNELS_CUDA_COMMON_PTX_WGMMA_CUH

#include "kernels/cuda/common/ptx.cuh"

/* Orders register writes before the wgmma instructions that read the registers. */
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
 * d[64 x N] += a[64 x 16 STEPS] b[16 STEPS x N], STEPS 2 or 4, FP16 operands, FP32 accumulators,
 * asynchronous. A is in registers: for each k-step of 16, each warp holds 16 rows in the fragment
 * layout of ptx_mma_f16. d[4 j + i] is element i of the ptx_mma_f16 accumulators for the j-th 8
 * columns. B is given by ptx_wgmma_b. All k-steps are one asm statement, because compile time grows
 * with the number of operands of each statement; these statements take a tenth of the compile time
 * of the tile kernels.
 */
template <int N> struct ptx_wgmma;

/* The low word of the shared-memory descriptor of B[16 x N]: N rows of 128 bytes (64 values along
 * k), 128-byte swizzle as written by TMA, 1024-byte aligned. Adding 2 advances 16 along k. The high
 * word is the constant PTX_WGMMA_B_HIGH; carrying both words in registers costs three more
 * instructions per product. */
PTX uint32_t ptx_wgmma_b(uint32_t addr)
{
    return addr >> 4 | 1u << 16;
}
#define PTX_WGMMA_B_HIGH "0x40000040"

/* Operand numbers of the accumulators: N / 2 per lane. */
#define PTX_ACC_16  "%0,%1,%2,%3,%4,%5,%6,%7"
#define PTX_ACC_32  PTX_ACC_16 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define PTX_ACC_48  PTX_ACC_32 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define PTX_ACC_64  PTX_ACC_48 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define PTX_ACC_96  PTX_ACC_64 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define PTX_ACC_128 PTX_ACC_96 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define PTX_ACC_160 PTX_ACC_128 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define PTX_ACC_192 PTX_ACC_160 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define PTX_ACC_224                                                                                \
    PTX_ACC_192 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define PTX_ACC_256                                                                                \
    PTX_ACC_224 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%"    \
                "127"

/* X(N, operand numbers of b, of the scale-d flag, and of A for each k-step). */
#define PTX_WGMMA_SIZES(X)                                                                         \
    X(16, "%8", "%9", "%10,%11,%12,%13", "%14,%15,%16,%17", "%18,%19,%20,%21", "%22,%23,%24,%25")  \
    X(32, "%16", "%17", "%18,%19,%20,%21", "%22,%23,%24,%25", "%26,%27,%28,%29",                   \
      "%30,%31,%32,%33")                                                                           \
    X(48, "%24", "%25", "%26,%27,%28,%29", "%30,%31,%32,%33", "%34,%35,%36,%37",                   \
      "%38,%39,%40,%41")                                                                           \
    X(64, "%32", "%33", "%34,%35,%36,%37", "%38,%39,%40,%41", "%42,%43,%44,%45",                   \
      "%46,%47,%48,%49")                                                                           \
    X(96, "%48", "%49", "%50,%51,%52,%53", "%54,%55,%56,%57", "%58,%59,%60,%61",                   \
      "%62,%63,%64,%65")                                                                           \
    X(128, "%64", "%65", "%66,%67,%68,%69", "%70,%71,%72,%73", "%74,%75,%76,%77",                  \
      "%78,%79,%80,%81")                                                                           \
    X(160, "%80", "%81", "%82,%83,%84,%85", "%86,%87,%88,%89", "%90,%91,%92,%93",                  \
      "%94,%95,%96,%97")                                                                           \
    X(192, "%96", "%97", "%98,%99,%100,%101", "%102,%103,%104,%105", "%106,%107,%108,%109",        \
      "%110,%111,%112,%113")                                                                       \
    X(224, "%112", "%113", "%114,%115,%116,%117", "%118,%119,%120,%121", "%122,%123,%124,%125",    \
      "%126,%127,%128,%129")                                                                       \
    X(256, "%128", "%129", "%130,%131,%132,%133", "%134,%135,%136,%137", "%138,%139,%140,%141",    \
      "%142,%143,%144,%145")

/* The accumulators as asm operands; C: constraint. */
#define PTX_D4(C, i)  C(d[i]), C(d[(i) + 1]), C(d[(i) + 2]), C(d[(i) + 3])
#define PTX_D16(C, i) PTX_D4(C, i), PTX_D4(C, (i) + 4), PTX_D4(C, (i) + 8), PTX_D4(C, (i) + 12)
#define PTX_D_16(C)   PTX_D4(C, 0), PTX_D4(C, 4)
#define PTX_D_32(C)   PTX_D16(C, 0)
#define PTX_D_48(C)   PTX_D_32(C), PTX_D4(C, 16), PTX_D4(C, 20)
#define PTX_D_64(C)   PTX_D_32(C), PTX_D16(C, 16)
#define PTX_D_96(C)   PTX_D_64(C), PTX_D16(C, 32)
#define PTX_D_128(C)  PTX_D_96(C), PTX_D16(C, 48)
#define PTX_D_160(C)  PTX_D_128(C), PTX_D16(C, 64)
#define PTX_D_192(C)  PTX_D_160(C), PTX_D16(C, 80)
#define PTX_D_224(C)  PTX_D_192(C), PTX_D16(C, 96)
#define PTX_D_256(C)  PTX_D_224(C), PTX_D16(C, 112)

/* One k-step. l: the low word of the descriptor of b, which advances by 32 bytes per k-step. */
#define PTX_WGMMA_STEP(N, TYPES, A, ADD, MORE)                                                     \
    "mov.b64 b, {l, " PTX_WGMMA_B_HIGH "};\n"                                                      \
    "wgmma.mma_async.sync.aligned.m64n" #N TYPES " {" PTX_ACC_##N "}, {" A "}, b, " ADD MORE ";\n" \
                                                                  "add.u32 l, l, 2;\n"
#define PTX_WGMMA_BEGIN(B) "{.reg .b64 b; .reg .b32 l; mov.b32 l, " B ";\n"
#define PTX_WGMMA_A(a)     "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3])

/* MORE: operands of the instruction type that follow the scale-d flag. */
#define PTX_WGMMA_RUN(N, TYPES, MORE, C, add, B, ADD, A0, A1, A2, A3)                              \
    if constexpr (STEPS == 2)                                                                      \
        asm volatile(PTX_WGMMA_BEGIN(B) PTX_WGMMA_STEP(N, TYPES, A0, ADD, MORE)                    \
                         PTX_WGMMA_STEP(N, TYPES, A1, "1", MORE) "}"                               \
                     : PTX_D_##N(C)                                                                \
                     : "r"(b), "n"(add), PTX_WGMMA_A(a[0]), PTX_WGMMA_A(a[1]));                    \
    else                                                                                           \
        asm volatile(PTX_WGMMA_BEGIN(B) PTX_WGMMA_STEP(N, TYPES, A0, ADD, MORE)                    \
                         PTX_WGMMA_STEP(N, TYPES, A1, "1", MORE)                                   \
                             PTX_WGMMA_STEP(N, TYPES, A2, "1", MORE)                               \
                                 PTX_WGMMA_STEP(N, TYPES, A3, "1", MORE) "}"                       \
                     : PTX_D_##N(C)                                                                \
                     : "r"(b), "n"(add), PTX_WGMMA_A(a[0]), PTX_WGMMA_A(a[1]), PTX_WGMMA_A(a[2]),  \
                       PTX_WGMMA_A(a[3]))

#define PTX_WGMMA(N, ...)                                                                          \
    template <> struct ptx_wgmma<N> {                                                              \
        template <int STEPS>                                                                       \
        PTX void run(float d[N / 2], const uint32_t (&a)[STEPS][4], uint32_t b)                    \
        {                                                                                          \
            PTX_WGMMA_RUN(N, "k16.f32.f16.f16", ", 1, 1, 0", "+f", 1, __VA_ARGS__);                \
        }                                                                                          \
    };
PTX_WGMMA_SIZES(PTX_WGMMA)
#undef PTX_WGMMA

/* d[64 x N] += (if ADD, else =) a[64 x 32 STEPS] b[32 STEPS x N], as ptx_wgmma with INT32
 * accumulators; a holds signed bytes, or unsigned ones if U8, b signed bytes. N / 2 words of d per
 * lane. */
template <int N, bool U8> struct ptx_wgmma_s8;

#define PTX_WGMMA_S8(N, ...)                                                                       \
    template <bool U8> struct ptx_wgmma_s8<N, U8> {                                                \
        template <bool ADD, int STEPS>                                                             \
        PTX void run(int d[N / 2], const uint32_t (&a)[STEPS][4], uint32_t b)                      \
        {                                                                                          \
            if constexpr (U8) {                                                                    \
                PTX_WGMMA_RUN(N, "k32.s32.u8.s8", "", "+r", ADD, __VA_ARGS__);                     \
            } else {                                                                               \
                PTX_WGMMA_RUN(N, "k32.s32.s8.s8", "", "+r", ADD, __VA_ARGS__);                     \
            }                                                                                      \
        }                                                                                          \
    };
PTX_WGMMA_SIZES(PTX_WGMMA_S8)
#undef PTX_WGMMA_S8

/* Keeps the compiler from moving uses of v before the preceding ptx_wgmma_wait: the compiler does
 * not know that asynchronous products write v. */
PTX void ptx_compiler_fence(int &v)
{
    asm volatile("" : "+r"(v)::"memory");
}

#endif
