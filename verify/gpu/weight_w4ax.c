/* Inputs of w4ax matrices in GPU memory, and times of their kernels. */
#include "verify/gpu/gpu.h"

#include <string.h>

const void *gpu_section_of(const struct qt_packed *p, const char *name)
{
    for (size_t i = 0; i < p->nsections; i++)
        if (strcmp(p->section[i].name, name) == 0)
            return p->section[i].data;
    return NULL;
}

int gpu_act_of(struct qt_act *out, const struct qt_packed *p, struct qt_err *err)
{
    const uint32_t *order = gpu_section_of(p, "col_order");
    const int8_t *exp2 = gpu_section_of(p, "col_exp2");
    const uint8_t *bits = gpu_section_of(p, "bits");
    const float *clip = gpu_section_of(p, "clip");
    int rc;
    QT_TRY(qt_act_new(out, p->k, 8, err));
    qt_act_set_spec(out, &p->spec);
    for (size_t i = 0; i < p->k; i++)
        out->factor[i] = ldexpf(1, -exp2[i]);
    memcpy(out->order, order, p->k * sizeof *order);
    memcpy(out->bits, bits, qt_ceil_div(p->k, QT_ACT_BLOCK));
    memcpy(&out->clip, clip, sizeof *clip);
    QT_TRY(qt_act_check(out, NULL, NULL, err));
done:
    return rc;
}

struct qtool_w4ax_input gpu_w4ax_describe(const struct qt_act *a, bool packed)
{
    /* enum qt_act_scales has the order of enum qtool_w4ax_scales */
    return (struct qtool_w4ax_input){.scales = (enum qtool_w4ax_scales)a->scales,
                                     .k = a->k,
                                     .clip4 = a->clip,
                                     .clip8 = 1,
                                     .packed = packed,
                                     .rotation =
                                         a->rotate ? QTOOL_W4AX_HADAMARD : QTOOL_W4AX_NO_ROTATION};
}

int gpu_w4ax_input_new(struct gpu_w4ax_input *out, struct qt_gpu *gpu, const struct qt_act *a,
                       bool packed, struct qt_err *err)
{
    int rc;
    *out = (struct gpu_w4ax_input){.blocks = qt_ceil_div(a->k, QT_ACT_BLOCK)};
    QT_TRY(qt_array_new(&out->words, out->blocks, sizeof *out->words, err));
    out->token_bytes = gpu->w4ax_blocks(out->words, a->bits, out->blocks, packed);
    QT_TRY(gpu_buffer_need(&out->words_buffer, gpu, out->blocks * sizeof *out->words, err));
    QT_TRY(gpu_buffer_need(&out->order, gpu, a->k * sizeof *a->order, err));
    QT_TRY(gpu->upload(gpu, out->words_buffer.data, out->words, out->blocks * sizeof *out->words,
                       err));
    QT_TRY(gpu->upload(gpu, out->order.data, a->order, a->k * sizeof *a->order, err));
    out->in = gpu_w4ax_describe(a, packed);
    out->in.blocks = out->words_buffer.data;
    out->in.perm = out->order.data;
done:
    if (rc < 0)
        gpu_w4ax_input_free(out, gpu);
    return rc;
}

void gpu_w4ax_input_free(struct gpu_w4ax_input *in, struct qt_gpu *gpu)
{
    qt_free(in->words);
    gpu_buffer_free(&in->words_buffer, gpu);
    gpu_buffer_free(&in->order, gpu);
    *in = (struct gpu_w4ax_input){0};
}

size_t gpu_w4ax_scales(const struct gpu_w4ax_input *in, size_t m)
{
    return in->in.scales == QTOOL_W4AX_BLOCK ? in->blocks * qt_round_up(m, 4) : m;
}

int gpu_random_act(struct qt_act *out, const struct qt_spec *spec, size_t k, struct qt_err *err)
{
    int rc = qt_act_new(out, k, 8, err);
    if (rc < 0)
        return rc;
    qt_act_set_spec(out, spec);
    for (size_t i = 0; i < qt_ceil_div(k, QT_ACT_BLOCK); i++)
        if (i % 5 && out->scales != QT_ACT_SCALES_ROW)
            out->bits[i] = 4;
    for (size_t i = 0; i < k; i++) {
        size_t j = gpu_random(3, i) % (i + 1);
        out->order[i] = out->order[j];
        out->order[j] = (uint32_t)i;
    }
    return rc;
}

/* ---- times ---------------------------------------------------------------------------------- */

struct w4ax_work {
    struct qt_gpu *gpu;
    const struct gpu_copies *copies;
    const struct qtool_w4ax_plan *plan;
    const struct gpu_w4ax_input *in;
    const struct gpu_operands *operands;
    struct qtool_w4ax_acts acts;
    enum qtool_dtype dtype;
};

static int launch_product(void *ctx, size_t i, struct qt_err *err)
{
    const struct w4ax_work *w = ctx;
    return w->gpu->w4ax_run(w->gpu, w->plan, &w->copies->w4ax[i], &w->acts, w->operands->y.data,
                            w->operands->workspace.data, err);
}

static int launch_both(void *ctx, size_t i, struct qt_err *err)
{
    const struct w4ax_work *w = ctx;
    int rc = w->gpu->w4ax_quantize(w->gpu, &w->acts, &w->in->in, w->operands->x.data, w->plan->m,
                                   w->dtype, err);
    return rc < 0 ? rc : launch_product(ctx, i, err);
}

int gpu_time_w4ax(double us[2], double *cublas_us, struct qt_gpu *gpu, const struct gpu_copies *c,
                  const struct qtool_w4ax_plan *plan, const struct gpu_w4ax_input *in,
                  enum qtool_dtype dtype, const struct gpu_dense *dense, struct gpu_operands *o,
                  struct qt_err *err)
{
    struct w4ax_work work = {gpu, c, plan, in, o, {0}, dtype};
    const struct qt_gpu_work works[2] = {{launch_product, &work, c->count},
                                         {launch_both, &work, c->count}};
    int rc;
    QT_TRY(gpu_workspace_need(o, gpu, plan->workspace_bytes, err));
    QT_TRY(gpu_buffer_need(&o->codes, gpu, plan->m * in->token_bytes, err));
    QT_TRY(gpu_buffer_need(&o->scale, gpu, gpu_w4ax_scales(in, plan->m) * sizeof(float), err));
    QT_TRY(gpu_buffer_need(&o->sum, gpu, plan->m * sizeof(int), err));
    work.acts = (struct qtool_w4ax_acts){o->codes.data, o->scale.data, o->sum.data};
    /* The first launches quantize X and load code, which must not happen in graph capture. */
    QT_TRY(launch_both(&work, 0, err));
    QT_TRY(gpu_time_with_cublas(us, cublas_us, gpu, works, 2, dense, plan->m, o, err));
done:
    return rc;
}
