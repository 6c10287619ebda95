/* Extracts the tensors of a PyTorch state dict from the values of its pickle. */
#include "formats/pickle.h"

#include <stdio.h>

struct state {
    struct pickle p;
    const char *file;
    struct qt_err *err;
};

static int bad_member(const struct state *s, const struct pickle_node *key, enum qt_status status,
                      const char *what)
{
    char name[256];
    snprintf(name, sizeof name, "%.*s", (int)qt_min_size((size_t)key->number, sizeof name),
             (const char *)key->text);
    return qt_fail(s->err, status, s->file, name, "%s", what);
}

static bool read_size(size_t *out, const struct pickle_node *node)
{
    if (!qt_pickle_is(node, INT) || node->number < 0)
        return false;
    *out = (size_t)node->number;
    return true;
}

static bool read_sizes(size_t *out, const struct state *s, const struct pickle_node *tuple)
{
    bool ok = true;
    unsigned i = 0;
    for (uint32_t c = tuple->first; ok && c; c = s->p.cells[c].next)
        ok = read_size(&out[i++], &s->p.nodes[s->p.cells[c].node]);
    return ok;
}

/* (storage, storage_offset, size, stride, requires_grad, hooks) */
static int read_tensor(struct qt_pickle_tensor *t, const struct state *s,
                       const struct pickle_node *key, const struct pickle_node *tensor)
{
    const struct pickle_node *storage = qt_pickle_member(&s->p, tensor, 0);
    const struct pickle_node *id = qt_pickle_member(&s->p, storage, 2);
    const struct pickle_node *shape = qt_pickle_member(&s->p, tensor, 2),
                             *stride = qt_pickle_member(&s->p, tensor, 3);
    *t = (struct qt_pickle_tensor){
        .name = (const char *)key->text,
        .name_size = (size_t)key->number,
        .key = (const char *)id->text,
        .key_size = (size_t)id->number,
        .dtype = tensor->dtype,
    };
    if (!qt_pickle_is(shape, TUPLE) || !qt_pickle_is(stride, TUPLE) ||
        shape->count != stride->count)
        return bad_member(s, key, QT_E_INPUT, "size and stride must be tuples of one length");
    if (shape->count > QT_MAX_DIMS)
        return bad_member(s, key, QT_E_UNSUPPORTED, "has more than 8 dimensions");
    t->ndim = (int)shape->count;
    if (!read_sizes(t->shape, s, shape) || !read_sizes(t->stride, s, stride) ||
        !read_size(&t->offset, qt_pickle_member(&s->p, tensor, 1)) ||
        !read_size(&t->storage, qt_pickle_member(&s->p, storage, 4)))
        return bad_member(s, key, QT_E_INPUT, "sizes, strides and offset must not be negative");
    if (storage->dtype == QT_DTYPE_COUNT) { /* counts bytes */
        const size_t item = qt_dtype_bits(t->dtype) / 8;
        if (t->storage % item)
            return bad_member(s, key, QT_E_INPUT, "its storage ends inside an element");
        t->storage /= item;
    }
    return QT_OK;
}

static bool holds_tensors(const struct state *s, const struct pickle_node *dict)
{
    for (uint32_t c = dict->first; c; c = s->p.cells[c].next)
        if (s->p.nodes[s->p.cells[c].node].kind == TENSOR)
            return true;
    return false;
}

static bool is_wrapper_key(const struct pickle_node *key)
{
    return qt_pickle_is_string(key, "state_dict") || qt_pickle_is_string(key, "model");
}

/* *out = the root if it holds tensors, else its only member `state_dict` or `model` that does. */
static int find_state_dict(const struct pickle_node **out, const struct state *s,
                           const struct pickle_node *root)
{
    *out = NULL;
    if (root->kind == DICT && holds_tensors(s, root)) {
        *out = root;
        return QT_OK;
    }
    for (uint32_t c = root->kind == DICT ? root->first : 0; c; c = s->p.cells[c].next) {
        const struct pickle_node *key = &s->p.nodes[s->p.cells[c].node];
        c = s->p.cells[c].next;
        const struct pickle_node *value = &s->p.nodes[s->p.cells[c].node];
        if (!is_wrapper_key(key) || value->kind != DICT || !holds_tensors(s, value))
            continue;
        if (*out)
            return qt_fail(s->err, QT_E_UNSUPPORTED, s->file, NULL,
                           "holds more than one state dict");
        *out = value;
    }
    if (!*out)
        return qt_fail(s->err, QT_E_UNSUPPORTED, s->file, NULL,
                       "holds no state dict: a dict of named tensors, or one under 'state_dict' or "
                       "'model', is expected");
    return QT_OK;
}

/* Ignores plain values beside the tensors; rejects values that could hold more tensors. */
static int list_tensors(struct qt_pickle_tensor *out, size_t *count, const struct state *s,
                        const struct pickle_node *dict)
{
    for (uint32_t c = dict->first; c; c = s->p.cells[c].next) {
        const struct pickle_node *key = &s->p.nodes[s->p.cells[c].node];
        c = s->p.cells[c].next;
        const struct pickle_node *value = &s->p.nodes[s->p.cells[c].node];
        if (key->kind != STRING)
            return qt_fail(s->err, QT_E_INPUT, s->file, NULL,
                           "a state dict has a key that is not a string");
        if (value->kind == STORAGE || (value->count && value->kind != TENSOR))
            return bad_member(s, key, QT_E_UNSUPPORTED,
                              "is not a tensor: nested state dicts are not supported");
        if (value->kind != TENSOR)
            continue;
        int rc = read_tensor(&out[*count], s, key, value);
        if (rc < 0)
            return rc;
        ++*count;
    }
    return QT_OK;
}

int qt_state_dict_read(struct qt_pickle_tensor **out, size_t *count, const unsigned char *data,
                       size_t size, const char *file, struct qt_err *err)
{
    int rc;
    const struct pickle_node *dict = NULL;
    struct state s = {.file = file, .err = err};
    *out = NULL;
    *count = 0;
    QT_TRY(qt_pickle_open(&s.p, data, size, file, err));
    QT_TRY(find_state_dict(&dict, &s, &s.p.nodes[s.p.root]));
    if (dict->count / 2 > QT_MAX_TENSORS) {
        rc = qt_fail(err, QT_E_UNSUPPORTED, file, NULL, "more than %d tensors", QT_MAX_TENSORS);
        goto done;
    }
    QT_TRY(qt_array_new(out, dict->count / 2, sizeof **out, err));
    QT_TRY(list_tensors(*out, count, &s, dict));
done:
    qt_pickle_close(&s.p);
    if (rc < 0) {
        qt_free(*out);
        *out = NULL;
    }
    return rc;
}
