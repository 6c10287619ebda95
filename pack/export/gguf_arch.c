/*
 * The architectures of llama.cpp: names of tensors and keys.
 *
 * llama.cpp computes what its code for the architecture says, whatever config.json has. Everything
 * that a family can vary is therefore either written as a key that llama.cpp reads, or compared with
 * what it computes and refused if it differs.
 */
#include "pack/export/gguf.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A module of a decoder layer, without "model.layers.N."; '#' stands for the number of an expert. */
struct part {
    const char *source, *target;
    unsigned flags;
};
enum {
    BIAS = 1,   /* llama.cpp reads a bias */
    ROTARY = 2, /* rows of heads that the rotary embedding turns */
    EXACT = 4,  /* F32, as llama.cpp's own converter has it */
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
#define EXPERTS                                                                                    \
    {"mlp.gate", "ffn_gate_inp", EXACT}, {"mlp.experts.#.gate_proj", "ffn_gate_exps", 0},          \
        {"mlp.experts.#.up_proj", "ffn_up_exps", 0},                                               \
    {                                                                                              \
        "mlp.experts.#.down_proj", "ffn_down_exps", 0                                              \
    }

static const struct part llama_parts[] = {LLAMA_QKV(BIAS), LLAMA_NORMS, LLAMA_MLP(BIAS), {0}};
static const struct part mixtral_parts[] = {
    LLAMA_QKV(BIAS),
    LLAMA_NORMS,
    {"block_sparse_moe.gate", "ffn_gate_inp", EXACT},
    {"block_sparse_moe.experts.#.w1", "ffn_gate_exps", 0},
    {"block_sparse_moe.experts.#.w3", "ffn_up_exps", 0},
    {"block_sparse_moe.experts.#.w2", "ffn_down_exps", 0},
    {0},
};
static const struct part qwen_parts[] = {LLAMA_QKV(0), LLAMA_NORMS, HEAD_NORMS, LLAMA_MLP(0), {0}};
static const struct part qwen2_moe_parts[] = {
    LLAMA_QKV(0),
    LLAMA_NORMS,
    EXPERTS,
    {"mlp.shared_expert_gate", "ffn_gate_inp_shexp", EXACT},
    {"mlp.shared_expert.gate_proj", "ffn_gate_shexp", 0},
    {"mlp.shared_expert.up_proj", "ffn_up_shexp", 0},
    {"mlp.shared_expert.down_proj", "ffn_down_shexp", 0},
    {0},
};
static const struct part qwen3_moe_parts[] = {LLAMA_QKV(0), LLAMA_NORMS, HEAD_NORMS, EXPERTS, {0}};
static const struct part gemma_parts[] = {
    LLAMA_QKV(0),
    HEAD_NORMS,
    LLAMA_MLP(0),
    {"input_layernorm", "attn_norm", 0},
    {"post_attention_layernorm", "post_attention_norm", 0},
    {"pre_feedforward_layernorm", "ffn_norm", 0},
    {"post_feedforward_layernorm", "post_ffw_norm", 0},
    {0},
};
static const struct part olmo2_parts[] = {
    LLAMA_QKV(0),
    HEAD_NORMS,
    LLAMA_MLP(0),
    {"post_attention_layernorm", "post_attention_norm", 0},
    {"post_feedforward_layernorm", "post_ffw_norm", 0},
    {0},
};
static const struct part phi3_parts[] = {{"self_attn.qkv_proj", "attn_qkv", 0},
                                         {"self_attn.o_proj", "attn_output", 0},
                                         LLAMA_NORMS,
                                         FUSED_MLP,
                                         {0}};
static const struct part glm4_parts[] = {
    LLAMA_QKV(0),
    LLAMA_NORMS,
    FUSED_MLP,
    {"post_self_attn_layernorm", "post_attention_norm", 0},
    {"post_mlp_layernorm", "post_ffw_norm", 0},
    {0},
};

enum head_rule { HEAD_ANY, HEAD_OWN /* never the embedding */, HEAD_TIED /* always */ };

struct qt_gguf_arch {
    const char *family, *name; /* name: general.architecture */
    const struct part *parts;
    /* The rotary embedding turns channels 2i and 2i + 1, so that rows i and i + d/2 of a head of d
     * channels become neighbours. */
    bool permuted;
    bool square;     /* heads * head_dim must be the hidden size */
    bool scaled;     /* has the factors of Granite */
    bool embed_sqrt; /* the embedding is multiplied by the root of the hidden size */
    bool capped;     /* has softcaps of attention scores and logits, which must be given */
    bool last_cap;   /* may have a softcap of logits */
    bool norms_plus_1;
    bool normalized;  /* routing weights of the chosen experts sum to 1 */
    bool skips_rope;  /* every 4th layer has no rotary embedding */
    bool rope_freqs;  /* reads factors of the rotary embedding from a tensor */
    bool rope_lists;  /* reads short and long factors from two tensors */
    size_t period;    /* layers have a window, except every period-th; 0: no layer has one */
    size_t by_hidden; /* a model of so many layers scales attention by hidden size / heads */
    enum head_rule head;
    enum qt_act_kind act;
    double theta, local_theta; /* where config.json has none; 0: 10000 */
};

static const struct qt_gguf_arch table[] = {
    {.family = "llama",
     .name = "llama",
     .parts = llama_parts,
     .permuted = true,
     .rope_freqs = true,
     .rope_lists = true},
    {.family = "mistral",
     .name = "llama",
     .parts = llama_parts,
     .permuted = true,
     .rope_freqs = true,
     .rope_lists = true},
    {.family = "mixtral",
     .name = "llama",
     .parts = mixtral_parts,
     .permuted = true,
     .rope_freqs = true,
     .rope_lists = true,
     .normalized = true,
     .theta = 1e6},
    {.family = "qwen2", .name = "qwen2", .parts = qwen_parts, .square = true},
    {.family = "qwen3", .name = "qwen3", .parts = qwen_parts},
    {.family = "qwen2_moe",
     .name = "qwen2moe",
     .parts = qwen2_moe_parts,
     .square = true,
     .head = HEAD_OWN},
    {.family = "qwen3_moe", .name = "qwen3moe", .parts = qwen3_moe_parts, .normalized = true},
    {.family = "gemma2",
     .name = "gemma2",
     .parts = gemma_parts,
     .norms_plus_1 = true,
     .embed_sqrt = true,
     .capped = true,
     .period = 2,
     .by_hidden = 46,
     .head = HEAD_TIED,
     .act = QT_ACT_GELU_TANH},
    {.family = "gemma3_text",
     .name = "gemma3",
     .parts = gemma_parts,
     .norms_plus_1 = true,
     .embed_sqrt = true,
     .last_cap = true,
     .period = 6,
     .by_hidden = 62,
     .act = QT_ACT_GELU_TANH,
     .theta = 1e6,
     .local_theta = 1e4},
    {.family = "phi3", .name = "phi3", .parts = phi3_parts, .square = true, .rope_lists = true},
    {.family = "olmo2", .name = "olmo2", .parts = olmo2_parts, .square = true, .head = HEAD_OWN},
    {.family = "smollm3",
     .name = "smollm3",
     .parts = llama_parts,
     .permuted = true,
     .skips_rope = true,
     .theta = 2e6},
    {.family = "granite",
     .name = "granite",
     .parts = llama_parts,
     .permuted = true,
     .scaled = true,
     .rope_freqs = true,
     .rope_lists = true},
    {.family = "glm4", .name = "glm4", .parts = glm4_parts},
};

enum { ARCHS = sizeof table / sizeof *table };

const struct qt_gguf_arch *qt_gguf_arch_find(const char *family)
{
    for (size_t i = 0; i < ARCHS; i++)
        if (strcmp(table[i].family, family) == 0)
            return &table[i];
    return NULL;
}

void qt_gguf_arch_names(char *out, size_t size)
{
    size_t used = 0;
    for (size_t i = 0; i < ARCHS && used < size; i++)
        used += (size_t)snprintf(out + used, size - used, "%s%s", i ? ", " : "", table[i].family);
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

static bool place_part(struct qt_gguf_place *out, const struct qt_gguf_arch *arch, const char *rest)
{
    const char *dot = strrchr(rest, '.');
    size_t layer;
    const char *module = rest;
    if (!dot || !number(&layer, &module) || *module != '.' || module >= dot)
        return false;
    module++;
    const bool bias = strcmp(dot, ".bias") == 0;
    if (!bias && strcmp(dot, ".weight") != 0)
        return false;
    for (const struct part *p = arch->parts; p->source; p++) {
        *out = (struct qt_gguf_place){0};
        if (!matches(out, p->source, module, (size_t)(dot - module)) ||
            (bias && !(p->flags & BIAS)))
            continue;
        out->layer = layer;
        out->rotary = arch->permuted && (p->flags & ROTARY);
        out->exact = p->flags & EXACT;
        out->plus_1 = arch->norms_plus_1 && strstr(p->target, "norm");
        snprintf(out->name, sizeof out->name, "blk.%zu.%s%s", layer, p->target, dot);
        return true;
    }
    return false;
}

bool qt_gguf_place(struct qt_gguf_place *out, const struct qt_gguf_arch *arch, const char *tensor,
                   bool tied)
{
    static const char *const globals[][2] = {{"embed_tokens.weight", "token_embd.weight"},
                                             {"norm.weight", "output_norm.weight"},
                                             {"lm_head.weight", "output.weight"}};
    const char *name = strncmp(tensor, "model.", 6) == 0 ? tensor + 6 : tensor;
    *out = (struct qt_gguf_place){0};
    for (size_t i = 0; i < sizeof globals / sizeof *globals; i++)
        if (strcmp(name, globals[i][0]) == 0) {
            snprintf(out->name, sizeof out->name, "%s", globals[i][1]);
            out->skip = i == 2 && tied;
            out->plus_1 = i == 1 && arch->norms_plus_1;
            return true;
        }
    return strncmp(name, "layers.", 7) == 0 && place_part(out, arch, name + 7);
}

/* ---- what llama.cpp computes ---------------------------------------------------------------- */

struct writer {
    struct qt_gguf_bytes *b;
    const struct qt_gguf_arch *arch;
    const struct qt_model_info *info;
    struct qt_model_details details;
    const struct qt_export *x;
    char prefix[32]; /* "llama." */
    struct qt_err *err;
};

static int differs(const struct writer *w, const char *what)
{
    return qt_fail(w->err, QT_E_UNSUPPORTED, qt_container_dir(w->x->container), NULL,
                   "gguf cannot hold this model: llama.cpp computes '%s' with %s", w->arch->name,
                   what);
}

static bool near(double a, double b)
{
    return fabs(a - b) <= 1e-5 * fabs(b);
}

static void u32(const struct writer *w, const char *name, size_t value)
{
    qt_gguf_u32(w->b, w->prefix, name, (uint32_t)value);
}

static void f32(const struct writer *w, const char *name, double value)
{
    qt_gguf_f32(w->b, w->prefix, name, (float)value);
}

static int write_sizes(const struct writer *w)
{
    const struct qt_model_info *info = w->info;
    const struct qt_model_details *d = &w->details;
    const bool square = info->heads * info->head_dim == info->hidden;
    size_t context = info->max_positions;
    if (w->arch->square && !square)
        return differs(w, "heads that have the hidden size together");
    /* Without windows in llama.cpp, the model is the same up to the length of the window. */
    for (size_t i = 0; !w->arch->period && i < info->layers; i++)
        if (d->windows[i])
            context = qt_min_size(context, d->windows[i]);
    u32(w, "context_length", context);
    u32(w, "embedding_length", info->hidden);
    u32(w, "block_count", info->layers);
    u32(w, "feed_forward_length", d->dense_width ? d->dense_width : d->expert_width);
    u32(w, "vocab_size", info->vocab);
    u32(w, "attention.head_count", info->heads);
    u32(w, "attention.head_count_kv", info->kv_heads);
    u32(w, "attention.key_length", info->head_dim);
    u32(w, "attention.value_length", info->head_dim);
    f32(w, "attention.layer_norm_rms_epsilon", (double)d->eps);
    return QT_OK;
}

static int write_experts(const struct writer *w)
{
    const struct qt_model_details *d = &w->details;
    if (!d->routed)
        return QT_OK;
    if (d->some_dense)
        return differs(w, "experts in all layers");
    if (d->normalize_routing != w->arch->normalized)
        return differs(w, w->arch->normalized ? "routing weights whose sum is 1"
                                              : "routing weights that are not normalized");
    u32(w, "expert_count", d->routed);
    u32(w, "expert_used_count", d->top_k);
    u32(w, "expert_feed_forward_length", d->expert_width);
    if (d->shared_width)
        u32(w, "expert_shared_feed_forward_length", d->shared_width);
    return QT_OK;
}

static int write_windows(const struct writer *w)
{
    const struct qt_model_details *d = &w->details;
    const size_t period = w->arch->period;
    size_t window = 0;
    if (!period)
        return QT_OK;
    for (size_t i = 0; i < w->info->layers; i++) {
        const bool expected = i % period < period - 1;
        if ((d->windows[i] > 0) != expected || (window && d->windows[i] && d->windows[i] != window))
            return differs(w, period == 2 ? "a sliding window in every second layer"
                                          : "a sliding window in five of six layers");
        window = d->windows[i] ? d->windows[i] : window;
    }
    u32(w, "attention.sliding_window", window);
    return QT_OK;
}

/* Factors of the attention scores, the embedding, sublayer outputs and logits; softcaps. */
static int write_scales(const struct writer *w)
{
    const struct qt_model_details *d = &w->details;
    const struct qt_gguf_arch *arch = w->arch;
    const bool by_hidden = arch->by_hidden && w->info->layers == arch->by_hidden;
    const double head =
        by_hidden ? (double)(w->info->hidden / w->info->heads) : (double)w->info->head_dim;
    if (!arch->scaled) {
        const double embed = arch->embed_sqrt ? sqrt((double)w->info->hidden) : 1;
        if (!near((double)d->attn_scale, 1 / sqrt(head)))
            return differs(w, "attention scores divided by the root of the size of a head");
        if (!near((double)d->embed_scale, embed) || !near((double)d->residual_scale, 1) ||
            !near((double)d->logit_scale, 1))
            return differs(w, "fixed factors of embedding, residuals and logits");
    } else {
        f32(w, "attention.scale", (double)d->attn_scale);
        f32(w, "embedding_scale", (double)d->embed_scale);
        f32(w, "residual_scale", (double)d->residual_scale);
        f32(w, "logit_scale", 1 / (double)d->logit_scale);
    }
    const bool caps[2] = {d->attn_softcap > 0, w->info->logit_softcap > 0};
    if (caps[0] != arch->capped || (caps[1] != arch->capped && !arch->last_cap))
        return differs(w, arch->capped ? "softcaps of attention scores and logits"
                                       : "no softcap of attention scores or logits");
    if (caps[0])
        f32(w, "attn_logit_softcapping", (double)d->attn_softcap);
    if (caps[1])
        f32(w, "final_logit_softcapping", (double)w->info->logit_softcap);
    return QT_OK;
}

static int check_rest(const struct writer *w)
{
    const struct qt_model_details *d = &w->details;
    if (d->act != w->arch->act)
        return differs(w, "another activation function");
    for (size_t i = 0; i < w->info->layers; i++)
        if (d->no_rope[i] != (w->arch->skips_rope && (i + 1) % 4 == 0))
            return differs(w, w->arch->skips_rope ? "a rotary embedding in three of four layers"
                                                  : "a rotary embedding in all layers");
    if (d->tied && w->arch->head == HEAD_OWN)
        return differs(w, "a head that is stored");
    if (!d->tied && w->arch->head == HEAD_TIED)
        return differs(w, "the embedding as head");
    return QT_OK;
}

/* ---- rotary embedding ----------------------------------------------------------------------- */

/* Options of a rotary embedding, as config.json has them. */
struct rope {
    const json_t *options;
    const char *type;
    double theta, factor;
};

static double number_of(const json_t *object, const char *key, double missing)
{
    const json_t *v = json_object_get(object, key);
    return json_is_number(v) ? json_number_value(v) : missing;
}

/* type: "full_attention" or "sliding_attention", of families that have two rotary embeddings. */
static struct rope read_rope(const struct writer *w, const char *type, const char *key,
                             double missing)
{
    const json_t *scaling = json_object_get(w->x->config, "rope_scaling");
    const json_t *options =
        json_object_size(scaling) ? scaling : json_object_get(w->x->config, "rope_parameters");
    if (json_object_get(options, type))
        options = json_object_get(options, type);
    const char *name = json_string_value(json_object_get(options, "rope_type"));
    if (!name)
        name = json_string_value(json_object_get(options, "type"));
    const double theta = number_of(w->x->config, key, missing > 0 ? missing : 1e4);
    return (struct rope){options, name ? name : "default", number_of(options, "rope_theta", theta),
                         number_of(options, "factor", 1)};
}

static double plain(const struct writer *w, const struct rope *r, size_t i)
{
    return pow(r->theta, -(double)(2 * i) / (double)w->details.rotary_dim);
}

/* As llama.cpp interpolates between scaled and unscaled frequencies. */
static double yarn(const struct writer *w, const struct rope *r, size_t i, double original)
{
    const double dims = (double)w->details.rotary_dim, f = plain(w, r, i);
    const double turns[2] = {number_of(r->options, "beta_fast", 32),
                             number_of(r->options, "beta_slow", 1)};
    const double low =
        fmax(0, floor(dims * log(original / (turns[0] * 2 * M_PI)) / (2 * log(r->theta))));
    const double high =
        fmin(dims - 1, ceil(dims * log(original / (turns[1] * 2 * M_PI)) / (2 * log(r->theta))));
    const double ramp = fmin(1, fmax(0, ((double)i - low) / fmax(0.001, high - low)));
    return f / r->factor * ramp + f * (1 - ramp);
}

static bool same_plain(const struct writer *w, const struct rope *r, const float *inv_freq,
                       double factor)
{
    for (size_t i = 0; i < w->details.rotary_dim / 2; i++)
        if (!near((double)inv_freq[i] * factor, plain(w, r, i)))
            return false;
    return true;
}

static double original_positions(const struct writer *w, const struct rope *r)
{
    static const char key[] = "original_max_position_embeddings";
    const double all = number_of(w->x->config, "max_position_embeddings", 0);
    return number_of(w->x->config, key, number_of(r->options, key, all));
}

static bool same_yarn(const struct writer *w, const struct rope *r)
{
    const double original = original_positions(w, r);
    if (strcmp(r->type, "yarn") != 0 || !(r->factor > 1) || !(original > 1))
        return false;
    for (size_t i = 0; i < w->details.rotary_dim / 2; i++)
        if (!near((double)w->details.inv_freq[i], yarn(w, r, i, original)))
            return false;
    return true;
}

static void write_yarn(const struct writer *w, const struct rope *r)
{
    qt_gguf_string(w->b, w->prefix, "rope.scaling.type", "yarn");
    f32(w, "rope.scaling.factor", r->factor);
    u32(w, "rope.scaling.original_context_length", (size_t)original_positions(w, r));
    f32(w, "rope.scaling.yarn_beta_fast", number_of(r->options, "beta_fast", 32));
    f32(w, "rope.scaling.yarn_beta_slow", number_of(r->options, "beta_slow", 1));
    /* llama.cpp multiplies by 1 + ln(factor) / 10 by itself. */
    const double rest = (double)w->details.rope_scale / (1 + 0.1 * log(r->factor));
    if (!near(rest, 1))
        f32(w, "rope.scaling.attn_factor", rest);
}

/* list[which] = by what each frequency is to be divided. */
static int add_factors(struct qt_gguf_factors *out, int which, const char *name,
                       const struct writer *w, const struct rope *r, const float *inv_freq)
{
    out->count = w->details.rotary_dim / 2;
    out->name[which] = name;
    int rc = qt_array_new(&out->list[which], out->count, sizeof *out->list[which], w->err);
    for (size_t i = 0; rc == QT_OK && i < out->count; i++)
        out->list[which][i] = (float)(plain(w, r, i) / (double)inv_freq[i]);
    return rc;
}

static int write_rope(const struct writer *w, struct qt_gguf_factors *factors)
{
    const struct qt_model_details *d = &w->details;
    const struct qt_gguf_arch *arch = w->arch;
    const struct rope r = read_rope(w, "full_attention", "rope_theta", arch->theta);
    const bool unscaled = near((double)d->rope_scale, 1) && !d->long_inv_freq;
    int rc = QT_OK;
    u32(w, "rope.dimension_count", d->rotary_dim);
    f32(w, "rope.freq_base", r.theta);
    if (d->local_inv_freq) {
        const struct rope local =
            read_rope(w, "sliding_attention", "rope_local_base_freq", arch->local_theta);
        if (!(arch->local_theta > 0) || !same_plain(w, &local, d->local_inv_freq, 1))
            return differs(w, "an unscaled rotary embedding in layers with a window");
        f32(w, "rope.freq_base_swa", local.theta);
    }
    if (unscaled && same_plain(w, &r, d->inv_freq, 1))
        return QT_OK;
    if (unscaled && strcmp(r.type, "linear") == 0 && same_plain(w, &r, d->inv_freq, r.factor)) {
        qt_gguf_string(w->b, w->prefix, "rope.scaling.type", "linear");
        f32(w, "rope.scaling.factor", r.factor);
    } else if (d->long_inv_freq && arch->rope_lists) {
        qt_gguf_string(w->b, w->prefix, "rope.scaling.type", "longrope");
        u32(w, "rope.scaling.original_context_length", d->long_from);
        f32(w, "rope.scaling.attn_factor", (double)d->rope_scale);
        QT_TRY(add_factors(factors, 0, "rope_factors_long.weight", w, &r, d->long_inv_freq));
        QT_TRY(add_factors(factors, 1, "rope_factors_short.weight", w, &r, d->inv_freq));
    } else if (!d->long_inv_freq && same_yarn(w, &r)) {
        write_yarn(w, &r);
    } else if (unscaled && arch->rope_freqs) {
        QT_TRY(add_factors(factors, 0, "rope_freqs.weight", w, &r, d->inv_freq));
    } else {
        return differs(w, "no rotary embedding of this kind (rope_type)");
    }
done:
    return rc;
}

int qt_gguf_arch_keys(struct qt_gguf_bytes *b, struct qt_gguf_factors *factors,
                      const struct qt_gguf_arch *arch, const struct qt_model *model,
                      const struct qt_export *x, struct qt_err *err)
{
    struct writer w = {.b = b, .arch = arch, .info = qt_model_info(model), .x = x, .err = err};
    int rc;
    qt_model_details(&w.details, model);
    snprintf(w.prefix, sizeof w.prefix, "%s.", arch->name);
    qt_gguf_string(b, "", "general.architecture", arch->name);
    qt_gguf_string(b, "", "general.type", "model");
    QT_TRY(write_sizes(&w));
    QT_TRY(write_experts(&w));
    QT_TRY(write_windows(&w));
    QT_TRY(write_scales(&w));
    QT_TRY(check_rest(&w));
    QT_TRY(write_rope(&w, factors));
    rc = b->rc;
done:
    return rc;
}
