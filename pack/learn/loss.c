/*
 * Loss and gradient of a batch. Its windows are divided into blocks (qt_sums_run), which do not
 * depend on the number of ranks: every rank runs those of its blocks, and the gradients with
 * respect to the weights of a layer are added up in a fixed tree.
 */
#include "pack/learn/learn.h"

struct learn_work {
    /* One batch; of a rank only the rows of its blocks are valid. Float arrays are backend memory,
     * [tokens][hidden] each. */
    uint32_t *ids, *targets;
    double *losses;
    float **hidden; /* inputs of the decoder layers, then the output of the last */
    size_t nhidden;
    /* Activations of each layer and block for the backward pass, kept_step floats apart; NULL: it
     * computes them. */
    float **kept;
    bool *asked;      /* whether there was room for those of a layer has been found out */
    size_t kept_step; /* 0: not yet known */
    size_t windows;   /* of a batch, at most */
    float *grad, *ref;
    /* All windows, backend memory. */
    float *all_ref;               /* last hidden states of the unquantized model */
    float *all_student, *all_out; /* scope=block: student inputs of a layer, target outputs */
    size_t inputs_of, outputs_of; /* number of layers that have run on all_student, on all_out */
    /* Layers and gradients. */
    struct qt_embed_head *head, *ref_head;
    struct qt_layer *layer; /* shared by all layers, because its working memory is large */
    size_t loaded; /* the layer whose student weights it has, or NONE if it may have others */
    /* Gradients of a layer, backend memory: of norms, then of linears or, if they are coded, of
     * their scales; room for those of any layer. */
    float *dw;
    size_t norm_at[QT_LAYER_NORMS], *linear_at; /* where each begins */
    size_t norms_end, dw_count;
    size_t linears; /* of a decoder layer, at most */
    float **wanted; /* [linears]: as in struct qt_layer_grads */
    const struct qt_coded **coded;
    float *host; /* host memory, as large as the largest gradient */
    struct qt_sums_memory memory;
};

#define NONE SIZE_MAX

/* ---- memory --------------------------------------------------------------------------------- */

/* Allocates gradients that are large enough for any layer. */
static int new_gradients(struct qt_learner *l, struct qt_err *err)
{
    enum { ALIGN = 64 / sizeof(float) };
    struct learn_work *work = l->work;
    const struct qt_linear *linear;
    size_t *size = NULL, largest = 0, norm_size = 0, at = 0;
    int rc;
    for (size_t i = 0; i < l->info.layers; i++) /* a layer may end with linears that do not learn */
        work->linears = qt_max_size(work->linears, qt_model_linears(&linear, l->model, i));
    QT_TRY(qt_array_new(&size, work->linears, sizeof *size, err));
    QT_TRY(qt_array_new(&work->linear_at, work->linears, sizeof *work->linear_at, err));
    QT_TRY(qt_array_new(&work->wanted, work->linears, sizeof *work->wanted, err));
    QT_TRY(qt_array_new(&work->coded, work->linears, sizeof *work->coded, err));
    for (size_t i = 0; i < l->nmatrices; i++) {
        const struct learn_matrix *m = &l->matrices[i];
        const size_t count = m->coded ? learn_coded_scales(m) : m->packed.n * m->packed.k;
        if (!m->learns)
            continue;
        size[m->index] = qt_max_size(size[m->index], count);
        largest = m->coded ? largest : qt_max_size(largest, count);
    }
    for (size_t i = 0; i < l->nnorms; i++)
        norm_size = qt_max_size(norm_size, l->run->plan.items[l->norms[i].item].tensor->count);
    largest = qt_max_size(largest, norm_size);
    for (size_t i = 0; i < QT_LAYER_NORMS; i++, at += qt_round_up(norm_size, ALIGN))
        work->norm_at[i] = at;
    work->norms_end = at;
    for (size_t i = 0; i < work->linears; at += qt_round_up(size[i++], ALIGN))
        work->linear_at[i] = at;
    work->dw_count = at;
    QT_TRY(qt_backend_floats(&work->dw, l->be, at, 1, err));
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
    QT_TRY(qt_array_new(&work->kept, l->info.layers, sizeof *work->kept, err));
    QT_TRY(qt_array_new(&work->asked, l->info.layers, sizeof *work->asked, err));
    work->windows = windows;
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
    learn_coded_close(l);
    if (!work)
        return;
    qt_embed_head_close(work->head);
    qt_embed_head_close(work->ref_head);
    qt_layer_close(work->layer);
    for (size_t i = 0; work->hidden && i < work->nhidden; i++)
        be->free(be, work->hidden[i]);
    for (size_t i = 0; work->kept && i < l->info.layers; i++)
        be->free(be, work->kept[i]);
    float *const backend[] = {work->grad,        work->ref,     work->all_ref,
                              work->all_student, work->all_out, work->dw};
    for (size_t i = 0; i < sizeof backend / sizeof *backend; i++)
        be->free(be, backend[i]);
    qt_free(work->linear_at);
    qt_free(work->memory.p);
    qt_free(work->wanted);
    qt_free(work->coded);
    qt_free(work->hidden);
    qt_free(work->kept);
    qt_free(work->asked);
    qt_free(work->ids);
    qt_free(work->targets);
    qt_free(work->losses);
    qt_free(work->host);
    qt_free(work);
    l->work = NULL;
}

/* ---- blocks --------------------------------------------------------------------------------- */

/* The windows of a batch, or all windows, in blocks. */
struct blocks {
    size_t n, first, end; /* blocks; those of this rank */
    size_t windows;
};

static struct qt_comm *comm_of(const struct qt_learner *l)
{
    return l->run->opt->comm;
}

static struct blocks blocks_of(const struct qt_learner *l, size_t windows)
{
    struct blocks b = {.n = qt_sums_count(windows), .windows = windows};
    b.end = qt_sums_blocks(&b.first, b.n, comm_of(l));
    return b;
}

/* The tokens [*first, result) of a block. */
static size_t block_tokens(size_t *first, const struct qt_learner *l, const struct blocks *b,
                           size_t block)
{
    *first = qt_sums_block_start(block, b->n, 1, b->windows) * l->data->seqlen;
    return qt_sums_block_start(block + 1, b->n, 1, b->windows) * l->data->seqlen;
}

/* Runs the loaded layer on this rank's blocks of hidden[tokens][hidden]. */
static int run_blocks(struct qt_learner *l, float *hidden, const struct blocks *b,
                      struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = b->first; i < b->end && rc == QT_OK; i++) {
        size_t first;
        const size_t end = block_tokens(&first, l, b, i);
        rc = qt_layer_run(l->work->layer, hidden + first * l->info.hidden, end - first,
                          l->data->seqlen, NULL, err);
    }
    return rc;
}

/* Gives all ranks the rows that the others have run: hidden[tokens][hidden]. */
static int join_blocks(struct qt_learner *l, float *hidden, const struct blocks *b,
                       struct qt_err *err)
{
    const size_t ranks = qt_comm_size(comm_of(l));
    int rc = QT_OK;
    for (size_t r = 0; ranks > 1 && r < ranks && rc == QT_OK; r++) {
        size_t block, first;
        const size_t end = qt_comm_share(&block, b->n, r, ranks);
        if (block == end)
            continue;
        block_tokens(&first, l, b, block);
        const size_t rows = qt_sums_block_start(end, b->n, 1, b->windows) * l->data->seqlen - first;
        rc = qt_comm_broadcast_on(comm_of(l), l->be, hidden + first * l->info.hidden,
                                  rows * l->info.hidden * sizeof *hidden, r, err);
    }
    return rc;
}

/* ---- forward -------------------------------------------------------------------------------- */

static int load_layer(struct qt_learner *l, const struct qt_weights *weights, size_t layer,
                      struct qt_err *err)
{
    struct learn_work *work = l->work;
    int rc = qt_run_check_interrupted(l->run, err);
    if (rc < 0 || (weights == &l->student && work->loaded == layer))
        return rc;
    work->loaded = weights == &l->student ? layer : NONE;
    l->be->same_weights = false;
    rc = work->layer ? qt_layer_load(work->layer, layer, weights, err)
                     : qt_layer_open(&work->layer, l->model, layer, weights, l->be, err);
    l->be->same_weights = true;
    return rc;
}

/* On this rank's blocks. */
static int run_layer(struct qt_learner *l, const struct qt_weights *weights, size_t layer,
                     float *hidden, const struct blocks *b, struct qt_err *err)
{
    int rc = load_layer(l, weights, layer, err);
    return rc < 0 ? rc : run_blocks(l, hidden, b, err);
}

/* Allocates memory for the activations of the layer, which is loaded, if that leaves three times as
 * much for other layers and all else. */
static int keep(struct qt_learner *l, size_t layer, struct qt_err *err)
{
    struct learn_work *work = l->work;
    const struct blocks b = blocks_of(l, work->windows);
    const size_t tokens = qt_ceil_div(work->windows, b.n) * l->data->seqlen;
    if (work->asked[layer] || !l->be->room)
        return QT_OK;
    work->asked[layer] = true;
    work->kept_step = qt_layer_kept_floats(work->layer, tokens, l->data->seqlen);
    return work->kept_step && work->kept_step < l->be->room(l->be) / (4 * b.n * sizeof(float))
               ? qt_backend_floats(&work->kept[layer], l->be, b.n, work->kept_step, err)
               : QT_OK;
}

/* NULL: none are kept. */
static float *kept_of(const struct qt_learner *l, size_t layer, size_t block)
{
    float *kept = l->work->kept[layer];
    return kept ? kept + block * l->work->kept_step : NULL;
}

/* out = output of the student's layer for `in`, before its backward pass; on this rank's blocks. */
static int run_and_keep(struct qt_learner *l, size_t layer, float *out, const float *in,
                        const struct blocks *b, struct qt_err *err)
{
    struct learn_work *work = l->work;
    const size_t bytes = b->windows * l->data->seqlen * l->info.hidden * sizeof *out;
    int rc;
    QT_TRY(load_layer(l, &l->student, layer, err));
    QT_TRY(keep(l, layer, err));
    if (!work->kept[layer]) {
        QT_TRY(l->be->copy(l->be, out, in, bytes, err));
        return run_blocks(l, out, b, err);
    }
    for (size_t i = b->first; i < b->end; i++) {
        size_t first;
        const size_t end = block_tokens(&first, l, b, i), at = first * l->info.hidden;
        QT_TRY(qt_layer_run_kept(work->layer, out + at, kept_of(l, layer, i), in + at, end - first,
                                 l->data->seqlen, err));
    }
done:
    return rc;
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
    const struct blocks all = blocks_of(l, l->data->samples);
    struct learn_work *work = l->work;
    int rc;
    QT_TRY(embed_all(&work->all_ref, l, &l->source, err));
    for (size_t layer = 0; layer < l->info.layers; layer++)
        QT_TRY(run_layer(l, &l->source, layer, work->all_ref, &all, err));
    QT_TRY(join_blocks(l, work->all_ref, &all, err));
    QT_TRY(qt_embed_head_open(&work->ref_head, l->model, &l->source, l->be, err));
done:
    return rc;
}

int learn_work_open(struct qt_learner *l, struct qt_err *err)
{
    int rc;
    QT_TRY(qt_array_new(&l->work, 1, sizeof *l->work, err));
    l->work->loaded = NONE;
    QT_TRY(learn_coded_open(l, err));
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
    return qt_comm_meet(comm_of(l), rc, err);
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

/* How many floats of dw the gradients of a layer's parameters take; 0: it has no parameters. */
static size_t gradient_count(const struct qt_learner *l, size_t layer)
{
    size_t count = 0;
    for (size_t i = 0; i < l->nnorms; i++)
        if (l->norms[i].layer == layer)
            count = l->work->norms_end;
    for (size_t i = 0; i < l->nmatrices; i++)
        if (l->matrices[i].learns && l->matrices[i].layer == layer)
            count = l->work->dw_count;
    return count;
}

/* The gradients that the layer's parameters need, in an array like work->dw; NULL: none. */
static struct qt_layer_grads gradients_in(float *dw, struct qt_learner *l, size_t layer)
{
    struct learn_work *work = l->work;
    struct qt_layer_grads wanted = {.linear = work->wanted, .coded = work->coded};
    for (size_t i = 0; i < work->linears; i++) {
        work->wanted[i] = NULL;
        work->coded[i] = NULL;
    }
    for (size_t i = 0; dw && i < l->nmatrices; i++) {
        const struct learn_matrix *m = &l->matrices[i];
        if (!m->learns || m->layer != layer)
            continue;
        wanted.linear[m->index] = dw + work->linear_at[m->index];
        wanted.coded[m->index] = m->coded ? learn_coded_of(m) : NULL;
    }
    for (size_t i = 0; dw && i < l->nnorms; i++)
        if (l->norms[i].layer == layer)
            wanted.norm[l->norms[i].index] = dw + work->norm_at[l->norms[i].index];
    return wanted;
}

/* A pass over the blocks of a batch. */
struct pass {
    struct qt_learner *l;
    const struct blocks *b;
    size_t layer;
    const float *hidden;          /* inputs */
    const struct qt_objective *o; /* of the head */
    bool gradient;
};

/* Sets work->dw to the sum of the gradients of all blocks; count: gradient_count. */
static int sum_blocks(struct pass *p, size_t count,
                      int (*block)(void *ctx, size_t block, void *const *into, struct qt_err *err),
                      struct qt_err *err)
{
    struct qt_learner *l = p->l;
    const struct qt_sums sums = {.be = l->be,
                                 .comm = comm_of(l),
                                 .memory = &l->work->memory,
                                 .blocks = p->b->n,
                                 .count = 1,
                                 .sum = {{.data = l->work->dw, .count = count}},
                                 .block = block,
                                 .ctx = p};
    void *const none[] = {NULL};
    int rc = QT_OK;
    if (count)
        rc = l->be->zero(l->be, l->work->dw, count * sizeof(float), err);
    for (size_t i = p->b->first; i < p->b->end && !count && rc == QT_OK; i++)
        rc = block(p, i, none, err);
    rc = qt_comm_meet(comm_of(l), rc, err);
    return rc == QT_OK && count ? qt_sums_run(&sums, err) : rc;
}

/* Adds the gradients of a matrix that is not coded to params.grad, of this rank's strips. */
static int add_matrix(struct qt_learner *l, const struct learn_matrix *m, const float *dw,
                      struct qt_err *err)
{
    const size_t k = m->packed.k, strips = qt_ceil_div(m->packed.n, QT_FRAG_ROWS);
    size_t first;
    const size_t end =
        qt_comm_share(&first, strips, qt_comm_rank(comm_of(l)), qt_comm_size(comm_of(l)));
    const size_t row = first * QT_FRAG_ROWS, rows = qt_min_size(end * QT_FRAG_ROWS, m->packed.n);
    if (first == end)
        return QT_OK;
    int rc =
        l->be->download(l->be, l->work->host, dw + row * k, (rows - row) * k * sizeof *dw, err);
    return rc < 0 ? rc : learn_params_grad(l, m, l->work->host, first, end, err);
}

/* Gives all ranks the gradients of all strips. */
static int join_matrix(struct qt_learner *l, const struct learn_matrix *m, struct qt_err *err)
{
    const size_t ranks = qt_comm_size(comm_of(l));
    const size_t strips = qt_ceil_div(m->packed.n, QT_FRAG_ROWS);
    size_t *end = NULL, first;
    if (ranks == 1 || m->coded)
        return QT_OK;
    int rc = qt_comm_meet(comm_of(l), qt_array_new(&end, ranks, sizeof *end, err), err);
    for (size_t r = 0; r < ranks && rc == QT_OK; r++)
        end[r] = qt_comm_share(&first, strips, r, ranks) * m->per_strip * sizeof(float);
    if (rc == QT_OK)
        rc = qt_comm_join(comm_of(l), l->params.grad + m->first, end, err);
    qt_free(end);
    return rc;
}

/* Takes the gradients in work->dw as those of the step. */
static int end_gradients(struct qt_learner *l, size_t layer, struct qt_err *err)
{
    struct learn_work *work = l->work;
    const struct qt_layer_grads wanted = gradients_in(work->dw, l, layer);
    int rc = QT_OK;
    for (size_t i = 0; i < l->nmatrices && rc == QT_OK; i++) {
        const struct learn_matrix *m = &l->matrices[i];
        if (m->learns && m->layer == layer)
            rc = (m->coded ? learn_coded_grad : add_matrix)(l, m, wanted.linear[m->index], err);
    }
    for (size_t i = 0; i < l->nnorms && rc == QT_OK; i++) {
        const struct learn_norm *norm = &l->norms[i];
        size_t n = l->run->plan.items[norm->item].tensor->count;
        float *grad = l->params.grad + norm->first;
        if (norm->layer != layer)
            continue;
        rc = l->be->download(l->be, work->host, wanted.norm[norm->index], n * sizeof *grad, err);
        for (size_t j = 0; j < n && rc == QT_OK; j++)
            grad[j] += work->host[j];
    }
    rc = qt_comm_meet(comm_of(l), rc, err);
    for (size_t i = 0; i < l->nmatrices && rc == QT_OK; i++)
        if (l->matrices[i].learns && l->matrices[i].layer == layer)
            rc = join_matrix(l, &l->matrices[i], err);
    return rc;
}

static int layer_block(void *ctx, size_t block, void *const *into, struct qt_err *err)
{
    const struct pass *p = ctx;
    struct qt_learner *l = p->l;
    const struct qt_layer_grads wanted = gradients_in(into[0], l, p->layer);
    size_t first;
    const size_t end = block_tokens(&first, l, p->b, block), at = first * l->info.hidden;
    return qt_layer_grad(l->work->layer, l->work->grad + at, &wanted, p->hidden + at,
                         kept_of(l, p->layer, block), end - first, l->data->seqlen, err);
}

static int layer_backward(struct qt_learner *l, size_t layer, const float *hidden,
                          const struct blocks *b, struct qt_err *err)
{
    struct pass p = {.l = l, .b = b, .layer = layer, .hidden = hidden};
    int rc;
    QT_TRY(qt_comm_meet(comm_of(l), load_layer(l, &l->student, layer, err), err));
    QT_TRY(sum_blocks(&p, gradient_count(l, layer), layer_block, err));
    QT_TRY(end_gradients(l, layer, err));
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

/* back: stores the input of layer i in hidden[i], for the backward pass; else runs in place in
 * hidden[0]. *last is the output of the last layer. */
static int model_forward(float **last, struct qt_learner *l, const struct blocks *b, bool back,
                         struct qt_err *err)
{
    struct learn_work *work = l->work;
    const size_t tokens = b->windows * l->data->seqlen;
    int rc;
    *last = work->hidden[0];
    QT_TRY(qt_embed_tokens(work->head, *last, work->ids, tokens, l->data->seqlen, err));
    for (size_t layer = 0; layer < l->info.layers; layer++) {
        if (!back) {
            QT_TRY(run_layer(l, &l->student, layer, *last, b, err));
            continue;
        }
        QT_TRY(run_and_keep(l, layer, work->hidden[layer + 1], *last, b, err));
        *last = work->hidden[layer + 1];
    }
done:
    return rc;
}

static int head_block(void *ctx, size_t block, void *const *into, struct qt_err *err)
{
    const struct pass *p = ctx;
    struct qt_learner *l = p->l;
    struct learn_work *work = l->work;
    const struct qt_layer_grads wanted = gradients_in(into[0], l, l->info.layers);
    struct qt_objective o = *p->o;
    size_t first;
    const size_t end = block_tokens(&first, l, p->b, block), at = first * l->info.hidden;
    o.ref_hidden = work->ref + at;
    o.targets = work->targets + first;
    return qt_head_grad(work->head, work->losses + first, p->gradient ? work->grad + at : NULL,
                        wanted.norm[0], p->hidden + at, &o, end - first, err);
}

/* Loss of each token in work->losses, in all ranks; gradient: its gradient with respect to `last`
 * in work->grad. */
static int head_loss(struct qt_learner *l, const float *last, const struct qt_objective *o,
                     const struct blocks *b, bool gradient, struct qt_err *err)
{
    const size_t seqlen = l->data->seqlen, layer = l->info.layers;
    struct pass p = {.l = l, .b = b, .layer = layer, .hidden = last, .o = o, .gradient = gradient};
    int rc;
    QT_TRY(sum_blocks(&p, gradient ? gradient_count(l, layer) : 0, head_block, err));
    if (gradient)
        QT_TRY(end_gradients(l, layer, err));
    QT_TRY(qt_sums_join_rows(l->work->losses, sizeof *l->work->losses, b->n, seqlen,
                             b->windows * seqlen, comm_of(l), err));
done:
    return rc;
}

int learn_model_loss(double *loss, struct qt_learner *l, const size_t *windows, size_t n,
                     bool gradient, struct qt_err *err)
{
    const struct blocks b = blocks_of(l, n);
    struct learn_work *work = l->work;
    bool kl = l->opt.objective == QT_LEARN_KL;
    size_t tokens = n * l->data->seqlen, scored = kl ? tokens : n * (l->data->seqlen - 1);
    const struct qt_objective o = {.ref = work->ref_head, .weight = 1 / (float)scored};
    float *last;
    int rc = QT_OK;
    work->loaded = NONE; /* parameters may have changed */
    gather_ids(l, windows, n);
    if (kl)
        QT_TRY(gather(work->ref, l, work->all_ref, windows, n, err));
    QT_TRY(update_head(l, err));
    QT_TRY(model_forward(&last, l, &b, gradient, err));
    QT_TRY(head_loss(l, last, &o, &b, gradient, err));
    *loss = 0;
    for (size_t i = 0; i < tokens; i++)
        *loss += work->losses[i] / (double)scored;
    for (size_t layer = l->info.layers; gradient && layer-- > 0;)
        QT_TRY(layer_backward(l, layer, work->hidden[layer], &b, err));
done:
    return qt_comm_meet(comm_of(l), rc, err);
}

/* ---- through one layer ---------------------------------------------------------------------- */

int learn_layer_enter(struct qt_learner *l, struct qt_err *err)
{
    const struct blocks all = blocks_of(l, l->data->samples);
    struct learn_work *work = l->work;
    int rc = QT_OK;
    work->loaded = NONE;
    for (; work->inputs_of < l->at.layer; work->inputs_of++)
        QT_TRY(run_layer(l, &l->student, work->inputs_of, work->all_student, &all, err));
    for (; work->outputs_of <= l->at.layer; work->outputs_of++)
        QT_TRY(run_layer(l, &l->source, work->outputs_of, work->all_out, &all, err));
    QT_TRY(join_blocks(l, work->all_student, &all, err));
    QT_TRY(join_blocks(l, work->all_out, &all, err));
done:
    return qt_comm_meet(comm_of(l), rc, err);
}

/* *sum = the squared error of a block's outputs, whose gradient is in work->grad. */
static int block_error(double *sum, struct qt_learner *l, const struct blocks *b, size_t block,
                       struct qt_err *err)
{
    const size_t width = l->info.hidden, all = b->windows * l->data->seqlen * width;
    struct learn_work *work = l->work;
    size_t first;
    const size_t end = block_tokens(&first, l, b, block), at = first * width;
    return l->be->square_grad(l->be, sum, work->grad + at, work->hidden[1] + at, work->ref + at,
                              1 / (float)all, (end - first) * width, err);
}

int learn_layer_loss(double *loss, struct qt_learner *l, const size_t *windows, size_t n,
                     bool gradient, struct qt_err *err)
{
    const struct blocks b = blocks_of(l, n);
    struct learn_work *work = l->work;
    size_t tokens = n * l->data->seqlen, count = tokens * l->info.hidden;
    double sum[QT_SUM_BLOCKS];
    int rc;
    work->loaded = NONE; /* parameters may have changed */
    QT_TRY(gather(work->hidden[0], l, work->all_student, windows, n, err));
    QT_TRY(gather(work->ref, l, work->all_out, windows, n, err));
    QT_TRY(run_and_keep(l, l->at.layer, work->hidden[1], work->hidden[0], &b, err));
    for (size_t i = b.first; i < b.end; i++)
        QT_TRY(block_error(&sum[i], l, &b, i, err));
    QT_TRY(qt_sums_join_rows(sum, sizeof *sum, b.n, 1, b.n, comm_of(l), err));
    *loss = 0;
    for (size_t i = 0; i < b.n; i++)
        *loss += sum[i] / (double)count;
    if (gradient)
        QT_TRY(layer_backward(l, l->at.layer, work->hidden[0], &b, err));
done:
    return qt_comm_meet(comm_of(l), rc, err);
}
