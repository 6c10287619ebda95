/*
 * Names of modules in the config.json of multimodal models. Programs load these under other names
 * than those of the checkpoint: transformers has model.language_model.layers where checkpoints
 * have language_model.model.layers or model.layers, and may leave out components within a vision
 * tower. So regular expressions ("re:...", matched from the start) name the part behind the
 * prefix, and the whole of a module whose tensors are not quantized.
 */
#include "pack/export/export.h"
#include "pack/roles.h"

#include <ctype.h>
#include <string.h>

enum { PATTERN_MAX = 2 * QT_TENSOR_NAME_MAX + 32 };

static bool is_multimodal(const struct qt_export *x)
{
    static const char *const keys[] = {"text_config", "thinker_config", "llm_config",
                                       "vision_config", "audio_config"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (json_is_object(json_object_get(x->config, keys[i])))
            return true;
    return false;
}

/* The name without the components in front that programs rename. */
static const char *behind_prefix(const char *name)
{
    static const char *const prefixes[] = {"model.", "language_model.", "text_model.", "thinker."};
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes;) {
        const size_t n = strlen(prefixes[i]);
        const bool found = strncmp(name, prefixes[i], n) == 0;
        name += found ? n : 0;
        i = found ? 0 : i + 1;
    }
    return name;
}

/* "re:(.*\.)?NAME", escaped, and what follows it. */
static void pattern(char out[PATTERN_MAX], const char *name, size_t size, const char *end)
{
    size_t n = (size_t)(stpcpy(out, "re:(.*\\.)?") - out);
    for (size_t i = 0; i < size && i < QT_TENSOR_NAME_MAX; i++) {
        if (!isalnum((unsigned char)name[i]) && name[i] != '_')
            out[n++] = '\\';
        out[n++] = name[i];
    }
    strcpy(out + n, end);
}

json_t *qt_export_module_json(const struct qt_export *x, const char *module)
{
    char text[PATTERN_MAX];
    if (!is_multimodal(x))
        return json_string(module);
    module = behind_prefix(module);
    pattern(text, module, strlen(module), "$");
    return json_string(text);
}

/* The size of the first component, with its dot, if everything in it is left as it is. */
static size_t whole_part(const struct qt_export *x, const struct qt_tensor *t, const char *module)
{
    const struct qt_role role = qt_role_of(qt_container_ckpt(x->container), t);
    const char *dot = strchr(module, '.');
    const size_t size = dot ? (size_t)(dot + 1 - module) : 0;
    if (!dot || strncmp(module, "layers.", size) == 0 || !role.why ||
        strcmp(role.why, "multimodal tensor") != 0)
        return 0;
    for (size_t i = 0; i < x->count; i++)
        if (strncmp(behind_prefix(x->matrix[i].module), module, size) == 0)
            return 0;
    return size;
}

int qt_export_ignored(json_t **out, const struct qt_export *x, struct qt_err *err)
{
    char module[QT_TENSOR_NAME_MAX], text[PATTERN_MAX];
    bool failed, head = false;
    if (!is_multimodal(x))
        return qt_export_left(out, x, err);
    *out = json_array();
    json_t *seen = json_object();
    failed = !*out || !seen;
    for (size_t i = 0; i < x->count; i++)
        head = head || x->matrix[i].head;
    for (size_t i = 0; i <= x->ncopied && !failed; i++) {
        const struct qt_tensor *t = i < x->ncopied ? x->copied[i] : NULL;
        if (t ? t->ndim < 2 || !qt_export_module(module, t->name) : head)
            continue;
        const char *name = t ? behind_prefix(module) : "lm_head";
        const size_t part = t ? whole_part(x, t, name) : 0;
        pattern(text, name, part ? part : strlen(name), part ? "" : "$");
        if (json_object_get(seen, text))
            continue;
        failed = json_object_set_new(seen, text, json_true()) < 0 ||
                 json_array_append_new(*out, json_string(text)) < 0;
    }
    json_decref(seen);
    if (!failed)
        return QT_OK;
    json_decref(*out);
    *out = NULL;
    return qt_no_memory(err, NULL);
}
