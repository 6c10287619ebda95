/* Instances of the skinny kernel for several matrices in one launch: look-up formats, whose
 * matrices have tables of their own. Others that have one input can be one matrix. */
#include "kernels/cuda/matmul/instances.h"
#include "kernels/cuda/matmul/skinny.cuh"

const void *qt_skinny_many_instance(enum qt_format format, int token_tiles, int strips, int last)
{
    return format == QT_FORMAT_LUT3 ? qt_skinny_many_of<qt_decode_steps3>(token_tiles, strips, last)
           : format == QT_FORMAT_LUT4
               ? qt_skinny_many_of<qt_decode_wide4>(token_tiles, strips, last)
               : NULL;
}
