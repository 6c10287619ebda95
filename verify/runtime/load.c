/* Loads a model into GPU memory: packed sections unchanged, all other matrices as FP16. */
#include "verify/runtime/runtime.h"

#include <stdio.h>
#include <string.h>

int rt_alloc(struct qt_runtime *rt, void *out, size_t count, size_t size, struct qt_err *err)
{
    struct rt_memory *m = &rt->memory;
    void *p = NULL;
    size_t bytes;
    int rc = QT_OK;
    if (qt_mul_overflow(&bytes, count, size))
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of GPU memory (%zu x %zu bytes)", count,
                       size);
    QT_TRY(qt_array_grow(&m->list, &m->capacity, m->count + 1, sizeof *m->list, err));
    QT_TRY(rt->gpu->alloc(rt->gpu, &p, bytes, err));
    m->list[m->count++] = (struct rt_block){p, bytes};
    m->bytes += bytes;
    memcpy(out, &p, sizeof p);
done:
    return rc;
}

/* ---- dense tensors -------------------------------------------------------------------------- */

struct loader {
    struct qt_runtime *rt;
    const struct qt_weights *w;
    const struct qt_container *container;
    float *values; /* host */
    uint16_t *halves;
    size_t values_capacity, halves_capacity;
};

static int load_values(struct loader *l, const char *name, size_t count, struct qt_err *err)
{
    int rc;
    QT_TRY(qt_stop_check(err));
    QT_TRY(qt_array_grow(&l->values, &l->values_capacity, count, sizeof *l->values, err));
    QT_TRY(l->w->load(l->w->ctx, name, l->values, err));
done:
    return rc;
}

/* A vector of FP32, or NULL if name is NULL. */
static int load_vector(const float **out, struct loader *l, const char *name,
                       const struct qt_part *part, bool plus_1, struct qt_err *err)
{
    float *p = NULL;
    int rc = QT_OK;
    *out = NULL;
    if (!name)
        return QT_OK;
    QT_TRY(load_values(l, name, part->rows, err));
    for (size_t i = 0; plus_1 && i < part->rows; i++)
        l->values[i] += 1;
    QT_TRY(rt_alloc(l->rt, &p, part->n, sizeof *p, err));
    QT_TRY(l->rt->gpu->upload(l->rt->gpu, p, l->values + part->first, part->n * sizeof *p, err));
    *out = p;
done:
    return rc;
}

static int load_norm(struct qtool_decoder_norm *out, struct loader *l, const struct qt_part *part,
                     enum qt_norm_kind kind, struct qt_err *err)
{
    int rc = load_vector(&out->weight, l, part->weight, part, part->plus_1, err);
    if (rc == QT_OK)
        rc = load_vector(&out->bias, l, part->weight ? part->bias : NULL, part, false, err);
    out->kind = kind == QT_NORM_LAYER ? QTOOL_DECODER_LAYER_NORM : QTOOL_DECODER_RMS;
    out->eps = part->eps;
    return rc;
}

struct conversion {
    const float *from;
    uint16_t *to;
    size_t count;
};

enum { CONVERSION = 1 << 16 };

static void convert_item(void *ctx, size_t item)
{
    const struct conversion *c = ctx;
    const size_t end = qt_min_size((item + 1) * CONVERSION, c->count);
    for (size_t i = item * CONVERSION; i < end; i++)
        c->to[i] = qt_f32_to_f16(c->from[i]);
}

/* Writes rows [part->first, part->first + part->n) as FP16 to device memory. */
static int upload_rows(void *dst, struct loader *l, const struct qt_part *part, struct qt_err *err)
{
    const size_t count = part->n * part->k;
    int rc;
    QT_TRY(load_values(l, part->weight, part->rows * part->k, err));
    QT_TRY(qt_array_grow(&l->halves, &l->halves_capacity, count, sizeof *l->halves, err));
    qt_parallel_for(qt_ceil_div(count, CONVERSION), convert_item,
                    &(struct conversion){l->values + part->first * part->k, l->halves, count});
    QT_TRY(l->rt->gpu->upload(l->rt->gpu, dst, l->halves, count * sizeof *l->halves, err));
done:
    return rc;
}

static int load_table(const void **out, struct loader *l, const struct qt_part *part,
                      struct qt_err *err)
{
    void *p = NULL;
    int rc = QT_OK;
    *out = NULL;
    if (!part->weight)
        return QT_OK;
    QT_TRY(rt_alloc(l->rt, &p, part->n * part->k, 2, err));
    QT_TRY(upload_rows(p, l, part, err));
    *out = p;
done:
    return rc;
}

static int load_dense_group(struct rt_group *out, struct loader *l,
                            const struct qt_part *const *parts, size_t count, struct qt_err *err)
{
    const size_t k = parts[0]->k;
    size_t n = 0;
    char *p = NULL;
    int rc;
    for (size_t i = 0; i < count; i++) {
        out->part[i].first = n;
        n += parts[i]->n;
    }
    QT_TRY(rt_alloc(l->rt, &p, n * k, 2, err));
    for (size_t i = 0; i < count; i++)
        QT_TRY(upload_rows(p + out->part[i].first * k * 2, l, parts[i], err));
    out->linears = 1;
    out->linear[0] = (struct rt_linear){.n = n, .k = k, .dense = p};
done:
    return rc;
}

/* ---- packed matrices ------------------------------------------------------------------------ */

/* True if the rows of b can follow those of a in the same sections. */
static bool can_follow(const struct qt_packed *a, const struct qt_packed *b)
{
    const void *sections[QT_MAX_SECTIONS] = {NULL};
    struct qtool_matmul_weight x, y;
    if (qt_gpu_weight(&x, a, sections, NULL) < 0 || qt_gpu_weight(&y, b, sections, NULL) < 0)
        return false;
    if (x.kind == QTOOL_MATMUL_MIX24 || x.kind != y.kind || x.bits != y.bits ||
        x.exp_bits != y.exp_bits || x.group != y.group || x.scale_exp2 != y.scale_exp2 ||
        x.k != y.k || a->n % 16 || a->nsections != b->nsections)
        return false;
    for (size_t i = 0; i < a->nsections; i++) {
        const struct qt_section *s = &a->section[i], *t = &b->section[i];
        if (strcmp(s->name, t->name) != 0)
            return false;
        if (strcmp(s->name, "table") == 0 &&
            (s->bytes != t->bytes || memcmp(s->data, t->data, s->bytes) != 0))
            return false;
    }
    return true;
}

/* Copies the rows of packed[count] into common sections. */
static int upload_packed(struct rt_linear *out, struct qt_runtime *rt,
                         const struct qt_packed *packed, size_t count, struct qt_err *err)
{
    const void *sections[QT_MAX_SECTIONS] = {NULL};
    size_t n = 0;
    int rc = QT_OK;
    for (size_t s = 0; s < packed[0].nsections; s++) {
        const bool shared = strcmp(packed[0].section[s].name, "table") == 0;
        const size_t parts = shared ? 1 : count;
        size_t bytes = 0, at = 0;
        char *p = NULL;
        for (size_t i = 0; i < parts; i++)
            bytes += packed[i].section[s].bytes;
        /* Kernels may read the indices and values of outliers to a multiple of 16 bytes. */
        QT_TRY(rt_alloc(rt, &p, bytes + 16, 1, err));
        for (size_t i = 0; i < parts; i++) {
            QT_TRY(rt->gpu->upload(rt->gpu, p + at, packed[i].section[s].data,
                                   packed[i].section[s].bytes, err));
            at += packed[i].section[s].bytes;
        }
        sections[s] = p;
    }
    QT_TRY(qt_gpu_weight(&out->weight, &packed[0], sections, err));
    for (size_t i = 0; i < count; i++)
        n += packed[i].n;
    out->n = out->weight.n = n;
    out->k = packed[0].k;
done:
    return rc;
}

int rt_pack_group(struct rt_group *out, struct qt_runtime *rt, const struct qt_packed *packed,
                  size_t count, struct qt_err *err)
{
    int rc = QT_OK;
    size_t at = 0;
    out->linears = 0;
    for (size_t end; at < count; at = end) {
        size_t first = 0;
        for (end = at + 1; end < count && can_follow(&packed[end - 1], &packed[end]); end++)
            ;
        for (size_t i = at; i < end; first += packed[i++].n) {
            out->part[i].linear = out->linears;
            out->part[i].first = first;
        }
        QT_TRY(upload_packed(&out->linear[out->linears++], rt, packed + at, end - at, err));
    }
done:
    return rc;
}

static int load_packed_group(struct rt_group *out, struct loader *l,
                             const struct qt_entry *const *entries, size_t count,
                             struct qt_err *err)
{
    struct qt_packed packed[RT_PARTS] = {{.n = 0}};
    int rc = QT_OK;
    QT_TRY(qt_stop_check(err));
    for (size_t i = 0; i < count; i++) {
        QT_TRY(qt_packed_open(&packed[i], l->container, entries[i], err));
        if (gpu_is_w4ax(&packed[i]))
            QT_TRY(qt_fail(err, QT_E_UNSUPPORTED, NULL, entries[i]->name,
                           "the fused runtime does not support w4ax"));
    }
    QT_TRY(rt_pack_group(out, l->rt, packed, count, err));
done:
    for (size_t i = 0; i < count; i++)
        qt_packed_free(&packed[i]);
    return rc;
}

static const struct qt_entry *entry_of(const struct loader *l, const struct qt_part *part)
{
    return l->container ? qt_container_find(l->container, part->weight) : NULL;
}

/* Loads the parts (row ranges of one tensor, or whole tensors). Where some are packed and others
 * are not, the packed ones are products of their own. */
static int load_group(struct rt_group *out, struct loader *l, const struct qt_part *const *parts,
                      size_t count, struct qt_err *err)
{
    const struct qt_entry *entries[RT_PARTS] = {NULL};
    const bool one = count > 1 && strcmp(parts[0]->weight, parts[1]->weight) == 0;
    size_t packed = 0;
    int rc = QT_OK;
    for (size_t i = 0; i < count; i++) {
        entries[i] = entry_of(l, parts[i]);
        packed += entries[i] != NULL;
    }
    if (!packed)
        return load_dense_group(out, l, parts, count, err);
    if (one) {
        QT_TRY(load_packed_group(out, l, entries, 1, err));
        for (size_t i = 0; i < count; i++)
            out->part[i].first = parts[i]->first;
        return QT_OK;
    }
    if (packed == count)
        return load_packed_group(out, l, entries, count, err);
    for (size_t i = 0; i < count; i++) {
        struct rt_group single = {.linears = 0};
        QT_TRY(entries[i] ? load_packed_group(&single, l, &entries[i], 1, err)
                          : load_dense_group(&single, l, &parts[i], 1, err));
        out->linear[i] = single.linear[0];
        out->part[i].linear = i;
    }
    out->linears = count;
done:
    return rc;
}

/* ---- the model ------------------------------------------------------------------------------ */

static int load_layer(struct rt_layer *out, struct loader *l, const struct qt_block *b,
                      enum qt_norm_kind kind, struct qt_err *err)
{
    const struct {
        struct qtool_decoder_norm *to;
        const struct qt_part *part;
    } norms[] = {{&out->attn_in, &b->attn_in}, {&out->q_norm, &b->q_norm},
                 {&out->k_norm, &b->k_norm},   {&out->attn_out, &b->attn_out},
                 {&out->mlp_in, &b->mlp_in},   {&out->mlp_out, &b->mlp_out}};
    const struct {
        const float **to;
        const struct qt_part *part;
    } biases[] = {{&out->q_bias, &b->q},      {&out->k_bias, &b->k},       {&out->v_bias, &b->v},
                  {&out->o_bias, &b->o},      {&out->gate_bias, &b->gate}, {&out->up_bias, &b->up},
                  {&out->down_bias, &b->down}};
    const struct qt_part *const qkv[] = {&b->q, &b->k, &b->v}, *const o[] = {&b->o};
    const struct qt_part *const gate_up[] = {&b->gate, &b->up}, *const down[] = {&b->down};
    int rc = QT_OK;
    out->gated = b->gate.n != 0;
    out->width = b->up.n;
    out->window = b->window;
    out->rope = b->rope;
    for (size_t i = 0; i < sizeof norms / sizeof *norms; i++)
        QT_TRY(load_norm(norms[i].to, l, norms[i].part, kind, err));
    for (size_t i = 0; i < sizeof biases / sizeof *biases; i++)
        QT_TRY(load_vector(biases[i].to, l, biases[i].part->bias, biases[i].part, false, err));
    QT_TRY(load_vector(&out->sinks, l, b->sinks.weight, &b->sinks, false, err));
    QT_TRY(load_group(&out->qkv, l, qkv, 3, err));
    QT_TRY(load_group(&out->o, l, o, 1, err));
    QT_TRY(load_group(&out->gate_up, l, gate_up + !out->gated, out->gated ? 2 : 1, err));
    QT_TRY(load_group(&out->down, l, down, 1, err));
done:
    return rc;
}

static int load_rope(struct rt_rope *out, struct loader *l, const struct qt_model *model,
                     enum qt_rope_kind kind, bool queries, struct qt_err *err)
{
    const size_t count = l->rt->opt.capacity * (l->rt->config.rotary / 2);
    float *tables = NULL;
    int rc = QT_OK;
    if (!qt_model_rope(NULL, NULL, model, kind, queries, l->rt->opt.capacity))
        return QT_OK;
    QT_TRY(qt_array_new(&tables, 2 * count, sizeof *tables, err));
    qt_model_rope(tables, tables + count, model, kind, queries, l->rt->opt.capacity);
    QT_TRY(rt_alloc(l->rt, &out->cos, count, sizeof *tables, err));
    QT_TRY(rt_alloc(l->rt, &out->sin, count, sizeof *tables, err));
    QT_TRY(l->rt->gpu->upload(l->rt->gpu, out->cos, tables, count * sizeof *tables, err));
    QT_TRY(l->rt->gpu->upload(l->rt->gpu, out->sin, tables + count, count * sizeof *tables, err));
done:
    qt_free(tables);
    return rc;
}

static int find_act(enum qtool_decoder_act *out, enum qt_act_kind act, struct qt_err *err)
{
    static const struct {
        enum qt_act_kind from;
        enum qtool_decoder_act to;
    } acts[] = {{QT_ACT_SILU, QTOOL_DECODER_SILU},   {QT_ACT_GELU_TANH, QTOOL_DECODER_GELU_TANH},
                {QT_ACT_GELU, QTOOL_DECODER_GELU},   {QT_ACT_RELU, QTOOL_DECODER_RELU},
                {QT_ACT_RELU2, QTOOL_DECODER_RELU2}, {QT_ACT_CLAMPED, QTOOL_DECODER_CLAMPED}};
    for (size_t i = 0; i < sizeof acts / sizeof *acts; i++)
        if (acts[i].from == act) {
            *out = acts[i].to;
            return QT_OK;
        }
    return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                   "the fused runtime does not support models with this activation");
}

static void fill_config(struct rt_config *c, const struct qt_model *model,
                        const struct qt_outer *outer)
{
    const struct qt_model_info *info = qt_model_info(model);
    struct qt_model_details d;
    qt_model_details(&d, model);
    *c = (struct rt_config){
        .layers = info->layers,
        .hidden = info->hidden,
        .vocab = info->vocab,
        .heads = info->heads,
        .kv_heads = info->kv_heads,
        .head_dim = info->head_dim,
        .rotary = d.inv_freq ? d.rotary_dim : 0,
        .norm_after = outer->norm_after,
        .parallel = outer->parallel,
        .norm_all_heads = outer->norm_all_heads,
        .norm_last = outer->norm_last,
        .interleaved = outer->interleaved,
        .position_offset = outer->position_offset,
        .attn_scale = d.attn_scale,
        .attn_softcap = d.attn_softcap,
        .embed_scale = d.embed_scale,
        .residual_scale = outer->parallel ? 1 : d.residual_scale,
        .logit_scale = d.logit_scale,
        .logit_softcap = info->logit_softcap,
    };
}

static int load_all(struct loader *l, const struct qt_model *model, struct qt_err *err)
{
    struct qt_runtime *rt = l->rt;
    const size_t layers = rt->config.layers;
    struct qt_outer outer;
    struct qt_block block;
    int rc;
    QT_TRY(qt_model_outer(&outer, model, err));
    for (size_t i = 0; i < layers; i++) /* refusals come before the work */
        QT_TRY(qt_model_block(&block, model, i, err));
    QT_TRY(load_table(&rt->embed, l, &outer.embed, err));
    QT_TRY(load_table(&rt->positions, l, &outer.positions, err));
    rt->head = rt->embed;
    if (outer.head.weight != outer.embed.weight)
        QT_TRY(load_table(&rt->head, l, &outer.head, err));
    QT_TRY(load_vector(&rt->head_bias, l, outer.head.bias, &outer.head, false, err));
    QT_TRY(load_norm(&rt->final_norm, l, &outer.final_norm, outer.norm, err));
    for (size_t i = 0; i < layers; i++) {
        qt_log_progress(rt->opt.log, "load", (double)i, (double)layers);
        QT_TRY(qt_model_block(&block, model, i, err));
        QT_TRY(load_layer(&rt->layers[i], l, &block, outer.norm, err));
    }
    qt_log_progress(rt->opt.log, "load", (double)layers, (double)layers);
    for (int kind = 0; kind < QT_ROPES; kind++)
        QT_TRY(load_rope(&rt->rope[kind], l, model, (enum qt_rope_kind)kind, false, err));
    QT_TRY(load_rope(&rt->query_rope, l, model, QT_ROPE_FULL, true, err));
done:
    return rc;
}

int rt_load(struct qt_runtime *rt, const struct qt_model *model, const struct qt_weights *w,
            const struct qt_container *container, struct qt_err *err)
{
    struct loader l = {.rt = rt, .w = w, .container = container};
    struct qt_model_details details;
    struct qt_outer outer;
    int rc;
    QT_TRY(qt_model_outer(&outer, model, err));
    fill_config(&rt->config, model, &outer);
    qt_model_details(&details, model);
    QT_TRY(find_act(&rt->config.act, details.act, err));
    QT_TRY(qt_array_new(&rt->layers, rt->config.layers, sizeof *rt->layers, err));
    QT_TRY(load_all(&l, model, err));
done:
    qt_free(l.values);
    qt_free(l.halves);
    return rc;
}
