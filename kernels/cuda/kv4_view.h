/* Host side shared by the kernels of the cache. */
#ifndef QT_CUDA_KV4_VIEW_H
#define QT_CUDA_KV4_VIEW_H

#include "kernels/cuda/kv4_cache.cuh"
#include "kernels/qtool_kv4.h"

/* What is wrong with the description of a cache; NULL when nothing is. */
const char *qt_kv_cache_fault(const struct qt_kv_cache *c);
kv_view qt_kv_view(const struct qt_kv_cache *c);

#endif
