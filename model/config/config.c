/*
 * config.json -> struct config. The file is untrusted: every number has a range, and an option that
 * changes the result but is not implemented is an error that names the option.
 */
#include "model/config/config.h"

enum {
    LIMIT_FILE = 16 << 20,
    LIMIT_HEADS = 1 << 16,
    LIMIT_DIM = 1 << 12, /* of the state of gated DeltaNet */
};

/* ---- sizes ---------------------------------------------------------------------------------- */

/* For kv_heads and head_dim, null does not mean the family's default but the value that follows
 * from the other sizes. */
static int read_heads(struct config *cfg, const struct source *src, struct qt_err *err)
{
    struct qt_model_info *info = &cfg->info;
    int rc = QT_OK;
    info->heads = cfg->arch->heads;
    QT_TRY(config_read_size(&info->heads, src, "num_attention_heads", LIMIT_HEADS, err));
    info->kv_heads = info->heads;
    if (cfg->arch->kv_heads && !config_null(src->json, "num_key_value_heads"))
        info->kv_heads = cfg->arch->kv_heads;
    QT_TRY(config_read_size(&info->kv_heads, src, "num_key_value_heads", LIMIT_HEADS, err));
    if (info->heads % info->kv_heads)
        return qt_fail(err, QT_E_INPUT, src->path, NULL,
                       "'num_attention_heads' %zu is not a multiple of 'num_key_value_heads' %zu",
                       info->heads, info->kv_heads);
    if (cfg->arch->latent)
        info->head_dim = 1; /* read_latent sets it */
    else if (config_given(src->json, "head_dim"))
        QT_TRY(config_read_size(&info->head_dim, src, "head_dim", LIMIT_HEADS, err));
    else if (cfg->arch->head_dim && !config_null(src->json, "head_dim"))
        info->head_dim = cfg->arch->head_dim;
    else if (info->hidden % info->heads)
        return qt_fail(err, QT_E_INPUT, src->path, NULL,
                       "'hidden_size' %zu is not a multiple of 'num_attention_heads' %zu",
                       info->hidden, info->heads);
    else
        info->head_dim = info->hidden / info->heads;
done:
    return rc;
}

/* Latent attention: see struct config. */
static int read_latent(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const struct arch *arch = cfg->arch;
    const bool direct = config_null(src->json, "q_lora_rank");
    int rc = QT_OK;
    if (cfg->info.kv_heads != cfg->info.heads)
        return qt_fail(err, QT_E_INPUT, src->path, NULL,
                       "'num_key_value_heads' %zu differs from 'num_attention_heads' %zu",
                       cfg->info.kv_heads, cfg->info.heads);
    cfg->latent.v = arch->value_dim;
    if (!direct)
        QT_TRY(config_read_size(&cfg->latent.q_rank, src, "q_lora_rank", CONFIG_WIDTH, err));
    QT_TRY(config_read_size(&cfg->latent.kv_rank, src, "kv_lora_rank", CONFIG_WIDTH, err));
    QT_TRY(config_read_size(&cfg->latent.nope, src, "qk_nope_head_dim", LIMIT_HEADS, err));
    QT_TRY(config_read_size(&cfg->latent.rope, src, "qk_rope_head_dim", LIMIT_HEADS, err));
    if (!config_given(src->json, "v_head_dim") && !arch->value_dim)
        cfg->latent.v = cfg->info.hidden / cfg->info.heads;
    QT_TRY(config_read_size(&cfg->latent.v, src, "v_head_dim", LIMIT_HEADS, err));
    cfg->o_width = cfg->info.heads * cfg->latent.v;
    cfg->info.head_dim = qt_max_size(cfg->latent.nope + cfg->latent.rope, cfg->latent.v);
done:
    return rc;
}

/* The sizes of gated DeltaNet, and which layers have it. */
static int read_delta(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const json_t *types = json_object_get(src->json, "layer_types");
    size_t interval = 4;
    int rc;
    cfg->delta.key_heads = 16;
    cfg->delta.value_heads = 32;
    cfg->delta.key_dim = cfg->delta.value_dim = 128;
    cfg->delta.kernel = 4;
    QT_TRY(config_read_size(&cfg->delta.key_heads, src, "linear_num_key_heads", LIMIT_HEADS, err));
    QT_TRY(
        config_read_size(&cfg->delta.value_heads, src, "linear_num_value_heads", LIMIT_HEADS, err));
    QT_TRY(config_read_size(&cfg->delta.key_dim, src, "linear_key_head_dim", LIMIT_DIM, err));
    QT_TRY(config_read_size(&cfg->delta.value_dim, src, "linear_value_head_dim", LIMIT_DIM, err));
    QT_TRY(config_read_size(&cfg->delta.kernel, src, "linear_conv_kernel_dim", LIMIT_DIM, err));
    if (cfg->delta.value_heads % cfg->delta.key_heads)
        return qt_fail(err, QT_E_INPUT, src->path, NULL,
                       "'linear_num_value_heads' %zu is not a multiple of 'linear_num_key_heads' "
                       "%zu",
                       cfg->delta.value_heads, cfg->delta.key_heads);
    if (!config_given(src->json, "layer_types"))
        QT_TRY(config_read_size(&interval, src, "full_attention_interval", CONFIG_LAYERS, err));
    for (size_t i = 0; i < cfg->info.layers; i++) {
        const char *type = json_string_value(json_array_get(types, i));
        const bool listed = config_given(src->json, "layer_types");
        if (listed ? type && strcmp(type, "linear_attention") == 0 : (i + 1) % interval != 0)
            cfg->mixers[i] = MIXER_DELTA;
    }
done:
    return rc;
}

int config_read_attention(struct config *cfg, const struct source *src, const char *key,
                          struct qt_err *err)
{
    const json_t *list = json_object_get(src->json, key);
    if (!config_given(src->json, key))
        return QT_OK;
    if (!json_is_array(list))
        return qt_fail(err, QT_E_INPUT, src->path, NULL, "'%s' is not a list", key);
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *entry = json_array_get(list, i);
        if (!json_is_integer(entry) || json_integer_value(entry) < 0)
            return qt_fail(err, QT_E_INPUT, src->path, NULL, "'%s' is not a list of layers", key);
        if ((size_t)json_integer_value(entry) < cfg->info.layers)
            cfg->mixers[json_integer_value(entry)] = MIXER_ATTENTION;
    }
    return QT_OK;
}

/* The short convolution, and which layers have it: those that are "conv" in layer_types, or not in
 * the list full_attn_idxs. */
static int read_short(struct config *cfg, const struct source *src, struct qt_err *err)
{
    static const char key[] = "full_attn_idxs";
    const json_t *types = json_object_get(src->json, "layer_types");
    int rc;
    cfg->short_kernel = 3;
    QT_TRY(config_read_size(&cfg->short_kernel, src, "conv_L_cache", LIMIT_DIM, err));
    if (config_given(src->json, "layer_types")) {
        for (size_t i = 0; i < cfg->info.layers; i++) {
            const char *type = json_string_value(json_array_get(types, i));
            if (type && strcmp(type, "conv") == 0)
                cfg->mixers[i] = MIXER_SHORT;
        }
        goto done;
    }
    if (!config_given(src->json, key))
        goto done;
    for (size_t i = 0; i < cfg->info.layers; i++)
        cfg->mixers[i] = MIXER_SHORT;
    QT_TRY(config_read_attention(cfg, src, key, err));
done:
    return rc;
}

static int read_mixers(struct config *cfg, const struct source *src, struct qt_err *err)
{
    int rc = qt_array_new(&cfg->mixers, cfg->info.layers, sizeof *cfg->mixers, err);
    cfg->o_width = cfg->info.heads * cfg->info.head_dim;
    for (size_t i = 0; rc == QT_OK && i < cfg->info.layers; i++)
        cfg->mixers[i] = cfg->arch->latent         ? MIXER_LATENT
                         : cfg->arch->head_experts ? MIXER_HEAD_EXPERTS
                                                   : MIXER_ATTENTION;
    return rc < 0                  ? rc
           : cfg->arch->latent     ? read_latent(cfg, src, err)
           : cfg->arch->delta      ? read_delta(cfg, src, err)
           : cfg->arch->short_conv ? read_short(cfg, src, err)
           : cfg->arch->ssm        ? config_read_ssm(cfg, src, err)
                                   : QT_OK;
}

/* True if some layer is this block; families without blocks have all of them. */
static bool has_block(const struct config *cfg, const struct source *src, char block)
{
    bool found = cfg->arch->ssm != SSM_BLOCKS;
    for (size_t i = 0; i < cfg->info.layers && !found; i++)
        found = config_block(src, i) == block;
    return found;
}

static int read_sizes(struct config *cfg, const struct source *src, struct qt_err *err)
{
    struct qt_model_info *info = &cfg->info;
    const char *key = cfg->arch->experts ? cfg->arch->dense_key : cfg->arch->intermediate_key;
    bool mixture = cfg->arch->experts && !cfg->arch->experts_switch;
    int rc = QT_OK;
    QT_TRY(cfg->arch->ssm == SSM_BLOCKS && cfg->arch->experts
               ? config_count_blocks(&info->layers, src, err)
               : config_read_size(&info->layers, src, "num_hidden_layers", CONFIG_LAYERS, err));
    QT_TRY(config_read_size(&info->hidden, src, "hidden_size", CONFIG_WIDTH, err));
    info->vocab = cfg->arch->vocab;
    info->max_positions = cfg->arch->max_positions;
    QT_TRY(config_read_size(&info->vocab, src, "vocab_size", CONFIG_WIDTH, err));
    QT_TRY(config_read_size(&info->max_positions, src, "max_position_embeddings", CONFIG_POSITIONS,
                            err));
    if (cfg->arch->positions_key) {
        size_t most = cfg->arch->positions_most;
        QT_TRY(config_read_size(&most, src, cfg->arch->positions_key, CONFIG_POSITIONS, err));
        info->max_positions = qt_min_size(info->max_positions, most);
    }
    if (cfg->arch->experts_optional) {
        const json_t *count = json_object_get(src->json, "num_local_experts");
        mixture = !json_is_integer(count) || json_integer_value(count) != 0;
    }
    if (cfg->arch->experts_switch)
        QT_TRY(qt_json_get_bool(&mixture, src->json, cfg->arch->experts_switch, src->path, err));
    if (mixture && has_block(cfg, src, 'E')) {
        QT_TRY(config_read_experts(cfg, src, err));
    } else if (has_block(cfg, src, '-')) {
        cfg->dense_width = cfg->arch->grows ? 4 * info->hidden : 0;
        QT_TRY(config_read_size(&cfg->dense_width, src, key ? key : "intermediate_size",
                                CONFIG_WIDTH, err));
    }
    QT_TRY(read_heads(cfg, src, err));
    QT_TRY(read_mixers(cfg, src, err));
    cfg->embed_dim = info->hidden;
    if (cfg->arch->project_in)
        QT_TRY(config_read_size(&cfg->embed_dim, src, "word_embed_proj_dim", CONFIG_WIDTH, err));
done:
    return rc;
}

/* ---- options -------------------------------------------------------------------------------- */

static int read_act(struct config *cfg, const struct source *src, struct qt_err *err)
{
    static const struct {
        const char *name;
        enum qt_act_kind kind;
    } acts[] = {
        {"silu", QT_ACT_SILU},          {"swish", QT_ACT_SILU},
        {"gelu", QT_ACT_GELU},          {"gelu_pytorch_tanh", QT_ACT_GELU_TANH},
        {"gelu_new", QT_ACT_GELU_TANH}, {"relu", QT_ACT_RELU},
        {"relu2", QT_ACT_RELU2},
    };
    const char *name = cfg->arch->act;
    int rc = qt_json_get_string(&name, src->json, cfg->arch->act_key, src->path, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < sizeof acts / sizeof *acts; i++)
        if (strcmp(acts[i].name, name) == 0) {
            cfg->act = acts[i].kind;
            return QT_OK;
        }
    return config_unsupported(src, cfg->arch->act_key, name, err);
}

static int read_tied(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const char *key = cfg->arch->tied.key;
    const bool in = config_given(src->json, key), out = config_given(src->root, key);
    bool inner = cfg->arch->tied.value, outer = inner;
    int rc = QT_OK;
    QT_TRY(qt_json_get_bool(&inner, src->json, key, src->path, err));
    QT_TRY(qt_json_get_bool(&outer, src->root, key, src->path, err));
    cfg->tied = in ? inner : outer;
    cfg->tied_unclear = cfg->multimodal && in == out && (!in || inner != outer);
done:
    return rc;
}

static int read_flags(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const struct arch *arch = cfg->arch;
    const struct arch_flag head_norms = {arch->head_norms_key, !arch->head_norms_key};
    double eps = cfg->multimodal && cfg->multimodal->eps > 0 ? cfg->multimodal->eps
                 : arch->eps > 0                             ? arch->eps
                 : arch->eps_key                             ? 1e-6
                                                             : 1e-5;
    double clip = 0;
    int rc = QT_OK;
    QT_TRY(config_read_flag(&cfg->qkv_bias, src, &arch->qkv_bias, err));
    QT_TRY(config_read_flag(&cfg->o_bias, src, &arch->o_bias, err));
    QT_TRY(config_read_flag(&cfg->mlp_bias, src, &arch->mlp_bias, err));
    QT_TRY(config_read_flag(&cfg->parallel, src, &arch->parallel, err));
    QT_TRY(config_read_flag(&cfg->head_bias, src, &arch->head_bias, err));
    QT_TRY(config_read_flag(&cfg->alibi, src, &arch->alibi, err));
    cfg->parallel_norms = arch->parallel_norms;
    QT_TRY(read_tied(cfg, src, err));
    QT_TRY(config_read_flag(&cfg->head_norms, src, &head_norms, err));
    if (arch->eps_key)
        QT_TRY(config_read_positive(&eps, src, arch->eps_key, err));
    cfg->eps = (float)eps;
    cfg->final_norm = true;
    cfg->embed_scale = cfg->residual_scale = cfg->logit_scale = 1.0f;
    cfg->attn_scale = (float)(1.0 / sqrt((double)(arch->latent ? cfg->latent.nope + cfg->latent.rope
                                                               : cfg->info.head_dim)));
    if (config_given(src->json, "clip_qkv"))
        QT_TRY(arch->clips ? config_read_positive(&clip, src, "clip_qkv", err)
                           : config_unsupported(src, "clip_qkv", "a number", err));
    cfg->clip_qkv = (float)clip;
    if (config_given(src->json, QT_QUANTIZATION_KEY) ||
        config_given(src->root, QT_QUANTIZATION_KEY))
        rc = qt_fail(err, QT_E_UNSUPPORTED, src->path, NULL,
                     "the checkpoint is already quantized (" QT_QUANTIZATION_KEY
                     "): give the FP16, BF16 or FP32 checkpoint that it was made from");
done:
    return rc;
}

/* ---- sliding windows ------------------------------------------------------------------------ */

/* *out = whether `layer` has the window, by layer_types or else by the family's rule. layer_types
 * must agree with WINDOW_ALL and WINDOW_NONE. from: the first layer or period of the rule. */
static int layer_slides(bool *out, const struct config *cfg, const struct source *src, size_t layer,
                        size_t window, size_t from, struct qt_err *err)
{
    const json_t *types = json_object_get(src->json, "layer_types");
    enum window_rule rule = cfg->arch->window;
    const bool every = rule == WINDOW_ALL || rule == WINDOW_LISTED;
    *out = (every && window) || (rule == WINDOW_EVEN && layer % 2 == 0) ||
           (rule == WINDOW_FROM_LAYER && layer >= from) ||
           (rule == WINDOW_EVEN_TO_LAYER && layer % 2 == 0 && layer < from) ||
           (rule == WINDOW_PATTERN && (layer + 1) % from != 0) ||
           (rule == WINDOW_PATTERN_FIRST && layer % from != 0);
    if (cfg->arch->first_global && layer == 0)
        *out = false;
    if (cfg->arch->last_global && layer + 1 == cfg->info.layers)
        *out = false;
    if (!config_given(src->json, "layer_types"))
        return QT_OK;
    if (!json_is_array(types) || json_array_size(types) != cfg->info.layers)
        return qt_fail(err, QT_E_INPUT, src->path, NULL, "'layer_types' is not a list of %zu names",
                       cfg->info.layers);
    const char *type = json_string_value(json_array_get(types, layer));
    bool slides = type && strcmp(type, "sliding_attention") == 0;
    if (type && cfg->mixers[layer] != MIXER_ATTENTION && cfg->mixers[layer] != MIXER_LATENT)
        return QT_OK;
    if (!type || (!slides && strcmp(type, "full_attention") != 0 &&
                  !(cfg->arch->chunked && strcmp(type, "chunked_attention") == 0) &&
                  strcmp(type, "attention") != 0 &&
                  !(cfg->arch->sparse_type && strcmp(type, cfg->arch->sparse_type) == 0) &&
                  !(cfg->arch->positions_key && strcmp(type, "indexed_attention") == 0)))
        return config_unsupported(src, "layer_types", type ? type : "an entry that is not a string",
                                  err);
    if ((rule == WINDOW_ALL || rule == WINDOW_NONE) && slides != *out)
        return config_unsupported(src, "layer_types", type, err);
    *out = slides && !(cfg->arch->last_global && layer + 1 == cfg->info.layers);
    return QT_OK;
}

static int read_windows(struct config *cfg, const struct source *src, struct qt_err *err)
{
    enum window_rule rule = cfg->arch->window;
    size_t window = cfg->arch->window_size ? cfg->arch->window_size : 4096;
    size_t from = cfg->arch->window_from ? cfg->arch->window_from : 28;
    bool use = !cfg->arch->window_switch;
    int rc = QT_OK;
    QT_TRY(qt_array_new(&cfg->windows, cfg->info.layers, sizeof *cfg->windows, err));
    if (cfg->arch->window_switch)
        QT_TRY(qt_json_get_bool(&use, src->json, "use_sliding_window", src->path, err));
    if (rule == WINDOW_FROM_LAYER || rule == WINDOW_EVEN_TO_LAYER)
        QT_TRY(qt_json_get_size(&from, src->json, "max_window_layers", src->path, err));
    if (rule == WINDOW_PATTERN || rule == WINDOW_PATTERN_FIRST) {
        const bool none = config_null(src->json, "sliding_window");
        const char *period = cfg->arch->window_period_key;
        from = cfg->arch->window_period;
        if (none && !cfg->arch->window_optional)
            QT_TRY(config_unsupported(src, "sliding_window", "null", err));
        if (!none && period && !config_given(src->json, "layer_types")) {
            if (config_null(src->json, period))
                QT_TRY(config_unsupported(src, period, "null", err));
            QT_TRY(config_read_size(&from, src, period, CONFIG_LAYERS, err));
        }
    }
    if (cfg->arch->window_given && !config_given(src->json, "sliding_window"))
        use = false;
    if (config_null(src->json, "sliding_window") || !use)
        window = 0;
    else if (rule != WINDOW_NONE)
        QT_TRY(config_read_size(&window, src, "sliding_window", CONFIG_POSITIONS, err));
    for (size_t i = 0; i < cfg->info.layers; i++) {
        bool slides;
        QT_TRY(layer_slides(&slides, cfg, src, i, window, from, err));
        cfg->windows[i] = slides ? window : 0;
    }
done:
    return rc;
}

/* ---- layers without the rotary embedding ---------------------------------------------------- */

/* Entry `layer` of no_rope_layers; 0 or false: no rotary embedding. */
static int listed_no_rope(bool *out, const json_t *list, const struct source *src, size_t layer,
                          struct qt_err *err)
{
    const json_t *entry = json_array_get(list, layer);
    if (!json_is_integer(entry) && !json_is_boolean(entry))
        return qt_fail(err, QT_E_INPUT, src->path, NULL,
                       "'no_rope_layers' is not a list of a 0 or 1 for each layer");
    *out = json_is_boolean(entry) ? json_is_false(entry) : json_integer_value(entry) == 0;
    return QT_OK;
}

static int read_no_rope(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const enum no_rope_rule rule = cfg->arch->no_rope;
    const json_t *list = json_object_get(src->json, "no_rope_layers");
    const bool listed = config_given(src->json, "no_rope_layers") &&
                        !(cfg->arch->chunked && json_array_size(list) == 0);
    const bool windowed = !config_null(src->json, "sliding_window");
    size_t period = 4;
    bool slides = false;
    int rc;
    QT_TRY(qt_array_new(&cfg->no_rope, cfg->info.layers, sizeof *cfg->no_rope, err));
    if (rule == NO_ROPE_LISTED) {
        if (!listed)
            QT_TRY(config_read_size(&period, src, "no_rope_layer_interval", CONFIG_LAYERS, err));
        QT_TRY(qt_json_get_bool(&slides, src->json, "use_sliding_window", src->path, err));
        if (slides)
            QT_TRY(config_unsupported(src, "use_sliding_window", "true", err));
    }
    for (size_t i = 0; i < cfg->info.layers; i++) {
        cfg->no_rope[i] = (rule == NO_ROPE_GLOBAL && windowed && !cfg->windows[i]) ||
                          (rule == NO_ROPE_LISTED && (i + 1) % period == 0);
        if (rule == NO_ROPE_LISTED && listed)
            QT_TRY(listed_no_rope(&cfg->no_rope[i], list, src, i, err));
    }
done:
    return rc;
}

/* ---- the file ------------------------------------------------------------------------------- */

/* *out = the object `key` of obj, or obj if there is none. */
static int inner_object(const json_t **out, const json_t *obj, const char *key, const char *path,
                        struct qt_err *err)
{
    const json_t *inner = json_object_get(obj, key);
    *out = json_is_object(inner) ? inner : obj;
    return qt_json_literal(inner)
               ? qt_fail(err, QT_E_INPUT, path, NULL, "'%s' is not an object", key)
               : QT_OK;
}

/* Finds the family and the object with the decoder's options. Omni models have those of the
 * multimodal model, without speech output, in "thinker_config". */
static int find_decoder(struct config *cfg, struct source *src, struct qt_err *err)
{
    const json_t *inner;
    const char *type;
    int rc = QT_OK;
    QT_TRY(qt_json_need_string(&type, src->root, "model_type", src->path, err));
    QT_TRY(inner_object(&src->root, src->root, "thinker_config", src->path, err));
    src->json = src->root;
    QT_TRY(inner_object(&inner, src->root, "text_config", src->path, err));
    cfg->multimodal = arch_of_multimodal(type);
    if (cfg->multimodal) {
        type = cfg->multimodal->decoder;
        if (inner != src->root) /* else the options are outside, as in Qwen2.5-VL */
            QT_TRY(qt_json_get_string(&type, inner, "model_type", src->path, err));
        src->json = inner;
    }
    cfg->arch = arch_find(type);
    if (!cfg->arch)
        rc = qt_fail(err, QT_E_UNSUPPORTED, src->path, NULL,
                     "'model_type': %s is not supported; 'qtool list archs' lists those that are",
                     type);
done:
    return rc;
}

/* A list of equal numbers, one for each layer, stands for the number. */
static json_t *one_of_all(json_t *value)
{
    json_t *first = json_array_get(value, 0);
    for (size_t i = 1; i < json_array_size(value); i++)
        if (!json_equal(first, json_array_get(value, i)))
            return value;
    return json_is_integer(first) ? first : value;
}

/* *out = a copy of src->json in which the family's own keys are replaced by the usual ones. */
static int rename_keys(json_t **out, const struct config *cfg, const struct source *src,
                       struct qt_err *err)
{
    *out = json_copy((json_t *)(uintptr_t)src->json);
    if (!*out || json_object_size(*out) != json_object_size(src->json)) /* Jansson ignores it */
        return qt_no_memory(err, NULL);
    for (const struct arch_alias *a = cfg->arch->aliases; a && a->key; a++) {
        json_t *value = one_of_all(json_object_get(*out, a->alias));
        if (value && !json_object_get(*out, a->key) && json_object_set(*out, a->key, value) < 0)
            return qt_no_memory(err, NULL);
    }
    return cfg->arch->adapt ? cfg->arch->adapt(*out, src, err) : QT_OK;
}

static int read_all(struct config *cfg, struct source *src, struct qt_err *err)
{
    int rc = QT_OK;
    cfg->info.family = cfg->arch->family;
    cfg->info.norms_plus_1 = cfg->arch->norms_plus_1;
    QT_TRY(read_sizes(cfg, src, err));
    QT_TRY(read_flags(cfg, src, err));
    QT_TRY(read_act(cfg, src, err));
    cfg->ssm.act = cfg->act;
    QT_TRY(read_windows(cfg, src, err));
    QT_TRY(config_read_layer_heads(cfg, src, err));
    QT_TRY(read_no_rope(cfg, src, err));
    if (cfg->arch->rope && !cfg->alibi)
        QT_TRY(config_read_rope(cfg, src, err));
    if (cfg->arch->read)
        QT_TRY(cfg->arch->read(cfg, src, err));
    config_place_state(cfg);
done:
    return rc;
}

/* Removes the section that loading the weights undoes, from config.json or an object in it. */
static void drop_quantization(json_t *json, const json_t *quantization)
{
    const char *key;
    json_t *value;
    if (!quantization)
        return;
    if (json_equal(json_object_get(json, QT_QUANTIZATION_KEY), quantization))
        json_object_del(json, QT_QUANTIZATION_KEY);
    json_object_foreach (json, key, value)
        drop_quantization(value, quantization);
}

int config_read(struct config *out, const char *dir, const json_t *quantization, struct qt_err *err)
{
    char *path = NULL;
    json_t *json = NULL, *renamed = NULL;
    int rc = QT_OK;
    *out = (struct config){0};
    QT_TRY(qt_path_join(&path, dir, "config.json", err));
    QT_TRY(qt_json_load_lenient(&json, path, LIMIT_FILE, err));
    drop_quantization(json, quantization);
    struct source src = {json, json, path};
    QT_TRY(find_decoder(out, &src, err));
    QT_TRY(rename_keys(&renamed, out, &src, err));
    src.json = renamed;
    QT_TRY(read_all(out, &src, err));
done:
    json_decref(renamed);
    json_decref(json);
    qt_free(path);
    if (rc < 0)
        config_free(out);
    return rc;
}

void config_free(struct config *cfg)
{
    qt_free(cfg->windows);
    qt_free(cfg->chunks);
    qt_free(cfg->cutoffs);
    qt_free(cfg->no_rope);
    qt_free(cfg->mixers);
    qt_free(cfg->heads);
    qt_free(cfg->dense);
    qt_free(cfg->rope.inv_freq);
    qt_free(cfg->rope.long_inv_freq);
    qt_free(cfg->local_rope.inv_freq);
    qt_free(cfg->local_rope.long_inv_freq);
    *cfg = (struct config){0};
}
