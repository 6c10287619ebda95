/* The skinny kernel's plan, and the parts of it that the skinny kernels of mix24 and w4ax share. */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/common/prepare.h"
#include "kernels/cuda/common/tensor_map.h"
#include "kernels/cuda/matmul/matmul.h"
#include "kernels/cuda/matmul/skinny.h"

#include <limits.h>

/* Returns the tokens of a launch. */
static size_t chunk_tokens(const struct qtool_matmul_plan *p)
{
    return p->m < QT_SKINNY_MAX_TOKENS ? p->m : QT_SKINNY_MAX_TOKENS;
}

/* ---- shared memory -------------------------------------------------------------------------- */

/* A warp consumes every stage_step-th stage. The depth is a multiple of it (skinny_common.cuh). */
static int stage_step(int warps_k)
{
    return warps_k / QT_SKINNY_SLOTS;
}

static int row_warps(const struct qtool_skinny_config *c)
{
    return c->warps / c->warps_k;
}

int qt_skinny_tiles(const struct qtool_skinny_config *c)
{
    return (int)ceil_div((size_t)c->strips_cta, (size_t)(row_warps(c) * c->strips));
}

int qt_skinny_tile_strips(const struct qtool_skinny_config *c)
{
    return c->strips_cta / qt_skinny_tiles(c);
}

int qt_skinny_last(const struct qtool_skinny_config *c)
{
    const int rest = qt_skinny_tile_strips(c) - (row_warps(c) - 1) * c->strips;
    return c->strips > 1 && rest <= c->strips / 2 ? c->strips / 2 : c->strips;
}

int qt_skinny_sums_pitch(const struct qtool_skinny_config *c)
{
    return row_warps(c) * c->strips * QT_STRIP_ROWS + 4;
}

/* Partial sums of up to PARTIAL_BYTES have memory of their own. TOPS_BYTES: for the maxima of BF16
 * tokens; it is behind the X of the last token, where warps also read X of tokens that do not
 * exist. */
enum { PARTIAL_BYTES = 8 << 10, TOPS_BYTES = 1024 };

/* Sets the step from the four channels of a tile that a thread stores to its next four. */
static void finish_steps(struct qt_skinny_base *a, const struct qtool_skinny_config *c, int fours)
{
    a->finish_tokens = c->warps * 32 / fours;
    a->finish_rows = c->warps * 32 % fours * 4;
}

size_t qt_skinny_layout(struct qt_skinny_base *a, const struct qtool_skinny_config *c,
                        const struct qt_skinny_room *room, size_t m)
{
    a->strips_cta = c->strips_cta;
    a->tile_strips = qt_skinny_tile_strips(c);
    a->tiles = qt_skinny_tiles(c);
    a->warps_k = c->warps_k;
    a->arrivals = (uint16_t)(QT_SKINNY_SLOTS * (c->warps / c->warps_k));
    finish_steps(a, c, 4 * a->tile_strips);
    a->x_rows = qt_skinny_x_rows(c, m);
    a->stages = c->depth;
    a->stage_bytes = room->stage_bytes;
    a->kept_at = (int)round_up((size_t)room->head_bytes, 1024);
    a->tops_at = a->kept_at + room->kept_bytes;
    a->ring_at = a->tops_at + (room->kept_bytes ? TOPS_BYTES : 0);
    /* Large partial sums of a single tile reuse the memory of the stages, after a barrier. */
    const int ring_end = a->ring_at + a->stages * a->stage_bytes;
    const int sums_bytes = c->warps_k * (int)m * qt_skinny_sums_pitch(c) * 4;
    a->alias = a->tiles == 1 && sums_bytes > PARTIAL_BYTES;
    a->sums_at = a->alias ? a->ring_at : ring_end;
    const int sums_end = a->sums_at + sums_bytes;
    a->tail_at = (int)round_up((size_t)(sums_end > ring_end ? sums_end : ring_end), 16);
    a->barriers_at = (int)round_up((size_t)(a->tail_at + room->tail_bytes), 8);
    return (size_t)a->barriers_at + QT_PIPELINE_BARRIER_BYTES;
}

/* True if the kernel uses a small look-up table. A large one takes 0.1 to 0.2 us to fill. us with a
 * large and a small table: 4096 x 4096, 1 token, nf3 4.98 and 4.88, nf2 4.77 and 4.53; 16 tokens,
 * where only half of the stages fit beside a large one, nf3 6.71 and 5.49; nf2, 6144 x 4096, 1
 * token 5.89 and 5.68. */
static bool small_table(const struct qtool_matmul_plan *p, const struct qt_shape *s)
{
    const struct qtool_skinny_config *c = &p->config.skinny;
    if (p->options.gated || qt_state(p)->many)
        return false; /* no such kernels */
    return c->strips == 1 || (c->strips == 2 && c->strips_cta <= (s->bits == 2 ? 3 : 2));
}

/* Minimum bytes of weights in flight: for several tiles of one or two strips; for thread blocks
 * with at least LONG_BLOCK bytes of weights. */
enum { SHORT_AHEAD = 84 << 10, LONG_AHEAD = 96 << 10, LONG_BLOCK = 600000 };

/* Sets the offsets in a stage and returns the shared memory that the kernel needs. keep: X is not
 * in the stages; thread blocks convert it and keep all of it. */
static struct qt_skinny_room room_for(struct qt_skinny_args *a, const struct qtool_matmul_plan *p,
                                      const struct qt_shape *s, bool keep)
{
    const struct qtool_skinny_config *c = &p->config.skinny;
    const size_t m = chunk_tokens(p);
    const int strips = qt_skinny_tile_strips(c);
    struct qt_skinny_room room = {};
    int at = keep ? 0 : qt_skinny_x_bytes(c, m);
    for (int i = 0; i < 3; i++) {
        a->planes_at[i] = at;
        at += strips * QT_SKINNY_BLOCKS * 128 * s->width[i];
    }
    a->scales_at = at;
    a->stage_groups = s->group_shift < 8 ? 256 >> s->group_shift : 1;
    a->slot_groups = s->group_shift < 7 ? 128 >> s->group_shift : 1;
    a->stage_tx = at + (s->grouped ? strips * a->stage_groups * 32 : 0);
    a->zeros_at = (int)round_up((size_t)a->stage_tx, 128);
    a->zero_pitch = qt_zero_pitch(s, a->stage_groups);
    const int zeros_bytes = strips * a->zero_pitch;
    room.head_bytes = qt_skinny_table_bytes(s->format, small_table(p, s));
    if (keep) {
        a->kept_pitch = (int)round_up((size_t)qt_skinny_x_bytes(c, m), 1024);
        room.kept_bytes = (int)ceil_div((size_t)s->blocks, QT_SKINNY_BLOCKS) * a->kept_pitch;
    }
    room.stage_bytes = (int)round_up((size_t)(a->zeros_at + zeros_bytes), 1024);
    a->stage_tx += zeros_bytes;
    room.weight_bytes = strips * QT_SKINNY_BLOCKS * 128 * s->bits;
    /* Weights in flight: the stages that warps consume, and 32 KB: fp6, 10240 x 8192, 1 token, 20.1
     * us with 30 KB in all, 19.1 with 60; fp5, 28672 x 4096, 24.1 with two stages, 22.6 with three;
     * 40 KB if warps consume at most two stages: fp5, 14336 x 4096, 72 KB in all 12.3, 107 KB 12.0;
     * 48 KB if small tiles end often: int8, 28672 x 4096 in tiles of 2 strips 33.9, 32.4; fp6, 72
     * KB in all 24.9, 96 KB 23.6. With more, the first weights arrive later (int4, 8192 x 8192, 64
     * KB 11.1, 128 KB 11.6). That matters less to long thread blocks: nf3, 57344 x 8192, 86 KB
     * 53.2, 129 KB 52.0; nf4, 8192 x 28672, 66 KB 31.7, 98 KB 30.5. */
    const bool ends_often = qt_skinny_tiles(c) > 1 && strips <= 4;
    const int step = stage_step(c->warps_k);
    room.ahead_bytes = step * room.weight_bytes + (ends_often  ? 48 << 10
                                                   : step <= 2 ? 40 << 10
                                                               : 32 << 10);
    if (ends_often && strips <= 2 && room.ahead_bytes < SHORT_AHEAD)
        room.ahead_bytes = SHORT_AHEAD;
    if ((size_t)c->strips_cta * (size_t)(s->blocks * 128 * s->bits) >= LONG_BLOCK &&
        room.ahead_bytes < LONG_AHEAD)
        room.ahead_bytes = LONG_AHEAD;
    if (room.ahead_bytes < 3 * room.weight_bytes)
        room.ahead_bytes = 3 * room.weight_bytes;
    room.tail_bytes = s->grouped ? 0 : c->strips_cta * 32;
    return room;
}

/*
 * Returns the warps that convert a BF16 token, or 0 if the prepare kernel does that before, which
 * takes 1 us. Converting warps with few stages each finish about when the first weights arrive. us,
 * 4096 x 4096, without and with them: nf4, 1 token 6.3, 5.3, 4 tokens (8 stages per warp) 6.5, 6.1,
 * 8 tokens (16 stages) 6.7, 7.7; fp6, 8192 x 8192, 1 token 17.6, 15.2.
 */
enum { MAX_CONVERTED = 12 };

static int converting_warps(const struct qtool_matmul_plan *p, const struct qtool_skinny_config *c)
{
    const size_t m = chunk_tokens(p), columns = QT_SKINNY_BLOCKS * QT_BLOCK_COLS;
    const size_t stages = p->k / columns, wanted = ceil_div(stages, 2);
    const int rest =
        qt_skinny_warps(c->token_tiles, c->strips) - c->warps - QT_PRODUCER_THREADS / 32;
    if (p->options.dtype != QTOOL_BF16 || p->k % columns || rest < (int)m)
        return 0;
    const size_t most = (size_t)rest / m, warps = wanted < most ? wanted : most;
    return warps * MAX_CONVERTED >= stages ? (int)warps : 0;
}

/* Returns the shared memory for p->config. The pipeline is as deep with converting warps as
 * without. */
static struct qt_skinny_room room_of(struct qt_skinny_args *a, const struct qtool_matmul_plan *p,
                                     const struct qt_shape *s)
{
    const size_t m = chunk_tokens(p);
    const struct qtool_skinny_config *c = &p->config.skinny;
    a->gated = p->options.gated;
    a->token_converters = converting_warps(p, c);
    if (a->token_converters) {
        const struct qt_skinny_room room = room_for(a, p, s, true);
        if (qt_skinny_layout(a, c, &room, m) <= (size_t)qt_state(p)->smem_limit)
            return room;
        a->token_converters = a->kept_pitch = 0;
    }
    return room_for(a, p, s, false);
}

/* True if the prepare kernel runs before the skinny kernel. */
static bool prepares(const struct qtool_matmul_plan *p, const struct qt_skinny_args *a)
{
    return qt_prepare_needed(p) && !a->token_converters;
}

/* ---- choice --------------------------------------------------------------------------------- */

int qt_skinny_depth(const struct qtool_matmul_plan *p, const struct qtool_skinny_config *config,
                    const struct qt_skinny_room *room, size_t m)
{
    struct qt_skinny_base a = {};
    struct qtool_skinny_config c = *config;
    const int step = stage_step(c.warps_k), bytes = room->weight_bytes;
    for (c.depth = step; c.depth < 2 || c.depth * bytes < room->ahead_bytes; c.depth += step)
        if (c.depth + step > QT_PIPELINE_STAGES)
            break;
    for (; c.depth >= 2; c.depth -= step)
        if (qt_skinny_layout(&a, &c, room, m) <= (size_t)qt_state(p)->smem_limit)
            return c.depth;
    return 0;
}

/* Returns the strips of a thread block if each multiprocessor has one; gated products need two. */
static int block_strips(const struct qtool_matmul_plan *p, int strips)
{
    const int each = (int)ceil_div((size_t)strips, (size_t)qt_state(p)->sms);
    return p->options.gated && each == 1 ? 2 : each;
}

/*
 * Warps are distributed over the four schedulers in turn. With two warps along k and an odd number
 * along the rows, two schedulers have one warp more than the others; tiles of half the size, with
 * four warps along k, are balanced. Not needed for an odd number of strips, where the last warps
 * have fewer strips. Not possible with so many tiles that qt_skinny_tiles would find fewer, since
 * half a warp is idle in each.
 */
static int even_tiles(int tiles, int cta, int strips)
{
    const int tile_strips = (int)ceil_div((size_t)cta, (size_t)tiles);
    const int warps_n = tile_strips / strips;
    const bool odd = warps_n > QT_SKINNY_MAX_WARPS / 4 && warps_n % 2 && tile_strips % strips == 0;
    return odd && 2 * tiles <= warps_n ? 2 * tiles : tiles;
}

struct qtool_skinny_config qt_skinny_config(const struct qtool_matmul_plan *p, int strips,
                                            const struct qt_skinny_choice *choice)
{
    struct qtool_skinny_config c = {};
    const int cta = block_strips(p, strips);
    const int least = (int)ceil_div((size_t)cta, (size_t)choice->largest);
    const int tiles = choice->even ? even_tiles(least, cta, choice->wide ? 4 : 2) : least;
    const int tile_strips = (int)ceil_div((size_t)cta, (size_t)tiles);
    c.token_tiles = p->m <= 8 ? 1 : 2;
    c.strips_cta = tile_strips * tiles;
    /* qt_skinny_tiles would take several tiles of 3 for fewer tiles of 4. */
    const bool thirds = tile_strips == 3 && (choice->thirds || tiles > 1);
    c.strips = choice->wide ? 4 : tile_strips == 1 || thirds ? 1 : 2;
    const int warps_n = (int)ceil_div((size_t)tile_strips, (size_t)c.strips);
    const int most = tile_strips <= choice->small && !thirds ? 8 : QT_SKINNY_MAX_WARPS;
    c.warps_k = most;
    while (c.warps_k * warps_n > most)
        c.warps_k /= 2;
    c.warps = c.warps_k * warps_n;
    return c;
}

/*
 * Returns the maximum tile size in strips. Large stages, of many strips of many bits, arrive late,
 * and fewer of them fit. Small tiles read X more often, which is slower for 9 and more tokens and
 * many tiles. us: 28672 x 8192, 1 token, in tiles of 14 and of 2 strips: fp6 47.5, 44.7, fp8 64.0,
 * 57.9; 18944 x 3584 in tiles of 9 and of 3: fp7 23.0, 20.3, 16 tokens 24.2, 22.2; fp5, 57344 x
 * 8192, in tiles of 14 and of 4: 75.1, 72.3. small_m: at most 8 tokens, and the plan may depend on
 * m.
 */
static int largest_tile(int bits, int cta, bool small_m)
{
    if (bits < 5 || !(small_m || cta <= 10))
        return QT_SKINNY_TILE;
    if (bits == 5 && small_m && cta > QT_SKINNY_TILE && cta % 4 == 0)
        return 4;
    if (cta % 2 == 0 && (bits >= 6 || cta == 10))
        return 2;
    return cta % 2 && cta % 3 == 0 ? 3 : QT_SKINNY_TILE;
}

/*
 * True if four strips per warp are faster than two: they halve the reads of X, where registers
 * allow it. A last warp of three strips takes the time of four. us for 1 token, with two and four,
 * by strips per thread block: nf2, 3: 5.7, 6.2, 4: 6.5, 6.4, 5: 7.9, 8.1, 6: 8.6, 8.2, 10: 13.5,
 * 12.0; nf3, 8: 11.5, 11.6, 10: 14.7, 14.1, 14: 18.4, 17.4 (2048 rows per strip, 4096 channels).
 */
static bool wide_warps(enum qt_format format, int cta)
{
    return format == QT_FORMAT_LUT3 ? cta > 8 : format == QT_FORMAT_LUT2 && (cta == 4 || cta > 5);
}

/* True if the kernel can load the zero-points. A TMA box of 4-bit zero-points has two groups and
 * must begin at an even group (else the copy is an illegal instruction). With groups as long as a
 * stage, a warp would not know which of the two is its own. */
static bool can_load_zeros(const struct qt_shape *s)
{
    return s->zero_boxes && (s->zero_bytes != 8 || s->group_shift < 8);
}

/* Returns the pipeline depth, or 0 if the configuration does not fit into shared memory. */
static int depth_for(const struct qtool_matmul_plan *p, const struct qt_shape *s)
{
    struct qt_skinny_args a = {};
    const size_t m = chunk_tokens(p);
    const struct qtool_skinny_config *c = &p->config.skinny;
    const struct qt_skinny_room room = room_for(&a, p, s, false);
    return qt_skinny_depth(p, c, &room, m);
}

/* If p->config leaves no warps to convert BF16, changes it to one with fewer warps that does.
 * Except for many strips, more warps gain less than the 1 us of the prepare kernel. */
static void keep_converting(struct qtool_matmul_plan *p, int strips, struct qt_skinny_choice choice)
{
    choice.thirds = true;
    for (int even = choice.even; even >= 0 && !converting_warps(p, &p->config.skinny); even--) {
        choice.even = even;
        const struct qtool_skinny_config c = qt_skinny_config(p, strips, &choice);
        if (converting_warps(p, &c))
            p->config.skinny = c;
    }
}

/* Rules for thread blocks of `cta` strips. *narrow: without warps of four strips. */
static struct qt_skinny_choice rules(const struct qtool_matmul_plan *p, const struct qt_shape *s,
                                     int cta, struct qt_skinny_choice *narrow)
{
    const bool small_m = p->m <= 8 && !p->options.batch_invariant;
    struct qt_skinny_choice choice = {largest_tile(s->bits, cta, small_m), 2, false,
                                      qt_skinny_instance(s->format, 1, 2, 1, false) ==
                                          qt_skinny_instance(s->format, 1, 2, 2, false),
                                      s->bits <= 4 && !p->options.gated &&
                                          (small_m || s->format != QT_FORMAT_LUT4)};
    /* 4096 x 14336, 1 token: nf3 11.4 us with 8 warps, 10.0 with 16; fp6 13.6 and 14.0. */
    if (s->format == QT_FORMAT_LUT2 || s->format == QT_FORMAT_LUT3)
        choice.small = 0;
    *narrow = choice;
    if (small_m && wide_warps(s->format, cta)) {
        choice.wide = true;
        choice.largest = 2 * QT_SKINNY_TILE;
    }
    return choice;
}

/*
 * The order of additions depends on strips_cta, strips, warps and warps_k, which do not depend on m
 * in a batch-invariant plan. Such a plan therefore uses this kernel for any m, 16 tokens at a time.
 */
bool qt_skinny_choose(struct qtool_matmul_plan *p, const struct qt_shape *s)
{
    if (qt_state(p)->cc != 90 || !can_load_zeros(s) ||
        (p->m > QT_SKINNY_MAX_TOKENS && !p->options.batch_invariant))
        return false;
    const bool small_m = p->m <= 8 && !p->options.batch_invariant;
    const int cta = block_strips(p, s->strips);
    struct qt_skinny_choice narrow;
    const struct qt_skinny_choice choice = rules(p, s, cta, &narrow);
    p->config = {};
    p->config.path = QTOOL_MATMUL_SKINNY;
    p->config.skinny = qt_skinny_config(p, s->strips, &choice);
    if (p->options.dtype == QTOOL_BF16 && small_m && cta <= QT_SKINNY_TILE)
        keep_converting(p, s->strips, narrow);
    if (p->options.batch_invariant) { /* every m must get this kernel, or none */
        struct qtool_matmul_plan most = *p;
        most.m = QT_SKINNY_MAX_TOKENS;
        most.config.skinny.token_tiles = 2;
        if (depth_for(&most, s) == 0)
            return false;
    }
    p->config.skinny.depth = depth_for(p, s);
    return p->config.skinny.depth > 0;
}

static const char *config_fault(const struct qtool_skinny_config *c, int strips, int most)
{
    if (c->strips != 1 && c->strips != 2 && c->strips != 4)
        return "strips must be 1, 2 or 4";
    if (c->token_tiles < 1 || c->token_tiles > most)
        return "token_tiles is out of range";
    if (c->warps_k < QT_SKINNY_SLOTS || (c->warps_k & (c->warps_k - 1)) || c->warps < 1 ||
        c->warps > QT_SKINNY_MAX_WARPS || c->warps % c->warps_k)
        return "warps must be at most 16, and warps_k a power of two above 1 that divides warps";
    if (c->strips_cta < 1 || c->strips_cta > strips + 256 || c->strips_cta % qt_skinny_tiles(c))
        return "strips_cta must be a multiple of its number of tiles";
    if (c->depth < 2 || c->depth > QT_PIPELINE_STAGES || c->depth % stage_step(c->warps_k))
        return "depth must be 2..16 and a multiple of warps_k / 2";
    return NULL;
}

int qt_skinny_check_config(struct qtool_matmul_plan *p, int strips, int most)
{
    const size_t launch_tokens = p->m < (size_t)most * 8 ? p->m : (size_t)most * 8;
    const char *fault = config_fault(&p->config.skinny, strips, most);
    if (qt_state(p)->cc != 90)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "the skinny kernel needs compute capability 9.0");
    if (fault)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "%s", fault);
    if (launch_tokens > (size_t)p->config.skinny.token_tiles * 8)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "token_tiles is too small for %zu tokens", p->m);
    return QTOOL_OK;
}

int qt_skinny_check_room(struct qtool_matmul_plan *p, size_t bytes, int strips, bool dependent)
{
    struct qt_plan_state *state = qt_state(p);
    if (!state->kernel)
        return qt_refuse(p, QTOOL_UNSUPPORTED,
                         "no skinny kernel has these token_tiles and strips for the format");
    int rc = qt_set_smem(p, bytes, dependent);
    if (rc != QTOOL_OK)
        return rc;
    state->grid_x = (int)ceil_div((size_t)strips, (size_t)p->config.skinny.strips_cta);
    state->grid_y = 1;
    return qt_need_tensor_maps(p);
}

int qt_skinny_check(struct qtool_matmul_plan *p, const struct qt_shape *s)
{
    struct qt_skinny_args a = {};
    const struct qtool_skinny_config *c = &p->config.skinny;
    int rc = qt_skinny_check_config(p, s->strips, QT_SKINNY_MAX_TOKENS / 8);
    if (rc != QTOOL_OK)
        return rc;
    if (p->options.gated && qt_skinny_tile_strips(c) % 2)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "tiles of %d strips cannot have gate and up",
                         qt_skinny_tile_strips(c));
    const int last = qt_skinny_last(c);
    qt_state(p)->kernel =
        p->options.gated
            ? qt_skinny_gated_instance(s->format, c->token_tiles, c->strips, last)
            : qt_skinny_instance(s->format, c->token_tiles, c->strips, last, small_table(p, s));
    if (!can_load_zeros(s))
        return qt_refuse(p, QTOOL_UNSUPPORTED,
                         "the skinny kernel needs strips of zero-points of a multiple of 16 bytes "
                         "and, for 4 bits, groups of at most 128 channels");
    const struct qt_skinny_room room = room_of(&a, p, s);
    const bool before = prepares(p, &a);
    p->workspace_bytes = before ? QTOOL_WORKSPACE_ZEROED + qt_prepare_bytes(p) : 0;
    return qt_skinny_check_room(p, qt_skinny_layout(&a, c, &room, chunk_tokens(p)), s->strips,
                                p->options.dependent_launch || before);
}

/* ---- run ------------------------------------------------------------------------------------ */

void qt_skinny_fill(struct qt_skinny_base *a, const struct qtool_matmul_plan *p, int strips,
                    size_t blocks, void *y)
{
    a->y = y;
    a->m = (int)p->m;
    a->n = (int)qt_out_columns(p);
    a->strips = strips;
    a->k_stages = (int)ceil_div(blocks, QT_SKINNY_BLOCKS);
    a->bf16 = p->options.dtype == QTOOL_BF16;
    a->wide_stores = a->n % 4 == 0 && (size_t)y % 8 == 0;
}

/* Fills the arguments of a launch. x: as the kernel takes it. False: no tensor maps. */
static bool fill_args(struct qt_skinny_args *a, const struct qtool_matmul_plan *p,
                      const struct qt_skinny_room *room, const struct qt_shape *s,
                      const struct qtool_matmul_weight *w, void *y, const void *x)
{
    const struct qtool_skinny_config *c = &p->config.skinny;
    qt_skinny_layout(a, c, room, chunk_tokens(p));
    if (a->gated)
        finish_steps(a, c, 2 * a->tile_strips);
    qt_skinny_fill(a, p, s->strips, (size_t)s->blocks, y);
    a->decode = qt_decode_args_of(w);
    a->scale = (const __half *)w->scale;
    a->pitch_groups = s->pitch_groups;
    a->group_shift = s->group_shift;
    a->factor = qt_result_factor(w);
    return (a->token_converters ||
            qt_x_map(p, &a->x, x, (size_t)s->blocks, a->x_rows, QT_SKINNY_BLOCKS)) &&
           qt_weight_maps(p, a->plane, &a->scales, &a->zeros, s, w, a->tile_strips,
                          QT_SKINNY_BLOCKS, a->stage_groups);
}

int qt_skinny_run(const struct qtool_matmul_plan *p, const struct qt_shape *s,
                  const struct qtool_matmul_weight *w, void *y, const void *x, void *workspace,
                  void *stream)
{
    struct qt_skinny_args a = {};
    const struct qtool_skinny_config *c = &p->config.skinny;
    const struct qt_skinny_room room = room_of(&a, p, s);
    const bool before = prepares(p, &a);
    a.dependent = p->options.dependent_launch || before;
    int rc = QTOOL_OK;
    if (before)
        rc = qt_prepare_run(p, &x, &a.token_factor, (char *)workspace + QTOOL_WORKSPACE_ZEROED,
                            stream);
    if (rc != QTOOL_OK)
        return rc;
    if (!fill_args(&a, p, &room, s, w, y, x))
        return QTOOL_UNSUPPORTED;
    const float *token_factor = a.token_factor;
    for (size_t t = 0; t < p->m && rc == QTOOL_OK; t += QT_SKINNY_MAX_TOKENS) {
        a.m = (int)(p->m - t < chunk_tokens(p) ? p->m - t : chunk_tokens(p));
        a.converters = (uint16_t)(a.m * a.token_converters);
        a.token0 = (int)t;
        a.kept_x = (const char *)x + t * p->k * 2;
        a.y = (char *)y + t * (size_t)a.n * 2;
        a.token_factor = token_factor ? token_factor + t : NULL;
        rc = qt_launch(p, &a, (c->warps + a.converters) * 32 + QT_PRODUCER_THREADS, a.dependent,
                       stream);
    }
    return rc;
}

/* ---- several matrices ----------------------------------------------------------------------- */

static int blocks_of(const struct qt_shape *s, size_t count, int strips_cta)
{
    int blocks = 0;
    for (size_t i = 0; i < count; i++)
        blocks += (int)ceil_div((size_t)s[i].strips, (size_t)strips_cta);
    return blocks;
}

int qt_skinny_plan_many(struct qtool_matmul_plan *p, const struct qt_shape *s, size_t count)
{
    struct qt_skinny_args a = {};
    struct qt_skinny_choice narrow;
    struct qtool_skinny_config *c = &p->config.skinny;
    int cta = 2; /* the kernels have no small tables */
    if (qt_state(p)->cc != 90 || p->m > QT_SKINNY_MAX_TOKENS || qt_prepare_needed(p))
        return qt_refuse(
            p, QTOOL_UNSUPPORTED,
            "several LUT matrices need at most 16 tokens in FP16, k that is a multiple "
            "of 64, and compute capability 9.0");
    while (blocks_of(s, count, cta) > qt_state(p)->sms)
        cta++;
    const struct qt_skinny_choice choice = rules(p, s, cta, &narrow);
    p->config.path = QTOOL_MATMUL_SKINNY;
    *c = qt_skinny_config(p, cta * qt_state(p)->sms, &choice);
    c->depth = depth_for(p, s);
    qt_state(p)->kernel =
        qt_skinny_many_instance(s->format, c->token_tiles, c->strips, qt_skinny_last(c));
    if (!c->depth || !qt_state(p)->kernel)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "no kernel takes several of these matrices");
    const struct qt_skinny_room room = room_of(&a, p, s);
    int rc = qt_skinny_check_room(p, qt_skinny_layout(&a, c, &room, p->m),
                                  blocks_of(s, count, c->strips_cta) * c->strips_cta,
                                  p->options.dependent_launch);
    return rc == QTOOL_OK ? qt_allow_smem(qt_state(p)->kernel, qt_state(p)->smem_bytes, p->reason)
                          : rc;
}

int qt_skinny_run_many(const struct qtool_matmul_plan *p, const struct qt_shape *s,
                       const struct qtool_matmul_weight *const *w, size_t count, void *const *y,
                       const void *x, void *stream)
{
    const struct qtool_skinny_config *c = &p->config.skinny;
    struct qt_skinny_many_args many = {};
    int blocks = 0;
    for (size_t i = 0; i < QTOOL_MATMUL_MANY; i++)
        many.part[i].first = INT_MAX;
    for (size_t i = 0; i < count; i++) {
        struct qtool_matmul_plan one = *p;
        qt_skinny_part *a = &many.part[i];
        one.n = w[i]->n;
        const struct qt_skinny_room room = room_of(a, &one, &s[i]);
        if (!fill_args(a, &one, &room, &s[i], w[i], y[i], x))
            return QTOOL_UNSUPPORTED;
        a->dependent = p->options.dependent_launch;
        a->first = blocks;
        blocks += blocks_of(&s[i], 1, c->strips_cta);
    }
    if (blocks != qt_state(p)->grid_x)
        return QTOOL_UNSUPPORTED;
    return qt_launch(p, &many, c->warps * 32 + QT_PRODUCER_THREADS, p->options.dependent_launch,
                     stream);
}
