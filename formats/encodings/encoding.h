/*
 * Encodings of quantized checkpoints (private to formats/). An encoding says which stored tensors
 * together hold a quantized tensor, and what its values are. qt_ckpt presents such a tensor like
 * one that is stored as F16, BF16 or F32; reading it dequantizes.
 *
 *     scaled.c        fp8, int8, mxfp8: numbers of 8 bits; a scale per tensor, row, block or group
 *     fp4.c           mxfp4, nvfp4: E2M1 numbers with a scale per group
 *     packed_int.c    pack-quantized: integers of compressed-tensors
 *     gptq.c, awq.c   integers of GPTQ and AWQ
 *     bitsandbytes.c  nf4, fp4, int8 of bitsandbytes
 *     gguf.c          types of GGUF files
 *     source.c        what config.json says about quantization
 *
 * To add an encoding: a file, and a line in the table of encodings.c.
 */
#ifndef QT_FORMATS_ENCODINGS_ENCODING_H
#define QT_FORMATS_ENCODINGS_ENCODING_H

#include "formats/formats_internal.h"

/* config.json and the files of quantizers set these members; every member has a default. */
struct qt_source {
    json_t *config; /* NULL: none that can be read */
    json_t *file;   /* of a quantizer, if config.json has no section; or NULL */
    const json_t *section;
    const char *method;     /* quant_method, in lower case letters by convention; or NULL */
    const char *model_type; /* of the decoder; or NULL */
    enum qt_dtype dtype;    /* that the model computes in: F16, BF16 (default) or F32 */
    size_t block[2];        /* rows and columns of a block of FP8 weights */
};
/* QT_E_RESOURCE only: what cannot be read counts as absent, because other readers report it. */
int qt_source_read(struct qt_source *out, const char *dir, struct qt_err *err);
void qt_source_free(struct qt_source *s);
/* A string member of the section, or NULL. */
const char *qt_source_string(const struct qt_source *s, const char *key);
/* QT_E_UNSUPPORTED, with the reason, if the section describes weights that no encoding can read. */
int qt_source_check(const struct qt_source *s, const char *dir, struct qt_err *err);

enum { QT_PARTS = 6 };

/* A quantized tensor as the matrix [rows][cols] of its last dimension and all others. */
struct qt_encoded {
    struct qt_tensor info;              /* as presented: name (owned), file, dtype, shape */
    const struct qt_encoding *encoding; /* NULL: part[0] is the tensor, not quantized */
    /* The stored tensors by role; the first holds the codes. NULL: absent. */
    const struct qt_slot *part[QT_PARTS];
    size_t rows, cols;
    size_t matrix_rows; /* rows of one matrix of a stack; else rows */
    /* Parameters of the encoding. */
    unsigned bits;
    size_t group;      /* columns, or weights of the flattened matrix, that share a scale */
    size_t block_rows; /* scaled: rows that share a scale */
    uint32_t zero_add; /* gptq: added to words of zero-points */
    bool divides;      /* fp4: the scale of the tensor divides */
    float offset;      /* bitsandbytes: of nested scales */
    size_t nested;     /* bitsandbytes: scales that share a nested scale; 0: they are not nested */
};

/* qt_encoding.find searches these tensors. */
struct qt_stored {
    const struct qt_slot *const *by_name; /* all stored tensors, sorted */
    size_t count;
    const struct qt_source *source;
};
/* The stored tensor named by the first `size` bytes of `stem`, followed by `ending`; or NULL. */
const struct qt_slot *qt_stored_find(const struct qt_stored *s, const char *stem, size_t size,
                                     const char *ending);

struct qt_encoding {
    /*
     * Sets *found if t holds the codes of a tensor in this encoding, and fills *out: part, rows,
     * cols, parameters, and in `info` encoding, dtype, ndim and shape; *stem = number of bytes of
     * the name of t that begin the presented name, *ending = its rest. A failure, QT_E_INPUT or
     * QT_E_UNSUPPORTED, says what is wrong with a tensor that seems to have this encoding.
     */
    int (*find)(bool *found, struct qt_encoded *out, size_t *stem, const char **ending,
                const struct qt_stored *s, const struct qt_slot *t, struct qt_err *err);
    /* Checks the values of parts before decoding, if they could lead out of bounds. NULL: none. */
    int (*check)(const struct qt_encoded *e, const unsigned char *const data[QT_PARTS],
                 struct qt_err *err);
    /* Writes rows [row, row + n) to w[n][cols]. data: of the parts. */
    void (*decode)(float *w, const struct qt_encoded *e, const unsigned char *const data[QT_PARTS],
                   size_t row, size_t n);
};
extern const struct qt_encoding qt_encoding_scaled, qt_encoding_fp4, qt_encoding_packed_int,
    qt_encoding_gptq, qt_encoding_awq, qt_encoding_bnb4, qt_encoding_bnb8, qt_encoding_gguf;

/* Asks all encodings of the table. */
int qt_encoding_find(bool *found, struct qt_encoded *out, size_t *stem, const char **ending,
                     const struct qt_stored *s, const struct qt_slot *t, struct qt_err *err);

/* Element i of `data` as FP32. t: a weight dtype, F8_E4M3, F8_E8M0, or U8, which stands for
 * E8M0. */
float qt_scale_at(const unsigned char *data, enum qt_dtype t, size_t i);
/* True for the dtypes F16, BF16 and F32. */
bool qt_is_scale_dtype(enum qt_dtype t);
/* The values of the 256 codes of F8_E4M3, F8_E5M2 or I8. */
const float *qt_byte_values(enum qt_dtype t);
/* E2M1 */
extern const float qt_fp4_values[16];
/* Sets ndim and shape of out->info, and rows and cols. */
void qt_encoded_shape(struct qt_encoded *out, int ndim, const size_t *shape);
/* QT_E_INPUT: "NAME has dtype D and shape [..], which does not fit WHAT" about a part of t. */
int qt_bad_part(const struct qt_slot *part, const struct qt_slot *t, const char *fits,
                struct qt_err *err);
/* QT_E_INPUT if an element of `groups`, I32 [cols], is not the number of a group: a row of scales
 * (gptq) or a column (packed_int), so below cols / group. */
int qt_check_groups(const struct qt_encoded *e, const struct qt_slot *groups,
                    const unsigned char *data, struct qt_err *err);
/* QT_E_INPUT: t has no tensor `name` beside it. */
int qt_no_part(const struct qt_slot *t, const char *name, struct qt_err *err);
static inline uint32_t qt_word(const unsigned char *data, size_t i)
{
    uint32_t w;
    memcpy(&w, data + 4 * i, sizeof w);
    return w;
}

#endif
