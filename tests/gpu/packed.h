/* Random matrices that pack/ quantizes and decodes, in host memory. */
#ifndef QT_TESTS_GPU_PACKED_H
#define QT_TESTS_GPU_PACKED_H

#include "pack/pack.h"
#include "tests/gpu/check.h"

/* Returns the decoded weights [n][k], which the caller frees. Before quantization they lie between
 * -3 size and 3 size. */
static inline float *packed_random(struct qt_packed *out, const char *scheme, size_t n, size_t k,
                                   float size)
{
    struct qt_err err = {0};
    struct qt_spec spec;
    float *w = malloc(n * k * sizeof *w), *decoded = malloc(n * k * sizeof *decoded);
    for (size_t i = 0; i < n * k; i++)
        w[i] = size * (random_float() + random_float() + random_float());
    const struct qt_matrix source = {w, QT_F32, n, k, "test", scheme};
    if (qt_spec_parse(&spec, scheme, &err) < 0 ||
        qt_packed_quantize(out, &spec, &source, NULL, NULL, &err) < 0 ||
        qt_packed_decode(decoded, out, 0, n, &err) < 0) {
        printf("%s: %s\n", scheme, err.reason);
        exit(1);
    }
    free(w);
    return decoded;
}

#endif
