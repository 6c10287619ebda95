/*
 * Interface of a scheme (private to pack/). Matrices are processed in strips of 16 rows, the unit
 * of the packed layouts, each by one thread. The packed bytes of a strip depend on that strip
 * alone.
 */
#ifndef QT_PACK_SCHEMES_SCHEME_H
#define QT_PACK_SCHEMES_SCHEME_H

#include "hessian/hessian.h"
#include "pack/layouts/frag.h"
#include "pack/pack.h"
#include "pack/schemes/rowops.h"

/* How codes are found; a parameter of every scheme. */
enum qt_method { QT_METHOD_AUTO, QT_METHOD_RTN, QT_METHOD_SEARCH, QT_METHOD_GPTQ };
extern const char *const qt_method_names[];
#define QT_PARAM_METHOD                                                                            \
    {                                                                                              \
        "method", QT_PARAM_CHOICE, QT_METHOD_AUTO, 0, 0, qt_method_names,                          \
            "rtn: absmax scales; search: least-squares scales; gptq: error compensation under "    \
            "the Hessian of calibration data; auto: gptq with data, search without"                \
    }
enum qt_method qt_spec_method(const struct qt_spec *spec);
/* Changes the method and the canonical text. */
void qt_spec_set_method(struct qt_spec *spec, enum qt_method method);

/* Whether the continuous parameters are tuned after rounding; a parameter of every scheme with a
 * struct qt_learnable. */
#define QT_PARAM_LEARN                                                                             \
    {                                                                                              \
        "learn", QT_PARAM_FLAG, 0, 0, 1, NULL,                                                     \
            "1: tune the scales through the model on calibration data (--learn)"                   \
    }
bool qt_spec_learns(const struct qt_spec *spec);

struct qt_codebook;

/* A matrix in backend memory: [n][k]. */
struct qt_copy {
    struct qt_backend *be;
    const float *w;
};

/* Codes and parameters of some rows, one column per row. */
struct qt_codes {
    uint8_t *code;       /* [k][stride] */
    uint16_t *scale;     /* [groups][stride] */
    uint8_t *zero;       /* [groups][stride] */
    uint16_t *row_scale; /* [stride] FP16 bits of the rows' scales, for multiples */
    uint16_t *shared;    /* [strips][groups][2] mix24: s2 and z2 of the halves of a strip */
    size_t stride;
};
/* Without row_scale and shared. */
int qt_codes_new(struct qt_codes **out, const struct qt_packed *p, struct qt_err *err);
void qt_codes_free(struct qt_codes *codes);

struct qt_strip {
    size_t index;  /* first row is 16 * index */
    size_t rows;   /* 1 to 16 logical rows */
    void *scratch; /* scheme->scratch_bytes(p) bytes, 64-byte aligned, one per thread */
};

/*
 * The continuous parameters of a packed matrix (scales, zero-points), for learning: `count` of them
 * per strip, in an order that the scheme defines. Entries for padding have unit 0.
 */
struct qt_learnable {
    size_t (*count)(const struct qt_packed *p);
    /* Stored values, and the step unit of each. */
    void (*get)(float *value, float *unit, const struct qt_packed *p, const struct qt_strip *strip);
    /* Stores rounded values; codes stay. A value that cannot be stored leaves the old one. */
    void (*put)(const struct qt_packed *p, const struct qt_strip *strip, const float *value);
    /* grad[count] = dL/dvalue from dw[rows][k] = dL/dW. */
    void (*grad)(float *grad, const struct qt_packed *p, const struct qt_strip *strip,
                 const float *dw);
    /* Rounds w[rows][k] (divided by 2^scale_exp2) to codes under the stored parameters. */
    void (*recode)(const struct qt_packed *p, const struct qt_strip *strip, const float *w);
    /* The index of the scale of a group in row 0 to 15 of a strip, if all parameters are the scales
     * of the codes that qt_packed_codes gives; else NULL. */
    size_t (*scale_at)(size_t row, size_t group);
};

enum { QT_PARAM_ABSENT = -1 };

struct qt_scheme {
    const char *name, *help;
    const struct qt_preset *presets; /* ends with name = NULL */
    const struct qt_param *params;   /* ends with key = NULL */
    /* Key of a parameter that containers of format version 1 lack: its value is then
     * QT_PARAM_ABSENT. NULL if there is none. */
    const char *added_param;

    bool needs_data; /* see qt_scheme_needs_data */
    /* QT_E_USAGE if parameters contradict each other. */
    int (*check_spec)(const struct qt_spec *spec, struct qt_err *err);
    /* QT_E_USAGE if parameters that are not at their defaults have no effect. Not used for
     * containers. May be NULL. */
    int (*check_unused)(const struct qt_spec *spec, struct qt_err *err);
    /* Sets layout and section[] (without data) for p->spec, p->n, p->k. */
    int (*describe)(struct qt_packed *p, struct qt_err *err);
    size_t (*scratch_bytes)(const struct qt_packed *p);
    /* Bits per weight as the scheme's publication counts them; NULL: the stored bits. */
    double (*paper_bpw)(const struct qt_packed *p);
    /* Typical scale of a group with absmax 1, for choosing scale_exp2. */
    double (*unit_scale)(const struct qt_packed *p);
    /* If not 0: scale_exp2 is chosen so that the largest magnitude of a group, divided by
     * 2^scale_exp2, is in [2^(e-1), 2^e). NULL or 0: only where scales would leave FP16. */
    int (*scale_exponent)(const struct qt_packed *p);
    /* Channels that share a scale (k for one scale per row). */
    size_t (*group)(const struct qt_packed *p);
    /* Importance under a Hessian is 1 / [H^-1]_jj, the cost of an error that later channels
     * compensate, instead of H_jj. */
    bool conditional;
    /* Rounds of coordinate descent; NULL: 6. */
    int (*descent_rounds)(const struct qt_spec *spec);
    /* Preparation of the whole matrix before strips: tables. on: NULL, or where w is in backend
     * memory; w->data is NULL then. The function may be NULL. */
    int (*prepare)(struct qt_packed *p, const struct qt_matrix *w, const struct qt_copy *on,
                   const float *importance, struct qt_err *err);
    /* Memory that prepare takes besides the sections. NULL: negligible. */
    size_t (*prepare_bytes)(const struct qt_packed *p);
    /* w[rows][k], divided by 2^scale_exp2, -> packed bytes of the strip in the sections' data. p
     * itself is shared by threads and does not change. */
    void (*quantize)(const struct qt_packed *p, const struct qt_strip *strip, const float *w,
                     const float *importance);
    /* w[n][k], divided by 2^scale_exp2, under a Hessian -> packed bytes of the whole matrix. *out
     * has no `before`. */
    int (*solve)(struct qt_solve_report *out, struct qt_packed *p, const float *w,
                 const struct qt_factor *f, const struct qt_solve_options *opt, struct qt_err *err);
    /* True if round_begin can be used. NULL: never. */
    bool (*rounds_on)(const struct qt_packed *p);
    /* The same on a backend, with codes that are left in p->codes, in two steps, between which the
     * backend does the job. The caller has set w, divided by 2^scale_exp2, and how it is rounded:
     * the arguments of the job that do not depend on the scheme. f is NULL without a Hessian.
     * *state: what belongs to the job; the caller passes it to round_end, also on failure.
     * round_end frees it, and takes the results over if the job is done. */
    int (*round_begin)(void **state, struct qt_packed *p, const struct qt_factor *f,
                       struct qt_round *job, struct qt_err *err);
    void (*round_end)(void *state, struct qt_packed *p, bool done);
    /* Packs these codes into the sections of p. */
    int (*pack)(struct qt_packed *p, const struct qt_codes *codes, struct qt_err *err);
    /* packed bytes -> w[rows][k]. */
    void (*decode)(float *w, const struct qt_packed *p, const struct qt_strip *strip);
    /* True if unpacking and packing reproduces the strip's bytes. */
    bool (*repack_equal)(const struct qt_packed *p, const struct qt_strip *strip);
    /* Describes the values of a codebook scheme (codebook.h); NULL for other schemes. */
    void (*codebook)(struct qt_codebook *out, const struct qt_packed *p);
    /* QT_E_INPUT with a reason if stored values are outside the ranges of the scheme. */
    int (*check_values)(const struct qt_packed *p, struct qt_err *err);
    const struct qt_learnable *learnable; /* NULL: nothing to learn */
};

/* Rows [row0, row0 + rows) of a source matrix as FP32, times 2^exp2: dst[rows][k]. */
void qt_matrix_rows(float *dst, const struct qt_matrix *w, size_t row0, size_t rows, int exp2);

/* Parses key=value,... into value[], indexed as params. *set: bits of the parameters that were
 * given. QT_E_USAGE if one is given twice or is in `fixed`. */
int qt_params_parse(double *value, unsigned *set, const struct qt_param *params, unsigned fixed,
                    const char *text, struct qt_err *err);
/* Appends "key=value,..." of all parameters not in `fixed`, with `separator` in front of the
 * first. */
void qt_params_text(char *buf, size_t size, char separator, const struct qt_param *params,
                    const double *value, unsigned fixed);

/* packed.c: adds n weights w and their dequantized values q, or all of another sum. */
void qt_error_add_row(struct qt_error *e, const float *w, const float *q, size_t n);
void qt_error_add(struct qt_error *e, const struct qt_error *more);

/* Value of a parameter; the key must exist. */
double qt_spec_value(const struct qt_spec *spec, const char *key);

/* Appends a section. QT_E_UNSUPPORTED if its size overflows. */
int qt_packed_add_section(struct qt_packed *p, const char *name, enum qt_dtype dtype, int ndim,
                          const size_t *shape, struct qt_err *err);
/* NULL if the scheme has no such section. */
const struct qt_section *qt_packed_section(const struct qt_packed *p, const char *name);

/* activations/arrange.c: the optional sections col_order, col_exp2, row_order, row_exp2. */
int qt_arrange_describe(struct qt_packed *p, struct qt_err *err);
void qt_arrange_store(struct qt_packed *p, const struct qt_arrange *a);
int qt_arrange_check(const struct qt_packed *p, struct qt_err *err);
bool qt_is_arranged(const struct qt_packed *p);
/* Row r from source columns to stored columns, and back; dst must not be src. restore_row changes
 * src. */
void qt_arrange_row(float *dst, const struct qt_packed *p, const float *src, size_t r);
void qt_arrange_restore_row(float *dst, const struct qt_packed *p, float *src, size_t r);
/* The same for all rows in backend memory, with the row order: t[n][k] are the stored rows of
 * w[n][k], and back. */
int qt_arrange_on(struct qt_backend *be, float *t, const float *w, const struct qt_packed *p,
                  struct qt_err *err);
int qt_arrange_restore_on(struct qt_backend *be, float *w, const float *t,
                          const struct qt_packed *p, struct qt_err *err);

/* activations/rotate.c: rotates the channel blocks of x[k]; a second call restores x. */
void qt_rotate(float *x, size_t k);

/* activations/act.c: divisors of stored rows [first, first + n) of a weight, 1 if there are none:
 * factor[n], in source order. */
int qt_act_row_factors(float *factor, const struct qt_container *c, const char *weight,
                       size_t first, size_t n, struct qt_err *err);
/* activations/act.c: the quantized input of a container entry. */
int qt_act_open(struct qt_act *out, const struct qt_container *c, const struct qt_entry *e,
                struct qt_err *err);

extern const struct qt_scheme qt_scheme_fpx, qt_scheme_lut, qt_scheme_int, qt_scheme_mix24,
    qt_scheme_w4ax;

#endif
