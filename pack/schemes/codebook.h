/*
 * Common part of fpx, lut, int and w4ax (private to pack/). Codes are in the fragment layout
 * (layouts/layout_frag.h). A weight is
 *
 *     w = s * value[code]              one scale s per row and group
 *     w = s * (code - z)               asymmetric: one zero-point z per row and group as well
 *
 * A codebook scheme provides a description of its values and takes its strip functions from here.
 */
#ifndef QT_PACK_SCHEMES_CODEBOOK_H
#define QT_PACK_SCHEMES_CODEBOOK_H

#include "pack/schemes/scheme.h"

struct qt_codebook {
    unsigned bits;
    size_t group; /* channels per scale; k for one per row */
    enum qt_frag_order order;
    bool pairs;  /* K is padded to an even number of fragment blocks */
    bool search; /* search for the scale instead of absmax */
    enum qt_scales scales;
    unsigned multiples;  /* 0, or: scales are 1..multiples times a scale per row */
    bool asymmetric;     /* value[code] = code; each group has a zero-point, which is a code */
    float value[256];    /* by code */
    uint8_t zero_code;   /* code whose value is nearest to 0: padding */
    struct qt_grid grid; /* the same values for rowops; asymmetric: with zero-point 0 */
};

/* Stored parameters of one group of a row. */
struct qt_codebook_group {
    uint16_t scale; /* FP16 bits, or the multiple of the row's scale */
    uint8_t zero;   /* zero-point; 0 unless asymmetric */
};

/* Sets values, grid, midpoints and zero_code from an ascending table. */
void qt_codebook_set_table(struct qt_codebook *cb, const float *table);

/* Adds the sections plane0.., scale, sub (multiples only) and zero (asymmetric only). The caller
 * adds its own sections after them. */
int qt_codebook_describe(struct qt_packed *p, const struct qt_codebook *cb, struct qt_err *err);
/* scheme->describe of a scheme without further sections. */
int qt_codebook_describe_all(struct qt_packed *p, struct qt_err *err);
/* scheme->unit_scale: maps the largest weight to the largest value. */
double qt_codebook_unit_scale(const struct qt_packed *p);

/* FP16 bits of a row's scale if groups have multiples of it; else of 1. */
uint16_t qt_codebook_row_scale(const struct qt_codebook *cb, const struct qt_rowops *ops,
                               const float *w, size_t k);
/* A group's scale as a number. */
float qt_codebook_scale(const struct qt_codebook *cb, uint16_t scale, uint16_t row_scale);
/* The value of E4M3FN nearest to s >= 0, ties to even; at most 448. */
float qt_nearest_e4m3(float s);
/* The storable scale nearest to s; `instead` if there is none: it is infinite, or s is not above 0
 * although scales must be. */
uint16_t qt_codebook_nearest_scale(const struct qt_codebook *cb, float s, uint16_t row_scale,
                                   uint16_t instead);

/* Best parameters of one group, by search or absmax (cb->search). w[n] is already divided by
 * 2^scale_exp2, so that scales and squared errors stay in range. */
struct qt_codebook_group qt_codebook_fit(const struct qt_codebook *cb, const struct qt_rowops *ops,
                                         const float *w, const float *h, size_t n,
                                         uint16_t row_scale);
/* The same values, scales and search for qt_backend.round. weighted: squared errors have weights.
 * Not for multiples. */
void qt_codebook_round_values(struct qt_round_values *out, const struct qt_codebook *cb,
                              bool weighted);
/* 1 / scale; 0 for scale 0, so that all codes round to the value nearest to 0. */
float qt_codebook_inverse(float scale);
/* The grid of a group with this zero-point. */
struct qt_grid qt_codebook_grid(const struct qt_codebook *cb, uint8_t zero);

/* Packs codes and parameters of the strip's rows. */
void qt_codebook_store(const struct qt_packed *p, const struct qt_codebook *cb,
                       const struct qt_strip *strip, const struct qt_codes *codes);

/* scheme->solve: codes and scales by qt_solve; w[n][k] divided by 2^scale_exp2. */
int qt_codebook_solve(struct qt_solve_report *out, struct qt_packed *p, const float *w,
                      const struct qt_factor *f, const struct qt_solve_options *opt,
                      struct qt_err *err);

/* Number of the sections that qt_codebook_describe adds. */
size_t qt_codebook_sections(const struct qt_codebook *cb);
/* *out = rows [first, end) of p as a matrix with sections in those of p. first: a multiple of
 * 16. */
void qt_codebook_rows(struct qt_packed *out, const struct qt_packed *p, size_t first, size_t end);
/* scheme->pack, scheme->round_begin and scheme->round_end. */
int qt_codebook_pack(struct qt_packed *p, const struct qt_codes *codes, struct qt_err *err);
bool qt_codebook_rounds_on(const struct qt_packed *p);
int qt_codebook_round_begin(void **state, struct qt_packed *p, const struct qt_factor *f,
                            struct qt_round *job, struct qt_err *err);
void qt_codebook_round_end(void *state, struct qt_packed *p, bool done);

/* The strip functions of struct qt_scheme. */
size_t qt_codebook_scratch_bytes(const struct qt_packed *p);
void qt_codebook_quantize(const struct qt_packed *p, const struct qt_strip *strip, const float *w,
                          const float *importance);
void qt_codebook_decode(float *w, const struct qt_packed *p, const struct qt_strip *strip);
bool qt_codebook_repack_equal(const struct qt_packed *p, const struct qt_strip *strip);
#define QT_CODEBOOK_STRIPS                                                                         \
    .scratch_bytes = qt_codebook_scratch_bytes, .quantize = qt_codebook_quantize,                  \
    .solve = qt_codebook_solve, .rounds_on = qt_codebook_rounds_on,                                \
    .round_begin = qt_codebook_round_begin, .round_end = qt_codebook_round_end,                    \
    .pack = qt_codebook_pack, .decode = qt_codebook_decode,                                        \
    .repack_equal = qt_codebook_repack_equal
int qt_codebook_check_values(const struct qt_packed *p, struct qt_err *err);
/* Learns the scales, in stored order; zero-points stay. */
extern const struct qt_learnable qt_codebook_learnable;

#endif
