/* Private to formats: declarations shared by the reader and the writer of calibration files. */
#ifndef QT_FORMATS_QCAL_INTERNAL_H
#define QT_FORMATS_QCAL_INTERNAL_H

#include "formats/formats_internal.h"

#define QT_QCAL_FORMAT "qtool-calibration"
#define QT_QCAL_KEY    "qtool" /* member of __metadata__ */

/* The tensors of a linear input in file order. Wide elements come first, so that all are aligned if
 * k is a multiple of 4. */
enum qt_qcal_kind { QT_QCAL_SUM2, QT_QCAL_HIST, QT_QCAL_ABSMAX, QT_QCAL_H, QT_QCAL_KINDS };

enum { QT_QCAL_NAME = 64 };

/* Number of a tensor in the file. */
static inline size_t qt_qcal_index(size_t layer, size_t input, enum qt_qcal_kind kind)
{
    return (layer * QT_INPUTS + input) * QT_QCAL_KINDS + (size_t)kind;
}

/* Describes tensor i of a file for the given widths k of all inputs. `name` holds its name. */
int qt_qcal_describe(struct qt_tensor *out, char name[QT_QCAL_NAME], size_t i,
                     const size_t (*k)[QT_INPUTS], const char *file, struct qt_err *err);

#endif
