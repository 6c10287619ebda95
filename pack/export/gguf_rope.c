/* The rotary embedding as keys and tensors of a GGUF file. */
#include "pack/export/gguf_arch.h"

#include <stdio.h>
#include <string.h>

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

double qt_gguf_score_factor(const struct writer *w)
{
    const struct rope r = read_rope(w, "full_attention", "rope_theta", w->arch->theta);
    const double all = number_of(r.options, "mscale_all_dim", 0);
    return w->arch->latent && strcmp(r.type, "yarn") == 0 ? pow(1 + 0.1 * all * log(r.factor), 2)
                                                          : 1;
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

int qt_gguf_write_rope(const struct writer *w, struct qt_gguf_factors *factors)
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
            return qt_gguf_differs(w, "one base of all rotary embeddings (rope_theta)");
        if (!(arch->local_theta > 0) || !same_plain(w, &local, d->local_inv_freq, 1))
            return qt_gguf_differs(w, "an unscaled rotary embedding in layers with a window");
        f32(w, "rope.freq_base_swa", local.theta);
    }
    if (d->query_beta > 0) {
        if (d->query_step != (size_t)original_positions(w, &r))
            return qt_gguf_differs(w,
                                   "queries scaled by steps of original_max_position_embeddings");
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
            return qt_gguf_differs(w, "YaRN whose mscale and mscale_all_dim are equal");
        write_yarn(w, &r);
    } else if (unscaled && arch->rope_freqs) {
        QT_TRY(add_factors(factors, 0, "rope_freqs.weight", w, &r, d->inv_freq));
    } else {
        return qt_gguf_differs(w, "no rotary embedding of this kind (rope_type)");
    }
done:
    return rc;
}
