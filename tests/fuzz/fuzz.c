/* Code shared by the fuzz targets: entry points of libFuzzer, checks, files. */
#include "tests/fuzz/fuzz.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

bool fuzz_must_accept;
size_t fuzz_inputs;
static char *dir;

/* ---- the process ---------------------------------------------------------------------------- */

static void remove_dir(void)
{
    char command[256];
    snprintf(command, sizeof command, "rm -rf '%s'", dir);
    if (system(command) != 0)
        perror(dir);
    free(dir);
}

static void make_dir(void)
{
    const char *base = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    dir = malloc(strlen(base) + 32);
    FUZZ_CHECK(dir);
    sprintf(dir, "%s/qtool-fuzz-XXXXXX", base);
    FUZZ_CHECK(mkdtemp(dir));
    atexit(remove_dir);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    qt_threads_set(1);
    make_dir();
    fuzz_init();
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_one(data, size);
    fuzz_inputs++;
    return 0;
}

void fuzz_seed(const char *name, const void *data, size_t size)
{
    const char *seeds = getenv("QT_FUZZ_SEEDS");
    struct qt_err err = {0};
    char path[512];
    fuzz_must_accept = true;
    fuzz_one(data, size);
    fuzz_inputs++;
    fuzz_must_accept = false;
    if (!seeds)
        return;
    snprintf(path, sizeof path, "%s/%s", seeds, name);
    fuzz_ok(qt_file_write(path, data, size, &err), &err);
}

/* ---- checks --------------------------------------------------------------------------------- */

void fuzz_broken(const char *file, int line, const char *promise)
{
    fprintf(stderr, "%s:%d: does not hold: %s\n", file, line, promise);
    abort();
}

bool fuzz_accepted(int rc, const struct qt_err *err)
{
    if (rc == QT_OK)
        return true;
    FUZZ_CHECK(rc == QT_E_INPUT || rc == QT_E_UNSUPPORTED);
    FUZZ_CHECK((int)err->status == rc && err->reason[0]);
    if (fuzz_must_accept) {
        fprintf(stderr, "%s: %s: %s\n", err->file, err->tensor, err->reason);
        fuzz_broken(__FILE__, __LINE__, "an input that must be accepted is");
    }
    return false;
}

void fuzz_ok(int rc, const struct qt_err *err)
{
    if (rc != QT_OK)
        fprintf(stderr, "status %d: %s: %s: %s\n", rc, err->file, err->tensor, err->reason);
    FUZZ_CHECK(rc == QT_OK);
}

/* ---- files ---------------------------------------------------------------------------------- */

const char *fuzz_dir(void)
{
    return dir;
}

const char *fuzz_path(const char *name)
{
    static char paths[8][512];
    static unsigned next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", dir, name);
    return path;
}

const char *fuzz_write(const char *name, const void *data, size_t size)
{
    const char *path = fuzz_path(name);
    struct qt_err err = {0};
    fuzz_ok(qt_file_write(path, data, size, &err), &err);
    return path;
}

/* ---- tensors -------------------------------------------------------------------------------- */

static void same_tensor(const struct qt_ckpt *a, const struct qt_ckpt *b, size_t i)
{
    const struct qt_tensor *x = qt_ckpt_tensor(a, i), *y = qt_ckpt_find(b, x->name);
    struct qt_err err = {0};
    struct qt_blob p, q;
    FUZZ_CHECK(y && x->dtype == y->dtype && x->ndim == y->ndim && x->nbytes == y->nbytes);
    FUZZ_CHECK(memcmp(x->shape, y->shape, (size_t)x->ndim * sizeof *x->shape) == 0);
    fuzz_ok(qt_ckpt_read(&p, a, x, &err), &err);
    fuzz_ok(qt_ckpt_read(&q, b, y, &err), &err);
    FUZZ_CHECK(p.size == x->nbytes && q.size == p.size);
    FUZZ_CHECK(p.size == 0 || memcmp(p.data, q.data, p.size) == 0);
    qt_blob_free(&p);
    qt_blob_free(&q);
}

static void write_tensors(const struct qt_ckpt *ckpt, const char *path)
{
    size_t n = qt_ckpt_count(ckpt), size;
    struct qt_tensor *tensors = calloc(n + 1, sizeof *tensors);
    uint64_t *offsets = calloc(n + 1, sizeof *offsets);
    struct qt_err err = {0};
    char *header;
    int fd;
    FUZZ_CHECK(tensors && offsets);
    for (size_t i = 0; i < n; i++)
        tensors[i] = *qt_ckpt_tensor(ckpt, i);
    fuzz_ok(qt_safetensors_header(&header, &size, offsets, tensors, n, NULL, &err), &err);
    fuzz_ok(qt_file_create(&fd, path, false, &err), &err);
    fuzz_ok(qt_file_write_at(fd, path, header, size, 0, &err), &err);
    for (size_t i = 0; i < n; i++) {
        struct qt_blob blob;
        fuzz_ok(qt_ckpt_read(&blob, ckpt, &tensors[i], &err), &err);
        fuzz_ok(qt_file_write_at(fd, path, blob.data, blob.size, offsets[i], &err), &err);
        qt_blob_free(&blob);
    }
    close(fd);
    qt_free(header);
    free(tensors);
    free(offsets);
}

void fuzz_round_trip(const struct qt_ckpt *ckpt, const char *name)
{
    const char *path = fuzz_path(name);
    struct qt_ckpt *again;
    struct qt_err err = {0};
    if (qt_ckpt_count(ckpt) == 0)
        return;
    write_tensors(ckpt, path);
    fuzz_ok(qt_ckpt_open_stored(&again, path, &err), &err);
    FUZZ_CHECK(qt_ckpt_count(again) == qt_ckpt_count(ckpt));
    for (size_t i = 0; i < qt_ckpt_count(ckpt); i++)
        same_tensor(ckpt, again, i);
    qt_ckpt_close(again);
}
