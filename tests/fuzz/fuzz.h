/*
 * Shared by the fuzz targets. A target is a file fuzz_NAME.c with fuzz_one(), which passes the
 * input to the library as a file and checks the documented properties of every accepted input. Each
 * target is linked with libFuzzer (make fuzz), and with replay.c, which runs the corpus in make
 * test.
 */
#ifndef QT_TESTS_FUZZ_H
#define QT_TESTS_FUZZ_H

#include "base/base.h"
#include "formats/formats.h"

/* Runs one input. A failed check ends the process with abort(). */
void fuzz_one(const uint8_t *data, size_t size);
/* Called once before the first input: creates shared files, and inputs that must be accepted. */
void fuzz_init(void);

/* Runs an input made by fuzz_init, which must be accepted, and writes it to $QT_FUZZ_SEEDS/name if
 * QT_FUZZ_SEEDS is set. For targets whose inputs depend on tables of this build. */
void fuzz_seed(const char *name, const void *data, size_t size);

/* True while fuzz_seed runs an input. */
extern bool fuzz_must_accept;

/* Number of inputs run so far. */
extern size_t fuzz_inputs;

/* A directory of this process, removed at exit. */
const char *fuzz_dir(void);
/* "fuzz_dir()/name"; the result is valid for eight calls. */
const char *fuzz_path(const char *name);
/* Writes the file "fuzz_dir()/name" and returns its path. */
const char *fuzz_write(const char *name, const void *data, size_t size);

#define FUZZ_CHECK(cond)                                                                           \
    do {                                                                                           \
        if (!(cond))                                                                               \
            fuzz_broken(__FILE__, __LINE__, #cond);                                                \
    } while (0)
void fuzz_broken(const char *file, int line, const char *promise) __attribute__((noreturn));

/* True for QT_OK. Any other status must be QT_E_INPUT or QT_E_UNSUPPORTED, with a reason. */
bool fuzz_accepted(int rc, const struct qt_err *err);
/* Checks that rc is QT_OK, for steps of the harness and operations on accepted inputs. */
void fuzz_ok(int rc, const struct qt_err *err);

/* Writes the checkpoint's tensors to the safetensors file `name`, reads the file back, and checks
 * that it has the same tensors with the same data. */
void fuzz_round_trip(const struct qt_ckpt *ckpt, const char *name);

#endif
