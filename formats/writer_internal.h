/*
 * Private to the writer: what writer.c stands on.
 *
 *   outdir.c   DIR.partial and DIR: whose they are, what may be removed, the rename
 *   journal.c  which units are finished and safe on disk
 *   checksums.c  SHA256SUMS
 */
#ifndef QT_FORMATS_WRITER_INTERNAL_H
#define QT_FORMATS_WRITER_INTERNAL_H

#include "formats/formats_internal.h"

#define QT_JOURNAL_NAME "journal"

/* ---- outdir.c ------------------------------------------------------------------------------- */

struct qt_outdir {
    char *dir, *parent, *partial, *old;
    char *mark; /* in DIR, before it is DIR.old: that it is being replaced */
    bool force;
    bool empty;    /* DIR.partial was, or had only begun to be filled, when it was taken */
    bool finished; /* it was a complete container: of a run that was killed before the last step, or
                      somebody's own */
    int lock_fd;   /* DIR.partial, held locked; -1: it is not (or no longer) ours */
};

/* Checks `dir` (QT_E_USAGE when it exists and may not be replaced); makes nothing yet. On failure,
 * too, *o may be closed. */
int qt_outdir_open(struct qt_outdir *o, const char *dir, bool force, struct qt_err *err);
void qt_outdir_close(struct qt_outdir *o);
/* Makes DIR.partial if need be and locks it. QT_E_USAGE when what is in it is not qtool's. */
int qt_outdir_take(struct qt_outdir *o, struct qt_err *err);
/* Locks a file or directory against other processes (QT_E_RESOURCE); closing fd unlocks. */
int qt_outdir_lock(int fd, const char *path, struct qt_err *err);
/* Removes all files of DIR.partial but those for which keep(ctx, name). */
int qt_outdir_clear(const struct qt_outdir *o, bool (*keep)(const void *ctx, const char *name),
                    const void *ctx, struct qt_err *err);
/* Removes the journal and makes DIR.partial DIR. The lock is given up. QT_E_RESOURCE, and nothing
 * is changed, when what is at DIR by now may not be replaced. */
int qt_outdir_publish(struct qt_outdir *o, struct qt_err *err);
/* Removes DIR.partial, if it is ours, as far as that is possible. */
void qt_outdir_discard(struct qt_outdir *o);

/* ---- checksums.c ---------------------------------------------------------------------------- */

/* Writes DIR/SHA256SUMS over the files of `dir`, but for those that are members of `omit`. */
int qt_checksums_write(const char *dir, const json_t *omit, struct qt_err *err);

/* ---- journal.c ------------------------------------------------------------------------------ */

/*
 * A line is a JSON object in one line, whose last member is the CRC-32 of the text before it:
 *   {"format":"qtool-journal","version":1,"plan":"0123abcd","identity":{...},"crc":"89abcdef"}
 *   {"unit":"NAME","record":{...},"tensors":[4,5,6],"crc":"01234567"}
 * Lines are only ever appended, so whatever follows the first line that does not check is what was
 * being written when the process died, and is cut off.
 */
struct qt_journal {
    char *path;
    int fd;        /* -1 when not open */
    uint64_t end;  /* of the last line that checks */
    json_t *units; /* NAME -> its line, in journal order */
};

/* Creates the file if need be and leaves its content alone. On failure too, *j may be closed. */
int qt_journal_open(struct qt_journal *j, const char *dir, struct qt_err *err);
void qt_journal_close(struct qt_journal *j);

/* Reads what an earlier process wrote; *found is false when there is nothing to go on from.
 * QT_E_RESUME when it was written for another identity or plan (both are what qt_journal_start
 * was given). */
int qt_journal_load(bool *found, struct qt_journal *j, const char *plan, const json_t *identity,
                    struct qt_err *err);
/* Empties the journal for good, before anything it vouches for is changed, but for the first bytes
 * of its first line, by which DIR.partial is known for ours. */
int qt_journal_clear(struct qt_journal *j, struct qt_err *err);
/* Writes the first line; the files of the plan must be on disk. */
int qt_journal_start(struct qt_journal *j, const char *plan, const json_t *identity,
                     struct qt_err *err);
/* Appends a unit and returns when it is on disk; the data of `tensors` (an array of tensor
 * numbers) must be there already. */
int qt_journal_add(struct qt_journal *j, const char *unit, const json_t *record, json_t *tensors,
                   struct qt_err *err);

/* A value as owned text (qt_free) of *size bytes with a NUL behind it. */
int qt_json_text(char **out, size_t *size, const json_t *value, size_t flags, struct qt_err *err);

#endif
