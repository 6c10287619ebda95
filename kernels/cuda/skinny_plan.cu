/* Host side of the skinny kernel: configurations, launches. */
#include "kernels/cuda/plan.h"
#include "kernels/cuda/skinny.h"

enum { MAX_TOKENS = 16, MAX_WARPS = 16, MAX_STAGES = 16 };

const void *qt_skinny_instance(enum qt_format format, int token_tiles, int strips)
{
    return format <= QT_FORMAT_INT4  ? qt_skinny_group_instance(format, token_tiles, strips)
           : format == QT_FORMAT_ANY ? NULL
                                     : qt_skinny_fpx_instance(format, token_tiles, strips);
}

/* Of a launch. */
static size_t chunk_tokens(size_t m)
{
    return m < MAX_TOKENS ? m : MAX_TOKENS;
}

/* ---- shared memory -----------------------------------------------------------------------------
 */

static int row_warps(const struct qt_matmul_config *c)
{
    return c->warps / c->warps_k;
}

/* The strips of a block are taken in equal tiles, of as many as its warps have at most. */
static int tiles(const struct qt_matmul_config *c)
{
    return (int)ceil_div((size_t)c->strips_cta, (size_t)(row_warps(c) * c->strips));
}

static int tile_strips(const struct qt_matmul_config *c)
{
    return c->strips_cta / tiles(c);
}

/* Stages that a warp steps over, of which the ring is a multiple (skinny.cuh). */
static int stage_step(int warps_k)
{
    return warps_k > QT_SKINNY_SLOTS ? warps_k / QT_SKINNY_SLOTS : 1;
}

/* Offsets into the kernel's shared memory; returns its size. */
static size_t skinny_layout(struct qt_skinny_args *a, const struct qt_shape *s,
                            const struct qt_matmul_config *c, size_t m)
{
    const int strips = tile_strips(c);
    int at = QT_SKINNY_BLOCKS * c->token_tiles * 1024;
    for (int i = 0; i < 3; i++) {
        a->planes_at[i] = at;
        at += strips * QT_SKINNY_BLOCKS * 128 * s->width[i];
    }
    a->scales_at = at;
    a->stage_groups = s->group_shift < 8 ? 256 >> s->group_shift : 1;
    a->slot_groups = s->group_shift < 7 ? 128 >> s->group_shift : 1;
    a->stage_tx = at + (s->grouped ? strips * a->stage_groups * 32 : 0);
    a->stage_bytes = (int)round_up((size_t)a->stage_tx, 1024);
    a->stages = c->depth;
    a->ring_at = (int)round_up(s->wide_table_bytes, 1024);
    /* A single tile's sums go where its stages were. */
    int ring_end = a->ring_at + a->stages * a->stage_bytes,
        pitch = row_warps(c) * c->strips * 16 + 4;
    a->alias = tiles(c) == 1;
    a->sums_at = a->alias ? a->ring_at : ring_end;
    int sums_end = a->sums_at + c->warps_k * (int)m * pitch * 4;
    a->scale_at = (int)round_up((size_t)(sums_end > ring_end ? sums_end : ring_end), 8);
    a->barriers_at = a->scale_at + (s->grouped ? 0 : c->strips_cta * 32);
    return (size_t)a->barriers_at + 16 * MAX_STAGES;
}

/* As many stages as bring about QT_WEIGHTS_AHEAD bytes, if they fit; 0: not even two fit. */
static int stages_for(const struct qt_shape *s, struct qt_matmul_config c, size_t m, int limit)
{
    struct qt_skinny_args a = {};
    const int step = stage_step(c.warps_k);
    const int bytes = tile_strips(&c) * QT_SKINNY_BLOCKS * 128 * s->bits;
    for (c.depth = step; c.depth < 2 || c.depth * bytes < QT_WEIGHTS_AHEAD * 5 / 6; c.depth += step)
        if (c.depth + step > MAX_STAGES)
            break;
    for (; c.depth >= 2; c.depth -= step)
        if (skinny_layout(&a, s, &c, m) <= (size_t)limit)
            return c.depth;
    return 0;
}

/* ---- choosing ----------------------------------------------------------------------------------
 */

/* Fills in the rest for strips_cta, splits and token_tiles. */
static bool complete(struct qt_matmul_config *c, const struct qt_matmul_plan *p,
                     const struct qt_shape *s)
{
    const int most = MAX_WARPS, tiles = (int)ceil_div((size_t)c->strips_cta, 16);
    const int strips = (int)ceil_div((size_t)c->strips_cta, (size_t)tiles);
    c->strips_cta = strips * tiles;
    c->strips = strips == 3 ? 1 : 2;
    int warps_n = (int)ceil_div((size_t)strips, (size_t)c->strips);
    for (c->warps_k = strips <= 2 ? 8 : 16; c->warps_k * warps_n > most; c->warps_k /= 2)
        ;
    c->warps = c->warps_k * warps_n;
    c->depth = stages_for(s, *c, chunk_tokens(p->m), p->smem_limit);
    return c->depth > 0;
}

/*
 * The order in which products are added follows from strips_cta, strips and warps_k, which do not
 * depend on m: so a batch-invariant plan takes this kernel for any m, MAX_TOKENS at a time.
 */
bool qt_skinny_choose(struct qt_matmul_plan *p, const struct qt_shape *s)
{
    struct qt_matmul_config c = {};
    if (p->cc != 90 || s->format == QT_FORMAT_ANY ||
        (p->m > MAX_TOKENS && !p->options.batch_invariant))
        return false;
    c.path = QT_MATMUL_SKINNY;
    c.token_tiles = p->m <= 8 ? 1 : 2;
    c.splits = 1;
    c.strips_cta = (int)ceil_div((size_t)s->strips, (size_t)p->sms);
    bool ok = complete(&c, p, s);
    p->config = c;
    return ok;
}

static const char *config_fault(const struct qt_matmul_config *c, const struct qt_shape *s)
{
    if (c->strips != 1 && c->strips != 2 && c->strips != 4)
        return "strips must be 1, 2 or 4";
    if (c->token_tiles != 1 && c->token_tiles != 2)
        return "token_tiles must be 1 or 2";
    if (c->warps_k < 1 || (c->warps_k & (c->warps_k - 1)) || c->warps < 1 || c->warps > MAX_WARPS ||
        c->warps % c->warps_k)
        return "warps must be at most 16 and warps_k a power of two that divides them";
    if (c->strips_cta < 1 || c->strips_cta > s->strips + 256 || c->strips_cta % tiles(c))
        return "strips_cta must be a multiple of its tiles";
    if (c->splits != 1)
        return "splits must be 1";
    if (c->depth < 2 || c->depth > MAX_STAGES || c->depth % stage_step(c->warps_k))
        return "depth must be 2 to 16 and a multiple of half of warps_k";
    return NULL;
}

int qt_skinny_check(struct qt_matmul_plan *p, const struct qt_shape *s)
{
    struct qt_skinny_args a = {};
    const struct qt_matmul_config *c = &p->config;
    const char *fault = config_fault(c, s);
    if (p->cc != 90)
        return qt_refuse(p, QT_MATMUL_UNSUPPORTED, "skinny kernels need compute capability 9.0");
    if (fault)
        return qt_refuse(p, QT_MATMUL_UNSUPPORTED, "%s", fault);
    if (chunk_tokens(p->m) > (size_t)c->token_tiles * 8)
        return qt_refuse(p, QT_MATMUL_UNSUPPORTED, "token_tiles too few for %zu tokens", p->m);
    p->kernel = qt_skinny_instance(s->format, c->token_tiles, c->strips);
    if (!p->kernel)
        return qt_refuse(p, QT_MATMUL_UNSUPPORTED, "no skinny kernel for this format");
    p->smem_bytes = skinny_layout(&a, s, c, chunk_tokens(p->m));
    if (p->smem_bytes > (size_t)p->smem_limit)
        return qt_refuse(p, QT_MATMUL_UNSUPPORTED, "%zu bytes of shared memory, the device has %d",
                         p->smem_bytes, p->smem_limit);
    /* As for the stream kernel: no SM should get two blocks of a dependent launch. */
    if (p->options.dependent_launch && p->smem_bytes <= (size_t)p->smem_limit / 2)
        p->smem_bytes = (size_t)p->smem_limit / 2 + 1024;
    p->grid_x = (int)ceil_div((size_t)s->strips, (size_t)c->strips_cta);
    p->grid_y = 1;
    size_t prepared = qt_prepare_bytes(p);
    p->workspace_bytes = prepared ? QT_MATMUL_WORKSPACE_ZEROED + prepared : 0;
    p->encode_map = (void (*)(void))qt_tensor_map_encoder();
    if (!p->encode_map)
        return qt_refuse(p, QT_MATMUL_UNSUPPORTED, "the driver has no cuTensorMapEncodeTiled");
    return QT_MATMUL_OK;
}

/* ---- run ---------------------------------------------------------------------------------------
 */

int qt_skinny_run(const struct qt_matmul_plan *p, const struct qt_shape *s,
                  const struct qt_matmul_weight *w, void *y, const void *x, void *workspace,
                  void *stream)
{
    struct qt_skinny_args a = {};
    const struct qt_matmul_config *c = &p->config;
    skinny_layout(&a, s, c, chunk_tokens(p->m));
    a.decode = qt_decode_args_of(w);
    a.scale = (const __half *)w->scale;
    a.pitch_groups = s->pitch_groups;
    a.n = (int)p->n;
    a.strips = s->strips;
    a.strips_cta = c->strips_cta;
    a.tile_strips = tile_strips(c);
    a.tiles = tiles(c);
    a.warps_k = c->warps_k;
    a.k_stages = (int)ceil_div((size_t)s->blocks, QT_SKINNY_BLOCKS);
    a.group_shift = s->group_shift;
    a.factor = qt_result_factor(w);
    a.bf16 = p->options.dtype == QT_MATMUL_BF16;
    a.dependent = p->options.dependent_launch || qt_prepare_needed(p);
    int rc = qt_prepare_run(p, &x, &a.token_factor, (char *)workspace + QT_MATMUL_WORKSPACE_ZEROED,
                            stream);
    if (rc != QT_MATMUL_OK)
        return rc;
    if ((size_t)x % 16 || !qt_x_map(p, &a.x, x, 8 * c->token_tiles, QT_SKINNY_BLOCKS) ||
        !qt_weight_maps(p, a.plane, &a.scales, s, w, a.tile_strips, QT_SKINNY_BLOCKS,
                        a.stage_groups))
        return QT_MATMUL_UNSUPPORTED;
    const float *token_factor = a.token_factor;
    for (size_t t = 0; t < p->m && rc == QT_MATMUL_OK; t += MAX_TOKENS) {
        a.m = (int)chunk_tokens(p->m - t);
        a.token0 = (int)t;
        a.y = (char *)y + t * p->n * 2;
        a.token_factor = token_factor ? token_factor + t : NULL;
        rc = qt_launch(p, &a, (c->warps + 2) * 32, a.dependent, stream);
    }
    return rc;
}
