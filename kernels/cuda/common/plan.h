/* Host side: what a matrix is, and the parts of qtool_kernels.h that belong to one kind of kernel.
 */
#ifndef QT_KERNELS_CUDA_COMMON_PLAN_H
#define QT_KERNELS_CUDA_COMMON_PLAN_H

#include "kernels/cuda/common/instances.h"
#include "kernels/include/qtool_kernels.h"

#include <cuda.h>
#include <cuda_runtime.h>

enum { QT_BLOCK_COLS = 64, QT_STRIP_ROWS = 16 };

/* Rings of stages in shared memory (ring.cuh): at most so many; bytes of their barriers. */
enum { QT_RING_STAGES = 16, QT_RING_BARRIER_BYTES = (2 * QT_RING_STAGES + 1) * 8 };
/* Threads that fill them: a warp for weights, which do not depend on the previous kernel, and one
 * for X, which does. */
enum { QT_RING_COPIERS = 64 };

/* A checked struct qtool_matmul_weight. */
struct qt_shape {
    enum qt_format format;
    int bits;
    int width[3];       /* of its planes */
    int strips, blocks; /* of the matrix */
    size_t groups;      /* scales of a row */
    size_t pitch_blocks, pitch_groups;
    int group_shift; /* log2(group); 30: one scale per row */
    bool grouped;    /* the kernel applies scales to partial sums, not to results */
    int zero_bytes;  /* of the zero points of 16 rows and a group; 0: there is no such section */
    bool zero_boxes; /* the copy engine can copy them, if there are any: 16 bytes at multiples of
                      * 16, two groups of 4 bits */
};

static inline size_t ceil_div(size_t a, size_t b)
{
    return a / b + (a % b != 0);
}

static inline size_t round_up(size_t a, size_t b)
{
    return ceil_div(a, b) * b;
}

/* Whether a multiprocessor has so many weights that with few tokens it is the rate of memory that
 * takes the time, not latencies. */
static inline bool qt_long_share(size_t n, size_t k, int sms)
{
    return n * k / (size_t)sms >= 160000;
}

/* NULL, or why there is no kernel for it. */
const char *qt_shape_of(struct qt_shape *out, const struct qtool_matmul_weight *w);
/* Writes plan->reason and returns status. */
int qt_refuse(struct qtool_matmul_plan *p, int status, const char *fmt, ...);
/* The power of two that results are to be multiplied by. */
float qt_result_factor(const struct qtool_matmul_weight *w);
struct qt_decode_args qt_decode_args_of(const struct qtool_matmul_weight *w);
/* Bytes of shared memory with which a multiprocessor has room for one block. Those of a dependent
 * launch come while others are there: with room for two some multiprocessors would get two of them
 * and finish late (fp6, 57344 x 8192: 136 us instead of 84). */
static inline size_t qt_one_block_smem(size_t bytes, int smem_limit)
{
    return bytes <= (size_t)smem_limit / 2 ? (size_t)smem_limit / 2 + 1024 : bytes;
}
/* So many bytes of shared memory as plan->smem_bytes, or those of one block for a dependent launch;
 * refuses more than the device has. */
int qt_take_smem(struct qtool_matmul_plan *p, size_t bytes, bool dependent);
/* Launches p->kernel (device.h), in clusters of so many blocks along x. dependent: if its code is
 * for 9.0. */
int qt_launch_clusters(const struct qtool_matmul_plan *p, void *args, int threads, int cluster,
                       bool dependent, void *stream);
int qt_launch(const struct qtool_matmul_plan *p, void *args, int threads, bool dependent,
              void *stream);

/* ---- tensor_map.cc -----------------------------------------------------------------------------
 */

/* cuTensorMapEncodeTiled as plan->encode_map; refuses where the driver has none. */
int qt_need_tensor_maps(struct qtool_matmul_plan *p);

/* What is copied in boxes. Fastest dimension first. */
struct qt_tensor {
    const void *base;
    int rank;
    size_t dims[3], strides[2]; /* in elements; in bytes, from the second dimension on */
    int box[3];
    bool halves; /* FP16 in lines of 64 with the 128-byte swizzle, else U64 */
};
bool qt_tensor_map(const struct qtool_matmul_plan *p, CUtensorMap *map, const struct qt_tensor *t);
/* Prepared X as [k_blocks][m][64], in boxes of `blocks` x `tokens` x 64. */
bool qt_x_map(const struct qtool_matmul_plan *p, CUtensorMap *map, const void *x, size_t k_blocks,
              int tokens, int blocks);
/* Planes, and group scales and zero points if there are any, in boxes of so many strips. */
bool qt_weight_maps(const struct qtool_matmul_plan *p, CUtensorMap plane[3], CUtensorMap *scales,
                    CUtensorMap *zeros, const struct qt_shape *s,
                    const struct qtool_matmul_weight *w, int box_strips, int box_blocks,
                    int box_groups);
/* Scales of a row in so many blocks, which begin with a group or are part of one; 0: one per row.
 */
static inline int qt_stage_groups(const struct qt_shape *s, int blocks)
{
    int groups = s->grouped ? blocks * QT_BLOCK_COLS >> s->group_shift : 0;
    return s->grouped && groups == 0 ? 1 : groups;
}

/* Bytes of a strip in a box of zero points: of so many groups, or 16 if they are fewer. */
static inline int qt_zero_pitch(const struct qt_shape *s, int box_groups)
{
    const int bytes = box_groups * s->zero_bytes;
    return bytes == 8 ? 16 : bytes;
}

/* ---- prepare.cu --------------------------------------------------------------------------------
 *
 * X as kernels want it that do not convert it themselves: FP16, k a multiple of QT_BLOCK_COLS.
 */
bool qt_prepare_needed(const struct qtool_matmul_plan *p);
size_t qt_prepare_bytes(const struct qtool_matmul_plan *p); /* of workspace, or 0 */
/* *x becomes the prepared one in `workspace`; token_factor: [m] there, or NULL. */
int qt_prepare_run(const struct qtool_matmul_plan *p, const void **x, const float **token_factor,
                   void *workspace, void *stream);

/* ---- the kernels -------------------------------------------------------------------------------
 */

/*
 * choose sets plan->config, or returns false when there is no configuration. check sets what
 * follows from the config. run enqueues.
 */
bool qt_stream_choose(struct qtool_matmul_plan *p, const struct qt_shape *s);
int qt_stream_check(struct qtool_matmul_plan *p, const struct qt_shape *s);
int qt_stream_run(const struct qtool_matmul_plan *p, const struct qt_shape *s,
                  const struct qtool_matmul_weight *w, void *y, const void *x, void *workspace,
                  void *stream);

bool qt_skinny_choose(struct qtool_matmul_plan *p, const struct qt_shape *s);
int qt_skinny_check(struct qtool_matmul_plan *p, const struct qt_shape *s);
int qt_skinny_run(const struct qtool_matmul_plan *p, const struct qt_shape *s,
                  const struct qtool_matmul_weight *w, void *y, const void *x, void *workspace,
                  void *stream);

/* us: about how long it will take. */
bool qt_tile_choose(struct qtool_matmul_plan *p, const struct qt_shape *s, double *us);
int qt_tile_check(struct qtool_matmul_plan *p, const struct qt_shape *s);
int qt_tile_run(const struct qtool_matmul_plan *p, const struct qt_shape *s,
                const struct qtool_matmul_weight *w, void *y, const void *x, void *workspace,
                void *stream);

/* The same; us: it must be faster than that. */
bool qt_mma_tile_choose(struct qtool_matmul_plan *p, const struct qt_shape *s, double *us);
int qt_mma_tile_check(struct qtool_matmul_plan *p, const struct qt_shape *s);
int qt_mma_tile_run(const struct qtool_matmul_plan *p, const struct qt_shape *s,
                    const struct qtool_matmul_weight *w, void *y, const void *x, void *workspace,
                    void *stream);

/* Than a kernel that takes about us. packed_bytes: of the matrix. */
bool qt_dense_is_faster(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                        size_t packed_bytes, double us);
void qt_dense_choose(struct qtool_matmul_plan *p);
const char *qt_dense_fault(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w);
/* kernel: any that dequantizes the matrix. */
int qt_dense_check(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                   const void *kernel);
int qt_dense_run(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w, void *y,
                 const void *x, void *workspace, void *stream);

#endif
