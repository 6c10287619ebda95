/* Tensor maps of w4ax weights and activations. */
#include "kernels/cuda/common/tensor_map.h"
#include "kernels/cuda/w4ax/plan.h"

static size_t blocks_of(const struct qtool_matmul_plan *p)
{
    return ceil_div(p->k, QTOOL_W4AX_BLOCK_COLS);
}

bool qt_w4ax_x_map(const struct qtool_matmul_plan *p, CUtensorMap *map,
                   const struct qtool_w4ax_acts *acts, const struct qt_w4ax_box *box)
{
    const size_t line = QTOOL_W4AX_BLOCK_COLS;
    const struct qt_tensor t = {acts->codes,
                                3,
                                {line / 8, p->m, blocks_of(p)},
                                {line, line * p->m},
                                {(int)line / 8, box->tokens, box->blocks},
                                false};
    return qt_tensor_map(p, map, &t);
}

bool qt_w4ax_token_scale_map(const struct qtool_matmul_plan *p, CUtensorMap *map,
                             const struct qtool_w4ax_acts *acts, const struct qt_w4ax_box *box)
{
    const size_t pitch = round_up(p->m, 4);
    const struct qt_tensor t = {
        acts->scale, 2, {pitch / 2, blocks_of(p)}, {pitch * 4}, {box->tokens / 2, box->blocks},
        false};
    return qt_tensor_map(p, map, &t);
}

/* A section with `row` bytes per strip, `bytes` per channel block, and `pitch` bytes from strip to
 * strip. */
static bool strip_map(const struct qtool_matmul_plan *p, CUtensorMap *map, const void *base,
                      size_t pitch, size_t row, size_t bytes, const struct qt_w4ax_box *box)
{
    const struct qt_tensor t = {base,
                                2,
                                {row / 8, ceil_div(p->n, QT_STRIP_ROWS)},
                                {pitch},
                                {box->blocks * (int)bytes / 8, box->strips},
                                false};
    return qt_tensor_map(p, map, &t);
}

/* If the last channel block has up to 64 channels, its second half is outside of the map and is read
 * as zeros. */
bool qt_w4ax_code_map(const struct qtool_matmul_plan *p, CUtensorMap *map,
                      const struct qtool_w4ax_weight *w, const struct qt_w4ax_box *box)
{
    const size_t half = QT_W4AX_STRIP_BYTES / 2, row = ceil_div(p->k, QTOOL_W4AX_BLOCK_COLS / 2);
    const size_t pitch = w->pitch_blocks ? w->pitch_blocks : 2 * blocks_of(p);
    return strip_map(p, map, w->plane, pitch * half, row * half, QT_W4AX_STRIP_BYTES, box);
}

bool qt_w4ax_scale_map(const struct qtool_matmul_plan *p, CUtensorMap *map,
                       const struct qtool_w4ax_weight *w, const struct qt_w4ax_box *box)
{
    const size_t bytes = (size_t)qt_w4ax_scale_bytes(w->scales);
    return strip_map(p, map, w->scale, blocks_of(p) * bytes, blocks_of(p) * bytes, bytes, box);
}
