/* Sources of weights: a container, whose quantized tensors are dequantized and others read as they
 * are; and weights of which packed matrices replace some. */
#include "pack/activations/plan.h"
#include "pack/schemes/scheme.h"

#include <string.h>

bool qt_entry_is_w4ax(const struct qt_entry *e)
{
    return strncmp(e->spec, "w4ax", 4) == 0 && (e->spec[4] == ':' || e->spec[4] == '\0');
}

static bool weights_shape(void *ctx, const char *name, int *ndim, size_t shape[QT_MAX_DIMS])
{
    const struct qt_container *c = ctx;
    const struct qt_entry *e = qt_container_find(c, name);
    if (!e)
        return qt_weights_of_ckpt(qt_container_ckpt(c))
            .shape((void *)(uintptr_t)qt_container_ckpt(c), name, ndim, shape);
    *ndim = 2;
    shape[0] = e->n;
    shape[1] = e->k;
    return true;
}

static int weights_load(void *ctx, const char *name, float *dst, struct qt_err *err)
{
    const struct qt_container *c = ctx;
    const struct qt_entry *e = qt_container_find(c, name);
    struct qt_packed packed;
    if (!e)
        return qt_weights_of_ckpt(qt_container_ckpt(c))
            .load((void *)(uintptr_t)qt_container_ckpt(c), name, dst, err);
    int rc = qt_packed_open(&packed, c, e, err);
    if (rc < 0)
        return rc;
    rc = qt_packed_weights(dst, &packed, err);
    qt_packed_free(&packed);
    return rc;
}

/* Simulated quantization: rounds the inputs of w4ax linears, copies others. */
static int fake_quant_input(void *ctx, struct qt_backend *be, float *y, const float *x,
                            const struct qt_linear *linear, size_t m, size_t k, struct qt_err *err)
{
    const struct qt_container *c = ctx;
    const struct qt_entry *e = qt_container_find(c, linear->weight);
    struct qt_act act;
    if (!e || !qt_entry_is_w4ax(e))
        return be->copy(be, y, x, m * k * sizeof *x, err);
    int rc = qt_act_open(&act, c, e, err);
    if (rc == QT_OK)
        rc = qt_act_apply_on(be, y, x, m, &act, err);
    qt_act_free(&act);
    return rc;
}

struct qt_weights qt_weights_of_container(const struct qt_container *c)
{
    void *ctx = (void *)(uintptr_t)c;
    bool quantized_inputs = false;
    for (size_t i = 0; i < qt_container_count(c); i++)
        quantized_inputs |= qt_entry_is_w4ax(qt_container_entry(c, i));
    return (struct qt_weights){
        .dir = qt_container_dir(c),
        .ctx = ctx,
        .fake_quant = {.ctx = ctx, .input = quantized_inputs ? fake_quant_input : NULL},
        .quantization = json_object_get(qt_container_manifest(c), QT_QUANTIZATION_KEY),
        .shape = weights_shape,
        .load = weights_load,
    };
}

/* ---- replaced matrices ---------------------------------------------------------------------- */

static bool replaced_shape(void *ctx, const char *name, int *ndim, size_t shape[QT_MAX_DIMS])
{
    const struct qt_replaced *r = ctx;
    return r->source.shape(r->source.ctx, name, ndim, shape);
}

static int replaced_load(void *ctx, const char *name, float *dst, struct qt_err *err)
{
    const struct qt_replaced *r = ctx;
    const struct qt_packed *packed = r->find(r->ctx, name);
    return packed ? qt_packed_weights(dst, packed, err)
                  : r->source.load(r->source.ctx, name, dst, err);
}

static int replaced_place(void *ctx, struct qt_backend *be, const char *name, float *dst,
                          bool *done, struct qt_err *err)
{
    const struct qt_replaced *r = ctx;
    *done = false;
    return r->find(r->ctx, name) ? QT_OK : r->source.place(r->source.ctx, be, name, dst, done, err);
}

static bool replaced_unchanged(void *ctx, const char *name)
{
    const struct qt_replaced *r = ctx;
    return !r->find(r->ctx, name) &&
           (!r->source.unchanged || r->source.unchanged(r->source.ctx, name));
}

struct qt_weights qt_weights_replaced(struct qt_replaced *r)
{
    struct qt_weights w = r->source;
    w.ctx = r;
    w.shape = replaced_shape;
    w.load = replaced_load;
    w.place = r->source.place ? replaced_place : NULL;
    w.unchanged = replaced_unchanged;
    return w;
}
