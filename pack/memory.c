/*
 * The memory that quantize takes at its peak, from the shapes that its phases allocate. Checked
 * against measurements by tests/large/plan_memory.sh.
 */
#include "pack/schemes/scheme.h"

/* Tokens that the forward pass runs at once (model/graph), and that are observed at once
 * (sequential.c). */
enum { LAYER_TOKENS = 2048, CHUNK_TOKENS = 4096, HEAD_TOKENS = 512 };

/* Measured: the program with its libraries; with OpenBLAS and the tokenizer; per thread. */
static const uint64_t base_bytes = 20 << 20, model_bytes = 64 << 20, thread_bytes = 16 << 20;
/* Names, entries of the manifest and the report, per tensor. */
static const uint64_t tensor_bytes = 400, entry_bytes = 6000;

struct shapes {
    uint64_t layer;    /* weights of the largest decoder layer */
    uint64_t linear;   /* of the largest linear */
    uint64_t scratch;  /* floats per token of a forward pass */
    uint64_t solving;  /* bytes for the linear input that needs most, without its tokens */
    uint64_t widest_k; /* channels of the widest linear input */
};

static uint64_t max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* Bytes of the sums over a linear input of k channels, of its factored Hessian, and of the largest
 * linear [n][k] that is solved under it. Hessians are sums in FP64 and their factors FP32. */
static uint64_t solving_bytes(uint64_t n, uint64_t k, uint64_t hidden)
{
    const uint64_t sums = k * k * (8 + 8 + 4 + 4) + hidden * k * (4 + 4);
    const uint64_t factor = k * k * (8 + 4 + 4 + 4 + 4);
    const uint64_t matrices = 6 * n * k * 4;
    const uint64_t threads = (uint64_t)qt_threads() * QT_PANEL_ROWS * k * (8 + 3 * 4);
    return sums + factor + matrices + threads;
}

static struct shapes shapes_of(const struct qt_model *model)
{
    const struct qt_model_info *info = qt_model_info(model);
    struct shapes s = {0};
    for (size_t l = 0; l < info->layers; l++) {
        const struct qt_linear *linear;
        const size_t count = qt_model_linears(&linear, model, l);
        uint64_t weights = 0, outputs = 0;
        for (size_t i = 0; i < count; i++) {
            const uint64_t n = linear[i].n, k = linear[i].k;
            weights += n * k;
            s.linear = max_u64(s.linear, n * k);
            s.widest_k = max_u64(s.widest_k, k);
            s.solving = max_u64(s.solving, solving_bytes(n, k, info->hidden));
            if (linear[i].input == qt_model_mlp_input(model, l)) /* gate and up */
                outputs += n;
        }
        s.layer = max_u64(s.layer, weights);
        s.scratch = max_u64(s.scratch, outputs);
    }
    s.scratch = max_u64(s.scratch, 2 * (info->heads + info->kv_heads) * (uint64_t)info->head_dim);
    s.scratch += info->hidden;
    return s;
}

/* Learning keeps the hidden states of a batch behind every layer, and gradients of a layer. */
static uint64_t learning_bytes(const struct qt_plan *plan, const struct shapes *s,
                               const struct qt_model_info *info,
                               const struct qt_learn_options *learn, uint64_t seqlen)
{
    const bool by_layer = learn->scope == QT_LEARN_BLOCK;
    const uint64_t batch = learn->batch * seqlen, layers = by_layer ? 2 : info->layers + 1;
    const uint64_t logits = by_layer ? 0 : 2 * HEAD_TOKENS * (uint64_t)info->vocab * 4;
    const uint64_t head = by_layer ? 0 : (uint64_t)info->vocab * info->hidden * 4;
    return (layers + 2) * batch * info->hidden * 4 + 3 * batch * s->scratch * 4 + logits + head +
           2 * s->layer * 4 + plan->packed_bytes;
}

static uint64_t calibrated_bytes(const struct qt_plan *plan, const struct qt_model *model,
                                 const struct qt_memory_options *opt,
                                 const struct qt_learn_options *learn)
{
    const struct qt_model_info *info = qt_model_info(model);
    const struct shapes s = shapes_of(model);
    const uint64_t tokens = (uint64_t)opt->samples * opt->seqlen;
    const uint64_t chunk = qt_min_size(tokens, qt_max_size(CHUNK_TOKENS, opt->seqlen));
    const uint64_t rows = qt_min_size(tokens, qt_max_size(LAYER_TOKENS, opt->seqlen));
    const uint64_t start = model_bytes + thread_bytes * (uint64_t)qt_threads();
    const uint64_t hidden = 2 * tokens * info->hidden * 4;
    const uint64_t layers = 2 * (s.layer + rows * s.scratch) * 4 + s.linear * 4;
    const uint64_t observed = chunk * (s.widest_k + info->hidden) * 4;
    const uint64_t embedding = 2 * (uint64_t)info->vocab * info->hidden * 4;
    const uint64_t solving = opt->file ? s.solving : layers + observed + s.solving;
    const uint64_t learning = learn ? learning_bytes(plan, &s, info, learn, opt->seqlen) : 0;
    return start + max_u64(hidden + max_u64(solving, opt->file ? 0 : embedding), learning);
}

int qt_plan_memory(uint64_t *out, const struct qt_plan *plan, const struct qt_ckpt *ckpt,
                   const struct qt_memory_options *opt, struct qt_err *err)
{
    const struct qt_weights source = qt_weights_of_ckpt(ckpt);
    struct qt_learn_options learn;
    struct qt_model *model;
    uint64_t largest = 0;
    bool learns = false;
    int rc = qt_learn_parse(&learn, "", err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < plan->count; i++) {
        const struct qt_plan_item *item = &plan->items[i];
        largest = max_u64(largest, item->tensor->nbytes);
        learns |= !item->copied && qt_spec_learns(&item->packed->spec);
    }
    /* Without data one tensor at a time is in memory; reading the output back, one per thread. */
    *out = base_bytes + plan->count * tensor_bytes + plan->quantized * entry_bytes +
           max_u64(largest + plan->working_bytes, largest * (uint64_t)qt_threads());
    if (opt->samples == 0 && !opt->file)
        return QT_OK;
    rc = qt_model_open(&model, &source, err);
    if (rc < 0)
        return rc;
    *out = max_u64(*out, calibrated_bytes(plan, model, opt, learns ? &learn : NULL) +
                             plan->count * tensor_bytes + plan->quantized * entry_bytes);
    qt_model_close(model);
    return QT_OK;
}
