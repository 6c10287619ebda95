/* The mix24 skinny kernel, for up to 16 tokens per launch: arguments and plan. */
#ifndef QT_KERNELS_CUDA_MIX24_SKINNY_H
#define QT_KERNELS_CUDA_MIX24_SKINNY_H

#include "kernels/cuda/matmul/skinny.h"
#include "kernels/cuda/mix24/mix24.h"

/* Outlier warps per thread block, beside the consumer warps. */
enum { QT_MIX24_OUTLIER_LEAST = 2, QT_MIX24_OUTLIER_WARPS = 4 };

/* Maximum warps of a thread block. 24 warps have fewer registers, which makes large matrices 1 %
 * slower, but allow 16 consumer and 4 outlier warps, which is faster for 3 and 7 strips. Four
 * strips with 16 tokens are 5 % slower with fewer registers. */
static __host__ __device__ constexpr int qt_mix24_skinny_warps(int token_tiles, int strips,
                                                               int last)
{
    return token_tiles == 2 && strips == 4 ? 16 : last < strips ? 24 : 20;
}

struct qt_mix24_skinny_args : qt_skinny_base {
    CUtensorMap records[2]; /* of TWOs and FOURs: the stream as U64 [strips][bytes] */
    qt_mix24_outliers outliers;
    int units, fours;           /* units of 128 columns, of which fours are FOUR */
    int step_rest;              /* mix24_remainder_after, for a warp's step to its next unit */
    int weights_at, unit_bytes; /* offset of the weights in a stage; bytes from unit to unit */
    int outlier_bytes;          /* outlier sums of a tile; several tiles use two buffers */
};

/* Host address of a kernel. token_tiles 1 or 2; strips 1, 2 or 4; last: strips of the last warp,
 * equal to strips or 1 if strips is 2. For sm_90a. */
const void *qt_mix24_skinny_instance(int token_tiles, int strips, int last);

/* Returns false if the device is not of compute capability 9.0 or the configuration does not fit.
 */
bool qt_mix24_skinny_choose(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w);
int qt_mix24_skinny_check(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w);
int qt_mix24_skinny_run(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                        void *y, const void *x, void *workspace, void *stream);

#endif
