/* The device that a plan is for. */
#include "kernels/cuda/device.h"
#include "kernels/qtool_kernels.h"

#include <cuda_runtime.h>
#include <stdio.h>

static __global__ void any_kernel(void)
{
}

int qt_device_facts(struct qt_device *out, int ordinal, char reason[160])
{
    int major = 0, minor = 0, count = 0, current = -1;
    *out = {};
    /* Counted first: to ask a device that is not there for anything is an error of the run time. */
    if (cudaGetDeviceCount(&count) != cudaSuccess || ordinal < 0 || ordinal >= count) {
        snprintf(reason, 160, "no CUDA device %d", ordinal);
        return QT_MATMUL_NO_GPU;
    }
    if (cudaGetDevice(&current) != cudaSuccess || current != ordinal) {
        snprintf(reason, 160, "device %d is not the current one", ordinal);
        return QT_MATMUL_UNSUPPORTED;
    }
    cudaDeviceGetAttribute(&out->sms, cudaDevAttrMultiProcessorCount, ordinal);
    cudaDeviceGetAttribute(&out->smem_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
    if (major < 8) {
        snprintf(reason, 160, "device %d has compute capability %d.%d, needs 8.0", ordinal, major,
                 minor);
        return QT_MATMUL_NO_GPU;
    }
    cudaFuncAttributes code = {};
    cudaError_t e = cudaFuncGetAttributes(&code, (const void *)any_kernel);
    if (e != cudaSuccess) {
        snprintf(reason, 160, "%s", cudaGetErrorString(e));
        return QT_MATMUL_FAILED;
    }
    out->cc = code.ptxVersion;
    return QT_MATMUL_OK;
}
