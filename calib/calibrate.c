/*
 * Calibration on the unquantized model: one pass over the decoder layers. Each layer runs on the
 * hidden states of all windows, and a hook adds up the statistics of the linear inputs.
 */
#include "calib/calib.h"

#include <string.h>

/* ---- the model ------------------------------------------------------------------------------ */

/* Describes a decoder layer; k: room for the widths of its inputs. */
static void describe_layer(struct qt_qcal_layer *out, size_t *k, const struct qt_model *model,
                           size_t layer)
{
    const int experts = qt_model_experts_input(model, layer);
    const struct qt_linear *linear;
    const size_t n = qt_model_linears(&linear, model, layer);
    *out = (struct qt_qcal_layer){.inputs = qt_model_inputs(model, layer) + (experts >= 0), .k = k};
    for (size_t i = 0; i < n; i++)
        k[linear[i].input] = linear[i].k;
    if (experts >= 0) {
        k[experts] = qt_model_info(model)->hidden;
        out->experts = (size_t)(experts - qt_model_mlp_input(model, layer)) / 2;
    }
}

/* Calibration files describe a model by this. */
struct described {
    struct qt_qcal_info info;
    struct qt_qcal_layer *layer;
    size_t *k; /* of all layers */
};

/* Sets all but the parts. Freed by described_free, after an error, too. */
static int describe_model(struct described *out, const struct qt_ckpt *ckpt,
                          const struct qt_model *model, struct qt_err *err)
{
    const struct qt_model_info *info = qt_model_info(model);
    const char *part = qt_model_cannot(model, QT_USE_CALIB_FILE);
    size_t inputs = 0;
    int rc;
    *out = (struct described){
        .info = {.family = info->family, .layers = info->layers, .hidden = info->hidden}};
    if (part)
        return qt_fail(err, QT_E_UNSUPPORTED, qt_ckpt_path(ckpt), NULL,
                       "calibration files do not support %s; quantize with --data instead", part);
    for (size_t l = 0; l < info->layers; l++)
        inputs += qt_model_inputs(model, l) + 1;
    QT_TRY(qt_ckpt_sample_crc(&out->info.sample_crc, ckpt, err));
    QT_TRY(qt_array_new(&out->layer, info->layers, sizeof *out->layer, err));
    QT_TRY(qt_array_new(&out->k, inputs, sizeof *out->k, err));
    inputs = 0;
    for (size_t l = 0; l < info->layers; l++) {
        describe_layer(&out->layer[l], out->k + inputs, model, l);
        inputs += out->layer[l].inputs;
    }
    out->info.layer = out->layer;
done:
    return rc;
}

static void described_free(struct described *d)
{
    qt_free(d->layer);
    qt_free(d->k);
}

int qt_calibrate_check(const struct qt_qcal *q, const struct qt_ckpt *ckpt,
                       const struct qt_model *model, struct qt_err *err)
{
    struct described d;
    int rc = describe_model(&d, ckpt, model, err);
    if (rc == QT_OK)
        rc = qt_qcal_check_model(q, &d.info, qt_ckpt_path(ckpt), err);
    described_free(&d);
    return rc;
}

/* ---- statistics ----------------------------------------------------------------------------- */

struct run {
    const char *path;
    const struct qt_calibrate_options *opt;
    struct qt_backend *be;
    struct qt_weights weights;
    struct qt_model *model;
    struct described model_is;
    struct qt_qcal_writer *writer;
    size_t all_tokens, seqlen;
    size_t blocks, first, tokens; /* blocks of windows; tokens of this rank */
    struct qt_layer *layer;
    bool layer_has_experts;
    struct qt_sums_memory memory;
    float *hidden; /* backend, [tokens][hidden] */
    size_t width;  /* of hidden: qt_model_info.state */
    struct experts {
        float *weights; /* routing weights [all_tokens][experts] of the current layer */
        struct qt_tokens all, tokens; /* of the expert, in all ranks; those in the block */
        uint32_t *routed;             /* [experts] */
        float *weighted;              /* backend, [room]: inputs times routing weights */
        size_t room, seen; /* seen: tokens of the block that the hook of the expert has had */
    } experts;
    /* Statistics of inputs [input, input + inputs) of the current layer, in backend memory. */
    size_t input, inputs;
    double *gram[QT_LAYER_INPUTS];
    struct qt_channels channels[QT_LAYER_INPUTS];
};

static int calibrate_interrupted(const char *path, struct qt_err *err)
{
    return qt_fail(err, QT_E_INTERRUPTED, path, NULL, "interrupted; no file was written");
}

static int add_statistics(void *ctx, int input, const float *x, size_t m, size_t k,
                          struct qt_err *err)
{
    struct run *r = ctx;
    const size_t i = (size_t)input - r->input;
    if (r->opt->interrupted && r->opt->interrupted())
        return calibrate_interrupted(r->path, err);
    int rc = r->be->gram(r->be, r->gram[i], x, m, k, err);
    return rc < 0 ? rc : r->be->channels(r->be, &r->channels[i], x, m, k, err);
}

/* Tokens of whole windows that blocks are made of, approximately. */
enum { CHUNK_TOKENS = 4096 };

static size_t chunk_tokens(const struct run *r)
{
    const size_t windows = CHUNK_TOKENS / r->seqlen;
    return (windows ? windows : 1) * r->seqlen;
}

static size_t block_start(const struct run *r, size_t block)
{
    return qt_sums_block_start(block, r->blocks, chunk_tokens(r), r->all_tokens);
}

static void choose_blocks(struct run *r)
{
    r->blocks = qt_sums_count(qt_ceil_div(r->all_tokens, chunk_tokens(r)));
    const size_t end = qt_sums_blocks(&r->first, r->blocks, r->opt->comm);
    r->tokens = block_start(r, end) - block_start(r, r->first);
}

/* Lets the hook add to these arrays. */
static void add_to(struct run *r, void *const *array)
{
    for (size_t i = 0; i < r->inputs; i++) {
        r->gram[i] = array[2 * i];
        r->channels[i].sum2 = array[2 * i + 1];
    }
}

/* The hidden states of a block of this rank, and the number of its tokens. */
static float *block_hidden(size_t *tokens, const struct run *r, size_t block)
{
    const size_t from = block_start(r, block);
    *tokens = block_start(r, block + 1) - from;
    return r->hidden + (from - block_start(r, r->first)) * r->width;
}

static int run_block(void *ctx, size_t block, void *const *into, struct qt_err *err)
{
    struct run *r = ctx;
    const struct qt_hook hook = {r, add_statistics};
    size_t tokens;
    float *hidden = block_hidden(&tokens, r, block);
    add_to(r, into);
    return r->layer_has_experts
               ? qt_layer_run_sublayer(r->layer, 0, hidden, tokens, r->seqlen, &hook, err)
               : qt_layer_run(r->layer, hidden, tokens, r->seqlen, &hook, err);
}

/* Largest values and counts are the same in any order: they are added up in place, and then over
 * the ranks. */
static int run_blocks(struct run *r, size_t layer,
                      int (*block)(void *ctx, size_t block, void *const *into, struct qt_err *err),
                      struct qt_err *err)
{
    struct qt_sums sums = {.be = r->be,
                           .comm = r->opt->comm,
                           .memory = &r->memory,
                           .blocks = r->blocks,
                           .count = 2 * r->inputs,
                           .block = block,
                           .ctx = r};
    void *own[QT_SUM_ARRAYS];
    for (size_t i = 0; i < r->inputs; i++) {
        const size_t k = r->model_is.layer[layer].k[r->input + i];
        sums.sum[2 * i] = (struct qt_sum){r->gram[i], k * k, k, true};
        sums.sum[2 * i + 1] = (struct qt_sum){r->channels[i].sum2, k, 0, true};
    }
    for (size_t i = 0; i < sums.count; i++)
        own[i] = sums.sum[i].data;
    int rc = qt_sums_run(&sums, err);
    add_to(r, own);
    return rc;
}

int qt_channels_join(struct qt_channels *c, size_t k, struct qt_comm *comm, struct qt_err *err)
{
    const size_t size = qt_comm_size(comm);
    float *absmax = NULL;
    uint32_t *hist = NULL;
    int rc = QT_OK;
    if (size == 1)
        return QT_OK;
    QT_TRY(qt_array_new(&absmax, size, k * sizeof *absmax, err));
    QT_TRY(qt_array_new(&hist, size, k * QT_HIST_BINS * sizeof *hist, err));
    QT_TRY(qt_comm_gather(comm, absmax, c->absmax, k * sizeof *absmax, err));
    QT_TRY(qt_comm_gather(comm, hist, c->hist, k * QT_HIST_BINS * sizeof *hist, err));
    memset(c->hist, 0, k * QT_HIST_BINS * sizeof *hist);
    for (size_t i = 0; i < size * k; i++)
        c->absmax[i % k] = absmax[i] > c->absmax[i % k] ? absmax[i] : c->absmax[i % k];
    for (size_t i = 0; i < size * k * QT_HIST_BINS; i++)
        c->hist[i % (k * QT_HIST_BINS)] += hist[i];
done:
    qt_free(absmax);
    qt_free(hist);
    return rc;
}

static void free_input(struct run *r, size_t i)
{
    struct qt_channels *c = &r->channels[i];
    r->be->free(r->be, r->gram[i]);
    qt_backend_channels_free(c, r->be);
    r->gram[i] = NULL;
}

static int new_input(struct run *r, size_t i, size_t k, struct qt_err *err)
{
    struct qt_channels *c = &r->channels[i];
    size_t bytes;
    int rc;
    if (qt_mul_overflow(&bytes, k, k) || qt_mul_overflow(&bytes, bytes, sizeof **r->gram))
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory (%zu x %zu doubles)", k, k);
    QT_TRY(r->be->alloc(r->be, &r->gram[i], bytes, err));
    QT_TRY(qt_backend_channels(c, r->be, k, err));
done:
    return rc;
}

/* Begins inputs [first, first + n) of a layer. */
static int new_inputs(struct run *r, size_t layer, size_t first, size_t n, struct qt_err *err)
{
    int rc = QT_OK;
    r->input = first;
    r->inputs = n;
    for (size_t i = 0; i < n && rc == QT_OK; i++)
        rc = new_input(r, i, r->model_is.layer[layer].k[first + i], err);
    return rc;
}

/* Downloads the statistics of an input and writes them to the file. */
static int store_input(struct run *r, size_t layer, size_t i, struct qt_err *err)
{
    const size_t k = r->model_is.layer[layer].k[r->input + i];
    struct qt_backend *be = r->be;
    const struct qt_channels *from = &r->channels[i];
    struct qt_channels c = {0};
    double *h = NULL;
    int rc;
    QT_TRY(qt_channels_new(&c, k, err));
    QT_TRY(be->download(be, c.absmax, from->absmax, k * sizeof *c.absmax, err));
    QT_TRY(be->download(be, c.sum2, from->sum2, k * sizeof *c.sum2, err));
    QT_TRY(be->download(be, c.hist, from->hist, k * QT_HIST_BINS * sizeof *c.hist, err));
    QT_TRY(qt_array_new(&h, k * k, sizeof *h, err));
    QT_TRY(be->download(be, h, r->gram[i], k * k * sizeof *h, err));
    QT_TRY(qt_channels_join(&c, k, r->opt->comm, err));
    if (r->writer)
        QT_TRY(qt_qcal_put(r->writer, layer, r->input + i, h, &c, r->weights.dir, err));
done:
    qt_channels_free(&c);
    qt_free(h);
    return rc;
}

static int store_inputs(struct run *r, size_t layer, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0; i < r->inputs && rc == QT_OK; i++) {
        rc = store_input(r, layer, i, err);
        free_input(r, i);
    }
    return rc;
}

/* ---- experts -------------------------------------------------------------------------------- */

/* Hook of an expert: multiplies its inputs by the routing weights, which multiply its errors. */
static int add_weighted(void *ctx, int input, const float *x, size_t m, size_t k,
                        struct qt_err *err)
{
    struct run *r = ctx;
    struct experts *e = &r->experts;
    const float *weight = e->tokens.weight + e->seen;
    int rc = QT_OK;
    e->seen += m;
    if (qt_model_scales_expert_inputs(r->model))
        return add_statistics(ctx, input, x, m, k, err);
    if (m * k > e->room) {
        r->be->free(r->be, e->weighted);
        e->weighted = NULL;
        e->room = 0;
        QT_TRY(r->be->alloc(r->be, &e->weighted, m * k * sizeof *e->weighted, err));
        e->room = m * k;
    }
    QT_TRY(r->be->gather_rows(r->be, e->weighted, x, NULL, weight, m, k, err));
    QT_TRY(add_statistics(ctx, input, e->weighted, m, k, err));
done:
    return rc;
}

static int run_expert_block(void *ctx, size_t block, void *const *into, struct qt_err *err)
{
    struct run *r = ctx;
    struct experts *e = &r->experts;
    const struct qt_hook hook = {r, add_weighted};
    size_t tokens;
    float *hidden = block_hidden(&tokens, r, block);
    add_to(r, into);
    e->seen = 0;
    qt_tokens_slice(&e->tokens, &e->all, block_start(r, block), tokens);
    return qt_layer_run_to(r->layer, (int)r->input, hidden, tokens, r->seqlen, &e->tokens, &hook,
                           err);
}

/* The same tokens as with --data: those that chose the expert, and if they are too few, those that
 * came nearest. */
static int run_expert_input(struct run *r, size_t layer, int input, struct qt_err *err)
{
    struct experts *e = &r->experts;
    const size_t expert = (size_t)qt_model_expert(r->model, layer, input);
    const size_t k = r->model_is.layer[layer].k[input];
    int rc;
    QT_TRY(new_inputs(r, layer, (size_t)input, 1, err));
    e->routed[expert] = (uint32_t)qt_tokens_of_expert(&e->all, e->weights, r->all_tokens,
                                                      qt_model_info(r->model)->experts, expert,
                                                      QT_MIN_TOKENS_PER_CHANNEL * k);
    QT_TRY(run_blocks(r, layer, run_expert_block, err));
    QT_TRY(store_inputs(r, layer, err));
done:
    return rc;
}

/* The input that all experts have. */
static int run_shared_block(void *ctx, size_t block, void *const *into, struct qt_err *err)
{
    struct run *r = ctx;
    const struct qt_hook hook = {r, add_statistics};
    size_t tokens;
    float *hidden = block_hidden(&tokens, r, block);
    add_to(r, into);
    return qt_layer_run_to(r->layer, (int)r->input, hidden, tokens, r->seqlen, NULL, &hook, err);
}

/* Gives all ranks the routing weights of all tokens, so that they choose the same for an expert. */
static int route(struct run *r, size_t layer, struct qt_err *err)
{
    const size_t experts = qt_model_info(r->model)->experts;
    int rc;
    if (r->tokens)
        QT_TRY(qt_layer_route(r->experts.weights + block_start(r, r->first) * experts, r->layer,
                              qt_model_mlp_input(r->model, layer), r->hidden, r->tokens, r->seqlen,
                              err));
    QT_TRY(qt_sums_join_rows(r->experts.weights, experts * sizeof *r->experts.weights, r->blocks,
                             chunk_tokens(r), r->all_tokens, r->opt->comm, err));
done:
    return rc;
}

/* The MLP of a layer with experts. Of all its Hessians, one is in memory at a time. */
static int run_experts(struct run *r, size_t layer, struct qt_err *err)
{
    const int first = qt_model_mlp_input(r->model, layer);
    const int shared = qt_model_experts_input(r->model, layer);
    int rc;
    QT_TRY(route(r, layer, err));
    for (int input = first; input < shared; input++)
        QT_TRY(run_expert_input(r, layer, input, err));
    QT_TRY(new_inputs(r, layer, (size_t)shared, 1, err));
    QT_TRY(run_blocks(r, layer, run_shared_block, err));
    QT_TRY(store_inputs(r, layer, err));
    if (r->writer)
        QT_TRY(qt_qcal_put_routed(r->writer, layer, r->experts.routed, err));
    if (r->tokens)
        QT_TRY(qt_layer_run_sublayer(r->layer, first, r->hidden, r->tokens, r->seqlen, NULL, err));
done:
    return rc;
}

static int new_experts(struct run *r, struct qt_err *err)
{
    const size_t experts = qt_model_info(r->model)->experts;
    struct experts *e = &r->experts;
    int rc = QT_OK;
    if (!experts)
        return QT_OK;
    QT_TRY(qt_array_new(&e->weights, r->all_tokens, experts * sizeof *e->weights, err));
    QT_TRY(qt_array_new(&e->routed, experts, sizeof *e->routed, err));
    QT_TRY(qt_tokens_new(&e->all, r->all_tokens, err));
    QT_TRY(qt_tokens_new(&e->tokens, r->tokens, err));
done:
    return rc;
}

static void free_experts(struct run *r)
{
    qt_free(r->experts.weights);
    qt_free(r->experts.routed);
    qt_tokens_free(&r->experts.all);
    qt_tokens_free(&r->experts.tokens);
    r->be->free(r->be, r->experts.weighted);
}

static int run_layer(struct run *r, size_t layer, struct qt_err *err)
{
    int rc;
    r->layer_has_experts = qt_model_experts_input(r->model, layer) >= 0;
    QT_TRY(new_inputs(r, layer, 0,
                      r->layer_has_experts ? (size_t)qt_model_mlp_input(r->model, layer)
                                           : r->model_is.layer[layer].inputs,
                      err));
    QT_TRY(qt_layer_open(&r->layer, r->model, layer, &r->weights, r->be, err));
    QT_TRY(run_blocks(r, layer, run_block, err));
    if (!r->layer_has_experts) {
        qt_layer_close(r->layer);
        r->layer = NULL;
    }
    QT_TRY(store_inputs(r, layer, err));
    if (r->layer_has_experts)
        QT_TRY(run_experts(r, layer, err));
done:
    qt_layer_close(r->layer);
    r->layer = NULL;
    return rc;
}

/* ---- the run -------------------------------------------------------------------------------- */

static int check_windows(struct run *r, const struct qt_qcal_part *part, struct qt_err *err)
{
    size_t limit = qt_model_info(r->model)->max_positions;
    r->seqlen = part->seqlen;
    if (r->seqlen > limit)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "windows of %zu tokens; the model takes %zu",
                       r->seqlen, limit);
    if (qt_mul_overflow(&r->all_tokens, part->samples, part->seqlen) || r->all_tokens > UINT32_MAX)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "%zu windows of %zu tokens are too many",
                       part->samples, part->seqlen);
    choose_blocks(r);
    return QT_OK;
}

/* QT_E_INPUT unless all ranks have the same checkpoint and data. */
static int check_same(const struct run *r, uint32_t ids_crc, struct qt_err *err)
{
    const uint32_t mine[] = {r->model_is.info.sample_crc, ids_crc};
    uint32_t first[] = {mine[0], mine[1]};
    int rc;
    QT_TRY(qt_comm_broadcast(r->opt->comm, first, sizeof first, 0, err));
    if (memcmp(first, mine, sizeof mine) != 0)
        rc = qt_fail(err, QT_E_INPUT, r->weights.dir, NULL, "has another %s than rank 0",
                     first[0] == mine[0] ? "calibration data" : "checkpoint");
    rc = qt_comm_meet(r->opt->comm, rc, err);
done:
    return rc;
}

static int embed(struct run *r, const uint32_t *ids, struct qt_err *err)
{
    size_t bytes;
    int rc;
    if (qt_mul_overflow(&bytes, r->tokens, r->width * sizeof *r->hidden))
        return qt_no_memory(err, NULL);
    QT_TRY(r->be->alloc(r->be, &r->hidden, bytes, err));
    if (r->tokens)
        QT_TRY(qt_model_embed(r->hidden, r->model, &r->weights, r->be,
                              ids + block_start(r, r->first), r->tokens, r->seqlen, err));
done:
    return rc;
}

int qt_calibrate(const char *path, const struct qt_ckpt *ckpt, const uint32_t *ids,
                 const struct qt_qcal_part *part, const struct qt_calibrate_options *opt,
                 struct qt_err *err)
{
    struct run r = {
        .path = path, .opt = opt, .be = opt->backend, .weights = qt_weights_of_ckpt(ckpt)};
    struct qt_qcal_part stored = *part;
    struct qt_qcal_info *info;
    int rc;
    QT_TRY(qt_model_open(&r.model, &r.weights, err));
    QT_TRY(check_windows(&r, part, err));
    QT_TRY(describe_model(&r.model_is, ckpt, r.model, err));
    info = &r.model_is.info;
    r.width = qt_model_info(r.model)->state;
    QT_TRY(new_experts(&r, err));
    stored.ids_crc = qt_crc32(0, ids, r.all_tokens * sizeof *ids);
    info->parts = &stored;
    info->nparts = 1;
    QT_TRY(check_same(&r, stored.ids_crc, err));
    if (qt_comm_rank(opt->comm) == 0)
        QT_TRY(qt_qcal_create(&r.writer, path, info, opt->force, err));
    QT_TRY(qt_sums_link(r.be, opt->comm, opt->log, err));
    QT_TRY(embed(&r, ids, err));
    for (size_t l = 0; l < info->layers; l++) {
        qt_log_layer(opt->log, l, info->layers, (double)r.all_tokens);
        QT_TRY(run_layer(&r, l, err));
        qt_log_progress(opt->log, "calibrate", (double)(l + 1), (double)info->layers);
    }
    QT_TRY(qt_ckpt_check_unchanged(ckpt, err));
    QT_TRY(qt_comm_meet(opt->comm, rc, err));
    if (r.writer)
        rc = qt_qcal_finish(r.writer, err);
    rc = qt_comm_meet(opt->comm, rc, err);
done:
    if (rc == QT_E_INTERRUPTED && !err->file[0]) /* a parallel loop was stopped */
        calibrate_interrupted(path, err);
    for (size_t i = 0; i < QT_LAYER_INPUTS; i++)
        free_input(&r, i);
    free_experts(&r);
    r.be->free(r.be, r.hidden);
    qt_qcal_abandon(r.writer);
    qt_free(r.memory.p);
    described_free(&r.model_is);
    qt_model_close(r.model);
    return rc;
}

/* ---- histograms ----------------------------------------------------------------------------- */

double qt_hist_quantile(const uint32_t hist[QT_HIST_BINS], float absmax, double q)
{
    double total = 0, below = 0, lo, hi;
    uint32_t b = 0;
    for (size_t i = 0; i < QT_HIST_BINS; i++)
        total += hist[i];
    double rank = q * total;
    while (b + 1 < QT_HIST_BINS && below + hist[b] < rank)
        below += hist[b++];
    if (hist[b] == 0)
        return (double)absmax; /* no tokens in the histogram */
    lo = qt_hist_from(b);
    hi = qt_hist_from((size_t)b + 1);
    hi = b + 1 < QT_HIST_BINS && hi < (double)absmax ? hi : (double)absmax;
    return lo + (hi - lo) * (rank - below) / hist[b];
}

struct qt_channels_summary qt_channels_summarize(const struct qt_channels *c, size_t k)
{
    struct qt_channels_summary s = {0};
    double sum2 = 0;
    for (size_t b = 0; b < QT_HIST_BINS; b++)
        s.tokens += c->hist[b];
    for (size_t j = 0; j < k; j++) {
        sum2 += c->sum2[j];
        s.p999 = fmax(s.p999, qt_hist_quantile(c->hist + j * QT_HIST_BINS, c->absmax[j], 0.999));
        s.absmax = fmax(s.absmax, (double)c->absmax[j]);
        s.dead += c->absmax[j] == 0;
    }
    s.rms = s.tokens ? sqrt(sum2 / ((double)k * (double)s.tokens)) : 0;
    return s;
}
