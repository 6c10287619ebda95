/* Host side: what a matrix is, and the parts of qtool_kernels.h that belong to one kind of kernel.
 */
#ifndef QT_CUDA_PLAN_H
#define QT_CUDA_PLAN_H

#include "kernels/cuda/instances.h"
#include "kernels/qtool_kernels.h"

#include <cuda_runtime.h>

enum { QT_BLOCK_COLS = 64, QT_STRIP_ROWS = 16 };

/* A checked struct qt_matmul_weight. */
struct qt_shape {
    enum qt_format format;
    int bits;
    int width[3];       /* of its planes */
    int strips, blocks; /* of the matrix */
    size_t groups;      /* scales of a row */
    size_t pitch_blocks, pitch_groups;
    int group_shift;    /* log2(group); 30: one scale per row */
    bool grouped;       /* the kernel applies scales to partial sums, not to results */
    size_t table_bytes; /* of shared memory */
};

static inline size_t ceil_div(size_t a, size_t b)
{
    return a / b + (a % b != 0);
}

static inline size_t round_up(size_t a, size_t b)
{
    return ceil_div(a, b) * b;
}

/* NULL, or why there is no kernel for it. */
const char *qt_shape_of(struct qt_shape *out, const struct qt_matmul_weight *w);
/* Writes plan->reason and returns status. */
int qt_refuse(struct qt_matmul_plan *p, int status, const char *fmt, ...);
/* The power of two that results are to be multiplied by. */
float qt_result_factor(const struct qt_matmul_weight *w);
struct qt_decode_args qt_decode_args_of(const struct qt_matmul_weight *w);
/* Launches p->kernel. */
int qt_launch(const struct qt_matmul_plan *p, void *args, int threads, bool dependent,
              void *stream);

/*
 * choose sets plan->config, or returns false when there is no configuration; cost is in
 * microseconds, about. check sets what follows from the config. run enqueues.
 */
bool qt_stream_choose(struct qt_matmul_plan *p, const struct qt_shape *s);
int qt_stream_check(struct qt_matmul_plan *p, const struct qt_shape *s);
int qt_stream_run(const struct qt_matmul_plan *p, const struct qt_shape *s,
                  const struct qt_matmul_weight *w, void *y, const void *x, void *workspace,
                  void *stream);

bool qt_tile_choose(struct qt_matmul_plan *p, const struct qt_shape *s);
int qt_tile_check(struct qt_matmul_plan *p, const struct qt_shape *s);
int qt_tile_run(const struct qt_matmul_plan *p, const struct qt_shape *s,
                const struct qt_matmul_weight *w, void *y, const void *x, void *workspace,
                void *stream);

#endif
