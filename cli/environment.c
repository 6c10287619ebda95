/* Environment variables. Libraries read some before main(), and there is no later way to set them:
 * the program sets those that are unset and executes itself again. */
#include "cli/cli.h"

#include <cblas.h>

#include <ctype.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

/* Threads of GCC's OpenMP spin for milliseconds while they wait for each other. On a busy machine
 * that takes time from the threads they wait for: calibration took a third longer
 * (docs/pipelines.md). */
static const char *spin_count(void)
{
    return getenv("OMP_WAIT_POLICY") ? NULL : "10000";
}

/* OpenBLAS recognizes processors by model number and uses code without AVX for models it does not
 * know: a calibrated run then takes 2.3 times as long (docs/pipelines.md). */
static const char *blas_core(void)
{
#ifdef __x86_64__
    if (strcmp(openblas_get_corename(), "Prescott") != 0 ||
        !strstr(openblas_get_config(), "DYNAMIC_ARCH") || !__builtin_cpu_supports("avx2") ||
        !__builtin_cpu_supports("fma"))
        return NULL;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
               ? "SkylakeX"
               : "Haswell";
#else
    return NULL;
#endif
}

/* qtool calls OpenBLAS from its own threads. At load time OpenBLAS would start another thread per
 * core, each with 128 MB of address space; under a limit (ulimit -v) these retry forever, and the
 * program hangs. */
static const char *blas_threads(void)
{
    return "1";
}

/* malloc of the GNU C library maps blocks of 128 KB and more, but raises this limit to the size of
 * blocks that are freed, up to 32 MB, and its heap fragments: examples/nano-llama, nf4, with 16
 * windows of 128 tokens, took 77 MiB instead of 54. */
static const char *mmap_threshold(void)
{
    return "131072";
}

void environment_complete(char **argv)
{
    const struct {
        const char *name;
        const char *(*value)(void); /* returns NULL to leave the variable unset */
    } settings[] = {{"GOMP_SPINCOUNT", spin_count},
                    {"OPENBLAS_CORETYPE", blas_core},
                    {"OPENBLAS_NUM_THREADS", blas_threads},
                    {"MALLOC_MMAP_THRESHOLD_", mmap_threshold}};
    bool changed = false;
    char self[PATH_MAX];
    ssize_t size = readlink("/proc/self/exe", self, sizeof self - 1);
    if (size <= 0 || (size_t)size == sizeof self - 1)
        return;
    self[size] = '\0';
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        const char *value = getenv(settings[i].name) ? NULL : settings[i].value();
        if (!value)
            continue;
        if (setenv(settings[i].name, value, 0) != 0)
            return;
        changed = true;
    }
    if (changed)
        execv(self, argv);
}

/* Size in bytes of OMP_STACKSIZE: a number and B, K (the default), M or G; 0 if it is no size. */
static double stack_size(const char *text)
{
    static const char units[] = "BKMG";
    char *end;
    const double size = strtod(text, &end);
    const char *unit = units + 1;
    end += strspn(end, " ");
    if (*end)
        unit = strchr(units, toupper((unsigned char)*end));
    return unit ? size * pow(1024, (double)(unit - units)) : 0;
}

/* OpenMP ends the program if threads cannot start with the stack that it is told to give them. */
static int check_stack(struct qt_err *err)
{
    static const char *const names[] = {"OMP_STACKSIZE", "GOMP_STACKSIZE"};
    const double least = 1 << 20;
    struct rlimit limit;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *value = getenv(names[i]);
        const double size = value ? stack_size(value) : 0;
        if (size > 0 && size < least)
            return qt_fail(err, QT_E_USAGE, NULL, NULL,
                           "%s=%s: threads need stacks of 1 MB or more (%s=1M); unset it", names[i],
                           value, names[i]);
    }
    if (getrlimit(RLIMIT_STACK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        (double)limit.rlim_cur < least)
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL,
                       "stacks are limited to %llu KB (ulimit -s), but threads need 1024 KB",
                       (unsigned long long)limit.rlim_cur >> 10);
    return QT_OK;
}

int environment_check(struct qt_err *err)
{
    int rc = check_stack(err);
    if (rc < 0)
        return rc;
    const char *isa = getenv("QTOOL_ISA");
    size_t n = 0;
    if (!isa || !*isa)
        return QT_OK;
    for (; qt_isa_names[n]; n++)
        if (strcmp(qt_isa_names[n], isa) == 0)
            return QT_OK;
    return opts_unknown("value of QTOOL_ISA", isa, qt_isa_names, n, err);
}

bool comm_wanted(void)
{
    /* Open MPI sets the first, MPICH and Slurm's PMI-2 the second. PMIx sets the third, which does
     * not tell the number of ranks. */
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *value = getenv(names[i]);
        if (value)
            return strcmp(value, "1") != 0 || i == 2;
    }
    return false;
}
