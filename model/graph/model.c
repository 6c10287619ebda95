/* Builds the decoder graph: names every tensor that config.json implies and checks that the tensor
 * exists with the implied shape. */
#include "model/graph/internal.h"

#include <stdio.h>

/* ---- parts ---------------------------------------------------------------------------------- */

static void shape_text(char *buf, size_t size, const size_t *shape, int ndim)
{
    size_t at = 0;
    buf[0] = '\0';
    for (int i = 0; i < ndim && at < size; i++)
        at += (size_t)snprintf(buf + at, size - at, "%s%zu", i ? ", " : "", shape[i]);
}

static int check_shape(const struct qt_weights *w, const char *name, const size_t *want, int ndim,
                       struct qt_err *err)
{
    size_t got[QT_MAX_DIMS];
    int got_ndim;
    char want_text[96], got_text[256];
    shape_text(want_text, sizeof want_text, want, ndim);
    if (!w->shape(w->ctx, name, &got_ndim, got))
        return qt_fail(err, QT_E_INPUT, w->dir, name, "missing; config.json implies shape [%s]",
                       want_text);
    if (got_ndim == ndim && memcmp(got, want, (size_t)ndim * sizeof *got) == 0)
        return QT_OK;
    shape_text(got_text, sizeof got_text, got, got_ndim);
    return qt_fail(err, QT_E_INPUT, w->dir, name, "shape is [%s], config.json implies [%s]",
                   got_text, want_text);
}

/* The tensor must exist with shape [n] (k = 0) or [n, k]. */
static int check_tensor(const struct qt_weights *w, const char *name, size_t n, size_t k,
                        struct qt_err *err)
{
    return check_shape(w, name, (const size_t[]){n, k}, k ? 2 : 1, err);
}

/* The bias of a part. */
static int bias_set(struct part *out, const char *stem, size_t n, bool biased,
                    const struct qt_weights *w, struct qt_err *err)
{
    char *bias = NULL;
    size_t shape[QT_MAX_DIMS];
    int ndim, rc;
    QT_TRY(qt_string_format(&bias, err, "%s.bias", stem));
    if (biased) {
        QT_TRY(check_tensor(w, bias, n, 0, err));
        out->bias = bias;
        bias = NULL;
    } else if (w->shape(w->ctx, bias, &ndim, shape)) {
        rc =
            qt_fail(err, QT_E_INPUT, w->dir, bias, "present, but config.json implies no bias here");
    }
done:
    qt_free(bias);
    return rc;
}

/* The weights of a convolution of n channels over k tokens, which are stored as [n][1][k]. */
static int convolution_set(struct part *out, const char *stem, size_t n, size_t k, bool biased,
                           const struct qt_weights *w, struct qt_err *err)
{
    int rc;
    out->n = n;
    out->k = k;
    QT_TRY(qt_string_format(&out->weight, err, "%s.weight", stem));
    QT_TRY(check_shape(w, out->weight, (const size_t[]){n, 1, k}, 3, err));
    QT_TRY(bias_set(out, stem, n, biased, w, err));
done:
    return rc;
}

/* A vector called `name` (without ".weight"). row: it is stored as a matrix [1][n]. */
static int vector_set(struct part *out, const char *name, size_t n, bool row,
                      const struct qt_weights *w, struct qt_err *err)
{
    int rc;
    out->n = n;
    QT_TRY(qt_string_format(&out->weight, err, "%s", name));
    QT_TRY(check_tensor(w, out->weight, row ? 1 : n, row ? n : 0, err));
done:
    return rc;
}

static bool has_part(const struct qt_weights *w, const char *prefix, const char *stem)
{
    char name[128];
    size_t shape[QT_MAX_DIMS];
    int ndim;
    snprintf(name, sizeof name, "%s%s.weight", prefix, stem);
    return w->shape(w->ctx, name, &ndim, shape);
}

/* A norm that has the names of the first checkpoints of BERT; leaves *out empty if it has not. */
static int gamma_set(struct part *out, const char *stem, size_t n, const struct qt_weights *w,
                     struct qt_err *err)
{
    size_t shape[QT_MAX_DIMS];
    char *gamma = NULL;
    int ndim, rc;
    QT_TRY(qt_string_format(&gamma, err, "%s.gamma", stem));
    if (!w->shape(w->ctx, gamma, &ndim, shape))
        goto done;
    out->weight = gamma;
    gamma = NULL;
    QT_TRY(check_tensor(w, out->weight, n, 0, err));
    QT_TRY(qt_string_format(&out->bias, err, "%s.beta", stem));
    QT_TRY(check_tensor(w, out->bias, n, 0, err));
done:
    qt_free(gamma);
    return rc;
}

/* stem: the name without ".weight". */
static int part_set(struct part *out, const char *stem, size_t n, size_t k, bool biased,
                    const struct qt_weights *w, struct qt_err *err)
{
    int rc;
    char *base = NULL;
    out->n = n;
    out->k = k;
    if (k && !has_part(w, "", stem)) { /* PEFT's name of a linear that has adapters */
        QT_TRY(qt_string_format(&base, err, "%s.base_layer", stem));
        stem = has_part(w, "", base) ? base : stem;
    }
    if (!k && biased && !has_part(w, "", stem)) {
        QT_TRY(gamma_set(out, stem, n, w, err));
        if (out->weight)
            return QT_OK;
    }
    QT_TRY(qt_string_format(&out->weight, err, "%s.weight", stem));
    QT_TRY(check_tensor(w, out->weight, n, k, err));
    QT_TRY(bias_set(out, stem, n, biased, w, err));
done:
    qt_free(base);
    return rc;
}

static void part_free(struct part *p)
{
    qt_free(p->weight);
    qt_free(p->bias);
}

/* ---- layers --------------------------------------------------------------------------------- */

static size_t mlp_width(const struct config *cfg, const struct layer_def *layer, size_t expert)
{
    return !layer->experts        ? dense_width(cfg, &layer->heads)
           : expert < cfg->routed ? cfg->expert_width
                                  : cfg->shared_width;
}

/* A matrix that reads this input of the layer (-1: none that is observed). */
static struct qt_linear linear(size_t n, size_t k, int input)
{
    return (struct qt_linear){.n = n, .k = k, .input = input, .feeds = -1};
}

static struct qt_linear vector(size_t n)
{
    return linear(n, 0, -1);
}

/* Shape and inputs of a part; input is -1 for norms, the router and its bias. */
static struct qt_linear role_shape(const struct config *cfg, const struct layer_def *layer,
                                   enum role role, size_t expert)
{
    const struct qt_model_info *info = &cfg->info;
    const bool gated = cfg->arch->parts[ROLE_GATE] != NULL, all = cfg->arch->norms_of_all_heads;
    const int in = expert_input(layer, expert, false), down = expert_input(layer, expert, true);
    const size_t q_rank = cfg->latent.q_rank, kv_rank = cfg->latent.kv_rank;
    const size_t qk = cfg->latent.nope + cfg->latent.rope;
    const size_t dim = layer->heads.dim, value_dim = cfg->value_dim ? cfg->value_dim : dim;
    size_t h = info->hidden, q = info->heads * dim, kv = layer->heads.kv * dim;
    const bool mixed = layer->mixer == MIXER_HEAD_EXPERTS;
    const size_t keys = 2 * cfg->delta.key_heads * cfg->delta.key_dim; /* queries, too */
    const size_t values = cfg->delta.value_heads * cfg->delta.value_dim;
    size_t inner = mlp_width(cfg, layer, expert);
    switch (role) {
    case ROLE_QKV:
        return (struct qt_linear){.n = mixed ? 2 * kv : q + 2 * kv,
                                  .k = h,
                                  .input = 0,
                                  .feeds = cfg->arch->grouped_qkv || mixed ? -1 : 1,
                                  .feeds_from = q + kv,
                                  .feeds_rows = kv,
                                  .feeds_scale = true};
    case ROLE_Q:
        return linear(cfg->arch->latent ? info->heads * qk : cfg->arch->gated ? 2 * q : q, h, 0);
    case ROLE_ATTN_GATE:
        return linear(q, h, 0);
    case ROLE_K:
        return linear(kv, h, 0);
    case ROLE_V:
        return (struct qt_linear){.n = layer->heads.kv * value_dim,
                                  .k = h,
                                  .input = 0,
                                  .feeds = cfg->value_dim ? -1 : 1,
                                  .feeds_rows = kv,
                                  .feeds_scale = true};
    case ROLE_Q_A:
        return linear(q_rank, h, 0);
    case ROLE_KV_A:
        return linear(kv_rank + cfg->latent.rope, h, 0);
    case ROLE_Q_A_NORM:
        return vector(q_rank);
    case ROLE_Q_B:
        return linear(info->heads * qk, q_rank, 1);
    case ROLE_KV_A_NORM:
        return vector(kv_rank);
    case ROLE_KV_B:
        return linear(info->heads * (cfg->latent.nope + cfg->latent.v), kv_rank,
                      layer->mixer_inputs - 2);
    case ROLE_SINKS:
        return vector(info->heads);
    case ROLE_DELTA_QKVZ:
        return linear(keys + 2 * values, h, 0);
    case ROLE_DELTA_QKV:
        return linear(keys + values, h, 0);
    case ROLE_DELTA_Z:
        return linear(values, h, 0);
    case ROLE_DELTA_BA:
        return linear(2 * cfg->delta.value_heads, h, -1);
    case ROLE_DELTA_B:
    case ROLE_DELTA_A:
        return linear(cfg->delta.value_heads, h, -1);
    case ROLE_CONV:
        return linear(cfg->arch->ssm ? ssm_mixed(cfg) : keys + values,
                      cfg->arch->ssm ? cfg->ssm.kernel : cfg->delta.kernel, -1);
    case ROLE_A_LOG:
    case ROLE_DT_BIAS:
        return vector(cfg->arch->ssm ? cfg->ssm.heads : cfg->delta.value_heads);
    case ROLE_DELTA_NORM:
        return vector(cfg->delta.value_dim);
    case ROLE_DELTA_OUT:
        return linear(h, values, 1);
    case ROLE_SHORT_IN:
        return linear(3 * h, h, 0);
    case ROLE_SHORT_CONV:
        return linear(h, cfg->short_kernel, -1);
    case ROLE_SHORT_OUT:
        return linear(h, h, 1);
    case ROLE_SSM_IN:
        return linear(ssm_values(cfg) + ssm_mixed(cfg) + cfg->ssm.heads, h, 0);
    case ROLE_SSM_D:
        return vector(cfg->ssm.heads);
    case ROLE_SSM_NORM:
        return vector(ssm_values(cfg));
    case ROLE_O:
        return linear(h, layer->mixer == MIXER_LATENT ? cfg->o_width : info->heads * value_dim,
                      layer->mixer == MIXER_LATENT ? layer->mixer_inputs - 1 : 1);
    case ROLE_SSM_OUT:
        return linear(h, ssm_values(cfg), layer->mixer_inputs - 1);
    case ROLE_GATE_UP:
        return (struct qt_linear){.n = 2 * inner,
                                  .k = h,
                                  .input = in,
                                  .feeds = down,
                                  .feeds_rows = inner,
                                  .feeds_scale = true};
    case ROLE_GATE:
    case ROLE_UP:
        return (struct qt_linear){.n = inner,
                                  .k = h,
                                  .input = in,
                                  .feeds = down,
                                  .feeds_rows = inner,
                                  .feeds_scale = role == ROLE_UP && gated};
    case ROLE_DOWN:
        return linear(h, inner, down);
    case ROLE_EXPERT_Q:
        return linear(kv, h, 1 + 2 * (int)expert);
    case ROLE_EXPERT_O:
        return linear(h, kv, 2 + 2 * (int)expert);
    case ROLE_HEADS_ROUTER:
    case ROLE_ROUTER:
        return linear(cfg->routed, h, -1);
    case ROLE_SELECT_BIAS:
        return vector(cfg->routed);
    case ROLE_EXPERT_SCALE:
        return vector(cfg->routed);
    case ROLE_PER_LAYER_GATE:
        return linear(cfg->per_layer, h, layer_mlp_end(layer));
    case ROLE_PER_LAYER_OUT:
        return linear(h, cfg->per_layer, layer_mlp_end(layer) + 1);
    case ROLE_LAYER_SCALE:
        return vector(1);
    case ROLE_ALTUP_ROUTER:
        return linear(cfg->altup, h, -1);
    case ROLE_ALTUP_PREDICT:
        return linear(cfg->altup * cfg->altup, cfg->altup, -1);
    case ROLE_ALTUP_CORRECT:
        return linear(cfg->altup, cfg->altup, -1);
    case ROLE_LAUREL_LEFT:
        return linear(cfg->laurel, h, -1);
    case ROLE_LAUREL_RIGHT:
        return linear(h, cfg->laurel, -1);
    case ROLE_SHARED_GATE:
        return linear(1, h, -1);
    case ROLE_Q_NORM:
        return vector(all ? q : dim);
    case ROLE_K_NORM:
        return vector(all ? kv : dim);
    default:
        return vector(h);
    }
}

static bool role_biased(const struct config *cfg, enum role role)
{
    switch (role) {
    case ROLE_Q:
        return cfg->qkv_bias && !cfg->arch->latent;
    case ROLE_QKV:
    case ROLE_K:
    case ROLE_V:
    case ROLE_Q_A:
    case ROLE_KV_A:
        return cfg->qkv_bias;
    case ROLE_O:
        return cfg->o_bias;
    case ROLE_GATE_UP:
    case ROLE_GATE:
    case ROLE_UP:
    case ROLE_DOWN:
        return cfg->mlp_bias;
    case ROLE_ROUTER:
        return cfg->arch->router_bias;
    case ROLE_CONV:
        return cfg->arch->ssm && cfg->ssm.conv_bias;
    case ROLE_SSM_IN:
        return cfg->ssm.in_bias;
    case ROLE_SSM_OUT:
        return cfg->ssm.out_bias;
    case ROLE_ATTN_GATE:
    case ROLE_SELECT_BIAS:
    case ROLE_SHARED_GATE:
    case ROLE_Q_NORM:
    case ROLE_K_NORM:
    case ROLE_Q_A_NORM:
    case ROLE_Q_B:
    case ROLE_KV_A_NORM:
    case ROLE_KV_B:
        return false;
    default:
        return cfg->arch->norm == QT_NORM_LAYER && !cfg->arch->norms_unbiased;
    }
}

/* The fused part that contains the role in families that have it; else the role itself. */
static enum role role_whole(enum role role)
{
    return role >= ROLE_Q && role <= ROLE_V       ? ROLE_QKV
           : role == ROLE_GATE || role == ROLE_UP ? ROLE_GATE_UP
                                                  : role;
}

/* The family's name of a role; NULL: it has none. */
static const char *role_name(const struct config *cfg, const struct layer_def *layer,
                             enum role role, size_t expert)
{
    const struct arch *arch = cfg->arch;
    const bool shared =
        role >= ROLE_GATE_UP && (layer->experts ? expert >= cfg->routed : arch->dense_is_shared);
    if (cfg->parallel && cfg->parallel_norms && arch->parallel_attn_in &&
        (role == ROLE_ATTN_IN || role == ROLE_MLP_IN))
        return role == ROLE_ATTN_IN ? arch->parallel_attn_in : arch->parallel_mlp_in;
    if (role >= ROLE_GATE_UP && layer->experts && !shared &&
        arch->routed_parts[role - ROLE_GATE_UP])
        return arch->routed_parts[role - ROLE_GATE_UP];
    if (!shared || !arch->shared_gate_up)
        return arch->parts[role];
    return role == ROLE_GATE_UP ? arch->shared_gate_up
           : role == ROLE_DOWN  ? arch->shared_down
                                : NULL;
}

/* Tensor name without ".weight". prefix: that of all tensors of the decoder. */
static int part_stem(char **out, const struct config *cfg, const struct layer_def *layer,
                     const char *prefix, size_t index, enum role role, size_t expert,
                     struct qt_err *err)
{
    const struct arch *arch = cfg->arch;
    const char *name = role_name(cfg, layer, role, expert), *mlp = "";
    if (role == ROLE_EXPERT_Q || role == ROLE_EXPERT_O)
        return qt_string_format(out, err, "%s%s%zu.%s%zu.%s", prefix, arch->layers, index,
                                arch->head_experts, expert, name);
    if (layer->experts && role >= ROLE_GATE_UP && expert < cfg->routed)
        return qt_string_format(out, err, "%s%s%zu.%s%zu.%s", prefix, arch->layers, index,
                                arch->experts, expert, name);
    if (arch->experts && role >= ROLE_GATE_UP)
        mlp = layer->experts ? arch->shared : arch->dense;
    return qt_string_format(out, err, "%s%s%zu.%s%s", prefix, arch->layers, index, mlp, name);
}

/* True if the role does not belong to a mixer, or to this one. */
static bool mixer_has(const struct config *cfg, enum mixer_kind mixer, enum role role)
{
    const bool ssm = mixer == MIXER_SSM || mixer == MIXER_SSM_ATTENTION;
    const bool attention = mixer == MIXER_ATTENTION || mixer == MIXER_SSM_ATTENTION;
    switch (role) {
    case ROLE_ATTN_IN:
    case ROLE_ATTN_OUT:
        return mixer != MIXER_NONE;
    case ROLE_QKV:
    case ROLE_K:
    case ROLE_V:
        return attention || mixer == MIXER_HEAD_EXPERTS;
    case ROLE_Q_NORM:
    case ROLE_K_NORM:
    case ROLE_ATTN_GATE:
        return attention;
    case ROLE_Q:
        return attention || (mixer == MIXER_LATENT && !cfg->latent.q_rank);
    case ROLE_Q_A:
    case ROLE_Q_A_NORM:
    case ROLE_Q_B:
        return mixer == MIXER_LATENT && cfg->latent.q_rank;
    case ROLE_KV_A:
    case ROLE_KV_A_NORM:
    case ROLE_KV_B:
        return mixer == MIXER_LATENT;
    case ROLE_O:
    case ROLE_SINKS:
        return attention || mixer == MIXER_LATENT;
    case ROLE_CONV:
    case ROLE_A_LOG:
    case ROLE_DT_BIAS:
        return ssm || mixer == MIXER_DELTA;
    case ROLE_SSM_NORM:
        return ssm && cfg->ssm.norm;
    case ROLE_SSM_IN:
    case ROLE_SSM_D:
    case ROLE_SSM_OUT:
        return ssm;
    case ROLE_SHORT_IN:
    case ROLE_SHORT_CONV:
    case ROLE_SHORT_OUT:
        return mixer == MIXER_SHORT;
    default:
        return role < ROLE_DELTA_QKVZ || role > ROLE_DELTA_OUT || mixer == MIXER_DELTA;
    }
}

/* True for vectors that are stored without ".weight". */
static bool role_bare(enum role role)
{
    return role == ROLE_SELECT_BIAS || role == ROLE_SINKS || role == ROLE_A_LOG ||
           role == ROLE_DT_BIAS || role == ROLE_SSM_D || role == ROLE_ROUTER_NORM ||
           role == ROLE_EXPERT_SCALE || role == ROLE_LAYER_SCALE || role == ROLE_ALTUP_SCALE ||
           role == ROLE_HEADS_BIAS || role == ROLE_EXPERTS_BIAS;
}

static bool layer_has(const struct config *cfg, const struct layer_def *layer, enum role role,
                      size_t expert)
{
    return role_name(cfg, layer, role, expert) && mixer_has(cfg, layer->mixer, role) &&
           (layer->mlp || role < ROLE_MLP_IN) &&
           (role != ROLE_MLP_IN || !cfg->parallel || cfg->parallel_norms) &&
           (layer->experts || role < ROLE_ROUTER || role > ROLE_SHARED_OUT) &&
           (role != ROLE_V || !layer->heads.keys_are_values) &&
           (role != ROLE_ATTN_IN || !cfg->arch->first_bare || layer->index > 0) &&
           (!layer->heads.shared || (role != ROLE_K && role != ROLE_V && role != ROLE_K_NORM)) &&
           (cfg->per_layer || role < ROLE_PER_LAYER_GATE || role > ROLE_PER_LAYER_NORM) &&
           (role != ROLE_SINKS || !cfg->arch->window_heads || cfg->windows[layer->index]) &&
           (cfg->altup_scaled || role != ROLE_ALTUP_SCALE) &&
           (cfg->head_norms || (role != ROLE_Q_NORM && role != ROLE_K_NORM));
}

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
                 ? vector_set(part, stem, linear.n,
                              role == ROLE_SELECT_BIAS && cfg->arch->select_bias_row, w, err)
             : role == ROLE_CONV || role == ROLE_SHORT_CONV
                 ? convolution_set(part, stem, linear.n, linear.k, role_biased(cfg, role), w, err)
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
        if (has_part(w, known[i].prefix, arch->embed))
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
        has_part(w, "", arch->transform) ? QT_PREDICTS_MASKED : QT_PREDICTS_NOTHING;
    if (m->cfg.info.predicts == QT_PREDICTS_NOTHING)
        return QT_OK;
    QT_TRY(outer_part_set(&m->transform, "", arch->transform, hidden, hidden, m->cfg.transform_bias,
                          w, err));
    QT_TRY(outer_part_set(&m->transform_norm, "", arch->transform_norm, hidden, 0,
                          !arch->norms_unbiased, w, err));
    m->head.n = m->cfg.info.vocab;
    QT_TRY(bias_set(&m->head, arch->head_biases, m->head.n, true, w, err));
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
    if (m->cfg.tied_unclear)
        m->cfg.tied = !has_part(w, "", naming.head);
    if (m->cfg.tied && has_part(w, "", naming.head))
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
    return cfg->per_layer ? "inputs of single layers"
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
