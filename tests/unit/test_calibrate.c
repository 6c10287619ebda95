/*
 * Calibration of the example model against statistics computed naively, in double precision, from
 * the activations that a hook gets; merging; quantiles against sorting. The backend operation is
 * tested on random data.
 */
#include "calib/calib.h"
#include "kernels/kernels.h"
#include "tests/unit/fixture.h"
#include "tests/worse.h"

#include <math.h>

#define NANO "examples/nano-llama"

enum { SEQLEN = 48, SAMPLES = 6 };

/* Bound of the rounding of FP32 sums over all tokens, relative to the diagonal. */
static const double rounding = SAMPLES * SEQLEN * 0x1p-24;

static char *dir;
static struct qt_ckpt *ckpt;
static struct qt_backend *be;
static uint32_t *ids; /* [SAMPLES * SEQLEN] */
static const char *const data_files[] = {NANO "/calib.txt"};

static int setup(void **state)
{
    struct qt_err err = {0};
    struct qt_data data;
    (void)state;
    dir = fixture_dir();
    expect_ok("backend", qt_backend_cpu_open(&be, &err), &err);
    expect_ok("checkpoint", qt_ckpt_open(&ckpt, NANO, &err), &err);
    const struct qt_data_options opt = {.dir = NANO, .vocab = 1024};
    expect_ok("data", qt_data_read(&data, data_files, 1, &opt, &err), &err);
    assert_false(data.bos);
    expect_ok("windows", qt_data_windows(&ids, &data, SAMPLES, SEQLEN, 0, &err), &err);
    qt_data_free(&data);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    qt_free(ids);
    qt_ckpt_close(ckpt);
    be->close(be);
    fixture_remove(dir);
    return 0;
}

/* Calibrates on windows [first, first + n) with the given backend. */
static int run(const char *name, struct qt_backend *backend, size_t first, size_t n,
               struct qt_err *err)
{
    struct qt_qcal_part part = {
        .samples = n, .seqlen = SEQLEN, .data = data_files, .ndata = 1, .seed = first};
    struct qt_calibrate_options opt = {.backend = backend, .force = true};
    return qt_calibrate(fixture_path(dir, name), ckpt, ids + first * SEQLEN, &part, &opt, err);
}

static void must_run(const char *name, size_t first, size_t n)
{
    struct qt_err err = {0};
    expect_ok(name, run(name, be, first, n, &err), &err);
}

static struct qt_qcal *must_open(const char *name)
{
    struct qt_qcal *q;
    struct qt_err err = {0};
    expect_ok(name, qt_qcal_open(&q, fixture_path(dir, name), &err), &err);
    return q;
}

static bool same_file(const char *a, const char *b)
{
    struct qt_map x, y;
    assert_int_equal(qt_map_open(&x, fixture_path(dir, a), NULL), QT_OK);
    assert_int_equal(qt_map_open(&y, fixture_path(dir, b), NULL), QT_OK);
    bool same = x.size == y.size && memcmp(x.data, y.data, x.size) == 0;
    qt_map_close(&x);
    qt_map_close(&y);
    return same;
}

/* ---- against a naive computation ------------------------------------------------------------ */

/* All linear inputs of one decoder layer. */
struct seen {
    float *x[QT_INPUTS];
    size_t m[QT_INPUTS], k[QT_INPUTS];
};

static int keep(void *ctx, int input, const float *x, size_t m, size_t k, struct qt_err *err)
{
    struct seen *s = ctx;
    (void)err;
    s->k[input] = k;
    s->x[input] = realloc(s->x[input], (s->m[input] + m) * k * sizeof(float));
    memcpy(s->x[input] + s->m[input] * k, x, m * k * sizeof *x);
    s->m[input] += m;
    return QT_OK;
}

static void compare_channels(const struct qt_channels *c, const float *x, size_t m, size_t k)
{
    for (size_t j = 0; j < k; j++) {
        uint32_t hist[QT_HIST_BINS] = {0};
        float absmax = 0;
        double sum2 = 0;
        for (size_t t = 0; t < m; t++) {
            double a = fabs((double)x[t * k + j]);
            uint32_t b = 0;
            while (b + 1 < QT_HIST_BINS && a >= exp2(((double)b - 32) / 2))
                b++;
            hist[b]++;
            absmax = fmaxf(absmax, (float)a);
            sum2 += a * a;
        }
        assert_memory_equal(hist, c->hist + j * QT_HIST_BINS, sizeof hist);
        assert_true(absmax == c->absmax[j]);
        assert_true(sum2 == c->sum2[j]); /* the same order of addition */
    }
}

static void compare_hessian(const double *h, const float *x, size_t m, size_t k)
{
    double *want = calloc(k * k, sizeof *want), worst = 0;
    for (size_t t = 0; t < m; t++)
        for (size_t i = 0; i < k; i++)
            for (size_t j = 0; j <= i; j++)
                want[i * k + j] += (double)x[t * k + i] * (double)x[t * k + j];
    for (size_t i = 0; i < k; i++)
        for (size_t j = 0; j <= i; j++) {
            double unit = sqrt(want[i * k + i] * want[j * k + j]);
            double d = unit > 0 ? fabs(h[i * k + j] - want[i * k + j]) / unit : h[i * k + j];
            worst = worse(worst, d);
        }
    if (!(worst < rounding))
        fail_msg("H is off by %.2g of its diagonal", worst);
    free(want);
}

static void compare_layer(const struct qt_qcal *q, size_t layer, const struct seen *s)
{
    struct qt_err err = {0};
    for (size_t i = 0; i < QT_INPUTS; i++) {
        struct qt_channels c;
        double *h = malloc(s->k[i] * s->k[i] * sizeof *h);
        assert_int_equal(s->m[i], SAMPLES * SEQLEN);
        assert_int_equal(s->k[i], qt_qcal_info(q)->layer[layer].k[i]);
        expect_ok("channels", qt_qcal_channels(&c, q, layer, i, &err), &err);
        expect_ok("H", qt_qcal_hessian(h, q, layer, i, c.sum2, &err), &err);
        compare_channels(&c, s->x[i], s->m[i], s->k[i]);
        compare_hessian(h, s->x[i], s->m[i], s->k[i]);
        qt_channels_free(&c);
        free(h);
    }
}

static void test_against_naive(void **state)
{
    struct qt_err err = {0};
    struct qt_weights w = qt_weights_of_ckpt(ckpt);
    struct qt_model *model;
    struct qt_embed_head *embed_head;
    struct qt_layer *decoder_layer;
    float *hidden = malloc(SAMPLES * SEQLEN * 256 * sizeof *hidden);
    (void)state;
    must_run("a.qcal", 0, SAMPLES);
    struct qt_qcal *q = must_open("a.qcal");
    assert_int_equal(qt_qcal_info(q)->tokens, SAMPLES * SEQLEN);
    assert_string_equal(qt_qcal_info(q)->parts[0].data[0], "calib.txt");
    assert_int_equal(qt_qcal_info(q)->parts[0].ids_crc,
                     qt_crc32(0, ids, SAMPLES * SEQLEN * sizeof *ids));
    expect_ok("model", qt_model_open(&model, &w, &err), &err);
    expect_ok("check", qt_calibrate_check(q, ckpt, model, &err), &err);
    expect_ok("embed_head", qt_embed_head_open(&embed_head, model, &w, be, &err), &err);
    expect_ok("embed", qt_embed_tokens(embed_head, hidden, ids, SAMPLES * SEQLEN, SEQLEN, &err),
              &err);
    for (size_t l = 0; l < qt_model_info(model)->layers; l++) {
        struct seen s = {0};
        struct qt_hook hook = {&s, keep};
        expect_ok("layer", qt_layer_open(&decoder_layer, model, l, &w, be, &err), &err);
        expect_ok("run", qt_layer_run(decoder_layer, hidden, SAMPLES * SEQLEN, SEQLEN, &hook, &err),
                  &err);
        qt_layer_close(decoder_layer);
        compare_layer(q, l, &s);
        for (size_t i = 0; i < QT_INPUTS; i++)
            free(s.x[i]);
    }
    qt_embed_head_close(embed_head);
    qt_model_close(model);
    qt_qcal_close(q);
    free(hidden);
}

static void test_threads(void **state)
{
    (void)state;
    qt_threads_set(1);
    must_run("1.qcal", 0, SAMPLES);
    qt_threads_set(2);
    must_run("2.qcal", 0, SAMPLES);
    qt_threads_set(4);
    must_run("4.qcal", 0, SAMPLES);
    qt_threads_set(0);
    assert_true(same_file("1.qcal", "2.qcal"));
    assert_true(same_file("1.qcal", "4.qcal"));
}

static void test_other_model(void **state)
{
    struct qt_err err = {0};
    struct qt_ckpt *other;
    struct qt_model *model;
    (void)state;
    must_run("a.qcal", 0, 1);
    struct qt_qcal *q = must_open("a.qcal");
    expect_ok("open", qt_ckpt_open(&other, "tests/golden/models/llama", &err), &err);
    struct qt_weights w = qt_weights_of_ckpt(other);
    expect_ok("model", qt_model_open(&model, &w, &err), &err);
    expect_error("other", qt_calibrate_check(q, other, model, &err), QT_E_INPUT,
                 "a.qcal: made from another model than tests/golden/models/llama: ", &err);
    qt_model_close(model);
    qt_ckpt_close(other);
    qt_qcal_close(q);
}

/* ---- merging -------------------------------------------------------------------------------- */

static int merge(const char *name, const char *const *from, size_t n, struct qt_err *err)
{
    char paths[3][512];
    const char *list[3];
    struct qt_calibrate_options opt = {.force = true};
    for (size_t i = 0; i < n; i++) {
        snprintf(paths[i], sizeof paths[i], "%s", fixture_path(dir, from[i]));
        list[i] = paths[i];
    }
    return qt_calibrate_merge(fixture_path(dir, name), list, n, &opt, err);
}

#define MERGE(name, n, ...) merge(name, (const char *const[]){__VA_ARGS__}, n, &err)

static void compare_inputs(const struct qt_qcal *a, const struct qt_qcal *b, size_t layer,
                           size_t input)
{
    struct qt_err err = {0};
    struct qt_channels c, d;
    size_t k = qt_qcal_info(a)->layer[layer].k[input];
    double *g = calloc(k * k, sizeof *g), *h = calloc(k * k, sizeof *h);
    expect_ok("channels", qt_qcal_channels(&c, a, layer, input, &err), &err);
    expect_ok("channels", qt_qcal_channels(&d, b, layer, input, &err), &err);
    expect_ok("H", qt_qcal_hessian(g, a, layer, input, c.sum2, &err), &err);
    expect_ok("H", qt_qcal_hessian(h, b, layer, input, d.sum2, &err), &err);
    assert_memory_equal(c.hist, d.hist, k * QT_HIST_BINS * sizeof *c.hist);
    assert_memory_equal(c.absmax, d.absmax, k * sizeof *c.absmax);
    for (size_t i = 0; i < k; i++) {
        assert_true(fabs(c.sum2[i] - d.sum2[i]) <= 1e-12 * c.sum2[i]);
        for (size_t j = 0; j <= i; j++)
            assert_true(fabs(g[i * k + j] - h[i * k + j]) <=
                        2 * rounding * sqrt(c.sum2[i] * c.sum2[j]));
    }
    qt_channels_free(&c);
    qt_channels_free(&d);
    free(g);
    free(h);
}

static void test_merge(void **state)
{
    struct qt_err err = {0};
    (void)state;
    must_run("all.qcal", 0, 6);
    must_run("a.qcal", 0, 1);
    must_run("b.qcal", 1, 2);
    must_run("c.qcal", 3, 3);
    expect_ok("merge", MERGE("abc.qcal", 3, "a.qcal", "b.qcal", "c.qcal"), &err);
    struct qt_qcal *all = must_open("all.qcal"), *sum = must_open("abc.qcal");
    assert_int_equal(qt_qcal_info(sum)->nparts, 3);
    assert_int_equal(qt_qcal_info(sum)->tokens, 6 * SEQLEN);
    for (size_t l = 0; l < qt_qcal_info(all)->layers; l++)
        for (size_t i = 0; i < QT_INPUTS; i++)
            compare_inputs(all, sum, l, i);
    qt_qcal_close(all);
    qt_qcal_close(sum);
    /* The order has no effect, and merging in two steps changes the sums only by rounding. */
    expect_ok("merge", MERGE("cab.qcal", 3, "c.qcal", "a.qcal", "b.qcal"), &err);
    assert_true(same_file("abc.qcal", "cab.qcal"));
    expect_ok("merge", MERGE("ab.qcal", 2, "a.qcal", "b.qcal"), &err);
    expect_ok("merge", MERGE("ab-c.qcal", 2, "ab.qcal", "c.qcal"), &err);
    /* The output is one of the inputs. */
    expect_ok("merge", MERGE("c.qcal", 2, "ab.qcal", "c.qcal"), &err);
    assert_true(same_file("c.qcal", "ab-c.qcal"));
}

static void test_merge_refused(void **state)
{
    struct qt_err err = {0};
    struct qt_ckpt *nano = ckpt;
    (void)state;
    must_run("a.qcal", 0, 1);
    must_run("b.qcal", 1, 1);
    expect_error("twice", MERGE("m.qcal", 2, "a.qcal", "a.qcal"), QT_E_USAGE, "count twice", &err);
    expect_ok("merge", MERGE("ab.qcal", 2, "a.qcal", "b.qcal"), &err);
    expect_error("part", MERGE("m.qcal", 2, "ab.qcal", "b.qcal"), QT_E_USAGE, "count twice", &err);
    expect_error("absent", MERGE("m.qcal", 2, "a.qcal", "no.qcal"), QT_E_INPUT, "no.qcal: cannot",
                 &err);
    expect_ok("open", qt_ckpt_open(&ckpt, "tests/golden/models/llama", &err), &err);
    for (size_t i = 0; i < SEQLEN; i++)
        ids[i] = (uint32_t)i;
    struct qt_qcal_part part = {.samples = 1, .seqlen = 8, .data = data_files, .ndata = 1};
    struct qt_calibrate_options opt = {.backend = be};
    expect_ok("llama", qt_calibrate(fixture_path(dir, "l.qcal"), ckpt, ids, &part, &opt, &err),
              &err);
    expect_error("models", MERGE("m.qcal", 2, "a.qcal", "l.qcal"), QT_E_INPUT,
                 "l.qcal: made from another model than ", &err);
    assert_false(qt_path_exists(fixture_path(dir, "m.qcal")));
    assert_false(qt_path_exists(fixture_path(dir, "m.qcal.partial")));
    qt_ckpt_close(ckpt);
    ckpt = nano;
}

/* ---- failures ------------------------------------------------------------------------------- */

/* A backend that reports an activation that is not finite, in the second layer. */
static int calls;

static int bad_channels(struct qt_backend *b, const struct qt_channels *c, const float *x, size_t m,
                        size_t k, struct qt_err *err)
{
    int rc = be->channels(b, c, x, m, k, err);
    if (++calls == 6)
        c->sum2[17] += INFINITY;
    return rc;
}

static void test_not_finite(void **state)
{
    struct qt_err err = {0};
    struct qt_backend bad = *be;
    (void)state;
    bad.channels = bad_channels;
    calls = 0;
    expect_error("infinite", run("a.qcal", &bad, 0, 1, &err), QT_E_INPUT,
                 NANO ": layer 1, input 1: sums of channel 17 are not finite", &err);
    assert_false(qt_path_exists(fixture_path(dir, "a.qcal")));
    assert_false(qt_path_exists(fixture_path(dir, "a.qcal.partial")));
}

static void test_refused(void **state)
{
    struct qt_err err = {0};
    struct qt_qcal_part part = {.samples = 1, .seqlen = 4096, .data = data_files, .ndata = 1};
    struct qt_calibrate_options opt = {.backend = be};
    (void)state;
    expect_error("seqlen", qt_calibrate(fixture_path(dir, "a.qcal"), ckpt, ids, &part, &opt, &err),
                 QT_E_USAGE, "windows of 4096 tokens; the model takes 2048", &err);
    part.seqlen = 2048;
    part.samples = 1 << 21;
    expect_error("tokens", qt_calibrate(fixture_path(dir, "a.qcal"), ckpt, ids, &part, &opt, &err),
                 QT_E_USAGE, "too many", &err);
    assert_false(qt_path_exists(fixture_path(dir, "a.qcal.partial")));
}

/* The nth allocation fails. */
static void test_no_memory(void **state)
{
    struct qt_err err = {0};
    int rc = QT_E_RESOURCE;
    long n = 0;
    (void)state;
    /* One thread, so that the n-th allocation is always the same. */
    qt_threads_set(1);
    for (; rc != QT_OK; n += 1 + n / 16) {
        qt_mem_fail_after(n);
        rc = run("a.qcal", be, 0, 1, &err);
        qt_mem_fail_after(-1);
        assert_true(rc == QT_OK || rc == QT_E_RESOURCE);
        assert_true(qt_path_exists(fixture_path(dir, "a.qcal")) == (rc == QT_OK));
        assert_false(qt_path_exists(fixture_path(dir, "a.qcal.partial")));
    }
    assert_true(n > 100);
    must_run("b.qcal", 1, 1);
    rc = QT_E_RESOURCE;
    for (n = 0; rc != QT_OK; n += 1 + n / 16) {
        qt_mem_fail_after(n);
        rc = MERGE("m.qcal", 2, "a.qcal", "b.qcal");
        qt_mem_fail_after(-1);
        assert_true(rc == QT_OK || rc == QT_E_RESOURCE);
        assert_true(qt_path_exists(fixture_path(dir, "m.qcal")) == (rc == QT_OK));
        assert_false(qt_path_exists(fixture_path(dir, "m.qcal.partial")));
    }
    assert_true(n > 100);
    qt_threads_set(0);
}

/* ---- channels and quantiles ----------------------------------------------------------------- */

static uint64_t rng = 88172645463325252u;

static double uniform(void)
{
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return ((double)(rng >> 11) + 0.5) * 0x1p-53;
}

/* Magnitudes from below the first bin to beyond the last. */
static float wild(void)
{
    return (float)((uniform() < 0.5 ? -1 : 1) * exp2(uniform() * 60 - 30));
}

static void test_channels_op(void **state)
{
    static const size_t shapes[][2] = {{1, 1}, {3, 63}, {100, 64}, {70, 65}, {257, 200}};
    static const float edges[] = {0,     -0.0f,   0x1p-149f, 0x1p-16f,    0x1.fffffep-17f, 0x1p15f,
                                  65504, 3.4e38f, 1,         1.41421354f, 1.41421366f};
    struct qt_err err = {0};
    (void)state;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        size_t m = shapes[s][0], k = shapes[s][1], half = m / 2;
        float *x = malloc(m * k * sizeof *x);
        struct qt_channels c[3];
        for (size_t i = 0; i < m * k; i++)
            x[i] = i % 7 == 0 ? edges[i / 7 % (sizeof edges / sizeof *edges)] : wild();
        for (int t = 0; t < 3; t++) {
            qt_threads_set(1 << t);
            assert_int_equal(qt_channels_new(&c[t], k, &err), QT_OK);
            /* Added in two parts. */
            size_t cut = t == 0 ? m : half;
            expect_ok("op", be->channels(be, &c[t], x, cut, k, &err), &err);
            expect_ok("op", be->channels(be, &c[t], x + cut * k, m - cut, k, &err), &err);
            compare_channels(&c[t], x, m, k);
            qt_channels_free(&c[t]);
        }
        free(x);
    }
    qt_threads_set(0);
    assert_int_equal(qt_hist_bin(INFINITY), QT_HIST_BINS - 1);
    assert_int_equal(qt_hist_bin(NAN), QT_HIST_BINS - 1);
}

static int compare_floats(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static void test_quantile(void **state)
{
    enum { N = 5000 };
    static const double quantiles[] = {0.001, 0.01, 0.5, 0.9, 0.99, 0.999, 0.9999, 1};
    float *x = malloc(N * sizeof *x);
    (void)state;
    for (int round = 0; round < 20; round++) {
        uint32_t hist[QT_HIST_BINS] = {0};
        double scale = exp2(uniform() * 24 - 16);
        for (size_t i = 0; i < N; i++) {
            /* Heavy-tailed, as activations are. */
            x[i] = (float)(scale * uniform() / pow(uniform(), round % 3 * 0.4));
            x[i] = round == 7 ? 0 : round == 8 ? 3.0f : x[i];
            hist[qt_hist_bin(x[i])]++;
        }
        qsort(x, N, sizeof *x, compare_floats);
        for (size_t s = 0; s < sizeof quantiles / sizeof *quantiles; s++) {
            double got = qt_hist_quantile(hist, x[N - 1], quantiles[s]);
            float want = x[(size_t)fmax(ceil(quantiles[s] * N - 1e-9), 1) - 1];
            uint32_t b = qt_hist_bin(want);
            double lo = b ? exp2(((double)b - 33) / 2) : 0, hi = exp2(((double)b - 32) / 2);
            assert_true(got >= lo && (got <= hi || b == QT_HIST_BINS - 1));
            assert_true(got <= (double)x[N - 1]);
        }
        assert_true(qt_hist_quantile(hist, x[N - 1], 1) == (double)x[N - 1]);
    }
    free(x);
}

/* ---- windows -------------------------------------------------------------------------------- */

enum { WINDOW = 4, WINDOWS = 10 };

/* Numbers of the windows taken from data with ascending ids; the numbers must ascend. */
static void windows_of(size_t *taken, size_t samples, uint64_t seed)
{
    uint32_t all[WINDOWS * WINDOW + 3], *out;
    const struct qt_data data = {.ids = all, .count = sizeof all / sizeof *all, .first = "data"};
    struct qt_err err = {0};
    for (size_t i = 0; i < data.count; i++)
        all[i] = (uint32_t)i;
    expect_ok("windows", qt_data_windows(&out, &data, samples, WINDOW, seed, &err), &err);
    for (size_t s = 0; s < samples; s++) {
        taken[s] = out[s * WINDOW] / WINDOW;
        for (size_t i = 0; i < WINDOW; i++)
            assert_int_equal(out[s * WINDOW + i], taken[s] * WINDOW + i);
        assert_true(taken[s] < WINDOWS && (s == 0 || taken[s] > taken[s - 1]));
    }
    qt_free(out);
    expect_error("too many", qt_data_windows(&out, &data, WINDOWS + 1, WINDOW, seed, &err),
                 QT_E_INPUT, "data: 43 tokens make 10 windows of 4, but 11 are wanted", &err);
    assert_null(out);
}

/* Seed 0: evenly spread. Other seeds: all windows are drawn equally often. */
static void test_windows(void **state)
{
    static const size_t even[] = {0, 2, 5, 7};
    size_t taken[WINDOWS], times[WINDOWS] = {0};
    (void)state;
    windows_of(taken, 4, 0);
    assert_memory_equal(taken, even, sizeof even);
    windows_of(taken, 1, 0);
    assert_int_equal(taken[0], 0);
    for (uint64_t seed = 0; seed < 1000; seed++) {
        windows_of(taken, WINDOWS, seed);
        windows_of(taken, 4, seed + 1);
        for (size_t s = 0; s < 4; s++)
            times[taken[s]]++;
    }
    for (size_t i = 0; i < WINDOWS; i++) /* 400 are expected, with a deviation of 15 */
        assert_in_range(times[i], 320, 480);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_against_naive, setup, teardown),
        cmocka_unit_test_setup_teardown(test_threads, setup, teardown),
        cmocka_unit_test_setup_teardown(test_other_model, setup, teardown),
        cmocka_unit_test_setup_teardown(test_merge, setup, teardown),
        cmocka_unit_test_setup_teardown(test_merge_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(test_not_finite, setup, teardown),
        cmocka_unit_test_setup_teardown(test_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(test_no_memory, setup, teardown),
        cmocka_unit_test_setup_teardown(test_channels_op, setup, teardown),
        cmocka_unit_test_setup_teardown(test_quantile, setup, teardown),
        cmocka_unit_test(test_windows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
