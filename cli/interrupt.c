/*
 * SIGINT and SIGTERM. A command that writes files stops at the next safe point: long work polls the
 * request (base/stop.h). If nothing has polled it after two seconds, the process ends there, as
 * after SIGKILL: partial output can be resumed. Other commands end at once.
 */
#include "cli/cli.h"

#include <signal.h>
#include <unistd.h>

enum { PATIENCE = 2 /* seconds */ };

/* Message for the end of an unheard request, or NULL. Global because a signal handler has no
 * context. */
static const char *volatile hint;

static void end_now(int sig)
{
    (void)sig;
    process_end(QT_E_INTERRUPTED, "interrupted", hint);
}

static void end_unheard(int sig)
{
    if (!qt_stop_heard())
        end_now(sig);
}

/* A second signal, of either kind, ends the process at once. */
static void request_stop(int sig)
{
    static volatile sig_atomic_t signals;
    if (signals++) {
        qt_tempdirs_end();
        signal(sig, SIG_DFL);
        raise(sig);
        return;
    }
    qt_stop_request();
    alarm(PATIENCE);
}

bool interrupt_came(void)
{
    return qt_stop_requested();
}

static void catch_signal(int sig, void (*handler)(int), int flags)
{
    struct sigaction action = {.sa_handler = handler, .sa_flags = flags}, before;
    sigfillset(&action.sa_mask);
    if (sigaction(sig, NULL, &before) == 0 && before.sa_handler != SIG_IGN)
        sigaction(sig, &action, NULL);
}

void interrupt_catch(bool writes)
{
    void (*const handler)(int) = writes ? request_stop : end_now;
    catch_signal(SIGALRM, end_unheard, SA_RESTART);
    catch_signal(SIGINT, handler, (int)SA_RESETHAND);
    catch_signal(SIGTERM, handler, (int)SA_RESETHAND);
}

void interrupt_hint(const char *text)
{
    hint = text;
}
