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

/* ---- in backend memory ---------------------------------------------------------------------- */

/* One side of a matrix: element i comes from element order[i] and is multiplied by factor[i]. */
struct side {
    uint32_t *order;
    float *factor;
};

static void side_free(struct side *s)
{
    qt_free(s->order);
    qt_free(s->factor);
}

/* sign: of the stored exponents, for the way to the stored order; `back`: the inverse of that. */
static int side_new(struct side *out, const struct qt_packed *p, const char *order_name,
                    const char *exp2_name, int sign, bool back, struct qt_err *err)
{
    const struct qt_section *o = qt_packed_section(p, order_name);
    const int8_t *exp2 = exponents(qt_packed_section(p, exp2_name));
    const size_t count = o->shape[0];
    int rc;
    *out = (struct side){0};
    QT_TRY(qt_array_new(&out->order, count, sizeof *out->order, err));
    QT_TRY(qt_array_new(&out->factor, count, sizeof *out->factor, err));
    for (size_t i = 0; i < count; i++) {
        const uint32_t from = orders(o)[i];
        out->order[back ? from : i] = back ? (uint32_t)i : from;
        out->factor[back ? from : i] = ldexpf(1, (back ? -sign : sign) * exp2[i]);
    }
done:
    return rc;
}

int qt_arrange_on(struct qt_backend *be, float *t, const float *w, const struct qt_packed *p,
                  struct qt_err *err)
{
    struct side columns = {0}, rows = {0};
    float *gathered = NULL;
    int rc;
    QT_TRY(side_new(&columns, p, "col_order", "col_exp2", 1, false, err));
    QT_TRY(side_new(&rows, p, "row_order", "row_exp2", -1, false, err));
    QT_TRY(qt_backend_floats(&gathered, be, p->n, p->k, err));
    QT_TRY(be->gather_rows(be, gathered, w, rows.order, rows.factor, p->n, p->k, err));
    const struct qt_act act = {
        .k = p->k, .order = columns.order, .factor = columns.factor, .rotate = is_rotated(p)};
    QT_TRY(be->arrange_inputs(be, t, gathered, p->n, &act, err));
done:
    be->free(be, gathered);
    side_free(&columns);
    side_free(&rows);
    return rc;
}

int qt_arrange_restore_on(struct qt_backend *be, float *w, const float *t,
                          const struct qt_packed *p, struct qt_err *err)
{
    struct side columns = {0}, rows = {0};
    struct qt_act rotation = {0};
    float *from[2] = {NULL, NULL};
    int rc;
    QT_TRY(side_new(&columns, p, "col_order", "col_exp2", 1, true, err));
    QT_TRY(side_new(&rows, p, "row_order", "row_exp2", -1, true, err));
    QT_TRY(qt_act_new(&rotation, p->k, 4, err)); /* the identity */
    rotation.rotate = is_rotated(p);
    const struct qt_act back = {.k = p->k, .order = columns.order, .factor = columns.factor};
    for (int i = 0; i < 2; i++)
        QT_TRY(qt_backend_floats(&from[i], be, p->n, p->k, err));
    QT_TRY(be->arrange_inputs(be, from[0], t, p->n, &rotation, err));
    QT_TRY(be->arrange_inputs(be, from[1], from[0], p->n, &back, err));
    QT_TRY(be->gather_rows(be, w, from[1], rows.order, rows.factor, p->n, p->k, err));
done:
    be->free(be, from[0]);
    be->free(be, from[1]);
    qt_act_free(&rotation);
    side_free(&columns);
    side_free(&rows);
    return rc;
}
