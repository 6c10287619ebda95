/* A random matrix, quantized and decoded by pack/, in host and device memory. */
#ifndef QT_TESTS_GPU_MATRIX_H
#define QT_TESTS_GPU_MATRIX_H

#include "tests/gpu/packed.h"
#include "verify/verify.h"

struct matrix {
    struct qt_packed packed;
    struct qtool_matmul_weight weight; /* device */
    float *decoded;                    /* host [n][k] */
    float *device_decoded;
};

static inline struct qtool_matmul_weight upload_packed(const struct qt_packed *p)
{
    const void *section[QT_MAX_SECTIONS];
    struct qtool_matmul_weight w;
    struct qt_err err = {0};
    for (size_t i = 0; i < p->nsections; i++)
        section[i] = upload(p->section[i].data, p->section[i].bytes);
    if (qt_gpu_weight(&w, p, section, &err) < 0) {
        printf("%s: %s\n", p->spec.text, err.reason);
        exit(1);
    }
    return w;
}

static inline void matrix_new(struct matrix *m, const char *scheme, size_t n, size_t k, float size)
{
    m->decoded = packed_random(&m->packed, scheme, n, k, size);
    m->weight = upload_packed(&m->packed);
    m->device_decoded = upload(m->decoded, n * k * sizeof *m->decoded);
}

static inline void matrix_free(struct matrix *m)
{
    for (int i = 0; i < 3; i++)
        CHECK(cudaFree((void *)m->weight.plane[i]));
    CHECK(cudaFree((void *)m->weight.scale));
    CHECK(cudaFree((void *)m->weight.table));
    CHECK(cudaFree((void *)m->weight.zero));
    CHECK(cudaFree(m->device_decoded));
    qt_packed_free(&m->packed);
    free(m->decoded);
}

#endif
