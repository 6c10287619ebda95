/*
 * Compares gradients of whole models, for every linear and norm of every family, with PyTorch
 * (tests/oracle/make_model_golden.py; QT_MODELS: another directory of such models), the gradient of
 * the KL divergence with central differences, and 1 thread with 4 threads.
 */
#include "calib/calib.h"
#include "kernels/kernels.h"
#include "tests/worse.h"

#include <dirent.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

enum { MAX_LAYERS = 8 };

static void must(int rc, const struct qt_err *err)
{
    char text[2048];
    if (rc == QT_OK)
        return;
    qt_err_format(text, sizeof text, err);
    fail_msg("%s", text);
}

static float *new_floats(size_t n)
{
    float *x;
    assert_int_equal(qt_array_new(&x, n, sizeof *x, NULL), QT_OK);
    return x;
}

/* A model, tokens, and the gradients of its parameters. */
struct fixture {
    struct qt_ckpt *ckpt;
    struct qt_weights weights;
    struct qt_model *model;
    struct qt_model_info info;
    struct qt_backend *be;
    struct qt_embed_head *embed_head;
    uint32_t *ids, *targets;
    size_t m, seqlen;
    float *hidden[MAX_LAYERS + 1]; /* layer inputs and the output of the last layer */
    size_t keeps;                  /* 0 or 1: layers of this parity keep their activations */
    float *kept[MAX_LAYERS];       /* NULL: the backward pass computes them */
    struct qt_layer_grads grads[MAX_LAYERS + 1];
    size_t linears[MAX_LAYERS + 1]; /* of a layer */
    double *losses;
    struct qt_err err;
};

static void new_grads(struct fixture *f, size_t layer)
{
    const struct qt_linear *linear;
    const struct qt_norm *norm;
    size_t n = layer < f->info.layers ? qt_model_linears(&linear, f->model, layer) : 0;
    f->linears[layer] = n;
    assert_int_equal(qt_array_new(&f->grads[layer].linear, n, sizeof *f->grads[layer].linear, NULL),
                     QT_OK);
    for (size_t i = 0; i < n; i++)
        f->grads[layer].linear[i] = new_floats(linear[i].n * linear[i].k);
    n = qt_model_norms(&norm, f->model, layer);
    assert_true(n <= QT_LAYER_NORMS);
    for (size_t i = 0; i < n; i++)
        f->grads[layer].norm[i] = new_floats(norm[i].n);
}

/* `copies` sequences of the ids in `path`. */
static void open_fixture(struct fixture *f, const char *dir, const char *path, size_t copies)
{
    uint32_t *ids;
    *f = (struct fixture){0};
    must(qt_ckpt_open(&f->ckpt, dir, &f->err), &f->err);
    f->weights = qt_weights_of_ckpt(f->ckpt);
    must(qt_model_open(&f->model, &f->weights, &f->err), &f->err);
    must(qt_backend_cpu_open(&f->be, &f->err), &f->err);
    must(qt_embed_head_open(&f->embed_head, f->model, &f->weights, f->be, &f->err), &f->err);
    f->info = *qt_model_info(f->model);
    must(qt_token_ids_read(&ids, &f->seqlen, path, f->info.vocab, &f->err), &f->err);
    f->m = f->seqlen * copies;
    must(qt_array_new(&f->ids, f->m, sizeof *f->ids, &f->err), &f->err);
    must(qt_array_new(&f->targets, f->m, sizeof *f->targets, &f->err), &f->err);
    must(qt_array_new(&f->losses, f->m, sizeof *f->losses, &f->err), &f->err);
    for (size_t i = 0; i < f->m; i++) {
        f->ids[i] = ids[i % f->seqlen];
        f->targets[i] = (i + 1) % f->seqlen ? ids[i % f->seqlen + 1] : QT_NO_TARGET;
    }
    qt_free(ids);
    assert_true(f->info.layers <= MAX_LAYERS);
    for (size_t i = 0; i <= f->info.layers; i++) {
        f->hidden[i] = new_floats(f->m * f->info.hidden);
        new_grads(f, i);
    }
}

static void close_fixture(struct fixture *f)
{
    for (size_t i = 0; i < f->info.layers; i++)
        qt_free(f->kept[i]);
    for (size_t i = 0; i <= f->info.layers; i++) {
        qt_free(f->hidden[i]);
        for (size_t j = 0; j < f->linears[i]; j++)
            qt_free(f->grads[i].linear[j]);
        qt_free(f->grads[i].linear);
        for (size_t j = 0; j < QT_LAYER_NORMS; j++)
            qt_free(f->grads[i].norm[j]);
    }
    qt_free(f->ids);
    qt_free(f->targets);
    qt_free(f->losses);
    qt_embed_head_close(f->embed_head);
    f->be->close(f->be);
    qt_model_close(f->model);
    qt_ckpt_close(f->ckpt);
}

/* The output is that of qt_layer_run, which is in f->hidden[i + 1]. */
static void run_kept(struct fixture *f, struct qt_layer *layer, size_t i)
{
    const size_t count = f->m * f->info.hidden, kept = qt_layer_kept_floats(layer, f->m, f->seqlen);
    assert_true((kept == 0) == (f->info.experts > 0));
    if (kept == 0)
        return;
    float *out = new_floats(count);
    qt_free(f->kept[i]);
    f->kept[i] = new_floats(kept);
    must(qt_layer_run_kept(layer, out, f->kept[i], f->hidden[i], f->m, f->seqlen, &f->err),
         &f->err);
    assert_memory_equal(out, f->hidden[i + 1], count * sizeof *out);
    qt_free(out);
}

static void forward(struct fixture *f)
{
    struct qt_layer *layer;
    size_t bytes = f->m * f->info.hidden * sizeof(float);
    must(qt_embed_tokens(f->embed_head, f->hidden[0], f->ids, f->m, f->seqlen, &f->err), &f->err);
    for (size_t i = 0; i < f->info.layers; i++) {
        memcpy(f->hidden[i + 1], f->hidden[i], bytes);
        must(qt_layer_open(&layer, f->model, i, &f->weights, f->be, &f->err), &f->err);
        must(qt_layer_run(layer, f->hidden[i + 1], f->m, f->seqlen, NULL, &f->err), &f->err);
        if (i % 2 == f->keeps)
            run_kept(f, layer, i);
        qt_layer_close(layer);
    }
}

/* Fills f->grads and f->losses. */
static void backward(struct fixture *f, const struct qt_objective *objective)
{
    struct qt_layer *layer;
    size_t layers = f->info.layers;
    float *grad = new_floats(f->m * f->info.hidden);
    must(qt_head_grad(f->embed_head, f->losses, grad, f->grads[layers].norm[0], f->hidden[layers],
                      objective, f->m, &f->err),
         &f->err);
    for (size_t i = layers; i-- > 0;) {
        must(qt_layer_open(&layer, f->model, i, &f->weights, f->be, &f->err), &f->err);
        must(qt_layer_grad(layer, grad, &f->grads[i], f->hidden[i], f->kept[i], f->m, f->seqlen,
                           &f->err),
             &f->err);
        qt_layer_close(layer);
    }
    qt_free(grad);
}

/* ---- against PyTorch ------------------------------------------------------------------------ */

/* Compares the norm and two projections of a gradient with the golden values; returns the largest
 * difference relative to the norm. g is the gradient of `copies` equal sequences. */
static double compare(const json_t *golden, const char *name, const float *g, size_t n,
                      size_t copies)
{
    double got[3] = {0}, worst = 0;
    const json_t *want = json_object_get(golden, name);
    char with_prefix[256];
    if (!want) { /* a bare decoder's own names lack "model." */
        snprintf(with_prefix, sizeof with_prefix, "model.%s", name);
        want = json_object_get(golden, with_prefix);
    }
    if (!want && strstr(name, ".experts.")) { /* no token chose the expert */
        for (size_t i = 0; i < n; i++)
            assert_true(g[i] == 0);
        return 0;
    }
    if (!want)
        fail_msg("no golden gradient of %s", name);
    for (size_t i = 0; i < n; i++) {
        double v = (double)g[i] / (double)copies;
        got[0] += v * v;
        got[1] += v * cos((double)i);
        got[2] += v * cos((double)(i * i % 1009));
    }
    got[0] = sqrt(got[0]);
    double norm = json_real_value(json_array_get(want, 0));
    for (size_t i = 0; i < 3; i++) {
        double d = fabs(got[i] - json_real_value(json_array_get(want, i))) / (norm + 1e-6);
        worst = worse(worst, d);
    }
    if (!(worst < 1e-3))
        print_message("    %s: off by %.2e of its norm %.3g\n", name, worst, norm);
    return worst;
}

static double golden_case(const char *dir, const char *ids, const char *grads, size_t copies)
{
    struct fixture f;
    json_t *golden;
    double worst = 0;
    open_fixture(&f, dir, ids, copies);
    must(qt_json_load(&golden, grads, 1 << 20, &f.err), &f.err);
    forward(&f);
    backward(&f, &(struct qt_objective){.targets = f.targets, .weight = 1});
    for (size_t layer = 0; layer <= f.info.layers; layer++) {
        const struct qt_linear *linear;
        const struct qt_norm *norm;
        size_t n = layer < f.info.layers ? qt_model_linears(&linear, f.model, layer) : 0;
        for (size_t i = 0; i < n; i++)
            worst = worse(worst, compare(golden, linear[i].weight, f.grads[layer].linear[i],
                                         linear[i].n * linear[i].k, copies));
        n = qt_model_norms(&norm, f.model, layer);
        for (size_t i = 0; i < n; i++)
            worst = worse(
                worst, compare(golden, norm[i].weight, f.grads[layer].norm[i], norm[i].n, copies));
    }
    json_decref(golden);
    close_fixture(&f);
    return worst;
}

static void test_golden_models(void **state)
{
    const char *root = getenv("QT_MODELS") ? getenv("QT_MODELS") : "tests/golden/models";
    struct dirent **names;
    int n = scandir(root, &names, NULL, alphasort), seen = 0;
    (void)state;
    assert_true(n > 0);
    for (int i = 0; i < n; i++) {
        char dir[512], ids[600], grads[600];
        snprintf(dir, sizeof dir, "%s/%s", root, names[i]->d_name);
        snprintf(ids, sizeof ids, "%s/ids.u16", dir);
        snprintf(grads, sizeof grads, "%s/grads.json", dir);
        if (names[i]->d_name[0] != '.' && access(grads, F_OK) == 0) { /* else: not supported */
            double one = golden_case(dir, ids, grads, 1), three = golden_case(dir, ids, grads, 3);
            print_message("  %-24s %.2e of the norm\n", names[i]->d_name, fmax(one, three));
            assert_true(one < 3e-4 && three < 3e-4);
            seen++;
        }
        free(names[i]);
    }
    free(names);
    assert_true(seen >= 45);
}

static void test_nano(void **state)
{
    (void)state;
    double worst = golden_case("examples/nano-llama", "tests/golden/nano_ids.u16",
                               "tests/golden/nano_grads.json", 1);
    print_message("  nano-llama: %.2e of the norm\n", worst);
    assert_true(worst < 1e-4);
}

/* ---- KL divergence -------------------------------------------------------------------------- */

/* A source of weights that adds `step` to one element of one tensor. */
struct changed {
    struct qt_weights source;
    const char *name;
    size_t at;
    float step;
};

static bool changed_shape(void *ctx, const char *name, int *ndim, size_t shape[QT_MAX_DIMS])
{
    const struct changed *c = ctx;
    return c->source.shape(c->source.ctx, name, ndim, shape);
}

static int changed_load(void *ctx, const char *name, float *dst, struct qt_err *err)
{
    const struct changed *c = ctx;
    int rc = c->source.load(c->source.ctx, name, dst, err);
    if (rc == QT_OK && strcmp(name, c->name) == 0)
        dst[c->at] += c->step;
    return rc;
}

static double mean_loss(struct fixture *f, const struct qt_objective *objective)
{
    double sum = 0;
    forward(f);
    must(qt_head_grad(f->embed_head, f->losses, NULL, NULL, f->hidden[f->info.layers], objective,
                      f->m, &f->err),
         &f->err);
    for (size_t i = 0; i < f->m; i++)
        sum += f->losses[i];
    return sum;
}

/* The model and the reference differ in one weight of a layer; its gradient must be the slope of
 * the loss. */
static void kl_case(const char *model, size_t layer, const char *name)
{
    char dir[256], ids[300];
    struct fixture f;
    snprintf(dir, sizeof dir, "tests/golden/models/%s", model);
    snprintf(ids, sizeof ids, "%s/ids.u16", dir);
    open_fixture(&f, dir, ids, 2);
    float *ref = new_floats(f.m * f.info.hidden);
    forward(&f);
    memcpy(ref, f.hidden[f.info.layers], f.m * f.info.hidden * sizeof *ref);
    struct changed c = {f.weights, name, 77, 0};
    f.weights.ctx = &c;
    f.weights.shape = changed_shape;
    f.weights.load = changed_load;
    struct qt_objective o = {.ref = f.embed_head, .ref_hidden = ref, .weight = 0.5f};
    assert_true(mean_loss(&f, &o) == 0);
    const float at = 0.5f, h = 0.02f;
    c.step = at + h;
    double up = mean_loss(&f, &o);
    c.step = at - h;
    double slope = (up - mean_loss(&f, &o)) / (2 * (double)h);
    c.step = at;
    forward(&f);
    backward(&f, &o);
    const struct qt_linear *linear;
    size_t i = 0;
    qt_model_linears(&linear, f.model, layer);
    while (strcmp(linear[i].weight, name) != 0)
        i++;
    double got = (double)f.grads[layer].linear[i][c.at] / (double)o.weight;
    print_message("  %s: slope %.6f, gradient %.6f\n", model, slope, got);
    assert_true(slope > 1e-3 && fabs(got - slope) < 0.01 * slope);
    qt_free(ref);
    close_fixture(&f);
}

static void test_kl(void **state)
{
    (void)state;
    kl_case("llama", 1, "model.layers.1.mlp.gate_proj.weight");
    /* Parallel sublayers with one norm and with two, fused projections, ALiBi. */
    kl_case("phi", 0, "model.layers.0.self_attn.v_proj.weight");
    kl_case("falcon", 1, "transformer.h.1.mlp.dense_h_to_4h.weight");
    kl_case("bloom", 0, "transformer.h.0.self_attention.query_key_value.weight");
    /* Experts, whose routing weights depend on the layers before; routers of two kinds. */
    kl_case("granitemoe", 0, "model.layers.0.self_attn.v_proj.weight");
    kl_case("dots1", 1, "model.layers.1.self_attn.v_proj.weight");
}

/* ---- threads, memory ------------------------------------------------------------------------ */

/* More sequences than one chunk holds. */
static void test_threads(void **state)
{
    static const int threads[] = {1, 4};
    struct fixture f[2];
    (void)state;
    for (size_t t = 0; t < 2; t++) {
        qt_threads_set(threads[t]);
        open_fixture(&f[t], "tests/golden/models/qwen3", "tests/golden/models/qwen3/ids.u16", 60);
        f[t].keeps = t;
        forward(&f[t]);
        backward(&f[t], &(struct qt_objective){.targets = f[t].targets, .weight = 1});
    }
    qt_threads_set(0);
    for (size_t layer = 0; layer < f[0].info.layers; layer++) {
        const struct qt_linear *linear;
        size_t n = qt_model_linears(&linear, f[0].model, layer);
        for (size_t i = 0; i < n; i++)
            assert_memory_equal(f[0].grads[layer].linear[i], f[1].grads[layer].linear[i],
                                linear[i].n * linear[i].k * sizeof(float));
        assert_memory_equal(f[0].grads[layer].norm[0], f[1].grads[layer].norm[0],
                            f[0].info.hidden * sizeof(float));
    }
    close_fixture(&f[0]);
    close_fixture(&f[1]);
}

static void test_out_of_memory(void **state)
{
    struct fixture f;
    struct qt_layer *layer;
    (void)state;
    open_fixture(&f, "tests/golden/models/llama", "tests/golden/models/llama/ids.u16", 1);
    forward(&f);
    must(qt_layer_open(&layer, f.model, 0, &f.weights, f.be, &f.err), &f.err);
    float *grad = new_floats(f.m * f.info.hidden);
    long allowed = 0;
    int rc;
    do {
        qt_mem_fail_after(allowed++);
        rc = qt_layer_grad(layer, grad, &f.grads[0], f.hidden[0], NULL, f.m, f.seqlen, &f.err);
        qt_mem_fail_after(-1);
        assert_true(rc == QT_OK || rc == QT_E_RESOURCE);
    } while (rc != QT_OK);
    assert_true(allowed > 3);
    qt_free(grad);
    qt_layer_close(layer);
    close_fixture(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden_models),
        cmocka_unit_test(test_nano),
        cmocka_unit_test(test_kl),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
