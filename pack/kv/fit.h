/* The static scale of a key channel (private to pack/). */
#ifndef QT_PACK_KV_FIT_H
#define QT_PACK_KV_FIT_H

#include <stddef.h>

/* Fits *scale and *zero (zero-point) of qt_kv_static to a sample x[n] of a key channel, n > 0, all
 * finite. Sorts x. prefix_sums[2 * (n + 1)] is scratch. */
void qt_kv_fit(float *scale, float *zero, float *x, size_t n, double *prefix_sums);

#endif
