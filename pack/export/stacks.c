/* Stacks: tensors in which checkpoints have the matrices, or biases, of all experts of a layer. */
#include "pack/export/run.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* *out = the index of the stack with this name, which is new if *made. */
static int find(size_t *out, bool *made, struct run *run, const struct qt_stack *form,
                struct qt_err *err)
{
    const json_t *at = json_object_get(run->stack_at, form->name);
    int rc = QT_OK;
    *made = !at;
    *out = at ? (size_t)json_integer_value(at) : run->nstacks;
    if (at)
        return QT_OK;
    if (!run->stack_at && !(run->stack_at = json_object()))
        return qt_no_memory(err, NULL);
    QT_TRY(qt_array_grow(&run->stacks, &run->stacks_room, *out + 1, sizeof *run->stacks, err));
    if (json_object_set_new(run->stack_at, form->name, json_integer((json_int_t)*out)) < 0)
        return qt_no_memory(err, NULL);
    run->stacks[run->nstacks++] = (struct stack){.form = *form};
done:
    return rc;
}

/* The name of the stack of a further tensor of the matrices. */
static int rename_form(struct qt_stack *form, const struct qt_export_matrix *m, size_t tensor,
                       struct qt_err *err)
{
    const char *ending = m->tensor[tensor].name + strlen(m->module);
    const size_t kept = strlen(form->name) - strlen(strrchr(form->name, '.'));
    return snprintf(form->name + kept, sizeof form->name - kept, "%s", ending) <
                   (int)(sizeof form->name - kept)
               ? QT_OK
               : qt_fail(err, QT_E_UNSUPPORTED, NULL, m->entry->name, "its name is too long");
}

int qt_export_stack_add(struct item items[QT_EXPORT_TENSORS], size_t *count, struct run *run,
                        const struct item *item, const char *name, struct qt_err *err)
{
    const struct qt_export_format *format = run->x.format;
    const struct qt_export_matrix *m = item->copied ? NULL : &run->x.matrix[item->matrix];
    struct qt_stack form;
    int rc = QT_OK;
    items[0] = *item;
    *count = 1;
    if (!format->stack || !format->stack(&form, run->x.model_type, name))
        return QT_OK;
    *count = 0;
    for (size_t i = 0; i < (m ? m->ntensors : 1); i++) {
        size_t at;
        bool made;
        if (i > 0)
            QT_TRY(rename_form(&form, m, i, err));
        QT_TRY(find(&at, &made, run, &form, err));
        struct stack *s = &run->stacks[at];
        QT_TRY(qt_array_grow(&s->members, &s->room, s->count + 1, sizeof *s->members, err));
        s->members[s->count++] =
            (struct member){item->copied, item->matrix, form.expert * form.parts + form.part};
        s->tensor = i;
        if (made)
            items[(*count)++] = (struct item){.stack = at + 1};
    }
done:
    return rc;
}

/* ---- the tensor ----------------------------------------------------------------------------- */

static int by_place(const void *a, const void *b)
{
    const struct member *x = a, *y = b;
    return (x->place > y->place) - (x->place < y->place);
}

/* Sorts the members; false if one is missing, twice or not of floats, or not all have one shape. */
static bool is_whole(struct stack *s, const struct run *run)
{
    bool whole = s->count % s->form.parts == 0;
    qsort(s->members, s->count, sizeof *s->members, by_place);
    for (size_t i = 0; i < s->count && whole; i++) {
        const struct member *m = &s->members[i];
        const struct qt_tensor *t = m->copied;
        const struct qt_export_tensor *matrix =
            t ? NULL : &run->x.matrix[m->matrix].tensor[s->tensor];
        if (t && ((t->ndim != 1 && t->ndim != 2) ||
                  (t->dtype != QT_F16 && t->dtype != QT_BF16 && t->dtype != QT_F32)))
            return false;
        const size_t n = t ? t->shape[0] : matrix->shape[0];
        const size_t k = t ? (t->ndim == 2 ? t->shape[1] : 0) : matrix->shape[1];
        if (i == 0) {
            s->n = n;
            s->k = k;
        }
        whole = m->place == i && n == s->n && k == s->k;
        /* The dtype of a quantized member, if there is one: --dtype is not for copied tensors. */
        if (i == 0 || matrix)
            s->dtype = t ? t->dtype : matrix->dtype;
    }
    return whole;
}

int qt_export_stack_tensor(struct qt_tensor *out, struct run *run, struct stack *s,
                           struct qt_err *err)
{
    if (!is_whole(s, run))
        return qt_fail(
            err, QT_E_INPUT, qt_container_dir(run->x.container), s->form.name,
            "an expert is missing, is not of F16, BF16 or F32, or has another shape than others");
    const size_t experts = s->count / s->form.parts, rows = s->form.parts * s->n;
    const bool turned = s->form.transposed && s->k;
    *out = (struct qt_tensor){.name = s->form.name,
                              .dtype = s->dtype,
                              .ndim = s->k ? 3 : 2,
                              .shape = {experts, turned ? s->k : rows, turned ? rows : s->k}};
    out->nbytes = experts * rows * (s->k ? s->k : 1) * (qt_dtype_bits(s->dtype) / 8);
    return QT_OK;
}

/* ---- the data ------------------------------------------------------------------------------- */

/* Puts data[n][k] of a part into the block of its expert. */
static void place(unsigned char *block, const struct stack *s, size_t part,
                  const unsigned char *data)
{
    const size_t size = qt_dtype_bits(s->dtype) / 8, row = (s->k ? s->k : 1) * size;
    const size_t parts = s->form.parts, rows = parts * s->n;
    for (size_t r = 0; r < s->n; r++) {
        const size_t to = s->form.interleaved ? parts * r + part : part * s->n + r;
        if (!s->form.transposed || !s->k)
            memcpy(block + to * row, data + r * row, row);
        for (size_t c = 0; s->form.transposed && c < s->k; c++)
            memcpy(block + (c * rows + to) * size, data + r * row + c * size, size);
    }
}

/* The same for a copied tensor, whose dtype may be another. */
static int place_copied(unsigned char *block, const struct run *run, const struct stack *s,
                        size_t part, const struct qt_tensor *t, struct qt_err *err)
{
    const size_t count = s->n * (s->k ? s->k : 1);
    struct qt_export_tensor to = {.dtype = s->dtype};
    struct qt_blob blob;
    float *values = NULL;
    int rc = qt_export_read_copied(&blob, &run->x, t, err);
    if (rc < 0)
        return rc;
    if (t->dtype == s->dtype) {
        place(block, s, part, blob.data);
        goto done;
    }
    QT_TRY(qt_array_new(&values, count, sizeof *values, err));
    QT_TRY(qt_array_new(&to.data, count, qt_dtype_bits(s->dtype) / 8, err));
    qt_to_f32(values, blob.data, t->dtype, count);
    qt_export_floats(&to, 0, values, count);
    place(block, s, part, to.data);
done:
    qt_free(to.data);
    qt_free(values);
    qt_blob_free(&blob);
    return rc;
}

int qt_export_stack_write(struct run *run, const struct stack *s, struct qt_err *err)
{
    const size_t bytes = s->form.parts * s->n * (s->k ? s->k : 1) * (qt_dtype_bits(s->dtype) / 8);
    unsigned char *block; /* the rows of one expert */
    int rc = qt_array_new(&block, bytes, 1, err);
    for (size_t i = 0; rc == QT_OK && i < s->count; i++) {
        const struct member *m = &s->members[i];
        const size_t part = i % s->form.parts;
        if (m->copied) {
            QT_TRY(place_copied(block, run, s, part, m->copied, err));
        } else {
            QT_TRY(qt_export_convert_matrix(run, m->matrix, err));
            place(block, s, part, run->x.matrix[m->matrix].tensor[s->tensor].data);
        }
        QT_TRY(qt_stop_check(err));
        if (part == s->form.parts - 1)
            QT_TRY(qt_output_write(run->x.out, block, bytes, err));
    }
done:
    qt_free(block);
    return rc;
}

void qt_export_stacks_free(struct run *run)
{
    for (size_t i = 0; i < run->nstacks; i++)
        qt_free(run->stacks[i].members);
    qt_free(run->stacks);
    json_decref(run->stack_at);
}
