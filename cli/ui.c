/* Messages and progress on stderr. */
#include "cli/cli.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

static const double bar_interval = 0.1, line_interval = 10; /* seconds between outputs */
static const double smoothing = 60; /* seconds whose speed the remaining time is computed from */

/* Global because a signal handler has no context. */
volatile sig_atomic_t ui_line_open;

static bool stderr_is_terminal(void)
{
    const char *term = getenv("TERM");
    return isatty(STDERR_FILENO) && term && strcmp(term, "dumb") != 0;
}

void ui_init(struct ui *ui, const char *command, bool quiet, enum ui_progress progress)
{
    bool show = !quiet && progress != UI_NONE;
    *ui = (struct ui){.command = command, .quiet = quiet};
    ui->bar = show && progress == UI_AUTO && stderr_is_terminal();
    ui->plain = show && !ui->bar;
}

void ui_clear(struct ui *ui)
{
    if (ui->drawn)
        fputs("\r\033[K", stderr);
    ui->drawn = false;
    ui_line_open = 0;
}

void ui_end_line(struct ui *ui)
{
    if (ui->drawn)
        fputc('\n', stderr);
    ui->drawn = false;
    ui_line_open = 0;
}

static void message(void *ctx, enum qt_log_level level, const char *text)
{
    struct ui *ui = ctx;
    if (ui->quiet)
        return;
    ui_clear(ui);
    fprintf(stderr, "qtool %s: %s", ui->command, level == QT_LOG_WARNING ? "warning: " : "");
    text_print(stderr, text, strlen(text));
    fputc('\n', stderr);
}

/* ---- progress ------------------------------------------------------------------------------- */

/* "1:02:03", "2:03" */
static const char *text_time(char buf[TEXT_SIZE], double seconds)
{
    unsigned long s = seconds < 1e9 ? (unsigned long)(seconds + 0.5) : 1000000000;
    if (s >= 3600)
        snprintf(buf, TEXT_SIZE, "%lu:%02lu:%02lu", s / 3600, s / 60 % 60, s % 60);
    else
        snprintf(buf, TEXT_SIZE, "%lu:%02lu", s / 60, s % 60);
    return buf;
}

/* The layer and the speed, with a blank or a comma in front of each; "" if unknown. */
static void text_place(char *buf, size_t size, const struct ui *ui, double elapsed)
{
    const char *gap = ui->bar ? "  " : ", ";
    const double speed = ui->tokens * (ui->fraction - ui->first) / elapsed;
    int n = 0;
    buf[0] = '\0';
    if (ui->layers)
        n = snprintf(buf, size, "%slayer %zu/%zu", gap, ui->layer + 1, ui->layers);
    if (ui->tokens > 0 && speed > 0 && speed < 1e15)
        snprintf(buf + n, size - (size_t)n, "%s%.*f tokens/s", gap, speed < 10 ? 1 : 0, speed);
}

static void draw_bar(struct ui *ui, const char *place, const char *elapsed, const char *left)
{
    static const char full[] = "########################################";
    struct winsize size = {0};
    int columns = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col ? size.ws_col : 80;
    int width = columns - 46 - (int)strlen(place);
    width = width > 40 ? 40 : width;
    width = width < 0 ? 0 : width;
    int filled = (int)(ui->fraction * width);
    fprintf(stderr, "\r%-10s [%.*s%*s] %3d%%%s  %s elapsed  ETA %s\033[K", ui->stage, filled, full,
            width - filled, "", (int)(ui->fraction * 100), place, elapsed, left);
    fflush(stderr);
    ui->drawn = true;
    ui_line_open = 1;
}

/* Moves the smoothed speed on to now: an average of the speeds so far whose weights fall by e in
 * `smoothing` seconds. */
static void measure_speed(struct ui *ui, double fraction, double time)
{
    const double seconds = time - ui->measured;
    if (seconds < 1e-3)
        return;
    const double old = exp(-seconds / smoothing);
    ui->speed = old * ui->speed + (1 - old) * (fraction - ui->fraction) / seconds;
    ui->weight = old * ui->weight + (1 - old);
    ui->fraction = fraction;
    ui->measured = time;
}

static void show_progress(struct ui *ui, double elapsed)
{
    char passed[TEXT_SIZE], left[TEXT_SIZE] = "?", place[2 * TEXT_SIZE];
    const double speed = ui->weight > 0 ? ui->speed / ui->weight : 0;
    if (speed > 0)
        text_time(left, (1 - ui->fraction) / speed);
    text_time(passed, elapsed);
    text_place(place, sizeof place, ui, elapsed);
    if (ui->bar)
        draw_bar(ui, place, passed, left);
    else
        fprintf(stderr, "qtool %s: %s %d%%%s, %s elapsed, %s left\n", ui->command, ui->stage,
                (int)(ui->fraction * 100), place, passed, left);
}

static void finish_progress(struct ui *ui, double elapsed)
{
    char buf[TEXT_SIZE];
    ui_clear(ui);
    if (ui->plain)
        fprintf(stderr, "qtool %s: %s done in %s\n", ui->command, ui->stage,
                text_time(buf, elapsed));
    ui->stage[0] = '\0';
    ui->layers = 0;
    ui->tokens = 0;
}

static void start_progress(struct ui *ui, const char *stage, double fraction, double time)
{
    snprintf(ui->stage, sizeof ui->stage, "%s", stage);
    ui->started = ui->shown = ui->measured = time;
    ui->speed = ui->weight = 0;
    ui->first = ui->fraction = fraction;
}

static void progress(void *ctx, const char *stage, double done, double total)
{
    struct ui *ui = ctx;
    double time = qt_clock();
    if (!ui->bar && !ui->plain)
        return;
    if (strcmp(ui->stage, stage) != 0) {
        if (done >= total)
            return; /* the stage was reported already, or is empty */
        start_progress(ui, stage, done / total, time);
    }
    if (done >= total) {
        finish_progress(ui, time - ui->started);
        return;
    }
    measure_speed(ui, done / total, time);
    if (time - ui->shown >= (ui->bar ? bar_interval : line_interval)) {
        show_progress(ui, time - ui->started);
        ui->shown = time;
    }
}

static void layer_begins(void *ctx, size_t layer, size_t layers, double tokens)
{
    struct ui *ui = ctx;
    ui->layer = layer;
    ui->layers = layers;
    ui->tokens = tokens;
}

struct qt_log ui_log(struct ui *ui)
{
    return (struct qt_log){ui, message, progress, layer_begins};
}
