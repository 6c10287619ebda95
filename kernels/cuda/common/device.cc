/* Device queries and kernel launches. */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/common/prepare.h"
#include "kernels/include/qtool_kernels.h"

#include <stdio.h>

int qt_query_device(struct qt_device *out, int ordinal, char reason[160])
{
    int major = 0, minor = 0, count = 0, current = -1;
    *out = {};
    /* The count comes first: a query of a missing device leaves an error in the CUDA runtime. */
    if (cudaGetDeviceCount(&count) != cudaSuccess || ordinal < 0 || ordinal >= count) {
        snprintf(reason, 160, "no CUDA device %d", ordinal);
        return QTOOL_NO_GPU;
    }
    if (cudaGetDevice(&current) != cudaSuccess || current != ordinal) {
        snprintf(reason, 160, "device %d is not the current CUDA device", ordinal);
        return QTOOL_UNSUPPORTED;
    }
    cudaDeviceGetAttribute(&out->sms, cudaDevAttrMultiProcessorCount, ordinal);
    cudaDeviceGetAttribute(&out->smem_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
    if (major < 8) {
        snprintf(reason, 160, "device %d has compute capability %d.%d, the kernels need 8.0",
                 ordinal, major, minor);
        return QTOOL_NO_GPU;
    }
    cudaFuncAttributes code = {};
    cudaError_t e = cudaFuncGetAttributes(&code, qt_prepare_instance());
    if (e != cudaSuccess) {
        snprintf(reason, 160, "%s", cudaGetErrorString(e));
        return QTOOL_FAILED;
    }
    out->cc = code.ptxVersion;
    return QTOOL_OK;
}

int qt_allow_smem(const void *kernel, size_t bytes, char reason[160])
{
    int ordinal = 0, limit = 0;
    cudaFuncAttributes now = {};
    cudaError_t e = cudaGetDevice(&ordinal);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal);
    if (e == cudaSuccess)
        e = cudaFuncGetAttributes(&now, kernel);
    const int most = limit - (int)now.sharedSizeBytes;
    if (e == cudaSuccess && now.maxDynamicSharedSizeBytes < most)
        e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
    if (e != cudaSuccess) {
        snprintf(reason, 160, "%s", cudaGetErrorString(e));
        return QTOOL_FAILED;
    }
    if (bytes > (size_t)most) {
        snprintf(reason, 160, "the kernel needs %zu bytes of shared memory, the device has %d",
                 bytes, most);
        return QTOOL_UNSUPPORTED;
    }
    return QTOOL_OK;
}

static cudaLaunchAttribute cluster_attribute(size_t blocks)
{
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = (unsigned)blocks;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    return attribute;
}

int qt_launch_kernel(const struct qt_kernel_launch *l, void *args, void *stream)
{
    cudaLaunchAttribute attributes[3] = {};
    cudaLaunchConfig_t config = {};
    config.gridDim = l->grid;
    config.blockDim = dim3((unsigned)l->threads);
    config.dynamicSmemBytes = l->smem;
    config.stream = (cudaStream_t)stream;
    config.attrs = attributes;
    if (l->dependent) {
        attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (l->most_smem) {
        attributes[config.numAttrs].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
        attributes[config.numAttrs++].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
    }
    if (l->cluster > 1)
        attributes[config.numAttrs++] = cluster_attribute((size_t)l->cluster);
    return cudaLaunchKernelExC(&config, l->kernel, &args) == cudaSuccess ? QTOOL_OK : QTOOL_FAILED;
}

size_t qt_resident_clusters(const void *kernel, int threads, size_t smem, size_t blocks)
{
    int count = 0;
    cudaLaunchAttribute attribute = cluster_attribute(blocks);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)blocks, 1024);
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = smem;
    config.attrs = &attribute;
    config.numAttrs = 1;
    if (cudaOccupancyMaxActiveClusters(&count, kernel, &config) == cudaSuccess && count > 0)
        return (size_t)count;
    cudaGetLastError();
    return 0;
}
