/*
 * The journal of an interrupted run, beside the files of that run. A resume continues or is refused
 * (QT_E_USAGE: not a journal), and treats only units with a record as finished.
 */
#include "tests/fuzz/fuzz.h"

#include <string.h>
#include <unistd.h>

static const struct qt_tensor tensors[] = {
    {.name = "a", .dtype = QT_U8, .ndim = 1, .shape = {3}, .count = 3, .nbytes = 3},
    {.name = "b", .dtype = QT_U8, .ndim = 1, .shape = {5}, .count = 5, .nbytes = 5},
};

uint32_t __wrap_qt_crc32(uint32_t crc, const void *data, size_t size);
uint32_t __wrap_qt_crc32(uint32_t crc, const void *data, size_t size)
{
    (void)crc, (void)data, (void)size;
    return 0;
}

static int open_writer(struct qt_writer **w, bool resume, struct qt_err *err)
{
    const struct qt_writer_options opt = {.resume = resume};
    json_t *identity = json_pack("{s:s, s:[i, i]}", "scheme", "fp6", "files", 1, 2);
    FUZZ_CHECK(identity);
    int rc = qt_writer_open(w, fuzz_path("out"), tensors, 2, identity, &opt, err);
    json_decref(identity);
    return rc;
}

static void start(bool keep)
{
    struct qt_writer *w;
    struct qt_err err = {0};
    json_t *record = json_pack("{s:s, s:[i], s:s}", "dtype", "U8", "shape", 3, "crc32", "00000000");
    fuzz_ok(open_writer(&w, false, &err), &err);
    fuzz_ok(qt_writer_put(w, 0, "abc", 3, 0, &err), &err);
    fuzz_ok(qt_writer_commit(w, "a", record, &err), &err);
    json_decref(record);
    if (!keep)
        qt_writer_discard(w);
    qt_writer_close(w);
}

void fuzz_init(void)
{
    char *text;
    size_t size;
    struct qt_err err = {0};
    start(true);
    fuzz_ok(qt_file_read(&text, &size, fuzz_path("out.partial/journal"), 1 << 20, &err), &err);
    fuzz_seed("made", text, size);
    qt_free(text);
}

void fuzz_one(const uint8_t *data, size_t size)
{
    struct qt_writer *w;
    struct qt_err err = {0};
    if (!qt_path_exists(fuzz_path("out.partial")))
        start(true); /* a run with an empty journal starts over and is discarded below */
    fuzz_write("out.partial/journal", data, size);
    int rc = open_writer(&w, true, &err);
    FUZZ_CHECK(rc == QT_OK ||
               ((rc == QT_E_RESUME || rc == QT_E_USAGE) && err.reason[0] && !fuzz_must_accept));
    if (rc < 0)
        return;
    FUZZ_CHECK(qt_writer_done(w, "a") || !fuzz_must_accept);
    FUZZ_CHECK(!qt_writer_done(w, "never"));
    qt_writer_close(w);
}
