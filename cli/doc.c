/* The --json document. */
#include "cli/cli.h"

#include <math.h>
#include <string.h>

enum { DOC_SCHEMA = 1 };

const char *doc_status(int status)
{
    switch (status) {
    case QT_OK:
        return "ok";
    case QT_E_USAGE:
        return "usage";
    case QT_E_INPUT:
        return "bad_input";
    case QT_E_UNSUPPORTED:
        return "unsupported";
    case QT_E_GATE:
        return "gate_failed";
    case QT_E_RESOURCE:
        return "resource";
    case QT_E_NO_GPU:
        return "no_gpu";
    case QT_E_RESUME:
        return "resume_mismatch";
    case QT_E_INTERRUPTED:
        return "interrupted";
    default:
        return "internal";
    }
}

void doc_set(struct cli *cli, json_t *object, const char *key, json_t *value)
{
    if (json_object_set_new(object, key, value) < 0)
        cli->doc_failed = true;
}

void doc_append(struct cli *cli, json_t *array, json_t *value)
{
    if (json_array_append_new(array, value) < 0)
        cli->doc_failed = true;
}

json_t *doc_text(const char *s)
{
    return s ? qt_json_name(s) : json_null();
}

json_t *doc_real(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

json_t *doc_size(uint64_t value)
{
    return json_integer((json_int_t)value);
}

json_t *doc_shape(int ndim, const size_t *shape)
{
    json_t *array = json_array();
    for (int i = 0; array && i < ndim; i++) {
        if (json_array_append_new(array, doc_size(shape[i])) < 0) {
            json_decref(array);
            return NULL;
        }
    }
    return array;
}

json_t *doc_gpu(struct cli *cli, const struct qt_gpu *gpu)
{
    json_t *o = json_object();
    doc_set(cli, o, "name", doc_text(gpu->name));
    doc_set(cli, o, "cuda", doc_text(gpu->cuda));
    doc_set(cli, o, "cublas", doc_text(gpu->cublas));
    doc_set(cli, o, "sms", json_integer(gpu->sms));
    doc_set(cli, o, "l2_bytes", doc_size(gpu->l2_bytes));
    return o;
}

void doc_figures(struct cli *cli, const struct qt_figure *figures, size_t n)
{
    for (size_t i = 0; i < n; i++)
        doc_set(cli, cli->doc, figures[i].name, doc_real(figures[i].value));
}

static json_t *optional_text(const char *s)
{
    return doc_text(s[0] ? s : NULL);
}

static void set_error(struct cli *cli, int rc, const struct qt_err *err)
{
    json_t *error = json_object();
    doc_set(cli, error, "status", doc_text(doc_status(rc)));
    doc_set(cli, error, "exit_code", json_integer(qt_exit_code((enum qt_status)rc)));
    doc_set(cli, error, "file", optional_text(err->file));
    doc_set(cli, error, "tensor", optional_text(err->tensor));
    doc_set(cli, error, "message", doc_text(err->reason));
    doc_set(cli, cli->doc, "error", error);
}

int doc_print(struct cli *cli, const char *command, int rc, const struct qt_err *err)
{
    json_t *results = cli->doc;
    cli->doc = json_object();
    cli->doc_failed = false;
    doc_set(cli, cli->doc, "qtool", doc_text(QT_VERSION));
    doc_set(cli, cli->doc, "schema", json_integer(DOC_SCHEMA));
    doc_set(cli, cli->doc, "command", doc_text(command));
    doc_set(cli, cli->doc, "ok", json_boolean(rc == QT_OK));
    if (rc < 0)
        set_error(cli, rc, err);
    if (json_object_update(cli->doc, results) < 0)
        cli->doc_failed = true;
    json_decref(results);
    if (cli->doc_failed || (json_dumpf(cli->doc, stdout, JSON_INDENT(2)) < 0 && !ferror(stdout))) {
        fputs("qtool: out of memory for the JSON document\n", stderr);
        return rc < 0 ? rc : QT_E_RESOURCE;
    }
    putchar('\n'); /* close_stdout reports write errors */
    return rc;
}
