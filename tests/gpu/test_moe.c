/*
 * Layers of experts (qtool_moe.h) against plain C: every scheme over edge shapes, numbers of
 * experts, tokens and choices, and routings: even, one expert for all tokens, experts without
 * tokens, experts of other devices, a token that names an expert twice. Weights are quantized and
 * decoded by pack/, those of w4ax made from random codes; the reference computes in double
 * precision, token by token, with activations of w4ax quantized in plain C. Outputs and
 * workspace are filled with NaN and have guard bands. Every run is made twice, and a third time as
 * a CUDA graph, and must repeat bit for bit.
 *
 * usage: test_moe [SEED [quick]]     prints "N passed, M failed, K skipped"
 * quick: few cases, for compute-sanitizer.
 */
#include "kernels/include/qtool_moe.h"
#include "tests/gpu/packed.h"
#include "tests/gpu/w4ax_experts.h"
#include "verify/verify.h"

#include <math.h>

enum { GUARD = 64 /* elements before and after an output */ };

/* ---- a layer in host and device memory ------------------------------------------------------ */

struct matrix {
    struct qt_packed packed;
    float *decoded; /* [n][k] */
};

struct layer {
    size_t experts, hidden, inner;
    struct matrix *matrix[3];              /* gate, up, down: [experts] */
    struct qtool_matmul_weight *weight[3]; /* [experts] */
    float *bias[3];                        /* [experts][n], or NULL */
    float *device_bias[3];
    const float **biases[3];  /* [experts] addresses in device_bias; some NULL, where bias is 0 */
    struct w4ax_experts w4ax; /* experts 0: none */
    bool same_tables;         /* of gate and up */
    void *memory;             /* all sections */
    size_t bytes;
    void *table;
};

/* Copies the sections of a matrix to l->memory + *at. memory NULL: only adds up sizes. */
static void place(struct layer *l, const struct matrix *m, struct qtool_matmul_weight *w,
                  size_t *at)
{
    const void *section[QT_MAX_SECTIONS];
    struct qt_err err = {0};
    for (size_t i = 0; i < m->packed.nsections; i++) {
        const size_t bytes = m->packed.section[i].bytes;
        section[i] = (char *)l->memory + *at;
        if (l->memory)
            CHECK(cudaMemcpy((char *)l->memory + *at, m->packed.section[i].data, bytes,
                             cudaMemcpyHostToDevice));
        *at += qt_round_up(bytes, 16);
    }
    if (l->memory && qt_gpu_weight(w, &m->packed, section, &err) < 0) {
        printf("%s: %s\n", m->packed.spec.text, err.reason);
        exit(1);
    }
}

/* Gives matrices `i` of the layer biases of outputs [n]. */
static void bias_new(struct layer *l, int i, size_t n)
{
    l->bias[i] = calloc(l->experts * n, sizeof *l->bias[i]);
    l->biases[i] = calloc(l->experts, sizeof *l->biases[i]);
    for (size_t e = 0; e < l->experts; e++)
        for (size_t j = 0; j < n && e % 5 != 3; j++)
            l->bias[i][e * n + j] = 2 * random_float();
    l->device_bias[i] = upload(l->bias[i], l->experts * n * sizeof *l->bias[i]);
    for (size_t e = 0; e < l->experts; e++)
        l->biases[i][e] = e % 5 == 3 ? NULL : l->device_bias[i] + e * n;
}

static struct qtool_moe_layer described(const struct layer *l)
{
    return (struct qtool_moe_layer){l->experts,
                                    l->weight[0],
                                    l->weight[1],
                                    l->weight[2],
                                    {l->biases[0], l->biases[1], l->biases[2]},
                                    l->w4ax.experts ? &l->w4ax.described : NULL};
}

/* Biases and the table. */
static bool layer_finish(struct layer *l, const char *name)
{
    char reason[160];
    const size_t biases = random_below(8);
    for (int i = 0; i < 3; i++)
        if (biases >> i & 1)
            bias_new(l, i, i == 2 ? l->hidden : l->inner);
    const struct qtool_moe_layer layer = described(l);
    void *table = malloc(l->experts * QTOOL_MOE_TABLE_EXPERT);
    const int rc = qtool_moe_table(table, &layer, reason);
    if (rc != QTOOL_OK)
        printf("%s: %s\n", name, reason);
    l->table = upload(table, l->experts * QTOOL_MOE_TABLE_EXPERT);
    free(table);
    return rc == QTOOL_OK;
}

/* The scheme of expert e. */
static const char *scheme_of(char text[64], const char *schemes, size_t e)
{
    const char *bar = strchr(schemes, '|');
    if (!bar)
        return schemes;
    snprintf(text, 64, "%.*s", (int)(bar - schemes), schemes);
    return e % 2 ? bar + 1 : text;
}

static bool layer_new(struct layer *l, const char *scheme, const char *down, size_t experts,
                      size_t hidden, size_t inner)
{
    *l = (struct layer){.experts = experts,
                        .hidden = hidden,
                        .inner = inner,
                        .same_tables = strncmp(scheme, "lut", 3) != 0};
    for (int i = 0; i < 3; i++) {
        l->matrix[i] = calloc(experts, sizeof *l->matrix[i]);
        l->weight[i] = calloc(experts, sizeof *l->weight[i]);
        for (size_t e = 0; e < experts; e++) {
            const size_t n = i == 2 ? hidden : inner, k = i == 2 ? inner : hidden;
            struct matrix *m = &l->matrix[i][e];
            char text[64];
            m->decoded = packed_random(&m->packed, scheme_of(text, i == 2 ? down : scheme, e), n, k,
                                       1.5f / sqrtf((float)k));
        }
    }
    for (int pass = 0; pass < 2; pass++) {
        size_t at = 0;
        for (int i = 0; i < 3; i++)
            for (size_t e = 0; e < experts; e++)
                place(l, &l->matrix[i][e], &l->weight[i][e], &at);
        l->bytes = at;
        if (pass == 0)
            l->memory = gpu_alloc(at);
    }
    return layer_finish(l, scheme);
}

static bool w4ax_layer_new(struct layer *l, enum qtool_w4ax_scales scales, size_t experts,
                           size_t hidden, size_t inner)
{
    float **decoded[3];
    *l = (struct layer){.experts = experts, .hidden = hidden, .inner = inner};
    for (int i = 0; i < 3; i++) {
        l->matrix[i] = calloc(experts, sizeof *l->matrix[i]);
        decoded[i] = calloc(experts, sizeof *decoded[i]);
    }
    w4ax_experts_new(&l->w4ax, decoded, scales, experts, hidden, inner);
    for (int i = 0; i < 3; i++) {
        for (size_t e = 0; e < experts; e++)
            l->matrix[i][e].decoded = decoded[i][e];
        free(decoded[i]);
    }
    return layer_finish(l, "w4ax");
}

static void layer_free(struct layer *l)
{
    if (l->w4ax.experts)
        w4ax_experts_free(&l->w4ax);
    for (int i = 0; i < 3; i++) {
        for (size_t e = 0; e < l->experts; e++) {
            qt_packed_free(&l->matrix[i][e].packed);
            free(l->matrix[i][e].decoded);
        }
        free(l->matrix[i]);
        free(l->weight[i]);
        free(l->bias[i]);
        free(l->biases[i]);
        CHECK(cudaFree(l->device_bias[i]));
    }
    CHECK(cudaFree(l->memory));
    CHECK(cudaFree(l->table));
}

/* ---- reference ------------------------------------------------------------------------------ */

struct routing {
    size_t tokens, topk, first;
    int *ids;       /* [tokens][topk] */
    float *weights; /* [tokens][topk] */
};

static double activation(enum qtool_moe_activation kind, double g, double u)
{
    if (kind == QTOOL_MOE_SILU)
        return u * g / (1 + exp(-g));
    if (kind == QTOOL_MOE_CLAMPED) {
        g = fmin(g, 7);
        return (fmax(fmin(u, 7), -7) + 1) * g / (1 + exp(-1.702 * g));
    }
    return 0.5 * u * g * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (g + 0.044715 * g * g * g)));
}

/* Bias of output i of matrix m of expert e. */
static double bias_of(const struct layer *l, int m, size_t e, size_t i)
{
    return l->bias[m] ? (double)l->bias[m][e * (m == 2 ? l->hidden : l->inner) + i] : 0;
}

static double dot(const float *w, const double *x, size_t k)
{
    double sum = 0;
    for (size_t i = 0; i < k; i++)
        sum += (double)w[i] * x[i];
    return sum;
}

/* y[hidden] of one token. Intermediate values are rounded to the dtype, as the kernels do. w4ax: x
 * is overwritten. */
static void reference(double *y, const struct layer *l, const struct routing *r, size_t token,
                      double *x, double *inner, const struct qtool_moe_options *opt)
{
    const int bf16 = opt->dtype == QTOOL_BF16;
    /* Threads wait for each other longer than a small layer takes, most of all on a busy machine. */
    const bool threads = l->hidden * l->inner > 1 << 18;
    memset(y, 0, l->hidden * sizeof *y);
    if (l->w4ax.experts)
        w4ax_experts_quantize(x, x, &l->w4ax, -1);
    for (size_t j = 0; j < r->topk; j++) {
        const long e = (long)r->ids[token * r->topk + j] - (long)r->first;
        if (e < 0 || e >= (long)l->experts)
            continue;
#pragma omp parallel for if (threads)
        for (size_t i = 0; i < l->inner; i++) {
            const double g = dot(l->matrix[0][e].decoded + i * l->hidden, x, l->hidden) +
                             bias_of(l, 0, (size_t)e, i);
            const double u = dot(l->matrix[1][e].decoded + i * l->hidden, x, l->hidden) +
                             bias_of(l, 1, (size_t)e, i);
            inner[i] = to_float(from_float((float)activation(opt->activation, g, u), bf16), bf16);
        }
        if (l->w4ax.experts)
            w4ax_experts_quantize(inner, inner, &l->w4ax, e);
#pragma omp parallel for if (threads)
        for (size_t i = 0; i < l->hidden; i++)
            y[i] += (double)r->weights[token * r->topk + j] *
                    (dot(l->matrix[2][e].decoded + i * l->inner, inner, l->inner) +
                     bias_of(l, 2, (size_t)e, i));
    }
}

/* ---- checks --------------------------------------------------------------------------------- */

enum route { EVEN, ONE_EXPERT, FEW_EXPERTS, TWICE, OTHER_DEVICES, ROUTES, EDGES = ROUTES };
static const char *const route_names[] = {
    "even", "one expert", "few experts", "twice", "experts of other devices", "edges of tiles"};
/* Tokens of each expert with EDGES: around the tiles of the kernel by wgmma. */
static const size_t edges[] = {0, 1, 127, 128, 129, 255, 256, 257, 513, 33, 65, 193};

static size_t edge_tokens(void)
{
    size_t tokens = 0;
    for (size_t e = 0; e < COUNT(edges); e++)
        tokens += edges[e];
    return tokens;
}

/* Gives expert e edges[e] tokens, in random order; every token has one choice. */
static void route_edges(struct routing *r)
{
    size_t token = 0;
    for (size_t e = 0; e < COUNT(edges); e++)
        for (size_t i = 0; i < edges[e]; i++)
            r->ids[token++] = (int)e;
    for (size_t i = r->tokens; i > 1; i--) {
        const size_t j = random_bits() % i;
        const int other = r->ids[j];
        r->ids[j] = r->ids[i - 1];
        r->ids[i - 1] = other;
    }
}

static void routing_new(struct routing *r, size_t experts, enum route route)
{
    const size_t pairs = r->tokens * r->topk;
    r->ids = malloc((pairs + 1) * sizeof *r->ids);
    r->weights = malloc((pairs + 1) * sizeof *r->weights);
    r->first = route == OTHER_DEVICES ? 1 + random_below(5) : 0;
    for (size_t i = 0; i < pairs; i++) {
        const size_t token = i / r->topk, j = i % r->topk;
        size_t e = (random_bits() % experts);
        if (route == EVEN)
            e = (token * r->topk + j) % experts;
        else if (route == ONE_EXPERT)
            e = experts - 1;
        else if (route == FEW_EXPERTS)
            e = random_below(experts / 3 + 1) * (experts > 2 ? 2 : 1);
        else if (route == TWICE)
            e = (token + j / 2) % experts;
        r->ids[i] = route == OTHER_DEVICES ? (int)random_below(experts + 8) - 1 : (int)e;
        r->weights[i] = random_float() + 0.1f;
    }
    if (route == EDGES)
        route_edges(r);
}

static struct {
    uint16_t *y[3];
    double worst[4]; /* FP16, BF16; the same of w4ax */
    int graphs, many;
} pool;

static int run(const struct qtool_moe_plan *p, const struct layer *l, uint16_t *y, const void *x,
               const int *ids, const float *weights, bool graph)
{
    void *space = workspace_of(p->workspace_bytes);
    cudaStream_t stream;
    cudaGraph_t captured;
    cudaGraphExec_t exec;
    if (!graph)
        return qtool_moe_run(p, l->table, y, x, ids, weights, space, NULL);
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    const int rc = qtool_moe_run(p, l->table, y, x, ids, weights, space, stream);
    CHECK(cudaStreamEndCapture(stream, &captured));
    CHECK(cudaGraphInstantiate(&exec, captured, 0));
    CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < 2; i++) /* the second replay reuses the workspace */
        CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(captured));
    CHECK(cudaStreamDestroy(stream));
    pool.graphs++;
    return rc;
}

/* Runs the plan three times. Returns NULL or what was wrong; *y: the outputs in host memory. */
static const char *runs_fault(uint16_t **y, const struct qtool_moe_plan *p, const struct layer *l,
                              const void *x, const int *ids, const float *weights)
{
    const size_t count = p->tokens * p->hidden, all = count + 2 * GUARD;
    uint16_t *out[3] = {NULL, NULL, NULL};
    const char *fault = NULL;
    for (int i = 0; i < 3; i++) {
        CHECK(cudaMemset(pool.y[i], 0xff, all * 2));
        const int rc = run(p, l, pool.y[i] + GUARD, x, ids, weights, i == 2);
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        if (rc != QTOOL_OK)
            fault = "run refused";
        else if (!workspace_kept(p->workspace_bytes))
            fault = "writes outside the workspace, or counters that are not zero";
        out[i] = download(pool.y[i], all * 2);
        for (size_t g = 0; g < GUARD; g++)
            if (out[i][g] != 0xffff || out[i][GUARD + count + g] != 0xffff)
                fault = "writes outside the output";
    }
    if (!fault && memcmp(out[0], out[1], all * 2) != 0)
        fault = "a second run differs";
    if (!fault && memcmp(out[0], out[2], all * 2) != 0)
        fault = "a graph differs";
    *y = out[0];
    free(out[1]);
    free(out[2]);
    return fault;
}

/* Checks tokens against the reference: of large layers some, the first and the last among them. */
static double error_of(const uint16_t *y, const struct layer *l, const struct routing *r,
                       const uint16_t *x, const struct qtool_moe_options *opt)
{
    const int bf16 = opt->dtype == QTOOL_BF16;
    const size_t weights = l->hidden * l->inner;
    const size_t most = weights > 1 << 20 ? 6 : weights > 1 << 15 ? 24 : r->tokens + 1;
    const size_t step = r->tokens > most ? r->tokens / most : 1;
    double *row = malloc(l->hidden * sizeof *row), *want = malloc(l->hidden * sizeof *want);
    double *inner = malloc(l->inner * sizeof *inner), error = 0, size = 0;
    for (size_t t = 0; t < r->tokens;
         t += t + 1 < r->tokens && t + step >= r->tokens ? r->tokens - 1 - t : step) {
        for (size_t i = 0; i < l->hidden; i++)
            row[i] = to_float(x[t * l->hidden + i], bf16);
        reference(want, l, r, t, row, inner, opt);
        for (size_t i = 0; i < l->hidden; i++) {
            const double d = to_float(y[GUARD + t * l->hidden + i], bf16) - want[i];
            error += d * d;
            size += want[i] * want[i];
        }
    }
    free(row);
    free(want);
    free(inner);
    return size > 0 ? sqrt(error / size) : sqrt(error);
}

static void check_layer(const struct layer *l, const char *name, size_t tokens, size_t topk,
                        enum route route, int bf16)
{
    struct routing r = {.tokens = tokens, .topk = topk};
    char what[400];
    routing_new(&r, l->experts, route);
    const struct qtool_moe_options opt = {.dtype = bf16 ? QTOOL_BF16 : QTOOL_F16,
                                          .activation = (enum qtool_moe_activation)random_below(3),
                                          .topk = topk,
                                          .first_expert = r.first,
                                          .same_tables = l->same_tables && random_below(2),
                                          .dependent_launch = (int)random_below(2)};
    const struct qtool_moe_layer layer = described(l);
    struct qtool_moe_plan plan;
    const size_t count = tokens * l->hidden;
    const int rc = qtool_moe_plan(&plan, &layer, tokens, &opt);
    const char *fault = rc == QTOOL_OK ? NULL : plan.reason;
    double error = 0;
    if (!fault && plan.workspace_bytes > workspace.bytes) {
        printf("SKIPPED %s: %zu bytes of workspace\n", name, plan.workspace_bytes);
        skipped++;
    } else if (!fault) {
        uint16_t *x = malloc((count + 1) * sizeof *x), *y = NULL;
        for (size_t i = 0; i < count; i++)
            x[i] = from_float(3 * random_float(), bf16);
        void *dx = upload(x, count * 2);
        void *ids = upload(r.ids, tokens * topk * sizeof *r.ids);
        void *weights = upload(r.weights, tokens * topk * sizeof *r.weights);
        fault = runs_fault(&y, &plan, l, dx, ids, weights);
        error = error_of(y, l, &r, x, &opt);
        /* w4ax: a value between the products that is rounded otherwise than in the reference may
         * have another code. A step of 4 bits is half the RMS of the values, or 4 % of a token's
         * output if there are 128 of them. */
        const double limit = l->w4ax.experts ? 2e-2 : bf16 ? 6e-3 : 8e-4;
        double *const worst = &pool.worst[bf16 + (l->w4ax.experts ? 2 : 0)];
        if (isnan(error) || error > *worst)
            *worst = error;
        if (!fault && !(error <= limit))
            fault = "error";
        pool.many += tokens > 64;
        CHECK(cudaFree(dx));
        CHECK(cudaFree(ids));
        CHECK(cudaFree(weights));
        free(x);
        free(y);
    }
    snprintf(what, sizeof what,
             "%s, %zu experts, hidden %zu, inner %zu, %zu tokens, top %zu, %s, %s: %s (error %.2e)",
             name, l->experts, l->hidden, l->inner, tokens, topk, route_names[route],
             bf16 ? "bf16" : "f16", fault ? fault : "", error);
    result(!fault, what);
    free(r.ids);
    free(r.weights);
}

/* ---- cases ---------------------------------------------------------------------------------- */

/* Schemes of gate and up, and of down; a|b: of even and odd experts. */
static const char *const schemes[][2] = {
    {"nf4:g=128,method=rtn", "nf4:g=128,method=rtn"},
    {"lut4:g=64", "lut4:g=32"},
    {"nf3:g=64,method=rtn", "lut3:g=32"},
    {"lut2:g=256", "nf2:g=64,method=rtn"},
    {"int4:g=128,method=rtn", "int4:g=32,method=rtn"},
    {"int4:g=64,zero=group,method=rtn", "int4:g=128,zero=group,method=rtn"},
    {"int4:g=32,zero=group,method=rtn", "int4:g=0,zero=group,method=rtn"},
    {"int8:method=rtn", "int8:g=64,method=rtn"},
    {"int8:g=32,zero=group,method=rtn", "int8:g=0,method=rtn"},
    {"fp6:e=3,method=rtn", "fp6:e=2,method=rtn"},
    {"fp5:e=2,method=rtn", "fp4:e=2,method=rtn"},
    {"fp7:method=rtn", "fp8:method=rtn"},
    {"fp8:e=5,method=rtn", "fp5:e=2,method=rtn"},
    {"fpx:bits=3,e=1,method=rtn", "fpx:bits=6,e=4,method=rtn"},
    {"fpx:bits=5,e=3,method=rtn", "fpx:bits=7,e=2,method=rtn"},
    {"fpx:bits=8,e=3,method=rtn", "fp6:e=3,method=rtn"},
    {"int4:g=128,method=rtn", "nf4:g=128,method=rtn"},
    {"fp6:e=3,method=rtn", "int8:method=rtn"},
    {"mix24:method=rtn", "mix24:method=rtn|mix24:method=rtn,outliers=0"},
    {"mix24:method=rtn,outliers=0.03", "mix24:method=rtn,outliers=0.03,four=0"},
    {"mix24:method=rtn,four=1", "mix24:method=rtn,outliers=0,four=0.5"},
    {"mix24:method=rtn,outliers=0", "mix24:method=rtn,outliers=0.01,four=0.75"},
};

/* Experts, hidden size, intermediate size. */
static const size_t shapes[][3] = {
    {1, 64, 16}, {8, 256, 128}, {5, 200, 72}, {3, 129, 33}, {17, 320, 304}, {64, 128, 64},
};
/* Tokens and choices. */
static const size_t loads[][2] = {{0, 2},  {1, 1},  {1, 8},  {2, 3},   {7, 2},
                                  {16, 4}, {33, 1}, {40, 6}, {150, 2}, {300, 5}};

static void test_scheme(size_t s, size_t shape_step, size_t load_step)
{
    char name[128];
    snprintf(name, sizeof name, "%s and %s", schemes[s][0], schemes[s][1]);
    for (size_t i = s % shape_step; i < COUNT(shapes); i += shape_step) {
        struct layer l;
        result(
            layer_new(&l, schemes[s][0], schemes[s][1], shapes[i][0], shapes[i][1], shapes[i][2]),
            "table");
        for (size_t j = (s + i) % load_step; j < COUNT(loads); j += load_step)
            check_layer(&l, name, loads[j][0], loads[j][1], (enum route)((s + i + j) % ROUTES),
                        (int)((s + j) % 3 == 1));
        layer_free(&l);
    }
}

/* Shapes with long pipelines, all warps along k, many units per thread block. */
static void test_large(size_t s)
{
    static const size_t counts[][2] = {{1, 2}, {4, 4}, {64, 4}, {513, 3}};
    struct layer l;
    result(layer_new(&l, schemes[s][0], schemes[s][1], 6, s & 1 ? 1024 : 2048, s & 1 ? 2056 : 776),
           "table");
    for (size_t j = 0; j < COUNT(counts); j++)
        check_layer(&l, schemes[s][0], counts[j][0], counts[j][1], (enum route)((s + j) % ROUTES),
                    (int)(j % 4 == 1));
    layer_free(&l);
}

/* Tiles of all sizes, of one, two and three stages. */
static void test_edges(size_t s)
{
    static const size_t sizes[][2] = {{64, 200}, {192, 136}, {256, 64}};
    for (size_t i = 0; i < COUNT(sizes); i++) {
        struct layer l;
        result(layer_new(&l, schemes[s][0], schemes[s][1], COUNT(edges), sizes[i][0], sizes[i][1]),
               "table");
        check_layer(&l, schemes[s][0], edge_tokens(), 1, EDGES, (int)((s + i) % 3 == 1));
        layer_free(&l);
    }
}

/* Numbers of channels are multiples of 8. */
static void test_w4ax(size_t shape_step, size_t load_step, bool large)
{
    static const size_t sizes[][3] = {{1, 64, 16},    {8, 256, 128},   {5, 200, 72},
                                      {3, 136, 40},   {17, 320, 304},  {64, 128, 64},
                                      {6, 2048, 776}, {6, 1024, 2056}, {2, 384, 640}};
    static const size_t more[][2] = {{1, 2}, {4, 4}, {64, 4}, {513, 3}, {1500, 2}};
    static const char *const names[] = {"w4ax block", "w4ax int", "w4ax row"};
    for (size_t s = 0; s < COUNT(names); s++)
        for (size_t i = s % shape_step; i < COUNT(sizes); i += shape_step) {
            const bool few = i >= 6;
            struct layer l;
            if (few && !large)
                continue;
            result(w4ax_layer_new(&l, (enum qtool_w4ax_scales)s, sizes[i][0], sizes[i][1],
                                  sizes[i][2]),
                   "table");
            for (size_t j = few ? 0 : (s + i) % load_step; j < (few ? COUNT(more) : COUNT(loads));
                 j += few ? 1 : load_step) {
                const size_t *load = few ? more[j] : loads[j];
                check_layer(&l, names[s], load[0], load[1], (enum route)((s + i + j) % ROUTES),
                            (int)((s + j) % 3 == 1));
            }
            layer_free(&l);
        }
}

static void test_refusals(void)
{
    struct layer l;
    char reason[160], *table = malloc(2 * QTOOL_MOE_TABLE_EXPERT);
    struct qtool_moe_plan plan;
    struct qtool_moe_options opt = {.topk = 2};
    result(layer_new(&l, schemes[0][0], schemes[0][0], 2, 64, 32), "table");
    const struct qtool_moe_layer layer = described(&l);
    result(qtool_moe_plan(&plan, &layer, 1, &opt) == QTOOL_OK, "plan");
    void *space = workspace_of(plan.workspace_bytes);
    result(qtool_moe_run(&plan, l.table, pool.y[0] + 1, pool.y[1], (int *)pool.y[2],
                         (float *)pool.y[2], space, NULL) == QTOOL_UNSUPPORTED,
           "a misaligned output");
    opt.topk = 33;
    result(qtool_moe_plan(&plan, &layer, 1, &opt) == QTOOL_UNSUPPORTED && plan.reason[0],
           "33 experts per token");
    result(qtool_moe_run(&plan, l.table, pool.y[0], pool.y[1], (int *)pool.y[2], (float *)pool.y[2],
                         space, NULL) == QTOOL_UNSUPPORTED,
           "a refused plan");
    l.weight[1][1].group = 64;
    result(qtool_moe_table(table, &layer, reason) == QTOOL_UNSUPPORTED &&
               strstr(reason, "expert 1"),
           "experts of different formats");
    free(table);
    layer_free(&l);
}

int main(int argc, char **argv)
{
    enum { OUTPUT = 8 << 20 };
    const bool quick = check_begin(argc, argv);
    workspace_new(256 << 20);
    for (int i = 0; i < 3; i++)
        pool.y[i] = gpu_alloc(OUTPUT);
    test_refusals();
    for (size_t s = 0; s < COUNT(schemes); s++)
        test_scheme(s, quick ? 6 : 1, quick ? 5 : 2);
    for (size_t s = 0; s < COUNT(schemes); s += quick ? 5 : 1)
        test_edges(s);
    for (size_t s = 0; s < COUNT(schemes) && !quick; s += 3)
        test_large(s);
    test_w4ax(quick ? 3 : 1, quick ? 5 : 1, !quick);
    printf("relative error: FP16 %.2e, BF16 %.2e, w4ax %.2e and %.2e; %d graphs, %d with many "
           "tokens\n",
           pool.worst[0], pool.worst[1], pool.worst[2], pool.worst[3], pool.graphs, pool.many);
    return check_end();
}
