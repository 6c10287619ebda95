/* The next token of a sequence, from its logits; and the tokens that end a text. */
#include "model/graph/internal.h"

#include <math.h>
#include <stdlib.h>

/* ---- sampling ------------------------------------------------------------------------------- */

struct candidate {
    float logit;
    uint32_t id;
};

/* Descending logits; equal ones by ascending id, so that the order does not depend on qsort. */
static int by_logit(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;
    if (x->logit != y->logit)
        return x->logit < y->logit ? 1 : -1;
    return x->id < y->id ? -1 : x->id > y->id;
}

/* A uniform number in [0, 1) for each (seed, stream, index): SplitMix64 of both. */
static double uniform(uint64_t seed, uint64_t stream, uint64_t index)
{
    uint64_t z = seed;
    const uint64_t add[] = {stream, index};
    for (int i = 0; i < 2; i++) {
        z += 0x9e3779b97f4a7c15u * (add[i] + 1);
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        z ^= z >> 31;
    }
    return (double)(z >> 11) * 0x1p-53;
}

uint32_t qt_most_probable(const float *logits, size_t vocab)
{
    size_t best = 0;
    for (size_t i = 1; i < vocab; i++)
        if (logits[i] > logits[best])
            best = i;
    return (uint32_t)best;
}

int qt_sample(uint32_t *id, const float *logits, size_t vocab, const struct qt_sampling *how,
              uint64_t stream, uint64_t index, struct qt_err *err)
{
    struct candidate *list = NULL;
    double *p = NULL, sum = 0, kept = 0;
    size_t n = how->top_k ? qt_min_size(how->top_k, vocab) : vocab, count = 0;
    int rc = QT_OK;
    for (size_t i = 0; i < vocab; i++)
        if (!isfinite(logits[i]))
            return qt_fail(err, QT_E_INPUT, NULL, NULL, "the logit of token %zu is not finite", i);
    if (how->temperature <= 0) {
        *id = qt_most_probable(logits, vocab);
        return QT_OK;
    }
    QT_TRY(qt_array_new(&list, vocab, sizeof *list, err));
    QT_TRY(qt_array_new(&p, n, sizeof *p, err));
    for (size_t i = 0; i < vocab; i++)
        list[i] = (struct candidate){logits[i], (uint32_t)i};
    qsort(list, vocab, sizeof *list, by_logit);
    for (size_t i = 0; i < n; i++)
        sum += p[i] = exp(((double)list[i].logit - (double)list[0].logit) / how->temperature);
    /* The most probable candidates whose probabilities add up to top_p. */
    while (count < n && (count == 0 || kept < how->top_p * sum))
        kept += p[count++];
    double at = uniform(how->seed, stream, index) * kept;
    size_t i = 0;
    for (; i + 1 < count && at >= p[i]; i++)
        at -= p[i];
    *id = list[i].id;
done:
    qt_free(list);
    qt_free(p);
    return rc;
}

/* ---- ends of texts -------------------------------------------------------------------------- */

#define FILE_LIMIT ((size_t)64 << 20)

/* eos_token_id of an object: an id, or an array of ids. */
static int add_ids(struct qt_stops *out, const json_t *object, const char *file, struct qt_err *err)
{
    const json_t *value = json_object_get(object, "eos_token_id");
    const size_t n = json_is_array(value) ? json_array_size(value) : 1;
    if (!value || json_is_null(value))
        return QT_OK;
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_is_array(value) ? json_array_get(value, i) : value;
        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) > INT32_MAX)
            return qt_fail(err, QT_E_INPUT, file, NULL, "eos_token_id is not a token id");
        if (out->count == QT_MAX_STOPS)
            return qt_fail(err, QT_E_UNSUPPORTED, file, NULL,
                           "eos_token_id has more than %d token ids", QT_MAX_STOPS);
        out->ids[out->count++] = (uint32_t)json_integer_value(id);
    }
    return QT_OK;
}

int qt_stops_read(struct qt_stops *out, const char *dir, struct qt_err *err)
{
    static const char *const names[] = {"generation_config.json", "config.json"};
    int rc = QT_OK;
    *out = (struct qt_stops){0};
    for (size_t i = 0; i < 2 && out->count == 0; i++) {
        char *file = NULL;
        json_t *root = NULL;
        rc = qt_path_join(&file, dir, names[i], err);
        if (rc == QT_OK && (i == 1 || qt_path_exists(file)))
            rc = qt_json_load_lenient(&root, file, FILE_LIMIT, err);
        if (rc == QT_OK)
            rc = add_ids(out, root, file, err);
        if (rc == QT_OK && out->count == 0)
            rc = add_ids(out, json_object_get(root, "text_config"), file, err);
        json_decref(root);
        qt_free(file);
        if (rc < 0)
            break;
    }
    return rc;
}

bool qt_stops_at(const struct qt_stops *stops, uint32_t id)
{
    for (size_t i = 0; i < stops->count; i++)
        if (stops->ids[i] == id)
            return true;
    return false;
}
