/*
 * verify: proves what a container holds and what it costs.
 *
 *   structure.c  container check: CRCs, sections, finiteness, repacking, error against the source
 *   eval.c       perplexity and divergence from a reference, block by block
 *   gate.c       --gate expressions over named figures
 */
#ifndef QT_VERIFY_H
#define QT_VERIFY_H

#include "base/base.h"
#include "calib/calib.h"
#include "formats/formats.h"
#include "pack/pack.h"

/* ---- container against itself and its source ------------------------------------------------ */

struct qt_verify_tensor {
    const char *name, *spec; /* owned by the container */
    size_t n, k;
    double bpw;
    bool compared; /* error is filled: a source was given */
    struct qt_error error;
};

struct qt_verify_report {
    struct qt_verify_tensor *tensors;
    size_t count;
    size_t copied;  /* tensors kept as they were */
    double bpw;     /* over all quantized tensors */
    uint64_t bytes; /* of all stored tensors */
};

/* CRC of every stored tensor, section shapes and values, finiteness of the decoded weights, repack
 * round trip; with a source also the error per tensor, and that copied tensors equal it byte for
 * byte. QT_E_INPUT at the first violation, naming the tensor. source and log may be NULL. */
int qt_verify(struct qt_verify_report *out, const struct qt_container *c,
              const struct qt_ckpt *source, const struct qt_log *log, struct qt_err *err);
void qt_verify_free(struct qt_verify_report *report);

/* ---- eval ----------------------------------------------------------------------------------- */

struct qt_eval_options {
    size_t seqlen;      /* window length, tokens */
    size_t windows;     /* at most this many; 0 = all whole windows of the file */
    size_t batch_bytes; /* hidden states held at once; 0 = 1 GiB */
    const struct qt_log *log;
};

struct qt_eval_report {
    size_t windows, seqlen;
    uint64_t scored_tokens; /* windows * (seqlen - 1) */
    double ppl;
    bool has_ref; /* the rest is filled */
    double ref_ppl;
    double kld_mean, kld_median, kld_p999; /* nats, at every position of a window */
    double same_top; /* share of positions with the same most probable token */
    double rms_dp;   /* root mean square of p(target) - p_ref(target) over scored positions */
};

/*
 * Perplexity of the model behind `w` on ids: windows of seqlen without overlap, positions
 * 1..seqlen-1 of each scored, tail dropped. With ref (same vocabulary; may be NULL) both models run
 * side by side, one block of each in memory. QT_E_UNSUPPORTED: architecture; QT_E_INPUT: too few
 * ids, vocabularies differ.
 */
int qt_eval(struct qt_eval_report *out, const struct qt_weights *w, const struct qt_weights *ref,
            const uint32_t *ids, size_t count, const struct qt_eval_options *opt,
            struct qt_backend *be, struct qt_err *err);

/* ---- gates ---------------------------------------------------------------------------------- */

struct qt_figure {
    const char *name; /* "ppl", "kld_mean", "bpw", ... */
    double value;
};

/* expr: comma-separated NAME<=X, NAME>=X, NAME<X, NAME>X. QT_E_USAGE: syntax or unknown name;
 * QT_E_GATE naming every condition that fails with the measured value. */
int qt_gate_check(const char *expr, const struct qt_figure *figures, size_t n, struct qt_err *err);

#endif
