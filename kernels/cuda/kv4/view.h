/* Host code that the kernels of the KV cache share. */
#ifndef QT_KERNELS_CUDA_KV4_VIEW_H
#define QT_KERNELS_CUDA_KV4_VIEW_H

#include "kernels/cuda/kv4/cache.cuh"
#include "kernels/include/qtool_kv4.h"

/* Returns NULL, or what is wrong with the description of a cache. */
const char *qt_kv_cache_fault(const struct qtool_kv_cache *c);
/* Returns the cache as the kernels take it. */
kv_view qt_kv_view(const struct qtool_kv_cache *c);

#endif
