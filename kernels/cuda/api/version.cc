/* qtool_kernels_version and qtool_kernels_compute. */
#include "kernels/cuda/common/device.h"
#include "kernels/include/qtool_kernels.h"

int qtool_kernels_version(void)
{
    return QTOOL_KERNELS_VERSION;
}

int qtool_kernels_compute(int device)
{
    struct qt_device d;
    char reason[160];
    return qt_query_device(&d, device, reason) == QTOOL_OK ? d.cc : 0;
}
