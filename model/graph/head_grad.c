/* The loss at the head, and its gradients. */
#include "model/graph/layer.h"

static int head_chunk(struct qt_embed_head *e, double *losses, float *grad, float *norm,
                      const float *hidden, const struct qt_objective *o, size_t m,
                      struct qt_err *err)
{
    const struct config *cfg = &e->model->cfg;
    struct qt_backend *be = e->be;
    const float *head = e->head.weight ? e->head.weight : e->embed.weight;
    const float *w = e->final_norm.weight, *project = e->project_out.weight;
    size_t vocab = cfg->info.vocab, n = cfg->info.hidden;
    int rc = QT_OK;
    QT_TRY(qt_head_logits(e, e->logits, hidden, m, err));
    if (o->ref)
        QT_TRY(qt_head_logits(o->ref, e->ref_logits, o->ref_hidden, m, err));
    QT_TRY(be->loss_grad(be, losses, e->logits, e->logits, o->ref ? e->ref_logits : NULL,
                         o->targets, cfg->info.logit_softcap, o->weight, m, vocab, err));
    if (!grad)
        goto done;
    if (cfg->logit_scale != 1)
        QT_TRY(be->scale(be, e->logits, cfg->logit_scale, m * vocab, err));
    QT_TRY(be->linear_grad_x(be, project ? e->projected : grad, e->logits, head, false, m, vocab,
                             cfg->embed_dim, err));
    if (project)
        QT_TRY(
            be->linear_grad_x(be, grad, e->projected, project, false, m, cfg->embed_dim, n, err));
    if (w)
        QT_TRY(
            be->norm_grad(be, grad, norm, grad, hidden, w, cfg->arch->norm, cfg->eps, m, n, err));
done:
    return rc;
}

int qt_head_grad(struct qt_embed_head *e, double *losses, float *grad, float *norm,
                 const float *hidden, const struct qt_objective *objective, size_t m,
                 struct qt_err *err)
{
    size_t n = e->model->cfg.info.hidden, vocab = e->model->cfg.info.vocab;
    int rc = QT_OK;
    if (!e->logits)
        QT_TRY(qt_backend_floats(&e->logits, e->be, e->rows, vocab, err));
    if (objective->ref && !e->ref_logits)
        QT_TRY(qt_backend_floats(&e->ref_logits, e->be, e->rows, vocab, err));
    for (size_t at = 0; at < m; at += e->rows) {
        struct qt_objective o = *objective;
        o.ref_hidden = o.ref ? o.ref_hidden + at * n : NULL;
        o.targets = o.ref ? NULL : o.targets + at;
        QT_TRY(head_chunk(e, losses + at, grad ? grad + at * n : NULL, norm, hidden + at * n, &o,
                          qt_min_size(e->rows, m - at), err));
    }
done:
    return rc;
}
