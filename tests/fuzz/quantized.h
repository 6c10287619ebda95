/* Small containers for fuzz targets. */
#ifndef QT_TESTS_FUZZ_QUANTIZED_H
#define QT_TESTS_FUZZ_QUANTIZED_H

#include "pack/pack.h"
#include "tests/fuzz/fuzz.h"

/* Makes the container `name` in fuzz_dir(): a matrix "SPEC.weight" for each of the n specs and a
 * copied tensor "bias". No model is behind it: what a scheme takes from calibration data (orders,
 * exponents, precisions) is made up. */
void fuzz_quantized(const char *name, const char *const *specs, size_t n);

/* Opens every entry, and checks that what is accepted is what docs/schemes.md says, that it decodes
 * row by row as in one go, and that a matrix is equal to itself. Returns how many entries were
 * accepted. */
size_t fuzz_check_entries(const struct qt_container *c);

/* invariants.c: sections of an accepted matrix (repacked: it has also passed that check); a decoded
 * row of it; the input that an accepted entry describes. */
void fuzz_check_sections(const struct qt_packed *p, bool repacked);
void fuzz_check_row(const struct qt_packed *p, size_t r, const float *row);
void fuzz_check_input(const struct qt_container *c, const struct qt_entry *e,
                      const struct qt_packed *p);

#endif
