/*
 * The architectures of llama.cpp: keys, and what it computes. formats/gguf_names.c has the names of
 * tensors.
 *
 * llama.cpp computes what its code for the architecture says, whatever config.json has. Everything
 * that a family can vary is therefore either written as a key that llama.cpp reads, or compared
 * with what it computes and refused if it differs.
 */
#include "pack/export/gguf.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum head_rule { HEAD_ANY, HEAD_OWN /* never the embedding */, HEAD_TIED /* always */ };

struct qt_gguf_arch {
    const char *family;
    bool square;      /* heads * head_dim must be the hidden size */
    bool all_kv;      /* every query head must have keys and values of its own */
    bool scaled;      /* has the factors of Granite */
    bool embed_sqrt;  /* the embedding is multiplied by the root of the hidden size */
    bool capped;      /* has softcaps of attention scores and logits, which must be given */
    bool last_cap;    /* may have a softcap of logits */
    bool normalized;  /* routing weights of the chosen experts sum to 1 */
    bool routed;      /* reads how experts are chosen, and how many layers have none */
    bool delta;       /* layers with gated DeltaNet */
    bool latent;      /* latent attention; experts may be in groups */
    bool steps;       /* queries may be multiplied by steps of the position */
    bool one_theta;   /* layers with a window have the base of the others */
    bool skips_rope;  /* every 4th layer has no rotary embedding */
    bool rope_freqs;  /* reads factors of the rotary embedding from a tensor */
    bool rope_lists;  /* reads short and long factors from two tensors */
    bool sections;    /* positions of images have several numbers, which turn parts of a head */
    size_t period;    /* layers have a window, except every period-th; 0: no layer has one */
    size_t windowed;  /* only models of so many layers have windows, and only their layers with a
                         window have a rotary embedding; 0: all */
    size_t by_hidden; /* a model of so many layers scales attention by hidden size / heads */
    enum head_rule head;
    enum qt_act_kind act;
    double theta, local_theta; /* where config.json has none; 0: 10000 */
};

static const struct qt_gguf_arch table[] = {
    {.family = "llama", .rope_freqs = true, .rope_lists = true},
    {.family = "mistral", .rope_freqs = true, .rope_lists = true},
    {.family = "ministral3", .steps = true},
    {.family = "mixtral", .rope_freqs = true, .rope_lists = true, .normalized = true, .theta = 1e6},
    {.family = "qwen2", .square = true},
    {.family = "qwen3"},
    {.family = "qwen2_moe", .square = true, .head = HEAD_OWN},
    {.family = "qwen3_moe", .normalized = true},
    {.family = "glm4_moe", .routed = true},
    {.family = "olmoe", .square = true, .all_kv = true, .head = HEAD_OWN},
    {.family = "dots1", .all_kv = true, .routed = true, .head = HEAD_OWN},
    {.family = "deepseek_v2", .latent = true, .routed = true},
    {.family = "deepseek_v3", .latent = true, .routed = true},
    {.family = "glm4_moe_lite", .latent = true, .routed = true},
    {.family = "ernie4_5_moe", .routed = true, .theta = 5e5},
    {.family = "minimax_m2", .routed = true, .head = HEAD_OWN, .theta = 5e6},
    {.family = "hunyuan_v1_dense"},
    {.family = "hunyuan_v1_moe", .normalized = true},
    {.family = "qwen3_next", .delta = true, .normalized = true},
    {.family = "qwen3_5_text", .delta = true, .sections = true},
    {.family = "qwen3_5_moe_text", .delta = true, .sections = true, .normalized = true},
    {.family = "gpt_oss", .normalized = true, .period = 2, .head = HEAD_OWN, .act = QT_ACT_CLAMPED},
    {.family = "gemma", .embed_sqrt = true, .head = HEAD_TIED, .act = QT_ACT_GELU_TANH},
    {.family = "gemma2",
     .embed_sqrt = true,
     .capped = true,
     .period = 2,
     .by_hidden = 46,
     .head = HEAD_TIED,
     .act = QT_ACT_GELU_TANH},
    {.family = "gemma3_text",
     .embed_sqrt = true,
     .last_cap = true,
     .period = 6,
     .by_hidden = 62,
     .act = QT_ACT_GELU_TANH,
     .theta = 1e6,
     .local_theta = 1e4},
    {.family = "phi3", .square = true, .rope_lists = true},
    {.family = "olmo2", .square = true, .head = HEAD_OWN},
    {.family = "olmo3",
     .square = true,
     .head = HEAD_OWN,
     .period = 4,
     .theta = 5e5,
     .local_theta = 5e5,
     .one_theta = true},
    {.family = "smollm3", .skips_rope = true, .theta = 2e6},
    {.family = "granite", .scaled = true, .rope_freqs = true, .rope_lists = true},
    {.family = "granitemoe",
     .scaled = true,
     .rope_freqs = true,
     .rope_lists = true,
     .normalized = true},
    {.family = "seed_oss"},
    {.family = "ernie4_5", .theta = 5e5},
    {.family = "exaone4", .square = true, .rope_freqs = true, .period = 4, .windowed = 64},
    {.family = "glm4"},
    {.family = "qwen2_vl_text", .square = true, .sections = true},
    {.family = "qwen2_5_vl_text", .square = true, .sections = true},
    {.family = "qwen3_vl_text", .sections = true},
    {.family = "qwen3_vl_moe_text", .normalized = true, .sections = true},
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

/* ---- what llama.cpp computes ---------------------------------------------------------------- */

struct writer {
    struct qt_gguf_bytes *b;
    const struct qt_gguf_arch *arch;
    const struct qt_gguf_family *names;
    const struct qt_model_info *info;
    struct qt_model_details details;
    const struct qt_export *x;
    const json_t *config; /* the decoder's options in config.json */
    char prefix[32];      /* "llama." */
    struct qt_err *err;
};

static int differs(const struct writer *w, const char *what)
{
    return qt_fail(w->err, QT_E_UNSUPPORTED, qt_container_dir(w->x->container), NULL,
                   "gguf cannot hold this model: llama.cpp computes '%s' with %s", w->names->name,
                   what);
}

static bool near(double a, double b)
{
    return fabs(a - b) <= 1e-5 * fabs(b);
}

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
    const json_t *scaling = json_object_get(w->config, "rope_scaling");
    const json_t *options =
        json_object_size(scaling) ? scaling : json_object_get(w->config, "rope_parameters");
    if (json_object_get(options, type))
        options = json_object_get(options, type);
    const char *name = json_string_value(json_object_get(options, "rope_type"));
    if (!name)
        name = json_string_value(json_object_get(options, "type"));
    const double theta = number_of(w->config, key, missing > 0 ? missing : 1e4);
    struct rope out = {options, name ? name : "default", number_of(options, "rope_theta", theta),
                       number_of(options, "factor", 1)};
    if (strcmp(out.type, "dynamic") == 0 && w->details.rotary_dim > 2) /* by "alpha" */
        out.theta = pow((double)w->details.inv_freq[1], -(double)w->details.rotary_dim / 2);
    return out;
}

/* The period of layers with a window; 0: no layer has one. */
static size_t period_of(const struct writer *w)
{
    const bool none = w->arch->windowed && w->info->layers != w->arch->windowed;
    return none ? 0 : w->arch->period;
}

/* True if llama.cpp computes this layer without a rotary embedding. */
static bool skips_rope(const struct writer *w, size_t layer)
{
    const size_t period = period_of(w);
    return (w->arch->skips_rope && (layer + 1) % 4 == 0) ||
           (w->arch->windowed && period && (layer + 1) % period == 0);
}

static void u32(const struct writer *w, const char *name, size_t value)
{
    qt_gguf_u32(w->b, w->prefix, name, (uint32_t)value);
}

static void f32(const struct writer *w, const char *name, double value)
{
    qt_gguf_f32(w->b, w->prefix, name, (float)value);
}

/* The cache has one latent state per token, which all heads read as keys and as values. */
static void write_latent(const struct writer *w)
{
    const struct qt_model_details *d = &w->details;
    if (d->q_rank)
        u32(w, "attention.q_lora_rank", d->q_rank);
    u32(w, "attention.kv_lora_rank", d->kv_rank);
    u32(w, "attention.head_count_kv", 1);
    u32(w, "attention.key_length", d->kv_rank + d->rope);
    u32(w, "attention.value_length", d->kv_rank);
    u32(w, "attention.key_length_mla", d->nope + d->rope);
    u32(w, "attention.value_length_mla", d->value_dim);
}

static int write_sizes(const struct writer *w)
{
    const struct qt_model_info *info = w->info;
    const struct qt_model_details *d = &w->details;
    const bool square = info->heads * info->head_dim == info->hidden;
    size_t context = info->max_positions;
    if (w->arch->square && !square)
        return differs(w, "heads that have the hidden size together");
    if (w->arch->all_kv && info->kv_heads != info->heads)
        return differs(w, "keys and values for every query head");
    /* Without windows in llama.cpp, the model is the same up to the length of the window. */
    for (size_t i = 0; !period_of(w) && i < info->layers; i++)
        if (d->windows[i])
            context = qt_min_size(context, d->windows[i]);
    u32(w, "context_length", context);
    u32(w, "embedding_length", info->hidden);
    u32(w, "block_count", info->layers);
    u32(w, "feed_forward_length", d->dense_width ? d->dense_width : d->expert_width);
    u32(w, "vocab_size", info->vocab);
    u32(w, "attention.head_count", info->heads);
    if (w->arch->latent) {
        write_latent(w);
    } else {
        u32(w, "attention.head_count_kv", info->kv_heads);
        u32(w, "attention.key_length", info->head_dim);
        u32(w, "attention.value_length", info->head_dim);
    }
    f32(w, "attention.layer_norm_rms_epsilon", (double)d->eps);
    return QT_OK;
}

static void flag(const struct writer *w, const char *name, bool value)
{
    char full[64];
    snprintf(full, sizeof full, "%s%s", w->prefix, name);
    qt_gguf_bool(w->b, full, value);
}

/* How experts are chosen, for architectures that read it. */
static int write_routing(const struct writer *w)
{
    enum { SOFTMAX = 1, SIGMOID = 2 };
    const struct qt_model_details *d = &w->details;
    size_t first = 0;
    while (first < w->info->layers && d->dense && d->dense[first])
        first++;
    for (size_t i = first; i < w->info->layers && d->dense; i++)
        if (d->dense[i])
            return differs(w, "experts in all layers after the first ones");
    u32(w, "leading_dense_block_count", first);
    u32(w, "interleave_moe_layer_step", 1);
    u32(w, "expert_shared_count", d->shared_width / d->expert_width);
    u32(w, "expert_gating_func", d->sigmoid_routing ? SIGMOID : SOFTMAX);
    f32(w, "expert_weights_scale", (double)d->routing_scale);
    flag(w, "expert_weights_norm", d->normalize_routing);
    return QT_OK;
}

static int write_experts(const struct writer *w)
{
    const struct qt_model_details *d = &w->details;
    const bool fixed = !w->arch->routed;
    if (!d->routed)
        return QT_OK;
    if (d->routing_groups > 1 && (!w->arch->latent || d->routing_by_best))
        return differs(w, w->arch->latent ? "scores of groups of experts that are sums of two"
                                          : "experts that are not in groups");
    if (d->routing_groups > 1) {
        u32(w, "expert_group_count", d->routing_groups);
        u32(w, "expert_group_used_count", d->routing_top);
    }
    if (fixed && d->some_dense)
        return differs(w, "experts in all layers");
    if (fixed && d->normalize_routing != w->arch->normalized)
        return differs(w, w->arch->normalized ? "routing weights whose sum is 1"
                                              : "routing weights that are not normalized");
    u32(w, "expert_count", d->routed);
    u32(w, "expert_used_count", d->top_k);
    u32(w, "expert_feed_forward_length", d->expert_width);
    if (d->shared_width)
        u32(w, "expert_shared_feed_forward_length", d->shared_width);
    return fixed ? QT_OK : write_routing(w);
}

static int write_delta(const struct writer *w)
{
    const struct qt_model_details *d = &w->details;
    if (!w->arch->delta)
        return QT_OK;
    if (d->delta_key_dim != d->delta_value_dim)
        return differs(w, "keys and values of gated DeltaNet that have one size");
    if (d->delta_period == 0)
        return differs(w, "attention in every n-th layer");
    u32(w, "full_attention_interval", d->delta_period);
    u32(w, "ssm.conv_kernel", d->delta_kernel);
    u32(w, "ssm.state_size", d->delta_key_dim);
    u32(w, "ssm.group_count", d->delta_key_heads);
    u32(w, "ssm.time_step_rank", d->delta_value_heads);
    u32(w, "ssm.inner_size", d->delta_value_heads * d->delta_value_dim);
    return QT_OK;
}

static int write_windows(const struct writer *w)
{
    const struct qt_model_details *d = &w->details;
    const size_t period = period_of(w);
    size_t window = 0;
    if (!period)
        return QT_OK;
    for (size_t i = 0; i < w->info->layers; i++) {
        const bool expected = i % period < period - 1;
        if ((d->windows[i] > 0) != expected || (window && d->windows[i] && d->windows[i] != window))
            return differs(w, period == 2   ? "a sliding window in every second layer"
                              : period == 4 ? "a sliding window in three of four layers"
                                            : "a sliding window in five of six layers");
        window = d->windows[i] ? d->windows[i] : window;
    }
    u32(w, "attention.sliding_window", window);
    return QT_OK;
}

/* What YaRN multiplies the scores of latent attention by, for its mscale_all_dim. */
static double score_factor(const struct writer *w)
{
    const struct rope r = read_rope(w, "full_attention", "rope_theta", w->arch->theta);
    const double all = number_of(r.options, "mscale_all_dim", 0);
    return w->arch->latent && strcmp(r.type, "yarn") == 0 ? pow(1 + 0.1 * all * log(r.factor), 2)
                                                          : 1;
}

/* Factors of the attention scores, the embedding, sublayer outputs and logits; softcaps. */
static int write_scales(const struct writer *w)
{
    const struct qt_model_details *d = &w->details;
    const struct qt_gguf_arch *arch = w->arch;
    const bool by_hidden = arch->by_hidden && w->info->layers == arch->by_hidden;
    const double head = by_hidden      ? (double)(w->info->hidden / w->info->heads)
                        : arch->latent ? (double)(d->nope + d->rope)
                                       : (double)w->info->head_dim;
    if (!arch->scaled) {
        const double embed = arch->embed_sqrt ? sqrt((double)w->info->hidden) : 1;
        if (!near((double)d->attn_scale, score_factor(w) / sqrt(head)))
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
    if (d->query_beta > 0 && !w->arch->steps)
        return differs(w, "queries that do not depend on the length of a text");
    if (w->arch->latent && !d->interleaved)
        return differs(w, "a rotary embedding of neighboring channels");
    if (d->act != w->arch->act)
        return differs(w, "another activation function");
    for (size_t i = 0; i < w->info->layers; i++)
        if (d->no_rope[i] != skips_rope(w, i))
            return differs(w, skips_rope(w, 3) ? "a rotary embedding in three of four layers"
                                               : "a rotary embedding in all layers");
    if (d->tied && w->arch->head == HEAD_OWN)
        return differs(w, "a head that is stored");
    if (!d->tied && w->arch->head == HEAD_TIED)
        return differs(w, "the embedding as head");
    return QT_OK;
}

/* ---- rotary embedding ----------------------------------------------------------------------- */

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
    const double all = number_of(w->config, "max_position_embeddings", 0);
    return number_of(w->config, key, number_of(r->options, key, all));
}

/* True if llama.cpp computes the same frequencies, but for the range of the interpolated ones: it
 * rounds this range to whole channel pairs, which gpt-oss does not ("truncate": false). */
static bool same_yarn(const struct writer *w, const struct rope *r)
{
    const double original = original_positions(w, r);
    const bool exact = !json_is_false(json_object_get(r->options, "truncate"));
    double most = 0;
    if (strcmp(r->type, "yarn") != 0 || !(r->factor > 1) || !(original > 1))
        return false;
    for (size_t i = 0; i < w->details.rotary_dim / 2; i++) {
        const double f = (double)w->details.inv_freq[i];
        most = fmax(most, fabs(yarn(w, r, i, original) / f - 1));
    }
    if (most > 1e-5 && !exact)
        qt_log_message(w->x->opt->log, QT_LOG_WARNING,
                       "llama.cpp ignores \"truncate\": false of YaRN, in every GGUF file of this "
                       "model: frequencies of the rotary embedding differ by up to %.1f %%",
                       100 * most);
    return most <= 1e-5 || !exact;
}

static void write_yarn(const struct writer *w, const struct rope *r)
{
    qt_gguf_string(w->b, w->prefix, "rope.scaling.type", "yarn");
    f32(w, "rope.scaling.factor", r->factor);
    u32(w, "rope.scaling.original_context_length", (size_t)original_positions(w, r));
    f32(w, "rope.scaling.yarn_beta_fast", number_of(r->options, "beta_fast", 32));
    f32(w, "rope.scaling.yarn_beta_slow", number_of(r->options, "beta_slow", 1));
    if (w->arch->latent) {
        f32(w, "rope.scaling.yarn_log_multiplier",
            0.1 * number_of(r->options, "mscale_all_dim", 0));
        return;
    }
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

/* Channel pairs that each number of a position turns. Those of text are equal. */
static void write_sections(const struct writer *w, const struct rope *r)
{
    const json_t *given = json_object_get(r->options, "mrope_section");
    char name[64];
    snprintf(name, sizeof name, "%srope.dimension_sections", w->prefix);
    qt_gguf_array(w->b, name, QT_GGUF_I32, 4);
    for (size_t i = 0; i < 4; i++) {
        int32_t pairs = (int32_t)json_integer_value(json_array_get(given, i));
        if (!json_array_size(given) && i == 0)
            pairs = (int32_t)(w->details.rotary_dim / 2);
        qt_gguf_raw(w->b, &pairs, sizeof pairs);
    }
    const json_t *vision = json_object_get(w->x->config, "vision_config");
    const json_t *deep = json_object_get(vision, "deepstack_visual_indexes");
    if (json_array_size(deep))
        u32(w, "n_deepstack_layers", json_array_size(deep));
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
    if (arch->sections)
        write_sections(w, &r);
    if (d->local_inv_freq) {
        const struct rope local =
            read_rope(w, "sliding_attention", "rope_local_base_freq", arch->local_theta);
        if (arch->one_theta && !near(local.theta, r.theta))
            return differs(w, "one base of all rotary embeddings (rope_theta)");
        if (!(arch->local_theta > 0) || !same_plain(w, &local, d->local_inv_freq, 1))
            return differs(w, "an unscaled rotary embedding in layers with a window");
        f32(w, "rope.freq_base_swa", local.theta);
    }
    if (d->query_beta > 0) {
        if (d->query_step != (size_t)original_positions(w, &r))
            return differs(w, "queries scaled by steps of original_max_position_embeddings");
        f32(w, "attention.temperature_scale", (double)d->query_beta);
        if (strcmp(r.type, "yarn") != 0)
            u32(w, "rope.scaling.original_context_length", d->query_step);
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
        if (arch->latent && (!unscaled || !(number_of(r.options, "mscale_all_dim", 0) > 0)))
            return differs(w, "YaRN whose mscale and mscale_all_dim are equal");
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
    struct writer w = {.b = b,
                       .arch = arch,
                       .names = qt_gguf_family_find(arch->family),
                       .info = qt_model_info(model),
                       .x = x,
                       .config = json_object_get(x->config, "text_config"),
                       .err = err};
    int rc;
    if (!json_is_object(w.config))
        w.config = x->config;
    qt_model_details(&w.details, model);
    snprintf(w.prefix, sizeof w.prefix, "%s.", w.names->name);
    qt_gguf_string(b, "", "general.architecture", w.names->name);
    qt_gguf_string(b, "", "general.type", "model");
    QT_TRY(write_sizes(&w));
    QT_TRY(write_experts(&w));
    QT_TRY(write_delta(&w));
    QT_TRY(write_windows(&w));
    QT_TRY(write_scales(&w));
    QT_TRY(check_rest(&w));
    QT_TRY(write_rope(&w, factors));
    rc = b->rc;
done:
    return rc;
}
