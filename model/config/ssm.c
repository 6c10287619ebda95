/* State space models (Mamba-2) in config.json: sizes, step limits, and the layers that have them. */
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

/* Layers that are in attn_layer_indices have attention. */
static int read_unlisted(struct config *cfg, const struct source *src, struct qt_err *err)
{
    static const char key[] = "attn_layer_indices";
    const json_t *list = json_object_get(src->json, key);
    if (!config_given(src->json, key))
        return QT_OK;
    if (!json_is_array(list))
        return qt_fail(err, QT_E_INPUT, src->path, NULL, "'%s' is not a list", key);
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *entry = json_array_get(list, i);
        if (!json_is_integer(entry) || json_integer_value(entry) < 0)
            return qt_fail(err, QT_E_INPUT, src->path, NULL, "'%s' is not a list of layers", key);
        if ((size_t)json_integer_value(entry) < cfg->info.layers)
            cfg->mixers[json_integer_value(entry)] = MIXER_ATTENTION;
    }
    return QT_OK;
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

int config_read_ssm(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const enum ssm_rule rule = cfg->arch->ssm;
    int rc;
    QT_TRY(read_sizes(cfg, src, err));
    QT_TRY(read_limits(cfg, src, err));
    for (size_t i = 0; i < cfg->info.layers; i++)
        cfg->mixers[i] = rule == SSM_BESIDE ? MIXER_SSM_ATTENTION : MIXER_SSM;
    if (rule == SSM_UNLISTED)
        QT_TRY(read_unlisted(cfg, src, err));
    if (rule == SSM_TYPES)
        read_types(cfg, src);
done:
    return rc;
}
