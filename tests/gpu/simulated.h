/*
 * A simulated GPU: the functions of the CUDA runtime that libqtool_kernels calls, for tests of
 * plans and launches on machines without a GPU. It computes nothing. It records calls that a device
 * or its driver would refuse. Linked instead of the CUDA runtime.
 */
#ifndef QT_TESTS_GPU_SIMULATED_H
#define QT_TESTS_GPU_SIMULATED_H

struct simulated_device {
    const char *name;
    int sms, smem_limit; /* multiprocessors; bytes of shared memory that a thread block may have */
    int major, minor;    /* compute capability */
    int code;            /* architecture of the code that it runs: 80 or 90 */
};

/* Sets the current device. */
void simulate_device(const struct simulated_device *device);
/* Returns the first refused call since the last call of this function, or NULL. */
const char *simulated_fault(void);
/* Returns the number of kernels launched since the last call of this function. */
int simulated_launches(void);

#endif
