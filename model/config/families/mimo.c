/* MiMo-V2. */
#include "model/config/families/families.h"

static const struct arch_alias mimo_keys[] = {{"rms_norm_eps", "layernorm_epsilon"}, {0}};

/* Keys of the authors' config.json, whose values transformers has built in. */
static int check_mimo(const struct config *cfg, const struct source *src, struct qt_err *err)
{
    const struct {
        const char *key;
        size_t only;
    } sizes[] = {{"swa_num_attention_heads", cfg->info.heads},
                 {"swa_head_dim", cfg->info.head_dim},
                 {"swa_v_head_dim", cfg->value_dim ? cfg->value_dim : cfg->info.head_dim},
                 {"n_shared_experts", 0}};
    static const char kv[] = "swa_num_key_value_heads", sink[] = "add_swa_attention_sink_bias";
    bool sinks = true;
    int rc;
    for (size_t i = 0, value; i < sizeof sizes / sizeof *sizes; i++) {
        value = sizes[i].only;
        QT_TRY(qt_json_get_size(&value, src->json, sizes[i].key, src->path, err));
        if (value != sizes[i].only)
            QT_TRY(config_unsupported(src, sizes[i].key, "this number", err));
    }
    for (size_t i = 0; i < cfg->info.layers; i++) {
        size_t value = cfg->heads[i].kv;
        if (cfg->windows[i])
            QT_TRY(qt_json_get_size(&value, src->json, kv, src->path, err));
        if (value != cfg->heads[i].kv)
            QT_TRY(config_unsupported(src, kv, "not twice num_key_value_heads", err));
    }
    QT_TRY(qt_json_get_bool(&sinks, src->json, sink, src->path, err));
    if (!sinks)
        QT_TRY(config_unsupported(src, sink, "false", err));
    QT_TRY(config_refuse_flag(src, "add_full_attention_sink_bias", true, err));
    QT_TRY(config_expect_string(src, "scoring_func", "sigmoid", err));
    QT_TRY(config_expect_string(src, "topk_method", "noaux_tc", err));
done:
    return rc;
}

/* The list `key`, if it is given, has a 1 for layers with (a window or experts), else a 0. */
static int check_listed(const struct config *cfg, const struct source *src, const char *key,
                        bool experts, struct qt_err *err)
{
    const json_t *list = json_object_get(src->json, key);
    for (size_t i = 0; json_is_array(list) && i < cfg->info.layers; i++) {
        const bool one = experts ? !cfg->dense[i] : cfg->windows[i] > 0;
        if (json_integer_value(json_array_get(list, i)) != one)
            return config_unsupported(src, key, "another list than the family's", err);
    }
    return QT_OK;
}

static int read_mimo(struct config *cfg, const struct source *src, struct qt_err *err)
{
    static const char key[] = "attention_value_scale";
    double scale = config_null(src->json, key) ? 1 : 0.707;
    int rc;
    QT_TRY(check_mimo(cfg, src, err));
    QT_TRY(check_listed(cfg, src, "hybrid_layer_pattern", false, err));
    QT_TRY(check_listed(cfg, src, "moe_layer_freq", true, err));
    QT_TRY(config_read_positive(&scale, src, key, err));
    cfg->output_factors[ROLE_V] = (float)scale;
done:
    return rc;
}

/* sliding_window_size is the number of positions in a window without the query's own. */
static int adapt_mimo(json_t *out, const struct source *src, struct qt_err *err)
{
    static const char key[] = "sliding_window_size";
    size_t before = 0;
    int rc = QT_OK;
    if (config_given(out, key)) {
        QT_TRY(config_read_size(&before, src, key, CONFIG_POSITIONS, err));
        if (json_object_set_new(out, "sliding_window", json_integer((json_int_t)before + 1)) < 0)
            rc = qt_no_memory(err, NULL);
    }
done:
    return rc;
}

const struct arch arch_mimo_v2_flash = {
    .family = "mimo_v2_flash",
    .kv_heads = 4,
    .head_dim = 192,
    .value_dim = 128,
    .aliases = mimo_keys,
    LLAMA_LIKE,
    .intermediate_key = "moe_intermediate_size",
    .experts = "mlp.experts.",
    .sigmoid_router = true,
    .grouped_router = true,
    .parts = {ATTENTION_PARTS, [ROLE_SINKS] = "self_attn.attention_sink_bias",
              [ROLE_MLP_IN] = "post_attention_layernorm",
              EXPERT_PARTS, [ROLE_SELECT_BIAS] = "mlp.gate.e_score_correction_bias"},
    .window_heads = true,
    .dense = "mlp.",
    .first_dense = 1,
    .mlp_types = true,
    .normalize_routing = {"norm_topk_prob", true},
    .eps = 1e-5,
    .theta = 5e6,
    .local_theta = 1e4,
    .local_theta_key = "swa_rope_theta",
    .partial_rope = true,
    .rotary_factor = 0.334,
    .qkv_bias = {"attention_bias", false},
    .window = WINDOW_PATTERN,
    .window_period = 6,
    .window_size = 129,
    .first_global = true,
    .adapt = adapt_mimo,
    .read = read_mimo,
};
