/*
 * pack: quantization schemes (what codes mean, how their parameters are found, where the bits go),
 * and the driver that turns a checkpoint into a container.
 *
 *     plan.c             chooses a scheme for each tensor; sizes; refusals by name and shape
 *     roles.c            which tensors are linear weights; guard.c: refuses whole checkpoints
 *     plan_model.c       checks of a plan that need the model
 *     review.c           what a plan leaves unquantized, and warnings
 *     memory.c           the memory that a plan takes; time.c: the time
 *     packed.c           one matrix: dequantize, errors, codes; strips of 16 rows in parallel
 *     packed_round.c     one matrix: quantize, with a Hessian or without, on a backend or not
 *     sections.c         the sections of a packed matrix
 *     name_regex.c       regular expressions over tensor names
 *     quantize.c         the driver: checkpoint -> plan -> container
 *     items.c            the items of a plan: quantized or copied, stored, journaled, read back
 *     ranks.c            the items of a run, shared among ranks
 *     layers.c           the calibrated part of a run, decoder layer by decoder layer
 *     sequential.c       hidden states of the calibration windows on their way through the decoder
 *     observed.c         the factored Hessian of a linear input
 *     candidates.c       the errors of several schemes for the same matrices
 *     side_files.c       config.json, tokenizer.json, ...: copied, compared
 *     resume.c           checks whether the output of an earlier run can be used
 *     report.c           qtool-report.json; distribution.c: histograms of weights for it
 *     weights.c          a container as a source of weights for a forward pass
 *
 *     schemes/           the table of schemes, and one file for each scheme: fpx, lut, int, w4ax;
 *                        codebook*.c has what these share; rowops*.c are its vector loops
 *     schemes/mix24/     the scheme mix24 (mix24.h lists its files)
 *     layouts/           packed layouts, shared with the kernels
 *     activations/       activation quantization of w4ax: channel order, precisions, rounding
 *     kv/                4-bit KV caches
 *     export/            containers in the formats of other programs
 *     learn/             gradient descent on scales and norms after rounding
 */
#ifndef QT_PACK_PACK_H
#define QT_PACK_PACK_H

#include "base/base.h"
#include "calib/calib.h"
#include "formats/formats.h"
#include "hessian/hessian.h"

/* Instruction sets that the environment variable QTOOL_ISA may name. NULL-terminated. */
extern const char *const qt_isa_names[];

/* ---- schemes and specs ---------------------------------------------------------------------- */

enum { QT_MAX_PARAMS = 16, QT_SPEC_TEXT = 160 };

/* A parameter of a scheme. With `choices`, its value is the index of the chosen name. A flag is 0
 * or 1, an option an integer or one of its choices; the canonical text omits both while they are
 * 0. */
struct qt_param {
    const char *key;
    enum { QT_PARAM_INT, QT_PARAM_REAL, QT_PARAM_CHOICE, QT_PARAM_FLAG, QT_PARAM_OPTION } type;
    double initial, min, max;
    const char *const *choices; /* NULL-terminated; of QT_PARAM_CHOICE and some QT_PARAM_OPTION */
    const char *help;
};

/* A name that users type: a scheme with some parameters fixed. */
struct qt_preset {
    const char *name;   /* "nf4" */
    const char *values; /* "bits=4,table=nf": parameters that the preset sets */
    const char *help;
};

struct qt_scheme;
struct qt_arrange;

/* A scheme with all its parameters decided. */
struct qt_spec {
    const struct qt_scheme *scheme; /* NULL: "none", the tensor is copied */
    const struct qt_preset *preset;
    double value[QT_MAX_PARAMS]; /* by index into scheme->params */
    unsigned fixed;              /* bit i: the preset fixes parameter i */
    char text[QT_SPEC_TEXT];     /* canonical text: preset and all parameters that are not fixed */
    /* Channel order and factors of the matrix at hand (w4ax), borrowed; NULL: source order. */
    const struct qt_arrange *arrange;
};

/* Parses scheme text. QT_E_USAGE for unknown names, keys and choices (with a suggestion) and for
 * values out of range. */
int qt_spec_parse(struct qt_spec *out, const char *text, struct qt_err *err);
/* Parses the scheme text of a container. Unlike qt_spec_parse, accepts parameters without
 * effect, and text of any format version. */
int qt_spec_read(struct qt_spec *out, const char *text, struct qt_err *err);
/* The oldest format version of containers with this spec, which is not that of `none`. */
int qt_spec_format_version(const struct qt_spec *spec);

/* Writes the scheme text of a container without the parameters that are as its preset has them;
 * method=search is one of these. Returns buf. Text that is not valid is copied. */
const char *qt_spec_short(char buf[QT_SPEC_TEXT], const char *text);

/* Replaces method=auto by gptq (calibrated) or search. */
void qt_spec_resolve(struct qt_spec *spec, bool calibrated);

/* Scheme number i of the table; NULL past the end. */
const struct qt_scheme *qt_scheme_at(size_t i);
const char *qt_scheme_name(const struct qt_scheme *s);
const char *qt_scheme_help(const struct qt_scheme *s);
/* True if the scheme quantizes activations, so that calibration has to run the model on text. */
bool qt_scheme_needs_data(const struct qt_scheme *s);
/* Preset or parameter number i of a scheme; NULL past the end. */
const struct qt_preset *qt_scheme_preset(const struct qt_scheme *s, size_t i);
const struct qt_param *qt_scheme_param(const struct qt_scheme *s, size_t i);

/* Returns the candidate nearest to `word` by edit distance, for "did you mean"; NULL if none is
 * near. */
const char *qt_nearest_name(const char *word, const char *const *names, size_t n);

/* ---- quantized activations ------------------------------------------------------------------ */

/* Initializes source order, factors 1, `bits` for all channel blocks, clip 1. Arrays are owned. */
int qt_act_new(struct qt_act *out, size_t k, unsigned bits, struct qt_err *err);
/* Sets what the spec of a w4ax matrix says about its input: scales and rotation. */
void qt_act_set_spec(struct qt_act *a, const struct qt_spec *spec);
void qt_act_free(struct qt_act *a);
/* Checks values read from a file. QT_E_INPUT naming `file` and `tensor` if they are out of
 * range. */
int qt_act_check(const struct qt_act *a, const char *file, const char *tensor, struct qt_err *err);
/* y[m][k] = x[m][k] quantized and dequantized, in source order and scale: the plain C reference.
 * Host memory; y may be x. If x is not finite, y is NaN. */
int qt_act_apply(float *y, const float *x, size_t m, const struct qt_act *a, struct qt_err *err);
/* Same, with y in packed order and scale, and rotated: codes times scales. */
int qt_act_apply_stored(float *y, const float *x, size_t m, const struct qt_act *a,
                        struct qt_err *err);
/* qt_act_apply on backend memory. */
int qt_act_apply_on(struct qt_backend *be, float *y, const float *x, size_t m,
                    const struct qt_act *a, struct qt_err *err);

/* Checks that the w4ax tensors of a container are consistent: linears with the same input have the
 * same channel order and factors, and the row order of a linear matches the channel order of the
 * input that it produces. QT_E_INPUT naming the tensor. model: the model of the container. */
int qt_act_agree(const struct qt_container *c, const struct qt_model *model, struct qt_err *err);

/* Row and column order of a stored matrix. Packed row r is source row row_order[r] times
 * row_factor[r]; packed column p is source column input->order[p], divided by input->factor[p]. */
struct qt_arrange {
    const struct qt_act *input;
    const uint32_t *row_order; /* [n]; NULL: source order */
    const float *row_factor;   /* [n]; NULL: 1 */
};

/* ---- KV caches of 4 bits -------------------------------------------------------------------- */

/*
 * Keys and values are rounded as in base/kv4.h. A scale and a zero-point are shared by
 *
 *     values                QT_KV_CHANNELS adjacent channels of a token and KV head
 *     keys, channel         the tokens of a KV group (qt_kv4_group), for each KV head and channel.
 *                           The cache keeps the FP16 keys of a sequence's last KV group and rounds
 *                           that group again for each new token. kernels/include/qtool_kv4.h has
 *                           kernels.
 *     keys, token           the channels of a token and KV head
 *
 * Keys, static: constants per layer, KV head and channel from calibration, in FP32:
 *
 *     q = round(fma(x, 1 / scale, zero))
 *     x ~ (q - zero) * scale
 */
enum qt_kv_keys { QT_KV_KEYS_NONE, QT_KV_KEYS_CHANNEL, QT_KV_KEYS_STATIC, QT_KV_KEYS_TOKEN };
/* Names of the kinds from QT_KV_KEYS_CHANNEL on: "channel", "static", "token", NULL. */
extern const char *const qt_kv_keys_names[];
struct qt_kv {
    enum qt_kv_keys keys;
    float *scale, *zero; /* static keys: [layers][kv_heads][head_dim], owned */
    /* Container of the weights, borrowed. w4ax stores values divided by powers of two
     * (activations/arrange.c), and the cache holds them in that form; NULL: values as they are. */
    const struct qt_container *container;
};
/* Mean bits per number (one channel of a key or value) of a cache for heads of head_dim channels:
 * codes, and scales and zero-points that the cache holds. */
double qt_kv_bits(enum qt_kv_keys keys, size_t head_dim);
/* The same with the FP16 keys below, for a sequence of `tokens` tokens. */
double qt_kv_sequence_bits(enum qt_kv_keys keys, size_t head_dim, size_t tokens);
/* Bytes of FP16 keys, of token 0 and of the last KV group, that a cache holds for a sequence, in
 * all layers. */
uint64_t qt_kv_tail_bytes(enum qt_kv_keys keys, size_t layers, size_t kv_heads, size_t head_dim);
/* Opens the KV cache description of container c for `model`, with the static key scales if c has
 * them. c must stay open while *out is used. QT_E_INPUT naming file and tensor if the scales are
 * invalid or belong to another model; QT_E_USAGE if the container has no cache. */
int qt_kv_open(struct qt_kv *out, const struct qt_container *c, const struct qt_model_info *model,
               struct qt_err *err);
void qt_kv_free(struct qt_kv *kv);
/* The "kv" member of the manifest; NULL if there is none. qt_kv_check finds its kind, and returns
 * an error if that is unknown; it needs no model and reads no tensor. Statuses as above. */
const json_t *qt_kv_entry(const struct qt_container *c);
int qt_kv_check(enum qt_kv_keys *keys, const struct qt_container *c, struct qt_err *err);
/* A new "kv" member, without tensors; NULL if out of memory. */
json_t *qt_kv_entry_new(enum qt_kv_keys keys);
/* A static key after quantization and dequantization. */
float qt_kv_static(float x, float scale, float zero);
/* Name of a cache tensor: "kv.layers.L.k_scale" or "kv.layers.L.k_zero". The caller frees *out
 * with qt_free. */
int qt_kv_tensor_name(char **out, size_t layer, const char *what, struct qt_err *err);
/* Callback for struct qt_fake_quant; cache_ctx is a struct qt_kv. QT_E_INPUT naming the linear
 * whose keys or values are not finite. */
int qt_kv_apply(void *cache_ctx, struct qt_backend *be, float *k, float *v, float *exact,
                const struct qt_linear *key, const struct qt_linear *value, size_t m,
                struct qt_attention *a, struct qt_err *err);

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

/* W[n][k] in the packed form of a scheme. Owns the data of its sections. */
struct qt_packed {
    struct qt_spec spec;
    size_t n, k;        /* logical */
    const char *layout; /* layout id, static */
    int scale_exp2;     /* scale = stored scale * 2^scale_exp2 */
    size_t nsections;
    struct qt_section section[QT_MAX_SECTIONS];
    struct qt_codes *codes; /* not packed yet: see qt_packed_round; else NULL */
};

/* A matrix to quantize, in its stored dtype: n rows of k, contiguous. Borrowed. */
struct qt_matrix {
    const void *data;
    enum qt_dtype dtype; /* a weight dtype (qt_dtype_is_weight) */
    size_t n, k;
    const char *file, *name; /* for error messages */
};

/* Error of a dequantized matrix q against its source w. Sums over all elements. */
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

/* Fills in section table, sizes and layout for a shape, without data. QT_E_UNSUPPORTED, with the
 * reason, if the scheme does not support the shape. */
int qt_packed_describe(struct qt_packed *out, const struct qt_spec *spec, size_t n, size_t k,
                       struct qt_err *err);
size_t qt_packed_bytes(const struct qt_packed *p);
double qt_packed_bpw(const struct qt_packed *p);
/* Bits per weight as the scheme's publication counts them, if it omits some parts; else NaN. */
double qt_packed_paper_bpw(const struct qt_packed *p);

/*
 * Quantizes and packs. importance[k] weights the squared error of each stored channel (the diagonal
 * of the Hessian); NULL: 1. error may be NULL. QT_E_INPUT for a non-finite weight (row, column).
 * The result does not depend on the number of threads or the instruction set.
 */
int qt_packed_quantize(struct qt_packed *out, const struct qt_spec *spec, const struct qt_matrix *w,
                       const float *importance, struct qt_error *error, struct qt_err *err);
/* The same on a backend if that rounds matrices of this scheme, else on the CPU (NULL: always). */
int qt_packed_quantize_on(struct qt_backend *be, struct qt_packed *out, const struct qt_spec *spec,
                          const struct qt_matrix *w, const float *importance,
                          struct qt_error *error, struct qt_err *err);
/* The same, but minimizes the error under a Hessian: factor was made with options.group =
 * qt_packed_group of the result. */
int qt_packed_solve(struct qt_packed *out, const struct qt_spec *spec, const struct qt_matrix *w,
                    struct qt_factor *factor, struct qt_error *error,
                    struct qt_solve_report *report, struct qt_err *err);
/* What a backend already has, and what it shall keep, of a matrix [n][k] in source order; NULL, or
 * in its memory. */
struct qt_place {
    const float *w;    /* the source weights; if they are finite, those of the host are not read */
    float *rounded;    /* receives the weights that qt_packed_weights would return */
    bool only_rounded; /* nothing else is wanted: the result has no codes */
    bool only_compensated; /* no coordinate descent follows error compensation */
};
/* Some rows of a matrix. */
struct qt_packed_part {
    size_t first, end;              /* rows [first, end) in stored order */
    struct qt_solve_report *panels; /* [ceil(n / QT_PANEL_ROWS)] receives E of their panels */
};
/*
 * qt_packed_quantize_on or, with a factor, qt_packed_solve in two steps. qt_packed_round uses the
 * backend; be is that of the factor. place, part and *report may be NULL. qt_packed_complete does
 * not use it and may run in another thread: it packs the codes, which qt_packed_round left in
 * out->codes, and computes the error, unless that is NULL.
 *
 * With a part, only its rows are rounded, as they would be with all others, and are packed already:
 * of the sections that are divided (qt_packed_divided), *out has its share, of the others all. A
 * part that is not the whole matrix begins and ends at multiples of qt_packed_unit, or ends at n.
 */
int qt_packed_round(struct qt_packed *out, const struct qt_spec *spec, const struct qt_matrix *w,
                    struct qt_factor *factor, struct qt_backend *be, const struct qt_place *place,
                    const struct qt_packed_part *part, struct qt_solve_report *report,
                    struct qt_err *err);
int qt_packed_complete(struct qt_packed *p, const struct qt_matrix *w, struct qt_error *error,
                       struct qt_err *err);
/*
 * qt_packed_round in steps, for several matrices that the backend can round at the same time: each
 * has the result that it has alone. new prepares one, or rounds it on the host; run rounds those
 * that are left, all with the same backend; free, which accepts NULL, releases everything but
 * *packed, and also that unless it is rounded. The arguments of `new`, but for spec, place and
 * part, are valid until free, which is called after a failure, too.
 */
struct qt_rounding;
int qt_rounding_new(struct qt_rounding **out, struct qt_packed *packed, const struct qt_spec *spec,
                    const struct qt_matrix *w, struct qt_factor *factor, struct qt_backend *be,
                    const struct qt_place *place, const struct qt_packed_part *part,
                    struct qt_solve_report *report, struct qt_err *err);
bool qt_rounding_done(const struct qt_rounding *r); /* nothing is left for run */
int qt_rounding_run(struct qt_rounding *const *all, size_t n, struct qt_err *err);
void qt_rounding_free(struct qt_rounding *r);
/* True if the backend (NULL: the CPU) rounds matrices like p. */
bool qt_packed_rounds_on(const struct qt_packed *p, const struct qt_backend *be);
/* Number of rows that are rounded together under a Hessian, without any influence of other rows but
 * on the parameters of the whole matrix; 0: all. */
size_t qt_packed_unit(const struct qt_packed *p, const struct qt_backend *be);
/* Number of sections, the first, that are divided by rows: those of 16 rows follow each other. */
size_t qt_packed_divided(const struct qt_packed *p);
/* Channels that share a scale; k for one scale per row. */
size_t qt_packed_group(const struct qt_packed *p);
void qt_packed_free(struct qt_packed *p);

/* Dequantizes rows [row0, row0 + rows) to w[rows][k]: the plain C reference of the stored form.
 * Rows are in stored order, columns in source order; row and column factors of w4ax are undone. */
int qt_packed_decode(float *w, const struct qt_packed *p, size_t row0, size_t rows,
                     struct qt_err *err);
/* Same, with the columns and values as they are stored. */
int qt_packed_decode_stored(float *w, const struct qt_packed *p, size_t row0, size_t rows,
                            struct qt_err *err);
/* Dequantizes the matrix to w[n][k], rows and columns in source order. */
int qt_packed_weights(float *w, const struct qt_packed *p, struct qt_err *err);
/* Source row that is stored as row r. */
size_t qt_packed_source_row(const struct qt_packed *p, size_t r);
/* Error of the stored form against its source. */
int qt_packed_compare(struct qt_error *out, const struct qt_packed *p, const struct qt_matrix *w,
                      struct qt_err *err);
/* Unpacks all codes and packs them again. QT_E_INPUT if the bytes differ: padding or codes that the
 * packer does not produce. */
int qt_packed_check_repack(const struct qt_packed *p, const char *file, const char *name,
                           struct qt_err *err);

/* How the codes of a codebook scheme (fpx, lut, int) stand for weights:
 *     w = scale * 2^scale_exp2 * value[code]              symmetric
 *     w = scale * 2^scale_exp2 * (code - zero)            asymmetric */
struct qt_code_info {
    unsigned bits;
    size_t group, groups; /* channels per scale; scales of a row */
    bool asymmetric;
    float value[256]; /* by code */
};
/* False if the scheme is no codebook, or if channels are permuted (w4ax). After qt_packed_describe,
 * which sets no data, the values of tables are 0. */
bool qt_packed_code_info(struct qt_code_info *out, const struct qt_packed *p);
struct qt_code_rows {
    uint8_t *code;   /* [rows][k] */
    uint16_t *scale; /* [rows][groups] FP16 bits */
    uint8_t *zero;   /* [rows][groups] zero-points; 0 if symmetric */
};
/* Unpacks rows [row0, row0 + rows) of a matrix that qt_packed_code_info accepts. row0 is a multiple
 * of 16. scratch: qt_packed_scratch_bytes, aligned to 64. */
void qt_packed_codes(struct qt_code_rows *out, const struct qt_packed *p, size_t row0, size_t rows,
                     unsigned char *scratch);
size_t qt_packed_scratch_bytes(const struct qt_packed *p);

/* Reads an entry of a container. Checks the sections against what the scheme requires for the
 * shape, and the values against its ranges (finite scales, ...). QT_E_INPUT naming the tensor. */
int qt_packed_open(struct qt_packed *out, const struct qt_container *c, const struct qt_entry *e,
                   struct qt_err *err);

/* ---- tensor names --------------------------------------------------------------------------- */

/* A regular expression (PCRE2, UTF-8), searched for anywhere in a name; not thread-safe. QT_E_USAGE
 * with `what` ("--tensor") if the text is invalid or matching takes too long. */
struct qt_name_regex;
int qt_name_regex_new(struct qt_name_regex **out, const char *text, size_t size, const char *what,
                      struct qt_err *err);
void qt_name_regex_free(struct qt_name_regex *re);
int qt_name_regex_match(bool *found, const struct qt_name_regex *re, const char *name,
                        struct qt_err *err);

/* ---- plan ----------------------------------------------------------------------------------- */

/* One --tensor 'REGEX=SPEC'. The last rule that matches a name applies. */
struct qt_rule {
    const char *regex;
    const char *spec;
};

struct qt_plan_options {
    const char *scheme; /* default scheme text */
    const struct qt_rule *rules;
    size_t nrules;
    bool calibrated;    /* with calibration data: decides method=auto */
    enum qt_kv_keys kv; /* also a 4-bit KV cache; static key scales need calibration data */
};

struct qt_plan_item {
    const struct qt_tensor *tensor;
    bool copied;     /* stored as in the source; else quantized */
    bool linear;     /* a linear weight of a decoder layer, quantized or not */
    bool named;      /* a --tensor rule decides, not the default scheme */
    float grown_bpw; /* not 0: packed, the matrix would not be smaller; its bits per weight */
    const char *why; /* reason for copying: "embedding", "vector", ...; static string */
    /* Sections and sizes, without data; an empty one if copied. Owned by the plan, several items
     * may have the same. */
    const struct qt_packed *packed;
};

/* Source bytes of linear weights: matrices of decoder layers and stacked experts. */
struct qt_share {
    uint64_t linear;    /* all */
    uint64_t quantized; /* those that are quantized */
    uint64_t chosen;    /* those that the scheme none copies, as the user asked */
};
/* Copied tensors with the same reason. */
struct qt_left {
    const char *why; /* static string */
    bool linear;     /* linear weights */
    size_t count;
    uint64_t bytes;
};
enum { QT_LEFT_MAX = 32 };
#define QT_WHY_NONE "scheme none"

struct qt_plan {
    struct qt_plan_item *items; /* one per source tensor, in source order */
    size_t count;
    const struct qt_packed **descriptions; /* owned; of the quantized items */
    size_t ndescriptions, descriptions_capacity;
    size_t quantized;       /* items that are quantized */
    uint64_t weights;       /* elements of the quantized items */
    uint64_t packed_bytes;  /* stored bytes of the quantized items */
    uint64_t source_bytes;  /* all tensors */
    uint64_t output_bytes;  /* all tensors, packed and copied, and KV cache scales */
    uint64_t working_bytes; /* largest memory for one tensor without Hessian, beyond mapped files */
    struct qt_share share;
    struct {
        enum qt_kv_keys keys;
        /* Set by qt_plan_check_model. bytes: of static key scales, tensors kv.layers.L.k_scale and
         * kv.layers.L.k_zero for each layer, F32 [heads][head_dim]. */
        size_t layers, heads, head_dim;
        uint64_t bytes;
    } kv;
};

/* Chooses a scheme for every tensor and checks every shape before any work. A matrix that its
 * scheme would not make smaller is copied, unless a rule names it. QT_E_USAGE: bad spec or regex,
 * or a regex that matches nothing; QT_E_UNSUPPORTED: a shape that the scheme does not support, a
 * regex that matches only vectors (vectors are copied if the regex matches a matrix as well), or a
 * checkpoint that should not be quantized: quantized in a way that cannot be read, an adapter,
 * nothing that could be quantized; QT_E_INPUT: config.json cannot be read, or a matrix has no
 * elements. */
int qt_plan_new(struct qt_plan *out, const struct qt_ckpt *ckpt, const struct qt_plan_options *opt,
                struct qt_err *err);
void qt_plan_free(struct qt_plan *plan);
/* Writes the reason why an item is copied, with numbers if it has any, and returns buf. */
enum { QT_WHY_SIZE = 80 };
const char *qt_plan_item_why(char buf[QT_WHY_SIZE], const struct qt_plan_item *item);
/* Groups the copied tensors by reason, the most bytes first. Returns the number of groups. */
size_t qt_plan_left(struct qt_left out[QT_LEFT_MAX], const struct qt_plan *plan);
/* Share of the linear weights that is quantized, 0 to 1; NaN if there are none. */
double qt_share_ratio(const struct qt_share *share);
/* Warns if less than 90 % of the bytes of linear weights are quantized (not counting tensors that
 * the scheme `none` copies), if a rule makes a matrix larger, and if tensors share their data,
 * which the container stores twice. strict: QT_E_UNSUPPORTED instead of the warning about
 * 90 %. */
int qt_plan_review(const struct qt_plan *plan, const struct qt_ckpt *ckpt, bool strict,
                   const struct qt_log *log, struct qt_err *err);
/* The item of a tensor; NULL if there is no tensor of that name. */
const struct qt_plan_item *qt_plan_find(const struct qt_plan *plan, const char *name);
/* What quantizing an item, or a plan, requires. */
enum qt_need {
    QT_NEEDS_NOTHING,
    QT_NEEDS_HESSIAN, /* calibration data, or a calibration file */
    QT_NEEDS_DATA,
};
enum qt_need qt_plan_item_needs(const struct qt_plan_item *item);
/* The highest need of all items. first may be NULL; it is set to the first item with that need, or
 * to NULL if no item has it (static key scales need data). */
enum qt_need qt_plan_needs(const struct qt_plan *plan, const struct qt_plan_item **first);
/*
 * Sets plan->kv and makes the checks that need the model. With a KV cache, or if anything needs
 * calibration:
 *   - the model can be run (errors of qt_model_open);
 *   - w4ax and learn=1 are only used for linears of decoder layers (QT_E_UNSUPPORTED, also below);
 *   - w4ax is used for all linears with the same input, or for none;
 *   - no tensor has the name of a key scale.
 * For any model that qtool can run: a stored head has the same scheme as the embedding that it is
 * tied to.
 */
int qt_plan_check_model(struct qt_plan *plan, const struct qt_ckpt *ckpt, struct qt_err *err);
/* Format version of the container. */
int qt_plan_format_version(const struct qt_plan *plan);
/* Bits per weight over all quantized tensors; 0 when there are none. */
double qt_plan_bpw(const struct qt_plan *plan);
/* Same, as the schemes' publications count; NaN if no scheme counts in another way. */
double qt_plan_paper_bpw(const struct qt_plan *plan);

struct qt_memory_options {
    size_t samples, seqlen; /* windows of calibration data; 0: none */
    uint64_t data_bytes;    /* of the texts and ids from which they are taken, see qt_data.bytes */
    bool file;              /* a calibration file instead: the model is not run */
    size_t ranks;           /* that share the work (base/comm.h); 0 is 1 */
};
/* The tokens of the rank that has most of the windows, and the number of their blocks. */
size_t qt_plan_rank_tokens(size_t *blocks, const struct qt_memory_options *opt);
/* *out = the bytes that qt_quantize takes at its peak on the CPU, mapped pages included, in the
 * rank that takes most: an estimate, with the default options of learning if a tensor learns.
 * Errors of qt_model_open if there is calibration data. */
int qt_plan_memory(uint64_t *out, const struct qt_plan *plan, const struct qt_ckpt *ckpt,
                   const struct qt_memory_options *opt, struct qt_err *err);
/* *seconds = the time that qt_quantize takes on the CPU with qt_threads() threads of a machine that
 * does nothing else: an estimate from a small part of the work, which is done with random tokens.
 * Several ranks have such a machine each, and the exchange of data takes no time. NaN: there is no
 * estimate, because the model has experts or is not run. cpu: the CPU backend. */
int qt_plan_time(double *seconds, const struct qt_plan *plan, const struct qt_ckpt *ckpt,
                 const struct qt_memory_options *opt, struct qt_backend *cpu, struct qt_err *err);

/* ---- candidates ----------------------------------------------------------------------------- */

struct qt_candidates_options {
    const struct qt_plan *plans; /* [count], which differ in their schemes */
    size_t count, base;
    const bool *wanted; /* [plan items]; no plan copies these */
    /* With one plan, `rounded` and data: as qt_quantize does, each linear is rounded for its input
     * in the model whose linears before it are rounded. */
    bool in_turn;
    const struct qt_calibration *data; /* windows; NULL: without calibration */
    struct qt_backend *backend;        /* NULL: the CPU, without data */
    const struct qt_log *log;
    bool (*interrupted)(void); /* polled between matrices; may be NULL */
};
/*
 * Rounds the wanted matrices with the schemes of all plans: error[plan items][count]. A linear of a
 * decoder layer for which all plans have method=gptq is rounded under the Hessian of its input in
 * the unquantized model. Its errors are those at its outputs, on a scale of their own. The errors
 * of other matrices are ||W - Q||^2 / ||W||^2.
 *
 * rounded[plan items], zeros before, receives the matrices of the plan `base`; NULL: nothing is
 * kept. The caller frees each with qt_packed_free, also on failure. QT_E_UNSUPPORTED: a model that
 * is not run. QT_E_INTERRUPTED.
 */
int qt_candidates(double *error, struct qt_packed *rounded, const struct qt_ckpt *ckpt,
                  const struct qt_candidates_options *opt, struct qt_err *err);

/* ---- the driver ----------------------------------------------------------------------------- */

/* Calibration on data (token windows ids[samples][seqlen]; each decoder layer sees the outputs of
 * the quantized layers before it), or on the statistics of a calibration file, without running the
 * model. */
struct qt_calibration {
    const uint32_t *ids;
    size_t samples, seqlen;
    uint64_t seed;              /* seed of the choice of windows; only recorded in the manifest */
    struct qt_backend *backend; /* runs model and solver; may be NULL with a file */
    const struct qt_qcal *file; /* calibration file; if not NULL, all other members except `backend`
                                   are ignored */
};

/*
 * How the continuous parameters of tensors with learn=1 are tuned: Adam on the calibration windows.
 * Some windows are held out. The parameters that are best on these are kept, which may be the
 * initial ones.
 */
enum qt_learn_objective { QT_LEARN_KL, QT_LEARN_NLL };
enum qt_learn_mode {
    QT_LEARN_FROZEN, /* codes are fixed */
    QT_LEARN_STE,    /* straight-through: weights are rounded again after every step */
};
enum qt_learn_scope {
    QT_LEARN_MODEL, /* objective at the head, all decoder layers at once */
    QT_LEARN_BLOCK, /* each decoder layer by itself: squared error of its output, no objective */
};
struct qt_learn_options {
    enum qt_learn_objective objective;
    enum qt_learn_mode mode;
    enum qt_learn_scope scope;
    double lr;               /* of Adam; in units of each parameter's magnitude */
    size_t passes;           /* over the windows that are not held out */
    size_t batch;            /* windows per step */
    double held_out;         /* fraction of the windows */
    bool norms;              /* tune norm weights as well (--tune-norms) */
    char text[QT_SPEC_TEXT]; /* canonical, without norms */
};
/* Parses key=value,... on top of the defaults (""). QT_E_USAGE as for specs. */
int qt_learn_parse(struct qt_learn_options *out, const char *text, struct qt_err *err);

struct qt_quantize_options {
    struct qt_plan_options plan;
    const struct qt_calibration *calibration; /* NULL: data-free */
    struct qt_backend *backend;           /* rounds matrices that have no Hessian; NULL: the CPU */
    const struct qt_learn_options *learn; /* NULL: the defaults; else at least one tensor must
                                               * learn */
    const char *out_dir;
    const char *const *inputs; /* further files that the caller reads: data, calibration file */
    size_t ninputs;
    bool force, resume;
    bool strict; /* errors instead of warnings: a tensor that is quantized without its Hessian,
                  * copied values that are not finite, the warning about 90 % of qt_plan_review */
    struct qt_comm *comm; /* ranks that share the work; all call qt_quantize. NULL: one process */
    const struct qt_log *log;
    /* Polled between tensors. If true, qt_quantize returns QT_E_INTERRUPTED and can be resumed. */
    bool (*interrupted)(void);
    /* Receives the report of every quantized tensor, in source order, when all are finished; may
     * keep a reference. NULL: nobody does. */
    void (*tensor)(void *ctx, json_t *tensor);
    void *tensor_ctx;
};

struct qt_quantize_report {
    json_t *document; /* content of qtool-report.json with `tensors` empty, owned (json_decref); if
                       * reused output has none, it is rebuilt without times and learning */
    size_t quantized, copied;
    double bpw, paper_bpw; /* as qt_plan_bpw, qt_plan_paper_bpw */
    uint64_t bytes;        /* of all stored tensors */
    struct qt_share share;
    struct qt_left left[QT_LEFT_MAX]; /* as qt_plan_left */
    size_t nleft;
    const char *nonfinite;     /* first copied tensor with values that are not finite; NULL */
    size_t nonfinite_tensors;  /* number of copied tensors with such values */
    uint64_t nonfinite_values; /* number of such values */
    bool reused;               /* resume: the output was complete, nothing was written */
};

/* Quantizes a checkpoint into the container opt->out_dir. The bytes do not depend on the number of
 * ranks. Errors of planning (qt_plan_new, qt_plan_check_model), of input files, of writing;
 * QT_E_RESUME if opt->resume and the output belongs to other options or inputs. */
int qt_quantize(struct qt_quantize_report *out, const struct qt_ckpt *ckpt,
                const struct qt_quantize_options *opt, struct qt_err *err);

/* ---- export --------------------------------------------------------------------------------- */

/* A format of other programs (docs/exports.md). */
struct qt_export_format;
/* Format number i of the table, or by name; NULL: there is none. */
const struct qt_export_format *qt_export_format_at(size_t i);
const struct qt_export_format *qt_export_format_find(const char *name);
const char *qt_export_name(const struct qt_export_format *f);
const char *qt_export_help(const struct qt_export_format *f);
const char *qt_export_runtimes(const struct qt_export_format *f);
/* How a format holds matrices of a scheme: not at all, with one rounding (--lossy), exactly. *why:
 * the reason, a static string, or NULL. */
enum qt_export_fit { QT_EXPORT_NO, QT_EXPORT_NEAR, QT_EXPORT_EXACT };
enum qt_export_fit qt_export_fit(const char **why, const struct qt_export_format *f,
                                 const struct qt_spec *spec);
/* True if the format has a form for models whose decoder is of this family (qt_family.decoder). An
 * export may still refuse a model for what its config.json says. */
bool qt_export_has_family(const struct qt_export_format *f, const char *family);

/* dtype of weights or scales. AUTO: that of the source for dequantized weights, FP16 for scales. */
enum qt_export_dtype { QT_EXPORT_AUTO, QT_EXPORT_F16, QT_EXPORT_BF16, QT_EXPORT_F32 };
struct qt_export_options {
    const struct qt_export_format *format;
    const char *out_dir;
    enum qt_export_dtype dtype;
    bool lossy;               /* round once what the format cannot hold exactly */
    bool fp8_inputs;          /* ask the runtime to round inputs of fp8 matrices to FP8 as well */
    bool force;               /* as in struct qt_writer_options */
    bool dry_run;             /* only the checks; out_dir is not used */
    uint64_t max_shard_bytes; /* 0 = 4 GiB */
    const struct qt_log *log;
};
struct qt_export_report {
    size_t matrices, copied; /* tensors */
    uint64_t bytes;          /* of all tensors that are written */
    size_t rounded;          /* matrices that the format does not hold exactly */
    double worst; /* largest ||exported - container|| / ||container|| of a rounded matrix */
};
/* Writes a container in another format to opt->out_dir. All refusals come before any work:
 * QT_E_UNSUPPORTED naming the tensor and the reason. Other statuses as for qt_output_open;
 * QT_E_INPUT if the container's data differs from its CRCs. */
int qt_export(struct qt_export_report *report, const struct qt_container *c,
              const struct qt_export_options *opt, struct qt_err *err);

/* ---- weights -------------------------------------------------------------------------------- */

/* The tensors of a container, dequantized when loaded, for qt_model_open and similar functions. */
struct qt_weights qt_weights_of_container(const struct qt_container *c);

/* Weights of a source, of which packed matrices replace some. */
struct qt_replaced {
    struct qt_weights source;
    /* The matrix that takes the place of a tensor, or NULL. */
    const struct qt_packed *(*find)(void *ctx, const char *name);
    void *ctx;
};
/* *r must outlive the result. */
struct qt_weights qt_weights_replaced(struct qt_replaced *r);

#endif
