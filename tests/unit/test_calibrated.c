/* Calibrated quantization end to end on a model of two decoder layers: results, fallbacks, unusual
 * activations. */
#include "fixture.h"

#include "hessian_fixture.h"

#include "kernels/kernels.h"
#include "pack/pack.h"
#include "random.h"
#include "verify/verify.h"

#include <math.h>

enum { SEQLEN = 32, SAMPLES = 12, VOCAB = 97 };

struct fixture {
    const char *golden; /* the model to edit */
    char *dir;
    char model[256], out[2][256]; /* "a", "b" */
    struct qt_backend *be;
    uint32_t ids[SAMPLES * SEQLEN];
    struct qt_calibration calibration;
    struct qt_rule rule; /* added to a run's options if it has a regex */
    struct qt_err err;
};

static int set_up(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    uint32_t x = 12345;
    f->golden = "llama";
    f->dir = fixture_dir();
    snprintf(f->model, sizeof f->model, "%s/model", f->dir);
    for (int i = 0; i < 2; i++)
        snprintf(f->out[i], sizeof f->out[i], "%s/%c", f->dir, 'a' + i);
    expect_ok("backend", qt_backend_cpu_open(&f->be, &f->err), &f->err);
    for (size_t i = 0; i < SAMPLES * SEQLEN; i++) {
        x = x * 1664525 + 1013904223;
        f->ids[i] = (x >> 16) % VOCAB;
    }
    f->calibration = (struct qt_calibration){
        .ids = f->ids, .samples = SAMPLES, .seqlen = SEQLEN, .backend = f->be};
    *state = f;
    return 0;
}

static void remove_tree(const char *dir, const char *name)
{
    qt_dir_remove(fixture_path(dir, name), NULL);
}

static int tear_down(void **state)
{
    struct fixture *f = *state;
    static const char *const dirs[] = {"model", "a", "b", "a.partial", "b.partial"};
    for (size_t i = 0; i < sizeof dirs / sizeof *dirs; i++)
        remove_tree(f->dir, dirs[i]);
    fixture_remove(f->dir);
    f->be->close(f->be);
    free(f);
    return 0;
}

/* ---- models --------------------------------------------------------------------------------- */

typedef void edit_fn(const char *name, float *w, size_t count);

/* Writes a golden model as FP32, every tensor changed by `edit`. */
static struct qt_ckpt *make_model(struct fixture *f, edit_fn *edit)
{
    struct qt_ckpt *source, *out;
    struct qt_tensor tensors[64];
    uint64_t offsets[65];
    char *header, *text, golden[256];
    size_t n, size;
    struct qt_err *err = &f->err;
    snprintf(golden, sizeof golden, "tests/golden/models/%s", f->golden);
    expect_ok("golden", qt_ckpt_open(&source, golden, err), err);
    n = qt_ckpt_count(source);
    assert_in_range(n, 1, 64);
    for (size_t i = 0; i < n; i++) {
        tensors[i] = *qt_ckpt_tensor(source, i);
        tensors[i].dtype = QT_F32;
        tensors[i].nbytes = tensors[i].count * sizeof(float);
    }
    expect_ok("header", qt_safetensors_header(&header, &size, offsets, tensors, n, NULL, err), err);
    unsigned char *data = calloc(1, offsets[n]);
    memcpy(data, header, size);
    for (size_t i = 0; i < n; i++) {
        const struct qt_tensor *t = qt_ckpt_tensor(source, i);
        struct qt_blob blob;
        float *w = (float *)(void *)(data + offsets[i]);
        expect_ok("read", qt_ckpt_read(&blob, source, t, err), err);
        qt_to_f32(w, blob.data, t->dtype, t->count);
        qt_blob_free(&blob);
        if (edit)
            edit(t->name, w, t->count);
    }
    remove_tree(f->dir, "model");
    expect_ok("mkdir", qt_dir_make(f->model, err), err);
    fixture_write(f->model, "model.safetensors", data, offsets[n]);
    expect_ok("config",
              qt_file_read(&text, &size, fixture_path(golden, "config.json"), 1 << 16, err), err);
    fixture_write(f->model, "config.json", text, size);
    expect_ok("open", qt_ckpt_open(&out, f->model, err), err);
    qt_free(text);
    qt_free(header);
    free(data);
    qt_ckpt_close(source);
    return out;
}

static struct qt_quantize_options options(struct fixture *f, const char *out, const char *scheme)
{
    return (struct qt_quantize_options){
        .plan = {.scheme = scheme,
                 .calibrated = true,
                 .rules = &f->rule,
                 .nrules = f->rule.regex != NULL},
        .calibration = &f->calibration,
        .out_dir = f->out[strcmp(out, "b") == 0],
        .force = true,
    };
}

static void collect(void *ctx, json_t *tensor)
{
    json_array_append(ctx, tensor);
}

/* The report with its tensors. */
static json_t *quantize(struct fixture *f, const struct qt_ckpt *ckpt,
                        const struct qt_quantize_options *options)
{
    struct qt_quantize_options opt = *options;
    struct qt_quantize_report report;
    opt.tensor = collect;
    opt.tensor_ctx = json_array();
    expect_ok("quantize", qt_quantize(&report, ckpt, &opt, &f->err), &f->err);
    json_object_set_new(report.document, "tensors", opt.tensor_ctx);
    return report.document;
}

static double total(const json_t *document, const char *name)
{
    return json_number_value(json_object_get(json_object_get(document, "totals"), name));
}

static bool same_files(struct fixture *f, const char *name)
{
    char *text[2];
    size_t size[2];
    for (int i = 0; i < 2; i++) {
        const char *path = fixture_path(f->out[i], name);
        expect_ok(path, qt_file_read(&text[i], &size[i], path, 1 << 24, &f->err), &f->err);
    }
    bool same = size[0] == size[1] && memcmp(text[0], text[1], size[0]) == 0;
    qt_free(text[0]);
    qt_free(text[1]);
    return same;
}

/* ---- usual models --------------------------------------------------------------------------- */

static void compensation_lowers_the_weighted_error(void **state)
{
    struct fixture *f = *state;
    static const char *const schemes[] = {"nf4:g=32", "nf3:g=32", "nf2:g=64", "lut3:g=32",
                                          "fp6",      "fp4",      "w4ax"};
    struct qt_ckpt *ckpt = make_model(f, NULL);
    for (size_t s = 0; s < sizeof schemes / sizeof *schemes; s++) {
        struct qt_quantize_options opt = options(f, "a", schemes[s]);
        json_t *doc = quantize(f, ckpt, &opt), *t;
        size_t i;
        assert_int_equal(total(doc, "fallbacks"), 0);
        assert_int_equal(total(doc, "quantized"), 14);
        assert_int_equal(total(doc, "calibration_tokens"), SAMPLES * SEQLEN);
        json_array_foreach (json_object_get(doc, "tensors"), i, t) {
            const json_t *h = json_object_get(t, "hessian");
            double before = json_number_value(json_object_get(h, "error_before"));
            double after = json_number_value(json_object_get(h, "error_after"));
            if (!(after > 0 && after < before))
                fail_msg("%s: %g before, %g after", schemes[s], before, after);
            assert_true(json_number_value(json_object_get(h, "damp")) == 0.01);
            assert_true(json_is_false(json_object_get(h, "damp_raised")));
        }
        json_decref(doc);
    }
    qt_ckpt_close(ckpt);
}

static void same_bytes_for_any_threads(void **state)
{
    struct fixture *f = *state;
    struct qt_ckpt *ckpt = make_model(f, NULL);
    static const char *const schemes[] = {"lut3:g=32", "w4ax:a8max=0.5"};
    for (size_t s = 0; s < sizeof schemes / sizeof *schemes; s++) {
        struct qt_quantize_options a = options(f, "a", schemes[s]), b = options(f, "b", schemes[s]);
        qt_threads_set(1);
        json_decref(quantize(f, ckpt, &a));
        for (int threads = 2; threads <= 4; threads *= 2) {
            qt_threads_set(threads);
            json_decref(quantize(f, ckpt, &b));
            assert_true(same_files(f, "model.safetensors"));
            assert_true(same_files(f, "qtool.json"));
        }
    }
    qt_threads_set(0);
    qt_ckpt_close(ckpt);
}

/* Number of polls for interruption while the activations of two layers are planned: windows, four
 * inputs, new variants and earlier ones of each layer; logits of 256 positions at a time. */
enum { ACT_STEPS = (1 + 4 + 4 + 1) + (1 + 4 + 4 + 5) + (SAMPLES * SEQLEN + 255) / 256 };

static int stops_left;
static bool stop_soon(void)
{
    return stops_left-- <= 0;
}

/* Number of polls before anything else: a run reads every tensor for its identity. */
static int reads(const struct qt_ckpt *ckpt)
{
    return (int)qt_ckpt_count(ckpt);
}

/* Stops a run after activations are planned and `weights` weights are quantized. */
static void stop_after(struct fixture *f, const struct qt_ckpt *ckpt, struct qt_quantize_options *o,
                       int weights)
{
    struct qt_quantize_report report;
    char says[40];
    snprintf(says, sizeof says, "interrupted after %d of", weights);
    o->interrupted = stop_soon;
    stops_left = reads(ckpt) + ACT_STEPS + weights;
    expect_error("stopped", qt_quantize(&report, ckpt, o, &f->err), QT_E_INTERRUPTED, says,
                 &f->err);
}

/* Stops a run before each `step`th tensor (or step of planning activations), and resumes it. */
static void check_resume(struct fixture *f, const struct qt_ckpt *ckpt, const char *scheme,
                         int stops, int step)
{
    struct qt_quantize_options a = options(f, "a", scheme), b = options(f, "b", scheme);
    json_decref(quantize(f, ckpt, &a));
    for (int after = 0; after < stops; after += step) {
        struct qt_quantize_report report;
        remove_tree(f->dir, "b");
        b.resume = false;
        b.interrupted = stop_soon;
        stops_left = reads(ckpt) + after;
        expect_error("stopped", qt_quantize(&report, ckpt, &b, &f->err), QT_E_INTERRUPTED,
                     "interrupted", &f->err);
        b.resume = true;
        b.interrupted = NULL;
        json_decref(quantize(f, ckpt, &b));
        assert_true(same_files(f, "model.safetensors"));
        assert_true(same_files(f, "qtool.json"));
    }
}

/* Changes a file whenever the run polls for interruption. */
static const char *edited;
static bool edit_meanwhile(void)
{
    FILE *file = fopen(edited, "a");
    assert_non_null(file);
    assert_int_not_equal(fputc('\n', file), EOF);
    assert_int_equal(fclose(file), 0);
    return false;
}

/* The model must run under the same config.json for the whole run. */
static void config_must_stay(void **state)
{
    struct fixture *f = *state;
    struct qt_ckpt *ckpt = make_model(f, NULL);
    struct qt_quantize_options a = options(f, "a", "nf4:g=32");
    struct qt_quantize_report report;
    char path[300];
    snprintf(path, sizeof path, "%s/config.json", f->model);
    edited = path;
    a.interrupted = edit_meanwhile;
    expect_error("edited", qt_quantize(&report, ckpt, &a, &f->err), QT_E_INPUT,
                 "model/config.json: changed during the run", &f->err);
    assert_false(qt_path_exists(f->out[0]));
    qt_ckpt_close(ckpt);
}

static void interrupted_runs_resume(void **state)
{
    struct fixture *f = *state;
    struct qt_ckpt *ckpt = make_model(f, NULL);
    struct qt_quantize_options b = options(f, "b", "nf4:g=32");
    check_resume(f, ckpt, "nf3:g=32", 20, 3);
    check_resume(f, ckpt, "w4ax:a8max=0.5", ACT_STEPS + 14, 31);
    stops_left = reads(ckpt) + 5;
    b.interrupted = stop_soon;
    b.resume = false;
    remove_tree(f->dir, "b");
    struct qt_quantize_report report;
    assert_int_equal(qt_quantize(&report, ckpt, &b, &f->err), QT_E_INTERRUPTED);
    b.interrupted = NULL;
    b.resume = true;
    b.plan.scheme = "nf3:g=32";
    expect_error("other scheme", qt_quantize(&report, ckpt, &b, &f->err), QT_E_RESUME,
                 "options.scheme", &f->err);
    b.plan.scheme = "nf4:g=32";
    struct qt_backend other = *f->be; /* another processor */
    other.name = "OpenBLAS 0.3.21 Nehalem";
    f->calibration.backend = &other;
    expect_error("other kernels", qt_quantize(&report, ckpt, &b, &f->err), QT_E_RESUME,
                 "calibration.backend was \"OpenBLAS ", &f->err);
    f->calibration.backend = f->be;
    qt_ckpt_close(ckpt);
}

/* Changes a weight that the fingerprint does not cover; it covers the ends of tensors. */
static void change_embedding(const char *name, float *w, size_t count)
{
    if (strcmp(name, "model.embed_tokens.weight") != 0)
        return;
    assert_true(count * sizeof *w > 2 * 4096 + 16);
    w[count / 2] += 0.5f;
}

/* Results of an interrupted run depend on weights that it has not reached yet, such as a quantized
 * embedding. */
static void later_weights_must_stay(void **state)
{
    struct fixture *f = *state;
    static const struct qt_rule rule = {"embed_tokens", "fp6:method=search"};
    static const char *const schemes[] = {"nf3:g=32", "w4ax:a8max=0.5"};
    for (int acts = 0; acts < 2; acts++) {
        struct qt_ckpt *ckpt = make_model(f, NULL);
        struct qt_quantize_options b = options(f, "b", schemes[acts]);
        struct qt_quantize_report report;
        b.plan.rules = &rule;
        b.plan.nrules = 1;
        b.interrupted = stop_soon;
        stops_left = reads(ckpt) + acts * ACT_STEPS + 2;
        expect_error("stopped", qt_quantize(&report, ckpt, &b, &f->err), QT_E_INTERRUPTED,
                     "interrupted after", &f->err);
        qt_ckpt_close(ckpt);
        ckpt = make_model(f, change_embedding);
        b.interrupted = NULL;
        b.resume = true;
        expect_error("changed", qt_quantize(&report, ckpt, &b, &f->err), QT_E_RESUME,
                     "calibration.weights_crc32", &f->err);
        qt_ckpt_close(ckpt);
        ckpt = make_model(f, NULL);
        json_decref(quantize(f, ckpt, &b));
        qt_ckpt_close(ckpt);
    }
}

/* More tokens than a chunk, and windows that do not divide a chunk. */
enum { MANY_SEQLEN = 48, MANY_SAMPLES = 150 };

static void many_tokens(struct fixture *f)
{
    static uint32_t ids[MANY_SAMPLES * MANY_SEQLEN];
    uint32_t x = 54321;
    for (size_t i = 0; i < MANY_SAMPLES * MANY_SEQLEN; i++) {
        x = x * 1664525 + 1013904223;
        ids[i] = (x >> 16) % VOCAB;
    }
    f->calibration.ids = ids;
    f->calibration.samples = MANY_SAMPLES;
    f->calibration.seqlen = MANY_SEQLEN;
}

static void runs_of_many_tokens_resume(void **state)
{
    struct fixture *f = *state;
    struct qt_ckpt *ckpt = make_model(f, NULL);
    many_tokens(f);
    check_resume(f, ckpt, "nf3:g=32", 14, 3);
    check_resume(f, ckpt, "fp6:method=search", 14, 5);
    qt_ckpt_close(ckpt);
}

/* ---- mixtures of experts -------------------------------------------------------------------- */

/* The "hessian" entry of a linear in the report. */
static const json_t *hessian_of(const json_t *document, const char *name)
{
    size_t i;
    json_t *t;
    json_array_foreach (json_object_get(document, "tensors"), i, t) {
        if (strcmp(json_string_value(json_object_get(t, "name")), name) == 0)
            return json_object_get(t, "hessian");
    }
    fail_msg("no %s", name);
    return NULL;
}

static json_int_t tokens_of(const json_t *document, size_t layer, size_t expert, const char *part)
{
    char name[128];
    snprintf(name, sizeof name, "model.layers.%zu.mlp.experts.%zu.%s.weight", layer, expert, part);
    const json_t *h = hessian_of(document, name);
    assert_true(json_number_value(json_object_get(h, "error_after")) <
                json_number_value(json_object_get(h, "error_before")));
    return json_integer_value(json_object_get(h, "tokens"));
}

static void experts_have_their_own_tokens(void **state)
{
    struct fixture *f = *state;
    struct qt_quantize_options opt = options(f, "a", "nf4:g=32");
    f->golden = "qwen3_moe";
    struct qt_ckpt *ckpt = make_model(f, NULL);
    many_tokens(f);
    json_t *doc = quantize(f, ckpt, &opt);
    assert_int_equal(total(doc, "quantized"), 2 * (4 + 6 * 3));
    assert_int_equal(total(doc, "fallbacks"), 0);
    assert_null(
        json_object_get(hessian_of(doc, "model.layers.1.self_attn.q_proj.weight"), "tokens"));
    for (size_t layer = 0; layer < 2; layer++) {
        json_int_t sum = 0;
        for (size_t e = 0; e < 6; e++) {
            const json_int_t tokens = tokens_of(doc, layer, e, "gate_proj");
            assert_true(tokens > 0 && tokens == tokens_of(doc, layer, e, "up_proj"));
            assert_true(tokens == tokens_of(doc, layer, e, "down_proj"));
            sum += tokens;
        }
        assert_int_equal(sum, 3 * MANY_SAMPLES * MANY_SEQLEN); /* three experts per token */
    }
    json_decref(doc);
    qt_ckpt_close(ckpt);
}

/* With a backend apart from the host, a background thread finishes tensors. */
static void runs_apart_resume(void **state)
{
    struct fixture *f = *state;
    struct qt_ckpt *ckpt = make_model(f, NULL);
    struct qt_backend apart = elsewhere(f->be);
    f->calibration.backend = &apart;
    check_resume(f, ckpt, "nf4:g=32", 14, 3);
    qt_ckpt_close(ckpt);
}

static void bytes_without_data_do_not_depend_on_the_backend(void **state)
{
    struct fixture *f = *state;
    struct qt_ckpt *ckpt = make_model(f, NULL);
    struct qt_backend apart = elsewhere(f->be);
    struct qt_quantize_options a = options(f, "a", "nf4:g=32"), b = options(f, "b", "nf4:g=32");
    a.calibration = b.calibration = NULL;
    a.plan.calibrated = b.plan.calibrated = false;
    b.backend = &apart;
    json_decref(quantize(f, ckpt, &a));
    json_decref(quantize(f, ckpt, &b));
    assert_true(same_files(f, "model.safetensors"));
    qt_ckpt_close(ckpt);
}

static void runs_of_experts_resume(void **state)
{
    struct fixture *f = *state;
    f->golden = "mixtral";
    struct qt_ckpt *ckpt = make_model(f, NULL);
    many_tokens(f);
    check_resume(f, ckpt, "nf3:g=32", 2 * (4 + 5 * 3), 4);
    qt_ckpt_close(ckpt);
}

/* Other matrices are quantized before the decoder layers are calibrated. */
static void embeddings_and_routers_come_first(void **state)
{
    struct fixture *f = *state;
    static const char *const patterns[] = {NULL, "embed_tokens", "block_sparse_moe.gate"};
    static const char query[] = "model.layers.0.self_attn.q_proj.weight";
    static const char up[] = "model.layers.0.block_sparse_moe.experts.0.w3.weight";
    double before[3];
    json_int_t tokens[3];
    f->golden = "mixtral";
    struct qt_ckpt *ckpt = make_model(f, NULL);
    many_tokens(f);
    for (size_t i = 0; i < 3; i++) {
        f->rule = (struct qt_rule){patterns[i], "nf2:g=32"};
        struct qt_quantize_options opt = options(f, "a", "nf3:g=32");
        json_t *doc = quantize(f, ckpt, &opt);
        before[i] = json_number_value(json_object_get(hessian_of(doc, query), "error_before"));
        tokens[i] = json_integer_value(json_object_get(hessian_of(doc, up), "tokens"));
        json_decref(doc);
    }
    assert_true(before[1] != before[0]); /* another embedding, other inputs */
    assert_true(before[2] == before[0]);
    assert_true(tokens[2] != tokens[0]);     /* another router, other experts */
    check_resume(f, ckpt, "nf3:g=32", 4, 2); /* before and after the routers */
    qt_ckpt_close(ckpt);
}

static void experts_do_not_depend_on_threads(void **state)
{
    struct fixture *f = *state;
    struct qt_quantize_options a = options(f, "a", "nf3:g=32"), b = options(f, "b", "nf3:g=32");
    f->golden = "mixtral";
    struct qt_ckpt *ckpt = make_model(f, NULL);
    qt_threads_set(1);
    json_decref(quantize(f, ckpt, &a));
    qt_threads_set(4);
    json_decref(quantize(f, ckpt, &b));
    qt_threads_set(0);
    assert_true(same_files(f, "model.safetensors"));
    assert_true(same_files(f, "qtool.json"));
    qt_ckpt_close(ckpt);
}

static char *last_warning;
static void keep_warning(void *ctx, enum qt_log_level level, const char *text)
{
    (void)ctx;
    if (level == QT_LOG_WARNING) {
        free(last_warning);
        last_warning = strdup(text);
    }
}

static void too_few_tokens_warn(void **state)
{
    struct fixture *f = *state;
    const struct qt_log log = {.message = keep_warning};
    struct qt_quantize_options opt = options(f, "a", "nf4:g=32");
    f->golden = "qwen3_moe";
    struct qt_ckpt *ckpt = make_model(f, NULL);
    f->calibration.samples = 5; /* for 32 channels; three of six experts per token */
    opt.log = &log;
    json_decref(quantize(f, ckpt, &opt));
    assert_non_null(last_warning);
    if (!strstr(last_warning, "experts were selected by fewer than 4 calibration tokens"))
        fail_msg("%s", last_warning);
    free(last_warning);
    last_warning = NULL;
    qt_ckpt_close(ckpt);
    f->golden = "llama";
    ckpt = make_model(f, NULL);
    f->calibration.samples = 1;
    json_decref(quantize(f, ckpt, &opt));
    assert_non_null(last_warning);
    assert_null(strstr(last_warning, "experts"));
    free(last_warning);
    last_warning = NULL;
    qt_ckpt_close(ckpt);
}

/* The activations of experts are planned together. */
static void experts_have_activations(void **state)
{
    struct fixture *f = *state;
    f->golden = "mixtral";
    struct qt_ckpt *ckpt = make_model(f, NULL);
    struct qt_quantize_options a = options(f, "a", "w4ax:a8max=0.5");
    struct qt_quantize_options b = options(f, "b", "w4ax:a8max=0.5");
    json_t *doc = quantize(f, ckpt, &a);
    const double a8 =
        json_real_value(json_object_get(json_object_get(doc, "activations"), "a8_macs"));
    assert_true(a8 > 0 && a8 <= 0.5);
    json_decref(doc);
    qt_threads_set(1);
    json_decref(quantize(f, ckpt, &b));
    qt_threads_set(0);
    assert_true(same_files(f, "model.safetensors"));
    assert_true(same_files(f, "qtool.json"));
    qt_ckpt_close(ckpt);
}

/* ---- activations ---------------------------------------------------------------------------- */

/* A plan of activations is kept and not made again. */
static void chosen_activations_are_kept(void **state)
{
    struct fixture *f = *state;
    struct qt_ckpt *ckpt = make_model(f, NULL);
    struct qt_quantize_options b = options(f, "b", "w4ax:a8max=0.5");
    struct qt_quantize_report report;
    stop_after(f, ckpt, &b, 0);
    b.resume = true;
    for (int i = 0; i < 3; i++) {
        stops_left = reads(ckpt) + 1;
        expect_error("again", qt_quantize(&report, ckpt, &b, &f->err), QT_E_INTERRUPTED,
                     "interrupted after", &f->err);
    }
    b.interrupted = NULL;
    json_decref(quantize(f, ckpt, &b));
    assert_false(qt_path_exists(fixture_path(f->dir, "b/activations")));
    qt_ckpt_close(ckpt);
}

struct edit {
    const char *what;
    size_t at; /* byte to change; SIZE_MAX: none */
    size_t cut;
    bool sealed; /* with a valid CRC */
};

static void edit_file(const char *path, const struct edit *e)
{
    size_t size;
    unsigned char *data;
    struct qt_err err = {0};
    expect_ok(path, qt_file_read((char **)&data, &size, path, SIZE_MAX, &err), &err);
    size_t left = size - sizeof(uint32_t) - e->cut;
    uint32_t crc;
    memcpy(&crc, data + size - sizeof crc, sizeof crc);
    if (e->at != SIZE_MAX)
        data[e->at] ^= 0xff;
    if (e->sealed)
        crc = qt_crc32(0, data, left);
    FILE *file = fopen(path, "wb");
    assert_int_equal(fwrite(data, 1, left, file), left);
    assert_int_equal(fwrite(&crc, 1, sizeof crc, file), sizeof crc);
    fclose(file);
    qt_free(data);
}

static void kept_activations_are_checked(void **state)
{
    enum { K = 32, CLIP = 8, ORDER = CLIP + 4, FACTORS = ORDER + 4 * K, BITS = FACTORS + 4 * K };
    static const struct edit edits[] = {{"a byte", 40, 0, false},
                                        {"cut", SIZE_MAX, 100, false},
                                        {"magic", 0, 0, true},
                                        {"clip", CLIP + 3, 0, true},
                                        {"order", ORDER + 3, 0, true},
                                        {"factor", FACTORS + 3, 0, true},
                                        {"bits", BITS, 0, true},
                                        {"report cut", SIZE_MAX, 5, true},
                                        {"inputs cut", SIZE_MAX, 2000, true}};
    struct fixture *f = *state;
    struct qt_ckpt *ckpt = make_model(f, NULL);
    struct qt_quantize_options b = options(f, "b", "w4ax:a8max=0.5");
    struct qt_quantize_report report;
    for (size_t i = 0; i < sizeof edits / sizeof *edits; i++) {
        b.resume = false;
        stop_after(f, ckpt, &b, 2);
        edit_file(fixture_path(f->dir, "b.partial/activations"), &edits[i]);
        b.resume = true;
        b.interrupted = NULL;
        expect_error(edits[i].what, qt_quantize(&report, ckpt, &b, &f->err), QT_E_RESUME,
                     edits[i].sealed ? "does not belong to this run" : "damaged", &f->err);
    }
    qt_ckpt_close(ckpt);
}

/* ---- unusual activations -------------------------------------------------------------------- */

static void kill_channels(const char *name, float *w, size_t count)
{
    if (strstr(name, "layers.0.input_layernorm"))
        memset(w, 0, count / 2 * sizeof *w);
}

/* ---- output error correction ---------------------------------------------------------------- */

#define LAST_O "model.layers.1.self_attn.o_proj.weight"
static float o_factor;

static void scale_o(const char *name, float *w, size_t count)
{
    for (size_t i = 0; i < count && strcmp(name, LAST_O) == 0; i++)
        w[i] *= o_factor;
}

/* The largest magnitude of the quantized matrix. */
static double largest_of_o(struct fixture *f)
{
    struct qt_container *c;
    struct qt_packed p;
    float *w;
    double largest = 0;
    expect_ok("open", qt_container_open(&c, f->out[0], &f->err), &f->err);
    const struct qt_entry *e = qt_container_find(c, LAST_O);
    assert_non_null(e);
    expect_ok("packed", qt_packed_open(&p, c, e, &f->err), &f->err);
    expect_ok("memory", qt_array_new(&w, p.n * p.k, sizeof *w, &f->err), &f->err);
    expect_ok("decode", qt_packed_weights(w, &p, &f->err), &f->err);
    for (size_t i = 0; i < p.n * p.k; i++) {
        assert_true(isfinite(w[i]));
        largest = fmax(largest, fabs((double)w[i]));
    }
    qt_free(w);
    qt_packed_free(&p);
    qt_container_close(c);
    return largest;
}

/* Zero or tiny weights: the stored matrix is the output error correction, whose scales are not
 * those of the weights. */
static void output_errors_are_corrected(void **state)
{
    static const char *const schemes[] = {"nf3:g=32", "fp6",  "int4:g=32",
                                          "mix24",    "w4ax", "lut3:g=32"};
    static const float factors[] = {0, 1e-42f, 1e-3f};
    struct fixture *f = *state;
    many_tokens(f);
    for (size_t i = 0; i < sizeof factors / sizeof *factors; i++) {
        o_factor = factors[i];
        struct qt_ckpt *ckpt = make_model(f, scale_o);
        for (size_t s = 0; s < sizeof schemes / sizeof *schemes; s++) {
            struct qt_quantize_options opt = options(f, "a", schemes[s]);
            json_t *doc = quantize(f, ckpt, &opt), *t;
            size_t at;
            assert_int_equal(total(doc, "fallbacks"), 0);
            json_array_foreach (json_object_get(doc, "tensors"), at, t) {
                const json_t *h = json_object_get(t, "hessian");
                double before = json_number_value(json_object_get(h, "error_before"));
                double after = json_number_value(json_object_get(h, "error_after"));
                if (!(after > 0 && after < before))
                    fail_msg("%s, factor %g, tensor %zu: %g before, %g after", schemes[s],
                             (double)factors[i], at, before, after);
            }
            json_decref(doc);
            assert_true(largest_of_o(f) > 1e-6);
        }
        qt_ckpt_close(ckpt);
    }
}

static void enlarge_last_norm(const char *name, float *w, size_t count)
{
    for (size_t i = 0; i < count && strcmp(name, "model.norm.weight") == 0; i++)
        w[i] = 3e38f;
}

/* Channel blocks cannot be ranked by logits that are not finite. */
static void logits_have_to_be_finite(void **state)
{
    struct fixture *f = *state;
    struct qt_ckpt *ckpt = make_model(f, enlarge_last_norm);
    struct qt_quantize_options opt = options(f, "a", "w4ax");
    struct qt_quantize_report report;
    expect_error("overflow", qt_quantize(&report, ckpt, &opt, &f->err), QT_E_INPUT,
                 "logits that are not finite", &f->err);
    qt_ckpt_close(ckpt);
}

static void dead_channels_are_counted(void **state)
{
    struct fixture *f = *state;
    struct qt_ckpt *ckpt = make_model(f, kill_channels);
    struct qt_quantize_options opt = options(f, "a", "nf4:g=32");
    json_t *doc = quantize(f, ckpt, &opt), *t;
    size_t i, found = 0;
    opt.strict = true;
    assert_int_equal(total(doc, "fallbacks"), 0);
    json_array_foreach (json_object_get(doc, "tensors"), i, t) {
        const char *name = json_string_value(json_object_get(t, "name"));
        if (!strstr(name, "layers.0.self_attn.q_proj"))
            continue;
        json_t *dead = json_object_get(json_object_get(t, "hessian"), "dead_channels");
        assert_int_equal(json_integer_value(dead), 16);
        found++;
    }
    assert_int_equal(found, 1);
    json_decref(doc);
    json_decref(quantize(f, ckpt, &opt)); /* dead channels are no fallback for --strict */
    qt_ckpt_close(ckpt);
}

static const char *killed; /* the norm in front of the linears */

static void kill_inputs(const char *name, float *w, size_t count)
{
    if (strstr(name, killed))
        memset(w, 0, count * sizeof *w);
}

/* Expects that exactly the `fallbacks` linears with `part` in their name fall back. */
static void expect_fall_back(struct fixture *f, const struct qt_ckpt *ckpt, const char *scheme,
                             const char *part, json_int_t fallbacks)
{
    static const char reason[] = "no channel of the input was ever active";
    struct qt_quantize_options opt = options(f, "a", scheme);
    struct qt_quantize_report report;
    json_t *doc = quantize(f, ckpt, &opt), *t;
    size_t i;
    assert_int_equal(total(doc, "fallbacks"), fallbacks);
    json_array_foreach (json_object_get(doc, "tensors"), i, t) {
        const char *name = json_string_value(json_object_get(t, "name"));
        const json_t *h = json_object_get(t, "hessian");
        const char *why = json_string_value(json_object_get(h, "fallback"));
        assert_int_equal(strstr(name, part) != NULL, why != NULL);
        assert_true(!why || strstr(why, reason));
    }
    json_decref(doc);
    opt.strict = true;
    expect_error("strict", qt_quantize(&report, ckpt, &opt, &f->err), QT_E_UNSUPPORTED, reason,
                 &f->err);
}

/* Zero inputs give zero attention outputs and zero activations of experts. */
static void dead_inputs_fall_back(void **state)
{
    static const char *const schemes[] = {"nf3:g=32", "fp6",  "int4:g=32",
                                          "mix24",    "w4ax", "lut3:g=32"};
    struct fixture *f = *state;
    killed = "layers.0.input_layernorm";
    struct qt_ckpt *ckpt = make_model(f, kill_inputs);
    for (size_t s = 0; s < sizeof schemes / sizeof *schemes; s++)
        expect_fall_back(f, ckpt, schemes[s], "layers.0.self_attn", 4);
    qt_ckpt_close(ckpt);
    f->golden = "mixtral";
    killed = "layers.0.post_attention_layernorm";
    ckpt = make_model(f, kill_inputs);
    expect_fall_back(f, ckpt, "nf4:g=32", "layers.0.block_sparse_moe", 5 * 3);
    qt_ckpt_close(ckpt);
}

static void fewer_tokens_than_channels(void **state)
{
    struct fixture *f = *state;
    struct qt_ckpt *ckpt = make_model(f, NULL);
    struct qt_quantize_options opt = options(f, "a", "nf3:g=32");
    f->calibration.samples = 1;
    f->calibration.seqlen = 8;
    json_t *doc = quantize(f, ckpt, &opt);
    assert_int_equal(total(doc, "fallbacks"), 0);
    assert_int_equal(total(doc, "calibration_tokens"), 8);
    json_decref(doc);
    f->calibration.samples = SAMPLES;
    f->calibration.seqlen = SEQLEN;
    qt_ckpt_close(ckpt);
}

/* Weights far outside the range of FP16, but finite: no special handling. */
static void huge_weights(const char *name, float *w, size_t count)
{
    bool before = strstr(name, "layers.1.post_attention_layernorm") != NULL;
    for (size_t i = 0; before && i < count; i++)
        w[i] *= 1e6f;
}

static void huge_activations_are_no_problem(void **state)
{
    struct fixture *f = *state;
    struct qt_ckpt *ckpt = make_model(f, huge_weights);
    struct qt_quantize_options opt = options(f, "a", "nf4:g=32");
    opt.strict = true;
    json_t *doc = quantize(f, ckpt, &opt);
    assert_int_equal(total(doc, "fallbacks"), 0);
    json_decref(doc);
    qt_ckpt_close(ckpt);
}

/* gate * up is infinite: the input of down_proj has infinities, later layers have NaN. */
static void endless_weights(const char *name, float *w, size_t count)
{
    if (strstr(name, "layers.0.post_attention_layernorm"))
        for (size_t i = 0; i < count; i++)
            w[i] = 3e38f;
}

static void infinite_activations_fall_back(void **state)
{
    struct fixture *f = *state;
    struct qt_ckpt *ckpt = make_model(f, endless_weights);
    struct qt_quantize_options opt = options(f, "a", "nf4:g=32");
    struct qt_quantize_report report;
    json_t *doc = quantize(f, ckpt, &opt), *t;
    size_t i, with_reason = 0;
    json_array_foreach (json_object_get(doc, "tensors"), i, t) {
        json_t *why = json_object_get(json_object_get(t, "hessian"), "fallback");
        with_reason += why && strstr(json_string_value(why), "not finite");
    }
    assert_true(with_reason > 0);
    assert_int_equal(with_reason, total(doc, "fallbacks"));
    json_decref(doc);
    opt.strict = true;
    expect_error("strict", qt_quantize(&report, ckpt, &opt, &f->err), QT_E_UNSUPPORTED,
                 "not finite", &f->err);
    assert_false(qt_path_exists(fixture_path(f->dir, "a.partial")));
    qt_ckpt_close(ckpt);
}

static void infinite_keys_have_no_scales(void **state)
{
    struct fixture *f = *state;
    struct qt_ckpt *ckpt = make_model(f, endless_weights);
    struct qt_quantize_options opt = options(f, "a", "nf4:g=32");
    struct qt_quantize_report report;
    opt.plan.kv = QT_KV_KEYS_STATIC;
    expect_error(
        "keys", qt_quantize(&report, ckpt, &opt, &f->err), QT_E_INPUT,
        "model.safetensors: tensor model.layers.1.self_attn.k_proj.weight: gives keys that "
        "are not finite",
        &f->err);
    qt_ckpt_close(ckpt);
}

static void windows_longer_than_the_model(void **state)
{
    struct fixture *f = *state;
    struct qt_ckpt *ckpt = make_model(f, NULL);
    struct qt_quantize_options opt = options(f, "a", "nf4:g=32");
    struct qt_quantize_report report;
    f->calibration.samples = 1;
    f->calibration.seqlen = SAMPLES * SEQLEN;
    expect_error("seqlen", qt_quantize(&report, ckpt, &opt, &f->err), QT_E_USAGE,
                 "exceed the model's 64 positions", &f->err);
    f->calibration.samples = SAMPLES;
    f->calibration.seqlen = SEQLEN;
    qt_ckpt_close(ckpt);
}

/* Fails allocation n and all later ones, for n = 0 up to a run without a failure; n grows by 1 + n
 * / step. */
static void starve(struct fixture *f, const struct qt_ckpt *ckpt,
                   const struct qt_quantize_options *opt, long step)
{
    bool failed = true;
    qt_threads_set(1);
    for (long n = 0; failed; n += 1 + n / step) {
        struct qt_quantize_report report = {0};
        qt_mem_fail_after(n);
        int rc = qt_quantize(&report, ckpt, opt, &f->err);
        qt_mem_fail_after(-1);
        failed = rc < 0;
        if (failed && rc != QT_E_RESOURCE)
            fail_msg("allocation %ld: status %d, %s", n, rc, f->err.reason);
        json_decref(report.document);
        assert_true(n < 10000000);
    }
    qt_threads_set(0);
}

static void allocation_failures(void **state)
{
    struct fixture *f = *state;
    struct qt_ckpt *ckpt = make_model(f, NULL);
    struct qt_quantize_options a = options(f, "a", "nf3:g=32"), b = options(f, "b", "w4ax");
    starve(f, ckpt, &a, 8);
    stop_after(f, ckpt, &b, 0);
    b.interrupted = NULL;
    b.resume = true;
    starve(f, ckpt, &b, 100);
    qt_ckpt_close(ckpt);
}

/* ---- what quantize writes, verify accepts --------------------------------------------------- */

static void fill(float *w, size_t count, size_t stride, float value)
{
    for (size_t i = 0; i < count; i++)
        w[i * stride] = value;
}

/* Makes every other matrix of the decoder layers special in one of some ways. */
static void make_special(const char *name, float *w, size_t count)
{
    const size_t k = strstr(name, "down_proj") ? 48 : 32, n = count / k;
    if (!strstr(name, "_proj"))
        return;
    switch (random_u32() % 18) {
    case 0:
        fill(w, count, 1, 0);
        break;
    case 1:
        fill(w, count, 1, 0.01f);
        break;
    case 2: /* a row, a column of zeros */
        fill(w + random_u32() % n * k, k, 1, 0);
        break;
    case 3:
        fill(w + random_u32() % k, n, k, 0);
        break;
    case 4: /* all but a row */
        fill(w + k, count - k, 1, 0);
        break;
    case 5:
        fill(w + random_u32() % n * k, k, 1, -0.02f);
        break;
    case 6:
        for (size_t i = 0; i < count; i++)
            w[i] *= 1e-30f;
        break;
    case 7:
        w[random_u32() % count] = 50;
        break;
    case 8: /* subnormal in FP32 */
        fill(w, count, 1, 1e-40f);
        break;
    }
}

static void verify_output(struct fixture *f, const struct qt_ckpt *ckpt, const char *scheme)
{
    struct qt_container *c;
    struct qt_verify_report report;
    expect_ok(scheme, qt_container_open(&c, f->out[0], &f->err), &f->err);
    expect_ok(scheme, qt_verify(&report, c, ckpt, NULL, NULL, &f->err), &f->err);
    assert_int_equal(report.nonfinite_values, 0);
    qt_verify_free(&report);
    qt_container_close(c);
}

static void zero_values(const char *name, float *w, size_t count)
{
    if (strstr(name, "layers.1.self_attn.v_proj"))
        fill(w, count, 1, 0);
}

/* Without values, o_proj has no Hessian and falls back to another method than other matrices. */
static void dead_values_leave_a_sound_container(void **state)
{
    struct fixture *f = *state;
    struct qt_ckpt *ckpt = make_model(f, zero_values);
    struct qt_quantize_options opt = options(f, "a", "w4ax");
    json_t *doc = quantize(f, ckpt, &opt);
    assert_true(total(doc, "fallbacks") > 0);
    json_decref(doc);
    verify_output(f, ckpt, "w4ax");
    qt_ckpt_close(ckpt);
}

/* Every scheme without data; some with data, all with QT_FULL. */
static void every_output_is_sound(void **state)
{
    struct fixture *f = *state;
    const bool full = getenv("QT_FULL") != NULL;
    const struct qt_scheme *s;
    const struct qt_preset *preset;
    f->calibration.samples = 1;
    for (int round = 0; round < (full ? 5 : 1); round++) {
        struct qt_ckpt *ckpt = make_model(f, make_special);
        for (size_t i = 0; (s = qt_scheme_at(i)) != NULL; i++)
            for (size_t j = 0; (preset = qt_scheme_preset(s, j)) != NULL; j++) {
                const bool needs = qt_scheme_needs_data(s);
                const bool calibrated = needs || full || random_u32() % 4 == 0;
                for (int data = needs; data <= calibrated; data++) {
                    struct qt_quantize_options opt = options(f, "a", preset->name);
                    opt.calibration = data ? &f->calibration : NULL;
                    opt.plan.calibrated = data;
                    json_decref(quantize(f, ckpt, &opt));
                    verify_output(f, ckpt, preset->name);
                }
            }
        qt_ckpt_close(ckpt);
    }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(compensation_lowers_the_weighted_error),
        TEST(same_bytes_for_any_threads),
        TEST(config_must_stay),
        TEST(interrupted_runs_resume),
        TEST(runs_apart_resume),
        TEST(bytes_without_data_do_not_depend_on_the_backend),
        TEST(later_weights_must_stay),
        TEST(runs_of_many_tokens_resume),
        TEST(output_errors_are_corrected),
        TEST(experts_have_their_own_tokens),
        TEST(runs_of_experts_resume),
        TEST(embeddings_and_routers_come_first),
        TEST(experts_do_not_depend_on_threads),
        TEST(too_few_tokens_warn),
        TEST(experts_have_activations),
        TEST(chosen_activations_are_kept),
        TEST(kept_activations_are_checked),
        TEST(logits_have_to_be_finite),
        TEST(dead_channels_are_counted),
        TEST(dead_inputs_fall_back),
        TEST(fewer_tokens_than_channels),
        TEST(huge_activations_are_no_problem),
        TEST(infinite_activations_fall_back),
        TEST(infinite_keys_have_no_scales),
        TEST(windows_longer_than_the_model),
        TEST(allocation_failures),
        TEST(dead_values_leave_a_sound_container),
        TEST(every_output_is_sound),
    };
    seed_init();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
