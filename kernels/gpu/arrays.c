/* Arrays in device memory that are freed together. */
#include "kernels/gpu/product.h"

#include <string.h>

int gpu_array_new(void *out, struct gpu_arrays *a, size_t count, size_t size, struct qt_err *err)
{
    size_t bytes;
    void *p;
    if (qt_mul_overflow(&bytes, count, size))
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of GPU memory");
    int rc = a->gpu->alloc(a->gpu, &p, bytes, err);
    if (rc < 0)
        return rc;
    a->p[a->n++] = p;
    memcpy(out, &p, sizeof p);
    return QT_OK;
}

int gpu_array_upload(void *out, struct gpu_arrays *a, const void *from, size_t count, size_t size,
                     struct qt_err *err)
{
    void *p = NULL;
    int rc = gpu_array_new(&p, a, count, size, err);
    memcpy(out, &p, sizeof p);
    return rc < 0 ? rc : a->gpu->upload(a->gpu, p, from, count * size, err);
}

void gpu_arrays_free(struct gpu_arrays *a)
{
    while (a->n)
        a->gpu->free(a->gpu, a->p[--a->n]);
}
