/* Status codes and the error record. */
#ifndef QT_BASE_STATUS_H
#define QT_BASE_STATUS_H

#include <stdarg.h>

/* Each status has a documented exit code (qt_exit_code). */
enum qt_status {
    QT_OK = 0,
    QT_E_INTERNAL = -1,    /* a bug in qtool */
    QT_E_USAGE = -2,       /* the caller's options or arguments */
    QT_E_INPUT = -3,       /* a file breaks its format or contradicts another file */
    QT_E_UNSUPPORTED = -4, /* valid input that qtool cannot handle: shape, dtype, architecture */
    QT_E_GATE = -5,        /* a --gate condition failed */
    QT_E_RESOURCE = -6,    /* out of memory, disk or I/O error */
    QT_E_NO_GPU = -7,      /* no usable GPU */
    QT_E_RESUME = -8,      /* --resume: other options or inputs, or a damaged partial result */
    QT_E_INTERRUPTED = -9, /* stopped by a signal */
};

/* Error record, filled by the function that detects the error. Unused strings are empty. */
struct qt_err {
    enum qt_status status;
    char file[512];   /* path, as the user wrote it */
    char tensor[256]; /* name of a tensor of the file */
    char reason[1024];
};

/*
 * Fills *err and returns `status`, so that callers can write `return qt_fail(err, ...)`. file,
 * tensor and err may be NULL.
 */
#define qt_fail(...) qt_negative(qt_fail_record(__VA_ARGS__))
int qt_fail_record(struct qt_err *err, enum qt_status status, const char *file, const char *tensor,
                   const char *fmt, ...) __attribute__((format(printf, 5, 6)));

/* Tells the compiler that qt_fail returns a negative value: avoids false warnings. */
static inline int qt_negative(int status)
{
    if (status >= 0)
        __builtin_unreachable();
    return status;
}

/* Writes "FILE: tensor T: reason" to buf, terminated; control characters become '?'. */
void qt_err_format(char *buf, unsigned long size, const struct qt_err *err);

/* Size in bytes of the control character at the start of the UTF-8 text, or 0. Includes U+0080 to
 * U+009F, which terminals also interpret. */
int qt_control_size(const char *text);

/* Process exit code: 0, 1..8, or 75 for QT_E_INTERRUPTED. */
int qt_exit_code(enum qt_status status);

/* Stores the status of an expression in `rc` and jumps to `done:` if it is a failure. */
#define QT_TRY(expr)                                                                               \
    do {                                                                                           \
        rc = (expr);                                                                               \
        if (rc < 0)                                                                                \
            goto done;                                                                             \
    } while (0)

#endif
