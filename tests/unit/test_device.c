/*
 * verify --device and bench on a simulated GPU, whose product is plain C over the descriptor of the
 * fused kernel. Tests inject every defect that a kernel might have; verify must find each.
 */
#include "gpu_fixture.h"
#include "packed_fixture.h"

#include "formats/layouts/layout_frag.h"
#include "formats/layouts/layout_mix24.h"
#include "verify/verify.h"

/* ---- simulated GPU -------------------------------------------------------------------------- */

enum defect {
    NOTHING,
    ONE_VALUE,       /* one output of the last token */
    UNWRITTEN,       /* one output is not written */
    FIRST_UNWRITTEN, /* same, only with the most tokens, which run first */
    NOISY,           /* all outputs have a small error */
    AFTER_OUTPUT,    /* one element after Y */
    BEFORE_OUTPUT,
    AFTER_WORKSPACE,
    COUNTER_NOT_RESET, /* workspace counters are not zero after the run */
    NOT_REPEATABLE,    /* every other run differs */
    BATCH,             /* batch-invariant products depend on m */
    READS_PAST_X,
    STALE_WORKSPACE, /* reads partial sums from uninitialized workspace */
    CHANGES_WEIGHTS,
    DEQUANTIZE,
    REFUSES,
    CUDA_FAILS,
    ROUNDS, /* rounds weights and the plan says so: no defect */
    ROUNDS_UNDECLARED,
    DECLARES_ROUNDING, /* the plan says so, but the kernel does not round */
};

/* With this ROUNDED_EXP2, 480 times the largest stored scale (2^14) is within FP16. */
enum { WORKSPACE = QTOOL_WORKSPACE_ZEROED + 1024, ROUNDED_EXP2 = 8 };

struct fake {
    struct sim_gpu sim;
    enum defect wrong;
    unsigned runs;
};

/* The stored weight at a packed column, without outliers, in units of 2^scale_exp2. */
static float mix24_dense(const struct qtool_matmul_weight *w, size_t row, size_t col)
{
    const struct qt_mix24_units x = {(uint32_t)(w->mix24.twos + w->mix24.fours),
                                     (uint32_t)w->mix24.fours, 1, 1};
    uint32_t unit = (uint32_t)(col / QT_MIX24_UNIT);
    bool four = qt_mix24_is_four(&x, unit);
    unsigned y = row % 16, b = col % QT_MIX24_UNIT / 64, t = col % 64 / QT_MIX24_CHUNK;
    unsigned lane = 4 * (y % 8) + t, bits = four ? 4 : 2;
    const unsigned char *record = w->mix24.stream;
    record += row / 16 * qt_mix24_record(&x, x.units) + qt_mix24_record(&x, unit);
    const unsigned char *q = record + (four ? QT_MIX24_FOUR_CODES : QT_MIX24_TWO_CODES);
    const unsigned char *z = q + QT_MIX24_Q_BYTES;
    const unsigned char *u = z + (four ? 64 : 32);
    struct qt_mix24_place at = qt_mix24_place(four, y, (unsigned)(col % QT_MIX24_UNIT));
    uint32_t word, pair;
    uint16_t scales, zeros = z[lane], shared;
    memcpy(&word, record + 4 * at.word, 4);
    memcpy(&scales, q + 2 * lane, 2);
    if (four)
        memcpy(&zeros, z + 2 * lane, 2);
    memcpy(&pair, u + 4 * t, 4);
    shared = (uint16_t)(pair >> 16 * b);
    word = at.bit ? word >> at.bit | word << (32 - at.bit) : word;
    int code = (int)(word & ((1u << bits) - 1));
    int zero = zeros >> qt_mix24_z_bit(four, y, b) & ((1 << bits) - 1);
    int scale = (scales >> qt_mix24_q_bit(y, b) & 15) + (shared & 15);
    return (float)((code - zero) * scale) * qt_f16_to_f32(shared & 0x7f80);
}

/* Decodes a row in the order of source channels, with outliers. */
static void mix24_row(float *out, const struct qtool_matmul_weight *w, size_t row)
{
    size_t columns = (w->mix24.twos + w->mix24.fours) * QT_MIX24_UNIT;
    const uint16_t *perm = w->mix24.perm, *cols = w->mix24.csr_col, *vals = w->mix24.csr_val;
    const uint32_t *ptr = w->mix24.csr_ptr;
    uint32_t next = ptr ? ptr[row] : 0, end = ptr ? ptr[row + 1] : 0;
    for (size_t col = 0; col < columns; col++) {
        size_t channel = perm[col / 16] * (size_t)16 + col % 16;
        float v = mix24_dense(w, row, col) * 0x1p-22f;
        if (next < end && cols[next] == col)
            v += qt_f16_to_f32(vals[next++]);
        if (perm[col / 16] != QT_MIX24_NO_GROUP && channel < w->k)
            out[channel] = ldexpf(v, w->scale_exp2);
    }
    assert_int_equal(next, end);
}

static float *decode(const struct qtool_matmul_weight *w)
{
    float *out = malloc(w->n * w->k * sizeof *out);
    assert_non_null(out);
    if (w->kind == QTOOL_MATMUL_MIX24) {
        for (size_t row = 0; row < w->n; row++)
            mix24_row(out + row * w->k, w, row);
        return out;
    }
    for (size_t i = 0; i < w->n * w->k; i++)
        out[i] = weight_at(w, i / w->k, i % w->k);
    return out;
}

static struct fake *self(struct qt_gpu *gpu)
{
    return gpu->ctx;
}

static int fake_plan(struct qt_gpu *gpu, struct qtool_matmul_plan *out,
                     const struct qtool_matmul_weight *w, size_t m,
                     const struct qtool_matmul_options *opt, struct qt_err *err)
{
    *out = (struct qtool_matmul_plan){
        .m = m, .n = w->n, .k = w->k, .workspace_bytes = WORKSPACE, .options = *opt};
    out->rounded = self(gpu)->wrong == ROUNDS || self(gpu)->wrong == DECLARES_ROUNDING;
    out->rounded_exp2 = ROUNDED_EXP2;
    if (self(gpu)->wrong == REFUSES && w->bits == 8)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "eight bits are too many");
    return QT_OK;
}

static void misbehave(struct fake *f, const struct qtool_matmul_plan *plan, uint16_t *y,
                      const uint16_t *x, unsigned char *workspace)
{
    size_t count = plan->m * plan->n;
    float stale;
    switch (f->wrong) {
    case ONE_VALUE:
        y[count - 1] = (uint16_t)(y[count - 1] ^ 0x8000);
        break;
    case UNWRITTEN:
        y[count / 2] = 0xffff;
        break;
    case FIRST_UNWRITTEN:
        if (plan->m >= 128)
            y[count / 2] = 0xffff;
        break;
    case AFTER_OUTPUT:
        y[count] = 0;
        break;
    case BEFORE_OUTPUT:
        y[-1] = 0;
        break;
    case AFTER_WORKSPACE:
        workspace[WORKSPACE] = 1;
        break;
    case COUNTER_NOT_RESET:
        workspace[100] = 1;
        break;
    case NOT_REPEATABLE:
        y[0] = (uint16_t)(y[0] ^ (f->runs & 1));
        break;
    case READS_PAST_X:
        y[0] = to_bits(from_bits(y[0], plan->options.dtype) +
                           0 * from_bits(x[plan->m * plan->k], plan->options.dtype),
                       plan->options.dtype);
        break;
    case STALE_WORKSPACE:
        memcpy(&stale, workspace + QTOOL_WORKSPACE_ZEROED, sizeof stale);
        y[0] = to_bits(from_bits(y[0], plan->options.dtype) + 0 * stale, plan->options.dtype);
        break;
    default:
        break;
    }
}

static void fake_token(const struct fake *f, uint16_t *y, const uint16_t *x, const float *w,
                       const struct qtool_matmul_plan *plan)
{
    enum qtool_dtype dtype = plan->options.dtype;
    double sum2 = 0, sum[1024];
    assert_true(plan->n <= 1024);
    for (size_t row = 0; row < plan->n; row++) {
        sum[row] = 0;
        for (size_t i = 0; i < plan->k; i++)
            sum[row] += (double)from_bits(x[i], dtype) * (double)w[row * plan->k + i];
        sum2 += sum[row] * sum[row];
    }
    /* Below the limit of a single value, but above the limit of the relative error. */
    double noise = f->wrong == NOISY ? 1.8e-4 * sqrt(sum2 / (double)plan->n) : 0;
    double factor =
        f->wrong == BATCH && plan->options.batch_invariant && plan->m == 8 ? 1 + 5e-5 : 1;
    for (size_t row = 0; row < plan->n; row++)
        y[row] = to_bits((float)(sum[row] * factor + (row % 2 ? noise : -noise)), dtype);
}

static int fake_run(struct qt_gpu *gpu, const struct qtool_matmul_plan *plan,
                    const struct qtool_matmul_weight *w, void *y, const void *x, void *workspace,
                    struct qt_err *err)
{
    struct fake *f = self(gpu);
    const char *read = w->plane[0];
    const uint16_t *tokens = x;
    uint16_t *out = y;
    if (f->wrong == CUDA_FAILS)
        return qt_fail(err, QT_E_INTERNAL, NULL, NULL, "GPU: illegal address");
    if (f->sim.timing) {
        sim_gpu_reads(&f->sim, read);
        if (f->wrong == CHANGES_WEIGHTS) /* while timing, because earlier checks would fail too */
            ((unsigned char *)(uintptr_t)w->scale)[0] = 0x55;
        return QT_OK;
    }
    float *decoded = decode(w);
    const int unit = w->scale_exp2 + ROUNDED_EXP2;
    for (size_t i = 0; i < w->n * w->k; i++)
        if (f->wrong == ROUNDS || f->wrong == ROUNDS_UNDECLARED)
            decoded[i] = ldexpf(qt_f16_to_f32(qt_f32_to_f16(ldexpf(decoded[i], -unit))), unit);
    for (size_t t = 0; t < plan->m; t++)
        fake_token(f, out + t * w->n, tokens + t * w->k, decoded, plan);
    free(decoded);
    f->runs++;
    misbehave(f, plan, out, tokens, workspace);
    return QT_OK;
}

static int fake_dequantize(struct qt_gpu *gpu, const struct qtool_matmul_weight *w, void *out,
                           enum qtool_dtype dtype, struct qt_err *err)
{
    float *decoded = decode(w);
    uint16_t *to = out;
    (void)err;
    for (size_t i = 0; i < w->n * w->k; i++)
        to[i] = to_bits(decoded[i], dtype);
    free(decoded);
    if (self(gpu)->wrong == DEQUANTIZE)
        to[w->n * w->k - 1] ^= 1;
    return QT_OK;
}

static void fake_init(struct fake *f, enum defect wrong)
{
    *f = (struct fake){.wrong = wrong};
    sim_gpu_init(&f->sim);
    f->sim.gpu.plan = fake_plan;
    f->sim.gpu.run = fake_run;
    f->sim.gpu.dequantize = fake_dequantize;
}

/* ---- container ------------------------------------------------------------------------------ */

static const struct qt_tensor tensors[] = {
    {.name = "a.weight", .dtype = QT_F32, .ndim = 2, .shape = {33, 200}, .nbytes = 33 * 200 * 4},
    {.name = "b.weight", .dtype = QT_F32, .ndim = 2, .shape = {48, 129}, .nbytes = 48 * 129 * 4},
    {.name = "c.weight", .dtype = QT_F32, .ndim = 2, .shape = {17, 64}, .nbytes = 17 * 64 * 4},
};
enum { TENSORS = sizeof tensors / sizeof *tensors };

struct world {
    char *dir;
    char out[256];
    struct qt_backend *cpu;
    struct qt_container *container;
};
static struct world world;

static void write_checkpoint(const char *dir)
{
    uint64_t offsets[TENSORS + 1];
    char *header = NULL;
    size_t size = 0;
    assert_int_equal(qt_safetensors_header(&header, &size, offsets, tensors, TENSORS, NULL, NULL),
                     QT_OK);
    unsigned char *file = calloc(1, offsets[TENSORS]);
    memcpy(file, header, size);
    srand(1);
    for (size_t at = offsets[0]; at < offsets[TENSORS]; at += 4) {
        float v = 0.05f * ((float)rand() / (float)RAND_MAX + (float)rand() / (float)RAND_MAX - 1);
        memcpy(file + at, &v, 4);
    }
    fixture_write(dir, "model.safetensors", file, offsets[TENSORS]);
    free(file);
    qt_free(header);
}

static int open_world(void **state)
{
    const struct qt_rule rules[] = {{"^a", "nf3:g=64"}, {"^b", "fp6:e=2"}, {"^c", "fp8"}};
    struct qt_quantize_report report;
    struct qt_ckpt *ckpt = NULL;
    struct qt_err err = {0};
    (void)state;
    world.dir = fixture_dir();
    snprintf(world.out, sizeof world.out, "%s/out", world.dir);
    write_checkpoint(world.dir);
    const struct qt_quantize_options opt = {.plan = {.scheme = "none", .rules = rules, .nrules = 3},
                                            .out_dir = world.out};
    if (qt_ckpt_open(&ckpt, world.dir, &err) < 0 || qt_quantize(&report, ckpt, &opt, &err) < 0 ||
        qt_container_open(&world.container, world.out, &err) < 0 ||
        qt_backend_cpu_open(&world.cpu, &err) < 0) {
        print_error("%s: %s\n", err.file, err.reason);
        return -1;
    }
    json_decref(report.document);
    qt_ckpt_close(ckpt);
    return 0;
}

static int close_world(void **state)
{
    (void)state;
    world.cpu->close(world.cpu);
    qt_container_close(world.container);
    assert_int_equal(qt_dir_remove(world.out, NULL), 0);
    fixture_remove(world.dir);
    return 0;
}

static int verify(struct qt_device_report *out, struct fake *f, enum defect wrong,
                  struct qt_err *err)
{
    *err = (struct qt_err){0};
    fake_init(f, wrong);
    return qt_verify_device(out, world.container, &f->sim.gpu, world.cpu, NULL, NULL, err);
}

/* ---- descriptors ---------------------------------------------------------------------------- */

/* For every preset, decoding by the kernel's descriptor equals qt_packed_decode. */
static void test_descriptors(void **state)
{
    const struct qt_scheme *s;
    const struct qt_preset *preset;
    size_t seen = 0;
    (void)state;
    for (size_t i = 0; (s = qt_scheme_at(i)) != NULL; i++)
        for (size_t j = 0; (preset = qt_scheme_preset(s, j)) != NULL; j++) {
            enum { N = 35, K = 150 };
            static float w[N * K], expected[N * K];
            const void *section[QT_MAX_SECTIONS];
            struct qtool_matmul_weight weight;
            struct qt_packed p = {0};
            struct qt_spec spec;
            struct qt_err err = {0};
            for (size_t e = 0; e < N * K; e++)
                w[e] = 1e-9f * ((float)rand() / (float)RAND_MAX - 0.5f);
            const struct qt_matrix source = {w, QT_F32, N, K, "test", preset->name};
            expect_ok("spec", qt_spec_parse(&spec, preset->name, &err), &err);
            expect_ok("quantize", qt_packed_quantize(&p, &spec, &source, NULL, NULL, &err), &err);
            expect_ok("decode", qt_packed_decode(expected, &p, 0, N, &err), &err);
            for (size_t k = 0; k < p.nsections; k++)
                section[k] = p.section[k].data;
            int rc = qt_gpu_weight(&weight, &p, section, &err);
            if (rc == QT_E_UNSUPPORTED) { /* and the message says so */
                assert_non_null(strstr(err.reason, "no fused kernel for"));
            } else {
                expect_ok(preset->name, rc, &err);
                assert_int_not_equal(weight.scale_exp2, 0);
                float *decoded = decode(&weight);
                assert_memory_equal(decoded, expected, sizeof expected);
                free(decoded);
                seen++;
            }
            qt_packed_free(&p);
        }
    assert_true(seen >= 15);
}

/* ---- verify --------------------------------------------------------------------------------- */

static void test_right(void **state)
{
    struct qt_device_report r;
    struct qt_err err;
    struct fake f;
    (void)state;
    expect_ok("verify", verify(&r, &f, NOTHING, &err), &err);
    assert_int_equal(r.count, TENSORS);
    assert_int_equal(r.faults, 0);
    assert_int_equal(r.missing, 0);
    for (size_t i = 0; i < r.count; i++) {
        const struct qt_device_tensor *t = &r.tensors[i];
        assert_string_equal(t->fault, "");
        assert_string_equal(t->missing, "");
        assert_int_equal(t->runs, 20); /* 5 numbers of tokens; 3 sets and batch-invariant */
        /* FP16 rounding gives about 2.07e-4; one token of 17 outputs varies around it. */
        assert_true(t->error[QTOOL_F16] > 1e-4 && t->error[QTOOL_F16] < 4e-4);
        assert_true(t->error[QTOOL_BF16] > 8e-4 && t->error[QTOOL_BF16] < 32e-4);
        for (size_t j = 0; j < QT_DEVICE_TIMES; j++) {
            assert_true(t->us[j] == 4);
            assert_true(t->cublas_us[j] == 8);
        }
    }
    qt_device_free(&r);
}

/* Products of rounded weights are no fault if the plan says so. */
static void test_rounds(void **state)
{
    struct qt_device_report r;
    struct qt_err err;
    struct fake f;
    (void)state;
    expect_ok("verify", verify(&r, &f, ROUNDS, &err), &err);
    for (size_t i = 0; i < r.count; i++)
        assert_string_equal(r.tensors[i].fault, "");
    assert_int_equal(r.faults, 0);
    qt_device_free(&r);
}

/* Every defect is found in every tensor, with the right message. */
static void test_faults(void **state)
{
    static const struct {
        enum defect wrong;
        const char *says;
    } cases[] = {
        {ONE_VALUE, "1 of "},
        {UNWRITTEN, ": NaN, expected "},
        {FIRST_UNWRITTEN, ": NaN, expected "},
        {NOISY, "relative error "},
        {AFTER_OUTPUT, "wrote outside the output"},
        {BEFORE_OUTPUT, "wrote outside the output"},
        {AFTER_WORKSPACE, "wrote outside the workspace"},
        {COUNTER_NOT_RESET, "did not reset the workspace counters"},
        {NOT_REPEATABLE, "two runs gave different bits"},
        {BATCH, "M=8 random f16 batch-invariant: bits differ from those with M=128"},
        {READS_PAST_X, "token 0, row 0: "},
        {STALE_WORKSPACE, "token 0, row 0: "},
        {CHANGES_WEIGHTS, "the kernel modified section scale"},
        {DEQUANTIZE, "dequantized to FP16: 1 of "},
        {ROUNDS_UNDECLARED, "M=128 random f16: "},
        {DECLARES_ROUNDING, "M=128 random f16: "},
    };
    (void)state;
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        struct qt_device_report r;
        struct qt_err err;
        struct fake f;
        expect_ok("verify", verify(&r, &f, cases[c].wrong, &err), &err);
        assert_true(r.faults >= TENSORS);
        for (size_t i = 0; i < r.count; i++)
            if (!r.tensors[i].faults || !strstr(r.tensors[i].fault, cases[c].says))
                fail_msg("fault %d, %s: \"%s\" does not say \"%s\"", (int)cases[c].wrong,
                         r.tensors[i].name, r.tensors[i].fault, cases[c].says);
        for (size_t i = 0; i < r.count && cases[c].wrong == FIRST_UNWRITTEN; i++)
            assert_true(isnan(r.tensors[i].error[QTOOL_F16])); /* NaN is kept */
        qt_device_free(&r);
    }
}

static void test_refused(void **state)
{
    struct qt_device_report r;
    struct qt_err err;
    struct fake f;
    (void)state;
    expect_ok("verify", verify(&r, &f, REFUSES, &err), &err);
    assert_int_equal(r.missing, 1);
    assert_int_equal(r.faults, 0);
    assert_string_equal(r.tensors[2].missing, "eight bits are too many");
    assert_string_equal(r.tensors[0].missing, "");
    qt_device_free(&r);
}

/* A CUDA error ends the run and names the tensor. */
static void test_fails(void **state)
{
    struct qt_device_report r;
    struct qt_err err;
    struct fake f;
    (void)state;
    expect_error("verify", verify(&r, &f, CUDA_FAILS, &err), QT_E_INTERNAL,
                 "tensor a.weight: GPU: illegal address", &err);
    assert_null(r.tensors);
}

static void test_without_cublas(void **state)
{
    struct qt_device_report r;
    struct qt_err err = {0};
    struct fake f;
    (void)state;
    fake_init(&f, NOTHING);
    f.sim.gpu.has_cublas = false;
    expect_ok("verify",
              qt_verify_device(&r, world.container, &f.sim.gpu, world.cpu, NULL, NULL, &err), &err);
    assert_true(isnan(r.tensors[0].cublas_us[0]));
    assert_true(r.tensors[0].us[0] == 4);
    qt_device_free(&r);
}

/* If GPU memory is too small for cuBLAS weights only, kernels are checked without cuBLAS times. */
static void test_no_room(void **state)
{
    size_t without = 0;
    struct fake f = {.sim = {.fail_alloc = 0}};
    (void)state;
    for (long n = 1; f.sim.fail_alloc == 0; n++) {
        struct qt_device_report r;
        struct qt_err err = {0};
        fake_init(&f, NOTHING);
        f.sim.fail_alloc = n;
        int rc = qt_verify_device(&r, world.container, &f.sim.gpu, world.cpu, NULL, NULL, &err);
        if (rc < 0) {
            expect_error("no room", rc, QT_E_RESOURCE, "out of GPU memory", &err);
            continue;
        }
        assert_int_equal(r.faults, 0);
        for (size_t i = 0; i < r.count; i++)
            if (isnan(r.tensors[i].cublas_us[0]))
                without++;
        qt_device_free(&r);
    }
    assert_true(without > 0);
}

/* The nth allocation, of host or simulated GPU memory, fails: an error without leaks, which the
 * sanitizers would report. */
static void test_no_memory(void **state)
{
    int rc = QT_E_RESOURCE;
    (void)state;
    for (long n = 0; rc != QT_OK; n += 1 + n / 8) {
        struct qt_device_report r;
        struct qt_err err;
        struct fake f;
        qt_mem_fail_after(n);
        rc = verify(&r, &f, NOTHING, &err);
        qt_mem_fail_after(-1);
        if (rc == QT_OK)
            qt_device_free(&r);
        else
            expect_error("no memory", rc, QT_E_RESOURCE, "memory", &err);
    }
}

/* ---- bench ---------------------------------------------------------------------------------- */

static int bench(struct qt_bench_report *out, struct fake *f, const char *const *schemes,
                 size_t nschemes, struct qt_err *err)
{
    static const struct qt_bench_shape shapes[] = {{"small", 40, 100}, {NULL, 1000, 320}};
    static const size_t m[] = {1, 20};
    static struct qt_spec specs[4];
    static struct qt_bench_options opt;
    opt = (struct qt_bench_options){
        .specs = specs, .shapes = shapes, .m = m, .nspecs = nschemes, .nshapes = 2, .nm = 2};
    for (size_t i = 0; i < nschemes; i++)
        expect_ok("spec", qt_spec_parse(&specs[i], schemes[i], err), err);
    return qt_bench(out, &f->sim.gpu, &opt, err);
}

static void test_bench(void **state)
{
    static const char *const schemes[] = {"nf4:g=64", "fp8"};
    struct qt_bench_report r;
    struct qt_err err = {0};
    struct fake f;
    (void)state;
    fake_init(&f, REFUSES);
    expect_ok("bench", bench(&r, &f, schemes, 2, &err), &err);
    assert_int_equal(r.count, 2 * (2 + 2 * 2));
    /* A transfer takes 2 us: a copy of 4 MiB moves as many bytes as a read of 8 MiB. */
    assert_true(fabs(r.read_gbs - 0x1p23 / 2e3) < 1 && fabs(r.copy_gbs - 0x1p23 / 2e3) < 1);
    for (size_t i = 0; i < r.count; i++) {
        const struct qt_bench_row *row = &r.rows[i];
        size_t at = i % 6, n = i < 6 ? 40 : 1000, k = i < 6 ? 100 : 320;
        assert_int_equal(row->shape->n, n);
        assert_int_equal(row->m, at % 2 ? 20 : 1);
        if (at < 2) {
            assert_null(row->spec);
            assert_int_equal(row->bytes, 2 * n * k);
            assert_true(row->us == 8);
        } else if (at < 4) { /* padded 4-bit codes, an FP16 scale per 64 channels, the table */
            size_t strips = qt_ceil_div(n, 16), blocks = qt_ceil_div(k, 64);
            assert_int_equal(row->bytes, strips * blocks * (512 + 32) + 32);
            assert_true(row->us == 4 && row->floor_us == 2 && row->cublas_us == 9);
        } else {
            assert_string_equal(row->why, "eight bits are too many");
        }
    }
    qt_bench_free(&r);
}

/* The nth allocation of GPU memory fails: an error, or all rows, some of them without cuBLAS
 * because its weights were freed or did not fit. */
static void test_bench_no_room(void **state)
{
    static const char *const schemes[] = {"nf4:g=64", "fp8"};
    size_t without = 0, no_cublas = 0;
    struct fake f = {.sim = {.fail_alloc = 0}};
    (void)state;
    for (long n = 1; f.sim.fail_alloc == 0; n++) {
        struct qt_bench_report r;
        struct qt_err err = {0};
        fake_init(&f, NOTHING);
        f.sim.fail_alloc = n;
        int rc = bench(&r, &f, schemes, 2, &err);
        if (rc < 0) {
            expect_error("no room", rc, QT_E_RESOURCE, "out of GPU memory", &err);
            continue;
        }
        assert_true(r.count == 2 * (2 + 2 * 2) || r.count == 2 * (2 + 2 * 2) - 2);
        if (r.count < 2 * (2 + 2 * 2))
            no_cublas++;
        for (size_t i = 0; i < r.count; i++) {
            assert_true(r.rows[i].us == (r.rows[i].spec ? 4 : 8));
            if (isnan(r.rows[i].cublas_us))
                without++;
        }
        qt_bench_free(&r);
    }
    assert_true(without > 0 && no_cublas == 2); /* one per shape */
}

/* Weights that repeat a sample work like quantized ones, and launches rotate over more than 4 times
 * the L2 size. */
static void test_bench_weights(void **state)
{
    static const char *const schemes[] = {"lut3:g=32"};
    struct qt_bench_report r;
    struct qt_err err = {0};
    struct fake f;
    (void)state;
    fake_init(&f, NOTHING);
    f.sim.gpu.has_cublas = false;
    expect_ok("bench", bench(&r, &f, schemes, 1, &err), &err);
    assert_int_equal(r.count, 4);
    assert_true((size_t)(f.sim.high - f.sim.low) + r.rows[3].bytes >= 4 * f.sim.gpu.l2_bytes);
    assert_true(isnan(r.rows[3].cublas_us));
    qt_bench_free(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_descriptors),    cmocka_unit_test(test_right),
        cmocka_unit_test(test_rounds),         cmocka_unit_test(test_faults),
        cmocka_unit_test(test_refused),        cmocka_unit_test(test_fails),
        cmocka_unit_test(test_without_cublas), cmocka_unit_test(test_no_room),
        cmocka_unit_test(test_no_memory),      cmocka_unit_test(test_bench),
        cmocka_unit_test(test_bench_weights),  cmocka_unit_test(test_bench_no_room),
    };
    return cmocka_run_group_tests(tests, open_world, close_world);
}
