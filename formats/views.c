/* Makes the views of a checkpoint, and reads them. */
#include "formats/views.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- base tensors --------------------------------------------------------------------------- */

static int compare_base(const void *a, const void *b)
{
    return strcmp((*(struct qt_encoded *const *)a)->info.name,
                  (*(struct qt_encoded *const *)b)->info.name);
}

static int compare_base_name(const void *key, const void *base)
{
    return strcmp(key, (*(struct qt_encoded *const *)base)->info.name);
}

const struct qt_encoded *qt_bases_find(const struct qt_bases *bases, const char *name, size_t size,
                                       const char *ending)
{
    char full[2 * QT_TENSOR_NAME_MAX];
    if (size + strlen(ending) > QT_TENSOR_NAME_MAX)
        return NULL;
    snprintf(full, sizeof full, "%.*s%s", (int)size, name, ending);
    struct qt_encoded *const *found =
        bsearch(full, bases->list, bases->count, sizeof *bases->list, compare_base_name);
    return found ? *found : NULL;
}

/* *e is copied. */
static int add_base(struct qt_bases *bases, const struct qt_encoded *e, const char *name,
                    size_t stem, const char *ending, struct qt_err *err)
{
    struct qt_encoded *copy;
    int rc =
        qt_array_grow(&bases->list, &bases->capacity, bases->count + 1, sizeof *bases->list, err);
    if (rc < 0)
        return rc;
    rc = qt_array_new(&copy, 1, sizeof *copy, err);
    if (rc < 0)
        return rc;
    *copy = *e;
    copy->info.name = NULL;
    bases->list[bases->count++] = copy;
    char *text;
    rc = qt_string_format(&text, err, "%.*s%s", (int)stem, name, ending);
    copy->info.name = rc == QT_OK ? text : NULL;
    return rc;
}

/* Names of tensors beside a quantized matrix that only its runtime needs. */
static const char *const runtime_parts[] = {".input_scale",        ".activation_scale",
                                            ".input_global_scale", ".input_zero_point",
                                            ".output_scale",       ".weight_format"};

static void mark(const struct qt_slot *slot)
{
    ((struct qt_slot *)(uintptr_t)slot)->used = true; /* the caller's slots */
}

static void mark_parts(const struct qt_stored *s, const struct qt_encoded *e)
{
    for (size_t i = 0; i < QT_PARTS; i++)
        if (e->part[i])
            mark(e->part[i]);
    if (!e->encoding || !qt_name_ends_in(e->info.name, ".weight"))
        return;
    const size_t module = strlen(e->info.name) - strlen(".weight");
    for (size_t i = 0; i < sizeof runtime_parts / sizeof *runtime_parts; i++) {
        const struct qt_slot *part = qt_stored_find(s, e->info.name, module, runtime_parts[i]);
        if (part)
            mark(part);
    }
}

/* Scales of 8-bit KV caches. */
static void mark_cache_scales(const struct qt_stored *s)
{
    static const char *const names[] = {".k_scale", ".v_scale", ".q_scale", ".kv_scale",
                                        ".prob_scale"};
    for (size_t i = 0; i < s->count; i++)
        for (size_t n = 0; n < sizeof names / sizeof *names; n++)
            if (s->by_name[i]->info.ndim <= 1 &&
                qt_name_ends_in(s->by_name[i]->info.name, names[n]))
                mark(s->by_name[i]);
}

/* Records why a tensor has no view, if it is the first. */
static int note(struct qt_views *v, int rc, const struct qt_err *why, struct qt_err *err)
{
    if (rc == QT_E_RESOURCE)
        return qt_fail(err, rc, why->file, why->tensor, "%s", why->reason);
    if (rc < 0 && v->unreadable.status == QT_OK)
        v->unreadable = *why;
    return QT_OK;
}

/* Finds the base tensor of which t holds the codes, or t itself if it may be a stack. */
static int find_base(struct qt_views *v, const struct qt_stored *s, const struct qt_slot *t,
                     bool encodings, struct qt_err *err)
{
    struct qt_encoded e = {0};
    struct qt_err why = {0};
    size_t stem = strlen(t->info.name);
    const char *ending = "";
    bool found = false;
    int rc = encodings ? qt_encoding_find(&found, &e, &stem, &ending, s, t, &why) : QT_OK;
    if (rc < 0)
        return note(v, rc, &why, err);
    if (found) {
        e.info.file = t->info.file;
        v->encoded |= e.info.encoding != NULL;
    } else if (qt_dtype_is_weight(t->info.dtype) && qt_stack_is_candidate(s->source, &t->info)) {
        e = (struct qt_encoded){.info = t->info, .part = {t}};
        if (t->info.ndim >= 2)
            qt_encoded_shape(&e, t->info.ndim, t->info.shape);
        else
            e.rows = t->info.count, e.cols = 1;
    } else {
        return QT_OK;
    }
    rc = add_base(&v->bases, &e, t->info.name, stem, ending, err);
    if (rc < 0)
        return rc;
    rc = qt_tensor_measure(&v->bases.list[v->bases.count - 1]->info, &why);
    return note(v, rc, &why, err);
}

/* ---- views ---------------------------------------------------------------------------------- */

/* *out = the name with the first `from` replaced. */
static int rename_tensor(char **out, const char *name, const struct qt_pieces *p,
                         struct qt_err *err)
{
    const char *at = p->from ? strstr(name, p->from) : NULL;
    return at ? qt_string_format(out, err, "%.*s%s%s", (int)(at - name), name, p->to,
                                 at + strlen(p->from))
              : qt_string_copy(out, name, err);
}

static int add_view(struct qt_views *v, const struct qt_view *view, const char *name,
                    const struct qt_pieces *p, struct qt_err *err)
{
    char *owned;
    if (v->count == QT_MAX_TENSORS)
        return qt_fail(err, QT_E_UNSUPPORTED, view->slot.info.file, view->base->info.name,
                       "has more parts than the %d tensors that a checkpoint may have",
                       QT_MAX_TENSORS);
    int rc = qt_array_grow(&v->list, &v->capacity, v->count + 1, sizeof *v->list, err);
    if (rc < 0)
        return rc;
    rc = rename_tensor(&owned, name, p, err);
    if (rc < 0)
        return rc;
    v->list[v->count] = *view;
    v->list[v->count].slot.info.name = owned;
    v->count++;
    rc = qt_tensor_check_name(owned, strlen(owned), view->slot.info.file, err);
    return rc < 0 ? rc : qt_tensor_measure(&v->list[v->count - 1].slot.info, err);
}

/* The view of piece i of an expert. */
static int add_piece(struct qt_views *v, const struct qt_encoded *base, const struct qt_pieces *p,
                     size_t expert, size_t i, struct qt_err *err)
{
    const bool column = p->transposed || p->k == 0; /* view rows are base columns */
    const size_t within = p->interleaved ? i : i * p->n;
    struct qt_view view = {.slot.info = base->info,
                           .base = base,
                           .step = p->interleaved ? p->count : 1,
                           .transposed = column};
    struct qt_tensor *t = &view.slot.info;
    char *name;
    t->ndim = p->k ? 2 : 1;
    t->shape[0] = p->n;
    t->shape[1] = p->k;
    view.first = column ? within : expert * p->n * p->count + within;
    view.top = column ? expert * (p->k ? p->k : 1) : 0;
    int rc = qt_string_format(&name, err, "%.*s%s%zu.%s%s", (int)p->prefix, base->info.name,
                              p->between, expert, p->name[i], p->ending);
    if (rc < 0)
        return rc;
    rc = add_view(v, &view, name, p, err);
    qt_free(name);
    return rc;
}

static int add_whole(struct qt_views *v, const struct qt_encoded *base, const struct qt_pieces *p,
                     struct qt_err *err)
{
    struct qt_view view = {
        .slot.info = base->info, .base = base, .step = 1, .transposed = p->transposed};
    struct qt_tensor *t = &view.slot.info;
    if (p->transposed) {
        t->shape[0] = base->info.shape[1];
        t->shape[1] = base->info.shape[0];
    }
    return add_view(v, &view, base->info.name, p, err);
}

static int add_views(struct qt_views *v, const struct qt_source *source,
                     const struct qt_encoded *base, struct qt_err *err)
{
    struct qt_pieces p;
    int rc = QT_OK;
    qt_stack_split(&p, source, &v->bases, base);
    if (p.experts == 0)
        return add_whole(v, base, &p, err);
    for (size_t e = 0; e < p.experts && rc == QT_OK; e++)
        for (size_t i = 0; i < p.count && rc == QT_OK; i++)
            rc = add_piece(v, base, &p, e, i, err);
    return rc;
}

int qt_views_make(struct qt_views *out, const char *dir, struct qt_slot *const *by_name,
                  struct qt_slot *const *in_order, size_t count, struct qt_err *err)
{
    struct qt_encoded **in_file_order = NULL;
    struct qt_err why = {0};
    *out = (struct qt_views){0};
    const struct qt_source *source = &out->source;
    int rc = qt_source_read(&out->source, dir, err);
    if (rc < 0)
        return rc;
    const struct qt_stored s = {(const struct qt_slot *const *)by_name, count, source};
    const bool readable = qt_source_check(source, dir, &why) == QT_OK;
    QT_TRY(note(out, why.status, &why, err));
    for (size_t i = 0; i < count; i++)
        QT_TRY(find_base(out, &s, in_order[i], readable, err));
    if (out->bases.count == 0)
        goto done;
    struct qt_bases *bases = &out->bases;
    QT_TRY(qt_array_new(&in_file_order, bases->count, sizeof *in_file_order, err));
    memcpy(in_file_order, bases->list, bases->count * sizeof *in_file_order);
    qsort(bases->list, bases->count, sizeof *bases->list, compare_base);
    for (size_t i = 0; i < bases->count; i++) {
        QT_TRY(note(out, add_views(out, source, in_file_order[i], &why), &why, err));
        mark_parts(&s, in_file_order[i]);
    }
    if (out->encoded)
        mark_cache_scales(&s);
done:
    qt_free(in_file_order);
    if (rc < 0)
        qt_views_free(out);
    return rc;
}

void qt_views_free(struct qt_views *v)
{
    for (size_t i = 0; i < v->count; i++)
        qt_free((char *)(uintptr_t)v->list[i].slot.info.name);
    for (size_t i = 0; i < v->bases.count; i++) {
        qt_free((char *)(uintptr_t)v->bases.list[i]->info.name);
        qt_free(v->bases.list[i]);
    }
    qt_free(v->list);
    qt_free(v->bases.list);
    qt_source_free(&v->source);
    *v = (struct qt_views){0};
}

/* ---- reading -------------------------------------------------------------------------------- */

/* A view being read in strips of rows. */
struct reading {
    const struct qt_view *view;
    const unsigned char *data[QT_PARTS];
    unsigned char *to;
    size_t row_bytes; /* of the view */
    size_t strip;     /* rows */
};

static void round_row(unsigned char *to, const float *w, enum qt_dtype t, size_t n)
{
    if (t == QT_F32) {
        memcpy(to, w, n * sizeof *w);
        return;
    }
    uint16_t *half = (uint16_t *)(void *)to; /* aligned: rows of 2-byte elements */
    if (t == QT_F16) {
        for (size_t i = 0; i < n; i++)
            half[i] = qt_f32_to_f16(w[i]);
        return;
    }
    for (size_t i = 0; i < n; i++) { /* qt_f32_to_bf16, for vector code */
        const uint32_t u = qt_f32_bits(w[i]);
        const uint32_t rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
        half[i] = (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? u >> 16 | 0x40 : rounded);
    }
}

static int decode_strip(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct reading *r = ctx;
    const struct qt_view *v = r->view;
    const struct qt_encoded *e = v->base;
    const size_t rows = v->slot.info.count / e->cols, row = item * r->strip;
    const size_t n = qt_min_size(r->strip, rows - row);
    float *w;
    (void)thread;
    int rc = qt_array_new(&w, n * e->cols, sizeof *w, err);
    if (rc < 0)
        return rc;
    if (v->step == 1)
        e->encoding->decode(w, e, r->data, v->first + row, n);
    else
        for (size_t i = 0; i < n; i++)
            e->encoding->decode(w + i * e->cols, e, r->data, v->first + (row + i) * v->step, 1);
    round_row(r->to + row * r->row_bytes, w, v->slot.info.dtype, n * e->cols);
    qt_free(w);
    return QT_OK;
}

/* Columns of the view: rows of the base, of which the view has every `step`th column. */
static int decode_columns(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct reading *r = ctx;
    const struct qt_view *v = r->view;
    const struct qt_encoded *e = v->base;
    const size_t n = v->slot.info.shape[0], k = v->slot.info.shape[1], first = item * r->strip;
    const size_t end = qt_min_size(k, first + r->strip), size = r->row_bytes / k;
    float *w;
    unsigned char *rounded = NULL;
    (void)thread;
    int rc;
    QT_TRY(qt_array_new(&w, e->cols, sizeof *w, err));
    QT_TRY(qt_array_new(&rounded, e->cols, size, err));
    for (size_t j = first; j < end; j++) {
        e->encoding->decode(w, e, r->data, v->top + j, 1);
        round_row(rounded, w, v->slot.info.dtype, e->cols);
        for (size_t i = 0; i < n; i++)
            memcpy(r->to + i * r->row_bytes + j * size, rounded + (v->first + i * v->step) * size,
                   size);
    }
done:
    qt_free(rounded);
    qt_free(w);
    return rc;
}

/* Copies rows, or columns, of a tensor that is not quantized. */
static int copy_strip(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct reading *r = ctx;
    const struct qt_view *v = r->view;
    const struct qt_tensor *t = &v->slot.info;
    const size_t size = qt_dtype_bits(t->dtype) / 8, row = item * r->strip;
    const size_t rows = t->ndim == 1 ? t->count : t->shape[0], k = t->count / rows;
    const size_t end = qt_min_size(rows, row + r->strip);
    (void)thread;
    (void)err;
    if (!v->transposed) {
        for (size_t i = row; i < end; i++)
            memcpy(r->to + i * r->row_bytes, r->data[0] + (v->first + i * v->step) * r->row_bytes,
                   r->row_bytes);
        return QT_OK;
    }
    for (size_t j = 0; j < k; j++) { /* base rows outside: reads are consecutive */
        const unsigned char *from = r->data[0] + ((v->top + j) * v->base->cols + v->first) * size;
        for (size_t i = row; i < end; i++)
            memcpy(r->to + i * r->row_bytes + j * size, from + i * v->step * size, size);
    }
    return QT_OK;
}

static int read_strips(struct qt_blob *out, struct reading *r, struct qt_err *err)
{
    enum { STRIP_WEIGHTS = 1 << 14, LEAST = 16 };
    const struct qt_view *v = r->view;
    const struct qt_tensor *t = &v->slot.info;
    const bool encoded = v->base->encoding != NULL, columns = encoded && v->transposed;
    size_t k = t->ndim < 2 ? 1 : t->count / t->shape[0];
    if (encoded && !columns)
        k = v->base->cols; /* the view may have more than two dimensions */
    const size_t rows = t->count / k, width = columns ? v->base->cols : k;
    int rc = qt_array_new(&out->owned, t->nbytes, 1, err);
    if (rc < 0)
        return rc;
    out->data = r->to = out->owned;
    out->size = t->nbytes;
    r->row_bytes = t->nbytes / rows;
    r->strip = qt_max_size(LEAST, qt_round_up(qt_ceil_div(STRIP_WEIGHTS, width), LEAST));
    return qt_parallel(qt_ceil_div(columns ? k : rows, r->strip),
                       columns   ? decode_columns
                       : encoded ? decode_strip
                                 : copy_strip,
                       r, err);
}

/* The blob becomes the part of it that is the view. */
static void take_rows(struct qt_blob *out, struct qt_blob *whole, const struct qt_view *v)
{
    const size_t row = v->base->cols * (qt_dtype_bits(v->slot.info.dtype) / 8);
    *out = *whole;
    out->data += v->first * row;
    out->size = v->slot.info.nbytes;
    *whole = (struct qt_blob){0};
}

/* Limits what is given back to the kernel to the codes of the view: the next view of a stack
 * follows. */
static void drop_rows(struct qt_blob *codes, const struct qt_view *v)
{
    const size_t rows = v->base->rows, n = qt_min_size(v->slot.info.count / v->base->cols, rows);
    if (v->transposed || v->step != 1 || n == rows || rows == 0)
        return;
    codes->data += codes->size / rows * v->first;
    codes->size = codes->size / rows * n;
}

int qt_view_read(struct qt_blob *out, const struct qt_view *view, struct qt_err *err)
{
    const struct qt_encoded *e = view->base;
    struct qt_blob parts[QT_PARTS] = {{0}};
    struct reading r = {.view = view};
    int rc = QT_OK;
    *out = (struct qt_blob){0};
    for (size_t i = 0; i < QT_PARTS; i++) {
        if (e->part[i])
            QT_TRY(qt_slot_read(&parts[i], e->part[i], err));
        r.data[i] = parts[i].data;
    }
    if (view->slot.info.count == 0)
        goto done;
    if (!e->encoding && !view->transposed && view->step == 1) {
        take_rows(out, &parts[0], view);
        goto done;
    }
    if (e->encoding && e->encoding->check)
        QT_TRY(e->encoding->check(e, r.data, err));
    QT_TRY(read_strips(out, &r, err));
    drop_rows(&parts[0], view);
done:
    for (size_t i = 0; i < QT_PARTS; i++)
        qt_blob_free(&parts[i]);
    if (rc < 0)
        qt_blob_free(out);
    return rc;
}
