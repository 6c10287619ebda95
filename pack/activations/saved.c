/*
 * Saves and loads the activation plan. Making a plan takes two passes of many windows through the
 * model, so a resumed run uses the plan of the interrupted run. Layout of the file:
 *
 *   magic | for each input of w4ax linears: clip, order, factors, bits | JSON report
 */
#include "pack/activations/planner.h"

#include <string.h>

static const char magic[8] = "qtact 1";

struct cursor {
    unsigned char *data;
    size_t at, size;
};

/* ---- save ----------------------------------------------------------------------------------- */

/* Appends bytes; with c->data = NULL only counts them. */
static void write_bytes(struct cursor *c, const void *from, size_t bytes)
{
    if (c->data)
        memcpy(c->data + c->at, from, bytes);
    c->at += bytes;
}

static void write_plan(struct cursor *c, const struct qt_act_plan *p, const char *report)
{
    write_bytes(c, magic, sizeof magic);
    for (size_t v = 0; v < p->layers * QT_INPUTS; v++) {
        const struct qt_act *a = &p->act[v];
        if (!a->k)
            continue;
        write_bytes(c, &a->clip, sizeof a->clip);
        write_bytes(c, a->order, a->k * sizeof *a->order);
        write_bytes(c, a->factor, a->k * sizeof *a->factor);
        write_bytes(c, a->bits, qt_ceil_div(a->k, QT_ACT_BLOCK));
    }
    write_bytes(c, report, strlen(report));
}

int qt_act_plan_save(const struct qt_act_plan *p, struct qt_writer *w, struct qt_err *err)
{
    struct cursor c = {0};
    char *report = NULL;
    size_t size;
    int rc;
    QT_TRY(qt_json_text(&report, &size, p->report, JSON_COMPACT, err));
    write_plan(&c, p, report);
    QT_TRY(qt_array_new(&c.data, c.at, 1, err));
    c.at = 0;
    write_plan(&c, p, report);
    QT_TRY(qt_writer_save(w, QT_PROGRESS_ACTIVATIONS, c.data, c.at, err));
done:
    qt_free(c.data);
    qt_free(report);
    return rc;
}

/* ---- load ----------------------------------------------------------------------------------- */

static int read_bytes(void *to, struct cursor *c, size_t bytes, struct qt_err *err)
{
    if (bytes > c->size - c->at)
        return qt_fail(err, QT_E_INPUT, NULL, NULL, "the file ends too early");
    memcpy(to, c->data + c->at, bytes);
    c->at += bytes;
    return QT_OK;
}

static int read_input(struct qt_act *a, struct cursor *c, size_t k, const struct qt_spec *spec,
                      struct qt_err *err)
{
    int rc;
    QT_TRY(qt_act_new(a, k, 8, err));
    qt_act_set_spec(a, spec);
    QT_TRY(read_bytes(&a->clip, c, sizeof a->clip, err));
    QT_TRY(read_bytes(a->order, c, k * sizeof *a->order, err));
    QT_TRY(read_bytes(a->factor, c, k * sizeof *a->factor, err));
    QT_TRY(read_bytes(a->bits, c, qt_ceil_div(k, QT_ACT_BLOCK), err));
    QT_TRY(qt_act_check(a, NULL, NULL, err));
done:
    return rc;
}

static int read_plan(struct qt_act_plan *out, struct cursor *c, const struct qt_act_planner *p,
                     struct qt_err *err)
{
    size_t inputs = out->layers * QT_INPUTS;
    char start[sizeof magic];
    int rc;
    QT_TRY(read_bytes(start, c, sizeof start, err));
    if (!p->spec || memcmp(start, magic, sizeof magic) != 0)
        return qt_fail(err, QT_E_INPUT, NULL, NULL, "the magic number differs");
    QT_TRY(qt_array_new(&out->act, inputs, sizeof *out->act, err));
    for (size_t v = 0; v < inputs; v++)
        if (p->inputs[v].k)
            QT_TRY(read_input(&out->act[v], c, p->inputs[v].k, p->spec, err));
    QT_TRY(qt_json_parse(&out->report, (const char *)c->data + c->at, c->size - c->at, NULL, err));
done:
    return rc;
}

int qt_act_plan_load(bool *found, struct qt_act_plan *out, const struct qt_plan *plan,
                     const struct qt_model *model, const struct qt_writer *w, const char *dir,
                     struct qt_err *err)
{
    struct qt_act_planner p = {.model = model};
    struct qt_err inner = {0};
    struct cursor c = {0};
    int rc;
    *found = false;
    *out = (struct qt_act_plan){.layers = qt_model_info(model)->layers};
    QT_TRY(qt_writer_load(&c.data, &c.size, w, QT_PROGRESS_ACTIVATIONS, err));
    if (!c.data)
        goto done;
    QT_TRY(qt_act_find_inputs(&p, plan, err));
    rc = read_plan(out, &c, &p, &inner);
    *found = rc == QT_OK;
    if (rc == QT_E_INPUT)
        rc = qt_fail(err, QT_E_RESUME, dir, NULL,
                     "cannot resume: the saved activation plan does not belong to this run: %s",
                     inner.reason);
    else if (rc < 0)
        qt_fail(err, rc, NULL, NULL, "%s", inner.reason);
done:
    if (rc < 0)
        qt_act_plan_free(out);
    qt_free(p.inputs);
    qt_free(c.data);
    return rc;
}
