/* The stream kernel's plan: choice of a configuration, arguments, launches. */
#include "kernels/cuda/matmul/matmul.h"
#include "kernels/cuda/matmul/stream.h"

enum { STREAM_MAX_TOKENS = 32, MAX_SPLITS = 64 };

/* Slices of k begin at multiples of this many fragment blocks. */
static int slice_unit(const struct qt_shape *s)
{
    return s->group_shift == 8 ? 4 : 2;
}

/* ---- shared memory -------------------------------------------------------------------------- */

/* Returns the maximum number of split-K parts. */
static int split_units(const struct qt_shape *s)
{
    return (int)ceil_div((size_t)s->blocks, (size_t)slice_unit(s));
}

/* Returns the fragment blocks of the largest of `splits` parts of k. */
static int split_blocks(const struct qt_shape *s, int splits)
{
    return (int)ceil_div((size_t)split_units(s), (size_t)splits) * slice_unit(s);
}

static size_t pass_strips(const struct qtool_stream_config *c)
{
    return (size_t)(c->warps / c->warps_k * c->strips);
}

/* Sets the offsets into shared memory and returns its size. */
static size_t stream_layout(struct qt_stream_args *a, const struct qt_shape *s,
                            const struct qtool_stream_config *c, size_t m)
{
    size_t pitch = (size_t)split_blocks(s, c->splits) * 128 + 16,
           at = (size_t)qt_stream_table_bytes(s->format, c->token_tiles);
    a->x_pitch = (int)pitch;
    a->x_at = (int)at;
    at += pitch * m;
    a->token_at = (int)at;
    at += round_up(4 * m, 16);
    a->scale_at = (int)at;
    at += s->grouped ? 0 : (size_t)c->strips_cta * 32;
    a->sums_at = (int)at;
    a->sums_buffers = c->token_tiles == 1 ? 2 : 1;
    at += (size_t)a->sums_buffers * (size_t)c->warps_k * m * (pass_strips(c) * 16 + 4) * 4;
    const size_t ring_at =
        round_up(at, 128); /* may exceed int: then the configuration is refused */
    a->ring_at = (int)ring_at;
    a->slot_bytes = (uint32_t)c->strips *
                    (128 * (uint32_t)(2 * (s->width[0] + s->width[1] + s->width[2]) + s->grouped) +
                     4 * (uint32_t)s->zero_bytes);
    a->ring_bytes = a->slot_bytes * (uint32_t)qt_stream_depth(s->bits, c->token_tiles);
    return ring_at + (size_t)c->warps * a->ring_bytes;
}

/* ---- choice --------------------------------------------------------------------------------- */

static size_t chunk_tokens(size_t m)
{
    return m < STREAM_MAX_TOKENS ? m : STREAM_MAX_TOKENS;
}

static bool stream_fits(const struct qt_shape *s, const struct qtool_stream_config *c, size_t m,
                        int smem_limit)
{
    struct qt_stream_args a;
    return stream_layout(&a, s, c, m) <= (size_t)smem_limit &&
           (c->splits == 1 ||
            ceil_div((size_t)s->strips, (size_t)c->strips_cta) * 4 <= QTOOL_WORKSPACE_ZEROED);
}

static const char *config_fault(const struct qtool_stream_config *c, const struct qt_shape *s)
{
    bool pow2 = c->warps > 0 && (c->warps & (c->warps - 1)) == 0 && c->warps_k > 0;
    if (c->token_tiles != 1 && c->token_tiles != 2 && c->token_tiles != 4)
        return "token_tiles must be 1, 2 or 4";
    if (c->strips < 1 || c->strips > 2 || !qt_stream_instance(s->format, c->token_tiles, c->strips))
        return "strips must be 1, or 2 for fewer than 8 bits with at most 2 token tiles";
    if (c->warps < 1 || c->warps > 16 || !pow2 || c->warps % c->warps_k)
        return "warps must be a power of two, at most 16, and a multiple of warps_k";
    if (c->strips_cta < 1 || c->splits < 1 || c->splits > MAX_SPLITS ||
        c->splits > split_units(s) || (c->splits - 1) * split_blocks(s, c->splits) >= s->blocks)
        return "strips_cta must be positive, and splits 1..64 with channels in every part";
    return NULL;
}

/*
 * Relative time of a configuration: strips x fragment blocks of the slowest thread block, plus
 * fitted terms. Two strips share the loads of X; FPX formats with one token tile do not gain by
 * that. 16 slices of k have more partial sums to add than 8.
 */
static double stream_cost(const struct qtool_stream_config *c, const struct qt_shape *s, size_t m)
{
    size_t passes = ceil_div((size_t)c->strips_cta, pass_strips(c));
    double work = (double)(passes * pass_strips(c)) * split_blocks(s, c->splits);
    double sums = (double)passes * (8 + (double)m / 2);
    double x = (double)m * split_blocks(s, c->splits) / 8;
    double fix_up = c->splits > 1 ? 60 + (double)(c->splits * c->strips_cta) * (double)m / 32 : 0;
    if (c->strips == 1 && (s->grouped || c->token_tiles > 1))
        work *= 1.1;
    return work * (c->warps_k == 16 ? 1.05 : 1) + sums + x + fix_up;
}

/* Finds the fastest configuration of c.warps warps for m tokens. If `order` is not NULL, k is
 * divided as in that configuration. */
static bool choose_with(struct qtool_stream_config *out, struct qtool_stream_config c,
                        const struct qtool_matmul_plan *p, const struct qt_shape *s, size_t m,
                        const struct qtool_stream_config *order)
{
    const int sms = qt_state(p)->sms, smem_limit = qt_state(p)->smem_limit;
    double best = 1e300;
    for (c.splits = 1; c.splits <= MAX_SPLITS && c.splits <= split_units(s); c.splits++) {
        int groups = sms / c.splits > 0 ? sms / c.splits : 1;
        for (c.strips = 1; c.strips <= 2; c.strips++)
            for (c.warps_k = c.warps < 4 ? c.warps : 4; c.warps_k <= c.warps; c.warps_k *= 2) {
                if (order && (c.splits != order->splits || c.warps_k != order->warps_k))
                    continue;
                c.strips_cta =
                    (int)round_up(ceil_div((size_t)s->strips, (size_t)groups), (size_t)c.strips);
                double cost = stream_cost(&c, s, m);
                /* If the row scales do not fit: more thread blocks than run at a time. */
                while (!s->grouped && c.strips_cta > 64 && !stream_fits(s, &c, m, smem_limit))
                    c.strips_cta = (int)round_up((size_t)c.strips_cta / 2, (size_t)c.strips);
                if (cost < best && !config_fault(&c, s) && stream_fits(s, &c, m, smem_limit)) {
                    best = cost;
                    *out = c;
                }
            }
    }
    return best < 1e300;
}

/* Uses 16 warps, or as many as fit: with look-up tables and 32 tokens, 16 do not fit into the 99 KB
 * of shared memory of devices other than 8.0 and 9.0. */
static bool choose_for(struct qtool_stream_config *out, const struct qtool_matmul_plan *p,
                       const struct qt_shape *s, size_t m, const struct qtool_stream_config *order)
{
    struct qtool_stream_config c = {};
    bool found = false;
    c.token_tiles = m <= 8 ? 1 : m <= 16 ? 2 : 4;
    for (c.warps = 16; c.warps >= 1 && !found; c.warps /= 2)
        found = choose_with(out, c, p, s, m, order);
    return found;
}

/* The order of additions depends only on splits and warps_k. */
bool qt_stream_choose(struct qtool_matmul_plan *p, const struct qt_shape *s)
{
    struct qtool_stream_config order, c;
    const bool invariant = p->options.batch_invariant;
    if ((invariant && !choose_for(&order, p, s, STREAM_MAX_TOKENS, NULL)) ||
        !choose_for(&c, p, s, chunk_tokens(p->m), invariant ? &order : NULL))
        return false;
    p->config = {};
    p->config.path = QTOOL_MATMUL_STREAM;
    p->config.stream = c;
    return true;
}

/* ---- plan and run --------------------------------------------------------------------------- */

int qt_stream_check(struct qtool_matmul_plan *p, const struct qt_shape *s)
{
    struct qt_stream_args a;
    const struct qtool_stream_config *c = &p->config.stream;
    const char *fault = config_fault(c, s);
    if (fault)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "%s", fault);
    size_t m = chunk_tokens(p->m);
    int rc = qt_set_smem(p, stream_layout(&a, s, c, m), false);
    if (rc != QTOOL_OK)
        return rc;
    if (!stream_fits(s, c, m, qt_state(p)->smem_limit))
        return qt_refuse(p, QTOOL_UNSUPPORTED, "splits needs a larger strips_cta for so many rows");
    if ((size_t)c->token_tiles * 8 < m)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "token_tiles is too small for %zu tokens", m);
    struct qt_plan_state *state = qt_state(p);
    state->kernel = qt_stream_instance(s->format, c->token_tiles, c->strips);
    state->grid_x = (int)ceil_div((size_t)s->strips, (size_t)c->strips_cta);
    state->grid_y = c->splits;
    p->workspace_bytes = 0;
    if (c->splits > 1)
        p->workspace_bytes =
            QTOOL_WORKSPACE_ZEROED + (size_t)c->splits * m * (size_t)s->strips * 16 * 4;
    return QTOOL_OK;
}

static struct qt_stream_args stream_args(const struct qtool_matmul_plan *p,
                                         const struct qtool_matmul_weight *w,
                                         const struct qt_shape *s, void *workspace)
{
    const struct qtool_stream_config *c = &p->config.stream;
    struct qt_stream_args a = {};
    size_t m = chunk_tokens(p->m);
    stream_layout(&a, s, c, m);
    a.decode = qt_decode_args_of(w);
    for (int i = 0; i < 3; i++)
        a.plane[i] = (const unsigned char *)w->plane[i];
    a.scale = (const __half *)w->scale;
    a.zero = (const unsigned char *)w->zero;
    a.arrivals = (unsigned *)workspace;
    a.partial = (float *)((char *)workspace + QTOOL_WORKSPACE_ZEROED);
    a.pitch_blocks = (int)s->pitch_blocks;
    a.pitch_groups = (int)s->pitch_groups;
    a.n = (int)w->n;
    a.k = (int)w->k;
    a.strips = s->strips;
    a.blocks = s->blocks;
    a.group_shift = s->group_shift;
    a.factor = qt_result_factor(w);
    a.groups = (int)s->groups;
    a.bf16 = p->options.dtype == QTOOL_BF16;
    a.warps_k = c->warps_k;
    a.strips_cta = c->strips_cta;
    a.splits = c->splits;
    a.passes = (int)ceil_div((size_t)c->strips_cta, pass_strips(c));
    a.split_blocks = split_blocks(s, c->splits);
    a.slice_blocks =
        (int)round_up(ceil_div((size_t)a.split_blocks, (size_t)c->warps_k), (size_t)slice_unit(s));
    a.slot_groups = s->group_shift == 5 ? 4 : s->group_shift == 6 ? 2 : 1;
    return a;
}

int qt_stream_run(const struct qtool_matmul_plan *p, const struct qt_shape *s,
                  const struct qtool_matmul_weight *w, void *y, const void *x, void *workspace,
                  void *stream)
{
    struct qt_stream_args a = stream_args(p, w, s, workspace);
    for (size_t t = 0; t < p->m; t += STREAM_MAX_TOKENS) {
        a.m = (int)chunk_tokens(p->m - t);
        a.x = (const char *)x + t * p->k * 2;
        a.y = (char *)y + t * p->n * 2;
        int rc = qt_launch(p, &a, p->config.stream.warps * 32, false, stream);
        if (rc != QTOOL_OK)
            return rc;
    }
    return QTOOL_OK;
}
