/* How a matrix is quantized, from the parameters of its scheme text. */
#include "pack/schemes/mix24/mix24.h"

struct qt_mix24_recipe qt_mix24_recipe(const struct qt_spec *spec)
{
    bool local = qt_spec_value(spec, "local") != 0;
    if (qt_spec_value(spec, "paper") != 0)
        return (struct qt_mix24_recipe){
            .sens = QT_MIX24_SENS_PAPER,
            .order = QT_MIX24_NATURAL,
            .local = local,
            .outliers_by_abs = true,
        };
    return (struct qt_mix24_recipe){
        .sens = (enum qt_mix24_sens)qt_spec_value(spec, "sens"),
        .order = (enum qt_mix24_order)qt_spec_value(spec, "order"),
        .local = local,
        .outliers_by_abs = qt_spec_value(spec, "ocrit") != 0,
        .search = qt_spec_value(spec, "fit") == 0 && qt_spec_method(spec) != QT_METHOD_RTN,
        .descent_rounds = (int)qt_spec_value(spec, "polish"),
    };
}
