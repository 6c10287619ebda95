/* From a packed matrix to the descriptor of a fused kernel: the only place that says which scheme
 * and layout has one. */
#include "verify/verify.h"

#include <stddef.h>
#include <string.h>

static const struct qt_gpu_kernel kernels[] = {
    {"lut", "frag16x64/pair", QT_MATMUL_LUT},
    {"fpx", "frag16x64/pair", QT_MATMUL_FPX},
    {"fpx", "frag16x64/half", QT_MATMUL_FPX},
    {"int", "frag16x64/pair", QT_MATMUL_INT},
};

/* Where a section's address goes. */
static const struct {
    const char *section;
    size_t offset;
} addresses[] = {
    {"plane0", offsetof(struct qt_matmul_weight, plane[0])},
    {"plane1", offsetof(struct qt_matmul_weight, plane[1])},
    {"plane2", offsetof(struct qt_matmul_weight, plane[2])},
    {"scale", offsetof(struct qt_matmul_weight, scale)},
    {"table", offsetof(struct qt_matmul_weight, table)},
};

const struct qt_gpu_kernel *qt_gpu_kernel_at(size_t i)
{
    return i < sizeof kernels / sizeof *kernels ? &kernels[i] : NULL;
}

static const struct qt_gpu_kernel *find_kernel(const struct qt_packed *p)
{
    const char *scheme = qt_scheme_name(p->spec.scheme);
    const struct qt_gpu_kernel *k;
    for (size_t i = 0; (k = qt_gpu_kernel_at(i)) != NULL; i++)
        if (strcmp(k->scheme, scheme) == 0 && strcmp(k->layout, p->layout) == 0)
            return k;
    return NULL;
}

static void set_parameters(struct qt_matmul_weight *out, const struct qt_spec *spec)
{
    const struct qt_param *param;
    for (size_t i = 0; (param = qt_scheme_param(spec->scheme, i)) != NULL; i++) {
        if (strcmp(param->key, "bits") == 0)
            out->bits = (unsigned)spec->value[i];
        else if (strcmp(param->key, "e") == 0)
            out->exp_bits = (unsigned)spec->value[i];
        else if (strcmp(param->key, "g") == 0)
            out->group = (size_t)spec->value[i];
    }
}

static bool set_address(struct qt_matmul_weight *out, const char *section, const void *address)
{
    for (size_t i = 0; i < sizeof addresses / sizeof *addresses; i++)
        if (strcmp(addresses[i].section, section) == 0) {
            memcpy((char *)out + addresses[i].offset, &address, sizeof address);
            return true;
        }
    return false;
}

int qt_gpu_weight(struct qt_matmul_weight *out, const struct qt_packed *p,
                  const void *const *section, struct qt_err *err)
{
    const struct qt_gpu_kernel *kernel = find_kernel(p);
    *out = (struct qt_matmul_weight){0};
    if (!kernel)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "no fused kernel for %s in layout %s",
                       qt_scheme_name(p->spec.scheme), p->layout);
    out->kind = kernel->kind;
    out->n = p->n;
    out->k = p->k;
    out->scale_exp2 = p->scale_exp2;
    set_parameters(out, &p->spec);
    for (size_t i = 0; i < p->nsections; i++)
        if (!set_address(out, p->section[i].name, section[i]))
            return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                           "no fused kernel for %s with a section %s",
                           qt_scheme_name(p->spec.scheme), p->section[i].name);
    return QT_OK;
}
