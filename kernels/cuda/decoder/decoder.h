/* Launches of the decoder's kernels; private to this folder. Each returns a status of
 * qtool_kernels.h. */
#ifndef QT_KERNELS_CUDA_DECODER_DECODER_H
#define QT_KERNELS_CUDA_DECODER_DECODER_H

#include "kernels/include/qtool_decoder.h"

struct tile_instance; /* of attention_tile.cuh */

int qt_decoder_embed(const struct qtool_decoder_embed *a, bool dependent, void *stream);
int qt_decoder_add_norm(const struct qtool_decoder_add_norm *a, bool dependent, void *stream);
/* With a->w4ax, in one launch; QTOOL_UNSUPPORTED for what needs two. */
int qt_decoder_add_norm_w4ax(const struct qtool_decoder_add_norm *a, bool dependent, void *stream);
int qt_decoder_heads(const struct qtool_decoder_heads *a, bool dependent, void *stream);
/* With a->kv4. */
int qt_decoder_heads_kv4(const struct qtool_decoder_heads *a, bool dependent, void *stream);
int qt_decoder_activation(const struct qtool_decoder_activation *a, bool dependent, void *stream);
/* With a->w4ax, in one launch; QTOOL_UNSUPPORTED for what needs two. */
int qt_decoder_activation_w4ax(const struct qtool_decoder_activation *a, bool dependent,
                               void *stream);
int qt_decoder_route(const struct qtool_decoder_route *a, bool dependent, void *stream);
int qt_decoder_expert_product(const struct qtool_decoder_expert_product *a, bool dependent,
                              void *stream);
int qt_decoder_next(const struct qtool_decoder_next *a, bool dependent, void *stream);
/* With a temperature. */
int qt_decoder_sample(const struct qtool_decoder_next *a, bool dependent, void *stream);

/* A thread block per query and head. */
int qt_attention_rows(const struct qtool_decoder_attention *a, bool dependent, void *stream);
/* Many queries: tiles of 64 on tensor cores. QTOOL_UNSUPPORTED for a head_dim without an
 * instance. */
int qt_attention_tile(const struct qtool_decoder_attention *a, bool dependent, void *stream);

/* ---- rare.cu: kernels of few families, which are compressed in the library ------------------- */

/* With `scale`. */
const void *qt_rare_add_norm(void);
/* With `v_norm` or `clip`. */
const void *qt_rare_heads(void);
/* With `slopes`, or for head_dim > 256; NULL: there is none. */
const void *qt_rare_rows(const struct qtool_decoder_attention *a);
struct tile_instance qt_rare_tile(const struct qtool_decoder_attention *a);

#endif
