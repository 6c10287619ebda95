/* config.json while it is being read: config_source.c, used by the others. */
#ifndef QT_MODEL_CONFIG_CONFIG_H
#define QT_MODEL_CONFIG_CONFIG_H

#include "model/graph/internal.h"

/* The most that are taken. */
enum { CONFIG_POSITIONS = 1 << 30, CONFIG_LAYERS = 4096, CONFIG_WIDTH = 1 << 24 };

/* What is said of the decoder, and of all. */
struct source {
    const json_t *json, *root;
    const char *path;
};

/* Has a value that is not null. */
bool config_given(const json_t *obj, const char *key);
/* Has a null. */
bool config_null(const json_t *obj, const char *key);
/* A size in 1..limit; missing or null: *out is left as it is, 0 means that it is needed. */
int config_read_size(size_t *out, const struct source *src, const char *key, size_t limit,
                     struct qt_err *err);
/* A positive finite number; missing or null: *out is left as it is, 0 means that it is needed. */
int config_read_positive(double *out, const struct source *src, const char *key,
                         struct qt_err *err);
int config_unsupported(const struct source *src, const char *key, const char *value,
                       struct qt_err *err);

/* As the flag says where the key is missing or it has none. */
int config_read_flag(bool *out, const struct source *src, const struct arch_flag *flag,
                     struct qt_err *err);

/* Of a mixture of experts: all that struct config has of it, and the width of layers without. */
int config_read_experts(struct config *cfg, const struct source *src, struct qt_err *err);
/* cfg->rope, local_rope, rotated, query_beta, query_step; the positions that YaRN makes. */
int config_read_rope(struct config *cfg, const struct source *src, struct qt_err *err);

#endif
