/*
 * A GPU that is not there: what libqtool_kernels uses of the CUDA run time, for tests of plans and
 * launches on machines without one. Nothing is computed; what a device or its driver would refuse
 * is remembered. Linked in place of the run time.
 */
#ifndef QT_TEST_PRETEND_H
#define QT_TEST_PRETEND_H

struct pretended_device {
    const char *name;
    int sms, smem_limit; /* multiprocessors; bytes of shared memory that a block can have */
    int major, minor;    /* compute capability */
    int code;            /* what the code that it runs is compiled for: 80 or 90 */
};

/* The current device from now on. */
void pretend_device(const struct pretended_device *device);
/* The first thing since the last call that would have been refused, or NULL. */
const char *pretend_fault(void);
/* Kernels launched since the last call. */
int pretend_launches(void);

#endif
