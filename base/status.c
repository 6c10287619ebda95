#include "base/status.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* length: what there would be with room for it. Text that was cut ends with a whole character. */
static void end_cut(char *text, size_t size, int length)
{
    size_t n = size - 1;
    if ((size_t)length < size)
        return;
    while (n && (text[n - 1] & 0xc0) == 0x80)
        n--;
    if (n && (text[n - 1] & 0xc0) == 0xc0)
        n--;
    text[n] = '\0';
}

/* Bytes of the character that the text begins with; 0: it is none of UTF-8. */
static size_t character_size(const unsigned char *p)
{
    size_t n = p[0] < 0x80   ? 1
               : p[0] < 0xc2 ? 0
               : p[0] < 0xe0 ? 2
               : p[0] < 0xf0 ? 3
               : p[0] < 0xf5 ? 4
                             : 0;
    for (size_t i = 1; i < n; i++)
        if ((p[i] & 0xc0) != 0x80)
            return 0;
    /* Longer than need be, surrogates, beyond U+10FFFF. */
    bool none = (p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xed && p[1] >= 0xa0) ||
                (p[0] == 0xf0 && p[1] < 0x90) || (p[0] == 0xf4 && p[1] >= 0x90);
    return none ? 0 : n;
}

/* A name of which a message has the beginning may end within a character, and some are no UTF-8:
 * without those bytes a JSON document can have the message as it is. */
static void mark_broken(char *text)
{
    for (size_t n; *text; text += n) {
        n = character_size((const unsigned char *)text);
        if (n == 0)
            *text = '?', n = 1;
    }
}

static void copy_text(char *dst, size_t size, const char *src)
{
    end_cut(dst, size, snprintf(dst, size, "%s", src ? src : ""));
}

int qt_fail_record(struct qt_err *err, enum qt_status status, const char *file, const char *tensor,
                   const char *fmt, ...)
{
    if (!err)
        return status;
    err->status = status;
    copy_text(err->file, sizeof err->file, file && !*file ? "''" : file);
    copy_text(err->tensor, sizeof err->tensor, tensor);
    va_list ap;
    va_start(ap, fmt);
    end_cut(err->reason, sizeof err->reason, vsnprintf(err->reason, sizeof err->reason, fmt, ap));
    va_end(ap);
    mark_broken(err->reason);
    return status;
}

void qt_err_format(char *buf, unsigned long size, const struct qt_err *err)
{
    int length = snprintf(buf, size, "%s%s%s%s%s%s", err->file, err->file[0] ? ": " : "",
                          err->tensor[0] ? "tensor " : "", err->tensor, err->tensor[0] ? ": " : "",
                          err->reason);
    end_cut(buf, size, length);
    /* Names come out of untrusted files: no control character may reach a terminal. */
    for (char *p = buf; *p; p++)
        memset(p, '?', (size_t)qt_control_size(p));
}

int qt_control_size(const char *text)
{
    const unsigned char *p = (const unsigned char *)text;
    if (p[0] == 0xc2 && p[1] >= 0x80 && p[1] < 0xa0)
        return 2;
    return (p[0] && p[0] < 0x20) || p[0] == 0x7f;
}

int qt_exit_code(enum qt_status status)
{
    return status == QT_E_INTERRUPTED ? 75 : -(int)status;
}
