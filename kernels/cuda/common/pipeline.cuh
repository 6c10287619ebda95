/*
 * The TMA pipeline of the sm_90a kernels (skinny_common.cuh, tile_common.cuh): a circular buffer of
 * stages in shared memory with a full and an empty mbarrier per stage.
 *
 * Two producer warps fill the stages, one with weights and one with X; consumer warps multiply. The
 * time to the first copy is part of every launch. To shorten it, the producer warp of the weights
 * initializes one mbarrier, starts the copies of the first stage, and then initializes the other
 * full mbarriers, while the producer warp of X initializes the empty ones. The kernel arguments of
 * the first copies are adjacent, because the first read of each 64-byte line of arguments is a
 * cache miss.
 */
#ifndef QT_KERNELS_CUDA_COMMON_PIPELINE_CUH
#define QT_KERNELS_CUDA_COMMON_PIPELINE_CUH

#include "kernels/cuda/common/plan.h"
#include "kernels/cuda/common/ptx_sm90.cuh"
#include "kernels/cuda/common/smem.cuh"

struct qt_pipeline {
    uint32_t full, empty; /* shared addresses of the first mbarriers, 8 bytes each */
    int stage;
    uint32_t parity;
};

/* barriers: shared address of QT_PIPELINE_BARRIER_BYTES bytes. */
static __device__ __forceinline__ qt_pipeline qt_pipeline_make(uint32_t barriers)
{
    return {barriers, barriers + 8 * QT_PIPELINE_STAGES, 0, 0};
}

/* An additional mbarrier with an arrival count of 1. */
static __device__ __forceinline__ uint32_t qt_pipeline_extra_barrier(const qt_pipeline &r)
{
    return r.full + 16 * QT_PIPELINE_STAGES;
}

static __device__ __forceinline__ void qt_pipeline_advance(qt_pipeline *r, int stages)
{
    if (++r->stage == stages) {
        r->stage = 0;
        r->parity ^= 1;
    }
}

/* Named barriers; 0 is __syncthreads. */
enum { PIPELINE_READY = 1, PIPELINE_WEIGHTS, PIPELINE_X, PIPELINE_BARRIERS };

/* Initializes all mbarriers from number `from` on, whether or not the pipeline uses them: in a loop
 * with a variable end, the assembler puts a fence of 70 clocks before each initialization. */
static __device__ __forceinline__ void qt_pipeline_init_barriers(uint32_t first, int from,
                                                                 uint32_t count)
{
#pragma unroll
    for (int i = from; i < QT_PIPELINE_STAGES; i++)
        ptx_barrier_init(first + 8 * i, count);
}

/*
 * Synchronizes the two producer warps after they have initialized the mbarriers, then releases the
 * `threads` consumer threads (qt_pipeline_wait_ready). The two warps reach this point on different
 * code paths. One bar.sync for both is legal there, but compute-sanitizer reports divergent
 * threads; therefore each warp waits at its own named barrier and arrives at the other's. May be
 * called once per launch: a second call could arrive before the other warp has waited.
 */
static __device__ __forceinline__ void qt_pipeline_sync_producers(bool weights, int threads)
{
    __syncwarp();
    ptx_launch_dependents();
    ptx_named_barrier_arrive(weights ? PIPELINE_X : PIPELINE_WEIGHTS, QT_PRODUCER_THREADS);
    ptx_named_barrier(weights ? PIPELINE_WEIGHTS : PIPELINE_X, QT_PRODUCER_THREADS);
    ptx_named_barrier_arrive(PIPELINE_READY, threads + QT_PRODUCER_THREADS);
}

/*
 * Double buffer between two groups of warps of a thread block: producers fill buffers 0, 1, 0, ...
 * in turns 0, 1, 2, ...; consumers read them. `threads` is the number of threads of both groups.
 * Named barriers `first` and `first` + 1 signal full buffers (even and odd turns), the next two
 * signal empty buffers. Each barrier is waited for at one place, as in qt_pipeline_sync_producers.
 * No thread arrives twice before the others have left: before filling, producers wait until turn -
 * 2 has been consumed; before reading, consumers wait for the turn in between.
 */
enum { PIPELINE_DOUBLE_BUFFER = 4 };

/* Producer: waits until the buffer of turn `turn` is empty. */
static __device__ __forceinline__ void qt_double_buffer_acquire(int first, int turn, int threads)
{
    if (turn >= 2)
        ptx_named_barrier(first + 2 + turn % 2, threads);
}

/* Producer: signals that the buffer of turn `turn` is full. */
static __device__ __forceinline__ void qt_double_buffer_commit(int first, int turn, int threads)
{
    ptx_named_barrier_arrive(first + turn % 2, threads);
}

/* Consumer: releases the buffer of the previous turn, then waits for turn `turn`. */
static __device__ __forceinline__ void qt_double_buffer_wait(int first, int turn, int threads)
{
    if (turn > 0)
        ptx_named_barrier_arrive(first + 3 - turn % 2, threads);
    ptx_named_barrier(first + turn % 2, threads);
}

/*
 * The two producer warps: one elected thread of each copies all stages, of weights or of X. Source
 * says what to copy; it begins at the first stage of the first tile:
 *
 *     copy_weights(dst, bar)   starts the weight copies of the current stage, completing on bar;
 *                              expects the bytes of weights and X
 *     copy_x(dst, bar)         starts the X copies of the current stage
 *     copies_x()               false: the kernel does not copy X through the pipeline
 *     next()                   advances to the next stage of the tile; false at the end
 *     next_tile()              advances to the first stage of the next tile; false at the end
 *
 * The weight copies of the first stage start before the other mbarriers are initialized.
 *
 * Args: kernel arguments with stages, stage_bytes, ring_at, dependent. threads: number of consumer
 * threads; arrivals: number of consumer arrivals that release a stage.
 */
template <class Args, class Source>
static __device__ __forceinline__ void qt_pipeline_produce(const Args &a, qt_pipeline r,
                                                           bool weights, int threads, int arrivals,
                                                           Source source)
{
    const uint32_t ring = ptx_shared(qt_smem) + a.ring_at;
    if (ptx_elect()) {
        if (weights) {
            ptx_barrier_init(r.full, 1);
            ptx_barrier_init_fence();
            source.copy_weights(ring, r.full);
            qt_pipeline_init_barriers(r.full, 1, 1);
        } else {
            qt_pipeline_init_barriers(r.empty, 0, (uint32_t)arrivals);
            ptx_barrier_init(qt_pipeline_extra_barrier(r), 1);
        }
        ptx_barrier_init_fence();
    }
    qt_pipeline_sync_producers(weights, threads);
    if (!ptx_elect() || (!weights && !source.copies_x()))
        return;
    bool more = true;
    if (weights) {
        qt_pipeline_advance(&r, a.stages);
        more = source.next();
    } else if (a.dependent) {
        ptx_wait_previous();
    }
    do { /* tiles; separate stage loops for the two warps, but one call of next_tile */
        if (weights)
#pragma unroll 1
            for (; more; more = source.next()) {
                ptx_barrier_wait(r.empty + 8 * r.stage, r.parity ^ 1);
                source.copy_weights(ring + r.stage * a.stage_bytes, r.full + 8 * r.stage);
                qt_pipeline_advance(&r, a.stages);
            }
        else
#pragma unroll 1
            for (; more; more = source.next()) {
                ptx_barrier_wait(r.empty + 8 * r.stage, r.parity ^ 1);
                source.copy_x(ring + r.stage * a.stage_bytes, r.full + 8 * r.stage);
                qt_pipeline_advance(&r, a.stages);
            }
        more = source.next_tile();
    } while (more);
}

/* Consumer: waits until the mbarriers are initialized. */
static __device__ __forceinline__ void qt_pipeline_wait_ready(int threads)
{
    ptx_named_barrier(PIPELINE_READY, threads + QT_PRODUCER_THREADS);
}

#endif
