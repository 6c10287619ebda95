/* Layers of experts with MIX24 weights: table, plan and products. */
#include "kernels/cuda/matmul/tile.h"
#include "kernels/cuda/moe/half.h"
#include "kernels/cuda/moe/mix24.h"

#include <math.h>
#include <string.h>

/* A product of the plan: gate or up, or down. */
struct product {
    size_t n, k, strip_bytes;
    int strips, units, fours;
    struct qt_moe_config few, many; /* the kernels for few and for many tokens */
};

/* Stored in `own` of struct qt_moe_state. */
struct state {
    int wide;                  /* tokens of a tile by wgmma; 0: no such kernel */
    void (*encode_map)(void);  /* see struct qt_plan_state */
    struct product product[2]; /* gate and up; down */
};

static_assert(sizeof(struct state) <= sizeof(qt_moe_state::own), "no room");

static struct state *state_of(struct qtool_moe_plan *p)
{
    return (struct state *)qt_state(p)->own;
}

static const struct state *state_of(const struct qtool_moe_plan *p)
{
    return (const struct state *)qt_state(p)->own;
}

/* ---- table ---------------------------------------------------------------------------------- */

static const char *matrix_fault(const struct qtool_matmul_weight *w)
{
    if (w->kind != QTOOL_MATMUL_MIX24)
        return "gate, up and down must all be MIX24, or none of them";
    const char *fault = qt_mix24_fault(w);
    if (fault)
        return fault;
    return qt_mix24_units(w) > QT_MIX24_PANEL_UNITS ? "k must be at most 65536" : NULL;
}

static bool same_form(const struct qtool_matmul_weight *a, const struct qtool_matmul_weight *b)
{
    return a->n == b->n && a->k == b->k && a->mix24.twos == b->mix24.twos &&
           a->mix24.fours == b->mix24.fours;
}

static int write_table(void *table, const struct qtool_moe_layer *layer, char reason[160])
{
    struct qt_moe_mix24_matrix *out = (struct qt_moe_mix24_matrix *)table;
    const struct qtool_matmul_weight *of[QT_MOE_MATRICES] = {layer->gate, layer->up, layer->down};
    for (size_t e = 0; e < layer->experts; e++)
        for (int i = 0; i < QT_MOE_MATRICES; i++) {
            const struct qtool_matmul_weight *w = &of[i][e];
            const char *fault = matrix_fault(w);
            if (fault)
                return qt_moe_refuse(reason, QTOOL_UNSUPPORTED, "expert %zu, %s: %s", e,
                                     qt_moe_names[i], fault);
            if (!same_form(w, i == QT_MOE_DOWN ? layer->down : layer->gate))
                return qt_moe_refuse(reason, QTOOL_UNSUPPORTED,
                                     "expert %zu, %s: shape or number of 4-bit groups differ from "
                                     "those of expert 0, %s",
                                     e, qt_moe_names[i], i == QT_MOE_DOWN ? "down" : "gate");
            const struct qt_mix24_outliers o = qt_mix24_outliers_of(w);
            struct qt_moe_mix24_matrix m = {};
            m.stream = (const unsigned char *)w->mix24.stream;
            m.perm = (const uint16_t *)w->mix24.perm;
            m.ptr = o.ptr;
            m.col = o.col;
            m.val = o.val;
            m.bias = layer->bias[i] ? layer->bias[i][e] : NULL;
            m.factor = ldexpf(1, w->scale_exp2);
            if ((size_t)m.bias % 4)
                return qt_moe_refuse(reason, QTOOL_UNSUPPORTED,
                                     "expert %zu, %s: the bias is misaligned", e, qt_moe_names[i]);
            memcpy(&out[e * QT_MOE_MATRICES + (size_t)i], &m, sizeof m);
        }
    return QTOOL_OK;
}

/* ---- plan ----------------------------------------------------------------------------------- */

static int row_tiles(const struct product *p, int log2_wk)
{
    return (int)ceil_div((size_t)p->strips, (size_t)(QT_MOE_WARPS >> log2_wk) * QT_MOE_STRIPS);
}

/* Sets the members of *a that depend on the shape alone. */
static void set_shape(struct qt_moe_mix24_args *a, const struct product *p)
{
    a->k = (int)p->k;
    a->n = (int)p->n;
    a->strips = p->strips;
    a->strip_bytes = p->strip_bytes;
    a->units = p->units;
    a->fours = p->fours;
    a->unit_inverse = 1 / (float)p->units;
    a->record_bytes = mix24_unit_bytes(p->fours > 0);
}

/* The same and the members that depend on the configuration. Returns bytes of shared memory. */
static size_t layout(struct qt_moe_mix24_args *a, const struct product *p, bool direct, int log2_wk,
                     int stages)
{
    set_shape(a, p);
    a->x_rows = direct ? 1 : (int)QT_MOE_FEW_TOKENS;
    a->row_tiles = row_tiles(p, log2_wk);
    a->log2_wk = log2_wk;
    a->fours_step = (p->fours << log2_wk) / p->units;
    a->fours_rest = (p->fours << log2_wk) % p->units;
    a->slots = (int)ceil_div((size_t)p->units, (size_t)1 << log2_wk);
    a->stages = stages;
    a->stage_bytes = (int)round_up(
        (size_t)((a->x_rows * 256 << log2_wk) + QT_MOE_WARPS * QT_MOE_STRIPS * a->record_bytes),
        128);
    a->sums_at = stages * a->stage_bytes;
    a->units_at =
        a->sums_at + (log2_wk ? QT_MOE_WARPS * QT_MOE_STRIPS * QT_MOE_FEW_TOKENS / 8 * 512 : 0);
    return (size_t)(a->units_at + QT_MOE_MIX24_UNITS * QT_MOE_MIX24_UNIT_BYTES);
}

/* The same of the kernel for many tokens: a stage has X of 64 columns, a warp one strip. */
static size_t layout_many(struct qt_moe_mix24_args *a, const struct product *p, int tokens,
                          int stages)
{
    set_shape(a, p);
    a->row_tiles = (int)ceil_div((size_t)p->strips, (size_t)QT_MOE_WARPS);
    a->slots = 2 * p->units;
    a->stages = stages;
    a->stage_bytes = tokens * 128;
    a->records_at = stages * a->stage_bytes;
    a->operands_at = (int)round_up(
        (size_t)(a->records_at + QT_MOE_MIX24_RECORDS * QT_MOE_WARPS * a->record_bytes), 128);
    a->results_at = a->operands_at + QT_MOE_WARPS * QT_MOE_MIX24_A_BYTES;
    a->units_at = a->results_at + QT_MOE_RESULT_BYTES;
    a->barriers_at = a->units_at + QT_MOE_MIX24_WIDE_UNITS * QT_MOE_MIX24_WIDE_UNIT_BYTES;
    return (size_t)(a->barriers_at + 2 * QT_PIPELINE_BARRIER_BYTES);
}

/* A product whose kernel is chosen: for few tokens (wide 0), or for tiles of `wide` tokens. */
struct chosen {
    const struct product *product;
    bool direct;
    int wide;
};

static size_t layout_of(const struct qt_moe_choice *c, int log2_wk, int stages, int *slots,
                        int *row_tiles)
{
    const struct chosen *of = (const struct chosen *)c->ctx;
    struct qt_moe_mix24_args a;
    const size_t bytes = of->wide ? layout_many(&a, of->product, of->wide, stages)
                                  : layout(&a, of->product, of->direct, log2_wk, stages);
    *slots = a.slots;
    *row_tiles = a.row_tiles;
    return bytes;
}

static bool choose_few(const struct qtool_moe_plan *plan, struct product *p)
{
    const struct chosen of = {p, qt_moe_is_direct(plan), 0};
    struct qt_moe_choice c = {};
    while (c.most_log2_wk < 3 && 2 << c.most_log2_wk <= p->units)
        c.most_log2_wk++;
    c.least = c.least_paired = 2;
    c.most = QT_MOE_STAGES;
    c.layout = layout_of;
    c.ctx = &of;
    return qt_moe_choose(&p->few, plan, &c);
}

static bool choose_many(const struct qtool_moe_plan *plan, struct product *p)
{
    const struct chosen of = {p, false, state_of(plan)->wide};
    struct qt_moe_choice c = {};
    c.least = 3;
    c.most = QT_MOE_WIDE_STAGES;
    c.layout = layout_of;
    c.ctx = &of;
    return qt_moe_choose(&p->many, plan, &c);
}

static int plan_product(struct qtool_moe_plan *plan, bool down, const struct qtool_matmul_weight *w)
{
    struct product *p = &state_of(plan)->product[down];
    const char *fault = matrix_fault(w), *name = down ? "down" : "gate";
    if (fault)
        return qt_moe_refuse(plan->reason, QTOOL_UNSUPPORTED, "%s: %s", name, fault);
    p->n = w->n;
    p->k = w->k;
    p->strips = qt_mix24_strips(w);
    p->units = qt_mix24_units(w);
    p->fours = (int)w->mix24.fours;
    p->strip_bytes = qt_mix24_strip_bytes(w);
    if (!choose_few(plan, p) || (state_of(plan)->wide && !choose_many(plan, p)))
        return qt_moe_refuse(plan->reason, QTOOL_UNSUPPORTED,
                             "%s does not fit into the device's shared memory", name);
    int rc = qt_allow_smem(qt_moe_mix24_instance(), p->few.smem, plan->reason);
    if (rc == QTOOL_OK && state_of(plan)->wide)
        rc = qt_allow_smem(qt_moe_mix24_wide_instance(), p->many.smem, plan->reason);
    return rc;
}

static int plan(struct qtool_moe_plan *p, const struct qtool_moe_layer *layer)
{
    struct qt_moe_state *s = qt_state(p);
    int rc = QTOOL_OK;
    *state_of(p) = {};
    if (s->device.cc == 90 && p->tokens > QT_MOE_FEW_PAIRS)
        state_of(p)->wide = qt_moe_half_wide_tokens(p);
    if (state_of(p)->wide)
        rc = qt_moe_half_need_maps(p, &state_of(p)->encode_map);
    for (int down = 0; down < 2 && rc == QTOOL_OK; down++)
        rc = plan_product(p, down, down ? layer->down : layer->gate);
    if (rc != QTOOL_OK)
        return rc;
    for (int down = 0; down < 2; down++)
        if (row_tiles(&state_of(p)->product[down], 3) > s->row_tiles)
            s->row_tiles = row_tiles(&state_of(p)->product[down], 3);
    s->many_tokens = state_of(p)->wide;
    s->rounded = state_of(p)->wide;
    s->partial_bytes = qt_moe_half_partial_bytes(p, false);
    return QTOOL_OK;
}

/* ---- X by position -------------------------------------------------------------------------- */

struct gathered {
    size_t x, factor; /* offsets in the workspace */
    size_t own_bytes; /* with those of half.h */
};

static size_t packed_columns(const struct product *p)
{
    return (size_t)p->units * 128;
}

/* own: as r->own. All products gather to the same place. */
static struct gathered gathered_at(const struct qtool_moe_plan *p, size_t own)
{
    const struct product *of = state_of(p)->product;
    const size_t positions = state_of(p)->wide ? qt_moe_positions(p) : 0;
    const size_t up = packed_columns(&of[0]), down = packed_columns(&of[1]);
    size_t at = own + qt_moe_half_own_bytes(p);
    struct gathered g = {};
    g.x = qt_moe_take(&at, positions * (up > down ? up : down) * 2);
    g.factor = qt_moe_take(&at, p->options.dtype == QTOOL_BF16 ? positions * sizeof(float) : 0);
    g.own_bytes = at - own;
    return g;
}

static size_t own_bytes(const struct qtool_moe_plan *p)
{
    return gathered_at(p, 0).own_bytes;
}

/* Gathers X of the product that `of` describes, and sets it. */
static int gather(const struct qtool_moe_plan *p, struct qt_moe_mix24_wide_args *of,
                  const struct qt_moe_run *r)
{
    const struct gathered g = gathered_at(p, r->own);
    const size_t columns = (size_t)of->units * 128;
    struct qt_moe_mix24_gather_args a = {};
    a.item = of->item;
    a.items = of->items;
    a.order = of->order;
    a.table = of->table;
    a.matrix = of->matrix;
    a.by_token = of->by_token;
    a.topk = of->topk;
    a.k = of->k;
    a.pitch = of->x_pitch;
    a.chunks = (int)columns / 8;
    a.x = of->x;
    a.token_factor = of->by_token ? of->token_factor : NULL;
    a.out = (uint4 *)(r->workspace + g.x);
    a.out_factor = (float *)(r->workspace + g.factor);
    if (a.token_factor)
        of->token_factor = a.out_factor;
    if (!qt_moe_half_map(&of->x_map, p, state_of(p)->encode_map, a.out, columns, columns))
        return QTOOL_FAILED;
    return qt_moe_launch(p, qt_moe_mix24_gather_instance(),
                         dim3((unsigned)qt_state(p)->device.sms * 4), 256, 0, false, &a, r->stream);
}

/* ---- run ------------------------------------------------------------------------------------ */

static int run_few(const struct qtool_moe_plan *p, int matrix, const struct qt_moe_half_space *s,
                   const struct qt_moe_input *x, struct qt_moe_run *r)
{
    const struct product *product = &state_of(p)->product[matrix == QT_MOE_DOWN];
    const struct qt_moe_config *config = &product->few;
    struct qt_moe_mix24_args a = {};
    layout(&a, product, qt_moe_is_direct(p), config->log2_wk, config->stages);
    qt_moe_half_set_args(&a, p, matrix, QT_MOE_FEW, s, x, r);
    a.table = (const struct qt_moe_mix24_matrix *)r->table;
    return qt_moe_half_launch(p, qt_moe_mix24_instance(), config->grid, QT_MOE_WARPS * 32,
                              config->smem, &a, r);
}

static int run_many(const struct qtool_moe_plan *p, int matrix, const struct qt_moe_half_space *s,
                    const struct qt_moe_input *x, struct qt_moe_run *r)
{
    const struct product *product = &state_of(p)->product[matrix == QT_MOE_DOWN];
    const struct qt_moe_config *config = &product->many;
    struct qt_moe_mix24_wide_args a = {};
    layout_many(&a, product, state_of(p)->wide, config->stages);
    qt_moe_half_set_args(&a, p, matrix, QT_MOE_MANY, s, x, r);
    qt_moe_half_set_wide(&a);
    a.table = (const struct qt_moe_mix24_matrix *)r->table;
    const int rc = gather(p, &a, r);
    return rc != QTOOL_OK ? rc
                          : qt_moe_half_launch(p, qt_moe_mix24_wide_instance(), config->grid,
                                               QT_MOE_WIDE_THREADS, config->smem, &a, r);
}

static int run_product(const struct qtool_moe_plan *p, int matrix,
                       const struct qt_moe_half_space *s, const struct qt_moe_input *x,
                       struct qt_moe_run *r)
{
    const int rc = run_few(p, matrix, s, x, r);
    return rc == QTOOL_OK && state_of(p)->wide ? run_many(p, matrix, s, x, r) : rc;
}

static int run(const struct qtool_moe_plan *p, struct qt_moe_run *r)
{
    return qt_moe_half_run(p, r, false, run_product);
}

const struct qt_moe_kind qt_moe_mix24 = {write_table, plan, own_bytes, run};
