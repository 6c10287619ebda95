/*
 * calib: calibration data and statistics.
 *
 *   data.c        calibration and evaluation texts -> ids -> windows (stream.c, records.c, chat.c)
 *   calibrate.c   statistics of the linears' inputs -> a calibration file (.qcal)
 *   merge.c       adds calibration files
 *   sums.c        sums over windows, by any number of ranks
 */
#ifndef QT_CALIB_H
#define QT_CALIB_H

#include "base/base.h"
#include "formats/formats.h"
#include "model/model.h"

/* ---- data ----------------------------------------------------------------------------------- */

/* Token ids of all files, concatenated. */
struct qt_data {
    uint32_t *ids; /* owned, [count] */
    size_t count;
    const char *first;   /* name of the first file for messages, borrowed */
    size_t bytes;        /* memory that reading took at its peak: the longest text plus all ids */
    size_t texts, chats; /* documents that were text, and conversations */
    bool bos;            /* a BOS was put before every text */
    const char *why;     /* what decided that: "tokenizer.json", "--bos yes", ...; NULL: no text */
};

struct qt_data_options {
    const char *dir;    /* of the tokenizer and the chat template */
    size_t vocab, most; /* limits of ids and of their number; 0: none */
    enum qt_bos bos;
    bool (*interrupted)(void); /* polled; may be NULL. true: QT_E_INTERRUPTED */
};
/*
 * Reads n files; "-" is standard input. Their content selects the kind: JSON Lines or a JSON array,
 * whose records are strings, objects with "text" or conversations, each a document; a .npy array of
 * token ids; or UTF-8 text, one document. All may be gzip files. Raw token ids are recognized only
 * by a name that ends in .u16 or .u32. Text is encoded by the tokenizer, which adds its special
 * tokens (BOS) to every document. Conversations ("messages", "conversations") are written by the
 * model's chat template, which has the BOS in it; QT_BOS_YES adds a missing one, QT_BOS_NO removes
 * it.
 *
 * With `most`, reading stops when there are enough ids: what comes after them is not checked. Of a
 * text, only a beginning with at least most + 65536 ids is read and encoded; with this margin,
 * cutting the text does not change the first `most` ids.
 *
 * QT_E_INPUT: a broken file, a file of another kind, or an id at or above vocab. Free with
 * qt_data_free.
 */
int qt_data_read(struct qt_data *out, const char *const *paths, size_t n,
                 const struct qt_data_options *opt, struct qt_err *err);
void qt_data_free(struct qt_data *data);
/* The name of a data file for messages: the path, or "standard input" for "-". */
const char *qt_data_name(const char *path);

/*
 * Copies `samples` windows of seqlen tokens to (*out)[samples * seqlen], in the order of the data;
 * the caller frees *out with qt_free. seed = 0 spreads the windows evenly over the data; any other
 * seed draws them without replacement. QT_E_INPUT if the data has fewer windows.
 */
int qt_data_windows(uint32_t **out, const struct qt_data *data, size_t samples, size_t seqlen,
                    uint64_t seed, struct qt_err *err);

/* ---- sums over windows ---------------------------------------------------------------------- */

/*
 * The windows of a run are at most QT_SUM_BLOCKS blocks, one after the other. Every block is added
 * up by itself, and the blocks are added in the order of a fixed tree: sums do not depend on the
 * number of ranks. A rank works on the windows of its blocks only.
 */
enum { QT_SUM_BLOCKS = 8, QT_SUM_ARRAYS = 12 };
struct qt_sum {
    void *data;   /* backend, zeros; receives the sum, in every rank */
    size_t count; /* elements */
    size_t lower; /* k: [k][k], of which only the lower triangle is added; 0: all elements are */
    bool f64;     /* double, else float; a triangle is double */
};
/* Host memory that sums of several ranks use one after the other; p is freed with qt_free. */
struct qt_sums_memory {
    char *p;
    size_t bytes;
};
struct qt_sums {
    struct qt_backend *be;
    struct qt_comm *comm;
    struct qt_sums_memory *memory;
    size_t blocks;
    size_t count; /* arrays */
    struct qt_sum sum[QT_SUM_ARRAYS];
    /* Adds a block of this rank to arrays like those of sum, which are given. */
    int (*block)(void *ctx, size_t block, void *const *into, struct qt_err *err);
    void *ctx;
};
/* Links the backends of all ranks, if they can be, and says how their memory is moved. All ranks
 * call it before the first sum. */
int qt_sums_link(struct qt_backend *be, struct qt_comm *comm, const struct qt_log *log,
                 struct qt_err *err);
/* The number of blocks of windows in `chunks` chunks, which are not divided. */
size_t qt_sums_count(size_t chunks);
/* The blocks [*first, result) of this rank. */
size_t qt_sums_blocks(size_t *first, size_t blocks, const struct qt_comm *comm);
/* The first token of a block, of `tokens` in all, in chunks of `chunk` tokens. */
size_t qt_sums_block_start(size_t block, size_t blocks, size_t chunk, size_t tokens);
/* Gives all ranks rows[tokens][bytes], of which each rank has those of its blocks. All ranks call
 * it. */
int qt_sums_join_rows(void *rows, size_t bytes, size_t blocks, size_t chunk, size_t tokens,
                      struct qt_comm *comm, struct qt_err *err);
/* All ranks call it. It takes memory for up to 3 more copies of the arrays, of the host if that of
 * the backend is short. */
int qt_sums_run(const struct qt_sums *s, struct qt_err *err);

/* With fewer, a Hessian overfits its tokens. */
enum { QT_MIN_TOKENS_PER_CHANNEL = 4 };

/* ---- calibration files ---------------------------------------------------------------------- */

struct qt_calibrate_options {
    struct qt_backend *backend; /* qt_calibrate_merge needs none */
    /* Ranks that share the work; all call the function. NULL: one process. */
    struct qt_comm *comm;
    bool force; /* replace an existing file */
    const struct qt_log *log;
    /* Polled; may be NULL. Returning true ends the run with QT_E_INTERRUPTED and without a file. */
    bool (*interrupted)(void);
};

/*
 * Runs the windows ids[part->samples * part->seqlen] through the model, one decoder layer at a
 * time, and writes the statistics of all linear inputs to the calibration file `path`. part
 * describes the origin of the ids; part->ids_crc is ignored: the CRC in the file is computed from
 * ids. The weights of one layer are in memory at a time, and the Hessians of its inputs, or that of
 * one input of an expert. QT_E_INPUT: activations are not finite. QT_E_USAGE: windows are too long
 * or too many, or qt_qcal_create refuses the path. QT_E_UNSUPPORTED: the model does not support
 * QT_USE_CALIB_FILE.
 */
int qt_calibrate(const char *path, const struct qt_ckpt *ckpt, const uint32_t *ids,
                 const struct qt_qcal_part *part, const struct qt_calibrate_options *opt,
                 struct qt_err *err);
/*
 * Adds n calibration files of one model, as if the model had been calibrated on all their data. The
 * order of paths makes no difference. QT_E_INPUT: the files are of different models. QT_E_USAGE:
 * two files contain the same windows.
 */
int qt_calibrate_merge(const char *path, const char *const *paths, size_t n,
                       const struct qt_calibrate_options *opt, struct qt_err *err);
/* Checks that q was made from this checkpoint. QT_E_INPUT names the first difference. */
int qt_calibrate_check(const struct qt_qcal *q, const struct qt_ckpt *ckpt,
                       const struct qt_model *model, struct qt_err *err);

/* The q-quantile (0..1) of |x| of a channel, from its histogram: linear interpolation within the
 * half-octave bin that contains it. */
double qt_hist_quantile(const uint32_t hist[QT_HIST_BINS], float absmax, double q);

/* Replaces absmax and hist, which cover this rank's tokens, by those of all ranks, which all call
 * it. */
int qt_channels_join(struct qt_channels *c, size_t k, struct qt_comm *comm, struct qt_err *err);

struct qt_channels_summary {
    size_t tokens;
    double rms;    /* over channels and tokens; 0 without tokens */
    double p999;   /* the largest 99.9 % quantile of a channel */
    double absmax; /* the largest |x| */
    size_t dead;   /* channels that were always 0 */
};
/* Summarizes the statistics of k channels, which have a histogram. */
struct qt_channels_summary qt_channels_summarize(const struct qt_channels *c, size_t k);

#endif
