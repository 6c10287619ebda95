/* The mix24 kernel for many tokens: its arguments, and its plan behind mix24.h. */
#ifndef QT_KERNELS_CUDA_MIX24_TILE_H
#define QT_KERNELS_CUDA_MIX24_TILE_H

#include "kernels/cuda/matmul/tile.h"
#include "kernels/cuda/mix24/mix24.h"

/* The kernels there are: X(warpgroups that multiply, tokens, microseconds of struct qt_tile_kind
 * without outliers, with them). From sweeps as those of tile_plan.cc. */
#define QT_MIX24_TILE_TABLE(X)                                                                     \
    X(2, 32, .220f, .230f)                                                                         \
    X(2, 64, .275f, .335f)                                                                         \
    X(3, 64, .380f, .520f)                                                                         \
    X(2, 96, .343f, .370f)                                                                         \
    X(2, 128, .401f, .430f)                                                                        \
    X(3, 128, .594f, .630f)                                                                        \
    X(2, 160, .494f, .490f)                                                                        \
    X(2, 192, .570f, .560f)                                                                        \
    X(2, 224, .678f, .640f)                                                                        \
    X(2, 256, .780f, .860f)
enum { QT_MIX24_TILE_KINDS = 10 };

/*
 * Outliers of tiles of few tokens are added up by a warpgroup of their own
 * (mix24_tile_outliers.cuh), T tokens at a time; those of others become part of the operands
 * (mix24_patch.cuh). Measured: docs/kernels_tried_mix24.md.
 */
static __host__ __device__ constexpr bool qt_mix24_tile_sums(int tokens)
{
    return tokens <= 64;
}
enum { QT_MIX24_TILE_T = 32 };
enum {
    OUTLIER_CHUNK = 16, /* entries that are an mma */
    OUTLIER_DEPTH = 4   /* buffers of a warp; and chunks of a load of entries */
};

static __host__ __device__ constexpr int outlier_buffer_bytes(int tokens)
{
    return OUTLIER_CHUNK * tokens * 2;
}

/* K-steps whose products are started at a time: see qt_tile_steps. */
static __host__ __device__ constexpr int qt_mix24_tile_steps(int warpgroups, int tokens)
{
    return warpgroups == 2 && tokens <= 192 ? 4 : 2;
}

struct qt_mix24_tile_args : qt_tile_base {
    CUtensorMap records[2]; /* of TWOs and FOURs: the stream as U64 [strips][bytes] */
    int units, fours;       /* units of 128 columns, of which fours are FOUR */
    CUtensorMap lists;      /* of outliers: U64 [strips][16 units], mix24_patch.cuh; or ... */
    int list_bytes;         /* of a strip and unit; 0: there are none */
    float *outlier_sums;    /* ... sums: [blocks][2][tile rows][tile tokens] */
    qt_mix24_outliers outliers;
};

/* Kernel number `kind` of QT_MIX24_TILE_TABLE; sm_90a. */
const void *qt_mix24_tile_instance(int kind);

/* As qt_tile_choose, _check and _run. */
bool qt_mix24_tile_choose(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                          double *us);
int qt_mix24_tile_check(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w);
int qt_mix24_tile_run(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                      void *y, const void *x, void *workspace, void *stream);

#endif
