/* Mixtures of experts in config.json: number of experts, routing, and layers with a dense MLP. */
#include "model/config/config.h"

enum { LIMIT_EXPERTS = 1 << 12 };

/* Layers first..last have experts if (layer + 1) % step = 0. */
struct expert_layers {
    size_t first, last, step;
};

static int read_layers(struct expert_layers *out, const struct config *cfg,
                       const struct source *src, struct qt_err *err)
{
    const char *last = "moe_layer_end_index";
    int rc = QT_OK;
    *out = (struct expert_layers){cfg->arch->first_dense, SIZE_MAX, 1};
    if (cfg->arch->moe_layers) {
        QT_TRY(qt_json_get_size(&out->first, src->json, "moe_layer_start_index", src->path, err));
        QT_TRY(config_read_size(&out->step, src, "moe_layer_interval", CONFIG_LAYERS, err));
        if (json_integer_value(json_object_get(src->json, last)) != -1) /* the last */
            QT_TRY(qt_json_get_size(&out->last, src->json, last, src->path, err));
    } else {
        QT_TRY(config_read_size(&out->step, src, "decoder_sparse_step", CONFIG_LAYERS, err));
        if (cfg->arch->grouped_router)
            QT_TRY(
                qt_json_get_size(&out->first, src->json, "first_k_dense_replace", src->path, err));
    }
done:
    return rc;
}

/* Replaces cfg->dense by the list mlp_layer_types, if it is given. */
static int read_mlp_types(struct config *cfg, const struct source *src, struct qt_err *err)
{
    static const char key[] = "mlp_layer_types";
    const json_t *types = json_object_get(src->json, key);
    if (!config_given(src->json, key))
        return QT_OK;
    if (!json_is_array(types) || json_array_size(types) != cfg->info.layers)
        return qt_fail(err, QT_E_INPUT, src->path, NULL, "'%s' is not a list of %zu names", key,
                       cfg->info.layers);
    for (size_t i = 0; i < cfg->info.layers; i++) {
        const char *type = json_string_value(json_array_get(types, i));
        cfg->dense[i] = type && strcmp(type, "dense") == 0;
        if (!type || (!cfg->dense[i] && strcmp(type, "sparse") != 0))
            return config_unsupported(src, key, type ? type : "an entry that is not a string", err);
    }
    return QT_OK;
}

/* Replaces cfg->dense by those layers that are not in the list moe_layers. */
static int read_moe_layers(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const json_t *list = json_object_get(src->json, "moe_layers");
    if (!json_is_array(list))
        return qt_fail(err, QT_E_INPUT, src->path, NULL, "'moe_layers' is not a list");
    for (size_t i = 0; i < cfg->info.layers; i++)
        cfg->dense[i] = true;
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *entry = json_array_get(list, i);
        const json_int_t layer = json_integer_value(entry);
        if (!json_is_integer(entry) || layer < 0 || (size_t)layer >= cfg->info.layers)
            return qt_fail(err, QT_E_INPUT, src->path, NULL,
                           "'moe_layers' is not a list of layers");
        cfg->dense[layer] = false;
    }
    return QT_OK;
}

/* Reads cfg->dense and dense_width. */
static int read_dense(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const json_t *listed = json_object_get(src->json, "mlp_only_layers");
    struct expert_layers layers;
    size_t i;
    bool any = false, all = true;
    json_t *entry;
    int rc;
    QT_TRY(qt_array_new(&cfg->dense, cfg->info.layers, sizeof *cfg->dense, err));
    QT_TRY(read_layers(&layers, cfg, src, err));
    for (i = 0; i < cfg->info.layers; i++)
        cfg->dense[i] = cfg->arch->ssm == SSM_BLOCKS
                            ? config_block(src, i) == '-'
                            : i < layers.first || i > layers.last || (i + 1) % layers.step != 0;
    if (config_given(src->json, "mlp_only_layers") && !json_is_array(listed))
        return qt_fail(err, QT_E_INPUT, src->path, NULL, "'mlp_only_layers' is not a list");
    json_array_foreach (listed, i, entry) {
        if (!json_is_integer(entry) || json_integer_value(entry) < 0)
            return qt_fail(err, QT_E_INPUT, src->path, NULL,
                           "'mlp_only_layers' is not a list of layers");
        if ((size_t)json_integer_value(entry) < cfg->info.layers)
            cfg->dense[json_integer_value(entry)] = true;
    }
    if (cfg->arch->mlp_types)
        QT_TRY(read_mlp_types(cfg, src, err));
    if (cfg->arch->moe_listed && config_given(src->json, "moe_layers"))
        QT_TRY(read_moe_layers(cfg, src, err));
    for (i = 0; i < cfg->info.layers; i++) {
        any = any || cfg->dense[i];
        all = all && cfg->dense[i];
    }
    if (any && !cfg->arch->dense)
        QT_TRY(config_unsupported(src,
                                  "decoder_sparse_step, first_k_dense_replace or "
                                  "mlp_only_layers",
                                  "a layer without experts in this family", err));
    if (any)
        QT_TRY(config_read_size(&cfg->dense_width, src,
                                cfg->arch->dense_key ? cfg->arch->dense_key : "intermediate_size",
                                CONFIG_WIDTH, err));
    if (all)
        cfg->info.experts = cfg->routed = cfg->expert_width = cfg->shared_width = 0;
done:
    return rc;
}

static int read_groups(struct config *cfg, const struct source *src, struct qt_err *err)
{
    int rc;
    QT_TRY(config_read_size(&cfg->groups, src, "n_group", LIMIT_EXPERTS, err));
    QT_TRY(config_read_size(&cfg->top_groups, src, "topk_group", LIMIT_EXPERTS, err));
    QT_TRY(config_read_positive(&cfg->routing_scale, src, "routed_scaling_factor", err));
    if (cfg->routed % cfg->groups || cfg->top_groups > cfg->groups ||
        cfg->top_k > cfg->routed / cfg->groups * cfg->top_groups)
        rc = qt_fail(err, QT_E_INPUT, src->path, NULL,
                     "cannot choose %zu of %zu experts from %zu of %zu groups", cfg->top_k,
                     cfg->routed, cfg->top_groups, cfg->groups);
done:
    return rc;
}

/* Reads cfg->shared_width. */
static int read_shared(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const struct arch *arch = cfg->arch;
    size_t count = arch->shared_count;
    const json_t *width = arch->shared_key ? json_object_get(src->json, arch->shared_key) : NULL;
    const bool none = !width || (json_is_integer(width) && json_integer_value(width) == 0);
    int rc = QT_OK;
    if (arch->shared_key && !(arch->shared_optional && none))
        QT_TRY(config_read_size(&cfg->shared_width, src, arch->shared_key, CONFIG_WIDTH, err));
    if (arch->shared_count_key) {
        const json_t *given = json_object_get(src->json, arch->shared_count_key);
        if (arch->moe_layers && json_is_integer(given) && json_integer_value(given) == 0)
            count = 0; /* no shared expert */
        else
            QT_TRY(config_read_size(&count, src, arch->shared_count_key, LIMIT_EXPERTS, err));
        cfg->shared_width = count * cfg->expert_width;
        if (cfg->shared_width > CONFIG_WIDTH)
            rc = qt_fail(err, QT_E_INPUT, src->path, NULL, "'%s' %zu is too large",
                         arch->shared_count_key, count);
    }
done:
    return rc;
}

/* Refuses options of families with moe_layers that change the result and are not implemented. */
static int refuse_options(const struct source *src, struct qt_err *err)
{
    double least = 1;
    bool biased = false;
    int rc;
    if (config_given(src->json, "moe_norm_min")) { /* lower bound of the sum of routing weights */
        QT_TRY(config_read_positive(&least, src, "moe_norm_min", err));
        if (least > 1e-6)
            QT_TRY(config_unsupported(src, "moe_norm_min", "more than 1e-6", err));
    }
    QT_TRY(qt_json_get_bool(&biased, src->json, "use_bias", src->path, err));
    if (biased)
        rc = config_unsupported(src, "use_bias", "true", err);
done:
    return rc;
}

int config_read_experts(struct config *cfg, const struct source *src, struct qt_err *err)
{
    /* The number of experts is read from the first key that is present. */
    static const char *const keys[] = {"n_routed_experts", "num_local_experts", "moe_num_experts",
                                       "num_experts"};
    const struct arch *arch = cfg->arch;
    const char *key, *width = arch->intermediate_key;
    const char *chosen = "num_experts_per_tok";
    size_t at = 0;
    int rc = QT_OK;
    if (arch->moe_layers && !config_given(src->json, chosen))
        chosen = "moe_k";
    while (at + 1 < sizeof keys / sizeof *keys && !config_given(src->json, keys[at]))
        at++;
    key = keys[at];
    cfg->groups = arch->groups ? arch->groups : 1;
    cfg->top_groups = arch->top_groups ? arch->top_groups : 1;
    cfg->routing_scale = arch->routing_scale > 0 ? arch->routing_scale : 1;
    QT_TRY(config_read_size(&cfg->expert_width, src, width ? width : "intermediate_size",
                            CONFIG_WIDTH, err));
    QT_TRY(config_read_size(&cfg->routed, src, key, LIMIT_EXPERTS, err));
    QT_TRY(config_read_size(&cfg->top_k, src, chosen, LIMIT_EXPERTS, err));
    if (cfg->top_k > cfg->routed)
        return qt_fail(err, QT_E_INPUT, src->path, NULL, "'%s' %zu is more than '%s' %zu", chosen,
                       cfg->top_k, key, cfg->routed);
    QT_TRY(config_read_flag(&cfg->normalize_routing, src, &arch->normalize_routing, err));
    if (arch->grouped_router)
        QT_TRY(read_groups(cfg, src, err));
    if (arch->moe_layers)
        QT_TRY(refuse_options(src, err));
    QT_TRY(read_shared(cfg, src, err));
    cfg->info.experts = cfg->routed + (cfg->shared_width > 0);
    QT_TRY(read_dense(cfg, src, err));
done:
    return rc;
}
