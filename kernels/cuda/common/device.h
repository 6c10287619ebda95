/* Device queries and kernel launches. */
#ifndef QT_KERNELS_CUDA_COMMON_DEVICE_H
#define QT_KERNELS_CUDA_COMMON_DEVICE_H

#include <cuda_runtime.h>
#include <stddef.h>

struct qt_device {
    int sms;        /* multiprocessors */
    int smem_limit; /* bytes of shared memory that a thread block may have */
    /* Architecture of the machine code that the device runs: 90 on compute capability 9.0, else 80.
     * Also 80 if the driver compiles PTX (CUDA_FORCE_PTX_JIT). */
    int cc;
};

/* Describes the current device, which must be `ordinal` and have compute capability 8.0 or higher.
 * Otherwise returns an error status and writes reason. */
int qt_query_device(struct qt_device *out, int ordinal, char reason[160]);

/* Raises the dynamic shared memory limit of a kernel to the most that the current device allows.
 * This value does not depend on the caller, so plans and threads do not interfere. Returns
 * QTOOL_UNSUPPORTED if that is less than `bytes`. */
int qt_allow_smem(const void *kernel, size_t bytes, char reason[160]);

struct qt_kernel_launch {
    const void *kernel; /* host address */
    dim3 grid;
    int threads;
    size_t smem;    /* bytes of dynamic shared memory */
    int cluster;    /* thread blocks of a cluster along x; 0 or 1: no clusters */
    bool most_smem; /* prefer the largest shared-memory carveout, so that thread blocks of the next
                       kernel that need much of it can start beside the last ones of this kernel */
    bool dependent; /* programmatic dependent launch. Only for code compiled for 9.0: code for 8.0,
                       which newer devices can run too, does not wait for the preceding kernel. */
};

/* Launches a kernel. args: its one argument. */
int qt_launch_kernel(const struct qt_kernel_launch *l, void *args, void *stream);

/* Returns the number of clusters of `blocks` thread blocks that can run at the same time, or 0 if a
 * cluster does not fit. Large clusters may leave multiprocessors unused, since a cluster lies
 * within a GPC. The kernel's shared memory must have been allowed by qt_allow_smem. */
size_t qt_resident_clusters(const void *kernel, int threads, size_t smem, size_t blocks);

#endif
