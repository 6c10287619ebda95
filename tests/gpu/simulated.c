/* The simulated GPU (simulated.h). Limits are those of the CUDA programming guide, and for tensor
 * maps those of cuTensorMapEncodeTiled in the CUDA driver API. */
#include "tests/gpu/simulated.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static struct simulated_device device;
static char fault[200];
static int launches;

void simulate_device(const struct simulated_device *d)
{
    device = *d;
}

const char *simulated_fault(void)
{
    static char last[sizeof fault];
    memcpy(last, fault, sizeof last);
    fault[0] = 0;
    return last[0] ? last : NULL;
}

int simulated_launches(void)
{
    int n = launches;
    launches = 0;
    return n;
}

#define REFUSE(...) (fault[0] ? 0 : snprintf(fault, sizeof fault, __VA_ARGS__))

/* ---- the device ---------------------------------------------------------------------------- */

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *ordinal)
{
    *ordinal = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int ordinal)
{
    *value = attribute == cudaDevAttrMultiProcessorCount            ? device.sms
             : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? device.smem_limit
             : attribute == cudaDevAttrComputeCapabilityMajor       ? device.major
             : attribute == cudaDevAttrComputeCapabilityMinor       ? device.minor
                                                                    : -1;
    if (*value < 0 || ordinal != 0)
        REFUSE("attribute %d of device %d", (int)attribute, ordinal);
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void)
{
    return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t e)
{
    return e == cudaSuccess ? "no error" : "an error";
}

/* ---- kernels ------------------------------------------------------------------------------- */

/* Dynamic shared memory limits that were set by cudaFuncSetAttribute. */
static struct allowed {
    const void *kernel;
    int bytes;
} allowed[2048];

static struct allowed *allowed_for(const void *kernel)
{
    struct allowed *a = allowed;
    while (a->kernel && a->kernel != kernel && a < allowed + 2047)
        a++;
    if (!a->kernel)
        *a = (struct allowed){kernel, 48 << 10};
    return a;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *kernel)
{
    *out = (struct cudaFuncAttributes){.ptxVersion = device.code,
                                       .maxDynamicSharedSizeBytes = allowed_for(kernel)->bytes};
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value)
{
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize)
        return cudaSuccess;
    if (value > device.smem_limit)
        REFUSE("%d bytes of shared memory allowed, the device has %d", value, device.smem_limit);
    allowed_for(kernel)->bytes = value;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel,
                                                                   int threads, size_t smem,
                                                                   unsigned int flags)
{
    (void)kernel;
    (void)flags;
    *blocks = 2048 / threads;
    if (smem && *blocks > (device.smem_limit + 1024) / ((int)smem + 1024))
        *blocks = (device.smem_limit + 1024) / ((int)smem + 1024);
    return cudaSuccess;
}

static unsigned cluster_of(const cudaLaunchConfig_t *c)
{
    for (unsigned i = 0; i < c->numAttrs; i++)
        if (c->attrs[i].id == cudaLaunchAttributeClusterDimension)
            return c->attrs[i].val.clusterDim.x;
    return 1;
}

cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *kernel,
                                           const cudaLaunchConfig_t *c)
{
    (void)kernel;
    *clusters = device.sms / (int)cluster_of(c);
    return cudaSuccess;
}

static cudaError_t launch(const void *kernel, dim3 grid, dim3 block, size_t smem, unsigned cluster)
{
    const unsigned threads = block.x * block.y * block.z;
    launches++;
    if (!kernel)
        REFUSE("no kernel");
    if (!grid.x || !grid.y || !grid.z || grid.x > INT32_MAX || grid.y > 65535 || grid.z > 65535)
        REFUSE("a grid of %u x %u x %u", grid.x, grid.y, grid.z);
    if (!threads || threads > 1024)
        REFUSE("%u threads", threads);
    if (smem > (size_t)allowed_for(kernel)->bytes)
        REFUSE("%zu bytes of shared memory, allowed are %d", smem, allowed_for(kernel)->bytes);
    if (smem > (size_t)device.smem_limit)
        REFUSE("%zu bytes of shared memory, the device has %d", smem, device.smem_limit);
    if (cluster > 8 || grid.x % cluster || (cluster > 1 && device.major < 9))
        REFUSE("clusters of %u of %u blocks", cluster, grid.x);
    return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *kernel, void **args)
{
    (void)args;
    return launch(kernel, c->gridDim, c->blockDim, c->dynamicSmemBytes, cluster_of(c));
}

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t smem,
                             cudaStream_t stream)
{
    (void)args;
    (void)stream;
    return launch(kernel, grid, block, smem, 1);
}

/* ---- tensor maps --------------------------------------------------------------------------- */

static CUresult encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base,
                       const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                       const cuuint32_t *steps, CUtensorMapInterleave interleave,
                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                       CUtensorMapFloatOOBfill fill)
{
    const size_t element = type == CU_TENSOR_MAP_DATA_TYPE_UINT64    ? 8
                           : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 ? 2
                                                                     : 0;
    (void)promotion;
    (void)fill;
    memset(map, 0, sizeof *map);
    if (!element || rank < 1 || rank > 5 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE)
        REFUSE("a tensor of type %d, rank %u", (int)type, rank);
    if (!base || (uintptr_t)base % 16)
        REFUSE("a tensor at %p", base);
    for (cuuint32_t i = 0; i < rank; i++) {
        if (!dims[i] || dims[i] > (cuuint64_t)1 << 32)
            REFUSE("dimension %u of a tensor is %llu", i, (unsigned long long)dims[i]);
        if (!box[i] || box[i] > 256 || steps[i] != 1)
            REFUSE("dimension %u of a box is %u", i, box[i]);
        if (i + 1 < rank && (strides[i] % 16 || strides[i] >= (cuuint64_t)1 << 40))
            REFUSE("stride %u of a tensor is %llu", i, (unsigned long long)strides[i]);
    }
    if (box[0] * element % 16 || (swizzle == CU_TENSOR_MAP_SWIZZLE_128B && box[0] * element > 128))
        REFUSE("a box has lines of %zu bytes", box[0] * element);
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned int version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found)
{
    const bool known = !strcmp(name, "cuTensorMapEncodeTiled");
    (void)version;
    (void)flags;
    *f = known ? (void *)(uintptr_t)encode : NULL;
    *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

/* ---- functions that nvcc's launch stubs call ------------------------------------------------ */

void **__cudaRegisterFatBinary(void *binary);
void __cudaRegisterFatBinaryEnd(void **handle);
void __cudaUnregisterFatBinary(void **handle);
void __cudaRegisterFunction(void **handle, const char *host, char *on_device, const char *name,
                            int limit, uint3 *tid, uint3 *bid, dim3 *block, dim3 *grid, int *warp);
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host);
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t smem,
                               cudaStream_t stream);
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t smem,
                                     struct CUstream_st *stream);
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *smem, void *stream);

static dim3 pushed_grid, pushed_block;
static size_t pushed_smem;

void **__cudaRegisterFatBinary(void *binary)
{
    static void *handle;
    (void)binary;
    return &handle;
}

void __cudaRegisterFatBinaryEnd(void **handle)
{
    (void)handle;
}

void __cudaUnregisterFatBinary(void **handle)
{
    (void)handle;
}

void __cudaRegisterFunction(void **handle, const char *host, char *on_device, const char *name,
                            int limit, uint3 *tid, uint3 *bid, dim3 *block, dim3 *grid, int *warp)
{
    (void)handle, (void)host, (void)on_device, (void)name, (void)limit;
    (void)tid, (void)bid, (void)block, (void)grid, (void)warp;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host)
{
    *kernel = (cudaKernel_t)(uintptr_t)host;
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t smem,
                               cudaStream_t stream)
{
    (void)args;
    (void)stream;
    return launch(kernel, grid, block, smem, 1);
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t smem, struct CUstream_st *stream)
{
    (void)stream;
    pushed_grid = grid;
    pushed_block = block;
    pushed_smem = smem;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *smem, void *stream)
{
    *grid = pushed_grid;
    *block = pushed_block;
    *smem = pushed_smem;
    *(void **)stream = NULL;
    return cudaSuccess;
}
