/* Reading config.json: source.c reads checked values; the other files of this folder use it. */
#ifndef QT_MODEL_CONFIG_CONFIG_H
#define QT_MODEL_CONFIG_CONFIG_H

#include "model/graph/internal.h"

/* Largest accepted values. */
enum { CONFIG_POSITIONS = 1 << 30, CONFIG_LAYERS = 4096, CONFIG_WIDTH = 1 << 24 };

/* json: the object with the decoder's options, "text_config" or root. */
struct source {
    const json_t *json, *root;
    const char *path;
};

/* True if the key is present and not null. */
bool config_given(const json_t *obj, const char *key);
/* True if the key is present and null. */
bool config_null(const json_t *obj, const char *key);
/* True if the key is present, not null and not an object: a literal such as NaN is none. */
bool config_no_object(const json_t *obj, const char *key);
/* Reads a size in 1..limit. *out holds the default for a missing or null key; 0: required key. */
int config_read_size(size_t *out, const struct source *src, const char *key, size_t limit,
                     struct qt_err *err);
/* Reads a positive finite number, with the same default rule. */
int config_read_positive(double *out, const struct source *src, const char *key,
                         struct qt_err *err);
/* Fails with QT_E_UNSUPPORTED: "'KEY': VALUE is not supported". */
int config_unsupported(const struct source *src, const char *key, const char *value,
                       struct qt_err *err);

/* Reads the flag's key, or uses its default. */
int config_read_flag(bool *out, const struct source *src, const struct arch_flag *flag,
                     struct qt_err *err);

/* Fails with QT_E_UNSUPPORTED if the flag has this value; without the key it has the other. */
int config_refuse_flag(const struct source *src, const char *key, bool refused, struct qt_err *err);
/* Fails with QT_E_UNSUPPORTED if the key has any value but `only`. */
int config_expect_string(const struct source *src, const char *key, const char *only,
                         struct qt_err *err);
/* out[key] = value, whose reference is taken over; NULL: memory is exhausted. */
int config_put(json_t *out, const char *key, json_t *value, struct qt_err *err);

/* Gives the layers in the list `key` of config.json attention (cfg->mixers); none if there is no
 * such key. */
int config_read_attention(struct config *cfg, const struct source *src, const char *key,
                          struct qt_err *err);
/* Reads cfg->ssm and cfg->mixers. */
int config_read_ssm(struct config *cfg, const struct source *src, struct qt_err *err);
/* Layers that are one mixer or one MLP (SSM_BLOCKS): the number of layers; and what layer i is,
 * 'M' (state space model), '*' (attention), '-' (dense MLP) or 'E' (experts). */
int config_count_blocks(size_t *layers, const struct source *src, struct qt_err *err);
char config_block(const struct source *src, size_t i);
/* Reads cfg->heads; cfg->windows is read before. */
int config_read_layer_heads(struct config *cfg, const struct source *src, struct qt_err *err);
/* Sets info.state and heads.kept; everything else is read before. */
void config_place_state(struct config *cfg);
/* Reads all fields of cfg about experts, and the width of dense MLPs. */
int config_read_experts(struct config *cfg, const struct source *src, struct qt_err *err);
/* Reads cfg->rope, local_rope, query_beta and query_step; YaRN may raise
 * info.max_positions. */
int config_read_rope(struct config *cfg, const struct source *src, struct qt_err *err);

#endif
