/*
 * The kernels of a step, in order. One decoder layer:
 *
 *   x --> q k v products --> heads (bias, norm, rope, append) --> attention --> o product
 *     --> add + norm --> gate up products --> activation --> down product --> add + norm --> x
 *
 * The activation is in the epilogue of gate and up where the plan of their product can do it.
 *
 * With experts: router product --> choice --> grouped products, or for FP16 experts product -->
 * activation --> product, beside the MLP of the shared expert.
 */
#include "verify/runtime/program.h"

#include <math.h>

void rt_program_free(struct rt_program *p)
{
    qt_free(p->ops);
    *p = (struct rt_program){0};
}

/* group: of layer l, behind the norm; l may be NULL. */
static int append_norm(struct rt_program *p, struct qt_runtime *rt,
                       struct qtool_decoder_add_norm *a, size_t m, const struct rt_layer *l,
                       const struct rt_group *group, struct qt_err *err)
{
    struct qtool_decoder_op op = {.kind = QTOOL_DECODER_ADD_NORM};
    a->m = a->m ? a->m : m;
    a->step = a->step ? a->step : 1;
    a->n = rt->config.hidden;
    a->hidden = rt->hidden;
    a->out = rt->x;
    if (l && rt_norm_quantizes(rt, l, group)) {
        int rc = rt_need_codes(rt, &group->input, a->m, err);
        if (rc < 0)
            return rc;
        a->w4ax = &group->input.in; /* acts: when it is enqueued */
    }
    op.add_norm = *a;
    return rt_append_kernel(p, QT_RUNTIME_NORMS, &op, err);
}

/* The norm in front of layer i, or the final norm. After the last layer only the last tokens of the
 * sequences go on. */
static void set_next_norm(struct qtool_decoder_add_norm *a, const struct qt_runtime *rt,
                          size_t layer, const struct rt_batch *b)
{
    if (layer < rt->config.layers) {
        if (!rt->config.norm_after)
            a->norm = rt->layers[layer].attn_in;
        return;
    }
    a->norm = rt->final_norm;
    if (!b->all) {
        a->m = b->sequences;
        a->first = b->tokens - 1;
        a->step = b->tokens;
    }
}

/* The third sublayer, up to its output in rt->down; rt->x: the hidden states. */
static int append_input(struct rt_program *p, struct qt_runtime *rt, size_t layer, size_t m,
                        struct qt_err *err)
{
    const struct rt_layer *l = &rt->layers[layer];
    const size_t n = rt->config.inputs;
    struct qtool_decoder_op op = {.kind = QTOOL_DECODER_ACTIVATION};
    int rc;
    op.activation =
        (struct qtool_decoder_activation){.act = rt->config.act,
                                          .m = m,
                                          .n = n,
                                          .gate = rt->gate_up,
                                          .up = (char *)rt->layer_inputs + layer * n * 2,
                                          .gate_stride = n,
                                          .up_stride = rt->config.layers * n,
                                          .out = rt->act};
    QT_TRY(rt_append_group(p, rt, &l->input_gate, rt->gate_up, rt->x, m, false, err));
    QT_TRY(rt_append_kernel(p, QT_RUNTIME_ACTIVATION, &op, err));
    QT_TRY(rt_append_group(p, rt, &l->input_out, rt->down, rt->act, m, false, err));
done:
    return rc;
}

static int append_layer(struct rt_program *p, struct qt_runtime *rt, size_t i,
                        const struct rt_batch *b, struct qt_err *err)
{
    const struct rt_config *c = &rt->config;
    const struct rt_layer *l = &rt->layers[i], *next = i + 1 < c->layers ? l + 1 : NULL;
    const size_t m = b->sequences * b->tokens;
    const struct qtool_decoder_addend mixed = {rt->o, l->o_bias, l->attn_out};
    const struct qtool_decoder_addend mlp = {rt->down, l->down_bias, l->mlp_out};
    struct qtool_decoder_add_norm middle = {.add = {mixed}, .factor = c->residual_scale};
    struct qtool_decoder_add_norm end = {.add = {mlp}, .factor = c->residual_scale};
    int rc;
    QT_TRY(rt_append_mixer(p, rt, l, b, err));
    if (c->parallel) {
        end.add[1] = mixed;
        if (l->mlp_in.weight) { /* attention has read the output of its own norm */
            middle = (struct qtool_decoder_add_norm){.norm = l->mlp_in};
            QT_TRY(append_norm(p, rt, &middle, m, l, &l->gate_up, err));
        }
    } else {
        *(c->norm_after ? &middle.after : &middle.norm) = c->norm_after ? l->attn_in : l->mlp_in;
        QT_TRY(append_norm(p, rt, &middle, m, l, &l->gate_up, err));
    }
    QT_TRY(rt_append_mlp(p, rt, l, m, err));
    if (l->mixture.experts && l->width) /* has neither bias nor norm */
        end.add[1] = (struct qtool_decoder_addend){.x = rt->shared};
    if (c->norm_after)
        end.after = l->mlp_in;
    if (l->input_gate.linears) {
        QT_TRY(append_norm(p, rt, &end, m, NULL, NULL, err));
        QT_TRY(append_input(p, rt, i, m, err));
        end = (struct qtool_decoder_add_norm){.add = {{.x = rt->down, .norm = l->input_norm}},
                                              .factor = c->residual_scale};
    }
    end.scale = l->scale;
    set_next_norm(&end, rt, i + 1, b);
    QT_TRY(append_norm(p, rt, &end, m, next, next ? &next->qkv : NULL, err));
done:
    return rc;
}

/* The inputs of all layers, of the embedding in rt->hidden and of a table:
 *
 *     layer_inputs = (norm(projection) + sqrt(inputs) * table[id]) / sqrt(2) */
static int append_inputs(struct rt_program *p, struct qt_runtime *rt, const struct rt_batch *b,
                         struct qt_err *err)
{
    const size_t m = b->sequences * b->tokens, n = rt->config.inputs, all = rt->config.layers * n;
    struct qtool_decoder_add_norm round = {.factor = 1};
    struct qtool_decoder_op embed = {.kind = QTOOL_DECODER_EMBED};
    struct qtool_decoder_op add = {.kind = QTOOL_DECODER_ADD_NORM};
    const float half = sqrtf(.5f);
    int rc;
    embed.embed = (struct qtool_decoder_embed){.m = m,
                                               .n = all,
                                               .hidden = rt->input_sum,
                                               .table = rt->inputs,
                                               .ids = b->ids,
                                               .factor = half * sqrtf((float)n)};
    add.add_norm = (struct qtool_decoder_add_norm){
        .m = m * rt->config.layers,
        .n = n,
        .step = 1,
        .hidden = rt->input_sum,
        .add = {{.x = rt->gate_up, .norm = rt->inputs_norm}},
        .factor = half,
        .out = rt->layer_inputs,
    };
    QT_TRY(append_norm(p, rt, &round, m, NULL, NULL, err)); /* x = hidden */
    QT_TRY(rt_append_kernel(p, QT_RUNTIME_OTHER, &embed, err));
    QT_TRY(rt_append_product(p, rt, &rt->inputs_project, rt->gate_up, rt->x, m, QT_RUNTIME_PRODUCTS,
                             err));
    QT_TRY(rt_append_kernel(p, QT_RUNTIME_NORMS, &add, err));
done:
    return rc;
}

/* hidden = positions, to which the projection of the embedding in rt->o is added later. */
static int append_projected(struct rt_program *p, struct qt_runtime *rt, const struct rt_batch *b,
                            struct qt_err *err)
{
    const size_t m = b->sequences * b->tokens, hidden = rt->config.hidden;
    struct qtool_decoder_op embed = {.kind = QTOOL_DECODER_EMBED}, places = embed;
    struct qtool_decoder_op round = {.kind = QTOOL_DECODER_ADD_NORM};
    int rc;
    embed.embed = (struct qtool_decoder_embed){.m = m,
                                               .n = rt->project_in.k,
                                               .hidden = rt->input_sum,
                                               .table = rt->embed,
                                               .ids = b->ids,
                                               .factor = rt->config.embed_scale};
    places.embed = (struct qtool_decoder_embed){.m = m,
                                                .n = hidden,
                                                .hidden = rt->hidden,
                                                .table = (const char *)rt->positions +
                                                         rt->config.position_offset * hidden * 2,
                                                .ids = b->position,
                                                .factor = 1};
    round.add_norm = (struct qtool_decoder_add_norm){
        .m = m, .n = rt->project_in.k, .step = 1, .hidden = rt->input_sum, .out = rt->layer_inputs};
    QT_TRY(rt_append_kernel(p, QT_RUNTIME_OTHER, &embed, err));
    QT_TRY(rt_append_kernel(p, QT_RUNTIME_NORMS, &round, err));
    QT_TRY(rt_append_product(p, rt, &rt->project_in, rt->o, rt->layer_inputs, m,
                             QT_RUNTIME_PRODUCTS, err));
    QT_TRY(rt_append_kernel(p, QT_RUNTIME_OTHER, &places, err));
done:
    return rc;
}

static int append_embed(struct rt_program *p, struct qt_runtime *rt, const struct rt_batch *b,
                        struct qt_err *err)
{
    struct qtool_decoder_op op = {.kind = QTOOL_DECODER_EMBED};
    struct qtool_decoder_add_norm first = {.factor = 1};
    const size_t m = b->sequences * b->tokens;
    int rc;
    op.embed = (struct qtool_decoder_embed){.m = m,
                                            .n = rt->config.hidden,
                                            .hidden = rt->hidden,
                                            .table = rt->embed,
                                            .positions = rt->positions,
                                            .ids = b->ids,
                                            .position = b->position,
                                            .position_offset = (int)rt->config.position_offset,
                                            .factor = rt->config.embed_scale};
    if (rt->project_in.n) {
        QT_TRY(append_projected(p, rt, b, err));
        first.add[0].x = rt->o;
    } else {
        QT_TRY(rt_append_kernel(p, QT_RUNTIME_OTHER, &op, err));
    }
    if (rt->inputs)
        QT_TRY(append_inputs(p, rt, b, err));
    first.after = rt->embed_norm;
    set_next_norm(&first, rt, 0, b);
    QT_TRY(append_norm(p, rt, &first, m, rt->layers, &rt->layers->qkv, err));
done:
    return rc;
}

/* The FP16 head by cuBLAS with FP32 results. */
static int append_dense_head(struct rt_program *p, struct qt_runtime *rt, float *logits,
                             const void *x, size_t m, struct qt_err *err)
{
    struct rt_op *op;
    int rc = rt_append_op(&op, p, RT_DENSE_F32, QT_RUNTIME_HEAD, err);
    if (rc == QT_OK) {
        op->product.linear = &rt->head;
        op->product.y = logits;
        op->product.x = x;
        op->product.m = m;
    }
    return rc;
}

int rt_add_head(struct rt_program *p, struct qt_runtime *rt, float *logits, size_t row, size_t m,
                float softcap, struct qt_err *err)
{
    const struct rt_config *c = &rt->config;
    const void *x = (char *)rt->x + row * c->hidden * 2;
    const bool dense = rt->head.dense != NULL;
    struct qtool_decoder_op op = {.kind = QTOOL_DECODER_NEXT};
    int rc;
    if (rt->project_out.n) {
        QT_TRY(rt_append_product(p, rt, &rt->project_out, rt->o, x, m, QT_RUNTIME_HEAD, err));
        x = rt->o;
    }
    QT_TRY(dense ? append_dense_head(p, rt, logits, x, m, err)
                 : rt_append_product(p, rt, &rt->head, rt->head_out, x, m, QT_RUNTIME_HEAD, err));
    if (!dense || c->logit_scale != 1 || rt->head_bias || softcap > 0) {
        op.next = (struct qtool_decoder_next){.sequences = m,
                                              .vocab = c->vocab,
                                              .logits = logits,
                                              .half = dense ? NULL : rt->head_out,
                                              .bias = rt->head_bias,
                                              .factor = c->logit_scale,
                                              .softcap = softcap};
        QT_TRY(rt_append_kernel(p, QT_RUNTIME_OTHER, &op, err));
    }
done:
    return rc;
}

int rt_add_next(struct rt_program *p, struct qt_runtime *rt, struct qt_err *err)
{
    const struct qt_sampling *how = &rt->opt.sampling;
    struct qtool_decoder_op op = {.kind = QTOOL_DECODER_NEXT};
    op.next = (struct qtool_decoder_next){.sequences = rt->opt.sequences,
                                          .vocab = rt->config.vocab,
                                          .logits = rt->logits,
                                          .factor = 1,
                                          .temperature = (float)how->temperature,
                                          .top_p = how->top_p,
                                          .top_k = how->top_k,
                                          .seed = how->seed,
                                          .ids = rt->next_ids,
                                          .position = rt->next_position,
                                          .length = rt->next_length,
                                          .fault = rt->fault};
    return rt_append_kernel(p, QT_RUNTIME_OTHER, &op, err);
}

int rt_build(struct rt_program *out, struct qt_runtime *rt, const struct rt_batch *b,
             struct qt_err *err)
{
    int rc;
    *out = (struct rt_program){0};
    QT_TRY(append_embed(out, rt, b, err));
    for (size_t i = 0; i < rt->config.layers; i++)
        QT_TRY(append_layer(out, rt, i, b, err));
    if (!b->all)
        QT_TRY(rt_add_head(out, rt, b->logits, 0, b->sequences, rt->config.logit_softcap, err));
done:
    if (rc < 0)
        rt_program_free(out);
    return rc;
}
