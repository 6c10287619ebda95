/*
 * The data of GGUF tensors: blocks of quantized matrices, copied values, in the order of rows and
 * channels that llama.cpp expects.
 */
#include "pack/export/gguf_plan.h"

#include <math.h>
#include <string.h>

enum { PIECE = 1 << 16 /* elements that are converted at once */ };

/* Where row or channel i of the source comes. */
static size_t place_of(const struct order *o, size_t i)
{
    if (o->head)
        return qt_gguf_row(i, o->head);
    if (!o->heads || i < o->first)
        return i;
    const size_t head = (i - o->first) / o->size;
    return i + (qt_gguf_value_head(head, o->heads, o->keys) - head) * o->size;
}

/* The reverse. */
static size_t source_of(const struct order *o, size_t i)
{
    if (o->head) {
        const size_t r = i % o->head, half = o->head / 2;
        return i - r + r % 2 * half + r / 2;
    }
    if (!o->heads || i < o->first)
        return i;
    const size_t head = (i - o->first) / o->size;
    return i + (qt_gguf_value_head(head, o->heads, o->heads / o->keys) - head) * o->size;
}

static void convert(const struct qt_export_matrix *m, const struct qt_export_panel *panel)
{
    const struct tensor *t = m->own;
    const size_t blocks = m->k / QT_GGUF_BLOCK, groups = m->codes.groups;
    for (size_t r = 0; r < panel->rows; r++) {
        const size_t from = panel->row0 + r;
        const size_t row = t->order.channels ? from : place_of(&t->order, from);
        for (size_t b = 0; b < blocks; b++) {
            const size_t to =
                t->order.channels ? place_of(&t->order, b * QT_GGUF_BLOCK) / QT_GGUF_BLOCK : b;
            unsigned char *dst =
                (unsigned char *)m->tensor[0].data + (row * blocks + to) * t->type->bytes;
            const size_t at = r * m->k + b * QT_GGUF_BLOCK;
            const size_t g = r * groups + b * QT_GGUF_BLOCK / m->codes.group;
            const float zero = m->codes.asymmetric ? (float)panel->zero[g] : 0;
            t->type->encode(dst, panel->code + at, panel->scale[g], zero,
                            panel->decoded ? panel->decoded + at : NULL);
        }
    }
}

static int write_matrix(struct qt_export *x, struct tensor *t, struct qt_export_matrix *m,
                        struct qt_err *err)
{
    struct qt_export_tensor *data = &m->tensor[0];
    int rc;
    data->bytes = m->n * (m->k / QT_GGUF_BLOCK) * t->type->bytes;
    m->own = t;
    QT_TRY(qt_array_new(&data->data, data->bytes, 1, err));
    QT_TRY(qt_export_panels(x, m, convert, err));
    QT_TRY(qt_output_write(x->out, data->data, data->bytes, err));
done:
    qt_free(data->data);
    data->data = NULL;
    return rc;
}

static enum qt_dtype dtype_of(const struct qt_gguf_type *type)
{
    static const enum qt_dtype all[] = {QT_F32, QT_F16, QT_BF16};
    size_t i = 0;
    while (qt_gguf_type_plain(all[i]) != type)
        i++;
    return all[i];
}

/* Stores n values in another dtype; false if one is beyond its range. */
static bool store(void *dst, enum qt_dtype dtype, const float *v, size_t n)
{
    bool good = true;
    for (size_t i = 0; i < n; i++) {
        if (dtype == QT_F32)
            ((float *)dst)[i] = v[i];
        else
            ((uint16_t *)dst)[i] = dtype == QT_F16 ? qt_f32_to_f16(v[i]) : qt_f32_to_bf16(v[i]);
        good = good && (dtype != QT_F16 || !isfinite(v[i]) ||
                        isfinite(qt_f16_to_f32(((uint16_t *)dst)[i])));
    }
    return good;
}

/* Writes elements [first, first + n) of a copied tensor. */
static int write_piece(struct qt_export *x, const struct tensor *t, const struct qt_tensor *from,
                       const unsigned char *data, size_t first, size_t n, float *values,
                       unsigned char *stored, struct qt_err *err)
{
    const enum qt_dtype dtype = dtype_of(t->type);
    qt_to_f32(values, data + first * (qt_dtype_bits(from->dtype) / 8), from->dtype, n);
    for (size_t i = 0; t->plus_1 && i < n; i++)
        values[i] += 1;
    for (size_t i = 0; t->decay && i < n; i++)
        values[i] = -expf(values[i]);
    if (!store(stored, dtype, values, n))
        return qt_fail(err, QT_E_UNSUPPORTED, from->file, from->name,
                       "a value is beyond the largest float16; --dtype bfloat16 has a wider range");
    return qt_output_write(x->out, stored, n * (qt_dtype_bits(dtype) / 8), err);
}

static int write_copied(struct qt_export *x, const struct tensor *t, const struct qt_tensor *from,
                        struct qt_err *err)
{
    /* An order is one of rows, of the elements of a vector, or of value heads within rows. */
    const struct order *o = &t->order;
    const bool reordered = o->head || o->heads;
    const size_t k = t->rows ? t->k : 1, count = (t->rows ? t->rows : 1) * t->k;
    const size_t unit = !reordered ? count : o->channels ? o->size : k;
    unsigned char *stored = NULL;
    float *values = NULL;
    struct qt_blob blob;
    int rc = qt_export_read_copied(&blob, x, from, err);
    if (rc < 0)
        return rc;
    QT_TRY(qt_array_new(&values, PIECE, sizeof *values, err));
    QT_TRY(qt_array_new(&stored, PIECE, sizeof(float), err));
    for (size_t at = 0; at < count; at += unit) {
        const size_t first = o->channels ? at / k * k + source_of(o, at % k)
                             : reordered ? source_of(o, at / k) * k
                                         : at;
        for (size_t i = 0; i < unit; i += PIECE)
            QT_TRY(write_piece(x, t, from, blob.data, first + i, qt_min_size(PIECE, unit - i),
                               values, stored, err));
    }
done:
    qt_free(values);
    qt_free(stored);
    qt_blob_free(&blob);
    return rc;
}

/* ---- latent attention ----------------------------------------------------------------------- */

static void decode_panel(const struct qt_export_matrix *m, const struct qt_export_panel *panel)
{
    const struct qt_code_info *c = &m->codes;
    float *out = (float *)(void *)m->tensor[0].data + panel->row0 * m->k;
    for (size_t i = 0; i < panel->rows * m->k; i++) {
        const size_t g = i / m->k * c->groups + i % m->k / c->group;
        const float zero = c->asymmetric ? (float)panel->zero[g] : 0;
        out[i] = panel->decoded ? panel->decoded[i]
                                : panel->scale[g] * (c->value[panel->code[i]] - zero);
    }
}

/* *values: all of kv_b_proj, to be freed. */
static int read_latent(float **values, struct qt_export *x, const struct source *s,
                       struct qt_err *err)
{
    const struct qt_tensor *from = s->copied;
    struct qt_blob blob = {0};
    int rc;
    if (!from) {
        struct qt_export_matrix *m = &x->matrix[s->matrix - x->matrix];
        QT_TRY(qt_array_new(values, m->n * m->k, sizeof **values, err));
        m->tensor[0].data = (unsigned char *)*values;
        QT_TRY(qt_export_panels(x, m, decode_panel, err));
        m->tensor[0].data = NULL;
        return QT_OK;
    }
    QT_TRY(qt_export_read_copied(&blob, x, from, err));
    QT_TRY(qt_array_new(values, from->shape[0] * from->shape[1], sizeof **values, err));
    qt_to_f32(*values, blob.data, from->dtype, from->shape[0] * from->shape[1]);
done:
    qt_blob_free(&blob);
    return rc;
}

static int write_latent(struct qt_export *x, const struct tensor *t, struct qt_err *err)
{
    const struct latent *l = &t->latent;
    const size_t count = l->size * l->rank;
    const enum qt_dtype dtype = dtype_of(t->type);
    float *values = NULL, *head = NULL;
    void *stored = NULL;
    int rc;
    QT_TRY(read_latent(&values, x, &t->sources[0], err));
    QT_TRY(qt_array_new(&head, count, sizeof *head, err));
    QT_TRY(qt_array_new(&stored, count, sizeof *head, err));
    for (size_t h = 0; h < t->heads; h++) {
        const float *from = values + (h * l->rows + l->first) * l->rank;
        for (size_t i = 0; i < count; i++)
            head[i] = l->keys ? from[i % l->size * l->rank + i / l->size] : from[i];
        if (!store(stored, dtype, head, count)) {
            rc = qt_fail(err, QT_E_UNSUPPORTED, qt_container_dir(x->container), t->name,
                         "a value is beyond the largest float16; --dtype bfloat16 has a wider "
                         "range");
            goto done;
        }
        QT_TRY(qt_output_write(x->out, stored, count * (qt_dtype_bits(dtype) / 8), err));
    }
done:
    qt_free(stored);
    qt_free(head);
    qt_free(values);
    return rc;
}

int qt_gguf_write_tensor(struct qt_export *x, struct tensor *t, struct qt_err *err)
{
    int rc = QT_OK;
    if (t->values)
        QT_TRY(qt_output_write(x->out, t->values, (size_t)t->bytes, err));
    if (t->latent.rank)
        QT_TRY(write_latent(x, t, err));
    for (size_t i = 0; t->sources && !t->latent.rank && i < t->slices; i++) {
        const struct source *s = &t->sources[i];
        QT_TRY(qt_stop_check(err));
        QT_TRY(s->copied ? write_copied(x, t, s->copied, err)
                         : write_matrix(x, t, &x->matrix[s->matrix - x->matrix], err));
    }
    QT_TRY(qt_output_pad(x->out, QT_GGUF_ALIGN, err));
done:
    return rc;
}
