/*
 * Errors of candidate schemes: without data those of qt_packed_quantize; with data the first
 * linears of the model, which have no quantized layers before them, are rounded as by qt_quantize,
 * and all linears if they are rounded in turn.
 */
#include "fixture.h"

#include "kernels/kernels.h"
#include "pack/pack.h"

#include <math.h>

#define MODEL "examples/nano-llama"
#define FIRST "model.layers.0.self_attn.q_proj.weight"

enum { SEQLEN = 32, SAMPLES = 40, PLANS = 3 };
static const char *const schemes[PLANS] = {"nf3", "nf4:g=64", "nf4"};

struct fixture {
    struct qt_ckpt *ckpt;
    struct qt_backend *be;
    struct qt_plan plan[PLANS];
    uint32_t ids[SAMPLES * SEQLEN];
    struct qt_calibration data;
    bool *wanted;
    struct qt_packed *rounded;
    double *error;
    struct qt_err err;
};

static void open_all(struct fixture *f, bool calibrated)
{
    uint64_t seed = 5;
    expect_ok("backend", qt_backend_cpu_open(&f->be, &f->err), &f->err);
    expect_ok("checkpoint", qt_ckpt_open(&f->ckpt, MODEL, &f->err), &f->err);
    for (size_t p = 0; p < PLANS; p++) {
        const struct qt_plan_options opt = {.scheme = schemes[p], .calibrated = calibrated};
        expect_ok("plan", qt_plan_new(&f->plan[p], f->ckpt, &opt, &f->err), &f->err);
    }
    for (size_t i = 0; i < SAMPLES * SEQLEN; i++)
        f->ids[i] = (uint32_t)(qt_splitmix64(&seed) % 256);
    f->data = (struct qt_calibration){
        .ids = f->ids, .samples = SAMPLES, .seqlen = SEQLEN, .backend = f->be};
    const size_t items = f->plan[0].count;
    f->wanted = calloc(items, sizeof *f->wanted);
    f->rounded = calloc(items, sizeof *f->rounded);
    f->error = calloc(items * PLANS, sizeof *f->error);
    for (size_t i = 0; i < items; i++)
        f->wanted[i] = !f->plan[0].items[i].copied &&
                       !strstr(f->plan[0].items[i].tensor->name, "layers.1.mlp.up_proj");
}

static void close_all(struct fixture *f)
{
    for (size_t i = 0; i < f->plan[0].count; i++)
        qt_packed_free(&f->rounded[i]);
    for (size_t p = 0; p < PLANS; p++)
        qt_plan_free(&f->plan[p]);
    free(f->wanted);
    free(f->rounded);
    free(f->error);
    qt_ckpt_close(f->ckpt);
    f->be->close(f->be);
}

static struct qt_candidates_options options(const struct fixture *f, bool calibrated)
{
    return (struct qt_candidates_options){.plans = f->plan,
                                          .count = PLANS,
                                          .base = 2,
                                          .wanted = f->wanted,
                                          .data = calibrated ? &f->data : NULL,
                                          .backend = f->be};
}

static void test_without_data(void **state)
{
    struct fixture f = {0};
    (void)state;
    open_all(&f, false);
    const struct qt_candidates_options opt = options(&f, false);
    expect_ok("candidates", qt_candidates(f.error, NULL, f.ckpt, &opt, &f.err), &f.err);
    for (size_t i = 0; i < f.plan[0].count; i++)
        for (size_t p = 0; p < PLANS; p++) {
            const struct qt_plan_item *item = &f.plan[p].items[i];
            const struct qt_tensor *t = item->tensor;
            struct qt_packed packed;
            struct qt_blob blob;
            struct qt_error e;
            if (!f.wanted[i]) {
                assert_true(f.error[i * PLANS + p] == 0);
                continue;
            }
            expect_ok("read", qt_ckpt_read(&blob, f.ckpt, t, &f.err), &f.err);
            const struct qt_matrix w = {blob.data,   t->dtype, t->shape[0],
                                        t->shape[1], t->file,  t->name};
            expect_ok("quantize",
                      qt_packed_quantize(&packed, &item->packed->spec, &w, NULL, &e, &f.err),
                      &f.err);
            assert_true(f.error[i * PLANS + p] == e.sum_e2 / e.sum_w2);
            qt_packed_free(&packed);
            qt_blob_free(&blob);
        }
    close_all(&f);
}

/* The error that the manifest has, and the sections, of an item in a container. errors: of each
 * item with plan 2, `step` apart. */
static void check_stored(const struct fixture *f, size_t item, const double *errors, size_t step,
                         const struct qt_container *c)
{
    struct qt_packed stored;
    struct qt_err err = {0};
    json_t *entry;
    const struct qt_entry *e = qt_container_find(c, f->plan[2].items[item].tensor->name);
    assert_non_null(e);
    expect_ok("packed", qt_packed_open(&stored, c, e, &err), &err);
    assert_int_equal(stored.nsections, f->rounded[item].nsections);
    for (size_t s = 0; s < stored.nsections; s++) {
        assert_int_equal(stored.section[s].bytes, f->rounded[item].section[s].bytes);
        assert_memory_equal(stored.section[s].data, f->rounded[item].section[s].data,
                            stored.section[s].bytes);
    }
    expect_ok("entry", qt_entry_json(&entry, e, &err), &err);
    const double after =
        json_number_value(json_object_get(json_object_get(entry, "hessian"), "error_after"));
    assert_true(after > 0);
    if (fabs(errors[item * step] / after - 1) > 1e-8)
        fail_msg("error %.12g, in a container %.12g", errors[item * step], after);
    json_decref(entry);
    qt_packed_free(&stored);
}

/* Quantizes the wanted matrices with plan 2. */
static struct qt_container *quantize(const struct fixture *f, const char *dir)
{
    const struct qt_rule rule = {.regex = "layers\\.1\\.mlp\\.up_proj", .spec = "none"};
    struct qt_quantize_report report;
    struct qt_container *c;
    struct qt_err err = {0};
    const struct qt_quantize_options run = {
        .plan = {.scheme = schemes[2], .rules = &rule, .nrules = 1, .calibrated = true},
        .calibration = &f->data,
        .out_dir = dir};
    expect_ok("run", qt_quantize(&report, f->ckpt, &run, &err), &err);
    json_decref(report.document);
    expect_ok("open", qt_container_open(&c, dir, &err), &err);
    return c;
}

static void test_calibrated(void **state)
{
    struct fixture f = {0};
    char *dir = fixture_dir();
    (void)state;
    open_all(&f, true);
    const struct qt_candidates_options opt = options(&f, true);
    expect_ok("candidates", qt_candidates(f.error, f.rounded, f.ckpt, &opt, &f.err), &f.err);
    for (size_t i = 0; i < f.plan[0].count; i++) {
        const double *error = f.error + i * PLANS;
        assert_int_equal(f.rounded[i].nsections > 0, f.wanted[i]);
        if (f.wanted[i] && !(error[1] > 0 && error[1] < error[2] && error[2] < error[0]))
            fail_msg("%s: %g, %g, %g", f.plan[0].items[i].tensor->name, error[0], error[1],
                     error[2]);
    }
    const char *out = fixture_path(dir, "out");
    struct qt_container *c = quantize(&f, out);
    for (size_t i = 0; i < f.plan[0].count; i++)
        if (strcmp(f.plan[0].items[i].tensor->name, FIRST) == 0)
            check_stored(&f, i, f.error + 2, PLANS, c);
    qt_container_close(c);
    close_all(&f);
    expect_ok("remove", qt_dir_remove(out, &f.err), &f.err);
    fixture_remove(dir);
}

static void test_in_turn(void **state)
{
    struct fixture f = {0};
    char *dir = fixture_dir();
    (void)state;
    open_all(&f, true);
    struct qt_candidates_options opt = options(&f, true);
    opt.plans = &f.plan[2];
    opt.count = 1;
    opt.base = 0;
    opt.in_turn = true;
    expect_ok("candidates", qt_candidates(f.error, f.rounded, f.ckpt, &opt, &f.err), &f.err);
    const char *out = fixture_path(dir, "out");
    struct qt_container *c = quantize(&f, out);
    for (size_t i = 0; i < f.plan[0].count; i++)
        if (f.wanted[i])
            check_stored(&f, i, f.error, 1, c);
    qt_container_close(c);
    close_all(&f);
    expect_ok("remove", qt_dir_remove(out, &f.err), &f.err);
    fixture_remove(dir);
}

static bool at_once(void)
{
    return true;
}

static void test_interrupted(void **state)
{
    struct fixture f = {0};
    (void)state;
    open_all(&f, true);
    struct qt_candidates_options opt = options(&f, true);
    opt.interrupted = at_once;
    expect_error("candidates", qt_candidates(f.error, f.rounded, f.ckpt, &opt, &f.err),
                 QT_E_INTERRUPTED, "interrupted", &f.err);
    close_all(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_without_data),
        cmocka_unit_test(test_calibrated),
        cmocka_unit_test(test_in_turn),
        cmocka_unit_test(test_interrupted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
