/* Shared by unit tests of checkpoints that may be damaged. */
#ifndef QT_TESTS_CKPT_FIXTURE_H
#define QT_TESTS_CKPT_FIXTURE_H

#include "fixture.h"
#include "formats/formats.h"

/* Opens a checkpoint, a directory or a file, and reads all tensors; the result is the first
 * failure. */
static inline int ckpt_read_all(const char *path, struct qt_err *err)
{
    struct qt_ckpt *ckpt;
    struct qt_blob blob;
    int rc = qt_ckpt_open(&ckpt, path, err);
    if (rc < 0)
        return rc;
    rc = qt_ckpt_check_readable(ckpt, err);
    for (size_t i = 0; i < qt_ckpt_count(ckpt) && rc == QT_OK; i++) {
        const struct qt_tensor *t = qt_ckpt_tensor(ckpt, i);
        rc = qt_ckpt_read(&blob, ckpt, t, err);
        if (rc < 0)
            break;
        assert_int_equal(blob.size, t->nbytes);
        qt_blob_free(&blob);
    }
    qt_ckpt_close(ckpt);
    return rc;
}

#endif
