/*
 * Directories for files that exist only while the process runs. They are removed by
 * qt_tempdir_remove, or by qt_tempdirs_end if the process ends early; SIGKILL leaves them.
 */
#ifndef QT_BASE_TEMPDIR_H
#define QT_BASE_TEMPDIR_H

#include "base/status.h"

/* Makes a directory that only the user can enter, in $TMPDIR or /tmp. names: the files that may be
 * put there, NULL-terminated, static. The caller passes *out to qt_tempdir_remove. */
int qt_tempdir_make(char **out, const char *const *names, struct qt_err *err);
/* Removes the directory with its files and frees the path. dir may be NULL. */
void qt_tempdir_remove(char *dir);
/* Removes all such directories. Async-signal-safe; the process must end after it. */
void qt_tempdirs_end(void);

#endif
