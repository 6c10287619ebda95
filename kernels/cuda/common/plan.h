/* Host code shared by the plans of all products: the private part of plan structs, error messages,
 * shared-memory limits, kernel launches. Also constants that host and device code share. */
#ifndef QT_KERNELS_CUDA_COMMON_PLAN_H
#define QT_KERNELS_CUDA_COMMON_PLAN_H

#include "kernels/include/qtool_kernels.h"

#include <cuda.h>
#include <cuda_runtime.h>

enum { QT_BLOCK_COLS = 64, QT_STRIP_ROWS = 16 };

/* Pipelines in shared memory (pipeline.cuh): maximum number of stages; bytes of their barriers. */
enum { QT_PIPELINE_STAGES = 16, QT_PIPELINE_BARRIER_BYTES = (2 * QT_PIPELINE_STAGES + 1) * 8 };
/* Threads of the two producer warps: one copies weights, which do not depend on the preceding
 * kernel, and one copies X, which does. */
enum { QT_PRODUCER_THREADS = 64 };

/* Tokens of a gated product (options.gated), at most. */
enum { QT_GATED_TOKENS = 64 };

/* Columns of Y. */
static inline size_t qt_out_columns(const struct qtool_matmul_plan *p)
{
    return p->options.gated ? p->n / 2 : p->n;
}

static inline size_t ceil_div(size_t a, size_t b)
{
    return a / b + (a % b != 0);
}

static inline size_t round_up(size_t a, size_t b)
{
    return ceil_div(a, b) * b;
}

/* True if a multiprocessor has so many weights that products of few tokens are limited by memory
 * bandwidth and not by latency. */
static inline bool qt_bandwidth_bound(size_t n, size_t k, int sms)
{
    return n * k / (size_t)sms >= 160000;
}

/* ---- private part of plans ------------------------------------------------------------------ */

/* Stored in `internal` of struct qtool_matmul_plan. */
struct qt_plan_state {
    int sms;        /* multiprocessors; 0 until the device is known */
    int smem_limit; /* bytes of shared memory that a thread block of the device may have */
    int cc;         /* architecture of the kernels: 90 or 80 */
    bool ready;     /* the plan was accepted; run refuses others */
    bool zeros;     /* the planned weight has zero-points */
    int grid_x, grid_y;
    size_t smem_bytes;
    const void *kernel;       /* host address */
    void (*encode_map)(void); /* cuTensorMapEncodeTiled, if the kernel takes tensor maps */
    /* Format of the planned weight: run refuses others. */
    unsigned bits, exp_bits;
    size_t group;
    size_t units; /* MIX24 */
    size_t many;  /* matrices of qtool_matmul_plan_many; 0: a plan of qtool_matmul_plan */
};

static_assert(sizeof(struct qt_plan_state) <= sizeof(qtool_matmul_plan::internal), "no room");

static inline struct qt_plan_state *qt_state(struct qtool_matmul_plan *p)
{
    return (struct qt_plan_state *)p->internal.bytes;
}

static inline const struct qt_plan_state *qt_state(const struct qtool_matmul_plan *p)
{
    return (const struct qt_plan_state *)p->internal.bytes;
}

/* ---- plan.cc -------------------------------------------------------------------------------- */

/* Writes plan->reason and returns status. */
int qt_refuse(struct qtool_matmul_plan *p, int status, const char *fmt, ...);

/* Returns the shared memory with which exactly one thread block fits on a multiprocessor. Thread
 * blocks of a dependent launch start while those of the preceding kernel run: with room for two,
 * some multiprocessors would get two of them and finish late (fp6, 57344 x 8192: 136 us instead of
 * 84). */
static inline size_t qt_one_block_smem(size_t bytes, int smem_limit)
{
    return bytes <= (size_t)smem_limit / 2 ? (size_t)smem_limit / 2 + 1024 : bytes;
}

/* Sets the shared memory of the plan's kernel: `bytes`, for a dependent launch at least
 * qt_one_block_smem. Refuses more than the device has. */
int qt_set_smem(struct qtool_matmul_plan *p, size_t bytes, bool dependent);

/* Launches the plan's kernel with its grid and shared memory, in clusters of `cluster` thread
 * blocks along x. args: the kernel's one argument. dependent: use programmatic dependent launch if
 * the kernel is compiled for 9.0. */
int qt_launch_clusters(const struct qtool_matmul_plan *p, void *args, int threads, int cluster,
                       bool dependent, void *stream);
/* The same without clusters. */
int qt_launch(const struct qtool_matmul_plan *p, void *args, int threads, bool dependent,
              void *stream);

#endif
