/* Checks that the sections of an accepted matrix obey docs/schemes.md. Works on the stored bytes,
 * independent of the code that reads them. */
#include "pack/schemes/scheme.h"
#include "tests/fuzz/quantized.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const void *data_of(const struct qt_packed *p, const char *section)
{
    const struct qt_section *s = qt_packed_section(p, section);
    return s ? s->data : NULL;
}

/* ---- scales --------------------------------------------------------------------------------- */

/* repacked: the matrix passed the repacking check, so that padding must be zero. */
static void check_scales(const struct qt_packed *p, bool repacked)
{
    const struct qt_section *s = qt_packed_section(p, "scale");
    const uint16_t *scale = data_of(p, "scale");
    for (size_t i = 0; scale && i < s->bytes / sizeof *scale; i++) {
        size_t row = i / (s->shape[1] * 16) * 16 + i % 2 * 8 + i % 16 / 2;
        FUZZ_CHECK((scale[i] & 0x7c00) != 0x7c00);
        FUZZ_CHECK(row < p->n || scale[i] == 0 || !repacked);
    }
}

/* ---- mix24 ---------------------------------------------------------------------------------- */

static void check_perm(const struct qt_packed *p, const uint16_t *perm)
{
    enum { NONE = 65535 };
    size_t g = qt_packed_group(p), groups = qt_ceil_div(p->k, g), found = 0;
    unsigned char *seen = calloc(groups, 1);
    FUZZ_CHECK(seen);
    for (size_t i = 0; i < qt_packed_section(p, "perm")->shape[0]; i++) {
        if (perm[i] == NONE)
            continue;
        FUZZ_CHECK(perm[i] < groups && !seen[perm[i]]);
        seen[perm[i]] = 1;
        found++;
    }
    FUZZ_CHECK(found == groups);
    free(seen);
}

/* row[k]: the decoded row r of p. */
static void check_outliers(const struct qt_packed *p, const uint16_t *perm, size_t r,
                           const float *row)
{
    const uint32_t *ptr = data_of(p, "csr_ptr");
    const uint16_t *col = data_of(p, "csr_col"), *val = data_of(p, "csr_val");
    size_t count = qt_packed_section(p, "csr_col")->shape[0], g = qt_packed_group(p);
    size_t panels = qt_packed_section(p, "csr_ptr")->shape[0];
    FUZZ_CHECK(ptr[0] == 0 && ptr[panels * (p->n + 1) - 1] == count);
    for (size_t i = 0; i < panels; i++, ptr += p->n + 1) {
        FUZZ_CHECK(i == 0 || ptr[0] == ptr[-1]);
        FUZZ_CHECK(ptr[r] <= ptr[r + 1] && ptr[r + 1] <= count);
        for (size_t e = ptr[r]; e < ptr[r + 1]; e++) {
            size_t column = i * 65536 + col[e], k = perm[column / g] * g + column % g;
            FUZZ_CHECK(e == ptr[r] || col[e] > col[e - 1]);
            FUZZ_CHECK(k < p->k && isfinite(qt_f16_to_f32(val[e])));
            FUZZ_CHECK(row[k] == ldexpf(qt_f16_to_f32(val[e]), p->scale_exp2));
        }
    }
}

/* ---- w4ax ----------------------------------------------------------------------------------- */

static void check_side(const uint32_t *order, const int8_t *exp2, size_t n)
{
    unsigned char *seen = calloc(n, 1);
    FUZZ_CHECK(seen);
    for (size_t i = 0; i < n; i++) {
        FUZZ_CHECK(order[i] < n && !seen[order[i]]);
        seen[order[i]] = 1;
        FUZZ_CHECK(exp2[i] >= -60 && exp2[i] <= 60);
    }
    free(seen);
}

static void check_multiples(const struct qt_packed *p, bool repacked)
{
    const struct qt_section *s = qt_packed_section(p, "sub");
    for (size_t i = 0; s && i < s->bytes; i++) {
        size_t row = i / (s->shape[1] * 16) * 16 + i % 2 * 8 + i % 16 / 2;
        FUZZ_CHECK(s->data[i] <= 15);
        FUZZ_CHECK(row < p->n ? s->data[i] >= 1 : !repacked || s->data[i] == 0);
    }
}

static void check_activations(const struct qt_packed *p)
{
    const uint8_t *bits = data_of(p, "bits");
    float clip;
    for (size_t b = 0; b < qt_ceil_div(p->k, 128); b++)
        FUZZ_CHECK(bits[b] == 4 || bits[b] == 8);
    memcpy(&clip, data_of(p, "clip"), sizeof clip);
    FUZZ_CHECK(clip > 0 && clip <= 1);
    check_side(data_of(p, "col_order"), data_of(p, "col_exp2"), p->k);
    check_side(data_of(p, "row_order"), data_of(p, "row_exp2"), p->n);
}

/* Rounds inputs as an accepted matrix describes. The error is at most half a step, and a step is at
 * most a seventh of the token's largest value. A rotation, and that back, multiply the largest
 * value by at most the square root of the block's size each. */
void fuzz_check_input(const struct qt_container *c, const struct qt_entry *e,
                      const struct qt_packed *p)
{
    enum { TOKENS = 3 };
    const uint32_t *order = data_of(p, "col_order");
    const int8_t *exp2 = data_of(p, "col_exp2");
    struct qt_act act;
    struct qt_err err = {0};
    if (!order)
        return;
    fuzz_ok(qt_act_open(&act, c, e, &err), &err);
    FUZZ_CHECK(act.k == p->k && memcmp(act.order, order, p->k * sizeof *order) == 0);
    const float limit = 1.1f * (act.rotate ? QT_ACT_BLOCK : 1);
    float *x = calloc(TOKENS * p->k, sizeof *x), *y = calloc(TOKENS * p->k, sizeof *y);
    FUZZ_CHECK(x && y);
    for (size_t i = 0; i < TOKENS * p->k; i++)
        x[i] = i < p->k ? 0 : ldexpf(sinf((float)i), i < 2 * p->k ? 0 : (int)(i % 41) - 20);
    fuzz_ok(qt_act_apply(y, x, TOKENS, &act, &err), &err);
    for (size_t t = 0; t < TOKENS * p->k; t += p->k) {
        float top = 0;
        for (size_t i = 0; i < p->k; i++)
            top = fmaxf(top, fabsf(ldexpf(x[t + order[i]], -exp2[i])));
        for (size_t i = 0; i < p->k; i++) {
            FUZZ_CHECK(act.factor[i] == ldexpf(1, -exp2[i]));
            FUZZ_CHECK(fabsf(ldexpf(y[t + order[i]], -exp2[i])) <= limit * top);
        }
    }
    free(x);
    free(y);
    qt_act_free(&act);
}

/* ---- all ------------------------------------------------------------------------------------ */

void fuzz_check_sections(const struct qt_packed *p, bool repacked)
{
    const uint16_t *perm = data_of(p, "perm");
    check_scales(p, repacked);
    if (perm)
        check_perm(p, perm);
    check_multiples(p, repacked);
    if (data_of(p, "col_order"))
        check_activations(p);
}

void fuzz_check_row(const struct qt_packed *p, size_t r, const float *row)
{
    const uint16_t *perm = data_of(p, "perm");
    if (perm && data_of(p, "csr_ptr"))
        check_outliers(p, perm, r, row);
}
