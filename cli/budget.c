/* --target-bpw and --target-size: schemes of tensors for a size. */
#include "cli/cli.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Tokens on which divergences are measured: of models with one quantized group, and of the few
 * models that are quantized as a whole, which are compared with each other. */
enum { MEASURED_TOKENS = 4096, CHECKED_TOKENS = 16384 };

/* A choice without --choices, and the targets in bits per weight for which it is one. */
struct default_choice {
    const char *scheme;
    double least, most;
};
enum { DEFAULTS = 9 };
static const struct default_choice
    calibrated_defaults[DEFAULTS] = {{"lut2", 0, 2.6},   {"lut2:g=64", 0, 3.6},
                                     {"lut3", 0, 4.6},   {"lut3:g=64", 0, 4.6},
                                     {"lut4", 2.2, 5.6}, {"lut4:g=64", 2.2, 5.6},
                                     {"fp5", 3, 6.6},    {"fp6", 4, 32},
                                     {"fp8", 5.5, 32}},
    plain_defaults[DEFAULTS] = {{"nf2", 0, 2.6},      {"nf2:g=64", 0, 3.6}, {"nf3", 0, 4.6},
                                {"nf3:g=64", 0, 4.6}, {"nf4", 2.2, 5.6},    {"nf4:g=64", 2.2, 5.6},
                                {"fp5", 3, 6.6},      {"fp6", 4, 32},       {"fp8", 5.5, 32}};

/* "5GB", "700MiB", "123456" */
static int parse_size(uint64_t *out, const char *text, struct qt_err *err)
{
    static const struct {
        const char *name;
        double bytes;
    } units[] = {{"", 1},         {"B", 1},        {"kB", 1e3},    {"KB", 1e3},
                 {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12},   {"KiB", 0x1p10},
                 {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
    char *end;
    const double value = strtod(text, &end);
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        const double bytes = value * units[i].bytes;
        if (end == text || strcmp(end, units[i].name) != 0 || !(bytes >= 1 && bytes < 0x1p63))
            continue;
        *out = (uint64_t)bytes;
        return QT_OK;
    }
    return qt_fail(err, QT_E_USAGE, NULL, NULL,
                   "--target-size must be a size like 5GB, 700MiB or 123456, not '%s'", text);
}

static int parse_bpw(double *out, const char *text, struct qt_err *err)
{
    char *end;
    *out = strtod(text, &end);
    if (end == text || *end || !(*out > 0 && *out <= 32))
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "--target-bpw must be a number of bits from 0 to 32, not '%s'", text);
    return QT_OK;
}

/* Splits at commas, except before parameters: "nf3,nf4:g=64,method=rtn" is two schemes. Returns
 * their number; there is room for all of them. */
static size_t split_choices(const char **out, char *text)
{
    size_t n = 0;
    for (char *at = text, *comma; at; at = comma) {
        comma = strchr(at, ',');
        while (comma) {
            const char *end = comma + 1 + strcspn(comma + 1, ",:");
            if (*end == ':' || !memchr(comma + 1, '=', (size_t)(end - comma - 1)))
                break;
            comma = strchr(comma + 1, ',');
        }
        if (comma)
            *comma++ = '\0';
        out[n++] = at;
    }
    return n;
}

/* Returns the number of choices. bpw: the target; 0: a size, all are choices. */
static size_t default_choices(const char **out, bool calibrated, double bpw)
{
    const struct default_choice *from = calibrated ? calibrated_defaults : plain_defaults;
    size_t n = 0;
    for (size_t i = 0; i < DEFAULTS; i++)
        if (bpw == 0 || (bpw >= from[i].least && bpw <= from[i].most))
            out[n++] = from[i].scheme;
    return n;
}

bool budget_wanted(const struct budget_options *o)
{
    return o->bpw || o->size;
}

int budget_check(const struct budget_options *o, const char *scheme, bool needs_scheme,
                 struct qt_err *err)
{
    uint64_t bytes;
    double bpw;
    int rc = QT_OK;
    if (o->bpw && o->size)
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "--target-bpw and --target-size cannot be used together");
    if (!budget_wanted(o) && (o->choices || o->state || o->untied))
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "%s needs --target-bpw or --target-size",
                       o->choices ? "--choices"
                       : o->state ? "--sensitivity"
                                  : "--untied");
    if (budget_wanted(o) && scheme)
        return qt_fail(
            err, QT_E_USAGE, NULL, NULL,
            "--scheme %s and a target cannot be used together: name schemes in --choices", scheme);
    if (!budget_wanted(o) && !scheme && needs_scheme)
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "--scheme S is missing; 'qtool help recipes' lists schemes by runtime");
    if (o->bpw)
        QT_TRY(parse_bpw(&bpw, o->bpw, err));
    if (o->size)
        QT_TRY(parse_size(&bytes, o->size, err));
done:
    return rc;
}

/* Windows to measure on, evenly spread over the data. out->ids is owned. */
static int some_windows(struct qt_calibration *out, const struct qt_calibration *data,
                        size_t tokens, struct qt_err *err)
{
    const size_t samples = qt_min_size(data->samples, qt_max_size(1, tokens / data->seqlen));
    uint32_t *ids;
    int rc = qt_array_new(&ids, samples * data->seqlen, sizeof *ids, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < samples; i++)
        memcpy(ids + i * data->seqlen, data->ids + i * data->samples / samples * data->seqlen,
               data->seqlen * sizeof *ids);
    *out = *data;
    out->ids = ids;
    out->samples = samples;
    return QT_OK;
}

int budget_choose(struct qt_budget *out, struct rules *rules, struct cli *cli,
                  const struct budget_options *o, const struct qt_ckpt *ckpt,
                  const struct calibration *calibration, struct qt_err *err)
{
    struct qt_budget_options opt = {.plan = {.rules = rules->rule, .nrules = rules->count},
                                    .untied = o->untied,
                                    .state = o->state,
                                    .log = &cli->log,
                                    .interrupted = interrupt_came};
    const struct qt_calibration *data = &calibration->data;
    const char **choices = NULL;
    char *text = NULL;
    int rc;
    *out = (struct qt_budget){0};
    if (o->state)
        QT_TRY(out_check(o->state, err));
    if (o->bpw)
        QT_TRY(parse_bpw(&opt.bpw, o->bpw, err));
    QT_TRY(qt_string_copy(&text, o->choices ? o->choices : "", err));
    QT_TRY(qt_array_new(&choices, strlen(text) + 1 + DEFAULTS, sizeof *choices, err));
    opt.nchoices = o->choices ? split_choices(choices, text)
                              : default_choices(choices, data->ids || data->file, opt.bpw);
    opt.choices = choices;
    if (o->size)
        QT_TRY(parse_size(&opt.bytes, o->size, err));
    if (data->ids) {
        opt.data = data;
        QT_TRY(some_windows(&opt.measured, data, MEASURED_TOKENS, err));
        QT_TRY(some_windows(&opt.checked, data, CHECKED_TOKENS, err));
    } else if (o->state) {
        QT_TRY(qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "--sensitivity holds measurements on calibration data: it needs --data"));
    } else {
        qt_log_message(
            &cli->log, QT_LOG_WARNING,
            "without --data schemes are chosen by the errors of the weights alone, as if "
            "all weights mattered equally");
    }
    QT_TRY(qt_budget_choose(out, ckpt, &opt, err));
    /* The chosen rules name other tensors than the user's. */
    QT_TRY(rules_prepend(rules, out->rules, out->nrules, err));
done:
    qt_free((void *)(uintptr_t)opt.measured.ids);
    qt_free((void *)(uintptr_t)opt.checked.ids);
    qt_free(choices);
    qt_free(text);
    return rc;
}

int budget_print(const struct qt_budget *b, struct qt_err *err)
{
    struct table t = {.align = "ll"};
    char bytes[TEXT_SIZE];
    table_row(&t, "chosen\t%.4f bits per quantized weight, %s, %zu groups", b->bpw,
              text_bytes(bytes, b->bytes), b->groups);
    if (!isnan(b->kld))
        table_row(&t, "predicted\tKL divergence %.4f (nats)", b->kld);
    if (!isnan(b->measured))
        table_row(&t, "measured\tKL divergence %.4f +- %.4f, on calibration data", b->measured,
                  b->measured_se);
    table_row(&t, "options\t--scheme %s", b->scheme);
    for (size_t i = 0; i < b->nrules; i++)
        table_row(&t, "\t--tensor '%s=%s'", b->rules[i].regex, b->rules[i].spec);
    return table_print(&t, err);
}

void budget_doc(struct cli *cli, const struct qt_budget *b)
{
    json_t *o = json_object(), *rules = json_array();
    for (size_t i = 0; i < b->nrules; i++)
        doc_append(cli, rules, json_sprintf("%s=%s", b->rules[i].regex, b->rules[i].spec));
    doc_set(cli, o, "scheme", doc_text(b->scheme));
    doc_set(cli, o, "tensor", rules);
    doc_set(cli, o, "bpw", doc_real(b->bpw));
    doc_set(cli, o, "bytes", doc_size(b->bytes));
    doc_set(cli, o, "groups", doc_size(b->groups));
    doc_set(cli, o, "predicted_kld", doc_real(b->kld));
    doc_set(cli, o, "measured_kld", doc_real(b->measured));
    doc_set(cli, o, "measured_kld_se", doc_real(b->measured_se));
    doc_set(cli, cli->doc, "target", o);
}
