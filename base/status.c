#include "base/status.h"

#include <stdio.h>
#include <string.h>
#include <utf8proc.h>

/* If snprintf, which returned `length`, truncated the text: removes an incomplete UTF-8 character
 * from its end. */
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

/* Replaces bytes that are not valid UTF-8, so that a JSON document can hold the message: names may
 * be truncated or in another encoding. */
static void mark_broken(char *text)
{
    utf8proc_int32_t c;
    for (size_t left = strlen(text), n; left > 0; text += n, left -= n) {
        utf8proc_ssize_t size =
            utf8proc_iterate((const utf8proc_uint8_t *)text, (utf8proc_ssize_t)left, &c);
        if (size <= 0)
            *text = '?';
        n = size <= 0 ? 1 : (size_t)size;
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
    /* Names come from untrusted files: no control character may reach a terminal. */
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
