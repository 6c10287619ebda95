/* Host code that the plans of the w4ax kernels share. */
#include "kernels/cuda/w4ax/plan.h"

#include <limits.h>
#include <stdio.h>

static bool aligned(const void *p, size_t to)
{
    return p && ((size_t)p & (to - 1)) == 0;
}

const char *qt_w4ax_weight_fault(const struct qtool_w4ax_weight *w)
{
    if (w->scales != QTOOL_W4AX_BLOCK && w->scales != QTOOL_W4AX_INT && w->scales != QTOOL_W4AX_ROW)
        return "scales is not an enum qtool_w4ax_scales";
    if (w->n == 0 || w->k == 0 || w->n > 1u << 26 || w->k > 65536)
        return "n must be 1..2^26 and k 1..65536";
    if (w->scale_exp2 < -100 || w->scale_exp2 > 100)
        return "scale_exp2 must be -100..100";
    if (!aligned(w->plane, 16))
        return "plane must be 16-byte aligned and not NULL";
    if (w->scales != QTOOL_W4AX_ROW && !aligned(w->scale, 16))
        return "scale must be 16-byte aligned and not NULL";
    if (w->scales != QTOOL_W4AX_BLOCK && !aligned(w->row_scale, 4))
        return "row_scale must be 4-byte aligned and not NULL";
    if (w->pitch_blocks &&
        (w->pitch_blocks < ceil_div(w->k, QTOOL_W4AX_BLOCK_COLS / 2) || w->pitch_blocks > INT_MAX))
        return "pitch_blocks is smaller than the matrix, or 2^31 or more";
    return NULL;
}

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
