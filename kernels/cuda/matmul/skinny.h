/* Arguments of the skinny kernels, and what their plans share. */
#ifndef QT_KERNELS_CUDA_MATMUL_SKINNY_H
#define QT_KERNELS_CUDA_MATMUL_SKINNY_H

#include "kernels/cuda/common/plan.h"
#include "kernels/cuda/matmul/decode.h"

/* Blocks of 64 columns of a stage, and slots of 128, each of which one warp of those along k takes.
 */
enum { QT_SKINNY_BLOCKS = 4, QT_SKINNY_SLOTS = 2 };

/* Words of shared memory for what the warps that convert X find, with room for all of them. */
enum { QT_SKINNY_TOPS = 32 };

/* Warps of a block, at most: those that multiply, copy and convert X; registers allow no more. */
static __host__ __device__ constexpr int qt_skinny_warps(int token_tiles, int strips)
{
    return token_tiles == 2 || strips == 4 ? 18 : 24;
}

/* What all of them have (skinny_ring.cuh). */
struct qt_skinny_base {
    CUtensorMap x; /* F16 [k / 64][m][64]; boxes of a stage's blocks, x_rows tokens */
    /* What the first copies want is in one line of 64 bytes: each line that is read first costs
     * 100 clocks. */
    int barriers_at;
    uint16_t arrivals, converters; /* warps that give a stage back; that convert X */
    int stages, stage_bytes, ring_at;
    int strips_cta, tile_strips, tiles; /* of a block: strips_cta = tiles * tile_strips */
    int k_stages;
    int stage_tx, planes_at[3], scales_at, zeros_at; /* not mix24: in a stage */
    int group_shift;                                 /* log2(channels per scale) */

    const float *token_factor; /* [m], or NULL: on every result of a token */
    void *y;                   /* F16 or BF16 [m][n] */
    int m, n, strips;
    int token0;      /* of X; token_factor and y begin there */
    int warps_k;     /* power of two, 2 or more; warps = warps_n * warps_k */
    float factor;    /* power of two on every result */
    int bf16;        /* y is BF16 */
    int wide_stores; /* rows of y are multiples of 8 bytes, and aligned */
    int dependent;   /* launched before the previous kernel has ended */
    int alias;       /* partial sums go where the stages were */
    int sums_at, tail_at;
    int finish_tokens, finish_rows; /* from a thread's four outputs to its next */
    uint32_t zero;                  /* 0, which the compiler does not know */
    int x_rows;                     /* of X in a stage: at most 8 MT, more than 8 MT - 8 */
    /* BF16 X that each block converts itself, to kept_pitch bytes a stage; 0: it comes with the
     * weights. */
    const void *kept_x; /* [m][k_stages * 256] */
    int kept_pitch, kept_at, tops_at;
    int token_converters; /* of a token */
};
struct qt_skinny_args : qt_skinny_base {
    struct qt_decode_args decode;
    int slot_groups, stage_groups; /* scales of a row in a slot (at least 1), in a stage */
    CUtensorMap plane[3]; /* U64 [strips][blocks * 16 * width]; boxes of a stage's blocks */
    CUtensorMap scales;   /* U64 [strips][groups * 4]; grouped formats */
    const __half *scale;  /* F16 [strips][pitch_groups][16]: for row scales, which go to the tail */
    size_t pitch_groups;
    CUtensorMap zeros; /* U64 [strips][groups * zero points' bytes / 8]; formats with such */
    int zero_pitch;    /* bytes of a strip, in a stage */
};

/* ---- plans (skinny_plan.cc) --------------------------------------------------------------------
 */

enum { QT_SKINNY_MAX_TOKENS = 16, QT_SKINNY_MAX_WARPS = 16 };
/* The largest tile, in strips. */
enum { QT_SKINNY_TILE = 16 };

/* Lines of X in a stage for so many tokens, and their bytes. */
static inline int qt_skinny_x_rows(const struct qtool_matmul_config *c, size_t tokens)
{
    int least = 8 * c->token_tiles - 7;
    return (int)tokens > least ? (int)tokens : least;
}

static inline int qt_skinny_x_bytes(const struct qtool_matmul_config *c, size_t tokens)
{
    return QT_SKINNY_BLOCKS * 128 * qt_skinny_x_rows(c, tokens);
}

/* Shared memory that a kernel wants, for a configuration. */
struct qt_skinny_room {
    int head_bytes;   /* before the ring */
    int kept_bytes;   /* X behind the head, if blocks convert it */
    int stage_bytes;  /* a multiple of 1024 */
    int weight_bytes; /* of a stage ... */
    int ahead_bytes;  /* ... of which so many should be under way */
    int tail_bytes;   /* after the sums */
};

/* Strips of a tile: those of a block are taken in equal tiles, of as many as its warps have at
 * most. Rows of the partial sums of a tile. */
int qt_skinny_tile_strips(const struct qtool_matmul_config *c);
int qt_skinny_sums_pitch(const struct qtool_matmul_config *c);
int qt_skinny_tiles(const struct qtool_matmul_config *c);
/* As many strips as the last warp along the rows has at most: c->strips or half of them. */
int qt_skinny_last(const struct qtool_matmul_config *c);

/* What c and the room say of shared memory and of tiles, for launches of m tokens; returns the
 * size. */
size_t qt_skinny_layout(struct qt_skinny_base *a, const struct qtool_matmul_config *c,
                        const struct qt_skinny_room *room, size_t m);
/* All of a configuration but its depth. */
struct qt_skinny_choice {
    int largest; /* strips of a tile, at most */
    int small;   /* tiles of up to so many get at most 8 warps, others 16 */
    bool wide;   /* a warp has four strips, not two */
    bool thirds; /* tiles of 3 strips get three warps along the rows, 12 in all: a last warp that
                    has one of two strips takes as long as others */
    bool even;   /* rather shorter tiles than some schedulers with more warps than others */
};
struct qtool_matmul_config qt_skinny_config(const struct qtool_matmul_plan *p, int strips,
                                            const struct qt_skinny_choice *choice);
/* As many stages as bring room->ahead_bytes, if they fit, for launches of m tokens; 0: not even two
 * fit. */
int qt_skinny_depth(const struct qtool_matmul_plan *p, const struct qtool_matmul_config *c,
                    const struct qt_skinny_room *room, size_t m);
/* Checks all of p->config but that there is a kernel. most: token tiles of the largest. */
int qt_skinny_check_config(struct qtool_matmul_plan *p, int strips, int most);
/* Sets what follows from the shared memory that is wanted. dependent: the kernel may be launched
 * before the one before it has ended. */
int qt_skinny_check_room(struct qtool_matmul_plan *p, size_t bytes, int strips, bool dependent);
/* Of a, what follows from the plan but for X. */
void qt_skinny_fill(struct qt_skinny_base *a, const struct qtool_matmul_plan *p, int strips,
                    size_t blocks, void *y);

#endif
