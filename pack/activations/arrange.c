/*
 * Matrices whose rows and columns are stored permuted and scaled by powers of two:
 *
 *   W'[r][p] = W[row_order[r]][col_order[p]] * 2^(col_exp2[p] - row_exp2[r])
 *   x'[p]    = x[col_order[p]] * 2^-col_exp2[p]
 *
 * With rotate=hadamard, the channel blocks of the rows of W' and of x' are then rotated (rotate.c).
 * Decoding returns W. An inference engine multiplies the stored W' with x'.
 *
 * Sections: col_order [K] and row_order [N], U32; col_exp2 [K] and row_exp2 [N], I8.
 */
#include "pack/schemes/scheme.h"

#include <math.h>
#include <string.h>

enum { EXP2_LIMIT = 60 };

static int describe_side(struct qt_packed *p, const char *order, const char *exp2, size_t count,
                         struct qt_err *err)
{
    int rc = count > UINT32_MAX
                 ? qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                           "%s has %zu entries, at most %u are supported", order, count, UINT32_MAX)
                 : qt_packed_add_section(p, order, QT_U32, 1, &count, err);
    return rc < 0 ? rc : qt_packed_add_section(p, exp2, QT_I8, 1, &count, err);
}

int qt_arrange_describe(struct qt_packed *p, struct qt_err *err)
{
    int rc = describe_side(p, "col_order", "col_exp2", p->k, err);
    return rc < 0 ? rc : describe_side(p, "row_order", "row_exp2", p->n, err);
}

bool qt_is_arranged(const struct qt_packed *p)
{
    return qt_packed_section(p, "col_order") != NULL;
}

static uint32_t *orders(const struct qt_section *s)
{
    return (uint32_t *)(void *)s->data;
}

static int8_t *exponents(const struct qt_section *s)
{
    return (int8_t *)(void *)s->data;
}

/* Stores an order, and the powers of two in `factor` as exponents of 1 / factor. NULL: source
 * order, factors 1. */
static void store_side(struct qt_packed *p, const char *order_name, const char *exp2_name,
                       const uint32_t *order, const float *factor)
{
    const struct qt_section *o = qt_packed_section(p, order_name);
    int8_t *exp2 = exponents(qt_packed_section(p, exp2_name));
    for (size_t i = 0; i < o->shape[0]; i++) {
        orders(o)[i] = order ? order[i] : (uint32_t)i;
        exp2[i] = factor ? (int8_t)-ilogbf(factor[i]) : 0;
    }
}

void qt_arrange_store(struct qt_packed *p, const struct qt_arrange *a)
{
    const struct qt_act *in = a ? a->input : NULL;
    store_side(p, "col_order", "col_exp2", in ? in->order : NULL, in ? in->factor : NULL);
    store_side(p, "row_order", "row_exp2", a ? a->row_order : NULL, a ? a->row_factor : NULL);
}

static int check_side(const struct qt_packed *p, const char *order, const char *exp2,
                      struct qt_err *err)
{
    const struct qt_section *o = qt_packed_section(p, order);
    const int8_t *e = exponents(qt_packed_section(p, exp2));
    size_t n = o->shape[0];
    unsigned char *seen = NULL;
    int rc = QT_OK;
    QT_TRY(qt_array_new(&seen, n, 1, err));
    for (size_t i = 0; i < n; i++) {
        size_t at = orders(o)[i];
        if (at >= n || seen[at]) {
            rc = qt_fail(err, QT_E_INPUT, NULL, NULL, "%s is not a permutation: entry %zu is %zu",
                         order, i, at);
            goto done;
        }
        seen[at] = 1;
        if (e[i] < -EXP2_LIMIT || e[i] > EXP2_LIMIT) {
            rc = qt_fail(err, QT_E_INPUT, NULL, NULL, "%s: entry %zu is %d, outside -%d to %d",
                         exp2, i, e[i], EXP2_LIMIT, EXP2_LIMIT);
            goto done;
        }
    }
done:
    qt_free(seen);
    return rc;
}

int qt_arrange_check(const struct qt_packed *p, struct qt_err *err)
{
    int rc = check_side(p, "col_order", "col_exp2", err);
    return rc < 0 ? rc : check_side(p, "row_order", "row_exp2", err);
}

size_t qt_packed_source_row(const struct qt_packed *p, size_t r)
{
    return qt_is_arranged(p) ? orders(qt_packed_section(p, "row_order"))[r] : r;
}

static bool is_rotated(const struct qt_packed *p)
{
    return qt_spec_value(&p->spec, "rotate") > 0;
}

/* ldexpf(x, exp2) for |exp2| < 256; the product is exact in FP64. */
static float scaled(float x, int exp2)
{
    const uint64_t bits = (uint64_t)(1023 + exp2) << 52;
    double factor;
    memcpy(&factor, &bits, sizeof factor);
    return (float)((double)x * factor);
}

void qt_arrange_row(float *dst, const struct qt_packed *p, const float *src, size_t r)
{
    const uint32_t *order = orders(qt_packed_section(p, "col_order"));
    const int8_t *exp2 = exponents(qt_packed_section(p, "col_exp2"));
    int row_exp2 = exponents(qt_packed_section(p, "row_exp2"))[r];
    for (size_t i = 0; i < p->k; i++)
        dst[i] = scaled(src[order[i]], exp2[i] - row_exp2);
    if (is_rotated(p))
        qt_rotate(dst, p->k);
}

void qt_arrange_restore_row(float *dst, const struct qt_packed *p, float *src, size_t r)
{
    const uint32_t *order = orders(qt_packed_section(p, "col_order"));
    const int8_t *exp2 = exponents(qt_packed_section(p, "col_exp2"));
    int row_exp2 = exponents(qt_packed_section(p, "row_exp2"))[r];
    if (is_rotated(p))
        qt_rotate(src, p->k);
    for (size_t i = 0; i < p->k; i++)
        dst[order[i]] = scaled(src[i], row_exp2 - exp2[i]);
}

void qt_arrange_gram(double *dst, const double *h, const struct qt_act *a)
{
    size_t k = a->k;
    for (size_t p = 0; p < k; p++)
        for (size_t q = 0; q < k; q++) {
            size_t i = a->order[p], j = a->order[q];
            dst[p * k + q] =
                (i >= j ? h[i * k + j] : h[j * k + i]) * (double)(a->factor[p] * a->factor[q]);
        }
    if (a->rotate)
        qt_rotate_gram(dst, k);
}

void qt_arrange_cross(float *dst, const float *c, const struct qt_act *a)
{
    size_t k = a->k;
    for (size_t p = 0; p < k; p++)
        for (size_t q = 0; q < k; q++)
            dst[p * k + q] = c[a->order[p] * k + a->order[q]] * (a->factor[p] * a->factor[q]);
    if (a->rotate)
        qt_rotate_cross(dst, k, k, true);
}

void qt_arrange_columns(float *dst, const float *c, size_t n, const struct qt_act *a)
{
    for (size_t r = 0; r < n; r++)
        for (size_t q = 0; q < a->k; q++)
            dst[r * a->k + q] = c[r * a->k + a->order[q]] * a->factor[q];
    if (a->rotate)
        qt_rotate_cross(dst, n, a->k, false);
}
