/* qtool_moe.h: tables, plans and runs of layers of experts. */
#include "kernels/cuda/moe/moe.h"
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/common/prepare.h"
#include "kernels/cuda/matmul/instances.h"
#include "kernels/cuda/matmul/shape.h"
#include "kernels/cuda/matmul/tile.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Experts with more tokens than this use tiles of 64 or 128: 3 tiles of 16 take longer. */
enum { FEW_PAIRS = 32, MAX_TOPK = 32, MAX_TOKENS = 1 << 20, MAX_PAIRS = 1 << 24 };
/* Pipeline stages of the kernel by wgmma at most: one takes more than a microsecond. */
enum { WIDE_STAGES = 4 };

/* A product of the plan: gate and up, or down. */
struct product {
    struct qt_shape shape;
    size_t n, k;
    unsigned bits, exp_bits;
    bool zeros, gated; /* gated: gate and up in one launch */
    struct {
        const void *kernel;
        int log2_wk, stages, grid;
        size_t smem;
    } kind[QT_MOE_KINDS];
};

/* Stored in `internal` of struct qtool_moe_plan. */
struct state {
    struct qt_device device;
    bool ready, wide, rounded; /* kernels by wgmma; results of down have 16 bits */
    struct product product[2]; /* gate and up; down */
};

static_assert(sizeof(struct state) <= sizeof(qtool_moe_plan::internal), "no room");

static struct state *state_of(struct qtool_moe_plan *p)
{
    return (struct state *)p->internal.bytes;
}

static const struct state *state_of(const struct qtool_moe_plan *p)
{
    return (const struct state *)p->internal.bytes;
}

static int refuse(char reason[160], int status, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(reason, 160, fmt, ap);
    va_end(ap);
    return status;
}

/* ---- table ---------------------------------------------------------------------------------- */

static const char *const matrix_names[QT_MOE_MATRICES] = {"gate", "up", "down"};

static const struct qtool_matmul_weight *weights_of(const struct qtool_moe_layer *layer, int matrix)
{
    return matrix == QT_MOE_GATE ? layer->gate : matrix == QT_MOE_UP ? layer->up : layer->down;
}

/* Checks one matrix and fills *s. Returns NULL, or an error message. */
static const char *matrix_fault(struct qt_shape *s, const struct qtool_matmul_weight *w)
{
    if (w->kind == QTOOL_MATMUL_MIX24)
        return "MIX24 weights have no grouped product";
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

static const char *layer_fault(const struct qtool_moe_layer *layer)
{
    if (layer->experts < 1 || layer->experts > QTOOL_MOE_MAX_EXPERTS)
        return "experts must be 1..512";
    if (!layer->gate || !layer->up || !layer->down)
        return "gate, up and down must not be NULL";
    const struct qtool_matmul_weight *gate = layer->gate, *down = layer->down;
    if (gate->n != down->k || gate->k != down->n)
        return "down must have n = k of gate, and k = n of gate";
    return NULL;
}

int qtool_moe_table(void *table, const struct qtool_moe_layer *layer, char reason[160])
{
    struct qt_moe_matrix *out = (struct qt_moe_matrix *)table;
    struct qt_shape first[2], s; /* of gate and up; of down */
    reason[0] = '\0';
    const char *fault = layer_fault(layer);
    if (fault)
        return refuse(reason, QTOOL_UNSUPPORTED, "%s", fault);
    for (size_t e = 0; e < layer->experts; e++)
        for (int i = 0; i < QT_MOE_MATRICES; i++) {
            const int of = i == QT_MOE_DOWN;
            const struct qtool_matmul_weight *w = &weights_of(layer, i)[e];
            const struct qtool_matmul_weight *model = of ? layer->down : layer->gate;
            fault = matrix_fault(&s, w);
            if (fault)
                return refuse(reason, QTOOL_UNSUPPORTED, "expert %zu, %s: %s", e, matrix_names[i],
                              fault);
            if (w == model)
                first[of] = s;
            if (!same_form(w, &s, model, &first[of]))
                return refuse(reason, QTOOL_UNSUPPORTED,
                              "expert %zu, %s: format or shape differ from those of expert 0, %s",
                              e, matrix_names[i], of ? "down" : "gate");
            struct qt_moe_matrix m = {};
            for (int p = 0; p < 3 && s.width[p]; p++)
                m.plane[p] = (const unsigned char *)w->plane[p];
            m.scale = (const __half *)w->scale;
            m.zero = qt_has_zeros(w) ? (const unsigned char *)w->zero : NULL;
            m.table = w->kind == QTOOL_MATMUL_LUT ? (const __half *)w->table : NULL;
            m.factor = qt_result_factor(w);
            m.bias = layer->bias[i] ? layer->bias[i][e] : NULL;
            if ((size_t)m.bias % 4)
                return refuse(reason, QTOOL_UNSUPPORTED, "expert %zu, %s: the bias is misaligned",
                              e, matrix_names[i]);
            memcpy(&out[e * QT_MOE_MATRICES + (size_t)i], &m, sizeof m);
        }
    return QTOOL_OK;
}

/* ---- plan ----------------------------------------------------------------------------------- */

/* wide: the plan's kernels for many tokens are those by wgmma. */
static int tile_tokens(int kind, bool wide)
{
    return kind == QT_MOE_FEW ? QT_MOE_FEW_TOKENS : wide ? QT_MOE_WIDE_TOKENS : QT_MOE_MANY_TOKENS;
}

static const void *instance(enum qt_format format, int kind, bool wide)
{
    return kind == QT_MOE_FEW ? qt_moe_few_instance(format)
           : wide             ? qt_moe_wide_instance(format)
                              : qt_moe_many_instance(format);
}

static int row_tiles(const struct product *p, int log2_wk)
{
    const size_t strips = (size_t)(QT_MOE_WARPS >> log2_wk) * (p->gated ? 1 : QT_MOE_STRIPS);
    return (int)ceil_div((size_t)p->shape.strips, strips);
}

/* Sets the members of *a that depend on shape and configuration. Returns bytes of shared memory. */
static size_t layout(struct qt_moe_product_args *a, const struct product *p, int kind, bool wide,
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
    a->slot_groups = s->grouped ? qt_stage_groups(s, 2) : 1;
    a->row_tiles = row_tiles(p, log2_wk);
    a->log2_wk = log2_wk;
    a->slots = (int)ceil_div((size_t)s->blocks, (size_t)2 << log2_wk);
    a->stages = stages;
    a->warp_bytes = QT_MOE_STRIPS * (256 * s->bits + (32 + s->zero_bytes) * a->slot_groups);
    a->ring_at = qt_mma_tile_table_bytes(s->format);
    if (kind == QT_MOE_MANY && wide) {
        a->ring_at = qt_moe_wide_table_bytes(s->format);
        a->stage_bytes = (int)round_up((size_t)(tokens * 256 + QT_MOE_WARPS * a->warp_bytes), 1024);
        a->results_at = a->ring_at + stages * a->stage_bytes;
        a->units_at = a->results_at + 2 * QT_TILE_RESULT_BYTES;
        a->barriers_at = a->units_at + QT_MOE_UNITS * QT_MOE_UNIT_BYTES;
        return (size_t)(a->barriers_at + QT_PIPELINE_BARRIER_BYTES);
    }
    a->stage_bytes = (int)round_up(
        (size_t)((tokens * 256 << log2_wk) + QT_MOE_WARPS * a->warp_bytes + QT_MOE_HEADER), 128);
    a->sums_at = a->ring_at + stages * a->stage_bytes;
    const int sums = log2_wk ? QT_MOE_WARPS * QT_MOE_STRIPS * tokens / 8 * 512 : 0;
    return (size_t)(a->sums_at + sums);
}

/* Experts that `pairs` choices of a router without preferences touch. */
static double touched(const struct qtool_moe_plan *p)
{
    double untouched = 1;
    for (size_t i = 0; i < p->tokens && untouched > 1e-3; i++)
        untouched *= 1 - (double)p->options.topk / (double)p->experts;
    const double all = (double)p->experts;
    return p->options.topk >= p->experts ? all : all * (1 - untouched);
}

/*
 * Chooses warps along k and pipeline stages: as many stages as fit beside a second thread block,
 * else as fit alone. The time of a unit is modeled as its stages, each of them longer by the X of
 * more warps along k, and a constant for the start and the epilogue.
 */
static bool choose(const struct qtool_moe_plan *plan, struct product *p, int kind)
{
    const struct qt_device *d = &state_of(plan)->device;
    const bool wide = state_of(plan)->wide;
    const size_t half = (size_t)(d->smem_limit + 1024) / 2 - 1024;
    double best = 1e30;
    for (int log2_wk = 0; log2_wk <= (kind == QT_MOE_FEW ? 3 : 0); log2_wk++) {
        struct qt_moe_product_args a;
        int stages = kind == QT_MOE_MANY && wide ? (int)WIDE_STAGES : (int)QT_MOE_STAGES;
        int blocks = kind == QT_MOE_FEW ? 2 : 1;
        size_t smem = 0;
        if (log2_wk && (size_t)2 << log2_wk > (size_t)p->shape.blocks)
            break;
        while (stages > 2 && layout(&a, p, kind, wide, log2_wk, stages) >
                                 (blocks > 1 ? half : (size_t)d->smem_limit)) {
            stages--;
            if (stages == 3 && blocks == 2 && layout(&a, p, kind, wide, log2_wk, 3) > half) {
                blocks = 1;
                stages = QT_MOE_STAGES;
            }
        }
        smem = layout(&a, p, kind, wide, log2_wk, stages);
        if (smem > (size_t)d->smem_limit)
            continue;
        const int grid = d->sms * (smem <= half ? 2 : 1);
        const double units = touched(plan) * a.row_tiles;
        const double waves = units <= grid ? 1 : units / grid + .5;
        const double us = waves * (a.slots * (1 + .06 * (1 << log2_wk)) + 4);
        if (us >= best)
            continue;
        best = us;
        p->kind[kind].log2_wk = log2_wk;
        p->kind[kind].stages = stages;
        p->kind[kind].grid = grid;
        p->kind[kind].smem = smem;
    }
    return best < 1e30;
}

static int plan_product(struct qtool_moe_plan *plan, bool down, const struct qtool_matmul_weight *w)
{
    struct product *p = &state_of(plan)->product[down];
    const char *fault = matrix_fault(&p->shape, w);
    if (fault)
        return refuse(plan->reason, QTOOL_UNSUPPORTED, "%s: %s", down ? "down" : "gate", fault);
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
        if (!kernel || (kind == QT_MOE_MANY && plan->tokens <= FEW_PAIRS))
            continue;
        if (!choose(plan, p, kind)) {
            if (kind == QT_MOE_MANY) /* tiles of 16 serve for all */
                continue;
            return refuse(plan->reason, QTOOL_UNSUPPORTED,
                          "%s does not fit into the device's shared memory",
                          down ? "down" : "gate and up");
        }
        int rc = qt_allow_smem(kernel, p->kind[kind].smem, plan->reason);
        if (rc != QTOOL_OK)
            return rc;
        p->kind[kind].kernel = kernel;
    }
    return QTOOL_OK;
}

/* ---- workspace ------------------------------------------------------------------------------ */

/* Offsets in the workspace. X and the intermediate values are prepared (prepare.h) if they are BF16
 * or X has rows that are not 16-byte aligned. */
struct space {
    size_t items, order, position, item[QT_MOE_KINDS], x, inner, inner_prepared;
    size_t partial; /* results of down by position; before, those of up without `gated` */
    size_t bytes;
    size_t inner_pitch, partial_pitch;
};

/* The plan of a product as prepare.h knows it. */
static struct qtool_matmul_plan prepare_plan(const struct qtool_moe_plan *p, size_t m, size_t k)
{
    struct qtool_matmul_plan out = {};
    out.m = m;
    out.k = k;
    out.options = {};
    out.options.dtype = p->options.dtype;
    out.options.dependent_launch = 1;
    out.config.path = QTOOL_MATMUL_STREAM;
    qt_state(&out)->cc = state_of(p)->device.cc;
    return out;
}

static bool prepares_x(const struct qtool_moe_plan *p)
{
    return p->options.dtype == QTOOL_BF16 || p->hidden % 8;
}

static size_t take(size_t *at, size_t bytes)
{
    const size_t begin = *at;
    *at = round_up(begin + bytes, 256);
    return begin;
}

static struct space space_of(const struct qtool_moe_plan *p)
{
    struct space s = {};
    const size_t pairs = p->tokens * p->options.topk, experts = p->experts;
    const size_t most = pairs < experts ? pairs : experts;
    const bool bf16 = p->options.dtype == QTOOL_BF16;
    size_t at = QTOOL_WORKSPACE_ZEROED;
    s.inner_pitch = bf16 ? p->intermediate : round_up(p->intermediate, 8);
    s.partial_pitch = round_up(p->hidden, 8);
    s.items = take(&at, QT_MOE_KINDS * sizeof(int));
    s.order = take(&at, pairs * sizeof(int));
    s.position = take(&at, pairs * sizeof(int));
    for (int kind = 0; kind < QT_MOE_KINDS; kind++)
        s.item[kind] = take(&at, (most + pairs / (size_t)tile_tokens(kind, state_of(p)->wide)) *
                                     sizeof(struct qt_moe_item));
    struct qtool_matmul_plan x = prepare_plan(p, p->tokens, p->hidden);
    s.x = take(&at, prepares_x(p) ? qt_prepare_bytes(&x) : 0);
    s.inner = take(&at, pairs * s.inner_pitch * 2);
    struct qtool_matmul_plan inner = prepare_plan(p, pairs, p->intermediate);
    s.inner_prepared = take(&at, bf16 ? qt_prepare_bytes(&inner) : 0);
    const size_t up = state_of(p)->product[0].gated ? 0 : s.inner_pitch * 4;
    const size_t down = s.partial_pitch * (state_of(p)->rounded ? 2 : 4);
    s.partial = take(&at, pairs * (down > up ? down : up));
    s.bytes = p->tokens ? at : 0;
    return s;
}

/* Whether both products have a kernel for many tokens. */
static bool has_many(const struct qtool_moe_plan *p)
{
    return state_of(p)->product[0].kind[QT_MOE_MANY].kernel &&
           state_of(p)->product[1].kind[QT_MOE_MANY].kernel;
}

static int plan(struct qtool_moe_plan *out, const struct qtool_moe_layer *layer, size_t tokens,
                const struct qtool_moe_options *opt)
{
    *out = {};
    *state_of(out) = {};
    out->tokens = tokens;
    out->experts = layer->experts;
    out->options = *opt;
    if (opt->dtype != QTOOL_F16 && opt->dtype != QTOOL_BF16)
        return refuse(out->reason, QTOOL_UNSUPPORTED, "options.dtype must be FP16 or BF16");
    if ((unsigned)opt->activation > QTOOL_MOE_CLAMPED)
        return refuse(out->reason, QTOOL_UNSUPPORTED, "options.activation is unknown");
    if (opt->topk < 1 || opt->topk > MAX_TOPK)
        return refuse(out->reason, QTOOL_UNSUPPORTED, "options.topk must be 1..32");
    if (opt->first_expert > 1 << 24)
        return refuse(out->reason, QTOOL_UNSUPPORTED, "options.first_expert must be at most 2^24");
    if (tokens > MAX_TOKENS || tokens * opt->topk > MAX_PAIRS)
        return refuse(out->reason, QTOOL_UNSUPPORTED,
                      "tokens must be at most 2^20, and tokens * topk at most 2^24");
    const char *fault = layer_fault(layer);
    if (fault)
        return refuse(out->reason, QTOOL_UNSUPPORTED, "%s", fault);
    out->hidden = layer->gate->k;
    out->intermediate = layer->gate->n;
    int rc = qt_query_device(&state_of(out)->device, opt->device, out->reason);
    state_of(out)->wide = state_of(out)->device.cc == 90;
    for (int down = 0; down < 2 && rc == QTOOL_OK; down++)
        rc = plan_product(out, down, down ? layer->down : layer->gate);
    const double items = (double)(tokens * opt->topk) / QT_MOE_FEW_TOKENS + (double)out->experts;
    for (int down = 0; down < 2 && rc == QTOOL_OK; down++)
        if (items * row_tiles(&state_of(out)->product[down], 3) >= 1u << 31)
            rc = refuse(out->reason, QTOOL_UNSUPPORTED, "too many tokens for so many channels");
    state_of(out)->rounded = state_of(out)->wide && has_many(out);
    if (rc == QTOOL_OK)
        rc = qt_allow_smem(qt_moe_route_instance(), 0, out->reason);
    if (rc == QTOOL_OK)
        out->workspace_bytes = space_of(out).bytes;
    return rc;
}

int qtool_moe_plan(struct qtool_moe_plan *out, const struct qtool_moe_layer *layer, size_t tokens,
                   const struct qtool_moe_options *opt)
{
    const int rc = plan(out, layer, tokens, opt);
    state_of(out)->ready = rc == QTOOL_OK;
    return rc;
}

/* ---- run ------------------------------------------------------------------------------------ */

/* Launches a kernel of a run. All wait for the kernel before them. */
static int launch(const struct qtool_moe_plan *p, const void *kernel, dim3 grid, int threads,
                  size_t smem, bool first, void *args, void *stream)
{
    struct qt_kernel_launch l = {};
    l.kernel = kernel;
    l.grid = grid;
    l.threads = threads;
    l.smem = smem;
    l.dependent = state_of(p)->device.cc == 90 && (!first || p->options.dependent_launch);
    return qt_launch_kernel(&l, args, stream);
}

/* Whether the pairs are not sorted: there is one token, or so few pairs that tokens seldom choose
 * the same expert. */
static bool is_direct(const struct qtool_moe_plan *p)
{
    const size_t pairs = p->tokens * p->options.topk;
    return pairs <= MAX_TOPK && (p->tokens == 1 || 4 * pairs <= p->experts);
}

static struct qt_moe_direct direct_of(const struct qtool_moe_plan *p, const int *ids)
{
    return {is_direct(p) ? ids : NULL, (int)(p->tokens * p->options.topk), (int)p->experts,
            (int)p->options.first_expert};
}

static int run_route(const struct qtool_moe_plan *p, const struct space *s, char *workspace,
                     const int *ids, void *stream)
{
    struct qt_moe_route_args a = {};
    a.ids = ids;
    a.order = (int *)(workspace + s->order);
    a.position = (int *)(workspace + s->position);
    for (int kind = 0; kind < QT_MOE_KINDS; kind++)
        a.item[kind] = (struct qt_moe_item *)(workspace + s->item[kind]);
    a.items = (int *)(workspace + s->items);
    a.pairs = (int)(p->tokens * p->options.topk);
    a.experts = (int)p->experts;
    a.first_expert = (int)p->options.first_expert;
    a.few_pairs = has_many(p) ? FEW_PAIRS : a.pairs;
    a.many_tokens = tile_tokens(QT_MOE_MANY, state_of(p)->wide);
    const int parts = (a.pairs + 63) / 64, warps = parts < 1 ? 1 : parts > 32 ? 32 : parts;
    const int wide = warps < 4 ? 4 : warps; /* the loops over experts have some threads */
    const size_t smem = (size_t)(wide + 7) * p->experts * sizeof(int); /* see route_kernel */
    return launch(p, qt_moe_route_instance(), dim3(1), wide * 32, smem, true, &a, stream);
}

static void set_activation(struct qt_moe_product_args *a, enum qtool_moe_activation activation)
{
    const float slope = 1.5957691f; /* sqrt(8 / pi) */
    a->slope = 1;
    a->limit = INFINITY;
    if (activation == QTOOL_MOE_GELU_TANH) {
        a->slope = slope;
        a->cubic = slope * .044715f;
    } else if (activation == QTOOL_MOE_CLAMPED) {
        a->slope = 1.702f;
        a->limit = 7;
        a->offset = 1;
    }
}

/* matrix: QT_MOE_GATE stands for gate and up where they are one launch. */
static int run_product(const struct qtool_moe_plan *p, int matrix, const struct space *s,
                       char *workspace, const void *table, const void *x, size_t x_pitch,
                       const float *token_factor, const int *ids, bool first, void *stream)
{
    const struct state *state = state_of(p);
    const bool down = matrix == QT_MOE_DOWN, acts = matrix == QT_MOE_GATE;
    const struct product *product = &state->product[down];
    for (int kind = 0; kind < (has_many(p) ? 2 : 1); kind++) {
        const bool wide = kind == QT_MOE_MANY && state->wide;
        struct qt_moe_product_args a = {};
        layout(&a, product, kind, state->wide, product->kind[kind].log2_wk,
               product->kind[kind].stages);
        a.table = (const struct qt_moe_matrix *)table;
        a.item = (const struct qt_moe_item *)(workspace + s->item[kind]);
        a.items = (const int *)(workspace + s->items) + kind;
        a.order = (const int *)(workspace + s->order);
        a.direct = direct_of(p, ids);
        a.by_token = !down;
        a.early = down || (acts && !product->gated);
        a.x = (const __half *)x;
        a.x_pitch = (int)x_pitch;
        a.token_factor = token_factor;
        a.y = workspace + (acts ? s->inner : s->partial);
        a.matrix = matrix;
        a.up = acts && !product->gated ? (const float *)(workspace + s->partial) : NULL;
        a.y_pitch = (int)(down ? s->partial_pitch : s->inner_pitch);
        a.decode.bits = product->bits;
        a.decode.exp_bits = product->exp_bits;
        a.decode.zeros = product->zeros;
        a.topk = (int)p->options.topk;
        set_activation(&a, p->options.activation);
        a.bf16 = p->options.dtype == QTOOL_BF16;
        a.rounded = acts || (down && state->rounded);
        a.whole_stores = a.n % 8 == 0 && a.y_pitch % 8 == 0;
        const int units = a.direct.pairs * a.row_tiles, grid = product->kind[kind].grid;
        const int rc = launch(p, product->kind[kind].kernel,
                              dim3((unsigned)(a.direct.ids && units < grid ? units : grid)),
                              wide ? QT_MOE_WIDE_THREADS : QT_MOE_WARPS * 32,
                              product->kind[kind].smem, first && kind == 0, &a, stream);
        if (rc != QTOOL_OK)
            return rc;
    }
    return QTOOL_OK;
}

static int run_combine(const struct qtool_moe_plan *p, const struct space *s, char *workspace,
                       void *y, const int *ids, const float *weights, void *stream)
{
    struct qt_moe_combine_args a = {};
    a.direct = direct_of(p, ids);
    a.partial = workspace + s->partial;
    a.rounded = state_of(p)->rounded;
    a.position = (const int *)(workspace + s->position);
    a.weights = weights;
    a.y = y;
    a.tokens = (int)p->tokens;
    a.topk = (int)p->options.topk;
    a.n = (int)p->hidden;
    a.pitch = (int)s->partial_pitch;
    a.bf16 = p->options.dtype == QTOOL_BF16;
    a.wide = p->hidden % 8 == 0;
    const dim3 grid((unsigned)p->tokens, (unsigned)ceil_div(p->hidden, 1024));
    return launch(p, qt_moe_combine_instance(), grid, 128, 0, false, &a, stream);
}

int qtool_moe_run(const struct qtool_moe_plan *p, const void *table, void *y, const void *x,
                  const int *ids, const float *weights, void *workspace, void *stream)
{
    const bool bf16 = p->options.dtype == QTOOL_BF16;
    if (!state_of(p)->ready)
        return QTOOL_UNSUPPORTED;
    if (p->tokens == 0)
        return QTOOL_OK;
    if (!table || !y || !x || !ids || !weights || !workspace || (size_t)table % 16 ||
        (size_t)y % 16 || (size_t)x % 16 || (size_t)ids % 4 || (size_t)weights % 4 ||
        (size_t)workspace % 256)
        return QTOOL_UNSUPPORTED;
    const struct space s = space_of(p);
    char *const space = (char *)workspace;
    const size_t pairs = p->tokens * p->options.topk;
    const float *factor = NULL;
    size_t pitch = p->hidden;
    bool first = is_direct(p); /* the next kernel is the first */
    int rc = first ? QTOOL_OK : run_route(p, &s, space, ids, stream);
    if (rc == QTOOL_OK && prepares_x(p)) {
        struct qtool_matmul_plan prepare = prepare_plan(p, p->tokens, p->hidden);
        prepare.options.dependent_launch = !first || p->options.dependent_launch;
        first = false;
        rc = qt_prepare_run(&prepare, &x, &factor, space + s.x, stream);
        pitch = round_up(p->hidden, QT_BLOCK_COLS);
    }
    if (rc == QTOOL_OK && !state_of(p)->product[0].gated) {
        rc = run_product(p, QT_MOE_UP, &s, space, table, x, pitch, factor, ids, first, stream);
        first = false;
    }
    if (rc == QTOOL_OK)
        rc = run_product(p, QT_MOE_GATE, &s, space, table, x, pitch, factor, ids, first, stream);
    const void *inner = space + s.inner;
    pitch = s.inner_pitch;
    factor = NULL;
    if (rc == QTOOL_OK && bf16) {
        struct qtool_matmul_plan prepare = prepare_plan(p, pairs, p->intermediate);
        rc = qt_prepare_run(&prepare, &inner, &factor, space + s.inner_prepared, stream);
        pitch = round_up(p->intermediate, QT_BLOCK_COLS);
    }
    if (rc == QTOOL_OK)
        rc =
            run_product(p, QT_MOE_DOWN, &s, space, table, inner, pitch, factor, ids, false, stream);
    if (rc == QTOOL_OK)
        rc = run_combine(p, &s, space, y, ids, weights, stream);
    return rc;
}
