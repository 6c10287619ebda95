/* Random layers of w4ax experts for test_moe.c. */
#ifndef QT_TESTS_GPU_W4AX_EXPERTS_H
#define QT_TESTS_GPU_W4AX_EXPERTS_H

#include "kernels/include/qtool_moe.h"
#include "tests/gpu/w4ax_matrix.h"

struct w4ax_experts {
    size_t experts;
    struct w4ax_matrix *matrix[3]; /* gate, up, down: [experts] */
    struct qtool_w4ax_weight *weight[3];
    uint32_t *perm;                  /* of the input of gate and up; NULL: the identity */
    uint8_t *bits;                   /* of its channel blocks */
    uint8_t **inner_bits;            /* [experts]: of the inputs of down */
    struct qtool_w4ax_input *inner;  /* [experts] */
    struct qtool_moe_w4ax described; /* device */
};

static inline struct qtool_w4ax_input w4ax_input_new(uint8_t **bits, enum qtool_w4ax_scales scales,
                                                     size_t k, enum qtool_w4ax_rotation rotation)
{
    const size_t blocks = (k + W4AX_COLS - 1) / W4AX_COLS;
    uint32_t *words = malloc(blocks * sizeof *words);
    *bits = malloc(blocks);
    for (size_t i = 0; i < blocks; i++)
        (*bits)[i] = random_below(3) ? 4 : 8;
    qtool_w4ax_blocks(words, *bits, blocks, 0);
    const struct qtool_w4ax_input in = {.scales = scales,
                                        .k = k,
                                        .blocks = upload(words, blocks * sizeof *words),
                                        .clip4 = random_below(2) ? 0.9f : 1,
                                        .clip8 = 1,
                                        .rotation = rotation};
    free(words);
    return in;
}

/* The weights of a matrix, [n][k] in the order of its stored channels. */
static inline float *w4ax_decoded(const struct w4ax_matrix *m)
{
    float *out = malloc(m->n * m->k * sizeof *out);
    for (size_t r = 0; r < m->n; r++)
        for (size_t i = 0; i < m->k; i++) {
            const float block =
                m->device.scales == QTOOL_W4AX_ROW ? 1 : m->scale[r * m->kblocks + i / W4AX_COLS];
            const float row = m->device.scales == QTOOL_W4AX_BLOCK ? 1 : m->row_scale[r];
            out[r * m->k + i] = ldexpf(row * block, m->device.scale_exp2) *
                                (float)m->code[r * m->kblocks * W4AX_COLS + i];
        }
    return out;
}

/* decoded[i][e]: the weights of matrix i of expert e; the caller frees them. */
static inline void w4ax_experts_new(struct w4ax_experts *w, float **decoded[3],
                                    enum qtool_w4ax_scales scales, size_t experts, size_t hidden,
                                    size_t inner)
{
    const enum qtool_w4ax_rotation rotation = (enum qtool_w4ax_rotation)random_below(2);
    const bool exact = random_below(2); /* pitches of ceil(k / 64) */
    *w = (struct w4ax_experts){.experts = experts};
    w->described.input = w4ax_input_new(&w->bits, scales, hidden, rotation);
    if (random_below(4)) {
        w->perm = malloc(hidden * sizeof *w->perm);
        for (size_t i = 0; i < hidden; i++) {
            const size_t j = random_below(i + 1);
            w->perm[i] = w->perm[j];
            w->perm[j] = (uint32_t)i;
        }
        w->described.input.perm = upload(w->perm, hidden * sizeof *w->perm);
    }
    w->inner = calloc(experts, sizeof *w->inner);
    w->inner_bits = calloc(experts, sizeof *w->inner_bits);
    for (size_t e = 0; e < experts; e++)
        w->inner[e] = w4ax_input_new(&w->inner_bits[e], scales, inner,
                                     (enum qtool_w4ax_rotation)(inner % 3 != 0));
    for (int i = 0; i < 3; i++) {
        w->matrix[i] = calloc(experts, sizeof *w->matrix[i]);
        w->weight[i] = calloc(experts, sizeof *w->weight[i]);
        for (size_t e = 0; e < experts; e++) {
            struct w4ax_matrix *m = &w->matrix[i][e];
            const size_t k = i == 2 ? inner : hidden, n = i == 2 ? hidden : inner;
            w4ax_matrix_new(m, i == 2 ? &w->inner[e] : &w->described.input, n,
                            exact ? (k + 63) / 64 : (k + 127) / 128 * 2, false);
            m->device.blocks = NULL;
            m->device.scale_exp2 = (scales == QTOOL_W4AX_INT ? -4 : 0) - (int)random_below(2);
            w->weight[i][e] = m->device;
            decoded[i][e] = w4ax_decoded(m);
        }
    }
    w->described.gate = w->weight[0];
    w->described.up = w->weight[1];
    w->described.down = w->weight[2];
    w->described.inner = w->inner;
}

static inline void w4ax_experts_free(struct w4ax_experts *w)
{
    for (size_t e = 0; e < w->experts; e++) {
        for (int i = 0; i < 3; i++)
            w4ax_matrix_free(&w->matrix[i][e]);
        free(w->inner_bits[e]);
        CHECK(cudaFree((void *)w->inner[e].blocks));
    }
    for (int i = 0; i < 3; i++) {
        free(w->matrix[i]);
        free(w->weight[i]);
    }
    CHECK(cudaFree((void *)w->described.input.blocks));
    CHECK(cudaFree((void *)w->described.input.perm));
    free(w->perm);
    free(w->bits);
    free(w->inner_bits);
    free(w->inner);
}

/* out[k] = the values x[k] after quantization, in the order of the stored channels: as an input of
 * down of expert `e`, or, if e < 0, of gate and up. out may be x. */
static inline void w4ax_experts_quantize(double *out, const double *x, const struct w4ax_experts *w,
                                         long e)
{
    const struct qtool_w4ax_input *in = e < 0 ? &w->described.input : &w->inner[e];
    const size_t blocks = (in->k + W4AX_COLS - 1) / W4AX_COLS;
    float *v = calloc(blocks * W4AX_COLS, sizeof *v), *scale = malloc(blocks * sizeof *scale);
    int *codes = malloc(blocks * W4AX_COLS * sizeof *codes);
    for (size_t i = 0; i < in->k; i++)
        v[i] = (float)x[e < 0 && w->perm ? w->perm[i] : i];
    if (in->rotation)
        rotate_reference(v, in->k);
    w4ax_quantize_reference(codes, scale, v, in, e < 0 ? w->bits : w->inner_bits[e]);
    for (size_t i = 0; i < in->k; i++)
        out[i] = (double)scale[i / W4AX_COLS] * codes[i];
    free(v);
    free(scale);
    free(codes);
}

#endif
