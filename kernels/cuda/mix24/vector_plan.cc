/* The mix24 vector kernel's plan: choice of a configuration, arguments, launch. */
#include "kernels/cuda/common/tensor_map.h"
#include "kernels/cuda/mix24/vector.h"

#include <limits.h>
#include <math.h>

enum {
    MAX_COLS = 65536, /* one CSR panel */
    MIN_WARPS = 12    /* with fewer, two thread blocks would fit on a multiprocessor */
};

static int pass_strips(const struct qtool_vector_config *c)
{
    return c->warps / c->warps_k * c->strips;
}

static size_t passes_of(const struct qtool_vector_config *c)
{
    return ceil_div((size_t)c->strips_cta, (size_t)pass_strips(c));
}

static int log2_of(int v)
{
    int log2 = 0;
    while (v >> (log2 + 1))
        log2++;
    return log2;
}

/* Sets the offsets into shared memory and returns its size. */
static size_t layout(struct qt_mix24_vector_args *a, const struct qtool_matmul_weight *w,
                     const struct qtool_vector_config *c)
{
    const size_t units = (size_t)qt_mix24_units(w), rows = (size_t)pass_strips(c) * QT_STRIP_ROWS;
    const int stages = mix24_vector_stages(c->strips);
    size_t at =
        QT_MIX24_VECTOR_RINGS + (size_t)(c->warps * stages) * mix24_vector_stage_bytes(c->strips);
    a->x_at = (int)at;
    at += units * QT_MIX24_UNIT_COLS * 2;
    a->at_at = (int)at;
    at += units * QT_MIX24_VECTOR_AT;
    a->sums_at = (int)at;
    return at + 2 * (size_t)c->warps_k * (rows + 4) * sizeof(float);
}

/* ---- plan ----------------------------------------------------------------------------------- */

/* Relative time, fitted to an H200. A unit of 1, 2 or 3 strips takes 1.5, 2.5 or 3.65 if a
 * scheduler has four warps, and less if all have three. The end of a pass takes 2. */
static double cost(const struct qtool_vector_config *c, const struct qtool_matmul_weight *w)
{
    static const double unit[QT_MIX24_VECTOR_STRIPS] = {1.5, 2.5, 3.65};
    const size_t units = ceil_div((size_t)qt_mix24_units(w), (size_t)c->warps_k);
    const double busy = c->warps > 12 ? 1 : 0.78;
    return (double)passes_of(c) * ((double)units * unit[c->strips - 1] * busy + 2);
}

static const char *config_fault(const struct qtool_vector_config *c,
                                const struct qtool_matmul_plan *p,
                                const struct qtool_matmul_weight *w)
{
    const size_t units = (size_t)qt_mix24_units(w);
    if (qt_state(p)->cc != 90 || p->m != 1 || units * QT_MIX24_UNIT_COLS > MAX_COLS)
        return "the vector kernel needs one token, at most 65536 packed columns, compute "
               "capability 9.0";
    if (c->warps < MIN_WARPS || c->warps > QT_MIX24_VECTOR_WARPS || c->warps_k < 1 ||
        c->warps % c->warps_k)
        return "warps must be 12..16 and a multiple of warps_k";
    if (c->strips < 1 || c->strips > QT_MIX24_VECTOR_STRIPS || c->strips_cta < 1)
        return "strips must be 1..3 and strips_cta positive";
    if ((size_t)c->warps_k > units || ceil_div(units, (size_t)c->warps_k) > QT_MIX24_VECTOR_UNITS)
        return "warps_k must give every warp 1..32 units";
    if (pass_strips(c) * QT_STRIP_ROWS > c->warps * 32)
        return "strips is too large: a pass has more rows than threads";
    return NULL;
}

static bool choose(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w, int strips_cta)
{
    struct qt_mix24_vector_args a;
    double best = 1e300;
    const struct qt_plan_state *state = qt_state(p);
    struct qtool_vector_config c = {};
    c.strips_cta = strips_cta;
    for (c.strips = 1; c.strips <= QT_MIX24_VECTOR_STRIPS; c.strips++)
        for (c.warps_k = 1; c.warps_k <= QT_MIX24_VECTOR_WARPS; c.warps_k++)
            for (c.warps = (int)round_up(MIN_WARPS, (size_t)c.warps_k);
                 c.warps <= QT_MIX24_VECTOR_WARPS; c.warps += c.warps_k)
                if (!config_fault(&c, p, w) && layout(&a, w, &c) <= (size_t)state->smem_limit &&
                    cost(&c, w) < best) {
                    best = cost(&c, w);
                    p->config = {};
                    p->config.path = QTOOL_MATMUL_VECTOR;
                    p->config.vector = c;
                }
    return best < 1e300;
}

static int blocks_of(const struct qtool_matmul_weight *w, int strips_cta)
{
    return (int)ceil_div((size_t)qt_mix24_strips(w), (size_t)strips_cta);
}

bool qt_mix24_vector_choose(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w)
{
    return choose(p, w, blocks_of(w, qt_state(p)->sms));
}

/* many: w is one of several matrices, that with the most units. */
static int check(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w, int blocks,
                 bool many)
{
    struct qt_mix24_vector_args a;
    const struct qtool_vector_config *c = &p->config.vector;
    const char *fault = config_fault(c, p, w);
    if (fault)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "%s", fault);
    int rc = qt_set_smem(p, layout(&a, w, c), p->options.dependent_launch);
    if (rc != QTOOL_OK)
        return rc;
    struct qt_plan_state *state = qt_state(p);
    state->kernel = qt_mix24_vector_instance(c->strips, many);
    state->grid_x = blocks;
    state->grid_y = 1;
    p->workspace_bytes = 0;
    return qt_need_tensor_maps(p);
}

int qt_mix24_vector_check(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w)
{
    return check(p, w, blocks_of(w, p->config.vector.strips_cta), false);
}

/* ---- run ------------------------------------------------------------------------------------ */

/* Returns the part of a pass that a warp computes. */

static struct qt_mix24_share share_of(const struct qtool_matmul_weight *w,
                                      const struct qtool_vector_config *c, int warp)
{
    const uint32_t parts = (uint32_t)c->warps_k, i = (uint32_t)warp % parts;
    const uint32_t units = (uint32_t)qt_mix24_units(w), fours = (uint32_t)w->mix24.fours;
    struct qt_mix24_share s = {};
    s.unit = (uint16_t)(units * i / parts);
    s.count = (uint16_t)(units * (i + 1) / parts - s.unit);
    s.strip = (uint16_t)(warp / c->warps_k * c->strips);
    s.warp_of_k = (uint16_t)i;
    /* Units of 4-bit groups are spread evenly: u * fours / units of them precede unit u. */
    s.at = (s.unit * (uint32_t)QTOOL_MATMUL_MIX24_TWO +
            s.unit * fours / units * (QTOOL_MATMUL_MIX24_FOUR - QTOOL_MATMUL_MIX24_TWO)) /
           8;
    for (uint32_t u = 0; u < s.count; u++)
        s.fours |= (uint32_t)((s.unit + u) * fours % units + fours >= units) << u;
    return s;
}

/* False: w does not fit the plan. */
static bool fill_args(struct qt_mix24_vector_args *out, const struct qtool_matmul_plan *p,
                      const struct qtool_matmul_weight *w, void *y, const void *x)
{
    struct qt_mix24_vector_args &a = *out;
    const struct qtool_vector_config *c = &p->config.vector;
    if (config_fault(c, p, w) || layout(&a, w, c) > qt_state(p)->smem_bytes ||
        !qt_mix24_record_maps(p, a.records, w, c->strips))
        return false;
    const struct qt_mix24_outliers o = qt_mix24_outliers_of(w);
    a.csr_ptr = o.ptr;
    a.csr_col = o.col;
    a.csr_val = o.val;
    a.perm = (const uint32_t *)w->mix24.perm;
    a.x = x;
    a.y = y;
    a.n = (int)w->n;
    a.k = (int)w->k;
    a.units = qt_mix24_units(w);
    a.strips = qt_mix24_strips(w);
    a.strips_cta = c->strips_cta;
    a.pass_strips = pass_strips(c);
    a.passes = (int)passes_of(c);
    a.warps_k = c->warps_k;
    a.log2_row_threads = log2_of(c->warps * 32 / (pass_strips(c) * QT_STRIP_ROWS));
    a.bf16 = p->options.dtype == QTOOL_BF16;
    a.x_aligned = p->k % 8 == 0 && ((size_t)x & 15) == 0;
    a.dependent = p->options.dependent_launch;
    a.factor = ldexpf(1, w->scale_exp2);
    for (int i = 0; i < c->warps; i++)
        a.share[i] = share_of(w, c, i);
    return true;
}

int qt_mix24_vector_run(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                        void *y, const void *x, void *stream)
{
    struct qt_mix24_vector_args a = {};
    if (!fill_args(&a, p, w, y, x))
        return QTOOL_UNSUPPORTED;
    return qt_launch(p, &a, p->config.vector.warps * 32, a.dependent, stream);
}

/* ---- several matrices ----------------------------------------------------------------------- */

int qt_mix24_vector_plan_many(struct qtool_matmul_plan *p,
                              const struct qtool_matmul_weight *const *w, size_t count)
{
    const struct qtool_matmul_weight *most = w[0];
    int blocks, strips_cta = 0;
    for (size_t i = 1; i < count; i++)
        most = qt_mix24_units(w[i]) > qt_mix24_units(most) ? w[i] : most;
    do {
        strips_cta++;
        blocks = 0;
        for (size_t i = 0; i < count; i++)
            blocks += blocks_of(w[i], strips_cta);
    } while (blocks > qt_state(p)->sms);
    if (!choose(p, most, strips_cta))
        return qt_refuse(p, QTOOL_UNSUPPORTED,
                         "several matrices need one token, x in shared memory beside the weights, "
                         "and compute capability 9.0");
    return check(p, most, blocks, true);
}

int qt_mix24_vector_run_many(const struct qtool_matmul_plan *p,
                             const struct qtool_matmul_weight *const *w, size_t count,
                             void *const *y, const void *x, void *stream)
{
    struct qt_mix24_vector_many_args many = {};
    int blocks = 0;
    for (size_t i = 0; i < QTOOL_MATMUL_MANY; i++)
        many.first[i] = INT_MAX;
    for (size_t i = 0; i < count; i++) {
        if (!fill_args(&many.args[i], p, w[i], y[i], x))
            return QTOOL_UNSUPPORTED;
        many.first[i] = blocks;
        blocks += blocks_of(w[i], p->config.vector.strips_cta);
    }
    if (blocks != qt_state(p)->grid_x)
        return QTOOL_UNSUPPORTED;
    return qt_launch(p, &many, p->config.vector.warps * 32, p->options.dependent_launch, stream);
}
