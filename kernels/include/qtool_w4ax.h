/*
 * Products of 4-bit integer weights with activations of 4 and 8 bits (as in COMET, arXiv
 * 2410.12168), for CUDA devices of compute capability 8.0 and higher. Plain C; part of
 * libqtool_kernels. Status codes and the workspace rules are those of qtool_kernels.h.
 *
 * Channels are permuted and divided into channel blocks of 128, which can be rotated. The
 * activations of a channel block have 4 or 8 bits. For each linear input (the activations that
 * q/k/v, or gate/up, share):
 *
 *     qtool_w4ax_blocks(words, bits, ...)                  once: the block words of the kernels
 *     qtool_w4ax_quantize(&acts, &input, &norm, x, ...)    norm + gather + quantize, one launch
 *     qtool_w4ax_plan(&plan, &weight, m, ...)              once per shape and m
 *     qtool_w4ax_run(&plan, &weight, &acts, y, workspace, stream)
 *
 * quantize and run only enqueue kernels. Integer sums are exact; results are bitwise reproducible.
 *
 * Scale granularities, with weight codes w, activation codes c, and dot(b) = the sum of w * c over
 * the channels of channel block b:
 *
 *   BLOCK  y = sum over b of scale_w[row][b] * scale_x[token][b] * dot(b)
 *   INT    y = scale_w[row] * scale_x[token] * sum over b of int_w[row][b] * dot(b)
 *          (c already contains the integer factor of its channel block, see qtool_w4ax_quantize)
 *   ROW    y = scale_w[row] * scale_x[token] * sum over b of dot(b)
 */
#ifndef QTOOL_W4AX_H
#define QTOOL_W4AX_H

#include "qtool_kernels.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { QTOOL_W4AX_BLOCK_COLS = 128 };

enum qtool_w4ax_scales { QTOOL_W4AX_BLOCK, QTOOL_W4AX_INT, QTOOL_W4AX_ROW };

/* ---- activations ---------------------------------------------------------------------------- */

/*
 * Memory layout of the codes of m tokens: one channel block after the other. A channel block has a
 * row per token, of 128 bytes (one signed byte per code) or of 64 bytes (two 4-bit codes per byte).
 * The 16-byte chunks of a row are permuted so that neighboring rows use different shared-memory
 * banks. Chunk c of token i is stored at chunk position
 *
 *     128-byte rows: c ^ (i & 7)        64-byte rows: c ^ (i >> 1 & 3)
 *
 * Byte j of a chunk of a 64-byte row holds channel j of its 32 channels in the low half and channel
 * 16 + j in the high half.
 */

/*
 * A block word describes a channel block to the quantizer and the kernels. It is 2 * s plus flags.
 * s is the offset of the channel block in units of 64 bytes per token: with m tokens, the rows of
 * the channel block start 64 * s * m bytes after `codes`.
 *
 *   flags                      codes    rows
 *   none                       4 bits    64 bytes (packed)
 *   WIDE_ROWS, NARROW_VALUES   4 bits   128 bytes
 *   WIDE_ROWS                  8 bits   128 bytes
 */
enum { QTOOL_W4AX_WIDE_ROWS = 1 };
#define QTOOL_W4AX_NARROW_VALUES 0x80000000u

/*
 * Writes the block words of channel blocks with bits[i] = 4 or 8, i < count, to host memory
 * words[count]; the caller uploads them. If packed is not 0, rows of 4-bit codes have 64 bytes,
 * else 128. Returns the bytes per token over all channel blocks, or 0 if some bits[i] is neither 4
 * nor 8.
 */
size_t qtool_w4ax_blocks(uint32_t *words, const uint8_t *bits, size_t count, int packed);

/* Quantized activations in device memory, allocated by the caller. */
struct qtool_w4ax_acts {
    void *codes;  /* m * bytes per token (qtool_w4ax_blocks), 128-byte aligned */
    float *scale; /* BLOCK: [ceil(k/128)][m rounded up to a multiple of 4]; INT, ROW: [m]; 16-byte
                     aligned */
    int *sum;     /* INT: [m], the sum of each token's stored bytes; else unused */
};

/* Whether channel blocks are rotated before they are quantized: qtool_w4ax_quantize defines how. */
enum qtool_w4ax_rotation { QTOOL_W4AX_NO_ROTATION, QTOOL_W4AX_HADAMARD };

/* How the input of a layer is quantized. Codes of values that are not finite are undefined. */
struct qtool_w4ax_input {
    enum qtool_w4ax_scales scales;
    size_t k; /* a multiple of 8, at most 65536; the last channel block may be short */
    const uint32_t *blocks; /* device, [ceil(k/128)]: block words */
    const uint32_t *perm;   /* device, [k], 16-byte aligned: perm[i] is the input channel of
                               position i; NULL: the identity */
    float clip4, clip8;     /* the largest representable magnitude, as a fraction of the largest
                               magnitude of the channel block or token; above 0; 1: no clipping */
    int packed;             /* as passed to qtool_w4ax_blocks; BLOCK only */
    enum qtool_w4ax_rotation rotation;
    /* Not 0: use programmatic dependent launch, as in struct qtool_matmul_options. perm, blocks and
     * the norm's weight and bias may then be read before the preceding kernel has finished. */
    int dependent_launch;
};

enum qtool_w4ax_norm_kind { QTOOL_W4AX_NO_NORM, QTOOL_W4AX_RMS_NORM, QTOOL_W4AX_LAYER_NORM };

/* weight and bias are in position order (after the permutation), of x's dtype, 8-byte aligned. */
struct qtool_w4ax_norm {
    enum qtool_w4ax_norm_kind kind;
    float eps;
    const void *weight; /* device [k] */
    const void *bias;   /* device [k], or NULL for zeros; only a layer norm uses it */
};

/*
 * Enqueues norm, permutation, rotation and quantization of x [m][k] of `dtype`, 16-byte aligned, m
 * up to 2^24. norm may be NULL for none. Arithmetic is FP32. With v the values of a token after
 * norm, permutation and rotation:
 *
 *   BLOCK, for each channel block:
 *     s    = max |v| * (clip4 / 7)                     4 bits   (the maximum is over the block)
 *     s    = max |v| * (clip8 / 127)                   8 bits
 *     code = clamp(rint(v * (1 / s)), -7, 7)           4 bits
 *     code = clamp(rint(v * (1 / s)), -127, 127)       8 bits
 *     stored scale: s. If s < 2^-120, the codes are 0 and the stored scale is 1.
 *
 *   INT, for each token:
 *     u    = max |v| * (clip8 / 127)                   (the maximum is over the token)
 *     f    = clamp(rint(max |v| * clip4 / (7 * u)), 1, 18)    4 bits   (maximum over the block)
 *     f    = 1                                                8 bits
 *     code = clamp(rint(v * (1 / (f * u))), -7, 7)     4 bits
 *     code = clamp(rint(v * (1 / (f * u))), -127, 127) 8 bits
 *     stored byte: f * code. stored scale: u, or 1 if u is 0. If f * u < 2^-120, codes are 0.
 *
 *   ROW, for each token:
 *     as INT with all channel blocks of 8 bits.
 *
 * HADAMARD divides a channel block into pieces whose sizes are powers of two, in descending order
 * (120 channels: 64, 32, 16, 8), and multiplies each piece of p channels by the orthonormal
 * Hadamard matrix H[i][j] = (-1)^(number of bits set in i & j) / sqrt(p): butterflies (a, b) -> (a
 * + b, a - b) over the distances p/2, p/4, ..., 1, then a product with 1 / sqrt(p) rounded to FP32.
 * The stored weights of the layer must have been multiplied by the same matrices.
 *
 * The product v * (1 / s) is exact before rint, and rint rounds ties to even. With an RMS norm, v
 * is x * weight, without the factor 1 / rms of the token. The codes and the comparison with 2^-120
 * do not depend on that factor. The stored scale is multiplied by it, except where the stored scale
 * is 1 (BLOCK: s < 2^-120; INT, ROW: u = 0).
 *
 * The kernel keeps a row of 2 * k bytes in shared memory, unless scales is BLOCK and there is
 * neither a permutation nor a layer norm. Returns QTOOL_UNSUPPORTED if the row does not fit (k
 * above 48 Ki on devices with 99 KB per thread block) or an argument is invalid.
 */
int qtool_w4ax_quantize(const struct qtool_w4ax_acts *out, const struct qtool_w4ax_input *in,
                        const struct qtool_w4ax_norm *norm, const void *x, size_t m,
                        enum qtool_dtype dtype, void *stream);

/* ---- products ------------------------------------------------------------------------------- */

/*
 * W[n][k] with codes -8..7. Columns are in position order (after the permutation of the input). The
 * layout is "frag16x64/byte" of formats/layouts/layout_frag8.h, padded to 16 rows and 64 columns.
 * The scales of the 16 rows of a strip are stored in the order of rows 0 8 1 9 2 10 ... 7 15: row r
 * is at position 2 * (r % 8) + r / 8.
 */
struct qtool_w4ax_weight {
    enum qtool_w4ax_scales scales;
    size_t n, k;       /* without padding */
    const void *plane; /* U32 [ceil(n/16)][pitch_blocks][32 lanes][4], 16-byte aligned */
    /* [ceil(n/16)][ceil(k/128)][16], 16-byte aligned. BLOCK: F16, scale_w; INT: U8 0..16, int_w;
     * ROW: unused. */
    const void *scale;
    const void *row_scale;  /* INT, ROW: F16 [ceil(n/16)][16], scale_w, 4-byte aligned */
    int scale_exp2;         /* scale_w = stored F16 scale * 2^scale_exp2 */
    const uint32_t *blocks; /* device: block words of the layer's input */
    size_t pitch_blocks;    /* fragment blocks of 64 columns from one strip of 16 rows to the next,
                               at least ceil(k/64), of which the kernels read no more; 0: 2 *
                               ceil(k/128) */
};

/* The kernels. Each has its own member in the union of struct qtool_w4ax_config. */
enum qtool_w4ax_kernel {
    QTOOL_W4AX_ANY,    /* in the options: the planner chooses */
    QTOOL_W4AX_STREAM, /* one pass over the weights for every 32 tokens. INT and ROW on compute
                          capability 9.0: the driver compiles the kernel on first use. */
    QTOOL_W4AX_TILE,   /* output tiles by wgmma; compute capability 9.0, options.packed = 0 */
    QTOOL_W4AX_SKINNY, /* up to 32 tokens; compute capability 9.0, options.packed = 0 */
};

enum qtool_w4ax_output { QTOOL_W4AX_F16, QTOOL_W4AX_BF16, QTOOL_W4AX_F32 };

struct qtool_w4ax_options {
    enum qtool_w4ax_output output; /* type of y */
    int device;                    /* CUDA device ordinal; must be the current device */
    int packed;                    /* some channel blocks have rows of 64 bytes */
    int dependent_launch;          /* as in struct qtool_matmul_options; the preceding kernel may be
                                      that of qtool_w4ax_quantize */
    enum qtool_w4ax_kernel kernel;
};

struct qtool_w4ax_stream_config {
    int tokens;    /* per pass: 8, 16 or 32 */
    int strips;    /* of 16 rows, per thread block at a time: 2 or 4 */
    int warps;     /* per thread block: 4 or 8 */
    int cta_units; /* work units per thread block (Stream-K). A work unit is one channel block of
                      `strips` strips */
};

/* A kernel and its parameters. qtool_w4ax_plan chooses them. A tuner may change them and call
 * qtool_w4ax_plan_check. */
struct qtool_w4ax_config {
    enum qtool_w4ax_kernel kernel; /* selects the union member of the same name */
    union {
        struct qtool_w4ax_stream_config stream;
        struct qtool_tile_config tile;
        struct qtool_skinny_config skinny; /* warps: at most 14 */
    };
};

/* Result of planning. Callers may read all members and write only config. */
struct qtool_w4ax_plan {
    size_t m, n, k;
    enum qtool_w4ax_scales scales;
    struct qtool_w4ax_options options;
    struct qtool_w4ax_config config;
    size_t workspace_bytes; /* that run needs; may be 0 */
    char reason[160];       /* error message when the status is not QTOOL_OK, else "" */
    QTOOL_KERNELS_OPAQUE(640) internal;
};

/* Chooses a kernel for m tokens, 1..2^22. The plan can run with any weight of the same shape and
 * scales. If the status is not QTOOL_OK, out->reason says why and run refuses the plan. */
int qtool_w4ax_plan(struct qtool_w4ax_plan *out, const struct qtool_w4ax_weight *w, size_t m,
                    const struct qtool_w4ax_options *opt);
/* Validates a changed plan->config and updates the rest of the plan, also workspace_bytes. Must be
 * called between a change of config and run. Returns a status as qtool_w4ax_plan does. */
int qtool_w4ax_plan_check(struct qtool_w4ax_plan *plan);

/* Enqueues the product into y[m][n], contiguous, row-major, of type options.output. y is 2-byte
 * aligned (F32: 4-byte; 16 bytes are fastest). acts must hold plan->m tokens, quantized with the
 * same scales and block words as the weight has; this is not checked. Returns QTOOL_UNSUPPORTED,
 * and enqueues nothing, if an address is misaligned or NULL or the weight does not match the
 * plan. */
int qtool_w4ax_run(const struct qtool_w4ax_plan *plan, const struct qtool_w4ax_weight *w,
                   const struct qtool_w4ax_acts *acts, void *y, void *workspace, void *stream);

#ifdef __cplusplus
}
#endif

#endif
