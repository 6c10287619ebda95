/* Host side of the tile kernel: configurations, tensor maps, launches. */
#include "kernels/cuda/common/plan.h"
#include "kernels/cuda/matmul/tile.h"

#include <math.h>

/* ---- the kernels there are ---------------------------------------------------------------------
 */

const void *qt_tile_instance(enum qt_format format, int kind)
{
    return format <= QT_FORMAT_LAST_GROUPED ? qt_tile_group_instance(format, kind)
                                            : qt_tile_fpx_instance(format, kind);
}

/*
 * Microseconds, see struct qt_tile_kind, in the order of the tables: formats that are looked up, 4
 * bits, and 2 and 3, which take longer to decode than 32 tokens to multiply; integers of 4 bits,
 * without and with zero points, others with a scale per group, and formats with a scale per row.
 * From sweeps of all tiles with nf4, int4 and fp6 on H200s (docs/kernels.md): numbers with which
 * what is planned takes on average 0.1 to 0.4 % longer than the fastest of all. Tiles of 48, 96
 * and 160 to 224 tokens, and those that round, from later sweeps than the others, in which it
 * was 0.05 to 0.2 %. Zero points: where they differ, from products at the power limit
 * (docs/kernels_tried.md). Of 2 and 3 bits those of 128 that round are
 * faster since half of their steps are not looked up (4096 x 4096, 512 tokens: 26.9 us in pairs of
 * 128 x 256, 26.0 in whole tiles of 128 x 128).
 */
enum column { LOOKED_UP, FEW_BITS, INT4, INT4_ZERO, OTHERS, ROWS, COLUMNS };
static const float column_us[QT_TILE_KINDS][COLUMNS] = {
    {.198f, .240f, .193f, .193f, .198f, .240f}, /* 2 warpgroups, 32 tokens */
    {.350f, .375f, .340f, .340f, .350f},        /* 4, 32 */
    {.230f, .240f, .221f, .221f, .230f, .255f}, /* 2, 48 */
    {.255f, .255f, .240f, .240f, .255f, .275f}, /* 2, 64 */
    {.353f, .353f, .328f, .328f, .353f},        /* 3, 64 */
    {.315f, .315f, .294f, .294f, .315f, .324f}, /* 2, 96 */
    {.398f, .398f, .368f, .368f, .398f, .370f}, /* 2, 128 */
    {.568f, .568f, .518f, .535f, .583f, .543f}, /* 3, 128; those looked up round */
    {.460f, .460f, .440f, .440f, .465f, .456f}, /* 2, 160; likewise */
    {.550f, .550f, .540f, .540f, .570f, .565f}, /* 2, 192; likewise */
    {.645f, .645f, .630f, .630f, .650f, .645f}, /* 2, 224; likewise */
    {.720f, .720f, .715f, .765f, .740f, .700f}, /* 2, 256; likewise */
    {.255f, .255f, .262f, .262f, .280f},        /* 2, 64; these and on round */
    {.387f, .380f, .390f, .390f, .430f},        /* 2, 128 */
    {0, 0, .770f, .770f, .720f}};               /* 2, 256 */

/* Groups of 32 channels, which are always rounded. */
static bool is_narrow(const struct qt_shape *s)
{
    return s->groups > 1 && s->group_shift == QT_TILE_ROUNDED_GROUP_LOG2;
}

static bool is_looked_up(const struct qt_shape *s)
{
    return s->format <= QT_FORMAT_LUT4;
}

static enum column column_of(const struct qt_shape *s)
{
    if (s->format > QT_FORMAT_LAST_GROUPED)
        return ROWS;
    if (s->format == QT_FORMAT_INT4)
        return INT4;
    if (s->format == QT_FORMAT_INT4_ZERO)
        return is_narrow(s) ? OTHERS : INT4_ZERO;
    return !is_looked_up(s) ? OTHERS : s->bits == 4 ? LOOKED_UP : FEW_BITS;
}

/* Where zero points are behind the planes of a stage: the end, if there are none. */
static int zeros_at(const struct qt_shape *s, int strips, int blocks)
{
    const int bytes = strips * (blocks * 128 * s->bits + qt_stage_groups(s, blocks) * 32);
    return s->zero_bytes ? (int)round_up((size_t)bytes, 128) : bytes;
}

/* Whether weights are rounded, for m tokens in tiles of so many: see QT_TILE_EXACT_TOKENS. Integers
 * of 8 bits gain by it in the widest alone. Groups of 64 scale sums twice as often as those of 128.
 */
static bool rounds(const struct qt_shape *s, size_t m, int tokens)
{
    const bool many = m > QT_TILE_EXACT_TOKENS;
    if (s->groups == 1)
        return false;
    if (s->bits == 8)
        return is_narrow(s) || (many && tokens == 256);
    return s->group_shift <= 6 || (many && is_looked_up(s));
}

/* The kernel of the same size that does the other. */
static bool has_twin(const struct qt_shape *s, const struct qt_tile_kind kinds[QT_TILE_KINDS],
                     const struct qt_tile_kind *k)
{
    for (int i = 0; i < QT_TILE_KINDS; i++)
        if (kinds[i].warpgroups == k->warpgroups && kinds[i].tokens == k->tokens &&
            kinds[i].rounds != k->rounds && qt_tile_instance(s->format, i))
            return true;
    return false;
}

/* For m tokens. Of groups of 32 channels exact kernels know nothing; of one group those that round
 * make what is exact. */
static struct qt_tile_matrix matrix_of(const struct qt_shape *s, size_t m)
{
#define KIND(warpgroups, tokens, blocks, rounds)                                                   \
    {warpgroups, tokens, blocks, NULL, 0, tokens > 128 ? QT_TILE_WHOLE_WIDE : QT_TILE_WHOLE,       \
     0,          0,      0,      0,    0, rounds},
    static const struct qt_tile_kind lut[QT_TILE_KINDS] = {QT_TILE_LUT_TABLE(KIND)};
    static const struct qt_tile_kind others[QT_TILE_KINDS] = {QT_TILE_EXACT_TABLE(KIND)};
    const struct qt_tile_kind *kinds = is_looked_up(s) ? lut : others;
    const bool narrow = is_narrow(s);
    struct qt_tile_matrix t = {};
    t.strips = s->strips;
    t.blocks = s->blocks;
    for (int i = 0; i < QT_TILE_KINDS; i++) {
        struct qt_tile_kind kind = kinds[i];
        const int strips = 4 * kind.warpgroups;
        const bool wanted = kind.rounds == rounds(s, m, kind.tokens);
        const bool can = kind.rounds ? wanted || s->groups == 1 : !narrow;
        kind.kernel = qt_tile_instance(s->format, i);
        if (!kind.kernel || !s->zero_boxes || !can || (!wanted && has_twin(s, kinds, &kind)))
            continue;
        kind.rounds = wanted && kind.rounds;
        kind.column_us = column_us[i][column_of(s)];
        kind.head_bytes = qt_tile_table_bytes(s->format);
        kind.weight_bytes = zeros_at(s, strips, kind.blocks) +
                            strips * qt_zero_pitch(s, qt_stage_groups(s, kind.blocks));
        t.kinds[t.count++] = kind;
    }
    return t;
}

const struct qt_tile_kind *qt_tile_kind_of(const struct qtool_matmul_plan *p,
                                           const struct qt_tile_matrix *t)
{
    for (int i = 0; i < t->count; i++)
        if (t->kinds[i].warpgroups * 4 == p->config.warps &&
            t->kinds[i].tokens / 8 == p->config.token_tiles)
            return &t->kinds[i];
    return NULL;
}

/* ---- shared memory -----------------------------------------------------------------------------
 */

enum { MAX_TILES = 1 << 30 };

/* config.splits; PAIRS and on: clusters of 2, 4 blocks that share a tile along k. */
enum { WHOLE_TILES = 1, SHARED_TILES = 2, PAIRS = 3, QUADS = 4 };

static int split_log2(int splits)
{
    return splits < PAIRS ? 0 : splits - PAIRS + 1;
}

static int x_bytes(const struct qt_tile_kind *k)
{
    return k->blocks * k->tokens * 128;
}

/* Bytes of weights that a multiprocessor should have under way. With twice as many memory is slower
 * (docs/kernels_tried.md). */
enum { WEIGHTS_AHEAD = 72 << 10 };

/* Stages and offsets; returns the size. Clusters put sums where the ring was, at most as many as a
 * block has. */
static size_t tile_layout(struct qt_tile_base *a, const struct qt_tile_kind *k, int smem_limit)
{
    const int sums_bytes = k->warpgroups * 64 * k->tokens * 4;
    a->stage_bytes = (int)round_up((size_t)(x_bytes(k) + k->weight_bytes), 1024);
    a->ring_at = (int)round_up((size_t)k->head_bytes, 1024);
    const int barrier_bytes = (int)round_up(QT_RING_BARRIER_BYTES, 128);
    const int tail = barrier_bytes + k->warpgroups * QT_TILE_RESULT_BYTES;
    a->stages = (smem_limit - a->ring_at - tail) / a->stage_bytes;
    int ahead = (WEIGHTS_AHEAD + k->weight_bytes / 2) / k->weight_bytes;
    /* w4ax, 28672 x 4096, 16 tokens: 21.5 us with 4 stages, 18.6 with 6. */
    const int least = k->blocks == 1 ? 6 : 3;
    ahead = ahead < least ? least : ahead;
    ahead = ahead < k->stages ? k->stages : ahead < QT_RING_STAGES ? ahead : QT_RING_STAGES;
    a->stages = a->stages < ahead ? a->stages : ahead;
    int ring_bytes = a->stages * a->stage_bytes;
    a->barriers_at = a->ring_at + (ring_bytes > sums_bytes ? ring_bytes : sums_bytes);
    a->results_at = a->barriers_at + barrier_bytes;
    return (size_t)a->barriers_at + (size_t)tail;
}

/* ---- choosing ----------------------------------------------------------------------------------
 */

static int tiles_of(const struct qt_tile_matrix *t, const struct qt_tile_kind *k, size_t m)
{
    size_t tiles =
        ceil_div((size_t)t->strips, 4 * (size_t)k->warpgroups) * ceil_div(m, (size_t)k->tokens);
    return tiles < MAX_TILES ? (int)tiles : MAX_TILES;
}

static int k_stages_of(const struct qt_tile_matrix *t, const struct qt_tile_kind *k)
{
    return (int)ceil_div((size_t)t->blocks, (size_t)k->blocks);
}

/* Thread blocks for that many tiles: one a multiprocessor, if there is work for them. */
static int grid_of(int tiles, int k_stages, int splits, int sms)
{
    if (splits >= PAIRS)
        return tiles << split_log2(splits);
    if (tiles >= sms || (splits == SHARED_TILES && tiles * k_stages >= sms))
        return sms;
    return splits == SHARED_TILES ? tiles * k_stages : tiles;
}

/*
 * Tiles whose stages of k are shared among all blocks: all if there are fewer than two a block,
 * else what remains when the others are dealt out whole, and one for each block more, so that no
 * tile is shared by many.
 */
static int shared_tiles(int tiles, int splits, int blocks)
{
    if (splits != SHARED_TILES || tiles % blocks == 0)
        return 0;
    return tiles < 2 * blocks ? tiles : tiles % blocks + blocks;
}

/* Times of products that are long enough to bring the clock down, over those above: 1.12 to 1.27
 * were seen. qt_dense_is_faster is of such products too. */
static const float warm_factor = 1.18f;

/* Start and end; hand-over of shared tiles: start, and each KB of sums that a block gives, and that
 * it collects. */
static const float start_us = 3, share_us = 2, give_us = .007f, collect_us = .0104f;
/* The same where the blocks of a cluster exchange sums, each KB that a block sends. */
static const float exchange_us = .05f;

static double tile_us(const struct qt_tile_matrix *t, const struct qt_tile_kind *k, int splits,
                      size_t m, int sms)
{
    int tiles = tiles_of(t, k, m), k_stages = k_stages_of(t, k);
    int grid = grid_of(tiles, k_stages, splits, sms), shared = shared_tiles(tiles, splits, grid);
    double start = start_us + k->before_us, block_us = k->blocks * k->column_us;
    int kilobytes = k->warpgroups * 64 * k->tokens * 4 / 1024;
    if (splits >= PAIRS) {
        const int blocks = 1 << split_log2(splits);
        return start + exchange_us * kilobytes * (blocks - 1) / blocks +
               (double)ceil_div((size_t)k_stages, (size_t)blocks) * block_us * k->whole_factor;
    }
    double whole = (double)ceil_div((size_t)(tiles - shared), (size_t)grid) * k_stages;
    if (shared == 0)
        return start + whole * block_us * k->whole_factor;
    int others = shared < grid ? (int)ceil_div((size_t)grid, (size_t)shared) : 1;
    double us = (whole * k->whole_factor + ceil((double)shared * k_stages / grid)) * block_us;
    us += (collect_us * others + give_us * shared / grid) * kilobytes;
    return start + share_us + k->shared_us + fmax(us, k->serial_us);
}

/* Each block has stages of k, and at least 8 tokens to finish. A cluster is within a part of the
 * device (GPC): of an H200's 132 multiprocessors 32 clusters of 4 are not to be had at a time, and
 * what comes later takes as long again (nf4, 4096 x 4096, 32 tokens: 12.7 us, shared tiles 8.7). */
static bool can_cluster(const struct qtool_matmul_plan *p, const struct qt_tile_matrix *t,
                        const struct qt_tile_kind *k, int splits)
{
    const int log2 = split_log2(splits);
    const int clusters = log2 > 1 ? (p->sms >> log2) * 7 / 8 : p->sms >> log2;
    return tiles_of(t, k, p->m) <= clusters && k_stages_of(t, k) >= 1 << log2 &&
           k->tokens % (8 << log2) == 0;
}

/* The kernel divides numbers of (tile, stage) pairs by multiplying with k_stages_inverse. */
static bool can_share(const struct qtool_matmul_plan *p, const struct qt_tile_matrix *t,
                      const struct qt_tile_kind *k)
{
    size_t k_stages = (size_t)k_stages_of(t, k);
    return 2 * (size_t)p->sms * k_stages * k_stages < 1u << 31;
}

/* Tiles of 96, 160 and 224 tokens are for one or two of them, or where no block has a second tile.
 * Of more the others waste no more, and such products are long, at the power limit, where these
 * times, of short ones, are too good: int4, 14336 x 4096, 1024 tokens: 184 us in tiles of 128 x
 * 160, 161 in tiles of 192 x 128. */
static bool fits(const struct qtool_matmul_plan *p, const struct qt_tile_matrix *t,
                 const struct qt_tile_kind *k)
{
    return k->tokens <= 64 || k->tokens % 64 == 0 || qt_tile_short(k->tokens, p->m) ||
           tiles_of(t, k, p->m) <= p->sms;
}

bool qt_tile_choose_kind(struct qtool_matmul_plan *p, const struct qt_tile_matrix *t, double *us)
{
    double best = 1e300;
    if (p->cc != 90)
        return false;
    for (int i = 0; i < QUADS * t->count; i++) {
        const struct qt_tile_kind *k = &t->kinds[i / QUADS];
        int splits = WHOLE_TILES + i % QUADS;
        if (!fits(p, t, k) || (splits == SHARED_TILES && !can_share(p, t, k)) ||
            (splits >= PAIRS && !can_cluster(p, t, k, splits)))
            continue;
        double this_us = tile_us(t, k, splits, p->m, p->sms);
        if (this_us >= best)
            continue;
        best = this_us;
        p->config.path = QTOOL_MATMUL_TILE;
        p->config.token_tiles = k->tokens / 8;
        p->config.warps = p->config.strips_cta = k->warpgroups * 4;
        p->config.splits = splits;
        p->config.warps_k = p->config.strips = 1;
    }
    if (best == 1e300)
        return false;
    *us = best * warm_factor;
    return true;
}

bool qt_tile_choose(struct qtool_matmul_plan *p, const struct qt_shape *s, double *us)
{
    const struct qt_tile_matrix t = matrix_of(s, p->m);
    return qt_tile_choose_kind(p, &t, us);
}

/* ---- plan --------------------------------------------------------------------------------------
 */

static size_t partial_bytes(const struct qtool_matmul_plan *p, const struct qt_tile_kind *k)
{
    return (size_t)p->grid_x * (size_t)k->warpgroups * 64 * (size_t)k->tokens * 4;
}

size_t qt_tile_workspace(const struct qtool_matmul_plan *p, const struct qt_tile_matrix *t)
{
    const struct qt_tile_kind *k = qt_tile_kind_of(p, t);
    bool shared = shared_tiles(tiles_of(t, k, p->m), p->config.splits, p->grid_x) > 0;
    return QTOOL_WORKSPACE_ZEROED + (shared ? partial_bytes(p, k) : 0);
}

int qt_tile_check_config(struct qtool_matmul_plan *p, const struct qt_tile_matrix *t)
{
    struct qt_tile_base a = {};
    const struct qtool_matmul_config *c = &p->config;
    if (p->cc != 90)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "tile kernels need compute capability 9.0");
    const struct qt_tile_kind *k = qt_tile_kind_of(p, t);
    if (!k)
        return qt_refuse(p, QTOOL_UNSUPPORTED,
                         "no tile kernel of %d warps and %d x 8 tokens for this matrix", c->warps,
                         c->token_tiles);
    p->kernel = k->kernel;
    p->smem_bytes = tile_layout(&a, k, p->smem_limit);
    int tiles = tiles_of(t, k, p->m);
    if (c->splits < WHOLE_TILES || c->splits > QUADS)
        return qt_refuse(p, QTOOL_UNSUPPORTED,
                         "splits must be 1 (whole tiles), 2 (shared), 3 or 4 (clusters of 2 or 4 "
                         "blocks)");
    if (c->splits >= PAIRS && !can_cluster(p, t, k, c->splits))
        return qt_refuse(p, QTOOL_UNSUPPORTED,
                         "%d tiles of %d tokens are not for clusters of %d blocks", tiles,
                         k->tokens, 1 << split_log2(c->splits));
    if (c->splits == SHARED_TILES && !can_share(p, t, k))
        return qt_refuse(p, QTOOL_UNSUPPORTED, "k = %zu is too large to share tiles", p->k);
    if (a.stages < 2)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "too little shared memory");
    if (tiles == MAX_TILES)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "too many tiles of %d x %d", k->warpgroups * 64,
                         k->tokens);
    p->grid_x = grid_of(tiles, k_stages_of(t, k), c->splits, p->sms);
    p->grid_y = 1;
    p->workspace_bytes = qt_tile_workspace(p, t);
    return qt_need_tensor_maps(p);
}

int qt_tile_check(struct qtool_matmul_plan *p, const struct qt_shape *s)
{
    const struct qt_tile_matrix t = matrix_of(s, p->m);
    int rc = qt_tile_check_config(p, &t);
    if (rc != QTOOL_OK)
        return rc;
    p->rounded = qt_tile_kind_of(p, &t)->rounds;
    p->rounded_exp2 = p->kind != QTOOL_MATMUL_INT ? 0
                      : p->bits == 4              ? QT_INT4_EXP2 - QT_INT4_ROUND_EXP2
                                                  : -QT_INT8_ROUND_EXP2;
    if (qt_prepare_needed(p))
        p->workspace_bytes += qt_prepare_bytes(p);
    else if (p->workspace_bytes == QTOOL_WORKSPACE_ZEROED)
        p->workspace_bytes = 0; /* nothing is shared */
    return QTOOL_OK;
}

/* ---- run ---------------------------------------------------------------------------------------
 */

bool qt_tile_fill(struct qt_tile_base *a, const struct qtool_matmul_plan *p,
                  const struct qt_tile_matrix *t, void *y, void *workspace)
{
    const struct qt_tile_kind *k = qt_tile_kind_of(p, t);
    if (!k || tile_layout(a, k, p->smem_limit) > p->smem_bytes)
        return false;
    a->y = y;
    a->m = (int)p->m;
    a->n = (int)p->n;
    a->strips = t->strips;
    a->row_tiles = (int)ceil_div((size_t)t->strips, 4 * (size_t)k->warpgroups);
    a->token_tiles = (int)ceil_div(p->m, (size_t)k->tokens);
    a->band = 16;
    a->split_log2 = split_log2(p->config.splits);
    a->k_stages = k_stages_of(t, k);
    a->k_stages_inverse = (unsigned)ceil_div(1u << 31, (size_t)a->k_stages);
    a->shared_tiles = shared_tiles(a->row_tiles * a->token_tiles, p->config.splits, p->grid_x);
    a->range = a->shared_tiles * a->k_stages / p->grid_x;
    a->ranges_longer = a->shared_tiles * a->k_stages % p->grid_x;
    const int whole = a->row_tiles * a->token_tiles - a->shared_tiles;
    const int takers = p->grid_x >> a->split_log2;
    a->whole_tiles = whole / takers;
    a->blocks_with_more = whole % takers;
    a->ready = (unsigned *)workspace;
    a->partial = (float *)((char *)workspace + QTOOL_WORKSPACE_ZEROED);
    a->bf16 = p->options.dtype == QTOOL_BF16;
    a->whole_stores = p->n % 8 == 0 && (size_t)y % 16 == 0;
    return true;
}

bool qt_tile_x_maps(struct qt_tile_base *a, const struct qtool_matmul_plan *p,
                    const struct qt_tile_kind *k, const void *x, size_t k_blocks)
{
    /* Few lines that are not there cost less than another copy (docs/kernels.md). */
    const int left = (int)(p->m % (size_t)k->tokens);
    a->cut_tokens = left && k->tokens - left > 16 ? left : 0;
    return qt_x_map(p, &a->x, x, k_blocks, k->tokens, k->blocks) &&
           (!a->cut_tokens || qt_x_map(p, &a->x_cut, x, k_blocks, a->cut_tokens, 1));
}

int qt_tile_run(const struct qtool_matmul_plan *p, const struct qt_shape *s,
                const struct qtool_matmul_weight *w, void *y, const void *x, void *workspace,
                void *stream)
{
    struct qt_tile_args a = {};
    const struct qt_tile_matrix t = matrix_of(s, p->m);
    const struct qt_tile_kind *k = qt_tile_kind_of(p, &t);
    if (!qt_tile_fill(&a, p, &t, y, workspace))
        return QTOOL_UNSUPPORTED;
    a.decode = qt_decode_args_of(w);
    a.scale = (const __half *)w->scale;
    a.pitch_groups = s->pitch_groups;
    a.group_shift = s->group_shift;
    a.row_scales = s->groups == 1;
    a.stage_groups = qt_stage_groups(s, k->blocks);
    a.zeros_at = x_bytes(k) + zeros_at(s, 4 * k->warpgroups, k->blocks);
    a.zero_pitch = qt_zero_pitch(s, a.stage_groups);
    /* What is copied: not the gap before zero points. */
    a.weight_tx =
        4 * k->warpgroups * (k->blocks * 128 * s->bits + a.stage_groups * 32 + a.zero_pitch);
    a.factor = p->rounded ? ldexpf(1, w->scale_exp2 + p->rounded_exp2) : qt_result_factor(w);
    a.dependent = p->options.dependent_launch || qt_prepare_needed(p);
    int rc = qt_prepare_run(p, &x, &a.token_factor, (char *)workspace + qt_tile_workspace(p, &t),
                            stream);
    if (rc != QTOOL_OK)
        return rc;
    if (!qt_tile_x_maps(&a, p, k, x, (size_t)s->blocks) ||
        !qt_weight_maps(p, a.plane, &a.scales, &a.zeros, s, w, 4 * k->warpgroups, k->blocks,
                        a.stage_groups))
        return QTOOL_UNSUPPORTED;
    return qt_launch_clusters(p, &a, k->warpgroups * 128 + 128, 1 << a.split_log2, a.dependent,
                              stream);
}
