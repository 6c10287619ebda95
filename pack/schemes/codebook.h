/*
 * What fpx, lut and int share (private to pack/): w = s * value[code], one scale s per row and
 * group, codes in the fragment layout; or, asymmetric, w = s * (code - z) with a zero z per row and
 * group as well. A scheme that is a codebook provides a description, and takes its strip functions
 * from here.
 */
#ifndef QT_PACK_SCHEMES_CODEBOOK_H
#define QT_PACK_SCHEMES_CODEBOOK_H

#include "pack/schemes/scheme.h"

struct qt_codebook {
    unsigned bits;
    size_t group; /* channels per scale; k for one per row */
    enum qt_frag_order order;
    bool search;         /* scale by search instead of absmax */
    unsigned multiples;  /* 0; or scales are 1..multiples times one of the row */
    bool asymmetric;     /* value[code] = code; each group has its own zero, a code */
    float value[256];    /* by code */
    uint8_t zero;        /* the code of zero, or of the value nearest to it: padding */
    struct qt_grid grid; /* the same values for rowops; asymmetric: as with zero 0 */
};

/* The parameters of one group of a row, as stored. */
struct qt_codebook_group {
    uint16_t scale; /* FP16 bits, or the multiple of the row's */
    uint8_t zero;   /* 0 unless asymmetric */
};

/* Codes and parameters of some rows, a row in a column of its own. */
struct qt_codebook_codes {
    uint8_t *code;   /* [k][stride] */
    uint16_t *scale; /* [groups][stride] */
    uint8_t *zero;   /* [groups][stride] */
    uint16_t *unit;  /* [stride] FP16 bits of the rows' scales, for multiples */
    size_t stride;
};

/* Sets grid, midpoints and zero from an ascending table. */
void qt_codebook_set_table(struct qt_codebook *cb, const float *table);

/* Sections plane0.., scale, sub if there are multiples, and zero if asymmetric; the caller adds its
 * own after them. */
int qt_codebook_describe(struct qt_packed *p, const struct qt_codebook *cb, struct qt_err *err);
/* scheme->describe of a scheme that has no others. */
int qt_codebook_describe_all(struct qt_packed *p, struct qt_err *err);
/* scheme->unit_scale: the largest weight has the largest value. */
double qt_codebook_unit_scale(const struct qt_packed *p);

/* The scale of a row of which groups have multiples: FP16 bits; 1 without. */
uint16_t qt_codebook_unit(const struct qt_codebook *cb, const struct qt_rowops *ops, const float *w,
                          size_t k);
/* A group's scale. unit: of its row. */
float qt_codebook_scale(const struct qt_codebook *cb, uint16_t scale, uint16_t unit);
/* The storable scale nearest to s; `instead` where it would be infinite. */
uint16_t qt_codebook_nearest_scale(const struct qt_codebook *cb, float s, uint16_t unit,
                                   uint16_t instead);

/* Best parameters for one group by cb->search or absmax. w[n] is divided by 2^scale_exp2 already,
 * so that neither scales nor squared errors leave their range. */
struct qt_codebook_group qt_codebook_fit(const struct qt_codebook *cb, const struct qt_rowops *ops,
                                         const float *w, const float *h, size_t n, uint16_t unit);
/* 1 / scale, or 0 where there is none: such a group decodes to (nearly) nothing. */
float qt_codebook_inverse(float scale);
/* The grid of a group with this zero. */
struct qt_grid qt_codebook_grid(const struct qt_codebook *cb, uint8_t zero);

/* Packs codes and parameters of the strip's rows. */
void qt_codebook_store(const struct qt_packed *p, const struct qt_codebook *cb,
                       const struct qt_strip *strip, const struct qt_codebook_codes *codes);

/* Codes and scales by qt_solve; w[n][k] divided by 2^scale_exp2. */
int qt_codebook_solve(struct qt_solve_report *out, struct qt_packed *p, const float *w,
                      const struct qt_factor *f, const struct qt_solve_options *opt,
                      struct qt_err *err);

/* The strip functions of struct qt_scheme. */
size_t qt_codebook_scratch_bytes(const struct qt_packed *p);
void qt_codebook_quantize(const struct qt_packed *p, const struct qt_strip *strip, const float *w,
                          const float *importance);
void qt_codebook_decode(float *w, const struct qt_packed *p, const struct qt_strip *strip);
bool qt_codebook_repack_equal(const struct qt_packed *p, const struct qt_strip *strip);
#define QT_CODEBOOK_STRIPS                                                                         \
    .scratch_bytes = qt_codebook_scratch_bytes, .quantize = qt_codebook_quantize,                  \
    .solve = qt_codebook_solve, .decode = qt_codebook_decode,                                      \
    .repack_equal = qt_codebook_repack_equal
int qt_codebook_check_values(const struct qt_packed *p, struct qt_err *err);
/* The scales, in stored order; zeros stay. */
extern const struct qt_learnable qt_codebook_learnable;

#endif
