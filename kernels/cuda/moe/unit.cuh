/* Units of the grouped products, whatever the kind of weights: their items and strips, the
 * activation, and the sums of warps along k. */
#ifndef QT_KERNELS_CUDA_MOE_UNIT_CUH
#define QT_KERNELS_CUDA_MOE_UNIT_CUH

#include "kernels/cuda/common/pipeline.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/smem.cuh"
#include "kernels/cuda/moe/moe.h"

enum { MOE_THREADS = QT_MOE_WARPS * 32 };

/* Named barriers; 0 is __syncthreads. */
enum { MOE_TABLES = 1, MOE_BARRIERS };

/* The epilogue reads these members of a unit; the products read the values of look-up tables. */
struct moe_header {
    int first, rows, tile; /* positions of the item; tile of rows */
    float factor[QT_MOE_STRIPS];
    int unused;
    const float *bias[QT_MOE_STRIPS];
    __half value[QT_MOE_STRIPS][16]; /* of the look-up tables */
};
static_assert(sizeof(moe_header) <= QT_MOE_HEADER, "no room");

/* The strip of a warp's fragment u: of gate and up the same, of one matrix two neighbors. */
static __device__ __forceinline__ int moe_strip_of(const qt_moe_unit_args &a, int tile, int warp,
                                                   int u)
{
    const int wn = warp >> a.log2_wk, warps_n = QT_MOE_WARPS >> a.log2_wk;
    return a.gated ? tile * warps_n + wn : (tile * warps_n + wn) * QT_MOE_STRIPS + u;
}

static __device__ __forceinline__ int moe_strip(const qt_moe_unit_args &a, int tile, int u)
{
    return moe_strip_of(a, tile, (int)threadIdx.x / 32, u);
}

/* The number of work items. */
static __device__ __forceinline__ int moe_items(const qt_moe_unit_args &a)
{
    return a.direct.ids ? a.direct.pairs : *a.items;
}

/* Work item number i. One without rows: the expert is not of this layer. */
static __device__ __forceinline__ qt_moe_item moe_item(const qt_moe_unit_args &a, int i)
{
    if (!a.direct.ids)
        return a.item[i];
    const int expert = a.direct.ids[i] - a.direct.first_expert;
    const bool here = expert >= 0 && expert < a.direct.experts;
    return {here ? expert : 0, i, here, 0};
}

/* The row of X of position `at`. */
static __device__ __forceinline__ int moe_row(const qt_moe_unit_args &a, int at)
{
    return a.by_token ? (a.direct.ids ? at : a.order[at]) / a.topk : at;
}

/* Waits for all but the youngest stages - 2 stages. */
static __device__ __forceinline__ void moe_wait(int stages)
{
    switch (stages) {
    case 2:
        ptx_copy_wait<0>();
        break;
    case 3:
        ptx_copy_wait<1>();
        break;
    case 4:
        ptx_copy_wait<2>();
        break;
    case 5:
        ptx_copy_wait<3>();
        break;
    default:
        ptx_copy_wait<4>();
    }
}

/*
 * The pipeline of a product by mma.sync: the stage that is copied next, and the one that is
 * multiplied next. A kernel that begins before the one in front has ended copies the weights of the
 * first stages, waits for that kernel, and then copies X of the same stages.
 */
struct moe_stages {
    int put, get;       /* offsets in the pipeline: of the stage that is copied, and multiplied */
    int missing;        /* stages to be copied before the first is multiplied */
    bool weights, of_x; /* what is copied */

    /* waits: the kernel in front may still run. */
    __device__ __forceinline__ moe_stages(const qt_moe_unit_args &a, bool waits)
        : put(0), get(0), missing(a.stages - 1), weights(true), of_x(!waits)
    {
    }
    static __device__ __forceinline__ int next(const qt_moe_unit_args &a, int at)
    {
        return at + a.stage_bytes == a.stages * a.stage_bytes ? 0 : at + a.stage_bytes;
    }
    /* Calls copy(offset, weights, of_x), which starts copies to a stage. Returns whether the stage
     * `get` is there. */
    template <class Loader, class Copy>
    __device__ __forceinline__ bool fill(const qt_moe_unit_args &a, Loader *loader, Copy copy)
    {
        if (missing == 0) {
            moe_wait(a.stages);
            __syncthreads(); /* the stage is there for all warps; all have read the one before */
        }
        copy(put, weights, of_x);
        ptx_copy_commit();
        put = next(a, put);
        if (missing == 0)
            return true;
        if (--missing > 0)
            return false;
        weights = of_x;
        if (!of_x) {
            ptx_wait_previous();
            loader->restart();
            put = 0;
            missing = a.stages - 1;
            of_x = true;
        }
        return false;
    }
};

/* g * sigmoid(slope * g + cubic * g^3): SiLU, and GELU with the tanh approximation, as 1 + tanh(z)
 * is 2 sigmoid(2 z). */
static __device__ __forceinline__ float moe_activation(const qt_moe_unit_args &a, float g)
{
    return __fdividef(g, 1 + __expf(-g * (a.slope + a.cubic * g * g)));
}

/* The activation of gate times up, both limited if the layer has a limit. */
static __device__ __forceinline__ float moe_gated(const qt_moe_unit_args &a, float g, float u)
{
    return moe_activation(a, fminf(g, a.limit)) * (fmaxf(fminf(u, a.limit), -a.limit) + a.offset);
}

/*
 * A producer of a kernel by wgmma fills the stages of all units of its thread block. open(unit,
 * number) begins a unit, the thread block's number-th; fill(slot, stage, bar) starts the copies of
 * a stage, which is empty by then and whose mbarrier is `bar`.
 */
template <class Producer>
static __device__ __forceinline__ void moe_produce(const qt_moe_unit_args &a, qt_pipeline r,
                                                   int units, Producer *producer)
{
    int number = 0;
#pragma unroll 1
    for (int unit = (int)blockIdx.x; unit < units; unit += (int)gridDim.x, number++) {
#pragma unroll 1
        for (int slot = 0; slot < a.slots; slot++) {
            const uint32_t to = ptx_shared(qt_smem) + a.ring_at + r.stage * a.stage_bytes;
            ptx_barrier_wait(r.empty + 8 * r.stage, r.parity ^ 1);
            if (slot == 0)
                producer->open(unit, number);
            producer->fill(slot, to, r.full + 8 * r.stage);
            qt_pipeline_advance(&r, a.stages);
        }
    }
}

/* Adds the sums of the warps along k to those of the first, in order: float or int. Returns whether
 * the warp is the first. alone: the thread block has no other warps. */
template <class T, int MT>
static __device__ __forceinline__ bool
moe_add_warps(const qt_moe_unit_args &a, T (&sums)[QT_MOE_STRIPS][MT][4], bool alone = true)
{
    const int quads = QT_MOE_STRIPS * MT, lane = (int)threadIdx.x % 32;
    const int warp = (int)threadIdx.x / 32, wk = warp & ((1 << a.log2_wk) - 1);
    int4 *const room = (int4 *)(qt_smem + a.sums_at) + lane;
    if (a.log2_wk == 0)
        return true;
    if (wk)
#pragma unroll
        for (int i = 0; i < quads; i++)
            room[(warp * quads + i) * 32] = *(const int4 *)sums[i / MT][i % MT];
    if (alone)
        __syncthreads();
    else
        ptx_named_barrier(MOE_BARRIERS, MOE_THREADS);
    if (wk)
        return false;
#pragma unroll 1
    for (int w = warp + 1; w < warp + (1 << a.log2_wk); w++)
#pragma unroll
        for (int i = 0; i < quads; i++) {
            const int4 four = room[(w * quads + i) * 32];
            const T *v = (const T *)&four;
#pragma unroll
            for (int j = 0; j < 4; j++)
                sums[i / MT][i % MT][j] += v[j];
        }
    return true;
}

#endif
