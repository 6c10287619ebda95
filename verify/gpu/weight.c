/* Descriptors of fused kernels for packed matrices. The table `kernels` is the only place that says
 * which scheme and layout has a kernel. */
#include "verify/gpu/gpu.h"

#include <stddef.h>
#include <string.h>

enum { MIN_GROUP = 32 }; /* channels that share a scale in the kernels of lut */

static const struct qt_gpu_kernel kernels[] = {
    {.scheme = "lut", .layout = "frag16x64/nibble", .kind = QTOOL_MATMUL_LUT},
    {.scheme = "fpx", .layout = "frag16x64/nibble", .kind = QTOOL_MATMUL_FPX},
    {.scheme = "fpx", .layout = "frag16x64/half", .kind = QTOOL_MATMUL_FPX},
    {.scheme = "fpx", .layout = "frag16x64/whole", .kind = QTOOL_MATMUL_FPX},
    {.scheme = "int", .layout = "frag16x64/half", .kind = QTOOL_MATMUL_INT},
    {.scheme = "int", .layout = "frag16x64/whole", .kind = QTOOL_MATMUL_INT},
    {.scheme = "mix24", .layout = "mix16x128", .kind = QTOOL_MATMUL_MIX24},
    {.scheme = "w4ax", .layout = "frag16x64/byte", .w4ax = true},
};

/* The descriptor member that takes the address of a section. */
static const struct {
    const char *section;
    size_t offset;
} addresses[] = {
    {"plane0", offsetof(struct qtool_matmul_weight, plane[0])},
    {"plane1", offsetof(struct qtool_matmul_weight, plane[1])},
    {"plane2", offsetof(struct qtool_matmul_weight, plane[2])},
    {"scale", offsetof(struct qtool_matmul_weight, scale)},
    {"table", offsetof(struct qtool_matmul_weight, table)},
    {"zero", offsetof(struct qtool_matmul_weight, zero)},
    {"stream", offsetof(struct qtool_matmul_weight, mix24.stream)},
    {"perm", offsetof(struct qtool_matmul_weight, mix24.perm)},
    {"csr_ptr", offsetof(struct qtool_matmul_weight, mix24.csr_ptr)},
    {"csr_col", offsetof(struct qtool_matmul_weight, mix24.csr_col)},
    {"csr_val", offsetof(struct qtool_matmul_weight, mix24.csr_val)},
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

bool gpu_is_w4ax(const struct qt_packed *p)
{
    const struct qt_gpu_kernel *kernel = find_kernel(p);
    return kernel && kernel->w4ax;
}

/* The choices of the scheme's parameter have the order of the enum. */
enum qtool_w4ax_scales gpu_w4ax_scales_of(const struct qt_spec *spec)
{
    const struct qt_param *param;
    size_t i = 0;
    while ((param = qt_scheme_param(spec->scheme, i)) != NULL && strcmp(param->key, "scales") != 0)
        i++;
    return param ? (enum qtool_w4ax_scales)spec->value[i] : QTOOL_W4AX_BLOCK;
}

static const struct qt_section *table_of(const struct qt_packed *p)
{
    for (size_t i = 0; i < p->nsections; i++)
        if (strcmp(p->section[i].name, "table") == 0)
            return &p->section[i];
    return NULL;
}

bool gpu_same_table(const struct qt_packed *a, const struct qt_packed *b)
{
    const struct qt_section *s = table_of(a), *t = table_of(b);
    return s && t ? s->bytes == t->bytes && memcmp(s->data, t->data, s->bytes) == 0 : s == t;
}

bool gpu_learns_table(const struct qt_spec *spec)
{
    const struct qt_param *param;
    for (size_t i = 0; (param = qt_scheme_param(spec->scheme, i)) != NULL; i++)
        if (strcmp(param->key, "table") == 0)
            return strcmp(param->choices[(size_t)spec->value[i]], "learned") == 0;
    return false;
}

/* In w4ax, the sections from "bits" on describe the activations. */
size_t gpu_sections(const struct qt_packed *p)
{
    size_t n = 0;
    while (n < p->nsections && !(gpu_is_w4ax(p) && strcmp(p->section[n].name, "bits") == 0))
        n++;
    return n;
}

static void set_parameters(struct qtool_matmul_weight *out, const struct qt_spec *spec)
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

/* Computes the units of a mix24 matrix from the sizes of its sections. Returns false for groups of
 * 8 channels or rows: the kernel has no records of their size. */
static bool set_units(struct qtool_matmul_weight *out, const struct qt_packed *p)
{
    enum { SLOTS = 8, TWO = QTOOL_MATMUL_MIX24_TWO, FOUR = QTOOL_MATMUL_MIX24_FOUR };
    size_t units = 0, bytes = 0;
    for (size_t i = 0; i < p->nsections; i++) {
        const struct qt_section *s = &p->section[i];
        if (strcmp(s->name, "perm") == 0)
            units = s->shape[0] / SLOTS;
        else if (strcmp(s->name, "stream") == 0)
            bytes = s->shape[1];
        else if (strcmp(s->name, "csr_col") == 0)
            out->mix24.outliers = s->shape[0];
    }
    if (units != qt_ceil_div(p->k, SLOTS * 16) || bytes < units * TWO)
        return false;
    out->mix24.fours = (bytes - units * TWO) / (FOUR - TWO);
    out->mix24.twos = units - out->mix24.fours;
    return out->mix24.fours <= units && bytes == out->mix24.twos * TWO + out->mix24.fours * FOUR;
}

static bool has_section(const struct qt_packed *p, const char *name)
{
    for (size_t i = 0; i < p->nsections; i++)
        if (strcmp(p->section[i].name, name) == 0)
            return true;
    return false;
}

static bool set_address(struct qtool_matmul_weight *out, const char *section, const void *address)
{
    for (size_t i = 0; i < sizeof addresses / sizeof *addresses; i++)
        if (strcmp(addresses[i].section, section) == 0) {
            memcpy((char *)out + addresses[i].offset, &address, sizeof address);
            return true;
        }
    return false;
}

int qt_gpu_weight(struct qtool_matmul_weight *out, const struct qt_packed *p,
                  const void *const *section, struct qt_err *err)
{
    const struct qt_gpu_kernel *kernel = find_kernel(p);
    *out = (struct qtool_matmul_weight){0};
    if (!kernel || kernel->w4ax)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "no fused kernel for %s in layout %s",
                       qt_scheme_name(p->spec.scheme), p->layout);
    out->kind = kernel->kind;
    out->n = p->n;
    out->k = p->k;
    out->scale_exp2 = p->scale_exp2;
    if (kernel->kind != QTOOL_MATMUL_MIX24)
        set_parameters(out, &p->spec);
    if (kernel->kind == QTOOL_MATMUL_LUT && out->group < MIN_GROUP)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "no fused kernel for groups of %zu",
                       out->group);
    if (kernel->kind == QTOOL_MATMUL_LUT && !has_section(p, "table"))
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                       "no fused kernel for %u bits with zero-points", out->bits);
    if (kernel->kind == QTOOL_MATMUL_MIX24 && !set_units(out, p))
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                       "no fused kernel for mix24 with groups of 8 channels or rows");
    for (size_t i = 0; i < p->nsections; i++)
        if (!set_address(out, p->section[i].name, section[i]))
            return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                           "no fused kernel for %s with section '%s'",
                           qt_scheme_name(p->spec.scheme), p->section[i].name);
    return QT_OK;
}

/* BLOCK: section "scale" has a scale per row and channel block. INT and ROW: "scale" has a scale
 * per row; INT also has "sub", an integer factor per row and channel block. */
int qt_gpu_w4ax_weight(struct qtool_w4ax_weight *out, const struct qt_packed *p,
                       const void *const *section, struct qt_err *err)
{
    const void *plane = NULL, *scale = NULL, *sub = NULL;
    *out = (struct qtool_w4ax_weight){0};
    if (!gpu_is_w4ax(p))
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "no w4ax kernel for %s in layout %s",
                       qt_scheme_name(p->spec.scheme), p->layout);
    for (size_t i = 0; i < gpu_sections(p); i++) {
        const char *name = p->section[i].name;
        if (strcmp(name, "plane0") == 0)
            out->pitch_blocks = p->section[i].shape[1];
        *(strcmp(name, "sub") == 0     ? &sub
          : strcmp(name, "scale") == 0 ? &scale
                                       : &plane) = section[i];
    }
    out->scales = gpu_w4ax_scales_of(&p->spec);
    out->n = p->n;
    out->k = p->k;
    out->scale_exp2 = p->scale_exp2;
    out->plane = plane;
    out->scale = out->scales == QTOOL_W4AX_BLOCK ? scale : sub;
    out->row_scale = out->scales == QTOOL_W4AX_BLOCK ? NULL : scale;
    return QT_OK;
}
