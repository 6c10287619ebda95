/* The mix24 ring kernel's plan: choice of a configuration, arguments, launches. */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/common/tensor_map.h"
#include "kernels/cuda/mix24/ring.h"

#include <math.h>

enum {
    MAX_TOKENS = 32, /* per pass over the weights */
    MAX_CLUSTER = 8,
    CHOSEN_CLUSTER = 2, /* larger clusters were slower in all measurements */
};

/* ---- shared memory -------------------------------------------------------------------------- */

/* Tokens per pass over the weights. */
static size_t chunk_tokens(const struct qtool_matmul_plan *p)
{
    size_t most = (size_t)p->config.ring.token_tiles * 8;
    return p->m < most ? p->m : most;
}

static size_t pass_rows(const struct qtool_ring_config *c)
{
    return (size_t)(c->warps / c->warps_k * c->strips) * QT_STRIP_ROWS;
}

/* Returns the number of outliers per pass that should fit into shared memory: 1.5 times the
 * average. */
static size_t window_wanted(const struct qtool_matmul_weight *w, const struct qtool_ring_config *c)
{
    size_t average = w->mix24.outliers / qt_mix24_csr_rows(w) * pass_rows(c);
    return w->mix24.csr_ptr ? round_up(average + average / 2 + 64, 64) : 0;
}

static size_t part_units(const struct qtool_matmul_weight *w, const struct qtool_ring_config *c)
{
    return ceil_div((size_t)qt_mix24_units(w), (size_t)c->parts);
}

/* Sets the offsets into shared memory and returns its size. The window of outliers is limited so
 * that the size stays within `limit` bytes, if possible. */
static size_t layout(struct qt_mix24_args *a, const struct qtool_matmul_weight *w,
                     const struct qtool_ring_config *c, size_t m, size_t limit)
{
    enum { OUTLIER = 2 * 4 }; /* bytes of an outlier in two buffers */
    const size_t ptr_rows = round_up((size_t)c->strips_cta * QT_STRIP_ROWS, pass_rows(c)) + 1;
    size_t at, rows = pass_rows(c), window = window_wanted(w, c);
    a->units = qt_mix24_units(w);
    a->panels = (int)ceil_div((size_t)a->units, QT_MIX24_PANEL_UNITS);
    a->split_units = (int)ceil_div(part_units(w, c), (size_t)c->cluster);
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
    at = round_up(at, 16); /* may exceed int from here on: then the configuration is refused */
    a->sums_at = (int)at;
    at += (size_t)c->warps_k * m * (rows + 4) * 4;
    a->inbox_at = (int)at;
    at += c->cluster > 1 ? 2 * m * rows * 4 : 0;
    at = round_up(at, 128);
    a->ring_at = (int)at;
    a->depth = c->depth;
    at += (size_t)(c->warps * c->depth) * mix24_stage_bytes(c->strips);
    a->window_at = (int)at;
    if (at + window * OUTLIER > limit)
        window = at < limit ? (limit - at) / OUTLIER / 64 * 64 : 0;
    a->window = (int)window;
    return at + window * OUTLIER;
}

/* ---- choice --------------------------------------------------------------------------------- */

static bool power_of_2(int v)
{
    return v > 0 && (v & (v - 1)) == 0;
}

/* True if the kernel compiled for 9.0 will run: with TMA, clusters and dependent launches. Later
 * devices run the code for 8.0. */
static bool has_tma(const struct qtool_matmul_plan *p)
{
    return qt_state(p)->cc == 90;
}

static const char *config_fault(const struct qtool_ring_config *c,
                                const struct qtool_matmul_plan *p,
                                const struct qtool_matmul_weight *w)
{
    if (c->token_tiles != 1 && c->token_tiles != 2 && c->token_tiles != 4)
        return "token_tiles must be 1, 2 or 4";
    if (c->strips != 1 && c->strips != 2 && c->strips != 4)
        return "strips must be 1, 2 or 4";
    if (!power_of_2(c->warps) || c->warps > 16 || !power_of_2(c->warps_k) || c->warps_k > c->warps)
        return "warps and warps_k must be powers of two, warps at most 16 and warps_k at most "
               "warps";
    if (c->strips_cta < 1 || c->depth < 2 || c->depth > MIX24_MAX_DEPTH)
        return "strips_cta must be positive and depth 2..4";
    if (!qt_mix24_ring_instance(c->token_tiles, c->strips))
        return "no ring kernel has these token_tiles and strips";
    if (!power_of_2(c->cluster) || c->cluster > (has_tma(p) ? MAX_CLUSTER : 1))
        return "cluster must be 1, 2, 4 or 8, and 1 except on compute capability 9.0";
    if (c->parts < 1 || c->parts > qt_mix24_units(w))
        return "parts must be positive and at most the number of units";
    if (ceil_div(ceil_div(part_units(w, c), (size_t)c->cluster), (size_t)c->warps_k) >
        MIX24_MAX_UNITS)
        return "a warp has more than 32 units: more warps_k, cluster or parts are needed";
    return NULL;
}

/* Returns the number of row groups that run at the same time. */
static size_t groups_at_a_time(const struct qtool_matmul_plan *p, const struct qtool_ring_config *c,
                               size_t smem)
{
    if (c->cluster == 1)
        return (size_t)qt_state(p)->sms;
    const void *kernel = qt_mix24_ring_instance(c->token_tiles, c->strips);
    char reason[sizeof p->reason];
    if (qt_allow_smem(kernel, smem, reason) != QTOOL_OK)
        return 1;
    const size_t count = qt_resident_clusters(kernel, c->warps * 32, smem, (size_t)c->cluster);
    return count ? count : 1;
}

/* Sets c->strips_cta for m tokens per pass. Returns false if the configuration does not fit into
 * shared memory. more: allow more thread blocks than run at the same time, if the row pointers of
 * larger ones do not fit. */
static bool complete_config(struct qt_mix24_args *a, struct qtool_ring_config *c,
                            const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                            size_t m, bool more)
{
    const size_t limit = (size_t)qt_state(p)->smem_limit;
    c->strips_cta = 1;
    if (config_fault(c, p, w) || layout(a, w, c, m, limit) > limit)
        return false;
    size_t groups = groups_at_a_time(p, c, layout(a, w, c, m, limit));
    c->strips_cta = (int)ceil_div((size_t)qt_mix24_strips(w), groups);
    while (more && c->strips_cta > 64 && layout(a, w, c, m, limit) > limit)
        c->strips_cta = (c->strips_cta + 1) / 2;
    return layout(a, w, c, m, limit) <= limit;
}

/* Divides k into as few parts as fit into shared memory, at least `least` and at most `most`. */
static bool divide_k(struct qt_mix24_args *a, struct qtool_ring_config *c,
                     const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                     size_t m, int least, int most)
{
    for (int more = 0; more < 2; more++)
        for (c->parts = least; c->parts <= most; c->parts++)
            if (complete_config(a, c, p, w, m, more))
                return true;
    return false;
}

/*
 * Relative time of a configuration, in stages of two strips of a warp. A stage has a constant part
 * (0.25), and so has a pass. The terms for another launch and for a pass whose outliers are read
 * from global memory are guesses.
 */
static double cost(const struct qtool_ring_config *c, const struct qt_mix24_args *a,
                   const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w, size_t m)
{
    size_t passes = ceil_div((size_t)c->strips_cta * QT_STRIP_ROWS, pass_rows(c)) *
                    ceil_div((size_t)qt_mix24_strips(w) * (size_t)c->cluster,
                             (size_t)c->strips_cta * (size_t)qt_state(p)->sms);
    double stages = (double)ceil_div((size_t)a->split_units, (size_t)c->warps_k);
    double stage = 0.25 + 0.375 * c->strips;
    double outliers = (size_t)a->window < window_wanted(w, c) ? 1 : 0;
    double x = (double)m * a->split_units / 100;
    double part = (double)passes * (stages * stage + 0.6 + outliers) + x +
                  (c->cluster > 1 ? 2 : 0) + 0.3 * (double)(MIX24_MAX_DEPTH - c->depth);
    return c->parts * part + 2 * (c->parts - 1);
}

/* Warps with many accumulators are fastest with two stages. */
static int max_depth(const struct qtool_ring_config *c)
{
    return c->strips == 4 || c->strips * c->token_tiles == 8 ? 2 : MIX24_MAX_DEPTH;
}

/* Finds the fastest configuration for m tokens per pass. If `order` is not NULL, k is divided as in
 * that configuration. */
static bool choose_for(struct qtool_ring_config *out, const struct qtool_matmul_plan *p,
                       const struct qtool_matmul_weight *w, size_t m,
                       const struct qtool_ring_config *order)
{
    double best = 1e300;
    const int least = order ? order->parts : 1, most = order ? least : qt_mix24_units(w);
    struct qtool_ring_config c = {};
    struct qt_mix24_args a;
    c.warps = 16;
    c.token_tiles = m > 16 ? 4 : m > 8 ? 2 : 1;
    for (c.cluster = 1; c.cluster <= CHOSEN_CLUSTER; c.cluster *= 2)
        for (c.strips = 1; c.strips <= 4; c.strips *= 2)
            for (c.warps_k = 4; c.warps_k <= 16; c.warps_k *= 2)
                for (c.depth = max_depth(&c); c.depth >= 2; c.depth--) {
                    if (order && (c.cluster != order->cluster || c.warps_k != order->warps_k))
                        continue;
                    if (divide_k(&a, &c, p, w, m, least, most) && cost(&c, &a, p, w, m) < best) {
                        best = cost(&c, &a, p, w, m);
                        *out = c;
                    }
                }
    return best < 1e300;
}

int qt_mix24_ring_check(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w)
{
    struct qt_mix24_args a;
    const struct qtool_ring_config *c = &p->config.ring;
    struct qt_plan_state *state = qt_state(p);
    const char *fault = config_fault(c, p, w);
    if (fault)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "%s", fault);
    int rc = qt_set_smem(p, layout(&a, w, c, chunk_tokens(p), (size_t)state->smem_limit),
                         p->options.dependent_launch && has_tma(p));
    if (rc != QTOOL_OK)
        return rc;
    state->kernel = qt_mix24_ring_instance(c->token_tiles, c->strips);
    state->grid_x = c->cluster;
    state->grid_y = (int)ceil_div((size_t)qt_mix24_strips(w), (size_t)c->strips_cta);
    p->workspace_bytes =
        c->parts > 1 ? QTOOL_WORKSPACE_ZEROED + chunk_tokens(p) * p->n * sizeof(float) : 0;
    if (state->grid_y > 65535)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "strips_cta is too small: over 65535 row groups");
    state->encode_map = NULL;
    return has_tma(p) ? qt_need_tensor_maps(p) : QTOOL_OK;
}

bool qt_mix24_ring_choose(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w)
{
    struct qtool_ring_config order, c;
    const size_t m = p->m < MAX_TOKENS ? p->m : MAX_TOKENS;
    const bool invariant = p->options.batch_invariant;
    if ((invariant && !choose_for(&order, p, w, MAX_TOKENS, NULL)) ||
        !choose_for(&c, p, w, m, invariant ? &order : NULL))
        return false;
    p->config = {};
    p->config.path = QTOOL_MATMUL_RING;
    p->config.ring = c;
    return true;
}

/* ---- run ------------------------------------------------------------------------------------ */

/* Sets the arguments. Returns false if the weight needs more shared memory than was planned, or the
 * driver refuses a tensor map. */
static bool matmul_args(struct qt_mix24_args *out, const struct qtool_matmul_plan *p,
                        const struct qtool_matmul_weight *w)
{
    const struct qtool_ring_config *c = &p->config.ring;
    const size_t smem_bytes = qt_state(p)->smem_bytes;
    struct qt_mix24_args a = {};
    if (config_fault(c, p, w) || layout(&a, w, c, chunk_tokens(p), smem_bytes) > smem_bytes)
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
    a.dependent = p->options.dependent_launch && has_tma(p);
    a.strips_cta = c->strips_cta;
    a.passes = (int)ceil_div((size_t)c->strips_cta * QT_STRIP_ROWS, pass_rows(c));
    a.warps_k = c->warps_k;
    a.long_parts = 1;
    a.cluster = c->cluster;
    *out = a;
    return !has_tma(p) || qt_mix24_record_maps(p, out->records, w, c->strips);
}

/* Returns log2 of the threads that share an output of a pass. With a single pass all threads of the
 * thread block take part; with more passes at most two per output, which is no more work. */
static int row_threads(const struct qtool_ring_config *c, int passes, size_t m)
{
    int log2 = 0, most = passes == 1 ? 4 : 1;
    while (log2 < most && pass_rows(c) * m * 2 << log2 <= (size_t)c->warps * 32)
        log2++;
    return log2;
}

/* Launches the parts of k one after the other. sums: partial sums between them, [m][n]. */
static int launch_parts(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                        struct qt_mix24_args *a, float *sums, void *stream)
{
    int rc = QTOOL_OK;
    const int step = (int)part_units(w, &p->config.ring);
    for (int unit = 0; unit < a->units && rc == QTOOL_OK; unit += step) {
        a->first_unit = unit;
        a->end_unit = unit + step < a->units ? unit + step : a->units;
        a->before = unit ? sums : NULL;
        a->after = a->end_unit < a->units ? sums : NULL;
        rc = qt_launch_clusters(p, a, p->config.ring.warps * 32, a->cluster, a->dependent, stream);
    }
    return rc;
}

int qt_mix24_ring_run(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                      void *y, const void *x, void *workspace, void *stream)
{
    struct qt_mix24_args a;
    if (!matmul_args(&a, p, w))
        return QTOOL_UNSUPPORTED;
    const struct qtool_ring_config *c = &p->config.ring;
    const size_t chunk = chunk_tokens(p);
    float *sums = workspace ? (float *)((char *)workspace + QTOOL_WORKSPACE_ZEROED) : NULL;
    for (size_t t = 0; t < p->m; t += chunk) {
        a.m = (int)(p->m - t < chunk ? p->m - t : chunk);
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
