/* A container as a source of weights: quantized tensors decoded, the others as they are. */
#include "pack/pack.h"

#include <string.h>

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
    rc = qt_packed_decode(dst, &packed, 0, packed.n, err);
    qt_packed_free(&packed);
    return rc;
}

struct qt_weights qt_weights_of_container(const struct qt_container *c)
{
    return (struct qt_weights){
        .dir = qt_container_dir(c),
        .ctx = (void *)(uintptr_t)c,
        .shape = weights_shape,
        .load = weights_load,
    };
}
