/* Arguments of the tile kernels, and what their plans share. */
#ifndef QT_KERNELS_CUDA_MATMUL_TILE_H
#define QT_KERNELS_CUDA_MATMUL_TILE_H

#include "kernels/cuda/common/plan.h"
#include "kernels/cuda/matmul/decode.h"

/* The kernels there are: X(warpgroups, tokens, blocks of k in a stage, rounds; see below). */
#define QT_TILE_COMMON_TABLE(X)                                                                    \
    X(2, 32, 2, false)                                                                             \
    X(4, 32, 2, false)                                                                             \
    X(2, 48, 2, false)                                                                             \
    X(2, 64, 2, false)                                                                             \
    X(3, 64, 2, false)                                                                             \
    X(2, 96, 2, false)                                                                             \
    X(2, 128, 2, false)
/* Integers, and formats with a scale a row. Two blocks in a stage are 4 to 6 % faster for 192 and
 * 224 tokens of integers than one, and 1 % slower for formats with a scale a row. */
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
/* What is looked up, by tables that leave less room for stages. Exact tiles of 192 x 128 would be
 * for 65 to 128 tokens alone, by a seventh of a percent. */
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

/* Each kernel takes a second to compile, so those are left out that plans would seldom take: of
 * formats of more than 6 bits, whose decoding tiles of few tokens wait for anyway, some widths; of
 * those with a scale a row, with which nothing is rounded, what has more than 128 rows and few
 * tokens; the exact way with 256 tokens where the other is faster; and of rare formats all
 * but 64, 128 and 256 tokens. */
static __host__ __device__ constexpr bool qt_tile_exists(int bits, bool grouped, bool rare,
                                                         int warpgroups, int tokens, bool rounds)
{
    return (!rare || (warpgroups == 2 && tokens % 64 == 0 && tokens != 192)) &&
           (bits <= 6 || (tokens != 48 && tokens != 160 && tokens != 224)) &&
           (grouped || (!rounds && (warpgroups == 2 || tokens > 64))) &&
           (bits < 8 || !grouped || tokens < 256 || rounds);
}

/*
 * K-steps whose products are started at a time: 4 if there are registers for the fragments of two
 * such batches, and an even number of batches in a stage. A group of channels is a whole number of
 * batches, or, of 32 channels, half of one.
 */
static __host__ __device__ constexpr int qt_tile_steps(int warpgroups, int tokens, int blocks)
{
    return blocks == 1 || (warpgroups == 4 && tokens == 128) ? 2 : 4;
}

/*
 * Kernels that round multiply weights by their group scales, in FP16 as qtool_matmul_dequantize does.
 * The alternative, sums in units of a scale, multiplies as many sums at each new group as a lane
 * has: with groups of 128 channels it is 2 to 5 % slower (docs/kernels_tried.md), but for integers
 * of 4 bits, which take two multiplications of weights, 2 % faster; with groups of 64 it is 2 to
 * 12 % slower, but for 8 bits; groups of 32, with which it would take half as long again, are
 * always rounded. With one scale a row nothing is. What else plans choose for up to so many tokens
 * is exact:
 */
enum { QT_TILE_EXACT_TOKENS = 128, QT_TILE_ROUNDED_GROUP_LOG2 = 5 };

/* Shared memory through which a warpgroup's results go, 16 tokens of 64 rows at a time. */
enum { QT_TILE_RESULT_TOKENS = 16, QT_TILE_RESULT_BYTES = QT_TILE_RESULT_TOKENS * 64 * 2 };

/* What all tile kernels have (tile_ring.cuh). */
struct qt_tile_base {
    CUtensorMap x;     /* F16 [k / 64][m][64], boxes of a stage's blocks x tokens x 64 */
    CUtensorMap x_cut; /* the same in boxes of one block and cut_tokens */
    /* What the first copies want is in one line of 64 bytes: each line that is read first costs 100
     * clocks. */
    int barriers_at, stages, stage_bytes, ring_at;
    int m, cut_tokens; /* cut_tokens: of the last token tile, if it is copied in these; or 0 */
    int split_log2;    /* log2 of the blocks of a cluster, which share a tile along k */
    int k_stages;      /* of a tile */
    unsigned k_stages_inverse; /* 2^31 / k_stages, rounded up */
    int shared_tiles;          /* the first ones, shared among all blocks */
    int range, ranges_longer;  /* of shared (tile, stage) pairs, a block's; so many have 1 more */
    int row_tiles, token_tiles, band; /* band: row tiles of a band, see tile_segment_at */
    int weight_tx;                    /* bytes that a stage waits for, beside X (not mix24) */
    int whole_tiles;                  /* of the others, a block's or cluster's ... */
    int blocks_with_more;             /* ... of which so many have 1 more */
    int n, strips;
    const float *token_factor; /* [m], or NULL: on every result of a token */
    void *y;                   /* F16 or BF16 [m][n] */
    float *partial;            /* [blocks][tile rows * tile tokens] */
    unsigned *ready;           /* [blocks][warpgroups]: of partial; 0 between launches */
    float factor;              /* power of two on every result */
    int bf16;                  /* y is BF16 */
    int whole_stores;          /* rows of y are multiples of 16 bytes, and aligned */
    int dependent;             /* launched before the previous kernel has ended */
    int results_at;
};

struct qt_tile_args : qt_tile_base {
    int group_shift;          /* log2(channels per scale) */
    int row_scales;           /* all channels of a row have one */
    int stage_groups;         /* scales of a row in a stage */
    int zeros_at, zero_pitch; /* in a stage; bytes of a strip */
    struct qt_decode_args decode;
    const __half *scale; /* F16 [strips][pitch_groups][16]: for row scales */
    size_t pitch_groups;
    CUtensorMap plane[3]; /* U64 [strips][blocks * 16 * width] */
    CUtensorMap scales;   /* U64 [strips][groups * 4]; grouped formats */
    CUtensorMap zeros;    /* U64 [strips][groups * zero points' bytes / 8]; formats with such */
};

/* ---- plans (tile_plan.cc) ----------------------------------------------------------------------
 */

/* Of most kernels, see below; and of those that bring much X, where to find it in the L2 counts for
 * more. */
static const float QT_TILE_WHOLE = .95f, QT_TILE_WHOLE_WIDE = .88f;

/* One or two tiles of so many tokens: longer products are at the power limit, where the times of
 * short ones, from which some of these numbers are, are too good. */
static inline bool qt_tile_short(int tokens, size_t m)
{
    return m <= 2 * (size_t)tokens;
}

/* A kernel that there is for a matrix. */
struct qt_tile_kind {
    int warpgroups, tokens, blocks;
    const void *kernel;
    float column_us;    /* microseconds on an H200 for 64 columns of k of a shared tile */
    float whole_factor; /* of that where blocks have whole tiles, or are clusters: they go through
                           k in step, and find X in the L2 */
    int head_bytes;     /* of shared memory before the ring */
    int weight_bytes;   /* of a stage, at most */
    float before_us;    /* that a launch before takes longer for this kernel than for others */
    float serial_us;    /* of a tile that is shared otherwise than in a cluster: what one of the
                           blocks does for all, beside the products */
    float shared_us;    /* that such tiles take longer than those of other kernels */
    bool rounds;        /* weights, times their group scales */
    int stages;         /* at least, if they fit; 0: as many as follow from weight_bytes */
};

struct qt_tile_matrix {
    int strips, blocks; /* of 16 rows, of 64 columns */
    int count;
    struct qt_tile_kind kinds[QT_TILE_KINDS];
};

/* Sets p->config; us: about how long it will take. False: there is no kernel. */
bool qt_tile_choose_kind(struct qtool_matmul_plan *p, const struct qt_tile_matrix *t, double *us);
/* The kind of p->config; NULL: there is none. */
const struct qt_tile_kind *qt_tile_kind_of(const struct qtool_matmul_plan *p,
                                           const struct qt_tile_matrix *t);
/* Checks p->config and sets what follows from it; the workspace is what qt_tile_fill takes. */
int qt_tile_check_config(struct qtool_matmul_plan *p, const struct qt_tile_matrix *t);
/* Of a, what follows from the plan but for X and token factors. False: the plan is not of such a
 * matrix, and has no kernel for it, or less shared memory than it wants. */
bool qt_tile_fill(struct qt_tile_base *a, const struct qtool_matmul_plan *p,
                  const struct qt_tile_matrix *t, void *y, void *workspace);
/* Sets what describes X: F16 [k_blocks][m][64]. False: there is no such description. */
bool qt_tile_x_maps(struct qt_tile_base *a, const struct qtool_matmul_plan *p,
                    const struct qt_tile_kind *k, const void *x, size_t k_blocks);
/* Bytes of the workspace that qt_tile_fill takes. */
size_t qt_tile_workspace(const struct qtool_matmul_plan *p, const struct qt_tile_matrix *t);

#endif
