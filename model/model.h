/*
 * model: config.json -> decoder graph, tokenizer, forward and backward pass, one decoder layer at a
 * time over struct qt_backend. This folder does not depend on quantization: a caller that needs the
 * inputs of linears passes a hook; a caller with other weights passes another struct qt_weights.
 *
 *   tokenizer/tokenizer.c      text -> ids; files.c: tokenizer.json, tekken.json, tokenizer.model
 *   tokenizer/load.c           normalizers and pre-tokenizers; added.c: added tokens
 *   tokenizer/decode.c         ids -> text
 *   tokenizer/unicode.c        character properties and normalization forms
 *   tokenizer/pretokenize*.c   splitting text into words;  words.c, bpe*.c, unigram.c: the model
 *   chat/chat.c       chat templates (a subset of Jinja); chat/chat.h lists the files
 *   config/families/  the model families: names of tensors, defaults, options that few have
 *   config/arch.c     the table of the families
 *   config/config.c   config.json -> sizes and options; rope.c, experts.c, heads.c, ssm.c: rotary
 *                     embeddings, mixtures of experts, attention heads of layers, state space
 *                     models; source.c: typed, checked values
 *   graph/attention.c, latent.c, delta.c, short.c, ssm.c   the mixers: attention, latent
 *                     attention, gated DeltaNet, short convolution, state space model
 *   graph/head_experts.c   another: mixture of attention heads (JetMoE)
 *   graph/per_layer.c   inputs of single decoder layers (Gemma 4); altup.c: several hidden states
 *                     of a token (Gemma 3n)
 *   graph/model.c     the tensors that a config implies, checked against the source -> qt_model;
 *                     roles.c: parts of a layer, tensors.c: the tensors of a part
 *   graph/weights.c   a checkpoint as a source of weights
 *   graph/load.c      weights in backend memory
 *   graph/layer.c     a decoder layer: working memory, the steps of its sublayers
 *   graph/forward.c   forward pass of decoder layers
 *   graph/embed_head.c  embedding and head
 *   graph/decode.c    a whole model that continues sequences; cache.c: keys, values, states;
 *                     sample.c: the next token
 *   graph/parts.c     the tensors and options of a decoder, for runtimes without struct qt_backend
 *   graph/experts.c   routing of tokens to experts; tokens.c: token lists
 *   graph/backward.c  gradients of a loss through decoder layers; head_grad.c: through the head
 */
#ifndef QT_MODEL_H
#define QT_MODEL_H

#include "base/base.h"
#include "formats/formats.h"

/* ---- tokenizer ------------------------------------------------------------------------------ */

struct qt_tokenizer;

/* Reads the first of tokenizer.json, tekken.json, tiktoken.model (of tiktoken) and tokenizer.model
 * (of SentencePiece or tiktoken) in DIR. Texts of special tokens become these tokens in all of
 * them. tokenizer.json: if the file has no post-processor template, add_bos_token is read from
 * DIR/tokenizer_config.json for Llama tokenizers. *out is freed by qt_tokenizer_close. QT_E_INPUT:
 * broken file. QT_E_UNSUPPORTED: names a component that qtool does not implement. */
int qt_tokenizer_open(struct qt_tokenizer **out, const char *dir, struct qt_err *err);
void qt_tokenizer_close(struct qt_tokenizer *tok);
/* Vocabulary size, added tokens included: one more than the largest id. */
size_t qt_tokenizer_vocab(const struct qt_tokenizer *tok);
/* True if encoding with special = true puts a token (BOS) before the text. */
bool qt_tokenizer_adds_bos(const struct qt_tokenizer *tok);
/* *id = "mask_token" of tokenizer_config.json, or else the token [MASK] or <mask>. QT_E_INPUT:
 * there is none. */
int qt_tokenizer_mask(uint32_t *id, const struct qt_tokenizer *tok, struct qt_err *err);
/* *made: the merges of BPE alone make one token of `word`, which is in the form of the vocabulary.
 * If they do for all words of the vocabulary, "ignore_merges" makes no difference. */
int qt_tokenizer_merges(bool *made, const struct qt_tokenizer *tok, const char *word,
                        struct qt_err *err);
/* The file that decides that: "tokenizer.json" or "tokenizer_config.json". */
const char *qt_tokenizer_bos_file(const struct qt_tokenizer *tok);
/* *id = the token before the text, or else "bos_token" of tokenizer_config.json. QT_E_INPUT: there
 * is none. */
int qt_tokenizer_bos(uint32_t *id, const struct qt_tokenizer *tok, struct qt_err *err);
/* Returns the number of bytes at the end that are the beginning of a longer character, 0 to 3. */
size_t qt_utf8_cut(const char *s, size_t size);

enum qt_bos { QT_BOS_AUTO, QT_BOS_YES, QT_BOS_NO }; /* AUTO: as the tokenizer's files say */

struct qt_encode_options {
    bool special;    /* add the BOS/EOS tokens of the post-processor */
    enum qt_bos bos; /* with `special`: what to put before the text */
    size_t most;     /* stop after this many ids; 0: no limit */
    /* Polled; may be NULL. Returning true ends the call with QT_E_INTERRUPTED. */
    bool (*interrupted)(void);
};
/*
 * Encodes UTF-8 text[size] to (*ids)[*count]; the caller frees *ids with qt_free. QT_E_INPUT, with
 * the offset in the text: invalid UTF-8, or a pattern of the tokenizer takes more than 256 steps of
 * backtracking per byte of the text.
 */
int qt_tokenizer_encode_most(uint32_t **ids, size_t *count, const struct qt_tokenizer *tok,
                             const char *text, size_t size, const struct qt_encode_options *opt,
                             struct qt_err *err);
/* The same without limit and interruption. */
int qt_tokenizer_encode(uint32_t **ids, size_t *count, const struct qt_tokenizer *tok,
                        const char *text, size_t size, bool special, struct qt_err *err);

/* The way back: the "decoder" of DIR/tokenizer.json, or what other formats do. */
struct qt_detokenizer;
/* tok: the tokenizer of the same directory, used during the call only. *out is freed by
 * qt_detokenizer_close. QT_E_UNSUPPORTED: names a decoder that qtool does not implement. */
int qt_detokenizer_open(struct qt_detokenizer **out, const struct qt_tokenizer *tok,
                        const char *dir, struct qt_err *err);
void qt_detokenizer_close(struct qt_detokenizer *d);
/* The text of ids[count] without special tokens: UTF-8 of *size bytes with a NUL behind it, freed
 * with qt_free. What is not UTF-8 becomes U+FFFD. */
int qt_detokenize(char **text, size_t *size, const struct qt_detokenizer *d, const uint32_t *ids,
                  size_t count, struct qt_err *err);

/* ---- chat templates ------------------------------------------------------------------------- */

struct qt_chat;

/* Reads the chat template of DIR (chat_template.jinja, or "chat_template" of tokenizer_config.json,
 * chat_template.json or processor_config.json) and the special tokens of tokenizer_config.json.
 * *out is freed by qt_chat_close. QT_E_INPUT: there is none, or it is broken. QT_E_UNSUPPORTED
 * names what is outside of the subset of Jinja. */
int qt_chat_open(struct qt_chat **out, const char *dir, struct qt_err *err);
void qt_chat_close(struct qt_chat *chat);
/*
 * Writes a conversation as the template does: messages, an array of objects with "role" and
 * "content"; tools, an array, or NULL. prompt: add what precedes an answer. (*text)[*size] is UTF-8
 * with a NUL behind it, freed with qt_free. It holds the BOS token if the template has one: encode
 * it without special tokens. strftime_now gives 26 July 2024 whatever the day is. QT_E_INPUT: the
 * template refuses the conversation or fails. QT_E_UNSUPPORTED: as above.
 */
int qt_chat_render(char **text, size_t *size, const struct qt_chat *chat, const json_t *messages,
                   const json_t *tools, bool prompt, struct qt_err *err);

/* ---- weights -------------------------------------------------------------------------------- */

/* A linear of a decoder layer. Linears with equal `input` share their input. */
struct qt_linear {
    const char *weight; /* tensor name, e.g. "model.layers.3.self_attn.q_proj.weight" */
    size_t n, k, layer;
    /* In order of use. The mixer (attention) has its input, 0, and at last the input of the output
     * projection; latent attention has the latent states of queries (if any) and keys in between.
     * A mixture of attention heads has 1 + 2e and 2 + 2e for Q and O of expert e. Then M =
     * qt_model_mlp_input, the MLP input, and M + 1, the input of the down projection; M + 2e and
     * M + 1 + 2e for expert e. */
    int input;
    /* Index of the later linear input that is computed from the outputs of this linear, elementwise
     * or through attention: if the rows of this linear are permuted, the channels of that input are
     * permuted in the same way. -1: none. */
    int feeds;
    /* From row feeds_from on, the rows form sets of feeds_rows rows each; a fused gate and up
     * projection has two sets. Channel c of `feeds` comes from row qt_model_feed_row(c) of every
     * set. */
    size_t feeds_from, feeds_rows;
    /* True: if a row of the last set is multiplied by a positive number, so is the channel of
     * `feeds` that comes from this row. */
    bool feeds_scale;
};

/*
 * Simulated quantization of activations and KV caches. Buffers are in backend memory. A function
 * that is NULL leaves the values unchanged.
 */
struct qt_fake_quant {
    void *ctx;
    /* Writes y[m][k], the rounded x[m][k]; y is the input of all linears with linear->input. */
    int (*input)(void *ctx, struct qt_backend *be, float *y, const float *x,
                 const struct qt_linear *linear, size_t m, size_t k, struct qt_err *err);
    /* Rounds keys (after rope) and values of whole sequences, [m][kv_heads * head_dim], in place.
     * key, value: the linears that compute them; the same one if fused. A cache with KV groups also
     * copies the unrounded keys to `exact` (same shape as k) and sets a->exact_keys. */
    void *cache_ctx;
    int (*cache)(void *cache_ctx, struct qt_backend *be, float *k, float *v, float *exact,
                 const struct qt_linear *key, const struct qt_linear *value, size_t m,
                 struct qt_attention *a, struct qt_err *err);
};

/* Where a model's tensors come from: a checkpoint (qt_weights_of_ckpt) or a container (pack/). */
struct qt_weights {
    const char *dir; /* holds config.json, tokenizer.json */
    void *ctx;
    /* Sets the logical shape of a tensor; returns false if there is no such tensor. */
    bool (*shape)(void *ctx, const char *name, int *ndim, size_t shape[QT_MAX_DIMS]);
    /* Writes the whole tensor as FP32 to dst[count] in host memory. */
    int (*load)(void *ctx, const char *name, float *dst, struct qt_err *err);
    /* Uploads the tensor to dst[count] in backend memory without a copy in FP32 on the host. Sets
     * *done to false if that is not possible: then `load` is. NULL: never possible. */
    int (*place)(void *ctx, struct qt_backend *be, const char *name, float *dst, bool *done,
                 struct qt_err *err);
    /* True if the tensor is that of the source that these weights were made from; NULL: unknown. */
    bool (*unchanged)(void *ctx, const char *name);
    struct qt_fake_quant fake_quant; /* rounding that these weights need; members NULL: none */
    /* The quantization_config of config.json that `load` undoes; NULL: there must be none. */
    const json_t *quantization;
};
/* Borrows ckpt. */
struct qt_weights qt_weights_of_ckpt(const struct qt_ckpt *ckpt);

/* ---- model ---------------------------------------------------------------------------------- */

struct qt_model; /* the decoder graph: sizes, per-layer tensor names, no weights */

/* The logits of a position predict the next token. Those of encoders (BERT), whose attention goes
 * both ways, predict the token of this position, if it is masked, or nothing, if the head is
 * missing. */
enum qt_predicts { QT_PREDICTS_NEXT, QT_PREDICTS_MASKED, QT_PREDICTS_NOTHING };

struct qt_model_info {
    const char *family; /* "llama", "qwen2", ...: see config/families/ */
    size_t layers, hidden, vocab, heads, kv_heads, head_dim, max_positions;
    /* Floats of a token that pass from layer to layer: `hidden` first, then what later layers read
     * (keys and values, inputs of their own), if the model has that. At least `hidden`. */
    size_t state;
    float logit_softcap; /* 0 = none */
    enum qt_predicts predicts;
    size_t experts;    /* experts of an MoE layer, a shared expert included; 0: no MoE layers */
    bool norms_plus_1; /* norms multiply by 1 + w */
};

/* Parses config.json of w->dir and checks the presence and shape of every tensor. w is used during
 * the call only. QT_E_UNSUPPORTED: names an unknown model_type or option; QT_E_INPUT: config.json
 * contradicts the tensors. */
int qt_model_open(struct qt_model **out, const struct qt_weights *w, struct qt_err *err);
void qt_model_close(struct qt_model *model);
const struct qt_model_info *qt_model_info(const struct qt_model *model);
/* What a decoder computes besides: options that formats of other programs store beside tensors.
 * Arrays belong to the model; NULL: there are none. */
struct qt_model_details {
    size_t dense_width, expert_width, shared_width; /* intermediate widths of MLPs; 0: none */
    size_t routed, top_k;   /* the router chooses top_k of `routed` experts; 0: no experts */
    bool normalize_routing; /* routing weights of the chosen experts sum to 1 */
    bool some_dense;        /* with experts: some layers have a dense MLP */
    const bool *dense;      /* [layers] those; NULL: no experts */
    bool sigmoid_routing;   /* scores are sigmoids, not a softmax */
    /* Experts are chosen from the routing_top best of so many groups; at most 1 group: from all.
     * The score of a group is the sum of its two best scores, or the best. */
    size_t routing_groups, routing_top;
    bool routing_by_best;
    float routing_scale;   /* of routing weights */
    const size_t *windows; /* [layers] sliding window in tokens; 0: none */
    const bool *no_rope;   /* [layers] true: no rotary embedding */
    /* The rotary embedding rotates rotary_dim channels of a head. Channel pair i turns by
     * position * inv_freq[i]; with local_inv_freq in layers with a window, if these differ; with
     * long_inv_freq in sequences of more than long_from tokens. Cosines and sines are multiplied by
     * rope_scale. */
    size_t rotary_dim;
    const float *inv_freq, *local_inv_freq, *long_inv_freq;
    size_t long_from;
    float rope_scale;
    /* Factors of the attention scores, the embedding, sublayer outputs, and logits. */
    float attn_scale, embed_scale, residual_scale, logit_scale;
    float eps, attn_softcap; /* attn_softcap 0: none */
    /* Gated DeltaNet: heads, channels of a head, tokens of the convolution; every delta_period-th
     * layer has attention instead (1: all layers; 0: others have). */
    size_t delta_key_heads, delta_value_heads, delta_key_dim, delta_value_dim, delta_kernel;
    size_t delta_period;
    /* Latent attention: ranks of the latent states, channels of a head without and with rotary
     * embedding, and of its values. kv_rank 0: another attention; q_rank 0: queries have none. */
    size_t q_rank, kv_rank, nope, rope, value_dim;
    bool interleaved;    /* the rotary embedding pairs channels 2i and 2i + 1 */
    size_t short_kernel; /* tokens of short convolutions; 0: no layer has them */
    /* Queries are multiplied by 1 + query_beta ln(1 + floor(position / query_step)). */
    float query_beta;
    size_t query_step;
    /* Llama 4: attention within chunks of so many tokens ([layers]; NULL, 0: none); norms of
     * queries and keys without weights; in layers without rotary embedding, factors
     * 1 + floor_beta ln(1 + floor((position + 1) / floor_step)) of queries. */
    const size_t *chunks;
    bool bare_norms;
    float floor_beta;
    size_t floor_step;
    enum qt_act_kind act;
    bool tied; /* the head is the embedding */
    /* The names of the decoder's tensors begin with `prefix` ("model."), and `head` is the head's
     * name without ".weight". Both strings are static. */
    const char *prefix, *head;
};
void qt_model_details(struct qt_model_details *out, const struct qt_model *model);
/* Name of a head tensor that is stored although config.json ties the head to the embedding; NULL if
 * there is none. Both tensors must stay equal. *embedding is set to the embedding's name. The model
 * owns both strings. */
const char *qt_model_tied_head(const struct qt_model *model, const char **embedding);
/* The i-th supported "model_type" of config.json; NULL beyond the end. */
const char *qt_model_type(size_t i);

/* What some families do not support. */
enum qt_use {
    QT_USE_CALIB_FILE,
    QT_USE_W4AX,
    QT_USE_LEARN,
    QT_USE_KV4,
    QT_USE_FUSED, /* the fused runtime: qt_model_outer and qt_model_block give reasons */
    QT_USES
};
/* A supported "model_type" and what its models consist of. */
struct qt_family {
    const char *type, *decoder; /* decoder: the usual family of a multimodal model's decoder */
    const char *attention;      /* "attention", "latent attention", ... */
    bool experts;               /* models have MoE layers */
    bool can[QT_USES];
    bool sometimes_fused; /* without optional experts or state space layers: QT_USE_FUSED */
};
/* Describes qt_model_type(i); false beyond the end. */
bool qt_model_family(struct qt_family *out, size_t i);
/* The part of the model that stands against this use ("mixtures of experts"); NULL: none. */
const char *qt_model_cannot(const struct qt_model *model, enum qt_use use);

/* Number of linear inputs of a decoder layer. */
size_t qt_model_inputs(const struct qt_model *model, size_t layer);
/* The first linear input of the MLP; the mixer has those below it. */
int qt_model_mlp_input(const struct qt_model *model, size_t layer);
/* The number that hooks and qt_layer_run_to give to the input of all routed experts of a layer,
 * before it is divided among them; -1: a layer without experts. It follows the linear inputs. */
int qt_model_experts_input(const struct qt_model *model, size_t layer);
/* True if the linear with this input is the last one of the mixer, or of an MLP without experts. If
 * mixer and MLP read the same input, the whole layer is one sublayer. */
bool qt_model_ends_sublayer(const struct qt_model *model, size_t layer, int input);
/* The expert that has this linear input; -1 if it does not belong to an expert. */
int qt_model_expert(const struct qt_model *model, size_t layer, int input);
/* True if routing weights multiply the inputs of experts (Llama 4), not their outputs: hooks get
 * the multiplied inputs. */
bool qt_model_scales_expert_inputs(const struct qt_model *model);
/* *out = the linears of a decoder layer in order of use, owned by the model; returns their
 * number. */
size_t qt_model_linears(const struct qt_linear **out, const struct qt_model *model, size_t layer);
/* True if the tensor is the weight of a linear of some decoder layer. */
bool qt_model_is_linear(const struct qt_model *model, const char *name);

struct qt_norm {
    const char *weight; /* tensor name */
    size_t n;           /* number of weights */
};
/* *out = the norms of a decoder layer in order of use, owned by the model; returns their number.
 * layer = info.layers: the final norm, if the model has one. */
size_t qt_model_norms(const struct qt_norm **out, const struct qt_model *model, size_t layer);

enum { QT_LAYER_INPUTS = 6 }; /* linear inputs, at most, of a layer without experts */
enum { QT_LAYER_NORMS = 6 };  /* at most, in a layer that can learn */

/* The row (of a set, see struct qt_linear) from which channel c of `input` is computed. This is c
 * except for values under grouped-query attention: several query heads share one KV head. */
size_t qt_model_feed_row(const struct qt_model *model, int input, size_t c);
/* True if a norm directly precedes the input, and no other input, so that per-channel factors can
 * be folded into the weights of the norm. */
bool qt_model_input_is_norm(const struct qt_model *model, int input);
/* If the linear with this input is the last operation of its sublayer before the residual add:
 * the factor by which its output is multiplied there. Otherwise 0. */
float qt_model_output_scale(const struct qt_model *model, size_t layer, int input);

/*
 * Computes the routing weights of m tokens, weights[m][experts] in host memory, from
 * hidden[m][info.hidden] (backend memory, not changed): the hidden states before the sublayer that
 * has the linear input `input`.
 * A chosen expert has a positive weight. An expert that is not chosen has minus the weight that it
 * would have. With a selection bias (ROLE_SELECT_BIAS) it has -max(0, w - (r - s)) instead, where w
 * is the weight and r the biased score of the last chosen expert, and s the biased score of the
 * expert itself. QT_E_INPUT naming the router if its scores are not finite.
 */
struct qt_layer;
int qt_layer_route(float *weights, struct qt_layer *layer, int input, float *hidden, size_t m,
                   size_t seqlen, struct qt_err *err);
/* The tokens that an expert processes. */
struct qt_tokens {
    size_t count;
    uint32_t *row; /* [count] token numbers, ascending */
    float *weight; /* [count] routing weights, above 0 */
};
/* Allocates room for m tokens; freed by qt_tokens_free. */
int qt_tokens_new(struct qt_tokens *out, size_t m, struct qt_err *err);
void qt_tokens_free(struct qt_tokens *t);
/*
 * Lists the tokens that chose the expert, by weights[m][experts] of qt_layer_route, and returns
 * their number. If they are fewer than `least`, others stand in for those that are missing: the
 * same number of tokens that came nearest to choosing the expert, with their own weights (at least
 * 2^-10), and as many of all m tokens, evenly spaced, with a quarter of the mean squared weight of
 * the tokens that chose it. The squared weights of a token that joins for both reasons are added.
 */
size_t qt_tokens_of_expert(struct qt_tokens *out, const float *weights, size_t m, size_t experts,
                           size_t expert, size_t least);
/* Lists the tokens of `all` in [at, at + m), renumbered from 0. */
void qt_tokens_slice(struct qt_tokens *out, const struct qt_tokens *all, size_t at, size_t m);

/* fn is called with a linear input x[m][k] (backend memory) before the linears with this `input`
 * run, after simulated quantization. For an expert, x has the tokens that the expert processes; fn
 * is not called if there are none. */
struct qt_hook {
    void *ctx;
    int (*fn)(void *ctx, int input, const float *x, size_t m, size_t k, struct qt_err *err);
};

/* Working memory of a decoder layer, in FP32 numbers per token, without experts and without that of
 * simulated quantization. */
size_t qt_model_working_floats(const struct qt_model *model);
/* The same of embedding and head (qt_embed_head_open), with all tables, and the largest of these
 * once more, as it is being loaded. */
size_t qt_model_outer_floats(const struct qt_model *model);

/* Loads the weights of one decoder layer into backend memory. model and be must outlive *out. */
int qt_layer_open(struct qt_layer **out, const struct qt_model *model, size_t layer,
                  const struct qt_weights *w, struct qt_backend *be, struct qt_err *err);
void qt_layer_close(struct qt_layer *layer);
/* Loads another decoder layer, or other weights, into the same memory. After a failure the layer
 * may only be closed. */
int qt_layer_load(struct qt_layer *layer, size_t index, const struct qt_weights *w,
                  struct qt_err *err);
/* The same, but copies tensors that are `unchanged` from a layer with the source's weights. */
int qt_layer_load_from(struct qt_layer *layer, const struct qt_layer *source, size_t index,
                       const struct qt_weights *w, struct qt_err *err);
/* The backend memory of a weight of the layer; NULL: it has none of this name. */
float *qt_layer_weight(const struct qt_layer *layer, const char *name);
/* Loads other weights for the linears with this input. All else, simulated quantization included,
 * stays. After a failure the layer may only be closed. */
int qt_layer_load_linears(struct qt_layer *layer, int input, const struct qt_weights *w,
                          struct qt_err *err);
/* Runs the decoder layer on hidden[m][hidden] (backend memory) in place: m / seqlen sequences, m a
 * multiple of seqlen, seqlen <= max_positions. Sequences run in chunks, so that working memory does
 * not grow with m. hook may be NULL. QT_E_INPUT if router scores are not finite; QT_E_USAGE if
 * seqlen is too large. */
int qt_layer_run(struct qt_layer *layer, float *hidden, size_t m, size_t seqlen,
                 const struct qt_hook *hook, struct qt_err *err);
/* Runs only the sublayer that has this linear input: the mixer or the MLP. */
int qt_layer_run_sublayer(struct qt_layer *layer, int input, float *hidden, size_t m, size_t seqlen,
                          const struct qt_hook *hook, struct qt_err *err);
/* True if the sublayer with this linear input does nothing with the input but multiply it by its
 * last linear. */
bool qt_model_can_run_from(const struct qt_model *model, size_t layer, int input);
/* The same as qt_layer_run_sublayer, from this linear input on: x[m][k] is what a hook received.
 * The model can do that at this input. */
int qt_layer_run_from(struct qt_layer *layer, int input, float *hidden, const float *x, size_t m,
                      size_t seqlen, struct qt_err *err);
/* Runs the sublayer up to this linear input: the hook gets this input only, and hidden does not
 * change. The linears with this input and later ones are not used. tokens: the tokens that the
 * expert with this input processes; NULL: those that choose the expert. input may also be that of
 * qt_model_experts_input, with tokens = NULL. */
int qt_layer_run_to(struct qt_layer *layer, int input, float *hidden, size_t m, size_t seqlen,
                    const struct qt_tokens *tokens, const struct qt_hook *hook, struct qt_err *err);

/* Embedding and head, with the final norm, in backend memory. */
struct qt_embed_head;
int qt_embed_head_open(struct qt_embed_head **out, const struct qt_model *model,
                       const struct qt_weights *w, struct qt_backend *be, struct qt_err *err);
void qt_embed_head_close(struct qt_embed_head *e);
/* Replaces the weights of the final norm by w (host memory). The model must have a final norm. */
int qt_head_set_norm(struct qt_embed_head *e, const float *w, struct qt_err *err);
/* hidden[m][hidden] (backend memory) = embedding of ids[m] (host memory). QT_E_INPUT: an id is not
 * in the vocabulary. */
int qt_embed_tokens(struct qt_embed_head *e, float *hidden, const uint32_t *ids, size_t m,
                    size_t seqlen, struct qt_err *err);
/* Opens embedding and head, calls qt_embed_tokens and closes them. */
int qt_model_embed(float *hidden, const struct qt_model *model, const struct qt_weights *w,
                   struct qt_backend *be, const uint32_t *ids, size_t m, size_t seqlen,
                   struct qt_err *err);
/* logits[m][vocab] (backend memory) = head applied to the final norm of hidden[m][state] (backend
 * memory), before the softcap. QT_E_UNSUPPORTED: QT_PREDICTS_NOTHING. */
int qt_head_logits(struct qt_embed_head *e, float *logits, const float *hidden, size_t m,
                   struct qt_err *err);
/* out[m][hidden] (backend memory) = the final norm, if there is one, of hidden[m][state]: the
 * hidden states that an encoder gives to its user. */
int qt_head_hidden(struct qt_embed_head *e, float *out, const float *hidden, size_t m,
                   struct qt_err *err);

/* ---- generation ----------------------------------------------------------------------------- */

/* A model with all its weights in backend memory, and sequences that grow. */
struct qt_decoder;
/* Loads the model; the sequences are empty and have room for `capacity` tokens each. model, w and
 * be must outlive *out. QT_E_USAGE: the model has fewer positions. QT_E_UNSUPPORTED: an encoder. */
int qt_decoder_open(struct qt_decoder **out, const struct qt_model *model,
                    const struct qt_weights *w, struct qt_backend *be, size_t sequences,
                    size_t capacity, const struct qt_log *log, struct qt_err *err);
void qt_decoder_close(struct qt_decoder *d);
/* Appends ids[sequences][tokens] to the sequences. logits[sequences][vocab] (host memory) = those
 * of the next token, after the softcap. After an error the decoder may only be closed. */
int qt_decoder_run(struct qt_decoder *d, float *logits, const uint32_t *ids, size_t tokens,
                   struct qt_err *err);

/* How the next token is chosen. */
struct qt_sampling {
    double temperature; /* 0: the most probable token (ties: lowest id) */
    double top_p; /* of the most probable tokens that have this probability together; 1: all */
    size_t top_k; /* of so many most probable tokens; 0: all */
    uint64_t seed;
};
/* The token with the largest logit (ties: lowest id). */
uint32_t qt_most_probable(const float *logits, size_t vocab);
/* *id = the next token, by logits[vocab] (host memory). The random number depends on seed, stream
 * (the sequence) and index (the token) alone. QT_E_INPUT: a logit is not finite. */
int qt_sample(uint32_t *id, const float *logits, size_t vocab, const struct qt_sampling *how,
              uint64_t stream, uint64_t index, struct qt_err *err);

/* The tokens that end a text. */
enum { QT_MAX_STOPS = 64 };
struct qt_stops {
    uint32_t ids[QT_MAX_STOPS];
    size_t count;
};
/* Reads eos_token_id of generation_config.json, or else of config.json, in `dir`; none is no
 * error. */
int qt_stops_read(struct qt_stops *out, const char *dir, struct qt_err *err);
bool qt_stops_at(const struct qt_stops *stops, uint32_t id);

/* ---- parts ---------------------------------------------------------------------------------- */

/* A linear, norm or table of a decoder: rows [first, first + n) of a tensor of `rows` rows and k
 * columns (k = 0: a vector), and of its bias. Names belong to the model; weight NULL: the model has
 * no such part. */
struct qt_part {
    const char *weight, *bias;
    size_t n, k, first, rows;
    size_t run,
        pitch;   /* run 0: rows [first, first + n) of the tensor. Else n / run times `run` rows,
                          each `pitch` rows behind the last, from `first` on */
    float eps;   /* of a norm */
    bool plus_1; /* 1 is added to the stored weight */
    bool unit;   /* each row of the stored weight is divided by its L2 norm */
};

/* The rotary embedding of a decoder layer: none, the model's, or that of layers with a window. */
enum qt_rope_kind { QT_ROPE_NONE, QT_ROPE_FULL, QT_ROPE_LOCAL, QT_ROPES };

/*
 * The routed experts of a decoder layer. With s = softmax or sigmoid of the router's logits, a
 * token goes to the top_k experts with the largest s + select_bias; the weights of their outputs
 * are scale * s, with `normalize` divided by eps + the sum of the s of these experts.
 */
struct qt_mixture {
    size_t experts, top_k; /* experts 0: none */
    struct qt_part router, select_bias;
    struct qt_part shared_gate; /* the sigmoid of its output multiplies that of the shared expert */
    bool sigmoid, normalize;
    float eps, scale;
};

/* A decoder layer with attention and an MLP: model/graph/internal.h has the drawing. */
struct qt_block {
    struct qt_part attn_in, q, k, v, q_norm, k_norm, sinks, o, attn_out, mlp_in, mlp_out;
    struct qt_part gate, up, down; /* of the dense MLP, or of the shared expert; up.n 0: none */
    struct qt_part input_gate, input_out, input_norm; /* third sublayer: see graph/per_layer.c */
    struct qt_part scale;                             /* one factor of the output of the layer */
    struct qt_mixture mixture;
    size_t kv_heads, head_dim;
    size_t keys_of; /* the layer whose keys and values these heads attend to: itself, or an earlier
                       one, without k and v */
    size_t window;  /* 0: none */
    enum qt_rope_kind rope;
    bool keys_are_values; /* without v: values are the outputs of k, before its norm */
};
/* QT_E_UNSUPPORTED: the layer has other parts. */
int qt_model_block(struct qt_block *out, const struct qt_model *model, size_t layer,
                   struct qt_err *err);
/* Gate, up and down of a routed expert of a layer that qt_model_block describes. */
void qt_model_expert_parts(struct qt_part out[3], const struct qt_model *model, size_t layer,
                           size_t expert);

/* The parts outside decoder layers, and what all layers share. */
struct qt_outer {
    struct qt_part embed, positions, embed_norm, final_norm;
    struct qt_part project_in, project_out; /* between embedding or head and hidden states */
    struct qt_part head;                    /* the embedding if tied */
    /* Inputs of single layers (graph/per_layer.c): table, projection, norm; weight NULL: none.
     * Tokens behind the end of the table have the first row. */
    struct qt_part inputs, inputs_project, inputs_norm;
    size_t position_offset;
    enum qt_norm_kind norm;
    bool norm_after; /* ATTN_IN and MLP_IN follow the residual adds */
    bool parallel;   /* mixer and MLP both read the input of the layer; without MLP_IN, the output
                      of ATTN_IN */
    bool norm_all_heads, norm_last; /* of Q_NORM and K_NORM: all heads together; after rope */
    bool value_norm;                /* values pass an RMS norm without weights, with `value_eps` */
    float value_eps;
    float clip;       /* queries, keys and values are clipped to [-clip, clip]; 0: not */
    bool interleaved; /* the rotary embedding pairs channels 2i and 2i + 1 */
};
/* QT_E_UNSUPPORTED: the embedding has a projection. */
int qt_model_outer(struct qt_outer *out, const struct qt_model *model, struct qt_err *err);

/* Cosines and sines [positions][rotary / 2] for sequences of at most so many positions, with
 * rope_scale; queries: with the factors of queries that depend on the position, if the model has
 * any. Returns `rotary`, the number of rotated channels of a head, or 0 if there is no such table;
 * cos_out may be NULL, to ask. */
size_t qt_model_rope(float *cos_out, float *sin_out, const struct qt_model *model,
                     enum qt_rope_kind kind, bool queries, size_t positions);

/* Scales each row w[rows][columns] to unit length, as the member `unit` of a part demands. */
void qt_model_unit_rows(float *w, size_t rows, size_t columns);

/* slopes[heads]: that of head h times the position of a key is added to the score (ALiBi). If
 * *factor is not 0, the product is rounded to BF16 and multiplied by it. False: the model has no
 * ALiBi. */
bool qt_model_slopes(float *slopes, float *factor, const struct qt_model *model);

/* ---- backward ------------------------------------------------------------------------------- */

/* Buffers to which dL/dW of a layer's parameters are added (backend memory, shaped like the
 * parameters), in the order of qt_model_linears and qt_model_norms. NULL: not computed. */
struct qt_layer_grads {
    float **linear; /* [qt_model_linears of the layer] */
    /* Linears whose scales have a gradient instead, the function decode_grad of the backend: shaped
     * like the scales. NULL: none; else [linears], NULL for others. */
    const struct qt_coded **coded;
    float *norm[QT_LAYER_NORMS];
};
/* out[m][hidden] = output of the layer for hidden[m][hidden]. Stores what the backward pass needs
 * in kept[qt_layer_kept_floats], backend memory. */
int qt_layer_run_kept(struct qt_layer *layer, float *out, float *kept, const float *hidden,
                      size_t m, size_t seqlen, struct qt_err *err);
/* 0: the model does not support it (experts). */
size_t qt_layer_kept_floats(const struct qt_layer *layer, size_t m, size_t seqlen);
/* Replaces grad[m][hidden], dL/d output of the layer, by dL/d input. hidden[m][hidden] is the
 * layer's input (unchanged); kept is from qt_layer_run_kept on it with the same weights and sizes,
 * and is used up. kept = NULL: the forward pass of each chunk is recomputed, so that callers store
 * only hidden states between layers. Biases get no gradient. QT_E_UNSUPPORTED: a model that does
 * not support QT_USE_LEARN. */
int qt_layer_grad(struct qt_layer *layer, float *grad, const struct qt_layer_grads *add,
                  const float *hidden, float *kept, size_t m, size_t seqlen, struct qt_err *err);

/*
 * The loss L is `weight` times a sum over positions:
 *   with ref:      KL(reference || this), reference logits = head of ref on ref_hidden[m][hidden]
 *   ref = NULL:    -ln p(target), over positions with targets[i] != QT_NO_TARGET (host memory)
 */
struct qt_objective {
    struct qt_embed_head *ref;
    const float *ref_hidden;
    const uint32_t *targets;
    float weight;
};
/* For hidden[m][hidden], the output of the last layer: sets losses[m] (host memory) to the loss of
 * each position without the factor `weight`, sets grad[m][hidden] to dL/d hidden, and adds dL/dw of
 * the final norm to norm. grad and norm may be NULL: not computed. */
int qt_head_grad(struct qt_embed_head *e, double *losses, float *grad, float *norm,
                 const float *hidden, const struct qt_objective *objective, size_t m,
                 struct qt_err *err);

#endif
