/* qtool_kernels.h: checks, the choice of a kernel, launches. */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/common/plan.h"
#include "kernels/cuda/matmul/dequantize.h"
#include "kernels/cuda/mix24/ring.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

int qt_refuse(struct qtool_matmul_plan *p, int status, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(p->reason, sizeof p->reason, fmt, ap);
    va_end(ap);
    return status;
}

/* ---- what a matrix is --------------------------------------------------------------------------
 */

static enum qt_format format_of(const struct qtool_matmul_weight *w)
{
    if (w->kind == QTOOL_MATMUL_INT)
        return w->bits == 8 ? QT_FORMAT_INT8 : w->zero ? QT_FORMAT_INT4_ZERO : QT_FORMAT_INT4;
    if (w->bits <= 4)
        return (enum qt_format)(QT_FORMAT_LUT2 + (int)w->bits - 2);
#define FIELDS(name, field_bits, field_exp_bits, decoder)                                          \
    if (w->bits == field_bits && (w->exp_bits == field_exp_bits || field_exp_bits == 0))           \
        return QT_FORMAT_##name;
    QT_FIELD_FORMATS(FIELDS)
#undef FIELDS
    return QT_FORMAT_FP8; /* not reached */
}

static int log2_exact(size_t v)
{
    int n = 0;
    while (n < 30 && (size_t)1 << n < v)
        n++;
    return (size_t)1 << n == v ? n : -1;
}

static bool has_zeros(const struct qtool_matmul_weight *w)
{
    return w->kind == QTOOL_MATMUL_INT && w->zero;
}

static const char *weight_fault(const struct qtool_matmul_weight *w)
{
    bool lut = w->kind == QTOOL_MATMUL_LUT, fpx = w->kind == QTOOL_MATMUL_FPX;
    if (!lut && !fpx && w->kind != QTOOL_MATMUL_INT)
        return "unknown kind";
    if (w->kind == QTOOL_MATMUL_INT && w->bits != 4 && w->bits != 8)
        return "integers must have 4 or 8 bits";
    if (lut ? w->bits < 2 || w->bits > 4 : w->bits < 3 || w->bits > 8)
        return "bits out of range (lut 2..4, fpx 3..8)";
    if (fpx && (w->exp_bits < 1 || w->exp_bits > 5 || w->exp_bits >= w->bits))
        return "exponent bits must be 1..5 (FP16 tensor cores have no room for 6)";
    if (w->n == 0 || w->k == 0 || w->n > 1 << 26 || w->k > 1 << 26)
        return "n and k must be 1..2^26";
    if (w->group && (w->group < 32 || w->group > 256 || log2_exact(w->group) < 0))
        return "group must be 0, 32, 64, 128 or 256";
    if (fpx && w->group)
        return "fpx has one scale per row (group 0)";
    if (w->scale_exp2 < -100 || w->scale_exp2 > 100)
        return "scale_exp2 must be -100..100";
    if (!w->scale || (size_t)w->scale % 16 || (lut && (!w->table || (size_t)w->table % 2)))
        return "sections scale, 16-byte aligned, and table, 2-byte, must be there";
    if (w->kind == QTOOL_MATMUL_INT && (size_t)w->zero % 8)
        return "section zero must be 8-byte aligned";
    return NULL;
}

const char *qt_shape_of(struct qt_shape *s, const struct qtool_matmul_weight *w)
{
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
    s->strips = (int)ceil_div(w->n, QT_STRIP_ROWS);
    s->blocks = (int)ceil_div(w->k, QT_BLOCK_COLS);
    s->group_shift = w->group ? log2_exact(w->group) : 30;
    s->groups = w->group ? ceil_div(w->k, w->group) : 1;
    s->pitch_blocks = w->pitch_blocks ? w->pitch_blocks : (size_t)s->blocks;
    s->pitch_groups = w->pitch_groups ? w->pitch_groups : s->groups;
    s->grouped = s->format <= QT_FORMAT_LAST_GROUPED;
    s->zero_bytes = has_zeros(w) ? 2 * (int)w->bits : 0;
    s->zero_boxes = s->zero_bytes == 0 || (s->pitch_groups * (size_t)s->zero_bytes % 16 == 0 &&
                                           (size_t)w->zero % 16 == 0);
    if (s->pitch_blocks < (size_t)s->blocks || s->pitch_groups < s->groups)
        return "pitch smaller than the matrix";
    if (s->pitch_blocks >= (1u << 31) / (size_t)s->strips ||
        s->pitch_groups >= (1u << 27) / (size_t)s->strips)
        return "matrix too large";
    return NULL;
}

float qt_result_factor(const struct qtool_matmul_weight *w)
{
    int exp2 = w->kind == QTOOL_MATMUL_FPX                   ? qt_minifloat_exp2(w->exp_bits)
               : w->kind == QTOOL_MATMUL_INT && w->bits == 4 ? QT_INT4_EXP2
                                                             : 0;
    return ldexpf(1, w->scale_exp2 + exp2);
}

struct qt_decode_args qt_decode_args_of(const struct qtool_matmul_weight *w)
{
    struct qt_decode_args d = {NULL, w->bits, w->exp_bits, has_zeros(w)};
    if (w->kind == QTOOL_MATMUL_LUT)
        d.table = (const __half *)w->table;
    return d;
}

int qtool_matmul_slice(struct qtool_matmul_weight *out, const struct qtool_matmul_weight *w,
                       size_t n0, size_t n, size_t k0, size_t k)
{
    struct qt_shape s;
    if (w->kind == QTOOL_MATMUL_MIX24)
        return qt_mix24_slice(out, w, n0, n, k0, k);
    if (qt_shape_of(&s, w) || n0 % QT_STRIP_ROWS || k0 % QT_BLOCK_COLS ||
        (w->group && k0 % w->group) || n == 0 || k == 0 || n0 > w->n || n > w->n - n0 ||
        k0 > w->k || k > w->k - k0)
        return QTOOL_UNSUPPORTED;
    size_t block = n0 / QT_STRIP_ROWS * s.pitch_blocks + k0 / QT_BLOCK_COLS;
    size_t group = n0 / QT_STRIP_ROWS * s.pitch_groups + (w->group ? k0 / w->group : 0);
    *out = *w;
    for (int i = 0; i < 3 && s.width[i]; i++)
        out->plane[i] = (const char *)w->plane[i] + block * 128 * (size_t)s.width[i];
    out->scale = (const char *)w->scale + group * QT_STRIP_ROWS * 2;
    out->zero = s.zero_bytes ? (const char *)w->zero + group * (size_t)s.zero_bytes : NULL;
    out->n = n;
    out->k = k;
    out->pitch_blocks = s.pitch_blocks;
    out->pitch_groups = s.pitch_groups;
    return QTOOL_OK;
}

/* ---- plan --------------------------------------------------------------------------------------
 */

/* Bytes of shared memory that a block may have (CUDA programming guide, technical specifications).
 */
static int smem_limit_of(int cc)
{
    return (cc == 80 || cc == 87 ? 163 : cc == 90 ? 227 : 99) << 10;
}

static int device_facts(struct qtool_matmul_plan *p)
{
    struct qt_device d;
    int rc = qt_device_facts(&d, p->options.device, p->reason);
    if (rc != QTOOL_OK)
        return rc;
    p->smem_limit = d.smem_limit;
    p->cc = d.cc;
    if (p->options.compute) {
        if (p->kind == QTOOL_MATMUL_MIX24) /* one kernel, compiled for each */
            return qt_refuse(p, QTOOL_UNSUPPORTED, "options.compute is not for mix24");
        const int compute = p->options.compute, limit = smem_limit_of(compute);
        if (compute != 80 && compute != 86 && compute != 89 && (compute != 90 || d.cc != 90))
            return qt_refuse(p, QTOOL_UNSUPPORTED, "options.compute is %d, kernels are for %d",
                             compute, d.cc);
        p->cc = compute == 90 ? 90 : 80;
        p->smem_limit = limit < d.smem_limit ? limit : d.smem_limit;
    }
    p->sms = d.sms; /* 0: refused, whatever the config */
    return QTOOL_OK;
}

static const void *dequantize_kernel(const struct qtool_matmul_weight *w)
{
    return w->kind == QTOOL_MATMUL_MIX24 ? qt_mix24_ring_instance(1, 1)
                                         : qt_dequantize_instance(format_of(w));
}

/* Whether a plan is for such matrices. */
static bool is_planned(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w)
{
    if (w->n != p->n || w->k != p->k || w->kind != p->kind)
        return false;
    return w->kind == QTOOL_MATMUL_MIX24
               ? w->mix24.twos + w->mix24.fours == p->units
               : (w->bits == p->bits &&
                  (w->kind != QTOOL_MATMUL_FPX || w->exp_bits == p->exp_bits) &&
                  w->group == p->group && p->zeros == has_zeros(w));
}

/* A plan that is refused has no kernel, whichever it had before. */
static int settled(struct qtool_matmul_plan *p, int rc)
{
    if (rc != QTOOL_OK)
        p->kernel = NULL;
    return rc;
}

static int check(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w)
{
    struct qt_shape s;
    const bool mix24 = w->kind == QTOOL_MATMUL_MIX24;
    p->rounded = p->rounded_exp2 = 0;
    if (p->sms == 0)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "a plan that was refused before its config");
    if (!is_planned(p, w))
        return qt_refuse(p, QTOOL_UNSUPPORTED, "another matrix than the planned one");
    const char *fault = mix24 ? qt_mix24_fault(w) : qt_shape_of(&s, w);
    if (fault)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "%s", fault);
    if (p->config.path == QTOOL_MATMUL_DENSE)
        return qt_dense_check(p, w, dequantize_kernel(w));
    if (mix24)
        return qt_mix24_plan_check(p, w);
    enum qtool_matmul_path path = p->config.path;
    int rc = path == QTOOL_MATMUL_TILE       ? qt_tile_check(p, &s)
             : path == QTOOL_MATMUL_SKINNY   ? qt_skinny_check(p, &s)
             : path == QTOOL_MATMUL_MMA_TILE ? qt_mma_tile_check(p, &s)
             : path == QTOOL_MATMUL_STREAM
                 ? qt_stream_check(p, &s)
                 : qt_refuse(p, QTOOL_UNSUPPORTED, "no such kernel for this kind of matrix");
    return rc == QTOOL_OK ? qt_allow_smem(p->kernel, p->smem_bytes, p->reason) : rc;
}

int qtool_matmul_plan_check(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w)
{
    return settled(p, check(p, w));
}

/* About how long the stream kernel takes on an H200, and that of mix24. More than 16 tokens a pass
 * leave one strip a warp, and X takes the room of the rings; with 99 KB of shared memory k is in
 * many parts (12 tokens, 8192 x 8192: 34.8 us instead of 23.3). */
static double stream_us(const struct qtool_matmul_plan *p)
{
    double little = p->smem_limit < 128 << 10 ? 1.5 : 1;
    double pass_us = 3 + (double)p->n * (double)p->k / 3.2e6 * little;
    return p->m <= 16 ? pass_us : (double)ceil_div(p->m, 32) * 2.3 * pass_us;
}

static double mix24_us(const struct qtool_matmul_plan *p, size_t packed_bytes)
{
    return (double)ceil_div(p->m, 16) * (4.3 + (double)packed_bytes / 1.7e6);
}

static void prefer_dense(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                         size_t packed_bytes, double us)
{
    if (!qt_dense_fault(p, w) && !p->options.batch_invariant && p->m > 32 &&
        qt_dense_is_faster(p, w, packed_bytes, us))
        qt_dense_choose(p);
}

/* How tiles add depends on m, so a batch-invariant plan never takes them. */
static bool choose(struct qtool_matmul_plan *p, const struct qt_shape *s,
                   const struct qtool_matmul_weight *w)
{
    const size_t packed_bytes = (size_t)s->strips * (size_t)s->blocks * 128 * (size_t)s->bits;
    const bool tiles = !p->options.batch_invariant && p->m > 8;
    double us = stream_us(p);
    if (qt_skinny_choose(p, s))
        return true;
    if (!(tiles && (qt_tile_choose(p, s, &us) || qt_mma_tile_choose(p, s, &us))) &&
        !qt_stream_choose(p, s)) {
        us = INFINITY; /* no stream kernel to be faster than */
        if (!(tiles && qt_mma_tile_choose(p, s, &us)))
            return false;
    }
    prefer_dense(p, w, packed_bytes, us);
    return true;
}

static int choose_mix24(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w)
{
    size_t packed_bytes =
        ceil_div(w->n, QT_STRIP_ROWS) *
        (w->mix24.twos * QTOOL_MATMUL_MIX24_TWO + w->mix24.fours * QTOOL_MATMUL_MIX24_FOUR);
    double us = mix24_us(p, packed_bytes);
    int rc = qt_mix24_choose(p, w, &us);
    if (rc == QTOOL_OK)
        prefer_dense(p, w, packed_bytes, us);
    return rc == QTOOL_OK && p->config.path == QTOOL_MATMUL_DENSE ? check(p, w) : rc;
}

static int plan(struct qtool_matmul_plan *out, const struct qtool_matmul_weight *w, size_t m,
                const struct qtool_matmul_options *opt)
{
    struct qt_shape s;
    *out = (struct qtool_matmul_plan){};
    out->m = m;
    out->n = w->n;
    out->k = w->k;
    out->kind = w->kind;
    out->bits = w->bits;
    out->exp_bits = w->exp_bits;
    out->group = w->group;
    out->zeros = has_zeros(w);
    out->units = w->mix24.twos + w->mix24.fours;
    out->options = *opt;
    if (opt->dtype != QTOOL_F16 && opt->dtype != QTOOL_BF16)
        return qt_refuse(out, QTOOL_UNSUPPORTED, "X and Y must be FP16 or BF16");
    if (m == 0 || m > 1 << 24)
        return qt_refuse(out, QTOOL_UNSUPPORTED, "m must be 1..2^24");
    bool mix24 = w->kind == QTOOL_MATMUL_MIX24;
    const char *fault = mix24 ? qt_mix24_fault(w) : qt_shape_of(&s, w);
    if (fault)
        return qt_refuse(out, QTOOL_UNSUPPORTED, "%s", fault);
    int rc = device_facts(out);
    if (rc != QTOOL_OK)
        return rc;
    if (mix24)
        return choose_mix24(out, w);
    if (!choose(out, &s, w))
        return qt_refuse(out, QTOOL_UNSUPPORTED, "no room in shared memory for n = %zu, k = %zu",
                         w->n, w->k);
    return check(out, w);
}

int qtool_matmul_plan(struct qtool_matmul_plan *out, const struct qtool_matmul_weight *w, size_t m,
                      const struct qtool_matmul_options *opt)
{
    return settled(out, plan(out, w, m, opt));
}

/* ---- run ---------------------------------------------------------------------------------------
 */

int qt_take_smem(struct qtool_matmul_plan *p, size_t bytes, bool dependent)
{
    p->smem_bytes = bytes;
    if (bytes > (size_t)p->smem_limit)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "%zu bytes of shared memory, the device has %d",
                         bytes, p->smem_limit);
    if (dependent)
        p->smem_bytes = qt_one_block_smem(bytes, p->smem_limit);
    return QTOOL_OK;
}

int qt_launch_clusters(const struct qtool_matmul_plan *p, void *args, int threads, int cluster,
                       bool dependent, void *stream)
{
    struct qt_kernel_launch launch = {};
    launch.kernel = p->kernel;
    launch.grid = dim3((unsigned)p->grid_x, (unsigned)p->grid_y);
    launch.threads = threads;
    launch.smem = p->smem_bytes;
    launch.cluster = cluster;
    launch.dependent = dependent && p->cc == 90;
    return qt_launch_kernel(&launch, args, stream);
}

int qt_launch(const struct qtool_matmul_plan *p, void *args, int threads, bool dependent,
              void *stream)
{
    return qt_launch_clusters(p, args, threads, 1, dependent, stream);
}

int qtool_matmul_run(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                     void *y, const void *x, void *workspace, void *stream)
{
    struct qt_shape s;
    const bool dense = p->config.path == QTOOL_MATMUL_DENSE, mix24 = w->kind == QTOOL_MATMUL_MIX24;
    if (!p->kernel || !is_planned(p, w) || (mix24 ? qt_mix24_fault(w) : qt_shape_of(&s, w)))
        return QTOOL_UNSUPPORTED;
    if (!x || !y || (size_t)x % (mix24 ? 2 : 16) || (size_t)y % 2 || (size_t)workspace % 256 ||
        (p->workspace_bytes && !workspace))
        return QTOOL_UNSUPPORTED;
    if (mix24 && !dense)
        return qt_mix24_run(p, w, y, x, workspace, stream);
    const bool boxes = p->config.path == QTOOL_MATMUL_TILE || p->config.path == QTOOL_MATMUL_SKINNY;
    if (boxes && !s.zero_boxes) /* of another weight than the planned one */
        return QTOOL_UNSUPPORTED;
    switch (p->config.path) {
    case QTOOL_MATMUL_DENSE:
        return qt_dense_run(p, w, y, x, workspace, stream);
    case QTOOL_MATMUL_TILE:
        return qt_tile_run(p, &s, w, y, x, workspace, stream);
    case QTOOL_MATMUL_SKINNY:
        return qt_skinny_run(p, &s, w, y, x, workspace, stream);
    case QTOOL_MATMUL_MMA_TILE:
        return qt_mma_tile_run(p, &s, w, y, x, workspace, stream);
    default:
        return qt_stream_run(p, &s, w, y, x, workspace, stream);
    }
}

int qtool_matmul_dequantize(const struct qtool_matmul_weight *w, void *out, enum qtool_dtype dtype,
                            void *stream)
{
    struct qt_shape s;
    if (!out || (size_t)out % 2 || (unsigned)dtype > QTOOL_BF16)
        return QTOOL_UNSUPPORTED;
    if (w->kind == QTOOL_MATMUL_MIX24)
        return qt_mix24_dequantize(w, out, dtype, stream);
    if (qt_shape_of(&s, w))
        return QTOOL_UNSUPPORTED;
    struct qt_dequantize_args a = {};
    a.decode = qt_decode_args_of(w);
    for (int i = 0; i < 3; i++) {
        a.plane[i] = (const unsigned char *)w->plane[i];
        a.width[i] = s.width[i];
    }
    a.scale = (const __half *)w->scale;
    a.zero = (const unsigned char *)w->zero;
    a.out = out;
    a.pitch_blocks = s.pitch_blocks;
    a.pitch_groups = s.pitch_groups;
    a.n = (int)w->n;
    a.k = (int)w->k;
    a.group_shift = s.group_shift;
    a.factor = qt_result_factor(w);
    a.bf16 = dtype == QTOOL_BF16;
    a.wide = w->k % 8 == 0 && (size_t)out % 16 == 0;
    a.parts = (int)ceil_div((size_t)s.blocks, QT_DEQUANTIZE_WARPS);
    const size_t grid = (size_t)s.strips * (size_t)a.parts;
    if (grid >> 30)
        return QTOOL_UNSUPPORTED;
    void *args[] = {&a};
    cudaError_t e = cudaLaunchKernel(qt_dequantize_instance(s.format), dim3((unsigned)grid),
                                     dim3(QT_DEQUANTIZE_WARPS * 32), args,
                                     (size_t)qt_dequantize_smem(s.format), (cudaStream_t)stream);
    return e == cudaSuccess ? QTOOL_OK : QTOOL_FAILED;
}
