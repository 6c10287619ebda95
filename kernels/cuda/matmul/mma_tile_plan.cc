/* The mma.sync tile kernel's plan: choice of a configuration, arguments, launch. */
#include "kernels/cuda/common/prepare.h"
#include "kernels/cuda/matmul/matmul.h"
#include "kernels/cuda/matmul/mma_tile.h"

enum { MAX_SPLITS = 16 };

/* The kernels of QT_MMA_TILE_TABLE. stage_us: microseconds on an H200 for 64 columns of k of a
 * tile, for formats with a scale per group and with a scale per row; fitted to `sweep` with nf4 and
 * fp6, m = 32..1024. */
struct kind {
    int warps_n, warps_m, strips, tokens;
    float stage_us[2];
};

static const struct kind kinds[QT_MMA_TILE_KINDS] = {
    {8, 1, 2, 32, {.62f, .62f}}, {8, 1, 2, 64, {.94f, .92f}}, {4, 2, 4, 64, {1.57f, 1.53f}}};

static int tile_strips(const struct kind *k)
{
    return k->warps_n * k->strips;
}

static int tile_tokens(const struct kind *k)
{
    return k->warps_m * k->tokens;
}

static int threads_of(const struct kind *k)
{
    return k->warps_n * k->warps_m * 32;
}

/* Returns the index of the kernel of a configuration, or -1. */
static int kind_of(const struct qtool_mma_tile_config *c)
{
    for (int i = 0; i < QT_MMA_TILE_KINDS; i++)
        if (kinds[i].warps_n * kinds[i].warps_m == c->warps && kinds[i].strips == c->strips &&
            tile_strips(&kinds[i]) == c->strips_cta && tile_tokens(&kinds[i]) / 8 == c->token_tiles)
            return i;
    return -1;
}

/* Sets offsets in shared memory and returns its size. The epilogue reuses the pipeline's memory. */
static size_t mma_tile_layout(struct qt_mma_tile_args *a, const struct qt_shape *s,
                              const struct kind *k)
{
    a->stage_groups = qt_stage_groups(s, 1);
    const int strip_bytes = 128 * s->bits + (32 + s->zero_bytes) * a->stage_groups;
    /* The kernel addresses chunks of X by XOR within lines of 128 bytes. */
    a->stage_bytes =
        tile_tokens(k) * 128 + (int)round_up((size_t)(tile_strips(k) * strip_bytes), 128);
    a->ring_at = (int)round_up((size_t)qt_mma_tile_table_bytes(s->format), 128);
    const int ring_bytes = QT_MMA_TILE_STAGES * a->stage_bytes;
    const int results_bytes = tile_tokens(k) * (tile_strips(k) * 32 + QT_MMA_TILE_PAD);
    return (size_t)(a->ring_at + (ring_bytes > results_bytes ? ring_bytes : results_bytes));
}

/* ---- choice --------------------------------------------------------------------------------- */

static size_t tiles_of(const struct qt_shape *s, const struct kind *k, size_t m)
{
    return ceil_div((size_t)s->strips, (size_t)tile_strips(k)) *
           ceil_div(m, (size_t)tile_tokens(k));
}

static int split_blocks(const struct qt_shape *s, int splits)
{
    return (int)ceil_div((size_t)s->blocks, (size_t)splits);
}

/* Model of the time: prologue and epilogue of a thread block; with split-K a constant, a time per
 * KB of partial sums of a tile, and a time per KB of the partial sums of all tiles, which go
 * through memory twice if they exceed the L2 (an estimate; the others are measured). */
static const float start_us = 5, split_us = 2, partial_us = .012f, traffic_us = 5e-4f;
enum { MAX_PARTIAL_MB = 64 };

/* Bytes of the accumulators of a tile. */
static int tile_bytes(const struct kind *k)
{
    return tile_strips(k) * 16 * tile_tokens(k) * 4;
}

static double mma_tile_us(const struct qtool_matmul_plan *p, const struct qt_shape *s,
                          const struct kind *k, int splits)
{
    size_t blocks = tiles_of(s, k, p->m) * (size_t)splits;
    double block_us = start_us + split_blocks(s, splits) * k->stage_us[!s->grouped];
    double us = (double)ceil_div(blocks, (size_t)qt_state(p)->sms) * block_us;
    int kilobytes = tile_bytes(k) / 1024;
    if (splits > 1)
        us += split_us + splits * kilobytes * partial_us + (double)blocks * kilobytes * traffic_us;
    return us;
}

/* NULL, or why the configuration cannot be used. */
static const char *config_fault(const struct qtool_matmul_plan *p, const struct qt_shape *s,
                                const struct kind *k, int splits)
{
    struct qt_mma_tile_args a;
    const size_t tiles = tiles_of(s, k, p->m);
    if (tiles >= 1 << 30)
        return "the product has 2^30 tiles or more";
    if (splits < 1 || splits > MAX_SPLITS || (splits - 1) * split_blocks(s, splits) >= s->blocks)
        return "splits must be 1..16 with channels in every part";
    if (splits > 1 && tiles * sizeof(unsigned) > QTOOL_WORKSPACE_ZEROED)
        return "there are too many tiles for splits above 1";
    if (splits > 1 &&
        tiles * (size_t)splits > ((size_t)MAX_PARTIAL_MB << 20) / (size_t)tile_bytes(k))
        return "partial sums of splits need more than 64 MB";
    if (s->pitch_blocks >= 1 << 22 || s->pitch_groups >= 1 << 25)
        return "pitch_blocks or pitch_groups is too large for mma tiles";
    if (mma_tile_layout(&a, s, k) > (size_t)qt_state(p)->smem_limit)
        return "the device has too little shared memory";
    return NULL;
}

bool qt_mma_tile_choose(struct qtool_matmul_plan *p, const struct qt_shape *s, double *us)
{
    bool found = false;
    for (int i = 0; i < QT_MMA_TILE_KINDS; i++)
        for (int splits = 1; splits <= MAX_SPLITS; splits++) {
            const struct kind *k = &kinds[i];
            double this_us = mma_tile_us(p, s, k, splits);
            if (this_us >= *us || config_fault(p, s, k, splits))
                continue;
            found = true;
            *us = this_us;
            p->config = (struct qtool_matmul_config){};
            p->config.path = QTOOL_MATMUL_MMA_TILE;
            p->config.mma_tile.token_tiles = tile_tokens(k) / 8;
            p->config.mma_tile.strips = k->strips;
            p->config.mma_tile.strips_cta = tile_strips(k);
            p->config.mma_tile.warps = k->warps_n * k->warps_m;
            p->config.mma_tile.splits = splits;
        }
    return found;
}

/* ---- plan and run --------------------------------------------------------------------------- */

static size_t partial_bytes(const struct qtool_matmul_plan *p, const struct kind *k)
{
    const struct qt_plan_state *state = qt_state(p);
    return p->config.mma_tile.splits == 1
               ? 0
               : (size_t)state->grid_x * (size_t)state->grid_y * (size_t)tile_bytes(k);
}

int qt_mma_tile_check(struct qtool_matmul_plan *p, const struct qt_shape *s)
{
    struct qt_mma_tile_args a = {};
    struct qt_plan_state *state = qt_state(p);
    const struct qtool_mma_tile_config *c = &p->config.mma_tile;
    const int i = kind_of(c);
    if (i < 0)
        return qt_refuse(p, QTOOL_UNSUPPORTED,
                         "no mma tile kernel has %d warps, strips_cta %d and token_tiles %d",
                         c->warps, c->strips_cta, c->token_tiles);
    const char *fault = config_fault(p, s, &kinds[i], c->splits);
    if (fault)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "%s", fault);
    state->kernel = qt_mma_tile_instance(s->format, i);
    state->smem_bytes = mma_tile_layout(&a, s, &kinds[i]);
    state->grid_x = (int)tiles_of(s, &kinds[i], p->m);
    state->grid_y = c->splits;
    p->workspace_bytes = partial_bytes(p, &kinds[i]) + qt_prepare_bytes(p);
    if (p->workspace_bytes)
        p->workspace_bytes += QTOOL_WORKSPACE_ZEROED;
    return QTOOL_OK;
}

int qt_mma_tile_run(const struct qtool_matmul_plan *p, const struct qt_shape *s,
                    const struct qtool_matmul_weight *w, void *y, const void *x, void *workspace,
                    void *stream)
{
    const struct kind *k = &kinds[kind_of(&p->config.mma_tile)];
    const int splits = p->config.mma_tile.splits;
    if (config_fault(p, s, k, splits)) /* possible for another weight than the planned one */
        return QTOOL_UNSUPPORTED;
    char *rest = (char *)workspace + QTOOL_WORKSPACE_ZEROED;
    struct qt_mma_tile_args a = {};
    mma_tile_layout(&a, s, k);
    int rc = qt_prepare_run(p, &x, &a.token_factor, rest + partial_bytes(p, k), stream);
    if (rc != QTOOL_OK)
        return rc;
    a.decode = qt_decode_args_of(w);
    for (int i = 0; i < 3; i++)
        a.plane[i] = (const unsigned char *)w->plane[i];
    a.scale = (const __half *)w->scale;
    a.zero = (const unsigned char *)w->zero;
    a.x = (const __half *)x;
    a.y = y;
    a.partial = (float4 *)rest;
    a.arrivals = (unsigned *)workspace;
    a.pitch_blocks = s->pitch_blocks;
    a.pitch_groups = s->pitch_groups;
    a.m = (int)p->m;
    a.n = (int)p->n;
    a.strips = s->strips;
    a.blocks = s->blocks;
    a.row_tiles = (int)ceil_div((size_t)s->strips, (size_t)tile_strips(k));
    a.token_tiles = (int)ceil_div(p->m, (size_t)tile_tokens(k));
    a.split_blocks = split_blocks(s, splits);
    a.group_shift = s->group_shift;
    a.groups = (int)s->groups;
    a.factor = qt_result_factor(w);
    a.bf16 = p->options.dtype == QTOOL_BF16;
    a.wide_stores = p->n % 8 == 0 && (size_t)y % 16 == 0;
    return qt_launch(p, &a, threads_of(k), false, stream);
}
