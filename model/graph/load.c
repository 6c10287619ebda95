/* Loads weights into backend memory: a part of a model, and a decoder layer. */
#include "model/graph/layer.h"

#include <string.h>

/* ---- parts ---------------------------------------------------------------------------------- */

void qt_model_unit_rows(float *w, size_t rows, size_t columns)
{
    for (size_t i = 0; i < rows; i++, w += columns) {
        double sum = 0;
        for (size_t j = 0; j < columns; j++)
            sum += (double)w[j] * (double)w[j];
        const double norm = fmax(sqrt(sum), 1e-12); /* as in torch */
        for (size_t j = 0; j < columns; j++)
            w[j] = (float)((double)w[j] / norm);
    }
}

int layer_staging(struct staging *s, size_t count, struct qt_err *err)
{
    int rc;
    if (count <= s->count)
        return QT_OK;
    qt_free(s->p);
    s->count = 0;
    rc = qt_array_new(&s->p, count, sizeof *s->p, err);
    s->count = rc < 0 ? 0 : count;
    return rc;
}

/* `staging` is the only copy besides the backend's, and not needed if the tensor is placed. *out
 * may hold memory from another layer, which is reused. changed: the part if its weight is loaded,
 * whose numbers may be changed; NULL: a bias. */
static int load_tensor(float **out, const char *name, size_t count, const struct part *changed,
                       struct staging *staging, const struct qt_weights *w, struct qt_backend *be,
                       struct qt_err *err)
{
    int rc;
    QT_TRY(qt_stop_check(err));
    bool placed = false;
    if (!*out)
        QT_TRY(qt_backend_floats(out, be, count, 1, err));
    if (w->place && !(changed && (changed->plus_1 || changed->unit)))
        QT_TRY(w->place(w->ctx, be, name, *out, &placed, err));
    if (placed)
        return qt_stop_check(err);
    QT_TRY(layer_staging(staging, count, err));
    QT_TRY(w->load(w->ctx, name, staging->p, err));
    for (size_t i = 0; changed && changed->plus_1 && i < count; i++)
        staging->p[i] += 1;
    if (changed && changed->unit)
        qt_model_unit_rows(staging->p, changed->n, changed->k);
    QT_TRY(qt_stop_check(err));
    QT_TRY(be->upload(be, *out, staging->p, count * sizeof **out, err));
done:
    return rc;
}

int layer_load_part(struct loaded *out, const struct part *part, struct staging *staging,
                    const struct qt_weights *w, struct qt_backend *be, struct qt_err *err)
{
    int rc = QT_OK;
    if (part->weight)
        QT_TRY(
            load_tensor(&out->weight, part->weight, part_count(part), part, staging, w, be, err));
    if (part->bias)
        QT_TRY(load_tensor(&out->bias, part->bias, part->n, NULL, staging, w, be, err));
done:
    return rc;
}

void layer_free_part(struct loaded *loaded, struct qt_backend *be)
{
    be->free(be, loaded->weight);
    be->free(be, loaded->bias);
}

/* ---- decoder layers ------------------------------------------------------------------------- */

const struct qt_linear *layer_linear_of(const struct layer_def *def, size_t part)
{
    return &def->linears[def->parts[part].index];
}

static bool is_linear_of(const struct layer_def *def, size_t part, int input)
{
    return def->parts[part].linear && layer_linear_of(def, part)->input == input;
}

size_t layer_part_with(const struct qt_layer *l, int input)
{
    size_t part = 0;
    while (!is_linear_of(l->def, part, input))
        part++;
    return part;
}

/* Points the parts that are row ranges into the memory of their fused part. */
static void point_to_rows(struct qt_layer *l)
{
    const struct layer_def *def = l->def;
    for (size_t i = 0; i < layer_parts(&l->model->cfg); i++) {
        const struct part *part = &def->parts[i];
        const struct loaded *whole = &l->parts[part->whole];
        if (part->whole == i || !part->k)
            continue;
        l->parts[i].weight = whole->weight + part->first * part->k;
        l->parts[i].bias = whole->bias ? whole->bias + part->first : NULL;
    }
}

static int copy_tensor(float **out, const float *from, size_t count, struct qt_backend *be,
                       struct qt_err *err)
{
    int rc = QT_OK;
    if (!*out)
        QT_TRY(qt_backend_floats(out, be, count, 1, err));
    QT_TRY(be->copy(be, *out, from, count * sizeof **out, err));
done:
    return rc;
}

/* Copies a part from `source`, or loads it if that is NULL or has other weights. */
static int renew_part(struct qt_layer *l, size_t i, const struct qt_layer *source,
                      struct staging *staging, const struct qt_weights *w, struct qt_err *err)
{
    const struct part *part = &l->def->parts[i];
    struct loaded *to = &l->parts[i];
    int rc = QT_OK;
    if (!source || !w->unchanged || (part->weight && !w->unchanged(w->ctx, part->weight)) ||
        (part->bias && !w->unchanged(w->ctx, part->bias)))
        return layer_load_part(to, part, staging, w, l->be, err);
    if (part->weight)
        QT_TRY(copy_tensor(&to->weight, source->parts[i].weight, part_count(part), l->be, err));
    if (part->bias)
        QT_TRY(copy_tensor(&to->bias, source->parts[i].bias, part->n, l->be, err));
done:
    return rc;
}

/* input: loads the linears with this input; -1: all parts. */
static int load_parts(struct qt_layer *l, int input, const struct qt_layer *source,
                      const struct qt_weights *w, struct qt_err *err)
{
    const struct layer_def *def = l->def;
    const size_t parts = layer_parts(&l->model->cfg);
    struct staging staging = {0};
    int rc = QT_OK;
    for (size_t i = 0; i < parts; i++)
        if (input < 0 || is_linear_of(def, i, input))
            QT_TRY(renew_part(l, i, source, &staging, w, err));
    point_to_rows(l);
done:
    qt_free(staging.p);
    return rc;
}

void layer_free_parts(struct qt_layer *l)
{
    for (size_t i = 0; l->parts && l->def && i < layer_parts(&l->model->cfg); i++) {
        if (l->def->parts[i].weight)
            layer_free_part(&l->parts[i], l->be);
        l->parts[i] = (struct loaded){0};
    }
}

/* True if all parts have the same shapes: if not, loading the other layer needs new memory. */
static bool same_shapes(const struct layer_def *a, const struct layer_def *b)
{
    return a->experts == b->experts && a->mixer == b->mixer && a->heads.kv == b->heads.kv &&
           a->heads.dim == b->heads.dim && a->heads.keys_are_values == b->heads.keys_are_values &&
           a->heads.shared == b->heads.shared &&
           !a->parts[ROLE_ATTN_IN].weight == !b->parts[ROLE_ATTN_IN].weight &&
           !a->parts[ROLE_SINKS].weight == !b->parts[ROLE_SINKS].weight;
}

int qt_layer_load(struct qt_layer *l, size_t layer, const struct qt_weights *w, struct qt_err *err)
{
    return qt_layer_load_from(l, NULL, layer, w, err);
}

int qt_layer_load_from(struct qt_layer *l, const struct qt_layer *source, size_t layer,
                       const struct qt_weights *w, struct qt_err *err)
{
    const struct layer_def *def = &l->model->layers[layer];
    int rc;
    if (l->def && !same_shapes(l->def, def))
        layer_free_parts(l);
    l->def = def;
    l->dir = w->dir;
    l->fake_quant = w->fake_quant;
    l->index = layer;
    l->window = l->model->cfg.windows[layer];
    l->chunk = l->model->cfg.chunks ? l->model->cfg.chunks[layer] : 0;
    l->no_rope = l->model->cfg.no_rope[layer];
    l->scale = 1;
    rc = load_parts(l, -1, source, w, err);
    if (rc == QT_OK && l->parts[ROLE_LAYER_SCALE].weight)
        rc = l->be->download(l->be, &l->scale, l->parts[ROLE_LAYER_SCALE].weight, sizeof l->scale,
                             err);
    return rc;
}

float *qt_layer_weight(const struct qt_layer *l, const char *name)
{
    for (size_t i = 0; i < layer_parts(&l->model->cfg); i++)
        if (l->def->parts[i].weight && strcmp(l->def->parts[i].weight, name) == 0)
            return l->parts[i].weight;
    return NULL;
}

int qt_layer_load_linears(struct qt_layer *l, int input, const struct qt_weights *w,
                          struct qt_err *err)
{
    return load_parts(l, input, NULL, w, err);
}
