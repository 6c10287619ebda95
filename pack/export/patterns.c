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
#include <stdio.h>
#include <string.h>

#define ANY_PREFIX "(.*\\.)?"

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

/* "re:", any prefix, the name, escaped, and what follows it. */
static void pattern(char out[PATTERN_MAX], const char *name, size_t size, const char *end)
{
    size_t n = (size_t)(stpcpy(out, "re:" ANY_PREFIX) - out);
    for (size_t i = 0; i < size && i < QT_TENSOR_NAME_MAX; i++) {
        if (!isalnum((unsigned char)name[i]) && name[i] != '_')
            out[n++] = '\\';
        out[n++] = name[i];
    }
    strcpy(out + n, end);
}

const char *qt_export_any_prefix(const char **module, const struct qt_export *x)
{
    if (!is_multimodal(x))
        return "";
    *module = behind_prefix(*module);
    return ANY_PREFIX;
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

/* Adds a text to the list unless the list has it. */
static int add(json_t *list, json_t *seen, const char *text)
{
    if (json_object_get(seen, text))
        return 0;
    return json_object_set_new(seen, text, json_true()) < 0
               ? -1
               : json_array_append_new(list, json_string(text));
}

/* Adds a module, or the whole part of it that is left. Programs without "re:" look for a component
 * or a part of a name, or match a regular expression from the start. */
static int add_left(json_t *list, json_t *seen, const struct qt_export *x,
                    const struct qt_tensor *t, const char *module, bool patterns)
{
    char text[PATTERN_MAX];
    const char *name = is_multimodal(x) ? behind_prefix(module) : module;
    const size_t part = is_multimodal(x) && t ? whole_part(x, t, name) : 0;
    if (!is_multimodal(x))
        return add(list, seen, module);
    if (patterns) {
        pattern(text, name, part ? part : strlen(name), part ? "" : "$");
        return add(list, seen, text);
    }
    const int size = (int)(part ? part - 1 : strlen(name)); /* without the dot */
    snprintf(text, sizeof text, "%.*s", size, name);
    if (add(list, seen, part ? text : module) < 0)
        return -1;
    snprintf(text, sizeof text, ".*%.*s%s", size, name, part ? "" : "$");
    return add(list, seen, text);
}

static int list_left(json_t **out, const struct qt_export *x, bool patterns, struct qt_err *err)
{
    char module[QT_TENSOR_NAME_MAX];
    json_t *seen = json_object();
    bool head = qt_export_has_head(x);
    *out = json_array();
    bool failed = !*out || !seen;
    for (size_t i = 0; i < x->ncopied && !failed; i++) {
        const struct qt_tensor *t = x->copied[i];
        if (t->ndim < 2 || !qt_export_module(module, t->name))
            continue;
        head = head || strcmp(module, "lm_head") == 0;
        failed = add_left(*out, seen, x, t, module, patterns) < 0;
    }
    failed = failed || (!head && add_left(*out, seen, x, NULL, "lm_head", patterns) < 0);
    json_decref(seen);
    if (!failed)
        return QT_OK;
    json_decref(*out);
    *out = NULL;
    return qt_no_memory(err, NULL);
}

int qt_export_left(json_t **out, const struct qt_export *x, struct qt_err *err)
{
    return list_left(out, x, false, err);
}

int qt_export_ignored(json_t **out, const struct qt_export *x, struct qt_err *err)
{
    return list_left(out, x, true, err);
}
