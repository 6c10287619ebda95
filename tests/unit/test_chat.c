/* Chat templates against what Jinja2 makes of them (tests/golden/chat.json, made by
 * tests/oracle/make_chat_golden.py). */
#include "model/model.h"

#include "tests/unit/fixture.h"

#include <stdio.h>
#include <string.h>

static json_t *golden;
static char dir[64];

static void write_file(const char *name, const char *text)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, strlen(text), f), strlen(text));
    assert_int_equal(fclose(f), 0);
}

static int open_golden(void **state)
{
    struct qt_err err = {0};
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/qt_chat_XXXXXX");
    if (!mkdtemp(dir) || qt_json_load(&golden, "tests/golden/chat.json", 1 << 20, &err) < 0)
        return -1;
    write_file("tokenizer_config.json", "{\"bos_token\": \"<s>\", \"eos_token\": {\"content\": "
                                        "\"</s>\"}, \"pad_token\": null}");
    return 0;
}

static int close_golden(void **state)
{
    char command[96];
    (void)state;
    json_decref(golden);
    snprintf(command, sizeof command, "rm -r %s", dir);
    return system(command);
}

/* Renders the golden conversation with the template. */
static int render(char **text, size_t *size, const char *template, struct qt_err *err)
{
    struct qt_chat *chat;
    *text = NULL;
    write_file("chat_template.jinja", template);
    int rc = qt_chat_open(&chat, dir, err);
    if (rc == QT_OK)
        rc = qt_chat_render(text, size, chat, json_object_get(golden, "messages"),
                            json_object_get(golden, "tools"), false, err);
    qt_chat_close(chat);
    return rc;
}

static void test_golden(void **state)
{
    size_t i, good = 0, refused = 0;
    json_t *item;
    (void)state;
    json_array_foreach (json_object_get(golden, "cases"), i, item) {
        const char *template = json_string_value(json_object_get(item, "template"));
        const char *expected = json_string_value(json_object_get(item, "expected"));
        const char *reason = json_string_value(json_object_get(item, "refused"));
        struct qt_err err = {0};
        char *text;
        size_t size;
        const int rc = render(&text, &size, template, &err);
        if (expected) {
            if (rc < 0 || strcmp(text, expected) != 0)
                print_error("%.300s\nstatus %d %s\n%s\nexpected:\n%s\n", template, rc, err.reason,
                            text ? text : "", expected);
            assert_int_equal(rc, QT_OK);
            assert_int_equal(size, strlen(expected));
            assert_string_equal(text, expected);
            good++;
        } else {
            if (!strstr(err.reason, reason))
                print_error("%.300s\nstatus %d: %s\n", template, rc, err.reason);
            assert_true(rc == QT_E_INPUT || rc == QT_E_UNSUPPORTED);
            assert_non_null(strstr(err.reason, reason));
            refused++;
        }
        qt_free(text);
    }
    assert_true(good > 20 && refused > 20);
}

/* Where a template may be. */
static void test_places(void **state)
{
    struct qt_err err = {0};
    struct qt_chat *chat;
    char *text;
    size_t size;
    (void)state;
    write_file("chat_template.jinja", "file");
    write_file("chat_template.json", "{\"chat_template\": \"other\"}");
    assert_int_equal(qt_chat_open(&chat, dir, &err), QT_OK);
    assert_int_equal(
        qt_chat_render(&text, &size, chat, json_object_get(golden, "messages"), NULL, false, &err),
        QT_OK);
    assert_string_equal(text, "file");
    qt_free(text);
    qt_chat_close(chat);
    char path[128];
    snprintf(path, sizeof path, "%s/chat_template.jinja", dir);
    assert_int_equal(remove(path), 0);
    write_file("tokenizer_config.json",
               "{\"chat_template\": [{\"name\": \"rag\", \"template\": \"no\"}, "
               "{\"name\": \"default\", \"template\": \"{{ tools }}\\r\\n{{ bos_token }}\"}]}");
    assert_int_equal(qt_chat_open(&chat, dir, &err), QT_OK);
    assert_int_equal(
        qt_chat_render(&text, &size, chat, json_object_get(golden, "messages"), NULL, false, &err),
        QT_OK);
    assert_string_equal(text, "None\n");
    qt_free(text);
    qt_chat_close(chat);
    write_file("tokenizer_config.json", "{}");
    write_file("chat_template.json", "{}");
    assert_int_equal(qt_chat_open(&chat, dir, &err), QT_E_INPUT);
    assert_non_null(strstr(err.reason, "no chat template"));
    write_file("tokenizer_config.json", "{\"chat_template\": \"a\\u0000b\"}");
    assert_int_equal(qt_chat_open(&chat, dir, &err), QT_E_INPUT);
    write_file("tokenizer_config.json", "{\"bos_token\": \"<s>\", \"eos_token\": \"</s>\"}");
}

/* The nth allocation fails, for every n: an error and no leak. */
static void test_without_memory(void **state)
{
    const char *template = json_string_value(
        json_object_get(json_array_get(json_object_get(golden, "cases"), 16), "template"));
    long n;
    (void)state;
    for (n = 0;; n++) {
        struct qt_err err = {0};
        char *text;
        size_t size;
        qt_mem_fail_after(n);
        const int rc = render(&text, &size, template, &err);
        qt_mem_fail_after(-1);
        qt_free(text);
        if (rc == QT_OK)
            break;
        assert_int_equal(rc, QT_E_RESOURCE);
    }
    assert_true(n > 100);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden),
        cmocka_unit_test(test_without_memory),
        cmocka_unit_test(test_places),
    };
    return cmocka_run_group_tests(tests, open_golden, close_golden);
}
