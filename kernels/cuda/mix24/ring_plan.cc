/* Host side of the ring mix24 kernel: configurations, launches. */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/mix24/ring.h"

#include <math.h>

enum {
    MAX_TOKENS = 32, /* per pass over the weights */
    MAX_CLUSTER = 8,
    CHOSEN_CLUSTER = 2, /* larger ones were slower wherever it was measured */
};

/* ---- shared memory -----------------------------------------------------------------------------
 */

/* Tokens per pass over the weights. */
static size_t chunk_tokens(const struct qtool_matmul_plan *p)
{
    size_t most = (size_t)p->config.token_tiles * 8;
    return p->m < most ? p->m : most;
}

static size_t pass_rows(const struct qtool_matmul_config *c)
{
    return (size_t)(c->warps / c->warps_k * c->strips) * QT_STRIP_ROWS;
}

/* Outliers of a pass to have room for, if there is room: half as many again as there are on
 * average.
 */
static size_t window_wanted(const struct qtool_matmul_weight *w,
                            const struct qtool_matmul_config *c)
{
    size_t average = w->mix24.outliers / qt_mix24_csr_rows(w) * pass_rows(c);
    return w->mix24.csr_ptr ? round_up(average + average / 2 + 64, 64) : 0;
}

static size_t part_units(const struct qtool_matmul_weight *w, const struct qtool_matmul_config *c)
{
    return ceil_div((size_t)qt_mix24_units(w), (size_t)c->parts);
}

/* Offsets into the kernel's shared memory, of which there are `limit` bytes; returns how many are
 * wanted. */
static size_t layout(struct qt_mix24_args *a, const struct qtool_matmul_weight *w,
                     const struct qtool_matmul_config *c, size_t m, size_t limit)
{
    enum { OUTLIER = 2 * 4 }; /* bytes, of two passes */
    const size_t ptr_rows = round_up((size_t)c->strips_cta * QT_STRIP_ROWS, pass_rows(c)) + 1;
    size_t at, rows = pass_rows(c), window = window_wanted(w, c);
    a->units = qt_mix24_units(w);
    a->panels = (int)ceil_div((size_t)a->units, QT_MIX24_PANEL_UNITS);
    a->split_units = (int)ceil_div(part_units(w, c), (size_t)c->splits);
    a->x_pitch = a->split_units * MIX24_UNIT_BYTES + 16;
    at = (size_t)a->x_pitch * m;
    a->top_at = (int)at;
    at = round_up(at + 4 * m, 8);
    a->barrier_at = (int)at;
    at += 16;
    a->long_at = (int)at;
    at += 4;
    a->ptr_at = (int)at;
    a->ptr_rows = (int)ptr_rows;
    if (w->mix24.csr_ptr)
        at += (size_t)a->panels * ptr_rows * 4;
    at = round_up(at, 16); /* from here on it may be beyond int: then nobody uses the offsets */
    a->sums_at = (int)at;
    at += (size_t)c->warps_k * m * (rows + 4) * 4;
    a->inbox_at = (int)at;
    at += c->splits > 1 ? 2 * m * rows * 4 : 0;
    at = round_up(at, 128);
    a->ring_at = (int)at;
    a->depth = c->depth;
    at += (size_t)(c->warps * c->depth) * mix24_slot_bytes(c->strips);
    a->window_at = (int)at;
    if (at + window * OUTLIER > limit)
        window = at < limit ? (limit - at) / OUTLIER / 64 * 64 : 0;
    a->window = (int)window;
    return at + window * OUTLIER;
}

/* ---- choosing ----------------------------------------------------------------------------------
 */

static bool power_of_2(int v)
{
    return v > 0 && (v & (v - 1)) == 0;
}

/* Whether the kernel for compute capability 9.0 will run: with the copy engine, clusters and
 * dependent launches. Later devices run the one for 8.0. */
static bool has_engine(const struct qtool_matmul_plan *p)
{
    return p->cc == 90;
}

static const char *config_fault(const struct qtool_matmul_config *c,
                                const struct qtool_matmul_plan *p,
                                const struct qtool_matmul_weight *w)
{
    if (c->token_tiles != 1 && c->token_tiles != 2 && c->token_tiles != 4)
        return "token_tiles must be 1, 2 or 4";
    if (c->strips != 1 && c->strips != 2 && c->strips != 4)
        return "strips must be 1, 2 or 4";
    if (!power_of_2(c->warps) || c->warps > 16 || !power_of_2(c->warps_k) || c->warps_k > c->warps)
        return "warps must be a power of two, at most 16, and warps_k a divisor";
    if (c->strips_cta < 1 || c->depth < 2 || c->depth > MIX24_MAX_DEPTH)
        return "strips_cta must be positive, depth 2..4";
    if (!qt_mix24_ring_instance(c->token_tiles, c->strips))
        return "no kernel with so many tokens and strips";
    if (!power_of_2(c->splits) || c->splits > (has_engine(p) ? MAX_CLUSTER : 1))
        return "splits must be 1, 2, 4 or 8 (1 but on compute capability 9.0)";
    if (c->parts < 1 || c->parts > qt_mix24_units(w))
        return "parts must be positive, and not more than k has units of 128 channels";
    if (ceil_div(ceil_div(part_units(w, c), (size_t)c->splits), (size_t)c->warps_k) >
        MIX24_MAX_UNITS)
        return "too many channels for a warp";
    return NULL;
}

/* Row groups that run at a time. */
static size_t groups_at_a_time(const struct qtool_matmul_plan *p,
                               const struct qtool_matmul_config *c, size_t smem)
{
    if (c->splits == 1)
        return (size_t)p->sms;
    const void *kernel = qt_mix24_ring_instance(c->token_tiles, c->strips);
    char reason[sizeof p->reason];
    if (qt_allow_smem(kernel, smem, reason) != QTOOL_OK)
        return 1;
    const size_t count = qt_clusters_at_a_time(kernel, c->warps * 32, smem, (size_t)c->splits);
    return count ? count : 1;
}

/* Completes one shape of a configuration for m tokens a pass; false if there is no room for it.
 * more: than run at a time may be the blocks, if the row pointers of fewer find no room. */
static bool complete_config(struct qt_mix24_args *a, struct qtool_matmul_config *c,
                            const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                            size_t m, bool more)
{
    const size_t limit = (size_t)p->smem_limit;
    c->strips_cta = 1;
    if (config_fault(c, p, w) || layout(a, w, c, m, limit) > limit)
        return false;
    size_t groups = groups_at_a_time(p, c, layout(a, w, c, m, limit));
    c->strips_cta = (int)ceil_div((size_t)qt_mix24_strips(w), groups);
    while (more && c->strips_cta > 64 && layout(a, w, c, m, limit) > limit)
        c->strips_cta = (c->strips_cta + 1) / 2;
    return layout(a, w, c, m, limit) <= limit;
}

/* Cuts k into as few parts as there is room for, `least` or more. */
static bool cut_parts(struct qt_mix24_args *a, struct qtool_matmul_config *c,
                      const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                      size_t m, int least)
{
    for (int more = 0; more < 2; more++)
        for (c->parts = least; c->parts <= qt_mix24_units(w); c->parts++)
            if (complete_config(a, c, p, w, m, more))
                return true;
    return false;
}

/*
 * Relative time of a configuration: what a warp does, in slots of two strips. A slot has a part
 * that does not depend on the strips (0.25), a pass one that does not depend on the slots. A launch
 * more, and a pass whose outliers come out of global memory, are guesses.
 */
static double cost(const struct qtool_matmul_config *c, const struct qt_mix24_args *a,
                   const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w, size_t m)
{
    size_t passes = ceil_div((size_t)c->strips_cta * QT_STRIP_ROWS, pass_rows(c)) *
                    ceil_div((size_t)qt_mix24_strips(w) * (size_t)c->splits,
                             (size_t)c->strips_cta * (size_t)p->sms);
    double slots = (double)ceil_div((size_t)a->split_units, (size_t)c->warps_k);
    double slot = 0.25 + 0.375 * c->strips;
    double outliers = (size_t)a->window < window_wanted(w, c) ? 1 : 0;
    double x = (double)m * a->split_units / 100;
    double part = (double)passes * (slots * slot + 0.6 + outliers) + x + (c->splits > 1 ? 2 : 0) +
                  0.3 * (double)(MIX24_MAX_DEPTH - c->depth);
    return c->parts * part + 2 * (c->parts - 1);
}

/* Many sums of a slot are fastest with two slots. */
static int most_slots(const struct qtool_matmul_config *c)
{
    return c->strips == 4 || c->strips * c->token_tiles == 8 ? 2 : MIX24_MAX_DEPTH;
}

/* Of `most` tokens a pass. cut: if given, k is to be cut as there. */
static bool choose_for(struct qtool_matmul_config *out, const struct qtool_matmul_plan *p,
                       const struct qtool_matmul_weight *w, size_t most,
                       const struct qtool_matmul_config *cut)
{
    double best = 1e300;
    struct qtool_matmul_config c = {};
    struct qt_mix24_args a;
    c.warps = 16;
    c.token_tiles = most > 16 ? 4 : most > 8 ? 2 : 1;
    for (c.splits = 1; c.splits <= CHOSEN_CLUSTER; c.splits *= 2)
        for (c.strips = 1; c.strips <= 4; c.strips *= 2)
            for (c.warps_k = 4; c.warps_k <= 16; c.warps_k *= 2)
                for (c.depth = most_slots(&c); c.depth >= 2; c.depth--) {
                    if (cut && (c.splits != cut->splits || c.warps_k != cut->warps_k))
                        continue;
                    if (cut_parts(&a, &c, p, w, most, cut ? cut->parts : 1) &&
                        (!cut || c.parts == cut->parts) && cost(&c, &a, p, w, most) < best) {
                        best = cost(&c, &a, p, w, most);
                        *out = c;
                    }
                }
    return best < 1e300;
}

int qt_mix24_ring_check(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w)
{
    struct qt_mix24_args a;
    const struct qtool_matmul_config *c = &p->config;
    const char *fault = config_fault(c, p, w);
    if (fault)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "%s", fault);
    int rc = qt_take_smem(p, layout(&a, w, c, chunk_tokens(p), (size_t)p->smem_limit),
                          p->options.dependent_launch && has_engine(p));
    if (rc != QTOOL_OK)
        return rc;
    p->kernel = qt_mix24_ring_instance(c->token_tiles, c->strips);
    p->grid_x = c->splits;
    p->grid_y = (int)ceil_div((size_t)qt_mix24_strips(w), (size_t)c->strips_cta);
    p->workspace_bytes =
        c->parts > 1 ? QTOOL_WORKSPACE_ZEROED + chunk_tokens(p) * p->n * sizeof(float) : 0;
    if (p->grid_y > 65535)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "too many row groups");
    p->encode_map = NULL;
    return has_engine(p) ? qt_need_tensor_maps(p) : QTOOL_OK;
}

bool qt_mix24_ring_choose(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w)
{
    struct qtool_matmul_config cut;
    const size_t most = p->m < MAX_TOKENS ? p->m : MAX_TOKENS;
    if (!p->options.batch_invariant)
        return choose_for(&p->config, p, w, most, NULL);
    return choose_for(&cut, p, w, MAX_TOKENS, NULL) && choose_for(&p->config, p, w, most, &cut);
}

/* ---- run ---------------------------------------------------------------------------------------
 */

/* False if the weight is not of the kind that was planned for. */
static bool matmul_args(struct qt_mix24_args *out, const struct qtool_matmul_plan *p,
                        const struct qtool_matmul_weight *w)
{
    const struct qtool_matmul_config *c = &p->config;
    struct qt_mix24_args a = {};
    if (config_fault(c, p, w) || layout(&a, w, c, chunk_tokens(p), p->smem_bytes) > p->smem_bytes)
        return false;
    a.stream = (const unsigned char *)w->mix24.stream;
    a.perm = (const uint16_t *)w->mix24.perm;
    a.csr_ptr = (const uint32_t *)w->mix24.csr_ptr;
    a.csr_col = (const uint16_t *)w->mix24.csr_col;
    a.csr_val = (const uint16_t *)w->mix24.csr_val;
    a.csr_pitch = qt_mix24_csr_rows(w) + 1;
    a.n = (int)w->n;
    a.k = (int)w->k;
    a.strips = qt_mix24_strips(w);
    a.fours = (int)w->mix24.fours;
    a.pitch = (uint32_t)qt_mix24_strip_bytes(w);
    a.factor = ldexpf(1, w->scale_exp2);
    a.bf16 = p->options.dtype == QTOOL_BF16;
    a.dependent = p->options.dependent_launch && has_engine(p);
    a.strips_cta = c->strips_cta;
    a.passes = (int)ceil_div((size_t)c->strips_cta * QT_STRIP_ROWS, pass_rows(c));
    a.warps_k = c->warps_k;
    a.long_parts = 1;
    a.cluster = c->splits;
    *out = a;
    return !has_engine(p) || qt_mix24_record_maps(p, out->records, w, c->strips);
}

/* log2 of the threads that share an output of a pass: all of the block's if there is one pass,
 * where nobody has anything else to do; else two, as it is all the same work. */
static int row_threads(const struct qtool_matmul_config *c, int passes, size_t m)
{
    int log2 = 0, most = passes == 1 ? 4 : 1;
    while (log2 < most && pass_rows(c) * m * 2 << log2 <= (size_t)c->warps * 32)
        log2++;
    return log2;
}

/* The parts of k one after the other; sums: of a.m tokens. */
static int launch_parts(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                        struct qt_mix24_args *a, float *sums, void *stream)
{
    int rc = QTOOL_OK;
    const int step = (int)part_units(w, &p->config);
    for (int unit = 0; unit < a->units && rc == QTOOL_OK; unit += step) {
        a->first_unit = unit;
        a->end_unit = unit + step < a->units ? unit + step : a->units;
        a->before = unit ? sums : NULL;
        a->after = a->end_unit < a->units ? sums : NULL;
        rc = qt_launch_clusters(p, a, p->config.warps * 32, a->cluster, a->dependent, stream);
    }
    return rc;
}

int qt_mix24_ring_run(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                      void *y, const void *x, void *workspace, void *stream)
{
    struct qt_mix24_args a;
    if (!matmul_args(&a, p, w))
        return QTOOL_UNSUPPORTED;
    const struct qtool_matmul_config *c = &p->config;
    const size_t chunk = chunk_tokens(p);
    float *sums = workspace ? (float *)((char *)workspace + QTOOL_WORKSPACE_ZEROED) : NULL;
    for (size_t t = 0; t < p->m; t += chunk) {
        size_t left = p->m - t;
        a.m = (int)(left < chunk ? left : chunk);
        a.x = (const char *)x + t * p->k * 2;
        a.y = (char *)y + t * p->n * 2;
        a.x_aligned = p->k % 8 == 0 && ((size_t)a.x & 15) == 0;
        if (!p->options.batch_invariant) {
            a.row_threads = row_threads(c, a.passes, (size_t)a.m);
            a.long_parts = a.m < c->warps ? c->warps / a.m : 1;
        }
        int rc = launch_parts(p, w, &a, sums, stream);
        if (rc != QTOOL_OK)
            return rc;
    }
    return QTOOL_OK;
}
