/* Status codes and the error record. */
#ifndef QT_BASE_STATUS_H
#define QT_BASE_STATUS_H

#include <stdarg.h>

/* Each status maps to one documented process exit code (qt_exit_code). */
enum qt_status {
    QT_OK = 0,
    QT_E_INTERNAL = -1,    /* a bug in qtool */
    QT_E_USAGE = -2,       /* the caller's options or arguments */
    QT_E_INPUT = -3,       /* a file breaks its format or contradicts another file */
    QT_E_UNSUPPORTED = -4, /* valid input that qtool cannot handle: shape, dtype, architecture */
    QT_E_GATE = -5,        /* a --gate condition failed */
    QT_E_RESOURCE = -6,    /* out of memory, disk or I/O error */
    QT_E_NO_GPU = -7,      /* no usable GPU */
    QT_E_RESUME = -8,      /* --resume with other options or inputs, or of what is damaged */
    QT_E_INTERRUPTED = -9, /* stopped by a signal */
};

/* Filled by the first function that knows what went wrong; empty strings where not applicable. */
struct qt_err {
    enum qt_status status;
    char file[512];   /* path as the user would recognise it */
    char tensor[256]; /* tensor name inside the file */
    char reason[1024];
};

/*
 * Records an error and returns `status`, so that callers can write `return qt_fail(err, ...)`.
 * file and tensor may be NULL. err may be NULL (then only the status is returned).
 */
#define qt_fail(...) qt_negative(qt_fail_record(__VA_ARGS__))
int qt_fail_record(struct qt_err *err, enum qt_status status, const char *file, const char *tensor,
                   const char *fmt, ...) __attribute__((format(printf, 5, 6)));

/* Tells the compiler that a failure is a failure, so that it does not follow impossible paths. */
static inline int qt_negative(int status)
{
    if (status >= 0)
        __builtin_unreachable();
    return status;
}

/* "FILE: tensor T: reason" into buf; always terminated; non-printable bytes shown as '?'. */
void qt_err_format(char *buf, unsigned long size, const struct qt_err *err);

/* Bytes of the control character that the text (UTF-8) begins with; 0: with none. A terminal takes
 * those from U+0080 on for escape sequences, too. */
int qt_control_size(const char *text);

/* Process exit code: 0, 1..8, or 75 for QT_E_INTERRUPTED. */
int qt_exit_code(enum qt_status status);

/* Evaluates an expression once; on failure stores the status in `rc` and jumps to `done:`. */
#define QT_TRY(expr)                                                                               \
    do {                                                                                           \
        rc = (expr);                                                                               \
        if (rc < 0)                                                                                \
            goto done;                                                                             \
    } while (0)

#endif
