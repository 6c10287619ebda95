/* Regular expressions over tensor names (PCRE2), with memory from base/mem.h. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "pack/pack.h"

#include <pcre2.h>
#include <string.h>

struct qt_name_regex {
    pcre2_general_context *general;
    pcre2_code *code;
    pcre2_match_data *match;
};

static void *regex_malloc(size_t size, void *ctx)
{
    (void)ctx;
    return qt_malloc(size);
}

static void regex_free(void *p, void *ctx)
{
    (void)ctx;
    qt_free(p);
}

static int compile(struct qt_name_regex *re, const char *text, size_t size, const char *what,
                   struct qt_err *err)
{
    int error = 0;
    PCRE2_SIZE at;
    unsigned char reason[128];
    pcre2_compile_context *ctx = pcre2_compile_context_create(re->general);
    if (ctx)
        re->code = pcre2_compile((PCRE2_SPTR)text, size, PCRE2_UTF, &error, &at, ctx);
    pcre2_compile_context_free(ctx);
    if (re->code)
        return QT_OK;
    if (!ctx || error == PCRE2_ERROR_HEAP_FAILED)
        return qt_no_memory(err, NULL);
    pcre2_get_error_message(error, reason, sizeof reason);
    return qt_fail(err, QT_E_USAGE, NULL, NULL, "%s '%.*s': %s at character %zu", what, (int)size,
                   text, (const char *)reason, at);
}

int qt_name_regex_new(struct qt_name_regex **out, const char *text, size_t size, const char *what,
                      struct qt_err *err)
{
    int rc;
    QT_TRY(qt_array_new(out, 1, sizeof **out, err));
    (*out)->general = pcre2_general_context_create(regex_malloc, regex_free, NULL);
    if ((*out)->general)
        (*out)->match = pcre2_match_data_create(1, (*out)->general);
    QT_TRY((*out)->match ? compile(*out, text, size, what, err) : qt_no_memory(err, NULL));
done:
    if (rc < 0) {
        qt_name_regex_free(*out);
        *out = NULL;
    }
    return rc;
}

void qt_name_regex_free(struct qt_name_regex *re)
{
    if (!re)
        return;
    pcre2_code_free(re->code);
    pcre2_match_data_free(re->match);
    pcre2_general_context_free(re->general);
    qt_free(re);
}

int qt_name_regex_match(bool *found, const struct qt_name_regex *re, const char *name,
                        struct qt_err *err)
{
    unsigned char reason[128];
    int n = pcre2_match(re->code, (PCRE2_SPTR)name, strlen(name), 0, 0, re->match, NULL);
    *found = n >= 0;
    if (n >= 0 || n == PCRE2_ERROR_NOMATCH)
        return QT_OK;
    if (n == PCRE2_ERROR_NOMEMORY || n == PCRE2_ERROR_HEAPLIMIT)
        return qt_no_memory(err, NULL);
    pcre2_get_error_message(n, reason, sizeof reason);
    return qt_fail(err, QT_E_USAGE, NULL, name, "a regular expression cannot be matched: %s",
                   (const char *)reason);
}
