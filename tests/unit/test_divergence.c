/*
 * The divergences of models with one quantized group, measured in passes over the layers, are those
 * that qt_eval finds for each model: the same bits.
 */
#include "fixture.h"

#include "kernels/kernels.h"
#include "verify/budget/budget.h"

#include <math.h>

#define MODEL "examples/nano-llama"

enum { SEQLEN = 48, SAMPLES = 3, GROUPS = 3 };
static const char *const members[][2] = {
    /* tensor, number of its group */
    {"model.layers.0.self_attn.v_proj.weight", "0"},
    {"model.layers.1.mlp.gate_proj.weight", "1"},
    {"model.layers.1.mlp.up_proj.weight", "1"},
    {"model.layers.2.mlp.down_proj.weight", "2"},
};
enum { MEMBERS = sizeof members / sizeof *members };

struct fixture {
    uint32_t ids[SEQLEN * SAMPLES];
    struct qt_backend *be;
    struct qt_ckpt *ckpt;
    struct qt_budget_options opt;
    struct group groups[GROUPS];
    struct budget b;
    bool *wanted;
    struct qt_err err;
};

static void fixture_open(struct fixture *f)
{
    const struct qt_plan_options plan = {.scheme = "nf2"};
    uint64_t seed = 11;
    expect_ok("backend", qt_backend_cpu_open(&f->be, &f->err), &f->err);
    expect_ok("checkpoint", qt_ckpt_open(&f->ckpt, MODEL, &f->err), &f->err);
    for (size_t i = 0; i < SEQLEN * SAMPLES; i++)
        f->ids[i] = (uint32_t)(qt_splitmix64(&seed) % 256);
    f->opt.measured = (struct qt_calibration){
        .ids = f->ids, .samples = SAMPLES, .seqlen = SEQLEN, .backend = f->be};
    f->b = (struct budget){.ckpt = f->ckpt, .opt = &f->opt, .groups = f->groups, .ngroups = GROUPS};
    expect_ok("plan", qt_plan_new(&f->b.plan[0], f->ckpt, &plan, &f->err), &f->err);
    const size_t items = f->b.plan[0].count;
    f->b.group_of = calloc(items, sizeof *f->b.group_of);
    f->b.rounded = calloc(items, sizeof *f->b.rounded);
    f->wanted = calloc(items, sizeof *f->wanted);
    for (size_t i = 0; i < items; i++) {
        f->b.group_of[i] = SIZE_MAX;
        for (size_t m = 0; m < MEMBERS; m++)
            if (strcmp(f->b.plan[0].items[i].tensor->name, members[m][0]) == 0)
                f->b.group_of[i] = (size_t)(members[m][1][0] - '0');
        f->wanted[i] = f->b.group_of[i] != SIZE_MAX;
    }
    for (size_t g = 0; g < GROUPS; g++)
        f->groups[g].kld = NAN;
}

static void fixture_close(struct fixture *f)
{
    for (size_t i = 0; i < f->b.plan[0].count; i++)
        qt_packed_free(&f->b.rounded[i]);
    qt_plan_free(&f->b.plan[0]);
    free(f->b.group_of);
    free(f->b.rounded);
    free(f->wanted);
    qt_ckpt_close(f->ckpt);
    f->be->close(f->be);
}

static void round_all(struct fixture *f)
{
    const struct qt_candidates_options opt = {
        .plans = f->b.plan, .count = 1, .wanted = f->wanted, .backend = f->be};
    double *error = calloc(f->b.plan[0].count, sizeof *error);
    expect_ok("rounding", qt_candidates(error, f->b.rounded, f->ckpt, &opt, &f->err), &f->err);
    free(error);
}

static double by_eval(struct fixture *f, size_t group)
{
    const struct qt_eval_options opt = {.seqlen = SEQLEN};
    const struct qt_weights source = qt_weights_of_ckpt(f->ckpt);
    struct budget_changed changed;
    const struct qt_weights w = budget_changed_weights(&changed, &f->b, group);
    struct qt_eval_report report;
    expect_ok("eval", qt_eval(&report, &w, &source, f->ids, SEQLEN * SAMPLES, &opt, f->be, &f->err),
              &f->err);
    return report.kld_mean;
}

static void test_passes(void **state)
{
    struct fixture f = {0};
    size_t measured;
    (void)state;
    fixture_open(&f);
    round_all(&f);
    f.groups[1].kld = 0.5; /* known */
    expect_ok("pass", budget_measure_pass(&measured, &f.b, &f.err), &f.err);
    assert_int_equal(measured, 2);
    assert_true(f.groups[1].kld == 0.5);
    f.groups[1].kld = NAN;
    expect_ok("pass", budget_measure_pass(&measured, &f.b, &f.err), &f.err);
    assert_int_equal(measured, 1);
    expect_ok("pass", budget_measure_pass(&measured, &f.b, &f.err), &f.err);
    assert_int_equal(measured, 0);
    for (size_t g = 0; g < GROUPS; g++) {
        const double expected = by_eval(&f, g);
        assert_true(expected > 1e-4);
        if (f.groups[g].kld != expected)
            fail_msg("group %zu: %.17g, by eval %.17g", g, f.groups[g].kld, expected);
    }
    fixture_close(&f);
}

static bool at_once(void)
{
    return true;
}

static void test_interrupted(void **state)
{
    struct fixture f = {0};
    size_t measured;
    (void)state;
    fixture_open(&f);
    round_all(&f);
    f.opt.interrupted = at_once;
    expect_error("pass", budget_measure_pass(&measured, &f.b, &f.err), QT_E_INTERRUPTED,
                 "interrupted", &f.err);
    assert_true(isnan(f.groups[0].kld));
    fixture_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_passes),
        cmocka_unit_test(test_interrupted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
