/* Host side of the products of qtool_w4ax.h: checks, configurations, launches. */
#include "kernels/cuda/device.h"
#include "kernels/cuda/w4ax_kernels.h"

#include <math.h>
#include <stdio.h>

enum { STRIP_ROWS = 16, STREAM_TOKENS = 32 };

static int refuse(struct qt_w4ax_plan *p, int status, const char *reason)
{
    snprintf(p->reason, sizeof p->reason, "%s", reason);
    return status;
}

static bool aligned(const void *p, size_t to)
{
    return p && ((size_t)p & (to - 1)) == 0;
}

static const char *weight_fault(const struct qt_w4ax_weight *w)
{
    if (w->scales != QT_W4AX_BLOCK && w->scales != QT_W4AX_INT && w->scales != QT_W4AX_ROW)
        return "unknown granularity of scales";
    if (w->n == 0 || w->k == 0 || w->n > 1u << 26 || w->k > 65536)
        return "n or k out of range";
    if (!aligned(w->plane, 16) || !w->blocks)
        return "no codes, or not 16-byte aligned";
    if (w->scales != QT_W4AX_ROW && !aligned(w->scale, 16))
        return "no block scales, or not 16-byte aligned";
    if (w->scales != QT_W4AX_BLOCK && !w->row_scale)
        return "no row scales";
    return NULL;
}

static int device_facts(struct qt_w4ax_plan *p)
{
    struct qt_device d;
    int rc = qt_device_facts(&d, p->options.device, p->reason);
    p->sms = d.sms;
    p->smem_limit = d.smem_limit;
    p->cc = d.cc;
    return rc;
}

/* ---- shapes -------------------------------------------------------------------------------------
 */

static size_t divide_up(size_t a, size_t b)
{
    return (a + b - 1) / b;
}

static size_t kblocks_of(const struct qt_w4ax_plan *p)
{
    return divide_up(p->k, QT_W4AX_BLOCK_COLS);
}

/* The kernel of the configuration, NULL if there is none; its shared memory and rows of a group. */
static const void *kernel_of(const struct qt_w4ax_plan *p, int *smem, int *rows)
{
    const struct qt_w4ax_config *c = &p->config;
    int m = p->m > STREAM_TOKENS ? STREAM_TOKENS : (int)p->m;
    if (c->kernel == QT_W4AX_TILE)
        return qt_w4ax_tile(p->scales, c->tokens, rows, smem);
    *rows = c->strips * STRIP_ROWS;
    return p->scales == QT_W4AX_BLOCK
               ? qt_w4ax_stream_block(c->tokens, c->strips, c->warps, m, smem)
           : p->scales == QT_W4AX_INT ? qt_w4ax_stream_int(c->tokens, c->strips, c->warps, m, smem)
                                      : qt_w4ax_stream_row(c->tokens, c->strips, c->warps, m, smem);
}

static size_t groups_of(const struct qt_w4ax_plan *p)
{
    size_t token_tiles =
        p->config.kernel == QT_W4AX_TILE ? divide_up(p->m, (size_t)p->config.tokens) : 1;
    int rows = 0, smem;
    return kernel_of(p, &smem, &rows) ? divide_up(p->n, (size_t)rows) * token_tiles : 0;
}

int qt_w4ax_plan_check(struct qt_w4ax_plan *p)
{
    const struct qt_w4ax_config *c = &p->config;
    int rows = 0;
    size_t units = groups_of(p) * kblocks_of(p);
    const void *kernel = kernel_of(p, &p->smem_bytes, &rows);
    if (!kernel || c->cta_units < 1 ||
        (c->kernel != QT_W4AX_TILE && c->warps != 4 && c->warps != 8))
        return refuse(p, QT_MATMUL_UNSUPPORTED, "no such configuration");
    if (c->kernel == QT_W4AX_TILE && (p->cc != 90 || p->options.packed))
        return refuse(
            p, QT_MATMUL_UNSUPPORTED,
            "the tile kernel needs compute capability 9.0 and blocks that are not packed");
    if (c->kernel != QT_W4AX_TILE && p->m > (size_t)c->tokens && c->tokens != STREAM_TOKENS)
        return refuse(p, QT_MATMUL_UNSUPPORTED, "more tokens than a pass has");
    if (p->smem_bytes > p->smem_limit)
        return refuse(p, QT_MATMUL_UNSUPPORTED, "not enough shared memory");
    p->grid = (int)divide_up(units, (size_t)c->cta_units);
    bool shared = (size_t)c->cta_units % kblocks_of(p) != 0;
    if (shared && groups_of(p) > QT_MATMUL_WORKSPACE_ZEROED / sizeof(unsigned))
        return refuse(p, QT_MATMUL_UNSUPPORTED, "too many groups to share");
    size_t tokens =
        c->kernel == QT_W4AX_TILE || p->m > (size_t)c->tokens ? (size_t)c->tokens : p->m;
    p->workspace_bytes =
        shared ? QT_MATMUL_WORKSPACE_ZEROED + (size_t)p->grid * 2 * tokens * (size_t)rows * 4 : 0;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, p->smem_bytes) !=
        cudaSuccess)
        return refuse(p, QT_MATMUL_FAILED, cudaGetErrorString(cudaGetLastError()));
    return QT_MATMUL_OK;
}

/* ---- choice -------------------------------------------------------------------------------------
 */

/* Whole groups a block where that keeps the multiprocessors busy, else even shares. */
static void choose_units(struct qt_w4ax_plan *p)
{
    size_t kblocks = kblocks_of(p), groups = groups_of(p), sms = (size_t)p->sms;
    size_t whole = divide_up(groups, sms) * kblocks, even = divide_up(groups * kblocks, sms);
    p->config.cta_units = (int)(whole <= even + even / 16 ? whole : even);
}

/*
 * Microseconds of the tile kernel on an H200, from 4096 x 4096 to 28672 x 4096: units, by scales
 * and tokens (up to 32, 64, 128), and what the blocks that share a group take to add up its sums,
 * by their KB.
 */
static float tile_us(const struct qt_w4ax_plan *p, size_t units)
{
    static const float unit_us[][3] = {{.55f, .79f, .69f}, {.52f, .68f, .85f}, {.50f, .60f, .72f}};
    const size_t kblocks = kblocks_of(p);
    const float us =
        (float)units * unit_us[p->scales][(p->config.tokens > 32) + (p->config.tokens > 64)];
    int rows = 0, smem;
    kernel_of(p, &smem, &rows);
    const float kilobytes = (float)(rows * p->config.tokens) * 4 / 1024;
    /* Beside the one that adds up, of those that share a group. */
    const size_t others = divide_up(kblocks, units) - (kblocks % units == 0);
    return units % kblocks == 0 ? us : us + 1.5f + kilobytes / 32 + (float)others * kilobytes / 80;
}

/* Of the tile kernel: it may pay to leave multiprocessors idle, for the more blocks share a group,
 * the longer they take to add up. */
static void choose_tile_units(struct qt_w4ax_plan *p)
{
    const size_t kblocks = kblocks_of(p), groups = groups_of(p);
    choose_units(p);
    float best = tile_us(p, (size_t)p->config.cta_units);
    for (size_t shares = 1; shares <= kblocks; shares++) {
        const size_t units = divide_up(kblocks, shares);
        if (divide_up(groups * kblocks, units) > (size_t)p->sms)
            break;
        if (tile_us(p, units) < best) {
            best = tile_us(p, units);
            p->config.cta_units = (int)units;
        }
    }
}

static void choose_stream(struct qt_w4ax_plan *p)
{
    struct qt_w4ax_config *c = &p->config;
    c->kernel = QT_W4AX_STREAM;
    c->tokens = p->m <= 8 ? 8 : p->m <= 16 ? 16 : 32;
    c->strips = p->n / 64 >= (size_t)p->sms / 2 ? 4 : 2;
    c->warps = 8;
    /* Devices with less shared memory: 4 warps, then fewer strips. */
    for (int smem = 0, rows; kernel_of(p, &smem, &rows) && smem > p->smem_limit;) {
        if (c->warps == 8)
            c->warps = 4;
        else
            c->strips /= 2;
    }
    choose_units(p);
}

static void choose_tile(struct qt_w4ax_plan *p)
{
    p->config.kernel = QT_W4AX_TILE;
    p->config.tokens = p->m <= 16 ? 16 : p->m <= 32 ? 32 : p->m <= 64 ? 64 : 128;
    choose_tile_units(p);
}

int qt_w4ax_plan(struct qt_w4ax_plan *p, const struct qt_w4ax_weight *w, size_t m,
                 const struct qt_w4ax_options *opt)
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
        return refuse(p, QT_MATMUL_UNSUPPORTED, fault);
    if (m == 0 || m > 1u << 22)
        return refuse(p, QT_MATMUL_UNSUPPORTED, "m out of range");
    if ((rc = device_facts(p)) != QT_MATMUL_OK)
        return rc;
    /* The stream kernel reads X again for every 64 rows, and shares groups of them unevenly where
     * there are more than multiprocessors: 28672 x 4096, 32 tokens: 41 us, the tile kernel 22. */
    bool many = m > STREAM_TOKENS || (m > 8 && p->n > 64 * (size_t)p->sms);
    bool tile = opt->kernel == QT_W4AX_TILE ||
                (opt->kernel == QT_W4AX_ANY && many && p->cc == 90 && !opt->packed);
    if (tile)
        choose_tile(p);
    else
        choose_stream(p);
    return qt_w4ax_plan_check(p);
}

/* ---- launch -------------------------------------------------------------------------------------
 */

static w4ax_args args_of(const struct qt_w4ax_plan *p, const struct qt_w4ax_weight *w,
                         const struct qt_w4ax_acts *acts, void *y, void *workspace)
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
    a.partial = (uint32_t *)((char *)workspace + QT_MATMUL_WORKSPACE_ZEROED);
    a.m = a.x_tokens = (int)p->m;
    a.n = (int)p->n;
    a.strips = (int)divide_up(p->n, STRIP_ROWS);
    a.kblocks = (int)kblocks_of(p);
    a.blocks64 = (int)(w->pitch_blocks ? w->pitch_blocks : 2 * kblocks_of(p));
    a.x_pitch = (int)((p->m + 3) / 4 * 4);
    a.cta_units = p->config.cta_units;
    a.groups = (int)groups_of(p);
    /* Codes are 16 times too large in the products; INT takes them as they are, and the stream
     * kernel of BLOCK corrects it by the block, as packed activations are too. */
    bool large = p->scales == QT_W4AX_ROW ||
                 (p->scales == QT_W4AX_BLOCK && p->config.kernel == QT_W4AX_TILE);
    a.factor = ldexpf(1, w->scale_exp2 - (large ? 4 : 0));
    a.output = p->options.output;
    return a;
}

/* The tokens from token0 on, as many as a pass has. */
static w4ax_args pass_of(const struct qt_w4ax_plan *p, w4ax_args a, size_t token0)
{
    size_t left = p->m - token0, element = p->options.output == QT_W4AX_F32 ? 4 : 2;
    a.token0 = (int)token0;
    a.m = (int)(left < (size_t)p->config.tokens ? left : (size_t)p->config.tokens);
    a.y = (char *)a.y + token0 * p->n * element;
    if (p->scales != QT_W4AX_BLOCK) {
        a.x_scale += token0;
        a.x_sum += p->scales == QT_W4AX_INT ? token0 : 0;
    }
    return a;
}

static int launch(const struct qt_w4ax_plan *p, const void *kernel, w4ax_args a, int threads,
                  int smem, void *stream)
{
    void *args[] = {&a};
    return cudaLaunchKernel(kernel, dim3((unsigned)p->grid), dim3((unsigned)threads), args,
                            (size_t)smem, (cudaStream_t)stream) == cudaSuccess
               ? QT_MATMUL_OK
               : QT_MATMUL_FAILED;
}

int qt_w4ax_run(const struct qt_w4ax_plan *p, const struct qt_w4ax_weight *w,
                const struct qt_w4ax_acts *acts, void *y, void *workspace, void *stream)
{
    int smem = 0, rows, rc = QT_MATMUL_OK;
    const void *kernel = kernel_of(p, &smem, &rows);
    if (!aligned(acts->codes, 128) || !aligned(acts->scale, 16) ||
        (p->scales == QT_W4AX_INT && !acts->sum))
        return QT_MATMUL_UNSUPPORTED;
    w4ax_args a = args_of(p, w, acts, y, workspace);
    if (p->config.kernel == QT_W4AX_TILE)
        return launch(p, kernel, a, QT_W4AX_TILE_THREADS, smem, stream);
    for (size_t token0 = 0; token0 < p->m && rc == QT_MATMUL_OK; token0 += STREAM_TOKENS)
        rc = launch(p, kernel, pass_of(p, a, token0), p->config.warps * 32, smem, stream);
    return rc;
}
