/* bench --moe with a simulated GPU. */
#include "gpu_fixture.h"

#include "verify/verify.h"

struct fake {
    struct sim_gpu sim;
    bool refuses;
};

static int fake_table(struct qt_gpu *gpu, void *table, const struct qtool_moe_layer *layer,
                      struct qt_err *err)
{
    if (((struct fake *)gpu->ctx)->refuses)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "experts differ");
    for (size_t e = 1; e < layer->experts; e++) { /* matrices with memory of their own */
        assert_true(layer->gate[e].plane[0] > layer->down[e - 1].plane[0]);
        assert_true(layer->up[e].plane[0] > layer->gate[e].plane[0]);
        assert_true(layer->down[e].plane[0] > layer->up[e].plane[0]);
        assert_true(layer->gate[e].k == layer->down[e].n && layer->gate[e].n == layer->up[e].n);
    }
    memset(table, 1, layer->experts * QTOOL_MOE_TABLE_EXPERT);
    return QT_OK;
}

static int fake_plan(struct qt_gpu *gpu, struct qtool_moe_plan *out,
                     const struct qtool_moe_layer *layer, size_t tokens,
                     const struct qtool_moe_options *opt, struct qt_err *err)
{
    (void)gpu, (void)err;
    *out = (struct qtool_moe_plan){.tokens = tokens,
                                   .experts = layer->experts,
                                   .options = *opt,
                                   .workspace_bytes = QTOOL_WORKSPACE_ZEROED};
    return QT_OK;
}

/* Every token chooses different experts. */
static int fake_run(struct qt_gpu *gpu, const struct qtool_moe_plan *plan, const void *table,
                    void *y, const void *x, const int *ids, const float *weights, void *workspace,
                    struct qt_err *err)
{
    struct fake *f = gpu->ctx;
    const size_t topk = plan->options.topk;
    (void)y, (void)x, (void)weights, (void)workspace, (void)err;
    assert_int_equal(*(const unsigned char *)table, 1);
    for (size_t i = 0; i < plan->tokens * topk; i++) {
        assert_in_range(ids[i], 0, plan->experts - 1);
        for (size_t j = i / topk * topk; j < i; j++)
            assert_int_not_equal(ids[i], ids[j]);
    }
    if (f->sim.timing)
        sim_gpu_reads(&f->sim, table);
    return QT_OK;
}

static int fake_batch(struct qt_gpu *gpu, void *y, const void *x, const void *w, size_t count,
                      size_t m, size_t n, size_t k, struct qt_err *err)
{
    assert_true(count >= 1);
    return gpu->gemm(gpu, y, x, w, m, n, k, err);
}

static void test_bench(void **state)
{
    static const struct qt_bench_moe shape = {"", 16, 2, 64, 32};
    static const size_t m[] = {1, 40};
    struct qt_bench_report r;
    struct qt_spec spec;
    struct qt_err err = {0};
    struct fake f = {.refuses = false};
    (void)state;
    sim_gpu_init(&f.sim);
    f.sim.gpu.moe_table = fake_table;
    f.sim.gpu.moe_plan = fake_plan;
    f.sim.gpu.moe_run = fake_run;
    f.sim.gpu.gemm_batch = fake_batch;
    expect_ok("spec", qt_spec_parse(&spec, "int4", &err), &err);
    const struct qt_bench_options opt = {
        .specs = &spec, .nspecs = 1, .moe = &shape, .nmoe = 1, .m = m, .nm = 2};
    expect_ok("bench", qt_bench(&r, &f.sim.gpu, &opt, &err), &err);
    assert_int_equal(r.nmoe, 2);
    assert_int_equal(r.moe[0].touched, 2);
    assert_int_equal(r.moe[0].most, 1);
    assert_int_equal(r.moe[1].touched, 16);
    for (size_t i = 0; i < 2; i++) {
        assert_string_equal(r.moe[i].why, "");
        assert_true(r.moe[i].us == 4 && r.moe[i].floor_us == 2 && r.moe[i].loop_us == 10 &&
                    r.moe[i].batch_us == 10);
    }
    assert_int_equal(r.moe[1].bytes, 8 * r.moe[0].bytes);
    qt_bench_free(&r);
    f.sim.gpu.has_cublas = false;
    expect_ok("bench", qt_bench(&r, &f.sim.gpu, &opt, &err), &err);
    assert_true(isnan(r.moe[0].loop_us) && r.moe[0].us == 4);
    qt_bench_free(&r);
    f.refuses = true;
    expect_ok("bench", qt_bench(&r, &f.sim.gpu, &opt, &err), &err);
    assert_string_equal(r.moe[0].why, "experts differ");
    qt_bench_free(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bench),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
