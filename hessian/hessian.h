/*
 * hessian: second-order rounding of a weight matrix W[n][k]. Independent of the scheme: a callback
 * (struct qt_rounder) rounds the columns.
 *
 * The objective is, for each row w of W and its rounded values q,
 *     E(q) = (w - q) H (w - q)^T,    H = X^T X of the linear input X.
 *
 *   factor.c        H -> damped, ordered, factored (by cholesky.c)
 *   targets.c       targets that compensate for errors of the inputs (objective of GPTAQ, arXiv
 *                   2504.02692, and Qronos, arXiv 2505.11695) and of the hidden states
 *   solve.c         passes over the columns:
 *   compensate.c    GPTQ error compensation (arXiv 2210.17323), as Babai's nearest plane algorithm
 *   descent.c       then coordinate descent on the codes (QuantEase, arXiv 2309.01885) and
 *                   least-squares refits of the scales
 *   running_sums.c  the matrix products of both passes, on the CPU or on a backend
 *   error.c         E of given values
 */
#ifndef QT_HESSIAN_HESSIAN_H
#define QT_HESSIAN_HESSIAN_H

#include "base/base.h"

/* Damping of a factorization: as requested; raised until H was positive definite; or H could not be
 * factored with any damping. */
enum qt_damping { QT_DAMP_PLAIN, QT_DAMP_RAISED, QT_DAMP_FAILED };

/* H in processing order, factored. Position p of the processing order is column order[p]. */
struct qt_factor {
    size_t k, group_size;
    size_t *order;           /* [k]; the columns of a group are consecutive in it */
    size_t *group;           /* [k] group number at position p */
    float *diagonal;         /* [k] of h */
    float *inverse_diagonal; /* [k] of h^-1 in storage order; NULL: not wanted yet */
    float *h;                /* [k][k] damped H, symmetric, mean diagonal 1 */
    float *v;                /* [k][k] upper triangular, h = v v^T */
    /* The same in backend memory, or NULL. With a backend, h and v are NULL until
     * qt_factor_fetch. */
    float *backend_h, *backend_v;
    /* Corrections of the targets in storage order, or NULL: [k][k] and [n][k]. With a backend they
     * are in its memory. */
    float *input_correction, *output_correction;
    double input_shrink, output_shrink; /* factors applied to the corrections, 0 to 1 */
    double output_explained; /* by the correction without its factor: of the energy of the errors */
    double scale;            /* factor that made the mean diagonal of H 1 */
    double damp;             /* multiple of the mean diagonal that was added to the diagonal */
    size_t dead;             /* number of channels that are 0 for all tokens */
    struct qt_backend *backend; /* from the options; NULL: the CPU */
    bool sums_on_backend;       /* from the options */
    enum qt_damping damping;
};

struct qt_factor_options {
    double damp;          /* multiple of the mean diagonal to add; 0.01 is usual */
    size_t group;         /* columns that share a scale (the last group may be shorter) */
    bool storage_order;   /* process columns in storage order instead of by activity */
    const uint8_t *class; /* [groups] lower classes are processed first; NULL: one class */
    /* Computes large matrix products for the lifetime of the factor. NULL or a host backend: the
     * CPU. A factor takes 8 k^2 bytes of backend memory, 24 k^2 while it is made, and 4 k^2 for the
     * correction of input errors; rounding n rows takes 18 n k more. */
    struct qt_backend *backend;
    bool sums_on_backend; /* h, and `cross` of the corrections, are in backend memory */
};

/*
 * Factors h[k][k], the sum of x^T x times any positive factor; only the lower triangle is read.
 * Columns are processed from the most to the least active (largest diagonal first): groups by their
 * mean, then the columns within a group. Scales keep their storage order, so that a kernel needs no
 * gather. Channels with h_jj = 0 get the damping only.
 * QT_E_UNSUPPORTED if h has a non-finite entry, if all channels are 0, or if h cannot be factored
 * with damping up to 1; the caller then rounds without h and reports it.
 */
int qt_factor_new(struct qt_factor *out, const double *h, size_t k,
                  const struct qt_factor_options *opt, struct qt_err *err);
void qt_factor_free(struct qt_factor *f);
/* Copies h and v of a factor on a backend to the host, for qt_solve and callers that read them. */
int qt_factor_fetch(struct qt_factor *f, struct qt_err *err);
/* Factors the H of f in another order. Uses opt->storage_order and opt->class only; the damping and
 * the groups are those of f. h and v of *out are where those of f are, without corrections. */
int qt_factor_reorder(struct qt_factor *out, const struct qt_factor *f,
                      const struct qt_factor_options *opt, struct qt_err *err);
/* Sets f->inverse_diagonal, unless it is known. */
int qt_factor_invert_diagonal(struct qt_factor *f, struct qt_err *err);

/*
 * Input error correction. For each token let the row x [1][k] be the input that the quantized
 * matrix Q [n][k] will see, and z [1][k] that of the unquantized model. The matrix W + W S
 * minimizes the output error on x, with S [k][k] = C H^-1 and C = sum of (z - x)^T x:
 *     sum |z W^T - x Q^T|^2
 *         = trace((W + W S - Q) H (W + W S - Q)^T) + a term that does not depend on Q.
 * cross[k][k] is C in storage order, scaled like the h that f was made from. error_energy is
 * sum |z - x|^2. The part of it that the regression S explains is trace(C S^T).
 *
 * S is a regression on few tokens, so part of the explained error is chance. S is multiplied by the
 * James-Stein factor 1 - 2 k / (tokens - k) * unexplained / explained, at least 0; the 2 is there
 * because tokens of a text are not independent. (With 8 tokens per channel, S without this factor
 * made a model of 256 channels much worse.)
 */
int qt_factor_correct_input_error(struct qt_factor *f, const float *cross, double error_energy,
                                  size_t tokens, struct qt_err *err);
/*
 * Output error correction, for a matrix that does not share its input, instead of the above. Let
 * the row e [1][n] be what the outputs should make up for: (z - x) W^T, and if they are added to
 * hidden states, those of the unquantized model minus those of the quantized one (divided by the
 * output multiplier of the model, if it has one). W + T with T = D H^-1, D [n][k] = sum of e^T x,
 * minimizes the error of the sum. cross[n][k] is D; error_energy is sum |e|^2; T is shrunk like S.
 * Afterwards f is valid for that matrix only.
 */
int qt_factor_correct_output_error(struct qt_factor *f, const float *cross, size_t n,
                                   double error_energy, size_t tokens, struct qt_err *err);
/* w[n][k] += w S + T, without those corrections that f has not; w is in host memory, or in that of
 * the factor's backend. */
int qt_factor_targets(float *w, size_t n, const struct qt_factor *f, struct qt_err *err);
int qt_factor_targets_on_backend(float *w, size_t n, const struct qt_factor *f, struct qt_err *err);

/*
 * Callbacks by which a scheme rounds. Rows come in panels [row0, row0 + rows), rows <=
 * QT_PANEL_ROWS; calls for a panel never overlap. Column numbers are those of the storage order.
 * Matrices are transposed: [column][QT_PANEL_ROWS].
 */
enum { QT_PANEL_ROWS = 128 };

/*
 * A group of columns. With targets t, values q cost
 *     sum over j < n of ( sum over i <= j of v[i * stride + j] (t_i - q_i) )^2
 * with columns in this order. During error compensation this is the part of E that the group
 * decides; during coordinate descent it is E minus a constant.
 */
struct qt_column_group {
    size_t index;      /* number of the group */
    const size_t *col; /* [n] columns */
    size_t n;
    const float *v; /* upper triangular */
    size_t stride;
    int round; /* of coordinate descent, from 0 on */
};

/* Coordinate descent updates the parameters of a group in one of two ways: with `refit`; or, if
 * refit is NULL, the solver changes the scales for fixed codes, with `scale` and `rescale`. */
struct qt_rounder {
    void *ctx;
    /* Starts a group: chooses its parameters for targets t[n][QT_PANEL_ROWS]. */
    void (*begin)(void *ctx, const struct qt_column_group *group, const float *t, size_t row0,
                  size_t rows);
    /* Rounds column col: q[r] = the value nearest to x[r], unit[r] = q[r] / scale (the value in
     * units of the scale). Stores the code. */
    void (*round)(void *ctx, size_t col, const float *x, float *q, float *unit, size_t row0,
                  size_t rows);
    /* Chooses parameters and codes of a group for targets t, and updates the values
     * q[n][QT_PANEL_ROWS] where that lowers their cost. May be NULL. */
    void (*refit)(void *ctx, const struct qt_column_group *group, const float *t, float *q,
                  size_t row0, size_t rows);
    /* Returns the stored scales of a group in scale[r]. */
    void (*scale)(void *ctx, size_t group, float *scale, size_t row0, size_t rows);
    /* Stores the nearest storable scales of a group and returns them in scale[r]. */
    void (*rescale)(void *ctx, size_t group, float *scale, size_t row0, size_t rows);
};

struct qt_solve_options {
    int descent_rounds;             /* most rounds of coordinate descent and refits; 0 = none */
    struct qt_solve_report *panels; /* [panels] receives E of each; NULL: not wanted */
};
#define QT_SOLVE_MIN_GAIN 1e-3 /* relative gain of a round at which descent stops */

/* E summed over all rows, for the normalized H. */
struct qt_solve_report {
    double before;             /* rounding to nearest; NAN: the caller (pack) has to compute it */
    double after_compensation; /* after error compensation */
    double after_descent;      /* after coordinate descent; without: after_compensation */
};

/* *out += panel: E of a matrix is added up panel by panel, in order. */
void qt_solve_add(struct qt_solve_report *out, const struct qt_solve_report *panel);

/* Rounds w[n][k] (row-major) into codes and scales, which the rounder stores. The result does not
 * depend on the number of threads; without a backend, that of a panel does not depend on the
 * others. */
int qt_solve(struct qt_solve_report *out, const struct qt_factor *f, const float *w, size_t n,
             const struct qt_rounder *rounder, const struct qt_solve_options *opt,
             struct qt_err *err);

/* out[ceil(n / QT_PANEL_ROWS)] = E of q[n][k] for the weights w[n][k], of each panel. */
int qt_solve_errors(double *out, const struct qt_factor *f, const float *w, const float *q,
                    size_t n, struct qt_err *err);
/* *out = the sum of these. */
int qt_solve_error(double *out, const struct qt_factor *f, const float *w, const float *q, size_t n,
                   struct qt_err *err);

#endif
