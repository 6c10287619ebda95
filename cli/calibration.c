/* --data and --calib. */
#include "cli/cli.h"

#include "kernels/kernels.h"

#include <string.h>

static int read_windows(struct calibration *out, const struct calibration_options *o,
                        const struct qt_weights *w, struct qt_err *err)
{
    struct qt_model *model = NULL;
    struct qt_data data = {0};
    size_t seqlen = o->seqlen, samples = o->samples;
    int rc;
    QT_TRY(qt_model_open(&model, w, err));
    const struct qt_model_info *info = qt_model_info(model);
    if (seqlen == 0)
        seqlen = qt_min_size(CALIBRATION_SEQLEN, info->max_positions);
    const struct qt_data_options opt = {.dir = w->dir,
                                        .vocab = info->vocab,
                                        .bos = (enum qt_bos)o->bos,
                                        .interrupted = interrupt_came};
    QT_TRY(qt_data_read(&data, o->data.items, o->data.count, &opt, err));
    if (samples == 0) /* default; data shorter than one window is an error below */
        samples = qt_min_size(CALIBRATION_SAMPLES, data.count / seqlen ? data.count / seqlen : 1);
    QT_TRY(qt_data_windows(&out->ids, &data, samples, seqlen, o->seed, err));
    out->data = (struct qt_calibration){
        .ids = out->ids,
        .samples = samples,
        .seqlen = seqlen,
        .seed = o->seed,
        .backend = out->backend,
    };
    out->data_bytes = data.bytes;
    out->part = (struct qt_qcal_part){
        .samples = samples,
        .seqlen = seqlen,
        .seed = o->seed,
        .bos = data.bos,
        .data = o->data.items,
        .ndata = o->data.count,
    };
    out->bos = bos_rule_of(&data);
done:
    qt_data_free(&data);
    qt_model_close(model);
    return rc;
}

int backend_open(struct qt_backend **out, const char *device, struct qt_err *err)
{
    const int number = device_number(device);
    return number < 0 ? qt_backend_cpu_open(out, err) : qt_backend_cuda_open(out, number, err);
}

bool calibration_has_windows(const struct calibration_options *o)
{
    return o->samples || o->seqlen || o->seed || o->bos;
}

const char *const bos_names[] = {"auto", "yes", "no", NULL};

struct bos_rule bos_rule_of(const struct qt_data *data)
{
    return (struct bos_rule){data->texts, data->chats, data->bos, data->why};
}

void bos_row(struct table *t, const struct bos_rule *rule)
{
    const char *texts = rule->bos ? "before every document" : "none";
    if (!rule->why)
        return;
    if (rule->texts)
        table_row(t, "bos\t%s, by %s", texts, rule->why);
    const char *option = strncmp(rule->why, "--", 2) == 0 ? rule->why : "";
    if (rule->chats)
        table_row(t, "bos\tas the chat template writes it%s%s", *option ? ", then " : "", option);
}

void doc_bos(struct cli *cli, const struct bos_rule *rule)
{
    if (!rule->texts && !rule->chats)
        return;
    doc_set(cli, cli->doc, "bos", json_boolean(rule->bos));
    doc_set(cli, cli->doc, "bos_by", doc_text(rule->why));
    doc_set(cli, cli->doc, "conversations", doc_size(rule->chats));
}

int calibration_open(struct calibration *out, const struct calibration_options *o,
                     const struct qt_ckpt *ckpt, const char *device, struct qt_err *err)
{
    struct qt_weights w = qt_weights_of_ckpt(ckpt);
    struct qt_model *model = NULL;
    *out = (struct calibration){0};
    if (o->file && o->data.count)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "--data and --calib cannot be used together");
    if (o->data.count == 0 && calibration_has_windows(o))
        return qt_fail(err, QT_E_USAGE, NULL, NULL, WINDOWS_WITHOUT_DATA);
    if (!o->file && o->data.count == 0 && device_number(device) < 0)
        return QT_OK;
    int rc;
    QT_TRY(backend_open(&out->backend, device, err));
    if (!o->file && o->data.count == 0)
        return QT_OK;
    out->data.backend = out->backend;
    if (o->data.count)
        return read_windows(out, o, &w, err);
    QT_TRY(qt_qcal_open(&out->file, o->file, err));
    out->data.file = out->file;
    QT_TRY(qt_model_open(&model, &w, err));
    QT_TRY(qt_calibrate_check(out->file, ckpt, model, err));
done:
    qt_model_close(model);
    return rc;
}

void calibration_close(struct calibration *c)
{
    if (c->backend)
        c->backend->close(c->backend);
    qt_qcal_close(c->file);
    qt_free(c->ids);
}
