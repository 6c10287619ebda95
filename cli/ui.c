/* Messages and progress on stderr. */
#include "cli/cli.h"

#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

static const double bar_interval = 0.1, line_interval = 10; /* seconds between outputs */

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

static void draw_bar(struct ui *ui, double fraction, const char *eta)
{
    static const char full[] = "########################################";
    struct winsize size = {0};
    int columns = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col ? size.ws_col : 80;
    int width = columns - 40;
    width = width > 40 ? 40 : width;
    width = width < 0 ? 0 : width;
    int filled = (int)(fraction * width);
    fprintf(stderr, "\r%-10s [%.*s%*s] %3d%%  ETA %s\033[K", ui->stage, filled, full,
            width - filled, "", (int)(fraction * 100), eta);
    fflush(stderr);
    ui->drawn = true;
}

static void show_progress(struct ui *ui, double fraction, double elapsed)
{
    char buf[TEXT_SIZE];
    const char *eta = fraction > 0 ? text_time(buf, elapsed * (1 - fraction) / fraction) : "?";
    if (ui->bar)
        draw_bar(ui, fraction, eta);
    else
        fprintf(stderr, "qtool %s: %s %d%%, %s left\n", ui->command, ui->stage,
                (int)(fraction * 100), eta);
}

static void finish_progress(struct ui *ui, double elapsed)
{
    char buf[TEXT_SIZE];
    ui_clear(ui);
    if (ui->plain)
        fprintf(stderr, "qtool %s: %s done in %s\n", ui->command, ui->stage,
                text_time(buf, elapsed));
    ui->stage[0] = '\0';
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
        snprintf(ui->stage, sizeof ui->stage, "%s", stage);
        ui->started = ui->shown = time;
    }
    if (done >= total) {
        finish_progress(ui, time - ui->started);
    } else if (time - ui->shown >= (ui->bar ? bar_interval : line_interval)) {
        show_progress(ui, done / total, time - ui->started);
        ui->shown = time;
    }
}

struct qt_log ui_log(struct ui *ui)
{
    return (struct qt_log){ui, message, progress};
}
