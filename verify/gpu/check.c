/* verify --device: helpers of all checkers: device memory between guards, and times. */
#include "verify/gpu/device.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const size_t qt_device_times[QT_DEVICE_TIMES] = {1, 16, 128};

void device_fault(struct qt_device_tensor *t, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    if (t->faults++ == 0)
        vsnprintf(t->fault, sizeof t->fault, fmt, ap);
    va_end(ap);
}

const char *device_value_text(char text[32], double v)
{
    if (isnan(v))
        return "NaN";
    snprintf(text, 32, "%g", v);
    return text;
}

/* ---- memory between guards ------------------------------------------------------------------ */

int device_poison(char **data, struct device *d, struct gpu_buffer *b, size_t bytes,
                  struct qt_err *err)
{
    int rc = gpu_buffer_need(b, d->gpu, bytes + 2 * DEVICE_GUARD, err);
    if (rc == QT_OK)
        rc = d->gpu->fill(d->gpu, b->data, DEVICE_POISON, bytes + 2 * DEVICE_GUARD, err);
    *data = rc == QT_OK ? (char *)b->data + DEVICE_GUARD : NULL;
    return rc;
}

static bool all_bytes(const unsigned char *p, int byte, size_t n)
{
    return n == 0 || (p[0] == byte && memcmp(p, p + 1, n - 1) == 0);
}

static int check_guard(bool *intact, struct device *d, const char *at, struct qt_err *err)
{
    unsigned char guard[DEVICE_GUARD];
    int rc = d->gpu->download(d->gpu, guard, at, DEVICE_GUARD, err);
    *intact = *intact && rc == QT_OK && all_bytes(guard, DEVICE_POISON, DEVICE_GUARD);
    return rc;
}

int device_check_guards(struct device *d, struct qt_device_tensor *t, const char *run,
                        const char *what, const char *data, size_t bytes, struct qt_err *err)
{
    bool intact = true;
    int rc;
    QT_TRY(check_guard(&intact, d, data - DEVICE_GUARD, err));
    QT_TRY(check_guard(&intact, d, data + bytes, err));
    if (!intact)
        device_fault(t, "%s: the kernel wrote outside the %s", run, what);
done:
    return rc;
}

int device_workspace(char **data, struct device *d, size_t bytes, struct qt_err *err)
{
    int rc = device_poison(data, d, &d->workspace, bytes, err);
    if (rc == QT_OK)
        rc = d->gpu->fill(d->gpu, *data, 0, qt_min_size(bytes, QTOOL_WORKSPACE_ZEROED), err);
    return rc;
}

int device_check_workspace(struct device *d, struct qt_device_tensor *t, const char *run,
                           const char *data, size_t bytes, struct qt_err *err)
{
    size_t zeroed = qt_min_size(bytes, QTOOL_WORKSPACE_ZEROED);
    int rc;
    QT_TRY(qt_array_grow(&d->bytes, &d->bytes_capacity, zeroed + 1, 1, err));
    QT_TRY(device_check_guards(d, t, run, "workspace", data, bytes, err));
    QT_TRY(d->gpu->download(d->gpu, d->bytes, data, zeroed, err));
    if (!all_bytes(d->bytes, 0, zeroed))
        device_fault(t, "%s: the kernel did not reset the workspace counters to zero", run);
done:
    return rc;
}

int device_check_sections(struct device *d, struct qt_device_tensor *t, const struct qt_packed *p,
                          const struct gpu_copies *copies, struct qt_err *err)
{
    const char *at = copies->base;
    int rc = QT_OK;
    for (size_t i = 0; i < copies->sections; i++) {
        const struct qt_section *s = &p->section[i];
        QT_TRY(qt_array_grow(&d->bytes, &d->bytes_capacity, s->bytes, 1, err));
        QT_TRY(d->gpu->download(d->gpu, d->bytes, at, s->bytes, err));
        if (memcmp(d->bytes, s->data, s->bytes) != 0)
            device_fault(t, "the kernel modified section %s", s->name);
        at += gpu_section_stride(s->bytes);
    }
done:
    return rc;
}

/* ---- times ---------------------------------------------------------------------------------- */

int device_timing_room(struct device *d, size_t n, size_t k, struct qt_err *err)
{
    size_t most = qt_device_times[QT_DEVICE_TIMES - 1];
    int rc;
    QT_TRY(gpu_buffer_need(&d->timing.x, d->gpu, most * k * 2, err));
    QT_TRY(gpu_buffer_need(&d->timing.y, d->gpu, most * n * 2, err));
    QT_TRY(gpu_fill_random(d->gpu, d->timing.x.data, most * k * 2, 1, err));
done:
    return rc;
}

int device_cublas_times(double us[QT_DEVICE_TIMES], struct device *d, size_t n, size_t k,
                        struct qt_err *err)
{
    struct device_cublas c = {.n = n, .k = k, .us = {NAN, NAN, NAN}};
    struct gpu_dense dense = {0};
    int rc = QT_OK;
    for (size_t i = 0; i < d->cublas_count; i++)
        if (d->cublas[i].n == n && d->cublas[i].k == k) {
            memcpy(us, d->cublas[i].us, sizeof d->cublas[i].us);
            return QT_OK;
        }
    if (d->gpu->has_cublas) {
        rc = gpu_dense_new(&dense, d->gpu, n, k, err);
        if (rc < 0 && rc != QT_E_RESOURCE) /* out of memory: no cuBLAS times */
            goto done;
    }
    for (size_t i = 0; dense.weights && i < QT_DEVICE_TIMES; i++)
        QT_TRY(gpu_time_cublas(&c.us[i], d->gpu, &dense, qt_device_times[i], &d->timing, err));
    QT_TRY(qt_array_grow(&d->cublas, &d->cublas_capacity, d->cublas_count + 1, sizeof c, err));
    d->cublas[d->cublas_count++] = c;
    memcpy(us, c.us, sizeof c.us);
done:
    gpu_dense_free(&dense, d->gpu);
    return rc;
}

void device_close(struct device *d)
{
    gpu_buffer_free(&d->x, d->gpu);
    gpu_buffer_free(&d->y, d->gpu);
    gpu_buffer_free(&d->workspace, d->gpu);
    gpu_buffer_free(&d->dequantized[0], d->gpu);
    gpu_buffer_free(&d->dequantized[1], d->gpu);
    gpu_operands_free(&d->timing, d->gpu);
    qt_free(d->cublas);
    qt_free(d->bytes);
    qt_free(d->first);
    qt_free(d->second);
    qt_free(d->widest);
}
