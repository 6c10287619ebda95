/* The background thread: order, errors, and what becomes of jobs after an error. */
#include "fixture.h"

#include "base/base.h"

#include <stdatomic.h>

enum { JOBS = 40 };

struct log {
    int ran[JOBS], dropped[JOBS];
    size_t nran, ndropped;
    int fails; /* this job; -1: none */
};

struct job {
    struct log *log;
    int number;
};

static int add_all(void *sum, size_t item, int thread, struct qt_err *err)
{
    (void)thread;
    (void)err;
    atomic_fetch_add((atomic_size_t *)sum, item);
    return QT_OK;
}

static int run(void *ctx, struct qt_err *err)
{
    const struct job *j = ctx;
    atomic_size_t sum = 0;
    assert_int_equal(qt_parallel(10, add_all, &sum, err), QT_OK);
    assert_int_equal(sum, 45);
    j->log->ran[j->log->nran++] = j->number;
    return j->number == j->log->fails
               ? qt_fail(err, QT_E_INPUT, "file", NULL, "job %d failed", j->number)
               : QT_OK;
}

static void drop(void *ctx)
{
    struct job *j = ctx;
    j->log->dropped[j->log->ndropped++] = j->number;
}

/* Returns the number of the job that could not be added; JOBS: none. */
static int add_jobs(struct log *log, struct job *jobs, struct qt_behind *b)
{
    for (int i = 0; i < JOBS; i++) {
        struct qt_err err = {0};
        jobs[i] = (struct job){log, i};
        const struct qt_behind_job job = {
            .run = run, .drop = drop, .ctx = &jobs[i], .small = i % 2};
        if (qt_behind_add(b, &job, &err) < 0) {
            assert_string_equal(err.reason, "job 7 failed");
            return i;
        }
    }
    return JOBS;
}

static void jobs_run_in_order(void **state)
{
    struct log log = {.fails = -1};
    struct job jobs[JOBS];
    struct qt_behind *b;
    (void)state;
    assert_int_equal(qt_behind_open(&b, NULL), QT_OK);
    assert_int_equal(qt_behind_wait(b, NULL), QT_OK);
    assert_int_equal(add_jobs(&log, jobs, b), JOBS);
    assert_int_equal(qt_behind_wait(b, NULL), QT_OK);
    assert_int_equal(qt_behind_done(b), JOBS);
    assert_int_equal(log.nran, JOBS);
    assert_int_equal(log.ndropped, JOBS);
    for (int i = 0; i < JOBS; i++)
        assert_true(log.ran[i] == i && log.dropped[i] == i);
    qt_behind_close(b);
    qt_behind_close(NULL);
}

static void nothing_runs_after_an_error(void **state)
{
    struct log log = {.fails = 7};
    struct job jobs[JOBS];
    struct qt_behind *b;
    struct qt_err err = {0};
    (void)state;
    assert_int_equal(qt_behind_open(&b, NULL), QT_OK);
    const int stopped = add_jobs(&log, jobs, b);
    assert_in_range(stopped, 7, 7 + QT_BEHIND_SMALL_JOBS);
    assert_int_equal(qt_behind_wait(b, &err), QT_E_INPUT);
    assert_string_equal(err.file, "file");
    assert_int_equal(qt_behind_done(b), 7);
    assert_int_equal(log.nran, 8);
    assert_int_equal(log.ndropped, stopped + 1);
    qt_behind_close(b);
}

static void closing_waits(void **state)
{
    struct log log = {.fails = -1};
    struct job jobs[JOBS];
    struct qt_behind *b;
    (void)state;
    assert_int_equal(qt_behind_open(&b, NULL), QT_OK);
    assert_int_equal(add_jobs(&log, jobs, b), JOBS);
    qt_behind_close(b);
    assert_int_equal(log.ndropped, JOBS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(jobs_run_in_order),
        cmocka_unit_test(nothing_runs_after_an_error),
        cmocka_unit_test(closing_waits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
