/*
 * The table of model families: one row (struct arch in graph/internal.h) per model_type.
 *
 * How to add a family:
 *   1. Compare the model in Hugging Face transformers with the drawing of a decoder layer in
 *      graph/internal.h. If every operation has a place there, a row of this table is enough.
 *   2. Add a row: the model_type, a macro with the common keys (LLAMA_LIKE, ...), the tensor names
 *      of the parts, and every default of the model's config class in transformers that differs. A
 *      field that is left out is 0, false or NULL; struct arch says what that means.
 *   3. config.c must refuse options that change the result and are not implemented.
 *   4. An operation that the drawing lacks needs a new role or field in graph/internal.h, code in
 *      graph/layer.c, forward.c and backward.c, and perhaps a new function of struct qt_backend.
 *   5. A multimodal model whose decoder is in the table needs a row in `multimodal` below.
 *   6. Add small models with random weights to tests/oracle/make_model_golden.py, one for each
 *      variant of config.json. test_model and test_backward compare with their logits and
 *      gradients.
 */
#include "model/config/config.h"

#define DECODER_NAMES                                                                              \
    .layers = "layers.", .embed = "embed_tokens", .final_norm = "norm", .rope = true

#define LLAMA_COMMON                                                                               \
    DECODER_NAMES, .eps_key = "rms_norm_eps", .act_key = "hidden_act", .act = "silu",              \
                   .norm = QT_NORM_RMS

#define LLAMA_LIKE LLAMA_COMMON, .tied = {"tie_word_embeddings", false}

#define GEMMA_LIKE                                                                                 \
    DECODER_NAMES, .eps_key = "rms_norm_eps", .act = "gelu_pytorch_tanh", .norms_plus_1 = true,    \
                   .tied = {"tie_word_embeddings", true}, .qkv_bias = {"attention_bias", false},   \
                   .o_bias = {"attention_bias", false}, .head_dim = 256, .read = config_read_gemma

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

#define GEMMA_COMMON                                                                               \
    ATTENTION_PARTS, [ROLE_ATTN_OUT] = "post_attention_layernorm",                                 \
                     [ROLE_MLP_IN] = "pre_feedforward_layernorm",                                  \
                     [ROLE_MLP_OUT] = "post_feedforward_layernorm"

#define GEMMA_PARTS GEMMA_COMMON, MLP_PARTS

#define GLM_LIKE                                                                                   \
    LLAMA_LIKE, .kv_heads = 2, .head_dim = 128, .eps = 1.5625e-7, .partial_rope = true,            \
                .rotary_factor = 0.5, .interleaved = true, .qkv_bias = {"attention_bias", true}

#define GLM_PARTS ATTENTION_PARTS, FUSED_MLP_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm"

#define PHI3_PARTS                                                                                 \
    [ROLE_ATTN_IN] = "input_layernorm", [ROLE_QKV] = "self_attn.qkv_proj",                         \
    [ROLE_O] = "self_attn.o_proj", [ROLE_MLP_IN] = "post_attention_layernorm", FUSED_MLP_PARTS

#define UNGATED_PARTS                                                                              \
    ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm", [ROLE_UP] = "mlp.up_proj",        \
                     [ROLE_DOWN] = "mlp.down_proj"

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

/* MLP of the squared rectifier, without a gate. */
#define RELU2_LIKE                                                                                 \
    DECODER_NAMES, .act_key = "hidden_act", .act = "relu2", .eps = 1e-5,                           \
                   .tied = {"tie_word_embeddings", false}

#define LATENT_PARTS                                                                               \
    [ROLE_ATTN_IN] = "input_layernorm", [ROLE_Q] = "self_attn.q_proj",                             \
    [ROLE_Q_A] = "self_attn.q_a_proj", [ROLE_KV_A] = "self_attn.kv_a_proj_with_mqa",               \
    [ROLE_Q_A_NORM] = "self_attn.q_a_layernorm", [ROLE_Q_B] = "self_attn.q_b_proj",                \
    [ROLE_KV_A_NORM] = "self_attn.kv_a_layernorm", [ROLE_KV_B] = "self_attn.kv_b_proj",            \
    [ROLE_O] = "self_attn.o_proj", [ROLE_MLP_IN] = "post_attention_layernorm"

#define LATENT_LIKE                                                                                \
    DECODER_NAMES, .eps_key = "rms_norm_eps", .act_key = "hidden_act", .act = "silu",              \
                   .latent = true, .qkv_bias = {"attention_bias", false},                          \
                   .o_bias = {"attention_bias", false}

#define LATENT_MOE_LIKE                                                                            \
    LATENT_LIKE, .intermediate_key = "moe_intermediate_size", .experts = "mlp.experts.",           \
                 .shared = "mlp.shared_experts.", .dense = "mlp.", .grouped_router = true,         \
                 .shared_count_key = "n_shared_experts", .interleaved = true,                      \
                 .tied = {"tie_word_embeddings", false}

#define DEEPSEEK_V3_LIKE DEEPSEEK_V32_LIKE, .interleave_read = true

#define DEEPSEEK_V32_LIKE                                                                          \
    LATENT_MOE_LIKE,                                                                               \
        .parts = {LATENT_PARTS,                                                                    \
                  EXPERT_PARTS, [ROLE_SELECT_BIAS] = "mlp.gate.e_score_correction_bias"},          \
        .sigmoid_router = true, .normalize_routing = {"norm_topk_prob", true}, .shared_count = 1,  \
        .read = config_read_deepseek_v3

#define DELTA_COMMON                                                                               \
    [ROLE_CONV] = "linear_attn.conv1d", [ROLE_A_LOG] = "linear_attn.A_log",                        \
    [ROLE_DT_BIAS] = "linear_attn.dt_bias", [ROLE_DELTA_NORM] = "linear_attn.norm",                \
    [ROLE_DELTA_OUT] = "linear_attn.out_proj"

#define DELTA_PARTS                                                                                \
    DELTA_COMMON,                                                                                  \
        [ROLE_DELTA_QKV] = "linear_attn.in_proj_qkv", [ROLE_DELTA_Z] = "linear_attn.in_proj_z",    \
        [ROLE_DELTA_B] = "linear_attn.in_proj_b", [ROLE_DELTA_A] = "linear_attn.in_proj_a"

#define DELTA_LIKE                                                                                 \
    LLAMA_LIKE, .delta = true, .gated = true, .head_dim = 256, .norms_plus_1 = true,               \
                .partial_rope = true, .rotary_factor = 0.25, .mrope = true,                        \
                .qkv_bias = {"attention_bias", false}, .o_bias = {"attention_bias", false}

#define DELTA_MOE_LIKE                                                                             \
    DELTA_LIKE, .intermediate_key = "moe_intermediate_size", .experts = "mlp.experts.",            \
                .shared = "mlp.shared_expert.", .shared_key = "shared_expert_intermediate_size"

#define COHERE_LIKE                                                                                \
    DECODER_NAMES, .parts = {ATTENTION_PARTS, MLP_PARTS}, .eps_key = "layer_norm_eps",             \
                   .eps = 1e-5, .act_key = "hidden_act", .act = "silu", .norm = QT_NORM_LAYER,     \
                   .norms_unbiased = true, .parallel = {NULL, true}, .interleaved = true,          \
                   .tied = {"tie_word_embeddings", true}, .qkv_bias = {"attention_bias", false},   \
                   .o_bias = {"attention_bias", false}, .read = config_read_cohere

#define GEMMA4_LIKE                                                                                \
    DECODER_NAMES, .eps_key = "rms_norm_eps", .act_key = "hidden_activation",                      \
                   .act = "gelu_pytorch_tanh", .norm = QT_NORM_RMS, .head_dim = 256,               \
                   .kv_heads = 4, .layer_heads = true, .shared_keys = true, .value_norm = true,    \
                   .last_global = true, .rope_needed = true, .theta = 1e6, .local_theta = 1e4,     \
                   .window = WINDOW_PATTERN, .window_period = 6,                                   \
                   .tied = {"tie_word_embeddings", true}, .qkv_bias = {"attention_bias", false},   \
                   .o_bias = {"attention_bias", false}

#define PER_LAYER_PARTS                                                                            \
    [ROLE_PER_LAYER_GATE] = "per_layer_input_gate", [ROLE_PER_LAYER_OUT] = "per_layer_projection", \
    [ROLE_PER_LAYER_NORM] = "post_per_layer_input_norm"

#define GEMMA4_PARTS                                                                               \
    GEMMA_COMMON, [ROLE_Q_NORM] = "self_attn.q_norm", [ROLE_K_NORM] = "self_attn.k_norm",          \
                  [ROLE_LAYER_SCALE] = "layer_scalar", PER_LAYER_PARTS

static const struct arch_alias gemma4_keys[] = {{"num_experts_per_tok", "top_k_experts"}, {0}};

static const struct arch_alias mimo_keys[] = {{"rms_norm_eps", "layernorm_epsilon"}, {0}};

static const struct arch_alias hy_v3_keys[] = {{"n_shared_experts", "num_shared_experts"},
                                               {"routed_scaling_factor", "router_scaling_factor"},
                                               {0}};

static const struct arch_alias sarvam_keys[] = {
    {"n_shared_experts", "num_shared_experts"}, {"attention_bias", "use_qkv_bias"}, {0}};

static const struct arch_alias llama4_keys[] = {
    {"decoder_sparse_step", "interleave_moe_layer_step"}, {0}};

static const struct arch_alias hunyuan_moe_keys[] = {{"num_experts_per_tok", "moe_topk"}, {0}};

static const struct arch_alias exaone_moe_keys[] = {{"n_shared_experts", "num_shared_experts"},
                                                    {0}};

static const struct arch_alias afmoe_keys[] = {{"n_shared_experts", "num_shared_experts"},
                                               {"routed_scaling_factor", "route_scale"},
                                               {"first_k_dense_replace", "num_dense_layers"},
                                               {0}};

#define LFM2_LIKE                                                                                  \
    .layers = "layers.", .embed = "embed_tokens", .final_norm = "embedding_norm", .rope = true,    \
    .kv_heads = 8, .short_conv = true, .eps_key = "norm_eps", .eps = 1e-5, .theta = 1e6,           \
    .act = "silu", .norm = QT_NORM_RMS, .tied = {"tie_word_embeddings", true}

#define LFM2_PARTS                                                                                 \
    [ROLE_ATTN_IN] = "operator_norm", [ROLE_Q] = "self_attn.q_proj",                               \
    [ROLE_K] = "self_attn.k_proj", [ROLE_V] = "self_attn.v_proj", [ROLE_O] = "self_attn.out_proj", \
    [ROLE_Q_NORM] = "self_attn.q_layernorm", [ROLE_K_NORM] = "self_attn.k_layernorm",              \
    [ROLE_SHORT_IN] = "conv.in_proj", [ROLE_SHORT_CONV] = "conv.conv",                             \
    [ROLE_SHORT_OUT] = "conv.out_proj", [ROLE_MLP_IN] = "ffn_norm"

static const struct arch_alias lfm2_keys[] = {{"tie_word_embeddings", "tie_embedding"},
                                              {"intermediate_size", "block_ff_dim"},
                                              {"first_k_dense_replace", "num_dense_layers"},
                                              {0}};

static const struct arch_alias neox_keys[] = {
    {"partial_rotary_factor", "rotary_pct"}, {"rope_theta", "rotary_emb_base"}, {0}};

static const struct arch_alias gpt2_keys[] = {
    {"hidden_size", "n_embd"},         {"num_hidden_layers", "n_layer"},
    {"num_attention_heads", "n_head"}, {"max_position_embeddings", "n_positions"},
    {"intermediate_size", "n_inner"},  {0}};

static const struct arch_alias gpt_neo_keys[] = {
    {"num_hidden_layers", "num_layers"}, {"num_attention_heads", "num_heads"}, {0}};

static const struct arch_alias falcon_keys[] = {
    {"hidden_size", "n_embed"}, {"intermediate_size", "ffn_hidden_size"}, {0}};

static const struct arch_alias bloom_keys[] = {{"hidden_size", "n_embed"},
                                               {"num_hidden_layers", "n_layer"},
                                               {"num_attention_heads", "n_head"},
                                               {"max_position_embeddings", "seq_length"},
                                               {0}};

static const struct arch_alias mpt_keys[] = {{"hidden_size", "d_model"},
                                             {"num_hidden_layers", "n_layers"},
                                             {"num_attention_heads", "n_heads"},
                                             {"max_position_embeddings", "max_seq_len"},
                                             {0}};

static const struct arch_alias baichuan_keys[] = {{"max_position_embeddings", "model_max_length"},
                                                  {0}};

static const struct arch_alias qwen_keys[] = {{"head_dim", "kv_channels"},
                                              {"rope_theta", "rotary_emb_base"},
                                              {"partial_rotary_factor", "rotary_pct"},
                                              {0}};

static const struct arch_alias chatglm_keys[] = {{"num_hidden_layers", "num_layers"},
                                                 {"intermediate_size", "ffn_hidden_size"},
                                                 {"head_dim", "kv_channels"},
                                                 {"max_position_embeddings", "seq_length"},
                                                 {0}};

/* Falcon and BLOOM: QKV by KV heads, and an MLP without gate. */
#define FUSED_UNGATED_PARTS                                                                        \
    [ROLE_ATTN_IN] = "input_layernorm", [ROLE_QKV] = "self_attention.query_key_value",             \
    [ROLE_O] = "self_attention.dense", [ROLE_MLP_IN] = "post_attention_layernorm",                 \
    [ROLE_UP] = "mlp.dense_h_to_4h", [ROLE_DOWN] = "mlp.dense_4h_to_h"

static const struct arch_alias jetmoe_keys[] = {
    {"head_dim", "kv_channels"}, {"hidden_act", "activation_function"}, {0}};

static const struct arch_alias internlm3_keys[] = {
    {"attention_bias", "qkv_bias"}, {"mlp_bias", "bias"}, {0}};

static const struct arch_alias granite4_keys[] = {{"layer_types", "layers_block_type"}, {0}};

#define MAMBA_PARTS                                                                                \
    [ROLE_SSM_IN] = "mamba.in_proj", [ROLE_CONV] = "mamba.conv1d", [ROLE_A_LOG] = "mamba.A_log",   \
    [ROLE_DT_BIAS] = "mamba.dt_bias", [ROLE_SSM_D] = "mamba.D", [ROLE_SSM_NORM] = "mamba.norm",    \
    [ROLE_SSM_OUT] = "mamba.out_proj"

#define BAMBA_LIKE                                                                                 \
    .layers = "layers.", .embed = "embed_tokens", .final_norm = "final_layernorm", .rope = true,   \
    .parts = {ATTENTION_PARTS,                                                                     \
              MAMBA_PARTS,                                                                         \
              [ROLE_MLP_IN] = "pre_ff_layernorm",                                                  \
              [ROLE_GATE] = "feed_forward.gate_proj",                                              \
              [ROLE_UP] = "feed_forward.up_proj",                                                  \
              [ROLE_DOWN] = "feed_forward.down_proj"},                                             \
    .kv_heads = 8, .ssm_bias = {"mamba_proj_bias", false}, .eps_key = "rms_norm_eps", .eps = 1e-5, \
    .act_key = "hidden_act", .act = "silu", .norm = QT_NORM_RMS,                                   \
    .tied = {"tie_word_embeddings", false}, .qkv_bias = {"attention_bias", false},                 \
    .o_bias = {"attention_bias", false}, .mlp_bias = {"mlp_bias", false}

#define BLOCK_LIKE                                                                                 \
    .layers = "layers.", .embed = "embeddings", .final_norm = "norm_f", .ssm = SSM_BLOCKS,         \
    .ssm_groups = 8, .ssm_state = 128, .ssm_dim = 64, .ssm_bias = {"use_bias", false},             \
    .eps_key = "layer_norm_epsilon", .eps = 1e-5, .norm = QT_NORM_RMS,                             \
    .tied = {"tie_word_embeddings", false}

#define BLOCK_PARTS                                                                                \
    [ROLE_ATTN_IN] = "norm", [ROLE_SSM_IN] = "mixer.in_proj", [ROLE_CONV] = "mixer.conv1d",        \
    [ROLE_A_LOG] = "mixer.A_log", [ROLE_DT_BIAS] = "mixer.dt_bias", [ROLE_SSM_D] = "mixer.D",      \
    [ROLE_SSM_NORM] = "mixer.norm", [ROLE_SSM_OUT] = "mixer.out_proj"

#define BLOCK_KEYS                                                                                 \
    {"mamba_n_groups", "n_groups"}, {"mamba_d_conv", "conv_kernel"},                               \
        {"mamba_conv_bias", "use_conv_bias"},                                                      \
    {                                                                                              \
        0                                                                                          \
    }

static const struct arch_alias nemotron_h_keys[] = {
    {"layer_types", "layers_block_type"}, {"mamba_n_heads", "mamba_num_heads"},
    {"mamba_d_head", "mamba_head_dim"},   {"mamba_d_state", "ssm_state_size"},
    {"time_step_min", "mamba_dt_min"},    BLOCK_KEYS};

static const struct arch_alias mamba2_keys[] = {{"mamba_n_heads", "num_heads"},
                                                {"mamba_d_head", "head_dim"},
                                                {"mamba_d_state", "state_size"},
                                                BLOCK_KEYS};

static const struct arch_alias exaone_keys[] = {{"num_hidden_layers", "num_layers"},
                                                {"rms_norm_eps", "layer_norm_epsilon"},
                                                {"hidden_act", "activation_function"},
                                                {0}};

static const struct arch_alias modernbert_keys[] = {{"rope_theta", "global_rope_theta"}, {0}};

/* Encoders whose norms follow the residual adds. */
#define BERT_LIKE                                                                                  \
    .layers = "encoder.layer.", .embed = "embeddings.word_embeddings",                             \
    .positions = "embeddings.position_embeddings", .types = "embeddings.token_type_embeddings",    \
    .embed_norm = "embeddings.LayerNorm", .both_ways = true, .norm = QT_NORM_LAYER,                \
    .parts = {[ROLE_ATTN_IN] = "attention.output.LayerNorm",                                       \
              [ROLE_Q] = "attention.self.query",                                                   \
              [ROLE_K] = "attention.self.key",                                                     \
              [ROLE_V] = "attention.self.value",                                                   \
              [ROLE_O] = "attention.output.dense",                                                 \
              [ROLE_MLP_IN] = "output.LayerNorm",                                                  \
              [ROLE_UP] = "intermediate.dense",                                                    \
              [ROLE_DOWN] = "output.dense"},                                                       \
    .qkv_bias = {NULL, true}, .o_bias = {NULL, true}, .mlp_bias = {NULL, true},                    \
    .act_key = "hidden_act", .act = "gelu", .eps_key = "layer_norm_eps", .eps = 1e-12,             \
    .tied = {"tie_word_embeddings", true}, .read = config_read_bert

#define ROBERTA_LIKE                                                                               \
    BERT_LIKE, .position_offset = 2, .transform = "lm_head.dense",                                 \
               .transform_norm = "lm_head.layer_norm", .head_biases = "lm_head"

static const struct arch table[] = {
    {
        .family = "llama",
        LLAMA_LIKE,
        .parts = {LLAMA_PARTS},
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
        .mlp_bias = {"mlp_bias", false},
    },
    {
        .family = "mistral",
        .kv_heads = 8,
        LLAMA_LIKE,
        .parts = {LLAMA_PARTS},
        .window = WINDOW_ALL,
    },
    {
        .family = "ministral",
        .kv_heads = 8,
        LLAMA_LIKE,
        .parts = {LLAMA_PARTS},
        .window = WINDOW_LISTED,
    },
    /* The names of the first Yi checkpoints; later ones are "llama". */
    {
        .family = "Yi",
        LLAMA_LIKE,
        .parts = {ATTENTION_WITHOUT_NORM, MLP_PARTS, [ROLE_ATTN_IN] = "ln1", [ROLE_MLP_IN] = "ln2"},
    },
    {
        .family = "internlm2",
        .layers = "layers.",
        .embed = "tok_embeddings",
        .final_norm = "norm",
        .head = "output",
        .rope = true,
        .parts = {[ROLE_ATTN_IN] = "attention_norm",
                  [ROLE_QKV] = "attention.wqkv",
                  [ROLE_O] = "attention.wo",
                  [ROLE_MLP_IN] = "ffn_norm",
                  [ROLE_GATE] = "feed_forward.w1",
                  [ROLE_UP] = "feed_forward.w3",
                  [ROLE_DOWN] = "feed_forward.w2"},
        .grouped_qkv = true,
        .eps_key = "rms_norm_eps",
        .act_key = "hidden_act",
        .act = "silu",
        .norm = QT_NORM_RMS,
        .qkv_bias = {"bias", true},
        .o_bias = {"bias", true},
        .tied = {"tie_word_embeddings", false},
    },
    {
        .family = "internlm3",
        .kv_heads = 2,
        .head_dim = 128,
        .aliases = internlm3_keys,
        LLAMA_LIKE,
        .parts = {LLAMA_PARTS},
        .eps = 1e-5,
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"mlp_bias", false},
        .mlp_bias = {"mlp_bias", false},
    },
    {
        .family = "exaone",
        .kv_heads = 8,
        .aliases = exaone_keys,
        .layers = "h.",
        .embed = "wte",
        .final_norm = "ln_f",
        .parts = {[ROLE_ATTN_IN] = "ln_1",
                  [ROLE_Q] = "attn.attention.q_proj",
                  [ROLE_K] = "attn.attention.k_proj",
                  [ROLE_V] = "attn.attention.v_proj",
                  [ROLE_O] = "attn.attention.out_proj",
                  [ROLE_MLP_IN] = "ln_2",
                  [ROLE_GATE] = "mlp.c_fc_0",
                  [ROLE_UP] = "mlp.c_fc_1",
                  [ROLE_DOWN] = "mlp.c_proj"},
        .eps_key = "rms_norm_eps",
        .eps = 1e-5,
        .act_key = "hidden_act",
        .act = "silu",
        .tied = {"tie_word_embeddings", false},
        .rope = true,
        .theta = 5e5,
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
        .mlp_bias = {"mlp_bias", false},
    },
    {
        .family = "cwm",
        .kv_heads = 8,
        .head_dim = 128,
        LLAMA_LIKE,
        .parts = {LLAMA_PARTS},
        .eps = 1e-5,
        .theta = 1e6,
        .rope_needed = true,
        .window = WINDOW_PATTERN_FIRST,
        .window_period = 4,
        .window_size = 8192,
    },
    {
        .family = "iquestcoder",
        .kv_heads = 8,
        .head_dim = 128,
        LLAMA_LIKE,
        .parts = {LLAMA_PARTS},
        .eps = 1e-5,
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
        .mlp_bias = {"mlp_bias", false},
        .read = config_read_iquestcoder,
    },
    {
        .family = "hunyuan_v1_dense",
        LLAMA_LIKE,
        .parts = {LLAMA_PARTS, [ROLE_Q_NORM] = "self_attn.query_layernorm",
                  [ROLE_K_NORM] = "self_attn.key_layernorm"},
        .norms_after_rope = true,
        .rope_alpha = true,
        .eps = 1e-5,
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
    },
    {
        .family = "arcee",
        RELU2_LIKE,
        .parts = {UNGATED_PARTS},
        .eps_key = "rms_norm_eps",
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
        .mlp_bias = {"mlp_bias", false},
    },
    {
        .family = "jais2",
        RELU2_LIKE,
        .parts = {UNGATED_PARTS},
        .eps_key = "layer_norm_eps",
        .norm = QT_NORM_LAYER,
        .qkv_bias = {"attention_bias", true},
        .o_bias = {"attention_bias", true},
        .mlp_bias = {"mlp_bias", true},
    },
    {
        .family = "nemotron",
        RELU2_LIKE,
        .parts = {UNGATED_PARTS},
        .eps_key = "norm_eps",
        .norm = QT_NORM_LAYER,
        .norms_plus_1 = true,
        .partial_rope = true,
        .rotary_factor = 0.5,
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
        .mlp_bias = {"mlp_bias", false},
    },
    {
        .family = "ministral3",
        .kv_heads = 8,
        .head_dim = 128,
        LLAMA_LIKE,
        .parts = {LLAMA_PARTS},
        .eps = 1e-5,
        .window = WINDOW_ALL,
        .window_given = true,
        .query_steps = true,
    },
    {
        .family = "qwen2",
        LLAMA_LIKE,
        .parts = {LLAMA_PARTS},
        .qkv_bias = {NULL, true},
        .window = WINDOW_FROM_LAYER,
        .window_switch = true,
    },
    {
        .family = "qwen2_vl_text",
        .kv_heads = 8,
        LLAMA_LIKE,
        .parts = {LLAMA_PARTS},
        .eps = 1e-5,
        .theta = 1e6,
        .mrope = true,
        .qkv_bias = {NULL, true},
        .window = WINDOW_FROM_LAYER,
        .window_switch = true,
        .window_from = 80,
    },
    {
        .family = "qwen2_5_omni_text",
        .kv_heads = 4,
        LLAMA_LIKE,
        .parts = {LLAMA_PARTS},
        .theta = 1e6,
        .mrope = true,
        .qkv_bias = {NULL, true},
        .window = WINDOW_FROM_LAYER,
        .window_switch = true,
        .window_size = 32768,
    },
    {
        .family = "qwen2_5_vl_text",
        .kv_heads = 8,
        LLAMA_LIKE,
        .parts = {LLAMA_PARTS},
        .eps = 1e-5,
        .theta = 1e6,
        .mrope = true,
        .qkv_bias = {NULL, true},
        .window = WINDOW_FROM_LAYER,
        .window_switch = true,
        .window_from = 80,
    },
    {
        .family = "qwen3",
        .head_dim = 128,
        LLAMA_LIKE,
        .parts = {QWEN3_PARTS},
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
        .window = WINDOW_FROM_LAYER,
        .window_switch = true,
    },
    {
        .family = "qwen3_vl_text",
        .head_dim = 128,
        LLAMA_LIKE,
        .parts = {QWEN3_PARTS},
        .theta = 5e5,
        .mrope = true,
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
    },
    {
        .family = "qwen3_moe",
        LLAMA_LIKE,
        .intermediate_key = "moe_intermediate_size",
        .parts = {QWEN3_MOE_PARTS},
        .experts = "mlp.experts.",
        .dense = "mlp.",
        .normalize_routing = {"norm_topk_prob", false},
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
        .window = WINDOW_ALL,
        .window_switch = true,
    },
    {
        .family = "mellum",
        .kv_heads = 4,
        .head_dim = 128,
        LLAMA_LIKE,
        .intermediate_key = "moe_intermediate_size",
        .parts = {QWEN3_MOE_PARTS},
        .experts = "mlp.experts.",
        .dense = "mlp.",
        .mlp_types = true,
        .normalize_routing = {"norm_topk_prob", true},
        .theta = 5e5,
        .local_theta = 1e4,
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
        .window = WINDOW_FROM_LAYER,
        .window_from = CONFIG_LAYERS, /* only layer_types gives layers a window */
        .window_size = 1024,
    },
    {
        .family = "qwen2_moe",
        LLAMA_LIKE,
        .intermediate_key = "moe_intermediate_size",
        .parts = {ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",
                  EXPERT_PARTS, [ROLE_SHARED_GATE] = "mlp.shared_expert_gate"},
        .experts = "mlp.experts.",
        .shared = "mlp.shared_expert.",
        .shared_key = "shared_expert_intermediate_size",
        .dense = "mlp.",
        .normalize_routing = {"norm_topk_prob", false},
        .qkv_bias = {"qkv_bias", true},
        .window = WINDOW_EVEN_TO_LAYER,
        .window_switch = true,
    },
    {
        .family = "qwen3_omni_moe_text",
        .kv_heads = 4,
        LLAMA_LIKE,
        .intermediate_key = "moe_intermediate_size",
        .parts = {QWEN3_MOE_PARTS},
        .theta = 1e6,
        .mrope = true,
        .experts = "mlp.experts.",
        .dense = "mlp.",
        .normalize_routing = {"norm_topk_prob", true},
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
    },
    {
        .family = "glm4_moe",
        GLM_MOE_LIKE,
        .parts = {QWEN3_MOE_PARTS, [ROLE_SELECT_BIAS] = "mlp.gate.e_score_correction_bias"},
        .dense = "mlp.",
        .shared_count = 1,
        .first_dense = 1,
        .head_norms_key = "use_qk_norm",
        .partial_rope = true,
        .rotary_factor = 0.5,
        .eps = 1e-5,
        .normalize_routing = {"norm_topk_prob", true},
        .qkv_bias = {"attention_bias", false},
    },
    {
        .family = "hy_v3",
        .kv_heads = 8,
        .head_dim = 128,
        .aliases = hy_v3_keys,
        LLAMA_LIKE,
        .intermediate_key = "moe_intermediate_size",
        .parts = {QWEN3_ATTENTION, [ROLE_MLP_IN] = "post_attention_layernorm",
                  [ROLE_ROUTER] = "mlp.router.gate", [ROLE_SELECT_BIAS] = "mlp.expert_bias",
                  [ROLE_GATE] = "gate_proj", [ROLE_UP] = "up_proj", [ROLE_DOWN] = "down_proj"},
        .experts = "mlp.experts.",
        .shared = "mlp.shared_mlp.",
        .dense = "mlp.",
        .shared_count_key = "n_shared_experts",
        .shared_count = 1,
        .first_dense = 1,
        .mlp_types = true,
        .sigmoid_router = true,
        .grouped_router = true,
        .routing_scale = 2.826,
        .normalize_routing = {NULL, true},
        .eps = 1e-5,
        .theta = 11158840,
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
        .read = config_read_hy_v3,
    },
    {
        .family = "sarvam_moe",
        .kv_heads = 4,
        .head_dim = 64,
        .aliases = sarvam_keys,
        .layers = "layers.",
        .embed = "word_embeddings",
        .final_norm = "norm",
        .rope = true,
        .parts = {[ROLE_ATTN_IN] = "input_layernorm",
                  [ROLE_QKV] = "attention.query_key_value",
                  [ROLE_O] = "attention.dense",
                  [ROLE_Q_NORM] = "attention.query_layernorm",
                  [ROLE_K_NORM] = "attention.key_layernorm",
                  [ROLE_MLP_IN] = "post_attention_layernorm",
                  EXPERT_PARTS,
                  [ROLE_SELECT_BIAS] = "mlp.gate.expert_bias"},
        .intermediate_key = "moe_intermediate_size",
        .experts = "mlp.experts.",
        .shared = "mlp.shared_experts.",
        .dense = "mlp.",
        .shared_count_key = "n_shared_experts",
        .shared_count = 1,
        .first_dense = 1,
        .sigmoid_router = true,
        .grouped_router = true,
        .routing_scale = 2.5,
        .normalize_routing = {"norm_topk_prob", true},
        .eps_key = "rms_norm_eps",
        .act_key = "hidden_act",
        .act = "silu",
        .norm = QT_NORM_RMS,
        .theta = 8e6,
        .partial_rope = true,
        .tied = {"tie_word_embeddings", false},
        .qkv_bias = {"attention_bias", false},
        .read = config_read_sarvam_moe,
    },
    {
        .family = "glm4v_moe_text",
        .kv_heads = 8,
        GLM_MOE_LIKE,
        .parts = {ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",
                  EXPERT_PARTS, [ROLE_SELECT_BIAS] = "mlp.gate.e_score_correction_bias"},
        .dense = "mlp.",
        .shared_count = 1,
        .first_dense = 1,
        .partial_rope = true,
        .rotary_factor = 0.5,
        .mrope = true,
        .qkv_bias = {"attention_bias", true},
        .eps = 1e-5,
        .normalize_routing = {"norm_topk_prob", true},
    },
    {
        .family = "solar_open",
        .kv_heads = 8,
        .head_dim = 128,
        GLM_MOE_LIKE,
        .parts = {ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",
                  EXPERT_PARTS, [ROLE_SELECT_BIAS] = "mlp.gate.e_score_correction_bias"},
        .shared_count = 1,
        .theta = 1e6,
        .eps = 1e-5,
        .normalize_routing = {"norm_topk_prob", true},
        .qkv_bias = {"attention_bias", false},
    },
    {
        .family = "gpt_oss",
        .kv_heads = 8,
        .head_dim = 64,
        LLAMA_LIKE,
        .parts = {ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",
                  [ROLE_SINKS] = "self_attn.sinks", [ROLE_ROUTER] = "mlp.router",
                  [ROLE_GATE] = "gate_proj", [ROLE_UP] = "up_proj", [ROLE_DOWN] = "down_proj"},
        .experts = "mlp.experts.",
        .normalize_routing = {NULL, true},
        .router_bias = true,
        .eps = 1e-5,
        .rope_needed = true,
        .theta = 150000,
        .qkv_bias = {"attention_bias", true},
        .o_bias = {"attention_bias", true},
        .mlp_bias = {NULL, true},
        .window = WINDOW_EVEN,
        .window_size = 128,
        .read = config_read_gpt_oss,
    },
    {
        .family = "granite_swa",
        LLAMA_COMMON,
        .kv_heads = 4,
        .parts = {LLAMA_PARTS, [ROLE_SINKS] = "self_attn.sinks"},
        .tied = {"tie_word_embeddings", true},
        .eps = 1e-5,
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
        .mlp_bias = {"mlp_bias", false},
        .window = WINDOW_PATTERN_FIRST,
        .window_period = 4,
        .window_size = 128,
        .read = config_read_granite_swa,
    },
    {
        .family = "qwen3_next",
        .kv_heads = 2,
        DELTA_MOE_LIKE,
        .parts = {QWEN3_MOE_PARTS, DELTA_COMMON, [ROLE_DELTA_QKVZ] = "linear_attn.in_proj_qkvz",
                  [ROLE_DELTA_BA] = "linear_attn.in_proj_ba",
                  [ROLE_SHARED_GATE] = "mlp.shared_expert_gate"},
        .dense = "mlp.",
        .normalize_routing = {"norm_topk_prob", true},
    },
    {
        .family = "qwen3_5_text",
        .kv_heads = 4,
        DELTA_LIKE,
        .parts = {QWEN3_PARTS, DELTA_PARTS},
    },
    {
        .family = "qwen3_5_moe_text",
        .kv_heads = 2,
        DELTA_MOE_LIKE,
        .parts = {QWEN3_MOE_PARTS, DELTA_PARTS, [ROLE_SHARED_GATE] = "mlp.shared_expert_gate"},
        .normalize_routing = {NULL, true},
    },
    {
        .family = "qwen3_vl_moe_text",
        .kv_heads = 16,
        LLAMA_LIKE,
        .intermediate_key = "moe_intermediate_size",
        .parts = {QWEN3_MOE_PARTS},
        .theta = 5e5,
        .mrope = true,
        .experts = "mlp.experts.",
        .dense = "mlp.",
        .normalize_routing = {NULL, true},
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
    },
    {
        .family = "deepseek_v2",
        LATENT_MOE_LIKE,
        .parts = {LATENT_PARTS, EXPERT_PARTS},
        .value_dim = 128,
        .shared_count = 2,
        .group_best = true,
        .read = config_read_deepseek_v2,
    },
    {
        .family = "deepseek_v3",
        DEEPSEEK_V3_LIKE,
        .value_dim = 128,
        .first_dense = 3,
        .groups = 8,
        .top_groups = 4,
        .routing_scale = 2.5,
    },
    /* Sparse attention over index_topk tokens: shorter sequences are dense. */
    {
        .family = "deepseek_v32",
        DEEPSEEK_V32_LIKE,
        .value_dim = 128,
        .mlp_types = true,
        .first_dense = 3,
        .groups = 8,
        .top_groups = 4,
        .routing_scale = 2.5,
        .positions_key = "index_topk",
        .positions_most = 2048,
    },
    {
        .family = "glm_moe_dsa",
        DEEPSEEK_V32_LIKE,
        .value_dim = 256,
        .eps = 1e-5,
        .mlp_types = true,
        .first_dense = 3,
        .routing_scale = 2.5,
        .positions_key = "index_topk",
        .positions_most = 2048,
    },
    {
        .family = "glm4_moe_lite",
        DEEPSEEK_V3_LIKE,
        .value_dim = 256,
        .eps = 1e-5,
        .mlp_types = true,
        .first_dense = 1,
        .routing_scale = 1.8,
    },
    {
        .family = "sarvam_mla",
        .aliases = sarvam_keys,
        DEEPSEEK_V3_LIKE,
        .value_dim = 128,
        .first_dense = 1,
        .routing_scale = 2.5,
    },
    {
        .family = "mistral4",
        LATENT_MOE_LIKE,
        .parts = {LATENT_PARTS, EXPERT_PARTS},
        .value_dim = 128,
        .shared_count = 1,
        .normalize_routing = {"norm_topk_prob", true},
        .interleave_read = true,
        .partial_rope = true,
        .rope_needed = true,
        .query_steps = true,
    },
    {
        .family = "youtu",
        LATENT_LIKE,
        .parts = {LATENT_PARTS, MLP_PARTS},
        .value_dim = 128,
        .interleaved = true,
        .interleave_read = true,
        .tied = {"tie_word_embeddings", true},
    },
    {
        .family = "minicpm3",
        LATENT_LIKE,
        .parts = {LATENT_PARTS, MLP_PARTS},
        .eps = 1e-5,
        .tied = {"tie_word_embeddings", true},
        .read = config_read_minicpm3,
    },
    {
        .family = "dots1",
        .kv_heads = 32,
        GLM_MOE_LIKE,
        .parts = {QWEN3_MOE_PARTS, [ROLE_SELECT_BIAS] = "mlp.gate.e_score_correction_bias"},
        .dense = "mlp.",
        .normalize_routing = {"norm_topk_prob", false},
        .eps = 1e-6,
        .o_bias = {"attention_bias", false},
        .window = WINDOW_FROM_LAYER,
        .window_from = 62,
        .qkv_bias = {"attention_bias", false},
    },
    {
        .family = "olmoe",
        LLAMA_LIKE,
        .parts = {QWEN3_MOE_PARTS},
        .norms_of_all_heads = true,
        .experts = "mlp.experts.",
        .normalize_routing = {"norm_topk_prob", false},
        .eps = 1e-5,
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
    },
    {
        .family = "flex_olmo",
        LLAMA_LIKE,
        .parts = {ATTENTION_WITHOUT_NORM,
                  EXPERT_PARTS, [ROLE_ATTN_OUT] = "post_attention_layernorm",
                  [ROLE_MLP_OUT] = "post_feedforward_layernorm", [ROLE_Q_NORM] = "self_attn.q_norm",
                  [ROLE_K_NORM] = "self_attn.k_norm"},
        .norms_of_all_heads = true,
        .experts = "mlp.experts.",
        .normalize_routing = {"norm_topk_prob", false},
        .theta = 5e5,
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
    },
    {
        .family = "mixtral",
        LLAMA_LIKE,
        .parts = {ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",
                  [ROLE_ROUTER] = "block_sparse_moe.gate", [ROLE_GATE] = "w1", [ROLE_UP] = "w3",
                  [ROLE_DOWN] = "w2"},
        .experts = "block_sparse_moe.experts.",
        .eps = 1e-5,
        .theta = 1e6,
        .normalize_routing = {NULL, true},
        .window = WINDOW_ALL,
        .window_given = true,
    },
    {
        .family = "minimax_m2",
        .kv_heads = 8,
        .head_dim = 128,
        LLAMA_LIKE,
        .parts = {ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",
                  [ROLE_Q_NORM] = "self_attn.q_norm", [ROLE_K_NORM] = "self_attn.k_norm",
                  [ROLE_ROUTER] = "block_sparse_moe.gate",
                  [ROLE_SELECT_BIAS] = "block_sparse_moe.e_score_correction_bias",
                  [ROLE_GATE] = "w1", [ROLE_UP] = "w3", [ROLE_DOWN] = "w2"},
        .norms_of_all_heads = true,
        .theta = 5e6,
        .experts = "block_sparse_moe.experts.",
        .sigmoid_router = true,
        .normalize_routing = {NULL, true},
        .partial_rope = true,
        .rotary_read = true,
        .read = config_read_minimax_m2,
    },
    {
        .family = "minimax_m3_vl_text",
        DECODER_NAMES,
        .parts = {QWEN3_ATTENTION, [ROLE_MLP_IN] = "post_attention_layernorm",
                  [ROLE_ROUTER] = "block_sparse_moe.gate",
                  [ROLE_SELECT_BIAS] = "block_sparse_moe.e_score_correction_bias",
                  [ROLE_GATE] = "gate_proj", [ROLE_UP] = "up_proj", [ROLE_DOWN] = "down_proj"},
        .routed_parts = {[ROLE_GATE - ROLE_GATE_UP] = "w1",
                         [ROLE_UP - ROLE_GATE_UP] = "w3",
                         [ROLE_DOWN - ROLE_GATE_UP] = "w2"},
        .kv_heads = 4,
        .head_dim = 128,
        .experts = "block_sparse_moe.experts.",
        .shared = "block_sparse_moe.shared_experts.",
        .shared_key = "shared_intermediate_size",
        .dense = "mlp.",
        .dense_key = "dense_intermediate_size",
        .mlp_types = true,
        .sigmoid_router = true,
        .grouped_router = true,
        .routing_scale = 2,
        .normalize_routing = {NULL, true},
        .eps_key = "rms_norm_eps",
        .act = "silu",
        .norm = QT_NORM_RMS,
        .norms_plus_1 = true,
        .theta = 5e6,
        .partial_rope = true,
        .tied = {"tie_word_embeddings", false},
        .sparse_type = "minimax_m3_sparse",
        .adapt = config_adapt_minimax_m3,
        .read = config_read_minimax_m3,
    },
    {
        .family = "granitemoe",
        LLAMA_LIKE,
        .parts = {ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",
                  [ROLE_ROUTER] = "block_sparse_moe.router.layer", [ROLE_GATE] = "gate_proj",
                  [ROLE_UP] = "up_proj", [ROLE_DOWN] = "down_proj"},
        .experts = "block_sparse_moe.experts.",
        .normalize_routing = {NULL, true},
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
        .read = config_read_multipliers,
    },
    {
        .family = "jetmoe",
        .aliases = jetmoe_keys,
        LLAMA_COMMON,
        .vocab = 32000,
        .max_positions = 4096,
        .kv_heads = 16,
        .head_dim = 128,
        .parts = {[ROLE_ATTN_IN] = "input_layernorm",
                  [ROLE_QKV] = "self_attention.kv_proj",
                  [ROLE_HEADS_ROUTER] = "self_attention.experts.router.layer",
                  [ROLE_HEADS_BIAS] = "self_attention.experts.bias",
                  [ROLE_EXPERT_Q] = "q_proj",
                  [ROLE_EXPERT_O] = "o_proj",
                  [ROLE_MLP_IN] = "post_attention_layernorm",
                  [ROLE_ROUTER] = "mlp.router.layer",
                  [ROLE_EXPERTS_BIAS] = "mlp.bias",
                  [ROLE_GATE] = "gate_proj",
                  [ROLE_UP] = "up_proj",
                  [ROLE_DOWN] = "down_proj"},
        .experts = "mlp.experts.",
        .head_experts = "self_attention.experts.",
        .normalize_routing = {NULL, true},
        .tied = {"tie_word_embeddings", true},
        .layer_eps = 1e-6f,
        .adapt = config_adapt_jetmoe,
    },
    {
        .family = "granitemoeshared",
        LLAMA_LIKE,
        .parts = {ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",
                  [ROLE_ROUTER] = "block_sparse_moe.router.layer", [ROLE_GATE] = "gate_proj",
                  [ROLE_UP] = "up_proj", [ROLE_DOWN] = "down_proj"},
        .experts = "block_sparse_moe.experts.",
        .shared = "shared_mlp.",
        .shared_gate_up = "input_linear",
        .shared_down = "output_linear",
        .shared_key = "shared_intermediate_size",
        .shared_optional = true,
        .normalize_routing = {NULL, true},
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
        .read = config_read_multipliers,
    },
    {
        .family = "granitemoe_swa",
        LLAMA_COMMON,
        .parts =
            {ATTENTION_PARTS, [ROLE_SINKS] = "self_attn.sinks",
             [ROLE_MLP_IN] = "post_attention_layernorm", [ROLE_ROUTER] = "block_sparse_moe.router",
             [ROLE_GATE] = "gate_proj", [ROLE_UP] = "up_proj", [ROLE_DOWN] = "down_proj"},
        .experts = "block_sparse_moe.experts.",
        .shared = "shared_mlp.",
        .shared_gate_up = "input_linear",
        .shared_down = "output_linear",
        .shared_key = "shared_intermediate_size",
        .shared_optional = true,
        .normalize_routing = {NULL, true},
        .tied = {"tie_word_embeddings", false},
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
        .window = WINDOW_PATTERN_FIRST,
        .window_period = 4,
        .window_size = 128,
        .read = config_read_granite_swa,
    },
    {
        .family = "phimoe",
        .kv_heads = 8,
        DECODER_NAMES,
        .eps_key = "rms_norm_eps",
        .act_key = "hidden_act",
        .act = "silu",
        .norm = QT_NORM_LAYER,
        .tied = {"tie_word_embeddings", false},
        .parts = {ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",
                  [ROLE_ROUTER] = "block_sparse_moe.gate", [ROLE_GATE] = "w1", [ROLE_UP] = "w3",
                  [ROLE_DOWN] = "w2"},
        .experts = "block_sparse_moe.experts.",
        .sparse_mixer = true,
        .rope_mscale = true,
        .eps = 1e-5,
        .theta = 1e6,
        .head_bias = {"lm_head_bias", false},
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
        .window = WINDOW_ALL,
        .window_given = true,
        .read = config_read_phimoe,
    },
    {
        .family = "hunyuan_v1_moe",
        .aliases = hunyuan_moe_keys,
        LLAMA_LIKE,
        .parts = {ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",
                  [ROLE_Q_NORM] = "self_attn.query_layernorm",
                  [ROLE_K_NORM] = "self_attn.key_layernorm", [ROLE_ROUTER] = "mlp.gate.wg",
                  [ROLE_GATE] = "gate_proj", [ROLE_UP] = "up_proj", [ROLE_DOWN] = "down_proj"},
        .norms_after_rope = true,
        .rope_alpha = true,
        .experts = "mlp.experts.",
        .shared = "mlp.shared_mlp.",
        .shared_key = "intermediate_size",
        .normalize_routing = {NULL, true},
        .eps = 1e-5,
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
    },
    {
        .family = "exaone_moe",
        .kv_heads = 32,
        .aliases = exaone_moe_keys,
        GLM_MOE_LIKE,
        .parts = {QWEN3_MOE_PARTS, [ROLE_SELECT_BIAS] = "mlp.e_score_correction_bias"},
        .dense = "mlp.",
        .shared_count = 1,
        .first_dense = 1,
        .mlp_types = true,
        .routing_scale = 2.5,
        .normalize_routing = {"norm_topk_prob", true},
        .eps = 1e-5,
        .window = WINDOW_PATTERN,
        .window_period_key = "sliding_window_pattern",
        .window_period = 4,
        .window_optional = true,
        .no_rope = NO_ROPE_GLOBAL,
    },
    {
        .family = "afmoe",
        .head_dim = 128,
        .aliases = afmoe_keys,
        GLM_MOE_LIKE,
        .parts = {QWEN3_ATTENTION, [ROLE_ATTN_GATE] = "self_attn.gate_proj",
                  [ROLE_ATTN_OUT] = "post_attention_layernorm", [ROLE_MLP_IN] = "pre_mlp_layernorm",
                  [ROLE_MLP_OUT] = "post_mlp_layernorm", [ROLE_ROUTER] = "mlp.router.gate",
                  [ROLE_SELECT_BIAS] = "mlp.expert_bias", [ROLE_GATE] = "gate_proj",
                  [ROLE_UP] = "up_proj", [ROLE_DOWN] = "down_proj"},
        .dense = "mlp.",
        .shared_count = 2,
        .first_dense = 1,
        .normalize_routing = {NULL, true},
        .eps = 1e-5,
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
        .window = WINDOW_PATTERN,
        .window_period_key = "global_attn_every_n_layers",
        .window_period = 4,
        .window_size = 1024,
        .no_rope = NO_ROPE_GLOBAL,
        .read = config_read_afmoe,
    },
    {
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
        .adapt = config_adapt_mimo,
        .read = config_read_mimo,
    },
    {
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
        .bare_norms = true,
        .query_floors = true,
        .eps = 1e-5,
        .theta = 5e5,
        .interleaved = true,
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
        .no_rope = NO_ROPE_LISTED,
        .chunked = true,
        .read = config_read_llama4,
    },
    {
        .family = "lfm2",
        .aliases = lfm2_keys,
        LFM2_LIKE,
        .parts = {LFM2_PARTS, [ROLE_GATE] = "feed_forward.w1", [ROLE_UP] = "feed_forward.w3",
                  [ROLE_DOWN] = "feed_forward.w2"},
        .read = config_read_lfm2,
    },
    {
        .family = "lfm2_moe",
        .aliases = lfm2_keys,
        LFM2_LIKE,
        .parts = {LFM2_PARTS, [ROLE_ROUTER] = "feed_forward.gate",
                  [ROLE_SELECT_BIAS] = "feed_forward.expert_bias", [ROLE_GATE] = "w1",
                  [ROLE_UP] = "w3", [ROLE_DOWN] = "w2"},
        .intermediate_key = "moe_intermediate_size",
        .experts = "feed_forward.experts.",
        .dense = "feed_forward.",
        .sigmoid_router = true,
        .grouped_router = true,
        .first_dense = 2,
        .routing_eps = 1e-6,
        .normalize_routing = {"norm_topk_prob", true},
        .read = config_read_lfm2_moe,
    },
    {
        .family = "seed_oss",
        .kv_heads = 8,
        .head_dim = 128,
        LLAMA_LIKE,
        .parts = {LLAMA_PARTS},
        .qkv_bias = {"attention_bias", true},
        .o_bias = {"attention_out_bias", false},
        .mlp_bias = {"mlp_bias", false},
    },
    {
        .family = "starcoder2",
        .kv_heads = 2,
        DECODER_NAMES,
        .parts = {ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",
                  [ROLE_UP] = "mlp.c_fc", [ROLE_DOWN] = "mlp.c_proj"},
        .eps_key = "norm_epsilon",
        .eps = 1e-5,
        .act_key = "hidden_act",
        .act = "gelu_pytorch_tanh",
        .norm = QT_NORM_LAYER,
        .qkv_bias = {"use_bias", true},
        .o_bias = {"use_bias", true},
        .mlp_bias = {"use_bias", true},
        .tied = {"tie_word_embeddings", true},
        .window = WINDOW_ALL,
        .window_given = true,
    },
    {
        .family = "granite",
        LLAMA_LIKE,
        .parts = {LLAMA_PARTS},
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
        .mlp_bias = {"mlp_bias", false},
        .read = config_read_multipliers,
    },
    {
        .family = "granitemoehybrid",
        LLAMA_LIKE,
        .aliases = granite4_keys,
        .parts = {ATTENTION_PARTS, MAMBA_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",
                  [ROLE_ROUTER] = "block_sparse_moe.router.layer", [ROLE_GATE] = "gate_proj",
                  [ROLE_UP] = "up_proj", [ROLE_DOWN] = "down_proj"},
        .ssm = SSM_TYPES,
        .ssm_bias = {"mamba_proj_bias", false},
        .experts = "block_sparse_moe.experts.",
        .experts_optional = true,
        .shared = "shared_mlp.",
        .shared_gate_up = "input_linear",
        .shared_down = "output_linear",
        .shared_key = "shared_intermediate_size",
        .dense = "shared_mlp.",
        .dense_key = "shared_intermediate_size",
        .dense_is_shared = true,
        .normalize_routing = {NULL, true},
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
        .read = config_read_granite4,
    },
    {
        .family = "bamba",
        BAMBA_LIKE,
        .ssm = SSM_UNLISTED,
        .partial_rope = true,
        .rotary_factor = 0.5,
    },
    {
        .family = "falcon_h1",
        BAMBA_LIKE,
        .ssm = SSM_BESIDE,
        .read = config_read_falcon_h1,
    },
    {
        .family = "nemotron_h",
        .aliases = nemotron_h_keys,
        .kv_heads = 8,
        .head_dim = 128,
        BLOCK_LIKE,
        .parts = {BLOCK_PARTS, [ROLE_Q] = "mixer.q_proj", [ROLE_K] = "mixer.k_proj",
                  [ROLE_V] = "mixer.v_proj", [ROLE_O] = "mixer.o_proj", [ROLE_MLP_IN] = "norm",
                  [ROLE_ROUTER] = "mixer.gate",
                  [ROLE_SELECT_BIAS] = "mixer.gate.e_score_correction_bias", [ROLE_UP] = "up_proj",
                  [ROLE_DOWN] = "down_proj"},
        .ssm_step_min = true,
        .intermediate_key = "moe_intermediate_size",
        .experts = "mixer.experts.",
        .shared = "mixer.shared_experts.",
        .shared_key = "moe_shared_expert_intermediate_size",
        .dense = "mixer.",
        .sigmoid_router = true,
        .grouped_router = true,
        .normalize_routing = {"norm_topk_prob", true},
        .act_key = "mlp_hidden_act",
        .act = "relu2",
        .mlp_bias = {"mlp_bias", false},
        .read = config_read_nemotron_h,
    },
    {
        .family = "mamba2",
        .aliases = mamba2_keys,
        .heads = 1,
        .max_positions = CONFIG_POSITIONS, /* there is no limit */
        BLOCK_LIKE,
        .parts = {BLOCK_PARTS},
        .act_key = "hidden_act",
        .act = "silu",
    },
    {
        .family = "smollm3",
        .kv_heads = 4,
        LLAMA_COMMON,
        .parts = {LLAMA_PARTS},
        .theta = 2e6,
        .tied = {"tie_word_embeddings", true},
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
        .mlp_bias = {"mlp_bias", false},
        .no_rope = NO_ROPE_LISTED,
    },
    {
        .family = "olmo2",
        LLAMA_LIKE,
        .parts = {POST_NORM_PARTS},
        .norms_of_all_heads = true,
        .eps = 1e-5,
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
    },
    {
        .family = "olmo3",
        LLAMA_LIKE,
        .parts = {POST_NORM_PARTS},
        .norms_of_all_heads = true,
        .eps = 1e-5,
        .theta = 5e5,
        .local_theta = 5e5,
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
        .window = WINDOW_PATTERN,
        .window_period = 4,
    },
    {
        .family = "exaone4",
        .kv_heads = 32,
        LLAMA_LIKE,
        .parts = {POST_NORM_PARTS},
        .eps = 1e-5,
        .window = WINDOW_PATTERN,
        .window_period_key = "sliding_window_pattern",
        .window_period = 4,
        .window_optional = true,
        .no_rope = NO_ROPE_GLOBAL,
    },
    {
        .family = "glm",
        GLM_LIKE,
        .parts = {GLM_PARTS},
    },
    {
        .family = "glm4",
        GLM_LIKE,
        .parts = {GLM_PARTS, [ROLE_ATTN_OUT] = "post_self_attn_layernorm",
                  [ROLE_MLP_OUT] = "post_mlp_layernorm"},
    },
    {
        .family = "glm4v_text",
        .kv_heads = 2,
        LLAMA_LIKE,
        .parts = {GLM_PARTS, [ROLE_ATTN_OUT] = "post_self_attn_layernorm",
                  [ROLE_MLP_OUT] = "post_mlp_layernorm"},
        .eps = 1e-5,
        .partial_rope = true,
        .interleaved = true,
        .mrope = true,
        .qkv_bias = {NULL, true},
    },
    {
        .family = "ernie4_5",
        .kv_heads = 2,
        .head_dim = 128,
        LLAMA_COMMON,
        .parts = {LLAMA_PARTS},
        .eps = 1e-5,
        .theta = 5e5,
        .interleaved = true,
        .tied = {"tie_word_embeddings", true},
        .qkv_bias = {"use_bias", false},
        .o_bias = {"use_bias", false},
        .mlp_bias = {"use_bias", false},
    },
    {
        .family = "ernie4_5_moe",
        .kv_heads = 4,
        LLAMA_COMMON,
        .intermediate_key = "moe_intermediate_size",
        .parts = {ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",
                  EXPERT_PARTS, [ROLE_SELECT_BIAS] = "mlp.moe_statics.e_score_correction_bias"},
        .select_bias_row = true,
        .experts = "mlp.experts.",
        .shared = "mlp.shared_experts.",
        .shared_count_key = "moe_num_shared_experts",
        .shared_count = 2,
        .dense = "mlp.",
        .normalize_routing = {NULL, true},
        .first_dense = 1,
        .moe_layers = true,
        .eps = 1e-5,
        .theta = 5e5,
        .interleaved = true,
        .tied = {"tie_word_embeddings", true},
    },
    {
        .family = "helium",
        .kv_heads = 20,
        .head_dim = 128,
        LLAMA_LIKE,
        .parts = {LLAMA_PARTS},
        .eps = 1e-8,
        .theta = 1e5,
        .interleaved = true,
        .qkv_bias = {"attention_bias", false},
        .mlp_bias = {"mlp_bias", false},
    },
    {
        .family = "baichuan",
        .aliases = baichuan_keys,
        LLAMA_LIKE,
        .parts = {[ROLE_ATTN_IN] = "input_layernorm",
                  [ROLE_QKV] = "self_attn.W_pack",
                  [ROLE_O] = "self_attn.o_proj",
                  [ROLE_MLP_IN] = "post_attention_layernorm",
                  MLP_PARTS},
        .alibi = {"alibi", false},
        .adapt = config_adapt_baichuan,
        .read = config_read_baichuan,
    },
    {
        .family = "qwen",
        .max_positions = 8192,
        .aliases = qwen_keys,
        .layers = "h.",
        .embed = "wte",
        .final_norm = "ln_f",
        .rope = true,
        .parts = {[ROLE_ATTN_IN] = "ln_1",
                  [ROLE_QKV] = "attn.c_attn",
                  [ROLE_O] = "attn.c_proj",
                  [ROLE_MLP_IN] = "ln_2",
                  [ROLE_GATE] = "mlp.w2",
                  [ROLE_UP] = "mlp.w1",
                  [ROLE_DOWN] = "mlp.c_proj"},
        .positions_key = "seq_length",
        .positions_most = 8192,
        .eps_key = "layer_norm_epsilon",
        .act = "silu",
        .norm = QT_NORM_RMS,
        .partial_rope = true,
        .qkv_bias = {NULL, true},
        .o_bias = {"bias", false},
        .mlp_bias = {"bias", false},
        .tied = {"tie_word_embeddings", false},
        .adapt = config_adapt_qwen,
        .read = config_read_qwen,
    },
    /* ChatGLM2, ChatGLM3 and GLM-4, as their authors store them. */
    {
        .family = "chatglm",
        .aliases = chatglm_keys,
        .layers = "encoder.layers.",
        .embed = "embedding.word_embeddings",
        .final_norm = "encoder.final_layernorm",
        .head = "transformer.output_layer",
        .rope = true,
        .parts = {[ROLE_ATTN_IN] = "input_layernorm",
                  [ROLE_QKV] = "self_attention.query_key_value",
                  [ROLE_O] = "self_attention.dense",
                  [ROLE_MLP_IN] = "post_attention_layernorm",
                  [ROLE_GATE_UP] = "mlp.dense_h_to_4h",
                  [ROLE_DOWN] = "mlp.dense_4h_to_h"},
        .eps_key = "layernorm_epsilon",
        .eps = 1e-5,
        .act = "silu",
        .norm = QT_NORM_RMS,
        .partial_rope = true,
        .rotary_factor = 0.5,
        .interleaved = true,
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"add_bias_linear", false},
        .mlp_bias = {"add_bias_linear", false},
        .tied = {"tie_word_embeddings", false},
        .adapt = config_adapt_chatglm,
        .read = config_read_chatglm,
    },
    {
        .family = "phi3",
        LLAMA_LIKE,
        .parts = {PHI3_PARTS},
        .eps = 1e-5,
        .window = WINDOW_ALL,
        .window_given = true,
        .partial_rope = true,
        .original_positions = 4096,
    },
    /* The adapters of images and speech, which text does not use, are beside the base weights. */
    {
        .family = "phi4_multimodal",
        .kv_heads = 8,
        LLAMA_LIKE,
        .parts = {PHI3_PARTS},
        .eps = 1e-5,
        .window = WINDOW_ALL,
        .window_given = true,
        .partial_rope = true,
        .original_positions = 4096,
    },
    {
        .family = "gemma",
        GEMMA_LIKE,
        .parts = {LLAMA_PARTS},
        .act_key = "hidden_act",
    },
    {
        .family = "gemma2",
        GEMMA_LIKE,
        .parts = {GEMMA_PARTS},
        .act_key = "hidden_activation",
        .window = WINDOW_EVEN,
        .query_scalar = 256,
        .attn_softcap = 50,
        .logit_softcap = 30,
    },
    {
        .family = "vaultgemma",
        GEMMA_LIKE,
        .parts = {ATTENTION_PARTS, MLP_PARTS, [ROLE_MLP_IN] = "pre_feedforward_layernorm"},
        .act_key = "hidden_activation",
        .window = WINDOW_EVEN,
        .query_scalar = 256,
        .attn_softcap = 50,
        .logit_softcap = 30,
    },
    {
        .family = "gemma3_text",
        GEMMA_LIKE,
        .vocab = 262208,
        .max_positions = 131072,
        .heads = 8,
        .kv_heads = 4,
        .theta = 1e6,
        .local_theta = 1e4,
        .local_theta_key = "rope_local_base_freq",
        .window_period_key = "sliding_window_pattern",
        .parts =
            {GEMMA_PARTS, [ROLE_Q_NORM] = "self_attn.q_norm", [ROLE_K_NORM] = "self_attn.k_norm"},
        .act_key = "hidden_activation",
        .window = WINDOW_PATTERN,
        .window_period = 6,
        .query_scalar = 256,
    },
    {
        .family = "gemma3n_text",
        DECODER_NAMES,
        .vocab = 262400,
        .max_positions = 32768,
        .heads = 8,
        .kv_heads = 2,
        .head_dim = 256,
        .layer_embed = "embed_tokens_per_layer",
        .layer_project = "per_layer_model_projection",
        .layer_norm = "per_layer_projection_norm",
        .layer_embed_first = true,
        .altup_in = "altup_projections",
        .altup_out = "altup_unembed_projections",
        .parts =
            {GEMMA_PARTS, PER_LAYER_PARTS, [ROLE_Q_NORM] = "self_attn.q_norm",
             [ROLE_K_NORM] = "self_attn.k_norm", [ROLE_ALTUP_NORM] = "altup.router_norm",
             [ROLE_ALTUP_ROUTER] = "altup.modality_router",
             [ROLE_ALTUP_PREDICT] = "altup.prediction_coefs",
             [ROLE_ALTUP_CORRECT] = "altup.correction_coefs",
             [ROLE_ALTUP_SCALE] = "altup.correct_output_scale",
             [ROLE_LAUREL_LEFT] = "laurel.linear_left", [ROLE_LAUREL_RIGHT] = "laurel.linear_right",
             [ROLE_LAUREL_NORM] = "laurel.post_laurel_norm"},
        .value_norm = true,
        .shared_keys = true,
        .shared_layers = 15,
        .eps_key = "rms_norm_eps",
        .act_key = "hidden_activation",
        .act = "gelu_pytorch_tanh",
        .norm = QT_NORM_RMS,
        .theta = 1e6,
        .local_theta = 1e4,
        .local_theta_key = "rope_local_base_freq",
        .window = WINDOW_PATTERN,
        .window_period = 5,
        .window_size = 512,
        .tied = {"tie_word_embeddings", true},
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
        .adapt = config_adapt_gemma3n,
        .read = config_read_gemma3n,
    },
    {
        .family = "gemma4_text",
        GEMMA4_LIKE,
        .aliases = gemma4_keys,
        .window_size = 512,
        .layer_embed = "embed_tokens_per_layer",
        .layer_project = "per_layer_model_projection",
        .layer_norm = "per_layer_projection_norm",
        .parts =
            {GEMMA4_PARTS, [ROLE_GATE] = "gate_proj", [ROLE_UP] = "up_proj",
             [ROLE_DOWN] = "down_proj", [ROLE_ROUTER] = "router.proj",
             [ROLE_ROUTER_NORM] = "router.scale", [ROLE_EXPERT_SCALE] = "router.per_expert_scale",
             [ROLE_EXPERTS_IN] = "pre_feedforward_layernorm_2",
             [ROLE_EXPERTS_OUT] = "post_feedforward_layernorm_2",
             [ROLE_SHARED_OUT] = "post_feedforward_layernorm_1"},
        .experts_switch = "enable_moe_block",
        .experts = "experts.",
        .shared = "mlp.",
        .dense = "mlp.",
        .intermediate_key = "moe_intermediate_size",
        .shared_key = "intermediate_size",
        .normalize_routing = {NULL, true},
        .read = config_read_gemma4,
    },
    {
        .family = "gemma4_unified_text",
        GEMMA4_LIKE,
        .window_size = 1024,
        .parts = {GEMMA4_PARTS, MLP_PARTS},
        .read = config_read_gemma4_unified,
    },
    {
        .family = "cohere",
        COHERE_LIKE,
    },
    {
        .family = "cohere2",
        COHERE_LIKE,
        .window = WINDOW_PATTERN,
        .window_period_key = "sliding_window_pattern",
        .window_period = 4,
    },
    {
        .family = "stablelm",
        .kv_heads = 32,
        DECODER_NAMES,
        .parts = {LLAMA_PARTS},
        .eps_key = "layer_norm_eps",
        .eps = 1e-5,
        .act_key = "hidden_act",
        .act = "silu",
        .norm = QT_NORM_LAYER,
        .parallel = {"use_parallel_residual", false},
        .partial_rope = true,
        .rotary_factor = 0.25,
        .qkv_bias = {"use_qkv_bias", false},
        .tied = {"tie_word_embeddings", false},
        .read = config_read_stablelm,
    },
    {
        .family = "phi",
        .layers = "layers.",
        .embed = "embed_tokens",
        .final_norm = "final_layernorm",
        .rope = true,
        .parts = {[ROLE_ATTN_IN] = "input_layernorm",
                  [ROLE_Q] = "self_attn.q_proj",
                  [ROLE_K] = "self_attn.k_proj",
                  [ROLE_V] = "self_attn.v_proj",
                  [ROLE_O] = "self_attn.dense",
                  [ROLE_UP] = "mlp.fc1",
                  [ROLE_DOWN] = "mlp.fc2"},
        .eps_key = "layer_norm_eps",
        .eps = 1e-5,
        .act_key = "hidden_act",
        .act = "gelu_new",
        .norm = QT_NORM_LAYER,
        .parallel = {NULL, true},
        .head_bias = {NULL, true},
        .partial_rope = true,
        .rotary_factor = 0.5,
        .qkv_bias = {NULL, true},
        .o_bias = {NULL, true},
        .mlp_bias = {NULL, true},
        .tied = {"tie_word_embeddings", false},
        .read = config_read_stablelm,
    },
    {
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
        .read = config_read_gpt2,
    },
    {
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
        .read = config_read_gptj,
    },
    {
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
    },
    {
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
        .read = config_read_gpt2,
    },
    {
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
        .read = config_read_gpt_neo,
    },
    {
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
        .read = config_read_codegen,
    },
    {
        .family = "falcon",
        .max_positions = 2048,
        .aliases = falcon_keys,
        .layers = "h.",
        .embed = "word_embeddings",
        .final_norm = "ln_f",
        .rope = true,
        .parts = {FUSED_UNGATED_PARTS},
        .grouped_qkv = true,
        .parallel_attn_in = "ln_attn",
        .parallel_mlp_in = "ln_mlp",
        .grows = true,
        .eps_key = "layer_norm_epsilon",
        .eps = 1e-5,
        .act_key = "activation",
        .act = "gelu",
        .norm = QT_NORM_LAYER,
        .parallel = {"parallel_attn", true},
        .alibi = {"alibi", false},
        .alibi_scaled = true,
        .qkv_bias = {"bias", false},
        .o_bias = {"bias", false},
        .mlp_bias = {"bias", false},
        .tied = {"tie_word_embeddings", true},
        .adapt = config_adapt_multi_query,
        .read = config_read_falcon,
    },
    {
        .family = "bloom",
        .max_positions = 2048,
        .aliases = bloom_keys,
        .layers = "h.",
        .embed = "word_embeddings",
        .embed_norm = "word_embeddings_layernorm",
        .final_norm = "ln_f",
        .parts = {FUSED_UNGATED_PARTS},
        .grouped_qkv = true,
        .grows = true,
        .eps_key = "layer_norm_epsilon",
        .eps = 1e-5,
        .act = "gelu_new",
        .norm = QT_NORM_LAYER,
        .alibi = {NULL, true},
        .qkv_bias = {NULL, true},
        .o_bias = {NULL, true},
        .mlp_bias = {NULL, true},
        .tied = {"tie_word_embeddings", true},
        .read = config_read_bloom,
    },
    {
        .family = "mpt",
        .max_positions = 2048,
        .aliases = mpt_keys,
        .layers = "blocks.",
        .embed = "wte",
        .final_norm = "norm_f",
        .parts = {[ROLE_ATTN_IN] = "norm_1",
                  [ROLE_QKV] = "attn.Wqkv",
                  [ROLE_O] = "attn.out_proj",
                  [ROLE_MLP_IN] = "norm_2",
                  [ROLE_UP] = "ffn.up_proj",
                  [ROLE_DOWN] = "ffn.down_proj"},
        .grows = true,
        .clips = true,
        .eps_key = "layer_norm_epsilon",
        .eps = 1e-5,
        .act = "gelu",
        .norm = QT_NORM_LAYER,
        .norms_unbiased = true,
        .alibi = {NULL, true},
        .tied = {"tie_word_embeddings", true},
        .adapt = config_adapt_mpt,
        .read = config_read_mpt,
    },
    {
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
        .read = config_read_opt,
    },
    {
        .family = "bert",
        BERT_LIKE,
        .transform = "cls.predictions.transform.dense",
        .transform_norm = "cls.predictions.transform.LayerNorm",
        .head_biases = "cls.predictions",
    },
    {
        .family = "roberta",
        ROBERTA_LIKE,
    },
    {
        .family = "xlm-roberta",
        ROBERTA_LIKE,
    },
    {
        .family = "modernbert",
        .aliases = modernbert_keys,
        .layers = "layers.",
        .embed = "embeddings.tok_embeddings",
        .embed_norm = "embeddings.norm",
        .final_norm = "final_norm",
        .head = "decoder",
        .both_ways = true,
        .first_bare = true,
        .transform = "head.dense",
        .transform_norm = "head.norm",
        .transform_bias = {"classifier_bias", false},
        .head_biases = "decoder",
        .parts = {[ROLE_ATTN_IN] = "attn_norm",
                  [ROLE_QKV] = "attn.Wqkv",
                  [ROLE_O] = "attn.Wo",
                  [ROLE_MLP_IN] = "mlp_norm",
                  [ROLE_GATE_UP] = "mlp.Wi",
                  [ROLE_DOWN] = "mlp.Wo"},
        .rope = true,
        .theta = 160000,
        .local_theta = 1e4,
        .local_theta_key = "local_rope_theta",
        .window = WINDOW_PATTERN_FIRST,
        .window_period = 3,
        .window_period_key = "global_attn_every_n_layers",
        .eps_key = "norm_eps",
        .eps = 1e-5,
        .act_key = "hidden_activation",
        .act = "gelu",
        .norm = QT_NORM_LAYER,
        .norms_unbiased = true,
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
        .mlp_bias = {"mlp_bias", false},
        .tied = {"tie_word_embeddings", true},
        .read = config_read_modernbert,
    },
};

enum { FAMILIES = sizeof table / sizeof *table };

static const struct arch_multimodal multimodal[] = {
    {"exaone4_5", "exaone4", 0},
    {"gemma3", "gemma3_text", 0},
    {"gemma3n", "gemma3n_text", 0},
    {"gemma4", "gemma4_text", 0},
    {"gemma4_unified", "gemma4_unified_text", 0},
    {"glm4v", "glm4v_text", 0},
    {"glm4v_moe", "glm4v_moe_text", 0},
    {"idefics3", "llama", 1e-5},
    {"kimi_k25", "deepseek_v3", 0},
    {"internvl", "qwen2", 0},
    {"llama4", "llama4_text", 0},
    {"llava", "llama", 0},
    {"llava_next", "llama", 0},
    {"llava_onevision", "qwen2", 0},
    {"minimax_m3_vl", "minimax_m3_vl_text", 0},
    {"mistral3", "mistral", 0},
    {"phi4mm", "phi4_multimodal", 0},
    {"qwen2_5_omni", "qwen2_5_omni_text", 0},
    {"qwen2_5_vl", "qwen2_5_vl_text", 0},
    {"qwen2_vl", "qwen2_vl_text", 0},
    {"qwen3_5", "qwen3_5_text", 0},
    {"qwen3_5_moe", "qwen3_5_moe_text", 0},
    {"qwen3_omni_moe", "qwen3_omni_moe_text", 0},
    {"qwen3_vl", "qwen3_vl_text", 0},
    {"qwen3_vl_moe", "qwen3_vl_moe_text", 0},
    {"smolvlm", "llama", 1e-5},
    {"vipllava", "llama", 0},
};

enum { MULTIMODAL = sizeof multimodal / sizeof *multimodal };

const struct arch_multimodal *arch_of_multimodal(const char *type)
{
    for (size_t i = 0; i < MULTIMODAL; i++)
        if (strcmp(multimodal[i].type, type) == 0)
            return &multimodal[i];
    return NULL;
}

/* Families that have another name in some checkpoints. */
static const char *const renamed[][2] = {{"exaone4_5_text", "exaone4"}, {"kimi_k2", "deepseek_v3"}};

const struct arch *arch_find(const char *family)
{
    for (size_t i = 0; i < sizeof renamed / sizeof *renamed; i++)
        if (strcmp(renamed[i][0], family) == 0)
            family = renamed[i][1];
    for (size_t i = 0; i < FAMILIES; i++)
        if (strcmp(table[i].family, family) == 0)
            return &table[i];
    return NULL;
}

const char *qt_model_type(size_t i)
{
    return i < FAMILIES                ? table[i].family
           : i < FAMILIES + MULTIMODAL ? multimodal[i - FAMILIES].type
                                       : NULL;
}

const char *arch_cannot(const struct arch *arch, bool experts, bool ssm, enum qt_use use)
{
    if (arch->altup_in)
        return "inputs of single layers";
    if (arch->head_experts)
        return "mixtures of attention heads";
    if (use == QT_USE_CALIB_FILE) /* layers may lack inputs */
        return ssm && arch->ssm == SSM_BLOCKS ? "layers of a single sublayer" : NULL;
    if (arch->both_ways)
        return "attention that goes both ways";
    if (experts && use == QT_USE_LEARN && arch->parts[ROLE_ROUTER_NORM])
        return "mixtures of experts of this kind";
    if (arch->latent)
        return "latent attention";
    if (arch->layer_heads || arch->window_heads)
        return "attention heads of several sizes";
    if (arch->delta)
        return "gated DeltaNet";
    if (arch->short_conv)
        return "short convolutions";
    if (ssm)
        return "state space models";
    return arch->parts[ROLE_ATTN_GATE] && use == QT_USE_W4AX ? "gated attention" : NULL;
}

bool qt_model_family(struct qt_family *out, size_t i)
{
    const char *type = qt_model_type(i);
    if (!type)
        return false;
    const char *decoder = i < FAMILIES ? type : multimodal[i - FAMILIES].decoder;
    const struct arch *arch = arch_find(decoder);
    *out = (struct qt_family){
        .type = type,
        .decoder = decoder,
        .attention = arch->both_ways      ? "attention to both sides"
                     : arch->head_experts ? "mixture of attention heads"
                     : arch->latent       ? "latent attention"
                     : arch->delta        ? "gated DeltaNet and attention"
                     : arch->short_conv   ? "short convolution and attention"
                     : arch->ssm ? arch->parts[ROLE_O] ? "state space and attention" : "state space"
                                 : "attention",
        .experts = arch->experts != NULL};
    for (int use = 0; use < QT_USES; use++)
        out->can[use] = !arch_cannot(arch, out->experts, arch->ssm, (enum qt_use)use);
    return true;
}
