/*
 * Outliers of the mix24 tile kernel for tiles of many tokens: patches them into the A operand of
 * wgmma. The code at an outlier's position dequantizes to 0, so the outlier is added to the
 * fragment before the product. The cost does not depend on the number of tokens.
 *
 * Registers cannot be indexed at run time. Therefore values are stored to a buffer in shared
 * memory, which is otherwise zero, in fragment order. While a k-step with outliers is dequantized,
 * the warp loads its part of the buffer and adds it to the fragment. It then zeroes these positions
 * again. A unit has eight k-steps: s = 0..3 of the blocks b = 0 and 1 of 64 columns. In the buffer,
 *
 *     byte   512 * (4 * b + s) + 16 * lane + 4 * i + 2 * h
 *
 * is half h of register i of k-step s of block b. The buffer of a warp holds a batch of STEPS
 * k-steps: positions are taken modulo 512 * STEPS. After the last unit of a tile one more batch is
 * dequantized and not used; what it leaves in the buffer is zeroed at the start of the next tile.
 *
 * For each strip of 16 rows and unit there is a list of stores, made from the CSR by the launch
 * that gathers X (gather.cu):
 *
 *     U32 [32]   [0]     bits 0 to 7: count; from bit 8: mask of k-steps 4 b + s with outliers; or
 *                        PATCH_MANY
 *                [1...]  byte << 16 | value
 *
 * PATCH_MANY marks a list that is too long; the warp then searches the CSR itself.
 */
#ifndef QT_KERNELS_CUDA_MIX24_OUTLIER_PATCH_CUH
#define QT_KERNELS_CUDA_MIX24_OUTLIER_PATCH_CUH

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/mix24/mix24.h"

/* Buffer position of packed column col of a unit, row 0..15 (formats/layouts/layout_mix24.h). */
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

static __device__ __forceinline__ void patch_zero_16(uint32_t addr)
{
    asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(addr), "r"(0) : "memory");
}

/* Loads the values of a k-step from the buffer if `steps` & MASK. Predicated: after a branch the
 * compiler treats no value as uniform. */
template <uint32_t MASK>
static __device__ __forceinline__ void patch_load_step(uint32_t v[4], uint32_t addr, uint32_t steps)
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

/* Does the stores of STEPS k-steps of a unit, from k-step `first` on, from the CSR instead of a
 * list, into a zeroed buffer. By the warp, two lanes per row. */
template <int STEPS>
static __device__ __forceinline__ void patch_from_csr(const qt_mix24_outliers &o, int unit,
                                                      int row0, int first, uint32_t buffer)
{
    const int lane = (int)threadIdx.x % 32, row = row0 + lane / 2;
    const uint32_t *ptr = o.ptr + (unit / QT_MIX24_PANEL_UNITS) * o.pitch;
    const uint32_t begin =
        (uint32_t)unit % QT_MIX24_PANEL_UNITS * QT_MIX24_UNIT_COLS; /* in the CSR panel */
    uint32_t low = row < o.n ? __ldg(ptr + row) : 0, high = row < o.n ? __ldg(ptr + row + 1) : 0;
    const uint32_t last = high;
    while (low < high) { /* binary search: the first entry from column `begin` on */
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

/* Outlier values for STEPS fragments. */
template <int STEPS> struct patch_values {
    uint32_t v[STEPS][4];

    /* K-step s is at address at + 512 s, and has values if bit BIT + s of `steps` is set. */
    template <int BIT, int S = 0> __device__ __forceinline__ void load(uint32_t at, uint32_t steps)
    {
        patch_load_step<1u << (BIT + S)>(v[S], at + S * PATCH_STEP_BYTES, steps);
        if constexpr (S + 1 < STEPS)
            load<BIT, S + 1>(at, steps);
    }
    /* Adds the values to fragments f, predicated. With one condition for the four registers of a
     * k-step, the compiler would branch. */
    template <int BIT>
    __device__ __forceinline__ void add(uint32_t f[STEPS][4], uint32_t steps) const
    {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t bits = steps;
            asm volatile("" : "+r"(bits));
#pragma unroll
            for (int s = 0; s < STEPS; s++)
                if (bits & 1u << (BIT + s)) {
                    const __half2 sum =
                        __hadd2(*(const __half2 *)&f[s][i], *(const __half2 *)&v[s][i]);
                    f[s][i] = *(const uint32_t *)&sum;
                }
        }
    }
};

/* A warp's outliers of a unit, and its buffer for a batch of STEPS k-steps. */
template <int STEPS> struct patch_unit {
    enum { BYTES = STEPS * PATCH_STEP_BYTES };
    uint32_t buffer, mine;      /* shared address of the buffer; of the lane's part of a k-step */
    uint32_t list, rank;        /* offset of the lane's word in the lists of the strips; its
                                   number in the list */
    uint32_t head;              /* word 0 of the list */
    bool many;                  /* the list is too long */
    uint32_t word;              /* the lane's word of the list, or all ones */
    uint32_t place, batch;      /* address in a buffer of a whole unit; batch that contains it */
    patch_values<STEPS> values; /* of the current batch */

    /* base: shared address of the warp's BYTES. */
    __device__ __forceinline__ patch_unit(uint32_t base) : buffer(base), values{}
    {
        mine = base + threadIdx.x % 32 * 16;
        list = threadIdx.x * 4; /* a list has one word per lane */
        rank = threadIdx.x % 32 - 1;
        asm volatile(""
                     : "+r"(buffer), "+r"(mine), "+r"(list),
                       "+r"(rank)); /* keeps them in registers */
    }
    /* Zeroes the buffer: before the first unit of a tile, because the previous tile leaves values,
     * and after patch_from_csr. */
    __device__ __forceinline__ void clear() const
    {
        __syncwarp();
#pragma unroll
        for (int s = 0; s < STEPS; s++)
            patch_zero_16(mine + s * PATCH_STEP_BYTES);
        __syncwarp();
    }
    __device__ __forceinline__ void load(uint32_t lists)
    {
        word = ptx_load_4(lists + list);
        head = __shfl_sync(~0u, word, 0);
        many = __any_sync(~0u, head == PATCH_MANY);
        word = rank < (head & 0xff) ? word : ~0u;
        place = buffer + (word >> 16);
        batch = (word >> 16) / BYTES;
        put<0>(word);
    }
    /* before() and after() enclose the dequantization of batch BATCH of the unit; row0: first row
     * of the strip. */
    template <int BATCH> __device__ __forceinline__ void before()
    {
        __syncwarp();
        values.template load<PATCH_STEP_BIT + BATCH * STEPS>(mine, head);
    }
    template <int BATCH>
    __device__ __forceinline__ void after(uint32_t f[STEPS][4], int unit, int row0,
                                          const qt_mix24_outliers &o)
    {
        values.template add<PATCH_STEP_BIT + BATCH * STEPS>(f, head);
        __syncwarp();
        put<BATCH>(0);
        __syncwarp();
        if (many) {
            patch_from_csr<STEPS>(o, unit, row0, BATCH * STEPS, buffer);
            __syncwarp();
            values.template load<0>(mine, ~0u);
            values.template add<0>(f, ~0u);
            clear();
        }
        if ((BATCH + 1) * STEPS < PATCH_STEPS)
            put<BATCH + 1>(word);
    }

  private:
    /* Stores `value` at the lane's outlier if it is in this batch. */
    template <int BATCH> __device__ __forceinline__ void put(uint32_t value) const
    {
        patch_store_2(place - BATCH * BYTES, value, batch == BATCH);
    }
};

#endif
