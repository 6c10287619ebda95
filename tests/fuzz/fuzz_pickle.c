/* The pickle in a PyTorch file, without the archive and its checksums. */
#include "formats/formats_internal.h"
#include "tests/fuzz/fuzz.h"

void fuzz_init(void)
{
}

static bool within(const char *p, size_t n, const uint8_t *data, size_t size)
{
    const uint8_t *at = (const uint8_t *)p;
    return n == 0 || (at >= data && at < data + size && n <= size - (size_t)(at - data));
}

void fuzz_one(const uint8_t *data, size_t size)
{
    struct qt_pickle_tensor *tensors;
    struct qt_err err = {0};
    size_t count;
    if (!fuzz_accepted(qt_state_dict_read(&tensors, &count, data, size, "data.pkl", &err), &err))
        return;
    for (size_t i = 0; i < count; i++) {
        const struct qt_pickle_tensor *t = &tensors[i];
        FUZZ_CHECK(within(t->name, t->name_size, data, size));
        FUZZ_CHECK(within(t->key, t->key_size, data, size));
        FUZZ_CHECK(t->ndim >= 0 && t->ndim <= QT_MAX_DIMS);
        FUZZ_CHECK((unsigned)t->dtype < QT_DTYPE_COUNT);
    }
    qt_free(tensors);
}
