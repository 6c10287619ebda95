/* Characters of Unicode 16 whatever PCRE2 and utf8proc know. tests/oracle/make_unicode.py makes the
 * tables; DUMP=FILE writes the classes of all characters as PCRE2 finds them, for a comparison. */
#include "model/tokenizer/internal.h"

#include "tests/unit/fixture.h"

#include <stdio.h>
#include <string.h>

static const char *const classes[] = {"\\p{L}", "\\p{N}",  "\\p{P}",  "\\p{S}",
                                      "\\p{M}", "\\p{Lu}", "\\p{Han}"};
enum { CLASSES = sizeof classes / sizeof *classes, CHARS = 0x110000 };

/* Matches `pattern` in text[size] as PCRE2 with these characters sees it; calls found() for
 * each. */
static void scan(const char *pattern, const char *text, size_t size, struct qt_unicode_known known,
                 void (*found)(void *ctx, size_t start, size_t end), void *ctx)
{
    struct qt_err err = {0};
    struct qt_regex *regex;
    struct qt_regex_work *work;
    struct qt_text buffer = {0};
    size_t start, end;
    bool more;
    assert_int_equal(qt_regex_new(&regex, pattern, false, "test", &err), QT_OK);
    assert_int_equal(qt_regex_work_new(&work, text, size, NULL, &err), QT_OK);
    struct qt_regex_scan s = {.regex = regex, .work = work, .text = text, .size = size};
    assert_int_equal(qt_unicode_shadow(&s.seen, &buffer, known, text, size, &err), QT_OK);
    for (;;) {
        assert_int_equal(qt_regex_next(&more, &start, &end, &s, &err), QT_OK);
        if (!more)
            break;
        found(ctx, start, end);
    }
    qt_free(buffer.data);
    qt_regex_work_free(work);
    qt_regex_free(regex);
}

static void append_range(void *ctx, size_t start, size_t end)
{
    char *out = ctx;
    sprintf(out + strlen(out), "%zu-%zu ", start, end);
}

static const char *ranges(const char *pattern, const char *text, struct qt_unicode_known known)
{
    static char out[256];
    out[0] = '\0';
    scan(pattern, text, strlen(text), known, append_range, out);
    return out;
}

static const char *normalized(const char *text, enum qt_unicode_form form)
{
    static char out[64];
    struct qt_err err = {0};
    struct qt_text t = {0};
    assert_int_equal(qt_unicode_normalize(&t, text, strlen(text), form, &err), QT_OK);
    snprintf(out, sizeof out, "%.*s", (int)t.size, t.data);
    qt_free(t.data);
    return out;
}

/* Cases in which published tokenizers gave other ids with other libraries. */
static void test_cases(void **state)
{
    /* DeepSeek V3: a symbol of Unicode 14 belongs to the blank before it. */
    static const char deepseek[] =
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}"
        "\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
    const struct qt_unicode_known known[] = {qt_unicode_known_to_pcre2(), {0}, {3, false}};
    (void)state;
    for (size_t i = 0; i < 3; i++) {
        assert_string_equal(ranges(deepseek, " \xf0\x9f\xab\xa8", known[i]), "0-5 ");
        assert_string_equal(ranges(deepseek, "a \xf0\x9f\xa9\xb7!", known[i]), "0-1 1-7 ");
        /* Falcon: punctuation of Unicode 14. */
        assert_string_equal(ranges("[\\p{P}$+<=>^`|~]", "a  \xd8\x9dx", known[i]), "3-5 ");
    }
    /* Qwen3: U+08D3 of Unicode 11 has class 220, U+0650 has 32. */
    assert_string_equal(normalized("a\xe0\xa3\x93\xd9\x90", QT_NFC), "a\xd9\x90\xe0\xa3\x93");
    /* Claude: a digit of Unicode 13. */
    assert_string_equal(normalized("\xf0\x9f\xaf\xb0", QT_NFKC), "0");
    /* Unicode 16: U+105D2 U+0307 compose to U+105C9; Garay has case. */
    assert_string_equal(normalized("\xf0\x90\x97\x92\xcc\x87", QT_NFC), "\xf0\x90\x97\x89");
    assert_string_equal(normalized("\xf0\x90\x97\x89", QT_NFD), "\xf0\x90\x97\x92\xcc\x87");
    struct qt_text t = {0};
    assert_int_equal(qt_unicode_lower(&t, "\xf0\x90\xb5\x90", 4, NULL), QT_OK);
    assert_memory_equal(t.data, "\xf0\x90\xb5\xb0", 4);
    qt_free(t.data);
    assert_true(qt_char_is_word(0x10d50) && !qt_char_is_word(0x1fae8) && !qt_char_is_word(0x378));
}

struct table {
    unsigned char *bits; /* [CHARS] */
    const char *text;
    unsigned char bit;
};

static void set_bits(void *ctx, size_t start, size_t end)
{
    const struct table *t = ctx;
    size_t n;
    for (size_t i = start; i < end; i += n)
        t->bits[qt_utf8_char(&n, t->text + i)] |= t->bit;
}

/* A PCRE2 that knows Unicode 9 only finds the same classes as the one that is there. */
static void test_all_characters(void **state)
{
    struct qt_text text = {0};
    struct qt_err err = {0};
    unsigned char *bits[2];
    (void)state;
    for (int32_t c = 0x80; c < CHARS; c++)
        if (c < 0xd800 || c > 0xdfff)
            assert_int_equal(qt_text_add_char(&text, c, &err), QT_OK);
    for (int k = 0; k < 2; k++) {
        assert_int_equal(qt_array_new(&bits[k], CHARS, 1, &err), QT_OK);
        for (size_t i = 0; i < CLASSES; i++) {
            struct table t = {bits[k], text.data, (unsigned char)(1 << i)};
            char pattern[16];
            snprintf(pattern, sizeof pattern, "%s+", classes[i]);
            scan(pattern, text.data, text.size,
                 k ? (struct qt_unicode_known){0} : qt_unicode_known_to_pcre2(), set_bits, &t);
        }
    }
    /* These four marks of Unicode 12 and 13 are Han; no older marks of four bytes are. */
    static const int32_t han[] = {0x16fe2, 0x16fe3, 0x16ff0, 0x16ff1};
    for (size_t i = 0; i < sizeof han / sizeof *han; i++)
        bits[0][han[i]] &= (1 << (CLASSES - 1)) - 1;
    for (int32_t c = 0; c < CHARS; c++)
        if (bits[0][c] != bits[1][c])
            print_error("U+%04X: %02x, with Unicode 9 %02x\n", (unsigned)c, bits[0][c], bits[1][c]);
    assert_memory_equal(bits[0], bits[1], CHARS);
    const char *dump = getenv("DUMP");
    if (dump) {
        FILE *f = fopen(dump, "w");
        assert_non_null(f);
        assert_int_equal(fwrite(bits[0], 1, CHARS, f), CHARS);
        assert_int_equal(fclose(f), 0);
    }
    qt_free(bits[0]);
    qt_free(bits[1]);
    qt_free(text.data);
}

/* If PCRE2 knows more than Unicode 16, later characters count as unassigned. */
static void test_later(void **state)
{
    const struct qt_unicode_known newer = {7, true};
    struct qt_text buffer = {0};
    struct qt_err err = {0};
    const char *seen;
    (void)state;
    /* U+11DE0 came with Unicode 17. */
    assert_int_equal(qt_unicode_shadow(&seen, &buffer, newer, "a\xf0\x91\xb7\xa0z", 6, &err),
                     QT_OK);
    assert_memory_equal(seen, "a\xf0\x9f\xbf\xbez", 6);
    assert_int_equal(qt_unicode_shadow(&seen, &buffer, newer, "a\xe4\xb8\x80z", 5, &err), QT_OK);
    assert_memory_equal(seen, "a\xe4\xb8\x80z", 5);
    qt_free(buffer.data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cases),
        cmocka_unit_test(test_all_characters),
        cmocka_unit_test(test_later),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
