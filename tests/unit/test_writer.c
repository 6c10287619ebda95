/* Writing containers: after any failure at any moment, a resume gives the same bytes, and no file
 * of the user is lost. */
#include "container_fixture.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/wait.h>

/* The expected containers: "ref" (one shard), "refs" (three). */
static int setup(void **state)
{
    if (fixture_setup(state) != 0)
        return -1;
    struct run one = {.dir = "ref", .side_file = "side.json", .kill_after = -1};
    struct run many = {
        .dir = "refs", .side_file = "side.json", .shard_bytes = MANY_SHARDS, .kill_after = -1};
    return system("echo '{\"a\": 1}' > side.json") == 0 && fixture_write(&one) == QT_OK &&
                   fixture_write(&many) == QT_OK
               ? 0
               : -1;
}

static int teardown(void **state)
{
    umount2("disk", MNT_DETACH); /* also after tests that failed */
    umount2("mounted", MNT_DETACH);
    return fixture_teardown(state);
}

static struct run run_many(const char *dir)
{
    return (struct run){
        .dir = dir, .side_file = "side.json", .shard_bytes = MANY_SHARDS, .kill_after = -1};
}

/* Resumes r, compares the result and removes it. */
static void resume_and_compare(struct run *r)
{
    char command[256];
    r->resume = true;
    r->kill_after = -1;
    assert_status(fixture_write(r), QT_OK, r->err);
    assert_true(same_dirs(r->dir, r->shard_bytes ? "refs" : "ref"));
    snprintf(command, sizeof command, "test ! -e %s.partial && rm -r %s", r->dir, r->dir);
    shell(command);
}

/* Leaves DIR.partial with `units` finished units and another one half written. */
static void leave_partial(struct run *r, size_t units)
{
    struct qt_writer *w;
    unsigned char junk[8] = "garbage";
    assert_status(fixture_open(&w, r), QT_OK, r->err);
    for (size_t u = 0; u < units; u++)
        assert_status(fixture_unit(w, u, r), QT_OK, r->err);
    if (units < UNITS)
        assert_status(qt_writer_put(w, fixture_units[units].first, junk, sizeof junk, 2, &r->err),
                      QT_OK, r->err);
    assert_status(qt_writer_copy_file(w, "side.json", &r->err), QT_OK, r->err);
    qt_writer_close(w);
}

/* ---- interruptions -------------------------------------------------------------------------- */

static void test_close_and_resume(void **state)
{
    (void)state;
    for (size_t units = 0; units <= UNITS; units++) {
        struct run r = run_many("closed");
        struct qt_writer *w;
        leave_partial(&r, units);
        r.resume = true;
        assert_status(fixture_open(&w, &r), QT_OK, r.err);
        for (size_t u = 0; u < UNITS; u++) {
            json_t *record = NULL, *expected = fixture_record(u);
            assert_int_equal(qt_writer_done(w, fixture_units[u].name), u < units);
            if (u < units)
                assert_status(qt_writer_record(&record, w, fixture_units[u].name, &r.err), QT_OK,
                              r.err);
            assert_true(!record || json_equal(record, expected));
            json_decref(record);
            json_decref(expected);
        }
        qt_writer_close(w);
        resume_and_compare(&r);
    }
}

/* Finished units can be written again, in the same run or a later one, even if that run dies
 * between writing and the journal line. The caller's progress stays until the container is
 * complete. */
static void test_reopen(void **state)
{
    (void)state;
    for (size_t dies = 0; dies < 2; dies++) {
        struct run r = run_many("again");
        struct qt_writer *w;
        unsigned char junk[8] = "garbage";
        void *data;
        size_t size;
        leave_partial(&r, UNITS);
        r.resume = true;
        assert_status(fixture_open(&w, &r), QT_OK, r.err);
        assert_status(qt_writer_load(&data, &size, w, QT_PROGRESS_LEARNING, &r.err), QT_OK, r.err);
        assert_null(data);
        assert_status(qt_writer_save(w, QT_PROGRESS_LEARNING, "first", 5, &r.err), QT_OK, r.err);
        assert_status(qt_writer_save(w, QT_PROGRESS_LEARNING, "progress!", 9, &r.err), QT_OK,
                      r.err);
        assert_status(qt_writer_reopen(w, "no such unit", &r.err), QT_E_INTERNAL, r.err);
        for (size_t u = 0; u + dies < UNITS; u++) {
            assert_status(qt_writer_reopen(w, fixture_units[u].name, &r.err), QT_OK, r.err);
            assert_false(qt_writer_done(w, fixture_units[u].name));
            assert_status(fixture_unit(w, u, &r), QT_OK, r.err);
        }
        if (dies) {
            const size_t u = UNITS - 1;
            assert_status(qt_writer_reopen(w, fixture_units[u].name, &r.err), QT_OK, r.err);
            assert_status(qt_writer_put(w, fixture_units[u].first, junk, sizeof junk, 0, &r.err),
                          QT_OK, r.err);
        }
        qt_writer_close(w);
        assert_status(fixture_open(&w, &r), QT_OK, r.err);
        assert_status(qt_writer_load(&data, &size, w, QT_PROGRESS_LEARNING, &r.err), QT_OK, r.err);
        assert_int_equal(size, 9);
        assert_memory_equal(data, "progress!", 9);
        qt_free(data);
        for (size_t u = 0; u < UNITS; u++)
            assert_true(qt_writer_done(w, fixture_units[u].name));
        if (dies) {
            assert_status(qt_writer_reopen(w, fixture_units[UNITS - 1].name, &r.err), QT_OK, r.err);
            assert_status(fixture_unit(w, UNITS - 1, &r), QT_OK, r.err);
        }
        qt_writer_close(w);
        resume_and_compare(&r);
    }
}

static void test_damaged_progress(void **state)
{
    (void)state;
    struct run r = run_many("progress");
    struct qt_writer *w;
    void *data;
    size_t size;
    assert_status(fixture_open(&w, &r), QT_OK, r.err);
    assert_status(qt_writer_save(w, QT_PROGRESS_LEARNING, "0123456789", 10, &r.err), QT_OK, r.err);
    shell("printf x | dd of=progress.partial/progress bs=1 seek=3 conv=notrunc 2>/dev/null");
    assert_status(qt_writer_load(&data, &size, w, QT_PROGRESS_LEARNING, &r.err), QT_E_RESUME,
                  r.err);
    assert_null(data);
    shell("printf xy > progress.partial/progress");
    assert_status(qt_writer_load(&data, &size, w, QT_PROGRESS_LEARNING, &r.err), QT_E_RESUME,
                  r.err);
    qt_writer_close(w);
    r.resume = false; /* starts over: no progress stays */
    assert_status(fixture_open(&w, &r), QT_E_USAGE, r.err);
    assert_reason(r.err, "--force deletes");
    r.force = true;
    assert_status(fixture_open(&w, &r), QT_OK, r.err);
    assert_status(qt_writer_load(&data, &size, w, QT_PROGRESS_LEARNING, &r.err), QT_OK, r.err);
    assert_null(data);
    qt_writer_discard(w);
    qt_writer_close(w);
}

/* A side file that the first run copied and the second does not want must not stay. */
static void test_stale_side_file(void **state)
{
    (void)state;
    struct run r = run_many("stale");
    struct qt_writer *w;
    assert_status(fixture_open(&w, &r), QT_OK, r.err);
    shell("cp side.json gone.json");
    assert_status(qt_writer_copy_file(w, "gone.json", &r.err), QT_OK, r.err);
    qt_writer_close(w);
    resume_and_compare(&r);
}

/* The work of an earlier run is removed with force and without resume only. */
static void test_start_over(void **state)
{
    (void)state;
    struct run r = run_many("over-again");
    r.shard_bytes = 40;
    leave_partial(&r, UNITS);
    r = run_many("over-again");
    assert_status(fixture_write(&r), QT_E_USAGE, r.err);
    assert_reason(r.err, "5 finished tensors");
    r.force = true;
    r.kill_after = 100; /* counts the calls */
    assert_status(fixture_write(&r), QT_OK, r.err);
    assert_int_equal(r.kill_after, 100 - 24);
    assert_true(same_dirs("over-again", "refs"));
}

static void test_kill_after_every_call(void **state)
{
    (void)state;
    for (long n = 0;; n++) {
        struct run r = run_many("killed");
        r.kill_after = n;
        int status;
        pid_t child = fork();
        if (child == 0)
            _exit(fixture_write(&r) == QT_OK ? 0 : 1);
        assert_int_equal(waitpid(child, &status, 0), child);
        if (WIFEXITED(status)) {
            assert_int_equal(WEXITSTATUS(status), 0);
            assert_int_equal(n, 24); /* open, 8 x 2 puts, 5 commits, copy, finish */
            shell("rm -r killed");
            break;
        }
        assert_int_equal(WTERMSIG(status), SIGKILL);
        if (access("killed", F_OK) == 0) /* after finish: complete, and in the way */
            shell("diff -r killed refs && rm -r killed && test ! -e killed.partial");
        else
            resume_and_compare(&r);
    }
}

/* Runs `work` in a child and kills it before its nth system call. Returns 0 if the child finished
 * first, -1 if tracing is not available. */
static int killed_before_syscall(int (*work)(struct run *r), struct run *r, long n)
{
    int status;
    pid_t child = fork();
    if (child == 0) {
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) < 0)
            _exit(99);
        raise(SIGSTOP);
        _exit(work(r) == QT_OK ? 0 : 1);
    }
    waitpid(child, &status, 0);
    if (WIFEXITED(status))
        return -1;
    for (long stops = 0; !WIFEXITED(status); stops++) {
        if (stops == 2 * n + 1) { /* a call stops at entry and at exit */
            kill(child, SIGKILL);
            waitpid(child, &status, 0);
            return 1;
        }
        ptrace(PTRACE_SYSCALL, child, NULL, NULL);
        waitpid(child, &status, 0);
    }
    assert_int_equal(WEXITSTATUS(status), 0);
    return 0;
}

static void test_kill_before_every_syscall(void **state)
{
    (void)state;
    for (long n = 0;; n++) {
        struct run r = {.dir = "traced", .side_file = "side.json", .kill_after = -1};
        int killed = killed_before_syscall(fixture_write, &r, n);
        if (killed < 0) {
            print_message("SKIP: no process tracing here\n");
            skip();
        }
        if (access("traced", F_OK) == 0)
            shell("diff -r traced ref && rm -r traced && test ! -e traced.partial");
        else
            resume_and_compare(&r);
        if (!killed) {
            assert_true(n > 100); /* otherwise nothing was traced */
            break;
        }
    }
}

/* Replacing: at every moment the old or the new container is complete, and nothing else remains
 * after the run, whatever an earlier killed run left. */
static void kill_while_replacing(const char *before)
{
    for (long n = 0;; n++) {
        struct run r = run_many("over");
        r.force = true;
        shell(before);
        int killed = killed_before_syscall(fixture_write, &r, n);
        if (killed < 0) {
            print_message("SKIP: no process tracing here\n");
            skip();
        }
        shell("diff -qr over refs >/dev/null 2>&1 || "
              "diff -qr -x qtool-replaced over ref >/dev/null 2>&1 || "
              "diff -r -x qtool-replaced over.old ref");
        resume_and_compare(&r);
        shell("test ! -e over.old");
        if (!killed)
            break;
    }
}

static void test_kill_while_replacing(void **state)
{
    (void)state;
    kill_while_replacing("cp -r ref over");
    kill_while_replacing("cp -r ref over && mkdir over.old && "
                         "touch over.old/qtool-replaced over.old/model.safetensors");
    kill_while_replacing("cp -r ref over.old && touch over.old/qtool-replaced");
}

/* ---- the journal ---------------------------------------------------------------------------- */

static size_t journal_size(const char *path)
{
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    return (size_t)st.st_size;
}

static void expect_refused(const char *dir, bool force, const char *reason)
{
    struct run r = run_many(dir);
    struct qt_writer *w;
    r.force = force;
    assert_status(fixture_open(&w, &r), QT_E_USAGE, r.err);
    assert_reason(r.err, reason);
    assert_null(w);
}

/* A journal cut anywhere, as by a crash: an incomplete last line is ignored. An empty journal
 * beside other files is rejected. */
static void test_torn_journal(void **state)
{
    (void)state;
    struct run r = run_many("torn");
    leave_partial(&r, 4);
    shell("mv torn.partial torn.saved");
    size_t size = journal_size("torn.saved/journal");
    assert_true(size > 1000);
    for (size_t cut = 0; cut < size; cut += cut < 40 || cut > size - 40 ? 1 : 7) {
        shell("cp -r torn.saved torn.partial");
        assert_int_equal(truncate("torn.partial/journal", (off_t)cut), 0);
        if (cut) {
            resume_and_compare(&r);
        } else {
            expect_refused("torn", false, "qtool did not create");
            shell("rm -r torn.partial");
        }
    }
    shell("rm -r torn.saved");
}

static void test_damaged_journal(void **state)
{
    (void)state;
    struct run r = run_many("flipped");
    leave_partial(&r, 4);
    shell("mv flipped.partial flipped.saved");
    size_t size = journal_size("flipped.saved/journal");
    for (size_t at = 0; at < size; at += 5) {
        unsigned char byte;
        shell("cp -r flipped.saved flipped.partial");
        int fd = open("flipped.partial/journal", O_RDWR | O_CLOEXEC);
        assert_int_equal(pread(fd, &byte, 1, (off_t)at), 1);
        byte ^= 0x11;
        assert_int_equal(pwrite(fd, &byte, 1, (off_t)at), 1);
        close(fd);
        if (at >= strlen("{\"format\":\"qtool-journal\"")) {
            resume_and_compare(&r);
        } else { /* not recognized as a journal of qtool */
            expect_refused("flipped", false, "qtool did not create");
            shell("rm -r flipped.partial");
        }
    }
    shell(
        "cp -r flipped.saved flipped.partial && head -c 300 /dev/zero >> flipped.partial/journal");
    resume_and_compare(&r);
    shell("rm -r flipped.saved");
}

static void test_other_identity(void **state)
{
    (void)state;
    static const struct {
        const char *object, *member, *json, *reason;
    } cases[] = {
        {"options", "scheme", "\"nf3:g=64\"",
         "options.scheme was \"nf4:g=64\", is now \"nf3:g=64\""},
        {"options", "damp", "0.010000000000000002", "options.damp was 0.01"},
        {"options", "strict", "true", "options.strict was false, is now true"},
        {"options", "extra", "7", "options.extra was absent, is now 7"},
        {"options", "strict", NULL, "options.strict was false, is now absent"},
        {"source", "files", "[{\"name\":\"a\",\"size\":100},{\"name\":\"b\",\"size\":201}]",
         "source.files[1].size was 200, is now 201"},
        {"source", "files", "[{\"name\":\"a\",\"size\":100}]", "source.files was [{\"name\":\"a\""},
        {"source", "files", "3", "source.files was ["},
    };
    struct run r = run_many("other");
    leave_partial(&r, 3);
    r.resume = true;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct qt_writer *w;
        json_t *identity = fixture_identity();
        json_t *object = json_object_get(identity, cases[i].object);
        if (cases[i].json)
            json_object_set_new(object, cases[i].member,
                                json_loads(cases[i].json, JSON_DECODE_ANY, NULL));
        else
            json_object_del(object, cases[i].member);
        r.identity = identity;
        assert_status(fixture_open(&w, &r), QT_E_RESUME, r.err);
        assert_reason(r.err, "cannot resume: ");
        assert_reason(r.err, cases[i].reason);
        assert_null(w);
        json_decref(identity);
    }
    r.identity = NULL;
    r.shard_bytes = 0;
    struct qt_writer *w;
    assert_status(fixture_open(&w, &r), QT_E_RESUME, r.err);
    assert_reason(r.err, "the maximum shard size");
    r.shard_bytes = MANY_SHARDS;
    resume_and_compare(&r); /* the refusals cost no progress */
}

static void test_lost_shard(void **state)
{
    (void)state;
    struct run r = run_many("lost");
    struct qt_writer *w;
    leave_partial(&r, 3);
    shell("rm lost.partial/model-00002-of-00003.safetensors");
    r.resume = true;
    assert_status(fixture_open(&w, &r), QT_E_RESUME, r.err);
    assert_reason(r.err, "missing");
    shell("rm -r lost.partial");

    /* Shards removed during the run are not created again. */
    r.resume = false;
    for (size_t units = 1; units <= UNITS; units += UNITS - 1) {
        assert_status(fixture_open(&w, &r), QT_OK, r.err);
        for (size_t u = 0; u < units; u++)
            assert_status(fixture_unit(w, u, &r), QT_OK, r.err);
        shell("rm lost.partial/*.safetensors");
        int rc = units < UNITS ? fixture_unit(w, units, &r) : fixture_finish(w, &r);
        assert_status(rc, QT_E_RESOURCE, r.err);
        assert_reason(r.err, "cannot open: No such file");
        qt_writer_close(w);
        shell("! ls lost.partial | grep -q 'safetensors$' && rm -r lost.partial");
    }
}

/* Damage that no CRC of the journal covers. */
static void test_damaged_header(void **state)
{
    (void)state;
    struct run r = run_many("header");
    struct qt_writer *w;
    leave_partial(&r, 3);
    shell("sed -i 's/\"format\":\"pt\"/\"format\":\"tf\"/' "
          "header.partial/model-00002-of-00003.safetensors");
    r.resume = true;
    assert_status(fixture_open(&w, &r), QT_E_RESOURCE, r.err);
    assert_reason(r.err, "header read back differs from what was written; run again");
    shell("sed -i 's/\"format\":\"tf\"/\"format\":\"pt\"/' "
          "header.partial/model-00002-of-00003.safetensors");
    resume_and_compare(&r); /* the refusal cost no progress */
}

/* ---- foreign directories -------------------------------------------------------------------- */

static void test_two_writers(void **state)
{
    (void)state;
    struct run r = run_many("shared");
    struct qt_writer *w, *other;
    int status;
    assert_status(fixture_open(&w, &r), QT_OK, r.err);
    assert_status(fixture_unit(w, 0, &r), QT_OK, r.err);
    struct run second = run_many("shared/");
    for (int resume = 0; resume < 2; resume++) {
        second.resume = resume;
        assert_status(fixture_open(&other, &second), QT_E_RESOURCE, second.err);
        assert_reason(second.err, "in use by another process");
        pid_t child = fork();
        if (child == 0)
            _exit(fixture_open(&other, &second) == QT_E_RESOURCE ? 0 : 1);
        waitpid(child, &status, 0);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    qt_writer_close(w);
    resume_and_compare(&second);
}

static void test_existing_output(void **state)
{
    (void)state;
    shell("cp -r ref have && mkdir empty full sub sub/x && touch file full/weights sub/qtool.json "
          "&& ln -s have link && ln -s nowhere dangling");
    expect_refused("have", false, "--force");
    expect_refused("empty", false, "--force");
    expect_refused("file", false, "not a directory");
    expect_refused("file", true, "not a directory");
    expect_refused("link", true, "is a symbolic link");
    expect_refused("dangling", true, "is a symbolic link");
    expect_refused("full", true, "no qtool.json");
    expect_refused("sub", true, "directory 'x'");
    expect_refused("", true, "not a valid name");
    expect_refused(".", true, "not a valid name");
    expect_refused("have/..", true, "not a valid name");
    expect_refused("/", true, "not a valid name");
    shell("test -z \"$(ls -d *.partial 2>/dev/null)\" && diff -r have ref && test -e full/weights");

    struct run r = run_many("have");
    r.force = true;
    /* Not created by qtool. */
    static const char *const others[] = {"cp -r ref have.old", "touch have.old",
                                         "ln -s ref have.old",
                                         "mkdir -p have.old/x; touch have.old/qtool-replaced"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        shell(others[i]);
        expect_refused("have", true, "exists already: rename or remove it");
        shell("rm -r have.old");
    }
    shell("mkdir have.old");
    assert_status(fixture_write(&r), QT_OK, r.err);
    assert_true(same_dirs("have", "refs"));
    shell("rm -r have && cp -r ref have.old");
    assert_status(fixture_write(&r), QT_OK, r.err);
    assert_true(same_dirs("have", "refs") && same_dirs("have.old", "ref"));
    shell("rm -r have.old");
    r.dir = "empty/";
    assert_status(fixture_write(&r), QT_OK, r.err);
    assert_true(same_dirs("empty", "refs"));
    shell("test ! -e have.old && test ! -e have.partial && test ! -e empty.old");
}

/* DIR appears during the run: it is not overwritten, and the work is not lost. */
static void test_output_appears(void **state)
{
    (void)state;
    struct run r = run_many("late");
    struct qt_writer *w;
    assert_status(fixture_open(&w, &r), QT_OK, r.err);
    for (size_t u = 0; u < UNITS; u++)
        assert_status(fixture_unit(w, u, &r), QT_OK, r.err);
    shell("mkdir late");
    assert_status(fixture_finish(w, &r), QT_E_RESOURCE, r.err);
    assert_reason(r.err, "exists already");
    assert_reason(r.err, "continue from late.partial with --resume");
    qt_writer_close(w);
    shell("rmdir late");
    resume_and_compare(&r);
}

static void test_foreign_partial(void **state)
{
    (void)state;
    struct run r = run_many("mine");
    struct qt_writer *w;
    shell("mkdir mine.partial && touch mine.partial/novel.txt");
    expect_refused("mine", true, "qtool did not create");
    shell("test -e mine.partial/novel.txt && test ! -e mine.partial/journal");
    shell("touch mine.partial/journal");
    expect_refused("mine", true, "qtool did not create");
    shell("echo dear diary > mine.partial/journal");
    expect_refused("mine", true, "qtool did not create");
    shell("test -e mine.partial/novel.txt && grep -q diary mine.partial/journal");
    shell("rm mine.partial/novel.txt");
    expect_refused("mine", true, "qtool did not create");
    shell("grep -q diary mine.partial/journal && rm -r mine.partial");
    shell("mkdir elsewhere && ln -s elsewhere mine.partial");
    assert_status(fixture_open(&w, &r), QT_E_RESOURCE, r.err);
    shell("rm mine.partial && touch mine.partial");
    assert_status(fixture_open(&w, &r), QT_E_RESOURCE, r.err);
    shell("rm mine.partial");
    r.dir = "no/such/parent";
    assert_status(fixture_open(&w, &r), QT_E_RESOURCE, r.err);
}

static int discard(struct run *r)
{
    struct qt_writer *w;
    int rc = fixture_open(&w, r);
    qt_writer_discard(w);
    qt_writer_close(w);
    return rc;
}

/* The remains of an interrupted discard do not stop the next run. */
static void test_kill_while_discarding(void **state)
{
    (void)state;
    for (long n = 0;; n++) {
        struct run r = run_many("dropped");
        leave_partial(&r, 2);
        if (n % 2) /* file systems list the oldest or the newest first */
            shell("cd dropped.partial && cp journal j && mv j journal");
        r.resume = true;
        int killed = killed_before_syscall(discard, &r, n);
        if (killed < 0) {
            print_message("SKIP: no process tracing here\n");
            skip();
        }
        r.resume = false;
        r.force = true;
        assert_status(fixture_write(&r), QT_OK, r.err);
        shell("rm -r dropped && test ! -e dropped.partial");
        if (!killed)
            break;
    }
}

static void test_discard(void **state)
{
    (void)state;
    struct run r = run_many("dropped");
    struct qt_writer *w;
    leave_partial(&r, 2);
    r.resume = true;
    assert_status(fixture_open(&w, &r), QT_OK, r.err);
    qt_writer_discard(w);
    qt_writer_close(w);
    qt_writer_discard(NULL);
    qt_writer_close(NULL);
    shell("test ! -e dropped.partial && test ! -e dropped");
}

/* ---- wrong use, wrong data ------------------------------------------------------------------ */

static void test_wrong_use(void **state)
{
    (void)state;
    static const unsigned char data[256];
    struct run r = run_many("wrong");
    struct qt_err err = {0};
    struct qt_writer *w;
    json_t *record = json_object();
    assert_status(fixture_open(&w, &r), QT_OK, r.err);
    assert_status(qt_writer_put(w, TENSORS, data, 1, 0, &err), QT_E_INTERNAL, err);
    assert_status(qt_writer_put(w, 0, data, 49, 0, &err), QT_E_INTERNAL, err);
    assert_status(qt_writer_put(w, 0, data, 1, 48, &err), QT_E_INTERNAL, err);
    assert_status(qt_writer_put(w, 0, data, 2, UINT64_MAX, &err), QT_E_INTERNAL, err);
    assert_status(qt_writer_put(w, 0, data, 47, 0, &err), QT_OK, err);
    assert_status(qt_writer_commit(w, "embed.weight", record, &err), QT_E_INTERNAL, err);
    assert_reason(err, "47 of 48 bytes");
    assert_string_equal(err.tensor, "embed.weight");
    assert_status(qt_writer_put(w, 0, data, 2, 0, &err), QT_E_INTERNAL, err);
    assert_status(qt_writer_put(w, 0, data, 1, 47, &err), QT_OK, err);
    assert_status(qt_writer_commit(w, "embed.weight", record, &err), QT_OK, err);
    assert_status(qt_writer_commit(w, "embed.weight", record, &err), QT_E_INTERNAL, err);
    assert_status(qt_writer_put(w, 0, data, 1, 0, &err), QT_E_INTERNAL, err);
    assert_status(fixture_finish(w, &r), QT_E_INTERNAL, r.err);
    assert_reason(r.err, "never committed");
    static const char *reserved[] = {"ref/qtool.json", "x/journal",
                                     "refs/model.safetensors.index.json",
                                     "refs/model-00001-of-00003.safetensors", "refs/.."};
    for (size_t i = 0; i < sizeof reserved / sizeof *reserved; i++)
        assert_status(qt_writer_copy_file(w, reserved[i], &err), QT_E_INTERNAL, err);
    assert_status(qt_writer_copy_file(w, "absent.json", &err), QT_E_INPUT, err);
    qt_writer_discard(w);
    qt_writer_close(w);
    json_decref(record);

    struct qt_tensor t = fixture_tensors[0];
    json_t *identity = json_object();
    t.nbytes = 47;
    assert_status(
        qt_writer_open(&w, "wrong", &t, 1, identity, &(struct qt_writer_options){0}, &err),
        QT_E_INTERNAL, err);
    json_decref(identity);
    shell("test ! -e wrong && test ! -e wrong.partial");
}

static void test_read_back(void **state)
{
    (void)state;
    struct run r = {.dir = "bits", .kill_after = -1};
    struct qt_writer *w;
    assert_status(fixture_open(&w, &r), QT_OK, r.err);
    for (size_t u = 0; u < UNITS; u++)
        assert_status(fixture_unit(w, u, &r), QT_OK, r.err);
    json_t *manifest = fixture_manifest(w, &r.err);
    json_object_del(json_object_get(manifest, "copied"), "lm_head");
    assert_status(fixture_publish(w, manifest, &r.err), QT_E_INTERNAL, r.err);
    assert_reason(r.err, "written container does not open");
    qt_writer_close(w);
    r.resume = true; /* the records may be wrong */
    assert_status(fixture_open(&w, &r), QT_OK, r.err);
    assert_status(fixture_publish(w, manifest, &r.err), QT_E_RESUME, r.err);
    assert_reason(r.err, "the records of the earlier run are wrong (the written container does");
    json_decref(manifest);
    qt_stop_request();
    assert_status(fixture_finish(w, &r), QT_E_INTERRUPTED, r.err);
    assert_string_equal(r.err.file, "");
    qt_stop_reset();
    shell("truncate -s -1 bits.partial/model.safetensors && "
          "printf '\\252' >> bits.partial/model.safetensors"); /* a flipped bit on the disk */
    assert_status(fixture_finish(w, &r), QT_E_RESOURCE, r.err);
    assert_reason(r.err, "read back differs");
    assert_string_equal(r.err.tensor, "lm_head");
    qt_writer_close(w);
    shell("test ! -e bits && test -e bits.partial/journal && rm -r bits.partial");
}

/* A file written part by part has the bytes that Jansson gives for the whole. */
static void test_json_parts(void **state)
{
    (void)state;
    struct run r = {.dir = "parts", .kill_after = -1};
    struct qt_writer *w;
    struct qt_json_out out;
    json_t *whole = json_pack("{s:s, s:{s:{s:[i, f, n], s:{}}, s:i}, s:[s, {s:[]}], s:{}, s:[]}",
                              "first", "a\n\"b", "object", "x\ty", "z", 1, 0.1 + 0.2, "e", "w", 5,
                              "array", "q", "k", "empty", "none");
    const char *key, *inner;
    json_t *value, *item;
    size_t i, size;
    char *text;
    assert_status(fixture_open(&w, &r), QT_OK, r.err);
    assert_status(qt_writer_begin_json(&out, w, "parts.json", &r.err), QT_OK, r.err);
    json_object_foreach (whole, key, value) {
        if (json_is_string(value)) {
            assert_status(qt_json_out_value(&out, key, value, &r.err), QT_OK, r.err);
            continue;
        }
        const char open = json_is_object(value) ? '{' : '[';
        assert_status(qt_json_out_begin(&out, key, open, &r.err), QT_OK, r.err);
        json_object_foreach (value, inner, item)
            assert_status(qt_json_out_value(&out, inner, item, &r.err), QT_OK, r.err);
        json_array_foreach (value, i, item)
            assert_status(qt_json_out_value(&out, NULL, item, &r.err), QT_OK, r.err);
        assert_status(qt_json_out_end(&out, &r.err), QT_OK, r.err);
    }
    assert_status(qt_json_out_finish(&out, &r.err), QT_OK, r.err);
    qt_json_out_close(&out);
    assert_status(qt_file_read(&text, &size, "parts.partial/parts.json", 1 << 16, &r.err), QT_OK,
                  r.err);
    char *expected = json_dumps(whole, JSON_INDENT(1) | JSON_REAL_PRECISION(9));
    assert_int_equal(size, strlen(expected) + 1);
    assert_memory_equal(text, expected, size - 1);
    assert_int_equal(text[size - 1], '\n');
    qt_free(expected);
    qt_free(text);
    json_decref(whole);
    qt_writer_discard(w);
    qt_writer_close(w);
}

/* ---- out of disk, out of memory ------------------------------------------------------------- */

static void test_file_size_limit(void **state)
{
    (void)state;
    int status;
    pid_t child = fork();
    if (child == 0) {
        struct rlimit limit = {512, 512};
        struct run r = {.dir = "limited", .kill_after = -1};
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &limit);
        int rc = fixture_write(&r);
        _exit(rc == QT_E_RESOURCE && strstr(r.err.reason, "no room for the ") ? 0 : 1);
    }
    waitpid(child, &status, 0);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    shell("test ! -e limited && test ! -e limited.partial");
}

static void check_full_disk(void)
{
    static const size_t large = 2 << 20;
    struct qt_tensor t = {.name = "big",
                          .dtype = QT_U8,
                          .ndim = 1,
                          .shape = {large},
                          .count = large,
                          .nbytes = large};
    struct qt_writer *w;
    struct qt_err err = {0};
    json_t *identity = json_object();
    assert_status(
        qt_writer_open(&w, "disk/big", &t, 1, identity, &(struct qt_writer_options){0}, &err),
        QT_E_RESOURCE, err);
    assert_reason(err, "No space left");
    json_decref(identity);
    shell("test -z \"$(ls disk)\"");

    /* The tensors fit, a side file does not; then space is freed. */
    struct run r = run_many("disk/out");
    shell("head -c 2000000 /dev/zero > large.json");
    r.side_file = "large.json";
    assert_status(fixture_write(&r), QT_E_RESOURCE, r.err);
    assert_reason(r.err, "No space left");
    shell("test ! -e disk/out && rm large.json");
    r.side_file = "side.json";
    resume_and_compare(&r);
}

static void test_full_disk(void **state)
{
    (void)state;
    shell("mkdir disk");
    if (mount("tmpfs", "disk", "tmpfs", 0, "size=1m") < 0) {
        print_message("SKIP: cannot mount a small file system: %s\n", strerror(errno));
        skip();
    }
    check_full_disk();
}

/* In a directory owned by this user. */
static bool is_refused(const char *prepare, const char *dir, const char *reason)
{
    struct run r = run_many(dir);
    struct qt_writer *w;
    r.force = true;
    bool refused = system(prepare) == 0 && fixture_open(&w, &r) == QT_E_RESOURCE &&
                   strstr(r.err.reason, reason);
    if (!refused)
        print_error("%s: %s: %s\n", prepare, r.err.file, r.err.reason);
    return system("chmod 755 locked && rm -r locked") == 0 && refused;
}

static bool are_refused(void)
{
    static const char reason[] = "cannot be created in its parent directory: Permission denied";
    return is_refused("mkdir locked && chmod 555 locked", "locked/out", reason) &&
           is_refused("mkdir -p locked/out.partial && chmod 555 locked", "locked/out", reason) &&
           is_refused("mkdir locked && chmod 333 locked", "locked/out", reason) &&
           is_refused("mkdir locked && chmod 666 locked", "locked/out", reason) &&
           is_refused("mkdir locked && chmod 555 locked", "locked", "cannot be replaced") &&
           is_refused("mkdir locked && echo {} >locked/qtool.json && chmod 555 locked", "locked",
                      "cannot be replaced");
}

/* Permissions that the final rename needs are checked before the work. */
static void test_no_permission(void **state)
{
    enum { NOBODY = 65534 };
    (void)state;
    int status;
    shell("mkdir theirs && chmod 755 .");
    if (geteuid() == 0) /* root may write anywhere */
        assert_int_equal(chown("theirs", NOBODY, NOBODY), 0);
    pid_t child = fork();
    if (child == 0)
        _exit(chdir("theirs") == 0 && (geteuid() != 0 || setuid(NOBODY) == 0) && are_refused() ? 0
                                                                                               : 1);
    waitpid(child, &status, 0);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* A mount point cannot be renamed: found before the work; if it appears later, the work is not
 * lost. */
static void test_mounted(void **state)
{
    (void)state;
    struct run r = run_many("mounted");
    r.force = true;
    shell("mkdir source");
    for (int bound = 0; bound < 2; bound++) {
        struct qt_writer *w;
        shell("cp -r ref mounted");
        assert_status(fixture_open(&w, &r), QT_OK, r.err);
        for (size_t u = 0; u < UNITS; u++)
            assert_status(fixture_unit(w, u, &r), QT_OK, r.err);
        if (mount(bound ? "source" : "tmpfs", "mounted", "tmpfs", bound ? MS_BIND : 0, "") < 0) {
            print_message("SKIP: cannot mount: %s\n", strerror(errno));
            qt_writer_close(w);
            skip();
        }
        assert_status(fixture_finish(w, &r), QT_E_RESOURCE, r.err);
        assert_reason(r.err, "mount point");
        qt_writer_close(w);
        expect_refused("mounted", true, "mount point");
        assert_int_equal(umount("mounted"), 0);
        assert_true(same_dirs("mounted", "ref"));
        resume_and_compare(&r);
    }
}

/* The nth allocation of a run fails, for every n: a clean error, no leak, no output, and the next
 * run completes it (tried for some n only, to save time). */
static void without_memory(bool resumed)
{
    long n;
    for (n = 0;; n++) {
        struct run r = run_many("starved");
        r.force = true; /* what the failed run left */
        if (resumed)
            leave_partial(&r, 3);
        r.resume = resumed;
        qt_mem_fail_after(n);
        int rc = fixture_write(&r);
        qt_mem_fail_after(-1);
        if (rc == QT_OK)
            break;
        assert_status(rc, QT_E_RESOURCE, r.err);
        assert_int_not_equal(access("starved", F_OK), 0);
        if (n % 16 == 0)
            resume_and_compare(&r);
    }
    assert_true(n > 500);
    assert_true(same_dirs("starved", "refs"));
    shell("rm -r starved");
}

static void test_without_memory(void **state)
{
    (void)state;
    without_memory(false);
}

static void test_resume_without_memory(void **state)
{
    (void)state;
    without_memory(true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_close_and_resume),
        cmocka_unit_test(test_reopen),
        cmocka_unit_test(test_damaged_progress),
        cmocka_unit_test(test_stale_side_file),
        cmocka_unit_test(test_start_over),
        cmocka_unit_test(test_kill_after_every_call),
        cmocka_unit_test(test_kill_before_every_syscall),
        cmocka_unit_test(test_kill_while_replacing),
        cmocka_unit_test(test_torn_journal),
        cmocka_unit_test(test_damaged_journal),
        cmocka_unit_test(test_other_identity),
        cmocka_unit_test(test_lost_shard),
        cmocka_unit_test(test_damaged_header),
        cmocka_unit_test(test_two_writers),
        cmocka_unit_test(test_existing_output),
        cmocka_unit_test(test_output_appears),
        cmocka_unit_test(test_foreign_partial),
        cmocka_unit_test(test_discard),
        cmocka_unit_test(test_kill_while_discarding),
        cmocka_unit_test(test_wrong_use),
        cmocka_unit_test(test_read_back),
        cmocka_unit_test(test_json_parts),
        cmocka_unit_test(test_file_size_limit),
        cmocka_unit_test(test_full_disk),
        cmocka_unit_test(test_no_permission),
        cmocka_unit_test(test_mounted),
        cmocka_unit_test(test_without_memory),
        cmocka_unit_test(test_resume_without_memory),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
