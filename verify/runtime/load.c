/* Loads a model into GPU memory: packed sections unchanged, all other matrices as FP16. */
#include "verify/runtime/load.h"

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
    if (rt->original)
        QT_TRY(rt->gpu->copy(rt->gpu, p, m->list[rt->original++].data, bytes, err));
done:
    return rc;
}

int rt_upload(struct qt_runtime *rt, void *dst, const void *src, size_t bytes, struct qt_err *err)
{
    return rt->original ? QT_OK : rt->gpu->upload(rt->gpu, dst, src, bytes, err);
}

/* ---- dense tensors -------------------------------------------------------------------------- */

int rt_load_values(struct rt_loader *l, const char *name, size_t count, struct qt_err *err)
{
    int rc;
    QT_TRY(qt_stop_check(err));
    QT_TRY(qt_array_grow(&l->values, &l->values_capacity, count, sizeof *l->values, err));
    QT_TRY(l->w->load(l->w->ctx, name, l->values, err));
done:
    return rc;
}

/* The rows of a part of a tensor that is in l->values, with k values each. */
static const float *rows_of(struct rt_loader *l, const struct qt_part *part, size_t k)
{
    if (!part->run)
        return l->values + part->first * k;
    for (size_t i = 0; i < part->n / part->run; i++)
        memmove(l->values + i * part->run * k, l->values + (part->first + i * part->pitch) * k,
                part->run * k * sizeof *l->values);
    return l->values;
}

static int adjust_values(struct rt_loader *l, const struct rt_adjust *how, size_t count,
                         struct qt_err *err)
{
    struct qt_packed packed = {.n = 0};
    int rc = QT_OK;
    for (size_t i = 0; how->plus_1 && i < count; i++)
        l->values[i] += 1;
    for (size_t i = 0; how->act && i < how->act->k; i++)
        l->values[how->act->order[i]] *= how->act->factor[i];
    if (how->rows) {
        QT_TRY(qt_packed_open(&packed, l->container, how->rows, err));
        QT_TRY(rt_arrange_rows(l->values, &packed, err));
    }
done:
    qt_packed_free(&packed);
    return rc;
}

int rt_load_vector(const float **out, struct rt_loader *l, const char *name,
                   const struct qt_part *part, const struct rt_adjust *how, struct qt_err *err)
{
    float *p = NULL;
    int rc = QT_OK;
    *out = NULL;
    if (!name)
        return QT_OK;
    QT_TRY(rt_load_values(l, name, part->rows, err));
    if (how)
        QT_TRY(adjust_values(l, how, part->rows, err));
    QT_TRY(rt_alloc(l->rt, &p, part->n, sizeof *p, err));
    QT_TRY(l->rt->gpu->upload(l->rt->gpu, p, rows_of(l, part, 1), part->n * sizeof *p, err));
    *out = p;
done:
    return rc;
}

int rt_load_norm(struct qtool_decoder_norm *out, struct rt_loader *l, const struct qt_part *part,
                 enum qt_norm_kind kind, const struct qt_act *act, struct qt_err *err)
{
    const struct rt_adjust weight = {.plus_1 = part->plus_1, .act = act}, bias = {.act = act};
    int rc = rt_load_vector(&out->weight, l, part->weight, part, &weight, err);
    if (rc == QT_OK)
        rc = rt_load_vector(&out->bias, l, part->weight ? part->bias : NULL, part, &bias, err);
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

int rt_upload_rows(void *dst, struct rt_loader *l, const struct qt_part *part, struct qt_err *err)
{
    const size_t count = part->n * part->k;
    int rc;
    QT_TRY(rt_load_values(l, part->weight, part->rows * part->k, err));
    if (part->unit)
        qt_model_unit_rows(l->values, part->rows, part->k);
    QT_TRY(qt_array_grow(&l->halves, &l->halves_capacity, count, sizeof *l->halves, err));
    qt_parallel_for(qt_ceil_div(count, CONVERSION), convert_item,
                    &(struct conversion){rows_of(l, part, part->k), l->halves, count});
    QT_TRY(l->rt->gpu->upload(l->rt->gpu, dst, l->halves, count * sizeof *l->halves, err));
done:
    return rc;
}

int rt_load_table(const void **out, struct rt_loader *l, const struct qt_part *part,
                  struct qt_err *err)
{
    void *p = NULL;
    int rc = QT_OK;
    *out = NULL;
    if (!part->weight)
        return QT_OK;
    QT_TRY(rt_alloc(l->rt, &p, part->n * part->k, 2, err));
    QT_TRY(rt_upload_rows(p, l, part, err));
    *out = p;
done:
    return rc;
}

static int load_dense_group(struct rt_group *out, struct rt_loader *l,
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
        QT_TRY(rt_upload_rows(p + out->part[i].first * k * 2, l, parts[i], err));
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
    }
    return gpu_same_table(a, b);
}

int rt_upload_sections(const void **out, struct qt_runtime *rt, const struct qt_packed *packed,
                       size_t count, size_t sections, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t s = 0; s < sections; s++) {
        const bool shared = strcmp(packed[0].section[s].name, "table") == 0;
        const size_t parts = shared ? 1 : count;
        size_t bytes = 0, at = 0;
        char *p = NULL;
        for (size_t i = 0; i < parts; i++)
            bytes += packed[i].section[s].bytes;
        /* Kernels may read the indices and values of outliers to a multiple of 16 bytes. */
        QT_TRY(rt_alloc(rt, &p, bytes + 16, 1, err));
        for (size_t i = 0; i < parts; i++) {
            QT_TRY(
                rt_upload(rt, p + at, packed[i].section[s].data, packed[i].section[s].bytes, err));
            at += packed[i].section[s].bytes;
        }
        out[s] = p;
    }
done:
    return rc;
}

/* Copies the rows of packed[count] into common sections. */
static int upload_packed(struct rt_linear *out, struct qt_runtime *rt,
                         const struct qt_packed *packed, size_t count, struct qt_err *err)
{
    const void *sections[QT_MAX_SECTIONS] = {NULL};
    size_t n = 0;
    int rc;
    QT_TRY(rt_upload_sections(sections, rt, packed, count, packed[0].nsections, err));
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

/* act: of the input; NULL or k 0: not quantized. Linears with the same input are all w4ax, or none
 * of them is. */
static int load_packed_group(struct rt_group *out, struct rt_loader *l,
                             const struct qt_entry *const *entries, size_t count,
                             const struct qt_act *act, struct qt_err *err)
{
    struct qt_packed packed[RT_PARTS] = {{.n = 0}};
    int rc = QT_OK;
    QT_TRY(qt_stop_check(err));
    for (size_t i = 0; i < count; i++)
        QT_TRY(qt_packed_open(&packed[i], l->container, entries[i], err));
    QT_TRY(act && act->k ? rt_pack_w4ax(out, l->rt, packed, count, act, err)
                         : rt_pack_group(out, l->rt, packed, count, err));
done:
    for (size_t i = 0; i < count; i++)
        qt_packed_free(&packed[i]);
    return rc;
}

const struct qt_entry *rt_entry_of(const struct rt_loader *l, const struct qt_part *part)
{
    return l->container && part->weight ? qt_container_find(l->container, part->weight) : NULL;
}

/* Loads the parts (row ranges of one tensor, or whole tensors). Where some are packed and others
 * are not, the packed ones are products of their own. */
int rt_load_group(struct rt_group *out, struct rt_loader *l, const struct qt_part *const *parts,
                  size_t count, const struct qt_act *act, struct qt_err *err)
{
    const struct qt_entry *entries[RT_PARTS] = {NULL};
    const bool one = count > 1 && strcmp(parts[0]->weight, parts[1]->weight) == 0;
    size_t packed = 0;
    int rc = QT_OK;
    for (size_t i = 0; i < count; i++) {
        entries[i] = rt_entry_of(l, parts[i]);
        packed += entries[i] != NULL;
    }
    if (!packed)
        return load_dense_group(out, l, parts, count, err);
    if (one && parts[0]->run)
        return rt_load_runs(out, l, entries[0], parts, count, err);
    if (one) {
        QT_TRY(load_packed_group(out, l, entries, 1, act, err));
        for (size_t i = 0; i < count; i++)
            out->part[i].first = parts[i]->first;
        return QT_OK;
    }
    if (packed == count)
        return load_packed_group(out, l, entries, count, act, err);
    for (size_t i = 0; i < count; i++) {
        struct rt_group single = {.linears = 0};
        QT_TRY(entries[i] ? load_packed_group(&single, l, &entries[i], 1, NULL, err)
                          : load_dense_group(&single, l, &parts[i], 1, err));
        out->linear[i] = single.linear[0];
        out->part[i].linear = i;
    }
    out->linears = count;
done:
    return rc;
}

/* ---- w4ax inputs ---------------------------------------------------------------------------- */

/* The linear inputs of a layer; k 0: not quantized. */
enum { INPUT_QKV, INPUT_O, INPUT_MLP, INPUT_DOWN, INPUTS };

/* *out = the input of a linear, in the order of the source channels. */
static int open_act(struct qt_act *out, struct rt_loader *l, const struct qt_part *part,
                    struct qt_err *err)
{
    const struct qt_entry *entry = part->n ? rt_entry_of(l, part) : NULL;
    struct qt_packed packed = {.n = 0};
    int rc = QT_OK;
    if (!entry)
        return QT_OK;
    QT_TRY(qt_packed_open(&packed, l->container, entry, err));
    if (gpu_is_w4ax(&packed))
        QT_TRY(gpu_act_of(out, &packed, err));
done:
    qt_packed_free(&packed);
    return rc;
}

/* Brings the input of a linear into the order of the rows of `part`, which compute it. */
static int follow(struct qt_act *act, struct rt_loader *l, const struct qt_part *part, size_t head,
                  size_t repeat, struct qt_err *err)
{
    const struct qt_entry *entry = act->k ? rt_entry_of(l, part) : NULL;
    struct qt_packed packed = {.n = 0};
    struct rt_rows rows = {.first = entry ? part->first : 0, .head = head, .repeat = repeat};
    int rc = QT_OK;
    if (!act->k)
        return QT_OK;
    if (entry) {
        QT_TRY(qt_packed_open(&packed, l->container, entry, err));
        rows.packed = &packed;
    }
    QT_TRY(rt_follow(act, &rows, err));
done:
    qt_packed_free(&packed);
    return rc;
}

static int open_acts(struct qt_act acts[INPUTS], struct rt_loader *l, const struct qt_block *b,
                     struct qt_err *err)
{
    const struct rt_config *c = &l->rt->config;
    const bool may = !c->norm_after && (!c->parallel || b->mlp_in.weight);
    const bool routed = b->mixture.experts != 0; /* the router reads the output of the norm, too */
    int rc;
    QT_TRY(open_act(&acts[INPUT_QKV], l, &b->q, err));
    QT_TRY(open_act(&acts[INPUT_O], l, &b->o, err));
    QT_TRY(open_act(&acts[INPUT_MLP], l, &b->up, err));
    QT_TRY(open_act(&acts[INPUT_DOWN], l, &b->down, err));
    QT_TRY(rt_check_factors(&acts[INPUT_QKV], may && b->attn_in.weight, err));
    QT_TRY(rt_check_factors(&acts[INPUT_MLP], may && !routed && b->mlp_in.weight, err));
    QT_TRY(follow(&acts[INPUT_O], l, &b->v, b->head_dim, c->heads / b->kv_heads, err));
    QT_TRY(follow(&acts[INPUT_DOWN], l, &b->up, b->up.n, 1, err));
done:
    return rc;
}

/* ---- the model ------------------------------------------------------------------------------ */

static const struct qt_entry *w4ax_entry(const struct rt_loader *l, const struct qt_part *part,
                                         const struct qt_act *input)
{
    return input->k ? rt_entry_of(l, part) : NULL;
}

static int load_layer(struct rt_layer *out, struct rt_loader *l, const struct qt_block *b,
                      size_t index, enum qt_norm_kind kind, struct qt_err *err)
{
    struct qt_act acts[INPUTS] = {{.k = 0}};
    const struct qt_act *const in[INPUTS] = {&acts[0], &acts[1], &acts[2], &acts[3]};
    const struct {
        struct qtool_decoder_norm *to;
        const struct qt_part *part;
        const struct qt_act *act;
    } norms[] = {{&out->attn_in, &b->attn_in, in[INPUT_QKV]},
                 {&out->q_norm, &b->q_norm, NULL},
                 {&out->k_norm, &b->k_norm, NULL},
                 {&out->attn_out, &b->attn_out, NULL},
                 {&out->mlp_in, &b->mlp_in, in[INPUT_MLP]},
                 {&out->mlp_out, &b->mlp_out, NULL}};
    const struct {
        const float **to;
        const struct qt_part *part;
        const struct qt_act *act;
    } biases[] = {
        {&out->q_bias, &b->q, in[INPUT_QKV]},       {&out->k_bias, &b->k, in[INPUT_QKV]},
        {&out->v_bias, &b->v, in[INPUT_QKV]},       {&out->o_bias, &b->o, in[INPUT_O]},
        {&out->gate_bias, &b->gate, in[INPUT_MLP]}, {&out->up_bias, &b->up, in[INPUT_MLP]},
        {&out->down_bias, &b->down, in[INPUT_DOWN]}};
    const struct qt_part *const qkv[] = {&b->q, &b->k, &b->v}, *const o[] = {&b->o};
    const size_t own = b->keys_of < index ? 1 : b->keys_are_values ? 2 : 3; /* of qkv */
    const struct qt_part *const gate_up[] = {&b->gate, &b->up}, *const down[] = {&b->down};
    int rc = QT_OK;
    out->gated = b->gate.n != 0;
    out->width = b->up.n;
    out->window = b->window;
    out->rope = b->rope;
    out->kv_heads = b->kv_heads;
    out->head_dim = b->head_dim;
    out->keys_of = b->keys_of;
    QT_TRY(open_acts(acts, l, b, err));
    for (size_t i = 0; i < sizeof norms / sizeof *norms; i++)
        QT_TRY(rt_load_norm(norms[i].to, l, norms[i].part, kind, norms[i].act, err));
    for (size_t i = 0; i < sizeof biases / sizeof *biases; i++) {
        const struct rt_adjust how = {.rows = w4ax_entry(l, biases[i].part, biases[i].act)};
        QT_TRY(rt_load_vector(biases[i].to, l, biases[i].part->bias, biases[i].part, &how, err));
    }
    QT_TRY(rt_load_vector(&out->sinks, l, b->sinks.weight, &b->sinks, NULL, err));
    QT_TRY(rt_load_group(&out->qkv, l, qkv, own, in[INPUT_QKV], err));
    if (own == 2)
        out->qkv.part[2] = out->qkv.part[1];
    QT_TRY(rt_load_group(&out->o, l, o, 1, in[INPUT_O], err));
    if (out->width) {
        QT_TRY(rt_load_group(&out->gate_up, l, gate_up + !out->gated, out->gated ? 2 : 1,
                             in[INPUT_MLP], err));
        QT_TRY(rt_load_group(&out->down, l, down, 1, in[INPUT_DOWN], err));
    }
    if (b->input_gate.n)
        QT_TRY(rt_load_layer_inputs(out, l, b, kind, err));
    if (b->scale.weight) {
        QT_TRY(rt_load_values(l, b->scale.weight, 1, err));
        out->scale = l->values[0];
    }
    if (b->mixture.experts)
        QT_TRY(rt_load_mixture(&out->mixture, l, &b->mixture, index, err));
done:
    for (int i = 0; i < INPUTS; i++)
        qt_act_free(&acts[i]);
    return rc;
}

static int load_rope(struct rt_rope *out, struct rt_loader *l, const struct qt_model *model,
                     enum qt_rope_kind kind, bool queries, struct qt_err *err)
{
    const size_t rotary = qt_model_rope(NULL, NULL, model, kind, queries, l->rt->opt.capacity);
    const size_t count = l->rt->opt.capacity * (rotary / 2);
    float *tables = NULL;
    int rc = QT_OK;
    if (!rotary)
        return QT_OK;
    out->rotary = rotary;
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
        .inputs = outer->inputs_norm.n,
        .clip = outer->clip,
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

/* The head: packed, unless it is w4ax, has no kernel, or has normalized rows; if it is FP16, maybe
 * the embedding. */
static int load_head(struct rt_loader *l, const struct qt_outer *outer, struct qt_err *err)
{
    struct rt_linear *head = &l->rt->head;
    const struct qt_entry *entry = rt_entry_of(l, &outer->head);
    const void *sections[QT_MAX_SECTIONS] = {NULL};
    struct qt_packed packed = {.n = 0};
    struct qtool_matmul_weight weight;
    int rc = QT_OK;
    if (entry && !outer->head.unit)
        QT_TRY(qt_packed_open(&packed, l->container, entry, err));
    if (packed.n == outer->head.n && !gpu_is_w4ax(&packed) &&
        qt_gpu_weight(&weight, &packed, sections, NULL) == QT_OK) {
        QT_TRY(upload_packed(head, l->rt, &packed, 1, err));
    } else {
        *head = (struct rt_linear){.n = outer->head.n, .k = outer->head.k, .dense = l->rt->embed};
        if (outer->head.weight != outer->embed.weight)
            QT_TRY(rt_load_table(&head->dense, l, &outer->head, err));
    }
    QT_TRY(rt_load_vector(&l->rt->head_bias, l, outer->head.bias, &outer->head, NULL, err));
done:
    qt_packed_free(&packed);
    return rc;
}

/* *out = the first n of l->values. */
static int upload_values(const float **out, struct rt_loader *l, size_t n, struct qt_err *err)
{
    float *p = NULL;
    int rc;
    QT_TRY(rt_alloc(l->rt, &p, n, sizeof *p, err));
    QT_TRY(l->rt->gpu->upload(l->rt->gpu, p, l->values, n * sizeof *p, err));
    *out = p;
done:
    return rc;
}

/* *out = weights of a norm that has none. */
static int load_ones(const float **out, struct rt_loader *l, size_t n, struct qt_err *err)
{
    int rc = qt_array_grow(&l->values, &l->values_capacity, n, sizeof *l->values, err);
    for (size_t i = 0; rc == QT_OK && i < n; i++)
        l->values[i] = 1;
    return rc < 0 ? rc : upload_values(out, l, n, err);
}

static int load_slopes(struct rt_loader *l, const struct qt_model *model, struct qt_err *err)
{
    const size_t n = l->rt->config.heads;
    int rc = qt_array_grow(&l->values, &l->values_capacity, n, sizeof *l->values, err);
    if (rc < 0 || !qt_model_slopes(l->values, &l->rt->slope_factor, model))
        return rc;
    return upload_values(&l->rt->slopes, l, n, err);
}

/* A matrix outside decoder layers, in FP16. */
static int load_outer(struct rt_linear *out, struct rt_loader *l, const struct qt_part *part,
                      struct qt_err *err)
{
    *out = (struct rt_linear){.n = part->n, .k = part->k};
    return rt_load_table(&out->dense, l, part, err);
}

static int load_all(struct rt_loader *l, const struct qt_model *model, struct qt_err *err)
{
    struct qt_runtime *rt = l->rt;
    const size_t layers = rt->config.layers;
    struct qt_outer outer;
    struct qt_block block;
    const float *ones = NULL;
    int rc;
    QT_TRY(qt_model_outer(&outer, model, err));
    for (size_t i = 0; i < layers; i++) /* refusals come before the work */
        QT_TRY(qt_model_block(&block, model, i, err));
    QT_TRY(rt_load_table(&rt->embed, l, &outer.embed, err));
    QT_TRY(rt_load_table(&rt->positions, l, &outer.positions, err));
    QT_TRY(load_outer(&rt->project_in, l, &outer.project_in, err));
    QT_TRY(load_outer(&rt->project_out, l, &outer.project_out, err));
    QT_TRY(load_head(l, &outer, err));
    QT_TRY(rt_load_norm(&rt->embed_norm, l, &outer.embed_norm, outer.norm, NULL, err));
    QT_TRY(rt_load_norm(&rt->final_norm, l, &outer.final_norm, outer.norm, NULL, err));
    QT_TRY(load_slopes(l, model, err));
    if (outer.inputs.weight)
        QT_TRY(rt_load_inputs(l, &outer, err));
    if (outer.value_norm)
        QT_TRY(load_ones(&ones, l, qt_model_info(model)->head_dim, err));
    for (size_t i = 0; i < layers; i++) {
        qt_log_progress(rt->opt.log, "load", (double)i, (double)layers);
        QT_TRY(qt_model_block(&block, model, i, err));
        QT_TRY(load_layer(&rt->layers[i], l, &block, i, outer.norm, err));
        rt->layers[i].v_norm = (struct qtool_decoder_norm){.weight = ones, .eps = outer.value_eps};
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
    struct rt_loader l = {.rt = rt, .w = w, .container = container, .model = model};
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
