/*
 * qtool.json, combined with the tensors of a container that has a matrix of every scheme. An
 * accepted manifest refers to every stored tensor once; its entries decode or are refused.
 */
#include "tests/fuzz/quantized.h"

#include <string.h>

enum { MAX_SCHEMES = 32 };

void fuzz_init(void)
{
    const char *names[MAX_SCHEMES], *path;
    const struct qt_scheme *s;
    struct qt_err err = {0};
    size_t n = 0, size;
    char *text;
    for (size_t i = 0; n < MAX_SCHEMES && (s = qt_scheme_at(i)) != NULL; i++)
        names[n++] = qt_scheme_preset(s, 0)->name;
    fuzz_quantized("c", names, n);
    path = fuzz_path("c/qtool.json");
    fuzz_ok(qt_file_read(&text, &size, path, 1 << 24, &err), &err);
    fuzz_seed("made.json", text, size);
    qt_free(text);
}

/* Opens the KV entry for a small model. */
static void check_kv(const struct qt_container *c)
{
    const struct qt_model_info model = {.layers = 1, .kv_heads = 2, .head_dim = 8};
    struct qt_kv kv;
    struct qt_err err = {0};
    (void)fuzz_accepted(qt_kv_open(&kv, c, &model, &err), &err);
    qt_kv_free(&kv);
}

void fuzz_one(const uint8_t *data, size_t size)
{
    struct qt_container *c;
    struct qt_err err = {0};
    size_t sections = 0, copied = 0;
    fuzz_write("c/qtool.json", data, size);
    if (!fuzz_accepted(qt_container_open(&c, fuzz_path("c"), &err), &err))
        return;
    for (size_t i = 0; i < qt_container_count(c); i++) {
        const struct qt_entry *e = qt_container_entry(c, i);
        FUZZ_CHECK(qt_container_find(c, e->name) == e);
        sections += e->nsections;
    }
    for (size_t i = 0; i < qt_ckpt_count(qt_container_ckpt(c)); i++)
        copied += qt_container_is_copied(c, qt_ckpt_tensor(qt_container_ckpt(c), i)->name);
    const json_t *kv = json_object_get(qt_kv_entry(c), "tensors");
    FUZZ_CHECK(sections + copied + json_object_size(kv) == qt_ckpt_count(qt_container_ckpt(c)));
    if (qt_kv_entry(c))
        check_kv(c);
    (void)fuzz_check_entries(c);
    for (size_t i = 0; i < qt_ckpt_count(qt_container_ckpt(c)); i++)
        (void)fuzz_accepted(qt_container_check_crc(c, i, &err), &err);
    qt_container_close(c);
}
