/*
 * mix24 (private to pack/): 2 and 4 bits inside one weight matrix, 16-bit outliers apart.
 *
 *   mix24.c           the scheme: parameters, sections, decoding
 *   mix24_pack.c      sizes, groups <-> packed bytes (layout_mix24.h), checks of stored bytes
 *   mix24_choose.c    before any code: which groups get 4 bits, which weights are outliers
 *   mix24_fit.c       parameters and codes of one group of 16 rows; built per instruction set
 *   mix24_quantize.c  all groups of a matrix: under a Hessian, or strip by strip without
 *   mix24_learn.c     scales, zeros and outliers as parameters that can be tuned
 */
#ifndef QT_PACK_SCHEMES_MIX24_MIX24_H
#define QT_PACK_SCHEMES_MIX24_MIX24_H

#include "pack/layouts/layout_mix24.h"
#include "pack/schemes/scheme.h"

enum qt_mix24_sens { QT_MIX24_SENS_GAIN, QT_MIX24_SENS_OBS, QT_MIX24_SENS_PAPER };
enum qt_mix24_order {
    QT_MIX24_TWOS_FIRST,
    QT_MIX24_BY_ACTIVITY,
    QT_MIX24_NATURAL,
    QT_MIX24_NO_FEEDBACK, /* nor polishing: the Hessian only weighs */
};

/* How a matrix is quantized; paper=1 decides some of it. */
struct qt_mix24_recipe {
    enum qt_mix24_sens sens;
    enum qt_mix24_order order;
    bool local;           /* the best of each four neighbours, instead of the best of all groups */
    bool outliers_by_abs; /* else by what leaving one out gains */
    bool search;          /* scales and zeros of least error, instead of min-max */
    int polish;           /* rounds under H after error feedback */
};
struct qt_mix24_recipe qt_mix24_recipe(const struct qt_spec *spec);

/*
 * One group in 16 rows. The parameters and codes of a matrix are struct qt_mix24_group
 * [strips][slots]. With s = (q + z2) s2 2^-22 a weight is, divided by 2^scale_exp2,
 *
 *     f16(code s - f16(zero s)),    which is (code - zero) s
 *
 * unless s is so small (less than 2^-9 of the largest that FP16 has room for) that FP16's last
 * subnormal bit, 2^-24, is too coarse: s2 has four significant bits in a 2-bit group and two in a
 * 4-bit group, so that all of the products fit in 11.
 */
struct qt_mix24_group {
    uint16_t s2[2]; /* FP16, by half of the strip; equal for g2 = 16 */
    uint8_t z2[2];
    uint8_t q[QT_FRAG_ROWS], zero[QT_FRAG_ROWS];
    uint8_t code[16][QT_FRAG_ROWS]; /* [channel][row] */
};

#define QT_MIX24_S2_UNIT 0x1p-22f
enum {
    QT_MIX24_Q_MAX = 15,
    QT_MIX24_S2_MASK = 0x7f80,   /* bits of FP16 that are stored; */
    QT_MIX24_S2_FINE = 0x0080,   /* the step between s2 of 2-bit groups, */
    QT_MIX24_S2_COARSE = 0x0200, /* and of 4-bit groups */
    QT_MIX24_SIGMA_MAX = 65504,  /* (q + z2) s2: the largest number of FP16 */
};

static inline float qt_mix24_scale(const struct qt_mix24_group *group, size_t row)
{
    size_t half = row / 8;
    return (float)(group->q[row] + group->z2[half]) *
           (qt_f16_to_f32(group->s2[half]) * QT_MIX24_S2_UNIT);
}

/* The weight of a code. For |x| < 1/4 FP16 rounds what does not fit to multiples of 2^-24, and so
 * does adding 3/4 in FP32. */
static inline float qt_mix24_value(float code, float zero, float s)
{
    const float magic = 0.75f;
    float offset = (zero * s + magic) - magic;
    return (code * s - offset + magic) - magic;
}

/* A packed matrix, taken apart: sizes, and where its sections are (NULL where left out). */
struct qt_mix24 {
    size_t n, k, g;
    size_t strips, groups; /* of 16 rows; of g channels, the last possibly short */
    struct qt_mix24_units units;
    size_t slots;            /* 128 / g in a unit */
    size_t strip_bytes;      /* of stream */
    size_t panels, outliers; /* of 64 Ki packed columns; entries of the CSR */
    unsigned char *stream;
    uint32_t *csr_ptr; /* [panels][n + 1] */
    uint16_t *perm, *csr_col, *csr_val;
};

enum { QT_MIX24_PANEL = 65536 };

/* Sizes only (a packed matrix without data), or with sections. */
void qt_mix24_open(struct qt_mix24 *out, const struct qt_packed *p);

/* Bits per code of slot p. */
unsigned qt_mix24_bits(const struct qt_mix24 *m, size_t slot);

/* groups[slots] of a strip <-> its bytes at `strip` (strip_bytes of them, 16-byte aligned). */
void qt_mix24_pack(unsigned char *strip, const struct qt_mix24 *m,
                   const struct qt_mix24_group *groups);
void qt_mix24_unpack(struct qt_mix24_group *groups, const struct qt_mix24 *m,
                     const unsigned char *strip);

static inline unsigned char *qt_mix24_strip(const struct qt_mix24 *m, size_t strip)
{
    return m->stream + strip * m->strip_bytes;
}

/* The channel of packed column `col`; k or more where there is none. */
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

/* scheme->check_values, and whether a strip's bytes are what its groups give when packed. */
int qt_mix24_check_values(const struct qt_packed *p, struct qt_err *err);
bool qt_mix24_repack_equal(const struct qt_packed *p, const struct qt_strip *strip);

/* scheme->prepare: section perm, the CSR's structure, scale_exp2. importance[k]: what a squared
 * error of a channel costs; NULL = 1. */
size_t qt_mix24_prepare_bytes(const struct qt_packed *p);
int qt_mix24_prepare(struct qt_packed *p, const struct qt_matrix *w, const float *importance,
                     struct qt_err *err);

size_t qt_mix24_scratch_bytes(const struct qt_packed *p);
void qt_mix24_quantize(const struct qt_packed *p, const struct qt_strip *strip, const float *w,
                       const float *importance);
int qt_mix24_solve(struct qt_solve_report *out, struct qt_packed *p, const float *w,
                   const struct qt_factor *f, const struct qt_solve_options *opt,
                   struct qt_err *err);

extern const struct qt_learnable qt_mix24_learnable;

#endif
