/* Layers of w4ax experts: table, plan, quantization and products. */
#include "kernels/cuda/matmul/tile.h"
#include "kernels/cuda/moe/plan.h"
#include "kernels/cuda/moe/w4ax.h"

#include <math.h>
#include <string.h>

/* A product of the plan: gate and up, or down. */
struct product {
    size_t n, k, pitch64;
    enum qtool_w4ax_rotation rotation; /* of the input */
    struct {
        const void *kernel;
        struct qt_moe_config config;
    } kind[QT_MOE_KINDS];
};

/* Stored in `own` of struct qt_moe_state. */
struct state {
    enum qtool_w4ax_scales scales;
    bool wide;                 /* kernels by wgmma */
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

static size_t blocks_of(size_t k)
{
    return ceil_div(k, QTOOL_W4AX_BLOCK_COLS);
}

/* ---- table ---------------------------------------------------------------------------------- */

static const struct qtool_w4ax_weight *weights_of(const struct qtool_moe_w4ax *w, int matrix)
{
    return matrix == QT_MOE_GATE ? w->gate : matrix == QT_MOE_UP ? w->up : w->down;
}

static size_t pitch_of(const struct qtool_w4ax_weight *w)
{
    return w->pitch_blocks ? w->pitch_blocks : 2 * blocks_of(w->k);
}

static const char *input_fault(const struct qtool_w4ax_input *in, enum qtool_w4ax_scales scales,
                               size_t k)
{
    if (in->scales != scales || in->k != k)
        return "scales and k of an input must be those of its matrices";
    if (in->k % 8 || in->k > QT_MOE_W4AX_CHANNELS)
        return "the channels of an input must be a multiple of 8, at most 32768";
    if ((unsigned)in->rotation > QTOOL_W4AX_HADAMARD)
        return "rotation is not an enum qtool_w4ax_rotation";
    if (!in->blocks || (size_t)in->perm % 16)
        return "blocks must not be NULL, and perm must be 16-byte aligned";
    if (!(in->clip4 > 0 && in->clip8 > 0))
        return "clip factors must be above 0";
    return in->packed ? "packed must be 0" : NULL;
}

/* Checks one matrix and its input. Returns NULL, or an error message. */
static const char *matrix_fault(const struct qtool_w4ax_weight *w,
                                const struct qtool_w4ax_input *in, bool down)
{
    const char *fault = qt_w4ax_weight_fault(w);
    if (!fault)
        fault = input_fault(in, w->scales, w->k);
    return fault ? fault : down && in->perm ? "perm of inner must be NULL" : NULL;
}

static bool same_form(const struct qtool_w4ax_weight *a, const struct qtool_w4ax_input *x,
                      const struct qtool_w4ax_weight *b, const struct qtool_w4ax_input *y)
{
    return a->scales == b->scales && a->n == b->n && a->k == b->k && pitch_of(a) == pitch_of(b) &&
           x->rotation == y->rotation;
}

static int write_table(void *table, const struct qtool_moe_layer *layer, char reason[160])
{
    struct qt_moe_w4ax_matrix *out = (struct qt_moe_w4ax_matrix *)table;
    const struct qtool_moe_w4ax *of = layer->w4ax;
    if (of->gate->scales != of->down->scales)
        return qt_moe_refuse(reason, QTOOL_UNSUPPORTED, "gate and down have different scales");
    for (size_t e = 0; e < layer->experts; e++)
        for (int i = 0; i < QT_MOE_MATRICES; i++) {
            const bool down = i == QT_MOE_DOWN;
            const struct qtool_w4ax_weight *w = &weights_of(of, i)[e];
            const struct qtool_w4ax_input *in = down ? &of->inner[e] : &of->input;
            const char *fault = matrix_fault(w, in, down);
            if (fault)
                return qt_moe_refuse(reason, QTOOL_UNSUPPORTED, "expert %zu, %s: %s", e,
                                     qt_moe_names[i], fault);
            if (!same_form(w, in, down ? of->down : of->gate, down ? of->inner : &of->input))
                return qt_moe_refuse(
                    reason, QTOOL_UNSUPPORTED,
                    "expert %zu, %s: format or shape differ from those of expert 0, %s", e,
                    qt_moe_names[i], down ? "down" : "gate");
            struct qt_moe_w4ax_matrix m = {};
            m.plane = (const unsigned char *)w->plane;
            m.scale = (const unsigned char *)w->scale;
            m.row_scale = (const __half *)w->row_scale;
            m.bias = layer->bias[i] ? layer->bias[i][e] : NULL;
            m.words = in->blocks;
            m.perm = in->perm;
            m.factor = ldexpf(1, w->scale_exp2 - (w->scales == QTOOL_W4AX_INT ? 0 : 4));
            m.clip4 = in->clip4;
            m.clip8 = in->clip8;
            if ((size_t)m.bias % 4 || (size_t)m.row_scale % 16)
                return qt_moe_refuse(reason, QTOOL_UNSUPPORTED,
                                     "expert %zu, %s: the bias or row_scale is misaligned", e,
                                     qt_moe_names[i]);
            memcpy(&out[e * QT_MOE_MATRICES + (size_t)i], &m, sizeof m);
        }
    return QTOOL_OK;
}

/* ---- plan ----------------------------------------------------------------------------------- */

static int tile_tokens(const struct state *s, int kind)
{
    return kind == QT_MOE_FEW ? QT_MOE_FEW_TOKENS
           : s->wide          ? qt_moe_w4ax_tokens(s->scales)
                              : (int)QT_MOE_MANY_TOKENS;
}

static const void *instance(const struct state *s, int kind)
{
    return kind == QT_MOE_FEW ? qt_moe_w4ax_few_instance(s->scales)
           : s->wide          ? qt_moe_w4ax_wide_instance(s->scales)
                              : qt_moe_w4ax_many_instance(s->scales);
}

static int row_tiles(const struct product *p, bool down, int log2_wk)
{
    const size_t strips = (size_t)(QT_MOE_WARPS >> log2_wk) * (down ? QT_MOE_STRIPS : 1);
    return (int)ceil_div(ceil_div(p->n, QT_STRIP_ROWS), strips);
}

/* Sets the members of *a that depend on shape and configuration. Returns bytes of shared memory. */
static size_t layout(struct qt_moe_w4ax_args *a, const struct state *s, bool down, int kind,
                     int log2_wk, int stages)
{
    const struct product *p = &s->product[down];
    const int tokens = tile_tokens(s, kind);
    a->gated = !down;
    a->pitch64 = p->pitch64;
    a->k = (int)p->k;
    a->n = (int)p->n;
    a->strips = (int)ceil_div(p->n, QT_STRIP_ROWS);
    a->blocks = (int)blocks_of(p->k);
    a->blocks64 = (int)ceil_div(p->k, QT_BLOCK_COLS);
    a->row_tiles = row_tiles(p, down, log2_wk);
    a->log2_wk = log2_wk;
    a->slots = (int)ceil_div((size_t)a->blocks, (size_t)1 << log2_wk);
    a->stages = stages;
    if (kind == QT_MOE_MANY && s->wide) {
        const int strips = QT_MOE_WARPS * QT_MOE_STRIPS, blocks = QT_MOE_W4AX_STAGE_BLOCKS;
        const int token_scales = s->scales == QTOOL_W4AX_BLOCK ? tokens * 4 : 0;
        const int strip_bytes = QT_W4AX_STRIP_BYTES + qt_w4ax_scale_bytes(s->scales);
        a->slots = (int)ceil_div((size_t)a->blocks, (size_t)blocks);
        a->stage_bytes = (int)round_up(
            (size_t)(blocks * (tokens * 128 + strips * strip_bytes + token_scales)), 1024);
        a->results_at = stages * a->stage_bytes;
        a->units_at = a->results_at + 2 * QT_TILE_RESULT_BYTES;
        a->barriers_at = a->units_at + QT_MOE_UNITS * QT_MOE_W4AX_UNIT_BYTES;
        return (size_t)(a->barriers_at + QT_PIPELINE_BARRIER_BYTES);
    }
    a->stage_bytes = (int)round_up((size_t)((tokens * (128 + 4) << log2_wk) +
                                            QT_MOE_WARPS * QT_MOE_W4AX_WARP_BYTES + QT_MOE_HEADER),
                                   128);
    a->sums_at = stages * a->stage_bytes;
    const int sums = log2_wk ? QT_MOE_WARPS * QT_MOE_STRIPS * tokens / 8 * 512 : 0;
    return (size_t)(a->sums_at + sums);
}

/* A product whose kernels are chosen. */
struct chosen {
    const struct state *state;
    bool down;
    int kind;
};

static size_t layout_of(const struct qt_moe_choice *c, int log2_wk, int stages, int *slots,
                        int *row_tiles)
{
    const struct chosen *of = (const struct chosen *)c->ctx;
    struct qt_moe_w4ax_args a = {};
    const size_t bytes = layout(&a, of->state, of->down, of->kind, log2_wk, stages);
    *slots = a.slots;
    *row_tiles = a.row_tiles;
    return bytes;
}

static bool choose(const struct qtool_moe_plan *plan, struct state *s, bool down, int kind)
{
    const bool few = kind == QT_MOE_FEW;
    const struct chosen of = {s, down, kind};
    struct product *p = &s->product[down];
    struct qt_moe_choice c = {};
    while (few && c.most_log2_wk < 3 && (size_t)2 << c.most_log2_wk <= blocks_of(p->k))
        c.most_log2_wk++;
    c.least = 2;
    c.most = QT_MOE_STAGES;
    c.least_paired = few ? 3 : 0;
    c.layout = layout_of;
    c.ctx = &of;
    return qt_moe_choose(&p->kind[kind].config, plan, &c);
}

static int plan_product(struct qtool_moe_plan *plan, bool down, const struct qtool_w4ax_weight *w,
                        const struct qtool_w4ax_input *in)
{
    struct state *s = state_of(plan);
    struct product *p = &s->product[down];
    const char *fault = matrix_fault(w, in, down);
    if (fault)
        return qt_moe_refuse(plan->reason, QTOOL_UNSUPPORTED, "%s: %s", down ? "down" : "gate",
                             fault);
    p->n = w->n;
    p->k = w->k;
    p->pitch64 = pitch_of(w);
    p->rotation = in->rotation;
    for (int kind = 0; kind < QT_MOE_KINDS; kind++) {
        const void *kernel = instance(s, kind);
        if (kind == QT_MOE_MANY && plan->tokens <= QT_MOE_FEW_PAIRS)
            continue;
        if (!choose(plan, s, down, kind)) {
            if (kind == QT_MOE_MANY) /* tiles of 16 serve for all */
                continue;
            return qt_moe_refuse(plan->reason, QTOOL_UNSUPPORTED,
                                 "%s does not fit into the device's shared memory",
                                 down ? "down" : "gate and up");
        }
        const int rc = qt_allow_smem(kernel, p->kind[kind].config.smem, plan->reason);
        if (rc != QTOOL_OK)
            return rc;
        p->kind[kind].kernel = kernel;
    }
    return QTOOL_OK;
}

static bool has_many(const struct qtool_moe_plan *p)
{
    return state_of(p)->product[0].kind[QT_MOE_MANY].kernel &&
           state_of(p)->product[1].kind[QT_MOE_MANY].kernel;
}

/* Channel blocks per half warp of the quantizer: 1, or with many rows, which fill the device
 * anyway, 4. */
static int per_thread(const struct qtool_moe_plan *p, size_t rows, size_t k)
{
    const size_t blocks = blocks_of(k);
    const bool many = rows > 2 * (size_t)qt_state(p)->device.sms;
    return blocks > (many ? 16 : 64) ? 4 : 1;
}

static int plan(struct qtool_moe_plan *p, const struct qtool_moe_layer *layer)
{
    struct qt_moe_state *all = qt_state(p);
    struct state *s = state_of(p);
    const struct qtool_moe_w4ax *of = layer->w4ax;
    *s = {};
    if (of->gate->scales != of->down->scales)
        return qt_moe_refuse(p->reason, QTOOL_UNSUPPORTED, "gate and down have different scales");
    s->scales = of->gate->scales;
    s->wide = all->device.cc == 90;
    all->align = 8;
    int rc = plan_product(p, false, of->gate, &of->input);
    if (rc == QTOOL_OK)
        rc = plan_product(p, true, of->down, of->inner);
    /* The quantizer gathers a row of X in shared memory. */
    if (rc == QTOOL_OK)
        rc = qt_allow_smem(qt_moe_w4ax_quantize_instance(p->options.dtype == QTOOL_BF16,
                                                         per_thread(p, p->tokens, p->hidden)),
                           p->hidden * 2, p->reason);
    if (rc != QTOOL_OK)
        return rc;
    all->many_tokens = has_many(p) ? tile_tokens(s, QT_MOE_MANY) : 0;
    all->rounded = s->wide && has_many(p);
    for (int down = 0; down < 2; down++)
        if (row_tiles(&s->product[down], down, 3) > all->row_tiles)
            all->row_tiles = row_tiles(&s->product[down], down, 3);
    all->partial_bytes = round_up(p->hidden, 8) * (all->rounded ? 2 : 4);
    return QTOOL_OK;
}

/* ---- workspace ------------------------------------------------------------------------------ */

/* Offsets of quantized rows, and of the values between the products. */
struct space {
    struct {
        size_t codes, scale, sum;
    } x[2]; /* of gate and up, of down */
    size_t inner, positions, bytes;
};

static struct space space_of(const struct qtool_moe_plan *p, size_t at)
{
    const struct state *of = state_of(p);
    struct space s = {};
    const size_t begin = at;
    s.positions = round_up(qt_moe_positions(p), 8);
    for (int down = 0; down < 2; down++) {
        const size_t blocks = blocks_of(of->product[down].k);
        const size_t scales = of->scales == QTOOL_W4AX_BLOCK ? blocks : 1;
        s.x[down].codes = qt_moe_take(&at, s.positions * blocks * QTOOL_W4AX_BLOCK_COLS);
        s.x[down].scale = qt_moe_take(&at, s.positions * scales * sizeof(float));
        s.x[down].sum =
            qt_moe_take(&at, of->scales == QTOOL_W4AX_INT ? s.positions * sizeof(int) : 0);
    }
    s.inner = qt_moe_take(&at, s.positions * p->intermediate * 2);
    s.bytes = at - begin;
    return s;
}

static size_t own_bytes(const struct qtool_moe_plan *p)
{
    return space_of(p, 0).bytes;
}

static struct qt_moe_w4ax_x quantized(const struct space *s, const struct qt_moe_run *r, bool down)
{
    return {(unsigned char *)r->workspace + s->x[down].codes,
            (float *)(r->workspace + s->x[down].scale), (int *)(r->workspace + s->x[down].sum),
            (int)s->positions};
}

/* ---- run ------------------------------------------------------------------------------------ */

static int run_quantize(const struct qtool_moe_plan *p, bool down, const struct space *s,
                        struct qt_moe_run *r)
{
    const struct state *of = state_of(p);
    const size_t rows = down ? p->tokens * p->options.topk : p->tokens;
    const size_t k = of->product[down].k, blocks = blocks_of(k);
    const int per = per_thread(p, rows, k);
    struct qt_moe_w4ax_quantize_args a = {};
    a.table = (const struct qt_moe_w4ax_matrix *)r->table;
    a.out = quantized(s, r, down);
    a.x = (const uint16_t *)(down ? r->workspace + s->inner : r->x);
    a.position = (const int *)(r->workspace + r->position);
    a.ids = r->ids;
    a.direct = qt_moe_direct_of(p, r->ids);
    a.copies = down ? 1 : (int)p->options.topk;
    a.inner = down;
    a.k = (int)k;
    a.blocks = (int)blocks;
    a.scales = of->scales;
    a.rotate = of->product[down].rotation == QTOOL_W4AX_HADAMARD;
    const bool first = r->first;
    r->first = false;
    return qt_moe_launch(p, qt_moe_w4ax_quantize_instance(p->options.dtype == QTOOL_BF16, per),
                         dim3((unsigned)rows), (int)ceil_div(blocks, 2 * (size_t)per) * 32,
                         down ? 0 : k * 2, first, &a, r->stream);
}

static int run_product(const struct qtool_moe_plan *p, bool down, const struct space *s,
                       struct qt_moe_run *r)
{
    const struct state *of = state_of(p);
    const struct product *product = &of->product[down];
    int rc = QTOOL_OK;
    for (int kind = 0; kind < (has_many(p) ? 2 : 1) && rc == QTOOL_OK; kind++) {
        const bool wide = kind == QT_MOE_MANY && of->wide;
        const struct qt_moe_config *config = &product->kind[kind].config;
        struct qt_moe_w4ax_args a = {};
        layout(&a, of, down, kind, config->log2_wk, config->stages);
        a.table = (const struct qt_moe_w4ax_matrix *)r->table;
        a.x = quantized(s, r, down);
        a.item = (const struct qt_moe_item *)(r->workspace + r->item[kind]);
        a.items = (const int *)(r->workspace + r->items) + kind;
        a.direct = qt_moe_direct_of(p, r->ids);
        a.early = 1;
        a.y = r->workspace + (down ? r->partial : s->inner);
        a.y_pitch = (int)(down ? round_up(p->hidden, 8) : p->intermediate);
        a.matrix = down ? QT_MOE_DOWN : QT_MOE_GATE;
        a.topk = (int)p->options.topk;
        qt_moe_set_activation(&a, p->options.activation);
        a.bf16 = p->options.dtype == QTOOL_BF16;
        a.rounded = !down || qt_state(p)->rounded;
        a.whole_stores = a.n % 8 == 0 && a.y_pitch % 8 == 0;
        a.nibbles = W4AX_NIBBLES;
        const int units = a.direct.pairs * a.row_tiles, grid = config->grid;
        rc = qt_moe_launch(p, product->kind[kind].kernel,
                           dim3((unsigned)(a.direct.ids && units < grid ? units : grid)),
                           wide ? QT_MOE_WIDE_THREADS : QT_MOE_WARPS * 32, config->smem, false, &a,
                           r->stream);
    }
    return rc;
}

static int run(const struct qtool_moe_plan *p, struct qt_moe_run *r)
{
    const struct space s = space_of(p, r->own);
    int rc = QTOOL_OK;
    for (int down = 0; down < 2 && rc == QTOOL_OK; down++) {
        rc = run_quantize(p, down, &s, r);
        if (rc == QTOOL_OK)
            rc = run_product(p, down, &s, r);
    }
    return rc;
}

const struct qt_moe_kind qt_moe_w4ax = {write_table, plan, own_bytes, run};
