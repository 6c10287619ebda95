/*
 * Shared by the programs that run qtool on files made wrong on purpose: mutants.c and damage.c.
 * A failure of the harness itself (no memory, no directory) ends the program with status 99.
 */
#ifndef QT_TESTS_ROBUST_H
#define QT_TESTS_ROBUST_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- random numbers and bytes --------------------------------------------------------------- */

void random_start(uint64_t seed);
/* A number in [0, n); 0 if n is 0. */
size_t below(size_t n);

struct bytes {
    unsigned char *data;
    size_t size;
};

struct bytes bytes_copy(const void *data, size_t size);
struct bytes bytes_read(const char *path);
void bytes_write(const char *path, struct bytes b);
void bytes_free(struct bytes *b);
/* Replaces `removed` bytes at `at` by `size` bytes of `with`, which must not lie in b. */
void bytes_splice(struct bytes *b, size_t at, size_t removed, const void *with, size_t size);

/* ---- running qtool -------------------------------------------------------------------------- */

/* Makes an empty directory, goes there and runs `qtool` from now on. `root`: the repository. */
void robust_begin(const char *qtool, char root[4096]);
/* Removes the directory unless `keep`, which prints its name. */
void robust_end(bool keep);
/* A shell command that must succeed. */
void shell(const char *format, ...) __attribute__((format(printf, 1, 2)));

enum { SECONDS_PER_RUN = 120 };

/* The last run: its exit status, or minus the signal that ended it (SIGALRM after SECONDS_PER_RUN);
 * stdout and stderr are in the files out.txt and err.txt. */
struct run {
    char command[1024];
    int status;
};
/* Runs "qtool FORMAT --threads 1 --json"; words are separated by single spaces. */
void qtool(struct run *run, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* What is wrong with how the run ended, or NULL. Its status must be among `allowed` (ends with -1),
 * stdout one JSON document that says the same status, a failure must have a message on stderr, and
 * no checker may have reported. */
const char *run_fault(const struct run *run, const int *allowed);

/* ---- mutators ------------------------------------------------------------------------------- */

/* Each makes one random change to *b. A change of a structure keeps the parts around it valid
 * (lengths, checksums), so that a reader gets as far as the change. */
void mutate_raw(struct bytes *b);         /* bits, numbers, ranges */
void mutate_text(struct bytes *b);        /* lines, encodings */
void mutate_json(struct bytes *b);        /* values, keys, members; also the header of .npy */
void mutate_lines(struct bytes *b);       /* a JSON document per line */
void mutate_safetensors(struct bytes *b); /* the header, its length, data */
void mutate_qcal(struct bytes *b);        /* the header, its document, statistics with their CRC */
void mutate_npy(struct bytes *b);         /* the header, its length, data */
void mutate_torch(struct bytes *b);       /* pickle opcodes, zip entries and headers, storages */
void mutate_gzip(struct bytes *b, void (*inner)(struct bytes *)); /* contents or stream */
void mutate_journal(struct bytes *b); /* lines, records with their CRC */

/* ---- the same in another form --------------------------------------------------------------- */

/* Each writes *b in another way that means the same: white space, escapes, the order of keys,
 * compression, the place of parts in the file. Nothing changes if *b is not of the format. */
void restyle_json(struct bytes *b);
void restyle_lines(struct bytes *b);
void restyle_safetensors(struct bytes *b);
void restyle_npy(struct bytes *b);
void restyle_torch(struct bytes *b);
void restyle_gzip(struct bytes *b);

/* ---- containers ----------------------------------------------------------------------------- */

/* Writes DIR/SHA256SUMS again for the files that it lists. */
void container_sign(const char *dir);
/* Where a stored tensor's data lies in the only file of a container. */
struct place {
    char name[512];
    size_t at, size;
};
/* All stored tensors; the caller frees the array. */
struct place *container_places(size_t *count, const char *dir);
/* Sets the CRC in DIR/qtool.json of every stored tensor to that of its data. */
void container_sign_tensors(const char *dir);

#endif
