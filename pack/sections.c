/* The section list of a packed matrix. */
#include "pack/schemes/scheme.h"

#include <string.h>

int qt_packed_add_section(struct qt_packed *p, const char *name, enum qt_dtype dtype, int ndim,
                          const size_t *shape, struct qt_err *err)
{
    if (p->nsections == QT_MAX_SECTIONS)
        return qt_fail(err, QT_E_INTERNAL, NULL, NULL, "too many sections");
    struct qt_section *s = &p->section[p->nsections];
    *s = (struct qt_section){.name = name, .dtype = dtype, .ndim = ndim};
    size_t bytes = qt_dtype_bits(dtype) / 8;
    for (int i = 0; i < ndim; i++) {
        s->shape[i] = shape[i];
        if (qt_mul_overflow(&bytes, bytes, shape[i]))
            return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "%zu x %zu is too large", p->n, p->k);
    }
    s->bytes = bytes;
    p->nsections++;
    return QT_OK;
}

const struct qt_section *qt_packed_section(const struct qt_packed *p, const char *name)
{
    for (size_t i = 0; i < p->nsections; i++)
        if (strcmp(p->section[i].name, name) == 0)
            return &p->section[i];
    return NULL;
}
