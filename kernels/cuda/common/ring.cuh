/*
 * A ring of stages in shared memory that the copy engine fills: where a warp is in it, and how it
 * comes to be. The time to the first copy is part of every product: two warps initialise half of
 * the barriers each, and what the first copy needs to know is close together in the arguments, as
 * each line of them is fetched when it is first read.
 */
#ifndef QT_KERNELS_CUDA_COMMON_RING_CUH
#define QT_KERNELS_CUDA_COMMON_RING_CUH

#include "kernels/cuda/common/plan.h"
#include "kernels/cuda/common/ptx_sm90.cuh"
#include "kernels/cuda/matmul/decode.cuh"

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
enum { RING_START = 1, RING_WEIGHTS, RING_X, RING_BARRIERS };

/* All there can be, from number `from` on: in a loop the assembler puts a fence of 70 clocks before
 * each. */
static __device__ __forceinline__ void qt_ring_init(uint32_t first, int from, uint32_t count)
{
#pragma unroll
    for (int i = from; i < QT_RING_STAGES; i++)
        ptx_barrier_init(first + 8 * i, count);
}

/*
 * Between the warps that copy, then for the `threads` that wait for the ring (qt_ring_start). The
 * two warps come to this at places of their own. A barrier for both is allowed there, but to
 * compute-sanitizer it is threads that diverge: so each waits at one and arrives at the other's.
 * (Once a launch. Who met so again could arrive a second time before the other had waited.)
 */
static __device__ __forceinline__ void qt_ring_opened(bool weights, int threads)
{
    __syncwarp();
    ptx_launch_dependents();
    ptx_named_barrier_arrive(weights ? RING_X : RING_WEIGHTS, QT_RING_COPIERS);
    ptx_named_barrier(weights ? RING_WEIGHTS : RING_X, QT_RING_COPIERS);
    ptx_named_barrier_arrive(RING_START, threads + QT_RING_COPIERS);
}

/*
 * Part of a block fills two slots of memory in turn, 0, 1, 2, ..., for another part that takes what
 * is in them; `threads` of both together. Of the barriers from number `first` on two say that a
 * slot is full, for even and odd turns, and two that it is empty. Each is waited for at one place,
 * as in qt_ring_opened, and nobody arrives there again before the others have left: who fills slots
 * by having waited for the turn before last to be taken, who takes them by having waited for the
 * turn in between.
 */
enum { RING_TURN_BARRIERS = 4 };

/* Before turn `turn` is filled. */
static __device__ __forceinline__ void qt_turn_fill(int first, int turn, int threads)
{
    if (turn >= 2)
        ptx_named_barrier(first + 2 + turn % 2, threads);
}

/* It is. */
static __device__ __forceinline__ void qt_turn_filled(int first, int turn, int threads)
{
    ptx_named_barrier_arrive(first + turn % 2, threads);
}

/* Waits for turn `turn`, when the one before has been taken. */
static __device__ __forceinline__ void qt_turn_take(int first, int turn, int threads)
{
    if (turn > 0)
        ptx_named_barrier_arrive(first + 3 - turn % 2, threads);
    ptx_named_barrier(first + turn % 2, threads);
}

/*
 * The two warps that copy, one weights and one X, by an elected thread each, from the first stage
 * on. Source says what; it is at the first stage then:
 *
 *     copy_weights(dst, bar)   starts copies of the stage it is at to shared memory, counted by
 *     copy_x(dst, bar)         bar; that of weights announces the bytes of both
 *     brings_x()               false: no X is copied
 *     next()                   goes on to the next stage of a tile; false: there is none
 *     next_tile()              then goes on to the first stage of the next tile, likewise
 *
 * Weights of the first stage are on their way before there are other barriers.
 *
 * Args: of the kernel (stages, stage_bytes, ring_at, dependent). threads: that multiply; arrivals:
 * that give a stage back.
 */
template <class Args, class Source>
static __device__ __forceinline__ void qt_ring_bring(const Args &a, qt_ring r, bool weights,
                                                     int threads, int arrivals, Source source)
{
    const uint32_t ring = ptx_shared(qt_smem) + a.ring_at;
    if (ptx_elect()) {
        if (weights) {
            ptx_barrier_init(r.full, 1);
            ptx_barrier_init_fence();
            source.copy_weights(ring, r.full);
            qt_ring_init(r.full, 1, 1);
        } else {
            qt_ring_init(r.empty, 0, (uint32_t)arrivals);
            ptx_barrier_init(qt_ring_spare(r), 1);
        }
        ptx_barrier_init_fence();
    }
    qt_ring_opened(weights, threads);
    if (!ptx_elect() || (!weights && !source.brings_x()))
        return;
    bool more = true;
    if (weights) {
        qt_ring_next(&r, a.stages);
        more = source.next();
    } else if (a.dependent) {
        ptx_wait_previous();
    }
    do { /* tiles; a loop for each of the warps, but one place where the next tile is found */
        if (weights)
#pragma unroll 1
            for (; more; more = source.next()) {
                ptx_barrier_wait(r.empty + 8 * r.stage, r.parity ^ 1);
                source.copy_weights(ring + r.stage * a.stage_bytes, r.full + 8 * r.stage);
                qt_ring_next(&r, a.stages);
            }
        else
#pragma unroll 1
            for (; more; more = source.next()) {
                ptx_barrier_wait(r.empty + 8 * r.stage, r.parity ^ 1);
                source.copy_x(ring + r.stage * a.stage_bytes, r.full + 8 * r.stage);
                qt_ring_next(&r, a.stages);
            }
        more = source.next_tile();
    } while (more);
}

/* Until the ring can be waited for. */
static __device__ __forceinline__ void qt_ring_start(int threads)
{
    ptx_named_barrier(RING_START, threads + QT_RING_COPIERS);
}

#endif
