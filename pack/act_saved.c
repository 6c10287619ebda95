/*
 * A plan of activations between two runs. Choosing it takes two passes of many windows through the
 * model, so a run that goes on takes it from the one that was interrupted.
 *
 *   magic | layers | of each input: k, scales, clip, order, factors, bits | the report's JSON
 */
#include "pack/act_plan.h"

#include <string.h>

static const char magic[8] = "qtact 1";

/* What is written and read in turn; nothing is copied behind the end. */
struct cursor {
    unsigned char *data;
    size_t at, size;
};

static bool take(struct cursor *c, void *to, size_t bytes)
{
    if (bytes > c->size - c->at)
        return false;
    memcpy(to, c->data + c->at, bytes);
    c->at += bytes;
    return true;
}

static void give(struct cursor *c, const void *from, size_t bytes)
{
    if (c->data)
        memcpy(c->data + c->at, from, bytes);
    c->at += bytes;
}

static size_t blocks_of(const struct qt_act *a)
{
    return qt_ceil_div(a->k, QT_ACT_BLOCK);
}

/* ---- save ----------------------------------------------------------------------------------- */

/* With no data only the size is found. */
static void give_plan(struct cursor *c, const struct qt_act_plan *p, const char *report)
{
    give(c, magic, sizeof magic);
    give(c, &p->layers, sizeof p->layers);
    for (size_t v = 0; v < p->layers * QT_INPUTS; v++) {
        const struct qt_act *a = &p->act[v];
        give(c, &a->k, sizeof a->k);
        if (!a->k)
            continue;
        give(c, &a->scales, sizeof a->scales);
        give(c, &a->clip, sizeof a->clip);
        give(c, a->order, a->k * sizeof *a->order);
        give(c, a->factor, a->k * sizeof *a->factor);
        give(c, a->bits, blocks_of(a));
    }
    give(c, report, strlen(report));
}

int qt_act_plan_save(const struct qt_act_plan *p, struct qt_writer *w, struct qt_err *err)
{
    struct cursor c = {0};
    char *report = json_dumps(p->report, JSON_COMPACT);
    int rc = QT_OK;
    if (!report)
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory");
    give_plan(&c, p, report);
    QT_TRY(qt_array_new(&c.data, c.at, 1, err));
    c.at = 0;
    give_plan(&c, p, report);
    QT_TRY(qt_writer_save(w, QT_PROGRESS_ACTIVATIONS, c.data, c.at, err));
done:
    qt_free(c.data);
    qt_free(report);
    return rc;
}

/* ---- load ----------------------------------------------------------------------------------- */

/* The channels of an input of w4ax linears; 0 where the model has no such input. */
static size_t width_of(const struct qt_model *model, size_t layer, int input)
{
    const struct qt_linear *linear;
    for (size_t i = 0, n = qt_model_linears(&linear, model, layer); i < n; i++)
        if (linear[i].input == input)
            return linear[i].k;
    return 0;
}

/* False: not what was saved of this model. */
static bool take_input(bool *failed, struct qt_act *a, struct cursor *c, size_t width,
                       struct qt_err *err)
{
    size_t k;
    if (!take(c, &k, sizeof k) || (k && k != width))
        return false;
    if (!k)
        return true;
    *failed = qt_act_new(a, k, 8, err) < 0;
    if (*failed || !take(c, &a->scales, sizeof a->scales) || !take(c, &a->clip, sizeof a->clip) ||
        !take(c, a->order, k * sizeof *a->order) || !take(c, a->factor, k * sizeof *a->factor) ||
        !take(c, a->bits, blocks_of(a)))
        return false;
    for (size_t i = 0; i < k; i++)
        if (a->order[i] >= k)
            return false;
    return true;
}

static bool take_plan(bool *failed, struct qt_act_plan *out, struct cursor *c,
                      const struct qt_model *model, struct qt_err *err)
{
    char start[sizeof magic];
    size_t layers;
    if (!take(c, start, sizeof start) || memcmp(start, magic, sizeof magic) != 0 ||
        !take(c, &layers, sizeof layers) || layers != out->layers)
        return false;
    for (size_t v = 0; v < layers * QT_INPUTS; v++)
        if (!take_input(failed, &out->act[v], c,
                        width_of(model, v / QT_INPUTS, (int)(v % QT_INPUTS)), err))
            return false;
    out->report = json_loadb((const char *)c->data + c->at, c->size - c->at, 0, NULL);
    return out->report != NULL;
}

int qt_act_plan_load(bool *found, struct qt_act_plan *out, const struct qt_model *model,
                     const struct qt_writer *w, struct qt_err *err)
{
    struct cursor c = {0};
    bool failed = false;
    int rc;
    *found = false;
    *out = (struct qt_act_plan){.layers = qt_model_info(model)->layers};
    QT_TRY(qt_writer_load((void **)&c.data, &c.size, w, QT_PROGRESS_ACTIVATIONS, err));
    if (!c.data)
        goto done;
    QT_TRY(qt_array_new(&out->act, out->layers * QT_INPUTS, sizeof *out->act, err));
    *found = take_plan(&failed, out, &c, model, err);
    if (failed)
        rc = QT_E_RESOURCE;
    else if (!*found)
        rc = qt_fail(err, QT_E_RESUME, NULL, NULL,
                     "cannot resume: what was chosen of activations so far is not of this run");
done:
    if (rc < 0)
        qt_act_plan_free(out);
    qt_free(c.data);
    return rc;
}
