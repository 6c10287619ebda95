/* Layers of experts with LUT, FPX and INT weights: table, plan and products. */
#include "kernels/cuda/matmul/instances.h"
#include "kernels/cuda/matmul/shape.h"
#include "kernels/cuda/matmul/tile.h"
#include "kernels/cuda/moe/half.h"

#include <math.h>
#include <string.h>

/* A product of the plan: gate and up, or down. */
struct product {
    struct qt_shape shape;
    size_t n, k;
    unsigned bits, exp_bits;
    bool zeros, gated; /* gated: gate and up in one launch */
    struct {
        const void *kernel;
        struct qt_moe_config config;
    } kind[QT_MOE_KINDS];
};

/* Stored in `own` of struct qt_moe_state. */
struct state {
    int wide;                  /* tokens of a tile by wgmma; 0: no such kernels */
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

static const struct qtool_matmul_weight *weights_of(const struct qtool_moe_layer *layer, int matrix)
{
    return matrix == QT_MOE_GATE ? layer->gate : matrix == QT_MOE_UP ? layer->up : layer->down;
}

/* Checks one matrix and fills *s. Returns NULL, or an error message. */
static const char *matrix_fault(struct qt_shape *s, const struct qtool_matmul_weight *w)
{
    if (w->kind == QTOOL_MATMUL_MIX24)
        return "gate, up and down must all be MIX24, or none of them";
    const char *fault = qt_shape_of(s, w);
    if (fault)
        return fault;
    return s->pitch_blocks > 1 << 24 || s->pitch_groups > 1 << 24 ? "the matrix is too large"
                                                                  : NULL;
}

static bool same_form(const struct qtool_matmul_weight *a, const struct qt_shape *s,
                      const struct qtool_matmul_weight *b, const struct qt_shape *t)
{
    return a->kind == b->kind && a->bits == b->bits && a->n == b->n && a->k == b->k &&
           a->group == b->group && s->format == t->format &&
           (a->kind != QTOOL_MATMUL_FPX || a->exp_bits == b->exp_bits) &&
           qt_has_zeros(a) == qt_has_zeros(b) && s->pitch_blocks == t->pitch_blocks &&
           s->pitch_groups == t->pitch_groups;
}

static int write_table(void *table, const struct qtool_moe_layer *layer, char reason[160])
{
    struct qt_moe_matrix *out = (struct qt_moe_matrix *)table;
    struct qt_shape first[2], s; /* of gate and up; of down */
    for (size_t e = 0; e < layer->experts; e++)
        for (int i = 0; i < QT_MOE_MATRICES; i++) {
            const int of = i == QT_MOE_DOWN;
            const struct qtool_matmul_weight *w = &weights_of(layer, i)[e];
            const struct qtool_matmul_weight *model = of ? layer->down : layer->gate;
            const char *fault = matrix_fault(&s, w);
            if (fault)
                return qt_moe_refuse(reason, QTOOL_UNSUPPORTED, "expert %zu, %s: %s", e,
                                     qt_moe_names[i], fault);
            if (w == model)
                first[of] = s;
            if (!same_form(w, &s, model, &first[of]))
                return qt_moe_refuse(
                    reason, QTOOL_UNSUPPORTED,
                    "expert %zu, %s: format or shape differ from those of expert 0, %s", e,
                    qt_moe_names[i], of ? "down" : "gate");
            struct qt_moe_matrix m = {};
            for (int p = 0; p < 3 && s.width[p]; p++)
                m.plane[p] = (const unsigned char *)w->plane[p];
            m.scale = (const __half *)w->scale;
            m.zero = qt_has_zeros(w) ? (const unsigned char *)w->zero : NULL;
            m.table = w->kind == QTOOL_MATMUL_LUT ? (const __half *)w->table : NULL;
            m.factor = qt_result_factor(w);
            m.bias = layer->bias[i] ? layer->bias[i][e] : NULL;
            if ((size_t)m.bias % 4)
                return qt_moe_refuse(reason, QTOOL_UNSUPPORTED,
                                     "expert %zu, %s: the bias is misaligned", e, qt_moe_names[i]);
            memcpy(&out[e * QT_MOE_MATRICES + (size_t)i], &m, sizeof m);
        }
    return QTOOL_OK;
}

/* ---- plan ----------------------------------------------------------------------------------- */

/* wide: tokens of a tile by wgmma, or 0. */
static int tile_tokens(int kind, int wide)
{
    return kind == QT_MOE_FEW ? QT_MOE_FEW_TOKENS : wide ? wide : QT_MOE_MANY_TOKENS;
}

static const void *instance(enum qt_format format, int kind, int wide)
{
    if (wide)
        return kind == QT_MOE_FEW ? qt_moe_few_instance(format) : qt_moe_wide_instance(format);
    return kind == QT_MOE_FEW ? qt_moe_few_sm80_instance(format) : qt_moe_many_instance(format);
}

static int row_tiles(const struct product *p, int log2_wk)
{
    const size_t strips = (size_t)(QT_MOE_WARPS >> log2_wk) * (p->gated ? 1 : QT_MOE_STRIPS);
    return (int)ceil_div((size_t)p->shape.strips, strips);
}

/* Sets the members of *a for the kernel by wgmma: a stage has one block of columns, a warp one
 * strip. */
static size_t layout_wide(struct qt_moe_wide_args *a, const struct product *p, int tokens,
                          int stages)
{
    const struct qt_shape *s = &p->shape;
    a->slot_groups = s->grouped && s->group_shift == 5 ? 2 : 1;
    a->row_tiles = (int)ceil_div((size_t)s->strips, (size_t)QT_MOE_WARPS / (p->gated ? 2 : 1));
    a->slots = s->blocks;
    a->warp_bytes =
        (int)round_up((size_t)(128 * s->bits + (32 + s->zero_bytes) * a->slot_groups), 16);
    a->stage_bytes = QT_MOE_WARPS * a->warp_bytes;
    a->units = (int)ceil_div((size_t)stages, (size_t)a->slots) + 1;
    a->ring_at = qt_moe_wide_table_bytes(s->format);
    a->x_bytes = tokens * 128;
    a->weights_at = a->ring_at + stages * a->x_bytes;
    a->results_at = a->weights_at + (int)round_up((size_t)(stages * a->stage_bytes), 128);
    a->exchange_at = a->results_at + QT_MOE_RESULT_BYTES;
    a->units_at = a->exchange_at + QT_MOE_EXCHANGE_BYTES;
    a->barriers_at = a->units_at + a->units * QT_MOE_UNIT_BYTES;
    return (size_t)(a->barriers_at + QT_PIPELINE_BARRIER_BYTES);
}

/* Sets the members of *a that depend on shape and configuration. Returns bytes of shared memory. */
static size_t layout(struct qt_moe_wide_args *a, const struct product *p, int kind, int wide,
                     int log2_wk, int stages)
{
    const int tokens = tile_tokens(kind, wide);
    const struct qt_shape *s = &p->shape;
    a->gated = p->gated;
    a->pitch_blocks = s->pitch_blocks;
    a->pitch_groups = s->pitch_groups;
    a->k = (int)p->k;
    a->n = (int)p->n;
    a->strips = s->strips;
    a->blocks = s->blocks;
    a->group_shift = s->grouped ? s->group_shift : 30;
    a->groups = (int)s->groups;
    a->stages = stages;
    a->log2_wk = log2_wk;
    if (kind == QT_MOE_MANY && wide)
        return layout_wide(a, p, tokens, stages);
    a->slot_groups = s->grouped ? qt_stage_groups(s, 2) : 1;
    a->row_tiles = row_tiles(p, log2_wk);
    a->slots = (int)ceil_div((size_t)s->blocks, (size_t)2 << log2_wk);
    a->warp_bytes = QT_MOE_STRIPS * (256 * s->bits + (32 + s->zero_bytes) * a->slot_groups);
    a->ring_at = qt_mma_tile_table_bytes(s->format);
    a->stage_bytes = (int)round_up(
        (size_t)((tokens * 256 << log2_wk) + QT_MOE_WARPS * a->warp_bytes + QT_MOE_HEADER), 128);
    a->sums_at = a->ring_at + stages * a->stage_bytes;
    const int sums = log2_wk ? QT_MOE_WARPS * QT_MOE_STRIPS * tokens / 8 * 512 : 0;
    a->barriers_at = a->sums_at + sums;
    return (size_t)(a->barriers_at + QT_PIPELINE_BARRIER_BYTES);
}

/* A product whose kernels are chosen. */
struct chosen {
    const struct product *product;
    int kind, wide;
};

static size_t layout_of(const struct qt_moe_choice *c, int log2_wk, int stages, int *slots,
                        int *row_tiles)
{
    const struct chosen *of = (const struct chosen *)c->ctx;
    struct qt_moe_wide_args a;
    const size_t bytes = layout(&a, of->product, of->kind, of->wide, log2_wk, stages);
    *slots = a.slots;
    *row_tiles = a.row_tiles;
    return bytes;
}

static bool choose(const struct qtool_moe_plan *plan, struct product *p, int kind)
{
    const bool few = kind == QT_MOE_FEW, wgmma = !few && state_of(plan)->wide;
    const struct chosen of = {p, kind, state_of(plan)->wide};
    struct qt_moe_choice c = {};
    while (few && c.most_log2_wk < 3 && 4 << c.most_log2_wk <= p->shape.blocks)
        c.most_log2_wk++;
    c.least = wgmma ? 3 : 2;
    c.most = wgmma ? (int)QT_MOE_WIDE_STAGES : (int)QT_MOE_STAGES;
    c.least_paired = few ? 3 : 0;
    c.layout = layout_of;
    c.ctx = &of;
    return qt_moe_choose(&p->kind[kind].config, plan, &c);
}

static int plan_product(struct qtool_moe_plan *plan, bool down, const struct qtool_matmul_weight *w)
{
    struct product *p = &state_of(plan)->product[down];
    const char *fault = matrix_fault(&p->shape, w);
    if (fault)
        return qt_moe_refuse(plan->reason, QTOOL_UNSUPPORTED, "%s: %s", down ? "down" : "gate",
                             fault);
    p->n = w->n;
    p->k = w->k;
    p->bits = w->bits;
    p->exp_bits = w->exp_bits;
    p->zeros = qt_has_zeros(w);
    /* There is room for one table in shared memory. */
    p->gated = !down && (w->kind != QTOOL_MATMUL_LUT || plan->options.same_tables ||
                         qt_mma_tile_table_bytes(p->shape.format) == 0);
    for (int kind = 0; kind < QT_MOE_KINDS; kind++) {
        const void *kernel = instance(p->shape.format, kind, state_of(plan)->wide);
        if (!kernel || (kind == QT_MOE_MANY && plan->tokens <= QT_MOE_FEW_PAIRS))
            continue;
        if (!choose(plan, p, kind)) {
            if (kind == QT_MOE_MANY) /* tiles of 16 serve for all */
                continue;
            return qt_moe_refuse(plan->reason, QTOOL_UNSUPPORTED,
                                 "%s does not fit into the device's shared memory",
                                 down ? "down" : "gate and up");
        }
        int rc = qt_allow_smem(kernel, p->kind[kind].config.smem, plan->reason);
        if (rc != QTOOL_OK)
            return rc;
        p->kind[kind].kernel = kernel;
    }
    return QTOOL_OK;
}

/* Whether both products have a kernel for many tokens. */
static bool has_many(const struct qtool_moe_plan *p)
{
    return state_of(p)->product[0].kind[QT_MOE_MANY].kernel &&
           state_of(p)->product[1].kind[QT_MOE_MANY].kernel;
}

/* Whether X is gathered: the kernels by wgmma read it by position. */
static bool gathers(const struct qtool_moe_plan *p)
{
    return state_of(p)->wide && has_many(p);
}

static size_t gathered_bytes(const struct qtool_moe_plan *p)
{
    return gathers(p) ? qt_moe_half_x_pitch(p) * 2 : 0; /* of a position */
}

static int plan(struct qtool_moe_plan *p, const struct qtool_moe_layer *layer)
{
    struct qt_moe_state *s = qt_state(p);
    int rc = QTOOL_OK;
    *state_of(p) = {};
    state_of(p)->wide = s->device.cc == 90 ? qt_moe_half_wide_tokens(p) : 0;
    if (state_of(p)->wide)
        rc = qt_moe_half_need_maps(p, &state_of(p)->encode_map);
    for (int down = 0; down < 2 && rc == QTOOL_OK; down++)
        rc = plan_product(p, down, down ? layer->down : layer->gate);
    if (rc != QTOOL_OK)
        return rc;
    s->many_tokens = has_many(p) ? tile_tokens(QT_MOE_MANY, state_of(p)->wide) : 0;
    s->rounded = state_of(p)->wide && has_many(p);
    for (int down = 0; down < 2; down++)
        if (row_tiles(&state_of(p)->product[down], 3) > s->row_tiles)
            s->row_tiles = row_tiles(&state_of(p)->product[down], 3);
    const bool gated = state_of(p)->product[0].gated;
    s->partial_bytes = qt_moe_half_partial_bytes(p, gated);
    if (gated && gathered_bytes(p) > s->partial_bytes)
        s->partial_bytes = gathered_bytes(p);
    return QTOOL_OK;
}

/* ---- X by position --------------------------------------------------------------------------
 *
 * X is gathered to r->partial, or, if the results of up are there, to a place of its own. */

struct gathered {
    size_t x, factor; /* offsets in the workspace */
    size_t own_bytes; /* with those of half.h */
};

/* own: as r->own; partial: as r->partial. */
static struct gathered gathered_at(const struct qtool_moe_plan *p, size_t own, size_t partial)
{
    const bool gated = state_of(p)->product[0].gated, bf16 = p->options.dtype == QTOOL_BF16;
    const size_t positions = qt_moe_positions(p);
    size_t at = own + qt_moe_half_own_bytes(p);
    struct gathered g = {partial, 0, 0};
    if (!gated)
        g.x = qt_moe_take(&at, positions * gathered_bytes(p));
    g.factor = qt_moe_take(&at, gathers(p) && bf16 ? positions * sizeof(float) : 0);
    g.own_bytes = at - own;
    return g;
}

static size_t own_bytes(const struct qtool_moe_plan *p)
{
    return gathered_at(p, 0, 0).own_bytes;
}

static int run_gather(const struct qtool_moe_plan *p, const struct qt_moe_input *x,
                      struct qt_moe_run *r)
{
    const struct gathered g = gathered_at(p, r->own, r->partial);
    struct qt_moe_gather_args a = {};
    a.items = (const int *)(r->workspace + r->items) + QT_MOE_MANY;
    a.position = (const int *)(r->workspace + r->position);
    a.tokens = (int)p->tokens;
    a.topk = (int)p->options.topk;
    a.pitch = (int)(x->pitch / 8);
    a.x = (const uint4 *)x->values;
    a.token_factor = x->factor;
    a.out = (uint4 *)(r->workspace + g.x);
    a.out_factor = (float *)(r->workspace + g.factor);
    return qt_moe_launch(p, qt_moe_gather_instance(), dim3((unsigned)qt_state(p)->device.sms * 4),
                         256, 0, false, &a, r->stream);
}

/* Sets X of the kernel by wgmma. */
static bool set_positions(struct qt_moe_wide_args *a, const struct qtool_moe_plan *p,
                          const struct qt_moe_run *r)
{
    const struct gathered g = gathered_at(p, r->own, r->partial);
    if (a->by_token) {
        a->by_token = 0;
        a->x = (const __half *)(r->workspace + g.x);
        if (a->token_factor)
            a->token_factor = (const float *)(r->workspace + g.factor);
    }
    return qt_moe_half_map(&a->x_map, p, state_of(p)->encode_map, a->x, (size_t)a->k,
                           (size_t)a->x_pitch);
}

/* ---- run ------------------------------------------------------------------------------------ */

/* wide: as state.wide. */
static int threads_of(int kind, int wide)
{
    if (!wide)
        return QT_MOE_WARPS * 32;
    return kind == QT_MOE_FEW ? (int)QT_MOE_FEW_THREADS : (int)QT_MOE_WIDE_THREADS;
}

static int run_product(const struct qtool_moe_plan *p, int matrix,
                       const struct qt_moe_half_space *s, const struct qt_moe_input *x,
                       struct qt_moe_run *r)
{
    const struct state *state = state_of(p);
    const struct product *product = &state->product[matrix == QT_MOE_DOWN];
    int rc = QTOOL_OK;
    if (gathers(p) && matrix == (state->product[0].gated ? QT_MOE_GATE : QT_MOE_UP))
        rc = run_gather(p, x, r);
    for (int kind = 0; rc == QTOOL_OK && kind < (has_many(p) ? 2 : 1); kind++) {
        const bool wide = kind == QT_MOE_MANY && state->wide;
        const struct qt_moe_config *config = &product->kind[kind].config;
        struct qt_moe_wide_args a = {};
        layout(&a, product, kind, state->wide, config->log2_wk, config->stages);
        qt_moe_half_set_args(&a, p, matrix, kind, s, x, r);
        a.table = (const struct qt_moe_matrix *)r->table;
        a.decode.bits = product->bits;
        a.decode.exp_bits = product->exp_bits;
        a.decode.zeros = product->zeros;
        if (wide)
            qt_moe_half_set_wide(&a);
        if (wide && !set_positions(&a, p, r))
            return QTOOL_FAILED;
        rc = qt_moe_half_launch(p, product->kind[kind].kernel, config->grid,
                                threads_of(kind, state->wide), config->smem, &a, r);
    }
    return rc;
}

static int run(const struct qtool_moe_plan *p, struct qt_moe_run *r)
{
    return qt_moe_half_run(p, r, state_of(p)->product[0].gated, run_product);
}

const struct qt_moe_kind qt_moe_packed = {write_table, plan, own_bytes, run};
