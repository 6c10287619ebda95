/*
 * A whole calibrated quantize run with one fault: the nth allocation or the nth file call fails.
 * For every n the run must end with a clean error or with the same container, leave nothing under
 * the output's name before it is complete, and be resumable to the same bytes.
 *
 * File calls are intercepted at link time (-Wl,--wrap, see the Makefile): the product has no hooks.
 */
#include "tests/unit/fixture.h"

#include "kernels/kernels.h"
#include "pack/pack.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

/* ---- allocations ---------------------------------------------------------------------------- */

static long allocations, allocation_at = -1; /* number of the allocation that fails */
static bool all_after;                       /* also all later allocations */

static bool out_of_memory(void)
{
    long n = allocations++;
    return allocation_at >= 0 && (all_after ? n >= allocation_at : n == allocation_at);
}

void *__real_malloc(size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_malloc(size_t size)
{
    return out_of_memory() ? NULL : __real_malloc(size);
}

void *__real_realloc(void *p, size_t size);
void *__wrap_realloc(void *p, size_t size);
void *__wrap_realloc(void *p, size_t size)
{
    return out_of_memory() ? NULL : __real_realloc(p, size);
}

void *__real_aligned_alloc(size_t align, size_t size);
void *__wrap_aligned_alloc(size_t align, size_t size);
void *__wrap_aligned_alloc(size_t align, size_t size)
{
    return out_of_memory() ? NULL : __real_aligned_alloc(align, size);
}

/* ---- calls ---------------------------------------------------------------------------------- */

/* The fault at call number fault_at; other calls pass through. */
static enum { NOTHING, FAIL, KILL, SHORT, TRUNCATE_SOURCE, TOUCH_SOURCE } fault;
static long fault_at, calls;
static char source[512]; /* weight file of the source */

static void disturb_source(bool truncated)
{
    const struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = 1000000000}};
    assert_int_equal(truncated ? truncate(source, 100) : utimensat(AT_FDCWD, source, times, 0), 0);
}

/* True if the call must fail with errno e. */
static bool fails(int e)
{
    if (calls++ != fault_at)
        return false;
    switch (fault) {
    case FAIL:
        errno = e;
        return true;
    case KILL:
        raise(SIGKILL);
        return false;
    case TRUNCATE_SOURCE:
    case TOUCH_SOURCE:
        disturb_source(fault == TRUNCATE_SOURCE);
        return false;
    default:
        return false;
    }
}

#define WRAP(type, name, params, args, e, failure)                                                 \
    type __real_##name params;                                                                     \
    type __wrap_##name params;                                                                     \
    type __wrap_##name params                                                                      \
    {                                                                                              \
        return fails(e) ? (failure) : __real_##name args;                                          \
    }

WRAP(int, fsync, (int fd), (fd), EIO, -1)
WRAP(int, fdatasync, (int fd), (fd), EIO, -1)
WRAP(int, rename, (const char *from, const char *to), (from, to), EIO, -1)
WRAP(int, ftruncate, (int fd, off_t size), (fd, size), EIO, -1)
WRAP(int, fallocate, (int fd, int mode, off_t at, off_t size), (fd, mode, at, size), ENOSPC, -1)
WRAP(int, mkdir, (const char *path, mode_t mode), (path, mode), ENOSPC, -1)
WRAP(int, unlinkat, (int fd, const char *path, int flags), (fd, path, flags), EIO, -1)
WRAP(int, fstat, (int fd, struct stat *st), (fd, st), EIO, -1)
WRAP(int, lstat, (const char *path, struct stat *st), (path, st), EIO, -1)
WRAP(DIR *, opendir, (const char *path), (path), EMFILE, NULL)
WRAP(void *, mmap, (void *p, size_t n, int prot, int flags, int fd, off_t at),
     (p, n, prot, flags, fd, at), ENOMEM, MAP_FAILED)

ssize_t __real_pwrite(int fd, const void *p, size_t n, off_t at);
ssize_t __wrap_pwrite(int fd, const void *p, size_t n, off_t at);
ssize_t __wrap_pwrite(int fd, const void *p, size_t n, off_t at)
{
    static int turn;
    if (fails(ENOSPC))
        return -1;
    if (fault == SHORT && turn++ % 2) {
        errno = EINTR;
        return -1;
    }
    return __real_pwrite(fd, p, fault == SHORT ? (n + 1) / 2 : n, at);
}

ssize_t __real_pread(int fd, void *p, size_t n, off_t at);
ssize_t __wrap_pread(int fd, void *p, size_t n, off_t at);
ssize_t __wrap_pread(int fd, void *p, size_t n, off_t at)
{
    return fails(EIO) ? -1 : __real_pread(fd, p, fault == SHORT ? (n + 1) / 2 : n, at);
}

ssize_t __real_read(int fd, void *p, size_t n);
ssize_t __wrap_read(int fd, void *p, size_t n);
ssize_t __wrap_read(int fd, void *p, size_t n)
{
    return fails(EIO) ? -1 : __real_read(fd, p, fault == SHORT ? (n + 1) / 2 : n);
}

int __real_open(const char *path, int flags, mode_t mode);
int __wrap_open(const char *path, int flags, mode_t mode);
int __wrap_open(const char *path, int flags, mode_t mode)
{
    return fails(EMFILE) ? -1 : __real_open(path, flags, mode);
}

/* ---- the run -------------------------------------------------------------------------------- */

enum { SAMPLES = 2, SEQLEN = 16 };

static char *dir;
static struct qt_backend *be;
static struct qt_err err;

static void shell(const char *command)
{
    assert_int_equal(system(command), 0);
}

static int set_up(void **state)
{
    (void)state;
    const char *base = getenv("TMPDIR");
    char *root = realpath(".", NULL), command[1024];
    dir = malloc(256);
    snprintf(dir, 256, "%s/qtool-test-XXXXXX", base ? base : "/tmp");
    if (!mkdtemp(dir))
        return -1;
    snprintf(command, sizeof command, "cp -r '%s/tests/golden/models/llama' '%s/model'", root, dir);
    shell(command);
    free(root);
    snprintf(source, sizeof source, "%s/model/model.safetensors", dir);
    qt_threads_set(1); /* one thread: a process that has run a parallel loop must not fork and run
                        * another */
    return chdir(dir) == 0 ? qt_backend_cpu_open(&be, &err) : -1;
}

static int tear_down(void **state)
{
    char command[512];
    (void)state;
    be->close(be);
    snprintf(command, sizeof command, "rm -rf '%s'", dir);
    free(dir);
    return chdir("/") == 0 ? system(command) : -1;
}

/* Opens the checkpoint and quantizes it to `out`. */
static int quantize(const char *out, bool resume)
{
    uint32_t ids[SAMPLES * SEQLEN];
    struct qt_quantize_report report = {0};
    struct qt_ckpt *ckpt;
    for (uint32_t i = 0; i < SAMPLES * SEQLEN; i++)
        ids[i] = i * 37 % 97;
    const struct qt_calibration calibration = {
        .ids = ids, .samples = SAMPLES, .seqlen = SEQLEN, .backend = be};
    const struct qt_rule rule = {"down_proj", "fp6"};
    const struct qt_quantize_options opt = {
        .plan = {.scheme = "nf3:g=32", .rules = &rule, .nrules = 1, .calibrated = true},
        .calibration = &calibration,
        .out_dir = out,
        .resume = resume,
    };
    err = (struct qt_err){0};
    int rc = qt_ckpt_open(&ckpt, "model", &err);
    if (rc == QT_OK)
        rc = qt_quantize(&report, ckpt, &opt, &err);
    json_decref(report.document);
    qt_ckpt_close(ckpt);
    return rc;
}

static void expect_same(const char *what, long n)
{
    if (system("diff -r -x qtool-report.json ref out >&2") != 0)
        fail_msg("%s %ld: another container", what, n);
}

static void expect_clean_error(const char *what, long n, int rc)
{
    /* A failed stat may be reported as a missing file. */
    bool absent = rc == QT_E_INPUT && strstr(err.reason, "No such file");
    if ((rc != QT_E_RESOURCE && !absent) || !err.reason[0])
        fail_msg("%s %ld: status %d, %s: %s", what, n, rc, err.file, err.reason);
}

/* After a fault: the output is complete or can be completed. Removes it. */
static void expect_resumable(const char *what, long n)
{
    int rc = quantize("out", true);
    if (rc != QT_OK)
        fail_msg("%s %ld: resume: status %d, %s: %s", what, n, rc, err.file, err.reason);
    expect_same(what, n);
    shell("rm -rf out out.partial");
}

/* Step between values of n: 1 if QT_FULL is set (some minutes), else `step`. */
static long stride(long step)
{
    return getenv("QT_FULL") ? 1 : step;
}

static void make_reference(void **state)
{
    (void)state;
    expect_ok("reference", quantize("ref", false), &err);
}

/* ---- faults --------------------------------------------------------------------------------- */

static void allocations_fail(bool from_then_on)
{
    allocations = 0;
    expect_ok("count", quantize("out", false), &err);
    shell("rm -r out");
    long count = allocations;
    print_message("%ld allocations\n", count);
    for (long n = 0; n < count; n += stride(37)) {
        allocations = 0;
        allocation_at = n;
        all_after = from_then_on;
        int rc = quantize("out", false);
        allocation_at = -1;
        if (rc < 0)
            expect_clean_error("allocation", n, rc);
        if (rc == QT_OK || n % 4 == 0)
            expect_resumable("allocation", n);
        else
            shell("rm -rf out out.partial");
    }
}

static void every_allocation(void **state)
{
    (void)state;
    allocations_fail(true);
}

static void single_allocations(void **state)
{
    (void)state;
    allocations_fail(false);
}

static void every_call_fails(void **state)
{
    bool reached = true;
    (void)state;
    for (long n = 0; reached; n += stride(5)) {
        fault = FAIL;
        fault_at = n;
        calls = 0;
        int rc = quantize("out", false);
        reached = calls > n;
        fault = NOTHING;
        if (rc < 0)
            expect_clean_error("call", n, rc);
        expect_resumable("call", n);
        assert_true(reached || n > 200); /* else nothing was intercepted */
    }
}

static void killed_at_every_call(void **state)
{
    bool killed = true;
    (void)state;
    for (long n = 0; killed; n += stride(7)) {
        pid_t pid = fork();
        int status;
        assert_true(pid >= 0);
        if (pid == 0) {
            fault = KILL;
            fault_at = n;
            calls = 0;
            qt_threads_set(1); /* LLVM's OpenMP loses the setting in the fork */
            _exit(quantize("out", false) == QT_OK ? 0 : 1);
        }
        assert_int_equal(waitpid(pid, &status, 0), pid);
        killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        assert_true(killed || (WIFEXITED(status) && WEXITSTATUS(status) == 0));
        expect_resumable("killed at call", n);
    }
}

/* Short reads and writes and interrupted calls are not errors. */
static void short_calls(void **state)
{
    (void)state;
    fault = SHORT;
    fault_at = -1;
    expect_ok("short", quantize("out", false), &err);
    fault = NOTHING;
    expect_resumable("short", 0);
}

/* Faults while a finished run is resumed leave its container unchanged. */
static void finished_container_stays(void **state)
{
    (void)state;
    shell("cp -r ref out");
    fault = NOTHING;
    calls = allocations = 0;
    expect_ok("count", quantize("out", true), &err);
    const long most[2] = {allocations, calls};
    assert_true(most[0] > 100 && most[1] > 10);
    for (int i = 0; i < 2; i++)
        for (long n = 0; n < most[i]; n += i ? 1 : stride(11)) {
            calls = allocations = 0;
            all_after = n % 2;
            allocation_at = i ? -1 : n;
            fault = i ? FAIL : NOTHING;
            fault_at = n;
            int rc = quantize("out", true);
            allocation_at = -1;
            fault = NOTHING;
            /* A failed stat of a side file is reported as a missing side file. */
            if (rc < 0 && rc != QT_E_RESUME)
                expect_clean_error(i ? "call" : "allocation", n, rc);
        }
    expect_same("finished", 0);
    shell("rm -r out");
}

/* ---- the source changes --------------------------------------------------------------------- */

static void source_changed(void **state)
{
    (void)state;
    fault = NOTHING;
    calls = 0;
    expect_ok("count", quantize("out", false), &err);
    shell("rm -r out; cp model/model.safetensors kept");
    long last = calls - 160; /* the calls behind the last check: report and manifest are written */
    for (long n = last / 4; n < last; n += last / 16) {
        fault = TOUCH_SOURCE;
        fault_at = n;
        calls = 0;
        expect_error("touched", quantize("out", false), QT_E_INPUT, "changed while", &err);
        fault = NOTHING;
        assert_int_not_equal(access("out", F_OK), 0);
        assert_int_not_equal(access("out.partial", F_OK), 0);
        shell("cp kept model/model.safetensors");
    }
}

/* Quantizes matrices that are larger than the part that the checkpoint's fingerprint covers. */
static int quantize_large(bool resume)
{
    enum { MATRICES = 3, N = 64, K = 256 };
    static const struct qt_rule rule = {"w", "nf4:method=rtn"};
    struct qt_tensor t[MATRICES];
    uint64_t offsets[MATRICES + 1];
    char *header, names[MATRICES][16];
    size_t size;
    struct qt_quantize_report report = {0};
    struct qt_ckpt *ckpt;
    for (int i = 0; i < MATRICES; i++) {
        snprintf(names[i], sizeof names[i], "%d.w", i);
        t[i] = (struct qt_tensor){.name = names[i], .dtype = QT_F16, .ndim = 2, .shape = {N, K}};
        t[i].nbytes = N * K * 2;
    }
    if (!resume) {
        expect_ok("header", qt_safetensors_header(&header, &size, offsets, t, MATRICES, NULL, &err),
                  &err);
        fixture_write(".", "large.safetensors", header, size);
        qt_free(header);
        assert_int_equal(truncate("large.safetensors", (off_t)offsets[MATRICES]), 0);
    }
    const struct qt_quantize_options opt = {.plan = {.scheme = "none", .rules = &rule, .nrules = 1},
                                            .out_dir = "out",
                                            .resume = resume};
    expect_ok("large", qt_ckpt_open(&ckpt, "large.safetensors", &err), &err);
    int rc = qt_quantize(&report, ckpt, &opt, &err);
    json_decref(report.document);
    qt_ckpt_close(ckpt);
    return rc;
}

/* After a stopped run a byte in the middle of a tensor changes. A resume must notice it if the
 * tensor is finished. */
static void source_changed_before_resume(void **state)
{
    int refused = 0, resumed = 0;
    (void)state;
    for (long n = 40; n < 120; n += 4) {
        fault = FAIL;
        fault_at = n;
        calls = 0;
        if (quantize_large(false) == QT_OK)
            break;
        fault = NOTHING;
        shell("printf X | dd of=large.safetensors bs=1 seek=50000 conv=notrunc status=none");
        int rc = quantize_large(true);
        if (rc < 0) {
            expect_error("resumed", rc, QT_E_RESUME, "its source data has changed", &err);
            refused++;
        } else {
            resumed++;
        }
        shell("rm -rf out out.partial");
    }
    fault = NOTHING;
    assert_true(refused > 0 && resumed > 0);
    shell("rm -rf out out.partial");
    expect_ok("whole", quantize_large(false), &err);
    shell("printf X | dd of=large.safetensors bs=1 seek=50000 conv=notrunc status=none");
    expect_error("finished", quantize_large(true), QT_E_RESUME, "its source data has changed",
                 &err);
    shell("rm -r out");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(make_reference),           cmocka_unit_test(every_allocation),
        cmocka_unit_test(single_allocations),       cmocka_unit_test(every_call_fails),
        cmocka_unit_test(killed_at_every_call),     cmocka_unit_test(short_calls),
        cmocka_unit_test(source_changed),           cmocka_unit_test(source_changed_before_resume),
        cmocka_unit_test(finished_container_stays),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
