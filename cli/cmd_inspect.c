/* inspect: lists a checkpoint or a container. */
#include "cli/cli.h"

#include <math.h>

/* Totals of a checkpoint or container. */
struct totals {
    size_t quantized, copied;
    uint64_t weights, packed_bytes; /* of quantized tensors */
    double paper_bits;        /* same, as counted in the schemes' papers; NaN: no difference */
    uint64_t elements, bytes; /* stored tensors */
};

static double totals_bpw(const struct totals *t)
{
    return t->weights ? 8 * (double)t->packed_bytes / (double)t->weights : 0;
}

/* Figures of the manifest's entry of a quantized tensor; NaN: missing. */
enum { ERRORS = 4, MSE = 0, SQNR, COSINE };
static const char *const error_names[ERRORS] = {"mse", "sqnr_db", "cosine", "max_abs"};
struct figures {
    double paper_bpw; /* as counted in the scheme's paper; NaN if that is no different */
    double error[ERRORS];
};

static double number(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    return json_is_number(value) ? json_number_value(value) : NAN;
}

/* The caller frees *out. */
static int read_figures(struct figures **out, const struct source *s, struct qt_err *err)
{
    const size_t n = s->container ? qt_container_count(s->container) : 0;
    int rc = qt_array_new(out, n, sizeof **out, err);
    for (size_t i = 0; i < n && rc == QT_OK; i++) {
        struct figures *f = &(*out)[i];
        json_t *entry;
        rc = qt_entry_json(&entry, qt_container_entry(s->container, i), err);
        f->paper_bpw = number(entry, "paper_bpw");
        for (size_t e = 0; e < ERRORS; e++)
            f->error[e] = number(json_object_get(entry, "error"), error_names[e]);
        json_decref(entry);
    }
    return rc;
}

static uint64_t entry_bytes(const struct qt_entry *e)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < e->nsections; i++)
        bytes += e->section[i].tensor->nbytes;
    return bytes;
}

/* True for tensors that are not sections: in a container, the keys of the manifest's "copied". */
static bool is_copied(const struct source *s, const struct qt_tensor *t)
{
    return !s->container || qt_container_is_copied(s->container, t->name);
}

static struct totals count_totals(const struct source *s, const struct figures *figures)
{
    struct totals sum = {0};
    bool other = false;
    if (s->container)
        sum.quantized = qt_container_count(s->container);
    for (size_t i = 0; i < sum.quantized; i++) {
        const struct qt_entry *e = qt_container_entry(s->container, i);
        sum.weights += (uint64_t)e->n * e->k;
        sum.packed_bytes += entry_bytes(e);
        double paper = figures[i].paper_bpw, own = 8 * (double)entry_bytes(e);
        other |= !isnan(paper);
        sum.paper_bits += isnan(paper) ? own : paper * (double)e->n * (double)e->k;
    }
    if (!other)
        sum.paper_bits = NAN;
    for (size_t i = 0; i < qt_ckpt_count(s->ckpt); i++) {
        const struct qt_tensor *t = qt_ckpt_tensor(s->ckpt, i);
        sum.bytes += t->nbytes;
        if (!is_copied(s, t))
            continue;
        sum.copied++;
        sum.elements += t->count;
    }
    sum.elements += sum.weights;
    return sum;
}

/* The manifest cannot store the infinite SQNR of an error of 0. */
static double error_sqnr(const struct figures *f)
{
    return f->error[MSE] == 0 ? INFINITY : f->error[SQNR];
}

/* ---- what quantize could do ----------------------------------------------------------------- */

enum { WHY_SIZE = 2048 };

struct outlook {
    struct qt_share share;
    char refused[WHY_SIZE]; /* why quantize refuses the checkpoint; empty: it does not */
};

/* With a scheme that every large matrix supports. */
static void try_plan(struct outlook *out, const struct qt_ckpt *ckpt)
{
    const struct qt_plan_options opt = {.scheme = "nf4"};
    struct qt_plan plan;
    struct qt_err err = {0};
    *out = (struct outlook){0};
    if (qt_plan_new(&plan, ckpt, &opt, &err) < 0) {
        qt_err_format(out->refused, WHY_SIZE, &err);
        return;
    }
    out->share = plan.share;
    qt_plan_free(&plan);
}

static void outlook_row(struct table *t, const struct qt_ckpt *ckpt)
{
    struct outlook o;
    char bytes[TEXT_SIZE], ratio[TEXT_SIZE];
    try_plan(&o, ckpt);
    if (o.refused[0])
        table_row(t, "quantize\trefuses this: %s", o.refused);
    else
        table_row(t, "linears\t%s, of which nf4 can quantize %s", text_bytes(bytes, o.share.linear),
                  text_share(ratio, &o.share));
}

static void outlook_doc(struct cli *cli, const struct qt_ckpt *ckpt)
{
    struct outlook o;
    try_plan(&o, ckpt);
    if (o.refused[0]) {
        doc_set(cli, cli->doc, "refused", doc_text(o.refused));
        return;
    }
    doc_set(cli, cli->doc, "linear_bytes", doc_size(o.share.linear));
    doc_set(cli, cli->doc, "linear_bytes_quantized", doc_size(o.share.quantized));
}

/* ---- text ----------------------------------------------------------------------------------- */

static int print_entries(const struct source *s, const struct figures *figures, struct qt_err *err)
{
    struct table t = {.align = "lllrrrr"};
    char shape[TEXT_SIZE], bytes[TEXT_SIZE], spec[QT_SPEC_TEXT];
    table_row(&t, "QUANTIZED\tSCHEME\tSHAPE\tSIZE\tBPW\tSQNR dB\tCOSINE");
    for (size_t i = 0; i < qt_container_count(s->container); i++) {
        const struct qt_entry *e = qt_container_entry(s->container, i);
        uint64_t size = entry_bytes(e);
        table_row(&t, "%s\t%s\t%s\t%s\t%.4f\t%.2f\t%.6f", e->name, qt_spec_short(spec, e->spec),
                  text_shape(shape, 2, (const size_t[]){e->n, e->k}), text_bytes(bytes, size),
                  8 * (double)size / ((double)e->n * (double)e->k), error_sqnr(&figures[i]),
                  figures[i].error[COSINE]);
    }
    return table_print(&t, err);
}

static int print_tensors(const struct source *s, struct qt_err *err)
{
    struct table t = {.align = "lllr"};
    char shape[TEXT_SIZE], bytes[TEXT_SIZE];
    table_row(&t, "%s\tDTYPE\tSHAPE\tSIZE", s->container ? "COPIED" : "TENSOR");
    for (size_t i = 0; i < qt_ckpt_count(s->ckpt); i++) {
        const struct qt_tensor *tensor = qt_ckpt_tensor(s->ckpt, i);
        if (is_copied(s, tensor))
            table_row(&t, "%s\t%s%s%s\t%s\t%s", tensor->name, qt_dtype_name(tensor->dtype),
                      tensor->encoding ? " from " : "", tensor->encoding ? tensor->encoding : "",
                      text_shape(shape, tensor->ndim, tensor->shape),
                      text_bytes(bytes, tensor->nbytes));
    }
    return table_print(&t, err);
}

/* The lowest SQNR of the layers' keys; NaN if unknown. */
static double kv_sqnr(const json_t *kv)
{
    const json_t *list = json_object_get(kv, "sqnr_db"), *value;
    double min = NAN;
    size_t i;
    json_array_foreach (list, i, value) {
        if (json_is_number(value))
            min = fmin(min, json_number_value(value)); /* ignores NaN */
    }
    return min;
}

static void model_rows(struct table *t, const struct qt_model_info *m, const char *unsupported)
{
    if (m)
        table_row(t, "model\t%s: %zu layers, hidden %zu, vocabulary %zu, heads %zu (%zu key/value)",
                  m->family, m->layers, m->hidden, m->vocab, m->heads, m->kv_heads);
    else if (unsupported[0])
        table_row(t, "model\tcannot be run by eval: %s", unsupported);
}

static int print_totals(const struct source *s, const struct figures *figures,
                        const struct qt_model_info *model, const char *unsupported,
                        enum qt_kv_keys kv, struct qt_err *err)
{
    struct table t = {.align = "ll"};
    struct totals sum = count_totals(s, figures);
    char bytes[TEXT_SIZE];
    model_rows(&t, model, unsupported);
    if (s->container)
        table_row(&t, "tensors\t%zu quantized, %zu copied", sum.quantized, sum.copied);
    else
        table_row(&t, "tensors\t%zu in %zu file%s", sum.copied, qt_ckpt_file_count(s->ckpt),
                  text_plural(qt_ckpt_file_count(s->ckpt)));
    table_row(&t, "parameters\t%llu", (unsigned long long)sum.elements);
    table_row(&t, "size\t%s (%llu bytes)", text_bytes(bytes, sum.bytes),
              (unsigned long long)sum.bytes);
    if (!s->container)
        outlook_row(&t, s->ckpt);
    if (s->container) {
        table_row(&t, "bpw\t%.4f bits per quantized weight", totals_bpw(&sum));
        table_paper_bpw(&t, sum.paper_bits / (double)sum.weights);
    }
    if (kv)
        kv_row(&t, kv, model ? model->head_dim : 0, 0);
    if (kv == QT_KV_KEYS_STATIC && !isnan(kv_sqnr(qt_kv_entry(s->container))))
        table_row(&t, "key sqnr\t%.2f dB or more in every layer",
                  kv_sqnr(qt_kv_entry(s->container)));
    return table_print(&t, err);
}

static int print_all(const struct source *s, const struct figures *figures,
                     const struct qt_model_info *model, const char *unsupported, enum qt_kv_keys kv,
                     struct qt_err *err)
{
    int rc = QT_OK;
    if (s->container) {
        QT_TRY(print_entries(s, figures, err));
        putchar('\n');
    }
    QT_TRY(print_tensors(s, err));
    putchar('\n');
    QT_TRY(print_totals(s, figures, model, unsupported, kv, err));
done:
    return rc;
}

/* ---- JSON ----------------------------------------------------------------------------------- */

static json_t *entry_doc(struct cli *cli, const struct qt_entry *e, const struct figures *f)
{
    json_t *o = json_object();
    uint64_t size = entry_bytes(e);
    doc_set(cli, o, "name", doc_text(e->name));
    doc_set(cli, o, "scheme", doc_text(e->spec));
    doc_set(cli, o, "layout", doc_text(e->layout));
    doc_set(cli, o, "shape", doc_shape(2, (const size_t[]){e->n, e->k}));
    doc_set(cli, o, "bytes", doc_size(size));
    doc_set(cli, o, "bpw", doc_real(8 * (double)size / ((double)e->n * (double)e->k)));
    if (!isnan(f->paper_bpw))
        doc_set(cli, o, "paper_bpw", doc_real(f->paper_bpw));
    for (size_t i = 0; i < ERRORS; i++)
        doc_set(cli, o, error_names[i], doc_real(f->error[i]));
    return o;
}

static json_t *tensor_doc(struct cli *cli, const struct qt_tensor *t)
{
    json_t *o = json_object();
    doc_set(cli, o, "name", doc_text(t->name));
    doc_set(cli, o, "dtype", doc_text(qt_dtype_name(t->dtype)));
    if (t->encoding)
        doc_set(cli, o, "encoding", doc_text(t->encoding));
    doc_set(cli, o, "shape", doc_shape(t->ndim, t->shape));
    doc_set(cli, o, "bytes", doc_size(t->nbytes));
    return o;
}

static json_t *kv_doc(struct cli *cli, const json_t *kv, enum qt_kv_keys keys)
{
    json_t *o = json_object();
    doc_set(cli, o, "bits", doc_size(4));
    doc_set(cli, o, "keys", doc_text(kv_keys_name(keys)));
    doc_set(cli, o, "values", doc_text("group"));
    doc_set(cli, o, "sqnr_db", doc_real(kv_sqnr(kv)));
    return o;
}

static json_t *model_doc(struct cli *cli, const struct qt_model_info *m)
{
    if (!m)
        return json_null();
    json_t *o = json_object();
    doc_set(cli, o, "family", doc_text(m->family));
    doc_set(cli, o, "layers", doc_size(m->layers));
    doc_set(cli, o, "hidden", doc_size(m->hidden));
    doc_set(cli, o, "vocab", doc_size(m->vocab));
    doc_set(cli, o, "heads", doc_size(m->heads));
    doc_set(cli, o, "kv_heads", doc_size(m->kv_heads));
    doc_set(cli, o, "head_dim", doc_size(m->head_dim));
    doc_set(cli, o, "max_positions", doc_size(m->max_positions));
    return o;
}

static void fill_doc(struct cli *cli, const struct source *s, const struct figures *figures,
                     const struct qt_model_info *model, const char *unsupported, enum qt_kv_keys kv)
{
    json_t *quantized = json_array(), *tensors = json_array();
    struct totals sum = count_totals(s, figures);
    for (size_t i = 0; i < sum.quantized; i++)
        doc_append(cli, quantized,
                   entry_doc(cli, qt_container_entry(s->container, i), &figures[i]));
    for (size_t i = 0; i < qt_ckpt_count(s->ckpt); i++)
        if (is_copied(s, qt_ckpt_tensor(s->ckpt, i)))
            doc_append(cli, tensors, tensor_doc(cli, qt_ckpt_tensor(s->ckpt, i)));
    doc_set(cli, cli->doc, "kind", doc_text(s->container ? "container" : "checkpoint"));
    doc_set(cli, cli->doc, "model", model_doc(cli, model));
    if (unsupported[0])
        doc_set(cli, cli->doc, "unsupported", doc_text(unsupported));
    doc_set(cli, cli->doc, "parameters", doc_size(sum.elements));
    doc_set(cli, cli->doc, "bytes", doc_size(sum.bytes));
    if (s->container) {
        doc_set(cli, cli->doc, "bpw", doc_real(totals_bpw(&sum)));
        if (!isnan(sum.paper_bits))
            doc_set(cli, cli->doc, "paper_bpw", doc_real(sum.paper_bits / (double)sum.weights));
        if (kv)
            doc_set(cli, cli->doc, "kv", kv_doc(cli, qt_kv_entry(s->container), kv));
        doc_set(cli, cli->doc, "quantized", quantized);
        doc_set(cli, cli->doc, "copied", tensors);
    } else {
        json_decref(quantized);
        outlook_doc(cli, s->ckpt);
        doc_set(cli, cli->doc, "tensors", tensors);
    }
}

/* ---- the command ---------------------------------------------------------------------------- */

/* Opens the model if eval can run it. Otherwise *out is NULL; `why` has the reason, or is empty if
 * there is no config.json. */
static void try_model(struct qt_model **out, char why[WHY_SIZE], const struct source *s)
{
    struct qt_err err = {0};
    char *config = NULL;
    *out = NULL;
    why[0] = 0;
    if (qt_path_join(&config, s->weights.dir, "config.json", NULL) == QT_OK &&
        qt_path_exists(config) && qt_model_open(out, &s->weights, &err) < 0)
        qt_err_format(why, WHY_SIZE, &err);
    qt_free(config);
}

static int run(struct cli *cli, const void *options, const char *const *args, struct qt_err *err)
{
    struct source s;
    struct figures *figures = NULL;
    struct qt_model *model = NULL;
    enum qt_kv_keys kv = QT_KV_KEYS_NONE;
    char why[WHY_SIZE];
    int rc;
    (void)options;
    if (qt_qcal_probe(args[0]))
        return inspect_qcal(cli, args[0], err);
    QT_TRY(source_open(&s, args[0], err));
    if (s.container && qt_kv_entry(s.container))
        QT_TRY(qt_kv_check(&kv, s.container, err));
    QT_TRY(read_figures(&figures, &s, err));
    try_model(&model, why, &s);
    const struct qt_model_info *info = model ? qt_model_info(model) : NULL;
    if (cli->doc)
        fill_doc(cli, &s, figures, info, why, kv);
    else
        QT_TRY(print_all(&s, figures, info, why, kv, err));
done:
    qt_model_close(model);
    qt_free(figures);
    source_close(&s);
    return rc;
}

static const struct common_options defaults = COMMON_DEFAULTS;
static const struct opt opts[] = {{0}};
static const struct opt_positional positionals[] = {
    {"PATH", "checkpoint (file or directory), container or calibration file"},
    {0},
};

const struct command cmd_inspect = {
    .name = "inspect",
    .summary = "show what is in a checkpoint, container or calibration file",
    .description =
        "Lists the tensors of a checkpoint (safetensors, PyTorch .bin/.pt, or GGUF) with dtype, "
        "shape and size. For a container it also lists scheme, bits per weight and recorded error "
        "of every quantized tensor, and whether the container was made for a 4-bit KV cache. "
        "Headers and the manifest are checked; the data of tensors is not read ('verify' reads "
        "it).\n\n"
        "SQNR is the ratio of the energy of the weights to the energy of the error; cosine is the "
        "cosine of the angle between stored and original weights.\n\n"
        "For a calibration file (.qcal) it lists the model and the data, and for each linear input "
        "of every decoder layer the number of channels (K), the number of tokens (TOKENS; an "
        "expert has those that it processes), the root mean square over channels and tokens (RMS), "
        "the largest 99.9 % quantile of a channel (P99.9 MAX), the largest absolute value "
        "(ABSMAX), and the number of channels that were always 0 (DEAD). All statistics except the "
        "Hessians are read and checked.",
    .examples = "  qtool inspect examples/nano-llama\n"
                "  qtool inspect nano-fp6 --json\n",
    .opts = opts,
    .positionals = positionals,
    .defaults = &defaults,
    .options_size = sizeof defaults,
    .run = run,
};
