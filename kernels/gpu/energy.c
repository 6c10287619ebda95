/* The energy counter of a GPU: NVML, loaded at run time, as it belongs to the driver. */
#include "base/base.h"
#include "kernels/gpu/internal.h"

#include <dlfcn.h>
#include <math.h>
#include <string.h>

struct gpu_energy {
    void *library, *device;
    int (*read)(void *device, unsigned long long *millijoules);
};

/* Copies the result of dlsym, as ISO C does not define its conversion to a function pointer. */
static bool find(void *out, void *library, const char *name)
{
    void *symbol = dlsym(library, name);
    memcpy(out, &symbol, sizeof symbol);
    return symbol != NULL;
}

static bool connect(struct gpu_energy *e, const char *pci)
{
    int (*init)(void), (*handle)(const char *pci, void **device);
    return find(&init, e->library, "nvmlInit_v2") &&
           find(&handle, e->library, "nvmlDeviceGetHandleByPciBusId_v2") &&
           find(&e->read, e->library, "nvmlDeviceGetTotalEnergyConsumption") && init() == 0 &&
           handle(pci, &e->device) == 0;
}

struct gpu_energy *gpu_energy_open(const char *pci)
{
    struct gpu_energy *e = NULL;
    if (qt_array_new(&e, 1, sizeof *e, NULL) < 0)
        return NULL;
    e->library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (e->library && connect(e, pci))
        return e;
    gpu_energy_close(e);
    return NULL;
}

void gpu_energy_close(struct gpu_energy *e)
{
    if (e && e->library)
        dlclose(e->library);
    qt_free(e);
}

double gpu_energy_joules(const struct gpu_energy *e)
{
    unsigned long long millijoules = 0;
    if (!e || e->read(e->device, &millijoules) != 0)
        return NAN;
    return (double)millijoules / 1000;
}
