/*
 * The architectures of llama.cpp: keys, and what it computes. formats/gguf_names.c has the names of
 * tensors.
 *
 * llama.cpp computes what its code for the architecture says, whatever config.json has. Everything
 * that a family can vary is therefore either written as a key that llama.cpp reads, or compared
 * with what it computes and refused if it differs.
 */
#include "pack/export/gguf_arch.h"

#include <stdio.h>
#include <string.h>

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
    {.family = "lfm2", .square = true, .short_conv = true, .theta = 1e6},
    {.family = "lfm2_moe", .square = true, .short_conv = true, .routed = true, .theta = 1e6},
    {.family = "llama4_text",
     .chunked = true,
     .skips_rope = true,
     .rope_freqs = true,
     .theta = 5e5},
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

int qt_gguf_differs(const struct writer *w, const char *what)
{
    return qt_fail(w->err, QT_E_UNSUPPORTED, qt_container_dir(w->x->container), NULL,
                   "gguf cannot hold this model: llama.cpp computes '%s' with %s", w->names->name,
                   what);
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

/* Layers without attention have 0. */
static void write_kv_heads(const struct writer *w)
{
    char name[64];
    u32(w, "shortconv.l_cache", w->details.short_kernel);
    snprintf(name, sizeof name, "%sattention.head_count_kv", w->prefix);
    qt_gguf_array(w->b, name, QT_GGUF_I32, w->info->layers);
    for (size_t i = 0; i < w->info->layers; i++) {
        const struct qt_linear *linears;
        int32_t heads = (int32_t)w->info->kv_heads;
        if (qt_model_linears(&linears, w->model, i) > 0 && strstr(linears[0].weight, ".conv."))
            heads = 0;
        qt_gguf_raw(w->b, &heads, sizeof heads);
    }
}

static int write_sizes(const struct writer *w)
{
    const struct qt_model_info *info = w->info;
    const struct qt_model_details *d = &w->details;
    const bool square = info->heads * info->head_dim == info->hidden;
    size_t context = info->max_positions;
    if (w->arch->square && !square)
        return qt_gguf_differs(w, "heads that have the hidden size together");
    if (w->arch->all_kv && info->kv_heads != info->heads)
        return qt_gguf_differs(w, "keys and values for every query head");
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
        if (w->arch->short_conv)
            write_kv_heads(w);
        else
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
            return qt_gguf_differs(w, "experts in all layers after the first ones");
    if (w->arch->short_conv && !(d->normalize_routing && near((double)d->routing_scale, 1)))
        return qt_gguf_differs(w, "routing weights whose sum is 1");
    u32(w, "leading_dense_block_count", first);
    u32(w, "interleave_moe_layer_step", 1);
    u32(w, "expert_shared_count", d->shared_width / d->expert_width);
    u32(w, "expert_gating_func", d->sigmoid_routing ? SIGMOID : SOFTMAX);
    f32(w, "expert_weights_scale", (double)d->routing_scale);
    flag(w, "expert_weights_norm", d->normalize_routing);
    return QT_OK;
}

/* llama.cpp has the sizes of chunks and steps in its code. */
static int write_chunked(const struct writer *w)
{
    enum { CHUNK = 8192, BARE = 128 /* experts of the model without norms */ };
    const struct qt_model_details *d = &w->details;
    size_t step = 1;
    while (step < w->info->layers && d->dense[step - 1])
        step++;
    for (size_t i = 0; i < w->info->layers; i++) {
        if (d->dense[i] == ((i + 1) % step == 0))
            return qt_gguf_differs(w, "experts in every n-th layer");
        if (d->chunks[i] != (d->no_rope[i] ? 0 : CHUNK))
            return qt_gguf_differs(w, "attention within chunks of 8192 tokens");
    }
    if (!near((double)d->floor_beta, 0.1) || d->floor_step != CHUNK)
        return qt_gguf_differs(w, "attn_scale 0.1 and floor_scale 8192");
    if (d->bare_norms == (d->routed == BARE))
        return qt_gguf_differs(w, d->bare_norms
                                      ? "norms of queries and keys unless it has 128 experts"
                                      : "norms of queries and keys");
    u32(w, "interleave_moe_layer_step", step);
    return QT_OK;
}

static int write_experts(const struct writer *w)
{
    const struct qt_model_details *d = &w->details;
    const bool fixed = !w->arch->routed;
    if (!d->routed)
        return QT_OK;
    if (d->routing_groups > 1 && (!w->arch->latent || d->routing_by_best))
        return qt_gguf_differs(w, w->arch->latent
                                      ? "scores of groups of experts that are sums of two"
                                      : "experts that are not in groups");
    if (d->routing_groups > 1) {
        u32(w, "expert_group_count", d->routing_groups);
        u32(w, "expert_group_used_count", d->routing_top);
    }
    if (fixed && d->some_dense && !w->arch->chunked)
        return qt_gguf_differs(w, "experts in all layers");
    if (fixed && d->normalize_routing != w->arch->normalized)
        return qt_gguf_differs(w, w->arch->normalized ? "routing weights whose sum is 1"
                                                      : "routing weights that are not normalized");
    u32(w, "expert_count", d->routed);
    u32(w, "expert_used_count", d->top_k);
    u32(w, "expert_feed_forward_length", d->expert_width);
    if (d->shared_width)
        u32(w, "expert_shared_feed_forward_length", d->shared_width);
    return w->arch->chunked ? write_chunked(w) : fixed ? QT_OK : write_routing(w);
}

static int write_delta(const struct writer *w)
{
    const struct qt_model_details *d = &w->details;
    if (!w->arch->delta)
        return QT_OK;
    if (d->delta_key_dim != d->delta_value_dim)
        return qt_gguf_differs(w, "keys and values of gated DeltaNet that have one size");
    if (d->delta_period == 0)
        return qt_gguf_differs(w, "attention in every n-th layer");
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
            return qt_gguf_differs(w, period == 2   ? "a sliding window in every second layer"
                                      : period == 4 ? "a sliding window in three of four layers"
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
    const double head = by_hidden      ? (double)(w->info->hidden / w->info->heads)
                        : arch->latent ? (double)(d->nope + d->rope)
                                       : (double)w->info->head_dim;
    if (!arch->scaled) {
        const double embed = arch->embed_sqrt ? sqrt((double)w->info->hidden) : 1;
        if (!near((double)d->attn_scale, qt_gguf_score_factor(w) / sqrt(head)))
            return qt_gguf_differs(w, "attention scores divided by the root of the size of a head");
        if (!near((double)d->embed_scale, embed) || !near((double)d->residual_scale, 1) ||
            !near((double)d->logit_scale, 1))
            return qt_gguf_differs(w, "fixed factors of embedding, residuals and logits");
    } else {
        f32(w, "attention.scale", (double)d->attn_scale);
        f32(w, "embedding_scale", (double)d->embed_scale);
        f32(w, "residual_scale", (double)d->residual_scale);
        f32(w, "logit_scale", 1 / (double)d->logit_scale);
    }
    const bool caps[2] = {d->attn_softcap > 0, w->info->logit_softcap > 0};
    if (caps[0] != arch->capped || (caps[1] != arch->capped && !arch->last_cap))
        return qt_gguf_differs(w, arch->capped ? "softcaps of attention scores and logits"
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
        return qt_gguf_differs(w, "queries that do not depend on the length of a text");
    if (w->arch->latent && !d->interleaved)
        return qt_gguf_differs(w, "a rotary embedding of neighboring channels");
    if (d->act != w->arch->act)
        return qt_gguf_differs(w, "another activation function");
    for (size_t i = 0; i < w->info->layers; i++)
        if (d->no_rope[i] != skips_rope(w, i))
            return qt_gguf_differs(w, skips_rope(w, 3)
                                          ? "a rotary embedding in three of four layers"
                                          : "a rotary embedding in all layers");
    if (d->tied && w->arch->head == HEAD_OWN)
        return qt_gguf_differs(w, "a head that is stored");
    if (!d->tied && w->arch->head == HEAD_TIED)
        return qt_gguf_differs(w, "the embedding as head");
    return QT_OK;
}

int qt_gguf_arch_keys(struct qt_gguf_bytes *b, struct qt_gguf_factors *factors,
                      const struct qt_gguf_arch *arch, const struct qt_model *model,
                      const struct qt_export *x, struct qt_err *err)
{
    struct writer w = {.b = b,
                       .arch = arch,
                       .names = qt_gguf_family_find(arch->family),
                       .model = model,
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
    QT_TRY(qt_gguf_write_rope(&w, factors));
    rc = b->rc;
done:
    return rc;
}
