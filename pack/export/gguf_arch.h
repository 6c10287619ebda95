/*
 * What describes a model to llama.cpp (private to pack/export/gguf_arch.c and gguf_rope.c).
 */
#ifndef QT_PACK_EXPORT_GGUF_ARCH_H
#define QT_PACK_EXPORT_GGUF_ARCH_H

#include "pack/export/gguf.h"

#include <math.h>

enum head_rule { HEAD_ANY, HEAD_OWN /* never the embedding */, HEAD_TIED /* always */ };

struct qt_gguf_arch {
    const char *family;
    bool square;      /* heads * head_dim must be the hidden size */
    bool all_kv;      /* every query head must have keys and values of its own */
    bool scaled;      /* has the factors of Granite */
    bool embed_sqrt;  /* the embedding is multiplied by the root of the hidden size */
    bool capped;      /* has softcaps of attention scores and logits, which must be given */
    bool last_cap;    /* may have a softcap of logits */
    bool normalized;  /* routing weights of the chosen experts sum to 1 */
    bool routed;      /* reads how experts are chosen, and how many layers have none */
    bool delta;       /* layers with gated DeltaNet */
    bool short_conv;  /* layers with short convolutions, which have no keys and values */
    bool chunked;     /* Llama 4: attention within chunks, experts in every n-th layer */
    bool latent;      /* latent attention; experts may be in groups */
    bool steps;       /* queries may be multiplied by steps of the position */
    bool one_theta;   /* layers with a window have the base of the others */
    bool skips_rope;  /* every 4th layer has no rotary embedding */
    bool rope_freqs;  /* reads factors of the rotary embedding from a tensor */
    bool rope_lists;  /* reads short and long factors from two tensors */
    bool sections;    /* positions of images have several numbers, which turn parts of a head */
    size_t period;    /* layers have a window, except every period-th; 0: no layer has one */
    size_t windowed;  /* only models of so many layers have windows, and only their layers with a
                         window have a rotary embedding; 0: all */
    size_t by_hidden; /* a model of so many layers scales attention by hidden size / heads */
    enum head_rule head;
    enum qt_act_kind act;
    double theta, local_theta; /* where config.json has none; 0: 10000 */
};

/* Writes the keys of a model. */
struct writer {
    struct qt_gguf_bytes *b;
    const struct qt_gguf_arch *arch;
    const struct qt_gguf_family *names;
    const struct qt_model *model;
    const struct qt_model_info *info;
    struct qt_model_details details;
    const struct qt_export *x;
    const json_t *config; /* the decoder's options in config.json */
    char prefix[32];      /* "llama." */
    struct qt_err *err;
};

/* QT_E_UNSUPPORTED: llama.cpp computes this architecture with something else. */
int qt_gguf_differs(const struct writer *w, const char *what);

static inline bool near(double a, double b)
{
    return fabs(a - b) <= 1e-5 * fabs(b);
}

static inline void u32(const struct writer *w, const char *name, size_t value)
{
    qt_gguf_u32(w->b, w->prefix, name, (uint32_t)value);
}

static inline void f32(const struct writer *w, const char *name, double value)
{
    qt_gguf_f32(w->b, w->prefix, name, (float)value);
}

/* gguf_rope.c: keys and factors of the rotary embedding. */
int qt_gguf_write_rope(const struct writer *w, struct qt_gguf_factors *factors);
/* Returns the factor by which YaRN multiplies the scores of latent attention (mscale_all_dim). */
double qt_gguf_score_factor(const struct writer *w);

#endif
