/* verify --device: runs the tensors and the KV cache of a container through their kernels.
 * matmul.c, w4ax.c, moe.c and kv.c have the checks. */
#include "verify/gpu/device.h"

#include <stdio.h>

/* The rows: of tensors, of layers of experts, and of the cache. Ranks make them in turn. */
struct rows {
    const struct qt_container *container;
    struct device *device;
    struct qt_comm *comm;
    const struct qt_log *log;
    size_t tensors, layers;
    size_t *first; /* [layers] the first tensor of each */
};

static bool is_mine(const struct rows *rows, size_t row)
{
    return row % qt_comm_size(rows->comm) == qt_comm_rank(rows->comm);
}

/* QT_E_UNSUPPORTED becomes a row with the reason; other errors end the run. */
static int finish_row(struct qt_device_tensor *t, int rc, struct qt_err *err)
{
    if (rc == QT_E_UNSUPPORTED) {
        snprintf(t->missing, sizeof t->missing, "%.*s", (int)sizeof t->missing - 1, err->reason);
        rc = QT_OK;
    } else if (rc < 0 && err && !err->tensor[0]) {
        snprintf(err->tensor, sizeof err->tensor, "%s", t->name);
    }
    return rc;
}

static int check_entry(struct qt_device_tensor *t, const struct rows *rows, size_t i,
                       struct qt_err *err)
{
    const struct qt_entry *e = qt_container_entry(rows->container, i);
    struct qt_packed packed = {0};
    int rc;
    QT_TRY(qt_packed_open(&packed, rows->container, e, err));
    rc = gpu_is_w4ax(&packed) ? device_w4ax(t, rows->device, &packed, 1000 * i, err)
                              : device_matmul(t, rows->device, &packed, 1000 * i, err);
    rc = finish_row(t, rc, err);
done:
    qt_packed_free(&packed);
    return rc;
}

static int check_entries(struct qt_device_report *out, const struct rows *rows, struct qt_err *err)
{
    double done = 0, total = 0;
    int rc = QT_OK;
    for (size_t i = 0; i < rows->tensors; i++) {
        const struct qt_entry *e = qt_container_entry(rows->container, i);
        out->tensors[i] =
            (struct qt_device_tensor){.name = e->name, .spec = e->spec, .n = e->n, .k = e->k};
        total += (double)e->n * (double)e->k;
    }
    for (size_t i = 0; i < rows->tensors && rc == QT_OK; i++) {
        struct qt_device_tensor *t = &out->tensors[i];
        if (is_mine(rows, i))
            rc = check_entry(t, rows, i, err);
        done += (double)t->n * (double)t->k;
        qt_log_progress(rows->log, "kernels", done, total);
    }
    return rc;
}

/* A layer without grouped products has no name: there is a kernel for each of its tensors, or its
 * row says why not. */
static int check_layer(struct qt_device_tensor *t, const struct rows *rows, size_t i,
                       struct qt_err *err)
{
    const struct qt_container *c = rows->container;
    struct device_layer layer;
    device_is_layer(&layer, c, qt_container_entry(c, i));
    int rc = device_experts(t, rows->device, &layer, c, 1000 * i + 500, err);
    if (rc != QT_E_UNSUPPORTED)
        return finish_row(t, rc, err);
    qt_log_message(rows->log, QT_LOG_INFO, "%s: no grouped product: %s", t->name, err->reason);
    t->name = NULL;
    return QT_OK;
}

/* The rows of layers of experts follow those of all tensors. */
static int check_layers(struct qt_device_report *out, const struct rows *rows, struct qt_err *err)
{
    struct device_layer layer;
    int rc = QT_OK;
    for (size_t j = 0; j < rows->layers; j++) {
        const struct qt_entry *e = qt_container_entry(rows->container, rows->first[j]);
        struct qt_device_tensor *t = &out->tensors[rows->tensors + j];
        *t = (struct qt_device_tensor){.spec = e->spec, .n = e->n, .k = e->k};
        device_is_layer(&layer, rows->container, e);
        QT_TRY(qt_string_format(&t->layer, err, "%.*s", (int)layer.prefix - 1, e->name));
        t->name = t->layer;
        if (is_mine(rows, rows->tensors + j))
            QT_TRY(check_layer(t, rows, rows->first[j], err));
        qt_log_progress(rows->log, "experts", (double)j + 1, (double)rows->layers);
    }
done:
    return rc;
}

static int find_layers(struct rows *rows, struct qt_err *err)
{
    struct device_layer layer;
    rows->tensors = qt_container_count(rows->container);
    int rc = qt_array_new(&rows->first, rows->tensors, sizeof *rows->first, err);
    for (size_t i = 0; i < rows->tensors && rc == QT_OK; i++)
        if (device_is_layer(&layer, rows->container, qt_container_entry(rows->container, i)))
            rows->first[rows->layers++] = i;
    return rc;
}

/* The row of the cache is the last. Its kernels take nothing from the container but the shape. */
static int check_cache(struct qt_device_report *out, const struct rows *rows, enum qt_kv_keys keys,
                       const struct qt_model_info *model, struct qt_err *err)
{
    const size_t row = rows->tensors + rows->layers;
    struct qt_device_tensor *t = &out->tensors[row];
    *t = (struct qt_device_tensor){
        .name = "KV cache", .spec = "kv4", .n = model->kv_heads, .k = model->head_dim};
    return is_mine(rows, row) ? finish_row(t, device_cache(t, rows->device, keys, model, err), err)
                              : QT_OK;
}

/* Gives all ranks the rows of the others. */
static int gather_rows(struct qt_device_report *out, struct qt_comm *comm, struct qt_err *err)
{
    const size_t size = qt_comm_size(comm), n = out->count;
    struct qt_device_tensor *all;
    int rc;
    if (size == 1)
        return QT_OK;
    QT_TRY(qt_array_new(&all, size, n * sizeof *all, err));
    QT_TRY(qt_comm_gather(comm, all, out->tensors, n * sizeof *all, err));
    for (size_t i = 0; i < n; i++) {
        struct qt_device_tensor *t = &out->tensors[i], own = *t;
        *t = all[i % size * n + i];
        t->name = t->name ? own.name : NULL; /* pointers of another process */
        t->spec = own.spec;
        t->layer = own.layer;
    }
done:
    qt_free(all);
    return rc;
}

/* Leaves out rows without a name, and adds up what the others found. */
static void count_rows(struct qt_device_report *out)
{
    size_t n = 0;
    for (size_t i = 0; i < out->count; i++) {
        struct qt_device_tensor t = out->tensors[i];
        if (!t.name) {
            qt_free(t.layer);
            continue;
        }
        out->missing += t.missing[0] != '\0';
        out->faults += t.faults;
        out->tensors[n++] = t;
    }
    out->count = n;
}

static int check_all(struct qt_device_report *out, struct rows *rows, enum qt_kv_keys keys,
                     const struct qt_model_info *model, struct qt_err *err)
{
    int rc;
    QT_TRY(find_layers(rows, err));
    const size_t count = rows->tensors + rows->layers + (model ? 1 : 0);
    QT_TRY(qt_array_new(&out->tensors, count, sizeof *out->tensors, err));
    out->count = count;
    QT_TRY(check_entries(out, rows, err));
    QT_TRY(check_layers(out, rows, err));
    if (model)
        QT_TRY(check_cache(out, rows, keys, model, err));
    QT_TRY(gather_rows(out, rows->comm, err));
    count_rows(out);
done:
    qt_free(rows->first);
    return rc;
}

int qt_verify_device(struct qt_device_report *out, const struct qt_container *c, struct qt_gpu *gpu,
                     struct qt_backend *cpu, struct qt_comm *comm, const struct qt_log *log,
                     struct qt_err *err)
{
    struct device d = {.gpu = gpu, .cpu = cpu};
    struct rows rows = {.container = c, .device = &d, .comm = comm, .log = log};
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
    QT_TRY(check_all(out, &rows, kv.keys, info, err));
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
