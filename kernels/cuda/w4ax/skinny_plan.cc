/* Host side of the skinny w4ax kernel: configurations, launches. */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/w4ax/skinny.h"

#include <math.h>
#include <stdio.h>

/* Of a tile; bytes of weights that should be under way. */
enum { LARGEST_TILE = 7, AHEAD_BYTES = 64 << 10 };

static int strips_of(const struct qtool_w4ax_plan *p)
{
    return (int)ceil_div(p->n, QT_STRIP_ROWS);
}

static struct qtool_matmul_plan skinny_plan_of(const struct qtool_w4ax_plan *p)
{
    const struct qtool_w4ax_config *c = &p->config;
    struct qtool_matmul_plan s = qt_w4ax_launch_plan(p, QTOOL_MATMUL_SKINNY);
    s.config.token_tiles = c->tokens / 8;
    s.config.strips = c->strips;
    s.config.warps = c->warps;
    s.config.warps_k = c->warps_k;
    s.config.strips_cta = c->strips_cta;
    s.config.depth = c->depth;
    s.config.splits = s.config.parts = 1;
    return s;
}

/* Offsets in a stage; returns what the kernel wants. Of codes and scales there is room for as many
 * strips as the warps have: what they make of those that a tile lacks is not used. */
static struct qt_skinny_room room_for(struct qt_w4ax_skinny_args *a, enum qtool_w4ax_scales scales,
                                      const struct qtool_matmul_config *c, size_t m)
{
    const int scale_bytes = qt_w4ax_scale_bytes(scales);
    const int strips = c->warps / c->warps_k * c->strips, tile = qt_skinny_tile_strips(c);
    struct qt_skinny_room room = {};
    a->planes_at[0] = qt_skinny_x_bytes(c, m);
    a->slot_bytes = strips * QT_W4AX_SLOT_BLOCKS * QT_W4AX_STRIP_BYTES;
    a->scales_at = a->planes_at[0] + QT_SKINNY_SLOTS * a->slot_bytes;
    a->token_scales_at =
        (int)round_up((size_t)(a->scales_at + strips * QT_SKINNY_BLOCKS * scale_bytes), 128);
    if (scales == QTOOL_W4AX_BLOCK)
        a->token_pitch = (int)round_up((size_t)qt_skinny_x_rows(c, m), 4) * 4;
    room.stage_bytes =
        (int)round_up((size_t)(a->token_scales_at + QT_SKINNY_BLOCKS * a->token_pitch), 1024);
    a->stage_tx = a->planes_at[0] + tile * QT_SKINNY_BLOCKS * (QT_W4AX_STRIP_BYTES + scale_bytes) +
                  QT_SKINNY_BLOCKS * a->token_pitch;
    room.weight_bytes = tile * QT_SKINNY_BLOCKS * QT_W4AX_STRIP_BYTES;
    room.ahead_bytes = AHEAD_BYTES;
    room.tail_bytes = scales == QTOOL_W4AX_BLOCK ? 0 : c->strips_cta * 32; /* scales of rows */
    return room;
}

/* ---- plan --------------------------------------------------------------------------------------
 */

/*
 * One strip a warp, as many warps along k as there is room for. Over 17 matrices and 1 to 32 tokens
 * that takes on average 0.5 to 1.2 % longer than what is fastest there. Of tiles of two strips
 * warps have both, up to 16 tokens: 4096 x 4096 2 to 4 % faster.
 */
static void choose_config(struct qtool_w4ax_config *c, size_t m, int cta)
{
    const int tiles = (int)ceil_div((size_t)cta, LARGEST_TILE);
    const int tile_strips = (int)ceil_div((size_t)cta, (size_t)tiles);
    *c = {};
    c->kernel = QTOOL_W4AX_SKINNY;
    c->tokens = (int)round_up(m, 8);
    c->strips_cta = tile_strips * tiles;
    c->strips = tile_strips == 2 && m <= 16 ? 2 : 1;
    const int rows = tile_strips / c->strips;
    c->warps_k = 8;
    while (c->warps_k * rows > QT_W4AX_SKINNY_WARPS)
        c->warps_k /= 2;
    c->warps = c->warps_k * rows;
}

/* Whether tiles of 128 rows are faster, where blocks have so many strips. us, skinny and tiles, 16
 * tokens, INT, 14336 x 4096 (7 strips) 11.1, 10.3, 18944 x 3584 (9) 12.5, 13.7; 24 tokens, BLOCK,
 * 12288 x 4096 (6) 10.6, 11.4, 14336 x 4096 12.0, 11.9, INT, 6144 x 4096 (3) 6.8, 7.6, 8192 x 8192
 * (4) 12.5, 12.2; 32 tokens, BLOCK, 6144 x 4096 7.3, 8.1, 8192 x 8192 13.5, 12.7. */
static bool tiles_are_faster(enum qtool_w4ax_scales scales, size_t m, int strips)
{
    const bool block = scales == QTOOL_W4AX_BLOCK;
    return m <= 8    ? false
           : m <= 16 ? !block && (strips == 7 || strips == 8)
           : m <= 24 ? strips > (block ? 6 : 3)
                     : strips > 3;
}

bool qt_w4ax_skinny_choose(struct qtool_w4ax_plan *p)
{
    struct qt_w4ax_skinny_args a = {};
    const int cta = (int)ceil_div((size_t)strips_of(p), (size_t)p->sms);
    if (p->cc != 90 || p->options.packed || p->m > QT_W4AX_SKINNY_TOKENS)
        return false;
    if (p->options.kernel != QTOOL_W4AX_SKINNY && tiles_are_faster(p->scales, p->m, cta))
        return false;
    choose_config(&p->config, p->m, cta);
    const struct qtool_matmul_plan s = skinny_plan_of(p);
    const struct qt_skinny_room room = room_for(&a, p->scales, &s.config, p->m);
    p->config.depth = qt_skinny_depth(&s, &s.config, &room, p->m);
    return p->config.depth > 0;
}

static int check(struct qtool_w4ax_plan *p, struct qtool_matmul_plan *s)
{
    struct qt_w4ax_skinny_args a = {};
    int rc = qt_skinny_check_config(s, strips_of(p), QT_W4AX_SKINNY_TOKENS / 8);
    if (rc != QTOOL_OK)
        return rc;
    if (p->config.tokens % 8 != 0)
        return qt_refuse(s, QTOOL_UNSUPPORTED, "tokens must be a multiple of 8");
    if (p->options.packed || p->m > (size_t)p->config.tokens)
        return qt_refuse(s, QTOOL_UNSUPPORTED,
                         "the skinny kernel needs blocks that are not packed and at most 32 "
                         "tokens");
    if (s->config.warps > QT_W4AX_SKINNY_WARPS)
        return qt_refuse(s, QTOOL_UNSUPPORTED, "at most %d warps", QT_W4AX_SKINNY_WARPS);
    s->kernel = qt_w4ax_skinny_instance(p->scales, s->config.token_tiles, s->config.strips);
    const struct qt_skinny_room room = room_for(&a, p->scales, &s->config, s->m);
    rc = qt_skinny_check_room(s, qt_skinny_layout(&a, &s->config, &room, s->m), strips_of(p),
                              p->options.dependent_launch);
    return rc != QTOOL_OK ? rc : qt_allow_smem(s->kernel, s->smem_bytes, s->reason);
}

int qt_w4ax_skinny_check(struct qtool_w4ax_plan *p)
{
    p->launch = skinny_plan_of(p);
    p->workspace_bytes = 0;
    int rc = check(p, &p->launch);
    snprintf(p->reason, sizeof p->reason, "%s", p->launch.reason);
    return rc;
}

/* ---- run ---------------------------------------------------------------------------------------
 */

int qt_w4ax_skinny_run(const struct qtool_w4ax_plan *p, const struct qtool_w4ax_weight *w,
                       const struct qtool_w4ax_acts *acts, void *y, void *stream)
{
    struct qt_w4ax_skinny_args a = {};
    const struct qtool_matmul_plan *s = &p->launch;
    const struct qt_skinny_room room = room_for(&a, p->scales, &s->config, p->m);
    const size_t blocks = ceil_div(p->k, QTOOL_W4AX_BLOCK_COLS);
    if (qt_skinny_layout(&a, &s->config, &room, p->m) > s->smem_bytes)
        return QTOOL_UNSUPPORTED; /* not planned */
    qt_skinny_fill(&a, s, strips_of(p), blocks, y);
    a.factor = ldexpf(1, w->scale_exp2 - (p->scales == QTOOL_W4AX_INT ? 0 : 4)); /* w4ax_unpack */
    a.row_scale = (const __half *)w->row_scale;
    a.x_sum = acts->sum;
    a.token_factor = p->scales == QTOOL_W4AX_BLOCK ? NULL : acts->scale;
    a.nibbles = W4AX_NIBBLES;
    a.dependent = p->options.dependent_launch;
    a.f32 = p->options.output == QTOOL_W4AX_F32;
    const struct qt_w4ax_box x = {a.x_rows, QT_SKINNY_BLOCKS, 0};
    const struct qt_w4ax_box scales = {a.token_pitch / 4, QT_SKINNY_BLOCKS, a.tile_strips};
    const struct qt_w4ax_box codes = {0, QT_W4AX_SLOT_BLOCKS, a.tile_strips};
    if (!qt_w4ax_x_map(s, &a.x, acts, &x) ||
        (p->scales == QTOOL_W4AX_BLOCK &&
         !qt_w4ax_token_scale_map(s, &a.token_scales, acts, &scales)) ||
        !qt_w4ax_code_map(s, &a.codes, w, &codes) ||
        (p->scales != QTOOL_W4AX_ROW && !qt_w4ax_scale_map(s, &a.scales, w, &scales)))
        return QTOOL_UNSUPPORTED;
    return qt_launch(s, &a, p->config.warps * 32 + QT_RING_COPIERS, a.dependent, stream);
}
