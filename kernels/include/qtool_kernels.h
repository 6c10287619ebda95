/*
 * Fused matrix products on packed weights, Y[m][n] = X[m][k] * W[n][k]^T, for CUDA devices of
 * compute capability 8.0 and up. Plain C; stands alone: neither this header nor libqtool_kernels
 * needs another part of qtool.
 *
 * A matrix is described by the device addresses of its sections as they stand in a container
 * (docs/format.md, pack/layouts/layout_frag.h); sections are uploaded by plain copies. The use:
 *
 *     qtool_matmul_plan(&plan, &weight, m, &options)      once per matrix shape and m; may be slow
 *     qtool_matmul_run(&plan, &weight, y, x, workspace, stream)           as often as needed
 *
 * run only enqueues kernels: it does not allocate, synchronise or touch the host state, and it can
 * be captured into a CUDA graph. Results are bitwise repeatable: partial sums are FP32 and added
 * in an order that depends on the plan alone.
 */
#ifndef QTOOL_KERNELS_H
#define QTOOL_KERNELS_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

enum qtool_status {
    QTOOL_OK = 0,
    QTOOL_UNSUPPORTED = -4, /* shape, type or alignment: plan->reason says which */
    QTOOL_NO_GPU = -7,      /* no usable device */
    QTOOL_FAILED = -1,      /* a CUDA call failed: plan->reason or the CUDA error state */
};

enum qtool_matmul_kind {
    QTOOL_MATMUL_LUT,   /* table[code] * scale; table F16 [2^bits] */
    QTOOL_MATMUL_FPX,   /* minifloats: code = magnitude << 1 | sign; no table */
    QTOOL_MATMUL_INT,   /* (code - zero) * scale; no table */
    QTOOL_MATMUL_MIX24, /* groups of 16 of 2 or 4 bits, outliers apart: struct qtool_matmul_mix24 */
};

enum qtool_dtype { QTOOL_F16, QTOOL_BF16 };

/*
 * What only MIX24 has (pack/layouts/layout_mix24.h). A unit is 128 packed columns of groups of one kind.
 * Columns of outliers are packed ones, ascending in a row, and of 2-bit groups, whose codes there
 * decode to 0: kernels may add an outlier to the weight or put it in its place.
 */
enum {
    QTOOL_MATMUL_MIX24_TWO = 624,
    QTOOL_MATMUL_MIX24_FOUR = 1168
}; /* bytes of a unit in 16 rows */
struct qtool_matmul_mix24 {
    size_t twos, fours; /* units of 2-bit and of 4-bit groups */
    const void *stream; /* U8 [n/16][TWO twos + FOUR fours bytes], 16-byte aligned */
    const void *perm; /* U16 [8 (twos + fours)]: which 16 channels; 0xffff: none; 4-byte aligned */
    const void *csr_ptr; /* U32 [panels of 64 Ki columns][csr_rows + 1], 4-byte aligned; NULL
                            without outliers */
    const void *csr_col; /* U16, 16-byte aligned and readable to the next multiple of 16 bytes */
    const void *csr_val; /* F16, the same */
    size_t csr_rows;     /* rows of the sections; 0 = n. More than that in a slice. */
    size_t outliers;     /* entries of csr_col and csr_val: for planning, and fetched ahead */
};

/*
 * W[n][k] in the fragment layout. LUT codes and FPX codes of up to 4 bits are in the order
 * "frag16x64/nibble", INT codes of 4 bits and FPX codes of 5 to 7 in "frag16x64/half", codes of 8
 * bits in "frag16x64/whole".
 */
struct qtool_matmul_weight {
    enum qtool_matmul_kind kind;
    unsigned bits;     /* LUT 2..4, FPX 3..8, INT 4 or 8 */
    unsigned exp_bits; /* FPX: 1..5 exponent bits */
    size_t n, k;       /* logical */
    size_t group;      /* channels per scale: 32, 64, 128, 256; 0 = one scale per row */
    int scale_exp2;    /* true scale = stored scale * 2^scale_exp2 */
    /* U32 [n/16][pitch_blocks][32][p], 16-byte aligned; as many as the bits have planes (of 8 bits
     * two of p = 4) */
    const void *plane[3];
    const void *scale; /* F16 [n/16][pitch_groups][16], 16-byte aligned */
    /* LUT: F16 [2^bits]. With groups, table[code] * scale is to be within FP16 (in qtool's
     * containers |table| <= 1); what is subnormal there loses bits in plans that round. */
    const void *table;
    /* INT: U8 [n/16][pitch_groups][2 bits], 8-byte aligned; NULL: 2^(bits-1). With zero points
     * plans that round want stored scales of up to 2^15. Compute 9.0: rows of
     * multiples of 16 bytes, so aligned, are faster; a plan for such takes no others. */
    const void *zero;
    /* Blocks of 64 columns, and scales, from one strip of 16 rows to the next; 0 = as many as k
     * has. More than that in a slice of k. */
    size_t pitch_blocks, pitch_groups;
    struct qtool_matmul_mix24
        mix24; /* MIX24: instead of bits to pitch_groups but n, k, scale_exp2 */
};

/*
 * Rows [n0, n0 + n) and channels [k0, k0 + k) of a matrix, for tensor parallelism: index arithmetic
 * on the same memory. n0 must be a multiple of 16, k0 of 64 and of the group. UNSUPPORTED if not,
 * or if the slice is not inside. MIX24: only all channels, as they are permuted.
 */
int qtool_matmul_slice(struct qtool_matmul_weight *out, const struct qtool_matmul_weight *w,
                       size_t n0, size_t n, size_t k0, size_t k);

/*
 * A dense product of the caller, cuBLAS for example: y[m][n] = x[m][k] w[n][k]^T, all of `dtype`
 * and row-major, enqueued on `stream`. Rows of y are ldy elements apart, those of x and w are
 * dense. Returns 0 for success.
 */
typedef int qtool_matmul_dense_fn(void *context, void *y, size_t ldy, const void *x, const void *w,
                                  size_t m, size_t n, size_t k, enum qtool_dtype dtype,
                                  void *stream);

struct qtool_matmul_options {
    enum qtool_dtype dtype; /* of X and Y */
    int device;             /* CUDA ordinal; must be the current device */
    /* Programmatic dependent launch: the kernel may begin to load weights while the previous kernel
     * of the stream ends, and with it those in front of it that were launched so. None of these may
     * then write weights. Plans of QTOOL_MATMUL_STREAM but for mix24, of QTOOL_MATMUL_MMA_TILE and
     * QTOOL_MATMUL_DENSE begin as without it. */
    int dependent_launch;
    /* A row of Y is the same to the last bit whatever m is (on one model of GPU): k is cut in one
     * way for all m, which costs time where another m would want another. */
    int batch_invariant;
    /* If not NULL, weights may be dequantized into the workspace, some rows at a time, and
     * multiplied by it, where that is faster: for very many tokens. They are then rounded to
     * `dtype` first; to FP16 only if scale_exp2 is 0 (MIX24: or above), and then beyond 65504 to
     * infinity. */
    qtool_matmul_dense_fn *dense;
    void *dense_context;
    /* For tests: 80, 86, 89 or 90 plans as for such a device, its kernels and its shared memory, on
     * a newer one, whose driver may have to compile them first. 0: as for the device. Not for
     * MIX24. */
    int compute;
};

/* How a kernel is laid over a matrix. Chosen by plan; a test or a tuner may change it between plan
 * and qtool_matmul_plan_check. */
enum qtool_matmul_path {
    QTOOL_MATMUL_STREAM,   /* one pass over the weights for up to 32 tokens */
    QTOOL_MATMUL_SKINNY,   /* whole rows a block, up to 16 tokens; compute capability 9.0 */
    QTOOL_MATMUL_TILE,     /* tiles of rows and tokens; compute capability 9.0 */
    QTOOL_MATMUL_DENSE,    /* dequantize, and options.dense, some rows at a time */
    QTOOL_MATMUL_MMA_TILE, /* tiles of rows and tokens, by mma.sync */
    QTOOL_MATMUL_VECTOR,   /* MIX24, one token; compute capability 9.0 */
};

struct qtool_matmul_config {
    enum qtool_matmul_path path; /* TILE uses token_tiles, warps, splits alone; DENSE parts */
    int token_tiles;             /* of 8 tokens, per pass or tile */
    int strips;                  /* of 16 rows, per warp and pass */
    int warps;                   /* per block */
    int warps_k;                 /* of those, side by side along k */
    int strips_cta;              /* strips per block */
    int splits;                  /* blocks along k; SKINNY: 1; TILE: 1 whole tiles, 2 shared among
                               * blocks, 3, 4 clusters of 2, 4 blocks; MIX24: a cluster */
    int depth;                   /* SKINNY: stages; MIX24: slots of a warp's ring */
    int parts; /* MIX24: launches that share k; DENSE: products that share n; one after
                * the other */
};

struct qtool_matmul_plan {
    size_t m, n, k;
    enum qtool_matmul_kind kind; /* of the weight; run refuses another */
    unsigned bits, exp_bits;
    size_t group;
    int zeros;
    size_t units;           /* MIX24: of groups of either kind */
    size_t workspace_bytes; /* 0, or what run needs */
    struct qtool_matmul_config config;
    /* The product is that of rounded weights: DENSE of those of dequantize to options.dtype; TILE,
     * with groups of 32 channels, some with 64, and some with more and over 128 tokens, of
     * weight / 2^(scale_exp2 + rounded_exp2) in FP16. */
    int rounded, rounded_exp2;
    char reason[160]; /* why not, when the status is not OK */

    struct qtool_matmul_options options;
    int sms, smem_limit, cc; /* of the device; cc: what its kernels are compiled for, 80 or 90 */
    int grid_x, grid_y;
    size_t smem_bytes;
    const void *kernel; /* host address of the kernel; NULL if refused, and run refuses too */
    /* The driver's cuTensorMapEncodeTiled, where the kernel takes tensor maps. */
    void (*encode_map)(void);
};

/*
 * Chooses a configuration for m tokens, 1 to 2^24.
 *
 * The workspace is 256-byte aligned device memory of workspace_bytes. Its first
 * QTOOL_WORKSPACE_ZEROED bytes are to be zero before its first use, and every run leaves them
 * so. One workspace, large enough for the largest, serves all runs of a stream.
 */
enum { QTOOL_WORKSPACE_ZEROED = 2 << 20 };
int qtool_matmul_plan(struct qtool_matmul_plan *out, const struct qtool_matmul_weight *w, size_t m,
                      const struct qtool_matmul_options *opt);
/* Takes over a changed config: checks it and sets what follows from it. */
int qtool_matmul_plan_check(struct qtool_matmul_plan *plan, const struct qtool_matmul_weight *w);

/*
 * Y[m][n] and X[m][k] of the plan's dtype, dense, row-major, on the device; x 16-byte aligned
 * (MIX24: 2-byte), y 2-byte aligned (16 bytes are fastest). stream is a cudaStream_t. UNSUPPORTED
 * if something is not, or the weight is not as planned.
 */
int qtool_matmul_run(const struct qtool_matmul_plan *plan, const struct qtool_matmul_weight *w,
                     void *y, const void *x, void *workspace, void *stream);

/* out[n][k] = the weights rounded to `dtype`; 2-byte aligned (16 bytes are fastest). */
int qtool_matmul_dequantize(const struct qtool_matmul_weight *w, void *out, enum qtool_dtype dtype,
                            void *stream);

#ifdef __cplusplus
}
#endif

#endif
