/*
 * Inputs of single decoder layers (Gemma 4). Each layer has an input of `width` channels for each
 * token, from the embedding and from a table of its own:
 *
 *   (norm(PROJECT embedding / sqrt(hidden)) + sqrt(width) TABLE[id]) / sqrt(2)
 *
 * They are computed for all layers at once and pass from layer to layer behind the hidden states. A
 * third sublayer reads them:
 *
 *   hidden -+- PER_LAYER_GATE -- act -- * input -- PER_LAYER_OUT -- PER_LAYER_NORM -(+)-
 *           +--------------------------------------------------------------------+
 */
#include "model/graph/layer.h"

#include <math.h>

int per_layer_embed(struct qt_embed_head *e, float *state, const float *embedded,
                    const uint32_t *ids, size_t m, struct qt_err *err)
{
    const struct config *cfg = &e->model->cfg;
    const size_t hidden = cfg->info.hidden, width = cfg->per_layer, layers = cfg->info.layers;
    const size_t all = layers * width;
    struct qt_backend *be = e->be;
    float *own = e->per_layer, *projected = own + HEAD_TOKENS * all;
    int rc = QT_OK;
    uint32_t known[HEAD_TOKENS];
    for (size_t i = 0; i < m; i++) {
        known[i] = ids[i] < cfg->per_layer_vocab ? ids[i] : 0;
        if (known[i] != ids[i] && !cfg->arch->layer_embed_first)
            return qt_fail(err, QT_E_INPUT, NULL, NULL,
                           "token id %u is outside the vocabulary of %zu tokens of the inputs of "
                           "single layers",
                           (unsigned)ids[i], cfg->per_layer_vocab);
    }
    QT_TRY(be->gather_rows(be, own, e->layer_embed.weight, known, NULL, m, all, err));
    QT_TRY(be->scale(be, own, (float)sqrt((double)width), m * all, err));
    QT_TRY(be->linear(be, projected, embedded, e->layer_project.weight, NULL, m, all, hidden, err));
    QT_TRY(be->scale(be, projected, (float)(1 / sqrt((double)hidden)), m * all, err));
    QT_TRY(be->norm(be, projected, projected, e->layer_norm.weight, NULL, cfg->arch->norm, cfg->eps,
                    m * layers, width, err));
    QT_TRY(be->add(be, own, projected, m * all, err));
    QT_TRY(be->scale(be, own, (float)M_SQRT1_2, m * all, err));
    QT_TRY(be->copy_columns(be, state + per_layer_at(cfg), cfg->info.state, own, all, all, m, err));
done:
    return rc;
}

int per_layer_run(bool *stop, float *out, const struct layer_run *r, struct qt_err *err)
{
    struct qt_layer *l = r->layer;
    const struct config *cfg = &l->model->cfg;
    const size_t width = cfg->per_layer, count = r->m * width;
    float *gate = l->work.scratch, *input = gate + count;
    const float *x = r->hidden, *product = gate;
    int rc;
    QT_TRY(layer_input(&x, stop, r, ROLE_PER_LAYER_GATE, err));
    if (*stop)
        goto done;
    QT_TRY(layer_linear(r, ROLE_PER_LAYER_GATE, gate, x, err));
    QT_TRY(l->be->copy_columns(l->be, input, width, r->state + per_layer_at(cfg) + l->index * width,
                               cfg->info.state, width, r->m, err));
    QT_TRY(l->be->activate(l->be, gate, gate, input, cfg->act, count, err));
    QT_TRY(layer_input(&product, stop, r, ROLE_PER_LAYER_OUT, err));
    if (!*stop)
        QT_TRY(layer_linear(r, ROLE_PER_LAYER_OUT, out, product, err));
done:
    return rc;
}
