/* Which parts a decoder layer has by config.json, their names, shapes and inputs. */
#include "model/graph/roles.h"

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

struct qt_linear role_shape(const struct config *cfg, const struct layer_def *layer, enum role role,
                            size_t expert)
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

bool role_biased(const struct config *cfg, enum role role)
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

enum role role_whole(enum role role)
{
    return role >= ROLE_Q && role <= ROLE_V       ? ROLE_QKV
           : role == ROLE_GATE || role == ROLE_UP ? ROLE_GATE_UP
                                                  : role;
}

const char *role_name(const struct config *cfg, const struct layer_def *layer, enum role role,
                      size_t expert)
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

int part_stem(char **out, const struct config *cfg, const struct layer_def *layer,
              const char *prefix, size_t index, enum role role, size_t expert, struct qt_err *err)
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

bool mixer_has(const struct config *cfg, enum mixer_kind mixer, enum role role)
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

bool role_bare(enum role role)
{
    return role == ROLE_SELECT_BIAS || role == ROLE_SINKS || role == ROLE_A_LOG ||
           role == ROLE_DT_BIAS || role == ROLE_SSM_D || role == ROLE_ROUTER_NORM ||
           role == ROLE_EXPERT_SCALE || role == ROLE_LAYER_SCALE || role == ROLE_ALTUP_SCALE ||
           role == ROLE_HEADS_BIAS || role == ROLE_EXPERTS_BIAS;
}

bool layer_has(const struct config *cfg, const struct layer_def *layer, enum role role,
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
