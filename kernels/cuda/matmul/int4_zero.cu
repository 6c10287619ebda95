/* Instances of the stream and mma.sync tile kernels for 4-bit integers with zero-points. */
#include "kernels/cuda/matmul/instances.h"
#include "kernels/cuda/matmul/mma_tile.cuh"
#include "kernels/cuda/matmul/stream.cuh"

const void *qt_stream_zero_instance(int token_tiles, int strips)
{
    return qt_stream_of<qt_decode_int4_zero>(token_tiles, strips);
}

const void *qt_mma_tile_zero_instance(int kind)
{
    return qt_mma_tile_of<qt_decode_int4_zero>(kind);
}
