/* list: schemes, kernels, architectures. */
#include "cli/cli.h"

#include <string.h>

/* ---- schemes -------------------------------------------------------------------------------- */

/* "32..256" or "rtn|search" */
static const char *param_range(char *buf, size_t size, const struct qt_param *p)
{
    size_t n = 0;
    if (!p->choices) {
        snprintf(buf, size, "%g..%g", p->min, p->max);
        return buf;
    }
    buf[0] = '\0';
    for (size_t i = 0; p->choices[i] && n < size; i++)
        n += (size_t)snprintf(buf + n, size - n, "%s%s", i ? "|" : "", p->choices[i]);
    return buf;
}

static const char *param_initial(char buf[TEXT_SIZE], const struct qt_param *p)
{
    if (p->choices)
        return p->choices[(size_t)p->initial];
    snprintf(buf, TEXT_SIZE, "%g", p->initial);
    return buf;
}

/* True if every name of the scheme fixes parameter i, so that no text can set it. */
static bool is_fixed(const struct qt_scheme *s, size_t i)
{
    const struct qt_preset *preset;
    unsigned fixed = ~0u;
    for (size_t k = 0; (preset = qt_scheme_preset(s, k)) != NULL; k++) {
        struct qt_spec spec;
        fixed &= qt_spec_parse(&spec, preset->name, NULL) == QT_OK ? spec.fixed : 0;
    }
    return fixed >> i & 1;
}

static int print_scheme(const struct qt_scheme *s, struct qt_err *err)
{
    struct table names = {.align = "ll"}, params = {.align = "llll"};
    const struct qt_preset *preset;
    const struct qt_param *p;
    char range[256], initial[TEXT_SIZE];
    for (size_t i = 0; (preset = qt_scheme_preset(s, i)) != NULL; i++)
        table_row(&names, "  %s\t%s", preset->name, preset->help);
    table_row(&params, "  parameter\tvalues\tdefault\tmeaning");
    for (size_t i = 0; (p = qt_scheme_param(s, i)) != NULL; i++)
        if (!is_fixed(s, i))
            table_row(&params, "  %s\t%s\t%s\t%s", p->key, param_range(range, sizeof range, p),
                      param_initial(initial, p), p->help);
    printf("%s: %s\n\n", qt_scheme_name(s), qt_scheme_help(s));
    int rc = table_print(&names, err);
    putchar('\n');
    int second = table_print(&params, rc < 0 ? NULL : err);
    putchar('\n');
    return rc < 0 ? rc : second;
}

static int print_schemes(struct qt_err *err)
{
    const struct qt_scheme *s;
    int rc = QT_OK;
    for (size_t i = 0; rc == QT_OK && (s = qt_scheme_at(i)) != NULL; i++)
        rc = print_scheme(s, err);
    printf("none: the tensor is copied\n\n"
           "A scheme is written NAME[:KEY=VALUE,...], for example nf4:g=128. A name may fix some\n"
           "parameters of its scheme, or have other defaults.\n");
    return rc;
}

static json_t *param_doc(struct cli *cli, const struct qt_param *p)
{
    json_t *o = json_object();
    doc_set(cli, o, "key", doc_text(p->key));
    doc_set(cli, o, "help", doc_text(p->help));
    if (p->choices) {
        json_t *choices = json_array();
        for (size_t i = 0; p->choices[i]; i++)
            doc_append(cli, choices, doc_text(p->choices[i]));
        doc_set(cli, o, "default", doc_text(p->choices[(size_t)p->initial]));
        doc_set(cli, o, "choices", choices);
    } else {
        doc_set(cli, o, "default", doc_real(p->initial));
        doc_set(cli, o, "min", doc_real(p->min));
        doc_set(cli, o, "max", doc_real(p->max));
    }
    return o;
}

static json_t *scheme_doc(struct cli *cli, const struct qt_scheme *s)
{
    json_t *o = json_object(), *presets = json_array(), *params = json_array();
    const struct qt_preset *preset;
    const struct qt_param *p;
    for (size_t i = 0; (preset = qt_scheme_preset(s, i)) != NULL; i++) {
        json_t *row = json_object();
        doc_set(cli, row, "name", doc_text(preset->name));
        doc_set(cli, row, "values", doc_text(preset->values));
        doc_set(cli, row, "help", doc_text(preset->help));
        doc_append(cli, presets, row);
    }
    for (size_t i = 0; (p = qt_scheme_param(s, i)) != NULL; i++)
        if (!is_fixed(s, i))
            doc_append(cli, params, param_doc(cli, p));
    doc_set(cli, o, "scheme", doc_text(qt_scheme_name(s)));
    doc_set(cli, o, "help", doc_text(qt_scheme_help(s)));
    doc_set(cli, o, "presets", presets);
    doc_set(cli, o, "parameters", params);
    return o;
}

static int list_schemes(struct cli *cli, struct qt_err *err)
{
    const struct qt_scheme *s;
    if (!cli->doc)
        return print_schemes(err);
    json_t *schemes = json_array();
    for (size_t i = 0; (s = qt_scheme_at(i)) != NULL; i++)
        doc_append(cli, schemes, scheme_doc(cli, s));
    doc_set(cli, cli->doc, "schemes", schemes);
    return QT_OK;
}

/* ---- kernels and architectures -------------------------------------------------------------- */

static void list_kernel(struct cli *cli, struct table *t, json_t *array, const char *name,
                        const char *layout, const char *help)
{
    if (!array) {
        table_row(t, "%s\t%s\t%s", name, layout, help);
        return;
    }
    json_t *o = json_object();
    doc_set(cli, o, "name", doc_text(name));
    doc_set(cli, o, "layout", doc_text(layout[0] ? layout : NULL));
    doc_set(cli, o, "help", doc_text(help));
    doc_append(cli, array, o);
}

static int list_kernels(struct cli *cli, struct qt_err *err)
{
    struct table t = {.align = "lll"};
    json_t *array = cli->doc ? json_array() : NULL;
    const struct qt_gpu_kernel *k;
    bool built = qt_gpu_built();
    list_kernel(cli, &t, array, "cpu", "", "OpenBLAS and OpenMP, on decoded weights");
    list_kernel(cli, &t, array, "cuda", "",
                built ? "cuBLAS and kernels, on decoded weights" : "CUDA: not in this build");
    for (size_t i = 0; (k = qt_gpu_kernel_at(i)) != NULL; i++)
        list_kernel(cli, &t, array, k->scheme, k->layout,
                    built ? "CUDA, fused products on packed weights" : "CUDA: not in this build");
    list_kernel(cli, &t, array, "kv4", "",
                built ? "CUDA, attention over 4-bit KV caches" : "CUDA: not in this build");
    if (array)
        doc_set(cli, cli->doc, "kernels", array);
    return table_print(&t, err);
}

static bool has_gguf(const struct qt_family *f)
{
    return qt_export_has_family(qt_export_format_find("gguf"), f->decoder);
}

static const char *yes_no(bool value)
{
    return value ? "yes" : "no";
}

static const char *fused(const struct qt_family *f)
{
    return f->can[QT_USE_FUSED] ? "yes" : f->sometimes_fused ? "some" : "no";
}

static json_t *family_doc(struct cli *cli, const struct qt_family *f, const char *const *uses)
{
    json_t *o = json_object(), *can = json_array();
    doc_set(cli, o, "model_type", doc_text(f->type));
    doc_set(cli, o, "decoder", doc_text(f->decoder));
    doc_set(cli, o, "attention", doc_text(f->attention));
    doc_set(cli, o, "experts", json_boolean(f->experts));
    for (int use = 0; use < QT_USES; use++)
        if (f->can[use] && uses[use])
            doc_append(cli, can, doc_text(uses[use]));
    if (has_gguf(f))
        doc_append(cli, can, doc_text("gguf"));
    doc_set(cli, o, "fused", doc_text(fused(f)));
    doc_set(cli, o, "supports", can);
    return o;
}

static int list_archs(struct cli *cli, struct qt_err *err)
{
    static const char *const uses[QT_USES] = {[QT_USE_CALIB_FILE] = "calibration file",
                                              [QT_USE_W4AX] = "w4ax",
                                              [QT_USE_LEARN] = "learn",
                                              [QT_USE_KV4] = "kv4"};
    json_t *types = cli->doc ? json_array() : NULL, *families = cli->doc ? json_array() : NULL;
    struct table t = {.align = "lllllllll"};
    struct qt_family f;
    table_row(&t, "model_type\tlayers\tMLP\t%s\t%s\t%s\t%s\tfused\tgguf", uses[0], uses[1], uses[2],
              uses[3]);
    for (size_t i = 0; qt_model_family(&f, i); i++) {
        if (cli->doc) {
            doc_append(cli, types, doc_text(f.type));
            doc_append(cli, families, family_doc(cli, &f, uses));
        }
        table_row(&t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s", f.type, f.attention,
                  f.experts ? "experts" : "dense", yes_no(f.can[0]), yes_no(f.can[1]),
                  yes_no(f.can[2]), yes_no(f.can[3]), fused(&f), yes_no(has_gguf(&f)));
    }
    if (cli->doc) {
        doc_set(cli, cli->doc, "archs", types);
        doc_set(cli, cli->doc, "families", families);
        table_free(&t);
        return QT_OK;
    }
    return table_print(&t, err);
}

/* ---- exports -------------------------------------------------------------------------------- */

/* Parameters that decide whether a format can hold a scheme. */
static const char *const variants[] = {"int4:zero=group", "int3:zero=group", "int2:zero=group",
                                       "int8:g=128", "fp8:max=448"};

static const char *fit_text(const struct qt_export_format *f, const struct qt_spec *spec)
{
    static const char *const text[] = {
        [QT_EXPORT_NO] = "-", [QT_EXPORT_NEAR] = "near", [QT_EXPORT_EXACT] = "exact"};
    const char *why;
    return text[qt_export_fit(&why, f, spec)];
}

/* A row of the table: the scheme, and how each format holds it. */
static int list_fit(struct cli *cli, struct table *t, json_t *array, const char *text,
                    struct qt_err *err)
{
    const struct qt_export_format *f;
    struct qt_spec spec;
    char row[1024];
    json_t *fits = array ? json_object() : NULL;
    int rc = qt_spec_parse(&spec, text, err);
    if (rc < 0)
        return rc;
    size_t n = (size_t)snprintf(row, sizeof row, "%s", text);
    for (size_t i = 0; (f = qt_export_format_at(i)) != NULL && n < sizeof row; i++) {
        n += (size_t)snprintf(row + n, sizeof row - n, "\t%s", fit_text(f, &spec));
        if (fits)
            doc_set(cli, fits, qt_export_name(f), doc_text(fit_text(f, &spec)));
    }
    if (array)
        doc_append(cli, array, json_pack("{s:s, s:o}", "scheme", text, "formats", fits));
    else
        table_row(t, "%s", row);
    return QT_OK;
}

static int list_fits(struct cli *cli, struct table *t, json_t *array, struct qt_err *err)
{
    const struct qt_scheme *s;
    const struct qt_preset *preset;
    int rc = QT_OK;
    for (size_t i = 0; rc == QT_OK && (s = qt_scheme_at(i)) != NULL; i++)
        for (size_t j = 0; rc == QT_OK && (preset = qt_scheme_preset(s, j)) != NULL; j++)
            if (strcmp(preset->name, "fpx") != 0)
                rc = list_fit(cli, t, array, preset->name, err);
    for (size_t i = 0; rc == QT_OK && i < sizeof variants / sizeof *variants; i++)
        rc = list_fit(cli, t, array, variants[i], err);
    return rc;
}

static int list_exports(struct cli *cli, struct qt_err *err)
{
    struct table formats = {.align = "lll"}, fits = {.align = "llllllllll"};
    json_t *array = cli->doc ? json_array() : NULL, *rows = cli->doc ? json_array() : NULL;
    const struct qt_export_format *f;
    char head[256] = "SCHEME";
    table_row(&formats, "FORMAT\tRUNS IN\tWHAT IT IS");
    for (size_t i = 0; (f = qt_export_format_at(i)) != NULL; i++) {
        size_t n = strlen(head);
        snprintf(head + n, sizeof head - n, "\t%s", qt_export_name(f));
        table_row(&formats, "%s\t%s\t%s", qt_export_name(f), qt_export_runtimes(f),
                  qt_export_help(f));
        if (array)
            doc_append(cli, array,
                       json_pack("{s:s, s:s, s:s}", "format", qt_export_name(f), "runtimes",
                                 qt_export_runtimes(f), "help", qt_export_help(f)));
    }
    table_row(&fits, "%s", head);
    int rc = list_fits(cli, &fits, rows, err);
    if (rc < 0 || cli->doc) {
        table_free(&formats);
        table_free(&fits);
        if (cli->doc) {
            doc_set(cli, cli->doc, "exports", array);
            doc_set(cli, cli->doc, "fits", rows);
        }
        return rc;
    }
    rc = table_print(&formats, err);
    putchar('\n');
    int second = table_print(&fits, rc < 0 ? NULL : err);
    printf("\nexact: the same weights, up to the rounding that the format's note names; near: one\n"
           "rounding, with --lossy; -: not at all. dense rounds weights to --dtype.\n");
    return rc < 0 ? rc : second;
}

/* ---- the command ---------------------------------------------------------------------------- */

static const char *const topics[] = {"schemes", "kernels", "archs", "exports", NULL};

static int run(struct cli *cli, const void *options, const char *const *args, struct qt_err *err)
{
    static int (*const lists[])(struct cli *, struct qt_err *) = {list_schemes, list_kernels,
                                                                  list_archs, list_exports};
    (void)options;
    for (size_t i = 0; topics[i]; i++)
        if (strcmp(args[0], topics[i]) == 0)
            return lists[i](cli, err);
    return opts_unknown("list", args[0], topics, sizeof lists / sizeof *lists, err);
}

static const struct common_options defaults = COMMON_DEFAULTS;
static const struct opt opts[] = {{0}};
static const struct opt_positional positionals[] = {
    {"WHAT", "schemes, kernels, archs or exports"},
    {0},
};

const struct command cmd_list = {
    .name = "list",
    .summary = "list schemes and their parameters, GPU kernels, models, export formats",
    .description =
        "Lists what this build of qtool supports.\n\n"
        "schemes: quantization schemes with their parameters and defaults. kernels: the backends "
        "that run models, and the fused GPU kernels with the weight layout that each takes. archs: "
        "the model architectures that qtool can run (checkpoints of other architectures can be "
        "quantized without data), what each supports, and whether the fused runtime "
        "('generate --device cuda') and 'export --format gguf' have them; some: the runtime has "
        "models without experts or state space layers. Options in config.json may still stand "
        "against a use. exports: the formats of 'export'.",
    .examples = "  qtool list schemes\n"
                "  qtool list archs --json\n",
    .opts = opts,
    .positionals = positionals,
    .words = topics,
    .defaults = &defaults,
    .options_size = sizeof defaults,
    .run = run,
};
