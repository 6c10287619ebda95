/* Private to formats: what the reader and the writer of calibration files share. */
#ifndef QT_FORMATS_QCAL_INTERNAL_H
#define QT_FORMATS_QCAL_INTERNAL_H

#include "formats/formats_internal.h"

#define QT_QCAL_FORMAT "qtool-calibration"
#define QT_QCAL_KEY    "qtool" /* of __metadata__ */

/* The tensors of an input, in the order of the file: wide elements first, so that they are aligned
 * as long as k is a multiple of 4. */
enum qt_qcal_kind { QT_QCAL_SUM2, QT_QCAL_HIST, QT_QCAL_ABSMAX, QT_QCAL_H, QT_QCAL_KINDS };

enum { QT_QCAL_NAME = 64 };

/* Tensor number of the file. */
static inline size_t qt_qcal_index(size_t layer, size_t input, enum qt_qcal_kind kind)
{
    return (layer * QT_INPUTS + input) * QT_QCAL_KINDS + (size_t)kind;
}

/* Name (kept in `name`), dtype and shape of tensor i of the file, for the given k of all inputs. */
int qt_qcal_describe(struct qt_tensor *out, char name[QT_QCAL_NAME], size_t i,
                     const size_t (*k)[QT_INPUTS], const char *file, struct qt_err *err);

#endif
