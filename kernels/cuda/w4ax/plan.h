/* Host code that the plans of the w4ax kernels share, and constants of the layout. */
#ifndef QT_KERNELS_CUDA_W4AX_PLAN_H
#define QT_KERNELS_CUDA_W4AX_PLAN_H

#include "kernels/cuda/common/plan.h"
#include "kernels/include/qtool_w4ax.h"

/* Bytes of codes, and of scales, of a strip of 16 rows and a channel block. */
enum { QT_W4AX_STRIP_BYTES = 1024 };
static __host__ __device__ constexpr int qt_w4ax_scale_bytes(enum qtool_w4ax_scales scales)
{
    return scales == QTOOL_W4AX_BLOCK ? 32 : scales == QTOOL_W4AX_INT ? 16 : 0;
}

/* The mask of w4ax_unpack_int, which kernels get as an argument: an instruction can encode only one
 * constant, and (x & mask) ^ 8 has two. */
enum { W4AX_NIBBLES = 0x0f0f0f0f };

/* ---- private part of plans ------------------------------------------------------------------ */

/* Stored in `internal` of struct qtool_w4ax_plan. */
struct qt_w4ax_state {
    int sms;        /* multiprocessors; 0 until the device is known */
    int smem_limit; /* bytes of shared memory that a thread block of the device may have */
    int cc;         /* architecture of the kernels: 90 or 80 */
    bool ready;     /* the plan was accepted; run refuses others */
    struct qtool_matmul_plan launch; /* the product as the shared code of the kernels sees it */
};

static_assert(sizeof(struct qt_w4ax_state) <= sizeof(qtool_w4ax_plan::internal), "no room");

static inline struct qt_w4ax_state *qt_state(struct qtool_w4ax_plan *p)
{
    return (struct qt_w4ax_state *)p->internal.bytes;
}

static inline const struct qt_w4ax_state *qt_state(const struct qtool_w4ax_plan *p)
{
    return (const struct qt_w4ax_state *)p->internal.bytes;
}

/* ---- common.cc ------------------------------------------------------------------------------ */

/* Checks a weight but for its `blocks`. Returns NULL, or an error message. */
const char *qt_w4ax_weight_fault(const struct qtool_w4ax_weight *w);

/* Writes plan->reason and returns status. */
int qt_w4ax_refuse(struct qtool_w4ax_plan *p, int status, const char *reason);

/* Returns the plan that the shared code of tile and skinny kernels works on. Its config has the
 * path alone. */
struct qtool_matmul_plan qt_w4ax_launch_plan(const struct qtool_w4ax_plan *p,
                                             enum qtool_matmul_path path);

/* ---- maps.cc: tensor maps of weights and activations ---------------------------------------- */

/* Size of a box: tokens (for scales a multiple of 4), channel blocks, strips. */
struct qt_w4ax_box {
    int tokens, blocks, strips;
};

/* Each function encodes *map and returns false if the driver refuses it. */

/* Codes of X, as U64 [blocks][m][16]. */
bool qt_w4ax_x_map(const struct qtool_matmul_plan *p, CUtensorMap *map,
                   const struct qtool_w4ax_acts *acts, const struct qt_w4ax_box *box);
/* BLOCK: scales of tokens, as U64 [blocks][pitch / 2]. */
bool qt_w4ax_token_scale_map(const struct qtool_matmul_plan *p, CUtensorMap *map,
                             const struct qtool_w4ax_acts *acts, const struct qt_w4ax_box *box);
/* Weight codes, as U64 [strips][128 per channel block]. */
bool qt_w4ax_code_map(const struct qtool_matmul_plan *p, CUtensorMap *map,
                      const struct qtool_w4ax_weight *w, const struct qt_w4ax_box *box);
/* BLOCK, INT: scales of rows, as U64 [strips][4 or 2 per channel block]. */
bool qt_w4ax_scale_map(const struct qtool_matmul_plan *p, CUtensorMap *map,
                       const struct qtool_w4ax_weight *w, const struct qt_w4ax_box *box);

#endif
