/* Layers of experts: what the plans of all kinds of weights share, and what each kind has. */
#ifndef QT_KERNELS_CUDA_MOE_PLAN_H
#define QT_KERNELS_CUDA_MOE_PLAN_H

#include "kernels/cuda/common/device.h"
#include "kernels/cuda/common/plan.h"
#include "kernels/cuda/moe/moe.h"

/* Experts with more pairs than this use the kernels for many tokens: 3 tiles of 16 take longer. */
enum { QT_MOE_FEW_PAIRS = 32 };

/* A run. Offsets are those of the workspace. */
struct qt_moe_run {
    const void *table, *x;
    const int *ids;
    char *workspace;
    size_t items, position, order, item[QT_MOE_KINDS];
    size_t partial; /* results of down by position */
    size_t own;     /* what the kind needs besides */
    bool first;     /* the next kernel is the first of the run */
    void *stream;
};

/* Each kind of weights provides these functions. They return a status and write the reason. */
struct qt_moe_kind {
    /* Checks all matrices of the layer, and writes the table of qtool_moe_table. */
    int (*table)(void *out, const struct qtool_moe_layer *layer, char reason[160]);
    /* Chooses kernels. Sets the members of the state that say so, and the kind's own. */
    int (*plan)(struct qtool_moe_plan *p, const struct qtool_moe_layer *layer);
    /* Bytes of r->own. */
    size_t (*own_bytes)(const struct qtool_moe_plan *p);
    /* Enqueues gate, up and down: from r->x to r->partial. */
    int (*run)(const struct qtool_moe_plan *p, struct qt_moe_run *r);
};

/* Stored in `internal` of struct qtool_moe_plan. */
struct qt_moe_state {
    struct qt_device device;
    bool ready;
    const struct qt_moe_kind *kind;
    /* Set by the kind's plan: */
    int align;            /* the positions of an expert begin at a multiple of it */
    int many_tokens;      /* of an item of the kind MANY at most; 0: there are no such items */
    int row_tiles;        /* units of an item at most */
    bool rounded;         /* results of down have 16 bits, not 32 */
    size_t partial_bytes; /* of a position in r->partial */
    alignas(16) unsigned char own[640];
};

static_assert(sizeof(struct qt_moe_state) <= sizeof(qtool_moe_plan::internal), "no room");

static inline struct qt_moe_state *qt_state(struct qtool_moe_plan *p)
{
    return (struct qt_moe_state *)p->internal.bytes;
}

static inline const struct qt_moe_state *qt_state(const struct qtool_moe_plan *p)
{
    return (const struct qt_moe_state *)p->internal.bytes;
}

/* ---- moe.cc --------------------------------------------------------------------------------- */

/* Writes the reason and returns status. */
int qt_moe_refuse(char reason[160], int status, const char *fmt, ...);
/* "gate", "up", "down". */
extern const char *const qt_moe_names[QT_MOE_MATRICES];
/* How a product runs. */
struct qt_moe_config {
    int log2_wk; /* warps along k that share rows */
    int stages;  /* of the pipeline */
    int grid;
    size_t smem;
};
/* The range that qt_moe_choose searches. */
struct qt_moe_choice {
    int most_log2_wk;
    int least, most;  /* stages of a thread block that has the multiprocessor alone */
    int least_paired; /* of one beside which a second fits; 0: there is always one */
    /* Shared memory in bytes, and the stages and tiles of rows of a unit. */
    size_t (*layout)(const struct qt_moe_choice *c, int log2_wk, int stages, int *slots,
                     int *row_tiles);
    const void *ctx;
};
/* Chooses warps along k and pipeline stages: as many stages as fit beside a second thread block,
 * else as fit alone. Returns false if none fits. */
bool qt_moe_choose(struct qt_moe_config *out, const struct qtool_moe_plan *p,
                   const struct qt_moe_choice *c);
/* Launches a kernel of a run; all wait for the kernel in front. first: of the run. */
int qt_moe_launch(const struct qtool_moe_plan *p, const void *kernel, dim3 grid, int threads,
                  size_t smem, bool first, void *args, void *stream);
void qt_moe_set_activation(struct qt_moe_unit_args *a, enum qtool_moe_activation activation);
struct qt_moe_direct qt_moe_direct_of(const struct qtool_moe_plan *p, const int *ids);
/* Whether the pairs of a run are not sorted: each is an item. */
bool qt_moe_is_direct(const struct qtool_moe_plan *p);
/* Number of positions. */
size_t qt_moe_positions(const struct qtool_moe_plan *p);
/* Reserves bytes behind *at, 256-byte aligned. Returns their offset. */
size_t qt_moe_take(size_t *at, size_t bytes);

/* ---- kinds ---------------------------------------------------------------------------------- */

extern const struct qt_moe_kind qt_moe_packed; /* LUT, FPX and INT: product_plan.cc */
extern const struct qt_moe_kind qt_moe_w4ax;   /* w4ax_plan.cc */
extern const struct qt_moe_kind qt_moe_mix24;  /* mix24_plan.cc */

#endif
