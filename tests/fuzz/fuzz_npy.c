/* A .npy file, read as an array and as token ids. The data of an accepted array ends at the end of
 * the file, and reads the same from a file with a newly written header. */
#include "tests/fuzz/fuzz.h"

#include <stdio.h>
#include <string.h>

enum { VOCAB = 1000 };

void fuzz_init(void)
{
}

static const char *descr(enum qt_dtype t)
{
    static const char *const codes[QT_DTYPE_COUNT] = {
        [QT_BOOL] = "|b1", [QT_U8] = "|u1",  [QT_I8] = "|i1",  [QT_U16] = "<u2", [QT_I16] = "<i2",
        [QT_F16] = "<f2",  [QT_U32] = "<u4", [QT_I32] = "<i4", [QT_F32] = "<f4", [QT_U64] = "<u8",
        [QT_I64] = "<i8",  [QT_F64] = "<f8", [QT_C64] = "<c8",
    };
    FUZZ_CHECK(codes[t]);
    return codes[t];
}

static void check_again(const struct qt_npy *a, size_t bytes)
{
    static char file[1 << 20];
    struct qt_err err = {0};
    struct qt_npy b;
    size_t n = (size_t)sprintf(file, "\x93NUMPY%c%c..{'descr':'%s','fortran_order':False,'shape':(",
                               1, 0, descr(a->dtype));
    for (int d = 0; d < a->ndim; d++)
        n += (size_t)sprintf(file + n, "%zu,", a->shape[d]);
    n += (size_t)sprintf(file + n, ")}\n");
    file[8] = (char)((n - 10) & 255);
    file[9] = (char)((n - 10) >> 8);
    if (bytes > sizeof file - n)
        return;
    if (bytes)
        memcpy(file + n, a->data, bytes);
    fuzz_ok(qt_npy_open(&b, fuzz_write("again.npy", file, n + bytes), &err), &err);
    FUZZ_CHECK(a->dtype == b.dtype && a->ndim == b.ndim && a->count == b.count);
    FUZZ_CHECK(memcmp(a->shape, b.shape, (size_t)a->ndim * sizeof *a->shape) == 0);
    FUZZ_CHECK(bytes == 0 || memcmp(a->data, b.data, bytes) == 0);
    qt_npy_close(&b);
}

void fuzz_one(const uint8_t *data, size_t size)
{
    const char *path = fuzz_write("x.npy", data, size);
    struct qt_err err = {0};
    struct qt_npy npy;
    uint32_t *ids;
    size_t count;
    if (fuzz_accepted(qt_npy_open(&npy, path, &err), &err)) {
        size_t bytes = npy.count * qt_dtype_bits(npy.dtype) / 8;
        FUZZ_CHECK(npy.data + bytes == npy.map.data + npy.map.size);
        check_again(&npy, bytes);
        qt_npy_close(&npy);
    }
    int rc = qt_token_ids_read(&ids, &count, path, VOCAB, &err);
    if (rc == QT_OK) {
        for (size_t i = 0; i < count; i++)
            FUZZ_CHECK(ids[i] < VOCAB);
        qt_free(ids);
    }
}
