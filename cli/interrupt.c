/* SIGINT and SIGTERM as a flag that long work polls. */
#include "cli/cli.h"

#include <signal.h>

/* Global because a signal handler has no context. */
static volatile sig_atomic_t stop_requested;

static void request_stop(int sig)
{
    (void)sig;
    stop_requested = 1;
}

bool interrupt_came(void)
{
    return stop_requested != 0;
}

static void catch_signal(int sig)
{
    struct sigaction action = {.sa_handler = request_stop, .sa_flags = (int)SA_RESETHAND}, before;
    sigemptyset(&action.sa_mask);
    if (sigaction(sig, NULL, &before) == 0 && before.sa_handler != SIG_IGN)
        sigaction(sig, &action, NULL);
}

void interrupt_catch(void)
{
    catch_signal(SIGINT);
    catch_signal(SIGTERM);
}
