/* Host side shared by the kernels of the cache. */
#ifndef QT_KERNELS_CUDA_KV4_VIEW_H
#define QT_KERNELS_CUDA_KV4_VIEW_H

#include "kernels/cuda/kv4/cache.cuh"
#include "kernels/include/qtool_kv4.h"

/* What is wrong with the description of a cache; NULL when nothing is. */
const char *qt_kv_cache_fault(const struct qtool_kv_cache *c);
kv_view qt_kv_view(const struct qtool_kv_cache *c);

#endif
