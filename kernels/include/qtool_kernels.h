/*
 * libqtool_kernels: matrix products on packed weights, Y[m][n] = X[m][k] * W[n][k]^T, for CUDA
 * devices of compute capability 8.0 and higher. Kernels dequantize weights in registers (fused
 * dequantization). The API is plain C and self-contained: neither this header nor the library needs
 * another part of qtool.
 *
 *     qtool_matmul_plan(&plan, &weight, m, &options)      once per matrix shape and m: host work,
 *         and seconds where the driver must first compile a kernel
 *     qtool_matmul_run(&plan, &weight, y, x, workspace, stream)           as often as needed
 *
 * A weight is described by the device addresses of its sections, which have the byte layout of a
 * qtool container (docs/format.md, formats/layouts/layout_frag.h) and are uploaded unchanged.
 *
 * qtool_matmul_run only enqueues kernels. It does not allocate, does not synchronize, changes no
 * host state, and can be captured into a CUDA graph. Results are bitwise reproducible: partial sums
 * are FP32 and are added in an order that depends only on the plan.
 *
 * The library has no global state. Several host threads may call it at the same time and share
 * plans that none of them changes.
 */
#ifndef QTOOL_KERNELS_H
#define QTOOL_KERNELS_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* 10000 * major + 100 * minor + patch. Plan structs of one version must not be passed to a library
 * of another: compare this macro with qtool_kernels_version(). */
#define QTOOL_KERNELS_VERSION 200
/* Returns the QTOOL_KERNELS_VERSION that the library was built with. */
int qtool_kernels_version(void);

/* Returns the architecture of the machine code that runs on CUDA device `device`, which must be the
 * current device: 90 (Hopper kernels) or 80 (all other devices). Returns 0 if the device cannot be
 * used. */
int qtool_kernels_compute(int device);

/* Private storage inside the plan structs, aligned for any type. Callers copy it with the struct
 * and do not access it. */
#define QTOOL_KERNELS_OPAQUE(size)                                                                 \
    union {                                                                                        \
        unsigned char bytes[size];                                                                 \
        long long align_integer;                                                                   \
        double align_real;                                                                         \
        void *align_pointer;                                                                       \
    }

/* Return value of all functions that return int, unless stated otherwise. */
enum qtool_status {
    QTOOL_OK = 0,
    QTOOL_UNSUPPORTED = -4, /* shape, type or alignment; plan->reason has the details */
    QTOOL_NO_GPU = -7,      /* no usable device */
    QTOOL_FAILED = -1,      /* a CUDA call or options.dense failed. Planning describes the failure
                               in plan->reason; for other functions see cudaGetLastError */
};

/* ---- weights -------------------------------------------------------------------------------- */

enum qtool_matmul_kind {
    QTOOL_MATMUL_LUT,   /* table[code] * scale; as in FLUTE, arXiv 2407.10960 */
    QTOOL_MATMUL_FPX,   /* minifloats, magnitude << 1 | sign; as in FP6-LLM, arXiv 2401.14112 */
    QTOOL_MATMUL_INT,   /* (code - zero-point) * scale */
    QTOOL_MATMUL_MIX24, /* groups of 16 weights of 2 or 4 bits, and FP16 outliers; as in
                           arXiv 2311.16442; see struct qtool_matmul_mix24 */
};

enum qtool_dtype { QTOOL_F16, QTOOL_BF16 };

/* Bytes of a MIX24 record: one unit in one strip of 16 rows. A unit is 128 packed columns of groups
 * of one bit width. */
enum {
    QTOOL_MATMUL_MIX24_TWO = 624,  /* 2-bit groups */
    QTOOL_MATMUL_MIX24_FOUR = 1168 /* 4-bit groups */
};

/*
 * Sections of a MIX24 weight (formats/layouts/layout_mix24.h). Outliers are stored as a CSR matrix,
 * which is divided into CSR panels of 65536 packed columns. A column index is the packed column
 * minus the first column of its CSR panel. Indices ascend within each row of a CSR panel. All
 * outliers lie in 2-bit groups. The code at an outlier's position dequantizes to 0, so kernels may
 * either add or substitute the outlier.
 */
struct qtool_matmul_mix24 {
    size_t twos, fours;  /* number of units of 2-bit and of 4-bit groups */
    const void *stream;  /* U8 [ceil(n/16)][QTOOL_MATMUL_MIX24_TWO * twos +
                            QTOOL_MATMUL_MIX24_FOUR * fours]: the records of each strip, in the
                            order of units (layout_mix24.h); 16-byte aligned */
    const void *perm;    /* U16 [8 * (twos + fours)], 4-byte aligned. perm[j] = i: packed columns
                            16 j to 16 j + 15 hold channels 16 i to 16 i + 15; 0xffff: padding */
    const void *csr_ptr; /* U32 [ceil((twos + fours) / 512)][csr_rows + 1]: the row pointers of each
                            CSR panel; 4-byte aligned; NULL: no outliers. In a slice it points to
                            row n0 of the whole matrix */
    const void *csr_col; /* U16 [outliers], 16-byte aligned, readable to a multiple of 16 bytes */
    const void *csr_val; /* F16 [outliers], with the same alignment and padding */
    size_t csr_rows;     /* rows of the whole matrix, in a slice as well; 0: n */
    size_t outliers;     /* elements of csr_col: used for planning and prefetching */
};

/*
 * W[n][k] in a fragment layout. LUT codes and FPX codes of up to 4 bits are in the order
 * "frag16x64/nibble", INT codes of 4 bits and FPX codes of 5 to 7 bits in "frag16x64/half", codes
 * of 8 bits in "frag16x64/whole". Zero-initialize the struct and set the fields of the kind.
 */
struct qtool_matmul_weight {
    enum qtool_matmul_kind kind;
    unsigned bits;     /* LUT 2..4, FPX 3..8, INT 4 or 8 */
    unsigned exp_bits; /* FPX: exponent bits, 1..5 */
    size_t n, k;       /* without padding: 1..2^26; MIX24: k 1..1048544 */
    size_t group;      /* channels per scale: 32, 64, 128, 256; 0 (always for FPX): one scale per
                          row */
    int scale_exp2;    /* scale = stored scale * 2^scale_exp2; -100..100 */
    /* Bit planes, from the top bits of a code down: 4, 2 and 1 bits (7 = 4 + 2 + 1, 6 = 4 + 2,
     * 5 = 4 + 1, 3 = 2 + 1); codes of 8 bits have two planes of 4. A plane of p bits is
     * U32 [ceil(n/16)][pitch_blocks][32 lanes][p]; its address is a multiple of 16 bytes. Unused
     * planes are ignored. */
    const void *plane[3];
    const void *scale; /* F16 [ceil(n/16)][pitch_groups][16], 16-byte aligned */
    /* LUT: F16 [2^bits], 2-byte aligned. With groups, table[code] * scale must be within the range
     * of FP16 (qtool's containers have |table| <= 1). If plan->rounded is not 0, values of
     * table[code] * scale in the subnormal range of FP16 lose bits. */
    const void *table;
    /* INT: zero-points, U8 [ceil(n/16)][pitch_groups][2 * bits], 8-byte aligned; NULL: all
     * zero-points are 2^(bits-1). If plan->rounded is not 0, stored scales must be at most 2^15;
     * this is not checked. On compute capability 9.0 the planner chooses faster kernels if the
     * section is 16-byte aligned and pitch_groups * 2 * bits is a multiple of 16. run then returns
     * QTOOL_UNSUPPORTED for weights whose zero-points are not aligned in this way. */
    const void *zero;
    /* Distance from one strip of 16 rows to the next: in fragment blocks of 64 columns (planes),
     * and in groups (scale, zero). 0: ceil(k / 64) fragment blocks, ceil(k / group) groups (1 if
     * group is 0). A slice along k keeps the distances of the whole matrix. */
    size_t pitch_blocks, pitch_groups;
    /* Used only if kind is QTOOL_MATMUL_MIX24, which ignores all other fields except kind, n, k and
     * scale_exp2. */
    struct qtool_matmul_mix24 mix24;
};

/*
 * Describes rows [n0, n0 + n) and channels [k0, k0 + k) of w in the same memory, for tensor
 * parallelism. n0 must be a multiple of 16, k0 a multiple of 64 and of the group. MIX24 weights,
 * whose channels are permuted, can only be sliced by rows (k0 = 0 and k = w->k). n and k need not
 * be multiples of anything. out may be w. Nothing is copied or enqueued: the slice is valid as long
 * as the memory of w. Returns QTOOL_UNSUPPORTED if the slice is not possible.
 */
int qtool_matmul_slice(struct qtool_matmul_weight *out, const struct qtool_matmul_weight *w,
                       size_t n0, size_t n, size_t k0, size_t k);

/* ---- plans ---------------------------------------------------------------------------------- */

/*
 * A dense product supplied by the caller, for example cuBLAS: enqueues y[m][n] = x[m][k] w[n][k]^T
 * on `stream`. All matrices are row-major and of type `dtype`. Rows of y are ldy elements apart; x
 * and w are contiguous. Returns 0 on success.
 */
typedef int qtool_matmul_dense_fn(void *context, void *y, size_t ldy, const void *x, const void *w,
                                  size_t m, size_t n, size_t k, enum qtool_dtype dtype,
                                  void *stream);

/* Activation of gate, as in qtool_decoder.h. */
enum qtool_matmul_gated {
    QTOOL_MATMUL_PLAIN,          /* no activation */
    QTOOL_MATMUL_GATED_SILU,     /* u * g / (1 + exp(-g)) */
    QTOOL_MATMUL_GATED_GELU_TANH /* u * g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g^3))) */
};

struct qtool_matmul_options {
    enum qtool_dtype dtype; /* of X and Y */
    int device;             /* CUDA device ordinal; must be the current device */
    /* Not 0: use programmatic dependent launch (PDL). The kernel may load weights before the
     * preceding kernel in the stream has finished. If that kernel was also launched with PDL, the
     * kernel before it may not have finished either, and so on. None of these kernels may write
     * weights. The paths MMA_TILE, DENSE and STREAM ignore this option. */
    int dependent_launch;
    /* Not 0: every row of Y has the same bits for every m (on another GPU model they may differ).
     * The plan then divides k in the same way for every m, which is slower for some m. */
    int batch_invariant;
    /* If not NULL, the plan may use the path DENSE where that is faster (large m). DENSE rounds
     * weights to `dtype`. With FP16, DENSE needs scale_exp2 = 0 (MIX24: 0 or more), and weights
     * above 65504 become infinity. */
    qtool_matmul_dense_fn *dense;
    void *dense_context;
    /* For tests: with 80, 86, 89 or 90 the planner uses the kernels and the shared-memory size of
     * that compute capability on a newer device. The driver may have to compile these kernels
     * first. 0: the device's own. MIX24 supports only 0. */
    int compute;
    /* Not QTOOL_MATMUL_PLAIN: the first n / 2 rows of W are those of gate, the others those of up,
     * and y[m][n / 2] is the activation of gate times up; both are rounded to `dtype` before. In
     * FP16 results are limited to its range. Needs n that is a multiple of 32, y that is 16-byte
     * aligned, at most 64 tokens, and compute capability 9.0. Refused for MIX24, for codes of 2
     * bits and of more than 4, with batch_invariant, and where the plan without it takes a kernel
     * that has no such form, for some n and m. */
    enum qtool_matmul_gated gated;
};

/* The kernels. Each path has its own member in the union of struct qtool_matmul_config. */
enum qtool_matmul_path {
    QTOOL_MATMUL_STREAM,   /* one pass over the weights for every 32 tokens; not MIX24 */
    QTOOL_MATMUL_SKINNY,   /* 16 tokens per launch, no split-K; compute capability 9.0 */
    QTOOL_MATMUL_TILE,     /* output tiles by wgmma; compute capability 9.0 */
    QTOOL_MATMUL_DENSE,    /* dequantize, then options.dense */
    QTOOL_MATMUL_MMA_TILE, /* output tiles by mma.sync; not MIX24 */
    QTOOL_MATMUL_VECTOR,   /* MIX24, one token; compute capability 9.0 */
    QTOOL_MATMUL_RING,     /* MIX24, one pass over the weights for every 32 tokens */
};

/* How the tile kernel distributes output tiles. qtool bench prints the value as x1 to x4. */
enum qtool_tile_schedule {
    QTOOL_TILE_WHOLE = 1, /* one thread block computes a tile (data-parallel) */
    QTOOL_TILE_STREAM_K,  /* thread blocks take equal shares of the k ranges of the first tiles (of
                             all tiles, if there are fewer than two per thread block), then whole
                             tiles (as two-tile Stream-K, arXiv 2301.03598) */
    QTOOL_TILE_CLUSTER_2, /* split-K: a cluster of 2 thread blocks computes a tile */
    QTOOL_TILE_CLUSTER_4, /* split-K: a cluster of 4 thread blocks computes a tile */
};

/* In all configurations a strip is 16 rows of W and a token tile 8 tokens. */

struct qtool_stream_config {
    int token_tiles; /* per pass: 1, 2 or 4 */
    int strips;      /* per warp: 1 or 2 */
    int warps;       /* per thread block: a power of two, at most 16 */
    int warps_k;     /* warps along k, a divisor of warps; warps / warps_k are along the rows */
    int strips_cta;  /* per thread block */
    int splits;      /* split-K: thread blocks along k, 1..64 */
};

struct qtool_skinny_config {
    int token_tiles; /* per launch: 1 or 2 (qtool_w4ax.h: 1 to 4) */
    int strips;      /* per warp: 1, 2 or 4 */
    int warps;       /* consumer warps per thread block, at most 16; a multiple of warps_k */
    int warps_k;     /* warps along k: a power of two, at least 2 */
    int strips_cta;  /* per thread block. A thread block computes them in
                        ceil(strips_cta * warps_k / (strips * warps)) passes over its rows, each
                        with the same number of strips and all of k */
    int depth;       /* pipeline stages: 2..16, a multiple of warps_k / 2 */
};

struct qtool_tile_config {
    int token_tiles; /* per output tile: 2 to 32. Few combinations with warps are compiled; for the
                        others qtool_matmul_plan_check returns QTOOL_UNSUPPORTED */
    int warps;       /* consumer warps, one strip each: 8, 12 or 16 */
    enum qtool_tile_schedule schedule;
};

struct qtool_dense_config {
    int parts; /* the product is divided along n into this many successive products */
};

struct qtool_mma_tile_config {
    int token_tiles; /* per output tile: 4, 8 or 16 */
    int strips;      /* per warp: 2 or 4 */
    int strips_cta;  /* per output tile */
    int warps;       /* per thread block */
    int splits;      /* split-K: thread blocks along k, 1..16 */
};

struct qtool_vector_config {
    int strips;     /* per warp: 1..3 */
    int warps;      /* per thread block: 12..16 */
    int warps_k;    /* warps along k, a divisor of warps */
    int strips_cta; /* per thread block */
};

struct qtool_ring_config {
    int token_tiles; /* per pass: 1, 2 or 4 */
    int strips;      /* per warp: 1, 2 or 4 */
    int warps;       /* per thread block: a power of two, at most 16 */
    int warps_k;     /* warps along k: a power of two */
    int strips_cta;  /* per thread block */
    int cluster;     /* split-K: thread blocks of a cluster along k, 1, 2, 4 or 8; above 1 only on
                        compute capability 9.0 */
    int depth;       /* pipeline stages of each warp: 2..4 */
    int parts;       /* k is divided into this many successive launches */
};

/* A kernel and its parameters. qtool_matmul_plan chooses them. A tuner may change them and call
 * qtool_matmul_plan_check. */
struct qtool_matmul_config {
    enum qtool_matmul_path path; /* selects the union member of the same name */
    union {
        struct qtool_stream_config stream;
        struct qtool_skinny_config skinny;
        struct qtool_tile_config tile;
        struct qtool_dense_config dense;
        struct qtool_mma_tile_config mma_tile;
        struct qtool_vector_config vector;
        struct qtool_ring_config ring;
    };
};

/* Result of planning. Callers may read all members and write only config. */
struct qtool_matmul_plan {
    size_t m, n, k;
    enum qtool_matmul_kind kind;
    struct qtool_matmul_options options;
    struct qtool_matmul_config config;
    size_t workspace_bytes; /* that run needs; may be 0 */
    /* Not 0: weights are rounded before the product. DENSE rounds them to options.dtype, as
     * qtool_matmul_dequantize does. TILE rounds weight / 2^(scale_exp2 + rounded_exp2) to FP16. It
     * always does so for groups of 32 channels, and in some kernels for larger groups. */
    int rounded, rounded_exp2;
    char reason[160]; /* error message when the status is not QTOOL_OK, else "" */
    QTOOL_KERNELS_OPAQUE(160) internal;
};

/*
 * Workspace: 256-byte aligned device memory of plan->workspace_bytes, which is 0 or at least
 * QTOOL_WORKSPACE_ZEROED. The caller must zero the first QTOOL_WORKSPACE_ZEROED bytes before the
 * first use; every run leaves them zero. One workspace of the largest workspace_bytes can serve all
 * runs in a stream, also those of the other headers. Runs that may overlap in time need separate
 * workspaces.
 */
enum { QTOOL_WORKSPACE_ZEROED = 2 << 20 };

/* Chooses a kernel for m tokens (1 to 2^24) and for the shape and alignment of the weight. The plan
 * can run with any weight of the same kind, format (bits, exp_bits, group, zero NULL or not), shape
 * and alignment of zero-points. For the path DENSE scale_exp2 must be as options.dense says. MIX24
 * weights must have the same twos + fours. If some of them have outliers or 4-bit groups, plan with
 * a weight that has them; otherwise the plan may have too little workspace or shared memory, and
 * run refuses these weights. If the status is not QTOOL_OK, out->reason says why and run refuses
 * the plan. */
int qtool_matmul_plan(struct qtool_matmul_plan *out, const struct qtool_matmul_weight *w, size_t m,
                      const struct qtool_matmul_options *opt);
/* Validates a changed plan->config and updates the rest of the plan, also workspace_bytes. Must be
 * called between a change of config and run. Returns a status as qtool_matmul_plan does. */
int qtool_matmul_plan_check(struct qtool_matmul_plan *plan, const struct qtool_matmul_weight *w);

/*
 * Enqueues the product on `stream` (a cudaStream_t of options.device, which must be the current
 * device). x [m][k] and y [m][n] are contiguous row-major device matrices of options.dtype that do
 * not overlap. x must be 16-byte aligned (MIX24: 2-byte), y 2-byte aligned (16 bytes are fastest).
 * workspace may be NULL if workspace_bytes is 0. Returns QTOOL_UNSUPPORTED, and enqueues nothing,
 * if an address is misaligned or NULL or the weight does not match the plan.
 */
int qtool_matmul_run(const struct qtool_matmul_plan *plan, const struct qtool_matmul_weight *w,
                     void *y, const void *x, void *workspace, void *stream);

/*
 * The products of m tokens with several matrices that have the same k, in one launch:
 * y[i][m][w[i]->n] = x[m][k] * W[i]^T for i < count <= QTOOL_MATMUL_MANY. A launch of matrices that
 * are small takes less time than a launch for each. MIX24, one token; or LUT of 3 and 4 bits with
 * the same groups and tables of their own, up to 16 tokens in FP16, k a multiple of 64, x 16-byte
 * aligned. plan->n is the sum of their rows; the plan can run with matrices of the same shapes, as
 * that of qtool_matmul_plan, and needs no workspace. plan_many refuses other kinds, batch-invariant
 * plans, and devices without compute capability 9.0.
 */
enum { QTOOL_MATMUL_MANY = 3 };
int qtool_matmul_plan_many(struct qtool_matmul_plan *out,
                           const struct qtool_matmul_weight *const *w, size_t count, size_t m,
                           const struct qtool_matmul_options *opt);
int qtool_matmul_run_many(const struct qtool_matmul_plan *plan,
                          const struct qtool_matmul_weight *const *w, size_t count, void *const *y,
                          const void *x, void *stream);

/* Enqueues out[n][k] = the weights rounded to `dtype`. out is contiguous, row-major, in device
 * memory and 2-byte aligned (16 bytes are fastest). Returns QTOOL_UNSUPPORTED if an argument is
 * invalid. */
int qtool_matmul_dequantize(const struct qtool_matmul_weight *w, void *out, enum qtool_dtype dtype,
                            void *stream);

#ifdef __cplusplus
}
#endif

#endif
