/* Dynamic shared memory of the matrix product kernels. Each kernel lays it out by offsets that the
 * host computes. 1024 bytes is the alignment of TMA boxes with the 128-byte swizzle. */
#ifndef QT_KERNELS_CUDA_COMMON_SMEM_CUH
#define QT_KERNELS_CUDA_COMMON_SMEM_CUH

extern __shared__ __align__(1024) unsigned char qt_smem[];

#endif
