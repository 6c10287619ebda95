/* Llama and Qwen3 MoE models of random weights, for measurements: what is timed depends on shapes,
 * not values. */
#include "verify/runtime/runtime.h"

static const struct qt_runtime_shape shapes[] = {
    {"8b", 32, 4096, 14336, 32, 8, 128, 128256, 0, 0},
    {"70b", 80, 8192, 28672, 64, 8, 128, 128256, 0, 0},
    {"qwen3-30b", 48, 2048, 768, 32, 4, 128, 151936, 128, 8},
};

const struct qt_runtime_shape *qt_runtime_shape_at(size_t i)
{
    return i < sizeof shapes / sizeof *shapes ? &shapes[i] : NULL;
}

static int random_halves(const void **out, struct qt_runtime *rt, size_t count, float size,
                         struct qt_err *err)
{
    void *p = NULL;
    int rc;
    QT_TRY(rt_alloc(rt, &p, count, 2, err));
    if (!rt->original)
        QT_TRY(gpu_fill_random(rt->gpu, p, count * 2, size, err));
    *out = p;
done:
    return rc;
}

/* Norm weights of 1. */
static int ones(struct qtool_decoder_norm *out, struct qt_runtime *rt, size_t n, struct qt_err *err)
{
    float *values = NULL, *p = NULL;
    int rc;
    QT_TRY(qt_array_new(&values, n, sizeof *values, err));
    for (size_t i = 0; i < n; i++)
        values[i] = 1;
    QT_TRY(rt_alloc(rt, &p, n, sizeof *p, err));
    QT_TRY(rt_upload(rt, p, values, n * sizeof *p, err));
    *out = (struct qtool_decoder_norm){.weight = p, .eps = 1e-5f};
done:
    qt_free(values);
    return rc;
}

/* gathers: the quantizer of w4ax has to gather the input, which comes from a norm. */
static int random_w4ax(struct rt_group *out, struct qt_runtime *rt, const struct qt_packed *packed,
                       size_t count, bool gathers, struct qt_err *err)
{
    struct qt_act act = {.k = 0};
    int rc;
    QT_TRY(gpu_random_act(&act, &packed->spec, packed->k, err));
    for (size_t i = 0; i < act.k && !gathers; i++)
        act.order[i] = (uint32_t)i;
    QT_TRY(rt_pack_w4ax(out, rt, packed, count, &act, err));
done:
    qt_act_free(&act);
    return rc;
}

static int random_group(struct rt_group *out, struct qt_runtime *rt, const struct qt_packed *packed,
                        const size_t *n, size_t count, size_t k, struct qt_err *err)
{
    size_t rows = 0;
    if (packed && gpu_is_w4ax(packed))
        return random_w4ax(out, rt, packed, count, count > 1, err);
    if (packed)
        return rt_pack_group(out, rt, packed, count, err);
    for (size_t i = 0; i < count; i++) {
        out->part[i].first = rows;
        rows += n[i];
    }
    out->linears = 1;
    out->linear[0] = (struct rt_linear){.n = rows, .k = k};
    return random_halves(&out->linear[0].dense, rt, rows * k, .02f, err);
}

enum { GROUPS = 4 };

/* The linears of a layer: rows of each part, and columns. */
struct group_shape {
    size_t n[RT_PARTS], count, k;
};

static void group_shapes(struct group_shape out[GROUPS], const struct qt_runtime_shape *s)
{
    const size_t q = s->heads * s->head_dim, kv = s->kv_heads * s->head_dim;
    out[0] = (struct group_shape){{q, kv, kv}, 3, s->hidden};
    out[1] = (struct group_shape){{s->hidden}, 1, q};
    out[2] = (struct group_shape){{s->width, s->width}, 2, s->hidden};
    out[3] = (struct group_shape){{s->hidden}, 1, s->width};
}

/* Rows of up come in the order of the input of down. */
static int random_inputs(struct gpu_experts *e, struct qt_runtime *rt, const struct qt_packed *wide,
                         const struct qt_packed *narrow, struct qt_err *err)
{
    struct qt_act input = {.k = 0}, down = {.k = 0}, *all = NULL;
    int rc;
    QT_TRY(gpu_random_act(&input, &wide->spec, wide->k, err));
    QT_TRY(gpu_random_act(&down, &narrow->spec, narrow->k, err));
    QT_TRY(qt_array_new(&all, e->experts, sizeof *all, err));
    for (size_t i = 0; i < e->experts; i++)
        all[i] = down;
    QT_TRY(gpu_experts_inputs(e, rt->gpu, &input, all, err));
done:
    qt_act_free(&input);
    qt_act_free(&down);
    qt_free(all);
    return rc;
}

static int random_experts(struct gpu_experts *e, struct qt_runtime *rt, size_t experts,
                          const struct qt_packed *wide, const struct qt_packed *narrow,
                          struct qt_err *err)
{
    int rc;
    QT_TRY(gpu_experts_new(e, experts, err));
    for (size_t i = 0; i < experts * GPU_EXPERT_MATRICES; i++)
        e->packed[i] = i % GPU_EXPERT_MATRICES == GPU_EXPERT_MATRICES - 1 ? *narrow : *wide;
    if (gpu_is_w4ax(wide))
        QT_TRY(random_inputs(e, rt, wide, narrow, err));
    QT_TRY(rt_place_experts(e, rt, err));
done:
    qt_free(e->packed);
    e->packed = NULL;
    return rc;
}

/* A router that chooses among all experts alike. wide: gate and up; n 0: FP16. */
static int random_mixture(struct rt_mixture *x, struct qt_runtime *rt,
                          const struct qt_runtime_shape *s, const struct qt_packed *wide,
                          const struct qt_packed *narrow, struct qt_err *err)
{
    const size_t matrix = s->hidden * s->width;
    int rc;
    *x = (struct rt_mixture){.experts = s->experts,
                             .router = {.n = s->experts, .k = s->hidden},
                             .normalize = true,
                             .top_k = s->top_k,
                             .scale = 1};
    QT_TRY(random_halves(&x->router.dense, rt, s->experts * s->hidden, .02f, err));
    if (wide->n)
        return random_experts(&x->grouped, rt, s->experts, wide, narrow, err);
    x->width = s->width;
    QT_TRY(random_halves(&x->gate_up, rt, s->experts * 2 * matrix, .02f, err));
    QT_TRY(random_halves(&x->down, rt, s->experts * matrix, .02f, err));
done:
    return rc;
}

static int random_layers(struct qt_runtime *rt, const struct qt_runtime_shape *s,
                         const struct qt_spec *spec, struct qt_err *err)
{
    struct qt_packed packed[GROUPS][RT_PARTS] = {{{.n = 0}}};
    struct group_shape g[GROUPS];
    const size_t first = rt->memory.count;
    int rc = QT_OK;
    group_shapes(g, s);
    for (size_t j = 0; spec && j < GROUPS; j++)
        for (size_t i = 0; i < g[j].count; i++)
            QT_TRY(qt_bench_weights(&packed[j][i], spec, g[j].n[i], g[j].k, err));
    for (size_t layer = 0; layer < s->layers; layer++) {
        struct rt_layer *l = &rt->layers[layer];
        struct rt_group *const groups[GROUPS] = {&l->qkv, &l->o, &l->gate_up, &l->down};
        qt_log_progress(rt->opt.log, "load", (double)layer, (double)s->layers);
        QT_TRY(qt_stop_check(err));
        rt->original = layer ? first : 0;
        *l = (struct rt_layer){.width = s->width,
                               .gated = true,
                               .kv_heads = s->kv_heads,
                               .head_dim = s->head_dim,
                               .keys_of = layer,
                               .rope = QT_ROPE_FULL};
        QT_TRY(ones(&l->attn_in, rt, s->hidden, err));
        QT_TRY(ones(&l->mlp_in, rt, s->hidden, err));
        if (s->experts) {
            l->width = 0;
            QT_TRY(random_mixture(&l->mixture, rt, s, &packed[2][0], &packed[3][0], err));
        }
        for (size_t j = 0; j < (s->experts ? 2 : GROUPS); j++)
            QT_TRY(random_group(groups[j], rt, spec ? packed[j] : NULL, g[j].n, g[j].count, g[j].k,
                                err));
    }
done:
    rt->original = 0;
    for (size_t j = 0; j < GROUPS; j++)
        for (size_t i = 0; i < RT_PARTS; i++)
            qt_packed_free(&packed[j][i]);
    return rc;
}

/* A rotation by 0: its time does not depend on the angle. */
static int no_rotation(struct qt_runtime *rt, size_t rotary, struct qt_err *err)
{
    const size_t count = rt->opt.capacity * (rotary / 2);
    struct rt_rope *rope = &rt->rope[QT_ROPE_FULL];
    float *values = NULL;
    int rc;
    QT_TRY(qt_array_new(&values, count, sizeof *values, err));
    for (size_t i = 0; i < count; i++)
        values[i] = 1;
    rope->rotary = rotary;
    QT_TRY(rt_alloc(rt, &rope->cos, count, sizeof *values, err));
    QT_TRY(rt_alloc(rt, &rope->sin, count, sizeof *values, err));
    QT_TRY(rt->gpu->upload(rt->gpu, rope->cos, values, count * sizeof *values, err));
    QT_TRY(rt->gpu->fill(rt->gpu, rope->sin, 0, count * sizeof *values, err));
done:
    qt_free(values);
    return rc;
}

static int random_head(struct qt_runtime *rt, const struct qt_runtime_shape *shape,
                       const struct qt_spec *spec, struct qt_err *err)
{
    struct rt_group group = {.linears = 0};
    struct qt_packed packed = {.n = 0};
    int rc = QT_OK;
    rt->head = (struct rt_linear){.n = shape->vocab, .k = shape->hidden};
    if (!spec)
        return random_halves(&rt->head.dense, rt, shape->vocab * shape->hidden, .02f, err);
    QT_TRY(qt_bench_weights(&packed, spec, shape->vocab, shape->hidden, err));
    if (gpu_is_w4ax(&packed))
        QT_TRY(qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                       "the fused runtime does not support heads in w4ax"));
    QT_TRY(rt_pack_group(&group, rt, &packed, 1, err));
    rt->head = group.linear[0];
done:
    qt_packed_free(&packed);
    return rc;
}

int rt_load_random(struct qt_runtime *rt, const struct qt_runtime_shape *shape,
                   const struct qt_spec *spec, const struct qt_spec *head, struct qt_err *err)
{
    int rc;
    rt->config = (struct rt_config){.layers = shape->layers,
                                    .hidden = shape->hidden,
                                    .vocab = shape->vocab,
                                    .heads = shape->heads,
                                    .attn_scale = 0.088388348f, /* 1 / sqrt(128) */
                                    .embed_scale = 1,
                                    .residual_scale = 1,
                                    .logit_scale = 1};
    QT_TRY(qt_array_new(&rt->layers, shape->layers, sizeof *rt->layers, err));
    QT_TRY(random_halves(&rt->embed, rt, shape->vocab * shape->hidden, 1, err));
    QT_TRY(random_head(rt, shape, head, err));
    QT_TRY(ones(&rt->final_norm, rt, shape->hidden, err));
    QT_TRY(no_rotation(rt, shape->head_dim, err));
    QT_TRY(random_layers(rt, shape, spec, err));
done:
    return rc;
}
