/* The state file: what was measured, for a run that continues or has another target. */
#include "verify/budget/budget.h"

#include <math.h>

enum { MAX_STATE = 64 << 20 };

/* Returns the facts that measurements depend on: a state file with others is refused. NULL: it
 * failed. */
static json_t *state_head(const struct budget *b, struct qt_err *err)
{
    const struct qt_calibration *data = b->opt->data;
    uint32_t crc;
    if (qt_ckpt_sample_crc(&crc, b->ckpt, err) < 0)
        return NULL;
    json_t *head = json_pack(
        "{s:s, s:i, s:s, s:o, s:o, s:I, s:I, s:I, s:I}", "format", "qtool-sensitivity", "version",
        3, "qtool", QT_VERSION, "sample_crc32", qt_crc_json(crc), "ids_crc32",
        qt_crc_json(qt_crc32(0, data->ids, data->samples * data->seqlen * sizeof *data->ids)),
        "samples", (json_int_t)data->samples, "seqlen", (json_int_t)data->seqlen, "measured",
        (json_int_t)b->opt->measured.samples, "checked", (json_int_t)b->opt->checked.samples);
    if (!head)
        qt_no_memory(err, NULL);
    return head;
}

static int check_head(const json_t *state, json_t *head, const char *path, struct qt_err *err)
{
    const char *key;
    json_t *value;
    if (!json_equal(json_object_get(head, "format"), json_object_get(state, "format")))
        return qt_fail(err, QT_E_USAGE, path, NULL, "is not a file that --sensitivity has written");
    json_object_foreach (head, key, value) {
        if (!json_equal(value, json_object_get(state, key)))
            return qt_fail(err, QT_E_USAGE, path, NULL,
                           "was made for another checkpoint, data or version: '%s' differs", key);
    }
    return QT_OK;
}

/* The measurements then are those with the scheme of the file. */
static int find_base(struct budget *b, struct qt_err *err)
{
    const char *scheme = NULL;
    size_t base = 0;
    int rc;
    QT_TRY(qt_json_need_string(&scheme, b->state, "scheme", b->opt->state, err));
    while (base < b->opt->nchoices && strcmp(b->opt->choices[base], scheme) != 0)
        base++;
    if (base == b->opt->nchoices)
        QT_TRY(qt_fail(err, QT_E_USAGE, b->opt->state, NULL,
                       "has measurements with %s: add it to --choices", scheme));
    b->base = base;
done:
    return rc;
}

/* state[section][name], NULL: unknown. */
static const json_t *get(const struct budget *b, const char *section, const char *name)
{
    return json_object_get(json_object_get(b->state, section), name);
}

static double number_or_nan(const json_t *value)
{
    return json_is_number(value) ? json_number_value(value) : NAN;
}

int budget_load(struct budget *b, struct qt_err *err)
{
    const char *path = b->opt->state;
    json_t *head = state_head(b, err);
    int rc = head ? QT_OK : (int)QT_E_RESOURCE;
    if (head && path && qt_path_exists(path)) {
        QT_TRY(qt_json_load(&b->state, path, MAX_STATE, err));
        QT_TRY(check_head(b->state, head, path, err));
        QT_TRY(find_base(b, err));
    } else {
        b->state = json_incref(head);
    }
    b->whole = number_or_nan(json_object_get(b->state, "kld"));
    b->whole_se = number_or_nan(json_object_get(b->state, "kld_se"));
    for (size_t g = 0; g < b->ngroups; g++) {
        struct group *one = &b->groups[g];
        one->kld = number_or_nan(get(b, "groups", one->key));
        for (size_t c = 0; c < b->opt->nchoices; c++)
            one->error[c] =
                number_or_nan(json_object_get(get(b, "errors", b->opt->choices[c]), one->key));
    }
done:
    json_decref(head);
    return rc;
}

void budget_load_probe(struct probe *probe, const struct budget *b, const char *key)
{
    const json_t *of_choice = get(b, "kinds", b->opt->choices[probe->choice]);
    probe->kld = number_or_nan(json_object_get(of_choice, key));
}

/* ---- writing -------------------------------------------------------------------------------- */

/* The object parent[name], which is made if there is none; NULL: no memory. */
static json_t *within(json_t *parent, const char *name)
{
    json_t *object = json_object_get(parent, name);
    if (!object && json_object_set_new(parent, name, json_object()) == 0)
        object = json_object_get(parent, name);
    return object;
}

/* Sets a number if it is known; false: no memory. */
static bool set(json_t *object, const char *key, double value)
{
    return isnan(value) || json_object_set_new(object, key, json_real(value)) == 0;
}

static bool set_probe(json_t *kinds, const struct budget *b, const struct probe *probe,
                      const char *key)
{
    return isnan(probe->kld) || set(within(kinds, b->opt->choices[probe->choice]), key, probe->kld);
}

static bool set_all(const struct budget *b)
{
    json_t *state = b->state, *groups = within(state, "groups"), *kinds = within(state, "kinds"),
           *errors = within(state, "errors");
    bool ok = json_object_set_new(state, "scheme", json_string(b->opt->choices[b->base])) == 0 &&
              set(state, "kld", b->whole) && set(state, "kld_se", b->whole_se);
    for (size_t g = 0; g < b->ngroups; g++) {
        const struct group *one = &b->groups[g];
        ok &= set(groups, one->key, one->kld);
        for (size_t c = 0; c < b->opt->nchoices; c++)
            ok &= set(within(errors, b->opt->choices[c]), one->key, one->error[c]);
    }
    for (size_t k = 0; k < b->nkinds; k++) {
        const struct kind *one = &b->kinds[k];
        ok &= set_probe(kinds, b, &one->better, one->key);
        ok &= set_probe(kinds, b, &one->worse, one->key);
    }
    return ok && set_probe(kinds, b, &b->late, BUDGET_LATE_KEY);
}

int budget_save(const struct budget *b, struct qt_err *err)
{
    char *text = NULL;
    size_t size;
    int rc;
    if (!b->opt->state)
        return QT_OK;
    if (!set_all(b))
        return qt_no_memory(err, NULL);
    rc = qt_json_text(&text, &size, b->state, JSON_INDENT(1) | JSON_SORT_KEYS, err);
    if (rc == QT_OK)
        rc = qt_file_publish(b->opt->state, &(struct qt_file_piece){text, size}, 1, NULL, err);
    qt_free(text);
    return rc;
}
