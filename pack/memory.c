/*
 * The memory that quantize takes at its peak, from the shapes that its phases allocate. Checked
 * against measurements by tests/large/plan_memory.sh.
 */
#include "pack/activations/planner.h"
#include "pack/sequential.h"

#include <sys/stat.h>

/* Tokens that the forward pass runs at once (model/graph), that are observed at once
 * (sequential.c), and of the passes that choose activation precisions (activations/). */
enum {
    LAYER_TOKENS = 2048,
    CHUNK_TOKENS = 4096,
    HEAD_TOKENS = 512,
    ACT_SAMPLES = 512,
    ACT_LOGITS = 256
};

/* Measured: the program with its libraries. */
static const uint64_t base_bytes = 20 << 20;
/* Measured: the buffers of OpenBLAS, per thread; with k channels they take buffer_bytes * k. */
static const uint64_t thread_bytes = 16 << 20, buffer_bytes = 2560;
/* Measured: names and descriptions, also of the written container when it is read back: per tensor,
 * and more per quantized tensor and section. */
static const uint64_t tensor_bytes = 400, entry_bytes = 1300, section_bytes = 1350;
/* Measured: a tokenizer, per byte of tokenizer.json. */
static const uint64_t tokenizer_bytes = 7;

struct shapes {
    uint64_t layer;    /* weights of the largest decoder layer */
    uint64_t linear;   /* of the largest linear */
    uint64_t scratch;  /* floats per token of a forward pass */
    uint64_t backward; /* of a backward pass, besides */
    uint64_t solving;  /* bytes for the linear input that needs most, without layers */
    uint64_t widest_k; /* channels of the widest linear input */
    uint64_t squares;  /* sum of k^2 over the linear inputs of a layer, for the channels that the
                        * planner of activations judges; experts share two */
};

/* What the calibrated phases share. Bytes. */
struct phases {
    const struct qt_model_info *info;
    const struct qt_memory_options *opt;
    struct shapes s;
    uint64_t tokens, rows; /* of all windows; of a forward pass */
    uint64_t hidden;       /* hidden states of the windows of a rank */
    size_t blocks;         /* of windows of a rank */
    uint64_t layer;        /* a decoder layer with its working memory */
    uint64_t head;         /* embedding, head, and the tensor that is being loaded */
};

static uint64_t max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

size_t qt_plan_rank_tokens(size_t *blocks, const struct qt_memory_options *opt)
{
    const size_t ranks = qt_max_size(opt->ranks, 1), tokens = opt->samples * opt->seqlen;
    *blocks = 0;
    if (!tokens)
        return 0;
    const size_t step = qt_max_size(CHUNK_TOKENS / opt->seqlen, 1) * opt->seqlen;
    const size_t chunks = qt_ceil_div(tokens, step), all = qt_sums_count(chunks);
    *blocks = qt_ceil_div(all, ranks);
    return qt_min_size(tokens, qt_ceil_div(*blocks * chunks, all) * step);
}

/* A linear [n][k] while its rows are rounded: the source, targets, codes, and the panels. */
static uint64_t rounding_bytes(const struct qt_plan *plan, uint64_t n, uint64_t k)
{
    const uint64_t panels = (uint64_t)qt_threads() * QT_PANEL_ROWS * k * (8 + 3 * 4);
    return n * k * (2 + 4 + 1) + panels + plan->working_bytes;
}

/* Sums of blocks of windows wait for others: as many as the tree is deep. */
static uint64_t tree_depth(size_t blocks)
{
    uint64_t depth = 0;
    while (blocks > (size_t)1 << depth)
        depth++;
    return depth;
}

/* The linear [n][k] and its input. Hessians are sums in FP64, their factors FP32; `cross` are the
 * sums of products with `errors` errors. With w4ax all are reordered. */
static uint64_t solving_bytes(const struct phases *p, const struct qt_plan *plan, uint64_t n,
                              uint64_t k, uint64_t errors, bool acts)
{
    const uint64_t square = k * k;
    const uint64_t chunk =
        qt_min_size(p->tokens, qt_max_size(CHUNK_TOKENS, p->opt->seqlen)) * 2 * (k + errors);
    const uint64_t cross = p->opt->file ? 0 : 4 * errors * k;
    const uint64_t depth = tree_depth(p->blocks);
    /* Sums of other ranks: a subtree of its own and its share of theirs, of 3 ranks one more. */
    const size_t ranks = p->opt->ranks;
    const uint64_t exchanged =
        ranks < 2 || p->opt->file ? 0 : (ranks & (ranks - 1) ? 3 : 2) * (square * 4 + cross);
    const uint64_t observed =
        p->opt->file ? 0
                     : square * 8 + cross +
                           max_u64(square * 8 + cross, depth * (square * 8 + cross)) + 4 * chunk;
    const uint64_t kept = square * 8 + cross + (acts ? square * 8 + cross : 0);
    const uint64_t factoring = kept + square * (4 + 4 + 8);
    const uint64_t solving = kept + square * (4 + 4) + cross + rounding_bytes(plan, n, k);
    return exchanged + max_u64(observed, max_u64(factoring, solving));
}

static uint64_t layer_shapes(struct phases *p, const struct qt_plan *plan,
                             const struct qt_model *model, size_t layer, bool acts)
{
    const struct qt_linear *linear;
    const size_t count = qt_model_linears(&linear, model, layer);
    uint64_t weights = 0, outputs = 0, square[QT_INPUTS] = {0}, squares = 0;
    for (size_t i = 0; i < count; i++) {
        const uint64_t n = linear[i].n, k = linear[i].k;
        weights += n * k;
        const uint64_t judged = k / qt_act_judge_stride(k);
        square[qt_act_pooled(linear[i].input)] = judged * judged;
        p->s.linear = max_u64(p->s.linear, n * k);
        p->s.widest_k = max_u64(p->s.widest_k, k);
        const struct qt_linear *only =
            qt_sequential_linear_of_errors(model, layer, linear[i].input);
        p->s.solving = max_u64(p->s.solving, solving_bytes(p, plan, n, k, only ? n : k, acts));
        if (linear[i].input == qt_model_mlp_input(model, layer)) /* gate and up */
            outputs += n;
    }
    for (size_t i = 0; i < QT_INPUTS; i++)
        squares += square[i];
    p->s.squares = max_u64(p->s.squares, squares);
    p->s.layer = max_u64(p->s.layer, weights);
    return outputs;
}

static void find_shapes(struct phases *p, const struct qt_plan *plan, const struct qt_model *model,
                        bool acts)
{
    const struct qt_model_info *info = p->info;
    const uint64_t heads = (uint64_t)info->heads * info->head_dim;
    const uint64_t kv = (uint64_t)info->kv_heads * info->head_dim;
    uint64_t mlp = 0;
    for (size_t l = 0; l < info->layers; l++)
        mlp = max_u64(mlp, layer_shapes(p, plan, model, l, acts));
    p->s.scratch = qt_model_working_floats(model);
    /* Activations that the gradients need, with normed queries and keys, and the gradients. */
    p->s.backward = 5 * info->hidden + 3 * (heads + kv) + 3 * mlp / 2 + p->s.scratch;
}

static void find_phases(struct phases *p, const struct qt_plan *plan, const struct qt_model *model,
                        bool acts)
{
    const struct qt_model_info *info = p->info;
    p->tokens = (uint64_t)p->opt->samples * p->opt->seqlen;
    p->rows = qt_min_size(p->tokens, qt_max_size(LAYER_TOKENS, p->opt->seqlen));
    p->hidden = qt_plan_rank_tokens(&p->blocks, p->opt) * info->state * 4;
    find_shapes(p, plan, model, acts);
    p->layer = (p->s.layer + p->rows * p->s.scratch) * 4;
    p->head = (uint64_t)qt_model_outer_floats(model) * 4;
}

/* The choice of activation precisions. Windows in as many variants as there are inputs, and besides
 * either the hidden states in front of a layer and behind it, statistics of the inputs with a
 * sample of each, three more copies of one sample, its Gram matrices, the Hessians of the inputs,
 * one of them factored, and a sample of rows; or embedding and head, and logits. */
static uint64_t acts_bytes(const struct phases *p)
{
    const struct qt_model_info *info = p->info;
    const struct qt_calibration data = {.samples = p->opt->samples, .seqlen = p->opt->seqlen};
    const uint64_t state = info->state * 4, k = p->s.widest_k;
    const uint64_t judged = k / qt_act_judge_stride(k);
    const uint64_t tokens = (QT_INPUTS + 3) * ACT_SAMPLES + QT_ACT_BLOCK + QT_ACT_JUDGE_ROWS;
    const uint64_t statistics = 2 * qt_act_stat_tokens(&data) * state + tokens * k * 4 +
                                5 * QT_ACT_JUDGE_ROWS * judged * 4 + p->s.squares * 8 +
                                judged * judged * (2 * 4 + 8 + 2 * 4 + 8);
    const uint64_t variants =
        (1 + (uint64_t)info->layers * QT_INPUTS) * qt_act_variant_tokens(&data) * state;
    const uint64_t scores = p->head + 2 * ACT_LOGITS * (uint64_t)info->vocab * 4;
    return p->layer + p->s.linear * 4 + variants + max_u64(statistics, scores);
}

/* Learning keeps the outputs of the unquantized model for all windows, the hidden states of a batch
 * behind every layer, and the gradients of a layer, of which some wait for others. */
static uint64_t learning_bytes(const struct phases *p, const struct qt_plan *plan,
                               const struct qt_learn_options *learn)
{
    const struct qt_model_info *info = p->info;
    const bool by_layer = learn->scope == QT_LEARN_BLOCK;
    const uint64_t batch = qt_min_size(learn->batch * p->opt->seqlen, p->tokens);
    const uint64_t layers = by_layer ? 2 : info->layers + 1;
    const uint64_t all = p->tokens * info->state * 4;
    const size_t blocks = qt_sums_count(qt_min_size(learn->batch, p->opt->samples));
    const size_t ranks = qt_max_size(p->opt->ranks, 1);
    const uint64_t waiting = ranks > 1 ? 3 : tree_depth(blocks);
    const uint64_t logits = by_layer ? 0 : 3 * HEAD_TOKENS * (uint64_t)info->vocab * 4;
    const uint64_t references = by_layer ? 2 * all : all + 2 * p->head;
    return references + (layers + 2) * batch * info->state * 4 + p->rows * p->s.backward * 4 +
           logits + p->layer + ((1 + waiting) * p->s.layer + p->s.linear) * 4 +
           plan->packed_bytes * 3 / 2;
}

static uint64_t calibrated_bytes(const struct qt_plan *plan, const struct qt_model *model,
                                 const struct qt_memory_options *opt, bool acts,
                                 const struct qt_learn_options *learn)
{
    struct phases p = {.info = qt_model_info(model), .opt = opt};
    uint64_t work;
    find_phases(&p, plan, model, acts);
    if (opt->file)
        work = p.s.solving;
    else
        work = 2 * p.hidden + max_u64(p.head, 2 * p.layer + p.s.linear * 4 + p.s.solving);
    if (acts)
        work = max_u64(work, acts_bytes(&p));
    if (learn)
        work = max_u64(work, learning_bytes(&p, plan, learn));
    if (p.info->experts && !opt->file)
        work += p.tokens * p.info->experts * 4;
    return work + (uint64_t)qt_threads() * qt_min_size(thread_bytes, buffer_bytes * p.s.widest_k);
}

/* Reading the data: the tokenizer, a file, and the token ids. */
static int reading_bytes(uint64_t *out, const struct qt_ckpt *ckpt,
                         const struct qt_memory_options *opt, struct qt_err *err)
{
    char *path;
    int rc = qt_path_join(&path, qt_ckpt_dir(ckpt), "tokenizer.json", err);
    struct stat st;
    *out = opt->data_bytes;
    if (rc == QT_OK && opt->data_bytes && stat(path, &st) == 0)
        *out += tokenizer_bytes * (uint64_t)st.st_size;
    qt_free(path);
    return rc;
}

int qt_plan_memory(uint64_t *out, const struct qt_plan *plan, const struct qt_ckpt *ckpt,
                   const struct qt_memory_options *opt, struct qt_err *err)
{
    const struct qt_weights source = qt_weights_of_ckpt(ckpt);
    struct qt_learn_options learn;
    struct qt_model *model;
    uint64_t largest = 0, sections = 0, reading;
    bool learns = false, acts = false;
    int rc = qt_learn_parse(&learn, "", err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < plan->count; i++) {
        const struct qt_plan_item *item = &plan->items[i];
        largest = max_u64(largest, item->tensor->nbytes);
        sections += item->packed->nsections;
        learns |= !item->copied && qt_spec_learns(&item->packed->spec);
        acts |= !item->copied && item->packed->spec.scheme->needs_data;
    }
    /* Without data one tensor at a time is in memory; reading the output back, one per thread. */
    uint64_t work = max_u64(largest + plan->working_bytes, largest * (uint64_t)qt_threads());
    *out = base_bytes + plan->count * tensor_bytes + plan->quantized * entry_bytes +
           sections * section_bytes;
    if (opt->samples || opt->file) {
        QT_TRY(reading_bytes(&reading, ckpt, opt, err));
        QT_TRY(qt_model_open(&model, &source, err));
        work = max_u64(work, calibrated_bytes(plan, model, opt, acts, learns ? &learn : NULL));
        work = max_u64(work, reading);
        qt_model_close(model);
    }
    *out += work;
done:
    return rc;
}
