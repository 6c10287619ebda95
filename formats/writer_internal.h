/*
 * Private to formats: the parts of the writer of containers and of output.c.
 *
 *   outdir.c         DIR.partial and DIR: locking, removal, the final rename
 *   journal.c        the finished units
 *   checksums.c      SHA256SUMS
 *   running_hashes.c SHA-256 of shards while they are written
 *   writer_plan.c    which tensor goes where
 *   writer_open.c    takes DIR.partial, empty or as an earlier run left it
 *   writer.c         writes and commits tensors
 *   writer_files.c   all other files: progress of the caller, side files, JSON
 *   writer_finish.c  the manifest, the check of what was written, the end
 */
#ifndef QT_FORMATS_WRITER_INTERNAL_H
#define QT_FORMATS_WRITER_INTERNAL_H

#include "formats/formats_internal.h"

#define QT_JOURNAL_NAME "journal"

/* ---- outdir.c ------------------------------------------------------------------------------- */

struct qt_outdir {
    char *dir, *parent, *partial, *old;
    char *mark;    /* path of a file in DIR that says that DIR is being replaced */
    bool empty;    /* DIR.partial had no content, or an empty journal, when it was locked */
    bool finished; /* DIR.partial was a complete container or export: of a run that was killed
                      before the last step, or made by the user */
    int lock_fd;   /* locked DIR.partial, or -1 */
    const struct qt_writer_options *opt;
};

/* Checks `dir` without creating anything; QT_E_USAGE if it exists and may not be replaced. The
 * caller closes *o, after a failure as well. */
int qt_outdir_open(struct qt_outdir *o, const char *dir, const struct qt_writer_options *opt,
                   struct qt_err *err);
void qt_outdir_close(struct qt_outdir *o);
/* Creates DIR.partial if necessary and locks it. QT_E_USAGE if its content is not qtool's. */
int qt_outdir_take(struct qt_outdir *o, struct qt_err *err);
/* A complete container or export in DIR.partial may be deleted only if this run makes the same one:
 * QT_E_USAGE unless it has the identity, which is a member of DIR.partial/RECORD. what: "complete",
 * for the message. */
int qt_outdir_check_finished(const struct qt_outdir *o, const char *record, const json_t *identity,
                             const char *what, struct qt_err *err);
/* Locks a file or directory; QT_E_RESOURCE if another process has locked it. Closing fd unlocks. */
int qt_outdir_lock(int fd, const char *path, struct qt_err *err);
/* Removes all files of DIR.partial except those for which keep(ctx, name) is true. */
int qt_outdir_clear(const struct qt_outdir *o, bool (*keep)(const void *ctx, const char *name),
                    const void *ctx, struct qt_err *err);
/* Writes a new file into DIR.partial, with at most these permissions. */
int qt_outdir_add(const struct qt_outdir *o, const char *name, const void *data, size_t size,
                  unsigned mode, struct qt_err *err);
/* Copies a file into DIR.partial under its own name, with its permissions or fewer. */
int qt_outdir_copy(const struct qt_outdir *o, const char *path, struct qt_err *err);
/* Writes a JSON object into a file of DIR.partial. */
int qt_outdir_json(const struct qt_outdir *o, const char *name, const json_t *value,
                   struct qt_err *err);
/* Removes the journal, renames DIR.partial to DIR and unlocks. QT_E_RESOURCE, without any change,
 * if DIR now may not be replaced. */
int qt_outdir_publish(struct qt_outdir *o, struct qt_err *err);
/* Removes DIR.partial, if it is locked, as far as possible. */
void qt_outdir_discard(struct qt_outdir *o);

/* ---- checksums.c ---------------------------------------------------------------------------- */

/* The SHA-256 of all files of `dir` except the members of the object `omit`. start: a background
 * thread computes them, while the caller only reads the files. running: what has been hashed
 * already, and is settled; or NULL. */
struct qt_checksums;
struct qt_running_hashes;
int qt_checksums_start(struct qt_checksums **out, const char *dir, const json_t *omit,
                       struct qt_running_hashes *running, struct qt_err *err);
/* Waits for them and writes DIR/SHA256SUMS. */
int qt_checksums_write(struct qt_checksums *c, struct qt_err *err);
/* Waits too. Accepts NULL. */
void qt_checksums_close(struct qt_checksums *c);

/* ---- running_hashes.c ----------------------------------------------------------------------- */

struct qt_writer;
int qt_running_hashes_open(struct qt_running_hashes **out, const struct qt_writer *w,
                           struct qt_err *err);
void qt_running_hashes_close(struct qt_running_hashes *r);
/* Tensors of w were committed. Does not wait. Accepts NULL. */
void qt_running_hashes_advance(struct qt_running_hashes *r, const struct qt_writer *w);
/* Tensors of a shard are written again. Accepts NULL. */
void qt_running_hashes_restart(struct qt_running_hashes *r, const struct qt_writer *w,
                               size_t shard);
/* Waits for what was started, and returns its error. Accepts NULL. */
int qt_running_hashes_settle(struct qt_running_hashes *r, struct qt_err *err);
/* The hash of a file; NULL: none. add: continues it up to byte `to`. */
struct qt_running_hash;
struct qt_running_hash *qt_running_hashes_of(struct qt_running_hashes *r, const char *path);
int qt_running_hash_add(struct qt_running_hash *s, uint64_t to, struct qt_err *err);
void qt_running_hash_digest(struct qt_running_hash *s, uint8_t *digest);

/* ---- journal.c ------------------------------------------------------------------------------ */

/*
 * Each line is a JSON object whose last member is the CRC-32 of the text before it:
 *   {"format":"qtool-journal","version":1,"plan":"0123abcd","identity":{...},"crc":"89abcdef"}
 *   {"unit":"NAME","record":{...},"tensors":[4,5,6],"crc":"01234567"}
 * Lines are only appended. The first line with a wrong CRC was therefore being written when the
 * process died: it is cut off with everything after it.
 */
struct qt_journal {
    char *path;
    int fd;        /* -1 if not open, or not owned */
    uint64_t end;  /* end of the last valid line */
    json_t *units; /* NAME -> offset of its line, or its text if not owned, in journal order */
};

/* Opens the journal of DIR.partial, or creates it; does not change its content. owned: false in the
 * ranks that do not write it: there the units are only in memory. The caller closes *j, after a
 * failure as well. */
int qt_journal_open(struct qt_journal *j, const char *dir, bool owned, struct qt_err *err);
void qt_journal_close(struct qt_journal *j);

/* Reads the lines of an earlier process; *found is false if there is no valid first line.
 * QT_E_RESUME if its identity or plan (arguments of qt_journal_start) was another. */
int qt_journal_load(bool *found, struct qt_journal *j, const char *plan, const json_t *identity,
                    struct qt_err *err);
/* *units = the number of finished units by the number of lines, without a check of the lines. */
int qt_journal_count(size_t *units, const struct qt_journal *j, struct qt_err *err);
/* Empties the journal on disk, before the data of its units changes. The first bytes of its first
 * line stay: they mark DIR.partial as qtool's. */
int qt_journal_clear(struct qt_journal *j, struct qt_err *err);
/* Writes the first line. The files of the plan must be on disk. */
int qt_journal_start(struct qt_journal *j, const char *plan, const json_t *identity,
                     struct qt_err *err);
/* Appends a unit and syncs. The data of `tensors`, an array of tensor numbers, must be on disk. */
int qt_journal_add(struct qt_journal *j, const char *unit, const json_t *record, json_t *tensors,
                   struct qt_err *err);

/* *line = the line of a unit, read from the file; the caller releases it with json_decref.
 * QT_E_RESOURCE if it differs from what was written. */
int qt_journal_read(json_t **line, const struct qt_journal *j, const char *unit,
                    struct qt_err *err);

/* The lines of all units, for qt_journal_take in ranks that do not own the journal. The caller
 * frees *text with qt_free. */
int qt_journal_text(char **text, size_t *size, const struct qt_journal *j, struct qt_err *err);
int qt_journal_take(struct qt_journal *j, const char *text, size_t size, struct qt_err *err);

/* Begins the JSON file DIR/NAME. */
int qt_json_out_open(struct qt_json_out *o, const char *dir, const char *name, struct qt_err *err);

/* ---- writer*.c ------------------------------------------------------------------------------ */

/* A safetensors file of the plan. */
struct qt_planned_shard {
    char *path;
    int fd; /* open while it has unsynced data, else -1 */
    uint64_t size;
    char *header;
    size_t header_size;
};

/* A tensor of the plan. */
struct qt_planned_tensor {
    char *name;
    size_t shard;
    uint64_t offset; /* of the data in the shard */
    uint64_t size, written;
    bool committed;
};

struct qt_writer {
    struct qt_writer_options opt;
    struct qt_outdir out;
    struct qt_journal journal;
    json_t *unlisted; /* names of files that SHA256SUMS does not list */
    bool scrap;       /* DIR.partial holds nothing to resume from yet */
    bool resumed;     /* the journal has records of an earlier run */
    struct qt_planned_shard *shards;
    size_t nshards;
    struct qt_planned_tensor *places;
    size_t count;
    size_t *touched; /* tensors written since the last commit */
    size_t ntouched;
    /* NULL: with several ranks, whose tensors are in other caches. */
    struct qt_running_hashes *running;
    json_t *news; /* with several ranks: lines of the units of this rank that others do not know */
};

/* Rank 0 owns DIR.partial: it creates and removes files, holds the locks and the journal, and
 * finishes. The other ranks only write tensors, at the same offsets. */
bool qt_writer_owns(const struct qt_writer *w);
/* Plans the shards of n tensors and their headers. limit: bytes of a shard, 0: 4 GiB. */
int qt_writer_plan(struct qt_writer *w, const struct qt_tensor *tensors, size_t n, uint64_t limit,
                   struct qt_err *err);
/* *out identifies the plan: names, dtypes, shapes and offsets. The caller frees it with qt_free. */
int qt_writer_plan_digest(char **out, const struct qt_writer *w, struct qt_err *err);
bool qt_writer_is_shard(const struct qt_writer *w, const char *name);
/* Marks the tensors of a unit of the journal as written. QT_E_RESUME if the journal contradicts the
 * plan. */
int qt_writer_mark(struct qt_writer *w, const char *unit, struct qt_err *err);
/* The error of what only a wrong caller can cause; in a resumed run also wrong records of the
 * journal. */
int qt_writer_contradiction(const struct qt_writer *w, const char *tensor, const char *what,
                            struct qt_err *err);

/* File names by enum qt_progress. */
extern const char *const qt_progress_names[QT_PROGRESS_KINDS];
bool qt_progress_file(const char *name);
int qt_writer_drop_progress(const struct qt_writer *w, struct qt_err *err);

#endif
