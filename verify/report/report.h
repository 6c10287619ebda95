/*
 * The parts of the HTML report (private to verify/report/).
 *
 *   report.c   reads the inputs; what belongs to which container
 *   page.c     the file: head, summary of contents, sections, the JSON inside
 *   style.c    the style sheet and the script
 *   text.c     the only writer of markup and of JSON: escapes what comes from files
 *   table.c    a table of numbers, as HTML and as JSON
 *   chart.c    SVG: axes, points, lines, bars
 *   grid.c     figures of tensors by decoder layer and kind: heat maps
 *   sections/  one file per section of the report
 */
#ifndef QT_VERIFY_REPORT_REPORT_H
#define QT_VERIFY_REPORT_REPORT_H

#include "verify/verify.h"

/* ---- text.c --------------------------------------------------------------------------------- */

/* A growing text. After a failed allocation nothing is added, and page.c reports it. */
struct text {
    char *data;
    size_t size, capacity;
    bool failed;
};

void text_put(struct text *t, const char *data, size_t size);
void text_free(struct text *t);
/*
 * Adds markup. fmt is markup with the conversions %s, %d, %zu, %f, %g. Every %s is escaped, for
 * element content as for quoted attribute values; control characters, characters that change the
 * direction of text, and bytes that are not UTF-8 become U+FFFD.
 */
void html(struct text *t, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Adds JSON for the content of a script element: no '<' in it. */
void text_json(struct text *t, const json_t *value);

/* ---- table.c -------------------------------------------------------------------------------- */

/* A column of a table. */
struct column {
    const char *key;    /* in the JSON */
    const char *title;  /* with its unit */
    const char *format; /* of numbers, for printf; NULL: text */
};

struct table {
    const char *caption;
    const struct column *columns;
    size_t ncolumns;
    json_t *rows; /* array of arrays */
    bool failed;  /* out of memory */
};

void table_begin(struct table *t, const char *caption, const struct column *columns,
                 size_t ncolumns);
#define TABLE_BEGIN(t, caption, columns)                                                           \
    table_begin(t, caption, columns, sizeof(columns) / sizeof *(columns))
/* Begins a row; then its cells in the order of the columns. NULL, NaN and infinity: an empty
 * cell. */
void row_begin(struct table *t);
void cell_text(struct table *t, const char *text);
void cell_number(struct table *t, double value);

/* ---- page.c --------------------------------------------------------------------------------- */

/* The section that is being written. */
struct page {
    struct text text;
    json_t *tables;  /* of the section */
    unsigned charts; /* number of charts on the page, for their ids */
    bool failed;
};

/* Writes the table, unless it has no rows, and frees it. folded: behind a line that opens it. */
void page_table(struct page *p, struct table *t, bool folded);

/* A section of the report. `write` adds nothing if the inputs have no such figures. */
struct section {
    const char *id, *title;
    int (*write)(struct page *p, const struct qt_report *r, struct qt_err *err);
};
extern const struct section section_choice, section_compare, section_quantiles, section_errors,
    section_experts, section_bits, section_weights, section_activations, section_learning,
    section_gates, section_time, section_speed, section_models, section_inputs;

/* ---- report.c ------------------------------------------------------------------------------- */

/* Figures of a quantized tensor; NaN: unknown. */
struct tensor_figures {
    const char *name;
    char scheme[QT_SPEC_TEXT]; /* short */
    char *kind;                /* "mlp.down_proj" */
    size_t layer;              /* SIZE_MAX: none */
    double weights, bpw, sqnr_db, mse, cosine, max_abs;
    double compensated;         /* error under the Hessian after GPTQ, divided by that before */
    double tokens, missing;     /* of an expert: calibration tokens, and how many more it needs */
    bool fell_back;             /* its Hessian was not used */
    double ms;                  /* that quantizing took */
    double outlier;             /* the largest weight, divided by the RMS */
    const json_t *distribution; /* of the source's weights (qtool-report.json); NULL: none */
    const json_t *input;        /* of its input, if it is the first with that input; NULL: none */
    double input_outlier;       /* the largest value of it, divided by the RMS */
};

/* A container, or a model of which only saved documents are known. */
struct subject {
    char *path, *label;              /* label: unique among subjects */
    char crc[16];                    /* CRC-32 of the manifest; "": unknown */
    struct qt_container *container;  /* NULL: only documents */
    json_t *run;                     /* qtool-report.json; NULL: none */
    double bytes, source_bytes, bpw; /* NaN: unknown */
    char schemes[QT_SPEC_TEXT];      /* "nf4"; "": unknown */
    struct tensor_figures *tensors;
    size_t count;
};

/* A saved --json document. */
struct document {
    const char *path;
    json_t *json;
    enum document_kind { DOCUMENT_EVAL, DOCUMENT_VERIFY, DOCUMENT_BENCH } kind;
    size_t subject; /* index; bench: not used */
};

struct qt_report {
    struct subject *subjects;
    struct document *documents;
    struct qt_qcal **qcals;
    size_t nsubjects, ndocuments, nqcals;
    size_t subjects_capacity, documents_capacity, qcals_capacity;
};

/* A member of a document as a number; NaN if it is none. */
double member(const json_t *object, const char *key);
/* A member as text; NULL if it is none. */
const char *member_text(const json_t *object, const char *key);
/* True for documents of bench --model. */
bool is_model_bench(const struct document *d);

/* ---- chart.c -------------------------------------------------------------------------------- */

struct axis {
    const char *title;
    double min, max; /* of the values; axis_fit widens them to the ticks */
    bool log;
};
/* An axis for no values yet. */
struct axis axis_new(const char *title, bool log);
/* Extends an axis to a value. Values that it cannot show (NaN; on a log axis, 0) do not count. */
void axis_take(struct axis *a, double value);
/* False if no value was taken. */
bool axis_used(const struct axis *a);

struct chart {
    struct page *page;
    struct axis x, y;
    double label_y[64]; /* places of labels, so that they do not overlap */
    double label_x[64];
    size_t labels;
};

enum { CHART_SERIES = 6 /* colours; more series repeat them */ };

/* Opens a figure with axes. `what` describes the chart for those who do not see it. */
void chart_begin(struct chart *c, struct page *p, const char *what, const struct axis *x,
                 const struct axis *y);
/* A point with a label beside it, and more text that a pointer shows. */
void chart_point(struct chart *c, size_t series, double x, double y, const char *label,
                 const char *more);
/* A line through n points; points that an axis cannot show are left out. */
void chart_line(struct chart *c, size_t series, bool dashed, const double *x, const double *y,
                size_t n);
/* A line without colour, in steps: a front. */
void chart_steps(struct chart *c, const double *x, const double *y, size_t n);
void chart_end(struct chart *c);
/* A legend for n series; dashed: of the series whose bit is set. */
void chart_legend(struct page *p, const char *const *names, size_t n, unsigned dashed);
/* Horizontal bars from 0. */
struct bar {
    const char *label;
    double value;
    size_t series;
};
void chart_bars(struct page *p, const char *what, const struct bar *bars, size_t n,
                const char *format);
/* Horizontal bars of parts one behind the other, in the colours of the series. Negative parts and
 * NaN count as 0. */
struct stack {
    const char *label;
    double part[CHART_SERIES];
};
void chart_stacks(struct page *p, const char *what, const struct stack *bars, size_t n,
                  const char *format);

/* ---- histogram.c ---------------------------------------------------------------------------- */

enum { HISTOGRAM_SERIES = 2 * CHART_SERIES };

struct histogram {
    const char *what, *caption;         /* description of the chart; title of the table */
    const char *value, *unit;           /* titles of the axes */
    const double (*bins)[QT_HIST_BINS]; /* [n] counts */
    const char *const *name;            /* [n] of the series */
    size_t n;                           /* at most HISTOGRAM_SERIES */
};
/* Writes a chart and a table of the share of values in each bin, in per cent; nothing without
 * values. */
void page_histogram(struct page *p, const struct histogram *h);

/* ---- grid.c --------------------------------------------------------------------------------- */

/* A table of one figure whose cells are coloured. */
struct heat {
    const char *caption, *corner; /* corner: title of the row names */
    const char *format;
    bool high;   /* high values have the strong colours; otherwise low ones */
    double span; /* least difference between the weakest and the strongest colour */
    size_t nrows, ncolumns;
    char **row, **column; /* names, owned */
    double *value;        /* [nrows][ncolumns], owned; NaN: no value */
};
int heat_new(struct heat *h, size_t nrows, size_t ncolumns, struct qt_err *err);
void heat_free(struct heat *h);
/* Writes the table; nothing if it has no value. */
void page_heat(struct page *p, const struct heat *h);

/* The distinct kinds, in the order of their first tensors: (*kinds)[*n] point into the tensors;
 * (*index)[i] is the number of the kind of tensor i. The caller frees both arrays, also on
 * failure. */
int kinds_of_tensors(const char ***kinds, size_t *n, size_t **index,
                     const struct tensor_figures *tensors, size_t count, struct qt_err *err);
/* Fills h from figures of tensors: a row per decoder layer, a column per kind. Where several
 * tensors meet (experts), the value is that of combine(sum), sum being the sums of what
 * cell_add adds. */
struct cell_sum {
    double weights, bits, error2, weight2, ms;
    double outlier, input_outlier; /* the largest */
};
int heat_of_tensors(struct heat *h, const struct tensor_figures *tensors, size_t n,
                    double (*combine)(const struct cell_sum *sum), struct qt_err *err);
/* Adds the figures of a tensor. error2 and weight2, the sums of squares of errors and weights,
 * become NaN if the tensor has no errors. */
void cell_add(struct cell_sum *sum, const struct tensor_figures *t);
/* 10 log10(weight2 / error2); NaN if unknown, infinite for no error. */
double cell_sqnr(const struct cell_sum *sum);

/* ---- distributions.c ------------------------------------------------------------------------ */

enum { OUTLIER_COLUMNS = 5 };

/* A distribution that tensors have, and the words for it. */
struct distributions {
    const json_t *(*of)(const struct tensor_figures *t); /* NULL: the tensor has none */
    double (*outlier)(const struct cell_sum *sum);
    const char *what, *caption, *value, *unit; /* of the histogram */
    const char *heat;                          /* caption */
    double heat_span;
    const char *outliers;                 /* caption */
    const struct column *outlier_columns; /* tensor, channel, largest value, RMS, ratio */
    const char *tensors;                  /* caption */
};
bool has_distributions(const struct subject *s, const struct distributions *d);
/* Writes the distributions of subject i, unless it has none or those of an earlier subject. */
int page_distributions(struct page *p, const struct qt_report *r, size_t i,
                       const struct distributions *d, struct qt_err *err);

#endif
