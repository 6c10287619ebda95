/* Families that fuse several linears into one tensor (phi3): a model must quantize like its twin,
 * which has the same weights under the tensor names of a family that does not fuse them. */
#include "fixture.h"

#include "kernels/kernels.h"
#include "pack/pack.h"
#include "verify/verify.h"

enum { SEQLEN = 32, SAMPLES = 12, TOKENS = SAMPLES * SEQLEN, TENSORS = 32 };

static const char golden[] = "tests/golden/models/phi3";
static const char twin[] = "mistral"; /* like phi3, but without fused tensors */

struct world {
    char *dir; /* has the twin, and the containers "fused" and "unfused" */
    struct qt_ckpt *fused, *unfused;
    struct qt_backend *be;
    uint32_t ids[TOKENS];
    struct qt_err err;
};

/* ---- twin ----------------------------------------------------------------------------------- */

/* Parts of a fused tensor: their names and relative numbers of rows. */
static const struct {
    const char *fused, *names[3];
    size_t rows[3];
} split[] = {
    {"self_attn.qkv_proj", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}, {2, 1, 1}},
    {"mlp.gate_up_proj", {"mlp.gate_proj", "mlp.up_proj"}, {1, 1}},
};

static size_t split_tensor(struct qt_tensor out[3], char names[3][128], const struct qt_tensor *t)
{
    for (size_t s = 0; s < 2; s++) {
        const char *at = strstr(t->name, split[s].fused);
        size_t parts = 0, whole = 0;
        if (!at)
            continue;
        for (; parts < 3 && split[s].names[parts]; parts++)
            whole += split[s].rows[parts];
        for (size_t i = 0; i < parts; i++) {
            snprintf(names[i], 128, "%.*s%s%s", (int)(at - t->name), t->name, split[s].names[i],
                     at + strlen(split[s].fused));
            out[i] = *t;
            out[i].name = names[i];
            out[i].shape[0] = t->shape[0] * split[s].rows[i] / whole;
            out[i].count = t->count * split[s].rows[i] / whole;
            out[i].nbytes = t->nbytes * split[s].rows[i] / whole;
        }
        return parts;
    }
    out[0] = *t;
    return 1;
}

/* The parts of a tensor are stored in order, so the data equals that of the fused checkpoint. */
static void write_weights(struct world *w, const char *dir)
{
    static char names[TENSORS][3][128];
    struct qt_tensor tensors[3 * TENSORS];
    uint64_t offsets[3 * TENSORS + 1];
    size_t n = qt_ckpt_count(w->fused), parts = 0, size, at;
    char *header;
    assert_in_range(n, 1, TENSORS);
    for (size_t i = 0; i < n; i++)
        parts += split_tensor(&tensors[parts], names[i], qt_ckpt_tensor(w->fused, i));
    assert_true(parts > n);
    expect_ok("header",
              qt_safetensors_header(&header, &size, offsets, tensors, parts, NULL, &w->err),
              &w->err);
    char *data = calloc(1, offsets[parts]);
    memcpy(data, header, at = size);
    for (size_t i = 0; i < n; i++) {
        struct qt_blob blob;
        const struct qt_tensor *t = qt_ckpt_tensor(w->fused, i);
        expect_ok(t->name, qt_ckpt_read(&blob, w->fused, t, &w->err), &w->err);
        memcpy(data + at, blob.data, t->nbytes);
        at += t->nbytes;
        qt_blob_free(&blob);
    }
    assert_int_equal(at, offsets[parts]);
    fixture_write(dir, "model.safetensors", data, at);
    qt_free(header);
    free(data);
}

static void write_config(struct world *w, const char *dir)
{
    json_t *config;
    expect_ok("config",
              qt_json_load(&config, fixture_path(golden, "config.json"), 1 << 16, &w->err),
              &w->err);
    json_object_set_new(config, "model_type", json_string(twin));
    json_object_set_new(config, "rms_norm_eps", json_real(1e-5)); /* phi3's default */
    assert_int_equal(json_dump_file(config, fixture_path(dir, "config.json"), 0), 0);
    json_decref(config);
}

static int set_up(void **state)
{
    struct world *w = calloc(1, sizeof *w);
    uint32_t x = 2718;
    char dir[256];
    *state = w;
    w->dir = fixture_dir();
    snprintf(dir, sizeof dir, "%s/twin", w->dir);
    expect_ok("backend", qt_backend_cpu_open(&w->be, &w->err), &w->err);
    expect_ok(golden, qt_ckpt_open(&w->fused, golden, &w->err), &w->err);
    expect_ok(dir, qt_dir_make(dir, &w->err), &w->err);
    write_weights(w, dir);
    write_config(w, dir);
    expect_ok(dir, qt_ckpt_open(&w->unfused, dir, &w->err), &w->err);
    for (size_t i = 0; i < TOKENS; i++) {
        x = x * 1664525 + 1013904223;
        w->ids[i] = (x >> 16) % 97;
    }
    return 0;
}

static int tear_down(void **state)
{
    static const char *const dirs[] = {"twin", "fused", "unfused"};
    struct world *w = *state;
    qt_ckpt_close(w->fused);
    qt_ckpt_close(w->unfused);
    for (size_t i = 0; i < sizeof dirs / sizeof *dirs; i++)
        qt_dir_remove(fixture_path(w->dir, dirs[i]), NULL);
    fixture_remove(w->dir);
    w->be->close(w->be);
    free(w);
    return 0;
}

/* ---- comparison ----------------------------------------------------------------------------- */

/* Mean KL divergence of the logits. */
static double divergence(struct world *w, const struct qt_weights *a, const struct qt_weights *b)
{
    struct qt_eval_report report;
    expect_ok("eval",
              qt_eval(&report, a, b, w->ids, TOKENS, &(struct qt_eval_options){.seqlen = SEQLEN},
                      w->be, &w->err),
              &w->err);
    return report.kld_mean;
}

static void quantize(struct world *w, const struct qt_ckpt *ckpt, const char *out,
                     const char *scheme)
{
    struct qt_calibration data = {
        .ids = w->ids, .samples = SAMPLES, .seqlen = SEQLEN, .backend = w->be};
    struct qt_quantize_options opt = {
        .plan = {.scheme = scheme, .calibrated = true, .kv = true},
        .calibration = &data,
        .out_dir = fixture_path(w->dir, out),
        .force = true,
    };
    struct qt_quantize_report report;
    expect_ok(scheme, qt_quantize(&report, ckpt, &opt, &w->err), &w->err);
    json_decref(report.document);
}

/* Fused rows are rounded like separate ones, with the same activations. Small differences remain
 * because coordinate descent stops when it no longer helps all rows of a tensor; 4-bit activations
 * amplify them. limit: as a share of the divergence from the source. (test_act.c tests the order in
 * which w4ax stores rows.) */
static void scheme_case(struct world *w, const char *scheme, double limit)
{
    struct qt_container *fused, *unfused;
    struct qt_weights source = qt_weights_of_ckpt(w->fused);
    quantize(w, w->fused, "fused", scheme);
    quantize(w, w->unfused, "unfused", scheme);
    expect_ok("fused", qt_container_open(&fused, fixture_path(w->dir, "fused"), &w->err), &w->err);
    expect_ok("unfused", qt_container_open(&unfused, fixture_path(w->dir, "unfused"), &w->err),
              &w->err);
    struct qt_weights a = qt_weights_of_container(fused), b = qt_weights_of_container(unfused);
    double rounding = divergence(w, &a, &source);
    double between = divergence(w, &a, &b);
    print_message("  %-28s %.6f from the source, %.6f from the twin\n", scheme, rounding, between);
    assert_true(between < limit * rounding);
    assert_true(rounding > 1e-6 && rounding < 0.2);
    qt_container_close(fused);
    qt_container_close(unfused);
}

static void test_same_model(void **state)
{
    struct world *w = *state;
    struct qt_weights fused = qt_weights_of_ckpt(w->fused),
                      unfused = qt_weights_of_ckpt(w->unfused);
    assert_true(divergence(w, &fused, &unfused) == 0.0);
}

static void test_same_quantized(void **state)
{
    scheme_case(*state, "nf4:g=32", 0.5);
    scheme_case(*state, "fp6", 0.5);
    scheme_case(*state, "nf3:g=32,learn=1", 0.5);
}

static void test_same_w4ax(void **state)
{
    scheme_case(*state, "w4ax", 0.5);
    scheme_case(*state, "w4ax:a8max=0", 0.7);
    scheme_case(*state, "w4ax:a8max=0,smooth=1", 0.7);
    scheme_case(*state, "w4ax:a8max=1,smooth=1", 0.5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_same_model, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_same_quantized, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_same_w4ax, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
