/*
 * pack: quantization SCHEMES - what codes mean, how their parameters are found, where bits go -
 * and the driver that turns a checkpoint into a container.
 *
 *   schemes.c    the table of schemes; scheme text ("nf4:g=64,method=search") <-> struct qt_spec
 *   fpx.c        minifloats ExMy with a scale per output row        (FP6-LLM)
 *   lut.c        look-up tables in groups: NormalFloat and learned  (FLUTE)
 *   int.c        whole numbers in groups or rows, symmetric or with zero points
 *   codebook.c   what these three share: value = scale * table[code]; search, rounding, packing;
 *                codebook_solve.c: with a Hessian
 *   mix24*.c     2 and 4 bits in one matrix, 16-bit outliers apart   (mix24.h lists them)
 *   frag.c       codes <-> packed planes in the layout of layout_frag.h
 *   rowops.c     vector loops over rows, built per instruction set, bit-identical on all;
 *                rowops_select.c: which of these
 *   w4ax.c       INT4 weights for activations of 4 and 8 bits in blocks   (COMET)
 *   act.c        the activations of w4ax: order, precision, rounding
 *   act_plan.c   the plan for all of them, by act_order.c (which channels go together), act_error.c
 *                (what rounding costs) and act_budget.c (which blocks get 8 bits); kept
 *                by act_saved.c for a run that goes on
 *   kv.c         KV caches of 4 bits: rounding, and what a container holds for them
 *   kv_calibrate.c  the scales of their keys, from a run of the quantized model; kv_fit.c: of one
 *                channel
 *   arrange.c    matrices whose rows and columns are stored in another order
 *   sections.c   the parts of a packed matrix
 *   packed.c     one matrix: quantize, decode, errors; strips of 16 rows in parallel
 *   name_regex.c regular expressions over tensor names
 *   plan.c       which tensor gets which scheme; sizes; refusals
 *   quantize.c   the driver: checkpoint -> plan -> container
 *   items.c      its tensors: quantized or copied, stored, journaled, read back
 *   resume.c     whether what an earlier run has made is of use to it
 *   blocks.c     the calibrated part of it, decoder block by decoder block
 *   sequential.c the hidden states of the calibration windows on their way through the decoder
 *   learn.c      scales and norms tuned by gradient descent through the model, after blocks.c;
 *                learn_*.c: parameters, losses, steps
 *   report.c     qtool-report.json
 *   weights.c    a container as a source of weights for calib's forward pass
 */
#ifndef QT_PACK_PACK_H
#define QT_PACK_PACK_H

#include "base/base.h"
#include "calib/calib.h"
#include "formats/formats.h"
#include "hessian/hessian.h"

/* rowops: what QTOOL_ISA may name. NULL-terminated. */
extern const char *const qt_isa_names[];

/* ---- schemes and specs ---------------------------------------------------------------------- */

enum { QT_MAX_PARAMS = 16, QT_SPEC_TEXT = 160 };

/* A parameter of a scheme: integer, real, one of named choices (then its value is the index), or a
 * flag, 0 or 1, which is left out of the canonical text while it is 0. */
struct qt_param {
    const char *key;
    enum { QT_PARAM_INT, QT_PARAM_REAL, QT_PARAM_CHOICE, QT_PARAM_FLAG } type;
    double initial, min, max;
    const char *const *choices; /* NULL-terminated, QT_PARAM_CHOICE only */
    const char *help;
};

/* A name users type: a scheme with some parameters fixed. */
struct qt_preset {
    const char *name;   /* "nf4" */
    const char *values; /* "bits=4,table=nf": parameters fixed or defaulted by the name */
    const char *help;
};

struct qt_scheme;
struct qt_arrange;

/* A scheme with all its parameters decided. */
struct qt_spec {
    const struct qt_scheme *scheme; /* NULL: "none", the tensor is copied */
    const struct qt_preset *preset;
    double value[QT_MAX_PARAMS]; /* by index into scheme->params */
    unsigned fixed;              /* bit i: parameter i is decided by the preset */
    char text[QT_SPEC_TEXT];     /* canonical: preset and every parameter that it leaves open */
    /* What calibration has decided for the matrix at hand, beside the text (w4ax); NULL: nothing.
     */
    const struct qt_arrange *arrange;
};

/* QT_E_USAGE with a suggestion for unknown names, keys, choices; and for values out of range. */
int qt_spec_parse(struct qt_spec *out, const char *text, struct qt_err *err);
/* The same of what a container has: there, parameters without effect are no mistake any more. */
int qt_spec_read(struct qt_spec *out, const char *text, struct qt_err *err);

/* Replaces method=auto by what it means here. */
void qt_spec_resolve(struct qt_spec *spec, bool calibrated);

/* The table, for help and tests. NULL beyond the end. */
const struct qt_scheme *qt_scheme_at(size_t i);
const char *qt_scheme_name(const struct qt_scheme *s);
const char *qt_scheme_help(const struct qt_scheme *s);
/* Decides about activations, so that it cannot do without running the model on some text. */
bool qt_scheme_needs_data(const struct qt_scheme *s);
/* NULL beyond the end. */
const struct qt_preset *qt_scheme_preset(const struct qt_scheme *s, size_t i);
const struct qt_param *qt_scheme_param(const struct qt_scheme *s, size_t i);

/* The candidate nearest to `word` by edit distance, or NULL when none is near: "did you mean". */
const char *qt_nearest_name(const char *word, const char *const *names, size_t n);

/* ---- quantized activations ------------------------------------------------------------------ */

enum { QT_ACT_BLOCK = 128 }; /* channels that share a scale and a precision */

/* A token's blocks have scales of their own; or small multiples of one of the token; or all that of
 * the token. */
enum qt_act_scales { QT_ACT_SCALES_BLOCK, QT_ACT_SCALES_INT, QT_ACT_SCALES_ROW };

/*
 * How an input of linears is quantized at run time. Packed channel p is source channel order[p],
 * multiplied by factor[p], a power of two. Blocks of QT_ACT_BLOCK packed channels (the last may be
 * short) have bits[b] = 4 or 8. With a the absmax of a token's block and t that of the token,
 * everything in FP32:
 *     q = round(x * (1 / s)), of the exact product, ties to even, limited to -7..7 or -127..127
 *
 *     block:  s = a * (clip / 7) or a * (1 / 127)
 *
 *     int:    s = f * u, u = t * (1 / 127), f = 1 or round(a clip / (7 u)) limited to 1..18 (f q
 *             fits 8 bits)
 *
 *     row:    s = u, all blocks have 8 bits
 *
 * Where s < 2^-120 all q are 0.
 */
struct qt_act {
    size_t k;
    uint32_t *order; /* [k] */
    float *factor;   /* [k] */
    uint8_t *bits;   /* [ceil(k / QT_ACT_BLOCK)] */
    float clip;
    enum qt_act_scales scales;
};

/* Source order, factors 1, all blocks of `bits`, no clipping. */
int qt_act_new(struct qt_act *out, size_t k, unsigned bits, struct qt_err *err);
void qt_act_free(struct qt_act *a);
/* Values that were read: QT_E_INPUT, of `file` and `tensor`, unless they can be used. */
int qt_act_check(const struct qt_act *a, const char *file, const char *tensor, struct qt_err *err);
/* y[m][k] = x[m][k] quantized, in source order and scale (host memory; y may be x): the plain C
 * truth. Where x is not finite y is NaN. */
int qt_act_apply(float *y, const float *x, size_t m, const struct qt_act *a, struct qt_err *err);
/* The same on backend memory. */
int qt_act_apply_on(struct qt_backend *be, float *y, const float *x, size_t m,
                    const struct qt_act *a, struct qt_err *err);

/* QT_E_INPUT, naming the tensor, unless the w4ax tensors of a container go together: linears that
 * share an input take it alike, and their rows stand where the input that they become has its
 * channels. model: the container's. */
int qt_act_agree(const struct qt_container *c, const struct qt_model *model, struct qt_err *err);

/* Which rows and columns of a matrix stand where: packed row r is source row row_order[r] times
 * row_factor[r], packed column p the input's packed channel p (divided by its factor). */
struct qt_arrange {
    const struct qt_act *input;
    const uint32_t *row_order; /* [n]; NULL: source order */
    const float *row_factor;   /* [n]; NULL: 1 */
};

/* ---- KV caches of 4 bits -------------------------------------------------------------------- */

/*
 * Codes are 0..15, ties to even; everything in FP32, as kernels/include/qtool_kv4.h does it.
 *     values, per token and head: x = q s + low, q = round((x - low) * (1 / s)), where x is limited
 * to the range of FP16, s = (high - low) / 15 and low are stored as FP16, and s = 1 where that is 0
 *     keys, static: x = (q - zero) * scale, q = round(fma(x, 1 / scale, zero)); fixed numbers per
 * layer, head and channel, from calibration
 *     keys, channel: as values, but a scale per channel and QT_KV_TOKENS tokens of a sequence (the
 * last of them fewer); keys, token: as values
 */
enum { QT_KV_TOKENS = 64 };
enum qt_kv_keys { QT_KV_KEYS_STATIC, QT_KV_KEYS_CHANNEL, QT_KV_KEYS_TOKEN };
struct qt_kv {
    enum qt_kv_keys keys;
    float *scale, *zero; /* static keys: [layers][kv_heads][head_dim], owned */
    /* Where the weights are from, as w4ax keeps values divided by powers of two (arrange.c), and so
     * does a cache; NULL: values as they are. */
    const struct qt_container *container;
};
/* The static keys of a container, which must stay open, for its model. QT_E_INPUT naming file and
 * tensor when what it holds cannot be that, or is of another model; QT_E_USAGE when it holds none.
 */
int qt_kv_open(struct qt_kv *out, const struct qt_container *c, const struct qt_model_info *model,
               struct qt_err *err);
void qt_kv_free(struct qt_kv *kv);
/* The container's "kv", NULL when it has none; and whether it is of a kind that qtool knows: needs
 * no model and reads no tensor, statuses as above. */
const json_t *qt_kv_entry(const struct qt_container *c);
int qt_kv_check(const struct qt_container *c, struct qt_err *err);
/* A static key as it comes out of the cache. */
float qt_kv_static(float x, float scale, float zero);
/* "kv.layers.L.k_scale" or "..._zero": where a container holds them. *out is owned. */
int qt_kv_tensor_name(char **out, size_t layer, const char *what, struct qt_err *err);
/* For struct qt_fake_quant; cache_ctx is a struct qt_kv. QT_E_INPUT naming the linear whose keys or
 * values are not finite. */
int qt_kv_apply(void *cache_ctx, struct qt_backend *be, float *k, float *v,
                const struct qt_linear *key, const struct qt_linear *value, size_t m,
                const struct qt_attention *a, struct qt_err *err);

/* ---- one packed matrix ---------------------------------------------------------------------- */

/* A stored part of a packed matrix. */
struct qt_section {
    const char *name; /* static string: "plane0", "scale", ... */
    enum qt_dtype dtype;
    int ndim;
    size_t shape[QT_MAX_DIMS];
    size_t bytes;
    unsigned char *data; /* 64-byte aligned */
};

/* W[n][k] in the packed form of a scheme. Sections' data belongs to it. */
struct qt_packed {
    struct qt_spec spec;
    size_t n, k;        /* logical */
    const char *layout; /* layout id, static */
    int scale_exp2;     /* true scale = stored scale * 2^scale_exp2 */
    size_t nsections;
    struct qt_section section[QT_MAX_SECTIONS];
};

/* A matrix to be quantized, in its stored dtype: n rows of k, contiguous. */
struct qt_matrix {
    const void *data;
    enum qt_dtype dtype; /* a weight dtype (qt_dtype_is_weight) */
    size_t n, k;
    const char *file, *name; /* for errors */
};

/* How far a decoded matrix is from its source. Sums over all elements. */
struct qt_error {
    double sum_w2;  /* w^2 */
    double sum_q2;  /* q^2 */
    double sum_wq;  /* w q */
    double sum_e2;  /* (w - q)^2 */
    double max_abs; /* max |w - q| */
    size_t count;
};
double qt_error_mse(const struct qt_error *e);
double qt_error_sqnr_db(const struct qt_error *e); /* 10 log10(sum_w2 / sum_e2); inf when exact */
double qt_error_cosine(const struct qt_error *e);  /* 1 if both are 0, 0 if one is */

/* Section table, sizes and layout for a shape, without data: what a plan needs.
 * QT_E_UNSUPPORTED when the scheme cannot take the shape (reason says why). */
int qt_packed_describe(struct qt_packed *out, const struct qt_spec *spec, size_t n, size_t k,
                       struct qt_err *err);
size_t qt_packed_bytes(const struct qt_packed *p);
double qt_packed_bpw(const struct qt_packed *p);
/* What the scheme's publication would call it, where that leaves things out; else NaN. */
double qt_packed_paper_bpw(const struct qt_packed *p);

/*
 * Quantizes and packs. importance[k] weights the squared error of each stored channel (the diagonal
 * of the Hessian); NULL = 1. error may be NULL. QT_E_INPUT for a non-finite weight (row, column).
 * Results do not depend on the number of threads or the instruction set.
 */
int qt_packed_quantize(struct qt_packed *out, const struct qt_spec *spec, const struct qt_matrix *w,
                       const float *importance, struct qt_error *error, struct qt_err *err);
/* The same under the Hessian of calibration data, factored for qt_packed_group. */
int qt_packed_solve(struct qt_packed *out, const struct qt_spec *spec, const struct qt_matrix *w,
                    const struct qt_factor *factor, struct qt_error *error,
                    struct qt_solve_report *report, struct qt_err *err);
/* Channels that share a scale: k for one scale per row. */
size_t qt_packed_group(const struct qt_packed *p);
void qt_packed_free(struct qt_packed *p);

/* Rows [row0, row0 + rows) as FP32, w[rows][k]: the plain C truth of the stored form. Rows are
 * counted as stored; columns and values are those of the source. */
int qt_packed_decode(float *w, const struct qt_packed *p, size_t row0, size_t rows,
                     struct qt_err *err);
/* All of it, w[n][k], rows in the order of the source as well. */
int qt_packed_weights(float *w, const struct qt_packed *p, struct qt_err *err);
/* The row of the source that is stored as row r. */
size_t qt_packed_source_row(const struct qt_packed *p, size_t r);
/* Error of the stored form against its source. */
int qt_packed_compare(struct qt_error *out, const struct qt_packed *p, const struct qt_matrix *w,
                      struct qt_err *err);
/* Unpacks to codes and packs again: QT_E_INPUT when the bytes differ (padding or code abused). */
int qt_packed_check_repack(const struct qt_packed *p, const char *file, const char *name,
                           struct qt_err *err);

/* Reads an entry of a container: sections checked against what the scheme requires for the shape,
 * values against what it allows (finite scales, ...). QT_E_INPUT naming the tensor. */
int qt_packed_open(struct qt_packed *out, const struct qt_container *c, const struct qt_entry *e,
                   struct qt_err *err);

/* ---- tensor names --------------------------------------------------------------------------- */

/* A regular expression (PCRE2, UTF-8) that is looked for anywhere in a name; one thread at a time.
 * QT_E_USAGE with `what` ("--tensor") when it is none, or takes too long to match. */
struct qt_name_regex;
int qt_name_regex_new(struct qt_name_regex **out, const char *text, size_t size, const char *what,
                      struct qt_err *err);
void qt_name_regex_free(struct qt_name_regex *re);
int qt_name_regex_match(bool *found, const struct qt_name_regex *re, const char *name,
                        struct qt_err *err);

/* ---- plan ----------------------------------------------------------------------------------- */

/* One --tensor 'REGEX=SPEC'; the last one that matches a name decides. */
struct qt_rule {
    const char *regex;
    const char *spec;
};

struct qt_plan_options {
    const char *scheme; /* default scheme text */
    const struct qt_rule *rules;
    size_t nrules;
    bool calibrated; /* calibration data will be there: what method=auto means */
    bool kv;         /* also scales for the keys of a 4-bit KV cache, found on calibration data */
};

struct qt_plan_item {
    const struct qt_tensor *tensor;
    struct qt_packed packed; /* described, no data; spec.scheme NULL: copied */
    const char *why;         /* why it is copied: "embedding", "1-D", ... ; NULL if quantized */
};

struct qt_plan {
    struct qt_plan_item *items; /* one per source tensor, in source order */
    size_t count;
    size_t quantized;       /* items that are quantized */
    uint64_t weights;       /* elements of those */
    uint64_t packed_bytes;  /* stored bytes of those */
    uint64_t source_bytes;  /* all tensors */
    uint64_t output_bytes;  /* all tensors, packed and copied, and scales for a cache */
    uint64_t working_bytes; /* a tensor and what packing it by search takes, beyond mapped files */
    /* Scales of keys: a tensor kv.layers.L.k_scale and one k_zero, F32 [heads][head_dim], for each
     * layer (qt_plan_check_model). */
    struct {
        bool wanted;
        size_t layers, heads, head_dim;
        uint64_t bytes;
    } kv;
};

/* Decides every tensor and checks every shape before any work. QT_E_USAGE: bad spec or regex, or a
 * regex that matches nothing; QT_E_UNSUPPORTED: a shape that the scheme refuses, or a regex that
 * matches nothing but vectors (where it matches matrices too, they are copied). */
int qt_plan_new(struct qt_plan *out, const struct qt_ckpt *ckpt, const struct qt_plan_options *opt,
                struct qt_err *err);
void qt_plan_free(struct qt_plan *plan);
/* The item of a tensor; NULL where there is no tensor of that name. */
const struct qt_plan_item *qt_plan_find(const struct qt_plan *plan, const char *name);
/* What an item, or a plan, cannot be had without. */
enum qt_need {
    QT_NEEDS_NOTHING,
    QT_NEEDS_HESSIAN, /* calibration data, or a calibration file */
    QT_NEEDS_DATA,
};
enum qt_need qt_plan_item_needs(const struct qt_plan_item *item);
/* The most that any part needs. first, where wanted: the first item that needs it; NULL where none
 * does (scales of keys need data). */
enum qt_need qt_plan_needs(const struct qt_plan *plan, const struct qt_plan_item **first);
/* What only the model tells: plan->kv. Where anything needs it: that it can be run (errors of
 * qt_model_open); that w4ax and learn=1 are for linears of the decoder's blocks, and w4ax for all
 * that share an input, that nothing has the name of scales of keys (QT_E_UNSUPPORTED). Of any that
 * qtool can run: that a stored head stays as the embedding to which it is tied (QT_E_UNSUPPORTED).
 */
int qt_plan_check_model(struct qt_plan *plan, const struct qt_ckpt *ckpt, struct qt_err *err);
/* Bits per weight over all quantized tensors; 0 when there are none. */
double qt_plan_bpw(const struct qt_plan *plan);
/* The same by the count of publications where they have another; NaN when none has. */
double qt_plan_paper_bpw(const struct qt_plan *plan);

/* ---- the driver ----------------------------------------------------------------------------- */

/* Calibration on data: token windows ids[samples * seqlen], and where to run the model; each block
 * sees what the quantized blocks before it give. Or on the statistics of a file, without running
 * the model. */
struct qt_calibration {
    const uint32_t *ids;
    size_t samples, seqlen;
    uint64_t seed;              /* that chose the windows; only recorded */
    struct qt_backend *backend; /* of the model and of solving; with a file it may be NULL */
    const struct qt_qcal *file; /* if not NULL, nothing else counts but the backend */
};

/*
 * How the continuous parameters of tensors whose spec says learn=1 are tuned, by Adam on the
 * calibration windows. Some windows are held out; what is kept is what is best on them, which can
 * be what there was to begin with.
 */
enum qt_learn_objective { QT_LEARN_KL, QT_LEARN_NLL };
enum qt_learn_mode {
    QT_LEARN_FROZEN, /* codes stay as they were found */
    QT_LEARN_STE,    /* codes are the nearest to the weights, chosen anew after every step */
};
enum qt_learn_scope {
    QT_LEARN_MODEL, /* the objective at the head, all blocks at once */
    QT_LEARN_BLOCK, /* every block by itself: squared error of its output; no objective */
};
struct qt_learn_options {
    enum qt_learn_objective objective;
    enum qt_learn_mode mode;
    enum qt_learn_scope scope;
    double lr;               /* of Adam; parameters are in units of their own size */
    size_t passes;           /* over the windows that are not held out */
    size_t batch;            /* windows per step */
    double held_out;         /* share of the windows */
    bool norms;              /* tune norm weights as well (--tune-norms) */
    char text[QT_SPEC_TEXT]; /* canonical, without norms */
};
/* key=value,... on top of the defaults ("": those). QT_E_USAGE as for specs. */
int qt_learn_parse(struct qt_learn_options *out, const char *text, struct qt_err *err);

struct qt_quantize_options {
    struct qt_plan_options plan;
    const struct qt_calibration *calibration; /* NULL: data-free */
    const struct qt_learn_options *learn;     /* NULL: the defaults; else something must learn */
    const char *out_dir;
    bool force, resume;
    bool strict; /* what would be a fallback is an error */
    const struct qt_log *log;
    /* Polled between tensors; true stops with QT_E_INTERRUPTED and leaves a resumable state. */
    bool (*interrupted)(void);
};

struct qt_quantize_report {
    json_t *document; /* what qtool-report.json holds (of reused output without one: made anew,
                         without times and learning); owned (json_decref) */
    size_t quantized, copied;
    double bpw, paper_bpw; /* of qt_plan_bpw, qt_plan_paper_bpw */
    uint64_t bytes;        /* of all stored tensors */
    bool reused;           /* resume: the output was complete already, nothing was written */
};

int qt_quantize(struct qt_quantize_report *out, const struct qt_ckpt *ckpt,
                const struct qt_quantize_options *opt, struct qt_err *err);

/* ---- weights -------------------------------------------------------------------------------- */

/* A container's tensors, decoded on load, for qt_model_open and friends. */
struct qt_weights qt_weights_of_container(const struct qt_container *c);

#endif
