/*
 * Outliers of mix24 in the A operand of wgmma. The code of an outlier's place decodes to 0, so it
 * is enough to write its value there, before the product: nothing depends on the number of tokens.
 *
 * As no register can be chosen by number at run time, fragments of k-steps that have outliers go
 * through shared memory. Of the eight steps of a unit
 *
 *     byte   512 (4 b + s) + 16 lane + 4 i + 2 h    is of register i, half h, step s of block b
 *
 * of which a warp has room for a batch at a time: places are taken modulo 512 STEPS.
 *
 * For each strip of 16 rows and unit there is a list of what to write where, made from the CSR in
 * the launch that gathers X (mix24_gather.cu):
 *
 *     U32 [32]   [0]     bits 0 to 7: count, or PATCH_MANY; 8 to 15: steps 4 b + s that have some
 *                [1...]  value << 16 | byte
 *
 * A list that is too long says so, and the warp looks for its outliers in the CSR itself.
 */
#ifndef QT_CUDA_MIX24_PATCH_CUH
#define QT_CUDA_MIX24_PATCH_CUH

#include "kernels/cuda/mix24.h"
#include "kernels/cuda/ptx.cuh"

enum {
    PATCH_LIST = 32, /* words */
    PATCH_LIST_BYTES = 4 * PATCH_LIST,
    PATCH_MANY = 255,
    PATCH_STEP_BYTES = 512,
    PATCH_STEPS = 8 /* of a unit */
};

/* Where packed column col of a unit is, of row 0..15 (pack/layout_mix24.h). */
static __device__ __forceinline__ uint32_t patch_byte(int row, uint32_t col)
{
    const uint32_t b = col / 64, t = col / 16 % 4, s = col / 4 % 4, i = col / 2 % 2 * 2 + row / 8;
    return (4 * b + s) * PATCH_STEP_BYTES + (row % 8 * 4 + t) * 16 + i * 4 + col % 2 * 2;
}

static __device__ __forceinline__ void patch_store_2(uint32_t addr, uint32_t v, bool wanted)
{
    asm volatile("{\n"
                 ".reg .pred wanted;\n"
                 "setp.ne.u32 wanted, %2, 0;\n"
                 "@wanted st.shared.u16 [%0], %1;\n"
                 "}" ::"r"(addr),
                 "h"((uint16_t)v), "r"((uint32_t)wanted)
                 : "memory");
}

/* 16 bytes of a fragment to shared memory and back, if `steps` has a bit of MASK; without a branch,
 * behind which the compiler would take nothing to be the same in all lanes. */
template <uint32_t MASK>
static __device__ __forceinline__ void patch_store_16(uint32_t addr, const uint32_t v[4],
                                                      uint32_t steps)
{
    asm volatile("{\n"
                 ".reg .pred wanted;\n"
                 ".reg .b32 bit;\n"
                 "and.b32 bit, %5, %6;\n"
                 "setp.ne.u32 wanted, bit, 0;\n"
                 "@wanted st.shared.v4.u32 [%0], {%1,%2,%3,%4};\n"
                 "}" ::"r"(addr),
                 "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"(steps), "n"(MASK)
                 : "memory");
}

template <uint32_t MASK>
static __device__ __forceinline__ void patch_load_16(uint32_t v[4], uint32_t addr, uint32_t steps)
{
    asm volatile("{\n"
                 ".reg .pred wanted;\n"
                 ".reg .b32 bit;\n"
                 "and.b32 bit, %5, %6;\n"
                 "setp.ne.u32 wanted, bit, 0;\n"
                 "@wanted ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];\n"
                 "}"
                 : "+r"(v[0]), "+r"(v[1]), "+r"(v[2]), "+r"(v[3])
                 : "r"(addr), "r"(steps), "n"(MASK)
                 : "memory");
}

/* Of k-steps FIRST to FIRST + STEPS - 1 of a unit, those that have outliers; to at + 512 s. */
template <int FIRST, int STEPS, int S = 0>
static __device__ __forceinline__ void patch_store_steps(uint32_t at, uint32_t f[STEPS][4],
                                                         uint32_t head)
{
    patch_store_16<0x100u << (FIRST + S)>(at + S * PATCH_STEP_BYTES, f[S], head);
    if constexpr (S + 1 < STEPS)
        patch_store_steps<FIRST, STEPS, S + 1>(at, f, head);
}

template <int FIRST, int STEPS, int S = 0>
static __device__ __forceinline__ void patch_load_steps(uint32_t at, uint32_t f[STEPS][4],
                                                        uint32_t head)
{
    patch_load_16<0x100u << (FIRST + S)>(f[S], at + S * PATCH_STEP_BYTES, head);
    if constexpr (S + 1 < STEPS)
        patch_load_steps<FIRST, STEPS, S + 1>(at, f, head);
}

/* From the CSR what a list would say of STEPS k-steps of a unit, from step `first` on. By the warp,
 * two lanes a row. */
template <int STEPS>
static __device__ __forceinline__ void patch_from_csr(const qt_mix24_outliers &o, int unit,
                                                      int row0, int first, uint32_t buffer)
{
    const int lane = (int)threadIdx.x % 32, row = row0 + lane / 2;
    const uint32_t *ptr = o.ptr + (unit / QT_MIX24_PANEL_UNITS) * o.pitch;
    const uint32_t begin =
        (uint32_t)unit % QT_MIX24_PANEL_UNITS * QT_MIX24_UNIT_COLS; /* of the panel */
    uint32_t low = row < o.n ? __ldg(ptr + row) : 0, high = row < o.n ? __ldg(ptr + row + 1) : 0;
    const uint32_t last = high;
    while (low < high) { /* the first entry from column `begin` on */
        const uint32_t middle = low + (high - low) / 2;
        if (__ldg(o.col + middle) < begin)
            low = middle + 1;
        else
            high = middle;
    }
    for (uint32_t e = low + lane % 2; e < last; e += 2) {
        const uint32_t col = __ldg(o.col + e) - begin;
        if (col >= QT_MIX24_UNIT_COLS)
            break;
        const uint32_t byte = patch_byte(lane / 2, col) - (uint32_t)first * PATCH_STEP_BYTES;
        patch_store_2(buffer + byte, __ldg(o.val + e), byte < STEPS * PATCH_STEP_BYTES);
    }
}

/* A warp's outliers of a unit, and room for fragments of STEPS k-steps. */
template <int STEPS> struct patch_unit {
    uint32_t buffer, mine;        /* of the warp, the lane's part of a step */
    uint32_t place, batch, value; /* where the lane's outlier goes, and in which batch */
    uint32_t head;                /* of the list */
    bool many;                    /* it is too long; the same in all lanes */

    /* base: STEPS * PATCH_STEP_BYTES of the warp, in shared memory. */
    __device__ __forceinline__ patch_unit(uint32_t base) : buffer(base)
    {
        mine = base + threadIdx.x % 32 * 16;
        asm volatile("" : "+r"(mine)); /* computed once */
    }
    __device__ __forceinline__ void load(uint32_t list)
    {
        const uint32_t lane = threadIdx.x % 32, word = ptx_load_4(list + lane * 4);
        head = __shfl_sync(~0u, word, 0);
        many = __any_sync(~0u, (head & 0xff) == PATCH_MANY);
        value = word >> 16;
        place = buffer + word % (STEPS * PATCH_STEP_BYTES);
        batch = lane - 1 < (head & 0xff) ? (word & 0xffff) / (STEPS * PATCH_STEP_BYTES)
                                         : (uint32_t)PATCH_STEPS; /* which there is not */
    }
    /* Writes outliers into the fragments of batch number BATCH of the unit, whose strip begins at
     * row0. */
    template <int BATCH>
    __device__ __forceinline__ void apply(uint32_t f[STEPS][4], int unit, int row0,
                                          const qt_mix24_outliers &o) const
    {
        patch_store_steps<BATCH * STEPS, STEPS>(mine, f, head);
        __syncwarp();
        if (many)
            patch_from_csr<STEPS>(o, unit, row0, BATCH * STEPS, buffer);
        else
            patch_store_2(place, value, batch == BATCH);
        __syncwarp();
        patch_load_steps<BATCH * STEPS, STEPS>(mine, f, head);
    }
};

#endif
