/* Host code that the plans of the w4ax kernels share. */
#include "kernels/cuda/w4ax/plan.h"

#include <stdio.h>

int qt_w4ax_refuse(struct qtool_w4ax_plan *p, int status, const char *reason)
{
    snprintf(p->reason, sizeof p->reason, "%s", reason);
    return status;
}

struct qtool_matmul_plan qt_w4ax_launch_plan(const struct qtool_w4ax_plan *p,
                                             enum qtool_matmul_path path)
{
    struct qtool_matmul_plan launch = {};
    struct qt_plan_state *state = qt_state(&launch);
    *state = {};
    state->sms = qt_state(p)->sms;
    state->smem_limit = qt_state(p)->smem_limit;
    state->cc = qt_state(p)->cc;
    launch.m = p->m;
    launch.n = p->n;
    launch.k = p->k;
    launch.options.device = p->options.device;
    launch.options.dtype = p->options.output == QTOOL_W4AX_BF16 ? QTOOL_BF16 : QTOOL_F16;
    launch.config.path = path;
    return launch;
}
