/* The mix24 skinny kernel's plan: choice of a configuration, arguments, launches. */
#include "kernels/cuda/common/prepare.h"
#include "kernels/cuda/common/tensor_map.h"
#include "kernels/cuda/mix24/skinny.h"

#include <math.h>

/* ---- memory --------------------------------------------------------------------------------- */

/* Sets the offsets in a stage and after the partial sums, and returns the shared memory that the
 * kernel needs. */
static struct qt_skinny_room room_for(struct qt_mix24_skinny_args *a,
                                      const struct qtool_matmul_weight *w,
                                      const struct qtool_skinny_config *c, size_t m)
{
    const int strips = c->warps / c->warps_k * c->strips;
    const size_t tile = (size_t)qt_skinny_tile_strips(c);
    struct qt_skinny_room room = {};
    a->weights_at = qt_skinny_x_bytes(c, m);
    a->unit_bytes = (int)round_up((size_t)(strips * mix24_unit_bytes(w->mix24.fours > 0)), 128);
    room.stage_bytes =
        (int)round_up((size_t)(a->weights_at + QT_SKINNY_SLOTS * a->unit_bytes), 1024);
    room.weight_bytes =
        (int)(QT_SKINNY_SLOTS * tile * qt_mix24_strip_bytes(w) / (size_t)qt_mix24_units(w));
    /* 46 KB of weights: 8192 x 8192, 16 tokens, 18.4 us; with 70 KB 21.1. At most 96 KB of stages,
     * as X is a large part of a stage at 16 tokens: 4096 x 4096, 7.3 us with 8 stages of 12 KB, 8.1
     * with 16. */
    const int ahead = 46 << 10, pipeline = 96 << 10;
    const int share = (int)((long long)pipeline * room.weight_bytes / room.stage_bytes);
    room.ahead_bytes = ahead < share ? ahead : share;
    a->outlier_bytes = qt_skinny_sums_pitch(c) * (int)m * 4;
    if (w->mix24.csr_ptr)
        room.tail_bytes = a->outlier_bytes * (qt_skinny_tiles(c) > 1 ? 2 : 1);
    return room;
}

/* Offsets in the workspace: X in packed order, its transpose, prepared X. */
struct workspace {
    size_t rows, columns, prepared, bytes;
};

static struct workspace workspace_for(const struct qtool_matmul_plan *p,
                                      const struct qtool_matmul_weight *w)
{
    struct workspace at;
    const size_t column_bytes = (size_t)p->config.skinny.token_tiles * 16;
    const size_t cols = (size_t)qt_mix24_units(w) * QT_MIX24_UNIT_COLS;
    at.rows = QTOOL_WORKSPACE_ZEROED;
    at.columns = round_up(at.rows + p->m * cols * 2, 256);
    at.prepared = at.columns + (w->mix24.csr_ptr ? cols * column_bytes : 0);
    at.bytes = at.prepared + qt_prepare_bytes(p);
    return at;
}

/* Returns the strips of the last warp for which a kernel exists. */
static int last_of(const struct qtool_skinny_config *c)
{
    return c->strips == 2 ? qt_skinny_last(c) : c->strips;
}

/* Returns the number of outlier warps. */
static int outlier_warps(const struct qtool_skinny_config *c)
{
    const int most = qt_mix24_skinny_warps(c->token_tiles, c->strips, last_of(c));
    const int rest = most - c->warps - QT_PRODUCER_THREADS / 32;
    return rest < QT_MIX24_OUTLIER_WARPS ? rest : QT_MIX24_OUTLIER_WARPS;
}

/* ---- plan ----------------------------------------------------------------------------------- */

/* Returns the plan of the launch that begins at token t: 16 tokens at a time. */
static struct qtool_matmul_plan chunk_of(const struct qtool_matmul_plan *p, size_t t)
{
    struct qtool_matmul_plan chunk = *p;
    chunk.m = p->m - t < QT_SKINNY_MAX_TOKENS ? p->m - t : QT_SKINNY_MAX_TOKENS;
    return chunk;
}

bool qt_mix24_skinny_choose(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w)
{
    struct qt_mix24_skinny_args a = {};
    if (qt_state(p)->cc != 90)
        return false;
    const struct qtool_matmul_plan first = chunk_of(p, 0);
    const struct qt_skinny_choice choice = {QT_SKINNY_TILE, 2, false, false, false};
    struct qtool_skinny_config c = qt_skinny_config(p, qt_mix24_strips(w), &choice);
    const int tile_strips = qt_skinny_tile_strips(&c);
    /* 8 warps, as 16 would leave 2 for outliers. us for 8 and 16 tokens: 8192 x 8192 13.1 and 15.1,
     * with 16 warps 15.3 and 17.6; 16384 x 4096 13.4 and 15.4, with 16 warps 16.9 and 19.4. */
    if (tile_strips == 4 || tile_strips == 8) {
        c.strips = 4;
        c.warps = 8;
        c.warps_k = 32 / tile_strips;
    }
    const struct qt_skinny_room room = room_for(&a, w, &c, first.m);
    c.depth = qt_skinny_depth(&first, &c, &room, first.m);
    if (c.depth == 0)
        return false;
    p->config = {};
    p->config.path = QTOOL_MATMUL_SKINNY;
    p->config.skinny = c;
    return true;
}

int qt_mix24_skinny_check(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w)
{
    struct qt_mix24_skinny_args a = {};
    const struct qtool_skinny_config *c = &p->config.skinny;
    int rc = qt_skinny_check_config(p, qt_mix24_strips(w), QT_SKINNY_MAX_TOKENS / 8);
    if (rc != QTOOL_OK)
        return rc;
    if (outlier_warps(c) < QT_MIX24_OUTLIER_LEAST)
        return qt_refuse(p, QTOOL_UNSUPPORTED,
                         "warps is %d, which leaves too few warps for outliers", c->warps);
    qt_state(p)->kernel = qt_mix24_skinny_instance(c->token_tiles, c->strips, last_of(c));
    const struct qtool_matmul_plan first = chunk_of(p, 0);
    p->workspace_bytes = workspace_for(&first, w).bytes;
    const struct qt_skinny_room room = room_for(&a, w, c, first.m);
    return qt_skinny_check_room(p, qt_skinny_layout(&a, c, &room, first.m), qt_mix24_strips(w),
                                true);
}

/* ---- run ------------------------------------------------------------------------------------ */

/* Sets the arguments except the tensor maps. p has the tokens of this launch; tokens: those of the
 * first one, whose shared memory the plan has. Returns the size of the shared memory. */
static size_t set_args(struct qt_mix24_skinny_args *a, const struct qtool_matmul_plan *p,
                       size_t tokens, const struct qtool_matmul_weight *w, void *y)
{
    const struct qtool_skinny_config *c = &p->config.skinny;
    const struct qt_skinny_room room = room_for(a, w, c, tokens);
    a->units = qt_mix24_units(w);
    a->fours = (int)w->mix24.fours;
    qt_skinny_fill(a, p, qt_mix24_strips(w), 2 * (size_t)a->units, y);
    a->outliers = qt_mix24_outliers_of(w);
    if (a->outliers.ptr)
        a->outliers.warps = outlier_warps(c);
    a->step_rest = c->warps_k * a->fours % a->units;
    a->factor = ldexpf(1, w->scale_exp2);
    a->dependent = true;
    return qt_skinny_layout(a, c, &room, tokens);
}

static int run_chunk(const struct qtool_matmul_plan *p, size_t tokens,
                     const struct qtool_matmul_weight *w, void *y, const void *x, void *workspace,
                     void *stream)
{
    struct qt_mix24_skinny_args a = {};
    const struct workspace at = workspace_for(p, w);
    char *space = (char *)workspace;
    if (at.bytes > p->workspace_bytes || set_args(&a, p, tokens, w, y) > qt_state(p)->smem_bytes ||
        !qt_x_map(p, &a.x, space + at.rows, 2 * (size_t)a.units, a.x_rows, QT_SKINNY_BLOCKS) ||
        !qt_mix24_record_maps(p, a.records, w, a.tile_strips))
        return QTOOL_UNSUPPORTED;
    const struct qt_mix24_gathered to = {space + at.rows,
                                         a.outliers.ptr ? space + at.columns : NULL,
                                         (size_t)p->config.skinny.token_tiles * 8,
                                         false,
                                         NULL,
                                         space + at.prepared};
    a.outliers.columns = (const __half *)to.columns;
    int rc = qt_mix24_gather(p, w, &to, x, &a.token_factor, stream);
    if (rc != QTOOL_OK)
        return rc;
    return qt_launch(p, &a, (p->config.skinny.warps + a.outliers.warps) * 32 + QT_PRODUCER_THREADS,
                     true, stream);
}

int qt_mix24_skinny_run(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                        void *y, const void *x, void *workspace, void *stream)
{
    int rc = QTOOL_OK;
    for (size_t t = 0; t < p->m && rc == QTOOL_OK; t += QT_SKINNY_MAX_TOKENS) {
        const struct qtool_matmul_plan chunk = chunk_of(p, t);
        rc = run_chunk(&chunk, chunk_of(p, 0).m, w, (char *)y + t * p->n * 2,
                       (const char *)x + t * p->k * 2, workspace, stream);
    }
    return rc;
}
