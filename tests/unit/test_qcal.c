/*
 * Calibration files: written values are read back, hostile files are rejected for the right reason,
 * and a failed write leaves no file.
 */
#include "formats/formats.h"
#include "tests/unit/fixture.h"

#include <math.h>
#include <sys/stat.h>
#include <sys/wait.h>

enum { LAYERS = 2, WIDEST = 7 };

/* Odd widths: no tensor is aligned. */
static const size_t widths[LAYERS][QT_INPUTS] = {{3, 5, 4, 7}, {1, 2, 3, 6}};
static const struct qt_qcal_layer layers[LAYERS] = {{QT_INPUTS, widths[0], 0},
                                                    {QT_INPUTS, widths[1], 0}};
/* Latent attention and one MLP; attention and two experts. */
static const size_t expert_widths[LAYERS][7] = {{3, 2, 1, 4, 3, 6}, {3, 4, 3, 2, 3, 5, 3}};
static const struct qt_qcal_layer expert_layers[LAYERS] = {{6, expert_widths[0], 0},
                                                           {7, expert_widths[1], 2}};
static const uint32_t expert_tokens[2] = {11, 4}; /* that chose each expert */
static const char *const data_files[] = {"some/where/prose.txt", "b\xff.txt"};
static const struct qt_qcal_part parts[] = {
    {.samples = 3, .seqlen = 4, .seed = 9, .bos = true, .ids_crc = 0x1234, .data = data_files, 2},
    {.samples = 1, .seqlen = 8, .ids_crc = 0xfedcba98, .data = data_files, 1},
};
static const struct qt_qcal_info info = {
    .family = "llama",
    .layers = LAYERS,
    .hidden = 3,
    .sample_crc = 0xabcdef01,
    .layer = layers,
    .parts = parts,
    .nparts = 2,
};
enum { TOKENS = 3 * 4 + 8 };

/* The model of the files that are written. */
static struct qt_qcal_info about;

static struct qt_qcal_info info_with_experts(void)
{
    struct qt_qcal_info with = info;
    with.family = "mixtral";
    with.layer = expert_layers;
    return with;
}

static char *dir;

static int setup(void **state)
{
    (void)state;
    dir = fixture_dir();
    about = info;
    return 0;
}

static int setup_experts(void **state)
{
    setup(state);
    about = info_with_experts();
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    fixture_remove(dir);
    return 0;
}

/* ---- a file --------------------------------------------------------------------------------- */

/* Statistics of synthetic activations of a linear input. */
static void make(double *h, struct qt_channels *c, size_t layer, size_t input)
{
    const size_t k = about.layer[layer].k[input];
    const int expert = qt_qcal_expert(&about.layer[layer], input);
    const size_t tokens = expert < 0 ? TOKENS : expert_tokens[expert] + 1; /* one was near */
    assert_int_equal(qt_channels_new(c, k, NULL), QT_OK);
    for (size_t i = 0; i < k * k; i++)
        h[i] = i % k <= i / k ? 0 : NAN; /* the upper triangle must not be read */
    for (size_t t = 0; t < tokens; t++) {
        float x[WIDEST];
        for (size_t j = 0; j < k; j++) {
            x[j] = (float)sin((double)(1 + t + 31 * j + 7 * input + 3 * layer)) *
                   exp2f((float)j * 3 - 8);
            x[j] = j == 2 ? 0 : x[j]; /* a dead channel */
            c->absmax[j] = fmaxf(c->absmax[j], fabsf(x[j]));
            c->sum2[j] += (double)x[j] * (double)x[j];
            c->hist[j * QT_HIST_BINS + qt_hist_bin(x[j])]++;
        }
        for (size_t i = 0; i < k; i++)
            for (size_t j = 0; j <= i; j++)
                h[i * k + j] += (double)x[i] * (double)x[j];
    }
}

static int put_all(struct qt_qcal_writer *w, struct qt_err *err)
{
    double h[WIDEST * WIDEST];
    int rc = QT_OK;
    /* Writes the last input first: the order must not matter. */
    for (size_t l = LAYERS; l-- > 0 && rc == QT_OK;) {
        if (about.layer[l].experts)
            rc = qt_qcal_put_routed(w, l, expert_tokens, err);
        for (size_t i = about.layer[l].inputs; i-- > 0 && rc == QT_OK;) {
            struct qt_channels c;
            make(h, &c, l, i);
            rc = qt_qcal_put(w, l, i, h, &c, "model", err);
            qt_channels_free(&c);
        }
    }
    return rc;
}

static int write_file(const char *path, bool force, struct qt_err *err)
{
    struct qt_qcal_writer *w = NULL;
    int rc = qt_qcal_create(&w, path, &about, force, err);
    if (rc == QT_OK)
        rc = put_all(w, err);
    if (rc == QT_OK)
        rc = qt_qcal_finish(w, err);
    qt_qcal_abandon(w);
    return rc;
}

/* Compares all values of a file. */
static int read_all(const char *path, struct qt_err *err)
{
    struct qt_qcal *q = NULL;
    double h[WIDEST * WIDEST];
    int rc = qt_qcal_open(&q, path, err);
    for (size_t l = 0; rc == QT_OK && l < LAYERS; l++) {
        uint32_t routed[2];
        for (size_t i = 0; i < about.layer[l].inputs && rc == QT_OK; i++) {
            struct qt_channels c;
            rc = qt_qcal_channels(&c, q, l, i, err);
            if (rc == QT_OK)
                rc = qt_qcal_hessian(h, q, l, i, c.sum2, err);
            qt_channels_free(&c);
        }
        if (rc == QT_OK && about.layer[l].experts)
            rc = qt_qcal_routed(routed, q, l, err);
    }
    qt_qcal_close(q);
    return rc;
}

static void test_round_trip(void **state)
{
    struct qt_err err = {0};
    struct qt_qcal *q;
    (void)state;
    const char *path = fixture_path(dir, "a.qcal");
    expect_ok("write", write_file(path, false, &err), &err);
    expect_ok("open", qt_qcal_open(&q, path, &err), &err);
    const struct qt_qcal_info *got = qt_qcal_info(q);
    assert_string_equal(qt_qcal_path(q), path);
    assert_string_equal(got->family, about.family);
    assert_int_equal(got->layers, LAYERS);
    assert_int_equal(got->hidden, 3);
    assert_int_equal(got->sample_crc, 0xabcdef01);
    assert_int_equal(got->tokens, TOKENS);
    assert_int_equal(got->nparts, 2);
    assert_int_equal(got->parts[0].samples, 3);
    assert_int_equal(got->parts[0].seqlen, 4);
    assert_int_equal(got->parts[0].seed, 9);
    assert_true(got->parts[0].bos);
    assert_false(got->parts[1].bos);
    assert_int_equal(got->parts[1].ids_crc, 0xfedcba98);
    assert_int_equal(got->parts[0].ndata, 2);
    assert_string_equal(got->parts[0].data[0], "prose.txt");
    assert_string_equal(got->parts[0].data[1], "b?.txt");
    for (size_t layer = 0, input = 0; layer < LAYERS; input++) {
        const struct qt_qcal_layer *l = &got->layer[layer];
        double want[WIDEST * WIDEST], h[WIDEST * WIDEST];
        struct qt_channels c, d;
        if (input == l->inputs) {
            uint32_t routed[2];
            assert_int_equal(l->inputs, about.layer[layer].inputs);
            assert_int_equal(l->experts, about.layer[layer].experts);
            if (l->experts)
                expect_ok("routed", qt_qcal_routed(routed, q, layer, &err), &err);
            assert_true(!l->experts || memcmp(routed, expert_tokens, sizeof routed) == 0);
            layer++;
            input = SIZE_MAX;
            continue;
        }
        const size_t k = l->k[input];
        assert_int_equal(k, about.layer[layer].k[input]);
        make(want, &c, layer, input);
        expect_ok("channels", qt_qcal_channels(&d, q, layer, input, &err), &err);
        expect_ok("hessian", qt_qcal_hessian(h, q, layer, input, d.sum2, &err), &err);
        assert_memory_equal(c.absmax, d.absmax, k * sizeof *c.absmax);
        assert_memory_equal(c.sum2, d.sum2, k * sizeof *c.sum2);
        assert_memory_equal(c.hist, d.hist, k * QT_HIST_BINS * sizeof *c.hist);
        for (size_t i = 0; i < k; i++)
            for (size_t j = 0; j <= i; j++)
                assert_true(h[i * k + j] == (double)(float)want[i * k + j]);
        qt_channels_free(&c);
        qt_channels_free(&d);
    }
    qt_qcal_close(q);
}

static void test_same_bytes(void **state)
{
    struct qt_err err = {0};
    struct qt_map a, b;
    (void)state;
    expect_ok("write", write_file(fixture_path(dir, "a.qcal"), false, &err), &err);
    expect_ok("write", write_file(fixture_path(dir, "b.qcal"), false, &err), &err);
    assert_int_equal(qt_map_open(&a, fixture_path(dir, "a.qcal"), NULL), QT_OK);
    assert_int_equal(qt_map_open(&b, fixture_path(dir, "b.qcal"), NULL), QT_OK);
    assert_int_equal(a.size, b.size);
    assert_memory_equal(a.data, b.data, a.size);
    qt_map_close(&a);
    qt_map_close(&b);
}

/* ---- hostile files -------------------------------------------------------------------------- */

/* A file split into its parts. */
struct parts {
    json_t *header, *doc; /* doc: the document in the metadata */
    unsigned char *data;
    size_t size;
    const char *text; /* instead of doc */
};

static void take_apart(struct parts *p, const char *path)
{
    char *file;
    size_t size;
    uint64_t n;
    assert_int_equal(qt_file_read(&file, &size, path, 1 << 20, NULL), QT_OK);
    memcpy(&n, file, sizeof n);
    *p = (struct parts){.header = json_loadb(file + 8, n, 0, NULL), .size = size - 8 - n};
    json_t *metadata = json_object_get(p->header, "__metadata__");
    p->doc = json_loads(json_string_value(json_object_get(metadata, "qtool")), 0, NULL);
    p->data = malloc(p->size + 64);
    memcpy(p->data, file + 8 + n, p->size);
    qt_free(file);
    assert_non_null(p->doc);
}

static void put_together(const char *path, struct parts *p)
{
    char *text = p->text ? strdup(p->text) : json_dumps(p->doc, JSON_COMPACT);
    json_t *metadata = json_object_get(p->header, "__metadata__");
    if (json_object_get(metadata, "qtool"))
        json_object_set_new(metadata, "qtool", json_string(text));
    char *header = json_dumps(p->header, JSON_COMPACT);
    uint64_t n = strlen(header);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(&n, sizeof n, 1, f), 1);
    assert_int_equal(fwrite(header, n, 1, f), 1);
    assert_int_equal(fwrite(p->data, 1, p->size, f), p->size);
    fclose(f);
    if (p->text)
        free(text);
    else
        qt_free(text); /* Jansson uses qtool's allocator by now */
    qt_free(header);
    json_decref(p->header);
    json_decref(p->doc);
    free(p->data);
}

static json_t *model_of(struct parts *p)
{
    return json_object_get(p->doc, "model");
}

static json_t *part_of(struct parts *p)
{
    return json_array_get(json_object_get(p->doc, "parts"), 0);
}

static void set(json_t *object, const char *key, json_t *value)
{
    assert_int_equal(json_object_set_new(object, key, value), 0);
}

/* Overwrites a value of a tensor and corrects its CRC. */
static void patch(struct parts *p, const char *tensor, size_t offset, const void *value,
                  size_t size)
{
    const json_t *range = json_object_get(json_object_get(p->header, tensor), "data_offsets");
    size_t begin = (size_t)json_integer_value(json_array_get(range, 0));
    size_t end = (size_t)json_integer_value(json_array_get(range, 1));
    assert_true(begin + offset + size <= end);
    memcpy(p->data + begin + offset, value, size);
    set(json_object_get(p->doc, "crc32"), tensor,
        json_sprintf("%08x", qt_crc32(0, p->data + begin, end - begin)));
}

static void patch_float(struct parts *p, const char *tensor, size_t i, float v)
{
    patch(p, tensor, i * sizeof v, &v, sizeof v);
}

static void patch_double(struct parts *p, const char *tensor, size_t i, double v)
{
    patch(p, tensor, i * sizeof v, &v, sizeof v);
}

static void patch_count(struct parts *p, const char *tensor, size_t i, uint32_t v)
{
    patch(p, tensor, i * sizeof v, &v, sizeof v);
}

#define MUTATION(name) static void name(struct parts *p)

MUTATION(no_metadata)
{
    json_object_del(p->header, "__metadata__");
}
MUTATION(foreign_metadata)
{
    json_object_clear(json_object_get(p->header, "__metadata__"));
    set(json_object_get(p->header, "__metadata__"), "format", json_string("pt"));
}
MUTATION(not_json)
{
    p->text = "{\"format\"";
}
MUTATION(an_array)
{
    p->text = "[1]";
}
MUTATION(twice)
{
    p->text = "{\"format\":\"qtool-calibration\",\"format\":\"qtool-calibration\"}";
}
MUTATION(other_format)
{
    set(p->doc, "format", json_string("qtool"));
}
MUTATION(newer)
{
    set(p->doc, "version", json_integer(3));
}
MUTATION(no_version)
{
    json_object_del(p->doc, "version");
}
MUTATION(no_model)
{
    json_object_del(p->doc, "model");
}
MUTATION(family_number)
{
    set(model_of(p), "family", json_integer(1));
}
MUTATION(more_layers)
{
    set(model_of(p), "layers", json_integer(3));
}
MUTATION(no_layers)
{
    set(model_of(p), "layers", json_integer(0));
}
MUTATION(many_layers)
{
    set(model_of(p), "layers", json_integer(INT64_MAX));
}
MUTATION(no_hidden)
{
    set(model_of(p), "hidden", json_integer(0));
}
MUTATION(fingerprint)
{
    set(model_of(p), "sample_crc32", json_string("ABCDEF01"));
}
MUTATION(k_rows)
{
    json_array_remove(json_object_get(model_of(p), "k"), 0);
}
MUTATION(k_columns)
{
    json_array_remove(json_array_get(json_object_get(model_of(p), "k"), 1), 0);
}
MUTATION(k_zero)
{
    json_array_set_new(json_array_get(json_object_get(model_of(p), "k"), 1), 0, json_integer(0));
}
MUTATION(k_huge)
{
    json_array_set_new(json_array_get(json_object_get(model_of(p), "k"), 1), 0,
                       json_integer((json_int_t)1 << 31));
}
MUTATION(k_large)
{
    json_array_set_new(json_array_get(json_object_get(model_of(p), "k"), 1), 0,
                       json_integer(INT32_MAX));
}
MUTATION(k_other)
{
    json_array_set_new(json_array_get(json_object_get(model_of(p), "k"), 0), 1, json_integer(6));
}
MUTATION(no_parts)
{
    json_array_clear(json_object_get(p->doc, "parts"));
}
MUTATION(part_number)
{
    json_array_set_new(json_object_get(p->doc, "parts"), 0, json_integer(1));
}
MUTATION(no_data)
{
    json_object_del(part_of(p), "data");
}
MUTATION(data_numbers)
{
    json_array_set_new(json_object_get(part_of(p), "data"), 1, json_integer(7));
}
MUTATION(bos_number)
{
    set(part_of(p), "bos", json_integer(1));
}
MUTATION(seed_negative)
{
    set(part_of(p), "seed", json_integer(-1));
}
MUTATION(no_samples)
{
    set(part_of(p), "samples", json_integer(0));
}
MUTATION(samples_overflow)
{
    set(part_of(p), "samples", json_integer(INT64_MAX));
}
MUTATION(many_tokens)
{
    set(part_of(p), "samples", json_integer(1 << 30));
}
MUTATION(other_tokens)
{
    set(p->doc, "tokens", json_integer(TOKENS + 1));
}
MUTATION(crc_missing)
{
    json_object_del(json_object_get(p->doc, "crc32"), "layers.1.input.2.h");
}
MUTATION(crc_other_name)
{
    crc_missing(p);
    set(json_object_get(p->doc, "crc32"), "layers.1.input.2.g", json_string("00000000"));
}
MUTATION(crc_digits)
{
    set(json_object_get(p->doc, "crc32"), "layers.1.input.2.h", json_string("0123456g"));
}
MUTATION(renamed)
{
    json_t *t = json_incref(json_object_get(p->header, "layers.0.input.1.hist"));
    json_object_del(p->header, "layers.0.input.1.hist");
    set(p->header, "layers.0.input.1.host", t);
}
MUTATION(other_dtype)
{
    set(json_object_get(p->header, "layers.0.input.1.absmax"), "dtype", json_string("U32"));
}
MUTATION(transposed)
{
    set(json_object_get(p->header, "layers.0.input.1.hist"), "shape",
        json_pack("[i, i]", QT_HIST_BINS, 5));
}
MUTATION(flattened)
{
    set(json_object_get(p->header, "layers.0.input.1.hist"), "shape",
        json_pack("[i]", QT_HIST_BINS * 5));
}
MUTATION(missing_tensor)
{
    json_object_del(p->header, "layers.1.input.3.h");
    p->size -= 6 * 7 / 2 * sizeof(float);
}
MUTATION(cut_short)
{
    p->size--;
}
MUTATION(trailing)
{
    p->data[p->size++] = 0;
}
MUTATION(damaged)
{
    p->data[p->size - 1] ^= 1;
}
MUTATION(absmax_nan)
{
    patch_float(p, "layers.0.input.1.absmax", 4, NAN);
}
MUTATION(absmax_negative)
{
    patch_float(p, "layers.0.input.1.absmax", 4, -1);
}
MUTATION(sum2_infinite)
{
    patch_double(p, "layers.0.input.1.sum2", 3, INFINITY);
}
MUTATION(sum2_small)
{
    patch_double(p, "layers.0.input.1.sum2", 3, 1e-12);
}
MUTATION(sum2_large)
{
    patch_double(p, "layers.0.input.1.sum2", 3, 1e12);
}
MUTATION(sum2_of_dead)
{
    patch_double(p, "layers.0.input.1.sum2", 2, 1e-3);
}
MUTATION(hist_sum)
{
    patch_count(p, "layers.0.input.1.hist", 4 * QT_HIST_BINS, 5);
}
MUTATION(hist_wraps)
{
    /* 2^32 more in total */
    patch_count(p, "layers.0.input.1.hist", 4 * QT_HIST_BINS + 1, 1u << 31);
    patch_count(p, "layers.0.input.1.hist", 4 * QT_HIST_BINS + 2, 1u << 31);
}
MUTATION(hist_top)
{
    patch_count(p, "layers.0.input.1.hist", 2 * QT_HIST_BINS, 0);
    patch_count(p, "layers.0.input.1.hist", 2 * QT_HIST_BINS + 63, TOKENS);
}
MUTATION(h_infinite)
{
    patch_float(p, "layers.0.input.1.h", 3, -INFINITY);
}
MUTATION(h_nan)
{
    patch_float(p, "layers.0.input.1.h", 14, NAN);
}
MUTATION(h_diagonal)
{
    patch_float(p, "layers.0.input.1.h", 5, 1); /* (2, 2), a dead channel */
}
MUTATION(h_diagonal_zero)
{
    patch_float(p, "layers.0.input.1.h", 9, 0); /* (3, 3), a live one */
}

/* Of a file with experts. */
MUTATION(as_version_1)
{
    set(p->doc, "version", json_integer(1));
}
MUTATION(no_experts)
{
    json_object_del(model_of(p), "experts");
}
MUTATION(experts_text)
{
    json_array_set_new(json_object_get(model_of(p), "experts"), 1, json_string("2"));
}
MUTATION(experts_negative)
{
    json_array_set_new(json_object_get(model_of(p), "experts"), 1, json_integer(-2));
}
MUTATION(more_experts)
{
    json_array_set_new(json_object_get(model_of(p), "experts"), 1, json_integer(3));
}
MUTATION(fewer_experts)
{
    json_array_set_new(json_object_get(model_of(p), "experts"), 1, json_integer(0));
}
MUTATION(other_experts)
{
    json_array_set_new(json_object_get(model_of(p), "experts"), 1, json_integer(1));
}
MUTATION(routed_many)
{
    patch_count(p, "layers.1.routed", 1, TOKENS + 1);
}
MUTATION(expert_hist)
{
    patch_count(p, "layers.1.input.4.hist", QT_HIST_BINS, 7);
}
MUTATION(expert_hist_many)
{
    patch_count(p, "layers.1.input.4.hist", 0, 1u << 31);
}
MUTATION(shared_hist)
{
    patch_count(p, "layers.1.input.6.hist", QT_HIST_BINS, 7);
}

struct hostile {
    const char *name;
    void (*mutate)(struct parts *p);
    enum qt_status status;
    const char *says;
};

static const struct hostile hostile_experts[] = {
    {"as version 1", as_version_1, QT_E_INPUT, "'k' of layer 0 must be 4 positive"},
    {"no experts", no_experts, QT_E_INPUT, "'experts' must be an array"},
    {"experts are text", experts_text, QT_E_INPUT, "'experts' of layer 1 must be a number"},
    {"experts < 0", experts_negative, QT_E_INPUT, "'experts' of layer 1 must be a number"},
    {"more experts", more_experts, QT_E_INPUT, "'k' of layer 1 must be 9 to 16384"},
    {"no experts in 'experts'", fewer_experts, QT_E_INPUT,
     "has 53 tensors, but its 2 layers must have 52"},
    {"other experts", other_experts, QT_E_INPUT, "layers.1.routed: wrong dtype or shape: 2 el"},
    {"too many chose", routed_many, QT_E_INPUT, "layers.1.routed: expert 1: more tokens than"},
    {"channels of an expert", expert_hist, QT_E_INPUT, "channel 1: the counts do not add up"},
    {"too many tokens", expert_hist_many, QT_E_INPUT, "channel 0: counts more tokens than the"},
    {"channels of all", shared_hist, QT_E_INPUT, "channel 1: the counts do not add up"},
};

static const struct hostile hostile[] = {
    {"no metadata", no_metadata, QT_E_INPUT, "its metadata has no 'qtool'"},
    {"metadata of others", foreign_metadata, QT_E_INPUT, "its metadata has no 'qtool'"},
    {"not JSON", not_json, QT_E_INPUT, "line 1, column 9"},
    {"an array", an_array, QT_E_INPUT, "another 'format'"},
    {"a key twice", twice, QT_E_INPUT, "duplicate"},
    {"another format", other_format, QT_E_INPUT, "another 'format'"},
    {"a newer version", newer, QT_E_UNSUPPORTED,
     "calibration format 3 is not supported; this qtool reads formats 1 to 2"},
    {"no version", no_version, QT_E_INPUT, "'version' is missing"},
    {"no model", no_model, QT_E_INPUT, "'family'"},
    {"family is a number", family_number, QT_E_INPUT, "'family' is an integer"},
    {"more layers", more_layers, QT_E_INPUT,
     "has 32 tensors for 3 layers, but each layer must have at least 16"},
    {"no layers", no_layers, QT_E_INPUT, "32 tensors for 0 layers"},
    {"too many layers", many_layers, QT_E_INPUT, "32 tensors for 9223372036854775807 layers"},
    {"hidden 0", no_hidden, QT_E_INPUT, "32 tensors for 2 layers"},
    {"fingerprint", fingerprint, QT_E_INPUT, "'sample_crc32' must be 8 lower-case"},
    {"a row of k is missing", k_rows, QT_E_INPUT, "'k' must be an array"},
    {"three inputs", k_columns, QT_E_INPUT, "'k' of layer 1 must be 4 positive"},
    {"k = 0", k_zero, QT_E_INPUT, "'k' of layer 1 must be positive"},
    {"k = 2^31", k_huge, QT_E_INPUT, "'k' of layer 1 must be positive"},
    {"k = 2^31 - 1", k_large, QT_E_INPUT,
     "tensor layers.1.input.0.sum2: wrong dtype or shape: 1 elements of F64"},
    {"another k", k_other, QT_E_INPUT,
     "layers.0.input.1.sum2: wrong dtype or shape: 5 elements of F64, but 6 of F64"},
    {"no parts", no_parts, QT_E_INPUT, "'parts' must be an array of 1 to 4096"},
    {"a part is a number", part_number, QT_E_INPUT, "'samples'"},
    {"no data", no_data, QT_E_INPUT, "'data' must be an array of strings"},
    {"data is numbers", data_numbers, QT_E_INPUT, "'data' must be an array of strings"},
    {"bos is a number", bos_number, QT_E_INPUT, "'bos' must be true or false"},
    {"seed is negative", seed_negative, QT_E_INPUT, "'seed' is a negative integer"},
    {"no samples", no_samples, QT_E_INPUT, "'samples' and 'seqlen' must be positive"},
    {"tokens overflow", samples_overflow, QT_E_INPUT, "their product must not overflow"},
    {"too many tokens", many_tokens, QT_E_INPUT, "more than 2^32 - 1 tokens"},
    {"other tokens", other_tokens, QT_E_INPUT, "'tokens' is 21, but the parts have 20"},
    {"a CRC is missing", crc_missing, QT_E_INPUT, "'crc32' must be an object with a member"},
    {"CRC of another", crc_other_name, QT_E_INPUT, "'layers.1.input.2.h' must be 8 lower-case"},
    {"CRC without digits", crc_digits, QT_E_INPUT, "'layers.1.input.2.h' must be 8 lower-case"},
    {"a tensor renamed", renamed, QT_E_INPUT, "'layers.0.input.1.hist' is expected"},
    {"another dtype", other_dtype, QT_E_INPUT,
     "input.1.absmax: wrong dtype or shape: 5 elements of U32, but 5 of F32"},
    {"transposed", transposed, QT_E_INPUT, "tensor layers.0.input.1.hist: wrong dtype or shape"},
    {"flattened", flattened, QT_E_INPUT, "tensor layers.0.input.1.hist: wrong dtype or shape"},
    {"a tensor is missing", missing_tensor, QT_E_INPUT, "31 tensors for 2 layers"},
    {"cut short", cut_short, QT_E_INPUT, "layers.1.input.3.h: data ends at byte"},
    {"bytes behind", trailing, QT_E_INPUT, "1 bytes at the end belong to no tensor"},
    {"damaged", damaged, QT_E_INPUT, "tensor layers.1.input.3.h: the data's CRC-32 is"},
    {"absmax NaN", absmax_nan, QT_E_INPUT, "input.1.absmax: channel 4: negative or not finite"},
    {"absmax < 0", absmax_negative, QT_E_INPUT, "input.1.absmax: channel 4: negative or not"},
    {"sum2 infinite", sum2_infinite, QT_E_INPUT, "input.1.sum2: channel 3: negative or not fin"},
    {"sum2 too small", sum2_small, QT_E_INPUT, "input.1.sum2: channel 3: contradicts absmax"},
    {"sum2 too large", sum2_large, QT_E_INPUT, "input.1.sum2: channel 3: contradicts absmax"},
    {"sum2, dead channel", sum2_of_dead, QT_E_INPUT, "sum2: channel 2: contradicts absmax"},
    {"hist sum", hist_sum, QT_E_INPUT, "input.1.hist: channel 4: the counts do not add up"},
    {"hist wraps", hist_wraps, QT_E_INPUT, "input.1.hist: channel 4: the counts do not add up"},
    {"hist top", hist_top, QT_E_INPUT, "channel 2: the largest value is not in the bin of absmax"},
    {"H infinite", h_infinite, QT_E_INPUT, "tensor layers.0.input.1.h: channel 2: not finite"},
    {"H NaN", h_nan, QT_E_INPUT, "tensor layers.0.input.1.h: channel 4: not finite"},
    {"H diagonal", h_diagonal, QT_E_INPUT,
     "h: channel 2: the diagonal differs from the channel's sum2"},
    {"H diagonal 0", h_diagonal_zero, QT_E_INPUT, "h: channel 3: the diagonal differs"},
};

static void refuse(const struct hostile *cases, size_t n)
{
    struct qt_err err = {0};
    expect_ok("write", write_file(fixture_path(dir, "good.qcal"), false, &err), &err);
    for (size_t i = 0; i < n; i++) {
        struct parts p;
        const char *path = fixture_path(dir, "bad.qcal");
        take_apart(&p, fixture_path(dir, "good.qcal"));
        cases[i].mutate(&p);
        put_together(path, &p);
        err = (struct qt_err){0};
        int rc = read_all(path, &err);
        expect_error(cases[i].name, rc, cases[i].status, cases[i].says, &err);
        expect_error(cases[i].name, rc, cases[i].status, path, &err);
    }
}

static void test_hostile(void **state)
{
    (void)state;
    refuse(hostile, sizeof hostile / sizeof *hostile);
}

static void test_hostile_experts(void **state)
{
    (void)state;
    refuse(hostile_experts, sizeof hostile_experts / sizeof *hostile_experts);
}

/* A file by an independent script: its values are accepted, and the writer gives the same bytes,
 * except the version of the tool. */
static void test_golden(void **state)
{
    const char *golden = "tests/golden/qcal/experts.qcal";
    struct parts a, b;
    struct qt_err err = {0};
    (void)state;
    expect_ok("read", read_all(golden, &err), &err);
    expect_ok("write", write_file(fixture_path(dir, "x.qcal"), false, &err), &err);
    take_apart(&a, golden);
    take_apart(&b, fixture_path(dir, "x.qcal"));
    set(json_object_get(a.doc, "tool"), "version", json_string(QT_VERSION));
    assert_int_equal(a.size, b.size);
    assert_memory_equal(a.data, b.data, a.size);
    assert_true(json_equal(a.doc, b.doc));
    json_object_del(a.header, "__metadata__");
    json_object_del(b.header, "__metadata__");
    assert_true(json_equal(a.header, b.header));
    free(a.data);
    free(b.data);
    json_decref(a.header);
    json_decref(b.header);
    json_decref(a.doc);
    json_decref(b.doc);
}

/* Files that are not safetensors. */
static void test_other_files(void **state)
{
    struct qt_err err;
    (void)state;
    expect_error("empty", read_all(fixture_write(dir, "e.qcal", "", 0), &err), QT_E_INPUT,
                 "the file is empty", &err);
    expect_error("text", read_all(fixture_write(dir, "t.qcal", "just some text", 14), &err),
                 QT_E_INPUT, "not a safetensors file", &err);
    expect_error("absent", read_all(fixture_path(dir, "no.qcal"), &err), QT_E_INPUT, "cannot open",
                 &err);
    expect_error("name", read_all(fixture_write(dir, "a.bin", "x", 1), &err), QT_E_INPUT,
                 "must end in .qcal", &err);
    assert_false(qt_qcal_probe(".qcal"));
    assert_false(qt_qcal_probe("a/.qcal"));
    assert_false(qt_qcal_probe("a.qcal/"));
    assert_true(qt_qcal_probe("a/b.qcal"));
}

/* Every part of the fingerprint matters. */
static void test_check_model(void **state)
{
    struct qt_err err = {0};
    struct qt_qcal *q;
    size_t k[LAYERS][QT_INPUTS];
    struct qt_qcal_layer changed[LAYERS];
    (void)state;
    expect_ok("write", write_file(fixture_path(dir, "a.qcal"), false, &err), &err);
    expect_ok("open", qt_qcal_open(&q, fixture_path(dir, "a.qcal"), &err), &err);
    expect_ok("same", qt_qcal_check_model(q, &info, "M", &err), &err);
    struct qt_qcal_info other = info;
    other.family = "opt";
    expect_error("family", qt_qcal_check_model(q, &other, "M", &err), QT_E_INPUT,
                 "another model than M: the family is llama, not opt", &err);
    other = info;
    other.layers = 3;
    expect_error("layers", qt_qcal_check_model(q, &other, "M", &err), QT_E_INPUT,
                 "the number of layers is 2, not 3", &err);
    other = info;
    other.hidden = 4;
    expect_error("hidden", qt_qcal_check_model(q, &other, "M", &err), QT_E_INPUT,
                 "the hidden size is 3, not 4", &err);
    other = info;
    memcpy(k, widths, sizeof k);
    k[1][3] = 8;
    memcpy(changed, layers, sizeof changed);
    changed[1].k = k[1];
    other.layer = changed;
    expect_error("k", qt_qcal_check_model(q, &other, "M", &err), QT_E_INPUT,
                 "the width of a linear layer is 6, not 8", &err);
    changed[1] = expert_layers[1];
    expect_error("experts", qt_qcal_check_model(q, &other, "M", &err), QT_E_INPUT,
                 "the number of experts is 0, not 2", &err);
    changed[1] = expert_layers[0];
    expect_error("inputs", qt_qcal_check_model(q, &other, "M", &err), QT_E_INPUT,
                 "the number of linear inputs of a layer is 4, not 6", &err);
    other = info;
    other.sample_crc++;
    expect_error("weights", qt_qcal_check_model(q, &other, "M", &err), QT_E_INPUT,
                 "the weights differ (fingerprint abcdef01, not abcdef02)", &err);
    qt_qcal_close(q);
}

/* ---- writing -------------------------------------------------------------------------------- */

static void expect_absent(const char *name)
{
    assert_false(qt_path_exists(fixture_path(dir, name)));
}

static void test_existing(void **state)
{
    struct qt_err err = {0};
    struct qt_qcal_writer *w, *second;
    (void)state;
    const char *path = fixture_write(dir, "a.qcal", "precious", 8);
    expect_error("exists", write_file(path, false, &err), QT_E_USAGE, "--force replaces it", &err);
    expect_absent("a.qcal.partial");
    expect_ok("force", write_file(path, true, &err), &err);
    expect_ok("read", read_all(path, &err), &err);
    expect_error("name", write_file(fixture_path(dir, "a.bin"), true, &err), QT_E_USAGE,
                 "must end in .qcal", &err);
    assert_int_equal(mkdir(fixture_path(dir, "d.qcal"), 0777), 0);
    expect_error("directory", write_file(fixture_path(dir, "d.qcal"), true, &err), QT_E_USAGE,
                 "is not a file", &err);
    assert_int_equal(rmdir(fixture_path(dir, "d.qcal")), 0);
    expect_error("no such place", write_file(fixture_path(dir, "no/a.qcal"), false, &err),
                 QT_E_RESOURCE, "cannot create", &err);

    /* The file of a killed process is replaced; that of a running process is not. */
    char *made = strdup(fixture_path(dir, "b.qcal"));
    char *partial = strdup(fixture_path(dir, "b.qcal.partial"));
    path = made;
    fixture_write(dir, "b.qcal.partial", "left", 4);
    expect_error("theirs", qt_qcal_create(&w, path, &info, false, &err), QT_E_USAGE,
                 "b.qcal.partial: not replaced: it is not the unfinished file", &err);
    fixture_write(dir, "mine", "", 0);
    unlink(partial);
    assert_int_equal(link(fixture_path(dir, "mine"), partial), 0);
    expect_error("hard link", qt_qcal_create(&w, path, &info, false, &err), QT_E_USAGE,
                 "not replaced", &err);
    unlink(partial);
    assert_int_equal(symlink("mine", partial), 0);
    expect_error("link", qt_qcal_create(&w, path, &info, false, &err), QT_E_USAGE, "not replaced",
                 &err);
    unlink(partial);
    unlink(fixture_path(dir, "mine"));
    const pid_t child = fork();
    if (child == 0) { /* dies while it writes */
        qt_qcal_create(&w, path, &info, false, &err);
        _exit(0);
    }
    assert_int_equal(waitpid(child, NULL, 0), child);
    assert_true(qt_path_exists(partial));
    expect_ok("create", qt_qcal_create(&w, path, &info, false, &err), &err);
    expect_error("in use", qt_qcal_create(&second, path, &info, false, &err), QT_E_RESOURCE,
                 "in use by another process", &err);
    expect_ok("put", put_all(w, &err), &err);
    expect_ok("finish", qt_qcal_finish(w, &err), &err);
    qt_qcal_abandon(w);
    expect_ok("read", read_all(path, &err), &err);
    expect_absent("b.qcal.partial");
    free(made);
    free(partial);
}

/* PATH appears during the run: it is not overwritten, and the work is not lost. */
static void test_appears(void **state)
{
    struct qt_err err = {0};
    struct qt_qcal_writer *w;
    char *text;
    size_t size;
    (void)state;
    const char *path = fixture_path(dir, "late.qcal");
    expect_ok("create", qt_qcal_create(&w, path, &info, false, &err), &err);
    expect_ok("put", put_all(w, &err), &err);
    fixture_write(dir, "late.qcal", "precious", 8);
    expect_error("finish", qt_qcal_finish(w, &err), QT_E_RESOURCE, "is complete in ", &err);
    qt_qcal_abandon(w);
    expect_ok("theirs", qt_file_read(&text, &size, path, 100, &err), &err);
    assert_string_equal(text, "precious");
    qt_free(text);
    expect_ok("ours", rename(fixture_path(dir, "late.qcal.partial"), path), &err);
    expect_ok("read", read_all(path, &err), &err);
    unlink(path);
}

static void test_misuse(void **state)
{
    struct qt_err err = {0};
    struct qt_qcal_writer *w;
    struct qt_channels c;
    double h[WIDEST * WIDEST];
    (void)state;
    const char *path = fixture_path(dir, "a.qcal");
    expect_ok("create", qt_qcal_create(&w, path, &info, false, &err), &err);
    make(h, &c, 0, 1);
    c.sum2[3] = NAN;
    expect_error("NaN", qt_qcal_put(w, 0, 1, h, &c, "model", &err), QT_E_INPUT,
                 "model: layer 0, input 1: sums of channel 3 are not finite", &err);
    c.sum2[3] = 1;
    h[4 * 5 + 1] = 1e39;
    expect_error("1e39", qt_qcal_put(w, 0, 1, h, &c, "model", &err), QT_E_INPUT,
                 "model: layer 0, input 1: sums of channel 4 are not finite", &err);
    qt_channels_free(&c);
    qt_qcal_abandon(w);
    expect_absent("a.qcal");
    expect_absent("a.qcal.partial");

    expect_ok("create", qt_qcal_create(&w, path, &info, false, &err), &err);
    make(h, &c, 0, 1);
    expect_ok("put", qt_qcal_put(w, 0, 1, h, &c, "model", &err), &err);
    expect_error("twice", qt_qcal_put(w, 0, 1, h, &c, "model", &err), QT_E_INTERNAL,
                 "written twice", &err);
    expect_error("beyond", qt_qcal_put(w, LAYERS, 0, h, &c, "model", &err), QT_E_INTERNAL,
                 "not planned", &err);
    expect_error("unfinished", qt_qcal_finish(w, &err), QT_E_INTERNAL,
                 "layers.0.input.0.sum2: was never written", &err);
    qt_channels_free(&c);
    qt_qcal_abandon(w);
    expect_absent("a.qcal");
    qt_qcal_abandon(NULL);
    qt_qcal_close(NULL);
}

/* The nth allocation fails, for every n. */
static void test_no_memory(void **state)
{
    struct qt_err err = {0};
    struct qt_qcal_writer *w;
    int rc = QT_E_RESOURCE;
    (void)state;
    long n = 0;
    char path[512];
    snprintf(path, sizeof path, "%s", fixture_path(dir, "a.qcal"));
    for (; rc != QT_OK; n++) {
        /* The test makes the statistics; only the allocations around them fail. */
        err = (struct qt_err){0};
        qt_mem_fail_after(n);
        rc = qt_qcal_create(&w, path, &about, true, &err);
        qt_mem_fail_after(-1);
        if (rc == QT_OK) {
            assert_int_equal(put_all(w, &err), QT_OK);
            qt_mem_fail_after(n / 2);
            rc = qt_qcal_finish(w, &err);
            qt_mem_fail_after(-1);
            qt_qcal_abandon(w);
        }
        if (rc != QT_OK) {
            assert_int_equal(rc, QT_E_RESOURCE);
            expect_absent("a.qcal");
            expect_absent("a.qcal.partial");
        }
        assert_true(n < 100000);
    }
    assert_true(n > 50);
    rc = QT_E_RESOURCE;
    for (n = 0; rc != QT_OK; n++) {
        qt_mem_fail_after(n);
        rc = read_all(path, &err);
        qt_mem_fail_after(-1);
        assert_true(rc == QT_OK || rc == QT_E_RESOURCE);
        assert_true(n < 100000);
    }
    assert_true(n > 50);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_round_trip, setup, teardown),
        cmocka_unit_test_setup_teardown(test_round_trip, setup_experts, teardown),
        cmocka_unit_test_setup_teardown(test_same_bytes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_golden, setup_experts, teardown),
        cmocka_unit_test_setup_teardown(test_hostile, setup, teardown),
        cmocka_unit_test_setup_teardown(test_hostile_experts, setup_experts, teardown),
        cmocka_unit_test_setup_teardown(test_other_files, setup, teardown),
        cmocka_unit_test_setup_teardown(test_check_model, setup, teardown),
        cmocka_unit_test_setup_teardown(test_existing, setup, teardown),
        cmocka_unit_test_setup_teardown(test_appears, setup, teardown),
        cmocka_unit_test_setup_teardown(test_misuse, setup, teardown),
        cmocka_unit_test_setup_teardown(test_no_memory, setup, teardown),
        cmocka_unit_test_setup_teardown(test_no_memory, setup_experts, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
