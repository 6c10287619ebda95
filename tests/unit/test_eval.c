/* Compares eval with the published perplexity, with a naive computation from the logits, and with
 * itself under other batch sizes and thread counts. */
#include "fixture.h"

#include "calib/calib.h"
#include "kernels/kernels.h"
#include "verify/verify.h"

#include <math.h>

static const char model_dir[] = "examples/nano-llama";

/* Shared by all tests: the model, a perturbed copy, token ids, a backend. */
struct world {
    struct qt_ckpt *ckpt;
    struct qt_weights exact, perturbed;
    struct qt_backend *be;
    uint32_t *ids;
    size_t count;
};
static struct world world;

/* ---- another model with the same tokenizer -------------------------------------------------- */

static float poison; /* added to every weight of o_proj */

static bool perturbed_shape(void *ctx, const char *name, int *ndim, size_t shape[QT_MAX_DIMS])
{
    const struct qt_weights *w = ctx;
    return w->shape(w->ctx, name, ndim, shape);
}

/* Every projection, or dense part of an encoder, gets noise of about 2 % of a typical weight, the
 * same on every load. */
static int perturbed_load(void *ctx, const char *name, float *dst, struct qt_err *err)
{
    const struct qt_weights *w = ctx;
    size_t shape[QT_MAX_DIMS], count = 1;
    uint32_t seed = 1;
    int ndim, rc = w->load(w->ctx, name, dst, err);
    if (rc < 0 || !(strstr(name, "proj") || strstr(name, "dense.weight")))
        return rc;
    w->shape(w->ctx, name, &ndim, shape);
    for (int d = 0; d < ndim; d++)
        count *= shape[d];
    for (size_t i = 0; i < count; i++) {
        seed = seed * 1664525 + 1013904223;
        dst[i] +=
            0.01f * ((float)(seed >> 8) * 0x1p-23f - 1) + (strstr(name, "o_proj") ? poison : 0);
    }
    return rc;
}

static int open_world(void **state)
{
    struct qt_tokenizer *tok = NULL;
    struct qt_err err = {0};
    char *text = NULL;
    size_t size;
    (void)state;
    if (qt_ckpt_open(&world.ckpt, model_dir, &err) < 0 ||
        qt_backend_cpu_open(&world.be, &err) < 0 || qt_tokenizer_open(&tok, model_dir, &err) < 0 ||
        qt_file_read(&text, &size, "examples/nano-llama/eval.txt", 1 << 24, &err) < 0 ||
        qt_tokenizer_encode(&world.ids, &world.count, tok, text, size, true, &err) < 0) {
        print_error("%s: %s\n", err.file, err.reason);
        return -1;
    }
    world.exact = qt_weights_of_ckpt(world.ckpt);
    world.perturbed = (struct qt_weights){.dir = world.exact.dir,
                                          .ctx = &world.exact,
                                          .shape = perturbed_shape,
                                          .load = perturbed_load};
    qt_free(text);
    qt_tokenizer_close(tok);
    return 0;
}

static int close_world(void **state)
{
    (void)state;
    qt_free(world.ids);
    world.be->close(world.be);
    qt_ckpt_close(world.ckpt);
    return 0;
}

static int eval(struct qt_eval_report *out, const struct qt_weights *w,
                const struct qt_weights *ref, const struct qt_eval_options *opt, struct qt_err *err)
{
    *err = (struct qt_err){0};
    return qt_eval(out, w, ref, world.ids, world.count, opt, world.be, err);
}

static struct qt_eval_report must_eval(const struct qt_weights *w, const struct qt_weights *ref,
                                       const struct qt_eval_options *opt)
{
    struct qt_eval_report r;
    struct qt_err err;
    if (eval(&r, w, ref, opt, &err) < 0)
        fail_msg("%s: %s", err.file, err.reason);
    return r;
}

/* ---- against published results -------------------------------------------------------------- */

static void test_published_perplexity(void **state)
{
    const struct qt_eval_options opt = {.seqlen = 512};
    json_t *root = NULL;
    double ppl = 0;
    (void)state;
    assert_int_equal(qt_json_load(&root, "examples/nano-llama/reference.json", 1 << 16, NULL), 0);
    const json_t *want = json_object_get(root, "self_eval@512");
    assert_int_equal(qt_json_get_real(&ppl, want, "ppl", "reference.json", NULL), 0);
    struct qt_eval_report r = must_eval(&world.exact, NULL, &opt);
    print_message("perplexity %.9g, published %.9g\n", r.ppl, ppl);
    assert_true(fabs(r.ppl / ppl - 1) < 5e-5); /* another implementation in FP32 */
    assert_int_equal(r.scored_tokens, json_integer_value(json_object_get(want, "scored_tokens")));
    assert_false(r.has_ref);
    json_decref(root);
}

/* ---- against the definition ----------------------------------------------------------------- */

enum { SEQLEN = 48, WINDOWS = 5, POSITIONS = SEQLEN * WINDOWS, VOCAB = 1024 };

/* Logits of one window at a time, all positions at once. */
static void naive_logits(float *logits, const struct qt_weights *w)
{
    struct qt_backend *be = world.be;
    struct qt_model *model;
    struct qt_embed_head *embed_head;
    struct qt_layer *layer;
    void *hidden, *out;
    assert_int_equal(qt_model_open(&model, w, NULL), 0);
    const struct qt_model_info *info = qt_model_info(model);
    assert_int_equal(info->vocab, VOCAB);
    assert_int_equal(qt_embed_head_open(&embed_head, model, w, be, NULL), 0);
    assert_int_equal(be->alloc(be, &hidden, SEQLEN * info->hidden * sizeof(float), NULL), 0);
    assert_int_equal(be->alloc(be, &out, (size_t)SEQLEN * VOCAB * sizeof(float), NULL), 0);
    for (size_t i = 0; i < WINDOWS; i++) {
        assert_int_equal(
            qt_embed_tokens(embed_head, hidden, world.ids + i * SEQLEN, SEQLEN, SEQLEN, NULL), 0);
        for (size_t l = 0; l < info->layers; l++) {
            assert_int_equal(qt_layer_open(&layer, model, l, w, be, NULL), 0);
            assert_int_equal(qt_layer_run(layer, hidden, SEQLEN, SEQLEN, NULL, NULL), 0);
            qt_layer_close(layer);
        }
        assert_int_equal(qt_head_logits(embed_head, out, hidden, SEQLEN, NULL), 0);
        assert_int_equal(be->download(be, logits + i * SEQLEN * VOCAB, out,
                                      (size_t)SEQLEN * VOCAB * sizeof(float), NULL),
                         0);
    }
    be->free(be, out);
    be->free(be, hidden);
    qt_embed_head_close(embed_head);
    qt_model_close(model);
}

static void log_probabilities(double lp[VOCAB], const float logits[VOCAB])
{
    double max = -INFINITY, sum = 0;
    for (size_t v = 0; v < VOCAB; v++)
        max = fmax(max, (double)logits[v]);
    for (size_t v = 0; v < VOCAB; v++)
        sum += exp((double)logits[v] - max);
    for (size_t v = 0; v < VOCAB; v++)
        lp[v] = (double)logits[v] - max - log(sum);
}

static size_t top(const double lp[VOCAB])
{
    size_t best = 0;
    for (size_t v = 1; v < VOCAB; v++)
        if (lp[v] > lp[best])
            best = v;
    return best;
}

/* Quantile without sorting: the element with `rank` smaller ones. */
static double ranked(const double x[POSITIONS], size_t rank)
{
    for (size_t i = 0; i < POSITIONS; i++) {
        size_t below = 0;
        for (size_t j = 0; j < POSITIONS; j++)
            below += x[j] < x[i] || (x[j] == x[i] && j < i);
        if (below == rank)
            return x[i];
    }
    return NAN;
}

static struct qt_eval_report naive_report(const float *logits, const float *ref_logits)
{
    static double p[VOCAB], q[VOCAB], kld[POSITIONS]; /* ln p of the reference, of the model */
    double nll = 0, ref_nll = 0, dp2 = 0, at = 0.999 * (POSITIONS - 1);
    struct qt_eval_report r = {.windows = WINDOWS, .seqlen = SEQLEN, .has_ref = true};
    for (size_t i = 0; i < POSITIONS; i++) {
        log_probabilities(q, logits + i * VOCAB);
        log_probabilities(p, ref_logits + i * VOCAB);
        kld[i] = 0;
        for (size_t v = 0; v < VOCAB; v++)
            kld[i] += exp(p[v]) * (p[v] - q[v]);
        r.kld_mean += kld[i] / POSITIONS;
        r.same_top += (double)(top(p) == top(q)) / POSITIONS;
        if (i % SEQLEN == SEQLEN - 1)
            continue;
        uint32_t target = world.ids[i + 1];
        double dp = exp(q[target]) - exp(p[target]);
        nll -= q[target];
        ref_nll -= p[target];
        dp2 += dp * dp;
        r.scored_tokens++;
    }
    r.ppl = exp(nll / (double)r.scored_tokens);
    r.ref_ppl = exp(ref_nll / (double)r.scored_tokens);
    r.rms_dp = sqrt(dp2 / (double)r.scored_tokens);
    r.kld_median = (ranked(kld, POSITIONS / 2 - 1) + ranked(kld, POSITIONS / 2)) / 2;
    size_t below = (size_t)at;
    r.kld_p999 =
        ranked(kld, below) + (at - (double)below) * (ranked(kld, below + 1) - ranked(kld, below));
    return r;
}

static void close_to(const char *what, double got, double want, double tolerance)
{
    if (!(fabs(got - want) <= tolerance * fabs(want)))
        fail_msg("%s is %.12g, the definition gives %.12g", what, got, want);
}

static void test_definition(void **state)
{
    const struct qt_eval_options opt = {.seqlen = SEQLEN, .windows = WINDOWS};
    float *logits, *ref_logits;
    (void)state;
    assert_int_equal(qt_array_new(&logits, (size_t)POSITIONS * VOCAB, sizeof *logits, NULL), 0);
    assert_int_equal(qt_array_new(&ref_logits, (size_t)POSITIONS * VOCAB, sizeof *logits, NULL), 0);
    naive_logits(logits, &world.perturbed);
    naive_logits(ref_logits, &world.exact);
    struct qt_eval_report want = naive_report(logits, ref_logits);
    struct qt_eval_report got = must_eval(&world.perturbed, &world.exact, &opt);
    assert_true(want.kld_mean > 1e-3 && want.same_top < 1); /* the models differ enough */
    assert_int_equal(got.scored_tokens, want.scored_tokens);
    close_to("ppl", got.ppl, want.ppl, 1e-6);
    close_to("ref_ppl", got.ref_ppl, want.ref_ppl, 1e-6);
    close_to("kld_mean", got.kld_mean, want.kld_mean, 1e-4);
    close_to("kld_median", got.kld_median, want.kld_median, 1e-3);
    close_to("kld_p999", got.kld_p999, want.kld_p999, 1e-4);
    close_to("same_top", got.same_top, want.same_top, 1e-12);
    close_to("rms_dp", got.rms_dp, want.rms_dp, 1e-4);
    qt_free(logits);
    qt_free(ref_logits);
}

/* ---- against itself ------------------------------------------------------------------------- */

static void test_a_model_does_not_differ_from_itself(void **state)
{
    const struct qt_eval_options opt = {.seqlen = 300, .windows = 3};
    (void)state;
    struct qt_eval_report r = must_eval(&world.exact, &world.exact, &opt);
    assert_true(r.ppl == r.ref_ppl);
    assert_true(r.kld_mean == 0 && r.kld_median == 0 && r.kld_p999 == 0);
    assert_true(r.same_top == 1);
    assert_true(r.rms_dp == 0);
}

static void same_report(const struct qt_eval_report *a, const struct qt_eval_report *b)
{
    assert_true(a->ppl == b->ppl && a->ref_ppl == b->ref_ppl);
    assert_true(a->kld_mean == b->kld_mean && a->kld_median == b->kld_median);
    assert_true(a->kld_p999 == b->kld_p999 && a->same_top == b->same_top);
    assert_true(a->rms_dp == b->rms_dp);
}

/* Windows of 256 run in groups of 8: 18 windows are three groups, the last one short. */
static void test_batches_and_threads_change_nothing(void **state)
{
    struct qt_eval_options opt = {.seqlen = 256, .windows = 18};
    (void)state;
    struct qt_eval_report whole = must_eval(&world.perturbed, &world.exact, &opt);
    opt.batch_bytes = 1;
    struct qt_eval_report pieces = must_eval(&world.perturbed, &world.exact, &opt);
    qt_threads_set(1);
    struct qt_eval_report serial = must_eval(&world.perturbed, &world.exact, &opt);
    qt_threads_set(3);
    struct qt_eval_report parallel = must_eval(&world.perturbed, &world.exact, &opt);
    qt_threads_set(0);
    same_report(&whole, &pieces);
    same_report(&whole, &serial);
    same_report(&whole, &parallel);
}

static double last_done, last_total;

static void note_progress(void *ctx, const char *stage, double done, double total)
{
    (void)ctx;
    assert_string_equal(stage, "eval");
    assert_true(done > last_done && done <= total);
    last_done = done;
    last_total = total;
}

static void test_progress_ends_at_the_total(void **state)
{
    const struct qt_log log = {.progress = note_progress};
    const struct qt_eval_options opt = {
        .seqlen = 200, .windows = 11, .batch_bytes = 1, .log = &log};
    (void)state;
    last_done = 0;
    must_eval(&world.exact, &world.exact, &opt);
    assert_true(last_done == last_total && last_done > 0);
}

/* ---- refusals ------------------------------------------------------------------------------- */

static void test_refusals(void **state)
{
    struct qt_eval_options opt = {.seqlen = 1};
    struct qt_eval_report r;
    struct qt_err err;
    (void)state;
    expect_error("short window", eval(&r, &world.exact, NULL, &opt, &err), QT_E_USAGE,
                 "at least 2 tokens", &err);
    opt.seqlen = 4096;
    expect_error("long window", eval(&r, &world.exact, NULL, &opt, &err), QT_E_USAGE,
                 "exceed the model's 2048 positions", &err);
    opt.seqlen = 512;
    expect_error("little data",
                 qt_eval(&r, &world.exact, NULL, world.ids, 511, &opt, world.be, &err), QT_E_INPUT,
                 "the data has 511 tokens, less than one window of 512", &err);
    opt.windows = 1;
    uint32_t saved = world.ids[17];
    world.ids[17] = VOCAB;
    int rc = eval(&r, &world.exact, NULL, &opt, &err);
    world.ids[17] = saved;
    expect_error("foreign id", rc, QT_E_INPUT, "token 17 of the data has id 1024", &err);
}

static void test_logits_that_are_no_numbers(void **state)
{
    const struct qt_eval_options opt = {.seqlen = 16, .windows = 1};
    const struct qt_weights exact = world.exact;
    struct qt_eval_report r;
    struct qt_err err, of_ref;
    (void)state;
    poison = INFINITY;
    world.exact.dir = "examples/nano-llama/."; /* the same directory by another name */
    int rc = eval(&r, &world.perturbed, &world.exact, &opt, &err);
    int ref_rc = eval(&r, &world.exact, &world.perturbed, &opt, &of_ref);
    poison = 0;
    world.exact = exact;
    expect_error("inf", rc, QT_E_INPUT, "logits are not finite at token 0", &err);
    expect_error("inf", rc, QT_E_INPUT, "nano-llama: ", &err);
    expect_error("inf of the reference", ref_rc, QT_E_INPUT,
                 "nano-llama: the logits are not finite", &of_ref);
}

/* ---- encoders ------------------------------------------------------------------------------- */

enum { ENCODER_TOKENS = 16, ENCODER_VOCAB = 53, MASK = 4 };

/* The mean of -ln p of tokens 6 and 13 of each window, which are masked. */
static double masked_loss(const struct qt_weights *w, const uint32_t *ids, size_t windows)
{
    struct qt_backend *be = world.be;
    struct qt_model *model;
    struct qt_embed_head *ends;
    struct qt_layer *layer;
    float hidden[ENCODER_TOKENS * 16], logits[ENCODER_TOKENS * ENCODER_VOCAB];
    uint32_t masked[ENCODER_TOKENS];
    double loss = 0;
    assert_int_equal(qt_model_open(&model, w, NULL), 0);
    assert_int_equal(qt_model_info(model)->hidden, 16);
    assert_int_equal(qt_embed_head_open(&ends, model, w, be, NULL), 0);
    for (size_t i = 0; i < windows; i++) {
        memcpy(masked, ids + i * ENCODER_TOKENS, sizeof masked);
        masked[6] = masked[13] = MASK;
        assert_int_equal(
            qt_embed_tokens(ends, hidden, masked, ENCODER_TOKENS, ENCODER_TOKENS, NULL), 0);
        for (size_t l = 0; l < qt_model_info(model)->layers; l++) {
            assert_int_equal(qt_layer_open(&layer, model, l, w, be, NULL), 0);
            assert_int_equal(
                qt_layer_run(layer, hidden, ENCODER_TOKENS, ENCODER_TOKENS, NULL, NULL), 0);
            qt_layer_close(layer);
        }
        assert_int_equal(qt_head_logits(ends, logits, hidden, ENCODER_TOKENS, NULL), 0);
        for (size_t at = 6; at < ENCODER_TOKENS; at += 7) {
            double sum = 0;
            for (size_t v = 0; v < ENCODER_VOCAB; v++)
                sum += exp((double)logits[at * ENCODER_VOCAB + v]);
            loss += log(sum) - (double)logits[at * ENCODER_VOCAB + ids[i * ENCODER_TOKENS + at]];
        }
    }
    qt_embed_head_close(ends);
    qt_model_close(model);
    return loss / (2 * (double)windows);
}

static void test_masked_loss(void **state)
{
    static const char golden[] = "tests/golden/models/bert/";
    static const char tokenizer[] =
        "{\"model\": {\"type\": \"WordLevel\", \"vocab\": {\"[UNK]\": 0, \"[MASK]\": 4}, "
        "\"unk_token\": \"[UNK]\"}, \"added_tokens\": [{\"id\": 4, \"content\": \"[MASK]\", "
        "\"special\": true, \"single_word\": false, \"lstrip\": false, \"rstrip\": false, "
        "\"normalized\": false}]}";
    const char *const files[] = {"config.json", "model.safetensors"};
    const struct qt_eval_options opt = {.seqlen = ENCODER_TOKENS};
    enum { COUNT = 3 * ENCODER_TOKENS + 5 };
    char *dir = fixture_dir(), *data, path[64];
    uint32_t ids[COUNT];
    struct qt_eval_report r;
    struct qt_ckpt *ckpt;
    struct qt_err err = {0};
    (void)state;
    for (size_t i = 0, size; i < 2; i++) {
        snprintf(path, sizeof path, "%s%s", golden, files[i]);
        assert_int_equal(qt_file_read(&data, &size, path, 1 << 20, &err), 0);
        fixture_write(dir, files[i], data, size);
        qt_free(data);
    }
    for (size_t i = 0; i < COUNT; i++)
        ids[i] = (uint32_t)((i * 29 + i * i) % ENCODER_VOCAB);
    assert_int_equal(qt_ckpt_open(&ckpt, dir, &err), 0);
    const struct qt_weights w = qt_weights_of_ckpt(ckpt);
    expect_error("no tokenizer", qt_eval(&r, &w, &w, ids, COUNT, &opt, world.be, &err), QT_E_INPUT,
                 "tokenizer", &err);
    fixture_write(dir, "tokenizer.json", tokenizer, sizeof tokenizer - 1);
    if (qt_eval(&r, &w, &w, ids, COUNT, &opt, world.be, &err) < 0)
        fail_msg("%s: %s", err.file, err.reason);
    assert_true(r.masked);
    assert_int_equal(r.windows, 3);
    assert_int_equal(r.scored_tokens, 6);
    assert_true(fabs(r.nll - masked_loss(&w, ids, 3)) < 1e-5);
    assert_true(r.kld_mean < 1e-9 && r.same_top == 1 && r.rms_dp == 0);
    expect_error(
        "short",
        qt_eval(&r, &w, NULL, ids, 6, &(struct qt_eval_options){.seqlen = 6}, world.be, &err),
        QT_E_USAGE, "at least 7 tokens", &err);
    qt_ckpt_close(ckpt);
    fixture_remove(dir);
}

/* states[windows][ENCODER_TOKENS][16] = the final hidden states of an encoder of 16 channels. */
static void final_states(float *states, const struct qt_weights *w, const uint32_t *ids,
                         size_t windows)
{
    const size_t m = windows * ENCODER_TOKENS;
    struct qt_model *model;
    struct qt_layer *layer;
    assert_int_equal(qt_model_open(&model, w, NULL), 0);
    assert_int_equal(qt_model_info(model)->predicts, QT_PREDICTS_NOTHING);
    assert_int_equal(qt_model_embed(states, model, w, world.be, ids, m, ENCODER_TOKENS, NULL), 0);
    for (size_t l = 0; l < qt_model_info(model)->layers; l++) {
        assert_int_equal(qt_layer_open(&layer, model, l, w, world.be, NULL), 0);
        assert_int_equal(qt_layer_run(layer, states, m, ENCODER_TOKENS, NULL, NULL), 0);
        qt_layer_close(layer);
    }
    qt_model_close(model);
}

/* A BERT without a head: the tensors of the head have other names. */
static char *headless(void)
{
    static const char golden[] = "tests/golden/models/bert";
    char *dir = fixture_dir(), *data;
    struct qt_err err;
    size_t size;
    assert_int_equal(qt_file_read(&data, &size, fixture_path(golden, "config.json"), 1 << 20, &err),
                     0);
    fixture_write(dir, "config.json", data, size);
    qt_free(data);
    assert_int_equal(
        qt_file_read(&data, &size, fixture_path(golden, "model.safetensors"), 1 << 20, &err), 0);
    for (size_t i = 0; i + 5 < size; i++)
        if (memcmp(data + i, "\"cls.", 5) == 0)
            memcpy(data + i, "\"xyz.", 5);
    fixture_write(dir, "model.safetensors", data, size);
    qt_free(data);
    return dir;
}

static void test_hidden_error(void **state)
{
    enum { RUNS = 3, COUNT = RUNS * ENCODER_TOKENS + 5, FLOATS = RUNS * ENCODER_TOKENS * 16 };
    const struct qt_eval_options opt = {.seqlen = ENCODER_TOKENS};
    struct qt_eval_options kept = opt;
    char *dir = headless();
    float *a = malloc(FLOATS * sizeof *a), *b = malloc(FLOATS * sizeof *b);
    double error = 0, norm = 0;
    uint32_t ids[COUNT];
    struct qt_eval_report r;
    struct qt_ckpt *ckpt;
    struct qt_err err = {0};
    (void)state;
    for (size_t i = 0; i < COUNT; i++)
        ids[i] = (uint32_t)((i * 29 + i * i) % ENCODER_VOCAB);
    assert_int_equal(qt_ckpt_open(&ckpt, dir, &err), 0);
    struct qt_weights ref = qt_weights_of_ckpt(ckpt), w = world.perturbed;
    w.dir = dir;
    w.ctx = &ref;
    final_states(a, &w, ids, RUNS);
    final_states(b, &ref, ids, RUNS);
    for (size_t i = 0; i < FLOATS; i++) {
        error += pow((double)a[i] - (double)b[i], 2);
        norm += pow((double)b[i], 2);
    }
    assert_true(error > 0);
    if (qt_eval(&r, &w, &ref, ids, COUNT, &opt, world.be, &err) < 0)
        fail_msg("%s: %s", err.file, err.reason);
    assert_true(r.hidden && r.has_ref && isnan(r.ppl));
    assert_int_equal(r.windows, RUNS);
    assert_true(fabs(r.hidden_error / sqrt(error / norm) - 1) < 1e-4);
    assert_true(r.hidden_error_se > 0);
    assert_int_equal(qt_eval(&r, &ref, &ref, ids, COUNT, &opt, world.be, &err), 0);
    assert_true(r.hidden_error == 0);
    expect_error("no reference", qt_eval(&r, &ref, NULL, ids, COUNT, &opt, world.be, &err),
                 QT_E_UNSUPPORTED, "with --ref", &err);
    kept.logits = true;
    expect_error("logits", qt_eval(&r, &ref, &ref, ids, COUNT, &kept, world.be, &err),
                 QT_E_UNSUPPORTED, "no logits", &err);
    qt_ckpt_close(ckpt);
    fixture_remove(dir);
    free(a);
    free(b);
}

static void test_other_vocabulary(void **state)
{
    const char *path = fixture_shared("checkpoints/tiny-llama");
    const struct qt_eval_options opt = {.seqlen = 16, .windows = 1};
    struct qt_eval_report r;
    struct qt_ckpt *ckpt = NULL;
    struct qt_err err;
    (void)state;
    if (!path)
        skip();
    assert_int_equal(qt_ckpt_open(&ckpt, path, &err), 0);
    const struct qt_weights ref = qt_weights_of_ckpt(ckpt);
    expect_error("vocabulary", eval(&r, &world.exact, &ref, &opt, &err), QT_E_INPUT,
                 "a vocabulary of 4096 tokens, the model 1024: they must agree", &err);
    qt_ckpt_close(ckpt);
}

/* eval reports the failure of any allocation and leaks nothing (checked by AddressSanitizer). */
static void test_out_of_memory(void **state)
{
    const struct qt_eval_options opt = {.seqlen = 4, .windows = 1};
    struct qt_eval_report r;
    struct qt_err err;
    long n = 0;
    int rc;
    (void)state;
    do {
        qt_mem_fail_after(n);
        rc = eval(&r, &world.exact, &world.exact, &opt, &err);
        qt_mem_fail_after(-1);
        if (rc != QT_OK && rc != QT_E_RESOURCE)
            fail_msg("allocation %ld: %s", n, err.reason);
        n += n < 40 ? 1 : 11; /* every allocation of the setup, then samples */
    } while (rc != QT_OK);
    assert_true(n > 40);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_published_perplexity),
        cmocka_unit_test(test_definition),
        cmocka_unit_test(test_a_model_does_not_differ_from_itself),
        cmocka_unit_test(test_batches_and_threads_change_nothing),
        cmocka_unit_test(test_progress_ends_at_the_total),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_logits_that_are_no_numbers),
        cmocka_unit_test(test_masked_loss),
        cmocka_unit_test(test_hidden_error),
        cmocka_unit_test(test_other_vocabulary),
        cmocka_unit_test(test_out_of_memory),
    };
    return cmocka_run_group_tests(tests, open_world, close_world);
}
