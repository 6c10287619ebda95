/* A .safetensors file. Accepted tensors fill the file without gaps and can be written again.
 * Quantized and stacked ones can be read. */
#include "tests/fuzz/fuzz.h"

void fuzz_init(void)
{
}

static void read_views(const char *path)
{
    struct qt_ckpt *ckpt;
    struct qt_blob blob;
    struct qt_err err = {0};
    if (!fuzz_accepted(qt_ckpt_open(&ckpt, path, &err), &err))
        return;
    fuzz_accepted(qt_ckpt_check_readable(ckpt, &err), &err);
    for (size_t i = 0; i < qt_ckpt_count(ckpt); i++) {
        const struct qt_tensor *t = qt_ckpt_tensor(ckpt, i);
        FUZZ_CHECK(qt_ckpt_find(ckpt, t->name) == t);
        if (!fuzz_accepted(qt_ckpt_read(&blob, ckpt, t, &err), &err))
            continue;
        FUZZ_CHECK(blob.size == t->nbytes);
        qt_blob_free(&blob);
    }
    qt_ckpt_close(ckpt);
}

void fuzz_one(const uint8_t *data, size_t size)
{
    const char *path = fuzz_write("model.safetensors", data, size);
    struct qt_ckpt *ckpt;
    struct qt_err err = {0};
    uint64_t header = 0;
    size_t sum = 0;
    if (!fuzz_accepted(qt_ckpt_open_stored(&ckpt, path, &err), &err))
        return;
    memcpy(&header, data, sizeof header);
    for (size_t i = 0; i < qt_ckpt_count(ckpt); i++) {
        const struct qt_tensor *t = qt_ckpt_tensor(ckpt, i);
        FUZZ_CHECK(qt_ckpt_find(ckpt, t->name) == t);
        FUZZ_CHECK(t->nbytes * 8 == t->count * qt_dtype_bits(t->dtype));
        sum += t->nbytes;
    }
    FUZZ_CHECK(8 + header + sum == size);
    fuzz_round_trip(ckpt, "again.safetensors");
    qt_ckpt_close(ckpt);
    read_views(path);
}
