/*
 * The w4ax kernels against plain C: the outputs of the quantizer, bit for bit without a norm;
 * products with exact integers (scales of one, F32 output) and with random scales to 1e-6. All
 * kernels, random configurations, all granularities, FP16, BF16 and F32 outputs with guard bands.
 * Every run is made twice and must repeat bit for bit.
 *
 * usage: test_w4ax [SEED [quick]]     prints "N passed, M failed, K skipped"
 */
#include "tests/gpu/tile_tokens.h"
#include "tests/gpu/w4ax_matrix.h"

#include <math.h>

enum { GUARD = 256, COLS = QTOOL_W4AX_BLOCK_COLS };

/* ---- a layer's input ------------------------------------------------------------------------ */

struct layer {
    enum qtool_w4ax_scales scales;
    size_t k, kblocks, token_bytes;
    int packed;
    uint8_t *bits;
    uint32_t *words, *perm;
    struct qtool_w4ax_input in; /* device */
};

static void layer_new(struct layer *l, enum qtool_w4ax_scales scales, size_t k, int packed)
{
    memset(l, 0, sizeof *l);
    l->scales = scales;
    l->k = k;
    l->packed = packed && scales == QTOOL_W4AX_BLOCK;
    l->kblocks = (k + COLS - 1) / COLS;
    l->bits = malloc(l->kblocks);
    l->words = malloc(l->kblocks * 4);
    for (size_t i = 0; i < l->kblocks; i++)
        l->bits[i] = random_below(3) ? 4 : 8;
    l->token_bytes = qtool_w4ax_blocks(l->words, l->bits, l->kblocks, l->packed);
    if (random_below(2)) {
        l->perm = malloc(k * 4);
        for (size_t i = 0; i < k; i++) {
            size_t j = random_below(i + 1);
            l->perm[i] = l->perm[j];
            l->perm[j] = (uint32_t)i;
        }
    }
    l->in = (struct qtool_w4ax_input){.scales = scales,
                                      .k = k,
                                      .blocks = upload(l->words, l->kblocks * 4),
                                      .perm = l->perm ? upload(l->perm, k * 4) : NULL,
                                      .clip4 = random_below(2) ? 0.9f : 1,
                                      .clip8 = 1,
                                      .packed = l->packed,
                                      .rotation = (enum qtool_w4ax_rotation)random_below(2)};
}

static void layer_free(struct layer *l)
{
    CHECK(cudaFree((void *)l->in.blocks));
    CHECK(cudaFree((void *)l->in.perm));
    free(l->bits);
    free(l->words);
    free(l->perm);
}

/* ---- activations: reference ----------------------------------------------------------------- */

struct acts {
    struct qtool_w4ax_acts device;
    size_t m, bytes, scales_n;
    uint8_t *codes; /* as on the device */
    float *scale;
    int *sum;
};

static void acts_new(struct acts *a, const struct layer *l, size_t m)
{
    a->m = m;
    a->bytes = m * l->token_bytes;
    a->scales_n = l->scales == QTOOL_W4AX_BLOCK ? l->kblocks * ((m + 3) / 4 * 4) : (m + 3) / 4 * 4;
    a->device.codes = gpu_alloc(a->bytes);
    a->device.scale = gpu_alloc(a->scales_n * 4);
    a->device.sum = gpu_alloc(m * 4);
    CHECK(cudaMemset(a->device.codes, 0x55, a->bytes));
    CHECK(cudaMemset(a->device.scale, 0xff, a->scales_n * 4));
    CHECK(cudaMemset(a->device.sum, 0xff, m * 4));
}

static void acts_fetch(struct acts *a)
{
    a->codes = download(a->device.codes, a->bytes);
    a->scale = download(a->device.scale, a->scales_n * 4);
    a->sum = download(a->device.sum, a->m * 4);
}

static void acts_free(struct acts *a)
{
    CHECK(cudaFree(a->device.codes));
    CHECK(cudaFree(a->device.scale));
    CHECK(cudaFree(a->device.sum));
    free(a->codes);
    free(a->scale);
    free(a->sum);
}

/* Returns the offset of the byte of channel j of channel block b, and sets *shift to the shift of
 * its nibble, or to -1 for a whole byte. */
static size_t code_at(int *shift, const struct layer *l, size_t m, size_t token, size_t b, size_t j)
{
    size_t rows = (size_t)((l->words[b] & ~QTOOL_W4AX_NARROW_VALUES) >> 1) * 64 * m;
    if (l->words[b] & QTOOL_W4AX_WIDE_ROWS) {
        *shift = -1;
        return rows + token * 128 + (j / 16 ^ (token & 7)) * 16 + j % 16;
    }
    *shift = j % 32 < 16 ? 0 : 4;
    return rows + token * 64 + (j / 32 ^ (token >> 1 & 3)) * 16 + j % 16;
}

static int get_code(const struct acts *a, const struct layer *l, size_t token, size_t b, size_t j)
{
    int shift;
    size_t at = code_at(&shift, l, a->m, token, b, j);
    if (shift < 0)
        return (int8_t)a->codes[at];
    int v = a->codes[at] >> shift & 15;
    return v >= 8 ? v - 16 : v;
}

static void put_code(struct acts *a, const struct layer *l, size_t token, size_t b, size_t j, int v)
{
    int shift;
    size_t at = code_at(&shift, l, a->m, token, b, j);
    if (shift < 0)
        a->codes[at] = (uint8_t)v;
    else
        a->codes[at] = (uint8_t)((a->codes[at] & 0xf0 >> shift) | (v & 15) << shift);
}

static float scale_of(const struct acts *a, const struct layer *l, size_t token, size_t b)
{
    return l->scales == QTOOL_W4AX_BLOCK ? a->scale[b * ((a->m + 3) / 4 * 4) + token]
                                         : a->scale[token];
}

/* Computes the values of a token after norm, permutation and rotation, with zeros beyond k. */
static void norm_reference(float *v, const uint16_t *x, const uint16_t *weight,
                           const uint16_t *bias, const struct layer *l,
                           enum qtool_w4ax_norm_kind kind, float eps, int bf16)
{
    double mean = 0, squares = 0;
    for (size_t i = 0; i < l->k && kind == QTOOL_W4AX_LAYER_NORM; i++)
        mean += to_float(x[i], bf16) / (double)l->k;
    for (size_t i = 0; i < l->k; i++) {
        double d = to_float(x[i], bf16) - mean;
        squares += d * d / (double)l->k;
    }
    double factor = kind && squares + (double)eps > 0 ? 1 / sqrt(squares + (double)eps) : 1;
    memset(v, 0, l->kblocks * COLS * sizeof *v);
    for (size_t i = 0; i < l->k; i++) {
        v[i] = (float)((to_float(x[l->perm ? l->perm[i] : i], bf16) - mean) * factor);
        if (kind)
            v[i] = (float)((double)v[i] * (double)to_float(weight[i], bf16) +
                           (double)(bias ? to_float(bias[i], bf16) : 0));
    }
    if (l->in.rotation)
        rotate_reference(v, l->k);
}

/* Returns the number of values that differ by more than `slack`, and adds the number of codes that
 * differ at all to *off. */
static size_t compare_token(size_t *off, const struct acts *a, const struct layer *l, size_t token,
                            const int *codes, const float *scale, int slack)
{
    size_t wrong = 0;
    int sum = 0;
    for (size_t b = 0; b < l->kblocks; b++) {
        float got = scale_of(a, l, token, b);
        bool same = slack ? fabsf(got - scale[b]) <= 1e-5f * scale[b] : got == scale[b];
        wrong += !same;
        for (size_t j = 0; j < COLS; j++) {
            int d = get_code(a, l, token, b, j) - codes[b * COLS + j];
            sum += get_code(a, l, token, b, j);
            *off += d != 0;
            wrong += abs(d) > slack;
        }
    }
    return wrong + (l->scales == QTOOL_W4AX_INT && a->sum[token] != sum);
}

static void check_quantize(const struct layer *l, size_t m, int bf16,
                           enum qtool_w4ax_norm_kind kind)
{
    struct acts a = {0};
    char what[200];
    size_t off = 0, wrong = 0;
    uint16_t *x = malloc(m * l->k * 2), *weight = malloc(l->k * 2), *bias = malloc(l->k * 2);
    const float mean = random_below(2) ? 0 : 8;
    for (size_t i = 0; i < m * l->k; i++)
        x[i] = from_float(mean + random_float() * (random_below(40) ? 1 : 20), bf16);
    if (m > 1)
        memset(x + l->k, 0, l->k * 2); /* a token of zeros */
    for (size_t i = 0; i < l->k; i++) {
        weight[i] = from_float(1 + 0.5f * random_float(), bf16);
        bias[i] = from_float(random_float(), bf16);
    }
    bool biased = kind == QTOOL_W4AX_LAYER_NORM && random_below(2);
    void *dx = upload(x, m * l->k * 2), *dw = upload(weight, l->k * 2),
         *db = upload(bias, l->k * 2);
    const float eps = kind == QTOOL_W4AX_RMS_NORM && random_below(2) ? 0 : 1e-5f;
    struct qtool_w4ax_norm norm = {kind, eps, dw, biased ? db : NULL};
    acts_new(&a, l, m);
    int rc =
        qtool_w4ax_quantize(&a.device, &l->in, &norm, dx, m, bf16 ? QTOOL_BF16 : QTOOL_F16, NULL);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    acts_fetch(&a);
    float *v = malloc(l->kblocks * COLS * sizeof *v), *scale = malloc(l->kblocks * sizeof *scale);
    int *codes = malloc(l->kblocks * COLS * sizeof *codes);
    for (size_t t = 0; t < m; t++) {
        norm_reference(v, x + t * l->k, weight, biased ? bias : NULL, l, kind, eps, bf16);
        w4ax_quantize_reference(codes, scale, v, &l->in, l->bits);
        int slack = !kind ? 0 : l->scales == QTOOL_W4AX_INT ? 18 : 1;
        wrong += compare_token(&off, &a, l, t, codes, scale, slack);
    }
    snprintf(what, sizeof what,
             "quantize scales %d m=%zu k=%zu %s norm %d packed %d perm %d rotate %d: %zu wrong, "
             "%zu off",
             (int)l->scales, m, l->k, bf16 ? "bf16" : "f16", (int)kind, l->packed, l->perm != NULL,
             (int)l->in.rotation, wrong, off);
    result(rc == QTOOL_OK && wrong == 0 && off <= 2 + m * l->k / 1000, what);
    acts_free(&a);
    CHECK(cudaFree(dx));
    CHECK(cudaFree(dw));
    CHECK(cudaFree(db));
    free(x), free(weight), free(bias), free(v), free(scale), free(codes);
}

/* ---- products ------------------------------------------------------------------------------- */

static void matrix_new(struct w4ax_matrix *w, const struct layer *l, size_t n, bool ones)
{
    w4ax_matrix_new(w, &l->in, n, random_below(2) ? (l->k + 63) / 64 : 2 * l->kblocks, ones);
}

/* Computes y and the sums of the magnitudes of its terms, both [m][n]. */
static void product_reference(double *y, double *size, const struct acts *a,
                              const struct w4ax_matrix *w, const struct layer *l)
{
    size_t cols = w->kblocks * COLS;
    int *x = malloc(a->m * cols * sizeof *x);
    for (size_t t = 0; t < a->m; t++)
        for (size_t j = 0; j < cols; j++)
            x[t * cols + j] = get_code(a, l, t, j / COLS, j % COLS);
#pragma omp parallel for
    for (size_t o = 0; o < a->m * w->n; o++) {
        size_t t = o / w->n, r = o % w->n;
        double sum = 0, sizes = 0;
        for (size_t b = 0; b < w->kblocks; b++) {
            int s = 0;
            for (size_t j = b * COLS; j < (b + 1) * COLS; j++)
                s += x[t * cols + j] * w->code[r * cols + j];
            double v = s;
            if (l->scales == QTOOL_W4AX_BLOCK)
                v *= (double)w->scale[r * w->kblocks + b] * (double)scale_of(a, l, t, b);
            else if (l->scales == QTOOL_W4AX_INT)
                v *= (double)w->scale[r * w->kblocks + b];
            sum += v;
            sizes += fabs(v);
        }
        double row = l->scales == QTOOL_W4AX_BLOCK
                         ? 1
                         : (double)w->row_scale[r] * (double)scale_of(a, l, t, 0);
        y[o] = sum * row;
        size[o] = l->scales == QTOOL_W4AX_BLOCK ? sizes : fabs(y[o]);
    }
    free(x);
}

/* Makes random codes and scales in host and device memory, as the quantizer could write them. */
static void acts_random(struct acts *a, const struct layer *l, size_t m, bool ones)
{
    acts_new(a, l, m);
    acts_fetch(a);
    for (size_t t = 0; t < m; t++) {
        a->sum[t] = 0;
        for (size_t j = 0; j < l->kblocks * COLS; j++) {
            int narrow = l->bits[j / COLS] == 4 && l->scales != QTOOL_W4AX_ROW;
            int v = j < l->k ? (int)random_below(narrow ? 15 : 255) - (narrow ? 7 : 127) : 0;
            put_code(a, l, t, j / COLS, j % COLS, v);
            a->sum[t] += v;
        }
    }
    for (size_t i = 0; i < a->scales_n; i++)
        a->scale[i] = ones ? 1 : 0.02f + 0.01f * random_float();
    CHECK(cudaMemcpy(a->device.codes, a->codes, a->bytes, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(a->device.scale, a->scale, a->scales_n * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(a->device.sum, a->sum, m * 4, cudaMemcpyHostToDevice));
}

static bool guarded_run(uint8_t *y, const struct qtool_w4ax_plan *p,
                        const struct qtool_w4ax_weight *w, const struct acts *a, size_t bytes)
{
    uint8_t *d = gpu_alloc(bytes + 2 * GUARD), guards[2 * GUARD];
    CHECK(cudaMemset(d, 0xff, bytes + 2 * GUARD));
    int rc = qtool_w4ax_run(p, w, &a->device, d + GUARD, workspace_of(p->workspace_bytes), NULL);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(guards, d, GUARD, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(guards + GUARD, d + GUARD + bytes, GUARD, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(y, d + GUARD, bytes, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(d));
    for (int i = 0; i < 2 * GUARD; i++)
        if (guards[i] != 0xff)
            return false;
    return rc == QTOOL_OK && workspace_kept(p->workspace_bytes);
}

static double worst;

/* Returns the number of wrong outputs. F32 must be exact with `ones`, else within 1e-6 of the
 * terms; 16-bit outputs may also differ by their rounding. */
static size_t count_wrong(const uint8_t *y, const double *want, const double *size, size_t count,
                          enum qtool_w4ax_output output, bool ones)
{
    size_t wrong = 0;
    for (size_t i = 0; i < count; i++) {
        double got = output == QTOOL_W4AX_F32
                         ? (double)((const float *)y)[i]
                         : (double)to_float(((const uint16_t *)y)[i], output == QTOOL_W4AX_BF16);
        double slack = output == QTOOL_W4AX_F32 ? (ones ? 0 : 1e-6 * size[i])
                       : output == QTOOL_W4AX_BF16
                           ? fabs(want[i]) * 0x1.01p-8 + 1e-6 * size[i]
                           : fabs(want[i]) * 0x1.01p-11 + 1e-6 * size[i] + 3e-8;
        if (output == QTOOL_W4AX_F32 && !ones && size[i] > 0)
            worst = worse(worst, fabs(got - want[i]) / size[i]);
        bool close = fabs(got - want[i]) <= slack;
        wrong += !close;
    }
    return wrong;
}

static void config_text(char *out, size_t size, const struct qtool_w4ax_config *c)
{
    if (c->kernel == QTOOL_W4AX_STREAM)
        snprintf(out, size, "stream: tokens %d strips %d warps %d units %d", c->stream.tokens,
                 c->stream.strips, c->stream.warps, c->stream.cta_units);
    else if (c->kernel == QTOOL_W4AX_TILE)
        snprintf(out, size, "tile: token tiles %d warps %d schedule %d", c->tile.token_tiles,
                 c->tile.warps, (int)c->tile.schedule);
    else
        snprintf(out, size, "skinny: token tiles %d strips %d warps %d/%d cta %d depth %d",
                 c->skinny.token_tiles, c->skinny.strips, c->skinny.warps, c->skinny.warps_k,
                 c->skinny.strips_cta, c->skinny.depth);
}

static void check_plan(const struct qtool_w4ax_plan *p, const struct w4ax_matrix *w,
                       const struct acts *a, const double *want, const double *size, bool ones)
{
    size_t count = p->m * p->n, bytes = count * (p->options.output == QTOOL_W4AX_F32 ? 4 : 2);
    uint8_t *y[2] = {malloc(bytes), malloc(bytes)};
    char what[400], config[160];
    if (p->workspace_bytes > workspace.bytes) {
        printf("SKIPPED %zu bytes of workspace\n", p->workspace_bytes);
        skipped++;
        return;
    }
    bool ran =
        guarded_run(y[0], p, &w->device, a, bytes) && guarded_run(y[1], p, &w->device, a, bytes);
    bool equal = memcmp(y[0], y[1], bytes) == 0;
    size_t wrong = count_wrong(y[0], want, size, count, p->options.output, ones);
    config_text(config, sizeof config, &p->config);
    snprintf(what, sizeof what,
             "product scales %d m=%zu n=%zu k=%zu output %d%s %s: %zu of %zu wrong%s%s",
             (int)p->scales, p->m, p->n, p->k, (int)p->options.output,
             p->options.packed ? " packed" : "", config, wrong, count, ran ? "" : " GUARDS",
             equal ? "" : " NOT REPEATABLE");
    result(ran && equal && wrong == 0, what);
    free(y[0]);
    free(y[1]);
}

/* Sets a random configuration of the planned kernel, number i. plan_check refuses many. */
static void vary(struct qtool_w4ax_config *config, size_t kblocks, int i)
{
    if (config->kernel == QTOOL_W4AX_STREAM) {
        struct qtool_w4ax_stream_config *c = &config->stream;
        c->cta_units = 1 + (int)random_below(3 * kblocks);
        c->strips = 2 << random_below(2);
        c->warps = 4 << random_below(2);
    } else if (config->kernel == QTOOL_W4AX_TILE) {
        struct qtool_tile_config *c = &config->tile;
        c->token_tiles = tile_tokens[random_below(TILE_WIDTHS)] / 8;
        c->warps = 8 + 4 * (int)random_below(3);
        c->schedule = i == 0 ? QTOOL_TILE_CLUSTER_4
                             : (enum qtool_tile_schedule)(QTOOL_TILE_WHOLE + (int)random_below(3));
    } else {
        struct qtool_skinny_config *c = &config->skinny;
        const int rows = 1 << random_below(3), tiles = 1 + (int)random_below(3);
        c->strips = 1 + (int)random_below(2);
        c->warps_k = 2 << random_below(3);
        c->warps = rows * c->warps_k > 14 ? c->warps_k : rows * c->warps_k;
        const int most = c->warps / c->warps_k * c->strips;
        c->strips_cta = tiles * (1 + (int)random_below((size_t)most));
        c->depth = c->warps_k / 2 * (1 + (int)random_below(4));
    }
}

static void check_product(enum qtool_w4ax_scales scales, size_t m, size_t n, size_t k, bool ones,
                          enum qtool_w4ax_kernel kernel)
{
    struct layer l;
    struct w4ax_matrix w;
    struct acts a = {0};
    struct qtool_w4ax_plan plan;
    layer_new(&l, scales, k, kernel == QTOOL_W4AX_STREAM && random_below(2));
    matrix_new(&w, &l, n, ones);
    acts_random(&a, &l, m, ones);
    double *want = malloc(m * n * sizeof *want), *size = malloc(m * n * sizeof *size);
    product_reference(want, size, &a, &w, &l);
    struct qtool_w4ax_options opt = {.output = ones ? QTOOL_W4AX_F32
                                                    : (enum qtool_w4ax_output)random_below(3),
                                     .packed = l.packed,
                                     .kernel = kernel};
    int rc = qtool_w4ax_plan(&plan, &w.device, m, &opt);
    if (rc == QTOOL_OK)
        check_plan(&plan, &w, &a, want, size, ones);
    else if (kernel != QTOOL_W4AX_STREAM && qtool_kernels_compute(0) != 90)
        skipped++;
    else
        result(false, plan.reason);
    const int variants = kernel == QTOOL_W4AX_SKINNY ? 6 : 2; /* most skinny ones are refused */
    for (int i = 0; i < variants && rc == QTOOL_OK; i++) {
        struct qtool_w4ax_plan other = plan;
        vary(&other.config, l.kblocks, i);
        if (qtool_w4ax_plan_check(&other) == QTOOL_OK)
            check_plan(&other, &w, &a, want, size, ones);
    }
    free(want);
    free(size);
    acts_free(&a);
    w4ax_matrix_free(&w);
    layer_free(&l);
}

/* ---- cases ---------------------------------------------------------------------------------- */

/* More tokens than thread blocks. With 65536 channels a single row fits into shared memory. */
static void test_many_tokens(int scales, int kind, bool quick)
{
    static const size_t ks[3][3] = {
        {8192, 14336, 16384}, {14336, 65536, 8192}, {65536, 8192, 14336}};
    struct layer l;
    const size_t k = quick ? 1024 : ks[scales][kind];
    const size_t m = quick ? 2200 : k == 65536 ? 200 : 550;
    layer_new(&l, (enum qtool_w4ax_scales)scales, k, (int)random_below(2));
    check_quantize(&l, m + random_below(100), (int)random_below(2),
                   (enum qtool_w4ax_norm_kind)kind);
    layer_free(&l);
}

/* More tokens than thread blocks process one at a time on 132 multiprocessors, so that they process
 * pairs; also odd numbers. */
static void test_pairs_of_tokens(bool quick)
{
    static const size_t ks[] = {512, 1536, 4096, 14336, 16384};
    for (int i = 0; i < (quick ? 9 : 90); i++) {
        struct layer l;
        const size_t k = ks[quick ? 0 : i / 9 % 5];
        layer_new(&l, (enum qtool_w4ax_scales)(i / 3 % 3), k, (int)random_below(2));
        check_quantize(&l, 1100000 / k + random_below(200000 / k), (int)random_below(2),
                       (enum qtool_w4ax_norm_kind)(i % 3));
        layer_free(&l);
    }
}

static void test_quantize(bool quick)
{
    static const size_t ks[] = {8, 120, 128, 136, 256, 1000, 512, 4096, 11008, 16384, 16392};
    for (int scales = 0; scales < 3; scales++)
        for (size_t i = 0; i < sizeof ks / sizeof *ks; i++)
            for (int kind = 0; kind < 3; kind++) {
                struct layer l;
                if (quick && (i != 3 && i != 5))
                    continue;
                layer_new(&l, (enum qtool_w4ax_scales)scales, ks[i], (int)random_below(2));
                check_quantize(&l, 1 + random_below(11), (int)random_below(2),
                               (enum qtool_w4ax_norm_kind)kind);
                layer_free(&l);
            }
    for (int i = 0; i < (quick ? 3 : 9); i++)
        test_many_tokens(i / 3, i % 3, quick);
    test_pairs_of_tokens(quick);
}

static void test_products(bool quick)
{
    static const size_t shapes[][2] = {{1, 8},     {16, 128},   {17, 136},  {100, 256},
                                       {129, 520}, {272, 640},  {513, 384}, {1024, 2048},
                                       {40, 4096}, {1040, 1032}};
    static const size_t small_m[] = {1, 2, 7, 8, 9, 15, 16, 17, 24, 32};
    static const size_t large_m[] = {1, 33, 63, 64, 65, 127, 128, 129, 200, 300};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int scales = 0; scales < 3; scales++)
            for (int ones = 0; ones < 2; ones++)
                for (size_t j = 0; j < 10; j++) {
                    if (quick ? i != 2 && i != 4 : i >= 4 && (i + j) % 3)
                        continue;
                    if (quick && j % 4 != 1)
                        continue;
                    enum qtool_w4ax_scales s = (enum qtool_w4ax_scales)scales;
                    check_product(s, small_m[j], shapes[i][0], shapes[i][1], ones,
                                  QTOOL_W4AX_STREAM);
                    check_product(s, large_m[j], shapes[i][0], shapes[i][1], ones, QTOOL_W4AX_TILE);
                    if (!quick || j % 8 == 5 || s == QTOOL_W4AX_BLOCK)
                        check_product(s, small_m[j], shapes[i][0], shapes[i][1], ones,
                                      QTOOL_W4AX_SKINNY);
                    if (j % 4 == 1)
                        check_product(s, large_m[j], shapes[i][0], shapes[i][1], ones,
                                      QTOOL_W4AX_STREAM);
                }
}

/* Alternates between two inputs in the same buffers. All launches after the first two are dependent
 * and must give the results of the plain launches. */
static void check_dependent(enum qtool_w4ax_scales scales, size_t m, size_t n, size_t k)
{
    enum { ROUNDS = 20 };
    const struct qtool_w4ax_norm norm = {QTOOL_W4AX_NO_NORM, 0, NULL, NULL};
    struct layer l;
    struct w4ax_matrix w;
    struct acts a = {0};
    struct qtool_w4ax_plan plan;
    char what[120];
    const size_t y_bytes = m * n * 2, x_bytes = m * k * 2;
    layer_new(&l, scales, k, 0);
    matrix_new(&w, &l, n, false);
    acts_new(&a, &l, m);
    uint16_t *x = malloc(2 * x_bytes);
    for (size_t i = 0; i < 2 * m * k; i++)
        x[i] = from_float(random_float(), 0);
    char *dx = upload(x, 2 * x_bytes), *dy = gpu_alloc((ROUNDS + 2) * y_bytes);
    char *y = malloc((ROUNDS + 2) * y_bytes);
    bool ran = true;
    for (int round = 0; round < ROUNDS + 2 && ran; round++) {
        const struct qtool_w4ax_options opt = {.dependent_launch = round >= 2};
        struct qtool_w4ax_input in = l.in;
        in.dependent_launch = round >= 2;
        if (round == 0 || round == 2)
            ran = qtool_w4ax_plan(&plan, &w.device, m, &opt) == QTOOL_OK &&
                  plan.workspace_bytes <= workspace.bytes;
        ran = ran &&
              qtool_w4ax_quantize(&a.device, &in, &norm, dx + (size_t)(round % 2) * x_bytes, m,
                                  QTOOL_F16, NULL) == QTOOL_OK &&
              qtool_w4ax_run(&plan, &w.device, &a.device, dy + (size_t)round * y_bytes,
                             workspace.at, NULL) == QTOOL_OK;
    }
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(y, dy, (ROUNDS + 2) * y_bytes, cudaMemcpyDeviceToHost));
    int differ = memcmp(y, y + y_bytes, y_bytes) == 0; /* two inputs, two results */
    for (int round = 2; round < ROUNDS + 2; round++)
        differ +=
            memcmp(y + (size_t)(round % 2) * y_bytes, y + (size_t)round * y_bytes, y_bytes) != 0;
    snprintf(what, sizeof what, "dependent launches, scales %d m=%zu n=%zu k=%zu: %d differ",
             (int)scales, m, n, k, differ);
    result(ran && differ == 0, what);
    CHECK(cudaFree(dx));
    CHECK(cudaFree(dy));
    free(x);
    free(y);
    acts_free(&a);
    w4ax_matrix_free(&w);
    layer_free(&l);
}

static void test_dependent(void)
{
    static const size_t ms[] = {1, 16, 40, 200};
    for (int scales = 0; scales < 3; scales++)
        for (size_t i = 0; i < sizeof ms / sizeof *ms; i++)
            check_dependent((enum qtool_w4ax_scales)scales, ms[i], 1024, 2048);
}

static void test_refusals(void)
{
    struct layer l;
    struct w4ax_matrix w;
    struct qtool_w4ax_plan p;
    struct qtool_w4ax_options o = {.kernel = QTOOL_W4AX_ANY};
    uint8_t bad_bits[2] = {4, 5};
    uint32_t words[2];
    result(qtool_w4ax_blocks(words, bad_bits, 2, 0) == 0, "blocks of 5 bits");
    layer_new(&l, QTOOL_W4AX_BLOCK, 256, 0);
    matrix_new(&w, &l, 64, true);
    result(qtool_w4ax_plan(&p, &w.device, 1, &o) == QTOOL_OK, "plan");
    result(qtool_w4ax_plan(&p, &w.device, 0, &o) == QTOOL_UNSUPPORTED && p.reason[0], "m = 0");
    o.kernel = QTOOL_W4AX_TILE;
    o.packed = 1;
    result(qtool_w4ax_plan(&p, &w.device, 64, &o) != QTOOL_OK && p.reason[0], "packed tiles");
    struct qtool_w4ax_weight bad = w.device;
    o = (struct qtool_w4ax_options){.device = 1000};
    result(qtool_w4ax_plan(&p, &bad, 1, &o) == QTOOL_NO_GPU, "device 1000");
    o.device = 0;
    bad.plane = (const char *)bad.plane + 4;
    result(qtool_w4ax_plan(&p, &bad, 1, &o) == QTOOL_UNSUPPORTED && p.reason[0], "align");
    w4ax_matrix_free(&w);
    layer_free(&l);
}

int main(int argc, char **argv)
{
    bool quick = check_begin(argc, argv);
    workspace_new(256 << 20);
    test_refusals();
    cudaGetLastError();
    test_dependent();
    test_quantize(quick);
    test_products(quick);
    printf("worst difference of F32 outputs: %.3g of the sum of sizes\n", worst);
    return check_end();
}
