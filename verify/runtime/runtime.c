/* Runs a decoder on the fused kernels: prompts, decode steps, logits. */
#include "verify/runtime/runtime.h"

#include <math.h>
#include <stdio.h>

/* ---- caches and activations ----------------------------------------------------------------- */

/* The attention of a layer over a 4-bit cache. */
static int check_kv4(const struct qt_runtime *rt, const struct rt_layer *l, struct qt_err *err)
{
    if ((l->head_dim != 64 && l->head_dim != 128) || rt->config.attn_softcap > 0)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                       "the kernels of the 4-bit cache support attention heads of 64 and 128 "
                       "channels without a softcap");
    if (l->sinks || rt->slopes || (l->window && l->window < rt->opt.capacity))
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                       "the kernels of the 4-bit cache do not support sliding windows, attention "
                       "sinks and ALiBi");
    if (l != &rt->layers[l->keys_of] || l->v_norm.weight || rt->config.clip > 0)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                       "the kernels of the 4-bit cache do not support shared, normalized or "
                       "clipped keys and values");
    return QT_OK;
}

static int check_attention(const struct qt_runtime *rt, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0; i < rt->config.layers; i++) {
        const struct rt_layer *l = &rt->layers[i];
        if (l->head_dim > RT_HEAD_DIM)
            return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                           "attention heads of %zu channels: the fused runtime supports up to %d",
                           l->head_dim, RT_HEAD_DIM);
        if (rt->slopes && l->head_dim > RT_SLOPES_DIM)
            return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                           "attention heads of %zu channels: with ALiBi the fused runtime supports "
                           "up to %d",
                           l->head_dim, RT_SLOPES_DIM);
        if (rt->opt.kv4)
            QT_TRY(check_kv4(rt, l, err));
    }
done:
    return rc;
}

static int new_f16_cache(struct qtool_kv_cache *out, struct qt_runtime *rt,
                         const struct rt_layer *l, size_t sequences, struct qt_err *err)
{
    const size_t tokens = sequences * l->kv_heads * rt->page;
    int rc;
    *out = (struct qtool_kv_cache){.format = QTOOL_KV_F16,
                                   .heads = l->kv_heads,
                                   .head_dim = l->head_dim,
                                   .page_tokens = rt->page};
    QT_TRY(rt_alloc(rt, &out->k, tokens, l->head_dim * 2, err));
    QT_TRY(rt_alloc(rt, &out->v, tokens, l->head_dim * 2, err));
done:
    return rc;
}

static int new_int4_cache(struct qtool_kv_cache *out, struct qt_runtime *rt,
                          const struct rt_layer *l, struct qt_err *err)
{
    const size_t heads = rt->opt.sequences * l->kv_heads, tokens = heads * rt->page;
    int rc;
    *out = (struct qtool_kv_cache){.format = QTOOL_KV_INT4,
                                   .heads = l->kv_heads,
                                   .head_dim = l->head_dim,
                                   .page_tokens = rt->page};
    QT_TRY(rt_alloc(rt, &out->k, tokens, l->head_dim / 2, err));
    QT_TRY(rt_alloc(rt, &out->v, tokens, l->head_dim / 2, err));
    QT_TRY(rt_alloc(rt, &out->k_param, tokens / QTOOL_KV_GROUP, 2 * l->head_dim, err));
    QT_TRY(rt_alloc(rt, &out->v_param, tokens, l->head_dim / 8, err));
    QT_TRY(rt_alloc(rt, &out->k_first, heads, 2 * l->head_dim, err));
    QT_TRY(rt_alloc(rt, &out->k_tail, heads, QTOOL_KV_GROUP * 2 * l->head_dim, err));
done:
    return rc;
}

/* With a 4-bit cache all layers have the same heads (check_kv4: none of the families that do has
 * others), and share the FP16 keys and values of a prompt. */
static int new_caches(struct qt_runtime *rt, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0; i < rt->config.layers; i++) {
        struct rt_layer *l = &rt->layers[i];
        if (l->keys_of < i)
            l->cache = rt->layers[l->keys_of].cache;
        else
            QT_TRY(rt->opt.kv4 ? new_int4_cache(&l->cache, rt, l, err)
                               : new_f16_cache(&l->cache, rt, l, rt->opt.sequences, err));
    }
    if (rt->opt.kv4)
        QT_TRY(new_f16_cache(&rt->scratch, rt, rt->layers, rt->group_most, err));
done:
    return rc;
}

static size_t group_width(const struct rt_group *g)
{
    size_t n = 0;
    for (size_t i = 0; i < g->linears; i++)
        n += g->linear[i].n;
    return n;
}

/* Further rows of activations, which products of a fixed number of rows write. */
static size_t invariant_rows(const struct qt_runtime *rt)
{
    return rt->opt.batch_invariant ? RT_INVARIANT_ROWS : 0;
}

static int new_activations(struct qt_runtime *rt, struct qt_err *err)
{
    const struct rt_config *c = &rt->config;
    const size_t rows = rt->rows, inputs = c->layers * c->inputs;
    const size_t sum = qt_max_size(inputs, rt->project_in.k);
    const size_t out = qt_max_size(c->hidden, rt->project_out.n);
    size_t q = 0, kv = 0, qkv = 0, gate_up = inputs, width = c->inputs, router = 0, top_k = 0,
           shared = 0;
    int rc;
    for (size_t i = 0; i < c->layers; i++) {
        const struct rt_layer *l = &rt->layers[i];
        const struct rt_mixture *x = &l->mixture;
        q = qt_max_size(q, c->heads * l->head_dim);
        kv = qt_max_size(kv, l->kv_heads * l->head_dim);
        qkv = qt_max_size(qkv, group_width(&l->qkv));
        gate_up = qt_max_size(gate_up, group_width(&l->gate_up));
        gate_up = qt_max_size(gate_up, x->top_k * 2 * x->width);
        width = qt_max_size(width, qt_max_size(l->width, x->top_k * x->width));
        router = qt_max_size(router, x->router.n);
        top_k = qt_max_size(top_k, x->top_k);
        shared = x->experts && l->width ? c->hidden : shared;
    }
    QT_TRY(rt_alloc(rt, &rt->hidden, rows, c->hidden * sizeof *rt->hidden, err));
    QT_TRY(rt_alloc(rt, &rt->x, rows, c->hidden * 2, err));
    QT_TRY(rt_alloc(rt, &rt->qkv, rows, qkv * 2, err));
    QT_TRY(rt_alloc(rt, &rt->q, rows, q * 2, err));
    QT_TRY(rt_alloc(rt, &rt->attended, rows, q * 2, err));
    QT_TRY(rt_alloc(rt, &rt->o, rows, out * 2, err));
    QT_TRY(rt_alloc(rt, &rt->gate_up, rows, gate_up * 2, err));
    QT_TRY(rt_alloc(rt, &rt->act, rows, width * 2, err));
    QT_TRY(rt_alloc(rt, &rt->down, rows, c->hidden * 2, err));
    QT_TRY(rt_alloc(rt, &rt->input_sum, rows, sum * sizeof *rt->input_sum, err));
    QT_TRY(rt_alloc(rt, &rt->layer_inputs, rows, sum * 2, err));
    QT_TRY(rt_alloc(rt, &rt->shared, rows, shared * 2, err));
    QT_TRY(rt_alloc(rt, &rt->router, rows, router * sizeof *rt->router, err));
    QT_TRY(rt_alloc(rt, &rt->expert, rows, top_k * sizeof *rt->expert, err));
    QT_TRY(rt_alloc(rt, &rt->expert_weight, rows, top_k * sizeof *rt->expert_weight, err));
    if (rt->opt.kv4) {
        QT_TRY(rt_alloc(rt, &rt->row_k, rows, kv * 2, err));
        QT_TRY(rt_alloc(rt, &rt->row_v, rows, kv * 2, err));
    }
    const size_t last = qt_max_size(rt->opt.sequences, RT_LOGIT_ROWS) + invariant_rows(rt);
    QT_TRY(rt_alloc(rt, &rt->logits, last, c->vocab * sizeof *rt->logits, err));
    QT_TRY(rt_alloc(rt, &rt->head_out, rt->head.dense ? 0 : last, c->vocab * 2, err));
    QT_TRY(rt_alloc(rt, &rt->ids, rows, sizeof *rt->ids, err));
    QT_TRY(rt_alloc(rt, &rt->position, rows, sizeof *rt->position, err));
    QT_TRY(rt_alloc(rt, &rt->sequence, rows, sizeof *rt->sequence, err));
    QT_TRY(rt_alloc(rt, &rt->all_sequences, rows, sizeof *rt->all_sequences, err));
    QT_TRY(rt_alloc(rt, &rt->next_ids, rt->opt.sequences, sizeof *rt->ids, err));
    QT_TRY(rt_alloc(rt, &rt->next_position, rt->opt.sequences, sizeof *rt->ids, err));
    QT_TRY(rt_alloc(rt, &rt->next_length, rt->opt.sequences, sizeof *rt->ids, err));
    QT_TRY(rt_alloc(rt, &rt->next_sequence, rt->opt.sequences, sizeof *rt->ids, err));
    QT_TRY(rt_alloc(rt, &rt->fault, 1, sizeof *rt->fault, err));
done:
    return rc;
}

/* Uploads values[n], each `first` plus the number of the entry. */
static int upload_numbers(struct qt_runtime *rt, int *dst, size_t n, int first, int step,
                          struct qt_err *err)
{
    int *values = NULL;
    int rc;
    QT_TRY(qt_array_new(&values, n, sizeof *values, err));
    for (size_t i = 0; i < n; i++)
        values[i] = first + step * (int)i;
    QT_TRY(rt->gpu->upload(rt->gpu, dst, values, n * sizeof *values, err));
done:
    qt_free(values);
    return rc;
}

int rt_prepare(struct qt_runtime *rt, struct qt_err *err)
{
    const struct qt_runtime_options *o = &rt->opt;
    int rc;
    rt->weights = rt->memory.count;
    rt->page = qt_round_up(o->capacity, QTOOL_KV_GROUP);
    rt->group_most =
        qt_min_size(o->sequences, qt_max_size(1, RT_PROMPT_ROWS / qt_max_size(o->prompt, 1)));
    rt->rows = qt_max_size(o->sequences, rt->group_most * o->prompt) + invariant_rows(rt);
    QT_TRY(check_attention(rt, err));
    QT_TRY(new_caches(rt, err));
    QT_TRY(new_activations(rt, err));
    QT_TRY(upload_numbers(rt, rt->next_sequence, o->sequences, 0, 1, err));
    QT_TRY(rt->gpu->fill(rt->gpu, rt->fault, 0, sizeof *rt->fault, err));
done:
    return rc;
}

/* ---- opening -------------------------------------------------------------------------------- */

static int check_options(const struct qt_runtime_options *o, struct qt_gpu *gpu, struct qt_err *err)
{
    if (!gpu->has_cublas)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                       "the fused runtime needs cuBLAS for matrices that are not packed: %s",
                       gpu->cublas);
    if (o->sequences == 0 || o->capacity == 0 || o->prompt > o->capacity || o->sequences > 1024 ||
        o->capacity > 1 << 24)
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "%zu sequences of %zu tokens: the fused runtime supports 1024 sequences of "
                       "2^24 tokens",
                       o->sequences, o->capacity);
    return QT_OK;
}

static int open_runtime(struct qt_runtime **out, struct qt_gpu *gpu,
                        const struct qt_runtime_options *opt, struct qt_err *err)
{
    int rc;
    *out = NULL;
    QT_TRY(check_options(opt, gpu, err));
    QT_TRY(qt_array_new(out, 1, sizeof **out, err));
    **out = (struct qt_runtime){.gpu = gpu, .opt = *opt};
done:
    return rc;
}

int qt_runtime_open(struct qt_runtime **out, struct qt_gpu *gpu, const struct qt_model *model,
                    const struct qt_weights *w, const struct qt_container *container,
                    const struct qt_runtime_options *opt, struct qt_err *err)
{
    const size_t positions = qt_model_info(model)->max_positions;
    struct qt_runtime *rt = NULL;
    int rc;
    *out = NULL;
    QT_TRY(open_runtime(&rt, gpu, opt, err));
    if (opt->capacity > positions)
        QT_TRY(qt_fail(err, QT_E_USAGE, NULL, NULL, "%zu tokens, but the model has %zu positions",
                       opt->capacity, positions));
    QT_TRY(rt_load(rt, model, w, container, err));
    QT_TRY(rt_prepare(rt, err));
    *out = rt;
done:
    if (rc < 0)
        qt_runtime_close(rt);
    return rc;
}

int qt_runtime_open_random(struct qt_runtime **out, struct qt_gpu *gpu,
                           const struct qt_runtime_shape *shape, const struct qt_spec *spec,
                           const struct qt_spec *head, const struct qt_runtime_options *opt,
                           struct qt_err *err)
{
    struct qt_runtime *rt = NULL;
    int rc;
    *out = NULL;
    QT_TRY(open_runtime(&rt, gpu, opt, err));
    QT_TRY(rt_load_random(rt, shape, spec, head, err));
    QT_TRY(rt_prepare(rt, err));
    *out = rt;
done:
    if (rc < 0)
        qt_runtime_close(rt);
    return rc;
}

static void drop_graph(struct qt_runtime *rt)
{
    if (rt->graph)
        rt->gpu->graph_free(rt->gpu, rt->graph);
    rt->graph = NULL;
}

/* Frees the programs, and the memory from entry `first` on. */
static void release(struct qt_runtime *rt, size_t first)
{
    struct qt_gpu *gpu = rt->gpu;
    drop_graph(rt);
    rt->warm = false;
    rt->past = 0;
    rt_program_free(&rt->step);
    gpu_operands_free(&rt->operands, gpu);
    while (rt->memory.count > first) {
        struct rt_block *last = &rt->memory.list[--rt->memory.count];
        gpu->free(gpu, last->data);
        rt->memory.bytes -= last->bytes;
    }
}

int qt_runtime_resize(struct qt_runtime *rt, size_t sequences, struct qt_err *err)
{
    struct qt_runtime_options opt = rt->opt;
    int rc;
    opt.sequences = sequences;
    QT_TRY(check_options(&opt, rt->gpu, err));
    release(rt, rt->weights);
    rt->opt = opt;
    QT_TRY(rt_prepare(rt, err));
done:
    return rc;
}

void qt_runtime_close(struct qt_runtime *rt)
{
    if (!rt)
        return;
    release(rt, 0);
    for (size_t i = 0; rt->layers && i < rt->config.layers; i++) {
        struct rt_layer *l = &rt->layers[i];
        gpu_experts_free(&l->mixture.grouped, rt->gpu);
        gpu_w4ax_input_free(&l->qkv.input, rt->gpu);
        gpu_w4ax_input_free(&l->o.input, rt->gpu);
        gpu_w4ax_input_free(&l->gate_up.input, rt->gpu);
        gpu_w4ax_input_free(&l->down.input, rt->gpu);
    }
    qt_free(rt->memory.list);
    qt_free(rt->layers);
    qt_free(rt);
}

size_t qt_runtime_bytes(const struct qt_runtime *rt)
{
    const struct gpu_operands *o = &rt->operands;
    return rt->memory.bytes + o->workspace.bytes + o->codes.bytes + o->scale.bytes + o->sum.bytes;
}

/* ---- prompts -------------------------------------------------------------------------------- */

/* Uploads the tokens of sequences [first, first + sequences) of ids[][tokens]. */
static int upload_tokens(struct qt_runtime *rt, const uint32_t *ids, size_t first, size_t sequences,
                         size_t tokens, struct qt_err *err)
{
    const size_t m = sequences * tokens, bytes = m * sizeof(int);
    int *host = NULL;
    int rc;
    QT_TRY(qt_array_new(&host, 4 * m, sizeof *host, err));
    for (size_t i = 0; i < m; i++) {
        const uint32_t id = ids[first * tokens + i];
        if (id >= rt->config.vocab)
            QT_TRY(qt_fail(err, QT_E_INPUT, NULL, NULL,
                           "token id %u is outside the vocabulary of %zu tokens", (unsigned)id,
                           rt->config.vocab));
        host[i] = (int)id;
        host[m + i] = (int)(i % tokens);
        host[2 * m + i] = (int)(i / tokens);
        host[3 * m + i] = (int)(first + i / tokens);
    }
    QT_TRY(rt->gpu->upload(rt->gpu, rt->ids, host, bytes, err));
    QT_TRY(rt->gpu->upload(rt->gpu, rt->position, host + m, bytes, err));
    QT_TRY(rt->gpu->upload(rt->gpu, rt->sequence, host + 2 * m, bytes, err));
    QT_TRY(rt->gpu->upload(rt->gpu, rt->all_sequences, host + 3 * m, bytes, err));
done:
    qt_free(host);
    return rc;
}

/* Drops the graph if it has old addresses of the operands. */
static void drop_old_graph(struct qt_runtime *rt, const struct gpu_operands *before)
{
    const struct gpu_operands *now = &rt->operands;
    if (now->workspace.data != before->workspace.data || now->codes.data != before->codes.data ||
        now->scale.data != before->scale.data || now->sum.data != before->sum.data)
        drop_graph(rt);
}

static int finish(struct qt_runtime *rt, struct qt_err *err)
{
    int fault;
    return rt->gpu->download(rt->gpu, &fault, rt->fault, sizeof fault, err);
}

/* Runs whole sequences. *seconds += the time of the kernels. */
static int run_prompts(struct qt_runtime *rt, const uint32_t *ids, size_t first, size_t sequences,
                       size_t tokens, bool all, double *seconds, struct qt_err *err)
{
    const struct rt_batch batch = {.sequences = sequences,
                                   .tokens = tokens,
                                   .first = first,
                                   .prompt = true,
                                   .all = all,
                                   .logits = rt->logits + first * rt->config.vocab,
                                   .ids = rt->ids,
                                   .position = rt->position,
                                   .sequence = rt->sequence,
                                   .all_sequences = rt->all_sequences};
    struct rt_program program = {0};
    int rc;
    QT_TRY(qt_stop_check(err));
    const struct gpu_operands before = rt->operands;
    QT_TRY(upload_tokens(rt, ids, first, sequences, tokens, err));
    QT_TRY(rt_build(&program, rt, &batch, err));
    drop_old_graph(rt, &before);
    QT_TRY(finish(rt, err));
    const double start = qt_clock();
    QT_TRY(rt_enqueue(rt, &program, QT_RUNTIME_SHARES, err));
    QT_TRY(finish(rt, err));
    *seconds += qt_clock() - start;
done:
    rt_program_free(&program);
    return rc;
}

int rt_rewind(struct qt_runtime *rt, size_t tokens, struct qt_err *err)
{
    struct rt_program next = {0};
    int rc;
    QT_TRY(upload_numbers(rt, rt->next_position, rt->opt.sequences, (int)tokens - 1, 0, err));
    QT_TRY(rt_add_next(&next, rt, err));
    QT_TRY(rt_enqueue(rt, &next, QT_RUNTIME_SHARES, err));
    rt->past = tokens;
done:
    rt_program_free(&next);
    return rc;
}

static int too_long(const struct qt_runtime *rt, size_t tokens, struct qt_err *err)
{
    return qt_fail(err, QT_E_USAGE, NULL, NULL,
                   "%zu tokens after %zu, but the cache has room for %zu", tokens, rt->past,
                   rt->opt.capacity);
}

int qt_runtime_prompt(struct qt_runtime *rt, const uint32_t *ids, size_t tokens, double *seconds,
                      struct qt_err *err)
{
    double time = 0;
    int rc = QT_OK;
    if (tokens == 0 || tokens > rt->opt.prompt)
        return too_long(rt, tokens, err);
    for (size_t at = 0; at < rt->opt.sequences; at += rt->group_most)
        QT_TRY(run_prompts(rt, ids, at, qt_min_size(rt->group_most, rt->opt.sequences - at), tokens,
                           false, &time, err));
    QT_TRY(rt_rewind(rt, tokens, err));
    if (seconds)
        *seconds = time;
done:
    return rc;
}

/* Copies the first `have` of `count` items of `bytes` at p to the others. */
static int repeat(struct qt_runtime *rt, void *p, size_t bytes, size_t have, size_t count,
                  struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t n; rc == QT_OK && p && have < count; have += n) {
        n = qt_min_size(have, count - have);
        rc = rt->gpu->copy(rt->gpu, (char *)p + have * bytes, p, n * bytes, err);
    }
    return rc;
}

/* Gives the sequences from `have` on the caches and logits of those before. */
static int repeat_sequences(struct qt_runtime *rt, size_t have, struct qt_err *err)
{
    const size_t count = rt->opt.sequences;
    int rc = QT_OK;
    for (size_t i = 0; i < rt->config.layers; i++) {
        const struct qtool_kv_cache *c = &rt->layers[i].cache;
        const size_t dim = c->head_dim, heads = c->heads, tokens = heads * rt->page;
        const size_t key = rt->opt.kv4 ? dim / 2 : dim * 2;
        QT_TRY(repeat(rt, c->k, tokens * key, have, count, err));
        QT_TRY(repeat(rt, c->v, tokens * key, have, count, err));
        QT_TRY(repeat(rt, c->k_param, tokens / QTOOL_KV_GROUP * 2 * dim, have, count, err));
        QT_TRY(repeat(rt, c->v_param, tokens * dim / 8, have, count, err));
        QT_TRY(repeat(rt, c->k_first, heads * 2 * dim, have, count, err));
        QT_TRY(repeat(rt, c->k_tail, heads * QTOOL_KV_GROUP * 2 * dim, have, count, err));
    }
    QT_TRY(repeat(rt, rt->logits, rt->config.vocab * sizeof *rt->logits, have, count, err));
done:
    return rc;
}

int rt_prompt_some(struct qt_runtime *rt, const uint32_t *ids, size_t tokens, size_t *sequences,
                   double *seconds, struct qt_err *err)
{
    int rc;
    if (tokens == 0 || tokens > rt->opt.prompt)
        return too_long(rt, tokens, err);
    *sequences = rt->group_most;
    *seconds = 0;
    QT_TRY(run_prompts(rt, ids, 0, *sequences, tokens, false, seconds, err));
    QT_TRY(repeat_sequences(rt, *sequences, err));
    QT_TRY(rt_rewind(rt, tokens, err));
done:
    return rc;
}

int qt_runtime_all_logits(struct qt_runtime *rt, const uint32_t *ids, size_t tokens,
                          int (*use)(void *ctx, const float *logits, size_t position, size_t m,
                                     struct qt_err *err),
                          void *ctx, struct qt_err *err)
{
    const size_t vocab = rt->config.vocab;
    struct rt_program head = {0};
    float *logits = NULL;
    double seconds = 0;
    int rc;
    if (tokens == 0 || tokens > rt->opt.prompt)
        return too_long(rt, tokens, err);
    QT_TRY(qt_array_new(&logits, RT_LOGIT_ROWS * vocab, sizeof *logits, err));
    QT_TRY(run_prompts(rt, ids, 0, 1, tokens, true, &seconds, err));
    for (size_t at = 0; at < tokens; at += RT_LOGIT_ROWS) {
        const size_t m = qt_min_size(RT_LOGIT_ROWS, tokens - at);
        const struct gpu_operands before = rt->operands;
        head.count = 0;
        QT_TRY(rt_add_head(&head, rt, rt->logits, at, m, 0, err));
        drop_old_graph(rt, &before);
        QT_TRY(rt_enqueue(rt, &head, QT_RUNTIME_SHARES, err));
        QT_TRY(rt->gpu->download(rt->gpu, logits, rt->logits, m * vocab * sizeof *logits, err));
        QT_TRY(use(ctx, logits, at, m, err));
    }
done:
    rt_program_free(&head);
    qt_free(logits);
    return rc;
}

/* ---- decode steps --------------------------------------------------------------------------- */

static int build_step(struct qt_runtime *rt, struct qt_err *err)
{
    const struct rt_batch batch = {.sequences = rt->opt.sequences,
                                   .tokens = 1,
                                   .logits = rt->logits,
                                   .ids = rt->next_ids,
                                   .position = rt->next_position,
                                   .sequence = rt->next_sequence,
                                   .all_sequences = rt->next_sequence};
    int rc;
    QT_TRY(rt_build(&rt->step, rt, &batch, err));
    QT_TRY(rt_add_next(&rt->step, rt, err));
done:
    return rc;
}

static int enqueue_step(void *ctx, struct qt_err *err)
{
    struct qt_runtime *rt = ctx;
    return rt_enqueue(rt, &rt->step, QT_RUNTIME_SHARES, err);
}

/* The first step is enqueued kernel by kernel, which also loads the kernels' code; from the second
 * on a graph is replayed. */
int qt_runtime_step(struct qt_runtime *rt, struct qt_err *err)
{
    int rc = QT_OK;
    if (rt->past == 0 || rt->past >= rt->opt.capacity)
        return too_long(rt, 1, err);
    if (!rt->step.count)
        QT_TRY(build_step(rt, err));
    if (!rt->warm || rt->opt.eager) {
        QT_TRY(enqueue_step(rt, err));
        rt->warm = true;
    } else {
        if (!rt->graph)
            QT_TRY(rt->gpu->capture(rt->gpu, &rt->graph, enqueue_step, rt, err));
        QT_TRY(rt->gpu->replay(rt->gpu, rt->graph, err));
    }
    rt->past++;
done:
    return rc;
}

int qt_runtime_read(struct qt_runtime *rt, uint32_t *ids, float *logits, struct qt_err *err)
{
    const size_t n = rt->opt.sequences;
    int fault, rc;
    QT_TRY(rt->gpu->download(rt->gpu, ids, rt->next_ids, n * sizeof *ids, err));
    if (logits)
        QT_TRY(rt->gpu->download(rt->gpu, logits, rt->logits, n * rt->config.vocab * sizeof *logits,
                                 err));
    QT_TRY(rt->gpu->download(rt->gpu, &fault, rt->fault, sizeof fault, err));
    if (fault)
        rc = qt_fail(err, QT_E_INPUT, NULL, NULL,
                     "a logit is not finite: activations exceed the range of FP16");
done:
    return rc;
}

int qt_runtime_put(struct qt_runtime *rt, const uint32_t *ids, struct qt_err *err)
{
    for (size_t i = 0; i < rt->opt.sequences; i++)
        if (ids[i] >= rt->config.vocab)
            return qt_fail(err, QT_E_INPUT, NULL, NULL,
                           "token id %u is outside the vocabulary of %zu tokens", (unsigned)ids[i],
                           rt->config.vocab);
    return rt->gpu->upload(rt->gpu, rt->next_ids, ids, rt->opt.sequences * sizeof *ids, err);
}
