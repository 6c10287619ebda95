/* Host side of qtool_kernels.h: checks, configurations, launches. */
#include "kernels/cuda/dequantize.h"
#include "kernels/cuda/instances.h"
#include "kernels/cuda/stream.cuh"
#include "kernels/qtool_kernels.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { STREAM_MAX_TOKENS = 32, BLOCK_COLS = 64, STRIP_ROWS = 16 };

static size_t ceil_div(size_t a, size_t b)
{
    return a / b + (a % b != 0);
}

static size_t round_up(size_t a, size_t b)
{
    return ceil_div(a, b) * b;
}

static int refuse(struct qt_matmul_plan *p, int status, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(p->reason, sizeof p->reason, fmt, ap);
    va_end(ap);
    return status;
}

/* ---- what a matrix is --------------------------------------------------------------------------
 */

struct shape {
    enum qt_format format;
    int bits;
    int width[3];       /* of its planes */
    int strips, blocks; /* of the matrix */
    size_t groups;      /* scales of a row */
    size_t pitch_blocks, pitch_groups;
    int group_shift;    /* log2(group); 30: one scale per row */
    bool grouped;       /* the kernel applies scales to partial sums, not to results */
    size_t table_bytes; /* of shared memory */
};

static enum qt_format format_of(const struct qt_matmul_weight *w)
{
    if (w->bits <= 4)
        return (enum qt_format)(QT_FORMAT_PAIR2 + (int)w->bits - 2);
    if (w->bits == 5 && w->exp_bits == 2)
        return QT_FORMAT_FP5_E2;
    if (w->bits == 6 && w->exp_bits == 2)
        return QT_FORMAT_FP6_E2;
    if (w->bits == 6 && w->exp_bits == 3)
        return QT_FORMAT_FP6_E3;
    return QT_FORMAT_ANY;
}

static int log2_exact(size_t v)
{
    int n = 0;
    while (n < 30 && (size_t)1 << n < v)
        n++;
    return (size_t)1 << n == v ? n : -1;
}

static const char *weight_fault(const struct qt_matmul_weight *w)
{
    bool lut = w->kind == QT_MATMUL_LUT;
    if (!lut && w->kind != QT_MATMUL_FPX)
        return "unknown kind";
    if (lut ? w->bits < 2 || w->bits > 4 : w->bits < 3 || w->bits > 8)
        return "bits out of range (lut 2..4, fpx 3..8)";
    if (!lut && (w->exp_bits < 1 || w->exp_bits > 5 || w->exp_bits >= w->bits))
        return "exponent bits must be 1..5 (FP16 tensor cores have no room for 6)";
    if (w->n == 0 || w->k == 0 || w->n > 1 << 26 || w->k > 1 << 26)
        return "n and k must be 1..2^26";
    if (w->group && (w->group < 32 || w->group > 256 || log2_exact(w->group) < 0))
        return "group must be 0, 32, 64, 128 or 256";
    if (!lut && w->group)
        return "fpx has one scale per row (group 0)";
    if (w->scale_exp2 < -100 || w->scale_exp2 > 100)
        return "scale_exp2 must be -100..100";
    if (!w->scale || (size_t)w->scale % 16 || (lut && (!w->table || (size_t)w->table % 2)))
        return "sections scale (and table) must be there, 16-byte aligned";
    return NULL;
}

static const char *shape_of(struct shape *s, const struct qt_matmul_weight *w)
{
    static const int table_bytes[] = {16 * 128, 64 * 128, 256 * 128, 0, 0, 0, 512};
    const char *fault = weight_fault(w);
    if (fault)
        return fault;
    memset(s, 0, sizeof *s);
    unsigned bits = w->bits;
    for (int i = 0; bits; i++) {
        s->width[i] = bits >= 4 ? 4 : bits >= 2 ? 2 : 1;
        bits -= (unsigned)s->width[i];
        if (!w->plane[i] || (size_t)w->plane[i] % 16)
            return "planes must be there, 16-byte aligned";
    }
    s->format = format_of(w);
    s->bits = (int)w->bits;
    s->strips = (int)ceil_div(w->n, STRIP_ROWS);
    s->blocks = (int)ceil_div(w->k, BLOCK_COLS);
    s->group_shift = w->group ? log2_exact(w->group) : 30;
    s->groups = w->group ? ceil_div(w->k, w->group) : 1;
    s->pitch_blocks = w->pitch_blocks ? w->pitch_blocks : (size_t)s->blocks;
    s->pitch_groups = w->pitch_groups ? w->pitch_groups : s->groups;
    s->grouped = s->format <= QT_FORMAT_PAIR4;
    s->table_bytes = (size_t)table_bytes[s->format];
    if (s->pitch_blocks < (size_t)s->blocks || s->pitch_groups < s->groups)
        return "pitch smaller than the matrix";
    if (s->pitch_blocks >= (1u << 31) / (size_t)s->strips ||
        s->pitch_groups >= (1u << 27) / (size_t)s->strips)
        return "matrix too large";
    return NULL;
}

/* Blocks: slices of k begin at multiples. */
static int slice_unit(const struct shape *s)
{
    return s->group_shift == 8 ? 4 : 2;
}

static float result_factor(const struct qt_matmul_weight *w)
{
    bool fields = w->kind == QT_MATMUL_FPX;
    return ldexpf(1, w->scale_exp2 + (fields ? qt_minifloat_exp2(w->exp_bits) : 0));
}

static struct qt_decode_args decode_args(const struct qt_matmul_weight *w)
{
    struct qt_decode_args d = {NULL, w->bits, w->exp_bits};
    if (w->kind == QT_MATMUL_LUT)
        d.table = (const __half *)w->table;
    return d;
}

int qt_matmul_slice(struct qt_matmul_weight *out, const struct qt_matmul_weight *w, size_t n0,
                    size_t n, size_t k0, size_t k)
{
    struct shape s;
    if (shape_of(&s, w) || n0 % STRIP_ROWS || k0 % BLOCK_COLS || (w->group && k0 % w->group) ||
        n == 0 || k == 0 || n0 > w->n || n > w->n - n0 || k0 > w->k || k > w->k - k0)
        return QT_MATMUL_UNSUPPORTED;
    size_t block = n0 / STRIP_ROWS * s.pitch_blocks + k0 / BLOCK_COLS;
    size_t group = n0 / STRIP_ROWS * s.pitch_groups + (w->group ? k0 / w->group : 0);
    *out = *w;
    for (int i = 0; i < 3 && s.width[i]; i++)
        out->plane[i] = (const char *)w->plane[i] + block * 128 * (size_t)s.width[i];
    out->scale = (const char *)w->scale + group * STRIP_ROWS * 2;
    out->n = n;
    out->k = k;
    out->pitch_blocks = s.pitch_blocks;
    out->pitch_groups = s.pitch_groups;
    return QT_MATMUL_OK;
}

/* ---- shared memory of the stream kernel --------------------------------------------------------
 */

/* k is split at multiples of slice_unit: into so many parts at most ... */
static int split_units(const struct shape *s)
{
    return (int)ceil_div((size_t)s->blocks, (size_t)slice_unit(s));
}

/* ... of so many blocks at most. */
static int split_blocks(const struct shape *s, int splits)
{
    return (int)ceil_div((size_t)split_units(s), (size_t)splits) * slice_unit(s);
}

static size_t pass_strips(const struct qt_matmul_config *c)
{
    return (size_t)(c->warps / c->warps_k * c->strips);
}

/* Offsets into the kernel's shared memory; returns its size. */
static size_t stream_layout(struct qt_stream_args *a, const struct shape *s,
                            const struct qt_matmul_config *c, size_t m)
{
    size_t pitch = (size_t)split_blocks(s, c->splits) * 128 + 16, at = s->table_bytes;
    a->x_pitch = (int)pitch;
    a->x_at = (int)at;
    at += pitch * m;
    a->token_at = (int)at;
    at += round_up(4 * m, 16);
    a->scale_at = (int)at;
    at += s->grouped ? 0 : (size_t)c->strips_cta * 32;
    a->sums_at = (int)at;
    a->sums_buffers = c->token_tiles == 1 ? 2 : 1;
    at += (size_t)a->sums_buffers * (size_t)c->warps_k * m * (pass_strips(c) * 16 + 4) * 4;
    a->ring_at = (int)round_up(at, 128);
    a->slot_bytes = (uint32_t)c->strips *
                    (128 * (uint32_t)(2 * (s->width[0] + s->width[1] + s->width[2]) + s->grouped));
    a->ring_bytes = a->slot_bytes * (uint32_t)qt_stream_depth(s->bits, c->token_tiles);
    return (size_t)a->ring_at + (size_t)c->warps * a->ring_bytes;
}

/* ---- choosing ----------------------------------------------------------------------------------
 */

static size_t chunk_tokens(size_t m)
{
    return m < STREAM_MAX_TOKENS ? m : STREAM_MAX_TOKENS;
}

static bool stream_fits(const struct shape *s, const struct qt_matmul_config *c, size_t m,
                        int smem_limit)
{
    struct qt_stream_args a;
    return stream_layout(&a, s, c, m) <= (size_t)smem_limit &&
           (c->splits == 1 ||
            ceil_div((size_t)s->strips, (size_t)c->strips_cta) * 4 <= QT_MATMUL_WORKSPACE_ZEROED);
}

static const char *config_fault(const struct qt_matmul_config *c, const struct shape *s)
{
    bool pow2 = c->warps > 0 && (c->warps & (c->warps - 1)) == 0 && c->warps_k > 0;
    if (c->token_tiles != 1 && c->token_tiles != 2 && c->token_tiles != 4)
        return "token_tiles must be 1, 2 or 4";
    if (c->strips < 1 || c->strips > (c->token_tiles == 4 || s->format == QT_FORMAT_ANY ? 1 : 2))
        return "strips must be 1 or 2 (1 with 4 token tiles)";
    if (c->warps < 1 || c->warps > 16 || !pow2 || c->warps % c->warps_k)
        return "warps must be a power of two, at most 16, and warps_k a divisor";
    if (c->strips_cta < 1 || c->splits < 1 || c->splits > split_units(s) ||
        (c->splits - 1) * split_blocks(s, c->splits) >= s->blocks)
        return "strips_cta must be positive, and every split have channels";
    return NULL;
}

/*
 * Relative time of a configuration: strips x blocks of the slowest CUDA block, with what
 * measurement says of the rest. Two strips share the loads of X, but bit fields of one token tile
 * gain nothing by that; 16 slices of k have more sums to add than 8.
 */
static double stream_cost(const struct qt_matmul_config *c, const struct shape *s, size_t m)
{
    size_t passes = ceil_div((size_t)c->strips_cta, pass_strips(c));
    double work = (double)(passes * pass_strips(c)) * split_blocks(s, c->splits);
    double sums = (double)passes * (8 + (double)m / 2);
    double x = (double)m * split_blocks(s, c->splits) / 8;
    double fix_up = c->splits > 1 ? 60 + (double)(c->splits * c->strips_cta) * (double)m / 32 : 0;
    if (c->strips == 1 && (s->grouped || c->token_tiles > 1))
        work *= 1.1;
    return work * (c->warps_k == 16 ? 1.05 : 1) + sums + x + fix_up;
}

/* The fastest configuration for m tokens; how k is cut is taken from `cut` unless it is NULL. */
static bool choose_stream_for(struct qt_matmul_config *out, const struct qt_matmul_plan *p,
                              const struct shape *s, size_t m, const struct qt_matmul_config *cut)
{
    double best = 1e300;
    struct qt_matmul_config c = {};
    c.token_tiles = m <= 8 ? 1 : m <= 16 ? 2 : 4;
    c.warps = 16;
    for (c.splits = 1; c.splits <= 64 && c.splits <= split_units(s); c.splits++) {
        int groups = p->sms / c.splits > 0 ? p->sms / c.splits : 1;
        for (c.strips = 1; c.strips <= 2; c.strips++)
            for (c.warps_k = 4; c.warps_k <= 16; c.warps_k *= 2) {
                if (cut && (c.splits != cut->splits || c.warps_k != cut->warps_k))
                    continue;
                c.strips_cta =
                    (int)round_up(ceil_div((size_t)s->strips, (size_t)groups), (size_t)c.strips);
                double cost = stream_cost(&c, s, m);
                if (cost < best && !config_fault(&c, s) && stream_fits(s, &c, m, p->smem_limit)) {
                    best = cost;
                    *out = c;
                }
            }
    }
    return best < 1e300;
}

/* The order in which products are added follows from splits and warps_k alone. */
static bool choose_stream(struct qt_matmul_plan *p, const struct shape *s)
{
    struct qt_matmul_config cut;
    if (!p->options.batch_invariant)
        return choose_stream_for(&p->config, p, s, chunk_tokens(p->m), NULL);
    return choose_stream_for(&cut, p, s, STREAM_MAX_TOKENS, NULL) &&
           choose_stream_for(&p->config, p, s, chunk_tokens(p->m), &cut);
}

/* ---- plan --------------------------------------------------------------------------------------
 */

static int device_facts(struct qt_matmul_plan *p)
{
    int major = 0, minor = 0, device = p->options.device, count = 0, current = -1;
    if (cudaGetDeviceCount(&count) != cudaSuccess || device < 0 || device >= count)
        return refuse(p, QT_MATMUL_NO_GPU, "no CUDA device %d", device);
    if (cudaGetDevice(&current) != cudaSuccess || current != device)
        return refuse(p, QT_MATMUL_UNSUPPORTED, "device %d is not the current one", device);
    cudaDeviceGetAttribute(&p->sms, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&p->smem_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    p->cc = major * 10 + minor;
    if (p->cc < 80)
        return refuse(p, QT_MATMUL_NO_GPU, "device %d has compute capability %d.%d, needs 8.0",
                      device, major, minor);
    return QT_MATMUL_OK;
}

int qt_matmul_plan_check(struct qt_matmul_plan *p, const struct qt_matmul_weight *w)
{
    struct shape s;
    struct qt_stream_args a;
    const struct qt_matmul_config *c = &p->config;
    const char *fault = shape_of(&s, w);
    if (!fault)
        fault = config_fault(c, &s);
    if (fault)
        return refuse(p, QT_MATMUL_UNSUPPORTED, "%s", fault);
    size_t m = chunk_tokens(p->m);
    p->smem_bytes = stream_layout(&a, &s, c, m);
    /* Blocks of a dependent launch come while others are there: with room for two on an SM some SMs
     * would get two of them and finish late (fp6 57344 x 8192: 136 us instead of 84). */
    if (p->options.dependent_launch && p->smem_bytes <= (size_t)p->smem_limit / 2)
        p->smem_bytes = (size_t)p->smem_limit / 2 + 1024;
    if (!stream_fits(&s, c, m, p->smem_limit))
        return refuse(p, QT_MATMUL_UNSUPPORTED, "%zu bytes of shared memory, the device has %d",
                      p->smem_bytes, p->smem_limit);
    if ((size_t)c->token_tiles * 8 < m)
        return refuse(p, QT_MATMUL_UNSUPPORTED, "token_tiles too few for %zu tokens", m);
    p->kernel = qt_stream_instance(s.format, c->token_tiles, c->strips);
    if (!p->kernel)
        return refuse(p, QT_MATMUL_UNSUPPORTED, "no such kernel");
    p->grid_x = (int)ceil_div((size_t)s.strips, (size_t)c->strips_cta);
    p->grid_y = c->splits;
    p->workspace_bytes = 0;
    if (c->splits > 1)
        p->workspace_bytes =
            QT_MATMUL_WORKSPACE_ZEROED + (size_t)c->splits * m * (size_t)s.strips * 16 * 4;
    cudaError_t e =
        cudaFuncSetAttribute(p->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, p->smem_limit);
    if (e != cudaSuccess)
        return refuse(p, QT_MATMUL_FAILED, "%s", cudaGetErrorString(e));
    return QT_MATMUL_OK;
}

int qt_matmul_plan(struct qt_matmul_plan *out, const struct qt_matmul_weight *w, size_t m,
                   const struct qt_matmul_options *opt)
{
    struct shape s;
    *out = (struct qt_matmul_plan){};
    out->m = m;
    out->n = w->n;
    out->k = w->k;
    out->kind = w->kind;
    out->bits = w->bits;
    out->exp_bits = w->exp_bits;
    out->group = w->group;
    out->options = *opt;
    if (opt->dtype != QT_MATMUL_F16 && opt->dtype != QT_MATMUL_BF16)
        return refuse(out, QT_MATMUL_UNSUPPORTED, "X and Y must be FP16 or BF16");
    if (m == 0 || m > 1 << 24)
        return refuse(out, QT_MATMUL_UNSUPPORTED, "m must be 1..2^24");
    const char *fault = shape_of(&s, w);
    if (fault)
        return refuse(out, QT_MATMUL_UNSUPPORTED, "%s", fault);
    int rc = device_facts(out);
    if (rc != QT_MATMUL_OK)
        return rc;
    if (!choose_stream(out, &s))
        return refuse(out, QT_MATMUL_UNSUPPORTED, "k = %zu is too long for shared memory", w->k);
    return qt_matmul_plan_check(out, w);
}

/* ---- run ---------------------------------------------------------------------------------------
 */

const void *qt_stream_instance(enum qt_format format, int token_tiles, int strips)
{
    return format <= QT_FORMAT_PAIR4 ? qt_stream_pair_instance(format, token_tiles, strips)
                                     : qt_stream_fpx_instance(format, token_tiles, strips);
}

static struct qt_stream_args stream_args(const struct qt_matmul_plan *p,
                                         const struct qt_matmul_weight *w, const struct shape *s,
                                         void *workspace)
{
    const struct qt_matmul_config *c = &p->config;
    struct qt_stream_args a = {};
    size_t m = chunk_tokens(p->m);
    stream_layout(&a, s, c, m);
    a.decode = decode_args(w);
    for (int i = 0; i < 3; i++)
        a.plane[i] = (const unsigned char *)w->plane[i];
    a.scale = (const __half *)w->scale;
    a.arrivals = (unsigned *)workspace;
    a.partial = (float *)((char *)workspace + QT_MATMUL_WORKSPACE_ZEROED);
    a.pitch_blocks = (int)s->pitch_blocks;
    a.pitch_groups = (int)s->pitch_groups;
    a.n = (int)w->n;
    a.k = (int)w->k;
    a.strips = s->strips;
    a.blocks = s->blocks;
    a.group_shift = s->group_shift;
    a.factor = result_factor(w);
    a.groups = (int)s->groups;
    a.bf16 = p->options.dtype == QT_MATMUL_BF16;
    a.warps_k = c->warps_k;
    a.strips_cta = c->strips_cta;
    a.splits = c->splits;
    a.passes = (int)ceil_div((size_t)c->strips_cta, pass_strips(c));
    a.split_blocks = split_blocks(s, c->splits);
    a.slice_blocks =
        (int)round_up(ceil_div((size_t)a.split_blocks, (size_t)c->warps_k), (size_t)slice_unit(s));
    a.slot_groups = s->group_shift == 5 ? 4 : s->group_shift == 6 ? 2 : 1;
    a.dependent = p->options.dependent_launch && p->cc >= 90;
    return a;
}

static cudaError_t launch(const struct qt_matmul_plan *p, struct qt_stream_args *a,
                          cudaStream_t stream)
{
    cudaLaunchAttribute attribute = {};
    cudaLaunchConfig_t config = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3((unsigned)p->grid_x, (unsigned)p->grid_y);
    config.blockDim = dim3((unsigned)p->config.warps * 32);
    config.dynamicSmemBytes = p->smem_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = p->options.dependent_launch && p->cc >= 90;
    void *args[] = {a};
    return cudaLaunchKernelExC(&config, p->kernel, args);
}

static bool is_planned(const struct qt_matmul_plan *p, const struct qt_matmul_weight *w)
{
    return p->kernel && w->n == p->n && w->k == p->k && w->kind == p->kind && w->bits == p->bits &&
           (w->kind != QT_MATMUL_FPX || w->exp_bits == p->exp_bits) && w->group == p->group;
}

int qt_matmul_run(const struct qt_matmul_plan *p, const struct qt_matmul_weight *w, void *y,
                  const void *x, void *workspace, void *stream)
{
    struct shape s;
    if (shape_of(&s, w) || !is_planned(p, w) || (p->workspace_bytes && !workspace))
        return QT_MATMUL_UNSUPPORTED;
    struct qt_stream_args a = stream_args(p, w, &s, workspace);
    for (size_t t = 0; t < p->m; t += STREAM_MAX_TOKENS) {
        size_t left = p->m - t;
        a.m = (int)chunk_tokens(left);
        a.x = (const char *)x + t * p->k * 2;
        a.y = (char *)y + t * p->n * 2;
        if (launch(p, &a, (cudaStream_t)stream) != cudaSuccess)
            return QT_MATMUL_FAILED;
    }
    return QT_MATMUL_OK;
}

int qt_matmul_dequantize(const struct qt_matmul_weight *w, void *out, enum qt_matmul_dtype dtype,
                         void *stream)
{
    struct shape s;
    if (shape_of(&s, w))
        return QT_MATMUL_UNSUPPORTED;
    struct qt_dequantize_args a = {};
    a.decode = decode_args(w);
    for (int i = 0; i < 3; i++) {
        a.plane[i] = (const unsigned char *)w->plane[i];
        a.width[i] = s.width[i];
    }
    a.scale = (const __half *)w->scale;
    a.out = out;
    a.pitch_blocks = s.pitch_blocks;
    a.pitch_groups = s.pitch_groups;
    a.n = (int)w->n;
    a.k = (int)w->k;
    a.group_shift = s.group_shift;
    a.factor = result_factor(w);
    a.bf16 = dtype == QT_MATMUL_BF16;
    size_t warps = (size_t)s.strips * (size_t)s.blocks, grid = ceil_div(warps, 4 * 8);
    void *args[] = {&a};
    cudaError_t e = cudaLaunchKernel(qt_dequantize_instance(s.format),
                                     dim3((unsigned)(grid < 65536 ? grid : 65536)), dim3(128), args,
                                     s.table_bytes, (cudaStream_t)stream);
    return e == cudaSuccess ? QT_MATMUL_OK : QT_MATMUL_FAILED;
}
