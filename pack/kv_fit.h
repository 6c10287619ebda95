/* The static scale of a channel of keys (private to pack/). */
#ifndef QT_PACK_KV_FIT_H
#define QT_PACK_KV_FIT_H

#include <stddef.h>

struct qt_kv_key {
    float x, weight; /* finite; the weight is positive */
};
/* scale and zero (of qt_kv_static) for keys like key[n], n > 0, which are sorted in passing.
 * sums[3 * (n + 1)]: working memory. */
void qt_kv_fit(float *scale, float *zero, struct qt_kv_key *key, size_t n, double *sums);

#endif
