/* The factored Hessian of an observed linear input. */
#include "pack/schemes/scheme.h"
#include "pack/sequential.h"

static double difference_energy(const struct qt_difference *difference)
{
    double sum = 0;
    for (size_t i = 0; i < difference->n; i++)
        sum += difference->square[i];
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
    if (seen->input.n)
        QT_TRY(qt_factor_correct_input_error(f, seen->input.cross, difference_energy(&seen->input),
                                             seen->tokens, err));
    if (seen->state.n)
        QT_TRY(qt_factor_correct_residual_error(f, seen->state.cross, seen->state.n,
                                                difference_energy(&seen->state), seen->tokens,
                                                err));
done:
    return rc;
}
