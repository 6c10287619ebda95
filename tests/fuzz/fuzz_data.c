/* Calibration data; the first byte of the input selects the kind of file. Accepted ids are within
 * the vocabulary, and no temporary file remains. */
#include "calib/calib.h"
#include "tests/fuzz/fuzz.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { VOCAB = 1000 };

void fuzz_init(void)
{
    FUZZ_CHECK(mkdir(fuzz_path("tmp"), 0777) == 0);
    FUZZ_CHECK(setenv("TMPDIR", fuzz_path("tmp"), 1) == 0);
}

static size_t files_in(const char *path)
{
    size_t n = 0;
    DIR *dir = opendir(path);
    FUZZ_CHECK(dir);
    while (readdir(dir))
        n++;
    closedir(dir);
    return n - 2;
}

void fuzz_one(const uint8_t *data, size_t size)
{
    static const char *const names[] = {"x.txt",    "x.jsonl",  "x.u16",      "x.u32",
                                        "x.npy",    "x.txt.gz", "x.jsonl.gz", "x.u16.gz",
                                        "x.u32.gz", "x.npy.gz"};
    struct qt_data out;
    struct qt_err err = {0};
    if (size == 0)
        return;
    const char *path =
        fuzz_write(names[data[0] % (sizeof names / sizeof *names)], data + 1, size - 1);
    int rc = qt_data_read(&out, &path, 1, "examples/nano-llama", VOCAB, &err);
    FUZZ_CHECK(files_in(fuzz_path("tmp")) == 0);
    if (!fuzz_accepted(rc, &err))
        return;
    for (size_t i = 0; i < out.count; i++)
        FUZZ_CHECK(out.ids[i] < VOCAB);
    qt_data_free(&out);
}
