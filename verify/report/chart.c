/* SVG charts. Each is a figure of its own size that the style sheet scales to the page. */
#include "verify/report/report.h"

#include <math.h>
#include <stdio.h>

enum { WIDTH = 460, HEIGHT = 300, LEFT = 58, RIGHT = 16, TOP = 14, BOTTOM = 46, TICKS = 32 };
enum { LINE = 13, LABEL_WIDTH = 130, BAR_ROW = 32 };

/* ---- axes ----------------------------------------------------------------------------------- */

struct axis axis_new(const char *title, bool log)
{
    return (struct axis){title, INFINITY, -INFINITY, log};
}

static bool can_show(const struct axis *a, double v)
{
    return isfinite(v) && (!a->log || v > 0);
}

void axis_take(struct axis *a, double v)
{
    if (!can_show(a, v))
        return;
    a->min = fmin(a->min, v);
    a->max = fmax(a->max, v);
}

bool axis_used(const struct axis *a)
{
    return a->min <= a->max;
}

/* The distance of ticks: 1, 2 or 5 times a power of ten. */
static double nice_step(double range)
{
    double raw = range / 5, power = pow(10, floor(log10(raw)));
    double digit = raw / power;
    return power * (digit <= 1 ? 1 : digit <= 2 ? 2 : digit <= 5 ? 5 : 10);
}

/* The tick at or below v on a log axis (or at or above it): 1, 2 or 5 times a power of ten, or,
 * `decades`, a power of ten. */
static double log_tick(double v, bool up, bool decades)
{
    static const double digits[] = {1, 2, 5, 10};
    double power = pow(10, floor(log10(v) + 1e-9));
    size_t i = 0, last = sizeof digits / sizeof *digits - 1;
    if (up) {
        while (i < last && digits[i] * power < v * (1 - 1e-9))
            i += decades ? last : 1;
        return digits[i] * power;
    }
    while (!decades && i + 1 < last && digits[i + 1] * power <= v * (1 + 1e-9))
        i++;
    return digits[i] * power;
}

static bool has_decades(const struct axis *a)
{
    return a->max / a->min > 500;
}

/* Widens the axis to ticks. */
static void axis_fit(struct axis *a)
{
    if (a->log) {
        const bool decades = has_decades(a);
        if (a->max / a->min < 1.5) {
            a->min /= 1.5;
            a->max *= 1.5;
        }
        a->min = log_tick(a->min, false, decades);
        a->max = log_tick(a->max, true, decades);
        return;
    }
    if (a->max - a->min <= 1e-9 * fabs(a->max)) {
        double wide = a->max != 0 ? 0.1 * fabs(a->max) : 1;
        a->min -= wide;
        a->max += wide;
    }
    double step = nice_step(a->max - a->min);
    a->min = floor(a->min / step + 1e-9) * step;
    a->max = ceil(a->max / step - 1e-9) * step;
}

static size_t axis_ticks(double ticks[TICKS], const struct axis *a)
{
    size_t n = 0;
    if (a->log) {
        const bool decades = has_decades(a);
        double at = a->min;
        while (n < TICKS && at <= a->max * (1 + 1e-9)) {
            ticks[n++] = at;
            at = log_tick(at * 1.5, true, decades);
        }
        return n;
    }
    double step = nice_step(a->max - a->min);
    for (long i = 0; n < TICKS && a->min + (double)i * step <= a->max + step * 1e-6; i++) {
        double at = a->min + (double)i * step;
        ticks[n++] = fabs(at) < step * 1e-6 ? 0 : at;
    }
    return n;
}

/* The place of v on the axis, 0 to 1. */
static double place(const struct axis *a, double v)
{
    return a->log ? log(v / a->min) / log(a->max / a->min) : (v - a->min) / (a->max - a->min);
}

static double place_x(const struct chart *c, double v)
{
    return LEFT + place(&c->x, v) * (WIDTH - LEFT - RIGHT);
}

static double place_y(const struct chart *c, double v)
{
    return HEIGHT - BOTTOM - place(&c->y, v) * (HEIGHT - TOP - BOTTOM);
}

/* "0.02", "500", "20k", "5M" */
static const char *text_tick(char buf[32], double v)
{
    static const char *const units[] = {"", "k", "M", "G", "T"};
    size_t unit = 0;
    for (; fabs(v) >= 1e3 && unit + 1 < sizeof units / sizeof *units; unit++)
        v /= 1e3;
    snprintf(buf, 32, "%.4g%s", v, units[unit]);
    return buf;
}

static void write_axes(struct chart *c)
{
    char tick[32];
    struct text *t = &c->page->text;
    double ticks[TICKS];
    size_t n = axis_ticks(ticks, &c->x);
    html(t, "<g class=\"grid\">");
    for (size_t i = 0; i < n; i++) {
        double x = place_x(c, ticks[i]);
        html(t, "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"%d\" y2=\"%d\"/>", x, x, TOP, HEIGHT - BOTTOM);
        html(t, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%s</text>", x,
             HEIGHT - BOTTOM + 16, text_tick(tick, ticks[i]));
    }
    n = axis_ticks(ticks, &c->y);
    for (size_t i = 0; i < n; i++) {
        double y = place_y(c, ticks[i]);
        html(t, "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\"/>", LEFT, WIDTH - RIGHT, y, y);
        html(t, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%s</text>", LEFT - 6, y + 4,
             text_tick(tick, ticks[i]));
    }
    html(t, "<text class=\"axis\" x=\"%d\" y=\"%d\" text-anchor=\"middle\">%s</text>",
         (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, c->x.title);
    html(t,
         "<text class=\"axis\" transform=\"translate(13 %d) rotate(-90)\" "
         "text-anchor=\"middle\">%s</text></g>\n",
         (TOP + HEIGHT - BOTTOM) / 2, c->y.title);
}

/* ---- a chart -------------------------------------------------------------------------------- */

static void svg_begin(struct page *p, const char *what, int height)
{
    html(&p->text,
         "<figure><svg viewBox=\"0 0 %d %d\" role=\"img\" aria-labelledby=\"chart%d\">"
         "<title id=\"chart%d\">%s</title>\n",
         WIDTH, height, (int)p->charts, (int)p->charts, what);
    p->charts++;
}

void chart_begin(struct chart *c, struct page *p, const char *what, const struct axis *x,
                 const struct axis *y)
{
    *c = (struct chart){.page = p, .x = *x, .y = *y};
    axis_fit(&c->x);
    axis_fit(&c->y);
    svg_begin(p, what, HEIGHT);
    write_axes(c);
}

/* Moves a label down until it covers no other. Returns false if there is no room. */
static bool place_label(struct chart *c, double x, double *y)
{
    if (c->labels == sizeof c->label_x / sizeof *c->label_x)
        return false;
    for (size_t i = 0; i < c->labels;) {
        bool covers = fabs(c->label_x[i] - x) < LABEL_WIDTH && fabs(c->label_y[i] - *y) < LINE - 1;
        if (covers)
            *y = c->label_y[i] + LINE;
        i = covers ? 0 : i + 1;
    }
    if (*y > HEIGHT - BOTTOM)
        return false;
    c->label_x[c->labels] = x;
    c->label_y[c->labels++] = *y;
    return true;
}

static void write_marker(struct text *t, size_t series, double x, double y)
{
    const int shape = (int)(series % 3), colour = (int)(series % CHART_SERIES);
    if (shape == 0)
        html(t, "<circle class=\"p%d\" cx=\"%.1f\" cy=\"%.1f\" r=\"4.5\">", colour, x, y);
    else if (shape == 1)
        html(t, "<rect class=\"p%d\" x=\"%.1f\" y=\"%.1f\" width=\"8\" height=\"8\">", colour,
             x - 4, y - 4);
    else
        html(t, "<path class=\"p%d\" d=\"M%.1f %.1fl5.5 5.5l-5.5 5.5l-5.5 -5.5z\">", colour, x,
             y - 5.5);
}

static const char *const marker_ends[] = {"</circle>", "</rect>", "</path>"};

void chart_point(struct chart *c, size_t series, double x, double y, const char *label,
                 const char *more)
{
    struct text *t = &c->page->text;
    if (!can_show(&c->x, x) || !can_show(&c->y, y))
        return;
    const double px = place_x(c, x), py = place_y(c, y);
    const bool left = px > WIDTH - LABEL_WIDTH;
    double label_y = py + 4;
    write_marker(t, series, px, py);
    html(t, "<title>%s: %s</title>", label, more);
    text_put(t, marker_ends[series % 3], strlen(marker_ends[series % 3]));
    if (place_label(c, left ? px - LABEL_WIDTH : px, &label_y)) {
        size_t size = strlen(label);
        const bool cut = size > 24;
        while (cut && size > 22) /* do not cut within a character */
            size -= 1;
        while (cut && size && ((unsigned char)label[size] & 0xc0) == 0x80)
            size--;
        char text[32];
        snprintf(text, sizeof text, "%.*s", (int)size, label);
        html(t, "<text class=\"label\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">%s%s</text>",
             left ? px - 8 : px + 8, label_y, left ? "end" : "start", text, cut ? "\u2026" : "");
    }
    html(t, "\n");
}

static void write_path(struct chart *c, const char *class, const double *x, const double *y,
                       size_t n, bool steps)
{
    struct text *t = &c->page->text;
    bool started = false;
    double before = 0;
    html(t, "<path class=\"%s\" d=\"", class);
    for (size_t i = 0; i < n; i++) {
        if (!can_show(&c->x, x[i]) || !can_show(&c->y, y[i]))
            continue;
        const double px = place_x(c, x[i]), py = place_y(c, y[i]);
        if (steps && started)
            html(t, "L%.1f %.1f", px, before);
        html(t, "%s%.1f %.1f", started ? "L" : "M", px, py);
        before = py;
        started = true;
    }
    html(t, "\"/>\n");
}

void chart_line(struct chart *c, size_t series, bool dashed, const double *x, const double *y,
                size_t n)
{
    char class[24];
    snprintf(class, sizeof class, "l%d%s", (int)(series % CHART_SERIES), dashed ? " dash" : "");
    write_path(c, class, x, y, n, false);
}

void chart_steps(struct chart *c, const double *x, const double *y, size_t n)
{
    write_path(c, "front", x, y, n, true);
}

void chart_end(struct chart *c)
{
    html(&c->page->text, "</svg></figure>\n");
}

void chart_legend(struct page *p, const char *const *names, size_t n, unsigned dashed)
{
    struct text *t = &p->text;
    html(t, "<ul class=\"legend\">");
    for (size_t i = 0; i < n; i++) {
        const bool dash = i < 32 && (dashed >> i & 1) != 0;
        html(t,
             "<li><svg viewBox=\"0 0 24 8\" aria-hidden=\"true\"><path class=\"l%d%s\" "
             "d=\"M0 4L24 4\"/></svg>%s</li>",
             (int)(i % CHART_SERIES), dash ? " dash" : "", names[i]);
    }
    html(t, "</ul>\n");
}

void chart_bars(struct page *p, const char *what, const struct bar *bars, size_t n,
                const char *format)
{
    struct text *t = &p->text;
    double max = 0;
    for (size_t i = 0; i < n; i++)
        max = isfinite(bars[i].value) ? fmax(max, bars[i].value) : max;
    svg_begin(p, what, (int)n * BAR_ROW + 4);
    for (size_t i = 0; i < n; i++) {
        char number[64] = "";
        const double y = (double)i * BAR_ROW;
        const double width = max > 0 && bars[i].value > 0 ? bars[i].value / max * WIDTH : 0;
        if (isfinite(bars[i].value))
            snprintf(number, sizeof number, format, bars[i].value);
        html(t, "<text x=\"0\" y=\"%.1f\">%s</text>", y + 12, bars[i].label);
        html(t, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%s</text>", WIDTH, y + 12, number);
        html(t, "<rect class=\"track\" x=\"0\" y=\"%.1f\" width=\"%d\" height=\"8\"/>", y + 17,
             WIDTH);
        html(t, "<rect class=\"b%d\" x=\"0\" y=\"%.1f\" width=\"%.1f\" height=\"8\"/>\n",
             (int)(bars[i].series % CHART_SERIES), y + 17, width);
    }
    html(t, "</svg></figure>\n");
}

static double part_of(const struct stack *bar, int i)
{
    return bar->part[i] > 0 ? bar->part[i] : 0;
}

static double length_of(const struct stack *bar)
{
    double sum = 0;
    for (int i = 0; i < CHART_SERIES; i++)
        sum += part_of(bar, i);
    return sum;
}

void chart_stacks(struct page *p, const char *what, const struct stack *bars, size_t n,
                  const char *format)
{
    struct text *t = &p->text;
    double max = 0;
    for (size_t i = 0; i < n; i++)
        max = isfinite(length_of(&bars[i])) ? fmax(max, length_of(&bars[i])) : max;
    svg_begin(p, what, (int)n * BAR_ROW + 4);
    for (size_t i = 0; i < n; i++) {
        char number[64] = "";
        const double y = (double)i * BAR_ROW, length = length_of(&bars[i]);
        double x = 0;
        if (isfinite(length))
            snprintf(number, sizeof number, format, length);
        html(t, "<text x=\"0\" y=\"%.1f\">%s</text>", y + 12, bars[i].label);
        html(t, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%s</text>", WIDTH, y + 12, number);
        for (int k = 0; k < CHART_SERIES && isfinite(length) && max > 0; k++) {
            const double width = part_of(&bars[i], k) / max * WIDTH;
            html(t, "<rect class=\"b%d\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"8\"/>", k, x,
                 y + 17, width);
            x += width;
        }
        html(t, "\n");
    }
    html(t, "</svg></figure>\n");
}
