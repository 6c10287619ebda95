/* The kernels for LUT, FPX and INT weights, host side. */
#ifndef QT_KERNELS_CUDA_MATMUL_MATMUL_H
#define QT_KERNELS_CUDA_MATMUL_MATMUL_H

#include "kernels/cuda/matmul/shape.h"

/*
 * Every path has these functions, here and in its NAME_plan.cc:
 *
 *   choose  sets plan->config and returns true, or returns false if the path cannot be used
 *   check   validates plan->config and sets the rest of the plan that depends on it
 *   run     enqueues the kernels of a checked plan; returns QTOOL_UNSUPPORTED if the weight needs
 *           more than was planned
 *
 * us: the estimated time in microseconds on an H200.
 */

/* matmul.cc: chooses among the paths below. *us is set to the estimate of the chosen one. */
bool qt_matmul_choose(struct qtool_matmul_plan *p, const struct qt_shape *s, double *us);
int qt_matmul_check(struct qtool_matmul_plan *p, const struct qt_shape *s);
int qt_matmul_run(const struct qtool_matmul_plan *p, const struct qt_shape *s,
                  const struct qtool_matmul_weight *w, void *y, const void *x, void *workspace,
                  void *stream);

bool qt_stream_choose(struct qtool_matmul_plan *p, const struct qt_shape *s);
int qt_stream_check(struct qtool_matmul_plan *p, const struct qt_shape *s);
int qt_stream_run(const struct qtool_matmul_plan *p, const struct qt_shape *s,
                  const struct qtool_matmul_weight *w, void *y, const void *x, void *workspace,
                  void *stream);

bool qt_skinny_choose(struct qtool_matmul_plan *p, const struct qt_shape *s);
int qt_skinny_check(struct qtool_matmul_plan *p, const struct qt_shape *s);
int qt_skinny_run(const struct qtool_matmul_plan *p, const struct qt_shape *s,
                  const struct qtool_matmul_weight *w, void *y, const void *x, void *workspace,
                  void *stream);

/* qtool_matmul_plan_many and qtool_matmul_run_many of LUT matrices of one format; s[count]. */
int qt_skinny_plan_many(struct qtool_matmul_plan *p, const struct qt_shape *s, size_t count);
int qt_skinny_run_many(const struct qtool_matmul_plan *p, const struct qt_shape *s,
                       const struct qtool_matmul_weight *const *w, size_t count, void *const *y,
                       const void *x, void *stream);

/* Sets *us. */
bool qt_tile_choose(struct qtool_matmul_plan *p, const struct qt_shape *s, double *us);
int qt_tile_check(struct qtool_matmul_plan *p, const struct qt_shape *s);
int qt_tile_run(const struct qtool_matmul_plan *p, const struct qt_shape *s,
                const struct qtool_matmul_weight *w, void *y, const void *x, void *workspace,
                void *stream);

/* Only chooses a configuration that is faster than *us, and then sets *us. */
bool qt_mma_tile_choose(struct qtool_matmul_plan *p, const struct qt_shape *s, double *us);
int qt_mma_tile_check(struct qtool_matmul_plan *p, const struct qt_shape *s);
int qt_mma_tile_run(const struct qtool_matmul_plan *p, const struct qt_shape *s,
                    const struct qtool_matmul_weight *w, void *y, const void *x, void *workspace,
                    void *stream);

/* qtool_matmul_dequantize of these weights (dequantize_plan.cc). */
int qt_matmul_dequantize(const struct qtool_matmul_weight *w, void *out, enum qtool_dtype dtype,
                         void *stream);

#endif
