/*
 * Products of 4-bit integer weights with activations of 4 and 8 bits, for CUDA devices of compute
 * capability 8.0 and up. Plain C; part of libqtool_kernels and as self-contained as
 * qtool_kernels.h, whose status codes it uses.
 *
 * Channels are permuted and cut into blocks of 128, each of which carries activations of 4 or of 8
 * bits. The use, per linear layer (or layers that share an input):
 *
 *     qtool_w4ax_blocks(words, bits, ...)                  once: what kernels know of blocks
 *     qtool_w4ax_quantize(&acts, &input, &norm, x, ...)    norm + gather + quantize, one launch
 *     qtool_w4ax_plan(&plan, &weight, m, ...)              once per shape and m
 *     qtool_w4ax_run(&plan, &weight, &acts, y, workspace, stream)
 *
 * quantize and run only enqueue kernels. Integer sums are exact; results are bitwise repeatable.
 *
 * Granularities of scales; w, x the codes, sums over the channels of block b:
 *   BLOCK  y = sum_b  scale_w[row][b] * scale_x[token][b] * sum w x
 *   INT    y = scale_w[row] * scale_x[token] * sum_b  int_w[row][b] * sum w x
 *          (x: bytes into which their block's integer factor is multiplied)
 *   ROW    y = scale_w[row] * scale_x[token] * sum w x
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

/* ---- activations -------------------------------------------------------------------------------
 *
 * As they lie in memory, for m tokens: block after block; of a block, rows of 128 bytes (8 bits) or
 * of 64 (4 bits, packed), one a token, in 16-byte chunks that are exchanged so that eight
 * neighbouring rows lie in different banks: chunk c of token i is at place
 *
 *     128-byte rows: c ^ (i & 7)        64-byte rows: c ^ (i >> 1 & 3)
 *
 * A packed chunk holds 32 channels: byte j = channel j in the low half, channel 16 + j in the high.
 */

/* What the quantizer and the kernels know of a block: where its rows begin, in units of 64 bytes a
 * token, times 2, plus 1 when it has 8 bits; bit 31: 8-bit rows that hold 4-bit values. */
enum { QTOOL_W4AX_WIDE_ROWS = 1 };
#define QTOOL_W4AX_NARROW_VALUES 0x80000000u

/*
 * words[count] for blocks of bits[i] = 4 or 8, to be uploaded. packed: blocks of 4 bits take 64
 * bytes a token, otherwise 128, one byte a value. Returns the bytes a token takes over all blocks,
 * 0 when bits holds another value.
 */
size_t qtool_w4ax_blocks(uint32_t *words, const uint8_t *bits, size_t count, int packed);

struct qtool_w4ax_acts {
    void *codes;  /* m * bytes of a token; 128-byte aligned */
    float *scale; /* BLOCK: [k/128 rounded up][pitch], pitch = m rounded up to 4; else [m]; 16-byte
                     aligned */
    int *sum;     /* INT: [m], sums of a token's bytes */
};

/* How a layer's input is quantized. k a multiple of 8, up to 65536; the last block may be short. Of
 * values that are not finite codes are undefined. */
struct qtool_w4ax_input {
    enum qtool_w4ax_scales scales;
    size_t k;
    const uint32_t *blocks; /* device [k/128 rounded up] */
    const uint32_t *perm;   /* device [k], 16-byte aligned: input channel of position i; or NULL */
    float clip4, clip8;     /* of the largest value, above 0; 1: none */
    int packed;             /* as in qtool_w4ax_blocks; BLOCK only */
    /* As in struct qtool_matmul_options; perm, blocks and the norm's weight and bias may then be read
     * before the kernel in front has ended. */
    int dependent_launch;
};

enum qtool_w4ax_norm_kind { QTOOL_W4AX_NO_NORM, QTOOL_W4AX_RMS_NORM, QTOOL_W4AX_LAYER_NORM };

/* weight and bias are in the order of positions (after the gather), of x's dtype, and 8-byte
 * aligned. */
struct qtool_w4ax_norm {
    enum qtool_w4ax_norm_kind kind;
    float eps;
    const void *weight; /* device [k] */
    const void *bias;   /* device [k], or NULL */
};

/*
 * x [m][k] of `dtype`, 16-byte aligned, m up to 2^24; norm may be NULL: none. Per token and block,
 * in FP32, v the normalised values: s = max |v| * (clip / 7 or 127), codes = clamp(rint(v * (1 /
 * s)), +-7 or +-127), of the exact product, ties to even s < 2^-120 (RMS norm: before the token's
 * factor): codes 0, scale 1 INT: per token u = max |v| * (clip8 / 127), the scale that is stored,
 * or 1 for 0; a block of 4 bits has the factor f = clamp(rint(max |v| of the block * clip4 / (7
 * u)), 1, 18), s = f u, and bytes f * code. ROW: s = u, stored likewise, every block 8 bits.
 *
 * A row is staged in shared memory unless scales are BLOCK, and there are neither perm nor a layer
 * norm: QTOOL_UNSUPPORTED where 2 k bytes find no room (k above 48 Ki with 99 KB of it).
 */
int qtool_w4ax_quantize(const struct qtool_w4ax_acts *out, const struct qtool_w4ax_input *in,
                        const struct qtool_w4ax_norm *norm, const void *x, size_t m,
                        enum qtool_dtype dtype, void *stream);

/* ---- products ----------------------------------------------------------------------------------
 */

/*
 * W[n][k] in the order "frag16x64/byte" of pack/layouts/layout_frag8.h, padded to 16 rows and 128 columns.
 * Codes -8..7. Scales in the slot order of layout_frag.h.
 */
struct qtool_w4ax_weight {
    enum qtool_w4ax_scales scales;
    size_t n, k;       /* logical */
    const void *plane; /* U32 [n/16][2 ceil(k/128)][32][4], 16-byte aligned */
    const void *scale; /* BLOCK: F16 [n/16][ceil(k/128)][16], INT: U8, the same, 0..16; aligned */
    const void *row_scale;  /* INT, ROW: F16 [n/16][16], 4-byte aligned */
    int scale_exp2;         /* true scale = stored scale * 2^scale_exp2 */
    const uint32_t *blocks; /* of the layer's input, see qtool_w4ax_blocks */
    size_t pitch_blocks; /* blocks of 64 columns from a strip of 16 rows to the next; 0: k's own */
};

enum qtool_w4ax_kernel {
    QTOOL_W4AX_ANY,    /* plan's choice */
    QTOOL_W4AX_STREAM, /* one pass over the weights for every 32 tokens; any compute capability, of INT
                       and ROW on 9.0 when the driver has compiled it */
    QTOOL_W4AX_TILE,   /* compute capability 9.0; blocks not packed */
    QTOOL_W4AX_SKINNY, /* the same, BLOCK, up to 32 tokens */
};

enum qtool_w4ax_output { QTOOL_W4AX_F16, QTOOL_W4AX_BF16, QTOOL_W4AX_F32 };

struct qtool_w4ax_options {
    enum qtool_w4ax_output output; /* type of y */
    int device;                    /* CUDA ordinal; must be the current device */
    int packed;                    /* some blocks of the activations are packed */
    int dependent_launch; /* as in struct qtool_matmul_options; behind qtool_w4ax_quantize, say */
    enum qtool_w4ax_kernel kernel;
};

/* How the kernel is laid over the matrix. A test or a tuner may change it between plan and
 * qtool_w4ax_plan_check. */
struct qtool_w4ax_config {
    enum qtool_w4ax_kernel kernel;
    int tokens;    /* per pass: 8, 16, 24 (not STREAM), 32; of a tile: 16, 32, 48, 64, 96, 128, 160,
                    * 192 or 224, not all of them with all scales (TILE) */
    int warps;     /* STREAM: 4 or 8; TILE: 8, 12 or 16, of 16 rows each; SKINNY: up to 14 */
    int strips;    /* of 16 rows, at once: 2 or 4 (STREAM), of a warp 1 or, up to 16 tokens, 2
                    * (SKINNY) */
    int cta_units; /* STREAM: k-blocks of a row group that a block of threads does */
    int splits;    /* TILE: as in struct qtool_matmul_config */
    int warps_k, strips_cta, depth; /* SKINNY: as in struct qtool_matmul_config */
};

struct qtool_w4ax_plan {
    size_t m, n, k;
    enum qtool_w4ax_scales scales;
    size_t workspace_bytes; /* 0, or what run needs */
    struct qtool_w4ax_options options;
    struct qtool_w4ax_config config;
    int sms, smem_limit, cc; /* of the device, as in struct qtool_matmul_plan */
    char reason[160];        /* why not, when the status is not OK */
    struct qtool_matmul_plan
        launch; /* what there is in common with the kernels of qtool_kernels.h */
};

/* m from 1 to 2^22. The workspace is 256-byte aligned; its first QTOOL_WORKSPACE_ZEROED bytes
 * are to be zero before its first use, and runs leave them so. */
int qtool_w4ax_plan(struct qtool_w4ax_plan *out, const struct qtool_w4ax_weight *w, size_t m,
                    const struct qtool_w4ax_options *opt);
int qtool_w4ax_plan_check(struct qtool_w4ax_plan *plan);

/* y[m][n] of the plan's output type, 2-byte aligned (F32: 4; 16 are faster). Refuses another weight
 * than one of the planned shape and scales. */
int qtool_w4ax_run(const struct qtool_w4ax_plan *plan, const struct qtool_w4ax_weight *w,
                   const struct qtool_w4ax_acts *acts, void *y, void *workspace, void *stream);

#ifdef __cplusplus
}
#endif

#endif
