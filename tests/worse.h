/* Errors that tests collect. */
#ifndef QT_TESTS_WORSE_H
#define QT_TESTS_WORSE_H

#include <math.h>

/* The larger of two; NaN is the largest, which fmax and comparisons would lose. */
static inline double worse(double worst, double error)
{
    return isnan(worst) || error <= worst ? worst : error;
}

#endif
