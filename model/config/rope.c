/* Rotary embeddings: rope options of config.json -> inverse frequencies and scales. */
#include "model/config/config.h"

static const char original_key[] = "original_max_position_embeddings";

/* Arguments of a scaling method, which changes the unscaled rotary embedding in *out. */
struct scaling {
    struct rotary *out;  /* inv_freq[i] = 1 / powers[i] on entry */
    const float *powers; /* [out->dim / 2]: theta^(2 i / out->dim) */
    double theta;
    struct config *cfg;
    const struct source *src, *options; /* options: the object with the scaling's options */
};

/* *old = number of positions before context extension. */
static int read_original(size_t *old, const struct scaling *s, struct qt_err *err)
{
    const size_t family = s->cfg->arch->original_positions;
    int rc = QT_OK;
    *old = family ? family : s->cfg->info.max_positions;
    if (!family)
        QT_TRY(config_read_size(old, s->options, original_key, CONFIG_POSITIONS, err));
    QT_TRY(config_read_size(old, s->src, original_key, CONFIG_POSITIONS, err));
    if (*old < 2)
        rc = qt_fail(err, QT_E_INPUT, s->src->path, NULL, "'%s' is %zu; at least 2 is required",
                     original_key, *old);
done:
    return rc;
}

/* Dynamic scaling begins beyond max_position_embeddings, where qtool does not go. */
static int scale_dynamic(const struct scaling *s, struct qt_err *err)
{
    (void)s, (void)err;
    return QT_OK;
}

static int scale_linear(const struct scaling *s, struct qt_err *err)
{
    double factor = 0;
    int rc = config_read_positive(&factor, s->options, "factor", err);
    for (size_t i = 0; rc == QT_OK && i < s->out->dim / 2; i++)
        s->out->inv_freq[i] /= (float)factor;
    return rc;
}

/* Llama 3.1: long wavelengths are stretched by `factor`, short ones are kept, and those in between
 * are interpolated. Computed in float in the order of transformers, because models were trained
 * with these roundings. */
static int scale_llama3(const struct scaling *s, struct qt_err *err)
{
    double factor = 0, low = 0, high = 0;
    size_t old;
    int rc = QT_OK;
    QT_TRY(config_read_positive(&factor, s->options, "factor", err));
    QT_TRY(config_read_positive(&low, s->options, "low_freq_factor", err));
    QT_TRY(config_read_positive(&high, s->options, "high_freq_factor", err));
    QT_TRY(read_original(&old, s, err));
    if (high <= low)
        return qt_fail(err, QT_E_INPUT, s->src->path, NULL,
                       "'high_freq_factor' %g is not above 'low_freq_factor' %g", high, low);
    for (size_t i = 0; i < s->out->dim / 2; i++) {
        float f = s->out->inv_freq[i], wavelength = (float)(2 * M_PI) / f;
        float blend = ((float)old / wavelength - (float)low) / (float)(high - low);
        if (wavelength > (float)((double)old / low))
            s->out->inv_freq[i] = f / (float)factor;
        else if (wavelength >= (float)((double)old / high))
            s->out->inv_freq[i] = (1 - blend) * f / (float)factor + blend * f;
    }
done:
    return rc;
}

/* Index (not an integer) of the channel pair that rotates `turns` times within `old` positions. */
static double turning_pair(const struct scaling *s, double turns, size_t old)
{
    return (double)s->out->dim * log((double)old / (turns * 2 * M_PI)) / (2 * log(s->theta));
}

static double yarn_attention(double factor, double mscale)
{
    return factor > 1 ? 0.1 * mscale * log(factor) + 1 : 1;
}

/* transformers treats 0 like a missing key. */
static bool given_not_0(const json_t *options, const char *key)
{
    const json_t *value = json_object_get(options, key);
    return config_given(options, key) && !(json_is_number(value) && json_number_value(value) == 0);
}

/* YaRN (arXiv 2309.00071, section 3.2): channel pairs that rotate beta_fast times or more are kept,
 * pairs that rotate beta_slow times or less are stretched by `factor`, and those in between are
 * interpolated. Queries and keys are scaled up. max_positions is raised to factor * old, because
 * config.json may still have the original number. attn_factor is an additional factor that
 * inference runtimes apply and transformers ignores. */
static int scale_yarn(const struct scaling *s, struct qt_err *err)
{
    double factor = 0, fast = 32, slow = 1, mscale = 1, mscale_all = 0, correction = 1;
    bool truncate = true;
    size_t old;
    int rc = QT_OK;
    QT_TRY(read_original(&old, s, err));
    QT_TRY(config_read_positive(&factor, s->options, "factor", err));
    QT_TRY(config_read_positive(&fast, s->options, "beta_fast", err));
    QT_TRY(config_read_positive(&slow, s->options, "beta_slow", err));
    if (given_not_0(s->options->json, "mscale") &&
        given_not_0(s->options->json, "mscale_all_dim")) {
        QT_TRY(config_read_positive(&mscale, s->options, "mscale", err));
        QT_TRY(config_read_positive(&mscale_all, s->options, "mscale_all_dim", err));
    }
    QT_TRY(qt_json_get_bool(&truncate, s->options->json, "truncate", s->src->path, err));
    if (s->theta <= 1)
        return qt_fail(err, QT_E_INPUT, s->src->path, NULL,
                       "'rope_theta' is %g; YaRN requires more than 1", s->theta);
    double from = turning_pair(s, fast, old), to = turning_pair(s, slow, old);
    from = fmax(truncate ? floor(from) : from, 0);
    to = fmin(truncate ? ceil(to) : to, (double)s->out->dim - 1);
    to += from == to ? 0.001 : 0;
    for (size_t i = 0; i < s->out->dim / 2; i++) {
        float ramp = ((float)i - (float)from) / (float)(to - from);
        float keep = 1 - fminf(fmaxf(ramp, 0), 1);
        float slowed = 1 / ((float)factor * s->powers[i]);
        s->out->inv_freq[i] = slowed * (1 - keep) + s->out->inv_freq[i] * keep;
    }
    double attention = yarn_attention(factor, mscale) / yarn_attention(factor, mscale_all);
    QT_TRY(config_read_positive(&attention, s->options, "attention_factor", err));
    QT_TRY(config_read_positive(&correction, s->options, "attn_factor", err));
    s->out->scale = (float)(attention * correction);
    const size_t stretched = (size_t)fmin(factor * (double)old, CONFIG_POSITIONS);
    if (stretched > s->cfg->info.max_positions)
        s->cfg->info.max_positions = stretched;
done:
    return rc;
}

/* Reads factor[out->dim / 2] from the list `key`. */
static int read_factors(float *factor, const struct scaling *s, const char *key, struct qt_err *err)
{
    const json_t *list = json_object_get(s->options->json, key);
    const size_t half = s->out->dim / 2;
    if (!json_is_array(list) || json_array_size(list) != half)
        return qt_fail(err, QT_E_INPUT, s->src->path, NULL, "'%s' is not a list of %zu numbers",
                       key, half);
    for (size_t i = 0; i < half; i++) {
        double f = json_number_value(json_array_get(list, i));
        if (!(f > 1e-6 && f < 1e6))
            return qt_fail(err, QT_E_INPUT, s->src->path, NULL,
                           "'%s' has an entry that is not a positive number", key);
        factor[i] = (float)f;
    }
    return QT_OK;
}

/* LongRoPE (arXiv 2402.13753, Phi-3): a factor per frequency, from one list for short and another
 * for long sequences. The context extension also determines a scale of queries and keys. */
static int scale_longrope(const struct scaling *s, struct qt_err *err)
{
    const size_t half = s->out->dim / 2;
    struct rotary *out = s->out;
    double factor, attention;
    size_t old;
    int rc = QT_OK;
    QT_TRY(read_original(&old, s, err));
    factor = (double)s->cfg->info.max_positions / (double)old;
    QT_TRY(config_read_positive(&factor, s->options, "factor", err));
    attention = factor > 1 ? sqrt(1 + log(factor) / log((double)old)) : 1;
    QT_TRY(config_read_positive(&attention, s->options, "attention_factor", err));
    QT_TRY(qt_array_new(&out->long_inv_freq, half, sizeof *out->long_inv_freq, err));
    QT_TRY(read_factors(out->inv_freq, s, "short_factor", err));
    QT_TRY(read_factors(out->long_inv_freq, s, "long_factor", err));
    for (size_t i = 0; i < half; i++) {
        out->inv_freq[i] = 1 / (out->inv_freq[i] * s->powers[i]);
        out->long_inv_freq[i] = 1 / (out->long_inv_freq[i] * s->powers[i]);
    }
    out->long_from = old;
    out->scale = (float)attention;
done:
    return rc;
}

/* Ministral 3: queries are multiplied by 1 + beta ln(1 + floor(position / original positions)). */
static int read_query_steps(const struct scaling *s, struct qt_err *err)
{
    double beta = 0;
    int rc = QT_OK;
    QT_TRY(config_read_positive(&beta, s->options, "llama_4_scaling_beta", err));
    QT_TRY(read_original(&s->cfg->query_step, s, err));
    s->cfg->query_beta = (float)beta;
done:
    return rc;
}

/* Gemma 4: only the first partial_rotary_factor of the channel pairs rotate, with the frequencies
 * that they would have among all. */
static int scale_proportional(const struct scaling *s, struct qt_err *err)
{
    double partial = 1, factor = 1;
    int rc;
    QT_TRY(config_read_positive(&partial, s->options, "partial_rotary_factor", err));
    QT_TRY(config_read_positive(&factor, s->options, "factor", err));
    if (partial > 1)
        QT_TRY(config_unsupported(s->src, "partial_rotary_factor", "a value above 1", err));
    for (size_t i = 0; i < s->out->dim / 2; i++)
        s->out->inv_freq[i] = i < (size_t)(partial * (double)s->out->dim / 2)
                                  ? s->out->inv_freq[i] / (float)factor
                                  : 0;
done:
    return rc;
}

static int scale(const struct scaling *s, const char *type, struct qt_err *err)
{
    static const struct {
        const char *type;
        int (*fn)(const struct scaling *s, struct qt_err *err);
    } known[] = {{"dynamic", scale_dynamic},    {"linear", scale_linear},
                 {"llama3", scale_llama3},      {"yarn", scale_yarn},
                 {"deepseek_yarn", scale_yarn}, /* of Sarvam */
                 {"longrope", scale_longrope}};
    if (s->cfg->arch->layer_heads && strcmp(type, "proportional") == 0)
        return scale_proportional(s, err);
    if (s->cfg->arch->original_positions && strcmp(type, "default") != 0)
        return strcmp(type, "longrope") == 0 || strcmp(type, "su") == 0 || strcmp(type, "yarn") == 0
                   ? scale_longrope(s, err)
                   : config_unsupported(s->src, "rope_type", type, err);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(type, known[i].type) == 0)
            return known[i].fn(s, err);
    return strcmp(type, "default") == 0 || (s->cfg->arch->mrope && strcmp(type, "mrope") == 0)
               ? QT_OK
               : config_unsupported(s->src, "rope_type", type, err);
}

/* *out = the object with the rope options: "rope_scaling" (old files, with a top-level rope_theta)
 * is preferred to "rope_parameters" (new files, rope_theta inside); `empty` if there is none. */
static int find_rope(const json_t **out, const struct source *src, const json_t *empty,
                     struct qt_err *err)
{
    static const char *const keys[] = {"rope_scaling", "rope_parameters"};
    *out = empty;
    for (size_t i = 0; i < 2 && json_object_size(*out) == 0; i++) {
        const json_t *v = json_object_get(src->json, keys[i]);
        if (config_no_object(src->json, keys[i]))
            return qt_fail(err, QT_E_INPUT, src->path, NULL, "'%s' is not an object", keys[i]);
        if (json_is_object(v))
            *out = v;
    }
    if (config_given(*out, "full_attention") || config_given(*out, "sliding_attention"))
        return config_unsupported(src, "rope_parameters", "a rotary embedding per layer type", err);
    return QT_OK;
}

/* Reads out->dim, for heads of head_dim channels. */
static int read_rotary_dim(struct rotary *out, const struct config *cfg, size_t head_dim,
                           const struct source *options, const struct source *src,
                           struct qt_err *err)
{
    double partial = cfg->arch->rotary_factor > 0 ? cfg->arch->rotary_factor : 1;
    int rc = QT_OK;
    /* Depending on its version, transformers takes null as 1 or reports an error. */
    if (partial != 1 && (config_null(src->json, "partial_rotary_factor") ||
                         config_null(options->json, "partial_rotary_factor")))
        QT_TRY(config_unsupported(src, "partial_rotary_factor", "null", err));
    if (cfg->arch->rotary_read && config_given(src->json, "rotary_dim")) {
        size_t channels = 0;
        QT_TRY(config_read_size(&channels, src, "rotary_dim", head_dim, err));
        partial = (double)channels / (double)head_dim;
    }
    QT_TRY(config_read_positive(&partial, src, "partial_rotary_factor", err));
    QT_TRY(config_read_positive(&partial, options, "partial_rotary_factor", err));
    if (cfg->arch->latent) { /* Mistral 4 writes what follows from the sizes */
        const size_t qk = cfg->latent.nope + cfg->latent.rope;
        if (partial != 1 &&
            (!cfg->arch->partial_rope || lround((double)qk * partial) != (long)cfg->latent.rope))
            QT_TRY(config_unsupported(src, "partial_rotary_factor", "this value", err));
        partial = 1;
    }
    if (partial != 1 && (!cfg->arch->partial_rope || partial > 1))
        QT_TRY(config_unsupported(src, "partial_rotary_factor",
                                  partial > 1 ? "a value above 1" : "a value other than 1", err));
    out->dim = cfg->arch->latent ? cfg->latent.rope : (size_t)((double)head_dim * partial);
    if (out->dim % 2 || !out->dim)
        rc =
            partial < 1
                ? qt_fail(err, QT_E_INPUT, src->path, NULL,
                          "'partial_rotary_factor' gives %zu rotary channels of an attention head; "
                          "an even number above 0 is required",
                          out->dim)
                : qt_fail(err, QT_E_INPUT, src->path, NULL,
                          "'head_dim' %zu is odd; the rotary embedding requires an even number",
                          out->dim);
done:
    return rc;
}

/* DeepSeek: scores are multiplied by the square of YaRN's factor for mscale_all_dim. */
static int scale_attention(const struct scaling *s, struct qt_err *err)
{
    double factor = 0, mscale = 0;
    int rc = QT_OK;
    if (!given_not_0(s->options->json, "mscale_all_dim"))
        return QT_OK;
    QT_TRY(config_read_positive(&mscale, s->options, "mscale_all_dim", err));
    QT_TRY(config_read_positive(&factor, s->options, "factor", err));
    s->cfg->attn_scale *= (float)pow(yarn_attention(factor, mscale), 2);
done:
    return rc;
}

/* Phi-3.5-MoE: LongRoPE with a scale of its own. */
static int read_mscale(const struct scaling *s, const char *type, struct qt_err *err)
{
    double small = 0, large = 0;
    int rc = QT_OK;
    if (strcmp(type, "longrope") != 0)
        QT_TRY(config_unsupported(s->src, "rope_type", type, err));
    QT_TRY(config_read_positive(&small, s->options, "short_mscale", err));
    QT_TRY(config_read_positive(&large, s->options, "long_mscale", err));
    if (small != large)
        QT_TRY(config_unsupported(s->src, "long_mscale", "a value other than short_mscale", err));
    s->out->scale = (float)small;
done:
    return rc;
}

/* Hunyuan: theta is multiplied by alpha^(d / (d - 2)), for heads of d channels. */
static int read_alpha(double *theta, const struct config *cfg, const struct source *options,
                      struct qt_err *err)
{
    const double d = (double)cfg->info.head_dim;
    double alpha = 1;
    int rc = QT_OK;
    if (given_not_0(options->json, "alpha"))
        rc = config_read_positive(&alpha, options, "alpha", err);
    *theta *= d > 2 ? pow(alpha, d / (d - 2)) : 1;
    return rc;
}

/* Fills *out, whose arrays the caller frees. theta: the default if neither `key` of config.json nor
 * the options have it. */
static int read_rope_from(struct rotary *out, struct config *cfg, size_t head_dim,
                          const json_t *rope, const char *key, double theta,
                          const struct source *src, struct qt_err *err)
{
    const struct source options = {rope, src->root, src->path};
    const char *type = "default";
    float *powers = NULL;
    int rc = QT_OK;
    if (key)
        QT_TRY(config_read_positive(&theta, src, key, err));
    QT_TRY(config_read_positive(&theta, &options, "rope_theta", err));
    QT_TRY(qt_json_get_string(&type, rope, "type", src->path, err));
    QT_TRY(qt_json_get_string(&type, rope, "rope_type", src->path, err));
    if (cfg->arch->layer_heads && strcmp(type, "proportional") == 0)
        out->dim = head_dim;
    else
        QT_TRY(read_rotary_dim(out, cfg, head_dim, &options, src, err));
    if (cfg->arch->rope_alpha && strcmp(type, "dynamic") == 0)
        QT_TRY(read_alpha(&theta, cfg, &options, err));
    const size_t half = out->dim / 2;
    QT_TRY(qt_array_new(&powers, half, sizeof *powers, err));
    QT_TRY(qt_array_new(&out->inv_freq, half, sizeof *out->inv_freq, err));
    out->scale = 1;
    for (size_t i = 0; i < half; i++) {
        powers[i] = (float)pow(theta, (double)((float)(2 * i) / (float)out->dim));
        out->inv_freq[i] = 1.0f / powers[i];
    }
    const struct scaling s = {out, powers, theta, cfg, src, &options};
    QT_TRY(scale(&s, type, err));
    if (cfg->arch->rope_mscale && strcmp(type, "default") != 0)
        QT_TRY(read_mscale(&s, type, err));
    if (cfg->arch->latent && strcmp(type, "default") != 0)
        QT_TRY(scale_attention(&s, err));
    if (cfg->arch->query_steps)
        QT_TRY(read_query_steps(&s, err));
done:
    qt_free(powers);
    return rc;
}

/* Rope options of layers without (*full) and with (*local) a window. In new files, rope_parameters
 * has one object for each; in old files, rope_scaling is for layers without a window. */
static int ropes_of_layers(const json_t **full, const json_t **local, const struct source *src,
                           const json_t *empty, struct qt_err *err)
{
    const json_t *scaling = json_object_get(src->json, "rope_scaling");
    const json_t *by_type = json_object_get(src->json, "rope_parameters");
    const bool old = json_object_size(scaling) > 0;
    if (config_no_object(src->json, "rope_scaling") ||
        config_no_object(src->json, "rope_parameters"))
        return qt_fail(err, QT_E_INPUT, src->path, NULL,
                       "'rope_scaling' or 'rope_parameters' is not an object");
    *full = old ? scaling : empty;
    *local = empty;
    if (json_object_size(by_type) == 0)
        return config_given(*full, "full_attention") || config_given(*full, "sliding_attention")
                   ? config_unsupported(src, "rope_scaling", "a rotary embedding per layer type",
                                        err)
                   : QT_OK;
    if (old)
        return config_unsupported(src, "rope_scaling", "an object beside 'rope_parameters'", err);
    *full = json_object_get(by_type, "full_attention");
    *local = json_object_get(by_type, "sliding_attention");
    if (!*full && !*local)
        return config_unsupported(src, "rope_parameters",
                                  "one rotary embedding for all layer types", err);
    if (!json_is_object(*full) || !json_is_object(*local))
        return qt_fail(err, QT_E_INPUT, src->path, NULL, "'rope_parameters' has no object '%s'",
                       json_is_object(*full) ? "sliding_attention" : "full_attention");
    return QT_OK;
}

/* Olmo 3 without rope_parameters: transformers applies rope_theta only to layers without a window,
 * other runtimes to all layers. Only the family's default is unambiguous. */
static int check_theta_of_all(const struct config *cfg, const struct source *src,
                              struct qt_err *err)
{
    double theta = cfg->arch->local_theta;
    int rc = QT_OK;
    if (config_given(src->json, "rope_parameters") || cfg->arch->local_theta_key)
        return QT_OK;
    QT_TRY(config_read_positive(&theta, src, "rope_theta", err));
    if (theta != cfg->arch->local_theta)
        QT_TRY(
            config_unsupported(src, "rope_theta", "a value other than the family's default", err));
done:
    return rc;
}

/* Channels of the heads of layers with or without a window. */
static size_t head_dim_of(const struct config *cfg, bool window)
{
    for (size_t i = 0; i < cfg->info.layers; i++)
        if ((cfg->windows[i] > 0) == window)
            return cfg->heads[i].dim;
    return cfg->info.head_dim;
}

int config_read_rope(struct config *cfg, const struct source *src, struct qt_err *err)
{
    json_t *empty = json_object();
    const json_t *rope, *local;
    int rc = QT_OK;
    if (!empty)
        return qt_no_memory(err, NULL);
    cfg->interleaved = cfg->arch->interleaved;
    if (cfg->arch->interleave_read)
        QT_TRY(qt_json_get_bool(&cfg->interleaved, src->json, "rope_interleave", src->path, err));
    if (!(cfg->arch->local_theta > 0)) {
        QT_TRY(find_rope(&rope, src, empty, err));
        if (cfg->arch->rope_needed && rope == empty)
            QT_TRY(config_unsupported(src, "rope_parameters", "the lack of this key", err));
    } else {
        QT_TRY(check_theta_of_all(cfg, src, err));
        QT_TRY(ropes_of_layers(&rope, &local, src, empty, err));
        if (cfg->arch->rope_needed && rope == empty)
            QT_TRY(config_unsupported(src, "rope_parameters", "the lack of this key", err));
        QT_TRY(read_rope_from(&cfg->local_rope, cfg, head_dim_of(cfg, true), local,
                              cfg->arch->local_theta_key, cfg->arch->local_theta, src, err));
    }
    QT_TRY(read_rope_from(&cfg->rope, cfg, head_dim_of(cfg, false), rope, "rope_theta",
                          cfg->arch->theta > 0 ? cfg->arch->theta : 1e4, src, err));
done:
    json_decref(empty);
    return rc;
}
