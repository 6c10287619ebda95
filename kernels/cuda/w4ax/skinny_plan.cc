/* The w4ax skinny kernel's plan: choice of a configuration, arguments, launch. */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/w4ax/skinny.h"

#include <math.h>

/* Maximum strips of a tile; bytes of weights that should be in flight. */
enum { LARGEST_TILE = 7, AHEAD_BYTES = 64 << 10 };

static int strips_of(const struct qtool_w4ax_plan *p)
{
    return (int)ceil_div(p->n, QT_STRIP_ROWS);
}

static struct qtool_matmul_plan skinny_plan_of(const struct qtool_w4ax_plan *p)
{
    struct qtool_matmul_plan s = qt_w4ax_launch_plan(p, QTOOL_MATMUL_SKINNY);
    s.config.skinny = p->config.skinny;
    return s;
}

/* Sets the offsets in a stage and returns the shared memory that the kernel needs. Codes and scales
 * have room for the strips of all warps. If a tile has fewer strips, results of the others are not
 * used. */
static struct qt_skinny_room room_for(struct qt_w4ax_skinny_args *a, enum qtool_w4ax_scales scales,
                                      const struct qtool_skinny_config *c, size_t m)
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
    room.tail_bytes = scales == QTOOL_W4AX_BLOCK ? 0 : c->strips_cta * 32; /* row scales */
    return room;
}

/* ---- plan ----------------------------------------------------------------------------------- */

/*
 * Gives a warp one strip, with as many warps along k as possible. Over 17 matrices and 1 to 32
 * tokens this takes on average 0.5 to 1.2 % longer than the fastest configuration. In tiles of two
 * strips with up to 16 tokens a warp has both: 4096 x 4096 is 2 to 4 % faster.
 */
static void choose_config(struct qtool_skinny_config *c, size_t m, int cta)
{
    const int tiles = (int)ceil_div((size_t)cta, LARGEST_TILE);
    const int tile_strips = (int)ceil_div((size_t)cta, (size_t)tiles);
    *c = {};
    c->token_tiles = (int)ceil_div(m, 8);
    c->strips_cta = tile_strips * tiles;
    c->strips = tile_strips == 2 && m <= 16 ? 2 : 1;
    const int rows = tile_strips / c->strips;
    c->warps_k = 8;
    while (c->warps_k * rows > QT_W4AX_SKINNY_WARPS)
        c->warps_k /= 2;
    c->warps = c->warps_k * rows;
}

/* True if the tile kernel with tiles of 128 rows is faster. strips: per thread block of the skinny
 * kernel. us of the skinny and of the tile kernel: 16 tokens, INT, 14336 x 4096 (7 strips) 11.1,
 * 10.3, 18944 x 3584 (9) 12.5, 13.7; 24 tokens, BLOCK, 12288 x 4096 (6) 10.6, 11.4, 14336 x 4096
 * 12.0, 11.9, INT, 6144 x 4096 (3) 6.8, 7.6, 8192 x 8192 (4) 12.5, 12.2; 32 tokens, BLOCK, 6144 x
 * 4096 7.3, 8.1, 8192 x 8192 13.5, 12.7. */
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
    const int cta = (int)ceil_div((size_t)strips_of(p), (size_t)qt_state(p)->sms);
    if (qt_state(p)->cc != 90 || p->options.packed || p->m > QT_W4AX_SKINNY_TOKENS)
        return false;
    if (p->options.kernel != QTOOL_W4AX_SKINNY && tiles_are_faster(p->scales, p->m, cta))
        return false;
    struct qtool_skinny_config *c = &p->config.skinny;
    p->config = {};
    p->config.kernel = QTOOL_W4AX_SKINNY;
    choose_config(c, p->m, cta);
    const struct qtool_matmul_plan s = skinny_plan_of(p);
    const struct qt_skinny_room room = room_for(&a, p->scales, c, p->m);
    c->depth = qt_skinny_depth(&s, c, &room, p->m);
    return c->depth > 0;
}

static int check(struct qtool_w4ax_plan *p, struct qtool_matmul_plan *s)
{
    struct qt_w4ax_skinny_args a = {};
    const struct qtool_skinny_config *c = &s->config.skinny;
    struct qt_plan_state *state = qt_state(s);
    int rc = qt_skinny_check_config(s, strips_of(p), QT_W4AX_SKINNY_TOKENS / 8);
    if (rc != QTOOL_OK)
        return rc;
    if (p->options.packed || p->m > (size_t)c->token_tiles * 8)
        return qt_refuse(s, QTOOL_UNSUPPORTED,
                         "the skinny kernel needs options.packed to be 0 and at most 32 tokens");
    if (c->warps > QT_W4AX_SKINNY_WARPS)
        return qt_refuse(s, QTOOL_UNSUPPORTED, "warps must be at most %d", QT_W4AX_SKINNY_WARPS);
    state->kernel = qt_w4ax_skinny_instance(p->scales, c->token_tiles, c->strips);
    const struct qt_skinny_room room = room_for(&a, p->scales, c, s->m);
    rc = qt_skinny_check_room(s, qt_skinny_layout(&a, c, &room, s->m), strips_of(p),
                              p->options.dependent_launch);
    return rc != QTOOL_OK ? rc : qt_allow_smem(state->kernel, state->smem_bytes, s->reason);
}

int qt_w4ax_skinny_check(struct qtool_w4ax_plan *p)
{
    struct qtool_matmul_plan *launch = &qt_state(p)->launch;
    *launch = skinny_plan_of(p);
    p->workspace_bytes = 0;
    int rc = check(p, launch);
    return qt_w4ax_refuse(p, rc, launch->reason);
}

/* ---- run ------------------------------------------------------------------------------------ */

int qt_w4ax_skinny_run(const struct qtool_w4ax_plan *p, const struct qtool_w4ax_weight *w,
                       const struct qtool_w4ax_acts *acts, void *y, void *stream)
{
    struct qt_w4ax_skinny_args a = {};
    const struct qtool_matmul_plan *s = &qt_state(p)->launch;
    const struct qtool_skinny_config *c = &p->config.skinny;
    const struct qt_skinny_room room = room_for(&a, p->scales, c, p->m);
    const size_t blocks = ceil_div(p->k, QTOOL_W4AX_BLOCK_COLS);
    if (qt_skinny_layout(&a, c, &room, p->m) > qt_state(s)->smem_bytes)
        return QTOOL_UNSUPPORTED;
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
    return qt_launch(s, &a, c->warps * 32 + QT_PRODUCER_THREADS, a.dependent, stream);
}
