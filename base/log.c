#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <time.h>

void qt_log_message(const struct qt_log *log, enum qt_log_level level, const char *fmt, ...)
{
    char text[1024];
    if (!log || !log->message)
        return;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    log->message(log->ctx, level, text);
}

void qt_log_progress(const struct qt_log *log, const char *stage, double done, double total)
{
    if (log && log->progress)
        log->progress(log->ctx, stage, done, total);
}

void qt_log_layer(const struct qt_log *log, size_t layer, size_t layers, double tokens)
{
    if (log && log->layer)
        log->layer(log->ctx, layer, layers, tokens);
}

double qt_clock(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
