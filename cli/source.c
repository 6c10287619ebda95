/* PATH and -o arguments, --tensor rules, gates. */
#include "cli/cli.h"

#include <errno.h>
#include <math.h>
#include <string.h>
#include <sys/stat.h>

/* Refuses paths that look like a checkpoint but are not: the partial output of quantize, and a
 * single file of a container. */
static int check_no_part(const char *path, struct qt_err *err)
{
    const char *name = qt_base_name(path);
    struct stat st;
    char *dir;
    const bool file = stat(path, &st) == 0 && S_ISREG(st.st_mode);
    int rc = !file          ? qt_string_copy(&dir, path, err)
             : name == path ? qt_string_copy(&dir, ".", err)
                            : qt_string_format(&dir, err, "%.*s", (int)(name - path), path);
    if (rc < 0)
        return rc;
    if (qt_container_unfinished(dir))
        rc = qt_fail(err, QT_E_INPUT, path, NULL,
                     "is %s unfinished container: run its 'quantize' command again with --resume",
                     file ? "a file of an" : "an");
    else if (file && qt_container_probe(dir))
        rc = qt_fail(err, QT_E_UNSUPPORTED, path, NULL,
                     "is a file of a qtool container: give the directory instead");
    qt_free(dir);
    return rc;
}

int source_open(struct source *out, const char *path, struct qt_err *err)
{
    int rc;
    *out = (struct source){0};
    QT_TRY(check_no_part(path, err));
    if (qt_container_probe(path)) {
        QT_TRY(qt_container_open(&out->container, path, err));
        out->ckpt = qt_container_ckpt(out->container);
        out->weights = qt_weights_of_container(out->container);
    } else {
        QT_TRY(qt_ckpt_open(&out->opened, path, err));
        out->ckpt = out->opened;
        out->weights = qt_weights_of_ckpt(out->ckpt);
    }
done:
    return rc;
}

void source_close(struct source *s)
{
    qt_container_close(s->container);
    qt_ckpt_close(s->opened);
    *s = (struct source){0};
}

int doc_measured(struct cli *cli, const char *path, const struct qt_container *container,
                 const struct qt_ckpt *ckpt, struct qt_err *err)
{
    uint64_t bytes = 0;
    uint32_t crc = 0;
    int rc = container ? qt_container_crc(&crc, container, err) : QT_OK;
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < qt_ckpt_count(ckpt); i++)
        bytes += qt_ckpt_tensor(ckpt, i)->nbytes;
    doc_set(cli, cli->doc, "path", doc_text(path));
    doc_set(cli, cli->doc, "bytes", doc_size(bytes));
    doc_set(cli, cli->doc, "manifest_crc32", container ? qt_crc_json(crc) : json_null());
    return QT_OK;
}

int source_check_agreement(const struct source *s, struct qt_err *err)
{
    struct qt_model *model;
    if (!s->container || !s->weights.fake_quant.input)
        return QT_OK;
    int rc = qt_model_open(&model, &s->weights, err);
    if (rc < 0)
        return rc;
    rc = qt_act_agree(s->container, model, err);
    qt_model_close(model);
    return rc;
}

int source_open_whole(struct source *out, const char *path, struct cli *cli, struct qt_err *err)
{
    char *sums = NULL;
    int rc;
    QT_TRY(source_open(out, path, err));
    if (!out->container) {
        QT_TRY(qt_ckpt_check_readable(out->ckpt, err));
        goto done;
    }
    QT_TRY(qt_path_join(&sums, path, QT_CHECKSUMS_NAME, err));
    if (qt_path_exists(sums))
        QT_TRY(qt_checksums_check_small(path, err));
    else
        qt_log_message(&cli->log, QT_LOG_WARNING,
                       "%s is missing: the manifest and side files cannot be checked", sums);
    QT_TRY(qt_container_check_crcs(out->container, err));
done:
    qt_free(sums);
    return rc;
}

int checkpoint_open(struct qt_ckpt **out, const char *path, struct qt_err *err)
{
    *out = NULL;
    int rc = check_no_part(path, err);
    if (rc < 0)
        return rc;
    if (qt_container_probe(path))
        return qt_fail(err, QT_E_UNSUPPORTED, path, NULL,
                       "is a qtool container: give the checkpoint it was made from instead");
    return qt_ckpt_open(out, path, err);
}

int container_open(struct qt_container **out, const char *path, struct qt_err *err)
{
    *out = NULL;
    int rc = check_no_part(path, err);
    if (rc < 0)
        return rc;
    if (qt_path_exists(path) && !qt_container_probe(path))
        return qt_fail(err, QT_E_INPUT, path, NULL, "is not a container: it has no qtool.json");
    return qt_container_open(out, path, err);
}

int out_check(const char *path, struct qt_err *err)
{
    struct stat st;
    char *parent;
    size_t n = strlen(path);
    while (n && path[n - 1] == '/') /* DIR/OUT/ */
        n--;
    while (n && path[n - 1] != '/')
        n--;
    while (n > 1 && path[n - 1] == '/')
        n--;
    if (n == 0)
        return QT_OK;
    int rc = qt_string_format(&parent, err, "%.*s", (int)n, path);
    if (rc < 0)
        return rc;
    if (stat(parent, &st) < 0 && errno == ENOENT)
        rc = qt_fail(err, QT_E_USAGE, parent, NULL, "does not exist: create this directory first");
    qt_free(parent);
    return rc;
}

int out_dir_check(const char *path, struct qt_err *err)
{
    static const char *const endings[] = {".gguf", ".safetensors", ".bin", ".pt", ".pth"};
    const size_t n = strlen(path);
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++) {
        const size_t m = strlen(endings[i]);
        if (n > m && strcmp(path + n - m, endings[i]) == 0)
            return qt_fail(
                err, QT_E_USAGE, path, NULL,
                "this will be a directory, in which files are written: choose a name that "
                "does not end in %s",
                endings[i]);
    }
    return out_check(path, err);
}

int rules_parse(struct rules *out, const struct opt_list *list, struct qt_err *err)
{
    int rc;
    *out = (struct rules){0};
    QT_TRY(qt_array_new(&out->rule, list->count, sizeof *out->rule, err));
    QT_TRY(qt_array_new(&out->text, list->count, sizeof *out->text, err));
    for (size_t i = 0; i < list->count; i++) {
        QT_TRY(qt_string_copy(&out->text[i], list->items[i], err));
        out->count = out->texts = i + 1;
        char *cut = strchr(out->text[i], '=');
        if (!cut || cut == out->text[i] || !cut[1]) {
            rc = qt_fail(err, QT_E_USAGE, NULL, NULL,
                         "--tensor '%s' is not of the form REGEX=SCHEME", list->items[i]);
            goto done;
        }
        *cut = '\0';
        out->rule[i] = (struct qt_rule){.regex = out->text[i], .spec = cut + 1};
    }
done:
    return rc;
}

int rules_prepend(struct rules *rules, const struct qt_rule *more, size_t n, struct qt_err *err)
{
    struct qt_rule *all;
    size_t count = n;
    int rc = qt_array_new(&all, n + rules->count, sizeof *all, err);
    if (rc < 0)
        return rc;
    if (n)
        memcpy(all, more, n * sizeof *all);
    for (size_t i = 0; i < rules->count; i++)
        if (strcmp(rules->rule[i].spec, QT_BUDGET_CHOICE) != 0)
            all[count++] = rules->rule[i];
    qt_free(rules->rule);
    rules->rule = all;
    rules->count = count;
    return QT_OK;
}

void rules_free(struct rules *rules)
{
    for (size_t i = 0; i < rules->texts; i++)
        qt_free(rules->text[i]);
    qt_free(rules->text);
    qt_free(rules->rule);
    *rules = (struct rules){0};
}

int gate_validate(const char *expr, const struct qt_figure *figures, size_t n,
                  const struct qt_tensor_figures *tensors, struct qt_err *err)
{
    int rc = expr ? qt_gate_check(expr, figures, n, tensors, err) : QT_OK;
    return rc == QT_E_GATE ? QT_OK : rc; /* the values are not known yet */
}

int gate_apply(struct cli *cli, const char *expr, const struct qt_figure *figures, size_t n,
               const struct qt_tensor_figures *tensors, struct qt_err *err)
{
    struct qt_gate_results results;
    struct table t = {.align = "ll"};
    json_t *array = cli->doc ? json_array() : NULL;
    const int rc = qt_gate_run(&results, expr, figures, n, tensors, err);
    for (size_t i = 0; i < results.count; i++) {
        const struct qt_gate_result *r = &results.list[i];
        char number[TEXT_SIZE] = "undefined";
        if (!isnan(r->value))
            snprintf(number, sizeof number, "%.9g", r->value);
        if (!cli->doc) {
            table_row(&t, "gate\t%s %s: %s", r->passed ? "passed" : "failed", r->text, number);
            continue;
        }
        json_t *o = json_object();
        doc_set(cli, o, "condition", doc_text(r->text));
        doc_set(cli, o, "passed", json_boolean(r->passed));
        doc_set(cli, o, "value", doc_real(r->value));
        doc_append(cli, array, o);
    }
    if (cli->doc)
        doc_set(cli, cli->doc, "gates", array);
    qt_free(results.list);
    const int second = cli->doc ? QT_OK : table_print(&t, rc < 0 ? NULL : err);
    return rc < 0 ? rc : second;
}
