/*
 * model: the decoder as something that runs. config.json -> decoder graph, tokenizer, forward and
 * backward pass layer by layer over struct qt_backend. Knows nothing of quantization: a caller that
 * wants the inputs of linears passes a tap; a caller with other weights passes another source.
 *
 *   tokenizer/tokenizer.c   tokenizer.json -> ids (byte-level and SentencePiece-style BPE)
 *   tokenizer/load.c, added.c, unicode.c   its parts: reading, added tokens, character properties
 *   tokenizer/pretokenize*.c   where text is split before BPE;  bpe*.c: vocabulary and merges
 *   config/arch.c     one table row per model family
 *   config/config.c   config.json -> sizes and options; rope.c, experts.c: rotary embeddings and
 *                     mixtures of experts; source.c: typed, checked values
 *   graph/model.c     the tensors that a config implies, checked against the source -> qt_model
 *   graph/weights.c   a checkpoint as a source of weights
 *   graph/block.c     a decoder layer: its weights, working memory, the steps of its sublayers
 *   graph/forward.c   forward pass of decoder layers
 *   graph/ends.c      embedding and head
 *   graph/experts.c   routing of tokens to experts; tokens.c: token lists
 *   graph/backward.c  gradients of a loss through head and decoder layers
 */
#ifndef QT_MODEL_H
#define QT_MODEL_H

#include "base/base.h"
#include "formats/formats.h"

/* ---- tokenizer ------------------------------------------------------------------------------ */

struct qt_tokenizer;

/* Reads DIR/tokenizer.json (and tokenizer_config.json for add_bos_token, where that has no template
 * and the class is Llama's).
 * QT_E_INPUT: broken file. QT_E_UNSUPPORTED: a component qtool does not implement, named. */
int qt_tokenizer_open(struct qt_tokenizer **out, const char *dir, struct qt_err *err);
void qt_tokenizer_close(struct qt_tokenizer *tok);
size_t qt_tokenizer_vocab(const struct qt_tokenizer *tok);
/* Whether the post-processor puts something (BOS) before the text. */
bool qt_tokenizer_adds_bos(const struct qt_tokenizer *tok);
/* Ids of UTF-8 text. special = true also applies the post-processor's BOS/EOS template.
 * *ids is owned (qt_free). Invalid UTF-8: QT_E_INPUT with the byte offset. */
int qt_tokenizer_encode(uint32_t **ids, size_t *count, const struct qt_tokenizer *tok,
                        const char *text, size_t size, bool special, struct qt_err *err);

/* ---- weights -------------------------------------------------------------------------------- */

/* The linear layers of a block, in order of use. Those with equal `input` share their input. */
struct qt_linear {
    const char *weight; /* tensor name, e.g. "model.layers.3.self_attn.q_proj.weight" */
    size_t n, k, layer;
    int input; /* 0 attention in, 1 attention out, 2 MLP in, 3 MLP down; of expert e: + 2 e */
    /* The input whose channels this one's rows become (through attention, or elementwise), so that
     * they may change places together. -1: none. */
    int feeds;
    /* Rows from feeds_from on do, each set of feeds_rows for all channels (gate and up in one
     * tensor are two sets): channel c is row qt_model_feed_row(c) of a set. */
    size_t feeds_from, feeds_rows;
    /* A row of the last set that is multiplied by a positive number multiplies its channel. */
    bool feeds_scale;
};

/*
 * What a runtime does to activations between the operations, for example rounding them to few bits.
 * Buffers are in backend memory; either function may be NULL, which leaves things as they are.
 */
struct qt_fake_quant {
    void *ctx;
    /* y[m][k] = what the linears that share the input of `linear` get for x[m][k]. */
    int (*input)(void *ctx, struct qt_backend *be, float *y, const float *x,
                 const struct qt_linear *linear, size_t m, size_t k, struct qt_err *err);
    /* Keys (after rope) and values of whole sequences, [m][kv_heads * head_dim], in place. key,
     * value: the linears that make them, perhaps one. */
    void *cache_ctx;
    int (*cache)(void *cache_ctx, struct qt_backend *be, float *k, float *v,
                 const struct qt_linear *key, const struct qt_linear *value, size_t m,
                 const struct qt_attention *a, struct qt_err *err);
};

/* Where a model's tensors come from: a checkpoint (qt_weights_of_ckpt) or a container (pack/). */
struct qt_weights {
    const char *dir; /* holds config.json, tokenizer.json */
    void *ctx;
    /* Logical shape of a tensor; false when absent. */
    bool (*shape)(void *ctx, const char *name, int *ndim, size_t shape[QT_MAX_DIMS]);
    /* The whole tensor as FP32 in host memory, dst[count]. */
    int (*load)(void *ctx, const char *name, float *dst, struct qt_err *err);
    struct qt_fake_quant runtime; /* what goes with these weights; all NULL: nothing */
};
struct qt_weights qt_weights_of_ckpt(const struct qt_ckpt *ckpt);

/* ---- model ---------------------------------------------------------------------------------- */

struct qt_model; /* the decoder graph: sizes, per-layer tensor names, no weights */

struct qt_model_info {
    const char *family; /* "llama", "qwen2", ... the row of the table in arch.c */
    size_t layers, hidden, vocab, heads, kv_heads, head_dim, max_positions;
    float logit_softcap; /* 0 = none */
    size_t experts;      /* of which blocks' MLPs are mixtures; 0: of none */
    bool norms_plus_1;   /* norms multiply by 1 + their weights */
};

/* Parses config.json and checks every tensor's presence and shape against it.
 * QT_E_UNSUPPORTED: unknown model_type or option (named); QT_E_INPUT: config contradicts tensors.
 */
int qt_model_open(struct qt_model **out, const struct qt_weights *w, struct qt_err *err);
void qt_model_close(struct qt_model *model);
const struct qt_model_info *qt_model_info(const struct qt_model *model);
/* The head, where config.json ties it to the embedding and it is stored all the same: they have to
 * stay equal. NULL: there is none. *embedding: the other. Both are the model's. */
const char *qt_model_tied_head(const struct qt_model *model, const char **embedding);
/* What may stand under "model_type" in config.json; NULL beyond the end. */
const char *qt_model_type(size_t i);

/* Of a block: how many different inputs its linears have. */
size_t qt_model_inputs(const struct qt_model *model, size_t layer);
/* The expert whose linears have this input; -1: none. */
int qt_model_expert(const struct qt_model *model, size_t layer, int input);
size_t qt_model_linears(const struct qt_linear **out, const struct qt_model *model, size_t layer);
/* Whether a tensor is the weight of a linear of some block. */
bool qt_model_is_linear(const struct qt_model *model, const char *name);

/* The norms of a block, in order of use; of layer number `layers`: the final norm, if any. */
struct qt_norm {
    const char *weight; /* tensor name */
    size_t n;
};
size_t qt_model_norms(const struct qt_norm **out, const struct qt_model *model, size_t layer);

enum { QT_LAYER_LINEARS = 7, QT_LAYER_NORMS = 6 }; /* at most, where there are no experts */

/* The row of a linear that makes channel c of the input it feeds: itself, but for values, one head
 * of which serves several heads of queries. */
size_t qt_model_feed_row(const struct qt_model *model, int input, size_t c);
/* Whether what comes before an input can divide its channels by numbers of its own: norms in front
 * of sublayers, whose weights those become. */
bool qt_model_input_is_norm(const struct qt_model *model, int input);
/* Where the one linear with this input is the last of its sublayer, and what it gives is added to
 * the hidden states by itself, times a number: that number. Else 0. */
float qt_model_output_scale(const struct qt_model *model, size_t layer, int input);

/*
 * Of tokens in front of a mixture of experts: what the output of each expert is multiplied by,
 * share[m][experts] in host memory. -share: what it would be, of an expert that is not chosen;
 * where a bias has a say in the choice, that of the last one chosen, less by how far it ranks
 * behind it. QT_E_INPUT naming the router when its scores of a token are not finite.
 */
struct qt_layer;
int qt_layer_route(float *share, struct qt_layer *block, float *hidden, size_t m, size_t seqlen,
                   struct qt_err *err);
/* Tokens that go through an expert, by their numbers, ascending. */
struct qt_tokens {
    size_t count;
    uint32_t *row;
    float *share; /* above 0 */
};
/* Room for m tokens; freed by qt_tokens_free. */
int qt_tokens_new(struct qt_tokens *out, size_t m, struct qt_err *err);
void qt_tokens_free(struct qt_tokens *t);
/*
 * Those that chose the expert, according to share[m][experts]; how many these are is the result.
 * And if they are fewer than `least`, of the others those that came nearest to it.
 */
size_t qt_tokens_of_expert(struct qt_tokens *out, const float *share, size_t m, size_t experts,
                           size_t expert, size_t least);
/* Those among tokens [at, at + m), numbered from `at`. */
void qt_tokens_slice(struct qt_tokens *out, const struct qt_tokens *all, size_t at, size_t m);

/* Called with the input x[m][k] (backend memory) of the linears whose `input` it names, as its
 * runtime leaves it, before they run; of an expert, with the tokens that go through it, if any. */
struct qt_hook {
    void *ctx;
    int (*fn)(void *ctx, int input, const float *x, size_t m, size_t k, struct qt_err *err);
};

/* One decoder block's weights in backend memory. */
int qt_layer_open(struct qt_layer **out, const struct qt_model *model, size_t layer,
                  const struct qt_weights *w, struct qt_backend *be, struct qt_err *err);
void qt_layer_close(struct qt_layer *block);
/* Another layer (or other weights) in the same memory. After a failure the block may only be
 * closed.
 */
int qt_layer_load(struct qt_layer *block, size_t layer, const struct qt_weights *w,
                  struct qt_err *err);
/* Other weights for the linears with that input; all else, the runtime too, as it is. After a
 * failure the block may only be closed. */
int qt_layer_load_linears(struct qt_layer *block, int input, const struct qt_weights *w,
                          struct qt_err *err);
/* hidden[m][hidden] in place, m a multiple of seqlen, seqlen <= max_positions. Runs sequences in
 * chunks, so that working memory does not grow with m. tap may be NULL. QT_E_INPUT when a router's
 * scores are not finite: without them nobody can say which way a token goes. */
int qt_layer_run(struct qt_layer *block, float *hidden, size_t m, size_t seqlen,
                 const struct qt_hook *tap, struct qt_err *err);
/* The same of one sublayer: attention, with the inputs 0 and 1 of linears, or the MLP, with those
 * from 2 on. */
int qt_layer_run_sublayer(struct qt_layer *block, int input, float *hidden, size_t m, size_t seqlen,
                          const struct qt_hook *tap, struct qt_err *err);
/* The sublayer of `input` up to there: tap gets that input alone, hidden stays as it is. The
 * linears with this input and those behind it are not used. tokens: which of hidden[m] go through
 * the expert that has this input; NULL: those that choose it. */
int qt_layer_run_to(struct qt_layer *block, int input, float *hidden, size_t m, size_t seqlen,
                    const struct qt_tokens *tokens, const struct qt_hook *tap, struct qt_err *err);

/* Embedding and head. */
struct qt_embed_head;
int qt_embed_head_open(struct qt_embed_head **out, const struct qt_model *model,
                       const struct qt_weights *w, struct qt_backend *be, struct qt_err *err);
void qt_embed_head_close(struct qt_embed_head *ends);
/* Other weights (host memory) for the final norm, which must be there. */
int qt_head_set_norm(struct qt_embed_head *ends, const float *w, struct qt_err *err);
/* hidden[m][hidden] (backend memory) = embedding of ids[m] (host memory). */
int qt_embed_tokens(struct qt_embed_head *ends, float *hidden, const uint32_t *ids, size_t m,
                    size_t seqlen, struct qt_err *err);
/* The same for once, without ends that stay open. */
int qt_model_embed(float *hidden, const struct qt_model *model, const struct qt_weights *w,
                   struct qt_backend *be, const uint32_t *ids, size_t m, size_t seqlen,
                   struct qt_err *err);
/* logits[m][vocab] of hidden[m][hidden] after the final norm, before the final softcap. */
int qt_head_logits(struct qt_embed_head *ends, float *logits, const float *hidden, size_t m,
                   struct qt_err *err);

/* ---- backward ------------------------------------------------------------------------------- */

/* Where dL/dW of a block's parameters are added (backend memory, shaped as the parameters), in the
 * order of qt_model_linears and qt_model_norms. NULL: not wanted. */
struct qt_layer_grads {
    float *linear[QT_LAYER_LINEARS], *norm[QT_LAYER_NORMS];
};
/* grad[m][hidden]: dL/d output in, dL/d input out, for the block's input hidden[m][hidden] (kept).
 * The forward pass of each chunk is done again, so that between blocks only hidden states need be
 * stored. Norms' and linears' biases have no gradient. */
int qt_layer_grad(struct qt_layer *block, float *grad, const struct qt_layer_grads *add,
                  const float *hidden, size_t m, size_t seqlen, struct qt_err *err);

/* What is minimised: KL(reference || this) over all positions, the reference's logits being those
 * of ref for ref_hidden[m][hidden]; or, with ref = NULL, -ln p(target) over the positions whose
 * target (host memory) is not QT_NO_TARGET. L is `weight` times the sum. */
struct qt_objective {
    struct qt_embed_head *ref;
    const float *ref_hidden;
    const uint32_t *targets;
    float weight;
};
/* Of hidden[m][hidden], the last block's output: the loss of each position without the weight
 * (host memory), grad[m][hidden] = dL/d hidden, and dL/dw of the final norm added to norm. grad,
 * norm: NULL when not wanted. */
int qt_head_grad(struct qt_embed_head *ends, double *losses, float *grad, float *norm,
                 const float *hidden, const struct qt_objective *objective, size_t m,
                 struct qt_err *err);

#endif
