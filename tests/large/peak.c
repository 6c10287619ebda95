/* peak LIMIT COMMAND...: runs the command, says how long it took and the most memory it had
 * resident, and fails if that was more than LIMIT MiB or the command failed. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    struct timespec start, end;
    struct rusage use;
    int status;
    if (argc < 3) {
        fprintf(stderr, "usage: peak LIMIT COMMAND...\n");
        return 2;
    }
    clock_gettime(CLOCK_MONOTONIC, &start);
    pid_t pid = fork();
    if (pid == 0) {
        execvp(argv[2], argv + 2);
        perror(argv[2]);
        _exit(127);
    }
    if (pid < 0 || wait4(pid, &status, 0, &use) != pid) {
        perror("peak");
        return 1;
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    double seconds =
        (double)(end.tv_sec - start.tv_sec) + 1e-9 * (double)(end.tv_nsec - start.tv_nsec);
    double cpu = (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
                 1e-6 * (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec);
    long peak = use.ru_maxrss / 1024, limit = strtol(argv[1], NULL, 10);
    fprintf(stderr, "seconds %.1f cpu %.1f peak_mib %ld limit_mib %ld\n", seconds, cpu, peak,
            limit);
    return status != 0 || peak > limit;
}
