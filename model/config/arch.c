/* The table of model families, and what follows from a family. */
#include "model/config/families/families.h"

#define CONFIG_ADDRESS(name) &arch_##name,
static const struct arch *const table[] = {CONFIG_FAMILIES(CONFIG_ADDRESS)};
#undef CONFIG_ADDRESS

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
        if (strcmp(table[i]->family, family) == 0)
            return table[i];
    return NULL;
}

const char *qt_model_type(size_t i)
{
    return i < FAMILIES                ? table[i]->family
           : i < FAMILIES + MULTIMODAL ? multimodal[i - FAMILIES].type
                                       : NULL;
}

/* QT_USE_FUSED */
static const char *fused_cannot(const struct arch *arch, bool experts, bool ssm)
{
    return arch->both_ways                             ? "attention that goes both ways"
           : arch->latent                              ? "latent attention"
           : arch->delta                               ? "gated DeltaNet"
           : arch->short_conv                          ? "short convolutions"
           : arch->head_experts                        ? "mixtures of attention heads"
           : ssm                                       ? "state space models"
           : arch->window_heads                        ? "values narrower than keys"
           : arch->altup_in                            ? "several hidden states of a token (AltUp)"
           : arch->chunked                             ? "attention within chunks"
           : arch->gated                               ? "gated attention"
           : arch->parts[ROLE_ATTN_GATE]               ? "gated attention"
           : !experts                                  ? NULL
           : arch->sparse_mixer || arch->scaled_inputs ? "a router of this kind"
           : arch->parts[ROLE_ROUTER_NORM]             ? "norms or factors of their own for experts"
                                                       : NULL;
}

const char *arch_cannot(const struct arch *arch, bool experts, bool ssm, enum qt_use use)
{
    if (use == QT_USE_FUSED)
        return fused_cannot(arch, experts, ssm);
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
    out->sometimes_fused = !fused_cannot(arch, out->experts && !arch->experts_switch,
                                         arch->ssm && arch->ssm != SSM_TYPES);
    return true;
}
