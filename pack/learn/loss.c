#include "pack/learn/learn.h"

struct learn_work {
    struct qt_embed_head *ends, *ref_ends;
    struct qt_layer *block;  /* one for all layers: its working memory is large */
    uint32_t *ids, *targets; /* of a batch */
    double *losses;
    float **hidden; /* backend: inputs of the blocks and the last output, of a batch */
    size_t nhidden;
    float *grad, *ref;            /* backend, of a batch */
    float *all_ref;               /* backend, all windows: the unquantized model's last output */
    struct qt_layer_grads dw;     /* backend, each as large as that of any block, norms all alike */
    float *host;                  /* the largest of those, downloaded */
    float *all_student, *all_out; /* scope=block: inputs of the block; its unquantized output */
    size_t inputs_of, outputs_of; /* blocks that these two stand in front of, behind */
};

/* ---- memory --------------------------------------------------------------------------------- */

/* Space for the gradients of any one block. */
static int new_gradients(struct qt_learner *l, struct qt_err *err)
{
    struct learn_work *work = l->work;
    size_t size[QT_LAYER_LINEARS] = {0}, largest = 0, norm_size = 0;
    int rc = QT_OK;
    for (size_t i = 0; i < l->nmatrices; i++) {
        const struct learn_matrix *m = &l->matrices[i];
        size_t count = m->packed.n * m->packed.k;
        if (m->learns && count > size[m->index])
            size[m->index] = count;
        largest = m->learns && count > largest ? count : largest;
    }
    for (size_t i = 0; i < l->nnorms; i++)
        norm_size = qt_max_size(norm_size, l->run->plan.items[l->norms[i].item].tensor->count);
    largest = qt_max_size(largest, norm_size);
    for (size_t i = 0; i < QT_LAYER_LINEARS; i++)
        if (size[i])
            QT_TRY(qt_backend_floats(&work->dw.linear[i], l->be, size[i], 1, err));
    for (size_t i = 0; i < l->nnorms; i++) {
        const struct learn_norm *norm = &l->norms[i];
        if (!work->dw.norm[norm->index])
            QT_TRY(qt_backend_floats(&work->dw.norm[norm->index], l->be, norm_size, 1, err));
    }
    QT_TRY(qt_array_new(&work->host, largest, sizeof *work->host, err));
done:
    return rc;
}

static int new_buffers(struct qt_learner *l, struct qt_err *err)
{
    struct learn_work *work = l->work;
    const size_t windows = qt_min_size(l->opt.batch, qt_max_size(l->ntrain, l->nheld));
    size_t batch = windows * l->data->seqlen, width = l->info.hidden;
    int rc = QT_OK;
    work->nhidden = l->opt.scope == QT_LEARN_BLOCK ? 2 : l->info.layers + 1;
    QT_TRY(qt_array_new(&work->hidden, work->nhidden, sizeof *work->hidden, err));
    for (size_t i = 0; i < work->nhidden; i++)
        QT_TRY(qt_backend_floats(&work->hidden[i], l->be, batch, width, err));
    QT_TRY(qt_backend_floats(&work->grad, l->be, batch, width, err));
    QT_TRY(qt_backend_floats(&work->ref, l->be, batch, width, err));
    QT_TRY(qt_array_new(&work->ids, batch, sizeof *work->ids, err));
    QT_TRY(qt_array_new(&work->targets, batch, sizeof *work->targets, err));
    QT_TRY(qt_array_new(&work->losses, batch, sizeof *work->losses, err));
    QT_TRY(new_gradients(l, err));
done:
    return rc;
}

void learn_work_close(struct qt_learner *l)
{
    struct learn_work *work = l->work;
    struct qt_backend *be = l->be;
    if (!work)
        return;
    qt_embed_head_close(work->ends);
    qt_embed_head_close(work->ref_ends);
    qt_layer_close(work->block);
    for (size_t i = 0; work->hidden && i < work->nhidden; i++)
        be->free(be, work->hidden[i]);
    for (size_t i = 0; i < QT_LAYER_LINEARS; i++)
        be->free(be, work->dw.linear[i]);
    for (size_t i = 0; i < QT_LAYER_NORMS; i++)
        be->free(be, work->dw.norm[i]);
    float *const backend[] = {work->grad, work->ref, work->all_ref, work->all_student,
                              work->all_out};
    for (size_t i = 0; i < sizeof backend / sizeof *backend; i++)
        be->free(be, backend[i]);
    qt_free(work->hidden);
    qt_free(work->ids);
    qt_free(work->targets);
    qt_free(work->losses);
    qt_free(work->host);
    qt_free(work);
    l->work = NULL;
}

/* ---- forward -------------------------------------------------------------------------------- */

static int load_block(struct qt_learner *l, const struct qt_weights *weights, size_t layer,
                      struct qt_err *err)
{
    struct learn_work *work = l->work;
    int rc = qt_run_check_interrupted(l->run, err);
    if (rc < 0)
        return rc;
    return work->block ? qt_layer_load(work->block, layer, weights, err)
                       : qt_layer_open(&work->block, l->model, layer, weights, l->be, err);
}

static int run_block(struct qt_learner *l, const struct qt_weights *weights, size_t layer,
                     float *hidden, size_t tokens, struct qt_err *err)
{
    int rc = load_block(l, weights, layer, err);
    return rc < 0 ? rc : qt_layer_run(l->work->block, hidden, tokens, l->data->seqlen, NULL, err);
}

static int embed_all(float **out, struct qt_learner *l, const struct qt_weights *weights,
                     struct qt_err *err)
{
    size_t tokens = l->data->samples * l->data->seqlen;
    int rc = qt_backend_floats(out, l->be, tokens, l->info.hidden, err);
    return rc < 0 ? rc
                  : qt_model_embed(*out, l->model, weights, l->be, l->data->ids, tokens,
                                   l->data->seqlen, err);
}

/* The unquantized model's last hidden states: its logits can be had from them at any time. */
static int run_reference(struct qt_learner *l, struct qt_err *err)
{
    struct learn_work *work = l->work;
    int rc;
    QT_TRY(embed_all(&work->all_ref, l, &l->source, err));
    for (size_t layer = 0; layer < l->info.layers; layer++)
        QT_TRY(run_block(l, &l->source, layer, work->all_ref, l->data->samples * l->data->seqlen,
                         err));
    QT_TRY(qt_embed_head_open(&work->ref_ends, l->model, &l->source, l->be, err));
done:
    return rc;
}

int learn_work_open(struct qt_learner *l, struct qt_err *err)
{
    int rc = qt_array_new(&l->work, 1, sizeof *l->work, err);
    if (rc < 0)
        return rc;
    QT_TRY(new_buffers(l, err));
    if (l->opt.scope == QT_LEARN_BLOCK) {
        QT_TRY(embed_all(&l->work->all_student, l, &l->student, err));
        QT_TRY(embed_all(&l->work->all_out, l, &l->source, err));
    } else {
        QT_TRY(qt_embed_head_open(&l->work->ends, l->model, &l->student, l->be, err));
        if (l->opt.objective == QT_LEARN_KL)
            QT_TRY(run_reference(l, err));
    }
done:
    return rc;
}

/* Rows of some windows out of all. */
static int gather(float *out, struct qt_learner *l, const float *all, const size_t *windows,
                  size_t n, struct qt_err *err)
{
    size_t window = l->data->seqlen * l->info.hidden;
    int rc = QT_OK;
    for (size_t i = 0; i < n && rc == QT_OK; i++)
        rc = l->be->copy(l->be, out + i * window, all + windows[i] * window, window * sizeof *out,
                         err);
    return rc;
}

static void gather_ids(struct qt_learner *l, const size_t *windows, size_t n)
{
    struct learn_work *work = l->work;
    size_t seqlen = l->data->seqlen;
    for (size_t i = 0; i < n * seqlen; i++) {
        const uint32_t *ids = l->data->ids + windows[i / seqlen] * seqlen;
        size_t pos = i % seqlen;
        work->ids[i] = ids[pos];
        work->targets[i] = pos + 1 < seqlen ? ids[pos + 1] : QT_NO_TARGET;
    }
}

/* ---- gradients of a block's parameters ------------------------------------------------------ */

static int zero(struct qt_learner *l, float *x, size_t count, struct qt_err *err)
{
    return l->be->zero(l->be, x, count * sizeof *x, err);
}

/* Which of work->dw the layer wants, zeroed. */
static int begin_gradients(struct qt_layer_grads *wanted, struct qt_learner *l, size_t layer,
                           struct qt_err *err)
{
    struct learn_work *work = l->work;
    int rc = QT_OK;
    *wanted = (struct qt_layer_grads){0};
    for (size_t i = 0; i < l->nmatrices; i++) {
        const struct learn_matrix *m = &l->matrices[i];
        if (!m->learns || m->layer != layer)
            continue;
        wanted->linear[m->index] = work->dw.linear[m->index];
        QT_TRY(zero(l, work->dw.linear[m->index], m->packed.n * m->packed.k, err));
    }
    for (size_t i = 0; i < l->nnorms; i++) {
        const struct learn_norm *norm = &l->norms[i];
        if (norm->layer != layer)
            continue;
        wanted->norm[norm->index] = work->dw.norm[norm->index];
        QT_TRY(
            zero(l, work->dw.norm[norm->index], l->run->plan.items[norm->item].tensor->count, err));
    }
done:
    return rc;
}

/* From what is in wanted into params.grad. */
static int end_gradients(const struct qt_layer_grads *wanted, struct qt_learner *l, size_t layer,
                         struct qt_err *err)
{
    struct learn_work *work = l->work;
    struct qt_backend *be = l->be;
    int rc = QT_OK;
    for (size_t i = 0; i < l->nmatrices; i++) {
        const struct learn_matrix *m = &l->matrices[i];
        if (!m->learns || m->layer != layer)
            continue;
        QT_TRY(be->download(be, work->host, wanted->linear[m->index],
                            m->packed.n * m->packed.k * sizeof *work->host, err));
        QT_TRY(learn_params_grad(l, m, work->host, err));
    }
    for (size_t i = 0; i < l->nnorms; i++) {
        const struct learn_norm *norm = &l->norms[i];
        size_t n = l->run->plan.items[norm->item].tensor->count;
        float *grad = l->params.grad + norm->first;
        if (norm->layer != layer)
            continue;
        QT_TRY(be->download(be, work->host, wanted->norm[norm->index], n * sizeof *grad, err));
        for (size_t j = 0; j < n; j++)
            grad[j] += work->host[j];
    }
done:
    return rc;
}

static int block_back(struct qt_learner *l, size_t layer, const float *hidden, size_t tokens,
                      struct qt_err *err)
{
    struct qt_layer_grads wanted;
    int rc;
    QT_TRY(begin_gradients(&wanted, l, layer, err));
    QT_TRY(load_block(l, &l->student, layer, err));
    QT_TRY(qt_layer_grad(l->work->block, l->work->grad, &wanted, hidden, tokens, l->data->seqlen,
                         err));
    QT_TRY(end_gradients(&wanted, l, layer, err));
done:
    return rc;
}

/* ---- through the model ---------------------------------------------------------------------- */

/* The final norm as it now is, where it is tuned. */
static int refresh_ends(struct qt_learner *l, struct qt_err *err)
{
    void *stored = NULL;
    int rc = QT_OK;
    for (size_t i = 0; i < l->nnorms; i++)
        if (l->norms[i].layer == l->info.layers) {
            QT_TRY(learn_norm_stored(&stored, l->work->host, l, &l->norms[i], err));
            QT_TRY(qt_head_set_norm(l->work->ends, l->work->host, err));
        }
done:
    qt_free(stored);
    return rc;
}

/* hidden[i] of all blocks for a gradient; else all of it in place in hidden[0]. *last is the last
 * output. */
static int model_forward(float **last, struct qt_learner *l, size_t tokens, bool keep,
                         struct qt_err *err)
{
    struct learn_work *work = l->work;
    size_t bytes = tokens * l->info.hidden * sizeof(float);
    int rc;
    *last = work->hidden[0];
    QT_TRY(qt_embed_tokens(work->ends, *last, work->ids, tokens, l->data->seqlen, err));
    for (size_t layer = 0; layer < l->info.layers; layer++) {
        if (keep) {
            QT_TRY(l->be->copy(l->be, work->hidden[layer + 1], *last, bytes, err));
            *last = work->hidden[layer + 1];
        }
        QT_TRY(run_block(l, &l->student, layer, *last, tokens, err));
    }
done:
    return rc;
}

static int head_back(struct qt_learner *l, const float *last, const struct qt_objective *o,
                     size_t tokens, bool gradient, struct qt_err *err)
{
    struct learn_work *work = l->work;
    struct qt_layer_grads wanted;
    int rc;
    QT_TRY(begin_gradients(&wanted, l, l->info.layers, err));
    QT_TRY(qt_head_grad(work->ends, work->losses, gradient ? work->grad : NULL, wanted.norm[0],
                        last, o, tokens, err));
    if (gradient)
        QT_TRY(end_gradients(&wanted, l, l->info.layers, err));
done:
    return rc;
}

int learn_model_loss(double *loss, struct qt_learner *l, const size_t *windows, size_t n,
                     bool gradient, struct qt_err *err)
{
    struct learn_work *work = l->work;
    bool kl = l->opt.objective == QT_LEARN_KL;
    size_t tokens = n * l->data->seqlen, scored = kl ? tokens : n * (l->data->seqlen - 1);
    struct qt_objective o = {
        .ref = work->ref_ends,
        .ref_hidden = work->ref,
        .targets = work->targets,
        .weight = 1 / (float)scored,
    };
    float *last;
    int rc;
    gather_ids(l, windows, n);
    if (kl)
        QT_TRY(gather(work->ref, l, work->all_ref, windows, n, err));
    QT_TRY(refresh_ends(l, err));
    QT_TRY(model_forward(&last, l, tokens, gradient, err));
    QT_TRY(head_back(l, last, &o, tokens, gradient, err));
    *loss = 0;
    for (size_t i = 0; i < tokens; i++)
        *loss += work->losses[i] / (double)scored;
    for (size_t layer = l->info.layers; gradient && layer-- > 0;)
        QT_TRY(block_back(l, layer, work->hidden[layer], tokens, err));
done:
    return rc;
}

/* ---- through one block ---------------------------------------------------------------------- */

int learn_layer_enter(struct qt_learner *l, struct qt_err *err)
{
    struct learn_work *work = l->work;
    size_t tokens = l->data->samples * l->data->seqlen;
    int rc = QT_OK;
    for (; work->inputs_of < l->at.layer; work->inputs_of++)
        QT_TRY(run_block(l, &l->student, work->inputs_of, work->all_student, tokens, err));
    for (; work->outputs_of <= l->at.layer; work->outputs_of++)
        QT_TRY(run_block(l, &l->source, work->outputs_of, work->all_out, tokens, err));
done:
    return rc;
}

int learn_layer_loss(double *loss, struct qt_learner *l, const size_t *windows, size_t n,
                     bool gradient, struct qt_err *err)
{
    struct learn_work *work = l->work;
    struct qt_backend *be = l->be;
    size_t tokens = n * l->data->seqlen, count = tokens * l->info.hidden;
    double sum;
    int rc;
    QT_TRY(gather(work->hidden[0], l, work->all_student, windows, n, err));
    QT_TRY(gather(work->ref, l, work->all_out, windows, n, err));
    QT_TRY(be->copy(be, work->hidden[1], work->hidden[0], count * sizeof(float), err));
    QT_TRY(run_block(l, &l->student, l->at.layer, work->hidden[1], tokens, err));
    QT_TRY(be->square_grad(be, &sum, work->grad, work->hidden[1], work->ref, 1 / (float)count,
                           count, err));
    *loss = sum / (double)count;
    if (gradient)
        QT_TRY(block_back(l, l->at.layer, work->hidden[0], tokens, err));
done:
    return rc;
}
