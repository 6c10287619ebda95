/* Conversion of CUDA and cuBLAS status codes (private to kernels/gpu). */
#ifndef QT_KERNELS_GPU_STATUS_H
#define QT_KERNELS_GPU_STATUS_H

#include "base/base.h"

/* Convert a cudaError_t of a launch (`what`) and a cublasStatus_t: 0 to QT_OK, out of memory to
 * QT_E_RESOURCE, any other to QT_E_INTERNAL. */
int gpu_check_launch(int status, const char *what, struct qt_err *err);
int gpu_check_cublas(int status, struct qt_err *err);

#endif
