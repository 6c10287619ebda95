/*
 * Refuses checkpoints that would be quantized with success, but in vain: quantized ones that cannot
 * be dequantized, adapters, and those that hold no linear weights. Every refusal names what it was
 * recognized by.
 */
#include "pack/guard.h"
#include "pack/roles.h"

#include <stdio.h>
#include <string.h>

enum { MAX_CONFIG = 16 << 20 };

struct guard {
    const struct qt_plan *plan;
    const struct qt_ckpt *ckpt;
    json_t *config; /* NULL: there is no config.json */
    char *path;     /* of config.json */
};

/* ---- files beside the weights --------------------------------------------------------------- */

/* Reads a JSON object. *out is NULL if there is no such file. A file that cannot be read is an
 * error: it may say that the checkpoint should not be quantized. */
static int load_object(json_t **out, char **path, const char *dir, const char *name,
                       struct qt_err *err)
{
    int rc = qt_path_join(path, dir, name, err);
    *out = NULL;
    if (rc < 0 || !qt_path_exists(*path))
        return rc;
    rc = qt_json_load_lenient(out, *path, MAX_CONFIG, err);
    if (rc == QT_OK && !json_is_object(*out))
        rc = qt_fail(err, QT_E_INPUT, *path, NULL, "is %s, but an object is expected",
                     qt_json_type(*out));
    return rc;
}

/* ---- quantized already ---------------------------------------------------------------------- */

static int fail_quantized(const char *file, const char *tensor, const char *evidence,
                          struct qt_err *err)
{
    return qt_fail(err, QT_E_UNSUPPORTED, file, tensor,
                   "the checkpoint is already quantized (%s): give the FP16, BF16 or FP32 "
                   "checkpoint that it was made from",
                   evidence);
}

/* True for a section in any form: what cannot be understood must not let quantized weights pass. */
static bool is_section(const json_t *v)
{
    return json_is_object(v) || json_array_size(v) > 0 || json_string_length(v) > 0;
}

/* Finds the key of a section that describes quantized weights, in `obj` or an object in it. */
static const char *find_section(const json_t *obj, bool is_decoder)
{
    static const char *const anywhere[] = {"quantization_config", "quantize_config", "quant_config",
                                           "compression_config"};
    static const char *const decoders[] = {"text_config", "llm_config", "language_config",
                                           "thinker_config", "decoder"};
    const char *key, *found = NULL;
    json_t *value;
    for (size_t i = 0; i < sizeof anywhere / sizeof *anywhere; i++)
        if (is_section(json_object_get(obj, anywhere[i])))
            return anywhere[i];
    /* Elsewhere, as in the configuration of an audio codec, this word means something else. */
    if (is_decoder && json_is_object(json_object_get(obj, "quantization")))
        return "quantization";
    json_object_foreach ((json_t *)(uintptr_t)obj, key, value) {
        bool decoder = false;
        for (size_t i = 0; i < sizeof decoders / sizeof *decoders; i++)
            decoder |= strcmp(key, decoders[i]) == 0;
        found = json_is_object(value) ? find_section(value, decoder) : NULL;
        if (found)
            break;
    }
    return found;
}

/* True if the dtype can only hold codes or scales of quantized weights. */
static bool is_code_dtype(enum qt_dtype t)
{
    return qt_dtype_bits(t) < 8 || t == QT_F8_E5M2 || t == QT_F8_E4M3 || t == QT_F8_E8M0 ||
           t == QT_F8_E4M3FNUZ || t == QT_F8_E5M2FNUZ;
}

/* True for names that quantizers give to codes and scales. */
static bool has_code_name(const struct qt_tensor *t)
{
    static const char *const words[] = {"qweight",
                                        "qzeros",
                                        "qscales",
                                        "g_idx",
                                        "absmax",
                                        "nested_absmax",
                                        "quant_map",
                                        "quant_state",
                                        "nested_quant_map",
                                        "SCB",
                                        "W_q",
                                        "Qidxs",
                                        "q_weight",
                                        "q_scale",
                                        "q_invperm",
                                        "trellis",
                                        "codebooks",
                                        "weight_packed",
                                        "weight_scale*",
                                        "weight_zero_point",
                                        "weight_global_scale",
                                        "weight_shape",
                                        "weight_g_idx",
                                        "pre_quant_scale",
                                        "bitmask",
                                        "weight_qdata",
                                        "_weight_qdata",
                                        "_weight_scale",
                                        NULL};
    static const char *const endings[] = {"_scale_inv", "_weight_scale", "_weight_packed"};
    static const char *const of_integers[] = {"_blocks", "_scales", "_qweight"}; /* MXFP4 */
    if (qt_name_has_component(t->name, words))
        return true;
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++)
        if (qt_name_ends_in(t->name, endings[i]))
            return true;
    for (size_t i = 0; i < sizeof of_integers / sizeof *of_integers; i++)
        if (!qt_dtype_is_weight(t->dtype) && qt_name_ends_in(t->name, of_integers[i]))
            return true;
    return false;
}

/* True for integers in the place of weights. */
static bool is_integer_weight(const struct qt_tensor *t)
{
    return t->ndim >= 2 && !qt_dtype_is_weight(t->dtype) && t->dtype != QT_BOOL &&
           t->dtype != QT_C64 &&
           (qt_name_ends_in(t->name, ".weight") || strstr(t->name, ".experts."));
}

/* Finds a tensor that shows that the weights are quantized. */
static const struct qt_tensor *find_codes(char evidence[64], const struct qt_plan *plan)
{
    for (size_t i = 0; i < plan->count; i++) {
        const struct qt_tensor *t = plan->items[i].tensor;
        const char *dtype = qt_dtype_name(t->dtype);
        if (is_code_dtype(t->dtype) || is_integer_weight(t))
            snprintf(evidence, 64, "this tensor has dtype %s", dtype);
        else if (has_code_name(t))
            snprintf(evidence, 64, "a quantizer gives this name to codes or scales");
        else
            continue;
        return t;
    }
    return NULL;
}

/* With a section in config.json, any matrix of integers holds codes. */
static const struct qt_tensor *find_integers(const struct qt_plan *plan)
{
    for (size_t i = 0; i < plan->count; i++) {
        const struct qt_tensor *t = plan->items[i].tensor;
        if (t->ndim >= 2 && !qt_dtype_is_weight(t->dtype))
            return t;
    }
    return NULL;
}

/* Files in which quantizers describe what they made. ModelOpt also writes one if it only chose the
 * type of the KV cache; then its quant_algo is null. */
static int check_quantizer_files(const struct guard *g, struct qt_err *err)
{
    static const char *const names[] = {"hf_quant_config.json", "quantize_config.json",
                                        "quant_config.json", "quantization_config.json"};
    int rc = QT_OK;
    for (size_t i = 0; i < sizeof names / sizeof *names && rc == QT_OK; i++) {
        json_t *file = NULL;
        char *path = NULL;
        rc = load_object(&file, &path, qt_ckpt_dir(g->ckpt), names[i], err);
        const json_t *section = json_object_get(file, "quantization");
        if (file && rc == QT_OK && !json_is_null(json_object_get(section, "quant_algo")))
            rc = fail_quantized(path, NULL, "a quantizer writes this file", err);
        json_decref(file);
        qt_free(path);
    }
    return rc;
}

/* Tensors that are dequantized on reading are no reason to refuse. */
static int check_quantized(const struct guard *g, struct qt_err *err)
{
    char evidence[64], text[80];
    const char *section = g->config ? find_section(g->config, true) : NULL;
    const struct qt_tensor *codes = find_codes(evidence, g->plan);
    int rc = qt_ckpt_check_readable(g->ckpt, err);
    if (rc < 0)
        return rc;
    if (section && (codes || !qt_ckpt_is_encoded(g->ckpt))) {
        const struct qt_tensor *t = codes ? codes : find_integers(g->plan);
        snprintf(text, sizeof text, "%s in config.json%s", section,
                 t ? "" : "; remove it if the weights are not quantized");
        return fail_quantized(g->path, t ? t->name : NULL, text, err);
    }
    if (codes)
        return fail_quantized(codes->file, codes->name, evidence, err);
    return qt_ckpt_is_encoded(g->ckpt) ? QT_OK : check_quantizer_files(g, err);
}

/* ---- adapters ------------------------------------------------------------------------------- */

/* base: the name of the base model, or NULL. beside: linear weights of a model are there too. */
static int fail_adapter(const char *file, const char *tensor, const char *base, bool beside,
                        struct qt_err *err)
{
    return qt_fail(err, QT_E_UNSUPPORTED, file, tensor,
                   "this is an adapter, not a model: merge it into its base model%s%s first (with "
                   "PEFT: merge_and_unload), then quantize the result%s",
                   base ? " " : "", base ? base : "",
                   beside ? "; if the weights beside it are merged already, remove this file" : "");
}

static int check_adapter(const struct guard *g, struct qt_err *err)
{
    const struct qt_tensor *adapter = NULL;
    json_t *file = NULL;
    char *path = NULL;
    /* wrapped: all names are those of PEFT; active: the name that PEFT gives to an only adapter. */
    bool linears = false, wrapped = true, active = false;
    int rc = load_object(&file, &path, qt_ckpt_dir(g->ckpt), "adapter_config.json", err);
    for (size_t i = 0; i < g->plan->count; i++) {
        const struct qt_plan_item *item = &g->plan->items[i];
        if (qt_name_is_adapter(item->tensor->name)) {
            adapter = adapter ? adapter : item->tensor;
            active |= strstr(item->tensor->name, ".default.") != NULL;
        }
        linears |= item->linear;
        wrapped &= strncmp(item->tensor->name, "base_model.", strlen("base_model.")) == 0;
    }
    if (rc == QT_OK && file)
        rc = fail_adapter(path, NULL,
                          json_string_value(json_object_get(file, "base_model_name_or_path")),
                          linears, err);
    else if (
        rc == QT_OK && adapter &&
        /* Some models have adapters of other names, for images or speech, beside their weights. */
        (wrapped || active || !linears))
        rc = fail_adapter(adapter->file, adapter->name, NULL, false, err);
    json_decref(file);
    qt_free(path);
    return rc;
}

/* ---- tensors -------------------------------------------------------------------------------- */

static int check_empty(const struct guard *g, struct qt_err *err)
{
    for (size_t i = 0; i < g->plan->count; i++) {
        const struct qt_tensor *t = g->plan->items[i].tensor;
        if (t->count == 0 && qt_dtype_is_weight(t->dtype) &&
            (t->ndim >= 2 || qt_name_ends_in(t->name, ".weight")))
            return qt_fail(err, QT_E_INPUT, t->file, t->name,
                           "has no elements: the checkpoint was saved without its values (as "
                           "DeepSpeed ZeRO-3 and FSDP do unless they gather the parameters first)");
    }
    return QT_OK;
}

static int fail_no_linears(const struct guard *g, struct qt_err *err)
{
    struct qt_left left[QT_LEFT_MAX];
    char text[512] = "";
    size_t n = qt_plan_left(left, g->plan), at = 0;
    for (size_t i = 0; i < n && at < sizeof text - 1; i++)
        at += (size_t)snprintf(text + at, sizeof text - at, "%s%zu %s", i ? ", " : "",
                               left[i].count, left[i].why);
    return qt_fail(err, QT_E_UNSUPPORTED, qt_ckpt_path(g->ckpt), NULL,
                   "nothing to quantize: no tensor is a matrix of a decoder layer, like "
                   "model.layers.0.self_attn.q_proj.weight (%s); --tensor names others",
                   n ? text : "there are no tensors");
}

int qt_guard_check(const struct qt_plan *plan, const struct qt_ckpt *ckpt, bool no_linears,
                   struct qt_err *err)
{
    struct guard g = {.plan = plan, .ckpt = ckpt};
    int rc;
    QT_TRY(load_object(&g.config, &g.path, qt_ckpt_dir(ckpt), "config.json", err));
    QT_TRY(check_quantized(&g, err));
    QT_TRY(check_adapter(&g, err));
    QT_TRY(check_empty(&g, err));
    if (no_linears)
        rc = fail_no_linears(&g, err);
done:
    json_decref(g.config);
    qt_free(g.path);
    return rc;
}
