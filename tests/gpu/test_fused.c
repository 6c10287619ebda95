/*
 * Kernels of qtool_decoder.h that do the work of two launches, against these launches, bit for bit:
 * HEADS with a 4-bit cache against HEADS and qtool_kv_append, the queries and all arrays of the
 * cache after each step; ADD_NORM and ACTIVATION with w4ax codes against them and
 * qtool_w4ax_quantize.
 *
 * usage: test_fused [SEED [quick]]     prints "N passed, M failed, K skipped"
 */
#include "kernels/include/qtool_decoder.h"
#include "tests/gpu/check.h"

#include <math.h>

/* ---- heads and append ----------------------------------------------------------------------- */

/* Sequences in two caches: the first filled by one launch per step, the second by two. */
struct sequences {
    size_t count, heads, kv_heads, dim, pages, page_tokens;
    struct qtool_kv_cache cache[2];
    void *q[2], *rows[2]; /* queries of both; keys and values of two launches */
    int *sequence, *position, *table;
};

static bool coin(void)
{
    return random_bits() % 2;
}

static void *halves(size_t count)
{
    uint16_t *x = malloc(count * 2);
    for (size_t i = 0; i < count; i++)
        x[i] = from_float(random_float(), 0);
    void *p = upload(x, count * 2);
    free(x);
    return p;
}

static float *floats(size_t count)
{
    float *x = malloc(count * sizeof *x);
    for (size_t i = 0; i < count; i++)
        x[i] = random_float();
    void *p = upload(x, count * sizeof *x);
    free(x);
    return p;
}

static float *maybe(size_t count)
{
    return coin() ? floats(count) : NULL;
}

static void *zeros(size_t bytes)
{
    void *p = gpu_alloc(bytes);
    CHECK(cudaMemset(p, 0, bytes));
    return p;
}

/* Sizes of the arrays of a cache, in the order of its members. */
enum { ARRAYS = 6 };

static void sizes_of(size_t bytes[ARRAYS], const struct sequences *s)
{
    const size_t rows = s->pages * s->kv_heads * s->page_tokens, heads = s->count * s->kv_heads;
    bytes[0] = bytes[1] = rows * s->dim / 2;
    bytes[2] = rows / QTOOL_KV_GROUP * 2 * s->dim;
    bytes[3] = rows * s->dim / 8;
    bytes[4] = heads * 2 * s->dim;
    bytes[5] = heads * QTOOL_KV_GROUP * 2 * s->dim;
}

static void arrays_of(void *p[ARRAYS], const struct qtool_kv_cache *c)
{
    void *const all[ARRAYS] = {c->k, c->v, c->k_param, c->v_param, c->k_first, c->k_tail};
    memcpy(p, all, sizeof all);
}

/* A table with the pages in reverse order. */
static int *reversed(size_t pages)
{
    int *table = malloc(pages * sizeof *table);
    for (size_t i = 0; i < pages; i++)
        table[i] = (int)(pages - 1 - i);
    int *p = upload(table, pages * sizeof *table);
    free(table);
    return p;
}

static void open_sequences(struct sequences *s, size_t capacity)
{
    size_t bytes[ARRAYS];
    const bool paged = coin();
    *s = (struct sequences){
        .count = 1 + random_below(70), .kv_heads = 1 + random_below(5), .dim = coin() ? 64 : 128};
    s->heads = s->kv_heads * (1 + random_below(5));
    s->page_tokens = paged ? QTOOL_KV_GROUP : capacity;
    s->pages = s->count * (capacity / s->page_tokens);
    s->table = paged ? reversed(s->pages) : NULL;
    sizes_of(bytes, s);
    for (int i = 0; i < 2; i++) {
        s->cache[i] = (struct qtool_kv_cache){.format = QTOOL_KV_INT4,
                                              .heads = s->kv_heads,
                                              .head_dim = s->dim,
                                              .page_tokens = s->page_tokens,
                                              .table = s->table,
                                              .table_pitch = capacity / s->page_tokens,
                                              .k = zeros(bytes[0]),
                                              .v = zeros(bytes[1]),
                                              .k_param = zeros(bytes[2]),
                                              .v_param = zeros(bytes[3]),
                                              .k_first = zeros(bytes[4]),
                                              .k_tail = zeros(bytes[5])};
        s->q[i] = zeros(s->count * s->heads * s->dim * 2);
        s->rows[i] = zeros(s->count * s->kv_heads * s->dim * 2);
    }
    s->sequence = zeros(s->count * sizeof(int));
    s->position = zeros(s->count * sizeof(int));
}

static void close_sequences(struct sequences *s)
{
    void *p[ARRAYS];
    for (int i = 0; i < 2; i++) {
        arrays_of(p, &s->cache[i]);
        for (int j = 0; j < ARRAYS; j++)
            CHECK(cudaFree(p[j]));
        CHECK(cudaFree(s->q[i]));
        CHECK(cudaFree(s->rows[i]));
    }
    CHECK(cudaFree(s->sequence));
    CHECK(cudaFree(s->position));
    CHECK(cudaFree(s->table));
}

static bool same_bits(const void *a, const void *b, size_t bytes)
{
    void *x = download(a, bytes), *y = download(b, bytes);
    const bool same = memcmp(x, y, bytes) == 0;
    free(x);
    free(y);
    return same;
}

static bool same_caches(const struct sequences *s)
{
    void *a[ARRAYS], *b[ARRAYS];
    size_t bytes[ARRAYS];
    bool same = same_bits(s->q[0], s->q[1], s->count * s->heads * s->dim * 2);
    sizes_of(bytes, s);
    arrays_of(a, &s->cache[0]);
    arrays_of(b, &s->cache[1]);
    for (int i = 0; i < ARRAYS; i++)
        same = same_bits(a[i], b[i], bytes[i]) && same;
    return same;
}

static struct qtool_decoder_norm random_norm(size_t n)
{
    const bool rms = coin();
    return (struct qtool_decoder_norm){.kind = rms ? QTOOL_DECODER_RMS : QTOOL_DECODER_LAYER_NORM,
                                       .weight = maybe(n),
                                       .bias = rms ? NULL : maybe(n),
                                       .eps = 1e-5f};
}

static struct qtool_decoder_heads random_heads(const struct sequences *s, size_t capacity)
{
    const bool rope = random_below(4) != 0, all = random_below(4) == 0;
    const size_t rotary = coin() ? s->dim : 2 * (1 + random_below(s->dim / 2));
    struct qtool_decoder_heads h = {.m = s->count,
                                    .heads = s->heads,
                                    .kv_heads = s->kv_heads,
                                    .head_dim = s->dim,
                                    .q_bias = maybe(s->heads * s->dim),
                                    .k_bias = maybe(s->kv_heads * s->dim),
                                    .v_bias = maybe(s->kv_heads * s->dim),
                                    .norm_all_heads = all,
                                    .norm_last = !all && coin(),
                                    .rotary = rotary,
                                    .interleaved = coin(),
                                    .sequence = s->sequence,
                                    .position = s->position};
    h.q_stride = h.k_stride = h.v_stride = (s->heads + 2 * s->kv_heads) * s->dim;
    h.q_norm = random_norm(all ? s->heads * s->dim : s->dim);
    h.k_norm = random_norm(all ? s->kv_heads * s->dim : s->dim);
    if (rope) {
        h.q_cos = h.k_cos = floats(capacity * rotary / 2);
        h.q_sin = h.k_sin = floats(capacity * rotary / 2);
    }
    return h;
}

static void free_heads(const struct qtool_decoder_heads *h)
{
    const void *const all[] = {h->q_bias,        h->k_bias,      h->v_bias,
                               h->q_norm.weight, h->q_norm.bias, h->k_norm.weight,
                               h->k_norm.bias,   h->q_cos,       h->q_sin};
    for (size_t i = 0; i < COUNT(all); i++)
        CHECK(cudaFree((void *)(uintptr_t)all[i]));
}

/* One launch, behind a kernel that still writes what it reads, and two launches. */
static bool step(const struct sequences *s, const struct qtool_decoder_heads *h, const char *qkv)
{
    const size_t elements = s->count * h->q_stride;
    uint16_t *late = gpu_alloc(elements * 2);
    const int dependent = qtool_kernels_compute(0) == 90 && coin();
    struct qtool_decoder_op op = {.kind = QTOOL_DECODER_HEADS, .heads = *h};
    bool ran = true;
    CHECK(cudaMemset(late, 0xff, elements * 2));
    for (int i = 0; i < 2; i++) {
        const char *from = i ? qkv : (const char *)late;
        op.heads.q = from;
        op.heads.k = from + s->heads * s->dim * 2;
        op.heads.v = from + (s->heads + s->kv_heads) * s->dim * 2;
        op.heads.q_out = s->q[i];
        op.heads.kv4 = i ? NULL : &s->cache[0];
        op.heads.row_k = i ? s->rows[0] : NULL;
        op.heads.row_v = i ? s->rows[1] : NULL;
        if (i == 0)
            gpu_write_late(late, (const uint16_t *)(const void *)qkv, elements);
        ran = qtool_decoder_run(&op, i ? 0 : dependent, NULL) == QTOOL_OK && ran;
    }
    ran = qtool_kv_append(&s->cache[1], s->rows[0], s->rows[1], s->sequence, s->position, s->count,
                          QTOOL_F16, 0, NULL) == QTOOL_OK &&
          ran;
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaFree(late));
    return ran;
}

/* Sequences start at random lengths; those in front of the first step are not compared. */
static void test_steps(size_t steps)
{
    enum { CAPACITY = 256 };
    struct sequences s;
    char what[120];
    open_sequences(&s, CAPACITY);
    int *number = malloc(s.count * sizeof *number), *position = malloc(s.count * sizeof *position);
    const struct qtool_decoder_heads h = random_heads(&s, CAPACITY);
    const size_t elements = s.count * h.q_stride;
    for (size_t i = 0; i < s.count; i++) {
        number[i] = (int)(s.count - 1 - i);
        position[i] = coin() ? 0 : (int)(QTOOL_KV_GROUP * random_below(3));
    }
    CHECK(cudaMemcpy(s.sequence, number, s.count * sizeof *number, cudaMemcpyHostToDevice));
    for (size_t i = 0; i < steps; i++) {
        void *qkv = halves(elements);
        CHECK(cudaMemcpy(s.position, position, s.count * sizeof *position, cudaMemcpyHostToDevice));
        const bool ran = step(&s, &h, qkv);
        snprintf(what, sizeof what, "%zu sequences, %zux%zux%zu, step %zu%s", s.count, s.heads,
                 s.kv_heads, s.dim, i, s.table ? ", pages" : "");
        result(ran && same_caches(&s), what);
        CHECK(cudaFree(qkv));
        for (size_t j = 0; j < s.count; j++)
            position[j]++;
    }
    free(number);
    free(position);
    free_heads(&h);
    close_sequences(&s);
}

static void test_refusals(void)
{
    struct sequences s;
    open_sequences(&s, QTOOL_KV_GROUP);
    const struct qtool_decoder_heads h = random_heads(&s, QTOOL_KV_GROUP);
    struct qtool_decoder_op op = {.kind = QTOOL_DECODER_HEADS, .heads = h};
    struct qtool_kv_cache other = s.cache[0];
    op.heads.kv4 = &other;
    op.heads.row_k = s.rows[0];
    result(qtool_decoder_run(&op, 0, NULL) == QTOOL_UNSUPPORTED, "rows of keys beside the cache");
    op.heads.row_k = NULL;
    other.format = QTOOL_KV_F16;
    result(qtool_decoder_run(&op, 0, NULL) == QTOOL_UNSUPPORTED, "a cache without quantization");
    other = s.cache[0];
    other.heads++;
    result(qtool_decoder_run(&op, 0, NULL) == QTOOL_UNSUPPORTED, "another number of heads");
    other = s.cache[0];
    other.k_tail = NULL;
    result(qtool_decoder_run(&op, 0, NULL) == QTOOL_UNSUPPORTED, "no tail");
    free_heads(&h);
    close_sequences(&s);
}

/* ---- codes of linear inputs ------------------------------------------------------------------ */

/* Inputs of m tokens and n channels, quantized in both ways. */
struct coded {
    size_t m, n, blocks, code_bytes;
    struct qtool_w4ax_input input;
    struct qtool_w4ax_acts acts[2];
    void *out;
};

static uint32_t *random_permutation(size_t n)
{
    uint32_t *order = malloc(n * sizeof *order);
    for (size_t i = 0; i < n; i++)
        order[i] = (uint32_t)i;
    for (size_t i = n; i > 1; i--) {
        const size_t j = random_below(i);
        const uint32_t t = order[i - 1];
        order[i - 1] = order[j];
        order[j] = t;
    }
    uint32_t *p = upload(order, n * sizeof *order);
    free(order);
    return p;
}

static void open_coded(struct coded *c)
{
    const enum qtool_w4ax_scales scales =
        coin() ? QTOOL_W4AX_BLOCK : (enum qtool_w4ax_scales)random_below(3);
    const int packed = scales == QTOOL_W4AX_BLOCK && coin();
    *c = (struct coded){.m = 1 + random_below(coin() ? 3 : 300),
                        .n = random_below(4) ? 256 * (1 + random_below(32))
                                             : 8 * (1 + random_below(2000))};
    c->blocks = (c->n + 127) / 128;
    uint8_t *bits = malloc(c->blocks);
    uint32_t *words = malloc(c->blocks * sizeof *words);
    for (size_t i = 0; i < c->blocks; i++)
        bits[i] = coin() ? 4 : 8;
    c->code_bytes = c->m * qtool_w4ax_blocks(words, bits, c->blocks, packed);
    c->input = (struct qtool_w4ax_input){.scales = scales,
                                         .k = c->n,
                                         .blocks = upload(words, c->blocks * sizeof *words),
                                         .perm = coin() ? random_permutation(c->n) : NULL,
                                         .clip4 = coin() ? 1 : .9f,
                                         .clip8 = 1,
                                         .packed = packed,
                                         .rotation =
                                             coin() ? QTOOL_W4AX_HADAMARD : QTOOL_W4AX_NO_ROTATION};
    free(bits);
    free(words);
    for (int i = 0; i < 2; i++) {
        c->acts[i].codes = zeros(c->code_bytes);
        c->acts[i].scale = zeros(c->blocks * (c->m + 3) * sizeof(float));
        c->acts[i].sum = zeros(c->m * sizeof(int));
    }
    c->out = zeros(c->m * c->n * 2);
}

static void close_coded(struct coded *c)
{
    for (int i = 0; i < 2; i++) {
        CHECK(cudaFree(c->acts[i].codes));
        CHECK(cudaFree(c->acts[i].scale));
        CHECK(cudaFree(c->acts[i].sum));
    }
    CHECK(cudaFree(c->out));
    CHECK(cudaFree((void *)(uintptr_t)c->input.blocks));
    CHECK(cudaFree((void *)(uintptr_t)c->input.perm));
}

static bool same_codes(const struct coded *c)
{
    return same_bits(c->acts[0].codes, c->acts[1].codes, c->code_bytes) &&
           same_bits(c->acts[0].scale, c->acts[1].scale, c->blocks * (c->m + 3) * sizeof(float)) &&
           same_bits(c->acts[0].sum, c->acts[1].sum, c->m * sizeof(int));
}

/* Runs both ways: with codes, behind a kernel that still writes the operand, from `x` to `late`;
 * and apart. */
static bool run_coded(struct coded *c, const struct qtool_decoder_op op[2], void *late,
                      const void *x, size_t elements)
{
    const int dependent = qtool_kernels_compute(0) == 90 && coin();
    c->input.dependent_launch = dependent;
    gpu_write_late(late, x, elements);
    bool ran = qtool_decoder_run(&op[0], dependent, NULL) == QTOOL_OK;
    c->input.dependent_launch = 0;
    ran = qtool_decoder_run(&op[1], 0, NULL) == QTOOL_OK && ran;
    ran = qtool_w4ax_quantize(&c->acts[1], &c->input, NULL, c->out, c->m, QTOOL_F16, NULL) ==
              QTOOL_OK &&
          ran;
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    return ran;
}

static void report(const struct coded *c, bool good, const char *kind)
{
    char what[160];
    snprintf(what, sizeof what, "%s and codes, m=%zu n=%zu, scales %d, %s", kind, c->m, c->n,
             (int)c->input.scales, c->input.perm ? "gathered" : "in order");
    result(good, what);
}

static void test_norm(void)
{
    struct coded c;
    open_coded(&c);
    const size_t count = c.m * c.n;
    uint16_t *addend = halves(count), *late = zeros(count * 2);
    float *weight = floats(c.n), *bias = maybe(c.n), *hidden[2] = {floats(count)};
    struct qtool_decoder_op op[2] = {{.kind = QTOOL_DECODER_ADD_NORM}};
    hidden[1] = zeros(count * sizeof(float));
    CHECK(cudaMemcpy(hidden[1], hidden[0], count * sizeof(float), cudaMemcpyDeviceToDevice));
    op[0].add_norm = (struct qtool_decoder_add_norm){
        .m = c.m,
        .n = c.n,
        .step = 1,
        .hidden = hidden[0],
        .add = {{.x = late, .bias = bias}},
        .factor = 1,
        .norm = {.kind = QTOOL_DECODER_RMS, .weight = weight, .eps = 1e-5f},
        .out = c.out,
        .w4ax = &c.input,
        .acts = c.acts[0]};
    op[1] = op[0];
    op[1].add_norm.hidden = hidden[1];
    op[1].add_norm.add[0].x = addend;
    op[1].add_norm.w4ax = NULL;
    const bool ran = run_coded(&c, op, late, addend, count);
    report(&c, ran && same_codes(&c) && same_bits(hidden[0], hidden[1], count * sizeof(float)),
           "add_norm");
    void *const all[] = {addend, late, weight, bias, hidden[0], hidden[1]};
    for (size_t i = 0; i < COUNT(all); i++)
        CHECK(cudaFree(all[i]));
    close_coded(&c);
}

static void test_activation(void)
{
    struct coded c;
    open_coded(&c);
    const size_t count = 2 * c.m * c.n; /* gate and up of each token */
    uint16_t *x = halves(count), *late = zeros(count * 2);
    float *gate_bias = maybe(c.n), *up_bias = maybe(c.n), *token_gate = maybe(c.m);
    struct qtool_decoder_op op[2] = {{.kind = QTOOL_DECODER_ACTIVATION}};
    op[0].activation =
        (struct qtool_decoder_activation){.act = (enum qtool_decoder_act)random_below(7),
                                          .m = c.m,
                                          .n = c.n,
                                          .gate = late,
                                          .up = late + c.n,
                                          .gate_stride = 2 * c.n,
                                          .up_stride = 2 * c.n,
                                          .gate_bias = gate_bias,
                                          .up_bias = up_bias,
                                          .token_gate = token_gate,
                                          .token_gate_stride = 1,
                                          .out = c.out,
                                          .w4ax = &c.input,
                                          .acts = c.acts[0]};
    if (op[0].activation.act != QTOOL_DECODER_CLAMPED && coin())
        op[0].activation.up = NULL;
    op[1] = op[0];
    op[1].activation.gate = x;
    op[1].activation.up = op[0].activation.up ? x + c.n : NULL;
    op[1].activation.w4ax = NULL;
    report(&c, run_coded(&c, op, late, x, count) && same_codes(&c), "activation");
    void *const all[] = {x, late, gate_bias, up_bias, token_gate};
    for (size_t i = 0; i < COUNT(all); i++)
        CHECK(cudaFree(all[i]));
    close_coded(&c);
}

int main(int argc, char **argv)
{
    const bool quick = check_begin(argc, argv);
    test_refusals();
    for (int i = 0; i < (quick ? 3 : 16); i++)
        test_steps(quick ? 3 : 70);
    for (int i = 0; i < (quick ? 12 : 200); i++) {
        test_norm();
        test_activation();
    }
    return check_end();
}
