/* What the plans of all kernels ask of a device. */
#ifndef QT_CUDA_DEVICE_H
#define QT_CUDA_DEVICE_H

struct qt_device {
    int sms, smem_limit;
    /* What the kernels that it runs are compiled for: 90 for compute capability 9.0, else 80, also
     * where the driver is told to compile PTX (CUDA_FORCE_PTX_JIT). */
    int cc;
};

/* QT_MATMUL_OK for the current device if it is `ordinal` and has compute capability 8.0; else a
 * status, with why in reason. */
int qt_device_facts(struct qt_device *out, int ordinal, char reason[160]);

#endif
