/* w4ax containers: models round linear inputs as the sections define, and invalid sections are
 * refused. The seed is printed; set QT_SEED to repeat a run. */
#include "fixture.h"

#include "kernels/kernels.h"
#include "pack/schemes/scheme.h"
#include "tests/rotate.h"

#include <math.h>
#include <time.h>

enum { SEQLEN = 24, SAMPLES = 4, TOKENS = SEQLEN * SAMPLES };

static const char down[] = "model.layers.0.mlp.down_proj.weight";

static uint64_t seed;
static uint32_t ids[TOKENS];

static void random_ids(size_t vocab)
{
    for (size_t i = 0; i < TOKENS; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        ids[i] = (uint32_t)(seed >> 33) % (uint32_t)vocab;
    }
}

/* A container DIR/out of the golden model, with backend and model to run it. */
struct world {
    char *dir;
    struct qt_backend *be;
    struct qt_container *c;
    struct qt_model *model;
    struct qt_err err;
};

static void quantize(struct world *w, const char *scheme, const struct qt_rule *rule)
{
    const char *source = "tests/golden/models/llama", *out = fixture_path(w->dir, "out");
    struct qt_quantize_report report;
    struct qt_ckpt *ckpt;
    expect_ok(source, qt_ckpt_open(&ckpt, source, &w->err), &w->err);
    struct qt_weights weights = qt_weights_of_ckpt(ckpt);
    expect_ok(source, qt_model_open(&w->model, &weights, &w->err), &w->err);
    random_ids(qt_model_info(w->model)->vocab);
    qt_model_close(w->model);
    struct qt_calibration data = {
        .ids = ids, .samples = SAMPLES, .seqlen = SEQLEN, .backend = w->be};
    struct qt_quantize_options opt = {
        .plan = {.scheme = scheme, .rules = rule, .nrules = rule != NULL, .calibrated = true},
        .calibration = &data,
        .out_dir = out};
    expect_ok(scheme, qt_quantize(&report, ckpt, &opt, &w->err), &w->err);
    json_decref(report.document);
    qt_ckpt_close(ckpt);
}

static void world_open(struct world *w, const char *scheme, const struct qt_rule *rule)
{
    *w = (struct world){.dir = fixture_dir()};
    expect_ok("backend", qt_backend_cpu_open(&w->be, &w->err), &w->err);
    quantize(w, scheme, rule);
    expect_ok("open", qt_container_open(&w->c, fixture_path(w->dir, "out"), &w->err), &w->err);
    struct qt_weights weights = qt_weights_of_container(w->c);
    expect_ok("model", qt_model_open(&w->model, &weights, &w->err), &w->err);
}

static void world_close(struct world *w)
{
    qt_model_close(w->model);
    qt_container_close(w->c);
    w->be->close(w->be);
    assert_int_equal(qt_dir_remove(fixture_path(w->dir, "out"), NULL), QT_OK);
    fixture_remove(w->dir);
}

/* ---- running -------------------------------------------------------------------------------- */

static const void *data_of(const struct qt_packed *p, const char *section)
{
    return qt_packed_section(p, section)->data;
}

/* Rounds a channel block x'[n] of a token as docs/schemes.md defines; t: absmax of the token. */
static void round_block(float *x, size_t n, unsigned bits, float clip, float t, double scales)
{
    float a = 0, unit = t * (float)(1.0 / 127), s, top = bits == 4 ? 7 : 127;
    for (size_t i = 0; i < n; i++)
        a = fmaxf(a, fabsf(x[i]));
    if (scales == QT_ACT_SCALES_BLOCK)
        s = a * (bits == 4 ? (float)((double)clip / 7) : (float)(1.0 / 127));
    else
        s = bits == 8 ? unit : unit * fminf(fmaxf(rintf(a * clip / (7 * unit)), 1), 18);
    for (size_t i = 0; i < n; i++)
        x[i] = s < 0x1p-120f ? 0 : s * fminf(fmaxf((float)rint((double)x[i] * (1 / s)), -top), top);
}

static int reference_input(void *ctx, struct qt_backend *be, float *y, const float *x,
                           const struct qt_linear *linear, size_t m, size_t k, struct qt_err *err)
{
    struct world *w = ctx;
    const struct qt_entry *e = qt_container_find(w->c, linear->weight);
    struct qt_packed p;
    float stored[512], clip;
    (void)be; /* backend memory is host memory */
    assert_true(k <= 512);
    memcpy(y, x, m * k * sizeof *x);
    if (strncmp(e->spec, "w4ax", 4) != 0)
        return QT_OK;
    expect_ok(linear->weight, qt_packed_open(&p, w->c, e, err), err);
    const uint32_t *order = data_of(&p, "col_order");
    const int8_t *exp2 = data_of(&p, "col_exp2");
    const uint8_t *bits = data_of(&p, "bits");
    memcpy(&clip, data_of(&p, "clip"), sizeof clip);
    for (size_t t = 0; t < m; t++) {
        float all = 0;
        for (size_t i = 0; i < k; i++)
            stored[i] = ldexpf(x[t * k + order[i]], -exp2[i]);
        if (qt_spec_value(&p.spec, "rotate") != 0)
            rotate_reference(stored, k);
        for (size_t i = 0; i < k; i++)
            all = fmaxf(all, fabsf(stored[i]));
        for (size_t at = 0; at < k; at += QT_ACT_BLOCK)
            round_block(stored + at, qt_min_size(QT_ACT_BLOCK, k - at), bits[at / QT_ACT_BLOCK],
                        clip, all, qt_spec_value(&p.spec, "scales"));
        if (qt_spec_value(&p.spec, "rotate") != 0)
            rotate_reference(stored, k);
        for (size_t i = 0; i < k; i++)
            y[t * k + order[i]] = ldexpf(stored[i], exp2[i]);
    }
    qt_packed_free(&p);
    return QT_OK;
}

/* Returns the hidden states after the last decoder layer. */
static float *run_model(struct world *w, const struct qt_weights *weights)
{
    float *hidden = calloc(TOKENS * qt_model_info(w->model)->hidden, sizeof *hidden);
    struct qt_embed_head *head;
    expect_ok("head", qt_embed_head_open(&head, w->model, weights, w->be, &w->err), &w->err);
    expect_ok("embed", qt_embed_tokens(head, hidden, ids, TOKENS, SEQLEN, &w->err), &w->err);
    for (size_t l = 0; l < qt_model_info(w->model)->layers; l++) {
        struct qt_layer *layer;
        expect_ok("open", qt_layer_open(&layer, w->model, l, weights, w->be, &w->err), &w->err);
        expect_ok("run", qt_layer_run(layer, hidden, TOKENS, SEQLEN, NULL, &w->err), &w->err);
        qt_layer_close(layer);
    }
    qt_embed_head_close(head);
    return hidden;
}

/* The first container also has linears of another scheme, whose inputs are not rounded. */
static void models_round_as_documented(void **state)
{
    static const struct qt_rule rule = {"[qkv]_proj", "nf4:g=32"};
    static const char *const schemes[] = {"w4ax:a8max=0.5", "w4ax:scales=int", "w4ax:scales=row",
                                          "w4ax:rotate=none"};
    (void)state;
    for (size_t i = 0; i < sizeof schemes / sizeof *schemes; i++) {
        struct world w;
        world_open(&w, schemes[i], i ? NULL : &rule);
        struct qt_weights own = qt_weights_of_container(w.c), slow = own, plain = own;
        slow.fake_quant = (struct qt_fake_quant){.ctx = &w, .input = reference_input};
        plain.fake_quant = (struct qt_fake_quant){0};
        float *a = run_model(&w, &own), *b = run_model(&w, &slow), *c = run_model(&w, &plain);
        size_t bytes = TOKENS * qt_model_info(w.model)->hidden * sizeof *a;
        assert_memory_equal(a, b, bytes);
        assert_true(memcmp(a, c, bytes) != 0);
        free(a);
        free(b);
        free(c);
        world_close(&w);
    }
}

/* Sets the format version of a manifest and replaces `from` in the scheme of every tensor. */
static void edit_manifest(const char *path, int version, const char *from, const char *to)
{
    json_t *root = json_load_file(path, 0, NULL), *entry;
    const char *name;
    assert_non_null(root);
    assert_int_equal(json_object_set_new(root, "format_version", json_integer(version)), 0);
    json_object_foreach (json_object_get(root, "tensors"), name, entry) {
        char text[QT_SPEC_TEXT];
        const char *scheme = json_string_value(json_object_get(entry, "scheme"));
        const char *at = strstr(scheme, from);
        assert_non_null(at);
        snprintf(text, sizeof text, "%.*s%s%s", (int)(at - scheme), scheme, to, at + strlen(from));
        assert_int_equal(json_object_set_new(entry, "scheme", json_string(text)), 0);
    }
    assert_int_equal(json_dump_file(root, path, 0), 0);
    json_decref(root);
}

static void format_versions_are_checked(void **state)
{
    static const char rotate[] = ",rotate=hadamard";
    static const struct {
        int version;
        const char *from, *to, *message;
    } cases[] = {{1, rotate, rotate, "format version 1 has no parameter 'rotate'"},
                 {2, rotate, "", "lacks the parameter 'rotate'"},
                 {2, "=gptq", "=gptq,rotate=fourier", "'fourier'"},
                 {1, "fourier", "none", "format version 1 has no parameter 'rotate'"},
                 {1, ",rotate=none", "", "does not match scheme"}};
    struct world w;
    (void)state;
    world_open(&w, "w4ax", NULL);
    assert_int_equal(qt_container_version(w.c), 2);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct qt_container *c;
        struct qt_packed p;
        edit_manifest(fixture_path(w.dir, "out/qtool.json"), cases[i].version, cases[i].from,
                      cases[i].to);
        expect_ok("open", qt_container_open(&c, fixture_path(w.dir, "out"), &w.err), &w.err);
        int rc = qt_packed_open(&p, c, qt_container_find(c, down), &w.err);
        expect_error(cases[i].message, rc, QT_E_INPUT, cases[i].message, &w.err);
        qt_container_close(c);
    }
    world_close(&w);
}

static void other_schemes_are_left_alone(void **state)
{
    static const struct qt_rule rule = {"v_proj", "none"};
    struct world w;
    (void)state;
    world_open(&w, "nf4:g=32", &rule);
    assert_null(qt_container_find(w.c, "model.layers.0.self_attn.v_proj.weight"));
    assert_non_null(qt_container_find(w.c, down));
    assert_null(qt_weights_of_container(w.c).fake_quant.input);
    world_close(&w);
}

/* ---- entries -------------------------------------------------------------------------------- */

static size_t find_section(const struct qt_entry *e, const char *name)
{
    for (size_t i = 0; i < e->nsections; i++)
        if (strcmp(e->section[i].name, name) == 0)
            return i;
    fail_msg("%s has no section %s", e->name, name);
    return 0;
}

/* Returns the offset of the section's data in the container's file. */
static size_t offset_of(const struct world *w, const struct qt_entry *e, const char *section)
{
    struct qt_blob blob;
    struct qt_err err = {0};
    const struct qt_tensor *t = e->section[find_section(e, section)].tensor;
    expect_ok(section, qt_ckpt_read(&blob, qt_container_ckpt(w->c), t, &err), &err);
    size_t at = (size_t)(blob.data - blob.map->data);
    qt_blob_free(&blob);
    return at;
}

/* Reads `size` bytes of a section at offset `at`. */
static void peek(void *to, size_t size, struct world *w, const struct qt_entry *e,
                 const char *section, size_t at)
{
    struct qt_blob blob;
    const struct qt_tensor *t = e->section[find_section(e, section)].tensor;
    expect_ok(section, qt_ckpt_read(&blob, qt_container_ckpt(w->c), t, &w->err), &w->err);
    assert_true(at + size <= blob.size);
    memcpy(to, blob.data + at, size);
    qt_blob_free(&blob);
}

/* Writes one byte at offset `at` of the container's file. */
static void poke(struct world *w, size_t at, unsigned char value)
{
    const char *path = fixture_path(w->dir, "out/model.safetensors");
    int fd;
    expect_ok(path, qt_file_create(&fd, path, true, &w->err), &w->err);
    expect_ok(path, qt_file_write_at(fd, path, &value, 1, at, &w->err), &w->err);
    expect_ok(path, qt_file_finish(&fd, path, &w->err), &w->err);
}

static void hostile_inputs_are_refused(void **state)
{
    static const struct {
        const char *section;
        size_t at;
        unsigned char value;
        const char *message;
    } cases[] = {{"col_order", 3, 0x7f, "col_order: entry 0"},
                 {"col_order", 5, 0xff, "col_order: entry 1"},
                 {"bits", 0, 6, "block 0 has 6 bits"}};
    struct world w;
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct qt_act act;
        world_open(&w, "w4ax", NULL);
        const struct qt_entry *e = qt_container_find(w.c, down);
        poke(&w, offset_of(&w, e, cases[i].section) + cases[i].at, cases[i].value);
        qt_container_close(w.c);
        expect_ok("open", qt_container_open(&w.c, fixture_path(w.dir, "out"), &w.err), &w.err);
        e = qt_container_find(w.c, down);
        expect_error(cases[i].section, qt_act_open(&act, w.c, e, &w.err), QT_E_INPUT,
                     cases[i].message, &w.err);
        assert_null(act.order);
        world_close(&w);
    }
}

/* Orders must be permutations, and exponents must be within -60 to 60. */
static void hostile_orders_are_refused(void **state)
{
    enum { SAME = 256 }; /* value: the first byte of the section */
    static const struct {
        const char *section;
        size_t at;
        unsigned value;
        const char *message;
    } cases[] = {{"col_order", 3, 0x7f, "col_order is not a permutation: entry 0"},
                 {"row_order", 5, 0xff, "row_order is not a permutation: entry 1"},
                 {"row_order", 4, SAME, "row_order is not a permutation: entry 1"},
                 {"col_exp2", 2, 61, "col_exp2: entry 2 is 61, outside -60 to 60"},
                 {"col_exp2", 2, 0x80, "col_exp2: entry 2 is -128, outside -60 to 60"},
                 {"row_exp2", 1, 0xc3, "row_exp2: entry 1 is -61, outside -60 to 60"}};
    struct world w;
    struct qt_packed p;
    (void)state;
    world_open(&w, "w4ax", NULL);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct qt_entry *e = qt_container_find(w.c, down);
        const size_t at = offset_of(&w, e, cases[i].section) + cases[i].at;
        unsigned char kept, first;
        peek(&kept, 1, &w, e, cases[i].section, cases[i].at);
        peek(&first, 1, &w, e, cases[i].section, 0);
        poke(&w, at, cases[i].value == SAME ? first : (unsigned char)cases[i].value);
        expect_error(cases[i].section, qt_packed_open(&p, w.c, e, &w.err), QT_E_INPUT,
                     cases[i].message, &w.err);
        poke(&w, at, kept);
    }
    expect_ok("as it was", qt_packed_open(&p, w.c, qt_container_find(w.c, down), &w.err), &w.err);
    qt_packed_free(&p);
    world_close(&w);
}

/* Sections of linears that share an input, or produce the input of another, must agree. */
static void inconsistent_tensors_are_refused(void **state)
{
    enum how {
        SWAP,
        FLIP_BITS,
        ADD,
        CLIP
    }; /* swap the first two U32; change the first byte; set F32 */
    static const struct {
        const char *tensor, *section;
        enum how how;
        const char *message;
    } cases[] = {
        {"self_attn.q_proj", "col_order", SWAP, "section 'col_order' differs from"},
        {"self_attn.v_proj", "col_exp2", ADD, "section 'col_exp2' differs from"},
        {"self_attn.k_proj", "bits", FLIP_BITS, "section 'bits' differs from"},
        {"mlp.up_proj", "clip", CLIP, "section 'clip' differs from"},
        {"self_attn.q_proj", "row_order", SWAP, "requires source row"},
        {"self_attn.v_proj", "row_order", SWAP, "requires source row"},
        {"self_attn.o_proj", "col_order", SWAP, ""},
        {"mlp.down_proj", "col_order", SWAP, "requires source row"},
        {"mlp.up_proj", "row_exp2", ADD, "the model requires"},
        {"mlp.gate_proj", "row_exp2", ADD, "the model requires"},
    };
    struct world w;
    (void)state;
    world_open(&w, "w4ax", NULL);
    expect_ok("as it was", qt_act_agree(w.c, w.model, &w.err), &w.err);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char tensor[80];
        snprintf(tensor, sizeof tensor, "model.layers.0.%s.weight", cases[i].tensor);
        const struct qt_entry *e = qt_container_find(w.c, tensor);
        const size_t at = offset_of(&w, e, cases[i].section);
        const float clip = 0.4375f;
        unsigned char kept[8], now[8];
        const size_t size = cases[i].how == SWAP ? 8 : cases[i].how == CLIP ? 4 : 1;
        peek(kept, size, &w, e, cases[i].section, 0);
        for (size_t b = 0; b < size; b++)
            now[b] = cases[i].how == SWAP        ? kept[(b + 4) % 8]
                     : cases[i].how == FLIP_BITS ? (unsigned char)(12 - kept[b])
                                                 : (unsigned char)(kept[b] + 1);
        if (cases[i].how == CLIP)
            memcpy(now, &clip, sizeof clip);
        for (size_t b = 0; b < size; b++)
            poke(&w, at + b, now[b]);
        expect_error(tensor, qt_act_agree(w.c, w.model, &w.err), QT_E_INPUT, cases[i].message,
                     &w.err);
        for (size_t b = 0; b < size; b++)
            poke(&w, at + b, kept[b]);
    }
    expect_ok("as it was", qt_act_agree(w.c, w.model, &w.err), &w.err);
    world_close(&w);
}

static void missing_or_misfit_sections_are_refused(void **state)
{
    static const char *const names[] = {"col_order", "col_exp2", "bits", "clip"};
    struct world w;
    struct qt_act act;
    (void)state;
    world_open(&w, "w4ax", NULL);
    const struct qt_entry *e = qt_container_find(w.c, down);
    expect_ok("open", qt_act_open(&act, w.c, e, &w.err), &w.err);
    qt_act_free(&act);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        struct qt_entry bad = *e;
        size_t at = find_section(e, names[i]);
        bad.section[at].tensor = e->section[find_section(e, "plane0")].tensor;
        expect_error(names[i], qt_act_open(&act, w.c, &bad, &w.err), QT_E_INPUT, "bytes, expected",
                     &w.err);
        bad.section[at].name = "other";
        expect_error(names[i], qt_act_open(&act, w.c, &bad, &w.err), QT_E_INPUT, "has no section",
                     &w.err);
    }
    struct qt_entry bad = *e;
    struct qt_packed p;
    bad.nsections--;
    expect_error("one less", qt_packed_open(&p, w.c, &bad, &w.err), QT_E_INPUT,
                 "7 sections, expected 8", &w.err);
    bad = *e;
    bad.n = SIZE_MAX / 4;
    expect_error("rows", qt_packed_open(&p, w.c, &bad, &w.err), QT_E_INPUT, "too large", &w.err);
    bad.spec = "w4ax:nonsense=1";
    assert_true(qt_act_open(&act, w.c, &bad, &w.err) < 0);
    world_close(&w);
}

static void allocation_failures(void **state)
{
    struct world w;
    (void)state;
    world_open(&w, "w4ax", NULL);
    bool failed = true;
    for (long n = 0; failed; n++) {
        struct qt_act act;
        qt_mem_fail_after(n);
        int rc = qt_act_open(&act, w.c, qt_container_find(w.c, down), NULL);
        qt_mem_fail_after(-1);
        failed = rc < 0;
        assert_int_equal(rc, failed ? QT_E_RESOURCE : QT_OK);
        qt_act_free(&act);
        assert_true(n < 1000);
    }
    failed = true;
    for (long n = 0; failed; n++) {
        qt_mem_fail_after(n);
        int rc = qt_act_agree(w.c, w.model, NULL);
        qt_mem_fail_after(-1);
        failed = rc < 0;
        assert_int_equal(rc, failed ? QT_E_RESOURCE : QT_OK);
        assert_true(n < 1000);
    }
    world_close(&w);
}

int main(void)
{
    const char *text = getenv("QT_SEED");
    seed = text ? strtoull(text, NULL, 10) : (uint64_t)time(NULL);
    printf("QT_SEED=%llu\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(models_round_as_documented),
        cmocka_unit_test(format_versions_are_checked),
        cmocka_unit_test(other_schemes_are_left_alone),
        cmocka_unit_test(hostile_inputs_are_refused),
        cmocka_unit_test(hostile_orders_are_refused),
        cmocka_unit_test(inconsistent_tensors_are_refused),
        cmocka_unit_test(missing_or_misfit_sections_are_refused),
        cmocka_unit_test(allocation_failures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
