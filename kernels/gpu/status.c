/* Conversion of CUDA and cuBLAS status codes. */
#include "kernels/gpu/status.h"

int gpu_check_launch(int status, const char *what, struct qt_err *err)
{
    enum { MEMORY_ALLOCATION = 2 }; /* the first launch of a kernel may allocate memory */
    return status == 0
               ? QT_OK
               : qt_fail(err, status == MEMORY_ALLOCATION ? QT_E_RESOURCE : QT_E_INTERNAL, NULL,
                         NULL, "GPU: %s or earlier work failed with CUDA error %d", what, status);
}

int gpu_check_cublas(int status, struct qt_err *err)
{
    enum { ALLOC_FAILED = 3 };
    return status == 0 ? QT_OK
                       : qt_fail(err, status == ALLOC_FAILED ? QT_E_RESOURCE : QT_E_INTERNAL, NULL,
                                 NULL, "GPU: cuBLAS failed with status %d", status);
}
