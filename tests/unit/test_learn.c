/*
 * Learning: gradients of stored parameters, falling loss curves, results that do not depend on
 * threads or interruptions, and refusals.
 */
#include "coded_fixture.h"
#include "fixture.h"

#include "kernels/kernels.h"
#include "pack/schemes/scheme.h"
#include "verify/verify.h"

#include <math.h>

#define MODEL "tests/golden/models/llama"

enum { SEQLEN = 32, SAMPLES = 12, VOCAB = 97 };

struct fixture {
    char *dir;
    char out[2][256]; /* "a", "b" */
    struct qt_backend *be;
    struct qt_ckpt *ckpt;
    uint32_t ids[SAMPLES * SEQLEN];
    struct qt_calibration calibration;
    struct qt_learn_options learn;
    struct qt_err err;
};

static int set_up(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    uint32_t x = 777;
    f->dir = fixture_dir();
    for (int i = 0; i < 2; i++)
        snprintf(f->out[i], sizeof f->out[i], "%s/%c", f->dir, 'a' + i);
    expect_ok("backend", qt_backend_cpu_open(&f->be, &f->err), &f->err);
    expect_ok("model", qt_ckpt_open(&f->ckpt, MODEL, &f->err), &f->err);
    for (size_t i = 0; i < SAMPLES * SEQLEN; i++) {
        x = x * 1664525 + 1013904223;
        f->ids[i] = (x >> 16) % VOCAB;
    }
    f->calibration = (struct qt_calibration){
        .ids = f->ids, .samples = SAMPLES, .seqlen = SEQLEN, .backend = f->be};
    *state = f;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *f = *state;
    static const char *const dirs[] = {"a", "b", "a.partial", "b.partial"};
    for (size_t i = 0; i < sizeof dirs / sizeof *dirs; i++)
        qt_dir_remove(fixture_path(f->dir, dirs[i]), NULL);
    fixture_remove(f->dir);
    qt_ckpt_close(f->ckpt);
    f->be->close(f->be);
    free(f);
    return 0;
}

static struct qt_quantize_options options(struct fixture *f, const char *out, const char *scheme,
                                          const char *learn)
{
    expect_ok(learn, qt_learn_parse(&f->learn, learn, &f->err), &f->err);
    return (struct qt_quantize_options){
        .plan = {.scheme = scheme, .calibrated = true},
        .calibration = &f->calibration,
        .learn = &f->learn,
        .out_dir = f->out[strcmp(out, "b") == 0],
        .force = true,
    };
}

static json_t *quantize(struct fixture *f, const struct qt_quantize_options *opt)
{
    struct qt_quantize_report report;
    expect_ok("quantize", qt_quantize(&report, f->ckpt, opt, &f->err), &f->err);
    return report.document;
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

/* Returns the held-out loss before training and the best one, of decoder layer `block` (-1:
 * scope=model). */
static void curve_ends(double *before, double *best, const json_t *document, json_int_t block)
{
    const json_t *row, *curve = json_object_get(json_object_get(document, "learning"), "curve");
    size_t i;
    *best = INFINITY;
    json_array_foreach (curve, i, row) {
        double loss = json_number_value(json_object_get(row, "held_out"));
        if (block >= 0 && json_integer_value(json_object_get(row, "block")) != block)
            continue;
        if (json_integer_value(json_object_get(row, "step")) == 0)
            *before = loss;
        *best = fmin(*best, loss);
    }
}

/* ---- parameters of a matrix ----------------------------------------------------------------- */

enum { N = 19 };

/* A quantized matrix W[N][k] of two strips, and learning's arrays for one strip. */
struct learned {
    struct qt_packed p;
    const struct qt_learnable *learnable;
    struct qt_strip strip[2];
    size_t count;
    float *w, *dw;                      /* [N][k]; a gradient of it, [32][k] */
    float *value, *unit, *grad, *again; /* [count] */
    void *scratch;
};

static void learned_open(struct learned *l, const char *text, size_t k)
{
    struct qt_spec spec;
    struct qt_err err;
    expect_ok(text, qt_spec_parse(&spec, text, &err), &err);
    qt_array_new(&l->w, N * k, sizeof *l->w, NULL);
    qt_array_new(&l->dw, 2 * QT_FRAG_ROWS * k, sizeof *l->dw, NULL);
    for (size_t i = 0; i < N * k; i++) {
        l->w[i] = (float)sin((double)i * 1.7) * 1e-3f;
        l->dw[i] = (float)cos((double)i * 0.9);
    }
    struct qt_matrix m = {l->w, QT_F32, N, k, "file", "name"};
    expect_ok(text, qt_packed_quantize(&l->p, &spec, &m, NULL, NULL, &err), &err);
    l->learnable = spec.scheme->learnable;
    l->count = l->learnable->count(&l->p);
    float **const room[] = {&l->value, &l->unit, &l->grad, &l->again};
    for (size_t i = 0; i < sizeof room / sizeof *room; i++)
        qt_array_new(room[i], l->count, sizeof **room[i], NULL);
    qt_array_new(&l->scratch, 1, spec.scheme->scratch_bytes(&l->p), NULL);
    for (size_t s = 0; s < 2; s++)
        l->strip[s] = (struct qt_strip){s, s ? N - QT_FRAG_ROWS : QT_FRAG_ROWS, l->scratch};
}

static void learned_close(struct learned *l)
{
    void *const all[] = {l->w, l->dw, l->value, l->unit, l->grad, l->again, l->scratch};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        qt_free(all[i]);
    qt_packed_free(&l->p);
}

/* W is linear in each parameter, so the difference quotient of sum dw * W is exact. Parameters are
 * doubled, which FP16 represents exactly. */
static void check_gradient(const char *text)
{
    enum { K = 100 };
    struct learned l;
    struct qt_err err;
    float decoded[N * K];
    size_t nonzero = 0;
    learned_open(&l, text, K);
    for (size_t s = 0; s < 2; s++) {
        l.learnable->get(l.value, l.unit, &l.p, &l.strip[s]);
        l.learnable->grad(l.grad, &l.p, &l.strip[s], l.dw + s * QT_FRAG_ROWS * K);
        for (size_t i = 0; i < l.count; i++) {
            double sum[2] = {0};
            float was = l.value[i];
            for (int side = 0; side < 2; side++) {
                l.value[i] = side ? was : 2 * was;
                l.learnable->put(&l.p, &l.strip[s], l.value);
                expect_ok("decode", qt_packed_decode(decoded, &l.p, 0, N, &err), &err);
                for (size_t j = 0; j < N * K; j++)
                    sum[side] += (double)l.dw[j] * (double)decoded[j];
            }
            double want = was != 0 ? (sum[0] - sum[1]) / (double)was : 0;
            if (!(fabs((double)l.grad[i] - want) <= 1e-3 * (fabs(want) + ldexp(1, l.p.scale_exp2))))
                fail_msg("%s: parameter %zu of strip %zu: %g, expected %g", text, i, s,
                         (double)l.grad[i], want);
            nonzero += want != 0;
            assert_true(l.unit[i] == fabsf(was));
        }
    }
    assert_true(nonzero >= N);
    learned_close(&l);
}

/*
 * Scales and zero-points of mix24 are stored as integers, and weights are linear in them. Steps up
 * and down change the decoded weights by exactly gradient * step.
 */
static void check_mix24_gradient(const char *text)
{
    enum { K = 170 };
    struct learned l;
    struct qt_err err;
    float before[N * K], after[N * K];
    size_t moved = 0;
    learned_open(&l, text, K);
    expect_ok("decode", qt_packed_decode(before, &l.p, 0, N, &err), &err);
    for (size_t s = 0; s < 2; s++) {
        l.learnable->get(l.value, l.unit, &l.p, &l.strip[s]);
        l.learnable->grad(l.grad, &l.p, &l.strip[s], l.dw + s * QT_FRAG_ROWS * K);
        for (size_t i = 0; i < l.count; i++)
            for (int up = 0; up < 2 && l.unit[i] > 0; up++) {
                float was = l.value[i], step = l.unit[i] == 1 ? 1 : 0.04f * l.unit[i];
                double sum = 0;
                l.value[i] += up ? step : -step;
                l.learnable->put(&l.p, &l.strip[s], l.value);
                l.learnable->get(l.again, l.unit, &l.p, &l.strip[s]);
                expect_ok("decode", qt_packed_decode(after, &l.p, 0, N, &err), &err);
                for (size_t j = 0; j < N * K; j++)
                    sum += (double)l.dw[j] * ((double)after[j] - (double)before[j]);
                double want = (double)l.grad[i] * ((double)l.again[i] - (double)was);
                if (!(fabs(sum - want) <= 1e-3 * fabs(want) + 1e-9))
                    fail_msg("%s: parameter %zu of strip %zu: %g, expected %g", text, i, s, want,
                             sum);
                moved += l.again[i] != was;
                l.value[i] = was;
                l.learnable->put(&l.p, &l.strip[s], l.value);
                l.learnable->get(l.again, l.unit, &l.p, &l.strip[s]);
                assert_memory_equal(l.again, l.value, l.count * sizeof *l.value);
            }
    }
    expect_ok("decode", qt_packed_decode(after, &l.p, 0, N, &err), &err);
    assert_memory_equal(before, after, sizeof before);
    expect_ok("valid", l.p.spec.scheme->check_values(&l.p, &err), &err);
    assert_true(moved > N * K / 16);
    learned_close(&l);
}

static void gradients_of_parameters(void **state)
{
    static const char *const specs[] = {"nf4:g=32", "nf3:g=64", "lut2:g=32",           "fp6",
                                        "fp4",      "int4",     "int4:g=32,zero=group"};
    (void)state;
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++)
        check_gradient(specs[i]);
    check_mix24_gradient("mix24:outliers=0.02");
    check_mix24_gradient("mix24:g=8,g2=8,four=0.5");
}

/*
 * Recoded weights are at least as near to the target as before. The tolerance covers an ulp in the
 * comparison of codes, and mix24's values, which are rounded to 2^-24 in units of the scales.
 */
static void check_recode(const char *text)
{
    enum { K = 170 };
    struct learned l;
    struct qt_err err;
    float before[N * K], after[N * K], stored[N * K];
    size_t moved = 0;
    learned_open(&l, text, K);
    expect_ok("decode", qt_packed_decode(before, &l.p, 0, N, &err), &err);
    for (int round = 0; round < 2; round++) { /* first the weights as decoded, then others */
        for (size_t i = 0; i < N * K; i++) {
            l.w[i] = round ? l.w[i] + (float)cos((double)i * 0.9) * 5e-4f : before[i];
            stored[i] = ldexpf(l.w[i], -l.p.scale_exp2);
        }
        for (size_t s = 0; s < 2; s++)
            l.learnable->recode(&l.p, &l.strip[s], stored + s * QT_FRAG_ROWS * K);
        expect_ok("valid", l.p.spec.scheme->check_values(&l.p, &err), &err);
        expect_ok("repack", qt_packed_check_repack(&l.p, "file", "name", &err), &err);
        expect_ok("decode", qt_packed_decode(after, &l.p, 0, N, &err), &err);
        for (size_t i = 0; i < N * K; i++) {
            float tolerance = 0x1p-22f * fabsf(l.w[i]) + ldexpf(0x1p-23f, l.p.scale_exp2);
            if (!(fabsf(after[i] - l.w[i]) <= fabsf(before[i] - l.w[i]) + tolerance))
                fail_msg("%s: %zu: %g became %g for %g", text, i, (double)before[i],
                         (double)after[i], (double)l.w[i]);
            moved += after[i] != before[i];
        }
        assert_true(round ? moved > N * K / 4 : moved == 0);
    }
    learned_close(&l);
}

static void codes_follow_weights(void **state)
{
    static const char *const specs[] = {"nf4:g=32",
                                        "lut2:g=32",
                                        "fp6",
                                        "int4:g=32,zero=group",
                                        "mix24:outliers=0.02",
                                        "mix24:g=8,g2=8,four=0.5"};
    (void)state;
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++)
        check_recode(specs[i]);
}

/* What put() stores depends on the values only, not on values stored before, because a resumed run
 * skips the intermediate values. This also holds for values that are not valid scales. */
static void check_put(const char *text)
{
    enum { K = 170 };
    static const float factors[] = {1.5f, -0.5f, 0, 1e-9f, 1e9f};
    struct learned l;
    struct qt_err err;
    float decoded[2][N * K];
    for (int direct = 0; direct < 2; direct++) {
        learned_open(&l, text, K);
        for (size_t s = 0; s < 2; s++) {
            l.learnable->get(l.again, l.unit, &l.p, &l.strip[s]);
            for (int last = direct; last < 2; last++) {
                for (size_t i = 0; i < l.count; i++)
                    l.value[i] = l.again[i] * (last ? factors[i % 5] : 2);
                l.learnable->put(&l.p, &l.strip[s], l.value);
            }
        }
        expect_ok("valid", l.p.spec.scheme->check_values(&l.p, &err), &err);
        expect_ok("decode", qt_packed_decode(decoded[direct], &l.p, 0, N, &err), &err);
        learned_close(&l);
    }
    if (memcmp(decoded[0], decoded[1], sizeof decoded[0]) != 0)
        fail_msg("%s: what is stored depends on what was stored before", text);
}

static void put_depends_on_values_only(void **state)
{
    static const char *const specs[] = {"nf4:g=32", "lut2:g=32", "fp6", "int4:g=32,zero=group",
                                        "mix24:outliers=0.02"};
    (void)state;
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++)
        check_put(specs[i]);
}

/* ---- end to end ----------------------------------------------------------------------------- */

static void the_curve_falls(void **state)
{
    struct fixture *f = *state;
    static const struct {
        const char *scheme, *learn;
        bool norms;
    } cases[] = {
        {"nf3:g=32,learn=1", "lr=3e-3,batch=2,passes=4", false},
        {"nf3:g=32,learn=1", "lr=3e-3,batch=2,passes=4", true},
        {"fp4:learn=1", "lr=3e-3,batch=2,passes=4", false},
        {"nf3:g=32", "lr=3e-4,batch=2,passes=4", true},
        {"nf3:g=32,method=search,learn=1", "mode=ste,lr=3e-3,batch=2,passes=4", false},
        {"int4:g=32,learn=1", "objective=nll,lr=1e-2,batch=3,passes=2", false},
        {"mix24:learn=1", "lr=3e-3,batch=2,passes=4", true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct qt_quantize_options opt = options(f, "a", cases[i].scheme, cases[i].learn);
        double before = 0, best;
        f->learn.norms = cases[i].norms;
        json_t *doc = quantize(f, &opt);
        curve_ends(&before, &best, doc, -1);
        if (!(best < before))
            fail_msg("%s, %s: %g before, %g after", cases[i].scheme, cases[i].learn, before, best);
        json_decref(doc);
    }
}

/* Gemma norms multiply by 1 + w, so w may be 0: the unit of a parameter must not be |w|. */
static void zero_norms_are_tuned(void **state)
{
    struct fixture *f = *state;
    static const char *const files[] = {"config.json", "model.safetensors"};
    struct qt_quantize_options opt =
        options(f, "a", "nf3:g=32", "objective=nll,lr=1e-2,batch=2,passes=4");
    struct qt_ckpt *fixture_ckpt = f->ckpt;
    double before = 0, best;
    char *dir = fixture_dir(), *data, path[256];
    size_t size;
    for (size_t i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "tests/golden/models/gemma2/%s", files[i]);
        expect_ok(path, qt_file_read(&data, &size, path, 1 << 24, &f->err), &f->err);
        if (i == 1) {
            uint64_t header;
            const char *name;
            json_t *tensor;
            memcpy(&header, data, sizeof header);
            json_t *tensors = json_loadb(data + 8, header, 0, NULL);
            assert_non_null(tensors);
            json_object_foreach (tensors, name, tensor) {
                const json_t *at = json_object_get(tensor, "data_offsets");
                size_t begin = (size_t)json_integer_value(json_array_get(at, 0));
                size_t end = (size_t)json_integer_value(json_array_get(at, 1));
                if (strstr(name, "norm"))
                    memset(data + 8 + header + begin, 0, end - begin);
            }
            json_decref(tensors);
        }
        fixture_write(dir, files[i], data, size);
        qt_free(data);
    }
    expect_ok(dir, qt_ckpt_open(&f->ckpt, dir, &f->err), &f->err);
    f->learn.norms = true;
    json_t *doc = quantize(f, &opt);
    curve_ends(&before, &best, doc, -1);
    assert_true(best < before);
    json_decref(doc);
    qt_ckpt_close(f->ckpt);
    f->ckpt = fixture_ckpt;
    fixture_remove(dir);
}

static void every_layer_improves(void **state)
{
    struct fixture *f = *state;
    struct qt_quantize_options opt =
        options(f, "a", "nf2:g=32,learn=1", "scope=block,lr=1e-2,batch=2,passes=4");
    f->learn.norms = true;
    json_t *doc = quantize(f, &opt);
    for (json_int_t block = 0; block < 2; block++) {
        double before = 0, best;
        curve_ends(&before, &best, doc, block);
        assert_true(best < before);
    }
    json_decref(doc);
}

/* scope=block: target outputs are computed from the source's embedding, not from a quantized
 * one. */
static void layer_targets_use_the_source_embedding(void **state)
{
    struct fixture *f = *state;
    const struct qt_rule rule = {"embed_tokens", "nf2:g=32"};
    struct qt_quantize_options opt = options(f, "a", "none", "scope=block,batch=2,passes=1");
    double before = 0, best;
    opt.plan.rules = &rule;
    opt.plan.nrules = 1;
    f->learn.norms = true;
    json_t *doc = quantize(f, &opt);
    curve_ends(&before, &best, doc, 0);
    assert_true(before > 1e-3);
    json_decref(doc);
}

/* The student decodes permuted matrices correctly: with w4ax the loss before the first step is
 * about that of int4. */
static void permuted_matrices_are_decoded(void **state)
{
    static const char *const schemes[] = {"int4:g=32", "w4ax"};
    static const struct qt_rule rule = {"down_proj", "nf3:g=32,learn=1"};
    struct fixture *f = *state;
    double before[2] = {0}, best;
    for (int i = 0; i < 2; i++) {
        struct qt_quantize_options opt = options(f, "a", schemes[i], "batch=6,passes=1");
        opt.plan.rules = &rule;
        opt.plan.nrules = 1;
        json_t *doc = quantize(f, &opt);
        curve_ends(&before[i], &best, doc, -1);
        json_decref(doc);
    }
    assert_true(before[1] < 2 * before[0]);
}

/* If no step lowers the loss, the weights on disk stay as they are. */
static void worse_parameters_are_not_kept(void **state)
{
    struct fixture *f = *state;
    struct qt_quantize_options a = options(f, "a", "nf4:g=32", "");
    a.learn = NULL;
    json_decref(quantize(f, &a));
    struct qt_quantize_options b = options(f, "b", "nf4:g=32,learn=1", "lr=0.5,batch=2");
    json_t *doc = quantize(f, &b);
    assert_int_equal(
        json_integer_value(json_object_get(json_object_get(doc, "learning"), "best_step")), 0);
    assert_true(same_files(f, "model.safetensors"));
    json_decref(doc);
}

static const struct {
    const char *scheme, *learn;
} modes[] = {
    {"nf3:g=32,learn=1", "lr=3e-3,batch=3,passes=1"},
    {"nf3:g=32,method=search,learn=1", "mode=ste,lr=3e-3,batch=3,passes=1"},
    {"nf3:g=32,learn=1", "scope=block,lr=3e-3,batch=4,passes=1"},
};
enum { MODES = sizeof modes / sizeof *modes };

static void same_bytes_for_any_threads(void **state)
{
    struct fixture *f = *state;
    for (size_t i = 0; i < MODES; i++) {
        struct qt_quantize_options a = options(f, "a", modes[i].scheme, modes[i].learn);
        struct qt_quantize_options b = options(f, "b", modes[i].scheme, modes[i].learn);
        f->learn.norms = true;
        qt_threads_set(1);
        json_decref(quantize(f, &a));
        qt_threads_set(4);
        json_decref(quantize(f, &b));
        qt_threads_set(0);
        assert_true(same_files(f, "model.safetensors"));
        assert_true(same_files(f, "qtool.json"));
    }
}

static size_t much_room(struct qt_backend *be)
{
    (void)be;
    return SIZE_MAX;
}

static size_t no_room(struct qt_backend *be)
{
    (void)be;
    return 1;
}

/* A backend that decodes, and keeps the activations of all layers, gives the same bytes as the
 * host. */
static void backends_decode(void **state)
{
    struct fixture *f = *state;
    static const struct {
        const char *scheme, *learn;
        bool room;
    } cases[] = {
        {"nf3:g=32,learn=1", "lr=3e-3,batch=3,passes=1", true},
        {"nf3:g=32,method=search,learn=1", "mode=ste,scope=block,lr=3e-3,batch=4,passes=1", true},
        {"int4:g=32,zero=group,learn=1", "lr=1e-2,batch=3,passes=1", true},
        {"fp4:learn=1", "scope=block,lr=1,batch=4,passes=1", true}, /* nothing is kept */
        {"nf3:g=32,learn=1", "lr=3e-3,batch=3,passes=1", false},
        {"mix24:learn=1", "lr=3e-3,batch=3,passes=1", true},
    };
    struct qt_backend other = *f->be;
    coded_functions(&other);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct qt_quantize_options a = options(f, "a", cases[i].scheme, cases[i].learn);
        struct qt_quantize_options b = options(f, "b", cases[i].scheme, cases[i].learn);
        const bool decodes = cases[i].room && strncmp(cases[i].scheme, "mix24", 5) != 0;
        other.room = cases[i].room ? much_room : no_room;
        times_decoded = times_summed = times_tuned = 0;
        json_decref(quantize(f, &a));
        assert_int_equal(times_decoded + times_summed + times_tuned, 0);
        f->calibration.backend = &other;
        json_t *doc = quantize(f, &b);
        f->calibration.backend = f->be;
        const json_t *n = json_object_get(json_object_get(doc, "learning"), "matrices");
        assert_int_equal(json_integer_value(json_object_get(n, "backend")), decodes ? 14 : 0);
        assert_int_equal(json_integer_value(json_object_get(n, "host")), decodes ? 0 : 14);
        assert_int_equal(times_decoded > 0, decodes);
        assert_int_equal(times_summed > 0, decodes);
        assert_int_equal(times_tuned > 0, decodes);
        json_decref(doc);
    }
}

static int polls_left;
static bool stop_soon(void)
{
    return polls_left-- <= 0;
}

/* Runs poll for interruptions before every layer and every tensor that is rewritten. The runs here
 * stop at later and later polls, because the part before the first step runs again each time. */
static void interrupted_runs_resume(void **state)
{
    struct fixture *f = *state;
    for (size_t i = 0; i < MODES; i++) {
        struct qt_quantize_options a = options(f, "a", modes[i].scheme, modes[i].learn);
        struct qt_quantize_options b = options(f, "b", modes[i].scheme, modes[i].learn);
        struct qt_quantize_report report;
        int rc, stops = 0;
        f->learn.norms = true;
        json_decref(quantize(f, &a));
        b.resume = true;
        b.interrupted = stop_soon;
        do {
            /* Quantizing the tensors polls once for each. */
            polls_left = (int)qt_ckpt_count(f->ckpt) + 5 + 4 * stops;
            rc = qt_quantize(&report, f->ckpt, &b, &f->err);
            assert_true(stops++ < 100);
        } while (rc == QT_E_INTERRUPTED);
        expect_ok(modes[i].learn, rc, &f->err);
        json_decref(report.document);
        assert_true(stops > 5);
        assert_true(same_files(f, "model.safetensors"));
        assert_true(same_files(f, "qtool.json"));
        assert_false(qt_path_exists(fixture_path(f->out[1], "progress")));
    }
}

#define FIRST_MATRIX "model.layers.0.self_attn.q_proj.weight"

static bool is_written(const char *journal, const char *unit)
{
    char *text = NULL, line[128];
    size_t size;
    if (!qt_path_exists(journal))
        return false;
    assert_int_equal(qt_file_read(&text, &size, journal, 1 << 20, NULL), QT_OK);
    snprintf(line, sizeof line, "{\"unit\":\"%s\"", unit);
    const bool found = strstr(text, line) != NULL;
    qt_free(text);
    return found;
}

/* Flips a bit of the section's data in the unfinished container. */
static void flip_bit(const char *dir, const char *section)
{
    FILE *file = fopen(fixture_path(dir, "model.safetensors"), "r+b");
    uint64_t size;
    assert_non_null(file);
    assert_int_equal(fread(&size, sizeof size, 1, file), 1);
    char *header = calloc(size + 1, 1);
    assert_int_equal(fread(header, size, 1, file), 1);
    json_t *doc = json_loads(header, 0, NULL);
    const json_t *offsets = json_object_get(json_object_get(doc, section), "data_offsets");
    const long at = (long)(8 + size) + (long)json_integer_value(json_array_get(offsets, 0)) + 10;
    assert_non_null(offsets);
    assert_int_equal(fseek(file, at, SEEK_SET), 0);
    const int byte = fgetc(file);
    assert_int_equal(fseek(file, at, SEEK_SET), 0);
    assert_int_not_equal(fputc(byte ^ 4, file), EOF);
    assert_int_equal(fclose(file), 0);
    json_decref(doc);
    free(header);
}

/* Stops runs at every poll and damages codes on disk that will not be written again: the resumed
 * run detects the damage. */
static void damaged_codes_are_detected(void **state)
{
    struct fixture *f = *state;
    char partial[sizeof f->out[0] + 8];
    struct qt_quantize_options opt = options(f, "a", modes[0].scheme, modes[0].learn);
    struct qt_quantize_report report;
    int rc, found = 0;
    snprintf(partial, sizeof partial, "%s.partial", f->out[0]);
    opt.interrupted = stop_soon;
    for (int stops = 0;; stops++) {
        opt.resume = false;
        polls_left = stops;
        rc = qt_quantize(&report, f->ckpt, &opt, &f->err);
        if (rc != QT_E_INTERRUPTED)
            break;
        if (!is_written(fixture_path(partial, "journal"), FIRST_MATRIX))
            continue;
        flip_bit(partial, FIRST_MATRIX ".q.plane0");
        opt.resume = true;
        polls_left = 1000000;
        expect_error("damage", qt_quantize(&report, f->ckpt, &opt, &f->err), QT_E_RESOURCE,
                     "data read back differs from the data written", &f->err);
        found++;
    }
    expect_ok("no more stops", rc, &f->err);
    json_decref(report.document);
    assert_true(found > 15);
}

static void other_options_do_not_resume(void **state)
{
    struct fixture *f = *state;
    struct qt_quantize_options a = options(f, "a", "nf3:g=32,learn=1", "lr=1e-3");
    struct qt_quantize_report report;
    a.interrupted = stop_soon;
    polls_left = (int)qt_ckpt_count(f->ckpt) + 3; /* after all tensors */
    assert_int_equal(qt_quantize(&report, f->ckpt, &a, &f->err), QT_E_INTERRUPTED);
    a = options(f, "a", "nf3:g=32,learn=1", "lr=2e-3");
    a.resume = true;
    expect_error("other lr", qt_quantize(&report, f->ckpt, &a, &f->err), QT_E_RESUME, "learning",
                 &f->err);
}

/* verify accepts tuned norms, which differ from the source, and reports them. */
static void tuned_containers_verify(void **state)
{
    struct fixture *f = *state;
    struct qt_quantize_options opt = options(f, "a", "nf3:g=32,learn=1", "lr=3e-3,batch=2");
    struct qt_container *c;
    struct qt_verify_report report;
    f->learn.norms = true;
    json_decref(quantize(f, &opt));
    expect_ok("open", qt_container_open(&c, f->out[0], &f->err), &f->err);
    expect_ok("verify", qt_verify(&report, c, f->ckpt, NULL, NULL, &f->err), &f->err);
    json_t *norm;
    expect_ok("norm",
              qt_container_copied_json(&norm, c, "model.layers.0.input_layernorm.weight", &f->err),
              &f->err);
    assert_non_null(json_object_get(norm, "source_crc32"));
    json_decref(norm);
    assert_int_equal(report.tuned, 5);
    assert_int_equal(report.copied, 2);
    qt_verify_free(&report);
    qt_container_close(c);
}

/* ---- refusals ------------------------------------------------------------------------------- */

static void invalid_learning_is_refused(void **state)
{
    struct fixture *f = *state;
    struct qt_quantize_options opt = options(f, "a", "nf4:learn=1", "");
    struct qt_quantize_report report;
    struct qt_learn_options learn;
    opt.calibration = NULL;
    opt.plan.calibrated = false;
    expect_error("no data", qt_quantize(&report, f->ckpt, &opt, &f->err), QT_E_USAGE,
                 "needs calibration data", &f->err);
    opt = options(f, "a", "nf4", "");
    const struct qt_rule rule = {"lm_head", "nf4:learn=1"};
    opt.plan.rules = &rule;
    opt.plan.nrules = 1;
    expect_error("head", qt_quantize(&report, f->ckpt, &opt, &f->err), QT_E_UNSUPPORTED, "lm_head",
                 &f->err);
    opt = options(f, "a", "nf4:learn=1", "");
    f->calibration.samples = 1;
    expect_error("one window", qt_quantize(&report, f->ckpt, &opt, &f->err), QT_E_USAGE,
                 "2 windows", &f->err);
    expect_error("key", qt_learn_parse(&learn, "rate=1", &f->err), QT_E_USAGE, "rate", &f->err);
    expect_error("value", qt_learn_parse(&learn, "mode=frozn", &f->err), QT_E_USAGE,
                 "did you mean 'frozen'", &f->err);
    expect_error("range", qt_learn_parse(&learn, "passes=0", &f->err), QT_E_USAGE, "from 1",
                 &f->err);
    assert_false(qt_path_exists(fixture_path(f->dir, "a.partial")));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_of_parameters),
        cmocka_unit_test(codes_follow_weights),
        cmocka_unit_test(put_depends_on_values_only),
        cmocka_unit_test_setup_teardown(the_curve_falls, set_up, tear_down),
        cmocka_unit_test_setup_teardown(zero_norms_are_tuned, set_up, tear_down),
        cmocka_unit_test_setup_teardown(every_layer_improves, set_up, tear_down),
        cmocka_unit_test_setup_teardown(layer_targets_use_the_source_embedding, set_up, tear_down),
        cmocka_unit_test_setup_teardown(permuted_matrices_are_decoded, set_up, tear_down),
        cmocka_unit_test_setup_teardown(worse_parameters_are_not_kept, set_up, tear_down),
        cmocka_unit_test_setup_teardown(same_bytes_for_any_threads, set_up, tear_down),
        cmocka_unit_test_setup_teardown(backends_decode, set_up, tear_down),
        cmocka_unit_test_setup_teardown(interrupted_runs_resume, set_up, tear_down),
        cmocka_unit_test_setup_teardown(damaged_codes_are_detected, set_up, tear_down),
        cmocka_unit_test_setup_teardown(other_options_do_not_resume, set_up, tear_down),
        cmocka_unit_test_setup_teardown(tuned_containers_verify, set_up, tear_down),
        cmocka_unit_test_setup_teardown(invalid_learning_is_refused, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
