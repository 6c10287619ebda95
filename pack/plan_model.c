/*
 * Checks of a plan that need the model: ties, learning, w4ax and the scales of a KV cache. A file
 * of its own, because it calls pack/activations/plan.c, which calls plan.c.
 */
#include "pack/activations/plan.h"
#include "pack/schemes/scheme.h"

#include <string.h>

static const char *item_scheme(const struct qt_plan_item *item)
{
    return item->copied ? "none" : item->packed->spec.text;
}

/* Tied tensors must stay equal, or the model cannot be run. */
static int check_tied(const struct qt_plan *plan, const struct qt_model *model, struct qt_err *err)
{
    const char *embedding, *head = qt_model_tied_head(model, &embedding);
    const struct qt_plan_item *embedding_item = qt_plan_find(plan, embedding);
    const struct qt_plan_item *head_item = head ? qt_plan_find(plan, head) : NULL;
    if (!embedding_item || !head_item ||
        strcmp(item_scheme(embedding_item), item_scheme(head_item)) == 0)
        return QT_OK;
    return qt_fail(err, QT_E_UNSUPPORTED, head_item->tensor->file, head,
                   "has scheme %s, but %s has %s: both need the same scheme, because "
                   "'tie_word_embeddings' in config.json ties them",
                   item_scheme(head_item), embedding, item_scheme(embedding_item));
}

/* Static keys have two tensors per layer: scale and zero. */
static int plan_kv(struct qt_plan *plan, const struct qt_ckpt *ckpt, const struct qt_model *model,
                   struct qt_err *err)
{
    const struct qt_model_info *info = qt_model_info(model);
    const char *part = qt_model_cannot(model, QT_USE_KV4);
    int rc = QT_OK;
    if (part)
        return qt_fail(err, QT_E_UNSUPPORTED, qt_ckpt_path(ckpt), NULL, "--kv does not support %s",
                       part);
    plan->kv.layers = info->layers;
    plan->kv.heads = info->kv_heads;
    plan->kv.head_dim = info->head_dim;
    if (plan->kv.keys != QT_KV_KEYS_STATIC)
        return QT_OK;
    plan->kv.bytes = 2 * info->layers * info->kv_heads * info->head_dim * sizeof(float);
    plan->output_bytes += plan->kv.bytes;
    for (size_t i = 0; i < 2 * info->layers && rc == QT_OK; i++) {
        char *name;
        rc = qt_kv_tensor_name(&name, i / 2, i % 2 ? "zero" : "scale", err);
        if (rc == QT_OK && qt_ckpt_find(ckpt, name))
            rc = qt_fail(err, QT_E_UNSUPPORTED, qt_ckpt_path(ckpt), name,
                         "its name collides with a key scale that --kv stores");
        qt_free(name);
    }
    return rc;
}

int qt_plan_check_model(struct qt_plan *plan, const struct qt_ckpt *ckpt, struct qt_err *err)
{
    const struct qt_weights source = qt_weights_of_ckpt(ckpt);
    const bool needed = qt_plan_needs(plan, NULL) != QT_NEEDS_NOTHING || plan->kv.keys;
    struct qt_err inner = {0};
    struct qt_model *model = NULL;
    int rc = qt_model_open(&model, &source, needed ? err : &inner);
    if (!needed && rc == QT_E_RESOURCE && err)
        *err = inner;
    else if (!needed && rc != QT_E_RESOURCE) /* a model that qtool cannot run is fine here */
        rc = QT_OK;
    if (!model)
        return rc;
    QT_TRY(check_tied(plan, model, err));
    if (!needed)
        goto done;
    const char *part = qt_model_cannot(model, QT_USE_LEARN);
    for (size_t i = 0; i < plan->count; i++) {
        const struct qt_tensor *t = plan->items[i].tensor;
        if (!plan->items[i].copied && qt_spec_learns(&plan->items[i].packed->spec) &&
            (part || !qt_model_is_linear(model, t->name))) {
            rc = part ? qt_fail(err, QT_E_UNSUPPORTED, t->file, t->name,
                                "learn=1 does not support %s", part)
                      : qt_fail(err, QT_E_UNSUPPORTED, t->file, t->name,
                                "learn=1 needs a linear weight of a decoder layer, which this "
                                "tensor is not");
            goto done;
        }
    }
    QT_TRY(qt_act_plan_check(plan, model, err));
    if (plan->kv.keys)
        QT_TRY(plan_kv(plan, ckpt, model, err));
done:
    qt_model_close(model);
    return rc;
}
