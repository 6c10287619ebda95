/*
 * verify --device on layers of experts with a simulated GPU: its grouped products are plain C over
 * the experts that the descriptors name. Tests inject defects that kernels might have; verify must
 * find each.
 */
#include "gpu_fixture.h"

#include "verify/verify.h"

enum { EXPERTS = 4, HIDDEN = 96, INNER = 80, WORKSPACE = QTOOL_WORKSPACE_ZEROED + 512 };

enum defect {
    NOTHING,
    ONE_VALUE,
    SWAPPED,     /* gate and up */
    WEIGHTS,     /* routing weights of another choice */
    LAST_CHOICE, /* one choice is missing */
    MANY_TOKENS, /* wrong with many tokens only */
    UNWRITTEN,
    AFTER_OUTPUT,
    NOT_REPEATABLE,
    COUNTERS,
    REFUSES,
};

struct fake {
    struct sim_gpu sim;
    enum defect wrong;
    unsigned runs;
};

/* The table of the simulated GPU. */
struct expert {
    const float *w[3]; /* decoded */
};
_Static_assert(sizeof(struct expert) <= QTOOL_MOE_TABLE_EXPERT, "no room");

struct world {
    char *dir, out[256];
    struct qt_backend *cpu;
    struct qt_container *container;
    float *decoded[EXPERTS][3];
};
static struct world world;

static const char *const parts[] = {"gate_proj", "up_proj", "down_proj"};

static void entry_name(char name[80], int e, int i)
{
    snprintf(name, 80, "model.layers.0.mlp.experts.%d.%s.weight", e, parts[i]);
}

/* ---- simulated GPU -------------------------------------------------------------------------- */

/* The decoded matrix whose codes the descriptor points to. */
static const float *decoded_of(const struct qtool_matmul_weight *w)
{
    for (int e = 0; e < EXPERTS && w->k <= HIDDEN && w->k >= INNER; e++) /* not those of bench */
        for (int i = 0; i < 3; i++) {
            struct qt_packed p = {0};
            struct qt_err err = {0};
            char name[80];
            entry_name(name, e, i);
            const struct qt_entry *entry = qt_container_find(world.container, name);
            expect_ok(name, qt_packed_open(&p, world.container, entry, &err), &err);
            const bool same = p.n == w->n && p.k == w->k &&
                              memcmp(p.section[0].data, w->plane[0], p.section[0].bytes) == 0;
            qt_packed_free(&p);
            if (same)
                return world.decoded[e][i];
        }
    assert_true(w->k != HIDDEN && w->k != INNER);
    return NULL;
}

static int fake_table(struct qt_gpu *gpu, void *table, const struct qtool_moe_layer *layer,
                      struct qt_err *err)
{
    if (((struct fake *)gpu->ctx)->wrong == REFUSES)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "experts differ");
    for (size_t e = 0; e < layer->experts; e++) {
        const struct expert x = {
            {decoded_of(&layer->gate[e]), decoded_of(&layer->up[e]), decoded_of(&layer->down[e])}};
        memcpy((char *)table + e * QTOOL_MOE_TABLE_EXPERT, &x, sizeof x);
    }
    return QT_OK;
}

static int fake_plan(struct qt_gpu *gpu, struct qtool_moe_plan *out,
                     const struct qtool_moe_layer *layer, size_t tokens,
                     const struct qtool_moe_options *opt, struct qt_err *err)
{
    (void)gpu, (void)err;
    *out = (struct qtool_moe_plan){.tokens = tokens,
                                   .experts = layer->experts,
                                   .hidden = layer->gate->k,
                                   .intermediate = layer->gate->n,
                                   .options = *opt,
                                   .workspace_bytes = WORKSPACE};
    return QT_OK;
}

static void multiply(float *y, const float *w, const float *x, size_t n, size_t k)
{
    for (size_t i = 0; i < n; i++) {
        double sum = 0;
        for (size_t j = 0; j < k; j++)
            sum += (double)w[i * k + j] * (double)x[j];
        y[i] = (float)sum;
    }
}

/* Adds `weight` times an expert's output to sum. */
static void add_expert(const struct fake *f, float sum[HIDDEN], const struct expert *e,
                       const float x[HIDDEN], float weight, enum qtool_dtype dtype)
{
    float gate[INNER], up[INNER], y[HIDDEN];
    multiply(gate, e->w[f->wrong == SWAPPED], x, INNER, HIDDEN);
    multiply(up, e->w[f->wrong != SWAPPED], x, INNER, HIDDEN);
    for (int i = 0; i < INNER; i++)
        gate[i] = from_bits(to_bits(gate[i] / (1 + expf(-gate[i])) * up[i], dtype), dtype);
    multiply(y, e->w[2], gate, HIDDEN, INNER);
    for (int i = 0; i < HIDDEN; i++)
        sum[i] += weight * y[i];
}

static int fake_run(struct qt_gpu *gpu, const struct qtool_moe_plan *plan, const void *table,
                    void *y, const void *x, const int *ids, const float *weights, void *workspace,
                    struct qt_err *err)
{
    struct fake *f = gpu->ctx;
    const size_t topk = plan->options.topk;
    const enum qtool_dtype dtype = plan->options.dtype;
    uint16_t *out = y;
    (void)err;
    for (size_t t = 0; t < plan->tokens && plan->hidden == HIDDEN; t++) {
        float row[HIDDEN], sum[HIDDEN] = {0};
        for (size_t i = 0; i < HIDDEN; i++)
            row[i] = from_bits(((const uint16_t *)x)[t * HIDDEN + i], dtype);
        for (size_t j = 0; j + (f->wrong == LAST_CHOICE) < topk; j++) {
            struct expert e;
            memcpy(&e, (const char *)table + (size_t)ids[t * topk + j] * QTOOL_MOE_TABLE_EXPERT,
                   sizeof e);
            add_expert(f, sum, &e, row, weights[f->wrong == WEIGHTS ? 0 : t * topk + j], dtype);
        }
        for (size_t i = 0; i < HIDDEN; i++)
            out[t * HIDDEN + i] = to_bits(sum[i], dtype);
    }
    const size_t count = plan->tokens * plan->hidden;
    f->runs++;
    if (f->wrong == ONE_VALUE || (f->wrong == MANY_TOKENS && plan->tokens > 32))
        out[count - 1] ^= 0x8000;
    else if (f->wrong == UNWRITTEN)
        out[0] = 0xffff;
    else if (f->wrong == AFTER_OUTPUT)
        out[count] = 0;
    else if (f->wrong == NOT_REPEATABLE)
        out[1] = (uint16_t)(out[1] ^ (f->runs & 1));
    else if (f->wrong == COUNTERS)
        ((char *)workspace)[64] = 1;
    return QT_OK;
}

static int refuse_plan(struct qt_gpu *gpu, struct qtool_matmul_plan *out,
                       const struct qtool_matmul_weight *w, size_t m,
                       const struct qtool_matmul_options *opt, struct qt_err *err)
{
    (void)gpu, (void)out, (void)w, (void)m, (void)opt;
    return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "only layers of experts");
}

static void fake_init(struct fake *f, enum defect wrong)
{
    *f = (struct fake){.wrong = wrong};
    sim_gpu_init(&f->sim);
    f->sim.gpu.plan = refuse_plan;
    f->sim.gpu.moe_table = fake_table;
    f->sim.gpu.moe_plan = fake_plan;
    f->sim.gpu.moe_run = fake_run;
}

/* ---- container ------------------------------------------------------------------------------ */

static void write_checkpoint(const char *dir)
{
    struct qt_tensor tensors[EXPERTS * 3];
    char names[EXPERTS * 3][80], *header = NULL;
    uint64_t offsets[EXPERTS * 3 + 1];
    size_t size = 0;
    memset(tensors, 0, sizeof tensors);
    for (int i = 0; i < EXPERTS * 3; i++) {
        entry_name(names[i], i / 3, i % 3);
        tensors[i].name = names[i];
        tensors[i].dtype = QT_F32;
        tensors[i].ndim = 2;
        tensors[i].shape[0] = i % 3 == 2 ? HIDDEN : INNER;
        tensors[i].shape[1] = i % 3 == 2 ? INNER : HIDDEN;
        tensors[i].nbytes = HIDDEN * INNER * 4;
    }
    assert_int_equal(
        qt_safetensors_header(&header, &size, offsets, tensors, EXPERTS * 3, NULL, NULL), QT_OK);
    unsigned char *file = calloc(1, offsets[EXPERTS * 3]);
    memcpy(file, header, size);
    srand(1);
    for (size_t at = offsets[0]; at < offsets[EXPERTS * 3]; at += 4) {
        float v = 0.2f * ((float)rand() / (float)RAND_MAX + (float)rand() / (float)RAND_MAX - 1);
        memcpy(file + at, &v, 4);
    }
    fixture_write(dir, "model.safetensors", file, offsets[EXPERTS * 3]);
    free(file);
    qt_free(header);
}

static int open_world(void **state)
{
    struct qt_quantize_report report;
    struct qt_ckpt *ckpt = NULL;
    struct qt_err err = {0};
    (void)state;
    world.dir = fixture_dir();
    snprintf(world.out, sizeof world.out, "%s/out", world.dir);
    write_checkpoint(world.dir);
    const struct qt_quantize_options opt = {.plan = {.scheme = "nf4"}, .out_dir = world.out};
    if (qt_ckpt_open(&ckpt, world.dir, &err) < 0 || qt_quantize(&report, ckpt, &opt, &err) < 0 ||
        qt_container_open(&world.container, world.out, &err) < 0 ||
        qt_backend_cpu_open(&world.cpu, &err) < 0) {
        print_error("%s: %s\n", err.file, err.reason);
        return -1;
    }
    json_decref(report.document);
    qt_ckpt_close(ckpt);
    for (int e = 0; e < EXPERTS; e++)
        for (int i = 0; i < 3; i++) {
            struct qt_packed p = {0};
            char name[80];
            entry_name(name, e, i);
            world.decoded[e][i] = malloc(HIDDEN * INNER * sizeof(float));
            if (qt_packed_open(&p, world.container, qt_container_find(world.container, name),
                               &err) < 0 ||
                qt_packed_decode(world.decoded[e][i], &p, 0, p.n, &err) < 0)
                return -1;
            qt_packed_free(&p);
        }
    return 0;
}

static int close_world(void **state)
{
    (void)state;
    for (int i = 0; i < EXPERTS * 3; i++)
        free(world.decoded[i / 3][i % 3]);
    world.cpu->close(world.cpu);
    qt_container_close(world.container);
    assert_int_equal(qt_dir_remove(world.out, NULL), 0);
    fixture_remove(world.dir);
    return 0;
}

/* ---- verify --------------------------------------------------------------------------------- */

/* Verifies the container; *row: a copy of the layer's row, without its name. */
static void verify(struct qt_device_tensor *row, enum defect wrong)
{
    struct qt_device_report r;
    struct qt_err err = {0};
    struct fake f;
    fake_init(&f, wrong);
    expect_ok("verify",
              qt_verify_device(&r, world.container, &f.sim.gpu, world.cpu, NULL, NULL, &err), &err);
    assert_int_equal(r.count, EXPERTS * 3 + (wrong != REFUSES));
    *row = (struct qt_device_tensor){.name = NULL};
    if (wrong != REFUSES) {
        *row = r.tensors[EXPERTS * 3];
        assert_string_equal(row->name, "model.layers.0.mlp.experts");
    }
    assert_int_equal(r.missing, EXPERTS * 3); /* the single products */
    assert_int_equal(r.faults, row->faults);
    row->name = row->layer = NULL;
    qt_device_free(&r);
}

static void test_right(void **state)
{
    struct qt_device_tensor row;
    (void)state;
    verify(&row, NOTHING);
    assert_string_equal(row.fault, "");
    assert_string_equal(row.missing, "");
    assert_int_equal(row.runs, 6);
    assert_true(row.error[QTOOL_F16] > 1e-4 && row.error[QTOOL_F16] < 6e-4);
    assert_true(row.error[QTOOL_BF16] > 8e-4 && row.error[QTOOL_BF16] < 5e-3);
}

static void test_faults(void **state)
{
    static const struct {
        enum defect wrong;
        const char *says;
    } cases[] = {
        {ONE_VALUE, "wrong values; token "},
        {SWAPPED, "wrong values; token "},
        {WEIGHTS, "wrong values; token "},
        {LAST_CHOICE, "wrong values; token "},
        {MANY_TOKENS, "M=96 random f16: wrong values; token 95 "},
        {UNWRITTEN, "token 0 has the relative error NaN"},
        {AFTER_OUTPUT, "wrote outside the output"},
        {NOT_REPEATABLE, "two runs gave different bits"},
        {COUNTERS, "did not reset the workspace counters"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct qt_device_tensor row;
        verify(&row, cases[i].wrong);
        assert_true(row.faults > 0);
        if (!strstr(row.fault, cases[i].says))
            fail_msg("defect %d: %s", (int)cases[i].wrong, row.fault);
    }
}

/* A layer without grouped products has no row. */
static void test_refused(void **state)
{
    struct qt_device_tensor row;
    (void)state;
    verify(&row, REFUSES);
    assert_int_equal(row.runs, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_right),
        cmocka_unit_test(test_faults),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, open_world, close_world);
}
