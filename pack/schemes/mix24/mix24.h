/*
 * mix24 (private to pack/): 2- and 4-bit groups in one weight matrix, with FP16 outliers in a CSR
 * matrix (Li et al., arXiv 2311.16442; "the paper" in these files).
 *
 *     recipe.c    how a matrix is quantized, from the scheme text
 *     pack.c      sizes, groups <-> packed bytes (layouts/layout_mix24.h), checks of stored bytes
 *     choose.c    choices before any code: which groups get 4 bits, which weights are outliers
 *     fit.c       parameters and codes of one group of 16 rows; compiled per instruction set
 *     quantize.c  all groups of a matrix: under a Hessian, strip by strip without, on a backend
 *     learn.c     scales, zero-points and outliers as learnable parameters
 *     mix24.c     the scheme: parameters, sections, dequantization
 *
 * mix24.c calls all others through the table qt_scheme_mix24; the others call pack.c and recipe.c.
 */
#ifndef QT_PACK_SCHEMES_MIX24_MIX24_H
#define QT_PACK_SCHEMES_MIX24_MIX24_H

#include "formats/layouts/layout_mix24.h"
#include "pack/schemes/scheme.h"

enum qt_mix24_sens { QT_MIX24_SENS_GAIN, QT_MIX24_SENS_OBS, QT_MIX24_SENS_PAPER };
enum qt_mix24_order {
    QT_MIX24_2BIT_FIRST,
    QT_MIX24_BY_ACTIVITY,
    QT_MIX24_NATURAL,
    QT_MIX24_NO_COMPENSATION, /* nor coordinate descent: only the diagonal of H is used */
};

/* How a matrix is quantized; paper=1 decides some of it. */
struct qt_mix24_recipe {
    enum qt_mix24_sens sens;
    enum qt_mix24_order order;
    bool local;           /* 4 bits for the best of each four neighbors, not for the best of all
                           * groups */
    bool outliers_by_abs; /* outliers are the largest weights; else those that reduce the error
                           * most */
    bool search;          /* scales and zero-points of least error, instead of min-max */
    int descent_rounds;   /* rounds of coordinate descent after error compensation */
};
struct qt_mix24_recipe qt_mix24_recipe(const struct qt_spec *spec);

/*
 * One group in 16 rows. The parameters and codes of a matrix are struct qt_mix24_group
 * [strips][slots]. With s = (q + z2) * s2 * 2^-22, a weight divided by 2^scale_exp2 is
 *
 *     f16(code * s - f16(zero * s))
 *
 * This equals (code - zero) * s, unless s is below 2^-9 of the largest scale in FP16. Then the last
 * subnormal bit of FP16, 2^-24, is too coarse. Products are exact otherwise, because s2 has four
 * significant bits in a 2-bit group and two in a 4-bit group, so that all products fit 11 bits.
 */
struct qt_mix24_group {
    uint16_t s2[2]; /* FP16, one per half of the strip; equal for g2 = 16 */
    uint8_t z2[2];
    uint8_t q[QT_FRAG_ROWS], zero[QT_FRAG_ROWS];
    uint8_t code[16][QT_FRAG_ROWS]; /* [channel][row] */
};

#define QT_MIX24_S2_UNIT 0x1p-22f
enum {
    QT_MIX24_Q_MAX = 15,
    QT_MIX24_S2_MASK = 0x7f80,   /* bits of FP16 that are stored */
    QT_MIX24_S2_FINE = 0x0080,   /* step between s2 values of 2-bit groups */
    QT_MIX24_S2_COARSE = 0x0200, /* step between s2 values of 4-bit groups */
    QT_MIX24_SIGMA_MAX = 65504,  /* limit of (q + z2) * s2: the largest number of FP16 */
};

static inline float qt_mix24_scale(const struct qt_mix24_group *group, size_t row)
{
    size_t half = row / 8;
    return (float)(group->q[row] + group->z2[half]) *
           (qt_f16_to_f32(group->s2[half]) * QT_MIX24_S2_UNIT);
}

/* Weight of a code. For |x| < 1/4 FP16 rounds to multiples of 2^-24, as adding 3/4 in FP32 does. */
static inline float qt_mix24_value(float code, float zero, float s)
{
    const float magic = 0.75f;
    float offset = (zero * s + magic) - magic;
    return (code * s - offset + magic) - magic;
}

/* Sizes of a packed matrix, and pointers to its sections (NULL if a section is missing). */
struct qt_mix24 {
    size_t n, k, g;
    size_t strips, groups; /* strips of 16 rows; groups of g channels, the last one possibly
                            * short */
    struct qt_mix24_units units;
    size_t slots;            /* 128 / g per unit */
    size_t strip_bytes;      /* bytes of a strip in section stream */
    size_t panels, outliers; /* panels of 64 Ki packed columns; entries of the CSR matrix */
    unsigned char *stream;
    uint32_t *csr_ptr; /* [panels][n + 1] */
    uint16_t *perm, *csr_col, *csr_val;
};

enum { QT_MIX24_PANEL = 65536 };

/* Fills in sizes, and section pointers if the packed matrix has data. */
void qt_mix24_open(struct qt_mix24 *out, const struct qt_packed *p);

/* Bits per code of a slot. */
unsigned qt_mix24_bits(const struct qt_mix24 *m, size_t slot);

/* Packs and unpacks groups[slots] of a strip; `strip` has strip_bytes bytes, 16-byte aligned. */
void qt_mix24_pack(unsigned char *strip, const struct qt_mix24 *m,
                   const struct qt_mix24_group *groups);
void qt_mix24_unpack(struct qt_mix24_group *groups, const struct qt_mix24 *m,
                     const unsigned char *strip);

static inline unsigned char *qt_mix24_strip(const struct qt_mix24 *m, size_t strip)
{
    return m->stream + strip * m->strip_bytes;
}

/* The channel of packed column `col`; k or more for padding. */
static inline size_t qt_mix24_channel(const struct qt_mix24 *m, size_t col)
{
    uint16_t group = m->perm[col / m->g];
    return group == QT_MIX24_NO_GROUP ? SIZE_MAX : group * m->g + col % m->g;
}

/* CSR entries of a row in one panel: [*first, *end). */
static inline void qt_mix24_row(size_t *first, size_t *end, const struct qt_mix24 *m, size_t panel,
                                size_t row)
{
    *first = m->csr_ptr[panel * (m->n + 1) + row];
    *end = m->csr_ptr[panel * (m->n + 1) + row + 1];
}

/* scheme->check_values and scheme->repack_equal. */
int qt_mix24_check_values(const struct qt_packed *p, struct qt_err *err);
bool qt_mix24_repack_equal(const struct qt_packed *p, const struct qt_strip *strip);

/* scheme->prepare: section perm, the structure of the CSR matrix, scale_exp2. importance[k]: cost
 * of a squared error per channel; NULL: 1. */
size_t qt_mix24_prepare_bytes(const struct qt_packed *p);
int qt_mix24_prepare(struct qt_packed *p, const struct qt_matrix *w, const struct qt_copy *on,
                     const float *importance, struct qt_err *err);

size_t qt_mix24_scratch_bytes(const struct qt_packed *p);
void qt_mix24_quantize(const struct qt_packed *p, const struct qt_strip *strip, const float *w,
                       const float *importance);
int qt_mix24_solve(struct qt_solve_report *out, struct qt_packed *p, const float *w,
                   const struct qt_factor *f, const struct qt_solve_options *opt,
                   struct qt_err *err);

/* scheme->rounds_on, scheme->round_begin, scheme->round_end and scheme->pack. */
bool qt_mix24_rounds_on(const struct qt_packed *p);
int qt_mix24_round_begin(void **state, struct qt_packed *p, const struct qt_factor *f,
                         struct qt_round *job, struct qt_err *err);
void qt_mix24_round_end(void *state, struct qt_packed *p, bool done);
int qt_mix24_pack_codes(struct qt_packed *p, const struct qt_codes *codes, struct qt_err *err);

extern const struct qt_learnable qt_mix24_learnable;

#endif
