/* The tile kernels: instances, arguments, and planning functions that the tile kernels of matmul,
 * mix24 and w4ax share. */
#ifndef QT_KERNELS_CUDA_MATMUL_TILE_H
#define QT_KERNELS_CUDA_MATMUL_TILE_H

#include "kernels/cuda/common/plan.h"
#include "kernels/cuda/matmul/decode.h"

/* Instances: X(consumer warpgroups, tokens per tile, fragment blocks of k per stage, rounds
 * weights). */
#define QT_TILE_COMMON_TABLE(X)                                                                    \
    X(2, 32, 2, false)                                                                             \
    X(4, 32, 2, false)                                                                             \
    X(2, 48, 2, false)                                                                             \
    X(2, 64, 2, false)                                                                             \
    X(3, 64, 2, false)                                                                             \
    X(2, 96, 2, false)                                                                             \
    X(2, 128, 2, false)
/* Integers, and formats with row scales. Two blocks per stage are 4 to 6 % faster than one for
 * integers with 192 and 224 tokens, and 1 % slower for formats with row scales. */
#define QT_TILE_EXACT_TABLE(X)                                                                     \
    QT_TILE_COMMON_TABLE(X)                                                                        \
    X(3, 128, 2, false)                                                                            \
    X(2, 160, 2, false)                                                                            \
    X(2, 192, 2, false)                                                                            \
    X(2, 224, 2, false)                                                                            \
    X(2, 256, 1, false)                                                                            \
    X(2, 64, 2, true)                                                                              \
    X(2, 128, 2, true)                                                                             \
    X(2, 256, 1, true)
/* Look-up formats, whose tables leave less room for stages. Exact tiles of 192 x 128 would gain
 * 0.15 % for 65 to 128 tokens. */
#define QT_TILE_LUT_TABLE(X)                                                                       \
    QT_TILE_COMMON_TABLE(X)                                                                        \
    X(3, 128, 2, true)                                                                             \
    X(2, 160, 2, true)                                                                             \
    X(2, 192, 1, true)                                                                             \
    X(2, 224, 1, true)                                                                             \
    X(2, 256, 1, true)                                                                             \
    X(2, 64, 2, true)                                                                              \
    X(2, 128, 2, true)
enum { QT_TILE_KINDS = 15 };

/*
 * True if an instance exists. Each takes a second to compile. These are omitted, as plans would
 * seldom choose them:
 *   - formats of more than 6 bits with 48, 160 or 224 tokens: dequantization limits small tiles;
 *   - formats with row scales: rounding kernels, and more than 128 rows with few tokens;
 *   - 8-bit integers: exact kernels with 256 tokens, where rounding is faster;
 *   - rare formats: all but 64, 128 and 256 tokens with two warpgroups.
 */
static __host__ __device__ constexpr bool qt_tile_exists(int bits, bool grouped, bool rare,
                                                         int warpgroups, int tokens, bool rounds)
{
    return (!rare || (warpgroups == 2 && tokens % 64 == 0 && tokens != 192)) &&
           (bits <= 6 || (tokens != 48 && tokens != 160 && tokens != 224)) &&
           (grouped || (!rounds && (warpgroups == 2 || tokens > 64))) &&
           (bits < 8 || !grouped || tokens < 256 || rounds);
}

/* True if this kernel exists for gated products: what plans choose for gate and up of common models
 * and 17 to 32, or 49 to 64 tokens. */
static __host__ __device__ constexpr bool qt_tile_gated(int warpgroups, int tokens)
{
    return (warpgroups == 4 && tokens == 32) || (warpgroups == 3 && tokens == 64);
}

/*
 * K-steps per batch of wgmma instructions: 4 if registers hold the fragments of two batches and a
 * stage has an even number of batches. A group of channels is a whole number of batches, or half a
 * batch with groups of 32 channels.
 */
static __host__ __device__ constexpr int qt_tile_steps(int warpgroups, int tokens, int blocks)
{
    return blocks == 1 || (warpgroups == 4 && tokens == 128) ? 2 : 4;
}

/*
 * Rounding kernels multiply weights by their group scales in FP16, as qtool_matmul_dequantize does.
 * Exact kernels multiply the accumulators at the end of each group instead. Compared with rounding,
 * they are 2 to 5 % slower with groups of 128 channels (docs/experiments, E054), but 2 % faster for
 * 4-bit integers, where rounding takes two multiplications of weights. With groups of 64 they are 2
 * to 12 % slower, except for 8 bits. With groups of 32 they would take half as long again, so
 * groups of 32 are always rounded. Formats with row scales are never rounded. Other products of up
 * to QT_TILE_EXACT_TOKENS tokens are exact.
 */
enum { QT_TILE_EXACT_TOKENS = 128, QT_TILE_ROUNDED_GROUP_LOG2 = 5 };

/* Shared memory for the epilogue of a warpgroup: results of 16 tokens and 64 rows at a time. */
enum { QT_TILE_RESULT_TOKENS = 16, QT_TILE_RESULT_BYTES = QT_TILE_RESULT_TOKENS * 64 * 2 };

/* Arguments that all tile kernels have (tile_common.cuh). */
struct qt_tile_base {
    CUtensorMap x;     /* F16 [k / 64][m][64], boxes of a stage's blocks x tokens x 64 */
    CUtensorMap x_cut; /* the same in boxes of one block and cut_tokens */
    /* The arguments of the first copies share a line of 64 bytes: the first read of a line takes
     * 100 clocks. */
    int barriers_at, stages, stage_bytes, ring_at;
    int m, cut_tokens; /* cut_tokens: tokens of the last token tile if it uses x_cut, else 0 */
    int split_log2;    /* log2 of the thread blocks of a cluster, which share a tile along k */
    int k_stages;      /* pipeline stages of a tile */
    unsigned k_stages_inverse;        /* 2^31 / k_stages, rounded up */
    int shared_tiles;                 /* Stream-K: the first tiles, shared by all thread blocks */
    int range, ranges_longer;         /* shared (tile, stage) pairs per thread block; the first
                                  ranges_longer have 1 more */
    int row_tiles, token_tiles, band; /* band: row tiles per band, see tile_segment_at */
    int weight_tx;                    /* bytes of weights copied per stage (not mix24) */
    int whole_tiles;                  /* not shared tiles per thread block or cluster; */
    int blocks_with_more;             /* the first blocks_with_more have 1 more */
    int n, strips;
    const float *token_factor; /* [m], or NULL: factor of all results of a token */
    void *y;                   /* F16 or BF16 [m][n] */
    float *partial;            /* [blocks][tile rows * tile tokens] */
    unsigned *ready;           /* [blocks][warpgroups]: flags of partial; 0 between launches */
    float factor;              /* power of two that multiplies every result */
    int bf16;                  /* y is BF16 */
    int whole_stores;          /* rows of y are 16-byte aligned */
    int dependent;             /* launched as a dependent launch */
    int results_at;
};

struct qt_tile_args : qt_tile_base {
    int group_shift;          /* log2(channels per scale) */
    int row_scales;           /* one scale per row */
    int stage_groups;         /* scales per row in a stage */
    int zeros_at, zero_pitch; /* zero-points: offset in a stage; bytes per strip */
    struct qt_decode_args decode;
    const __half *scale; /* F16 [strips][pitch_groups][16]: row scales */
    size_t pitch_groups;
    int gated; /* enum qtool_matmul_gated. Kernels for gated products: a tile has strips of gate
                  and of up in turns, and n is the number of channels of each */
    CUtensorMap plane[3]; /* U64 [strips][blocks * 16 * width] */
    CUtensorMap scales;   /* U64 [strips][groups * 4]; formats with group scales */
    CUtensorMap zeros;    /* U64 [strips][groups * bytes of zero-points / 8] */
};

/* ---- plans (tile_plan.cc) ------------------------------------------------------------------- */

/* qt_tile_kind.whole_factor of most kernels, and of kernels that load much X, which gain more from
 * finding it in the L2. */
static const float QT_WHOLE_FACTOR = .95f, QT_WHOLE_FACTOR_WIDE = .88f;

/* True if m tokens are one or two tiles of `tokens`. Larger products are at the power limit, where
 * model times fitted to short products are too low. */
static inline bool qt_tile_short(int tokens, size_t m)
{
    return m <= 2 * (size_t)tokens;
}

/* A kernel that supports a matrix. Times are in microseconds on an H200. */
struct qt_tile_kind {
    int warpgroups, tokens,
        blocks; /* consumer warpgroups; tokens per tile; blocks of k per stage */
    const void *kernel;
    float column_us;    /* 64 columns of k of a shared tile */
    float whole_factor; /* factor of column_us for whole tiles and clusters: their thread blocks go
                           through k in step and find X in the L2 */
    int head_bytes;     /* shared memory before the pipeline */
    int weight_bytes;   /* maximum bytes of weights in a stage */
    float before_us;    /* extra time of the launch before this kernel */
    float serial_us;    /* minimum time of a shared tile of Stream-K: work that one of its thread
                           blocks does for all, in parallel with the products */
    float shared_us;    /* extra time of shared tiles of Stream-K */
    bool rounds;        /* rounds the products of weights and group scales */
    int stages;         /* minimum stages, if they fit; 0: as follows from weight_bytes */
};

struct qt_tile_matrix {
    int strips, blocks; /* of 16 rows; of 64 columns (w4ax: 128) */
    int count;
    struct qt_tile_kind kinds[QT_TILE_KINDS];
};

/* Sets p->config to the fastest kernel and *us to its estimated time. Returns false if there is no
 * kernel. */
bool qt_tile_choose_kind(struct qtool_matmul_plan *p, const struct qt_tile_matrix *t, double *us);
/* Returns the kernel of p->config, or NULL. */
const struct qt_tile_kind *qt_tile_kind_of(const struct qtool_matmul_plan *p,
                                           const struct qt_tile_matrix *t);
/* Validates p->config and sets the rest of the plan. The workspace is qt_tile_workspace. */
int qt_tile_check_config(struct qtool_matmul_plan *p, const struct qt_tile_matrix *t);
/* Sets the fields of *a that follow from the plan, except X and token_factor. Returns false if the
 * matrix has no such kernel or needs more shared memory than was planned. */
bool qt_tile_fill(struct qt_tile_base *a, const struct qtool_matmul_plan *p,
                  const struct qt_tile_matrix *t, void *y, void *workspace);
/* Encodes the tensor maps of X, F16 [k_blocks][m][64]. Returns false if the driver refuses one. */
bool qt_tile_x_maps(struct qt_tile_base *a, const struct qtool_matmul_plan *p,
                    const struct qt_tile_kind *k, const void *x, size_t k_blocks);
/* Returns the bytes of workspace that qt_tile_fill uses. */
size_t qt_tile_workspace(const struct qtool_matmul_plan *p, const struct qt_tile_matrix *t);

#endif
