/* mix24: layout, choices, data-free and under a Hessian, and invalid stored bytes. */
#include "hessian_fixture.h"
#include "mix24_bits.h"
#include "pack/schemes/mix24/mix24.h"
#include "pack_fixture.h"

static const char *const specs[] = {
    "mix24",
    "mix24:g=8",
    "mix24:g2=8",
    "mix24:four=0",
    "mix24:four=1",
    "mix24:four=0.1,outliers=0.03",
    "mix24:four=0.6,g=8,g2=8",
    "mix24:local=1",
    "mix24:paper=1",
    "mix24:fit=minmax,ocrit=abs,outliers=0",
    "mix24:sens=obs,order=activity,polish=1",
    "mix24:order=none,g=8",
};
enum { SPECS = sizeof specs / sizeof *specs };

static struct qt_packed quantize(const char *text, const float *w, size_t n, size_t k,
                                 const float *importance)
{
    struct qt_packed p;
    struct qt_err err = {0};
    struct qt_spec spec = spec_of(text);
    struct qt_matrix m = matrix_of(w, n, k);
    if (qt_packed_quantize(&p, &spec, &m, importance, NULL, &err) < 0)
        fail_msg("%s, %zu x %zu: %s", text, n, k, err.reason);
    return p;
}

static float *decode(const struct qt_packed *p)
{
    float *q = must_alloc(p->n * p->k, sizeof *q);
    assert_int_equal(qt_packed_decode(q, p, 0, p->n, NULL), QT_OK);
    return q;
}

static void expect_sound(const struct qt_packed *p)
{
    struct qt_err err = {0};
    if (p->spec.scheme->check_values(p, &err) < 0 || qt_packed_check_repack(p, "f", "t", &err) < 0)
        fail_msg("%s, %zu x %zu: %s", p->spec.text, p->n, p->k, err.reason);
}

/* ---- layout --------------------------------------------------------------------------------- */

/* Codes fill the words of a record, q and zero-points their fields, each bit once. */
static void fields_do_not_overlap(void **state)
{
    (void)state;
    for (int four = 0; four < 2; four++) {
        const unsigned width = four ? 4 : 2, words = four ? 256 : 128;
        uint32_t word[256] = {0}, q[32] = {0}, z[32] = {0};
        for (unsigned row = 0; row < 16; row++)
            for (unsigned col = 0; col < 128; col++) {
                struct qt_mix24_place at = qt_mix24_place(four, row, col);
                uint32_t ones = (1u << width) - 1;
                uint32_t mask = ones << at.bit | (at.bit ? ones >> (32 - at.bit) : 0);
                assert_true(at.word < words && at.bit < 32);
                assert_int_equal(word[at.word] & mask, 0);
                word[at.word] |= mask;
                assert_int_equal(at.word, qt_mix24_place(four, row / 8 * 8, col).word +
                                              row % 8 * QT_MIX24_ROW_WORDS);
            }
        for (unsigned row = 0; row < 16; row++)
            for (unsigned b = 0; b < 2; b++) {
                q[row % 8] += 15u << qt_mix24_q_bit(row, b);
                z[row % 8] += ((1u << width) - 1) << qt_mix24_z_bit(four, row, b);
            }
        for (unsigned i = 0; i < words; i++)
            assert_int_equal(word[i], UINT32_MAX);
        for (unsigned i = 0; i < 8; i++) {
            assert_int_equal(q[i], 0xffff);
            assert_int_equal(z[i], four ? 0xffff : 0xff);
        }
    }
}

static void records_follow_one_another(void **state)
{
    (void)state;
    struct qt_mix24_units quarter = {8, 2, 1, 1};
    for (uint32_t u = 0; u < 8; u++)
        assert_int_equal(qt_mix24_is_four(&quarter, u), u % 4 == 3);
    assert_int_equal(qt_mix24_record_bytes(&quarter, 0), 624);
    assert_int_equal(qt_mix24_record_bytes(&quarter, 1), 1168);
    for (int round = 0; round < 100; round++) {
        struct qt_mix24_units x = {.units = 1 + (uint32_t)(uniform() * 40)};
        x.fours = (uint32_t)(uniform() * (x.units + 1));
        x.parts = round % 2 ? 1 : 2, x.halves = round % 4 < 2 ? 1 : 2;
        uint64_t at = 0;
        uint32_t fours = 0;
        for (uint32_t u = 0; u < x.units; u++) {
            assert_int_equal(qt_mix24_record(&x, u), at);
            fours += (uint32_t)qt_mix24_is_four(&x, u);
            at += qt_mix24_record_bytes(&x, qt_mix24_is_four(&x, u));
            assert_int_equal(at % 16, 0);
        }
        assert_int_equal(qt_mix24_record(&x, x.units), at);
        assert_int_equal(fours, x.fours);
    }
}

/* Packs a strip of groups of 16 bit by bit. */
static void pack_bits(uint8_t *strip, const struct qt_mix24 *m, const struct qt_mix24_group *groups)
{
    uint8_t *record = strip;
    for (unsigned u = 0; u < m->units.units; u++) {
        bool four = (u + 1) * m->units.fours / m->units.units > u * m->units.fours / m->units.units;
        for (unsigned g = 0; g < 8; g++) {
            const struct qt_mix24_group *group = &groups[8 * u + g];
            mix24_put_u(record, four, g / 4, g % 4, (unsigned)group->s2[0] | group->z2[0]);
            for (unsigned row = 0; row < 16; row++) {
                mix24_put_params(record, four, g / 4, g % 4, row, group->q[row], group->zero[row]);
                for (unsigned j = 0; j < 16; j++)
                    mix24_put_code(record, four, g / 4, g % 4, row, j, group->code[j][row]);
            }
        }
        record += four ? 1168 : 624;
    }
}

static void bit_by_bit(void **state)
{
    static const char *const texts[] = {"mix24", "mix24:four=0", "mix24:four=1", "mix24:four=0.6"};
    (void)state;
    for (int round = 0; round < 8; round++) {
        size_t n = 1 + (size_t)(uniform() * 60), k = 1 + (size_t)(uniform() * 900);
        float *w = random_weights(n, k);
        struct qt_packed p = quantize(texts[round % 4], w, n, k, NULL);
        struct qt_mix24 m;
        qt_mix24_open(&m, &p);
        struct qt_mix24_group *groups = must_alloc(m.slots, sizeof *groups);
        uint8_t *strip = must_alloc(m.strip_bytes, 1);
        for (size_t i = 0; i < m.strips; i++) {
            memset(strip, 0, m.strip_bytes);
            qt_mix24_unpack(groups, &m, qt_mix24_strip(&m, i));
            pack_bits(strip, &m, groups);
            assert_memory_equal(strip, qt_mix24_strip(&m, i), m.strip_bytes);
        }
        qt_packed_free(&p);
        free(strip);
        free(groups);
        free(w);
    }
}

/* Every storable weight is the FP16 number that the two roundings give. */
static void values_are_fp16(void **state)
{
    (void)state;
    for (unsigned s2 = QT_MIX24_S2_FINE; s2 < 0x7c00; s2 += QT_MIX24_S2_FINE)
        for (int steps = 1; steps <= 30; steps++) {
            bool four = s2 % QT_MIX24_S2_COARSE == 0;
            double sigma = steps * (double)qt_f16_to_f32((uint16_t)s2), unit = 0x1p-22;
            if (sigma > QT_MIX24_SIGMA_MAX)
                continue;
            for (int zero = 0; zero < (four ? 16 : 4); zero++)
                for (int code = 0; code < (four ? 16 : 4); code++) {
                    float offset = qt_f16_to_f32(qt_f32_to_f16((float)(zero * sigma * unit)));
                    float want =
                        qt_f16_to_f32(qt_f32_to_f16((float)(code * sigma * unit - (double)offset)));
                    float got = qt_mix24_value((float)code, (float)zero, (float)(sigma * unit));
                    assert_true(got == want);
                    if (sigma >= 64)
                        assert_true((double)got == (code - zero) * sigma * unit);
                    if (code == zero)
                        assert_true(got == 0);
                }
        }
}

/* Size of 4096 x 4096: 24 records of 624 and 8 of 1168 bytes per strip, and the other sections. */
static void true_bits_per_weight(void **state)
{
    (void)state;
    struct qt_packed p;
    struct qt_spec spec = spec_of("mix24");
    assert_int_equal(qt_packed_describe(&p, &spec, 4096, 4096, NULL), QT_OK);
    size_t entries = 4096 * 4096 * 2 / 1000;
    double rest = 32.0 * (double)entries + 32.0 * 4097 + 16.0 * 256;
    expect_near("bpw", qt_packed_bpw(&p), 2.96875 + rest / (4096.0 * 4096.0), 1e-12);
}

/* ---- data-free ------------------------------------------------------------------------------ */

static size_t outliers_of(const struct qt_packed *p)
{
    const struct qt_section *s = qt_packed_section(p, "csr_col");
    return s ? s->shape[0] : 0;
}

/* Odd shapes decode to similar values, zero rows to zero, and their bytes are valid. */
static void edge_shapes(void **state)
{
    static const size_t sizes[] = {1, 7, 15, 16, 17, 40, 63, 64, 65, 127, 128, 129, 200, 300};
    enum { SIZES = sizeof sizes / sizeof *sizes };
    (void)state;
    for (int round = 0; round < 120; round++) {
        size_t n = sizes[(size_t)(uniform() * SIZES)], k = sizes[(size_t)(uniform() * SIZES)];
        float *w = random_weights(n, k);
        double e2 = 0, w2 = 0;
        if (round % 3 == 0)
            memset(w, 0, k * sizeof *w);
        struct qt_packed p = quantize(specs[round % SPECS], w, n, k, NULL);
        float *q = decode(&p);
        expect_sound(&p);
        for (size_t i = 0; i < n * k; i++) {
            e2 += pow((double)w[i] - (double)q[i], 2);
            w2 += pow((double)w[i], 2);
            if (round % 3 == 0 && i < k)
                assert_true(q[i] == 0);
        }
        if (!(e2 <= 0.5 * w2))
            fail_msg("%s, %zu x %zu: error %.3f", specs[round % SPECS], n, k, e2 / w2);
        qt_packed_free(&p);
        free(w);
        free(q);
    }
}

static int larger_first(const void *a, const void *b)
{
    const float *x = a, *y = b;
    return x[0] != y[0] ? (x[0] < y[0] ? 1 : -1) : (x[1] > y[1]) - (x[1] < y[1]);
}

/* The outliers are exactly the largest weights of 2-bit groups, ties by index, stored unchanged. */
static void outliers_are_the_top(void **state)
{
    enum { N = 37, K = 300 };
    (void)state;
    float *w = random_weights(N, K), (*list)[2] = must_alloc(N * K, sizeof *list);
    for (size_t i = 0; i < N * K; i++)
        w[i] = ldexpf(rintf(w[i] * 64), -6); /* many ties */
    struct qt_packed p = quantize("mix24:ocrit=abs,outliers=0.01", w, N, K, NULL);
    struct qt_mix24 m;
    float *q = decode(&p);
    size_t count = 0, taken = outliers_of(&p);
    unsigned char *is_outlier = must_alloc(N * K, 1), *two = must_alloc(K / 8, 1);
    qt_mix24_open(&m, &p);
    for (size_t slot = 0; slot < m.slots; slot++)
        if (m.perm[slot] < m.groups)
            two[m.perm[slot]] = qt_mix24_bits(&m, slot) == 2;
    for (size_t i = 0; i < N * K; i++)
        if (two[i % K / 16]) {
            list[count][0] = fabsf(w[i]);
            list[count++][1] = (float)i;
        }
    qsort(list, count, sizeof *list, larger_first);
    assert_int_equal(taken, N * K / 100);
    for (size_t i = 0; i < taken; i++)
        is_outlier[(size_t)list[i][1]] = 1;
    for (size_t r = 0; r < N; r++) {
        size_t first, end;
        qt_mix24_row(&first, &end, &m, 0, r);
        for (size_t i = first; i < end; i++) {
            size_t at = r * K + qt_mix24_channel(&m, m.csr_col[i]);
            assert_true(is_outlier[at]);
            assert_true(q[at] == w[at]);
        }
    }
    qt_packed_free(&p);
    free(w);
    free(q);
    free(list);
    free(is_outlier);
    free(two);
}

/* Columns beyond 65536 have a CSR panel of their own. */
static void wide_matrices_have_panels(void **state)
{
    enum { N = 3, K = 65536 + 1000 };
    (void)state;
    float *w = random_weights(N, K);
    for (size_t r = 0; r < N; r++)
        w[r * K + 65536 + 10 * r + 5] = 3, w[r * K + 100 * r] = -2;
    struct qt_packed p = quantize("mix24:four=0", w, N, K, NULL);
    float *q = decode(&p);
    assert_int_equal(qt_packed_section(&p, "csr_ptr")->shape[0], 2);
    expect_sound(&p);
    for (size_t r = 0; r < N; r++) {
        assert_true(q[r * K + 65536 + 10 * r + 5] == 3);
        assert_true(q[r * K + 100 * r] == -2);
    }
    struct qt_err err = {0};
    ((uint32_t *)(void *)qt_packed_section(&p, "csr_ptr")->data)[N + 1]++;
    assert_int_equal(p.spec.scheme->check_values(&p, &err), QT_E_INPUT);
    assert_non_null(strstr(err.reason, "panel 1 does not begin where the one before it ends"));
    qt_packed_free(&p);
    free(w);
    free(q);
}

/* Only zeros, or only zeros and outliers: no group has a range to derive a scale from, and no group
 * is more sensitive than another. */
static void zeros_and_outliers_are_exact(void **state)
{
    enum { N = 20, K = 1024, COUNT = 40 /* floor(0.002 N K) */ };
    static const char *const texts[] = {"mix24:local=1", "mix24:four=0"};
    (void)state;
    for (size_t t = 0; t < 2; t++)
        for (size_t outliers = 0; outliers <= t * COUNT; outliers += COUNT) {
            float *w = must_alloc(N * K, sizeof *w);
            for (size_t i = 0; i < outliers; i++)
                w[i % N * K + i * 24] = i % 2 ? 1000 : -0.75f;
            struct qt_packed p = quantize(texts[t], w, N, K, NULL);
            float *q = decode(&p);
            expect_sound(&p);
            for (size_t i = 0; i < N * K; i++)
                assert_true(q[i] == w[i]);
            qt_packed_free(&p);
            free(w);
            free(q);
        }
}

static double total_error(const char *text, const float *w, size_t n, size_t k)
{
    struct qt_packed p = quantize(text, w, n, k, NULL);
    struct qt_matrix m = matrix_of(w, n, k);
    struct qt_error e;
    assert_int_equal(qt_packed_compare(&e, &p, &m, NULL), QT_OK);
    qt_packed_free(&p);
    return e.sum_e2;
}

/* Each part of the method lowers the squared error that it targets. */
static void each_part_helps(void **state)
{
    static const char *const ladder[] = {
        "mix24:paper=1,outliers=0",
        "mix24:sens=obs,outliers=0,fit=minmax",
        "mix24:sens=obs,outliers=0",
        "mix24:outliers=0",
        "mix24:ocrit=abs",
        "mix24",
        "mix24:four=0.5",
        "mix24:four=1",
    };
    enum { N = 96, K = 512 };
    (void)state;
    float *w = random_weights(N, K);
    for (size_t i = 0; i < N * K; i++)
        w[i] *= (float)exp(0.5 * sin((double)(i % K / 16) * 7)); /* groups differ */
    double before = INFINITY;
    for (size_t i = 0; i < sizeof ladder / sizeof *ladder; i++) {
        double e = total_error(ladder[i], w, N, K);
        print_message("%-40s %.4f\n", ladder[i], e);
        /* Without importance, two criteria can choose the same groups. */
        if (!(e < before * (i == 1 || i == 3 ? 1.001 : 1)))
            fail_msg("%s is no better than what is before it", ladder[i]);
        before = e;
    }
    free(w);
}

/* ---- under a Hessian ------------------------------------------------------------------------ */

struct solved {
    struct qt_packed p;
    struct qt_factor f;
    struct qt_solve_report report;
};

static struct solved solve(const char *text, const float *w, const double *h, size_t n, size_t k)
{
    struct qt_spec spec = spec_of(text);
    struct qt_matrix m = matrix_of(w, n, k);
    struct qt_err err = {0};
    struct solved s = {.f = factor_of(h, k, (size_t)qt_spec_value(&spec, "g"), false, 0.01)};
    if (qt_packed_solve(&s.p, &spec, &m, &s.f, NULL, &s.report, &err) < 0)
        fail_msg("%s, %zu x %zu: %s", text, n, k, err.reason);
    return s;
}

static void solved_free(struct solved *s)
{
    qt_factor_free(&s->f);
    qt_packed_free(&s->p);
}

/* The reported error is that of the stored bytes, for all parameters and odd shapes. */
static void reports_what_is_stored(void **state)
{
    static const size_t shapes[][2] = {{150, 288}, {1, 1}, {129, 65}, {16, 129}, {33, 7}};
    (void)state;
    for (size_t i = 0; i < 5; i++) {
        size_t n = shapes[i][0], k = shapes[i][1];
        double *h = random_hessian(k, k + 20), *d = damped(h, k, 0.01);
        float *w = random_weights(n, k);
        for (size_t j = 0; j < SPECS; j++) {
            struct solved s = solve(specs[j], w, h, n, k);
            float *q = decode(&s.p);
            expect_sound(&s.p);
            expect_close(specs[j], s.report.after_descent, naive_error(d, w, q, n, k),
                         s.report.before);
            assert_true(s.report.after_descent <=
                        s.report.after_compensation + 1e-6 * s.report.before);
            if (i == 0 && !strstr(specs[j], "none"))
                assert_true(s.report.after_compensation < s.report.before);
            solved_free(&s);
            free(q);
        }
        free(h);
        free(d);
        free(w);
    }
}

/* Compares the diagonal of H^-1 with an inverse computed column by column. */
static void inverse_diagonal(void **state)
{
    enum { K = 70 };
    (void)state;
    double *h = random_hessian(K, 100), *d = damped(h, K, 0.01), *x = must_alloc(K, sizeof *x);
    struct qt_factor f = factor_of(h, K, 16, false, 0.01);
    assert_int_equal(qt_factor_invert_diagonal(&f, NULL), QT_OK);
    for (size_t j = 0; j < K; j += 23) {
        for (size_t i = 0; i < K; i++)
            x[i] = 0;
        for (int sweep = 0; sweep < 20000; sweep++) /* Gauss-Seidel for d x = e_j */
            for (size_t i = 0; i < K; i++) {
                double sum = i == j;
                for (size_t l = 0; l < K; l++)
                    sum -= l == i ? 0 : d[i * K + l] * x[l];
                x[i] = sum / d[i * K + i];
            }
        expect_near("[H^-1]_jj", (double)f.inverse_diagonal[j], x[j], 1e-3);
    }
    qt_factor_free(&f);
    free(h);
    free(d);
    free(x);
}

/* Groups are ordered by class and keep their order within a class; the matrix is unchanged. */
static void reordered_factor(void **state)
{
    enum { K = 100, G = 16, GROUPS = 7 };
    (void)state;
    double *h = random_hessian(K, 300);
    struct qt_factor f = factor_of(h, K, G, false, 0.01), g;
    uint8_t class[GROUPS] = {1, 0, 1, 0, 0, 1, 0};
    const struct qt_factor_options opt = {.class = class};
    size_t at[K];
    assert_int_equal(qt_factor_reorder(&g, &f, &opt, NULL), QT_OK);
    for (size_t i = 0; i < K; i++)
        at[f.order[i]] = i;
    for (size_t i = 0; i < K; i++) {
        assert_int_equal(g.group[i], g.order[i] / G);
        if (i) {
            unsigned here = class[g.group[i]], before = class[g.group[i - 1]];
            assert_true(before <= here);
            assert_true(before < here || at[g.order[i - 1]] < at[g.order[i]]);
        }
        for (size_t j = 0; j < K; j++)
            assert_true(fabsf(g.h[i * K + j] - f.h[at[g.order[i]] * K + at[g.order[j]]]) < 1e-6f);
    }
    qt_factor_free(&f);
    qt_factor_free(&g);
    free(h);
}

static void same_bytes_for_any_threads_and_isa(void **state)
{
    static const char *const isas[] = {"generic", "avx2", "avx512"};
    enum { N = 200, K = 224 };
    (void)state;
    double *h = random_hessian(K, 300);
    float *w = random_weights(N, K);
    for (int j = 0; j < SPECS; j += 3) {
        uint32_t first[2] = {0};
        for (int i = 0; i < 6; i++) {
            qt_threads_set(1 + i % 2 * 3);
            setenv("QTOOL_ISA", isas[i / 2], 1);
            struct qt_packed p = quantize(specs[j], w, N, K, NULL);
            struct solved s = solve(specs[j], w, h, N, K);
            uint32_t crc[2] = {0};
            for (size_t c = 0; c < p.nsections; c++) {
                crc[0] = qt_crc32(crc[0], p.section[c].data, p.section[c].bytes);
                crc[1] = qt_crc32(crc[1], s.p.section[c].data, s.p.section[c].bytes);
            }
            if (i == 0)
                memcpy(first, crc, sizeof first);
            assert_memory_equal(first, crc, sizeof first);
            qt_packed_free(&p);
            solved_free(&s);
        }
    }
    unsetenv("QTOOL_ISA");
    qt_threads_set(0);
    free(h);
    free(w);
}

static void allocation_failures(void **state)
{
    enum { N = 20, K = 96 };
    (void)state;
    double *h = random_hessian(K, 100);
    float *w = random_weights(N, K);
    struct qt_matrix m = matrix_of(w, N, K);
    struct qt_spec spec = spec_of("mix24");
    struct qt_factor f = factor_of(h, K, 16, false, 0.01);
    bool failed = true;
    for (long n = 0; failed; n++) {
        struct qt_packed p;
        struct qt_solve_report report;
        qt_mem_fail_after(n);
        int rc = qt_packed_solve(&p, &spec, &m, &f, NULL, &report, NULL);
        qt_mem_fail_after(-1);
        failed = rc < 0;
        assert_int_equal(rc, failed ? QT_E_RESOURCE : QT_OK);
        if (!failed)
            qt_packed_free(&p);
        assert_true(n < 1000);
    }
    qt_factor_free(&f);
    free(h);
    free(w);
}

/* ---- invalid bytes -------------------------------------------------------------------------- */

enum { BAD_N = 40, BAD_K = 200 }; /* 8 slots of 2 bits, 3 of them padding, and 8 of 4 bits */

/* The first row with two outliers. */
static size_t crowded_row(const struct qt_mix24 *m)
{
    size_t row = 0;
    while (m->csr_ptr[row + 1] - m->csr_ptr[row] < 2)
        row++;
    return row;
}

static size_t slot_with(const struct qt_mix24 *m, bool padding)
{
    size_t slot = 0;
    while ((m->perm[slot] == QT_MIX24_NO_GROUP) != padding)
        slot++;
    return slot;
}

/* The word u of a slot in strip 0. */
static uint16_t *u_at(const struct qt_mix24 *m, size_t slot)
{
    bool four = qt_mix24_bits(m, slot) == 4;
    size_t at = qt_mix24_record(&m->units, (uint32_t)(slot / 8)) + (four ? 1152 : 608) +
                4 * (slot % 4) + 2 * (slot % 8 / 4);
    return (uint16_t *)(void *)(m->stream + at);
}

static void break_perm_range(struct qt_mix24 *m)
{
    m->perm[3] = (uint16_t)m->groups;
}
static void break_perm_twice(struct qt_mix24 *m)
{
    m->perm[3] = m->perm[2];
}
static void break_perm_missing(struct qt_mix24 *m)
{
    m->perm[3] = QT_MIX24_NO_GROUP;
}
static void break_s2_infinite(struct qt_mix24 *m)
{
    *u_at(m, 1) |= 0x7c00;
}
static void break_s2_sign(struct qt_mix24 *m)
{
    *u_at(m, 1) |= 0x8000;
}
static void break_reserved(struct qt_mix24 *m)
{
    *u_at(m, 1) |= 0x10;
}
static void break_s2_zero(struct qt_mix24 *m)
{
    *u_at(m, 1) &= 15;
}
static void break_s2_fine(struct qt_mix24 *m)
{
    *u_at(m, 9) |= 0x80;
}
static void break_scale_range(struct qt_mix24 *m)
{
    *u_at(m, 1) = 0x7a0f; /* 15 * 49152 */
}
static void break_padding_scale(struct qt_mix24 *m)
{
    *u_at(m, slot_with(m, true)) = 0x3c00;
}
static void break_scale_zero(struct qt_mix24 *m)
{
    struct qt_mix24_group *groups = must_alloc(m->slots, sizeof *groups);
    qt_mix24_unpack(groups, m, m->stream);
    groups[9].z2[0] = groups[9].q[0] = 0;
    qt_mix24_pack(m->stream, m, groups);
    free(groups);
}
static void break_ptr_first(struct qt_mix24 *m)
{
    m->csr_ptr[0] = 1;
}
static void break_ptr_falls(struct qt_mix24 *m)
{
    m->csr_ptr[5] = (uint32_t)m->outliers;
}
static void break_ptr_far(struct qt_mix24 *m)
{
    m->csr_ptr[m->n] = UINT32_MAX;
}
static void break_col_range(struct qt_mix24 *m)
{
    m->csr_col[m->csr_ptr[crowded_row(m) + 1] - 1] = 256;
}
static void break_col_padding(struct qt_mix24 *m)
{
    m->csr_col[m->csr_ptr[crowded_row(m) + 1] - 1] = (uint16_t)(slot_with(m, true) * m->g);
}
static void break_col_order(struct qt_mix24 *m)
{
    size_t at = m->csr_ptr[crowded_row(m)];
    uint16_t first = m->csr_col[at];
    m->csr_col[at] = m->csr_col[at + 1];
    m->csr_col[at + 1] = first;
}
static void break_col_twice(struct qt_mix24 *m)
{
    size_t at = m->csr_ptr[crowded_row(m)];
    m->csr_col[at + 1] = m->csr_col[at];
}
static void break_col_four(struct qt_mix24 *m)
{
    size_t row = 0;
    while (m->csr_ptr[row + 1] - m->csr_ptr[row] != 1)
        row++;
    m->csr_col[m->csr_ptr[row]] = (uint16_t)(9 * m->g);
}
static void break_val_nan(struct qt_mix24 *m)
{
    m->csr_val[0] = 0x7e00;
}
static void break_code(struct qt_mix24 *m)
{
    struct qt_mix24_group *groups = must_alloc(m->slots, sizeof *groups);
    size_t row = 0;
    while (m->csr_ptr[row + 1] == 0)
        row++;
    unsigned char *strip = qt_mix24_strip(m, row / 16);
    qt_mix24_unpack(groups, m, strip);
    groups[m->csr_col[0] / m->g].code[m->csr_col[0] % m->g][row % 16] ^= 1;
    qt_mix24_pack(strip, m, groups);
    free(groups);
}

static const struct damage {
    const char *name;
    void (*tell)(struct qt_mix24 *m);
    const char *reason;
} damages[] = {
    {"a group of perm that is not there", break_perm_range, "perm: slot 3 has group 13 of 13"},
    {"a group twice in perm", break_perm_twice, "is in two slots"},
    {"a group that is not in perm", break_perm_missing, "perm: 1 of 13 groups are in no slot"},
    {"an infinite second-order scale", break_s2_infinite, "s2 is not positive and finite"},
    {"a second-order scale of zero", break_s2_zero, "s2 is not positive and finite"},
    {"a negative second-order scale", break_s2_sign, "slot 1 of strip 0: reserved bits are set"},
    {"reserved bits", break_reserved, "slot 1 of strip 0: reserved bits are set"},
    {"too fine a second-order scale", break_s2_fine, "more than two significant bits"},
    {"a scale beyond FP16", break_scale_range, "row 0, slot 1: the scale is beyond FP16"},
    {"a scale of padding", break_padding_scale, "padding has a scale"},
    {"a scale of zero", break_scale_zero, "row 0, slot 9: scale code 0 with z2 = 0"},
    {"row pointers that begin late", break_ptr_first, "csr_ptr: the first is 1"},
    {"row pointers that fall", break_ptr_falls, "is less than the one before it"},
    {"row pointers beyond the entries", break_ptr_far, "csr_ptr: the last is 4294967295"},
    {"a column that is not there", break_col_range, "column 256, has no weight"},
    {"a column of padding", break_col_padding, "has no weight"},
    {"columns out of order", break_col_order, "is out of order in row"},
    {"a column twice", break_col_twice, "is out of order in row"},
    {"an outlier of a 4-bit group", break_col_four, "is in a 4-bit group"},
    {"an outlier that is not a number", break_val_nan, "is not finite"},
    {"an outlier whose code is not zero", break_code, "is not zero"},
};

static void damage_is_refused(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) {
        float *w = random_weights(BAD_N, BAD_K);
        struct qt_packed p = quantize("mix24:outliers=0.005", w, BAD_N, BAD_K, NULL);
        struct qt_mix24 m;
        struct qt_err err = {0};
        expect_sound(&p);
        qt_mix24_open(&m, &p);
        damages[i].tell(&m);
        int rc = p.spec.scheme->check_values(&p, &err);
        if (rc != QT_E_INPUT || !strstr(err.reason, damages[i].reason))
            fail_msg("%s: status %d, '%s'", damages[i].name, rc, err.reason);
        qt_packed_free(&p);
        free(w);
    }
}

/* local=1: each four neighbors have one 4-bit group. */
static void local_choice(void **state)
{
    enum { N = 20, K = 1024 };
    (void)state;
    float *w = random_weights(N, K);
    struct qt_packed p = quantize("mix24:local=1", w, N, K, NULL);
    struct qt_mix24 m;
    qt_mix24_open(&m, &p);
    int fours[K / 64] = {0};
    for (size_t slot = 0; slot < m.slots; slot++)
        fours[m.perm[slot] / 4] += qt_mix24_bits(&m, slot) == 4;
    for (size_t i = 0; i < K / 64; i++)
        assert_int_equal(fours[i], 1);
    qt_packed_free(&p);
    free(w);
}

/* Any bit set in padding is refused. */
static void padding_is_checked(void **state)
{
    (void)state;
    float *w = random_weights(BAD_N, BAD_K);
    struct qt_packed p = quantize("mix24", w, BAD_N, BAD_K, NULL);
    struct qt_mix24 m;
    struct qt_err err = {0};
    qt_mix24_open(&m, &p);
    size_t slot = slot_with(&m, true);
    struct qt_mix24_group *groups = must_alloc(m.slots, sizeof *groups);
    qt_mix24_unpack(groups, &m, qt_mix24_strip(&m, 1));
    groups[slot].code[3][2] = 1;
    qt_mix24_pack(qt_mix24_strip(&m, 1), &m, groups);
    assert_int_equal(qt_packed_check_repack(&p, "f", "t", &err), QT_E_INPUT);
    groups[slot].code[3][2] = 0;
    qt_mix24_pack(qt_mix24_strip(&m, 1), &m, groups);
    assert_int_equal(qt_packed_check_repack(&p, "f", "t", &err), QT_OK);
    qt_mix24_unpack(groups, &m, qt_mix24_strip(&m, 2)); /* rows 32 to 47, of which 8 exist */
    groups[0].q[9] = 1;
    qt_mix24_pack(qt_mix24_strip(&m, 2), &m, groups);
    assert_int_equal(qt_packed_check_repack(&p, "f", "t", &err), QT_E_INPUT);
    free(groups);
    qt_packed_free(&p);
    free(w);
}

static void invalid_shapes_and_texts(void **state)
{
    static const struct {
        const char *text, *reason;
    } bad[] = {
        {"mix24:g=12", "g=12: must be 8 or 16"},
        {"mix24:g2=9", "g2=9: must be 8 or 16"},
        {"mix24:local=1,four=0.5", "local=1 needs four=0.25"},
        {"mix24:four=1.5", "from 0 to 1"},
        {"mix24:sens=gian", "did you mean 'gain'"},
    };
    static const size_t absurd[][2] = {{16, 65535 * 16}, {SIZE_MAX, 1}, {1ul << 40, 64}};
    struct qt_spec spec;
    struct qt_packed p;
    struct qt_err err;
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(qt_spec_parse(&spec, bad[i].text, &err), QT_E_USAGE);
        if (!strstr(err.reason, bad[i].reason))
            fail_msg("%s: %s", bad[i].text, err.reason);
    }
    spec = spec_of("mix24");
    for (size_t i = 0; i < sizeof absurd / sizeof *absurd; i++)
        assert_int_equal(qt_packed_describe(&p, &spec, absurd[i][0], absurd[i][1], &err),
                         QT_E_UNSUPPORTED);
}

int main(void)
{
    seed_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fields_do_not_overlap),
        cmocka_unit_test(records_follow_one_another),
        cmocka_unit_test(bit_by_bit),
        cmocka_unit_test(values_are_fp16),
        cmocka_unit_test(true_bits_per_weight),
        cmocka_unit_test(edge_shapes),
        cmocka_unit_test(outliers_are_the_top),
        cmocka_unit_test(wide_matrices_have_panels),
        cmocka_unit_test(zeros_and_outliers_are_exact),
        cmocka_unit_test(each_part_helps),
        cmocka_unit_test(reports_what_is_stored),
        cmocka_unit_test(inverse_diagonal),
        cmocka_unit_test(reordered_factor),
        cmocka_unit_test(same_bytes_for_any_threads_and_isa),
        cmocka_unit_test(allocation_failures),
        cmocka_unit_test(damage_is_refused),
        cmocka_unit_test(local_choice),
        cmocka_unit_test(padding_is_checked),
        cmocka_unit_test(invalid_shapes_and_texts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
