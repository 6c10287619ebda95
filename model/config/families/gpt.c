/* GPT-2 and its relatives. */
#include "model/config/families/families.h"

static const struct arch_alias gpt2_keys[] = {
    {"hidden_size", "n_embd"},         {"num_hidden_layers", "n_layer"},
    {"num_attention_heads", "n_head"}, {"max_position_embeddings", "n_positions"},
    {"intermediate_size", "n_inner"},  {0}};

static int read_gpt2(struct config *cfg, const struct source *src, struct qt_err *err)
{
    bool scaled = true;
    int rc;
    QT_TRY(config_refuse_flag(src, "scale_attn_by_inverse_layer_idx", true, err));
    QT_TRY(config_refuse_flag(src, "add_cross_attention", true, err));
    QT_TRY(qt_json_get_bool(&scaled, src->json, "scale_attn_weights", src->path, err));
    if (!scaled)
        cfg->attn_scale = 1;
done:
    return rc;
}

const struct arch arch_gpt2 = {
    .family = "gpt2",
    .aliases = gpt2_keys,
    .layers = "h.",
    .embed = "wte",
    .positions = "wpe",
    .final_norm = "ln_f",
    .parts = {[ROLE_ATTN_IN] = "ln_1",
              [ROLE_QKV] = "attn.c_attn",
              [ROLE_O] = "attn.c_proj",
              [ROLE_MLP_IN] = "ln_2",
              [ROLE_UP] = "mlp.c_fc",
              [ROLE_DOWN] = "mlp.c_proj"},
    .grows = true,
    .eps_key = "layer_norm_epsilon",
    .eps = 1e-5,
    .act_key = "activation_function",
    .act = "gelu_new",
    .norm = QT_NORM_LAYER,
    .qkv_bias = {NULL, true},
    .o_bias = {NULL, true},
    .mlp_bias = {NULL, true},
    .tied = {"tie_word_embeddings", true},
    .read = read_gpt2,
};

/* rotary_dim has a default that is no fraction of a head. */
static int read_gptj(struct config *cfg, const struct source *src, struct qt_err *err)
{
    return config_given(src->json, "rotary_dim") || cfg->info.head_dim == 64
               ? QT_OK
               : config_unsupported(src, "rotary_dim", "the lack of this key", err);
}

const struct arch arch_gptj = {
    .family = "gptj",
    .aliases = gpt2_keys,
    .layers = "h.",
    .embed = "wte",
    .final_norm = "ln_f",
    .rope = true,
    .parts = {[ROLE_ATTN_IN] = "ln_1",
              [ROLE_Q] = "attn.q_proj",
              [ROLE_K] = "attn.k_proj",
              [ROLE_V] = "attn.v_proj",
              [ROLE_O] = "attn.out_proj",
              [ROLE_UP] = "mlp.fc_in",
              [ROLE_DOWN] = "mlp.fc_out"},
    .grows = true,
    .eps_key = "layer_norm_epsilon",
    .eps = 1e-5,
    .act_key = "activation_function",
    .act = "gelu_new",
    .norm = QT_NORM_LAYER,
    .parallel = {NULL, true},
    .head_bias = {NULL, true},
    .mlp_bias = {NULL, true},
    .partial_rope = true,
    .rotary_read = true,
    .interleaved = true,
    .tied = {"tie_word_embeddings", false},
    .read = read_gptj,
};

static const struct arch_alias neox_keys[] = {
    {"partial_rotary_factor", "rotary_pct"}, {"rope_theta", "rotary_emb_base"}, {0}};

const struct arch arch_gpt_neox = {
    .family = "gpt_neox",
    .aliases = neox_keys,
    .layers = "layers.",
    .embed = "embed_in",
    .final_norm = "final_layer_norm",
    .rope = true,
    .parts = {[ROLE_ATTN_IN] = "input_layernorm",
              [ROLE_QKV] = "attention.query_key_value",
              [ROLE_O] = "attention.dense",
              [ROLE_MLP_IN] = "post_attention_layernorm",
              [ROLE_UP] = "mlp.dense_h_to_4h",
              [ROLE_DOWN] = "mlp.dense_4h_to_h"},
    .grouped_qkv = true,
    .parallel_norms = true,
    .parallel = {"use_parallel_residual", true},
    .eps_key = "layer_norm_eps",
    .eps = 1e-5,
    .act_key = "hidden_act",
    .act = "gelu",
    .norm = QT_NORM_LAYER,
    .partial_rope = true,
    .rotary_factor = 0.25,
    .qkv_bias = {"attention_bias", true},
    .o_bias = {"attention_bias", true},
    .mlp_bias = {NULL, true},
    .tied = {"tie_word_embeddings", false},
};

/* GPT-BigCode and the old decoder of Falcon have one KV head with multi_query, and else one for
 * each query head. */
int config_adapt_multi_query(json_t *out, const struct source *src, struct qt_err *err)
{
    bool renewed = false, one = true;
    int rc;
    QT_TRY(qt_json_get_bool(&renewed, out, "new_decoder_architecture", src->path, err));
    QT_TRY(qt_json_get_bool(&one, out, "multi_query", src->path, err));
    json_object_del(out, "num_key_value_heads");
    if (renewed && config_given(out, "num_kv_heads"))
        QT_TRY(config_put(out, "num_key_value_heads",
                          json_incref(json_object_get(out, "num_kv_heads")), err));
    if (!renewed && one)
        QT_TRY(config_put(out, "num_key_value_heads", json_integer(1), err));
done:
    return rc;
}

const struct arch arch_gpt_bigcode = {
    .family = "gpt_bigcode",
    .aliases = gpt2_keys,
    .layers = "h.",
    .embed = "wte",
    .positions = "wpe",
    .final_norm = "ln_f",
    .parts = {[ROLE_ATTN_IN] = "ln_1",
              [ROLE_QKV] = "attn.c_attn",
              [ROLE_O] = "attn.c_proj",
              [ROLE_MLP_IN] = "ln_2",
              [ROLE_UP] = "mlp.c_fc",
              [ROLE_DOWN] = "mlp.c_proj"},
    .grouped_qkv = true,
    .grows = true,
    .eps_key = "layer_norm_epsilon",
    .eps = 1e-5,
    .act_key = "activation_function",
    .act = "gelu_pytorch_tanh",
    .norm = QT_NORM_LAYER,
    .qkv_bias = {NULL, true},
    .o_bias = {NULL, true},
    .mlp_bias = {NULL, true},
    .tied = {"tie_word_embeddings", true},
    .adapt = config_adapt_multi_query,
    .read = read_gpt2,
};

static const struct arch_alias gpt_neo_keys[] = {
    {"num_hidden_layers", "num_layers"}, {"num_attention_heads", "num_heads"}, {0}};

/* attention_types lists pairs of names of layer types and the number of repetitions. */
static int read_gpt_neo(struct config *cfg, const struct source *src, struct qt_err *err)
{
    static const char key[] = "attention_types";
    const json_t *types = json_object_get(src->json, key);
    size_t window = 256, layer = 0;
    int rc;
    cfg->attn_scale = 1;
    QT_TRY(config_read_size(&window, src, "window_size", CONFIG_POSITIONS, err));
    for (; !config_given(src->json, key) && layer < cfg->info.layers; layer++)
        cfg->windows[layer] = layer % 2 ? window : 0;
    for (size_t i = 0; i < json_array_size(types); i++) {
        const json_t *pair = json_array_get(types, i), *names = json_array_get(pair, 0);
        const json_int_t times = json_integer_value(json_array_get(pair, 1));
        for (json_int_t t = 0; t < times && json_array_size(names); t++)
            for (size_t n = 0; n < json_array_size(names); n++, layer++) {
                const char *name = json_string_value(json_array_get(names, n));
                if (!name || (strcmp(name, "global") != 0 && strcmp(name, "local") != 0))
                    QT_TRY(config_unsupported(src, key, name ? name : "no name of a type", err));
                if (layer < cfg->info.layers)
                    cfg->windows[layer] = strcmp(name, "local") == 0 ? window : 0;
                else
                    t = times;
            }
    }
    if (layer != cfg->info.layers)
        rc = qt_fail(err, QT_E_INPUT, src->path, NULL, "'%s' does not list %zu layers", key,
                     cfg->info.layers);
done:
    return rc;
}

const struct arch arch_gpt_neo = {
    .family = "gpt_neo",
    .max_positions = 2048,
    .aliases = gpt_neo_keys,
    .layers = "h.",
    .embed = "wte",
    .positions = "wpe",
    .final_norm = "ln_f",
    .parts = {[ROLE_ATTN_IN] = "ln_1",
              [ROLE_Q] = "attn.attention.q_proj",
              [ROLE_K] = "attn.attention.k_proj",
              [ROLE_V] = "attn.attention.v_proj",
              [ROLE_O] = "attn.attention.out_proj",
              [ROLE_MLP_IN] = "ln_2",
              [ROLE_UP] = "mlp.c_fc",
              [ROLE_DOWN] = "mlp.c_proj"},
    .grows = true,
    .eps_key = "layer_norm_epsilon",
    .eps = 1e-5,
    .act_key = "activation_function",
    .act = "gelu_new",
    .norm = QT_NORM_LAYER,
    .o_bias = {NULL, true},
    .mlp_bias = {NULL, true},
    .tied = {"tie_word_embeddings", true},
    .read = read_gpt_neo,
};

static int read_codegen(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const size_t shards = cfg->arch->qkv_shards, width = cfg->info.heads * cfg->info.head_dim;
    return width % shards ? qt_fail(err, QT_E_INPUT, src->path, NULL,
                                    "'n_embd' %zu is not a multiple of the %zu shards of attention",
                                    width, shards)
                          : read_gptj(cfg, src, err);
}

const struct arch arch_codegen = {
    .family = "codegen",
    .aliases = gpt2_keys,
    .layers = "h.",
    .embed = "wte",
    .final_norm = "ln_f",
    .rope = true,
    .parts = {[ROLE_ATTN_IN] = "ln_1",
              [ROLE_QKV] = "attn.qkv_proj",
              [ROLE_O] = "attn.out_proj",
              [ROLE_UP] = "mlp.fc_in",
              [ROLE_DOWN] = "mlp.fc_out"},
    .grouped_qkv = true,
    .qkv_shards = 4,
    .grows = true,
    .eps_key = "layer_norm_epsilon",
    .eps = 1e-5,
    .act_key = "activation_function",
    .act = "gelu_new",
    .norm = QT_NORM_LAYER,
    .parallel = {NULL, true},
    .head_bias = {NULL, true},
    .mlp_bias = {NULL, true},
    .partial_rope = true,
    .rotary_read = true,
    .interleaved = true,
    .tied = {"tie_word_embeddings", false},
    .read = read_codegen,
};
