/* Parts of mixtures of experts (test_model.c tests whole models): routing weights, token lists,
 * runs of one expert, and calibration sums, compared with naive computations. */
#include "fixture.h"
#include "random.h"

#include "kernels/kernels.h"
#include "pack/sequential.h"

#include <float.h>

/* Several chunks of a layer; the chunks of calibration are not multiples of them. */
enum { SEQLEN = 44, SAMPLES = 110, TOKENS = SEQLEN * SAMPLES, VOCAB = 97, MOST = 8 };

/* Without and with a shared expert. */
#define CHOSEN    "tests/golden/models/qwen3_moe"
#define SHARED    "tests/golden/models/glm4_moe_all"
#define GATED     "tests/golden/models/qwen2_moe" /* shared expert with a gate */
#define MIXTRAL   "tests/golden/models/mixtral"
#define ONE_DENSE "tests/golden/models/qwen3_moe_one_dense"

struct fixture {
    struct qt_ckpt *ckpt;
    struct qt_model *model;
    struct qt_backend *be;
    struct qt_weights source;
    uint32_t ids[TOKENS];
    float *hidden; /* [TOKENS][width], input of the first layer's MLP sublayer */
    size_t width, experts;
    struct qt_err err;
};

static struct fixture *open_model(const char *dir)
{
    struct fixture *f = calloc(1, sizeof *f);
    struct qt_layer *layer;
    expect_ok("ckpt", qt_ckpt_open(&f->ckpt, dir, &f->err), &f->err);
    expect_ok("backend", qt_backend_cpu_open(&f->be, &f->err), &f->err);
    f->source = qt_weights_of_ckpt(f->ckpt);
    expect_ok("model", qt_model_open(&f->model, &f->source, &f->err), &f->err);
    f->width = qt_model_info(f->model)->hidden;
    f->experts = qt_model_info(f->model)->experts;
    assert_in_range(f->experts, 1, MOST);
    assert_int_equal(qt_model_inputs(f->model, 0), 2 + 2 * f->experts);
    for (size_t i = 0; i < TOKENS; i++)
        f->ids[i] = random_u32() % VOCAB;
    f->hidden = malloc(TOKENS * f->width * sizeof *f->hidden);
    expect_ok(
        "embed",
        qt_model_embed(f->hidden, f->model, &f->source, f->be, f->ids, TOKENS, SEQLEN, &f->err),
        &f->err);
    expect_ok("layer", qt_layer_open(&layer, f->model, 0, &f->source, f->be, &f->err), &f->err);
    expect_ok("attention",
              qt_layer_run_sublayer(layer, 0, f->hidden, TOKENS, SEQLEN, NULL, &f->err), &f->err);
    qt_layer_close(layer);
    return f;
}

static void close_model(struct fixture *f)
{
    free(f->hidden);
    qt_model_close(f->model);
    qt_ckpt_close(f->ckpt);
    f->be->close(f->be);
    free(f);
}

/* ---- hooks ---------------------------------------------------------------------------------- */

struct kept {
    int input;
    float *x; /* [count][k], owned */
    size_t count, k;
};

static int keep(void *ctx, int input, const float *x, size_t m, size_t k, struct qt_err *err)
{
    struct kept *kept = ctx;
    (void)err;
    assert_int_equal(input, kept->input);
    kept->x = realloc(kept->x, (kept->count + m) * k * sizeof *x);
    memcpy(kept->x + kept->count * k, x, m * k * sizeof *x);
    kept->count += m;
    kept->k = k;
    return QT_OK;
}

/* Returns an expert's linear input for the tokens; NULL: the tokens that choose the expert. */
static struct kept input_of(struct fixture *f, struct qt_layer *layer, int input,
                            const float *hidden, const struct qt_tokens *tokens)
{
    struct kept kept = {.input = input};
    float *copy = malloc(TOKENS * f->width * sizeof *copy);
    memcpy(copy, hidden, TOKENS * f->width * sizeof *copy);
    expect_ok("run to",
              qt_layer_run_to(layer, input, copy, TOKENS, SEQLEN, tokens,
                              &(struct qt_hook){&kept, keep}, &f->err),
              &f->err);
    assert_memory_equal(copy, hidden, TOKENS * f->width * sizeof *copy);
    free(copy);
    return kept;
}

static struct qt_tokens all_tokens(void)
{
    struct qt_tokens t;
    assert_int_equal(qt_tokens_new(&t, TOKENS, NULL), QT_OK);
    t.count = TOKENS;
    for (uint32_t i = 0; i < TOKENS; i++)
        t.row[i] = i, t.weight[i] = 1;
    return t;
}

static float *routing_weights(struct fixture *f, struct qt_layer *layer, const float *hidden)
{
    float *weights = malloc(TOKENS * f->experts * sizeof *weights);
    float *copy = malloc(TOKENS * f->width * sizeof *copy);
    memcpy(copy, hidden, TOKENS * f->width * sizeof *copy);
    expect_ok("route",
              qt_layer_route(weights, layer, qt_model_mlp_input(f->model, 0), copy, TOKENS, SEQLEN,
                             &f->err),
              &f->err);
    assert_memory_equal(copy, hidden, TOKENS * f->width * sizeof *copy);
    free(copy);
    return weights;
}

/* ---- the router ----------------------------------------------------------------------------- */

/* Routing weights of a token with router input x, as in transformers. Returns false if two experts
 * are so close that rounding may decide between them. */
static bool naive_weights(double *weights, const float *x, const float *router, size_t width,
                          size_t experts, size_t top_k, bool normalize)
{
    double p[MOST], sum = 0, of = 0, last = 2;
    bool clear = true, taken[MOST] = {false};
    for (size_t e = 0; e < experts; e++) {
        double logit = 0;
        for (size_t j = 0; j < width; j++)
            logit += (double)x[j] * (double)router[e * width + j];
        sum += p[e] = exp(logit);
    }
    for (size_t c = 0; c <= top_k && c < experts; c++) {
        size_t best = experts;
        for (size_t e = 0; e < experts; e++)
            if (!taken[e] && (best == experts || p[e] > p[best]))
                best = e;
        if (c == top_k)
            clear = p[best] < last * (1 - 1e-4);
        else {
            taken[best] = true;
            of += last = p[best];
        }
    }
    for (size_t e = 0; e < experts; e++)
        weights[e] = (taken[e] ? 1 : -1) * p[e] / (normalize ? of : sum);
    return clear;
}

/* gate_name: the gate of the shared expert, or NULL. */
static void router_case(const char *dir, const char *router_name, size_t top_k, bool normalize,
                        const char *gate_name)
{
    struct fixture *f = open_model(dir);
    const size_t routed = f->experts - (gate_name != NULL);
    struct qt_tokens all = all_tokens();
    struct qt_layer *layer;
    size_t unclear = 0;
    expect_ok("layer", qt_layer_open(&layer, f->model, 0, &f->source, f->be, &f->err), &f->err);
    float *weights = routing_weights(f, layer, f->hidden);
    float *router = malloc(f->experts * f->width * sizeof *router), *gate = NULL;
    expect_ok("router", f->source.load(f->source.ctx, router_name, router, &f->err), &f->err);
    if (gate_name) {
        gate = router + routed * f->width;
        expect_ok("gate", f->source.load(f->source.ctx, gate_name, gate, &f->err), &f->err);
    }
    struct kept x = input_of(f, layer, 2, f->hidden, &all);
    for (size_t t = 0; t < TOKENS; t++) {
        double want[MOST], logit = 0;
        if (!naive_weights(want, x.x + t * f->width, router, f->width, routed, top_k, normalize)) {
            unclear++;
            continue;
        }
        for (size_t i = 0; gate && i < f->width; i++)
            logit += (double)gate[i] * (double)x.x[t * f->width + i];
        if (gate)
            want[routed] = 1 / (1 + exp(-logit));
        for (size_t e = 0; e < f->experts; e++) {
            const double got = (double)weights[t * f->experts + e];
            assert_true(fabs(got - want[e]) <= 1e-4 * fabs(want[e]));
        }
    }
    assert_true(unclear < TOKENS / 50);
    qt_layer_close(layer);
    qt_tokens_free(&all);
    free(x.x);
    free(weights);
    free(router);
    close_model(f);
}

static void weights_match_the_router(void **state)
{
    (void)state;
    router_case(CHOSEN, "model.layers.0.mlp.gate.weight", 3, true, NULL);
    router_case("tests/golden/models/qwen3_moe_biased_window", "model.layers.0.mlp.gate.weight", 2,
                false, NULL);
    router_case(MIXTRAL, "model.layers.0.block_sparse_moe.gate.weight", 2, true, NULL);
    router_case("tests/golden/models/mixtral_window", "model.layers.0.block_sparse_moe.gate.weight",
                1, true, NULL);
    router_case(GATED, "model.layers.0.mlp.gate.weight", 2, false,
                "model.layers.0.mlp.shared_expert_gate.weight");
}

/* ---- lists ---------------------------------------------------------------------------------- */

static bool listed(const struct qt_tokens *t, size_t row, float *weights)
{
    for (size_t i = 0; i < t->count; i++)
        if (t->row[i] == row) {
            *weights = t->weight[i];
            return true;
        }
    return false;
}

/* The weights have few different values, so that many are equal or 0. */
static void lists_add_tokens(void **state)
{
    enum { M = 60, EXPERTS = 3 };
    (void)state;
    for (int trial = 0; trial < 400; trial++) {
        float weights[M * EXPERTS];
        struct qt_tokens t;
        const size_t e = random_u32() % EXPERTS, least = random_u32() % (M + 10);
        size_t choose = 0, chose;
        double square = 0, largest = 0x1p-10;
        assert_int_equal(qt_tokens_new(&t, M, NULL), QT_OK);
        for (size_t i = 0; i < M * EXPERTS; i++)
            weights[i] = ((float)(random_u32() % 9) - (float)(trial % 9)) / 8;
        for (size_t i = 0; i < M; i++) {
            const double s = (double)weights[i * EXPERTS + e];
            choose += s > 0;
            square += s > 0 ? s * s : 0;
            largest = fmax(largest, -s);
        }
        square = choose ? square / (double)choose : largest * largest;
        chose = qt_tokens_of_expert(&t, weights, M, EXPERTS, e, least);
        assert_int_equal(chose, choose);
        const size_t missing = least > choose ? least - choose : 0;
        const size_t spread = missing < M ? missing : M;
        size_t nearest = 0, spaced = 0, last = 0;
        for (size_t i = 1; i < t.count; i++)
            assert_true(t.row[i] > t.row[i - 1]);
        bool near[M];
        for (size_t i = 0; i < M; i++) {
            /* How many tokens are nearer decides whether this one is added for being near. */
            const float s = weights[i * EXPERTS + e];
            size_t nearer = 0;
            for (size_t j = 0; j < M; j++) {
                const float other = weights[j * EXPERTS + e];
                nearer += other <= 0 && (other < s || (other == s && j < i));
            }
            near[i] = s <= 0 && nearer < missing;
            nearest += near[i];
        }
        assert_int_equal(nearest, missing < M - choose ? missing : M - choose);
        for (size_t i = 0; i < M; i++) {
            const float s = weights[i * EXPERTS + e];
            const float own = s > 0 ? s : near[i] ? fmaxf(-s, 0x1p-10f) : 0;
            float of = 0;
            if (!listed(&t, i, &of) || of == own) {
                assert_true(of == own);
                continue;
            }
            /* evenly spaced: gaps differ by at most one token */
            assert_true(fabs((double)of * (double)of - (double)own * (double)own - square / 4) <
                        1e-6);
            assert_true(spaced == 0 || (i - last >= M / spread && i - last <= M / spread + 1));
            last = i;
            spaced++;
        }
        assert_int_equal(spaced, spread);
        qt_tokens_free(&t);
    }
}

/* ---- one expert ----------------------------------------------------------------------------- */

/* An expert processes the listed tokens, with the same values as in a run of all tokens. */
static void tokens_go_through_experts(void **state)
{
    struct fixture *f = open_model(*state);
    struct qt_tokens all = all_tokens(), some = all_tokens();
    struct qt_layer *layer;
    expect_ok("layer", qt_layer_open(&layer, f->model, 0, &f->source, f->be, &f->err), &f->err);
    float *weights = routing_weights(f, layer, f->hidden);
    for (size_t e = 0; e < f->experts; e++)
        for (int input = 2 + 2 * (int)e; input < 4 + 2 * (int)e; input++) {
            qt_tokens_of_expert(&some, weights, TOKENS, f->experts, e, 0);
            struct kept every = input_of(f, layer, input, f->hidden, &all);
            struct kept own = input_of(f, layer, input, f->hidden, NULL);
            struct kept told = input_of(f, layer, input, f->hidden, &some);
            assert_int_equal(every.count, TOKENS);
            assert_int_equal(own.count, some.count);
            assert_int_equal(told.count, some.count);
            assert_memory_equal(own.x, told.x, own.count * own.k * sizeof *own.x);
            for (size_t i = 0; i < some.count; i++)
                for (size_t j = 0; j < own.k; j++) {
                    const float want = every.x[some.row[i] * own.k + j];
                    assert_true(fabsf(own.x[i * own.k + j] - want) <= 1e-5f * (1 + fabsf(want)));
                }
            free(every.x);
            free(own.x);
            free(told.x);
        }
    qt_layer_close(layer);
    qt_tokens_free(&all);
    qt_tokens_free(&some);
    free(weights);
    close_model(f);
}

/* ---- calibration ---------------------------------------------------------------------------- */

/* The source's weights, with some linears changed. */
struct changing {
    struct qt_weights source;
    const char *part; /* part of the names of changed tensors */
};

static bool shape(void *ctx, const char *name, int *ndim, size_t dims[QT_MAX_DIMS])
{
    const struct changing *c = ctx;
    return c->source.shape(c->source.ctx, name, ndim, dims);
}

static int load(void *ctx, const char *name, float *dst, struct qt_err *err)
{
    const struct changing *c = ctx;
    size_t dims[QT_MAX_DIMS];
    int ndim, rc = c->source.load(c->source.ctx, name, dst, err);
    uint32_t x = 1;
    if (rc < 0 || !strstr(name, c->part))
        return rc;
    assert_true(shape(ctx, name, &ndim, dims) && ndim == 2);
    for (size_t i = 0; i < dims[0] * dims[1]; i++) {
        x = x * 1664525 + 1013904223;
        dst[i] *= 1 + 0.25f * ((float)(x >> 8) * 0x1p-24f - 0.4f);
    }
    return QT_OK;
}

static void expect_near(const char *what, double got, double want, double unit)
{
    if (!(fabs(got - want) <= 3e-4 * unit + 1e-12))
        fail_msg("%s: %g, expected %g (of %g)", what, got, want, unit);
}

/* Errors d[tokens][got->errors] of all tokens; *size: the values whose difference they are. x, z as
 * in compare. */
static double *errors_of(double **size, const struct qt_observed *got, struct fixture *f, int input,
                         const struct kept *x, const struct kept *z)
{
    const size_t k = x->k, n = got->errors;
    const struct qt_linear *linear;
    double *d = calloc(TOKENS * n, sizeof *d);
    float *w = malloc(n * k * sizeof *w);
    size_t i = 0;
    *size = calloc(TOKENS * n, sizeof **size);
    qt_model_linears(&linear, f->model, 0);
    while (linear[i].input != input)
        i++;
    if (got->of_outputs)
        expect_ok("weight", f->source.load(f->source.ctx, linear[i].weight, w, &f->err), &f->err);
    for (size_t t = 0; t < x->count; t++)
        for (size_t r = 0; r < n; r++)
            for (size_t c = 0; c < k; c++) {
                const double by = got->of_outputs ? (double)w[r * k + c] : r == c;
                const double here = (double)x->x[t * k + c] * by;
                d[t * n + r] += (double)z->x[t * k + c] * by - here;
                (*size)[t * n + r] += here;
            }
    free(w);
    return d;
}

/* Compares random entries of the sums over `tokens`. x, z: the input of all tokens in the changed
 * and in the original model. */
static void compare(const struct qt_observed *got, struct fixture *f, int input,
                    const struct kept *x, const struct kept *z, const struct qt_tokens *tokens)
{
    const size_t k = x->k, n = got->errors;
    double second = 0, fourth = 0, *sizes, *d = errors_of(&sizes, got, f, input, x, z);
    for (size_t t = 0; t < tokens->count; t++) {
        const double w = (double)tokens->weight[t] * (double)tokens->weight[t];
        second += w;
        fourth += w * w;
    }
    assert_true(fabs((double)got->tokens - second * second / fourth) < 1 + 1e-3 * second);
    assert_int_equal(got->k, k);
    assert_int_equal(n, got->of_outputs ? f->width : k);
    for (int draw = 0; draw < 200; draw++) {
        const size_t i = random_u32() % k, j = random_u32() % (i + 1), row = random_u32() % n;
        double h = 0, cross = 0, square = 0, xi = 0, xj = 0, size = 0;
        for (size_t t = 0; t < tokens->count; t++) {
            const size_t at = tokens->row[t];
            const double w = (double)tokens->weight[t] * (double)tokens->weight[t];
            const double a = (double)x->x[at * k + i], b = (double)x->x[at * k + j];
            const double e = d[at * n + row], whole = sizes[at * n + row];
            h += w * a * b;
            cross += w * e * b;
            square += w * e * e;
            xi += w * a * a;
            xj += w * b * b;
            size += w * whole * whole;
        }
        expect_near("H", got->h[i * k + j], h, sqrt(xi * xj));
        expect_near("errors", (double)got->cross[row * k + j], cross,
                    sqrt(xj * square) + 0.01 * sqrt(xj * size));
        expect_near("squares", got->square[row], square, square + 1e-4 * size);
    }
    free(d);
    free(sizes);
}

/* Attention is changed, and each expert's first linears are changed before its second input. The
 * first inputs pass through an arrangement that changes nothing, as quantized activations do. */
static void sums_cover_the_experts_tokens(void **state)
{
    struct fixture *f = open_model(*state);
    struct changing attention = {f->source, "self_attn.o_proj"}, both = {f->source, "_proj"};
    struct qt_weights now = {.dir = f->source.dir, .ctx = &attention, .shape = shape, .load = load};
    const struct qt_calibration data = {
        .ids = f->ids, .samples = SAMPLES, .seqlen = SEQLEN, .backend = f->be};
    struct qt_tokens all = all_tokens(), some = all_tokens();
    struct qt_layer *here, *there;
    struct qt_sequential *s;
    const size_t bytes = TOKENS * f->width * sizeof(float);
    float *hidden = malloc(bytes);
    expect_ok("embed",
              qt_model_embed(hidden, f->model, &f->source, f->be, f->ids, TOKENS, SEQLEN, &f->err),
              &f->err);
    expect_ok("here", qt_layer_open(&here, f->model, 0, &now, f->be, &f->err), &f->err);
    expect_ok("there", qt_layer_open(&there, f->model, 0, &f->source, f->be, &f->err), &f->err);
    expect_ok("attention", qt_layer_run_sublayer(here, 0, hidden, TOKENS, SEQLEN, NULL, &f->err),
              &f->err);
    expect_ok("open", qt_sequential_open(&s, &f->source, &f->source, &data, NULL, &f->err),
              &f->err);
    expect_ok("enter", qt_sequential_enter(s, 0, &now, &f->err), &f->err);
    expect_ok("advance", qt_sequential_advance(s, 1, &f->err), &f->err);
    float *weights = routing_weights(f, here, hidden);
    now.ctx = &both;
    for (int input = 2; input < 2 + 2 * (int)f->experts; input++) {
        const size_t expert = (size_t)qt_model_expert(f->model, 0, input);
        struct qt_observed seen;
        const size_t chose = qt_tokens_of_expert(&some, weights, TOKENS, f->experts, expert, 0);
        struct kept x = input_of(f, here, input, hidden, &all);
        struct kept z = input_of(f, there, input, f->hidden, &all);
        struct qt_act act;
        expect_ok("arrangement", qt_act_new(&act, x.k, 8, &f->err), &f->err);
        expect_ok("observe",
                  qt_sequential_observe(&seen, s, input, input % 2 ? NULL : &act, false, &f->err),
                  &f->err);
        assert_int_equal(seen.routed_tokens, chose);
        assert_true(chose > QT_MIN_TOKENS_PER_CHANNEL * x.k); /* enough: no tokens are added */
        compare(&seen, f, input, &x, &z, &some);
        expect_ok("renew", qt_sequential_reload(s, input, &now, &f->err), &f->err);
        expect_ok("renew here", qt_layer_load_linears(here, input, &now, &f->err), &f->err);
        qt_act_free(&act);
        free(x.x);
        free(z.x);
    }
    qt_sequential_close(s);
    qt_layer_close(here);
    qt_layer_close(there);
    qt_tokens_free(&all);
    qt_tokens_free(&some);
    free(weights);
    free(hidden);
    close_model(f);
}

/* Some experts are chosen by fewer tokens than calibration requires. */
static void tokens_are_added_to_small_experts(void **state)
{
    enum { FEW_SAMPLES = 6, FEW = FEW_SAMPLES * SEQLEN };
    struct fixture *f = open_model("tests/golden/models/mixtral");
    const struct qt_calibration data = {
        .ids = f->ids, .samples = FEW_SAMPLES, .seqlen = SEQLEN, .backend = f->be};
    struct qt_tokens all = all_tokens(), some = all_tokens();
    struct qt_layer *layer;
    struct qt_sequential *s;
    struct qt_observed seen;
    size_t chose = 0, joined = 0;
    (void)state;
    expect_ok("layer", qt_layer_open(&layer, f->model, 0, &f->source, f->be, &f->err), &f->err);
    float *weights = routing_weights(f, layer, f->hidden);
    expect_ok("open", qt_sequential_open(&s, &f->source, &f->source, &data, NULL, &f->err),
              &f->err);
    expect_ok("enter", qt_sequential_enter(s, 0, &f->source, &f->err), &f->err);
    expect_ok("advance", qt_sequential_advance(s, 1, &f->err), &f->err);
    for (int input = 2; input < 2 + 2 * (int)f->experts; input += 2) {
        struct kept x = input_of(f, layer, input, f->hidden, &all);
        const size_t expert = (size_t)qt_model_expert(f->model, 0, input), least = 4 * x.k;
        expect_ok("observe", qt_sequential_observe(&seen, s, input, NULL, false, &f->err), &f->err);
        assert_int_equal(seen.routed_tokens,
                         qt_tokens_of_expert(&some, weights, FEW, f->experts, expert, least));
        compare(&seen, f, input, &x, &x, &some);
        chose += seen.routed_tokens;
        joined += some.count - seen.routed_tokens;
        free(x.x);
    }
    assert_int_equal(chose, 2 * FEW); /* two each */
    assert_true(joined > 0);
    qt_sequential_close(s);
    qt_layer_close(layer);
    qt_tokens_free(&all);
    qt_tokens_free(&some);
    free(weights);
    close_model(f);
}

static void allocation_failures(void **state)
{
    struct fixture *f = open_model(*state);
    const struct qt_calibration data = {
        .ids = f->ids, .samples = 2, .seqlen = SEQLEN, .backend = f->be};
    const size_t layers = qt_model_info(f->model)->layers;
    bool failed = true;
    for (long n = 0; failed; n++) {
        struct qt_sequential *s = NULL;
        struct qt_observed seen;
        int rc;
        qt_mem_fail_after(n);
        QT_TRY(qt_sequential_open(&s, &f->source, &f->source, &data, NULL, &f->err));
        QT_TRY(qt_sequential_enter(s, 0, &f->source, &f->err));
        QT_TRY(qt_sequential_observe(&seen, s, 5, NULL, false, &f->err));
        QT_TRY(qt_sequential_advance(s, 5, &f->err));
        for (size_t layer = 1; layer < layers; layer++)
            QT_TRY(qt_sequential_enter(s, layer, &f->source, &f->err));
    done:
        qt_mem_fail_after(-1);
        failed = rc < 0;
        assert_int_equal(rc, failed ? QT_E_RESOURCE : QT_OK);
        qt_sequential_close(s);
        assert_true(n < 2000);
    }
    close_model(f);
}

/* ---- refusals ------------------------------------------------------------------------------- */

static int load_huge(void *ctx, const char *name, float *dst, struct qt_err *err)
{
    const struct changing *c = ctx;
    size_t dims[QT_MAX_DIMS];
    int ndim, rc = c->source.load(c->source.ctx, name, dst, err);
    if (rc < 0 || !strstr(name, c->part))
        return rc;
    assert_true(shape(ctx, name, &ndim, dims) && ndim == 2);
    for (size_t i = 0; i < dims[0] * dims[1]; i++)
        dst[i] = dst[i] < 0 ? -FLT_MAX : FLT_MAX;
    return QT_OK;
}

static void expect_no_scores(struct fixture *f, const char *part)
{
    struct changing huge = {f->source, part};
    const struct qt_weights w = {
        .dir = f->source.dir, .ctx = &huge, .shape = shape, .load = load_huge};
    struct qt_layer *layer;
    float *weights = malloc(TOKENS * f->experts * sizeof *weights);
    expect_ok("layer", qt_layer_open(&layer, f->model, 0, &w, f->be, &f->err), &f->err);
    expect_error("route",
                 qt_layer_route(weights, layer, qt_model_mlp_input(f->model, 0), f->hidden, TOKENS,
                                SEQLEN, &f->err),
                 QT_E_INPUT, "not finite", &f->err);
    expect_error("run", qt_layer_run_sublayer(layer, 2, f->hidden, TOKENS, SEQLEN, NULL, &f->err),
                 QT_E_INPUT, part, &f->err);
    qt_layer_close(layer);
    free(weights);
}

/* Scores overflow with finite weights, or the input of the router is not finite. */
static void infinite_scores_are_refused(void **state)
{
    struct fixture *f = open_model(GATED);
    (void)state;
    expect_no_scores(f, "layers.0.mlp.gate.weight");
    expect_no_scores(f, "layers.0.mlp.shared_expert_gate.weight");
    f->hidden[3 * f->width + 1] = NAN;
    struct qt_layer *layer;
    expect_ok("layer", qt_layer_open(&layer, f->model, 0, &f->source, f->be, &f->err), &f->err);
    expect_error("run", qt_layer_run_sublayer(layer, 2, f->hidden, TOKENS, SEQLEN, NULL, &f->err),
                 QT_E_INPUT, "layers.0.mlp.gate.weight", &f->err);
    qt_layer_close(layer);
    close_model(f);
}

/* Random entries of H, and the channels, of inputs times routing weights. */
static void compare_with_file(const struct qt_qcal *q, size_t input, const struct kept *x,
                              const struct qt_tokens *tokens)
{
    struct qt_err err = {0};
    const size_t k = x->k;
    struct qt_channels c;
    double *h = calloc(k * k, sizeof *h);
    expect_ok("channels", qt_qcal_channels(&c, q, 0, input, &err), &err);
    expect_ok("H", qt_qcal_hessian(h, q, 0, input, c.sum2, &err), &err);
    for (int draw = 0; draw < 200; draw++) {
        const size_t i = random_u32() % k, j = random_u32() % (i + 1);
        double product = 0, ii = 0, jj = 0;
        float largest = 0;
        uint64_t counted = 0;
        for (size_t t = 0; t < tokens->count; t++) {
            const float *row = x->x + tokens->row[t] * k;
            const double a = (double)row[i] * (double)tokens->weight[t];
            const double b = (double)row[j] * (double)tokens->weight[t];
            product += a * b;
            ii += a * a;
            jj += b * b;
            largest = fmaxf(largest, fabsf(row[i] * tokens->weight[t]));
        }
        for (size_t b = 0; b < QT_HIST_BINS; b++)
            counted += c.hist[i * QT_HIST_BINS + b];
        assert_int_equal(counted, tokens->count);
        assert_true(fabsf(c.absmax[i] - largest) <= 1e-5f * largest);
        expect_near("sum2", c.sum2[i], ii, ii);
        expect_near("H", h[i * k + j], product, sqrt(ii * jj));
    }
    qt_channels_free(&c);
    free(h);
}

/* The statistics of the first layer, for its experts and for the input that they share. */
static void calibration_files_hold_the_experts_tokens(void **state)
{
    struct fixture *f = open_model(*state);
    const struct qt_calibrate_options opt = {.backend = f->be};
    const char *const names[] = {"ids"};
    const struct qt_qcal_part part = {
        .samples = SAMPLES, .seqlen = SEQLEN, .data = names, .ndata = 1};
    struct qt_tokens all = all_tokens(), some = all_tokens();
    struct qt_layer *layer;
    struct qt_qcal *q;
    uint32_t routed[MOST];
    char *dir = fixture_dir();
    const char *path = fixture_path(dir, "x.qcal");
    expect_ok("calibrate", qt_calibrate(path, f->ckpt, f->ids, &part, &opt, &f->err), &f->err);
    expect_ok("open", qt_qcal_open(&q, path, &f->err), &f->err);
    expect_ok("check", qt_calibrate_check(q, f->ckpt, f->model, &f->err), &f->err);
    expect_ok("routed", qt_qcal_routed(routed, q, 0, &f->err), &f->err);
    expect_ok("layer", qt_layer_open(&layer, f->model, 0, &f->source, f->be, &f->err), &f->err);
    float *weights = routing_weights(f, layer, f->hidden);
    const int shared = qt_model_experts_input(f->model, 0);
    assert_int_equal(qt_qcal_info(q)->layer[0].inputs, shared + 1);
    for (int input = 2; input < shared; input++) {
        const size_t e = (size_t)qt_model_expert(f->model, 0, input);
        struct kept x = input_of(f, layer, input, f->hidden, &all);
        assert_int_equal(routed[e], qt_tokens_of_expert(&some, weights, TOKENS, f->experts, e,
                                                        QT_MIN_TOKENS_PER_CHANNEL * x.k));
        compare_with_file(q, (size_t)input, &x, &some);
        free(x.x);
    }
    struct kept x = input_of(f, layer, shared, f->hidden, NULL);
    assert_int_equal(x.count, TOKENS);
    compare_with_file(q, (size_t)shared, &x, &all);
    free(x.x);
    qt_qcal_close(q);
    qt_layer_close(layer);
    qt_tokens_free(&all);
    qt_tokens_free(&some);
    free(weights);
    fixture_remove(dir);
    close_model(f);
}

int main(void)
{
    seed_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(weights_match_the_router),
        cmocka_unit_test(lists_add_tokens),
        cmocka_unit_test_prestate(tokens_go_through_experts, CHOSEN),
        cmocka_unit_test_prestate(tokens_go_through_experts, SHARED),
        cmocka_unit_test_prestate(tokens_go_through_experts, GATED),
        cmocka_unit_test_prestate(sums_cover_the_experts_tokens, CHOSEN),
        cmocka_unit_test_prestate(sums_cover_the_experts_tokens, SHARED),
        cmocka_unit_test_prestate(sums_cover_the_experts_tokens, GATED),
        cmocka_unit_test(tokens_are_added_to_small_experts),
        cmocka_unit_test_prestate(allocation_failures, MIXTRAL),
        cmocka_unit_test_prestate(allocation_failures, ONE_DENSE),
        cmocka_unit_test(infinite_scores_are_refused),
        cmocka_unit_test_prestate(calibration_files_hold_the_experts_tokens, GATED),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
