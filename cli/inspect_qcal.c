/* inspect of a calibration file. */
#include "cli/cli.h"

static json_t *input_doc(struct cli *cli, size_t layer, const char *name, size_t k,
                         const struct qt_channels_summary *s)
{
    json_t *o = json_object();
    doc_set(cli, o, "layer", doc_size(layer));
    doc_set(cli, o, "input", doc_text(name));
    doc_set(cli, o, "k", doc_size(k));
    doc_set(cli, o, "tokens", doc_size(s->tokens));
    doc_set(cli, o, "rms", doc_real(s->rms));
    doc_set(cli, o, "p999_max", doc_real(s->p999));
    doc_set(cli, o, "absmax", doc_real(s->absmax));
    doc_set(cli, o, "dead", doc_size(s->dead));
    return o;
}

/* Adds a row per linear input to the table or, if array is not NULL, an object to the array. */
static int add_inputs(struct cli *cli, struct table *t, json_t *array, const struct qt_qcal *q,
                      struct qt_err *err)
{
    const struct qt_qcal_info *info = qt_qcal_info(q);
    for (size_t l = 0; l < info->layers; l++) {
        for (size_t i = 0; i < info->layer[l].inputs; i++) {
            char name[QT_QCAL_INPUT_NAME];
            struct qt_channels c;
            const size_t k = info->layer[l].k[i];
            int rc = qt_qcal_channels(&c, q, l, i, err);
            if (rc < 0)
                return rc;
            const struct qt_channels_summary s = qt_channels_summarize(&c, k);
            qt_qcal_input_name(name, &info->layer[l], i);
            qt_channels_free(&c);
            if (array)
                doc_append(cli, array, input_doc(cli, l, name, k, &s));
            else
                table_row(t, "%zu\t%s\t%zu\t%zu\t%.4g\t%.4g\t%.4g\t%zu", l, name, k, s.tokens,
                          s.rms, s.p999, s.absmax, s.dead);
        }
    }
    return QT_OK;
}

/* ---- text ----------------------------------------------------------------------------------- */

static void part_row(struct table *t, const struct qt_qcal_part *p)
{
    char more[TEXT_SIZE] = "";
    if (p->ndata > 1)
        snprintf(more, sizeof more, " and %zu more", p->ndata - 1);
    table_row(t, "data\t%zu window%s of %zu tokens, seed %llu%s, of %s%s", p->samples,
              text_plural(p->samples), p->seqlen, (unsigned long long)p->seed,
              p->bos ? ", with BOS" : "", p->data[0], more);
}

static int print_info(const struct qt_qcal *q, struct qt_err *err)
{
    const struct qt_qcal_info *info = qt_qcal_info(q);
    struct table t = {.align = "ll"};
    table_row(&t, "model\t%s: %zu layers, hidden %zu (fingerprint %08x)", info->family,
              info->layers, info->hidden, info->sample_crc);
    for (size_t i = 0; i < info->nparts; i++)
        part_row(&t, &info->parts[i]);
    table_row(&t, "tokens\t%zu", info->tokens);
    return table_print(&t, err);
}

static int print_all(struct cli *cli, const struct qt_qcal *q, struct qt_err *err)
{
    struct table t = {.align = "rlrrrrrr"};
    int rc;
    table_row(&t, "LAYER\tINPUT\tK\tTOKENS\tRMS\tP99.9 MAX\tABSMAX\tDEAD");
    QT_TRY(add_inputs(cli, &t, NULL, q, err));
    QT_TRY(table_print(&t, err));
    putchar('\n');
    QT_TRY(print_info(q, err));
done:
    table_free(&t);
    return rc;
}

/* ---- JSON ----------------------------------------------------------------------------------- */

static json_t *part_doc(struct cli *cli, const struct qt_qcal_part *p)
{
    json_t *o = json_object(), *data = json_array();
    for (size_t i = 0; i < p->ndata; i++)
        doc_append(cli, data, doc_text(p->data[i]));
    doc_set(cli, o, "samples", doc_size(p->samples));
    doc_set(cli, o, "seqlen", doc_size(p->seqlen));
    doc_set(cli, o, "seed", doc_size(p->seed));
    doc_set(cli, o, "bos", json_boolean(p->bos));
    doc_set(cli, o, "ids_crc32", qt_crc_json(p->ids_crc));
    doc_set(cli, o, "data", data);
    return o;
}

static int fill_doc(struct cli *cli, const struct qt_qcal *q, struct qt_err *err)
{
    const struct qt_qcal_info *info = qt_qcal_info(q);
    json_t *model = json_object(), *parts = json_array(), *inputs = json_array();
    for (size_t i = 0; i < info->nparts; i++)
        doc_append(cli, parts, part_doc(cli, &info->parts[i]));
    doc_set(cli, model, "family", doc_text(info->family));
    doc_set(cli, model, "layers", doc_size(info->layers));
    doc_set(cli, model, "hidden", doc_size(info->hidden));
    doc_set(cli, model, "sample_crc32", json_sprintf("%08x", info->sample_crc));
    doc_set(cli, cli->doc, "kind", doc_text("calibration"));
    doc_set(cli, cli->doc, "model", model);
    doc_set(cli, cli->doc, "tokens", doc_size(info->tokens));
    doc_set(cli, cli->doc, "parts", parts);
    int rc = add_inputs(cli, NULL, inputs, q, err);
    doc_set(cli, cli->doc, "inputs", inputs);
    return rc;
}

int inspect_qcal(struct cli *cli, const char *path, struct qt_err *err)
{
    struct qt_qcal *q;
    int rc = qt_qcal_open(&q, path, err);
    if (rc < 0)
        return rc;
    rc = cli->doc ? fill_doc(cli, q, err) : print_all(cli, q, err);
    qt_qcal_close(q);
    return rc;
}
