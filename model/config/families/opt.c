/* OPT. */
#include "model/config/families/families.h"

static int read_opt(struct config *cfg, const struct source *src, struct qt_err *err)
{
    bool before = true, affine = true, no_final = false;
    int rc = QT_OK;
    QT_TRY(qt_json_get_bool(&before, src->json, "do_layer_norm_before", src->path, err));
    QT_TRY(qt_json_get_bool(&affine, src->json, "layer_norm_elementwise_affine", src->path, err));
    QT_TRY(qt_json_get_bool(&no_final, src->json, "_remove_final_layer_norm", src->path, err));
    if (!affine)
        QT_TRY(config_unsupported(src, "layer_norm_elementwise_affine", "false", err));
    cfg->norm_after = !before;
    cfg->final_norm = before && !no_final;
done:
    return rc;
}

const struct arch arch_opt = {
    .family = "opt",
    .layers = "decoder.layers.",
    .embed = "decoder.embed_tokens",
    .positions = "decoder.embed_positions",
    .position_offset = 2,
    .final_norm = "decoder.final_layer_norm",
    .project_in = "decoder.project_in",
    .project_out = "decoder.project_out",
    .parts = {[ROLE_ATTN_IN] = "self_attn_layer_norm",
              [ROLE_Q] = "self_attn.q_proj",
              [ROLE_K] = "self_attn.k_proj",
              [ROLE_V] = "self_attn.v_proj",
              [ROLE_O] = "self_attn.out_proj",
              [ROLE_MLP_IN] = "final_layer_norm",
              [ROLE_UP] = "fc1",
              [ROLE_DOWN] = "fc2"},
    .intermediate_key = "ffn_dim",
    .act_key = "activation_function",
    .act = "relu",
    .norm = QT_NORM_LAYER,
    .qkv_bias = {"enable_bias", true},
    .o_bias = {"enable_bias", true},
    .mlp_bias = {"enable_bias", true},
    .tied = {"tie_word_embeddings", true},
    .read = read_opt,
};
