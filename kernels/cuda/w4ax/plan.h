/* Host side: what the plans of all kernels of 4-bit integer weights share. */
#ifndef QT_KERNELS_CUDA_W4AX_PLAN_H
#define QT_KERNELS_CUDA_W4AX_PLAN_H

#include "kernels/cuda/common/plan.h"
#include "kernels/include/qtool_w4ax.h"

/* Bytes of a strip of 16 rows and a block of channels: codes, scales. */
enum { QT_W4AX_STRIP_BYTES = 1024 };
static __host__ __device__ constexpr int qt_w4ax_scale_bytes(enum qtool_w4ax_scales scales)
{
    return scales == QTOOL_W4AX_BLOCK ? 32 : scales == QTOOL_W4AX_INT ? 16 : 0;
}

/* The mask of w4ax_unpack_int: an instruction has room for one constant that the compiler knows,
 * and (x & mask) ^ 8 has two, so kernels have this one as an argument. */
enum { W4AX_NIBBLES = 0x0f0f0f0f };

/* What the plans of tile and skinny kernels know a product by; of its config the path and no more.
 */
struct qtool_matmul_plan qt_w4ax_launch_plan(const struct qtool_w4ax_plan *p,
                                             enum qtool_matmul_path path);

/* ---- w4ax_maps.cc: how weights and activations lie, for the copy engine ------------------------
 */

/* Of a box: tokens (of scales a multiple of 4), blocks of channels, strips. */
struct qt_w4ax_box {
    int tokens, blocks, strips;
};

/* X as U64 [blocks][m][16]. */
bool qt_w4ax_x_map(const struct qtool_matmul_plan *p, CUtensorMap *map,
                   const struct qtool_w4ax_acts *acts, const struct qt_w4ax_box *box);
/* BLOCK: scales of tokens as U64 [blocks][pitch / 2]. */
bool qt_w4ax_token_scale_map(const struct qtool_matmul_plan *p, CUtensorMap *map,
                             const struct qtool_w4ax_acts *acts, const struct qt_w4ax_box *box);
/* U64 [strips][128 a block]. */
bool qt_w4ax_code_map(const struct qtool_matmul_plan *p, CUtensorMap *map,
                      const struct qtool_w4ax_weight *w, const struct qt_w4ax_box *box);
/* BLOCK, INT: scales of rows as U64 [strips][4 or 2 a block]. */
bool qt_w4ax_scale_map(const struct qtool_matmul_plan *p, CUtensorMap *map,
                       const struct qtool_w4ax_weight *w, const struct qt_w4ax_box *box);

#endif
