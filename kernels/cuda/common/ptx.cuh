/* One wrapper per PTX instruction without a C++ intrinsic. Shared-memory addresses are 32-bit
 * offsets in the shared window (ptx_shared). */
#ifndef QT_KERNELS_CUDA_COMMON_PTX_CUH
#define QT_KERNELS_CUDA_COMMON_PTX_CUH

#include <cuda_fp16.h>
#include <stdint.h>

#define PTX static __device__ __forceinline__

PTX uint32_t ptx_shared(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* d[16x8] += a[16x16] b[16x8], FP16 operands, FP32 accumulators. */
PTX void ptx_mma_f16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

PTX uint32_t ptx_fma_half2(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

/* PRMT: selects four of the eight bytes of b:a (0 to 3 from a, 4 to 7 from b) by the nibbles of
 * `selector`. */
PTX uint32_t ptx_permute(uint32_t a, uint32_t b, uint32_t selector)
{
    uint32_t d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}

PTX uint32_t ptx_add_half2(uint32_t a, uint32_t b)
{
    uint32_t d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

/* 1 / a, with an error of at most 1 ulp. */
PTX float ptx_reciprocal(float a)
{
    float d;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(a));
    return d;
}

/* (a & mask) | (b & ~mask) as one LOP3. The compiler emits two instructions if `mask` is a
 * constant. */
PTX uint32_t ptx_select_bits(uint32_t a, uint32_t b, uint32_t mask)
{
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(d) : "r"(a), "r"(b), "r"(mask));
    return d;
}

/* Loads four 8x8 matrices of 16-bit values; lane l passes the address of row l % 8 of matrix l / 8.

 */
PTX void ptx_ldmatrix_x4(uint32_t r[4], uint32_t addr)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr));
}

/* As ptx_ldmatrix_x4, with each matrix transposed. */
PTX void ptx_ldmatrix_x4_transposed(uint32_t r[4], uint32_t addr)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr)
                 : "memory");
}

/* Loads from shared memory. */
PTX uint4 ptx_load_16(uint32_t addr)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(addr)
                 : "memory");
    return v;
}

/* As ptx_load_16 if `wanted`; otherwise the result is undefined. */
PTX uint4 ptx_load_16_if(uint32_t addr, bool wanted)
{
    uint4 v;
    asm volatile("{\n"
                 ".reg .pred wanted;\n"
                 "setp.ne.u32 wanted, %5, 0;\n"
                 "@wanted ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];\n"
                 "}"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(addr), "r"((uint32_t)wanted)
                 : "memory");
    return v;
}

PTX uint2 ptx_load_8(uint32_t addr)
{
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(addr) : "memory");
    return v;
}

PTX uint32_t ptx_load_4(uint32_t addr)
{
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(addr) : "memory");
    return v;
}

PTX uint32_t ptx_load_2(uint32_t addr)
{
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(addr) : "memory");
    return v;
}

PTX uint32_t ptx_load_1(uint32_t addr)
{
    uint32_t v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(addr) : "memory");
    return v;
}

/* Loads from read-only global memory if `wanted`, else returns 0. Predicated instead of a branch,
 * because a warp waits for the value at the end of a branch. Volatile, because otherwise the
 * compiler moves the code that uses the value up to the load, and waits there. */
PTX uint32_t ptx_load_global_if(const uint32_t *p, bool wanted)
{
    uint32_t v;
    asm volatile("{\n"
                 ".reg .pred wanted;\n"
                 "setp.ne.u32 wanted, %2, 0;\n"
                 "mov.u32 %0, 0;\n"
                 "@wanted ld.global.nc.u32 %0, [%1];\n"
                 "}"
                 : "=r"(v)
                 : "l"(p), "r"((uint32_t)wanted)
                 : "memory");
    return v;
}

/* As ptx_load_global_if, but returns `otherwise` if not `wanted`, and does not use the read-only
 * path: with dependent launch the previous kernel may still be writing when this kernel begins. */
PTX uint32_t ptx_load_global_or(const void *p, bool wanted, uint32_t otherwise)
{
    uint32_t v;
    asm volatile("{\n"
                 ".reg .pred wanted;\n"
                 "setp.ne.u32 wanted, %2, 0;\n"
                 "mov.u32 %0, %3;\n"
                 "@wanted ld.global.u32 %0, [%1];\n"
                 "}"
                 : "=r"(v)
                 : "l"(p), "r"((uint32_t)wanted), "r"(otherwise)
                 : "memory");
    return v;
}

/* Loads a factor if `wanted`, else returns 1. */
PTX float ptx_load_factor(const float *p, bool wanted)
{
    return __uint_as_float(ptx_load_global_or(p, wanted, __float_as_uint(1)));
}

PTX uint32_t ptx_load_global_16_if(const uint16_t *p, bool wanted)
{
    uint32_t v;
    asm volatile("{\n"
                 ".reg .pred wanted;\n"
                 "setp.ne.u32 wanted, %2, 0;\n"
                 "mov.u32 %0, 0;\n"
                 "@wanted ld.global.nc.u16 %0, [%1];\n"
                 "}"
                 : "=r"(v)
                 : "l"(p), "r"((uint32_t)wanted)
                 : "memory");
    return v;
}

PTX void ptx_store_2(uint32_t addr, uint16_t v)
{
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(addr), "h"(v) : "memory");
}

/* cp.async of 16 bytes from global to shared memory, bypassing L1. */
PTX void ptx_copy_16(uint32_t dst, const void *src)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}

/* As ptx_copy_16, but reads only the first `bytes` and sets the others to zero. */
PTX void ptx_copy_16_zero(uint32_t dst, const void *src, uint32_t bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes)
                 : "memory");
}

/* As ptx_copy_16 if `wanted`. Predicated, because a branch around copies costs more. */
PTX void ptx_copy_16_if(uint32_t dst, const void *src, bool wanted)
{
    asm volatile("{\n"
                 ".reg .pred wanted;\n"
                 "setp.ne.u32 wanted, %2, 0;\n"
                 "@wanted cp.async.cg.shared.global [%0], [%1], 16;\n"
                 "}" ::"r"(dst),
                 "l"(src), "r"((uint32_t)wanted)
                 : "memory");
}

/* cp.async of 8 or 4 bytes. */
PTX void ptx_copy_8(uint32_t dst, const void *src)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(dst), "l"(src) : "memory");
}

PTX void ptx_copy_4(uint32_t dst, const void *src)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
}

/* Closes a cp.async group of this thread. */
PTX void ptx_copy_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* ptx_copy_wait_all waits for all cp.async of this thread; ptx_copy_wait waits until at most the
 * PENDING youngest groups are outstanding. */
PTX void ptx_copy_wait_all()
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

template <int PENDING> PTX void ptx_copy_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* Atomically adds 1 and returns the old value, with acquire-release order at GPU scope. With a
 * thread-block barrier before and after, the writes of a thread block become visible to the thread
 * blocks that count later. */
PTX unsigned ptx_count_up(unsigned *p)
{
    unsigned d;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(d) : "l"(p) : "memory");
    return d;
}

/* 16-byte accesses to memory that other thread blocks access at the same time. They are never torn.

 */
PTX void ptx_store_atomic_16(float *p, float4 v)
{
    asm volatile("{\n"
                 ".reg .b64 low, high;\n"
                 ".reg .b128 all;\n"
                 "mov.b64 low, {%1,%2};\n"
                 "mov.b64 high, {%3,%4};\n"
                 "mov.b128 all, {low,high};\n"
                 "st.relaxed.gpu.b128 [%0], all;\n"
                 "}" ::"l"(p),
                 "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
}

PTX float4 ptx_load_atomic_16(const float *p)
{
    float4 v;
    asm volatile("{\n"
                 ".reg .b64 low, high;\n"
                 ".reg .b128 all;\n"
                 "ld.relaxed.gpu.b128 all, [%4];\n"
                 "mov.b128 {low,high}, all;\n"
                 "mov.b64 {%0,%1}, low;\n"
                 "mov.b64 {%2,%3}, high;\n"
                 "}"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

/* Programmatic dependent launch (PDL): lets the next kernel of the stream start. */
PTX void ptx_launch_dependents()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/* PDL: waits until the previous kernel of the stream has ended and its writes are visible. */
PTX void ptx_wait_previous()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#endif
