/* Random w4ax matrices for the GPU tests, and the quantizer of activations in plain C. */
#ifndef QT_TESTS_GPU_W4AX_MATRIX_H
#define QT_TESTS_GPU_W4AX_MATRIX_H

#include "formats/layouts/layout_frag8.h"
#include "kernels/include/qtool_w4ax.h"
#include "tests/gpu/check.h"
#include "tests/rotate.h"

#include <math.h>

enum { W4AX_COLS = QTOOL_W4AX_BLOCK_COLS };

/* ---- activations ---------------------------------------------------------------------------- */

static inline int w4ax_encode(float v, float s, float limit)
{
    const double q = (double)v * (double)(1 / s); /* exact */
    return s >= 0x1p-120f ? (int)fmin(fmax(rint(q), -limit), limit) : 0;
}

/* Quantizes the normalized and rotated values v[kblocks * 128] of a token to codes [kblocks * 128]
 * and scales [kblocks]. bits: of the channel blocks. */
static inline void w4ax_quantize_reference(int *codes, float *scale, const float *v,
                                           const struct qtool_w4ax_input *in, const uint8_t *bits)
{
    const size_t kblocks = (in->k + W4AX_COLS - 1) / W4AX_COLS;
    float all = 0;
    for (size_t i = 0; i < kblocks * W4AX_COLS; i++)
        all = fmaxf(all, fabsf(v[i]));
    const float token = all * (in->clip8 / 127);
    for (size_t b = 0; b < kblocks; b++, v += W4AX_COLS, codes += W4AX_COLS) {
        bool narrow = bits[b] == 4 && in->scales != QTOOL_W4AX_ROW;
        float most = 0, factor = 1, s = token;
        for (size_t j = 0; j < W4AX_COLS; j++)
            most = fmaxf(most, fabsf(v[j]));
        if (in->scales == QTOOL_W4AX_BLOCK)
            s = most * (narrow ? in->clip4 / 7 : in->clip8 / 127);
        else if (narrow && token > 0)
            factor = fminf(fmaxf(rintf(most * in->clip4 / (7 * token)), 1), 18);
        scale[b] = (in->scales == QTOOL_W4AX_BLOCK ? s < 0x1p-120f : s == 0) ? 1 : s;
        for (size_t j = 0; j < W4AX_COLS; j++)
            codes[j] = w4ax_encode(v[j], s * factor, narrow ? 7 : 127) * (int)factor;
    }
}

/* ---- weights -------------------------------------------------------------------------------- */

/* ---- weights -------------------------------------------------------------------------------- */

struct w4ax_matrix {
    struct qtool_w4ax_weight device;
    size_t n, k, strips, kblocks, pitch; /* pitch: fragment blocks of a strip */
    int8_t *code;                        /* [strips * 16][kblocks * 128] */
    float *scale, *row_scale;            /* [strips * 16][kblocks], [strips * 16] */
};

static inline void *w4ax_pack_codes(const struct w4ax_matrix *w)
{
    size_t cols = w->kblocks * W4AX_COLS, blocks = w->pitch;
    uint32_t *out = calloc(w->strips * blocks * 128, 4);
    for (size_t block = 0; block < w->strips * blocks; block++)
        for (unsigned i = 0; i < 32 * 32; i++) {
            unsigned lane = i / 32, s = i / 16 % 2, r = i / 8 % 2, h = i / 4 % 2, b = i % 4;
            size_t row = block / blocks * 16 + qt_frag8_row(lane, r);
            size_t col = block % blocks * 64 + qt_frag8_col(lane, s, h, b);
            uint32_t code = (uint32_t)w->code[row * cols + col] & 15;
            out[block * 128 + lane * 4 + qt_frag8_word(s, r)] |= code << qt_frag8_shift(h, b);
        }
    void *d = upload(out, w->strips * blocks * 512);
    free(out);
    return d;
}

static inline void w4ax_upload_scales(struct w4ax_matrix *w)
{
    size_t count = w->strips * w->kblocks * 16;
    uint16_t *f16 = calloc(count, 2), *row = calloc(w->strips * 16, 2);
    uint8_t *u8 = calloc(count, 1);
    for (size_t r = 0; r < w->strips * 16; r++) {
        row[r / 16 * 16 + qt_frag_scale_slot((unsigned)(r % 16))] = qt_f32_to_f16(w->row_scale[r]);
        for (size_t b = 0; b < w->kblocks; b++) {
            size_t at = (r / 16 * w->kblocks + b) * 16 + qt_frag_scale_slot((unsigned)(r % 16));
            f16[at] = qt_f32_to_f16(w->scale[r * w->kblocks + b]);
            u8[at] = (uint8_t)w->scale[r * w->kblocks + b];
        }
    }
    w->device.row_scale = upload(row, w->strips * 32);
    w->device.scale =
        w->device.scales == QTOOL_W4AX_INT ? upload(u8, count) : upload(f16, count * 2);
    free(f16), free(u8), free(row);
}

/* pitch: fragment blocks of a strip, ceil(k / 64) or 2 * ceil(k / 128); ones: all scales are 1,
 * except the random integer scales of INT. */
static inline void w4ax_matrix_new(struct w4ax_matrix *w, const struct qtool_w4ax_input *in,
                                   size_t n, size_t pitch, bool ones)
{
    w->n = n;
    w->k = in->k;
    w->strips = (n + 15) / 16;
    w->kblocks = (in->k + W4AX_COLS - 1) / W4AX_COLS;
    w->pitch = pitch;
    size_t rows = w->strips * 16, cols = w->kblocks * W4AX_COLS;
    w->code = calloc(rows, cols);
    w->scale = calloc(rows * w->kblocks, sizeof(float));
    w->row_scale = calloc(rows, sizeof(float));
    for (size_t r = 0; r < n; r++) {
        for (size_t j = 0; j < in->k; j++)
            w->code[r * cols + j] = (int8_t)((int)random_below(16) - 8);
        w->row_scale[r] = ones ? 1 : qt_f16_to_f32(qt_f32_to_f16(0.01f + 0.005f * random_float()));
        for (size_t b = 0; b < w->kblocks; b++)
            w->scale[r * w->kblocks + b] =
                in->scales == QTOOL_W4AX_INT ? (float)random_below(17)
                : ones                       ? 1
                       : qt_f16_to_f32(qt_f32_to_f16(0.01f + 0.005f * random_float()));
    }
    w->device = (struct qtool_w4ax_weight){
        .scales = in->scales, .n = n, .k = in->k, .scale_exp2 = 0, .blocks = in->blocks};
    if (w->pitch != 2 * w->kblocks || random_below(2))
        w->device.pitch_blocks = w->pitch;
    w->device.plane = w4ax_pack_codes(w);
    w4ax_upload_scales(w);
}

static inline void w4ax_matrix_free(struct w4ax_matrix *w)
{
    CHECK(cudaFree((void *)w->device.plane));
    CHECK(cudaFree((void *)w->device.scale));
    CHECK(cudaFree((void *)w->device.row_scale));
    free(w->code), free(w->scale), free(w->row_scale);
}

#endif
