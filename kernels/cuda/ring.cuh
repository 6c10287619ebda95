/* A ring of stages in shared memory that the copy engine fills: where a warp is in it. */
#ifndef QT_CUDA_RING_CUH
#define QT_CUDA_RING_CUH

#include <stdint.h>

struct qt_ring {
    uint32_t full, empty; /* shared addresses of the first barriers; 8 bytes each */
    int stage;
    uint32_t parity;
};

static __device__ __forceinline__ void qt_ring_next(qt_ring *r, int stages)
{
    if (++r->stage == stages) {
        r->stage = 0;
        r->parity ^= 1;
    }
}

#endif
