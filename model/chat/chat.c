/* The chat template of a model: where it is, and what it is given. */
#include "model/chat/chat.h"

#include <string.h>

#define TEMPLATE_LIMIT ((size_t)1 << 20)
#define CONFIG_LIMIT   ((size_t)256 << 20)

struct qt_chat {
    char *file; /* that holds the template */
    char *text;
    struct chat_tree tree;
    json_t *globals; /* bos_token, eos_token, ... */
};

/* A special token is a string, or an object with "content". */
static const json_t *token_text(const json_t *token)
{
    return json_is_object(token) ? json_object_get(token, "content") : token;
}

static int load_tokens(struct qt_chat *chat, const json_t *config, struct qt_err *err)
{
    const char *key;
    json_t *value;
    json_object_foreach ((json_t *)(uintptr_t)config, key, value) {
        const size_t n = strlen(key);
        const json_t *text = token_text(value);
        if (n > 6 && strcmp(key + n - 6, "_token") == 0 && json_is_string(text) &&
            json_object_set_nocheck(chat->globals, key, (json_t *)(uintptr_t)text) < 0)
            return qt_no_memory(err, NULL);
    }
    return QT_OK;
}

/* "chat_template" is a template, or a list of named ones. */
static const json_t *default_template(const json_t *value)
{
    const json_t *found = value;
    for (size_t i = 0; i < json_array_size(value); i++) {
        const json_t *item = json_array_get(value, i);
        const char *name = json_string_value(json_object_get(item, "name"));
        if (name && strcmp(name, "default") == 0)
            found = json_object_get(item, "template");
    }
    return json_is_string(found) ? found : NULL;
}

static int load_json(json_t **out, const char *file, struct qt_err *err)
{
    char *text = NULL;
    size_t size;
    int rc = qt_file_read(&text, &size, file, CONFIG_LIMIT, err);
    if (rc == QT_OK) /* as data: numbers of any size */
        rc = qt_json_parse_data(out, text, size, 1, "\\ufffd", file, err);
    qt_free(text);
    return rc;
}

/* Takes the template of a JSON file, unless there is one already, and its special tokens. */
static int load_config(struct qt_chat *chat, const char *dir, const char *name, struct qt_err *err)
{
    json_t *config = NULL;
    char *file;
    int rc = qt_path_join(&file, dir, name, err);
    if (rc < 0)
        return rc;
    if (!qt_path_exists(file))
        goto done;
    QT_TRY(load_json(&config, file, err));
    QT_TRY(load_tokens(chat, config, err));
    const json_t *template = default_template(json_object_get(config, "chat_template"));
    if (!template || chat->text)
        goto done;
    if (strlen(json_string_value(template)) != json_string_length(template)) {
        rc = qt_fail(err, QT_E_INPUT, file, NULL, "the chat template has a NUL character");
        goto done;
    }
    QT_TRY(qt_string_copy(&chat->text, json_string_value(template), err));
    chat->file = file;
    file = NULL;
done:
    json_decref(config);
    qt_free(file);
    return rc;
}

static int load_file(struct qt_chat *chat, const char *dir, struct qt_err *err)
{
    char *file;
    size_t size;
    int rc;
    QT_TRY(qt_path_join(&file, dir, "chat_template.jinja", err));
    if (qt_path_exists(file)) {
        QT_TRY(qt_file_read(&chat->text, &size, file, TEMPLATE_LIMIT, err));
        if (strlen(chat->text) != size || qt_utf8_check(chat->text, size) < size)
            rc = qt_fail(err, QT_E_INPUT, file, NULL, "the chat template is not UTF-8 text");
        chat->file = file;
        file = NULL;
    }
done:
    qt_free(file);
    return rc;
}

/* A line ends with \n for a template, whatever the file has. */
static void drop_carriage_returns(char *text)
{
    char *to = text;
    for (const char *p = text; *p; p++) {
        if (*p == '\r')
            *to++ = '\n', p += p[1] == '\n';
        else
            *to++ = *p;
    }
    *to = '\0';
}

int qt_chat_open(struct qt_chat **out, const char *dir, struct qt_err *err)
{
    static const char *const configs[] = {"tokenizer_config.json", "chat_template.json",
                                          "processor_config.json"};
    struct qt_chat *chat;
    int rc = qt_array_new(&chat, 1, sizeof *chat, err);
    *out = NULL;
    if (rc < 0)
        return rc;
    chat->globals = json_object();
    if (!chat->globals)
        rc = qt_no_memory(err, NULL);
    if (rc == QT_OK)
        rc = load_file(chat, dir, err);
    for (size_t i = 0; rc == QT_OK && i < sizeof configs / sizeof *configs; i++)
        rc = load_config(chat, dir, configs[i], err);
    if (rc == QT_OK && !chat->text)
        rc = qt_fail(err, QT_E_INPUT, dir, NULL,
                     "the model has no chat template (chat_template.jinja, or \"chat_template\" in "
                     "tokenizer_config.json)");
    if (rc == QT_OK && strlen(chat->text) > TEMPLATE_LIMIT)
        rc = qt_fail(err, QT_E_UNSUPPORTED, chat->file, NULL, "the chat template is too long");
    if (rc == QT_OK) {
        drop_carriage_returns(chat->text);
        rc = chat_parse(&chat->tree, chat->text, chat->file, err);
    }
    if (rc < 0)
        qt_chat_close(chat);
    else
        *out = chat;
    return rc;
}

void qt_chat_close(struct qt_chat *chat)
{
    if (!chat)
        return;
    chat_tree_free(&chat->tree);
    json_decref(chat->globals);
    qt_free(chat->text);
    qt_free(chat->file);
    qt_free(chat);
}

/* ---- rendering ------------------------------------------------------------------------------ */

/* Variables that templates read without a test. */
static void set_variables(struct chat_run *r, const struct qt_chat *chat, const json_t *messages,
                          const json_t *tools, bool prompt)
{
    const char *key;
    json_t *value;
    json_object_foreach (chat->globals, key, value)
        chat_set(r, key, value);
    chat_set(r, "messages", (json_t *)(uintptr_t)messages);
    chat_set(r, "tools", tools ? (json_t *)(uintptr_t)tools : json_null());
    chat_set(r, "documents", json_null());
    chat_set(r, "add_generation_prompt", json_boolean(prompt));
}

int qt_chat_render(char **text, size_t *size, const struct qt_chat *chat, const json_t *messages,
                   const json_t *tools, bool prompt, struct qt_err *err)
{
    struct chat_text out = {0};
    struct chat_run *r;
    int rc = qt_array_new(&r, 1, sizeof *r, err);
    *text = NULL;
    *size = 0;
    if (rc < 0)
        return rc;
    r->err = err;
    r->file = chat->file;
    r->out = &out;
    for (int i = 0; i < 2; i++) { /* the variables given, and those of the template's top level */
        r->scopes[i] = chat_keep(r, json_object());
        r->nscopes += r->rc == QT_OK;
        if (i == 0 && r->rc == QT_OK)
            set_variables(r, chat, messages, tools, prompt);
    }
    chat_execute(r, chat->tree.root);
    chat_emit(r, &out, "", 1); /* a NUL after the text */
    rc = r->rc;
    for (size_t i = r->count; i-- > 0;) /* containers before their elements: no deep recursion */
        json_decref(r->pool[i]);
    qt_free(r->pool);
    qt_free(r);
    if (rc < 0) {
        qt_free(out.data);
        return rc;
    }
    *text = out.data;
    *size = out.size - 1;
    return QT_OK;
}
