/* The static scale of a channel of keys (private to pack/). */
#ifndef QT_PACK_KV_FIT_H
#define QT_PACK_KV_FIT_H

#include <stddef.h>

/* scale and zero (of qt_kv_static) for keys like the finite x[n], n > 0, which is sorted in
 * passing. sums[2 * (n + 1)]: working memory. */
void qt_kv_fit(float *scale, float *zero, float *x, size_t n, double *sums);

#endif
