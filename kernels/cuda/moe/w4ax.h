/* Layers of w4ax experts: what host and device code share. */
#ifndef QT_KERNELS_CUDA_MOE_W4AX_H
#define QT_KERNELS_CUDA_MOE_W4AX_H

#include "kernels/cuda/moe/moe.h"
#include "kernels/cuda/w4ax/plan.h"

/* A matrix in the table of a layer, and how its input is quantized: that of gate and up as the
 * entry of expert 0 says. */
struct alignas(64) qt_moe_w4ax_matrix {
    const unsigned char *plane; /* U32 [strips][pitch_blocks][32][4] */
    const unsigned char *scale; /* BLOCK: F16, INT: U8 [strips][blocks][16] */
    const __half *row_scale;    /* INT, ROW: F16 [strips][16] */
    const float *bias;          /* [n], or NULL */
    const uint32_t *words;      /* [blocks]: block words */
    const uint32_t *perm;       /* [k], or NULL */
    float factor;               /* power of two that multiplies every result */
    float clip4, clip8;
};

static_assert(QT_MOE_MATRICES * sizeof(struct qt_moe_w4ax_matrix) == QTOOL_MOE_TABLE_EXPERT,
              "size of the public header");

/* Codes take 128 bytes per position and channel block, by position in the order of
 * qtool_w4ax.h. */
struct qt_moe_w4ax_x {
    unsigned char *codes; /* [blocks][positions][128] */
    float *scale;         /* BLOCK: [blocks][positions], else [positions] */
    int *sum;             /* INT: [positions] */
    int positions;        /* a multiple of 4 */
};

/* Tokens of an item of the kind MANY by wgmma. BLOCK has two sets of accumulators. */
enum { QT_MOE_W4AX_BLOCK_TOKENS = 96, QT_MOE_W4AX_TOKENS = 128 };
static __host__ __device__ constexpr int qt_moe_w4ax_tokens(enum qtool_w4ax_scales scales)
{
    return scales == QTOOL_W4AX_BLOCK ? QT_MOE_W4AX_BLOCK_TOKENS : QT_MOE_W4AX_TOKENS;
}

/* The kernel by wgmma: units of which it keeps what their epilogues need, bytes of one; channel
 * blocks of a stage. */
enum { QT_MOE_UNITS = 8, QT_MOE_W4AX_UNIT_BYTES = 1664, QT_MOE_W4AX_STAGE_BLOCKS = 2 };

/* Bytes of a warp's two strips in a stage of a product by mma.sync: codes and scales of a channel
 * block. */
enum { QT_MOE_W4AX_WARP_BYTES = QT_MOE_STRIPS * (QT_W4AX_STRIP_BYTES + 32) };

struct qt_moe_w4ax_args : qt_moe_unit_args {
    const struct qt_moe_w4ax_matrix *table; /* [experts][QT_MOE_MATRICES] */
    struct qt_moe_w4ax_x x;
    size_t pitch64;       /* fragment blocks of 64 channels from strip to strip */
    int blocks, blocks64; /* channel blocks; fragment blocks */
    uint32_t nibbles;     /* W4AX_NIBBLES */
    uint32_t zero;        /* 0, unknown to the compiler */
};

/* The quantizer: a thread block per row of X. Row r has the pairs r * copies and following, and is
 * stored at the positions of all of them. */
struct qt_moe_w4ax_quantize_args {
    const struct qt_moe_w4ax_matrix *table;
    struct qt_moe_w4ax_x out;
    const uint16_t *x;   /* F16 or BF16 [rows][k]; `inner`: by position */
    const int *position; /* [pairs] */
    const int *ids;      /* [pairs] */
    struct qt_moe_direct direct;
    int copies;
    int inner; /* rows are quantized as their experts say */
    int k, blocks, scales, rotate;
};
/* Most channels of a row: 1024 threads of 4 times 8. */
enum { QT_MOE_W4AX_CHANNELS = 32768 };

/* Host addresses of kernels. */
const void *qt_moe_w4ax_quantize_instance(bool bf16, int per_thread); /* channel blocks: 1 or 4 */
const void *qt_moe_w4ax_few_instance(enum qtool_w4ax_scales scales);
const void *qt_moe_w4ax_many_instance(enum qtool_w4ax_scales scales); /* for 8.0 */
const void *qt_moe_w4ax_wide_instance(enum qtool_w4ax_scales scales); /* for 9.0a */

#endif
