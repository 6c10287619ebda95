/* qt_verify: a sound container passes with and without its source; every difference is found and
 * named. */
#include "fixture.h"

#include "verify/verify.h"

static const char model_dir[] = "examples/nano-llama";
static const char norm[] = "model.norm.weight";
static const char q_proj[] = "model.layers.1.self_attn.q_proj.weight";

/* A container of the example model, made once. */
struct world {
    char *dir;
    char out[256];
    struct qt_ckpt *ckpt;
};
static struct world world;

static int open_world(void **state)
{
    const struct qt_rule rule = {"down_proj", "fp6:e=2"};
    struct qt_quantize_report report;
    struct qt_err err = {0};
    (void)state;
    world.dir = fixture_dir();
    snprintf(world.out, sizeof world.out, "%s/out", world.dir);
    const struct qt_quantize_options opt = {
        .plan = {.scheme = "nf4:g=64", .rules = &rule, .nrules = 1}, .out_dir = world.out};
    if (qt_ckpt_open(&world.ckpt, model_dir, &err) < 0 ||
        qt_quantize(&report, world.ckpt, &opt, &err) < 0) {
        print_error("%s: %s\n", err.file, err.reason);
        return -1;
    }
    json_decref(report.document);
    return 0;
}

static int close_world(void **state)
{
    (void)state;
    qt_ckpt_close(world.ckpt);
    assert_int_equal(qt_dir_remove(world.out, NULL), 0);
    fixture_remove(world.dir);
    return 0;
}

/* Opens the container and verifies it. Frees the report if `out` is NULL. */
static int verify(struct qt_verify_report *out, const struct qt_ckpt *source, struct qt_err *err)
{
    struct qt_container *c = NULL;
    struct qt_verify_report report = {0};
    *err = (struct qt_err){0};
    int rc = qt_container_open(&c, world.out, err);
    if (rc == QT_OK)
        rc = qt_verify(&report, c, source, NULL, NULL, err);
    for (size_t i = 0; rc == QT_OK && i < report.count; i++)
        report.tensors[i].name = report.tensors[i].spec = NULL; /* freed with the container */
    qt_container_close(c);
    if (out)
        *out = report;
    else
        qt_verify_free(&report);
    return rc;
}

/* ---- sound ---------------------------------------------------------------------------------- */

static void test_sound_alone(void **state)
{
    struct qt_verify_report r;
    struct qt_err err;
    (void)state;
    expect_ok("verify", verify(&r, NULL, &err), &err);
    assert_int_equal(r.count, 21);
    assert_int_equal(r.copied, 8);
    assert_true(r.bpw > 4.25 && r.bpw < 6.1);
    for (size_t i = 0; i < r.count; i++)
        assert_false(r.tensors[i].compared);
    qt_verify_free(&r);
}

static void test_sound_against_source(void **state)
{
    struct qt_verify_report r;
    struct qt_err err;
    double bits = 0, weights = 0;
    (void)state;
    expect_ok("verify", verify(&r, world.ckpt, &err), &err);
    for (size_t i = 0; i < r.count; i++) {
        const struct qt_verify_tensor *t = &r.tensors[i];
        assert_true(t->compared);
        assert_int_equal(t->error.count, t->n * t->k);
        assert_true(qt_error_sqnr_db(&t->error) > 15 && qt_error_sqnr_db(&t->error) < 45);
        bits += t->bpw * (double)(t->n * t->k);
        weights += (double)(t->n * t->k);
    }
    assert_true(bits / weights > r.bpw - 1e-9 && bits / weights < r.bpw + 1e-9);
    qt_verify_free(&r);
}

/* The figures in the manifest (9 digits) equal those that verify measures. */
static void test_recorded_errors(void **state)
{
    struct qt_container *c = NULL;
    struct qt_verify_report r;
    struct qt_err err = {0};
    (void)state;
    expect_ok("open", qt_container_open(&c, world.out, &err), &err);
    expect_ok("verify", qt_verify(&r, c, world.ckpt, NULL, NULL, &err), &err);
    for (size_t i = 0; i < r.count; i++) {
        double recorded = 0, measured = qt_error_sqnr_db(&r.tensors[i].error);
        json_t *entry;
        expect_ok("entry", qt_entry_json(&entry, qt_container_entry(c, i), &err), &err);
        const json_t *error = json_object_get(entry, "error");
        assert_int_equal(qt_json_get_real(&recorded, error, "sqnr_db", "qtool.json", NULL), 0);
        assert_true(measured > recorded - 1e-6 && measured < recorded + 1e-6);
        json_decref(entry);
    }
    qt_verify_free(&r);
    qt_container_close(c);
}

/* ---- damaged -------------------------------------------------------------------------------- */

/* Offset of a tensor's data in the container's only file. */
static size_t data_offset(const char *name)
{
    struct qt_ckpt *ckpt = NULL;
    struct qt_blob blob;
    struct qt_map map;
    struct qt_err err;
    char path[300];
    snprintf(path, sizeof path, "%s/model.safetensors", world.out);
    expect_ok("open", qt_ckpt_open(&ckpt, path, &err), &err);
    expect_ok("read", qt_ckpt_read(&blob, ckpt, qt_ckpt_find(ckpt, name), &err), &err);
    expect_ok("map", qt_map_open(&map, path, &err), &err);
    unsigned char *at = memmem(map.data, map.size, blob.data, blob.size);
    assert_non_null(at);
    size_t offset = (size_t)(at - map.data);
    qt_map_close(&map);
    qt_blob_free(&blob);
    qt_ckpt_close(ckpt);
    return offset;
}

static void flip_byte(size_t offset)
{
    char path[300];
    snprintf(path, sizeof path, "%s/model.safetensors", world.out);
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, (long)offset, SEEK_SET), 0);
    int byte = getc(f);
    assert_int_equal(fseek(f, (long)offset, SEEK_SET), 0);
    putc(byte ^ 0x10, f);
    assert_int_equal(fclose(f), 0);
}

static void test_every_tensor_is_checksummed(void **state)
{
    static const char *const names[] = {
        "model.norm.weight",
        "model.layers.1.self_attn.q_proj.weight.q.plane0",
        "model.layers.1.self_attn.q_proj.weight.q.scale",
        "model.layers.1.mlp.down_proj.weight.q.scale",
    };
    struct qt_err err;
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        size_t offset = data_offset(names[i]);
        flip_byte(offset);
        int rc = verify(NULL, NULL, &err);
        flip_byte(offset);
        expect_error(names[i], rc, QT_E_INPUT, names[i], &err);
        assert_non_null(strstr(err.reason, "CRC"));
    }
    expect_ok("restored", verify(NULL, NULL, &err), &err);
}

/* Updates the CRC of the first section of q_proj in the manifest. */
static void sign(void)
{
    char path[300];
    json_t *manifest, *section;
    struct qt_ckpt *ckpt;
    struct qt_blob blob;
    struct qt_err err;
    snprintf(path, sizeof path, "%s/model.safetensors", world.out);
    expect_ok("open", qt_ckpt_open(&ckpt, path, &err), &err);
    snprintf(path, sizeof path, "%s.q.plane0", q_proj);
    expect_ok("read", qt_ckpt_read(&blob, ckpt, qt_ckpt_find(ckpt, path), &err), &err);
    const uint32_t crc = qt_crc32(0, blob.data, blob.size);
    qt_blob_free(&blob);
    qt_ckpt_close(ckpt);
    snprintf(path, sizeof path, "%s/qtool.json", world.out);
    expect_ok("manifest", qt_json_load(&manifest, path, 1 << 20, &err), &err);
    section = json_object_get(json_object_get(manifest, "tensors"), q_proj);
    section = json_array_get(json_object_get(section, "sections"), 0);
    assert_int_equal(json_object_set_new(section, "crc32", json_sprintf("%08x", crc)), 0);
    assert_int_equal(json_dump_file(manifest, path, 0), 0);
    json_decref(manifest);
}

/* The model fills 32 of the 64 columns of a fragment block: nonzero padding is an error even if the
 * checksums are right. */
static void test_padding_is_padding(void **state)
{
    const struct world kept = world;
    struct qt_quantize_report report;
    struct qt_err err;
    (void)state;
    snprintf(world.out, sizeof world.out, "%s/padded", world.dir);
    expect_ok("model", qt_ckpt_open(&world.ckpt, "tests/golden/models/llama", &err), &err);
    const struct qt_quantize_options opt = {.plan = {.scheme = "nf4"}, .out_dir = world.out};
    expect_ok("quantize", qt_quantize(&report, world.ckpt, &opt, &err), &err);
    json_decref(report.document);
    expect_ok("sound", verify(NULL, world.ckpt, &err), &err);
    flip_byte(data_offset("model.layers.1.self_attn.q_proj.weight.q.plane0") + 8);
    sign();
    expect_error("padding", verify(NULL, world.ckpt, &err), QT_E_INPUT,
                 "q_proj.weight: rows 0 to 15 differ from their codes packed again", &err);
    qt_ckpt_close(world.ckpt);
    assert_int_equal(qt_dir_remove(world.out, NULL), 0);
    world = kept;
}

/* ---- different source ----------------------------------------------------------------------- */

/* One change to a copy of the model's tensors. */
struct change {
    const char *name;   /* the tensor that changes */
    const char *rename; /* its new name, or */
    size_t rows;        /* its new first dimension, or */
    bool flip;          /* one bit of its data, or */
    bool add;           /* an additional tensor `name` */
};

static void apply(struct qt_tensor *t, const struct change *c)
{
    if (strcmp(t->name, c->name) != 0)
        return;
    if (c->rename)
        t->name = c->rename;
    if (c->rows) {
        t->nbytes = t->nbytes / t->shape[0] * c->rows;
        t->count = t->count / t->shape[0] * c->rows;
        t->shape[0] = c->rows;
    }
}

/* Writes the model's tensors with one change as DIR/source.safetensors and verifies against it. */
static int verify_changed(const struct change *c, struct qt_err *err)
{
    size_t n = qt_ckpt_count(world.ckpt), total = n + c->add, size;
    struct qt_tensor *tensors = calloc(total, sizeof *tensors);
    uint64_t *offsets = calloc(total + 1, sizeof *offsets);
    struct qt_ckpt *source = NULL;
    const char *path = fixture_path(world.dir, "source.safetensors");
    char *header;
    assert_true(tensors && offsets);
    for (size_t i = 0; i < n; i++) {
        tensors[i] = *qt_ckpt_tensor(world.ckpt, i);
        apply(&tensors[i], c);
    }
    if (c->add)
        tensors[n] = (struct qt_tensor){.name = c->name, .dtype = QT_U8, .ndim = 1, .shape = {0}};
    expect_ok("header", qt_safetensors_header(&header, &size, offsets, tensors, total, NULL, err),
              err);
    unsigned char *file = calloc(1, offsets[total]);
    assert_non_null(file);
    memcpy(file, header, size);
    for (size_t i = 0; i < n; i++) {
        struct qt_blob blob;
        expect_ok("read", qt_ckpt_read(&blob, world.ckpt, qt_ckpt_tensor(world.ckpt, i), err), err);
        memcpy(file + offsets[i], blob.data, qt_min_size(blob.size, tensors[i].nbytes));
        qt_blob_free(&blob);
        file[offsets[i]] ^= (unsigned char)(c->flip && !strcmp(tensors[i].name, c->name));
    }
    fixture_write(world.dir, "source.safetensors", file, offsets[total]);
    expect_ok("open", qt_ckpt_open(&source, path, err), err);
    int rc = verify(NULL, source, err);
    qt_ckpt_close(source);
    unlink(path);
    qt_free(header);
    free(file);
    free(offsets);
    free(tensors);
    return rc;
}

static void test_other_sources(void **state)
{
    static const struct {
        struct change change;
        const char *message;
    } cases[] = {
        {{norm, .flip = true}, "model.norm.weight: differs from the copied tensor of the source"},
        {{norm, .rows = 128}, "model.norm.weight: has a different dtype or shape in the source"},
        {{norm, .rename = "model.other.weight"},
         "model.norm.weight: is not in the source checkpoint"},
        {{q_proj, .flip = true}, "q_proj.weight: was made from different data"},
        {{q_proj, .rows = 128}, "q_proj.weight: has a different shape in the source"},
        {{q_proj, .rename = "x"}, "q_proj.weight: is not in the source checkpoint"},
        {{"extra", .add = true}, "tensor extra: is in the source but not in the container"},
    };
    struct qt_err err;
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        expect_error(cases[i].message, verify_changed(&cases[i].change, &err), QT_E_INPUT,
                     cases[i].message, &err);
    /* without a change it passes */
    expect_ok("unchanged", verify_changed(&(struct change){.name = "none"}, &err), &err);
}

/* ---- resources ------------------------------------------------------------------------------ */

static void test_threads_change_nothing(void **state)
{
    struct qt_verify_report a, b;
    struct qt_err err;
    (void)state;
    qt_threads_set(1);
    expect_ok("serial", verify(&a, world.ckpt, &err), &err);
    qt_threads_set(3);
    expect_ok("parallel", verify(&b, world.ckpt, &err), &err);
    qt_threads_set(0);
    for (size_t i = 0; i < a.count; i++)
        assert_memory_equal(&a.tensors[i].error, &b.tensors[i].error, sizeof a.tensors[i].error);
    qt_verify_free(&a);
    qt_verify_free(&b);
}

static void test_out_of_memory(void **state)
{
    struct qt_container *c = NULL;
    struct qt_verify_report r;
    struct qt_err err = {0};
    int rc = QT_E_RESOURCE;
    (void)state;
    expect_ok("open", qt_container_open(&c, world.out, &err), &err);
    for (long n = 0; rc != QT_OK; n += n < 30 ? 1 : 17) {
        qt_mem_fail_after(n);
        rc = qt_verify(&r, c, world.ckpt, NULL, NULL, &err);
        qt_mem_fail_after(-1);
        if (rc != QT_OK)
            expect_error("allocation", rc, QT_E_RESOURCE, "memory", &err);
    }
    qt_verify_free(&r);
    qt_container_close(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sound_alone),
        cmocka_unit_test(test_sound_against_source),
        cmocka_unit_test(test_recorded_errors),
        cmocka_unit_test(test_every_tensor_is_checksummed),
        cmocka_unit_test(test_padding_is_padding),
        cmocka_unit_test(test_other_sources),
        cmocka_unit_test(test_threads_change_nothing),
        cmocka_unit_test(test_out_of_memory),
    };
    return cmocka_run_group_tests(tests, open_world, close_world);
}
