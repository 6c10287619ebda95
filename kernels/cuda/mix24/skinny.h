/* The mix24 kernel for up to 16 tokens: its arguments, and its plan behind mix24.h. */
#ifndef QT_KERNELS_CUDA_MIX24_SKINNY_H
#define QT_KERNELS_CUDA_MIX24_SKINNY_H

#include "kernels/cuda/matmul/skinny.h"
#include "kernels/cuda/mix24/mix24.h"

/* Warps that add up outliers, beside those that multiply. */
enum { QT_MIX24_OUTLIER_LEAST = 2, QT_MIX24_OUTLIER_WARPS = 4 };

/* Warps of a block, at most. 24 have fewer registers, with which larger matrices are 1 % slower,
 * but room for 16 that multiply and 4 for outliers, which 3 and 7 strips want. Four strips of 16
 * tokens are 5 % slower with fewer registers. */
static __host__ __device__ constexpr int qt_mix24_skinny_warps(int token_tiles, int strips,
                                                               int last)
{
    return token_tiles == 2 && strips == 4 ? 16 : last < strips ? 24 : 20;
}

struct qt_mix24_skinny_args : qt_skinny_base {
    CUtensorMap records[2]; /* of TWOs and FOURs: the stream as U64 [strips][bytes] */
    qt_mix24_outliers outliers;
    int units, fours;           /* units of 128 columns, of which fours are FOUR */
    int step_rest;              /* mix24_rest_after, for the next unit of a warp */
    int weights_at, unit_bytes; /* in a stage, behind X; from unit to unit */
    int outlier_bytes; /* of a tile's sums of outliers, for which there is room twice if there is
                          more than one tile */
};

/* token_tiles 1 or 2; strips 1, 2 or 4; last: strips, or 1 of 2; sm_90a. */
const void *qt_mix24_skinny_instance(int token_tiles, int strips, int last);

/* False: not for this device or so many tokens. */
bool qt_mix24_skinny_choose(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w);
int qt_mix24_skinny_check(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w);
int qt_mix24_skinny_run(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                        void *y, const void *x, void *workspace, void *stream);

#endif
