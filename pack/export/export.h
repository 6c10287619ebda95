/*
 * Exports (private to pack/): a container written in a format that runtimes load.
 *
 *     export.c              the driver: plan, refusals, side files
 *     safetensors.c         writes the safetensors files and their index (run.h)
 *     convert.c             one matrix, panel by panel
 *     formats.c             the table of formats
 *     bits.h                dense bit strings, as several formats pack codes
 *     config.c              config.json of the export
 *     stacks.c, stored.c    what checkpoints have in another form than containers
 *     NAME.c                one format each
 *
 * A format that keeps the names and files of the checkpoint (safetensors, config.json) describes
 * and converts one matrix at a time: `describe` declares the tensors that take the place of the
 * matrix, `convert` fills their data panel by panel. A format with a file layout of its own (gguf)
 * has `plan` and `write` instead.
 */
#ifndef QT_PACK_EXPORT_EXPORT_H
#define QT_PACK_EXPORT_EXPORT_H

#include "pack/schemes/scheme.h"

enum { QT_EXPORT_TENSORS = 6, QT_EXPORT_PANEL = 64 /* rows of a panel */ };

/* A tensor that takes the place of a matrix, or of a part of it. */
struct qt_export_tensor {
    char name[QT_TENSOR_NAME_MAX + 64]; /* "model.layers.0.self_attn.q_proj.qweight" */
    enum qt_dtype dtype;
    int ndim;
    size_t shape[QT_MAX_DIMS];
    size_t bytes;
    unsigned char *data; /* zeroed before the first panel */
};

/* A quantized matrix of the container. */
struct qt_export_matrix {
    const struct qt_entry *entry;
    char module[QT_TENSOR_NAME_MAX]; /* the name without ".weight" */
    const struct qt_spec *spec;
    size_t n, k;
    /* If the scheme has codes (qt_packed_code_info); bits = 0 if it has not. */
    struct qt_code_info codes;
    /* Integers: value[code] = code - 2^(bits - 1), or code with zero-points. Schemes whose tables
     * are divided by a power of two (int3, iq4nl, mxfp4) have the values of their format in
     * `codes`; panel->scale is then the container's times 2^scale_shift. */
    bool integer;
    int scale_shift;
    enum qt_dtype scale_dtype; /* that the export stores scales in: QT_F16, QT_BF16 or QT_F32 */
    bool transposed;           /* the checkpoint stores it as [k][n] */
    bool head, embedding;
    bool rounded; /* the export decodes to other weights than the container */
    size_t ntensors;
    struct qt_export_tensor tensor[QT_EXPORT_TENSORS];
    const void *own;       /* for the format's functions */
    struct qt_error error; /* of a rounded matrix, once it was converted */
};

/* Rows [row0, row0 + rows) of a matrix in source order. row0 is a multiple of QT_EXPORT_PANEL; only
 * the last panel has fewer rows. A thread converts one panel at a time, and the panels of a matrix
 * are converted in any order. */
struct qt_export_panel {
    size_t row0, rows;
    const uint8_t *code; /* [rows][k] */
    const float *scale;  /* [rows][groups], 2^scale_exp2 included, rounded to scale_dtype */
    const uint8_t *zero; /* [rows][groups] */
    const float *weight; /* [rows][k] as the container decodes them, for formats with `weights` */
    /* If the matrix is rounded: [rows][k], where convert writes the weights that the runtime will
     * decode. Otherwise, or if the format has a table, NULL. Initialized with
     * (value[code] - zero) * scale. */
    float *decoded;
};

struct qt_export {
    const struct qt_container *container;
    const struct qt_export_options *opt;
    const struct qt_export_format *format;
    struct qt_export_matrix *matrix; /* in manifest order */
    size_t count;
    const struct qt_tensor **copied; /* in file order; not the container's own ("kv.layers...") */
    size_t ncopied;
    json_t *config;         /* config.json of the container; NULL: none */
    const char *model_type; /* its member, or NULL */
    struct qt_output *out;
    void *own; /* what plan leaves for write and release */
};

struct qt_export_format {
    const char *name;          /* that --format takes */
    const char *help;          /* what it is, in a few words */
    const char *runtimes;      /* "vLLM, transformers" */
    bool weights;              /* convert reads panel->weight instead of codes: any scheme fits */
    bool rounds;               /* always, by little: reported, but needs no --lossy */
    bool embeddings;           /* the format can hold quantized embeddings */
    bool fp8_inputs;           /* the format can say that inputs are rounded to FP8 */
    bool fused;                /* runtimes fuse modules, which need one scheme (fused.c) */
    const char *experts;       /* a warning for quantized experts, or NULL */
    enum qt_dtype scale_dtype; /* QT_F16: as --dtype says; QT_F32 */
    /* If matrices are rounded because the runtime decodes to table[code] * scale: that table.
     * Scales are F32, there are no zero-points. */
    const float *table;

    /* How the format holds matrices of a scheme, whatever their shape. *why, a static string, says
     * why not exactly: "the format has no codebooks". NULL: any scheme fits. */
    enum qt_export_fit (*fit)(const char **why, const struct qt_spec *spec);
    /* The tensor of all experts in which the format has the tensor `name` of a container, as
     * qt_stored_in_stack; other tensors of a matrix NAME.weight have stacks of their own. NULL:
     * none. */
    bool (*stack)(struct qt_stack *out, const char *model_type, const char *name);
    /* True for the families of decoders that the format can describe. NULL: all. */
    bool (*has_family)(const char *family);
    /* Declares the tensors of a matrix. QT_E_UNSUPPORTED with the reason if its shape does not
     * fit; the caller adds the tensor's name. */
    int (*describe)(struct qt_export_matrix *m, struct qt_err *err);
    /* QT_E_UNSUPPORTED if the matrices do not go together; may be NULL. */
    int (*check)(const struct qt_export *x, struct qt_err *err);
    /* Fills the data of m->tensor[] for the rows of a panel; panel->row0 = 0 also fills what does
     * not depend on rows. Runs on several threads; writes only what belongs to the rows. */
    void (*convert)(const struct qt_export_matrix *m, const struct qt_export_panel *panel);
    /* Value of quantization_config in config.json, a new reference; *out = NULL: none. */
    int (*config)(json_t **out, const struct qt_export *x, struct qt_err *err);
    const char *config_copy; /* another name in config.json for the same value, or NULL */
    /* Writes further files; quantization is the value that config gave. May be NULL. */
    int (*extra)(const struct qt_export *x, const json_t *quantization, struct qt_err *err);

    /* Formats with a file layout of their own: refusals before any work, size of all tensors; then
     * the files. release frees what plan made, whether it succeeded or not. Scales are always of
     * scale_dtype; --dtype is for copied tensors. */
    int (*plan)(struct qt_export *x, uint64_t *bytes, struct qt_err *err);
    int (*write)(struct qt_export *x, struct qt_err *err);
    void (*release)(struct qt_export *x);
};

extern const struct qt_export_format qt_export_dense, qt_export_compressed_tensors,
    qt_export_humming, qt_export_gptq, qt_export_awq, qt_export_bnb, qt_export_mlx, qt_export_gguf;

/* Warns of what may keep a runtime from loading an export with a config.json. */
void qt_export_warn(const struct qt_export *x);
/* Returns which matrix runtimes make of this module and others beside it: 1: of q, k and v, 2: of
 * gate and up; 0: the module stays alone. */
int qt_export_fused_as(const char *module);
/* Warns of such modules, and experts of a layer, with different schemes. */
int qt_export_warn_fused(const struct qt_export *x, struct qt_err *err);
/* True for a copied matrix that checkpoints have as [columns][rows]. */
bool qt_export_is_turned(const struct qt_export *x, const struct qt_tensor *t);
/* Writes data[rows][columns] of the matrix, whose elements have whole bytes, in that form. */
int qt_export_write_turned(const struct qt_export *x, const struct qt_tensor *t,
                           const unsigned char *data, struct qt_err *err);

/* Writes the module of a tensor "MODULE.weight"; false if the name does not end so. */
bool qt_export_module(char out[QT_TENSOR_NAME_MAX], const char *name);
/* Sets codes, scale_shift and integer; p as for qt_packed_code_info. */
void qt_export_set_values(struct qt_export_matrix *m, const struct qt_packed *p);
/* v rounded to F16 or BF16; v for other dtypes. */
float qt_export_round(float v, enum qt_dtype dtype);
/* Appends a tensor NAME = module + suffix (".qweight") to m. */
void qt_export_add(struct qt_export_matrix *m, const char *suffix, enum qt_dtype dtype, size_t rows,
                   size_t cols);
void qt_export_add_vector(struct qt_export_matrix *m, const char *suffix, enum qt_dtype dtype,
                          size_t count);
/* Stores values [first, first + count) of a tensor of dtype F16, BF16 or F32. */
void qt_export_floats(const struct qt_export_tensor *t, size_t first, const float *values,
                      size_t count);
/* True if the spec is of this scheme ("int"), or lut with this table. */
bool qt_export_is(const struct qt_spec *spec, const char *scheme);
bool qt_export_has_table(const struct qt_spec *spec, const char *table);
/* True for integers: int4, int8, int2, int3. */
bool qt_export_is_integer(const struct qt_spec *spec);
bool qt_export_has_zeros(const struct qt_spec *spec);
/* Fails with QT_E_INPUT, as the stored tensor is not what the manifest says. */
int qt_export_damaged(const struct qt_tensor *t, struct qt_err *err);
/* Opens the packed form of a matrix, after comparing the CRCs of its sections; freed with
 * qt_packed_free. */
int qt_export_packed(struct qt_packed *out, const struct qt_export *x,
                     const struct qt_export_matrix *m, struct qt_err *err);
/* Reads a copied tensor, after comparing its CRC; freed with qt_blob_free. */
int qt_export_read_copied(struct qt_blob *out, const struct qt_export *x, const struct qt_tensor *t,
                          struct qt_err *err);
/* config.c: writes config.json for the formats that have one. */
int qt_export_write_config(struct qt_export *x, struct qt_err *err);
/* Converts all panels of a matrix; m->tensor[].data are set. Sets m->error. */
int qt_export_panels(const struct qt_export *x, struct qt_export_matrix *m,
                     void (*convert)(const struct qt_export_matrix *m,
                                     const struct qt_export_panel *panel),
                     struct qt_err *err);
/* For `describe`: QT_E_UNSUPPORTED unless all groups of a row are whole. */
int qt_export_check_groups(const struct qt_export_matrix *m, struct qt_err *err);
/* The same, and the numbers of channels and of rows are multiples of these. */
int qt_export_check_shape(const struct qt_export_matrix *m, size_t channels, size_t rows,
                          struct qt_err *err);
/* True if the head is quantized. */
bool qt_export_has_head(const struct qt_export *x);
/* True if the matrix has one scale per row; false for groups, also those as long as a row: modules
 * with the same groups need the same options, whatever their length. */
bool qt_export_has_rows(const struct qt_export_matrix *m);
/* A `check`: QT_E_UNSUPPORTED unless all matrices have the same bits, groups and kind of
 * zero-points. */
int qt_export_check_uniform(const struct qt_export *x, struct qt_err *err);
/* *out: a list of the modules with matrices that are not quantized, "lm_head" among them even if it
 * is tied to the embedding and not stored. A new reference. */
int qt_export_left(json_t **out, const struct qt_export *x, struct qt_err *err);
/* patterns.c: the same, and one module, for programs that take regular expressions ("re:..."),
 * which the result has if the model is multimodal. */
int qt_export_ignored(json_t **out, const struct qt_export *x, struct qt_err *err);
json_t *qt_export_module_json(const struct qt_export *x, const char *module);
/* A regular expression for what may precede the module in a program's names, and *module without
 * the prefix of the checkpoint; "" and the whole name if the model is not multimodal. */
const char *qt_export_any_prefix(const char **module, const struct qt_export *x);

#endif
