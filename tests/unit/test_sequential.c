/*
 * Sequential calibration, on models whose linears change input by input: the sums of every input
 * are compared with naive FP64 sums over what hooks see in whole runs with the weights of that
 * moment.
 */
#include "fixture.h"
#include "random.h"

#include "kernels/kernels.h"
#include "pack/sequential.h"

/* Several chunks; the token count is not a multiple of the chunk size. */
enum { SEQLEN = 44, SAMPLES = 110, TOKENS = SEQLEN * SAMPLES, VOCAB = 97 };

/* The checkpoint's weights. The embedding, the linears of the first `changed` inputs of a layer,
 * and all linears of the layers before it are multiplied by factors near `size`. */
struct changing {
    struct qt_weights source;
    const struct qt_model *model;
    size_t layer;
    int changed;
    float size;
};

static bool is_changed(const struct changing *c, const char *name)
{
    const struct qt_linear *linear;
    for (size_t l = 0; l <= c->layer; l++)
        for (size_t i = 0, n = qt_model_linears(&linear, c->model, l); i < n; i++)
            if (strcmp(linear[i].weight, name) == 0)
                return l < c->layer || linear[i].input < c->changed;
    return false;
}

static bool shape(void *ctx, const char *name, int *ndim, size_t dims[QT_MAX_DIMS])
{
    const struct changing *c = ctx;
    return c->source.shape(c->source.ctx, name, ndim, dims);
}

static int load(void *ctx, const char *name, float *dst, struct qt_err *err)
{
    const struct changing *c = ctx;
    size_t dims[QT_MAX_DIMS];
    uint32_t x = 1;
    int ndim, rc = c->source.load(c->source.ctx, name, dst, err);
    assert_true(shape(ctx, name, &ndim, dims));
    const bool embedding = ndim == 2 && dims[0] == qt_model_info(c->model)->vocab;
    if (rc < 0 || (!embedding && !is_changed(c, name)))
        return rc;
    for (size_t i = 0; i < dims[0] * dims[1]; i++) {
        x = x * 1664525 + 1013904223;
        dst[i] *= c->size * (1 + 0.25f * ((float)(x >> 8) * 0x1p-24f - 0.4f));
    }
    return QT_OK;
}

static bool unchanged(void *ctx, const char *name)
{
    return !is_changed(ctx, name);
}

/* Activations of a whole run through a layer: inputs, and hidden states in front of both sublayers
 * and behind the second. */
struct seen {
    float *x[QT_INPUTS], *states[3];
    size_t k[QT_INPUTS], at[QT_INPUTS];
};

static int keep(void *ctx, int input, const float *x, size_t m, size_t k, struct qt_err *err)
{
    struct seen *s = ctx;
    (void)err;
    if (!s->x[input])
        s->x[input] = malloc(TOKENS * k * sizeof *x);
    memcpy(s->x[input] + s->at[input] * k, x, m * k * sizeof *x);
    s->at[input] += m;
    s->k[input] = k;
    return QT_OK;
}

struct fixture {
    struct qt_ckpt *ckpt;
    struct qt_model *model;
    struct qt_backend *be;
    struct qt_weights source;
    uint32_t ids[TOKENS];
    size_t width;
    struct qt_err err;
};

/* Runs hidden[TOKENS][width] through the layer and records its activations. */
static void watch(struct seen *out, struct fixture *f, float *hidden, size_t layer,
                  const struct qt_weights *w)
{
    const size_t bytes = TOKENS * f->width * sizeof *hidden;
    struct qt_layer *block;
    *out = (struct seen){0};
    expect_ok("open", qt_layer_open(&block, f->model, layer, w, f->be, &f->err), &f->err);
    for (int i = 0; i < 2; i++) {
        out->states[i] = malloc(bytes);
        memcpy(out->states[i], hidden, bytes);
        expect_ok("sublayer",
                  qt_layer_run_sublayer(block, 2 * i, hidden, TOKENS, SEQLEN, NULL, &f->err),
                  &f->err);
    }
    out->states[2] = malloc(bytes);
    memcpy(out->states[2], hidden, bytes);
    float *again = malloc(bytes);
    memcpy(again, out->states[0], bytes);
    expect_ok("run",
              qt_layer_run(block, again, TOKENS, SEQLEN, &(struct qt_hook){out, keep}, &f->err),
              &f->err);
    free(again);
    qt_layer_close(block);
}

static void forget(struct seen *s)
{
    for (int i = 0; i < QT_INPUTS; i++)
        free(s->x[i]);
    for (int i = 0; i < 3; i++)
        free(s->states[i]);
}

/* ---- comparison ----------------------------------------------------------------------------- */

/* Returns the sum of (z - y)[i] x[j]; *unit: its largest possible magnitude. */
static double product(const float *z, const float *y, size_t n, size_t i, const float *x, size_t k,
                      size_t j, double *unit)
{
    double sum = 0, a = 0, b = 0;
    for (size_t t = 0; t < TOKENS; t++) {
        double d = (double)z[t * n + i] - (y ? (double)y[t * n + i] : 0), v = (double)x[t * k + j];
        sum += d * v;
        a += d * d;
        b += v * v;
    }
    *unit = sqrt(a * b);
    return sum;
}

static void expect_near(const char *what, double got, double want, double unit)
{
    if (!(fabs(got - want) <= 2e-4 * unit + 1e-12))
        fail_msg("%s: %g, expected %g (of %g)", what, got, want, unit);
}

/* Compares some entries of the sums of errors z - y. */
static void compare_errors(const char *what, const struct qt_observed *got, const float *z,
                           const float *y, const float *x)
{
    const size_t n = got->errors, k = got->k;
    for (int draw = 0; draw < 300; draw++) {
        size_t i = random_u32() % n, j = random_u32() % k;
        double unit, size, want = product(z, y, n, i, x, k, j, &unit), square = 0;
        /* Differences of values of this size have rounding errors of this size. */
        product(z, NULL, n, i, x, k, j, &size);
        expect_near(what, (double)got->cross[i * k + j], want, unit + 0.01 * size);
        for (size_t t = 0; t < TOKENS; t++) {
            double d = (double)z[t * n + i] - (double)y[t * n + i];
            square += d * d;
        }
        /* Outputs of a ReLU near zero, here below 1e-3, have few significant digits. */
        expect_near(what, got->square[i], square, square + 1e-6);
    }
}

/* The outputs of the only linear with an input, with its weights in the checkpoint, plus the hidden
 * states divided by `scale`; 0: without these. */
static float *outputs_of(struct fixture *f, size_t layer, int input, const struct seen *s,
                         double scale)
{
    const struct qt_linear *linear;
    size_t i = 0;
    qt_model_linears(&linear, f->model, layer);
    while (linear[i].input != input)
        i++;
    const size_t n = linear[i].n, k = linear[i].k;
    float *w = malloc(n * k * sizeof *w), *y = malloc(TOKENS * n * sizeof *y);
    expect_ok("weight", f->source.load(f->source.ctx, linear[i].weight, w, &f->err), &f->err);
    for (size_t t = 0; t < TOKENS; t++)
        for (size_t r = 0; r < n; r++) {
            double sum = scale > 0 ? (double)s->states[input / 2][t * n + r] / scale : 0;
            for (size_t c = 0; c < k; c++)
                sum += (double)s->x[input][t * k + c] * (double)w[r * k + c];
            y[t * n + r] = (float)sum;
        }
    free(w);
    return y;
}

/* divisor[TOKENS]: the RMS of a token's hidden states[TOKENS][width], or of scale (z - y) if that
 * is larger; states NULL: 1. Returns the number of tokens with larger errors. */
static size_t divisors(double *divisor, const float *states, const float *z, const float *y,
                       double scale, size_t width)
{
    size_t count = 0;
    for (size_t t = 0; t < TOKENS; t++) {
        double sum = 0, errors = 0;
        for (size_t i = t * width; i < (t + 1) * width && states; i++) {
            const double d = scale * ((double)z[i] - (double)y[i]);
            sum += (double)states[i] * (double)states[i];
            errors += d * d;
        }
        count += errors > sum;
        divisor[t] = states ? sqrt(fmax(sum, errors) / (double)width) : 1;
    }
    return count;
}

/* x[TOKENS][n] with each token divided by its divisor. */
static float *relative(const float *x, size_t n, const double *divisor)
{
    float *y = malloc(TOKENS * n * sizeof *y);
    for (size_t i = 0; i < TOKENS * n; i++)
        y[i] = (float)((double)x[i] / divisor[i / n]);
    return y;
}

/* Returns the number of tokens whose errors are larger than their hidden states. */
static size_t compare(const struct qt_observed *got, struct fixture *f, size_t layer, int input,
                      const struct seen *now, const struct seen *exact)
{
    const size_t k = now->k[input];
    const double scale = (double)qt_model_output_scale(f->model, layer, input);
    const bool last = input % 2, of_outputs = last && (scale > 0 || f->width < k);
    const float *behind = last && scale > 0 ? exact->states[input / 2 + 1] : NULL;
    float *outputs[] = {of_outputs ? outputs_of(f, layer, input, exact, scale) : NULL,
                        of_outputs ? outputs_of(f, layer, input, now, scale) : NULL};
    double *divisor = malloc(TOKENS * sizeof *divisor), unit;
    const size_t count = divisors(divisor, behind, outputs[0], outputs[1], scale, f->width);
    float *x = relative(now->x[input], k, divisor);
    assert_int_equal(got->tokens, TOKENS);
    assert_int_equal(got->k, k);
    for (int draw = 0; draw < 300; draw++) {
        size_t i = random_u32() % k, j = random_u32() % (i + 1);
        double want = product(x, NULL, k, i, x, k, j, &unit);
        expect_near("H", got->h[i * k + j], want, unit);
    }
    assert_true(got->of_outputs == of_outputs);
    assert_int_equal(got->errors, of_outputs ? f->width : k);
    if (of_outputs) {
        float *z = relative(outputs[0], f->width, divisor);
        float *y = relative(outputs[1], f->width, divisor);
        compare_errors("outputs", got, z, y, x);
        free(z);
        free(y);
    } else
        compare_errors("inputs", got, exact->x[input], x, x);
    free(outputs[0]);
    free(outputs[1]);
    free(divisor);
    free(x);
    return count;
}

/* ---- cases ---------------------------------------------------------------------------------- */

static size_t rooms;

static size_t room(struct qt_backend *be)
{
    (void)be;
    rooms++;
    return SIZE_MAX;
}

/* scale: output multiplier of the sublayers; 0: a norm follows the last linear. size: about the
 * factor of weights that change; 1: errors are smaller than hidden states; otherwise those of some
 * tokens are larger. skipped: an input that is not observed (as if it was finished before). apart:
 * with a backend whose memory is not the host's, where the last inputs of sublayers are kept. */
static void model_case(const char *dir, float scale, float size, int skipped, bool apart)
{
    struct fixture *f = calloc(1, sizeof *f);
    struct qt_sequential *s;
    struct changing c = {.size = size};
    size_t larger = 0, last = 0;
    struct qt_weights now = {.ctx = &c, .shape = shape, .load = load, .unchanged = unchanged};
    expect_ok("ckpt", qt_ckpt_open(&f->ckpt, dir, &f->err), &f->err);
    expect_ok("backend", qt_backend_cpu_open(&f->be, &f->err), &f->err);
    f->source = c.source = qt_weights_of_ckpt(f->ckpt);
    expect_ok("model", qt_model_open(&f->model, &f->source, &f->err), &f->err);
    f->width = qt_model_info(f->model)->hidden;
    c.model = f->model;
    now.dir = f->source.dir;
    for (size_t i = 0; i < TOKENS; i++)
        f->ids[i] = random_u32() % VOCAB;
    const struct qt_calibration data = {
        .ids = f->ids, .samples = SAMPLES, .seqlen = SEQLEN, .backend = f->be};
    float *hidden = malloc(TOKENS * f->width * sizeof *hidden);
    float *reference = malloc(TOKENS * f->width * sizeof *hidden);
    expect_ok("embed",
              qt_model_embed(hidden, f->model, &now, f->be, f->ids, TOKENS, SEQLEN, &f->err),
              &f->err);
    expect_ok(
        "embed",
        qt_model_embed(reference, f->model, &f->source, f->be, f->ids, TOKENS, SEQLEN, &f->err),
        &f->err);
    f->be->host = !apart;
    f->be->room = apart ? room : NULL;
    rooms = 0;
    expect_ok("open", qt_sequential_open(&s, &f->source, &now, &data, NULL, &f->err), &f->err);
    for (size_t layer = 0; layer < qt_model_info(f->model)->layers; layer++) {
        struct changing all = {f->source, f->model, layer, QT_INPUTS, size};
        struct seen rounded, exact;
        struct qt_weights final = now;
        final.ctx = &all;
        watch(&rounded, f, hidden, layer, &final);
        watch(&exact, f, reference, layer, &f->source);
        c.layer = layer;
        c.changed = 0;
        expect_ok("enter", qt_sequential_enter(s, layer, &now, &f->err), &f->err);
        for (int input = 0; input < QT_INPUTS; input++) {
            struct qt_observed seen;
            assert_true(qt_model_output_scale(f->model, 0, input) == (input % 2 ? scale : 0));
            if (input != skipped) {
                expect_ok("observe", qt_sequential_observe(&seen, s, input, NULL, false, &f->err),
                          &f->err);
                larger += compare(&seen, f, layer, input, &rounded, &exact);
                last += input % 2 ? TOKENS : 0;
            }
            c.changed = input + 1;
            expect_ok("reload", qt_sequential_reload(s, input, &now, &f->err), &f->err);
            if (input % 2)
                expect_ok("advance", qt_sequential_advance(s, input, &f->err), &f->err);
        }
        forget(&rounded);
        forget(&exact);
    }
    assert_true(apart == (rooms > 0));
    assert_true(size == 1 ? 10 * larger < last : 0 < larger && larger < last);
    qt_sequential_close(s);
    qt_model_close(f->model);
    qt_ckpt_close(f->ckpt);
    f->be->close(f->be);
    free(hidden);
    free(reference);
    free(f);
}

static void sums_are_of_the_moment(void **state)
{
    (void)state;
    model_case("tests/golden/models/llama", 1, 1, -1, false);
    model_case("tests/golden/models/qwen3", 1, 1, 1, false);
    model_case("tests/golden/models/opt", 1, 1, 3, false);
    model_case("tests/golden/models/opt_norm_after", 1, 1, 0, false);
    model_case("tests/golden/models/granite", 0.4f, 1, -1, false);
    model_case("tests/golden/models/granite", 0.4f, 1, -1, true);
    model_case("tests/golden/models/llama", 1, 1.5f, -1, false);
    model_case("tests/golden/models/granite", 0.4f, 1.5f, -1, false);
    model_case("tests/golden/models/opt_norm_after", 1, 1, 0, true);
}

/* Brings all rows of m[n][k] to the stored order, scale and rotation. */
static float *arranged_rows(const double *m, size_t n, size_t k, bool transposed,
                            const struct qt_act *act)
{
    struct qt_err err = {0};
    float *x = malloc(n * k * sizeof *x), *y = malloc(n * k * sizeof *y);
    for (size_t i = 0; i < n * k; i++)
        x[i] = (float)m[transposed ? i % k * n + i / k : i];
    expect_ok("arrange", qt_act_arrange(y, x, n, act, &err), &err);
    free(x);
    return y;
}

/* Sums of arranged inputs are the arranged sums. */
static void arranged_inputs(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    struct qt_act act;
    double *h = NULL;
    (void)state;
    expect_ok("ckpt", qt_ckpt_open(&f->ckpt, "tests/golden/models/llama", &f->err), &f->err);
    expect_ok("backend", qt_backend_cpu_open(&f->be, &f->err), &f->err);
    f->source = qt_weights_of_ckpt(f->ckpt);
    for (size_t i = 0; i < TOKENS; i++)
        f->ids[i] = random_u32() % VOCAB;
    const struct qt_calibration data = {
        .ids = f->ids, .samples = 20, .seqlen = SEQLEN, .backend = f->be};
    for (int with = 0; with < 2; with++) {
        struct qt_sequential *s;
        struct qt_observed seen;
        expect_ok("open", qt_sequential_open(&s, &f->source, &f->source, &data, NULL, &f->err),
                  &f->err);
        expect_ok("enter", qt_sequential_enter(s, 0, &f->source, &f->err), &f->err);
        expect_ok("observe", qt_sequential_observe(&seen, s, 3, with ? &act : NULL, false, &f->err),
                  &f->err);
        const size_t k = seen.k;
        if (!with) {
            expect_ok("act", qt_act_new(&act, k, 4, &f->err), &f->err);
            act.rotate = true;
            for (size_t i = 0; i < k; i++) {
                act.order[i] = (uint32_t)(k - 1 - i);
                act.factor[i] = ldexpf(1, (int)(random_u32() % 5) - 2);
            }
            h = malloc(k * k * sizeof *h);
            for (size_t i = 0; i < k * k; i++)
                h[i] = seen.h[i / k < i % k ? i % k * k + i / k : i];
        } else {
            float *rows = arranged_rows(h, k, k, false, &act);
            for (size_t i = 0; i < k * k; i++)
                h[i] = (double)rows[i];
            float *both = arranged_rows(h, k, k, true, &act); /* of the symmetric result */
            for (size_t i = 0; i < k; i++)
                for (size_t j = 0; j <= i; j++)
                    expect_near("H", seen.h[i * k + j], (double)both[i * k + j],
                                sqrt(seen.h[i * k + i] * seen.h[j * k + j]));
            for (size_t i = 0; i < seen.errors; i++) /* both models are the same */
                assert_true(seen.square[i] == 0);
            free(rows);
            free(both);
        }
        qt_sequential_close(s);
    }
    free(h);
    qt_act_free(&act);
    qt_ckpt_close(f->ckpt);
    f->be->close(f->be);
    free(f);
}

/* With a norm between the linear and the hidden states, errors of these are not corrected. */
static void norms_behind_sublayers(void **state)
{
    (void)state;
    model_case("tests/golden/models/gemma2", 0, 1, -1, false);
    model_case("tests/golden/models/gemma3", 0, 1, -1,
               false); /* and two kinds of rotary embeddings */
    model_case("tests/golden/models/gemma2", 0, 1, 3, true);
    model_case("tests/golden/models/olmo2", 0, 1, -1, false); /* and no norms in front */
    model_case("tests/golden/models/glm4", 0, 1, -1, false);  /* and gate and up in one tensor */
}

static void allocation_failures(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    bool failed = true;
    (void)state;
    expect_ok("ckpt", qt_ckpt_open(&f->ckpt, "tests/golden/models/llama", &f->err), &f->err);
    expect_ok("backend", qt_backend_cpu_open(&f->be, &f->err), &f->err);
    f->source = qt_weights_of_ckpt(f->ckpt);
    const struct qt_calibration data = {
        .ids = f->ids, .samples = 2, .seqlen = SEQLEN, .backend = f->be};
    for (long n = 0; failed; n++) {
        struct qt_sequential *s = NULL;
        struct qt_observed seen;
        int rc;
        qt_mem_fail_after(n);
        QT_TRY(qt_sequential_open(&s, &f->source, &f->source, &data, NULL, &f->err));
        QT_TRY(qt_sequential_enter(s, 0, &f->source, &f->err));
        QT_TRY(qt_sequential_observe(&seen, s, 1, NULL, false, &f->err));
        QT_TRY(qt_sequential_advance(s, 1, &f->err));
    done:
        qt_mem_fail_after(-1);
        failed = rc < 0;
        assert_int_equal(rc, failed ? QT_E_RESOURCE : QT_OK);
        qt_sequential_close(s);
        assert_true(n < 1000);
    }
    qt_ckpt_close(f->ckpt);
    f->be->close(f->be);
    free(f);
}

int main(void)
{
    seed_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_are_of_the_moment),
        cmocka_unit_test(norms_behind_sublayers),
        cmocka_unit_test(arranged_inputs),
        cmocka_unit_test(allocation_failures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
