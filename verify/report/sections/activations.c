/* Linear inputs, from calibration files and calibrated containers: histograms, and channels that
 * stand out. */
#include "verify/report/report.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { OUTLIERS = 24, MAX_LAYERS = 1024 };

static const char *const input_names[QT_INPUTS] = {"attention in", "attention out", "MLP in",
                                                   "MLP down"};

static const struct column input_columns[] = {
    {"layer", "layer", NULL},
    {"input", "input", NULL},
    {"channels", "channels", "%.0f"},
    {"rms", "RMS", "%.4g"},
    {"p999_max", "99.9 %, of the largest channel", "%.4g"},
    {"absmax", "largest", "%.4g"},
    {"outlier", "largest / RMS", "%.1f"},
    {"dead", "always 0", "%.0f"},
};
static const struct column outlier_columns[] = {
    {"layer", "layer", NULL},          {"input", "input", NULL},
    {"channel", "channel", "%.0f"},    {"absmax", "largest", "%.4g"},
    {"rms", "RMS of channel", "%.4g"}, {"ratio", "largest / RMS of input", "%.1f"},
};
static const struct column tensor_outlier_columns[OUTLIER_COLUMNS] = {
    {"tensor", "input of tensor", NULL},
    {"channel", "channel", "%.0f"},
    {"absmax", "largest", "%.4g"},
    {"rms", "RMS of channel", "%.4g"},
    {"ratio", "largest / RMS of input", "%.1f"},
};
struct outlier {
    size_t layer, channel;
    char input[QT_QCAL_INPUT_NAME];
    double absmax, rms, ratio;
};

/* Each linear input of a calibration file adds to these figures. */
struct gathered {
    double bins[QT_INPUTS][QT_HIST_BINS];
    struct outlier top[OUTLIERS]; /* the largest ratios, in descending order */
    size_t ntop;
    struct heat heat;
    struct table inputs;
};

static void take_outlier(struct gathered *g, const struct outlier *o)
{
    size_t at = g->ntop;
    while (at > 0 && g->top[at - 1].ratio < o->ratio)
        at--;
    if (at == OUTLIERS)
        return;
    const size_t last = g->ntop < OUTLIERS ? g->ntop++ : OUTLIERS - 1;
    memmove(&g->top[at + 1], &g->top[at], (last - at) * sizeof *g->top);
    g->top[at] = *o;
}

static void gather(struct gathered *g, const struct qt_channels *c, size_t layer,
                   const struct qt_qcal_layer *l, size_t input)
{
    const size_t k = l->k[input], kind = qt_qcal_input_kind(l, input);
    const struct qt_channels_summary s = qt_channels_summarize(c, k);
    const double rms = s.tokens ? s.rms : NAN;
    char name[24];
    struct outlier o = {.layer = layer};
    qt_qcal_input_name(o.input, l, input);
    for (size_t j = 0; j < k; j++) {
        o.channel = j;
        o.absmax = (double)c->absmax[j];
        o.rms = sqrt(c->sum2[j] / (double)s.tokens);
        o.ratio = rms > 0 ? o.absmax / rms : 0;
        take_outlier(g, &o);
        for (size_t b = 0; b < QT_HIST_BINS; b++)
            g->bins[kind][b] += c->hist[j * QT_HIST_BINS + b];
    }
    snprintf(name, sizeof name, "%zu", layer);
    row_begin(&g->inputs);
    cell_text(&g->inputs, name);
    cell_text(&g->inputs, o.input);
    cell_number(&g->inputs, (double)k);
    cell_number(&g->inputs, rms);
    cell_number(&g->inputs, s.p999);
    cell_number(&g->inputs, s.absmax);
    cell_number(&g->inputs, s.absmax / rms);
    cell_number(&g->inputs, (double)s.dead);
    if (layer < g->heat.nrows) { /* of experts the largest */
        double *value = &g->heat.value[layer * QT_INPUTS + kind];
        *value = fmax(*value, s.absmax / rms);
    }
}

static void write_outliers(struct page *p, const struct gathered *g)
{
    struct table t;
    TABLE_BEGIN(&t, "Channels that stand out most", outlier_columns);
    for (size_t i = 0; i < g->ntop; i++) {
        const struct outlier *o = &g->top[i];
        char layer[24];
        snprintf(layer, sizeof layer, "%zu", o->layer);
        row_begin(&t);
        cell_text(&t, layer);
        cell_text(&t, o->input);
        cell_number(&t, (double)o->channel);
        cell_number(&t, o->absmax);
        cell_number(&t, o->rms);
        cell_number(&t, o->ratio);
    }
    page_table(p, &t, true);
}

static int heat_begin(struct heat *h, size_t layers, struct qt_err *err)
{
    int rc;
    QT_TRY(heat_new(h, qt_min_size(layers, MAX_LAYERS), QT_INPUTS, err));
    for (size_t i = 0; i < h->nrows; i++)
        QT_TRY(qt_string_format(&h->row[i], err, "%zu", i));
    for (size_t i = 0; i < QT_INPUTS; i++)
        QT_TRY(qt_string_copy(&h->column[i], input_names[i], err));
done:
    return rc;
}

static int write_file(struct page *p, const struct qt_qcal *q, struct qt_err *err)
{
    const struct qt_qcal_info *info = qt_qcal_info(q);
    struct gathered *g = NULL;
    int rc;
    QT_TRY(qt_array_new(&g, 1, sizeof *g, err));
    const struct histogram histogram = {
        .what = "Histogram of the magnitudes of linear inputs, over all layers",
        .caption = "Histogram of |x| (%), over all layers and channels",
        .value = "|x|",
        .unit = "share of values (%)",
        .bins = (const double(*)[QT_HIST_BINS])g->bins,
        .name = input_names,
        .n = QT_INPUTS};
    g->heat =
        (struct heat){.caption = "Largest value of an input, divided by its RMS, by decoder layer",
                      .corner = "layer",
                      .format = "%.0f",
                      .high = true,
                      .span = 10};
    TABLE_BEGIN(&g->inputs, "Linear inputs", input_columns);
    QT_TRY(heat_begin(&g->heat, info->layers, err));
    for (size_t l = 0; l < info->layers; l++) {
        for (size_t i = 0; i < info->layer[l].inputs; i++) {
            struct qt_channels c;
            QT_TRY(qt_qcal_channels(&c, q, l, i, err));
            gather(g, &c, l, &info->layer[l], i);
            qt_channels_free(&c);
        }
    }
    html(&p->text, "<h3>%s: %s, %zu tokens</h3>\n", qt_base_name(qt_qcal_path(q)), info->family,
         info->tokens);
    html(&p->text, "<div class=\"charts\"><div>");
    page_histogram(p, &histogram);
    html(&p->text, "</div><div>");
    page_heat(p, &g->heat);
    html(&p->text, "</div></div>\n");
    write_outliers(p, g);
    page_table(p, &g->inputs, true);
done:
    if (g) {
        json_decref(g->inputs.rows);
        heat_free(&g->heat);
    }
    qt_free(g);
    return rc;
}

/* ---- containers ----------------------------------------------------------------------------- */

static const json_t *input_of(const struct tensor_figures *t)
{
    return t->input;
}

static double cell_outlier(const struct cell_sum *sum)
{
    return sum->input_outlier > 0 ? sum->input_outlier : NAN;
}

static const struct distributions inputs = {
    .of = input_of,
    .outlier = cell_outlier,
    .what = "Histogram of the magnitudes of linear inputs, by kind of tensor",
    .caption = "Histogram of |x| (%), by kind of tensor",
    .value = "|x|",
    .unit = "share of values (%)",
    .heat = "Largest value of an input, divided by its RMS, by decoder layer and kind",
    .heat_span = 10,
    .outliers = "Channels that stand out most",
    .outlier_columns = tensor_outlier_columns,
    .tensors = "Inputs of tensors",
};

static int write(struct page *p, const struct qt_report *r, struct qt_err *err)
{
    bool first = true;
    int rc = QT_OK;
    for (size_t i = 0; i < r->nsubjects && rc == QT_OK; i++) {
        if (!has_distributions(&r->subjects[i], &inputs))
            continue;
        if (first)
            html(&p->text, "<p>Inputs on the tokens that the containers were calibrated on. Those "
                           "that several tensors share are under the first of them.</p>\n");
        first = false;
        rc = page_distributions(p, r, i, &inputs, err);
    }
    for (size_t i = 0; i < r->nqcals && rc == QT_OK; i++)
        rc = write_file(p, r->qcals[i], err);
    return rc;
}

const struct section section_activations = {"activations", "Activations", write};
