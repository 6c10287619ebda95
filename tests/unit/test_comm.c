/*
 * Ranks (base/comm.h) and sums over ranks (calib/sums.c), without MPI: every rank is a thread. The
 * bytes of a sum must not depend on the number of ranks, and an error of one rank must reach all.
 */
#include "backend_fixture.h"
#include "fixture.h"
#include "ranks_fixture.h"

#include "calib/calib.h"
#include "pack/run.h"

/* ---- sharing -------------------------------------------------------------------------------- */

static void items_are_shared_in_order(void **state)
{
    (void)state;
    for (size_t n = 0; n < 20; n++)
        for (size_t size = 1; size <= MAX_RANKS; size++) {
            size_t at = 0, first;
            for (size_t rank = 0; rank < size; rank++) {
                const size_t end = qt_comm_share(&first, n, rank, size);
                assert_int_equal(first, at);
                assert_in_range(end - first, n / size, qt_ceil_div(n, size));
                at = end;
            }
            assert_int_equal(at, n);
        }
}

static void costs_are_balanced(void **state)
{
    const double cost[] = {5, 1, 4, 2, 3}; /* 0 takes 5, 2, 1; 1 takes 4, 3 */
    const size_t expected[] = {0, 0, 1, 0, 1};
    size_t owner[5];
    struct qt_err err;
    (void)state;
    expect_ok("assign", qt_comm_assign(owner, cost, 5, 2, &err), &err);
    assert_memory_equal(owner, expected, sizeof owner);
}

/* q, k and v of 640, 128 and 200 rows in units of 128: 5 + 1 + 2 units. The matrix in the middle is
 * not divided if its unit is 0; then 5 + 2 units are. */
static void rows_are_divided(void **state)
{
    const size_t rows[] = {640, 128, 200}, unit[] = {128, 128, 128}, whole[] = {128, 0, 128};
    const size_t three[] = {384, 640, 640, 0, 128, 128, 0, 0, 200},
                 apart[] = {384, 640, 640, 128, 128, 128, 0, 0, 200},
                 two[] = {512, 640, 0, 128, 0, 200};
    size_t end[9];
    struct qt_err err;
    (void)state;
    expect_ok("divide", qt_run_divide(end, rows, unit, 3, 3, &err), &err);
    assert_memory_equal(end, three, sizeof three);
    expect_ok("divide", qt_run_divide(end, rows, whole, 3, 3, &err), &err);
    assert_memory_equal(end, apart, sizeof apart);
    expect_ok("divide", qt_run_divide(end, rows, unit, 3, 2, &err), &err);
    assert_memory_equal(end, two, sizeof two);
    assert_int_equal(qt_run_first_rank(end), 0);
    assert_int_equal(qt_run_first_rank(end + 2), 1);
}

/* ---- meeting -------------------------------------------------------------------------------- */

struct failures {
    bool fails[MAX_RANKS];
    bool broadcasts; /* the ranks that do not fail are already at the next broadcast */
};

static int fail_some(struct qt_comm *c, void *ctx, struct qt_err *err)
{
    const struct failures *f = ctx;
    char data[8] = "";
    if (f->fails[c->rank])
        return qt_comm_meet(
            c, qt_fail(err, QT_E_RESOURCE, "a file", "a tensor", "disk %zu is full", c->rank), err);
    return f->broadcasts ? qt_comm_broadcast(c, data, sizeof data, 0, err)
                         : qt_comm_meet(c, QT_OK, err);
}

static void an_error_reaches_all_ranks(void **state)
{
    struct world w;
    struct failures f = {.fails = {[1] = true, [2] = true}};
    (void)state;
    for (int broadcasts = 0; broadcasts < 2; broadcasts++) {
        f.broadcasts = broadcasts;
        run_world(&w, 4, fail_some, &f);
        for (size_t i = 0; i < w.size; i++) {
            expect_error("one", ranks[i].rc, QT_E_RESOURCE,
                         "a file: tensor a tensor: rank 1: disk 1 is full", &ranks[i].err);
            assert_true(ranks[i].comm.over);
        }
        assert_int_equal(w.moves, 2); /* statuses, the error; not the data */
    }
    f = (struct failures){0};
    run_world(&w, 4, fail_some, &f);
    for (size_t i = 0; i < w.size; i++) {
        expect_ok("none", ranks[i].rc, &ranks[i].err);
        assert_false(ranks[i].comm.over);
    }
}

static void an_error_of_all_ranks_names_none(void **state)
{
    struct world w;
    struct failures f = {.fails = {true, true, true}};
    (void)state;
    run_world(&w, 3, fail_some, &f);
    for (size_t i = 0; i < w.size; i++) {
        expect_error("all", ranks[i].rc, QT_E_RESOURCE, "disk 0 is full", &ranks[i].err);
        assert_null(strstr(ranks[i].err.reason, "rank"));
    }
}

/* After a failure that all ranks know, nothing moves: cleaning up cannot hang. */
static int meet_again(struct qt_comm *c, void *ctx, struct qt_err *err)
{
    struct qt_err later;
    int rc = fail_some(c, ctx, err);
    if (c->rank == 0 && qt_comm_meet(c, QT_E_INPUT, &later) != QT_E_INPUT)
        return QT_E_INTERNAL;
    return rc;
}

static void nothing_moves_after_an_error(void **state)
{
    struct world w;
    struct failures f = {.fails = {[1] = true}};
    (void)state;
    run_world(&w, 2, meet_again, &f);
    for (size_t i = 0; i < w.size; i++)
        expect_error("over", ranks[i].rc, QT_E_RESOURCE, "rank 1: disk 1 is full", &ranks[i].err);
    assert_int_equal(w.moves, 2);
}

/* Rank r has r letters. */
static int collect(struct qt_comm *c, void *ctx, struct qt_err *err)
{
    const size_t size = qt_comm_size(c), rank = qt_comm_rank(c);
    char *all = NULL, mine[MAX_RANKS], expected[64] = "";
    size_t sizes[MAX_RANKS], gathered[MAX_RANKS], at = 0;
    uint64_t word = rank == size - 1 ? 0x0123456789abcdef : 0;
    int rc;
    (void)ctx;
    memset(mine, 'a' + (int)rank, sizeof mine);
    QT_TRY(qt_comm_broadcast(c, &word, sizeof word, size - 1, err));
    QT_TRY(qt_comm_gather(c, gathered, &rank, sizeof rank, err));
    QT_TRY(qt_comm_collect(c, &all, sizes, mine, rank, err));
    for (size_t i = 0; i < size; i++) {
        for (size_t k = 0; k < i; k++)
            expected[at++] = (char)('a' + (int)i);
        if (sizes[i] != i || gathered[i] != i)
            rc = qt_fail(err, QT_E_INTERNAL, NULL, NULL, "rank %zu is wrong", i);
    }
    if (strcmp(all, expected) != 0 || word != 0x0123456789abcdef)
        rc = qt_fail(err, QT_E_INTERNAL, NULL, NULL, "'%s', expected '%s'", all, expected);
done:
    qt_free(all);
    return rc;
}

static void data_of_all_ranks_is_collected(void **state)
{
    struct world w;
    struct qt_err err;
    (void)state;
    expect_ok("alone", collect(NULL, NULL, &err), &err);
    for (size_t size = 1; size <= 4; size++) {
        run_world(&w, size, collect, NULL);
        for (size_t i = 0; i < size; i++)
            expect_ok("collect", ranks[i].rc, &ranks[i].err);
    }
}

/* ---- sums ----------------------------------------------------------------------------------- */

enum { SIDE = 300, FLOATS = 40001, DOUBLES = 5 };

struct totals {
    double triangle[SIDE * SIDE];
    float floats[FLOATS];
    double doubles[DOUBLES];
};

/* ctx of qt_sums: which blocks were added, and where it fails. */
struct blocks {
    struct qt_backend *be;
    size_t count;
    size_t added[QT_SUM_BLOCKS]; /* a block belongs to one rank */
    size_t fails;                /* block; QT_SUM_BLOCKS: none */
    struct totals *result;       /* [ranks] */
};

/* Of very different magnitudes, so that every order of additions gives other bits. */
static double value(size_t block, size_t array, size_t i)
{
    uint64_t x = (block * 3 + array + 1) * 0x9e3779b97f4a7c15 + i * 0xbf58476d1ce4e5b9;
    x ^= x >> 31;
    x *= 0x94d049bb133111eb;
    x ^= x >> 29;
    return ldexp((double)(x >> 11) / 9007199254740992.0 - 0.5, (int)(x % 23));
}

static int add_block(void *ctx, size_t block, void *const *into, struct qt_err *err)
{
    struct blocks *b = ctx;
    b->added[block]++;
    if (block == b->fails)
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "block %zu does not fit", block);
    for (size_t row = 0; row < SIDE; row++)
        for (size_t i = 0; i <= row; i++)
            ((double *)into[0])[row * SIDE + i] += value(block, 0, row * SIDE + i);
    for (size_t i = 0; i < FLOATS; i++)
        ((float *)into[1])[i] += (float)value(block, 1, i);
    for (size_t i = 0; i < DOUBLES; i++)
        ((double *)into[2])[i] += value(block, 2, i);
    return QT_OK;
}

static int add_up(struct qt_comm *c, void *ctx, struct qt_err *err)
{
    struct blocks *b = ctx;
    struct totals *t = &b->result[qt_comm_rank(c)];
    struct qt_sums_memory memory = {0};
    struct qt_sums s = {.be = b->be,
                        .comm = c,
                        .memory = &memory,
                        .blocks = b->count,
                        .count = 3,
                        .sum = {{t->triangle, SIDE * SIDE, SIDE, true},
                                {t->floats, FLOATS, 0, false},
                                {t->doubles, DOUBLES, 0, true}},
                        .block = add_block,
                        .ctx = b};
    memset(t, 0, sizeof *t);
    int rc = qt_sums_run(&s, err);
    qt_free(memory.p);
    return rc;
}

static struct blocks blocks_new(size_t count)
{
    struct blocks b = {.be = open_cpu(), .count = count, .fails = QT_SUM_BLOCKS};
    assert_int_equal(qt_array_new(&b.result, MAX_RANKS + 1, sizeof *b.result, NULL), QT_OK);
    return b;
}

static void blocks_free(struct blocks *b)
{
    b->be->close(b->be);
    qt_free(b->result);
}

static void expect_same(const struct totals *a, const struct totals *b)
{
    for (size_t row = 0; row < SIDE; row++) /* the upper triangle is not added */
        assert_memory_equal(a->triangle + row * SIDE, b->triangle + row * SIDE,
                            (row + 1) * sizeof *a->triangle);
    assert_memory_equal(a->floats, b->floats, sizeof a->floats);
    assert_memory_equal(a->doubles, b->doubles, sizeof a->doubles);
}

static void sums_do_not_depend_on_ranks(void **state)
{
    static const size_t counts[] = {1, 3, 8}, sizes[] = {1, 2, 3, 5, 8, 9};
    (void)state;
    for (size_t k = 0; k < sizeof counts / sizeof *counts; k++) {
        struct blocks b = blocks_new(counts[k]);
        struct totals *alone = &b.result[MAX_RANKS];
        struct world w;
        struct qt_err err;
        expect_ok("alone", add_up(NULL, &b, &err), &err);
        *alone = b.result[0];
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            memset(b.added, 0, sizeof b.added);
            run_world(&w, sizes[i], add_up, &b);
            for (size_t rank = 0; rank < sizes[i]; rank++) {
                expect_ok("sum", ranks[rank].rc, &ranks[rank].err);
                expect_same(&b.result[rank], alone);
            }
            for (size_t block = 0; block < counts[k]; block++)
                assert_int_equal(b.added[block], 1);
        }
        blocks_free(&b);
    }
}

/* A backend apart from the host, with memory for so many arrays. */
static size_t room;

static int alloc_some(struct qt_backend *be, void *out, size_t bytes, struct qt_err *err)
{
    char *p;
    if (room == 0)
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "no memory");
    int rc = qt_array_new(&p, bytes, 1, err);
    (void)be;
    room -= rc == QT_OK;
    memcpy(out, &p, sizeof p);
    return rc;
}

static void free_some(struct qt_backend *be, void *p)
{
    (void)be;
    room += p != NULL;
    qt_free(p);
}

/* 3 arrays each. A sum of 8 blocks has up to 3 copies, and each has to fit twice. */
static void sums_wait_in_host_memory(void **state)
{
    static const size_t rooms[] = {100, 12, 8, 5, 1};
    struct blocks b = blocks_new(8);
    struct totals *first = &b.result[MAX_RANKS];
    struct qt_backend *cpu = b.be, apart = *cpu;
    struct qt_err err;
    (void)state;
    apart.host = false;
    apart.alloc = alloc_some;
    apart.free = free_some;
    b.be = &apart;
    for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++) {
        room = rooms[i];
        expect_ok("sum", add_up(NULL, &b, &err), &err);
        assert_int_equal(room, rooms[i]);
        if (i == 0)
            *first = b.result[0];
        expect_same(&b.result[0], first);
    }
    room = 0;
    expect_error("sum", add_up(NULL, &b, &err), QT_E_RESOURCE, "no memory", &err);
    b.be = cpu;
    blocks_free(&b);
}

static void a_sum_fails_in_all_ranks(void **state)
{
    struct blocks b = blocks_new(8);
    struct world w;
    (void)state;
    b.fails = 5; /* rank 1 of 3 has blocks 3 to 5 */
    run_world(&w, 3, add_up, &b);
    for (size_t rank = 0; rank < 3; rank++)
        expect_error("sum", ranks[rank].rc, QT_E_RESOURCE, "rank 1: block 5 does not fit",
                     &ranks[rank].err);
    blocks_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(items_are_shared_in_order),
        cmocka_unit_test(costs_are_balanced),
        cmocka_unit_test(rows_are_divided),
        cmocka_unit_test(an_error_reaches_all_ranks),
        cmocka_unit_test(an_error_of_all_ranks_names_none),
        cmocka_unit_test(nothing_moves_after_an_error),
        cmocka_unit_test(data_of_all_ranks_is_collected),
        cmocka_unit_test(sums_do_not_depend_on_ranks),
        cmocka_unit_test(sums_wait_in_host_memory),
        cmocka_unit_test(a_sum_fails_in_all_ranks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
