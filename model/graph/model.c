/* Builds the decoder graph: names every tensor that config.json implies and checks that the tensor
 * exists with the implied shape. */
#include "model/graph/roles.h"

#include <stdio.h>

/* ---- layers --------------------------------------------------------------------------------- */

static int layer_part(struct layer_def *layer, const struct config *cfg, const char *prefix,
                      size_t index, enum role role, size_t expert, const struct qt_weights *w,
                      struct qt_err *err)
{
    const size_t at = part_at(expert, role);
    struct part *part = &layer->parts[at];
    struct qt_linear linear = role_shape(cfg, layer, role, expert);
    char *stem;
    int rc = part_stem(&stem, cfg, layer, prefix, index, role, expert, err);
    if (rc == QT_OK)
        rc = role_bare(role)
                 ? part_set_vector(part, stem, linear.n,
                                   role == ROLE_SELECT_BIAS && cfg->arch->select_bias_row, w, err)
             : role == ROLE_CONV || role == ROLE_SHORT_CONV
                 ? part_set_convolution(part, stem, linear.n, linear.k, role_biased(cfg, role), w,
                                        err)
                 : part_set(part, stem, linear.n, linear.k, role_biased(cfg, role), w, err);
    qt_free(stem);
    if (rc < 0)
        return rc;
    part->whole = at;
    part->factor = cfg->output_factors[role] == 1 ? 0 : cfg->output_factors[role];
    part->linear = linear.input >= 0;
    if (part->linear) {
        part->index = layer->linear_count++;
        linear.weight = part->weight;
        linear.layer = index;
        layer->linears[part->index] = linear;
    } else if (role == ROLE_ROUTER_NORM) {
        part->eps = cfg->eps;
    } else if (!linear.k && !role_bare(role)) {
        part->index = layer->norm_count++;
        layer->norms[part->index] = (struct qt_norm){part->weight, linear.n};
        part->plus_1 = cfg->arch->norms_plus_1 && role != ROLE_DELTA_NORM;
        /* transformers gives the norms of latent states an epsilon of their own */
        part->eps = role == ROLE_Q_A_NORM || role == ROLE_KV_A_NORM ? 1e-6f
                    : cfg->arch->layer_eps > 0                      ? cfg->arch->layer_eps
                                                                    : cfg->eps;
    }
    return QT_OK;
}

/* Makes a role a row range of the fused part `whole`, after the rows of the preceding role. */
static void layer_rows(struct layer_def *layer, const struct config *cfg, enum role role,
                       enum role whole, size_t expert)
{
    const struct qt_linear shape = role_shape(cfg, layer, role, expert);
    const size_t at = part_at(expert, role), of = part_at(expert, whole);
    const struct part *before = &layer->parts[at - 1];
    layer->parts[at] = (struct part){.n = shape.n,
                                     .k = shape.k,
                                     .index = layer->parts[of].index,
                                     .whole = of,
                                     .first = at - 1 == of ? 0 : before->first + before->n};
}

static int layer_set(struct layer_def *layer, const struct config *cfg, const char *prefix,
                     size_t index, const struct qt_weights *w, struct qt_err *err)
{
    const size_t parts = layer_parts(cfg);
    int rc;
    layer->index = index;
    layer->mixer = cfg->mixers[index];
    layer->heads = cfg->heads[index];
    layer->mlp = config_has_mlp(cfg, index);
    layer->experts = !layer->mlp || (cfg->dense && cfg->dense[index]) ? 0 : cfg->info.experts;
    layer->mixer_inputs = layer->mixer == MIXER_NONE            ? 0
                          : layer->mixer == MIXER_HEAD_EXPERTS  ? 1 + 2 * (int)layer->experts
                          : layer->mixer == MIXER_SSM_ATTENTION ? 3
                          : layer->mixer != MIXER_LATENT        ? 2
                          : cfg->latent.q_rank                  ? 4
                                                                : 3;
    QT_TRY(qt_array_new(&layer->parts, parts, sizeof *layer->parts, err));
    QT_TRY(qt_array_new(&layer->linears, parts, sizeof *layer->linears, err));
    for (size_t expert = 0; expert < (layer->experts ? layer->experts : 1); expert++)
        for (int role = expert ? ROLE_GATE_UP : 0; role < ROLE_COUNT; role++)
            if (layer_has(cfg, layer, (enum role)role, expert))
                QT_TRY(layer_part(layer, cfg, prefix, index, (enum role)role, expert, w, err));
            else if (!role_name(cfg, layer, (enum role)role, expert) &&
                     role_name(cfg, layer, role_whole((enum role)role), expert) &&
                     !(cfg->arch->grouped_qkv && role_whole((enum role)role) == ROLE_QKV) &&
                     mixer_has(cfg, layer->mixer, (enum role)role))
                layer_rows(layer, cfg, (enum role)role, role_whole((enum role)role), expert);
done:
    return rc;
}

/* *exists: there is a layer `index` beyond the decoder, recognized by its O, or by ATTN_IN if not
 * all layers have one O. MTP layers, which have
 * an eh_proj, are allowed there; any other layer is an error. */
static int find_layer(bool *exists, const struct config *cfg, const char *prefix, size_t index,
                      const struct qt_weights *w, struct qt_err *err)
{
    size_t shape[QT_MAX_DIMS];
    char *stem = NULL, *o = NULL, *eh_proj = NULL;
    int ndim, rc;
    QT_TRY(part_stem(&stem, cfg, &(struct layer_def){0}, prefix, index,
                     cfg->arch->ssm || !cfg->arch->parts[ROLE_O] ? ROLE_ATTN_IN : ROLE_O, 0, err));
    QT_TRY(qt_string_format(&o, err, "%s.weight", stem));
    QT_TRY(qt_string_format(&eh_proj, err, "%s%s%zu.eh_proj.weight", prefix, cfg->arch->layers,
                            index));
    *exists = w->shape(w->ctx, o, &ndim, shape);
    if (*exists && !w->shape(w->ctx, eh_proj, &ndim, shape))
        rc = qt_fail(err, QT_E_INPUT, w->dir, o,
                     "present, but 'num_hidden_layers' in config.json is %zu", cfg->info.layers);
done:
    qt_free(stem);
    qt_free(o);
    qt_free(eh_proj);
    return rc;
}

/* A checkpoint with more layers than config.json says is a different model. (The number of experts
 * is checked by the rows of the router.) */
static int check_no_more_layers(const struct config *cfg, const char *prefix,
                                const struct qt_weights *w, struct qt_err *err)
{
    bool exists = true;
    int rc = QT_OK;
    for (size_t i = cfg->info.layers; exists && rc == QT_OK; i++)
        rc = find_layer(&exists, cfg, prefix, i, w, err);
    return rc;
}

/* ---- model ---------------------------------------------------------------------------------- */

/* The prefix of the decoder's tensor names, and the name of the head. */
struct naming {
    const char *prefix, *head;
};

/* Tries the usual prefix, that of a bare decoder, and those of multimodal models. */
static struct naming find_naming(const struct arch *arch, const struct qt_weights *w)
{
    static const struct naming known[] = {
        {"model.", "lm_head"},
        {"", "lm_head"},
        {"language_model.model.", "language_model.lm_head"},
        {"model.language_model.", "lm_head"},
        {"language_model.", "lm_head"},
        {"model.text_model.", "lm_head"},
        {"thinker.model.", "thinker.lm_head"},
        {"transformer.", "lm_head"},
        {"gpt_neox.", "embed_out"},
        {"backbone.", "lm_head"},
        {"bert.", "cls.predictions.decoder"},
        {"roberta.", "lm_head.decoder"},
    };
    struct naming naming = known[0];
    for (size_t i = sizeof known / sizeof *known; i-- > 0;)
        if (part_exists(w, known[i].prefix, arch->embed))
            naming = known[i];
    naming.head = arch->head ? arch->head : naming.head;
    return naming;
}

static int outer_part_set(struct part *out, const char *prefix, const char *name, size_t n,
                          size_t k, bool biased, const struct qt_weights *w, struct qt_err *err)
{
    char *stem;
    int rc = qt_string_format(&stem, err, "%s%s", prefix, name);
    if (rc == QT_OK)
        rc = part_set(out, stem, n, k, biased, w, err);
    qt_free(stem);
    return rc;
}

/* The head of a masked-language model, if there is one: other checkpoints of encoders have none. */
static int set_masked_head(struct qt_model *m, const struct qt_weights *w, struct qt_err *err)
{
    const struct arch *arch = m->cfg.arch;
    const size_t hidden = m->cfg.info.hidden;
    int rc = QT_OK;
    m->cfg.info.predicts =
        part_exists(w, "", arch->transform) ? QT_PREDICTS_MASKED : QT_PREDICTS_NOTHING;
    if (m->cfg.info.predicts == QT_PREDICTS_NOTHING)
        return QT_OK;
    QT_TRY(outer_part_set(&m->transform, "", arch->transform, hidden, hidden, m->cfg.transform_bias,
                          w, err));
    QT_TRY(outer_part_set(&m->transform_norm, "", arch->transform_norm, hidden, 0,
                          !arch->norms_unbiased, w, err));
    m->head.n = m->cfg.info.vocab;
    QT_TRY(part_set_bias(&m->head, arch->head_biases, m->head.n, true, w, err));
done:
    return rc;
}

/* The n - 1 projections whose names begin with `name`. */
static int projections_set(struct part **out, const struct qt_model *m, const char *prefix,
                           const char *name, const struct qt_weights *w, struct qt_err *err)
{
    const size_t hidden = m->cfg.info.hidden;
    char *stem = NULL;
    int rc;
    QT_TRY(qt_array_new(out, m->cfg.altup, sizeof **out, err));
    for (size_t i = 0; i + 1 < m->cfg.altup; i++) {
        qt_free(stem);
        QT_TRY(qt_string_format(&stem, err, "%s.%zu", name, i));
        QT_TRY(outer_part_set(&(*out)[i], prefix, stem, hidden, hidden, false, w, err));
    }
done:
    qt_free(stem);
    return rc;
}

static int set_outer_parts(struct qt_model *m, const struct naming *naming,
                           const struct qt_weights *w, struct qt_err *err)
{
    const struct config *cfg = &m->cfg;
    const struct arch *arch = cfg->arch;
    const char *prefix = naming->prefix;
    size_t hidden = cfg->info.hidden, vocab = cfg->info.vocab, embed = cfg->embed_dim;
    int rc = QT_OK;
    QT_TRY(outer_part_set(&m->embed, prefix, arch->embed, vocab, embed, false, w, err));
    if (arch->embed_norm)
        QT_TRY(outer_part_set(&m->embed_norm, prefix, arch->embed_norm, hidden, 0,
                              arch->norm == QT_NORM_LAYER && !arch->norms_unbiased, w, err));
    if (cfg->types)
        QT_TRY(outer_part_set(&m->types, prefix, arch->types, cfg->types, hidden, false, w, err));
    if (arch->both_ways)
        QT_TRY(set_masked_head(m, w, err));
    if (arch->positions)
        QT_TRY(outer_part_set(&m->positions, prefix, arch->positions,
                              cfg->info.max_positions + arch->position_offset, hidden, false, w,
                              err));
    if (embed != hidden) {
        QT_TRY(
            outer_part_set(&m->project_in, prefix, arch->project_in, hidden, embed, false, w, err));
        QT_TRY(outer_part_set(&m->project_out, prefix, arch->project_out, embed, hidden, false, w,
                              err));
    }
    if (cfg->final_norm)
        QT_TRY(outer_part_set(&m->final_norm, prefix, arch->final_norm, hidden, 0,
                              arch->norm == QT_NORM_LAYER && !arch->norms_unbiased, w, err));
    if (cfg->per_layer) {
        const size_t all = cfg->info.layers * cfg->per_layer;
        QT_TRY(outer_part_set(&m->layer_embed, prefix, arch->layer_embed, cfg->per_layer_vocab, all,
                              false, w, err));
        QT_TRY(outer_part_set(&m->layer_project, prefix, arch->layer_project, all, hidden, false, w,
                              err));
        QT_TRY(outer_part_set(&m->layer_norm, prefix, arch->layer_norm, cfg->per_layer, 0, false, w,
                              err));
    }
    if (cfg->altup) {
        QT_TRY(projections_set(&m->altup_in, m, prefix, arch->altup_in, w, err));
        QT_TRY(projections_set(&m->altup_out, m, prefix, arch->altup_out, w, err));
    }
    m->final_norm.plus_1 = arch->norms_plus_1;
    if (!cfg->tied)
        QT_TRY(outer_part_set(&m->head, "", naming->head, vocab, embed, cfg->head_bias, w, err));
    m->head.unit = cfg->unit_head;
done:
    return rc;
}

int qt_model_open(struct qt_model **out, const struct qt_weights *w, struct qt_err *err)
{
    struct qt_model *m = NULL;
    int rc = QT_OK;
    *out = NULL;
    QT_TRY(qt_array_new(&m, 1, sizeof *m, err));
    QT_TRY(config_read(&m->cfg, w->dir, w->quantization, err));
    QT_TRY(qt_array_new(&m->layers, m->cfg.info.layers, sizeof *m->layers, err));
    const struct naming naming = find_naming(m->cfg.arch, w);
    m->prefix = naming.prefix;
    m->head_name = naming.head;
    if (m->cfg.tied_unclear)
        m->cfg.tied = !part_exists(w, "", naming.head);
    if (m->cfg.tied && part_exists(w, "", naming.head))
        QT_TRY(qt_string_format(&m->tied_head, err, "%s.weight", naming.head));
    QT_TRY(set_outer_parts(m, &naming, w, err));
    for (size_t i = 0; i < m->cfg.info.layers; i++)
        QT_TRY(layer_set(&m->layers[i], &m->cfg, naming.prefix, i, w, err));
    QT_TRY(check_no_more_layers(&m->cfg, naming.prefix, w, err));
    m->last = (struct qt_norm){m->final_norm.weight, m->final_norm.n};
    *out = m;
done:
    if (rc < 0)
        qt_model_close(m);
    return rc;
}

static void layer_free(struct layer_def *layer, size_t parts)
{
    for (size_t i = 0; layer->parts && i < parts; i++)
        part_free(&layer->parts[i]);
    qt_free(layer->parts);
    qt_free(layer->linears);
}

void qt_model_close(struct qt_model *model)
{
    if (!model)
        return;
    for (size_t i = 0; model->layers && i < model->cfg.info.layers; i++)
        layer_free(&model->layers[i], layer_parts(&model->cfg));
    part_free(&model->embed);
    part_free(&model->embed_norm);
    part_free(&model->positions);
    part_free(&model->project_in);
    part_free(&model->project_out);
    part_free(&model->final_norm);
    part_free(&model->head);
    part_free(&model->types);
    part_free(&model->transform);
    part_free(&model->transform_norm);
    part_free(&model->layer_embed);
    part_free(&model->layer_project);
    part_free(&model->layer_norm);
    for (size_t i = 0; i + 1 < model->cfg.altup; i++) {
        if (model->altup_in)
            part_free(&model->altup_in[i]);
        if (model->altup_out)
            part_free(&model->altup_out[i]);
    }
    qt_free(model->altup_in);
    qt_free(model->altup_out);
    qt_free(model->tied_head);
    qt_free(model->layers);
    config_free(&model->cfg);
    qt_free(model);
}

const struct qt_model_info *qt_model_info(const struct qt_model *model)
{
    return &model->cfg.info;
}

const char *qt_model_tied_head(const struct qt_model *model, const char **embedding)
{
    *embedding = model->embed.weight;
    return model->tied_head;
}

size_t qt_model_feed_row(const struct qt_model *model, int input, size_t c)
{
    const struct qt_model_info *info = &model->cfg.info;
    if (input != 1)
        return c;
    size_t head = c / info->head_dim, kv_head = head / (info->heads / info->kv_heads);
    return kv_head * info->head_dim + c % info->head_dim;
}

bool qt_model_input_is_norm(const struct qt_model *model, int input)
{
    const struct config *cfg = &model->cfg;
    return input % 2 == 0 && !cfg->norm_after && !(cfg->parallel && !cfg->parallel_norms) &&
           cfg->arch->parts[input < 2 ? ROLE_ATTN_IN : ROLE_MLP_IN];
}

int qt_model_mlp_input(const struct qt_model *model, size_t layer)
{
    return model->layers[layer].mixer_inputs;
}

bool qt_model_ends_sublayer(const struct qt_model *model, size_t layer, int input)
{
    const int mlp = qt_model_mlp_input(model, layer);
    return (input == mlp - 1 && !model->cfg.parallel) ||
           (input >= mlp && (input - mlp) % 2 && !model->layers[layer].experts);
}

bool qt_model_can_run_from(const struct qt_model *model, size_t layer, int input)
{
    const struct layer_def *def = &model->layers[layer];
    const bool of_mixer = input < def->mixer_inputs;
    const bool apart = def->mixer != MIXER_SSM_ATTENTION && !def->heads.kept;
    return qt_model_ends_sublayer(model, layer, input) && layer_expert(def, input) < 0 &&
           !model->cfg.parallel && !model->cfg.altup && (!of_mixer || apart);
}

float qt_model_output_scale(const struct qt_model *model, size_t layer, int input)
{
    const bool mlp = input >= qt_model_mlp_input(model, layer);
    const bool added = model->cfg.info.state == model->cfg.info.hidden &&
                       qt_model_ends_sublayer(model, layer, input) &&
                       qt_model_expert(model, layer, input) < 0 &&
                       !model->cfg.arch->parts[mlp ? ROLE_MLP_OUT : ROLE_ATTN_OUT];
    const enum mixer_kind mixer = model->layers[layer].mixer;
    const enum role last = mlp ? ROLE_DOWN : mixer == MIXER_SSM_ATTENTION ? ROLE_SSM_OUT : ROLE_O;
    const float factor = model->cfg.output_factors[last];
    return added ? model->cfg.residual_scale * (factor != 0 ? factor : 1) : 0;
}

const char *qt_model_cannot(const struct qt_model *model, enum qt_use use)
{
    const struct config *cfg = &model->cfg;
    bool ssm = false;
    for (size_t i = 0; i < cfg->info.layers; i++)
        ssm = ssm || cfg->mixers[i] == MIXER_SSM || cfg->mixers[i] == MIXER_SSM_ATTENTION;
    return cfg->per_layer && use != QT_USE_FUSED ? "inputs of single layers"
           : use == QT_USE_LEARN && cfg->clip_qkv > 0
               ? "clipped queries, keys and values"
               : arch_cannot(cfg->arch, cfg->info.experts > 0, ssm, use);
}

bool qt_model_scales_expert_inputs(const struct qt_model *model)
{
    return model->cfg.arch->scaled_inputs;
}

int qt_model_expert(const struct qt_model *model, size_t layer, int input)
{
    return layer_expert(&model->layers[layer], input);
}

int qt_model_experts_input(const struct qt_model *model, size_t layer)
{
    const struct layer_def *def = &model->layers[layer];
    return def->experts ? experts_input(&model->cfg, def) : -1;
}

size_t qt_model_inputs(const struct qt_model *model, size_t layer)
{
    const struct layer_def *def = &model->layers[layer];
    return (size_t)experts_input(&model->cfg, def);
}

size_t qt_model_linears(const struct qt_linear **out, const struct qt_model *model, size_t layer)
{
    *out = model->layers[layer].linears;
    return model->layers[layer].linear_count;
}

bool qt_model_is_linear(const struct qt_model *model, const char *name)
{
    const struct qt_linear *linear;
    for (size_t layer = 0; layer < model->cfg.info.layers; layer++)
        for (size_t i = 0, n = qt_model_linears(&linear, model, layer); i < n; i++)
            if (strcmp(linear[i].weight, name) == 0)
                return true;
    return false;
}

size_t qt_model_norms(const struct qt_norm **out, const struct qt_model *model, size_t layer)
{
    if (layer == model->cfg.info.layers) {
        *out = &model->last;
        return model->last.weight ? 1 : 0;
    }
    *out = model->layers[layer].norms;
    return model->layers[layer].norm_count;
}
