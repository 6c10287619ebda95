/*
 * libqtool_kernels: a layer of gated experts (mixture of experts) with packed weights. For a token
 * x, with the expert numbers ids[0..topk) and routing weights weights[0..topk) of the router:
 *
 *     y = sum over j < topk of weights[j] * down_e(act(gate_e(x), up_e(x))),   e = ids[j]
 *
 *     qtool_moe_table(table, &layer, reason)             once per layer: host work
 *     qtool_moe_plan(&plan, &layer, tokens, &options)    once per shape and number of tokens
 *     qtool_moe_run(&plan, table, y, x, ids, weights, workspace, stream)      as often as needed
 *
 * Kernels of a run: one sorts the (token, expert) pairs by expert; grouped products compute gate
 * and up with the activation, then down; one adds the experts of a token. Only experts that a token
 * chooses are read. The host does not need to know the routing: a run enqueues the same kernels for
 * every routing, does not allocate or synchronize, and can be captured into a CUDA graph. Results
 * are bitwise reproducible: sums are FP32 and in a fixed order, that of j over the experts of a
 * token. On compute capability 9.0, plans of more than 32 tokens round weight * scale to FP16 where
 * an expert has more than 32 tokens (MIX24 weights are exact in FP16), and round results of down to
 * options.dtype before they are weighted; where an expert has more than 32 tokens, results of up as
 * well before they are multiplied if gate and up are two launches (MIX24, and 4-bit LUT weights
 * without same_tables).
 *
 * Weights are described as for qtool_matmul_run (qtool_kernels.h): LUT, FPX and INT of all formats,
 * also with a table per matrix, and MIX24 with k up to 65536. If one matrix is MIX24, all are.
 * Experts with quantized activations (qtool_w4ax.h) are described by struct qtool_moe_w4ax.
 */
#ifndef QTOOL_MOE_H
#define QTOOL_MOE_H

#include "qtool_kernels.h"
#include "qtool_w4ax.h"

#ifdef __cplusplus
extern "C" {
#endif

/* act(g, u), g: result of gate, u: of up. */
enum qtool_moe_activation {
    QTOOL_MOE_SILU,      /* u * g / (1 + exp(-g)) */
    QTOOL_MOE_GELU_TANH, /* u * g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g^3))) */
    QTOOL_MOE_CLAMPED,   /* (v + 1) * h / (1 + exp(-1.702 * h)), h = min(g, 7), v = u within -7, 7:
                            gpt-oss */
};

/* Bytes of an expert in the table of a layer; most experts of a layer. */
enum { QTOOL_MOE_TABLE_EXPERT = 192, QTOOL_MOE_MAX_EXPERTS = 512 };

/*
 * The experts of a layer, or those of them that a device holds (expert parallelism). gate, up and
 * down are host arrays [experts] of weights in device memory. gate and up have n = intermediate
 * size and k = hidden size, down has n = hidden size and k = intermediate size. All gate and up
 * matrices have one kind, format (bits, exp_bits, group, zero NULL or not), shape and pitch (MIX24:
 * shape, twos and fours), and so have all down matrices. Addresses, scale_exp2, tables, perm and
 * outliers may differ. bias: for gate, up and down, NULL or a host array [experts] of vectors F32
 * [n] in device memory that are added to the results; NULL elements: no bias.
 */
struct qtool_moe_layer {
    size_t experts; /* 1..QTOOL_MOE_MAX_EXPERTS */
    const struct qtool_matmul_weight *gate, *up, *down;
    const float *const *bias[3];
    const struct qtool_moe_w4ax *w4ax; /* not NULL: instead of gate, up and down */
};

/*
 * W4ax experts. gate, up and down are host arrays [experts] as above, of one kind of scales; the
 * member `blocks` of these weights is not used. Codes in device memory always take 128 bytes per
 * channel block, so `packed` must be 0 in all inputs; dependent_launch is not used.
 *
 * x is quantized once per token, as `input` says, which all gate and up matrices share. The results
 * of the activation, rounded to options.dtype, are quantized once per pair, as inner[expert] says,
 * a host array [experts]: perm must be NULL, k and rotation of all must be equal, and blocks and
 * clip factors may differ. Numbers of channels are multiples of 8, at most 32768.
 */
struct qtool_moe_w4ax {
    const struct qtool_w4ax_weight *gate, *up, *down;
    struct qtool_w4ax_input input;
    const struct qtool_w4ax_input *inner;
};

/*
 * Checks the layer and writes QTOOL_MOE_TABLE_EXPERT * experts bytes to host memory at `table`. The
 * caller copies them to 16-byte aligned device memory, where they must stay, like the weights, as
 * long as runs use them. QTOOL_UNSUPPORTED, with the reason, if experts differ or have no kernel.
 */
int qtool_moe_table(void *table, const struct qtool_moe_layer *layer, char reason[160]);

struct qtool_moe_options {
    enum qtool_dtype dtype; /* of x and y */
    int device;             /* CUDA device ordinal; must be the current device */
    enum qtool_moe_activation activation;
    size_t topk;         /* experts of a token, 1..32 */
    size_t first_expert; /* number of the layer's first expert in ids. Pairs whose expert is not in
                            [first_expert, first_expert + experts) add nothing: with expert
                            parallelism the caller adds the y of all devices */
    /* Not 0: the tables of gate and up of an expert hold the same values (LUT with a standard
     * table, as nf4). Results are wrong otherwise. Without it, gate and up of 4-bit LUT weights
     * are two launches, as only one table fits into shared memory beside the pipeline. */
    int same_tables;
    int dependent_launch; /* as in struct qtool_matmul_options */
};

/* Result of planning. Callers may read all members. */
struct qtool_moe_plan {
    size_t tokens, experts, hidden, intermediate;
    struct qtool_moe_options options;
    size_t workspace_bytes; /* that run needs; see QTOOL_WORKSPACE_ZEROED */
    char reason[160];       /* error message when the status is not QTOOL_OK, else "" */
    QTOOL_KERNELS_OPAQUE(768) internal;
};

/* Chooses the kernels for `tokens` tokens (0 to 2^20, and at most 2^24 pairs). Reads only the
 * descriptors of the layer's first expert; the plan serves all layers of the same shapes, formats
 * and pitches. */
int qtool_moe_plan(struct qtool_moe_plan *out, const struct qtool_moe_layer *layer, size_t tokens,
                   const struct qtool_moe_options *opt);

/*
 * Enqueues the layer on `stream` (a cudaStream_t of options.device, which must be the current
 * device). All arrays are contiguous and in device memory: table as written by qtool_moe_table; x
 * [tokens][hidden] and y [tokens][hidden] of options.dtype, 16-byte aligned, not overlapping; ids
 * int32 [tokens][topk]; weights FP32 [tokens][topk]. A token may name an expert twice. Nothing is
 * enqueued for 0 tokens. QTOOL_UNSUPPORTED, and nothing enqueued, if an address is misaligned or
 * NULL or the plan was refused.
 */
int qtool_moe_run(const struct qtool_moe_plan *plan, const void *table, void *y, const void *x,
                  const int *ids, const float *weights, void *workspace, void *stream);

#ifdef __cplusplus
}
#endif

#endif
