/* The factored Hessian of an observed linear input. */
#include "pack/schemes/scheme.h"
#include "pack/sequential.h"

static double error_energy(const struct qt_observed *seen)
{
    double sum = 0;
    for (size_t i = 0; i < seen->errors; i++)
        sum += seen->square[i];
    return sum;
}

int qt_observed_factor(struct qt_factor *f, const struct qt_observed *seen,
                       const struct qt_packed *p, struct qt_backend *be, struct qt_err *err)
{
    const struct qt_factor_options opt = {.damp = QT_OBSERVED_DAMP,
                                          .group = qt_packed_group(p),
                                          .backend = be,
                                          .sums_on_backend = seen->on_backend};
    int rc;
    if (f->k && f->group_size == opt.group)
        return QT_OK;
    qt_factor_free(f);
    QT_TRY(qt_factor_new(f, seen->h, p->k, &opt, err));
    if (seen->errors)
        QT_TRY(seen->of_outputs
                   ? qt_factor_correct_output_error(f, seen->cross, seen->errors,
                                                    error_energy(seen), seen->tokens, err)
                   : qt_factor_correct_input_error(f, seen->cross, error_energy(seen), seen->tokens,
                                                   err));
done:
    return rc;
}

/* energy[m] = sum of the squares of each row of x[m][n]. */
static int row_energies(float *energy, struct qt_backend *be, const float *x, size_t m, size_t n,
                        struct qt_err *err)
{
    enum { TOKENS = 4096, TOKENS_APART = 16384 };
    const size_t most = qt_min_size(be->host ? TOKENS : TOKENS_APART, m);
    const bool half = be->half;
    float *squares = NULL, *sums = NULL, *ones = NULL, *host = NULL;
    int rc;
    be->half = false;
    QT_TRY(qt_array_new(&host, n, sizeof *host, err));
    for (size_t i = 0; i < n; i++)
        host[i] = 1;
    QT_TRY(be->alloc(be, &ones, n * sizeof *ones, err));
    QT_TRY(be->upload(be, ones, host, n * sizeof *ones, err));
    QT_TRY(be->alloc(be, &sums, most * sizeof *sums, err));
    QT_TRY(qt_backend_floats(&squares, be, most, n, err));
    for (size_t at = 0, count; at < m; at += count) {
        const float *rows = x + at * n;
        count = qt_min_size(most, m - at);
        QT_TRY(be->activate(be, squares, rows, rows, QT_ACT_NONE, count * n, err));
        QT_TRY(be->linear(be, sums, squares, ones, NULL, count, 1, n, err));
        QT_TRY(be->download(be, energy + at, sums, count * sizeof *sums, err));
    }
done:
    be->half = half;
    qt_free(host);
    be->free(be, ones);
    be->free(be, sums);
    be->free(be, squares);
    return rc;
}

int qt_token_factors(float *factor, struct qt_backend *be, const float *hidden, const float *errors,
                     float scale, size_t m, size_t n, struct qt_err *err)
{
    float *of_errors = NULL;
    int rc;
    QT_TRY(row_energies(factor, be, hidden, m, n, err));
    if (errors) {
        QT_TRY(qt_array_new(&of_errors, m, sizeof *of_errors, err));
        QT_TRY(row_energies(of_errors, be, errors, m, n, err));
    }
    for (size_t i = 0; i < m; i++) {
        const float energy = errors ? fmaxf(factor[i], scale * scale * of_errors[i]) : factor[i];
        factor[i] = energy > 0 && isfinite(energy) ? 1 / sqrtf(energy / (float)n) : 1;
    }
done:
    qt_free(of_errors);
    return rc;
}
