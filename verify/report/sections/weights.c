/* The source's weights, from the containers' qtool-report.json. */
#include "verify/report/report.h"

#include <math.h>
#include <stdlib.h>

static const struct column outlier_columns[OUTLIER_COLUMNS] = {
    {"tensor", "tensor", NULL},
    {"channel", "input channel", "%.0f"},
    {"absmax", "largest", "%.4g"},
    {"rms", "RMS of channel", "%.4g"},
    {"ratio", "largest / RMS of tensor", "%.1f"},
};

static const json_t *distribution_of(const struct tensor_figures *t)
{
    return t->distribution;
}

static double cell_outlier(const struct cell_sum *sum)
{
    return sum->outlier > 0 ? sum->outlier : NAN;
}

static const struct distributions weights = {
    .of = distribution_of,
    .outlier = cell_outlier,
    .what = "Histogram of the magnitudes of weights, by kind of tensor",
    .caption = "Histogram of |w| (%), by kind of tensor",
    .value = "|w|",
    .unit = "share of weights (%)",
    .heat = "Largest weight of a tensor, divided by its RMS, by decoder layer and kind",
    .heat_span = 3,
    .outliers = "Input channels that stand out most",
    .outlier_columns = outlier_columns,
    .tensors = "Weights of tensors",
};

static int write(struct page *p, const struct qt_report *r, struct qt_err *err)
{
    bool first = true;
    int rc = QT_OK;
    for (size_t i = 0; i < r->nsubjects && rc == QT_OK; i++) {
        if (!has_distributions(&r->subjects[i], &weights))
            continue;
        if (first)
            html(&p->text, "<p>Weights before quantization. Containers of the same source have "
                           "the same.</p>\n");
        first = false;
        rc = page_distributions(p, r, i, &weights, err);
    }
    return rc;
}

const struct section section_weights = {"weights", "Weights", write};
