/* model.c builds the graph from these: parts of a layer (roles.c) and their tensors (tensors.c). */
#ifndef QT_MODEL_GRAPH_ROLES_H
#define QT_MODEL_GRAPH_ROLES_H

#include "model/graph/internal.h"

/* ---- roles.c: what config.json implies ------------------------------------------------------ */

/* `expert` is 0 except for the parts of experts. */

/* True if the layer has the part, under its own name. */
bool layer_has(const struct config *cfg, const struct layer_def *layer, enum role role,
               size_t expert);
/* True if the role does not belong to a mixer, or to this one. */
bool mixer_has(const struct config *cfg, enum mixer_kind mixer, enum role role);
/* The family's name of a role; NULL: it has none. */
const char *role_name(const struct config *cfg, const struct layer_def *layer, enum role role,
                      size_t expert);
/* The fused part that contains the role in families that have it; else the role itself. */
enum role role_whole(enum role role);
/* n, k (0: a vector) and inputs of a part; input is -1 for norms, the router and its bias. */
struct qt_linear role_shape(const struct config *cfg, const struct layer_def *layer, enum role role,
                            size_t expert);
/* True if the part has a bias. */
bool role_biased(const struct config *cfg, enum role role);
/* True for vectors that are stored without ".weight". */
bool role_bare(enum role role);
/* *out = the name of the part's tensor in layer `index`, without ".weight". prefix: that of all
 * tensors of the decoder. The caller frees *out with qt_free. */
int part_stem(char **out, const struct config *cfg, const struct layer_def *layer,
              const char *prefix, size_t index, enum role role, size_t expert, struct qt_err *err);

/* ---- tensors.c: what the source has --------------------------------------------------------- */

/* Each sets names and sizes of a part; QT_E_INPUT, naming the tensor, unless w has its tensors in
 * the implied shapes, with a bias if it is `biased` and else without. stem: the name without
 * ".weight" and ".bias". */

/* A matrix [n][k], or with k = 0 a vector [n]. */
int part_set(struct part *out, const char *stem, size_t n, size_t k, bool biased,
             const struct qt_weights *w, struct qt_err *err);
/* A convolution of n channels over k tokens, which is stored as [n][1][k]. */
int part_set_convolution(struct part *out, const char *stem, size_t n, size_t k, bool biased,
                         const struct qt_weights *w, struct qt_err *err);
/* A vector that is called `name`, without ".weight". row: it is stored as a matrix [1][n]. */
int part_set_vector(struct part *out, const char *name, size_t n, bool row,
                    const struct qt_weights *w, struct qt_err *err);
/* The bias [n] alone. */
int part_set_bias(struct part *out, const char *stem, size_t n, bool biased,
                  const struct qt_weights *w, struct qt_err *err);
/* True if w has PREFIX STEM.weight. */
bool part_exists(const struct qt_weights *w, const char *prefix, const char *stem);
void part_free(struct part *p);

#endif
