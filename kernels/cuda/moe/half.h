/* Layers of experts whose products take X in FP16: the workspace, and the order of the products. X
 * and the values between the products are prepared (prepare.h) if they are BF16 or X has rows that
 * are not 16-byte aligned. */
#ifndef QT_KERNELS_CUDA_MOE_HALF_H
#define QT_KERNELS_CUDA_MOE_HALF_H

#include "kernels/cuda/moe/plan.h"

/* Offsets in the workspace, and pitches in elements. */
struct qt_moe_half_space {
    size_t x, inner, inner_prepared;
    size_t bytes;
    size_t inner_pitch, up_pitch, partial_pitch;
};

/* The space from offset `at` on. */
struct qt_moe_half_space qt_moe_half_space(const struct qtool_moe_plan *p, size_t at);
/* Elements from one row of X to the next as products read it. */
size_t qt_moe_half_x_pitch(const struct qtool_moe_plan *p);
/* Pipeline stages of the products by wgmma at most. */
enum { QT_MOE_WIDE_STAGES = 10 };
/* Tokens of their tiles at most: smaller tiles leave room for more stages, which experts of few
 * tokens need, because theirs are short. */
int qt_moe_half_wide_tokens(const struct qtool_moe_plan *p);
/* qt_moe_kind's. */
size_t qt_moe_half_own_bytes(const struct qtool_moe_plan *p);
/* Bytes of a position in r->partial, which holds the results of down and before, unless `gated`,
 * those of up in FP32. */
size_t qt_moe_half_partial_bytes(const struct qtool_moe_plan *p, bool gated);

/* The input of a product: FP16 [..][pitch], and NULL or factors of its rows. */
struct qt_moe_input {
    const void *values;
    size_t pitch;
    const float *factor;
};

/* Enqueues a product. matrix: QT_MOE_GATE stands for gate and up where they are one launch. */
typedef int qt_moe_product_fn(const struct qtool_moe_plan *p, int matrix,
                              const struct qt_moe_half_space *s, const struct qt_moe_input *x,
                              struct qt_moe_run *r);

/* Enqueues gate, up and down. gated: gate and up are one launch. */
int qt_moe_half_run(const struct qtool_moe_plan *p, struct qt_moe_run *r, bool gated,
                    qt_moe_product_fn *product);

/* Sets the members of *a that do not depend on the weights. a->gated, a->n are set. kind: of the
 * items. */
void qt_moe_half_set_args(struct qt_moe_half_args *a, const struct qtool_moe_plan *p, int matrix,
                          int kind, const struct qt_moe_half_space *s, const struct qt_moe_input *x,
                          const struct qt_moe_run *r);

/* The same of the kernel by wgmma, afterwards: it stores the results of up with 16 bits, rows at
 * the same places as those of FP32. */
void qt_moe_half_set_wide(struct qt_moe_half_args *a);

/* Looks up the function that encodes tensor maps. Returns a status and writes the reason. */
int qt_moe_half_need_maps(struct qtool_moe_plan *p, void (**encode)(void));
/* Maps X by position: FP16 [positions][pitch], of which k columns are read. */
bool qt_moe_half_map(CUtensorMap *map, const struct qtool_moe_plan *p, void (*encode)(void),
                     const void *x, size_t k, size_t pitch);

/* Enqueues a product's kernel. grid: thread blocks at most. */
int qt_moe_half_launch(const struct qtool_moe_plan *p, const void *kernel, int grid, int threads,
                       size_t smem, struct qt_moe_half_args *a, struct qt_moe_run *r);

#endif
