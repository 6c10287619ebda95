/* Names in GGUF files: architectures, tensors, splittings of text. */
#include "formats/gguf.h"

#include <ctype.h>
#include <stdio.h>

/* ---- families ------------------------------------------------------------------------------- */

enum {
    BIAS = QT_GGUF_BIAS,
    ROTARY = QT_GGUF_ROTARY,
    EXACT = QT_GGUF_EXACT,
    BARE = QT_GGUF_BARE,
    VALUES = QT_GGUF_VALUES,
    VALUE_CHANNELS = QT_GGUF_VALUE_CHANNELS,
    PLAIN = QT_GGUF_PLAIN,
    DECAY = QT_GGUF_DECAY,
    LATENT = QT_GGUF_LATENT,
};

#define LLAMA_QKV(flags)                                                                           \
    {"self_attn.q_proj", "attn_q", BIAS | ROTARY}, {"self_attn.k_proj", "attn_k", BIAS | ROTARY},  \
        {"self_attn.v_proj", "attn_v", BIAS},                                                      \
    {                                                                                              \
        "self_attn.o_proj", "attn_output", flags                                                   \
    }
#define LLAMA_NORMS                                                                                \
    {"input_layernorm", "attn_norm", 0},                                                           \
    {                                                                                              \
        "post_attention_layernorm", "ffn_norm", 0                                                  \
    }
#define HEAD_NORMS                                                                                 \
    {"self_attn.q_norm", "attn_q_norm", 0},                                                        \
    {                                                                                              \
        "self_attn.k_norm", "attn_k_norm", 0                                                       \
    }
#define LLAMA_MLP(flags)                                                                           \
    {"mlp.gate_proj", "ffn_gate", flags}, {"mlp.up_proj", "ffn_up", flags},                        \
    {                                                                                              \
        "mlp.down_proj", "ffn_down", flags                                                         \
    }
#define FUSED_MLP                                                                                  \
    {"mlp.gate_up_proj", "ffn_up", 0},                                                             \
    {                                                                                              \
        "mlp.down_proj", "ffn_down", 0                                                             \
    }
#define EXPERTS(router, flags)                                                                     \
    {router, "ffn_gate_inp", EXACT | (flags)},                                                     \
        {"mlp.experts.#.gate_proj", "ffn_gate_exps", flags},                                       \
        {"mlp.experts.#.up_proj", "ffn_up_exps", flags},                                           \
    {                                                                                              \
        "mlp.experts.#.down_proj", "ffn_down_exps", flags                                          \
    }

#define SHARED_EXPERT                                                                              \
    {"mlp.shared_expert_gate", "ffn_gate_inp_shexp", EXACT},                                       \
        {"mlp.shared_expert.gate_proj", "ffn_gate_shexp", 0},                                      \
        {"mlp.shared_expert.up_proj", "ffn_up_shexp", 0},                                          \
    {                                                                                              \
        "mlp.shared_expert.down_proj", "ffn_down_shexp", 0                                         \
    }

#define MIXTRAL_EXPERTS                                                                            \
    {"block_sparse_moe.gate", "ffn_gate_inp", EXACT},                                              \
        {"block_sparse_moe.experts.#.w1", "ffn_gate_exps", 0},                                     \
        {"block_sparse_moe.experts.#.w3", "ffn_up_exps", 0},                                       \
    {                                                                                              \
        "block_sparse_moe.experts.#.w2", "ffn_down_exps", 0                                        \
    }
/* Dense in the first layers, then with shared experts; the router may have a bias. */
#define DEEPSEEK_MLP                                                                               \
    LLAMA_MLP(0), EXPERTS("mlp.gate", 0),                                                          \
        {"mlp.gate.e_score_correction_bias", "exp_probs_b.bias", BARE},                            \
        {"mlp.shared_experts.gate_proj", "ffn_gate_shexp", 0},                                     \
        {"mlp.shared_experts.up_proj", "ffn_up_shexp", 0},                                         \
    {                                                                                              \
        "mlp.shared_experts.down_proj", "ffn_down_shexp", 0                                        \
    }

static const struct qt_gguf_part llama_parts[] = {
    LLAMA_QKV(BIAS), LLAMA_NORMS, LLAMA_MLP(BIAS), {0}};
static const struct qt_gguf_part mixtral_parts[] = {
    LLAMA_QKV(BIAS),
    LLAMA_NORMS,
    MIXTRAL_EXPERTS,
    {0},
};
static const struct qt_gguf_part qwen_parts[] = {
    LLAMA_QKV(0), LLAMA_NORMS, HEAD_NORMS, LLAMA_MLP(0), {0}};
static const struct qt_gguf_part qwen2_moe_parts[] = {
    LLAMA_QKV(0), LLAMA_NORMS, EXPERTS("mlp.gate", 0), SHARED_EXPERT, {0},
};
static const struct qt_gguf_part qwen3_moe_parts[] = {
    LLAMA_QKV(0), LLAMA_NORMS, HEAD_NORMS, EXPERTS("mlp.gate", 0), {0}};
static const struct qt_gguf_part glm4_moe_parts[] = {
    LLAMA_QKV(0),
    HEAD_NORMS,
    {"input_layernorm", "attn_norm", 0},
    {"post_attention_layernorm", "post_attention_norm", 0},
    DEEPSEEK_MLP,
    {0},
};
static const struct qt_gguf_part dots1_parts[] = {
    LLAMA_QKV(0), HEAD_NORMS, LLAMA_NORMS, DEEPSEEK_MLP, {0}};
static const struct qt_gguf_part deepseek2_parts[] = {
    {"self_attn.q_proj", "attn_q", 0},
    {"self_attn.q_a_proj", "attn_q_a", 0},
    {"self_attn.q_a_layernorm", "attn_q_a_norm", 0},
    {"self_attn.q_b_proj", "attn_q_b", 0},
    {"self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa", 0},
    {"self_attn.kv_a_layernorm", "attn_kv_a_norm", 0},
    {"self_attn.kv_b_proj", "attn_", LATENT},
    {"self_attn.o_proj", "attn_output", 0},
    LLAMA_NORMS,
    DEEPSEEK_MLP,
    {0},
};
static const struct qt_gguf_part ernie4_5_moe_parts[] = {
    LLAMA_QKV(0), LLAMA_NORMS,
    DEEPSEEK_MLP, {"mlp.moe_statics.e_score_correction_bias", "exp_probs_b.bias", BARE},
    {0},
};
static const struct qt_gguf_part minimax_m2_parts[] = {
    LLAMA_QKV(0),
    HEAD_NORMS,
    LLAMA_NORMS,
    MIXTRAL_EXPERTS,
    {"block_sparse_moe.e_score_correction_bias", "exp_probs_b.bias", BARE},
    {0},
};
#define HUNYUAN_ATTENTION                                                                          \
    LLAMA_QKV(BIAS), LLAMA_NORMS, {"self_attn.query_layernorm", "attn_q_norm", 0},                 \
    {                                                                                              \
        "self_attn.key_layernorm", "attn_k_norm", 0                                                \
    }
static const struct qt_gguf_part hunyuan_dense_parts[] = {HUNYUAN_ATTENTION, LLAMA_MLP(0), {0}};
static const struct qt_gguf_part hunyuan_moe_parts[] = {
    HUNYUAN_ATTENTION,
    EXPERTS("mlp.gate.wg", 0),
    {"mlp.shared_mlp.gate_proj", "ffn_gate_shexp", 0},
    {"mlp.shared_mlp.up_proj", "ffn_up_shexp", 0},
    {"mlp.shared_mlp.down_proj", "ffn_down_shexp", 0},
    {0},
};
#define DELTA                                                                                      \
    {"linear_attn.in_proj_qkv", "attn_qkv", VALUES},                                               \
        {"linear_attn.in_proj_z", "attn_gate", VALUES},                                            \
        {"linear_attn.in_proj_a", "ssm_alpha", VALUES},                                            \
        {"linear_attn.in_proj_b", "ssm_beta", VALUES},                                             \
        {"linear_attn.conv1d", "ssm_conv1d", VALUES | EXACT},                                      \
        {"linear_attn.A_log", "ssm_a", VALUES | BARE | DECAY},                                     \
        {"linear_attn.dt_bias", "ssm_dt.bias", VALUES | BARE},                                     \
        {"linear_attn.norm", "ssm_norm", PLAIN},                                                   \
    {                                                                                              \
        "linear_attn.out_proj", "ssm_out", VALUE_CHANNELS                                          \
    }

static const struct qt_gguf_part qwen3_5_parts[] = {
    LLAMA_QKV(0),
    HEAD_NORMS,
    DELTA,
    LLAMA_MLP(0),
    {"input_layernorm", "attn_norm", 0},
    {"post_attention_layernorm", "post_attention_norm", 0},
    {0},
};
static const struct qt_gguf_part qwen3_5_moe_parts[] = {
    LLAMA_QKV(0),
    HEAD_NORMS,
    DELTA,
    EXPERTS("mlp.gate", 0),
    SHARED_EXPERT,
    {"input_layernorm", "attn_norm", 0},
    {"post_attention_layernorm", "post_attention_norm", 0},
    {0},
};
/* Not split and not reordered; llama.cpp does that as it runs. */
static const struct qt_gguf_part qwen3_next_parts[] = {
    LLAMA_QKV(0),
    HEAD_NORMS,
    {"linear_attn.in_proj_qkvz", "ssm_in", 0},
    {"linear_attn.in_proj_ba", "ssm_ba", 0},
    {"linear_attn.conv1d", "ssm_conv1d", EXACT},
    {"linear_attn.A_log", "ssm_a", BARE | DECAY},
    {"linear_attn.dt_bias", "ssm_dt.bias", BARE},
    {"linear_attn.norm", "ssm_norm", PLAIN},
    {"linear_attn.out_proj", "ssm_out", 0},
    EXPERTS("mlp.gate", 0),
    SHARED_EXPERT,
    {"input_layernorm", "attn_norm", 0},
    {"post_attention_layernorm", "post_attention_norm", 0},
    {0},
};
static const struct qt_gguf_part gpt_oss_parts[] = {
    LLAMA_QKV(BIAS),
    {"input_layernorm", "attn_norm", 0},
    {"post_attention_layernorm", "post_attention_norm", 0},
    {"self_attn.sinks", "attn_sinks.weight", BARE},
    EXPERTS("mlp.router", BIAS),
    {0},
};
static const struct qt_gguf_part gemma_parts[] = {
    LLAMA_QKV(0),
    HEAD_NORMS,
    LLAMA_MLP(0),
    {"input_layernorm", "attn_norm", 0},
    {"post_attention_layernorm", "post_attention_norm", 0},
    {"pre_feedforward_layernorm", "ffn_norm", 0},
    {"post_feedforward_layernorm", "post_ffw_norm", 0},
    {0},
};
static const struct qt_gguf_part olmo2_parts[] = {
    LLAMA_QKV(0),
    HEAD_NORMS,
    LLAMA_MLP(0),
    {"post_attention_layernorm", "post_attention_norm", 0},
    {"post_feedforward_layernorm", "post_ffw_norm", 0},
    {0},
};
static const struct qt_gguf_part seed_oss_parts[] = {
    LLAMA_QKV(0),
    LLAMA_MLP(0),
    {"input_layernorm", "attn_norm", 0},
    {"post_attention_layernorm", "post_attention_norm", 0},
    {0},
};
static const struct qt_gguf_part llama4_parts[] = {
    LLAMA_QKV(0),
    LLAMA_NORMS,
    {"feed_forward.gate_proj", "ffn_gate", 0},
    {"feed_forward.up_proj", "ffn_up", 0},
    {"feed_forward.down_proj", "ffn_down", 0},
    {"feed_forward.router", "ffn_gate_inp", EXACT},
    {"feed_forward.experts.#.gate_proj", "ffn_gate_exps", 0},
    {"feed_forward.experts.#.up_proj", "ffn_up_exps", 0},
    {"feed_forward.experts.#.down_proj", "ffn_down_exps", 0},
    {"feed_forward.shared_expert.gate_proj", "ffn_gate_shexp", 0},
    {"feed_forward.shared_expert.up_proj", "ffn_up_shexp", 0},
    {"feed_forward.shared_expert.down_proj", "ffn_down_shexp", 0},
    {0},
};
#define LFM2                                                                                       \
    {"self_attn.q_proj", "attn_q", 0}, {"self_attn.k_proj", "attn_k", 0},                          \
        {"self_attn.v_proj", "attn_v", 0}, {"self_attn.out_proj", "attn_output", 0},               \
        {"self_attn.q_layernorm", "attn_q_norm", 0}, {"self_attn.k_layernorm", "attn_k_norm", 0},  \
        {"conv.in_proj", "shortconv.in_proj", 0}, {"conv.conv", "shortconv.conv", EXACT},          \
        {"conv.out_proj", "shortconv.out_proj", 0}, {"operator_norm", "attn_norm", 0},             \
        {"ffn_norm", "ffn_norm", 0}, {"feed_forward.w1", "ffn_gate", 0},                           \
        {"feed_forward.w3", "ffn_up", 0},                                                          \
    {                                                                                              \
        "feed_forward.w2", "ffn_down", 0                                                           \
    }
static const struct qt_gguf_part lfm2_parts[] = {
    LFM2,
    {"feed_forward.gate", "ffn_gate_inp", EXACT},
    {"feed_forward.expert_bias", "exp_probs_b.bias", BARE},
    {"feed_forward.experts.#.w1", "ffn_gate_exps", 0},
    {"feed_forward.experts.#.w3", "ffn_up_exps", 0},
    {"feed_forward.experts.#.w2", "ffn_down_exps", 0},
    {0},
};
static const struct qt_gguf_part granitemoe_parts[] = {
    LLAMA_QKV(BIAS),
    LLAMA_NORMS,
    {"block_sparse_moe.router.layer", "ffn_gate_inp", EXACT},
    {"block_sparse_moe.experts.#.gate_proj", "ffn_gate_exps", 0},
    {"block_sparse_moe.experts.#.up_proj", "ffn_up_exps", 0},
    {"block_sparse_moe.experts.#.down_proj", "ffn_down_exps", 0},
    {0},
};
static const struct qt_gguf_part phi3_parts[] = {{"self_attn.qkv_proj", "attn_qkv", 0},
                                                 {"self_attn.o_proj", "attn_output", 0},
                                                 LLAMA_NORMS,
                                                 FUSED_MLP,
                                                 {0}};
static const struct qt_gguf_part glm4_parts[] = {
    LLAMA_QKV(0),
    LLAMA_NORMS,
    FUSED_MLP,
    {"post_self_attn_layernorm", "post_attention_norm", 0},
    {"post_mlp_layernorm", "post_ffw_norm", 0},
    {0},
};

static const struct qt_gguf_family families[] = {
    {"llama", "llama", "LlamaForCausalLM", llama_parts, true, false},
    {"mistral", "llama", "MistralForCausalLM", llama_parts, true, false},
    {"ministral3", "mistral3", "Ministral3ForCausalLM", llama_parts, true, false},
    {"mixtral", "llama", "MixtralForCausalLM", mixtral_parts, true, false},
    {"qwen2", "qwen2", "Qwen2ForCausalLM", qwen_parts, false, false},
    {"qwen3", "qwen3", "Qwen3ForCausalLM", qwen_parts, false, false},
    {"qwen2_moe", "qwen2moe", "Qwen2MoeForCausalLM", qwen2_moe_parts, false, false},
    {"qwen3_moe", "qwen3moe", "Qwen3MoeForCausalLM", qwen3_moe_parts, false, false},
    {"glm4_moe", "glm4moe", "Glm4MoeForCausalLM", glm4_moe_parts, false, false},
    {"olmoe", "olmoe", NULL, qwen3_moe_parts, false, false},
    {"dots1", "dots1", NULL, dots1_parts, false, false},
    {"deepseek_v2", "deepseek2", NULL, deepseek2_parts, false, false},
    {"deepseek_v3", "deepseek2", NULL, deepseek2_parts, false, false},
    {"glm4_moe_lite", "deepseek2", NULL, deepseek2_parts, false, false},
    {"ernie4_5_moe", "ernie4_5-moe", NULL, ernie4_5_moe_parts, false, false},
    {"minimax_m2", "minimax-m2", NULL, minimax_m2_parts, false, false},
    {"lfm2", "lfm2", NULL, lfm2_parts, false, false},
    {"lfm2_moe", "lfm2moe", NULL, lfm2_parts, false, false},
    {"llama4_text", "llama4", NULL, llama4_parts, false, false},
    {"hunyuan_v1_dense", "hunyuan-dense", NULL, hunyuan_dense_parts, false, false},
    {"hunyuan_v1_moe", "hunyuan-moe", NULL, hunyuan_moe_parts, false, false},
    {"qwen3_next", "qwen3next", NULL, qwen3_next_parts, false, true},
    {"qwen3_5_text", "qwen35", NULL, qwen3_5_parts, false, true},
    {"qwen3_5_moe_text", "qwen35moe", NULL, qwen3_5_moe_parts, false, true},
    {"gpt_oss", "gpt-oss", "GptOssForCausalLM", gpt_oss_parts, false, false},
    {"gemma", "gemma", "GemmaForCausalLM", qwen_parts, false, true},
    {"gemma2", "gemma2", "Gemma2ForCausalLM", gemma_parts, false, true},
    {"gemma3_text", "gemma3", "Gemma3ForCausalLM", gemma_parts, false, true},
    {"phi3", "phi3", "Phi3ForCausalLM", phi3_parts, false, false},
    {"olmo2", "olmo2", "Olmo2ForCausalLM", olmo2_parts, false, false},
    {"olmo3", "olmo2", "Olmo3ForCausalLM", olmo2_parts, false, false},
    {"smollm3", "smollm3", "SmolLM3ForCausalLM", llama_parts, true, false},
    {"granite", "granite", "GraniteForCausalLM", llama_parts, true, false},
    {"granitemoe", "granitemoe", "GraniteMoeForCausalLM", granitemoe_parts, true, false},
    {"seed_oss", "seed_oss", "SeedOssForCausalLM", seed_oss_parts, false, false},
    {"ernie4_5", "ernie4_5", "Ernie4_5ForCausalLM", qwen_parts, false, false},
    {"exaone4", "exaone4", "Exaone4ForCausalLM", olmo2_parts, false, false},
    {"glm4", "glm4", "Glm4ForCausalLM", glm4_parts, false, false},
    /* Decoders of multimodal models. A file of one is read as the same decoder alone. */
    {"qwen2", "qwen2vl", "Qwen2ForCausalLM", qwen_parts, false, false},
    {"qwen3", "qwen3vl", "Qwen3ForCausalLM", qwen_parts, false, false},
    {"qwen3_moe", "qwen3vlmoe", "Qwen3MoeForCausalLM", qwen3_moe_parts, false, false},
    {"qwen2_vl_text", "qwen2vl", NULL, qwen_parts, false, false},
    {"qwen2_5_vl_text", "qwen2vl", NULL, qwen_parts, false, false},
    {"qwen3_vl_text", "qwen3vl", NULL, qwen_parts, false, false},
    {"qwen3_vl_moe_text", "qwen3vlmoe", NULL, qwen3_moe_parts, false, false},
};

const struct qt_gguf_family *qt_gguf_family_at(size_t i)
{
    return i < sizeof families / sizeof *families ? &families[i] : NULL;
}

const struct qt_gguf_family *qt_gguf_family_find(const char *family)
{
    const struct qt_gguf_family *f;
    for (size_t i = 0; (f = qt_gguf_family_at(i)) != NULL; i++)
        if (strcmp(f->family, family) == 0)
            return f;
    return NULL;
}

/* ---- names of tensors ----------------------------------------------------------------------- */

/* Reads decimal digits at *s; false if there are none or too many. */
static bool number(size_t *out, const char **s)
{
    size_t digits = 0;
    *out = 0;
    for (; isdigit((unsigned char)**s) && digits < 7; digits++)
        *out = *out * 10 + (size_t)(*(*s)++ - '0');
    return digits > 0 && !isdigit((unsigned char)**s);
}

/* Compares module[size] with a name that may have a '#'. */
static bool matches(struct qt_gguf_place *out, const char *name, const char *module, size_t size)
{
    const char *at = module, *hash = strchr(name, '#');
    if (!hash)
        return strlen(name) == size && strncmp(name, module, size) == 0;
    const size_t before = (size_t)(hash - name), after = strlen(hash + 1);
    if (size <= before || strncmp(name, module, before) != 0)
        return false;
    at += before;
    out->stacked = true;
    return number(&out->expert, &at) && (size_t)(at - module) + after == size &&
           strncmp(hash + 1, at, after) == 0;
}

static bool place_part(struct qt_gguf_place *out, const struct qt_gguf_family *f, const char *rest)
{
    const char *dot = strrchr(rest, '.');
    size_t layer;
    const char *module = rest;
    if (!dot || !number(&layer, &module) || *module != '.' || module >= dot)
        return false;
    module++;
    const bool bias = strcmp(dot, ".bias") == 0, bare = !bias && strcmp(dot, ".weight") != 0;
    const size_t size = bare ? strlen(module) : (size_t)(dot - module);
    for (const struct qt_gguf_part *p = f->parts; p->source; p++) {
        *out = (struct qt_gguf_place){0};
        if (bare != ((p->flags & BARE) != 0) || (bias && !(p->flags & BIAS)) ||
            !matches(out, p->source, module, size))
            continue;
        out->layer = layer;
        out->rotary = f->permuted && (p->flags & ROTARY);
        out->exact = p->flags & EXACT;
        out->plus_1 = f->norms_plus_1 && strstr(p->target, "norm") && !(p->flags & PLAIN);
        out->values = p->flags & VALUES;
        out->value_channels = p->flags & VALUE_CHANNELS;
        out->decay = p->flags & DECAY;
        out->latent = p->flags & LATENT;
        snprintf(out->name, sizeof out->name, "blk.%zu.%s%s", layer, p->target,
                 bare || out->latent ? "" : dot);
        return true;
    }
    return false;
}

enum { GLOBALS = 4 };
static const char *const globals[GLOBALS][2] = {
    {"embed_tokens.weight", "token_embd.weight"},
    {"norm.weight", "output_norm.weight"},
    {"lm_head.weight", "output.weight"},
    {"embedding_norm.weight", "token_embd_norm.weight"}};

bool qt_gguf_place(struct qt_gguf_place *out, const struct qt_gguf_family *f, const char *tensor,
                   bool tied)
{
    const char *name = strncmp(tensor, "model.", 6) == 0 ? tensor + 6 : tensor;
    *out = (struct qt_gguf_place){0};
    for (size_t i = 0; i < GLOBALS; i++)
        if (strcmp(name, globals[i][0]) == 0) {
            snprintf(out->name, sizeof out->name, "%s", globals[i][1]);
            out->skip = i == 2 && tied;
            out->plus_1 = i == 1 && f->norms_plus_1;
            return true;
        }
    return strncmp(name, "layers.", 7) == 0 && place_part(out, f, name + 7);
}

size_t qt_gguf_row(size_t row, size_t head)
{
    if (!head)
        return row;
    const size_t r = row % head, half = head / 2;
    return row - r + 2 * (r % half) + r / half;
}

size_t qt_gguf_value_head(size_t head, size_t heads, size_t keys)
{
    const size_t per = heads / keys;
    return head % per * keys + head / per;
}

/* The part whose tensors are named "TARGET.weight" or "TARGET.bias"; size: of TARGET. */
static const struct qt_gguf_part *part_of(const struct qt_gguf_family *f, const char *target,
                                          size_t size, bool bias)
{
    for (const struct qt_gguf_part *p = f->parts; p->source; p++)
        if (p->flags & BARE ? strcmp(p->target, target) == 0
                            : strlen(p->target) == size && memcmp(p->target, target, size) == 0 &&
                                  (!bias || p->flags & BIAS))
            return p;
    return NULL;
}

/* The stack of all experts, as transformers 5 names it; stacked.c knows the names of a family. */
static const char *stack_name(const char *target)
{
    return strcmp(target, "ffn_gate_exps") == 0 ? "mlp.experts.gate_proj"
           : strcmp(target, "ffn_up_exps") == 0 ? "mlp.experts.up_proj"
                                                : "mlp.experts.down_proj";
}

bool qt_gguf_origin(struct qt_gguf_origin *out, const struct qt_gguf_family *f, const char *name)
{
    *out = (struct qt_gguf_origin){0};
    for (size_t i = 0; i < GLOBALS; i++)
        if (strcmp(name, globals[i][1]) == 0) {
            snprintf(out->name, sizeof out->name, "%s%s", i < 2 ? "model." : "", globals[i][0]);
            out->plus_1 = i == 1 && f->norms_plus_1;
            return true;
        }
    const char *at = name + 4, *dot = strrchr(name, '.');
    if (strncmp(name, "blk.", 4) != 0 || !number(&out->layer, &at) || *at != '.' || dot <= at)
        return false;
    const bool bias = strcmp(dot, ".bias") == 0;
    const struct qt_gguf_part *p = part_of(f, at + 1, (size_t)(dot - at - 1), bias);
    if (!p || (!bias && strcmp(dot, ".weight") != 0))
        return false;
    out->stacked = strchr(p->source, '#') != NULL;
    out->rotary = f->permuted && p->flags & ROTARY;
    out->plus_1 = f->norms_plus_1 && strstr(p->target, "norm");
    out->matrix = !bias && !strstr(p->target, "norm") && !(p->flags & BARE);
    const char *ending = p->flags & BARE ? "" : !out->stacked ? dot : bias ? "_bias" : "";
    snprintf(out->name, sizeof out->name, "model.layers.%zu.%s%s", out->layer,
             out->stacked ? stack_name(p->target) : p->source, ending);
    return true;
}

/* ---- splittings ----------------------------------------------------------------------------- */

#define LLAMA3(contractions, letters, digits, others)                                              \
    contractions "|[^\\r\\n\\p{L}\\p{N}]?" letters "|" digits "| ?" others                         \
                 "+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define CONTRACTIONS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define WORD                                                                                       \
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+"
#define CAPITALS                                                                                   \
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*"
#define REST "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

#define WORDS_1_3                                                                                  \
    "split " LLAMA3(CONTRACTIONS, "\\p{L}+", "\\p{N}{1,3}", "[^\\s\\p{L}\\p{N}]") "\nbytes\n"
#define WORDS_1 "split " LLAMA3(CONTRACTIONS, "\\p{L}+", "\\p{N}", "[^\\s\\p{L}\\p{N}]") "\nbytes\n"
#define GPT_4O                                                                                     \
    "split " WORD CONTRACTIONS "?|" CAPITALS CONTRACTIONS "?|\\p{N}{1,3}" REST "\nbytes\n"

#define DEEPSEEK_3                                                                                 \
    "split \\p{N}{1,3}\nsplit [一-龥぀-ゟ゠-ヿ]+\n"                                          \
    "split [!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"                                  \
    "|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| "                                               \
    "?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)"                                          \
    "|\\s+\nbytes\n"

static const struct qt_gguf_pre pres[] = {
    {"gpt-2", "words\n", false, false},
    {"olmo", "words\n", false, false},
    {"phi-2", "words\n", false, false},
    {"smollm", "digits\nwords\n", false, false},
    {"starcoder", "digits\nwords\n", false, false},
    {"llama-bpe", WORDS_1_3, true, true},
    {"llama3", WORDS_1_3, true, true},
    {"llama-v3", WORDS_1_3, true, true},
    {"pixtral", WORDS_1_3, true, true},
    {"glm4", WORDS_1_3, true, false},
    {"dbrx", WORDS_1_3, false, false},
    {"smaug-bpe", WORDS_1_3, false, false},
    {"chatglm-bpe", WORDS_1_3, false, false},
    {"qwen2", WORDS_1, false, false},
    {"deepseek-r1-qwen", WORDS_1, false, false},
    {"megrez", WORDS_1, false, false},
    {"stablelm2", WORDS_1, false, false},
    {"qwen35",
     "split " LLAMA3(CONTRACTIONS, "[\\p{L}\\p{M}]+", "\\p{N}",
                     "[^\\s\\p{L}\\p{M}\\p{N}]") "\nbytes\n",
     false, false},
    {"tekken", "split " WORD "|" CAPITALS "|\\p{N}" REST "\nbytes\n", true, true},
    {"deepseek-v3", DEEPSEEK_3, false, false},
    {"gpt-4o", GPT_4O, false, false},
    {"llama4", GPT_4O, false, false},
};

const struct qt_gguf_pre *qt_gguf_pre_at(size_t i)
{
    return i < sizeof pres / sizeof *pres ? &pres[i] : NULL;
}
