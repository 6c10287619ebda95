#include "tests/fuzz/quantized.h"

#include "pack/run.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Not multiples of 16 rows or of any group size, so that there is padding. The first width that the
 * scheme accepts is used. */
enum { ROWS = 19, WIDEST = 256 };
static const size_t widths[] = {130, 128, WIDEST};

static size_t width_of(const struct qt_spec *spec)
{
    struct qt_err err = {0};
    struct qt_packed p;
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
        if (qt_packed_describe(&p, spec, ROWS, widths[i], &err) == QT_OK)
            return widths[i];
    fuzz_ok(err.status, &err);
    return 0;
}

/* ---- making --------------------------------------------------------------------------------- */

/* Synthetic activation data: permutations, exponents, channel blocks of 4 and 8 bits. 7 divides
 * neither ROWS nor any width, so that i -> 7 i + c is a permutation. */
static void make_input(struct qt_act *in, uint32_t row_order[ROWS], float row_factor[ROWS],
                       size_t k)
{
    struct qt_err err = {0};
    fuzz_ok(qt_act_new(in, k, 8, &err), &err);
    in->clip = 0.875f;
    in->bits[0] = 4;
    for (size_t i = 0; i < k; i++) {
        in->order[i] = (uint32_t)((7 * i + 3) % k);
        in->factor[i] = ldexpf(1, -(int)(i % 4));
    }
    for (size_t r = 0; r < ROWS; r++) {
        row_order[r] = (uint32_t)((7 * r + 5) % ROWS);
        row_factor[r] = ldexpf(1, (int)(r % 3) - 1);
    }
}

static void make_packed(struct qt_packed *out, const char *text, size_t index)
{
    static float w[ROWS * WIDEST];
    uint32_t row_order[ROWS];
    float row_factor[ROWS];
    struct qt_act in = {0};
    const struct qt_arrange arrange = {&in, row_order, row_factor};
    struct qt_spec spec;
    struct qt_err err = {0};
    fuzz_ok(qt_spec_parse(&spec, text, &err), &err);
    qt_spec_resolve(&spec, false);
    size_t k = width_of(&spec);
    struct qt_matrix m = {w, QT_F32, ROWS, k, "made", text};
    for (size_t i = 0; i < ROWS * k; i++)
        w[i] = sinf((float)(i + 100 * index)) * (i % 97 ? 0.1f : 3.0f);
    if (qt_scheme_needs_data(spec.scheme)) {
        make_input(&in, row_order, row_factor, k);
        spec.arrange = &arrange;
    }
    fuzz_ok(qt_packed_quantize(out, &spec, &m, NULL, NULL, &err), &err);
    qt_act_free(&in);
}

static json_t *entry_json(const struct qt_packed *p)
{
    json_t *entry =
        json_pack("{s:s, s:s, s:[I, I], s:i, s:f, s:o}", "scheme", p->spec.text, "layout",
                  p->layout, "shape", (json_int_t)p->n, (json_int_t)p->k, "scale_exp2",
                  p->scale_exp2, "bpw", qt_packed_bpw(p), "sections", qt_run_sections_json(p));
    FUZZ_CHECK(entry);
    return entry;
}

/* ---- writing -------------------------------------------------------------------------------- */

static const float bias[2] = {1, -2};

struct made {
    size_t n, ntensors;
    struct qt_packed *packed; /* [n] */
    char (*names)[64];        /* [n] */
    char (*sections)[96];     /* [ntensors]; the bias is last */
    struct qt_tensor *tensors;
};

static void declare(struct made *made)
{
    struct qt_tensor *t = made->tensors;
    for (size_t i = 0; i < made->n; i++)
        for (size_t s = 0; s < made->packed[i].nsections; s++, t++) {
            const struct qt_section *section = &made->packed[i].section[s];
            char *name = made->sections[t - made->tensors];
            snprintf(name, sizeof *made->sections, "%s.q.%s", made->names[i], section->name);
            *t = (struct qt_tensor){.name = name,
                                    .dtype = section->dtype,
                                    .ndim = section->ndim,
                                    .nbytes = section->bytes};
            memcpy(t->shape, section->shape, sizeof t->shape);
        }
    *t = (struct qt_tensor){
        .name = "bias", .dtype = QT_F32, .ndim = 1, .shape = {2}, .nbytes = sizeof bias};
}

/* Takes ownership of the entry. */
static void commit(struct qt_writer *w, json_t *list, const char *unit, json_t *entry)
{
    struct qt_err err = {0};
    fuzz_ok(qt_writer_commit(w, unit, entry, &err), &err);
    FUZZ_CHECK(json_object_set_new(list, unit, entry) == 0);
}

static void write_container(const char *path, const struct made *made)
{
    json_t *identity = json_pack("{s:s}", "made", "for fuzzing");
    json_t *tensors = json_object(), *copied = json_object();
    const struct qt_writer_options opt = {0};
    struct qt_writer *w;
    struct qt_json_out out;
    struct qt_err err = {0};
    size_t at = 0;
    fuzz_ok(qt_writer_open(&w, path, made->tensors, made->ntensors, identity, &opt, &err), &err);
    for (size_t i = 0; i < made->n; i++) {
        const struct qt_packed *p = &made->packed[i];
        for (size_t s = 0; s < p->nsections; s++, at++)
            fuzz_ok(qt_writer_put(w, at, p->section[s].data, p->section[s].bytes, 0, &err), &err);
        commit(w, tensors, made->names[i], entry_json(p));
    }
    fuzz_ok(qt_writer_put(w, at, bias, sizeof bias, 0, &err), &err);
    commit(w, copied, "bias",
           json_pack("{s:s, s:[i], s:o}", "dtype", "F32", "shape", 2, "crc32",
                     json_sprintf("%08x", qt_crc32(0, bias, sizeof bias))));
    json_t *manifest =
        json_pack("{s:s, s:i, s:o, s:o, s:o}", "format", "qtool", "format_version",
                  QT_FORMAT_VERSION, "identity", identity, "tensors", tensors, "copied", copied);
    fuzz_ok(qt_writer_begin_manifest(&out, w, &err), &err);
    fuzz_ok(qt_json_out_members(&out, manifest, &err), &err);
    fuzz_ok(qt_json_out_finish(&out, &err), &err);
    qt_json_out_close(&out);
    fuzz_ok(qt_writer_finish(w, &err), &err);
    qt_writer_close(w);
    json_decref(manifest);
}

void fuzz_quantized(const char *name, const char *const *specs, size_t n)
{
    struct made made = {.n = n, .ntensors = 1};
    made.packed = calloc(n, sizeof *made.packed);
    made.names = calloc(n, sizeof *made.names);
    FUZZ_CHECK(made.packed && made.names);
    for (size_t i = 0; i < n; i++) {
        make_packed(&made.packed[i], specs[i], i);
        snprintf(made.names[i], sizeof *made.names, "%s.weight", specs[i]);
        made.ntensors += made.packed[i].nsections;
    }
    made.sections = calloc(made.ntensors, sizeof *made.sections);
    made.tensors = calloc(made.ntensors, sizeof *made.tensors);
    FUZZ_CHECK(made.sections && made.tensors);
    declare(&made);
    write_container(fuzz_path(name), &made);
    for (size_t i = 0; i < n; i++)
        qt_packed_free(&made.packed[i]);
    free(made.packed);
    free(made.names);
    free(made.sections);
    free(made.tensors);
}

/* ---- checking ------------------------------------------------------------------------------- */

/* Rows decoded one by one; only a few, because each costs as much as its strip of 16 rows. */
static const size_t single_rows[] = {0, 7, 16, ROWS - 1};

static void check_rows(const struct qt_packed *p, const float *all)
{
    float *row = malloc(p->k * sizeof *row);
    struct qt_err err = {0};
    FUZZ_CHECK(row);
    for (size_t i = 0; i < sizeof single_rows / sizeof *single_rows && single_rows[i] < p->n; i++) {
        const float *expected = all + qt_packed_source_row(p, single_rows[i]) * p->k;
        fuzz_ok(qt_packed_decode(row, p, single_rows[i], 1, &err), &err);
        FUZZ_CHECK(memcmp(row, expected, p->k * sizeof *row) == 0);
    }
    for (size_t r = 0; r < p->n; r++)
        fuzz_check_row(p, r, all + qt_packed_source_row(p, r) * p->k);
    free(row);
}

static void check_decode(const struct qt_packed *p)
{
    struct qt_err err = {0};
    size_t count = p->n * p->k;
    float *all = malloc(count * sizeof *all);
    struct qt_error error;
    FUZZ_CHECK(all);
    fuzz_ok(qt_packed_weights(all, p, &err), &err);
    check_rows(p, all);
    if (qt_find_nonfinite(all, count) == count) {
        struct qt_matrix w = {all, QT_F32, p->n, p->k, "decoded", "w"};
        fuzz_ok(qt_packed_compare(&error, p, &w, &err), &err);
        FUZZ_CHECK(error.sum_e2 == 0 && error.max_abs == 0 && error.count == count);
    }
    free(all);
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
        int repacked = qt_packed_check_repack(&p, "container", e->name, &err);
        fuzz_check_sections(&p, fuzz_accepted(repacked, &err));
        if (p.n * p.k <= LARGEST) {
            check_decode(&p);
            fuzz_check_input(c, e, &p);
        }
        qt_packed_free(&p);
        accepted++;
    }
    return accepted;
}
