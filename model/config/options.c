/* Options of config.json that only one family and its relatives have. */
#include "model/config/config.h"

/* Like config_read_positive, with the default `missing`; null turns the softcap off (*out = 0). */
static int read_softcap(float *out, const struct source *src, const char *key, double missing,
                        struct qt_err *err)
{
    const json_t *v = json_object_get(src->json, key);
    double value = missing;
    int rc = QT_OK;
    if (json_is_null(v))
        value = 0;
    else if (v)
        rc = config_read_positive(&value, src, key, err);
    *out = (float)value;
    return rc;
}

int config_read_opt(struct config *cfg, const struct source *src, struct qt_err *err)
{
    bool before = true, affine = true, no_final = false;
    int rc = QT_OK;
    QT_TRY(qt_json_get_bool(&before, src->json, "do_layer_norm_before", src->path, err));
    QT_TRY(qt_json_get_bool(&affine, src->json, "layer_norm_elementwise_affine", src->path, err));
    QT_TRY(qt_json_get_bool(&no_final, src->json, "_remove_final_layer_norm", src->path, err));
    if (!affine)
        QT_TRY(config_unsupported(src, "layer_norm_elementwise_affine", "false", err));
    cfg->norm_after = !before;
    cfg->final_norm = before && !no_final;
done:
    return rc;
}

int config_read_gemma(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const struct arch *arch = cfg->arch;
    double scalar = arch->query_scalar > 0 ? arch->query_scalar : (double)cfg->info.head_dim;
    bool both_ways = false;
    int rc = QT_OK;
    QT_TRY(
        read_softcap(&cfg->attn_softcap, src, "attn_logit_softcapping", arch->attn_softcap, err));
    QT_TRY(read_softcap(&cfg->info.logit_softcap, src, "final_logit_softcapping",
                        arch->logit_softcap, err));
    if (arch->query_scalar > 0)
        QT_TRY(config_read_positive(&scalar, src, "query_pre_attn_scalar", err));
    QT_TRY(qt_json_get_bool(&both_ways, src->json, "use_bidirectional_attention", src->path, err));
    if (both_ways)
        QT_TRY(config_unsupported(src, "use_bidirectional_attention", "true", err));
    if (arch->local_theta > 0 && cfg->attn_softcap > 0) /* transformers ignores it */
        QT_TRY(config_unsupported(src, "attn_logit_softcapping", "a number in this family", err));
    if (cfg->multimodal && cfg->info.logit_softcap > 0) /* ignored, too */
        QT_TRY(
            config_unsupported(src, "final_logit_softcapping", "a number in 'text_config'", err));
    if (cfg->act == QT_ACT_GELU) /* transformers does so, because early files had the wrong name */
        cfg->act = QT_ACT_GELU_TANH;
    cfg->attn_scale = (float)(1.0 / sqrt(scalar));
    cfg->embed_scale = (float)sqrt((double)cfg->info.hidden);
done:
    return rc;
}

/* The inputs of single layers; *width: the default. */
static int read_per_layer(struct config *cfg, const struct source *src, size_t *width,
                          struct qt_err *err)
{
    static const char key[] = "hidden_size_per_layer_input";
    int rc;
    QT_TRY(qt_json_get_size(width, src->json, key, src->path, err));
    if (*width && cfg->info.experts)
        QT_TRY(config_unsupported(src, key, "a number above 0 with experts", err));
    if (*width > CONFIG_WIDTH / cfg->info.layers)
        QT_TRY(config_unsupported(src, key, "so large a number", err));
    cfg->per_layer = *width;
    cfg->per_layer_vocab = 262144;
    if (*width)
        QT_TRY(config_read_size(&cfg->per_layer_vocab, src, "vocab_size_per_layer_input",
                                CONFIG_WIDTH, err));
done:
    return rc;
}

/* The x with which a normal random number is below x with probability p. */
static double normal_quantile(double p)
{
    double x = 0, step = 1;
    for (int i = 0; i < 100 && fabs(step) > 1e-12; i++) {
        step = (0.5 * erfc(-x * M_SQRT1_2) - p) * sqrt(2 * M_PI) * exp(x * x / 2);
        x -= fmin(fmax(step, -0.5), 0.5);
    }
    return x;
}

/* activation_sparsity_pattern: the fraction of gates that each layer sets to 0. */
static int read_cutoffs(struct config *cfg, const struct source *src, struct qt_err *err)
{
    static const char key[] = "activation_sparsity_pattern";
    const json_t *list = json_object_get(src->json, key);
    const size_t layers = cfg->info.layers;
    int rc;
    if (config_given(src->json, key) && json_array_size(list) != layers)
        return qt_fail(err, QT_E_INPUT, src->path, NULL, "'%s' is not a list of %zu numbers", key,
                       layers);
    QT_TRY(qt_array_new(&cfg->cutoffs, layers, sizeof *cfg->cutoffs, err));
    for (size_t i = 0; i < layers; i++) {
        const json_t *entry = json_array_get(list, i);
        const double fraction = !config_given(src->json, key) ? (layers > 10 && i < 10 ? 0.95 : 0)
                                : json_is_number(entry)       ? json_number_value(entry)
                                                              : -1;
        if (!(fraction >= 0 && fraction <= 0.9999))
            return qt_fail(err, QT_E_INPUT, src->path, NULL,
                           "'%s' has an entry that is not a number from 0 to 0.9999", key);
        cfg->cutoffs[i] =
            fraction > 0 ? (float)normal_quantile((double)(float)fraction) : -INFINITY;
    }
done:
    return rc;
}

/* intermediate_size lists the widths of all layers. */
int config_adapt_gemma3n(json_t *out, const struct source *src, struct qt_err *err)
{
    static const char key[] = "intermediate_size";
    json_t *list = json_object_get(out, key), *first = json_array_get(list, 0);
    for (size_t i = 1; i < json_array_size(list); i++)
        if (!json_equal(first, json_array_get(list, i)))
            return config_unsupported(src, key, "a list of different numbers", err);
    return !json_is_integer(first) || json_object_set(out, key, first) == 0
               ? QT_OK
               : qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory");
}

int config_read_gemma3n(struct config *cfg, const struct source *src, struct qt_err *err)
{
    size_t active = 0, width = 256;
    int rc;
    QT_TRY(read_softcap(&cfg->info.logit_softcap, src, "final_logit_softcapping", 30, err));
    QT_TRY(read_per_layer(cfg, src, &width, err));
    if (!width)
        QT_TRY(config_unsupported(src, "hidden_size_per_layer_input", "0", err));
    QT_TRY(read_cutoffs(cfg, src, err));
    cfg->altup = 4;
    cfg->laurel = 64;
    cfg->altup_scaled = true;
    QT_TRY(config_read_size(&cfg->altup, src, "altup_num_inputs", CONFIG_ALTUP, err));
    QT_TRY(config_read_size(&cfg->laurel, src, "laurel_rank", CONFIG_WIDTH, err));
    QT_TRY(qt_json_get_bool(&cfg->altup_scaled, src->json, "altup_correct_scale", src->path, err));
    QT_TRY(qt_json_get_size(&active, src->json, "altup_active_idx", src->path, err));
    if (active)
        QT_TRY(config_unsupported(src, "altup_active_idx", "a number other than 0", err));
    if (cfg->altup < 2)
        QT_TRY(config_unsupported(src, "altup_num_inputs", "1", err));
    cfg->attn_scale = 1;
    cfg->embed_scale = (float)sqrt((double)cfg->info.hidden);
done:
    return rc;
}

int config_read_gemma4_unified(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const char *both_ways = "";
    int rc;
    QT_TRY(read_softcap(&cfg->info.logit_softcap, src, "final_logit_softcapping", 0, err));
    QT_TRY(
        qt_json_get_string(&both_ways, src->json, "use_bidirectional_attention", src->path, err));
    if (strcmp(both_ways, "all") == 0)
        QT_TRY(config_unsupported(src, "use_bidirectional_attention", both_ways, err));
    QT_TRY(qt_json_get_bool(&cfg->wide_shared, src->json, "use_double_wide_mlp", src->path, err));
    if (cfg->wide_shared && cfg->info.experts)
        QT_TRY(config_unsupported(src, "use_double_wide_mlp", "true with experts", err));
    cfg->attn_scale = 1;
    cfg->embed_scale = (float)sqrt((double)cfg->info.hidden);
done:
    return rc;
}

int config_read_gemma4(struct config *cfg, const struct source *src, struct qt_err *err)
{
    static const char key[] = "hidden_size_per_layer_input";
    size_t width = config_null(src->json, key) ? 0 : 256;
    int rc;
    QT_TRY(config_read_gemma4_unified(cfg, src, err));
    QT_TRY(read_per_layer(cfg, src, &width, err));
done:
    return rc;
}

int config_read_phimoe(struct config *cfg, const struct source *src, struct qt_err *err)
{
    double jitter = 0.01;
    int rc;
    QT_TRY(qt_json_get_real(&jitter, src->json, "router_jitter_noise", src->path, err));
    if (!(jitter >= 0 && jitter < 1e6))
        return qt_fail(err, QT_E_INPUT, src->path, NULL,
                       "'router_jitter_noise' is %g, not a positive number", jitter);
    if (cfg->top_k != 2)
        QT_TRY(config_unsupported(src, "num_experts_per_tok", "a number other than 2", err));
    cfg->jitter = (float)jitter;
done:
    return rc;
}

int config_read_afmoe(struct config *cfg, const struct source *src, struct qt_err *err)
{
    bool scaled = false;
    int rc = qt_json_get_bool(&scaled, src->json, "mup_enabled", src->path, err);
    if (scaled)
        cfg->embed_scale = (float)sqrt((double)cfg->info.hidden);
    return rc;
}

/* By layer_types, or else in the layers with a rotary embedding. */
static int read_chunks(struct config *cfg, const struct source *src, struct qt_err *err)
{
    static const char key[] = "attention_chunk_size";
    const json_t *types = json_object_get(src->json, "layer_types");
    const bool listed = config_given(src->json, "layer_types");
    size_t chunk = 8192;
    int rc;
    QT_TRY(config_read_size(&chunk, src, key, CONFIG_POSITIONS, err));
    QT_TRY(qt_array_new(&cfg->chunks, cfg->info.layers, sizeof *cfg->chunks, err));
    for (size_t i = 0; i < cfg->info.layers; i++) {
        const char *type = json_string_value(json_array_get(types, i));
        const bool chunked = listed && strcmp(type, "chunked_attention") == 0;
        if (config_null(src->json, key) && chunked)
            QT_TRY(config_unsupported(src, key, "null", err));
        if (!config_null(src->json, key) && (listed ? chunked : !cfg->no_rope[i]))
            cfg->chunks[i] = chunk;
    }
done:
    return rc;
}

int config_read_llama4(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const json_t *tuning = json_object_get(src->json, "attn_temperature_tuning");
    double scale = 0.1;
    int rc;
    QT_TRY(read_chunks(cfg, src, err));
    cfg->bare_norms = true;
    QT_TRY(qt_json_get_bool(&cfg->bare_norms, src->json, "use_qk_norm", src->path, err));
    cfg->floor_step = 8192;
    QT_TRY(config_read_size(&cfg->floor_step, src, "floor_scale", CONFIG_POSITIONS, err));
    QT_TRY(config_read_positive(&scale, src, "attn_scale", err));
    if (json_is_false(tuning) || (json_is_integer(tuning) && json_integer_value(tuning) == 0))
        scale = 0; /* early files have a number instead of a flag */
    cfg->floor_beta = (float)scale;
done:
    return rc;
}

int config_read_lfm2_moe(struct config *cfg, const struct source *src, struct qt_err *err)
{
    static const char *const biases[] = {"conv_bias", "use_expert_bias"};
    int rc = QT_OK;
    for (size_t i = 0; i < (cfg->arch->experts ? 2 : 1); i++) {
        bool set = i == 1;
        QT_TRY(qt_json_get_bool(&set, src->json, biases[i], src->path, err));
        if (set != (i == 1))
            QT_TRY(config_unsupported(src, biases[i], set ? "true" : "false", err));
    }
done:
    return rc;
}

/* The width of the MLP is two thirds of the given one, times a factor, rounded up to a multiple. */
int config_read_lfm2(struct config *cfg, const struct source *src, struct qt_err *err)
{
    bool adjust = true;
    double factor = 1;
    size_t multiple = 256;
    int rc;
    QT_TRY(config_read_lfm2_moe(cfg, src, err));
    QT_TRY(qt_json_get_bool(&adjust, src->json, "block_auto_adjust_ff_dim", src->path, err));
    QT_TRY(config_read_positive(&factor, src, "block_ffn_dim_multiplier", err));
    QT_TRY(config_read_size(&multiple, src, "block_multiple_of", CONFIG_WIDTH, err));
    if (!adjust)
        goto done;
    cfg->dense_width = 2 * cfg->dense_width / 3;
    if (!config_null(src->json, "block_ffn_dim_multiplier")) {
        if (factor > 1e6)
            QT_TRY(config_unsupported(src, "block_ffn_dim_multiplier", "a value above 1e6", err));
        cfg->dense_width = qt_round_up((size_t)(factor * (double)cfg->dense_width), multiple);
    }
    if (cfg->dense_width == 0 || cfg->dense_width > CONFIG_WIDTH)
        return qt_fail(err, QT_E_INPUT, src->path, NULL, "the width of the MLP is %zu",
                       cfg->dense_width);
done:
    return rc;
}

/* rotary_dim has a default that is no fraction of a head. */
int config_read_gptj(struct config *cfg, const struct source *src, struct qt_err *err)
{
    return config_given(src->json, "rotary_dim") || cfg->info.head_dim == 64
               ? QT_OK
               : config_unsupported(src, "rotary_dim", "the lack of this key", err);
}

int config_read_multipliers(struct config *cfg, const struct source *src, struct qt_err *err)
{
    double embed = 1, attention = 1, residual = 1, logits = 1;
    int rc;
    QT_TRY(config_read_positive(&embed, src, "embedding_multiplier", err));
    QT_TRY(config_read_positive(&attention, src, "attention_multiplier", err));
    QT_TRY(config_read_positive(&residual, src, "residual_multiplier", err));
    QT_TRY(config_read_positive(&logits, src, "logits_scaling", err));
    cfg->embed_scale = (float)embed;
    cfg->attn_scale = (float)attention;
    cfg->residual_scale = (float)residual;
    cfg->logit_scale = (float)(1 / logits);
done:
    return rc;
}

int config_read_granite4(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const char *positions = "nope";
    int rc;
    QT_TRY(config_read_multipliers(cfg, src, err));
    QT_TRY(qt_json_get_string(&positions, src->json, "position_embedding_type", src->path, err));
    for (size_t i = 0; i < cfg->info.layers && strcmp(positions, "rope") != 0; i++)
        cfg->no_rope[i] = true;
done:
    return rc;
}

/* Refuses any value but `only`. */
static int expect_string(const struct source *src, const char *key, const char *only,
                         struct qt_err *err)
{
    const char *value = only;
    int rc = qt_json_get_string(&value, src->json, key, src->path, err);
    return rc < 0 || strcmp(value, only) == 0 ? rc : config_unsupported(src, key, value, err);
}

/* moe_layer_freq, which transformers ignores. */
static int expect_all_layers(const struct source *src, struct qt_err *err)
{
    size_t step = 1;
    int rc = qt_json_get_size(&step, src->json, "moe_layer_freq", src->path, err);
    return rc < 0 || step == 1 ? rc : config_unsupported(src, "moe_layer_freq", "not 1", err);
}

int config_read_deepseek_v2(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const char *method = "greedy";
    bool normalize = false;
    int rc;
    QT_TRY(expect_all_layers(src, err));
    QT_TRY(expect_string(src, "scoring_func", "softmax", err));
    QT_TRY(qt_json_get_bool(&normalize, src->json, "norm_topk_prob", src->path, err));
    if (normalize) /* transformers ignores it, the authors' code does not */
        QT_TRY(config_unsupported(src, "norm_topk_prob", "true", err));
    QT_TRY(qt_json_get_string(&method, src->json, "topk_method", src->path, err));
    if (strcmp(method, "greedy") == 0)
        cfg->groups = cfg->top_groups = 1;
    else if (strcmp(method, "group_limited_greedy") != 0)
        rc = config_unsupported(src, "topk_method", method, err);
done:
    return rc;
}

int config_read_deepseek_v3(struct config *cfg, const struct source *src, struct qt_err *err)
{
    int rc;
    (void)cfg;
    QT_TRY(expect_all_layers(src, err));
    QT_TRY(expect_string(src, "scoring_func", "sigmoid", err));
    QT_TRY(expect_string(src, "topk_method", "noaux_tc", err));
done:
    return rc;
}

int config_read_minicpm3(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const double root = sqrt((double)cfg->info.layers);
    double embed = 12, depth = config_null(src->json, "scale_depth") ? root : 1.4;
    size_t base = config_null(src->json, "dim_model_base") ? cfg->info.hidden : 256;
    int rc;
    QT_TRY(config_read_positive(&embed, src, "scale_emb", err));
    QT_TRY(config_read_positive(&depth, src, "scale_depth", err));
    QT_TRY(config_read_size(&base, src, "dim_model_base", CONFIG_WIDTH, err));
    cfg->embed_scale = (float)embed;
    cfg->residual_scale = (float)(depth / root);
    cfg->logit_scale = (float)((double)base / (double)cfg->info.hidden);
done:
    return rc;
}

/* The activation of gpt-oss: its constants, which kernels have built in, can be given. */
int config_read_gpt_oss(struct config *cfg, const struct source *src, struct qt_err *err)
{
    double alpha = 1.702, limit = 7;
    int rc;
    QT_TRY(config_read_positive(&alpha, src, "swiglu_alpha", err));
    QT_TRY(config_read_positive(&limit, src, "swiglu_limit", err));
    if (alpha != 1.702)
        QT_TRY(config_unsupported(src, "swiglu_alpha", "a number other than 1.702", err));
    if (limit != 7)
        QT_TRY(config_unsupported(src, "swiglu_limit", "a number other than 7", err));
    cfg->act = QT_ACT_CLAMPED;
done:
    return rc;
}

/* layer_rope_theta lists rope_theta or 0 (no rotary embedding) for each layer. */
int config_read_granite_swa(struct config *cfg, const struct source *src, struct qt_err *err)
{
    static const char key[] = "layer_rope_theta";
    const json_t *list = json_object_get(src->json, key);
    const json_t *rope = json_object_get(src->json, "rope_parameters");
    double theta = 1e4;
    int rc;
    QT_TRY(config_read_multipliers(cfg, src, err));
    QT_TRY(config_read_positive(&theta, src, "rope_theta", err));
    if (json_is_object(rope))
        QT_TRY(qt_json_get_real(&theta, rope, "rope_theta", src->path, err));
    if (!config_given(src->json, key))
        goto done;
    if (!json_is_array(list) || json_array_size(list) != cfg->info.layers)
        return qt_fail(err, QT_E_INPUT, src->path, NULL, "'%s' is not a list of %zu numbers", key,
                       cfg->info.layers);
    for (size_t i = 0; i < cfg->info.layers; i++) {
        const json_t *entry = json_array_get(list, i);
        const double given = json_is_number(entry) ? json_number_value(entry) : -1;
        cfg->no_rope[i] = given == 0;
        if (given != 0 && given != theta)
            QT_TRY(config_unsupported(src, key, "a value that is neither rope_theta nor 0", err));
    }
done:
    return rc;
}

int config_read_cohere(struct config *cfg, const struct source *src, struct qt_err *err)
{
    double scale = 0.0625;
    bool normed = false;
    int rc;
    QT_TRY(config_read_positive(&scale, src, "logit_scale", err));
    QT_TRY(qt_json_get_bool(&normed, src->json, "use_qk_norm", src->path, err));
    if (normed) /* a weight for each channel of each head */
        QT_TRY(config_unsupported(src, "use_qk_norm", "true", err));
    cfg->logit_scale = (float)scale;
    for (size_t i = 0; cfg->arch->window && i < cfg->info.layers; i++)
        cfg->no_rope[i] = !cfg->windows[i];
done:
    return rc;
}

static int refuse_true(const struct source *src, const char *key, struct qt_err *err)
{
    bool value = false;
    int rc = qt_json_get_bool(&value, src->json, key, src->path, err);
    return rc == QT_OK && value ? config_unsupported(src, key, "true", err) : rc;
}

int config_read_stablelm(struct config *cfg, const struct source *src, struct qt_err *err)
{
    (void)cfg;
    return refuse_true(src, "qk_layernorm", err); /* a norm for each head */
}

int config_read_gpt2(struct config *cfg, const struct source *src, struct qt_err *err)
{
    bool scaled = true;
    int rc;
    QT_TRY(refuse_true(src, "scale_attn_by_inverse_layer_idx", err));
    QT_TRY(refuse_true(src, "add_cross_attention", err));
    QT_TRY(qt_json_get_bool(&scaled, src->json, "scale_attn_weights", src->path, err));
    if (!scaled)
        cfg->attn_scale = 1;
done:
    return rc;
}

static int check_encoder(const struct config *cfg, const struct source *src, struct qt_err *err)
{
    int rc;
    QT_TRY(refuse_true(src, "is_decoder", err));
    QT_TRY(refuse_true(src, "add_cross_attention", err));
    if (!cfg->tied)
        QT_TRY(config_unsupported(src, "tie_word_embeddings", "false", err));
done:
    return rc;
}

/* RoBERTa counts positions from pad_token_id + 1 on, and its table has these rows, too; its head has
 * GELU whatever hidden_act is. */
int config_read_bert(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const size_t offset = cfg->arch->position_offset;
    size_t pad = offset ? offset - 1 : 0;
    int rc;
    QT_TRY(check_encoder(cfg, src, err));
    QT_TRY(expect_string(src, "position_embedding_type", "absolute", err));
    cfg->types = 2;
    QT_TRY(config_read_size(&cfg->types, src, "type_vocab_size", CONFIG_WIDTH, err));
    QT_TRY(qt_json_get_size(&pad, src->json, "pad_token_id", src->path, err));
    if (offset && pad != offset - 1)
        QT_TRY(config_unsupported(src, "pad_token_id", "a number other than 1", err));
    if (cfg->info.max_positions <= offset)
        return qt_fail(err, QT_E_INPUT, src->path, NULL,
                       "'max_position_embeddings' is %zu, at least %zu is required",
                       cfg->info.max_positions, offset + 1);
    cfg->info.max_positions -= offset;
    cfg->norm_after = cfg->transform_bias = true;
    cfg->final_norm = false;
    cfg->transform_act = offset ? QT_ACT_GELU : cfg->act;
done:
    return rc;
}

/* local_attention is the number of positions in a window without the query's own. */
int config_read_modernbert(struct config *cfg, const struct source *src, struct qt_err *err)
{
    static const char act[] = "gelu";
    size_t local = 128;
    int rc;
    QT_TRY(check_encoder(cfg, src, err));
    QT_TRY(refuse_true(src, "norm_bias", err));
    QT_TRY(expect_string(src, "hidden_activation", act, err));
    QT_TRY(expect_string(src, "classifier_activation", act, err));
    QT_TRY(config_read_flag(&cfg->transform_bias, src, &cfg->arch->transform_bias, err));
    QT_TRY(config_read_size(&local, src, "local_attention", CONFIG_POSITIONS, err));
    cfg->transform_act = QT_ACT_GELU;
    for (size_t i = 0; i < cfg->info.layers; i++)
        cfg->windows[i] = cfg->windows[i] ? local / 2 + 1 : 0;
done:
    return rc;
}

int config_read_minimax_m2(struct config *cfg, const struct source *src, struct qt_err *err)
{
    size_t shared = 0;
    int rc;
    (void)cfg;
    QT_TRY(expect_string(src, "scoring_func", "sigmoid", err));
    QT_TRY(expect_string(src, "qk_norm_type", "per_layer", err));
    QT_TRY(qt_json_get_size(&shared, src->json, "shared_intermediate_size", src->path, err));
    if (shared)
        QT_TRY(config_unsupported(src, "shared_intermediate_size", "a number above 0", err));
done:
    return rc;
}

/* Keys of the authors' config.json, whose values transformers has built in. */
static int check_mimo(const struct config *cfg, const struct source *src, struct qt_err *err)
{
    const struct {
        const char *key;
        size_t only;
    } sizes[] = {{"swa_num_attention_heads", cfg->info.heads},
                 {"swa_head_dim", cfg->info.head_dim},
                 {"swa_v_head_dim", cfg->value_dim ? cfg->value_dim : cfg->info.head_dim},
                 {"n_shared_experts", 0}};
    static const char kv[] = "swa_num_key_value_heads", sink[] = "add_swa_attention_sink_bias";
    bool sinks = true;
    int rc;
    for (size_t i = 0, value; i < sizeof sizes / sizeof *sizes; i++) {
        value = sizes[i].only;
        QT_TRY(qt_json_get_size(&value, src->json, sizes[i].key, src->path, err));
        if (value != sizes[i].only)
            QT_TRY(config_unsupported(src, sizes[i].key, "this number", err));
    }
    for (size_t i = 0; i < cfg->info.layers; i++) {
        size_t value = cfg->heads[i].kv;
        if (cfg->windows[i])
            QT_TRY(qt_json_get_size(&value, src->json, kv, src->path, err));
        if (value != cfg->heads[i].kv)
            QT_TRY(config_unsupported(src, kv, "not twice num_key_value_heads", err));
    }
    QT_TRY(qt_json_get_bool(&sinks, src->json, sink, src->path, err));
    if (!sinks)
        QT_TRY(config_unsupported(src, sink, "false", err));
    QT_TRY(refuse_true(src, "add_full_attention_sink_bias", err));
    QT_TRY(expect_string(src, "scoring_func", "sigmoid", err));
    QT_TRY(expect_string(src, "topk_method", "noaux_tc", err));
done:
    return rc;
}

/* The list `key`, if it is given, has a 1 for layers with (a window or experts), else a 0. */
static int check_listed(const struct config *cfg, const struct source *src, const char *key,
                        bool experts, struct qt_err *err)
{
    const json_t *list = json_object_get(src->json, key);
    for (size_t i = 0; json_is_array(list) && i < cfg->info.layers; i++) {
        const bool one = experts ? !cfg->dense[i] : cfg->windows[i] > 0;
        if (json_integer_value(json_array_get(list, i)) != one)
            return config_unsupported(src, key, "another list than the family's", err);
    }
    return QT_OK;
}

int config_read_mimo(struct config *cfg, const struct source *src, struct qt_err *err)
{
    static const char key[] = "attention_value_scale";
    double scale = config_null(src->json, key) ? 1 : 0.707;
    int rc;
    QT_TRY(check_mimo(cfg, src, err));
    QT_TRY(check_listed(cfg, src, "hybrid_layer_pattern", false, err));
    QT_TRY(check_listed(cfg, src, "moe_layer_freq", true, err));
    QT_TRY(config_read_positive(&scale, src, key, err));
    cfg->output_factors[ROLE_V] = (float)scale;
done:
    return rc;
}

/* sliding_window_size is the number of positions in a window without the query's own. */
int config_adapt_mimo(json_t *out, const struct source *src, struct qt_err *err)
{
    static const char key[] = "sliding_window_size";
    size_t before = 0;
    int rc = QT_OK;
    if (config_given(out, key)) {
        QT_TRY(config_read_size(&before, src, key, CONFIG_POSITIONS, err));
        if (json_object_set_new(out, "sliding_window", json_integer((json_int_t)before + 1)) < 0)
            rc = qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory");
    }
done:
    return rc;
}

/* Replaces a list of 0 and 1 by the list `key` of the names for 0 and 1, unless there is one. */
static int name_flags(json_t *out, const char *key, const json_t *flags, const char *zero,
                      const char *one, struct qt_err *err)
{
    json_t *names = NULL;
    int rc = QT_OK;
    if (!json_is_array(flags) || config_given(out, key))
        return QT_OK;
    names = json_array();
    for (size_t i = 0; names && i < json_array_size(flags); i++) {
        const bool set = json_integer_value(json_array_get(flags, i)) != 0;
        if (json_array_append_new(names, json_string(set ? one : zero)) < 0) {
            json_decref(names);
            names = NULL;
        }
    }
    if (!names || json_object_set_new(out, key, names) < 0)
        rc = qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory");
    return rc;
}

static const char sparse_key[] = "sparse_attention_config";

int config_adapt_minimax_m3(json_t *out, const struct source *src, struct qt_err *err)
{
    const json_t *sparse = json_object_get(out, sparse_key);
    int rc;
    if (config_no_object(out, sparse_key))
        return qt_fail(err, QT_E_INPUT, src->path, NULL, "'%s' is not an object", sparse_key);
    QT_TRY(name_flags(out, "mlp_layer_types", json_object_get(out, "moe_layer_freq"), "dense",
                      "sparse", err));
    QT_TRY(name_flags(out, "layer_types", json_object_get(sparse, "sparse_attention_freq"),
                      "full_attention", "minimax_m3_sparse", err));
done:
    return rc;
}

/* Sparse attention to index_topk_blocks blocks of index_block_size keys: shorter sequences are
 * dense. */
int config_read_minimax_m3(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const json_t *types = json_object_get(src->json, "layer_types");
    const json_t *nested = json_object_get(src->json, sparse_key);
    const struct source inner = {json_is_object(nested) ? nested : src->json, src->root, src->path};
    size_t block = 128, blocks = 16, rotary = cfg->rope.dim;
    bool sparse = false;
    int rc;
    QT_TRY(config_read_gpt_oss(cfg, src, err));
    QT_TRY(config_read_size(&rotary, src, "rotary_dim", CONFIG_WIDTH, err));
    if (rotary != cfg->rope.dim) /* transformers does not read it */
        QT_TRY(config_unsupported(src, "rotary_dim", "not what partial_rotary_factor gives", err));
    QT_TRY(config_read_size(&block, src, "index_block_size", CONFIG_WIDTH, err));
    QT_TRY(config_read_size(&blocks, src, "index_topk_blocks", CONFIG_WIDTH, err));
    QT_TRY(config_read_size(&block, &inner, "sparse_block_size", CONFIG_WIDTH, err));
    QT_TRY(config_read_size(&blocks, &inner, "sparse_topk_blocks", CONFIG_WIDTH, err));
    for (size_t i = 0; i < cfg->info.layers; i++) {
        const char *type = json_string_value(json_array_get(types, i));
        sparse = sparse || (type && strcmp(type, cfg->arch->sparse_type) == 0);
    }
    if (sparse)
        cfg->info.max_positions = qt_min_size(cfg->info.max_positions, block * blocks);
done:
    return rc;
}

int config_read_iquestcoder(struct config *cfg, const struct source *src, struct qt_err *err)
{
    (void)cfg;
    return refuse_true(src, "use_sliding_window", err);
}

int config_read_hy_v3(struct config *cfg, const struct source *src, struct qt_err *err)
{
    (void)cfg;
    return refuse_true(src, "mlp_bias", err); /* of dense MLPs and the shared expert only */
}

int config_read_sarvam_moe(struct config *cfg, const struct source *src, struct qt_err *err)
{
    static const char key[] = "use_qk_norm";
    bool normed = true;
    int rc = qt_json_get_bool(&normed, src->json, key, src->path, err);
    (void)cfg;
    return rc == QT_OK && !normed ? config_unsupported(src, key, "false", err) : rc;
}
