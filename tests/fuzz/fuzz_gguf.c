/* A GGUF file: its tensors can be read, and its side files are JSON that the readers accept or
 * refuse like any other. */
#include "model/model.h"
#include "tests/fuzz/fuzz.h"

void fuzz_init(void)
{
}

static void read_side_files(const struct qt_ckpt *ckpt)
{
    const struct qt_weights w = qt_weights_of_ckpt(ckpt);
    struct qt_tokenizer *tok;
    struct qt_model *model;
    struct qt_err err = {0};
    char *path;
    json_t *config;
    fuzz_ok(qt_path_join(&path, qt_ckpt_dir(ckpt), "config.json", &err), &err);
    fuzz_ok(qt_json_load(&config, path, 1 << 28, &err), &err);
    json_decref(config);
    qt_free(path);
    if (fuzz_accepted(qt_model_open(&model, &w, &err), &err))
        qt_model_close(model);
    if (fuzz_accepted(qt_tokenizer_open(&tok, qt_ckpt_dir(ckpt), &err), &err))
        qt_tokenizer_close(tok);
}

void fuzz_one(const uint8_t *data, size_t size)
{
    const char *path = fuzz_write("model.gguf", data, size);
    struct qt_ckpt *ckpt;
    struct qt_err err = {0};
    if (!fuzz_accepted(qt_ckpt_open(&ckpt, path, &err), &err))
        return;
    fuzz_accepted(qt_ckpt_check_readable(ckpt, &err), &err);
    for (size_t i = 0; i < qt_ckpt_count(ckpt); i++) {
        const struct qt_tensor *t = qt_ckpt_tensor(ckpt, i);
        struct qt_blob blob;
        FUZZ_CHECK(qt_ckpt_find(ckpt, t->name) == t);
        if (!fuzz_accepted(qt_ckpt_read(&blob, ckpt, t, &err), &err))
            continue;
        FUZZ_CHECK(blob.size == t->nbytes);
        qt_blob_free(&blob);
    }
    read_side_files(ckpt);
    qt_ckpt_close(ckpt);
}
