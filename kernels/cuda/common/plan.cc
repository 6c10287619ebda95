/* Host code shared by the plans of all products. */
#include "kernels/cuda/common/plan.h"
#include "kernels/cuda/common/device.h"

#include <stdarg.h>
#include <stdio.h>

int qt_refuse(struct qtool_matmul_plan *p, int status, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(p->reason, sizeof p->reason, fmt, ap);
    va_end(ap);
    return status;
}

int qt_set_smem(struct qtool_matmul_plan *p, size_t bytes, bool dependent)
{
    struct qt_plan_state *state = qt_state(p);
    state->smem_bytes = bytes;
    if (bytes > (size_t)state->smem_limit)
        return qt_refuse(p, QTOOL_UNSUPPORTED,
                         "the kernel needs %zu bytes of shared memory, the device has %d", bytes,
                         state->smem_limit);
    if (dependent)
        state->smem_bytes = qt_one_block_smem(bytes, state->smem_limit);
    return QTOOL_OK;
}

int qt_launch_clusters(const struct qtool_matmul_plan *p, void *args, int threads, int cluster,
                       bool dependent, void *stream)
{
    const struct qt_plan_state *state = qt_state(p);
    struct qt_kernel_launch launch = {};
    launch.kernel = state->kernel;
    launch.grid = dim3((unsigned)state->grid_x, (unsigned)state->grid_y);
    launch.threads = threads;
    launch.smem = state->smem_bytes;
    launch.cluster = cluster;
    launch.dependent = dependent && state->cc == 90;
    return qt_launch_kernel(&launch, args, stream);
}

int qt_launch(const struct qtool_matmul_plan *p, void *args, int threads, bool dependent,
              void *stream)
{
    return qt_launch_clusters(p, args, threads, 1, dependent, stream);
}
