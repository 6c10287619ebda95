/*
 * The fused runtime on a simulated GPU, whose kernels are the plain C of decoder_reference.h. The
 * logits of every golden model after a prompt and after each step must be those of struct
 * qt_decoder.
 */
#include "gpu_fixture.h"
#include "packed_fixture.h"
#include "w4ax_fixture.h"

#include "tests/decoder_reference.h"
#include "tests/rotate.h"
#include "tests/runtime_cases.h"
#include "verify/runtime/runtime.h"

#include <dirent.h>

#define GOLDEN "tests/golden/models"

/* ---- simulated GPU -------------------------------------------------------------------------- */

struct qt_gpu_graph {
    int (*fn)(void *ctx, struct qt_err *err);
    void *ctx;
};

struct fake {
    struct sim_gpu sim;
    bool capturing; /* nothing is computed */
    size_t products, gated, grouped, replays;
};

/* Tables of experts, freed at the end. */
static void *tables[256];
static size_t ntables;

static bool idle(const struct qt_gpu *gpu)
{
    return ((const struct fake *)gpu->ctx)->capturing;
}

static int fake_decode(struct qt_gpu *gpu, const struct qtool_decoder_op *op, bool dependent,
                       struct qt_err *err)
{
    const struct qtool_decoder_add_norm *a = &op->add_norm;
    const struct qtool_decoder_activation *act = &op->activation;
    (void)dependent;
    if (!idle(gpu))
        ref_decode(op);
    if (op->kind == QTOOL_DECODER_ADD_NORM && a->w4ax)
        return gpu->w4ax_quantize(gpu, &a->acts, a->w4ax, a->out, a->m, QTOOL_F16, err);
    if (op->kind == QTOOL_DECODER_ACTIVATION && act->w4ax)
        return gpu->w4ax_quantize(gpu, &act->acts, act->w4ax, act->out, act->m, QTOOL_F16, err);
    return QT_OK;
}

static double dot(const void *x, const void *w, size_t k)
{
    double sum = 0;
    for (size_t i = 0; i < k; i++)
        sum += ref_half(x, i) * ref_half(w, i);
    return sum;
}

static int fake_gemm(struct qt_gpu *gpu, void *y, const void *x, const void *w, size_t m, size_t n,
                     size_t k, struct qt_err *err)
{
    (void)err;
    for (size_t i = 0; !idle(gpu) && i < m; i++)
        for (size_t j = 0; j < n; j++)
            ref_store(y, i * n + j,
                      dot((const uint16_t *)x + i * k, (const uint16_t *)w + j * k, k));
    return QT_OK;
}

static int fake_gemm_f32(struct qt_gpu *gpu, float *y, const void *x, const void *w, size_t m,
                         size_t n, size_t k, struct qt_err *err)
{
    (void)err;
    for (size_t i = 0; !idle(gpu) && i < m; i++)
        for (size_t j = 0; j < n; j++)
            y[i * n + j] = (float)dot((const uint16_t *)x + i * k, (const uint16_t *)w + j * k, k);
    return QT_OK;
}

static int fake_plan(struct qt_gpu *gpu, struct qtool_matmul_plan *out,
                     const struct qtool_matmul_weight *w, size_t m,
                     const struct qtool_matmul_options *opt, struct qt_err *err)
{
    (void)gpu;
    if (opt->gated && (m > 64 || w->n % 32))
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "no gated product");
    *out = (struct qtool_matmul_plan){
        .m = m, .n = w->n, .k = w->k, .options = *opt, .workspace_bytes = QTOOL_WORKSPACE_ZEROED};
    return QT_OK;
}

/* y[m][n / 2] = the activation of gate times up: both[m][n]. */
static void fake_gate(void *y, const uint16_t *both, const struct qtool_matmul_plan *p)
{
    const enum qtool_decoder_act act =
        p->options.gated == QTOOL_MATMUL_GATED_SILU ? QTOOL_DECODER_SILU : QTOOL_DECODER_GELU_TANH;
    const size_t half = p->n / 2;
    for (size_t i = 0; i < p->m * half; i++) {
        const uint16_t *gate = both + i / half * p->n + i % half;
        ref_store(y, i, ref_act(act, ref_half(gate, 0), ref_half(gate, half)));
    }
}

static int fake_run(struct qt_gpu *gpu, const struct qtool_matmul_plan *plan,
                    const struct qtool_matmul_weight *w, void *y, const void *x, void *workspace,
                    struct qt_err *err)
{
    (void)err;
    struct fake *f = gpu->ctx;
    double *row = calloc(w->k, sizeof *row);
    uint16_t *both = calloc(plan->m * w->n, sizeof *both);
    void *to = plan->options.gated ? both : y;
    assert_non_null(workspace);
    assert_non_null(row);
    assert_non_null(both);
    f->products++;
    f->gated += plan->options.gated != QTOOL_MATMUL_PLAIN;
    for (size_t j = 0; !idle(gpu) && j < w->n; j++) {
        for (size_t c = 0; c < w->k; c++)
            row[c] = (double)weight_at(w, j, c);
        for (size_t i = 0; i < plan->m; i++) {
            double sum = 0;
            for (size_t c = 0; c < w->k; c++)
                sum += ref_half(x, i * w->k + c) * row[c];
            ref_store(to, i * w->n + j, sum);
        }
    }
    if (!idle(gpu) && plan->options.gated)
        fake_gate(y, both, plan);
    free(row);
    free(both);
    return QT_OK;
}

/* The products of several matrices count as one. */
static int fake_plan_many(struct qt_gpu *gpu, struct qtool_matmul_plan *out,
                          const struct qtool_matmul_weight *const *w, size_t count, size_t m,
                          const struct qtool_matmul_options *opt, struct qt_err *err)
{
    size_t n = 0;
    for (size_t i = 0; i < count; i++) {
        if (w[i]->kind != QTOOL_MATMUL_LUT || w[i]->bits != w[0]->bits || m > 16)
            return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "no product of these matrices");
        n += w[i]->n;
    }
    const int rc = fake_plan(gpu, out, w[0], m, opt, err);
    out->n = n;
    return rc;
}

static int fake_run_many(struct qt_gpu *gpu, const struct qtool_matmul_plan *plan,
                         const struct qtool_matmul_weight *const *w, size_t count, void *const *y,
                         const void *x, struct qt_err *err)
{
    struct fake *f = gpu->ctx;
    const size_t before = f->products;
    for (size_t i = 0; i < count; i++)
        assert_int_equal(fake_run(gpu, plan, w[i], y[i], x, f, err), QT_OK);
    f->products = before + 1;
    return QT_OK;
}

/* A matrix in the table of the simulated GPU. */
struct fake_matrix {
    struct qtool_matmul_weight weight;
    struct qtool_w4ax_weight w4ax; /* plane not NULL: instead */
    struct qtool_w4ax_input input;
    const float *bias;
};

static struct fake_matrix fake_w4ax_matrix(const struct qtool_moe_w4ax *of, size_t expert, int i)
{
    const struct qtool_w4ax_weight *const weights[3] = {of->gate, of->up, of->down};
    struct fake_matrix m = {.w4ax = weights[i][expert],
                            .input = i == 2 ? of->inner[expert] : of->input};
    m.w4ax.blocks = m.input.blocks;
    return m;
}

static int fake_moe_table(struct qt_gpu *gpu, void *table, const struct qtool_moe_layer *layer,
                          struct qt_err *err)
{
    const struct qtool_matmul_weight *const weights[3] = {layer->gate, layer->up, layer->down};
    struct fake_matrix *copy = calloc(3 * layer->experts, sizeof *copy);
    (void)gpu, (void)err;
    assert_non_null(copy);
    for (size_t i = 0; i < 3 * layer->experts; i++) {
        copy[i] = layer->w4ax ? fake_w4ax_matrix(layer->w4ax, i / 3, (int)(i % 3))
                              : (struct fake_matrix){.weight = weights[i % 3][i / 3]};
        copy[i].bias = layer->bias[i % 3][i / 3];
    }
    memcpy(table, &copy, sizeof copy);
    tables[ntables++] = copy;
    return QT_OK;
}

static int fake_moe_plan(struct qt_gpu *gpu, struct qtool_moe_plan *out,
                         const struct qtool_moe_layer *layer, size_t tokens,
                         const struct qtool_moe_options *opt, struct qt_err *err)
{
    (void)gpu, (void)err;
    *out =
        (struct qtool_moe_plan){.tokens = tokens,
                                .experts = layer->experts,
                                .hidden = layer->w4ax ? layer->w4ax->gate->k : layer->gate->k,
                                .intermediate = layer->w4ax ? layer->w4ax->gate->n : layer->gate->n,
                                .options = *opt,
                                .workspace_bytes = QTOOL_WORKSPACE_ZEROED};
    return QT_OK;
}

/* Quantizes x[k], rounded to FP16, and multiplies. */
static void w4ax_product_of(double *y, const struct fake_matrix *m, const double *x)
{
    const size_t k = m->w4ax.k, blocks = qt_ceil_div(k, 128);
    const struct qtool_w4ax_acts acts = {calloc(blocks, 128), calloc(4 * blocks, sizeof(float)),
                                         calloc(1, sizeof(int))};
    float *v = calloc(blocks * 128, sizeof *v);
    uint16_t half;
    for (size_t p = 0; p < k; p++) {
        ref_store(&half, 0, x[m->input.perm ? m->input.perm[p] : p]);
        v[p] = (float)ref_half(&half, 0);
    }
    if (m->input.rotation)
        rotate_reference(v, k);
    quantize_token(&acts, &m->input, v, 1, 0);
    int8_t *row = all_codes(&m->w4ax, &acts, 1), *codes = all_codes(&m->w4ax, NULL, 0);
    for (size_t j = 0; j < m->w4ax.n; j++)
        y[j] = w4ax_product(&m->w4ax, &acts, 1, 0, j, row, codes + j * blocks * 128) +
               (m->bias ? (double)m->bias[j] : 0);
    free(acts.codes);
    free(acts.scale);
    free(acts.sum);
    free(v);
    free(row);
    free(codes);
}

/* y[n] = weight x + bias. */
static void product(double *y, const struct fake_matrix *m, const double *x)
{
    const struct qtool_matmul_weight *w = &m->weight;
    if (m->w4ax.plane) {
        w4ax_product_of(y, m, x);
        return;
    }
    for (size_t j = 0; j < w->n; j++) {
        y[j] = m->bias ? (double)m->bias[j] : 0;
        for (size_t c = 0; c < w->k; c++)
            y[j] += (double)weight_at(w, j, c) * x[c];
    }
}

static int fake_moe_run(struct qt_gpu *gpu, const struct qtool_moe_plan *plan, const void *table,
                        void *y, const void *x, const int *ids, const float *weights,
                        void *workspace, struct qt_err *err)
{
    const size_t hidden = plan->hidden, inner = plan->intermediate, topk = plan->options.topk;
    static const enum qtool_decoder_act acts[] = {QTOOL_DECODER_SILU, QTOOL_DECODER_GELU_TANH,
                                                  QTOOL_DECODER_CLAMPED};
    const struct fake_matrix *experts;
    double *row = calloc(3 * hidden + 2 * inner, sizeof *row), *sum = row + hidden;
    double *down = sum + hidden, *gate = down + hidden, *up = gate + inner;
    (void)err;
    assert_non_null(workspace);
    assert_non_null(row);
    memcpy(&experts, table, sizeof experts);
    ((struct fake *)gpu->ctx)->grouped++;
    for (size_t t = 0; !idle(gpu) && t < plan->tokens; t++) {
        for (size_t c = 0; c < hidden; c++) {
            row[c] = ref_half(x, t * hidden + c);
            sum[c] = 0;
        }
        for (size_t j = 0; j < topk; j++) {
            const struct fake_matrix *e = &experts[3 * ids[t * topk + j]];
            product(gate, &e[0], row);
            product(up, &e[1], row);
            for (size_t i = 0; i < inner; i++)
                gate[i] = ref_act(acts[plan->options.activation], gate[i], up[i]);
            product(down, &e[2], gate);
            for (size_t c = 0; c < hidden; c++)
                sum[c] += (double)weights[t * topk + j] * down[c];
        }
        for (size_t c = 0; c < hidden; c++)
            ref_store(y, t * hidden + c, sum[c]);
    }
    free(row);
    return QT_OK;
}

static int fake_w4ax_quantize(struct qt_gpu *gpu, const struct qtool_w4ax_acts *out,
                              const struct qtool_w4ax_input *in, const void *x, size_t m,
                              enum qtool_dtype dtype, struct qt_err *err)
{
    float *v = calloc(qt_ceil_div(in->k, 128) * 128, sizeof *v);
    (void)err;
    assert_int_equal(dtype, QTOOL_F16);
    assert_non_null(v);
    for (size_t t = 0; t < m && !idle(gpu); t++) {
        for (size_t p = 0; p < in->k; p++)
            v[p] = (float)ref_half(x, t * in->k + (in->perm ? in->perm[p] : p));
        if (in->rotation)
            rotate_reference(v, in->k);
        quantize_token(out, in, v, m, t);
    }
    free(v);
    return QT_OK;
}

static int fake_w4ax_plan(struct qt_gpu *gpu, struct qtool_w4ax_plan *out,
                          const struct qtool_w4ax_weight *w, size_t m,
                          const struct qtool_w4ax_options *opt, struct qt_err *err)
{
    (void)gpu, (void)err;
    assert_non_null(w->blocks);
    *out = (struct qtool_w4ax_plan){.m = m, .n = w->n, .k = w->k, .options = *opt};
    return QT_OK;
}

static int fake_w4ax_run(struct qt_gpu *gpu, const struct qtool_w4ax_plan *plan,
                         const struct qtool_w4ax_weight *w, const struct qtool_w4ax_acts *acts,
                         void *y, void *workspace, struct qt_err *err)
{
    const size_t width = qt_ceil_div(w->k, 128) * 128;
    (void)workspace, (void)err;
    ((struct fake *)gpu->ctx)->products++;
    if (idle(gpu))
        return QT_OK;
    int8_t *x = all_codes(w, acts, plan->m), *codes = all_codes(w, NULL, 0);
    for (size_t t = 0; t < plan->m; t++)
        for (size_t row = 0; row < plan->n; row++)
            put_output(y, t * plan->n + row,
                       w4ax_product(w, acts, plan->m, t, row, x + t * width, codes + row * width),
                       plan->options.output);
    free(x);
    free(codes);
    return QT_OK;
}

static int fake_kv_plan(struct qt_gpu *gpu, struct qtool_kv_plan *out,
                        const struct qtool_kv_cache *cache, const struct qtool_kv_options *opt,
                        size_t split_tokens, struct qt_err *err)
{
    (void)gpu, (void)split_tokens, (void)err;
    assert_int_equal(cache->format, QTOOL_KV_F16);
    *out = (struct qtool_kv_plan){.options = *opt, .splits = 1};
    return QT_OK;
}

static int fake_kv_run(struct qt_gpu *gpu, const struct qtool_kv_plan *plan,
                       const struct qtool_kv_cache *cache, void *out, const void *q,
                       const int *length, void *workspace, struct qt_err *err)
{
    int position[64];
    (void)workspace, (void)err;
    for (size_t i = 0; i < plan->options.batch; i++)
        position[i] = length[i] - 1;
    const size_t head = cache->page_tokens * cache->head_dim;
    if (!idle(gpu))
        ref_attention(&(struct qtool_decoder_attention){.sequences = plan->options.batch,
                                                        .queries = 1,
                                                        .heads = plan->options.heads,
                                                        .kv_heads = cache->heads,
                                                        .head_dim = cache->head_dim,
                                                        .q = q,
                                                        .k = cache->k,
                                                        .v = cache->v,
                                                        .sequence_stride = cache->heads * head,
                                                        .head_stride = head,
                                                        .position = position,
                                                        .out = out,
                                                        .scale = plan->options.scale});
    return QT_OK;
}

static int fake_capture(struct qt_gpu *gpu, struct qt_gpu_graph **out,
                        int (*fn)(void *ctx, struct qt_err *err), void *ctx, struct qt_err *err)
{
    struct fake *f = gpu->ctx;
    int rc = qt_array_new(out, 1, sizeof **out, err);
    if (rc < 0)
        return rc;
    **out = (struct qt_gpu_graph){fn, ctx};
    f->capturing = true;
    rc = fn(ctx, err);
    f->capturing = false;
    return rc;
}

static int fake_replay(struct qt_gpu *gpu, struct qt_gpu_graph *graph, struct qt_err *err)
{
    ((struct fake *)gpu->ctx)->replays++;
    return graph->fn(graph->ctx, err);
}

static void fake_graph_free(struct qt_gpu *gpu, struct qt_gpu_graph *graph)
{
    (void)gpu;
    qt_free(graph);
}

static void fake_init(struct fake *f)
{
    *f = (struct fake){.capturing = false};
    sim_gpu_init(&f->sim);
    f->sim.gpu.decode = fake_decode;
    f->sim.gpu.gemm = fake_gemm;
    f->sim.gpu.gemm_f32 = fake_gemm_f32;
    f->sim.gpu.plan = fake_plan;
    f->sim.gpu.run = fake_run;
    f->sim.gpu.plan_many = fake_plan_many;
    f->sim.gpu.run_many = fake_run_many;
    f->sim.gpu.moe_table = fake_moe_table;
    f->sim.gpu.moe_plan = fake_moe_plan;
    f->sim.gpu.moe_run = fake_moe_run;
    f->sim.gpu.w4ax_blocks = fake_blocks;
    f->sim.gpu.w4ax_quantize = fake_w4ax_quantize;
    f->sim.gpu.w4ax_plan = fake_w4ax_plan;
    f->sim.gpu.w4ax_run = fake_w4ax_run;
    f->sim.gpu.kv_plan = fake_kv_plan;
    f->sim.gpu.kv_run = fake_kv_run;
    f->sim.gpu.capture = fake_capture;
    f->sim.gpu.replay = fake_replay;
    f->sim.gpu.graph_free = fake_graph_free;
}

/* ---- tests ---------------------------------------------------------------------------------- */

static struct qt_backend *cpu;

static int open_cpu(void **state)
{
    (void)state;
    return qt_backend_cpu_open(&cpu, NULL);
}

static int close_cpu(void **state)
{
    (void)state;
    cpu->close(cpu);
    while (ntables)
        free(tables[--ntables]);
    return 0;
}

/* FP16 weights and activations change the logits of these models by less than this, relative to
 * their range. In phi3_long, factors of the rotary embedding make the scores large. */
static double golden_error(const char *name)
{
    return strncmp(name, "phi3_long", 9) == 0 ? 1.2e-2 : 4e-3;
}

/* In families that the runtime has, models with options that it does not have. */
static bool has_refused_option(const char *name)
{
    static const char *const names[] = {"exaone_moe", "glm4_moe_groups", "solar_open", /* groups */
                                        "gpt_oss_moe"}; /* biases of FP16 experts */
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0)
            return true;
    return false;
}

/* `list archs` says what the runtime does. */
static void check_family(const char *name, const char *path, int rc)
{
    struct runtime_source s;
    struct qt_family family;
    struct qt_err err = {0};
    bool found = false;
    expect_ok(name, runtime_source_open(&s, path, &err), &err);
    for (size_t i = 0; !found && qt_model_family(&family, i); i++)
        found = strcmp(family.type, qt_model_info(s.model)->family) == 0;
    const bool runs = !qt_model_cannot(s.model, QT_USE_FUSED);
    assert_true(found);
    if ((rc == QT_OK) != (runs && !has_refused_option(name)) ||
        (family.can[QT_USE_FUSED] && !runs) || (!family.sometimes_fused && runs))
        fail_msg("%s: %d, but the family: %d, sometimes: %d, the model: %d", name, rc,
                 family.can[QT_USE_FUSED], family.sometimes_fused, runs);
    runtime_source_close(&s);
}

static void test_golden_models(void **state)
{
    struct dirent **names;
    const int n = scandir(GOLDEN, &names, NULL, alphasort);
    (void)state;
    assert_true(n > 0);
    for (int i = 0; i < n; i++) {
        char path[512];
        struct fake f;
        struct qt_err err = {0};
        fake_init(&f);
        snprintf(path, sizeof path, "%s/%s", GOLDEN, names[i]->d_name);
        struct runtime_case c = {
            .gpu = &f.sim.gpu, .cpu = cpu, .path = path, .prompt = 12, .steps = 3};
        if (names[i]->d_name[0] != '.') {
            const int rc = runtime_run(&c, &err);
            check_family(names[i]->d_name, path, rc);
            if (rc == QT_E_UNSUPPORTED) {
                assert_non_null(strstr(err.reason, "does not support models with"));
            } else {
                expect_ok(names[i]->d_name, rc, &err);
                if (!(c.error < golden_error(names[i]->d_name)))
                    fail_msg("%s: error %g", names[i]->d_name, c.error);
                assert_int_equal(f.replays, c.steps - 1);
            }
        }
        free(names[i]);
    }
    free(names);
}

/* ---- checkpoints whose matrices are large enough to be packed ------------------------------- */

enum { LARGE_HIDDEN = 64, LARGE_VOCAB = 32, LARGE_WIDTH = 96 };

static struct {
    uint64_t size;
    char header[8184];
    float values[1 << 18];
} large;
static size_t large_at, large_used;

/* A random matrix [n][k], or with k 0 a vector of `value`. */
static void large_add(const char *prefix, const char *name, size_t n, size_t k, float value)
{
    static uint32_t bits = 1;
    const size_t begin = large_used * sizeof *large.values, count = n * (k ? k : 1);
    char shape[32];
    assert_true(large_used + count < sizeof large.values / sizeof *large.values);
    for (size_t j = 0; j < count; j++) {
        bits = bits * 1664525 + 1013904223;
        large.values[large_used++] = k ? (float)(int32_t)bits * 0x1p-33f : value;
    }
    snprintf(shape, sizeof shape, k ? "%zu, %zu" : "%zu", n, k);
    large_at += (size_t)snprintf(large.header + large_at, sizeof large.header - large_at,
                                 "%c\"%s%s\": {\"dtype\": \"F32\", \"shape\": [%s], "
                                 "\"data_offsets\": [%zu, %zu]}",
                                 large_at ? ',' : '{', prefix, name, shape, begin,
                                 large_used * sizeof *large.values);
    assert_true(large_at + 1 < sizeof large.header);
}

/* Writes what was added since the last call. */
static void large_write(const char *dir, const char *config)
{
    large.header[large_at] = '}';
    memset(large.header + large_at + 1, ' ', sizeof large.header - large_at - 1);
    large.size = sizeof large.header;
    assert_int_equal(qt_file_write(fixture_path(dir, "config.json"), config, strlen(config), NULL),
                     QT_OK);
    assert_int_equal(
        qt_file_write(fixture_path(dir, "model.safetensors"), &large,
                      offsetof(__typeof__(large), values) + large_used * sizeof *large.values,
                      NULL),
        QT_OK);
    large_at = large_used = 0;
}

/* InternLM2, whose queries, keys and values are one tensor in groups of KV heads, with attention
 * heads of 16 channels, so that the groups are whole strips. */
static void write_internlm2(const char *dir)
{
    static const char layer[] = "model.layers.0.";
    large_add("", "model.tok_embeddings.weight", LARGE_VOCAB, LARGE_HIDDEN, 0);
    large_add(layer, "attention.wqkv.weight", 2 * LARGE_HIDDEN, LARGE_HIDDEN, 0);
    large_add(layer, "attention.wo.weight", LARGE_HIDDEN, LARGE_HIDDEN, 0);
    large_add(layer, "attention_norm.weight", LARGE_HIDDEN, 0, 1);
    large_add(layer, "ffn_norm.weight", LARGE_HIDDEN, 0, 1);
    large_add(layer, "feed_forward.w1.weight", LARGE_WIDTH, LARGE_HIDDEN, 0);
    large_add(layer, "feed_forward.w3.weight", LARGE_WIDTH, LARGE_HIDDEN, 0);
    large_add(layer, "feed_forward.w2.weight", LARGE_HIDDEN, LARGE_WIDTH, 0);
    large_add("", "model.norm.weight", LARGE_HIDDEN, 0, 1);
    large_add("", "output.weight", LARGE_VOCAB, LARGE_HIDDEN, 0);
    large_write(dir, "{\"model_type\": \"internlm2\", \"hidden_size\": 64, "
                     "\"num_attention_heads\": 4, \"num_key_value_heads\": 2, "
                     "\"intermediate_size\": 96, \"num_hidden_layers\": 1, \"vocab_size\": 32, "
                     "\"max_position_embeddings\": 128, \"rms_norm_eps\": 1e-5, "
                     "\"hidden_act\": \"silu\", \"bias\": false, \"rope_theta\": 10000}");
}

/* Gemma 4: attention heads of 32 channels, and of 64 without V in layers without a window; inputs
 * of single layers; two layers with keys and values of earlier ones and an MLP of twice the
 * width. */
static void write_gemma4(const char *dir)
{
    enum { LAYERS = 4, INPUTS = 32 };
    static const char *const norms[] = {"input_layernorm", "post_attention_layernorm",
                                        "pre_feedforward_layernorm", "post_feedforward_layernorm",
                                        "post_per_layer_input_norm"};
    for (size_t i = 0; i < LAYERS; i++) {
        const size_t head = i % 2 ? 64 : 32, width = (size_t)LARGE_WIDTH << (i >= 2);
        char layer[32], norm[64];
        snprintf(layer, sizeof layer, "model.layers.%zu.", i);
        for (size_t j = 0; j < sizeof norms / sizeof *norms; j++) {
            snprintf(norm, sizeof norm, "%s.weight", norms[j]);
            large_add(layer, norm, LARGE_HIDDEN, 0, .75f);
        }
        large_add(layer, "layer_scalar", 1, 0, .5f);
        /* Scores of a few units: FP16 queries change probabilities little. */
        large_add(layer, "self_attn.q_norm.weight", head, 0, .25f);
        large_add(layer, "self_attn.q_proj.weight", 2 * head, LARGE_HIDDEN, 0);
        large_add(layer, "self_attn.o_proj.weight", LARGE_HIDDEN, 2 * head, 0);
        if (i < 2) {
            large_add(layer, "self_attn.k_norm.weight", head, 0, 1);
            large_add(layer, "self_attn.k_proj.weight", head, LARGE_HIDDEN, 0);
        }
        if (i == 0)
            large_add(layer, "self_attn.v_proj.weight", head, LARGE_HIDDEN, 0);
        large_add(layer, "mlp.gate_proj.weight", width, LARGE_HIDDEN, 0);
        large_add(layer, "mlp.up_proj.weight", width, LARGE_HIDDEN, 0);
        large_add(layer, "mlp.down_proj.weight", LARGE_HIDDEN, width, 0);
        large_add(layer, "per_layer_input_gate.weight", INPUTS, LARGE_HIDDEN, 0);
        large_add(layer, "per_layer_projection.weight", LARGE_HIDDEN, INPUTS, 0);
    }
    large_add("", "model.embed_tokens.weight", LARGE_VOCAB, LARGE_HIDDEN, 0);
    large_add("", "model.embed_tokens_per_layer.weight", LARGE_VOCAB, LAYERS * INPUTS, 0);
    large_add("", "model.per_layer_model_projection.weight", LAYERS * INPUTS, LARGE_HIDDEN, 0);
    large_add("", "model.per_layer_projection_norm.weight", INPUTS, 0, 1);
    large_add("", "model.norm.weight", LARGE_HIDDEN, 0, 1);
    large_write(
        dir,
        "{\"model_type\": \"gemma4_text\", \"hidden_size\": 64, \"num_attention_heads\": 2, "
        "\"num_key_value_heads\": 1, \"num_global_key_value_heads\": 1, \"head_dim\": 32, "
        "\"global_head_dim\": 64, \"attention_k_eq_v\": true, \"intermediate_size\": 96, "
        "\"use_double_wide_mlp\": true, \"num_hidden_layers\": 4, \"num_kv_shared_layers\": 2, "
        "\"hidden_size_per_layer_input\": 32, \"vocab_size_per_layer_input\": 32, "
        "\"layer_types\": [\"sliding_attention\", \"full_attention\", \"sliding_attention\", "
        "\"full_attention\"], \"sliding_window\": 7, \"vocab_size\": 32, "
        "\"rope_parameters\": {\"full_attention\": {\"partial_rotary_factor\": 0.5, "
        "\"rope_theta\": 2000, \"rope_type\": \"proportional\"}, \"sliding_attention\": "
        "{\"rope_theta\": 100, \"rope_type\": \"default\"}}, \"rms_norm_eps\": 1e-6, "
        "\"max_position_embeddings\": 128, \"tie_word_embeddings\": true}");
}

/* Falcon 40B: parallel sublayers with a norm each; groups of whole strips. */
static void write_falcon(const char *dir)
{
    static const char layer[] = "transformer.h.0.";
    large_add("", "transformer.word_embeddings.weight", LARGE_VOCAB, LARGE_HIDDEN, 0);
    large_add(layer, "self_attention.query_key_value.weight", 2 * LARGE_HIDDEN, LARGE_HIDDEN, 0);
    large_add(layer, "self_attention.dense.weight", LARGE_HIDDEN, LARGE_HIDDEN, 0);
    large_add(layer, "ln_attn.weight", LARGE_HIDDEN, 0, 1);
    large_add(layer, "ln_attn.bias", LARGE_HIDDEN, 0, .25f);
    large_add(layer, "ln_mlp.weight", LARGE_HIDDEN, 0, .5f);
    large_add(layer, "ln_mlp.bias", LARGE_HIDDEN, 0, .125f);
    large_add(layer, "mlp.dense_h_to_4h.weight", 4 * LARGE_HIDDEN, LARGE_HIDDEN, 0);
    large_add(layer, "mlp.dense_4h_to_h.weight", LARGE_HIDDEN, 4 * LARGE_HIDDEN, 0);
    large_add("", "transformer.ln_f.weight", LARGE_HIDDEN, 0, 1);
    large_add("", "transformer.ln_f.bias", LARGE_HIDDEN, 0, 0);
    large_write(dir, "{\"model_type\": \"falcon\", \"hidden_size\": 64, "
                     "\"num_attention_heads\": 4, \"num_kv_heads\": 2, \"num_hidden_layers\": 1, "
                     "\"vocab_size\": 32, \"new_decoder_architecture\": true, "
                     "\"num_ln_in_parallel_attn\": 2, \"parallel_attn\": true, \"bias\": false, "
                     "\"alibi\": false, \"multi_query\": true, \"tie_word_embeddings\": true, "
                     "\"layer_norm_epsilon\": 1e-5}");
}

/* Falcon RW: ALiBi whose products are rounded to BF16. */
static void write_falcon_rw(const char *dir)
{
    static const struct {
        const char *name;
        size_t n, k;
        float value;
    } parts[] = {{"self_attention.query_key_value.weight", 3 * LARGE_HIDDEN, LARGE_HIDDEN, 0},
                 {"self_attention.query_key_value.bias", 3 * LARGE_HIDDEN, 0, .125f},
                 {"self_attention.dense.weight", LARGE_HIDDEN, LARGE_HIDDEN, 0},
                 {"self_attention.dense.bias", LARGE_HIDDEN, 0, .25f},
                 {"input_layernorm.weight", LARGE_HIDDEN, 0, 1},
                 {"input_layernorm.bias", LARGE_HIDDEN, 0, .125f},
                 {"post_attention_layernorm.weight", LARGE_HIDDEN, 0, .5f},
                 {"post_attention_layernorm.bias", LARGE_HIDDEN, 0, .125f},
                 {"mlp.dense_h_to_4h.weight", 4 * LARGE_HIDDEN, LARGE_HIDDEN, 0},
                 {"mlp.dense_h_to_4h.bias", 4 * LARGE_HIDDEN, 0, .25f},
                 {"mlp.dense_4h_to_h.weight", LARGE_HIDDEN, 4 * LARGE_HIDDEN, 0},
                 {"mlp.dense_4h_to_h.bias", LARGE_HIDDEN, 0, 0}};
    large_add("", "transformer.word_embeddings.weight", LARGE_VOCAB, LARGE_HIDDEN, 0);
    large_add("", "transformer.ln_f.weight", LARGE_HIDDEN, 0, 1);
    large_add("", "transformer.ln_f.bias", LARGE_HIDDEN, 0, 0);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        large_add("transformer.h.0.", parts[i].name, parts[i].n, parts[i].k, parts[i].value);
    large_write(dir, "{\"model_type\": \"falcon\", \"hidden_size\": 64, "
                     "\"num_attention_heads\": 4, \"num_hidden_layers\": 1, \"vocab_size\": 32, "
                     "\"new_decoder_architecture\": false, \"parallel_attn\": false, "
                     "\"bias\": true, \"alibi\": true, \"multi_query\": false, "
                     "\"tie_word_embeddings\": true, \"layer_norm_epsilon\": 1e-5}");
}

/* MPT: ALiBi and clipped queries, keys and values. */
static void write_mpt(const char *dir)
{
    static const char layer[] = "transformer.blocks.0.";
    large_add("", "transformer.wte.weight", LARGE_VOCAB, LARGE_HIDDEN, 0);
    large_add(layer, "attn.Wqkv.weight", 3 * LARGE_HIDDEN, LARGE_HIDDEN, 0);
    large_add(layer, "attn.out_proj.weight", LARGE_HIDDEN, LARGE_HIDDEN, 0);
    large_add(layer, "norm_1.weight", LARGE_HIDDEN, 0, 1);
    large_add(layer, "norm_2.weight", LARGE_HIDDEN, 0, .5f);
    large_add(layer, "ffn.up_proj.weight", 4 * LARGE_HIDDEN, LARGE_HIDDEN, 0);
    large_add(layer, "ffn.down_proj.weight", LARGE_HIDDEN, 4 * LARGE_HIDDEN, 0);
    large_add("", "transformer.norm_f.weight", LARGE_HIDDEN, 0, 1);
    large_write(dir, "{\"model_type\": \"mpt\", \"d_model\": 64, \"n_heads\": 4, "
                     "\"n_layers\": 1, \"expansion_ratio\": 4, \"max_seq_len\": 128, "
                     "\"vocab_size\": 32, \"no_bias\": true, \"tie_word_embeddings\": true, "
                     "\"attn_config\": {\"alibi\": true, \"clip_qkv\": 0.5}}");
}

static void test_families(void **state)
{
    static const struct {
        void (*write)(const char *dir);
        bool grouped; /* rows of queries, keys and values in turns */
        size_t products;
    } families[] = {{write_internlm2, true, 4},
                    {write_gemma4, false, 2 * 7 + 2 * 7},
                    {write_falcon, true, 4},
                    {write_falcon_rw, true, 4},
                    {write_mpt, false, 4}};
    static const char *const schemes[] = {"nf4:g=32", "int4:g=32", "lut3:g=32", "fp6", "mix24"};
    (void)state;
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        for (size_t j = 0; j < sizeof schemes / sizeof *schemes; j++) {
            const bool mix24 = strcmp(schemes[j], "mix24") == 0;
            if (mix24 && !families[i].grouped) /* not computed by the simulated device */
                continue;
            char *dir = fixture_dir();
            const char *path = fixture_path(dir, "out");
            struct fake f;
            struct qt_err err = {0};
            fake_init(&f);
            families[i].write(dir);
            expect_ok(schemes[j], runtime_quantize(path, dir, schemes[j], NULL, 0, NULL, &err),
                      &err);
            struct runtime_case c = {
                .gpu = &f.sim.gpu, .cpu = cpu, .path = path, .prompt = 9, .steps = 3};
            const int rc = runtime_run(&c, &err);
            if (mix24) {
                assert_int_equal(rc, QT_E_UNSUPPORTED);
                assert_non_null(strstr(err.reason, "in groups of one tensor in this scheme"));
            } else {
                expect_ok(schemes[j], rc, &err);
                if (!(c.error < 5e-3))
                    fail_msg("family %zu, %s: error %g", i, schemes[j], c.error);
                assert_true(f.products >= (1 + c.steps) * families[i].products);
            }
            assert_int_equal(qt_dir_remove(path, NULL), 0);
            fixture_remove(dir);
        }
}

/* Containers of the example model, which has three decoder layers and heads of 64 channels. q, k
 * and v, and gate and up, are one product each where their formats agree. */
static void test_containers(void **state)
{
    static const struct qt_rule fp6_keys[] = {{"k_proj", "fp6"}},
                                no_values[] = {{"v_proj", "none"}},
                                head[] = {{"embed_tokens", "int8"}};
    static const struct {
        const char *scheme;
        const struct qt_rule *rule;
        size_t products, gated; /* of all three decoder layers and the head */
    } cases[] = {{"nf4", NULL, 12, 3},          {"fp6", NULL, 12, 3},       {"int4", NULL, 12, 3},
                 {"lut3", NULL, 12, 0}, /* tables of their own */
                 {"nf3:g=64", fp6_keys, 18, 3}, {"int8", no_values, 15, 3}, {"nf4", head, 13, 3}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *dir = fixture_dir();
        const char *path = fixture_path(dir, "out");
        struct fake f;
        struct qt_err err = {0};
        fake_init(&f);
        expect_ok(cases[i].scheme,
                  runtime_quantize(path, "examples/nano-llama", cases[i].scheme, cases[i].rule,
                                   cases[i].rule ? 1 : 0, NULL, &err),
                  &err);
        struct runtime_case c = {.gpu = &f.sim.gpu, .cpu = cpu, .path = path, .prompt = 3};
        expect_ok(cases[i].scheme, runtime_run(&c, &err), &err);
        if (!(c.error < 4e-3))
            fail_msg("%s: error %g", cases[i].scheme, c.error);
        assert_int_equal(f.products, cases[i].products);
        assert_int_equal(f.gated, cases[i].gated);
        assert_int_equal(qt_dir_remove(path, NULL), 0);
        fixture_remove(dir);
    }
}

static void test_mixtures(void **state)
{
    (void)state;
    for (size_t i = 0; i < RUNTIME_MIXTURES; i++) {
        char *dir = fixture_dir(), model[200];
        const char *path = fixture_path(dir, "out"), *name = runtime_mixtures[i].model;
        struct fake f;
        struct qt_err err = {0};
        fake_init(&f);
        snprintf(model, sizeof model, GOLDEN "/%s", name);
        expect_ok(name,
                  runtime_quantize(path, model, runtime_mixtures[i].scheme, NULL, 0, NULL, &err),
                  &err);
        struct runtime_case c = {
            .gpu = &f.sim.gpu, .cpu = cpu, .path = path, .prompt = 6, .steps = 2};
        expect_ok(name, runtime_run(&c, &err), &err);
        if (!(c.error < 4e-3))
            fail_msg("%s: error %g", name, c.error);
        assert_true(f.grouped >= 1 + c.steps);
        assert_int_equal(qt_dir_remove(path, NULL), 0);
        fixture_remove(dir);
    }
}

/* Two calibration windows of 16 tokens. */
static struct qt_calibration two_windows(void)
{
    enum { SAMPLES = 2, LENGTH = 16 };
    static uint32_t ids[SAMPLES * LENGTH];
    for (size_t i = 0; i < SAMPLES * LENGTH; i++)
        ids[i] = (uint32_t)(i * 37 % 53);
    return (struct qt_calibration){
        .ids = ids, .samples = SAMPLES, .seqlen = LENGTH, .backend = cpu};
}

/*
 * Channels and rows in orders of their own, with factors: with rotary embeddings and biases
 * (qwen2), with rows of queries, keys and values in one tensor (gpt2, without a gate; phi3), with
 * layer norms (gpt2, opt). A value that FP16 rounds to another code of 8 bits changes by 1/127 of
 * the largest value, so errors are larger than those of other schemes; channels in the wrong order
 * change the logits by more than half of their range.
 */
static void test_w4ax(void **state)
{
#define ALL_8_BITS "a8max=1,bound=1e-9"
    static const struct {
        const char *model, *scheme;
    } cases[] = {{"llama", "w4ax:" ALL_8_BITS},      {"qwen2", "w4ax:scales=int," ALL_8_BITS},
                 {"gemma2", "w4ax:scales=row"},      {"gpt2", "w4ax:" ALL_8_BITS},
                 {"phi3_short", "w4ax:" ALL_8_BITS}, {"opt", "w4ax:rotate=none," ALL_8_BITS},
                 {"mixtral", "w4ax:" ALL_8_BITS},    {"qwen3_moe", "w4ax:scales=int," ALL_8_BITS},
                 {"olmoe", "w4ax:scales=row"}};
    const struct qt_calibration data = two_windows();
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *dir = fixture_dir(), model[200];
        const char *path = fixture_path(dir, "out");
        struct fake f;
        struct qt_err err = {0};
        fake_init(&f);
        snprintf(model, sizeof model, GOLDEN "/%s", cases[i].model);
        expect_ok(cases[i].model,
                  runtime_quantize(path, model, cases[i].scheme, NULL, 0, &data, &err), &err);
        struct runtime_case c = {
            .gpu = &f.sim.gpu, .cpu = cpu, .path = path, .prompt = 6, .steps = 2};
        expect_ok(cases[i].model, runtime_run(&c, &err), &err);
        if (!(c.error < 4e-2))
            fail_msg("%s: error %g", cases[i].model, c.error);
        assert_true(f.products > 0);
        assert_true(!strstr(cases[i].model, "moe") || f.grouped >= 1 + c.steps);
        assert_int_equal(qt_dir_remove(path, NULL), 0);
        fixture_remove(dir);
    }
#undef ALL_8_BITS
}

/* Every 16th channel is lost. */
static int faulty_w4ax_quantize(struct qt_gpu *gpu, const struct qtool_w4ax_acts *out,
                                const struct qtool_w4ax_input *in, const void *x, size_t m,
                                enum qtool_dtype dtype, struct qt_err *err)
{
    uint16_t *copy = calloc(m * in->k, sizeof *copy);
    assert_non_null(copy);
    memcpy(copy, x, m * in->k * sizeof *copy);
    for (size_t i = 0; i < m * in->k; i++)
        copy[i] = i % in->k % 16 ? copy[i] : 0;
    const int rc = fake_w4ax_quantize(gpu, out, in, copy, m, dtype, err);
    free(copy);
    return rc;
}

/* verify --model with activations of 4 and of 8 bits, and with a kernel that loses channels. */
static void test_verify_w4ax(void **state)
{
    static const char *const schemes[] = {"w4ax", "w4ax:a8max=1,bound=1e-9"};
    const struct qt_calibration data = two_windows();
    (void)state;
    for (size_t i = 0; i < 2; i++) {
        char *dir = fixture_dir();
        const char *path = fixture_path(dir, "out");
        struct qt_container *container;
        struct qt_model_check check;
        struct qt_err err = {0};
        struct fake f;
        fake_init(&f);
        expect_ok("quantize",
                  runtime_quantize(path, GOLDEN "/llama", schemes[i], NULL, 0, &data, &err), &err);
        expect_ok("open", qt_container_open(&container, path, &err), &err);
        for (int faulty = 0; faulty < 2; faulty++) {
            if (faulty)
                f.sim.gpu.w4ax_quantize = faulty_w4ax_quantize;
            expect_ok("verify", qt_verify_model(&check, container, &f.sim.gpu, cpu, NULL, &err),
                      &err);
            assert_int_equal(check.faults, faulty);
            assert_true(check.rms_rounded > 0);
        }
        qt_container_close(container);
        assert_int_equal(qt_dir_remove(path, NULL), 0);
        fixture_remove(dir);
    }
}

/* Loses every 16th channel of X. */
static int faulty_moe_run(struct qt_gpu *gpu, const struct qtool_moe_plan *plan, const void *table,
                          void *y, const void *x, const int *ids, const float *weights,
                          void *workspace, struct qt_err *err)
{
    const size_t count = plan->tokens * plan->hidden;
    uint16_t *copy = calloc(count, sizeof *copy);
    assert_non_null(copy);
    for (size_t i = 0; i < count; i++)
        copy[i] = i % plan->hidden % 16 ? ((const uint16_t *)x)[i] : 0;
    const int rc = fake_moe_run(gpu, plan, table, y, copy, ids, weights, workspace, err);
    free(copy);
    return rc;
}

static int refuse_w4ax_quantize(struct qt_gpu *gpu, const struct qtool_w4ax_acts *out,
                                const struct qtool_w4ax_input *in, const void *x, size_t m,
                                enum qtool_dtype dtype, struct qt_err *err)
{
    (void)gpu, (void)out, (void)in, (void)x, (void)m, (void)dtype;
    return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "only layers of experts");
}

/* verify --device with w4ax experts. The simulated products are of FP16 alone, so the results in
 * BF16, which verify compares too, are not of these. */
static void test_device_w4ax_experts(void **state)
{
    const struct qt_calibration data = two_windows();
    char *dir = fixture_dir();
    const char *path = fixture_path(dir, "out");
    struct qt_container *container;
    struct qt_err err = {0};
    struct fake f;
    (void)state;
    fake_init(&f);
    f.sim.gpu.w4ax_quantize = refuse_w4ax_quantize;
    expect_ok("quantize",
              runtime_quantize(path, GOLDEN "/mixtral", "w4ax:scales=int", NULL, 0, &data, &err),
              &err);
    expect_ok("open", qt_container_open(&container, path, &err), &err);
    for (int faulty = 0; faulty < 2; faulty++) {
        struct qt_device_report report;
        size_t layers = 0;
        f.sim.gpu.moe_run = faulty ? faulty_moe_run : fake_moe_run;
        expect_ok("verify", qt_verify_device(&report, container, &f.sim.gpu, cpu, NULL, NULL, &err),
                  &err);
        for (size_t i = 0; i < report.count; i++) {
            const struct qt_device_tensor *row = &report.tensors[i];
            const char *experts = strstr(row->name, ".experts");
            if (!experts || strcmp(experts, ".experts") != 0)
                continue;
            layers++;
            assert_string_equal(row->missing, "");
            assert_true(faulty ? row->error[QTOOL_F16] > .05 : row->error[QTOOL_F16] < 3e-3);
        }
        assert_true(layers > 0);
        qt_device_free(&report);
    }
    qt_container_close(container);
    assert_int_equal(qt_dir_remove(path, NULL), 0);
    fixture_remove(dir);
}

static void test_batch_invariant(void **state)
{
    char *dir = fixture_dir();
    const char *path = fixture_path(dir, "out");
    struct fake f;
    struct qt_err err = {0};
    uint32_t crc[2];
    (void)state;
    fake_init(&f);
    struct runtime_case c = {.gpu = &f.sim.gpu, .prompt = 5, .steps = 2};
    for (int mixture = 0; mixture < 2; mixture++) {
        c.path = mixture ? GOLDEN "/mixtral" : GOLDEN "/gemma2";
        for (size_t i = 0; i < 2; i++) /* 3 and 19 rows, of products of 16 */
            expect_ok(c.path, runtime_first(&crc[i], &c, 3 + 16 * i, &err), &err);
        assert_int_equal(crc[0], crc[1]);
    }
    expect_ok("quantize",
              runtime_quantize(path, GOLDEN "/mixtral", "nf4:g=32", NULL, 0, NULL, &err), &err);
    c.path = path;
    expect_error("mixture", runtime_first(crc, &c, 1, &err), QT_E_UNSUPPORTED,
                 "batch-invariant products of packed experts", &err);
    assert_int_equal(qt_dir_remove(path, NULL), 0);
    fixture_remove(dir);
}

/* The blocks of memory of the layers behind the first are copies of its blocks; only a table of
 * experts has addresses. */
static void check_copies(const struct qt_runtime *rt)
{
    const struct rt_block *list = rt->memory.list;
    size_t first = 0;
    while (list[first].data != rt->layers[0].attn_in.weight)
        first++;
    const size_t each = (rt->weights - first) / rt->config.layers;
    assert_int_equal(each * rt->config.layers, rt->weights - first);
    for (size_t i = first; i + each < rt->weights; i++) {
        const size_t skip = list[i].data == rt->layers[(i - first) / each].mixture.grouped.table
                                ? rt->layers[0].mixture.experts * QTOOL_MOE_TABLE_EXPERT
                                : 0;
        assert_ptr_not_equal(list[i].data, list[i + each].data);
        assert_int_equal(list[i].bytes, list[i + each].bytes);
        assert_memory_equal((char *)list[i].data + skip, (char *)list[i + each].data + skip,
                            list[i].bytes - skip);
    }
}

/* Random models. Sequences without a prompt of their own get that of the first. */
static void test_random(void **state)
{
    enum { SEQUENCES = 3, PROMPT = 2, VOCAB = 64 };
    static const char *const schemes[] = {NULL, "int4", "lut3", "w4ax", "nf4:g=64"};
    const struct qt_runtime_shape dense = {"dense", 3, 128, 256, 2, 1, 64, VOCAB, 0, 0},
                                  mixture = {"mixture", 3, 128, 64, 2, 1, 64, VOCAB, 4, 2};
    const struct qt_runtime_options opt = {
        .sequences = SEQUENCES, .capacity = PROMPT + 1, .prompt = PROMPT};
    const uint32_t ids[SEQUENCES * PROMPT] = {5, 7, 5, 7, 5, 7};
    float logits[2][SEQUENCES * VOCAB];
    uint32_t next[SEQUENCES];
    (void)state;
    for (size_t i = 0; i < 2 * sizeof schemes / sizeof *schemes; i++) {
        const char *scheme = schemes[i / 2];
        struct qt_runtime *rt;
        struct qt_spec spec;
        struct qt_err err = {0};
        struct fake f;
        size_t sequences = 0;
        double seconds = 0;
        fake_init(&f);
        if (i % 2 && scheme && *scheme == 'w') /* no grouped products */
            continue;
        const bool head = scheme && *scheme != 'w';
        if (scheme)
            expect_ok(scheme, qt_spec_parse(&spec, scheme, &err), &err);
        expect_ok("random",
                  qt_runtime_open_random(&rt, &f.sim.gpu, i % 2 ? &mixture : &dense,
                                         scheme ? &spec : NULL, head ? &spec : NULL, &opt, &err),
                  &err);
        check_copies(rt);
        rt->group_most = 1;
        for (int all = 0; all < 2; all++) {
            expect_ok("prompt",
                      all ? qt_runtime_prompt(rt, ids, PROMPT, NULL, &err)
                          : rt_prompt_some(rt, ids, PROMPT, &sequences, &seconds, &err),
                      &err);
            expect_ok("step", qt_runtime_step(rt, &err), &err);
            expect_ok("read", qt_runtime_read(rt, next, logits[all], &err), &err);
        }
        assert_true(sequences == 1 && seconds > 0);
        assert_memory_equal(logits[0], logits[1], sizeof *logits);
        qt_runtime_close(rt);
    }
}

/* A counter of 300 W that moves every 100 ms. */
static double fake_energy(struct qt_gpu *gpu)
{
    (void)gpu;
    return 30 * floor(qt_clock() * 10);
}

/* Two steps take far less than the time between two values of the counter. */
static void test_bench_power(void **state)
{
    const struct qt_runtime_shape shape = {"dense", 1, 64, 64, 1, 1, 64, 32, 0, 0};
    const size_t batches[] = {1};
    const struct qt_bench_model_options opt = {
        .shape = &shape, .batches = batches, .nbatches = 1, .prompt = 4, .tokens = 2};
    (void)state;
    for (int known = 0; known < 2; known++) {
        struct qt_bench_model_report report;
        struct qt_err err = {0};
        struct fake f;
        fake_init(&f);
        f.sim.gpu.energy = known ? fake_energy : NULL;
        expect_ok("bench", qt_bench_model(&report, &f.sim.gpu, &opt, &err), &err);
        assert_int_equal(report.count, 1);
        assert_true(report.rows[0].seconds > 0 && report.rows[0].seconds < .1);
        if (known ? !(fabs(report.rows[0].watts - 300) < 35) : !isnan(report.rows[0].watts))
            fail_msg("%g W", report.rows[0].watts);
        qt_bench_model_free(&report);
    }
}

static void test_refusals(void **state)
{
    const struct {
        struct qt_runtime_options opt;
        int status;
        const char *says;
    } cases[] = {{{.sequences = 0, .capacity = 8, .prompt = 4}, QT_E_USAGE, "1024 sequences"},
                 {{.sequences = 1, .capacity = 8, .prompt = 9}, QT_E_USAGE, "1024 sequences"},
                 {{.sequences = 1, .capacity = 4000, .prompt = 4}, QT_E_USAGE, "2048 positions"},
                 {{.sequences = 2, .capacity = 8, .prompt = 4}, QT_OK, ""}};
    struct runtime_source s;
    struct qt_runtime *rt;
    struct qt_err err = {0};
    struct fake f;
    const uint32_t ids[] = {1, 2, 3, 4, 5, 6, 7, 1u << 30};
    uint32_t next[2];
    (void)state;
    fake_init(&f);
    expect_ok("open", runtime_source_open(&s, "examples/nano-llama", &err), &err);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int rc =
            qt_runtime_open(&rt, &f.sim.gpu, s.model, &s.weights, NULL, &cases[i].opt, &err);
        assert_int_equal(rc, cases[i].status);
        if (rc < 0)
            assert_non_null(strstr(err.reason, cases[i].says));
    }
    assert_int_equal(qt_runtime_step(rt, &err), QT_E_USAGE); /* no prompt */
    assert_int_equal(qt_runtime_prompt(rt, ids, 5, NULL, &err), QT_E_USAGE);
    assert_int_equal(qt_runtime_prompt(rt, ids, 4, NULL, &err), QT_E_INPUT); /* the last id */
    assert_int_equal(qt_runtime_prompt(rt, ids, 3, NULL, &err), QT_OK);
    assert_int_equal(qt_runtime_put(rt, ids + 6, &err), QT_E_INPUT);
    for (int i = 0; i < 5; i++)
        assert_int_equal(qt_runtime_step(rt, &err), QT_OK);
    assert_int_equal(qt_runtime_step(rt, &err), QT_E_USAGE); /* full */
    assert_int_equal(qt_runtime_read(rt, next, NULL, &err), QT_OK);
    expect_ok("resize", qt_runtime_resize(rt, 1, &err), &err);
    assert_int_equal(qt_runtime_prompt(rt, ids, 4, NULL, &err), QT_OK);
    qt_runtime_close(rt);
    f.sim.gpu.has_cublas = false;
    assert_int_equal(
        qt_runtime_open(&rt, &f.sim.gpu, s.model, &s.weights, NULL, &cases[3].opt, &err),
        QT_E_UNSUPPORTED);
    f.sim.gpu.has_cublas = true;
    runtime_source_close(&s);
}

/* Each allocation of GPU memory fails once. */
static void test_out_of_memory(void **state)
{
    static const char *const models[] = {GOLDEN "/llama", GOLDEN "/gemma4_small", GOLDEN "/bloom"};
    const struct qt_runtime_options opt = {.sequences = 2, .capacity = 8, .prompt = 4};
    (void)state;
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        struct runtime_source s;
        struct qt_runtime *rt = NULL;
        struct qt_err err = {0};
        struct fake f;
        long failed = 0;
        fake_init(&f);
        expect_ok("open", runtime_source_open(&s, models[i], &err), &err);
        do {
            f.sim.fail_alloc = ++failed;
            const int rc = qt_runtime_open(&rt, &f.sim.gpu, s.model, &s.weights, NULL, &opt, &err);
            assert_true(rc == (f.sim.fail_alloc ? QT_OK : QT_E_RESOURCE));
        } while (!rt);
        assert_true(failed > 30);
        qt_runtime_close(rt);
        runtime_source_close(&s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden_models),
        cmocka_unit_test(test_families),
        cmocka_unit_test(test_containers),
        cmocka_unit_test(test_mixtures),
        cmocka_unit_test(test_w4ax),
        cmocka_unit_test(test_verify_w4ax),
        cmocka_unit_test(test_device_w4ax_experts),
        cmocka_unit_test(test_batch_invariant),
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_bench_power),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_out_of_memory),
    };
    return cmocka_run_group_tests(tests, open_cpu, close_cpu);
}
