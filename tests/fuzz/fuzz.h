/*
 * What fuzz targets share. A target is a file fuzz_NAME.c with fuzz_one(): it gives the input to
 * the library as a file, and checks what is documented of everything that is accepted. Each is
 * linked with libFuzzer (make fuzz), and with replay.c, which runs the corpus in make test.
 */
#ifndef QT_TESTS_FUZZ_H
#define QT_TESTS_FUZZ_H

#include "base/base.h"
#include "formats/formats.h"

/* Looks at one input. Ends the process with abort() where a promise is broken. */
void fuzz_one(const uint8_t *data, size_t size);
/* Once, before the first input: makes what all inputs share, and inputs that must be accepted. */
void fuzz_init(void);

/* An input that fuzz_init has made. It is run, and written to $QT_FUZZ_SEEDS/name if that is set:
 * for targets whose inputs follow from the tables of this build. */
void fuzz_seed(const char *name, const void *data, size_t size);

/* True while inputs are run that must be accepted. */
extern bool fuzz_must_accept;

/* Inputs that have been run. */
extern size_t fuzz_inputs;

/* A directory of this process, removed at exit. */
const char *fuzz_dir(void);
/* "fuzz_dir()/name", one of the last eight. */
const char *fuzz_path(const char *name);
/* Writes a file there and returns its path. */
const char *fuzz_write(const char *name, const void *data, size_t size);

#define FUZZ_CHECK(cond)                                                                           \
    do {                                                                                           \
        if (!(cond))                                                                               \
            fuzz_broken(__FILE__, __LINE__, #cond);                                                \
    } while (0)
void fuzz_broken(const char *file, int line, const char *promise) __attribute__((noreturn));

/* A refusal must be the input's fault and say why. Returns true for QT_OK. */
bool fuzz_accepted(int rc, const struct qt_err *err);
/* A step of the harness itself, or what follows from an accepted input: must be QT_OK. */
void fuzz_ok(int rc, const struct qt_err *err);

/* Writes the checkpoint's tensors to the safetensors file `name`, reads it back, and checks that
 * the same tensors with the same data are in it. */
void fuzz_round_trip(const struct qt_ckpt *ckpt, const char *name);

#endif
