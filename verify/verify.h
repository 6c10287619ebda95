/*
 * verify: checks containers, and measures accuracy and speed.
 *
 *   container/structure.c  CRCs, sections, finite values, repacking, error against the source
 *   eval/eval.c            perplexity and divergence from a reference model
 *   eval/gate.c            --gate expressions over named figures
 *   gpu/device.c           the fused GPU kernels on a container: matmul.c, w4ax.c, moe.c, kv.c
 *   gpu/check.c            what these share; reference.c: reference products of the CPU
 *   gpu/weight*.c          which kernel takes which packed matrix; experts.c: layers of experts
 *   gpu/time.c             copies in GPU memory, and times
 *   runtime/               decoding whole models on the fused kernels
 *   bench/                 speed of the fused kernels, and of whole models
 *   budget/                schemes of tensors for a given size
 *   report/                an HTML page from containers and saved results
 */
#ifndef QT_VERIFY_VERIFY_H
#define QT_VERIFY_VERIFY_H

#include "base/base.h"
#include "calib/calib.h"
#include "formats/formats.h"
#include "kernels/kernels.h"
#include "pack/pack.h"

/* ---- container check ------------------------------------------------------------------------ */

struct qt_verify_tensor {
    const char *name, *spec; /* owned by the container */
    size_t n, k;
    double bpw;
    bool compared; /* a source was given: `error` is filled */
    struct qt_error error;
};

struct qt_verify_report {
    struct qt_verify_tensor *tensors;
    size_t count;
    size_t copied;         /* tensors stored unchanged */
    size_t tuned;          /* norms with learned values */
    const char *nonfinite; /* first of the copied tensors with values that are not finite; NULL */
    size_t nonfinite_tensors;  /* number of copied tensors with such values */
    uint64_t nonfinite_values; /* number of such values */
    double bpw;                /* bits per weight of all quantized tensors */
    uint64_t bytes;            /* size of all stored tensors */
};

/*
 * Checks the CRC of every stored tensor, the shapes and values of sections, that decoded weights
 * are finite, that packing the codes again gives the stored bytes, the scales of a KV cache, that
 * w4ax tensors that share an input agree, and that only norms are marked as tuned. With a source it
 * also measures the error per tensor, compares copied tensors byte for byte, and compares the CRC
 * of each source tensor. The ranks of comm share the tensors; all call it. Copied values that are
 * not finite are counted, with a warning. source, comm and log may be NULL. QT_E_INPUT at the first
 * violation, with the name of the tensor. The caller frees *out.
 */
int qt_verify(struct qt_verify_report *out, const struct qt_container *c,
              const struct qt_ckpt *source, struct qt_comm *comm, const struct qt_log *log,
              struct qt_err *err);
void qt_verify_free(struct qt_verify_report *report);

/* ---- eval ----------------------------------------------------------------------------------- */

enum { QT_EVAL_SEQLEN = 512 }; /* default of qt_eval_options.seqlen */

/* Quantiles of the divergence over positions that eval finds. */
enum { QT_KLD_QUANTILES = 9 };
extern const double qt_kld_quantiles[QT_KLD_QUANTILES];

struct qt_eval_options {
    size_t seqlen;        /* tokens of a window; 0 = 512, or the models' maximum if smaller */
    size_t windows;       /* maximum number of windows; 0 = all whole windows of the data */
    size_t batch_bytes;   /* memory for hidden states; 0: 1 GiB, or a quarter of a GPU */
    bool logits;          /* keep the logits of the first window; with several ranks in rank 0 */
    struct qt_comm *comm; /* ranks that share the windows; all call qt_eval. NULL: one process */
    /* Not NULL: the model runs on this GPU's fused kernels (struct qt_runtime), the reference on
     * the backend. container: that of the model's weights; NULL: they are those of a checkpoint. */
    struct qt_gpu *gpu;
    const struct qt_container *container;
    const struct qt_log *log;
};

struct qt_eval_report {
    size_t windows, seqlen, vocab;
    float *logits; /* [seqlen][vocab] of the first window, after the soft cap; freed by the caller
                      with qt_free; NULL unless options.logits */
    bool masked;   /* the model predicts masked tokens: see qt_eval */
    uint64_t scored_tokens; /* windows * (seqlen - 1), or windows * floor(seqlen / 7) masked ones */
    bool not_finite;        /* qt_eval failed because a logit is NaN or infinity */
    double nll, ppl;        /* mean of -ln p(token), and its exponential, which may be infinite */
    bool has_ref;           /* a reference was given: the fields below are filled */
    double ref_nll, ref_ppl, ppl_ratio;
    /* Standard errors over windows of ppl, ppl_ratio and kld_mean; NaN for one window. */
    double ppl_se, ppl_ratio_se, kld_se;
    double kld_mean, kld_median, kld_p999; /* nats, over all positions of all windows */
    double kld_quantile[QT_KLD_QUANTILES]; /* at qt_kld_quantiles */
    double same_top; /* fraction of positions with the same most probable token */
    /* The model predicts nothing, and hidden states are compared: see qt_eval. Then hidden_error
     * and hidden_error_se are filled (else NaN), and all figures of probabilities are NaN. */
    bool hidden;
    double hidden_error, hidden_error_se;
    double rms_dp; /* root mean square of p(target) - p_ref(target) over scored positions */
};

/*
 * Computes the perplexity of the model with weights `w` on ids[count]. The ids are cut into windows
 * of seqlen tokens without overlap; tokens 1..seqlen-1 of each window are scored; the remainder is
 * dropped. With ref (may be NULL) both models run side by side, with one decoder layer of each in
 * memory, and the distributions are compared.
 *
 * Encoders (QT_PREDICTS_MASKED): tokens 6, 13, 20, ... of each window are replaced by the mask
 * token of the tokenizer in w->dir, and only these positions are scored and compared, each with its
 * own token: ppl is the exponential of the masked-LM loss.
 *
 * Encoders without a head (QT_PREDICTS_NOTHING): hidden_error = norm(h - h_ref) / norm(h_ref) of
 * the final hidden states h of all positions of all windows (Frobenius norms), and its standard
 * error is that of the mean of this error over windows.
 *
 * QT_E_UNSUPPORTED: unknown architecture; QT_PREDICTS_NOTHING without ref, or with options.logits.
 * QT_E_USAGE: windows of less than 2 tokens (7 with masked ones), or longer than a model's maximum.
 * QT_E_INPUT: too few ids, ids outside the vocabulary, different vocabularies or logit soft caps of
 * the two models, logits that are not finite.
 */
int qt_eval(struct qt_eval_report *out, const struct qt_weights *w, const struct qt_weights *ref,
            const uint32_t *ids, size_t count, const struct qt_eval_options *opt,
            struct qt_backend *be, struct qt_err *err);

/* ---- fused kernels -------------------------------------------------------------------------- */

/* A combination of scheme and layout that has a fused kernel. */
struct qt_gpu_kernel {
    const char *scheme, *layout;
    bool w4ax;                   /* true: a kernel of qtool_w4ax.h */
    enum qtool_matmul_kind kind; /* otherwise: the kind of qtool_kernels.h */
};
/* Returns entry i of the table of kernels, NULL past the end. */
const struct qt_gpu_kernel *qt_gpu_kernel_at(size_t i);

/* Fills the kernel's descriptor of p from the device addresses section[p->nsections] of its
 * sections; p may be without data. QT_E_UNSUPPORTED: no kernel for this scheme and layout. */
int qt_gpu_weight(struct qtool_matmul_weight *out, const struct qt_packed *p,
                  const void *const *section, struct qt_err *err);
/* Same for a w4ax matrix. Leaves out->blocks NULL: the caller sets it from the input. */
int qt_gpu_w4ax_weight(struct qtool_w4ax_weight *out, const struct qt_packed *p,
                       const void *const *section, struct qt_err *err);

/* Numbers of tokens of the timed products. */
enum { QT_DEVICE_TIMES = 3 };
extern const size_t qt_device_times[QT_DEVICE_TIMES];

struct qt_device_tensor {
    const char *name, *spec; /* owned by the container; `name` of a layer of experts is `layer` */
    char *layer;             /* or NULL */
    size_t n, k;
    char missing[200]; /* why no kernel takes the tensor; "": the fields below are filled */
    size_t runs;       /* products that were checked */
    size_t faults;     /* products and other checks that failed */
    char fault[200];   /* text of the first fault */
    double error[2];   /* FP16, BF16: largest norm(y - reference) / norm(reference) */
    /* Times with FP16 activations; w4ax: without quantizing them. NaN: not measured (cublas_us
     * without cuBLAS; both for a cache). */
    double us[QT_DEVICE_TIMES], cublas_us[QT_DEVICE_TIMES];
};

struct qt_device_report {
    struct qt_device_tensor *tensors;
    size_t count, missing, faults; /* missing: tensors without a kernel; faults: sum */
};

/*
 * Runs every quantized tensor of a container through its fused kernel, with several numbers of
 * tokens and random and heavy-tailed activations in FP16 and BF16, and compares with products of
 * the decoded weights on the CPU (FP32; some rows in FP64). A product is a fault if
 *
 *   - its relative error (of the whole product) exceeds that of rounding the reference to the
 *     output type by more than 2.3e-5 (BF16: 8 times that);
 *   - one value differs by more than half a unit in the last place of the output type plus 2e-4
 *     (BF16: 8 times that) of the RMS of the token's outputs;
 *   - a second run gives other bits or, with batch_invariant, another number of tokens does;
 *   - the kernel wrote outside the output or the workspace (both are filled with NaN before, except
 *     for the zeroed part of the workspace).
 *
 * Dequantized weights must equal the decoded ones bit for bit.
 *
 * w4ax: activations that the GPU quantizes must equal those of qt_act_apply_stored bit for bit;
 * products of these codes must match up to 1e-6 of the sum of absolute terms, and output rounding.
 *
 * Layers of experts (one entry each, after those of all tensors, with n and k of a gate matrix):
 * tokens pass the grouped products of the layer; the relative error must be at most 8e-4 (BF16:
 * 5e-3), that of each token four times that. Inputs of w4ax experts are quantized in the reference,
 * too; values that are rounded otherwise may have another code, so errors may be eight times as
 * large. Layers without grouped products (experts of several schemes) have no entry; the log says
 * why.
 *
 * KV cache (one entry at the end of out->tensors, with the numbers of heads and channels of the
 * model): appended tokens must equal those of qt_kv_apply bit for bit; attention must match FP64
 * with a relative error of 1.5e-3 (BF16: 3e-3).
 *
 * Faults are counted in the report; the function still returns QT_OK. cpu: the CPU backend. Ranks
 * of comm (NULL: one process) share the entries, and all have the report. log may be NULL. The
 * caller frees *out.
 */
int qt_verify_device(struct qt_device_report *out, const struct qt_container *c, struct qt_gpu *gpu,
                     struct qt_backend *cpu, struct qt_comm *comm, const struct qt_log *log,
                     struct qt_err *err);
void qt_device_free(struct qt_device_report *report);

/* ---- bench ---------------------------------------------------------------------------------- */

struct qt_bench_shape {
    const char *name; /* "llama3-8b:o", or NULL */
    size_t n, k;
};

/* Attention of one query token per sequence over a KV cache. */
struct qt_bench_cache {
    const char *name; /* "llama3-8b:attention", or NULL */
    size_t heads, kv_heads, head_dim;
};

struct qt_bench_options {
    const struct qt_spec *specs;
    const struct qt_bench_shape *shapes;
    const struct qt_bench_cache *caches;
    const struct qt_bench_moe *moe;
    const size_t *m;       /* numbers of tokens; for caches, of sequences */
    const size_t *lengths; /* tokens of a sequence in the cache */
    size_t nspecs, nshapes, ncaches, nmoe, nm, nlengths;
    struct qtool_matmul_options matmul;
    const struct qt_log *log;
};

struct qt_bench_row {
    const struct qt_bench_shape *shape; /* into the options */
    const struct qt_spec *spec;         /* NULL: cuBLAS FP16 */
    size_t m, bytes;                    /* bytes: packed weights */
    double us, floor_us, cublas_us;     /* NaN: not measured */
    double total_us; /* w4ax: quantizing X and the product (`us`: the product); else NaN */
    struct qtool_matmul_config config; /* configuration of the fused kernel: */
    struct qtool_w4ax_config w4ax;     /* one of these two */
    char why[200];                     /* why the kernel refused the shape; "": measured */
};

struct qt_bench_cache_row {
    const struct qt_bench_cache *shape; /* into the options */
    enum qtool_kv_format format;
    bool paged; /* random pages of 64 tokens; otherwise contiguous */
    size_t batch, length, bytes;
    size_t split_tokens;         /* tokens of a sequence per thread block (split-KV) */
    double us, floor_us, f16_us; /* f16_us: contiguous FP16 cache; NaN: not measured */
    char why[200];               /* why the kernel refused the shape; "": measured */
};

/* A layer of gated experts. */
struct qt_bench_moe {
    char name[64]; /* "qwen3-30b", or "" */
    size_t experts, topk, hidden, inner;
};

struct qt_bench_moe_row {
    const struct qt_bench_moe *shape; /* into the options */
    const struct qt_spec *spec;
    size_t m;                 /* tokens */
    size_t touched, most;     /* experts that are read; most tokens of one of them */
    size_t bytes;             /* packed weights that are read */
    double us, floor_us;      /* NaN: not measured */
    double loop_us, batch_us; /* cuBLAS FP16, a product per expert; a batch, padded to `most` */
    char why[200];            /* why the kernels refused the layer; "": measured */
};

struct qt_bench_report {
    double copy_gbs; /* GB/s, read + written: copies of 512 MiB (less on a small GPU) */
    double read_gbs; /* GB/s: reads of 1 GiB (less on a small GPU) */
    struct qt_bench_row *rows;
    size_t count;
    struct qt_bench_cache_row *caches;
    size_t ncaches;
    struct qt_bench_moe_row *moe;
    size_t nmoe;
};

/* Packs random weights [n][k] by the scheme's fastest method. If n is large, 256 rows are quantized
 * and repeated; a w4ax result then has only the sections that products read. */
int qt_bench_weights(struct qt_packed *out, const struct qt_spec *spec, size_t n, size_t k,
                     struct qt_err *err);

/*
 * Times the fused kernels on random weights: for each shape cuBLAS at each m, then each scheme and
 * its read floor. Then attention: for each m and length an FP16 cache, a 4-bit cache, and a paged
 * 4-bit cache. Then layers of experts: every token chooses different experts at random; cuBLAS
 * computes the products of the same routing only. Weights and caches are cold in L2, X and Y are
 * not. Times are medians of launches in CUDA graphs. The caller frees *out.
 */
int qt_bench(struct qt_bench_report *out, struct qt_gpu *gpu, const struct qt_bench_options *opt,
             struct qt_err *err);
void qt_bench_free(struct qt_bench_report *report);

/* ---- whole models --------------------------------------------------------------------------- */

/*
 * A decoder in GPU memory that runs on the kernels of libqtool_kernels: packed linears and heads
 * through the fused products, all other matrices as FP16 through cuBLAS. The embedding, and a head
 * in w4ax, are FP16 whatever the container has. Hidden states are FP32, activations FP16, sums
 * FP32. From the second decode step on, a CUDA graph is replayed.
 *
 * Supported are decoder layers with attention and a dense MLP or, in containers, experts
 * (qt_model_block).
 */
struct qt_runtime;

struct qt_runtime_options {
    size_t sequences; /* 1 to 1024 */
    size_t capacity;  /* tokens of a sequence, at most */
    size_t prompt;    /* tokens of a prompt, at most */
    /* 4-bit KV cache; keys have scales per channel and 64 tokens. Within a prompt, attention reads
     * the keys and values before quantization. */
    bool kv4;
    /* How tokens are chosen; all 0: the most probable. */
    struct qt_sampling sampling;
    bool eager; /* without graphs */
    bool plain; /* without programmatic dependent launches */
    /* The logits of a sequence have the same bits for every number of sequences, if `capacity` and
     * the tokens of the prompt are the same. Slower; not for w4ax and mixtures. */
    bool batch_invariant;
    const struct qt_log *log;
};

/* Kinds of kernels of a step. HEADS: bias, norm and rotary embedding of attention heads, and the
 * append to the cache. */
enum qt_runtime_share {
    QT_RUNTIME_PRODUCTS,
    QT_RUNTIME_HEAD,
    QT_RUNTIME_ATTENTION,
    QT_RUNTIME_HEADS,
    QT_RUNTIME_NORMS,
    QT_RUNTIME_ACTIVATION,
    QT_RUNTIME_OTHER,
    QT_RUNTIME_SHARES
};

/* Loads a model. model, w and container are used during the call only; container: that of w, or
 * NULL for a checkpoint. QT_E_UNSUPPORTED with the reason; QT_E_USAGE: bad sizes, or the model has
 * fewer positions. */
int qt_runtime_open(struct qt_runtime **out, struct qt_gpu *gpu, const struct qt_model *model,
                    const struct qt_weights *w, const struct qt_container *container,
                    const struct qt_runtime_options *opt, struct qt_err *err);
void qt_runtime_close(struct qt_runtime *rt);
/* Changes the number of sequences; they are empty then. */
int qt_runtime_resize(struct qt_runtime *rt, size_t sequences, struct qt_err *err);
/* Device memory in use. */
size_t qt_runtime_bytes(const struct qt_runtime *rt);
/* Starts all sequences anew with ids[sequences][tokens], and chooses the next tokens.
 * *seconds (may be NULL) = time of the kernels. */
int qt_runtime_prompt(struct qt_runtime *rt, const uint32_t *ids, size_t tokens, double *seconds,
                      struct qt_err *err);
/* Enqueues the step that appends the chosen tokens and chooses the next ones. QT_E_USAGE: the cache
 * is full, or there was no prompt. */
int qt_runtime_step(struct qt_runtime *rt, struct qt_err *err);
/* Waits. ids[sequences] = the chosen tokens; logits[sequences][vocab] = what they were chosen from,
 * or NULL. QT_E_INPUT: a logit was not finite. */
int qt_runtime_read(struct qt_runtime *rt, uint32_t *ids, float *logits, struct qt_err *err);
/* Replaces the chosen tokens. */
int qt_runtime_put(struct qt_runtime *rt, const uint32_t *ids, struct qt_err *err);
/* Runs ids[tokens] in sequence 0 and passes the logits of all positions, before the softcap, to
 * `use`, some positions at a time. Afterwards a prompt must come before steps. */
int qt_runtime_all_logits(struct qt_runtime *rt, const uint32_t *ids, size_t tokens,
                          int (*use)(void *ctx, const float *logits, size_t position, size_t m,
                                     struct qt_err *err),
                          void *ctx, struct qt_err *err);

/* The runtime against struct qt_decoder on the CPU. */
struct qt_model_check {
    size_t tokens, equal; /* choices, and those that are equal */
    size_t faults;        /* choices with an error above QT_MODEL_ERROR */
    char fault[200];      /* text of the first */
    /* Relative to the range of the reference's logits (largest - smallest): the largest difference
     * of a logit; the largest difference between the reference's logits of the tokens that both
     * chose, which is at most twice as large. */
    double error, gap;
    /* If activations are quantized, errors are no faults, but one is that
     * rms > QT_MODEL_ROUNDED * max(rms_rounded, QT_MODEL_RMS): root mean squares over all logits of
     * the difference from the reference, relative to the range, of the runtime and of the CPU with
     * linear inputs rounded to FP16. */
    double rms, rms_rounded;
};
#define QT_MODEL_ERROR   0.02
#define QT_MODEL_ROUNDED 2
#define QT_MODEL_RMS     1e-3
/* Runs a prompt of 16 random tokens and 64 greedy steps of the container's model. Both get the
 * tokens that the reference chooses. Errors of qt_runtime_open. */
int qt_verify_model(struct qt_model_check *out, const struct qt_container *c, struct qt_gpu *gpu,
                    struct qt_backend *cpu, const struct qt_log *log, struct qt_err *err);

/* A Llama model of random weights, for measurements. */
struct qt_runtime_shape {
    const char *name; /* "8b" */
    size_t layers, hidden, width, heads, kv_heads, head_dim, vocab;
    size_t experts, top_k; /* experts 0: dense; `width` is that of an expert */
};
/* Entry i of the shapes with names; NULL past the end. */
const struct qt_runtime_shape *qt_runtime_shape_at(size_t i);
/* spec: scheme of the linears, head: of the head, not w4ax; NULL: FP16. The decoder layers have
 * equal weights in memory of their own. */
int qt_runtime_open_random(struct qt_runtime **out, struct qt_gpu *gpu,
                           const struct qt_runtime_shape *shape, const struct qt_spec *spec,
                           const struct qt_spec *head, const struct qt_runtime_options *opt,
                           struct qt_err *err);

enum { QT_BENCH_BATCHES = 16 };

struct qt_bench_model_options {
    /* A shape with random weights, or a model: FP16, and the container if there is one. */
    const struct qt_runtime_shape *shape;
    const struct qt_model *model;
    const struct qt_weights *weights;
    const struct qt_container *container;
    const struct qt_spec *specs; /* with a shape: after FP16 */
    size_t nspecs;
    const struct qt_spec *head; /* with a shape: of all rows but FP16; NULL: FP16 */
    const size_t *batches;
    size_t nbatches;
    size_t prompt, tokens; /* of each sequence: prefilled, then decoded and timed */
    bool kv4;              /* for all rows but FP16 */
    bool batch_invariant;
    const struct qt_log *log;
};

struct qt_bench_model_row {
    const struct qt_spec *spec; /* into the options; NULL: FP16, or the container */
    bool fp16;
    size_t batch;
    size_t bytes;                 /* device memory: weights, caches, activations */
    size_t prompts;               /* that ran: as many as run at a time */
    double prompt_seconds;        /* of these together */
    double seconds;               /* of all decode steps */
    double watts;                 /* of the board during decode steps; NaN: not measured */
    double us[QT_RUNTIME_SHARES]; /* kernels of one kind in a step, timed without the others */
    char why[200];                /* why there are no figures; "": measured */
};

struct qt_bench_model_report {
    struct qt_bench_model_row *rows;
    size_t count;
};

/* Times prefill and decode steps of FP16 and of each scheme at each batch size. Rows that do not
 * fit in memory, or whose scheme has no kernel, have a reason. The caller frees *out. */
int qt_bench_model(struct qt_bench_model_report *out, struct qt_gpu *gpu,
                   const struct qt_bench_model_options *opt, struct qt_err *err);
void qt_bench_model_free(struct qt_bench_model_report *report);

/* ---- schemes for a size --------------------------------------------------------------------- */

/*
 * Chooses a scheme for every linear weight, so that the divergence from the original is small and
 * a size is kept: a multiple-choice knapsack over groups of tensors. Linears that share an input
 * (q, k and v; gate and up) and all experts of a decoder layer are one group and get one scheme.
 *
 * With data, linears are rounded with all choices under the Hessians of their inputs
 * (qt_candidates). The KL divergence of the model in which only one group is quantized, with one of
 * the choices, the base, is measured. It is assumed to be proportional to the errors under other
 * choices, and the divergences of groups are added (the linearity theorem of HIGGS, arXiv
 * 2411.17525). Each kind of groups (all v_proj, for example) has factors for what the linears
 * behind it compensate for, estimated from models that are quantized as qt_quantize does it. The
 * result is measured and corrects the factors, a few times; the best result is taken, or the
 * largest choice that fits alone if that is better. Choices with another method than gptq are
 * rounded without calibration.
 *
 * Without data, the error of a group is the sum over its tensors of ||W - Q||^2 / ||W||^2, times
 * the number of weights: every weight counts the same.
 */
struct qt_budget_options {
    const char *const *choices; /* scheme texts */
    size_t nchoices;
    double bpw;     /* bits per quantized weight, with scales, tables and padding; or */
    uint64_t bytes; /* size of all tensors; the other one is 0 */
    bool untied;    /* linears that share an input need not have one scheme */
    /* `scheme` is not used. Tensors that rules name take no part, unless their scheme is
     * QT_BUDGET_CHOICE: then they do, whether linears of decoder layers or not. */
    struct qt_plan_options plan;
    const struct qt_calibration *data; /* windows; NULL: nothing is measured */
    /* Some of these windows: divergences of models with one quantized group are measured on the
     * first, those of quantized models on the second. */
    struct qt_calibration measured, checked;
    /* A file with the measurements, read if it exists, written after each of them; NULL: none. */
    const char *state;
    const struct qt_log *log;
    bool (*interrupted)(void); /* polled between measurements; may be NULL */
};

#define QT_BUDGET_CHOICE "choice"

struct qt_budget {
    char *scheme;          /* of most weights; owned, as all text here */
    struct qt_rule *rules; /* for the others */
    size_t nrules, groups;
    double bpw;                   /* of all quantized tensors */
    uint64_t bytes;               /* of all tensors */
    double kld;                   /* predicted; NaN: nothing was measured */
    double measured, measured_se; /* with all chosen schemes, and its standard error; or NaN */
};

/* The caller frees *out with qt_budget_free. QT_E_USAGE: bad choices, the smallest of them is
 * larger than the budget, or `state` belongs to another model or other windows. QT_E_UNSUPPORTED: a
 * model that cannot be run, with `data`; no tensor to choose for. QT_E_INTERRUPTED; errors of
 * qt_plan_new and qt_eval. */
int qt_budget_choose(struct qt_budget *out, const struct qt_ckpt *ckpt,
                     const struct qt_budget_options *opt, struct qt_err *err);
void qt_budget_free(struct qt_budget *b);

/* ---- report --------------------------------------------------------------------------------- */

/* A page about containers and what was measured on them. Nothing is measured for it. */
struct qt_report;
int qt_report_new(struct qt_report **out, struct qt_err *err);
/*
 * Adds an input, whatever it is by its content: a container, a calibration file, or a document that
 * eval, verify or bench printed with --json. Documents belong to the container whose manifest has
 * the CRC-32 that they name. QT_E_INPUT for anything else. `path` must outlive the report.
 */
int qt_report_add(struct qt_report *r, const char *path, struct qt_err *err);
/*
 * Makes the page, *text[*size], freed with qt_free: one HTML file that loads nothing, with charts,
 * a table of every number, and all tables as JSON in the element with the id "data". The same
 * inputs and order give the same bytes. Text from the inputs is escaped. sections, if not NULL,
 * becomes an array of the ids of its sections (json_decref). QT_E_INPUT: a calibration file is
 * damaged.
 */
int qt_report_html(char **text, size_t *size, json_t **sections, const struct qt_report *r,
                   struct qt_err *err);
void qt_report_free(struct qt_report *r);

/* ---- gates ---------------------------------------------------------------------------------- */

struct qt_figure {
    const char *name; /* "ppl", "kld_mean", "bpw", ... */
    double value;
};

/* Figures of each tensor. */
struct qt_tensor_figures {
    const char *const *tensors; /* names; NULL: not known yet, `figures` has one row of names */
    size_t count;
    const struct qt_figure *figures; /* [count][per_tensor] */
    size_t per_tensor;
};

/* A condition of a gate and what was measured. */
struct qt_gate_result {
    char text[128]; /* "ppl_ratio <= 1.02", cut if it is longer */
    bool passed;
    double value; /* of the figure; of NAME[REGEX]: of the tensor that is nearest to failing */
};
struct qt_gate_results {
    struct qt_gate_result *list; /* freed by the caller with qt_free */
    size_t count;
};

/*
 * Evaluates the conditions of expr: comma-separated NAME<=X, NAME>=X, NAME<X or NAME>X over
 * figures[n], or NAME[REGEX]<=X over the figures of all tensors whose name matches the regular
 * expression (tensors may be NULL). X is decimal. QT_E_USAGE: bad syntax, unknown name, or no
 * tensor matches. QT_E_GATE: a condition fails; the message has each failed condition with its
 * value and tensor, as many as fit, and the number of the others. qt_gate_run also lists all
 * conditions in *out, unless an error other than QT_E_GATE occurs.
 */
int qt_gate_check(const char *expr, const struct qt_figure *figures, size_t n,
                  const struct qt_tensor_figures *tensors, struct qt_err *err);
int qt_gate_run(struct qt_gate_results *out, const char *expr, const struct qt_figure *figures,
                size_t n, const struct qt_tensor_figures *tensors, struct qt_err *err);
/* Returns true if expr has a condition NAME<=X (without [REGEX]) on that figure. */
bool qt_gate_names(const char *expr, const char *figure);

#endif
