/* How much of a model is quantized, and what is copied. */
#include "cli/cli.h"

#include <math.h>
#include <string.h>

const char *text_share(char buf[TEXT_SIZE], const struct qt_share *share)
{
    const double ratio = qt_share_ratio(share);
    if (isnan(ratio))
        snprintf(buf, TEXT_SIZE, "-");
    else
        snprintf(buf, TEXT_SIZE, "%.1f %%", 100 * ratio);
    return buf;
}

/* The bytes that are left for the reason of left[i], linears or not; 0: listed before i. */
static uint64_t bytes_left(const struct qt_left *left, size_t n, size_t i)
{
    uint64_t bytes = 0;
    for (size_t k = 0; k < n; k++) {
        if (strcmp(left[k].why, left[i].why) != 0)
            continue;
        if (k < i)
            return 0;
        bytes += left[k].bytes;
    }
    return bytes;
}

void share_rows(struct table *t, const struct qt_share *share, const struct qt_left *left, size_t n)
{
    char text[1024] = "", bytes[TEXT_SIZE], ratio[TEXT_SIZE];
    size_t at = 0;
    if (share->linear)
        table_row(t, "linears\t%s of %s quantized", text_share(ratio, share),
                  text_bytes(bytes, share->linear));
    for (size_t i = 0; i < n && at < sizeof text; i++)
        if (bytes_left(left, n, i))
            at += (size_t)snprintf(text + at, sizeof text - at, "%s%s %s", at ? ", " : "",
                                   text_bytes(bytes, bytes_left(left, n, i)), left[i].why);
    if (n)
        table_row(t, "copied\t%s", text);
}

void doc_share(struct cli *cli, const struct qt_share *share, const struct qt_left *left, size_t n)
{
    json_t *array = json_array();
    for (size_t i = 0; i < n; i++) {
        json_t *o = json_object();
        doc_set(cli, o, "reason", doc_text(left[i].why));
        doc_set(cli, o, "linear", json_boolean(left[i].linear));
        doc_set(cli, o, "tensors", doc_size(left[i].count));
        doc_set(cli, o, "bytes", doc_size(left[i].bytes));
        doc_append(cli, array, o);
    }
    doc_set(cli, cli->doc, "linear_bytes", doc_size(share->linear));
    doc_set(cli, cli->doc, "linear_bytes_quantized", doc_size(share->quantized));
    doc_set(cli, cli->doc, "left", array);
}

void nonfinite_row(struct table *t, const char *first, size_t tensors, uint64_t values)
{
    if (first)
        table_row(t, "not finite\t%llu value%s in %zu copied tensor%s, first in %s",
                  (unsigned long long)values, text_plural(values), tensors, text_plural(tensors),
                  first);
}

void doc_nonfinite(struct cli *cli, const char *first, size_t tensors, uint64_t values)
{
    doc_set(cli, cli->doc, "nonfinite_first", doc_text(first));
    doc_set(cli, cli->doc, "nonfinite_tensors", doc_size(tensors));
    doc_set(cli, cli->doc, "nonfinite_values", doc_size(values));
}
