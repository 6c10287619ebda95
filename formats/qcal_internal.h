/* Private to formats: declarations shared by the reader and the writer of calibration files. */
#ifndef QT_FORMATS_QCAL_INTERNAL_H
#define QT_FORMATS_QCAL_INTERNAL_H

#include "formats/formats_internal.h"

#define QT_QCAL_FORMAT "qtool-calibration"
#define QT_QCAL_KEY    "qtool" /* member of __metadata__ */

/* The tensors of a linear input in file order. Wide elements come first, so that all are aligned if
 * k is a multiple of 4. A layer with experts has one more tensor behind its inputs. */
enum qt_qcal_kind {
    QT_QCAL_SUM2,
    QT_QCAL_HIST,
    QT_QCAL_ABSMAX,
    QT_QCAL_H,
    QT_QCAL_KINDS,
    QT_QCAL_ROUTED = QT_QCAL_KINDS
};

enum { QT_QCAL_NAME = 64 };

/* The decoder layers of a file. */
struct qt_qcal_layers {
    struct qt_qcal_layer *layer; /* [count] */
    size_t count;
    size_t *k;     /* of all layers */
    size_t *first; /* [count + 1] number of each layer's first tensor in the file */
};
/* Copies layer[count]. After an error, too, *out is freed by qt_qcal_layers_free. */
int qt_qcal_layers_new(struct qt_qcal_layers *out, const struct qt_qcal_layer *layer, size_t count,
                       struct qt_err *err);
void qt_qcal_layers_free(struct qt_qcal_layers *l);

/* The version that a file of these layers has: 1 if every layer has attention and one MLP. */
int qt_qcal_version(const struct qt_qcal_layer *layer, size_t count);

/* Number of a tensor in the file. */
static inline size_t qt_qcal_index(const struct qt_qcal_layers *l, size_t layer, size_t input,
                                   enum qt_qcal_kind kind)
{
    return l->first[layer] + input * QT_QCAL_KINDS + (size_t)kind;
}
/* Number of the tensor `routed` of a layer with experts. */
static inline size_t qt_qcal_routed_index(const struct qt_qcal_layers *l, size_t layer)
{
    return l->first[layer + 1] - 1;
}

/* A tensor's place in the file. */
struct qt_qcal_place {
    size_t layer, input;
    enum qt_qcal_kind kind;
};
struct qt_qcal_place qt_qcal_place(const struct qt_qcal_layers *l, size_t i);

/* Describes tensor i of a file. `name` holds its name. */
int qt_qcal_describe(struct qt_tensor *out, char name[QT_QCAL_NAME], size_t i,
                     const struct qt_qcal_layers *l, const char *file, struct qt_err *err);

#endif
