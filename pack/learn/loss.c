#include "pack/learn/learn.h"

struct learn_work {
    /* One batch; float arrays are backend memory, [tokens][hidden] each. */
    uint32_t *ids, *targets;
    double *losses;
    float **hidden; /* inputs of the decoder layers, then the output of the last */
    size_t nhidden;
    float *grad, *ref;
    /* All windows, backend memory. */
    float *all_ref;               /* last hidden states of the unquantized model */
    float *all_student, *all_out; /* scope=block: student inputs of a layer, target outputs */
    size_t inputs_of, outputs_of; /* number of layers that have run on all_student, on all_out */
    /* Layers and gradients. */
    struct qt_embed_head *head, *ref_head;
    struct qt_layer *layer;   /* shared by all layers, because its working memory is large */
    struct qt_layer_grads dw; /* backend memory, each large enough for any layer */
    float **wanted;           /* [linears]: those of dw.linear that a layer needs */
    size_t linears;           /* of a decoder layer, at most */
    float *host;              /* host memory, as large as the largest of dw */
};

/* ---- memory --------------------------------------------------------------------------------- */

/* Allocates gradients that are large enough for any layer. */
static int new_gradients(struct qt_learner *l, struct qt_err *err)
{
    struct learn_work *work = l->work;
    const struct qt_linear *linear;
    size_t *size = NULL, largest = 0, norm_size = 0;
    int rc;
    for (size_t i = 0; i < l->info.layers; i++) /* a layer may end with linears that do not learn */
        work->linears = qt_max_size(work->linears, qt_model_linears(&linear, l->model, i));
    QT_TRY(qt_array_new(&size, work->linears, sizeof *size, err));
    QT_TRY(qt_array_new(&work->dw.linear, work->linears, sizeof *work->dw.linear, err));
    QT_TRY(qt_array_new(&work->wanted, work->linears, sizeof *work->wanted, err));
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
    for (size_t i = 0; i < work->linears; i++)
        if (size[i])
            QT_TRY(qt_backend_floats(&work->dw.linear[i], l->be, size[i], 1, err));
    for (size_t i = 0; i < l->nnorms; i++) {
        const struct learn_norm *norm = &l->norms[i];
        if (!work->dw.norm[norm->index])
            QT_TRY(qt_backend_floats(&work->dw.norm[norm->index], l->be, norm_size, 1, err));
    }
    QT_TRY(qt_array_new(&work->host, largest, sizeof *work->host, err));
done:
    qt_free(size);
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
    qt_embed_head_close(work->head);
    qt_embed_head_close(work->ref_head);
    qt_layer_close(work->layer);
    for (size_t i = 0; work->hidden && i < work->nhidden; i++)
        be->free(be, work->hidden[i]);
    for (size_t i = 0; work->dw.linear && i < work->linears; i++)
        be->free(be, work->dw.linear[i]);
    for (size_t i = 0; i < QT_LAYER_NORMS; i++)
        be->free(be, work->dw.norm[i]);
    float *const backend[] = {work->grad, work->ref, work->all_ref, work->all_student,
                              work->all_out};
    for (size_t i = 0; i < sizeof backend / sizeof *backend; i++)
        be->free(be, backend[i]);
    qt_free(work->dw.linear);
    qt_free(work->wanted);
    qt_free(work->hidden);
    qt_free(work->ids);
    qt_free(work->targets);
    qt_free(work->losses);
    qt_free(work->host);
    qt_free(work);
    l->work = NULL;
}

/* ---- forward -------------------------------------------------------------------------------- */

static int load_layer(struct qt_learner *l, const struct qt_weights *weights, size_t layer,
                      struct qt_err *err)
{
    struct learn_work *work = l->work;
    int rc = qt_run_check_interrupted(l->run, err);
    if (rc < 0)
        return rc;
    return work->layer ? qt_layer_load(work->layer, layer, weights, err)
                       : qt_layer_open(&work->layer, l->model, layer, weights, l->be, err);
}

static int run_layer(struct qt_learner *l, const struct qt_weights *weights, size_t layer,
                     float *hidden, size_t tokens, struct qt_err *err)
{
    int rc = load_layer(l, weights, layer, err);
    return rc < 0 ? rc : qt_layer_run(l->work->layer, hidden, tokens, l->data->seqlen, NULL, err);
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

/* Computes the last hidden states of the unquantized model. They take less memory than its logits,
 * which qt_head_grad computes from them. */
static int run_reference(struct qt_learner *l, struct qt_err *err)
{
    struct learn_work *work = l->work;
    int rc;
    QT_TRY(embed_all(&work->all_ref, l, &l->source, err));
    for (size_t layer = 0; layer < l->info.layers; layer++)
        QT_TRY(run_layer(l, &l->source, layer, work->all_ref, l->data->samples * l->data->seqlen,
                         err));
    QT_TRY(qt_embed_head_open(&work->ref_head, l->model, &l->source, l->be, err));
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
        QT_TRY(qt_embed_head_open(&l->work->head, l->model, &l->student, l->be, err));
        if (l->opt.objective == QT_LEARN_KL)
            QT_TRY(run_reference(l, err));
    }
done:
    return rc;
}

/* Copies the rows of windows[n] from the array of all windows. */
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

/* ---- gradients of a layer's parameters ------------------------------------------------------ */

static int zero(struct qt_learner *l, float *x, size_t count, struct qt_err *err)
{
    return l->be->zero(l->be, x, count * sizeof *x, err);
}

/* Returns in *wanted the arrays of work->dw that the layer's parameters need, and zeroes them. */
static int begin_gradients(struct qt_layer_grads *wanted, struct qt_learner *l, size_t layer,
                           struct qt_err *err)
{
    struct learn_work *work = l->work;
    int rc = QT_OK;
    *wanted = (struct qt_layer_grads){.linear = work->wanted};
    for (size_t i = 0; i < work->linears; i++)
        work->wanted[i] = NULL;
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

/* Adds the gradients of *wanted to params.grad. */
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

static int layer_backward(struct qt_learner *l, size_t layer, const float *hidden, size_t tokens,
                          struct qt_err *err)
{
    struct qt_layer_grads wanted;
    int rc;
    QT_TRY(begin_gradients(&wanted, l, layer, err));
    QT_TRY(load_layer(l, &l->student, layer, err));
    QT_TRY(qt_layer_grad(l->work->layer, l->work->grad, &wanted, hidden, tokens, l->data->seqlen,
                         err));
    QT_TRY(end_gradients(&wanted, l, layer, err));
done:
    return rc;
}

/* ---- through the model ---------------------------------------------------------------------- */

/* Sets the final norm of the student if it is tuned. */
static int update_head(struct qt_learner *l, struct qt_err *err)
{
    void *stored = NULL;
    int rc = QT_OK;
    for (size_t i = 0; i < l->nnorms; i++)
        if (l->norms[i].layer == l->info.layers) {
            QT_TRY(learn_norm_stored(&stored, l->work->host, l, &l->norms[i], err));
            QT_TRY(qt_head_set_norm(l->work->head, l->work->host, err));
        }
done:
    qt_free(stored);
    return rc;
}

/* keep: stores the input of layer i in hidden[i], for the backward pass; else runs in place in
 * hidden[0]. *last is the output of the last layer. */
static int model_forward(float **last, struct qt_learner *l, size_t tokens, bool keep,
                         struct qt_err *err)
{
    struct learn_work *work = l->work;
    size_t bytes = tokens * l->info.hidden * sizeof(float);
    int rc;
    *last = work->hidden[0];
    QT_TRY(qt_embed_tokens(work->head, *last, work->ids, tokens, l->data->seqlen, err));
    for (size_t layer = 0; layer < l->info.layers; layer++) {
        if (keep) {
            QT_TRY(l->be->copy(l->be, work->hidden[layer + 1], *last, bytes, err));
            *last = work->hidden[layer + 1];
        }
        QT_TRY(run_layer(l, &l->student, layer, *last, tokens, err));
    }
done:
    return rc;
}

/* Loss of each token in work->losses; gradient: its gradient with respect to `last` in
 * work->grad. */
static int head_loss(struct qt_learner *l, const float *last, const struct qt_objective *o,
                     size_t tokens, bool gradient, struct qt_err *err)
{
    struct learn_work *work = l->work;
    struct qt_layer_grads wanted;
    int rc;
    QT_TRY(begin_gradients(&wanted, l, l->info.layers, err));
    QT_TRY(qt_head_grad(work->head, work->losses, gradient ? work->grad : NULL, wanted.norm[0],
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
        .ref = work->ref_head,
        .ref_hidden = work->ref,
        .targets = work->targets,
        .weight = 1 / (float)scored,
    };
    float *last;
    int rc;
    gather_ids(l, windows, n);
    if (kl)
        QT_TRY(gather(work->ref, l, work->all_ref, windows, n, err));
    QT_TRY(update_head(l, err));
    QT_TRY(model_forward(&last, l, tokens, gradient, err));
    QT_TRY(head_loss(l, last, &o, tokens, gradient, err));
    *loss = 0;
    for (size_t i = 0; i < tokens; i++)
        *loss += work->losses[i] / (double)scored;
    for (size_t layer = l->info.layers; gradient && layer-- > 0;)
        QT_TRY(layer_backward(l, layer, work->hidden[layer], tokens, err));
done:
    return rc;
}

/* ---- through one layer ---------------------------------------------------------------------- */

int learn_layer_enter(struct qt_learner *l, struct qt_err *err)
{
    struct learn_work *work = l->work;
    size_t tokens = l->data->samples * l->data->seqlen;
    int rc = QT_OK;
    for (; work->inputs_of < l->at.layer; work->inputs_of++)
        QT_TRY(run_layer(l, &l->student, work->inputs_of, work->all_student, tokens, err));
    for (; work->outputs_of <= l->at.layer; work->outputs_of++)
        QT_TRY(run_layer(l, &l->source, work->outputs_of, work->all_out, tokens, err));
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
    QT_TRY(run_layer(l, &l->student, l->at.layer, work->hidden[1], tokens, err));
    QT_TRY(be->square_grad(be, &sum, work->grad, work->hidden[1], work->ref, 1 / (float)count,
                           count, err));
    *loss = sum / (double)count;
    if (gradient)
        QT_TRY(layer_backward(l, l->at.layer, work->hidden[0], tokens, err));
done:
    return rc;
}
