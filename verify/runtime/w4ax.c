/*
 * Linears with quantized activations. Their rows and input channels are stored in an order of their
 * own, and divided by powers of two (docs/schemes.md): a norm in front of a linear multiplies by
 * these powers, and the quantizer gathers. The rows of v and up are in the order of the input of o
 * and down, so that nothing is gathered there.
 */
#include "verify/runtime/runtime.h"

#include <string.h>

/* The source row of a stored row, and the factor that the stored row has. */
static size_t source_row(float *factor, const struct qt_packed *p, size_t row)
{
    *factor = 1;
    if (!p || !gpu_is_w4ax(p))
        return row;
    *factor = ldexpf(1, -((const int8_t *)gpu_section_of(p, "row_exp2"))[row]);
    return ((const uint32_t *)gpu_section_of(p, "row_order"))[row];
}

int rt_arrange_rows(float *values, const struct qt_packed *p, struct qt_err *err)
{
    float *copy = NULL, factor;
    int rc;
    QT_TRY(qt_array_new(&copy, p->n, sizeof *copy, err));
    memcpy(copy, values, p->n * sizeof *copy);
    for (size_t i = 0; i < p->n; i++) {
        const size_t row = source_row(&factor, p, i);
        if (row >= p->n)
            QT_TRY(qt_fail(err, QT_E_INPUT, NULL, NULL, "row_order: entry %zu is %zu", i, row));
        values[i] = copy[row] * factor;
    }
done:
    qt_free(copy);
    return rc;
}

static int refuse(struct qt_err *err)
{
    return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                   "the fused runtime does not support models with w4ax linears whose input does "
                   "not come in their channel order and scale");
}

int rt_follow(struct qt_act *act, const struct rt_rows *from, struct qt_err *err)
{
    uint32_t *held = NULL; /* position of a source channel */
    float *factor = NULL;  /* of that channel */
    int rc;
    QT_TRY(qt_array_new(&held, act->k, sizeof *held, err));
    QT_TRY(qt_array_new(&factor, act->k, sizeof *factor, err));
    for (size_t i = 0; i < act->k; i++) {
        /* Head h of attention has the values of KV head h / repeat. */
        const size_t head = i / from->head, start = head / from->repeat * from->head;
        float f;
        const size_t row = source_row(&f, from->packed, from->first + start + i % from->head);
        const size_t channel = head * from->head + (row - from->first - start);
        if (channel >= act->k)
            QT_TRY(refuse(err));
        held[channel] = (uint32_t)i;
        factor[channel] = f;
    }
    for (size_t i = 0; i < act->k; i++) {
        if (act->factor[i] != factor[act->order[i]])
            QT_TRY(refuse(err));
        act->order[i] = held[act->order[i]];
        act->factor[i] = 1;
    }
done:
    qt_free(held);
    qt_free(factor);
    return rc;
}

int rt_check_factors(const struct qt_act *act, bool may, struct qt_err *err)
{
    for (size_t i = 0; i < act->k; i++)
        if (act->factor[i] != 1 && !may)
            return refuse(err);
    return QT_OK;
}

/* True if the rows of b can follow those of a in the same sections. */
static bool can_follow(const struct qt_packed *a, const struct qt_packed *b)
{
    return a->k == b->k && a->n % 16 == 0 && a->scale_exp2 == b->scale_exp2 &&
           gpu_w4ax_scales_of(&a->spec) == gpu_w4ax_scales_of(&b->spec);
}

static int upload_rows(struct rt_linear *out, struct qt_runtime *rt, const struct qt_packed *packed,
                       size_t count, struct qt_err *err)
{
    const void *sections[QT_MAX_SECTIONS] = {NULL};
    int rc = QT_OK;
    QT_TRY(rt_upload_sections(sections, rt, packed, count, gpu_sections(packed), err));
    QT_TRY(qt_gpu_w4ax_weight(&out->w4ax, packed, sections, err));
    for (size_t i = 0; i < count; i++)
        out->n += packed[i].n;
    out->w4ax.n = out->n;
    out->k = packed->k;
done:
    return rc;
}

int rt_pack_w4ax(struct rt_group *out, struct qt_runtime *rt, const struct qt_packed *packed,
                 size_t count, const struct qt_act *act, struct qt_err *err)
{
    bool gathers = false;
    int rc;
    out->linears = 0;
    QT_TRY(gpu_w4ax_input_new(&out->input, rt->gpu, act, false, err));
    for (size_t i = 0; i < act->k; i++)
        gathers |= act->order[i] != i;
    if (!gathers)
        out->input.in.perm = NULL;
    out->input.in.dependent_launch = !rt->opt.plain;
    for (size_t at = 0, end; at < count; at = end) {
        struct rt_linear *linear = &out->linear[out->linears];
        size_t first = 0;
        for (end = at + 1; end < count && can_follow(&packed[end - 1], &packed[end]); end++)
            ;
        for (size_t i = at; i < end; first += packed[i++].n) {
            out->part[i].linear = out->linears;
            out->part[i].first = first;
        }
        *linear = (struct rt_linear){.n = 0};
        QT_TRY(upload_rows(linear, rt, packed + at, end - at, err));
        linear->w4ax.blocks = out->input.in.blocks;
        out->linears++;
    }
done:
    return rc;
}
