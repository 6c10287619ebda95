/* The tile kernel's plan, and the parts of it that the tile kernels of mix24 and w4ax share. */
#include "kernels/cuda/common/prepare.h"
#include "kernels/cuda/common/tensor_map.h"
#include "kernels/cuda/matmul/matmul.h"
#include "kernels/cuda/matmul/tile.h"

#include <math.h>

/* ---- instances ------------------------------------------------------------------------------ */

const void *qt_tile_instance(enum qt_format format, int kind)
{
    return format <= QT_FORMAT_LAST_GROUPED ? qt_tile_group_instance(format, kind)
                                            : qt_tile_fpx_instance(format, kind);
}

/*
 * Model times, column_us of struct qt_tile_kind, in the order of the instance tables. Columns:
 * look-up formats of 4 bits; of 2 and 3 bits, which take longer to dequantize than 32 tokens to
 * multiply; INT4 without and with zero-points; other formats with group scales; formats with row
 * scales.
 *
 * Fitted to sweeps of all tiles with nf4, int4 and fp6 on H200s (docs/design/kernels.md). With
 * these numbers the planned configuration takes on average 0.1 to 0.4 % longer than the fastest.
 * Tiles of 48, 96 and 160 to 224 tokens, and rounding kernels, are from later sweeps with 0.05 to
 * 0.2 %. INT4_ZERO, where it differs from INT4, is from products at the power limit
 * (docs/experiments, E077). The rounding kernels of 2 and 3 bits with 128 tokens look up only half
 * of their steps, which is faster (4096 x 4096, 512 tokens: 26.9 us in clusters of 2 with tiles of
 * 128 x 256, 26.0 in whole tiles of 128 x 128).
 */
enum column { LUT_4, LUT_2_3, INT4, INT4_ZERO, OTHERS, ROWS, COLUMNS };
static const float column_us[QT_TILE_KINDS][COLUMNS] = {
    {.198f, .240f, .193f, .193f, .198f, .240f}, /* 2 warpgroups, 32 tokens */
    {.350f, .375f, .340f, .340f, .350f},        /* 4, 32 */
    {.230f, .240f, .221f, .221f, .230f, .255f}, /* 2, 48 */
    {.255f, .255f, .240f, .240f, .255f, .275f}, /* 2, 64 */
    {.353f, .353f, .328f, .328f, .353f},        /* 3, 64 */
    {.315f, .315f, .294f, .294f, .315f, .324f}, /* 2, 96 */
    {.398f, .398f, .368f, .368f, .398f, .370f}, /* 2, 128 */
    {.568f, .568f, .518f, .535f, .583f, .543f}, /* 3, 128; look-up kernels round */
    {.460f, .460f, .440f, .440f, .465f, .456f}, /* 2, 160; likewise */
    {.550f, .550f, .540f, .540f, .570f, .565f}, /* 2, 192; likewise */
    {.645f, .645f, .630f, .630f, .650f, .645f}, /* 2, 224; likewise */
    {.720f, .720f, .715f, .765f, .740f, .700f}, /* 2, 256; likewise */
    {.255f, .255f, .262f, .262f, .280f},        /* 2, 64; this and the next two round */
    {.387f, .380f, .390f, .390f, .430f},        /* 2, 128 */
    {0, 0, .770f, .770f, .720f}};               /* 2, 256 */

/* True for groups of 32 channels, which are always rounded. */
static bool is_narrow(const struct qt_shape *s)
{
    return s->groups > 1 && s->group_shift == QT_TILE_ROUNDED_GROUP_LOG2;
}

static bool is_lut(const struct qt_shape *s)
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
    return !is_lut(s) ? OTHERS : s->bits == 4 ? LUT_4 : LUT_2_3;
}

/* Returns the offset of the zero-points after the planes and scales of a stage. */
static int zeros_at(const struct qt_shape *s, int strips, int blocks)
{
    const int bytes = strips * (blocks * 128 * s->bits + qt_stage_groups(s, blocks) * 32);
    return s->zero_bytes ? (int)round_up((size_t)bytes, 128) : bytes;
}

/* True if the kernel rounds weights, for m tokens in tiles of `tokens` tokens: see
 * QT_TILE_EXACT_TOKENS. 8-bit integers gain by rounding only in the widest tiles. Groups of 64
 * scale accumulators twice as often as groups of 128. */
static bool rounds(const struct qt_shape *s, size_t m, int tokens)
{
    const bool many = m > QT_TILE_EXACT_TOKENS;
    if (s->groups == 1)
        return false;
    if (s->bits == 8)
        return is_narrow(s) || (many && tokens == 256);
    return s->group_shift <= 6 || (many && is_lut(s));
}

/* True if there is a kernel of the same tile size with the other value of `rounds`. */
static bool has_twin(const struct qt_shape *s, const struct qt_tile_kind kinds[QT_TILE_KINDS],
                     const struct qt_tile_kind *k)
{
    for (int i = 0; i < QT_TILE_KINDS; i++)
        if (kinds[i].warpgroups == k->warpgroups && kinds[i].tokens == k->tokens &&
            kinds[i].rounds != k->rounds && qt_tile_instance(s->format, i))
            return true;
    return false;
}

/* Returns the kernels for a matrix and m tokens. Exact kernels do not support groups of 32
 * channels. With a single group, rounding kernels are exact. */
static struct qt_tile_matrix matrix_of(const struct qt_shape *s, size_t m)
{
#define KIND(warpgroups, tokens, blocks, rounds)                                                   \
    {warpgroups, tokens, blocks, NULL, 0, tokens > 128 ? QT_WHOLE_FACTOR_WIDE : QT_WHOLE_FACTOR,   \
     0,          0,      0,      0,    0, rounds},
    static const struct qt_tile_kind lut[QT_TILE_KINDS] = {QT_TILE_LUT_TABLE(KIND)};
    static const struct qt_tile_kind others[QT_TILE_KINDS] = {QT_TILE_EXACT_TABLE(KIND)};
    const struct qt_tile_kind *kinds = is_lut(s) ? lut : others;
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
        if (t->kinds[i].warpgroups * 4 == p->config.tile.warps &&
            t->kinds[i].tokens / 8 == p->config.tile.token_tiles)
            return &t->kinds[i];
    return NULL;
}

/* ---- shared memory -------------------------------------------------------------------------- */

enum { MAX_TILES = 1 << 30 };

/* Returns log2 of the thread blocks of a cluster. */
static int cluster_log2(enum qtool_tile_schedule schedule)
{
    return schedule == QTOOL_TILE_CLUSTER_4 ? 2 : schedule == QTOOL_TILE_CLUSTER_2 ? 1 : 0;
}

static int x_bytes(const struct qt_tile_kind *k)
{
    return k->blocks * k->tokens * 128;
}

/* Bytes of weights that a multiprocessor should have in flight. Memory is slower with twice as many
 * (docs/experiments, E022). */
enum { WEIGHTS_AHEAD = 72 << 10 };

/* Sets the number of stages and the offsets into shared memory, and returns its size. Clusters
 * reuse the pipeline's memory for partial sums of at most a tile. */
static size_t tile_layout(struct qt_tile_base *a, const struct qt_tile_kind *k, int smem_limit)
{
    const int sums_bytes = k->warpgroups * 64 * k->tokens * 4;
    a->stage_bytes = (int)round_up((size_t)(x_bytes(k) + k->weight_bytes), 1024);
    a->ring_at = (int)round_up((size_t)k->head_bytes, 1024);
    const int barrier_bytes = (int)round_up(QT_PIPELINE_BARRIER_BYTES, 128);
    const int tail = barrier_bytes + k->warpgroups * QT_TILE_RESULT_BYTES;
    a->stages = (smem_limit - a->ring_at - tail) / a->stage_bytes;
    int ahead = (WEIGHTS_AHEAD + k->weight_bytes / 2) / k->weight_bytes;
    /* w4ax, 28672 x 4096, 16 tokens: 21.5 us with 4 stages, 18.6 with 6. */
    const int least = k->blocks == 1 ? 6 : 3;
    ahead = ahead < least ? least : ahead;
    ahead = ahead < k->stages ? k->stages : ahead < QT_PIPELINE_STAGES ? ahead : QT_PIPELINE_STAGES;
    a->stages = a->stages < ahead ? a->stages : ahead;
    int ring_bytes = a->stages * a->stage_bytes;
    a->barriers_at = a->ring_at + (ring_bytes > sums_bytes ? ring_bytes : sums_bytes);
    a->results_at = a->barriers_at + barrier_bytes;
    return (size_t)a->barriers_at + (size_t)tail;
}

/* ---- choice --------------------------------------------------------------------------------- */

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

/* Returns the number of thread blocks: one per multiprocessor if there is enough work, or a cluster
 * per tile. */
static int grid_of(int tiles, int k_stages, enum qtool_tile_schedule schedule, int sms)
{
    const bool stream_k = schedule == QTOOL_TILE_STREAM_K;
    if (cluster_log2(schedule))
        return tiles << cluster_log2(schedule);
    if (tiles >= sms || (stream_k && tiles * k_stages >= sms))
        return sms;
    return stream_k ? tiles * k_stages : tiles;
}

/*
 * Returns the number of tiles whose k ranges are shared among all thread blocks (Stream-K): all
 * tiles if there are fewer than two per thread block; else the remainder that cannot be distributed
 * evenly as whole tiles, plus one tile per thread block, so that few thread blocks share a tile.
 */
static int shared_tiles(int tiles, enum qtool_tile_schedule schedule, int blocks)
{
    if (schedule != QTOOL_TILE_STREAM_K || tiles % blocks == 0)
        return 0;
    return tiles < 2 * blocks ? tiles : tiles % blocks + blocks;
}

/* Ratio of the times of products that are long enough to lower the clock to the model times: 1.12
 * to 1.27 were measured. The model of dense products (api/dense.cc) is for such products too. */
static const float warm_factor = 1.18f;

/* Model of the time: prologue and epilogue; the reduction of shared tiles: a constant, and a time
 * per KB of partial sums that a thread block writes and that it reads. */
static const float start_us = 3, share_us = 2, write_us = .007f, read_us = .0104f;
/* Time per KB of partial sums that a thread block sends within a cluster. */
static const float exchange_us = .05f;

static double tile_us(const struct qt_tile_matrix *t, const struct qt_tile_kind *k,
                      enum qtool_tile_schedule schedule, size_t m, int sms)
{
    int tiles = tiles_of(t, k, m), k_stages = k_stages_of(t, k);
    int grid = grid_of(tiles, k_stages, schedule, sms);
    int shared = shared_tiles(tiles, schedule, grid);
    double start = start_us + k->before_us, block_us = k->blocks * k->column_us;
    int kilobytes = k->warpgroups * 64 * k->tokens * 4 / 1024;
    if (cluster_log2(schedule)) {
        const int blocks = 1 << cluster_log2(schedule);
        return start + exchange_us * kilobytes * (blocks - 1) / blocks +
               (double)ceil_div((size_t)k_stages, (size_t)blocks) * block_us * k->whole_factor;
    }
    double whole = (double)ceil_div((size_t)(tiles - shared), (size_t)grid) * k_stages;
    if (shared == 0)
        return start + whole * block_us * k->whole_factor;
    int others = shared < grid ? (int)ceil_div((size_t)grid, (size_t)shared) : 1;
    double us = (whole * k->whole_factor + ceil((double)shared * k_stages / grid)) * block_us;
    us += (read_us * others + write_us * shared / grid) * kilobytes;
    return start + share_us + k->shared_us + fmax(us, k->serial_us);
}

/* True if all clusters run at the same time, and every thread block has stages of k and at least 8
 * tokens of the epilogue. A cluster lies within a GPC: the 132 multiprocessors of an H200 cannot
 * run 32 clusters of 4, and a second wave takes as long again (nf4, 4096 x 4096, 32 tokens: 12.7
 * us, Stream-K 8.7). */
static bool can_cluster(const struct qtool_matmul_plan *p, const struct qt_tile_matrix *t,
                        const struct qt_tile_kind *k, enum qtool_tile_schedule schedule)
{
    const int log2 = cluster_log2(schedule), sms = qt_state(p)->sms;
    const int clusters = log2 > 1 ? (sms >> log2) * 7 / 8 : sms >> log2;
    return tiles_of(t, k, p->m) <= clusters && k_stages_of(t, k) >= 1 << log2 &&
           k->tokens % (8 << log2) == 0;
}

/* True if k is small enough for Stream-K: the kernel divides numbers of (tile, stage) pairs by
 * multiplying with k_stages_inverse. */
static bool can_share(const struct qtool_matmul_plan *p, const struct qt_tile_matrix *t,
                      const struct qt_tile_kind *k)
{
    size_t k_stages = (size_t)k_stages_of(t, k);
    return 2 * (size_t)qt_state(p)->sms * k_stages * k_stages < 1u << 31;
}

/* Tiles of 96, 160 and 224 tokens are used for one or two token tiles, or if no thread block has a
 * second tile. With more tiles other sizes waste no more, and such products are at the power limit,
 * where the model times are too short: int4, 14336 x 4096, 1024 tokens: 184 us in tiles of 128 x
 * 160, 161 in tiles of 192 x 128. */
static bool is_suitable(const struct qtool_matmul_plan *p, const struct qt_tile_matrix *t,
                        const struct qt_tile_kind *k)
{
    return k->tokens <= 64 || k->tokens % 64 == 0 || qt_tile_short(k->tokens, p->m) ||
           tiles_of(t, k, p->m) <= qt_state(p)->sms;
}

bool qt_tile_choose_kind(struct qtool_matmul_plan *p, const struct qt_tile_matrix *t, double *us)
{
    static const enum qtool_tile_schedule schedules[] = {
        QTOOL_TILE_WHOLE, QTOOL_TILE_STREAM_K, QTOOL_TILE_CLUSTER_2, QTOOL_TILE_CLUSTER_4};
    double best = 1e300;
    if (qt_state(p)->cc != 90)
        return false;
    for (int i = 0; i < 4 * t->count; i++) {
        const struct qt_tile_kind *k = &t->kinds[i / 4];
        const enum qtool_tile_schedule schedule = schedules[i % 4];
        if (!is_suitable(p, t, k) || (schedule == QTOOL_TILE_STREAM_K && !can_share(p, t, k)) ||
            (cluster_log2(schedule) && !can_cluster(p, t, k, schedule)))
            continue;
        double this_us = tile_us(t, k, schedule, p->m, qt_state(p)->sms);
        if (this_us >= best)
            continue;
        best = this_us;
        p->config = {};
        p->config.path = QTOOL_MATMUL_TILE;
        p->config.tile.token_tiles = k->tokens / 8;
        p->config.tile.warps = k->warpgroups * 4;
        p->config.tile.schedule = schedule;
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

/* ---- plan ----------------------------------------------------------------------------------- */

static size_t partial_bytes(const struct qtool_matmul_plan *p, const struct qt_tile_kind *k)
{
    return (size_t)qt_state(p)->grid_x * (size_t)k->warpgroups * 64 * (size_t)k->tokens * 4;
}

size_t qt_tile_workspace(const struct qtool_matmul_plan *p, const struct qt_tile_matrix *t)
{
    const struct qt_tile_kind *k = qt_tile_kind_of(p, t);
    const int tiles = tiles_of(t, k, p->m);
    const bool shared = shared_tiles(tiles, p->config.tile.schedule, qt_state(p)->grid_x) > 0;
    return QTOOL_WORKSPACE_ZEROED + (shared ? partial_bytes(p, k) : 0);
}

int qt_tile_check_config(struct qtool_matmul_plan *p, const struct qt_tile_matrix *t)
{
    struct qt_tile_base a = {};
    struct qt_plan_state *state = qt_state(p);
    const struct qtool_tile_config *c = &p->config.tile;
    if (state->cc != 90)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "the tile kernel needs compute capability 9.0");
    const struct qt_tile_kind *k = qt_tile_kind_of(p, t);
    if (!k)
        return qt_refuse(p, QTOOL_UNSUPPORTED,
                         "no tile kernel for this weight has %d warps and token_tiles %d", c->warps,
                         c->token_tiles);
    state->kernel = k->kernel;
    state->smem_bytes = tile_layout(&a, k, state->smem_limit);
    int tiles = tiles_of(t, k, p->m);
    if (c->schedule < QTOOL_TILE_WHOLE || c->schedule > QTOOL_TILE_CLUSTER_4)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "schedule is not an enum qtool_tile_schedule");
    if (cluster_log2(c->schedule) && !can_cluster(p, t, k, c->schedule))
        return qt_refuse(p, QTOOL_UNSUPPORTED,
                         "%d tiles of %d tokens cannot be divided among clusters of %d", tiles,
                         k->tokens, 1 << cluster_log2(c->schedule));
    if (c->schedule == QTOOL_TILE_STREAM_K && !can_share(p, t, k))
        return qt_refuse(p, QTOOL_UNSUPPORTED, "k = %zu is too large for Stream-K", p->k);
    if (a.stages < 2)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "the device has too little shared memory");
    if (tiles == MAX_TILES)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "the product has 2^30 tiles of %d x %d or more",
                         k->warpgroups * 64, k->tokens);
    state->grid_x = grid_of(tiles, k_stages_of(t, k), c->schedule, state->sms);
    state->grid_y = 1;
    p->workspace_bytes = qt_tile_workspace(p, t);
    return qt_need_tensor_maps(p);
}

/* The kernel for gated products that corresponds to `kernel`; NULL if there is none. */
static const void *gated_kernel(enum qt_format format, const void *kernel)
{
    int kind = 0;
    while (qt_tile_instance(format, kind) != kernel)
        kind++;
    return qt_tile_gated_instance(format, kind);
}

int qt_tile_check(struct qtool_matmul_plan *p, const struct qt_shape *s)
{
    const struct qt_tile_matrix t = matrix_of(s, p->m);
    int rc = qt_tile_check_config(p, &t);
    if (rc != QTOOL_OK)
        return rc;
    if (p->options.gated)
        qt_state(p)->kernel = gated_kernel(s->format, qt_state(p)->kernel);
    if (!qt_state(p)->kernel)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "this tile kernel has no gated products");
    p->rounded = qt_tile_kind_of(p, &t)->rounds;
    p->rounded_exp2 = p->kind != QTOOL_MATMUL_INT ? 0
                      : s->bits == 4              ? QT_INT4_EXP2 - QT_INT4_ROUND_EXP2
                                                  : -QT_INT8_ROUND_EXP2;
    if (qt_prepare_needed(p))
        p->workspace_bytes += qt_prepare_bytes(p);
    else if (p->workspace_bytes == QTOOL_WORKSPACE_ZEROED)
        p->workspace_bytes = 0; /* no shared tiles */
    return QTOOL_OK;
}

/* ---- run ------------------------------------------------------------------------------------ */

bool qt_tile_fill(struct qt_tile_base *a, const struct qtool_matmul_plan *p,
                  const struct qt_tile_matrix *t, void *y, void *workspace)
{
    const struct qt_plan_state *state = qt_state(p);
    const enum qtool_tile_schedule schedule = p->config.tile.schedule;
    const struct qt_tile_kind *k = qt_tile_kind_of(p, t);
    if (!k || tile_layout(a, k, state->smem_limit) > state->smem_bytes)
        return false;
    a->y = y;
    a->m = (int)p->m;
    a->n = (int)qt_out_columns(p);
    a->strips = t->strips;
    a->row_tiles = (int)ceil_div((size_t)t->strips, 4 * (size_t)k->warpgroups);
    a->token_tiles = (int)ceil_div(p->m, (size_t)k->tokens);
    a->band = 16;
    a->split_log2 = cluster_log2(schedule);
    a->k_stages = k_stages_of(t, k);
    a->k_stages_inverse = (unsigned)ceil_div(1u << 31, (size_t)a->k_stages);
    a->shared_tiles = shared_tiles(a->row_tiles * a->token_tiles, schedule, state->grid_x);
    a->range = a->shared_tiles * a->k_stages / state->grid_x;
    a->ranges_longer = a->shared_tiles * a->k_stages % state->grid_x;
    const int whole = a->row_tiles * a->token_tiles - a->shared_tiles;
    const int clusters = state->grid_x >> a->split_log2;
    a->whole_tiles = whole / clusters;
    a->blocks_with_more = whole % clusters;
    a->ready = (unsigned *)workspace;
    a->partial = (float *)((char *)workspace + QTOOL_WORKSPACE_ZEROED);
    a->bf16 = p->options.dtype == QTOOL_BF16;
    a->whole_stores = a->n % 8 == 0 && (size_t)y % 16 == 0;
    return true;
}

bool qt_tile_x_maps(struct qt_tile_base *a, const struct qtool_matmul_plan *p,
                    const struct qt_tile_kind *k, const void *x, size_t k_blocks)
{
    /* Copying up to 16 missing tokens costs less than a second copy (docs/design/kernels.md). */
    const int rest = (int)(p->m % (size_t)k->tokens);
    a->cut_tokens = rest && k->tokens - rest > 16 ? rest : 0;
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
    a.gated = p->options.gated;
    a.decode = qt_decode_args_of(w);
    a.scale = (const __half *)w->scale;
    a.pitch_groups = s->pitch_groups;
    a.group_shift = s->group_shift;
    a.row_scales = s->groups == 1;
    a.stage_groups = qt_stage_groups(s, k->blocks);
    a.zeros_at = x_bytes(k) + zeros_at(s, 4 * k->warpgroups, k->blocks);
    a.zero_pitch = qt_zero_pitch(s, a.stage_groups);
    /* Bytes that TMA copies: without the gap before the zero-points. */
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
