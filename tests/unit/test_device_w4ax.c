/*
 * verify --device and bench of w4ax and of KV caches on a simulated GPU, whose kernels are plain C
 * written from qtool_w4ax.h and qtool_kv4.h. Tests inject every defect that a kernel might have;
 * verify must find each.
 */
#include "w4ax_fixture.h"

#include "tests/rotate.h"
#include "verify/gpu/device.h"

#include <math.h>

enum defect {
    NOTHING,
    /* activations */
    ONE_CODE,      /* a wrong code in the last token */
    ONE_SCALE,     /* a wrong scale in the last token */
    PADDING,       /* a nonzero code after channel k */
    ONE_SUM,       /* INT: wrong code sum of the last token */
    BEFORE_CODES,  /* writes before the codes */
    BEFORE_SCALES, /* writes before the scales */
    CODES_VARY,    /* every other run differs */
    /* products, attention */
    ONE_VALUE,
    UNWRITTEN,
    INEXACT, /* relative error 3e-6: only FP32 output shows it */
    AFTER_OUTPUT,
    AFTER_WORKSPACE,
    COUNTER_NOT_RESET,
    NOT_REPEATABLE,
    CHANGES_WEIGHTS,
    /* caches */
    ONE_KEY,
    ONE_PARAMETER,
    OTHER_ROW,   /* writes to a row to which no token was appended */
    AFTER_CACHE, /* writes after the value parameters */
    NOISY,       /* outputs with too large an error */
    NO_LAST,     /* attention skips the last token of long sequences */
    /* both */
    REFUSES,
    CUDA_FAILS,
};

enum { WORKSPACE = 1024 }; /* less than QTOOL_WORKSPACE_ZEROED: counters only */

struct fake {
    struct sim_gpu sim;
    enum defect wrong;
    unsigned runs;
    bool dependent; /* expected dependent_launch */
};

static struct fake *self(struct qt_gpu *gpu)
{
    return gpu->ctx;
}

/* ---- activations ---------------------------------------------------------------------------- */

static void spoil_activations(struct fake *f, const struct qtool_w4ax_acts *out,
                              const struct qtool_w4ax_input *in, size_t m)
{
    size_t last = qt_ceil_div(in->k, 128) - 1;
    uint32_t word = in->blocks[last];
    switch (f->wrong) {
    case ONE_CODE:
        put_code(out, word, m, m - 1, 0, get_code(out, word, m, m - 1, 0) ? 0 : 1);
        break;
    case ONE_SCALE:
        out->scale[m - 1] *= 1 + 0x1p-20f;
        break;
    case PADDING:
        put_code(out, word, m, m - 1, 127, 1);
        break;
    case ONE_SUM:
        if (in->scales == QTOOL_W4AX_INT)
            out->sum[m - 1]++;
        break;
    case BEFORE_CODES:
        ((uint8_t *)out->codes)[-1] = 0;
        break;
    case BEFORE_SCALES:
        out->scale[-1] = 0;
        break;
    case CODES_VARY:
        if (f->runs++ % 2)
            put_code(out, word, m, 0, 0, get_code(out, word, m, 0, 0) ? 0 : 1);
        break;
    default:
        break;
    }
}

static int fake_quantize(struct qt_gpu *gpu, const struct qtool_w4ax_acts *out,
                         const struct qtool_w4ax_input *in, const void *x, size_t m,
                         enum qtool_dtype dtype, struct qt_err *err)
{
    struct fake *f = self(gpu);
    size_t blocks = qt_ceil_div(in->k, 128);
    float *v = calloc(blocks * 128, sizeof *v);
    assert_non_null(v);
    f->sim.quantizes = true;
    assert_int_equal(in->dependent_launch, f->dependent);
    if (in->k % 8) {
        free(v);
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "activations: no multiple of 8");
    }
    for (size_t t = 0; t < m && !f->sim.timing; t++) {
        for (size_t p = 0; p < in->k; p++)
            v[p] = from_bits(((const uint16_t *)x)[t * in->k + in->perm[p]], dtype);
        if (in->rotation)
            rotate_reference(v, in->k);
        quantize_token(out, in, v, m, t);
    }
    if (!f->sim.timing)
        spoil_activations(f, out, in, m);
    free(v);
    return QT_OK;
}

/* ---- products ------------------------------------------------------------------------------- */

static int fake_plan(struct qt_gpu *gpu, struct qtool_w4ax_plan *out,
                     const struct qtool_w4ax_weight *w, size_t m,
                     const struct qtool_w4ax_options *opt, struct qt_err *err)
{
    *out = (struct qtool_w4ax_plan){.m = m,
                                    .n = w->n,
                                    .k = w->k,
                                    .scales = w->scales,
                                    .workspace_bytes = WORKSPACE,
                                    .options = *opt,
                                    .config = {.kernel = QTOOL_W4AX_STREAM}};
    assert_non_null(w->blocks);
    assert_true(w->scales == QTOOL_W4AX_ROW || w->scale);
    assert_true(w->scales == QTOOL_W4AX_BLOCK || w->row_scale);
    assert_true(!opt->packed || w->scales == QTOOL_W4AX_BLOCK);
    assert_int_equal(opt->dependent_launch, self(gpu)->dependent);
    if (self(gpu)->wrong == REFUSES)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "not today");
    return QT_OK;
}

/* Defects of 16-bit and FP32 outputs alike. */
static void spoil_output(struct fake *f, unsigned char *y, size_t bytes, unsigned char *workspace)
{
    switch (f->wrong) {
    case ONE_VALUE:
        y[bytes - 1] ^= 0x80;
        break;
    case UNWRITTEN:
        memset(y + bytes / 8 * 4, 0xff, 4);
        break;
    case AFTER_OUTPUT:
        y[bytes] = 0;
        break;
    case AFTER_WORKSPACE:
        workspace[WORKSPACE] = 0;
        break;
    case COUNTER_NOT_RESET:
        workspace[100] = 1;
        break;
    case NOT_REPEATABLE:
        y[0] ^= f->runs & 1;
        break;
    default:
        break;
    }
    f->runs++;
}

static int fake_run(struct qt_gpu *gpu, const struct qtool_w4ax_plan *plan,
                    const struct qtool_w4ax_weight *w, const struct qtool_w4ax_acts *acts, void *y,
                    void *workspace, struct qt_err *err)
{
    struct fake *f = self(gpu);
    if (f->wrong == CUDA_FAILS)
        return qt_fail(err, QT_E_INTERNAL, NULL, NULL, "GPU: illegal address");
    if (f->sim.timing) {
        sim_gpu_reads(&f->sim, w->plane);
        if (f->wrong == CHANGES_WEIGHTS) /* while timing, because earlier checks would fail too */
            memcpy((void *)(uintptr_t)w->plane, "changed", 7);
        return QT_OK;
    }
    size_t width = qt_ceil_div(w->k, 128) * 128;
    int8_t *x = all_codes(w, acts, plan->m), *codes = all_codes(w, NULL, 0);
    for (size_t t = 0; t < plan->m; t++)
        for (size_t row = 0; row < plan->n; row++)
            put_output(y, t * plan->n + row,
                       w4ax_product(w, acts, plan->m, t, row, x + t * width, codes + row * width) *
                           (f->wrong == INEXACT ? 1 + 3e-6 : 1),
                       plan->options.output);
    free(x);
    free(codes);
    spoil_output(f, y, plan->m * plan->n * (plan->options.output == QTOOL_W4AX_F32 ? 4 : 2),
                 workspace);
    return QT_OK;
}

/* ---- caches --------------------------------------------------------------------------------- */

static size_t place(const struct qtool_kv_cache *c, size_t sequence, size_t token, size_t head)
{
    size_t page = sequence;
    if (c->table)
        page = (size_t)c->table[sequence * c->table_pitch + token / c->page_tokens];
    return (page * c->heads + head) * c->page_tokens + token % c->page_tokens;
}

static void put_nibble(void *codes, size_t i, float q)
{
    uint8_t *at = (uint8_t *)codes + i / 2;
    unsigned code = (unsigned)fminf(fmaxf(rintf(q), 0), 15);
    *at = (uint8_t)(i % 2 ? (*at & 15) | code << 4 : (*at & 0xf0) | code);
}

/* Of eight key codes, channel 2 i + h is code i + 4 h. */
static size_t key_code(size_t i)
{
    return i / 8 * 8 + i % 8 / 2 + i % 2 * 4;
}

/* Byte i of a group of value channels is followed by byte i of the next group. */
static size_t value_code(const struct qtool_kv_cache *c, size_t at, size_t d)
{
    const size_t groups = c->head_dim / QTOOL_KV_CHANNELS;
    const size_t byte = d % QTOOL_KV_CHANNELS / 2 * groups + d / QTOOL_KV_CHANNELS;
    return at * c->head_dim + byte * 2 + d % 2;
}

/* The parameters of the tokens t and t + 4 of eight are adjacent. */
static uint16_t *value_param(const struct qtool_kv_cache *c, size_t at, size_t d)
{
    const size_t groups = c->head_dim / QTOOL_KV_CHANNELS;
    const size_t eight = (at / 8 * 4 + at % 4) * groups + d / QTOOL_KV_CHANNELS;
    return (uint16_t *)c->v_param + eight * 2 + at / 4 % 2;
}

static void append_value(const struct qtool_kv_cache *c, const uint16_t *v, size_t at,
                         enum qtool_dtype dtype)
{
    for (size_t first = 0; first < c->head_dim; first += QTOOL_KV_CHANNELS) {
        float low = 0, high = 0;
        for (size_t d = first; d < first + QTOOL_KV_CHANNELS; d++) {
            low = fminf(low, from_bits(v[d], dtype));
            high = fmaxf(high, from_bits(v[d], dtype));
        }
        *value_param(c, at, first) = qt_kv4_value_param(low, high);
        const struct qt_kv4_grid grid = qt_kv4_value_grid(*value_param(c, at, first));
        for (size_t d = first; d < first + QTOOL_KV_CHANNELS; d++)
            put_nibble(c->v, value_code(c, at, d),
                       from_bits(v[d], dtype) * (1 / grid.scale) + grid.zero);
    }
}

/* Quantizes one channel of the tokens [from, token] again, from the tail. */
static void quantize_keys(const struct qtool_kv_cache *c, size_t sequence, size_t from,
                          size_t token, size_t head, size_t d)
{
    const uint16_t *tail =
        (const uint16_t *)c->k_tail + (sequence * c->heads + head) * QTOOL_KV_GROUP * c->head_dim;
    uint16_t *param =
        (uint16_t *)c->k_param + place(c, sequence, token, head) / QTOOL_KV_GROUP * c->head_dim + d;
    float low = INFINITY, high = -INFINITY;
    for (size_t i = from; i <= token; i++) {
        float x = qt_f16_to_f32(tail[i % QTOOL_KV_GROUP * c->head_dim + d]);
        low = fminf(low, x);
        high = fmaxf(high, x);
    }
    *param = qt_kv4_key_param(low, high);
    const struct qt_kv4_grid grid = qt_kv4_key_grid(*param);
    for (size_t i = from; i <= token; i++) {
        float x = qt_f16_to_f32(tail[i % QTOOL_KV_GROUP * c->head_dim + d]);
        put_nibble(c->k, place(c, sequence, i, head) * c->head_dim + key_code(d),
                   x * (1 / grid.scale) + grid.zero);
    }
}

static void append_key(const struct qtool_kv_cache *c, const uint16_t *k, size_t sequence,
                       size_t token, size_t head, enum qtool_dtype dtype)
{
    const size_t h = sequence * c->heads + head;
    uint16_t *tail =
        (uint16_t *)c->k_tail + (h * QTOOL_KV_GROUP + token % QTOOL_KV_GROUP) * c->head_dim;
    for (size_t d = 0; d < c->head_dim; d++) {
        tail[d] = qt_f32_to_f16(from_bits(k[d], dtype));
        if (token == 0)
            ((uint16_t *)c->k_first)[h * c->head_dim + d] = tail[d];
        else
            quantize_keys(c, sequence, token < QTOOL_KV_GROUP ? 1 : token - token % QTOOL_KV_GROUP,
                          token, head, d);
    }
}

static int fake_append(struct qt_gpu *gpu, const struct qtool_kv_cache *c, const void *k,
                       const void *v, const int *sequence, const int *position, size_t tokens,
                       enum qtool_dtype dtype, bool dependent, struct qt_err *err)
{
    struct fake *f = self(gpu);
    size_t at = 0, rows = 4 * 704 * c->heads;
    (void)dependent, (void)err;
    for (size_t t = 0; t < tokens; t++)
        for (size_t h = 0; h < c->heads; h++) {
            size_t from = (t * c->heads + h) * c->head_dim;
            at = place(c, (size_t)sequence[t], (size_t)position[t], h);
            append_value(c, (const uint16_t *)v + from, at, dtype);
            append_key(c, (const uint16_t *)k + from, (size_t)sequence[t], (size_t)position[t], h,
                       dtype);
        }
    if (f->wrong == ONE_KEY)
        ((uint8_t *)c->k)[at * c->head_dim / 2] ^= 0x10;
    if (f->wrong == ONE_PARAMETER)
        *value_param(c, at, 0) ^= 1;
    if (f->wrong == OTHER_ROW)
        ((uint8_t *)c->v)[(place(c, 3, 1, 0)) * c->head_dim / 2] = 0;
    if (f->wrong == AFTER_CACHE)
        *value_param(c, rows, 0) = 0;
    return QT_OK;
}

static int fake_kv_plan(struct qt_gpu *gpu, struct qtool_kv_plan *out,
                        const struct qtool_kv_cache *c, const struct qtool_kv_options *opt,
                        size_t split_tokens, struct qt_err *err)
{
    (void)gpu;
    assert_int_equal(split_tokens, 0);
    *out =
        (struct qtool_kv_plan){.options = *opt, .split_tokens = 128, .workspace_bytes = WORKSPACE};
    if (c->head_dim != 64 && c->head_dim != 128)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "head_dim is not 64 or 128");
    return QT_OK;
}

static float cached_key(const struct qtool_kv_cache *c, size_t sequence, size_t token, size_t head,
                        size_t d)
{
    const size_t at = place(c, sequence, token, head), i = at * c->head_dim + key_code(d);
    const uint16_t *param = (const uint16_t *)c->k_param + at / QTOOL_KV_GROUP * c->head_dim + d;
    const struct qt_kv4_grid grid = qt_kv4_key_grid(*param);
    if (token == 0)
        return qt_f16_to_f32(
            ((const uint16_t *)c->k_first)[(sequence * c->heads + head) * c->head_dim + d]);
    return ((float)(((const uint8_t *)c->k)[i / 2] >> i % 2 * 4 & 15) - grid.zero) * grid.scale;
}

static float cached_value(const struct qtool_kv_cache *c, size_t at, size_t d)
{
    const size_t i = value_code(c, at, d);
    const struct qt_kv4_grid grid = qt_kv4_value_grid(*value_param(c, at, d));
    return ((float)(((const uint8_t *)c->v)[i / 2] >> i % 2 * 4 & 15) - grid.zero) * grid.scale;
}

static void attend(uint16_t *y, const struct qtool_kv_cache *c, const uint16_t *q, size_t sequence,
                   size_t length, size_t head, const struct qtool_kv_options *o, double factor)
{
    double *p = calloc(length, sizeof *p), most = -INFINITY, sum = 0;
    assert_non_null(p);
    for (size_t i = 0; i < length; i++) {
        for (size_t d = 0; d < c->head_dim; d++)
            p[i] += (double)o->scale * (double)from_bits(q[d], o->dtype) *
                    (double)cached_key(c, sequence, i, head, d);
        most = fmax(most, p[i]);
    }
    for (size_t i = 0; i < length; i++)
        sum += p[i] = exp(p[i] - most);
    for (size_t d = 0; d < c->head_dim; d++) {
        double v = 0;
        for (size_t i = 0; i < length; i++)
            v += p[i] * (double)cached_value(c, place(c, sequence, i, head), d);
        y[d] = to_bits((float)(v / sum * factor), o->dtype);
    }
    free(p);
}

static int fake_kv_run(struct qt_gpu *gpu, const struct qtool_kv_plan *plan,
                       const struct qtool_kv_cache *c, void *out, const void *q, const int *length,
                       void *workspace, struct qt_err *err)
{
    const struct qtool_kv_options *o = &plan->options;
    struct fake *f = self(gpu);
    if (f->wrong == CUDA_FAILS)
        return qt_fail(err, QT_E_INTERNAL, NULL, NULL, "GPU: illegal address");
    if (f->sim.timing) {
        sim_gpu_reads(&f->sim, c->k);
        return QT_OK;
    }
    /* FP16 caches are not checked: bench only times them */
    for (size_t b = 0; b < o->batch && c->format == QTOOL_KV_INT4; b++)
        for (size_t h = 0; h < o->heads; h++) {
            size_t at = (b * o->heads + h) * c->head_dim;
            assert_true((size_t)length[b] <= o->max_length);
            const bool short_of_one = f->wrong == NO_LAST && length[b] > 600;
            attend((uint16_t *)out + at, c, (const uint16_t *)q + at, b,
                   (size_t)length[b] - short_of_one, h / (o->heads / c->heads), o,
                   f->wrong == NOISY ? 1.004 : 1);
        }
    spoil_output(f, out, o->batch * o->heads * c->head_dim * 2, workspace);
    return QT_OK;
}

static void fake_init(struct fake *f, enum defect wrong)
{
    *f = (struct fake){.wrong = wrong};
    sim_gpu_init(&f->sim);
    f->sim.gpu.w4ax_blocks = fake_blocks;
    f->sim.gpu.w4ax_quantize = fake_quantize;
    f->sim.gpu.w4ax_plan = fake_plan;
    f->sim.gpu.w4ax_run = fake_run;
    f->sim.gpu.kv_append = fake_append;
    f->sim.gpu.kv_plan = fake_kv_plan;
    f->sim.gpu.kv_run = fake_kv_run;
}

/* ---- a tensor ------------------------------------------------------------------------------- */

enum { N = 35, K = 264 };
static const char *const schemes[] = {"w4ax:method=rtn", "w4ax:scales=int,method=rtn",
                                      "w4ax:scales=row,method=rtn", "w4ax:method=rtn,rotate=none"};
enum { SCHEMES = 3, VARIANTS }; /* all scales; with the variant that is not rotated */

static struct qt_backend *cpu;

/* Packs weights with a random column order and random powers of two on rows and columns. */
static void make_packed(struct qt_packed *out, const char *scheme, size_t k)
{
    static float w[N * K], row_factor[N];
    static uint32_t row_order[N];
    struct qt_err err = {0};
    struct qt_spec spec;
    struct qt_act act;
    expect_ok("spec", qt_spec_parse(&spec, scheme, &err), &err);
    expect_ok("act", qt_act_new(&act, k, 8, &err), &err);
    for (size_t i = 0; i < k; i++) {
        size_t j = (size_t)rand() % (i + 1);
        act.order[i] = act.order[j];
        act.order[j] = (uint32_t)i;
        act.factor[i] = ldexpf(1, -(rand() % 4));
    }
    for (size_t i = 0; i < N; i++) {
        size_t j = (size_t)rand() % (i + 1);
        row_order[i] = row_order[j];
        row_order[j] = (uint32_t)i;
        row_factor[i] = ldexpf(1, -(rand() % 3));
    }
    act.scales = (enum qt_act_scales)gpu_w4ax_scales_of(&spec);
    act.clip = 0.9f;
    for (size_t i = 0; act.scales != QT_ACT_SCALES_ROW && i < qt_ceil_div(k, 128); i += 2)
        act.bits[i] = 4;
    const struct qt_arrange arrange = {&act, row_order, row_factor};
    spec.arrange = &arrange;
    for (size_t i = 0; i < N * k; i++)
        w[i] = 0.02f * ((float)rand() / (float)RAND_MAX - 0.5f);
    const struct qt_matrix source = {w, QT_F32, N, k, "test", "t"};
    expect_ok("quantize", qt_packed_quantize(out, &spec, &source, NULL, NULL, &err), &err);
    qt_act_free(&act);
}

static int check(struct qt_device_tensor *t, struct fake *f, const char *scheme, size_t k,
                 struct qt_err *err)
{
    struct device d = {.gpu = &f->sim.gpu, .cpu = cpu};
    struct qt_packed p;
    *t = (struct qt_device_tensor){.name = "t"};
    *err = (struct qt_err){0};
    make_packed(&p, scheme, k);
    assert_true(gpu_is_w4ax(&p));
    int rc = device_w4ax(t, &d, &p, 7, err);
    device_close(&d);
    qt_packed_free(&p);
    return rc;
}

static void test_right(void **state)
{
    static const size_t ks[] = {K, 128, 8};
    (void)state;
    for (size_t s = 0; s < VARIANTS; s++)
        for (size_t i = 0; i < sizeof ks / sizeof *ks; i++) {
            struct qt_device_tensor t;
            struct qt_err err;
            struct fake f;
            fake_init(&f, NOTHING);
            expect_ok(schemes[s], check(&t, &f, schemes[s], ks[i], &err), &err);
            assert_string_equal(t.fault, "");
            /* 3 sets x 5 numbers of tokens x 16-bit and FP32 output; BLOCK also packed */
            assert_int_equal(t.runs, s % SCHEMES == 0 ? 45 : 30);
            assert_true(t.error[QTOOL_F16] > 5e-5 && t.error[QTOOL_F16] < 5e-4);
            assert_true(t.error[QTOOL_BF16] > 5e-4 && t.error[QTOOL_BF16] < 4e-3);
            for (size_t j = 0; j < QT_DEVICE_TIMES; j++)
                assert_true(t.us[j] == 4 && t.cublas_us[j] == 8);
        }
}

static void test_faults(void **state)
{
    enum { ANY = -1 };
    static const struct {
        enum defect wrong;
        const char *says;
        int scheme; /* index of `schemes`, or ANY */
    } cases[] = {
        {ONE_CODE, " activations wrong; first at token ", ANY},
        {ONE_SCALE, " activations wrong; first at token ", ANY},
        {PADDING, "1 of 33792 activations wrong; first at token 127, channel ", 0},
        {ONE_SUM, ": 1 of 128 code sums wrong; first at token 127", 1},
        {BEFORE_CODES, "wrote outside the codes", ANY},
        {BEFORE_SCALES, "wrote outside the scales", ANY},
        {CODES_VARY, "quantizing the activations twice gave different bits", ANY},
        {ONE_VALUE, "M=128 random f16: 1 of 4480 values wrong; first at token 127, row 34: ", ANY},
        {UNWRITTEN, ": NaN, expected ", ANY},
        {INEXACT, "values wrong; first at token ", ANY},
        {AFTER_OUTPUT, "wrote outside the output", ANY},
        {AFTER_WORKSPACE, "wrote outside the workspace", ANY},
        {COUNTER_NOT_RESET, "did not reset the workspace counters", ANY},
        {NOT_REPEATABLE, "two runs gave different bits", ANY},
        {CHANGES_WEIGHTS, "the kernel modified section plane0", ANY},
    };
    (void)state;
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const char *scheme = schemes[cases[c].scheme == ANY ? (int)c % SCHEMES : cases[c].scheme];
        struct qt_device_tensor t;
        struct qt_err err;
        struct fake f;
        fake_init(&f, cases[c].wrong);
        expect_ok("check", check(&t, &f, scheme, K, &err), &err);
        if (!t.faults || !strstr(t.fault, cases[c].says))
            fail_msg("fault %d, %s: \"%s\" does not say \"%s\"", (int)cases[c].wrong, scheme,
                     t.fault, cases[c].says);
    }
}

static void test_refused(void **state)
{
    struct qt_device_tensor t;
    struct qt_err err;
    struct fake f;
    (void)state;
    fake_init(&f, REFUSES);
    expect_error("refused", check(&t, &f, schemes[0], K, &err), QT_E_UNSUPPORTED, "not today",
                 &err);
    fake_init(&f, NOTHING);
    expect_error("ragged", check(&t, &f, schemes[0], 100, &err), QT_E_UNSUPPORTED,
                 "no multiple of 8", &err);
    fake_init(&f, CUDA_FAILS);
    expect_error("CUDA", check(&t, &f, schemes[0], K, &err), QT_E_INTERNAL, "illegal address",
                 &err);
}

/* ---- caches --------------------------------------------------------------------------------- */

enum { KV_HEADS = 2, GROUP = 2, DIM = 64, LAYERS = 2 };

static int check_cache(struct qt_device_tensor *t, struct fake *f, size_t dim, struct qt_err *err)
{
    const struct qt_model_info model = {
        .layers = LAYERS, .heads = KV_HEADS * GROUP, .kv_heads = KV_HEADS, .head_dim = dim};
    struct device d = {.gpu = &f->sim.gpu, .cpu = cpu};
    *t = (struct qt_device_tensor){.name = "cache"};
    *err = (struct qt_err){0};
    int rc = device_cache(t, &d, QT_KV_KEYS_CHANNEL, &model, err);
    device_close(&d);
    return rc;
}

static void test_cache(void **state)
{
    static const struct {
        enum defect wrong;
        const char *says;
    } cases[] = {
        {NOTHING, ""},
        {ONE_KEY, "paged f16: 1 of 220928 appended values wrong"},
        {ONE_PARAMETER, "appended values wrong"},
        {OTHER_ROW, "append wrote to 1 other rows of the cache"},
        {AFTER_CACHE, "wrote outside the cache"},
        {NOISY, "relative error 0.004"},
        {NO_LAST, "attention has relative error"},
        {UNWRITTEN, "attention has relative error NaN"},
        {AFTER_OUTPUT, "wrote outside the output"},
        {AFTER_WORKSPACE, "wrote outside the workspace"},
        {COUNTER_NOT_RESET, "did not reset the workspace counters"},
        {NOT_REPEATABLE, "two runs gave different bits"},
    };
    struct qt_device_tensor t;
    struct qt_err err;
    struct fake f;
    (void)state;
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        fake_init(&f, cases[c].wrong);
        expect_ok("cache", check_cache(&t, &f, DIM, &err), &err);
        if ((t.faults > 0) != (c > 0) || !strstr(t.fault, cases[c].says))
            fail_msg("fault %d: \"%s\" does not say \"%s\"", (int)cases[c].wrong, t.fault,
                     cases[c].says);
        assert_int_equal(t.runs, 2);
        if (c == 0)
            assert_true(t.error[QTOOL_F16] > 5e-5 && t.error[QTOOL_F16] < 5e-4 &&
                        t.error[QTOOL_BF16] > 5e-4 && t.error[QTOOL_BF16] < 3e-3);
    }
    fake_init(&f, NOTHING);
    expect_error("dim", check_cache(&t, &f, 32, &err), QT_E_UNSUPPORTED, "head_dim", &err);
    fake_init(&f, CUDA_FAILS);
    expect_error("CUDA", check_cache(&t, &f, DIM, &err), QT_E_INTERNAL, "illegal address", &err);
}

/* ---- a container ---------------------------------------------------------------------------- */

/* Quantizes a model to w4ax with a KV cache. */
static struct qt_container *quantized(const char *source, const char *out_dir)
{
    static uint32_t ids[96];
    struct qt_calibration data = {.ids = ids, .samples = 4, .seqlen = 24, .backend = cpu};
    struct qt_quantize_report made;
    struct qt_container *container;
    struct qt_ckpt *ckpt;
    struct qt_err err = {0};
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++)
        ids[i] = (uint32_t)rand() % 97;
    struct qt_quantize_options opt = {
        .plan = {.scheme = "w4ax", .calibrated = true, .kv = QT_KV_KEYS_CHANNEL},
        .calibration = &data,
        .out_dir = out_dir};
    expect_ok(source, qt_ckpt_open(&ckpt, source, &err), &err);
    expect_ok("quantize", qt_quantize(&made, ckpt, &opt, &err), &err);
    json_decref(made.document);
    qt_ckpt_close(ckpt);
    expect_ok("open", qt_container_open(&container, out_dir, &err), &err);
    return container;
}

/* The report of a whole model has rows of tensors, then one for its cache. */
static void test_container(void **state)
{
    struct qt_device_report r;
    struct qt_err err = {0};
    struct fake f;
    char *dir = fixture_dir();
    const char *out = fixture_path(dir, "out");
    (void)state;
    struct qt_container *container = quantized("tests/golden/models/llama", out);
    size_t tensors = qt_container_count(container);
    fake_init(&f, NOTHING);
    expect_ok("verify", qt_verify_device(&r, container, &f.sim.gpu, cpu, NULL, NULL, &err), &err);
    assert_int_equal(r.count, tensors + 1);
    assert_int_equal(r.faults, 0);
    assert_int_equal(r.missing, 1); /* head_dim is 8 */
    assert_string_equal(r.tensors[tensors].name, "KV cache");
    assert_string_equal(r.tensors[tensors].missing, "head_dim is not 64 or 128");
    for (size_t i = 0; i < tensors; i++)
        assert_int_equal(r.tensors[i].runs, 45);
    qt_device_free(&r);
    fake_init(&f, ONE_CODE);
    expect_ok("verify", qt_verify_device(&r, container, &f.sim.gpu, cpu, NULL, NULL, &err), &err);
    assert_true(r.faults >= tensors);
    qt_device_free(&r);
    for (long n = 0, rc = QT_E_RESOURCE; rc != QT_OK; n += 1 + n / 2) {
        fake_init(&f, NOTHING);
        qt_mem_fail_after(n);
        rc = qt_verify_device(&r, container, &f.sim.gpu, cpu, NULL, NULL, &err);
        qt_mem_fail_after(-1);
        if (rc == QT_OK)
            qt_device_free(&r);
        else
            expect_error("no memory", (int)rc, QT_E_RESOURCE, "memory", &err);
    }
    qt_container_close(container);
    assert_int_equal(qt_dir_remove(out, NULL), QT_OK);
    fixture_remove(dir);
}

/* A model with a supported head_dim. */
static void test_container_cache(void **state)
{
    struct qt_device_report r;
    struct qt_err err = {0};
    struct fake f;
    char *dir = fixture_dir();
    const char *out = fixture_path(dir, "out");
    (void)state;
    struct qt_container *container = quantized("examples/nano-llama", out);
    size_t tensors = qt_container_count(container);
    fake_init(&f, NOTHING);
    expect_ok("verify", qt_verify_device(&r, container, &f.sim.gpu, cpu, NULL, NULL, &err), &err);
    assert_int_equal(r.count, tensors + 1);
    assert_int_equal(r.faults, 0);
    assert_int_equal(r.missing, 0);
    for (size_t i = tensors; i < r.count; i++)
        assert_int_equal(r.tensors[i].runs, 2);
    qt_device_free(&r);
    qt_container_close(container);
    assert_int_equal(qt_dir_remove(out, NULL), QT_OK);
    fixture_remove(dir);
}

/* ---- bench ---------------------------------------------------------------------------------- */

static void bench(struct qt_bench_report *out, struct fake *f, struct qt_bench_options *opt)
{
    static const struct qt_bench_shape shapes[] = {{"small", 40, 104}, {NULL, 1000, 320}};
    static const size_t m[] = {1, 20};
    static struct qt_spec specs[SCHEMES];
    struct qt_err err = {0};
    for (size_t i = 0; i < SCHEMES; i++)
        expect_ok("spec", qt_spec_parse(&specs[i], schemes[i], &err), &err);
    opt->specs = specs;
    opt->shapes = shapes;
    opt->m = m;
    opt->nspecs = SCHEMES;
    opt->nshapes = opt->nm = 2;
    expect_ok("bench", qt_bench(out, &f->sim.gpu, opt, &err), &err);
}

static void test_bench(void **state)
{
    struct qt_bench_options opt = {.matmul = {.dtype = QTOOL_F16}};
    struct qt_bench_report r;
    struct fake f;
    (void)state;
    fake_init(&f, NOTHING);
    bench(&r, &f, &opt);
    assert_int_equal(r.count, 2 * 2 * (1 + SCHEMES));
    for (size_t i = 0; i < r.count; i++) {
        const struct qt_bench_row *row = &r.rows[i];
        size_t at = i % 8, strips = i < 8 ? 3 : 63, blocks = i < 8 ? 1 : 3;
        size_t fragments = i < 8 ? 2 : 5, scales[] = {32 * blocks, 16 * blocks + 32, 32};
        assert_string_equal(row->why, "");
        if (at < 2) {
            assert_true(isnan(row->total_us));
            continue;
        }
        assert_true(row->us == 4 && row->total_us == 5 && row->floor_us == 2 &&
                    row->cublas_us == 10);
        assert_int_equal(row->bytes, strips * (fragments * 512 + scales[at / 2 - 1]));
    }
    qt_bench_free(&r);
    opt.matmul.dependent_launch = f.dependent = true;
    bench(&r, &f, &opt);
    assert_string_equal(r.rows[2].why, "");
    qt_bench_free(&r);
    opt.matmul.batch_invariant = 1;
    bench(&r, &f, &opt);
    assert_string_equal(r.rows[2].why, "w4ax has no batch-invariant kernels");
    qt_bench_free(&r);
    opt.matmul.batch_invariant = 0;
    opt.matmul.compute = 80;
    bench(&r, &f, &opt);
    assert_string_equal(r.rows[2].why,
                        "w4ax kernels cannot be chosen for another compute capability");
    qt_bench_free(&r);
}

static void test_bench_caches(void **state)
{
    static const struct qt_bench_cache caches[] = {
        {"a", 8, 2, 128}, {NULL, 4, 4, 64}, {NULL, 4, 4, 8}};
    static const size_t m[] = {1, 3}, lengths[] = {5, 200};
    struct qt_bench_options opt = {
        .caches = caches, .m = m, .lengths = lengths, .ncaches = 3, .nm = 2, .nlengths = 2};
    struct qt_bench_report r;
    struct qt_err err = {0};
    struct fake f;
    (void)state;
    fake_init(&f, NOTHING);
    expect_ok("bench", qt_bench(&r, &f.sim.gpu, &opt, &err), &err);
    assert_int_equal(r.count, 0);
    assert_int_equal(r.ncaches, 3 * 2 * 2 * 3);
    for (size_t i = 0; i < r.ncaches; i++) {
        const struct qt_bench_cache_row *row = &r.caches[i];
        const struct qt_bench_cache *shape = &caches[i / 12];
        size_t length = lengths[i / 3 % 2], batch = m[i / 6 % 2];
        bool f16 = i % 3 == 0;
        assert_true(row->shape == shape && row->length == length && row->batch == batch);
        assert_true((row->format == QTOOL_KV_F16) == f16 && row->paged == (i % 3 == 2));
        if (i / 12 == 2) {
            assert_string_equal(row->why, "head_dim is not 64 or 128");
            continue;
        }
        size_t groups = (length + QTOOL_KV_GROUP - 1) / QTOOL_KV_GROUP;
        assert_int_equal(row->bytes, batch * shape->kv_heads *
                                         (f16 ? length * 4 * shape->head_dim
                                              : length * shape->head_dim * 9 / 8 +
                                                    groups * 2 * shape->head_dim));
        assert_true(row->us == 4 && row->floor_us == 2);
        assert_true(f16 ? isnan(row->f16_us) : row->f16_us == 4);
    }
    qt_bench_free(&r);
    opt.matmul.compute = 80;
    expect_ok("bench", qt_bench(&r, &f.sim.gpu, &opt, &err), &err);
    assert_string_equal(r.caches[0].why,
                        "attention kernels cannot be chosen for another compute capability");
    qt_bench_free(&r);
    opt.matmul.compute = 0;
    opt.matmul.batch_invariant = true;
    expect_ok("bench", qt_bench(&r, &f.sim.gpu, &opt, &err), &err);
    assert_string_equal(r.caches[0].why, "attention has no batch-invariant kernels");
    qt_bench_free(&r);
}

static int open_cpu(void **state)
{
    (void)state;
    srand(1);
    return qt_backend_cpu_open(&cpu, NULL);
}

static int close_cpu(void **state)
{
    (void)state;
    cpu->close(cpu);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_right),     cmocka_unit_test(test_faults),
        cmocka_unit_test(test_refused),   cmocka_unit_test(test_cache),
        cmocka_unit_test(test_container), cmocka_unit_test(test_container_cache),
        cmocka_unit_test(test_bench),     cmocka_unit_test(test_bench_caches),
    };
    return cmocka_run_group_tests(tests, open_cpu, close_cpu);
}
