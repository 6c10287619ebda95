#include "tests/fuzz/quantized.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Not a multiple of 16 rows or of any group, so that there is padding. A scheme that takes no such
 * width gets the next. */
enum { ROWS = 19 };
static const size_t widths[] = {130, 128, 256};

static size_t width_of(const char *scheme)
{
    struct qt_err err = {0};
    struct qt_spec spec;
    struct qt_packed p;
    fuzz_ok(qt_spec_parse(&spec, scheme, &err), &err);
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
        if (qt_packed_describe(&p, &spec, ROWS, widths[i], &err) == QT_OK)
            return widths[i];
    fuzz_ok(err.status, &err);
    return 0;
}

static void write_checkpoint(const char *path, const char *const *schemes, size_t n)
{
    struct qt_tensor *t = calloc(n + 1, sizeof *t);
    uint64_t *offsets = calloc(n + 2, sizeof *offsets);
    char(*names)[64] = calloc(n, sizeof *names), *header;
    struct qt_err err = {0};
    size_t size;
    int fd;
    FUZZ_CHECK(t && offsets && names);
    for (size_t i = 0; i < n; i++) {
        snprintf(names[i], sizeof names[i], "%s.weight", schemes[i]);
        t[i] = (struct qt_tensor){.name = names[i], .dtype = QT_F32, .ndim = 2};
        t[i].shape[0] = ROWS;
        t[i].shape[1] = width_of(schemes[i]);
        t[i].nbytes = ROWS * t[i].shape[1] * sizeof(float);
    }
    t[n] =
        (struct qt_tensor){.name = "bias", .dtype = QT_F32, .ndim = 1, .shape = {2}, .nbytes = 8};
    fuzz_ok(qt_safetensors_header(&header, &size, offsets, t, n + 1, NULL, &err), &err);
    fuzz_ok(qt_file_create(&fd, path, false, &err), &err);
    fuzz_ok(qt_file_write_at(fd, path, header, size, 0, &err), &err);
    for (size_t i = 0; i <= n; i++)
        for (size_t e = 0; e < t[i].nbytes / sizeof(float); e++) {
            float x = sinf((float)(e + 100 * i)) * (e % 97 ? 0.1f : 3.0f);
            fuzz_ok(qt_file_write_at(fd, path, &x, sizeof x, offsets[i] + e * sizeof x, &err),
                    &err);
        }
    fuzz_ok(qt_file_finish(&fd, path, &err), &err);
    qt_free(header);
    free(t);
    free(offsets);
    free(names);
}

void fuzz_quantized(const char *name, const char *const *schemes, size_t n)
{
    const char *source = fuzz_path("source.safetensors"), *out = fuzz_path(name);
    struct qt_rule *rules = calloc(n, sizeof *rules);
    char(*regex)[80] = calloc(n, sizeof *regex);
    struct qt_quantize_report report;
    struct qt_ckpt *ckpt;
    struct qt_err err = {0};
    FUZZ_CHECK(rules && regex);
    for (size_t i = 0; i < n; i++) {
        snprintf(regex[i], sizeof regex[i], "^%s\\.weight$", schemes[i]);
        rules[i] = (struct qt_rule){regex[i], schemes[i]};
    }
    write_checkpoint(source, schemes, n);
    fuzz_ok(qt_ckpt_open(&ckpt, source, &err), &err);
    const struct qt_quantize_options opt = {.plan = {.scheme = "none", .rules = rules, .nrules = n},
                                            .out_dir = out};
    fuzz_ok(qt_quantize(&report, ckpt, &opt, &err), &err);
    json_decref(report.document);
    qt_ckpt_close(ckpt);
    free(rules);
    free(regex);
}

/* ---- what is accepted ----------------------------------------------------------------------- */

static void check_decode(const struct qt_packed *p)
{
    struct qt_err err = {0};
    size_t count = p->n * p->k;
    float *all = malloc(count * sizeof *all), *row = malloc(p->k * sizeof *row);
    struct qt_error error;
    FUZZ_CHECK(all && row);
    fuzz_ok(qt_packed_decode(all, p, 0, p->n, &err), &err);
    for (size_t r = 0; r < p->n; r++) {
        fuzz_ok(qt_packed_decode(row, p, r, 1, &err), &err);
        FUZZ_CHECK(memcmp(row, all + r * p->k, p->k * sizeof *row) == 0);
    }
    if (qt_find_nonfinite(all, count) == count) {
        struct qt_matrix w = {all, QT_F32, p->n, p->k, "decoded", "w"};
        fuzz_ok(qt_packed_compare(&error, p, &w, &err), &err);
        FUZZ_CHECK(error.sum_e2 == 0 && error.max_abs == 0 && error.count == count);
    }
    free(all);
    free(row);
}

size_t fuzz_check_entries(const struct qt_container *c)
{
    enum { LARGEST = 1 << 20 };
    size_t accepted = 0;
    for (size_t i = 0; i < qt_container_count(c); i++) {
        const struct qt_entry *e = qt_container_entry(c, i);
        struct qt_packed p;
        struct qt_err err = {0};
        if (!fuzz_accepted(qt_packed_open(&p, c, e, &err), &err))
            continue;
        FUZZ_CHECK(p.n == e->n && p.k == e->k && p.nsections == e->nsections);
        (void)fuzz_accepted(qt_packed_check_repack(&p, "container", e->name, &err), &err);
        if (p.n * p.k <= LARGEST)
            check_decode(&p);
        qt_packed_free(&p);
        accepted++;
    }
    return accepted;
}
