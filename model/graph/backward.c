/*
 * The backward pass of every family: see the drawing in internal.h. Each chunk of sequences is run
 * forward, keeping the activations that the gradients need, and then backward, MLP first. The first
 * is done together with the forward pass of the model (qt_layer_run_kept) where there is memory for
 * the activations of all chunks; otherwise only the input of a decoder layer is kept from that.
 *
 * A sublayer computes x -> x + r f(x), where f includes the norms and r is residual_scale. The
 * gradient g of its output stays in place, and the gradient through f is added to it. With
 * norm_after the sublayer computes x -> norm(x + r f(x)). Parallel sublayers compute
 * x -> x + f(x) + h(x): both f and h take the gradient of the output.
 */
#include "model/graph/layer.h"

/* ---- working memory ------------------------------------------------------------------------- */

/* Bump allocator; base = NULL: only counts. */
struct arena {
    float *base;
    size_t used;
};

static float *carve(struct arena *a, size_t count)
{
    float *p = a->base ? a->base + a->used : NULL;
    a->used += qt_round_up(count, 16);
    return p;
}

static size_t inner_width(const struct config *cfg)
{
    return qt_max_size(cfg->dense_width, qt_max_size(cfg->expert_width, cfg->shared_width));
}

static bool has_part(const struct qt_layer *l, enum role role)
{
    return l->parts[role].weight != NULL;
}

/* Sets the pointers to the forward activations of n tokens into memory that starts at `base`;
 * returns the number of floats used. */
static size_t lay_out_kept(struct layer_grad_work *w, const struct qt_layer *l, size_t n,
                           float *base)
{
    const struct config *cfg = &l->model->cfg;
    const struct qt_model_info *info = &cfg->info;
    const bool q_norm = has_part(l, ROLE_Q_NORM) || cfg->bare_norms;
    const bool attn_gated = has_part(l, ROLE_ATTN_GATE);
    const bool raw_out = has_part(l, ROLE_MLP_OUT) || cfg->norm_after;
    const size_t h = n * info->hidden, inner = n * inner_width(cfg);
    const size_t q = n * info->heads * info->head_dim, kv = n * info->kv_heads * info->head_dim;
    struct arena at = {base, 0};
    w->attn_in = layer_norm_in_front(l, ROLE_ATTN_IN) ? carve(&at, h) : NULL;
    w->q = carve(&at, q);
    w->k = carve(&at, kv);
    w->q_raw = q_norm ? carve(&at, q) : w->q;
    w->k_raw = q_norm ? carve(&at, kv) : w->k;
    w->v = carve(&at, kv);
    w->attn_gate = attn_gated ? carve(&at, q) : NULL;
    w->attended = carve(&at, q);
    w->y = attn_gated ? carve(&at, q) : w->attended;
    w->o_raw = carve(&at, h);
    w->attn_sum = cfg->norm_after ? carve(&at, h) : NULL;
    w->mid = carve(&at, h);
    w->mlp_in = layer_norm_in_front(l, ROLE_MLP_IN) ? carve(&at, h) : NULL;
    w->up = carve(&at, inner);
    w->gate = has_part(l, ROLE_GATE) ? carve(&at, inner) : w->up;
    w->act = carve(&at, inner);
    w->down_raw = raw_out ? carve(&at, h) : NULL;
    w->mlp_sum = cfg->norm_after ? carve(&at, h) : NULL;
    return at.used;
}

/* The same for all other arrays. */
static size_t lay_out(struct layer_grad_work *w, const struct qt_layer *l, float *base)
{
    const struct config *cfg = &l->model->cfg;
    const struct qt_model_info *info = &cfg->info;
    const size_t n = w->rows, h = n * info->hidden, mlp = 2 * n * inner_width(cfg);
    const size_t q = n * info->heads * info->head_dim, kv = n * info->kv_heads * info->head_dim;
    struct arena at = {base, 0};
    w->dx = carve(&at, h);
    w->dexpert = info->experts ? carve(&at, h) : NULL;
    w->dsum = info->experts ? carve(&at, h) : NULL;
    w->dmlp = cfg->parallel && layer_norm_in_front(l, ROLE_MLP_IN) ? carve(&at, h) : NULL;
    w->qkv = cfg->arch->grouped_qkv ? carve(&at, q + 2 * kv) : NULL;
    w->dscratch = carve(&at, qt_max_size(2 * (q + kv), mlp));
    return at.used;
}

/* kept: memory for the forward activations, NULL: that of the layer. The products do not overflow:
 * see the limits of struct config. */
static int prepare(struct qt_layer *l, size_t rows, size_t seqlen, float *kept, struct qt_err *err)
{
    struct layer_grad_work *w = &l->grad;
    size_t floats;
    int rc = QT_OK;
    QT_TRY(layer_prepare(l, l->model->cfg.info.experts ? rows : 0, seqlen, err));
    if (!w->memory || rows > w->rows) {
        l->be->free(l->be, w->memory);
        w->rows = rows;
        QT_TRY(qt_backend_floats(&w->memory, l->be, lay_out(w, l, NULL), 1, err));
    }
    lay_out(w, l, w->memory);
    floats = lay_out_kept(w, l, rows, kept);
    if (!kept && floats > w->kept_floats) {
        l->be->free(l->be, w->kept_memory);
        w->kept_floats = 0;
        QT_TRY(qt_backend_floats(&w->kept_memory, l->be, floats, 1, err));
        w->kept_floats = floats;
    }
    if (!kept)
        lay_out_kept(w, l, rows, w->kept_memory);
done:
    return rc;
}

/* ---- forward -------------------------------------------------------------------------------- */

/* The arguments of a chunk; run.hidden is not used. */
struct chunk {
    struct layer_run run;
    struct layer_grad_work *w;
    struct qt_backend *be;
    const struct config *cfg;
    const struct qt_layer_grads *add;
    const float *x; /* the layer's input */
    float *g;       /* gradient of the output, then of the input */
};

static size_t hidden_count(const struct chunk *c)
{
    return c->run.m * c->cfg->info.hidden;
}

static bool has(const struct chunk *c, enum role role)
{
    return has_part(c->run.layer, role);
}

/* The end of a sublayer: out = x + r norm_out(raw), or with norm_after out = norm_in(x + r raw). */
static int join(const struct chunk *c, float *out, float *sum, const float *x, const float *raw,
                enum role norm_in, enum role norm_out, struct qt_err *err)
{
    size_t count = hidden_count(c);
    float *to = c->cfg->norm_after ? sum : out;
    int rc = QT_OK;
    if (has(c, norm_out))
        QT_TRY(layer_apply_norm(&c->run, norm_out, to, raw, c->run.m, err));
    else
        QT_TRY(c->be->copy(c->be, to, raw, count * sizeof *to, err));
    QT_TRY(layer_scale_residual(&c->run, to, err));
    QT_TRY(c->be->add(c->be, to, x, count, err));
    if (c->cfg->norm_after)
        QT_TRY(layer_apply_norm(&c->run, norm_in, out, to, c->run.m, err));
done:
    return rc;
}

static int attention_forward(struct chunk *c, struct qt_err *err)
{
    struct layer_grad_work *w = c->w;
    const struct qt_model_info *info = &c->cfg->info;
    struct qt_attention a = layer_attention(&c->run);
    const float *in = w->attn_in ? w->attn_in : c->x;
    int rc = QT_OK;
    if (w->attn_in)
        QT_TRY(layer_apply_norm(&c->run, ROLE_ATTN_IN, w->attn_in, c->x, c->run.m, err));
    if (w->qkv) {
        QT_TRY(layer_grouped(w->q, w->k, w->v, w->qkv, in, &c->run, err));
    } else {
        QT_TRY(layer_linear(&c->run, ROLE_Q, w->q, in, err));
        QT_TRY(layer_linear(&c->run, ROLE_K, w->k, in, err));
        QT_TRY(layer_linear(&c->run, ROLE_V, w->v, in, err));
    }
    QT_TRY(layer_heads(&c->run, ROLE_Q_NORM, w->q, w->q_raw, info->heads, err));
    QT_TRY(layer_heads(&c->run, ROLE_K_NORM, w->k, w->k_raw, info->kv_heads, err));
    QT_TRY(layer_floor_queries(&c->run, w->q, err));
    QT_TRY(layer_attend(w->attended, w->q, w->k, w->v, &a, &c->run, err));
    if (w->attn_gate) {
        QT_TRY(layer_linear(&c->run, ROLE_ATTN_GATE, w->attn_gate, in, err));
        QT_TRY(c->be->activate(c->be, w->y, w->attn_gate, w->attended, QT_ACT_SIGMOID,
                               c->run.m * info->heads * info->head_dim, err));
    }
    QT_TRY(layer_linear(&c->run, ROLE_O, w->o_raw, w->y, err));
    QT_TRY(join(c, w->mid, w->attn_sum, c->x, w->o_raw, ROLE_ATTN_IN, ROLE_ATTN_OUT, err));
done:
    return rc;
}

/* The hidden states that the MLP sublayer reads. */
static const float *mlp_hidden(const struct chunk *c)
{
    return c->cfg->parallel ? c->x : c->w->mid;
}

/* The input of the MLP. */
static const float *mlp_input(const struct chunk *c)
{
    return c->w->mlp_in                        ? c->w->mlp_in
           : c->cfg->parallel && c->w->attn_in ? c->w->attn_in
                                               : mlp_hidden(c);
}

static bool norm_follows(const struct chunk *c)
{
    return has(c, ROLE_MLP_OUT) || c->cfg->norm_after;
}

/* The routing weights of the chunk; all experts too if a norm follows them. */
static int experts_forward(struct chunk *c, const float *in, struct qt_err *err)
{
    bool stop;
    return norm_follows(c)
               ? experts_run(&stop, c->w->down_raw, in, &c->run, err)
               : experts_route(c->run.layer->work.experts.weights, ROLE_ROUTER, &c->run, in, err);
}

/* Runs up to the activation; runs DOWN too if a norm follows it. */
static int mlp_forward(struct chunk *c, struct qt_err *err)
{
    struct layer_grad_work *w = c->w;
    const float *in = mlp_input(c);
    bool gated = has(c, ROLE_GATE);
    int rc = QT_OK;
    if (w->mlp_in)
        QT_TRY(layer_apply_norm(&c->run, ROLE_MLP_IN, w->mlp_in, mlp_hidden(c), c->run.m, err));
    if (c->run.layer->def->experts) {
        QT_TRY(experts_forward(c, in, err));
        goto sum;
    }
    if (gated)
        QT_TRY(layer_linear(&c->run, ROLE_GATE, w->gate, in, err));
    QT_TRY(layer_linear(&c->run, ROLE_UP, w->up, in, err));
    QT_TRY(c->be->activate(c->be, w->act, w->gate, gated ? w->up : NULL, c->cfg->act,
                           c->run.m * c->cfg->dense_width, err));
    if (norm_follows(c))
        QT_TRY(layer_linear(&c->run, ROLE_DOWN, w->down_raw, w->act, err));
sum:
    if (c->cfg->norm_after) { /* the input of the norm after the residual add */
        QT_TRY(c->be->copy(c->be, w->mlp_sum, w->down_raw, hidden_count(c) * sizeof(float), err));
        QT_TRY(layer_scale_residual(&c->run, w->mlp_sum, err));
        QT_TRY(c->be->add(c->be, w->mlp_sum, w->mid, hidden_count(c), err));
    }
done:
    return rc;
}

/* ---- backward ------------------------------------------------------------------------------- */

/* Adds the gradients of the scales of a part to dscale, that of the whole linear. */
static int scales_back(const struct chunk *c, const struct part *part, float *dscale,
                       const struct qt_coded *whole, const float *dy, const float *x,
                       struct qt_err *err)
{
    struct layer_grad_work *w = c->w;
    const size_t count = part->n * part->k, groups = qt_ceil_div(part->k, whole->group);
    struct qt_coded rows = *whole;
    int rc = QT_OK;
    if (count > w->dw_count) {
        c->be->free(c->be, w->dw);
        w->dw_count = 0;
        QT_TRY(qt_backend_floats(&w->dw, c->be, part->n, part->k, err));
        w->dw_count = count;
    }
    rows.n = part->n;
    rows.code += part->first * part->k;
    rows.scale += part->first * groups;
    rows.zero += rows.zero ? part->first * groups : 0;
    QT_TRY(c->be->linear_grad_w(c->be, w->dw, dy, x, false, c->run.m, part->n, part->k, err));
    QT_TRY(c->be->decode_grad(c->be, dscale + part->first * groups, &rows, w->dw, err));
done:
    return rc;
}

static int linear_back(const struct chunk *c, size_t at, float *dx, bool add, const float *dy,
                       const float *x, struct qt_err *err)
{
    const struct layer_def *layer = c->run.layer->def;
    const struct part *part = &layer->parts[at];
    float *dw = c->add->linear[part->index];
    int rc = QT_OK;
    if (dw && c->add->coded && c->add->coded[part->index])
        QT_TRY(scales_back(c, part, dw, c->add->coded[part->index], dy, x, err));
    else if (dw)
        QT_TRY(c->be->linear_grad_w(c->be, dw + part->first * part->k, dy, x, true, c->run.m,
                                    part->n, part->k, err));
    QT_TRY(c->be->linear_grad_x(c->be, dx, dy, c->run.layer->parts[at].weight, add, c->run.m,
                                part->n, part->k, err));
done:
    return rc;
}

/* Does nothing if the family has no such norm; dx and dy must then be the same array. */
static int norm_back(const struct chunk *c, enum role role, float *dx, const float *dy,
                     const float *x, size_t m, struct qt_err *err)
{
    const struct layer_def *layer = c->run.layer->def;
    if (!has(c, role))
        return QT_OK;
    return c->be->norm_grad(c->be, dx, c->add->norm[layer->parts[role].index], dy, x,
                            c->run.layer->parts[role].weight, c->cfg->arch->norm, c->cfg->eps, m,
                            layer->parts[role].n, err);
}

/* *d = gradient of the last linear's output, from the gradient g of the sublayer's output. */
static int sublayer_back(const float **d, struct chunk *c, const float *sum, const float *raw,
                         enum role norm_in, enum role norm_out, struct qt_err *err)
{
    int rc = QT_OK;
    if (c->cfg->norm_after)
        QT_TRY(norm_back(c, norm_in, c->g, c->g, sum, c->run.m, err));
    *d = c->g;
    if (c->cfg->residual_scale != 1) {
        QT_TRY(c->be->copy(c->be, c->w->dx, c->g, hidden_count(c) * sizeof(float), err));
        QT_TRY(layer_scale_residual(&c->run, c->w->dx, err));
        *d = c->w->dx;
    }
    if (has(c, norm_out)) {
        QT_TRY(norm_back(c, norm_out, c->w->dx, *d, raw, c->run.m, err));
        *d = c->w->dx;
    }
done:
    return rc;
}

/* Adds dx, taken through the norm that precedes the sublayer, to g. x: the sublayer's input. */
static int input_back(struct chunk *c, const float *x, enum role norm_in, struct qt_err *err)
{
    int rc = QT_OK;
    if (!c->cfg->norm_after)
        QT_TRY(norm_back(c, norm_in, c->w->dx, c->w->dx, x, c->run.m, err));
    QT_TRY(c->be->add(c->be, c->g, c->w->dx, hidden_count(c), err));
done:
    return rc;
}

/* dx = gradient of the input of the MLP or expert, from d, that of its output. Forward activations
 * are in c->w. */
static int gated_back(const struct chunk *c, float *dx, const float *d, const float *in,
                      size_t expert, struct qt_err *err)
{
    const struct layer_grad_work *w = c->w;
    const bool gated = c->run.layer->parts[part_at(expert, ROLE_GATE)].weight != NULL;
    const size_t count = c->run.m * c->run.layer->def->parts[part_at(expert, ROLE_UP)].n;
    float *dgate = w->dscratch, *dup = gated ? dgate + count : dgate;
    int rc = QT_OK;
    QT_TRY(linear_back(c, part_at(expert, ROLE_DOWN), dgate, false, d, w->act, err));
    QT_TRY(c->be->activate_grad(c->be, dgate, gated ? dup : NULL, dgate, w->gate,
                                gated ? w->up : NULL, c->cfg->act, count, err));
    QT_TRY(linear_back(c, part_at(expert, ROLE_UP), dx, false, dup, in, err));
    if (gated)
        QT_TRY(linear_back(c, part_at(expert, ROLE_GATE), dx, true, dgate, in, err));
done:
    return rc;
}

/* Memory of the host for the gradients of routing weights. */
struct routing_back {
    float *dweights, *dlogits, *dgate; /* [m][experts], [m][routed], [m] */
    float *out, *dout;                 /* [m][hidden], of the tokens of an expert */
};

static int routing_back_new(struct routing_back *b, const struct chunk *c, struct qt_err *err)
{
    const struct config *cfg = c->cfg;
    const size_t m = c->run.m, hidden = cfg->info.hidden;
    int rc;
    *b = (struct routing_back){0};
    QT_TRY(qt_array_new(&b->dweights, m, cfg->info.experts * sizeof *b->dweights, err));
    QT_TRY(qt_array_new(&b->dlogits, m, cfg->routed * sizeof *b->dlogits, err));
    QT_TRY(qt_array_new(&b->out, m, hidden * sizeof *b->out, err));
    QT_TRY(qt_array_new(&b->dout, m, hidden * sizeof *b->dout, err));
    if (has(c, ROLE_SHARED_GATE))
        QT_TRY(qt_array_new(&b->dgate, m, sizeof *b->dgate, err));
done:
    return rc;
}

static void routing_back_free(struct routing_back *b)
{
    qt_free(b->dweights);
    qt_free(b->dlogits);
    qt_free(b->dgate);
    qt_free(b->out);
    qt_free(b->dout);
}

/* The gradient of a routing weight is the product of what it multiplies, which is the expert's
 * output or input, and the gradient of the result, both of the expert's tokens in backend
 * memory. */
static int weights_back(struct routing_back *b, const struct chunk *c, const float *out,
                        const float *dout, size_t expert, struct qt_err *err)
{
    const struct qt_tokens *t = &c->run.layer->work.experts.tokens;
    const size_t hidden = c->cfg->info.hidden, bytes = t->count * hidden * sizeof *out;
    int rc;
    QT_TRY(c->be->download(c->be, b->out, out, bytes, err));
    QT_TRY(c->be->download(c->be, b->dout, dout, bytes, err));
    for (size_t i = 0; i < t->count; i++) {
        double sum = 0;
        for (size_t j = i * hidden; j < (i + 1) * hidden; j++)
            sum += (double)b->out[j] * (double)b->dout[j];
        b->dweights[t->row[i] * c->cfg->info.experts + expert] = (float)sum;
    }
done:
    return rc;
}

/* Runs an expert forward and back, and adds the gradient of its input to w->dx. */
static int expert_back(struct routing_back *b, const struct chunk *c, const float *in,
                       size_t expert, struct qt_err *err)
{
    struct layer_experts *e = &c->run.layer->work.experts;
    struct layer_grad_work *w = c->w;
    const struct qt_tokens *t = &e->tokens;
    const size_t hidden = c->cfg->info.hidden;
    const bool gated = c->run.layer->parts[part_at(expert, ROLE_GATE)].weight != NULL;
    const bool scaled = c->cfg->arch->scaled_inputs;
    struct chunk of = *c;
    int rc = QT_OK;
    qt_tokens_of_expert(&e->tokens, e->weights, c->run.m, c->cfg->info.experts, expert, 0);
    of.run.m = t->count;
    if (t->count == 0)
        return QT_OK;
    QT_TRY(c->be->gather_rows(c->be, e->in, in, t->row, scaled ? t->weight : NULL, t->count, hidden,
                              err));
    if (gated)
        QT_TRY(layer_linear(&of.run, part_at(expert, ROLE_GATE), w->gate, e->in, err));
    QT_TRY(layer_linear(&of.run, part_at(expert, ROLE_UP), gated ? w->up : w->gate, e->in, err));
    QT_TRY(c->be->activate(c->be, w->act, w->gate, gated ? w->up : NULL, c->cfg->act,
                           t->count * of.run.layer->def->parts[part_at(expert, ROLE_UP)].n, err));
    QT_TRY(c->be->gather_rows(c->be, w->dexpert, w->dsum, t->row, NULL, t->count, hidden, err));
    if (!scaled) {
        QT_TRY(layer_linear(&of.run, part_at(expert, ROLE_DOWN), e->out, w->act, err));
        QT_TRY(weights_back(b, c, e->out, w->dexpert, expert, err));
        QT_TRY(c->be->gather_rows(c->be, w->dexpert, w->dsum, t->row, t->weight, t->count, hidden,
                                  err));
    }
    QT_TRY(gated_back(&of, e->out, w->dexpert, e->in, expert, err));
    if (scaled) {
        QT_TRY(c->be->gather_rows(c->be, e->in, in, t->row, NULL, t->count, hidden, err));
        QT_TRY(weights_back(b, c, e->in, e->out, expert, err));
    }
    QT_TRY(c->be->scatter_rows(c->be, w->dx, e->out, t->row, scaled ? t->weight : NULL, t->count,
                               hidden, err));
done:
    return rc;
}

/* Adds the gradient through a linear of the router, with n outputs, to w->dx. dy: host memory. */
static int scores_back(const struct chunk *c, enum role role, const float *dy, size_t n,
                       struct qt_err *err)
{
    float *logits = c->run.layer->work.experts.logits;
    int rc;
    QT_TRY(c->be->upload(c->be, logits, dy, c->run.m * n * sizeof *dy, err));
    QT_TRY(c->be->linear_grad_x(c->be, c->w->dx, logits, c->run.layer->parts[role].weight, true,
                                c->run.m, n, c->cfg->info.hidden, err));
done:
    return rc;
}

/* The chosen experts of a token do not change, their weights do. */
static int experts_back(const struct chunk *c, const float *d, struct qt_err *err)
{
    struct layer_grad_work *w = c->w;
    const float *in = mlp_input(c);
    const size_t bytes = hidden_count(c) * sizeof *d;
    struct routing_back b;
    int rc = routing_back_new(&b, c, err);
    if (rc < 0)
        goto done;
    QT_TRY(c->be->copy(c->be, w->dsum, d, bytes, err)); /* d may be w->dx */
    QT_TRY(c->be->zero(c->be, w->dx, bytes, err));
    for (size_t e = 0; e < c->cfg->info.experts; e++)
        QT_TRY(expert_back(&b, c, in, e, err));
    QT_TRY(experts_route_grad(b.dlogits, b.dgate, b.dweights, &c->run, err));
    QT_TRY(scores_back(c, ROLE_ROUTER, b.dlogits, c->cfg->routed, err));
    if (b.dgate)
        QT_TRY(scores_back(c, ROLE_SHARED_GATE, b.dgate, 1, err));
done:
    routing_back_free(&b);
    return rc;
}

/* w->dx = gradient of the MLP's input, from d, that of its output. */
static int mlp_input_back(struct chunk *c, const float *d, struct qt_err *err)
{
    return c->run.layer->def->experts ? experts_back(c, d, err)
                                      : gated_back(c, c->w->dx, d, mlp_input(c), 0, err);
}

static int mlp_back(struct chunk *c, struct qt_err *err)
{
    const float *d;
    int rc;
    QT_TRY(sublayer_back(&d, c, c->w->mlp_sum, c->w->down_raw, ROLE_MLP_IN, ROLE_MLP_OUT, err));
    QT_TRY(mlp_input_back(c, d, err));
    QT_TRY(input_back(c, c->w->mid, ROLE_MLP_IN, err));
done:
    return rc;
}

/* Gradient of queries or keys in place, through the norm and the inverse rotation. */
static int heads_back(const struct chunk *c, enum role norm, float *d, const float *raw,
                      size_t heads, struct qt_err *err)
{
    const struct rope *rope = layer_rope(c->run.layer, norm == ROLE_Q_NORM);
    const size_t rows = layer_head_rows(&c->run, heads);
    const bool norm_last = c->cfg->arch->norms_after_rope;
    int rc = QT_OK;
    if (c->cfg->bare_norms && rope->cos)
        QT_TRY(c->be->norm_grad(c->be, d, NULL, d, raw, c->run.layer->work.ones, QT_NORM_RMS,
                                c->cfg->eps, c->run.m * heads, c->cfg->info.head_dim, err));
    if (norm_last)
        QT_TRY(norm_back(c, norm, d, d, raw, rows, err));
    if (rope->cos)
        QT_TRY(c->be->rope(c->be, d, rope->cos, rope->minus_sin, c->run.m, c->run.seqlen, heads,
                           c->cfg->info.head_dim, c->cfg->rope.dim, c->cfg->interleaved, err));
    if (!norm_last)
        QT_TRY(norm_back(c, norm, d, d, raw, rows, err));
done:
    return rc;
}

/* The gradient of layer_attend. */
static int attend_back(const struct chunk *c, float *dq, float *dk, float *dv, const float *dy,
                       struct qt_err *err)
{
    const struct layer_grad_work *w = c->w;
    struct qt_attention a = layer_attention(&c->run);
    const size_t all = c->run.seqlen, chunk = c->run.layer->chunk;
    const size_t step = chunk && chunk < all ? chunk : c->run.m;
    const size_t width = a.heads * a.head_dim, kv_width = a.kv_heads * a.head_dim;
    int rc = QT_OK;
    for (size_t at = 0, count; rc == QT_OK && at < c->run.m; at += count) {
        const size_t q = at * width, k = at * kv_width;
        count = step;
        if (step < c->run.m)
            a.seqlen = count = qt_min_size(step, all - at % all);
        rc = c->be->attention_grad(c->be, dq + q, dk + k, dv + k, dy + q, w->q + q, w->k + k,
                                   w->v + k, count, &a, err);
    }
    return rc;
}

/* dx = gradient of the attention's input, from d, that of its output; or dx += if `add`. */
static int attention_input_back(struct chunk *c, bool add, const float *d, struct qt_err *err)
{
    struct layer_grad_work *w = c->w;
    const struct qt_model_info *info = &c->cfg->info;
    const float *in = w->attn_in ? w->attn_in : c->x;
    size_t q = c->run.m * info->heads * info->head_dim;
    size_t kv = c->run.m * info->kv_heads * info->head_dim;
    float *dq = w->dscratch, *dy = dq + q, *dk = dy + q, *dv = dk + kv;
    int rc = QT_OK;
    QT_TRY(linear_back(c, ROLE_O, dy, false, d, w->y, err));
    if (w->attn_gate)
        QT_TRY(c->be->activate_grad(c->be, w->attn_gate, dy, dy, w->attn_gate, w->attended,
                                    QT_ACT_SIGMOID, q, err));
    QT_TRY(attend_back(c, dq, dk, dv, dy, err));
    QT_TRY(layer_floor_queries(&c->run, dq, err));
    QT_TRY(heads_back(c, ROLE_Q_NORM, dq, w->q_raw, info->heads, err));
    QT_TRY(heads_back(c, ROLE_K_NORM, dk, w->k_raw, info->kv_heads, err));
    if (w->qkv) {
        QT_TRY(layer_group(w->qkv, dq, dk, dv, &c->run, err));
        QT_TRY(linear_back(c, ROLE_QKV, w->dx, add, w->qkv, in, err));
    } else {
        QT_TRY(linear_back(c, ROLE_Q, w->dx, add, dq, in, err));
        QT_TRY(linear_back(c, ROLE_K, w->dx, true, dk, in, err));
        QT_TRY(linear_back(c, ROLE_V, w->dx, true, dv, in, err));
    }
    if (w->attn_gate)
        QT_TRY(linear_back(c, ROLE_ATTN_GATE, w->dx, true, w->attn_gate, in, err));
done:
    return rc;
}

static int attention_back(struct chunk *c, struct qt_err *err)
{
    const float *d;
    int rc;
    QT_TRY(sublayer_back(&d, c, c->w->attn_sum, c->w->o_raw, ROLE_ATTN_IN, ROLE_ATTN_OUT, err));
    QT_TRY(attention_input_back(c, false, d, err));
    QT_TRY(input_back(c, c->x, ROLE_ATTN_IN, err));
done:
    return rc;
}

/* A shared norm takes the sum of both gradients. */
static int parallel_back(struct chunk *c, struct qt_err *err)
{
    struct layer_grad_work *w = c->w;
    const size_t count = hidden_count(c);
    int rc;
    QT_TRY(mlp_input_back(c, c->g, err));
    if (w->dmlp)
        QT_TRY(norm_back(c, ROLE_MLP_IN, w->dmlp, w->dx, c->x, c->run.m, err));
    QT_TRY(attention_input_back(c, !w->dmlp, c->g, err));
    QT_TRY(input_back(c, c->x, ROLE_ATTN_IN, err));
    if (w->dmlp)
        QT_TRY(c->be->add(c->be, c->g, w->dmlp, count, err));
done:
    return rc;
}

/* ---- layers --------------------------------------------------------------------------------- */

static size_t chunk_rows(const struct qt_layer *l, size_t m, size_t seqlen)
{
    return layer_chunk(l->be->host ? LAYER_TOKENS : LAYER_TOKENS_APART, m, seqlen);
}

/* Floats of the forward activations of a chunk. */
static size_t kept_floats(const struct qt_layer *l, size_t rows)
{
    struct layer_grad_work w;
    return lay_out_kept(&w, l, rows, NULL);
}

size_t qt_layer_kept_floats(const struct qt_layer *l, size_t m, size_t seqlen)
{
    const size_t rows = chunk_rows(l, m, seqlen);
    return l->model->cfg.info.experts ? 0 : qt_ceil_div(m, rows) * kept_floats(l, rows);
}

/* Calls fn for each chunk of m tokens. kept: NULL, or as in qt_layer_run_kept. */
static int each_chunk(struct qt_layer *layer, const struct chunk *all, float *kept,
                      int (*fn)(struct chunk *c, struct qt_err *err), struct qt_err *err)
{
    const size_t m = all->run.m, width = all->cfg->info.hidden;
    size_t rows;
    int rc;
    const char *part = qt_model_cannot(layer->model, QT_USE_LEARN);
    if (part)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "learning does not support %s", part);
    QT_TRY(layer_check_length(layer->model, m, all->run.seqlen, err));
    rows = chunk_rows(layer, m, all->run.seqlen);
    for (size_t at = 0; at < m; at += rows) {
        struct chunk c = *all;
        QT_TRY(prepare(layer, rows, all->run.seqlen,
                       kept ? kept + at / rows * kept_floats(layer, rows) : NULL, err));
        c.run.m = qt_min_size(rows, m - at);
        c.x += at * width;
        c.g += at * width;
        QT_TRY(fn(&c, err));
    }
done:
    return rc;
}

static struct chunk all_tokens(struct qt_layer *layer, size_t m, size_t seqlen)
{
    return (struct chunk){.run = {.layer = layer, .m = m, .seqlen = seqlen, .stop = -1},
                          .w = &layer->grad,
                          .be = layer->be,
                          .cfg = &layer->model->cfg};
}

/* c->g = output of the layer. */
static int chunk_output(struct chunk *c, struct qt_err *err)
{
    struct layer_grad_work *w = c->w;
    float *raw = w->down_raw ? w->down_raw : w->dx;
    int rc;
    QT_TRY(attention_forward(c, err));
    QT_TRY(mlp_forward(c, err));
    if (!w->down_raw)
        QT_TRY(layer_linear(&c->run, ROLE_DOWN, raw, w->act, err));
    QT_TRY(join(c, c->g, w->mlp_sum, w->mid, raw, ROLE_MLP_IN, ROLE_MLP_OUT, err));
done:
    return rc;
}

int qt_layer_run_kept(struct qt_layer *layer, float *out, float *kept, const float *hidden,
                      size_t m, size_t seqlen, struct qt_err *err)
{
    struct chunk all = all_tokens(layer, m, seqlen);
    all.x = hidden;
    all.g = out;
    return each_chunk(layer, &all, kept, chunk_output, err);
}

static int chunk_back(struct chunk *c, struct qt_err *err)
{
    int rc;
    if (c->cfg->parallel)
        return parallel_back(c, err);
    QT_TRY(mlp_back(c, err));
    QT_TRY(attention_back(c, err));
done:
    return rc;
}

static int chunk_forward_and_back(struct chunk *c, struct qt_err *err)
{
    int rc;
    QT_TRY(attention_forward(c, err));
    QT_TRY(mlp_forward(c, err));
    QT_TRY(chunk_back(c, err));
done:
    return rc;
}

int qt_layer_grad(struct qt_layer *layer, float *grad, const struct qt_layer_grads *add,
                  const float *hidden, float *kept, size_t m, size_t seqlen, struct qt_err *err)
{
    struct chunk all = all_tokens(layer, m, seqlen);
    all.add = add;
    all.x = hidden;
    all.g = grad;
    return each_chunk(layer, &all, kept, kept ? chunk_back : chunk_forward_and_back, err);
}
