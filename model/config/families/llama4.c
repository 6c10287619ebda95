/* Llama 4. */
#include "model/config/families/families.h"

static const struct arch_alias llama4_keys[] = {
    {"decoder_sparse_step", "interleave_moe_layer_step"}, {0}};

/* By layer_types, or else in the layers with a rotary embedding. */
static int read_chunks(struct config *cfg, const struct source *src, struct qt_err *err)
{
    static const char key[] = "attention_chunk_size";
    const json_t *types = json_object_get(src->json, "layer_types");
    const bool listed = config_given(src->json, "layer_types");
    size_t chunk = 8192;
    int rc;
    QT_TRY(config_read_size(&chunk, src, key, CONFIG_POSITIONS, err));
    QT_TRY(qt_array_new(&cfg->chunks, cfg->info.layers, sizeof *cfg->chunks, err));
    for (size_t i = 0; i < cfg->info.layers; i++) {
        const char *type = json_string_value(json_array_get(types, i));
        const bool chunked = listed && strcmp(type, "chunked_attention") == 0;
        if (config_null(src->json, key) && chunked)
            QT_TRY(config_unsupported(src, key, "null", err));
        if (!config_null(src->json, key) && (listed ? chunked : !cfg->no_rope[i]))
            cfg->chunks[i] = chunk;
    }
done:
    return rc;
}

static int read_llama4(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const json_t *tuning = json_object_get(src->json, "attn_temperature_tuning");
    double scale = 0.1;
    int rc;
    QT_TRY(read_chunks(cfg, src, err));
    cfg->bare_norms = true;
    QT_TRY(qt_json_get_bool(&cfg->bare_norms, src->json, "use_qk_norm", src->path, err));
    cfg->floor_step = 8192;
    QT_TRY(config_read_size(&cfg->floor_step, src, "floor_scale", CONFIG_POSITIONS, err));
    QT_TRY(config_read_positive(&scale, src, "attn_scale", err));
    if (json_is_false(tuning) || (json_is_integer(tuning) && json_integer_value(tuning) == 0))
        scale = 0; /* early files have a number instead of a flag */
    cfg->floor_beta = (float)scale;
done:
    return rc;
}

const struct arch arch_llama4_text = {
    .family = "llama4_text",
    .kv_heads = 8,
    .head_dim = 128,
    .aliases = llama4_keys,
    LLAMA_LIKE,
    .parts = {ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",
              [ROLE_ROUTER] = "feed_forward.router", [ROLE_GATE] = "gate_proj",
              [ROLE_UP] = "up_proj", [ROLE_DOWN] = "down_proj"},
    .experts = "feed_forward.experts.",
    .shared = "feed_forward.shared_expert.",
    .dense = "feed_forward.",
    .shared_key = "intermediate_size",
    .dense_key = "intermediate_size_mlp",
    .moe_listed = true,
    .sigmoid_router = true,
    .scaled_inputs = true,
    .eps = 1e-5,
    .theta = 5e5,
    .interleaved = true,
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .no_rope = NO_ROPE_LISTED,
    .chunked = true,
    .read = read_llama4,
};
