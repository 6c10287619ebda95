/* A PyTorch file. Tensors that can be read have the declared size and can be written again. */
#include "tests/fuzz/fuzz.h"

void fuzz_init(void)
{
}

void fuzz_one(const uint8_t *data, size_t size)
{
    const char *path = fuzz_write("model.bin", data, size);
    struct qt_ckpt *ckpt;
    struct qt_err err = {0};
    bool sound = true;
    if (!fuzz_accepted(qt_ckpt_open_stored(&ckpt, path, &err), &err))
        return;
    for (size_t i = 0; i < qt_ckpt_count(ckpt); i++) {
        struct qt_blob blob;
        int rc = qt_ckpt_read(&blob, ckpt, qt_ckpt_tensor(ckpt, i), &err);
        sound = fuzz_accepted(rc, &err) && sound; /* data is CRC-checked when it is read */
        if (rc == QT_OK)
            qt_blob_free(&blob);
    }
    if (sound)
        fuzz_round_trip(ckpt, "again.safetensors");
    qt_ckpt_close(ckpt);
}
