/* Calibration data; the first byte of the input selects the name of the file. Accepted ids are
 * within the vocabulary, and the first ids are the same if only these are wanted. */
#include "calib/calib.h"
#include "tests/fuzz/fuzz.h"

#include <string.h>

enum { VOCAB = 1000 };

void fuzz_init(void)
{
}

void fuzz_one(const uint8_t *data, size_t size)
{
    static const char *const names[] = {"x.txt",    "x.jsonl",  "x.u16",      "x.u32",
                                        "x.npy",    "x.txt.gz", "x.jsonl.gz", "x.u16.gz",
                                        "x.u32.gz", "x.npy.gz", "x.json",     "x"};
    struct qt_data_options opt = {.dir = "examples/nano-llama", .vocab = VOCAB};
    struct qt_data out, first;
    struct qt_err err = {0};
    if (size == 0)
        return;
    const char *path =
        fuzz_write(names[data[0] % (sizeof names / sizeof *names)], data + 1, size - 1);
    int rc = qt_data_read(&out, &path, 1, &opt, &err);
    if (!fuzz_accepted(rc, &err))
        return;
    for (size_t i = 0; i < out.count; i++)
        FUZZ_CHECK(out.ids[i] < VOCAB);
    opt.most = 5;
    fuzz_ok(qt_data_read(&first, &path, 1, &opt, &err), &err);
    FUZZ_CHECK(first.count >= qt_min_size(out.count, opt.most) && first.count <= out.count);
    FUZZ_CHECK(first.count == 0 || memcmp(first.ids, out.ids, first.count * sizeof *out.ids) == 0);
    qt_data_free(&first);
    qt_data_free(&out);
}
