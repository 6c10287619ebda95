/*
 * The families of models: a constant arch_NAME (struct arch in model/graph/internal.h) for each
 * model_type, in the files of this folder, with the functions for options that only it has.
 *
 * How to add a family:
 *   1. Compare the model in Hugging Face transformers with the drawing of a decoder layer in
 *      graph/internal.h. If every operation has a place there, a constant is enough.
 *   2. Write the constant, in the file of its relatives or in a new one: the model_type, a macro
 *      with the common keys (LLAMA_LIKE, ...), the tensor names of the parts, and every default of
 *      the model's config class in transformers that differs. A field that is left out is 0, false
 *      or NULL; struct arch says what that means. Add its name to the list below.
 *   3. Options that change the result and are not implemented must be refused: by config.c, or by
 *      the `read` of the family.
 *   4. An operation that the drawing lacks needs a new role or field in graph/internal.h, code in
 *      graph/layer.c, forward.c and backward.c, and perhaps a new function of struct qt_backend.
 *   5. A multimodal model whose decoder is a family here needs a row in `multimodal` of arch.c.
 *   6. Add small models with random weights to tests/oracle/make_model_golden.py, one for each
 *      variant of config.json. test_model and test_backward compare with their logits and
 *      gradients.
 */
#ifndef QT_MODEL_CONFIG_FAMILIES_FAMILIES_H
#define QT_MODEL_CONFIG_FAMILIES_FAMILIES_H

#include "model/config/config.h"

/* All families, in the order of `qtool list archs`; X(xlm_roberta) is xlm-roberta. */
/* clang-format off */
#define CONFIG_FAMILIES(X) \
    X(llama) X(mistral) X(ministral) X(Yi) X(internlm2) X(internlm3) X(exaone) X(cwm) \
    X(iquestcoder) X(hunyuan_v1_dense) X(arcee) X(jais2) X(nemotron) X(ministral3) X(qwen2) \
    X(qwen2_vl_text) X(qwen2_5_omni_text) X(qwen2_5_vl_text) X(qwen3) X(qwen3_vl_text) \
    X(qwen3_moe) X(mellum) X(qwen2_moe) X(qwen3_omni_moe_text) X(glm4_moe) X(hy_v3) \
    X(sarvam_moe) X(glm4v_moe_text) X(solar_open) X(gpt_oss) X(granite_swa) X(qwen3_next) \
    X(qwen3_5_text) X(qwen3_5_moe_text) X(qwen3_vl_moe_text) X(deepseek_v2) X(deepseek_v3) \
    X(deepseek_v32) X(glm_moe_dsa) X(glm4_moe_lite) X(sarvam_mla) X(mistral4) X(youtu) \
    X(minicpm3) X(dots1) X(olmoe) X(flex_olmo) X(mixtral) X(minimax_m2) X(minimax_m3_vl_text) \
    X(granitemoe) X(jetmoe) X(granitemoeshared) X(granitemoe_swa) X(phimoe) X(hunyuan_v1_moe) \
    X(exaone_moe) X(afmoe) X(mimo_v2_flash) X(llama4_text) X(lfm2) X(lfm2_moe) X(seed_oss) \
    X(starcoder2) X(granite) X(granitemoehybrid) X(bamba) X(falcon_h1) X(nemotron_h) X(mamba2) \
    X(smollm3) X(olmo2) X(olmo3) X(exaone4) X(glm) X(glm4) X(glm4v_text) X(ernie4_5) \
    X(ernie4_5_moe) X(helium) X(baichuan) X(qwen) X(chatglm) X(phi3) X(phi4_multimodal) X(gemma) \
    X(gemma2) X(vaultgemma) X(gemma3_text) X(gemma3n_text) X(gemma4_text) X(gemma4_unified_text) \
    X(cohere) X(cohere2) X(stablelm) X(phi) X(gpt2) X(gptj) X(gpt_neox) X(gpt_bigcode) \
    X(gpt_neo) X(codegen) X(falcon) X(bloom) X(mpt) X(opt) X(bert) X(roberta) X(xlm_roberta) \
    X(modernbert)
/* clang-format on */

#define CONFIG_DECLARE(name) extern const struct arch arch_##name;
CONFIG_FAMILIES(CONFIG_DECLARE)
#undef CONFIG_DECLARE

/* ---- what several files share --------------------------------------------------------------- */

#define DECODER_NAMES                                                                              \
    .layers = "layers.", .embed = "embed_tokens", .final_norm = "norm", .rope = true

#define LLAMA_COMMON                                                                               \
    DECODER_NAMES, .eps_key = "rms_norm_eps", .act_key = "hidden_act", .act = "silu",              \
                   .norm = QT_NORM_RMS

#define LLAMA_LIKE LLAMA_COMMON, .tied = {"tie_word_embeddings", false}

#define ATTENTION_WITHOUT_NORM                                                                     \
    [ROLE_Q] = "self_attn.q_proj", [ROLE_K] = "self_attn.k_proj", [ROLE_V] = "self_attn.v_proj",   \
    [ROLE_O] = "self_attn.o_proj"

#define ATTENTION_PARTS ATTENTION_WITHOUT_NORM, [ROLE_ATTN_IN] = "input_layernorm"

#define MLP_PARTS                                                                                  \
    [ROLE_GATE] = "mlp.gate_proj", [ROLE_UP] = "mlp.up_proj", [ROLE_DOWN] = "mlp.down_proj"

#define FUSED_MLP_PARTS [ROLE_GATE_UP] = "mlp.gate_up_proj", [ROLE_DOWN] = "mlp.down_proj"

#define LLAMA_PARTS ATTENTION_PARTS, MLP_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm"

#define QWEN3_ATTENTION                                                                            \
    ATTENTION_PARTS, [ROLE_Q_NORM] = "self_attn.q_norm", [ROLE_K_NORM] = "self_attn.k_norm"

#define QWEN3_PARTS                                                                                \
    LLAMA_PARTS, [ROLE_Q_NORM] = "self_attn.q_norm", [ROLE_K_NORM] = "self_attn.k_norm"

#define POST_NORM_PARTS                                                                            \
    ATTENTION_WITHOUT_NORM,                                                                        \
        MLP_PARTS, [ROLE_ATTN_OUT] = "post_attention_layernorm",                                   \
                   [ROLE_MLP_OUT] = "post_feedforward_layernorm",                                  \
                   [ROLE_Q_NORM] = "self_attn.q_norm", [ROLE_K_NORM] = "self_attn.k_norm"

#define EXPERT_PARTS                                                                               \
    [ROLE_ROUTER] = "mlp.gate", [ROLE_GATE] = "gate_proj", [ROLE_UP] = "up_proj",                  \
    [ROLE_DOWN] = "down_proj"

#define QWEN3_MOE_PARTS                                                                            \
    ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",                                   \
                     [ROLE_Q_NORM] = "self_attn.q_norm", [ROLE_K_NORM] = "self_attn.k_norm",       \
                     EXPERT_PARTS

#define GLM_MOE_LIKE                                                                               \
    LLAMA_LIKE, .intermediate_key = "moe_intermediate_size", .experts = "mlp.experts.",            \
                .shared = "mlp.shared_experts.", .sigmoid_router = true, .grouped_router = true,   \
                .shared_count_key = "n_shared_experts"

/* Falcon and BLOOM: QKV by KV heads, and an MLP without gate. */
#define FUSED_UNGATED_PARTS                                                                        \
    [ROLE_ATTN_IN] = "input_layernorm", [ROLE_QKV] = "self_attention.query_key_value",             \
    [ROLE_O] = "self_attention.dense", [ROLE_MLP_IN] = "post_attention_layernorm",                 \
    [ROLE_UP] = "mlp.dense_h_to_4h", [ROLE_DOWN] = "mlp.dense_4h_to_h"

#define MAMBA_PARTS                                                                                \
    [ROLE_SSM_IN] = "mamba.in_proj", [ROLE_CONV] = "mamba.conv1d", [ROLE_A_LOG] = "mamba.A_log",   \
    [ROLE_DT_BIAS] = "mamba.dt_bias", [ROLE_SSM_D] = "mamba.D", [ROLE_SSM_NORM] = "mamba.norm",    \
    [ROLE_SSM_OUT] = "mamba.out_proj"

/* The activation of gpt-oss (gpt_oss.c): see arch.read. */
int config_read_gpt_oss(struct config *cfg, const struct source *src, struct qt_err *err);
/* Number of KV heads by multi_query (gpt.c): see arch.adapt. */
int config_adapt_multi_query(json_t *out, const struct source *src, struct qt_err *err);

#endif
