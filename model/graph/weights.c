/* A checkpoint as a source of weights. */
#include "model/model.h"

static const struct qt_tensor *find(void *ctx, const char *name)
{
    const struct qt_ckpt *ckpt = ctx;
    return qt_ckpt_find(ckpt, name);
}

static bool ckpt_shape(void *ctx, const char *name, int *ndim, size_t shape[QT_MAX_DIMS])
{
    const struct qt_tensor *t = find(ctx, name);
    if (!t)
        return false;
    *ndim = t->ndim;
    memcpy(shape, t->shape, sizeof t->shape);
    return true;
}

static int ckpt_load(void *ctx, const char *name, float *dst, struct qt_err *err)
{
    const struct qt_tensor *t = find(ctx, name);
    struct qt_blob blob;
    if (!t)
        return qt_fail(err, QT_E_INPUT, qt_ckpt_path(ctx), name, "missing");
    if (!qt_dtype_is_weight(t->dtype))
        return qt_fail(err, QT_E_UNSUPPORTED, t->file, name,
                       "dtype %s is not supported for weights", qt_dtype_name(t->dtype));
    int rc = qt_ckpt_read(&blob, ctx, t, err);
    if (rc < 0)
        return rc;
    qt_to_f32(dst, blob.data, t->dtype, t->count);
    qt_blob_free(&blob);
    size_t bad = qt_find_nonfinite(dst, t->count);
    if (bad < t->count)
        return qt_fail(err, QT_E_INPUT, t->file, name, "element %zu is not finite in FP32", bad);
    return QT_OK;
}

/* Values that are not finite are left to ckpt_load, which names them. */
static int ckpt_place(void *ctx, struct qt_backend *be, const char *name, float *dst, bool *done,
                      struct qt_err *err)
{
    const struct qt_tensor *t = find(ctx, name);
    struct qt_blob blob;
    *done = false;
    if (!t || !be->upload_narrow || (t->dtype != QT_F16 && t->dtype != QT_BF16))
        return QT_OK;
    int rc = qt_ckpt_read(&blob, ctx, t, err);
    if (rc < 0)
        return rc;
    if (qt_count_nonfinite(blob.data, t->dtype, t->count) == 0) {
        rc = be->upload_narrow(be, dst, blob.data, t->dtype == QT_BF16, t->count, err);
        *done = rc == QT_OK;
    }
    qt_blob_free(&blob);
    return rc;
}

struct qt_weights qt_weights_of_ckpt(const struct qt_ckpt *ckpt)
{
    /* The callbacks only read through ctx. */
    void *ctx = (void *)(uintptr_t)ckpt;
    return (struct qt_weights){.dir = qt_ckpt_dir(ckpt),
                               .ctx = ctx,
                               .quantization = qt_ckpt_quantization(ckpt),
                               .shape = ckpt_shape,
                               .load = ckpt_load,
                               .place = ckpt_place};
}
