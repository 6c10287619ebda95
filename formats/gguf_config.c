/* Keys of a GGUF file -> config.json, as transformers has it for the family. */
#include "formats/gguf.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

struct maker {
    const struct qt_gguf *g;
    const struct qt_gguf_facts *facts;
    json_t *config;
    bool failed; /* out of memory */
};

static void set(struct maker *m, json_t *object, const char *key, json_t *value)
{
    m->failed |= json_object_set_new(object, key, value) < 0;
}

static void set_size(struct maker *m, const char *key, size_t value)
{
    set(m, m->config, key, json_integer((json_int_t)value));
}

static void set_bool(struct maker *m, const char *key, bool value)
{
    set(m, m->config, key, json_boolean(value));
}

/* The shortest decimal number of an F32: 1e-05, not 9.99999974e-06. */
static json_t *real(double v)
{
    char text[32];
    for (int digits = 6; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, v);
        if ((float)strtod(text, NULL) == (float)v)
            break;
    }
    return json_real(strtod(text, NULL));
}

/* True if there is such a number; it may be infinite or NaN. */
static bool get(double *out, const struct maker *m, const char *name)
{
    return qt_gguf_get_real(out, m->g, m->facts->prefix, name) && isfinite(*out);
}

static bool get_size(size_t *out, const struct maker *m, const char *name)
{
    return qt_gguf_get_size(out, m->g, m->facts->prefix, name);
}

/* Sets `key` if the file has `name`. */
static void copy_size(struct maker *m, const char *key, const char *name)
{
    size_t v;
    if (get_size(&v, m, name))
        set_size(m, key, v);
}

static void copy_real(struct maker *m, const char *key, const char *name)
{
    double v;
    if (get(&v, m, name))
        set(m, m->config, key, real(v));
}

static bool is(const struct maker *m, const char *family)
{
    return strcmp(m->facts->family->family, family) == 0;
}

/* ---- sizes ---------------------------------------------------------------------------------- */

static void set_sizes(struct maker *m)
{
    static const char *const pairs[][2] = {
        {"hidden_size", "embedding_length"},
        {"intermediate_size", "feed_forward_length"},
        {"num_hidden_layers", "block_count"},
        {"num_attention_heads", "attention.head_count"},
        {"num_key_value_heads", "attention.head_count_kv"},
        {"head_dim", "attention.key_length"},
        {"max_position_embeddings", "context_length"},
    };
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        copy_size(m, pairs[i][0], pairs[i][1]);
    copy_real(m, "rms_norm_eps", "attention.layer_norm_rms_epsilon");
    set_size(m, "vocab_size", m->facts->vocab);
    set_bool(m, "tie_word_embeddings", !m->facts->head);
}

/* How experts are chosen; the scores are sigmoids. */
static void set_routing(struct maker *m)
{
    bool normalized = false;
    qt_gguf_get_bool(&normalized, m->g, m->facts->prefix, "expert_weights_norm");
    set_bool(m, "norm_topk_prob", normalized);
    set_bool(m, "use_qk_norm", m->facts->head_norms);
    copy_size(m, "n_shared_experts", "expert_shared_count");
    copy_size(m, "first_k_dense_replace", "leading_dense_block_count");
    copy_real(m, "routed_scaling_factor", "expert_weights_scale");
    set_size(m, "n_group", 1);
    set_size(m, "topk_group", 1);
}

static void set_experts(struct maker *m)
{
    const bool plain = is(m, "mixtral") || is(m, "gpt_oss") || is(m, "granitemoe");
    size_t experts = 0;
    if (!get_size(&experts, m, "expert_count") || experts == 0)
        return;
    set_size(m,
             plain               ? "num_local_experts"
             : is(m, "glm4_moe") ? "n_routed_experts"
                                 : "num_experts",
             experts);
    copy_size(m, "num_experts_per_tok", "expert_used_count");
    if (is(m, "gpt_oss"))
        copy_size(m, "intermediate_size", "expert_feed_forward_length");
    if (plain)
        return;
    copy_size(m, "moe_intermediate_size", "expert_feed_forward_length");
    if (is(m, "glm4_moe")) {
        set_routing(m);
        return;
    }
    copy_size(m, "shared_expert_intermediate_size", "expert_shared_feed_forward_length");
    set_bool(m, "norm_topk_prob", is(m, "qwen3_moe"));
    set_size(m, "decoder_sparse_step", 1);
    set(m, m->config, "mlp_only_layers", json_array());
}

/* ---- rotary embedding ----------------------------------------------------------------------- */

static json_t *factors(struct maker *m, const float *list)
{
    json_t *out = json_array();
    for (size_t i = 0; i < m->facts->factors; i++) {
        float v;
        memcpy(&v, &list[i], sizeof v);
        m->failed |= json_array_append_new(out, isfinite(v) ? real((double)v) : json_null()) < 0;
    }
    return out;
}

/* Lists of factors. rope_freqs.weight, the factors of Llama 3.1, are those of sequences of any
 * length. */
static void set_lists(struct maker *m, json_t *rope, size_t original)
{
    const struct qt_gguf_facts *f = m->facts;
    double attention = 1;
    get(&attention, m, "rope.scaling.attn_factor");
    set(m, rope, "rope_type", json_string("longrope"));
    set(m, rope, "long_factor", factors(m, f->long_factors));
    set(m, rope, "short_factor", factors(m, f->short_factors));
    set(m, rope, "attention_factor", real(attention));
    set(m, rope, "original_max_position_embeddings", json_integer((json_int_t)original));
    if (is(m, "phi3"))
        set_size(m, "original_max_position_embeddings", original);
}

static void set_yarn(struct maker *m, json_t *rope, double factor, size_t original)
{
    double v;
    set(m, rope, "rope_type", json_string("yarn"));
    set(m, rope, "factor", real(factor));
    set(m, rope, "original_max_position_embeddings", json_integer((json_int_t)original));
    if (get(&v, m, "rope.scaling.yarn_beta_fast"))
        set(m, rope, "beta_fast", real(v));
    if (get(&v, m, "rope.scaling.yarn_beta_slow"))
        set(m, rope, "beta_slow", real(v));
    if (get(&v, m, "rope.scaling.attn_factor")) /* llama.cpp multiplies by the rest by itself */
        set(m, rope, "attention_factor", real(v * (1 + 0.1 * log(factor))));
}

/* OLMo 3: layers with a window have the rotary embedding without its scaling. Takes the reference
 * to rope. */
static void set_two_ropes(struct maker *m, json_t *rope, double theta)
{
    json_t *both = json_object(), *plain = json_object();
    if (!json_object_size(rope))
        set(m, rope, "rope_type", json_string("default"));
    set(m, rope, "rope_theta", real(theta));
    set(m, plain, "rope_type", json_string("default"));
    set(m, plain, "rope_theta", real(theta));
    set(m, both, "full_attention", rope);
    set(m, both, "sliding_attention", plain);
    set(m, m->config, "rope_parameters", both);
}

static int set_rope(struct maker *m, struct qt_err *err)
{
    struct qt_gguf_text type = {"none", 4};
    size_t original = 0, head = 0, turned = 0;
    double theta = 1e4, local = 1e4, factor = 1, beta;
    const bool listed = m->facts->long_factors && m->facts->short_factors;
    get(&theta, m, "rope.freq_base");
    get(&factor, m, "rope.scaling.factor");
    qt_gguf_get_text(&type, m->g, m->facts->prefix, "rope.scaling.type");
    if (!is(m, "olmo3"))
        set(m, m->config, "rope_theta", real(theta));
    if (!get_size(&original, m, "rope.scaling.original_context_length"))
        get_size(&original, m, "context_length");
    if (is(m, "gemma3_text")) {
        get(&local, m, "rope.freq_base_swa");
        set(m, m->config, "rope_local_base_freq", real(local));
    }
    if (get_size(&turned, m, "rope.dimension_count") &&
        get_size(&head, m, "attention.key_length") && head &&
        (turned != head || is(m, "glm4") || is(m, "glm4_moe")))
        set(m, m->config, "partial_rotary_factor", json_real((double)turned / (double)head));
    json_t *rope = json_object();
    if (listed) {
        set_lists(m, rope, original);
    } else if (qt_gguf_is(&type, "linear")) {
        set(m, rope, "rope_type", json_string("linear"));
        set(m, rope, "factor", real(factor));
    } else if (qt_gguf_is(&type, "yarn")) {
        set_yarn(m, rope, factor, original);
        if (is(m, "ministral3") && get(&beta, m, "attention.temperature_scale"))
            set(m, rope, "llama_4_scaling_beta", real(beta));
    } else if (!qt_gguf_is(&type, "none")) {
        json_decref(rope);
        return qt_fail(err, QT_E_UNSUPPORTED, m->g->path, NULL,
                       "rope.scaling.type '%.*s' without its tensors is not supported",
                       (int)qt_min_size(type.size, 40), type.s);
    }
    if (is(m, "olmo3"))
        set_two_ropes(m, rope, theta);
    else if (json_object_size(rope))
        set(m, m->config, "rope_scaling", rope);
    else
        json_decref(rope);
    return QT_OK;
}

/* ---- families ------------------------------------------------------------------------------- */

/* Gemma: attention scores are divided by the root of the size of a head; in the largest model of a
 * version, which the number of its layers tells, by that of hidden size / heads. */
static void set_gemma(struct maker *m, size_t largest)
{
    size_t layers = 0, hidden = 0, heads = 1, scalar = 256;
    get_size(&scalar, m, "attention.key_length");
    if (get_size(&layers, m, "block_count") && layers == largest &&
        get_size(&hidden, m, "embedding_length") && get_size(&heads, m, "attention.head_count") &&
        heads)
        scalar = hidden / heads;
    set_size(m, "query_pre_attn_scalar", scalar);
    set(m, m->config, "hidden_activation", json_string("gelu_pytorch_tanh"));
    copy_real(m, "attn_logit_softcapping", "attn_logit_softcapping");
    copy_real(m, "final_logit_softcapping", "final_logit_softcapping");
    copy_size(m, "sliding_window", "attention.sliding_window");
}

/* EXAONE 4: only the model of 64 layers has windows. */
static void set_exaone(struct maker *m)
{
    size_t layers = 0;
    if (get_size(&layers, m, "block_count") && layers == 64) {
        copy_size(m, "sliding_window", "attention.sliding_window");
        set_size(m, "sliding_window_pattern", 4);
    } else {
        set(m, m->config, "sliding_window", json_null());
    }
}

static void set_family(struct maker *m)
{
    static const char *const multipliers[][2] = {
        {"embedding_multiplier", "embedding_scale"},
        {"attention_multiplier", "attention.scale"},
        {"residual_multiplier", "residual_scale"},
        {"logits_scaling", "logit_scale"},
    };
    const bool granite = is(m, "granite") || is(m, "granitemoe");
    if (is(m, "gemma2"))
        set_gemma(m, 46);
    else if (is(m, "gemma3_text"))
        set_gemma(m, 62);
    else
        set(m, m->config, "hidden_act", json_string("silu"));
    if (is(m, "gemma"))
        set(m, m->config, "hidden_act", json_string("gelu_pytorch_tanh"));
    if (is(m, "gpt_oss") || is(m, "olmo3"))
        copy_size(m, "sliding_window", "attention.sliding_window");
    if (is(m, "gemma3_text"))
        set_size(m, "sliding_window_pattern", 6);
    if (is(m, "smollm3"))
        set_size(m, "no_rope_layer_interval", 4);
    if (is(m, "exaone4"))
        set_exaone(m);
    for (size_t i = 0; granite && i < sizeof multipliers / sizeof *multipliers; i++)
        copy_real(m, multipliers[i][0], multipliers[i][1]);
    if (!is(m, "qwen2") && !is(m, "qwen2_moe"))
        set_bool(m, "attention_bias", m->facts->qkv_bias);
    if (is(m, "llama") || is(m, "smollm3") || is(m, "granite"))
        set_bool(m, "mlp_bias", m->facts->mlp_bias);
}

/* ---- the whole ------------------------------------------------------------------------------ */

int qt_gguf_make_config(json_t **out, const struct qt_gguf *g, const struct qt_gguf_facts *facts,
                        struct qt_err *err)
{
    static const char *const ids[][2] = {
        {"bos_token_id", "tokenizer.ggml.bos_token_id"},
        {"eos_token_id", "tokenizer.ggml.eos_token_id"},
        {"pad_token_id", "tokenizer.ggml.padding_token_id"},
    };
    struct maker m = {g, facts, json_object(), false};
    size_t id;
    set(&m, m.config, "architectures", json_pack("[s]", facts->family->class));
    set(&m, m.config, "model_type", json_string(facts->family->family));
    set(&m, m.config, "torch_dtype",
        json_string(facts->dtype == QT_BF16  ? "bfloat16"
                    : facts->dtype == QT_F32 ? "float32"
                                             : "float16"));
    set_sizes(&m);
    set_experts(&m);
    int rc = set_rope(&m, err);
    set_family(&m);
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++)
        if (qt_gguf_get_size(&id, g, "", ids[i][1]))
            set_size(&m, ids[i][0], id);
    if (rc == QT_OK && m.failed)
        rc = qt_no_memory(err, NULL);
    if (rc < 0)
        json_decref(m.config);
    *out = rc < 0 ? NULL : m.config;
    return rc;
}
