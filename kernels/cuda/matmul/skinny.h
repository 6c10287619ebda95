/* The skinny kernels, for few tokens: arguments, and planning functions that the skinny kernels of
 * matmul, mix24 and w4ax share. */
#ifndef QT_KERNELS_CUDA_MATMUL_SKINNY_H
#define QT_KERNELS_CUDA_MATMUL_SKINNY_H

#include "kernels/cuda/common/plan.h"
#include "kernels/cuda/matmul/decode.h"

/* A pipeline stage has QT_SKINNY_BLOCKS fragment blocks of 64 columns: QT_SKINNY_SLOTS slots of 128
 * columns. One of the warps along k consumes a slot. */
enum { QT_SKINNY_BLOCKS = 4, QT_SKINNY_SLOTS = 2 };

/* Words of shared memory for the maxima that converting warps find: at least one for each. */
enum { QT_SKINNY_TOPS = 32 };

/* Maximum warps of a thread block, limited by registers: consumers, producers and converters. */
static __host__ __device__ constexpr int qt_skinny_warps(int token_tiles, int strips)
{
    return token_tiles == 2 || strips == 4 ? 18 : 24;
}

/* Arguments that all skinny kernels have (skinny_common.cuh). */
struct qt_skinny_base {
    CUtensorMap x; /* F16 [k / 64][m][64]; boxes of a stage's blocks and x_rows tokens */
    /* The arguments of the first copies share a line of 64 bytes: the first read of a line takes
     * 100 clocks. */
    int barriers_at;
    uint16_t arrivals, converters; /* warps that release a stage; that convert X */
    int stages, stage_bytes, ring_at;
    int strips_cta, tile_strips, tiles; /* per thread block; strips_cta = tiles * tile_strips */
    int k_stages;
    int stage_tx, planes_at[3], scales_at, zeros_at; /* bytes and offsets in a stage; not mix24 */
    int group_shift;                                 /* log2(channels per scale) */

    const float *token_factor; /* [m], or NULL: factor of all results of a token */
    void *y;                   /* F16 or BF16 [m][n] */
    int m, n, strips;
    int token0;      /* first token in X; token_factor and y begin at it */
    int warps_k;     /* power of two, 2 or more; warps = warps_n * warps_k */
    float factor;    /* power of two that multiplies every result */
    int bf16;        /* y is BF16 */
    int wide_stores; /* rows of y are 8-byte aligned */
    int dependent;   /* launched as a dependent launch */
    int alias;       /* partial sums reuse the memory of the stages */
    int sums_at, tail_at;
    int finish_tokens, finish_rows; /* step from a thread's four outputs to its next four */
    uint32_t zero;                  /* 0, unknown to the compiler */
    int x_rows;                     /* tokens of X in a stage: 8 MT - 7 to 8 MT */
    /* BF16 X that each thread block converts itself, to kept_pitch bytes per stage. kept_pitch 0: X
     * is copied into the stages. */
    const void *kept_x; /* [m][k_stages * 256] */
    int kept_pitch, kept_at, tops_at;
    int token_converters; /* converting warps per token */
};
struct qt_skinny_args : qt_skinny_base {
    struct qt_decode_args decode;
    int slot_groups, stage_groups; /* scales per row in a slot (at least 1), in a stage */
    CUtensorMap plane[3]; /* U64 [strips][blocks * 16 * width]; boxes of a stage's blocks */
    CUtensorMap scales;   /* U64 [strips][groups * 4]; formats with group scales */
    const __half *scale;  /* F16 [strips][pitch_groups][16]: row scales */
    size_t pitch_groups;
    CUtensorMap zeros; /* U64 [strips][groups * bytes of zero-points / 8] */
    int zero_pitch;    /* bytes of zero-points per strip in a stage */
    int gated; /* enum qtool_matmul_gated. Kernels for gated products: a tile has strips of gate
                  and of up in turns, and n is the number of channels of each */
};

/* A launch of several matrices, each with thread blocks of its own: from number `first` on. */
struct qt_skinny_part : qt_skinny_args {
    int first;
};
struct qt_skinny_many_args {
    qt_skinny_part part[QTOOL_MATMUL_MANY];
};
/* Kernels take 4096 bytes of arguments, and 32764 since CUDA 12.1. Since CUDA 13 tensor maps are
 * aligned to 128 bytes instead of 64. */
static_assert(sizeof(struct qt_skinny_many_args) <= (alignof(CUtensorMap) > 64 ? 32764 : 4096),
              "kernel arguments");

/* ---- plans (skinny_plan.cc) ----------------------------------------------------------------- */

enum { QT_SKINNY_MAX_TOKENS = 16, QT_SKINNY_MAX_WARPS = 16 };
/* Maximum tile size in strips. */
enum { QT_SKINNY_TILE = 16 };

/* Tokens of X in a stage for launches of `tokens` tokens. */
static inline int qt_skinny_x_rows(const struct qtool_skinny_config *c, size_t tokens)
{
    int least = 8 * c->token_tiles - 7;
    return (int)tokens > least ? (int)tokens : least;
}

/* Their bytes. */
static inline int qt_skinny_x_bytes(const struct qtool_skinny_config *c, size_t tokens)
{
    return QT_SKINNY_BLOCKS * 128 * qt_skinny_x_rows(c, tokens);
}

/* Shared memory that a kernel needs with a configuration, in bytes. */
struct qt_skinny_room {
    int head_bytes;   /* before the pipeline: the look-up table */
    int kept_bytes;   /* converted X, after the head */
    int stage_bytes;  /* of a stage; a multiple of 1024 */
    int weight_bytes; /* weights in a stage */
    int ahead_bytes;  /* weights that should be in flight */
    int tail_bytes;   /* after the partial sums */
};

/* Returns the number of row tiles of a thread block. Tiles have equal size, at most what the warps
 * compute in one pass. */
int qt_skinny_tiles(const struct qtool_skinny_config *c);
/* Returns the strips of a tile. */
int qt_skinny_tile_strips(const struct qtool_skinny_config *c);
/* Returns the row pitch of the partial sums of a tile, in floats. */
int qt_skinny_sums_pitch(const struct qtool_skinny_config *c);
/* Returns the strips that the last warp along the rows needs: c->strips, or half if that is
 * enough. */
int qt_skinny_last(const struct qtool_skinny_config *c);

/* Sets the fields of *a for tiles and shared memory, for launches of m tokens. Returns the size of
 * the shared memory. */
size_t qt_skinny_layout(struct qt_skinny_base *a, const struct qtool_skinny_config *c,
                        const struct qt_skinny_room *room, size_t m);

/* Rules for choosing a configuration. */
struct qt_skinny_choice {
    int largest; /* maximum strips of a tile */
    int small;   /* tiles of up to this many strips get at most 8 warps, others 16 */
    bool wide;   /* four strips per warp instead of two */
    bool thirds; /* tiles of 3 strips get three warps along the rows, 12 in all: for kernels whose
                    last warp takes as long for one strip as for two */
    bool even;   /* prefer smaller tiles to schedulers with unequal numbers of warps */
};
/* Returns a configuration for `strips` strips, with depth 0. */
struct qtool_skinny_config qt_skinny_config(const struct qtool_matmul_plan *p, int strips,
                                            const struct qt_skinny_choice *choice);
/* Returns the depth that brings room->ahead_bytes into flight, or as much as fits, for launches of
 * m tokens. Returns 0 if two stages do not fit. */
int qt_skinny_depth(const struct qtool_matmul_plan *p, const struct qtool_skinny_config *c,
                    const struct qt_skinny_room *room, size_t m);
/* Validates p->config.skinny, except that a kernel exists. most: maximum token_tiles. */
int qt_skinny_check_config(struct qtool_matmul_plan *p, int strips, int most);
/* Checks that the plan has a kernel, and sets shared memory, grid and tensor map encoder.
 * dependent: the kernel may be a dependent launch. */
int qt_skinny_check_room(struct qtool_matmul_plan *p, size_t bytes, int strips, bool dependent);
/* Sets the fields of *a that follow from the plan, except those of X. */
void qt_skinny_fill(struct qt_skinny_base *a, const struct qtool_matmul_plan *p, int strips,
                    size_t blocks, void *y);

#endif
