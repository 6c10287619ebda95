/* The w4ax tile kernel's plan: estimated times, arguments, launch. */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/w4ax/tile.h"

#include <math.h>

static float of_scales(enum qtool_w4ax_scales scales, float block, float integer, float row)
{
    return scales == QTOOL_W4AX_BLOCK ? block : scales == QTOOL_W4AX_INT ? integer : row;
}

/* Minimum stages of small tiles for bandwidth-bound products, instead of four. us with four and six
 * stages: BLOCK, 8192 x 8192, 16 tokens 12.2, 11.6, 32 tokens 13.0, 12.2; INT, 64 tokens 13.8,
 * 12.9; but 4096 x 4096 6.6, 6.8. */
enum { MORE_STAGES = 6 };

/* Returns the kernels for the product. */
static struct qt_tile_matrix matrix_of(const struct qtool_w4ax_plan *p)
{
    const float wide = p->scales == QTOOL_W4AX_BLOCK ? QT_WHOLE_FACTOR : QT_WHOLE_FACTOR_WIDE;
#define KIND(warpgroups, tokens, ...)                                                              \
    {warpgroups,                                                                                   \
     tokens,                                                                                       \
     0,                                                                                            \
     NULL,                                                                                         \
     of_scales(p->scales, __VA_ARGS__),                                                            \
     tokens > 64 ? wide : QT_WHOLE_FACTOR},
    const struct qt_tile_kind kinds[] = {QT_W4AX_TILE_TABLE(KIND)};
    struct qt_tile_matrix t = {};
    t.strips = (int)ceil_div(p->n, QT_STRIP_ROWS);
    t.blocks = (int)ceil_div(p->k, QTOOL_W4AX_BLOCK_COLS);
    for (int i = 0; i < QT_W4AX_TILE_KINDS; i++) {
        struct qt_tile_kind k = kinds[i];
        k.blocks = qt_w4ax_stage_blocks(p->scales, k.tokens);
        k.kernel = qt_w4ax_tile_instance(p->scales, i);
        if (!k.kernel)
            continue;
        k.weight_bytes =
            4 * k.warpgroups * k.blocks * (QT_W4AX_STRIP_BYTES + qt_w4ax_scale_bytes(p->scales)) +
            qt_w4ax_token_bytes(p->scales, k.tokens);
        if (k.tokens <= of_scales(p->scales, 32, 64, 0) &&
            qt_bandwidth_bound(p->n, p->k, qt_state(p)->sms))
            k.stages = MORE_STAGES;
        t.kinds[t.count++] = k;
    }
    return t;
}

static struct qtool_matmul_plan tile_plan_of(const struct qtool_w4ax_plan *p)
{
    struct qtool_matmul_plan t = qt_w4ax_launch_plan(p, QTOOL_MATMUL_TILE);
    t.config.tile = p->config.tile;
    return t;
}

bool qt_w4ax_tile_choose(struct qtool_w4ax_plan *p, double *us)
{
    const struct qt_tile_matrix t = matrix_of(p);
    struct qtool_matmul_plan tile = tile_plan_of(p);
    if (!qt_tile_choose_kind(&tile, &t, us))
        return false;
    p->config = {};
    p->config.kernel = QTOOL_W4AX_TILE;
    p->config.tile = tile.config.tile;
    return true;
}

int qt_w4ax_tile_check(struct qtool_w4ax_plan *p)
{
    if (p->options.packed)
        return qt_w4ax_refuse(p, QTOOL_UNSUPPORTED, "the tile kernel needs options.packed to be 0");
    const struct qt_tile_matrix t = matrix_of(p);
    struct qtool_matmul_plan *tile = &qt_state(p)->launch;
    *tile = tile_plan_of(p);
    int rc = qt_tile_check_config(tile, &t);
    if (rc == QTOOL_OK)
        rc = qt_allow_smem(qt_state(tile)->kernel, qt_state(tile)->smem_bytes, tile->reason);
    qt_w4ax_refuse(p, rc, tile->reason);
    p->workspace_bytes = tile->workspace_bytes;
    if (p->workspace_bytes == QTOOL_WORKSPACE_ZEROED)
        p->workspace_bytes = 0; /* no shared tiles */
    return rc;
}

int qt_w4ax_tile_run(const struct qtool_w4ax_plan *p, const struct qtool_w4ax_weight *w,
                     const struct qtool_w4ax_acts *acts, void *y, void *workspace, void *stream)
{
    struct qt_w4ax_tile_args a = {};
    const struct qtool_matmul_plan *tile = &qt_state(p)->launch;
    const struct qt_tile_matrix t = matrix_of(p);
    const struct qt_tile_kind *k = qt_tile_kind_of(tile, &t);
    if (!qt_tile_fill(&a, tile, &t, y, workspace))
        return QTOOL_UNSUPPORTED;
    const int strips = 4 * k->warpgroups, scale_bytes = qt_w4ax_scale_bytes(p->scales);
    const bool block = p->scales == QTOOL_W4AX_BLOCK;
    a.row_scale = (const __half *)w->row_scale;
    a.x_sum = acts->sum;
    a.token_factor = block ? NULL : acts->scale;
    a.nibbles = W4AX_NIBBLES;
    a.factor = ldexpf(1, w->scale_exp2 - (p->scales == QTOOL_W4AX_INT ? 0 : 4)); /* w4ax_unpack */
    a.dependent = p->options.dependent_launch;
    a.f32 = p->options.output == QTOOL_W4AX_F32;
    a.weight_tx =
        k->blocks * (k->tokens * (block ? 4 : 0) + strips * (QT_W4AX_STRIP_BYTES + scale_bytes));
    const struct qt_w4ax_box box = {k->tokens, k->blocks, strips};
    if (!qt_w4ax_x_map(tile, &a.x, acts, &box) ||
        (block && !qt_w4ax_token_scale_map(tile, &a.token_scales, acts, &box)) ||
        !qt_w4ax_code_map(tile, &a.codes, w, &box) ||
        (scale_bytes && !qt_w4ax_scale_map(tile, &a.scales, w, &box)))
        return QTOOL_UNSUPPORTED;
    return qt_launch_clusters(tile, &a, k->warpgroups * 128 + 128, 1 << a.split_log2, a.dependent,
                              stream);
}
