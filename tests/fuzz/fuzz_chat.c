/* Chat templates: an accepted template writes UTF-8 text, or refuses the conversation. */
#include "model/model.h"
#include "tests/fuzz/fuzz.h"

#include <string.h>

static json_t *messages, *tools;

void fuzz_init(void)
{
    struct qt_err err = {0};
    json_t *golden;
    fuzz_ok(qt_json_load(&golden, "tests/golden/chat.json", 1 << 20, &err), &err);
    messages = json_incref(json_object_get(golden, "messages"));
    tools = json_incref(json_object_get(golden, "tools"));
    json_decref(golden);
    static const char config[] = "{\"bos_token\": \"<s>\"}";
    fuzz_write("tokenizer_config.json", config, strlen(config));
}

void fuzz_one(const uint8_t *data, size_t size)
{
    struct qt_err err = {0};
    struct qt_chat *chat;
    char *text;
    fuzz_write("chat_template.jinja", data, size);
    int rc = qt_chat_open(&chat, fuzz_dir(), &err);
    if (!fuzz_accepted(rc, &err))
        return;
    rc = qt_chat_render(&text, &size, chat, messages, tools, true, &err);
    if (fuzz_accepted(rc, &err)) {
        FUZZ_CHECK(text[size] == '\0' && qt_utf8_check(text, size) == size);
        qt_free(text);
    }
    qt_chat_close(chat);
}
