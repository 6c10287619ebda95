/* qtool_moe.h: layers of experts. What depends on the kind of weights is in product_plan.cc. */
#include "kernels/cuda/moe/plan.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>

/* Pairs that one thread block sorts. */
enum { MOST_BLOCK_PAIRS = 4096 };
enum { MAX_TOPK = 32, MAX_TOKENS = 1 << 20, MAX_PAIRS = 1 << 24 };

const char *const qt_moe_names[QT_MOE_MATRICES] = {"gate", "up", "down"};

int qt_moe_refuse(char reason[160], int status, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(reason, 160, fmt, ap);
    va_end(ap);
    return status;
}

static const struct qt_moe_kind *kind_of(const struct qtool_moe_layer *layer)
{
    if (layer->w4ax)
        return &qt_moe_w4ax;
    return layer->gate->kind == QTOOL_MATMUL_MIX24 ? &qt_moe_mix24 : &qt_moe_packed;
}

/* The hidden and the intermediate size. Returns NULL, or an error message. */
static const char *layer_size(size_t *hidden, size_t *intermediate,
                              const struct qtool_moe_layer *layer)
{
    const struct qtool_moe_w4ax *w = layer->w4ax;
    size_t gate[2], down[2]; /* n, k */
    if (layer->experts < 1 || layer->experts > QTOOL_MOE_MAX_EXPERTS)
        return "experts must be 1..512";
    if (w ? !w->gate || !w->up || !w->down || !w->inner
          : !layer->gate || !layer->up || !layer->down)
        return w ? "gate, up, down and inner must not be NULL"
                 : "gate, up and down must not be NULL";
    gate[0] = w ? w->gate->n : layer->gate->n;
    gate[1] = w ? w->gate->k : layer->gate->k;
    down[0] = w ? w->down->n : layer->down->n;
    down[1] = w ? w->down->k : layer->down->k;
    if (gate[0] != down[1] || gate[1] != down[0])
        return "down must have n = k of gate, and k = n of gate";
    *hidden = gate[1];
    *intermediate = gate[0];
    return NULL;
}

int qtool_moe_table(void *table, const struct qtool_moe_layer *layer, char reason[160])
{
    size_t hidden, intermediate;
    reason[0] = '\0';
    const char *fault = layer_size(&hidden, &intermediate, layer);
    if (fault)
        return qt_moe_refuse(reason, QTOOL_UNSUPPORTED, "%s", fault);
    return kind_of(layer)->table(table, layer, reason);
}

/* ---- plan ----------------------------------------------------------------------------------- */

/* Experts that the choices of a router without preferences touch. */
static double touched(const struct qtool_moe_plan *p)
{
    double untouched = 1;
    for (size_t i = 0; i < p->tokens && untouched > 1e-3; i++)
        untouched *= 1 - (double)p->options.topk / (double)p->experts;
    const double all = (double)p->experts;
    return p->options.topk >= p->experts ? all : all * (1 - untouched);
}

/* The most stages that fit into `room`, or the fewest allowed. */
static int stages_within(const struct qt_moe_choice *c, int log2_wk, int least, size_t room)
{
    int stages = c->most, slots, row_tiles;
    while (stages > least && c->layout(c, log2_wk, stages, &slots, &row_tiles) > room)
        stages--;
    return stages;
}

/* The time of a unit is modeled as its stages, each of them longer by the X of more warps along k,
 * and a constant for the start and the epilogue. */
bool qt_moe_choose(struct qt_moe_config *out, const struct qtool_moe_plan *p,
                   const struct qt_moe_choice *c)
{
    const struct qt_device *d = &qt_state(p)->device;
    const size_t limit = (size_t)d->smem_limit, half = (limit + 1024) / 2 - 1024;
    double best = 1e30;
    for (int log2_wk = 0; log2_wk <= c->most_log2_wk; log2_wk++) {
        int slots, row_tiles, stages = 0;
        size_t smem = limit + 1;
        if (c->least_paired) {
            stages = stages_within(c, log2_wk, c->least_paired, half);
            smem = c->layout(c, log2_wk, stages, &slots, &row_tiles);
        }
        const bool paired = smem <= half;
        if (!paired) {
            stages = stages_within(c, log2_wk, c->least, limit);
            smem = c->layout(c, log2_wk, stages, &slots, &row_tiles);
        }
        if (smem > limit)
            continue;
        const int grid = d->sms * (paired ? 2 : 1);
        const double units = touched(p) * row_tiles;
        const double waves = units <= grid ? 1 : units / grid + .5;
        const double us = waves * (slots * (1 + .06 * (1 << log2_wk)) + 4);
        if (us >= best)
            continue;
        best = us;
        *out = {log2_wk, stages, grid, smem};
    }
    return best < 1e30;
}

/* Experts that a run touches, at most. */
static size_t most_experts(const struct qtool_moe_plan *p)
{
    const size_t pairs = p->tokens * p->options.topk;
    return pairs < p->experts ? pairs : p->experts;
}

size_t qt_moe_positions(const struct qtool_moe_plan *p)
{
    const size_t gap = (size_t)qt_state(p)->align - 1;
    return p->tokens * p->options.topk + gap * most_experts(p);
}

size_t qt_moe_take(size_t *at, size_t bytes)
{
    const size_t begin = *at;
    *at = round_up(begin + bytes, 256);
    return begin;
}

/* Sets the offsets of *r. Returns the bytes of the workspace. */
static size_t place(struct qt_moe_run *r, const struct qtool_moe_plan *p)
{
    const struct qt_moe_state *s = qt_state(p);
    const size_t pairs = p->tokens * p->options.topk;
    size_t at = QTOOL_WORKSPACE_ZEROED;
    r->items = qt_moe_take(&at, QT_MOE_KINDS * sizeof(int));
    r->order = qt_moe_take(&at, qt_moe_positions(p) * sizeof(int));
    r->position = qt_moe_take(&at, pairs * sizeof(int));
    for (int kind = 0; kind < QT_MOE_KINDS; kind++) {
        const int tokens = kind == QT_MOE_FEW ? (int)QT_MOE_FEW_TOKENS : s->many_tokens;
        const size_t items = tokens ? most_experts(p) + pairs / (size_t)tokens : 0;
        r->item[kind] = qt_moe_take(&at, items * sizeof(struct qt_moe_item));
    }
    r->partial = qt_moe_take(&at, qt_moe_positions(p) * s->partial_bytes);
    r->own = qt_moe_take(&at, s->kind->own_bytes(p));
    return p->tokens ? at : 0;
}

static int plan(struct qtool_moe_plan *out, const struct qtool_moe_layer *layer, size_t tokens,
                const struct qtool_moe_options *opt)
{
    *out = {};
    *qt_state(out) = {};
    out->tokens = tokens;
    out->experts = layer->experts;
    out->options = *opt;
    if (opt->dtype != QTOOL_F16 && opt->dtype != QTOOL_BF16)
        return qt_moe_refuse(out->reason, QTOOL_UNSUPPORTED, "options.dtype must be FP16 or BF16");
    if ((unsigned)opt->activation > QTOOL_MOE_CLAMPED)
        return qt_moe_refuse(out->reason, QTOOL_UNSUPPORTED, "options.activation is unknown");
    if (opt->topk < 1 || opt->topk > MAX_TOPK)
        return qt_moe_refuse(out->reason, QTOOL_UNSUPPORTED, "options.topk must be 1..32");
    if (opt->first_expert > 1 << 24)
        return qt_moe_refuse(out->reason, QTOOL_UNSUPPORTED,
                             "options.first_expert must be at most 2^24");
    if (tokens > MAX_TOKENS || tokens * opt->topk > MAX_PAIRS)
        return qt_moe_refuse(out->reason, QTOOL_UNSUPPORTED,
                             "tokens must be at most 2^20, and tokens * topk at most 2^24");
    const char *fault = layer_size(&out->hidden, &out->intermediate, layer);
    if (fault)
        return qt_moe_refuse(out->reason, QTOOL_UNSUPPORTED, "%s", fault);
    struct qt_moe_state *s = qt_state(out);
    s->kind = kind_of(layer);
    s->align = 1;
    int rc = qt_query_device(&s->device, opt->device, out->reason);
    if (rc == QTOOL_OK)
        rc = s->kind->plan(out, layer);
    const double items = (double)(tokens * opt->topk) / QT_MOE_FEW_TOKENS + (double)out->experts;
    if (rc == QTOOL_OK && items * s->row_tiles >= 1u << 31)
        rc = qt_moe_refuse(out->reason, QTOOL_UNSUPPORTED, "too many tokens for so many channels");
    if (rc == QTOOL_OK)
        rc = qt_allow_smem(qt_moe_route_instance(), 0, out->reason);
    struct qt_moe_run r = {};
    if (rc == QTOOL_OK)
        out->workspace_bytes = place(&r, out);
    return rc;
}

int qtool_moe_plan(struct qtool_moe_plan *out, const struct qtool_moe_layer *layer, size_t tokens,
                   const struct qtool_moe_options *opt)
{
    const int rc = plan(out, layer, tokens, opt);
    qt_state(out)->ready = rc == QTOOL_OK;
    return rc;
}

/* ---- run ------------------------------------------------------------------------------------ */

int qt_moe_launch(const struct qtool_moe_plan *p, const void *kernel, dim3 grid, int threads,
                  size_t smem, bool first, void *args, void *stream)
{
    struct qt_kernel_launch l = {};
    l.kernel = kernel;
    l.grid = grid;
    l.threads = threads;
    l.smem = smem;
    l.dependent = qt_state(p)->device.cc == 90 && (!first || p->options.dependent_launch);
    return qt_launch_kernel(&l, args, stream);
}

/* Whether the pairs are not sorted: there is one token, or so few pairs that tokens seldom choose
 * the same expert. */
bool qt_moe_is_direct(const struct qtool_moe_plan *p)
{
    const size_t pairs = p->tokens * p->options.topk;
    return pairs <= MAX_TOPK && (p->tokens == 1 || 4 * pairs <= p->experts);
}

struct qt_moe_direct qt_moe_direct_of(const struct qtool_moe_plan *p, const int *ids)
{
    return {qt_moe_is_direct(p) ? ids : NULL, (int)(p->tokens * p->options.topk), (int)p->experts,
            (int)p->options.first_expert};
}

void qt_moe_set_activation(struct qt_moe_unit_args *a, enum qtool_moe_activation activation)
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

static int run_route(const struct qtool_moe_plan *p, const struct qt_moe_run *r)
{
    struct qt_moe_route_args a = {};
    a.ids = r->ids;
    a.order = (int *)(r->workspace + r->order);
    a.position = (int *)(r->workspace + r->position);
    for (int kind = 0; kind < QT_MOE_KINDS; kind++)
        a.item[kind] = (struct qt_moe_item *)(r->workspace + r->item[kind]);
    a.items = (int *)(r->workspace + r->items);
    a.pairs = (int)(p->tokens * p->options.topk);
    a.experts = (int)p->experts;
    a.first_expert = (int)p->options.first_expert;
    a.few_pairs = qt_state(p)->many_tokens ? (int)QT_MOE_FEW_PAIRS : a.pairs;
    a.align = qt_state(p)->align;
    a.many_tokens = qt_state(p)->many_tokens ? qt_state(p)->many_tokens : (int)QT_MOE_MANY_TOKENS;
    const int parts = (a.pairs + 63) / 64, warps = parts < 1 ? 1 : parts > 32 ? 32 : parts;
    const int wide = warps < 4 ? 4 : warps; /* the loops over experts have some threads */
    struct qt_kernel_launch l = {};
    l.kernel = qt_moe_route_instance();
    l.cluster =
        qt_state(p)->device.cc == 90 && a.pairs > MOST_BLOCK_PAIRS ? QT_MOE_ROUTE_BLOCKS : 1;
    l.grid = dim3((unsigned)l.cluster);
    l.threads = wide * 32;
    /* see route_space */
    l.smem =
        ((size_t)(wide + 3 + QT_MOE_ROUTE_KINDS) * p->experts + QT_MOE_ROUTE_KINDS) * sizeof(int);
    l.dependent = qt_state(p)->device.cc == 90 && p->options.dependent_launch;
    return qt_launch_kernel(&l, &a, r->stream);
}

static int run_combine(const struct qtool_moe_plan *p, const struct qt_moe_run *r, void *y,
                       const float *weights)
{
    struct qt_moe_combine_args a = {};
    a.direct = qt_moe_direct_of(p, r->ids);
    a.partial = r->workspace + r->partial;
    a.rounded = qt_state(p)->rounded;
    a.position = (const int *)(r->workspace + r->position);
    a.weights = weights;
    a.y = y;
    a.tokens = (int)p->tokens;
    a.topk = (int)p->options.topk;
    a.n = (int)p->hidden;
    a.pitch = (int)round_up(p->hidden, 8);
    a.bf16 = p->options.dtype == QTOOL_BF16;
    a.wide = p->hidden % 8 == 0;
    const dim3 grid((unsigned)p->tokens, (unsigned)ceil_div(p->hidden, 1024));
    return qt_moe_launch(p, qt_moe_combine_instance(), grid, 128, 0, false, &a, r->stream);
}

int qtool_moe_run(const struct qtool_moe_plan *p, const void *table, void *y, const void *x,
                  const int *ids, const float *weights, void *workspace, void *stream)
{
    struct qt_moe_run r = {};
    if (!qt_state(p)->ready)
        return QTOOL_UNSUPPORTED;
    if (p->tokens == 0)
        return QTOOL_OK;
    if (!table || !y || !x || !ids || !weights || !workspace || (size_t)table % 16 ||
        (size_t)y % 16 || (size_t)x % 16 || (size_t)ids % 4 || (size_t)weights % 4 ||
        (size_t)workspace % 256)
        return QTOOL_UNSUPPORTED;
    place(&r, p);
    r.table = table;
    r.x = x;
    r.ids = ids;
    r.workspace = (char *)workspace;
    r.first = true;
    r.stream = stream;
    int rc = QTOOL_OK;
    if (!qt_moe_is_direct(p)) {
        rc = run_route(p, &r);
        r.first = false;
    }
    if (rc == QTOOL_OK)
        rc = qt_state(p)->kind->run(p, &r);
    return rc == QTOOL_OK ? run_combine(p, &r, y, weights) : rc;
}
