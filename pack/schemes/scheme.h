/*
 * What a scheme is (private to pack/). Matrices are worked on in strips of 16 rows, the unit of the
 * packed layout, each by one thread; a strip's packed bytes depend on that strip alone.
 */
#ifndef QT_PACK_SCHEMES_SCHEME_H
#define QT_PACK_SCHEMES_SCHEME_H

#include "hessian/hessian.h"
#include "pack/layouts/frag.h"
#include "pack/pack.h"
#include "pack/schemes/rowops.h"

/* How codes are found; the parameter that every scheme has. */
enum qt_method { QT_METHOD_AUTO, QT_METHOD_RTN, QT_METHOD_SEARCH, QT_METHOD_GPTQ };
extern const char *const qt_method_names[];
#define QT_PARAM_METHOD                                                                            \
    {                                                                                              \
        "method", QT_PARAM_CHOICE, QT_METHOD_AUTO, 0, 0, qt_method_names,                          \
            "rtn: absmax scales; search: scales of least squared error; gptq: error feedback "     \
            "under the Hessian of calibration data; auto: gptq with data, search without"          \
    }
enum qt_method qt_spec_method(const struct qt_spec *spec);
/* The same scheme by another method. */
void qt_spec_set_method(struct qt_spec *spec, enum qt_method method);

/* Whether the continuous parameters are tuned afterwards; of every scheme that has a
 * struct qt_learnable. */
#define QT_PARAM_LEARN                                                                             \
    {                                                                                              \
        "learn", QT_PARAM_FLAG, 0, 0, 1, NULL,                                                     \
            "1: tune the scales through the model on calibration data (--learn)"                   \
    }
bool qt_spec_learns(const struct qt_spec *spec);

struct qt_codebook;

struct qt_strip {
    size_t index;  /* rows 16 * index ... */
    size_t rows;   /* 1..16 logical rows */
    void *scratch; /* scheme->scratch_bytes(p), 64-byte aligned, one per thread */
};

/*
 * The continuous parameters of a packed matrix (scales), for learning: `count` of them per strip,
 * in an order of the scheme's own. What padding has no use for may be anything with unit 0.
 */
struct qt_learnable {
    size_t (*count)(const struct qt_packed *p);
    /* Stored values, and the size of each: steps are in these units. */
    void (*get)(float *value, float *unit, const struct qt_packed *p, const struct qt_strip *strip);
    /* Stores values, rounded; codes stay. A value that cannot be stored leaves the old one. */
    void (*put)(const struct qt_packed *p, const struct qt_strip *strip, const float *value);
    /* grad[count] = dL/dvalue of dw[rows][k] = dL/dW. */
    void (*grad)(float *grad, const struct qt_packed *p, const struct qt_strip *strip,
                 const float *dw);
    /* Codes nearest to w[rows][k] (divided by 2^scale_exp2) under the stored parameters. */
    void (*recode)(const struct qt_packed *p, const struct qt_strip *strip, const float *w);
};

struct qt_scheme {
    const char *name, *help;
    const struct qt_preset *presets; /* ends with name = NULL */
    const struct qt_param *params;   /* ends with key = NULL */

    bool needs_data; /* qt_scheme_needs_data */
    /* Parameters that contradict each other: QT_E_USAGE. */
    int (*check_spec)(const struct qt_spec *spec, struct qt_err *err);
    /* Parameters that are not at their defaults and that others leave without effect: QT_E_USAGE.
     * Not asked of containers. NULL: there are none. */
    int (*check_unused)(const struct qt_spec *spec, struct qt_err *err);
    /* Fills layout and section[] (no data) for p->spec, p->n, p->k. */
    int (*describe)(struct qt_packed *p, struct qt_err *err);
    size_t (*scratch_bytes)(const struct qt_packed *p);
    /* Bits per weight as the scheme's publication counts them; NULL: as they are. */
    double (*paper_bpw)(const struct qt_packed *p);
    /* The usual scale of a group with absmax 1: for choosing scale_exp2. */
    double (*unit_scale)(const struct qt_packed *p);
    /* Channels that share a scale (k for one scale per row). */
    size_t (*group)(const struct qt_packed *p);
    /* Importance under a Hessian is 1 / [H^-1]_jj, what an error costs when the channels after it
     * may make up for it, instead of H_jj. */
    bool conditional;
    /* Rounds of polishing that the spec asks for; NULL: 6. */
    int (*polish)(const struct qt_spec *spec);
    /* Whole-matrix preparation before strips: tables, what is global. NULL if there is none. */
    int (*prepare)(struct qt_packed *p, const struct qt_matrix *w, const float *importance,
                   struct qt_err *err);
    /* What that takes, beside p's sections. NULL: nothing to speak of. */
    size_t (*prepare_bytes)(const struct qt_packed *p);
    /* w[rows][k], already divided by 2^scale_exp2, -> packed bytes of the strip (the sections'
     * data; p itself does not change, as several threads work on it). */
    void (*quantize)(const struct qt_packed *p, const struct qt_strip *strip, const float *w,
                     const float *importance);
    /* w[n][k], divided likewise, under a Hessian -> packed bytes of the whole matrix. */
    int (*solve)(struct qt_solve_report *out, struct qt_packed *p, const float *w,
                 const struct qt_factor *f, const struct qt_solve_options *opt, struct qt_err *err);
    /* packed bytes -> w[rows][k]. */
    void (*decode)(float *w, const struct qt_packed *p, const struct qt_strip *strip);
    /* True when unpacking and packing gives the strip's bytes again. */
    bool (*repack_equal)(const struct qt_packed *p, const struct qt_strip *strip);
    /* Codebook schemes (codebook.h) describe their values here; NULL for others. */
    void (*codebook)(struct qt_codebook *out, const struct qt_packed *p);
    /* Stored values within what the scheme allows; reason into err. */
    int (*check_values)(const struct qt_packed *p, struct qt_err *err);
    const struct qt_learnable *learnable; /* NULL: nothing to learn */
};

/* Rows [row0, row0 + rows) of a source matrix as FP32, times 2^exp2: dst[rows][k]. */
void qt_matrix_rows(float *dst, const struct qt_matrix *w, size_t row0, size_t rows, int exp2);

/* key=value,... into value[] by index into params; *set: those given, each once and none that is in
 * `fixed`. QT_E_USAGE. */
int qt_params_parse(double *value, unsigned *set, const struct qt_param *params, unsigned fixed,
                    const char *text, struct qt_err *err);
/* Appends "key=value,..." of all parameters not in `fixed`, `separator` in front of the first. */
void qt_params_text(char *buf, size_t size, char separator, const struct qt_param *params,
                    const double *value, unsigned fixed);

/* Parameter value by key; the key must exist. */
double qt_spec_value(const struct qt_spec *spec, const char *key);

/* Appends a section; sizes checked. */
int qt_packed_add_section(struct qt_packed *p, const char *name, enum qt_dtype dtype, int ndim,
                          const size_t *shape, struct qt_err *err);
/* NULL when the scheme has no such section. */
const struct qt_section *qt_packed_section(const struct qt_packed *p, const char *name);

/* arrange.c: sections col_order, col_exp2, row_order, row_exp2, which a scheme may have. */
int qt_arrange_describe(struct qt_packed *p, struct qt_err *err);
void qt_arrange_store(struct qt_packed *p, const struct qt_arrange *a);
int qt_arrange_check(const struct qt_packed *p, struct qt_err *err);
bool qt_arrange_is_there(const struct qt_packed *p);
/* Between row r in source columns and as stored; dst is not src. */
void qt_arrange_row(float *dst, const struct qt_packed *p, const float *src, size_t r);
void qt_arrange_restore_row(float *dst, const struct qt_packed *p, const float *src, size_t r);
/* Sums over tokens of products of channels, to stored channels: dst[k][k] full from the lower
 * triangle of h, or from all of a matrix that is not symmetric. */
void qt_arrange_gram(double *dst, const double *h, const struct qt_act *a);
void qt_arrange_cross(float *dst, const float *c, const struct qt_act *a);
/* Columns only, of c[n][k]. */
void qt_arrange_columns(float *dst, const float *c, size_t n, const struct qt_act *a);

/* act.c: what rows [first, first + n) of a weight are divided by where they are stored, 1 without
 * such: factor[n], in the order of the source. */
int qt_act_row_factors(float *factor, const struct qt_container *c, const char *weight,
                       size_t first, size_t n, struct qt_err *err);
/* act.c: the input of an entry of a container. */
int qt_act_open(struct qt_act *out, const struct qt_container *c, const struct qt_entry *e,
                struct qt_err *err);

extern const struct qt_scheme qt_scheme_fpx, qt_scheme_lut, qt_scheme_int, qt_scheme_mix24,
    qt_scheme_w4ax;

#endif
