/* Selects the build of rowops.c for this processor. */
#include "pack/pack.h"
#include "pack/schemes/rowops.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

extern const struct qt_rowops qt_rowops_generic, qt_rowops_avx2, qt_rowops_avx512;

const char *const qt_isa_names[] = {"generic", "avx2", "avx512", NULL};

static bool runs_here(const char *isa)
{
#ifdef __x86_64__
    if (strcmp(isa, "avx2") == 0)
        return __builtin_cpu_supports("avx2");
    if (strcmp(isa, "avx512") == 0)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    return strcmp(isa, "generic") == 0;
}

/* In ascending speed. */
static const struct qt_rowops *const builds[] = {
    &qt_rowops_generic,
#ifdef __x86_64__
    &qt_rowops_avx2,
    &qt_rowops_avx512,
#endif
};

const struct qt_rowops *qt_rowops_at(size_t i)
{
    for (size_t b = 0; b < sizeof builds / sizeof *builds; b++)
        if (runs_here(builds[b]->isa) && i-- == 0)
            return builds[b];
    return NULL;
}

const struct qt_rowops *qt_rowops_best(void)
{
    const char *wanted = getenv("QTOOL_ISA");
    const struct qt_rowops *best = NULL, *ops;
    for (size_t i = 0; (ops = qt_rowops_at(i)) != NULL; i++) {
        best = ops;
        if (wanted && strcmp(wanted, ops->isa) == 0)
            break;
    }
    return best;
}
