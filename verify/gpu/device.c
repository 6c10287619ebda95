/* verify --device: runs the tensors and the KV cache of a container through their kernels.
 * matmul.c, w4ax.c, moe.c and kv.c have the checks. */
#include "verify/gpu/device.h"

#include <stdio.h>

/* QT_E_UNSUPPORTED becomes a row with the reason; other errors end the run. */
static int finish_row(struct qt_device_report *out, struct qt_device_tensor *t, int rc,
                      struct qt_err *err)
{
    if (rc == QT_E_UNSUPPORTED) {
        snprintf(t->missing, sizeof t->missing, "%.*s", (int)sizeof t->missing - 1, err->reason);
        out->missing++;
        rc = QT_OK;
    } else if (rc < 0 && err && !err->tensor[0]) {
        snprintf(err->tensor, sizeof err->tensor, "%s", t->name);
    }
    out->faults += t->faults;
    return rc;
}

static int check_entry(struct qt_device_report *out, struct device *d,
                       const struct qt_container *container, size_t i, struct qt_err *err)
{
    const struct qt_entry *e = qt_container_entry(container, i);
    struct qt_device_tensor *t = &out->tensors[i];
    struct qt_packed packed = {0};
    int rc;
    *t = (struct qt_device_tensor){.name = e->name, .spec = e->spec, .n = e->n, .k = e->k};
    QT_TRY(qt_packed_open(&packed, container, e, err));
    rc = gpu_is_w4ax(&packed) ? device_w4ax(t, d, &packed, 1000 * i, err)
                              : device_matmul(t, d, &packed, 1000 * i, err);
    rc = finish_row(out, t, rc, err);
done:
    qt_packed_free(&packed);
    return rc;
}

/* Appends the rows of layers of experts, after those of their tensors. Layers without grouped
 * products have no row: there is a kernel for each of their tensors, or its row says why not. */
static int check_layers(struct qt_device_report *out, struct device *d,
                        const struct qt_container *c, const struct qt_log *log, struct qt_err *err)
{
    struct device_layer layer;
    int rc = QT_OK;
    for (size_t i = 0; i < qt_container_count(c); i++) {
        const struct qt_entry *e = qt_container_entry(c, i);
        if (!device_is_layer(&layer, c, e))
            continue;
        struct qt_device_tensor *t = &out->tensors[out->count];
        *t = (struct qt_device_tensor){.spec = e->spec, .n = e->n, .k = e->k};
        QT_TRY(qt_string_format(&t->layer, err, "%.*s", (int)layer.prefix - 1, e->name));
        t->name = t->layer;
        rc = device_experts(t, d, &layer, c, 1000 * i + 500, err);
        if (rc == QT_E_UNSUPPORTED) {
            qt_log_message(log, QT_LOG_INFO, "%s: no grouped product: %s", t->name, err->reason);
            qt_free(t->layer);
            rc = QT_OK;
            continue;
        }
        out->count++;
        QT_TRY(finish_row(out, t, rc, err));
        qt_log_progress(log, "experts", (double)i + 1, (double)qt_container_count(c));
    }
done:
    return rc;
}

static size_t count_layers(const struct qt_container *c)
{
    struct device_layer layer;
    size_t n = 0;
    for (size_t i = 0; i < qt_container_count(c); i++)
        n += device_is_layer(&layer, c, qt_container_entry(c, i));
    return n;
}

/* Appends the row of the cache. Its kernels take nothing from the container but the shape. */
static int check_cache(struct qt_device_report *out, struct device *d, enum qt_kv_keys keys,
                       const struct qt_model_info *model, struct qt_err *err)
{
    struct qt_device_tensor *t = &out->tensors[out->count++];
    *t = (struct qt_device_tensor){
        .name = "KV cache", .spec = "kv4", .n = model->kv_heads, .k = model->head_dim};
    return finish_row(out, t, device_cache(t, d, keys, model, err), err);
}

static int check_all(struct qt_device_report *out, struct device *d, const struct qt_container *c,
                     enum qt_kv_keys keys, const struct qt_model_info *model,
                     const struct qt_log *log, struct qt_err *err)
{
    size_t count = qt_container_count(c);
    double done = 0, total = 0;
    int rc;
    QT_TRY(qt_array_new(&out->tensors, count + count_layers(c) + (model ? 1 : 0),
                        sizeof *out->tensors, err));
    for (size_t i = 0; i < count; i++)
        total += (double)qt_container_entry(c, i)->n * (double)qt_container_entry(c, i)->k;
    for (size_t i = 0; i < count; i++) {
        out->count++;
        QT_TRY(check_entry(out, d, c, i, err));
        done += (double)out->tensors[i].n * (double)out->tensors[i].k;
        qt_log_progress(log, "kernels", done, total);
    }
    QT_TRY(check_layers(out, d, c, log, err));
    if (model)
        QT_TRY(check_cache(out, d, keys, model, err));
done:
    return rc;
}

int qt_verify_device(struct qt_device_report *out, const struct qt_container *c, struct qt_gpu *gpu,
                     struct qt_backend *cpu, const struct qt_log *log, struct qt_err *err)
{
    struct device d = {.gpu = gpu, .cpu = cpu};
    struct qt_weights weights = qt_weights_of_container(c);
    const struct qt_model_info *info = NULL;
    struct qt_model *model = NULL;
    struct qt_kv kv = {0};
    int rc;
    *out = (struct qt_device_report){0};
    if (qt_kv_entry(c)) {
        QT_TRY(qt_model_open(&model, &weights, err));
        info = qt_model_info(model);
        QT_TRY(qt_kv_open(&kv, c, info, err));
    }
    QT_TRY(check_all(out, &d, c, kv.keys, info, log, err));
done:
    device_close(&d);
    qt_kv_free(&kv);
    qt_model_close(model);
    if (rc < 0)
        qt_device_free(out);
    return rc;
}

void qt_device_free(struct qt_device_report *report)
{
    for (size_t i = 0; i < report->count; i++)
        qt_free(report->tensors[i].layer);
    qt_free(report->tensors);
    *report = (struct qt_device_report){0};
}
