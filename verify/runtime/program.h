/* The files that turn a step into a program share these declarations, which are private to them.
 * Functions append to *p. */
#ifndef QT_VERIFY_RUNTIME_PROGRAM_H
#define QT_VERIFY_RUNTIME_PROGRAM_H

#include "verify/runtime/runtime.h"

/* ---- products.c ----------------------------------------------------------------------------- */

int rt_append_op(struct rt_op **out, struct rt_program *p, enum rt_type type,
                 enum qt_runtime_share share, struct qt_err *err);
int rt_append_kernel(struct rt_program *p, enum qt_runtime_share share,
                     const struct qtool_decoder_op *kernel, struct qt_err *err);
/* QT_E_UNSUPPORTED: these products depend on the number of tokens. */
int rt_not_invariant(const char *what, struct qt_err *err);
struct qtool_matmul_options rt_product_options(const struct qt_runtime *rt);
/* y: F16 [m][n]. */
int rt_append_product(struct rt_program *p, struct qt_runtime *rt, const struct rt_linear *linear,
                      void *y, const void *x, size_t m, enum qt_runtime_share share,
                      struct qt_err *err);
/* Room for the codes of m tokens. */
int rt_need_codes(struct qt_runtime *rt, const struct gpu_w4ax_input *in, size_t m,
                  struct qt_err *err);
/* True if the norm in front of a group of the layer quantizes its input: nothing else reads it. */
bool rt_norm_quantizes(const struct qt_runtime *rt, const struct rt_layer *l,
                       const struct rt_group *g);
/* y: the outputs of the group's linears, one after the other. quantized: the codes of x are there,
 * if the linears are w4ax. */
int rt_append_group(struct rt_program *p, struct qt_runtime *rt, const struct rt_group *g, void *y,
                    const void *x, size_t m, bool quantized, struct qt_err *err);
/* Where a part of a group's output begins; *stride = elements from token to token. */
const void *rt_part_of(size_t *stride, const struct rt_group *g, size_t part, const void *y,
                       size_t m);

/* ---- attention.c ---------------------------------------------------------------------------- */

/* Queries, keys and values of rt->x to the output product, in rt->o. */
int rt_append_mixer(struct rt_program *p, struct qt_runtime *rt, const struct rt_layer *l,
                    const struct rt_batch *b, struct qt_err *err);

/* ---- mlp.c ---------------------------------------------------------------------------------- */

/* The MLP of rt->x, in rt->down; beside experts, a shared one in rt->shared. */
int rt_append_mlp(struct rt_program *p, struct qt_runtime *rt, const struct rt_layer *l, size_t m,
                  struct qt_err *err);

#endif
