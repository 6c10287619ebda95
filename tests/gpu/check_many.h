/* Checks of products with several matrices in one launch (qtool_matmul_plan_many) against FP64
 * products of the decoded weights. Outputs have guards; every run is made twice and must repeat bit
 * for bit. */
#ifndef QT_TESTS_GPU_CHECK_MANY_H
#define QT_TESTS_GPU_CHECK_MANY_H

#include "tests/gpu/check_matmul.h"

/* Matrices with the same k. Their outputs are in pool.y, with guards between them. */
struct many {
    const struct qtool_matmul_weight *w[QTOOL_MATMUL_MANY];
    const float *device_decoded[QTOOL_MATMUL_MANY];
    size_t count, tokens, k, at[QTOOL_MATMUL_MANY], elements;
};

static inline void many_add(struct many *c, const struct qtool_matmul_weight *w,
                            const float *device_decoded)
{
    c->w[c->count] = w;
    c->device_decoded[c->count++] = device_decoded;
}

/* Places the outputs for c->tokens. */
static inline void many_place(struct many *c)
{
    c->elements = GUARD;
    for (size_t i = 0; i < c->count; i++) {
        c->at[i] = c->elements;
        c->elements += c->tokens * c->w[i]->n + 1 + random_below(GUARD);
    }
}

static inline bool many_run(const struct many *c, const struct qtool_matmul_plan *p, int which,
                            bool late)
{
    void *y[QTOOL_MATMUL_MANY];
    const uint16_t *x = pool.x;
    CHECK(cudaMemset(pool.y[which], 0xff, c->elements * 2));
    for (size_t i = 0; i < c->count; i++)
        y[i] = pool.y[which] + c->at[i];
    if (late) {
        CHECK(cudaMemset(pool.late_x, 0xff, LATE_X * 2));
        gpu_write_late(pool.late_x, x, c->tokens * c->k);
        x = pool.late_x;
    }
    int rc = qtool_matmul_run_many(p, c->w, c->count, y, x, NULL);
    CHECK(cudaDeviceSynchronize());
    return rc == QTOOL_OK;
}

/* True if all but the outputs is still NaN. */
static inline bool many_guards(const struct many *c)
{
    uint16_t *y = download(pool.y[1], c->elements * 2);
    size_t at = 0;
    bool good = true;
    for (size_t i = 0; i <= c->count; i++) {
        for (const size_t end = i < c->count ? c->at[i] : c->elements; at < end; at++)
            good &= y[at] == 0xffff;
        at += i < c->count ? c->tokens * c->w[i]->n : 0;
    }
    free(y);
    return good;
}

/* Runs a plan of these matrices. late: X is written by a kernel before the second run. */
static inline void check_many(const struct many *c, const struct qtool_matmul_plan *p, bool late,
                              const char *name)
{
    const int bf16 = p->options.dtype == QTOOL_BF16;
    char what[400], config[160];
    config_text(config, sizeof config, &p->config);
    random_x(pool.x, c->tokens * c->k, bf16);
    output_at = 0;
    const bool ran = many_run(c, p, 0, false) && many_run(c, p, 1, late);
    snprintf(what, sizeof what, "%s: %zu matrices, m=%zu k=%zu %s: run, guards, repetition%s", name,
             c->count, c->tokens, c->k, config, late ? " behind a late X" : "");
    result(ran && many_guards(c) && outputs_equal(c->elements), what);
    for (size_t i = 0; i < c->count; i++) {
        const size_t n = c->w[i]->n;
        gpu_reference(pool.reference, pool.x, c->device_decoded[i], c->tokens, n, c->k, c->k, bf16,
                      (struct gpu_rounding){0, 0});
        const struct gpu_error e =
            gpu_error_of(pool.y[0] + c->at[i], pool.reference, c->tokens * n, bf16);
        snprintf(what, sizeof what, "%s: matrix %zu of %zu, n=%zu m=%zu k=%zu %s %s: error %.3g",
                 name, i, c->count, n, c->tokens, c->k, bf16 ? "bf16" : "f16", config, e.all);
        result(error_beyond_rounding(e) <= tolerance(c->tokens * n, bf16), what);
    }
}

#endif
