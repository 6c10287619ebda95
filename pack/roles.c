/* Which tensors are linear weights of decoder layers (docs/schemes.md, "What is quantized"). */
#include "pack/roles.h"

#include <stdio.h>
#include <string.h>

enum { MIN_SIDE = 16 }; /* narrower matrices are gates, convolutions and the like */

/* ---- words of a name ------------------------------------------------------------------------ */

static bool component_is(const char *component, size_t size, const char *word)
{
    const size_t n = strlen(word);
    return word[n - 1] == '*' ? size >= n - 1 && memcmp(component, word, n - 1) == 0
                              : size == n && memcmp(component, word, n) == 0;
}

bool qt_name_has_component(const char *name, const char *const *words)
{
    for (size_t n; *name; name += n + (name[n] == '.')) {
        n = strcspn(name, ".");
        for (size_t i = 0; words[i]; i++)
            if (component_is(name, n, words[i]))
                return true;
    }
    return false;
}

bool qt_name_is_adapter(const char *name)
{
    static const char *const words[] = {
        "lora_*",     "hada_w*",      "lokr_w*",       "ia3_l",
        "oft_r",      "oft_R",        "oft_diag",      "boft_*",
        "vera_A",     "vera_B",       "vera_lambda*",  "fourierft_*",
        "hra_u",      "vblora_*",     "bone_block",    "miss_block",
        "c3a_kernel", "shira_weight", "randlora_*",    "road_theta",
        "road_alpha", "poly_lora_*",  "token_adapter", "prompt_embeddings",
        "adaption_*", "adapter",      "adapters",      "adapter_layer",
        NULL};
    return qt_name_has_component(name, words);
}

bool qt_name_is_optimizer(const char *name)
{
    static const char *const words[] = {
        "optimizer*", "optim",           "exp_avg",    "exp_avg_sq", "max_exp_avg_sq",
        "exp_inf",    "momentum_buffer", "square_avg", "grad_avg",   "acc_delta",
        NULL};
    return qt_name_has_component(name, words);
}

/* ---- kinds of tensors ----------------------------------------------------------------------- */

/* Length of the name up to its first component that is a number: "model.layers.3" of
 * "model.layers.3.mlp..."; 0 if there is none. */
static size_t layer_prefix(const char *name)
{
    for (const char *p = name; (p = strchr(p, '.')) != NULL;) {
        size_t digits = strspn(++p, "0123456789");
        if (digits && p[digits] == '.')
            return (size_t)(p - name) + digits;
    }
    return 0;
}

/* A word of the name begins with one of these. */
bool qt_name_is_multimodal(const char *name)
{
    static const char *const parts[] = {
        "vision",  "visual",    "image",       "video",     "audio",      "speech",    "siglip",
        "clip",    "vit.",      "vpm.",        "apm.",      "sam_model",  "mlp1.", /* of InternVL */
        "qformer", "resampler", "aligner",     "connector", "projector",  "perceiver", "merger.",
        "merger_", "mergers.",  "patch_merge", "talker.",   "token2wav.", "code2wav."};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        for (const char *at = name; (at = strstr(at, parts[i])) != NULL; at++)
            if (at == name || at[-1] == '.' || at[-1] == '_')
                return true;
    return false;
}

/* A component of the name begins with "mtp", or the layer has an eh_proj. */
bool qt_name_is_mtp(const struct qt_ckpt *ckpt, const char *name)
{
    char eh_proj[512];
    const size_t prefix = layer_prefix(name);
    for (const char *at = name; (at = strstr(at, "mtp")) != NULL; at++)
        if ((at == name || at[-1] == '.') && (at[3] == '.' || at[3] == '_'))
            return true;
    return prefix > 0 && prefix < sizeof eh_proj - sizeof ".eh_proj.weight" &&
           snprintf(eh_proj, sizeof eh_proj, "%.*s.eh_proj.weight", (int)prefix, name) > 0 &&
           qt_ckpt_find(ckpt, eh_proj) != NULL;
}

/* True for routers, which have a row per expert, and for the gates of shared experts. A "gate" with
 * as many rows as columns is the gate projection of an MLP. */
static bool is_router(const struct qt_tensor *t)
{
    static const char *const words[] = {"gate", "gating", "moe_gate", "expert_gate", NULL};
    static const char *const shared[] = {"shared_expert_gate", "shared_experts_gate", NULL};
    const size_t n = t->shape[0], k = t->shape[t->ndim - 1];
    return strstr(t->name, "router") || qt_name_has_component(t->name, shared) ||
           (n < k && qt_name_has_component(t->name, words));
}

/* True for masks, tables of positions and parameters of state spaces and convolutions. */
static bool is_no_linear(const char *name)
{
    static const char *const parts[] = {"norm",    "bias",  "rotary",   "inv_freq",
                                        "_cached", "mask",  "position", "alibi",
                                        "slopes",  "A_log", "conv1d"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (strstr(name, parts[i]))
            return true;
    return false;
}

/* True for small projections whose outputs are gates, decay rates or scores of heads: errors in
 * them multiply whole heads, and their bytes are few. */
static bool is_gate(const char *name)
{
    static const char *const gates[] = {
        "in_proj_a", "in_proj_b", "in_proj_ba", /* gated DeltaNet: decay and write strength */
        "a_proj",    "b_proj",    NULL};
    static const char *const indexer[] = {"indexer", "indexers", "index_*",
                                          NULL}; /* sparse attention */
    static const char *const mixing[] = {
        "hc_*", "hyper_connection*", "hyper_connections", "mhc_*", "attn_hc", "ffn_hc", "mlp_hc",
        NULL};
    static const char *const residual[] = {"altup", "laurel", NULL}; /* Gemma 3n */
    return qt_name_has_component(name, gates) || qt_name_has_component(name, residual) ||
           qt_name_has_component(name, indexer) || qt_name_has_component(name, mixing) ||
           strstr(name, "weights_proj");
}

/* Reason to copy what is no linear weight of a decoder layer, by name; NULL: it may be one. */
static const char *reason_by_name(const struct qt_ckpt *ckpt, const struct qt_tensor *t)
{
    static const char *const heads[] = {"output", "output_layer", NULL};
    const char *name = t->name;
    if (qt_name_is_optimizer(name))
        return "optimizer state";
    if (qt_name_is_adapter(name))
        return "adapter";
    if (qt_name_is_multimodal(name))
        return "multimodal tensor";
    if (qt_name_is_mtp(ckpt, name))
        return "MTP layer";
    if (strstr(name, "lm_head") || strstr(name, "embed_out") ||
        (!layer_prefix(name) && qt_name_has_component(name, heads)))
        return "head";
    if (strstr(name, "embed") || strstr(name, "altup_projections") || strstr(name, ".wte.") ||
        strstr(name, ".wpe."))
        return "embedding";
    if (is_no_linear(name))
        return "not a linear weight";
    if (is_router(t))
        return "router";
    return is_gate(name) ? "gate" : NULL;
}

struct qt_role qt_role_of(const struct qt_ckpt *ckpt, const struct qt_tensor *t)
{
    const char *why = t->ndim < 2 ? "vector" : reason_by_name(ckpt, t);
    if (why)
        return (struct qt_role){why, false};
    const size_t n = t->shape[t->ndim - 2], k = t->shape[t->ndim - 1];
    const bool wide = n >= MIN_SIDE && k >= MIN_SIDE;
    if (!qt_dtype_is_weight(t->dtype))
        return (struct qt_role){"dtype", false};
    if (t->ndim > 2)
        return (struct qt_role){wide ? "stacked experts" : "more than 2 dimensions", wide};
    if (!qt_name_ends_in(t->name, ".weight"))
        return (struct qt_role){"not named .weight", wide};
    if (!layer_prefix(t->name))
        return (struct qt_role){"not in a decoder layer", wide};
    return wide ? (struct qt_role){NULL, true} : (struct qt_role){"small", false};
}
