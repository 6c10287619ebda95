/* config.json of an export: that of the container, with a quantization_config of the format. */
#include "pack/export/export.h"

#include <string.h>

enum { CONFIG_LIMIT = 1 << 26 };

struct edit {
    char *text;
    size_t size;
    const char *file;
};

/* Replaces or adds a member; value = NULL removes it. Takes the reference of value. */
static int set_member(struct edit *e, const char *key, json_t *value, struct qt_err *err)
{
    char *next = NULL;
    size_t size;
    int rc = value ? qt_json_edit_set(&next, &size, e->text, e->size, key, value, e->file, err)
                   : qt_json_edit_remove(&next, &size, e->text, e->size, key, e->file, err);
    json_decref(value);
    if (rc < 0)
        return rc;
    qt_free(e->text);
    e->text = next;
    e->size = size;
    return QT_OK;
}

/* The dtype in which a runtime holds the scales: it converts them to the dtype of the model. */
static int set_dtype(struct edit *e, const struct qt_export *x, struct qt_err *err)
{
    static const char *const keys[] = {"torch_dtype", "dtype"};
    const char *name = x->opt->dtype == QT_EXPORT_BF16 ? "bfloat16" : "float16";
    bool set = false;
    int rc = QT_OK;
    for (size_t i = 0; i < sizeof keys / sizeof *keys && rc == QT_OK; i++) {
        if (!json_object_get(x->config, keys[i]) && (set || i == 0))
            continue;
        rc = set_member(e, keys[i], json_string(name), err);
        set = true;
    }
    return rc;
}

int qt_export_write_config(struct qt_export *x, struct qt_err *err)
{
    json_t *quantization = NULL;
    struct edit e = {0};
    char *path = NULL;
    int rc;
    QT_TRY(qt_path_join(&path, qt_container_dir(x->container), "config.json", err));
    if (!x->config)
        goto done; /* a container without config.json */
    e.file = path;
    QT_TRY(qt_file_read(&e.text, &e.size, path, CONFIG_LIMIT, err));
    if (x->format->config)
        QT_TRY(x->format->config(&quantization, x, err));
    QT_TRY(set_member(&e, "quantization_config", json_incref(quantization), err));
    if (x->format->config_copy)
        QT_TRY(set_member(&e, x->format->config_copy, json_incref(quantization), err));
    if (quantization)
        QT_TRY(set_dtype(&e, x, err));
    QT_TRY(qt_output_text(x->out, "config.json", e.text, e.size, err));
    if (x->format->extra)
        QT_TRY(x->format->extra(x, quantization, err));
done:
    json_decref(quantization);
    qt_free(e.text);
    qt_free(path);
    return rc;
}
