/*
 * hessian: second-order rounding of a weight matrix. Scheme-agnostic: what a column rounds to is a
 * callback's business.
 *
 *   factor.c   H = X^T X -> damped, ordered, factored   (by cholesky.c)
 *   targets.c  targets that make up for errors of the inputs and of hidden states
 *   solve.c    passes over the columns:
 *   feedback.c error feedback (GPTQ, Frantar et al. 2022, in the form of Babai's nearest plane)
 *   polish.c   afterwards: coordinate descent on the codes, least squares on the scales, under H
 *   sums.c     the products of both, on the CPU or on a backend
 *   error.c    the error that given values have
 *
 * The objective is, per row w of W[n][k], with q its rounded form,
 *     E(q) = (w - q) H (w - q)^T.
 */
#ifndef QT_HESSIAN_HESSIAN_H
#define QT_HESSIAN_HESSIAN_H

#include "base/base.h"

/* Why a factorization is not the plain one. */
enum qt_damping { QT_DAMP_PLAIN, QT_DAMP_RAISED, QT_DAMP_FAILED };

/* H in processing order, ready for solving. Position p stands for column order[p]. */
struct qt_factor {
    size_t k, group_size;
    size_t *order;   /* [k]; a group of columns is contiguous in it */
    size_t *group;   /* [k] group number at position p */
    float *h;        /* [k][k] damped H, symmetric, mean diagonal 1 */
    float *v;        /* [k][k] upper triangular, h = v v^T */
    float *shift;    /* [k][k] in storage order, or NULL: see qt_factor_correct_input_error */
    float *residual; /* [n][k] in storage order, or NULL: see qt_factor_correct_residual_error */
    double scale;    /* that has made the mean diagonal 1 */
    double shift_shrink, residual_shrink; /* what is left of them, 0 to 1 */
    double damp;                          /* added to the diagonal, as a share of its mean */
    size_t dead;                          /* channels that were never active */
    struct qt_backend *backend;           /* of the options, or NULL */
    enum qt_damping damping;
};

struct qt_factor_options {
    double damp;  /* share of the mean diagonal; 0.01 is usual */
    size_t group; /* columns that share a scale (the last group may be short); k: one group */
    bool natural; /* columns in storage order instead of by activity */
    const uint8_t *class; /* [groups] lower classes are processed first; NULL: all the same */
    /* Where products of whole matrices are made for as long as the factor lives, NULL or with the
     * host's memory: the CPU. n rows take 8 k^2 bytes there, or 4 k^2 and at most 8 n k; in the
     * host's memory four or five matrices of n x k. */
    struct qt_backend *backend;
};

/*
 * h[k][k]: sum of x^T x, both triangles or the lower one only is read; any positive scaling.
 * Columns are processed from the most to the least active (largest diagonal first): groups by their
 * mean, and within their group; the scales stay where they are stored, so that nothing has to be
 * gathered at run time. Channels with h_jj = 0 are left with the damping alone.
 * QT_E_UNSUPPORTED when h has a non-finite entry, nothing but such channels, or cannot be factored
 * with any damping up to 1: the caller then rounds without it and says so.
 */
int qt_factor_new(struct qt_factor *out, const double *h, size_t k,
                  const struct qt_factor_options *opt, struct qt_err *err);
void qt_factor_free(struct qt_factor *f);
/* f in another order: opt->natural and opt->class count, damping and groups stay. */
int qt_factor_reorder(struct qt_factor *out, const struct qt_factor *f,
                      const struct qt_factor_options *opt, struct qt_err *err);
/* [H^-1]_jj of each column, in storage order: out[k]. */
int qt_factor_inverse_diagonal(float *out, const struct qt_factor *f, struct qt_err *err);

/*
 * Targets for inputs that are not what they should be. If x are the inputs that the rounded matrix
 * will see and z those of the unrounded model, then of all matrices W + W S has the outputs on x
 * that are nearest to W z, with S = C H^-1, C = sum of (z - x)^T x; and
 *     sum |W z - Q x|^2 = (W + W S - Q) H (W + W S - Q)^T + what Q cannot change.
 * cross[k][k]: C in storage order, scaled as the h that f was made of.
 *
 * S is a regression on few tokens. A share of what it explains is chance: it is shrunk as James and
 * Stein do, by 1 - 2 k / (tokens - k) * unexplained / explained, not below 0; the 2 because tokens
 * of a text are not independent. (On 8 tokens a channel S unshrunk made a model of 256 channels
 * worse by half.) strayed: sum |z - x|^2, of which S explains the trace of C S^T.
 */
int qt_factor_correct_input_error(struct qt_factor *f, const float *cross, double strayed,
                                  size_t tokens, struct qt_err *err);
/*
 * Targets of the one matrix whose outputs are added to hidden states that are not what they should
 * be either: off by r[n], those of the unrounded model less these (where outputs are multiplied by
 * a number before they are added: divided by that). W + W S + T has the sum nearest to what it
 * should be, T = D H^-1, D = sum of r x^T. T is shrunk as S is. cross[n][k]: D; strayed: sum |r|^2.
 * f is of use for that matrix alone then.
 */
int qt_factor_correct_residual_error(struct qt_factor *f, const float *cross, size_t n,
                                     double strayed, size_t tokens, struct qt_err *err);
/* w[n][k] += w S + T */
int qt_factor_targets(float *w, size_t n, const struct qt_factor *f, struct qt_err *err);

/*
 * How a scheme rounds. Rows come in panels [row0, row0 + rows), rows <= QT_PANEL_ROWS, each panel
 * on one thread at a time. Columns are numbered as in storage. Matrices are transposed,
 * [column][QT_PANEL_ROWS].
 */
enum { QT_PANEL_ROWS = 128 };

/*
 * A group of columns about to be rounded. With its targets t, values q cost
 *     sum over j < n of ( sum over i <= j of v[i * stride + j] (t_i - q_i) )^2,
 * in that order of columns: in the feedback pass the part of E that only this group decides, in
 * polishing all of E but a constant.
 */
struct qt_column_group {
    size_t index;      /* number of the group */
    const size_t *col; /* [n] */
    size_t n;
    const float *v; /* upper triangular */
    size_t stride;
};

struct qt_rounder {
    void *ctx;
    /* A group begins: choose its parameters for targets t[n][QT_PANEL_ROWS]. */
    void (*begin)(void *ctx, const struct qt_column_group *group, const float *t, size_t row0,
                  size_t rows);
    /* q[r] = stored value nearest to x[r] in column col; unit[r] = q[r] / scale. The code is kept.
     */
    void (*round)(void *ctx, size_t col, const float *x, float *q, float *unit, size_t row0,
                  size_t rows);
    /* How polishing moves a group's parameters: either as a whole, parameters and codes for targets
     * t, where that is better than the values q[n][QT_PANEL_ROWS] it has, which are updated; */
    void (*refit)(void *ctx, const struct qt_column_group *group, const float *t, float *q,
                  size_t row0, size_t rows);
    /* or (refit = NULL) by its scale, codes fixed: scale[r] of a group as stored; */
    void (*scale)(void *ctx, size_t group, float *scale, size_t row0, size_t rows);
    /* and the storable one nearest to scale[r] takes its place, and is returned in it. */
    void (*rescale)(void *ctx, size_t group, float *scale, size_t row0, size_t rows);
};

struct qt_solve_options {
    int polish; /* rounds of coordinate descent and refit after the feedback pass; 0 = none */
};

/* Sums of E over all rows, in units of the normalised H. */
struct qt_solve_report {
    double before;   /* rounded to nearest without feedback; filled by who knows how (pack) */
    double feedback; /* after the error feedback pass */
    double polished; /* after polishing; equals feedback without */
};

/* w[n][k] row-major FP32 -> codes and scales in the rounder. Deterministic for any thread count. */
int qt_solve(struct qt_solve_report *out, const struct qt_factor *f, const float *w, size_t n,
             const struct qt_rounder *rounder, const struct qt_solve_options *opt,
             struct qt_err *err);

/* E of a given q[n][k] against w[n][k], summed over rows: for reports ("before"). */
int qt_solve_error(double *out, const struct qt_factor *f, const float *w, const float *q, size_t n,
                   struct qt_err *err);

#endif
