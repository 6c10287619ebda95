/*
 * verify --device: checks the kernels of qtool_w4ax.h. The reference of activation codes is
 * qt_act_apply_stored; the reference of products is FP64 over the GPU's codes and the decoded
 * weights. The synthetic activations count as already multiplied by the factors of col_exp2, as an
 * inference engine fuses them into the preceding norm or linear.
 */
#include "verify/gpu/device.h"

#include <stdio.h>
#include <string.h>

enum {
    PANEL = 1 << 24,  /* weights decoded at once */
    SAMPLE_ROWS = 64, /* rows whose RMS sets the magnitude of the activations */
    BYTES = 0,        /* layout of activations: all codes in bytes */
    PACKED = 1,       /* 4-bit codes packed */
};

static const size_t tokens[] = {REFERENCE_TOKENS, 33, 16, 8, 1};
enum { TOKEN_COUNTS = sizeof tokens / sizeof *tokens };

/* Host copy of quantized activations: codes, scales and code sums, one after the other. */
struct image {
    size_t codes, scales, sums; /* bytes */
    unsigned char *data;
    size_t capacity;
};

struct check {
    struct device *d;
    struct qt_device_tensor *out;
    const struct qt_packed *packed;
    struct qt_act act;
    struct gpu_copies copies;
    struct gpu_w4ax_input input[2];
    struct gpu_buffer codes, scale, sum; /* with guards */
    struct qtool_w4ax_acts acts;         /* addresses in these three */
    struct image image, second_image;
    struct reference reference; /* activations only */
    float *rounded;             /* [REFERENCE_TOKENS][k] of the set after qt_act_apply_stored */
    double *x;                  /* [k][REFERENCE_TOKENS] codes, packed channels */
    double *want, *size;        /* [REFERENCE_TOKENS][n] products; sums of absolute terms */
};

/* ---- input ---------------------------------------------------------------------------------- */

static const unsigned char *section(const struct qt_packed *p, const char *name)
{
    for (size_t i = 0; i < p->nsections; i++)
        if (strcmp(p->section[i].name, name) == 0)
            return p->section[i].data;
    return NULL;
}

static int open_input(struct check *c, struct qt_err *err)
{
    const struct qt_packed *p = c->packed;
    struct qt_gpu *gpu = c->d->gpu;
    int rc;
    QT_TRY(qt_act_new(&c->act, p->k, 8, err));
    qt_act_set_spec(&c->act, &p->spec);
    memcpy(c->act.order, section(p, "col_order"), p->k * sizeof *c->act.order);
    memcpy(c->act.bits, section(p, "bits"), qt_ceil_div(p->k, QT_ACT_BLOCK));
    memcpy(&c->act.clip, section(p, "clip"), sizeof c->act.clip);
    QT_TRY(gpu_w4ax_input_new(&c->input[BYTES], gpu, &c->act, false, err));
    if (c->act.scales == QT_ACT_SCALES_BLOCK)
        QT_TRY(gpu_w4ax_input_new(&c->input[PACKED], gpu, &c->act, true, err));
    for (size_t i = 0; i < c->copies.count; i++)
        c->copies.w4ax[i].blocks = c->input[BYTES].in.blocks;
done:
    return rc;
}

static int make_activations(struct check *c, uint64_t seed, struct qt_err *err)
{
    const struct qt_packed *p = c->packed;
    size_t rows = qt_min_size(p->n, SAMPLE_ROWS);
    double sum2 = 0;
    float *w = NULL;
    int rc;
    QT_TRY(qt_array_new(&w, rows * p->k, sizeof *w, err));
    QT_TRY(qt_packed_decode_stored(w, p, 0, rows, err));
    for (size_t i = 0; i < rows * p->k; i++)
        sum2 += (double)w[i] * (double)w[i];
    QT_TRY(reference_activations(&c->reference, p->n, p->k, sqrt(sum2 / (double)(rows * p->k)),
                                 seed, err));
    QT_TRY(qt_array_new(&c->rounded, REFERENCE_TOKENS * p->k, sizeof *c->rounded, err));
    QT_TRY(qt_array_new(&c->x, REFERENCE_TOKENS * p->k, sizeof *c->x, err));
    QT_TRY(qt_array_new(&c->want, REFERENCE_TOKENS * p->n, sizeof *c->want, err));
    QT_TRY(qt_array_new(&c->size, REFERENCE_TOKENS * p->n, sizeof *c->size, err));
done:
    qt_free(w);
    return rc;
}

/* ---- activations ---------------------------------------------------------------------------- */

struct run {
    const struct reference_set *set;
    size_t m;
    int layout;
    enum qtool_w4ax_output output;
    struct qtool_w4ax_plan plan;
    char name[64]; /* "M=16 random f16 packed" */
};

static int quantize(struct check *c, struct image *image, const struct run *r, struct qt_err *err)
{
    const struct gpu_w4ax_input *in = &c->input[r->layout];
    size_t x_bytes = r->m * c->reference.k * 2;
    struct device *d = c->d;
    char *x, *codes, *scale, *sum;
    int rc;
    image->codes = r->m * in->token_bytes;
    image->scales = gpu_w4ax_scales(in, r->m) * sizeof(float);
    image->sums = r->m * sizeof(int);
    QT_TRY(qt_array_grow(&image->data, &image->capacity, image->codes + image->scales + image->sums,
                         1, err));
    QT_TRY(device_poison(&x, d, &d->x, x_bytes, err));
    QT_TRY(d->gpu->upload(d->gpu, x, r->set->x, x_bytes, err));
    QT_TRY(device_poison(&codes, d, &c->codes, image->codes, err));
    QT_TRY(device_poison(&scale, d, &c->scale, image->scales, err));
    QT_TRY(device_poison(&sum, d, &c->sum, image->sums, err));
    c->acts = (struct qtool_w4ax_acts){codes, (float *)(void *)scale, (int *)(void *)sum};
    QT_TRY(d->gpu->w4ax_quantize(d->gpu, &c->acts, &in->in, x, r->m, r->set->dtype, err));
    QT_TRY(d->gpu->download(d->gpu, image->data, codes, image->codes, err));
    QT_TRY(d->gpu->download(d->gpu, image->data + image->codes, scale, image->scales, err));
    QT_TRY(d->gpu->download(d->gpu, image->data + image->codes + image->scales, sum, image->sums,
                            err));
    QT_TRY(device_check_guards(d, c->out, r->name, "codes", codes, image->codes, err));
    QT_TRY(device_check_guards(d, c->out, r->name, "scales", scale, image->scales, err));
    QT_TRY(device_check_guards(d, c->out, r->name, "sums", sum, image->sums, err));
done:
    return rc;
}

/* Code of packed channel p of a token (layout: qtool_w4ax.h). p may lie in the padding. */
static int code_at(const struct image *image, const struct gpu_w4ax_input *in, size_t m,
                   size_t token, size_t p)
{
    uint32_t word = in->words[p / QT_ACT_BLOCK];
    size_t j = p % QT_ACT_BLOCK, rows = (size_t)((word & ~QTOOL_W4AX_NARROW_VALUES) >> 1) * 64 * m;
    const unsigned char *codes = image->data + rows;
    if (word & QTOOL_W4AX_WIDE_ROWS)
        return (int8_t)codes[token * 128 + (j / 16 ^ (token & 7)) * 16 + j % 16];
    int v = codes[token * 64 + (j / 32 ^ (token >> 1 & 3)) * 16 + j % 16];
    return ((j % 32 < 16 ? v : v >> 4) & 15) - ((j % 32 < 16 ? v : v >> 4) & 8) * 2;
}

static float scale_at(const struct image *image, const struct gpu_w4ax_input *in, size_t m,
                      size_t token, size_t block)
{
    size_t at = in->in.scales == QTOOL_W4AX_BLOCK ? block * qt_round_up(m, 4) + token : token;
    float scale;
    memcpy(&scale, image->data + image->codes + at * sizeof scale, sizeof scale);
    return scale;
}

struct compared {
    size_t wrong, token, channel; /* number of wrong codes; position of the first */
    float got, want;              /* values of the first */
    size_t sums, sum_token;       /* number of wrong code sums; token of the first */
};

/* Code times scale must equal the value of qt_act_apply_stored. With INT, pack multiplies by the
 * product of scale and factor, whose rounding allows a difference. Padding must be zero; with INT
 * the sum of all codes is stored too. */
static void compare_token(struct compared *out, const struct check *c, const struct run *r,
                          size_t token)
{
    const struct gpu_w4ax_input *in = &c->input[r->layout];
    bool scaled = in->in.scales == QTOOL_W4AX_INT;
    int sum = 0, stored;
    for (size_t p = 0; p < in->blocks * QT_ACT_BLOCK; p++) {
        int code = code_at(&c->image, in, r->m, token, p);
        size_t channel = p < c->act.k ? c->act.order[p] : p;
        float want = p < c->act.k ? c->rounded[token * c->act.k + p] : 0;
        float got = (float)code * scale_at(&c->image, in, r->m, token, p / QT_ACT_BLOCK);
        sum += code;
        if (!(fabsf(got - want) <= (scaled ? 0x1p-22f * fabsf(want) : 0)) && out->wrong++ == 0) {
            out->token = token;
            out->channel = channel;
            out->got = got;
            out->want = want;
        }
    }
    memcpy(&stored, c->image.data + c->image.codes + c->image.scales + token * sizeof sum,
           sizeof stored);
    if (scaled && stored != sum && out->sums++ == 0)
        out->sum_token = token;
}

/* Quantizes twice and compares. The activations stay on the device for the products. */
static int check_activations(struct check *c, const struct run *r, struct qt_err *err)
{
    struct compared compared = {0};
    char text[32];
    int rc;
    QT_TRY(quantize(c, &c->second_image, r, err));
    QT_TRY(quantize(c, &c->image, r, err));
    if (memcmp(c->image.data, c->second_image.data,
               c->image.codes + c->image.scales + c->image.sums) != 0)
        device_fault(c->out, "%s: quantizing the activations twice gave different bits", r->name);
    for (size_t t = 0; t < r->m; t++)
        compare_token(&compared, c, r, t);
    if (compared.wrong)
        device_fault(
            c->out,
            "%s: %zu of %zu activations wrong; first at token %zu, channel %zu: %s, expected %g",
            r->name, compared.wrong, r->m * c->act.k, compared.token, compared.channel,
            device_value_text(text, (double)compared.got), (double)compared.want);
    if (compared.sums)
        device_fault(c->out, "%s: %zu of %zu code sums wrong; first at token %zu", r->name,
                     compared.sums, r->m, compared.sum_token);
done:
    return rc;
}

static int round_set(struct check *c, const struct reference_set *set, struct qt_err *err)
{
    for (size_t i = 0; i < REFERENCE_TOKENS * c->act.k; i++)
        c->rounded[i] = gpu_to_f32(set->x[i], set->dtype);
    return qt_act_apply_stored(c->rounded, c->rounded, REFERENCE_TOKENS, &c->act, err);
}

/* ---- reference products --------------------------------------------------------------------- */

struct panel_job {
    struct check *c;
    const float *w; /* [rows][k], decoded */
    size_t row0;
    double scale[REFERENCE_TOKENS]; /* scale of each token; 1 if channel blocks have scales */
};

static void multiply_row(void *ctx, size_t item)
{
    const struct panel_job *job = ctx;
    struct check *c = job->c;
    const struct gpu_w4ax_input *in = &c->input[BYTES];
    bool by_block = in->in.scales == QTOOL_W4AX_BLOCK;
    const float *w = job->w + item * c->act.k;
    size_t row = job->row0 + item;
    double y[REFERENCE_TOKENS] = {0}, size[REFERENCE_TOKENS] = {0}, sum[REFERENCE_TOKENS];
    for (size_t b = 0; b < in->blocks; b++) {
        memset(sum, 0, sizeof sum);
        for (size_t p = b * QT_ACT_BLOCK; p < qt_min_size((b + 1) * QT_ACT_BLOCK, c->act.k); p++) {
            const double v = (double)w[p], *x = c->x + p * REFERENCE_TOKENS;
            for (size_t t = 0; t < REFERENCE_TOKENS; t++)
                sum[t] += v * x[t];
        }
        for (size_t t = 0; t < REFERENCE_TOKENS; t++) {
            if (by_block)
                sum[t] *= (double)scale_at(&c->image, in, REFERENCE_TOKENS, t, b);
            y[t] += sum[t];
            size[t] += fabs(sum[t]);
        }
    }
    /* With INT and ROW the kernel's integer sums are exact: only the total is rounded. */
    for (size_t t = 0; t < REFERENCE_TOKENS; t++) {
        c->want[t * c->reference.n + row] = y[t] * job->scale[t];
        c->size[t * c->reference.n + row] = by_block ? size[t] : fabs(y[t] * job->scale[t]);
    }
}

/* Multiplies the codes of all tokens in c->image (layout BYTES) with the decoded weights. */
static int make_products(struct check *c, struct qt_err *err)
{
    const struct gpu_w4ax_input *in = &c->input[BYTES];
    size_t n = c->reference.n, k = c->reference.k, rows = qt_min_size(n, qt_ceil_div(PANEL, k));
    struct panel_job job = {.c = c};
    float *w = NULL;
    int rc;
    QT_TRY(qt_array_new(&w, rows * k, sizeof *w, err));
    job.w = w;
    for (size_t t = 0; t < REFERENCE_TOKENS; t++) {
        job.scale[t] = in->in.scales == QTOOL_W4AX_BLOCK
                           ? 1
                           : (double)scale_at(&c->image, in, REFERENCE_TOKENS, t, 0);
        for (size_t p = 0; p < k; p++)
            c->x[p * REFERENCE_TOKENS + t] = code_at(&c->image, in, REFERENCE_TOKENS, t, p);
    }
    for (; job.row0 < n; job.row0 += rows) {
        rows = qt_min_size(rows, n - job.row0);
        QT_TRY(qt_packed_decode_stored(w, c->packed, job.row0, rows, err));
        qt_parallel_for(rows, multiply_row, &job);
    }
done:
    qt_free(w);
    return rc;
}

/* ---- products ------------------------------------------------------------------------------- */

/* Runs the product of c->acts once and copies the output to y[m][n]. */
static int guarded_run(struct check *c, void *y, const struct run *r, struct qt_err *err)
{
    struct device *d = c->d;
    struct qtool_w4ax_weight weight = c->copies.w4ax[0];
    size_t bytes = r->m * c->reference.n * (r->output == QTOOL_W4AX_F32 ? 4 : 2);
    char *dy, *workspace;
    int rc;
    weight.blocks = c->input[r->layout].in.blocks;
    QT_TRY(device_poison(&dy, d, &d->y, bytes, err));
    QT_TRY(device_workspace(&workspace, d, r->plan.workspace_bytes, err));
    QT_TRY(d->gpu->w4ax_run(d->gpu, &r->plan, &weight, &c->acts, dy, workspace, err));
    QT_TRY(d->gpu->download(d->gpu, y, dy, bytes, err));
    QT_TRY(device_check_guards(d, c->out, r->name, "output", dy, bytes, err));
    QT_TRY(device_check_workspace(d, c->out, r->name, workspace, r->plan.workspace_bytes, err));
done:
    return rc;
}

static double output_at(const void *y, enum qtool_w4ax_output output, size_t i)
{
    float v;
    if (output != QTOOL_W4AX_F32)
        return (double)gpu_to_f32(((const uint16_t *)y)[i],
                                  output == QTOOL_W4AX_F16 ? QTOOL_F16 : QTOOL_BF16);
    memcpy(&v, (const char *)y + i * sizeof v, sizeof v);
    return (double)v;
}

/* Largest allowed error of an output: FP32 accumulation, 1e-6 of the sum of absolute terms, and
 * rounding to the output type (for FP16 including subnormals). */
static double limit_of(enum qtool_w4ax_output output, double want, double size)
{
    double sums = 1e-6 * size;
    return output == QTOOL_W4AX_F32    ? sums
           : output == QTOOL_W4AX_BF16 ? sums + 0x1.01p-8 * fabs(want)
                                       : sums + 0x1.01p-11 * fabs(want) + 0x1p-25;
}

static void compare(struct check *c, const struct run *r, const void *y)
{
    size_t wrong = 0, first = 0, n = c->reference.n;
    double error2 = 0, want2 = 0;
    char text[32];
    for (size_t i = 0; i < r->m * n; i++) {
        double error = output_at(y, r->output, i) - c->want[i];
        error2 += error * error;
        want2 += c->want[i] * c->want[i];
        if (!(fabs(error) <= limit_of(r->output, c->want[i], c->size[i])) && wrong++ == 0)
            first = i;
    }
    if (wrong)
        device_fault(c->out,
                     "%s: %zu of %zu values wrong; first at token %zu, row %zu: %s, expected %g",
                     r->name, wrong, r->m * n, first / n, first % n,
                     device_value_text(text, output_at(y, r->output, first)), c->want[first]);
    double error = sqrt(error2 / (want2 > 0 ? want2 : 1));
    if (r->output != QTOOL_W4AX_F32)
        device_max_error(&c->out->error[r->set->dtype], error);
}

static int check_product(struct check *c, struct run *r, enum qtool_w4ax_output output,
                         struct qt_err *err)
{
    const struct qtool_w4ax_options opt = {
        .output = output, .device = c->d->gpu->device, .packed = r->layout == PACKED};
    size_t count = r->m * c->reference.n * (output == QTOOL_W4AX_F32 ? 2 : 1); /* in 16-bit units */
    struct device *d = c->d;
    int rc;
    r->output = output;
    QT_TRY(qt_array_grow(&d->first, &d->first_capacity, count, sizeof *d->first, err));
    QT_TRY(qt_array_grow(&d->second, &d->second_capacity, count, sizeof *d->second, err));
    QT_TRY(d->gpu->w4ax_plan(d->gpu, &r->plan, &c->copies.w4ax[0], r->m, &opt, err));
    QT_TRY(guarded_run(c, d->first, r, err));
    QT_TRY(guarded_run(c, d->second, r, err));
    c->out->runs++;
    if (memcmp(d->first, d->second, count * 2) != 0)
        device_fault(c->out, "%s: two runs gave different bits", r->name);
    compare(c, r, d->first);
done:
    return rc;
}

/* ---- checker -------------------------------------------------------------------------------- */

/* The largest m in layout BYTES comes first: its codes give the reference products. */
static int check_set(struct check *c, const struct reference_set *set, int layout,
                     struct qt_err *err)
{
    enum qtool_w4ax_output rounded = set->dtype == QTOOL_F16 ? QTOOL_W4AX_F16 : QTOOL_W4AX_BF16;
    int rc = QT_OK;
    for (size_t i = 0; i < TOKEN_COUNTS; i++) {
        struct run r = {.set = set, .m = tokens[i], .layout = layout};
        snprintf(r.name, sizeof r.name, "M=%zu %s%s", r.m, set->name,
                 layout == PACKED ? " packed" : "");
        QT_TRY(check_activations(c, &r, err));
        if (layout == BYTES && i == 0)
            QT_TRY(make_products(c, err));
        QT_TRY(check_product(c, &r, rounded, err));
        if (layout == BYTES)
            QT_TRY(check_product(c, &r, QTOOL_W4AX_F32, err));
    }
done:
    return rc;
}

static int measure(struct check *c, struct qt_err *err)
{
    const struct qtool_w4ax_options opt = {.output = QTOOL_W4AX_F16, .device = c->d->gpu->device};
    struct device *d = c->d;
    struct qtool_w4ax_plan plan;
    int rc;
    QT_TRY(device_timing_room(d, c->reference.n, c->reference.k, err));
    for (size_t i = 0; i < QT_DEVICE_TIMES; i++) {
        double us[2];
        QT_TRY(d->gpu->w4ax_plan(d->gpu, &plan, &c->copies.w4ax[0], qt_device_times[i], &opt, err));
        QT_TRY(gpu_time_w4ax(us, NULL, d->gpu, &c->copies, &plan, &c->input[BYTES], QTOOL_F16, NULL,
                             &d->timing, err));
        c->out->us[i] = us[0];
    }
    QT_TRY(device_cublas_times(c->out->cublas_us, d, c->reference.n, c->reference.k, err));
done:
    return rc;
}

static void check_free(struct check *c)
{
    struct qt_gpu *gpu = c->d->gpu;
    gpu_copies_free(&c->copies, gpu);
    gpu_w4ax_input_free(&c->input[BYTES], gpu);
    gpu_w4ax_input_free(&c->input[PACKED], gpu);
    gpu_buffer_free(&c->codes, gpu);
    gpu_buffer_free(&c->scale, gpu);
    gpu_buffer_free(&c->sum, gpu);
    reference_free(&c->reference);
    qt_act_free(&c->act);
    qt_free(c->image.data);
    qt_free(c->second_image.data);
    qt_free(c->rounded);
    qt_free(c->x);
    qt_free(c->want);
    qt_free(c->size);
}

int device_w4ax(struct qt_device_tensor *t, struct device *d, const struct qt_packed *p,
                uint64_t seed, struct qt_err *err)
{
    struct check c = {.d = d, .out = t, .packed = p};
    int rc;
    QT_TRY(gpu_copies_new(&c.copies, d->gpu, p, err));
    QT_TRY(open_input(&c, err));
    QT_TRY(make_activations(&c, seed, err));
    for (size_t s = 0; s < REFERENCE_SETS; s++) {
        QT_TRY(round_set(&c, &c.reference.set[s], err));
        QT_TRY(check_set(&c, &c.reference.set[s], BYTES, err));
        if (c.input[PACKED].words)
            QT_TRY(check_set(&c, &c.reference.set[s], PACKED, err));
    }
    QT_TRY(measure(&c, err));
    QT_TRY(device_check_sections(d, t, p, &c.copies, err));
done:
    check_free(&c);
    return rc;
}
