/*
 * A calibration file. Accepted values obey the inequalities of docs/format.md, and writing them
 * twice gives the same bytes. Linked with a CRC that is always zero (see tests.mk), so that changed
 * values pass the checksums.
 */
#include "tests/fuzz/fuzz.h"

#include <stdlib.h>
#include <string.h>

uint32_t __wrap_qt_crc32(uint32_t crc, const void *data, size_t size);
uint32_t __wrap_qt_crc32(uint32_t crc, const void *data, size_t size)
{
    (void)crc, (void)data, (void)size;
    return 0;
}

enum { TOKENS = 6, WIDEST = 5 };

/* ---- a file that must be accepted ----------------------------------------------------------- */

static void put_input(struct qt_qcal_writer *w, size_t input, size_t k)
{
    double h[WIDEST * WIDEST] = {0};
    struct qt_channels c;
    struct qt_err err = {0};
    fuzz_ok(qt_channels_new(&c, k, &err), &err);
    for (int t = 0; t < TOKENS; t++)
        for (size_t i = 0; i < k; i++) {
            float x = (float)(t + 1) * ldexpf(1 + (float)input, 3 * (int)i - 8);
            c.absmax[i] = fmaxf(c.absmax[i], x);
            c.sum2[i] += (double)x * (double)x;
            c.hist[i * QT_HIST_BINS + qt_hist_bin(x)]++;
            for (size_t j = 0; j <= i; j++)
                h[i * k + j] += (double)x * (double)(x * ldexpf(1, 3 * ((int)j - (int)i)));
        }
    fuzz_ok(qt_qcal_put(w, 0, input, h, &c, "model", &err), &err);
    qt_channels_free(&c);
}

static void add_seed(const char *name, const struct qt_qcal_layer *layer)
{
    static const uint32_t routed[] = {1, TOKENS};
    static const char *const names[] = {"calib.txt"};
    const struct qt_qcal_part part = {
        .samples = 2, .seqlen = 3, .seed = 9, .ids_crc = 7, .data = names, .ndata = 1};
    const struct qt_qcal_info info = {
        .family = "llama", .layers = 1, .hidden = 3, .layer = layer, .parts = &part, .nparts = 1};
    struct qt_qcal_writer *w;
    struct qt_err err = {0};
    char *text;
    size_t size;
    fuzz_ok(qt_qcal_create(&w, fuzz_path("seed.qcal"), &info, true, &err), &err);
    for (size_t i = 0; i < layer->inputs; i++)
        put_input(w, i, layer->k[i]);
    if (layer->experts)
        fuzz_ok(qt_qcal_put_routed(w, 0, routed, &err), &err);
    fuzz_ok(qt_qcal_finish(w, &err), &err);
    qt_qcal_abandon(w);
    fuzz_ok(qt_file_read(&text, &size, fuzz_path("seed.qcal"), 1 << 20, &err), &err);
    fuzz_seed(name, text, size);
    qt_free(text);
}

void fuzz_init(void)
{
    static const size_t k[] = {3, 1, 2, WIDEST}, experts[] = {3, 1, 2, WIDEST, 2, 4, 2};
    add_seed("made.qcal", &(struct qt_qcal_layer){.inputs = QT_INPUTS, .k = k});
    add_seed("experts.qcal", &(struct qt_qcal_layer){.inputs = 7, .k = experts, .experts = 2});
}

/* ---- inputs --------------------------------------------------------------------------------- */

static void check_channels(const struct qt_channels *c, size_t k, double tokens, bool of_all)
{
    if (!of_all) { /* an expert: of some of the tokens */
        double some = 0;
        for (int b = 0; b < QT_HIST_BINS; b++)
            some += c->hist[b];
        FUZZ_CHECK(some <= tokens);
        tokens = some;
    }
    for (size_t j = 0; j < k; j++) {
        double largest = (double)c->absmax[j] * (double)c->absmax[j];
        uint64_t total = 0;
        for (int b = 0; b < QT_HIST_BINS; b++)
            total += c->hist[j * QT_HIST_BINS + (size_t)b];
        FUZZ_CHECK((double)total == tokens);
        FUZZ_CHECK(isfinite(c->sum2[j]) && c->sum2[j] >= 0 && isfinite(c->absmax[j]));
        FUZZ_CHECK(c->sum2[j] >= largest * 0.999998 && c->sum2[j] <= tokens * largest * 1.000002);
    }
}

static bool copy_input(struct qt_qcal_writer *w, const struct qt_qcal *q, size_t layer,
                       size_t input)
{
    const struct qt_qcal_info *info = qt_qcal_info(q);
    const struct qt_qcal_layer *l = &info->layer[layer];
    const size_t k = l->k[input];
    struct qt_channels c;
    struct qt_err err = {0};
    if (!fuzz_accepted(qt_qcal_channels(&c, q, layer, input, &err), &err))
        return false;
    double *h = calloc(k * k, sizeof *h);
    FUZZ_CHECK(h);
    check_channels(&c, k, (double)info->tokens, qt_qcal_expert(l, input) < 0);
    const bool ok = fuzz_accepted(qt_qcal_hessian(h, q, layer, input, c.sum2, &err), &err);
    if (ok)
        fuzz_ok(qt_qcal_put(w, layer, input, h, &c, "model", &err), &err);
    qt_channels_free(&c);
    free(h);
    return ok;
}

static bool copy_routed(struct qt_qcal_writer *w, const struct qt_qcal *q, size_t layer)
{
    const struct qt_qcal_info *info = qt_qcal_info(q);
    const size_t experts = info->layer[layer].experts;
    struct qt_err err = {0};
    if (!experts)
        return true;
    uint32_t *routed = calloc(experts, sizeof *routed);
    FUZZ_CHECK(routed);
    const bool ok = fuzz_accepted(qt_qcal_routed(routed, q, layer, &err), &err);
    for (size_t e = 0; ok && e < experts; e++)
        FUZZ_CHECK(routed[e] <= info->tokens);
    if (ok)
        fuzz_ok(qt_qcal_put_routed(w, layer, routed, &err), &err);
    free(routed);
    return ok;
}

/* Copies all values of the file `from` to the file `to`. Returns false if values are refused. */
static bool copy(const char *from, const char *to)
{
    struct qt_qcal *q;
    struct qt_qcal_writer *w = NULL;
    struct qt_err err = {0};
    bool ok = fuzz_accepted(qt_qcal_open(&q, from, &err), &err);
    if (!ok)
        return false;
    const struct qt_qcal_info *info = qt_qcal_info(q);
    fuzz_ok(qt_qcal_create(&w, to, info, true, &err), &err);
    for (size_t layer = 0; ok && layer < info->layers; layer++) {
        for (size_t i = 0; ok && i < info->layer[layer].inputs; i++)
            ok = copy_input(w, q, layer, i);
        ok = ok && copy_routed(w, q, layer);
    }
    if (ok)
        fuzz_ok(qt_qcal_finish(w, &err), &err);
    qt_qcal_abandon(w);
    qt_qcal_close(q);
    return ok;
}

void fuzz_one(const uint8_t *data, size_t size)
{
    char *once, *twice;
    size_t n, m;
    struct qt_err err = {0};
    fuzz_write("x.qcal", data, size);
    if (!copy(fuzz_path("x.qcal"), fuzz_path("once.qcal")))
        return;
    FUZZ_CHECK(copy(fuzz_path("once.qcal"), fuzz_path("twice.qcal")));
    fuzz_ok(qt_file_read(&once, &n, fuzz_path("once.qcal"), SIZE_MAX / 2, &err), &err);
    fuzz_ok(qt_file_read(&twice, &m, fuzz_path("twice.qcal"), SIZE_MAX / 2, &err), &err);
    FUZZ_CHECK(n == m && memcmp(once, twice, n) == 0);
    qt_free(once);
    qt_free(twice);
}
