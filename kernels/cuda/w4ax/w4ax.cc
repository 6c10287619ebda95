/* qtool_w4ax.h: plans and runs of products, dispatched by kernel. */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/w4ax/skinny.h"
#include "kernels/cuda/w4ax/stream.h"
#include "kernels/cuda/w4ax/tile.h"

static bool aligned(const void *p, size_t to)
{
    return p && ((size_t)p & (to - 1)) == 0;
}

static const char *weight_fault(const struct qtool_w4ax_weight *w)
{
    const char *fault = qt_w4ax_weight_fault(w);
    return fault ? fault : w->blocks ? NULL : "blocks must not be NULL";
}

static int set_device(struct qtool_w4ax_plan *p)
{
    struct qt_device d;
    struct qt_w4ax_state *state = qt_state(p);
    int rc = qt_query_device(&d, p->options.device, p->reason);
    if (rc != QTOOL_OK)
        return rc;
    state->sms = d.sms;
    state->smem_limit = d.smem_limit;
    state->cc = d.cc;
    return QTOOL_OK;
}

static int finish(struct qtool_w4ax_plan *p, int rc)
{
    qt_state(p)->ready = rc == QTOOL_OK;
    return rc;
}

static int check(struct qtool_w4ax_plan *p)
{
    if (qt_state(p)->sms == 0)
        return qt_w4ax_refuse(p, QTOOL_UNSUPPORTED,
                              "qtool_w4ax_plan refused the plan, so no config can be checked");
    switch (p->config.kernel) {
    case QTOOL_W4AX_STREAM:
        return qt_w4ax_stream_check(p);
    case QTOOL_W4AX_SKINNY:
        return qt_w4ax_skinny_check(p);
    case QTOOL_W4AX_TILE:
        return qt_w4ax_tile_check(p);
    default:
        return qt_w4ax_refuse(p, QTOOL_UNSUPPORTED, "config.kernel does not name a kernel");
    }
}

int qtool_w4ax_plan_check(struct qtool_w4ax_plan *p)
{
    return finish(p, check(p));
}

static int choose(struct qtool_w4ax_plan *p)
{
    const enum qtool_w4ax_kernel wanted = p->options.kernel;
    double us;
    if ((wanted == QTOOL_W4AX_ANY || wanted == QTOOL_W4AX_SKINNY) && qt_w4ax_skinny_choose(p))
        return QTOOL_OK;
    if (wanted == QTOOL_W4AX_SKINNY)
        return qt_w4ax_refuse(p, QTOOL_UNSUPPORTED,
                              "the skinny kernel does not support this product and device");
    const bool tile = wanted == QTOOL_W4AX_TILE ||
                      (wanted == QTOOL_W4AX_ANY && qt_state(p)->cc == 90 && !p->options.packed);
    if (tile && qt_w4ax_tile_choose(p, &us))
        return QTOOL_OK;
    if (wanted == QTOOL_W4AX_TILE)
        return qt_w4ax_refuse(p, QTOOL_UNSUPPORTED, "the tile kernel needs compute capability 9.0");
    qt_w4ax_stream_choose(p);
    return QTOOL_OK;
}

static int plan(struct qtool_w4ax_plan *p, const struct qtool_w4ax_weight *w, size_t m,
                const struct qtool_w4ax_options *opt)
{
    int rc;
    const char *fault = weight_fault(w);
    *p = {};
    *qt_state(p) = {};
    p->m = m;
    p->n = w->n;
    p->k = w->k;
    p->scales = w->scales;
    p->options = *opt;
    if (fault)
        return qt_w4ax_refuse(p, QTOOL_UNSUPPORTED, fault);
    if (m == 0 || m > 1u << 22)
        return qt_w4ax_refuse(p, QTOOL_UNSUPPORTED, "m must be 1..2^22");
    if ((unsigned)opt->output > QTOOL_W4AX_F32)
        return qt_w4ax_refuse(p, QTOOL_UNSUPPORTED,
                              "options.output is not an enum qtool_w4ax_output");
    if ((unsigned)opt->kernel > QTOOL_W4AX_SKINNY)
        return qt_w4ax_refuse(p, QTOOL_UNSUPPORTED,
                              "options.kernel is not an enum qtool_w4ax_kernel");
    if ((rc = set_device(p)) != QTOOL_OK)
        return rc;
    rc = choose(p);
    return rc == QTOOL_OK ? check(p) : rc;
}

int qtool_w4ax_plan(struct qtool_w4ax_plan *p, const struct qtool_w4ax_weight *w, size_t m,
                    const struct qtool_w4ax_options *opt)
{
    return finish(p, plan(p, w, m, opt));
}

int qtool_w4ax_run(const struct qtool_w4ax_plan *p, const struct qtool_w4ax_weight *w,
                   const struct qtool_w4ax_acts *acts, void *y, void *workspace, void *stream)
{
    if (!qt_state(p)->ready || weight_fault(w) || w->n != p->n || w->k != p->k ||
        w->scales != p->scales)
        return QTOOL_UNSUPPORTED;
    if (!aligned(acts->codes, 128) || !aligned(acts->scale, 16) ||
        (p->scales == QTOOL_W4AX_INT && !acts->sum) ||
        !aligned(y, p->options.output == QTOOL_W4AX_F32 ? 4 : 2) ||
        (p->workspace_bytes && !aligned(workspace, 256)))
        return QTOOL_UNSUPPORTED;
    switch (p->config.kernel) {
    case QTOOL_W4AX_SKINNY:
        return qt_w4ax_skinny_run(p, w, acts, y, stream);
    case QTOOL_W4AX_TILE:
        return qt_w4ax_tile_run(p, w, acts, y, workspace, stream);
    case QTOOL_W4AX_STREAM:
        return qt_w4ax_stream_run(p, w, acts, y, workspace, stream);
    default:
        return QTOOL_UNSUPPORTED;
    }
}
