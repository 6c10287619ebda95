/* Schemes, fragment layouts, packing and vector loops, against slow references and golden bytes. */
#include "pack/layouts/frag.h"
#include "pack/schemes/codebook.h"
#include "pack/schemes/rowops.h"
#include "pack_fixture.h"

static float *random_matrix(size_t n, size_t k)
{
    float *w = malloc(n * k * sizeof *w);
    for (size_t i = 0; i < n * k; i++)
        w[i] = (float)(0.05 * normal());
    return w;
}

static struct qt_packed quantize_as(const struct qt_spec *spec, const float *w, size_t n, size_t k,
                                    struct qt_error *error)
{
    struct qt_packed p;
    struct qt_err err = {0};
    struct qt_matrix m = matrix_of(w, n, k);
    if (qt_packed_quantize(&p, spec, &m, NULL, error, &err) < 0)
        fail_msg("%s: %s", spec->text, err.reason);
    return p;
}

static struct qt_packed quantize(const char *text, const float *w, size_t n, size_t k,
                                 struct qt_error *error)
{
    const struct qt_spec spec = spec_of(text);
    return quantize_as(&spec, w, n, k, error);
}

/* ---- layout --------------------------------------------------------------------------------- */

static const unsigned plane_bits[] = {1, 2, 4};

/* Every bit of a lane's words is used exactly once, and every element of a fragment block belongs
 * to exactly one lane. */
static void layout_is_a_bijection(void **state)
{
    (void)state;
    for (unsigned order = 0; order < 2; order++)
        for (int w = 0; w < 3; w++) {
            unsigned p = plane_bits[w];
            uint32_t used[4] = {0};
            for (unsigned s = 0; s < 4; s++)
                for (unsigned i = 0; i < 4; i++)
                    for (unsigned h = 0; h < 2; h++)
                        for (unsigned bit = 0; bit < p; bit++) {
                            unsigned at = qt_frag_bit(order, p, s, i, h, bit);
                            assert_true(at < 32 * p);
                            assert_false(used[at / 32] >> at % 32 & 1);
                            used[at / 32] |= 1u << at % 32;
                        }
            for (unsigned i = 0; i < p; i++)
                assert_int_equal(used[i], UINT32_MAX);
        }
    unsigned char seen[QT_FRAG_ROWS][QT_FRAG_COLS] = {{0}};
    for (unsigned lane = 0; lane < 32; lane++)
        for (unsigned e = 0; e < 32; e++)
            seen[qt_frag_row(lane, e / 2 % 4)][qt_frag_col(lane, e / 8, e / 2 % 4, e % 2)]++;
    for (unsigned i = 0; i < sizeof seen; i++)
        assert_int_equal(((unsigned char *)seen)[i], 1);
}

static void fast_packer_equals_reference(void **state)
{
    (void)state;
    uint8_t code[QT_FRAG_ROWS * 80], back[QT_FRAG_ROWS * 80];
    uint32_t fast[32 * 4], slow[32 * 4];
    for (int round = 0; round < 50; round++)
        for (unsigned order = 0; order < 2; order++)
            for (int w = 0; w < 3; w++)
                for (unsigned shift = 0; shift + plane_bits[w] <= 8; shift++) {
                    unsigned p = plane_bits[w];
                    for (size_t i = 0; i < sizeof code; i++)
                        code[i] = (uint8_t)random_u32();
                    qt_frag_pack(fast, code, 80, order, p, shift);
                    qt_frag_pack_reference(slow, code, 80, order, p, shift);
                    assert_memory_equal(fast, slow, 32 * p * sizeof *fast);
                    memset(back, 0, sizeof back);
                    qt_frag_unpack(back, fast, 80, order, p, shift);
                    for (size_t r = 0; r < QT_FRAG_ROWS; r++)
                        for (size_t c = 0; c < QT_FRAG_COLS; c++)
                            assert_int_equal(back[80 * r + c], code[80 * r + c] & ((1u << p) - 1)
                                                                                      << shift);
                }
}

/* Codes of 8 bits are where layout_frag.h says. */
static void whole_order_gives_fragments(void **state)
{
    (void)state;
    enum { STRIDE = 70 };
    uint8_t code[QT_FRAG_ROWS * STRIDE], back[QT_FRAG_ROWS * STRIDE] = {0};
    uint32_t words[2][32 * 4];
    for (size_t i = 0; i < sizeof code; i++)
        code[i] = (uint8_t)random_u32();
    for (unsigned plane = 0; plane < 2; plane++)
        qt_frag_pack(words[plane], code, STRIDE, QT_FRAG_WHOLE, 4, 4 - 4 * plane);
    for (unsigned lane = 0; lane < 32; lane++)
        for (unsigned e = 0; e < 32; e++) {
            unsigned s = e / 8, i = e / 2 % 4, h = e % 2, at = qt_frag_whole_bit(s, i, h);
            assert_int_equal(words[i / 2][4 * lane + at / 32] >> at % 32 & 255,
                             code[qt_frag_row(lane, i) * STRIDE + qt_frag_col(lane, s, i, h)]);
        }
    for (unsigned plane = 0; plane < 2; plane++)
        qt_frag_unpack(back, words[plane], STRIDE, QT_FRAG_WHOLE, 4, 4 - 4 * plane);
    for (size_t i = 0; i < sizeof code; i++)
        assert_int_equal(back[i], i % STRIDE < QT_FRAG_COLS ? code[i] : 0);
}

/* Unpacking as layout_frag8.h says gives the A fragments of m16n8k32, and those of m16n8k64 with
 * the column order described there. */
static void byte_order_gives_fragments(void **state)
{
    (void)state;
    enum { STRIDE = 70 };
    uint8_t code[QT_FRAG_ROWS * STRIDE], back[QT_FRAG_ROWS * STRIDE] = {0};
    uint32_t words[32 * 4];
    for (size_t i = 0; i < sizeof code; i++)
        code[i] = (uint8_t)(random_u32() % 16);
    qt_frag_pack(words, code, STRIDE, QT_FRAG_BYTE, 4, 0);
    for (unsigned lane = 0; lane < 32; lane++)
        for (unsigned e = 0; e < 32; e++) {
            unsigned s = e / 16, reg = e / 4 % 4, b = e % 4, g = lane / 4, t = lane % 4;
            uint32_t x = words[4 * lane + 2 * s + reg % 2];
            uint32_t s8 = (reg < 2 ? x << 4 : x) & 0xf0f0f0f0;
            unsigned want =
                code[(g + 8 * (reg % 2)) * STRIDE + 32 * s + 16 * (reg / 2) + 4 * t + b];
            assert_int_equal((int8_t)(s8 >> 8 * b & 255), 16 * ((int)want - 8));
            unsigned c = e / 16, place = e % 8, r = e / 8 % 2; /* m16n8k64: register r + 2 c */
            want = code[(g + 8 * r) * STRIDE + 32 * c + 16 * (place % 2) + 4 * t + place / 2];
            assert_int_equal(words[4 * lane + 2 * c + r] >> 4 * place & 15, want ^ 8);
        }
    qt_frag_unpack(back, words, STRIDE, QT_FRAG_BYTE, 4, 0);
    for (size_t i = 0; i < sizeof code; i++)
        assert_int_equal(back[i], i % STRIDE < QT_FRAG_COLS ? code[i] : 0);
}

/* ---- nearest values ------------------------------------------------------------------------- */

static struct qt_codebook codebook_of(const char *text, float *w, size_t k)
{
    struct qt_codebook cb;
    struct qt_packed p = quantize(text, w, 1, k, NULL);
    p.spec.scheme->codebook(&cb, &p);
    qt_packed_free(&p);
    return cb;
}

/* Reference: the code with the nearest value; ties as documented. */
static unsigned nearest_code(const struct qt_codebook *cb, float y)
{
    unsigned best = 0;
    bool table = cb->grid.levels != 0, whole = !table && cb->grid.exp_bits == 0;
    bool mini = !table && !whole, sign_first = mini && cb->bits == 8;
    unsigned step = mini && !sign_first ? 2 : 1, negative = mini && signbit(y);
    unsigned first = sign_first ? negative << 7 : negative, last = sign_first ? first + 127 : 255;
    double least = INFINITY;
    for (unsigned c = first; c < 1u << cb->bits && c <= last; c += step) {
        if (isinf(cb->value[c])) /* unused code */
            continue;
        double d = fabs((double)cb->value[c] - (double)y);
        /* Ties go to the even multiple of the spacing at y. With a mantissa that is the code's last
         * bit. Without one the spacing is the lower neighbor itself, unless that is zero. */
        bool even = whole               ? fmod((double)cb->value[c], 2) == 0
                    : cb->grid.man_bits ? c / step % 2 == 0
                                        : cb->value[best] != 0;
        if (d < least || (!table && d == least && even)) {
            least = d;
            best = c;
        }
    }
    return best;
}

static const char *const all_codebooks[] = {
    "nf4",
    "nf3",
    "nf2",
    "lut4",
    "lut3",
    "lut2",
    "fp8",
    "fp8:e=5",
    "fp7",
    "fp7:e=2",
    "fp6",
    "fp6:e=2",
    "fp6:e=4",
    "fp5",
    "fp5:e=3",
    "fp4",
    "fp4:e=1",
    "fp4:e=3",
    "fpx:bits=3,e=1",
    "fpx:bits=3,e=2",
    "fpx:bits=8,e=6",
    "fpx:bits=8,e=1",
    "int3",
    "int2:g=32",
    "int3:zero=group",
    "int2:g=32,zero=group",
    "iq4nl",
    "mxfp4",
    "nvfp4",
    "fp8:max=448",
    "int4:g=64",
    "int4:g=0",
    "int4:zero=group",
    "int4:g=32,zero=group",
    "int8",
    "int8:g=32,zero=group",
    "w4ax",
    "w4ax:scales=int",
    "w4ax:scales=row",
};
enum { CODEBOOKS = sizeof all_codebooks / sizeof *all_codebooks };

/* Rounds random values, every stored value, every midpoint and its neighbors on every instruction
 * set. */
static void rounding_is_to_nearest_on_every_isa(void **state)
{
    (void)state;
    enum { K = 256 };
    for (int b = 0; b < CODEBOOKS; b++) {
        float *w = random_matrix(1, K), x[4096];
        struct qt_codebook cb = codebook_of(all_codebooks[b], w, K);
        size_t n = 0;
        for (unsigned c = 0; c < 1u << cb.bits; c++) {
            float v = cb.value[c];
            if (isinf(v))
                continue;
            x[n++] = v;
            for (unsigned d = 0; n < 3000 && d<1u << cb.bits; d += cb.bits> 6 ? 7 : 1) {
                float mid = (v + cb.value[d]) / 2;
                if (isinf(mid))
                    continue;
                x[n++] = mid;
                x[n++] = nextafterf(mid, INFINITY);
                x[n++] = nextafterf(mid, -INFINITY);
            }
        }
        while (n < 4096 - 5) /* an odd count, to test partial chunks */
            x[n++] = cb.grid.max * (float)normal();
        const struct qt_rowops *ops;
        for (size_t i = 0; (ops = qt_rowops_at(i)) != NULL; i++) {
            uint8_t code[4096];
            ops->round(code, x, n, 1, &cb.grid);
            for (size_t j = 0; j < n; j++) {
                float v = cb.value[code[j]], t = cb.value[nearest_code(&cb, x[j])];
                if (v != t)
                    fail_msg("%s %s: %a -> %a, nearest is %a", all_codebooks[b], ops->isa, x[j], v,
                             t);
            }
        }
        free(w);
    }
}

static void rowops_are_bit_identical(void **state)
{
    (void)state;
    const struct qt_rowops *plain = qt_rowops_at(0), *ops;
    for (int round = 0; round < 300; round++) {
        enum { MAX = 300 };
        size_t n = 1 + random_u32() % MAX;
        float *x = random_matrix(1, n), *h = random_matrix(1, n);
        for (size_t i = 0; i < n; i++)
            h[i] = fabsf(h[i]);
        struct qt_codebook cb = codebook_of(all_codebooks[round % CODEBOOKS], x, n);
        float s = 0.01f + (float)fabs(normal()), inv = 1 / s;
        const float *weights = round % 3 ? h : NULL;
        for (size_t i = 1; (ops = qt_rowops_at(i)) != NULL; i++) {
            float a[2], b[2];
            uint8_t ca[MAX], cb2[MAX];
            assert_true(plain->absmax(x, n) == ops->absmax(x, n));
            assert_true(plain->error(x, weights, n, inv, s, &cb.grid) ==
                        ops->error(x, weights, n, inv, s, &cb.grid));
            plain->moments(&a[0], &a[1], x, weights, n, inv, &cb.grid);
            ops->moments(&b[0], &b[1], x, weights, n, inv, &cb.grid);
            assert_memory_equal(a, b, sizeof a);
            plain->round(ca, x, n, inv, &cb.grid);
            ops->round(cb2, x, n, inv, &cb.grid);
            assert_memory_equal(ca, cb2, n);
        }
        /* The sums agree with a plain loop. */
        double e = 0;
        for (size_t i = 0; i < n; i++) {
            double d = (double)x[i] - (double)(s * cb.value[nearest_code(&cb, x[i] * inv)]);
            e += (weights ? (double)weights[i] : 1) * d * d;
        }
        assert_true(fabs(e - (double)plain->error(x, weights, n, inv, s, &cb.grid)) <= 1e-4 * e);
        free(x);
        free(h);
    }
}

/* ---- values that the literature gives ------------------------------------------------------- */

static void tables_are_the_published_ones(void **state)
{
    (void)state;
    static const float nf4[16] = {-1,
                                  -0.6961928009986877f,
                                  -0.5250730514526367f,
                                  -0.39491748809814453f,
                                  -0.28444138169288635f,
                                  -0.18477343022823334f,
                                  -0.09105003625154495f,
                                  0,
                                  0.07958029955625534f,
                                  0.16093020141124725f,
                                  0.24611230194568634f,
                                  0.33791524171829224f,
                                  0.44070982933044434f,
                                  0.5626170039176941f,
                                  0.7229568362236023f,
                                  1};
    static const float nf3[8] = {-1, -.4786f, -.2171f, 0, .1609f, .3379f, .5626f, 1};
    float w[64] = {1};
    struct qt_codebook cb = codebook_of("nf4", w, 64);
    for (int i = 0; i < 16; i++) /* FP16 rounding: half an ulp of 1 at most */
        assert_true(fabsf(cb.value[i] - nf4[i]) <= 0x1p-12f);
    cb = codebook_of("nf3", w, 64);
    for (int i = 0; i < 8; i++)
        assert_true(fabsf(cb.value[i] - nf3[i]) <= 0x1p-12f + 5e-5f);
    static const struct {
        const char *text;
        float max;
    } formats[] = {{"fp6", 28}, {"fp6:e=2", 7.5f}, {"fp5", 7}, {"fp4", 6}, {"fp5:e=3", 24}};
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        assert_true(codebook_of(formats[i].text, w, 64).grid.max == formats[i].max);
}

/* ---- golden bytes --------------------------------------------------------------------------- */

static void *read_all(const char *name, const char *ext, size_t *size)
{
    char path[256], *data;
    struct qt_err err = {0};
    snprintf(path, sizeof path, "tests/golden/pack/%s.%s", name, ext);
    if (qt_file_read(&data, size, path, 1 << 24, &err) < 0)
        fail_msg("%s: %s", path, err.reason);
    return data;
}

static void golden_bytes(void **state)
{
    (void)state;
    FILE *f = fopen("tests/golden/pack/cases.txt", "r");
    char name[64], text[128];
    size_t n, k;
    int exp2, version, cases = 0;
    assert_non_null(f);
    while (fscanf(f, "%63s %127s %zu %zu %d %d", name, text, &n, &k, &exp2, &version) == 6) {
        struct qt_spec spec;
        size_t wsize, size, at = 0;
        assert_int_equal(qt_spec_read(&spec, text, NULL), QT_OK);
        assert_int_equal(qt_spec_format_version(&spec), version);
        float *w = read_all(name, "w", &wsize);
        unsigned char *golden = read_all(name, "bin", &size);
        assert_int_equal(wsize, n * k * sizeof *w);
        struct qt_packed p = quantize_as(&spec, w, n, k, NULL);
        assert_int_equal(p.scale_exp2, exp2);
        assert_int_equal(qt_packed_bytes(&p), size);
        for (size_t i = 0; i < p.nsections; i++) {
            if (memcmp(p.section[i].data, golden + at, p.section[i].bytes) != 0)
                fail_msg("%s: section %s differs", name, p.section[i].name);
            at += p.section[i].bytes;
        }
        qt_packed_free(&p);
        qt_free(w);
        qt_free(golden);
        cases++;
    }
    fclose(f);
    assert_int_equal(cases, 33);
}

/* ---- matrices ------------------------------------------------------------------------------- */

static const size_t edge_sizes[] = {1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 200};
enum { EDGES = sizeof edge_sizes / sizeof *edge_sizes };

/* Every scheme at shapes around the fragment block size: decodes, repacks, and reports the errors
 * of a plain loop. */
static void edge_shapes(void **state)
{
    (void)state;
    for (int round = 0; round < 400; round++) {
        const char *text = all_codebooks[random_u32() % CODEBOOKS];
        size_t n = edge_sizes[random_u32() % EDGES], k = edge_sizes[random_u32() % EDGES];
        float *w = random_matrix(n, k), *q = malloc(n * k * sizeof *q);
        struct qt_err err = {0};
        struct qt_error error, again;
        if (round % 5 == 0)
            memset(w, 0, k * sizeof *w); /* a zero row */
        struct qt_packed p = quantize(text, w, n, k, &error);
        assert_int_equal(qt_packed_decode(q, &p, 0, n, &err), 0);
        double e2 = 0, w2 = 0;
        for (size_t i = 0; i < n * k; i++) {
            e2 += pow((double)w[i] - (double)q[i], 2);
            w2 += pow((double)w[i], 2);
        }
        assert_true(fabs(error.sum_e2 - e2) <= 1e-5 * e2 + 1e-12);
        assert_true(fabs(error.sum_w2 - w2) <= 1e-5 * w2);
        assert_true(e2 <= 0.6 * w2 + 1e-12);
        if (round % 5 == 0)
            for (size_t i = 0; i < k; i++)
                assert_true(q[i] == 0);
        struct qt_matrix m = matrix_of(w, n, k);
        assert_int_equal(qt_packed_compare(&again, &p, &m, &err), 0);
        assert_memory_equal(&again, &error, sizeof error);
        assert_int_equal(qt_packed_check_repack(&p, "f", "t", &err), 0);
        size_t row = random_u32() % n, rows = random_u32() % (n - row + 1);
        float *part = malloc((rows + 1) * k * sizeof *part);
        assert_int_equal(qt_packed_decode(part, &p, row, rows, &err), 0);
        assert_memory_equal(part, q + row * k, rows * k * sizeof *part);
        free(part);
        qt_packed_free(&p);
        free(w);
        free(q);
    }
}

static void search_beats_rtn(void **state)
{
    (void)state;
    static const char *const names[] = {"nf4:g=64", "nf3:g=128", "nf2:g=32",  "fp6:e=3",
                                        "fp4:e=2",  "lut3:g=64", "int4:g=64", "int4:g=0,zero=group",
                                        "int8:g=32"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char rtn[64], search[64];
        struct qt_error a, b;
        float *w = random_matrix(48, 256);
        snprintf(rtn, sizeof rtn, "%s,method=rtn", names[i]);
        snprintf(search, sizeof search, "%s,method=search", names[i]);
        struct qt_packed p = quantize(rtn, w, 48, 256, &a), q = quantize(search, w, 48, 256, &b);
        assert_true(b.sum_e2 < a.sum_e2);
        qt_packed_free(&p);
        qt_packed_free(&q);
        free(w);
    }
}

/* The search also tries the scale of rtn, even if that is 1, so no group may be worse than with
 * rtn. Here a row is a group. */
static void search_is_never_worse_than_rtn(void **state)
{
    enum { N = 16384, K = 32 };
    struct qt_packed p[2];
    struct qt_error error;
    float *w = random_matrix(N, K), *q[2];
    (void)state;
    for (size_t r = 0; r < N; r++) {
        float *row = w + r * K, top = 0;
        for (size_t i = 0; i < K; i++)
            top = fmaxf(top, fabsf(row[i]));
        for (size_t i = 0; i < K; i++)
            row[i] = fabsf(row[i]) == top ? copysignf(7, row[i]) : row[i] * (7 / top);
    }
    for (int i = 0; i < 2; i++) {
        p[i] = quantize(i ? "int4:g=32,method=search" : "int4:g=32,method=rtn", w, N, K, &error);
        q[i] = malloc(N * K * sizeof *q[i]);
        assert_int_equal(qt_packed_decode(q[i], &p[i], 0, N, NULL), QT_OK);
    }
    for (size_t r = 0; r < N; r++) {
        double e[2] = {0};
        for (int i = 0; i < 2; i++)
            for (size_t j = r * K; j < (r + 1) * K; j++)
                e[i] += (double)(q[i][j] - w[j]) * (double)(q[i][j] - w[j]);
        if (!(e[1] <= e[0] * (1 + 1e-6)))
            fail_msg("row %zu: error %.9g by search, %.9g by rtn", r, e[1], e[0]);
    }
    for (int i = 0; i < 2; i++) {
        qt_packed_free(&p[i]);
        free(q[i]);
    }
    free(w);
}

/* Checkpoints may have been rounded to the same format. */
static void search_keeps_rounded_weights(void **state)
{
    enum { N = 2048, K = 64 };
    static const char *const names[] = {"mxfp4", "nvfp4", "nf4:g=64", "int8"};
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        struct qt_error error;
        float *w = random_matrix(N, K);
        char rtn[64];
        snprintf(rtn, sizeof rtn, "%s%cmethod=rtn", names[i], strchr(names[i], ':') ? ',' : ':');
        struct qt_packed p = quantize(rtn, w, N, K, &error);
        assert_true(error.sum_e2 > 0);
        assert_int_equal(qt_packed_decode(w, &p, 0, N, NULL), QT_OK);
        qt_packed_free(&p);
        p = quantize(names[i], w, N, K, &error);
        if (error.sum_e2 != 0)
            fail_msg("%s: squared error %g", names[i], error.sum_e2);
        qt_packed_free(&p);
        free(w);
    }
}

static void same_bytes_for_any_threads_and_isa(void **state)
{
    (void)state;
    static const char *const isas[] = {"generic", "avx2", "avx512"};
    float *w = random_matrix(200, 320);
    for (int b = 0; b < CODEBOOKS; b++) {
        uint32_t crc[12];
        size_t n = 0;
        for (int threads = 1; threads <= 4; threads *= 2)
            for (int i = 0; i < 3; i++) {
                qt_threads_set(threads);
                setenv("QTOOL_ISA", isas[i], 1);
                struct qt_packed p = quantize(all_codebooks[b], w, 200, 320, NULL);
                crc[n] = 0;
                for (size_t s = 0; s < p.nsections; s++)
                    crc[n] = qt_crc32(crc[n], p.section[s].data, p.section[s].bytes);
                assert_int_equal(crc[n], crc[0]);
                qt_packed_free(&p);
                n++;
            }
    }
    unsetenv("QTOOL_ISA");
    qt_threads_set(0);
    free(w);
}

/* Scales outside the range of FP16: the exponent per tensor keeps the relative error. */
static void extreme_magnitudes(void **state)
{
    (void)state;
    static const float factors[] = {1e-30f, 1e-8f, 1, 1e8f, 1e30f};
    static const char *const names[] = {"nf4", "fp6", "fpx:bits=8,e=5", "int4:zero=group"};
    for (int t = 0; t < 4; t++) {
        double reference = 0;
        for (int f = 0; f < 5; f++) {
            struct qt_error e;
            seed = 77;
            float *w = random_matrix(16, 128);
            for (int i = 0; i < 16 * 128; i++)
                w[i] *= factors[f];
            struct qt_packed p = quantize(names[t], w, 16, 128, &e);
            /* qt_error loses 1e-30 squared here: measure on the decoded values. */
            float q[16 * 128];
            assert_int_equal(qt_packed_decode(q, &p, 0, 16, NULL), 0);
            double e2 = 0, w2 = 0;
            for (int i = 0; i < 16 * 128; i++) {
                e2 += pow((double)w[i] - (double)q[i], 2);
                w2 += pow((double)w[i], 2);
            }
            if (f == 0)
                reference = e2 / w2;
            assert_true(fabs(e2 / w2 - reference) < 0.1 * reference);
            qt_packed_free(&p);
            free(w);
        }
    }
}

static void nonfinite_weights_are_named(void **state)
{
    (void)state;
    static const float bad[] = {INFINITY, -INFINITY, NAN};
    for (int i = 0; i < 3; i++) {
        float *w = random_matrix(20, 100);
        struct qt_packed p;
        struct qt_err err = {0};
        struct qt_spec spec = spec_of("nf4");
        struct qt_matrix m = matrix_of(w, 20, 100);
        w[17 * 100 + 42] = bad[i];
        assert_int_equal(qt_packed_quantize(&p, &spec, &m, NULL, NULL, &err), QT_E_INPUT);
        assert_string_equal(err.tensor, "tensor");
        assert_string_equal(err.file, "file");
        assert_non_null(strstr(err.reason, "row 17, column 42"));
        free(w);
    }
}

/* A flipped bit in the padding, a scale that is not finite and an invalid table are noticed. */
static void invalid_bytes_are_refused(void **state)
{
    (void)state;
    float *w = random_matrix(17, 70);
    struct qt_err err = {0};
    struct qt_packed p = quantize("fp6", w, 17, 70, NULL);
    struct qt_section *plane = &p.section[0];
    plane->data[plane->bytes - 1] ^= 0x10; /* last lane of the last fragment block: rows 31, columns
                                            * 126.. */
    assert_int_equal(qt_packed_check_repack(&p, "f", "t", &err), QT_E_INPUT);
    plane->data[plane->bytes - 1] ^= 0x10;
    assert_int_equal(qt_packed_check_repack(&p, "f", "t", &err), QT_OK);
    ((uint16_t *)(void *)p.section[2].data)[31] = 1; /* a scale of a padding row */
    assert_int_equal(qt_packed_check_repack(&p, "f", "t", &err), QT_E_INPUT);
    for (unsigned i = 0; i < 2; i++) { /* infinite, NaN */
        ((uint16_t *)(void *)p.section[2].data)[3] = i ? 0xfe00 : 0x7c00;
        assert_int_equal(p.spec.scheme->check_values(&p, &err), QT_E_INPUT);
        assert_non_null(strstr(err.reason, "scale 3 is not finite"));
    }
    qt_packed_free(&p);
    p = quantize("lut3", w, 17, 70, NULL);
    uint16_t *table = (uint16_t *)(void *)qt_packed_section(&p, "table")->data, kept = table[3];
    table[3] = table[5];
    assert_int_equal(p.spec.scheme->check_values(&p, &err), QT_E_INPUT);
    assert_non_null(strstr(err.reason, "table entry 4 is out of order"));
    table[3] = kept;
    assert_int_equal(p.spec.scheme->check_values(&p, &err), QT_OK);
    table[7] = 0x3c01; /* just above 1 */
    assert_int_equal(p.spec.scheme->check_values(&p, &err), QT_E_INPUT);
    assert_non_null(strstr(err.reason, "table entry 7 is outside [-1, 1]"));
    qt_packed_free(&p);
    free(w);
}

static void weights_of_every_dtype(void **state)
{
    (void)state;
    enum { N = 16, K = 64 };
    float w[N * K];
    uint16_t f16[N * K], bf16[N * K];
    double f64[N * K];
    for (int i = 0; i < N * K; i++) {
        w[i] = qt_bf16_to_f32(qt_f32_to_bf16(ldexpf((float)(random_u32() % 255) - 127, -9)));
        f16[i] = qt_f32_to_f16(w[i]);
        bf16[i] = qt_f32_to_bf16(w[i]);
        f64[i] = (double)w[i];
    }
    const struct {
        enum qt_dtype dtype;
        const void *data;
    } forms[] = {{QT_F32, w}, {QT_F16, f16}, {QT_BF16, bf16}, {QT_F64, f64}};
    struct qt_packed first = quantize("nf4", w, N, K, NULL);
    for (int i = 1; i < 4; i++) {
        struct qt_packed p;
        struct qt_spec spec = spec_of("nf4");
        struct qt_matrix m = {forms[i].data, forms[i].dtype, N, K, "f", "t"};
        assert_int_equal(qt_packed_quantize(&p, &spec, &m, NULL, NULL, NULL), QT_OK);
        assert_memory_equal(p.section[0].data, first.section[0].data, first.section[0].bytes);
        qt_packed_free(&p);
    }
    qt_packed_free(&first);
}

static void nonfinite_values_are_refused(void **state)
{
    (void)state;
    enum { N = 16, K = 64, ROW = 9, COLUMN = 3 };
    static const struct {
        double value;
        enum qt_dtype dtype;
        const char *message;
    } cases[] = {{NAN, QT_F64, "is NaN"},
                 {-INFINITY, QT_F64, "is infinite"},
                 {1e300, QT_F64, "is too large for FP32"},
                 {NAN, QT_F32, "is NaN"},
                 {INFINITY, QT_F32, "is infinite"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        float f32[N * K] = {0};
        double f64[N * K] = {0};
        f64[ROW * K + COLUMN] = cases[i].value;
        f32[ROW * K + COLUMN] = (float)cases[i].value;
        struct qt_packed p;
        struct qt_err err = {0};
        struct qt_spec spec = spec_of("nf4");
        const void *data = cases[i].dtype == QT_F64 ? (const void *)f64 : f32;
        struct qt_matrix m = {data, cases[i].dtype, N, K, "f", "t"};
        assert_int_equal(qt_packed_quantize(&p, &spec, &m, NULL, NULL, &err), QT_E_INPUT);
        assert_non_null(strstr(err.reason, "value at row 9, column 3 is "));
        assert_non_null(strstr(err.reason, cases[i].message));
    }
}

/* ---- scheme text ---------------------------------------------------------------------------- */

static void spec_text(void **state)
{
    (void)state;
    static const struct {
        const char *text, *canonical;
    } good[] = {
        {"nf4", "nf4:g=128,method=auto"},
        {"nf3:g=64", "nf3:g=64,method=auto"},
        {"fp6", "fp6:e=3,method=auto"},
        {"fp6:method=rtn,e=2", "fp6:e=2,method=rtn"},
        {"fpx:bits=7,e=4", "fpx:bits=7,e=4,method=auto"},
        {"lut2:g=32", "lut2:g=32,method=auto"},
        {"int3", "int3:g=128,method=auto"},
        {"mxfp4", "mxfp4:g=32,method=auto"},
        {"fp8:max=448", "fp8:e=4,max=448,method=auto"},
        {"int4", "int4:g=128,zero=none,method=auto"},
        {"int8", "int8:g=0,zero=none,method=auto"},
        {"int4:g=0,zero=group", "int4:g=0,zero=group,method=auto"},
        {"none", "none"},
    };
    static const struct {
        const char *text, *message;
    } bad[] = {
        {"nf5", "did you mean 'nf4'"},
        {"NF3", "did you mean 'nf3'"},
        {"quant", "there are:"},
        {"", "unknown scheme"},
        {"nf4:", "expected key=value"},
        {"nf4:g", "expected key=value"},
        {"nf4:g=", "expected an integer"},
        {"nf4:g=48", "must be 32, 64, 128 or 256"},
        {"nf4:g=64.5", "integer"},
        {"nvfp4:g=32", "the format has groups of 16"},
        {"nf4:g=16", "must be 32, 64, 128 or 256"},
        {"iq4nl:g=64", "the format has groups of 32"},
        {"mxfp4:learn=1", "the scales of mxfp4 and nvfp4 cannot be learned"},
        {"fp6:max=448", "must be 0, or 448 with bits=8, e=4"},
        {"int3:table=nf", "unknown parameter"},
        {"int4:g=16", "must be 0, 32, 64, 128 or 256"},
        {"nf4:g=1e9", "from 16 to 256"},
        {"nf4:g=0x40", "integer"},
        {"nf4:g=nan", "integer"},
        {"nf4:g=64,g=64", "given twice"},
        {"nf4:metod=rtn", "did you mean 'method'"},
        {"nf4:method=rtm", "did you mean 'rtn'"},
        {"nf4:bits=3", "unknown parameter"},
        {"nf4:g=64,", "expected key=value"},
        {"fp4:e=4", "do not fit"},
        {"none:x=1", "none takes no parameters"},
        {"w4ax:smooth=0.5", "must be 0, or at least 1"},
        {"w4ax:scales=row,a8max=0", "a8max=0: with scales=row all activations have 8 bits"},
        {"w4ax:bound=0.1,scales=row", "bound=0.1: with scales=row all activations have 8 bits"},
        {"nf4:g="
         "0000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
         "0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
         "0000000000000000000000000000000000000000000000000000000000000000000000000000000000000064",
         "is too long"},
    };
    struct qt_err err;
    struct qt_spec spec;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        assert_string_equal(spec_of(good[i].text).text, good[i].canonical);
        assert_string_equal(spec_of(good[i].canonical).text, good[i].canonical);
    }
    spec = spec_of("nf4");
    qt_spec_resolve(&spec, false);
    assert_string_equal(spec.text, "nf4:g=128,method=search");
    spec = spec_of("nf4");
    qt_spec_resolve(&spec, true);
    assert_string_equal(spec.text, "nf4:g=128,method=gptq");
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        if (qt_spec_parse(&spec, bad[i].text, &err) != QT_E_USAGE)
            fail_msg("'%s' was accepted", bad[i].text);
        if (!strstr(err.reason, bad[i].message))
            fail_msg("'%s': %s", bad[i].text, err.reason);
    }
    /* Older containers may have parameters without effect. */
    assert_int_equal(qt_spec_read(&spec, "w4ax:scales=row,a8max=0", &err), QT_OK);
    /* The text of format version 1 lacks `rotate`. */
    static const char old[] =
        "w4ax:a8max=0.2,bound=0,order=outliers,smooth=4,scales=int,method=gptq";
    assert_int_equal(qt_spec_read(&spec, old, &err), QT_OK);
    assert_string_equal(spec.text, old);
    assert_int_equal(qt_spec_format_version(&spec), 1);
    spec = spec_of(old);
    assert_int_equal(qt_spec_format_version(&spec), 2);
    assert_string_equal(spec.text + strlen(old), ",rotate=hadamard");
    assert_int_equal(qt_spec_read(&spec, "nf4:g=48", &err), QT_E_USAGE);
}

static void absurd_shapes_are_refused(void **state)
{
    (void)state;
    static const size_t absurd[][2] = {{0, 64},
                                       {64, 0},
                                       {SIZE_MAX, 1},
                                       {1, SIZE_MAX},
                                       {SIZE_MAX / 2, SIZE_MAX / 2},
                                       {1ul << 40, 1ul << 40}};
    for (int b = 0; b < CODEBOOKS; b++)
        for (size_t i = 0; i < sizeof absurd / sizeof *absurd; i++) {
            struct qt_packed p;
            struct qt_spec spec = spec_of(all_codebooks[b]);
            struct qt_err err = {0};
            int rc = qt_packed_describe(&p, &spec, absurd[i][0], absurd[i][1], &err);
            assert_int_equal(rc, QT_E_UNSUPPORTED);
        }
}

static void allocation_failures(void **state)
{
    (void)state;
    float *w = random_matrix(40, 128);
    struct qt_matrix m = matrix_of(w, 40, 128);
    struct qt_spec spec = spec_of("lut3");
    bool failed = true;
    for (long n = 0; failed; n++) {
        struct qt_packed p;
        struct qt_error e;
        struct qt_err err = {0};
        qt_mem_fail_after(n);
        int rc = qt_packed_quantize(&p, &spec, &m, NULL, &e, &err);
        qt_mem_fail_after(-1);
        failed = rc < 0;
        if (failed)
            assert_int_equal(rc, QT_E_RESOURCE);
        else
            qt_packed_free(&p);
        assert_true(n < 1000);
    }
    free(w);
}

int main(void)
{
    seed_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layout_is_a_bijection),
        cmocka_unit_test(fast_packer_equals_reference),
        cmocka_unit_test(whole_order_gives_fragments),
        cmocka_unit_test(byte_order_gives_fragments),
        cmocka_unit_test(rounding_is_to_nearest_on_every_isa),
        cmocka_unit_test(rowops_are_bit_identical),
        cmocka_unit_test(tables_are_the_published_ones),
        cmocka_unit_test(golden_bytes),
        cmocka_unit_test(edge_shapes),
        cmocka_unit_test(search_beats_rtn),
        cmocka_unit_test(search_is_never_worse_than_rtn),
        cmocka_unit_test(search_keeps_rounded_weights),
        cmocka_unit_test(same_bytes_for_any_threads_and_isa),
        cmocka_unit_test(extreme_magnitudes),
        cmocka_unit_test(nonfinite_weights_are_named),
        cmocka_unit_test(invalid_bytes_are_refused),
        cmocka_unit_test(weights_of_every_dtype),
        cmocka_unit_test(nonfinite_values_are_refused),
        cmocka_unit_test(spec_text),
        cmocka_unit_test(absurd_shapes_are_refused),
        cmocka_unit_test(allocation_failures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
