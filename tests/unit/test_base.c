/* base: number formats, checked sizes, errors, parallel loops, files. */
#include "tests/unit/fixture.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

/* ---- numbers -------------------------------------------------------------------------------- */

/* The definition of FP16, in double. */
static double f16_value(unsigned h)
{
    int exponent = h >> 10 & 31, mantissa = h & 1023;
    double mag = exponent == 31  ? (mantissa ? NAN : INFINITY)
                 : exponent == 0 ? ldexp(mantissa, -24)
                                 : ldexp(1024 + mantissa, exponent - 25);
    return h & 0x8000 ? -mag : mag;
}

static void test_f16_all(void **state)
{
    (void)state;
    for (unsigned h = 0; h < 65536; h++) {
        double expected = f16_value(h);
        float f = qt_f16_to_f32((uint16_t)h);
        if (isnan(expected)) {
            assert_true(isnan(f));
            assert_int_equal(qt_f32_to_f16(f) & 0x7fff, 0x7e00);
            assert_int_equal(qt_f32_to_f16(f) & 0x8000, h & 0x8000);
            continue;
        }
        assert_true((double)f == expected);
        assert_int_equal(signbit(f) != 0, h >> 15);
        assert_int_equal(qt_f32_to_f16(f), h);
    }
}

/* Nearest FP16 value by bisection over the codes, ties to the even code; 65536 stands for the value
 * that would follow the largest. */
static unsigned f16_slow(float f)
{
    double mag = fabs((double)f);
    unsigned sign = signbit(f) ? 0x8000 : 0, low = 0, high = 0x7c00;
    if (mag >= 65536)
        return sign | 0x7c00;
    while (high - low > 1) {
        unsigned mid = (low + high) / 2;
        if (f16_value(mid) <= mag)
            low = mid;
        else
            high = mid;
    }
    double below = mag - f16_value(low), next = high == 0x7c00 ? 65536 : f16_value(high);
    double above = next - mag;
    bool up = above < below || (above == below && low % 2 == 1);
    return sign | (up ? high : low);
}

static void expect_f16(float f)
{
    if (qt_f32_to_f16(f) != f16_slow(f))
        fail_msg("%a: %04x, expected %04x", (double)f, qt_f32_to_f16(f), f16_slow(f));
}

static uint64_t next_random(uint64_t *s)
{
    *s = *s * 6364136223846793005u + 1442695040888963407u;
    return *s >> 32;
}

static void test_f16_rounding(void **state)
{
    (void)state;
    uint64_t seed = 1;
    /* Every midpoint of two neighbors, and the floats next to it. */
    for (unsigned h = 0; h < 0x7c00; h++) {
        double next = h + 1 == 0x7c00 ? 65536 : f16_value(h + 1);
        float tie = (float)((f16_value(h) + next) / 2);
        const float around[] = {tie, nextafterf(tie, 0), nextafterf(tie, INFINITY)};
        for (int i = 0; i < 3; i++) {
            expect_f16(around[i]);
            expect_f16(-around[i]);
        }
    }
    for (int i = 0; i < 1000000; i++) {
        uint32_t u = (uint32_t)next_random(&seed);
        if (i % 2) /* scale into the range of FP16 */
            u = (u & 0x807fffff) | (95 + u % 50) << 23;
        float f = qt_bits_f32(u);
        if (!isnan(f))
            expect_f16(f);
    }
    expect_f16(INFINITY);
    expect_f16(-INFINITY);
    expect_f16(qt_bits_f32(1));
    expect_f16(qt_bits_f32(0x7f7fffff));
}

static void test_bf16(void **state)
{
    (void)state;
    uint64_t seed = 2;
    for (unsigned h = 0; h < 65536; h++) {
        float f = qt_bf16_to_f32((uint16_t)h);
        assert_int_equal(qt_f32_bits(f), h << 16);
        if (isnan(f))
            assert_true(isnan(qt_bf16_to_f32(qt_f32_to_bf16(f))));
        else
            assert_int_equal(qt_f32_to_bf16(f), h);
    }
    for (int i = 0; i < 1000000; i++) {
        uint32_t u = (uint32_t)next_random(&seed);
        if (i % 4 == 0)
            u = (u & 0xffff0000) | 0x8000; /* ties */
        float f = qt_bits_f32(u);
        if (isnan(f)) {
            assert_true(isnan(qt_bf16_to_f32(qt_f32_to_bf16(f))));
            continue;
        }
        /* Magnitude bits are ordered like integers: round them as integers. */
        uint32_t low = u >> 16, rest = u & 0xffff;
        uint32_t expected = low + (rest > 0x8000 || (rest == 0x8000 && low % 2 == 1));
        assert_int_equal(qt_f32_to_bf16(f), expected);
    }
}

static void test_to_f32(void **state)
{
    (void)state;
    enum { N = 1500 }; /* more than a chunk of the conversion */
    static unsigned char bytes[N * 8 + 1];
    static float out[N];
    for (int i = 0; i < N; i++) {
        double d = 1 + i * 0x1p-30;
        memcpy(bytes + 1 + 8 * i, &d, 8);
    }
    qt_to_f32(out, bytes + 1, QT_F64, N);
    for (int i = 0; i < N; i++)
        assert_true(out[i] == (float)(1 + i * 0x1p-30));
    for (int i = 0; i < N; i++) {
        uint16_t h = (uint16_t)(i * 17);
        memcpy(bytes + 1 + 2 * i, &h, 2);
    }
    qt_to_f32(out, bytes + 1, QT_F16, N);
    for (int i = 0; i < N; i++)
        assert_true(out[i] == qt_f16_to_f32((uint16_t)(i * 17)));
    qt_to_f32(out, bytes + 1, QT_BF16, N);
    for (int i = 0; i < N; i++)
        assert_true(out[i] == qt_bf16_to_f32((uint16_t)(i * 17)));
    for (int i = 0; i < N; i++)
        out[i] = (float)i;
    memcpy(bytes + 1, out, sizeof out);
    memset(out, 0, sizeof out);
    qt_to_f32(out, bytes + 1, QT_F32, N);
    for (int i = 0; i < N; i++)
        assert_true(out[i] == (float)i);
}

/* More than one parallel item. */
static void test_many(void **state)
{
    enum { N = (1 << 19) + 77, AT = (1 << 18) + 5, BYTES = (9 << 20) + 3 };
    uint16_t *h = malloc(N * sizeof *h);
    float *x = malloc(N * sizeof *x);
    unsigned char *bytes = malloc(BYTES);
    uint32_t crc = 7;
    (void)state;
    for (size_t i = 0; i < N; i++)
        h[i] = (uint16_t)(i * 31 % 0x7c00);
    qt_to_f32(x, h, QT_F16, N);
    for (size_t i = 0; i < N; i++)
        assert_true(x[i] == qt_f16_to_f32(h[i]));
    assert_int_equal(qt_find_nonfinite(x, N), N);
    x[N - 1] = x[AT] = x[AT + 1] = NAN;
    assert_int_equal(qt_find_nonfinite(x, N), AT);
    assert_int_equal(qt_find_nonfinite(x, AT), AT);
    for (size_t i = 0; i < BYTES; i++)
        bytes[i] = (unsigned char)(i * i >> 7);
    for (size_t i = 0; i < BYTES; i += 1 << 20)
        crc = qt_crc32(crc, bytes + i, BYTES - i < 1 << 20 ? BYTES - i : 1 << 20);
    assert_int_equal(qt_crc32(7, bytes, BYTES), crc);
    free(h);
    free(x);
    free(bytes);
}

/* Every dtype, at every alignment, with and without threads. */
static void test_count_nonfinite(void **state)
{
    static const struct {
        enum qt_dtype dtype;
        uint64_t bad[3], good[3];
    } cases[] = {
        {QT_F16, {0x7c00, 0xfc00, 0x7e01}, {0x7bff, 0xfbff, 0x0001}},
        {QT_BF16, {0x7f80, 0xff80, 0xffff}, {0x7f7f, 0x8000, 0x0001}},
        {QT_F32, {0x7f800000, 0xff800000, 0x7f800001}, {0x7f7fffff, 0x80000000, 1}},
        {QT_F64,
         {0x7ff0000000000000, 0xfff0000000000000, 0xffffffffffffffff},
         {0x7fefffffffffffff, 0x8000000000000000, 1}},
        {QT_F8_E5M2, {0x7c, 0xfc, 0x7f}, {0x7b, 0x80, 1}},
        {QT_F8_E4M3, {0x7f, 0xff, 0x7f}, {0x7e, 0x80, 0xfe}},
        {QT_F8_E8M0, {0xff, 0xff, 0xff}, {0x7f, 0x80, 0xfe}},
        {QT_F8_E4M3FNUZ, {0x80, 0x80, 0x80}, {0x7f, 0xff, 0}},
        {QT_I32, {0}, {0x7f800000, 0xffffffff, 0}},
        {QT_BOOL, {0}, {0xff, 0x7f, 0x80}},
    };
    enum { N = 600001 };
    unsigned char *data = malloc(8 * N + 8);
    (void)state;
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const size_t size = qt_dtype_bits(cases[c].dtype) / 8;
        const bool any = cases[c].bad[0] != 0;
        for (size_t n = 7; n <= N; n += N - 7) {
            unsigned char *x = data + c % 8;
            for (size_t i = 0; i < n; i++)
                memcpy(x + i * size, &cases[c].good[i % 3], size);
            assert_int_equal(qt_count_nonfinite(x, cases[c].dtype, n), 0);
            for (size_t i = 0; i < 3 && any; i++) /* little-endian */
                memcpy(x + i * (n - 1) / 2 * size, &cases[c].bad[i], size);
            assert_int_equal(qt_count_nonfinite(x, cases[c].dtype, n), any ? 3 : 0);
            assert_int_equal(qt_count_nonfinite(x, cases[c].dtype, 0), 0);
        }
    }
    const float c64[4] = {1, INFINITY, 2, 3};
    assert_int_equal(qt_count_nonfinite(c64, QT_C64, 2), 1);
    free(data);
}

static void test_find_nonfinite(void **state)
{
    (void)state;
    static float x[1000];
    const float bad[] = {INFINITY, -INFINITY, NAN, qt_bits_f32(0xffffffff)};
    for (size_t i = 0; i < 1000; i++)
        x[i] = 3.4e38f;
    assert_int_equal(qt_find_nonfinite(x, 1000), 1000);
    assert_int_equal(qt_find_nonfinite(x, 0), 0);
    for (size_t at = 0; at < 1000; at++) {
        x[at] = bad[at % 4];
        x[999] = NAN;
        assert_int_equal(qt_find_nonfinite(x, 1000), at);
        assert_int_equal(qt_find_nonfinite(x, at), at);
        x[at] = x[999] = 0;
    }
}

static void test_dtypes(void **state)
{
    (void)state;
    enum qt_dtype t = QT_BOOL;
    for (int i = 0; i < QT_DTYPE_COUNT; i++) {
        assert_true(qt_dtype_parse(&t, qt_dtype_name((enum qt_dtype)i)));
        assert_int_equal(t, i);
        assert_true(qt_dtype_bits(t) >= 4 && qt_dtype_bits(t) <= 64);
    }
    assert_false(qt_dtype_parse(&t, "F15"));
    assert_false(qt_dtype_parse(&t, ""));
    assert_string_equal(qt_dtype_name(QT_DTYPE_COUNT), "?");
    assert_int_equal(qt_dtype_bits(QT_DTYPE_COUNT), 0);
    assert_true(qt_dtype_is_weight(QT_BF16));
    assert_false(qt_dtype_is_weight(QT_I8));
}

/* ---- memory --------------------------------------------------------------------------------- */

static void test_sizes(void **state)
{
    (void)state;
    size_t n = 7;
    assert_true(qt_mul_overflow(&n, SIZE_MAX / 2 + 1, 2));
    assert_false(qt_mul_overflow(&n, SIZE_MAX / 2, 2));
    assert_int_equal(n, SIZE_MAX - 1);
    assert_true(qt_add_overflow(&n, SIZE_MAX, 1));
    assert_false(qt_add_overflow(&n, SIZE_MAX - 1, 1));
    assert_int_equal(n, SIZE_MAX);
    assert_int_equal(qt_ceil_div(0, 8), 0);
    assert_int_equal(qt_ceil_div(8, 8), 1);
    assert_int_equal(qt_ceil_div(9, 8), 2);
    assert_int_equal(qt_ceil_div(SIZE_MAX, 2), SIZE_MAX / 2 + 1);
    assert_int_equal(qt_round_up(9, 8), 16);
    assert_int_equal(qt_min_size(3, 4), 3);
}

static void test_arrays(void **state)
{
    (void)state;
    struct qt_err err = {0};
    unsigned char *p;
    expect_ok("none", qt_array_new(&p, 0, 8, &err), &err);
    assert_non_null(p);
    qt_free(p);
    expect_ok("odd", qt_array_new(&p, 13, 7, &err), &err);
    assert_int_equal((uintptr_t)p % 64, 0);
    for (int i = 0; i < 91; i++)
        assert_int_equal(p[i], 0);
    qt_free(p);
    p = (unsigned char *)&err;
    expect_error("overflow", qt_array_new(&p, SIZE_MAX / 4, 8, &err), QT_E_RESOURCE,
                 "out of memory", &err);
    assert_null(p);
    expect_error("rounding", qt_array_new(&p, SIZE_MAX, 1, &err), QT_E_RESOURCE, "out of memory",
                 &err);

    uint32_t *grown = NULL;
    size_t room = 0;
    for (uint32_t i = 0; i < 1000; i++) {
        expect_ok("grow", qt_array_grow(&grown, &room, i + 1, sizeof *grown, &err), &err);
        assert_true(room > i);
        grown[i] = i;
    }
    for (uint32_t i = 0; i < 1000; i++)
        assert_int_equal(grown[i], i);
    size_t before = room;
    expect_error("grow too far", qt_array_grow(&grown, &room, SIZE_MAX / 2, sizeof *grown, &err),
                 QT_E_RESOURCE, "out of memory", &err);
    assert_int_equal(room, before);
    assert_int_equal(grown[999], 999);
    qt_free(grown);
    qt_free(NULL);
}

static void test_fail_after(void **state)
{
    (void)state;
    char *s = NULL;
    qt_mem_fail_after(2);
    void *a = qt_malloc(1), *b = qt_malloc(1), *c = qt_malloc(1);
    int rc = qt_string_copy(&s, "x", NULL);
    qt_mem_fail_after(-1);
    assert_non_null(a);
    assert_non_null(b);
    assert_null(c);
    assert_null(s);
    assert_int_equal(rc, QT_E_RESOURCE);
    assert_int_equal(qt_string_format(&s, NULL, "%d-%s", 12, "x"), QT_OK);
    assert_string_equal(s, "12-x");
    qt_free(a);
    qt_free(b);
    qt_free(s);
}

/* ---- errors --------------------------------------------------------------------------------- */

static void test_errors(void **state)
{
    (void)state;
    struct qt_err err = {0};
    char text[64], name[2000];
    assert_int_equal(qt_fail(&err, QT_E_INPUT, "dir/file", "a.b", "n is %d", 5), QT_E_INPUT);
    assert_int_equal(err.status, QT_E_INPUT);
    qt_err_format(text, sizeof text, &err);
    assert_string_equal(text, "dir/file: tensor a.b: n is 5");
    qt_fail(&err, QT_E_USAGE, NULL, NULL, "plain");
    qt_err_format(text, sizeof text, &err);
    assert_string_equal(text, "plain");
    qt_fail(&err, QT_E_USAGE, NULL, "t", "plain");
    qt_err_format(text, sizeof text, &err);
    assert_string_equal(text, "tensor t: plain");
    qt_fail(&err, QT_E_INPUT, "f\x1b[2J", "a\nb", "c\x7f\td");
    qt_err_format(text, sizeof text, &err);
    assert_string_equal(text, "f?[2J: tensor a?b: c??d");
    qt_fail(&err, QT_E_INPUT, NULL, NULL,
            "\xc2\x9b"
            "2J, but \u00a0\u0440");
    qt_err_format(text, sizeof text, &err);
    assert_string_equal(text, "??2J, but \u00a0\u0440");
    qt_fail(&err, QT_E_INPUT, NULL, NULL, "%.2s, %.3s, \xff\u00e9\xe0\x80\x80\U0001f600", "a\u00e9",
            "\u20ac");
    assert_string_equal(err.reason, "a?, \u20ac, ?\u00e9???\U0001f600");
    memset(name, 'x', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    qt_fail(&err, QT_E_INPUT, name, name, "%s", name);
    assert_int_equal(strlen(err.file), sizeof err.file - 1);
    assert_int_equal(strlen(err.tensor), sizeof err.tensor - 1);
    assert_int_equal(strlen(err.reason), sizeof err.reason - 1);
    qt_err_format(text, sizeof text, &err);
    assert_int_equal(strlen(text), sizeof text - 1);
    for (size_t i = 0; i < sizeof name - 1; i++)
        name[i] = "\u20ac"[i % 3];
    qt_fail(&err, QT_E_INPUT, name, name, "%s", name);
    qt_err_format(text, sizeof text, &err);
    const char *const cut[] = {err.file, err.tensor, err.reason, text};
    for (size_t i = 0; i < sizeof cut / sizeof *cut; i++)
        assert_int_equal(strlen(cut[i]) % 3, 0);
    assert_int_equal(qt_fail(NULL, QT_E_GATE, "f", "t", "x"), QT_E_GATE);
}

static void test_exit_codes(void **state)
{
    (void)state;
    static const int expected[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 75};
    for (int i = 0; i < 10; i++)
        assert_int_equal(qt_exit_code((enum qt_status) - i), expected[i]);
}

/* ---- parallel loops ------------------------------------------------------------------------- */

enum { ITEMS = 1000 };

struct work {
    size_t fail_at, fail_also;
    unsigned char runs[ITEMS];
    bool bad_thread;
};

static int work_item(void *ctx, size_t item, int thread, struct qt_err *err)
{
    struct work *w = ctx;
    w->runs[item]++;
    if (thread < 0 || thread >= qt_threads())
        w->bad_thread = true;
    if (item == w->fail_at || item == w->fail_also)
        return qt_fail(err, QT_E_INPUT, NULL, NULL, "item %zu", item);
    return QT_OK;
}

static void *return_nothing(void *ctx)
{
    (void)ctx;
    return NULL;
}

enum { NO_LIMIT = 2 };

/* Runs in a process that may not start threads. */
static int parallel_without_threads(void)
{
    const struct rlimit none = {1, 1};
    struct work w = {.fail_at = ITEMS, .fail_also = ITEMS};
    pthread_t thread;
    if ((geteuid() == 0 && setuid(65534) < 0) || setrlimit(RLIMIT_NPROC, &none) < 0 ||
        pthread_create(&thread, NULL, return_nothing, NULL) == 0)
        return NO_LIMIT;
    qt_threads_set(8);
    return qt_threads() == 1 && qt_parallel(ITEMS, work_item, &w, NULL) == QT_OK ? 0 : 1;
}

static void test_no_threads(void **state)
{
    int status;
    pid_t child = fork();
    (void)state;
    if (child == 0)
        _exit(parallel_without_threads());
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == NO_LIMIT) {
        print_message("SKIP: there is no limit on threads here\n");
        skip();
    }
    assert_int_equal(WEXITSTATUS(status), 0);
}

static void test_parallel(void **state)
{
    (void)state;
    for (int threads = 1; threads <= 4; threads++) {
        struct work w = {.fail_at = ITEMS, .fail_also = ITEMS};
        struct qt_err err = {0};
        qt_threads_set(threads);
        assert_int_equal(qt_threads(), threads);
        expect_ok("all", qt_parallel(ITEMS, work_item, &w, &err), &err);
        for (size_t i = 0; i < ITEMS; i++)
            assert_int_equal(w.runs[i], 1);
        assert_false(w.bad_thread);
        assert_int_equal(qt_parallel(0, work_item, &w, &err), QT_OK);

        w = (struct work){.fail_at = 100, .fail_also = 101};
        int rc = qt_parallel(ITEMS, work_item, &w, &err);
        expect_error("failure", rc, QT_E_INPUT, w.runs[100] ? "item 100" : "item 101", &err);
        if (threads == 1) /* other threads may continue until the failure is recorded */
            assert_int_equal(w.runs[101], 0);
        for (size_t i = 0; i < ITEMS; i++)
            assert_true(w.runs[i] <= 1);
        w = (struct work){.fail_at = 5, .fail_also = 5};
        assert_int_equal(qt_parallel(ITEMS, work_item, &w, NULL), QT_E_INPUT);
    }
    qt_threads_set(0);
    assert_true(qt_threads() >= 1);
}

struct turn {
    atomic_bool begun, over; /* item 0, item 1 */
};

/* Item 0 fails after item 1 if there is a second thread. */
static int fail_in_turn(void *ctx, size_t item, int thread, struct qt_err *err)
{
    struct turn *turn = ctx;
    (void)thread;
    if (item == 0)
        atomic_store(&turn->begun, true);
    for (int i = 0; i < 500 && !atomic_load(item ? &turn->begun : &turn->over); i++)
        usleep(1000);
    if (item == 1)
        atomic_store(&turn->over, true);
    else
        usleep(20000); /* until the error of item 1 is recorded */
    return qt_fail(err, QT_E_INPUT, NULL, NULL, "item %zu", item);
}

/* Of several errors, the one of the lowest item is returned, not the first or last in time. */
static void test_parallel_errors(void **state)
{
    struct turn turn = {false, false};
    struct qt_err err = {0};
    (void)state;
    qt_threads_set(2);
    expect_error("in turn", qt_parallel(2, fail_in_turn, &turn, &err), QT_E_INPUT, "item 0", &err);
    qt_threads_set(0);
}

/* A thread that starts late still gets its call, and no other thread gets two. */
static int once(void *ctx, int thread, struct qt_err *err)
{
    atomic_int *calls = ctx;
    if (thread % 2 == 0)
        usleep(2000);
    atomic_fetch_add(&calls[thread], 1);
    return thread >= 3 ? qt_fail(err, QT_E_INPUT, NULL, NULL, "thread %d", thread) : QT_OK;
}

static void test_per_thread(void **state)
{
    (void)state;
    for (int threads = 1; threads <= 9; threads += 2) {
        atomic_int calls[9] = {0};
        struct qt_err err = {0};
        qt_threads_set(threads);
        const int rc = qt_per_thread(once, calls, &err);
        for (int i = 0; i < threads; i++)
            assert_int_equal(calls[i], 1);
        expect_error("once", rc, threads > 3 ? QT_E_INPUT : QT_OK, "thread 3", &err);
    }
    qt_threads_set(0);
}

static int stop_at_9(void *ctx, size_t item, int thread, struct qt_err *err)
{
    size_t *items = ctx;
    (void)thread;
    (void)err;
    ++*items;
    if (item == 9)
        qt_stop_request();
    return QT_OK;
}

static void count_item(void *ctx, size_t item)
{
    atomic_size_t *items = ctx;
    (void)item;
    atomic_fetch_add(items, 1);
}

/* After a request no item of a loop that can fail starts, and long checksums end. */
static void test_stop(void **state)
{
    size_t items = 0;
    atomic_size_t others = 0;
    uint32_t crc;
    struct qt_err err = {0};
    (void)state;
    qt_threads_set(1);
    assert_false(qt_stop_heard());
    expect_ok("before", qt_stop_check(&err), &err);
    expect_error("loop", qt_parallel(100, stop_at_9, &items, &err), QT_E_INTERRUPTED, "interrupted",
                 &err);
    assert_int_equal(items, 10);
    assert_true(qt_stop_heard());
    qt_parallel_for(100, count_item, &others);
    assert_int_equal(others, 100);
    expect_error("crc", qt_crc32_file(&crc, "text", 4, &err), QT_E_INTERRUPTED, "interrupted",
                 &err);
    qt_stop_reset();
    expect_ok("crc", qt_crc32_file(&crc, "123456789", 9, &err), &err);
    assert_int_equal(crc, 0xcbf43926);
    qt_stop_request();
    assert_false(qt_stop_heard());
    assert_true(qt_stop_requested());
    qt_stop_reset();
    qt_threads_set(0);
}

/* ---- files ---------------------------------------------------------------------------------- */

/* A file whose size or time changed after it was mapped, even by a nanosecond, and also if the time
 * was set back, as the time of that change is known. */
static void test_changed(void **state)
{
    static const struct timespec times[] = {{1000, 5}, {1000, 6}, {1001, 5}, {1000, 5}};
    (void)state;
    char *dir = fixture_dir();
    struct qt_err err = {0};
    struct qt_map map;
    const char *path = fixture_write(dir, "f", "text", 4);
    for (size_t i = 0; i < 4; i++) {
        const struct timespec both[2] = {times[i], times[i]};
        assert_int_equal(utimensat(AT_FDCWD, path, both, 0), 0);
        if (i == 0)
            expect_ok("map", qt_map_open(&map, path, &err), &err);
        expect_error("time", qt_map_check_unchanged(&map, path, &err), i == 0 ? QT_OK : QT_E_INPUT,
                     "f: changed while it was being read", &err);
    }
    assert_int_equal(truncate(path, 3), 0);
    assert_int_equal(utimensat(AT_FDCWD, path, (const struct timespec[2]){times[0], times[0]}, 0),
                     0);
    expect_error("size", qt_map_check_unchanged(&map, path, &err), QT_E_INPUT, "f: changed", &err);
    qt_map_close(&map);
    assert_int_equal(unlink(path), 0);
    expect_error("gone", qt_map_check_unchanged(&map, path, &err), QT_E_INPUT, "cannot stat", &err);
    fixture_remove(dir);
}

static void test_reading(void **state)
{
    (void)state;
    struct qt_err err = {0};
    struct qt_map map;
    char *dir = fixture_dir(), *text;
    size_t size;
    const char *fifo = fixture_path(dir, "fifo");
    assert_int_equal(mkfifo(fifo, 0600), 0);
    const struct {
        const char *path, *fragment;
    } refused[] = {
        {fifo, "not a regular file"},
        {dir, "not a regular file"},
        {"/dev/zero", "not a regular file"},
        {"/nonexistent/x", "cannot open: No such file"},
    };
    for (size_t i = 0; i < 4; i++) {
        expect_error(refused[i].path, qt_map_open(&map, refused[i].path, &err), QT_E_INPUT,
                     refused[i].fragment, &err);
        assert_null(map.data);
        expect_error(refused[i].path, qt_file_read(&text, &size, refused[i].path, 100, &err),
                     QT_E_INPUT, refused[i].fragment, &err);
        assert_null(text);
    }
    const char *path = fixture_write(dir, "f", "hello", 5);
    expect_ok("map", qt_map_open(&map, path, &err), &err);
    assert_int_equal(map.size, 5);
    assert_memory_equal(map.data, "hello", 5);
    qt_map_drop(&map, map.data, map.size);
    assert_memory_equal(map.data, "hello", 5);
    qt_map_close(&map);
    assert_null(map.data);
    expect_ok("read", qt_file_read(&text, &size, path, 5, &err), &err);
    assert_string_equal(text, "hello");
    qt_free(text);
    expect_error("limit", qt_file_read(&text, &size, path, 4, &err), QT_E_INPUT,
                 "5 bytes, at most 4", &err);
    path = fixture_write(dir, "empty", "", 0);
    expect_ok("map empty", qt_map_open(&map, path, &err), &err);
    assert_null(map.data);
    qt_map_close(&map);
    expect_ok("read empty", qt_file_read(&text, &size, path, 0, &err), &err);
    assert_string_equal(text, "");
    qt_free(text);
    fixture_remove(dir);
}

/* Dropped pages of anonymous memory read as zeros. */
static void test_drop(void **state)
{
    (void)state;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char *p =
        mmap(NULL, 4 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(p != MAP_FAILED);
    memset(p, 'x', 4 * page);
    const struct qt_map map = {.data = p + page, .size = 2 * page};
    qt_map_drop(&map, p, page);            /* before the map */
    qt_map_drop(&map, p + 3 * page, page); /* after the map */
    qt_map_drop(&map, p + page, 0);
    assert_int_equal(p[page], 'x');
    assert_int_equal(p[2 * page], 'x');
    qt_map_drop(&map, p + 2 * page, SIZE_MAX - page); /* from inside the map to beyond its end */
    assert_int_equal(p[0], 'x');
    assert_int_equal(p[2 * page], 0);
    assert_int_equal(p[3 * page], 'x');
    munmap(p, 4 * page);
}

static void test_names(void **state)
{
    (void)state;
    char longest[300], *joined;
    memset(longest, 'x', 256);
    longest[256] = '\0';
    assert_false(qt_name_is_plain(longest));
    longest[255] = '\0';
    assert_true(qt_name_is_plain(longest));
    static const char *const bad[] = {"",   ".",    "..",   "a/b",      "/a",
                                      "a/", "a\nb", "\x7f", "a\xc2\x85"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_false(qt_name_is_plain(bad[i]));
    assert_true(qt_name_is_plain("..."));
    assert_true(qt_name_is_plain(".hidden"));
    assert_true(qt_name_is_plain("model-00001-of-00002.safetensors"));
    assert_int_equal(qt_path_join(&joined, "dir", "name", NULL), QT_OK);
    assert_string_equal(joined, "dir/name");
    qt_free(joined);
    assert_int_equal(qt_path_join(&joined, "dir/", "name", NULL), QT_OK);
    assert_string_equal(joined, "dir/name");
    qt_free(joined);
}

static void test_writing(void **state)
{
    (void)state;
    struct qt_err err = {0};
    char *dir = fixture_dir(), *text;
    size_t size;
    int fd;
    const char *path = fixture_path(dir, "f"), *other = fixture_path(dir, "g");
    expect_ok("create", qt_file_create(&fd, path, false, &err), &err);
    expect_ok("write", qt_file_write_at(fd, path, "world", 5, 6, &err), &err);
    expect_ok("write", qt_file_write_at(fd, path, "hello ", 6, 0, &err), &err);
    expect_ok("finish", qt_file_finish(&fd, path, &err), &err);
    assert_int_equal(fd, -1);
    expect_ok("keep", qt_file_create(&fd, path, true, &err), &err);
    expect_ok("write", qt_file_write_at(fd, path, "H", 1, 0, &err), &err);
    expect_ok("finish", qt_file_finish(&fd, path, &err), &err);
    expect_ok("rename", qt_path_rename(path, other, &err), &err);
    assert_false(qt_path_exists(path));
    expect_ok("read", qt_file_read(&text, &size, other, 100, &err), &err);
    assert_string_equal(text, "Hello world");
    qt_free(text);
    expect_ok("sync", qt_dir_sync(dir, &err), &err);
    expect_error("rename", qt_path_rename(path, other, &err), QT_E_INPUT, "cannot rename", &err);
    expect_error("create", qt_file_create(&fd, "/nonexistent/x", false, &err), QT_E_RESOURCE,
                 "/nonexistent/x: cannot create", &err);
    assert_int_equal(symlink(other, path), 0);
    expect_error("through a link", qt_file_create(&fd, path, false, &err), QT_E_RESOURCE,
                 "cannot create", &err);
    fixture_remove(dir);
}

/* A full disk, simulated by a limit on the file size. */
static void test_write_error(void **state)
{
    (void)state;
    struct qt_err err = {0};
    struct rlimit old, limit;
    static const char data[8192];
    char *dir = fixture_dir();
    const char *path = fixture_path(dir, "f");
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    limit = old;
    limit.rlim_cur = 4096;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    int rc = qt_file_write(path, data, sizeof data, &err);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    signal(SIGXFSZ, handler);
    expect_error("limit", rc, QT_E_RESOURCE, "cannot write: File too large", &err);
    expect_ok("afterwards", qt_file_write(path, data, sizeof data, &err), &err);
    fixture_remove(dir);
}

static void test_directories(void **state)
{
    (void)state;
    struct qt_err err = {0};
    char *dir = fixture_dir(), sub[300];
    snprintf(sub, sizeof sub, "%s/sub", dir);
    assert_true(qt_path_is_dir(dir));
    expect_ok("make", qt_dir_make(sub, &err), &err);
    expect_ok("make again", qt_dir_make(sub, &err), &err);
    fixture_write(sub, "a", "x", 1);
    fixture_write(sub, "b", "y", 1);
    expect_ok("remove", qt_dir_remove(sub, &err), &err);
    assert_false(qt_path_exists(sub));
    expect_ok("remove absent", qt_dir_remove(sub, &err), &err);
    fixture_write(dir, "sub", "x", 1);
    expect_error("make over a file", qt_dir_make(sub, &err), QT_E_RESOURCE,
                 "cannot create directory", &err);
    assert_false(qt_path_is_dir(sub));
    fixture_remove(dir);
}

static void test_crc(void **state)
{
    (void)state;
    assert_int_equal(qt_crc32(0, "123456789", 9), 0xcbf43926);
    assert_int_equal(qt_crc32(qt_crc32(0, "1234", 4), "56789", 5), 0xcbf43926);
    assert_int_equal(qt_crc32(0, "", 0), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_threads), /* before OpenMP has started any */
        cmocka_unit_test(test_per_thread),
        cmocka_unit_test(test_stop),
        cmocka_unit_test(test_f16_all),
        cmocka_unit_test(test_f16_rounding),
        cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_to_f32),
        cmocka_unit_test(test_find_nonfinite),
        cmocka_unit_test(test_count_nonfinite),
        cmocka_unit_test(test_many),
        cmocka_unit_test(test_dtypes),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_arrays),
        cmocka_unit_test(test_fail_after),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_exit_codes),
        cmocka_unit_test(test_parallel),
        cmocka_unit_test(test_parallel_errors),
        cmocka_unit_test(test_changed),
        cmocka_unit_test(test_reading),
        cmocka_unit_test(test_drop),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_writing),
        cmocka_unit_test(test_write_error),
        cmocka_unit_test(test_directories),
        cmocka_unit_test(test_crc),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
