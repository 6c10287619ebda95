/* Shared by unit tests of files: a temporary directory, files in it, expected errors. */
#ifndef QT_TESTS_FIXTURE_H
#define QT_TESTS_FIXTURE_H

#include "base/base.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

/* A new directory below /tmp; remove with fixture_remove, which also frees the name. */
static inline char *fixture_dir(void)
{
    char *dir = strdup("/tmp/qtool-test-XXXXXX");
    assert_non_null(dir);
    assert_non_null(mkdtemp(dir));
    return dir;
}

static inline void fixture_remove(char *dir)
{
    assert_int_equal(qt_dir_remove(dir, NULL), QT_OK);
    free(dir);
}

/* "dir/name", valid until the fourth call after. */
static inline const char *fixture_path(const char *dir, const char *name)
{
    static char paths[4][512];
    static unsigned next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", dir, name);
    return path;
}

static inline const char *fixture_write(const char *dir, const char *name, const void *data,
                                        size_t size)
{
    const char *path = fixture_path(dir, name);
    struct qt_err err = {0};
    if (qt_file_write(path, data, size, &err) < 0)
        fail_msg("%s: %s", path, err.reason);
    return path;
}

/* Checks the status and a part of the message. */
static inline void expect_error(const char *what, int rc, enum qt_status status,
                                const char *fragment, const struct qt_err *err)
{
    char text[2048];
    if (rc < 0)
        qt_err_format(text, sizeof text, err);
    if (rc != (int)status)
        fail_msg("%s: status %d, expected %d (%s)", what, rc, (int)status, rc < 0 ? text : "ok");
    if (rc < 0 && !strstr(text, fragment))
        fail_msg("%s: \"%s\" does not say \"%s\"", what, text, fragment);
}

static inline void expect_ok(const char *what, int rc, const struct qt_err *err)
{
    char text[2048];
    if (rc == QT_OK)
        return;
    qt_err_format(text, sizeof text, err);
    fail_msg("%s: status %d: %s", what, rc, text);
}

/* The shared test data, or NULL after a printed line: then call skip(). */
static inline const char *fixture_shared(const char *name)
{
    static char path[512];
    const char *root = getenv("QT_SHARED");
    snprintf(path, sizeof path, "%s/%s", root ? root : "../shared", name);
    if (access(path, R_OK) == 0)
        return path;
    printf("SKIP: %s is not there (set QT_SHARED)\n", path);
    return NULL;
}

#endif
