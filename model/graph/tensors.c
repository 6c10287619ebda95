/* The tensors of a part: found, and checked against the shape that config.json implies. */
#include "model/graph/roles.h"

#include <stdio.h>

static void shape_text(char *buf, size_t size, const size_t *shape, int ndim)
{
    size_t at = 0;
    buf[0] = '\0';
    for (int i = 0; i < ndim && at < size; i++)
        at += (size_t)snprintf(buf + at, size - at, "%s%zu", i ? ", " : "", shape[i]);
}

static int check_shape(const struct qt_weights *w, const char *name, const size_t *want, int ndim,
                       struct qt_err *err)
{
    size_t got[QT_MAX_DIMS];
    int got_ndim;
    char want_text[96], got_text[256];
    shape_text(want_text, sizeof want_text, want, ndim);
    if (!w->shape(w->ctx, name, &got_ndim, got))
        return qt_fail(err, QT_E_INPUT, w->dir, name, "missing; config.json implies shape [%s]",
                       want_text);
    if (got_ndim == ndim && memcmp(got, want, (size_t)ndim * sizeof *got) == 0)
        return QT_OK;
    shape_text(got_text, sizeof got_text, got, got_ndim);
    return qt_fail(err, QT_E_INPUT, w->dir, name, "shape is [%s], config.json implies [%s]",
                   got_text, want_text);
}

/* The tensor must exist with shape [n] (k = 0) or [n, k]. */
static int check_tensor(const struct qt_weights *w, const char *name, size_t n, size_t k,
                        struct qt_err *err)
{
    return check_shape(w, name, (const size_t[]){n, k}, k ? 2 : 1, err);
}

int part_set_bias(struct part *out, const char *stem, size_t n, bool biased,
                  const struct qt_weights *w, struct qt_err *err)
{
    char *bias = NULL;
    size_t shape[QT_MAX_DIMS];
    int ndim, rc;
    QT_TRY(qt_string_format(&bias, err, "%s.bias", stem));
    if (biased) {
        QT_TRY(check_tensor(w, bias, n, 0, err));
        out->bias = bias;
        bias = NULL;
    } else if (w->shape(w->ctx, bias, &ndim, shape)) {
        rc =
            qt_fail(err, QT_E_INPUT, w->dir, bias, "present, but config.json implies no bias here");
    }
done:
    qt_free(bias);
    return rc;
}

int part_set_convolution(struct part *out, const char *stem, size_t n, size_t k, bool biased,
                         const struct qt_weights *w, struct qt_err *err)
{
    int rc;
    out->n = n;
    out->k = k;
    QT_TRY(qt_string_format(&out->weight, err, "%s.weight", stem));
    QT_TRY(check_shape(w, out->weight, (const size_t[]){n, 1, k}, 3, err));
    QT_TRY(part_set_bias(out, stem, n, biased, w, err));
done:
    return rc;
}

int part_set_vector(struct part *out, const char *name, size_t n, bool row,
                    const struct qt_weights *w, struct qt_err *err)
{
    int rc;
    out->n = n;
    QT_TRY(qt_string_format(&out->weight, err, "%s", name));
    QT_TRY(check_tensor(w, out->weight, row ? 1 : n, row ? n : 0, err));
done:
    return rc;
}

bool part_exists(const struct qt_weights *w, const char *prefix, const char *stem)
{
    char name[128];
    size_t shape[QT_MAX_DIMS];
    int ndim;
    snprintf(name, sizeof name, "%s%s.weight", prefix, stem);
    return w->shape(w->ctx, name, &ndim, shape);
}

/* A norm that has the names of the first checkpoints of BERT; leaves *out empty if it has not. */
static int gamma_set(struct part *out, const char *stem, size_t n, const struct qt_weights *w,
                     struct qt_err *err)
{
    size_t shape[QT_MAX_DIMS];
    char *gamma = NULL;
    int ndim, rc;
    QT_TRY(qt_string_format(&gamma, err, "%s.gamma", stem));
    if (!w->shape(w->ctx, gamma, &ndim, shape))
        goto done;
    out->weight = gamma;
    gamma = NULL;
    QT_TRY(check_tensor(w, out->weight, n, 0, err));
    QT_TRY(qt_string_format(&out->bias, err, "%s.beta", stem));
    QT_TRY(check_tensor(w, out->bias, n, 0, err));
done:
    qt_free(gamma);
    return rc;
}

int part_set(struct part *out, const char *stem, size_t n, size_t k, bool biased,
             const struct qt_weights *w, struct qt_err *err)
{
    int rc;
    char *base = NULL;
    out->n = n;
    out->k = k;
    if (k && !part_exists(w, "", stem)) { /* PEFT's name of a linear that has adapters */
        QT_TRY(qt_string_format(&base, err, "%s.base_layer", stem));
        stem = part_exists(w, "", base) ? base : stem;
    }
    if (!k && biased && !part_exists(w, "", stem)) {
        QT_TRY(gamma_set(out, stem, n, w, err));
        if (out->weight)
            return QT_OK;
    }
    QT_TRY(qt_string_format(&out->weight, err, "%s.weight", stem));
    QT_TRY(check_tensor(w, out->weight, n, k, err));
    QT_TRY(part_set_bias(out, stem, n, biased, w, err));
done:
    qt_free(base);
    return rc;
}

void part_free(struct part *p)
{
    qt_free(p->weight);
    qt_free(p->bias);
}
