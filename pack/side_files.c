/* Side files of a container: copies of those of the source. config.json also says that the weights
 * are qtool's. */
#include "pack/run.h"

#include <string.h>

#define CONFIG_NAME "config.json"

/*
 * The object tells other programs that they cannot load the weights: they would take the sections
 * for unknown tensors and the weights for missing ones, and start from random weights. vLLM refuses
 * an unknown method; transformers (5.24) only warns.
 */
json_t *qt_run_quantization(const struct qt_run *run)
{
    return json_pack("{s:s, s:i}", "quant_method", "qtool", "format_version",
                     qt_plan_format_version(&run->plan));
}

static int container_config(char **out, size_t *size, const struct qt_run *run, const char *path,
                            struct qt_err *err)
{
    json_t *quantization = qt_run_quantization(run);
    char *text = NULL;
    int rc;
    QT_TRY(qt_file_read(out, size, path, (size_t)1 << 28, err));
    /* The sections of a quantized source do not describe the container. That at the first path is
     * replaced. */
    for (size_t i = 1; qt_quantization_paths[i]; i++) {
        text = *out;
        QT_TRY(qt_json_edit_remove(out, size, text, *size, qt_quantization_paths[i], path, err));
        qt_free(text);
    }
    text = *out;
    QT_TRY(qt_json_edit_set(out, size, text, *size, QT_QUANTIZATION_KEY, quantization, path, err));
done:
    if (text != *out)
        qt_free(text);
    json_decref(quantization);
    return rc;
}

static int add_config(struct qt_run *run, const char *path, struct qt_err *err)
{
    struct qt_map map;
    char *text = NULL;
    size_t size;
    int rc = qt_map_open(&map, path, err); /* for the permissions */
    if (rc < 0)
        return rc;
    QT_TRY(container_config(&text, &size, run, path, err));
    QT_TRY(qt_writer_add_text(run->writer, qt_base_name(path), text, size, map.mode, err));
done:
    qt_free(text);
    qt_map_close(&map);
    return rc;
}

/* ---- a new container ------------------------------------------------------------------------ */

int qt_run_copy_side_files(struct qt_run *run, struct qt_err *err)
{
    const char *name, *dir = qt_ckpt_dir(run->ckpt), *why;
    int rc = QT_OK;
    for (size_t i = 0; rc == QT_OK && (name = qt_side_file(i)) != NULL; i++) {
        char *path;
        rc = qt_side_file_find(&path, &why, dir, name, err);
        if (rc == QT_OK && why)
            qt_log_message(run->opt->log, QT_LOG_WARNING, "%s/%s %s: not copied", dir, name, why);
        if (path)
            rc = strcmp(name, CONFIG_NAME) == 0 ? add_config(run, path, err)
                                                : qt_writer_copy_file(run->writer, path, err);
        qt_free(path);
    }
    return rc;
}

/* ---- the container of an earlier run -------------------------------------------------------- */

static int same_bytes(bool *same, const char *path, const void *data, size_t size,
                      struct qt_err *err)
{
    struct qt_map map;
    int rc = qt_map_open(&map, path, err);
    if (rc < 0)
        return rc;
    *same = map.size == size && (size == 0 || memcmp(map.data, data, size) == 0);
    qt_map_close(&map);
    return rc;
}

/* Compares a side file of the container with the one that the source at `from` gives. */
static int same_side_file(bool *same, const struct qt_run *run, const char *to, const char *from,
                          struct qt_err *err)
{
    struct qt_map map;
    char *text;
    size_t size;
    int rc;
    if (strcmp(qt_base_name(from), CONFIG_NAME) == 0) {
        rc = container_config(&text, &size, run, from, err);
        if (rc == QT_OK)
            rc = same_bytes(same, to, text, size, err);
        qt_free(text);
        return rc;
    }
    rc = qt_map_open(&map, from, err);
    if (rc < 0)
        return rc;
    rc = same_bytes(same, to, map.data, map.size, err);
    qt_map_close(&map);
    return rc;
}

int qt_run_check_side_file(const struct qt_run *run, const char *name, struct qt_err *err)
{
    char *from = NULL, *to = NULL;
    const char *why;
    int rc;
    QT_TRY(qt_side_file_find(&from, &why, qt_ckpt_dir(run->ckpt), name, err));
    QT_TRY(qt_path_join(&to, run->opt->out_dir, name, err));
    bool same = !from && !qt_path_exists(to);
    if (from && qt_path_exists(to))
        QT_TRY(same_side_file(&same, run, to, from, err));
    if (!same)
        rc = qt_fail(err, QT_E_RESUME, to, NULL,
                     "cannot resume: the file differs from the one in %s", qt_ckpt_dir(run->ckpt));
done:
    qt_free(from);
    qt_free(to);
    return rc;
}
