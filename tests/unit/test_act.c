/* Quantized activations: rounding against a plain reference, the activation plan, and a model with
 * permuted weights against the source model. The seed is printed; set QT_SEED to repeat a run. */
#include "backend_fixture.h"
#include "fixture.h"

#include "kernels/kernels.h"
#include "pack/activations/plan.h"
#include "pack/schemes/scheme.h"
#include "random.h"
#include "tests/rotate.h"

static float random_float(void) /* heavy tails */
{
    float u = (float)random_u32() / 4294967296.0f * 2 - 1;
    return u * u * u * 8;
}

enum { MAX_K = 300 };

/* ---- rounding ------------------------------------------------------------------------------- */

static struct qt_act random_act(size_t k, enum qt_act_scales scales)
{
    struct qt_act a;
    assert_int_equal(qt_act_new(&a, k, 8, NULL), QT_OK);
    a.scales = scales;
    a.clip = 0.7f + 0.05f * (float)(random_u32() % 7);
    a.rotate = random_u32() % 2;
    for (size_t i = k - 1; i > 0; i--) {
        size_t j = random_u32() % (i + 1);
        uint32_t t = a.order[i];
        a.order[i] = a.order[j];
        a.order[j] = t;
    }
    for (size_t i = 0; i < k; i++)
        a.factor[i] = ldexpf(1, -(int)(random_u32() % 4));
    for (size_t b = 0; b < qt_ceil_div(k, QT_ACT_BLOCK) && scales != QT_ACT_SCALES_ROW; b++)
        a.bits[b] = random_u32() % 2 ? 4 : 8;
    return a;
}

/* Channel p of a token v[k] in packed order, scale and rotation, rounded as pack.h defines. */
static float rounded(const struct qt_act *a, const float *v, size_t p)
{
    size_t first = p / QT_ACT_BLOCK * QT_ACT_BLOCK, end = qt_min_size(first + QT_ACT_BLOCK, a->k);
    unsigned bits = a->bits[p / QT_ACT_BLOCK];
    float top = 0, all = 0, limit = bits == 4 ? 7 : 127, s;
    for (size_t i = 0; i < a->k; i++) {
        all = fmaxf(all, fabsf(v[i]));
        top = i >= first && i < end ? fmaxf(top, fabsf(v[i])) : top;
    }
    float unit = all * (float)(1.0 / 127);
    if (a->scales == QT_ACT_SCALES_BLOCK)
        s = top * (bits == 4 ? (float)((double)a->clip / 7) : (float)(1.0 / 127));
    else if (a->scales == QT_ACT_SCALES_ROW || bits == 8 || unit == 0)
        s = unit;
    else
        s = unit * fminf(fmaxf(rintf(top * a->clip / (7 * unit)), 1), 18);
    if (s < 0x1p-120f)
        return 0;
    float q = (float)rint((double)v[p] * (1 / s));
    return s * fminf(fmaxf(q, -limit), limit);
}

/* stored[k]: a token after rounding, in packed order, scale and rotation; y[k]: in source order. */
static void round_reference(float *stored, float *y, const struct qt_act *a, const float *x)
{
    float v[MAX_K];
    for (size_t p = 0; p < a->k; p++)
        v[p] = x[a->order[p]] * a->factor[p];
    if (a->rotate)
        rotate_reference(v, a->k);
    for (size_t p = 0; p < a->k; p++)
        stored[p] = rounded(a, v, p);
    memcpy(v, stored, a->k * sizeof *v);
    if (a->rotate)
        rotate_reference(v, a->k);
    for (size_t p = 0; p < a->k; p++)
        y[a->order[p]] = v[p] / a->factor[p];
}

/* The documented order of operations bit for bit, the Hadamard matrix, and that it is its own
 * inverse. */
static void rotation_is_hadamard(void **state)
{
    (void)state;
    for (size_t k = 1; k <= MAX_K; k++) {
        float x[MAX_K], y[MAX_K], z[MAX_K];
        for (size_t i = 0; i < k; i++)
            x[i] = y[i] = z[i] = random_float();
        qt_rotate(y, k);
        rotate_reference(z, k);
        assert_memory_equal(y, z, k * sizeof *y);
        for (size_t i = 0; i < k; i++) {
            double want = 0, size = 0;
            for (size_t j = 0; j < k; j++) {
                const double term = rotate_entry(k, i, j) * (double)x[j];
                want += term;
                size += fabs(term);
            }
            assert_true(fabs((double)y[i] - want) <= 1e-6 * size);
        }
        qt_rotate(y, k);
        for (size_t i = 0; i < k; i++)
            assert_true(fabsf(y[i] - x[i]) <= 1e-5f * 8);
    }
}

static void rounding_is_as_defined(void **state)
{
    static const size_t sizes[] = {1, 5, 127, 128, 129, 256, MAX_K};
    (void)state;
    for (int round = 0; round < 60; round++) {
        size_t k = sizes[random_u32() % 7], m = 1 + random_u32() % 130;
        struct qt_act a = random_act(k, (enum qt_act_scales)(round % 3));
        float *x = calloc(m * k, sizeof *x), *y = calloc(m * k, sizeof *y);
        float *z = calloc(m * k, sizeof *z);
        for (size_t i = 0; i < m * k; i++)
            x[i] = i / k % 11 == 3 ? 0 : random_float();
        for (size_t i = 0; i < k && m > 2; i++) { /* far outside the range of FP16 */
            x[i] *= 1e-38f;
            x[k + i] *= 1e30f;
        }
        assert_int_equal(qt_act_apply(y, x, m, &a, NULL), QT_OK);
        assert_int_equal(qt_act_apply_stored(z, x, m, &a, NULL), QT_OK);
        for (size_t t = 0; t < m; t++) {
            float stored[MAX_K], want[MAX_K];
            round_reference(stored, want, &a, x + t * k);
            for (size_t p = 0; p < k; p++)
                if (want[p] != y[t * k + p] || stored[p] != z[t * k + p])
                    fail_msg("k %zu, token %zu, channel %zu: %a, stored %a, expected %a, %a", k, t,
                             p, (double)y[t * k + p], (double)z[t * k + p], (double)want[p],
                             (double)stored[p]);
        }
        assert_int_equal(qt_act_apply(x, x, m, &a, NULL), QT_OK); /* in place */
        assert_memory_equal(x, y, m * k * sizeof *x);
        free(z);
        qt_act_free(&a);
        free(x);
        free(y);
    }
}

/* Non-finite values among zeros, among finite values, and a token of nothing else. */
static void nonfinite_values_become_nan(void **state)
{
    enum { K = 300, M = 4 };
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    (void)state;
    for (int round = 0; round < 18; round++) {
        struct qt_act a = random_act(K, (enum qt_act_scales)(round % 3));
        float x[M * K], y[M * K], b = bad[round / 3 % 3];
        const size_t at = random_u32() % K;
        for (size_t i = 0; i < M * K; i++)
            x[i] = i / K == 0 ? 0 : i / K == 2 ? b : random_float();
        x[at] = x[K + at] = b;
        assert_int_equal(qt_act_apply(y, x, M, &a, NULL), QT_OK);
        for (size_t i = 0; i < M * K; i++) {
            assert_true(isfinite(x[i]) || isnan(y[i]));
            assert_true(i / K < M - 1 || isfinite(y[i])); /* a token of finite values */
        }
        qt_act_free(&a);
    }
}

/* ---- plans ---------------------------------------------------------------------------------- */

enum { SEQLEN = 32, SAMPLES = 6 };

struct world {
    struct qt_ckpt *ckpt;
    struct qt_weights source; /* the checkpoint with synthetic outliers */
    struct qt_model *model;
    struct qt_backend *be;
    struct qt_plan plan;
    uint32_t ids[SEQLEN * SAMPLES];
    struct qt_calibration data;
    struct qt_quantize_options opt;
    struct qt_act_plan acts;
    struct qt_err err;
};

static const struct qt_linear *find_linear(const struct world *w, const char *name, bool bias)
{
    for (size_t l = 0; l < qt_model_info(w->model)->layers; l++) {
        const struct qt_linear *linear;
        size_t n = qt_model_linears(&linear, w->model, l);
        for (size_t i = 0; i < n; i++) {
            size_t stem = strlen(linear[i].weight) - strlen("weight");
            if (strncmp(linear[i].weight, name, stem) == 0 &&
                strcmp(name + stem, bias ? "bias" : "weight") == 0)
                return &linear[i];
        }
    }
    return NULL;
}

/* Creates outliers that do not change the model: multiplies every seventh weight of the norms in
 * front of sublayers by 64 and divides the matching columns by 64. Some other norm weights become
 * 0, so that their channels are equal. */
static int outlier_load(void *ctx, const char *name, float *dst, struct qt_err *err)
{
    const struct world *w = ctx;
    struct qt_weights plain = qt_weights_of_ckpt(w->ckpt);
    const struct qt_linear *linear = w->model ? find_linear(w, name, false) : NULL;
    int rc = plain.load(plain.ctx, name, dst, err), ndim;
    size_t shape[QT_MAX_DIMS];
    plain.shape(plain.ctx, name, &ndim, shape);
    if (rc == QT_OK && strstr(name, "layernorm.weight"))
        for (size_t i = 0; i < shape[0]; i++)
            dst[i] *= i % 7 == 3 ? 64 : i % 14 != 5;
    if (rc == QT_OK && linear && linear->input % 2 == 0)
        for (size_t i = 3; i < shape[0] * shape[1]; i++)
            dst[i] /= i % shape[1] % 7 == 3 ? 64 : 1;
    return rc;
}

static bool outlier_shape(void *ctx, const char *name, int *ndim, size_t shape[QT_MAX_DIMS])
{
    struct qt_weights plain = qt_weights_of_ckpt(((struct world *)ctx)->ckpt);
    return plain.shape(plain.ctx, name, ndim, shape);
}

static void world_open(struct world *w, const char *dir, const char *scheme)
{
    struct qt_plan_options opt = {.scheme = scheme, .calibrated = true};
    *w = (struct world){0};
    expect_ok(dir, qt_ckpt_open(&w->ckpt, dir, &w->err), &w->err);
    w->source = (struct qt_weights){
        .dir = qt_ckpt_dir(w->ckpt), .ctx = w, .shape = outlier_shape, .load = outlier_load};
    expect_ok(dir, qt_model_open(&w->model, &w->source, &w->err), &w->err);
    expect_ok(dir, qt_backend_cpu_open(&w->be, &w->err), &w->err);
    expect_ok(dir, qt_plan_new(&w->plan, w->ckpt, &opt, &w->err), &w->err);
    for (size_t i = 0; i < SEQLEN * SAMPLES; i++)
        w->ids[i] = random_u32() % (uint32_t)qt_model_info(w->model)->vocab;
    w->data = (struct qt_calibration){
        .ids = w->ids, .samples = SAMPLES, .seqlen = SEQLEN, .backend = w->be};
    w->opt = (struct qt_quantize_options){.calibration = &w->data, .out_dir = "out"};
    expect_ok(dir, qt_act_plan_new(&w->acts, &w->plan, w->model, &w->source, &w->opt, &w->err),
              &w->err);
}

static void world_close(struct world *w)
{
    qt_act_plan_free(&w->acts);
    qt_plan_free(&w->plan);
    qt_model_close(w->model);
    w->be->close(w->be);
    qt_ckpt_close(w->ckpt);
}

/* Returns the logits of all tokens. */
static float *run_model(struct world *w, const struct qt_weights *weights)
{
    size_t width = qt_model_info(w->model)->hidden, m = SEQLEN * SAMPLES;
    float *hidden = calloc(m * width, sizeof *hidden);
    struct qt_embed_head *head;
    expect_ok("head", qt_embed_head_open(&head, w->model, &w->source, w->be, &w->err), &w->err);
    expect_ok("embed", qt_embed_tokens(head, hidden, w->ids, m, SEQLEN, &w->err), &w->err);
    for (size_t l = 0; l < qt_model_info(w->model)->layers; l++) {
        struct qt_layer *layer;
        expect_ok("open", qt_layer_open(&layer, w->model, l, weights, w->be, &w->err), &w->err);
        expect_ok("run", qt_layer_run(layer, hidden, m, SEQLEN, NULL, &w->err), &w->err);
        qt_layer_close(layer);
    }
    size_t vocab = qt_model_info(w->model)->vocab;
    float *logits = calloc(m * vocab, sizeof *logits);
    expect_ok("logits", qt_head_logits(head, logits, hidden, m, &w->err), &w->err);
    qt_embed_head_close(head);
    free(hidden);
    return logits;
}

/* All channel blocks have 8 bits, but the plan does not know it in advance, so all are sorted. */
#define EVERY_INPUT_PERMUTED "w4ax:a8max=1,bound=1e-9"

/* Loads matrices and biases with rows and columns in stored order and scale. */
static int arranged_load(void *ctx, const char *name, float *dst, struct qt_err *err)
{
    struct world *w = ctx;
    const struct qt_linear *linear = find_linear(w, name, false);
    bool bias = !linear && (linear = find_linear(w, name, true)) != NULL;
    struct qt_arrange a;
    int rc = w->source.load(w->source.ctx, name, dst, err);
    if (rc < 0 || !linear)
        return rc;
    expect_ok(name, qt_act_plan_arrange(&a, &w->acts, w->model, linear, err), err);
    size_t k = bias ? 1 : linear->k;
    float *copy = calloc(linear->n * k, sizeof *copy);
    memcpy(copy, dst, linear->n * k * sizeof *copy);
    for (size_t r = 0; r < linear->n; r++)
        for (size_t p = 0; p < k; p++) {
            size_t row = a.row_order ? a.row_order[r] : r, col = bias ? 0 : a.input->order[p];
            dst[r * k + p] = copy[row * k + col] * (a.row_factor ? a.row_factor[r] : 1) /
                             (bias ? 1 : a.input->factor[p]);
        }
    free(copy);
    qt_act_plan_arrange_free(&a);
    return QT_OK;
}

/* Gathers the inputs that follow a norm; other inputs are in stored order already. */
static int gather_input(void *ctx, struct qt_backend *be, float *y, const float *x,
                        const struct qt_linear *linear, size_t m, size_t k, struct qt_err *err)
{
    const struct world *w = ctx;
    const struct qt_act *a = qt_act_plan_find(&w->acts, linear->layer, linear->input);
    (void)be; /* backend memory is host memory */
    (void)err;
    for (size_t t = 0; t < m; t++)
        for (size_t p = 0; p < k; p++)
            y[t * k + p] = linear->input % 2 ? x[t * k + p] : x[t * k + a->order[p]] * a->factor[p];
    return QT_OK;
}

static bool is_permuted(const struct qt_act *a)
{
    for (size_t i = 0; i < a->k; i++)
        if (a->order[i] != i)
            return true;
    return false;
}

/*
 * Linear and attention with FP64 sums. Rounded to FP32, such sums do not depend on the order of
 * additions, except for the last bit in rare cases. FP32 sums of permuted channels would differ
 * more, and the differences would grow with the condition of a token.
 */
static int exact_linear(struct qt_backend *be, float *y, const float *x, const float *w,
                        const float *bias, size_t m, size_t n, size_t k, struct qt_err *err)
{
    (void)be;
    (void)err;
    for (size_t t = 0; t < m; t++)
        for (size_t r = 0; r < n; r++) {
            double sum = bias ? bias[r] : 0;
            for (size_t i = 0; i < k; i++)
                sum += (double)x[t * k + i] * w[r * k + i];
            y[t * n + r] = (float)sum;
        }
    return QT_OK;
}

static int exact_attention(struct qt_backend *be, float *y, const float *q, const float *k,
                           const float *v, size_t m, const struct qt_attention *a,
                           struct qt_err *err)
{
    size_t count = m * a->heads * a->head_dim;
    double *sums = calloc(count, sizeof *sums);
    (void)be;
    (void)err;
    assert_non_null(sums);
    attention_reference(sums, q, k, v, m, a);
    for (size_t i = 0; i < count; i++)
        y[i] = (float)sums[i];
    free(sums);
    return QT_OK;
}

static void permuted_model_equals_source(void **state)
{
    static const char *const models[] = {
        "llama", "qwen2",   "qwen3_biased", "opt",     "llama_linear_biased", "llama3",
        "phi3",  "granite", "olmo2_biased", "exaone4", "opt_norm_after",      "glm4_old_keys"};
    (void)state;
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        const char *dir = fixture_path("tests/golden/models", models[i]);
        struct world w;
        world_open(&w, dir, EVERY_INPUT_PERMUTED);
        w.be->linear = exact_linear;
        w.be->attention = exact_attention;
        struct qt_weights arranged = w.source;
        arranged.load = arranged_load;
        arranged.fake_quant = (struct qt_fake_quant){.ctx = &w, .input = gather_input};
        for (int input = 0; input < QT_INPUTS; input++)
            assert_true(is_permuted(qt_act_plan_find(&w.acts, 0, input)));
        float *a = run_model(&w, &w.source), *b = run_model(&w, &arranged);
        size_t count = SEQLEN * SAMPLES * qt_model_info(w.model)->vocab;
        for (size_t j = 0; j < count; j++)
            if (!(fabsf(a[j] - b[j]) <= 1e-5f * fmaxf(1, fabsf(a[j]))))
                fail_msg("%s: logit %zu: %g, not %g", models[i], j, (double)b[j], (double)a[j]);
        free(a);
        free(b);
        world_close(&w);
    }
}

/* Returns the fraction of multiply-accumulates with `bits`. */
static double mac_fraction(const struct world *w, unsigned bits)
{
    const struct qt_linear *linear;
    double all = 0, some = 0;
    for (size_t l = 0; l < qt_model_info(w->model)->layers; l++)
        for (size_t i = 0, n = qt_model_linears(&linear, w->model, l); i < n; i++) {
            const struct qt_act *a = qt_act_plan_find(&w->acts, l, linear[i].input);
            for (size_t p = 0; p < a->k; p++, all += (double)linear[i].n)
                some += a->bits[p / QT_ACT_BLOCK] == bits ? (double)linear[i].n : 0;
        }
    return some / all;
}

static void budget_is_kept(void **state)
{
    static const struct {
        const char *scheme;
        double least, most;
    } cases[] = {
        {"w4ax:a8max=0", 0, 0}, {"w4ax:a8max=0.3", 0.1, 0.3},      {"w4ax:a8max=0.6", 0.4, 0.6},
        {"w4ax:a8max=1", 1, 1}, {"w4ax:a8max=1,bound=1000", 0, 0}, {"w4ax:scales=row", 1, 1},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct world w;
        world_open(&w, "tests/golden/models/llama", cases[i].scheme);
        double s = mac_fraction(&w, 8);
        assert_true(s >= cases[i].least && s <= cases[i].most + 1e-9);
        json_t *reported = json_object_get(w.acts.report, "a8_macs");
        assert_true(fabs(json_real_value(reported) - s) < 1e-9);
        world_close(&w);
    }
}

/* Without factors, outlier channels come first. */
static void outliers_share_blocks(void **state)
{
    struct world w;
    (void)state;
    world_open(&w, "tests/golden/models/llama", EVERY_INPUT_PERMUTED ",smooth=0");
    const struct qt_act *a = qt_act_plan_find(&w.acts, 0, 0);
    for (size_t i = 0; i < a->k; i++) {
        assert_true(a->order[i] % 7 != 3 || i < 8);
        assert_true(a->factor[i] == 1);
    }
    world_close(&w);
}

/* Where no channel block or every one has 8 bits, the order is that of the source, and the factors
 * undo the outliers: those are 64 times as large as others, and their weights 1/64. */
static void outliers_are_scaled(void **state)
{
    static const char *const schemes[] = {"w4ax:a8max=0", "w4ax:a8max=1", "w4ax:scales=row"};
    (void)state;
    for (size_t s = 0; s < 3; s++) {
        struct world w;
        world_open(&w, "tests/golden/models/llama", schemes[s]);
        const struct qt_act *a = qt_act_plan_find(&w.acts, 0, 0);
        assert_false(is_permuted(a));
        for (size_t i = 0; i < a->k; i++)
            if (i % 7 == 3)
                assert_true(a->factor[i] >= 1.0f / 256 && a->factor[i] <= 1.0f / 16);
            else
                assert_true(a->factor[i] >= 1.0f / 4 && a->factor[i] <= 4);
        world_close(&w);
    }
}

static int arrange_inputs(struct qt_backend *be, float *y, const float *x, size_t m,
                          const struct qt_act *act, struct qt_err *err)
{
    (void)be;
    return qt_act_arrange(y, x, m, act, err);
}

static void inconsistent_schemes_are_refused(void **state)
{
    static const struct {
        const char *regex, *spec, *message;
    } cases[] = {{"k_proj", "nf4",
                  "model.safetensors: tensor model.layers.0.self_attn.k_proj.weight: either all or "
                  "none of the linears"},
                 {"down_proj", "w4ax:smooth=8", "the same parameters"},
                 {"embed_tokens", "w4ax",
                  "model.safetensors: tensor model.embed_tokens.weight: is w4ax, but is not a "
                  "linear weight of a decoder layer"}};
    struct world w;
    (void)state;
    world_open(&w, "tests/golden/models/llama", "w4ax");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct qt_rule rule = {cases[i].regex, cases[i].spec};
        struct qt_plan_options opt = {
            .scheme = "w4ax", .rules = &rule, .nrules = 1, .calibrated = true};
        struct qt_act_plan acts;
        struct qt_plan plan;
        expect_ok("plan", qt_plan_new(&plan, w.ckpt, &opt, &w.err), &w.err);
        expect_error(cases[i].regex,
                     qt_act_plan_new(&acts, &plan, w.model, &w.source, &w.opt, &w.err),
                     QT_E_UNSUPPORTED, cases[i].message, &w.err);
        qt_plan_free(&plan);
    }
    world_close(&w);
}

static void allocation_failures(void **state)
{
    struct world w;
    bool failed = true;
    (void)state;
    world_open(&w, "tests/golden/models/llama", "w4ax");
    for (long n = 0; failed; n += 1 + n / 16) {
        struct qt_act_plan acts;
        qt_mem_fail_after(n);
        int rc = qt_act_plan_new(&acts, &w.plan, w.model, &w.source, &w.opt, NULL);
        qt_mem_fail_after(-1);
        failed = rc < 0;
        assert_int_equal(rc, failed ? QT_E_RESOURCE : QT_OK);
        if (!failed)
            qt_act_plan_free(&acts);
        assert_true(n < 100000);
    }
    const struct qt_linear *v = find_linear(&w, "model.layers.0.self_attn.v_proj.weight", false);
    failed = true;
    for (long n = 0; failed; n++) {
        struct qt_arrange arrange;
        qt_mem_fail_after(n);
        int rc = qt_act_plan_arrange(&arrange, &w.acts, w.model, v, NULL);
        qt_mem_fail_after(-1);
        failed = rc < 0;
        assert_int_equal(rc, failed ? QT_E_RESOURCE : QT_OK);
        qt_act_plan_arrange_free(&arrange);
        assert_true(n < 100);
    }
    world_close(&w);
}

/* ---- the packed form ------------------------------------------------------------------------ */

static void hostile_sections_are_refused(void **state)
{
    enum { N = 20, K = 150 };
    float w[N * K];
    struct qt_err err = {0};
    struct qt_matrix m = {w, QT_F32, N, K, "f", "t"};
    (void)state;
    for (size_t i = 0; i < N * K; i++)
        w[i] = random_float();
    static const struct {
        const char *spec, *section;
        size_t at;
        unsigned char value;
        const char *message; /* of check_values, or of qt_packed_check_repack */
    } cases[] = {{"w4ax", "bits", 1, 5, "not 4 or 8"},
                 {"w4ax", "clip", 3, 0xbf, "clip ratio"},
                 {"w4ax", "clip", 3, 0x7f, "clip ratio"},
                 {"w4ax", "col_order", 0, 7, "permutation"},
                 {"w4ax", "col_order", 3, 1, "permutation"},
                 {"w4ax", "row_order", 76, 18, "permutation"},
                 {"w4ax", "col_exp2", 9, 100, "outside -60 to 60"},
                 {"w4ax", "row_exp2", 0, 0x80, "outside -60 to 60"},
                 {"w4ax", "scale", 1, 0x7c, "not finite"},
                 {"w4ax:scales=int", "sub", 0, 0, "row 0, channel block 0 is 0, not 1 to 15"},
                 {"w4ax:scales=int", "sub", 54, 16, "row 19, channel block 1 is 16, not 1 to 15"},
                 {"w4ax:scales=int", "sub", 56, 1, "differ from their codes packed again"},
                 {"w4ax:scales=int", "scale", 63, 0x3c, "differ from their codes packed again"},
                 {"w4ax:scales=row", "scale", 63, 0x3c, "differ from their codes packed again"},
                 {"w4ax", "plane0", 3071, 0x77, "differ from their codes packed again"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct qt_spec spec;
        struct qt_packed p;
        expect_ok("spec", qt_spec_parse(&spec, cases[i].spec, &err), &err);
        expect_ok("quantize", qt_packed_quantize(&p, &spec, &m, NULL, NULL, &err), &err);
        expect_ok("values", spec.scheme->check_values(&p, &err), &err);
        expect_ok("repack", qt_packed_check_repack(&p, "f", "t", &err), &err);
        qt_packed_section(&p, cases[i].section)->data[cases[i].at] = cases[i].value;
        int rc = spec.scheme->check_values(&p, &err);
        if (rc == QT_OK)
            rc = qt_packed_check_repack(&p, "f", "t", &err);
        expect_error(cases[i].section, rc, QT_E_INPUT, cases[i].message, &err);
        qt_packed_free(&p);
    }
}

/* Decoding restores source order and scale: only rounding errors remain. */
static void check_decoding(const char *scheme)
{
    enum { N = 37, K = 300 };
    static float w[N * K], q[N * K], stored[N * K];
    float factor[N], row[K];
    uint32_t order[N];
    struct qt_act in = random_act(K, QT_ACT_SCALES_BLOCK);
    struct qt_arrange arrange = {&in, order, factor};
    struct qt_spec spec;
    struct qt_packed p;
    struct qt_error error, again;
    struct qt_err err = {0};
    struct qt_matrix m = {w, QT_F32, N, K, "f", "t"};
    for (size_t i = 0; i < N; i++) {
        order[i] = (uint32_t)((i * 5 + 3) % N);
        factor[i] = ldexpf(1, (int)(random_u32() % 7) - 3);
    }
    for (size_t i = 0; i < N * K; i++)
        w[i] = random_float() / 16;
    expect_ok("spec", qt_spec_parse(&spec, scheme, &err), &err);
    spec.arrange = &arrange;
    qt_act_set_spec(&in, &spec);
    expect_ok("quantize", qt_packed_quantize(&p, &spec, &m, NULL, &error, &err), &err);
    expect_ok("weights", qt_packed_weights(q, &p, &err), &err);
    double e2 = 0;
    for (size_t i = 0; i < N * K; i++)
        e2 += pow((double)(q[i] - w[i]), 2);
    assert_true(fabs(e2 - error.sum_e2) <= 1e-4 * e2);
    assert_true(error.sum_e2 < 0.15 * error.sum_w2); /* random factors cost accuracy */
    /* The stored weights by the definition in pack/activations/arrange.c. */
    expect_ok("stored", qt_packed_decode_stored(stored, &p, 0, N, &err), &err);
    for (size_t r = 0; r < N; r++) {
        for (size_t i = 0; i < K; i++)
            row[i] = q[order[r] * K + in.order[i]] * factor[r] / in.factor[i];
        if (in.rotate)
            rotate_reference(row, K);
        for (size_t i = 0; i < K; i++)
            assert_true(fabsf(row[i] - stored[r * K + i]) <= 1e-4f);
    }
    expect_ok("compare", qt_packed_compare(&again, &p, &m, &err), &err);
    assert_memory_equal(&again, &error, sizeof again);
    expect_ok("repack", qt_packed_check_repack(&p, "f", "t", &err), &err);
    for (size_t r = 0; r < N; r++)
        assert_int_equal(qt_packed_source_row(&p, r), order[r]);
    qt_packed_free(&p);
    qt_act_free(&in);
}

/* On a backend the rows are the same, bit for bit, and restored to what decoding gives. */
static void arranged_on_a_backend(void **state)
{
    enum { N = 20, K = 300 };
    struct qt_err err = {0};
    struct qt_backend *be;
    struct qt_act in = random_act(K, QT_ACT_SCALES_BLOCK);
    (void)state;
    expect_ok("backend", qt_backend_cpu_open(&be, &err), &err);
    be->arrange_inputs = arrange_inputs;
    for (int rotated = 0; rotated < 2; rotated++) {
        uint32_t order[N];
        float factor[N], *w = malloc(N * K * sizeof *w), *t = malloc(N * K * sizeof *t),
                         *q = malloc(N * K * sizeof *q), row[K];
        struct qt_arrange a = {.input = &in, .row_order = order, .row_factor = factor};
        const struct qt_matrix m = {.data = w, .dtype = QT_F32, .n = N, .k = K};
        struct qt_spec spec;
        struct qt_packed p;
        for (size_t i = 0; i < N; i++) {
            order[i] = (uint32_t)((7 * i + 3) % N);
            factor[i] = ldexpf(1, (int)(random_u32() % 5) - 2);
        }
        for (size_t i = 0; i < N * K; i++)
            w[i] = (float)normal();
        expect_ok("spec", qt_spec_parse(&spec, rotated ? "w4ax" : "w4ax:rotate=none", &err), &err);
        spec.arrange = &a;
        expect_ok("quantize", qt_packed_quantize(&p, &spec, &m, NULL, NULL, &err), &err);
        expect_ok("arrange", qt_arrange_on(be, t, w, &p, &err), &err);
        for (size_t r = 0; r < N; r++) {
            qt_arrange_row(row, &p, w + order[r] * K, r);
            assert_memory_equal(row, t + r * K, sizeof row);
        }
        expect_ok("decode", qt_packed_decode_stored(t, &p, 0, N, &err), &err);
        expect_ok("restore", qt_arrange_restore_on(be, w, t, &p, &err), &err);
        expect_ok("weights", qt_packed_weights(q, &p, &err), &err);
        assert_memory_equal(w, q, N * K * sizeof *w);
        qt_packed_free(&p);
        free(w), free(t), free(q);
    }
    qt_act_free(&in);
    be->close(be);
}

static void decoding_restores_the_source(void **state)
{
    (void)state;
    check_decoding("w4ax");
    check_decoding("w4ax:rotate=none");
    check_decoding("w4ax:scales=int");
    check_decoding("w4ax:scales=row");
}

int main(void)
{
    seed_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rotation_is_hadamard),
        cmocka_unit_test(rounding_is_as_defined),
        cmocka_unit_test(nonfinite_values_become_nan),
        cmocka_unit_test(permuted_model_equals_source),
        cmocka_unit_test(budget_is_kept),
        cmocka_unit_test(outliers_share_blocks),
        cmocka_unit_test(outliers_are_scaled),
        cmocka_unit_test(inconsistent_schemes_are_refused),
        cmocka_unit_test(allocation_failures),
        cmocka_unit_test(hostile_sections_are_refused),
        cmocka_unit_test(decoding_restores_the_source),
        cmocka_unit_test(arranged_on_a_backend),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
