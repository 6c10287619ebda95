/* The mix24 kernel for many tokens: its arguments, and its plan behind mix24.h. */
#ifndef QT_CUDA_MIX24_TILE_H
#define QT_CUDA_MIX24_TILE_H

#include "kernels/cuda/mix24.h"
#include "kernels/cuda/tile.h"

/* The kernels there are: X(warpgroups, tokens, microseconds of struct qt_tile_kind). */
#define QT_MIX24_TILE_TABLE(X)                                                                     \
    X(2, 32, .25f)                                                                                 \
    X(2, 64, .30f)                                                                                 \
    X(3, 64, .42f)                                                                                 \
    X(2, 128, .45f)                                                                                \
    X(3, 128, .66f)
enum { QT_MIX24_TILE_KINDS = 5 };

/* Of the warpgroups of a block the last two do not multiply: one copies, one adds up outliers. */
enum { QT_MIX24_TILE_OTHERS = 2, QT_MIX24_TILE_OUTLIER_WARPS = 4, QT_MIX24_TILE_CHUNK = 16 };

struct qt_mix24_tile_args : qt_tile_base {
    CUtensorMap records[2]; /* of TWOs and FOURs: the stream as U64 [strips][bytes] */
    qt_mix24_outliers outliers;
    float *outlier_sums; /* [blocks][2][tile rows][tile tokens] */
    int units, fours;    /* units of 128 columns, of which fours are FOUR */
};

/* Kernel number `kind` of QT_MIX24_TILE_TABLE; sm_90a. */
const void *qt_mix24_tile_instance(int kind);

/* As qt_tile_choose, _check and _run. */
bool qt_mix24_tile_choose(struct qt_matmul_plan *p, const struct qt_matmul_weight *w, double *us);
int qt_mix24_tile_check(struct qt_matmul_plan *p, const struct qt_matmul_weight *w);
int qt_mix24_tile_run(const struct qt_matmul_plan *p, const struct qt_matmul_weight *w, void *y,
                      const void *x, void *workspace, void *stream);

#endif
