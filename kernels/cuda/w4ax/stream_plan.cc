/* The w4ax stream kernel's plan: choice of a configuration, arguments, launches. */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/w4ax/stream.h"

#include <limits.h>
#include <math.h>

enum { MAX_TOKENS = 32 }; /* per pass over the weights */

static size_t kblocks_of(const struct qtool_w4ax_plan *p)
{
    return ceil_div(p->k, QTOOL_W4AX_BLOCK_COLS);
}

/* Returns the kernel of the configuration, or NULL, and sets *smem to its shared memory. */
static const void *kernel_of(const struct qtool_w4ax_plan *p, int *smem)
{
    const struct qtool_w4ax_stream_config *c = &p->config.stream;
    int m = p->m > MAX_TOKENS ? MAX_TOKENS : (int)p->m;
    return qt_w4ax_stream_instance(p->scales, c->tokens, c->strips, c->warps, m, smem);
}

/* Returns the rows of a row group. */
static int rows_of(const struct qtool_w4ax_plan *p)
{
    return p->config.stream.strips * QT_STRIP_ROWS;
}

static size_t groups_of(const struct qtool_w4ax_plan *p)
{
    return ceil_div(p->n, (size_t)rows_of(p));
}

/* Maximum number of row groups that thread blocks can share: each needs a word of the workspace. */
enum { MAX_SHARED = QTOOL_WORKSPACE_ZEROED / sizeof(unsigned) };

/* ---- choice --------------------------------------------------------------------------------- */

/* Cost of sharing row groups, in work units. H200, BLOCK, 8 tokens: 6144 x 4096 takes 10.5 us in
 * shares of 24 work units, 6.8 in whole row groups of 32; 10240 x 8192 takes 18.0 in shares of 78,
 * 15.4 in two row groups of 64. */
enum { SHARING = 64 };

/* Gives thread blocks whole row groups, or equal shares if whole ones would leave too many
 * multiprocessors idle. */
static void choose_units(struct qtool_w4ax_plan *p)
{
    size_t kblocks = kblocks_of(p), groups = groups_of(p), sms = (size_t)qt_state(p)->sms;
    size_t whole = ceil_div(groups, sms) * kblocks, even = ceil_div(groups * kblocks, sms);
    p->config.stream.cta_units =
        (int)(whole <= even + SHARING || groups > MAX_SHARED ? whole : even);
}

void qt_w4ax_stream_choose(struct qtool_w4ax_plan *p)
{
    struct qtool_w4ax_stream_config *c = &p->config.stream;
    p->config = {};
    p->config.kernel = QTOOL_W4AX_STREAM;
    c->tokens = p->m <= 8 ? 8 : p->m <= 16 ? 16 : 32;
    c->strips = p->n / 64 >= (size_t)qt_state(p)->sms / 2 ? 4 : 2;
    c->warps = 8;
    /* Devices with less shared memory: 4 warps, then fewer strips. */
    for (int smem = 0; kernel_of(p, &smem) && smem > qt_state(p)->smem_limit;) {
        if (c->warps == 8)
            c->warps = 4;
        else
            c->strips /= 2;
    }
    choose_units(p);
}

/* ---- plan and run --------------------------------------------------------------------------- */

int qt_w4ax_stream_check(struct qtool_w4ax_plan *p)
{
    const struct qtool_w4ax_stream_config *c = &p->config.stream;
    const struct qt_w4ax_state *state = qt_state(p);
    int smem = 0;
    struct qtool_matmul_plan *launch = &qt_state(p)->launch;
    *launch = {};
    struct qt_plan_state *l = qt_state(launch);
    *l = {};
    l->kernel = kernel_of(p, &smem);
    if (!l->kernel || c->cta_units < 1 || (c->warps != 4 && c->warps != 8))
        return qt_w4ax_refuse(
            p, QTOOL_UNSUPPORTED,
            "no stream kernel has this configuration: tokens 8, 16, 32; strips 2, "
            "4; warps 4, 8; cta_units positive");
    if (p->m > (size_t)c->tokens && c->tokens != MAX_TOKENS)
        return qt_w4ax_refuse(p, QTOOL_UNSUPPORTED, "tokens must be at least m, or 32");
    if (groups_of(p) * kblocks_of(p) > INT_MAX) /* kernels count in 32 bits */
        return qt_w4ax_refuse(p, QTOOL_UNSUPPORTED, "the weight has 2^31 units or more");
    l->cc = qt_w4ax_stream_cc(p->scales, state->cc);
    if (p->options.dependent_launch && l->cc == 90)
        smem = (int)qt_one_block_smem((size_t)smem, state->smem_limit);
    l->smem_bytes = (size_t)smem;
    l->grid_y = 1;
    l->grid_x = (int)ceil_div(groups_of(p) * kblocks_of(p), (size_t)c->cta_units);
    bool shared = (size_t)c->cta_units % kblocks_of(p) != 0;
    if (shared && groups_of(p) > MAX_SHARED)
        return qt_w4ax_refuse(
            p, QTOOL_UNSUPPORTED,
            "there are too many row groups to share: cta_units must be a multiple "
            "of the channel blocks of k");
    size_t tokens = p->m > (size_t)c->tokens ? (size_t)c->tokens : p->m;
    p->workspace_bytes =
        shared ? QTOOL_WORKSPACE_ZEROED + (size_t)l->grid_x * 2 * tokens * (size_t)rows_of(p) * 4
               : 0;
    return qt_allow_smem(l->kernel, l->smem_bytes, p->reason);
}

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
    a.blocks64 = (int)ceil_div(p->k, QTOOL_W4AX_BLOCK_COLS / 2);
    a.pitch64 = (int)(w->pitch_blocks ? w->pitch_blocks : 2 * kblocks_of(p));
    a.x_pitch = (int)((p->m + 3) / 4 * 4);
    a.cta_units = p->config.stream.cta_units;
    a.groups = (int)groups_of(p);
    a.nibbles = W4AX_NIBBLES;
    /* Unpacked weight codes are 16 times too large. INT multiplies them as they are, and BLOCK
     * corrects each channel block, as packed activations have that factor too. */
    a.factor = ldexpf(1, w->scale_exp2 - (p->scales == QTOOL_W4AX_ROW ? 4 : 0));
    a.output = p->options.output;
    a.dependent = p->options.dependent_launch;
    return a;
}

/* Returns the arguments of the pass over the tokens from token0 on. */
static w4ax_args pass_of(const struct qtool_w4ax_plan *p, w4ax_args a, size_t token0)
{
    const size_t element = p->options.output == QTOOL_W4AX_F32 ? 4 : 2;
    const size_t rest = p->m - token0, tokens = (size_t)p->config.stream.tokens;
    a.token0 = (int)token0;
    a.m = (int)(rest < tokens ? rest : tokens);
    a.y = (char *)a.y + token0 * p->n * element;
    if (p->scales != QTOOL_W4AX_BLOCK) {
        a.x_scale += token0;
        a.x_sum += p->scales == QTOOL_W4AX_INT ? token0 : 0;
    }
    return a;
}

int qt_w4ax_stream_run(const struct qtool_w4ax_plan *p, const struct qtool_w4ax_weight *w,
                       const struct qtool_w4ax_acts *acts, void *y, void *workspace, void *stream)
{
    int rc = QTOOL_OK;
    const w4ax_args all = args_of(p, w, acts, y, workspace);
    for (size_t token0 = 0; token0 < p->m && rc == QTOOL_OK; token0 += MAX_TOKENS) {
        w4ax_args a = pass_of(p, all, token0);
        rc = qt_launch(&qt_state(p)->launch, &a, p->config.stream.warps * 32, a.dependent, stream);
    }
    return rc;
}
