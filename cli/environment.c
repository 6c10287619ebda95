/* Libraries read some settings from the environment before main(), and nothing sets them later: the
 * program sets those that nobody has set, and starts itself once more. Its own are checked. */
#include "cli/cli.h"

#include <cblas.h>

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* GCC's OpenMP lets threads spin for milliseconds while they wait for each other. Where other
 * programs want the cores, that is time of those they wait for: calibration took a third longer
 * (docs/pipelines.md). */
static const char *spin_count(void)
{
    return getenv("OMP_WAIT_POLICY") ? NULL : "10000";
}

/* OpenBLAS knows processors by their numbers, and takes the code of an old one for those that came
 * after it: without AVX, a calibrated run takes 2.3 times as long (docs/pipelines.md). */
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

/* All of qtool's products are called from threads of its own. OpenBLAS would start one more for
 * each core when it is loaded, with 128 MB of address space; where a limit (ulimit -v) has no room
 * for that, these try again for ever, and the program never ends. */
static const char *blas_threads(void)
{
    return "1";
}

void environment_complete(char **argv)
{
    const struct {
        const char *name;
        const char *(*value)(void); /* NULL: as it is */
    } settings[] = {{"GOMP_SPINCOUNT", spin_count},
                    {"OPENBLAS_CORETYPE", blas_core},
                    {"OPENBLAS_NUM_THREADS", blas_threads}};
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

int environment_check(struct qt_err *err)
{
    const char *isa = getenv("QTOOL_ISA");
    size_t n = 0;
    if (!isa || !*isa)
        return QT_OK;
    for (; qt_isa_names[n]; n++)
        if (strcmp(qt_isa_names[n], isa) == 0)
            return QT_OK;
    return opts_unknown("value of QTOOL_ISA", isa, qt_isa_names, n, err);
}
