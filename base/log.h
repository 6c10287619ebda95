/* Sink for messages and progress: the CLI implements it, the library calls it. */
#ifndef QT_BASE_LOG_H
#define QT_BASE_LOG_H

#include <stddef.h>

enum qt_log_level { QT_LOG_INFO, QT_LOG_WARNING };

struct qt_log {
    void *ctx;
    /* `text` is one line without its newline. Called from the main thread only. */
    void (*message)(void *ctx, enum qt_log_level level, const char *text);
    /* `done` of `total` units of `stage` ("quantize", "eval"). Called from the main thread only. */
    void (*progress)(void *ctx, const char *stage, double done, double total);
    /* The work up to the next call is in decoder layer `layer` (from 0) of `layers`; the whole
     * stage runs `tokens` tokens through each of them. Called from the main thread only. */
    void (*layer)(void *ctx, size_t layer, size_t layers, double tokens);
};

/* These accept log = NULL and missing callbacks. */
void qt_log_message(const struct qt_log *log, enum qt_log_level level, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void qt_log_progress(const struct qt_log *log, const char *stage, double done, double total);
void qt_log_layer(const struct qt_log *log, size_t layer, size_t layers, double tokens);

/* Monotonic clock, seconds. */
double qt_clock(void);

#endif
