/* Small containers for fuzz targets. */
#ifndef QT_TESTS_FUZZ_QUANTIZED_H
#define QT_TESTS_FUZZ_QUANTIZED_H

#include "pack/pack.h"
#include "tests/fuzz/fuzz.h"

/* Makes the container `name` in fuzz_dir(): a matrix "SCHEME.weight" for each of the n scheme names
 * and a copied tensor "bias". */
void fuzz_quantized(const char *name, const char *const *schemes, size_t n);

/* Opens every entry, and checks that what is accepted decodes, row by row as in one go, and that a
 * matrix is equal to itself. Returns how many entries were accepted. */
size_t fuzz_check_entries(const struct qt_container *c);

#endif
