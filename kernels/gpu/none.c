/* Replaces the GPU and the CUDA backend in builds without nvcc: opening them fails. */
#include "kernels/kernels.h"

bool qt_gpu_built(void)
{
    return false;
}

size_t qt_gpu_count(void)
{
    return 0;
}

static int not_built(int device, struct qt_err *err)
{
    return qt_fail(
        err, QT_E_NO_GPU, NULL, NULL,
        "cannot use GPU %d: this qtool was built without CUDA code, which needs nvcc in PATH",
        device);
}

int qt_backend_cuda_open(struct qt_backend **out, int device, struct qt_err *err)
{
    *out = NULL;
    return not_built(device, err);
}

int qt_gpu_open(struct qt_gpu **out, int device, struct qt_err *err)
{
    *out = NULL;
    return not_built(device, err);
}
