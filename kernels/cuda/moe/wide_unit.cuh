/* Units of the grouped products by wgmma with X in FP16. */
#ifndef QT_KERNELS_CUDA_MOE_WIDE_UNIT_CUH
#define QT_KERNELS_CUDA_MOE_WIDE_UNIT_CUH

#include "kernels/cuda/common/pipeline.cuh"
#include "kernels/cuda/moe/unit.cuh"

enum {
    WIDE_TOKENS = QT_MOE_WIDE_TOKENS,
    WIDE_PAIR =
        MOE_BARRIERS, /* the first of four named barriers, of a warp of gate and one of up */
    /* Registers per thread. */
    WIDE_COPY_REGISTERS = 56,
    WIDE_REGISTERS = 224
};

/* The consumers read this about a unit. */
struct wide_unit {
    moe_header header;
    float token[WIDE_TOKENS]; /* factors of the tokens, if there are any */
};

/* [tokens / 8][4]: rows g and g + 8 of tokens 2t and 2t + 1. */
struct wide_sums {
    float v[WIDE_TOKENS / 2];
};

/* Tokens that are copied for a unit with `rows` tokens. */
static __device__ __forceinline__ int wide_columns(int rows)
{
    return (rows + QT_MOE_WIDE_BOX - 1) & -QT_MOE_WIDE_BOX;
}

/* Calls run(wide_size<N>()) for the number of columns of B of a unit with `rows` tokens. */
template <int N> struct wide_size {
    enum { COLUMNS = N };
};
template <class Run> static __device__ __forceinline__ void wide_by_size(int rows, Run run)
{
    switch (max(64, wide_columns(rows))) {
    case 64:
        run(wide_size<64>());
        break;
    case 96:
        run(wide_size<96>());
        break;
    case 128:
        run(wide_size<128>());
        break;
    case 160:
        run(wide_size<160>());
        break;
    case 192:
        run(wide_size<192>());
        break;
    default:
        run(wide_size<256>());
    }
}

/*
 * The matrix and the strip of warp w of the consumers. Where gate and up are one launch, a
 * warpgroup has the same two strips of both: the first two warps those of gate.
 */
static __device__ __forceinline__ int wide_matrix(int w)
{
    return w / 2 % 2;
}

static __device__ __forceinline__ int wide_strip(const qt_moe_unit_args &a, int tile, int w)
{
    return a.gated ? tile * (QT_MOE_WARPS / 2) + w / 4 * 2 + w % 2 : tile * QT_MOE_WARPS + w;
}

/* The units of a thread block, with the items of the next two. */
struct wide_walk {
    const qt_moe_unit_args &a;
    int unit, units, number;
    qt_moe_item item, next, after;

    __device__ __forceinline__ wide_walk(const qt_moe_unit_args &args, int count)
        : a(args), unit((int)blockIdx.x), units(count), number(0)
    {
        if (unit < units) {
            item = at(unit);
            next = at(unit + (int)gridDim.x);
            after = at(unit + 2 * (int)gridDim.x);
        }
    }
    __device__ __forceinline__ qt_moe_item at(int i) const
    {
        return a.item[min(i, units - 1) / a.row_tiles];
    }
    __device__ __forceinline__ bool more() const
    {
        return unit < units;
    }
    __device__ __forceinline__ int tile() const
    {
        return unit % a.row_tiles;
    }
    __device__ __forceinline__ void advance()
    {
        unit += (int)gridDim.x;
        number++;
        item = next;
        next = after;
        after = at(unit + 2 * (int)gridDim.x);
    }
};

#endif
