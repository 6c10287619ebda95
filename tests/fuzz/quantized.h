/* Small containers for fuzz targets. */
#ifndef QT_TESTS_FUZZ_QUANTIZED_H
#define QT_TESTS_FUZZ_QUANTIZED_H

#include "pack/pack.h"
#include "tests/fuzz/fuzz.h"

/* Makes the container `name` in fuzz_dir(): a matrix "SPEC.weight" for each of the n specs and a
 * copied tensor "bias". Calibration results (orders, exponents, precisions) are synthetic. */
void fuzz_quantized(const char *name, const char *const *specs, size_t n);

/* Opens every entry. Checks that accepted matrices obey docs/schemes.md, decode row by row as at
 * once, and are equal to themselves. Returns the number of accepted entries. */
size_t fuzz_check_entries(const struct qt_container *c);

/* invariants.c: check the sections of an accepted matrix (repacked: it passed the repacking check),
 * a decoded row of it, and the input that an accepted entry describes. */
void fuzz_check_sections(const struct qt_packed *p, bool repacked);
void fuzz_check_row(const struct qt_packed *p, size_t r, const float *row);
void fuzz_check_input(const struct qt_container *c, const struct qt_entry *e,
                      const struct qt_packed *p);

#endif
