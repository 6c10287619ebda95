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
    const struct qt_factor_options opt = {.damp = 0.01,
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
