/*
 * mix24 (private to pack/): 2 and 4 bits inside one weight matrix, 16-bit outliers apart.
 *
 *   mix24.c           the scheme: parameters, sections, decoding
 *   mix24_pack.c      groups <-> packed bytes (layout_mix24.h), and what stored bytes must satisfy
 *   mix24_choose.c    before any code: which groups get 4 bits, which weights are outliers
 *   mix24_fit.c       parameters and codes of one group of 16 rows; built per instruction set
 *   mix24_quantize.c  all groups of a matrix: under a Hessian, or strip by strip without
 */
#ifndef QT_PACK_MIX24_H
#define QT_PACK_MIX24_H

#include "pack/layout_mix24.h"
#include "pack/scheme.h"

enum qt_mix24_sens { QT_MIX24_SENS_GAIN, QT_MIX24_SENS_OBS, QT_MIX24_SENS_PAPER };
enum qt_mix24_order { QT_MIX24_TWOS_FIRST, QT_MIX24_BY_ACTIVITY, QT_MIX24_NATURAL };

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
 * One group in 16 rows: w = s (code - zero), s = (q + z2) s2. The parameters and codes of a matrix
 * are struct qt_mix24_group[strips][slots].
 */
struct qt_mix24_group {
    uint16_t s2[2]; /* FP16, by half of the strip; equal for g2 = 16 */
    uint8_t z2[2];
    uint8_t q[QT_FRAG_ROWS], zero[QT_FRAG_ROWS];
    uint8_t code[16][QT_FRAG_ROWS]; /* [channel][row] */
};

static inline float qt_mix24_scale(const struct qt_mix24_group *group, size_t row)
{
    size_t half = row / 8;
    return (float)(group->q[row] + group->z2[half]) * qt_f16_to_f32(group->s2[half]);
}

/* A packed matrix, taken apart: sizes, and where its sections are (NULL where left out). */
struct qt_mix24 {
    size_t n, k, g;
    size_t strips, groups; /* of 16 rows; of g channels, the last possibly short */
    struct qt_mix24_slots slots;
    size_t halves;             /* 16 / g2 */
    size_t units, b_words;     /* of streams A and B per strip (and lane) */
    size_t triples, pairs;     /* meta and meta4 words per row */
    size_t panels, outliers;   /* of 64 Ki columns; entries of the CSR */
    uint32_t *a, *b, *csr_ptr; /* csr_ptr [panels][n + 1] */
    uint16_t *meta, *meta4, *s2, *z2, *perm, *csr_col, *csr_val;
};

enum { QT_MIX24_PANEL = 65536 };

/* Sizes only (a packed matrix without data), or with sections. */
void qt_mix24_open(struct qt_mix24 *out, const struct qt_packed *p);

/* Bits per code, and the largest scale code, of slot p. */
unsigned qt_mix24_bits(const struct qt_mix24 *m, size_t slot);
unsigned qt_mix24_q_max(const struct qt_mix24 *m, size_t slot);

/* groups[slots] of a strip <-> its bytes in a, b, meta, meta4, s2, z2. Packing overwrites them. */
void qt_mix24_pack(const struct qt_mix24 *m, size_t strip, const struct qt_mix24_group *groups);
void qt_mix24_unpack(struct qt_mix24_group *groups, const struct qt_mix24 *m, size_t strip);

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

/* scheme->prepare: section perm and the CSR's structure. importance[k]: what a squared error of a
 * channel costs; NULL = 1. */
int qt_mix24_prepare(struct qt_packed *p, const struct qt_matrix *w, const float *importance,
                     struct qt_err *err);

size_t qt_mix24_scratch_bytes(const struct qt_packed *p);
void qt_mix24_quantize(const struct qt_packed *p, const struct qt_strip *strip, const float *w,
                       const float *importance);
int qt_mix24_solve(struct qt_solve_report *out, struct qt_packed *p, const float *w,
                   const struct qt_factor *f, const struct qt_solve_options *opt,
                   struct qt_err *err);

#endif
