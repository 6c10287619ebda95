/*
 * Refusals of libqtool_kernels that do not need a device, with their reasons, and the arithmetic of
 * slices. Needs no GPU: addresses are fake and never read.
 *
 * usage: test_plan     prints "N passed, M failed, K skipped"
 */
#include "kernels/include/qtool_kv4.h"
#include "kernels/include/qtool_w4ax.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int passed, failed;

static void result(bool ok, const char *what)
{
    if (ok) {
        passed++;
    } else {
        failed++;
        printf("FAILED %s\n", what);
    }
}

static const struct qtool_matmul_weight lut = {
    .kind = QTOOL_MATMUL_LUT,
    .bits = 4,
    .n = 64,
    .k = 256,
    .group = 128,
    .plane = {(void *)0x10000},
    .scale = (void *)0x20000,
    .table = (void *)0x30000,
};
static const struct qtool_matmul_weight fpx = {
    .kind = QTOOL_MATMUL_FPX,
    .bits = 6,
    .exp_bits = 3,
    .n = 64,
    .k = 256,
    .plane = {(void *)0x10000, (void *)0x18000},
    .scale = (void *)0x20000,
};

static const struct qtool_matmul_weight integer = {
    .kind = QTOOL_MATMUL_INT,
    .bits = 4,
    .n = 64,
    .k = 256,
    .group = 128,
    .plane = {(void *)0x10000},
    .scale = (void *)0x20000,
};

/* ---- refusals ------------------------------------------------------------------------------- */

#define FIELD(name)                                                                                \
    offsetof(struct qtool_matmul_weight, name), sizeof((struct qtool_matmul_weight *)0)->name

static const struct {
    const struct qtool_matmul_weight *from;
    size_t offset, size;
    uint64_t value;
    const char *says;
} refusals[] = {
    {&lut, FIELD(kind), 77, "unknown kind"},
    {&lut, FIELD(bits), 1, "bits out of range"},
    {&lut, FIELD(bits), 5, "bits out of range"},
    {&integer, FIELD(bits), 5, "INT weights must have 4 or 8 bits"},
    {&fpx, FIELD(bits), 9, "bits out of range"},
    {&fpx, FIELD(exp_bits), 0, "exponent bits"},
    {&fpx, FIELD(exp_bits), 6, "exponent bits"},
    {&lut, FIELD(n), 0, "n and k must be"},
    {&lut, FIELD(k), 0, "n and k must be"},
    {&lut, FIELD(n), SIZE_MAX, "n and k must be"},
    {&lut, FIELD(k), (size_t)1 << 40, "n and k must be"},
    {&lut, FIELD(group), 16, "group must be"},
    {&lut, FIELD(group), 48, "group must be"},
    {&lut, FIELD(group), 512, "group must be"},
    {&fpx, FIELD(group), 128, "one scale per row"},
    {&lut, FIELD(scale_exp2), 101, "scale_exp2"},
    {&lut, FIELD(plane[0]), 0, "planes must not be NULL"},
    {&lut, FIELD(plane[0]), 0x10004, "planes must not be NULL and must be 16-byte aligned"},
    {&fpx, FIELD(plane[1]), 0, "planes must not be NULL"},
    {&lut, FIELD(scale), 0, "scale must be 16-byte aligned, table 2-byte aligned"},
    {&lut, FIELD(scale), 0x20002, "16-byte aligned"},
    {&integer, FIELD(zero), 0x40004, "zero must be 8-byte aligned"},
    {&lut, FIELD(table), 0, "scale must be 16-byte aligned, table 2-byte aligned"},
    {&lut, FIELD(pitch_blocks), 3, "is smaller than the matrix"},
    {&lut, FIELD(pitch_groups), 1, "is smaller than the matrix"},
    {&lut, FIELD(pitch_blocks), (size_t)1 << 30, "too large"},
    {&lut, FIELD(pitch_blocks), (size_t)1 << 62, "too large"},
    {&lut, FIELD(pitch_groups), (size_t)1 << 62, "too large"},
};

static void refuse(const struct qtool_matmul_weight *w, size_t m,
                   const struct qtool_matmul_options *opt, const char *says)
{
    struct qtool_matmul_plan plan;
    char what[300];
    int rc = qtool_matmul_plan(&plan, w, m, opt);
    snprintf(what, sizeof what, "status %d, \"%s\"; expected \"%s\"", rc, plan.reason, says);
    result(rc == QTOOL_UNSUPPORTED && strstr(plan.reason, says), what);
}

static void test_refusals(void)
{
    const struct qtool_matmul_options f16 = {0}, f32 = {.dtype = 5}, far = {.device = 1000};
    const struct qtool_matmul_options gated = {.gated = QTOOL_MATMUL_GATED_SILU};
    const struct qtool_matmul_options invariant = {.gated = QTOOL_MATMUL_GATED_SILU,
                                                   .batch_invariant = 1};
    const struct qtool_matmul_options unknown = {.gated = (enum qtool_matmul_gated)3};
    struct qtool_matmul_plan plan;
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        struct qtool_matmul_weight w = *refusals[i].from, slice;
        memcpy((char *)&w + refusals[i].offset, &refusals[i].value, refusals[i].size);
        refuse(&w, 1, &f16, refusals[i].says);
        result(qtool_matmul_slice(&slice, &w, 0, 16, 0, 64) == QTOOL_UNSUPPORTED, refusals[i].says);
        result(qtool_matmul_dequantize(&w, NULL, QTOOL_F16, NULL) == QTOOL_UNSUPPORTED,
               refusals[i].says);
    }
    refuse(&lut, 0, &f16, "m must be");
    refuse(&lut, SIZE_MAX, &f16, "m must be");
    refuse(&lut, 1, &f32, "FP16 or BF16");
    struct qtool_matmul_weight odd = lut;
    odd.n = 80;
    refuse(&odd, 1, &gated, "multiple of 32");
    refuse(&lut, 65, &gated, "at most 64 tokens");
    refuse(&lut, 1, &invariant, "batch-invariant");
    refuse(&lut, 1, &unknown, "options.gated");
    result(qtool_matmul_plan(&plan, &lut, 1, &far) == QTOOL_NO_GPU && plan.reason[0],
           "device 1000");
    memset(&plan, 0, sizeof plan);
    result(qtool_matmul_run(&plan, &lut, NULL, NULL, NULL, NULL) == QTOOL_UNSUPPORTED,
           "run without a plan");
}

/* Valid arguments with a device that does not exist. */
static void test_devices(void)
{
    static const uint32_t blocks[2];
    const struct qtool_w4ax_weight weight = {
        .n = 64, .k = 256, .plane = (void *)0x10000, .scale = (void *)0x20000, .blocks = blocks};
    const struct qtool_kv_cache cache = {.heads = 2,
                                         .head_dim = 64,
                                         .page_tokens = 64,
                                         .k = (void *)0x10000,
                                         .v = (void *)0x20000,
                                         .v_param = (void *)0x30000,
                                         .k_param = (void *)0x40000,
                                         .k_first = (void *)0x50000,
                                         .k_tail = (void *)0x60000};
    const int ordinals[] = {-1, 1000};
    for (int i = 0; i < 2; i++) {
        const struct qtool_w4ax_options far = {.device = ordinals[i]};
        const struct qtool_kv_options far_too = {
            .batch = 1, .heads = 4, .max_length = 40, .scale = 1, .device = ordinals[i]};
        struct qtool_w4ax_plan plan;
        struct qtool_kv_plan attention;
        result(qtool_w4ax_plan(&plan, &weight, 1, &far) == QTOOL_NO_GPU &&
                   strstr(plan.reason, "no CUDA device"),
               "w4ax on a device that does not exist");
        struct qtool_kv_cache large = cache;
        large.page_tokens = 1 << 30;
        large.heads = 4;
        struct qtool_kv_options heads = far_too;
        heads.heads = 4;
        result(qtool_kv_attention_plan(&attention, &large, &heads, 0) == QTOOL_UNSUPPORTED &&
                   strstr(attention.reason, "2^32 rows"),
               "attention over too many rows");
        result(qtool_kv_attention_plan(&attention, &cache, &far_too, 0) == QTOOL_NO_GPU &&
                   strstr(attention.reason, "no CUDA device"),
               "attention on a device that does not exist");
    }
}

/* ---- slices --------------------------------------------------------------------------------- */

static size_t ceil_div(size_t a, size_t b)
{
    return (a + b - 1) / b;
}

/* Checks the addresses of the first words and scales of the slice [n0..., k0...] of `whole`. */
static void check_slice(const struct qtool_matmul_weight *whole,
                        const struct qtool_matmul_weight *slice, size_t n0, size_t k0,
                        const char *what)
{
    size_t blocks = ceil_div(whole->k, 64);
    size_t groups = whole->group ? ceil_div(whole->k, whole->group) : 1;
    size_t group = whole->group ? k0 / whole->group : 0;
    bool good = slice->pitch_blocks == blocks && slice->pitch_groups == groups &&
                slice->table == whole->table && slice->scale_exp2 == whole->scale_exp2;
    unsigned left = whole->bits;
    for (int p = 0; left; p++) {
        unsigned width = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        size_t words = (n0 / 16 * blocks + k0 / 64) * 32 * width;
        good = good && (const char *)slice->plane[p] == (const char *)whole->plane[p] + 4 * words;
        left -= width;
    }
    size_t scales = (n0 / 16 * groups + group) * 16;
    good = good && (const char *)slice->scale == (const char *)whole->scale + 2 * scales;
    result(good, what);
}

static void test_slices(void)
{
    static const size_t groups[] = {0, 32, 64, 128, 256};
    struct qtool_matmul_weight slice, part;
    for (int i = 0; i < 2000; i++) {
        struct qtool_matmul_weight w = i % 2 ? lut : fpx;
        w.bits = (unsigned)(i % 2 ? 2 + rand() % 3 : 6 + rand() % 3);
        w.n = (size_t)(1 + rand() % 500);
        w.k = (size_t)(1 + rand() % 2000);
        w.group = i % 2 ? groups[rand() % 5] : 0;
        w.plane[1] = (void *)0x18000;
        w.plane[2] = (void *)0x1c000;
        size_t unit = w.group > 64 ? w.group : 64;
        size_t n0 = (size_t)rand() % w.n / 16 * 16, k0 = (size_t)rand() % w.k / unit * unit;
        size_t n = w.n - n0, k = w.k - k0;
        size_t n1 = (size_t)rand() % n / 16 * 16, k1 = (size_t)rand() % k / unit * unit;
        result(qtool_matmul_slice(&slice, &w, n0, n, k0, k) == QTOOL_OK && slice.n == n &&
                   slice.k == k,
               "slice");
        check_slice(&w, &slice, n0, k0, "addresses of a slice");
        result(qtool_matmul_slice(&part, &slice, n1, n - n1, k1, k - k1) == QTOOL_OK, "part");
        check_slice(&w, &part, n0 + n1, k0 + k1, "addresses of a slice of a slice");
        result(qtool_matmul_slice(&slice, &w, n0 + 8, 1, 0, k) == QTOOL_UNSUPPORTED, "8 rows");
        result(qtool_matmul_slice(&slice, &w, 0, n, k0 + 32, 1) == QTOOL_UNSUPPORTED, "32 columns");
        result(qtool_matmul_slice(&slice, &w, n0, n + 1, k0, k) == QTOOL_UNSUPPORTED, "too far");
        result(qtool_matmul_slice(&slice, &w, n0, n, k0, k + 1) == QTOOL_UNSUPPORTED, "too far");
    }
    result(qtool_matmul_slice(&slice, &lut, (size_t)0 - 16, 32, 0, 64) == QTOOL_UNSUPPORTED,
           "n0 + n overflows");
    result(qtool_matmul_slice(&slice, &lut, 0, 16, (size_t)0 - 128, 192) == QTOOL_UNSUPPORTED,
           "k0 + k overflows");
    result(qtool_matmul_slice(&slice, &lut, 0, 16, 64, 64) == QTOOL_UNSUPPORTED,
           "half a group of 128");
    result(qtool_matmul_slice(&slice, &lut, 0, 0, 0, 64) == QTOOL_UNSUPPORTED, "no rows");
}

int main(void)
{
    test_refusals();
    test_devices();
    test_slices();
    printf("%d passed, %d failed, 0 skipped\n", passed, failed);
    return failed != 0;
}
