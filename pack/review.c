/* What a plan leaves, and what a user should know about it. */
#include "pack/pack.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double enough = 0.9; /* share of the linear weights below which a plan is suspect */

enum { SIZE_TEXT = 32 };

static const char *size_text(char buf[SIZE_TEXT], uint64_t bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double size = (double)bytes;
    size_t u = 0;
    for (; size >= 1024 && u < sizeof units / sizeof *units - 1; u++)
        size /= 1024;
    snprintf(buf, SIZE_TEXT, "%.4g %s", size, units[u]);
    return buf;
}

const char *qt_plan_item_why(char buf[QT_WHY_SIZE], const struct qt_plan_item *item)
{
    if (item->grown_bpw > 0)
        snprintf(buf, QT_WHY_SIZE, "%s: %.2f bits/weight from %u", item->why,
                 (double)item->grown_bpw, qt_dtype_bits(item->tensor->dtype));
    else
        snprintf(buf, QT_WHY_SIZE, "%s", item->why);
    return buf;
}

static int by_bytes(const void *a, const void *b)
{
    const struct qt_left *x = a, *y = b;
    if (x->bytes != y->bytes)
        return x->bytes < y->bytes ? 1 : -1;
    return strcmp(x->why, y->why);
}

size_t qt_plan_left(struct qt_left out[QT_LEFT_MAX], const struct qt_plan *plan)
{
    size_t n = 0;
    for (size_t i = 0; i < plan->count; i++) {
        const struct qt_plan_item *item = &plan->items[i];
        size_t at = 0;
        if (!item->copied)
            continue;
        while (at < n && (strcmp(out[at].why, item->why) != 0 || out[at].linear != item->linear))
            at++;
        if (at == QT_LEFT_MAX)
            continue; /* there are fewer reasons */
        if (at == n)
            out[n++] = (struct qt_left){.why = item->why, .linear = item->linear};
        out[at].count++;
        out[at].bytes += item->tensor->nbytes;
    }
    qsort(out, n, sizeof *out, by_bytes);
    return n;
}

double qt_share_ratio(const struct qt_share *share)
{
    return share->linear ? (double)share->quantized / (double)share->linear : NAN;
}

/* "1536 MiB stacked experts, 0.2 MiB would grow": linear weights that no one asked to leave. */
static void left_text(char *text, size_t size, const struct qt_plan *plan)
{
    struct qt_left left[QT_LEFT_MAX];
    const size_t n = qt_plan_left(left, plan);
    size_t at = 0;
    char bytes[SIZE_TEXT];
    text[0] = '\0';
    for (size_t i = 0; i < n && at < size; i++)
        if (left[i].linear && strcmp(left[i].why, QT_WHY_NONE) != 0)
            at += (size_t)snprintf(text + at, size - at, "%s%s %s", at ? ", " : "",
                                   size_text(bytes, left[i].bytes), left[i].why);
}

static int review_share(const struct qt_plan *plan, const char *dir, bool strict,
                        const struct qt_log *log, struct qt_err *err)
{
    const struct qt_share *s = &plan->share;
    char left[512], text[1024], done[SIZE_TEXT], all[SIZE_TEXT];
    if (s->linear == 0 || (double)(s->quantized + s->chosen) >= enough * (double)s->linear)
        return QT_OK;
    left_text(left, sizeof left, plan);
    snprintf(text, sizeof text,
             "only %.1f %% of the bytes of linear weights are quantized (%s of %s); left: %s",
             100 * qt_share_ratio(s), size_text(done, s->quantized), size_text(all, s->linear),
             left);
    if (strict)
        return qt_fail(err, QT_E_UNSUPPORTED, dir, NULL, "%s; --strict refuses less than %.0f %%",
                       text, 100 * enough);
    qt_log_message(log, QT_LOG_WARNING, "%s", text);
    return QT_OK;
}

int qt_plan_review(const struct qt_plan *plan, const struct qt_ckpt *ckpt, bool strict,
                   const struct qt_log *log, struct qt_err *err)
{
    int rc = review_share(plan, qt_ckpt_path(ckpt), strict, log, err);
    for (size_t i = 0; i < plan->count && rc == QT_OK; i++) {
        const struct qt_plan_item *item = &plan->items[i];
        const struct qt_tensor *t = item->tensor;
        if (!item->copied && item->grown_bpw > 0)
            qt_log_message(log, QT_LOG_WARNING, "%s grows: %.2f bits/weight from %u%s", t->name,
                           (double)item->grown_bpw, qt_dtype_bits(t->dtype),
                           item->named ? "; it is quantized because --tensor names it" : "");
        const char *shared = qt_ckpt_shares(ckpt, i);
        if (shared)
            qt_log_message(
                log, QT_LOG_WARNING,
                "%s and %s share their data in %s: containers cannot, so both are stored", shared,
                t->name, t->file);
    }
    return rc;
}
