#include "base/tempdir.h"

#include "base/base.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Global because a signal handler has no context. A slot is in use while `path` is not NULL. */
enum { SLOTS = 16, NAME_SIZE = 64 };
static struct {
    _Atomic(char *) path;
    const char *const *names;
} slots[SLOTS];

/* Async-signal-safe: without memory of the heap. */
static void empty(const char *dir, const char *const *names)
{
    char path[4096];
    const size_t size = strlen(dir);
    if (size + 1 + NAME_SIZE >= sizeof path)
        return;
    memcpy(path, dir, size);
    path[size] = '/';
    for (; *names; names++) {
        const size_t n = strlen(*names);
        if (n >= NAME_SIZE)
            continue;
        memcpy(path + size + 1, *names, n + 1);
        unlink(path);
    }
    rmdir(dir);
}

int qt_tempdir_make(char **out, const char *const *names, struct qt_err *err)
{
    const char *parent = getenv("TMPDIR");
    int rc = qt_string_format(out, err, "%s/qtool-XXXXXX", parent && *parent ? parent : "/tmp");
    if (rc < 0)
        return rc;
    if (!mkdtemp(*out)) {
        rc = qt_fail(err, QT_E_RESOURCE, *out, NULL, "cannot create a temporary directory: %s",
                     strerror(errno));
        qt_free(*out);
        *out = NULL;
        return rc;
    }
    for (size_t i = 0; i < SLOTS; i++) {
        char *none = NULL;
        if (slots[i].names == NULL && atomic_compare_exchange_strong(&slots[i].path, &none, *out)) {
            slots[i].names = names;
            return QT_OK;
        }
    }
    rmdir(*out);
    rc = qt_fail(err, QT_E_RESOURCE, *out, NULL, "more than %d temporary directories", SLOTS);
    qt_free(*out);
    *out = NULL;
    return rc;
}

void qt_tempdir_remove(char *dir)
{
    for (size_t i = 0; dir && i < SLOTS; i++)
        if (atomic_load(&slots[i].path) == dir) {
            empty(dir, slots[i].names);
            slots[i].names = NULL;
            atomic_store(&slots[i].path, NULL);
            break;
        }
    qt_free(dir);
}

void qt_tempdirs_end(void)
{
    for (size_t i = 0; i < SLOTS; i++) {
        const char *path = atomic_load(&slots[i].path);
        if (path && slots[i].names)
            empty(path, slots[i].names);
    }
}
