/* list: schemes, kernels, architectures. */
#include "cli/cli.h"

#include <string.h>

/* ---- schemes -------------------------------------------------------------------------------- */

/* "32..256" or "rtn|search" */
static const char *param_range(char *buf, size_t size, const struct qt_param *p)
{
    size_t n = 0;
    if (p->type != QT_PARAM_CHOICE) {
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
    if (p->type == QT_PARAM_CHOICE)
        return p->choices[(size_t)p->initial];
    snprintf(buf, TEXT_SIZE, "%g", p->initial);
    return buf;
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
    if (p->type == QT_PARAM_CHOICE) {
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

static int list_archs(struct cli *cli, struct qt_err *err)
{
    json_t *array = cli->doc ? json_array() : NULL;
    const char *type;
    (void)err;
    for (size_t i = 0; (type = qt_model_type(i)) != NULL; i++) {
        if (array)
            doc_append(cli, array, doc_text(type));
        else
            printf("%s\n", type);
    }
    if (array)
        doc_set(cli, cli->doc, "archs", array);
    return QT_OK;
}

/* ---- the command ---------------------------------------------------------------------------- */

static const char *const topics[] = {"schemes", "kernels", "archs", NULL};

static int run(struct cli *cli, const void *options, const char *const *args, struct qt_err *err)
{
    static int (*const lists[])(struct cli *, struct qt_err *) = {list_schemes, list_kernels,
                                                                  list_archs};
    (void)options;
    for (size_t i = 0; topics[i]; i++)
        if (strcmp(args[0], topics[i]) == 0)
            return lists[i](cli, err);
    return opts_unknown("list", args[0], topics, sizeof lists / sizeof *lists, err);
}

static const struct common_options defaults = COMMON_DEFAULTS;
static const struct opt opts[] = {{0}};
static const struct opt_positional positionals[] = {
    {"WHAT", "schemes, kernels or archs"},
    {0},
};

const struct command cmd_list = {
    .name = "list",
    .summary = "list schemes and their parameters, GPU kernels, model architectures",
    .description =
        "Lists what this build of qtool supports: quantization schemes with their parameters and "
        "defaults, the backends that run models, fused GPU kernels with the layout of packed "
        "weights that each takes, and the model architectures that 'eval' can run. Checkpoints of "
        "other architectures can be quantized without data.",
    .examples = "  qtool list schemes\n"
                "  qtool list archs --json\n",
    .opts = opts,
    .positionals = positionals,
    .words = topics,
    .defaults = &defaults,
    .options_size = sizeof defaults,
    .run = run,
};
