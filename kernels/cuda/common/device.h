/* What the plans of all kernels ask of a device. */
#ifndef QT_KERNELS_CUDA_COMMON_DEVICE_H
#define QT_KERNELS_CUDA_COMMON_DEVICE_H

#include <cuda_runtime.h>
#include <stddef.h>

struct qt_device {
    int sms, smem_limit;
    /* What the kernels that it runs are compiled for: 90 for compute capability 9.0, else 80, also
     * where the driver is told to compile PTX (CUDA_FORCE_PTX_JIT). */
    int cc;
};

/* QTOOL_OK for the current device if it is `ordinal` and has compute capability 8.0; else a
 * status, with why in reason. */
int qt_device_facts(struct qt_device *out, int ordinal, char reason[160]);

/* Lets a kernel have all the shared memory that a block of the current device may have beside what
 * the kernel declares: the same whoever asks, so it does not matter which plan or thread is last.
 * QTOOL_UNSUPPORTED: `bytes` are more than that. */
int qt_allow_smem(const void *kernel, size_t bytes, char reason[160]);

struct qt_kernel_launch {
    const void *kernel;
    dim3 grid;
    int threads;
    size_t smem;
    int cluster;    /* blocks of a cluster, along x; 0 or 1: none */
    bool most_smem; /* the multiprocessors are set up for as much shared memory as there can be: a
                       block of the next kernel that wants much of it can come beside the last ones
                       of this */
    bool dependent; /* before the previous kernel has ended: of code for 9.0 alone, as code for 8.0,
                       which newer devices run too, does not wait */
};

/* args: the kernel's one argument. */
int qt_launch_kernel(const struct qt_kernel_launch *l, void *args, void *stream);
/* Clusters of so many blocks that run at a time, 0 if none can be had. Of larger ones that are less
 * than the multiprocessors have room for, as the blocks of a cluster have to be neighbours. The
 * kernel must have been allowed the shared memory. */
size_t qt_clusters_at_a_time(const void *kernel, int threads, size_t smem, size_t blocks);

#endif
