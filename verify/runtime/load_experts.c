/* Loads the experts of a layer and their router. */
#include "verify/runtime/load.h"

static int open_expert(struct qt_packed *packed, struct rt_loader *l, size_t layer, size_t expert,
                       struct qt_err *err)
{
    struct qt_part parts[GPU_EXPERT_MATRICES];
    int rc = QT_OK;
    qt_model_expert_parts(parts, l->model, layer, expert);
    for (int i = 0; i < GPU_EXPERT_MATRICES; i++) {
        const struct qt_entry *entry = rt_entry_of(l, &parts[i]);
        if (!entry || parts[i].n < parts[i].rows)
            return qt_fail(err, QT_E_UNSUPPORTED, NULL, parts[i].weight,
                           "the fused runtime does not support models with experts %s",
                           entry ? "whose gate and up are one tensor" : "that are not quantized");
        QT_TRY(qt_packed_open(&packed[i], l->container, entry, err));
    }
done:
    return rc;
}

/* The biases of a matrix of all experts. */
static int load_expert_biases(struct gpu_experts *e, struct rt_loader *l, size_t layer, int matrix,
                              struct qt_err *err)
{
    struct qt_part parts[GPU_EXPERT_MATRICES];
    const struct qt_part *part = &parts[matrix];
    float *p = NULL;
    int rc;
    qt_model_expert_parts(parts, l->model, layer, 0);
    if (!part->bias)
        return QT_OK;
    QT_TRY(rt_alloc(l->rt, &p, e->experts * part->n, sizeof *p, err));
    for (size_t i = 0; i < e->experts; i++) {
        qt_model_expert_parts(parts, l->model, layer, i);
        QT_TRY(rt_load_values(l, part->bias, part->n, err));
        const struct qt_packed *rows = &e->packed[i * GPU_EXPERT_MATRICES + (size_t)matrix];
        if (gpu_is_w4ax(rows))
            QT_TRY(rt_arrange_rows(l->values, rows, err));
        QT_TRY(l->rt->gpu->upload(l->rt->gpu, p, l->values, part->n * sizeof *p, err));
        e->bias[matrix][i] = p;
        p += part->n;
    }
done:
    return rc;
}

int rt_place_experts(struct gpu_experts *e, struct qt_runtime *rt, struct qt_err *err)
{
    char *memory;
    int rc;
    QT_TRY(rt_alloc(rt, &memory, gpu_experts_bytes(e), 1, err));
    QT_TRY(gpu_experts_place(e, rt->gpu, memory, !rt->original, err));
done:
    return rc;
}

static int load_packed_experts(struct gpu_experts *e, struct rt_loader *l, size_t layer,
                               size_t count, struct qt_err *err)
{
    int rc;
    if (!rt_expert_act(NULL, l->rt->config.act))
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                       "the fused runtime does not support models with packed experts of this "
                       "activation");
    QT_TRY(gpu_experts_new(e, count, err));
    for (size_t i = 0; i < count; i++) {
        QT_TRY(qt_stop_check(err));
        QT_TRY(open_expert(&e->packed[i * GPU_EXPERT_MATRICES], l, layer, i, err));
    }
    for (int i = 0; i < GPU_EXPERT_MATRICES; i++)
        QT_TRY(load_expert_biases(e, l, layer, i, err));
    if (gpu_is_w4ax(e->packed))
        QT_TRY(gpu_experts_read_inputs(e, l->rt->gpu, err));
    QT_TRY(rt_place_experts(e, l->rt, err));
done:
    for (size_t i = 0; e->packed && i < count * GPU_EXPERT_MATRICES; i++)
        qt_packed_free(&e->packed[i]);
    qt_free(e->packed);
    e->packed = NULL;
    return rc;
}

/* True if a matrix of any routed expert of the layer is packed. */
static bool some_expert_packed(const struct rt_loader *l, size_t layer, size_t count)
{
    struct qt_part parts[GPU_EXPERT_MATRICES];
    for (size_t i = 0; l->container && i < count; i++) {
        qt_model_expert_parts(parts, l->model, layer, i);
        for (int j = 0; j < GPU_EXPERT_MATRICES; j++)
            if (rt_entry_of(l, &parts[j]))
                return true;
    }
    return false;
}

static int load_half_experts(struct rt_mixture *out, struct rt_loader *l, size_t layer,
                             size_t count, struct qt_err *err)
{
    struct qt_part parts[GPU_EXPERT_MATRICES];
    char *gate_up, *down;
    int rc;
    qt_model_expert_parts(parts, l->model, layer, 0);
    if (parts[0].bias || parts[1].bias || parts[2].bias)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                       "the fused runtime does not support models with FP16 experts that have "
                       "biases");
    const size_t bytes = parts[1].n * parts[1].k * 2; /* of gate, up and down alike */
    QT_TRY(rt_alloc(l->rt, &gate_up, 2 * count, bytes, err));
    QT_TRY(rt_alloc(l->rt, &down, count, bytes, err));
    for (size_t i = 0; i < count; i++) {
        qt_model_expert_parts(parts, l->model, layer, i);
        QT_TRY(rt_upload_rows(gate_up + 2 * i * bytes, l, &parts[0], err));
        QT_TRY(rt_upload_rows(gate_up + (2 * i + 1) * bytes, l, &parts[1], err));
        QT_TRY(rt_upload_rows(down + i * bytes, l, &parts[2], err));
    }
    out->gate_up = gate_up;
    out->down = down;
    out->width = parts[1].n;
done:
    return rc;
}

bool rt_expert_act(enum qtool_moe_activation *out, enum qtool_decoder_act act)
{
    static const struct {
        enum qtool_decoder_act from;
        enum qtool_moe_activation to;
    } acts[] = {{QTOOL_DECODER_SILU, QTOOL_MOE_SILU},
                {QTOOL_DECODER_GELU_TANH, QTOOL_MOE_GELU_TANH},
                {QTOOL_DECODER_CLAMPED, QTOOL_MOE_CLAMPED}};
    for (size_t i = 0; i < sizeof acts / sizeof *acts; i++)
        if (acts[i].from == act) {
            if (out)
                *out = acts[i].to;
            return true;
        }
    return false;
}

int rt_load_mixture(struct rt_mixture *out, struct rt_loader *l, const struct qt_mixture *m,
                    size_t layer, struct qt_err *err)
{
    const size_t k = m->router.k, rows = m->router.n + m->shared_gate.n;
    char *router;
    int rc;
    *out = (struct rt_mixture){.experts = m->experts,
                               .shared_gate = m->shared_gate.n != 0,
                               .sigmoid = m->sigmoid,
                               .normalize = m->normalize,
                               .top_k = m->top_k,
                               .eps = m->eps,
                               .scale = m->scale};
    QT_TRY(some_expert_packed(l, layer, m->experts)
               ? load_packed_experts(&out->grouped, l, layer, m->experts, err)
               : load_half_experts(out, l, layer, m->experts, err));
    QT_TRY(rt_alloc(l->rt, &router, rows * k, 2, err));
    QT_TRY(rt_upload_rows(router, l, &m->router, err));
    if (out->shared_gate)
        QT_TRY(rt_upload_rows(router + m->router.n * k * 2, l, &m->shared_gate, err));
    out->router = (struct rt_linear){.n = rows, .k = k, .dense = router};
    QT_TRY(rt_load_vector(&out->bias, l, m->router.bias, &m->router, NULL, err));
    QT_TRY(rt_load_vector(&out->select_bias, l, m->select_bias.weight, &m->select_bias, NULL, err));
done:
    return rc;
}
