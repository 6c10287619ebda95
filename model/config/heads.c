/* Attention heads that differ between decoder layers: in Gemma 4, layers without a window have
 * heads of another size, and may have no V; in MiMo V2, layers with a window have more KV heads. */
#include "model/config/config.h"

#include <stdio.h>

enum { LIMIT = 1 << 16 };

/* Layers without a window have the sizes of global_head_dim and num_global_key_value_heads, or each
 * layer those of an object in per_layer_config. */
static int read_layer(struct heads *out, const struct source *src, size_t layer, bool window,
                      bool values, struct qt_err *err)
{
    static const char key[] = "per_layer_config";
    const json_t *all = json_object_get(src->json, key);
    char number[32];
    int rc = QT_OK;
    if (!config_given(src->json, key)) {
        if (window)
            return QT_OK;
        out->dim = 512;
        QT_TRY(config_read_size(&out->dim, src, "global_head_dim", LIMIT, err));
        if (!values)
            QT_TRY(config_read_size(&out->kv, src, "num_global_key_value_heads", LIMIT, err));
        return QT_OK;
    }
    if (config_no_object(src->json, key))
        return qt_fail(err, QT_E_INPUT, src->path, NULL, "'%s' is not an object", key);
    snprintf(number, sizeof number, "%zu", layer);
    const struct source one = {json_object_get(all, number), src->root, src->path};
    if (one.json && !json_is_object(one.json))
        return qt_fail(err, QT_E_INPUT, src->path, NULL, "'%s' of '%s' is not an object", number,
                       key);
    QT_TRY(config_read_size(&out->dim, &one, "head_dim", LIMIT, err));
    QT_TRY(config_read_size(&out->kv, &one, "num_key_value_heads", LIMIT, err));
done:
    return rc;
}

/* The rotary embedding depends on the size of the heads, and there is one for all layers with a
 * window, another for all layers without. */
static int check_layer(const struct config *cfg, const struct source *src, size_t layer,
                       struct qt_err *err)
{
    const struct heads *heads = &cfg->heads[layer];
    if (cfg->info.heads % heads->kv)
        return qt_fail(err, QT_E_INPUT, src->path, NULL,
                       "'num_attention_heads' %zu is not a multiple of the %zu KV heads of layer "
                       "%zu",
                       cfg->info.heads, heads->kv, layer);
    for (size_t i = 0; i < layer; i++)
        if (!cfg->windows[i] == !cfg->windows[layer] && cfg->heads[i].dim != heads->dim)
            return config_unsupported(src, "per_layer_config",
                                      "'head_dim' that differs between layers of a type", err);
    return QT_OK;
}

/* The last `count` layers attend to the keys and values of the last layer of their type before
 * them.
 */
static int share_keys(struct config *cfg, const struct source *src, size_t count,
                      struct qt_err *err)
{
    static const char key[] = "num_kv_shared_layers";
    const size_t first = cfg->info.layers - count;
    for (size_t i = first; i < cfg->info.layers; i++) {
        struct heads *heads = &cfg->heads[i], *of = NULL;
        for (size_t j = 0; j < first; j++)
            if (!cfg->windows[j] == !cfg->windows[i])
                of = &cfg->heads[j];
        if (!of)
            return config_unsupported(src, key, "a layer type without keys of its own", err);
        if (of->kv != heads->kv || of->dim != heads->dim)
            return config_unsupported(src, key, "a layer with heads of its own", err);
        heads->shared = true;
        of->kept = 1; /* config_place_state sets the place */
    }
    return QT_OK;
}

void config_place_state(struct config *cfg)
{
    struct qt_model_info *info = &cfg->info;
    info->state = per_layer_at(cfg) + info->layers * cfg->per_layer;
    for (size_t i = 0; i < info->layers; i++)
        if (cfg->heads[i].kept && !cfg->heads[i].shared) {
            cfg->heads[i].kept = info->state;
            info->state += 2 * cfg->heads[i].kv * cfg->heads[i].dim;
            for (size_t j = i + 1; j < info->layers; j++)
                if (cfg->heads[j].shared && !cfg->windows[i] == !cfg->windows[j])
                    cfg->heads[j].kept = cfg->heads[i].kept;
        }
}

/* See arch.window_heads. */
static int read_window_heads(struct config *cfg, const struct source *src, struct qt_err *err)
{
    struct qt_model_info *info = &cfg->info;
    size_t value = cfg->arch->value_dim;
    int rc;
    QT_TRY(config_read_size(&value, src, "v_head_dim", LIMIT, err));
    if (value > info->head_dim)
        QT_TRY(config_unsupported(src, "v_head_dim", "a number above 'head_dim'", err));
    for (size_t i = 0; i < info->layers; i++) {
        cfg->heads[i].kv <<= cfg->windows[i] > 0;
        QT_TRY(check_layer(cfg, src, i, err));
        info->kv_heads = qt_max_size(info->kv_heads, cfg->heads[i].kv);
    }
    cfg->value_dim = value < info->head_dim ? value : 0;
done:
    return rc;
}

int config_read_layer_heads(struct config *cfg, const struct source *src, struct qt_err *err)
{
    struct qt_model_info *info = &cfg->info;
    const struct heads usual = {.kv = info->kv_heads, .dim = info->head_dim};
    size_t sharing = cfg->arch->shared_layers;
    bool shared = false;
    int rc;
    QT_TRY(qt_array_new(&cfg->heads, info->layers, sizeof *cfg->heads, err));
    if (cfg->arch->layer_heads)
        QT_TRY(qt_json_get_bool(&shared, src->json, "attention_k_eq_v", src->path, err));
    for (size_t i = 0; i < info->layers; i++) {
        cfg->heads[i] = usual;
        if (!cfg->arch->layer_heads)
            continue;
        cfg->heads[i].keys_are_values = shared && !cfg->windows[i];
        QT_TRY(read_layer(&cfg->heads[i], src, i, cfg->windows[i] > 0, !shared, err));
        QT_TRY(check_layer(cfg, src, i, err));
        info->head_dim = qt_max_size(info->head_dim, cfg->heads[i].dim);
        info->kv_heads = qt_max_size(info->kv_heads, cfg->heads[i].kv);
    }
    if (cfg->arch->window_heads)
        QT_TRY(read_window_heads(cfg, src, err));
    if (cfg->arch->shared_keys)
        QT_TRY(qt_json_get_size(&sharing, src->json, "num_kv_shared_layers", src->path, err));
    if (sharing >= info->layers && sharing)
        QT_TRY(config_unsupported(src, "num_kv_shared_layers", "all layers", err));
    QT_TRY(share_keys(cfg, src, sharing, err));
    cfg->o_width =
        qt_max_size(cfg->o_width, cfg->arch->layer_heads ? info->heads * info->head_dim : 0);
done:
    return rc;
}
