/* A small model and a driver that writes it to a container, as quantize does. */
#ifndef QT_TEST_CONTAINER_FIXTURE_H
#define QT_TEST_CONTAINER_FIXTURE_H

#include "formats/formats.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>

#include <cmocka.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { TENSORS = 8, UNITS = 5, MANY_SHARDS = 100 /* bytes per shard */ };

/* Names as long as real ones. Odd sizes, an empty tensor, sections and copied tensors mixed. */
static const struct qt_tensor fixture_tensors[TENSORS] = {
    {"embed.weight", NULL, QT_F16, 2, {6, 4}, 24, 48, NULL},
    {"layers.0.weight.q.plane0", NULL, QT_U32, 2, {8, 4}, 32, 128, NULL},
    {"layers.0.weight.q.scale", NULL, QT_F16, 1, {8}, 8, 16, NULL},
    {"l0.norm", NULL, QT_F32, 1, {5}, 5, 20, NULL},
    {"layers.1.weight.q.plane0", NULL, QT_U8, 2, {3, 7}, 21, 21, NULL},
    {"layers.1.weight.q.scale", NULL, QT_F16, 1, {3}, 3, 6, NULL},
    {"layers.1.weight.q.csr_val", NULL, QT_U16, 1, {0}, 0, 0, NULL},
    {"lm_head", NULL, QT_BF16, 2, {4, 4}, 16, 32, NULL},
};

static const struct {
    const char *name;
    size_t first, count;
    bool quantized;
} fixture_units[UNITS] = {
    {"embed.weight", 0, 1, false},   {"layers.0.weight", 1, 2, true}, {"l0.norm", 3, 1, false},
    {"layers.1.weight", 4, 3, true}, {"lm_head", 7, 1, false},
};

struct run {
    const char *dir;
    bool force, resume;
    uint64_t shard_bytes;
    const json_t *identity; /* NULL: fixture_identity */
    const char *side_file;  /* copied unless NULL */
    long kill_after;        /* writer calls before this process kills itself; negative: never */
    struct qt_err err;
};

static inline unsigned char *fixture_data(size_t i)
{
    size_t n = fixture_tensors[i].nbytes;
    unsigned char *data = malloc(n ? n : 1);
    for (size_t b = 0; b < n; b++)
        data[b] = (unsigned char)(37 * i + 11 * b + b * b % 251);
    return data;
}

static inline json_t *fixture_identity(void)
{
    return json_pack("{s:{s:s, s:[{s:s, s:i}, {s:s, s:i}]}, s:{s:s, s:f, s:b}}", "source", "format",
                     "safetensors", "files", "name", "a", "size", 100, "name", "b", "size", 200,
                     "options", "scheme", "nf4:g=64", "damp", 0.01, "strict", 0);
}

static inline json_t *fixture_stored(size_t i)
{
    const struct qt_tensor *t = &fixture_tensors[i];
    unsigned char *data = fixture_data(i);
    char crc[9];
    snprintf(crc, sizeof crc, "%08x", qt_crc32(0, data, t->nbytes));
    free(data);
    json_t *o =
        json_pack("{s:s, s:[], s:s}", "dtype", qt_dtype_name(t->dtype), "shape", "crc32", crc);
    for (int d = 0; d < t->ndim; d++)
        json_array_append_new(json_object_get(o, "shape"), json_integer((json_int_t)t->shape[d]));
    return o;
}

/* The record of unit u: stored in the journal, then in the manifest. */
static inline json_t *fixture_record(size_t u)
{
    if (!fixture_units[u].quantized)
        return fixture_stored(fixture_units[u].first);
    json_t *o = json_pack("{s:s, s:s, s:[i,i], s:i, s:f, s:[]}", "scheme", "nf4:g=64", "layout",
                          "frag16x64", "shape", 8, 16, "scale_exp2", u == 1 ? 0 : -3, "bpw",
                          4.0 + 1.0 / 3.0, "sections");
    for (size_t k = 0; k < fixture_units[u].count; k++) {
        size_t i = fixture_units[u].first + k;
        json_t *section = fixture_stored(i);
        json_object_set_new(section, "name",
                            json_string(strstr(fixture_tensors[i].name, ".q.") + 3));
        json_array_append_new(json_object_get(o, "sections"), section);
    }
    return o;
}

/* Made from the writer's records, so that a record lost or changed by the journal changes the
 * bytes. NULL if a record cannot be read. */
static inline json_t *fixture_manifest(const struct qt_writer *w, struct qt_err *err)
{
    json_t *m = json_pack("{s:s, s:i, s:{}, s:{}}", "format", "qtool", "format_version", 1,
                          "tensors", "copied");
    for (size_t u = 0; u < UNITS; u++) {
        json_t *record = NULL;
        if (w && qt_writer_done(w, fixture_units[u].name) &&
            qt_writer_record(&record, w, fixture_units[u].name, err) < 0) {
            json_decref(m);
            return NULL;
        }
        json_object_set_new(json_object_get(m, fixture_units[u].quantized ? "tensors" : "copied"),
                            fixture_units[u].name, record ? record : fixture_record(u));
    }
    return m;
}

static inline void one_call(struct run *r)
{
    if (r->kill_after >= 0 && r->kill_after-- == 0)
        raise(SIGKILL);
}

static inline int fixture_open(struct qt_writer **w, struct run *r)
{
    json_t *identity = r->identity ? NULL : fixture_identity();
    struct qt_writer_options opt = {
        .force = r->force, .resume = r->resume, .max_shard_bytes = r->shard_bytes};
    int rc = qt_writer_open(w, r->dir, fixture_tensors, TENSORS,
                            r->identity ? r->identity : identity, &opt, &r->err);
    json_decref(identity);
    return rc;
}

/* Writes unit u, each tensor in two halves, the second half first. */
static inline int fixture_unit(struct qt_writer *w, size_t u, struct run *r)
{
    json_t *record = fixture_record(u);
    int rc = QT_OK;
    for (size_t k = 0; k < fixture_units[u].count && rc == QT_OK; k++) {
        size_t i = fixture_units[u].first + k, n = fixture_tensors[i].nbytes, half = n / 2;
        unsigned char *data = fixture_data(i);
        rc = qt_writer_put(w, i, data + half, n - half, half, &r->err);
        one_call(r);
        if (rc == QT_OK)
            rc = qt_writer_put(w, i, data, half, 0, &r->err);
        one_call(r);
        free(data);
    }
    if (rc == QT_OK)
        rc = qt_writer_commit(w, fixture_units[u].name, record, &r->err);
    one_call(r);
    json_decref(record);
    return rc;
}

static inline int fixture_publish(struct qt_writer *w, const json_t *manifest, struct qt_err *err)
{
    struct qt_json_out out;
    int rc;
    QT_TRY(qt_writer_begin_manifest(&out, w, err));
    QT_TRY(qt_json_out_members(&out, manifest, err));
    QT_TRY(qt_json_out_finish(&out, err));
    QT_TRY(qt_writer_finish(w, err));
done:
    qt_json_out_close(&out);
    return rc;
}

static inline int fixture_finish(struct qt_writer *w, struct run *r)
{
    json_t *manifest = fixture_manifest(w, &r->err);
    if (!manifest)
        return (int)r->err.status;
    json_object_set_new(manifest, "identity",
                        r->identity ? json_deep_copy(r->identity) : fixture_identity());
    int rc = fixture_publish(w, manifest, &r->err);
    json_decref(manifest);
    return rc;
}

/* A whole run. Writes the last unit first: the order must not matter. */
static inline int fixture_write(struct run *r)
{
    struct qt_writer *w;
    int rc = fixture_open(&w, r);
    one_call(r);
    for (size_t k = 0; k < UNITS && rc == QT_OK; k++) {
        size_t u = (k + UNITS - 1) % UNITS;
        if (!qt_writer_done(w, fixture_units[u].name))
            rc = fixture_unit(w, u, r);
    }
    if (rc == QT_OK && r->side_file)
        rc = qt_writer_copy_file(w, r->side_file, &r->err);
    one_call(r);
    if (rc == QT_OK)
        rc = fixture_finish(w, r);
    one_call(r);
    qt_writer_close(w);
    return rc;
}

/* ---- directories ---------------------------------------------------------------------------- */

/* mkdtemp where fsync is cheap, if possible; the tests chdir to it. */
static inline int fixture_setup(void **state)
{
    const char *base = getenv("TMPDIR");
    if (!base)
        base = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    char *dir = malloc(strlen(base) + 32);
    sprintf(dir, "%s/qtool-test-XXXXXX", base);
    /* One thread: a process that has run a parallel loop must not fork and run another. */
    qt_threads_set(1);
    *state = dir;
    return mkdtemp(dir) && chdir(dir) == 0 ? 0 : -1;
}

static inline int fixture_teardown(void **state)
{
    char command[512];
    snprintf(command, sizeof command, "rm -rf '%s'", (char *)*state);
    free(*state);
    return chdir("/") == 0 ? system(command) : -1;
}

static inline void shell(const char *command)
{
    assert_int_equal(system(command), 0);
}

/* True when both directories hold the same files with the same bytes. */
static inline bool same_dirs(const char *a, const char *b)
{
    char command[256];
    snprintf(command, sizeof command, "diff -r '%s' '%s' >&2", a, b);
    return system(command) == 0;
}

static inline void assert_status_at(int rc, int expected, const struct qt_err *err, int line)
{
    if (rc != expected)
        print_error("line %d: status %d, not %d: %s: %s: %s\n", line, rc, expected, err->file,
                    err->tensor, err->reason);
    assert_int_equal(rc, expected);
}
/* Evaluates rc once, before err. */
#define assert_status(rc, expected, err) assert_status_at(rc, expected, &(err), __LINE__)

#define assert_reason(err, part)                                                                   \
    do {                                                                                           \
        if (!strstr((err).reason, part))                                                           \
            print_error("'%s' is not in '%s'\n", part, (err).reason);                              \
        assert_non_null(strstr((err).reason, part));                                               \
    } while (0)

#endif
