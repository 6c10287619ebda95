/* Layers of experts whose products take X in FP16. */
#include "kernels/cuda/moe/half.h"
#include "kernels/cuda/common/prepare.h"
#include "kernels/cuda/common/tensor_map.h"

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
    qt_state(&out)->cc = qt_state(p)->device.cc;
    return out;
}

static bool prepares_x(const struct qtool_moe_plan *p)
{
    return p->options.dtype == QTOOL_BF16 || p->hidden % 8;
}

size_t qt_moe_half_x_pitch(const struct qtool_moe_plan *p)
{
    return prepares_x(p) ? round_up(p->hidden, QT_BLOCK_COLS) : p->hidden;
}

struct qt_moe_half_space qt_moe_half_space(const struct qtool_moe_plan *p, size_t at)
{
    struct qt_moe_half_space s = {};
    const size_t pairs = p->tokens * p->options.topk, begin = at;
    const bool bf16 = p->options.dtype == QTOOL_BF16;
    s.inner_pitch = bf16 ? p->intermediate : round_up(p->intermediate, 8);
    s.up_pitch = round_up(p->intermediate, 4);
    s.partial_pitch = round_up(p->hidden, 8);
    struct qtool_matmul_plan x = prepare_plan(p, p->tokens, p->hidden);
    s.x = qt_moe_take(&at, prepares_x(p) ? qt_prepare_bytes(&x) : 0);
    s.inner = qt_moe_take(&at, pairs * s.inner_pitch * 2);
    struct qtool_matmul_plan inner = prepare_plan(p, pairs, p->intermediate);
    s.inner_prepared = qt_moe_take(&at, bf16 ? qt_prepare_bytes(&inner) : 0);
    s.bytes = at - begin;
    return s;
}

int qt_moe_half_wide_tokens(const struct qtool_moe_plan *p)
{
    const double average = (double)(p->tokens * p->options.topk) / (double)p->experts;
    return average <= 80 ? 128 : average <= 150 ? 192 : QT_MOE_WIDE_TOKENS;
}

size_t qt_moe_half_own_bytes(const struct qtool_moe_plan *p)
{
    return qt_moe_half_space(p, 0).bytes;
}

size_t qt_moe_half_partial_bytes(const struct qtool_moe_plan *p, bool gated)
{
    const struct qt_moe_half_space s = qt_moe_half_space(p, 0);
    const size_t up = gated ? 0 : s.up_pitch * 4;
    const size_t down = s.partial_pitch * (qt_state(p)->rounded ? 2 : 4);
    return down > up ? down : up;
}

int qt_moe_half_run(const struct qtool_moe_plan *p, struct qt_moe_run *r, bool gated,
                    qt_moe_product_fn *product)
{
    const struct qt_moe_half_space s = qt_moe_half_space(p, r->own);
    const size_t pairs = p->tokens * p->options.topk;
    struct qt_moe_input x = {r->x, p->hidden, NULL};
    struct qt_moe_input inner = {r->workspace + s.inner, s.inner_pitch, NULL};
    int rc = QTOOL_OK;
    if (prepares_x(p)) {
        struct qtool_matmul_plan prepare = prepare_plan(p, p->tokens, p->hidden);
        prepare.options.dependent_launch = !r->first || p->options.dependent_launch;
        r->first = false;
        rc = qt_prepare_run(&prepare, &x.values, &x.factor, r->workspace + s.x, r->stream);
        x.pitch = qt_moe_half_x_pitch(p);
    }
    if (rc == QTOOL_OK && !gated)
        rc = product(p, QT_MOE_UP, &s, &x, r);
    if (rc == QTOOL_OK)
        rc = product(p, QT_MOE_GATE, &s, &x, r);
    if (rc == QTOOL_OK && p->options.dtype == QTOOL_BF16) {
        struct qtool_matmul_plan prepare = prepare_plan(p, pairs, p->intermediate);
        rc = qt_prepare_run(&prepare, &inner.values, &inner.factor, r->workspace + s.inner_prepared,
                            r->stream);
        inner.pitch = round_up(p->intermediate, QT_BLOCK_COLS);
    }
    return rc == QTOOL_OK ? product(p, QT_MOE_DOWN, &s, &inner, r) : rc;
}

void qt_moe_half_set_args(struct qt_moe_half_args *a, const struct qtool_moe_plan *p, int matrix,
                          int kind, const struct qt_moe_half_space *s, const struct qt_moe_input *x,
                          const struct qt_moe_run *r)
{
    const bool down = matrix == QT_MOE_DOWN, acts = matrix == QT_MOE_GATE;
    const size_t y_pitch = down ? s->partial_pitch : acts ? s->inner_pitch : s->up_pitch;
    a->item = (const struct qt_moe_item *)(r->workspace + r->item[kind]);
    a->items = (const int *)(r->workspace + r->items) + kind;
    a->order = (const int *)(r->workspace + r->order);
    a->direct = qt_moe_direct_of(p, r->ids);
    a->by_token = !down;
    a->early = down || (acts && !a->gated);
    a->x = (const __half *)x->values;
    a->x_pitch = (int)x->pitch;
    a->token_factor = x->factor;
    a->y = r->workspace + (acts ? s->inner : r->partial);
    a->matrix = matrix;
    a->up = acts && !a->gated ? r->workspace + r->partial : NULL;
    a->up_pitch = (int)s->up_pitch;
    a->y_pitch = (int)y_pitch;
    a->topk = (int)p->options.topk;
    qt_moe_set_activation(a, p->options.activation);
    a->bf16 = p->options.dtype == QTOOL_BF16;
    a->rounded = acts || (down && qt_state(p)->rounded);
    a->whole_stores = a->n % 8 == 0 && a->y_pitch % 8 == 0;
}

void qt_moe_half_set_wide(struct qt_moe_half_args *a)
{
    a->up_pitch *= 2;
    if (a->matrix != QT_MOE_UP)
        return;
    a->y_pitch *= 2;
    a->rounded = 1;
    a->whole_stores = a->n % 8 == 0;
}

int qt_moe_half_need_maps(struct qtool_moe_plan *p, void (**encode)(void))
{
    struct qtool_matmul_plan maps = {};
    if (qt_need_tensor_maps(&maps) != QTOOL_OK)
        return qt_moe_refuse(p->reason, QTOOL_UNSUPPORTED, "%s", maps.reason);
    *encode = qt_state(&maps)->encode_map;
    return QTOOL_OK;
}

bool qt_moe_half_map(CUtensorMap *map, const struct qtool_moe_plan *p, void (*encode)(void),
                     const void *x, size_t k, size_t pitch)
{
    struct qtool_matmul_plan maps = {};
    maps.m = qt_moe_positions(p);
    qt_state(&maps)->encode_map = encode;
    const struct qt_tensor of = {x,   2, {k, maps.m}, {pitch * 2}, {QT_BLOCK_COLS, QT_MOE_WIDE_BOX},
                                 true};
    return qt_tensor_map(&maps, map, &of);
}

int qt_moe_half_launch(const struct qtool_moe_plan *p, const void *kernel, int grid, int threads,
                       size_t smem, struct qt_moe_half_args *a, struct qt_moe_run *r)
{
    const int units = a->direct.pairs * a->row_tiles;
    const int blocks = a->direct.ids && units < grid ? units : grid;
    const int rc =
        qt_moe_launch(p, kernel, dim3((unsigned)blocks), threads, smem, r->first, a, r->stream);
    r->first = false;
    return rc;
}
