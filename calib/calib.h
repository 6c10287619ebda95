/*
 * calib: calibration data and statistics.
 *
 *   data.c        calibration and evaluation texts -> ids -> windows
 *   calibrate.c   statistics of the linears' inputs -> a calibration file (.qcal)
 *   merge.c       adds calibration files
 */
#ifndef QT_CALIB_H
#define QT_CALIB_H

#include "base/base.h"
#include "formats/formats.h"
#include "model/model.h"

/* ---- data ----------------------------------------------------------------------------------- */

/* Token ids of files, one after the other. */
struct qt_data {
    uint32_t *ids; /* owned */
    size_t count;
    const char *first; /* path of the first file, the caller's */
    bool bos;          /* there was text, and the tokenizer puts a BOS before every document */
};

/*
 * Reads text (.txt or anything else: UTF-8, through the tokenizer of `dir`), .jsonl (the "text" of
 * every line, each a document), or token ids (.u16, .u32, .npy), each also with .gz behind. Every
 * document gets what the tokenizer's post-processor adds (BOS). Ids at or above vocab are refused.
 */
int qt_data_read(struct qt_data *out, const char *const *paths, size_t n, const char *dir,
                 size_t vocab, struct qt_err *err);
void qt_data_free(struct qt_data *data);

/*
 * Keeps `samples` windows of seqlen tokens, out[samples * seqlen] in order. seed 0: evenly spread
 * over the data; otherwise drawn without replacement. QT_E_INPUT when there are not that many.
 */
int qt_data_windows(uint32_t **out, const struct qt_data *data, size_t samples, size_t seqlen,
                    uint64_t seed, struct qt_err *err);

/* ---- calibration files ---------------------------------------------------------------------- */

struct qt_calibrate_options {
    struct qt_backend *backend; /* qt_calibrate_merge needs none */
    bool force;                 /* replace an existing file */
    const struct qt_log *log;
    /* Polled; true: QT_E_INTERRUPTED, and nothing is left. NULL: never. */
    bool (*interrupted)(void);
};

/*
 * Runs the windows ids[samples * seqlen] through the model, block by block, and writes the
 * statistics of all linear inputs to the calibration file `path`. part says where the ids come from
 * (its ids_crc is computed here). One block's weights and Hessians are in memory at a time.
 * QT_E_INPUT when activations are not finite; QT_E_USAGE: windows of more tokens than the model
 * takes, too many of them, or a path that qt_qcal_create refuses; QT_E_UNSUPPORTED: a mixture of
 * experts.
 */
int qt_calibrate(const char *path, const struct qt_ckpt *ckpt, const uint32_t *ids,
                 const struct qt_qcal_part *part, const struct qt_calibrate_options *opt,
                 struct qt_err *err);
/*
 * Adds calibration files of one model (QT_E_INPUT otherwise), as if calibrated on the data of all.
 * The order of paths makes no difference. QT_E_USAGE when the same windows come in twice.
 */
int qt_calibrate_merge(const char *path, const char *const *paths, size_t n,
                       const struct qt_calibrate_options *opt, struct qt_err *err);
/* QT_E_INPUT naming what differs when q was not made of this checkpoint. */
int qt_calibrate_check(const struct qt_qcal *q, const struct qt_ckpt *ckpt,
                       const struct qt_model *model, struct qt_err *err);

/* |x| that a share `q` of a channel's tokens does not exceed, from its histogram: in the right half
 * octave, interpolated in it. */
double qt_hist_quantile(const uint32_t hist[QT_HIST_BINS], float absmax, double q);

#endif
