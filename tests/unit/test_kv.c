/* 4-bit KV caches: rounding against a plain reference, the fit of static scales, and the scales of
 * a container: fitted to the keys of the stored model, the same after interruptions and for any
 * number of threads, refused when invalid. */
#include "fixture.h"

#include "kernels/kernels.h"
#include "pack/kv/fit.h"
#include "pack/pack.h"

#include <float.h>
#include <math.h>
#include <time.h>

static uint64_t seed;

static uint32_t random_u32(void)
{
    seed += 0x9e3779b97f4a7c15u; /* splitmix64 */
    uint64_t z = seed;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)(z >> 32);
}

static float random_float(void) /* heavy tails */
{
    float u = (float)random_u32() / 4294967296.0f * 2 - 1;
    return u * u * u * 8;
}

/* ---- rounding ------------------------------------------------------------------------------- */

static float f16(float x)
{
    return qt_f16_to_f32(qt_f32_to_f16(x));
}

static float clamp_f16(float x)
{
    return fminf(fmaxf(x, -65504), 65504);
}

static float code(float q)
{
    return fminf(fmaxf(rintf(q), 0), 15);
}

/* The zero-point of keys around `middle`. */
static float key_zero(float middle, float scale)
{
    return fminf(fmaxf(rintf(7.5f - middle * (1 / scale)), -63), 63);
}

/* Returns a key rounded with the parameter of its group: the scale ends in the magnitude of the
 * zero-point. */
static float cached(float x, const float *group, size_t n)
{
    float low = clamp_f16(group[0]), high = low;
    for (size_t i = 0; i < n; i++) {
        low = fminf(low, clamp_f16(group[i]));
        high = fmaxf(high, clamp_f16(group[i]));
    }
    const float middle = (low + high) / 2;
    const int want =
        (int)fmaxf(qt_f32_to_f16(fmaxf(high - low, fabsf(middle) * (9.f / 32)) / 15), 96);
    const int near = (int)fabsf(key_zero(middle, qt_f16_to_f32((uint16_t)want)));
    int best = near;
    for (int p = near; p < 0x7c00; p += 64)
        best = abs(p - want) <= abs(best - want) ? p : best;
    const float zero = key_zero(middle, qt_f16_to_f32((uint16_t)best));
    const float s = qt_f16_to_f32((uint16_t)(best - near + (int)fabsf(zero)));
    return (code(clamp_f16(x) * (1 / s) + zero) - zero) * s;
}

/* Returns a value rounded with the FP16 number of its n channels: of all that end in the
 * zero-point, the one nearest to the scale. */
static float cached_value(float x, const float *group, size_t n)
{
    float low = 0, high = 0;
    for (size_t i = 0; i < n; i++) {
        low = fminf(low, clamp_f16(group[i]));
        high = fmaxf(high, clamp_f16(group[i]));
    }
    const float range = high - low, zero = range > 0 ? rintf(low * -60 / range) / 4 : 0;
    const int want = qt_f32_to_f16(range / 15);
    int best = (int)(4 * zero);
    for (int p = best; p < 0x7c00; p += 64)
        best = abs(p - want) <= abs(best - want) ? p : best;
    const float s = best ? qt_f16_to_f32((uint16_t)best) : 1, inverse = 1 / s;
    return (code(clamp_f16(x) * inverse + zero) - zero) * s;
}

static float cached_static(float x, float scale, float zero)
{
    float inverse = 1 / scale;
    return (code(fmaf(x, inverse, zero)) - zero) * scale;
}

enum { SEQS = 2, KV_HEADS = 3, DIM = 24, WIDTH = KV_HEADS * DIM, LAYERS = 2, MAX_SEQLEN = 130 };

/* Tokens of very different magnitudes, some constant, some outside the range of FP16. */
static void random_tokens(float *x, size_t m)
{
    for (size_t t = 0; t < m; t++) {
        float size = ldexpf(1, (int)(random_u32() % 40) - 22);
        bool constant = random_u32() % 10 == 0;
        for (size_t c = 0; c < WIDTH; c++)
            x[t * WIDTH + c] = size * (constant ? 1.001f : random_float());
    }
}

static void check_caches(struct qt_backend *be, const struct qt_kv *kv, size_t seqlen)
{
    size_t m = SEQS * seqlen, layer = 1;
    struct qt_attention a = {.seqlen = seqlen, .heads = 6, .kv_heads = KV_HEADS, .head_dim = DIM};
    const struct qt_linear key = {.layer = layer};
    static float k[SEQS * MAX_SEQLEN * WIDTH], v[SEQS * MAX_SEQLEN * WIDTH];
    static float rk[SEQS * MAX_SEQLEN * WIDTH], rv[SEQS * MAX_SEQLEN * WIDTH];
    static float exact[SEQS * MAX_SEQLEN * WIDTH];
    float group[QT_KV_GROUP];
    random_tokens(k, m);
    random_tokens(v, m);
    memcpy(rk, k, m * WIDTH * sizeof *k);
    memcpy(rv, v, m * WIDTH * sizeof *v);
    assert_int_equal(qt_kv_apply((void *)(uintptr_t)kv, be, rk, rv, exact, &key, &key, m, &a, NULL),
                     QT_OK);
    assert_ptr_equal(a.exact_keys, kv->keys == QT_KV_KEYS_CHANNEL ? exact : NULL);
    for (size_t i = 0; i < m * WIDTH; i++) {
        size_t t = i / WIDTH % seqlen, c = i % WIDTH, head = i - c % DIM;
        const size_t group_of_16 = c % DIM / 16 * 16;
        assert_true(rv[i] ==
                    cached_value(v[i], v + head + group_of_16, qt_min_size(16, DIM - group_of_16)));
        if (kv->keys == QT_KV_KEYS_TOKEN)
            assert_true(rk[i] == cached(k[i], k + head, DIM));
        if (kv->keys == QT_KV_KEYS_STATIC)
            assert_true(rk[i] == cached_static(k[i], kv->scale[layer * WIDTH + c],
                                               kv->zero[layer * WIDTH + c]));
        if (kv->keys != QT_KV_KEYS_CHANNEL)
            continue;
        /* Token 0 is a group of its own; keys are FP16 before they are rounded. */
        size_t first = t == 0 ? 0 : t < 64 ? 1 : t / 64 * 64, n = 0;
        for (size_t u = first; u < (t == 0 ? 1 : qt_min_size(t / 64 * 64 + 64, seqlen)); u++)
            group[n++] = f16(clamp_f16(k[i + u * WIDTH - t * WIDTH]));
        assert_true(exact[i] == group[t - first]);
        assert_true(rk[i] == (t == 0 ? exact[i] : cached(group[t - first], group, n)));
    }
}

static void caches_round_as_defined(void **state)
{
    static const size_t lengths[] = {1, 2, 64, 65, 66, 129, MAX_SEQLEN};
    float scale[LAYERS * WIDTH], zero[LAYERS * WIDTH];
    struct qt_backend *be;
    (void)state;
    assert_int_equal(qt_backend_cpu_open(&be, NULL), QT_OK);
    for (int round = 0; round < 30; round++) {
        struct qt_kv kv = {.keys = (enum qt_kv_keys)(QT_KV_KEYS_CHANNEL + round % 3),
                           .scale = scale,
                           .zero = zero};
        for (size_t i = 0; i < LAYERS * WIDTH; i++) {
            scale[i] = ldexpf(1 + fabsf(random_float()), (int)(random_u32() % 30) - 20);
            zero[i] = 8 * random_float();
        }
        check_caches(be, &kv, lengths[(size_t)round / 3 % 7]);
    }
    be->close(be);
}

static float *golden(const char *name, size_t count)
{
    char path[64], *data;
    size_t size;
    struct qt_err err = {0};
    snprintf(path, sizeof path, "tests/golden/kv/%s.bin", name);
    if (qt_file_read(&data, &size, path, 1 << 20, &err) < 0)
        fail_msg("%s: %s", path, err.reason);
    assert_int_equal(size, count * sizeof(float));
    return (float *)data;
}

/* tests/oracle/make_kv_golden.py computes the numbers. */
static void golden_numbers(void **state)
{
    enum { TOKENS = 70, HEADS = 2, CHANNELS = 20, COUNT = TOKENS * HEADS * CHANNELS };
    const struct {
        const char *name;
        enum qt_kv_keys keys;
    } cases[] = {{"channel", QT_KV_KEYS_CHANNEL}, {"token", QT_KV_KEYS_TOKEN}};
    static float exact[COUNT];
    const struct qt_linear key = {0};
    struct qt_backend *be;
    (void)state;
    assert_int_equal(qt_backend_cpu_open(&be, NULL), QT_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct qt_attention a = {
            .seqlen = TOKENS, .heads = HEADS, .kv_heads = HEADS, .head_dim = CHANNELS};
        struct qt_kv kv = {.keys = cases[i].keys};
        float *k = golden("keys", COUNT), *v = golden("values", COUNT);
        float *want_k = golden(cases[i].name, COUNT), *want_v = golden("rounded", COUNT);
        assert_int_equal(qt_kv_apply(&kv, be, k, v, exact, &key, &key, TOKENS, &a, NULL), QT_OK);
        for (size_t j = 0; j < COUNT; j++)
            assert_true(k[j] == want_k[j] && v[j] == want_v[j]); /* 0 may have either sign */
        qt_free(k);
        qt_free(v);
        qt_free(want_k);
        qt_free(want_v);
    }
    be->close(be);
}

/* For each kind of key scales, at random positions of keys and values. */
static void nonfinite_caches_are_refused(void **state)
{
    enum { M = SEQS * 65 };
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    struct qt_attention a = {.seqlen = 65, .heads = 6, .kv_heads = KV_HEADS, .head_dim = DIM};
    const struct qt_linear key = {.weight = "k_proj"}, value = {.weight = "v_proj"};
    float scale[WIDTH], zero[WIDTH] = {0};
    static float k[M * WIDTH], v[M * WIDTH], exact[M * WIDTH];
    struct qt_backend *be;
    struct qt_err err;
    (void)state;
    assert_int_equal(qt_backend_cpu_open(&be, NULL), QT_OK);
    for (size_t c = 0; c < WIDTH; c++)
        scale[c] = 1;
    for (int round = 0; round < 18; round++) {
        struct qt_kv kv = {.keys = (enum qt_kv_keys)(QT_KV_KEYS_CHANNEL + round % 3),
                           .scale = scale,
                           .zero = zero};
        bool in_keys = round / 3 % 2;
        random_tokens(k, M);
        random_tokens(v, M);
        (in_keys ? k : v)[random_u32() % (M * WIDTH)] = bad[round / 6];
        expect_error("apply", qt_kv_apply(&kv, be, k, v, exact, &key, &value, M, &a, &err),
                     QT_E_INPUT,
                     in_keys ? "k_proj: gives keys that are not finite"
                             : "v_proj: gives values that are not finite",
                     &err);
    }
    be->close(be);
}

/* Results computed by hand: ties go to the even code, values outside the range to its ends. */
static void static_keys_by_hand(void **state)
{
    static const struct {
        float x, scale, zero, rounded;
    } cases[] = {{0, 1, 0, 0},          {0.5f, 1, 0, 0},    {1.5f, 1, 0, 2},
                 {2.5f, 1, 0, 2},       {15.4f, 1, 0, 15},  {1e30f, 1, 0, 15},
                 {-3, 1, 0, 0},         {-3, 0.5f, 8, -3},  {-4.25f, 0.5f, 8, -4},
                 {3.5f, 0.5f, 8, 3.5f}, {9, 0.5f, 8, 3.5f}, {0, 0.25f, 7.5f, 0.125f}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_true(qt_kv_static(cases[i].x, cases[i].scale, cases[i].zero) == cases[i].rounded);
}

/* ---- the scale of a channel ----------------------------------------------------------------- */

enum { SAMPLE = 700 };

static double error_of(const float *x, size_t n, float scale, float zero)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += pow((double)(cached_static(x[i], scale, zero) - x[i]), 2);
    return sum;
}

/* Returns the least error over 60 x 60 ranges. */
static double least_error(const float *x, size_t n)
{
    float low = x[0], high = x[0];
    double best = INFINITY;
    for (size_t i = 0; i < n; i++) {
        low = fminf(low, x[i]);
        high = fmaxf(high, x[i]);
    }
    for (int a = 0; a < 60; a++)
        for (int b = 0; a + b < 60; b++) {
            float width = high - low, from = low + width * (float)a / 60;
            float scale = (high - width * (float)b / 60 - from) / 15;
            best = fmin(best, error_of(x, n, scale, -from / scale));
        }
    return best;
}

static void fit(float *scale, float *zero, const float *x, size_t n)
{
    static float sorted[SAMPLE];
    static double prefix_sums[2 * (SAMPLE + 1)];
    memcpy(sorted, x, n * sizeof *x);
    qt_kv_fit(scale, zero, sorted, n, prefix_sums);
    assert_true(*scale >= FLT_MIN && isfinite(*scale) && isfinite(*zero));
}

/* Bell-shaped samples, heavy tails on one or both sides, single outliers, small samples: the error
 * is close to that of the best range, on average 2 % above it, 11 % in the worst of 600. */
static void scales_are_near_the_best(void **state)
{
    float x[SAMPLE], scale, zero;
    (void)state;
    for (int round = 0; round < 12; round++) {
        size_t n = round % 6 == 5 ? 20 : SAMPLE;
        float offset = 20 * random_float();
        for (size_t i = 0; i < n; i++) {
            float bell = 0;
            for (int j = 0; j < 4; j++)
                bell += (float)random_u32() * 0x1p-32f - 0.5f;
            float tail = random_float();
            float v = round % 3 == 0 ? bell : round % 3 == 1 ? tail : fabsf(tail) + bell;
            x[i] = offset + v;
        }
        if (round % 2)
            x[n / 2] += 30;
        fit(&scale, &zero, x, n);
        double got = error_of(x, n, scale, zero), least = least_error(x, n);
        if (got > 1.2 * least + 1e-9)
            fail_msg("round %d: error %g, but %g is possible", round, got, least);
    }
}

static void degenerate_samples_have_scales(void **state)
{
    static const struct {
        float x[4];
        size_t n;
        double error; /* upper bound, relative to the largest value */
    } cases[] = {{{0}, 1, 0},
                 {{-3.25f}, 1, 0},
                 {{1e30f, 1e30f, 1e30f}, 3, 0},
                 {{0, 0, 1e-42f}, 3, 1e-3},
                 {{-1, 2}, 2, 1e-6},
                 {{-3e38f, 3e38f}, 2, 1e-6},
                 {{1000, 1000.0001f, 1000}, 3, 1e-6},
                 {{-0.0f, 0, -0.0f, 0}, 4, 0}};
    float scale, zero;
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        float top = FLT_MIN;
        fit(&scale, &zero, cases[i].x, cases[i].n);
        for (size_t j = 0; j < cases[i].n; j++)
            top = fmaxf(top, fabsf(cases[i].x[j]));
        for (size_t j = 0; j < cases[i].n; j++) {
            float e = fabsf(qt_kv_static(cases[i].x[j], scale, zero) - cases[i].x[j]);
            if (!((double)e <= cases[i].error * (double)top))
                fail_msg("sample %zu, value %zu: off by %g", i, j, (double)e);
        }
    }
}

/* ---- containers ----------------------------------------------------------------------------- */

static const char *const model_dir = "tests/golden/models/llama";
enum { SEQLEN = 20, SAMPLES = 7, VOCAB = 97 };

struct world {
    char *dir;
    char out[2][256]; /* "a", "b" */
    struct qt_ckpt *ckpt;
    struct qt_backend *be;
    uint32_t ids[SEQLEN * SAMPLES];
    struct qt_calibration data;
    struct qt_learn_options learn;
    struct qt_err err;
};

static int set_up(void **state)
{
    struct world *w = calloc(1, sizeof *w);
    qt_threads_set(1); /* small loops: waking threads takes longer */
    w->dir = fixture_dir();
    for (int i = 0; i < 2; i++)
        snprintf(w->out[i], sizeof w->out[i], "%s/%c", w->dir, 'a' + i);
    expect_ok("model", qt_ckpt_open(&w->ckpt, model_dir, &w->err), &w->err);
    expect_ok("backend", qt_backend_cpu_open(&w->be, &w->err), &w->err);
    for (size_t i = 0; i < SEQLEN * SAMPLES; i++)
        w->ids[i] = random_u32() % VOCAB;
    w->data = (struct qt_calibration){
        .ids = w->ids, .samples = SAMPLES, .seqlen = SEQLEN, .backend = w->be};
    expect_ok("learn", qt_learn_parse(&w->learn, "passes=1,lr=0.01", &w->err), &w->err);
    w->learn.norms = true;
    *state = w;
    return 0;
}

static int tear_down(void **state)
{
    struct world *w = *state;
    static const char *const dirs[] = {"a", "b", "b.partial"};
    for (size_t i = 0; i < sizeof dirs / sizeof *dirs; i++)
        qt_dir_remove(fixture_path(w->dir, dirs[i]), NULL);
    fixture_remove(w->dir);
    w->be->close(w->be);
    qt_ckpt_close(w->ckpt);
    qt_threads_set(0);
    free(w);
    return 0;
}

static struct qt_quantize_options options(struct world *w, const char *out, const char *scheme)
{
    return (struct qt_quantize_options){
        .plan = {.scheme = scheme, .calibrated = true, .kv = QT_KV_KEYS_STATIC},
        .calibration = &w->data,
        .learn = strstr(scheme, "learn") ? &w->learn : NULL,
        .out_dir = w->out[strcmp(out, "b") == 0],
        .force = true,
    };
}

static int quantize(struct world *w, const struct qt_quantize_options *opt)
{
    struct qt_quantize_report report = {0};
    int rc = qt_quantize(&report, w->ckpt, opt, &w->err);
    json_decref(report.document);
    return rc;
}

static struct qt_container *open_container(struct world *w, const char *name)
{
    struct qt_container *c;
    expect_ok("container", qt_container_open(&c, fixture_path(w->dir, name), &w->err), &w->err);
    return c;
}

static struct qt_model_info info_of(struct world *w)
{
    struct qt_weights weights = qt_weights_of_ckpt(w->ckpt);
    struct qt_model *model;
    expect_ok("model", qt_model_open(&model, &weights, &w->err), &w->err);
    struct qt_model_info info = *qt_model_info(model);
    qt_model_close(model);
    return info;
}

/* All keys of the container's model, [LAYERS][tokens][width], from a separate run. */
struct keys {
    float *k;
    size_t width, layer, at;
};

static int keep_keys(void *ctx, struct qt_backend *be, float *k, float *v, float *exact,
                     const struct qt_linear *key, const struct qt_linear *value, size_t m,
                     struct qt_attention *a, struct qt_err *err)
{
    struct keys *keys = ctx;
    (void)v;
    (void)exact;
    (void)value;
    assert_int_equal(a->kv_heads * a->head_dim, keys->width);
    keys->at = key->layer == keys->layer ? keys->at : 0;
    keys->layer = key->layer;
    float *dst = keys->k + (key->layer * SAMPLES * SEQLEN + keys->at) * keys->width;
    keys->at += m;
    return be->download(be, dst, k, m * keys->width * sizeof *k, err);
}

static void run_model(struct keys *keys, struct world *w, const struct qt_container *c,
                      struct qt_model *model)
{
    enum { M = SAMPLES * SEQLEN };
    struct qt_weights weights = qt_weights_of_container(c);
    struct qt_embed_head *head;
    float *hidden;
    size_t width = qt_model_info(model)->hidden;
    weights.fake_quant.cache = keep_keys;
    weights.fake_quant.cache_ctx = keys;
    expect_ok("new", w->be->alloc(w->be, &hidden, M * width * sizeof *hidden, &w->err), &w->err);
    expect_ok("head", qt_embed_head_open(&head, model, &weights, w->be, &w->err), &w->err);
    expect_ok("embed", qt_embed_tokens(head, hidden, w->ids, M, SEQLEN, &w->err), &w->err);
    for (size_t l = 0; l < qt_model_info(model)->layers; l++) {
        struct qt_layer *layer;
        expect_ok("layer", qt_layer_open(&layer, model, l, &weights, w->be, &w->err), &w->err);
        expect_ok("run", qt_layer_run(layer, hidden, M, SEQLEN, NULL, &w->err), &w->err);
        qt_layer_close(layer);
    }
    qt_embed_head_close(head);
    w->be->free(w->be, hidden);
}

/* Key scales are fitted to the keys of the quantized and tuned model. */
static void scales_fit_the_stored_model(void **state)
{
    static const char *const schemes[] = {"none", "fp6", "w4ax:a8max=0.5", "nf4:g=32,learn=1"};
    enum { M = SAMPLES * SEQLEN };
    struct world *w = *state;
    for (size_t s = 0; s < sizeof schemes / sizeof *schemes; s++) {
        struct qt_quantize_options opt = options(w, "a", schemes[s]);
        struct qt_model *model;
        struct qt_kv kv;
        float x[M], scale, zero;
        double prefix_sums[2 * (M + 1)];
        expect_ok(schemes[s], quantize(w, &opt), &w->err);
        struct qt_container *c = open_container(w, "a");
        struct qt_weights weights = qt_weights_of_container(c);
        expect_ok("model", qt_model_open(&model, &weights, &w->err), &w->err);
        const struct qt_model_info *info = qt_model_info(model);
        struct keys keys = {.width = info->kv_heads * info->head_dim, .layer = info->layers};
        keys.k = calloc(info->layers * M * keys.width, sizeof *keys.k);
        expect_ok("kv", qt_kv_open(&kv, c, info, &w->err), &w->err);
        assert_ptr_equal(kv.container, c);
        run_model(&keys, w, c, model);
        for (size_t i = 0; i < info->layers * keys.width; i++) {
            size_t layer = i / keys.width;
            for (size_t t = 0; t < M; t++)
                x[t] = keys.k[(layer * M + t) * keys.width + i % keys.width];
            qt_kv_fit(&scale, &zero, x, M, prefix_sums);
            assert_true(kv.scale[i] == scale && kv.zero[i] == zero);
        }
        free(keys.k);
        qt_kv_free(&kv);
        qt_model_close(model);
        qt_container_close(c);
    }
}

static bool same_files(struct world *w)
{
    static const char *const names[] = {"model.safetensors", "qtool.json", "SHA256SUMS"};
    bool same = true;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char *text[2], name[64];
        size_t size[2];
        for (int j = 0; j < 2; j++) {
            snprintf(name, sizeof name, "%c/%s", 'a' + j, names[i]);
            const char *path = fixture_path(w->dir, name);
            expect_ok(path, qt_file_read(&text[j], &size[j], path, 1 << 24, &w->err), &w->err);
        }
        same = same && size[0] == size[1] && memcmp(text[0], text[1], size[0]) == 0;
        qt_free(text[0]);
        qt_free(text[1]);
    }
    return same;
}

static void same_bytes_for_any_threads(void **state)
{
    struct world *w = *state;
    struct qt_quantize_options a = options(w, "a", "none"), b = options(w, "b", "none");
    qt_threads_set(1);
    expect_ok("1 thread", quantize(w, &a), &w->err);
    for (int threads = 2; threads <= 4; threads++) {
        qt_threads_set(threads);
        expect_ok("more threads", quantize(w, &b), &w->err);
        assert_true(same_files(w));
    }
}

static int polls_left;
static bool stop_soon(void)
{
    return polls_left-- <= 0;
}

/* Stops `stops` runs, the first ones between layers of the key calibration, then earlier and
 * earlier, and resumes each. */
static void check_resume(struct world *w, const char *scheme, int stops)
{
    struct qt_quantize_options a = options(w, "a", scheme), b = options(w, "b", scheme);
    b.interrupted = stop_soon;
    polls_left = 1000;
    expect_ok("uninterrupted", quantize(w, &b), &w->err);
    int polls = 1000 - polls_left;
    a.plan.kv = QT_KV_KEYS_NONE; /* the plan without a KV cache has another identity */
    expect_ok("without", quantize(w, &a), &w->err);
    assert_false(same_files(w));
    a.plan.kv = QT_KV_KEYS_STATIC;
    expect_ok("with", quantize(w, &a), &w->err);
    for (int i = 0, after = polls - 1; i < stops; i++, after -= i < 3 ? 1 : 5) {
        assert_true(after >= 0);
        qt_dir_remove(fixture_path(w->dir, "b"), NULL);
        b.resume = false;
        polls_left = after;
        expect_error("stopped", quantize(w, &b), QT_E_INTERRUPTED, "interrupted", &w->err);
        b.resume = true;
        polls_left = 1000;
        b.plan.kv = QT_KV_KEYS_NONE;
        expect_error("other options", quantize(w, &b), QT_E_RESUME, "options", &w->err);
        b.plan.kv = QT_KV_KEYS_STATIC;
        expect_ok("resumed", quantize(w, &b), &w->err);
        assert_true(same_files(w));
    }
}

static void interrupted_runs_resume(void **state)
{
    check_resume(*state, "none", 5);
    check_resume(*state, "nf4:g=32,learn=1", 1);
}

/* Keys with scales that the cache makes: only an entry of the manifest, and no data is needed. */
static void other_keys_need_no_data(void **state)
{
    static const struct {
        enum qt_kv_keys keys;
        const char *entry;
    } cases[] = {{QT_KV_KEYS_CHANNEL, "{\"dtype\":\"F16\",\"group\":64,\"scales\":\"channel\"}"},
                 {QT_KV_KEYS_TOKEN, "{\"dtype\":\"F16\",\"scales\":\"token\"}"}};
    struct world *w = *state;
    struct qt_model_info info = info_of(w);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct qt_quantize_options opt = options(w, "a", "fp6");
        opt.calibration = NULL;
        opt.plan.calibrated = false;
        opt.plan.kv = cases[i].keys;
        expect_ok("quantize", quantize(w, &opt), &w->err);
        opt.resume = true;
        opt.force = false;
        expect_ok("resume", quantize(w, &opt), &w->err);
        struct qt_container *c = open_container(w, "a");
        char *entry =
            json_dumps(json_object_get(qt_kv_entry(c), "keys"), JSON_COMPACT | JSON_SORT_KEYS);
        assert_string_equal(entry, cases[i].entry);
        free(entry);
        struct qt_kv kv;
        expect_ok("open", qt_kv_open(&kv, c, &info, &w->err), &w->err);
        assert_int_equal(kv.keys, cases[i].keys);
        assert_ptr_equal(kv.container, c);
        assert_null(kv.scale);
        qt_kv_free(&kv);
        qt_container_close(c);
    }
}

static void sizes_count_everything(void **state)
{
    (void)state;
    /* Keys: 4 bits, and 16 for 64 tokens or a head; values: 4 bits and 16 for 16 channels. */
    assert_true(qt_kv_bits(QT_KV_KEYS_CHANNEL, 128) == (4.25 + 5) / 2);
    assert_true(qt_kv_bits(QT_KV_KEYS_STATIC, 64) == (4. + 5) / 2);
    assert_true(qt_kv_bits(QT_KV_KEYS_TOKEN, 64) == (4.25 + 5) / 2);
    assert_true(qt_kv_bits(QT_KV_KEYS_STATIC, 40) == (4 + 4 + 48. / 40) / 2);
    assert_int_equal(qt_kv_tail_bytes(QT_KV_KEYS_CHANNEL, 3, 8, 128), 3 * 8 * 128 * 65 * 2);
    assert_int_equal(qt_kv_tail_bytes(QT_KV_KEYS_STATIC, 3, 8, 128), 0);
    assert_true(qt_kv_sequence_bits(QT_KV_KEYS_CHANNEL, 64, 520) == (4.25 + 5) / 2 + 1);
    assert_true(qt_kv_sequence_bits(QT_KV_KEYS_TOKEN, 64, 520) == (4.25 + 5) / 2);
}

static void needs_data(void **state)
{
    struct world *w = *state;
    struct qt_quantize_options opt = options(w, "a", "fp6");
    opt.calibration = NULL;
    opt.plan.calibrated = false;
    expect_error("no data", quantize(w, &opt), QT_E_USAGE, "calibration data (--data)", &w->err);
    assert_false(qt_path_exists(fixture_path(w->dir, "a")));
}

/* ---- hostile containers --------------------------------------------------------------------- */

static json_t *kv_of(json_t *manifest)
{
    return json_object_get(manifest, "kv");
}

static json_t *tensors_of(json_t *manifest)
{
    return json_object_get(kv_of(manifest), "tensors");
}

static void bits_8(json_t *m)
{
    json_object_set_new(kv_of(m), "bits", json_integer(8));
}
static void bits_text(json_t *m)
{
    json_object_set_new(kv_of(m), "bits", json_string("4"));
}
static void keys_by_token(json_t *m)
{
    json_object_set_new(json_object_get(kv_of(m), "keys"), "scales", json_string("token"));
}
static void keys_by_group_of_32(json_t *m)
{
    json_object_set_new(
        kv_of(m), "keys",
        json_pack("{s:s, s:s, s:i}", "scales", "channel", "dtype", "F16", "group", 32));
}
static void keys_by_group(json_t *m)
{
    keys_by_group_of_32(m);
    json_object_set_new(json_object_get(kv_of(m), "keys"), "group", json_integer(64));
}
static void keys_gone(json_t *m)
{
    json_object_del(kv_of(m), "keys");
}
static void values_number(json_t *m)
{
    json_object_set_new(kv_of(m), "values", json_integer(1));
}
static void values_by_group_of_32(json_t *m)
{
    json_object_set_new(json_object_get(kv_of(m), "values"), "group", json_integer(32));
}
static void section_gone(json_t *m)
{
    json_object_del(m, "kv");
}
static void section_null(json_t *m)
{
    json_object_set_new(m, "kv", json_null());
}
static void tensors_array(json_t *m)
{
    json_object_set_new(kv_of(m), "tensors", json_array());
}
static void tensor_gone(json_t *m)
{
    json_object_del(tensors_of(m), "kv.layers.1.k_zero");
}
static void tensor_no_object(json_t *m)
{
    json_object_set_new(tensors_of(m), "kv.layers.1.k_zero", json_true());
}
static void tensor_more(json_t *m)
{
    json_object_set_new(tensors_of(m), "kv.layers.2.k_zero",
                        json_deep_copy(json_object_get(tensors_of(m), "kv.layers.1.k_zero")));
}
static void tensor_twice(json_t *m)
{
    json_object_set(json_object_get(m, "copied"), "kv.layers.1.k_zero",
                    json_object_get(tensors_of(m), "kv.layers.1.k_zero"));
}
static void tensor_shape(json_t *m)
{
    json_t *shape = json_object_get(json_object_get(tensors_of(m), "kv.layers.0.k_scale"), "shape");
    json_array_set_new(shape, 0, json_integer(4));
}
static void tensor_copied(json_t *m)
{
    tensor_twice(m);
    tensor_gone(m);
}
static void tensor_other(json_t *m)
{
    json_t *copied = json_object_get(m, "copied");
    tensor_copied(m);
    json_object_set(tensors_of(m), "model.norm.weight",
                    json_object_get(copied, "model.norm.weight"));
    json_object_del(copied, "model.norm.weight");
}

/* Opens the container and its scales; returns the first error. */
static int open_scales(struct world *w, const struct qt_model_info *info)
{
    struct qt_container *c;
    struct qt_kv kv;
    int rc = qt_container_open(&c, fixture_path(w->dir, "a"), &w->err);
    if (rc < 0)
        return rc;
    rc = qt_kv_open(&kv, c, info, &w->err);
    qt_kv_free(&kv);
    qt_container_close(c);
    return rc;
}

static void hostile_manifests_are_refused(void **state)
{
    static const struct {
        const char *name;
        void (*edit)(json_t *manifest);
        enum qt_status status;
        const char *message;
    } cases[] = {
        {"bits 8", bits_8, QT_E_INPUT, "'kv.bits' must be 4"},
        {"bits text", bits_text, QT_E_INPUT, "'kv.bits' must be 4"},
        {"keys by token", keys_by_token, QT_E_INPUT, "describe no cache that this version knows"},
        {"groups of 32", keys_by_group_of_32, QT_E_INPUT, "describe no cache"},
        {"groups with tensors", keys_by_group, QT_E_INPUT,
         "'kv.tensors' has 4 tensors, the cache of the model needs 0"},
        {"keys gone", keys_gone, QT_E_INPUT, "describe no cache that this version knows"},
        {"values by groups of 32", values_by_group_of_32, QT_E_INPUT, "describe no cache"},
        {"values number", values_number, QT_E_INPUT, "describe no cache"},
        {"section gone", section_gone, QT_E_INPUT,
         "kv.layers.0.k_scale: is not listed in 'tensors', 'copied' or 'kv'"},
        {"section null", section_null, QT_E_INPUT, "'kv.tensors' must be an object"},
        {"tensors array", tensors_array, QT_E_INPUT, "'kv.tensors' must be an object"},
        {"tensor gone", tensor_gone, QT_E_INPUT, "kv.layers.1.k_zero: is not listed in"},
        {"tensor no object", tensor_no_object, QT_E_INPUT,
         "kv.layers.1.k_zero: an entry of 'kv.tensors' must be a named object"},
        {"tensor more", tensor_more, QT_E_INPUT,
         "kv.layers.2.k_zero: is in the manifest but not in the safetensors files"},
        {"tensor twice", tensor_twice, QT_E_INPUT, "kv.layers.1.k_zero: is in the manifest twice"},
        {"tensor shape", tensor_shape, QT_E_INPUT,
         "kv.layers.0.k_scale: shape differs from the manifest's"},
        {"tensor copied", tensor_copied, QT_E_INPUT, "'kv.tensors' has 3 tensors"},
        {"tensor other", tensor_other, QT_E_INPUT,
         "kv.layers.1.k_zero: is missing from 'kv.tensors'"},
    };
    struct world *w = *state;
    struct qt_quantize_options opt = options(w, "a", "fp6");
    struct qt_model_info info = info_of(w);
    json_t *good;
    expect_ok("quantize", quantize(w, &opt), &w->err);
    expect_ok("good", open_scales(w, &info), &w->err);
    const char *path = fixture_path(w->dir, "a/qtool.json");
    expect_ok("manifest", qt_json_load(&good, path, 1 << 24, &w->err), &w->err);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_t *broken = json_deep_copy(good);
        cases[i].edit(broken);
        assert_int_equal(json_dump_file(broken, fixture_path(w->dir, "a/qtool.json"), 0), 0);
        expect_error(cases[i].name, open_scales(w, &info), cases[i].status, cases[i].message,
                     &w->err);
        json_decref(broken);
    }
    json_decref(good);
}

static void other_models_are_refused(void **state)
{
    struct world *w = *state;
    struct qt_quantize_options opt = options(w, "a", "none");
    struct qt_model_info info = info_of(w), other;
    expect_ok("quantize", quantize(w, &opt), &w->err);
    for (int i = 0; i < 4; i++) {
        other = info;
        other.layers += i == 0 ? 1 : 0;
        other.layers -= i == 1 ? 1 : 0;
        other.kv_heads *= i == 2 ? 2 : 1;
        other.head_dim /= i == 3 ? 2 : 1;
        expect_error("other model", open_scales(w, &other), QT_E_INPUT,
                     i < 2 ? "the model needs" : "kv.layers.0.k_scale: must be F32", &w->err);
    }
    opt.plan.kv = QT_KV_KEYS_NONE;
    expect_ok("quantize", quantize(w, &opt), &w->err);
    expect_error("no scales", open_scales(w, &info), QT_E_USAGE, "quantize with --kv 4", &w->err);
}

/* Overwrites scales, which are the last tensors of the file. */
static void hostile_values_are_refused(void **state)
{
    static const struct {
        float value;
        size_t tensor; /* scale and zero of layer 0, then of layer 1 */
        const char *message;
    } cases[] = {{NAN, 0, "kv.layers.0.k_scale: element 5 is not finite"},
                 {INFINITY, 1, "kv.layers.0.k_zero: element 5 is not finite"},
                 {-INFINITY, 3, "kv.layers.1.k_zero: element 5 is not finite"},
                 {0, 2, "kv.layers.1.k_scale: element 5 is 0, not a positive scale"},
                 {-1, 0, "kv.layers.0.k_scale: element 5 is -1, not a positive scale"},
                 {1e-40f, 2, "not a positive scale"},
                 {-1, 1, NULL},
                 {FLT_MIN, 0, NULL}};
    struct world *w = *state;
    struct qt_quantize_options opt = options(w, "a", "fp6");
    struct qt_model_info info = info_of(w);
    size_t bytes = info.kv_heads * info.head_dim * sizeof(float), size;
    char *data;
    expect_ok("quantize", quantize(w, &opt), &w->err);
    const char *path = fixture_path(w->dir, "a/model.safetensors");
    expect_ok("read", qt_file_read(&data, &size, path, 1 << 24, &w->err), &w->err);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *at = data + size - (4 - cases[i].tensor) * bytes + 5 * sizeof(float);
        char kept[sizeof(float)];
        memcpy(kept, at, sizeof kept);
        memcpy(at, &cases[i].value, sizeof kept);
        fixture_write(w->dir, "a/model.safetensors", data, size);
        if (cases[i].message)
            expect_error("value", open_scales(w, &info), QT_E_INPUT, cases[i].message, &w->err);
        else
            expect_ok("value", open_scales(w, &info), &w->err);
        memcpy(at, kept, sizeof kept);
    }
    qt_free(data);
}

static void allocation_failures(void **state)
{
    struct world *w = *state;
    struct qt_quantize_options opt = options(w, "a", "none");
    struct qt_model_info info = info_of(w);
    bool failed = true;
    for (long n = 0; failed; n += 1 + n / 4) {
        qt_mem_fail_after(n);
        int rc = quantize(w, &opt);
        qt_mem_fail_after(-1);
        failed = rc < 0;
        assert_int_equal(rc, failed ? QT_E_RESOURCE : QT_OK);
        assert_true(n < 100000);
    }
    failed = true;
    for (long n = 0; failed; n++) {
        qt_mem_fail_after(n);
        int rc = open_scales(w, &info);
        qt_mem_fail_after(-1);
        failed = rc < 0;
        assert_int_equal(rc, failed ? QT_E_RESOURCE : QT_OK);
        assert_true(n < 100000);
    }
}

int main(void)
{
    seed = (uint64_t)time(NULL);
    printf("seed %llu\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(caches_round_as_defined),
        cmocka_unit_test(golden_numbers),
        cmocka_unit_test(nonfinite_caches_are_refused),
        cmocka_unit_test(static_keys_by_hand),
        cmocka_unit_test(scales_are_near_the_best),
        cmocka_unit_test(degenerate_samples_have_scales),
        cmocka_unit_test_setup_teardown(scales_fit_the_stored_model, set_up, tear_down),
        cmocka_unit_test_setup_teardown(same_bytes_for_any_threads, set_up, tear_down),
        cmocka_unit_test_setup_teardown(interrupted_runs_resume, set_up, tear_down),
        cmocka_unit_test(sizes_count_everything),
        cmocka_unit_test_setup_teardown(other_keys_need_no_data, set_up, tear_down),
        cmocka_unit_test_setup_teardown(needs_data, set_up, tear_down),
        cmocka_unit_test_setup_teardown(hostile_manifests_are_refused, set_up, tear_down),
        cmocka_unit_test_setup_teardown(other_models_are_refused, set_up, tear_down),
        cmocka_unit_test_setup_teardown(hostile_values_are_refused, set_up, tear_down),
        cmocka_unit_test_setup_teardown(allocation_failures, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
