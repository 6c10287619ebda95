/*
 * GGUF files as checkpoints: what is refused, and damaged headers. test_sources.c compares values;
 * tests/cli/gguf_source.t runs the program on them.
 */
#include "ckpt_fixture.h"
#include "formats/gguf.h"

#define GOLDEN "tests/golden/sources/gguf_mixtral/model.gguf"

struct file {
    char *data;
    size_t size;
};

static struct file load(void)
{
    struct file f;
    struct qt_err err = {0};
    expect_ok(GOLDEN, qt_file_read(&f.data, &f.size, GOLDEN, 1 << 20, &err), &err);
    return f;
}

static void expect_refused(const char *path, size_t at, int rc, const struct qt_err *err)
{
    if ((rc != QT_E_INPUT && rc != QT_E_UNSUPPORTED) || !*err->reason || !*err->file)
        fail_msg("%s, byte %zu: status %d: %s: %s", path, at, rc, err->file, err->reason);
}

/* Size of everything in front of the data: the first tensor is the embedding, 4 x 64 F16. */
static size_t header_size(const struct file *f)
{
    struct qt_err err = {0};
    struct qt_ckpt *ckpt;
    struct qt_blob blob;
    size_t at = 0;
    expect_ok(GOLDEN, qt_ckpt_open(&ckpt, GOLDEN, &err), &err);
    const struct qt_tensor *t = qt_ckpt_find(ckpt, "model.embed_tokens.weight");
    assert_non_null(t);
    expect_ok("read", qt_ckpt_read(&blob, ckpt, t, &err), &err);
    while (at + blob.size <= f->size && memcmp(f->data + at, blob.data, blob.size) != 0)
        at++;
    assert_true(at + blob.size <= f->size);
    qt_blob_free(&blob);
    qt_ckpt_close(ckpt);
    return at;
}

static void test_truncated(void **state)
{
    (void)state;
    char *dir = fixture_dir();
    struct file f = load();
    const size_t header = header_size(&f);
    for (size_t n = 0; n < f.size; n += n < header ? 1 : 97) {
        struct qt_err err = {0};
        const char *path = fixture_write(dir, "model.gguf", f.data, n);
        const int rc = ckpt_read_all(path, &err);
        expect_refused(path, n, rc, &err);
    }
    qt_free(f.data);
    fixture_remove(dir);
}

static void test_changed(void **state)
{
    (void)state;
    static const unsigned char values[] = {0, 1, 0x7f, 0xff};
    char *dir = fixture_dir();
    struct file f = load();
    const size_t header = header_size(&f);
    size_t refused = 0;
    for (size_t i = 0; i < header; i += 2) {
        struct qt_err err = {0};
        const char before = f.data[i];
        f.data[i] = (char)values[i / 2 % sizeof values];
        const char *path = fixture_write(dir, "model.gguf", f.data, f.size);
        const int rc = ckpt_read_all(path, &err);
        if (rc < 0)
            expect_refused(path, i, rc, &err);
        refused += rc < 0;
        f.data[i] = before;
    }
    assert_true(refused > header / 20);
    qt_free(f.data);
    fixture_remove(dir);
}

static void test_out_of_memory(void **state)
{
    (void)state;
    int rc = QT_E_RESOURCE;
    long n = 0;
    for (; rc != QT_OK; n++) {
        struct qt_err err = {0};
        qt_mem_fail_after(n);
        rc = ckpt_read_all(GOLDEN, &err);
        qt_mem_fail_after(-1);
        if (rc != QT_OK)
            expect_error("open", rc, QT_E_RESOURCE, "out of memory", &err);
    }
    assert_true(n > 50);
}

/* ---- files made here ------------------------------------------------------------------------ */

static void put(struct file *f, const void *data, size_t size)
{
    f->data = realloc(f->data, f->size + size);
    memcpy(f->data + f->size, data, size);
    f->size += size;
}

static void put_u32(struct file *f, uint32_t v)
{
    put(f, &v, sizeof v);
}

static void put_u64(struct file *f, uint64_t v)
{
    put(f, &v, sizeof v);
}

static void put_text(struct file *f, const char *s)
{
    put_u64(f, strlen(s));
    put(f, s, strlen(s));
}

static void put_string(struct file *f, const char *key, const char *value)
{
    put_text(f, key);
    put_u32(f, 8);
    put_text(f, value);
}

static void put_number(struct file *f, const char *key, uint32_t value)
{
    put_text(f, key);
    put_u32(f, 4);
    put_u32(f, value);
}

/* A model of one tensor. */
struct example {
    const char *what, *arch, *name;
    uint32_t version, type;
    uint64_t rows, cols, offset, tensors;
    enum qt_status status;
    const char *fragment;
};

static void write_example(struct file *f, const struct example *e)
{
    static const char zeros[4096];
    put(f, "GGUF", 4);
    put_u32(f, e->version);
    put_u64(f, e->tensors);
    put_u64(f, 4);
    put_string(f, "general.architecture", e->arch);
    put_number(f, "llama.attention.key_length", 8);
    put_number(f, "llama.embedding_length", 64);
    put_string(f, "tokenizer.ggml.model", "bert");
    for (uint64_t i = 0; i < qt_min_size(e->tensors, 2); i++) {
        put_text(f, i ? "output.weight" : e->name);
        put_u32(f, 2);
        put_u64(f, e->cols);
        put_u64(f, e->rows);
        put_u32(f, e->type);
        put_u64(f, e->offset);
    }
    put(f, zeros, 32 - f->size % 32);
    put(f, zeros, sizeof zeros);
}

static void test_refusals(void **state)
{
    (void)state;
    static const struct example examples[] = {
        {"version 1", "llama", "token_embd.weight", 1, 0, 4, 64, 0, 1, QT_E_UNSUPPORTED,
         "GGUF of version 1"},
        {"big-endian", "llama", "token_embd.weight", 3 << 24, 0, 4, 64, 0, 1, QT_E_UNSUPPORTED,
         "little-endian"},
        {"architecture", "bloom", "token_embd.weight", 3, 0, 4, 64, 0, 1, QT_E_UNSUPPORTED,
         "the architecture 'bloom' is not supported"},
        {"tensor", "llama", "blk.0.ssm_in.weight", 3, 0, 4, 64, 0, 1, QT_E_UNSUPPORTED,
         "blk.0.ssm_in.weight: the architecture 'llama' has no tensor of this name"},
        {"type", "llama", "token_embd.weight", 3, 16, 4, 64, 0, 1, QT_E_UNSUPPORTED,
         "has GGUF's type 16"},
        {"blocks", "llama", "token_embd.weight", 3, 2, 4, 48, 0, 1, QT_E_INPUT,
         "no multiples of the 32 weights of a block of Q4_0"},
        {"too large", "llama", "token_embd.weight", 3, 0, 1ull << 40, 1ull << 30, 0, 1, QT_E_INPUT,
         "shape is too large"},
        {"beyond the end", "llama", "token_embd.weight", 3, 0, 4, 1024, 0, 1, QT_E_INPUT,
         "the file is incomplete"},
        {"alignment", "llama", "token_embd.weight", 3, 0, 4, 64, 8, 1, QT_E_INPUT,
         "no multiple of the alignment 32"},
        {"overlap", "llama", "token_embd.weight", 3, 0, 4, 64, 0, 2, QT_E_INPUT, "overlaps"},
        {"count", "llama", "token_embd.weight", 3, 0, 4, 64, 0, 1ull << 50, QT_E_INPUT,
         "more keys or tensors than the file has room for"},
        {"no embedding", "llama", "output.weight", 3, 0, 4, 64, 0, 1, QT_E_INPUT,
         "has no tensor token_embd.weight"},
        {"shape", "llama", "blk.0.attn_q.weight", 3, 0, 4, 64, 0, 1, QT_E_INPUT,
         "its shape is not that of the tensor model.layers.0.self_attn.q_proj.weight"},
        {"tokenizer", "llama", "token_embd.weight", 3, 0, 4, 64, 0, 1, QT_E_UNSUPPORTED,
         "the tokenizer 'bert' is not supported: put the tokenizer.json"},
    };
    char *dir = fixture_dir();
    for (size_t i = 0; i < sizeof examples / sizeof *examples; i++) {
        struct file f = {NULL, 0};
        struct qt_err err = {0};
        write_example(&f, &examples[i]);
        const int rc = ckpt_read_all(fixture_write(dir, "model.gguf", f.data, f.size), &err);
        expect_error(examples[i].what, rc, examples[i].status, examples[i].fragment, &err);
        free(f.data);
    }
    /* With a tokenizer.json beside it the last example is read. */
    struct file f = {NULL, 0};
    struct qt_err err = {0};
    write_example(&f, &examples[sizeof examples / sizeof *examples - 1]);
    fixture_write(dir, "tokenizer.json", "{}", 2);
    expect_ok("tokenizer.json",
              ckpt_read_all(fixture_write(dir, "model.gguf", f.data, f.size), &err), &err);
    free(f.data);
    fixture_remove(dir);
}

/* Of the tensors that GGUF stores as vectors, some are matrices of one row. */
static void test_one_row(void **state)
{
    const struct qt_gguf_family *f = qt_gguf_family_find("qwen2_moe");
    struct qt_gguf_origin origin;
    (void)state;
    assert_true(qt_gguf_origin(&origin, f, "blk.0.ffn_gate_inp_shexp.weight") && origin.matrix);
    assert_true(qt_gguf_origin(&origin, f, "blk.0.attn_norm.weight") && !origin.matrix);
    assert_true(qt_gguf_origin(&origin, f, "blk.0.attn_q.bias") && !origin.matrix);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_row), cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_changed), cmocka_unit_test(test_out_of_memory),
        cmocka_unit_test(test_refusals)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
