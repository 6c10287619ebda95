/*
 * A ring of stages in shared memory that the copy engine fills: where a warp is in it, and how it
 * comes to be. The time to the first copy is part of every product: two warps initialise half of
 * the barriers each.
 */
#ifndef QT_CUDA_RING_CUH
#define QT_CUDA_RING_CUH

#include "kernels/cuda/plan.h"
#include "kernels/cuda/ptx_sm90.cuh"

struct qt_ring {
    uint32_t full, empty; /* shared addresses of the first barriers, 8 bytes each */
    int stage;
    uint32_t parity;
};

/* barriers: QT_RING_BARRIER_BYTES of shared memory. */
static __device__ __forceinline__ qt_ring qt_ring_open(uint32_t barriers)
{
    return {barriers, barriers + 8 * QT_RING_STAGES, 0, 0};
}

/* A barrier of one arrival beside those of the stages. */
static __device__ __forceinline__ uint32_t qt_ring_spare(const qt_ring &r)
{
    return r.full + 16 * QT_RING_STAGES;
}

static __device__ __forceinline__ void qt_ring_next(qt_ring *r, int stages)
{
    if (++r->stage == stages) {
        r->stage = 0;
        r->parity ^= 1;
    }
}

/* Numbers of barriers of a part of the block; 0 is __syncthreads. */
enum { RING_START = 1, RING_START_X, RING_BARRIERS };

/*
 * What the warps that copy do, each all stages of all tiles: copy_weights() and copy_x(), of which
 * one is called. arrivals: that give a stage back; threads: that wait for the ring (qt_ring_start).
 */
template <class Weights, class X>
static __device__ __forceinline__ void qt_ring_bring(const qt_ring &r, int arrivals, int threads,
                                                     bool weights, Weights copy_weights, X copy_x)
{
    if (ptx_elect()) {
        const uint32_t first = weights ? r.full : r.empty, count = weights ? 1 : (uint32_t)arrivals;
        /* All there can be: in a loop the assembler puts a fence of 70 clocks before each. */
#pragma unroll
        for (int i = 0; i < QT_RING_STAGES; i++)
            ptx_barrier_init(first + 8 * i, count);
        if (!weights)
            ptx_barrier_init(qt_ring_spare(r), 1);
        ptx_barrier_init_fence();
    }
    __syncwarp();
    ptx_launch_dependents();
    ptx_named_barrier(RING_START_X, QT_RING_COPIERS);
    ptx_named_barrier_arrive(RING_START, threads + QT_RING_COPIERS);
    if (weights && ptx_elect())
        copy_weights();
    if (!weights && ptx_elect())
        copy_x();
}

/* Until the ring can be waited for. */
static __device__ __forceinline__ void qt_ring_start(int threads)
{
    ptx_named_barrier(RING_START, threads + QT_RING_COPIERS);
}

#endif
