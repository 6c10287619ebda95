/* State space models (Mamba-2) in config.json: sizes, step limits, and which layers have them. */
#include "model/config/config.h"

enum {
    LIMIT_HEADS = 1 << 16,
    LIMIT_DIM = 1 << 12, /* of a head, and of its state */
};

/* The number of channels of all heads is heads * dim; dim may be "auto", or missing. */
static int read_dim(struct config *cfg, const struct source *src, struct qt_err *err)
{
    static const char key[] = "mamba_d_head", all_key[] = "mamba_d_ssm";
    const bool sized = cfg->arch->ssm == SSM_BESIDE && !config_null(src->json, all_key);
    const char *text = json_string_value(json_object_get(src->json, key));
    size_t expand = 2, all = 1024;
    int rc;
    cfg->ssm.dim = cfg->arch->ssm_dim;
    if (cfg->ssm.dim || (config_given(src->json, key) && !(text && strcmp(text, "auto") == 0)))
        return config_read_size(&cfg->ssm.dim, src, key, LIMIT_DIM, err);
    QT_TRY(config_read_size(&expand, src, "mamba_expand", LIMIT_DIM, err));
    if (sized)
        QT_TRY(config_read_size(&all, src, all_key, CONFIG_WIDTH, err));
    else
        all = expand * cfg->info.hidden;
    cfg->ssm.dim = all / cfg->ssm.heads;
    if (all % cfg->ssm.heads || cfg->ssm.dim > LIMIT_DIM)
        return qt_fail(err, QT_E_INPUT, src->path, NULL,
                       "'mamba_n_heads' %zu does not divide the %zu channels of the state space "
                       "models",
                       cfg->ssm.heads, all);
done:
    return rc;
}

static int read_sizes(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const struct arch *arch = cfg->arch;
    const struct arch_flag conv_bias = {"mamba_conv_bias", true};
    int rc;
    cfg->ssm.heads = 128;
    cfg->ssm.groups = arch->ssm_groups ? arch->ssm_groups : 1;
    cfg->ssm.state = arch->ssm_state ? arch->ssm_state : 256;
    cfg->ssm.kernel = 4;
    QT_TRY(config_read_size(&cfg->ssm.heads, src, "mamba_n_heads", LIMIT_HEADS, err));
    QT_TRY(config_read_size(&cfg->ssm.groups, src, "mamba_n_groups", LIMIT_HEADS, err));
    QT_TRY(config_read_size(&cfg->ssm.state, src, "mamba_d_state", LIMIT_DIM, err));
    QT_TRY(config_read_size(&cfg->ssm.kernel, src, "mamba_d_conv", LIMIT_DIM, err));
    QT_TRY(read_dim(cfg, src, err));
    if (cfg->ssm.heads % cfg->ssm.groups)
        return qt_fail(err, QT_E_INPUT, src->path, NULL,
                       "'mamba_n_heads' %zu is not a multiple of 'mamba_n_groups' %zu",
                       cfg->ssm.heads, cfg->ssm.groups);
    QT_TRY(config_read_flag(&cfg->ssm.conv_bias, src, &conv_bias, err));
    QT_TRY(config_read_flag(&cfg->ssm.in_bias, src, &arch->ssm_bias, err));
    cfg->ssm.out_bias = cfg->ssm.in_bias;
    cfg->ssm.norm = true;
    for (size_t i = 0; i < sizeof cfg->ssm.factors / sizeof *cfg->ssm.factors; i++)
        cfg->ssm.factors[i] = 1;
done:
    return rc;
}

/* True for Infinity, also as transformers 5 writes it. */
static bool is_infinity(const json_t *v)
{
    const char *literal = qt_json_literal(v);
    if (!literal)
        literal = json_string_value(json_object_get(v, "__float__"));
    return literal && strcmp(literal, "Infinity") == 0;
}

/* time_step_limit, a list of two numbers; Nemotron-H has time_step_min instead. */
static int read_limits(struct config *cfg, const struct source *src, struct qt_err *err)
{
    static const char key[] = "time_step_limit";
    const json_t *list = json_object_get(src->json, key);
    const json_t *low = json_array_get(list, 0), *high = json_array_get(list, 1);
    double least = 0.001;
    int rc = QT_OK;
    cfg->ssm.step_max = INFINITY;
    if (cfg->arch->ssm_step_min) {
        QT_TRY(config_read_positive(&least, src, "time_step_min", err));
        cfg->ssm.step_min = (float)least;
        goto done;
    }
    if (!list)
        goto done;
    if (json_array_size(list) != 2 || !json_is_number(low) ||
        !(json_is_number(high) || is_infinity(high)))
        return qt_fail(err, QT_E_INPUT, src->path, NULL, "'%s' is not a list of two numbers", key);
    cfg->ssm.step_min = (float)json_number_value(low);
    if (json_is_number(high))
        cfg->ssm.step_max = (float)json_number_value(high);
    if (!(cfg->ssm.step_min >= 0 && cfg->ssm.step_min <= cfg->ssm.step_max))
        return qt_fail(err, QT_E_INPUT, src->path, NULL, "'%s' is no range of positive numbers",
                       key);
done:
    return rc;
}

/* Layers whose layer_types are not "mamba" or "linear_attention" have attention. Other types are
 * refused where windows are read. */
static void read_types(struct config *cfg, const struct source *src)
{
    const json_t *types = json_object_get(src->json, "layer_types");
    for (size_t i = 0; config_given(src->json, "layer_types") && i < cfg->info.layers; i++) {
        const char *type = json_string_value(json_array_get(types, i));
        if (!type || (strcmp(type, "mamba") != 0 && strcmp(type, "linear_attention") != 0))
            cfg->mixers[i] = MIXER_ATTENTION;
    }
}

/* ---- layers of one block -------------------------------------------------------------------- */

static const char pattern_key[] = "hybrid_override_pattern";

char config_block(const struct source *src, size_t i)
{
    static const struct {
        const char *type;
        char block;
    } blocks[] = {{"mamba", 'M'},     {"linear_attention", 'M'},
                  {"attention", '*'}, {"full_attention", '*'},
                  {"mlp", '-'},       {"moe", 'E'}};
    const json_t *types = json_object_get(src->json, "layer_types");
    const char *type = json_string_value(json_array_get(types, i));
    if (!config_given(src->json, "layer_types")) {
        const char *pattern = json_string_value(json_object_get(src->json, pattern_key));
        if (!pattern)
            return 'M';
        return i < strlen(pattern) && strchr("M*-E", pattern[i]) ? pattern[i] : 0;
    }
    for (size_t b = 0; type && b < sizeof blocks / sizeof *blocks; b++)
        if (strcmp(blocks[b].type, type) == 0)
            return blocks[b].block;
    return 0;
}

int config_count_blocks(size_t *layers, const struct source *src, struct qt_err *err)
{
    const bool listed = config_given(src->json, "layer_types");
    const char *key = listed ? "layer_types" : pattern_key;
    const json_t *list = json_object_get(src->json, key);
    const char *pattern = json_string_value(list);
    if (listed ? !json_is_array(list) : !pattern)
        return qt_fail(err, QT_E_INPUT, src->path, NULL, "'%s' is %s", key,
                       list ? "not a list of layers" : "missing");
    *layers = listed ? json_array_size(list) : strlen(pattern);
    if (*layers == 0 || *layers > CONFIG_LAYERS)
        return qt_fail(err, QT_E_INPUT, src->path, NULL, "'%s' has %zu layers, not 1 .. %d", key,
                       *layers, CONFIG_LAYERS);
    for (size_t i = 0; i < *layers; i++)
        if (!config_block(src, i))
            return config_unsupported(src, key, "another kind of layer", err);
    return QT_OK;
}

int config_read_ssm(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const enum ssm_rule rule = cfg->arch->ssm;
    int rc;
    QT_TRY(read_sizes(cfg, src, err));
    QT_TRY(read_limits(cfg, src, err));
    for (size_t i = 0; i < cfg->info.layers; i++)
        cfg->mixers[i] = rule == SSM_BESIDE ? MIXER_SSM_ATTENTION : MIXER_SSM;
    if (rule == SSM_UNLISTED)
        QT_TRY(config_read_attention(cfg, src, "attn_layer_indices", err));
    if (rule == SSM_TYPES)
        read_types(cfg, src);
    for (size_t i = 0; rule == SSM_BLOCKS && i < cfg->info.layers; i++) {
        const char block = config_block(src, i);
        if (block != 'M' && !cfg->arch->experts) /* Mamba-2 alone */
            QT_TRY(config_unsupported(src, "layer_types", "a layer without a state space", err));
        cfg->mixers[i] = block == 'M' ? MIXER_SSM : block == '*' ? MIXER_ATTENTION : MIXER_NONE;
    }
done:
    return rc;
}
