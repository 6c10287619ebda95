/* Reads typed values of config.json and checks their ranges. */
#include "model/config/config.h"

bool config_given(const json_t *obj, const char *key)
{
    const json_t *v = json_object_get(obj, key);
    return v && !json_is_null(v);
}

bool config_null(const json_t *obj, const char *key)
{
    return json_is_null(json_object_get(obj, key));
}

bool config_no_object(const json_t *obj, const char *key)
{
    const json_t *v = json_object_get(obj, key);
    return config_given(obj, key) && (!json_is_object(v) || qt_json_literal(v));
}

int config_read_size(size_t *out, const struct source *src, const char *key, size_t limit,
                     struct qt_err *err)
{
    int rc = *out ? qt_json_get_size(out, src->json, key, src->path, err)
                  : qt_json_need_size(out, src->json, key, src->path, err);
    if (rc == QT_OK && (*out == 0 || *out > limit))
        return qt_fail(err, QT_E_INPUT, src->path, NULL, "'%s' is %zu, outside 1 .. %zu", key, *out,
                       limit);
    return rc;
}

int config_read_positive(double *out, const struct source *src, const char *key, struct qt_err *err)
{
    int rc = qt_json_get_real(out, src->json, key, src->path, err);
    if (rc == QT_OK && !config_given(src->json, key) && *out == 0)
        return qt_fail(err, QT_E_INPUT, src->path, NULL, "'%s' is missing", key);
    if (rc == QT_OK && !(*out > 1e-30 && *out < 1e30))
        return qt_fail(err, QT_E_INPUT, src->path, NULL, "'%s' is %g, not a positive number", key,
                       *out);
    return rc;
}

int config_unsupported(const struct source *src, const char *key, const char *value,
                       struct qt_err *err)
{
    return qt_fail(err, QT_E_UNSUPPORTED, src->path, NULL, "'%s': %s is not supported", key, value);
}

int config_read_flag(bool *out, const struct source *src, const struct arch_flag *flag,
                     struct qt_err *err)
{
    *out = flag->value;
    return flag->key ? qt_json_get_bool(out, src->json, flag->key, src->path, err) : QT_OK;
}

int config_refuse_flag(const struct source *src, const char *key, bool refused, struct qt_err *err)
{
    bool value = !refused;
    int rc = qt_json_get_bool(&value, src->json, key, src->path, err);
    return rc == QT_OK && value == refused
               ? config_unsupported(src, key, refused ? "true" : "false", err)
               : rc;
}

int config_expect_string(const struct source *src, const char *key, const char *only,
                         struct qt_err *err)
{
    const char *value = only;
    int rc = qt_json_get_string(&value, src->json, key, src->path, err);
    return rc < 0 || strcmp(value, only) == 0 ? rc : config_unsupported(src, key, value, err);
}

int config_put(json_t *out, const char *key, json_t *value, struct qt_err *err)
{
    return value && json_object_set_new(out, key, value) == 0 ? QT_OK : qt_no_memory(err, NULL);
}
