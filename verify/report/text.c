/* Text of the report: the only place that writes markup or JSON. */
#include "verify/report/report.h"

#include <stdarg.h>
#include <stdio.h>
#include <utf8proc.h>

void text_put(struct text *t, const char *data, size_t size)
{
    size_t need;
    if (t->failed || qt_add_overflow(&need, t->size, size) ||
        qt_array_grow(&t->data, &t->capacity, need, 1, NULL) < 0) {
        t->failed = true;
        return;
    }
    memcpy(t->data + t->size, data, size);
    t->size = need;
}

void text_free(struct text *t)
{
    qt_free(t->data);
    *t = (struct text){0};
}

static void put_string(struct text *t, const char *s)
{
    text_put(t, s, strlen(s));
}

/* Control characters, and those that embed or override the direction of text: a name could look
 * like another one. */
static bool is_hidden(utf8proc_int32_t c)
{
    return c < 0x20 || (c >= 0x7f && c < 0xa0) || (c >= 0x200b && c <= 0x200f) ||
           (c >= 0x2028 && c <= 0x202e) || (c >= 0x2060 && c <= 0x2069) || c == 0xfeff ||
           (c & 0xfffe) == 0xfffe;
}

static const char *entity(utf8proc_int32_t c)
{
    switch (c) {
    case '&':
        return "&amp;";
    case '<':
        return "&lt;";
    case '>':
        return "&gt;";
    case '"':
        return "&quot;";
    case '\'':
        return "&#39;";
    default:
        return NULL;
    }
}

static void put_escaped(struct text *t, const char *s)
{
    size_t left = strlen(s);
    while (left) {
        utf8proc_int32_t c;
        utf8proc_ssize_t n =
            utf8proc_iterate((const utf8proc_uint8_t *)s, (utf8proc_ssize_t)left, &c);
        if (n <= 0 || is_hidden(c))
            put_string(t, "\xef\xbf\xbd");
        else if (entity(c))
            put_string(t, entity(c));
        else
            text_put(t, s, (size_t)n);
        s += n > 0 ? n : 1;
        left -= n > 0 ? (size_t)n : 1;
    }
}

/* Writes one conversion; spec begins with '%' and has n bytes, the last of which is its letter. */
static void convert(struct text *t, const char *spec, size_t n, va_list *ap)
{
    char format[16], number[400];
    snprintf(format, sizeof format, "%.*s", (int)n, spec);
    switch (spec[n - 1]) {
    case 's':
        put_escaped(t, va_arg(*ap, const char *));
        return;
    case 'd':
        snprintf(number, sizeof number, format, va_arg(*ap, int));
        break;
    case 'u':
        snprintf(number, sizeof number, format, va_arg(*ap, size_t));
        break;
    default:
        snprintf(number, sizeof number, format, va_arg(*ap, double));
    }
    put_escaped(t, number);
}

void html(struct text *t, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    while (*fmt) {
        size_t plain = strcspn(fmt, "%");
        text_put(t, fmt, plain);
        fmt += plain;
        if (fmt[0] == '%' && fmt[1] == '%') {
            text_put(t, fmt, 1);
            fmt += 2;
        } else if (*fmt) {
            size_t n = strcspn(fmt, "sdugf") + 1;
            convert(t, fmt, n, &ap);
            fmt += n;
        }
    }
    va_end(ap);
}

void text_json(struct text *t, const json_t *value)
{
    const size_t flags =
        JSON_COMPACT | JSON_ENSURE_ASCII | JSON_ENCODE_ANY | JSON_REAL_PRECISION(9);
    struct qt_err err;
    size_t size;
    char *dump;
    if (qt_json_text(&dump, &size, value, flags, &err) < 0) {
        t->failed = true;
        return;
    }
    for (const char *p = dump; *p;) {
        size_t plain = strcspn(p, "<");
        text_put(t, p, plain);
        p += plain;
        if (*p) {
            put_string(t, "\\u003c");
            p++;
        }
    }
    qt_free(dump);
}
