/* The private part of attention plans. Also compiles as C, for tests. */
#ifndef QT_KERNELS_CUDA_KV4_PLAN_H
#define QT_KERNELS_CUDA_KV4_PLAN_H

#include "kernels/include/qtool_kv4.h"

/* Stored in `internal` of struct qtool_kv_plan. */
struct qt_kv_state {
    size_t cache_heads; /* KV heads of the planned cache; run refuses others */
    int kernel;         /* index of the instance in attention.cu */
    int dependent;      /* use programmatic dependent launch */
    /* Not 0: the partial results of splits are in the zeroed part of the workspace, and thread
     * blocks poll for them. 0: they follow the zeroed part, and thread blocks count arrivals. */
    int polled;
};

static inline struct qt_kv_state *qt_kv_state(struct qtool_kv_plan *p)
{
    return (struct qt_kv_state *)p->internal.bytes;
}

static inline const struct qt_kv_state *qt_kv_state_const(const struct qtool_kv_plan *p)
{
    return (const struct qt_kv_state *)p->internal.bytes;
}

#endif
