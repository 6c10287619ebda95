/* Host side of the products of qtool_w4ax.h: checks, choice of a kernel; configurations and
 * launches of the stream kernel. */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/w4ax/skinny.h"
#include "kernels/cuda/w4ax/stream.h"
#include "kernels/cuda/w4ax/tile.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>

enum { STREAM_TOKENS = 32 };

static int refuse(struct qtool_w4ax_plan *p, int status, const char *reason)
{
    snprintf(p->reason, sizeof p->reason, "%s", reason);
    return status;
}

static bool aligned(const void *p, size_t to)
{
    return p && ((size_t)p & (to - 1)) == 0;
}

static const char *weight_fault(const struct qtool_w4ax_weight *w)
{
    if (w->scales != QTOOL_W4AX_BLOCK && w->scales != QTOOL_W4AX_INT && w->scales != QTOOL_W4AX_ROW)
        return "unknown granularity of scales";
    if (w->n == 0 || w->k == 0 || w->n > 1u << 26 || w->k > 65536)
        return "n or k out of range";
    if (w->scale_exp2 < -100 || w->scale_exp2 > 100)
        return "scale_exp2 must be -100..100";
    if (!aligned(w->plane, 16) || !w->blocks)
        return "no codes, or not 16-byte aligned";
    if (w->scales != QTOOL_W4AX_ROW && !aligned(w->scale, 16))
        return "no block scales, or not 16-byte aligned";
    if (w->scales != QTOOL_W4AX_BLOCK && !aligned(w->row_scale, 4))
        return "no row scales, or not 4-byte aligned";
    if (w->pitch_blocks &&
        (w->pitch_blocks < 2 * ceil_div(w->k, QTOOL_W4AX_BLOCK_COLS) || w->pitch_blocks > INT_MAX))
        return "pitch smaller than the matrix, or out of range";
    return NULL;
}

static int device_facts(struct qtool_w4ax_plan *p)
{
    struct qt_device d;
    int rc = qt_device_facts(&d, p->options.device, p->reason);
    if (rc != QTOOL_OK)
        return rc;
    p->sms = d.sms; /* 0: refused, whatever the config */
    p->smem_limit = d.smem_limit;
    p->cc = d.cc;
    return QTOOL_OK;
}

struct qtool_matmul_plan qt_w4ax_launch_plan(const struct qtool_w4ax_plan *p,
                                             enum qtool_matmul_path path)
{
    struct qtool_matmul_plan l = {};
    l.m = p->m;
    l.n = p->n;
    l.k = p->k;
    l.sms = p->sms;
    l.smem_limit = p->smem_limit;
    l.cc = p->cc;
    l.options.device = p->options.device;
    l.options.dtype = p->options.output == QTOOL_W4AX_BF16 ? QTOOL_BF16 : QTOOL_F16;
    l.config.path = path;
    return l;
}

/* ---- shapes -------------------------------------------------------------------------------------
 */

static size_t kblocks_of(const struct qtool_w4ax_plan *p)
{
    return ceil_div(p->k, QTOOL_W4AX_BLOCK_COLS);
}

/* The stream kernel of the configuration, NULL if there is none; its shared memory. */
static const void *kernel_of(const struct qtool_w4ax_plan *p, int *smem)
{
    const struct qtool_w4ax_config *c = &p->config;
    int m = p->m > STREAM_TOKENS ? STREAM_TOKENS : (int)p->m;
    return qt_w4ax_stream_instance(p->scales, c->tokens, c->strips, c->warps, m, smem);
}

static int rows_of(const struct qtool_w4ax_plan *p)
{
    return p->config.strips * QT_STRIP_ROWS;
}

/* Groups of rows of the stream kernel. */
static size_t groups_of(const struct qtool_w4ax_plan *p)
{
    return ceil_div(p->n, (size_t)rows_of(p));
}

/* Groups that may be shared: each has a word of the workspace. */
enum { MOST_SHARED = QTOOL_WORKSPACE_ZEROED / sizeof(unsigned) };

static int stream_check(struct qtool_w4ax_plan *p)
{
    const struct qtool_w4ax_config *c = &p->config;
    int smem = 0;
    struct qtool_matmul_plan *l = &p->launch;
    *l = {};
    l->kernel = kernel_of(p, &smem);
    if (!l->kernel || c->cta_units < 1 || (c->warps != 4 && c->warps != 8))
        return refuse(p, QTOOL_UNSUPPORTED, "no such configuration");
    if (p->m > (size_t)c->tokens && c->tokens != STREAM_TOKENS)
        return refuse(p, QTOOL_UNSUPPORTED, "more tokens than a pass has");
    if (groups_of(p) * kblocks_of(p) > INT_MAX) /* kernels count in 32 bits */
        return refuse(p, QTOOL_UNSUPPORTED, "too many blocks of weights");
    l->cc = qt_w4ax_stream_cc(p->scales, p->cc);
    if (p->options.dependent_launch && l->cc == 90)
        smem = (int)qt_one_block_smem((size_t)smem, p->smem_limit);
    l->smem_bytes = (size_t)smem;
    l->grid_y = 1;
    l->grid_x = (int)ceil_div(groups_of(p) * kblocks_of(p), (size_t)c->cta_units);
    bool shared = (size_t)c->cta_units % kblocks_of(p) != 0;
    if (shared && groups_of(p) > MOST_SHARED)
        return refuse(p, QTOOL_UNSUPPORTED, "too many groups to share");
    size_t tokens = p->m > (size_t)c->tokens ? (size_t)c->tokens : p->m;
    p->workspace_bytes =
        shared ? QTOOL_WORKSPACE_ZEROED + (size_t)l->grid_x * 2 * tokens * (size_t)rows_of(p) * 4
               : 0;
    return qt_allow_smem(l->kernel, l->smem_bytes, p->reason); /* flags are beside it */
}

/* A plan that is refused has no kernel, whichever it had before. */
static int settled(struct qtool_w4ax_plan *p, int rc)
{
    if (rc != QTOOL_OK)
        p->launch.kernel = NULL;
    return rc;
}

static int check(struct qtool_w4ax_plan *p)
{
    if (p->sms == 0)
        return refuse(p, QTOOL_UNSUPPORTED, "a plan that was refused before its config");
    if (p->config.kernel == QTOOL_W4AX_SKINNY)
        return qt_w4ax_skinny_check(p);
    if (p->config.kernel != QTOOL_W4AX_TILE)
        return stream_check(p);
    if (p->options.packed)
        return refuse(p, QTOOL_UNSUPPORTED, "the tile kernel needs blocks that are not packed");
    return qt_w4ax_tile_check(p);
}

int qtool_w4ax_plan_check(struct qtool_w4ax_plan *p)
{
    return settled(p, check(p));
}

/* ---- choice -------------------------------------------------------------------------------------
 */

/* What sharing groups costs, in units. H200, block, 8 tokens: 6144 x 4096 10.5 us in shares of 24
 * units, 6.8 in whole groups of 32; 10240 x 8192 18.0 in shares of 78, 15.4 in two groups of 64. */
enum { SHARING = 64 };

/* Whole groups a block, or even shares where that leaves too many multiprocessors idle. */
static void choose_units(struct qtool_w4ax_plan *p)
{
    size_t kblocks = kblocks_of(p), groups = groups_of(p), sms = (size_t)p->sms;
    size_t whole = ceil_div(groups, sms) * kblocks, even = ceil_div(groups * kblocks, sms);
    p->config.cta_units = (int)(whole <= even + SHARING || groups > MOST_SHARED ? whole : even);
}

static void choose_stream(struct qtool_w4ax_plan *p)
{
    struct qtool_w4ax_config *c = &p->config;
    c->kernel = QTOOL_W4AX_STREAM;
    c->tokens = p->m <= 8 ? 8 : p->m <= 16 ? 16 : 32;
    c->strips = p->n / 64 >= (size_t)p->sms / 2 ? 4 : 2;
    c->warps = 8;
    /* Devices with less shared memory: 4 warps, then fewer strips. */
    for (int smem = 0; kernel_of(p, &smem) && smem > p->smem_limit;) {
        if (c->warps == 8)
            c->warps = 4;
        else
            c->strips /= 2;
    }
    choose_units(p);
}

static int plan(struct qtool_w4ax_plan *p, const struct qtool_w4ax_weight *w, size_t m,
                const struct qtool_w4ax_options *opt)
{
    int rc;
    const char *fault = weight_fault(w);
    *p = {};
    p->m = m;
    p->n = w->n;
    p->k = w->k;
    p->scales = w->scales;
    p->options = *opt;
    if (fault)
        return refuse(p, QTOOL_UNSUPPORTED, fault);
    if (m == 0 || m > 1u << 22)
        return refuse(p, QTOOL_UNSUPPORTED, "m out of range");
    if ((unsigned)opt->output > QTOOL_W4AX_F32)
        return refuse(p, QTOOL_UNSUPPORTED, "unknown type of output");
    if ((unsigned)opt->kernel > QTOOL_W4AX_SKINNY)
        return refuse(p, QTOOL_UNSUPPORTED, "unknown kernel");
    if ((rc = device_facts(p)) != QTOOL_OK)
        return rc;
    if ((opt->kernel == QTOOL_W4AX_ANY || opt->kernel == QTOOL_W4AX_SKINNY) &&
        qt_w4ax_skinny_choose(p))
        return check(p);
    if (opt->kernel == QTOOL_W4AX_SKINNY)
        return refuse(p, QTOOL_UNSUPPORTED, "no skinny kernel for this product");
    const bool tile = opt->kernel == QTOOL_W4AX_TILE ||
                      (opt->kernel == QTOOL_W4AX_ANY && p->cc == 90 && !opt->packed);
    double us;
    const bool chosen = tile && qt_w4ax_tile_choose(p, &us);
    if (!chosen && opt->kernel == QTOOL_W4AX_TILE)
        return refuse(p, QTOOL_UNSUPPORTED, "no tile kernel for this device");
    if (!chosen)
        choose_stream(p);
    return check(p);
}

int qtool_w4ax_plan(struct qtool_w4ax_plan *p, const struct qtool_w4ax_weight *w, size_t m,
                    const struct qtool_w4ax_options *opt)
{
    return settled(p, plan(p, w, m, opt));
}

/* ---- launch -------------------------------------------------------------------------------------
 */

static w4ax_args args_of(const struct qtool_w4ax_plan *p, const struct qtool_w4ax_weight *w,
                         const struct qtool_w4ax_acts *acts, void *y, void *workspace)
{
    w4ax_args a = {};
    a.plane = (const unsigned char *)w->plane;
    a.scale = (const unsigned char *)w->scale;
    a.row_scale = (const __half *)w->row_scale;
    a.blocks = w->blocks;
    a.x = (const unsigned char *)acts->codes;
    a.x_scale = acts->scale;
    a.x_sum = acts->sum;
    a.y = y;
    a.arrivals = (unsigned *)workspace;
    a.partial = (uint32_t *)((char *)workspace + QTOOL_WORKSPACE_ZEROED);
    a.m = a.x_tokens = (int)p->m;
    a.n = (int)p->n;
    a.strips = (int)ceil_div(p->n, QT_STRIP_ROWS);
    a.kblocks = (int)kblocks_of(p);
    a.blocks64 = (int)(w->pitch_blocks ? w->pitch_blocks : 2 * kblocks_of(p));
    a.x_pitch = (int)((p->m + 3) / 4 * 4);
    a.cta_units = p->config.cta_units;
    a.groups = (int)groups_of(p);
    a.nibbles = W4AX_NIBBLES;
    /* Codes are 16 times too large in the products; INT takes them as they are, and BLOCK corrects
     * it by the block, as packed activations are too. */
    a.factor = ldexpf(1, w->scale_exp2 - (p->scales == QTOOL_W4AX_ROW ? 4 : 0));
    a.output = p->options.output;
    a.dependent = p->options.dependent_launch;
    return a;
}

/* The tokens from token0 on, as many as a pass has. */
static w4ax_args pass_of(const struct qtool_w4ax_plan *p, w4ax_args a, size_t token0)
{
    size_t left = p->m - token0, element = p->options.output == QTOOL_W4AX_F32 ? 4 : 2;
    a.token0 = (int)token0;
    a.m = (int)(left < (size_t)p->config.tokens ? left : (size_t)p->config.tokens);
    a.y = (char *)a.y + token0 * p->n * element;
    if (p->scales != QTOOL_W4AX_BLOCK) {
        a.x_scale += token0;
        a.x_sum += p->scales == QTOOL_W4AX_INT ? token0 : 0;
    }
    return a;
}

int qtool_w4ax_run(const struct qtool_w4ax_plan *p, const struct qtool_w4ax_weight *w,
                   const struct qtool_w4ax_acts *acts, void *y, void *workspace, void *stream)
{
    int rc = QTOOL_OK;
    if (!p->launch.kernel || weight_fault(w) || w->n != p->n || w->k != p->k ||
        w->scales != p->scales)
        return QTOOL_UNSUPPORTED; /* not what was planned for */
    if (!aligned(acts->codes, 128) || !aligned(acts->scale, 16) ||
        (p->scales == QTOOL_W4AX_INT && !acts->sum) ||
        !aligned(y, p->options.output == QTOOL_W4AX_F32 ? 4 : 2) ||
        (p->workspace_bytes && !aligned(workspace, 256)))
        return QTOOL_UNSUPPORTED;
    if (p->config.kernel == QTOOL_W4AX_SKINNY)
        return qt_w4ax_skinny_run(p, w, acts, y, stream);
    if (p->config.kernel == QTOOL_W4AX_TILE)
        return qt_w4ax_tile_run(p, w, acts, y, workspace, stream);
    const w4ax_args all = args_of(p, w, acts, y, workspace);
    for (size_t token0 = 0; token0 < p->m && rc == QTOOL_OK; token0 += STREAM_TOKENS) {
        w4ax_args a = pass_of(p, all, token0);
        rc = qt_launch(&p->launch, &a, p->config.warps * 32, a.dependent, stream);
    }
    return rc;
}
