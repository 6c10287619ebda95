/*
 * verify --device: layers of experts, through the grouped products of qtool_moe.h. The reference
 * computes the same layer with decoded weights on the CPU backend; values between the products are
 * rounded to the dtype, as the kernels do, and inputs of w4ax are quantized. Tokens choose among a
 * few experts, the first and the last of the layer among them.
 */
#include "verify/gpu/device.h"

#include <stdio.h>
#include <string.h>

enum { MATRICES = GPU_EXPERT_MATRICES, CHOSEN = 5, TOKENS = 96, TOPK = 3, CODE_ERRORS = 8 };

/* Numbers of tokens: with 96, chosen experts have more than 32 tokens, which other kernels take. */
static const size_t tokens[] = {TOKENS, 1};

/* Largest relative error of all outputs; a token's may be four times as large. */
static const double limits[] = {8e-4, 5e-3};

/* Names of the matrices of an expert, behind "experts.N." */
static const char *const names[][MATRICES] = {
    {"gate_proj.weight", "up_proj.weight", "down_proj.weight"},
    {"w1.weight", "w3.weight", "w2.weight"},
};

struct layer {
    struct gpu_experts experts;
    size_t hidden, inner, topk, chosen;
    struct gpu_buffer sections, ids, weights;
    size_t expert[CHOSEN];
    float *decoded[MATRICES]; /* of one expert */
    float *x, *y, *gate, *up; /* [TOKENS][hidden or inner] */
    float *want;              /* [TOKENS][hidden] */
};

/* ---- finding layers ------------------------------------------------------------------------- */

static const struct qt_entry *find(const struct qt_container *c, const char *first, size_t prefix,
                                   size_t expert, const char *matrix)
{
    char name[512];
    int n = snprintf(name, sizeof name, "%.*s%zu.%s", (int)prefix, first, expert, matrix);
    return n > 0 && n < (int)sizeof name ? qt_container_find(c, name) : NULL;
}

bool device_is_layer(struct device_layer *out, const struct qt_container *c,
                     const struct qt_entry *e)
{
    static const char word[] = "experts.0.";
    const char *at = strstr(e->name, word);
    if (!at)
        return false;
    *out = (struct device_layer){.first = e, .prefix = (size_t)(at - e->name) + strlen("experts.")};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(at + strlen(word), names[i][0]) == 0)
            out->names = names[i];
    while (out->names && find(c, e->name, out->prefix, out->experts, out->names[0]))
        out->experts++;
    return out->names != NULL;
}

/* ---- weights -------------------------------------------------------------------------------- */

static int open_experts(struct layer *l, const struct device_layer *of,
                        const struct qt_container *c, struct qt_err *err)
{
    int rc = QT_OK;
    QT_TRY(gpu_experts_new(&l->experts, of->experts, err));
    for (size_t e = 0; e < of->experts; e++)
        for (int i = 0; i < MATRICES; i++) {
            const struct qt_entry *entry = find(c, of->first->name, of->prefix, e, of->names[i]);
            if (!entry)
                QT_TRY(qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                               "%s of expert %zu is not quantized", of->names[i], e));
            QT_TRY(qt_packed_open(&l->experts.packed[e * MATRICES + (size_t)i], c, entry, err));
        }
    l->inner = l->experts.packed[0].n;
    l->hidden = l->experts.packed[0].k;
done:
    return rc;
}

static int upload_experts(struct layer *l, struct qt_gpu *gpu, struct qt_err *err)
{
    int rc = QT_OK;
    if (gpu_is_w4ax(l->experts.packed))
        QT_TRY(gpu_experts_read_inputs(&l->experts, gpu, err));
    QT_TRY(gpu_buffer_need(&l->sections, gpu, gpu_experts_bytes(&l->experts), err));
    QT_TRY(gpu_experts_place(&l->experts, gpu, l->sections.data, true, err));
done:
    return rc;
}

/* ---- routing -------------------------------------------------------------------------------- */

/* Choice j of a token, as the position in l->expert, and its weight. */
static size_t choice(const struct layer *l, size_t token, size_t j)
{
    return (token * l->topk + j + token / 7) % l->chosen;
}

static float routing_weight(size_t token, size_t j)
{
    return 0.25f + 0.125f * (float)((token + 3 * j) % 5);
}

static int upload_routing(struct layer *l, struct qt_gpu *gpu, struct qt_err *err)
{
    int ids[TOKENS * TOPK], rc;
    float weights[TOKENS * TOPK];
    const size_t experts = l->experts.experts;
    l->chosen = qt_min_size(experts, CHOSEN);
    l->topk = qt_min_size(l->chosen, TOPK);
    for (size_t i = 0; i < l->chosen; i++)
        l->expert[i] = i + 1 == l->chosen ? experts - 1 : i * experts / l->chosen;
    for (size_t i = 0; i < TOKENS * l->topk; i++) {
        ids[i] = (int)l->expert[choice(l, i / l->topk, i % l->topk)];
        weights[i] = routing_weight(i / l->topk, i % l->topk);
    }
    QT_TRY(gpu_buffer_need(&l->ids, gpu, sizeof ids, err));
    QT_TRY(gpu_buffer_need(&l->weights, gpu, sizeof weights, err));
    QT_TRY(gpu->upload(gpu, l->ids.data, ids, sizeof ids, err));
    QT_TRY(gpu->upload(gpu, l->weights.data, weights, sizeof weights, err));
done:
    return rc;
}

/* ---- reference ------------------------------------------------------------------------------ */

static int alloc_reference(struct layer *l, struct qt_err *err)
{
    int rc;
    for (int i = 0; i < MATRICES; i++)
        QT_TRY(qt_array_new(&l->decoded[i], l->hidden * l->inner, sizeof *l->decoded[i], err));
    QT_TRY(qt_array_new(&l->x, TOKENS * l->hidden, sizeof *l->x, err));
    QT_TRY(qt_array_new(&l->y, TOKENS * l->hidden, sizeof *l->y, err));
    QT_TRY(qt_array_new(&l->want, TOKENS * l->hidden, sizeof *l->want, err));
    QT_TRY(qt_array_new(&l->gate, TOKENS * l->inner, sizeof *l->gate, err));
    QT_TRY(qt_array_new(&l->up, TOKENS * l->inner, sizeof *l->up, err));
done:
    return rc;
}

/* The weights that products multiply: those of w4ax as they are stored. */
static int decode(float *w, const struct qt_packed *p, struct qt_err *err)
{
    return gpu_is_w4ax(p) ? qt_packed_decode_stored(w, p, 0, p->n, err)
                          : qt_packed_decode(w, p, 0, p->n, err);
}

/* Quantizes the m rows of the input of a w4ax matrix. */
static int round_input(float *x, size_t m, const struct qt_packed *p, struct qt_err *err)
{
    struct qt_act act = {.k = 0};
    int rc = QT_OK;
    if (!gpu_is_w4ax(p) || m == 0)
        return QT_OK;
    QT_TRY(gpu_act_of(&act, p, err));
    QT_TRY(qt_act_apply_stored(x, x, m, &act, err));
done:
    qt_act_free(&act);
    return rc;
}

/* Adds the outputs of one expert to l->want. */
static int add_expert(struct layer *l, size_t chosen, const uint16_t *x, enum qtool_dtype dtype,
                      struct qt_backend *cpu, struct qt_err *err)
{
    const struct qt_packed *p = &l->experts.packed[l->expert[chosen] * MATRICES];
    size_t token[TOKENS * TOPK], which[TOKENS * TOPK], count = 0;
    int rc = QT_OK;
    for (size_t i = 0; i < TOKENS * l->topk; i++)
        if (choice(l, i / l->topk, i % l->topk) == chosen) {
            token[count] = i / l->topk;
            which[count++] = i % l->topk;
        }
    for (int i = 0; i < MATRICES; i++)
        QT_TRY(decode(l->decoded[i], &p[i], err));
    for (size_t t = 0; t < count; t++)
        for (size_t i = 0; i < l->hidden; i++)
            l->x[t * l->hidden + i] = gpu_to_f32(x[token[t] * l->hidden + i], dtype);
    QT_TRY(round_input(l->x, count, &p[0], err));
    QT_TRY(cpu->linear(cpu, l->gate, l->x, l->decoded[0], NULL, count, l->inner, l->hidden, err));
    QT_TRY(cpu->linear(cpu, l->up, l->x, l->decoded[1], NULL, count, l->inner, l->hidden, err));
    for (size_t i = 0; i < count * l->inner; i++) {
        const double g = (double)l->gate[i], v = g / (1 + exp(-g)) * (double)l->up[i];
        l->gate[i] = gpu_to_f32(gpu_from_f32((float)v, dtype), dtype);
    }
    QT_TRY(round_input(l->gate, count, &p[2], err));
    QT_TRY(cpu->linear(cpu, l->y, l->gate, l->decoded[2], NULL, count, l->hidden, l->inner, err));
    for (size_t t = 0; t < count; t++)
        for (size_t i = 0; i < l->hidden; i++)
            l->want[token[t] * l->hidden + i] +=
                routing_weight(token[t], which[t]) * l->y[t * l->hidden + i];
done:
    return rc;
}

/* ---- checks --------------------------------------------------------------------------------- */

struct run {
    struct device *d;
    struct qt_device_tensor *out;
    const struct layer *layer;
    const struct reference_set *set;
    struct qtool_moe_plan plan;
    size_t m;
    char name[64];
};

static int guarded_run(struct run *r, uint16_t *y, struct qt_err *err)
{
    struct device *d = r->d;
    const size_t bytes = r->m * r->layer->hidden * 2, space = r->plan.workspace_bytes;
    char *dx, *dy, *workspace;
    int rc;
    QT_TRY(device_poison(&dx, d, &d->x, bytes, err));
    QT_TRY(d->gpu->upload(d->gpu, dx, r->set->x, bytes, err));
    QT_TRY(device_poison(&dy, d, &d->y, bytes, err));
    QT_TRY(device_workspace(&workspace, d, space, err));
    QT_TRY(d->gpu->moe_run(d->gpu, &r->plan, r->layer->experts.table, dy, dx, r->layer->ids.data,
                           r->layer->weights.data, workspace, err));
    QT_TRY(d->gpu->download(d->gpu, y, dy, bytes, err));
    QT_TRY(device_check_guards(d, r->out, r->name, "output", dy, bytes, err));
    QT_TRY(device_check_workspace(d, r->out, r->name, workspace, space, err));
done:
    return rc;
}

static void compare(struct run *r, const uint16_t *y)
{
    const size_t n = r->layer->hidden;
    /* A value between the products that is rounded otherwise may have another code. */
    const bool w4ax = gpu_is_w4ax(r->layer->experts.packed);
    const double limit = limits[r->set->dtype] * (w4ax ? CODE_ERRORS : 1);
    double error2 = 0, want2 = 0, worst = 0;
    size_t token = 0;
    char text[32];
    for (size_t t = 0; t < r->m; t++) {
        double e = 0, w = 0;
        for (size_t i = t * n; i < (t + 1) * n; i++) {
            const double want = (double)r->layer->want[i];
            const double d = (double)gpu_to_f32(y[i], r->set->dtype) - want;
            e += d * d;
            w += want * want;
        }
        const double relative = w > 0 ? sqrt(e / w) : sqrt(e);
        if (!(relative <= worst)) { /* also if NaN */
            worst = relative;
            token = t;
            if (isnan(relative))
                break;
        }
        error2 += e;
        want2 += w;
    }
    const double all = isnan(worst) ? worst : want2 > 0 ? sqrt(error2 / want2) : sqrt(error2);
    if (!(worst <= 4 * limit))
        device_fault(r->out, "%s: wrong values; token %zu has the relative error %s", r->name,
                     token, device_value_text(text, worst));
    else if (!(all <= limit))
        device_fault(r->out, "%s: relative error %.3g is too large", r->name, all);
    device_max_error(&r->out->error[r->set->dtype], all);
}

static int check_run(struct run *r, struct qt_err *err)
{
    const struct qtool_moe_options opt = {.dtype = r->set->dtype,
                                          .device = r->d->gpu->device,
                                          .topk = r->layer->topk,
                                          .same_tables = r->layer->experts.same_tables};
    const struct qtool_moe_layer layer = gpu_experts_layer(&r->layer->experts);
    struct device *d = r->d;
    const size_t count = r->m * r->layer->hidden;
    int rc;
    snprintf(r->name, sizeof r->name, "M=%zu %s", r->m, r->set->name);
    QT_TRY(qt_array_grow(&d->first, &d->first_capacity, count, sizeof *d->first, err));
    QT_TRY(qt_array_grow(&d->second, &d->second_capacity, count, sizeof *d->second, err));
    QT_TRY(d->gpu->moe_plan(d->gpu, &r->plan, &layer, r->m, &opt, err));
    QT_TRY(guarded_run(r, d->first, err));
    QT_TRY(guarded_run(r, d->second, err));
    r->out->runs++;
    if (memcmp(d->first, d->second, count * 2) != 0)
        device_fault(r->out, "%s: two runs gave different bits", r->name);
    compare(r, d->first);
done:
    return rc;
}

static int check_sets(struct qt_device_tensor *t, struct device *d, struct layer *l, uint64_t seed,
                      struct qt_err *err)
{
    struct reference reference = {0};
    double sum = 0;
    int rc;
    QT_TRY(qt_packed_decode(l->decoded[0], &l->experts.packed[0], 0, l->inner, err));
    for (size_t i = 0; i < l->inner * l->hidden; i++)
        sum += (double)l->decoded[0][i] * (double)l->decoded[0][i];
    /* Some values of gate and up are hundreds of times the average; their product is an FP16. */
    QT_TRY(reference_activations(&reference, l->inner, l->hidden,
                                 8 * sqrt(sum / (double)(l->inner * l->hidden)), seed, err));
    for (size_t s = 0; s < REFERENCE_SETS; s++) {
        memset(l->want, 0, TOKENS * l->hidden * sizeof *l->want);
        for (size_t i = 0; i < l->chosen; i++)
            QT_TRY(add_expert(l, i, reference.set[s].x, reference.set[s].dtype, d->cpu, err));
        for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
            struct run r = {.d = d, .out = t, .layer = l, .set = &reference.set[s], .m = tokens[i]};
            QT_TRY(check_run(&r, err));
        }
    }
done:
    reference_free(&reference);
    return rc;
}

static void layer_free(struct layer *l, struct qt_gpu *gpu)
{
    for (size_t i = 0; l->experts.packed && i < l->experts.experts * MATRICES; i++)
        qt_packed_free(&l->experts.packed[i]);
    gpu_experts_free(&l->experts, gpu);
    for (int i = 0; i < MATRICES; i++)
        qt_free(l->decoded[i]);
    gpu_buffer_free(&l->sections, gpu);
    gpu_buffer_free(&l->ids, gpu);
    gpu_buffer_free(&l->weights, gpu);
    qt_free(l->x);
    qt_free(l->y);
    qt_free(l->gate);
    qt_free(l->up);
    qt_free(l->want);
}

int device_experts(struct qt_device_tensor *t, struct device *d, const struct device_layer *of,
                   const struct qt_container *c, uint64_t seed, struct qt_err *err)
{
    struct layer l = {.hidden = 0};
    int rc;
    for (size_t i = 0; i < QT_DEVICE_TIMES; i++)
        t->us[i] = t->cublas_us[i] = NAN;
    QT_TRY(open_experts(&l, of, c, err));
    QT_TRY(upload_experts(&l, d->gpu, err));
    QT_TRY(upload_routing(&l, d->gpu, err));
    QT_TRY(alloc_reference(&l, err));
    QT_TRY(check_sets(t, d, &l, seed, err));
done:
    layer_free(&l, d->gpu);
    if (rc == QT_E_RESOURCE)
        rc = qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                     "the layer does not fit into memory; its tensors were checked one by one");
    return rc;
}
