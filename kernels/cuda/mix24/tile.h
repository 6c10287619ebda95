/* The mix24 tile kernel: instances, arguments and plan. */
#ifndef QT_KERNELS_CUDA_MIX24_TILE_H
#define QT_KERNELS_CUDA_MIX24_TILE_H

#include "kernels/cuda/matmul/tile.h"
#include "kernels/cuda/mix24/mix24.h"

/* Instances: X(consumer warpgroups, tokens per tile, column_us of struct qt_tile_kind without
 * outliers, with outliers). Fitted to sweeps as in matmul/tile_plan.cc. */
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
 * With small tiles a warpgroup of its own adds the outliers, QT_MIX24_TILE_T tokens at a time
 * (tile_outliers.cuh). With other tiles the outliers are inserted into the operands
 * (outlier_patch.cuh). Measurements: docs/experiments, E098. Returns true for the former.
 */
static __host__ __device__ constexpr bool qt_mix24_tile_sums(int tokens)
{
    return tokens <= 64;
}
enum { QT_MIX24_TILE_T = 32 };
enum {
    OUTLIER_CHUNK = 16, /* outliers per mma */
    OUTLIER_DEPTH = 4   /* buffers of a warp, and chunks per load of outliers */
};

static __host__ __device__ constexpr int outlier_buffer_bytes(int tokens)
{
    return OUTLIER_CHUNK * tokens * 2;
}

/* K-steps per batch of wgmma instructions: see qt_tile_steps. */
static __host__ __device__ constexpr int qt_mix24_tile_steps(int warpgroups, int tokens)
{
    return warpgroups == 2 && tokens <= 192 ? 4 : 2;
}

struct qt_mix24_tile_args : qt_tile_base {
    CUtensorMap records[2]; /* of TWOs and FOURs: the stream as U64 [strips][bytes] */
    int units, fours;       /* units of 128 columns, of which fours are FOUR */
    CUtensorMap lists;      /* outlier lists: U64 [strips][16 units] */
    int list_bytes;         /* bytes of a list; 0: no lists */
    float *outlier_sums;    /* [blocks][2][tile rows][tile tokens], if there are no lists */
    qt_mix24_outliers outliers;
};

/* Host address of instance number `kind` of QT_MIX24_TILE_TABLE. For sm_90a. */
const void *qt_mix24_tile_instance(int kind);

/* As qt_tile_choose, qt_tile_check and qt_tile_run. */
bool qt_mix24_tile_choose(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                          double *us);
int qt_mix24_tile_check(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w);
int qt_mix24_tile_run(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                      void *y, const void *x, void *workspace, void *stream);

#endif
