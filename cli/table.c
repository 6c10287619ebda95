/* Tables of text. */
#include "cli/cli.h"

#include <string.h>

enum { MAX_COLUMNS = 12 };

const char *text_plural(size_t n)
{
    return n == 1 ? "" : "s";
}

const char *text_bytes(char buf[TEXT_SIZE], uint64_t bytes)
{
    static const char *const units[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double value = (double)bytes / 1024;
    size_t u = 0;
    if (bytes < 1024) {
        snprintf(buf, TEXT_SIZE, "%u B", (unsigned)bytes);
        return buf;
    }
    for (; value >= 1023.95 && u + 1 < sizeof units / sizeof *units; u++)
        value /= 1024;
    snprintf(buf, TEXT_SIZE, "%.*f %s", value < 9.995 ? 2 : 1, value, units[u]);
    return buf;
}

const char *text_shape(char buf[TEXT_SIZE], int ndim, const size_t *shape)
{
    size_t n = 0;
    snprintf(buf, TEXT_SIZE, "%s", ndim ? "" : "scalar");
    for (int i = 0; i < ndim && n < TEXT_SIZE; i++)
        n += (size_t)snprintf(buf + n, TEXT_SIZE - n, "%s%zu", i ? "x" : "", shape[i]);
    return buf;
}

void table_row(struct table *t, const char *fmt, ...)
{
    char *text;
    va_list ap, copy;
    va_start(ap, fmt);
    va_copy(copy, ap);
    int len = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    text = len < 0 ? NULL : qt_malloc((size_t)len + 1);
    if (text)
        vsnprintf(text, (size_t)len + 1, fmt, copy);
    va_end(copy);
    if (text &&
        qt_array_grow(&t->rows, &t->capacity, t->count + 1, sizeof *t->rows, NULL) == QT_OK) {
        t->rows[t->count++] = text;
    } else {
        qt_free(text);
        t->failed = true;
    }
}

void table_paper_bpw(struct table *t, double bpw)
{
    if (!isnan(bpw))
        table_row(t, "paper\t%.4f as counted in the scheme's paper, which omits some sections",
                  bpw);
}

/* Bytes of the cell at p. The last column extends to the end of the row. */
static size_t cell_length(const char *p, bool last)
{
    return last ? strlen(p) : strcspn(p, "\t");
}

/* Number of characters of UTF-8 text. */
static size_t text_width(const char *p, size_t len)
{
    size_t width = 0;
    for (size_t i = 0; i < len; i++)
        width += ((unsigned char)p[i] & 0xc0) != 0x80;
    return width;
}

static void measure(size_t width[MAX_COLUMNS], const struct table *t, size_t columns)
{
    for (size_t r = 0; r < t->count; r++) {
        const char *p = t->rows[r];
        for (size_t c = 0; c < columns; c++) {
            size_t len = cell_length(p, c + 1 == columns), w = text_width(p, len);
            width[c] = w > width[c] ? w : width[c];
            p += len + (p[len] != '\0');
        }
    }
}

void text_print(FILE *f, const char *p, size_t len)
{
    const char *end = p + len;
    for (int n; p < end; p += n ? n : 1) {
        n = qt_control_size(p);
        putc(n ? '?' : *p, f);
    }
}

static void print_row(FILE *f, const char *p, const char *align, size_t columns,
                      const size_t width[MAX_COLUMNS])
{
    size_t gap = 0; /* pending blanks; dropped at the end of the line */
    for (size_t c = 0; c < columns; c++) {
        size_t len = cell_length(p, c + 1 == columns);
        size_t pad = width[c] - text_width(p, len);
        if (len) {
            fprintf(f, "%*s", (int)(gap + (align[c] == 'r' ? pad : 0)), "");
            text_print(f, p, len);
            gap = 2 + (align[c] == 'r' ? 0 : pad);
        } else {
            gap += 2 + width[c];
        }
        p += len + (p[len] != '\0');
    }
    putc('\n', f);
}

int table_print_to(FILE *f, struct table *t, struct qt_err *err)
{
    size_t columns = strlen(t->align), width[MAX_COLUMNS] = {0};
    int rc = QT_OK;
    if (columns > MAX_COLUMNS) {
        rc = qt_fail(err, QT_E_INTERNAL, NULL, NULL, "a table of %zu columns", columns);
    } else if (t->failed) {
        rc = qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory for the table of results");
    } else {
        measure(width, t, columns);
        for (size_t r = 0; r < t->count; r++)
            print_row(f, t->rows[r], t->align, columns, width);
    }
    table_free(t);
    return rc;
}

int table_print(struct table *t, struct qt_err *err)
{
    return table_print_to(stdout, t, err);
}

void table_free(struct table *t)
{
    for (size_t r = 0; r < t->count; r++)
        qt_free(t->rows[r]);
    qt_free(t->rows);
    *t = (struct table){.align = t->align};
}
